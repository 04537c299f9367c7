"""Holds a tree that CRIU restores until it was looked at and its image is verified, without the tree noticing.

CRIU runs a script when everything is as it was and its processes are still held (``pre-resume``), and waits for it. The
script asks here through one pipe and waits at another. To stop the tree by a signal instead would be seen: the SIGCONT
that ends that is caught by what has a handler for it.

CRIU goes on whatever the script's exit status is (``run_scripts`` in ``cr-restore.c``). So the script ends when it is
told to and not before: where the agent is gone, it and the tree wait for the next one, which ends them.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from slurm_affinode.checkpoint.interface import RestoreFailed

_SCRIPT = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = pre-resume ] || exit 0
echo >ask
until read -r _ <go; do sleep 1; done
"""
_PLACES = ("/var/tmp", "/var/lib", "/run")  # noqa: S108 - a directory of our own is made there
_NAME = "slurm-affinode-restore-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Gate:
    """For one restore. Used as a context, which ends when CRIU has ended."""

    OPTION = "--action-script=./gate"
    """What CRIU is told. It runs scripts in its work directory, with no descriptor of ours."""

    def __init__(self, directory: Path, look: Callable[[], None]) -> None:
        """``directory``: CRIU's work directory, in which nobody else may write. ``look`` is called while the tree is
        held, in a thread of its own. What it raises must leave nothing of the tree: the gate opens behind it."""
        self._directory = directory
        self._look = look
        self._asked = False
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        """Make the script, and wait for it."""
        script = self._directory / "gate"
        script.write_text(_SCRIPT, encoding="ascii")
        script.chmod(0o700)
        self._ask, self._go = self._pipe("ask"), self._pipe("go")
        self._over, self._end = os.pipe()
        self._thread = threading.Thread(target=self._wait, name="gate")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """No script can ask any more. Raises what the look raised: whatever CRIU came to is its consequence."""
        os.close(self._end)
        self._thread.join()
        for fd in (self._ask, self._go, self._over):
            os.close(fd)
        if self._error is not None:
            raise self._error from None

    def check_asked(self) -> None:
        """When CRIU has ended and says that the tree runs. Raises ``RestoreFailed``."""
        if not self._asked:
            raise RestoreFailed("CRIU let the restored tree go without asking")

    def _pipe(self, name: str) -> int:
        path = self._directory / name
        os.mkfifo(path, 0o600)
        # For both, so that opening waits for nobody and nobody's end closes it.
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def _wait(self) -> None:
        look = select.poll()  # select(2) takes no descriptor above 1023
        for fd in (self._ask, self._over):
            look.register(fd, select.POLLIN)
        if self._ask not in [fd for fd, _ in look.poll()]:
            return
        self._asked = True
        try:
            self._look()
        except BaseException as error:
            self._error = error
        os.write(self._go, b"\n")


@contextmanager
def work_directory() -> Iterator[tuple[Path, int]]:
    """A directory for CRIU to work in, where programs can be written and run (``noexec``), and a descriptor of it.

    Those that agents have left which were killed during a restore go first.
    """
    place = _place()
    _sweep(Path(place))
    while True:
        with tempfile.TemporaryDirectory(prefix=_NAME, dir=place) as name:
            if (fd := _locked(name)) is None:
                continue
            try:
                yield Path(name), fd
            finally:
                os.close(fd)
            return


def _locked(name: str) -> int | None:
    """A descriptor of a new work directory, locked as long as it, CRIU's too, is open; None where somebody has swept
    it before it was."""
    with suppress(FileNotFoundError):
        fd = os.open(name, _DIRECTORY)
        # A file system without locks is not swept either.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.path.lexists(name):  # nobody else would make it again
            return fd
        os.close(fd)
    return None


def _sweep(place: Path) -> None:
    """Remove the work directories of ours that nobody works in."""
    for path in place.glob(f"{_NAME}*"):
        with suppress(OSError):
            fd = os.open(path, _DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.geteuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
            finally:
                os.close(fd)


def _place() -> str:
    usual = tempfile.gettempdir()
    return next((place for place in (usual, *_PLACES) if _fits(place)), usual)


def _fits(place: str) -> bool:
    with suppress(OSError):  # there is none
        return not os.statvfs(place).f_flag & (os.ST_NOEXEC | os.ST_RDONLY)
    return False
