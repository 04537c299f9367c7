"""Which pages of an image belong where in the memory of its processes, as far as CRIU need not put them there itself.

That is private anonymous memory, whose pages CRIU marks in every dump (``PE_LAZY`` in ``criu/include/pagemap.h``).
``pagemap-PID.img`` says which addresses the pages of a pages file have, which are there one behind the other, and
``mm-PID.img`` which mappings there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from slurm_affinode.checkpoint.criu_images import (
    LAZY,
    PAGE,
    PRESENT,
    BadImage,
    Inventory,
    Message,
    image_records,
    integer,
    message,
    page_count,
)

_LOST = 64 << 20
"""Bytes that a restored tree may hold twice."""

Mapping = tuple[int, int]
"""Addresses of its begin and end."""


@dataclass(frozen=True, slots=True)
class Run:
    """Pages that follow each other in a file and in memory, within one mapping."""

    offset: int
    """In the file, bytes."""
    address: int
    length: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one process."""

    pid: int
    """In its namespace."""
    file: str
    """Name of the file with its pages, and with nobody else's."""
    runs: tuple[Run, ...]
    """In the order of the file, which is that of the addresses."""


def fillable(directory_fd: int, inventory: Inventory) -> tuple[Memory, ...]:
    """What can be put in place from outside, of every process that has memory. Raises ``BadImage``.

    Empty where there is nothing, and where that would cost memory: what processes share since a fork CRIU has them
    share again, while from outside each gets pages of its own.
    """
    mappings = {pid: _mappings(directory_fd, pid) for pid in inventory.with_memory}
    memories, lost = [], 0
    for pid in inventory.with_memory:
        shared = set(mappings[pid]).intersection(mappings.get(inventory.parents[pid], ()))
        rows = image_records(directory_fd, f"pagemap-{pid}.img")
        file = f"pages-{integer(next(rows, {}), 1)}.img"
        runs = []
        for mapping, run in _runs(rows, mappings[pid]):
            runs.append(run)
            lost += run.length if mapping in shared else 0
        memories.append(Memory(pid, file, tuple(runs)))
    return tuple(memories) if lost <= _LOST and any(memory.runs for memory in memories) else ()


def _mappings(directory_fd: int, pid: int) -> list[Mapping]:
    """In the order of their addresses."""
    name = f"mm-{pid}.img"
    mm, *others = [*image_records(directory_fd, name)] or [{}]
    if others:
        raise BadImage(f"{name}: more than one record")
    areas = (message(area) for area in mm.get(14, []) if isinstance(area, bytes))
    return [(integer(area, 1), integer(area, 2)) for area in areas]


def _runs(rows: Iterable[Message], mappings: Sequence[Mapping]) -> Iterator[tuple[Mapping, Run]]:
    """Each with the mapping that it is in."""
    offset = at = 0
    for row in rows:
        flags = integer(row, 4, PRESENT)
        if not flags & PRESENT:
            continue
        address = integer(row, 1)
        end = address + page_count(row) * PAGE
        while flags & LAZY and address < end:
            while at < len(mappings) and mappings[at][1] <= address:
                at += 1
            if at == len(mappings) or mappings[at][0] > address:
                raise BadImage(f"pages at {address:#x} are in no mapping")
            length = min(end, mappings[at][1]) - address
            yield mappings[at], Run(offset, address, length)
            offset, address = offset + length, address + length
        offset += end - address
