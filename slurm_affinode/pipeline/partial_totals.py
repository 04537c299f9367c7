"""Sums of ranges of samples that a report keeps while it is made, so that one that was interrupted continues.

A file of the directory has the sums of one fold, in the order of its ranges. Its first line is a JSON object: format,
version of the program, digest of all that the sums depend on, interval, number of ranges. Each record is the length of
the sums, a digest of them and of the place of the record, and the sums. A file is used only by a fold with the same
digest, up to its first damaged record, and is deleted when all ranges are folded.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from slurm_affinode.analysis.join.kernel import Folded, FoldInput, RowRange
from slurm_affinode.analysis.result import SUMS
from slurm_affinode.analysis.samples import Index
from slurm_affinode.base.text import counted, one_line
from slurm_affinode.base.times import utc

DIRECTORY = "partial-totals"
"""In the state directory."""
KEPT_S = 7 * 86_400.0
"""After this time without a new record, the next fold deletes a file."""
_FORMAT = 1
_LENGTH = struct.Struct("<q")
_COUNTS = struct.Struct("<6q")
_DIGEST_BYTES = 16
_HEADER_BYTES = 4096
_LONGEST = 1 << 32
"""Bytes of a record: more is damage."""


@dataclass(frozen=True, slots=True)
class FoldKey:
    """The inputs that determine the sums of a fold."""

    version: str
    """Of the program."""
    digest: str
    """Of parts, ranges, allocations and thresholds."""
    since_ms: int
    until_ms: int
    ranges: int


Results = Generator[Folded, None, None]


def key_of(version: str, index: Index, fold_input: FoldInput, ranges: Sequence[RowRange]) -> FoldKey:
    """Return the key of a fold. Raises ``OSError`` if a part was deleted."""
    made = blake2b(digest_size=_DIGEST_BYTES)
    made.update(f"{_FORMAT} {version} {fold_input.thresholds!r}\n".encode())
    merged = {source.day for source in index.sources if source.path is None}
    paths = [source.path for source in index.sources if source.path is not None]
    paths += [part.path for part in index.store.parts() if part.day in merged] if merged else []
    for path in paths:
        # A part is never changed: another one has another name.
        made.update(f"{path.parent.name}/{path.name} {index.store.files.size(path)}\n".encode())
    for rows in ranges:
        made.update(f"{rows.row} {rows.end}\n".encode())
    for columns in (fold_input.pieces, fold_input.cells):
        for field in fields(columns):
            value = np.asarray(getattr(columns, field.name))
            made.update(f"{field.name} {value.dtype} {value.shape}\n".encode())
            made.update(np.ascontiguousarray(value).tobytes())
    return FoldKey(version, made.hexdigest(), fold_input.cells.since, fold_input.cells.until, len(ranges))


def resumed(directory: Path, key: FoldKey, fold: Callable[[int], Results], warned: Callable[[str], None]) -> Results:
    """Yield the kept sums of the first ranges, then those of ``fold``, which gets their number; keep these as well.

    ``warned`` gets a line for each file that is ignored, and if sums are kept when the consumer stops. Without
    permission to write, nothing is kept; if the disk is full, no more.
    """
    with contextlib.ExitStack() as stack:
        file = None
        try:
            _clean(directory, key, warned)
            file = stack.enter_context(_locked(directory / f"{key.digest}.sums"))
        except PermissionError:
            pass
        except OSError as error:
            warned(f"{directory}: partial totals are not kept: {one_line(error)}")
        if file is None:
            with contextlib.closing(fold(0)) as results:
                yield from results
            return
        done = 0
        try:
            for folded in _kept(file, key, warned):
                done += 1
                yield folded
            keeping = True
            for folded in stack.enter_context(contextlib.closing(fold(done))):
                if keeping:
                    try:
                        _append(file, key, done, folded)
                    except OSError as error:
                        keeping = False
                        warned(f"{file.name}: partial totals are not kept: {one_line(error)}")
                    else:
                        done += 1
                yield folded
        except BaseException:
            if done:
                warned(_continued(key, done))
            else:
                _delete(file)
            raise
        _delete(file)


def _continued(key: FoldKey, done: int) -> str:
    since, until = (_moment(ms) for ms in (key.since_ms, key.until_ms))
    return (
        f"the totals of {done:,} of {counted(key.ranges, 'range')} of samples are kept: the same command with "
        f"--since {since} --until {until} continues"
    )


def _moment(ms: int) -> str:
    return utc(datetime.fromtimestamp(ms / 1000, UTC), "milliseconds")


def _clean(directory: Path, key: FoldKey, warned: Callable[[str], None]) -> None:
    """Delete files that no fold will use: of another version, of other data for the same interval, or old ones."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in sorted(directory.glob("*.sums")):
        if path.stem == key.digest:
            continue
        with contextlib.suppress(FileNotFoundError), _locked(path, create=False) as file:
            if file is None:
                continue
            header = _header(file)
            if header is None:
                why = "are damaged"
            elif header.version != key.version:
                why = "are of another version of slurm-affinode"
            elif (header.since_ms, header.until_ms) == (key.since_ms, key.until_ms):
                why = "are of other samples, allocations or thresholds"
            elif time.time() - os.fstat(file.fileno()).st_mtime > KEPT_S:
                why = ""
            else:
                continue
            if why:
                warned(f"{path}: partial totals {why}: ignored, and deleted")
            _delete(file)


