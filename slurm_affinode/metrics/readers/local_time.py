"""Conversion of times in files to UTC: epoch numbers of any unit, ISO 8601 and ``2026/11/01 08:00:00.123``."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo

import polars as pl

from slurm_affinode.base.columns import native
from slurm_affinode.metrics.distinct import distinct
from slurm_affinode.metrics.schema import TIME

POSSIBLE = (datetime(1970, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC))
"""A value outside of this range is not a time, or its unit was misinterpreted."""
_NUMBER = r"^[+-]?\d+(?:\.\d*)?(?:[eE][+]?\d+)?$"
_CLOCK = (
    r"^(\d{4})[-/](\d{1,2})[-/](\d{1,2})"
    r"(?:[T ]\s*(\d{1,2}):(\d{2})(?::(\d{2}))?(?:[.,](\d{1,9}))?\s*(Z|z|UTC|GMT|[+-]\d{2}(?::?\d{2})?)?)?$"
)
TWICE = "local times that occur twice were distinguished by their order (the first is summer time)"
NEVER = "local times that do not exist (clocks went forward) were read with the offset from before"
_BACK_LEAST, _BACK_MOST = timedelta(minutes=10), timedelta(hours=2)
_GOES_ON = timedelta(minutes=5)
"""Samples that are further apart do not show whether the clock went back in between."""


def to_epoch_ms(value: pl.Expr) -> pl.Expr:
    """Convert epoch times in seconds, milli-, micro- or nanoseconds, distinguished by magnitude, to milliseconds.

    Seconds below 1e11 reach to the year 5138; milliseconds above it start in 1973. Numbers from 2**63 on give null.
    """
    size = value.abs()
    scaled = (
        pl.when(size < 1e11).then(value * 1000).when(size < 1e14).then(value)
        .when(size < 1e17).then(value / 1e3).when(size < 2.0**63).then(value / 1e6)
    )  # fmt: skip
    return scaled.round().cast(pl.Int64, strict=False)


def epoch_ms(values: pl.Series) -> pl.Series:
    """Convert epoch times as ``to_epoch_ms`` does."""
    if values.is_between(1e11, 1e14, closed="left").all():
        return values.round().cast(pl.Int64, strict=False)
    return values.to_frame().select(to_epoch_ms(pl.col(values.name))).to_series()


def parse(
    texts: pl.Series, zone: tzinfo | None, device: pl.Series | None = None, *, known_count: int = 0
) -> tuple[pl.Series, dict[str, int]]:
    """Return the UTC times of ``texts`` (null where a text is no time), and decisions with their counts.

    Times without a zone are in ``zone`` (None: the local zone of this process). A local time that exists twice is the
    earlier one until the clock of its ``device`` has gone back. If a log begins among such times and continues after
    them, the clock went back before its start. A time that does not exist is read with the offset valid before.
    The first ``known_count`` texts were read before and are not counted again.
    """
    if (quick := native.clocks(texts)) is not None and not quick[0].values.has_nulls():
        naive, zoned = quick[0].values, quick[1]
        utc = naive.dt.replace_time_zone("UTC").alias("time")
        if zoned.all():
            return utc, {}
        times, decisions = localise(naive, zone, device, known_count=known_count)
        return (utc.zip_with(zoned, times) if zoned.any() else times).alias("time"), decisions
    frame = texts.alias("text").to_frame()
    some, place = distinct(frame)
    # All GPUs have the same times.
    frame = _read(some).select(pl.all().gather(place)) if 2 * len(some) < len(frame) else _read(frame)
    local = frame["local"]
    if not local.any():
        return frame["time"], {}
    times, decisions = localise(frame["naive"], zone, device, known_count=known_count)
    return (times if local.all() else times.zip_with(local, frame["time"])).alias("time"), decisions


def _read(texts: pl.DataFrame) -> pl.DataFrame:
    """Add to ``text`` its time without a zone (``naive``), the UTC time, and whether it is ``local`` (no zone)."""
    frame = texts.with_columns(pl.col("text").str.strip_chars().alias("bare"))
    frame = frame.with_columns(
        pl.col("bare").str.extract_groups(_CLOCK).alias("clock"),
        pl.when(pl.col("bare").str.contains(_NUMBER))
        .then(pl.col("bare"))
        .cast(pl.Float64, strict=False)
        .alias("number"),
    ).with_columns(_naive(pl.col("clock")).alias("naive"), pl.col("clock").struct.field("8").alias("offset"))
    return frame.select(
        "text",
        "naive",
        pl.when(pl.col("number").is_not_null())
        .then(to_epoch_ms(pl.col("number")).cast(pl.Datetime("ms")))
        .otherwise(pl.col("naive") - _offset(pl.col("offset")))
        .dt.replace_time_zone("UTC")
        .alias("time"),
        (pl.col("number").is_null() & pl.col("offset").is_null() & pl.col("naive").is_not_null()).alias("local"),
    )


def _naive(part: pl.Expr) -> pl.Expr:
    def number(index: int) -> pl.Expr:
        return part.struct.field(str(index)).cast(pl.Int32, strict=False)

    fraction = ("0." + part.struct.field("7")).cast(pl.Float64, strict=False).fill_null(0.0)
    # pl.datetime raises for impossible dates; conversion from text gives null.
    day = pl.concat_str(
        part.struct.field("1"), pl.lit("-"), part.struct.field("2").str.zfill(2), pl.lit("-"),
        part.struct.field("3").str.zfill(2),
    ).str.to_date("%Y-%m-%d", strict=False)  # fmt: skip
    hour, minute, second = number(4).fill_null(0), number(5).fill_null(0), number(6).fill_null(0)
    valid = (hour < 24) & (minute < 60) & (second <= 60)
    ms = (hour.cast(pl.Int64) * 3600 + minute * 60 + second) * 1000 + (fraction * 1000).round().cast(pl.Int64)
    return pl.when(valid).then(day.cast(pl.Datetime("ms")) + pl.duration(milliseconds=ms, time_unit="ms"))


def _offset(text: pl.Expr) -> pl.Expr:
    digits = text.str.replace_all(r"[^0-9]", "")
    minutes = digits.str.slice(0, 2).cast(pl.Int64, strict=False).fill_null(0) * 60 + digits.str.slice(2, 2).cast(
        pl.Int64, strict=False
    ).fill_null(0)
    signed = pl.when(text.str.starts_with("-")).then(-minutes).otherwise(minutes)
    return pl.duration(minutes=signed, time_unit="ms").fill_null(pl.duration(minutes=0, time_unit="ms"))


def localise(
    naive: pl.Series, zone: tzinfo | None, device: pl.Series | None = None, *, known_count: int = 0
) -> tuple[pl.Series, dict[str, int]]:
    """Convert ``naive`` local times of ``zone`` to UTC; return the times and decisions (see ``parse``)."""
    zone = zone or local_zone()
    if isinstance(zone, timezone):
        return (naive - zone.utcoffset(None)).dt.replace_time_zone("UTC").cast(TIME).alias("time"), {}
    if not isinstance(zone, ZoneInfo):
        distinct = naive.drop_nulls().unique()
        moments = [moment.replace(tzinfo=zone).astimezone(UTC) for moment in distinct]
        converted = pl.DataFrame({"naive": distinct, "time": pl.Series(moments, dtype=TIME)})
        return naive.to_frame("naive").join(converted, on="naive", how="left", maintain_order="left")["time"], {}
    name = zone.key
    early = naive.dt.replace_time_zone(name, ambiguous="earliest", non_existent="null")
    late = naive.dt.replace_time_zone(name, ambiguous="latest", non_existent="null")
    hour = timedelta(hours=1)
    before = (naive - hour).dt.replace_time_zone(name, ambiguous="earliest", non_existent="null") + hour
    frame = pl.DataFrame({"naive": naive, "early": early, "late": late, "before": before}).with_columns(
        (pl.col("early") != pl.col("late")).fill_null(value=False).alias("twice"),
        device.alias("device") if device is not None else pl.lit(0).alias("device"),
    )
    back = frame.select(_gone_back() if frame["twice"].any() else pl.lit(value=False)).to_series()
    times = frame.select(
        pl.when(pl.col("twice") & back).then(pl.col("late")).otherwise(pl.col("early"))
        .fill_null(pl.col("before")).dt.convert_time_zone("UTC").alias("time")
    )["time"]  # fmt: skip
    never = early.is_null() & naive.is_not_null()
    counts = {TWICE: int(frame["twice"][known_count:].sum()), NEVER: int(never[known_count:].sum())}
    return times, {what: count for what, count in counts.items() if count}


def _gone_back() -> pl.Expr:
    """Return whether the clock of the ``device`` went back before the time ``naive``, which exists ``twice``."""
    naive, twice, day = pl.col("naive"), pl.col("twice"), pl.col("naive").dt.date()
    # The clock goes back once, by one hour less a step, among the times that exist twice.
    step = naive.diff().over("device")
    jump = (twice & step.is_between(-_BACK_MOST, -_BACK_LEAST)).fill_null(value=False).cast(pl.Int64)
    # A log that begins among these times and continues after them was started after the clock went back.
    following, behind = (of.shift(-1).over("device") for of in (naive, ~twice))
    begins = twice & (twice.cast(pl.Int64).cum_sum().over("device", day) == 1) & (step > _GOES_ON).fill_null(value=True)
    goes_on = (twice & behind & (following - naive).is_between(timedelta(0), _GOES_ON)).fill_null(value=False)
    later = (begins.any() & goes_on.any() & (jump.sum() == 0)).over("device", day)
    return (jump.cum_sum().over("device", day) > 0) | later


def local_zone(localtime: Path = Path("/etc/localtime")) -> tzinfo | None:
    """Return the zone of this process by name if the system has it, else None, which means local time in Python."""
    name = os.environ.get("TZ", "").lstrip(":")
    if not name:
        _, _, name = str(localtime.resolve()).partition("zoneinfo/")
    try:
        return ZoneInfo(name) if name else None
    except (KeyError, ValueError, OSError):
        return None
