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
    times = " ".join(str(item * TICKS) for item in cpu_s)
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
    uses = orphans.uses(JobFinder(tmp_path), proc=tmp_path, cgroups=tmp_path)
    assert [use.row(job) for job, use in uses.items()] == [
        {"job": 7, "cpu_s": 12.0, "memory_mib": 3.0, "by": "processes"}
    ]


def test_slurmstepd_counts_with_its_waited_tasks(tmp_path: Path) -> None:
    """Its own CPU time and memory are Slurm's."""
    process(tmp_path, 10, cpu_s=(3, 1, 5, 1), cmdline="slurmstepd: [7.batch]\0", status="VmHWM: 2048 kB\n")
    process(tmp_path, 11, parent=10, cpu_s=(2, 0, 0, 0), status="VmHWM: 1024 kB\n")
    (use,) = orphans.uses(JobFinder(tmp_path, trusted_uid=os.getuid()), proc=tmp_path, cgroups=tmp_path).values()
    assert (use.cpu_s, use.memory_mib) == (8.0, 1.0)


SLUID = "sD69M85A6MHG00"


@pytest.mark.parametrize("name", ["job_7", SLUID])
def test_cgroup_of_job_takes_precedence(tmp_path: Path, name: str) -> None:
    """It also counts processes that ended without being waited for. Slurm 26.05 names it by SLUID."""
    proc, group = tmp_path / "proc", tmp_path / "cg/system.slice/c1_slurmstepd.scope" / name
    group.mkdir(parents=True)
    (group / "cpu.stat").write_text("usage_usec 90000000\nuser_usec 1\n")
    (group / "memory.peak").write_text(f"{5 * 2**30}\n")
    place = f"1:cpu:/\n0::/system.slice/c1_slurmstepd.scope/{name}/step_0"
    process(proc, 9, cmdline="slurmstepd: [7.0]\0", cgroup=f"{place}/slurm\n")
    process(proc, 10, parent=9, cpu_s=(3, 1, 5, 1), cgroup=f"{place}/user/task_0\n", status="VmHWM: 10 kB\n")
    assert usage(proc, tmp_path / "cg") == (90.0, 5120.0, "cgroup")
    (group / "memory.peak").unlink()
    assert usage(proc, tmp_path / "cg") == (10.0, 10 / 1024, "processes")


@pytest.mark.parametrize("name", ["job_7", SLUID])
def test_cgroups_of_version_1_are_read(tmp_path: Path, name: str) -> None:
    """Each controller has a hierarchy of its own. Without both, the processes are counted."""
    proc, place = tmp_path / "proc", f"slurm_c1/uid_2001/{name}"
    of_cpu, of_memory = tmp_path / "cg/cpuacct" / place, tmp_path / "cg/memory" / place
    for group, file, number in ((of_cpu, "cpuacct.usage", 90 * 10**9), (of_memory, "memory.max_usage_in_bytes", 2**30)):
        group.mkdir(parents=True)
        (group / file).write_text(f"{number}\n")
    rows = f"4:memory:/{place}/step_0\n2:cpu,cpuacct:/{place}/step_0\n6:freezer:/{place}/step_0\n0::/\n"
    process(proc, 9, cmdline="slurmstepd: [7.0]\0", cgroup=rows)
    process(proc, 10, parent=9, cpu_s=(3, 1, 5, 1), cgroup=rows, status="VmHWM: 10 kB\n")
    assert usage(proc, tmp_path / "cg") == (90.0, 1024.0, "cgroup")
    (proc / "10/cgroup").write_text(rows.replace(",cpuacct", ""))
    (proc / "9/cgroup").write_text("0::/\n")
    assert usage(proc, tmp_path / "cg") == (10.0, 10 / 1024, "processes")


def usage(proc: Path, cgroups: Path) -> tuple[float, float, str]:
    """Return CPU seconds, MiB and source of the only job."""
    (use,) = orphans.uses(
        JobFinder(proc, trusted_uid=os.getuid(), cgroups=cgroups), proc=proc, cgroups=cgroups
    ).values()
    return use.cpu_s, use.memory_mib, use.by


def test_missing_processes_are_skipped(tmp_path: Path) -> None:
    """A missing ``/proc`` is an error: no usage is known then, which is not a usage of zero."""
    (tmp_path / "99").mkdir()
    assert orphans.uses(JobFinder(tmp_path), proc=tmp_path) == {}
    with pytest.raises(FileNotFoundError):
        orphans.uses(JobFinder(tmp_path), proc=tmp_path / "none")
