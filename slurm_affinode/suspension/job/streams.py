"""Standard streams of a job: the contents of its output files at the dump, and their return.

Slurm truncates the output file when a requeued job starts again, unless it is opened to append. So its contents are
part of the image. They are read through the shepherd's own descriptors, never by path, and written back before the tree
runs again. The tree gets the descriptors of its new attempt (``criu --inherit-fd``).

The shepherd runs as the user, so its descriptors are the user's choice: a file is opened and written with the user's
rights, and none that the user could not open is read or written. Closing a descriptor may block on a file system that
does not respond (a user's FUSE), so descriptors from users are closed in another thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import select
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.pidfd import Id, Process
from slurm_affinode.base.timeouts import FileSystemCalls
from slurm_affinode.checkpoint.interface import InheritFd, restore_failure
from slurm_affinode.checkpoint.user_files import User, as_user
from slurm_affinode.model.suspension import SavedOutput

MOST = 64
"""Maximum number of closes in progress per user: each takes a thread, and descriptors."""

_lock = threading.Lock()
_under_way: Counter[int] = Counter()


def close(fds: Sequence[int], uid: int) -> None:
    """Close descriptors received from a user, without waiting."""
    if fds:
        with _lock:
            _under_way[uid] += 1
        threading.Thread(target=_close, args=(tuple(fds), uid), name="close", daemon=True).start()


def stuck(uid: int) -> bool:
    """Return whether a user has so many closes in progress that no more descriptors are to be accepted."""
    with _lock:
        return _under_way[uid] >= MOST


def _close(fds: Sequence[int], uid: int) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):  # write-back failed; the descriptor is closed nevertheless
            os.close(fd)
    with _lock:
        _under_way[uid] -= 1
        if not _under_way[uid]:
            del _under_way[uid]


STREAMS = (0, 1, 2)
_CHUNK = 1 << 20
_TAIL_LIMIT = 64 * 1024
_ANSWER_S = 30.0
"""Time-out of each call to the file system of a job's output."""
_RESTORE_S = 300.0
"""The same during a restore: a file server that is unavailable for minutes is no reason to hold a job."""
_SLURM_LINE = re.compile(rb"slurmstepd[^\n]*:|\[[0-9T:.+Z-]+\]")
_ENDS = (b" DUE TO JOB REQUEUE", b" DUE TO PREEMPTION")

Save = Callable[[str, int, int], int]
OpenSaved = Callable[[str], int]
"""Opens a saved output by its name in the image, with verified contents."""
T = TypeVar("T")


class StreamsError(AffinodeError):
    """The job's output cannot be read."""


def borrow(process: Process, number: int) -> int:
    """Return a descriptor of the same open file description as descriptor ``number`` of a process.

    The caller closes it. Raises ``StreamsError``. Requires the right to trace the process (root has it).
    """
    try:
        return process.descriptor(number)
    except OSError as error:
        raise StreamsError(f"descriptor {number} of process {process.pid}: {error.strerror}") from error


@contextlib.contextmanager
def borrowed(process: Process, uid: int, numbers: Sequence[int] = STREAMS) -> Iterator[dict[int, int | None]]:
    """``borrow`` several descriptors of a user's process; ``None`` for one that is closed."""
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
    """Save the streams of the process; ``write(name, fd, size)`` saves the first ``size`` bytes of an open file.

    Raises ``StreamsError`` if ``user`` cannot read an output file.
    """
    outputs: list[SavedOutput] = []
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
                    outputs.append(_saved(number, fd, path, outputs, copy))
                except OSError as error:
                    raise StreamsError(f"the job's output {path} cannot be read: {error.strerror}") from error
    except OSError as error:
        raise StreamsError(f"the job's output cannot be read: process {init.pid}: {error.strerror}") from error
    return tuple(outputs)


