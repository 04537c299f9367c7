"""Responses of the Prometheus HTTP API, also saved to a file: ``query_range`` (matrix) and ``query`` (vector) as JSON.

Format: prometheus.io, "HTTP API", "Expression query result formats": times are seconds, values are strings.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
from numpy.typing import NDArray

from slurm_affinode.base import input_files
from slurm_affinode.base.errors import InputError
from slurm_affinode.metrics.aliases import Alias
from slurm_affinode.metrics.readers.common import (
    Identifier,
    Identity,
    ReadingNotes,
    ReadOptions,
    measured,
    percent_values,
    shows_percent,
)
from slurm_affinode.metrics.readers.json_points import PointColumns, SeriesPoints, decoded, joined
from slurm_affinode.metrics.readers.lines import compression_of, open_binary, reading
from slurm_affinode.metrics.readers.local_time import POSSIBLE
from slurm_affinode.metrics.readers.long_form import LongForm, code_of
from slurm_affinode.metrics.schema import TIME

_SHOWN = 200
_LATEST_MS = POSSIBLE[1].timestamp() * 1000
Result = Mapping[str, Any]
"""A series of a response, or a response."""
_POINTS = {"ms": pl.Int64(), "raw": pl.String()}
_NO_VALUE = r"(?i)^[+-]?(nan|inf)"
_SERIES = {"series": pl.UInt32(), "code": pl.UInt16(), "factor": pl.Float64()}
POINTS_AT_ONCE = 500_000
"""Points of several series that are converted together: one by one, short series would take a millisecond each."""


def warnings_of(answer: Result) -> list[str]:
    """Return the warnings in a response, above all that it is incomplete.

    Prometheus and Thanos report this in ``warnings``, VictoriaMetrics in ``isPartial``.
    """
    warnings = answer.get("warnings")
    partial = ["the answer is partial (isPartial)"] if answer.get("isPartial") is True else []
    return [*partial, *(_whole(warning)[:_SHOWN] for warning in (warnings if isinstance(warnings, list) else []))]


def read(path: Path, notes: ReadingNotes, options: ReadOptions, fallback_node: str | None) -> Iterator[pl.DataFrame]:
    """Yield the samples of one response, or of several, one per line or in a list. Raises ``InputError``."""
    reader = SeriesReader(notes, options, fallback_node)
    long = LongForm()
    number = 0
    for batch in _batches(series_of(path, notes)):
        number += len(batch)
        for entries in reader.entries_of(batch, long):
            yield from long.add(entries)
    if not number:
        raise InputError(
            "is a response without a series: the query matched nothing",
            where=notes.name,
            hint="is the name of the metric right, and was there data at that time?",
        )
    yield from long.rest()


def _batches(series: Iterator[tuple[int, Result]]) -> Iterator[list[tuple[int, Result]]]:
    """Yield consecutive series with at least ``POINTS_AT_ONCE`` points; what precedes an error is yielded first."""
    batch: list[tuple[int, Result]] = []
    points = 0
    try:
        for number, result in series:
            batch.append((number, result))
            values = result.get("values")
            points += len(values) if isinstance(values, (list, SeriesPoints)) else 1
            if points >= POINTS_AT_ONCE:
                yield batch
                batch, points = [], 0
    except InputError:
        yield batch
        raise
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class _Points:
    """The points of several series, if all of them are pairs of a possible time and a number as text."""

    ms: NDArray[np.int64]
    values: pl.Series
    percent: list[bool]
    """For each series, whether its values show that they are in percent."""


@dataclass(frozen=True, slots=True)
class _Series:
    """A series of a known metric and device."""

    name: str
    alias: Alias
    identity: Identity
    number: int
    """Its number in the ``LongForm``."""

    @property
    def code(self) -> int:
        return code_of(self.alias)


class SeriesReader:
    """Convert the series of responses to entries."""

    def __init__(
        self, notes: ReadingNotes, options: ReadOptions, fallback_node: str | None,
        is_percent: Callable[[str, Identity], bool] = lambda metric, identity: False,
    ) -> None:  # fmt: skip
        """``is_percent`` returns whether a metric is known to be in percent, beyond the values of one series."""
        self._notes = notes
        self._options = options
        self._identifier = Identifier(options, fallback_node)
        self._is_percent = is_percent
        self._identities: dict[tuple[tuple[str, str], ...], tuple[Identity | str, str | None]] = {}
        """Labels without the name of the metric -> identity, or the reason why there is none, and job IDs."""

    def entries_of(self, batch: Sequence[tuple[int, Result]], long: LongForm) -> Iterator[pl.DataFrame]:
        """Yield the ``ENTRIES`` of numbered series, in their order; those of sound series are converted together."""
        parsed = [labels_and_points(result) for _, result in batch]
        sound = [pair for pair in parsed if pair is not None]
        points = _sound_points([pair[1] for pair in sound]) if len(sound) == len(parsed) else None
        if points is None:
            single = (self.entries(result, number, long) for number, result in batch)
            yield from (entries for entries in single if entries is not None)
            return
        sequences: list[tuple[int, int, float] | tuple[None, None, None]] = []
        for (number, _), (labels, values), shown in zip(batch, sound, points.percent, strict=True):
            series = self._usable_series(number, labels, len(values), long)
            sequences.append(
                (None, None, None) if series is None else (series.number, series.code, self._factor(series, shown))
            )
        counts = [len(values) for _, values in sound]
        of_series = pl.DataFrame(sequences, schema=_SERIES, orient="row")
        sequence_rows = pl.Series(np.repeat(np.arange(len(sequences)), counts))
        frame = of_series.select(pl.all().gather(sequence_rows)).with_columns(
            measured(points.values).alias("value"), pl.Series("time", points.ms).cast(TIME)
        )
        yield frame.filter(pl.col("series").is_not_null()).select(
            "series", "code", (pl.col("value") * pl.col("factor")).alias("value"), "time"
        )

    def entries(self, result: Mapping[str, Any], number: int, long: LongForm) -> pl.DataFrame | None:
        """Return the ``ENTRIES`` of a series, numbered by ``long``; None, with a note, if it cannot be used."""
        options, notes = self._options, self._notes
        parsed = labels_and_points(result)
        if parsed is None:
            notes.problem(None, f"series {number}: is not a series with labels and points", strict=options.strict)
            return None
        labels, points = parsed
        cached = self._usable_series(number, labels, len(points), long)
        if cached is None:
            return None
        frame = points_of(points, notes, options, number)
        factor = self._factor(cached, shows_percent(frame["value"]))
        return frame.select(
            pl.lit(cached.number, pl.UInt32).alias("series"),
            pl.lit(cached.code, pl.UInt16).alias("code"),
            (measured(frame["value"]) * factor).alias("value"),
            "time",
        )

    def _usable_series(self, number: int, labels: dict[str, str], points: int, long: LongForm) -> _Series | None:
        """Return the series ``number`` of a response; None, with a note, if it cannot be used."""
        name = labels.pop("__name__", None)
        alias = self._options.aliases.metric(name) if name else None
        if name is None or alias is None:
            self._notes.unknown[name or "(a series without a name)"] += points
            return None
        key = tuple(labels.items())
        if key not in self._identities:
            self._identities[key] = self._identifier.from_labels(labels), self._identifier.job_of(labels)
        identity, job = self._identities[key]
        if isinstance(identity, str):
            self._notes.problem(None, f"series {number}: {identity}", strict=self._options.strict)
            return None
        return _Series(name, alias, identity, long.series(identity, job))

    def _factor(self, series: _Series, shown: bool) -> float:
        """Return the factor of the values of a series; ``shown``: they show that they are in percent."""
        if series.alias.unit != "percent_or_ratio" or self._is_percent(series.name, series.identity) or shown:
            return series.alias.factor
        return 100.0


def labels_and_points(result: Mapping[str, Any]) -> tuple[dict[str, str], list[Any] | SeriesPoints] | None:
    """Return the labels of a series, with ``__name__``, and its points; None if it has another form."""
    metric = result.get("metric") or {}
    points = result.get("values") or ([result["value"]] if "value" in result else [])
    if not isinstance(metric, dict) or not isinstance(points, (list, SeriesPoints)):
        return None
    return {_whole(name): _whole(value) for name, value in metric.items() if value is not None}, points


def _sound_points(of_series: list[list[Any] | SeriesPoints]) -> _Points | None:
    """Return the points of several series; None if one of them has a point that needs a message or another form."""
    columns = _columns_of(of_series)
    if columns is None:
        return None
    times, texts = columns.times.to_numpy(), columns.values
    # As Python's round() does, to even.
    ms = np.rint(times * 1000)
    # Both comparisons fail for NaN.
    if not len(times) or not ((times >= 0) & (ms < _LATEST_MS)).all():
        return None
    values = texts.cast(pl.Float64, strict=False)
    if values.has_nulls() and not texts.filter(values.is_null()).str.contains(_NO_VALUE).all():
        return None
    shown = np.concatenate([[0], np.cumsum(percent_values(values).fill_null(value=False).to_numpy())])
    ends = np.cumsum([len(points) for points in of_series])
    starts = np.concatenate([[0], ends[:-1]])
    return _Points(ms.astype(np.int64), values, (shown[ends] > shown[starts]).tolist())


def _columns_of(of_series: list[list[Any] | SeriesPoints]) -> PointColumns | None:
    """Return the points of several series in one form; None if one of them is no pair of a number and a text."""
    if of_series and all(isinstance(points, SeriesPoints) for points in of_series):
        return joined(cast("list[SeriesPoints]", of_series))
    if any(isinstance(points, SeriesPoints) for points in of_series):
        return None
    points = list(itertools.chain.from_iterable(cast("list[list[Any]]", of_series)))
    if not points or set(map(type, points)) != {list} or set(map(len, points)) != {2}:
        return None
    times, raw = [time for time, _ in points], [value for _, value in points]
    if not set(map(type, times)) <= {int, float} or set(map(type, raw)) != {str}:
        return None
    try:
        return PointColumns(pl.Series(np.array(times, np.float64)), pl.Series("raw", raw, pl.String))
    except (OverflowError, UnicodeEncodeError):
        return None


def points_of(points: list[Any] | SeriesPoints, notes: ReadingNotes, options: ReadOptions, number: int) -> pl.DataFrame:
    """Return ``ms``, ``raw``, ``value`` and ``time`` of points; note those that cannot be used."""
    try:
        pairs = points if isinstance(points, list) else zip(points.times, points.values, strict=True)
        times, values = [], []
        for time, value in pairs:
            times.append(round(float(time) * 1000))
            values.append(str(value))
        sound = all(0 <= time < _LATEST_MS for time in times)
        frame = pl.DataFrame({"ms": times, "raw": values}, schema=_POINTS) if sound else None
    except (TypeError, ValueError, OverflowError):
        frame = None
    if frame is None:
        notes.problem(None, f"series {number}: its points are not pairs of time and value", strict=options.strict)
        frame = pl.DataFrame(schema=_POINTS)
    frame = frame.with_columns(
        pl.col("raw").cast(pl.Float64, strict=False).alias("value"), pl.col("ms").cast(TIME).alias("time")
    )
    bad = frame.filter(pl.col("value").is_null() & ~pl.col("raw").str.contains(_NO_VALUE))
    for raw in bad["raw"]:
        notes.problem(None, f"series {number}: {raw[:60]!r} is not a number", strict=options.strict)
    return frame


def _whole(value: Any) -> str:
    """Convert ``value`` to text; lone surrogates, which JSON allows but which cannot be stored, are escaped."""
    if type(value) is str and value.isascii():
        return value
    return str(value).encode("utf-8", "backslashreplace").decode()


def series_of(path: Path, notes: ReadingNotes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the series of all responses in a file, numbered from 1. Raises ``InputError``."""
    number = 0
    for document in _documents(path, notes.name):
        if not isinstance(document, dict):
            raise _unusable(notes.name)
        if document.get("status") == "error":
            raise InputError(f"is an error of Prometheus: {document.get('error', '')}", where=notes.name)
        data = document.get("data", document)
        results = data.get("result") if isinstance(data, dict) else None
        if not isinstance(results, list) or not all(isinstance(entry, dict) for entry in results):
            raise _unusable(notes.name)
        for warning in warnings_of(document):
            notes.decide(f"warned: {warning}")
        for result in results:
            number += 1
            yield number, result


