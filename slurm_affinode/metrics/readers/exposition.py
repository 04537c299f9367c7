"""Prometheus exposition text and OpenMetrics from dcgm-exporter and other exporters; a file may have many scrapes.

Timestamps are milliseconds in the text format and seconds in OpenMetrics; other writers use micro- or nanoseconds.
The unit is derived from the magnitude (``local_time.to_epoch_ms``). Polars splits the lines; each distinct label set is
parsed once. Formats: prometheus.io, "Exposition formats"; OpenMetrics 1.0.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from slurm_affinode.base.errors import InputError
from slurm_affinode.metrics.aliases import Alias
from slurm_affinode.metrics.distinct import distinct
from slurm_affinode.metrics.readers.common import (
    Identifier,
    ReadingNotes,
    ReadOptions,
    measured,
    percent_values,
    shows_percent,
)
from slurm_affinode.metrics.readers.lines import LineBlock, pieces, positions
from slurm_affinode.metrics.readers.local_time import epoch_ms, to_epoch_ms
from slurm_affinode.metrics.readers.long_form import ENTRIES, JOB_CODE, LongForm, code_of
from slurm_affinode.metrics.schema import TIME

NAME = r"^\s*([a-zA-Z_:][a-zA-Z0-9_:.]*)\s*"
NAME_LABEL = r'^\s*\{(?:[^"]*"(?:[^"\\]|\\.)*")*?[^"]*\b__name__\s*=\s*"([^"]+)"'
"""``promtool tsdb dump`` writes the name as a label."""
_SERIES = r"^(.*\}|\s*[a-zA-Z_:][a-zA-Z0-9_:.]*\s)"
_TAIL = r"(?:\}|^)([^{}]*)$"
_VALUE_AND_TIME = r"^\s*([^\s#]+)(?:\s+([^\s#]+))?\s*$"
_EXEMPLAR = r'^((?:\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\})?\s*[^\s{}#]+(?:\s+[^\s{}#]+)?)\s+# \{.*$'
_HEAD = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:.]*)\s*\{(.*)\}")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,|$)', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_LONG_AGO_MS = 946_684_800_000
"""The year 2000. At the end of a file with later times, an earlier time is truncated."""
_LATEST_MS = 4e12
NUMBERS = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:inf|infinity)|nan", re.IGNORECASE)
_ANY_SAMPLE = re.compile(r"\s*[a-zA-Z0-9_:.]*\s*(?:\{.*\})?\s*([^\s{}#]+)(?:\s+[^\s{}#]+)?(?:\s+#.*)?\s*")
_SHOWN = 60


def parse_labels(text: str) -> dict[str, str]:
    r"""Parse the labels in ``a="b",c="d"``; ``\\``, ``\"`` and ``\n`` are escapes.

    Raises ``ValueError``.
    """
    labels: dict[str, str] = {}
    position = 0
    while text[position:].strip():
        match = _LABEL.match(text, position)
        if match is None:
            raise ValueError(f"labels cannot be read from {text[position : position + _SHOWN]!r}")
        labels[match.group(1)] = _ESCAPE.sub(_unescaped, match.group(2))
        position = match.end()
        if match.group(3) != "," and text[position:].strip():
            raise ValueError(f"labels cannot be read from {text[position : position + _SHOWN]!r}")
    return labels


def _unescaped(match: re.Match[str]) -> str:
    return {"n": "\n", "\\": "\\", '"': '"'}.get(match.group(1), match.group(0))


@dataclass(slots=True)
class _State:
    """State carried from block to block."""

    percent: set[str]
    """Metrics in percent or ratio that had a value above 1."""
    has_eof: bool = False
    """Whether the last line was ``# EOF``."""
    eofs: int = 0
    recent: bool = False
    """Whether a sample had a time after 2000."""


@dataclass(frozen=True, slots=True)
class _Head:
    """The beginning of samples: the name and the labels."""

    name: str
    alias: Alias | None
    series: int
    jobless_series: int
    """The number of the series of the GPU without a job."""

    def row(self) -> tuple[str, bool, int, int, int, float]:
        """Return the values of ``_Heads.columns``."""
        if self.alias is None:
            return self.name, False, 0, 0, 0, 1.0
        factor = math.nan if self.alias.unit == "percent_or_ratio" else self.alias.factor
        return self.name, True, self.series, self.jobless_series, code_of(self.alias), factor


