"""Queues of calls with their limits, threads of one operation, and survival of errors in the work for one job."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future

import pytest
from background import Stalled
from waiting import DEADLINE_S, wait_until

from slurm_affinode.base import threads
from slurm_affinode.base.threads import LOG, Repeated, Workers, in_own_thread, pool, surviving

ALICE, BOB, CAROL, DAVE = 2001, 2002, 2003, 2004


def test_error_is_logged_with_its_traceback_and_kept(caplog):
    """The code after the block runs, and can read the error."""
    with surviving(LOG, "job %d: not woken", 7) as fault:
        raise KeyError("x")
    assert isinstance(fault.error, KeyError)
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == ("ERROR", "job 7: not woken")
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError


def test_success_is_not_logged(caplog):
    with surviving(LOG, "never") as fault:
        pass
    assert fault.error is None
    assert caplog.records == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_exit_requests_are_passed_on(kind):
    """They are not errors."""
    with pytest.raises(kind), surviving(LOG, "never"):
        raise kind


@pytest.fixture
def stalled() -> Iterator[Stalled]:
    made = Stalled()
    yield made
    made.go.set()


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()


def test_another_user_does_not_wait_for_stalled_work(workers: Workers, stalled: Stalled) -> None:
    """Eight calls of one user stall; the call of another user begins at once."""
    queue = workers.queue("test", 8, each=4, most=64)
    for number in range(8):
        queue.post(stalled.call(f"alice {number}"), user=ALICE)
    queue.post(stalled.call("bob"), user=BOB)
    wait_until("bob's has begun", lambda: "bob" in stalled.began)
    assert (len(stalled.began), queue.waiting) == (5, 4)


def test_first_call_of_user_gets_slot_when_all_are_taken(workers: Workers, stalled: Stalled) -> None:
    """Two users have taken all slots; a third user's first call begins, and the second one waits."""
    queue = workers.queue("test", 4, each=2, most=6)
    for uid in (ALICE, ALICE, BOB, BOB, CAROL, CAROL, DAVE):
        queue.post(stalled.call(str(uid)), user=uid)
    wait_until("the first of each has begun", lambda: str(DAVE) in stalled.began)
    assert sorted(stalled.began) == [str(uid) for uid in (ALICE, ALICE, BOB, BOB, CAROL, DAVE)]
    queue.post(stalled.call("one too many"), user=2005)
    assert "one too many" not in stalled.began


def test_free_slots_are_assigned_round_robin(workers: Workers, stalled: Stalled) -> None:
    """A user with more waiting calls does not get more slots."""
    order: list[str] = []
    queue = workers.queue("test")
    queue.post(stalled.call("dave"), user=DAVE)
    for name, uid in (("a1", ALICE), ("a2", ALICE), ("a3", ALICE), ("b1", BOB), ("c1", CAROL), ("b2", BOB)):
        queue.post(order.append, name, user=uid)
    stalled.go.set()
    queue.join()
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_calls_run_in_order_up_to_the_limit(workers: Workers, stalled: Stalled) -> None:
    queue = workers.queue("test", 2)
    for name in "abcd":
        queue.post(stalled.call(name))
    wait_until("two have begun", lambda: len(stalled.began) == 2)
    assert queue.waiting == 2
    stalled.go.set()
    queue.join()
    assert (sorted(stalled.began[:2]), sorted(stalled.began[2:])) == (["a", "b"], ["c", "d"])


def test_queue_without_limit_runs_all_calls_at_once(workers: Workers, stalled: Stalled) -> None:
    queue = workers.queue("test", None)
    for number in range(20):
        queue.post(stalled.call(str(number)))
    wait_until("all have begun", lambda: len(stalled.began) == 20)


def test_threads_are_reused(workers: Workers) -> None:
    """State of a thread, such as a client of Slurm, is reused by later calls."""
    queue, seen = workers.queue("test", 4), set()
    for _ in range(20):
        queue.post(lambda: seen.add(threading.current_thread()))
        queue.join()
    assert [thread.name for thread in seen] == ["test"]


def test_failing_call_releases_its_slot(workers: Workers, stalled: Stalled, caplog: pytest.LogCaptureFixture) -> None:
    """Its error is logged, or given to the caller who waits for it."""
    queue = workers.queue("test")

    def fails() -> None:
        raise ValueError("no number")

    queue.post(fails)
    future = queue.submit(fails)
    queue.post(stalled.call("next"))
    wait_until("the next one has begun", lambda: stalled.began == ["next"])
    assert caplog.text.count("test: a call in the background failed") == 1
    with pytest.raises(ValueError, match="no number"):
        future.result()


