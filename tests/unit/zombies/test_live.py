"""Live findings: one query to Slurm, one to each node; a node that does not respond is unknown."""

from __future__ import annotations

import contextlib
import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from fake_http import Answer, serving

from slurm_affinode.base.config import Config, StoreConfig, ZombiesConfig
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.core.cleanup_plan import matches
from slurm_affinode.core.explanation import Explanation
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.model.cleanup import Match
from slurm_affinode.model.cluster import GpuCount, Job, NodeGpus
from slurm_affinode.model.finding import NodeRef, ProcessRef
from slurm_affinode.suspension import messages
from slurm_affinode.zombies import explain, nodes, orphans
from slurm_affinode.zombies import find as findings
from slurm_affinode.zombies.nodes import EndedServer, LiveGpu, LiveProcess, NodeAnswer, exposed, from_agent

from .zombie_live_site import NOW, Slurm, client, find, gpu, job, node, process, sampler, waiting


def explained(tmp_path: Path, samples: list[list[LiveGpu]], *, by: str = "agent", **options: Any) -> Explanation:
    """Return the live page of job 1."""
    config = dataclasses.replace(Config(), store=StoreConfig(state_dir=tmp_path))
    slurm = Slurm((job(1), job(2, node_gpus=(NodeGpus("g1", 1, "a100", (1,)),))), (node(),))
    return explain.explain_live(config, "1", sampler(samples, by), slurm=client(slurm), **options)


def test_squatter_is_found_by_watching_longer_than_the_window(tmp_path: Path) -> None:
    """Pending jobs are counted; Slurm is queried before and after, independent of the numbers of jobs and samples."""
    slurm = Slurm((job(1), *(waiting(n) for n in range(10, 15))), (node(),))
    result = find(tmp_path, slurm, [[gpu()]])
    (finding,) = result.findings
    assert (finding.kind, finding.source, finding.job.id, finding.window_s) == ("squatter", "live", "1", 10.0)
    assert (finding.impact.jobs, finding.impact.startable) == (5, 1)
    assert slurm.queries == ["overview", "nodes", "overview"]


@pytest.mark.parametrize(
    "later",
    [
        (),
        (job(1, "CANCELLED", end=NOW),),
        (job(1, start=NOW + timedelta(seconds=4)),),
        (job(1, "COMPLETED", end=NOW), job(2, start=NOW + timedelta(seconds=4))),
    ],
)
def test_job_that_ends_while_watched_is_not_reported(tmp_path: Path, later: tuple[Job, ...]) -> None:
    """Nor is its idle time assigned to the next job on its GPU, or to its own next attempt."""
    result = find(tmp_path, Slurm((job(1),), (node(),), later), [[gpu()]])
    assert not {"squatter", "idle-allocation"} & set(result.counts)


def test_single_sample_has_no_duration(tmp_path: Path) -> None:
    """Nothing is reported, and a note proposes ``--watch``."""
    result = find(tmp_path, Slurm((job(1),), (node(),)), [[gpu()]], watch_s=None)
    assert result.findings == ()
    assert any("--watch" in note for note in result.notes)


def test_live_explain_without_history_watches_the_job(tmp_path: Path) -> None:
    """It samples as long as a short window needs and plots the samples."""
    page = explained(tmp_path, [[gpu(), gpu(1, util=99.0)]], window_s=5.0)
    assert [(finding.kind, finding.source) for finding in page.findings] == [("squatter", "live")]
    assert page.answer == "GPU memory is held and nothing computes."
    (item,) = page.gpus
    assert (item.gpu.gpu, item.gpu.flagged, page.watched_s) == ("0", True, 7.0)
    assert [slot.activity_pct for slot in item.slots] == [None] * 59 + [0.0]
    assert page.as_json()["answer"] == page.answer


