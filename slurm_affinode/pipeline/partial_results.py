"""Results of tasks that a command keeps while it runs, so that one that was interrupted continues.

A file of the directory has the results of one function for some inputs, in the order of its tasks. Its first line is a
JSON object: format, version of the program, digest of all that the results depend on, function, interval, number of
tasks. Each record is the length of the result, a digest of it and of the place of the record, and the result. A file is
used only by a command with the same digest, up to its first damaged record, and is deleted when the command is
complete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import struct
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import partial
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from slurm_affinode.analysis.idle_windows import Trailing
from slurm_affinode.analysis.join.kernel import Folded
from slurm_affinode.base import json_values
from slurm_affinode.base.text import counted, one_line
from slurm_affinode.base.times import utc
from slurm_affinode.model.finding import Evidence
from slurm_affinode.model.serving import Diagnosis, EngineHealth, EngineKey
from slurm_affinode.pipeline import task_values
from slurm_affinode.whatif.suspension import Replay

DIRECTORY = "partial-totals"
"""In the state directory."""
KEPT_S = 7 * 86_400.0
"""After this time without a new record, the next command deletes a file."""
RESULTS = (Folded, Trailing, Replay, EngineHealth, EngineKey, Diagnosis, Evidence)
"""Dataclasses of results."""
_FORMAT = 2
_LENGTH = struct.Struct("<q")
_DIGEST_BYTES = 16
_HEADER_BYTES = 4096
_LONGEST = 1 << 32
"""Bytes of a record: more is damage."""


@dataclass(frozen=True, slots=True)
class TasksKey:
    """What determines the results of tasks."""

    version: str
    """Of the program."""
    digest: str
    """Of the function, the inputs and the parts of the sample store."""
    function: str
    since: str
    """Interval of the command, as its options accept it."""
    until: str
    tasks: int


Results = Generator[Any, None, None]


def key_of(  # noqa: PLR0917
    version: str, function: Callable[[Any, Any], Any], items: Sequence[Any], shared: Any, since: datetime,
    until: datetime,
) -> TasksKey:  # fmt: skip
    """Return the key of the results of ``function`` for each of ``items`` and ``shared``."""
    digest = task_values.digest(_FORMAT, version, function, shared, items)
    functions = [function.func, *function.args] if isinstance(function, partial) else [function]
    name = " ".join(f"{each.__module__}.{each.__qualname__}" for each in functions)
    return TasksKey(version, digest, name, utc(since, "auto"), utc(until, "auto"), len(items))


class PartialResults:
    """The results that a command keeps in ``directory``, until it leaves the context without an exception.

    ``warned`` gets a line for each file that is ignored, and if results are kept when the command ends. Without
    permission to write, nothing is kept; if the disk is full, no more.
    """

    def __init__(self, directory: Path, warned: Callable[[str], None]) -> None:
        self._directory, self._warned = directory, warned
        self._generators: list[Results] = []
        self._keys: list[TasksKey] = []
        self._complete: list[TasksKey] = []
        self._reported: set[tuple[str, str]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for generator in self._generators:
            generator.close()
        if kind is not None:
            for key in self._complete:
                self._report(key)
            return
        for key in self._complete:
            _delete(self._path(key))
        if self._keys:
            self._delete_others()

    def resumed(self, key: TasksKey, compute: Callable[[int], Results]) -> Results:
        """Yield the kept results of the first tasks, then those of ``compute``, which gets their number; keep these."""
        generator = self._resumed(key, compute)
        self._generators.append(generator)
        return generator

    def _resumed(self, key: TasksKey, compute: Callable[[int], Results]) -> Results:
        with contextlib.ExitStack() as stack:
            file = self._open(key, stack)
            count = 0
            if file is not None:
                try:
                    for result in _read_records(file, key, self._warned):
                        count += 1
                        yield result
                except BaseException:
                    self._report(key, count)
                    raise
            keeping = file is not None
            results = stack.enter_context(contextlib.closing(compute(count)))
            try:
                for result in results:
                    if keeping and file is not None:
                        try:
                            _append(file, key, count, result)
                        except OSError as error:
                            keeping = False
                            self._warned(f"{file.name}: partial results are not kept: {one_line(error)}")
                        else:
                            count += 1
                    yield result
            except BaseException:
                if count:
                    self._report(key, count)
                elif file is not None:
                    _delete(self._path(key))
                raise
            if keeping:
                self._complete.append(key)
            elif file is not None:
                _delete(self._path(key))

    def _path(self, key: TasksKey) -> Path:
        return self._directory / f"{key.digest}.sums"

    def _open(self, key: TasksKey, stack: contextlib.ExitStack) -> FileIO | None:
        """Return the file of ``key``, locked; ``None`` if another process uses it, or nothing can be kept."""
        first = not self._keys
        self._keys.append(key)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if first:
                self._delete_unusable(key)
            return stack.enter_context(_locked(self._path(key)))
        except PermissionError:
            return None
        except OSError as error:
            self._warned(f"{self._directory}: partial results are not kept: {one_line(error)}")
            return None

    def _report(self, key: TasksKey, finished: int = 0) -> None:
        """Say how the command continues, once for an interval. ``finished``: tasks of ``key`` unless complete."""
        if _interval(key) in self._reported:
            return
        self._reported.add(_interval(key))
        complete = sum(same.tasks for same in self._complete if _interval(same) == _interval(key))
        tasks = complete + (key.tasks if finished else 0)
        self._warned(
            f"the results of {complete + finished:,} of {counted(tasks, 'task')} are kept: the same command with "
            f"--since {key.since} --until {key.until} continues"
        )

    def _delete_unusable(self, key: TasksKey) -> None:
        """Delete files that no command will use: of another version, damaged or old ones."""
        for path in sorted(self._directory.glob("*.sums")):
            with _unused(path) as file:
                if file is None or path.stem == key.digest:
                    continue
                header = _header(file)
                if header is None:
                    self._delete_ignored(path, "are damaged")
                elif header.version != key.version:
                    self._delete_ignored(path, "are of another version of slurm-affinode")
                elif time.time() - os.fstat(file.fileno()).st_mtime > KEPT_S:
                    _delete(path)

    def _delete_others(self) -> None:
        """Delete the files for the same functions and intervals that are of other data."""
        used = {(key.function, *_interval(key)) for key in self._keys}
        for path in sorted(self._directory.glob("*.sums")):
            with _unused(path) as file:
                header = None if file is None else _header(file)
                if header is not None and (header.function, *_interval(header)) in used:
                    self._delete_ignored(path, "are of other samples, jobs or options")

    def _delete_ignored(self, path: Path, why: str) -> None:
        self._warned(f"{path}: partial results {why}: ignored, and deleted")
        _delete(path)


def _interval(key: TasksKey) -> tuple[str, str]:
    return key.since, key.until


@contextlib.contextmanager
def _unused(path: Path) -> Iterator[FileIO | None]:
    """Open a file that no process uses; yield ``None`` if one does, or if it cannot be opened."""
    with contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError):
            file = stack.enter_context(_locked(path, create=False))
        yield file


@contextlib.contextmanager
def _locked(path: Path, *, create: bool = True) -> Iterator[FileIO | None]:
    """Open a file that no other process uses; yield ``None`` if one does. Raises ``OSError``."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    # Unbuffered: a full disk is noticed where a record is written, and not again at the end.
    with open(path, "r+b", buffering=0, opener=lambda name, _: os.open(name, flags, 0o600)) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
            raise OSError(errno.EINVAL, "not a regular file with a single name", str(path))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield file if os.fstat(file.fileno()).st_nlink else None


