"""What a restored tree has open, looked at before it runs on.

CRIU opens files again by their path and as root; it compares size and mode, and follows links. While a job sleeps
its user may put a link in the place of a file, and the job would come back with a file open that its user may not open,
such as ``/etc/passwd`` for writing. So each file that the tree has open or mapped must belong to its user, or be one
that the user may open in that way.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from slurm_affinode.checkpoint.asuser import User, as_user
from slurm_affinode.checkpoint.namespace import PROC

_SYS_FACCESSAT2 = 439
_AT_EMPTY_PATH, _AT_EACCESS = 0x1000, 0x200
_AT_ONCE = 256
"""Files that are looked at together: each takes a descriptor."""
_FDINFO = 4096
"""Of a descriptor's facts: the flags stand first, what an epoll waits for may go on for long."""
_WRITE, _READ = os.W_OK, os.R_OK
_HOW = {os.O_RDONLY: _READ, os.O_WRONLY: _WRITE}
_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Open:
    link: str
    """In ``/proc``: leads to the file itself, wherever its name leads by now."""
    how: int
    """``R_OK``, ``W_OK`` or both."""
    key: _Key | None = None
    """Of a mapping: the file as ``/proc/PID/maps`` names it, and ``how``."""


class OpenFiles:
    """Looks at stopped processes of one user. What is the same file in several of them is asked for once."""

    def __init__(self, user: User, given: Collection[int] = (), *, proc: Path = PROC) -> None:
        """``given``: descriptors that the processes were given: those files are right, for what they are open for."""
        self._user = user
        self._proc = proc
        self._known: set[_Key] = {
            _key(fd, _HOW.get(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE, _READ | _WRITE)) for fd in given
        }

    def strange(self, pid: int) -> str | None:
        """The name of a file that the process has open in a way that its user may not; ``None``: there is none.

        Files without a name any more do not count: CRIU has made them itself. Raises ``OSError`` where it cannot be
        found out.
        """
        files = (one for one in _files(self._proc / str(pid)) if one.key is None or one.key not in self._known)
        while some := list(islice(files, _AT_ONCE)):
            with ExitStack() as stack:
                asked = [(fd, one) for one in some if (fd := self._doubtful(one, stack)) is not None]
                bad = as_user(self._user, partial(_first_refused, asked)) if asked else None
                if bad is not None:
                    return os.readlink(bad.link)  # noqa: PTH115 - there are many of these, and text is quicker
                self._known.update(_key(fd, one.how) for fd, one in asked)
            self._known.update(one.key for one in some if one.key is not None)
        return None

    def _doubtful(self, one: _Open, stack: ExitStack) -> int | None:
        """A descriptor that the stack closes; ``None``: the file is right."""
        facts = os.stat(one.link)  # noqa: PTH116 - as above; the process is stopped, so it is that file which is opened
        known = (facts.st_dev, facts.st_ino, one.how) in self._known
        if facts.st_uid == self._user.uid or not facts.st_nlink or known or not _can_be_opened(facts.st_mode):
            return None
        fd = os.open(one.link, os.O_PATH | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        return fd


def _first_refused(asked: Sequence[tuple[int, _Open]]) -> _Open | None:
    return next((one for fd, one in asked if not _allowed(fd, one.how)), None)


def _key(fd: int, how: int) -> _Key:
    facts = os.fstat(fd)
    return facts.st_dev, facts.st_ino, how


def _can_be_opened(mode: int) -> bool:
    return any(kind(mode) for kind in (stat.S_ISREG, stat.S_ISDIR, stat.S_ISCHR, stat.S_ISBLK, stat.S_ISFIFO))


def _files(base: Path) -> Iterator[_Open]:
    """Descriptors and mappings of files with a name, each file that is mapped once."""
    for name in os.listdir(base / "fd"):  # noqa: PTH208 - as above
        link = f"{base}/fd/{name}"
        if not _named(link):
            continue
        flags = _flags(f"{base}/fdinfo/{name}")
        if not flags & os.O_PATH:
            yield _Open(link, _HOW.get(flags & os.O_ACCMODE, _READ | _WRITE))
    seen: set[_Key] = set()
    for line in (base / "maps").read_bytes().splitlines():
        fields = line.split(None, 5)
        if len(fields) < 6 or not fields[5].startswith(b"/"):
            continue
        begin, _, end = fields[0].partition(b"-")
        mapped = base / "map_files" / f"{int(begin, 16):x}-{int(end, 16):x}"
        # A private mapping reads, however its file was opened; of a shared one its mode says that.
        how = _READ if fields[1].endswith(b"p") else _opened(mapped.lstat().st_mode)
        key = (fields[3], fields[4], how)
        if key not in seen:
            seen.add(key)
            yield _Open(str(mapped), how, key)


def _opened(mode: int) -> int:
    return (_READ if mode & stat.S_IRUSR else 0) | (_WRITE if mode & stat.S_IWUSR else 0)


def _named(link: str) -> bool:
    return os.readlink(link).startswith("/")  # noqa: PTH115 - "pipe:[1]" is no path


def _flags(fdinfo: str) -> int:
    with open(fdinfo, "rb", buffering=0) as file:  # noqa: PTH123 - as above
        for line in file.read(_FDINFO).splitlines():
            if line.startswith(b"flags:"):
                return int(line.split()[1], 8)
    raise OSError(errno.EINVAL, "no flags", fdinfo)


def _allowed(fd: int, how: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYS_FACCESSAT2, fd, b"", how, _AT_EMPTY_PATH | _AT_EACCESS) == 0:
        return True
    if ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL):
        return False
    # Before Linux 5.8. Opening a device may do something to it, and they are not what can be put in a file's place.
    if not (stat.S_ISREG(mode := os.fstat(fd).st_mode) or stat.S_ISDIR(mode)):
        return True
    flags = {_READ: os.O_RDONLY, _WRITE: os.O_WRONLY}.get(how, os.O_RDWR)
    with suppress(OSError):
        os.close(os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC | os.O_NONBLOCK))
        return True
    return False
