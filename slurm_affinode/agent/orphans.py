"""Processes on this node's GPUs: whose they are, and ending those that belong to no job.

Whoever asks names a process by PID and start; that it belongs to no job is found out here, anew, at that moment: from
its cgroup and its ancestors, from what it was started with, and from slurmctld. Whatever is not known speaks for it.
The process that this is read of is held from then on, and is the one that is signaled.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurm_affinode.agent import jobuse
from slurm_affinode.agent.leftovers import LeftoverReports
from slurm_affinode.agent.queue import Queue
from slurm_affinode.agent.shepherds import one_line
from slurm_affinode.agent.watch import by_index
from slurm_affinode.gpu.interface import GpuDriver, GpuError
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.model.gpu import Device, Reading
from slurm_affinode.model.signals import FREE_MIB
from slurm_affinode.pinned import PROC, Process
from slurm_affinode.users import name_of_user

log = logging.getLogger(__name__)

FIRST_USER = 1000
"""Users below this are the system's: drivers, exporters, display managers. They are never ended."""
TERM_S = 5.0
KILL_S = 5.0
SETTLE_S = 1.0
"""What is left on a GPU at the end of a job has so long to end by itself."""
POLL_S = 0.1
EACH_S = 5.0
"""How far back it is looked what a process computed: looks are 2 s apart, and the driver samples about each second."""
SHOWN = 120
AT_ONCE = 16


