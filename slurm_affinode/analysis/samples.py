"""The samples of an interval as a stream of blocks, with an index of rows by device.

Rows of all parts are numbered consecutively, in the order of the parts. For a day with one part, the index is read from
its device table; a day with several parts is merged first, which is slower.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from slurm_affinode.analysis.block import COLUMNS, Block, BlockColumn, Pieces
from slurm_affinode.analysis.segments import FAR, Floats, Ints
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.object_url import StorePlace
from slurm_affinode.base.spread import Spread
from slurm_affinode.base.text import one_line
from slurm_affinode.metrics.parquet import parts
from slurm_affinode.metrics.parquet.parts import (
    DEVICES,
    JOBS,
    NAMES,
    POLARS_ERRORS,
    Part,
    agreed,
    gaps,
    read_tables,
    sampling_step,
    seen_names,
    several_names,
    united_names,
    without_names,
)
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.parquet.writer import adoptions
from slurm_affinode.metrics.schema import IDENTITY, METRICS, TIME

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt(3); from glibc's ``malloc.h``."""
_ARRAYS = (64 << 20, 32 << 20)
"""Values for ``M_MMAP_THRESHOLD``: larger arrays are still returned at once. glibc before 2.35 accepts at most the
second one (``HEAP_MAX_SIZE / 2``)."""
_RETAINED_BYTES = 512 << 20
_STEP = 16 << 20


