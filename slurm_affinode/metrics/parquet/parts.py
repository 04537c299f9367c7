"""One part of a day: a Parquet file of samples sorted by (device, time), and two small index tables.

Merge rule: one row per (device, time), however often it was read. Of each metric, the last value that is not missing
counts; of GPU metrics (``SampleTable.largest``), the largest of the values of several sources, and of one source the
value of its last ingest, which corrects earlier ones. A row that several sources have is no longer corrected. Job IDs
are united.

Encodings were chosen by measurement (2.9 million rows, two cores, Polars): times as DELTA_BINARY_PACKED scan three
times faster than dictionary-encoded ones in a fifth of the space; LZ4 scans twice as fast as zstd and needs a fifth
more space; row groups of 256 Ki rows let a reader of few devices skip the rest.
"""

from __future__ import annotations

import errno
import inspect
import io
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from types import TracebackType

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.text import one_line
from slurm_affinode.metrics.parquet import manifest
from slurm_affinode.metrics.parquet.manifest import PartEntry
from slurm_affinode.metrics.parquet.table import GPU, ORIGIN, SampleTable
from slurm_affinode.metrics.schema import TIME

SORT = ("device", "time")


def united_jobs(job: pl.Expr) -> pl.Expr:
    """Aggregate the ``job`` texts of a group (IDs joined by ``,``) to their sorted union; null if there are none."""
    ids = job.drop_nulls().str.split(",").explode(empty_as_null=False).drop_nulls().unique().sort()
    joined = ids.str.join(",")
    return pl.when(ids.len() > 0).then(joined).otherwise(None)


def merge(frame: pl.DataFrame, table: SampleTable = GPU) -> pl.DataFrame:
    """Sort ``frame`` (``table.columns``, rows in the order of ingest) by (device, time) and merge equal keys."""
    ordered = _gathered(frame, _by_device(frame["device"].to_numpy()))
    same, later = _steps(ordered)
    if (same & (later < 0)).any():  # most sources have the samples of a device in the order of time
        ordered = frame.sort(SORT, maintain_order=True)
        same, later = _steps(ordered)
    repeat = pl.Series("repeat", np.concatenate([[False], same & (later == 0)])[: len(ordered)])
    if not repeat.any():
        return ordered
    shared = repeat | repeat.shift(-1, fill_value=False)
    return pl.concat([ordered.filter(~shared), _collapsed(ordered.filter(shared), table)]).sort(SORT)


