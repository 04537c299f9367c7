"""Yama's ``ptrace_scope``: whether a process may trace another one of the same user that is not its child.

While CRIU restores a process tree, its processes hold descriptors that the agent passed on. A process of the same user
with permission to trace them could take these (``pidfd_getfd(2)``), or write into their memory before it is checked.
Source: the kernel's ``Documentation/admin-guide/LSM/Yama.rst``.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from slurm_affinode.checkpoint.interface import CheckpointError

SYSCTL = Path("/proc/sys/kernel/yama/ptrace_scope")
HINT = "echo kernel.yama.ptrace_scope=1 >/etc/sysctl.d/60-slurm-affinode.conf && sysctl --system"
_NO_YAMA = "boot a kernel with Yama (CONFIG_SECURITY_YAMA, and yama in lsm=)"


class PtraceVerdict(Enum):
    """Whether a node may restore jobs."""

    SOUND = "sound"
    ADVISED = "advised"
    """It may, but should restrict tracing as a second line of defense."""
    REFUSED = "refused"


def scope(sysctl: Path = SYSCTL) -> int | None:
    """Read the setting: 0 (any process of the user), 1 (only parents), 2 (only administrators), 3 (no process).

    ``None`` if the kernel has no Yama, or for any other value.
    """
    try:
        text = sysctl.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return int(text) if text in ("0", "1", "2", "3") else None


def judge(scope: int | None) -> PtraceVerdict:
    """Return the verdict on a setting, for both the agent and ``doctor``."""
    return PtraceVerdict.SOUND if scope else PtraceVerdict.ADVISED


def describe(scope: int | None) -> str:
    """Return a one-line description of what a setting allows."""
    if scope is None:
        return "the kernel has no Yama: any process of a user may trace the others of that user"
    allowed = (
        "any process of a user may trace the others of that user", "only parents may trace",
        "only administrators may trace", "tracing is disabled",
    )  # fmt: skip
    return f"kernel.yama.ptrace_scope is {scope}: {allowed[scope]}"


def hint(scope: int | None) -> str:
    """Return the remedy if tracing is not restricted."""
    return _NO_YAMA if scope is None else HINT


def check(sysctl: Path = SYSCTL) -> str | None:
    """Return a warning for a node that should restrict tracing, or ``None``.

    Raises ``CheckpointError`` if the node must not restore jobs.
    """
    level = scope(sysctl)
    verdict = judge(level)
    if verdict is PtraceVerdict.REFUSED:
        raise CheckpointError(describe(level), hint=hint(level))
    return None if verdict is PtraceVerdict.SOUND else f"{describe(level)}; {hint(level)}"
