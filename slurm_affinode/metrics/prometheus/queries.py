"""GPU samples from a Prometheus server, window by window.

There are two kinds of queries. *Raw* (the default): ``/api/v1/query`` with a range selector, ``metric{...}[3600s]``,
returns samples as scraped, with their own times. *Range*: ``/api/v1/query_range`` returns the value of a series at each
point of a grid; for up to five minutes it repeats the last scrape, and it misses changes between two points. It is used
if a step was requested and for servers without raw samples. A query asks for fewer than 11,000 points per series, the
limit of Prometheus.

The window grows while responses are small and is halved if the server or the response limit reports too much data
(``--query.max-samples``, HTTP 422, timeouts). If a window of five minutes is too much, each query requests a part
of the series, by the values of a label.
Sources: prometheus.io, "HTTP API"; "Querying basics", "Instant vector selectors" for the subset of PromQL.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import polars as pl

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.metrics.prometheus.client import Client, RefusedError, TooMuchError
from slurm_affinode.metrics.readers.common import Identifier, Identity, ReadingNotes, ReadOptions
from slurm_affinode.metrics.readers.long_form import LongForm
from slurm_affinode.metrics.readers.prometheus_json import POINTS_AT_ONCE, SeriesReader

_MATCHER = re.compile(
    r"""\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`[^`]*`)\s*(,|$)"""
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_HINT = """write for example --match 'cluster="alpha"' or --match 'job="dcgm",instance=~"gpu.*"'"""


@dataclass(frozen=True, slots=True)
class Matcher:
    """One condition on a label."""

    label: str
    operator: str
    """``=``, ``!=``, ``=~`` or ``!~``."""
    value: str

    def __str__(self) -> str:
        return f'{self.label}{self.operator}"{_escaped(self.value)}"'


def parse_matchers(texts: Sequence[str]) -> tuple[Matcher, ...]:
    """Parse label matchers; each text has one or several, separated by commas, with or without braces.

    Raises ``AffinodeError`` with the invalid text. ``__name__`` is rejected: the alias table determines which metrics
    are read.
    """
    return tuple(matcher for text in texts for matcher in _parse(text))


def _parse(text: str) -> list[Matcher]:
    inner = text.strip()
    if inner.startswith("{") and inner.endswith("}"):
        inner = inner[1:-1]
    matchers: list[Matcher] = []
    position = 0
    while inner[position:].strip():
        match = _MATCHER.match(inner, position)
        if match is None:
            raise AffinodeError(f"{text!r} is not a label matcher", hint=_HINT)
        label, operator, quoted, end = match.groups()
        if label == "__name__":
            raise AffinodeError(
                f"{text!r}: the names of metrics cannot be selected",
                hint="name further metrics in a file and give it as gpu_history.aliases",
            )
        matchers.append(Matcher(label, operator, _unquoted(quoted)))
        position = match.end()
        if end != "," and inner[position:].strip():
            raise AffinodeError(f"{text!r} is not a label matcher", hint=_HINT)
    if not matchers:
        raise AffinodeError(f"{text!r} is not a label matcher", hint=_HINT)
    return matchers


def _unquoted(quoted: str) -> str:
    body = quoted[1:-1]
    if quoted[0] == "`":
        return body
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match.group(1), _unescape(match)), body)


def _unescape(match: re.Match[str]) -> str:
    """Unescape ``\\\\`` and quotes; any other escape is left to the server."""
    return match.group(1) if match.group(1) in "\\\"'" else match.group(0)


def _escaped(value: str) -> str:
    return (
        value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    )


def selector(metric: str, matchers: Sequence[Matcher]) -> str:
    """Return a selector of the matching series of ``metric``; other names (UTF-8, dots) are quoted as a label value."""
    conditions = [str(matcher) for matcher in matchers]
    if _METRIC.fullmatch(metric):
        return f"{metric}{{{','.join(conditions)}}}" if conditions else metric
    return "{" + ",".join([str(Matcher("__name__", "=", metric)), *conditions]) + "}"


def duration(milliseconds: int) -> str:
    """Format a PromQL duration in whole seconds, rounded up: not every server supports milliseconds."""
    return f"{-(-milliseconds // 1000)}s"


