"""Parts of a GPU in a stored history: samples of the whole say little of who has a part."""

from __future__ import annotations

from zombie_history import Site, Values, computes, idle_findings, squats


def share(site: Site, values: Values, *jobs: int) -> None:
    """Jobs with a part of one GPU, which the labels name."""
    site.job(jobs[0], [values])
    sample = [row for row in site.samples if row["job"] == str(jobs[0])]
    for number in jobs[1:]:
        site.job(number, [])
        site.samples += [{**row, "job": str(number)} for row in sample]
    for row in site.jobs:
        row.update(gpus=0)


def test_samples_of_a_shared_gpu_say_nothing_of_who_holds_its_memory(site: Site) -> None:
    """While nobody computes none of the jobs does; that is all. Where somebody computes each of them is unknown."""
    share(site, squats, 1, 2)
    found = site.find()
    assert [(one.kind, one.variant, one.held_gpu_hours, one.impact) for one in idle_findings(found)] == [
        ("idle-allocation", "never-used", None, None)
    ] * 2
    assert {gpu.held_gib for one in idle_findings(found) for gpu in one.gpus} == {None}
    assert [row.fits for row in site.explain("1").gpus[0].verdicts] == [False, True, False, True]


def test_a_job_beside_one_that_computes_is_unknown(site: Site) -> None:
    """Also where it was another that computed before."""
    share(site, computes, 1, 2)
    assert not idle_findings(site.find())
    page = site.explain("2")
    assert page.answer == "Nothing is held against this job: what its GPUs did was not measured."


def test_a_job_alone_on_its_part_is_judged_as_if_the_gpu_were_its_own(site: Site) -> None:
    """The labels name nobody else."""
    share(site, squats, 1)
    assert [one.kind for one in idle_findings(site.find())] == ["squatter"]
