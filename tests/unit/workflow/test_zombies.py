"""Findings from a stored history: who is found, who is not, and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from slurm_affinode.config import Config, StoreConfig
from slurm_affinode.core.explanation import Explanation
from slurm_affinode.errors import AffinodeError
from slurm_affinode.history.schema import SAMPLES
from slurm_affinode.history.store import SampleStore
from slurm_affinode.model.finding import Finding, plain
from slurm_affinode.slurm import sacct
from slurm_affinode.slurm.schema import JOBS, conform
from slurm_affinode.store.repository import Repository
from slurm_affinode.workflow import zombie_averages, zombie_explain, zombies
from slurm_affinode.workflow.zombies import Request
from slurm_affinode.zombieconfig import MisfitConfig, NodeClass

END = datetime(2026, 11, 2, 12, tzinfo=UTC)
Values = Callable[[int], dict[str, float | None]]
"""Minute of the run -> metrics."""


class Site:
    """A cluster with a history of some hours, a sample a minute."""

    def __init__(self, root: Path) -> None:
        self.config = replace(Config(), store=StoreConfig(state_dir=root))
        self._samples: list[dict[str, Any]] = []
        self._jobs: list[dict[str, Any]] = []

    def job(
        self, number: int, gpus: Sequence[Values | None], *, hours: float = 4, node: str = "g1", **more: Any
    ) -> None:
        """A job that runs until the end; ``None``: a GPU without a history."""
        start = END - timedelta(hours=hours)
        row = {"cluster": "c", "job_id": number, "submit": start, "start": start, "user": "ann", "account": "lab",
               "partition": "gpu", "state": "RUNNING", "gpus": len(gpus), "nodes": 1, "node_list": node,
               "timelimit_s": int(hours * 3600), "gpu_type": "a100", **more}  # fmt: skip
        self._jobs.append(row)
        for index, values in enumerate(gpus):
            for minute in range(int(hours * 60) if values is not None else 0):
                assert values is not None
                sample = {"cluster": "c", "node": node, "uuid": f"GPU-{node}-{number}-{index}", "index": index,
                          "model": "NVIDIA A100-SXM4-80GB", "time": start + timedelta(minutes=minute),
                          "fb_total_mib": 81920.0, "job": str(number), **values(minute)}  # fmt: skip
                self._samples.append(sample)

    def waits(self, number: int, since_h: float, **more: Any) -> None:
        """A job in the queue."""
        row = {"cluster": "c", "job_id": number, "submit": END - timedelta(hours=since_h), "state": "PENDING",
               "eligible": END - timedelta(hours=since_h), "partition": "gpu", "req_gpus": 1, **more}  # fmt: skip
        self._jobs.append(row)

    def find(self, **asked: Any) -> zombies.Found:
        """What is found at the end of the history."""
        self._write()
        return zombies.find(self.config, Request(**asked), now=END)

    def explain(self, job: str) -> Explanation:
        """The page of a job."""
        self._write()
        return zombie_explain.explain(self.config, job, now=END)

    def _write(self) -> None:
        types = {name: dtype for name, dtype in JOBS.items() if any(name in row for row in self._jobs)}
        frame = pl.DataFrame(self._jobs, schema_overrides=types, infer_schema_length=None)
        with Repository.open(self.config.db_url) as store:
            store.upsert(conform(frame, JOBS))
        if self._samples:
            with closing(SampleStore(self.config.history_dir)) as history:
                rows = pl.DataFrame(self._samples, infer_schema_length=None)
                known = [
                    (pl.col(n) if n in rows.columns else pl.lit(None)).cast(t).alias(n) for n, t in SAMPLES.items()
                ]
                history.ingest(rows.select(known), source="test")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """An empty cluster."""
    return Site(tmp_path)


def squats(_: int) -> dict[str, float | None]:
    """Memory is full, nothing computes."""
    return {"util_pct": 0.0, "fb_used_mib": 79_000.0, "power_w": 62.0}


def computes(_: int) -> dict[str, float | None]:
    """A framework that allocates beforehand: 97 % of the memory, 98.6 % utilization."""
    return {"util_pct": 98.6, "fb_used_mib": 0.97 * 81_920, "power_w": 390.0}


def unused(_: int) -> dict[str, float | None]:
    """Nobody is on it."""
    return {"util_pct": 0.0, "fb_used_mib": 400.0, "power_w": 55.0}


def unmeasured(_: int) -> dict[str, float | None]:
    """Memory is full, activity is not measured."""
    return {"util_pct": None, "fb_used_mib": 79_000.0}


def used_once(minute: int) -> dict[str, float | None]:
    """Busy for an hour."""
    return {"util_pct": 90.0 if minute < 60 else 0.0, "fb_used_mib": 500.0}


def _idle(found: zombies.Found) -> list[Finding]:
    return [one for one in found.findings if one.kind in ("squatter", "idle-allocation")]


def test_a_squatter_is_found_and_who_computes_is_not(site: Site) -> None:
    """The one holds its memory for nothing, the other pre-allocates and computes."""
    site.job(1, [squats])
    site.job(2, [computes], node="g2")
    (one,) = _idle(site.find())
    assert (one.kind, one.job and one.job.job_id, one.source) == ("squatter", 1, "history")
    assert one.window_s == pytest.approx(4 * 3600, abs=61)
    assert one.held_gpu_hours == pytest.approx(4, abs=0.02)
    assert one.held_gib_hours == pytest.approx(4 * 79_000 / 1024, rel=0.01)
    assert {row.dimension for row in one.evidence if row.met} == {"memory", "compute", "time", "state"}


def test_a_gpu_that_was_not_measured_is_not_accused(site: Site) -> None:
    """Full memory and no activity signal: unknown, said so."""
    site.job(1, [unmeasured])
    site.job(2, [squats, unmeasured], node="g2")
    site.job(3, [squats, None], node="g3")
    found = site.find()
    assert [one.job and one.job.job_id for one in _idle(found)] == [2, 3]
    for one in _idle(found):
        assert [gpu.gpu for gpu in one.flagged_gpus] == ["0"]
        assert any("not measured" in row.text for row in one.unknown)
    assert found.unmeasured == 3


def test_kinds_of_idle_allocations(site: Site) -> None:
    """Never used, used once, two of eight used."""
    site.job(1, [unused, unused])
    site.job(2, [used_once], node="g2")
    site.job(3, [computes] * 2 + [unused] * 6, node="g3")
    variants = {one.job.job_id: one.variant for one in _idle(site.find()) if one.job}
    assert variants == {1: "never-used", 2: "used-once", 3: "partly-used"}
    partly = next(one for one in _idle(site.find()) if one.variant == "partly-used")
    assert len(partly.flagged_gpus) == 6
    assert partly.allocated_gpus == 8


def test_what_was_used_before_the_interval_was_used(site: Site) -> None:
    """The interval begins later than the job: whether it was ever used is a matter of the whole run."""
    site.job(1, [used_once], hours=60)
    site.job(2, [unused], hours=60, node="g2")
    found = site.find(since=END - timedelta(hours=10))
    assert {one.job.job_id: one.variant for one in _idle(found) if one.job} == {1: "used-once", 2: "never-used"}
    assert {round(one.window_s / 3600) for one in _idle(found)} == {10}


@pytest.mark.parametrize("hole", [(0, 90), (60, 90)])
def test_what_was_not_seen_from_its_begin_is_not_called_never_used(site: Site, hole: tuple[int, int]) -> None:
    """The history begins later than the job, or has a hole: idle now, and before it is unknown."""
    site.job(1, [unused])
    start = END - timedelta(hours=4)
    low, high = (start + timedelta(minutes=minute) for minute in hole)
    site._samples = [one for one in site._samples if not low <= one["time"] < high]
    (one,) = _idle(site.find())
    assert (one.kind, one.variant) == ("idle-allocation", "idle")
    assert one.score == pytest.approx(0.8)


def test_a_suspended_job_is_not_found(site: Site) -> None:
    """Slurm stopped it: that it does not compute is not its fault."""
    site.job(1, [squats], state="SUSPENDED")
    site.job(2, [unused], state="SUSPENDED", node="g2")
    assert not _idle(site.find())
    assert site.explain("1").answer == "Nothing is held against this job: it is SUSPENDED, and cannot compute."


def _share(site: Site, values: Values, *jobs: int) -> None:
    """Jobs with a part of one GPU, which the labels name."""
    site.job(jobs[0], [values])
    sample = [row for row in site._samples if row["job"] == str(jobs[0])]
    for number in jobs[1:]:
        site.job(number, [])
        site._samples += [{**row, "job": str(number)} for row in sample]
    for row in site._jobs:
        row.update(gpus=0)


def test_samples_of_a_shared_gpu_say_nothing_of_who_holds_its_memory(site: Site) -> None:
    """While nobody computes none of the jobs does; that is all. Where somebody computes each of them is unknown."""
    _share(site, squats, 1, 2)
    found = site.find()
    assert [(one.kind, one.variant, one.held_gpu_hours, one.impact) for one in _idle(found)] == [
        ("idle-allocation", "never-used", None, None)
    ] * 2
    assert {gpu.held_gib for one in _idle(found) for gpu in one.gpus} == {None}
    assert [row.fits for row in site.explain("1").gpus[0].verdicts] == [False, True, False, True]


def test_a_job_beside_one_that_computes_is_unknown(site: Site) -> None:
    """Also where it was another that computed before."""
    _share(site, computes, 1, 2)
    assert not _idle(site.find())
    page = site.explain("2")
    assert page.answer == "Nothing is held against this job: what its GPUs did was not measured."


def test_a_job_alone_on_its_part_is_judged_as_if_the_gpu_were_its_own(site: Site) -> None:
    """The labels name nobody else."""
    _share(site, squats, 1)
    assert [one.kind for one in _idle(site.find())] == ["squatter"]


def test_one_busy_signal_is_enough_to_be_at_work(site: Site) -> None:
    """NVML says idle, the tensor cores do not."""
    site.job(1, [lambda minute: {**squats(minute), "tensor_active": 0.3}])
    assert not _idle(site.find())


def test_the_window_begins_anew_behind_a_gap(site: Site) -> None:
    """What lies between two samples far apart is unknown, and unknown is not idle."""
    site.job(1, [lambda minute: squats(minute) if minute < 100 or minute > 200 else unmeasured(minute)])
    (one,) = _idle(site.find(window_s=1800))
    assert one.window_s == pytest.approx(39 * 60, abs=61)
    assert not _idle(site.find(window_s=3000))


def test_a_job_that_wakes_up_at_the_end_is_not_found(site: Site) -> None:
    """Idle for hours and at work again counts as at work."""
    site.job(1, [lambda minute: computes(minute) if minute > 237 else squats(minute)])
    assert not _idle(site.find())


def test_samples_that_end_long_before_the_job_say_nothing(site: Site) -> None:
    """The exporter died: the job is unknown. Another node's samples go on."""
    site.job(1, [squats])
    site._samples = [row for row in site._samples if row["time"] < END - timedelta(hours=1)]
    site.job(2, [computes], node="g2")
    assert not _idle(site.find())