def test_exit_request_does_not_end_thread(workers: Workers) -> None:
    """``SystemExit`` would end a thread without a trace, and its slot would be lost."""
    queue, done = workers.queue("test"), list[int]()
    queue.post(lambda: (_ for _ in ()).throw(SystemExit))
    queue.post(done.append, 1)
    queue.join()
    assert done == [1]


def test_no_call_begins_after_close(workers: Workers, stalled: Stalled) -> None:
    """Waiting calls are dropped, and calls in progress can notice it."""
    queue = workers.queue("test")
    queue.post(stalled.call("first"))
    waits = queue.submit(stalled.call("second"))
    wait_until("the first has begun", lambda: stalled.began)
    queue.later(0.0, stalled.call("third"))
    queue.close()
    assert queue.stopping.is_set()
    for future in (waits, queue.submit(stalled.call("fourth"))):
        with pytest.raises(CancelledError):
            future.result(DEADLINE_S)
    stalled.go.set()
    queue.join()
    assert stalled.began == ["first"]


def test_threads_end_after_close(workers: Workers, stalled: Stalled) -> None:
    """Idle ones at once, the others after their call."""
    queue = workers.queue("ends with its queue", 2)
    queue.post(stalled.call("one"))
    queue.submit(lambda: None).result(DEADLINE_S)
    workers.close()
    stalled.go.set()
    wait_until("they have ended", lambda: all(thread.name != queue.name for thread in threading.enumerate()))


def test_finish_waits_for_last_queues_only(workers: Workers, stalled: Stalled) -> None:
    suspends, copies = workers.queue("suspend", last=True), workers.queue("copy")
    copies.post(stalled.call("copy"))
    done: list[str] = []
    suspends.post(lambda: (time.sleep(0.05), done.append("suspended")))
    wait_until("both have begun", lambda: stalled.began and not suspends.waiting)
    workers.close()
    workers.finish()
    assert done == ["suspended"]
    assert not stalled.go.is_set()


def test_delayed_calls_run_when_they_are_due(workers: Workers) -> None:
    """A later one that is due earlier does not wait; ``join`` waits for them."""
    queue, order, began = workers.queue("test"), list[str](), time.monotonic()
    queue.later(0.1, order.append, "second")
    queue.later(0.02, order.append, "first")
    queue.join()
    assert order == ["first", "second"]
    assert time.monotonic() - began >= 0.1


def test_repeated_call_survives_its_errors(workers: Workers, caplog: pytest.LogCaptureFixture) -> None:
    queue, calls = workers.queue("test"), list[int]()

    def fail() -> None:
        calls.append(1)
        raise ZeroDivisionError

    queue.every(0.01, fail)
    wait_until("it was repeated", lambda: len(calls) >= 3)
    queue.close()
    assert "ZeroDivisionError" in caplog.text


def test_call_waits_when_no_thread_can_be_started(
    workers: Workers, stalled: Stalled, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel's limit of threads is reached for a moment: no call and no slot is lost."""
    queue = workers.queue("test", 2)

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    queue.post(stalled.call("first"))
    with monkeypatch.context() as patch:
        patch.setattr(threads.threading, "Thread", NoThread)
        queue.post(stalled.call("second"))
    assert (queue.waiting, "can't start new thread" in caplog.text) == (1, True)
    queue.post(stalled.call("third"))
    wait_until("two have begun", lambda: stalled.began == ["first", "second"])


def test_pool_cancels_calls_that_have_not_begun(stalled: Stalled) -> None:
    """It waits for the one that runs: its descriptors are closed next."""
    futures: list[Future[None]] = []

    def operation() -> None:
        with pool("test", 1) as executor:
            futures.extend(executor.submit(stalled.call(name)) for name in ("first", "second"))
            wait_until("the first has begun", lambda: stalled.began)
            threading.Timer(0.05, stalled.go.set).start()
            raise KeyError

    with pytest.raises(KeyError):
        operation()
    assert [(future.done(), future.cancelled()) for future in futures] == [(True, False), (True, True)]


def test_call_in_own_thread_returns_its_result_and_error() -> None:
    assert in_own_thread("test", lambda: threading.current_thread().name) == "test"
    with pytest.raises(PermissionError):
        in_own_thread("test", lambda: (_ for _ in ()).throw(PermissionError))


def test_repeated_call_ends_with_join() -> None:
    """An error of the file system does not end it."""
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise FileNotFoundError

    repeated = Repeated("test", 0.01, fail)
    repeated.start()
    wait_until("it was repeated", lambda: len(calls) >= 2)
    repeated.join()
    made = len(calls)
    time.sleep(0.05)
    assert (len(calls), repeated.stopped) == (made, True)
