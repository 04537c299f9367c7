"""Resource usage of jobs on their node, read from a fake ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_affinode.agent import orphans
from slurm_affinode.gpu.jobs import JobFinder

TICKS = orphans._TICKS


def process(proc: Path, pid: int, *, parent: int = 1, cpu_s: tuple[int, ...] = (0, 0, 0, 0), **files: str) -> None:
    """Create a process with its times: user, system, and those of its children."""
    directory = proc / str(pid)
    directory.mkdir(parents=True)
    times = " ".join(str(one * TICKS) for one in cpu_s)
    (directory / "stat").write_text(f"{pid} (a) b) S {parent} 0 0 0 0 0 0 0 0 0 {times} 0 0 0 0 {100 + pid} 0\n")
    for name, text in files.items():
        (directory / name).write_text(text)


def test_processes_of_job_are_summed(tmp_path: Path) -> None:
    """Children they waited for are included; processes of other jobs do not count."""
    environ = "SLURM_JOB_ID=7\0"
    process(tmp_path, 10, cpu_s=(3, 1, 5, 1), environ=environ, status="VmHWM:\t  2048 kB\n")
    process(tmp_path, 11, parent=10, cpu_s=(2, 0, 0, 0), environ=environ, status="VmHWM:\t  1024 kB\n")
    process(tmp_path, 12, cpu_s=(50, 0, 0, 0), environ="HOME=/root\0")
    process(tmp_path, 13, parent=2, cpu_s=(50, 0, 0, 0))
    found = orphans.uses(JobFinder(tmp_path), proc=tmp_path, cgroups=tmp_path)
    assert [use.row(job) for job, use in found.items()] == [
        {"job": 7, "cpu_s": 12.0, "memory_mib": 3.0, "by": "processes"}
    ]


def test_slurmstepd_counts_with_its_waited_tasks(tmp_path: Path) -> None:
    """Its own CPU time and memory are Slurm's."""
    process(tmp_path, 10, cpu_s=(3, 1, 5, 1), cmdline="slurmstepd: [7.batch]\0", status="VmHWM: 2048 kB\n")
    process(tmp_path, 11, parent=10, cpu_s=(2, 0, 0, 0), status="VmHWM: 1024 kB\n")
    (use,) = orphans.uses(JobFinder(tmp_path, trusted_uid=os.getuid()), proc=tmp_path, cgroups=tmp_path).values()
    assert (use.cpu_s, use.memory_mib) == (8.0, 1.0)


def test_cgroup_of_job_takes_precedence(tmp_path: Path) -> None:
    """It also counts processes that ended without being waited for."""
    proc, group = tmp_path / "proc", tmp_path / "cg/system.slice/slurmstepd.scope/job_7"
    group.mkdir(parents=True)
    (group / "cpu.stat").write_text("usage_usec 90000000\nuser_usec 1\n")
    (group / "memory.peak").write_text(f"{5 * 2**30}\n")
    place = "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n"
    process(proc, 10, cpu_s=(3, 1, 5, 1), cgroup=place, status="VmHWM: 10 kB\n")
    (use,) = orphans.uses(JobFinder(proc), proc=proc, cgroups=tmp_path / "cg").values()
    assert (use.cpu_s, use.memory_mib, use.by) == (90.0, 5120.0, "cgroup")
    (group / "memory.peak").unlink()
    (use,) = orphans.uses(JobFinder(proc), proc=proc, cgroups=tmp_path / "cg").values()
    assert (use.cpu_s, use.by) == (10.0, "processes")


def test_missing_processes_are_skipped(tmp_path: Path) -> None:
    """A missing ``/proc`` is an error: no usage is known then, which is not a usage of zero."""
    (tmp_path / "99").mkdir()
    assert orphans.uses(JobFinder(tmp_path), proc=tmp_path) == {}
    with pytest.raises(FileNotFoundError):
        orphans.uses(JobFinder(tmp_path), proc=tmp_path / "none")