class NotAnOrphanError(Exception):
    """The process is not to be ended; the text says why, ``code`` says it to machines."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class OnGpu:
    """A process and the devices that it is on."""

    pid: int
    started: int
    """Ticks since boot."""
    uid: int
    command: str
    used_mib: float | None
    devices: tuple[Device, ...]
    job: int | None
    step: str | None
    source: str | None
    """How the job is known, see ``model.gpu.JobRef``; ``None``: no job."""
    process: Process
    """Of which all this was read; held as long as this object."""


@dataclass(slots=True)
class Orphans:
    """Looks at the GPUs of a node through ``driver``, which gives the driver for this thread alone."""

    driver: Callable[[], contextlib.AbstractContextManager[GpuDriver]]
    queue: Callable[[], Queue | None]
    """A fresh answer of slurmctld; ``None``: it does not answer."""
    node: str
    finder: JobFinder = field(default_factory=JobFinder)
    proc: Path = PROC
    first_user: int = FIRST_USER
    name_of: Callable[[int], str] = name_of_user
    now: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    reports: LeftoverReports = field(default_factory=LeftoverReports)
    """What jobs left behind."""

    # --- looking

    def gpus(self, since_us: int | None = None, *, each: bool = False) -> list[dict[str, Any]]:
        """Every device with what it shows and who is on it. Raises ``GpuError`` without a driver.

        ``since_us``: also how much the busiest process used since then (microseconds of the epoch), as far back as the
        driver remembers; ``each``: also how much each process used in the last ``EACH_S``.
        """
        rows = []
        with self.driver() as driver:
            for device in driver.devices():
                row: dict[str, Any] = {
                    "uuid": device.uuid, "index": device.index, "minor": device.minor, "pci": device.pci,
                    "model": device.model, "mig": device.mig, "total_mib": device.memory_mib, "processes": None,
                    "fault": None, "reading": None, "busy_pct": None,
                }  # fmt: skip
                rows.append(row)
                try:
                    reading = driver.read(device)
                    row["reading"] = {name: getattr(reading, name) for name in Reading.__slots__}
                    row["processes"] = [self._row(one) for one in self._on(driver, [device])]
                except GpuError as error:
                    row["fault"] = str(error)
                if each:
                    self._each(driver, device, row["processes"] or ())
                if since_us is not None:
                    with contextlib.suppress(GpuError):  # not every driver can tell
                        used = driver.process_utilization(device, since_us)
                        row["busy_pct"] = max((max(one.sm_pct, one.memory_pct) for one in used), default=0.0)
        return rows

    def _each(self, driver: GpuDriver, device: Device, rows: Iterable[dict[str, Any]]) -> None:
        """What each process computed; ``None`` where the driver does not tell."""
        try:
            # By this node's clock, which is the driver's.
            used = {one.pid: one for one in driver.process_utilization(device, int((self.now() - EACH_S) * 1e6))}
        except GpuError:
            return
        for row in rows:
            one = used.get(row["pid"])
            row["sm_pct"], row["memory_pct"] = (0.0, 0.0) if one is None else (one.sm_pct, one.memory_pct)

    def uses(self) -> list[dict[str, Any]]:
        """What each job with a process here uses of CPU and memory."""
        found = jobuse.uses(self.finder, proc=self.proc)
        return [use.row(job) for job, use in sorted(found.items())]

    def _row(self, one: OnGpu) -> dict[str, Any]:
        return {
            "pid": one.pid, "start_ticks": one.started, "uid": one.uid, "command": one.command,
            "used_mib": one.used_mib, "job": one.job, "step": one.step, "source": one.source,
            "system": one.uid < self.first_user, "sm_pct": None, "memory_pct": None,
        }  # fmt: skip

    def _on(self, driver: GpuDriver, devices: Iterable[Device], *, silent: bool = False) -> list[OnGpu]:
        """The processes on some devices, each once. Those that ended meanwhile are left out.

        Raises ``GpuError``; with ``silent`` a device that does not answer is left out, too.
        """
        found: dict[int, OnGpu] = {}
        for device in devices:
            try:
                running = driver.processes(device)
            except GpuError:
                if not silent:
                    raise
                continue
            for each in running:
                there = found.get(each.pid)
                if there is not None:
                    used = (there.used_mib or 0.0) + (each.used_mib or 0.0)
                    found[each.pid] = _also(there, device, used)
                    continue
                with contextlib.suppress(OSError):
                    found[each.pid] = self._look(Process(each.pid, proc=self.proc), device, each.used_mib)
        return list(found.values())

    def _look(self, process: Process, device: Device, used_mib: float | None) -> OnGpu:
        """Raises ``OSError`` where it has ended."""
        started, uid = process.started, process.facts().st_uid
        ref = self.finder.of(process)
        return OnGpu(
            process.pid, started, uid, _command(process), used_mib, (device,),
            None if ref is None else ref.job_id, None if ref is None else ref.step,
            None if ref is None else ref.source, process,
        )  # fmt: skip

    def _still_on(self, driver: GpuDriver, one: OnGpu) -> bool:
        """The driver names it again now that it is held: its number was not given to it after the first answer."""
        with contextlib.suppress(GpuError):
            again = any(each.pid == one.pid for device in one.devices for each in driver.processes(device))
            return again and not one.process.ended()
        return False

    # --- ending one

    def end(self, pid: int, started: int, by: str) -> dict[str, Any]:
        """End a process that belongs to no job. Raises ``NotAnOrphanError`` and ``GpuError``."""
        with self.driver() as driver:
            one = next((one for one in self._on(driver, driver.devices()) if one.pid == pid), None)
            if one is not None and one.started == started and not self._still_on(driver, one):
                one = None
        if (self.finder.started(pid) if one is None else one.started) != started:
            raise NotAnOrphanError("gone", f"process {pid} has ended, or its number is another's by now")
        if one is None:
            raise NotAnOrphanError("not-on-gpu", f"process {pid} is on no GPU of {self.node}")
        why = self._belongs(one, self.queue())
        if why is not None:
            raise why
        log.warning("process %d (uid %d, %s) belongs to no job: ended for %s", pid, one.uid, one.command, one_line(by))
        how = self._end(one)
        if how is None:
            raise NotAnOrphanError("still-there", f"process {pid} does not end: it is in the driver or the kernel")
        return {**self._row(one), "node": self.node, "ended_by": how}

    def _belongs(self, one: OnGpu, queue: Queue | None) -> NotAnOrphanError | None:
        """Why a process is not one to end; ``None``: it belongs to no job."""
        if one.uid < self.first_user:
            return NotAnOrphanError("system", f"process {one.pid} is one of the system (uid {one.uid})")
        if one.source == "slurmstepd":
            return NotAnOrphanError("has-job", f"process {one.pid} is below a slurmstepd of job {one.job}")
        if queue is None:
            return NotAnOrphanError("unknown", "slurmctld does not answer: it is not known which jobs run")
        lost = self._not_listed(queue)
        if lost is not None:
            text = f"slurmctld does not list job {lost}, which has a slurmstepd on {self.node}: has it lost its state?"
            return NotAnOrphanError("unknown", text)
        here = [job for job in queue.jobs if job.allocated and self.node in job.nodes]
        # Also where the job runs elsewhere by now: requeued, it may be restored from what is on this node.
        alive = next((job for job in queue.jobs if job.job_id == one.job and not job.ended), None)
        false = alive is not None and one.source == "environment" and not self._may_be(one.uid, alive.uid)
        if alive is not None and not false:
            return NotAnOrphanError("has-job", f"process {one.pid} is of job {alive.id}, which is {alive.state}")
        if (one.job is None or false) and any(self._may_be(one.uid, job.uid) for job in here):
            what = "names a job of another user" if false else "names no job"
            return NotAnOrphanError(
                "maybe-job", f"process {one.pid} {what}, and its user has, or may have, one on {self.node}"
            )
        return None

    def _not_listed(self, queue: Queue) -> int | None:
        """A job that runs here and that slurmctld does not list: then what it lists is not all that there is."""
        listed = {number for job in queue.jobs for number in (job.job_id, job.array_job_id, job.het_job_id)}
        return min(self.finder.jobs_here() - listed, default=None)

    def _may_be(self, uid: int, owner: int | None) -> bool:
        """A process that slurmd knows no job of may be of one of ``owner``: of the same user, or of nobody by name.

        A container's users have such numbers.
        """
        return owner is None or uid == owner or self.name_of(uid) == str(uid)

    def _end(self, one: OnGpu, term_s: float = TERM_S, kill_s: float = KILL_S) -> str | None:
        """SIGTERM, then SIGKILL, to this very process; what ended it, ``None``: it is still there."""
        for number, wait_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
            try:
                one.process.signal(number)
            except ProcessLookupError:
                return "itself"
            if one.process.wait(wait_s):
                return number.name
        return None

    # --- what a job left

    def leftovers(self, job: int, uid: int, indices: Sequence[int], *, kill: bool, wait_s: float) -> dict[str, Any]:
        """End what a job left on its GPUs, and say whether these are free. Raises ``GpuError``.

        For the epilog: the job's own steps are over by then. Processes of other jobs on the same GPUs are left alone.
        ``indices`` without any, or on a node with MIG: which ones the job had is not known; then its processes are
        looked for on all, and nothing else is its doing.
        """
        mine = functools.partial(self._left_by, job=job, uid=uid, alone=functools.cache(lambda: self._alone(job, uid)))
        with self.driver() as driver:
            everything = driver.devices()
            known = by_index(everything, indices) if indices else None
            devices = everything if known is None else known
            there = self._on(driver, devices, silent=known is None)
            if kill:
                there = [one for one in there if self._still_on(driver, one)]
        # slurmctld is asked, where it has to be, while others have the driver.
        left = [one for one in there if mine(one)]
        # Slurm has signalled them just now: what is about to end was not left behind.
        deadline = self.monotonic() + min(SETTLE_S, wait_s)
        while left and self.monotonic() < deadline:
            self.sleep(POLL_S)
            left = [one for one in left if not one.process.ended()]
        ended: list[dict[str, Any]] = []
        for one, how in zip(left, self._end_all(left, wait_s), strict=True) if kill else ():
            log.warning("job %d left process %d (%s) on a GPU: %s", job, one.pid, one.command, how or "it does not end")
            ended.append({**self._row(one), "ended_by": how})
        dirty = self._dirty(devices, mine, wait_s if ended else 0.0, own=known is not None)
        report = {
            "id": uuid.uuid4().hex[:16], "node": self.node, "job": job, "uid": uid, "at": self.now(), "dirty": dirty,
            "left": ended or [{**self._row(one), "ended_by": None} for one in left],
        }  # fmt: skip
        if left or dirty:
            self.reports.add(report)
        return report

    def _end_all(self, left: Sequence[OnGpu], wait_s: float) -> list[str | None]:
        """All of them at once: the epilog waits no longer for eight ranks than for one."""
        if not left:
            return []
        with ThreadPoolExecutor(min(AT_ONCE, len(left))) as pool:
            return list(pool.map(lambda one: self._end(one, min(TERM_S, wait_s / 2), wait_s / 2), left))

    def _left_by(self, one: OnGpu, *, job: int, uid: int, alone: Callable[[], bool]) -> bool:
        if one.uid < self.first_user:
            return False
        if one.job is None:
            return one.uid == uid and alone()
        # Another user's process that only says so itself is none of this job's.
        return one.job == job and (one.source != "environment" or self._may_be(one.uid, uid))

    def _alone(self, job: int, uid: int) -> bool:
        """The user has no other job here that a process without a name could be of, as far as slurmctld answers.

        It has to list the job itself, whose epilog this is, and every other one that runs here.
        """
        queue = self.queue()
        if queue is None or all(each.job_id != job for each in queue.jobs) or self._not_listed(queue) is not None:
            return False
        return not any(
            each.allocated and each.uid == uid and each.job_id != job and self.node in each.nodes for each in queue.jobs
        )

    def _dirty(
        self, devices: Sequence[Device], mine: Callable[[OnGpu], bool], wait_s: float, *, own: bool
    ) -> list[str]:
        """What is still not free after a time: memory is given back a little after the process has gone.

        ``own``: the devices were the job's; else only its processes count.
        """
        deadline = self.monotonic() + wait_s
        while True:
            found = [text for device in devices for text in self._held(device, mine, own=own)]
            if not found or self.monotonic() >= deadline:
                return found
            self.sleep(POLL_S)

    def _held(self, device: Device, mine: Callable[[OnGpu], bool], *, own: bool) -> list[str]:
        try:
            with self.driver() as driver:
                on, used = self._on(driver, [device]), driver.read(device).fb_used_mib
        except GpuError as error:
            return [f"GPU {device.index}: {error}"] if own else []
        still = [one for one in on if mine(one)]
        if still:
            return [f"GPU {device.index}: process {one.pid} is still there" for one in still]
        if own and not on and used is not None and used > FREE_MIB:
            return [f"GPU {device.index}: {used:.0f} MiB are held and no process holds them"]
        return []


def _also(one: OnGpu, device: Device, used_mib: float) -> OnGpu:
    return replace(one, used_mib=used_mib, devices=(*one.devices, device))


def _command(process: Process) -> str:
    """As the process calls itself; a user chooses that."""
    try:
        text = process.read("cmdline", 4 * SHOWN).replace(b"\0", b" ")
    except OSError:
        return ""
    return one_line(text.decode("utf-8", "replace").strip(), SHOWN)
