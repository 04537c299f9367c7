"""Calls to a file system that may not answer: what is slow is waited for, what is silent is not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_affinode.patience import NoAnswerError, Patience

SOON_S = 5.0


@pytest.fixture
def stalled() -> Iterator[threading.Event]:
    """What a call waits for; set at the end."""
    made = threading.Event()
    yield made
    made.set()


def test_what_is_slow_is_waited_for(tmp_path: Path) -> None:
    """As long as the file system answers to something else."""
    assert Patience(tmp_path, look_s=0.02)(lambda: time.sleep(0.2) or 7) == 7


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
    began = time.monotonic()
    with pytest.raises(NoAnswerError):
        patience(lambda: 8)
    assert time.monotonic() - began < 0.04
    stalled.set()
    deadline = time.monotonic() + SOON_S
    while (patience.silent or not late) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert late == [7]
    assert patience(lambda: 9) == 9


def test_without_a_path_a_call_has_its_time(stalled: threading.Event) -> None:
    """Of a file system that cannot be asked."""
    with pytest.raises(NoAnswerError):
        Patience(None, look_s=0.05)(stalled.wait)
