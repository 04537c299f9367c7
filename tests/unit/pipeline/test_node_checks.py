"""``doctor`` on a node with an agent."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_affinode.base import config as configuration
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.process import Completed
from slurm_affinode.model.gpu import Device
from slurm_affinode.pipeline import node_checks
from slurm_affinode.pipeline.checks import OK, PROBLEM, SKIPPED, UNREACHABLE, Check

SOUND = {
    "--version": (0, "Version: 4.2\n"), "check": (0, "Looks good.\n"), "--no-input": (0, "MUNGE:AwQ:\n"),
    "--query-gpu=index,persistence_mode": (0, "0, Enabled\n1, Enabled\n"), "show": (0, "yes\n"),
}  # fmt: skip

CHECKS = ("CRIU", "munge", "clock", "persistence mode", "shared store", "cgroups", "host memory", "namespaces",
          "name services")  # fmt: skip
LATER = {"agent limits": SKIPPED, "SPANK plugin": SKIPPED}
"""Of a node without agent and Slurm; test_agent_process and test_plugin_check have their cases."""
GPUS = [Device(f"GPU-{number}", number, memory_mib=81_559.0) for number in range(2)]
MEMORY_KIB = 512 << 20


class Programs:
    """Replacement of the programs of a node: argument -> exit status and output; missing ones cannot be started."""

    def __init__(self, outcomes: Mapping[str, tuple[int, str]]) -> None:
        self.outcomes = outcomes

    def __call__(self, argv: Sequence[str], **_: Any) -> Completed:
        if argv[0] == "scontrol" or argv[1] not in self.outcomes:
            raise UnreachableError(f"{argv[0]}: no such program")
        status, text = self.outcomes[argv[1]]
        return Completed(tuple(argv), status, text.encode(), text if status else "")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> configuration.Config:
    """A node with a key and a shared store."""
    (tmp_path / "image.key").write_text("k" * 32)
    (tmp_path / "images").mkdir(mode=0o700)
    monkeypatch.setattr("slurm_affinode.base.process.find", lambda program: program)
    parsed = configuration.parse("", where="test")
    return replace(
        parsed,
        suspend=replace(parsed.suspend, key_file=tmp_path / "image.key", shared_store=tmp_path / "images"),
    )


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The directories of a node's kernel: ``proc`` and ``cgroup``, and its nsswitch.conf."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "sys" / "user").mkdir(parents=True)
    (proc / "net").mkdir()
    cgroup.mkdir()
    (proc / "meminfo").write_text(f"MemTotal:       {MEMORY_KIB} kB\nMemFree:          1 kB\n")
    for kind in ("pid", "mnt", "user"):
        (proc / "sys" / "user" / f"max_{kind}_namespaces").write_text("63428\n")
    (proc / "net" / "unix").write_text(SOCKETS)
    (cgroup / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (tmp_path / "nsswitch.conf").write_text("passwd: files systemd\nhosts: files dns [NOTFOUND=return]\nnetworks: x\n")
    return tmp_path


SOCKETS = """Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 17241 /run/munge/munge.socket.2
0000000000000000: 00000003 00000000 00000000 0001 03 17242
0000000000000000: 00000003 00000000 00000000 0001 03 17243 /var/lib/sss/pipes/nss
0000000000000000: 00000002 00000000 00010000 0001 01 17244 @abstract
"""
SSSD = "0000000000000000: 00000002 00000000 00010000 0001 01 17300 /var/lib/sss/pipes/nss\n"


def statuses(
    config: configuration.Config, node: Path, changes: Mapping[str, tuple[int, str] | None] | None = None
) -> dict[str, str]:
    """Return the statuses by check, after a check that each problem has a hint; ``None``: the program is missing."""
    outcomes = {name: outcome for name, outcome in {**SOUND, **(changes or {})}.items() if outcome is not None}
    checks = node_checks.examine(
        config, Programs(outcomes), gpus=GPUS, proc=node / "proc", cgroup_root=node / "cgroup",
        nsswitch=node / "nsswitch.conf",
    )  # fmt: skip
    assert [check.name for check in checks if check.status != OK and not check.hint] == []
    by_name = {check.name: check.status for check in checks}
    assert {name: by_name.pop(name) for name in LATER} == LATER
    return by_name


def test_sound_node_has_no_problem(config: configuration.Config, node: Path) -> None:
    assert statuses(config, node) == dict.fromkeys(CHECKS, OK)


@pytest.mark.parametrize(
    ("change", "check", "status"),
    [
        ({"--version": None}, "CRIU", PROBLEM),
        ({"--version": (0, "Version: 3.17\n")}, "CRIU", PROBLEM),
        ({"check": (1, "Error: kernel does not support it\n")}, "CRIU", PROBLEM),
        ({"--no-input": (1, "munge: Error: Failed to access socket\n")}, "munge", UNREACHABLE),
        ({"--no-input": None}, "munge", UNREACHABLE),
        ({"show": (0, "no\n")}, "clock", PROBLEM),
        ({"--query-gpu=index,persistence_mode": (0, "0, Enabled\n1, Disabled\n")}, "persistence mode", PROBLEM),
    ],
)
def test_problem_has_a_hint(
    config: configuration.Config, node: Path, change: Mapping[str, tuple[int, str] | None], check: str, status: str
) -> None:
    by_name = statuses(config, node, change)
    assert by_name.pop(check) == status
    assert set(by_name.values()) == {OK}


def test_node_without_gpus_has_no_persistence_mode(config: configuration.Config, node: Path) -> None:
    assert "persistence mode" not in statuses(config, node, {"--query-gpu=index,persistence_mode": None})
    assert "persistence mode" not in statuses(config, node, {"--query-gpu=index,persistence_mode": (9, "failed\n")})


def test_clock_is_unknown_without_systemd(config: configuration.Config, node: Path) -> None:
    assert "clock" not in statuses(config, node, {"show": None})
    assert "clock" not in statuses(config, node, {"show": (1, "System has not been booted with systemd\n")})


def test_store_that_root_may_not_write_is_a_problem(
    config: configuration.Config, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS with ``root_squash`` denies access to a directory with mode 0700."""
    squashed = config.suspend.shared_store
    monkeypatch.setattr(node_checks.os, "access", lambda path, mode: path != squashed)  # type: ignore[attr-defined]
    assert statuses(config, node)["shared store"] == PROBLEM


