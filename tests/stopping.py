"""Stopping a process, for tests that rely on its standing still."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

DEADLINE_S = 30.0


def stop(pid: int) -> None:
    """Returns once none of its threads runs: SIGSTOP reaches each of them only when it is scheduled next."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE_S
    while (states := _states(pid)) != {"T"}:
        assert time.monotonic() < deadline, f"threads of {pid} are still {states}"
        time.sleep(0.005)


def _states(pid: int) -> set[str]:
    return {path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")}
