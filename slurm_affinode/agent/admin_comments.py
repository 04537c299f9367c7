"""A line about a job's use of the GPUs of its first node, in the job's AdminComment (``agent.admin_comment``).

The agent samples the GPUs that the prolog reported for each job, whether or not the job has the suspend option, with a
driver of its own: readers of one driver share its counters. The epilog only posts the line and does not wait for it.
slurmctld refuses changes of a job from the time its epilog starts, so the line is written to accounting when slurmdbd
has the job's end. An AdminComment that something else has written is not changed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field

from slurm_affinode.base import process
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import one_line
from slurm_affinode.core import admin_comment
from slurm_affinode.core.admin_comment import PREFIX, NodeUse
from slurm_affinode.core.idle import GpuActivity, IdleRule, Sample, Verdict, judge
from slurm_affinode.gpu.interface import GpuDriver, GpuError
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.gpu import Device, Reading
from slurm_affinode.slurm.accounting import sacct_command
from slurm_affinode.slurm.interface import Runner
from slurm_affinode.suspension.activity import by_index, name_of, signals_of

log = logging.getLogger(__name__)

WAIT_S = 5.0
TRIES = 24
"""Attempts to write a line, ``WAIT_S`` apart: slurmctld and slurmdbd record the end of a job after its epilog."""


@dataclass(slots=True)
class GpuTimes:
    """Measured use of one GPU by a job."""

    busy_s: float = 0.0
    idle_s: float = 0.0
    peak_mib: float | None = None
    """``None``: memory in use was never read."""
    sampled_s: float | None = None
    """Time of the last sample."""


@dataclass(slots=True)
class JobTimes:
    """Measured use of the GPUs of a job on this node."""

    gpus: int
    """GPUs of the job on this node."""
    by_gpu: dict[tuple[str, str | None], GpuTimes] = field(default_factory=dict)
    suspensions: int = 0
    """Completed suspensions of this submission."""


class AdminComments:
    """Samples the GPUs of all jobs of a node, and writes the lines. Thread-safe."""

    def __init__(
        self, node: str, driver: Callable[[], AbstractContextManager[GpuDriver]], rule: IdleRule, *,
        jobs: Callable[[], Mapping[int, tuple[int, ...]]], suspensions: Callable[[int], int],
        read_job: Callable[[int], Job | None], later: Callable[..., None],
        run: Runner = process.run, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """``driver``: locks a driver that nothing else reads; ``jobs``: Slurm's GPU numbers by job ID; ``later``:
        ``WorkQueue.later``.
        """
        self._node, self._driver, self._rule = node, driver, rule
        self._jobs, self._suspensions, self._read_job = jobs, suspensions, read_job
        self._later, self._run, self._clock = later, run, clock
        self._times: dict[int, JobTimes] = {}
        self._failed = False
        """The last attempt to write a line failed, which was logged."""
        self._lock = threading.Lock()
        """Guards the times."""

    def sample(self) -> None:
        """Read the GPUs of all jobs once. A GPU that cannot be read is unknown for that time."""
        jobs = self._jobs()
        allocated_gpus, readings = self._read(jobs) if jobs else ({}, {})
        now = self._clock()
        with self._lock:
            self._times = {job_id: self._times.get(job_id) or JobTimes(len(jobs[job_id])) for job_id in jobs}
            for job_id, times in self._times.items():
                times.suspensions = max(times.suspensions, self._suspensions(job_id))
                for device in allocated_gpus.get(job_id, ()):
                    if device in readings:
                        gpu = times.by_gpu.setdefault((device.uuid, device.mig), GpuTimes())
                        self._add(gpu, device, readings[device], now)

    def _read(self, jobs: Mapping[int, tuple[int, ...]]) -> tuple[dict[int, tuple[Device, ...]], dict[Device, Reading]]:
        """Return the GPUs of each job, and the readings of those that can be read."""
        readings = {}
        with self._driver() as driver:
            try:
                devices = driver.devices()
            except GpuError:  # reported by the agent's loop
                return {}, {}
            allocated_gpus = {job_id: by_index(devices, indices) or () for job_id, indices in jobs.items()}
            for device in {device for gpus in allocated_gpus.values() for device in gpus}:
                with suppress(GpuError):
                    readings[device] = driver.read(device)
        return allocated_gpus, readings

    def _add(self, gpu: GpuTimes, device: Device, reading: Reading, now: float) -> None:
        """Add the time since the last sample to the state that the new one shows; a long gap is unknown."""
        since = 0.0 if gpu.sampled_s is None else now - gpu.sampled_s
        gpu.sampled_s = now
        if reading.fb_used_mib is not None:
            gpu.peak_mib = max(reading.fb_used_mib, gpu.peak_mib or 0.0)
        verdict, _, _ = judge(self._rule, Sample(now, (GpuActivity(name_of(device), signals_of(reading)),)))
        if since > self._rule.max_gap_s:
            return
        if verdict is Verdict.BUSY:
            gpu.busy_s += since
        elif verdict is Verdict.IDLE:
            gpu.idle_s += since

    def schedule_line(self, job_id: int) -> None:
        """Write the line of a job whose epilog runs, later."""
        with self._lock:
            times = self._times.pop(job_id, None)
        if times is not None and any(gpu.busy_s + gpu.idle_s > 0 for gpu in times.by_gpu.values()):
            self._later(WAIT_S, self._write, job_id, times, TRIES)

    def _write(self, job_id: int, times: JobTimes, tries: int) -> None:
        """Write the line; try again later as long as the end of the job is not recorded."""
        try:
            succeeded = self._try(job_id, times)
        except AffinodeError as error:
            self._warn(job_id, one_line(error))
            return
        if succeeded:
            self._failed = False
        elif tries > 1:
            self._later(WAIT_S, self._write, job_id, times, tries - 1)
        else:
            self._warn(job_id, "slurmctld or slurmdbd did not record its end in time")

    def _try(self, job_id: int, times: JobTimes) -> bool:
        """Write the line if there is anything to write; return whether the job needs no further attempt."""
        job = self._read_job(job_id)
        if job is None or not job.has_ended:
            # Of a requeued job, the line is written when it ends for good.
            return job is not None and (job.pending or (job.allocated and job.state != "COMPLETING"))
        if not self._is_here(job):
            return True
        present = sacct_command.admin_comment(job.id, run=self._run)
        if present is None:
            return False
        if present and not present.startswith(PREFIX):
            log.debug("job %s: its AdminComment is kept", job.id)
            return True
        sacct_command.set_admin_comment(job.id, line(self._node, job, times), run=self._run)
        return True

    def _warn(self, job_id: int, why: str) -> None:
        if not self._failed:
            log.warning("job %d: no line about its GPUs in AdminComment: %s", job_id, why)
        self._failed = True

    def _is_here(self, job: Job) -> bool:
        """Return whether the job's first node is this one, and its GPUs were not shared with other jobs."""
        first = job.batch_host or next(iter(job.nodes), None)
        return first == self._node and not job.shares_gpus


def line(node: str, job: Job, times: JobTimes) -> str:
    """Return the line: use of the GPUs of this node in the last attempt."""
    busy, idle = (sum(getattr(gpu, name) for gpu in times.by_gpu.values()) for name in ("busy_s", "idle_s"))
    unknown = None
    if job.start is not None and job.end is not None:
        unknown = max(0.0, times.gpus * (job.end - job.start).total_seconds() - busy - idle)
    peaks = [gpu.peak_mib for gpu in times.by_gpu.values() if gpu.peak_mib is not None]
    return admin_comment.line(
        NodeUse(node, len(job.nodes), times.gpus, busy, idle, unknown, max(peaks, default=None), times.suspensions)
    )
