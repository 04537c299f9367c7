"""What the jobs on this node use of it: CPU time and memory, by their cgroups, else by their processes.

Both err in favour of a job where they err: memory counts the page cache of a cgroup, or each process's own peak.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_affinode.gpu.jobs import JobFinder

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_TICKS = os.sysconf("SC_CLK_TCK")
_OF_JOB = re.compile(r"^0::(/.*?/job_\d+)(?:/|$)", re.MULTILINE)
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)
_USAGE = re.compile(r"^usage_usec (\d+)$", re.MULTILINE)


@dataclass(slots=True)
class Use:
    """Of one job on this node."""

    cpu_s: float = 0.0
    """CPU time so far, of ended processes too as far as somebody waited for them."""
    memory_mib: float = 0.0
    """The most that it held at a time, or more."""
    by: str = "processes"

    def row(self, job: int) -> dict[str, Any]:
        """For an answer of the agent."""
        return {"job": job, "cpu_s": round(self.cpu_s, 2), "memory_mib": round(self.memory_mib, 1), "by": self.by}


def uses(finder: JobFinder, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> dict[int, Use]:
    """Raw id of each job with a process here -> what it uses."""
    found: dict[int, Use] = {}
    groups: dict[int, str] = {}
    for pid in _pids(proc):
        stat = _text(proc / str(pid) / "stat").rpartition(")")[2].split()
        if len(stat) < 20 or stat[1] == "2":
            continue
        stepd = finder.stepd(pid)  # Slurm's own, which has waited for the tasks that have ended
        ref = stepd or finder.find(pid, int(stat[19]))
        if ref is None:
            continue
        use = found.setdefault(ref.job_id, Use())
        # User and system time, and that of the children that it has waited for.
        own = slice(11, 15) if stepd is None else slice(13, 15)
        use.cpu_s += sum(map(int, stat[own])) / _TICKS
        peak = _PEAK.search(_text(proc / str(pid) / "status"))
        if peak is not None and stepd is None:
            use.memory_mib += int(peak[1]) / 1024
        group = _OF_JOB.search(_text(proc / str(pid) / "cgroup"))
        if group is not None and ref.source == "cgroup":
            groups[ref.job_id] = group[1]
    for number, path in groups.items():
        _by_cgroup(found[number], cgroups / path.lstrip("/"))
    return found


def _by_cgroup(use: Use, group: Path) -> None:
    spent, peak = _USAGE.search(_text(group / "cpu.stat")), _text(group / "memory.peak").strip()
    if spent is None or not peak.isdigit():
        return
    use.cpu_s, use.memory_mib, use.by = int(spent[1]) / 1e6, int(peak) / 2**20, "cgroup"


def _pids(proc: Path) -> Iterator[int]:
    try:
        names = os.listdir(proc)  # noqa: PTH208 - thousands of names, no paths needed
    except OSError:
        return
    yield from (int(name) for name in names if name.isdigit())


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
