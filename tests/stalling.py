"""A file system that can stop responding, for tests run as root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from stopping import stop

PASSTHROUGH = Path(__file__).with_name("passthrough.py")
LONGEST_S = 120.0
"""The program is then killed: no time limit interrupts a faulty test that waits for its own file system."""


@dataclass
class Stalling:
    """A mounted file system."""

    path: Path
    program: subprocess.Popen[str]
    stalled: bool = False

    def stall(self) -> None:
        """Block all further requests."""
        self.stalled = True
        stop(self.program.pid)

    def resume(self) -> None:
        """Answer requests again, including blocked ones."""
        self.program.send_signal(signal.SIGCONT)
        self.stalled = False


@pytest.fixture
def stalling(tmp_path: Path) -> Iterator[Callable[[Path], Stalling]]:
    """Return a function that mounts such a file system on a directory."""
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("FUSE needs root and /dev/fuse")
    made: list[Stalling] = []
    late: list[threading.Timer] = []

    def mount(path: Path) -> Stalling:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        behind = tmp_path / f"behind-{len(made)}"
        behind.mkdir(mode=0o700)
        argv = [sys.executable, str(PASSTHROUGH), str(behind), str(path)]
        program = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert program.stdout is not None
        made.append(Stalling(path, program))
        late.append(threading.Timer(LONGEST_S, program.kill))
        late[-1].daemon = True
        late[-1].start()
        if program.stdout.readline() != "mounted\n":
            _, errors = program.communicate()
            pytest.skip(f"no FUSE can be mounted: {errors.strip()}")
        return made[-1]

    yield mount
    for item, timer in zip(made, late, strict=True):
        timer.cancel()
        item.program.kill()  # blocked requests fail
        item.program.communicate()
        subprocess.run(["umount", "-l", item.path], check=False, capture_output=True)
