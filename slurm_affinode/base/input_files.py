"""Input files as found in practice: compressed, in UTF-16, with other line ends, damaged; read as lines of UTF-8.

Memory is bounded: by the chunk and the longest line of text, by ``limits.DOCUMENT_BYTES`` for a compressed document.
So is the time that a compressed file takes: by ``limits.most_unpacked``.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

import numpy as np

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.limits import DOCUMENT_BYTES, UNPACKED_RATIO, most_unpacked

MAGIC_BYTES = 8
"""Number of bytes that ``compression`` examines."""
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
"""Errors of reading a damaged or truncated file, besides ``OSError`` without an ``errno``."""
_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
)
ARCHIVE_BYTES = 262
"""Number of bytes that ``archive`` examines."""
_ARCHIVES = ((b"PK\x03\x04", "zip"), (b"PK\x05\x06", "zip"), (b"7z\xbc\xaf\x27\x1c", "7z"))
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f]")
_MOST_NUL_LINES = 1000
_BLOCK = 1 << 16
"""Bytes of a compressed file that are read at once; of some formats, this much before a damage is lost."""
_COUNTED = 1 << 16
"""Bytes compared at a time: their masks stay in the cache."""


class _Utf8(io.RawIOBase):
    """Recodes UTF-16 to UTF-8, block by block."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-16")("replace")
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        ended = False
        while not self._pending and not ended:
            data = self._file.read(_BLOCK)
            ended = not data
            self._pending = self._decoder.decode(data, final=ended).encode("utf-8", "replace")
        chunk, self._pending = self._pending[: len(buffer)], self._pending[len(buffer) :]
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def close(self) -> None:
        self._file.close()
        super().close()


def utf8_stream(file: io.BufferedReader[Any]) -> io.BufferedReader[Any]:
    """Return ``file``, recoded to UTF-8 if it begins with a UTF-16 byte order mark, as written by PowerShell's ``>``.

    ``file`` is closed with the result.
    """
    if not file.peek(2).startswith(_UTF16):
        return file
    return io.BufferedReader(_Utf8(cast("BinaryIO", file)))


def is_binary(head: bytes) -> bool:
    """Return whether a file is binary by its beginning: NUL bytes, and control characters in most lines."""
    if b"\0" not in head:
        return False
    lines = [line for line in head.split(b"\n") if line.strip()]
    binary_lines = sum(_CONTROL.search(line) is not None for line in lines)
    return 2 * binary_lines > len(lines)


def ends_in_cr(head: bytes) -> bool:
    """Return whether the lines of a text that begins with ``head`` end in a carriage return alone."""
    return b"\n" not in head and b"\r" in head.rstrip(b"\r")


def whole_lines(
    read: Callable[[int], bytes], chunk: int, *, where: str, longest: int, reject: Callable[[int, str, bytes], None]
) -> Iterator[bytes]:
    """Yield the text from ``read`` in pieces of about ``chunk`` bytes that end with a line; the last line may be open.

    Lines end in LF, or in CR alone if the first piece has no LF. A line that contains NUL bytes or is longer than
    ``longest`` bytes is replaced with an empty line, and passed to ``reject`` with its number, from 1, the reason, and
    its beginning. Raises ``InputError`` after 1000 lines with NUL bytes.
    """
    nul_lines = 0

    def refuse(line: int, data: bytes) -> bool:
        nonlocal nul_lines
        position = data.find(b"\0")
        if position >= 0:
            nul_lines += 1
            if nul_lines > _MOST_NUL_LINES:
                raise InputError("is a binary file, not text", where=f"{where}:{line}")
            reject(line, f"holds a NUL byte in column {position + 1}: the file may be damaged", data)
        elif len(data) > longest:
            reject(line, f"is longer than {longest >> 10:,} KiB", data)
        return position >= 0 or len(data) > longest

    def cleaned(data: bytes) -> bytes:
        if b"\0" not in data and not _has_run(data, longest):
            return data
        return b"\n".join(
            b"" if refuse(number + offset, line) else line for offset, line in enumerate(data.split(b"\n"))
        )

    number, tail, returns, skipping = 1, b"", None, False
    while data := read(chunk):
        returns = ends_in_cr(data) if returns is None else returns
        if returns:
            data = data.replace(b"\r", b"\n")
        if skipping:
            if (end := data.find(b"\n")) < 0:
                continue
            data, skipping = data[end:], False
        end = data.rfind(b"\n") + 1
        if end == len(data):
            piece = tail + data if tail else data  # without a tail, nothing is copied
        else:
            piece = b"".join((tail, memoryview(data)[:end])) if end else b""  # copies once
        tail = data[end:] if end else tail + data
        if piece:
            yield cleaned(piece)
            number += count_byte(piece, b"\n")
        if len(tail) > longest and refuse(number, tail):
            tail, skipping = b"", True
    if tail and (rest := cleaned(tail)):
        yield rest


