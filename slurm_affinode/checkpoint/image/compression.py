"""Random-access zstd compression of the files of a checkpoint image.

``NAME.zst`` holds each 8 MiB chunk of ``NAME`` in a slot of fixed size, and the space saved is a hole at the end of the
slot. So several threads can write a copy, and an interrupted copy can be continued, as without compression. A slot
begins with its format and length; a chunk of zeros is a hole. Digests cover the uncompressed contents: decompressed
data is not trusted until its digest has been verified.
"""

from __future__ import annotations

import importlib
import os
import struct
import zlib
from functools import cache
from typing import Any

from slurm_affinode.checkpoint.image import digest
from slurm_affinode.checkpoint.image.block_io import ALIGN, CHUNK, buffer
from slurm_affinode.checkpoint.interface import CheckpointError, ImageDamaged

SUFFIX = ".zst"
LEAST = 1 << 20
"""Files smaller than this are not compressed, in bytes."""
_SLOT = CHUNK + ALIGN
_HEADER = struct.Struct("<8sQI")
"""Format, length of the data, CRC-32 of these two."""
_ZSTD, _RAW, _ZERO = b"AF-ZSTD1", b"AF-RAW-1", bytes(8)


@cache
def zstd() -> Any | None:
    """Return the module ``zstandard``, or ``None`` if it is not installed. (Python 3.14 has zstd built in.)"""
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        return None


def _needed() -> Any:
    module = zstd()
    if module is None:
        raise CheckpointError("it is compressed with zstd", hint="install the Python package zstandard on this node")
    return module


def _chunks() -> int:
    """Return the number of chunks per block."""
    return -(-digest.BLOCK // CHUNK)


def packed_size(size: int) -> int:
    """Return the size of ``NAME.zst``, including holes, if ``NAME`` has ``size`` bytes."""
    last = digest.count(size) - 1
    return (last * _chunks() + max(1, -(-(size - last * digest.BLOCK) // CHUNK))) * _SLOT


def blocks_begun(size: int) -> int:
    """Return the number of complete blocks in a compressed file of ``size`` bytes, including holes."""
    return size // (_chunks() * _SLOT)


def _check(form: bytes, length: int) -> int:
    return zlib.crc32(form + length.to_bytes(8, "little"))


def write(fd: int, block: int, offset: int, view: memoryview, level: int) -> None:
    """Compress a chunk that is not all zeros into its slot; ``offset`` is its offset in the block."""
    module = _needed()
    data, form = module.ZstdCompressor(level=level).compress(view), _ZSTD
    if len(data) >= len(view):
        data, form = view, _RAW
    place = (block * _chunks() + offset // CHUNK) * _SLOT
    parts = memoryview(_HEADER.pack(form, len(data), _check(form, len(data))) + bytes(data))
    while parts:
        written = os.pwrite(fd, parts, place)
        parts, place = parts[written:], place + written


def read(fd: int, block: int, offset: int, view: memoryview) -> None:
    """Decompress a chunk. Raises ``ImageDamaged``, or ``CheckpointError`` if ``zstandard`` is not installed."""
    place = (block * _chunks() + offset // CHUNK) * _SLOT
    header = os.pread(fd, _HEADER.size, place)
    form, length, check = _HEADER.unpack(header) if len(header) == _HEADER.size else (_ZERO, 0, 0)
    if (form, length, check) == (_ZERO, 0, 0):
        view[:] = bytes(len(view))
        return
    data = os.pread(fd, min(length, _SLOT), place + _HEADER.size)
    module = _needed()
    try:
        # The decompressor allocates the size in the frame header before it validates any data.
        if form != _RAW and module.frame_content_size(data) != len(view):
            raise ImageDamaged("it cannot be unpacked")
        unpacked = data if form == _RAW else module.ZstdDecompressor(max_window_size=CHUNK).decompress(data)
    except module.ZstdError:
        unpacked = b""
    if form not in (_RAW, _ZSTD) or check != _check(form, length) or len(unpacked) != len(view):
        raise ImageDamaged("it cannot be unpacked")
    view[:] = unpacked


def block(kind: digest.DigestAlgorithm, fd: int, number: int, size: int, take: digest.Piece | None = None) -> bytes:
    """Return the hash of a block of a compressed file, as ``digest.block``. ``size``: uncompressed, in bytes."""
    state, chunk = kind.new(), buffer()
    begin, end = number * digest.BLOCK, min(size, (number + 1) * digest.BLOCK)
    for offset in range(begin, end, CHUNK):
        view = chunk.view[: min(CHUNK, end - offset)]
        read(fd, number, offset - begin, view)
        state.update(view)
        if take is not None:
            take(offset, view)
    return state.digest()
