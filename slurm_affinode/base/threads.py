"""Threads: queues of calls with workers, threads for one operation, and protection against unexpected errors.

``Workers`` owns the long-lived worker threads of a process, in queues with names and limits. An operation that needs
threads of its own uses ``pool``, ``in_own_thread`` or ``Repeated``.

Expected errors (``AffinodeError``, ``OSError``) are caught where they can be handled. A thread that serves all jobs of
a node must not end because of another error either: suspended jobs would never wake, and shepherds would wait forever
for a response. Such an error is logged with its traceback, and the thread continues (``surviving``).
"""

from __future__ import annotations

import heapq
import logging
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

LOG = logging.getLogger("slurm_affinode.agent")
T = TypeVar("T")


class Survival:
    """A block of code whose errors are logged. ``error``: the error of the block; ``None``: none."""

    def __init__(self, log: logging.Logger, text: str, arguments: tuple[object, ...]) -> None:
        self._log = log
        self._text = text
        self._arguments = arguments
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        """Enter the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Return whether the error was logged and is suppressed."""
        if not isinstance(error, Exception):
            return False
        self._log.error(self._text, *self._arguments, exc_info=error)
        self.error = error
        return True


def surviving(log: logging.Logger, text: str, *arguments: object) -> Survival:
    """Log any exception of a block, as ``text`` with ``arguments``, and continue after the block.

    ``KeyboardInterrupt`` and ``SystemExit`` are not caught.
    """
    return Survival(log, text, arguments)


# --- queues of calls


class _Call(Generic[T]):
    """A call and its result."""

    def __init__(self, call: Callable[[], T], user: int) -> None:
        self.user = user
        self.future: Future[T] = Future()
        self._call = call

    def run(self) -> None:
        """Run the call unless it was canceled."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            value = self._call()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


class Workers:
    """The worker threads of a process, in queues with a name and a limit each. Thread-safe.

    Threads start when there are calls for them, and are reused. They do not keep the process from ending: ``finish``
    waits for the calls that should be completed first.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition()
        """Guards the queues and the delayed calls; notified when calls end and when delayed calls are added."""
        self._queues: list[WorkQueue] = []
        self._delayed: list[tuple[float, int, WorkQueue, _Call[Any]]] = []
        """A heap: time on the monotonic clock, serial number, queue, call."""
        self._numbers = count()
        self._clock: threading.Thread | None = None
        self._closed = False

    def queue(
        self, name: str, limit: int | None = 1, *, each: int | None = None, most: int | None = None, last: bool = False
    ) -> WorkQueue:
        """Add a queue that runs up to ``limit`` calls at a time; ``None``: no limit.

        ``each``, ``most``: see ``WorkQueue``. ``last``: ``finish`` waits for its calls.
        """
        work_queue = WorkQueue(self, name, limit, each=each, most=most, last=last)
        with self.lock:
            self._queues.append(work_queue)
        return work_queue

    def close(self) -> None:
        """Close all queues."""
        with self.lock:
            self._closed = True
            for queue in self._queues:
                queue.close()
            self.lock.notify_all()

    def finish(self) -> None:
        """Wait for the calls of all queues that are ``last``."""
        for queue in tuple(self._queues):
            if queue.last:
                queue.join()

    def delay(self, delay_s: float, queue: WorkQueue, call: _Call[Any]) -> None:
        """Add a call to a queue after this many seconds."""
        with self.lock:
            heapq.heappush(self._delayed, (time.monotonic() + delay_s, next(self._numbers), queue, call))
            if self._clock is None:
                self._clock = threading.Thread(target=self._run_clock, name="delayed calls", daemon=True)
                self._clock.start()
            self.lock.notify_all()

    def _run_clock(self) -> None:
        with self.lock:
            while not self._closed:
                now = time.monotonic()
                while self._delayed and self._delayed[0][0] <= now:
                    _, _, queue, call = heapq.heappop(self._delayed)
                    queue.add(call, delayed=True)
                self.lock.wait(self._delayed[0][0] - now if self._delayed else None)


