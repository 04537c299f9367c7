"""Processes on the GPUs of this node: find their jobs, and terminate those without a job or without their server.

A request names a process by PID and start time. Whether it belongs to a job is determined again at that moment, from
its cgroup, its ancestors, its initial environment, and slurmctld; an unknown answer protects the process. For the
process of a model server in a job that runs, the request names the job too, and that the process is the job's, holds
GPU memory and has lost its server is determined again. The process that was checked is held by its pidfd and is the one
that is signaled.

CPU time and memory per job come from cgroups, or from the processes where there are none. Errors are in favor of the
job: memory includes the page cache of a cgroup, or the peak of each process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurm_affinode.agent.hook_records import LeftoverReports
from slurm_affinode.base import kernel_text
from slurm_affinode.base.pidfd import PROC, Process, processes
from slurm_affinode.base.text import one_line
from slurm_affinode.base.threads import pool
from slurm_affinode.base.users import name_of_user
from slurm_affinode.gpu.interface import GpuDriver, GpuError
from slurm_affinode.gpu.jobs import JobFinder, cgroup_of_job
from slurm_affinode.gpu.server_trees import TRUSTED, LostServer, ServerTrees
from slurm_affinode.model.gpu import FREE_MIB, Device, Reading, attributed, total_mib
from slurm_affinode.suspension.activity import by_index
from slurm_affinode.suspension.slurm_queue import SlurmQueue

CGROUPS = Path("/sys/fs/cgroup")
_KTHREADD = 2
"""The parent of all kernel threads."""
_TICKS = os.sysconf("SC_CLK_TCK")
_MPS = re.compile(r"(?:[^ ]*/)?nvidia-cuda-mps-")
_USAGE = re.compile(r"^usage_usec (\d+)$", re.MULTILINE)


@dataclass(slots=True)
class Use:
    """CPU time and memory that one job uses on this node."""

    cpu_s: float = 0.0
    """CPU time so far, including ended processes whose parent has waited for them."""
    memory_mib: float = 0.0
    """Peak memory, or an upper bound of it."""
    by: str = "processes"

    def row(self, job: int) -> dict[str, Any]:
        """Return the usage as a row of an agent's reply."""
        return {"job": job, "cpu_s": round(self.cpu_s, 2), "memory_mib": round(self.memory_mib, 1), "by": self.by}


