"""Calls to file systems that may not respond: a file server that is gone (a hard NFS mount), a stalled FUSE.

The kernel does not return from such a call, and the call cannot be interrupted. It is therefore made in a separate
thread, which is abandoned; until it returns, all further calls fail at once. A slow call is waited for as long as the
file system responds to another one.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
LOG = logging.getLogger("slurm_affinode.agent")
PROBE_S = 10.0
_KEEP_S = 60.0
"""Time after which an unused thread ends, in seconds."""
UNRESPONSIVE = "its file system does not respond"


class NoAnswerError(TimeoutError):
    """The file system does not respond. It is not known whether the call has had, or will have, its effect."""

    def __init__(self) -> None:
        super().__init__(errno.ETIMEDOUT, UNRESPONSIVE)


def time_limit(seconds: float, what: str) -> Callable[[], None]:
    """Return a function that raises ``TimeoutError`` about ``what`` when the time has passed.

    For long loops over what a user controls, whose thread would run on after it was abandoned.
    """
    deadline = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() >= deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"this takes longer than {seconds:.0f} seconds", what)

    return check


class FileSystemCalls:
    """Makes calls to one file system, and waits for them while it responds. May be used by several threads."""

    def __init__(self, path: Path | None, *, probe_s: float = PROBE_S) -> None:
        """Take the ``path`` of the file system to probe.

        After each ``probe_s`` seconds of waiting it is probed, and has as long to respond. ``None``: it is not probed,
        and a call fails after ``probe_s`` seconds.
        """
        self._path = path
        self._probe_s = probe_s
        self._behind: list[_Call] = []
        self._free: SimpleQueue[_Call] | None = None
        """Where the thread that is kept waits for its next call; ``None``: it is busy, or there is none."""
        self._lock = threading.Lock()

    @property
    def unresponsive(self) -> bool:
        """Whether an abandoned call has not returned yet."""
        with self._lock:
            before, self._behind = self._behind, [call for call in self._behind if not call.end_event.is_set()]
            if before and not self._behind and self._path is not None:
                LOG.info("%s: responds again", self._path)
            return bool(self._behind)

    def __call__(self, call: Callable[[], T], late: Callable[[T], object] = lambda _: None) -> T:
        """Return the result of ``call``, or raise its error. Raises ``NoAnswerError``.

        An abandoned call continues when the file system responds again: it must not use a descriptor that may have been
        reused by then. Its result is passed to ``late``, for disposal.
        """
        if self.unresponsive:
            raise NoAnswerError
        new_call = _Call(call, late)
        self._start(new_call)
        while not new_call.end_event.wait(self._probe_s):
            if not self._answers() and self._abandon(new_call):
                raise NoAnswerError
        result: T = new_call.result()
        return result

    def _answers(self) -> bool:
        path = self._path
        if path is None:
            return False
        probe = _Call(lambda: os.statvfs(path))
        self._start(probe)
        return probe.end_event.wait(self._probe_s) or not self._abandon(probe)

    def _start(self, call: _Call) -> None:
        """Run a call in the thread that is kept, or in a new one.

        Without a path, each call has a thread of its own: it may change the credentials of its thread.
        """
        with self._lock:
            if self._free is not None:
                self._free.put(call)
                self._free = None
                return
        if self._path is None:
            threading.Thread(target=call.run, name="file system", daemon=True).start()
            return
        inbox: SimpleQueue[_Call] = SimpleQueue()
        inbox.put(call)
        threading.Thread(target=self._work, args=(inbox,), name="file system", daemon=True).start()

    def _work(self, inbox: SimpleQueue[_Call]) -> None:
        while (call := self._next(inbox)) is not None:
            # Free before the caller continues, so that its next call does not start another thread.
            call.run(lambda: self._keep(inbox))
            del call  # its objects are not needed while this thread waits
            if not self._keep(inbox):
                return

    def _keep(self, inbox: SimpleQueue[_Call]) -> bool:
        """Make a thread the one that is kept, unless there is one; return whether it is, or has another call."""
        with self._lock:
            if self._free is None and inbox.empty():
                self._free = inbox
            return self._free is inbox or not inbox.empty()

    def _next(self, inbox: SimpleQueue[_Call]) -> _Call | None:
        try:
            return inbox.get(timeout=_KEEP_S)
        except Empty:
            with self._lock:
                if self._free is inbox:
                    self._free = None
                    return None
            return inbox.get()

    def _abandon(self, call: _Call) -> bool:
        """Abandon a call, unless it has returned."""
        if not call.leave():
            return False
        with self._lock:
            if not self._behind and self._path is not None:
                LOG.warning("%s: %s; operations on it fail until it responds", self._path, UNRESPONSIVE)
            self._behind.append(call)
        return True


class _Call:
    """A call in another thread, which does not delay the end of the process."""

    def __init__(self, call: Callable[[], Any], late: Callable[[Any], object] = lambda _: None) -> None:
        self._call, self._late = call, late
        self._value: Any = None
        self._error: BaseException | None = None
        self._is_abandoned = False
        self._lock = threading.Lock()
        self.end_event = threading.Event()

    def run(self, free: Callable[[], object] = lambda: None) -> None:
        """Make the call. ``free`` is called before the caller continues, unless the call was abandoned."""
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
        with self._lock:
            remaining_s = self._is_abandoned
            if not remaining_s:
                free()
            self.end_event.set()
        if remaining_s and self._error is None:
            self._late(self._value)

    def leave(self) -> bool:
        """Abandon the call; ``False``: it has returned already."""
        with self._lock:
            self._is_abandoned = not self.end_event.is_set()
            return self._is_abandoned

    def result(self) -> Any:
        """Return the result of a finished call, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._value