def count_byte(data: bytes, byte: bytes) -> int:
    """Return how often one byte occurs; ``bytes.count`` is slow for a byte as frequent as a delimiter."""
    values = np.frombuffer(data, np.uint8)
    blocks = (values[offset : offset + _COUNTED] for offset in range(0, len(values), _COUNTED))
    return sum(int(np.count_nonzero(block == byte[0])) for block in blocks)


def _has_run(data: bytes, longest: int) -> bool:
    """Return whether ``data`` may have a line longer than ``longest``: a block of half the size without a line end."""
    step = max(1, longest // 2)
    return len(data) > longest and any(
        data.find(b"\n", offset, offset + step) < 0 for offset in range(0, len(data) - step + 1, step)
    )


def document(file: BinaryIO, *, where: str, packed: bool) -> bytes:
    """Return all of ``file``. Raises ``InputError`` if it is ``packed`` and too large when decompressed."""
    if not packed:
        return file.read()
    blocks: list[bytes] = []
    size = 0
    while data := file.read(_BLOCK * 16):
        size += len(data)
        if size > DOCUMENT_BYTES:
            raise InputError(
                f"unpacks to more than {DOCUMENT_BYTES >> 30} GiB", where=where, hint="split it, or unpack it yourself"
            )
        blocks.append(data)
    return b"".join(blocks)


def compression(head: bytes) -> str | None:
    """Return the compression of a file that begins with ``head``: ``gzip zstd bzip2 xz``; ``None``: not compressed."""
    return next((name for mark, name in _MAGIC if head.startswith(mark)), None)


def archive(head: bytes) -> str | None:
    """Return the kind of archive with files that begins with ``head``: ``zip``, ``tar``, ``7z``; ``None``: it is none.

    A compressed tar archive is one once it is decompressed. ``head``: at least ``ARCHIVE_BYTES``, if there are as many.
    """
    if head[257:262] == b"ustar" and b"\0" in head[:257]:
        return "tar"
    return next((name for mark, name in _ARCHIVES if head.startswith(mark)), None)


def unpacked(file: BinaryIO, kind: str, *, where: str) -> BinaryIO:
    """Return a file with the decompressed contents of ``file``, which stays open when the result is closed.

    Reading raises ``InputError`` for the file ``where`` if it unpacks to more than ``limits.most_unpacked``.
    """
    counted = _Counted(file)
    return cast("BinaryIO", LimitedReader(_decompressed(cast("BinaryIO", counted), kind), lambda: counted.size, where))


def _decompressed(file: BinaryIO, kind: str) -> BinaryIO:
    if kind == "gzip":
        return cast("BinaryIO", gzip.GzipFile(fileobj=file))
    if kind == "bzip2":
        return cast("BinaryIO", bz2.BZ2File(file))
    if kind == "xz":
        return cast("BinaryIO", lzma.LZMAFile(file))
    import pyarrow as pa  # noqa: PLC0415 - takes long, and is seldom needed

    return cast("BinaryIO", pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd"))


class _Counted:
    """A file that counts the bytes read from it."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.size += len(data)
        return data

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        pass


class LimitedReader(io.RawIOBase):
    """The contents of a compressed file, block by block, up to the size that its compressed size permits."""

    def __init__(self, file: BinaryIO, packed: Callable[[], int], where: str) -> None:
        """``file``: decompresses; ``packed``: returns the size of the compressed file, or what was read of it."""
        self._file, self._packed, self._where = file, packed, where
        self._size = 0

    def readable(self) -> bool:
        """See ``io``."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See ``io``. Raises ``InputError`` above the limit."""
        data: bytes = self._file.read1(min(len(buffer), _BLOCK))  # type: ignore[attr-defined]
        self._size += len(data)
        if self._size > DOCUMENT_BYTES and self._size > most_unpacked(self._packed()):
            raise InputError(
                f"unpacks to more than {DOCUMENT_BYTES >> 30} GiB, and to more than {UNPACKED_RATIO} times its size",
                where=self._where, hint="if it is not forged, unpack it yourself, and give the unpacked file",
            )  # fmt: skip
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the decompressing file."""
        self._file.close()
        super().close()
