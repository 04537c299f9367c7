"""Stopping a process, for tests that rely on its standing still."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from waiting import wait_until


def stop(pid: int) -> None:
    """Returns once none of its threads runs: SIGSTOP reaches each of them only when it is scheduled next."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(f"all threads of {pid} are stopped", lambda: _states(pid), lambda states: states == {"T"})


def _states(pid: int) -> set[str]:
    return {path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")}