def _by_device(devices: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the order of rows by device; those of a device keep theirs.

    A sort by two bytes is a radix sort, which is several times faster than one by eight. The upper four bytes of two
    devices are seldom equal, because the numbers are digests.
    """
    order = np.argsort((devices >> np.uint64(32)).astype(np.uint16), kind="stable")
    order = order[np.argsort((devices[order] >> np.uint64(48)).astype(np.uint16), kind="stable")]
    moved = devices[order]
    return np.argsort(devices, kind="stable") if (moved[1:] < moved[:-1]).any() else order


def _gathered(frame: pl.DataFrame, order: NDArray[np.int64]) -> pl.DataFrame:
    """Return the rows in an order that has each of them."""
    if (order[1:] > order[:-1]).all():
        return frame
    measured = [name for name in frame.columns if frame[name].null_count() < len(frame)]
    return frame.with_columns(pl.col(measured).gather(order))


def _steps(ordered: pl.DataFrame) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return, for all rows but the first, whether the device is that of the row before, and the milliseconds since."""
    devices, times = ordered["device"].to_numpy(), ordered["time"].to_physical().to_numpy()
    return devices[1:] == devices[:-1], times[1:] - times[:-1]


def _collapsed(frame: pl.DataFrame, table: SampleTable) -> pl.DataFrame:
    if table.largest:
        sources = frame[ORIGIN].unique() // _SOURCE
        if sources.drop_nulls().is_duplicated().any():
            frame = _corrected(frame.lazy(), (), table).collect()
    return frame.group_by(SORT, maintain_order=True).agg(_values(table)).select(frame.columns)


_SOURCE = 2**32
"""``ORIGIN`` divided by this is the source."""


def _corrected(frame: pl.LazyFrame, described: tuple[str, ...], table: SampleTable) -> pl.LazyFrame:
    """Keep the values of the last ingest of each source, in one row per (device, time) and source."""
    names = frame.collect_schema().names()
    source = (pl.col(ORIGIN) // _SOURCE).alias("source")
    latest_values = [pl.col(name).drop_nulls().last() for name in table.metrics]
    more = [*(agreed(name) for name in described), united_jobs(pl.col("job")).alias("job"), pl.col(ORIGIN).last()]
    by_ingest = frame.group_by(*SORT, ORIGIN, maintain_order=True).agg(
        *(value for value in _values(table) if value.meta.output_name() != ORIGIN),
        *(agreed(name) for name in described),
    )
    ordered = by_ingest.sort(*SORT, ORIGIN, maintain_order=True)
    return ordered.group_by(*SORT, source, maintain_order=True).agg(*latest_values, *more).select(names)


def _values(table: SampleTable) -> list[pl.Expr]:
    """Return the aggregations of rows of a device and time, besides the identity columns."""
    largest = [pl.col(name).max() if name in table.largest else pl.col(name).drop_nulls().last()
               for name in table.metrics]  # fmt: skip
    jobs = united_jobs(pl.col("job")).alias("job")
    if not table.largest:
        return [*largest, jobs]
    measured = pl.any_horizontal(pl.col(name).is_not_null() for name in table.metrics)
    sources = pl.col(ORIGIN).filter(measured)
    origin = pl.when(sources.n_unique() > 1).then(pl.lit(0, pl.UInt64)).when(sources.len() > 0).then(sources.last())
    return [*largest, jobs, origin.otherwise(pl.col(ORIGIN).last()).alias(ORIGIN)]


def merge_lazy(frame: pl.LazyFrame, described: tuple[str, ...] = (), table: SampleTable = GPU) -> pl.LazyFrame:
    """Merge a lazy frame like ``merge``; of the columns ``described``, only values that agree are known."""
    values = [*(agreed(name) for name in described), *_values(table)]
    rows = _corrected(frame, described, table) if table.largest else frame
    return rows.group_by(SORT, maintain_order=True).agg(values).sort(SORT)


def agreed(name: str) -> pl.Expr:
    """Aggregate an identity column to its value; null if there is none, or if there are several."""
    values = pl.col(name).drop_nulls()
    return pl.when(_compared(values, name).n_unique() <= 1).then(values.last()).otherwise(None).alias(name)


_VENDOR = "NVIDIA "
"""Drivers since 470 put it before the names of all models."""


def _compared(values: pl.Expr, name: str) -> pl.Expr:
    return values.cast(pl.String).str.strip_prefix(_VENDOR) if name == "model" else values


NAMES: dict[str, pl.DataType] = {"device": pl.UInt64(), "column": pl.String(), "value": pl.String()}
"""Values of identity columns (``SampleTable.described``) of devices, as text."""


def names_of(devices: pl.DataFrame, table: SampleTable, *more: str) -> pl.DataFrame:
    """Return ``NAMES`` of ``devices`` (``device``, the identity columns, and the columns ``more``, which are kept)."""
    frames = [
        devices.select("device", pl.lit(name).alias("column"), pl.col(name).cast(pl.String).alias("value"), *more)
        for name in table.described
    ]
    if not frames:
        return pl.DataFrame(schema={**NAMES, **{name: devices.schema[name] for name in more}})
    return pl.concat(frames).drop_nulls("value")


NAMES_SEEN: dict[str, pl.DataType] = {**NAMES, "first": TIME, "last": TIME}
"""``NAMES``, with the time of the first and last sample of the device on the days on which it had the name."""


def seen_names(tables: Sequence[pl.DataFrame], parts: Sequence[PartFiles]) -> pl.DataFrame:
    """Return ``NAMES_SEEN`` of ``parts`` of one store, of which ``tables`` are the tables of devices."""
    frames = []
    if tables:
        described = parts[0].table.described
        spans = pl.col("first").min(), pl.col("last").max()
        # Most devices have the same names every day.
        devices = pl.concat(tables).group_by("device", *described, maintain_order=True).agg(*spans)
        frames.append(names_of(devices, parts[0].table, "first", "last"))
    for devices, files in zip(tables, parts, strict=True):
        if files.names:
            frames.append(files.several().join(devices.select("device", "first", "last"), on="device"))
    return united_names(frames)


def united_names(names: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Return ``NAMES_SEEN`` with one row per name."""
    some = [frame.select(*NAMES_SEEN) for frame in names if frame.height]
    if not some:
        return pl.DataFrame(schema=NAMES_SEEN)
    spans = pl.col("first").min(), pl.col("last").max()
    return pl.concat(some).group_by(*NAMES, maintain_order=True).agg(*spans)


def several_names(names: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of ``names`` (``NAMES``) of identity columns with several values for a device."""
    if names.is_empty():
        return names
    value = pl.when(pl.col("column") == "model").then(_compared(pl.col("value"), "model")).otherwise("value")
    return names.filter(value.n_unique().over("device", "column") > 1)


def without_names(devices: pl.DataFrame, several: pl.DataFrame) -> pl.DataFrame:
    """Return ``devices`` without the values of the identity columns that have ``several`` (``NAMES``)."""
    if several.is_empty():
        return devices
    for (column,), group in several.group_by("column"):
        unknown = pl.col("device").is_in(group["device"].implode())
        # The price of an instance without a profile would be that of the whole GPU.
        names = ("mig_profile", "model") if column == "mig_profile" else (str(column),)
        devices = devices.with_columns(pl.when(~unknown).then(name).otherwise(None).alias(name) for name in names)
    return devices


POLARS_ERRORS = (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException)
"""Exceptions of Polars for a missing or damaged file; some damage makes it panic."""
_FILES_AT_ONCE = 256

DEVICES = GPU.devices
"""The table of the devices of a part, in the order of the part."""

JOBS: dict[str, pl.DataType] = {
    "device": pl.UInt64(),
    "job": pl.String(),  # one id
    "first": TIME,
    "last": TIME,
    "rows": pl.Int64(),
}
"""The job labels of a part: one row per longest sequence of consecutive samples of a device with the ID."""


@dataclass(frozen=True, slots=True)
class PartFiles:
    """Paths of the three files of a part."""

    samples: Path
    devices: Path
    jobs: Path
    devices_digest: str | None = None
    jobs_digest: str | None = None
    table: SampleTable = GPU
    names: tuple[tuple[int, str, str], ...] = ()
    """See ``PartEntry``."""
    fetch: Callable[[Sequence[Path]], None] | None = field(default=None, compare=False, repr=False)
    """Called with paths before they are read, if the files are copies of objects elsewhere."""

    @classmethod
    def of(cls, directory: Path, name: str, table: SampleTable = GPU) -> PartFiles:
        """Return the files of the part ``name`` in ``directory``."""
        samples, devices, jobs = (directory / f"{kind}-{name}.parquet" for kind in ("part", "devices", "jobs"))
        return cls(samples, devices, jobs, table=table)

    @classmethod
    def live(cls, directory: Path, entry: PartEntry, table: SampleTable = GPU) -> PartFiles:
        """Return the files of a part in the manifest, with their digests."""
        files = cls.of(directory, entry.name, table)
        return replace(files, devices_digest=entry.devices_digest, jobs_digest=entry.jobs_digest, names=entry.names)

    def several(self) -> pl.DataFrame:
        """Return ``NAMES`` of the identity columns with several values for a device on the day."""
        return pl.DataFrame(self.names, schema=NAMES, orient="row")

    def all(self) -> tuple[Path, Path, Path]:
        """Return all three paths."""
        return (self.samples, self.devices, self.jobs)


def fetch(parts: Sequence[PartFiles], paths: Iterable[Path]) -> None:
    """Make copies of the files ``paths`` of ``parts``, which are of one store, if they are objects elsewhere."""
    if parts and parts[0].fetch is not None:
        parts[0].fetch(list(paths))


def damaged(path: Path, what: str, table: SampleTable = GPU) -> UnreachableError:
    """Return the error for a file of a part that is unreadable or inconsistent."""
    hint = "remove the directory of the damaged day and take its files in again"
    if os.strerror(errno.EACCES) in what:
        hint = "the user of this command, and of workers, must be able to read the sample store"
    return UnreachableError(f"{path}: the {table.title} cannot be read: {what}", hint=hint)


def read_devices(files: PartFiles) -> pl.DataFrame:
    """Read ``DEVICES`` of a part. Raises ``UnreachableError`` if the table is missing or damaged."""
    return _read(files, files.devices, files.devices_digest, files.table.devices)


def read_tables(parts: Sequence[PartFiles]) -> list[tuple[pl.DataFrame, pl.DataFrame]]:
    """Read ``DEVICES`` and ``JOBS`` of many parts at once, several times faster than one by one.

    Raises ``UnreachableError``.
    """
    needed = [
        (files.table, *file)
        for files in parts
        for file in ((files.devices, files.devices_digest, files.table.devices), (files.jobs, files.jobs_digest, JOBS))
    ]
    fetch(parts, (path for _, path, *_ in needed))
    contents = [_content(path, digest, table) for table, path, digest, _ in needed]
    try:
        # If more than 512 wait for a file at the same time, Polars warns of a possible deadlock.
        slices = (contents[begin : begin + _FILES_AT_ONCE] for begin in range(0, len(contents), _FILES_AT_ONCE))
        frames = [frame for some in slices for frame in pl.collect_all([pl.scan_parquet(content) for content in some])]
    except POLARS_ERRORS:
        # Read one by one to find the damaged file.
        frames = [_table_of(content, path, table) for content, (table, path, *_) in zip(contents, needed, strict=True)]
    tables = iter(
        [_checked(frame, path, schema, table) for frame, (table, path, _, schema) in zip(frames, needed, strict=True)]
    )
    return list(zip(tables, tables, strict=True))


def read_jobs(files: PartFiles) -> pl.DataFrame:
    """Read ``JOBS`` of a part. Raises ``UnreachableError`` if the table is missing or damaged."""
    return _read(files, files.jobs, files.jobs_digest, JOBS)


def _read(files: PartFiles, path: Path, digest: str | None, schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
    table = files.table
    fetch([files], [path])
    return _checked(_table_of(_content(path, digest, table), path, table), path, schema, table)


def _content(path: Path, digest: str | None, table: SampleTable) -> bytes:
    """Read a small file. Its digest is checked first, because decoding some damaged files crashes the process."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise damaged(path, one_line(error), table) from error
    if digest is not None and manifest.digest(content) != digest:
        raise damaged(path, "its contents have changed since it was written", table)
    return content


def _table_of(content: bytes, path: Path, table: SampleTable) -> pl.DataFrame:
    try:
        return pl.read_parquet(content)
    except POLARS_ERRORS as error:
        raise damaged(path, one_line(error), table) from error


def _checked(
    frame: pl.DataFrame, path: Path, schema: Mapping[str, pl.DataType], table: SampleTable
) -> pl.DataFrame:  # fmt: skip
    """Return ``frame`` if its columns and values are consistent. Raises ``UnreachableError``."""
    if dict(frame.schema) != schema:
        raise damaged(path, "its columns are not those of such a table", table)
    if any(frame[name].has_nulls() for name in ("device", "first", "last", "rows")) or (frame["rows"] < 1).any():
        raise damaged(path, "one of its rows is empty", table)
    if schema is table.devices and (frame["device"].n_unique() < frame.height or (frame["step_ms"] < 0).any()):
        raise damaged(path, "its rows contradict each other", table)
    return frame


def write(table: pl.DataFrame, path: Path) -> str:
    """Write a table of a part and return its digest. Raises ``OSError``."""
    content = io.BytesIO()
    table.write_parquet(content, compression="zstd")
    path.write_bytes(content.getvalue())
    return manifest.digest(content.getvalue())


ROW_GROUP = 256 * 1024
_TELLING_ROWS = 10
_APART = 3
"""Factor by which neighboring gaps of a single source do not usually differ."""
_PAGES = {"data_page_size": 16 * ROW_GROUP} | (
    # Versions of pyarrow without this parameter do not limit the rows of a page.
    {"max_rows_per_page": ROW_GROUP} if "max_rows_per_page" in inspect.signature(pq.write_table).parameters else {}
)


@dataclass(frozen=True, slots=True)
class Part:
    """A live part, for reading."""

    day: date
    files: PartFiles
    entry: PartEntry
    single: bool
    """Whether it is the only part of its day: then no (device, time) occurs elsewhere, and no merge is needed."""

    @property
    def path(self) -> Path:
        """The file of samples: ``device``, ``time``, the metrics, ``job``, the identity; sorted by (device, time)."""
        return self.files.samples

    @property
    def rows(self) -> int:
        """Number of samples."""
        return self.entry.rows

    @property
    def first(self) -> datetime:
        """Time of the earliest sample."""
        return datetime.fromtimestamp(self.entry.first_ms / 1000, UTC)

    @property
    def last(self) -> datetime:
        """Time of the latest sample."""
        return datetime.fromtimestamp(self.entry.last_ms / 1000, UTC)

    def devices(self) -> pl.DataFrame:
        """Read ``DEVICES``: one row per device, in the order of the part."""
        return read_devices(self.files)

    def jobs(self) -> pl.DataFrame:
        """Read ``JOBS``: the job labels."""
        return read_jobs(self.files)


class PartWriter:
    """Write one part from frames sorted by (device, time) across all frames, with unique keys.

    It keeps a few row groups in memory. Frames have ``device`` and ``time`` and any of the metrics and ``job``. It is a
    context manager; on an exception, the files are removed.
    """

    def __init__(
        self, files: PartFiles, name: str, identities: pl.DataFrame, several: pl.DataFrame | None = None
    ) -> None:
        """``identities`` has ``device`` and the identity columns, one row per device that will be written.

        ``several``: ``NAMES`` of the identity columns with several values, which ``identities`` does not have.
        """
        self._files = files
        self._name = name
        self._of = files.table
        if identities["device"].is_duplicated().any():
            raise ValueError("a device has several identities")
        self._identities = identities
        self._several = pl.DataFrame(schema=NAMES) if several is None else several
        self._texts = {name: _encoded(self._identities[name]) for name in self._of.texts}
        self._pending: list[pl.DataFrame] = []
        self._pending_rows = 0
        self._devices: list[pl.DataFrame] = []
        self._jobs: list[pl.DataFrame] = []
        self._entry: PartEntry | None = None
        files.samples.parent.mkdir(parents=True, exist_ok=True)
        self._writer = pq.ParquetWriter(
            files.samples,
            self._of.written,
            compression="lz4",
            use_dictionary=[*self._of.dictionary, *self._of.texts],
            column_encoding={"time": "DELTA_BINARY_PACKED"},
            store_schema=False,
            **_PAGES,
            sorting_columns=[pq.SortingColumn(0), pq.SortingColumn(1)],
        )

    @property
    def entry(self) -> PartEntry:
        """The entry of the written part. Available after the context has ended without an error."""
        if self._entry is None:
            raise RuntimeError(f"{self._files.samples}: is not written yet")
        return self._entry

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._flush(everything=True)
            self._writer.close()
            if kind is None:
                self._finish()
        except BaseException:
            kind = BaseException
            raise
        finally:
            if kind is not None:
                for path in self._files.all():
                    path.unlink(missing_ok=True)

    def write(self, frame: pl.DataFrame) -> None:
        """Append rows. The rows of a device may continue in the next frame."""
        if frame.is_empty():
            return
        full = frame.select(
            (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
            for name, dtype in self._of.columns.items()
        )
        self._pending.append(full)
        self._pending_rows += len(full)
        if self._pending_rows >= 4 * ROW_GROUP // self._of.breadth:
            self._flush(everything=False)

    def _flush(self, *, everything: bool) -> None:
        if not self._pending:
            return
        rows = pl.concat(self._pending)
        cut = len(rows) if everything else _last_boundary(rows)
        complete, rest = rows[:cut], rows[cut:]
        self._pending, self._pending_rows = ([rest] if len(rest) else []), len(rest)
        if complete.is_empty():
            return
        self._writer.write_table(self._table(complete), row_group_size=ROW_GROUP // self._of.breadth)
        self._devices.append(_summary(complete))
        self._jobs.append(job_runs(complete))

    def _table(self, rows: pl.DataFrame) -> pa.Table:
        starts = device_starts(rows)
        devices = pl.DataFrame({"device": rows["device"][starts]})
        row_numbers = devices.join(
            self._identities.with_row_index("at").select("device", "at"), on="device", how="left", maintain_order="left"
        )["at"]
        if row_numbers.has_nulls():
            raise ValueError("a device was written that has no identity")
        places = pa.array(np.repeat(row_numbers.to_numpy(), np.diff(starts, append=len(rows))))
        columns = [
            _encoded(rows[name]) if dtype == pl.String() else rows[name].to_arrow()
            for name, dtype in self._of.columns.items()
        ]
        columns += [
            self._texts[name].take(places) if name in self._texts else self._identities[name].to_arrow().take(places)
            for name in self._of.identity
        ]
        schema = self._of.written
        return pa.Table.from_arrays(
            [column.cast(kind.type) for column, kind in zip(columns, schema, strict=True)], schema=schema
        )

    def _finish(self) -> None:
        devices = pl.concat(self._devices) if self._devices else pl.DataFrame(schema={"device": pl.UInt64()})
        if devices.is_empty():
            raise ValueError("a part needs at least one sample")
        table = devices.join(self._identities, on="device", how="left", maintain_order="left").select(
            pl.col(name).cast(dtype) for name, dtype in self._of.devices.items()
        )
        labels = pl.concat(self._jobs).select(pl.col(n).cast(t) for n, t in JOBS.items())
        digests = write(table, self._files.devices), write(labels, self._files.jobs)
        first, last = table["first"].dt.epoch("ms").min(), table["last"].dt.epoch("ms").max()
        several = self._several.join(table, on="device", how="semi").select(*NAMES).unique().sort(*NAMES)
        self._entry = PartEntry(
            self._name, int(table["rows"].sum()), len(table), int(first), int(last), *digests,  # type: ignore[arg-type]
            names=tuple(several.iter_rows()),
        )  # fmt: skip


def _last_boundary(rows: pl.DataFrame) -> int:
    """Return the first row of the last device of ``rows``, which may continue in the next frame."""
    last = rows["device"][-1]
    return len(rows) - int((rows["device"] == last).sum())


def _encoded(texts: pl.Series) -> pa.DictionaryArray:
    return texts.to_arrow().cast(pa.string()).dictionary_encode()


def device_starts(rows: pl.DataFrame) -> NDArray[np.int64]:
    """Return the first row of each device of ``rows``, which are sorted by device."""
    devices = rows["device"].to_numpy()
    return np.concatenate([np.zeros(min(1, len(devices)), np.int64), np.flatnonzero(devices[1:] != devices[:-1]) + 1])


def _summary(rows: pl.DataFrame) -> pl.DataFrame:
    """Return, per device in order: number of rows, first and last time, sampling interval."""
    starts, times = device_starts(rows), rows["time"]
    counts = np.diff(starts, append=len(rows))
    gap = np.diff(times.to_physical().to_numpy(), prepend=0)
    several = counts > 1
    gap[starts[several]] = gap[starts[several] + 1]  # of the first row of a device it is that of the next one
    least, largest = np.minimum.reduceat(gap, starts), np.maximum.reduceat(gap, starts)
    step = pl.Series(least, dtype=pl.Int64).set(pl.Series(~several), None)
    if (differ := several & (least < largest)).any():
        uneven = rows.select("device", "time").filter(pl.Series(np.repeat(differ, counts))).with_columns(gaps())
        medians = uneven.group_by("device", maintain_order=True).agg(sampling_step().alias("step_ms"))["step_ms"]
        step = step.scatter(np.flatnonzero(differ), medians)
    spans = {"first": times[starts], "last": times[starts + counts - 1], "step_ms": step}
    return pl.DataFrame({"device": rows["device"][starts], "rows": counts, **spans})


def gaps() -> tuple[pl.Expr, pl.Expr]:
    """Return the columns for ``sampling_step``, of rows by device with ascending times.

    ``gap``: milliseconds since the row before; ``larger``: the larger one of this gap and the next one.
    """
    same = pl.col("device") == pl.col("device").shift()
    gap = pl.when(same).then(pl.col("time").diff().dt.total_milliseconds())
    following = gap.shift(-1)
    larger = pl.when(following > gap).then(following).when(following.is_not_null()).then(gap)
    return gap.alias("gap"), larger.alias("larger")


def sampling_step() -> pl.Expr:
    """Aggregate the ``gaps`` of a device to its sampling interval in ms: the median gap.

    If two sources sample shortly after each other, every second gap is small, and so may be the median. If three of
    four pairs of neighboring gaps show this, the median of the larger ones is used.
    """
    median, larger = pl.col("gap").median(), pl.col("larger")
    turns = (pl.len() >= _TELLING_ROWS) & (larger.quantile(0.25, "lower") > _APART * median)
    return pl.when(turns).then(larger.median()).otherwise(median).round().cast(pl.Int64)


def job_runs(rows: pl.DataFrame) -> pl.DataFrame:
    """Return ``JOBS`` for rows sorted by (device, time), which must have all rows of each device."""
    if rows["job"].null_count() == len(rows):
        return pl.DataFrame(schema=JOBS)
    run = ((pl.col("device") != pl.col("device").shift()) | ~pl.col("job").eq_missing(pl.col("job").shift())).fill_null(
        value=True
    )
    runs = (
        rows.select("device", "time", "job", run.cum_sum().alias("run"))
        .group_by("run", maintain_order=True)
        .agg(
            pl.col("device").first(),
            pl.col("job").first(),
            pl.col("time").first().alias("first"),
            pl.col("time").last().alias("last"),
            pl.len().cast(pl.Int64).alias("rows"),
        )
        .filter(pl.col("job").is_not_null())
        .with_columns(pl.col("job").str.split(","))
        .explode("job", empty_as_null=False)
    )
    if not len(runs):
        return pl.DataFrame(schema=JOBS)
    # If several IDs share a device, one of them may continue while another begins: join its consecutive runs.
    runs = runs.sort("device", "job", "run", maintain_order=True)
    follows = (
        (pl.col("device") == pl.col("device").shift())
        & (pl.col("job") == pl.col("job").shift())
        & (pl.col("run") == pl.col("run").shift() + 1)
    ).fill_null(value=False)
    return (
        runs.with_columns((~follows).cum_sum().alias("whole"))
        .group_by("whole", maintain_order=True)
        .agg(
            pl.col("device").first(),
            pl.col("job").first(),
            pl.col("first").first(),
            pl.col("last").last(),
            pl.col("rows").sum(),
        )
        .select(*JOBS)
    )


def scan_rows(path: Path, table: SampleTable, columns: Collection[str]) -> pl.LazyFrame:
    """Return the ``columns`` of the samples of a file, also those that a file of an earlier version may lack.

    Raises ``UnreachableError`` for a damaged file, if its columns are not known.
    """
    rows = pl.scan_parquet(path)
    added = [name for name in (*table.added, ORIGIN) if name in columns]
    if added:
        try:
            column_names = rows.collect_schema().names()
        except POLARS_ERRORS as error:
            raise damaged(path, one_line(error), table) from error
        rows = rows.with_columns(
            pl.lit(None, table.columns[name]).alias(name) for name in added if name not in column_names
        )
    return rows.select(columns)


def read_rows(files: PartFiles, start: int, length: int) -> pl.DataFrame:
    """Read ``length`` samples of a part from row ``start``, without identity columns. Raises ``UnreachableError``."""
    path, columns = files.samples, files.table.columns
    try:
        rows = scan_rows(path, files.table, tuple(columns)).slice(start, length).collect()
    except POLARS_ERRORS as error:
        raise damaged(path, one_line(error), files.table) from error
    if len(rows) != length:
        raise damaged(path, f"it ends before row {start + length:,}", files.table)
    return rows


def concat(frames: Iterable[pl.DataFrame], table: SampleTable) -> pl.DataFrame:
    """Concatenate ``frames``; without frames, return an empty one with the columns of ``table``."""
    frame_list = list(frames)
    return pl.concat(frame_list) if frame_list else pl.DataFrame(schema=table.columns)