@pytest.mark.parametrize("known", [True, False])
def test_sleep_is_taken_from_the_agent_and_not_from_the_comment(tmp_path: Path, known: bool) -> None:
    """Users can change the comment of their jobs."""
    config = dataclasses.replace(Config(), store=StoreConfig(state_dir=tmp_path))
    slurm = Slurm((job(1, comment=f"{messages.ASLEEP}idle"),), (node(),))
    page = explain.explain_live(
        config,
        "1",
        sampler([[gpu()]]),
        slurm=client(slurm),
        sleeps=lambda _, name, number: known and (name, number) == ("g1", 1),
    )
    assert page.asleep is known


@pytest.mark.parametrize(
    ("options", "seen"),
    [({"window_s": 3600.0}, "sampled once"), ({}, "sampled once"), ({"watch_s": 10.0}, "observed for 10s")],
)
def test_short_watch_is_inconclusive(tmp_path: Path, options: dict[str, Any], seen: str) -> None:
    """The answer says that the GPU is idle now, and names the window that is needed."""
    page = explained(tmp_path, [[gpu()]], **options)
    assert not page.findings
    assert page.answer == (
        f"Not observed long enough: GPU 0 on g1 is idle now, {seen}, but not for the 1h that squatter requires."
    )


def test_duration_of_single_sample_does_not_count(tmp_path: Path) -> None:
    """Nodes that respond slowly have not been watched."""
    slow = sampler([[gpu()]])

    def ask(name: str) -> NodeAnswer:
        slow.sleep(1.5)
        return slow.ask(name)

    config = dataclasses.replace(Config(), store=StoreConfig(state_dir=tmp_path))
    opened = client(Slurm((job(1),), (node(),)))
    page = explain.explain_live(config, "1", dataclasses.replace(slow, ask=ask), slurm=opened)
    assert "sampled once" in page.answer
    assert not any("whether GPUs are idle is unknown" in note for note in page.notes)


def test_busy_and_unmeasured_jobs_have_different_answers(tmp_path: Path) -> None:
    assert explained(tmp_path, [[gpu(util=80.0)]], window_s=5.0).answer == "There are no findings for this job."
    dark = explained(tmp_path, [[gpu(util=None)]], window_s=5.0)
    assert dark.answer == "There are no findings for this job: its GPUs were not measured."
    unmeasured = explained(tmp_path, [[]], by="", window_s=5.0)
    assert unmeasured.answer == dark.answer
    assert any("no route to host" in note for note in unmeasured.notes)


def shard(number: int, **more: Any) -> Job:
    """A job with shards of GPU 0."""
    return job(number, gpus_allocated=None, node_gpus=None, tres_allocated={"cpu": "1", "gres/shard": "2"}, **more)


def on(number: int, sm: float | None, used: float | None = 50_000.0, pid: int = 42) -> LiveProcess:
    """A process of a job, identified by its cgroup."""
    return process(pid=pid, job=number, source="cgroup", used_mib=used, sm_pct=sm, memory_pct=sm)


def test_jobs_on_shared_gpu_are_judged_by_their_processes(tmp_path: Path) -> None:
    """An idle job is reported beside a busy one; its GPU-hours are not computed."""
    samples = [[gpu(util=90.0, processes=(on(1, 0.0), on(2, 80.0, pid=43)))]]
    result = find(tmp_path, Slurm((shard(1), shard(2), waiting(9)), (node(),)), samples)
    (finding,) = result.findings
    assert (finding.kind, finding.job.id, finding.held_gpu_hours, finding.impact) == ("squatter", "1", None, None)
    (its,) = finding.gpus
    assert (its.shared, its.flagged, its.peak_pct) == (True, True, 0.0)
    assert its.held_gib == pytest.approx(48.8, abs=0.1)
    assert any(row.dimension == "shared" for row in finding.evidence)


