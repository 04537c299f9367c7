"""Host memory of this node."""

from __future__ import annotations

from pathlib import Path

from slurm_affinode.base import kernel_text
from slurm_affinode.base.pidfd import PROC


def available_memory(*, proc: Path = PROC) -> int | None:
    """Return the host memory available without swapping, in bytes, or ``None`` if the kernel does not report it."""
    try:
        lines = kernel_text.lines(proc / "meminfo")
    except OSError:
        return None
    return kernel_text.kib(kernel_text.table(lines).get("MemAvailable"))
