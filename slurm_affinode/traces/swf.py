"""Reader of the Standard Workload Format of the Parallel Workloads Archive: one job per line, 18 columns.

The format is described at https://www.cs.huji.ac.il/labs/parallel/workload/swf.html. Lines that begin with ``;`` are
comments; ``; Key: value`` are facts about the machine, perhaps with a remark behind the value. -1 is unknown. Files may
be compressed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.text import one_line
from slurm_affinode.metrics.readers.lines import blocks
from slurm_affinode.traces.job_log import DESCRIBED, JOBS, UNKNOWN, JobLog, divide, with_user_means

COLUMNS = (
    "number", "submit_s", "wait_s", "run_s", "allocated", "cpu_s", "memory_kb", "requested", "request_s",
    "requested_kb", "status", "user", "group", "executable", "queue", "partition", "preceding", "think_s",
)  # fmt: skip
"""The 18 columns, in the order of the file."""
_READ = ("number", "submit_s", "wait_s", "run_s", "allocated", "requested", "request_s", "status", "user", *DESCRIBED)
_VERSIONS = ("1", "2")
_FACT = re.compile(r";\s*(\w+):\s*(\S+)")
_NUMBER = re.compile("[0-9]{1,10}|[0-9]{1,3}(?:,[0-9]{3}){1,3}")
_PARTIAL = pl.col("status").is_between(2, 4)
"""Of a line with a part of the execution of a job: to be continued, the last one, or the last one, which failed."""
_REASONS = {
    "with a line that is not 18 numbers": pl.col("number").is_null(),
    "without processors": pl.col("units") < 1,
    "without a time of submission": pl.col("submit_s") < 0,
    "without a run time": pl.col("run_s") < 1,
}


def read(path: Path) -> JobLog:
    """Read a log. The size of a job is its requested processors, where these are unknown the allocated ones.

    Jobs without processors or times are left out, and so are lines that are not 18 numbers. Partial executions of a job
    that has a line of its own are skipped. Raises ``InputError`` if the file cannot be read, ends within a line, is in
    an unknown version, or has no line in this format.
    """
    where = str(path)
    frames = [pl.DataFrame(schema={"line": pl.Int64(), **dict.fromkeys(_READ, pl.Int64())})]
    facts: dict[str, str] = {}
    unreadable: list[int] = []
    for block in blocks(path, where, reject=lambda line, why, data: unreadable.append(line)):
        text = block.lines.with_columns(pl.col("line").str.strip_chars().str.replace_all(r"\s+", " "))
        for comment in text["line"].filter(text["line"].str.starts_with(";")):
            if match := _FACT.match(comment):
                facts.setdefault(match[1], match[2])
        rows = text.filter((pl.col("line") != "") & ~pl.col("line").str.starts_with(";"))
        frames.append(_rows(rows))
    version = facts.get("Version", "2")
    if version.partition(".")[0] not in _VERSIONS:
        raise InputError(f"is in version {one_line(version, 20)} of the Standard Workload Format, which is unknown",
                         where=where, hint=f"versions {' and '.join(_VERSIONS)} are read")  # fmt: skip
    rows = pl.concat([*frames, pl.DataFrame({"line": unreadable}, schema={"line": pl.Int64()})], how="diagonal")
    if rows.is_empty():
        raise InputError("the log is empty: it has no job", where=where)
    if rows["number"].null_count() == rows.height:
        raise InputError(
            "is not in the Standard Workload Format: no line is 18 numbers", where=f"{where}:{rows['line'][0]}"
        )
    if (unreadable_line := rows.filter(pl.col("number").is_null())["line"].max()) is not None:
        block.cut_off(int(unreadable_line), where)  # type: ignore[arg-type]
    whole = rows.filter(~_PARTIAL)["number"].unique()
    rows = rows.filter((_PARTIAL & pl.col("number").is_in(whole.implode())).fill_null(value=False).not_())
    units = pl.when(pl.col("requested") > 0).then("requested").otherwise("allocated").alias("units")
    usable, left_out = divide(rows.with_columns(units), _REASONS, where)
    requested_s = pl.when(pl.col("request_s") > 0).then("request_s").otherwise(UNKNOWN).alias("request_s")
    wait = pl.when(pl.col("wait_s") >= 0).then("wait_s").otherwise(UNKNOWN).alias("wait_s")
    user = pl.when(pl.col("user") >= 0).then("user").otherwise(UNKNOWN).alias("user")
    every = with_user_means(usable.with_columns(requested_s, wait, user))
    jobs = every.select(*JOBS).cast(JOBS)  # type: ignore[arg-type]
    described = every.select(
        pl.when(pl.col(name) >= (1 if dtype == pl.Float64() else 0)).then(name).cast(dtype).alias(name)
        for name, dtype in DESCRIBED.items()
    )
    return JobLog(
        where, "processor", jobs, tuple(left_out), _capacity(facts),
        epoch_s=_number(facts.get("UnixStartTime")), zone=_zone(facts.get("TimeZoneString")),
        described=described,
    )  # fmt: skip


def _capacity(facts: Mapping[str, str]) -> int | None:
    """Return the processors of the machine; the nodes if the log does not give its processors (or -1, unknown)."""
    max_procs = facts.get("MaxProcs", "-1")
    return _number(facts.get("MaxNodes")) if max_procs == "-1" else _number(max_procs)


def _number(text: str | None) -> int | None:
    return int(text.replace(",", "")) or None if text and _NUMBER.fullmatch(text) else None


def _zone(name: str | None) -> tzinfo:
    """Return the time zone; UTC, in which the start is given, if the log names none that is known."""
    try:
        return ZoneInfo(name) if name else UTC
    except (ValueError, OSError, ZoneInfoNotFoundError):
        return UTC


def _rows(lines: pl.DataFrame) -> pl.DataFrame:
    """Return ``line`` (the number of the line) and ``_READ``; all of these are null if one is not a number.

    Fractions of a second, which some logs have, are cut off.
    """
    cells = lines["line"].str.split(" ")
    fits = cells.list.len() == len(COLUMNS)
    values = [cells.list.get(index, null_on_oob=True).cast(pl.Float64, strict=False).alias(name)
              for index, name in enumerate(COLUMNS)]  # fmt: skip
    frame = pl.DataFrame([lines["number"].alias("line"), fits.alias("fits"), *values])
    good = pl.col("fits") & pl.all_horizontal(pl.col(name).is_finite().fill_null(value=False) for name in COLUMNS)
    within = [pl.when(good).then(pl.col(name).clip(-1, 2**53)).cast(pl.Int64).alias(name) for name in _READ]
    return frame.select(pl.col("line").cast(pl.Int64), *within)