def test_indistinguishable_jobs_on_shared_gpu_are_not_reported(tmp_path: Path) -> None:
    """The driver does not attribute activity or memory to processes; the job in a process's environment is not
    trusted.
    """
    busy, idle = (
        find(tmp_path, Slurm((shard(1), shard(2)), (node(),)),
             [[gpu(util=util, processes=(on(1, None), on(2, None, None, 43)))]])
        for util in (90.0, 0.0)
    )  # fmt: skip
    assert busy.findings == ()
    assert any("1, 2: activity on shared GPUs is unknown" in note for note in busy.notes)
    # On an idle GPU all jobs are idle; the memory of the second one is still unknown.
    assert {(finding.job.id, finding.kind) for finding in idle.findings} == {
        ("1", "squatter"),
        ("2", "idle-allocation"),
    }
    own_word = process(job=1, source="environment", sm_pct=0.0, memory_pct=0.0)
    result = find(tmp_path, Slurm((shard(1),), (node(),)), [[gpu(util=0.0, processes=(own_word,))]])
    assert result.findings == ()


def test_shard_without_process_is_idle(tmp_path: Path) -> None:
    """Only if all processes are known and none is the job's; otherwise it is unknown."""
    works = on(2, 80.0, pid=43)
    samples = [[gpu(util=90.0, processes=(works,))]]
    (finding,) = find(tmp_path, Slurm((shard(1), shard(2)), (node(),)), samples).findings
    assert (finding.kind, finding.job.id, finding.held_gpu_hours) == ("idle-allocation", "1", None)
    assert [(its.gpu, its.held_gib, its.peak_pct, its.shared) for its in finding.gpus] == [("?", 0.0, 0.0, True)]
    unidentified = process(pid=44, job=None, source=None)
    in_container = process(pid=44, job=None, source=None, uid=165536, user="165536")
    names_another = process(pid=44, job=2, source="environment")
    for processes in (None, *((works, other) for other in (unidentified, in_container, names_another))):
        assert (
            find(tmp_path, Slurm((shard(1), shard(2)), (node(),)), [[gpu(util=90.0, processes=processes)]]).findings
            == ()
        )


def test_job_that_computes_in_the_last_sample_is_busy(tmp_path: Path) -> None:
    result = find(tmp_path, Slurm((job(1),), (node(),)), [[gpu()], [gpu()], [gpu(util=80.0)]])
    assert result.findings == ()


def test_node_that_does_not_respond_is_unknown(tmp_path: Path) -> None:
    result = find(tmp_path, Slurm((job(1),), (node(),)), [[]], by="")
    assert result.findings == ()
    assert any(note.startswith("g1 is unknown") for note in result.notes)


@pytest.mark.parametrize("jobs", [(), (waiting(1),)])
def test_job_that_has_not_started_has_no_live_page(tmp_path: Path, jobs: tuple[Job, ...]) -> None:
    """The error names Slurm, not the database."""
    config = dataclasses.replace(Config(), store=StoreConfig(state_dir=tmp_path))
    slurm = client(Slurm(jobs, (node(),)))
    with pytest.raises(explain.NoAttemptError, match="Slurm knows no job 1 that has started"):
        explain.explain_live(config, "1", sampler([[gpu()]]), slurm=slurm, window_s=5.0)


@pytest.mark.parametrize("flag", ["POWERED_DOWN", "POWERING_DOWN", "POWERING_UP"])
def test_powered_down_node_is_not_queried(tmp_path: Path, flag: str) -> None:
    """A cloud has hundreds of them; each would time out and be reported as unknown."""
    off = node("g2", state="IDLE", flags=frozenset({"CLOUD", flag}))
    result = find(tmp_path, Slurm((), (node(), off)), [[]], watch_s=None, by="")
    assert [note for note in result.notes if "g1" in note]
    assert not [note for note in result.notes if "g2" in note]


def test_gpu_that_stops_responding_is_unknown(tmp_path: Path) -> None:
    """It responded to the first of two samples."""
    assert find(tmp_path, Slurm((job(1),), (node(),)), [[gpu()], []]).findings == ()


