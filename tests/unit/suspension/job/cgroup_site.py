"""Memory cgroups of jobs in files, with the kernel's rules for their limits."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_affinode.suspension.job import cgroup as cgroup_module
from slurm_affinode.suspension.job.cgroup import Cgroup
from slurm_affinode.suspension.job.memory_limits import MemoryLimits

MIB, GIB = 1 << 20, 1 << 30
UNLIMITED = 9223372036854771712
_LEVELS = {1: "step_batch/task_0", 2: "step_batch/user/task_0"}
_TOP = {1: "memory/slurm/uid_1000", 2: "system.slice/slurmstepd.scope"}
LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
USED = {1: "memory.usage_in_bytes", 2: "memory.current"}
_SWAP = {"memory.memsw.limit_in_bytes": UNLIMITED, "memory.memsw.usage_in_bytes": 0}


class CgroupSite:
    """A node with cgroups of jobs. ``version``: of its cgroups."""

    def __init__(self, root: Path, version: int, patch: pytest.MonkeyPatch) -> None:
        self.root, self.version, self.proc, self.cgroups = root, version, root / "proc", root / "cgroup"
        self.clock = 1000.0
        self.killed: list[str] = []
        """Cgroups in which the kernel has ended a process for lack of memory."""
        self.survivors = [0]
        """Bytes in use after each of these kills, the next one last."""
        self.before_write: Callable[[str, str], None] = lambda name, value: None
        self.directories: dict[int, Path] = {}
        boot = self.proc / "sys/kernel/random"
        boot.mkdir(parents=True)
        (boot / "boot_id").write_text("b0\n")
        fd = os.open(root, os.O_PATH)
        patch.setattr(cgroup_module, "_FILE_SYSTEMS", {cgroup_module.file_system(fd)})
        os.close(fd)
        patch.setattr(Cgroup, "write", lambda group, name, value: self._write(group.path, name, value))
        self._make(self.top)

    @property
    def top(self) -> Path:
        return self.cgroups / _TOP[self.version]

    def limits(self) -> MemoryLimits:
        """Return the limits as a new agent sees them."""
        return MemoryLimits(
            self.root / "records", proc=self.proc, cgroups=self.cgroups, clock=lambda: self.clock, press=self._press
        )

    def add(self, job_id: int, pid: int, limit: int, used: int, *, name: str = "") -> Path:
        """Add the cgroups of a job with the shepherd ``pid``, as slurmd creates them, and return the job's."""
        job = self.directories[job_id] = self.top / (name or f"job_{job_id}")
        leaf = job / _LEVELS[self.version]
        for place in (job, *reversed([item for item in (leaf, *leaf.parents) if job in item.parents])):
            self._make(place)
        for place in self.limited(job_id):
            (place / LIMIT[self.version]).write_text(f"{limit}\n")
        self.use(job_id, used)
        self.process(pid, leaf)
        return job

    def limited(self, job_id: int) -> list[Path]:
        """Return the cgroups of a job that slurmd limits."""
        job = self.directories[job_id]
        return [job, job / ("step_batch" if self.version == 1 else "step_batch/user")]

    def process(self, pid: int, cgroup: Path) -> None:
        """Add a process that started at tick 1."""
        place = self.proc / str(pid)
        place.mkdir(exist_ok=True)
        fields = " ".join(["S", "1", *["0"] * 17, "1", *["0"] * 20])
        (place / "stat").write_text(f"{pid} (shepherd) {fields}\n")
        for name in ("status", "environ", "cmdline"):
            (place / name).write_text("")
        if self.version == 1:
            path = f"/{cgroup.relative_to(self.cgroups / 'memory')}"
            (place / "cgroup").write_text(f"5:cpuset:/\n4:memory:{path}\n0::/\n")
        else:
            (place / "cgroup").write_text(f"0::/{cgroup.relative_to(self.cgroups)}\n")

    def use(self, job_id: int, used: int) -> None:
        """Have the job use this many bytes."""
        job = self.directories[job_id]
        for place in (job, *(path for path in job.rglob("*") if path.is_dir())):
            (place / USED[self.version]).write_text(f"{used}\n")
            if self.version == 1:
                (place / "memory.memsw.usage_in_bytes").write_text(f"{used}\n")

    def values(self, job_id: int, name: str = "") -> list[int]:
        """Return the values of a limit in the cgroups that slurmd limits."""
        return [int((item / (name or LIMIT[self.version])).read_text()) for item in self.limited(job_id)]

    def set(self, job_id: int, value: int) -> None:
        """Have Slurm set another limit."""
        for place in self.limited(job_id):
            (place / LIMIT[self.version]).write_text(f"{value}\n")

    def records(self) -> list[str]:
        """Return the names of the records of raised limits."""
        place = self.root / "records"
        return sorted(path.name for path in place.iterdir()) if place.is_dir() else []

    def _make(self, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        (place / "memory.stat").write_text("inactive_file 0\n")
        if self.version == 1:
            files = {LIMIT[1]: UNLIMITED, USED[1]: 0, **_SWAP}
        else:
            files = {LIMIT[2]: "max", "memory.high": "max", USED[2]: 0}  # type: ignore[dict-item]
        for name, value in files.items():
            (place / name).write_text(f"{value}\n")

    def _write(self, place: Path, name: str, value: str) -> None:
        self.before_write(name, value)
        if not (place / name).exists():
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        number, used = int(value), int((place / USED[self.version]).read_text())
        if self.version == 1:
            limit, swap = (int((place / item).read_text()) for item in (LIMIT[1], "memory.memsw.limit_in_bytes"))
            if (number > swap) if name == LIMIT[1] else (number < limit):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            if number < used:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        (place / name).write_text(f"{number}\n")
        while name == "memory.max" and number < int((place / USED[2]).read_text()):
            self._kill(place)

    def _press(self, group: Cgroup) -> None:
        """Use memory in a cgroup of version 1 as another process."""
        assert self.version == 1
        if int(group.text(LIMIT[1])) - int(group.text(USED[1])) < 16 * MIB:
            self._kill(group.path)

    def _kill(self, place: Path) -> None:
        self.killed.append(str(place))
        job_id = next(job for job, directory in self.directories.items() if directory in (place, *place.parents))
        self.use(job_id, self.survivors.pop() if len(self.survivors) > 1 else self.survivors[0])