POINTS_PER_SERIES = 11_000
"""The maximum that Prometheus returns for a range query."""
FIRST_WINDOW_MS = 3600 * 1000
SHORTEST_WINDOW_MS = 60 * 1000
DIVIDED_WINDOW_MS = 5 * 60 * 1000
"""A window of this length is not shortened while its series can be divided: the time that a series takes does not
depend on its points, if these are few."""
LONGEST_WINDOW_MS = 24 * 3600 * 1000
TARGET_POINTS = 200_000
"""Target size of a response, in points: about 5 MB of JSON."""
DEFAULT_STEP_MS = 30 * 1000
_CALM_WINDOWS = 10
"""Windows after a refusal until one of the refused length is tried again."""
_PART_LABELS = ("instance", "Hostname", "UUID", "gpu")
"""Labels by which series are divided: the first one with several values."""
_PROBE_MS = 20 * 60 * 1000
_PROBE_STEP_MS = 5 * 1000
_GPU_NAME = re.compile(r"(?:^|_)(?:dcgm|nvidia|gpu|nv)(?:_|$)")
"""Metric names that are read from a server, which has other metrics, too: not ``power`` or ``util``."""


@dataclass(frozen=True, slots=True)
class Question:
    """The requested interval and series; times in milliseconds since 1970, half-open."""

    since_ms: int
    until_ms: int
    matchers: tuple[Matcher, ...] = ()
    step_ms: int | None = None
    """Interval between the requested points; None: samples as scraped."""


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """The metrics of a table that the server has."""

    names: tuple[str, ...]
    """Metrics in the alias table; of several for one field, the one that takes precedence comes last."""
    other_metrics: tuple[str, ...] = ()
    """GPU metrics that are not read."""
    matchers: Mapping[str, tuple[Matcher, ...]] = field(default_factory=dict)
    """Name of a metric -> further conditions on its series."""


class SeriesCollector(Protocol):
    """Collects the series of a window and converts them to samples."""

    def add(self, series: dict[str, Any], number: int) -> None:
        """Add a series of a response; ``number`` counts those of the response."""

    def frames(self, inside: pl.Expr) -> list[pl.DataFrame]:
        """Return the samples whose ``time`` is ``inside`` the window."""


@dataclass(frozen=True, slots=True)
class Window:
    """The samples of a part of the requested interval."""

    since_ms: int
    until_ms: int
    frames: Sequence[pl.DataFrame]
    """``SAMPLES``."""


def discover(client: Client, question: Question, options: ReadOptions) -> ServerMetrics:
    """Return the metrics of the alias table that the server has in the requested interval."""
    aliases = options.aliases
    selectors = ["{" + ",".join(map(str, question.matchers)) + "}"] if question.matchers else []
    try:
        names = client.names(selectors, question.since_ms, question.until_ms)
    except (RefusedError, TooMuchError):
        # Some proxies forward queries only, some limit the interval.
        spelled = [aliases.spelled[name] for name in aliases.metrics if name in aliases.spelled]
        names = [name for name in spelled if _chosen(name.lower(), options) and _present(client, question, name)]
    chosen = [name for name in names if _chosen(name.lower(), options)]
    metric_aliases = {name: alias for name in chosen if (alias := aliases.metric(name)) is not None}
    other_names = [name for name in chosen if name not in metric_aliases]
    return ServerMetrics(
        tuple(sorted(metric_aliases, key=lambda name: (-metric_aliases[name].rank, name))), tuple(sorted(other_names))
    )


def _chosen(name: str, options: ReadOptions) -> bool:
    return _GPU_NAME.search(name) is not None or name in options.aliases.site_metrics