def _ask(call: Callable[[], T], late: Callable[[T], object] = lambda result: None) -> T:
    """Make one call to the file system of a job's output, which its user has chosen. Raises ``NoAnswerError``."""
    return FileSystemCalls(None, probe_s=_ANSWER_S)(call, late)


def _wait(call: Callable[[], T], late: Callable[[T], object] = lambda result: None) -> T:
    """Like ``_ask``, during a restore."""
    return FileSystemCalls(None, probe_s=_RESTORE_S)(call, late)


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
    for stream in before:
        if stream.kind == "file" and stream.file is not None and stream.path == path:
            return SavedOutput(number, "file", path, same_as=stream.fd, **common)  # type: ignore[arg-type]
    name = f"out.{number}"
    size = copy(name, fd, facts.st_size)
    return SavedOutput(number, "file", path, file=name, **{**common, "size": size})  # type: ignore[arg-type]


def restore_files(
    outputs: Sequence[SavedOutput],
    fds: Mapping[int, int | None],
    saved: OpenSaved,
    user: User,
    *,
    again: bool = False,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Restore the saved contents of the output files of the new attempt. ``saved`` opens a file of the image.

    Raises ``RestoreFailed``, and the exceptions of ``saved`` and ``check``. ``check`` is called before each piece that
    is compared or written, since the user determines their number.

    Later contents of a file are kept behind the saved ones, except for lines that Slurm and the agent have written;
    and, where an interrupted restore is repeated (``again``), except for the output of that tree.
    """
    try:
        files = []
        for file in outputs:
            fd = fds.get(file.fd)
            if (
                file.kind == "file"
                and fd is not None
                and _restore_file(file, fd, saved, user, again=again, check=check)
            ):
                files.append((file, fd))
        for file, fd in files:  # after all are restored: two may be the same file
            if file.fd != 0:
                _wait(partial(os.lseek, fd, 0, os.SEEK_END))
    except OSError as error:
        raise restore_failure(f"the job's output {file.path} cannot be restored", error) from error


def _restore_file(
    output: SavedOutput, fd: int, saved: OpenSaved, user: User, *, again: bool, check: Callable[[], None]
) -> bool:
    """Restore one stream; return whether it is a regular file."""
    facts = _wait(lambda: os.fstat(fd))
    if not stat.S_ISREG(facts.st_mode):
        return False
    if output.fd == 0:
        os.lseek(fd, min(output.offset, facts.st_size), os.SEEK_SET)
    elif output.file is not None:
        source = saved(output.file)
        try:
            _fill(source, fd, output.size, user, again=again, check=check)
        finally:
            os.close(source)
    return True


def _fill(source: int, fd: int, size: int, user: User, *, again: bool, check: Callable[[], None]) -> None:
    """Restore a file. ``fd`` is the attempt's own descriptor and write-only, so the file is opened again."""
    if stuck(user.uid):
        raise OSError(errno.EMFILE, "files of its user cannot be closed")
    file = _wait(lambda: _open_again(fd, os.O_RDWR, user), late=os.close)
    try:
        now = _wait(lambda: os.fstat(file)).st_size
        if now >= size and _begins_alike(source, file, size, check):
            tail = _wait(lambda: os.pread(file, _TAIL_LIMIT, size)) if now - size <= _TAIL_LIMIT else b""
            if again or (tail and _is_own_message(tail)):
                _truncate(file, size, user)
            return
        rest = _wait(lambda: os.pread(file, _TAIL_LIMIT, 0))
        # An interrupted restore has written a part of it.
        if _is_own_message(rest) or (again and now < size and _begins_alike(source, file, now, check)):
            rest = b""
        _truncate(file, 0, user)
        offset = 0
        while offset < size:
            check()
            data = os.pread(source, min(_CHUNK, size - offset), offset)
            if not data:
                raise OSError(0, "the saved output is shorter than recorded")
            offset += _write(file, data, offset, user)
        _write(file, rest, offset, user)
        # Otherwise a file server without free space would report that too late.
        _wait(lambda: os.fsync(file))
    finally:
        close([file], user.uid)


def _is_own_message(text: bytes) -> bool:
    """Return whether the text consists of lines that Slurm and the agent write between a dump and the next start."""
    *lines, rest = text.split(b"\n")
    return not rest and all(line.startswith(b"slurm-affinode: ") or _is_requeue_message(line) for line in lines)


def _is_requeue_message(line: bytes) -> bool:
    """Return whether a line is Slurm's message about a requeue; 24.11 prefixes its name, 26.05 the time.

    It is parsed in pieces: the job may have written anything, and a single expression may backtrack on a long line for
    minutes, during which the agent does nothing else.
    """
    who, _, what = line.partition(b" error: *** ")
    return (
        _SLURM_LINE.fullmatch(who) is not None
        and what.startswith((b"JOB ", b"STEP "))
        and what.endswith(b" ***")
        and any(end in what for end in _ENDS)
    )


def _open_again(fd: int, open_mode: int, user: User) -> int:
    """Open the file of a descriptor again, with a separate file offset."""
    return as_user(user, lambda: os.open(f"/proc/self/fd/{fd}", open_mode | os.O_CLOEXEC))


def _truncate(fd: int, size: int, user: User) -> None:
    """As ``_write``."""
    _wait(lambda: as_user(user, lambda: os.ftruncate(fd, size)))


def _write(fd: int, data: bytes, offset: int, user: User) -> int:
    """Write with the rights of the user: a file that root writes to keeps its setuid bit."""
    written = 0
    while written < len(data):
        written += _wait(partial(as_user, user, partial(os.pwrite, fd, data[written:], offset + written)))
    return written


def _begins_alike(fd: int, other_fd: int, size: int, check: Callable[[], None]) -> bool:
    """Return whether the job's output ``other_fd`` begins with the first ``size`` bytes of ``one``."""
    offset = 0
    while offset < size:
        check()
        length = min(_CHUNK, size - offset)
        if os.pread(fd, length, offset) != _wait(partial(os.pread, other_fd, length, offset)):
            return False
        offset += length
    return True


def inherited(outputs: Sequence[SavedOutput], fds: Mapping[int, int | None]) -> list[InheritFd]:
    """Return the descriptors of the new attempt that replace the old ones."""
    by_key: dict[str, InheritFd] = {}
    for output in outputs:
        fd = fds.get(output.fd)
        if output.inherit is not None and fd is not None and output.inherit not in by_key:
            by_key[output.inherit] = InheritFd(fd, output.inherit)
    return list(by_key.values())


def say(fds: Mapping[int, int | None], text: str) -> None:
    """Write lines to the job's standard error, or to its output if that is closed. Errors are ignored.

    A line that would block is not written: the pipe is full, or the file system does not respond.
    """
    fd = fds.get(2) if fds.get(2) is not None else fds.get(1)
    if fd is not None:
        with contextlib.suppress(OSError):
            data = "".join(f"slurm-affinode: {line}\n" for line in text.splitlines()).encode()
            _ask(lambda: _say(fd, data))


def _say(fd: int, data: bytes) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    if any(events & select.POLLOUT for _, events in poll.poll(0)):
        os.write(fd, data[: select.PIPE_BUF])  # a writable pipe accepts at least this much


class ProcessStreams:
    """``context.Streams`` for this machine."""

    @staticmethod
    def save(init: Id, write: Save, user: User) -> tuple[SavedOutput, ...]:
        """See ``save``."""
        return save(init, write, user)

    @staticmethod
    def restore_files(
        outputs: Sequence[SavedOutput],
        fds: Mapping[int, int | None],
        saved: OpenSaved,
        user: User,
        *,
        again: bool = False,
        check: Callable[[], None],
    ) -> Sequence[InheritFd]:
        """See ``restore_files`` and ``inherited``."""
        restore_files(outputs, fds, saved, user, again=again, check=check)
        return inherited(outputs, fds)
