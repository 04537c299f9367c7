"""Lines about ended jobs in AdminComment: measurements, the node that writes them, and comments that stay."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from gpu_fakes import A100, IDLE, OTHER, FakeDriver

from slurm_affinode.agent.admin_comments import TRIES, AdminComments
from slurm_affinode.base.process import Completed
from slurm_affinode.core.admin_comment import PREFIX
from slurm_affinode.core.idle import IdleRule
from slurm_affinode.gpu.interface import GpuLost
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.gpu import Reading

START = datetime(2026, 11, 2, 12, tzinfo=UTC)
BUSY = Reading(util_pct=80.0, memory_util_pct=30.0, fb_used_mib=62_669.0, fb_total_mib=81_920.0)
STILL = Reading(util_pct=0.0, memory_util_pct=0.0, fb_used_mib=10_240.0, fb_total_mib=81_920.0)


def job(**changes: object) -> Job:
    values: dict[str, Any] = dict.fromkeys(Job.__dataclass_fields__)
    values |= {"job_id": 7, "state": "COMPLETED", "nodes": ("gpu01",), "batch_host": "gpu01", "batch": True,
               "start": START, "end": START + timedelta(hours=1), "tres_allocated": {}, "requests_share": False,
               "restarts": 0}  # fmt: skip
    return Job(**{**values, **changes})


@dataclass
class Site:
    """An agent's node and Slurm, in memory."""

    record: Job | None = field(default_factory=job)
    comment: str | None = ""
    """In accounting; ``None``: it does not have the end of the job yet."""
    gpus: dict[int, tuple[int, ...]] = field(default_factory=lambda: {7: (0, 1)})
    suspensions: int = 0
    refused: str = ""
    written: list[tuple[str, ...]] = field(default_factory=list)
    waiting: list[Callable[[], object]] = field(default_factory=list)
    now: float = 1000.0
    driver: FakeDriver = field(default_factory=FakeDriver)

    def __post_init__(self) -> None:
        self.comments = AdminComments(
            "gpu01", lambda: nullcontext(self.driver), IdleRule(900.0, max_gap_s=20.0), jobs=lambda: dict(self.gpus),
            suspensions=lambda _: self.suspensions, read_job=lambda _: self.record, later=self._later, run=self._run,
            clock=lambda: self.now,
        )  # fmt: skip

    def _later(self, _: float, call: Callable[..., object], *arguments: Any) -> None:
        self.waiting.append(lambda: call(*arguments))

    def _run(
        self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, check: bool = True
    ) -> Completed:
        assert timeout_s <= 10
        if argv[0] == "sacct":
            end = "Unknown" if self.comment is None else "2026-11-02T13:00:00"
            return Completed(tuple(argv), 0, f"End\x1fAdminComment\n{end}\x1f{self.comment or ''}\n".encode(), "")
        self.written.append(tuple(argv))
        return Completed(tuple(argv), 1 if self.refused else 0, b"", self.refused)

    def sampled(self, *readings: tuple[Reading | GpuLost, Reading | GpuLost], period_s: float = 10.0) -> None:
        for first, second in readings:
            self.driver.readings = {A100: first, OTHER: second}
            self.comments.sample()
            self.now += period_s

    def end(self, job_id: int = 7) -> str | None:
        """Run the epilog, and all that waits; return the line that was written."""
        self.comments.schedule_line(job_id)
        self.gpus.pop(job_id, None)
        while self.waiting:
            self.waiting.pop(0)()
        return self.written[-1][-1].removeprefix("AdminComment=") if self.written else None


def test_line_has_use_of_all_gpus_of_the_job() -> None:
    """The time before the first sample, in gaps and without readings is unknown, and neither busy nor idle."""
    site = Site(suspensions=2)
    site.sampled(*[(BUSY, STILL)] * 91)
    site.sampled((GpuLost("gone"), STILL), (GpuLost("gone"), GpuLost("gone")))
    assert site.end() == (
        "slurm-affinode: gpu01: 2 GPUs, busy 50 % of the measured time, idle 0.25 GPU-h, unknown 1.50 GPU-h, "
        "memory peak 61.2 GiB, suspended 2 times"
    )  # fmt: skip
    assert site.written[0][:-1] == ("sacctmgr", "--immediate", "modify", "job", "where", "jobid=7", "set")