def _present(client: Client, question: Question, name: str) -> bool:
    """Return whether the metric is found at any of a thousand points in the interval; True if the server refuses."""
    since, until = question.since_ms // 1000 * 1000, question.until_ms // 1000 * 1000
    step = max(1000, (until - since) // 1_000_000 * 1000)
    try:
        series = client.query_range(selector(name, question.matchers), since, until, step)
    except (RefusedError, TooMuchError):
        return True
    return bool(series)


class _GpuCollector:
    """Collects the series of GPUs."""

    def __init__(self, reader: SeriesReader) -> None:
        self._reader = reader
        self._long = LongForm(entries_at_once=2**62)  # a window is small; its metrics must be merged
        self._entries: list[pl.DataFrame] = []
        self._batch: list[tuple[int, dict[str, Any]]] = []
        self._points = 0
        """Points in ``_batch``: series are converted together, as each conversion takes as long as many points."""

    def add(self, series: dict[str, Any], number: int) -> None:
        self._batch.append((number, series))
        self._points += len(series.get("values") or ())
        if self._points >= POINTS_AT_ONCE:
            self._convert()

    def _convert(self) -> None:
        self._entries += self._reader.entries_of(self._batch, self._long)
        self._batch, self._points = [], 0

    def frames(self, inside: pl.Expr) -> list[pl.DataFrame]:
        self._convert()
        if self._entries:
            list(self._long.add(pl.concat(self._entries).filter(inside)))  # yields nothing before ``rest``
        return list(self._long.rest())


@dataclass(slots=True)
class QueryReader:
    """Read the samples of ``question``, earliest first. Raises ``AffinodeError``, also between windows."""

    client: Client
    question: Question
    options: ReadOptions
    notes: ReadingNotes
    target_points: int = TARGET_POINTS
    collector: Callable[[], SeriesCollector] | None = None
    """Return the collector of a window; ``None``: that of GPUs."""
    _percent: set[tuple[str, str | None]] = field(default_factory=set)
    _step_ms: int | None = None
    """Step of range queries; None: raw samples are read."""
    _proved: bool = False
    """Whether the server has returned raw samples."""
    _part_label: str = ""
    _parts: list[list[str]] = field(default_factory=list)
    """Values of the label by which series are divided; a query for each list. Empty: the series are not divided."""

    def windows(self, metrics: ServerMetrics) -> Iterator[Window]:
        """Yield the samples of ``metrics``."""
        question = self.question
        for name in metrics.other_metrics:
            self.notes.unknown[name] += 1
        if not metrics.names:
            return
        self._step_ms = question.step_ms
        self._percent = self._in_percent(metrics)
        window_start, width = question.since_ms, FIRST_WINDOW_MS
        refused, calm = 2 * LONGEST_WINDOW_MS, 0
        while window_start < question.until_ms:
            until = min(window_start + self._bounded(width), question.until_ms)
            try:
                frames, largest = self._window(metrics, window_start, until)
            except TooMuchError:
                if until - window_start <= DIVIDED_WINDOW_MS and self._divide(metrics):
                    continue
                if until - window_start <= SHORTEST_WINDOW_MS:
                    raise
                refused, calm = until - window_start, 0
                width = max(SHORTEST_WINDOW_MS, (until - window_start) // 2000 * 1000)
                continue
            yield Window(window_start, until, frames)
            window_start = until
            calm += 1
            if 2 * largest < self.target_points and (2 * width < refused or calm >= _CALM_WINDOWS):
                width = min(2 * width, LONGEST_WINDOW_MS)
            elif largest > 2 * self.target_points:
                width = max(SHORTEST_WINDOW_MS, width // 2000 * 1000)

    def _bounded(self, width: int) -> int:
        if self._step_ms is None:
            return width
        return max(1, min(width // self._step_ms, POINTS_PER_SERIES - 1)) * self._step_ms

    def _window(self, metrics: ServerMetrics, since: int, until: int) -> tuple[list[pl.DataFrame], int]:
        """Return the samples of ``[since, until)`` and the number of points in the largest response."""
        collector = self.collector() if self.collector is not None else self._gpu_collector()
        largest = 0
        # A range has whole seconds, and includes its left end or not, depending on the server's version.
        inside = pl.col("time").dt.epoch("ms").is_between(since, until, closed="left")
        for name in metrics.names:
            for part in self._parts or [[]]:
                points = 0
                for number, series in enumerate(self._series(metrics, name, part, since, until), start=1):
                    series.setdefault("metric", {}).setdefault("__name__", name)
                    points += len(series.get("values") or ())
                    collector.add(series, number)
                largest = max(largest, points)
        return collector.frames(inside), largest

    def _divide(self, metrics: ServerMetrics) -> bool:
        """Divide the series into twice as many parts; return whether that is possible."""
        if not self._parts:
            self._part_label, values = self._part_values(metrics)
            self._parts = [values]
        if all(len(part) < 2 for part in self._parts):
            return False
        halves = [(part[: len(part) // 2], part[len(part) // 2 :]) for part in self._parts]
        self._parts = [half for pair in halves for half in pair if half]
        return True

    def _part_values(self, metrics: ServerMetrics) -> tuple[str, list[str]]:
        """Return the label that divides the series, and its values. The empty one is that of series without it."""
        question = self.question
        selectors = [self._selector(metrics, name) for name in metrics.names]
        for label in _PART_LABELS:
            try:
                values = self.client.label_values(label, selectors, question.since_ms, question.until_ms)
            except (RefusedError, TooMuchError):
                break
            if len(values) > 1:
                return label, ["", *sorted(values)]
        return "", []

    def _gpu_collector(self) -> SeriesCollector:
        return _GpuCollector(SeriesReader(self.notes, self.options, self.options.node, self._is_percent))

    def _selector(self, metrics: ServerMetrics, name: str, *more: Matcher) -> str:
        return selector(name, (*self.question.matchers, *metrics.matchers.get(name, ()), *more))

    def _series(
        self, metrics: ServerMetrics, name: str, part: Sequence[str], since: int, until: int
    ) -> list[dict[str, Any]]:
        """Return the series of a metric; ``part``: those with these values of the label that divides them."""
        more = (Matcher(self._part_label, "=~", "|".join(map(re.escape, part))),) if part else ()
        chosen = self._selector(metrics, name, *more)
        if self._step_ms is None:
            try:
                series = self.client.raw(f"{chosen}[{duration(until - since)}]", until - 1)
            except RefusedError:
                if self._proved:
                    raise
            else:
                self._proved = self._proved or bool(series)
                return series
            self._step_ms = self._step_of_samples(metrics)
            self.notes.decide(
                f"reading by range queries, a point every {self._step_ms / 1000:g} s: it gives no raw samples"
            )
        # The grid does not depend on the start of the interval, so that reading twice gives the same points.
        first = -(-since // self._step_ms) * self._step_ms
        last = (until - 1) // self._step_ms * self._step_ms
        if (last - first) // self._step_ms >= POINTS_PER_SERIES:
            raise TooMuchError(f"{self.client.server.url}: a window of too many points")
        return self.client.query_range(chosen, first, last, self._step_ms) if first <= last else []

    def _step_of_samples(self, metrics: ServerMetrics) -> int:
        """Return the scrape interval in the last minutes of the requested interval; 30 s if it is unknown."""
        until = self.question.until_ms // 1000 * 1000
        since = max(self.question.since_ms // 1000 * 1000, until - _PROBE_MS)
        for name in metrics.names:
            query = f"timestamp({self._selector(metrics, name)})"
            gaps: list[float] = []
            try:
                answer = self.client.query_range(query, since, until, _PROBE_STEP_MS)
            except (RefusedError, TooMuchError):
                break
            for series in answer:
                pairs = [(float(time), float(value)) for time, value in series.get("values") or ()]
                scraped = sorted({value for time, value in pairs if abs(time - value) < _PROBE_MS / 1000})
                # A server without timestamp() may still return points only where there are samples.
                times = scraped or sorted({time for time, _ in pairs})
                gaps += [later - earlier for earlier, later in itertools.pairwise(times)]
            if gaps:
                return max(1000, round(median(gaps)) * 1000)
        return DEFAULT_STEP_MS

    def _in_percent(self, metrics: ServerMetrics) -> set[tuple[str, str | None]]:
        """Return (metric, node) of metrics in percent or ratio that have a value above 1 in the interval."""
        identifier = Identifier(self.options, self.options.node)
        series_keys: set[tuple[str, str | None]] = set()
        for name in metrics.names:
            alias = self.options.aliases.metric(name)
            if alias is None or alias.unit != "percent_or_ratio":
                continue
            span = duration(self.question.until_ms - self.question.since_ms)
            query = f"max_over_time({selector(name, self.question.matchers)}[{span}])"
            try:
                answer = self.client.instant(query, self.question.until_ms)
            except (RefusedError, TooMuchError):
                continue  # it is then decided for each window
            for series in answer:
                identity = identifier.from_labels(series.get("metric") or {})
                if not isinstance(identity, str) and 1 < _value(series) <= 100:
                    series_keys.add((name, identity[1]))
        return series_keys

    def _is_percent(self, metric: str, identity: Identity) -> bool:
        return (metric, identity[1]) in self._percent


def _value(series: Mapping[str, Any]) -> float:
    try:
        return float(series["value"][1])
    except (KeyError, IndexError, TypeError, ValueError):
        return float("nan")
