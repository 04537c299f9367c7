"""Assignment of processes to jobs, on fake trees of /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hostile_process import huge_arguments, in_a_gibibyte

from slurm_affinode.gpu import jobs
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.model.gpu import JobRef


class Proc:
    """A fake /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self, pid: int, parent: int, *, cgroup: str = "0::/", cmdline: str = "python", env: str = "", start: int = 0
    ):
        directory = self.root / str(pid)
        directory.mkdir(exist_ok=True)
        fields = ["S", str(parent), *["0"] * 17, str(start or pid), "0", "0"]
        (directory / "stat").write_text(f"{pid} (a ) b) {' '.join(fields)}\n")
        (directory / "cgroup").write_text(cgroup + "\n")
        (directory / "cmdline").write_text(cmdline.replace(" ", "\0") + "\0")
        (directory / "environ").write_text(env)

    def finder(self, **options: Any) -> JobFinder:
        return JobFinder(self.root, **{"trusted_uid": os.getuid(), **options})


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


@pytest.mark.parametrize(
    ("cgroup", "step"),
    [
        ("0::/system.slice/slurmstepd.scope/job_123/step_batch/user/task_0", "batch"),
        ("0::/system.slice/slurmstepd.scope/job_123/step_0", "0"),
        ("0::/system.slice/gpu01_slurmstepd.scope/job_123/step_extern/user/task_special", "extern"),
        ("0::/system.slice/slurmstepd.scope/job_123", None),
        ("11:memory:/slurm/uid_1000/job_123/step_batch/task_0\n1:name=systemd:/system.slice/slurmd.service", "batch"),
        ("4:devices:/slurm_gpu01/uid_0/job_123/step_4", "4"),
        ("12:cpuset:/user.slice\n4:devices:/slurm/uid_1000/job_123/step_extern", "extern"),
    ],
)
def test_cgroup_of_slurmd_identifies_the_job(proc, cgroup, step):
    """The forms are those of cgroup v1 and v2, with one slurmd or several on a machine."""
    proc.add(50, 1, cgroup=cgroup)
    assert proc.finder().find(50) == JobRef(123, step, "cgroup")


@pytest.mark.parametrize(
    "cgroup",
    [
        "0::/user.slice/user-1000.slice/job_123/step_batch",
        "0::/system.slice/my-slurm/job_123",
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/slurmstepd.scope/job_123/step_0",
        "0::/system.slice/slurmd.service",
    ],
)
def test_cgroup_not_made_by_slurmd_is_ignored(proc, cgroup):
    """Users may choose names of their own cgroups."""
    proc.add(50, 1, cgroup=cgroup)
    assert proc.finder().find(50) is None


def test_ancestor_identifies_the_job_without_cgroups(proc):
    """It is a slurmstepd further up the process tree, identified by its title."""
    proc.add(10, 1, cmdline="slurmstepd: [123.batch]")
    proc.add(11, 10, cmdline="/bin/sh slurm_script")
    proc.add(12, 11)
    assert proc.finder().find(12) == JobRef(123, "batch", "slurmstepd")


def test_process_with_the_title_of_slurmstepd_is_not_trusted(proc):
    """Every user can set a title; only a process of the trusted user counts."""
    proc.add(10, 1, cmdline="slurmstepd: [123.batch]")
    proc.add(12, 10)
    assert proc.finder(trusted_uid=os.getuid() + 1).find(12) is None


def test_setuid_program_with_the_title_of_slurmstepd_is_not_trusted(proc):
    """It runs as root, but the user who started it has chosen its title."""
    proc.add(10, 1, cmdline="slurmstepd: [123.batch]")
    program = proc.root / "10" / "exe"
    program.touch()
    program.chmod(0o755)
    proc.add(12, 10)
    assert proc.finder().find(12) == JobRef(123, "batch", "slurmstepd")
    program.chmod(0o4755)
    assert proc.finder().find(12) is None


def test_job_of_a_cgroup_named_by_sluid_is_found_from_slurmstepd(proc, tmp_path):
    """The cgroup shows that there is a job, but not its ID. Its user cannot make it look like another job."""
    job = "system.slice/slurmstepd.scope/s0J8K3M1N5P7QR"
    named = f"0::/{job}/step_batch/user/task_0"
    proc.add(10, 1, cmdline="slurmstepd: [123.batch]", cgroup=f"0::/{job}/step_batch/slurm")
    proc.add(12, 10, cgroup=named)
    proc.add(13, 1, cgroup=named, env="A=1\0SLURM_JOB_ID=456\0B=2\0")
    finder = proc.finder(cgroups=tmp_path / "cgroup")
    assert finder.find(12) == JobRef(123, "batch", "cgroup")
    assert finder.find(13) == JobRef(456, None, "environment")
    of_stepd = tmp_path / "cgroup" / job / "step_batch" / "slurm"
    of_stepd.mkdir(parents=True)
    (of_stepd / "cgroup.procs").write_text("99\n10\n")
    proc.add(14, 1, cgroup=named, env="A=1\0SLURM_JOB_ID=456\0B=2\0")
    assert finder.find(14) == JobRef(123, "batch", "cgroup")