@pytest.mark.parametrize(
    ("state", "share", "kind"),
    [("TIMEOUT", 1.0, "squatter"), ("OUT_OF_MEMORY", 0.99, "squatter"), ("FAILED", 0.5, "idle-allocation"),
     ("COMPLETED", 1.0, "idle-allocation")],
)  # fmt: skip
def test_ended_jobs(site: Site, state: str, share: float, kind: str) -> None:
    """A squatter that ended at its limit is one; other ends leave an allocation that was idle."""
    site.job(1, [squats], state=state, end=END - timedelta(minutes=1), timelimit_s=int(4 * 3600 / share))
    (one,) = _idle(site.find())
    assert one.kind == kind


def test_what_waits_for_the_held_gpus_is_counted(site: Site) -> None:
    """Jobs that fit: partition, number and type of GPUs; and only the time that overlaps."""
    site.job(1, [squats])
    site.waits(10, 2)
    site.waits(11, 30)
    site.waits(12, 2, req_gpus=2)
    site.waits(13, 2, partition="cpu")
    site.waits(14, 2, req_tres="cpu=1,gres/gpu=1,gres/gpu:h100=1")
    (one,) = _idle(site.find())
    assert one.impact is not None
    assert (one.impact.jobs, one.impact.startable) == (2, 1)
    assert one.impact.longest_s == pytest.approx(4 * 3600, abs=120)
    assert one.impact.waited_s == pytest.approx(6 * 3600, abs=240)
    assert set(one.impact.examples) == {"10", "11"}