@cache
def keep_freed() -> None:
    """Make this process keep freed memory (some hundred MiB) instead of returning it to the kernel.

    This is for work on many arrays of a few MiB. With glibc's defaults, each of them gets new pages, and their creation
    takes as long as the computation. Without glibc this is a no-op.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        # Setting only the other two would disable the dynamic adjustment of the first (mallopt(3)).
        if any(mallopt(_M_MMAP_THRESHOLD, size) for size in _ARRAYS):
            mallopt(_M_TRIM_THRESHOLD, _RETAINED_BYTES)
            mallopt(_M_TOP_PAD, _STEP)


BLOCK_ROWS = 512 * 1024
"""Maximum number of rows in a block. Smaller row groups are passed on as blocks."""
FEW_ROWS = 10
"""With fewer samples of a device on a day, the sampling interval of that day is unreliable."""
FEW_SAMPLES = 3
EARLIER = timedelta(days=7)
"""A GPU still counts as part of its node for this long after its last sample: longer than a weekend without an
administrator, shorter than the time between most hardware changes."""
TASK_ROWS = 4 << 20
"""Samples of a group of devices, roughly: some seconds of work."""
TASK_ROWS_OF_DAY = 256 << 10
"""Samples of a group per day, at least: row groups of a part have as many."""
_DAY = timedelta(days=1)
_SCHEMA = {name: TIME if name == "time" else METRICS[name] for name in COLUMNS}
_TYPES = {name: pa.timestamp("ms", "UTC") if name == "time" else pa.float32() for name in COLUMNS}
_OTHER_TYPES = "its columns are not those of a part"


@dataclass(frozen=True, slots=True)
class Source:
    """Rows that are read together: the only part of a day, or several parts of a day, merged on reading."""

    day: date
    path: Path | None
    row: int
    rows: int


@dataclass(frozen=True, slots=True)
class Index:
    """Index of the samples of an interval, from the tables beside the parts."""

    store: SampleStore
    sources: tuple[Source, ...]
    devices: pl.DataFrame
    """``DEVICES``, one row per device; ``rows``, ``first``, ``last`` over all parts; ``step_ms`` is never None.
    Identity columns with several values are null."""
    pieces: Pieces
    labels: pl.DataFrame
    """``JOBS``: job labels in the interval, with the row of the device table as ``at``."""
    earlier: pl.DataFrame
    """``DEVICES`` with samples in the period ``EARLIER`` before the interval."""
    names: pl.DataFrame
    """``NAMES_SEEN`` of the devices in the interval and in that period: PCI addresses, indices, models."""
    until: datetime
    """End of the interval; parts are whole days and may contain later samples."""

    @property
    def rows(self) -> int:
        """Number of rows of all sources."""
        return self.sources[-1].row + self.sources[-1].rows if self.sources else 0

    def where(self, row: int) -> Path:
        """Return the file that contains a row, or the root of the sample store for a day merged on reading."""
        source = next(
            (candidate for candidate in self.sources if candidate.row <= row < candidate.row + candidate.rows), None
        )
        return self.store.root if source is None or source.path is None else source.path


@dataclass(frozen=True, slots=True)
class StoredSamples:
    """A sample store as the input of tasks on other machines, with the parts that determine their results."""

    place: StorePlace
    parts: tuple[str, ...]
    """Names of the parts of an interval; a part is never changed."""

    @classmethod
    def of(cls, store: SampleStore, since: datetime | None, until: datetime) -> StoredSamples:
        """Return the parts of the interval, and of the day after it; ``since``: ``None`` for all before it."""
        names = (f"{part.path.parent.name}/{part.path.name}" for part in store.parts(since, until + _DAY))
        return cls(store.place.absolute(), tuple(names))


@contextmanager
def store_of_task(stored: StoredSamples) -> Iterator[SampleStore]:
    """Open a store on the machine of a task. Raises ``UnreachableError`` if it is missing."""
    place = stored.place
    if isinstance(place, Path) and not place.is_dir():
        raise UnreachableError(
            f"{place}: no such directory", hint="workers need the GPU metrics at the same path as this machine"
        )
    with closing(SampleStore(place)) as store:
        yield store


def device_groups(devices: pl.DataFrame, days: int) -> list[pl.Series]:
    """Split the devices of a table with ``device`` and ``rows``, samples in ``days`` days, into groups of neighbors.

    Each group is the work of a task: samples of neighbors are stored together.
    """
    rows = devices.group_by("device").agg(pl.col("rows").max()).sort("device")
    most = max(TASK_ROWS, days * TASK_ROWS_OF_DAY)
    group = (rows["rows"].cum_sum() - rows["rows"]) // most
    return [some["device"] for some in rows.with_columns(group.alias("group")).partition_by("group")]


Shared = TypeVar("Shared")


def read_by_groups(
    read: Callable[[SampleStore, pl.DataFrame, Shared], pl.DataFrame], store: SampleStore, devices: pl.DataFrame,
    shared: Shared, *, days: int, until: datetime, spread: Spread | None,
) -> pl.DataFrame:  # fmt: skip
    """Return ``read`` of the devices, or with ``spread`` of each of several groups (``device_groups``).

    ``read`` reads no samples after ``until``.
    """
    groups = [] if spread is None else device_groups(devices, days)
    if spread is None or len(groups) < 2:
        return read(store, devices, shared)
    todo = [devices.filter(pl.col("device").is_in(group.implode())) for group in groups]
    frames: Iterator[pl.DataFrame] = spread(
        partial(_read_in_task, read), todo, (StoredSamples.of(store, None, until), shared)
    )
    return pl.concat(frames)


def _read_in_task(
    read: Callable[[SampleStore, pl.DataFrame, Shared], pl.DataFrame],
    devices: pl.DataFrame,
    shared: tuple[StoredSamples, Shared],
) -> pl.DataFrame:
    stored, shared_input = shared
    with store_of_task(stored) as store:
        return read(store, devices, shared_input)


def read_index(store: SampleStore, since: datetime, until: datetime, *, max_gap_steps: float) -> Index:
    """Read the index of the parts that overlap the half-open interval.

    Raises ``UnreachableError`` for a damaged part.
    """
    keep_freed()
    # Of the first day all parts: a GPU exists for a while after its last sample, whichever others are sampled later.
    parts = store.parts(since.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0), until + _DAY)
    beside = read_tables([part.files for part in parts])
    tables_of = dict(zip((part.path for part in parts), beside, strict=True))
    sources: list[Source] = []
    tables: list[pl.DataFrame] = []
    labels: list[pl.DataFrame] = []
    later: list[pl.DataFrame] = []
    during: list[Part] = []
    after: list[Part] = []
    row = 0
    for day, group in groupby(parts, key=lambda part: part.day):
        of_day = list(group)
        table = tables_of[of_day[0].path][0] if of_day[0].single else _merged_devices(store, day)
        if min(part.first for part in of_day) >= until:
            later.append(table)
            after += of_day
            continue
        during += of_day
        rows = int(table["rows"].sum())
        if of_day[0].single and rows != of_day[0].rows:
            raise damaged(of_day[0].files.devices, f"{rows:,} samples instead of {of_day[0].rows:,}")
        sources.append(Source(day, of_day[0].path if of_day[0].single else None, row, rows))
        tables.append(table.with_columns(pl.lit(row, dtype=pl.Int64).alias("base")))
        labels += [tables_of[part.path][1] for part in of_day]
        row += rows
    before = since - min(EARLIER, since - datetime.min.replace(tzinfo=UTC))
    # Parts are whole days; a device may have its last sample on their first day, but before the period.
    earlier, names_before = (
        table.filter(pl.col("last") >= before) if table.height else table
        for table in store.devices_and_names(before, since)
    )
    names_during, names_after = (
        seen_names([tables_of[part.path][0] for part in some], [part.files for part in some])
        for some in (during, after)
    )
    earlier_names = united_names([names_during, names_before]) if names_before.height else names_during
    several = several_names(united_names([earlier_names, names_after]) if names_after.height else earlier_names)
    names = _same_gpus(tables, [*later, earlier], several.select(*NAMES))
    table = pl.concat(tables) if tables else pl.DataFrame(schema={**DEVICES, "base": pl.Int64()})
    labeled = pl.concat(labels) if labels else pl.DataFrame(schema=JOBS)
    table, labeled, earlier, *later = (_renamed(frame, names) for frame in (table, labeled, earlier, *later))
    labeled = _across_midnight(labeled, table)
    if names:
        earlier_names = united_names([_renamed(earlier_names, names)])
    if names or names_after.height:
        several = several_names(earlier_names)
    devices, earlier = (without_names(frame, several) for frame in (_devices(table), earlier))
    pieces = _pieces(table, devices, pl.concat(later) if later else None, max_gap_steps)
    # Parts are whole days; labels outside the interval belong to other runs.
    if labeled.height:
        labeled = labeled.filter((pl.col("last") >= since) & (pl.col("first") < until))
    row_numbers = devices.select("device").with_row_index("at").with_columns(pl.col("at").cast(pl.Int64))
    labeled = labeled.join(row_numbers, on="device", how="left", maintain_order="left")
    return Index(store, tuple(sources), devices, pieces, labeled, earlier, earlier_names, until)


def _across_midnight(labels: pl.DataFrame, table: pl.DataFrame) -> pl.DataFrame:
    """Join labels (``JOBS``) that continue on the next day; parts end at midnight UTC, and labels do not.

    ``table``: a row per device and day. A label continues if the last sample of one day and the first one of the
    device's next day have it.
    """
    ordered = labels.sort("device", "job", "first", "last")
    if ordered.is_empty() or table["device"].n_unique() == table.height:
        return ordered  # a single day
    following = table.select("device", "last", pl.col("first").shift(-1).over("device", order_by="first").alias("next"))
    ordered = ordered.join(following.drop_nulls(), on=["device", "last"], how="left", maintain_order="left")
    continued = (pl.col("first") == pl.col("next").shift().over("device", "job")).fill_null(value=False)
    return (
        ordered.with_columns((~continued).cum_sum().alias("stretch"))
        .group_by("stretch", maintain_order=True)
        .agg(pl.col("device", "job", "first").first(), pl.col("last").last(), pl.col("rows").sum())
        .select(labels.columns)
    )


def _same_gpus(
    days: Sequence[pl.DataFrame], compared_days: Sequence[pl.DataFrame], several: pl.DataFrame
) -> dict[int, int]:
    """Return the devices that later or earlier samples identify with another one: number -> that number.

    ``days``: the device tables of the days of the interval; ``several``: ``NAMES`` that they lack.
    Within a day, the store has identified devices already.
    """
    if not any(table["uuid"].has_nulls() for table in (*days, *compared_days)):
        return {}
    every = pl.concat([table.select("device", *IDENTITY) for table in (*days, *compared_days)])
    names = adoptions(every, several)
    for table in days:
        names_in_table = set(table["device"].to_list())
        names = {
            device: replacement
            for device, replacement in names.items()
            if not (device in names_in_table and replacement in names_in_table)
        }
    return names


def _renamed(table: pl.DataFrame, names: Mapping[int, int]) -> pl.DataFrame:
    if not names:
        return table
    old, new = (pl.Series(values, dtype=pl.UInt64) for values in (names.keys(), names.values()))
    return table.with_columns(pl.col("device").replace(old, new))


def _merged_devices(store: SampleStore, day: date) -> pl.DataFrame:
    table = (
        _merged(store, day)
        .with_columns(gaps())
        .group_by("device", maintain_order=True)
        .agg(
            *(agreed(name) for name in IDENTITY),
            pl.len().cast(pl.Int64).alias("rows"),
            pl.col("time").first().alias("first"),
            pl.col("time").last().alias("last"),
            sampling_step().alias("step_ms"),
        )
    )
    return _collect(table.select(pl.col(name).cast(dtype) for name, dtype in DEVICES.items()), store.root)


def _merged(store: SampleStore, day: date) -> pl.LazyFrame:
    start = datetime(day.year, day.month, day.day, tzinfo=UTC)
    return store.scan(start, start + _DAY).sort("device", "time")


def _devices(table: pl.DataFrame) -> pl.DataFrame:
    """Return one row per device.

    Its sampling interval is the median over its days; with too few samples, the median of the devices of its cluster;
    else 0, and a sample without a successor counts for no time.
    """
    telling = pl.col("step_ms").filter(pl.col("rows") >= FEW_ROWS).median()
    devices = (
        table.group_by("device", maintain_order=True)
        .agg(
            *(agreed(name) for name in IDENTITY),
            pl.col("rows").sum(),
            pl.col("first").min(),
            pl.col("last").max(),
            pl.coalesce(telling, pl.col("step_ms").median()).alias("step_ms"),
        )
        .sort("cluster", "node", "index", "pci", "uuid", "mig", "device", nulls_last=True)
    )
    measured = pl.when(pl.col("rows") >= FEW_SAMPLES).then(pl.col("step_ms"))
    usual = measured.median().over("cluster")
    return devices.with_columns(
        pl.coalesce(measured, usual, pl.col("step_ms"), pl.lit(0)).round().cast(pl.Int64).alias("step_ms")
    ).select(*DEVICES)


def _pieces(table: pl.DataFrame, devices: pl.DataFrame, later: pl.DataFrame | None, max_gap_steps: float) -> Pieces:
    row_numbers = devices.select("device", pl.col("step_ms").alias("usual")).with_row_index("at")
    rows = table.join(row_numbers, on="device", how="left", maintain_order="left")
    measured = pl.when(pl.col("rows") >= FEW_ROWS).then(pl.col("step_ms"))
    following = pl.lit(None, table.schema["first"])
    if devices.height < rows.height:  # several days
        following = pl.col("first").shift(-1).over("device", order_by="base")
    rows = rows.with_columns(pl.coalesce(measured, pl.col("usual")).alias("step"), following.alias("next"))
    if later is not None:
        first = later.group_by("device").agg(pl.col("first").min().alias("later"))
        rows = rows.join(first, on="device", how="left", maintain_order="left").with_columns(
            pl.coalesce("next", "later")
        )
    end = rows["rows"].cum_sum().to_numpy().astype(np.int64)
    step = rows["step"].to_numpy().astype(np.int64)
    limit = (step * max_gap_steps).astype(np.float64)
    return Pieces(
        device=rows["at"].to_numpy().astype(np.int64),
        row=end - rows["rows"].to_numpy(),
        end=end,
        step=step,
        limit=limit,
        next_time=rows["next"].to_physical().fill_null(FAR).to_numpy().astype(np.int64),
        first_time=rows["first"].to_physical().to_numpy().astype(np.int64),
        reach=rows["last"].to_physical().to_numpy() + np.ceil(limit).astype(np.int64) + 1,
    )


def memory_mib(index: Index) -> Floats:
    """Return the memory of each of ``index.devices``, MiB: the largest value of its last day, NaN if there is none.

    Raises ``UnreachableError`` for a damaged part.
    """
    sizes = np.full(index.devices.height, np.nan)
    pieces = index.pieces
    last = np.full(index.devices.height, -1)
    last[pieces.device] = np.arange(len(pieces.device))
    for source in index.sources:
        low, high = np.searchsorted(pieces.row, (source.row, source.row + source.rows))
        chosen = last[(low <= last) & (last < high)]
        if not len(chosen):
            continue
        if source.path is None:
            lazy, where = _merged(index.store, source.day), index.store.root
        else:
            index.store.fetch([source.path])
            lazy, where = pl.scan_parquet(source.path), source.path
        values = _collect(lazy.select(pl.col("fb_total_mib").cast(pl.Float64).fill_null(np.nan)), where).to_series()
        if len(values) != source.rows:
            raise damaged(where, f"{len(values):,} samples instead of {source.rows:,}")
        largest = np.fmax.reduceat(values.to_numpy(), pieces.row[low:high] - source.row)
        sizes[pieces.device[chosen]] = largest[chosen - low]
    return sizes


def blocks(index: Index, *, block_rows: int = BLOCK_ROWS) -> Iterator[Block]:
    """Yield all rows, in order."""
    row = index.sources[0].row if index.sources else 0
    before: tuple[int, pl.DataFrame] | None = None
    for frame in _frames(index, block_rows):
        if before is not None:
            yield block(*before, next_time=int(times(frame)[0]))
        before = (row, frame)
        row += len(frame)
    if before is not None:
        yield block(*before, next_time=FAR)


def blocks_of(index: Index, selected: Ints) -> Iterator[Block]:
    """Yield the rows of the pieces ``selected`` (ascending numbers), together with short ranges between them.

    Every block begins and ends at a piece boundary.
    """
    pieces = index.pieces
    for source in index.sources:
        low, high = np.searchsorted(selected, np.searchsorted(pieces.row, (source.row, source.row + source.rows)))
        positions = selected[low:high]
        if not len(positions):
            continue
        rows = _rows_by_number(index.store, source)
        for start, stop in joined(pieces.row[positions], pieces.end[positions], BLOCK_ROWS):
            yield block(start, rows(start - source.row, stop - start), next_time=FAR)


def blocks_between(store: SampleStore, source: Source, start: int, stop: int) -> Iterator[Block]:
    """Yield the rows of ``source`` from number ``start`` to before ``stop``, which begin and end whole pieces."""
    frame = _rows_by_number(store, source)(start - source.row, stop - start)
    if frame.height != stop - start:
        where = store.root if source.path is None else source.path
        raise damaged(where, f"{frame.height:,} samples instead of {stop - start:,}")
    for offset in range(0, frame.height, BLOCK_ROWS):
        part = frame.slice(offset, BLOCK_ROWS)
        after = frame.slice(offset + BLOCK_ROWS, 1)
        yield block(start + offset, part, next_time=FAR if after.is_empty() else int(times(after)[0]))


def _rows_by_number(store: SampleStore, source: Source) -> Callable[[int, int], pl.DataFrame]:
    """Return a function that reads rows of ``source``, given the first row and the number of rows."""
    if source.path is not None:
        store.fetch([source.path])
        return partial(rows_of, source.path)
    return _collect(_merged(store, source.day).select(COLUMNS), store.root).slice


def joined(start: Ints, end: Ints, most: int) -> Iterator[tuple[int, int]]:
    """Merge neighboring ranges up to ``most`` rows; a single range may be longer."""
    low, high = int(start[0]), int(end[0])
    for s, e in zip(start[1:].tolist(), end[1:].tolist(), strict=True):
        if e - low > most:
            yield low, high
            low = s
        high = e
    yield low, high


def _frames(index: Index, block_rows: int) -> Iterator[pl.DataFrame]:
    for merged, group in groupby(index.sources, key=lambda source: source.path is None):
        sources = list(group)
        if merged:
            for source in sources:
                whole = _collect(_merged(index.store, source.day).select(COLUMNS), index.store.root)
                yield from whole.iter_slices(block_rows)
            continue
        paths = [source.path for source in sources if source.path is not None]
        index.store.fetch(paths)
        lazy = pl.scan_parquet(paths).select(_columns(sources))
        try:
            for frame in lazy.collect_batches(maintain_order=True):
                yield from [frame] if len(frame) <= block_rows else frame.iter_slices(block_rows)
        except POLARS_ERRORS as error:
            raise _damaged_file(paths, error) from error


@contextmanager
def naming_damage(store: SampleStore, since: datetime, until: datetime) -> Iterator[None]:
    """Raise ``UnreachableError`` with the name of the damaged part for an error of a scan of ``store`` in the block."""
    try:
        yield
    except POLARS_ERRORS as error:
        raise _damaged_file([part.path for part in store.parts(since, until)] or [store.root], error) from error


def _damaged_file(paths: Sequence[Path], error: BaseException) -> UnreachableError:
    """Return the exception for ``error``, which a scan of all ``paths`` raised, with the name of the damaged file."""
    for path in paths:
        try:
            for _ in pl.scan_parquet(path).select(COLUMNS).collect_batches(maintain_order=False):
                pass
        except POLARS_ERRORS as failure:
            return damaged(path, failure)
    return damaged(paths[0].parents[1], error)


def rows_of(path: Path, start: int, count: int) -> pl.DataFrame:
    """Read a range of rows of a part. Raises ``UnreachableError``."""
    frame = _collect(pl.scan_parquet(path).select(COLUMNS).slice(start, count), path)
    if dict(frame.schema) != _SCHEMA:
        raise damaged(path, _OTHER_TYPES)
    return frame


def _collect(lazy: pl.LazyFrame, path: Path) -> pl.DataFrame:
    try:
        return lazy.collect()
    except POLARS_ERRORS as error:
        raise damaged(path, error) from error


def damaged(where: Path, error: BaseException | str) -> UnreachableError:
    """Return the exception for a part that cannot be read."""
    return parts.damaged(where, one_line(error))


def _columns(sources: Sequence[Source]) -> list[str]:
    """Return the columns with at least one value, by the statistics of the files.

    Raises ``UnreachableError`` if a file does not match the tables beside it.
    """
    absent = [name for name in COLUMNS if name != "time"]
    for source in sources:
        if source.path is not None:
            meta = _metadata(source.path, source.rows)
            absent = [name for name in absent if not _has_values(meta, name)]
    return [name for name in COLUMNS if name not in absent]


def _metadata(path: Path, rows: int) -> pq.FileMetaData:
    try:
        with path.open("rb") as file:  # given the path, pyarrow would start its file systems
            meta = pq.read_metadata(file)
        types = meta.schema.to_arrow_schema()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise damaged(path, error) from error
    if meta.num_rows != rows:
        raise damaged(path, f"{meta.num_rows:,} samples instead of {rows:,}")
    if any(types.get_field_index(name) < 0 or types.field(name).type != kind for name, kind in _TYPES.items()):
        raise damaged(path, _OTHER_TYPES)
    return meta


def _has_values(meta: pq.FileMetaData, name: str) -> bool:
    position = meta.schema.names.index(name)
    for number in range(meta.num_row_groups):
        group = meta.row_group(number)
        statistics = group.column(position).statistics
        if statistics is None or not statistics.has_null_count or statistics.null_count < group.num_rows:
            return True
    return False


def block(row: int, frame: pl.DataFrame, *, next_time: int) -> Block:
    """Convert a frame to a block. ``row``: number of the frame's first row."""
    columns: dict[str, BlockColumn] = {}
    for series in frame.iter_columns():
        if series.name != "time" and (missing := series.null_count()) < len(series):
            whole = series.rechunk()
            columns[series.name] = _with_missing(whole) if missing else BlockColumn(whole.to_numpy(), complete=True)
    return Block(row, times(frame), columns, next_time)


def _with_missing(series: pl.Series) -> BlockColumn:
    """Return a column with its bitmap: filling missing values would read and write all of them again."""
    array = series.to_arrow()
    valid, values = array.buffers()
    stored = np.frombuffer(values, np.float32, len(array), 4 * array.offset)
    return BlockColumn(stored, False, np.frombuffer(valid, np.uint8), array.offset)


def times(frame: pl.DataFrame) -> Ints:
    """Return the times of a frame in milliseconds."""
    return frame["time"].rechunk().to_numpy().view(np.int64)
