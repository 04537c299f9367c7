"""Tables of text (CSV, nvidia-smi, dmon) and of values (Parquet), converted to samples, with any column names.

A wide table has one row per device and time and one column per metric; a long one has a column with the name of the
metric and one with its value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, tzinfo

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.limits import most_bytes
from slurm_affinode.metrics.aliases import VALUES, Alias, bracket_unit, folded
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
from slurm_affinode.metrics.schema import IDENTITY, SAMPLES

_MISSING = ("", "n/a", "na", "nan", "null", "none", "-", "--", "err!", "error", "unknown", "not supported")
_UNIT = r"\s*(%|[kmgt]i?b|b|m?w|watts?|percent)$"
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
    known: list[tuple[int, Alias]] = []
    for position, name in enumerate(header):
        alias = options.aliases.column(name)
        if alias is not None:
            known.append((position, alias))
        elif name.strip():
            notes.unknown[name.strip()] += 1
    for position, alias in known:
        if alias.field not in best or alias.rank < best[alias.field][1].rank:
            best[alias.field] = (position, alias)
    # If there is another column of UUIDs, one such as ``gpu_id`` has the index.
    for position, alias in known:
        if alias.field == "uuid" and position != best["uuid"][0]:
            best.setdefault("index", (position, alias))
    values = {field: found for field, found in best.items() if field in VALUES}
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
    """Convert frames of text columns ``c0``, ``c1``, ... with ``number`` (the line) to samples."""

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
            over = (pl.col(f"c{position}").str.len_bytes() > most).fill_null(value=False)
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
        keys = [f"_{name}" for name in names]
        cleaned = frame.with_columns(_known(pl.col(f"c{self.layout.parts[name]}")).alias(f"_{name}") for name in names)
        known = cleaned.select(keys).unique(maintain_order=True)
        found = [self._identify(dict(zip(names, row, strict=True))) for row in known.iter_rows()]
        marks = pl.DataFrame(
            [(one, None) if isinstance(one, int) else (None, one) for one in found],
            schema={"at": pl.UInt32(), "why": pl.String()},
            orient="row",
        )
        whole = cleaned.join(known.hstack(marks), on=keys, how="left", nulls_equal=True, maintain_order="left")
        bad = whole.filter(pl.col("at").is_null())
        for (why,), lines in bad.group_by("why", maintain_order=True):
            self.reject(lines, str(why))
        return whole.filter(pl.col("at").is_not_null()).drop("why", *keys)

    def _identify(self, texts: dict[str, str | None]) -> int | str:
        identity = self._identifier.identify({name: text for name, text in texts.items() if text is not None})
        return identity if isinstance(identity, str) else self._numbers.setdefault(identity, len(self._numbers))

    def _with_time(self, frame: pl.DataFrame) -> pl.DataFrame:
        position = self.layout.time
        if position is None:
            return frame.with_columns(self._ticks.times(list(self._numbers), frame["at"], frame["number"]))
        frame = frame.with_columns(self._clock.times(frame[f"c{position}"], frame["at"], self._notes))
        self.reject(frame.filter(pl.col("time").is_null()), "the time cannot be read", position)
        frame = frame.filter(pl.col("time").is_not_null())
        possible = pl.col("time").is_between(*local_time.POSSIBLE)
        self.reject(frame.filter(~possible), "the time is out of range", position)
        return frame.filter(possible)

    def _wide(self, frame: pl.DataFrame) -> pl.DataFrame:
        for field, (position, alias) in self.layout.values.items():
            frame = self._number(frame, position, field, alias)
        missing = [pl.lit(None, pl.Float64).alias(name) for name in VALUES if name not in self.layout.values]
        frame = with_total(frame.with_columns(missing))
        known = identity_frame(list(self._numbers))
        return frame.with_columns(
            *(known[name].gather(frame["at"]).alias(name) for name in IDENTITY), self._jobs(frame)
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
        frame = numbers(frame, f"c{position}", decimal_comma=self._decimal_comma)
        bad = frame.filter(pl.col("_bad"))
        if len(bad):
            self.reject(bad, "not a number", position)
            frame = frame.filter(~pl.col("_bad"))
        factor = pl.lit(self._factor(frame, position, field, alias))
        scaled = measured(pl.col("_number")) * pl.col("_unit").replace_strict(
            list(_SCALE), list(_SCALE.values()), default=None, return_dtype=pl.Float64
        ).fill_null(factor)
        return frame.with_columns(scaled.alias(field)).drop("_number", "_unit", "_bad")

    def _factor(self, frame: pl.DataFrame, position: int, field: str, alias: Alias) -> float:
        if alias.field == "util_pct" and alias.unit == "percent":
            self._count_fractions(frame["_number"], self._header[position])
        if alias.unit != "percent_or_ratio":
            return alias.factor
        if shows_percent(frame["_number"]):
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
        numbers_ = [self._long.series(devices[at], job) for at, job in series.iter_rows()]
        numbered = series.with_columns(pl.Series("series", numbers_, pl.UInt32))
        frame = frame.join(numbered, on=["at", "job"], nulls_equal=True, maintain_order="left")
        found: list[pl.DataFrame] = []
        for (name,), rows in frame.group_by(f"c{metric}", maintain_order=True):
            alias = self._options.aliases.metric(str(name)) if name is not None else None
            if alias is None:
                self._notes.unknown[str(name)] += len(rows)
                continue
            ready = self._number(rows, value, "value", Alias(alias.field, alias.unit))
            code = pl.lit(code_of(alias), pl.UInt16).alias("code")
            found.append(ready.select("series", code, pl.col("value").cast(pl.Float64), "time"))
        return pl.concat(found) if found else pl.DataFrame(schema=ENTRIES)


def _known(text: pl.Expr) -> pl.Expr:
    clean = text.str.strip_chars()
    return pl.when(~clean.str.to_lowercase().is_in(_MISSING) & ~clean.str.starts_with("[")).then(clean)


def numbers(frame: pl.DataFrame, column: str, *, decimal_comma: bool = False) -> pl.DataFrame:
    """Add ``_number`` (null if missing), ``_unit`` (lower case, null if none) and ``_bad`` (no number, not missing)."""
    plain = frame[column].cast(pl.Float64, strict=False)
    if plain.null_count() == frame[column].null_count():
        none = (pl.lit(None, pl.String).alias("_unit"), pl.lit(value=False).alias("_bad"))
        return frame.with_columns(plain.alias("_number"), *none)
    distinct = frame.select(column).unique()
    if 2 * len(distinct) < len(frame):  # such as "0 %" to "100 %"
        read = numbers(distinct, column, decimal_comma=decimal_comma)
        return frame.join(read, on=column, how="left", nulls_equal=True, maintain_order="left")
    lower = pl.col(column).str.strip_chars().str.to_lowercase()
    bare = lower.str.replace(_UNIT, "")
    if decimal_comma:
        bare = bare.str.replace(r"^(\d*),(\d+)$", "${1}.${2}")
    given = (
        pl.col(column).is_not_null()
        & ~lower.is_in(_MISSING)
        & ~lower.str.contains(r"^\[.*\]$|not supported|unknown error")
    )
    number = bare.cast(pl.Float64, strict=False)
    return frame.with_columns(
        pl.when(given).then(number).alias("_number"),
        lower.str.extract(_UNIT, 1).replace({"%": None, "percent": None}).alias("_unit"),
        (given & number.is_null()).alias("_bad"),
    )


def _check_time(header: Sequence[str], notes: ReadingNotes, options: ReadOptions) -> None:
    """Raise ``InputError`` for a table without a time if an unknown column may be the time."""
    unknown = [name for name in header if name in notes.unknown]
    if options.start is None and unknown:
        raise InputError(
            f"no column is known as a time; not known: {', '.join(unknown)[:200]}",
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
        self._seen: set[int] = set()

    def times(self, devices: Sequence[Identity], at: pl.Series, numbers: pl.Series) -> pl.Series:
        """Return the UTC times of rows in the order of the file, given their devices by position in ``devices``."""
        ticks = []
        known = [self._devices.setdefault(device, len(self._devices)) for device in devices]
        for device in map(known.__getitem__, at):
            if device in self._seen:
                self._tick += 1
                self._seen = set()
            self._seen.add(device)
            ticks.append(self._tick)
        if self._tick and self._interval_s is None:
            raise InputError(
                "has several samples of a device and no times",
                where=f"{self._notes.name}:{int(numbers[ticks.index(1)])}" if 1 in ticks else self._notes.name,
                hint="give --interval, the time between two samples, e.g. 30s",
            )
        step_ms = round((self._interval_s or 0) * 1000)
        epoch = pl.Series("time", ticks, pl.Int64) * step_ms + self._start_ms
        return epoch.cast(pl.Datetime("ms")).dt.replace_time_zone("UTC")


class _Clock:
    """Convert local times to UTC across the blocks of a file: a block is read with the last hours of the one before."""

    def __init__(self, zone: tzinfo | None) -> None:
        self._zone = zone
        self._texts = pl.Series("text", [], pl.String)
        self._devices = pl.Series("device", [], pl.UInt32)

    def times(self, texts: pl.Series, devices: pl.Series, notes: ReadingNotes) -> pl.Series:
        """Return UTC times, null where a text is no time; decisions are added to ``notes``."""
        held = len(self._texts)
        all_texts = pl.concat([self._texts, texts.rename("text")])
        all_devices = pl.concat([self._devices, devices.rename("device")])
        times, decisions = local_time.parse(all_texts, self._zone, all_devices, known=held)
        for what, count in decisions.items():
            notes.decide(what, count)
        last = times.filter(times.is_between(*local_time.POSSIBLE)).max()
        recent = times >= last - _RECENT if isinstance(last, datetime) else times.is_not_null()
        self._texts, self._devices = all_texts.filter(recent), all_devices.filter(recent)
        return times[held:].alias("time")


def _check_identity(found: Layout, notes: ReadingNotes, options: ReadOptions, fallback_node: str | None) -> None:
    if not {"uuid", "pci", "index", "mig"} & set(found.parts):
        raise InputError(
            "no column names the GPU",
            where=notes.name,
            hint="a column with the UUID, the PCI address or the index is needed (nvidia-smi: uuid, pci.bus_id, index)",
        )
    if "node" not in found.parts and options.node is None and fallback_node is None:
        raise InputError(
            "does not name its node",
            where=notes.name,
            hint="give --node NAME, name the file after the node, or add a column",
        )
    taken = f"node name taken from the path: {fallback_node}"
    if "node" not in found.parts and options.node is None and taken not in notes.decisions:
        notes.decide(taken)
