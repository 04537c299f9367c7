"""Background programs of a test."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from slurm_affinode.suspension.process_tree import LinuxProcesses

END_S = 60.0


@contextlib.contextmanager
def running(argv: Sequence[str], log: Path, cwd: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``argv`` until the block ends, then terminate it; its output goes to ``log``."""
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, cwd=cwd)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def started_of(pid: int) -> int:
    """Return the start time of a running process, in ticks since boot."""
    member = LinuxProcesses().read(pid)
    assert member is not None
    return member.started
