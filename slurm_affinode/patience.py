"""Calls to a file system that may never answer: a file server that has gone (a hard NFS mount), a FUSE that stalls.

The kernel does not come back from such a call, and nobody can end it. So it is made by a thread of its own, which is
left behind; until that one comes back all further calls fail at once. What is only slow is waited for: the file system
is not given up as long as it answers to something else.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
LOG = logging.getLogger("slurm_affinode.agent")
LOOK_S = 10.0
SILENT = "its file system does not answer"


class NoAnswerError(TimeoutError):
    """The file system does not answer. Whether the call has had, or will have, its effect is not known."""

    def __init__(self) -> None:
        super().__init__(errno.ETIMEDOUT, SILENT)


class Patience:
    """With one file system. May be used by several threads."""

    def __init__(self, path: Path | None, *, look_s: float = LOOK_S) -> None:
        """``path``: there; after each ``look_s`` seconds of waiting it is asked whether it answers, and has so many to
        do so. ``None``: a call has so many seconds.
        """
        self._path = path
        self._look_s = look_s
        self._behind: list[_Call] = []
        self._lock = threading.Lock()

    @property
    def silent(self) -> bool:
        """Whether a call was left behind that has not come back."""
        with self._lock:
            before, self._behind = self._behind, [one for one in self._behind if not one.over.is_set()]
            if before and not self._behind and self._path is not None:
                LOG.info("%s: answers again", self._path)
            return bool(self._behind)

    def __call__(self, call: Callable[[], T], late: Callable[[T], object] = lambda found: None) -> T:
        """What ``call`` gives or raises. Raises ``NoAnswerError``.

        A call that was left behind goes on when the file system answers again: it must not use a descriptor that may
        be another's by then. ``late`` gets what it has found, for nobody.
        """
        if self.silent:
            raise NoAnswerError
        one = _Call(call, late)
        while not one.over.wait(self._look_s):
            if not self._answers() and self._left(one):
                raise NoAnswerError
        found: T = one.result()
        return found

    def _answers(self) -> bool:
        path = self._path
        if path is None:
            return False
        probe = _Call(lambda: os.statvfs(path))
        return probe.over.wait(self._look_s) or not self._left(probe)

    def _left(self, one: _Call) -> bool:
        """Leave a call behind, unless it has come back."""
        if not one.leave():
            return False
        with self._lock:
            if not self._behind and self._path is not None:
                LOG.warning("%s: %s; what needs it fails until it does", self._path, SILENT)
            self._behind.append(one)
        return True


class _Call:
    """In a thread of its own, which keeps nobody from ending."""

    def __init__(self, call: Callable[[], Any], late: Callable[[Any], object] = lambda found: None) -> None:
        self._call, self._late = call, late
        self._found: Any = None
        self._error: BaseException | None = None
        self._left = False
        self._lock = threading.Lock()
        self.over = threading.Event()
        threading.Thread(target=self._run, name="file system", daemon=True).start()

    def _run(self) -> None:
        try:
            self._found = self._call()
        except BaseException as error:
            self._error = error
        with self._lock:
            left = self._left
            self.over.set()
        if left and self._error is None:
            self._late(self._found)

    def leave(self) -> bool:
        """Wait no more; ``False``: it is over."""
        with self._lock:
            self._left = not self.over.is_set()
            return self._left

    def result(self) -> Any:
        """When it is over."""
        if self._error is not None:
            raise self._error
        return self._found
