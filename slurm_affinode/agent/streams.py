"""A job's standard streams: what was in its output files when it was dumped, and how they come back.

Slurm empties the output file when a requeued job starts again, unless it is opened to append. The bytes that were there
are therefore part of the image, read through the shepherd's own descriptors and never by a path, and are put back
before the tree runs again. The tree gets the descriptors of its new run (``criu --inherit-fd``).

The shepherd is the user's process, and so are its descriptors the user's choice: a file is opened again with the user's
rights, and no other than the user could is read or written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import select
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from slurm_affinode.agent.closing import close, stuck
from slurm_affinode.checkpoint.asuser import User, as_user
from slurm_affinode.checkpoint.interface import InheritFd, RestoreFailed
from slurm_affinode.errors import AffinodeError
from slurm_affinode.model.suspension import SavedOutput
from slurm_affinode.patience import Patience
from slurm_affinode.pinned import Id, Process

STREAMS = (0, 1, 2)
_CHUNK = 1 << 20
_TAIL_LIMIT = 64 * 1024
_ANSWER_S = 30.0
"""For each call to the file system of a job's output."""
_PUT_BACK_S = 300.0
"""For each where it is put back: a file server that is away for minutes is no reason to hold a job."""
_SLURMS_OWN = re.compile(rb"slurmstepd[^\n]*:|\[[0-9T:.+Z-]+\]")
_ENDS = (b" DUE TO JOB REQUEUE", b" DUE TO PREEMPTION")

Save = Callable[[str, int, int], int]
OpenSaved = Callable[[str], int]
"""Opens a saved output by its name in the image, and has verified what the descriptor gives."""
T = TypeVar("T")


class StreamsError(AffinodeError):
    """The job's output cannot be read."""


def borrow(process: Process, number: int) -> int:
    """A descriptor for the same open file description as descriptor ``number`` of a process; the caller closes it.

    Raises ``StreamsError``. Needs the right to trace the process (root has it).
    """
    try:
        return process.descriptor(number)
    except OSError as error:
        raise StreamsError(f"descriptor {number} of process {process.pid}: {error.strerror}") from error


@contextlib.contextmanager
def borrowed(process: Process, uid: int, numbers: Sequence[int] = STREAMS) -> Iterator[dict[int, int | None]]:
    """``borrow`` for several, of a user's process; ``None`` for one that is closed."""
    fds: dict[int, int | None] = {}
    try:
        for number in numbers:
            try:
                fds[number] = borrow(process, number)
            except StreamsError:
                fds[number] = None
        yield fds
    finally:
        close([fd for fd in fds.values() if fd is not None], uid)


def save(init: Id, write: Save, user: User) -> tuple[SavedOutput, ...]:
    """Save the streams of the process; ``write(name, fd, size)`` takes the first ``size`` bytes of an open file.

    Raises ``StreamsError`` where an output file cannot be read by ``user``.
    """
    found: list[SavedOutput] = []
    if stuck(user.uid):
        raise StreamsError("the job's output cannot be read: files of its user cannot be closed")

    def copy(name: str, fd: int, size: int) -> int:
        reading = _ask(lambda: _open_again(fd, os.O_RDONLY, user), late=os.close)
        try:
            return write(name, reading, size)
        finally:
            close([reading], user.uid)

    try:
        with Process(init.pid, started=init.started) as process, borrowed(process, user.uid) as fds:
            for number, fd in fds.items():
                if fd is None:
                    continue
                path = process.link(f"fd/{number}")
                try:
                    found.append(_saved(number, fd, path, found, copy))
                except OSError as error:
                    raise StreamsError(f"the job's output {path} cannot be read: {error.strerror}") from error
    except OSError as error:
        raise StreamsError(f"the job's output cannot be read: process {init.pid}: {error.strerror}") from error
    return tuple(found)


def _ask(call: Callable[[], T], late: Callable[[T], object] = lambda found: None) -> T:
    """One call to the file system of a job's output, which its user has chosen. Raises ``NoAnswerError``."""
    return Patience(None, look_s=_ANSWER_S)(call, late)


