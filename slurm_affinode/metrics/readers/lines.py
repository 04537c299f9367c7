"""Text files as blocks of lines: decompressed, decoded, numbered; and errors of a file as a whole."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import polars as pl
import pyarrow as pa

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.input_files import (
    DAMAGED,
    MAGIC_BYTES,
    LimitedReader,
    compression,
    ends_in_cr,
    utf8_stream,
    whole_lines,
)
from slurm_affinode.base.limits import GPU_LINE_BYTES
from slurm_affinode.base.text import one_line

CHUNK = 16 * 2**20
_AGAIN = "copy the file again; nothing of it was ingested"


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Consecutive lines of a file."""

    lines: pl.DataFrame
    """``line`` (without its end) and ``number`` (from 1)."""
    open_line: int | None
    """In the last block: number of the last line of the file, if it has no line end; else None."""

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
        yield from _blocks(until_damage(file), name, chunk, advance, reject)


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
    for at, piece in enumerate(whole_lines(read, chunk, where=name, longest=GPU_LINE_BYTES, reject=reject)):
        data = piece if at else piece.removeprefix(b"\xef\xbb\xbf")
        complete = data.endswith(b"\n")
        lines = lines_of((data[:-1] if complete else data).decode("utf-8", "replace"), number)
        number += len(lines)
        yield LineBlock(lines, None if complete else number - 1)
        advance(len(piece))


def lines_of(text: str, first: int) -> pl.DataFrame:
    """Return ``line`` and ``number``, from ``first``, of a text without the end of its last line."""
    lines = pl.Series("line", [text]).str.split("\n").explode(empty_as_null=False).str.strip_chars_end("\r")
    return pl.DataFrame({"line": lines, "number": pl.int_range(first, first + len(lines), eager=True)})
