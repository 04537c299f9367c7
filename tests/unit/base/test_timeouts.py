"""Calls to a file system that may not respond: slow calls are waited for, stalled ones are not."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import DEADLINE_S, wait_until

from slurm_affinode.base.timeouts import FileSystemCalls, NoAnswerError


@pytest.fixture
def stalled() -> Iterator[threading.Event]:
    """Return the event that stalled calls wait for; it is set at the end."""
    made = threading.Event()
    yield made
    made.set()


def test_slow_call_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is, as long as the file system responds to another call."""
    probe_times = itertools.cycle(
        (0.02, DEADLINE_S)
    )  # the first is the interval of the probes, the second their timeout
    monkeypatch.setattr(
        FileSystemCalls, "_probe_s", property(lambda _: next(probe_times), lambda *_: None), raising=False
    )
    assert FileSystemCalls(tmp_path)(lambda: time.sleep(0.2) or 7) == 7


def test_errors_of_the_call_are_raised(tmp_path: Path) -> None:
    """They do not mean that the file system does not respond."""
    calls = FileSystemCalls(tmp_path)
    with pytest.raises(FileNotFoundError):
        calls((tmp_path / "nothing").stat)
    assert not calls.unresponsive


def test_stalled_call_is_abandoned(monkeypatch: pytest.MonkeyPatch, stalled: threading.Event) -> None:
    """Until it returns, the next call fails immediately; its result is only passed to ``late``."""
    monkeypatch.setattr(os, "statvfs", lambda path: stalled.wait())
    calls, late = FileSystemCalls(Path("/"), probe_s=0.05), []

    def slow() -> int:
        stalled.wait()
        return 7

    with pytest.raises(NoAnswerError, match="does not respond"):
        calls(slow, late=late.append)
    assert calls.unresponsive
    calls._probe_s = DEADLINE_S
    began = time.monotonic()
    with pytest.raises(NoAnswerError):
        calls(lambda: 8)
    assert time.monotonic() - began < DEADLINE_S
    stalled.set()
    wait_until("it has come back", lambda: late and not calls.unresponsive)
    assert late == [7]
    assert calls(lambda: 9) == 9


def test_calls_in_turn_share_a_thread(tmp_path: Path) -> None:
    """Starting one for each would take most of the time of a short call. Without a path, each has its own."""
    calls = FileSystemCalls(tmp_path)
    assert len({calls(threading.current_thread) for _ in range(50)}) == 1
    calls = FileSystemCalls(None)
    assert len({calls(threading.current_thread) for _ in range(50)}) == 50


def test_call_does_not_wait_for_another(tmp_path: Path, stalled: threading.Event) -> None:
    """While the thread that is kept is busy, a call has its own; one of them is kept afterwards."""
    calls = FileSystemCalls(tmp_path)
    slow = threading.Thread(target=calls, args=(stalled.wait,))
    slow.start()
    threads = {calls(threading.current_thread) for _ in range(50)}
    stalled.set()
    slow.join()
    assert len(threads) <= 2  # the first call may have been made before the slow one
    assert calls(threading.current_thread) in threads


def test_unused_thread_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call starts another."""
    monkeypatch.setattr("slurm_affinode.base.timeouts._KEEP_S", 0.01)
    calls = FileSystemCalls(tmp_path)
    first = calls(threading.current_thread)
    wait_until("it has ended", lambda: not first.is_alive())
    assert calls(lambda: 7) == 7


def test_call_without_a_path_has_a_time_limit(stalled: threading.Event) -> None:
    """The file system cannot be probed."""
    with pytest.raises(NoAnswerError):
        FileSystemCalls(None, probe_s=0.05)(stalled.wait)
