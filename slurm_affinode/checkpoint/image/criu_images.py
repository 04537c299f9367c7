"""A minimal reader for CRIU's image files, to check that a dump is complete. Needs no protobuf library.

A file is one or two magic numbers followed by records: a little-endian 32-bit length and a protobuf message of that
length (``criu/include/magic.h``, ``images/*.proto`` of CRIU 4.1). Only top-level integers are decoded.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slurm_affinode.base.text import one_line
from slurm_affinode.checkpoint import root_directory

PAGE = 4096
# Flags of a pagemap entry (``criu/include/pagemap.h``): its pages may be filled lazily; they are in the pages file.
LAZY, PRESENT = 1 << 1, 1 << 2
_MAGICS = 8  # bytes: the two magic numbers of an image file
_LIMIT = 1 << 30
_MOST_BYTES = 10
"""Of a 64-bit number."""
_PAGEMAP = re.compile(r"pagemap-.+\.img")
_INVENTORY = "inventory.img"
_ROOT_IDS = 3
_NAMESPACES = (5, 6, 7, 9, 10, 11)
"""Fields of ``task_kobj_ids_entry`` (``images/core.proto``): PID, network, IPC, mount, user and cgroup namespace. CRIU
restores every tree in a time namespace, and the agent may have a host name of its own.
"""
_NONE: Mapping[str, int] = {}

Message = dict[int, list[int | bytes]]


class BadImage(ValueError):  # noqa: N818 - named for what it says
    """A file of the dump is missing, truncated or inconsistent."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """Contents of a dump."""

    pids: tuple[int, ...]
    """Processes, root first, as PIDs in the job's namespace."""
    numbers: frozenset[int]
    """All IDs that must be free for a restore: processes, threads, process groups, sessions."""
    threads: tuple[int, ...]
    """Threads of all processes except zombies, including the main threads."""
    parents: Mapping[int, int]
    """PID -> PID of the parent; 0 for the root."""
    with_memory: tuple[int, ...]
    """Processes that are not zombies."""


def message(data: bytes) -> Message:
    """Decode a protobuf message: field number -> values in order. Raises ``BadImage``."""
    fields: Message = {}
    for number, value, _, _ in spans(data):
        fields.setdefault(number, []).append(value)
    return fields


def spans(data: bytes) -> Iterator[tuple[int, int | bytes, int, int]]:
    """Yield the fields of a protobuf message in order: number, value, begin, end. Raises ``BadImage``."""
    offset, size = 0, len(data)
    while offset < size:
        begin = offset
        tag = data[offset]
        if tag < 0x80:  # without a call: nearly all tags and half of the values have one byte
            offset += 1
        else:
            tag, offset = _varint(data, offset)
        kind, number = tag & 7, tag >> 3
        value: int | bytes
        if kind == 0:
            if offset < size and data[offset] < 0x80:
                value, offset = data[offset], offset + 1
            else:
                value, offset = _varint(data, offset)
        elif kind == 2:
            length, offset = _varint(data, offset)
            value, offset = data[offset : offset + length], offset + length
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
            value, offset = data[offset : offset + length], offset + length
        else:
            raise BadImage(f"field of unknown kind {kind}")
        if offset > size:
            raise BadImage("a message is cut short")
        yield number, value, begin, offset


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    for byte in data[offset : offset + _MOST_BYTES]:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80 and value < 1 << 64:
            return value, offset + shift // 7
    raise BadImage("a number is cut short")


def records(data: bytes) -> Iterator[Message]:
    """Yield the decoded messages of an image file. Raises ``BadImage``."""
    return map(message, bodies(data))


def bodies(data: bytes) -> Iterator[bytes]:
    """Yield the encoded messages of an image file that has two 4-byte magic numbers. Raises ``BadImage``."""
    offset = _MAGICS
    if len(data) < offset:
        raise BadImage("no header")
    while offset < len(data):
        length = int.from_bytes(data[offset : offset + 4], "little")
        offset += 4
        if offset + length > len(data) or offset > len(data):
            raise BadImage("a record is cut short")
        yield data[offset : offset + length]
        offset += length


def framed(body: bytes) -> bytes:
    """Frame a message as a record of an image file."""
    return len(body).to_bytes(4, "little") + body


