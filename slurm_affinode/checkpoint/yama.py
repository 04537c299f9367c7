"""Yama's ``ptrace_scope``: may a process of a user trace another one of the same user that is not its child?

While CRIU restores a process tree, its processes hold descriptors that the agent passed on. A process of the same user
that could trace them could take these (``pidfd_getfd(2)``), or write into their memory before it was checked. Source:
the kernel's ``Documentation/admin-guide/LSM/Yama.rst``.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from slurm_affinode.checkpoint.interface import CheckpointError

SYSCTL = Path("/proc/sys/kernel/yama/ptrace_scope")
HINT = "echo kernel.yama.ptrace_scope=1 >/etc/sysctl.d/60-slurm-affinode.conf && sysctl --system"
_NO_YAMA = "boot a kernel with Yama (CONFIG_SECURITY_YAMA, and yama in lsm=)"


class Verdict(Enum):
    """Whether a node may restore jobs."""

    SOUND = "sound"
    ADVISED = "advised"
    """It may, and should restrict tracing as a second line of defense."""
    REFUSED = "refused"


def scope(sysctl: Path = SYSCTL) -> int | None:
    """Read the setting: 0 (any process of the user), 1 (only parents), 2 (only administrators), 3 (nobody).

    ``None``: the kernel has no Yama, or says something that is none of these.
    """
    try:
        text = sysctl.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return int(text) if text in ("0", "1", "2", "3") else None


def judge(scope: int | None) -> Verdict:
    """Decide what a setting means for the agent and for ``doctor``; the only place that does."""
    return Verdict.SOUND if scope else Verdict.ADVISED


def describe(scope: int | None) -> str:
    """Say what a setting allows, in one line."""
    if scope is None:
        return "the kernel has no Yama: any process of a user may trace the others of that user"
    allowed = (
        "any process of a user may trace the others of that user", "only parents may trace",
        "only administrators may trace", "nobody may trace",
    )  # fmt: skip
    return f"kernel.yama.ptrace_scope is {scope}: {allowed[scope]}"


def hint(scope: int | None) -> str:
    """Say what to do where tracing is not restricted."""
    return _NO_YAMA if scope is None else HINT


def check(sysctl: Path = SYSCTL) -> str | None:
    """Return a warning for a node that should restrict tracing, or ``None``.

    Raises ``CheckpointError`` where such a node must not restore jobs.
    """
    found = scope(sysctl)
    verdict = judge(found)
    if verdict is Verdict.REFUSED:
        raise CheckpointError(describe(found), hint=hint(found))
    return None if verdict is Verdict.SOUND else f"{describe(found)}; {hint(found)}"
