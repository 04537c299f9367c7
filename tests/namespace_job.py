"""A job of real processes in a new PID namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from background import started_of
from waiting import wait_until

from slurm_affinode.base.pidfd import Number, Process

# PID 1 of its namespace starts a shell that forks continuously, with a sleeping child.
FORKING = 'while :; do /bin/true; echo x >>"$0"; done & sleep 1000 & wait'

needs_root = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root")


class EmptyNamespace:
    """A ``pidfd.Namespace`` in which nothing runs yet."""

    def __init__(self, killed: Callable[[], object] = lambda: None) -> None:
        self.killed = killed
        self.init = Process(os.getpid())
        self.pid_fd = self.mount_fd = 0
        self.root_fd = os.open("/", os.O_PATH | os.O_DIRECTORY)
        weakref.finalize(self, os.close, self.root_fd)

    def check(self) -> None:
        """Succeed."""

    def members(self) -> dict[int, int]:
        """Return no processes."""
        return {}

    def numbers(self) -> list[Number]:
        """Return no PIDs."""
        return []

    def processes(self) -> Iterator[tuple[int, Process]]:
        """Return no processes."""
        return iter(())

    def kill_all(self) -> bool:
        """Notify the test."""
        self.killed()
        return True


class Job:
    """A PID namespace with a job."""

    def __init__(self, log: Path, script: str = FORKING, options: tuple[str, ...] = ()) -> None:
        """Start the job. ``options``: further options of unshare(1)."""
        self.log = log
        log.touch()
        self.outer = subprocess.Popen(
            (
                "unshare",
                "--pid",
                "--fork",
                "--kill-child",
                *options,
                "sh",
                "-c",
                'setsid sh -c "$1" "$0" & wait',
                str(log),
                script,
            )
        )
        wait_until("the job is up", lambda: self.children() and self.size())
        self.init = self.children()[0]
        self.started = started_of(self.init)

    def children(self) -> list[int]:
        text = Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children").read_text()
        return [int(word) for word in text.split()]

    def size(self) -> int:
        return self.log.stat().st_size

    def goes_on(self) -> None:
        """Wait until it has written more."""
        size = self.size()
        wait_until("it continues", self.size, lambda now: now > size)

    def end(self) -> None:
        self.outer.kill()
        self.outer.wait()