def test_who_does_not_wait_for_gpus_is_not_counted(site: Site) -> None:
    """Held, waiting for others or at a limit, on more nodes; who was cancelled, or started later, waited until then."""
    site.job(1, [squats, squats])
    reasons = ("JobHeldUser", "Dependency", "BeginTime", "QOSMaxGRESPerUser", "AssocGrpGRES")
    for number, reason in enumerate(reasons):
        site.waits(20 + number, 2, reason=reason)
    site.waits(30, 2, req_gpus=2, req_tres="cpu=2,node=2,gres/gpu=2")
    site.waits(31, 3, state="CANCELLED", end=END - timedelta(hours=1), reason="None")
    later = {"state": "RUNNING", "start": END + timedelta(hours=1), "gpus": 1, "nodes": 1, "node_list": "g9"}
    site.waits(32, 1, **later)
    (one,) = _idle(site.find(until=END))
    assert one.impact is not None
    assert set(one.impact.examples) == {"31", "32"}
    assert one.impact.waited_s == pytest.approx(3 * 3600, abs=240)


def test_the_tasks_of_an_array_wait_each(site: Site) -> None:
    """Ten tasks in one record are ten jobs; of which a limit lets three run at once."""
    site.job(1, [squats] * 8)
    site.waits(10, 2, array_job_id=10, array_spec="0-9%3")
    (one,) = _idle(site.find())
    assert one.impact is not None
    assert (one.impact.jobs, one.impact.startable, one.impact.examples) == (10, 3, ("10_[0-9%3]",))
    assert one.impact.waited_s == pytest.approx(20 * 3600, abs=2400)
    assert one.impact.longest_s == pytest.approx(2 * 3600, abs=120)