def test_epilog_does_not_wait_for_slurm() -> None:
    """The line is written later, when slurmctld and accounting have the end of the job."""
    site = Site(record=job(state="COMPLETING"), comment=None)
    site.sampled((BUSY, BUSY), (BUSY, BUSY))
    site.comments.schedule_line(7)
    assert (site.written, len(site.waiting)) == ([], 1)
    site.waiting.pop()()
    site.record = job()
    site.waiting.pop()()
    assert site.written == []
    site.comment = ""
    site.waiting.pop()()
    assert len(site.written) == 1
    assert site.waiting == []


def test_comment_of_others_is_kept_and_own_line_is_replaced() -> None:
    """Such as a summary of jobstats, which another text would make unreadable."""
    for comment, lines in (("JS1:H4sIAAA", 0), ("slurm", 0), (f"{PREFIX}gpu01: 1 GPU", 1)):
        site = Site(comment=comment)
        site.sampled((BUSY, BUSY), (BUSY, BUSY))
        site.end()
        assert len(site.written) == lines, comment


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"nodes": ("gpu01", "gpu02")}, "slurm-affinode: gpu01, 1 of 2 nodes: "),
        ({"nodes": ("gpu00", "gpu01"), "batch_host": "gpu00"}, None),
        ({"nodes": ("gpu01", "gpu02"), "batch_host": None, "batch": False}, "slurm-affinode: gpu01, 1 of 2 nodes: "),
        ({"state": "PENDING", "nodes": (), "batch_host": None}, None),
        ({"tres_allocated": {"gres/shard": "4"}}, None),
    ],
    ids=["first-node", "other-node", "interactive", "requeued", "shared-gpus"],
)
def test_first_node_writes_about_its_own_gpus(changes: dict[str, object], text: str | None) -> None:
    site = Site(record=job(**changes))
    site.sampled((BUSY, BUSY), (BUSY, BUSY))
    written = site.end()
    assert (written or "").startswith(text or "")
    assert (written is None) == (text is None)


def test_array_task_is_named_as_a_task() -> None:
    """The number of the array would change the AdminComment of all of its tasks."""
    site = Site(record=job(array_job_id=7, array_task_id=3))
    site.sampled((BUSY, BUSY), (BUSY, BUSY))
    site.end()
    assert site.written[0][5] == "jobid=7_3"


def test_job_without_measurements_has_no_line() -> None:
    """Too short, without GPUs, or on GPUs that cannot be read."""
    for readings in ([], [(BUSY, BUSY)], [(GpuLost("gone"), GpuLost("gone"))] * 5, [(IDLE, IDLE)] * 5):
        site = Site()  # IDLE has a single signal: whether the GPU is idle is unknown
        site.sampled(*readings)
        assert site.end() is None
    site = Site()
    site.sampled(*[(BUSY, BUSY)] * 5, period_s=60.0)
    assert site.end() is None
    site = Site()
    site.sampled(*[(BUSY, BUSY)] * 5)
    assert site.end(8) is None


def test_long_gaps_are_unknown() -> None:
    """Of 620 s on two GPUs, 10 s on each are measured."""
    site = Site(record=job(end=START + timedelta(seconds=620)))
    site.sampled((BUSY, BUSY), (BUSY, BUSY), period_s=10.0)
    site.now += 600
    site.sampled((BUSY, BUSY))
    assert "unknown 0.34 GPU-h" in (site.end() or "")


def test_failures_are_logged_once_and_end(caplog: pytest.LogCaptureFixture) -> None:
    """Accounting that does not record the end, and a refusal, stop nothing; the next success ends the silence."""
    site = Site(comment=None)
    with caplog.at_level(logging.WARNING):
        site.sampled((BUSY, BUSY), (BUSY, BUSY))
        site.comments.schedule_line(7)
        tries = 0
        while site.waiting:
            site.waiting.pop(0)()
            tries += 1
        assert tries == TRIES
        site.comment, site.refused = "", "sacctmgr: error: Permission denied"
        for _ in range(2):
            site.gpus = {7: (0, 1)}
            site.sampled((BUSY, BUSY), (BUSY, BUSY))
            site.end()
    assert [record.message for record in caplog.records] == [
        "job 7: no line about its GPUs in AdminComment: slurmctld or slurmdbd did not record its end in time"
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for refused in ("", "sacctmgr: error: Permission denied"):
            site.refused, site.gpus = refused, {7: (0, 1)}
            site.sampled((BUSY, BUSY), (BUSY, BUSY))
            site.end()
    assert len(caplog.records) == 1
    assert "Permission denied" in caplog.text
