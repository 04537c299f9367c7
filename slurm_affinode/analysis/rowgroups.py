"""Samples for the compiled join: row groups that the thread which folds them reads and decodes itself.

So values pass from the file to the sums within the caches of one core, in memory that is used again. A general reader
hands every block over from one core to another, in memory that is new each time: that costs more than to decode.
What ``history.chunks``, ``pageheaders`` or ``decode`` do not know, and what looks damaged, Polars reads: slower, and
it says what is wrong.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from slurm_affinode.analysis import decode, pageheaders, samples
from slurm_affinode.analysis.bits import Bytes
from slurm_affinode.analysis.block import COLUMNS, Block, Column
from slurm_affinode.analysis.segments import FAR
from slurm_affinode.history import chunks as column_chunks
from slurm_affinode.history.chunks import Chunk, LayoutError

_TYPES = {name: pa.timestamp("ms", tz="UTC") if name == "time" else pa.float32() for name in COLUMNS}
_ERRORS = (OSError, ValueError, pa.ArrowException)
_MOST_PAGES = 4096
"""Of a row group; more are left to Polars."""
_LINE = 64
"""Bytes of a cache line: memory of a chunk begins with one."""
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
        numbers = column_chunks.columns(metadata, _TYPES)
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
        found = {name: column_chunks.chunk(metadata, group, number) for name, number in numbers.items()}
    except (LayoutError, *_ERRORS):
        return None
    chunks = {name: chunk for name, chunk in found.items() if chunk is not None}
    return chunks if "time" in chunks else None


class Decoder:
    """Reads row groups, one at a time; for one thread. Its memory is used again row group after row group."""

    def __init__(self) -> None:
        self._part: tuple[Path, Bytes] | None = None
        self._memory: dict[str, npt.NDArray[np.generic]] = {}
        self._pages = np.empty((_MOST_PAGES, pageheaders.PAGE_WIDTH), np.int64)
        self._fields = np.empty(pageheaders.FIELDS, np.int64)

    def block(self, group: RowGroup, chunks: Mapping[str, Chunk]) -> Block:
        """Read and decode. Raises ``LayoutError``; ``OSError`` and errors of Arrow."""
        wanted = [*(chunks.get(name) for name in COLUMNS), None if group.last else group.following]
        packed = self._mapped(group.path)
        table = np.zeros((len(wanted), pageheaders.CHUNK_WIDTH), np.int64)
        for number, chunk in enumerate(wanted):
            if chunk is not None:
                _check(chunk.start + chunk.packed <= len(packed))
                table[number] = chunk.start, chunk.packed, chunk.unpacked, chunk.optional
        most = _rounded(max(chunk.unpacked for chunk in wanted if chunk is not None))
        metrics = len(COLUMNS) - 1
        times = self._array("time", group.rows, np.int64)
        values = self._table("values", metrics, group.rows, np.float32)
        unpacked = self._table("unpacked", len(wanted), most, np.uint8)
        dictionary = self._array("dictionary", most // 4, np.float32)
        dense = self._array("dense", group.rows, np.float32)
        following, found = np.empty(1, np.int64), np.empty((metrics, 2), np.int64)
        count = pageheaders.find(packed, table, self._pages, self._fields)
        _check(count >= 0)
        pages = self._pages[:count]
        _check(decode.row_group(packed, table, pages, unpacked, dictionary, dense, times, values, following, found))
        columns = {}
        for number, name in enumerate(COLUMNS[1:]):
            if name in chunks:
                known, start = found[number].tolist()
                # Plain values, none missing, are where they were unpacked: no need to copy them.
                here = unpacked[number + 1, start : start + 4 * group.rows].view(np.float32) if start >= 0 else None
                columns[name] = Column(values[number, : group.rows] if here is None else here, known == group.rows)
        return Block(group.row, times, columns, self._next_time(group, int(following[0])))

    def _mapped(self, path: Path) -> Bytes:
        """The bytes of a part, from the page cache where they are: a part is never changed, only removed as a whole."""
        if self._part is None or self._part[0] != path:
            self._part = None
            with path.open("rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._part = path, np.frombuffer(content, np.uint8)
        return self._part[1]

    def _next_time(self, group: RowGroup, decoded: int) -> int:
        if group.last:
            return FAR
        if group.following is not None:
            return decoded
        return int(samples.times(samples.rows_of(group.path, group.at + group.rows, 1))[0])

    def _array(self, name: str, count: int, dtype: type[Number]) -> npt.NDArray[Number]:
        held = self._memory.get(name)
        if held is None or len(held) < count:
            # With room for somewhat larger ones: memory that is not touched costs nothing, new memory does.
            self._memory[name] = held = np.empty(count + count // 4, dtype)
        return held[:count]  # type: ignore[return-value]

    def _table(self, name: str, rows: int, width: int, dtype: type[Number]) -> npt.NDArray[Number]:
        """Of at least ``width`` columns."""
        held = self._memory.get(name)
        if held is None or held.shape[1] < width:
            self._memory[name] = held = np.empty((rows, width), dtype)
        return held  # type: ignore[return-value]


def _rounded(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _check(sound: bool) -> None:
    if not sound:
        raise LayoutError("a column")


def warm_up() -> None:
    """Compile the loops, or load their machine code."""
    content, values, times = np.zeros(0, np.uint8), np.zeros(0, np.float32), np.zeros(0, np.int64)
    packed = content[:]
    packed.flags.writeable = False
    chunks = np.zeros((0, pageheaders.CHUNK_WIDTH), np.int64)
    pages, found = np.zeros((0, pageheaders.PAGE_WIDTH), np.int64), np.zeros((0, 2), np.int64)
    pageheaders.find(packed, chunks, pages, times)
    table = values.reshape(0, 0)
    decode.row_group(packed, chunks, pages, content.reshape(0, 0), values, values, times, table, times, found)