def encoded(number: int, value: int | bytes) -> bytes:
    """Encode a field of a message. Integers must not be negative."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def with_field(body: bytes, number: int, value: int | bytes) -> bytes:
    """Return a message with another value in a field that it has. Raises ``BadImage``."""
    new_field = encoded(number, value)
    return b"".join(new_field if span == number else body[begin:end] for span, _, begin, end in spans(body))


def varint(value: int) -> bytes:
    """Encode a nonnegative integer as a protobuf varint."""
    packed = bytearray()
    while value > 0x7F:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*packed, value])


def integer(fields: Message, key: int, default: int | None = None) -> int:
    """Return an integer field of a message. Raises ``BadImage`` if it is missing and there is no default."""
    value = fields.get(key, [default])[-1]  # the last occurrence wins, as in CRIU
    if not isinstance(value, int):
        raise BadImage(f"field {key} is missing")
    return value


def read_image(directory_fd: int, name: str) -> bytes:
    """Read a file of a dump. Raises ``BadImage``."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
    except OSError as error:
        raise BadImage(f"{name}: {error.strerror}") from None
    with os.fdopen(fd, "rb") as file:
        # Python allocates all that it may read at once: 1 GiB for every file without the size.
        return file.read(min(os.fstat(fd).st_size, _LIMIT))


