"""File locks: those that a job holds, and the processes that wait for them, as the kernel lists them."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import wait_until

from slurm_affinode.suspension.inplace.file_locks import NodeFileLocks

RECORDED = """\
1: FLOCK  ADVISORY  WRITE 41 00:2f:77 0 EOF
1: -> FLOCK  ADVISORY  WRITE 42 00:2f:77 0 EOF
1:  -> FLOCK  ADVISORY  WRITE 99 00:2f:77 0 EOF
2: POSIX  ADVISORY  WRITE 50 08:01:12 0 EOF
2: -> POSIX  ADVISORY  READ 98 08:01:12 5 9
3: POSIX  ADVISORY  READ 60 08:01:13 0 EOF
4: OFDLCK ADVISORY  READ -1 00:06:3 0 EOF
4: -> OFDLCK ADVISORY  WRITE -1 00:06:3 0 EOF
5: ->
"""
FLOCK = ("FLOCK", "ADVISORY", "WRITE", "41", "00:2f:77", "0", "EOF")
POSIX = ("POSIX", "ADVISORY", "WRITE", "50", "08:01:12", "0", "EOF")
READ = ("POSIX", "ADVISORY", "READ", "60", "08:01:13", "0", "EOF")
OFD = ("OFDLCK", "ADVISORY", "READ", "-1", "00:06:3", "0", "EOF")


def test_waiting_processes_of_others_are_found(tmp_path: Path) -> None:
    """Waiters of the job itself do not count, nor locks without a waiter; an unknown waiter is none."""
    (tmp_path / "locks").write_text(RECORDED)
    locks = NodeFileLocks(tmp_path)
    jobs = {7: frozenset({FLOCK}), 8: frozenset({POSIX, READ}), 9: frozenset({READ}), 10: frozenset({OFD})}
    assert locks.awaited(jobs, {7: (41, 42), 8: (50,)}) == {7: 99, 8: 98}
    assert locks.awaited(jobs, {7: (41, 42, 99), 8: (50, 98)}) == {}
    assert NodeFileLocks(tmp_path / "none").awaited(jobs, {}) == {}


@contextmanager
def waiter(path: Path) -> Iterator[int]:
    """A process that waits for a lock on the file."""
    child = subprocess.Popen(("flock", path, "true"))
    try:
        yield child.pid
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("kind", ["flock", "inherited"])
def test_lock_of_a_real_process_is_awaited(tmp_path: Path, kind: str) -> None:
    """Its lock is known by its descriptor, also if the process that took it has ended."""
    path = tmp_path / "lock"
    locks = NodeFileLocks()
    with path.open("w") as file:
        if kind == "flock":
            fcntl.flock(file, fcntl.LOCK_EX)
        else:
            subprocess.run(("flock", str(file.fileno())), pass_fds=(file.fileno(),), check=True)
        held = locks.locks_of([os.getpid()])
        own_locks = frozenset(item for item in held if item[4].endswith(f":{path.stat().st_ino}"))
        assert len(own_locks) == 1
        assert locks.awaited({7: own_locks}, {}) == {}
        with waiter(path) as pid:
            wait_until("it waits", lambda: locks.awaited({7: own_locks}, {}), lambda result: result == {7: pid})
            assert locks.awaited({7: own_locks}, {7: (pid,)}) == {}
    assert not [lock for lock in locks.locks_of([os.getpid()]) if lock in own_locks]
