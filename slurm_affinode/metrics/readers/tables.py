"""Tables of text (CSV, nvidia-smi, dmon) and of values (Parquet), converted to samples, with any column names.

A wide table has one row per device and time and one column per metric; a long one has a column with the name of the
metric and one with its value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, tzinfo

import numpy as np
import polars as pl
from numpy.typing import NDArray

from slurm_affinode.base.columns import native
from slurm_affinode.base.errors import InputError
from slurm_affinode.base.limits import most_bytes
from slurm_affinode.metrics.aliases import VALUES, Alias, bracket_unit, folded
from slurm_affinode.metrics.distinct import distinct
from slurm_affinode.metrics.readers import local_time
from slurm_affinode.metrics.readers.common import (
    Identifier,
    Identity,
    ReadingNotes,
    ReadOptions,
    identity_frame,
    job_ids,
    measured,
    shows_percent,
)
from slurm_affinode.metrics.readers.long_form import ENTRIES, LongForm, code_of, with_total
from slurm_affinode.metrics.schema import IDENTITY, SAMPLES, TIME

_MISSING = ("", "n/a", "na", "nan", "null", "none", "-", "--", "err!", "error", "unknown", "not supported")
_UNIT = r"\s*(%|[kmgt]i?b|b|m?w|watts?|percent)$"
_COMMON_UNIT = re.compile(r" ?(?:%|[KMGT]i?B|W)$")
_SCALE = {"kib": 1 / 2**10, "mib": 1.0, "gib": 2.0**10, "tib": 2.0**20, "kb": 1 / 2**10, "mb": 1.0, "gb": 2.0**10,
          "b": 1 / 2**20, "w": 1.0, "watt": 1.0, "watts": 1.0, "mw": 1e-3}  # fmt: skip
_SHOWN = 60
_RATIO = (
    "values of the utilization are between 0 and 1 and none is above: they were read as percent; if it is a ratio, "
    "set util_pct:ratio for that column in gpu_history.columns of the configuration"
)
_RECENT = timedelta(hours=3)
_NEVER = datetime(1970, 1, 1, tzinfo=UTC)
_PARTS = tuple(IDENTITY)


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a table: positions by field."""

    values: dict[str, tuple[int, Alias]]
    """Metric or helper -> its column."""
    parts: dict[str, int]
    """Identity column or ``job`` -> its column."""
    time: int | None
    metric: int | None
    value: int | None

    @property
    def long(self) -> tuple[int, int] | None:
        """The columns of the metric's name and value, if rows are single measurements."""
        return None if self.metric is None or self.value is None else (self.metric, self.value)


def layout(header: Sequence[str], notes: ReadingNotes, options: ReadOptions) -> Layout:
    """Determine the fields of the columns. Raises ``InputError`` if no column is a metric."""
    best: dict[str, tuple[int, Alias]] = {}
    columns_known: list[tuple[int, Alias]] = []
    for position, name in enumerate(header):
        alias = options.aliases.column(name)
        if alias is not None:
            columns_known.append((position, alias))
        elif name.strip():
            notes.unknown[name.strip()] += 1
    for position, alias in columns_known:
        if alias.field not in best or alias.rank < best[alias.field][1].rank:
            best[alias.field] = (position, alias)
    # If there is another column of UUIDs, one such as ``gpu_id`` has the index.
    for position, alias in columns_known:
        if alias.field == "uuid" and position != best["uuid"][0]:
            best.setdefault("index", (position, alias))
    values = {field: column for field, column in best.items() if field in VALUES}
    parts = {field: best[field][0] for field in (*_PARTS, "job") if field in best}
    time, metric, value = (best[name][0] if name in best else None for name in ("time", "metric", "value"))
    if not values and (metric is None or value is None):
        raise InputError(
            f"no column is a GPU metric: {', '.join(name.strip() for name in header)[:200]}",
            where=notes.name,
            hint="name the columns in gpu_history.columns of the configuration",
        )
    return Layout(values, parts, time, metric, value)


