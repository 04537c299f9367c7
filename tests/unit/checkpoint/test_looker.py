"""Looking at trees, of which one has a file open that nothing can be said of."""

from __future__ import annotations

import threading
import time

import pytest
from waiting import DEADLINE_S, wait_until

from slurm_affinode.checkpoint.facts import TreeFacts
from slurm_affinode.checkpoint.interface import CheckpointError
from slurm_affinode.checkpoint.looker import Looker

HANGS, FINE = 7, 8


def test_one_that_hangs_keeps_no_other_waiting() -> None:
    """It is told, at once from the second time on, and looked at again when it answers."""
    stalled = threading.Event()

    def look(init_pid: int, root_pid: int) -> TreeFacts:
        if init_pid == HANGS:
            stalled.wait()
        return TreeFacts(init_pid, root_pid, ())

    looker = Looker(look, limit_s=0.2)
    try:
        with pytest.raises(CheckpointError, match="nothing can be said"):
            looker(HANGS, 70)
        looker._limit_s = looker._silent[HANGS]._look_s = DEADLINE_S
        began = time.monotonic()
        with pytest.raises(CheckpointError, match="nothing can be said"):
            looker(HANGS, 70)
        assert looker(FINE, 80).root_pid == 80
        assert time.monotonic() - began < DEADLINE_S
    finally:
        stalled.set()
    wait_until("it answers", lambda: not looker._silent[HANGS].silent)
    assert looker(HANGS, 71).root_pid == 71
