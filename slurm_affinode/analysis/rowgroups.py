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

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slurm_affinode.analysis import decode, samples
from slurm_affinode.analysis.block import COLUMNS, Block, Column, Float32s
from slurm_affinode.analysis.segments import FAR, Ints
from slurm_affinode.history import pages
from slurm_affinode.history.pages import Chunk, LayoutError, Page

_TYPES = {name: pa.timestamp("ms", tz="UTC") if name == "time" else pa.float32() for name in COLUMNS}
_ERRORS = (OSError, ValueError, pa.ArrowException)
_LEVEL_BYTES = 4
"""In front of the definition levels of a page, their length."""


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
        self._codec = pa.Codec("lz4_raw")
        self._packed = np.empty(0, np.uint8)
        self._dense = np.empty(0, np.float32)
        self._columns: dict[str, Float32s] = {}
        self._times = np.empty(0, np.int64)

    def block(self, group: RowGroup, chunks: Mapping[str, Chunk]) -> Block:
        """Read and decode. Raises ``LayoutError``; ``OSError``, ``ValueError`` and errors of Arrow."""
        file = os.open(group.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            times = self._all_times(file, chunks["time"], group.rows)
            columns = {name: self._floats(name, file, chunks[name], group.rows) for name in chunks if name != "time"}
            following = FAR if group.last else self._first_time(file, group)
        finally:
            os.close(file)
        return Block(group.row, times, columns, following)

    def _all_times(self, file: int, chunk: Chunk, rows: int) -> Ints:
        if len(self._times) < rows:
            self._times = np.empty(rows, np.int64)
        out, done = self._times[:rows], 0
        for page, content in self._pages(file, chunk):
            _check(done + page.values <= rows)
            self._deltas(page, content, chunk, out[done : done + page.values])
            done += page.values
        _check(done == rows)
        return out

    def _first_time(self, file: int, group: RowGroup) -> int:
        if group.following is None:
            return int(samples.times(samples.rows_of(group.path, group.at + group.rows, 1))[0])
        page, content = next(self._pages(file, group.following))
        out = np.empty(1, np.int64)
        self._deltas(page, content, group.following, out)
        return int(out[0])

    def _deltas(self, page: Page, content: decode.Bytes, chunk: Chunk, out: Ints) -> None:
        levels, start = _levels(content, chunk)
        _check(page.encoding == pages.DELTA_BINARY_PACKED and page.values >= len(out))
        if chunk.optional:
            _check(decode.count_known(content, levels, start, page.values) == page.values)
        _check(decode.times(content, start, page.values, out) >= 0)

    def _floats(self, name: str, file: int, chunk: Chunk, rows: int) -> Column:
        held = self._columns.get(name)
        if held is None or len(held) < rows:
            self._columns[name] = held = np.empty(rows, np.float32)
        out, done, known = held[:rows], 0, 0
        dictionary = np.empty(0, np.float32)
        for page, content in self._pages(file, chunk):
            if page.dictionary:
                _check(page.encoding in {pages.PLAIN, pages.PLAIN_DICTIONARY})
                dictionary = _plain(content, 0, page.values)
                continue
            _check(done + page.values <= rows)
            target = out[done : done + page.values]
            done += page.values
            levels, start = _levels(content, chunk)
            here = decode.count_known(content, levels, start, page.values) if chunk.optional else page.values
            _check(here >= 0)
            known += here
            whole = here == page.values
            if page.encoding == pages.PLAIN:
                values = _plain(content, start, here)
                if here == rows:
                    # The only page, nothing to be put in its place: no need to copy.
                    return Column(values, complete=True)
                if whole:
                    target[:] = values
            else:
                _check(page.encoding in {pages.RLE_DICTIONARY, pages.PLAIN_DICTIONARY})
                values = target if whole else self._floats_for(here)
                _check(decode.look_up(content, start, dictionary, values) >= 0)
            if not whole:
                decode.spread(content, levels, start, values, target)
        _check(done == rows)
        return Column(out, complete=known == rows)

    def _floats_for(self, count: int) -> Float32s:
        if len(self._dense) < count:
            self._dense = np.empty(count, np.float32)
        return self._dense[:count]

    def _pages(self, file: int, chunk: Chunk) -> Iterator[tuple[Page, decode.Bytes]]:
        if len(self._packed) < chunk.packed:
            self._packed = np.empty(chunk.packed, np.uint8)
        packed = self._packed[: chunk.packed]
        content = packed.data
        _check(os.preadv(file, [content], chunk.start) == chunk.packed)
        for page in pages.pages(content, chunk):
            body = packed[page.start : page.stop]
            _check(decode.lz4_size(body) == page.unpacked)
            yield page, np.frombuffer(self._codec.decompress(body, page.unpacked), np.uint8)


def _check(sound: bool) -> None:
    if not sound:
        raise LayoutError("a page")


def _levels(content: decode.Bytes, chunk: Chunk) -> tuple[int, int]:
    """Where the definition levels of a page begin, and where its values do."""
    if not chunk.optional:
        return 0, 0
    start = _LEVEL_BYTES + int.from_bytes(content[:_LEVEL_BYTES].tobytes(), "little")
    _check(_LEVEL_BYTES <= start <= len(content))
    return _LEVEL_BYTES, start


def _plain(content: decode.Bytes, start: int, count: int) -> Float32s:
    """``count`` floats as they are. Compiled loops take them at addresses that are multiples of their size only."""
    values: Float32s = np.frombuffer(content, np.float32, count, start)
    return values if values.flags.aligned else values.copy()


def warm_up() -> None:
    """Compile the loops, or load their machine code."""
    content, values, numbers = np.zeros(16, np.uint8), np.zeros(1, np.float32), np.zeros(1, np.int64)
    decode.lz4_size(content)
    decode.count_known(content, 0, 8, 0)
    decode.spread(content, 0, 8, values, values[:0])
    decode.look_up(content, 0, values, values)
    decode.times(content, 0, 1, numbers)
