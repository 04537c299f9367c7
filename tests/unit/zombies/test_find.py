"""Findings from a stored history."""

from __future__ import annotations

import json
from datetime import timedelta

import numpy as np
import pytest

from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.model.finding import plain
from slurm_affinode.zombies import explain, find
from slurm_affinode.zombies.find import Request

from .zombie_history import END, Site, computes, idle_findings, squats, unmeasured, unused, used_once


def test_squatter_is_found_and_busy_job_is_not(site: Site) -> None:
    """Both hold the memory, but only one computes."""
    site.job(1, [squats])
    site.job(2, [computes], node="g2")
    (idle_finding,) = idle_findings(site.find())
    assert (idle_finding.kind, idle_finding.job and idle_finding.job.job_id, idle_finding.source) == (
        "squatter",
        1,
        "history",
    )
    assert idle_finding.window_s == pytest.approx(4 * 3600, abs=61)
    assert idle_finding.held_gpu_hours == pytest.approx(4, abs=0.02)
    assert idle_finding.held_gib_hours == pytest.approx(4 * 79_000 / 1024, rel=0.01)
    assert {row.dimension for row in idle_finding.evidence if row.met} == {"memory", "compute", "time", "state"}


@pytest.mark.parametrize("deleted", [False, True], ids=["truncated", "deleted"])
def test_damaged_part_is_named(site: Site, *, deleted: bool) -> None:
    """As in a report: an error, and no findings without its samples."""
    site.job(1, [squats])
    site.write()
    (part,) = site.config.history_dir.rglob("part-*.parquet")
    if deleted:
        part.unlink()
    else:
        part.write_bytes(part.read_bytes()[:-1000])
    with pytest.raises(UnreachableError, match=part.name):
        find.find(site.config, Request(), now=END)
    with pytest.raises(UnreachableError, match=part.name):
        explain.explain(site.config, "1", now=END)


def test_kinds_that_need_live_data_are_noted(site: Site) -> None:
    """An empty list does not mean that there are none."""
    site.job(1, [squats])
    assert site.find(kinds=("model-server", "squatter", "completing")).notes[-1:] == (
        "model-server, completing: searched only with --live",
    )
    assert not any("--live" in note for note in site.find(kinds=("squatter",)).notes)


def test_unmeasured_gpu_is_not_reported(site: Site) -> None:
    """A GPU with full memory and no activity signal is unknown and counted as such."""
    site.job(1, [unmeasured])
    site.job(2, [squats, unmeasured], node="g2")
    site.job(3, [squats, None], node="g3")
    findings = site.find()
    assert [idle_finding.job and idle_finding.job.job_id for idle_finding in idle_findings(findings)] == [2, 3]
    for item in idle_findings(findings):
        assert [gpu.gpu for gpu in item.flagged_gpus] == ["0"]
        assert any("not measured" in row.text for row in item.unknown)
    assert findings.unmeasured == 3


def test_variants_of_idle_allocations(site: Site) -> None:
    """Never used, used once, two of eight used."""
    site.job(1, [unused, unused])
    site.job(2, [used_once], node="g2")
    site.job(3, [computes] * 2 + [unused] * 6, node="g3")
    variants = {
        idle_finding.job.job_id: idle_finding.variant for idle_finding in idle_findings(site.find()) if idle_finding.job
    }
    assert variants == {1: "never-used", 2: "used-once", 3: "partly-used"}
    partly = next(idle_finding for idle_finding in idle_findings(site.find()) if idle_finding.variant == "partly-used")
    assert len(partly.flagged_gpus) == 6
    assert partly.allocated_gpus == 8


