"""Stopping a process, for tests that need it not to run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from waiting import wait_until


def stop(pid: int) -> None:
    """Stop the process. Returns once no thread runs: SIGSTOP stops each thread only when it is scheduled next."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(f"all threads of {pid} are stopped", lambda: _states(pid), lambda states: states == {"T"})


def _states(pid: int) -> set[str]:
    return {path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")}
