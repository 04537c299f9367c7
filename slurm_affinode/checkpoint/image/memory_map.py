"""Addresses of the pages in a checkpoint image, for the pages that need not be placed by CRIU itself.

These are pages of private anonymous memory, which CRIU marks in every dump (``PE_LAZY`` in ``criu/include/pagemap.h``).
``pagemap-PID.img`` has the addresses of the pages in a pages file, which are stored there consecutively, and
``mm-PID.img`` the mappings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from slurm_affinode.checkpoint.image.criu_images import (
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
"""Maximum bytes that a restored tree may hold twice."""
_MOST_RUNS = 1 << 21
"""Of all processes. Each takes about 150 bytes of the agent's memory."""

Mapping = tuple[int, int]
"""Start and end address."""


@dataclass(frozen=True, slots=True)
class PageStretch:
    """Consecutive pages in a file and in memory, within one mapping."""

    offset: int
    """In the file, in bytes."""
    address: int
    length: int
    """In bytes."""


@dataclass(frozen=True, slots=True)
class TreeMemory:
    """Memory of one process."""

    pid: int
    """PID in its namespace."""
    file: str
    """Name of its pages file, which has pages of this process only."""
    runs: tuple[PageStretch, ...]
    """In file order, which is also that of the addresses."""


def fillable(directory_fd: int, inventory: Inventory) -> tuple[TreeMemory, ...]:
    """Return the memory of each process that can be filled from outside. Raises ``BadImage``.

    Empty if there is none, or if filling would cost memory: of the tree, because CRIU restores the sharing of pages
    since a fork, while pages filled from outside are separate for each process; or of the agent, because the memory is
    in too many pieces.
    """
    mappings = {pid: _mappings(directory_fd, pid) for pid in inventory.with_memory}
    memories, lost, remaining_runs = [], 0, _MOST_RUNS
    for pid in inventory.with_memory:
        shared = set(mappings[pid]).intersection(mappings.get(inventory.parents[pid], ()))
        rows = image_records(directory_fd, f"pagemap-{pid}.img")
        file = f"pages-{integer(next(rows, {}), 1)}.img"
        runs = []
        for mapping, run in _runs(rows, mappings[pid]):
            if not remaining_runs:
                return ()
            remaining_runs -= 1
            runs.append(run)
            lost += run.length if mapping in shared else 0
        memories.append(TreeMemory(pid, file, tuple(runs)))
    return tuple(memories) if lost <= _LOST and any(memory.runs for memory in memories) else ()


def _mappings(directory_fd: int, pid: int) -> list[Mapping]:
    """Return the mappings of a process in address order."""
    name = f"mm-{pid}.img"
    mm, *further_records = [*image_records(directory_fd, name)] or [{}]
    if further_records:
        raise BadImage(f"{name}: more than one record")
    areas = (message(area) for area in mm.get(14, []) if isinstance(area, bytes))
    return [(integer(area, 1), integer(area, 2)) for area in areas]


def _runs(rows: Iterable[Message], mappings: Sequence[Mapping]) -> Iterator[tuple[Mapping, PageStretch]]:
    """Yield the runs of pages, each with its mapping."""
    offset = position = 0
    for row in rows:
        flags = integer(row, 4, PRESENT)
        if not flags & PRESENT:
            continue
        address = integer(row, 1)
        end = address + page_count(row) * PAGE
        while flags & LAZY and address < end:
            while position < len(mappings) and mappings[position][1] <= address:
                position += 1
            if position == len(mappings) or mappings[position][0] > address:
                raise BadImage(f"pages at {address:#x} are in no mapping")
            length = min(end, mappings[position][1]) - address
            yield mappings[position], PageStretch(offset, address, length)
            offset, address = offset + length, address + length
        offset += end - address
