"""Which job a process belongs to, read from ``/proc`` alone: nothing is asked of Slurm.

In order: the cgroup that slurmd made (v1 ``/slurm/uid_1000/job_123/step_0``, v2
``/system.slice/slurmstepd.scope/job_123/step_batch``), an ancestor ``slurmstepd: [123.batch]`` of root, the variable
``SLURM_JOB_ID`` of its environment. Slurm 26.05 may name the cgroup by the job's SLUID; then a ``slurmstepd`` says the
id, an ancestor or one of the cgroup: the environment is the user's to write.
"""

from __future__ import annotations

import contextlib
import re
import stat
from dataclasses import replace
from pathlib import Path

from slurm_affinode import kerneltext
from slurm_affinode.model.gpu import JobRef
from slurm_affinode.pinned import PROC, Id, Process, ancestors, own_identity, processes

_CGROUP = re.compile(
    r"/(?:[^/]*slurmstepd\.scope|slurm(?:_[^/]+)?)(?:/uid_\d+)?"
    r"/(?:job_(?P<job>\d+)|(?P<sluid>s[0-9A-Za-z]{8,}))(?:/step_(?P<step>[^/]+))?(?:/|$)"
)
_OF_A_USER = re.compile(r"/user@\d+\.service/")
"""Below it systemd lets a user make cgroups of any name."""
_STEPD = re.compile(r"slurmstepd: \[(\d+)(?:[_+]\d+)?(?:\.([^\]]+))?\]")
_JOB_ID, _STEP_ID = re.compile(r"[1-9][0-9]{0,9}"), re.compile(r"[0-9]{1,10}")
"""What a process says in its environment is its user's choice: nothing else is taken for a number."""
_REMEMBERED = 4096


class JobFinder:
    """Finds jobs of processes. Answers are remembered for as long as the process lives."""

    def __init__(self, proc: Path = PROC, *, cgroups: Path = Path("/sys/fs/cgroup"), trusted_uid: int = 0) -> None:
        """``trusted_uid``: the user that slurmstepd runs as; what others call themselves counts for nothing."""
        self._proc = proc
        self._cgroups = cgroups
        self._trusted_uid = trusted_uid
        self._known: dict[Id, JobRef] = {}

    def started(self, pid: int) -> int | None:
        """When the process started, in ticks since boot; None where there is none. With the PID it is unique."""
        try:
            with Process(pid, proc=self._proc) as process:
                return process.started
        except OSError:
            return None

    def find(self, pid: int, started: int | None = None) -> JobRef | None:
        """The job of a process; None where it is of none, or gone, or (``started``) its PID is another's by now."""
        try:
            with Process(pid, started=started, proc=self._proc) as process:
                return self.of(process)
        except OSError:
            return None

    def of(self, process: Process) -> JobRef | None:
        """The job of a process that is held; None where it is of none, or gone."""
        try:
            key = process.id
            if key in self._known:
                return self._known[key]
            found = self._look(process)
            process.stat()  # it has not ended meanwhile: nothing of it was missing
        except OSError:
            return None
        if found is not None:
            if len(self._known) >= _REMEMBERED:
                # A copy: another thread may find one meanwhile.
                self._known = {k: v for k, v in tuple(self._known.items()) if self.started(k.pid) == k.started}
            self._known[key] = found
        return found

    def _look(self, process: Process) -> JobRef | None:
        match = _cgroup(process)
        if match is not None and match["job"]:
            return JobRef(int(match["job"]), match["step"], "cgroup")
        above = (self.stepd(ancestor) for ancestor in ancestors(process, proc=self._proc))
        found = next((ref for ref in above if ref is not None), None)
        if match is None:
            return found or _environment(process)
        found = found or self._beside(match)
        if found is None:
            return _environment(process)
        # slurmd made its cgroup: it is a job's, and only which one had to be found out.
        return replace(found, step=match["step"] or found.step, source="cgroup")

    def _beside(self, match: re.Match[str]) -> JobRef | None:
        """The job of a cgroup, by a slurmstepd in it: those have one of their own in each step's."""
        path = match.string[: match.end("sluid")]
        if ".." in path.split("/"):  # outside of the cgroup namespace of this process
            return None
        with contextlib.suppress(OSError, ValueError):  # also where its name is too long
            for procs in (self._cgroups / path.lstrip("/")).glob("step_*/slurm/cgroup.procs"):
                for process in processes(kerneltext.numbers("\n".join(kerneltext.lines(procs))), proc=self._proc):
                    found = self.stepd(process)
                    # Its number may have been given away since the list was read.
                    place = _cgroup(process) if found is not None else None
                    if place is not None and place.string.startswith(path + "/"):
                        return found
        return None

    def stepd(self, process: Process) -> JobRef | None:
        """The job of a slurmstepd, by its title; None for every other process.

        Whoever starts a program gives it its title: a setuid one is root's, and says what a user has made it say.
        """
        try:
            before = self._program(process)
            match = _STEPD.match(process.text("cmdline").replace("\0", " "))
            # The same before and after: else a user's process may become a setuid program between two looks.
            if match is None or before is None or self._program(process) != before:
                return None
        except OSError:
            return None
        return JobRef(int(match[1]), match[2], "slurmstepd")

    def jobs_here(self) -> frozenset[int]:
        """Jobs with a slurmstepd on this node, by the number in its title, which may be that of their array.

        One in a PID namespace below this one is of another node, which runs in a container.
        """
        own = own_identity(self._proc)
        return frozenset(
            ref.job_id
            for process in processes(proc=self._proc)
            if (ref := self.stepd(process)) is not None and process.identity("pid") == own
        )

    def _program(self, process: Process) -> tuple[int, int] | None:
        """Device and inode of what a process runs, zeros where this process may not look; None: a user chose it."""
        if process.facts().st_uid != self._trusted_uid:
            return None
        try:
            program = process.facts("exe")
        except OSError:  # root may look, and decides on what it finds
            return 0, 0
        return None if program.st_mode & stat.S_ISUID else (program.st_dev, program.st_ino)


def _cgroup(process: Process) -> re.Match[str] | None:
    for row in _text(process, "cgroup").split("\n"):
        path = row.split(":", 2)[-1]
        match = _CGROUP.search(path)
        if match is not None and not _OF_A_USER.search(path[: match.start() + 1]):
            return match
    return None


def _environment(process: Process) -> JobRef | None:
    variables = dict(variable.split("=", 1) for variable in _text(process, "environ").split("\0") if "=" in variable)
    job = variables.get("SLURM_JOB_ID", "")
    if not _JOB_ID.fullmatch(job):
        return None
    step = variables.get("SLURM_STEP_ID", "")
    return JobRef(int(job), step if _STEP_ID.fullmatch(step) else None, "environment")


def _text(process: Process, name: str) -> str:
    """A file of a process; empty where it cannot be read."""
    try:
        return process.text(name)
    except OSError:
        return ""