def test_process_of_ended_job_is_orphaned(tmp_path: Path) -> None:
    left = process(job=7, source="environment")
    result = find(tmp_path, Slurm((), (node(),)), [[gpu(processes=(left,))]])
    (finding,) = result.findings
    assert finding.kind == "orphan-process"
    assert finding.subject == ProcessRef("g1", 42, 777, "python x.py", 1001, "7")
    assert finding.key == "c/orphan-process/process:g1:42:777"


SERVER = EndedServer("127.0.0.1:8000", ("vllm m",), (41,), NOW - timedelta(minutes=5))


def test_process_that_lost_its_server_in_a_running_job_is_an_orphaned_engine(tmp_path: Path) -> None:
    """It counts for its job, whose other processes are not listed."""
    left = process(job=1, source="cgroup", server=SERVER, used_mib=2048.0)
    other = process(pid=43, job=1, source="cgroup")
    result = find(tmp_path, Slurm((job(1),), (node(),)), [[gpu(processes=(left, other))]])
    (finding,) = (item for item in result.findings if item.kind == "orphaned-engine")
    assert (finding.kind, finding.user, finding.score, finding.since) == (
        "orphaned-engine",
        job(1).user,
        1.0,
        SERVER.end,
    )
    assert finding.owner is not None
    assert (finding.owner.job_id, finding.job, finding.diagnosis) == (1, None, "orphaned-engine")
    assert finding.key == "c/orphaned-engine/process:g1:42:777"
    assert "vllm m at 127.0.0.1:8000" in finding.summary
    assert "2.0 GiB" in finding.summary
    assert (finding.held_gpu_hours, finding.held_gib_hours) == (None, pytest.approx(2 * finding.window_s / 3600))
    assert matches(Match(jobs=("1",), diagnoses=("orphaned-engine",)), finding)
    assert not matches(Match(diagnoses=("idle",)), finding)


def test_live_explain_shows_the_orphaned_engines_of_the_job(tmp_path: Path) -> None:
    left = process(job=1, source="cgroup", server=SERVER, used_mib=2048.0)
    page = explained(tmp_path, [[gpu(util=90.0, processes=(left,))]], window_s=5.0)
    assert [(finding.kind, finding.source) for finding in page.findings] == [("orphaned-engine", "live")]
    assert page.answer == "The server of an inference engine has ended, but its process still holds GPU memory."
    other = process(job=2, source="cgroup", server=SERVER, used_mib=2048.0)
    assert explained(tmp_path, [[gpu(util=90.0, processes=(other,))]], window_s=5.0).findings == ()


@pytest.mark.parametrize(
    ("used", "gib"), [((2048.0, 1024.0), 3.0), ((2048.0, None), None), ((None, 1024.0), None), ((0.0, 0.0), 0.0)]
)
@pytest.mark.parametrize("of", ["job", "no job"])
def test_memory_of_a_process_is_that_on_all_its_gpus(
    tmp_path: Path, used: tuple[float | None, ...], gib: float | None, of: str
) -> None:
    """It is unknown if that on one of them is. The thresholds of a policy count the GPUs of the job."""
    facts: dict[str, Any] = {"job": 1, "source": "cgroup", "server": SERVER} if of == "job" else {"uid": 1002}
    gpus = [gpu(number, processes=(process(used_mib=mib, **facts),)) for number, mib in enumerate(used)]
    result = find(tmp_path, Slurm((job(1, gpus_allocated=GpuCount(4)),), (node(),)), [gpus])
    kind, held = ("orphaned-engine", 4) if of == "job" else ("orphan-process", 2)
    (finding,) = (item for item in result.findings if item.kind == kind)
    (memory,) = (item for item in finding.evidence if item.dimension == "memory")
    assert (memory.value, memory.unknown, memory.met) == (gib, gib is None, bool(gib))
    assert (len(finding.gpus), finding.allocated_gpus) == (2, held)