def rewrite(directory_fd: int, name: str, changed: Callable[[bytes], bytes]) -> None:
    """Rewrite a file of a dump with each of its records changed. Raises ``BadImage``, ``OSError``."""
    before = read_image(directory_fd, name)
    after = before[:_MAGICS] + b"".join(framed(changed(body)) for body in bodies(before))
    if after != before:
        fd = os.open(name, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
        with os.fdopen(fd, "wb") as file:
            file.write(after)


def inspect(directory_fd: int, other_files: Mapping[str, int] = _NONE) -> Inventory:
    """Check the files of a dump: process tree, namespaces, memory maps, page files.

    Raises ``BadImage`` naming the file.

    ``other_files``: name -> size of files that belong to the dump but are not in the directory.
    """
    with root_directory.reading(directory_fd) as fd, os.scandir(fd) as entries:
        sizes = {
            entry.name: entry.stat(follow_symlinks=False).st_size
            for entry in entries
            if entry.is_file(follow_symlinks=False)
        } | dict(other_files)
    for name in sizes:
        if name.startswith("creds-"):
            raise BadImage(f"{name}: is of an older version of CRIU")
    _check_namespaces(directory_fd, [name for name in sizes if name.startswith("ids-")])
    parents: dict[int, int] = {}
    numbers: set[int] = set()
    threads: dict[int, None] = {}
    for entry in image_records(directory_fd, "pstree.img"):
        pid = integer(entry, 1)
        if pid in parents:
            raise BadImage(f"pstree.img: process {pid} is there twice")
        if integer(entry, 2) not in (parents or (0,)):
            raise BadImage(f"pstree.img: process {pid} has no parent")
        parents[pid] = integer(entry, 2)
        numbers |= {pid, integer(entry, 3), integer(entry, 4)}
        if f"mm-{pid}.img" in sizes:  # for a zombie CRIU does not write valid thread IDs
            threads |= dict.fromkeys([pid, *repeated(entry, 5)])
        for name in (f"core-{pid}.img", f"mm-{pid}.img", f"pagemap-{pid}.img"):
            # A zombie has only a core file.
            if name.startswith("core") and not sizes.get(name):
                raise BadImage(f"{name}: missing or empty")
    if not parents:
        raise BadImage("pstree.img: no process")
    page_bytes = sum(_pages(directory_fd, name, sizes) for name in filter(_PAGEMAP.fullmatch, sizes))
    pids = tuple(parents)
    if sizes.get(f"mm-{pids[0]}.img") is None or page_bytes == 0:
        raise BadImage(f"mm-{pids[0]}.img: the root process has no memory")
    numbers |= set(threads)
    numbers.discard(0)
    with_memory = tuple(pid for pid in pids if f"mm-{pid}.img" in sizes)
    return Inventory(pids, frozenset(numbers), tuple(threads), parents, with_memory)


def _check_namespaces(directory_fd: int, names: Iterable[str]) -> None:
    """Check that a restore creates no namespace, in which CRIU would mount what the image lists, as root."""
    data = read_image(directory_fd, _INVENTORY)  # has one magic number of 4 bytes
    row = next(records(bytes(4) + data), {})
    ids = row.get(_ROOT_IDS, [b""])
    if len(ids) > 1 or not isinstance(ids[0], bytes):
        raise BadImage(f"{_INVENTORY}: the namespaces of CRIU are not unique")
    of_criu = message(ids[0])
    for name in names:
        rows = list(image_records(directory_fd, name))
        if len(rows) > 1:
            raise BadImage(f"{name}: the namespaces of a process are not unique")
        for entry in rows:
            if any(integer(entry, kind, 0) != integer(of_criu, kind, 0) for kind in _NAMESPACES):
                raise BadImage(f"{name}: a process has a namespace of its own")


def image_records(directory_fd: int, name: str) -> Iterator[Message]:
    """Yield the messages of a file of a dump. Raises ``BadImage`` naming the file."""
    try:
        yield from records(read_image(directory_fd, name))
    except BadImage as error:
        text = str(error)
        raise BadImage(text if text.startswith(name) else f"{name}: {text}") from None


def repeated(fields: Message, key: int) -> Iterator[int]:
    """Yield a repeated integer field, packed or not. Raises ``BadImage``."""
    for value in fields.get(key, []):
        if isinstance(value, int):
            yield value
            continue
        position = 0
        while position < len(value):
            number, position = _varint(value, position)
            yield number


def _pages(directory_fd: int, name: str, sizes: dict[str, int]) -> int:
    """Return the size of the pages file of a pagemap, which must match the pagemap. In bytes."""
    rows = image_records(directory_fd, name)
    try:
        pages_id = integer(next(rows), 1)
    except StopIteration:
        raise BadImage(f"{name}: empty") from None
    count = sum(page_count(row) for row in rows if integer(row, 4, PRESENT) & PRESENT)
    page_bytes = sizes.get(f"pages-{pages_id}.img", 0)
    if page_bytes != count * PAGE:
        raise BadImage(f"pages-{pages_id}.img: {page_bytes} bytes in place of {count * PAGE}")
    return page_bytes


def page_count(entry: Message) -> int:
    """Return the number of pages of a pagemap entry: field 5 (64 bits) in newer versions of CRIU, else field 2."""
    return integer(entry, 5, integer(entry, 2, 0))


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
    """Summarize CRIU's log in one line: the first error, which names the cause, and the second one if it differs."""
    messages: list[str] = []
    for line in log.splitlines():
        match = _WHERE.search(_PREFIX.sub("", line))
        if match and match["what"].strip() and not match["what"].startswith(_EMPTY) and match["what"] not in messages:
            messages.append(one_line(match["what"]))
    if not messages:
        return "its log has no error"
    return "; ".join(messages[:2])


def log_of(path: Path) -> str:
    """Return the text of a log, empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="backslashreplace")
    except OSError:
        return ""


_CONVERSION = re.compile(r"%[#0-9.]*[a-z]*[diuxosc]|%m")
_MESSAGES = Path(__file__).with_name("criu_messages.toml")


@dataclass(frozen=True, slots=True)
class CriuMessage:
    """One error of CRIU."""

    text: str
    """A part of the message as it is in the program, with its conversions (``%d``, ``%s``)."""
    operation: str
    """``dump`` or ``restore``."""
    source: str
    """The file of CRIU, or its library."""
    checks: tuple[str, ...]
    """Codes of the refusals that predict it before a dump, or names of the modules that check it at a restore; empty:
    it is retried."""

    def matches(self, log: str) -> bool:
        """Return whether a line of CRIU's log has this message."""
        return any(self._in(line) for line in log.splitlines())

    def _in(self, line: str) -> bool:
        # Users choose paths in the log: a regular expression could take long for one of them.
        position = 0
        for part in _CONVERSION.split(self.text):
            position = line.find(part, position)
            if position < 0:
                return False
            position += len(part)
        return True


@cache
def table() -> tuple[CriuMessage, ...]:
    """Return the explained messages."""
    rows = tomllib.loads(_MESSAGES.read_text(encoding="utf-8"))["message"]
    return tuple(CriuMessage(row["text"], row["at"], row["source"], tuple(row.get("checks", ()))) for row in rows)


def prediction(log: str) -> tuple[str, ...] | None:
    """Return the checks that predict an error in the log of a restore; ``None`` if it is to be retried."""
    restores = (row for row in table() if row.operation == "restore" and row.checks)
    return next((restore.checks for restore in restores if restore.matches(log)), None)
