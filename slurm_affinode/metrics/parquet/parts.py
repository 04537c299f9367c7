"""One part of a day: a Parquet file of samples sorted by (device, time), and two small index tables.

Merge rule: one row per (device, time), however often it was read. For each metric, the last value that is not missing
wins; job IDs are united.

Encodings were chosen by measurement (2.9 million rows, two cores, Polars): times as DELTA_BINARY_PACKED scan three
times faster than dictionary-encoded ones in a fifth of the space; LZ4 scans twice as fast as zstd and needs a fifth
more space; row groups of 256 Ki rows let a reader of few devices skip the rest.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from types import TracebackType

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.text import one_line
from slurm_affinode.metrics.parquet import manifest
from slurm_affinode.metrics.parquet.manifest import PartEntry
from slurm_affinode.metrics.parquet.table import GPU, SampleTable
from slurm_affinode.metrics.schema import TIME

SORT = ("device", "time")


def united_jobs(job: pl.Expr) -> pl.Expr:
    """Aggregate the ``job`` texts of a group (IDs joined by ``,``) to their sorted union; null if there are none."""
    ids = job.drop_nulls().str.split(",").explode(empty_as_null=False).drop_nulls().unique().sort()
    joined = ids.str.join(",")
    return pl.when(ids.len() > 0).then(joined).otherwise(None)


def merge(frame: pl.DataFrame, table: SampleTable = GPU) -> pl.DataFrame:
    """Sort ``frame`` (``table.columns``, rows in the order of ingest) by (device, time) and merge equal keys."""
    ordered = frame.sort(SORT, maintain_order=True)
    same = (pl.col("device") == pl.col("device").shift()) & (pl.col("time") == pl.col("time").shift())
    repeat = ordered.select(same.fill_null(value=False).alias("repeat"))["repeat"]
    if not repeat.any():
        return ordered
    shared = repeat | repeat.shift(-1, fill_value=False)
    return pl.concat([ordered.filter(~shared), _collapsed(ordered.filter(shared), table)]).sort(SORT)


def _collapsed(frame: pl.DataFrame, table: SampleTable) -> pl.DataFrame:
    metrics = [pl.col(name).drop_nulls().last() for name in table.metrics]
    grouped = frame.group_by(SORT, maintain_order=True).agg(*metrics, united_jobs(pl.col("job")).alias("job"))
    return grouped.select(frame.columns)


def merge_lazy(frame: pl.LazyFrame, described: tuple[str, ...] = (), table: SampleTable = GPU) -> pl.LazyFrame:
    """Merge a lazy frame like ``merge``; the columns ``described`` follow the rule of metrics."""
    values = [pl.col(name).drop_nulls().last() for name in (*described, *table.metrics)]
    return frame.group_by(SORT, maintain_order=True).agg(*values, united_jobs(pl.col("job")).alias("job")).sort(SORT)


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

    @classmethod
    def of(cls, directory: Path, name: str, table: SampleTable = GPU) -> PartFiles:
        """Return the files of the part ``name`` in ``directory``."""
        samples, devices, jobs = (directory / f"{kind}-{name}.parquet" for kind in ("part", "devices", "jobs"))
        return cls(samples, devices, jobs, table=table)

    @classmethod
    def live(cls, directory: Path, entry: PartEntry, table: SampleTable = GPU) -> PartFiles:
        """Return the files of a part in the manifest, with their digests."""
        files = cls.of(directory, entry.name, table)
        return replace(files, devices_digest=entry.devices_digest, jobs_digest=entry.jobs_digest)

    def all(self) -> tuple[Path, Path, Path]:
        """Return all three paths."""
        return (self.samples, self.devices, self.jobs)


def damaged(path: Path, what: str, table: SampleTable = GPU) -> UnreachableError:
    """Return the error for a file of a part that is unreadable or inconsistent."""
    return UnreachableError(
        f"{path}: the {table.title} cannot be read: {what}",
        hint="remove the directory of the damaged day and take its files in again",
    )


def read_devices(files: PartFiles) -> pl.DataFrame:
    """Read ``DEVICES`` of a part. Raises ``UnreachableError`` if the table is missing or damaged."""
    return _read(files, files.devices, files.devices_digest, files.table.devices)


def read_tables(parts: Sequence[PartFiles]) -> list[tuple[pl.DataFrame, pl.DataFrame]]:
    """Read ``DEVICES`` and ``JOBS`` of many parts at once, several times faster than one by one.

    Raises ``UnreachableError``.
    """
    wanted = [
        (files.table, *one)
        for files in parts
        for one in ((files.devices, files.devices_digest, files.table.devices), (files.jobs, files.jobs_digest, JOBS))
    ]
    contents = [_content(path, digest, table) for table, path, digest, _ in wanted]
    try:
        # If more than 512 wait for a file at the same time, Polars warns of a possible deadlock.
        slices = (contents[begin : begin + _FILES_AT_ONCE] for begin in range(0, len(contents), _FILES_AT_ONCE))
        frames = [frame for some in slices for frame in pl.collect_all([pl.scan_parquet(content) for content in some])]
    except POLARS_ERRORS:
        # Read one by one to find the damaged file.
        frames = [_table_of(content, path, table) for content, (table, path, *_) in zip(contents, wanted, strict=True)]
    tables = iter(
        [_checked(frame, path, schema, table) for frame, (table, path, _, schema) in zip(frames, wanted, strict=True)]
    )
    return list(zip(tables, tables, strict=True))


def read_jobs(files: PartFiles) -> pl.DataFrame:
    """Read ``JOBS`` of a part. Raises ``UnreachableError`` if the table is missing or damaged."""
    return _read(files, files.jobs, files.jobs_digest, JOBS)


def _read(files: PartFiles, path: Path, digest: str | None, schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
    table = files.table
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
    found: pl.DataFrame, path: Path, schema: Mapping[str, pl.DataType], table: SampleTable
) -> pl.DataFrame:  # fmt: skip
    """Return ``found`` if its columns and values are consistent. Raises ``UnreachableError``."""
    if dict(found.schema) != schema:
        raise damaged(path, "its columns are not those of such a table", table)
    if any(found[name].has_nulls() for name in ("device", "first", "last", "rows")) or (found["rows"] < 1).any():
        raise damaged(path, "one of its rows is empty", table)
    if schema is table.devices and (found["device"].is_duplicated().any() or (found["step_ms"] < 0).any()):
        raise damaged(path, "its rows contradict each other", table)
    return found


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

    def __init__(self, files: PartFiles, name: str, identities: pl.DataFrame) -> None:
        """``identities`` has ``device`` and the identity columns, one row per device that will be written."""
        self._files = files
        self._name = name
        self._of = files.table
        self._identities = identities.unique("device", keep="last", maintain_order=True)
        self._texts = {c: self._identities[c].drop_nulls().unique(maintain_order=True) for c in self._of.texts}
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
        done, rest = rows[:cut], rows[cut:]
        self._pending, self._pending_rows = ([rest] if len(rest) else []), len(rest)
        if done.is_empty():
            return
        self._writer.write_table(self._table(done), row_group_size=ROW_GROUP // self._of.breadth)
        self._devices.append(_summary(done))
        self._jobs.append(job_runs(done))

    def _table(self, rows: pl.DataFrame) -> pa.Table:
        at = rows.select("device").join(
            self._identities.with_row_index("at").select("device", "at"), on="device", how="left", maintain_order="left"
        )["at"]
        if at.has_nulls():
            raise ValueError("a device was written that has no identity")
        columns = [
            _dictionary(rows[name], rows[name].drop_nulls().unique(maintain_order=True))
            if dtype == pl.String()
            else rows[name].to_arrow()
            for name, dtype in self._of.columns.items()
        ]
        for name in self._of.identity:
            values = self._identities[name]
            if name in self._texts:
                codes = _codes(values, self._texts[name]).gather(at)
                columns.append(_encoded(codes, self._texts[name]))
            else:
                columns.append(values.gather(at).to_arrow())
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
        self._entry = PartEntry(
            self._name, int(table["rows"].sum()), len(table), int(first), int(last), *digests  # type: ignore[arg-type]
        )  # fmt: skip


def _last_boundary(rows: pl.DataFrame) -> int:
    """Return the first row of the last device of ``rows``, which may continue in the next frame."""
    last = rows["device"][-1]
    return len(rows) - int((rows["device"] == last).sum())


def _codes(values: pl.Series, texts: pl.Series) -> pl.Series:
    lookup = pl.DataFrame({"text": texts, "code": pl.Series(range(len(texts)), dtype=pl.Int32)})
    return pl.DataFrame({"text": values}).join(lookup, on="text", how="left", maintain_order="left")["code"]


def _encoded(codes: pl.Series, texts: pl.Series) -> pa.Array:
    return pa.DictionaryArray.from_arrays(codes.to_arrow(), texts.to_arrow().cast(pa.string()))


def _dictionary(values: pl.Series, texts: pl.Series) -> pa.Array:
    return _encoded(_codes(values, texts), texts)


def _summary(rows: pl.DataFrame) -> pl.DataFrame:
    """Return, per device in order: number of rows, first and last time, sampling interval."""
    return rows.group_by("device", maintain_order=True).agg(
        pl.len().cast(pl.Int64).alias("rows"),
        pl.col("time").first().alias("first"),
        pl.col("time").last().alias("last"),
        sampling_step().alias("step_ms"),
    )


def sampling_step() -> pl.Expr:
    """Return the sampling interval of a device with ascending times, in ms: the median gap.

    If two sources sample shortly after each other, every second gap is small, and so may be the median. Then the lower
    quartile of the larger of two neighboring gaps is used.
    """
    gap = pl.col("time").diff().dt.total_milliseconds()
    larger = pl.when(gap.shift(-1) > gap).then(gap.shift(-1)).when(gap.shift(-1).is_not_null()).then(gap)
    mostly, median = larger.quantile(0.25, "lower"), gap.median()
    turns = (pl.len() >= _TELLING_ROWS) & (mostly > _APART * median)
    return pl.when(turns).then(mostly).otherwise(median).round().cast(pl.Int64)


def job_runs(rows: pl.DataFrame) -> pl.DataFrame:
    """Return ``JOBS`` for rows sorted by (device, time), which must have all rows of each device."""
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


def scan_rows(path: Path, table: SampleTable) -> pl.LazyFrame:
    """Return the samples of a file, with the columns that a file of an earlier version may lack."""
    rows = pl.scan_parquet(path)
    if not table.added:
        return rows
    there = rows.collect_schema().names()
    return rows.with_columns(
        pl.lit(None, table.metrics[name]).alias(name) for name in table.added if name not in there
    )  # fmt: skip


def read_rows(files: PartFiles, start: int, length: int) -> pl.DataFrame:
    """Read ``length`` samples of a part from row ``start``, without identity columns. Raises ``UnreachableError``."""
    path, columns = files.samples, files.table.columns
    try:
        rows = scan_rows(path, files.table).select(*columns).slice(start, length).collect()
    except POLARS_ERRORS as error:
        raise damaged(path, one_line(error), files.table) from error
    if len(rows) != length:
        raise damaged(path, f"it ends before row {start + length:,}", files.table)
    return rows


def concat(frames: Iterable[pl.DataFrame], table: SampleTable) -> pl.DataFrame:
    """Concatenate ``frames``; without frames, return an empty one with the columns of ``table``."""
    listed = list(frames)
    return pl.concat(listed) if listed else pl.DataFrame(schema=table.columns)
