"""``doctor`` on a node: limits and rights of the running agent, as its service has started it. Read-only.

The agent and CRIU need the rights of PID 1, and restored jobs keep some of what a service takes away from the agent
(``reports/systemd/slurm-affinode-agent.service``), so PID 1 is the reference. Sources: proc(5), linux/capability.h.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_affinode.base import kernel_text
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.pidfd import PROC, Process
from slurm_affinode.base.text import size
from slurm_affinode.pipeline.checks import OK, PROBLEM, SKIPPED, Check

UNIT = "slurm-affinode-agent"
LIMITS, RIGHTS = "agent limits", "agent rights"
OPEN_FILES, LEAST_FILES = 65_536, 8_192
"""``LimitNOFILE=`` of the unit, and what is too little: the agent holds descriptors of each process of the jobs, and a
restored program may have mapped thousands of files."""
_NAMESPACES = ("cgroup", "ipc", "net", "pid", "user", "uts")
_CGROUPS = "/sys/fs/cgroup"
_LOCK_MEMORY = 14
_CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
    "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
    "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
    "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
    "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
    "CHECKPOINT_RESTORE",
)  # fmt: skip
"""Names by number, of those that CRIU knows."""
_EDIT = f"systemctl cat {UNIT} shows the file; systemctl edit {UNIT} changes it; then: systemctl restart {UNIT}"


@dataclass(frozen=True, slots=True)
class _Rights:
    """Limits and rights of a process. A limit of ``None`` is none."""

    open_files: int | None
    locked_bytes: int | None
    core_bytes: int | None
    capabilities: int
    no_new_privileges: bool
    filters: int
    """Number of seccomp filters."""
    namespaces: dict[str, tuple[int, int] | None]
    cgroups_writable: bool


def checks(agent: int | None, *, first: int = 1, proc: Path = PROC) -> list[Check]:
    """Return the checks of the agent with this PID, compared with the process ``first``; ``None``: none runs."""
    if agent is None:
        return [Check(LIMITS, SKIPPED, "no agent runs on this node", f"systemctl enable --now {UNIT}")]
    try:
        with Process(agent, proc=proc) as process, Process(first, proc=proc) as reference:
            rights, of_first = _read(process), _read(reference)
    except (OSError, UnreachableError) as error:
        return [Check(LIMITS, SKIPPED, f"process {agent}, the agent, cannot be examined: {error}")]
    return [_limits(rights), _compared(rights, of_first)]


def _read(process: Process) -> _Rights:
    """Read the state of a process. Raises ``OSError``, ``UnreachableError``."""
    status = kernel_text.table(process.text("status").split("\n"))
    limits = dict(_hard_limits(process.text("limits")))
    return _Rights(
        limits.get("Max open files"), limits.get("Max locked memory"), limits.get("Max core file size"),
        kernel_text.number(status.get("CapBnd"), 16) or 0,
        status.get("NoNewPrivs") == "1",
        kernel_text.number(status.get("Seccomp_filters")) or 0,
        {kind: process.namespace(kind) for kind in _NAMESPACES},
        _writable(process.text("mountinfo"), _CGROUPS),
    )  # fmt: skip


def _hard_limits(text: str) -> Iterator[tuple[str, int | None]]:
    """Yield name and hard limit of each line of ``/proc/PID/limits``; columns begin where those of the header do."""
    header, *lines = text.split("\n")
    soft, hard = header.find("Soft Limit"), header.find("Hard Limit")
    for line in lines:
        if words := line[hard:].split():
            yield line[:soft].strip(), kernel_text.number(words[0])


def _writable(mounts: str, path: str) -> bool:
    """Return whether the uppermost mount at a path, in the text of ``mountinfo``, can be written."""
    options = ""
    for line in mounts.split("\n"):
        words = line.split(" ")
        if len(words) > 5 and words[4] == path:
            options = words[5]
    return "ro" not in options.split(",")


def _limits(rights: _Rights) -> Check:
    files, locked, core = rights.open_files, rights.locked_bytes, rights.core_bytes
    shown = f"open files {files or 'unlimited'}, locked memory {_bytes(locked)}, core files {_bytes(core)}"
    if files is not None and files < LEAST_FILES:
        return Check(
            LIMITS, PROBLEM, f"{shown}: jobs with many processes or files need at least {LEAST_FILES} open files",
            f"set LimitNOFILE={OPEN_FILES} in the unit; {_EDIT}",
        )  # fmt: skip
    if locked is not None and not rights.capabilities >> _LOCK_MEMORY & 1:
        return Check(
            LIMITS, SKIPPED, f"{shown}, without CAP_IPC_LOCK: jobs that have locked more memory cannot be restored",
            f"set LimitMEMLOCK=infinity in the unit; {_EDIT}",
        )  # fmt: skip
    return Check(LIMITS, OK, shown)


def _bytes(limit: int | None) -> str:
    return "unlimited" if limit is None else size(limit)


def _compared(rights: _Rights, first: _Rights) -> Check:
    """Compare the rights of the agent with those of PID 1."""
    missing = first.capabilities & ~rights.capabilities
    lost = [f"CAP_{name}" for number, name in enumerate(_CAPABILITIES) if missing >> number & 1]
    private = [kind for kind in _NAMESPACES if rights.namespaces[kind] != first.namespaces[kind]]
    problems = [
        text
        for text, applies in (
            (f"without {', '.join(lost)} (CapabilityBoundingSet=)", bool(lost)),
            ("with NoNewPrivileges=", rights.no_new_privileges and not first.no_new_privileges),
            ("with seccomp filters (SystemCallFilter=, Restrict...=, Protect...=)", rights.filters > first.filters),
            (f"in namespaces of its own: {', '.join(private)} (Private...=)", bool(private)),
            ("with read-only cgroups (ProtectControlGroups=)", first.cgroups_writable and not rights.cgroups_writable),
        )
        if applies
    ]
    if not problems:
        return Check(RIGHTS, OK, "as those of PID 1: restored jobs lose none")
    return Check(
        RIGHTS, PROBLEM, f"the agent runs {'; '.join(problems)}: restores fail, or restored jobs keep the restriction",
        f"remove these settings from the unit and its drop-in files; {_EDIT}",
    )  # fmt: skip
