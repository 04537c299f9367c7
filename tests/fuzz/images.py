"""Readers of CRIU's image files, on mutations of a real dump (CRIU 4.1.1, five processes, two sessions)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

from fuzz.mutation import mutated, some
from fuzz.places import directory, put
from fuzz.runner import Check, Target, Wrong
from slurm_affinode.checkpoint.criu import restore_gate, sessions
from slurm_affinode.checkpoint.files import deleted_files, file_table, open_files, unix_sockets
from slurm_affinode.checkpoint.files.file_table import FileTable, Type
from slurm_affinode.checkpoint.image import criu_images, memory_map
from slurm_affinode.checkpoint.image.criu_images import PAGE, BadImage, encoded, framed
from slurm_affinode.checkpoint.interface import DumpFailed

_DUMP = Path(__file__).parent / "dump.tar.gz"
"""``criu dump`` of a shell with a pipeline in another session below it; without memory pages."""
_STRETCHES = 5
"""Pages that each process has, in stretches."""
_HUGE = b"\xff" * 9 + b"\x01"
_WORDS = (
    b"\x08\x00",
    b"\x08\x01",
    b"\x10\x01",
    b"\x10\x05",
    b"\x18\x01",
    b"\x20\x01",
    b"\x20\x02",
    b"\x20\x06",
    b"\x28\x01",
    b"\x0a\x00",
    b"\x72\x00",
    b"\x0a\xff\xff\xff\xff\x0f",
    b"\x08" + _HUGE,
    b"\x10" + _HUGE,
    b"\x03",
    b"\x07",
    b"\x09" + b"\0" * 8,
    b"\0\0\0\0",
    b"\xff\xff\xff\xff",
    b"\x02\0\0\0\x08\x01",
)


@cache
def _files() -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(_DUMP.read_bytes())) as archive:
        results = {item.name: file.read() for item in archive if (file := archive.extractfile(item)) is not None}
    # The last two as zombies, which have no memory and are read faster.
    results = {name: data for name, data in results.items() if not re.match(r"(mm|pagemap)-557[34]|(fs|ids)-", name)}
    for pid in (5569, 5571, 5572):
        mm, pages = f"mm-{pid}.img", f"pagemap-{pid}.img"
        results[mm], results[pages] = _shortened(results[mm], results[pages])
    return results


def _shortened(mm: bytes, pages: bytes) -> tuple[bytes, bytes]:
    """Return the memory of a process with few mappings: with all of them, an input takes twice as long to read."""
    head, *rows = _bodies(pages)
    rows = rows[:_STRETCHES]
    used = []
    for row in map(criu_images.message, rows):
        begin = criu_images.integer(row, 1)
        used.append((begin, begin + criu_images.page_count(row) * PAGE))
    (body,) = _bodies(mm)
    kept = b""
    for number, value, begin, end in criu_images.spans(body):
        if number == 14 and isinstance(value, bytes):
            area = criu_images.message(value)
            low, high = criu_images.integer(area, 1), criu_images.integer(area, 2)
            if not any(low < last and first < high for first, last in used):
                continue
        kept += body[begin:end]
    return mm[:8] + framed(kept), pages[:8] + b"".join(map(framed, (head, *rows)))


@cache
def _read_names() -> tuple[str, ...]:
    """Return the names of files to read; the process tree (``pstree.img``) occurs several times."""
    names = [name for name in _files() if name.startswith(("pstree", "mm-", "pagemap-"))]
    return (*names, *["pstree.img"] * 6)


def _bodies(data: bytes) -> list[bytes]:
    result, at = [], 8
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        result.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return result


def _mutated_records(rng: Random, data: bytes) -> bytes:
    """Mutate complete records: changed inside, repeated, swapped, removed."""
    bodies = _bodies(data)
    for _ in range(some(rng, (1, 1, 2, 3))):
        at = int(rng.random() * len(bodies))
        what = int(rng.random() * 5)
        if what < 2:
            bodies[at] = mutated(rng, bodies[at], _WORDS, 4096)
        elif what == 2:
            bodies.insert(int(rng.random() * (len(bodies) + 1)), bodies[at])
        elif what == 3:
            other = int(rng.random() * len(bodies))
            bodies[at], bodies[other] = bodies[other], bodies[at]
        elif len(bodies) > 1:
            del bodies[at]
    return data[:8] + b"".join(len(body).to_bytes(4, "little") + body for body in bodies)


def _tree(rng: Random) -> bytes:
    """Return another process tree, with random parents, groups and sessions from a few PIDs."""
    numbers = [5569, 5571, 5572, 5573, 5574]
    bodies = []
    for pid in numbers:
        values = [
            pid if rng.random() < 0.9 else some(rng, numbers),
            some(rng, (0, *numbers)),
            pid,
            some(rng, (0, *numbers)),
        ]
        bodies.append(b"".join(bytes([field << 3]) + _varint(value) for field, value in enumerate(values, 1)))
    return _files()["pstree.img"][:8] + b"".join(len(body).to_bytes(4, "little") + body for body in bodies)


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])


def _dump(rng: Random) -> bytes:
    changed = {}
    for _ in range(some(rng, (1, 1, 2))):
        name = some(rng, _read_names())
        data = _files()[name]
        what = rng.random()
        if name == "pstree.img" and what < 0.4:
            changed[name] = _tree(rng)
        elif what < 0.8 and len(data) > 12:
            changed[name] = _mutated_records(rng, data)
        else:
            changed[name] = mutated(rng, data, _WORDS)
    return json.dumps({name: data.decode("latin-1") for name, data in changed.items()}).encode()


@contextlib.contextmanager
def _inspected() -> Iterator[Check]:
    with directory() as place:
        for name, data in _files().items():
            put(str(place / name), data)
        for name in _files():
            if name.startswith("pagemap-"):
                _put_pages(place, name)
        fd = os.open(place, os.O_RDONLY)

        def check(data: bytes) -> bool:
            changed = json.loads(data)
            for name, text in changed.items():
                put(str(place / name), text.encode("latin-1"))
            try:
                return _read(fd)
            finally:
                for name in changed:
                    put(str(place / name), _files()[name])
                put(str(place / "pstree.img"), _files()["pstree.img"])

        if not check(b"{}"):
            raise Wrong("the dump as it was recorded is refused")
        try:
            yield check
        finally:
            os.close(fd)


def _put_pages(place: Path, name: str) -> None:
    head, *rows = criu_images.records(_files()[name])
    count = sum(criu_images.page_count(row) for row in rows if criu_images.integer(row, 4, 4) & criu_images.PRESENT)
    with (place / f"pages-{criu_images.integer(head, 1)}.img").open("wb") as file:
        file.truncate(count * PAGE)


def _read(fd: int) -> bool:
    before = {process.pid: process for process in _settled(fd)}
    sessions.settle(fd)
    tree = _settled(fd)
    if {process.pid for process in tree} != set(before) or len(tree) != len(before):
        raise Wrong(f"processes were lost or made: {before} became {tree}")
    seen: set[int] = {0}
    for path in tree:
        if path.parent not in seen:
            raise Wrong(f"a child before its parent: {tree}")
        seen.add(path.pid)
    inventory = criu_images.inspect(fd)
    if not set(inventory.pids) <= inventory.numbers or inventory.parents[inventory.pids[0]] not in (0, *inventory.pids):
        raise Wrong(f"{inventory}")
    for memory in memory_map.fillable(fd, inventory):
        size = os.stat(memory.file, dir_fd=fd).st_size
        ends = [run.offset + run.length for run in memory.runs]
        if (
            any(run.length <= 0 or run.offset < 0 or run.address < 0 for run in memory.runs)
            or max(ends, default=0) > size
        ):
            raise Wrong(f"{memory} of {size} bytes")
    return True


def _settled(fd: int) -> list[sessions.SessionProcess]:
    data, names = criu_images.read_image(fd, "pstree.img"), os.listdir(fd)
    return [sessions._process(body, names) for body in sessions._bodies(data)]


# --- single messages


def _message(rng: Random) -> bytes:
    name = some(rng, tuple(_files()))
    data = _files()[name]
    return _mutated_records(rng, data) if rng.random() < 0.5 and name != "stats-dump" else mutated(rng, data, _WORDS)


@contextlib.contextmanager
def _messages() -> Iterator[Check]:
    def check(data: bytes) -> bool:
        count = 0
        for row in criu_images.records(data):
            count += 1
            for values in row.values():
                for value in values:
                    if isinstance(value, int) and not 0 <= value < 1 << 64:
                        raise Wrong(f"a number of more than 64 bits: {value}")
                    if isinstance(value, bytes) and len(value) < 4096:
                        with contextlib.suppress(BadImage):
                            criu_images.message(value)
        return count > 0

    yield check


def _log(rng: Random) -> bytes:
    line = b"(00.012345) Error (criu/files-reg.c:2143): File home/a/x has bad size 5 (expect 7)\n"
    return mutated(
        rng, line * some(rng, (1, 2)), (b"Error (", b"): ", b"pie: 17: ", b"\r", b"\xe2\x80\xa8", b"(" * 30, b") " * 30)
    )


@contextlib.contextmanager
def _logs() -> Iterator[Check]:
    def check(data: bytes) -> bool:
        failure = criu_images.failure(data.decode("utf-8", "backslashreplace"))
        if "\n" in failure or not failure:
            raise Wrong(repr(failure))
        return failure != "its log has no error"

    yield check


# --- the table of open files and related files


def _entries() -> tuple[bytes, ...]:
    """Return entries of kinds that the recorded dump lacks."""
    names = encoded(9, encoded(1, 1) + encoded(5, 0)), encoded(10, encoded(1, 212992))
    numbers = b"".join(encoded(field, field) for field in (1, 2, 3, 4, 5, 6, 7, 8))
    unix = (
        numbers
        + b"".join(names)
        + encoded(11, b"/tmp/s")
        + encoded(12, 0)
        + encoded(13, encoded(1, 0o755))
        + encoded(14, b"/tmp")
    )
    watch = encoded(1, 1) + encoded(2, 77) + encoded(5, 23) + encoded(7, encoded(4, b"/tmp/w"))
    bodies = {
        Type.UNIXSK: unix,
        Type.INOTIFY: encoded(1, 9) + encoded(5, watch),
        Type.FIFO: encoded(1, 10) + encoded(3, 11),
        Type.TTY: encoded(1, 12) + encoded(6, 13),
        Type.REG: b"".join(encoded(*item) for item in ((1, 99), (2, 2), (3, 0), (6, b"/tmp/x"), (10, 0o100644))),
    }
    return tuple(
        encoded(1, kind) + encoded(2, 5) + encoded(file_table._BODY[kind], body) for kind, body in bodies.items()
    )


_ENTRIES = _entries()
_PATHS = (b"/etc/passwd", b"\0", b"/..", b"relative", b"\x32\x0b/etc/shadow", b"\x48\x01", b"\x5a\x00")


def _table(rng: Random) -> bytes:
    """Return a kind of file, and a mutation of such a file."""
    kind = int(rng.random() * 8)
    if kind < 3:
        recorded = _bodies(_files()["files.img"])
        bodies = [*recorded, *(entry for entry in _ENTRIES if rng.random() < 0.5)]
        made = (mutated(rng, body, (*_WORDS, *_PATHS), 4096) if rng.random() < 0.15 else body for body in bodies)
        data = _files()["files.img"][:8] + b"".join(map(framed, made))
        return b"0" + (_mutated_records(rng, data) if rng.random() < 0.3 else data)
    if kind == 3:
        remap = encoded(1, 99) + encoded(2, 5) + encoded(3, some(rng, (0, 1, 2, 7)))
        return b"1" + mutated(rng, bytes(8) + framed(remap) * some(rng, (1, 2)), _WORDS)
    if kind == 4:
        packet = encoded(1, 5) + encoded(2, 4)
        return b"2" + mutated(rng, bytes(8) + framed(packet) + b"data", _WORDS)
    if kind == 5:
        times = encoded(1, 1700000000) + encoded(2, 5)
        ghost = b"".join(
            encoded(*item) for item in ((1, 2001), (2, 100), (3, 0o100600), (5, 77), (7, times), (8, times), (9, 1))
        )
        return b"3" + mutated(rng, bytes(8) + framed(ghost) + b"contents", _WORDS)
    if kind == 6:
        text = (
            b"pos:\t0\nflags:\t00\nmnt_id:\t15\ninotify wd:1 ino:1f sdev:17 mask:fff ignored_mask:0 fhandle-bytes:c\n"
        )
        return b"4" + mutated(rng, text, (b"inotify ", b"ino:", b"sdev:", b"\r"))
    return b"5" + mutated(rng, _files()[some(rng, [name for name in _files() if name.startswith("core-")])], _WORDS)


@contextlib.contextmanager
def _tables() -> Iterator[Check]:
    with directory() as place:
        fd = os.open(place, os.O_RDONLY)
        try:
            yield lambda data: _check_table(place, fd, data[:1], data[1:])
        finally:
            os.close(fd)


def _check_table(place: Path, fd: int, kind: bytes, data: bytes) -> bool:
    if kind == b"0":
        return _check_rewritten(data)
    if kind == b"1":
        return bool(file_table.remaps(data))
    if kind == b"2":
        return bool(list(file_table.packets(data)))
    if kind == b"3":
        put(str(place / "ghost"), data)
        with (place / "ghost").open("rb") as file:
            ghost = deleted_files.Ghost.read(file.fileno())
        if ghost.begin > len(data):
            raise Wrong(f"{ghost}")
        return True
    if kind == b"4":
        return bool(list(open_files.watched(data)))
    put(str(place / "core-7.img"), data)
    return restore_gate.of_image(fd, 7) is not None


def _check_rewritten(data: bytes) -> bool:
    """No path is left for CRIU, even if an entry has duplicate fields."""
    table = FileTable.parse(data)
    names = {number: f"affinode-{number}" for number in table.regular}
    sockets = [socket.id for socket in table.sockets]
    for body in criu_images.bodies(table.rewritten(names, sockets)):
        facts = criu_images.message(body)
        for field, place in ((file_table._BODY[Type.REG], 6), (file_table._BODY[Type.UNIXSK], 11)):
            if integer_or_none(facts, 1) != {6: Type.REG, 11: Type.UNIXSK}[place]:
                continue
            for inner in facts.get(field, []):
                value = criu_images.message(inner).get(place) if isinstance(inner, bytes) else None
                left = [text for text in value or [] if not isinstance(text, bytes) or text.startswith(b"/")]
                if left or value is None or len(value) != 1 or len(facts[field]) != 1:
                    raise Wrong(f"CRIU would find {value} in {facts}")
                if place == 11 and 14 in criu_images.message(inner):
                    raise Wrong(f"CRIU would change to a directory: {facts}")
    unix_sockets.refusal(table)
    file_table.needs(table, descriptors=[_files()["fdinfo-2.img"]], memories=[_files()["mm-5569.img"]], places=[])
    return True


def integer_or_none(facts: criu_images.Message, key: int) -> int | None:
    """Return the last value of a field."""
    value = facts.get(key, [None])[-1]
    return value if isinstance(value, int) else None


TARGETS = (
    Target(
        "criu-files", "open files, removed files, queues, watches, credentials", _table, _tables, (BadImage, OSError)
    ),
    Target("criu-dump", "a dump: its tree, sessions, memory maps", _dump, _inspected, (BadImage, DumpFailed)),
    Target("criu-message", "the records of image files", _message, _messages, (BadImage,)),
    Target("criu-log", "CRIU's log, which names files of the job", _log, _logs),
)
