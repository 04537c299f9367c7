"""Threads produce items ahead of their consumer, who gets them in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import closing

import pytest

from slurm_affinode.metrics.ahead import ItemSource, read_ahead

Numbers = Generator[int, None, None]


def numbers(first: int, count: int) -> Callable[[], Numbers]:
    """Return a producer of consecutive numbers."""

    def produce() -> Numbers:
        yield from range(first, first + count)

    return produce


def readers() -> list[threading.Thread]:
    """Return the running threads besides this one."""
    return [thread for thread in threading.enumerate() if thread is not threading.current_thread()]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("budget", [1, 100])
def test_items_are_in_the_order_of_the_sources(workers: int, budget: int) -> None:
    """The number of threads and the budget do not matter, even if a source costs more."""
    sources = [ItemSource(numbers(10 * at, at), 5) for at in range(6)]
    streams = read_ahead(iter(sources), workers=workers, budget=budget)
    assert [list(items) for items in streams] == [list(range(10 * at, 11 * at)) for at in range(6)]


@pytest.mark.parametrize(("workers", "cost", "most"), [(3, 1, 3), (9, 40, 2), (9, 200, 1)])
def test_sources_that_are_read_at_once_are_limited(workers: int, cost: int, most: int) -> None:
    """At most ``workers`` sources, and as many as the budget allows, are open at the same time."""
    running = peak = 0
    lock = threading.Lock()
    full = threading.Event()

    def produce() -> Numbers:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
            if running == most:
                full.set()
        yield 1
        assert full.wait(30)
        with lock:
            running -= 1

    streams = read_ahead([ItemSource(produce, cost) for _ in range(12)], workers=workers, budget=100)
    assert sum(len(list(items)) for items in streams) == 12
    assert peak == most


def test_error_is_raised_where_the_items_are_consumed() -> None:
    """The items before it, and the other sources, are not lost."""

    def failing() -> Numbers:
        yield 1
        raise KeyError("x")

    seen: list[object] = []
    for items in read_ahead([ItemSource(failing, 1), ItemSource(numbers(5, 2), 1)], workers=2, budget=9):
        try:
            seen += [*items]
        except KeyError as error:
            seen.append(error.args)
    assert seen == [("x",), 5, 6]


def test_threads_end_when_the_consumer_stops() -> None:
    """As after an interrupt: endless sources are stopped and closed."""
    closed = []

    def endless() -> Numbers:
        try:
            while True:
                yield 1
        finally:
            closed.append(True)

    before = readers()
    with closing(read_ahead([ItemSource(endless, 1)] * 3, workers=3, budget=9)) as opened:
        assert next(next(opened)) == 1
        assert len(readers()) == len(before) + 3
    assert readers() == before
    assert closed == [True] * 3


def test_source_without_data_does_not_delay_an_interrupt() -> None:
    """As a file system that does not respond: the thread that reads cannot be ended."""
    written = threading.Event()
    begun = threading.Event()

    def blocked() -> Numbers:
        begun.set()
        written.wait()
        yield 1

    before = readers()
    with closing(read_ahead([ItemSource(numbers(1, 1), 1), ItemSource(blocked, 1)], workers=2, budget=9)) as opened:
        assert next(next(opened)) == 1
        assert begun.wait(30)
    (left,) = (thread for thread in readers() if thread not in before)
    assert left.daemon
    written.set()
    left.join(30)
    assert not left.is_alive()


def test_consumer_is_called_while_it_waits() -> None:
    """It can show its progress."""
    called = threading.Event()

    def produce() -> Numbers:
        assert called.wait(30)
        yield 1

    (items,) = (list(items) for items in read_ahead([ItemSource(produce, 1)], workers=1, budget=9, idle=called.set))
    assert items == [1]
