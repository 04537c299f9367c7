"""Responses of the Prometheus HTTP API, also saved to a file: ``query_range`` (matrix) and ``query`` (vector) as JSON.

Format: prometheus.io, "HTTP API", "Expression query result formats": times are seconds, values are strings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl

from slurm_affinode.base import input_files
from slurm_affinode.base.errors import InputError
from slurm_affinode.metrics.readers.common import (
    Identifier,
    Identity,
    ReadingNotes,
    ReadOptions,
    measured,
    shows_percent,
)
from slurm_affinode.metrics.readers.lines import compression_of, open_binary, reading
from slurm_affinode.metrics.readers.local_time import POSSIBLE
from slurm_affinode.metrics.readers.long_form import FIELD_CODES, LongForm
from slurm_affinode.metrics.schema import TIME

_SHOWN = 200
_LATEST_MS = POSSIBLE[1].timestamp() * 1000
Result = Mapping[str, Any]
"""A series of a response, or a response."""
_POINTS = {"ms": pl.Int64(), "raw": pl.String()}


def warnings_of(answer: Result) -> list[str]:
    """Return the warnings in a response, above all that it is incomplete.

    Prometheus and Thanos report this in ``warnings``, VictoriaMetrics in ``isPartial``.
    """
    warnings = answer.get("warnings")
    partial = ["the answer is partial (isPartial)"] if answer.get("isPartial") is True else []
    return [*partial, *(_whole(one)[:_SHOWN] for one in (warnings if isinstance(warnings, list) else []))]


def read(path: Path, notes: ReadingNotes, options: ReadOptions, fallback_node: str | None) -> Iterator[pl.DataFrame]:
    """Yield the samples of one response, or of several, one per line or in a list. Raises ``InputError``."""
    reader = SeriesReader(notes, options, fallback_node)
    long = LongForm()
    number = 0
    for number, result in series_of(path, notes):
        entries = reader.entries(result, number, long)
        if entries is not None:
            yield from long.add(entries)
    if not number:
        raise InputError(
            "is a response without a series: the query matched nothing",
            where=notes.name,
            hint="is the name of the metric right, and was there data at that time?",
        )
    yield from long.rest()


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

    def entries(self, result: Mapping[str, Any], number: int, long: LongForm) -> pl.DataFrame | None:
        """Return the ``ENTRIES`` of a series, numbered by ``long``; None, with a note, if it cannot be used."""
        options, notes = self._options, self._notes
        found = labels_and_points(result)
        if found is None:
            notes.problem(None, f"series {number}: is not a series with labels and points", strict=options.strict)
            return None
        labels, points = found
        name = labels.pop("__name__", None)
        alias = options.aliases.metric(name) if name else None
        if name is None or alias is None:
            notes.unknown[name or "(a series without a name)"] += len(points)
            return None
        identity = self._identifier.from_labels(labels)
        if isinstance(identity, str):
            notes.problem(None, f"series {number}: {identity}", strict=options.strict)
            return None
        series = long.series(identity, self._identifier.job_of(labels))
        frame = points_of(points, notes, options, number)
        factor = alias.factor
        if alias.unit == "percent_or_ratio" and not self._is_percent(name, identity):
            factor = factor if shows_percent(frame["value"]) else 100.0
        return frame.select(
            pl.lit(series, pl.UInt32).alias("series"),
            pl.lit(FIELD_CODES[alias.field], pl.UInt8).alias("field"),
            (measured(pl.col("value")) * factor).alias("value"),
            "time",
        )


def labels_and_points(result: Mapping[str, Any]) -> tuple[dict[str, str], list[Any]] | None:
    """Return the labels of a series, with ``__name__``, and its points; None if it has another form."""
    metric = result.get("metric") or {}
    points = result.get("values") or ([result["value"]] if "value" in result else [])
    if not isinstance(metric, dict) or not isinstance(points, list):
        return None
    return {_whole(name): _whole(value) for name, value in metric.items() if value is not None}, points


def points_of(points: list[Any], notes: ReadingNotes, options: ReadOptions, number: int) -> pl.DataFrame:
    """Return ``ms``, ``raw``, ``value`` and ``time`` of points; note those that cannot be used."""
    try:
        times = [round(float(time) * 1000) for time, _ in points]
        values = [str(value) for _, value in points]
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
    bad = frame.filter(pl.col("value").is_null() & ~pl.col("raw").str.contains(r"(?i)^[+-]?(nan|inf)"))
    for raw in bad["raw"]:
        notes.problem(None, f"series {number}: {raw[:60]!r} is not a number", strict=options.strict)
    return frame


def _whole(value: Any) -> str:
    """Convert ``value`` to text; lone surrogates, which JSON allows but which cannot be stored, are escaped."""
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
        if not isinstance(results, list) or not all(isinstance(one, dict) for one in results):
            raise _unusable(notes.name)
        for warning in warnings_of(document):
            notes.decide(f"warned: {warning}")
        for result in results:
            number += 1
            yield number, result


def _documents(path: Path, name: str) -> list[Any]:
    with reading(name), open_binary(path) as file:
        data = input_files.document(file, where=name, packed=compression_of(path) is not None)
        text = data.decode("utf-8", "replace")
    try:
        return _parsed(text, name)
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
