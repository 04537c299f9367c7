"""Engine metrics from a Prometheus server: which are read, and their conversion to samples.

Metrics of processes exist for every target; they are read for the endpoints of engines only. Prometheus records in
``up`` whether a scrape succeeded, and in ``scrape_duration_seconds`` how long it took.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import polars as pl

from slurm_affinode.engines import metric_table
from slurm_affinode.engines.ingest import EngineTotals
from slurm_affinode.engines.metric_table import EXPORTED_UP, PROCESS
from slurm_affinode.engines.reader import response_entries
from slurm_affinode.engines.samples import SampleBuilder, SeriesIdentifier
from slurm_affinode.engines.store import ENGINES
from slurm_affinode.metrics.prometheus.client import Client, RefusedError, TooMuchError
from slurm_affinode.metrics.prometheus.importer import ServerReader
from slurm_affinode.metrics.prometheus.queries import (
    Matcher,
    Question,
    SeriesCollector,
    ServerMetrics,
    duration,
    selector,
)
from slurm_affinode.metrics.readers import prometheus_json
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions

UP = "up"
_MOST_INSTANCES = 2000
"""Endpoints named in a query; beyond, metrics of processes are not read."""


def discover(client: Client, question: Question, options: ReadOptions) -> ServerMetrics:
    """Return the metrics of the table that the server has in the requested interval, and those of their processes."""
    del options
    table = metric_table.load()
    metric_names = {*table.by_name, *metric_table.exported_fields(), *metric_table.exported_buckets(), EXPORTED_UP}
    selectors = ["{" + ",".join(map(str, question.matchers)) + "}"] if question.matchers else []
    try:
        present = {*client.names(selectors, question.since_ms, question.until_ms)} & metric_names
    except (RefusedError, TooMuchError):  # some proxies forward queries only
        present = metric_names
    of_process = {name for name in present if any(source.engine == PROCESS for source in table.by_name.get(name, ()))}
    names = sorted(present - of_process)
    if not names:
        return ServerMetrics(())
    instances = _instances(client, question, names)
    if not instances or len(instances) > _MOST_INSTANCES:
        return ServerMetrics(tuple(names))
    matcher = Matcher("instance", "=~", "|".join(re.escape(instance) for instance in sorted(instances)))
    beside = (*sorted(of_process), UP)
    return ServerMetrics((*names, *beside), matchers=dict.fromkeys(beside, (matcher,)))


def _instances(client: Client, question: Question, names: Sequence[str]) -> set[str]:
    """Return the label ``instance`` of all engines."""
    span = duration(question.until_ms - question.since_ms)
    instances: set[str] = set()
    table = metric_table.load()
    for name in names:
        if not any(source.field in ("running", "waiting") for source in table.by_name.get(name, ())):
            continue
        query = f"count by (instance) (last_over_time({selector(name, question.matchers)}[{span}]))"
        try:
            answer = client.instant(query, question.until_ms)
        except (RefusedError, TooMuchError):
            continue
        instances |= {
            str(sample["metric"]["instance"]) for sample in answer if (sample.get("metric") or {}).get("instance")
        }
    return instances


class EngineCollector:
    """Collects the series of one window. The builder is that of the whole ingest, which knows the engines."""

    def __init__(self, builder: SampleBuilder, notes: ReadingNotes, options: ReadOptions) -> None:
        self._builder = builder
        self._notes = notes
        self._options = options
        self._entries: list[pl.DataFrame] = []
        self._down: list[tuple[dict[str, str], pl.DataFrame]] = []

    def add(self, series: dict[str, Any], number: int) -> None:
        """Add a series of a response."""
        parts = prometheus_json.labels_and_points(series)
        if parts is not None and parts[0].get("__name__") == UP:
            points = prometheus_json.points_of(parts[1], self._notes, self._options, number)
            self._down.append((parts[0], points.filter(pl.col("value") == 0)))
            return
        entries = response_entries(series, number, self._notes, self._options, self._builder)
        if len(entries):
            self._entries.append(entries)

    def frames(self, inside: pl.Expr) -> list[pl.DataFrame]:
        """Return the samples of the window."""
        frames: list[pl.DataFrame] = []
        for labels, points in self._down:
            times: list[datetime] = points.filter(inside)["time"].to_list()
            self._builder.failed(labels, times, "the scrape of Prometheus failed (up is 0)")
        if self._entries:
            frames += self._builder.add(pl.concat(self._entries).filter(inside))
        frames += self._builder.rest()
        return frames


def server_reader(totals: EngineTotals) -> ServerReader:
    """Return what is read from a server; ``totals`` counts the samples."""

    def collector(notes: ReadingNotes, options: ReadOptions) -> Callable[[], SeriesCollector]:
        builder = SampleBuilder(notes, SeriesIdentifier(options, "unknown"))
        return lambda: EngineCollector(builder, notes, options)

    return ServerReader(
        discover, collector, totals.count, "metric of an engine", "samples of engines",
        "vLLM, SGLang, TGI, Triton with TensorRT-LLM and llama.cpp are known",
        "does it scrape the engines, and does it keep samples that long? choose --since, --until and --match", ENGINES,
    )  # fmt: skip
