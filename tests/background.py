"""Background programs of a test, and calls in background threads."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from waiting import DEADLINE_S

from slurm_affinode.suspension.job.process_tree import LinuxProcesses

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


class Stalled:
    """Calls that begin, and block until released."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.go = threading.Event()

    def call(self, name: str) -> Callable[[], None]:
        def run() -> None:
            self.began.append(name)
            self.go.wait(DEADLINE_S)

        return run


def started_of(pid: int) -> int:
    """Return the start time of a running process, in ticks since boot."""
    member = LinuxProcesses().read(pid)
    assert member is not None
    return member.started
