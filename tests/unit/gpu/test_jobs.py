"""Which job a process belongs to, on trees of /proc made of files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from slurm_affinode.gpu import jobs
from slurm_affinode.gpu.jobs import JobFinder
from slurm_affinode.model.gpu import JobRef


class Proc:
    """A /proc to fill."""

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
def test_the_cgroup_of_slurmd_says_the_job(proc, cgroup, step):
    """In the forms of cgroup v1 and v2, of one slurmd and of several on a machine."""
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
def test_a_cgroup_that_slurmd_did_not_make_says_nothing(proc, cgroup):
    """Users may name their own cgroups as they like."""
    proc.add(50, 1, cgroup=cgroup)
    assert proc.finder().find(50) is None


def test_without_cgroups_the_ancestor_says_it(proc):
    """A slurmstepd far up the tree, whose command line is its title."""
    proc.add(10, 1, cmdline="slurmstepd: [123.batch]")
    proc.add(11, 10, cmdline="/bin/sh slurm_script")
    proc.add(12, 11)
    assert proc.finder().find(12) == JobRef(123, "batch", "slurmstepd")


def test_a_process_that_calls_itself_slurmstepd_is_not_believed(proc):
    """Anyone may set a title; only the one of the trusted user counts."""
    proc.add(10, 1, cmdline="slurmstepd: [123.batch]")
    proc.add(12, 10)
    assert proc.finder(trusted_uid=os.getuid() + 1).find(12) is None


def test_a_setuid_program_with_the_title_of_a_slurmstepd_is_not_believed(proc):
    """It is root's, and the user who has started it has given it its title."""
    proc.add(10, 1, cmdline="slurmstepd: [123.batch]")
    program = proc.root / "10" / "exe"
    program.touch()
    program.chmod(0o755)
    proc.add(12, 10)
    assert proc.finder().find(12) == JobRef(123, "batch", "slurmstepd")
    program.chmod(0o4755)
    assert proc.finder().find(12) is None


def test_a_cgroup_named_by_sluid_takes_the_number_from_a_slurmstepd(proc, tmp_path):
    """Which job it is has to be found out; that it is one the cgroup says. Its user cannot make it that of another."""
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


def test_what_left_the_tree_is_known_by_its_environment_alone(proc):
    """And it is said that nothing else speaks for it."""
    proc.add(13, 1, env="SLURM_JOB_ID=123\0SLURM_STEP_ID=4294967291x\0")
    assert proc.finder().find(13) == JobRef(123, None, "environment")


@pytest.mark.parametrize("env", ["", "SLURM_JOB_ID=\0", "SLURM_JOB_ID=12a\0", "XSLURM_JOB_ID=12\0"])
def test_a_process_of_no_job(proc, env):
    proc.add(13, 1, env=env)
    assert proc.finder().find(13) is None
    assert proc.finder().find(99) is None


@pytest.mark.parametrize("said", ["\u00b2", "\u0663", "9" * 5000, "12345678901", "0", "-1", " 7", "7\n"], ids=ascii)
def test_what_is_no_number_in_an_environment_is_no_job(proc, said):
    """Its user chooses that: it must not end the look at all the others."""
    proc.add(13, 1, env=f"SLURM_JOB_ID={said}\0")
    proc.add(14, 1, env=f"SLURM_JOB_ID=7\0SLURM_STEP_ID={said}\0")
    assert proc.finder().find(13) is None
    found = proc.finder().find(14)
    assert found is not None
    assert found.job_id == 7


def test_what_another_thread_finds_meanwhile_is_no_fault(proc, monkeypatch):
    """The shepherds' thread and the one that samples share what is known."""
    monkeypatch.setattr(jobs, "_REMEMBERED", 1)

    class Shared(JobFinder):
        def started(self, pid: int) -> int | None:
            self._known[(1000 + len(self._known), 1)] = JobRef(1, None, "cgroup")
            return super().started(pid)

    for pid in (50, 51):
        proc.add(pid, 1, cgroup="0::/system.slice/slurmstepd.scope/job_9/step_0")
    finder = Shared(proc.root)
    assert [finder.find(pid) for pid in (50, 51)] == [JobRef(9, "0", "cgroup")] * 2


def test_a_pid_of_another_process_is_not_mistaken(proc):
    """With the start time of the process that was meant; also for what was found before."""
    inside = "0::/system.slice/slurmstepd.scope/job_{}/step_0"
    proc.add(50, 1, cgroup=inside.format(1), start=1000)
    finder = proc.finder()
    started = finder.started(50)
    assert finder.find(50, started) == JobRef(1, "0", "cgroup")
    proc.add(50, 1, cgroup=inside.format(2), start=2000)
    assert finder.find(50, started) is None
    assert finder.find(50) == JobRef(2, "0", "cgroup")


def test_a_parent_that_is_younger_than_its_child_is_another_process(proc):
    """The PID of a parent that ended was given to a slurmstepd since."""
    proc.add(10, 1, cmdline="slurmstepd: [123.batch]", start=5000)
    proc.add(12, 10, start=4000)
    assert proc.finder().find(12) is None


def test_a_process_that_is_adopted_later_is_found_then(proc):
    """That a process has no job is not remembered."""
    proc.add(50, 1)
    finder = proc.finder()
    assert finder.find(50) is None
    proc.add(50, 1, cgroup="0::/system.slice/slurmstepd.scope/job_9/step_extern")
    assert finder.find(50) == JobRef(9, "extern", "cgroup")


def test_slurmstepd_of_a_node_in_a_container_is_not_of_this_node(proc):
    """It is in a PID namespace of its own; slurmctld of this node's cluster need not know its job."""
    for name, space in (("self", 1), ("10", 1), ("11", 2)):
        (proc.root / name / "ns").mkdir(parents=True)
        (proc.root / name / "ns" / "pid").symlink_to(f"pid:[{space}]")
    proc.add(10, 1, cmdline="slurmstepd: [123.batch]")
    proc.add(11, 1, cmdline="slurmstepd: [124.batch]")
    assert proc.finder().jobs_here() == {123}
