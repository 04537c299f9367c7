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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_affinode.model.gpu import JobRef

_CGROUP = re.compile(
    r"/(?:[^/]*slurmstepd\.scope|slurm(?:_[^/]+)?)(?:/uid_\d+)?"
    r"/(?:job_(?P<job>\d+)|(?P<sluid>s[0-9A-Za-z]{8,}))(?:/step_(?P<step>[^/]+))?(?:/|$)"
)
_OF_A_USER = re.compile(r"/user@\d+\.service/")
"""Below it systemd lets a user make cgroups of any name."""
_STEPD = re.compile(r"slurmstepd: \[(\d+)(?:[_+]\d+)?(?:\.([^\]]+))?\]")
_JOB_ID, _STEP_ID = re.compile(r"[1-9][0-9]{0,9}"), re.compile(r"[0-9]{1,10}")
"""What a process says in its environment is its user's choice: nothing else is taken for a number."""
_DEPTH = 200
_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    parent: int
    started: int
    """Ticks since the machine booted (field 22 of ``/proc/PID/stat``)."""


class JobFinder:
    """Finds jobs of processes. Answers are remembered for as long as the process lives."""

    def __init__(
        self, proc: Path = Path("/proc"), *, cgroups: Path = Path("/sys/fs/cgroup"), trusted_uid: int = 0
    ) -> None:
        """``trusted_uid``: the user that slurmstepd runs as; what others call themselves counts for nothing."""
        self._proc = proc
        self._cgroups = cgroups
        self._trusted_uid = trusted_uid
        self._known: dict[tuple[int, int], JobRef] = {}

    def started(self, pid: int) -> int | None:
        """When the process started, in ticks since boot; None where there is none. With the PID it is unique."""
        process = self._process(pid)
        return None if process is None else process.started

    def find(self, pid: int, started: int | None = None) -> JobRef | None:
        """The job of a process; None where it is of none, or gone, or (``started``) its PID is another's by now."""
        process = self._process(pid)
        if process is None or started not in (None, process.started):
            return None
        key = (pid, process.started)
        if key in self._known:
            return self._known[key]
        found = self._look(process)
        # What was read is of this process only if it is still there.
        if self.started(pid) != process.started:
            return None
        if found is not None:
            if len(self._known) >= _REMEMBERED:
                # A copy: another thread may find one meanwhile.
                self._known = {k: v for k, v in tuple(self._known.items()) if self.started(k[0]) == k[1]}
            self._known[key] = found
        return found

    def _look(self, process: _Process) -> JobRef | None:
        match = self._cgroup(process.pid)
        if match is not None and match["job"]:
            return JobRef(int(match["job"]), match["step"], "cgroup")
        line = list(self._line(process))
        above = (self.stepd(ancestor.pid) for ancestor in line[1:])
        found = next((ref for ref in above if ref is not None), None)
        if match is None:
            return found or self._environment(process.pid)
        found = found or self._beside(match)
        if found is None:
            return self._environment(process.pid)
        # slurmd made its cgroup: it is a job's, and only which one had to be found out.
        return replace(found, step=match["step"] or found.step, source="cgroup")

    def _beside(self, match: re.Match[str]) -> JobRef | None:
        """The job of a cgroup, by a slurmstepd in it: those have one of their own in each step's."""
        job = self._cgroups / match.string[: match.end("sluid")].lstrip("/")
        for procs in job.glob("step_*/slurm/cgroup.procs"):
            with contextlib.suppress(OSError, ValueError):
                for pid in procs.read_text().split():
                    found = self.stepd(int(pid))
                    if found is not None:
                        return found
        return None

    def _cgroup(self, pid: int) -> re.Match[str] | None:
        for row in self._text(pid, "cgroup").split("\n"):
            path = row.split(":", 2)[-1]
            match = _CGROUP.search(path)
            if match is not None and not _OF_A_USER.search(path[: match.start() + 1]):
                return match
        return None

    def _line(self, process: _Process) -> Iterator[_Process]:
        """The process and its ancestors, as long as each is older than its child."""
        for _ in range(_DEPTH):
            yield process
            parent = self._process(process.parent) if process.parent > 0 else None
            if parent is None or parent.started > process.started:
                return
            process = parent

    def stepd(self, pid: int) -> JobRef | None:
        """The job of a slurmstepd, by its title; None for every other process.

        Whoever starts a program gives it its title: a setuid one is root's, and says what a user has made it say.
        """
        match = _STEPD.match(self._text(pid, "cmdline").replace("\0", " "))
        if match is None or self._owner(pid) != self._trusted_uid or self._is_setuid(pid):
            return None
        return JobRef(int(match[1]), match[2], "slurmstepd")

    def _environment(self, pid: int) -> JobRef | None:
        variables = dict(
            variable.split("=", 1) for variable in self._text(pid, "environ").split("\0") if "=" in variable
        )
        job = variables.get("SLURM_JOB_ID", "")
        if not _JOB_ID.fullmatch(job):
            return None
        step = variables.get("SLURM_STEP_ID", "")
        return JobRef(int(job), step if _STEP_ID.fullmatch(step) else None, "environment")

    # -- /proc ----------------------------------------------------------------------------------------------------

    def _process(self, pid: int) -> _Process | None:
        # The name, in brackets, may hold brackets and blanks itself.
        fields = self._text(pid, "stat").rpartition(")")[2].split()
        try:
            return _Process(pid, int(fields[1]), int(fields[19]))
        except (IndexError, ValueError):
            return None

    def _owner(self, pid: int) -> int | None:
        try:
            return (self._proc / str(pid)).stat().st_uid
        except OSError:
            return None

    def _is_setuid(self, pid: int) -> bool:
        """As far as this process may look: root may, and decides on what it finds."""
        try:
            return bool((self._proc / str(pid) / "exe").stat().st_mode & stat.S_ISUID)
        except OSError:
            return False

    def _text(self, pid: int, name: str) -> str:
        try:
            return (self._proc / str(pid) / name).read_bytes().decode("utf-8", "replace")
        except OSError:
            return ""