def _wait(call: Callable[[], T], late: Callable[[T], object] = lambda found: None) -> T:
    """As ``_ask``, in a restore."""
    return Patience(None, look_s=_PUT_BACK_S)(call, late)


def _saved(number: int, fd: int, path: str, before: list[SavedOutput], copy: Save) -> SavedOutput:
    facts = _ask(lambda: os.fstat(fd))
    if not stat.S_ISREG(facts.st_mode):
        null = stat.S_ISCHR(facts.st_mode) and facts.st_rdev == os.makedev(1, 3)
        pipe = re.fullmatch(r"pipe:\[\d+\]", path)
        return SavedOutput(number, "null" if null else "other", path, inherit=path if pipe else None)
    append = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND)
    offset = os.lseek(fd, 0, os.SEEK_CUR)
    common = {"size": facts.st_size, "offset": offset, "append": append, "inherit": path.lstrip("/")}
    if number == 0:
        return SavedOutput(number, "file", path, **common)  # type: ignore[arg-type]
    for other in before:
        if other.kind == "file" and other.file is not None and other.path == path:
            return SavedOutput(number, "file", path, same_as=other.fd, **common)  # type: ignore[arg-type]
    name = f"out.{number}"
    size = copy(name, fd, facts.st_size)
    return SavedOutput(number, "file", path, file=name, **{**common, "size": size})  # type: ignore[arg-type]


