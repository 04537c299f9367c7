"""Text files as blocks of lines: decompressed, decoded, numbered; and what is wrong with a file as a whole."""

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

from slurm_affinode.errors import InputError, one_line
from slurm_affinode.packed import DAMAGED, MAGIC_BYTES, compression, utf8_stream

CHUNK = 16 * 2**20
_AGAIN = "copy the file again; nothing of it was taken in"


@dataclass(frozen=True, slots=True)
class Block:
    """Some lines of a file."""

    lines: pl.DataFrame
    """``line`` (without its end) and ``number`` (from 1)."""
    open_line: int | None
    """Number of the last line of the file, in its last block, where that line has no end; else None."""

    def cut_off(self, number: int, name: str) -> None:
        """Raise ``InputError`` if the line, which cannot be read, is the unfinished last one: the file is cut off."""
        if number == self.open_line:
            raise InputError("is cut off in its last line", where=f"{name}:{number}", hint=_AGAIN)


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn what can go wrong while a file is read into one line that names it: an ``InputError``."""
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
    """How the file is compressed, told by its first bytes."""
    with path.open("rb") as file:
        return compression(file.read(MAGIC_BYTES))


def open_binary(path: Path) -> BinaryIO:
    """Open a file, decompressing gzip, zstd, bzip2 and xz; text in UTF-16 is read as UTF-8."""
    openers: dict[str | None, Callable[[], object]] = {
        None: lambda: path.open("rb", buffering=0),
        "gzip": lambda: gzip.open(path, "rb"),  # noqa: SIM115 - the caller closes it
        "bzip2": lambda: bz2.open(path, "rb"),  # noqa: SIM115
        "xz": lambda: lzma.open(path, "rb"),  # noqa: SIM115
        "zstd": lambda: pa.CompressedInputStream(pa.OSFile(str(path), "rb"), "zstd"),
    }
    file = io.BufferedReader(cast("io.RawIOBase", openers[compression_of(path)]()))
    text = utf8_stream(file)
    if text is not file:
        file.close()
    return text


def head(path: Path) -> bytes:
    """The first 64 KiB of a file, decompressed."""
    with reading(str(path)), open_binary(path) as file:
        return file.read(64 * 1024)


def decoded(data: bytes, name: str) -> str:
    """``data`` as text; bytes that are not UTF-8 become the replacement character. Raises for binary data."""
    if b"\0" in data:
        raise InputError("is a binary file, not text", where=name, hint="see --format for what can be read")
    return data.decode("utf-8", "replace")


def blocks(
    path: Path, name: str, *, chunk: int = CHUNK, advance: Callable[[int], None] = lambda count: None
) -> Iterator[Block]:
    """The lines of a file, some megabytes at a time; ``advance`` hears how many bytes of text were used.

    Raises ``InputError`` for what is no text or cannot be read.
    """
    number = 1
    tail = b""
    with reading(name), open_binary(path) as file:
        first = True
        while data := file.read(chunk):
            if first:
                data, first = data.removeprefix(b"\xef\xbb\xbf"), False
            data = tail + data
            end = data.rfind(b"\n") + 1
            whole, tail = data[:end], data[end:]
            if whole:
                lines = _lines(decoded(whole[:-1], name), number)
                number += len(lines)
                yield Block(lines, None)
                advance(len(whole))
    if tail:
        yield Block(_lines(decoded(tail, name), number), number)


def _lines(text: str, first: int) -> pl.DataFrame:
    lines = pl.Series("line", [text]).str.split("\n").explode(empty_as_null=False).str.strip_chars_end("\r")
    return pl.DataFrame({"line": lines, "number": pl.int_range(first, first + len(lines), eager=True)})
