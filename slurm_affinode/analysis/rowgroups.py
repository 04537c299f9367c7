"""Samples for the compiled join: row groups that the thread which folds them reads and decodes itself.

So values pass from the file to the sums within the caches of one core, in memory that is used again. A general reader
hands every block over from one core to another, in memory that is new each time: that costs more than to decode.
What ``history.pages`` or ``decode`` do not know, and what looks damaged, Polars reads: slower, and it says what is
wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from slurm_affinode.analysis import decode, samples
from slurm_affinode.analysis.block import COLUMNS, Block, Column
from slurm_affinode.analysis.segments import FAR, Ints
from slurm_affinode.history import pages
from slurm_affinode.history.pages import Chunk, LayoutError, Page

_TYPES = {name: pa.timestamp("ms", tz="UTC") if name == "time" else pa.float32() for name in COLUMNS}
_ERRORS = (OSError, ValueError, pa.ArrowException)
Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of one part."""

    path: Path
    row: int
    """Number of the first, of all sources."""
    at: int
    """Number of the first in the part."""
    rows: int
    last: bool
    """Whether the part ends with them."""
    chunks: Mapping[str, Chunk] | None
    """Where their columns lie, those without any value left out; None where Polars must read."""
    following: Chunk | None
    """The times of the row group behind."""

    def __len__(self) -> int:
        return self.rows

    def read(self, decoder: Decoder) -> Block:
        """The rows, in memory of ``decoder`` that its next use overwrites. Raises ``UnreachableError``."""
        if self.chunks is not None:
            try:
                return decoder.block(self, self.chunks)
            except (LayoutError, *_ERRORS):
                pass
        return self._by_polars()

    def _by_polars(self) -> Block:
        frame = samples.rows_of(self.path, self.at, self.rows + (not self.last))
        following = FAR if self.last else int(samples.times(frame)[-1])
        return samples.block(self.row, frame[: self.rows], next_time=following)


def row_groups(index: samples.Index) -> Iterator[Block | RowGroup]:
    """All rows, in order: as ``samples.blocks`` gives them, but those of a day's only part are still to be read."""
    for source in index.sources:
        if source.path is None:
            yield from samples.blocks(replace(index, sources=(source,)))
        else:
            yield from of_part(source.path, source.row, source.rows)


def of_part(path: Path, row: int, rows: int) -> Iterator[RowGroup]:
    """The row groups of a part of ``rows`` samples, of which the first has number ``row``. Raises
    ``UnreachableError``."""
    try:
        metadata = pq.read_metadata(path)
    except _ERRORS as error:
        raise samples.damaged(path, error) from error
    sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    if sum(sizes) != rows or min(sizes, default=0) < 0:
        raise samples.damaged(path, ValueError(f"{sum(sizes):,} samples instead of {rows:,}"))
    try:
        numbers = pages.columns(metadata, _TYPES)
    except (LayoutError, *_ERRORS):
        groups: list[tuple[int, Mapping[str, Chunk] | None]] = [(rows, None)]
    else:
        groups = [(size, _chunks(metadata, group, numbers)) for group, size in enumerate(sizes)]
    at = 0
    for group, (size, chunks) in enumerate(groups):
        after = groups[group + 1][1] if group + 1 < len(groups) else None
        most = size if chunks is not None else samples.BLOCK_ROWS
        for low in range(at, at + size, most):
            count = min(most, at + size - low)
            following = after["time"] if after is not None else None
            yield RowGroup(path, row + low, low, count, low + count == rows, chunks, following)
        at += size


def _chunks(metadata: pq.FileMetaData, group: int, numbers: Mapping[str, int]) -> Mapping[str, Chunk] | None:
    if not 0 < metadata.row_group(group).num_rows <= samples.BLOCK_ROWS:
        return None
    try:
        found = {name: pages.chunk(metadata, group, number) for name, number in numbers.items()}
    except (LayoutError, *_ERRORS):
        return None
    chunks = {name: chunk for name, chunk in found.items() if chunk is not None}
    return chunks if "time" in chunks else None


class Decoder:
    """Reads row groups, one at a time; for one thread. Its memory is used again row group after row group."""

    def __init__(self) -> None:
        self._memory: dict[str, npt.NDArray[np.generic]] = {}

    def block(self, group: RowGroup, chunks: Mapping[str, Chunk]) -> Block:
        """Read and decode. Raises ``LayoutError``; ``OSError`` and errors of Arrow."""
        file = os.open(group.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            times = self._array("time", group.rows, np.int64)
            self._times(file, chunks["time"], times)
            columns = {
                name: self._floats(name, file, chunk, group.rows) for name, chunk in chunks.items() if name != "time"
            }
            following = FAR if group.last else self._first_time(file, group)
        finally:
            os.close(file)
        return Block(group.row, times, columns, following)

    def _read(self, file: int, chunk: Chunk) -> tuple[decode.Bytes, Ints]:
        """The bytes of a chunk and the table of its pages."""
        packed = self._array("packed", chunk.packed, np.uint8)
        _check(os.preadv(file, [packed.data], chunk.start) == chunk.packed)
        table = np.array([*pages.pages(packed.data, chunk)], np.int64).reshape(-1, len(Page._fields))
        return packed, table

    def _first_time(self, file: int, group: RowGroup) -> int:
        if group.following is None:
            return int(samples.times(samples.rows_of(group.path, group.at + group.rows, 1))[0])
        out = np.empty(1, np.int64)
        self._times(file, group.following, out)
        return int(out[0])

    def _times(self, file: int, chunk: Chunk, out: Ints) -> None:
        packed, table = self._read(file, chunk)
        unpacked = self._array("unpacked", chunk.unpacked, np.uint8)
        _check(decode.times(packed, table, chunk.optional, unpacked, out) == len(out))

    def _floats(self, name: str, file: int, chunk: Chunk, rows: int) -> Column:
        packed, table = self._read(file, chunk)
        out = self._array(name, rows, np.float32)
        unpacked = self._array(f"unpacked {name}", chunk.unpacked, np.uint8)
        dictionary = self._array("dictionary", chunk.unpacked // 4, np.float32)
        dense = self._array("dense", rows, np.float32)
        known, start = decode.floats(packed, table, chunk.optional, unpacked, dictionary, dense, out)
        _check(known >= 0)
        if start >= 0:
            # Plain values, none missing: no need to copy them.
            out = unpacked[start : start + 4 * rows].view(np.float32)
        return Column(out, complete=known == rows)

    def _array(self, name: str, count: int, dtype: type[Number]) -> npt.NDArray[Number]:
        held = self._memory.get(name)
        if held is None or len(held) < count:
            self._memory[name] = held = np.empty(count, dtype)
        return held[:count]  # type: ignore[return-value]


def _check(sound: bool) -> None:
    if not sound:
        raise LayoutError("a column")


def warm_up() -> None:
    """Compile the loops, or load their machine code."""
    content, values = np.zeros(0, np.uint8), np.zeros(0, np.float32)
    table = np.zeros((0, len(Page._fields)), np.int64)
    decode.times(content, table, False, content, np.zeros(0, np.int64))
    decode.floats(content, table, False, content, values, values, values)