def test_use_before_the_interval_counts(site: Site) -> None:
    """Whether a GPU was ever used depends on the whole attempt."""
    site.job(1, [used_once], hours=60)
    site.job(2, [unused], hours=60, node="g2")
    findings = site.find(since=END - timedelta(hours=10))
    assert {
        idle_finding.job.job_id: idle_finding.variant for idle_finding in idle_findings(findings) if idle_finding.job
    } == {1: "used-once", 2: "never-used"}
    assert {round(idle_finding.window_s / 3600) for idle_finding in idle_findings(findings)} == {10}


@pytest.mark.parametrize("hole", [(0, 90), (60, 90)])
def test_never_used_requires_complete_samples(site: Site, hole: tuple[int, int]) -> None:
    """If the history starts late or has a gap, the GPU is idle now and unknown before."""
    site.job(1, [unused])
    start = END - timedelta(hours=4)
    low, high = (start + timedelta(minutes=minute) for minute in hole)
    site.samples = [sample for sample in site.samples if not low <= sample["time"] < high]
    (idle_finding,) = idle_findings(site.find())
    assert (idle_finding.kind, idle_finding.variant) == ("idle-allocation", "idle")
    assert idle_finding.score == pytest.approx(0.8)


def test_suspended_job_is_not_reported(site: Site) -> None:
    """Slurm stopped it."""
    site.job(1, [squats], state="SUSPENDED")
    site.job(2, [unused], state="SUSPENDED", node="g2")
    assert not idle_findings(site.find())
    assert site.explain("1").answer == "There are no findings for this job: it is SUSPENDED, and cannot compute."


@pytest.mark.parametrize(("suspended_h", "hours"), [(0, 4), (1, 3), (3.9, None)])
def test_time_in_which_slurm_had_suspended_a_job_is_not_idle(
    site: Site, suspended_h: float, hours: float | None
) -> None:
    """Accounting has only the sum: the program may have been suspended in the idle window."""
    site.job(1, [squats], suspended_s=round(suspended_h * 3600))
    result = [idle_finding.window_s for idle_finding in idle_findings(site.find())]
    assert result == ([] if hours is None else [pytest.approx(hours * 3600, abs=61)])


def test_one_busy_signal_makes_a_gpu_busy(site: Site) -> None:
    """The tensor cores are busy while NVML reports 0 % utilization."""
    site.job(1, [lambda minute: {**squats(minute), "tensor_active": 0.3}])
    assert not idle_findings(site.find())


def test_gap_restarts_the_idle_window(site: Site) -> None:
    """The time between two samples far apart is unknown, not idle."""
    site.job(1, [lambda minute: squats(minute) if minute < 100 or minute > 200 else unmeasured(minute)])
    (idle_finding,) = idle_findings(site.find(window_s=1800))
    assert idle_finding.window_s == pytest.approx(39 * 60, abs=61)
    assert not idle_findings(site.find(window_s=3000))


def test_job_that_computes_again_is_not_reported(site: Site) -> None:
    """It was idle for hours before."""
    site.job(1, [lambda minute: computes(minute) if minute > 237 else squats(minute)])
    assert not idle_findings(site.find())


def test_samples_that_end_before_the_job_are_unknown(site: Site) -> None:
    """The exporter of one node died; another node's samples continue."""
    site.job(1, [squats])
    site.samples = [row for row in site.samples if row["time"] < END - timedelta(hours=1)]
    site.job(2, [computes], node="g2")
    assert not idle_findings(site.find())


@pytest.mark.parametrize(
    ("state", "share", "kind"),
    [("TIMEOUT", 1.0, "squatter"), ("OUT_OF_MEMORY", 0.99, "squatter"), ("FAILED", 0.5, "idle-allocation"),
     ("COMPLETED", 1.0, "idle-allocation")],
)  # fmt: skip
def test_ended_jobs_are_classified_by_state(site: Site, state: str, share: float, kind: str) -> None:
    """A squatter that ended at its limit remains one; otherwise it is an idle allocation."""
    site.job(1, [squats], state=state, end=END - timedelta(minutes=1), timelimit_s=int(4 * 3600 / share))
    (idle_finding,) = idle_findings(site.find())
    assert idle_finding.kind == kind


