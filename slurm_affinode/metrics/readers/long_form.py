"""Conversion of single measurements (series, field, value, time) to samples with one row per device and time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

import polars as pl

from slurm_affinode.metrics.aliases import VALUES, Alias
from slurm_affinode.metrics.parquet.parts import united_jobs
from slurm_affinode.metrics.readers.common import Identity, identity_frame
from slurm_affinode.metrics.schema import ACTIVITY, IDENTITY, METRICS, TIME

ENTRIES_AT_ONCE = 8_000_000
RANKS = 256
"""``code`` of an entry divided by this is the number of its field in ``_FIELDS``; the rest is the rank of its name."""
_FIELDS = (*VALUES, "job")
_NUMBERS = {name: number for number, name in enumerate(_FIELDS)}
JOB_CODE = _NUMBERS["job"] * RANKS
"""The least ``code`` of entries that have a job ID as their value; those of all other fields are below."""
JOB_REACH = timedelta(minutes=5)
"""How long a job ID from another exporter, which has its own scrape times, applies to the samples that follow."""

ENTRIES: dict[str, pl.DataType] = {
    "series": pl.UInt32(),
    "code": pl.UInt16(),  # field, and rank of the name of the metric; from ``code_of``
    "value": pl.Float64(),  # in the unit of the schema; null: not measured
    "time": TIME,
}


def code_of(alias: Alias) -> int:
    """Return ``code`` of the entries of a metric."""
    return _NUMBERS[alias.field] * RANKS + alias.rank + 1  # names of the configuration have the rank -1


class LongForm:
    """Collect entries and return samples. Series are numbered by ``series``."""

    def __init__(self, entries_at_once: int = ENTRIES_AT_ONCE) -> None:
        self._numbers: dict[tuple[Identity, str | None], int] = {}
        self._frames: list[pl.DataFrame] = []
        self._held = 0
        self._limit = entries_at_once

    def series(self, identity: Identity, job: str | None) -> int:
        """Return the number of the series of a device with the job IDs ``job``."""
        return self._numbers.setdefault((identity, job), len(self._numbers))

    def add(self, entries: pl.DataFrame) -> Iterator[pl.DataFrame]:
        """Add ``ENTRIES``; yield samples once enough are held, except of the latest time, which may be incomplete."""
        self._frames.append(entries)
        self._held += len(entries)
        if self._held >= self._limit:
            rows = pl.concat(self._frames)
            last = rows["time"].max()
            complete = rows["time"] < last
            rest = rows.filter(~complete)
            # A file sorted by series may have its latest time anywhere, so everything held is returned.
            ready = rows.filter(complete) if 2 * len(rest) < len(rows) else rows
            self._frames = [rest] if ready is not rows else []
            self._held = sum(len(frame) for frame in self._frames)
            yield from self._samples(ready)

    def rest(self) -> Iterator[pl.DataFrame]:
        """Yield the samples that are still held."""
        rows = pl.concat(self._frames) if self._frames else pl.DataFrame(schema=ENTRIES)
        self._frames, self._held = [], 0
        yield from self._samples(rows)

    def _samples(self, rows: pl.DataFrame) -> Iterator[pl.DataFrame]:
        if not rows.is_empty():
            yield self.samples(rows)

    def samples(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the samples for ``ENTRIES``; if these have the column ``file``, by file, and with that column."""
        identities: dict[Identity, int] = {}
        table = pl.DataFrame(
            [(identities.setdefault(identity, len(identities)), job) for identity, job in self._numbers],
            schema={"at": pl.UInt64(), "job": pl.String()},
            orient="row",
        )
        at = table["at"].gather(rows["series"])
        if "file" in rows.columns:  # devices of different files are different ones until their samples are complete
            at += rows["file"].cast(pl.UInt64) * len(identities)
        numbered = rows.with_columns(at.alias("at"), table["job"].gather(rows["series"]).alias("job"))
        is_job = pl.col("code") >= JOB_CODE
        wide = _with_reported_jobs(_wide(numbered.filter(~is_job)), numbered.filter(is_job))
        known, device = identity_frame(list(identities)), wide["at"] % len(identities)
        file = [(wide["at"] // len(identities)).alias("file")] if "file" in rows.columns else []
        return wide.select(
            *(known[name].gather(device).alias(name) for name in IDENTITY), "time", *METRICS, "job", *file
        )


def _wide(rows: pl.DataFrame) -> pl.DataFrame:
    """Return one row per device and time: a value of each field (``_value``), and the union of the job IDs."""
    present: dict[str, list[int]] = {}
    for code in sorted(rows["code"].unique()):
        present.setdefault(_FIELDS[code // RANKS], []).append(code)
    values = [_value(name, codes).alias(name) for name, codes in present.items()]
    if rows["job"].null_count() == len(rows):
        wide = rows.group_by("at", "time").agg(*values).with_columns(pl.lit(None, pl.String).alias("job"))
    else:
        wide = rows.group_by("at", "time").agg(*values, united_jobs(pl.col("job").unique()).alias("job"))
    missing = [pl.lit(None, pl.Float64).alias(name) for name in VALUES if name not in present]
    return with_total(wide.with_columns(missing)).sort("at", "time")


def _value(field: str, codes: Sequence[int]) -> pl.Expr:
    """Aggregate the values of a field with these ``codes``, ascending, for a device and time.

    Of several exporters with one name, the largest value counts (of free memory, the least), and of several names the
    first one in the table of aliases. No name makes a GPU idle that is active by another one.
    """
    values = [pl.col("value").filter(pl.col("code") == code) for code in codes]
    extremes = [each.min() if field == "fb_free_mib" else each.max() for each in values]
    return pl.max_horizontal(extremes) if field in ACTIVITY else pl.coalesce(extremes)


def with_total(wide: pl.DataFrame) -> pl.DataFrame:
    """Fill a missing ``fb_total_mib`` with used + free + reserved; used and free are required."""
    added = pl.col("fb_used_mib") + pl.col("fb_free_mib") + pl.col("fb_reserved_mib").fill_null(0)
    return wide.with_columns(pl.col("fb_total_mib").fill_null(added)).with_columns(
        pl.col(name).cast(dtype, strict=False) for name, dtype in METRICS.items()
    )


def _with_reported_jobs(wide: pl.DataFrame, reported: pl.DataFrame) -> pl.DataFrame:
    """Add job IDs that are the value of a metric (``nvidia_gpu_jobId``); 0 means that no job holds the GPU."""
    if reported.is_empty():
        return wide
    number = pl.col("value").cast(pl.Int64, strict=False)
    ids = reported.filter(number.is_not_null()).select(
        "at", "time", pl.when(number > 0).then(number.cast(pl.String)).alias("told")
    )
    ids = ids.group_by("at", "time").agg(
        pl.col("told").drop_nulls().unique().sort().str.join(",").replace("", None)
    ).sort("at", "time")  # fmt: skip
    if wide.is_empty():
        blank = [pl.lit(None, dtype).alias(name) for name, dtype in METRICS.items()]
        return ids.select("at", "time", *blank, pl.col("told").alias("job")).filter(pl.col("job").is_not_null())
    joined = wide.join_asof(ids, on="time", by="at", strategy="backward", tolerance=JOB_REACH, check_sortedness=False)
    return joined.with_columns(pl.coalesce("job", "told").alias("job")).drop("told")
