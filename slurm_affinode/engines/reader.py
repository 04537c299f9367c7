"""Files with metrics of engines: exposition text, OpenMetrics, recordings of scrapes, responses of Prometheus, Parquet.

A recording is exposition text with a timestamp in each line, and a comment before each scrape: ``# scrape MS took
0.012s`` or ``# scrape MS failed after 0.000s: WHY``. In a file that is cut off, everything before the cut is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pyarrow as pa

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.text import one_line
from slurm_affinode.engines.samples import ENTRIES, SCRAPES, SampleBuilder, SeriesIdentifier
from slurm_affinode.engines.schema import SAMPLES
from slurm_affinode.metrics.readers import inputs, parquet_batches, prometheus_json
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions
from slurm_affinode.metrics.readers.exposition import (
    NAME,
    NAME_LABEL,
    NUMBERS,
    ScrapeCounter,
    is_sample,
    parse_labels,
    shortened,
    split_samples,
    with_times,
)
from slurm_affinode.metrics.readers.lines import LineBlock, blocks, compression_of, head, reading
from slurm_affinode.metrics.readers.local_time import to_epoch_ms
from slurm_affinode.metrics.schema import TIME

READER_VERSION = 2
"""Part of the fingerprints; incremented when the reader returns different samples for the same file."""
FORMATS = ("prometheus", "openmetrics", "prometheus-json", "parquet")
CHUNK = 4 * 2**20
ROWS_AT_ONCE = 100_000
_SCRAPE = r"^#\s*scrape\s+(\d{1,15})\s+(took|failed after)\s+([0-9.]{1,20})s(?::\s*(.*))?$"
_LONGEST_REASON = 200
_SET_BACK = "scrapes are earlier than the one before: the clock was set back"


def address_of(path: Path) -> str:
    """Return the address of an endpoint that a file does not name: its name without extensions."""
    name = path.name
    for suffix in (".gz", ".zst", ".bz2", ".xz", ".prom", ".txt", ".om", ".json", ".log", ".metrics"):
        name = name.removesuffix(suffix)
    return name or path.name


def read_file(
    path: Path,
    options: ReadOptions,
    notes: ReadingNotes,
    *,
    format: str | None = None,
    address: str | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[str, Iterator[pl.DataFrame]]:
    """Return the format of a file and its samples (frames of ``SAMPLES``). Raises ``InputError``, also between frames.

    ``address`` is that of series without one [default: the name of the file]. ``advance`` is called with numbers of
    bytes read, for text files without compression.
    """
    kind = format or _detect(path, notes.name, options)
    if kind not in FORMATS:
        raise InputError(f"is {kind}, which has no metrics of engines", where=notes.name, hint=f"{', '.join(FORMATS)}")
    if kind == "parquet":
        return kind, _parquet(path, notes)
    builder = SampleBuilder(notes, SeriesIdentifier(options, address or address_of(path)))
    if kind == "prometheus-json":
        return kind, _responses(path, notes, options, builder)

    def reject(line: int, why: str, _: bytes) -> None:
        notes.problem(line, why, strict=options.strict)

    report = advance if compression_of(path) is None else lambda count: None
    lines = blocks(path, notes.name, chunk=CHUNK, advance=report, reject=reject)
    return kind, EngineReader(notes, options, builder, openmetrics=kind == "openmetrics").read(lines)


def _detect(path: Path, name: str, options: ReadOptions) -> str:
    if re.match(_SCRAPE, head(path).split(b"\n", 1)[0].decode("utf-8", "replace").rstrip("\r")):
        return "prometheus"
    return inputs.detect(path, name, options.aliases)


def fingerprint(path: Path, name: str, options: ReadOptions, format: str | None, address: str | None) -> str:
    """Return a digest of the file's content and of everything that determines how it is read."""
    labels = [sorted(options.aliases.labels[field]) for field in ("cluster", "node", "job")]
    digest_parts = (READER_VERSION, format, options.cluster, options.default_cluster, options.node, options.start,
           options.interval_s, labels, address or address_of(path))  # fmt: skip
    return inputs.digest(path, name, digest_parts)


