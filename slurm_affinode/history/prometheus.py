"""GPU history out of a Prometheus server, time window by time window, as samples.

Two ways to ask. *Raw* (the default): ``/api/v1/query`` with a range selector, ``metric{...}[3600s]``, gives the samples
as they were scraped, with their own times. *Range*: ``/api/v1/query_range`` gives what a series is worth at each point
of a grid: for up to five minutes the last scrape is repeated, and what happens between two points is not seen. It is
used where a step was asked for, and with servers that give no raw samples; a query asks for less than 11,000 points per
series, which is the most that Prometheus answers.

A window is as long as answers of a good size allow: it grows while they are small and is halved when the server, or
the bound on the size of an answer, says that it was too much. Source: prometheus.io "HTTP API".
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import polars as pl

from slurm_affinode.history import promql
from slurm_affinode.history.longform import LongForm
from slurm_affinode.history.promclient import Client, RefusedError, TooMuchError
from slurm_affinode.history.promjson import SeriesReader
from slurm_affinode.history.promql import Matcher
from slurm_affinode.history.reading import Identifier, Identity, Notes, ReadOptions

POINTS_PER_SERIES = 11_000
"""The most that Prometheus answers to a range query."""
FIRST_WINDOW_MS = 3600 * 1000
SHORTEST_WINDOW_MS = 60 * 1000
LONGEST_WINDOW_MS = 24 * 3600 * 1000
POINTS_WANTED = 200_000
"""Points of an answer that is neither small nor large: 5 MB of JSON."""
DEFAULT_STEP_MS = 30 * 1000
_PROBE_MS = 20 * 60 * 1000
_PROBE_STEP_MS = 5 * 1000
_OF_GPUS = re.compile(r"(?:^|_)(?:dcgm|nvidia|gpu|nv)(?:_|$)")
"""Names of the table that are taken from a server, which has more than GPUs: not ``power`` or ``util``."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked for; times in milliseconds since 1970, half-open."""

    since_ms: int
    until_ms: int
    matchers: tuple[Matcher, ...] = ()
    step_ms: int | None = None
    """Distance of the points to ask for; None: the samples as they were scraped."""


@dataclass(frozen=True, slots=True)
class Found:
    """Metrics that the server has."""

    names: tuple[str, ...]
    """Those that the alias table knows; of several for one field the one that counts comes last."""
    other: tuple[str, ...] = ()
    """Names of GPU metrics that are not kept."""


@dataclass(frozen=True, slots=True)
class Window:
    """Part of the history."""

    since_ms: int
    until_ms: int
    frames: Sequence[pl.DataFrame]
    """``SAMPLES``."""


def discover(client: Client, question: Question, options: ReadOptions) -> Found:
    """Which metrics of the alias table the server has in the time asked for."""
    aliases = options.aliases
    selectors = ["{" + ",".join(map(str, question.matchers)) + "}"] if question.matchers else []
    try:
        names = client.names(selectors, question.since_ms, question.until_ms)
    except (RefusedError, TooMuchError):
        # Some proxies pass only queries on, some limit the time.
        spelled = [aliases.spelled[name] for name in aliases.metrics if name in aliases.spelled]
        names = [name for name in spelled if _chosen(name.lower(), options) and _present(client, question, name)]
    wanted = [name for name in names if _chosen(name.lower(), options)]
    known = {name: alias for name in wanted if (alias := aliases.metric(name)) is not None}
    other = [name for name in wanted if name not in known]
    return Found(tuple(sorted(known, key=lambda name: (-known[name].rank, name))), tuple(sorted(other)))


def _chosen(name: str, options: ReadOptions) -> bool:
    return _OF_GPUS.search(name) is not None or name in options.aliases.own


