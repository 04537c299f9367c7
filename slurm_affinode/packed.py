"""Compressed files, and text in UTF-16: told by their first bytes, read as what is in them."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from typing import Any, BinaryIO, cast

MAGIC_BYTES = 8
"""How many bytes of a file ``compression`` looks at."""
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
"""What reading a damaged or cut file raises, beside ``OSError`` without an ``errno``."""
_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
)
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def utf8(data: bytes) -> bytes:
    """``data`` as UTF-8 where it begins with the mark of UTF-16, in which PowerShell's ``>`` writes; else as it is."""
    return data.decode("utf-16", "replace").encode() if data.startswith(_UTF16) else data


def utf8_stream(file: io.BufferedReader[Any]) -> io.BufferedReader[Any]:
    """``file`` or, where it holds UTF-16, the same text as UTF-8; ``file`` is read to its end then, and stays open."""
    if not file.peek(2).startswith(_UTF16):
        return file
    return io.BufferedReader(cast("io.RawIOBase", io.BytesIO(utf8(file.read()))))


def compression(head: bytes) -> str | None:
    """How a file that begins with ``head`` is compressed: ``gzip zstd bzip2 xz``; None: it is not."""
    return next((name for mark, name in _MAGIC if head.startswith(mark)), None)


def unpacked(file: BinaryIO, kind: str) -> BinaryIO:
    """What is in ``file``, which is compressed as ``kind`` and stays open when the result is closed."""
    if kind == "gzip":
        return cast("BinaryIO", gzip.GzipFile(fileobj=file))
    if kind == "bzip2":
        return cast("BinaryIO", bz2.BZ2File(file))
    if kind == "xz":
        return cast("BinaryIO", lzma.LZMAFile(file))
    import pyarrow as pa  # noqa: PLC0415 - takes long, and is seldom needed

    return cast("BinaryIO", pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd"))