def test_filters(site: Site) -> None:
    """By user, node, kind, variant, score, partition and account."""
    site.job(1, [squats])
    site.job(2, [unused], node="g2", user="bob")
    assert len(idle_findings(site.find(users=("bob",)))) == 1
    assert len(idle_findings(site.find(nodes=("g1",)))) == 1
    assert len(idle_findings(site.find(kinds=("idle-allocation",), variants=frozenset({"used-once"})))) == 0
    assert len(idle_findings(site.find(kinds=("squatter",)))) == 1
    assert len(idle_findings(site.find(min_score=1.0, partitions=("gpu",), accounts=("lab",)))) == 2


def test_old_history_is_evaluated_at_its_end(site: Site) -> None:
    """The age is reported; nothing is assumed about the time after it."""
    site.job(1, [squats])
    site.write()
    findings = find.find(site.config, Request(), now=END + timedelta(days=3))
    assert len(idle_findings(findings)) == 1
    assert any("metrics end" in note and "ago" in note for note in findings.notes)


def test_missing_accounting_is_an_error_with_hint(site: Site) -> None:
    with pytest.raises(AffinodeError) as caught:
        find.find(site.config, Request(), now=END)
    assert "ingest sacct" in str(caught.value.hint)


def test_finding_keys_are_stable_and_unique(site: Site) -> None:
    """The JSON form has them."""
    site.job(1, [squats])
    site.job(2, [unused], node="g2", job_name="<script>\x1b[31m")
    first, second = (site.find() for _ in range(2))
    assert [finding.key for finding in first.findings] == [finding.key for finding in second.findings]
    assert len({finding.key for finding in first.findings}) == len(first.findings)
    row = idle_findings(first)[0].as_json()
    assert row["subject"]["type"] == "job"
    assert row["key"] == idle_findings(first)[0].key


def test_numpy_scalars_are_converted_to_json() -> None:
    values = (np.bool_(True), np.int64(3), np.float64(0.5), np.float64("nan"))
    assert json.dumps(plain(values)) == "[true, 3, 0.5, null]"


@pytest.mark.parametrize(("seen", "noted"), [(2.0, True), (3.9, False)])
def test_running_jobs_count_up_to_the_end_of_accounting(site: Site, seen: float, noted: bool) -> None:
    """The history may continue, but whether the job does is unknown. ``seen``: hours for which it had run."""
    site.job(1, [squats], elapsed_s=int(seen * 3600))
    findings = site.find()
    assert any(note.startswith("accounting is known up to 2") for note in findings.notes) is noted
    (idle_finding,) = idle_findings(findings)
    assert idle_finding.held_gpu_hours == pytest.approx(seen, abs=0.02)
    assert any(note.startswith("accounting is known up to 2") for note in site.explain("1").notes) is noted


def test_unmeasured_samples_are_not_bridged(site: Site) -> None:
    """Activity in every third sample, memory in all: idle for a minute at a time, so it is not a squatter."""
    site.job(1, [lambda minute: {"util_pct": None if minute % 3 else 0.0, "fb_used_mib": 79_000.0}], hours=6)
    assert not idle_findings(site.find())


def test_score_of_mostly_unknown_job_is_limited(site: Site) -> None:
    """One of six hours was measured: the evidence shows it, and the score is at most a third."""
    site.job(1, [lambda minute: {"util_pct": None if minute < 300 else 0.0, "fb_used_mib": 79_000.0}], hours=6)
    (idle_finding,) = idle_findings(site.find())
    (measured,) = (row for row in idle_finding.evidence if row.dimension == "measured")
    assert measured.text.startswith("17 % of the examined GPU time")
    assert idle_finding.score == pytest.approx(1 / 3, abs=0.01)
    assert idle_finding.held_gpu_hours == pytest.approx(1, abs=0.02)
