"""A helper process: requests, termination, hangs and exits."""

from __future__ import annotations

import os
import resource
import sys

import pytest

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.process import Child, ChildEndedError


def child(program: str) -> Child:
    return Child((sys.executable, "-c", program))


ECHO = "import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)"


def test_replies_are_read_line_by_line():
    """They may be long, and output on standard error does not interfere."""
    noisy = "import sys\nfor line in sys.stdin: sys.stderr.write('x' * 200000); print(line.strip() * 3, flush=True)"
    for program, times, answer in ((ECHO, 1, b"cba"), (noisy, 3, b"abcabcabc")):
        item = child(program)
        for _ in range(times):
            assert item.ask(b"abc", timeout_s=30) == answer
        item.close()
    long = child(ECHO)
    assert long.ask(b"a" * 3_000_000, timeout_s=30) == b"a" * 3_000_000
    long.close()


def test_child_works_with_many_open_files():
    """Its descriptors are above the limit of select(2)."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    many = [os.open("/", os.O_PATH) for _ in range(1030)]
    try:
        item = child(ECHO)
        assert item.ask(b"abc", timeout_s=30) == b"cba"
        item.close()
    finally:
        for fd in many:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_exit_status_of_a_dead_child_is_reported():
    for program, message in (
        ("import os; input(); os.kill(os.getpid(), 11)", "was ended by signal 11"),
        ("import sys; input(); sys.exit('fatal: no slurm.conf')", "ended with status 1: fatal: no slurm.conf"),
        ("import sys; sys.exit(3)", "ended with status 3"),
    ):
        item = child(program)
        with pytest.raises(ChildEndedError) as caught:
            item.ask(b"x", timeout_s=30)
        assert str(caught.value) == message


def test_child_that_hangs_is_killed():
    item = child("import sys, time; input(); print('waiting', file=sys.stderr, flush=True); time.sleep(600)")
    with pytest.raises(ChildEndedError, match=r"gave timed out after 2 s: waiting"):
        item.ask(b"x", timeout_s=2)
    with pytest.raises(ProcessLookupError):
        os.kill(item.pid, 0)


def test_missing_program_is_reported():
    with pytest.raises(UnreachableError, match="cannot be started"):
        Child(("/nonexistent/program",))