class WorkQueue:
    """Calls that wait for a thread, in the order of arrival. Thread-safe. Made by ``Workers.queue``.

    Free slots are assigned to waiting users in turn. With ``each``, the number of calls at a time of one user is
    limited. A user with no running call does not wait for others: the first call gets a slot beyond ``limit`` if
    needed, up to ``most`` in total.
    """

    def __init__(
        self, workers: Workers, name: str, limit: int | None, *, each: int | None, most: int | None, last: bool
    ) -> None:
        """See ``Workers.queue``."""
        self._workers, self._lock = workers, workers.lock
        self.name, self.last = name, last
        self._limit = sys.maxsize if limit is None else limit
        self._each = self._limit if each is None else each
        self._most = self._limit if most is None else most
        self._running: Counter[int] = Counter()
        self._waiting: dict[int, deque[_Call[Any]]] = {}
        """In the order in which users get the next slot."""
        self._delayed = 0
        self._idle: list[SimpleQueue[_Call[Any] | None]] = []
        """Where threads without a call wait for the next one; ``None`` ends the thread."""
        self.stopping = threading.Event()
        """Set by ``close``, for calls that wait for something."""

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a thread."""
        with self._lock:
            return sum(map(len, self._waiting.values()))

    def submit(self, call: Callable[..., T], *arguments: Any, user: int = 0) -> Future[T]:
        """Run a call as soon as there is a slot; the future holds its result. It is canceled after ``close``."""
        pending_call = _Call(partial(call, *arguments), user)
        self.add(pending_call)
        return pending_call.future

    def post(self, call: Callable[..., object], *arguments: Any, user: int = 0) -> None:
        """Run a call as soon as there is a slot; its errors are logged. Without effect after ``close``."""
        self.submit(self._safely, call, *arguments, user=user)

    def later(self, delay_s: float, call: Callable[..., object], *arguments: Any) -> None:
        """``post`` a call after this many seconds."""
        with self._lock:
            self._delayed += 1
            self._workers.delay(delay_s, self, _Call(partial(self._safely, call, *arguments), 0))

    def every(self, period_s: float, call: Callable[[], object]) -> None:
        """Run a call repeatedly until ``close``, each time after a pause of ``period_s`` seconds."""

        def run() -> None:
            self._safely(call)
            self.later(period_s, run)

        self.later(period_s, run)

    def close(self) -> None:
        """Accept no more calls and drop those that wait; calls in progress continue."""
        with self._lock:
            self.stopping.set()
            for calls in self._waiting.values():
                for call in calls:
                    call.future.cancel()
            self._waiting.clear()
            while self._idle:
                self._idle.pop().put(None)

    def join(self) -> None:
        """Wait until no call runs or waits."""
        with self._lock:
            self._lock.wait_for(self._at_rest)

    def _at_rest(self) -> bool:
        return not self._running and not self._waiting and (not self._delayed or self.stopping.is_set())

    def add(self, call: _Call[Any], *, delayed: bool = False) -> None:
        """Add a call; ``delayed``: it was announced by ``later``."""
        with self._lock:
            self._delayed -= delayed
            if self.stopping.is_set():
                call.future.cancel()
                return
            self._waiting.setdefault(call.user, deque()).append(call)
            self._start()

    def _start(self) -> None:
        """Start as many calls as the limits allow. The lock must be held."""
        while (user := next(filter(self._may, self._waiting), None)) is not None:
            calls = self._waiting.pop(user)
            call = calls.popleft()
            if calls:  # requeue the user behind the others
                self._waiting[user] = calls
            self._running[user] += 1
            if self._idle:
                self._idle.pop().put(call)
                continue
            try:
                threading.Thread(target=self._work, args=(call,), name=self.name, daemon=True).start()
            except RuntimeError as error:  # the limit of threads is reached; the next call to arrive or end tries again
                LOG.warning("%s: a call has to wait: %s", self.name, error)
                self._count_down(user)
                self._waiting = {user: deque([call, *calls]), **self._waiting}
                return

    def _may(self, user: int) -> bool:
        of_user, all_ = self._running[user], self._running.total()
        return (of_user < self._each and all_ < self._limit) or (of_user == 0 and all_ < self._most)

    def _count_down(self, user: int) -> None:
        self._running[user] -= 1
        if not self._running[user]:
            del self._running[user]

    def _work(self, call: _Call[Any] | None) -> None:
        inbox: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        while call is not None:
            call.run()
            with self._lock:
                self._count_down(call.user)
                if self.stopping.is_set():
                    inbox.put(None)
                else:
                    self._idle.append(inbox)
                    self._start()
                self._lock.notify_all()
            call = None  # its objects are not needed while this thread waits
            call = inbox.get()

    def _safely(self, call: Callable[..., object], *arguments: Any) -> None:
        with surviving(LOG, "%s: a call in the background failed", self.name):
            call(*arguments)


# --- threads of one operation


@contextmanager
def pool(name: str, threads: int) -> Iterator[Executor]:
    """Yield threads for the calls of one operation.

    At the end, calls that have not begun are canceled, and those that run are waited for.
    """
    executor = ThreadPoolExecutor(threads, name)
    try:
        yield executor
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def in_own_thread(name: str, call: Callable[[], T]) -> T:
    """Run a call in a thread that ends with it; return its result and pass on its errors.

    For what a thread cannot undo: a change of its credentials or namespaces.
    """
    pending_call = _Call(call, 0)
    thread = threading.Thread(target=pending_call.run, name=name)
    thread.start()
    thread.join()
    return pending_call.future.result()


class Repeated:
    """A call that a thread repeats until it is stopped. ``OSError`` is ignored: the next call may succeed."""

    def __init__(self, name: str, period_s: float, call: Callable[[], object]) -> None:
        """``period_s``: pause before each call, in seconds."""
        self._period_s, self._call = period_s, call
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def stopped(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Make no more calls. Does not wait for one in progress."""
        self._stop.set()

    def join(self) -> None:
        """Stop, and wait for a call in progress."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            with suppress(OSError):
                self._call()
