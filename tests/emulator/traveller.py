"""The program that test_criu.py moves to another node, and the one that suspends and resumes it.

traveller.py work DIRECTORY    fills device memory, creates `ready`, waits for `go`, writes the result to `done`
traveller.py checkpoint PID suspend|resume
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from session import MIB, alloc, d, digest, fill, handle, lock, n, ok, restore, use


def work(directory: Path) -> None:
    """Run the program that is moved."""
    n.nvmlInit()
    use(1)
    small, large = alloc(20), alloc(2000)
    written = [fill(small, 20 * MIB, 1), fill(large + 1234 * MIB, 1000, 2)]
    (directory / "ready").touch()
    while not (directory / "go").exists():
        ok(d.cuCtxSynchronize())  # to be dumped while waiting in a call
        time.sleep(0.01)
    result = [digest(small, 20 * MIB), digest(large + 1234 * MIB, 1000)]
    alloc(1)
    used = n.nvmlDeviceGetMemoryInfo(handle(1), n.nvmlMemory_v2).used
    (directory / "done.new").write_text(f"{result == written} {used // MIB}")
    (directory / "done.new").rename(directory / "done")


def checkpoint(pid: int, what: str) -> None:
    """Suspend or resume, in place of the agent."""
    if what == "suspend":
        lock(pid, 10_000)
        ok(d.cuCheckpointProcessCheckpoint(pid, None))
    else:
        restore(pid)
        ok(d.cuCheckpointProcessUnlock(pid, None))


if __name__ == "__main__":
    if sys.argv[1] == "work":
        work(Path(sys.argv[2]))
    else:
        checkpoint(int(sys.argv[2]), sys.argv[3])