def test_of_a_running_job_accounting_does_not_know_what_it_uses(site: Site) -> None:
    """sacct counts the steps that have ended: 0 of a job that is one step is no sign of idle cores."""
    site.config = replace(site.config, zombies=replace(site.config.zombies, nodes={"g*": NodeClass(64, 4, 512)}))
    site.job(1, [computes], cpus=32, total_cpu_s=0.0)
    site.job(2, [computes], node="g2", cpus=32, total_cpu_s=60.0, end=END - timedelta(minutes=1), state="COMPLETED")
    found = [one.job.job_id for one in site.find(kinds=("cpu-cores-per-gpu",)).findings if one.job]
    assert found == [2]


def test_cpu_jobs_that_need_their_memory_are_left_alone(site: Site) -> None:
    """Memory that goes with the cores, or that needs the nodes, is in nobody's way; small users may be left out."""
    gib = 2**30
    misfits = MisfitConfig(host_memory_min_gib_hours=1)
    site.config = replace(site.config, zombies=replace(site.config.zombies, nodes={"c*": NodeClass(64, 0, 256)},
                                                       misfits=misfits))  # fmt: skip
    cpu = {"partition": "cpu", "end": END - timedelta(minutes=1), "state": "COMPLETED", "total_cpu_s": 4 * 3600.0}
    site.job(1, [], node="c1", cpus=8, alloc_mem_bytes=200 * gib, max_rss_bytes=gib, **cpu)
    site.job(2, [], node="c1", cpus=8, alloc_mem_bytes=32 * gib, max_rss_bytes=gib, **cpu)
    site.job(3, [], node="c1", cpus=64, alloc_mem_bytes=256 * gib, max_rss_bytes=gib, **cpu)
    small = {**cpu, "nodes": 2, "cpus": 8}
    site.job(4, [], node="c[1-2]", alloc_mem_bytes=400 * gib, max_rss_bytes=gib, **small)
    site.job(5, [], node="c[1-2]", alloc_mem_bytes=400 * gib, max_rss_bytes=40 * gib, **small)
    found = site.find(kinds=("host-memory", "cpu-fragmentation")).findings
    assert {(one.kind, one.job.job_id) for one in found if one.job} == {
        ("host-memory", 1), ("host-memory", 4), ("host-memory", 5), ("cpu-fragmentation", 4)
    }  # fmt: skip
    few = replace(misfits, min_core_hours=100)
    site.config = replace(site.config, zombies=replace(site.config.zombies, misfits=few))
    assert not site.find(kinds=("host-memory", "cpu-fragmentation")).findings