class TableReader:
    """Convert frames of columns ``c0``, ``c1``, ... with ``number`` (the line) to samples.

    Cells are text; those with values may be numbers, and those with times may be times in UTC that are possible.
    """

    def __init__(
        self, header: Sequence[str], notes: ReadingNotes, options: ReadOptions, fallback_node: str | None,
        ticks: Ticks | None = None, *, decimal_comma: bool = False,
    ) -> None:  # fmt: skip
        """``ticks`` continues to count the samples of an earlier table of the same file.

        ``decimal_comma``: ``5,5`` is five and a half.
        """
        self._notes = notes
        self._options = options
        self._header = [name.strip() for name in header]
        self.layout = layout(header, notes, options)
        self._identifier = Identifier(options, fallback_node)
        self._long = LongForm()
        self._percent: set[str] = set()
        self._fractions: int | None = 0
        """Utilizations between 0 and 1, while it may be a ratio; None: one is above 1, or the header has a unit."""
        self._decimal_comma = decimal_comma
        self._numbers: dict[Identity, int] = {}
        self._clock = _Clock(options.zone)
        if self.layout.time is None and ticks is None:
            _check_time(self._header, notes, options)
            ticks = Ticks(notes, options)
        self._ticks = ticks or Ticks(notes, replace(options, start=_NEVER))
        _check_identity(self.layout, notes, options, fallback_node)

    def rows(self, frame: pl.DataFrame) -> Iterator[pl.DataFrame]:
        """Convert rows to samples."""
        if (position := self.layout.parts.get("job")) is not None:
            most = most_bytes("job")
            over = (frame[f"c{position}"].str.len_bytes() > most).fill_null(value=False)
            if over.any():
                self.reject(frame.filter(over), f"more than {most:,} bytes", position)
                frame = frame.filter(~over)
        frame = self._with_time(self._with_identity(frame))
        if self.layout.long is not None:
            yield from self._long.add(self._entries(frame, *self.layout.long))
        elif len(frame):
            yield self._wide(frame)

    def rest(self) -> Iterator[pl.DataFrame]:
        """Yield the samples that are still held."""
        self._notes.decide(_RATIO, self._fractions or 0)
        yield from self._long.rest()

    def reject(self, lines: pl.DataFrame, reason: str, column: int | None = None) -> None:
        """Report rows, with their text in ``column``."""
        cells = [] if column is None else [f"c{column}"]  # no times: Python cannot represent some
        for number, *cell in lines.head(1000).select("number", *cells).iter_rows():
            shown = "" if column is None else f": {self._header[column]} is {str(cell[0])[:_SHOWN]!r}"
            self._notes.problem(number, reason + shown, strict=self._options.strict)
        self._notes.problem_count += max(0, len(lines) - 1000)

    def _with_identity(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Add ``at`` (number of the identity); rows without a device are reported and dropped."""
        names = [name for name in _PARTS if name in self.layout.parts]
        texts, place = distinct(frame.select(f"c{self.layout.parts[name]}" for name in names))
        cleaned = texts.select(
            _known_text(pl.col(column)).alias(name) for column, name in zip(texts.columns, names, strict=True)
        )
        outcomes = [self._identify(dict(zip(names, row, strict=True))) for row in cleaned.iter_rows()]
        indexes = pl.Series("at", [outcome if isinstance(outcome, int) else None for outcome in outcomes], pl.UInt32)
        frame = frame.with_columns(indexes.gather(place))
        if not indexes.has_nulls():
            return frame
        reasons = [None if isinstance(outcome, int) else outcome for outcome in outcomes]
        why = pl.Series("why", reasons, pl.String).gather(place)
        bad = frame.with_columns(why).filter(pl.col("at").is_null())
        for (reason,), lines in bad.group_by("why", maintain_order=True):
            self.reject(lines, str(reason))
        return frame.filter(pl.col("at").is_not_null())

    def _identify(self, texts: dict[str, str | None]) -> int | str:
        identity = self._identifier.identify({name: text for name, text in texts.items() if text is not None})
        return identity if isinstance(identity, str) else self._numbers.setdefault(identity, len(self._numbers))

    def _with_time(self, frame: pl.DataFrame) -> pl.DataFrame:
        position = self.layout.time
        if position is None:
            return frame.with_columns(self._ticks.times(list(self._numbers), frame["at"], frame["number"]))
        cells = frame[f"c{position}"]
        times = cells.cast(TIME) if cells.dtype.is_temporal() else self._clock.times(cells, frame["at"], self._notes)
        frame = frame.with_columns(times.alias("time"))
        if times.has_nulls():
            self.reject(frame.filter(pl.col("time").is_null()), "the time cannot be read", position)
            frame = frame.filter(pl.col("time").is_not_null())
        possible = frame["time"].is_between(*local_time.POSSIBLE)
        if possible.all():
            return frame
        self.reject(frame.filter(~possible), "the time is out of range", position)
        return frame.filter(possible)

    def _wide(self, frame: pl.DataFrame) -> pl.DataFrame:
        for field, (position, alias) in self.layout.values.items():
            frame = self._number(frame, position, field, alias)
        missing = [pl.lit(None, pl.Float64).alias(name) for name in VALUES if name not in self.layout.values]
        frame = with_total(frame.with_columns(missing))
        identities = identity_frame(list(self._numbers))
        return frame.with_columns(
            *(identities[name].gather(frame["at"]).alias(name) for name in IDENTITY), self._jobs(frame)
        ).select(*SAMPLES)

    def _jobs(self, frame: pl.DataFrame) -> pl.Series:
        position = self.layout.parts.get("job")
        if position is None:
            return pl.Series("job", [None], dtype=pl.String).new_from_index(0, len(frame))
        texts = frame[f"c{position}"]
        # In Prometheus, ``job`` is the scrape job, such as ``dcgm-exporter``; Slurm's IDs begin with a digit.
        vague = folded(self._header[position]) == "job"
        ids = {
            text: job_ids(text) if not vague or text.strip()[:1].isdigit() else None
            for text in texts.drop_nulls().unique()
        }
        return texts.replace_strict(list(ids), list(ids.values()), return_dtype=pl.String, default=None).alias("job")

    def _number(self, frame: pl.DataFrame, position: int, field: str, alias: Alias) -> pl.DataFrame:
        """Add the column ``field`` in the unit of the schema; rows with a text that is not a number are dropped."""
        text = frame[f"c{position}"]
        number, unit, bad = numbers(text, decimal_comma=self._decimal_comma)
        if bad.any():
            self.reject(frame.filter(bad), "not a number", position)
            frame, number, unit = frame.filter(~bad), number.filter(~bad), unit.filter(~bad)
        scaled = measured(number)
        factor = self._factor(number, position, field, alias)
        if unit.null_count() == len(unit):
            return frame.with_columns((scaled if factor == 1.0 else scaled * factor).alias(field))
        common: str | None = unit[0]
        if common is not None and (unit == common).all(ignore_nulls=False):
            factor = _SCALE.get(common, factor)
            return frame.with_columns((scaled if factor == 1.0 else scaled * factor).alias(field))
        unit_factor = unit.replace_strict(list(_SCALE), list(_SCALE.values()), default=None, return_dtype=pl.Float64)
        return frame.with_columns((scaled * unit_factor.fill_null(factor)).alias(field))

    def _factor(self, number: pl.Series, position: int, field: str, alias: Alias) -> float:
        if alias.field == "util_pct" and alias.unit == "percent":
            self._count_fractions(number, self._header[position])
        if alias.unit != "percent_or_ratio":
            return alias.factor
        if shows_percent(number):
            self._percent.add(field)
        return 1.0 if field in self._percent else 100.0

    def _count_fractions(self, percent: pl.Series, header: str) -> None:
        if self._fractions is None or bracket_unit(header) is not None or (percent > 1).any():
            self._fractions = None
        else:
            self._fractions += int(percent.is_between(0, 1, "none").sum())

    def _entries(self, frame: pl.DataFrame, metric: int, value: int) -> pl.DataFrame:
        """Return the entries of a long table."""
        frame = frame.with_columns(self._jobs(frame))
        series = frame.select("at", "job").unique(maintain_order=True)
        devices = list(self._numbers)
        numbers_ = [self._long.series(devices[index], job) for index, job in series.iter_rows()]
        numbered = series.with_columns(pl.Series("series", numbers_, pl.UInt32))
        frame = frame.join(numbered, on=["at", "job"], nulls_equal=True, maintain_order="left")
        frames: list[pl.DataFrame] = []
        for (name,), rows in frame.group_by(f"c{metric}", maintain_order=True):
            alias = self._options.aliases.metric(str(name)) if name is not None else None
            if alias is None:
                self._notes.unknown[str(name)] += len(rows)
                continue
            ready = self._number(rows, value, "value", Alias(alias.field, alias.unit))
            code = pl.lit(code_of(alias), pl.UInt16).alias("code")
            frames.append(ready.select("series", code, pl.col("value").cast(pl.Float64), "time"))
        return pl.concat(frames) if frames else pl.DataFrame(schema=ENTRIES)


def _known_text(text: pl.Expr) -> pl.Expr:
    clean = text.str.strip_chars()
    return pl.when(~clean.str.to_lowercase().is_in(_MISSING) & ~clean.str.starts_with("[")).then(clean)


def numbers(texts: pl.Series, *, decimal_comma: bool = False) -> tuple[pl.Series, pl.Series, pl.Series]:
    """Return numbers (null if missing), units (lower case, null if none), and whether a text is neither.

    Numbers in place of texts have no unit.
    """
    missing = pl.Series([None], dtype=pl.String).new_from_index(0, len(texts))
    sound = pl.Series([False]).new_from_index(0, len(texts))
    if texts.dtype.is_numeric():
        return texts.cast(pl.Float64), missing, sound
    match = _COMMON_UNIT.search(next(iter(texts.drop_nulls().head(1)), ""))
    suffix = "" if match is None else match[0]
    quick = native.decimals(texts, suffix)
    if quick is not None and not len(quick.odd):
        common = suffix.strip().lower()
        units = missing if common in ("", "%") else pl.Series([common]).new_from_index(0, len(texts))
        return quick.values, units, sound
    if (unit := _common_unit(texts)) is None:
        number = texts.cast(pl.Float64, strict=False)
        if number.null_count() == texts.null_count():
            return number, missing, sound
    else:
        number = texts.str.strip_suffix(unit).cast(pl.Float64, strict=False)
        if number.null_count() == texts.null_count():
            return number, missing if unit.strip() == "%" else missing.fill_null(unit.strip().lower()), sound
    unique_texts, place = distinct(texts.to_frame())
    if 2 * len(unique_texts) < len(texts):  # such as "0 %" to "100 %"
        first, second, third = numbers(unique_texts.to_series(), decimal_comma=decimal_comma)
        return first.gather(place), second.gather(place), third.gather(place)
    lower = pl.col(texts.name).str.strip_chars().str.to_lowercase()
    bare = lower.str.replace(_UNIT, "")
    if decimal_comma:
        bare = bare.str.replace(r"^(\d*),(\d+)$", "${1}.${2}")
    present = (
        pl.col(texts.name).is_not_null()
        & ~lower.is_in(_MISSING)
        & ~lower.str.contains(r"^\[.*\]$|not supported|unknown error")
    )
    value = bare.cast(pl.Float64, strict=False)
    read = texts.to_frame().select(
        pl.when(present).then(value).alias("number"),
        lower.str.extract(_UNIT, 1).replace({"%": None, "percent": None}).alias("unit"),
        (present & value.is_null()).alias("bad"),
    )
    return read["number"], read["unit"], read["bad"]


def _common_unit(texts: pl.Series) -> str | None:
    """Return the unit that all texts end with, such as ``%`` and ``MiB``, and the space before it."""
    first = next(iter(texts.drop_nulls().head(1)), "")
    match = _COMMON_UNIT.search(first)
    return match[0] if match and texts.str.ends_with(match[0]).all() else None


def _check_time(header: Sequence[str], notes: ReadingNotes, options: ReadOptions) -> None:
    """Raise ``InputError`` for a table without a time if an unknown column may be the time."""
    unknown = [name for name in header if name in notes.unknown]
    if options.start is None and unknown:
        raise InputError(
            f"no column is known to be the time; unknown: {', '.join(unknown)[:200]}",
            where=notes.name,
            hint="name the time column in gpu_history.columns of the configuration, or give --start and --interval",
        )


class Ticks:
    """Times for rows without any: a tick has one row per device and ends when a device repeats."""

    def __init__(self, notes: ReadingNotes, options: ReadOptions) -> None:
        if options.start is None:
            raise InputError(
                "has no times",
                where=notes.name,
                hint="give --start TIME of the first sample and --interval, e.g. --interval 30s",
            )
        self._start_ms = round(options.start.timestamp() * 1000)
        self._interval_s = options.interval_s
        self._notes = notes
        self._tick = 0
        self._devices: dict[Identity, int] = {}
        self._last_times: set[int] = set()

    def times(self, devices: Sequence[Identity], device_rows: pl.Series, numbers: pl.Series) -> pl.Series:
        """Return the UTC times of rows in the order of the file, given their devices by position in ``devices``."""
        device_numbers = np.array(
            [self._devices.setdefault(device, len(self._devices)) for device in devices], np.int64
        )
        before = sorted(self._last_times)
        rows = np.concatenate([np.array(before, np.int64), device_numbers[device_rows.to_numpy()]])
        starts = _tick_starts(rows)
        self._last_times = set(rows[starts[-1] :].tolist())
        ticks = np.zeros(len(rows), np.int64)
        ticks[starts[1:]] = 1
        ticks = self._tick + np.cumsum(ticks)[len(before) :]
        self._tick += len(starts) - 1
        if self._tick and self._interval_s is None:
            first = np.flatnonzero(ticks == 1)
            raise InputError(
                "has several samples of a device and no times",
                where=f"{self._notes.name}:{int(numbers[int(first[0])])}" if len(first) else self._notes.name,
                hint="give --interval, the time between two samples, e.g. 30s",
            )
        step_ms = round((self._interval_s or 0) * 1000)
        epoch = pl.Series("time", ticks) * step_ms + self._start_ms
        return epoch.cast(pl.Datetime("ms")).dt.replace_time_zone("UTC")


def _tick_starts(devices: NDArray[np.int64]) -> list[int]:
    """Return the first rows of all ticks of ``devices``."""
    count = len(devices)
    order = np.argsort(devices, kind="stable")
    again = np.full(count + 1, count)
    repeats = devices[order[1:]] == devices[order[:-1]]
    again[order[:-1][repeats]] = order[1:][repeats]  # the next row of the same device
    following = np.minimum.accumulate(again[::-1])[::-1].tolist()  # the first row that repeats one from here on
    starts = [0]
    while (start := following[starts[-1]]) < count:
        starts.append(start)
    return starts


class _Clock:
    """Convert local times to UTC across the blocks of a file: a block is read with the last hours of the one before."""

    def __init__(self, zone: tzinfo | None) -> None:
        self._zone = zone
        self._texts = pl.Series("text", [], pl.String)
        self._devices = pl.Series("device", [], pl.UInt32)

    def times(self, texts: pl.Series, devices: pl.Series, notes: ReadingNotes) -> pl.Series:
        """Return UTC times, null where a text is no time; decisions are added to ``notes``."""
        first_count = len(self._texts)
        all_texts = pl.concat([self._texts, texts.rename("text")])
        all_devices = pl.concat([self._devices, devices.rename("device")])
        times, decisions = local_time.parse(all_texts, self._zone, all_devices, known_count=first_count)
        for what, count in decisions.items():
            notes.decide(what, count)
        last = times.filter(times.is_between(*local_time.POSSIBLE)).max()
        recent = times >= last - _RECENT if isinstance(last, datetime) else times.is_not_null()
        self._texts, self._devices = all_texts.filter(recent), all_devices.filter(recent)
        return times[first_count:].alias("time")


def _check_identity(table_layout: Layout, notes: ReadingNotes, options: ReadOptions, fallback_node: str | None) -> None:
    if not {"uuid", "pci", "index", "mig"} & set(table_layout.parts):
        raise InputError(
            "no column names the GPU",
            where=notes.name,
            hint="a column with the UUID, the PCI address or the index is needed (nvidia-smi: uuid, pci.bus_id, index)",
        )
    if "node" not in table_layout.parts and options.node is None and fallback_node is None:
        raise InputError(
            "does not name its node",
            where=notes.name,
            hint="give --node NAME, name the file after the node, or add a column",
        )
    decision = f"node name taken from the path: {fallback_node}"
    if "node" not in table_layout.parts and options.node is None and decision not in notes.decisions:
        notes.decide(decision)