def _present(client: Client, question: Question, name: str) -> bool:
    """Whether any of a thousand looks over the time sees the metric; True where the server will not say."""
    since, until = question.since_ms // 1000 * 1000, question.until_ms // 1000 * 1000
    step = max(1000, (until - since) // 1_000_000 * 1000)
    try:
        series = client.over(promql.selector(name, question.matchers), since, until, step)
    except (RefusedError, TooMuchError):
        return True
    return bool(series)


@dataclass(slots=True)
class Reader:
    """Read the answer to ``question``, from the earliest time on. Raises ``AffinodeError``, also between windows."""

    client: Client
    question: Question
    options: ReadOptions
    notes: Notes
    points_wanted: int = POINTS_WANTED
    _percent: set[tuple[str, str | None]] = field(default_factory=set)
    _step_ms: int | None = None
    """Once known: range queries of this step."""
    _proved: bool = False
    """Whether the server has answered in the way that is used."""

    def windows(self, found: Found) -> Iterator[Window]:
        """Yield the samples of ``found``."""
        question = self.question
        for name in found.other:
            self.notes.unknown[name] += 1
        if not found.names:
            return
        self._step_ms = question.step_ms
        self._percent = self._in_percent(found)
        at, width = question.since_ms, FIRST_WINDOW_MS
        while at < question.until_ms:
            until = min(at + self._bounded(width), question.until_ms)
            try:
                frames, largest = self._window(found, at, until)
            except TooMuchError:
                if until - at <= SHORTEST_WINDOW_MS:
                    raise
                width = max(SHORTEST_WINDOW_MS, (until - at) // 2000 * 1000)
                continue
            yield Window(at, until, frames)
            at = until
            if 2 * largest < self.points_wanted:
                width = min(2 * width, LONGEST_WINDOW_MS)
            elif largest > 2 * self.points_wanted:
                width = max(SHORTEST_WINDOW_MS, width // 2000 * 1000)

    def _bounded(self, width: int) -> int:
        if self._step_ms is None:
            return width
        return max(1, min(width // self._step_ms, POINTS_PER_SERIES - 1)) * self._step_ms

    def _window(self, found: Found, since: int, until: int) -> tuple[list[pl.DataFrame], int]:
        """The samples from ``since`` to before ``until``, and the number of points of the largest answer."""
        reader = SeriesReader(self.notes, self.options, self.options.node, self._is_percent)
        long = LongForm(entries_at_once=2**62)  # a window is small, and its metrics belong together
        largest = 0
        # A range is in whole seconds, and has its left end or not, as the server's version has it.
        inside = pl.col("time").dt.epoch("ms").is_between(since, until, closed="left")
        for name in found.names:
            points, held = 0, []
            for number, series in enumerate(self._series(found, name, since, until), start=1):
                series.setdefault("metric", {}).setdefault("__name__", name)
                points += len(series.get("values") or ())
                entries = reader.entries(series, number, long)
                if entries is not None:
                    held.append(entries)
            if held:
                list(long.add(pl.concat(held).filter(inside)))  # it holds all until ``rest``
            largest = max(largest, points)
        return list(long.rest()), largest

    def _series(self, found: Found, name: str, since: int, until: int) -> list[dict[str, Any]]:
        chosen = promql.selector(name, self.question.matchers)
        if self._step_ms is None:
            try:
                series = self.client.raw(f"{chosen}[{promql.duration(until - since)}]", until - 1)
            except RefusedError:
                if self._proved:
                    raise
            else:
                self._proved = self._proved or bool(series)
                return series
            self._step_ms = self._found_step(found)
            self.notes.decide(
                f"reading by range queries, a point every {self._step_ms / 1000:g} s: it gives no raw samples"
            )
        # On a grid that does not depend on where the reading began: read twice, the points are the same.
        first = -(-since // self._step_ms) * self._step_ms
        last = (until - 1) // self._step_ms * self._step_ms
        if (last - first) // self._step_ms >= POINTS_PER_SERIES:
            raise TooMuchError(f"{self.client.server.url}: a window of too many points")
        return self.client.over(chosen, first, last, self._step_ms) if first <= last else []

    def _found_step(self, found: Found) -> int:
        """The scrape interval in the last minutes of the time asked for; 30 s where it cannot be told."""
        until = self.question.until_ms // 1000 * 1000
        since = max(self.question.since_ms // 1000 * 1000, until - _PROBE_MS)
        for name in found.names:
            query = f"timestamp({promql.selector(name, self.question.matchers)})"
            gaps: list[float] = []
            try:
                answer = self.client.over(query, since, until, _PROBE_STEP_MS)
            except (RefusedError, TooMuchError):
                break
            for series in answer:
                pairs = [(float(time), float(value)) for time, value in series.get("values") or ()]
                scraped = sorted({value for time, value in pairs if abs(time - value) < _PROBE_MS / 1000})
                # A server that knows no timestamp() may still give points only where there are samples.
                times = scraped or sorted({time for time, _ in pairs})
                gaps += [later - earlier for earlier, later in itertools.pairwise(times)]
            if gaps:
                return max(1000, round(median(gaps)) * 1000)
        return DEFAULT_STEP_MS

    def _in_percent(self, found: Found) -> set[tuple[str, str | None]]:
        """(metric, node) of metrics in percent or ratio that anywhere in the time show a value above 1."""
        identifier = Identifier(self.options, self.options.node)
        seen: set[tuple[str, str | None]] = set()
        for name in found.names:
            alias = self.options.aliases.metric(name)
            if alias is None or alias.unit != "percent_or_ratio":
                continue
            span = promql.duration(self.question.until_ms - self.question.since_ms)
            query = f"max_over_time({promql.selector(name, self.question.matchers)}[{span}])"
            try:
                answer = self.client.instant(query, self.question.until_ms)
            except (RefusedError, TooMuchError):
                continue  # then each window tells it by itself
            for series in answer:
                identity = identifier.from_labels(series.get("metric") or {})
                if not isinstance(identity, str) and 1 < _value(series) <= 100:
                    seen.add((name, identity[1]))
        return seen

    def _is_percent(self, metric: str, identity: Identity) -> bool:
        return (metric, identity[1]) in self._percent


def _value(series: Mapping[str, Any]) -> float:
    try:
        return float(series["value"][1])
    except (KeyError, IndexError, TypeError, ValueError):
        return float("nan")