def test_missing_file_system_is_a_problem(config: configuration.Config, node: Path, tmp_path: Path) -> None:
    missing = replace(config, suspend=replace(config.suspend, shared_store=tmp_path / "not-mounted" / "images"))
    assert statuses(missing, node)["shared store"] == PROBLEM


def test_store_of_another_user_is_a_problem(config: configuration.Config) -> None:
    """An export with ``root_squash`` gives what root creates to the user nobody."""
    assert config.suspend.shared_store is not None
    [check] = node_checks.shared_store(config.suspend.shared_store, owner=os.geteuid() + 1)
    assert check.status == PROBLEM
    assert f"it belongs to user {os.geteuid()}" in check.detail
    assert "chown" in (check.hint or "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_store_without_an_owner_is_explained_by_root_squash(config: configuration.Config) -> None:
    assert config.suspend.shared_store is not None
    os.chown(config.suspend.shared_store, 65534, 65534)
    [check] = node_checks.shared_store(config.suspend.shared_store)
    assert check.status == PROBLEM
    assert "no_root_squash" in (check.hint or "")


def test_store_that_others_may_read_is_a_problem(config: configuration.Config) -> None:
    assert config.suspend.shared_store is not None
    config.suspend.shared_store.chmod(0o755)
    [check] = node_checks.shared_store(config.suspend.shared_store)
    assert check.status == PROBLEM
    assert "chmod 0700" in (check.hint or "")


def cgroups(node: Path, **settings: str) -> Check:
    """Return the check with settings of Slurm in addition to those of a site with cgroups."""
    known = {"ProctrackType": "proctrack/cgroup", "CgroupPlugin": "autodetect", "ConstrainRAMSpace": "yes"}
    [check] = node_checks.cgroups({**known, **settings}, root=node / "cgroup")
    assert check.status == OK or check.hint
    return check


def test_controllers_and_limits_of_slurm_are_reported(node: Path) -> None:
    check = cgroups(node, ConstrainDevices="yes")
    assert check.status == OK
    assert check.detail == "version 2 (cpuset, cpu, io, memory, pids); Slurm confines jobs to their devices, memory"


def test_version_that_slurm_does_not_use_is_a_problem(node: Path) -> None:
    check = cgroups(node, CgroupPlugin="cgroup/v1")
    assert check.status == PROBLEM
    assert "CgroupPlugin=autodetect" in (check.hint or "")
    assert cgroups(node, CgroupPlugin="cgroup/v2").status == OK


def test_memory_limits_without_a_controller_are_a_problem(node: Path) -> None:
    (node / "cgroup" / "cgroup.controllers").write_text("cpu pids\n")
    assert cgroups(node).status == PROBLEM
    assert cgroups(node, ConstrainRAMSpace="no").status == OK


def test_jobs_without_cgroups_are_reported(node: Path) -> None:
    check = cgroups(node, ProctrackType="proctrack/linuxproc", ConstrainRAMSpace="no")
    assert check.status == SKIPPED
    assert "ProctrackType=proctrack/cgroup" in (check.hint or "")


def test_controllers_of_version_1_are_directories(node: Path) -> None:
    (node / "cgroup" / "cgroup.controllers").unlink()
    for name in ("memory", "freezer", "unified"):
        (node / "cgroup" / name).mkdir()
        (node / "cgroup" / name / "cgroup.procs").touch()
    assert cgroups(node).detail.startswith("version 1 (freezer, memory)")
    assert cgroups(node, CgroupPlugin="cgroup/v2").status == OK, "both versions are mounted"
    (node / "cgroup" / "unified" / "cgroup.procs").unlink()
    (node / "cgroup" / "unified").rmdir()
    assert cgroups(node, CgroupPlugin="cgroup/v2").status == PROBLEM


def test_no_cgroups_are_a_problem(tmp_path: Path) -> None:
    [check] = node_checks.cgroups({}, root=tmp_path / "none")
    assert check.status == PROBLEM


def test_gpu_memory_beyond_host_memory_is_reported_with_numbers(node: Path) -> None:
    """It is no problem: most sites have less host memory, and each suspension checks what it needs."""
    proc = node / "proc"
    [check] = node_checks.host_memory(GPUS, proc=proc)
    assert (check.status, check.detail) == (OK, "512 GiB, 2 GPUs with 159 GiB")
    [check] = node_checks.host_memory(GPUS * 4, proc=proc)
    assert check.status == SKIPPED
    assert check.detail.startswith("512 GiB, 8 GPUs with 637 GiB: ")
    assert "637 GiB" in (check.hint or "")


def test_unknown_gpu_memory_is_not_compared(node: Path) -> None:
    proc = node / "proc"
    assert node_checks.host_memory([], proc=proc) == []
    assert node_checks.host_memory([GPUS[0], replace(GPUS[1], memory_mib=None)], proc=proc) == []
    [check] = node_checks.host_memory([GPUS[0], replace(GPUS[0], mig="7", memory_mib=9_000.0)], proc=proc)
    assert "1 GPU with 79.6 GiB" in check.detail, "an instance of a divided GPU is part of it"
    (proc / "meminfo").unlink()
    assert node_checks.host_memory(GPUS, proc=proc) == []


def test_few_namespaces_are_a_problem(node: Path) -> None:
    sysctl = node / "proc" / "sys"
    (sysctl / "user" / "max_pid_namespaces").write_text("0\n")
    [check] = node_checks.namespaces(sysctl)
    assert check.status == PROBLEM
    assert "sysctl -w user.max_pid_namespaces=" in (check.hint or "")


def test_user_namespaces_are_reported(node: Path) -> None:
    sysctl = node / "proc" / "sys"
    assert "users can create user namespaces" in node_checks.namespaces(sysctl)[0].detail
    (sysctl / "user" / "max_user_namespaces").write_text("0\n")
    [check] = node_checks.namespaces(sysctl)
    assert check.status == OK, "jobs need none"
    assert "users cannot create" in check.detail
    (sysctl / "user" / "max_user_namespaces").write_text("63428\n")
    (sysctl / "kernel").mkdir()
    (sysctl / "kernel" / "unprivileged_userns_clone").write_text("0\n")
    assert "users cannot create" in node_checks.namespaces(sysctl)[0].detail


def services(config: configuration.Config, node: Path) -> Check:
    """Return the check of the services of a node."""
    [check] = node_checks.services(config.suspend, proc=node / "proc", nsswitch=node / "nsswitch.conf")
    assert check.status == OK or check.hint
    return check


def test_services_whose_connections_are_closed_are_reported(config: configuration.Config, node: Path) -> None:
    assert services(config, node).detail == "no service of suspend.services", "a client of SSSD listens to nothing"
    with (node / "proc" / "net" / "unix").open("a") as file:
        file.write(SSSD)
    plugin = node / "criu" / "device_files.so"
    plugin.parent.mkdir()
    plugin.touch()
    check = services(replace(config, suspend=replace(config.suspend, criu_plugin=plugin)), node)
    assert (check.status, check.detail) == (OK, "a restore closes connections to /var/lib/sss/pipes/nss")


def test_service_without_the_plugin_of_criu_is_a_problem(config: configuration.Config, node: Path) -> None:
    with (node / "proc" / "net" / "unix").open("a") as file:
        file.write(SSSD)
    absent = replace(config.suspend, criu_plugin=node / "none" / "device_files.so")
    check = services(replace(config, suspend=absent), node)
    assert check.status == PROBLEM
    assert "/var/lib/sss/pipes/nss" in check.detail
    assert "slurm-affinode-spank" in (check.hint or "")


def test_unknown_module_of_names_is_reported(config: configuration.Config, node: Path) -> None:
    (node / "nsswitch.conf").write_text("passwd:\tfiles winbind # x\ngroup: files [SUCCESS=merge] winbind\n")
    check = services(config, node)
    assert check.status == SKIPPED
    assert "names winbind" in check.detail
    assert "suspend.services" in (check.hint or "")


def test_machine_without_agent_is_not_checked(config: configuration.Config, tmp_path: Path) -> None:
    keyless = replace(config, suspend=replace(config.suspend, key_file=tmp_path / "none"))
    assert node_checks.examine(keyless, Programs(SOUND)) == []
    assert node_checks.examine(replace(config, suspend=replace(config.suspend, shared_store=None)), Programs({})) == []
