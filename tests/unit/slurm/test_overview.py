"""The overview of all jobs in little memory: squeue's table, GPU indices from scontrol, and hostile names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.base.process import Completed
from slurm_affinode.model.cluster import GpuCount, Job, NodeGpus
from slurm_affinode.slurm import scontrol, squeue
from slurm_affinode.slurm.commands_client import CommandsClient

MARK = "|0000mark0000|"


@pytest.fixture(params=["24.11", "26.05"])
def record(request: pytest.FixtureRequest, recorded: Path) -> Callable[[str], bytes]:
    """Return a function that reads a recorded file of a release."""
    return lambda name: (recorded / "slurm" / request.param / name).read_bytes()


def table(record: Callable[[str], bytes]) -> dict[str, Job]:
    return {job.id: job for job in squeue.jobs(record("squeue-overview.txt"), MARK)}


def test_jobs_of_squeue_are_read(record: Callable[[str], bytes]) -> None:
    """A hostile name, an array with pending tasks, a heterogeneous job, and one that waits for a limit."""
    jobs = table(record)
    odd = next(job for job in jobs.values() if job.user == "alice")
    assert odd.name == "evil\nJobId=77 JobName=x UserId=bob(1002)\tX"
    assert (odd.user, odd.state, odd.comment, odd.batch) == ("alice", "RUNNING", "hello | x", True)
    assert (odd.nodes, odd.gpus_allocated, odd.time_limit_s) == (("c1",), GpuCount(1, "h100"), 1800)
    assert odd.submit is not None
    assert odd.submit.tzinfo is not None
    tasks = next(job for job in jobs.values() if job.array_tasks and job.user == "bob")
    assert (tasks.pending, tasks.array_task_id, tasks.array_limit, tasks.gpus_requested) == (True, None, 2, GpuCount(2))
    task = next(job for job in jobs.values() if job.array_task_id)
    assert (task.state, task.nodes, task.gpus_allocated) == ("RUNNING", ("c2",), GpuCount(2, "h100"))
    assert {job.id.partition("+")[2] for job in jobs.values() if job.het_job_id} == {"0", "1"}
    blocked = next(job for job in jobs.values() if job.reason == "QOSMaxGRESPerUser")
    assert (blocked.gpus_allocated, blocked.gpus_requested, blocked.start) == (None, GpuCount(2), None)


def test_required_and_excluded_nodes_are_read() -> None:
    """Most jobs have none."""
    (choosy,) = squeue.jobs(_row(7, state="PENDING", ReqNodes="c[1-2]", ExcNodes="c3"), MARK)
    assert (choosy.nodes_required, choosy.nodes_excluded) == (("c1", "c2"), ("c3",))
    (plain,) = squeue.jobs(_row(7, ReqNodes="", ExcNodes=""), MARK)
    assert (plain.nodes_required, plain.nodes_excluded) == ((), ())


def test_gpu_indices_are_read(record: Callable[[str], bytes]) -> None:
    """They are per node; for the job with a newline in its name they are uncertain."""
    details = scontrol.Details(record("scontrol-details.txt"))
    holding = [job for job in table(record).values() if job.allocated and job.gpus_allocated]
    indices = {job.id: details.node_gpus(job.job_id, job.nodes, job.gpus_allocated or GpuCount(0)) for job in holding}
    task = next(job for job in holding if job.array_task_id)
    assert indices[task.id] == (NodeGpus("c2", 2, "h100", (0, 1)),)
    assert {indices[job.id] for job in holding if job.user == "alice"} == {None}


def _row(number: int, name: str = "wrap", state: str = "RUNNING", **more: str) -> bytes:
    values = dict.fromkeys(squeue.FIELDS, "N/A") | {
        "JobID": str(number), "ArrayJobID": str(number), "UserName": "ann", "UserID": "1001", "Partition": "gpu",
        "State": state, "SubmitTime": "1795247591", "EligibleTime": "1795247591", "StartTime": "1795247591",
        "EndTime": "1795249391", "TimeLimit": "UNLIMITED", "NodeList": "g[1-2]", "NumNodes": "2", "NumCPUs": "8",
        "tres-alloc": "cpu=8,mem=1G,node=2,gres/gpu=4,gres/gpu:a100=4", "PriorityLong": "0", "Name": name, **more,
    }  # fmt: skip
    return b"".join(values[key].encode() + MARK.encode() for key in squeue.FIELDS) + b"\n"


def _record(
    number: int, gres: str = "Nodes=g[1-2] CPU_IDs=0-3 Mem=512 GRES=gpu:a100:2(IDX:0-1)", name: str = "w"
) -> str:
    return f"JobId={number} JobName={name} UserId=ann(1001) NodeList=g[1-2]   {gres} MinCPUsNode=1 Comment=\n"


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_hostile_name_does_not_change_other_jobs(name: str) -> None:
    made = list(squeue.jobs(_row(7, name, Comment=name) + _row(8), MARK))
    assert [job.job_id for job in made] == [7, 8]
    assert made[0].name in (name, None)
    assert made[1].name == "wrap"


def test_completing_job_has_an_end() -> None:
    """It is the time since when the job is completing."""
    (job,) = squeue.jobs(_row(7, state="COMPLETING"), MARK)
    assert (job.end is not None, job.time_limit_s, job.allocated) == (True, None, True)
    (runs,) = squeue.jobs(_row(7), MARK)
    assert runs.end is None


def test_output_of_another_program_is_refused() -> None:
    """Truncated output and output with other fields are refused; empty output is accepted."""
    assert list(squeue.jobs(b"\n", MARK)) == []
    for lost in (2, 40):  # a part of the last mark, or more
        with pytest.raises(UnreachableError, match="return the requested fields"):
            list(squeue.jobs(_row(7) + _row(8)[:-lost], MARK))


@pytest.mark.parametrize("part_bytes", [1, 30, 400, 1000])
def test_large_output_is_decoded_in_parts(part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts end within and between rows."""
    text = _row(7, "\N{GREEK SMALL LETTER ALPHA}") + _row(8) + _row(9, state="PENDING").replace(b"wrap", b"\xce\xff")
    whole = list(squeue.jobs(text, MARK))
    assert [job.name for job in whole] == ["\N{GREEK SMALL LETTER ALPHA}", "wrap", r"\xce\xff"]
    monkeypatch.setattr(squeue, "_PART_BYTES", part_bytes)
    assert list(squeue.jobs(text, MARK)) == whole


