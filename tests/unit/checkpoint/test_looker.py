"""Looking at trees, of which one has a file open that nothing can be said of."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from waiting import DEADLINE_S, wait_until

from slurm_affinode.checkpoint.facts import TreeFacts
from slurm_affinode.checkpoint.interface import CheckpointError
from slurm_affinode.checkpoint.looker import Looker
from slurm_affinode.pinned import Process


@pytest.fixture
def pids() -> Iterator[tuple[int, int]]:
    """Two processes."""
    children = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    yield children[0].pid, children[1].pid
    for child in children:
        child.kill()
        child.wait()


def test_tree_of_a_process_that_has_ended_is_empty() -> None:
    """And nothing is looked at."""
    with subprocess.Popen(["true"]) as ended:
        pass
    assert Looker(lambda *_: pytest.fail("it was looked at"))(ended.pid, 70).processes == ()


def test_one_that_hangs_keeps_no_other_waiting(pids: tuple[int, int]) -> None:
    """It is told, at once from the second time on, and looked at again when it answers."""
    stalled = threading.Event()
    hangs, fine = pids

    def look(init_pid: int, root_pid: int) -> TreeFacts:
        if init_pid == hangs:
            stalled.wait()
        return TreeFacts(init_pid, root_pid, ())

    looker = Looker(look, limit_s=0.2)
    try:
        with pytest.raises(CheckpointError, match="nothing can be said"):
            looker(hangs, 70)
        looker._limit_s = looker._silent[Process(hangs).id]._look_s = DEADLINE_S
        began = time.monotonic()
        with pytest.raises(CheckpointError, match="nothing can be said"):
            looker(hangs, 70)
        assert looker(fine, 80).root_pid == 80
        assert time.monotonic() - began < DEADLINE_S
    finally:
        stalled.set()
    wait_until("it answers", lambda: not looker._silent[Process(hangs).id].silent)
    assert looker(hangs, 71).root_pid == 71