def _documents(path: Path, name: str) -> list[Any]:
    with reading(name), open_binary(path) as file:
        data = input_files.document(file, where=name, packed=compression_of(path) is not None)
    if not data.isascii():
        data = data.decode("utf-8", "replace").encode()
    try:
        documents = decoded(data)
        if documents is not None:
            return documents[0] if len(documents) == 1 and isinstance(documents[0], list) else documents
        return _parsed(data.decode(), name)
    except (ValueError, RecursionError):  # numbers of thousands of digits, thousands of brackets
        raise _unusable(name) from None


def _parsed(text: str, name: str) -> list[Any]:
    try:
        whole = json.loads(text, strict=False)  # a label value may contain any character
    except json.JSONDecodeError as error:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            return [json.loads(line, strict=False) for line in lines] if len(lines) > 1 else _raise(error)
        except json.JSONDecodeError:
            raise InputError(
                f"is cut off or not JSON: {error.msg}", where=f"{name}:{error.lineno}", hint="save the response again"
            ) from error
    return whole if isinstance(whole, list) else [whole]


def _raise(error: json.JSONDecodeError) -> list[Any]:
    raise error


def _unusable(name: str) -> InputError:
    return InputError(
        "is JSON, but not a response of the Prometheus API",
        where=name,
        hint="save the response of /api/v1/query_range: {status, data: {resultType, result}}",
    )