def _header(file: FileIO) -> TasksKey | None:
    """Return the key of a file; that of another format is of an unknown version."""
    try:
        data = json_values.table(json_values.loads(file.readline(_HEADER_BYTES)))
        if data.pop("format") != _FORMAT:
            return TasksKey("", "", "", "", "", 0)
        return json_values.record(TasksKey, data)
    except (ValueError, KeyError):
        return None


def _read_records(file: FileIO, key: TasksKey, warned: Callable[[str], None]) -> Iterator[Any]:
    """Yield the records of a file, up to the first damaged one, and cut it there."""
    if os.fstat(file.fileno()).st_size == 0:
        return
    if _header(file) != key:
        warned(f"{file.name}: partial results are damaged: ignored")
        _cut(file, 0)
        return
    for number in range(key.tasks):
        place = file.tell()
        start = file.read(1)
        if not start:
            return
        try:
            result = task_values.decoded(_record(file, start, key, number), RESULTS)
        except ValueError:
            warned(f"{file.name}: partial results are damaged after {counted(number, 'task')}: the others are ignored")
            _cut(file, place)
            return
        yield result


def _cut(file: FileIO, place: int) -> None:
    file.seek(place)
    file.truncate()


def _record(file: FileIO, start: bytes, key: TasksKey, number: int) -> bytes:
    """Return the content of a record whose first byte was read.

    Raises ``ValueError`` if it is damaged, or not that of the task ``number``.
    """
    head = start + file.read(_LENGTH.size + _DIGEST_BYTES - 1)
    if len(head) < _LENGTH.size + _DIGEST_BYTES:
        raise ValueError("it is cut off")
    (length,) = _LENGTH.unpack(head[: _LENGTH.size])
    if not 0 < length <= min(_LONGEST, os.fstat(file.fileno()).st_size):
        raise ValueError("its length is wrong")
    content = file.read(length)
    if head[_LENGTH.size :] != _digest(key, number, content):
        raise ValueError("its digest is wrong")
    return content


def _append(file: FileIO, key: TasksKey, number: int, result: Any) -> None:
    content = task_values.encoded(result)
    place = file.tell()
    try:
        if place == 0:
            values = {field.name: getattr(key, field.name) for field in fields(key)}
            _write(file, json.dumps({"format": _FORMAT, **values}).encode() + b"\n")
        _write(file, _LENGTH.pack(len(content)) + _digest(key, number, content) + content)
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(place)
        raise


def _write(file: FileIO, content: bytes) -> None:
    remaining = memoryview(content)
    while remaining:
        remaining = remaining[file.write(remaining) :]


def _digest(key: TasksKey, number: int, content: bytes) -> bytes:
    hasher = blake2b(f"{key.digest} {number}\n".encode(), digest_size=_DIGEST_BYTES)
    hasher.update(content)
    return hasher.digest()


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