class _Heads:
    """The beginnings of samples that a file has had so far."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self.ratios: list[int] = []
        """The places of metrics in percent or ratio."""
        self.columns = pl.DataFrame(
            schema={
                "name": pl.String(), "known": pl.Boolean(), "series": pl.UInt32(), "ended": pl.UInt32(),
                "code": pl.UInt16(), "factor": pl.Float64(),
            }
        )  # fmt: skip
        """The fields of ``_Head``; ``factor``: NaN for a metric in percent or ratio."""

    def __len__(self) -> int:
        return len(self.columns)

    def add(self, texts: Sequence[str], head_of: Callable[[str], _Head | None]) -> None:
        """Add those of ``texts`` that are new; ``head_of`` returns None for an unusual or unusable one."""
        added: list[_Head] = []
        for text in texts:
            if text not in self._numbers:
                head = head_of(text)
                self._numbers[text] = _NO_HEAD if head is None else len(self.columns) + len(added)
                added += [] if head is None else [head]
        if added:
            rows = pl.DataFrame([head.row() for head in added], schema=self.columns.schema, orient="row")
            self.columns = pl.concat([self.columns, rows])
            self.ratios = self.columns["factor"].is_nan().arg_true().to_list()

    def places(self, texts: Sequence[str]) -> list[int]:
        """Return the places of ``texts`` in ``columns``; ``_NO_HEAD`` for those that are unusual or unusable."""
        return list(map(self._numbers.__getitem__, texts))


_NO_HEAD = -1


class ScrapeCounter:
    """Number the scrapes of a file from 0. One begins where the first comment, else the first series, repeats."""

    def __init__(self) -> None:
        self.count = 0
        """Scrapes so far."""
        self._begins: str | None = None
        """The beginning of a scrape: a comment, or a series without its value."""

    def of(self, frame: pl.DataFrame) -> pl.Series:
        """Return the column ``scrape`` for consecutive lines (``line``, and ``name``: null for no sample)."""
        if self._begins is None:
            comments = frame.filter(pl.col("line").str.contains(r"^#\s*(?:HELP|TYPE)\s"))["line"]
            series = frame.filter(pl.col("name").is_not_null())["line"].str.extract(_SERIES, 1).drop_nulls()
            self._begins = next(iter((*comments.head(1), *series.head(1))), None)
        begins = self._begins
        if begins is None:
            return pl.zeros(len(frame), pl.Int64, eager=True).alias("scrape")
        starts = (frame["line"] == begins) if begins.startswith("#") else frame["line"].str.starts_with(begins)
        numbers = starts.cast(pl.Int64).cum_sum() + self.count
        self.count = int(numbers[-1]) if len(numbers) else self.count
        return (numbers - 1).clip(0).alias("scrape")


def with_times(frame: pl.DataFrame, scrapes: ScrapeCounter, options: ReadOptions, where: str) -> pl.DataFrame:
    """Add the column ``time``: that of the sample (``ms``), or else of its scrape by the options of the user.

    Raises ``InputError`` if neither is known. ``where``: name of the file.
    """
    if not frame["ms"].has_nulls():
        return frame.with_columns(pl.col("ms").cast(TIME).alias("time"))
    start, interval = options.start, options.interval_s
    if start is None:
        raise InputError(
            "the sample has no timestamp",
            where=f"{where}:{frame.filter(pl.col('ms').is_null())['number'][0]}",
            hint="give --start TIME of the first scrape, and --interval where the file has several",
        )
    if scrapes.count > 1 and interval is None:
        raise InputError(
            f"has {scrapes.count} scrapes without timestamps",
            where=where,
            hint="give --interval, the time between two scrapes, e.g. 30s",
        )
    assumed = pl.lit(round(start.timestamp() * 1000)) + (pl.col("scrape") * round((interval or 0) * 1000))
    return frame.with_columns(pl.col("ms").fill_null(assumed).cast(TIME).alias("time"))


class ExpositionReader:
    """Read one file of exposition text."""

    _kept_columns: tuple[str, ...] = ()
    """Further columns of the lines that the entries keep."""

    def __init__(
        self, notes: ReadingNotes, options: ReadOptions, fallback_node: str | None, *, openmetrics: bool = False
    ) -> None:
        """``openmetrics``: the file must end in ``# EOF``; otherwise only if it contains one."""
        self._strict_end = openmetrics
        self._notes = notes
        self._options = options
        self._identifier = Identifier(options, fallback_node)
        self._long = LongForm()
        self._series: dict[str, tuple[int, int] | str] = {}
        self._heads = _Heads()
        self._unknown_names: list[tuple[int, str, int]] = []
        """Metrics without an alias: the first line, the name, the number of samples."""
        self._state = _State(percent=set())
        self._scrapes = ScrapeCounter()

    def read(self, blocks: Iterator[LineBlock]) -> Iterator[pl.DataFrame]:
        """Yield samples. Raises ``InputError`` for a truncated file or one without times."""
        for block in blocks:
            yield from self._long.add(self._entries(block))
        if (self._state.eofs or self._strict_end) and not self._state.has_eof:
            raise InputError(
                "is cut off: the last scrape does not end in '# EOF'",
                where=self._notes.name,
                hint="copy the file again; nothing of it was ingested",
            )
        yield from self._long.rest()

    def _entries(self, block: LineBlock) -> pl.DataFrame:
        if self._options.start is not None:  # scrapes are counted by all of their lines
            self._ends(block.lines, None)
            entries = self._odd_entries(block.lines, block)
        else:
            quick, unknown, odd = self._quick_lines(block)
            self._ends(odd, max((frame["number"][-1] for frame in (quick, unknown) if len(frame)), default=None))
            self._count_unknown(unknown)
            self._count_percent(quick)
            entries = pl.concat([self._odd_entries(odd, block), self._quick_entries(quick)])
            self._state.recent = self._state.recent or bool((quick["ms"] > _LONG_AGO_MS).any())
        self._note_unknown()
        return entries

    def _quick_lines(self, block: LineBlock) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
        """Return the lines that are sound samples of a known metric with labels, those of other metrics, and the rest.

        Most lines are ``NAME{LABELS} VALUE TIME``. Everything up to the last brace occurs in each scrape, and is parsed
        once. The first frame has ``number``, ``head``, ``value`` and ``ms``, the second one ``number`` and ``name``.
        """
        starts, ends = block.bounds
        braces = positions(block.text, b"}")
        count = np.searchsorted(braces, ends)
        lines_with_labels = np.flatnonzero(count)
        last = braces[count[lines_with_labels] - 1] + 1
        usual = (last > starts[lines_with_labels]) & (lines_with_labels + block.first != block.open_line)
        lines_with_labels, last = lines_with_labels[usual], last[usual]
        heads, tails = pieces(block.text, (starts[lines_with_labels], last), (last, ends[lines_with_labels]))
        texts, place = distinct(heads.alias("head").to_frame())
        self._heads.add(texts["head"].to_list(), self._head)
        numbers = pl.Series("head", self._heads.places(texts["head"].to_list()), pl.Int32).gather(place)
        raw, stamp = tails.str.strip_chars_start(" ").str.splitn(" ", 2).struct.unnest().get_columns()
        value = raw.cast(pl.Float64, strict=False)
        ms = epoch_ms(stamp.cast(pl.Float64, strict=False))
        lines = pl.DataFrame({"number": lines_with_labels + block.first, "head": numbers, "value": value, "ms": ms})
        sound = lines.select(
            pl.col("value").is_not_null() & pl.col("ms").is_between(0, _LATEST_MS) & (pl.col("head") != _NO_HEAD)
        ).to_series().fill_null(value=False)  # fmt: skip
        has_head = self._heads.columns["known"].gather(lines["head"].clip(0)) if len(self._heads) else sound
        quick = lines.filter(sound & has_head)
        slow_lines = lines.filter(sound & ~has_head & value.is_finite().fill_null(value=False))
        unknown = slow_lines.select("number", self._heads.columns["name"].gather(slow_lines["head"]))
        odd_lines = self._odd_lines(block, quick, unknown)
        # A metric is unknown, or its lines are no samples, by the first of them.
        if len(unknown):
            doubtful = unknown["name"].is_in(_names(odd_lines)["name"].drop_nulls().unique().implode())
            if doubtful.any():
                unknown = unknown.filter(~doubtful)
                odd_lines = self._odd_lines(block, quick, unknown)
        return quick, unknown, odd_lines

    def _odd_lines(self, block: LineBlock, *frames: pl.DataFrame) -> pl.DataFrame:
        irregular = np.ones(len(block.bounds[0]), np.bool_)
        for frame in frames:
            irregular[frame["number"].to_numpy() - block.first] = False
        return block.some(np.flatnonzero(irregular))

    def _head(self, text: str) -> _Head | None:
        match = _HEAD.fullmatch(text)
        if match is None or "# {" in text:
            return None
        name, labels = match.groups()
        alias = self._options.aliases.metric(name)
        if alias is None:
            return _Head(name, None, 0, 0)
        if labels not in self._series:
            self._series[labels] = self._number(labels)
        series = self._series[labels]
        return None if isinstance(series, str) else _Head(name, alias, *series)

    def _count_unknown(self, unknown: pl.DataFrame) -> None:
        """Count the samples of unknown metrics (``number``, ``name``)."""
        counts = unknown.group_by("name", maintain_order=True).agg(pl.col("number").first(), pl.len())
        self._unknown_names += [(number, name, count) for name, number, count in counts.iter_rows()]

    def _note_unknown(self) -> None:
        for _, name, count in sorted(self._unknown_names):
            self._notes.unknown[name] += count
        self._unknown_names = []

    def _count_percent(self, quick: pl.DataFrame) -> None:
        """Note the metrics in percent or ratio the values of which show that they are in percent."""
        if self._heads.ratios:
            values = quick.filter(pl.col("head").is_in(self._heads.ratios))
            shown = values.filter(percent_values(pl.col("value")))["head"].unique()
            self._state.percent.update(self._heads.columns["name"].gather(shown))

    def _quick_entries(self, quick: pl.DataFrame) -> pl.DataFrame:
        head_rows, value, heads = quick["head"], measured(quick["value"]), self._heads.columns
        factors = heads["factor"]
        if self._heads.ratios:
            percent = heads["name"].is_in(list(self._state.percent))
            ratio = percent.replace_strict([True, False], [1.0, 100.0], return_dtype=pl.Float64)
            factors = ratio.zip_with(factors.is_nan(), factors)
        if (factors != 1.0).any():
            value *= factors.gather(head_rows)
        series = heads["series"].gather(head_rows)
        ended = quick["value"].is_nan()
        if ended.any():
            series = heads["ended"].gather(head_rows).zip_with(ended, series)
        columns = [
            series.alias("series"), heads["code"].gather(head_rows), value.alias("value"),
            quick["ms"].cast(TIME).alias("time"),
        ]  # fmt: skip
        return pl.DataFrame([*(quick[name] for name in self._kept_columns), *columns])

    def _odd_entries(self, lines: pl.DataFrame, block: LineBlock) -> pl.DataFrame:
        frame = _names(lines)
        frame = self._scraped(frame)
        invalid = frame.filter(pl.col("name").is_null() & ~pl.col("line").str.contains(r"^\s*(?:#|$)"))
        self._reject(invalid, block, "is not a sample: a metric name is needed at its start")
        return self._known_metrics(frame.filter(pl.col("name").is_not_null()), block)

    def _ends(self, lines: pl.DataFrame, last_sample: int | None) -> None:
        """Note whether the last line of a block is ``# EOF``; ``last_sample``: the last line besides ``lines``."""
        eof = lines["line"].str.contains(r"^#\s*EOF\s*$")
        self._state.eofs += int(eof.sum())
        content = lines["line"].str.strip_chars() != ""
        number = lines["number"].filter(content)
        if len(number) and number[-1] > (last_sample or 0):
            self._state.has_eof = bool(eof.filter(content)[-1])
        elif last_sample is not None:
            self._state.has_eof = False

    def _scraped(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Add the number of the scrape."""
        if self._options.start is None:
            return frame.with_columns(pl.lit(0).alias("scrape"))
        return frame.with_columns(self._scrapes.of(frame))

    def _known_metrics(self, frame: pl.DataFrame, block: LineBlock) -> pl.DataFrame:
        """Return the entries of lines with a metric of the alias table."""
        aliases = self._aliases(frame, block)
        if not aliases:
            return pl.DataFrame(schema={**{name: frame.schema[name] for name in self._kept_columns}, **ENTRIES})
        values = frame.filter(pl.col("name").is_in(list(aliases)))
        values = split_samples(values)
        self._reject(values.filter(pl.col("raw").is_null()), block, "cannot be read as labels, value and time")
        values = values.filter(pl.col("raw").is_not_null())
        values = self._timed(self._numbered(values, block), block)
        values = self._identified(values, block)
        return self._scaled(values, aliases)

    def _aliases(self, frame: pl.DataFrame, block: LineBlock) -> dict[str, Alias]:
        """Return the metrics of the alias table, and note the other ones."""
        names = frame.group_by("name", maintain_order=True).agg(
            pl.len(), pl.col("line").first(), pl.col("number").first()
        )  # fmt: skip
        aliases = {}
        for name, count, line, number in names.iter_rows():
            alias = self._options.aliases.metric(name)
            if alias is not None:
                aliases[name] = alias
            elif is_sample(line):
                self._unknown_names.append((number, name, count))
            else:
                self._reject(frame.filter(pl.col("name") == name), block, "cannot be read as labels, value and time")
        return aliases

    def _numbered(self, values: pl.DataFrame, block: LineBlock) -> pl.DataFrame:
        value = pl.col("raw").cast(pl.Float64, strict=False)
        values = values.with_columns(value.alias("value"))
        unread = values.filter(pl.col("value").is_null())
        invalid = [raw for raw in unread["raw"].unique() if not NUMBERS.fullmatch(raw) and raw.upper() != "N/A"]
        if invalid:
            bad = pl.col("value").is_null() & pl.col("raw").is_in(invalid)
            self._reject(values.filter(bad), block, "has a value that is not a number")
            values = values.filter(~bad)
        return values

    def _timed(self, values: pl.DataFrame, block: LineBlock) -> pl.DataFrame:
        last = block.open_line or 0
        values = values.with_columns(to_epoch_ms(pl.col("stamp").cast(pl.Float64, strict=False)).alias("ms"))
        bad = pl.col("stamp").is_not_null() & (pl.col("ms").is_null() | ~pl.col("ms").is_between(0, _LATEST_MS))
        self._reject(values.filter(bad), block, "has an invalid timestamp")
        values = values.filter(~bad)
        early = (pl.col("ms") < _LONG_AGO_MS) & (pl.col("number") == last) & pl.lit(self._state.recent)
        self._reject(values.filter(early), block, "has a timestamp that is cut off")
        self._state.recent = self._state.recent or bool((values["ms"] > _LONG_AGO_MS).any())
        return with_times(values, self._scrapes, self._options, self._notes.name)

    def _identified(self, values: pl.DataFrame, block: LineBlock) -> pl.DataFrame:
        texts = values["labels"].fill_null("").unique(maintain_order=True)
        for text in texts:
            if text not in self._series:
                self._series[text] = self._number(text)
        entries = [(text, self._series[text]) for text in texts]
        good = [(text, *what) for text, what in entries if not isinstance(what, str)]
        reasons = {text: what for text, what in entries if isinstance(what, str)}
        values = values.with_columns(pl.col("labels").fill_null(""))
        if reasons:
            rejected = values.filter(pl.col("labels").is_in(list(reasons)))
            for (text,), lines in rejected.group_by("labels", maintain_order=True):
                self._reject(lines, block, reasons[str(text)])
        numbers = pl.DataFrame(
            good, schema={"labels": pl.String(), "series": pl.UInt32(), "ended": pl.UInt32()}, orient="row"
        )
        # Prometheus stores NaN where a series ends: a sample without a value, and the job may have ended, too.
        ended = pl.col("value").is_nan().fill_null(value=False)
        return values.join(numbers, on="labels", how="inner", maintain_order="left").with_columns(
            pl.when(ended).then("ended").otherwise("series").alias("series")
        )

    def _number(self, text: str) -> tuple[int, int] | str:
        """Return the numbers of the series and of the series of its GPU without a job; or the reason for none."""
        try:
            labels = parse_labels(text)
        except ValueError as error:
            return str(error)
        identity = self._identifier.from_labels(labels)
        if isinstance(identity, str):
            return identity
        return self._long.series(identity, self._identifier.job_of(labels)), self._long.series(identity, None)

    def _scaled(self, values: pl.DataFrame, aliases: Mapping[str, Alias]) -> pl.DataFrame:
        factor = self._factor(values, aliases)
        values = values.with_columns(measured(values["value"]))
        value = pl.col("value") if factor is None else pl.col("value") * factor
        codes = [code_of(alias) for alias in aliases.values()]
        code = pl.col("name").replace_strict(list(aliases), codes, return_dtype=pl.UInt16)
        return values.select(*self._kept_columns, "series", code.alias("code"), value.alias("value"), "time")

    def _factor(self, values: pl.DataFrame, aliases: Mapping[str, Alias]) -> pl.Expr | None:
        """Return the factor of the values; None: all are in the unit of the schema."""
        factors = {}
        for name, alias in aliases.items():
            factors[name] = alias.factor
            if alias.unit == "percent_or_ratio":
                if shows_percent(values.filter(pl.col("name") == name)["value"]):
                    self._state.percent.add(name)
                factors[name] = 1.0 if name in self._state.percent else 100.0
        if all(factor == 1.0 for factor in factors.values()):
            return None
        return pl.col("name").replace_strict(list(factors), list(factors.values()), return_dtype=pl.Float64)

    def _reject(self, lines: pl.DataFrame, block: LineBlock, reason: str) -> None:
        for number, line in lines.select("number", "line").head(1000).iter_rows():
            block.cut_off(number, self._notes.name)
            self._notes.problem(number, f"{reason}: {shortened(line)}", strict=self._options.strict)
        self._notes.problem_count += max(0, len(lines) - 1000)


def _names(lines: pl.DataFrame) -> pl.DataFrame:
    """Add the column ``name``, the metric, to lines; null for a line that is no sample."""
    frame = lines.with_columns(pl.col("line").str.extract(NAME, 1).alias("name"))
    if frame.select((pl.col("name").is_null() & pl.col("line").str.contains(r"^\s*\{")).any()).item():
        return frame.with_columns(pl.col("name").fill_null(pl.col("line").str.extract(NAME_LABEL, 1)))
    return frame


@dataclass(frozen=True, slots=True)
class FileSamples:
    """The samples of one of several files."""

    frame: pl.DataFrame
    """``SAMPLES``."""
    unknown: Counter[str]
    """Metric names without an alias."""


class SmallFilesReader(ExpositionReader):
    """Read several small files of exposition text together: each alone takes as long as a thousand lines.

    Files with anything to report, or with samples without a time, are left to ``ExpositionReader``.
    """

    _kept_columns = ("file",)

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(ReadingNotes(""), replace(options, start=None), options.node)
        self._left_out: set[int] = set()
        self._files: NDArray[np.uint32] = np.empty(0, np.uint32)
        """The file of each line."""
        self._unknown: dict[int, Counter[str]] = {}

    def read_together(self, texts: Sequence[str]) -> dict[int, FileSamples]:
        """Return the samples by position in ``texts``, each of which ends with a line; others are to be read alone."""
        self._files = np.repeat(np.arange(len(texts), dtype=np.uint32), [text.count("\n") for text in texts])
        entries = self._entries(LineBlock("".join(texts).encode()))
        if entries.is_empty():
            return {}
        is_job = entries["code"] >= JOB_CODE
        self._left_out |= set(entries["file"].filter(is_job)) - set(entries["file"].filter(~is_job))
        samples = self._long.samples(entries)
        counts = samples.group_by("file", maintain_order=True).len()
        starts = counts["len"].cum_sum() - counts["len"]
        return {
            file: FileSamples(samples[start : start + count].drop("file"), self._unknown.get(file, Counter()))
            for file, start, count in zip(counts["file"], starts, counts["len"], strict=True)
            if file not in self._left_out
        }

    def _aliases(self, frame: pl.DataFrame, block: LineBlock) -> dict[str, Alias]:
        alias_by_name = {}
        names = frame.group_by("file", "name", maintain_order=True).agg(
            pl.len(), pl.col("line").first(), pl.col("number").first()
        )  # fmt: skip
        aliases = {name: self._options.aliases.metric(name) for name in names["name"].unique(maintain_order=True)}
        for file, name, count, line, number in names.iter_rows():
            if (alias := aliases[name]) is not None:
                alias_by_name[name] = alias
            elif is_sample(line):
                self._unknown_names.append((number, name, count))
            else:
                self._left_out.add(file)
        return alias_by_name

    def _quick_lines(self, block: LineBlock) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
        quick, unknown, odd = super()._quick_lines(block)
        return self._with_file(quick), self._with_file(unknown), self._with_file(odd)

    def _with_file(self, lines: pl.DataFrame) -> pl.DataFrame:
        return lines.with_columns(pl.Series("file", self._files[lines["number"].to_numpy() - 1]))

    def _head(self, text: str) -> _Head | None:
        head = super()._head(text)
        # Whether values are in percent is decided by file.
        return None if head is None or (head.alias and head.alias.unit == "percent_or_ratio") else head

    def _count_unknown(self, unknown: pl.DataFrame) -> None:
        counts = unknown.group_by("file", "name").agg(pl.len(), pl.col("number").first())
        self._unknown_names += [(number, name, count) for _, name, count, number in counts.iter_rows()]

    def _note_unknown(self) -> None:
        for number, name, count in sorted(self._unknown_names):
            self._unknown.setdefault(int(self._files[number - 1]), Counter())[name] += count
        self._unknown_names = []

    def _timed(self, values: pl.DataFrame, block: LineBlock) -> pl.DataFrame:
        without = values["stamp"].is_null()
        if without.any():
            self._left_out.update(values["file"].filter(without))
            values = values.filter(~without)
        return super()._timed(values, block)

    def _factor(self, values: pl.DataFrame, aliases: Mapping[str, Alias]) -> pl.Expr | None:
        factors = {name: alias.factor for name, alias in aliases.items()}
        factor = pl.col("name").replace_strict(list(factors), list(factors.values()), return_dtype=pl.Float64)
        ratios = [name for name, alias in aliases.items() if alias.unit == "percent_or_ratio"]
        if ratios:
            shown = percent_values(pl.col("value")).any().over("file", "name")
            ratio = pl.when(shown).then(1.0).otherwise(100.0)
            factor = pl.when(pl.col("name").is_in(ratios)).then(ratio).otherwise(factor)
        return factor

    def _reject(self, lines: pl.DataFrame, block: LineBlock, reason: str) -> None:
        self._left_out.update(lines["file"])


def is_sample(line: str) -> bool:
    """Return whether a line that begins with a word can be a sample of an unknown metric."""
    match = _ANY_SAMPLE.fullmatch(line)
    return match is not None and (NUMBERS.fullmatch(match[1]) is not None or match[1].upper() == "N/A")


def split_samples(values: pl.DataFrame) -> pl.DataFrame:
    """Add ``labels`` (without braces), ``raw`` (the value) and ``stamp``; ``raw`` is null if a line is no sample.

    One regular expression for the whole line would be ten times slower, because it has to search for the closing brace.
    """
    values = values.with_columns(pl.col("line").str.replace(NAME, "").alias("body"))
    exemplars = values["body"].str.contains("# {", literal=True)
    if exemplars.any():
        cut = values["body"].str.replace(_EXEMPLAR, "$1")
        values = values.with_columns(cut.zip_with(exemplars, values["body"]).alias("body"))
    values = values.with_columns(pl.col("body").str.extract(_TAIL, 1).alias("tail"))
    length = pl.col("body").str.len_bytes() - pl.col("tail").str.len_bytes()
    values = values.with_columns(
        pl.col("body").cast(pl.Binary).bin.slice(0, length).cast(pl.String).alias("labels"),
        pl.col("tail").str.extract_groups(_VALUE_AND_TIME).struct.rename_fields(["raw", "stamp"]).alias("parts"),
    ).unnest("parts")
    labels = pl.col("labels")
    whole = (labels == "") | (labels.str.starts_with("{") & labels.str.ends_with("}"))
    return values.with_columns(
        pl.when(whole).then(pl.col("raw")).alias("raw"),
        labels.str.strip_prefix("{").str.strip_suffix("}").alias("labels"),
    ).drop("body", "tail")


def shortened(line: str) -> str:
    clean = line.strip()
    return clean if len(clean) <= _SHOWN else clean[:_SHOWN] + "..."
