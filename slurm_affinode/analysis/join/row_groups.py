"""Row groups of the sample store for the compiled loops, read and decoded by the thread that sums them.

Values pass from the file to the sums within one core's cache, in memory that is reused. A general reader would hand
each block to another core in new memory, which costs more than decoding. The layout is the one that
``metrics.parquet.parts`` writes; any other raises ``LayoutError``, and Polars reads the file instead.

Source: https://parquet.apache.org/docs/file-format/.
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

from slurm_affinode.analysis import samples
from slurm_affinode.analysis.block import COLUMNS, Block, BlockColumn
from slurm_affinode.analysis.join import decoder
from slurm_affinode.analysis.join.compilation import machine_code
from slurm_affinode.analysis.join.decoder import Bytes
from slurm_affinode.analysis.segments import FAR

MOST_BYTES = 64 << 20
"""Column chunks above this size, packed or unpacked, are left to Polars: a damaged file may contain any length."""


class LayoutError(Exception):
    """The file is damaged, or has a layout that this decoder does not support."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One column of a row group."""

    start: int
    """Offset of its first byte in the file."""
    packed: int
    """Size in the file in bytes, including page headers."""
    unpacked: int
    """Size in bytes when unpacked."""
    optional: bool
    """True if values may be missing; definition levels then precede the values of each page."""


def columns(metadata: pq.FileMetaData, wanted: dict[str, pa.DataType]) -> dict[str, int]:
    """Return the numbers of the columns ``wanted``. Raises ``LayoutError`` if one is missing or has another type."""
    schema = metadata.schema
    types = schema.to_arrow_schema()
    numbers = {schema.column(number).path: number for number in range(len(schema))}
    for name, kind in wanted.items():
        if name not in numbers or types.field(name).type != kind:
            raise LayoutError(f"no column {name} of type {kind}")
    return {name: numbers[name] for name in wanted}


def chunk(metadata: pq.FileMetaData, row_group: int, column: int) -> Chunk | None:
    """Return a column of a row group; None if it has no value, by its statistics. Raises ``LayoutError``."""
    rows = metadata.row_group(row_group).num_rows
    found = metadata.row_group(row_group).column(column)
    statistics = found.statistics
    if statistics is not None and statistics.has_null_count and statistics.null_count == rows:
        return None
    described = metadata.schema.column(column)
    start = found.data_page_offset if found.dictionary_page_offset is None else found.dictionary_page_offset
    packed, unpacked = found.total_compressed_size, found.total_uncompressed_size
    if (
        found.compression != "LZ4"
        or described.max_repetition_level
        or described.max_definition_level > 1
        or start < 0
        or not (0 < packed <= MOST_BYTES and 0 < unpacked <= MOST_BYTES)
    ):
        raise LayoutError(f"column {found.path_in_schema}")
    return Chunk(start, packed, unpacked, optional=described.max_definition_level == 1)


_TYPES = {name: pa.timestamp("ms", tz="UTC") if name == "time" else pa.float32() for name in COLUMNS}
_ERRORS = (OSError, ValueError, pa.ArrowException)
_MOST_PAGES = 4096
"""Maximum number of pages in a row group; Polars reads row groups with more."""
_LINE = 64
"""Size of a cache line, bytes. The memory of each chunk is a multiple of it."""
Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of one part."""

    path: Path
    row: int
    """Number of the first row, over all sources."""
    at: int
    """Number of the first row in the part."""
    rows: int
    last: bool
    """True if these are the last rows of the part."""
    chunks: Mapping[str, Chunk] | None
    """Columns with at least one value; None if Polars must read the rows."""
    following: Chunk | None
    """Times of the next row group."""

    def __len__(self) -> int:
        return self.rows

    def read(self, decoder: Decoder) -> Block:
        """Read the rows into memory of ``decoder``, which its next use overwrites. Raises ``UnreachableError``."""
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
    """Yield all rows, in order, like ``samples.blocks``; the rows of a day with a single part are not read yet."""
    for source in index.sources:
        if source.path is None:
            yield from samples.blocks(replace(index, sources=(source,)))
        else:
            yield from of_part(source.path, source.row, source.rows)


def of_part(path: Path, row: int, rows: int) -> Iterator[RowGroup]:
    """Yield the row groups of a part.

    ``row``: number of its first sample; ``rows``: its number of samples. Raises ``UnreachableError``.
    """
    try:
        metadata = pq.read_metadata(path)
    except _ERRORS as error:
        raise samples.damaged(path, error) from error
    sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    if sum(sizes) != rows or min(sizes, default=0) < 0:
        raise samples.damaged(path, ValueError(f"{sum(sizes):,} samples instead of {rows:,}"))
    try:
        numbers = columns(metadata, _TYPES)
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
        found = {name: chunk(metadata, group, number) for name, number in numbers.items()}
    except (LayoutError, *_ERRORS):
        return None
    chunks = {name: chunk for name, chunk in found.items() if chunk is not None}
    return chunks if "time" in chunks else None


class Decoder:
    """Reader of row groups for one thread. Its memory is reused for every row group."""

    def __init__(self) -> None:
        self._part: tuple[Path, Bytes] | None = None
        self._memory: dict[str, npt.NDArray[np.generic]] = {}
        self._pages = np.empty((_MOST_PAGES, decoder.PAGE_WIDTH), np.int64)
        self._fields = np.empty(decoder.FIELDS, np.int64)
        self._code = machine_code(decoder)

    def block(self, group: RowGroup, chunks: Mapping[str, Chunk]) -> Block:
        """Read and decode a row group. Raises ``LayoutError``, ``OSError`` and Arrow's errors."""
        wanted = [*(chunks.get(name) for name in COLUMNS), None if group.last else group.following]
        packed = self._mapped(group.path)
        table = np.zeros((len(wanted), decoder.CHUNK_WIDTH), np.int64)
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
        count = self._code.find(packed, table, self._pages, self._fields)
        _check(count >= 0)
        pages = self._pages[:count]
        buffers = unpacked, dictionary, dense, times, values, following, found
        _check(self._code.row_group(packed, table, pages, *buffers))
        columns = {}
        for number, name in enumerate(COLUMNS[1:]):
            if name in chunks:
                known, start = found[number].tolist()
                # Plain values without missing ones are used where they were unpacked, without a copy.
                here = unpacked[number + 1, start : start + 4 * group.rows].view(np.float32) if start >= 0 else None
                columns[name] = BlockColumn(values[number, : group.rows] if here is None else here, known == group.rows)
        return Block(group.row, times, columns, self._next_time(group, int(following[0])))

    def _mapped(self, path: Path) -> Bytes:
        """Map a part into memory. That is safe because parts are never changed, only removed as a whole."""
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
            # Allocate some reserve for larger row groups: untouched memory is free, reallocation is not.
            self._memory[name] = held = np.empty(count + count // 4, dtype)
        return held[:count]  # type: ignore[return-value]

    def _table(self, name: str, rows: int, width: int, dtype: type[Number]) -> npt.NDArray[Number]:
        """Return a buffer of ``rows`` rows and at least ``width`` columns."""
        held = self._memory.get(name)
        if held is None or held.shape[1] < width:
            self._memory[name] = held = np.empty((rows, width), dtype)
        return held  # type: ignore[return-value]


def _rounded(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _check(sound: bool) -> None:
    if not sound:
        raise LayoutError("a column")
