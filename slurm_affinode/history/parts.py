"""One part of a day: a Parquet file of samples sorted by (device, time), and two small tables that index it.

Encodings were chosen by measurement (2.9 million rows, two cores, Polars): times as DELTA_BINARY_PACKED scan three
times faster than dictionary-encoded ones and take a fifth of the room; LZ4 scans twice as fast as zstd and costs a
fifth more room; row groups of 256 Ki rows let a reader of few devices skip the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from types import TracebackType

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from slurm_affinode.errors import one_line
from slurm_affinode.history import partfiles
from slurm_affinode.history.manifest import PartEntry
from slurm_affinode.history.merge import SAMPLE_COLUMNS
from slurm_affinode.history.partfiles import DEVICES, JOBS, POLARS_ERRORS, PartFiles, damaged
from slurm_affinode.history.schema import IDENTITY, METRICS

ROW_GROUP = 256 * 1024
_TELLING_ROWS = 10
_APART = 3
"""Neighbouring gaps of one source do not differ so much all the time."""
_STRINGS = tuple(name for name, dtype in IDENTITY.items() if dtype == pl.String())
_DICTIONARY = ["device", "index", "job", "util_pct", "fb_used_mib", "fb_total_mib", "xid", *_STRINGS]
_PAGES = {"data_page_size": 16 * ROW_GROUP} | (
    # Before it could be told, pyarrow did not limit the rows of a page.
    {"max_rows_per_page": ROW_GROUP} if "max_rows_per_page" in inspect.signature(pq.write_table).parameters else {}
)
_METRIC_TYPES = {name: pa.int32() if dtype == pl.Int32() else pa.float32() for name, dtype in METRICS.items()}
_SCHEMA = pa.schema(
    [
        ("device", pa.uint64()),
        ("time", pa.timestamp("ms", tz="UTC")),
        *_METRIC_TYPES.items(),
        ("job", pa.dictionary(pa.int32(), pa.string())),
        *((name, pa.int16() if name == "index" else pa.dictionary(pa.int32(), pa.string())) for name in IDENTITY),
    ]
)


@dataclass(frozen=True, slots=True)
class Part:
    """One live part, as a reader sees it."""

    day: date
    files: PartFiles
    entry: PartEntry
    single: bool
    """Whether it is the only part of its day: then no (device, time) occurs elsewhere and nothing is left to merge."""

    @property
    def path(self) -> Path:
        """The samples: ``device``, ``time``, the metrics, ``job``, the identity; sorted by (device, time)."""
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
        """``DEVICES``: one row per device, in the order of the part."""
        return partfiles.read_devices(self.files)

    def jobs(self) -> pl.DataFrame:
        """``JOBS``: the job labels."""
        return partfiles.read_jobs(self.files)


class PartWriter:
    """Write one part from frames whose rows are sorted by (device, time) across all frames, keys unique.

    Memory is that of a few row groups. Frames have ``device`` and ``time`` and any of the metrics and ``job``. Used
    as a context: left by an exception, its files are removed.
    """

    def __init__(self, files: PartFiles, name: str, identities: pl.DataFrame) -> None:
        """``identities`` has ``device`` and the columns of ``IDENTITY``, one row per device that will be written."""
        self._files = files
        self._name = name
        self._identities = identities.unique("device", keep="last", maintain_order=True)
        self._texts = {c: self._identities[c].drop_nulls().unique(maintain_order=True) for c in _STRINGS}
        self._pending: list[pl.DataFrame] = []
        self._pending_rows = 0
        self._devices: list[pl.DataFrame] = []
        self._jobs: list[pl.DataFrame] = []
        self._entry: PartEntry | None = None
        files.samples.parent.mkdir(parents=True, exist_ok=True)
        self._writer = pq.ParquetWriter(
            files.samples,
            _SCHEMA,
            compression="lz4",
            use_dictionary=_DICTIONARY,
            column_encoding={"time": "DELTA_BINARY_PACKED"},
            store_schema=False,
            **_PAGES,
            sorting_columns=[pq.SortingColumn(0), pq.SortingColumn(1)],
        )

    @property
    def entry(self) -> PartEntry:
        """What was written. Only once the context was left without an error."""
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
        """Append rows. A device's rows may go on in the next frame."""
        if frame.is_empty():
            return
        full = frame.select(
            (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
            for name, dtype in SAMPLE_COLUMNS.items()
        )
        self._pending.append(full)
        self._pending_rows += len(full)
        if self._pending_rows >= 4 * ROW_GROUP:
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
        self._writer.write_table(self._table(done), row_group_size=ROW_GROUP)
        self._devices.append(_summary(done))
        self._jobs.append(job_runs(done))

    def _table(self, rows: pl.DataFrame) -> pa.Table:
        at = rows.select("device").join(
            self._identities.with_row_index("at").select("device", "at"), on="device", how="left", maintain_order="left"
        )["at"]
        if at.has_nulls():
            raise ValueError("a device was written that has no identity")
        columns: list[pa.Array] = [rows[name].to_arrow() for name in SAMPLE_COLUMNS if name != "job"]
        columns.append(_dictionary(rows["job"], rows["job"].drop_nulls().unique(maintain_order=True)))
        for name in IDENTITY:
            values = self._identities[name]
            if name == "index":
                columns.append(values.gather(at).to_arrow())
            else:
                codes = _codes(values, self._texts[name]).gather(at)
                columns.append(_encoded(codes, self._texts[name]))
        return pa.Table.from_arrays(
            [column.cast(kind.type) for column, kind in zip(columns, _SCHEMA, strict=True)], schema=_SCHEMA
        )

    def _finish(self) -> None:
        devices = pl.concat(self._devices) if self._devices else pl.DataFrame(schema={"device": pl.UInt64()})
        if devices.is_empty():
            raise ValueError("a part needs at least one sample")
        table = devices.join(self._identities, on="device", how="left", maintain_order="left").select(
            pl.col(name).cast(dtype) for name, dtype in DEVICES.items()
        )
        labels = pl.concat(self._jobs).select(pl.col(n).cast(t) for n, t in JOBS.items())
        digests = partfiles.write(table, self._files.devices), partfiles.write(labels, self._files.jobs)
        first, last = table["first"].dt.epoch("ms").min(), table["last"].dt.epoch("ms").max()
        self._entry = PartEntry(
            self._name, int(table["rows"].sum()), len(table), int(first), int(last), *digests  # type: ignore[arg-type]
        )  # fmt: skip


def _last_boundary(rows: pl.DataFrame) -> int:
    """The row at which the last device of ``rows`` begins: its rows may go on in the next frame."""
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
    """Per device, in order: rows, first, last, sampling step."""
    return rows.group_by("device", maintain_order=True).agg(
        pl.len().cast(pl.Int64).alias("rows"),
        pl.col("time").first().alias("first"),
        pl.col("time").last().alias("last"),
        sampling_step().alias("step_ms"),
    )


def sampling_step() -> pl.Expr:
    """The sampling step, ms, of a device's ascending times: the median gap.

    Two sources that take turns, a moment apart, make every other gap a small one, and the median with it; then it is
    what the larger of two neighbouring gaps mostly reaches.
    """
    gap = pl.col("time").diff().dt.total_milliseconds()
    larger = pl.when(gap.shift(-1) > gap).then(gap.shift(-1)).when(gap.shift(-1).is_not_null()).then(gap)
    mostly, median = larger.quantile(0.25, "lower"), gap.median()
    turns = (pl.len() >= _TELLING_ROWS) & (mostly > _APART * median)
    return pl.when(turns).then(mostly).otherwise(median).round().cast(pl.Int64)


def job_runs(rows: pl.DataFrame) -> pl.DataFrame:
    """``JOBS`` of rows sorted by (device, time), whole devices only."""
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
    # Where several ids share a device, one of them may go on while another comes: join its consecutive runs.
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


def read_rows(path: Path, start: int, length: int) -> pl.DataFrame:
    """``length`` samples of a part from row ``start``, without their identity. Raises ``UnreachableError``."""
    try:
        rows = pl.scan_parquet(path).select(*SAMPLE_COLUMNS).slice(start, length).collect()
    except POLARS_ERRORS as error:
        raise damaged(path, one_line(error)) from error
    if len(rows) != length:
        raise damaged(path, f"it ends before row {start + length:,}")
    return rows


def concat(frames: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """The frames' rows one after the other; an empty frame of samples where there is none."""
    listed = list(frames)
    return pl.concat(listed) if listed else pl.DataFrame(schema=SAMPLE_COLUMNS)