class EngineReader:
    """Read one file of exposition text."""

    def __init__(
        self, notes: ReadingNotes, options: ReadOptions, builder: SampleBuilder, *, openmetrics: bool = False
    ) -> None:
        self._notes = notes
        self._options = options
        self._builder = builder
        self._openmetrics = openmetrics
        self._scrapes = ScrapeCounter()
        self._scraped_ms: int | None = None
        """Time of the last scrape of a recording."""
        self._has_end = False
        self._outcomes: dict[tuple[str, str], list[int] | str] = {}
        self._last_times: pl.DataFrame | None = None
        """Series and time of its last sample."""

    def read(self, lines: Iterator[LineBlock]) -> Iterator[pl.DataFrame]:
        """Yield samples. Raises ``InputError`` for a file without times, or one that cannot be read at all."""
        line = 0
        try:
            for block in lines:
                entries, scrapes = self._block(block)
                yield from self._builder.add(entries, scrapes)
                line = int(block.lines["number"][-1])
        except InputError as error:
            if self._options.strict or not line or error.hint != _DAMAGED:
                raise
            what = str(error).removeprefix(f"{error.where}: ")
            self._notes.problem(line, f"{what}: the lines before are read", strict=False)
        if self._openmetrics and not self._has_end:
            self._notes.problem(
                line or None, "is cut off: it does not end in '# EOF'; the lines before are read",
                strict=self._options.strict,
            )  # fmt: skip
        yield from self._builder.rest()

    def _block(self, block: LineBlock) -> tuple[pl.DataFrame, pl.DataFrame]:
        frame = block.lines.select("line", "number")
        content = frame.filter(pl.col("line").str.strip_chars() != "")
        if len(content):
            self._has_end = content["line"].tail(1).str.contains(r"^#\s*EOF\s*$").item()
        frame = self._without_cut_line(frame, block)
        frame = frame.with_columns(pl.col("line").str.extract(NAME, 1).alias("name"))
        frame = frame.with_columns(
            pl.when(pl.col("name").is_null() & pl.col("line").str.starts_with("{"))
            .then(pl.col("line").str.extract(NAME_LABEL, 1))
            .otherwise("name")
            .alias("name")
        )
        frame, scrapes = self._with_scrape(frame)
        if self._options.start is not None:
            frame = frame.with_columns(self._scrapes.of(frame))
        invalid = frame.filter(pl.col("name").is_null() & ~pl.col("line").str.contains(r"^\s*(?:#|$)"))
        self._reject(invalid, "is not a sample: a metric name is needed at its start")
        entries = self._entries(frame.filter(pl.col("name").is_not_null()))
        if self._scraped_ms is None and len(entries):
            self._note_order(entries)
        return entries, scrapes

    def _note_order(self, entries: pl.DataFrame) -> None:
        """Note times that are earlier than the one before in their series; text may be sorted by series."""
        rows = entries.select("series", "time")
        rows = rows if self._last_times is None else pl.concat([self._last_times, rows])
        back = (pl.col("time").diff() < pl.duration()).sum().alias("back")
        series = rows.group_by("series").agg(back, pl.col("time").last())
        self._notes.decide(_SET_BACK, int(series["back"].max()))  # type: ignore[arg-type]
        self._last_times = series.select("series", "time")

    def _without_cut_line(self, frame: pl.DataFrame, block: LineBlock) -> pl.DataFrame:
        """Drop the last line of the file if it has no line end: its value may be cut off."""
        if block.open_line is None or frame.is_empty() or not frame["line"][-1].strip():
            return frame
        if not frame["line"][-1].startswith("#"):
            self._reject(frame.tail(1), "is cut off in its last line; the lines before are read")
        elif frame["line"].tail(1).str.contains(r"^#\s*EOF\s*$").item():
            return frame
        return frame.head(-1)

    def _with_scrape(self, frame: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Add ``scraped``, the time in ms of the recorded scrape that a line belongs to; return the scrapes, too."""
        parts = frame["line"].str.extract_groups(_SCRAPE).struct.unnest()
        scraped, outcome, took, why = parts.columns
        frame = frame.with_columns(parts[scraped].cast(pl.Int64).alias("scraped"))
        durations = parts.filter(pl.col(scraped).is_not_null())
        if len(durations):
            times = durations[scraped].cast(pl.Int64)
            before = times if self._scraped_ms is None else pl.concat([pl.Series([self._scraped_ms]), times])
            self._notes.decide(_SET_BACK, int((before.diff() < 0).sum()))
        carried = pl.coalesce(pl.col("scraped").forward_fill(), pl.lit(self._scraped_ms, pl.Int64))
        frame = frame.with_columns(carried.alias("scraped"))
        if len(durations):
            self._scraped_ms = int(durations[scraped].cast(pl.Int64)[-1])
        reason = pl.coalesce(pl.col(why), pl.lit("the scrape failed")).str.slice(0, _LONGEST_REASON)
        scrapes = durations.select(
            pl.col(scraped).cast(pl.Int64).cast(TIME).alias("time"),
            pl.col(took).cast(pl.Float64, strict=False).alias("scrape_s"),
            pl.when(pl.col(outcome) == "failed after").then(reason).alias("error"),
        )
        return frame, scrapes.cast(SCRAPES)  # type: ignore[arg-type]

    def _entries(self, frame: pl.DataFrame) -> pl.DataFrame:
        names = frame.group_by("name", maintain_order=True).agg(pl.len(), pl.col("line").first())
        selected = []
        for name, count, line in names.iter_rows():
            if self._builder.knows(name):
                selected.append(name)
            elif is_sample(line):
                self._notes.unknown[name] += count
            else:
                self._reject(frame.filter(pl.col("name") == name), "cannot be read as labels, value and time")
        if not selected:
            return pl.DataFrame(schema=ENTRIES)
        values = split_samples(frame.filter(pl.col("name").is_in(selected)))
        bad = values["raw"].is_null()
        self._reject(values.filter(bad), "cannot be read as labels, value and time")
        values = values.filter(~bad).with_columns(pl.col("raw").cast(pl.Float64, strict=False).alias("value"))
        unread = values.filter(pl.col("value").is_null())
        invalid = [raw for raw in unread["raw"].unique() if not NUMBERS.fullmatch(raw)]
        wrong = pl.col("value").is_null() & pl.col("raw").is_in(invalid)
        self._reject(values.filter(wrong), "has a value that is not a number")
        return self._numbered(self._timed(values.filter(~wrong)))

    def _timed(self, rows: pl.DataFrame) -> pl.DataFrame:
        rows = rows.with_columns(to_epoch_ms(pl.col("stamp").cast(pl.Float64, strict=False)).alias("ms"))
        bad = pl.col("stamp").is_not_null() & (pl.col("ms").is_null() | ~pl.col("ms").is_between(0, 4e12))
        self._reject(rows.filter(bad), "has an invalid timestamp")
        rows = rows.filter(~bad).with_columns(pl.coalesce("ms", "scraped").alias("ms"))
        return with_times(rows, self._scrapes, self._options, self._notes.name)

    def _numbered(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Replace names and labels by the numbers of series; drop series that cannot be used."""
        rows = rows.with_columns(pl.col("labels").fill_null(""))
        distinct = rows.select("name", "labels").unique(maintain_order=True)
        numbers: list[tuple[str, str, int]] = []
        rejected: list[tuple[str, str, str]] = []
        for key in distinct.iter_rows():
            if key not in self._outcomes:
                self._outcomes[key] = self._series(*key)
            outcome = self._outcomes[key]
            if isinstance(outcome, str):
                rejected.append((*key, outcome))
            else:
                numbers += [(*key, series_number) for series_number in outcome]
        if rejected:
            why = pl.DataFrame(rejected, schema=["name", "labels", "why"], orient="row")
            lines = rows.join(why, on=["name", "labels"], maintain_order="left")
            for (reason,), group in lines.group_by("why", maintain_order=True):
                self._reject(group, str(reason))
        table = pl.DataFrame(
            numbers, schema={"name": pl.String(), "labels": pl.String(), "series": pl.UInt32()}, orient="row"
        )
        return rows.join(table, on=["name", "labels"], how="inner", maintain_order="left").select(*ENTRIES)

    def _series(self, name: str, text: str) -> list[int] | str:
        try:
            labels = parse_labels(text)
        except ValueError as error:
            return str(error)
        labels.pop("__name__", None)
        return self._builder.series(name, labels)

    def _reject(self, lines: pl.DataFrame, reason: str) -> None:
        for number, line in lines.select("number", "line").head(1000).iter_rows():
            self._notes.problem(number, f"{reason}: {shortened(line)}", strict=self._options.strict)
        self._notes.problem_count += max(0, len(lines) - 1000)


_DAMAGED = "copy the file again; nothing of it was ingested"


def _responses(
    path: Path, notes: ReadingNotes, options: ReadOptions, builder: SampleBuilder
) -> Iterator[pl.DataFrame]:  # fmt: skip
    for number, result in prometheus_json.series_of(path, notes):
        yield from builder.add(response_entries(result, number, notes, options, builder))
    yield from builder.rest()


def response_entries(
    result: prometheus_json.Result, number: int, notes: ReadingNotes, options: ReadOptions, builder: SampleBuilder
) -> pl.DataFrame:
    """Return the ``ENTRIES`` of a series of a response of Prometheus; none, with a note, if it cannot be used."""
    none = pl.DataFrame(schema=ENTRIES)
    parts = prometheus_json.labels_and_points(result)
    if parts is None:
        notes.problem(None, f"series {number}: is not a series with labels and points", strict=options.strict)
        return none
    labels, points = parts
    name = labels.pop("__name__", "")
    if not builder.knows(name):
        notes.unknown[name or "(a series without a name)"] += len(points)
        return none
    outcome = builder.series(name, labels)
    if isinstance(outcome, str):
        notes.problem(None, f"series {number}: {outcome}", strict=options.strict)
        return none
    frame = prometheus_json.points_of(points, notes, options, number)
    each = [
        frame.select(pl.lit(series_number, pl.UInt32).alias("series"), "value", "time") for series_number in outcome
    ]
    return pl.concat(each) if each else none


def _parquet(path: Path, notes: ReadingNotes) -> Iterator[pl.DataFrame]:
    """Yield the samples of a Parquet file with columns of the sample schema."""
    try:
        with reading(notes.name), parquet_batches.opened(path, notes.name) as file:
            header = file.schema_arrow.names
            if missing := [name for name in ("cluster", "address", "engine", "time") if name not in header]:
                raise InputError(f"has no column {missing[0]}", where=notes.name, hint="see docs/engine-metrics.md")
            columns = [name for name in SAMPLES if name in header]
            for name in header:
                if name not in SAMPLES and name != "device":
                    notes.unknown[name] += 1
            for batch in parquet_batches.batches(file, ROWS_AT_ONCE, columns, notes.name):
                yield pl.DataFrame(pl.from_arrow(batch)).select(
                    (pl.col(name) if name in columns else pl.lit(None)).cast(dtype).alias(name)
                    for name, dtype in SAMPLES.items()
                )
    except (pa.ArrowException, pl.exceptions.PolarsError, UnicodeDecodeError) as error:
        raise InputError(f"is damaged or not a Parquet file: {one_line(error, 200)}", where=notes.name) from error
