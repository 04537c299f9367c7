"""What a restored tree has open, compared before it runs with what was passed to CRIU for it.

Files reach a tree by descriptors that were checked before (``inheritance.py``). Here every descriptor, mapping,
executable, working and root directory of every process is one of those files, or has no name, as files that CRIU makes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from slurm_affinode import kerneltext
from slurm_affinode.checkpoint.asuser import User, as_user
from slurm_affinode.checkpoint.filetable import READ, WRITE, access_of
from slurm_affinode.checkpoint.inheritance import Inode, accessible
from slurm_affinode.checkpoint.watches import watched
from slurm_affinode.pinned import Process

_FDINFO = 4096
"""Bytes of a descriptor's facts: the flags stand first, locks may go on for long."""
_TERMINAL_MAJORS = (5, *range(136, 144))
_INOTIFY = "anon_inode:inotify"
_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Open:
    name: str
    """Below the process's directory in ``/proc``: leads to the file itself, wherever its own name leads by now."""
    how: int
    """``R_OK``, ``W_OK`` or both; 0: it is a place only."""
    key: _Key | None = None
    """Of a mapping: the file as ``/proc/PID/maps`` names it, and ``how``."""


class OpenFiles:
    """Looks at stopped processes of one user. What is the same file in several of them is looked at once."""

    def __init__(
        self, user: User, passed: Mapping[Inode, int], given: Collection[int] = (), watched: Collection[Inode] = ()
    ) -> None:
        """``passed``: files -> what may be done with them. ``given``: descriptors that the processes were given: those
        files are right, for what they are open for. ``watched``: what may be watched: device as in ``fdinfo``, inode.
        """
        self._user, self._watched = user, watched
        self._rights = dict(passed)
        for fd in given:
            facts = os.fstat(fd)
            inode = facts.st_dev, facts.st_ino
            self._rights[inode] = self._rights.get(inode, 0) | access_of(fcntl.fcntl(fd, fcntl.F_GETFL))
        self._known: set[_Key] = set()

    def strange(self, process: Process) -> str | None:
        """The name of a file that the process has and that was not passed so; ``None``: there is none.

        Files without a name any more do not count. Raises ``OSError`` where it cannot be found out.
        """
        for one in _files(process):
            if one.key is None or one.key not in self._known:
                if not self._is_right(process, one):
                    return process.link(one.name)
                if one.key is not None:
                    self._known.add(one.key)
        for number in process.names("fd"):
            if process.link(f"fd/{number}") == _INOTIFY:
                for device, inode in watched(process.read(f"fdinfo/{number}")):
                    if (device, inode) not in self._watched:
                        return f"inode {inode}, which it watches"
        return None

    def _is_right(self, process: Process, one: _Open) -> bool:
        facts = process.facts(one.name)  # the process is stopped, so it is that file which is opened
        inode = facts.st_dev, facts.st_ino
        if inode in self._rights and not one.how & ~self._rights[inode]:
            return True
        if not facts.st_nlink or not stat.S_IFMT(facts.st_mode):
            return True
        if stat.S_ISCHR(facts.st_mode) and os.major(facts.st_rdev) in _TERMINAL_MAJORS:
            # CRIU has made it, or opened it by its number.
            return facts.st_uid == self._user.uid or self._may_open(process, one)
        return False

    def _may_open(self, process: Process, one: _Open) -> bool:
        fd = process.open(one.name, os.O_PATH)
        try:
            return as_user(self._user, partial(accessible, fd, one.how))
        finally:
            os.close(fd)


def _files(process: Process) -> Iterator[_Open]:
    """Descriptors and mappings of files with a name, each file that is mapped once; what it runs, and where."""
    for number in process.names("fd"):
        if process.link(f"fd/{number}").startswith("/"):  # "pipe:[1]" is no path
            flags = _flags(process, number)
            yield _Open(f"fd/{number}", 0 if flags & os.O_PATH else access_of(flags))
    seen: set[_Key] = set()
    # Not splitlines(): a path may hold a carriage return, and what follows it would be a line of the user's.
    for line in process.read("maps").split(b"\n"):
        fields = line.split(None, 5)
        if len(fields) < 6 or not fields[5].startswith(b"/"):
            continue
        begin, end = (kerneltext.number(word, 16) for word in fields[0].partition(b"-")[::2])
        if begin is None or end is None:
            raise OSError(errno.EINVAL, "no addresses", "maps")
        mapped = f"map_files/{begin:x}-{end:x}"
        # A private mapping reads, however its file was opened; of a shared one its mode says that.
        how = READ if fields[1].endswith(b"p") else _opened(process.facts(mapped, follow=False).st_mode)
        key = (fields[3], fields[4], how)
        if key not in seen:
            seen.add(key)
            yield _Open(mapped, how, key)
    for place in ("exe", "cwd", "root"):
        yield _Open(place, 0)


def _opened(mode: int) -> int:
    return (READ if mode & stat.S_IRUSR else 0) | (WRITE if mode & stat.S_IWUSR else 0)


def _flags(process: Process, number: str) -> int:
    for line in process.read(f"fdinfo/{number}", _FDINFO).split(b"\n"):
        if line.startswith(b"flags:") and (flags := kerneltext.number(line[6:].strip(), 8)) is not None:
            return flags
    raise OSError(errno.EINVAL, "no flags", number)
