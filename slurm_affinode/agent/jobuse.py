"""What the jobs on this node use of it: CPU time and memory, by their cgroups, else by their processes.

Both err in favour of a job where they err: memory counts the page cache of a cgroup, or each process's own peak.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_affinode import kerneltext
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.pinned import PROC, Process, pids, processes

CGROUPS = Path("/sys/fs/cgroup")
_KTHREADD = 2
"""The parent of all threads of the kernel."""
_TICKS = os.sysconf("SC_CLK_TCK")
_OF_JOB = re.compile(r"^0::(/.*?/job_\d+)(?:/|$)", re.MULTILINE)
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
    try:
        numbers = list(pids(proc))
    except OSError:
        return found
    for process in processes(numbers, proc=proc):
        try:
            stat = process.stat()
        except OSError:
            continue
        if stat.parent == _KTHREADD:
            continue
        stepd = finder.stepd(process)  # Slurm's own, which has waited for the tasks that have ended
        ref = stepd or finder.of(process)
        if ref is None:
            continue
        use = found.setdefault(ref.job_id, Use())
        # User and system time, and that of the children that it has waited for.
        own = slice(11, 15) if stepd is None else slice(13, 15)
        use.cpu_s += sum(kerneltext.number(word) or 0 for word in stat.fields[own]) / _TICKS
        if stepd is None:
            use.memory_mib += _peak_mib(process)
        group = _group(process) if ref.source == "cgroup" else None
        if group is not None:
            groups[ref.job_id] = group
    for number, path in groups.items():
        _by_cgroup(found[number], cgroups / path.lstrip("/"))
    return found


def _peak_mib(process: Process) -> float:
    """The most that it held at a time; 0 where that is not known: a kernel thread, or one that has ended."""
    try:
        return (kerneltext.kib(process.status().get("VmHWM")) or 0) / 2**20
    except OSError:
        return 0.0


def _group(process: Process) -> str | None:
    """The cgroup of its job, version 2."""
    try:
        match = _OF_JOB.search(process.text("cgroup"))
    except OSError:
        return None
    # Above the root of this process's cgroup namespace there is nothing to be read.
    return None if match is None or ".." in match[1].split("/") else match[1]


def _by_cgroup(use: Use, group: Path) -> None:
    spent, peak = _USAGE.search(_text(group / "cpu.stat")), _text(group / "memory.peak").strip()
    spent_us, peak_bytes = kerneltext.number(spent and spent[1]), kerneltext.number(peak)
    if spent_us is None or peak_bytes is None:
        return
    use.cpu_s, use.memory_mib, use.by = spent_us / 1e6, peak_bytes / 2**20, "cgroup"


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