def test_a_finding_about_a_user_passes_the_filter_by_partition(site: Site) -> None:
    """It was made of the jobs of that partition."""
    site.config = replace(site.config, zombies=replace(site.config.zombies, misfits=MisfitConfig(user_min_gpu_hours=1)))
    site.job(1, [used_once])
    found = site.find(kinds=("low-efficiency-user",), partitions=("gpu",)).findings
    assert [one.user for one in found] == ["ann"]
    assert not site.find(kinds=("low-efficiency-user",), partitions=("cpu",)).findings


def _leaves(site: Site, number: int, node: str, after: Values, *, label: str | None = None, **more: Any) -> None:
    """A job that ended two hours ago, and what its GPU shows since."""
    over = {"end": END - timedelta(hours=2), "state": "COMPLETED", **more}
    site.job(number, [lambda minute: computes(minute) if minute < 120 else after(minute)], node=node, **over)
    for row in site._samples:
        if row["node"] == node and row["time"] >= END - timedelta(hours=2):
            row["job"] = label


def test_memory_that_a_job_left_is_found_in_the_history(site: Site) -> None:
    """No job has the GPU and its memory stays held: with the last XID; whose it is the history does not show."""
    _leaves(site, 1, "g1", lambda _: {"util_pct": 0.0, "fb_used_mib": 20_480.0, "xid": 79.0})
    _leaves(site, 2, "g2", lambda _: {"util_pct": 0.0, "fb_used_mib": 450.0})
    _leaves(site, 3, "g3", lambda minute: {"util_pct": 0.0, "fb_used_mib": 20_480.0 if minute > 200 else 450.0})
    site.job(9, [computes], node="g9", hours=0.1)
    (one,) = site.find(kinds=("orphan-memory",)).findings
    assert (one.nodes, one.gpus[0].gpu, one.gpus[0].xid, one.gpus[0].held_gib) == (("g1",), "0", 79, 20.0)
    assert one.since == END - timedelta(minutes=118)
    assert one.window_s == pytest.approx(112 * 60)  # to where accounting knows of jobs
    assert one.score == pytest.approx(0.8)
    assert {row.dimension for row in one.unknown} == {"processes"}
    assert not site.find(kinds=("squatter",)).findings


def test_memory_that_somebody_may_have_is_no_orphan(site: Site) -> None:
    """Whose GPUs are not all known, who has a part, a label of a job, what accounting does not reach: unknown."""
    held: Values = lambda _: {"util_pct": 0.0, "fb_used_mib": 20_480.0}  # noqa: E731
    _leaves(site, 1, "g1", held)
    site.job(11, [None, None], node="g1")
    _leaves(site, 2, "g2", held)
    site.job(12, [], node="g2", alloc_tres="cpu=1,gres/shard=2")
    _leaves(site, 3, "g3", held, label="777")
    assert not site.find(kinds=("orphan-memory",)).findings
    _leaves(site, 4, "g4", held)
    # The last that accounting knows of is that job 4 ended: what came later it would not know.
    assert not [one for one in site.find(kinds=("orphan-memory",)).findings if one.nodes == ("g4",)]


