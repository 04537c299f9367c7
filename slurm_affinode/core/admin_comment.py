"""The line about a job's use of the GPUs of its first node, in its AdminComment. Pure.

AdminComment is free text of the site and of other programs, so a line is recognized only if it is complete and has
nothing else beside it. Lines of earlier releases stay in accounting: the form may be extended, and not changed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurm_affinode.base.text import counted, figure, percent

PREFIX = "slurm-affinode: "
"""Start of the line, by which the agent recognizes one that it may replace."""
_MIB_PER_GIB = 1024
_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_LINE = re.compile(
    rf"{PREFIX}[A-Za-z0-9][A-Za-z0-9._-]{{0,254}}(?:, 1 of {_NUMBER} nodes)?: {_NUMBER} GPUs?, "
    rf"busy [<>]?{_NUMBER} % of the measured time, idle {_NUMBER} GPU-h(?:, unknown {_NUMBER} GPU-h)?, "
    rf"memory peak (?:{_NUMBER} GiB|unknown)(?:, suspended {_NUMBER} times?)?",
    re.ASCII,
)
_LONGEST = 512
"""Characters of the longest line that is recognized."""


@dataclass(frozen=True, slots=True)
class NodeUse:
    """Measured use of a job's GPUs on one node."""

    node: str
    nodes: int
    """Nodes of the job."""
    gpus: int
    """GPUs of the job on this node."""
    busy_s: float
    """GPU-seconds, as ``idle_s`` and ``unknown_s``; ``busy_s`` and ``idle_s`` are not both 0."""
    idle_s: float
    unknown_s: float | None
    """``None``: start or end of the job is not known."""
    peak_mib: float | None
    """Largest memory in use on one GPU; ``None`` if unknown."""
    suspensions: int
    """Completed suspensions."""


def line(use: NodeUse) -> str:
    """Return the line, made of names and numbers."""
    where = use.node if use.nodes < 2 else f"{use.node}, 1 of {use.nodes} nodes"
    busy = percent(use.busy_s / (use.busy_s + use.idle_s))
    parts = [
        counted(use.gpus, "GPU"),
        f"busy {busy} of the measured time",
        f"idle {figure(use.idle_s / 3600, 2)} GPU-h",
    ]
    if use.unknown_s is not None:
        parts.append(f"unknown {figure(use.unknown_s / 3600, 2)} GPU-h")
    peak = "unknown" if use.peak_mib is None else f"{figure(use.peak_mib / _MIB_PER_GIB)} GiB"
    parts.append(f"memory peak {peak}")
    if use.suspensions:
        parts.append(f"suspended {counted(use.suspensions, 'time')}")
    return f"{PREFIX}{where}: {', '.join(parts)}"


def recognized(comment: str | None) -> str | None:
    """Return the line without ``PREFIX`` if ``comment`` is such a line and nothing else."""
    if comment is None or len(comment) > _LONGEST or _LINE.fullmatch(comment) is None:
        return None
    return comment.removeprefix(PREFIX)
