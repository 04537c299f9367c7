"""The job's standard output and error across a suspension, byte for byte.

Slurm opens the output file again when the job starts again, and truncates it unless the job appends; before that,
slurmstepd has written a line about the requeue at its end. So an image holds the bytes of the file as they were when
the tree was stopped, and before the tree goes on the file is made what it was.

Files are reached through descriptors of a process that has them open (``/proc/PID/fd/N``), never by a path.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from slurm_affinode.checkpoint import rootdir
from slurm_affinode.checkpoint.interface import ImageDamaged, InheritFd, RestoreFailed, Writer
from slurm_affinode.checkpoint.namespace import PROC
from slurm_affinode.model.suspension import SavedOutput

_CHUNK = 4 << 20
_STREAMS = (0, 1, 2)
_DELETED = " (deleted)"
_REQUEUE_LINES = re.compile(rb"(?:slurmstepd[^\n]*\*\*\* (?:JOB|STEP) [^\n]* DUE TO JOB REQUEUE \*\*\*[^\n]*\n)+")
_TAIL_LIMIT = 4096


def look(pid: int, *, proc: Path = PROC) -> tuple[SavedOutput, ...]:
    """The standard streams of a process (the shepherd), nothing saved yet. Streams that are closed are left out."""
    found: list[SavedOutput] = []
    files: dict[tuple[int, int], int] = {}
    for fd in _STREAMS:
        link = proc / str(pid) / "fd" / str(fd)
        try:
            facts, path = link.stat(), os.readlink(link)  # noqa: PTH115 - "pipe:[1]" is no path
        except OSError:
            continue
        position, flags = _fdinfo(proc / str(pid) / "fdinfo" / str(fd))
        name = path.removesuffix(_DELETED)
        if not stat.S_ISREG(facts.st_mode):
            null = stat.S_ISCHR(facts.st_mode) and facts.st_rdev == os.makedev(1, 3)
            # Named pipes and devices are opened again by their path; a nameless pipe has to be given.
            key = path if path.startswith("pipe:[") else None
            found.append(SavedOutput(fd, "null" if null else "other", path, inherit=key))
            continue
        first = files.setdefault((facts.st_dev, facts.st_ino), fd)
        written = fd != 0 and flags & os.O_ACCMODE != os.O_RDONLY
        found.append(
            SavedOutput(
                fd,
                "file",
                name,
                file=f"out.{fd}" if written and first == fd else None,
                same_as=first if first != fd else None,
                size=facts.st_size,
                offset=position,
                append=bool(flags & os.O_APPEND),
                inherit=name.lstrip("/") if written else None,
            )
        )
    return tuple(found)


def save(pid: int, writer: Writer, *, proc: Path = PROC) -> tuple[SavedOutput, ...]:
    """Look again, and save the bytes of the files, with the tree stopped. Raises ``OSError``, ``NoRoom``."""
    now = look(pid, proc=proc)
    for one in now:
        if one.file is not None:
            fd = os.open(proc / str(pid) / "fd" / str(one.fd), os.O_RDONLY | os.O_CLOEXEC)
            try:
                writer.save(one.file, fd, one.size)
            finally:
                os.close(fd)
    return now


def size(outputs: Sequence[SavedOutput]) -> int:
    """Bytes that saving takes."""
    return sum(one.size for one in outputs if one.file is not None)


def put_back(outputs: Sequence[SavedOutput], image_fd: int, streams: Mapping[int, int]) -> list[InheritFd]:
    """Make the new run's files what they were; what CRIU has to be given.

    ``streams``: standard stream (0, 1, 2) -> descriptor of the new run's. ``image_fd``: of the verified image.
    Raises ``RestoreFailed``.
    """
    inherit: dict[str, InheritFd] = {}
    for one in outputs:
        new = streams.get(one.fd)
        if new is None or one.inherit is None:
            continue
        inherit.setdefault(one.inherit, InheritFd(new, one.inherit))
        if one.file is not None and stat.S_ISREG(os.fstat(new).st_mode):
            try:
                with rootdir.file(image_fd, one.file, owner=os.geteuid(), size=one.size) as saved:
                    _make_equal(new, saved, one.size)
            except (OSError, ImageDamaged) as error:
                text = getattr(error, "strerror", None) or error
                raise RestoreFailed(f"the output file {one.path} cannot be put back: {text}") from None
    return list(inherit.values())


def _make_equal(new: int, saved: int, size: int) -> None:
    """Only what differs is written: where nothing was truncated, a long file is left as it is."""
    with _readable(new) as reading:
        length = os.fstat(new).st_size
        if length >= size and _same(reading, saved, size):
            tail = os.pread(reading, _TAIL_LIMIT, size)
            if length == size or (length - size < _TAIL_LIMIT and _REQUEUE_LINES.fullmatch(tail)):
                os.ftruncate(new, size)
            os.lseek(new, 0, os.SEEK_END)
            return
    os.ftruncate(new, 0)
    os.lseek(new, 0, os.SEEK_SET)
    at = 0
    while at < size and (chunk := os.pread(saved, _CHUNK, at)):
        view = memoryview(chunk)
        while view:
            view = view[os.write(new, view) :]
        at += len(chunk)


def _same(one: int, other: int, size: int) -> bool:
    at = 0
    while at < size:
        wanted = min(_CHUNK, size - at)
        if os.pread(one, wanted, at) != os.pread(other, wanted, at):
            return False
        at += wanted
    return True


@contextmanager
def _readable(fd: int) -> Iterator[int]:
    """The same file, for reading: Slurm opens output for writing only."""
    opened = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield opened
    finally:
        os.close(opened)


def _fdinfo(path: Path) -> tuple[int, int]:
    position = flags = 0
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(":")
            if key == "pos":
                position = int(value)
            elif key == "flags":
                flags = int(value, 8)
    except OSError:
        pass
    return position, flags
