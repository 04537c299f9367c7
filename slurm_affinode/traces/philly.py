"""Reader of the jobs of the Philly trace, as published (``philly_log``) or as in the artifact of Pollux (OSDI'21).

The latter is CSV with a header. Columns: ``timestamp`` (submission, UTC), ``duration`` (run time, s), ``num_gpus``,
``cluster`` (the virtual cluster, which takes the place of the user). There is no requested time and no wait.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.text import one_line
from slurm_affinode.metrics.readers.csv_table import columns
from slurm_affinode.metrics.readers.lines import blocks, head
from slurm_affinode.traces import csv_columns, philly_log
from slurm_affinode.traces.job_log import JOBS, MOST_S, UNKNOWN, JobLog, divide

_COLUMNS = {"submit": "timestamp", "run": "duration", "units": "num_gpus", "cluster": "cluster"}
LONGEST_S = 200_000
"""Default for the longest run time: jobs above it have 63 % of the GPU time, and hold a simulated machine for days."""
_REASONS = {
    "with a line that is not in the format of the header": pl.col("submit_s").is_null() | pl.col("run").is_null(),
    "without GPUs": pl.col("units").is_null() | (pl.col("units") < 1),
    "without a run time": pl.col("run") < 0,
}


def read(path: Path) -> JobLog:
    """Read the published job log, its directory, or the CSV file of Pollux' artifact.

    Run times of the latter are cut to whole seconds, of at least 1, and a job is numbered by its row, from 0. Raises
    ``InputError`` if the file cannot be read, lacks a column, ends within a row, or is empty.
    """
    file = csv_columns.located(path, philly_log.FILE, f"{philly_log.FILE}.json", trace="the Philly trace")
    return philly_log.read(file) if philly_log.is_log(head(file)) else _read_csv(file)


def _read_csv(path: Path) -> JobLog:
    where = str(path)
    header: list[str] | None = None
    frames: list[pl.DataFrame] = []
    for block in blocks(path, where):
        text = block.lines.with_columns(pl.col("line").str.replace_all('"', "", literal=True).str.strip_chars())
        lines = text.filter(pl.col("line") != "")
        if header is None and lines.height:
            header = _header(lines["line"][0], where)
            lines = lines[1:]
        if header is not None:
            cells, irregular = columns(lines, ",", len(header))
            for number in irregular["number"].tail(1):
                block.cut_off(number, where)
            frames.append(_rows(cells, irregular, header))
    if header is None or not any(frame.height for frame in frames):
        raise InputError("the log is empty: it has no job", where=where)
    rows = pl.concat(frames).with_row_index("number")
    mean = pl.col("run").filter(pl.col("run") >= 0).mean().over("cluster")
    rows = rows.with_columns(
        pl.col("run").floor().clip(1, MOST_S).cast(pl.Int64).alias("run_s"), mean.alias("user_mean_s")
    )
    usable, left_out = divide(rows, _REASONS, where)
    jobs = usable.with_columns(
        pl.col("cluster").rank("dense").cast(pl.Int64).alias("user"),
        pl.lit(UNKNOWN).alias("request_s"), pl.lit(UNKNOWN).alias("wait_s"),
    ).select(*JOBS)  # fmt: skip
    return JobLog(where, "GPU", jobs.cast(JOBS), tuple(left_out), None, epoch_s=0)  # type: ignore[arg-type]


def _header(line: str, where: str) -> list[str]:
    names = [name.strip().lower() for name in line.split(",")]
    missing = [name for name in _COLUMNS.values() if name not in names]
    if missing:
        raise InputError(
            f"no column {', '.join(missing)}: not a Philly trace as in the artifact of Pollux", where=f"{where}:1",
            hint=f"it begins with {one_line(line, 80)}",
        )  # fmt: skip
    return names


def _rows(cells: pl.DataFrame, irregular: pl.DataFrame, header: list[str]) -> pl.DataFrame:
    cell = {name: pl.col(f"c{header.index(title)}").str.strip_chars() for name, title in _COLUMNS.items()}
    submit = cell["submit"].str.replace("T", " ").str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="ms", strict=False)
    good = cells.select(
        pl.col("number").cast(pl.Int64).alias("line"), submit.dt.epoch("s").alias("submit_s"),
        cell["run"].cast(pl.Float64, strict=False).fill_nan(None).alias("run"),
        cell["units"].cast(pl.Int64, strict=False).alias("units"), cell["cluster"].alias("cluster"),
    )  # fmt: skip
    bad = irregular.select(pl.col("number").cast(pl.Int64).alias("line"))
    return pl.concat([good, bad], how="diagonal").sort("line")