@pytest.mark.parametrize("state", ["SUSPENDED", "COMPLETING", "PENDING"])
def test_engine_of_a_job_that_does_not_run_is_not_orphaned(tmp_path: Path, state: str) -> None:
    left = process(job=1, source="cgroup", server=SERVER)
    result = find(tmp_path, Slurm((job(1, state=state),), (node(),)), [[gpu(processes=(left,))]])
    assert "orphaned-engine" not in result.counts


def test_engine_without_its_server_in_one_sample_only_is_not_orphaned(tmp_path: Path) -> None:
    """Its server may be restarted."""
    samples = [[gpu(processes=(process(job=1, source="cgroup", server=item),))] for item in (SERVER, None)]
    assert "orphaned-engine" not in find(tmp_path, Slurm((job(1),), (node(),)), samples).counts
    assert "orphaned-engine" not in find(tmp_path, Slurm((job(1),), (node(),)), samples[::-1]).counts


def test_unknown_memory_lowers_the_confidence(tmp_path: Path) -> None:
    left = process(job=1, source="cgroup", server=SERVER, used_mib=None)
    result = find(tmp_path, Slurm((job(1),), (node(),)), [[gpu(processes=(left,))]])
    assert [finding.score for finding in result.findings if finding.kind == "orphaned-engine"] == [0.6]


@pytest.mark.parametrize(
    "case",
    [
        process(system=True),
        process(job=1, source="cgroup"),
        process(job=9, source="slurmstepd"),
        process(),
        process(job=1, source="environment"),
        process(job=2, source="environment"),
        process(job=2, source="cgroup", uid=1003, user="eve"),
        process(job=2, source="environment", uid=101003, user="101003"),
        process(job=3, source="environment", uid=1003, user="eve"),
        process(uid=101003, user="101003"),
        process(uid=101003, user=None),
    ],
)
def test_process_that_may_belong_to_a_job_is_not_orphaned(case: LiveProcess) -> None:
    """System processes, those of running jobs, those below a slurmstepd, and those of users with a job on the node."""
    jobs = [job(1), job(2, uid=1002, nodes=("g2",)), job(3, uid=None, nodes=("g2",))]
    assert orphans.orphan(case, jobs, "g1") is None


def test_unnamed_container_user_is_orphaned_on_node_without_jobs() -> None:
    """The user cannot be mapped to a job's owner."""
    left = process(uid=101003, user="101003")
    assert orphans.orphan(left, [job(1, nodes=("g2",))], "g1") is not None


def test_process_naming_job_of_another_user_is_orphaned() -> None:
    """Only its own environment names the job."""
    jobs = [job(2, uid=1002, nodes=("g2",))]
    why = orphans.orphan(process(job=2, source="environment"), jobs, "g1")
    assert why == "it names job 2, which is another user's, and its user has none on this node"


@pytest.mark.parametrize(
    ("owner", "source", "here", "orphaned"),
    [
        (1001, "environment", True, True),  # its own job has ended
        (1002, "environment", True, False),  # it may be of the job that its user has here
        (None, "environment", True, False),
        (None, "environment", False, True),
        (1002, "environment", False, True),
        (1002, "cgroup", True, True),
    ],
)
def test_process_naming_an_ended_job(owner: int | None, source: str, here: bool, orphaned: bool) -> None:
    """Its environment may name any job: only one of its user's own says that the process was left behind."""
    jobs = [job(1, nodes=("g1",) if here else ("g2",))]
    jobs += [] if owner is None else [job(9, "COMPLETED", uid=owner, end=NOW)]
    why = orphans.orphan(process(job=9, source=source), jobs, "g1")
    assert why == ("it is of job 9, which no longer runs" if orphaned else None)


def test_memory_without_process_is_found_with_xid(tmp_path: Path) -> None:
    """Only on GPUs that are not allocated."""
    samples = [[gpu(0, xid=79), gpu(1, xid=79)]]
    result = find(tmp_path, Slurm((job(1),), (node(),)), samples, watch_s=None)
    (finding,) = result.findings
    assert (finding.kind, finding.subject) == ("orphan-memory", NodeRef("g1", "GPU-1"))
    assert any("fallen off the bus" in row.text for row in finding.evidence)