def put_back(
    outputs: Sequence[SavedOutput],
    fds: Mapping[int, int | None],
    saved: OpenSaved,
    user: User,
    *,
    again: bool = False,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Give the output files of the new run the bytes that they had. ``saved`` opens a file of the image.

    Raises ``RestoreFailed``, and what ``saved`` and ``check`` raise. ``check`` is called before each piece that is
    compared or written: a user decides how much that is.

    What the file holds beyond them stays behind them, but what Slurm and we wrote there ourselves; and, where a restore
    was cut short and is made ``again``, what that tree wrote before it was ended.
    """
    try:
        files = []
        for one in outputs:
            fd = fds.get(one.fd)
            if one.kind == "file" and fd is not None and _put_back(one, fd, saved, user, again=again, check=check):
                files.append((one, fd))
        for one, fd in files:  # when all are put back: two may be one file
            if one.fd != 0:
                _wait(partial(os.lseek, fd, 0, os.SEEK_END))
    except OSError as error:
        raise RestoreFailed(f"the job's output {one.path} cannot be put back: {error.strerror}") from error


def _put_back(
    one: SavedOutput, fd: int, saved: OpenSaved, user: User, *, again: bool, check: Callable[[], None]
) -> bool:
    """Whether it is a file."""
    facts = _wait(lambda: os.fstat(fd))
    if not stat.S_ISREG(facts.st_mode):
        return False
    if one.fd == 0:
        os.lseek(fd, min(one.offset, facts.st_size), os.SEEK_SET)
    elif one.file is not None:
        source = saved(one.file)
        try:
            _fill(source, fd, one.size, user, again=again, check=check)
        finally:
            os.close(source)
    return True


def _fill(source: int, fd: int, size: int, user: User, *, again: bool, check: Callable[[], None]) -> None:
    """``fd`` is the run's own descriptor, write-only: reading and writing go through one of our own."""
    if stuck(user.uid):
        raise OSError(errno.EMFILE, "files of its user cannot be closed")
    file = _wait(lambda: _open_again(fd, os.O_RDWR, user), late=os.close)
    try:
        now = _wait(lambda: os.fstat(file)).st_size
        if now >= size and _same(source, file, size, check):
            tail = _wait(lambda: os.pread(file, _TAIL_LIMIT, size)) if now - size <= _TAIL_LIMIT else b""
            if again or (tail and _ours(tail)):
                _wait(lambda: os.ftruncate(file, size))
            return
        rest = _wait(lambda: os.pread(file, _TAIL_LIMIT, 0))
        # A restore that was cut short has written a part of it.
        if _ours(rest) or (again and now < size and _same(source, file, now, check)):
            rest = b""
        _wait(lambda: os.ftruncate(file, 0))
        at = 0
        while at < size:
            check()
            data = os.pread(source, min(_CHUNK, size - at), at)
            if not data:
                raise OSError(0, "the saved output is shorter than it says")
            at += _write(file, data, at)
        _write(file, rest, at)
        # Else what a file server has no room for would be known when nobody asks any more.
        _wait(lambda: os.fsync(file))
    finally:
        close([file], user.uid)


def _ours(text: bytes) -> bool:
    """Whether all of it is what Slurm and we ourselves write to a job's output between its dump and its next start."""
    *lines, rest = text.split(b"\n")
    return not rest and all(line.startswith(b"slurm-affinode: ") or _of_requeue(line) for line in lines)


def _of_requeue(line: bytes) -> bool:
    """Slurm's line on it; 24.11 puts its name in front, 26.05 the time.

    Taken apart word by word: the job may have written anything, and one expression for all of it may go back and forth
    on a long line for minutes, in which the agent does nothing else.
    """
    who, _, what = line.partition(b" error: *** ")
    return (
        _SLURMS_OWN.fullmatch(who) is not None
        and what.startswith((b"JOB ", b"STEP "))
        and what.endswith(b" ***")
        and any(end in what for end in _ENDS)
    )


def _open_again(fd: int, how: int, user: User) -> int:
    """The file of a descriptor, with a position of its own."""
    return as_user(user, lambda: os.open(f"/proc/self/fd/{fd}", how | os.O_CLOEXEC))


def _write(fd: int, data: bytes, at: int) -> int:
    done = 0
    while done < len(data):
        done += _wait(partial(os.pwrite, fd, data[done:], at + done))
    return done


def _same(one: int, other: int, size: int, check: Callable[[], None]) -> bool:
    """Whether the job's output ``other`` begins with so many bytes of ``one``."""
    at = 0
    while at < size:
        check()
        length = min(_CHUNK, size - at)
        if os.pread(one, length, at) != _wait(partial(os.pread, other, length, at)):
            return False
        at += length
    return True


def inherited(outputs: Sequence[SavedOutput], fds: Mapping[int, int | None]) -> list[InheritFd]:
    """The descriptors of the new run that take the places of the old ones."""
    found: dict[str, InheritFd] = {}
    for one in outputs:
        fd = fds.get(one.fd)
        if one.inherit is not None and fd is not None and one.inherit not in found:
            found[one.inherit] = InheritFd(fd, one.inherit)
    return list(found.values())


def say(fds: Mapping[int, int | None], text: str) -> None:
    """Lines to the run's standard error, or output where that is closed. A full disk is none of our business.

    Nor is a pipe that nobody reads, or a file system that does not answer: what would have to wait is not said.
    """
    fd = fds.get(2) if fds.get(2) is not None else fds.get(1)
    if fd is not None:
        with contextlib.suppress(OSError):
            data = "".join(f"slurm-affinode: {line}\n" for line in text.splitlines()).encode()
            _ask(lambda: _say(fd, data))


def _say(fd: int, data: bytes) -> None:
    look = select.poll()
    look.register(fd, select.POLLOUT)
    if any(events & select.POLLOUT for _, events in look.poll(0)):
        os.write(fd, data[: select.PIPE_BUF])  # so much a pipe takes that can be written to


class ProcessStreams:
    """``parts.Streams`` of this machine."""

    @staticmethod
    def save(init: Id, write: Save, user: User) -> tuple[SavedOutput, ...]:
        """See ``save``."""
        return save(init, write, user)

    @staticmethod
    def put_back(
        outputs: Sequence[SavedOutput],
        fds: Mapping[int, int | None],
        saved: OpenSaved,
        user: User,
        *,
        again: bool = False,
        check: Callable[[], None],
    ) -> Sequence[InheritFd]:
        """See ``put_back`` and ``inherited``."""
        put_back(outputs, fds, saved, user, again=again, check=check)
        return inherited(outputs, fds)
