"""Inspection of process trees, one of which has a file open on a file system that does not respond."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from waiting import DEADLINE_S, wait_until

from slurm_affinode.base.pidfd import Process
from slurm_affinode.checkpoint.inspection import TreeFacts, TreeInspector
from slurm_affinode.checkpoint.interface import CheckpointError


@pytest.fixture
def pids() -> Iterator[tuple[int, int]]:
    """Return the PIDs of two processes."""
    children = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    yield children[0].pid, children[1].pid
    for child in children:
        child.kill()
        child.wait()


def test_tree_of_a_process_that_has_ended_is_empty() -> None:
    """Nothing is inspected."""
    with subprocess.Popen(["true"]) as ended:
        pass
    assert TreeInspector(lambda *_: pytest.fail("it was inspected"))(ended.pid, 70).processes == ()


def test_tree_that_does_not_respond_does_not_block_others(pids: tuple[int, int]) -> None:
    """It is reported, immediately from the second time on, and inspected again when it responds."""
    stalled = threading.Event()
    hangs, fine = pids

    def inspect_tree(init_pid: int, root_pid: int) -> TreeFacts:
        if init_pid == hangs:
            stalled.wait()
        return TreeFacts(init_pid, root_pid, ())

    inspector = TreeInspector(inspect_tree, limit_s=0.2)
    try:
        with pytest.raises(CheckpointError, match="on a file system that does not respond"):
            inspector(hangs, 70)
        inspector._limit_s = inspector._unresponsive[Process(hangs).id]._probe_s = DEADLINE_S
        began = time.monotonic()
        with pytest.raises(CheckpointError, match="on a file system that does not respond"):
            inspector(hangs, 70)
        assert inspector(fine, 80).root_pid == 80
        assert time.monotonic() - began < DEADLINE_S
    finally:
        stalled.set()
    wait_until("it answers", lambda: not inspector._unresponsive[Process(hangs).id].unresponsive)
    assert inspector(hangs, 71).root_pid == 71
