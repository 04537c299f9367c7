"""Text files as blocks of lines: decompressed, decoded, numbered; and errors of a file as a whole."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.input_files import (
    ARCHIVE_BYTES,
    DAMAGED,
    MAGIC_BYTES,
    LimitedReader,
    archive,
    compression,
    count_byte,
    ends_in_cr,
    utf8_stream,
    whole_lines,
)
from slurm_affinode.base.limits import GPU_LINE_BYTES
from slurm_affinode.base.text import one_line

CHUNK = 16 * 2**20
_AGAIN = "copy the file again; nothing of it was ingested"


@dataclass(frozen=True)
class LineBlock:
    """Consecutive lines of a file."""

    text: bytes
    """The lines, each with LF at its end, in UTF-8."""
    first: int = 1
    """The number of the first line."""
    open_line: int | None = None
    """In the last block: number of the last line of the file, if it has no line end; else None."""

    @cached_property
    def bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The positions in ``text`` where lines begin, and where they end (the position of LF)."""
        ends = positions(self.text, b"\n")
        return np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1] + 1]), ends

    @cached_property
    def lines(self) -> pl.DataFrame:
        """``line`` (without its end) and ``number`` (from 1)."""
        return self.some(np.arange(len(self.bounds[0])))

    def some(self, positions: NDArray[np.int64]) -> pl.DataFrame:
        """Return ``line`` and ``number`` of the lines at some places, ascending."""
        starts, ends = self.bounds
        (lines,) = pieces(self.text, (starts[positions], ends[positions]))
        return pl.DataFrame({"line": lines, "number": self.first + positions})

    def head(self, count: int) -> list[str]:
        """Return up to ``count`` lines."""
        return [line.decode() for line in self.text[: self._start(count)].split(b"\n")[:-1]]

    def after(self, count: int) -> LineBlock:
        """Return the lines after the first ``count``; the block has at least as many."""
        if not count:
            return self
        return LineBlock(self.text[self._start(count) :], self.first + count, self.open_line)

    def _start(self, number: int) -> int:
        """Return where the line after the first ``number`` begins; the length of the text if it has fewer lines."""
        position = 0
        for _ in range(number):
            if not (position := self.text.find(b"\n", position) + 1):
                return len(self.text)
        return position

    def cut_off(self, number: int, name: str) -> None:
        """Raise ``InputError`` if the unreadable line is the last one and unfinished: the file is truncated."""
        if number == self.open_line:
            raise InputError("is cut off in its last line", where=f"{name}:{number}", hint=_AGAIN)


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Convert errors while reading a file to an ``InputError``, in one line with the file's name."""
    try:
        yield
    except DAMAGED as error:
        raise InputError(f"is cut off or damaged ({error})", where=name, hint=_AGAIN) from error
    except IsADirectoryError:
        raise InputError("is a directory", where=name) from None
    except FileNotFoundError:
        raise InputError("no such file", where=name) from None
    except PermissionError:
        raise InputError("cannot be read: permission denied", where=name) from None
    except OSError as error:
        if error.errno is None:
            raise InputError(f"is cut off or damaged ({one_line(error)})", where=name, hint=_AGAIN) from error
        why = error.strerror or one_line(error)
        raise InputError(f"cannot be read: {why}", where=name) from error


def compression_of(path: Path) -> str | None:
    """Return the compression of the file, detected by its first bytes; None for an uncompressed file."""
    with path.open("rb") as file:
        return compression(file.read(MAGIC_BYTES))


def open_binary(path: Path) -> BinaryIO:
    """Open a file, decompressing gzip, zstd, bzip2 and xz; text in UTF-16 is read as UTF-8.

    Reading raises ``InputError`` if it unpacks to more than ``limits.most_unpacked``.
    """
    openers: dict[str, Callable[[], object]] = {
        "gzip": lambda: gzip.open(path, "rb"),  # noqa: SIM115 - the caller closes it
        "bzip2": lambda: bz2.open(path, "rb"),  # noqa: SIM115
        "xz": lambda: lzma.open(path, "rb"),  # noqa: SIM115
        "zstd": lambda: pa.CompressedInputStream(pa.OSFile(str(path), "rb"), "zstd"),
    }
    kind = compression_of(path)
    if kind is None:
        raw: io.RawIOBase = cast("io.RawIOBase", path.open("rb", buffering=0))
    else:
        packed = path.stat().st_size
        raw = LimitedReader(cast("BinaryIO", openers[kind]()), lambda: packed, str(path))
    return utf8_stream(io.BufferedReader(raw))


def _refuse_archive(file: BinaryIO, name: str) -> None:
    """Raise ``InputError`` for an archive, whose files a reader would take for one text."""
    start: bytes = file.peek(ARCHIVE_BYTES)  # type: ignore[attr-defined]
    if (kind := archive(start)) is not None:
        raise InputError(f"is a {kind} archive", where=name, hint="unpack it, and give the files in it")