def test_filters(site: Site) -> None:
    """By user, node, kind, variant and score."""
    site.job(1, [squats])
    site.job(2, [unused], node="g2", user="bob")
    assert len(_idle(site.find(users=("bob",)))) == 1
    assert len(_idle(site.find(nodes=("g1",)))) == 1
    assert len(_idle(site.find(kinds=("idle-allocation",), variants=frozenset({"used-once"})))) == 0
    assert len(_idle(site.find(kinds=("squatter",)))) == 1
    assert len(_idle(site.find(min_score=1.0, partitions=("gpu",), accounts=("lab",)))) == 2


def test_an_old_history_is_looked_at_as_of_its_end(site: Site) -> None:
    """Nothing of what came later is guessed, and a person is told."""
    site.job(1, [squats])
    site._write()
    found = zombies.find(site.config, Request(), now=END + timedelta(days=3))
    assert len(_idle(found)) == 1
    assert any("ends" in note and "ago" in note for note in found.notes)


def test_no_accounting_is_an_error_with_advice(site: Site) -> None:
    """Nothing was taken in."""
    with pytest.raises(AffinodeError) as caught:
        zombies.find(site.config, Request(), now=END)
    assert "ingest sacct" in str(caught.value.hint)


def test_keys_tell_matters_apart_and_findings_have_a_json_form(site: Site) -> None:
    """The same matter has the same key whenever it is found."""
    site.job(1, [squats])
    site.job(2, [unused], node="g2", job_name="<script>\x1b[31m")
    first, second = (site.find() for _ in range(2))
    assert [one.key for one in first.findings] == [one.key for one in second.findings]
    assert len({one.key for one in first.findings}) == len(first.findings)
    row = _idle(first)[0].as_json()
    assert row["subject"]["type"] == "job"
    assert row["key"] == _idle(first)[0].key


def test_numbers_of_arrays_have_a_json_form() -> None:
    """As the numbers that they are."""
    values = (np.bool_(True), np.int64(3), np.float64(0.5), np.float64("nan"))
    assert json.dumps(plain(values)) == "[true, 3, 0.5, null]"


def test_an_explanation_says_why_nothing_is_held_against_a_job(site: Site) -> None:
    """The page of a job at work, and of one that is not measured."""
    site.job(1, [computes])
    site.job(2, [unmeasured], node="g2")
    page = site.explain("1")
    assert not page.findings
    assert "98.6" in page.gpus[0].verdicts[0].why_not
    assert len(page.gpus[0].slots) == 60
    unknown = site.explain("2")
    assert not unknown.gpus[0].gpu.measured
    assert all(one.activity_pct is None for one in unknown.gpus[0].slots)
    with pytest.raises(zombie_explain.UnknownJobError):
        site.explain("99")


def test_the_page_of_a_gpu_without_a_signal_says_what_is_missing(site: Site) -> None:
    """Activity, and not memory, which is known."""
    site.job(1, [unmeasured])
    (one,) = site.explain("1").gpus
    assert one.gpu.held_gib == pytest.approx(79_000 / 1024)
    assert [verdict.why_not for verdict in one.verdicts] == ["activity was not measured"] * 4


def test_the_time_line_of_a_short_job_has_no_holes(site: Site) -> None:
    """No more columns than there are samples; what is idle for less than the window is said so."""
    site.job(1, [squats], hours=0.5)
    page = site.explain("1")
    assert page.answer.startswith("Nothing is held against this job yet: GPU 0 on g1 does nothing for 30m of the 1h")
    assert len(page.gpus[0].slots) == 20
    assert all(slot.activity_pct == 0 for slot in page.gpus[0].slots)