@pytest.mark.parametrize(
    "has", [{"node_gpus": None}, {"node_gpus": (), "gpus_allocated": None, "tres_allocated": {"gres/shard": "4"}}]
)
def test_memory_that_a_job_may_hold_is_not_orphaned(tmp_path: Path, has: dict[str, Any]) -> None:
    """The job's GPUs are unknown, or it has shards; the driver may not show the processes of a container."""
    result = find(tmp_path, Slurm((job(1, **has),), (node(),)), [[gpu(1)]], watch_s=None)
    assert "orphan-memory" not in result.counts


def test_processes_that_start_while_watched_are_not_orphaned(tmp_path: Path) -> None:
    """The process or memory may belong to a job started after Slurm was queried."""
    of_a_new_job = gpu(1, used=3000.0, processes=(process(job=999, source="cgroup"),))
    other = gpu(0, used=3000.0)
    slurm = Slurm((), (node(),))
    free = [gpu(0, used=0.0), gpu(1, used=0.0)]
    assert find(tmp_path, slurm, [free, [other, of_a_new_job]]).counts == {}
    result = find(tmp_path, slurm, [[other, of_a_new_job]])
    assert result.counts == {"orphan-process": 1, "orphan-memory": 1}


def test_job_started_after_first_query_is_not_orphaned(tmp_path: Path) -> None:
    """Slurm is queried again before a process or memory is reported."""
    of_job = gpu(0, used=3000.0, processes=(process(job=999, source="cgroup"),))
    without_process = gpu(1, used=3000.0)
    began = job(999, node_gpus=(NodeGpus("g1", 2, "a100", (0, 1)),))
    slurm = Slurm((), (node(),), later=(began,))
    assert find(tmp_path, slurm, [[of_job, without_process]], watch_s=None).counts == {}
    quiet = Slurm((began,), (node(),))
    assert find(tmp_path, quiet, [[of_job, without_process]], watch_s=None).counts == {}
    assert quiet.queries.count("overview") == 1


def test_stuck_jobs_and_nodes_drained_for_kill_task_failed_are_found(tmp_path: Path) -> None:
    """Only jobs COMPLETING for long; nodes drained for other reasons are ignored."""
    stuck = job(5, "COMPLETING", end=NOW - timedelta(hours=1))
    fresh = job(6, "COMPLETING", end=NOW - timedelta(minutes=1))
    drained = node("g2", flags=frozenset({"DRAIN"}), reason="Kill task failed", reason_time=NOW - timedelta(hours=2))
    other = node("g3", flags=frozenset({"DRAIN"}), reason="disk")
    dirty = node("g4", flags=frozenset({"DRAIN"}), reason="slurm-affinode: after job 7: GPU 0: 900 MiB are held")
    result = find(tmp_path, Slurm((stuck, fresh), (drained, other, dirty)), [[]], watch_s=None)
    assert {(finding.kind, finding.nodes) for finding in result.findings} == {
        ("completing", ("g1",)), ("drained-kill-failed", ("g2",)), ("drained-by-epilog", ("g4",)),
    }  # fmt: skip


def test_dcgm_exposition_is_parsed() -> None:
    """Ratios become percent; absent values and NaN are unknown, never 0; jobs come from the labels."""
    labels = 'gpu="0",UUID="GPU-a",device="nvidia3",hpc_job="7"'
    text = f"""# HELP x
DCGM_FI_DEV_GPU_UTIL{{{labels}}} 0
DCGM_FI_PROF_SM_ACTIVE{{{labels}}} 0.25 1700000000000
DCGM_FI_PROF_DRAM_ACTIVE{{{labels}}} NaN
DCGM_FI_DEV_FB_USED{{{labels}}} 100
DCGM_FI_DEV_FB_FREE{{{labels}}} 900
DCGM_FI_DEV_GPU_UTIL{{broken 3
other{{{labels}}} 3
"""
    (item,) = exposed("g1", text)
    assert item.signals_pct == {"util_pct": 0.0, "sm_active": 25.0}
    assert (item.minor, item.used_mib, item.total_mib, item.power_w, item.jobs) == (None, 100, 1000, None, ("7",))