def until_damage(file: BinaryIO) -> Callable[[int], bytes]:
    """Return a function that reads as ``file.read`` does, and raises only once everything before a damage was read."""
    damage: list[Exception] = []

    def read(size: int) -> bytes:
        if damage:
            raise damage[0]
        blocks: list[bytes] = []
        while size > 0:
            try:
                data: bytes = file.read1(size)  # type: ignore[attr-defined]
            except (*DAMAGED, OSError) as error:
                if not blocks:
                    raise
                damage.append(error)
                break
            if not data:
                break
            blocks.append(data)
            size -= len(data)
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    return read


def head(path: Path) -> bytes:
    """Return the first 64 KiB of a file, decompressed, with LF at line ends; less if it is damaged after a line."""
    with reading(str(path)), open_binary(path) as file:
        _refuse_archive(file, str(path))
        read = until_damage(file)
        start = read(64 * 1024)
        if len(start) < 64 * 1024 and b"\n" not in start:
            read(1)  # raises if the file is damaged
    return start.replace(b"\r", b"\n") if ends_in_cr(start) else start


def blocks(
    path: Path,
    name: str,
    *,
    chunk: int = CHUNK,
    advance: Callable[[int], None] = lambda count: None,
    reject: Callable[[int, str, bytes], None] = lambda line, why, data: None,
) -> Iterator[LineBlock]:
    """Yield the lines of a file, some megabytes at a time. Bytes that are not UTF-8 become the replacement character.

    ``advance`` is called with numbers of bytes of text read, ``reject`` with unreadable lines (see ``whole_lines``).
    Raises ``InputError`` for a file that is not text or cannot be read; if it is damaged, after the lines before that.
    """
    with reading(name), open_binary(path) as file:
        _refuse_archive(file, name)
        yield from _blocks(until_damage(file), name, chunk, advance, reject)


def blocks_from(read: Callable[[int], bytes], name: str, *, chunk: int = CHUNK) -> Iterator[LineBlock]:
    """Yield the lines of a stream, given its ``read``, as ``blocks`` does; unreadable lines are an ``InputError``."""

    def reject(line: int, why: str, _: bytes) -> None:
        raise InputError(why, where=f"{name}:{line}")

    yield from _blocks(read, name, chunk, lambda count: None, reject)


def blocks_of(
    text: bytes, name: str, *, reject: Callable[[int, str, bytes], None] = lambda line, why, data: None
) -> Iterator[LineBlock]:
    """Yield the lines of a text in memory, as ``blocks`` does."""
    yield from _blocks(io.BytesIO(text).read, name, CHUNK, lambda count: None, reject)


def _blocks(
    read: Callable[[int], bytes], name: str, chunk: int, advance: Callable[[int], None],
    reject: Callable[[int, str, bytes], None],
) -> Iterator[LineBlock]:  # fmt: skip
    number = 1
    for index, piece in enumerate(whole_lines(read, chunk, where=name, longest=GPU_LINE_BYTES, reject=reject)):
        data = piece if index else piece.removeprefix(b"\xef\xbb\xbf")
        complete = data.endswith(b"\n")
        text = _clean(data if complete else data + b"\n")
        block = LineBlock(text, number)
        number += count_byte(text, b"\n")
        yield block if complete else LineBlock(text, block.first, number - 1)
        advance(len(piece))


def _clean(data: bytes) -> bytes:
    """Return lines in UTF-8, without carriage returns at their ends."""
    if not data.isascii():
        data = data.decode("utf-8", "replace").encode()
    return re.sub(rb"(?<!\r)\r+\n", b"\n", data) if b"\r" in data else data


def positions(text: bytes, byte: bytes) -> NDArray[np.int64]:
    """Return where a byte occurs."""
    return np.flatnonzero(np.frombuffer(text, np.uint8) == byte[0])


def pieces(text: bytes, *bounds: tuple[NDArray[np.int64], NDArray[np.int64]]) -> list[pl.Series]:
    """Return pieces of ``text`` (UTF-8) as columns, for beginnings and ends of each: no text is copied.

    The pieces of a row follow each other, as do the rows, and begin and end between characters.
    """
    count, width = len(bounds[0][0]), 2 * len(bounds)
    offsets = np.empty((count, width), np.int64)
    for index, (starts, ends) in enumerate(bounds):
        offsets[:, 2 * index], offsets[:, 2 * index + 1] = starts, ends
    flat = np.append(offsets, len(text))
    # Arrow reads the text at these offsets without further checks.
    if (flat[1:] < flat[:-1]).any() or flat[0] < 0:
        raise ValueError("pieces of text are out of order")
    arrow = pa.LargeStringArray.from_buffers(len(flat) - 1, pa.py_buffer(flat), pa.py_buffer(text))
    every = pl.Series(pl.from_arrow(arrow))
    return [every.gather_every(width, 2 * index) for index in range(len(bounds))]