@contextlib.contextmanager
def _locked(path: Path, *, create: bool = True) -> Iterator[FileIO | None]:
    """Open a file that no other process uses; yield ``None`` if one does. Raises ``OSError``."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    # Unbuffered: a full disk is noticed where a record is written, and not again at the end.
    with open(path, "r+b", buffering=0, opener=lambda name, _: os.open(name, flags, 0o600)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield file if os.fstat(file.fileno()).st_nlink else None


def _header(file: FileIO) -> FoldKey | None:
    try:
        data: Any = json.loads(file.readline(_HEADER_BYTES))
        if data.pop("format") != _FORMAT:
            return None
        return FoldKey(**data)
    except (ValueError, AttributeError, KeyError, TypeError):
        return None


def _kept(file: FileIO, key: FoldKey, warned: Callable[[str], None]) -> Iterator[Folded]:
    """Yield the records of a file, up to the first damaged one, and cut it there."""
    if os.fstat(file.fileno()).st_size == 0:
        return
    if _header(file) != key:
        warned(f"{file.name}: partial totals are damaged: ignored")
        _cut(file, 0)
        return
    for number in range(key.ranges):
        place = file.tell()
        start = file.read(1)
        if not start:
            return
        content = _record(file, start, key, number)
        if content is None:
            warned(f"{file.name}: partial totals are damaged after {counted(number, 'range')}: the others are ignored")
            _cut(file, place)
            return
        yield _decoded(content)


def _cut(file: FileIO, place: int) -> None:
    file.seek(place)
    file.truncate()


def _record(file: FileIO, start: bytes, key: FoldKey, number: int) -> bytes | None:
    """Return the content of a record whose first byte was read, if it is that of the range ``number``."""
    head = start + file.read(_LENGTH.size + _DIGEST_BYTES - 1)
    if len(head) < _LENGTH.size + _DIGEST_BYTES:
        return None
    (length,) = _LENGTH.unpack(head[: _LENGTH.size])
    if not _COUNTS.size <= length <= _LONGEST:
        return None
    content = file.read(length)
    return content if head[_LENGTH.size :] == _digest(key, number, content) else None


def _append(file: FileIO, key: FoldKey, number: int, folded: Folded) -> None:
    content = _encoded(folded)
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


def _digest(key: FoldKey, number: int, content: bytes) -> bytes:
    made = blake2b(f"{key.digest} {number}\n".encode(), digest_size=_DIGEST_BYTES)
    made.update(content)
    return made.digest()


def _delete(file: FileIO) -> None:
    with contextlib.suppress(OSError):
        Path(file.name).unlink()


_PARTS = (
    ("cell", np.dtype("<i8"), 0, 1), ("sums", np.dtype("<f8"), 0, len(SUMS)), ("peak", np.dtype("<i4"), 0, 1),
    ("partly_cell", np.dtype("<i8"), 1, 1), ("partly_sums", np.dtype("<f8"), 1, len(SUMS)),
    ("partly_time", np.dtype("<i8"), 1, 1), ("idle", np.dtype("<i8"), 2, 4),
)  # fmt: skip
"""Arrays of a record: field, type, place of its number of rows among the counts, columns."""


def _encoded(folded: Folded) -> bytes:
    counts = (len(folded.cell), len(folded.partly_cell), len(folded.idle), folded.gap_ms, folded.gaps, folded.samples)
    arrays = [np.ascontiguousarray(getattr(folded, name), kind).tobytes() for name, kind, _, _ in _PARTS]
    return b"".join((_COUNTS.pack(*counts), *arrays))


def _decoded(content: bytes) -> Folded:
    """Return the sums of a record that ``_encoded`` made: its digest was checked."""
    counts = _COUNTS.unpack_from(content)
    values: dict[str, Any] = {}
    at = _COUNTS.size
    for name, kind, rows, columns in _PARTS:
        number = counts[rows] * columns
        array = np.frombuffer(content, kind, number, at)
        values[name] = array.reshape(-1, columns) if columns > 1 else array
        at += number * kind.itemsize
    return Folded(**values, gap_ms=counts[3], gaps=counts[4], samples=counts[5])