@pytest.mark.parametrize("last", [0, 1])
def test_largest_value_of_several_series_of_a_gpu_counts(last: int) -> None:
    """Two exporters on a node: the one that reads 0 does not make the GPU idle. Their indices differ."""
    series = [
        'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",modelName="A100"} 90\nDCGM_FI_DEV_FB_USED{UUID="GPU-a"} 300\n'
        'DCGM_FI_DEV_FB_FREE{UUID="GPU-a"} 700\n',
        'DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-a",modelName="A100"} 0\nDCGM_FI_DEV_FB_USED{UUID="GPU-a"} 100\n'
        'DCGM_FI_DEV_FB_FREE{UUID="GPU-a"} 900\n',
    ]
    (item,) = exposed("g1", series[1 - last] + series[last])
    assert item.signals_pct == {"util_pct": 90}
    assert (item.index, item.model, item.used_mib, item.total_mib) == (None, "A100", 300, 1000)


def test_gpus_without_a_uuid_are_several() -> None:
    text = 'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 90\nDCGM_FI_DEV_GPU_UTIL{gpu="1"} 0\n'
    assert [(item.index, item.signals_pct["util_pct"]) for item in exposed("g1", text)] == [(0, 90), (1, 0)]


def test_device_file_is_known_from_the_own_exporter() -> None:
    """The label ``device`` of dcgm-exporter has the index of the GPU, which may be another number."""
    text = 'DCGM_FI_DEV_GPU_UTIL{gpu="6",UUID="GPU-a",device="nvidia0"} 0\n'
    assert [item.minor for item in exposed("g1", text)] == [None]
    assert [item.minor for item in exposed("g1", text + "slurm_affinode_exporter_up 1\n")] == [0]


def test_mig_instance_has_no_utilization() -> None:
    """dcgm-exporter may write 0, and the power of the whole GPU."""
    labels = '{gpu="0",UUID="GPU-a",GPU_I_ID="3"}'
    text = "".join(
        f"{name}{labels} {value}\n"
        for name, value in (("DCGM_FI_DEV_GPU_UTIL", 0), ("DCGM_FI_DEV_POWER_USAGE", 300), ("DCGM_FI_DEV_FB_USED", 9))
    )
    (item,) = exposed("g1", text)
    assert (item.signals_pct, item.power_w, item.used_mib) == ({}, None, 9)
    row = {"uuid": "GPU-a", "index": 0, "mig": "3", "reading": {"util_pct": 0.0, "engine_active": 0.5}}
    assert from_agent("g1", {"gpus": [row]}).gpus[0].signals_pct == {"engine_active": 50.0}


def test_agent_response_with_faulty_gpu() -> None:
    """A GPU with a fault has no signals."""
    row = {"uuid": "GPU-a", "index": 0, "reading": None, "processes": None, "fault": "lost", "total_mib": 8.0}
    answer = from_agent("g1", {"gpus": [row, {**row, "reading": {"util_pct": 0.0, "sm_active": 0.5}}]})
    assert [item.signals_pct for item in answer.gpus] == [{}, {"util_pct": 0.0, "sm_active": 50.0}]


