"""The systemd units: how strictly each service is confined, and what restored jobs must not inherit."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_affinode.base.resources import asset_dir
from slurm_affinode.cli.main import cli

UNITS = asset_dir("reports") / "systemd"
SERVICES = sorted(UNITS.glob("*.service"))
EXPOSURE = {"agent": 95, "exporter": 17, "nightly": 15, "zombies": 27}
"""Maximum exposure levels of ``systemd-analyze security``, in tenths from 0 (most confined) to 100.

The agent is root with every capability: settings that lower its exposure would be inherited by restored jobs.
"""
INHERITED = {
    # A restored process keeps no_new_privs, a smaller bounding set, and seccomp filters: none of them can be undone.
    "NoNewPrivileges", "CapabilityBoundingSet", "SecureBits",
    "SystemCallFilter", "SystemCallArchitectures", "SystemCallLog", "RestrictAddressFamilies", "RestrictNamespaces",
    "RestrictRealtime", "RestrictSUIDSGID", "LockPersonality", "MemoryDenyWriteExecute",
    # Each of these installs a seccomp filter, drops capabilities from the bounding set, or both.
    "ProtectClock", "ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables",
    "PrivateDevices",
    # CRIU enters no network, IPC, UTS or user namespace of the job.
    "PrivateIPC", "PrivateNetwork", "PrivateUsers", "NetworkNamespacePath", "IPCNamespacePath", "DynamicUser", "User",
    # CRIU does not restore these if the job had the default.
    "OOMScoreAdjust", "IOSchedulingClass", "IOSchedulingPriority", "TimerSlackNSec", "CoredumpFilter", "Personality",
    "NUMAPolicy", "NUMAMask",
}  # fmt: skip
"""Settings that a restored job would inherit from the agent; see docs/security.md."""
NEEDED = {
    "ProtectHome", "PrivateTmp", "ProtectControlGroups", "ProtectProc", "ProcSubset", "RootDirectory", "RootImage",
    "TemporaryFileSystem", "InaccessiblePaths", "MemoryMax", "TasksMax",
}  # fmt: skip
"""Settings that would prevent the agent from working."""
REQUIRED = {
    "UMask": "0077",
    "ProtectSystem": "full",
    "DevicePolicy": "closed",
    "DeviceAllow": "char-* rwm",
    "KeyringMode": "private",
    "AmbientCapabilities": "",
    "KillMode": "process",
}
"""Settings of the agent that restored jobs do not inherit."""


def settings(text: str) -> list[tuple[str, str]]:
    """Return the settings of a unit, in order."""
    return re.findall(r"^([A-Za-z]+)=(.*)$", text, re.MULTILINE)


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    if program is None:
        assert os.environ.get("CI") != "true", "systemd-analyze is not installed"
        pytest.skip("systemd-analyze is not installed")
    return subprocess.run([program, *words], capture_output=True, text=True, check=False, timeout=240)


def exposure(unit: Path, most: int) -> str:
    """Return the report of ``systemd-analyze``, or an empty string if the exposure is at most ``most``."""
    done = analyze("security", "--offline=yes", "--no-pager", f"--threshold={most}", str(unit))
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_agent_unit_gives_nothing_to_restored_jobs() -> None:
    """A job would keep a seccomp filter, lose capabilities of its bounding set, or be spared by the OOM killer."""
    names = {name for name, _ in settings((UNITS / "slurm-affinode-agent.service").read_text())}
    assert names & INHERITED == set()
    assert names & NEEDED == set()


def test_agent_unit_is_as_strict_as_restored_jobs_allow() -> None:
    result = settings((UNITS / "slurm-affinode-agent.service").read_text())
    assert {name: value for name, value in result if name in REQUIRED} == REQUIRED


def test_agent_unit_explains_each_missing_setting() -> None:
    """Administrators who add one find the reason for its absence."""
    comments = "".join(re.findall(r"^#.*\n", (UNITS / "slurm-affinode-agent.service").read_text(), re.MULTILINE))
    for name in (
        "NoNewPrivileges", "CapabilityBoundingSet", "SystemCallFilter", "RestrictNamespaces", "MemoryDenyWriteExecute",
        "ProtectClock", "ProtectHostname", "PrivateDevices", "PrivateIPC", "OOMScoreAdjust", "ProtectHome",
        "PrivateTmp", "ProtectControlGroups", "ProtectProc",
    ):  # fmt: skip
        assert f"{name}=" in comments, name


@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.stem.removeprefix("slurm-affinode-"))
def test_exposure_of_units(unit: Path) -> None:
    """As computed by ``systemd-analyze``."""
    most = EXPOSURE[unit.stem.removeprefix("slurm-affinode-")]
    assert exposure(unit, most) == ""
    assert exposure(unit, 0), "the threshold has no effect"


@pytest.mark.parametrize("name", ["exporter", "nightly", "zombies"])
def test_services_without_criu_are_confined(name: str) -> None:
    result = settings((UNITS / f"slurm-affinode-{name}.service").read_text())
    values = dict(result)
    for setting in (
        "NoNewPrivileges", "PrivateTmp", "PrivateMounts", "PrivateIPC", "ProtectClock", "ProtectControlGroups",
        "ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables", "LockPersonality",
        "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID",
    ):  # fmt: skip
        assert values[setting] == "yes", setting
    assert values["ProtectSystem"] == "strict"
    assert values["ProtectHome"] in ("yes", "read-only")
    assert values["AmbientCapabilities"] == ""
    assert values["KeyringMode"] == "private"
    assert values["SystemCallArchitectures"] == "native"
    assert values["RestrictAddressFamilies"] == "AF_UNIX AF_INET AF_INET6"
    filters = [value for setting, value in result if setting == "SystemCallFilter"]
    assert filters[0] == "@system-service"
    assert "@resources" in filters[1]
    # DevicePolicy= instead where GPUs must stay visible.
    assert values.get("PrivateDevices", values.get("DevicePolicy")) in ("yes", "closed")
    few = "CAP_CHOWN CAP_DAC_OVERRIDE CAP_FOWNER CAP_SETGID CAP_SETUID" if name == "zombies" else ""
    assert values["CapabilityBoundingSet"] == few


@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.stem.removeprefix("slurm-affinode-"))
def test_units_need_no_program_of_another_package(unit: Path) -> None:
    """``/bin/kill`` is in procps, which a small Debian does not have; the log names the service, and not env."""
    result = settings(unit.read_text())
    started = {value.lstrip("+-").partition(" ")[0] for name, value in result if name.startswith("Exec")}
    assert started <= {"/usr/bin/env", "/bin/sh"}
    assert dict(result)["SyslogIdentifier"] == unit.stem


def test_polars_can_start() -> None:
    """It maps executable memory when it is imported."""
    for unit in SERVICES:
        assert "MemoryDenyWriteExecute" not in dict(settings(unit.read_text())), unit.name


def test_clean_up_cannot_write_crontabs() -> None:
    """Crontabs are below /var/spool, and the state directory may belong to another user."""
    result = settings((UNITS / "slurm-affinode-zombies.service").read_text())
    paths = {path.lstrip("-") for name, value in result if name == "ReadWritePaths" for path in value.split()}
    assert "/var/spool/postfix" in paths
    assert not {path for path in paths if path in ("/", "/var", "/var/spool") or "cron" in path or "/at" in path}


@pytest.mark.parametrize(("user", "most"), [("root", EXPOSURE["zombies"]), ("slurm", 17)])
def test_installed_unit_is_as_strict_as_the_shipped_one(tmp_path: Path, user: str, most: int) -> None:
    """``zombies install`` gives no capabilities to a user other than root."""
    done = CliRunner().invoke(cli, ["zombies", "install", "--root", str(tmp_path), "--systemd", "--user", user])
    assert done.exit_code == 0, done.output
    unit = tmp_path / "etc/systemd/system/slurm-affinode-zombies.service"
    assert exposure(unit, most) == ""
    shipped = settings((UNITS / unit.name).read_text())
    written = settings(unit.read_text())
    changed = {"User", "ExecStart", "ExecStartPre", "Environment", "CapabilityBoundingSet"}
    assert [item for item in written if item[0] not in changed] == [item for item in shipped if item[0] not in changed]
    assert (dict(written)["CapabilityBoundingSet"] == "") == (user != "root")


CAPABILITIES = {
    "CAP_DAC_READ_SEARCH": 2, "CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7, "CAP_SYS_PTRACE": 19,
}  # fmt: skip
"""Those of the exporter that searches for engines, as in linux/capability.h."""
STOPPED_SCRAPE = """
import os, sys
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.process import run
stops = (
    "import os, signal; from slurm_affinode.engines.scrape import drop_privileges;"
    "drop_privileges(65534, 65534, [1234]); os.kill(os.getpid(), signal.SIGSTOP)"
)
try:
    run([sys.executable, "-P", "-c", stops], timeout_s=3)
