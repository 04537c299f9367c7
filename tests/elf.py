"""Linker properties of 64-bit little-endian ELF files, and a library made of constants. Source: elf(5)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

_LOAD, _DYNAMIC, _INTERP, _STACK, _RELRO = 1, 2, 3, 0x6474E551, 0x6474E552
_FLAGS, _FLAGS_1 = 30, 0x6FFFFFFB
_BIND_NOW, _NOW, _PIE = 8, 1, 0x08000000


@dataclass(frozen=True, slots=True)
class Elf:
    """An ELF file."""

    shared: bool
    """A shared library or a position-independent executable."""
    pie: bool
    interpreted: bool
    """It has a dynamic loader."""
    executable_stack: bool
    relro: bool
    now: bool
    """All symbols are bound at startup, so that the relocation tables can be read-only."""


def read(data: bytes) -> Elf:
    """Raises ``ValueError`` if ``data`` is no such file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not an ELF file of 64 bits, little-endian")
    kind, start, size, count = (
        *struct.unpack_from("<H", data, 16), *struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54),
    )  # fmt: skip
    headers = [struct.unpack_from("<IIQQQQQQ", data, start + size * at) for at in range(count)]
    kinds = {header[0]: header for header in headers}
    flags = {}
    if _DYNAMIC in kinds:
        _, _, offset, _, _, length, *_ = kinds[_DYNAMIC]
        flags = dict(struct.iter_unpack("<QQ", data[offset : offset + length]))
    return Elf(
        shared=kind == 3,
        pie=bool(flags.get(_FLAGS_1, 0) & _PIE),
        interpreted=_INTERP in kinds,
        executable_stack=_STACK not in kinds or bool(kinds[_STACK][1] & 1),
        relro=_RELRO in kinds,
        now=bool(flags.get(_FLAGS, 0) & _BIND_NOW or flags.get(_FLAGS_1, 0) & _NOW),
    )


def library(constants: Mapping[str, bytes], *, more: bytes = b"") -> bytes:
    """Return a library that exports constants and nothing else. It is loaded at another address than its offset.

    ``more``: bytes that follow the constants.
    """
    address, begin = 0x4000, 64 + 56
    values = b"".join(constants.values()) + more
    names = b"\0" + b"".join(name.encode() + b"\0" for name in constants)
    symbols, name_at, value_at = bytes(24), 1, address
    for name, value in constants.items():
        symbols += struct.pack("<IBBHQQ", name_at, 0x11, 0, 1, value_at, len(value))
        name_at, value_at = name_at + len(name) + 1, value_at + len(value)
    names_at, symbols_at = begin + len(values), begin + len(values) + len(names)
    sections_at = symbols_at + len(symbols)
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, sections_at, 0, 64, 56, 1, 64, 3, 0)
    program = struct.pack("<IIQQQQQQ", _LOAD, 4, begin, address, address, len(values), len(values), 1)
    sections = bytes(64)
    sections += struct.pack("<IIQQQQIIQQ", 0, 11, 2, 0, symbols_at, len(symbols), 2, 1, 8, 24)
    sections += struct.pack("<IIQQQQIIQQ", 0, 3, 2, 0, names_at, len(names), 0, 0, 1, 0)
    return header + program + values + names + symbols + sections