def test_missing_xid_is_read_from_the_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter is queried only for memory without a process; an error of the exporter is ignored."""
    names: list[str] = []
    text = 'DCGM_FI_DEV_XID_ERRORS{UUID="GPU-0",gpu="0"} 79\n'
    gpus = [{"uuid": "GPU-0", "index": 0, "reading": {"fb_used_mib": 9000.0, "xid": 0}, "processes": []}]

    def metrics(_: Any, name: str) -> str:
        names.append(name)
        if name == "g2":
            raise UnreachableError("no route")
        return text

    monkeypatch.setattr(nodes, "_agent", lambda *_: {"gpus": gpus})
    monkeypatch.setattr(nodes, "_metrics", metrics)
    ask = nodes.asker(Config())
    assert [ask(name).gpus[0].xid for name in ("g1", "g2")] == [79, 0]
    gpus[0]["processes"] = [{"pid": 5, "start_ticks": 1, "uid": 7}]
    assert ask("g1").gpus[0].xid == 0
    assert names == ["g1", "g2"]


def test_exporter_of_a_node_without_agent_is_queried_with_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exporter without metrics, or a port of another service, is a problem of that node."""

    def no_agent(*_: Any) -> dict[str, Any]:
        raise UnreachableError("no agent")

    monkeypatch.setattr(nodes, "_agent", no_agent)
    (tmp_path / "token").write_text("t0ken\n")
    text = 'DCGM_FI_DEV_GPU_UTIL{UUID="GPU-0",gpu="0"} 40\n'
    with serving(Answer(text, kind="text/plain"), Answer("", 404), Answer("", length=9)) as fake:
        zombies = ZombiesConfig(exporter_url=f"{fake.url}/{{node}}", exporter_token_file=tmp_path / "token")
        ask = nodes.asker(Config(zombies=zombies))
        read, missing, broken = (ask(name) for name in ("g1", "g2", "g3"))
    assert (read.by, read.problem, read.gpus[0].signals_pct) == ("exporter", "no agent", {"util_pct": 40.0})
    assert [(request[1], request[3]["Authorization"]) for request in fake.requests[:1]] == [("/g1", "Bearer t0ken")]
    assert missing.problem == f"no agent; the exporter at {fake.url}/g2 answers 404 Not Found"
    assert broken.problem.startswith(f"no agent; the exporter at {fake.url}/g3 does not respond: ")
    assert ask("g1").problem.endswith("/g1 does not respond: Connection refused")


def test_drained_node_belongs_to_all_its_partitions(tmp_path: Path) -> None:
    """For the policy and for filters, in any order of the partitions."""
    since = NOW - timedelta(hours=2)
    drained = node(flags=frozenset({"DRAIN"}), reason="Kill task failed", reason_time=since, partitions=("a", "b"))
    queue = (waiting(5, partitions=("a",)), waiting(6, partitions=("b",)), waiting(7, partitions=("c",)))
    result = find(tmp_path, Slurm(queue, (drained,)), [[]], watch_s=None)
    (finding,) = result.findings
    assert finding.impact is not None
    assert finding.impact.examples == ("5", "6")
    assert [matches(Match(partitions=(name,)), finding) for name in ("a", "b", "c")] == [True, True, False]
    kept = [
        len(findings.select(result, [finding], findings.Request(partitions=(n,))).findings) for n in ("a", "b", "c")
    ]
    assert kept == [1, 1, 0]


def test_stored_samples_of_gpus_without_a_uuid_are_those_of_their_index(tmp_path: Path) -> None:
    """GPU 0 has been idle for two hours, and GPU 1 since now: neither has the past of the other."""
    rows = [
        {"cluster": "c", "node": "g1", "index": n, "time": NOW - timedelta(minutes=minute), "util_pct": 90.0 * n}
        for minute in range(120) for n in (0, 1)
    ]  # fmt: skip
    with contextlib.closing(SampleStore(Config(store=StoreConfig(state_dir=tmp_path)).history_dir)) as history:
        history.ingest(pl.DataFrame(rows), source="test")
    both = job(1, node_gpus=(NodeGpus("g1", 2, "a100", (0, 1)),), gpus_allocated=GpuCount(2, "a100"))
    samples = [[gpu(0, uuid=None), gpu(1, uuid=None)]]
    (finding,) = find(tmp_path, Slurm((both,), (node(),)), samples, by="exporter").findings
    assert {item.gpu: round((item.idle_s or 0) / 3600) for item in finding.gpus} == {"0": 2, "1": 0}