def test_process_outside_the_tree_is_assigned_by_its_environment(proc):
    """The source is reported as the environment alone."""
    proc.add(13, 1, env="SLURM_JOB_ID=123\0SLURM_STEP_ID=4294967291x\0")
    assert proc.finder().find(13) == JobRef(123, None, "environment")


@pytest.mark.parametrize("env", ["", "SLURM_JOB_ID=\0", "SLURM_JOB_ID=12a\0", "XSLURM_JOB_ID=12\0"])
def test_process_without_a_job_is_not_assigned(proc, env):
    proc.add(13, 1, env=env)
    assert proc.finder().find(13) is None
    assert proc.finder().find(99) is None


@pytest.mark.parametrize("job_id", ["\u00b2", "\u0663", "9" * 5000, "12345678901", "0", "-1", " 7", "7\n"], ids=ascii)
def test_invalid_job_id_in_the_environment_is_ignored(proc, job_id):
    """Its user chooses the value, which must not stop the inspection of all other processes."""
    proc.add(13, 1, env=f"SLURM_JOB_ID={job_id}\0")
    proc.add(14, 1, env=f"SLURM_JOB_ID=7\0SLURM_STEP_ID={job_id}\0")
    assert proc.finder().find(13) is None
    findings = proc.finder().find(14)
    assert findings is not None
    assert findings.job_id == 7


def test_concurrent_change_of_the_cache_is_not_an_error(proc, monkeypatch):
    """The shepherds' thread and the sampling thread share the cache."""
    monkeypatch.setattr(jobs, "_REMEMBERED", 1)

    class Shared(JobFinder):
        def started(self, pid: int) -> int | None:
            self._job_refs[(1000 + len(self._job_refs), 1)] = JobRef(1, None, "cgroup")
            return super().started(pid)

    for pid in (50, 51):
        proc.add(pid, 1, cgroup="0::/system.slice/slurmstepd.scope/job_9/step_0")
    finder = Shared(proc.root)
    assert [finder.find(pid) for pid in (50, 51)] == [JobRef(9, "0", "cgroup")] * 2


def test_reused_pid_is_not_assigned_to_the_former_job(proc):
    """The start time identifies the process; it also applies to cached results."""
    inside = "0::/system.slice/slurmstepd.scope/job_{}/step_0"
    proc.add(50, 1, cgroup=inside.format(1), start=1000)
    finder = proc.finder()
    started = finder.started(50)
    assert finder.find(50, started) == JobRef(1, "0", "cgroup")
    proc.add(50, 1, cgroup=inside.format(2), start=2000)
    assert finder.find(50, started) is None
    assert finder.find(50) == JobRef(2, "0", "cgroup")


def test_parent_younger_than_its_child_is_another_process(proc):
    """The PID of a parent that ended was reused by a slurmstepd."""
    proc.add(10, 1, cmdline="slurmstepd: [123.batch]", start=5000)
    proc.add(12, 10, start=4000)
    assert proc.finder().find(12) is None


def test_process_adopted_later_is_assigned_then(proc):
    """The absence of a job is not cached."""
    proc.add(50, 1)
    finder = proc.finder()
    assert finder.find(50) is None
    proc.add(50, 1, cgroup="0::/system.slice/slurmstepd.scope/job_9/step_extern")
    assert finder.find(50) == JobRef(9, "extern", "cgroup")


def test_slurmstepd_of_a_node_in_a_container_is_ignored(proc):
    """It is in another PID namespace; the slurmctld of this node need not know its job."""
    for name, space in (("self", 1), ("10", 1), ("11", 2)):
        (proc.root / name / "ns").mkdir(parents=True)
        (proc.root / name / "ns" / "pid").symlink_to(f"pid:[{space}]")
    proc.add(10, 1, cmdline="slurmstepd: [123.batch]")
    proc.add(11, 1, cmdline="slurmstepd: [124.batch]")
    assert proc.finder().jobs_here() == {123}


def test_size_of_arguments_and_environment_is_limited():
    """A process without privileges can show terabytes of them, with which it would exhaust the memory of the agent."""
    program = """
from pathlib import Path
from slurm_affinode.base.pidfd import Process
from slurm_affinode.gpu.jobs import JobFinder
process = Process(int(sys.argv[1]))
finder = JobFinder(trusted_uid=process.facts().st_uid)
print(finder.stepd(process), finder.of(process))
"""
    with huge_arguments() as pid:
        assert in_a_gibibyte(program, pid) == "None None"
