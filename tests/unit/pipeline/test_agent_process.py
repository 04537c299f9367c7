"""``doctor`` on a node: limits and rights of the agent's process, from recorded files of ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_affinode.base import pidfd
from slurm_affinode.pipeline import agent_process
from slurm_affinode.pipeline.checks import OK, PROBLEM, SKIPPED, Check

ALL = "000001ffffffffff"
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max core file size        0                    {core:<20} bytes
Max open files            1024                 {files:<20} files
Max locked memory         8388608              {locked:<20} bytes
"""
MOUNTS = """23 30 0:21 / /proc rw,nosuid - proc proc rw
31 23 0:26 / /sys/fs/cgroup {options},nosuid,relatime shared:9 - cgroup2 cgroup2 rw
"""
NAMESPACES = ("cgroup", "ipc", "net", "pid", "user", "uts")


class Proc:
    """A directory in place of ``/proc``; 1 is PID 1, 7 the agent."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.process(1)
        self.process(7)

    def process(
        self, pid: int, *, capabilities: str = ALL, privileges: int = 0, filters: int = 0, files: str = "65536",
        locked: str = "8388608", core: str = "unlimited", options: str = "rw", private: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Write the files of a process."""
        directory = self.root / str(pid)
        (directory / "ns").mkdir(parents=True, exist_ok=True)
        (directory / "status").write_text(
            f"Name:\tpython3\nCapBnd:\t{capabilities}\nNoNewPrivs:\t{privileges}\nSeccomp_filters:\t{filters}\n"
        )
        (directory / "limits").write_text(LIMITS.format(files=files, locked=locked, core=core))
        (directory / "mountinfo").write_text(MOUNTS.format(options=options))
        for kind in NAMESPACES:
            shared = self.root / f"{kind}{pid if kind in private else ''}"
            shared.touch()
            (directory / "ns" / kind).unlink(missing_ok=True)
            (directory / "ns" / kind).symlink_to(shared)

    def checks(self) -> dict[str, Check]:
        """Return the checks by name, after a check that each that is not ok has a hint."""
        checks = agent_process.checks(7, proc=self.root)
        assert [check.name for check in checks if check.status != OK and not check.hint] == []
        return {check.name: check for check in checks}


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def test_agent_of_the_unit_is_sound(proc: Proc) -> None:
    checks = proc.checks()
    assert {check.status for check in checks.values()} == {OK}
    assert checks["agent limits"].detail == "open files 65536, locked memory 8 MiB, core files unlimited"


def test_no_agent_is_reported_with_the_command_that_starts_it() -> None:
    [check] = agent_process.checks(None)
    assert check.status == SKIPPED
    assert check.hint == "systemctl enable --now slurm-affinode-agent"


def test_agent_that_has_ended_meanwhile_is_unchecked(proc: Proc) -> None:
    [check] = agent_process.checks(9, proc=proc.root)
    assert check.status == SKIPPED


def test_few_open_files_are_a_problem(proc: Proc) -> None:
    proc.process(7, files="4096")
    check = proc.checks()["agent limits"]
    assert check.status == PROBLEM
    assert "open files 4096" in check.detail
    assert "LimitNOFILE=65536" in (check.hint or "")


def test_locked_memory_is_limited_without_the_capability(proc: Proc) -> None:
    """CAP_IPC_LOCK is bit 14; with it, the limit does not apply."""
    without = f"{int(ALL, 16) & ~(1 << 14):016x}"
    proc.process(1, capabilities=without)
    proc.process(7, capabilities=without)
    assert proc.checks()["agent limits"].status == SKIPPED
    assert proc.checks()["agent rights"].status == OK, "PID 1 does not have it either, as in a container"
    proc.process(7, capabilities=without, locked="unlimited")
    assert proc.checks()["agent limits"].status == OK


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"capabilities": "000001fffdf7ffff"}, "without CAP_SYS_PTRACE, CAP_SYS_TIME (CapabilityBoundingSet=)"),
        ({"privileges": 1}, "NoNewPrivileges="),
        ({"filters": 3}, "seccomp filters"),
        ({"private": ("ipc", "net")}, "namespaces of its own: ipc, net"),
        ({"options": "ro"}, "ProtectControlGroups="),
    ],
)
def test_setting_of_a_unit_that_harms_restores_is_a_problem(proc: Proc, change: dict[str, object], detail: str) -> None:
    proc.process(7, **change)  # type: ignore[arg-type]
    check = proc.checks()["agent rights"]
    assert check.status == PROBLEM
    assert detail in check.detail
    assert "systemctl edit" in (check.hint or "")


def test_restrictions_that_pid_1_has_as_well_are_none(proc: Proc) -> None:
    """In a container, all processes have them."""
    for pid in (1, 7):
        proc.process(pid, privileges=1, filters=1, options="ro", capabilities="00000000a80425fb")
    assert proc.checks()["agent rights"].status == OK


def test_process_of_the_kernel_is_read() -> None:
    """The files of this kernel have the form that is expected."""
    checks = agent_process.checks(os.getpid(), first=os.getpid(), proc=pidfd.PROC)
    assert [check.name for check in checks] == ["agent limits", "agent rights"]
    assert checks[1].status == OK