except UnreachableError as error:
    print(error)
try:
    print("left:", os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("ended")
"""


def manual_for_engines() -> str:
    """Return the settings in the manual for an exporter that searches for engines."""
    manual = (Path(__file__).parents[2] / "docs" / "exporter.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```ini\n# systemctl edit slurm-affinode-exporter\n(.*?)```", manual, re.DOTALL)
    return str(text)


def test_exporter_that_searches_for_engines_is_confined(tmp_path: Path) -> None:
    """It is root, with five capabilities: about as exposed as the clean-up."""
    unit = tmp_path / "slurm-affinode-exporter.service"
    unit.write_text((UNITS / unit.name).read_text() + manual_for_engines())
    assert exposure(unit, 31) == ""
    assert dict(settings(unit.read_text()))["NoNewPrivileges"] == "yes"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")
def test_capabilities_in_the_manual_suffice_to_end_a_stopped_scrape() -> None:
    """A scrape runs as the user, who can stop it; each one left behind would keep its memory."""
    line = dict(settings(manual_for_engines()))["CapabilityBoundingSet"]
    kept = {CAPABILITIES[name] for name in line.split()}

    def drop_others() -> None:
        libc = ctypes.CDLL(None)
        for number in set(range(64)) - kept:
            libc.prctl(24, number)  # PR_CAPBSET_DROP

    done = subprocess.run(
        [sys.executable, "-P", "-c", STOPPED_SCRAPE], capture_output=True, text=True, check=True, timeout=240,
        preexec_fn=drop_others,
    )  # fmt: skip
    assert "timed out" in done.stdout
    assert done.stdout.splitlines()[-1] == "ended"
