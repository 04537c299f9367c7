"""Lookup of the job that a process or a GPU belongs to, without a request to Slurm.

For a process, in this order: the cgroup made by slurmd (v1 ``/slurm/uid_1000/job_123/step_0``, v2
``/system.slice/slurmstepd.scope/job_123/step_batch``), an ancestor ``slurmstepd: [123.batch]`` of root's, and the
environment variable ``SLURM_JOB_ID``. Slurm 26.05 may name the cgroup after the job's SLUID; then the ID comes from a
``slurmstepd`` (an ancestor, or one in the cgroup), because the user can write the environment.

For a GPU, the job mapping directory of dcgm-exporter (``--hpc-job-mapping-dir``): one file per GPU, named by its index
on the node (``0``; ``0.7`` for GPU instance 7 of GPU 0), with one job ID per line. The prolog adds a job, the epilog
removes it. Writers lock; readers see whole files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slurm_affinode.base import kernel_text
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.files import make_open
from slurm_affinode.base.pidfd import PROC, Id, Process, ancestors, own_identity, processes
from slurm_affinode.model.gpu import Device, JobRef

_NAME = re.compile(r"\d{1,4}(?:\.\d{1,4})?")
_JOB = re.compile(r"\d+(?:[_+]\d+)?")
LOCK_S = 20.0


def key_of(device: Device) -> str:
    """Return the name of a device's file."""
    return str(device.index) if device.mig is None else f"{device.index}.{device.mig}"


