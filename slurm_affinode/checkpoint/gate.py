"""Holds a tree that CRIU restores until its image is verified and it was looked at, without the tree noticing.

CRIU runs a script at certain points and waits for it. The script asks here through one pipe and waits at another. Two
points count (``restore_root_task`` in ``cr-restore.c``):

- ``post-restore``: everything is in place, and all processes still belong to root, so that no other process of the
  job's user can trace one, read its memory or take a descriptor out of it. A script that fails has CRIU give up.
- ``pre-resume``: the processes belong to the user, and do not run yet. CRIU goes on whatever the script's exit status
  is. So the script ends when it is told to and not before: where the agent is gone, it and the tree wait for the next
  one, which ends them.

To stop the tree by a signal instead would be seen: the SIGCONT that ends that is caught by what has a handler for it.
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

POST_RESTORE, PRE_RESUME = "post-restore", "pre-resume"
_SCRIPT = f"""#!/bin/sh
case "$CRTOOLS_SCRIPT_ACTION" in {POST_RESTORE}|{PRE_RESUME}) ;; *) exit 0 ;; esac
echo "$CRTOOLS_SCRIPT_ACTION" >ask
until read -r answer <go; do sleep 1; done
exit "$answer"
"""
_PLACES = ("/var/tmp", "/var/lib", "/run")  # noqa: S108 - a directory of our own is made there
_NAME = "slurm-affinode-restore-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Gate:
    """For one restore. Used as a context, which ends when CRIU has ended."""

    OPTION = "--action-script=./gate"
    """What CRIU is told. It runs scripts in its work directory, with no descriptor of ours."""

    def __init__(
        self, directory: Path, *, restored: Callable[[], None], resuming: Callable[[], None] = lambda: None
    ) -> None:
        """``directory``: CRIU's work directory, in which nobody else may write.

        ``restored`` is called at ``post-restore``, ``resuming`` at ``pre-resume``, in a thread of its own. What they
        raise must leave nothing of the tree: the gate opens behind them.
        """
        self._directory = directory
        self._calls = {POST_RESTORE: restored, PRE_RESUME: resuming}
        self._asked: list[str] = []
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
        """No script can ask any more. Raises what a call raised: whatever CRIU came to is its consequence."""
        os.close(self._end)
        self._thread.join()
        for fd in (self._ask, self._go, self._over):
            os.close(fd)
        if self._error is not None:
            raise self._error from None

    def check_asked(self) -> None:
        """When CRIU has ended and says that the tree runs. Raises ``RestoreFailed``."""
        if self._asked != [POST_RESTORE, PRE_RESUME]:
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
        while self._ask in [fd for fd, _ in look.poll()]:
            action = os.read(self._ask, 64).decode("ascii", "replace").strip()
            self._asked.append(action)
            try:
                if self._error is None:
                    self._calls[action]()
            except BaseException as error:
                self._error = error
            os.write(self._go, b"0\n" if self._error is None else b"1\n")


@contextmanager
def work_directory(place: str | None = None) -> Iterator[tuple[Path, int]]:
    """A directory that root alone may enter, and a descriptor of it: in ``place``, or where programs can be written and
    run (``noexec``).

    Those that agents have left which were killed during a restore go first.
    """
    place = place or _place()
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
