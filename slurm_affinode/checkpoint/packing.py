"""Files of an image compressed with zstd, still read and written in any order.

``NAME.zst`` holds each chunk of 8 MiB of ``NAME`` in a slot of its own, at the place where it would be without
compression: what a chunk saves is a hole behind it, so that copies are made by several threads and taken up as others
are. A slot begins with its form and length; a chunk of zeros is a hole altogether. Digests are of the contents, not of
this form: what is unpacked is not believed before its digest is right.
"""

from __future__ import annotations

import importlib
import os
import struct
import zlib
from functools import cache
from typing import Any

from slurm_affinode.checkpoint import digest
from slurm_affinode.checkpoint.blockio import ALIGN, CHUNK, buffer
from slurm_affinode.checkpoint.interface import CheckpointError, ImageDamaged

SUFFIX = ".zst"
LEAST = 1 << 20
"""Smaller files stay as they are."""
_SLOT = CHUNK + ALIGN
_HEADER = struct.Struct("<8sQI")
"""Form, length of the data, CRC-32 of these two."""
_ZSTD, _RAW, _ZERO = b"AF-ZSTD1", b"AF-RAW-1", bytes(8)


@cache
def zstd() -> Any | None:
    """The module ``zstandard``; ``None``: it is not there. (The standard library has zstd from Python 3.14 on.)"""
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
    """In a block."""
    return -(-digest.BLOCK // CHUNK)


def packed_size(size: int) -> int:
    """Of the file ``NAME.zst``, holes counted, where ``NAME`` has so many bytes."""
    last = digest.count(size) - 1
    return (last * _chunks() + max(1, -(-(size - last * digest.BLOCK) // CHUNK))) * _SLOT


def blocks_begun(size: int) -> int:
    """Blocks before the end of such a file."""
    return size // (_chunks() * _SLOT)


def _check(form: bytes, length: int) -> int:
    return zlib.crc32(form + length.to_bytes(8, "little"))


def write(fd: int, block: int, at: int, view: memoryview, level: int) -> None:
    """Put a chunk that is not all 0 into its slot; ``at``: where in the block it begins."""
    module = _needed()
    data, form = module.ZstdCompressor(level=level).compress(view), _ZSTD
    if len(data) >= len(view):
        data, form = view, _RAW
    place = (block * _chunks() + at // CHUNK) * _SLOT
    parts = memoryview(_HEADER.pack(form, len(data), _check(form, len(data))) + bytes(data))
    while parts:
        done = os.pwrite(fd, parts, place)
        parts, place = parts[done:], place + done


def read(fd: int, block: int, at: int, view: memoryview) -> None:
    """Unpack a chunk. Raises ``ImageDamaged``, ``CheckpointError`` without the module."""
    place = (block * _chunks() + at // CHUNK) * _SLOT
    header = os.pread(fd, _HEADER.size, place)
    form, length, check = _HEADER.unpack(header) if len(header) == _HEADER.size else (_ZERO, 0, 0)
    if (form, length, check) == (_ZERO, 0, 0):
        view[:] = bytes(len(view))
        return
    data = os.pread(fd, min(length, _SLOT), place + _HEADER.size)
    module = _needed()
    try:
        # Of the size that a frame says it has memory is taken before anything of it is looked at.
        if form != _RAW and module.frame_content_size(data) != len(view):
            raise ImageDamaged("it cannot be unpacked")
        found = data if form == _RAW else module.ZstdDecompressor(max_window_size=CHUNK).decompress(data)
    except module.ZstdError:
        found = b""
    if form not in (_RAW, _ZSTD) or check != _check(form, length) or len(found) != len(view):
        raise ImageDamaged("it cannot be unpacked")
    view[:] = found


def block(kind: digest.Kind, fd: int, number: int, size: int, take: digest.Piece | None = None) -> bytes:
    """Hash of a block of a packed file whose contents have ``size`` bytes, as ``digest.block``."""
    state, chunk = kind.new(), buffer()
    begin, end = number * digest.BLOCK, min(size, (number + 1) * digest.BLOCK)
    for at in range(begin, end, CHUNK):
        view = chunk.view[: min(CHUNK, end - at)]
        read(fd, number, at - begin, view)
        state.update(view)
        if take is not None:
            take(at, view)
    return state.digest()
