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
from slurm_affinode.limits import GPU_LINE_BYTES
from slurm_affinode.packed import DAMAGED, MAGIC_BYTES, compression, ends_in_cr, utf8_stream, whole_lines

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
    return utf8_stream(file)


def head(path: Path) -> bytes:
    """The first 64 KiB of a file, decompressed, with LF at line ends."""
    with reading(str(path)), open_binary(path) as file:
        start = file.read(64 * 1024)
    return start.replace(b"\r", b"\n") if ends_in_cr(start) else start


def blocks(
    path: Path,
    name: str,
    *,
    chunk: int = CHUNK,
    advance: Callable[[int], None] = lambda count: None,
    reject: Callable[[int, str, bytes], None] = lambda line, why, data: None,
) -> Iterator[Block]:
    """The lines of a file, some megabytes at a time; bytes that are not UTF-8 become the replacement character.

    ``advance`` hears how many bytes of text were used, ``reject`` of lines that cannot be read (see ``whole_lines``).
    Raises ``InputError`` for what is no text or cannot be read.
    """
    number = 1
    with reading(name), open_binary(path) as file:
        for at, piece in enumerate(whole_lines(file.read, chunk, where=name, longest=GPU_LINE_BYTES, reject=reject)):
            data = piece if at else piece.removeprefix(b"\xef\xbb\xbf")
            complete = data.endswith(b"\n")
            lines = _lines((data[:-1] if complete else data).decode("utf-8", "replace"), number)
            number += len(lines)
            yield Block(lines, None if complete else number - 1)
            advance(len(piece))


def _lines(text: str, first: int) -> pl.DataFrame:
    lines = pl.Series("line", [text]).str.split("\n").explode(empty_as_null=False).str.strip_chars_end("\r")
    return pl.DataFrame({"line": lines, "number": pl.int_range(first, first + len(lines), eager=True)})