def test_misfits(site: Site) -> None:
    """Too many nodes, a GPU that is too powerful, a limit far above use."""
    site.job(1, [computes, computes], nodes=2, node_list="g1,g9")
    site.job(2, [lambda _: {"util_pct": 9.0, "fb_used_mib": 900.0}], node="g2", cpus=1, max_rss_bytes=2**30)
    site.job(3, [computes], node="g3", state="COMPLETED", end=END - timedelta(minutes=2), timelimit_s=4 * 86400,
             cpus=64, total_cpu_s=3600.0)  # fmt: skip
    site.job(4, [computes], node="g3")
    site.config = replace(
        site.config,
        zombies=replace(site.config.zombies, misfits=replace(site.config.zombies.misfits, cores_per_gpu=16.0)),
    )
    kinds = {(one.job.job_id, one.kind) for one in site.find().findings if one.job}
    assert kinds >= {(1, "fragmentation"), (2, "gpu-too-powerful"), (3, "time-limit"), (3, "cpu-cores-per-gpu")}
    assert (1, "squatter") not in kinds


def test_clustercockpit_only_zero_averages_are_idle(shared_data: Path) -> None:
    """544 real jobs: an average of exactly 0 is idle, whatever the memory; any other says nothing of idle time."""
    path = shared_data / "clustercockpit" / "jobs.sqlite"
    found = zombie_averages.clustercockpit(Config(), Request(), path)
    idle = _idle(found)
    assert {one.job.job_id for one in idle if one.job} == {
        679909, 679896, 679908, 679797, 679772, 679713, 679783, 679884, 679743,
    }  # fmt: skip
    assert {one.variant for one in idle} == {"never-used"}
    assert {one.impact for one in idle} == {None}  # no submit times are in it: who waited is unknown
    assert sum(one.kind == "time-limit" for one in found.findings) == 52
    assert all(gpu.peak_pct == 0 for one in idle for gpu in one.flagged_gpus)
    # Their size is not in the data: whether their memory is full is unknown, so none is a squatter.
    assert not [one for one in found.findings if one.kind == "squatter"]
    assert len(_idle(zombie_averages.clustercockpit(Config(), Request(window_s=60), path))) == 66


def test_jobanalyzer_without_a_gpu_history_accuses_nobody(shared_data: Path, tmp_path: Path) -> None:
    """84 real GPU allocations, one of them a TIMEOUT: without measurements all are unknown, and that is said."""
    read = sacct.read(shared_data / "jobanalyzer" / "sacct_p.txt")
    config = replace(Config(), store=StoreConfig(state_dir=tmp_path))
    with Repository.open(config.db_url) as store:
        store.upsert(read.jobs, read.steps)
    since, until = datetime(2025, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)
    found = zombies.find(config, Request(since=since, until=until))
    assert found.jobs == 84
    assert not _idle(found)
    assert found.unmeasured >= 84
    assert any("no GPU history" in note for note in found.notes)
    page = zombie_explain.explain(config, "1639021", now=until)
    assert page.job.state == "TIMEOUT"
    assert not page.findings
    assert any("not known" in note for note in page.notes)


def test_jobstats_a_gpu_without_an_entry_is_not_idle(shared_data: Path, site: Site) -> None:
    """46044267 has a GPU without a utilization entry and one at 9.5 %, and ended TIMEOUT: neither GPU is accused."""
    rows = json.loads((shared_data / "jobstats" / "js1_decoded.json").read_text())
    (nodes,) = (row["stats"]["nodes"] for row in rows if "|46044267|" in row["sacct"])
    ((node, stats),) = nodes.items()

    def gpu(index: str) -> Values:
        util, used = stats.get("gpu_utilization", {}).get(index), stats["gpu_used_memory"][index] / 2**20
        return lambda _: {"util_pct": util, "fb_used_mib": used}

    assert "2" not in stats["gpu_utilization"]
    end = END - timedelta(minutes=1)
    site.job(46044267, [gpu(index) for index in stats["gpu_total_memory"]], node=node, state="TIMEOUT", end=end)
    found = site.find(window_s=600)
    assert not _idle(found)
    assert found.unmeasured == 1