class Programs:
    """Fake squeue and scontrol with given output."""

    def __init__(self, rows: bytes, details: str, single: Mapping[str, str] | None = None) -> None:
        self.rows, self.details, self.single = rows, details, single or {}
        self.commands: list[str] = []

    def __call__(
        self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, check: bool = True
    ) -> Completed:
        """Run the fake program."""
        words = list(argv)
        self.commands.append(" ".join(words[:1] + words[-2:]) if words[0] == "scontrol" else words[0])
        if words[0] == "squeue":
            assert env is not None
            assert env["SLURM_TIME_FORMAT"] == "%s"
            mark = words[-1].removeprefix("--Format=JobID:").partition(",")[0].encode()
            return Completed(tuple(words), 0, self.rows.replace(MARK.encode(), mark), "")
        if words[-1] == "jobs":
            return Completed(tuple(words), 0, self.details.encode(), "")
        if "--json=list" in words:
            return Completed(tuple(words), 0, b"data_parser/v0.0.42\n", "")
        return Completed(tuple(words), 0, self.single.get(words[-1], '{"jobs": []}').encode(), "")


def overview(programs: Programs) -> dict[int, Job]:
    return {job.job_id: job for job in CommandsClient(programs, env=dict(os.environ)).overview()}


def test_overview_needs_two_requests() -> None:
    """Nodes with the same GPUs share one block."""
    numbers = range(1000, 2000)
    programs = Programs(b"".join(_row(n) for n in numbers), "".join(_record(n) for n in numbers))
    result = overview(programs)
    assert len(result) == 1000
    assert result[1500].node_gpus == (NodeGpus("g1", 2, "a100", (0, 1)), NodeGpus("g2", 2, "a100", (0, 1)))
    assert programs.commands == ["squeue", "scontrol show jobs"]


@pytest.mark.parametrize(
    "text",
    [
        _record(7) + _record(8, name="x\nJobId=7 JobName=y   Nodes=g[1-2] CPU_IDs=0 Mem=1 GRES=gpu:a100:2(IDX:2-3)"),
        _record(7, name="x Nodes=g1 CPU_IDs=0 Mem=1 GRES=gpu:a100:2(IDX:2-3)") + _record(8),
        _record(7, "Nodes=g3 CPU_IDs=0 Mem=1 GRES=gpu:a100:4(IDX:0-3)") + _record(8),
        _record(8),
    ],
)
def test_uncertain_gpu_indices_are_requested_singly(text: str) -> None:
    """Two records, too many GPUs, other nodes, or none: GPU indices are never taken from a name."""
    programs = Programs(_row(7) + _row(8), text)
    assert overview(programs)[7].node_gpus is None
    assert "scontrol show jobs" in programs.commands
    assert "scontrol job 7" in programs.commands


def test_excessive_number_in_a_name_is_no_job_id() -> None:
    """It is too long for an integer."""
    text = _record(7, name="x\nJobId=" + "9" * 5000 + " ") + _record(8)
    assert scontrol.Details(text.encode()).node_gpus(8, ("g1", "g2"), GpuCount(4)) is not None


def test_refusal_of_slurm_is_an_error() -> None:
    def down(argv: Sequence[str], **_: object) -> Completed:
        return Completed(tuple(argv), 1, b"", "slurm_load_jobs error: Unable to contact slurm controller")

    with pytest.raises(AffinodeError, match=r"slurm controller|slurmctld"):
        CommandsClient(down, env={}).overview()  # type: ignore[arg-type]


def test_jobs_without_gpus_need_one_request() -> None:
    """They have no GPU indices."""
    programs = Programs(_row(7, **{"tres-alloc": "cpu=1,mem=1G"}), "")
    assert overview(programs)[7].node_gpus == ()
    assert programs.commands == ["squeue"]
    waiting = Programs(_row(7, state="PENDING"), "")
    assert overview(waiting)[7].node_gpus == ()
    assert waiting.commands == ["squeue"]


@pytest.mark.parametrize(
    ("request_", "shares"),
    [
        ({"tres-per-node": "gres/shard:6"}, True),
        ({"tres-per-node": "gres/gpu:a100:1,gres/mps:50"}, True),
        ({"tres-per-task": "gres/shard:h100=2"}, True),
        ({"tres-per-node": "gres/gpu:shard:1"}, False),
        ({"tres-per-job": "gres/gpu:1"}, False),
    ],
)
def test_share_of_a_gpu_is_known_without_accounting_of_shares(request_: dict[str, str], shares: bool) -> None:
    """Slurm's TRES do not contain shares that ``AccountingStorageTRES`` does not name."""
    (job,) = squeue.jobs(_row(7, **{"tres-alloc": "cpu=1,mem=1G", **request_}), MARK)
    assert job.shares_gpus is shares
    record = {key.replace("-", "_"): value for key, value in request_.items()}
    (same,) = scontrol.jobs([{"job_id": 7, "job_state": ["RUNNING"], "tres_alloc_str": "cpu=1,mem=1G", **record}])
    assert same.shares_gpus is shares