def read(directory: Path) -> Mapping[str, tuple[str, ...]] | None:
    """Return the job IDs in each file, in order and without duplicates. None if there is no directory: not known.

    Raises ``UnreachableError`` if it cannot be read.
    """
    by_uuid: dict[str, tuple[str, ...]] = {}
    try:
        for path in directory.iterdir():
            if not _NAME.fullmatch(path.name):
                continue
            with contextlib.suppress(FileNotFoundError):  # the last job ended meanwhile
                by_uuid[path.name] = _jobs(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreachableError(f"{directory}: cannot be read: {error.strerror}") from error
    return by_uuid


def add(directory: Path, gpus: Sequence[str], job: str, *, lock_s: float = LOCK_S) -> None:
    """Add ``job`` to the files of its GPUs. Repeating it is a no-op.

    Raises ``ValueError`` for an invalid file name or ID, ``UnreachableError`` if nothing can be written.
    """
    _check(job)
    wrong = [name for name in gpus if not _NAME.fullmatch(name)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not the index of a GPU")
    with _locked(directory, lock_s):
        for name in gpus:
            path = directory / name
            jobs = _jobs(path) if path.exists() else ()
            _write(path, jobs if job in jobs else (*jobs, job))


def remove(directory: Path, job: str, *, lock_s: float = LOCK_S) -> None:
    """Remove ``job`` from all files; it need not have a GPU. Raises as ``add``.

    Every file is checked, because an epilog may not know the GPUs (Slurm leaves ``SLURM_JOB_GPUS`` empty if a job was
    canceled while its prolog ran).
    """
    _check(job)
    with _locked(directory, lock_s):
        for path in sorted(directory.iterdir()):
            if _NAME.fullmatch(path.name) and job in (jobs := _jobs(path)):
                _write(path, tuple(number for number in jobs if number != job))


def _check(job: str) -> None:
    if not _JOB.fullmatch(job):
        raise ValueError(f"{job!r} is not a job ID")


def _jobs(path: Path) -> tuple[str, ...]:
    lines = (line.strip() for line in path.read_text("utf-8", "replace").splitlines())
    return tuple(dict.fromkeys(line for line in lines if line))


def _write(path: Path, jobs: tuple[str, ...]) -> None:
    """Replace a file. It is not synced, since the jobs do not survive a power loss either."""
    if not jobs:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with temporary.open("x") as file:
        file.write("".join(f"{job}\n" for job in jobs))
        os.fchmod(file.fileno(), 0o644)
    temporary.replace(path)


@contextlib.contextmanager
def _locked(directory: Path, lock_s: float) -> Iterator[None]:
    """Lock the directory itself, so that it needs no lock file (a shell may use ``flock DIRECTORY``)."""
    try:
        make_open(directory)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            facts = os.fstat(fd)
            if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & 0o022:
                # As root, this process would follow links that they place there.
                raise UnreachableError(
                    f"{directory}: users other than its owner may write to it",
                    hint=f"try: chown root:root {directory} && chmod 0755 {directory}",
                )
            if not _lock(fd, lock_s):
                raise UnreachableError(f"{directory}: has been locked for {lock_s:g} s")
            yield
        finally:
            os.close(fd)
    except OSError as error:
        raise UnreachableError(f"{directory}: cannot be written: {error.strerror}") from error


def _lock(fd: int, wait_s: float) -> bool:
    """Lock a file exclusively. Return ``False`` if another process held the lock for ``wait_s`` seconds."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        else:
            return True


_CGROUP = re.compile(
    r"(?P<top>/(?:[^/]*slurmstepd\.scope|slurm(?:_[^/]+)?))(?:/uid_\d+)?"
    r"/(?:job_(?P<job>[0-9]{1,10})|(?P<sluid>s[0-9A-Za-z]{8,}))(?:/step_(?P<step>[^/]+))?(?:/|$)"
)
_USER_SERVICE = re.compile(r"/user@\d+\.service/")
"""Below it, systemd lets users create cgroups of any name."""
_STEPD = re.compile(r"slurmstepd: \[([0-9]{1,10})(?:[_+]\d+)?(?:\.([^\]]+))?\]")
_JOB_ID, _STEP_ID = re.compile(r"[1-9][0-9]{0,9}"), re.compile(r"[0-9]{1,10}")
"""The user controls the environment of a process, so only these forms are parsed as numbers."""
_REMEMBERED = 4096
_LONGEST_TITLE = 256
"""Of the title of a slurmstepd."""


class JobFinder:
    """Finds jobs of processes. Results are cached as long as the process lives."""

    def __init__(self, proc: Path = PROC, *, cgroups: Path = Path("/sys/fs/cgroup"), trusted_uid: int = 0) -> None:
        """``trusted_uid``: the user that slurmstepd runs as; titles of other users' processes are ignored."""
        self._proc = proc
        self._cgroups = cgroups
        self._trusted_uid = trusted_uid
        self._job_refs: dict[Id, JobRef] = {}

    def started(self, pid: int) -> int | None:
        """Return the start time of a process in ticks since boot, or None. With the PID it is unique."""
        try:
            with Process(pid, proc=self._proc) as process:
                return process.started
        except OSError:
            return None

    def find(self, pid: int, started: int | None = None) -> JobRef | None:
        """Return the job of a process, or None if it has no job, is gone, or (``started``) its PID was reused."""
        try:
            with Process(pid, started=started, proc=self._proc) as process:
                return self.of(process)
        except OSError:
            return None

    def of(self, process: Process) -> JobRef | None:
        """Return the job of a process that is held, or None if it has no job or is gone."""
        try:
            key = process.id
            if key in self._job_refs:
                return self._job_refs[key]
            ref_ = self._find(process)
            process.stat()  # raises if it ended meanwhile, in which case data may be missing
        except OSError:
            return None
        if ref_ is not None:
            if len(self._job_refs) >= _REMEMBERED:
                # Copy, because another thread may change it meanwhile.
                self._job_refs = {k: v for k, v in tuple(self._job_refs.items()) if self.started(k.pid) == k.started}
            self._job_refs[key] = ref_
        return ref_

    def _find(self, process: Process) -> JobRef | None:
        match = _cgroup(process)
        if match is not None and match["job"]:
            return JobRef(int(match["job"]), match["step"], "cgroup")
        above = (self.stepd(ancestor) for ancestor in ancestors(process, proc=self._proc))
        nearest = next((ref for ref in above if ref is not None), None)
        if match is None:
            return nearest or _environment(process)
        nearest = nearest or self._beside(match)
        if nearest is None:
            return _environment(process)
        # The cgroup was made by slurmd, so it is a job's; only the job ID had to be found.
        return replace(nearest, step=match["step"] or nearest.step, source="cgroup")

    def _beside(self, match: re.Match[str]) -> JobRef | None:
        """Return the job of a cgroup from a slurmstepd in it; each step's cgroup has a slurmstepd of its own."""
        path = match.string[: match.end("sluid")]
        if ".." in path.split("/"):  # outside the cgroup namespace of this process
            return None
        with contextlib.suppress(OSError, ValueError):  # also if its name is too long
            for procs in (self._cgroups / path.lstrip("/")).glob("step_*/slurm/cgroup.procs"):
                for process in processes(kernel_text.numbers("\n".join(kernel_text.lines(procs))), proc=self._proc):
                    ref = self.stepd(process)
                    # The PID may have been reused since the list was read.
                    place = _cgroup(process) if ref is not None else None
                    if place is not None and place.string.startswith(path + "/"):
                        return ref
        return None

    def stepd(self, process: Process) -> JobRef | None:
        """Return the job in the title of a slurmstepd; None for every other process.

        A program's title is set by the process that starts it: a setuid program belongs to root, but its title is the
        user's.
        """
        try:
            before = self._program(process)
            if before is None:
                return None
            title = process.read("cmdline", _LONGEST_TITLE).decode("utf-8", "replace")
            match = _STEPD.match(title.replace("\0", " "))
            # Checked before and after, because a user's process could become a setuid program in between.
            if match is None or self._program(process) != before:
                return None
        except OSError:
            return None
        return JobRef(int(match[1]), match[2], "slurmstepd")

    def jobs_here(self) -> frozenset[int]:
        """Return the jobs with a slurmstepd on this node, by the ID in its title, which may be that of their array.

        A slurmstepd in a nested PID namespace belongs to another node that runs in a container.
        """
        agent_identity = own_identity(self._proc)
        return frozenset(
            ref.job_id
            for process in processes(proc=self._proc)
            if (ref := self.stepd(process)) is not None and process.identity("pid") == agent_identity
        )

    def _program(self, process: Process) -> tuple[int, int] | None:
        """Return device and inode of a process's program, zeros if not permitted; None if a user chose it."""
        if process.facts().st_uid != self._trusted_uid:
            return None
        try:
            program = process.facts("exe")
        except OSError:  # only root may read it, and decides on the result
            return 0, 0
        return None if program.st_mode & stat.S_ISUID else (program.st_dev, program.st_ino)


def cgroup_of_job(path: str) -> tuple[str, str] | None:
    """Return the paths of slurmd's cgroup for all jobs and of a job's, above or at ``path`` as in ``/proc/PID/cgroup``.

    ``None``: slurmd has not created it.
    """
    match = _match_slurmd(path)
    if match is None:
        return None
    return path[: match.end("top")], path[: match.end("job" if match["job"] else "sluid")]


def _cgroup(process: Process) -> re.Match[str] | None:
    matches = (_match_slurmd(row.split(":", 2)[-1]) for row in process.text_if_readable("cgroup").split("\n"))
    return next((match for match in matches if match is not None), None)


def _match_slurmd(path: str) -> re.Match[str] | None:
    match = _CGROUP.search(path)
    return None if match is None or _USER_SERVICE.search(path[: match.start() + 1]) else match


def _environment(process: Process) -> JobRef | None:
    try:
        job = process.variable("SLURM_JOB_ID") or ""
        if not _JOB_ID.fullmatch(job):
            return None
        step = process.variable("SLURM_STEP_ID") or ""
    except OSError:  # it has ended, or may not be read
        return None
    return JobRef(int(job), step if _STEP_ID.fullmatch(step) else None, "environment")
