"""Conversion of single measurements (series, field, value, time) to samples with one row per device and time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import timedelta

import numpy as np
import polars as pl
from numpy.typing import NDArray

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
        self._count = 0
        self._limit = entries_at_once

    def series(self, identity: Identity, job: str | None) -> int:
        """Return the number of the series of a device with the job IDs ``job``."""
        return self._numbers.setdefault((identity, job), len(self._numbers))

    def add(self, entries: pl.DataFrame) -> Iterator[pl.DataFrame]:
        """Add ``ENTRIES``; yield samples once enough are held, except of the latest time, which may be incomplete."""
        self._frames.append(entries)
        self._count += len(entries)
        if self._count >= self._limit:
            rows = pl.concat(self._frames)
            last = rows["time"].max()
            complete = rows["time"] < last
            rest = rows.filter(~complete)
            # A file sorted by series may have its latest time anywhere, so everything held is returned.
            ready = rows.filter(complete) if 2 * len(rest) < len(rows) else rows
            self._frames = [rest] if ready is not rows else []
            self._count = sum(len(frame) for frame in self._frames)
            yield from self._samples(ready)

    def rest(self) -> Iterator[pl.DataFrame]:
        """Yield the samples that are still held."""
        rows = pl.concat(self._frames) if self._frames else pl.DataFrame(schema=ENTRIES)
        self._frames, self._count = [], 0
        yield from self._samples(rows)

    def _samples(self, rows: pl.DataFrame) -> Iterator[pl.DataFrame]:
        if not rows.is_empty():
            yield self.samples(rows)

    def samples(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the samples for ``ENTRIES``; if these have the column ``file``, by file, and with that column."""
        identities: dict[Identity, int] = {}
        jobs: dict[str | None, int] = {None: _NO_JOB}
        numbers = [
            (identities.setdefault(identity, len(identities)), jobs.setdefault(job, len(jobs) - 1))
            for identity, job in self._numbers
        ]
        table = pl.DataFrame(numbers, schema={"at": pl.UInt64(), "job": pl.Int32()}, orient="row")
        row_numbers = table["at"].gather(rows["series"])
        if "file" in rows.columns:  # devices of different files are different ones until their samples are complete
            row_numbers += rows["file"].cast(pl.UInt64) * len(identities)
        numbered = rows.with_columns(row_numbers.alias("at"), table["job"].gather(rows["series"]).alias("job"))
        is_job = rows["code"] >= JOB_CODE
        reported = numbered.filter(is_job)
        measured = numbered.filter(~is_job) if len(reported) else numbered
        wide = _with_reported_jobs(_wide(measured, [job for job in jobs if job is not None]), reported)
        identity_values, device = identity_frame(list(identities)), wide["at"] % len(identities)
        file = [(wide["at"] // len(identities)).alias("file")] if "file" in rows.columns else []
        return wide.select(
            *(identity_values[name].gather(device).alias(name) for name in IDENTITY), "time", *METRICS, "job", *file
        )


_NO_JOB = -1


def _wide(rows: pl.DataFrame, jobs: Sequence[str]) -> pl.DataFrame:
    """Return one row per device and time, sorted: a value of each field (``_combined``), and the union of the job IDs.

    ``rows``: ``ENTRIES`` with ``rows_of_name``, the device, and ``job``, a place in ``jobs`` or ``_NO_JOB``.
    """
    times, time = _places(rows["time"].to_physical())
    devices, device = _places(rows["at"])
    cells, cell = _places(pl.Series(device * len(times) + time), at_most=len(devices) * len(times))
    value, code = rows["value"].fill_null(math.nan).to_numpy(), rows["code"].to_numpy()
    present: dict[str, list[NDArray[np.float64]]] = {}
    for each in sorted(rows["code"].unique()):
        name = _FIELDS[each // RANKS]
        rows_of_name = np.flatnonzero(code == each)
        present.setdefault(name, []).append(_extremes(name, cell[rows_of_name], value[rows_of_name], len(cells)))
    columns = [pl.Series(name, _combined(name, values), nan_to_null=True) for name, values in present.items()]
    wide = pl.DataFrame(
        [
            pl.Series("at", devices[cells // max(1, len(times))], pl.UInt64),
            pl.Series("time", times[cells % max(1, len(times))]).cast(TIME),
            *columns,
            _united(cell, rows["job"].to_numpy(), len(cells), jobs).alias("job"),
        ]
    )
    missing = [pl.lit(None, pl.Float64).alias(name) for name in VALUES if name not in present]
    return with_total(wide.with_columns(missing))


def _places(values: pl.Series, at_most: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct integers, ascending, and for each of ``values`` its place among them.

    ``at_most``: the values are from 0 to less than that.
    """
    if values.is_empty():
        return np.empty(0, np.int64), np.empty(0, np.int64)
    if at_most is not None and at_most <= _SPARSE * len(values):
        used = np.zeros(at_most, np.bool_)
        used[values.to_numpy()] = True
        used_values = np.flatnonzero(used)
        return used_values, (np.cumsum(used) - 1)[values.to_numpy()]
    used_values = values.unique().sort().to_numpy().astype(np.int64)
    offsets = values.to_numpy().astype(np.int64) - used_values[0]
    step = max(1, int(np.gcd.reduce(np.diff(used_values)))) if len(used_values) > 1 else 1
    size = int(used_values[-1] - used_values[0]) // step + 1
    if size > _SPARSE * len(values):
        return used_values, np.searchsorted(used_values - used_values[0], offsets)
    places = np.zeros(size, np.int64)
    places[(used_values - used_values[0]) // step] = np.arange(len(used_values))
    return used_values, places[offsets // step if step > 1 else offsets]


_SPARSE = 4
"""A table of places may have as many times more cells than there are values."""


def _extremes(
    field: str, cells: NDArray[np.int64], values: NDArray[np.float64], count: int
) -> NDArray[np.float64]:  # fmt: skip
    """Return the value of each of ``count`` cells, NaN if there is none; of several, the largest or least."""
    result = np.full(count, math.nan)
    result[cells] = values
    filled = np.zeros(count, np.bool_)
    filled[cells] = True
    if np.count_nonzero(filled) < len(cells):
        (np.fmin if field == "fb_free_mib" else np.fmax).at(result, cells, values)
    return result


def _combined(field: str, values: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Combine the values of the names of a field, in the order of the table of aliases.

    Of several exporters with one name, the largest value counts (of free memory, the least), and of several names the
    first one in the table of aliases. No name makes a GPU idle that is active by another one.
    """
    result = values[0]
    for each in values[1:]:
        result = np.fmax(result, each) if field in ACTIVITY else np.where(np.isnan(result), each, result)
    return result


def _united(cells: NDArray[np.int64], numbers: NDArray[np.int32], count: int, jobs: Sequence[str]) -> pl.Series:
    """Return the job IDs of each of ``count`` cells: those of all entries, united."""
    has_job = numbers != _NO_JOB
    if not has_job.any():
        return pl.Series([None], dtype=pl.String).new_from_index(0, count)
    if not has_job.all():
        cells, numbers = cells[has_job], numbers[has_job]
    number = np.full(count, len(jobs), np.int32)
    number[cells] = numbers
    texts = pl.Series([*jobs, None], dtype=pl.String)
    result = texts.gather(number)
    differ = number[cells] != numbers
    if not differ.any():
        return result
    several = np.zeros(count, np.bool_)
    several[cells[differ]] = True
    entry_jobs = several[cells]
    entries = pl.DataFrame({"cell": cells[entry_jobs], "job": texts.gather(numbers[entry_jobs])})
    united = entries.group_by("cell").agg(united_jobs(pl.col("job").unique()).alias("job"))
    return result.scatter(united["cell"], united["job"])


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
