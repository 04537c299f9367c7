"""Export of stored samples as OpenMetrics text with timestamps and dcgm-exporter's names, to backfill Prometheus.

OpenMetrics 1.0 requires the samples of a metric to be together, and those of a series to be together and in time order.
Samples are stored by day, so they are read once for each metric and group of devices; memory stays bounded. The output
file appears as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

import polars as pl

from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError, InputError
from slurm_affinode.base.files import delivering
from slurm_affinode.base.times import utc
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import IDENTITY

ROWS_AT_ONCE = 2_000_000


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with its name in dcgm-exporter."""

    name: str
    field: str
    """Column of the sample schema, in the same unit."""
    help: str


FAMILIES = (
    Family("DCGM_FI_DEV_GPU_UTIL", "util_pct", "GPU utilization (in %)."),
    Family("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "engine_active", "Ratio of time the graphics engine is active."),
    Family("DCGM_FI_PROF_SM_ACTIVE", "sm_active", "Ratio of cycles in which an SM has a warp."),
    Family("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "tensor_active", "Ratio of cycles the tensor pipe is active."),
    Family("DCGM_FI_PROF_DRAM_ACTIVE", "dram_active", "Ratio of cycles the device memory interface is active."),
    Family("DCGM_FI_DEV_FB_USED", "fb_used_mib", "Framebuffer memory used (in MiB)."),
    Family("DCGM_FI_DEV_FB_TOTAL", "fb_total_mib", "Framebuffer memory (in MiB)."),
    Family("DCGM_FI_DEV_POWER_USAGE", "power_w", "Power draw (in W)."),
    Family("DCGM_FI_DEV_XID_ERRORS", "xid", "Value of the last XID error encountered."),
)

_LABELS = {
    "gpu": "index", "UUID": "uuid", "pci_bus_id": "pci", "modelName": "model", "Hostname": "node",
    "GPU_I_ID": "mig", "GPU_I_PROFILE": "mig_profile", "cluster": "cluster",
}  # fmt: skip
"""Label of dcgm-exporter -> column; ``cluster`` is an addition."""


@dataclass(frozen=True, slots=True)
class Written:
    """Totals of an export."""

    samples: int
    """Samples as counted by Prometheus: values, one for each job on the GPU."""
    series: int
    devices: int
    first: datetime | None
    last: datetime | None


def write(
    history: SampleStore,
    since: datetime,
    until: datetime,
    out: BinaryIO,
    *,
    extra: Mapping[str, str] | None = None,
    advance: Callable[[int], None] = lambda values: None,
    rows_at_once: int = ROWS_AT_ONCE,
) -> Written:
    """Write the samples of the half-open interval to ``out``; ``extra`` are labels for every series.

    ``advance`` is called with numbers of rows processed; each row counts once per metric.
    """
    devices = history.devices(since, until)
    samples = series = 0
    device_numbers: set[int] = set()
    times: list[datetime] = []
    for family in FAMILIES:
        out.write(f"# HELP {family.name} {family.help}\n# TYPE {family.name} gauge\n".encode())
        for group in _groups(devices, rows_at_once):
            values = _values(history, since, until, family, group["device"])
            if not values.is_empty():
                lines = _lines(values, family.name, _texts(group, extra or {}))
                out.write("".join(lines["line"]).encode())
                samples += len(values)
                series += values.select("device", "job").n_unique()
                device_numbers.update(values["device"].unique())
                span = values.select(pl.col("time").min(), pl.col("time").max().alias("last")).row(0)
                times += span
            advance(int(group["rows"].sum()))
    out.write(b"# EOF\n")
    return Written(samples, series, len(device_numbers), min(times, default=None), max(times, default=None))


def _groups(devices: pl.DataFrame, rows_at_once: int) -> Iterator[pl.DataFrame]:
    """Yield groups of devices with samples that fit in memory together; at least one device."""
    number = ((devices["rows"].cum_sum() - 1) // rows_at_once).alias("group")
    for _, group in devices.group_by(number, maintain_order=True):
        yield group


def _values(
    history: SampleStore, since: datetime, until: datetime, family: Family, devices: pl.Series
) -> pl.DataFrame:  # fmt: skip
    """Return ``device``, ``job`` (one ID or null), ``time``, ``value``, in the order in which they are written.

    A sample without any value is written as NaN of the first family, so that it is not lost.
    """
    value = pl.col(family.field)
    if family is FAMILIES[0]:
        unmeasured = pl.all_horizontal(pl.col(metric.field).is_null() for metric in FAMILIES)
        value = pl.when(unmeasured).then(float("nan")).otherwise(value)
    rows = (
        history.scan(since, until)
        .select("device", pl.col("job").str.split(","), "time", value.alias("value"))
        .filter(pl.col("device").is_in(devices.implode()) & pl.col("value").is_not_null())
        .collect(engine="streaming")
    )
    # As in dcgm-exporter, each job on the GPU has a copy of the series.
    each = rows.explode("job", empty_as_null=True, keep_nulls=True)
    return each.sort("device", "job", "time", nulls_last=False)


def _texts(devices: pl.DataFrame, extra: Mapping[str, str]) -> pl.DataFrame:
    """Return the labels of each device as text, without braces."""
    rows = []
    for row in devices.select("device", *IDENTITY).iter_rows(named=True):
        labels = dict(extra)
        labels |= {label: str(row[column]) for label, column in _LABELS.items() if row[column] is not None}
        if row["index"] is not None:
            labels["device"] = f"nvidia{row['index']}"
        rows.append((row["device"], ",".join(f'{name}="{escaped(text)}"' for name, text in labels.items())))
    return pl.DataFrame(rows, schema={"device": pl.UInt64(), "labels": pl.String()}, orient="row")


def _lines(values: pl.DataFrame, name: str, texts: pl.DataFrame) -> pl.DataFrame:
    milliseconds = pl.col("time").dt.epoch("ms")
    job = pl.col("job").str.replace_all("\\", "\\\\", literal=True).str.replace_all('"', '\\"', literal=True)
    line = pl.concat_str(
        pl.lit(name + "{"),
        pl.col("labels"),
        pl.concat_str(pl.lit(',hpc_job="'), job, pl.lit('"')).fill_null(""),
        pl.lit("} "),
        pl.col("value").cast(pl.String),
        pl.lit(" "),
        (milliseconds // 1000).cast(pl.String),
        pl.lit("."),
        (milliseconds % 1000).cast(pl.String).str.zfill(3),
        pl.lit("\n"),
    )
    return values.join(texts, on="device", how="left", maintain_order="left").select(line.alias("line"))


def escaped(text: str) -> str:
    """Escape the value of a label for OpenMetrics."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def as_openmetrics(
    config: Config,
    since: datetime,
    until: datetime,
    out: Path | BinaryIO,
    *,
    labels: Mapping[str, str] | None = None,
    advance: Callable[[int], None] = lambda values: None,
) -> Written:
    """Write the samples of the half-open interval to ``out``. Raises ``AffinodeError`` if there are none.

    ``advance`` is called with numbers of rows processed; each row counts once per metric.
    """
    if until <= since:
        raise AffinodeError(
            f"the interval ends ({utc(until)}) before it begins ({utc(since)})",
            hint="choose --since before --until",
        )
    with closing(SampleStore(config.history_dir)) as history:
        if history.devices(since, until).is_empty():
            span = history.span()
            hint = "ingest some first: slurm-affinode ingest gpu PATH..."
            if span is not None:
                hint = f"it has samples from {utc(span[0])} to {utc(span[1])}"
            raise InputError("has no samples in this interval", where=str(config.history_dir), hint=hint)
        if not isinstance(out, Path):
            return write(history, since, until, out, extra=labels, advance=advance)
        if out.is_dir():
            raise InputError("is a directory: give --out FILE", where=str(out))
        try:
            with delivering(out) as temporary, temporary.open("wb") as file:
                written = write(history, since, until, file, extra=labels, advance=advance)
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror or error}", where=str(out)) from error
        return written
