"""Reads as much of CRIU's image files as it takes to see that a dump is complete. No protobuf library is needed.

A file is one or two magic numbers, then records: a little-endian 32-bit length and a protobuf message of that length
(``criu/include/magic.h``, ``images/*.proto`` of CRIU 4.1). Only integers of the top level are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_affinode.checkpoint import rootdir

PAGE = 4096
_PRESENT = 1 << 2  # PE_PRESENT of a pagemap entry: its pages are in the pages file
_LIMIT = 1 << 30
_PAGEMAP = re.compile(r"pagemap-.+\.img")

Message = dict[int, list[int | bytes]]


class BadImage(ValueError):  # noqa: N818 - named for what it says
    """A file is missing, cut short, or says what cannot be."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What an image holds."""

    pids: tuple[int, ...]
    """Processes, root first, by their numbers in the namespace."""
    numbers: frozenset[int]
    """All numbers that a restore needs to be free: processes, threads, groups, sessions."""
    page_bytes: int
    size: int
    """Of all files."""
    frozen_s: float | None


def message(data: bytes) -> Message:
    """Fields of a protobuf message: number -> values in order. Raises ``BadImage``."""
    fields: Message = {}
    for number, value, _, _ in spans(data):
        fields.setdefault(number, []).append(value)
    return fields


def spans(data: bytes) -> Iterator[tuple[int, int | bytes, int, int]]:
    """Fields of a protobuf message in order: number, value, where it begins and ends. Raises ``BadImage``."""
    at = 0
    while at < len(data):
        begin = at
        tag, at = _varint(data, at)
        kind, number = tag & 7, tag >> 3
        value: int | bytes
        if kind == 0:
            value, at = _varint(data, at)
        elif kind == 2:
            length, at = _varint(data, at)
            value, at = data[at : at + length], at + length
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
            value, at = data[at : at + length], at + length
        else:
            raise BadImage(f"field of unknown kind {kind}")
        if at > len(data):
            raise BadImage("a message is cut short")
        yield number, value, begin, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise BadImage("a number is cut short")


def records(data: bytes, *, magics: int = 2) -> Iterator[Message]:
    """The messages of an image file, behind its ``magics`` words of four bytes. Raises ``BadImage``."""
    at = 4 * magics
    if len(data) < at:
        raise BadImage("no header")
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        at += 4
        if at + length > len(data) or at > len(data):
            raise BadImage("a record is cut short")
        yield message(data[at : at + length])
        at += length


def _number(fields: Message, key: int, default: int | None = None) -> int:
    value = fields.get(key, [default])[0]
    if not isinstance(value, int):
        raise BadImage(f"field {key} is missing")
    return value


def read_image(directory_fd: int, name: str) -> bytes:
    """A file of a dump. Raises ``BadImage``."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
    except OSError as error:
        raise BadImage(f"{name}: {error.strerror}") from None
    with os.fdopen(fd, "rb") as file:
        return file.read(_LIMIT)


def inspect(directory_fd: int) -> Inventory:
    """Look at the files of a dump: tree, memory maps, page files. Raises ``BadImage`` naming the file."""
    with rootdir.reading(directory_fd) as fd, os.scandir(fd) as entries:
        sizes = {
            entry.name: entry.stat(follow_symlinks=False).st_size
            for entry in entries
            if entry.is_file(follow_symlinks=False)
        }
    read_image(directory_fd, "inventory.img")
    pids: list[int] = []
    numbers: set[int] = set()
    for entry in _records(directory_fd, "pstree.img"):
        pid = _number(entry, 1)
        if _number(entry, 2) not in (0, *pids):
            raise BadImage(f"pstree.img: process {pid} has no parent")
        pids.append(pid)
        numbers |= {pid, _number(entry, 3), _number(entry, 4)}
        numbers |= {_number({5: [thread]}, 5) for thread in entry.get(5, []) if isinstance(thread, int)}
        for packed in entry.get(5, []):
            if isinstance(packed, bytes):
                numbers |= set(_packed(packed))
        for name in (f"core-{pid}.img", f"mm-{pid}.img", f"pagemap-{pid}.img"):
            # A zombie has a core and nothing else.
            if name.startswith("core") and not sizes.get(name):
                raise BadImage(f"{name}: missing or empty")
    if not pids:
        raise BadImage("pstree.img: no process")
    page_bytes = 0
    for name in filter(_PAGEMAP.fullmatch, sizes):
        page_bytes += _pages(directory_fd, name, sizes)
    if sizes.get(f"mm-{pids[0]}.img") is None or page_bytes == 0:
        raise BadImage(f"mm-{pids[0]}.img: the root has no memory")
    numbers.discard(0)
    return Inventory(tuple(pids), frozenset(numbers), page_bytes, sum(sizes.values()), _frozen_s(directory_fd))


def _records(directory_fd: int, name: str) -> Iterator[Message]:
    try:
        yield from records(read_image(directory_fd, name))
    except BadImage as error:
        text = str(error)
        raise BadImage(text if text.startswith(name) else f"{name}: {text}") from None


def _packed(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def _pages(directory_fd: int, name: str, sizes: dict[str, int]) -> int:
    """Bytes that a memory map promises; they must be in its pages file."""
    rows = _records(directory_fd, name)
    try:
        pages_id = _number(next(rows), 1)
    except StopIteration:
        raise BadImage(f"{name}: empty") from None
    # Field 5 is the count in 64 bits that newer versions write.
    count = sum(_number(row, 5, _number(row, 2, 0)) for row in rows if _number(row, 4, _PRESENT) & _PRESENT)
    held = sizes.get(f"pages-{pages_id}.img", 0)
    if held != count * PAGE:
        raise BadImage(f"pages-{pages_id}.img: {held} bytes in place of {count * PAGE}")
    return held


def _frozen_s(directory_fd: int) -> float | None:
    try:
        row = next(_records(directory_fd, "stats-dump"))
        dump = row[1][0]
        return _number(message(dump), 2) / 1e6 if isinstance(dump, bytes) else None
    except (BadImage, StopIteration, KeyError, IndexError):
        return None


_PREFIX = re.compile(r"^\([\d.]+\)\s*|^\s*(?:pie: )?\d+:\s*")
_WHERE = re.compile(r"Error \((?P<where>[^)]*)\):\s*(?P<what>.*)")
_EMPTY = (
    "rlimit: Can't setup RLIMIT_NOFILE for self",
    "Dumping FAILED",
    "Restoring FAILED",
    "Dump files (fd:",
    "Collect mappings",
    "Killing process",
)


def failure(log: str) -> str:
    """One line out of CRIU's log: its first error, which names the cause, and the second where it adds something."""
    found: list[str] = []
    for line in log.splitlines():
        match = _WHERE.search(_PREFIX.sub("", line))
        if match and match["what"].strip() and not match["what"].startswith(_EMPTY) and match["what"] not in found:
            found.append(" ".join(match["what"].split()))
    if not found:
        return "it did not say why"
    return "; ".join(found[:2])


def log_of(path: Path) -> str:
    """A log's text, or none."""
    try:
        return path.read_text(encoding="utf-8", errors="backslashreplace")
    except OSError:
        return ""