def uses(finder: JobFinder, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> dict[int, Use]:
    """Return the usage of each job with a process on this node, by raw job ID. Raises ``ExhaustedError``."""
    job_uses: dict[int, Use] = {}
    groups: dict[int, dict[str, str]] = {}
    for process in processes(proc=proc):
        try:
            stat = process.stat()
        except OSError:
            continue
        if stat.parent == _KTHREADD:
            continue
        stepd = finder.stepd(process)  # the job's slurmstepd, which has waited for the tasks that have ended
        ref = stepd or finder.of(process)
        if ref is None:
            continue
        use = job_uses.setdefault(ref.job_id, Use())
        # User and system time of the process, or, for slurmstepd, of the children that it has waited for.
        agent_known = slice(11, 15) if stepd is None else slice(13, 15)
        use.cpu_s += sum(kernel_text.number(word) or 0 for word in stat.fields[agent_known]) / _TICKS
        if stepd is None:
            use.memory_mib += _peak_mib(process)
        if ref.source == "cgroup":
            groups.setdefault(ref.job_id, {}).update(_groups(process))
    for number, paths in groups.items():
        _by_cgroup(job_uses[number], cgroups, paths)
    return job_uses


def _peak_mib(process: Process) -> float:
    """Return the peak memory of a process in MiB; 0 if not known (a kernel thread, or an ended process)."""
    try:
        return (kernel_text.kib(process.status().get("VmHWM")) or 0) / 2**20
    except OSError:
        return 0.0


def _groups(process: Process) -> dict[str, str]:
    """Return the cgroups of the process's job: controller, or ``""`` for version 2 -> path."""
    groups: dict[str, str] = {}
    try:
        rows = process.text("cgroup").split("\n")
    except OSError:
        return groups
    for row in rows:
        controllers, _, path = row.partition(":")[2].partition(":")
        of_job = cgroup_of_job(path)
        # Paths above the root of this process's cgroup namespace cannot be read.
        if of_job is not None and ".." not in path.split("/"):
            groups.update(dict.fromkeys(controllers.split(","), of_job[1]))
    return groups


def _by_cgroup(use: Use, root: Path, paths: Mapping[str, str]) -> None:
    """Replace the usage with that of the job's cgroups, if they measure both CPU time and memory."""
    unified = "" in paths
    spent = _read(root, paths, "" if unified else "cpuacct", "cpu.stat" if unified else "cpuacct.usage")
    peak = _read(root, paths, "" if unified else "memory", "memory.peak" if unified else "memory.max_usage_in_bytes")
    if unified:
        match = _USAGE.search(spent)
        spent = "" if match is None else match[1]
    spent_so_far, peak_bytes = kernel_text.number(spent.strip()), kernel_text.number(peak.strip())
    if spent_so_far is None or peak_bytes is None:
        return
    use.cpu_s, use.memory_mib, use.by = spent_so_far / (1e6 if unified else 1e9), peak_bytes / 2**20, "cgroup"


def _read(root: Path, paths: Mapping[str, str], controller: str, name: str) -> str:
    """Return a file of a cgroup; empty if the job has no cgroup of this controller."""
    return _text(root / controller / paths[controller].lstrip("/") / name) if controller in paths else ""


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except (OSError, ValueError):  # the latter for a path with a NUL byte
        return ""


log = logging.getLogger(__name__)

FIRST_USER = 1000
"""Lower UIDs are system users (drivers, exporters, display managers); their processes are never ended."""
TERM_S = 5.0
KILL_S = 5.0
SETTLE_S = 1.0
"""Time in which processes left on a GPU at the end of a job may end by themselves."""
POLL_S = 0.1
EACH_S = 5.0
"""How far back process utilization is read: requests are 2 s apart, and the driver samples about once per second."""
SHOWN = 120
AT_ONCE = 16


class NotAnOrphanError(Exception):
    """The process must not be ended. The message has the reason, and ``code`` its machine-readable form."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class OnGpu:
    """A process and the devices that it uses."""

    pid: int
    started: int
    """In clock ticks since boot."""
    uid: int
    command: str
    used_mib: float | None
    devices: tuple[Device, ...]
    job: int | None
    step: str | None
    source: str | None
    """How the job was identified, see ``model.gpu.JobRef``; ``None``: no job."""
    process: Process
    """The process that these values were read from; held as long as this object."""


@dataclass(slots=True)
class Orphans:
    """Finds and ends processes on a node's GPUs. ``driver`` lends the driver to one thread at a time."""

    driver: Callable[[], contextlib.AbstractContextManager[GpuDriver]]
    queue: Callable[[], SlurmQueue | None]
    """Requests the queue from slurmctld; ``None`` if it does not respond."""
    node: str
    finder: JobFinder = field(default_factory=JobFinder)
    proc: Path = PROC
    first_user: int = FIRST_USER
    name_of: Callable[[int], str] = name_of_user
    now: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    reports: LeftoverReports = field(default_factory=LeftoverReports)
    """Reports of processes that jobs left behind."""
    servers: ServerTrees | None = None
    """The servers above the GPU processes of jobs; ``None``: they are not observed."""

    # --- looking

    def gpus(self, since_us: int | None = None, *, each: bool = False) -> list[dict[str, Any]]:
        """Return every device with its metrics and processes. Raises ``GpuError`` without a driver.

        ``since_us`` (microseconds since the epoch) adds the utilization of the busiest process since then, as far back
        as the driver's buffer reaches. ``each`` adds the utilization of each process in the last ``EACH_S``.
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
                reading: Reading | None = None
                try:
                    reading = driver.read(device)
                    row["reading"] = {name: getattr(reading, name) for name in Reading.__slots__}
                    row["processes"] = [self._row(orphan) for orphan in self._on(driver, [device])]
                except GpuError as error:
                    row["fault"] = str(error)
                if each and reading is not None:
                    self._with_utilization(driver, device, reading, row["processes"] or ())
                if since_us is not None:
                    with contextlib.suppress(GpuError):  # not every driver supports this
                        used = driver.process_utilization(device, since_us)
                        row["busy_pct"] = max((max(usage.sm_pct, usage.memory_pct) for usage in used), default=0.0)
        return rows

    def _with_utilization(
        self, driver: GpuDriver, device: Device, reading: Reading, rows: Iterable[dict[str, Any]]
    ) -> None:
        """Add the utilization of each process; ``None`` if the driver does not report it.

        A process is known to be idle only if others explain the activity of the GPU. The server of MPS does not: it
        acts for its clients.
        """
        try:
            # The driver uses the clock of this node.
            used = {usage.pid: usage for usage in driver.process_utilization(device, int((self.now() - EACH_S) * 1e6))}
        except GpuError:
            return
        servers = {row["pid"] for row in rows if _MPS.match(row["command"])}
        explained = attributed([usage for usage in used.values() if usage.pid not in servers], reading)
        for row in rows:
            sample = used.get(row["pid"])
            if sample is not None and max(sample.sm_pct, sample.memory_pct) > 0:
                row["sm_pct"], row["memory_pct"] = sample.sm_pct, sample.memory_pct
            elif explained:
                row["sm_pct"] = row["memory_pct"] = 0.0

    def uses(self) -> list[dict[str, Any]]:
        """Return the CPU time and memory of each job with a process on this node."""
        job_uses = uses(self.finder, proc=self.proc)
        return [use.row(job) for job, use in sorted(job_uses.items())]

    def _row(self, orphan: OnGpu) -> dict[str, Any]:
        return {
            "pid": orphan.pid, "start_ticks": orphan.started, "uid": orphan.uid, "command": orphan.command,
            "used_mib": orphan.used_mib, "job": orphan.job, "step": orphan.step, "source": orphan.source,
            "system": orphan.uid < self.first_user, "sm_pct": None, "memory_pct": None, "server": self._server(orphan),
        }  # fmt: skip

    def _server(self, orphan: OnGpu) -> dict[str, Any] | None:
        """Return the server that a process has lost, as a row; ``None``: it has none, or that is unknown."""
        lost = self._lost(orphan)
        if lost is None:
            return None
        names = [{"engine": engine, "model": model, "rank": rank} for engine, model, rank in lost.port.engines]
        return {"address": lost.port.address, "engines": names, "pids": list(lost.pids), "ended": lost.since}

    def _lost(self, orphan: OnGpu) -> LostServer | None:
        if self.servers is None or orphan.job is None or orphan.source not in TRUSTED:
            return None
        return self.servers.lost(orphan.process, orphan.job)

    def _on(self, driver: GpuDriver, devices: Iterable[Device], *, unresponsive: bool = False) -> list[OnGpu]:
        """Return the processes on some devices, each once, without those that have ended meanwhile.

        Raises ``GpuError``; with ``unresponsive``, a device that does not respond is skipped instead.
        """
        on_gpus: dict[int, OnGpu] = {}
        for device in devices:
            try:
                running = driver.processes(device)
            except GpuError:
                if not unresponsive:
                    raise
                continue
            for each in running:
                gpu_process = on_gpus.get(each.pid)
                if gpu_process is not None:
                    used = total_mib((gpu_process.used_mib, each.used_mib))
                    on_gpus[each.pid] = replace(gpu_process, used_mib=used, devices=(*gpu_process.devices, device))
                    continue
                with contextlib.suppress(OSError):
                    on_gpus[each.pid] = self._facts_of(Process(each.pid, proc=self.proc), device, each.used_mib)
        return list(on_gpus.values())

    def _facts_of(self, process: Process, device: Device, used_mib: float | None) -> OnGpu:
        """Read the facts of a process. Raises ``OSError`` if it has ended."""
        started, uid = process.started, process.facts().st_uid
        ref = self.finder.of(process)
        return OnGpu(
            process.pid, started, uid, _command(process), used_mib, (device,),
            None if ref is None else ref.job_id, None if ref is None else ref.step,
            None if ref is None else ref.source, process,
        )  # fmt: skip

    def _still_on(self, driver: GpuDriver, orphan: OnGpu) -> bool:
        """Return whether the driver lists the process again now that it is held: its PID was not reused."""
        with contextlib.suppress(GpuError):
            again = any(each.pid == orphan.pid for device in orphan.devices for each in driver.processes(device))
            return again and not orphan.process.ended()
        return False

    # --- ending one

    def end(self, pid: int, started: int, by: str, job: int | None = None) -> dict[str, Any]:
        """End a process that belongs to no job; or, of this job, one that has lost its server.

        Raises ``NotAnOrphanError`` and ``GpuError``.
        """
        with self.driver() as driver:
            orphan = next((process for process in self._on(driver, driver.devices()) if process.pid == pid), None)
            if orphan is not None and orphan.started == started and not self._still_on(driver, orphan):
                orphan = None
        if (self.finder.started(pid) if orphan is None else orphan.started) != started:
            raise NotAnOrphanError("gone", f"process {pid} has ended, or its PID was reused")
        if orphan is None:
            raise NotAnOrphanError("not-on-gpu", f"process {pid} does not use a GPU of {self.node}")
        why = self._belongs(orphan, self.queue()) if job is None else self._serves(orphan, job, self.queue())
        if why is not None:
            raise why
        text = "belongs to no job" if job is None else f"of job {job} has lost its server"
        log.warning("process %d (uid %d, %s) %s: ended for %s", pid, orphan.uid, orphan.command, text, one_line(by))
        outcome = self._end(orphan)
        if outcome is None:
            raise NotAnOrphanError("still-there", f"process {pid} does not end: it is in the driver or the kernel")
        return {**self._row(orphan), "node": self.node, "ended_by": outcome}

    def _belongs(self, orphan: OnGpu, queue: SlurmQueue | None) -> NotAnOrphanError | None:
        """Return why a process must not be ended, or ``None`` if it belongs to no job."""
        if orphan.uid < self.first_user:
            return NotAnOrphanError("system", f"process {orphan.pid} is one of the system (uid {orphan.uid})")
        if orphan.source == "slurmstepd":
            return NotAnOrphanError("has-job", f"process {orphan.pid} is below a slurmstepd of job {orphan.job}")
        if queue is None:
            return NotAnOrphanError("unknown", "slurmctld does not respond: it is not known which jobs run")
        lost = self._not_listed(queue)
        if lost is not None:
            text = f"slurmctld does not list job {lost}, which has a slurmstepd on {self.node}: has it lost its state?"
            return NotAnOrphanError("unknown", text)
        node_jobs = [job for job in queue.jobs if job.allocated and self.node in job.nodes]
        # Even if the job now runs elsewhere: after a requeue it may be restored from state on this node.
        alive = next((job for job in queue.jobs if job.job_id == orphan.job and not job.has_ended), None)
        ended = next((job for job in queue.jobs if job.job_id == orphan.job and job.has_ended), None)
        # The environment names any job: that it is one of the user's own must be known.
        foreign = ended is None or ended.uid != orphan.uid if alive is None else not self._may_be(orphan.uid, alive.uid)
        false = orphan.job is not None and orphan.source == "environment" and foreign
        if alive is not None and not false:
            return NotAnOrphanError("has-job", f"process {orphan.pid} is of job {alive.id}, which is {alive.state}")
        if (orphan.job is None or false) and any(self._may_be(orphan.uid, job.uid) for job in node_jobs):
            what = "names a job that is not known to be its user's" if false else "names no job"
            return NotAnOrphanError(
                "maybe-job", f"process {orphan.pid} {what}, and its user has, or may have, one on {self.node}"
            )
        return None

    def _serves(self, orphan: OnGpu, job: int, queue: SlurmQueue | None) -> NotAnOrphanError | None:
        """Return why a process must not be ended, or ``None`` if it is of this job and has lost its server."""
        if orphan.uid < self.first_user:
            return NotAnOrphanError("system", f"process {orphan.pid} is one of the system (uid {orphan.uid})")
        if orphan.job != job or orphan.source not in TRUSTED:
            return NotAnOrphanError("other-job", f"process {orphan.pid} is not known to be of job {job}")
        if queue is None:
            return NotAnOrphanError("unknown", "slurmctld does not respond: it is not known which jobs run")
        alive = next((each for each in queue.jobs if each.job_id == job), None)
        if alive is None or not alive.allocated or alive.state == "COMPLETING" or self.node not in alive.nodes:
            return NotAnOrphanError("ended", f"job {job} no longer runs on {self.node}")
        if alive.state != "RUNNING":
            return NotAnOrphanError("other-job", f"job {alive.id} is {alive.state}: its processes do not run")
        if alive.uid is not None and alive.uid != orphan.uid:
            return NotAnOrphanError("other-job", f"process {orphan.pid} is not of the owner of job {alive.id}")
        if not orphan.used_mib:
            text = "holds no GPU memory" if orphan.used_mib is not None else "holds an unknown amount of GPU memory"
            return NotAnOrphanError("no-memory", f"process {orphan.pid} {text}")
        if self._lost(orphan) is None:
            return NotAnOrphanError("served", f"the server of process {orphan.pid} is there, or is not known")
        return None

    def _not_listed(self, queue: SlurmQueue) -> int | None:
        """Return a job that runs here but is missing from slurmctld's list, which is then incomplete."""
        listed_jobs = {number for job in queue.jobs for number in (job.job_id, job.array_job_id, job.het_job_id)}
        return min(self.finder.jobs_here() - listed_jobs, default=None)

    def _may_be(self, uid: int, owner: int | None) -> bool:
        """Return whether a process without a known job may belong to a job of ``owner``.

        It may if the user is the same, or if the UID has no name, as in containers.
        """
        return owner is None or uid == owner or self.name_of(uid) == str(uid)

    def _end(self, orphan: OnGpu, term_s: float = TERM_S, kill_s: float = KILL_S) -> str | None:
        """Send SIGTERM, then SIGKILL, to this very process. Return what ended it, or ``None`` if it still runs."""
        for number, wait_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
            try:
                orphan.process.signal(number)
            except ProcessLookupError:
                return "itself"
            if orphan.process.wait(wait_s):
                return number.name
        return None

    # --- what a job left

    def leftovers(self, job: int, uid: int, indices: Sequence[int], *, kill: bool, wait_s: float) -> dict[str, Any]:
        """End processes that a job left on its GPUs, and report whether the GPUs are free. Raises ``GpuError``.

        Called for the epilog, when the job's own steps have ended. Processes of other jobs on the same GPUs are left
        alone. If ``indices`` is empty, or the node has MIG, the job's GPUs are not known: then its processes are looked
        for on all GPUs, and nothing else is attributed to it.
        """
        belongs = functools.partial(
            self._left_by, job=job, uid=uid, alone=functools.cache(lambda: self._is_only_job(job, uid))
        )
        with self.driver() as driver:
            everything = driver.devices()
            node_devices = by_index(everything, indices) if indices else None
            devices = everything if node_devices is None else node_devices
            orphans = self._on(driver, devices, unresponsive=True)  # the report names such a GPU if it was the job's
            if kill:
                orphans = [orphan for orphan in orphans if self._still_on(driver, orphan)]
        # Outside the driver's lock, as this may query slurmctld.
        leftovers = [orphan for orphan in orphans if belongs(orphan)]
        # Slurm has just signaled them: a process about to end was not left behind.
        deadline = self.monotonic() + min(SETTLE_S, wait_s)
        while leftovers and self.monotonic() < deadline:
            self.sleep(POLL_S)
            leftovers = [orphan for orphan in leftovers if not orphan.process.ended()]
        ended: list[dict[str, Any]] = []
        for process, outcome in zip(leftovers, self._end_all(leftovers, wait_s), strict=True) if kill else ():
            log.warning(
                "job %d left process %d (%s) on a GPU: %s",
                job,
                process.pid,
                process.command,
                outcome or "it does not end",
            )
            ended.append({**self._row(process), "ended_by": outcome})
        dirty = self._dirty(devices, belongs, wait_s if ended else 0.0, agent_known=node_devices is not None)
        report = {
            "id": uuid.uuid4().hex[:16], "node": self.node, "job": job, "uid": uid, "at": self.now(), "dirty": dirty,
            "left": ended or [{**self._row(orphan), "ended_by": None} for orphan in leftovers],
        }  # fmt: skip
        if leftovers or dirty:
            self.reports.add(report)
        return report

    def _end_all(self, leftovers: Sequence[OnGpu], wait_s: float) -> list[str | None]:
        """End all of them concurrently, so that eight ranks take the epilog no longer than one."""
        if not leftovers:
            return []
        with pool("leftovers", min(AT_ONCE, len(leftovers))) as executor:
            return list(executor.map(lambda orphan: self._end(orphan, min(TERM_S, wait_s / 2), wait_s / 2), leftovers))

    def _left_by(self, orphan: OnGpu, *, job: int, uid: int, alone: Callable[[], bool]) -> bool:
        if orphan.uid < self.first_user:
            return False
        if orphan.job is None:
            return orphan.uid == uid and alone()
        # A job ID in the environment of another user's process proves nothing.
        return orphan.job == job and (orphan.source != "environment" or self._may_be(orphan.uid, uid))

    def _is_only_job(self, job: int, uid: int) -> bool:
        """Return whether the user has no other job here that an unidentified process may belong to.

        slurmctld's list of jobs decides; it must contain the job itself, since this is its epilog, and every other job
        that runs here.
        """
        queue = self.queue()
        if queue is None or all(each.job_id != job for each in queue.jobs) or self._not_listed(queue) is not None:
            return False
        return not any(
            each.allocated and each.uid == uid and each.job_id != job and self.node in each.nodes for each in queue.jobs
        )

    def _dirty(
        self, devices: Sequence[Device], belongs: Callable[[OnGpu], bool], wait_s: float, *, agent_known: bool
    ) -> list[str]:
        """Return the devices still not free after a time; memory is released shortly after the process has ended.

        ``agent_known``: the devices were the job's; otherwise only its processes count.
        """
        deadline = self.monotonic() + wait_s
        while True:
            remains = [
                text for device in devices for text in self._remaining_uses(device, belongs, agent_known=agent_known)
            ]
            if not remains or self.monotonic() >= deadline:
                return remains
            self.sleep(POLL_S)

    def _remaining_uses(self, device: Device, belongs: Callable[[OnGpu], bool], *, agent_known: bool) -> list[str]:
        try:
            with self.driver() as driver:
                on, used = self._on(driver, [device]), driver.read(device).fb_used_mib
        except GpuError as error:
            return [f"GPU {device.index}: {error}"] if agent_known else []
        still = [orphan for orphan in on if belongs(orphan)]
        if still:
            return [f"GPU {device.index}: process {orphan.pid} is still there" for orphan in still]
        if agent_known and not on and used is not None and used > FREE_MIB:
            return [f"GPU {device.index}: {used:.0f} MiB are held and no process holds them"]
        return []


def _command(process: Process) -> str:
    """Return the command line of the process, which is chosen by its user."""
    try:
        text = process.read("cmdline", 4 * SHOWN).replace(b"\0", b" ")
    except OSError:
        return ""
    return one_line(text.decode("utf-8", "replace").strip(), SHOWN)
