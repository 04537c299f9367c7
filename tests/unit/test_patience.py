"""Calls to a file system that may not answer: what is slow is waited for, what is silent is not."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import DEADLINE_S, wait_until

from slurm_affinode.patience import NoAnswerError, Patience


@pytest.fixture
def stalled() -> Iterator[threading.Event]:
    """What a call waits for; set at the end."""
    made = threading.Event()
    yield made
    made.set()


def test_what_is_slow_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the file system answers to something else."""
    looks = itertools.cycle((0.02, DEADLINE_S))  # it asks after the one, and has the other to answer
    monkeypatch.setattr(Patience, "_look_s", property(lambda _: next(looks), lambda *_: None), raising=False)
    assert Patience(tmp_path)(lambda: time.sleep(0.2) or 7) == 7


def test_errors_are_those_of_the_call(tmp_path: Path) -> None:
    """And say nothing about the file system."""
    patience = Patience(tmp_path)
    with pytest.raises(FileNotFoundError):
        patience((tmp_path / "nothing").stat)
    assert not patience.silent


def test_what_does_not_answer_is_left(monkeypatch: pytest.MonkeyPatch, stalled: threading.Event) -> None:
    """The next call does not wait, until the one that was left has come back; nobody gets what it has found."""
    monkeypatch.setattr(os, "statvfs", lambda path: stalled.wait())
    patience, late = Patience(Path("/"), look_s=0.05), []

    def slow() -> int:
        stalled.wait()
        return 7

    with pytest.raises(NoAnswerError, match="does not answer"):
        patience(slow, late=late.append)
    assert patience.silent
    patience._look_s = DEADLINE_S
    began = time.monotonic()
    with pytest.raises(NoAnswerError):
        patience(lambda: 8)
    assert time.monotonic() - began < DEADLINE_S
    stalled.set()
    wait_until("it has come back", lambda: late and not patience.silent)
    assert late == [7]
    assert patience(lambda: 9) == 9


def test_without_a_path_a_call_has_its_time(stalled: threading.Event) -> None:
    """Of a file system that cannot be asked."""
    with pytest.raises(NoAnswerError):
        Patience(None, look_s=0.05)(stalled.wait)
