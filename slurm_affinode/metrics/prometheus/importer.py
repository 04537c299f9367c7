"""Ingest of samples from a Prometheus server into a sample store, window by window."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import polars as pl

from slurm_affinode.base.errors import AffinodeError, InputError
from slurm_affinode.base.times import utc
from slurm_affinode.metrics.ingest import FileOutcome, IngestSummary, SeenFiles, count, possible, sampling_steps
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.parquet.table import GPU, SampleTable
from slurm_affinode.metrics.parquet.writer import AddedSource, Prepared, SampleSource, WrittenTotals
from slurm_affinode.metrics.prometheus.client import Client
from slurm_affinode.metrics.prometheus.queries import (
    QueryReader,
    Question,
    SeriesCollector,
    ServerMetrics,
    Window,
    discover,
)
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions


class NoSamplesError(InputError):
    """The server responds, and has no such samples in the interval."""


@dataclass(frozen=True, slots=True)
class ServerReader:
    """The series read from a server, and their table."""

    discover: Callable[[Client, Question, ReadOptions], ServerMetrics]
    collector: Callable[[ReadingNotes, ReadOptions], Callable[[], SeriesCollector]] | None
    """Return the factory of the collectors of windows; ``None``: those of GPUs."""
    checked: Callable[[pl.DataFrame, ReadingNotes], pl.DataFrame]
    item: str
    """Name of a sample, in the singular, for the error of a server without any."""
    samples: str
    hint: str
    absent: str
    """Hint if it has no samples in the interval."""
    table: SampleTable = GPU


GPU_SERVER = ServerReader(
    discover, None, possible, "GPU metric", "GPU samples",
    "name further metrics in a file and give it as gpu_history.aliases",
    "does it scrape dcgm-exporter, and does it keep samples that long? choose --since, --until and --match",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ImportOutcome:
    """Outcome of an ingest."""

    summary: IngestSummary
    until: datetime
    """Time up to which samples were read: the end of the requested interval, unless reading failed."""
    failure: AffinodeError | None = None
    """The error that ended it early; earlier samples are stored."""


def ingest(
    store: SampleStore,
    client: Client,
    question: Question,
    options: ReadOptions,
    *,
    dry_run: bool = False,
    advance: Callable[[int], None] = lambda milliseconds: None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    reader: ServerReader = GPU_SERVER,
) -> ImportOutcome:
    """Ingest the samples of ``question``. A window is stored as a whole or not at all; ingesting it twice is a no-op.

    ``advance`` is called with the length of each completed window, in milliseconds. Raises ``AffinodeError`` if
    nothing could be read; a later failure is part of the outcome.
    """
    started = now()
    run = _Run(client, question, options, ReadingNotes(client.server.url), advance, reader=reader)
    metrics = reader.discover(client, question, options)
    totals: WrittenTotals | None = None
    if dry_run:
        for window in run.windows(metrics):
            run.take(window, count)
    else:
        with store.writer() as writer:
            for window in run.windows(metrics):
                run.take(window, writer.add)
        totals = writer.totals
    if run.failure is not None and run.position_ms == question.since_ms:
        raise run.failure
    return ImportOutcome(run.summary(started, now(), metrics, totals, store), _moment(run.position_ms), run.failure)


class _Run:
    """State of an ingest."""

    def __init__(
        self,
        client: Client,
        question: Question,
        options: ReadOptions,
        notes: ReadingNotes,
        advance: Callable[[int], None],
        *,
        reader: ServerReader,
    ) -> None:
        self._client = client
        self._of = reader
        collector = None if reader.collector is None else reader.collector(notes, options)
        self._reader = QueryReader(client, question, options, notes, collector=collector)
        self._notes = notes
        self._advance = advance
        self._seen_files = SeenFiles(reader.checked, reader.table)
        self._additions: list[AddedSource] = []
        self.position_ms = question.since_ms
        self.failure: AffinodeError | None = None

    def windows(self, metrics: ServerMetrics) -> Iterator[Window]:
        """Yield the windows up to the end or the first failure."""
        try:
            for window in self._reader.windows(metrics):
                yield window
                self.position_ms = window.until_ms
                self._advance(window.until_ms - window.since_ms)
        except AffinodeError as error:
            self.failure = error
        else:
            self.position_ms = self._reader.question.until_ms

    def take(self, window: Window, add: Callable[[Iterator[Prepared], SampleSource], AddedSource]) -> None:
        """Pass a window to the store."""
        name = self._notes.name
        self._additions.append(
            add(self._seen_files.watch(iter(window.frames), self._notes), SampleSource(name, origin=name))
        )

    def summary(
        self,
        started: datetime,
        finished: datetime,
        metrics: ServerMetrics,
        totals: WrittenTotals | None,
        store: SampleStore,
    ) -> IngestSummary:
        """Summarize the ingest. Raises ``NoSamplesError`` without samples, ``InputError`` if no series can be used."""
        samples = sum(entry.samples for entry in self._additions)
        if not samples and self.failure is None:
            raise self._no_metrics(metrics)
        first = min((entry.first_ms for entry in self._additions if entry.first_ms is not None), default=None)
        last = max((entry.last_ms for entry in self._additions if entry.last_ms is not None), default=None)
        notes = self._notes
        warned = [(f"warned: {text}", times) for text, times in self._client.warnings.items()]
        outcome = FileOutcome(
            notes.name,
            "taken",
            format="prometheus-api",
            samples=samples,
            first=None if first is None else _moment(first),
            last=None if last is None else _moment(last),
            problems=tuple(notes.problems),
            problem_count=notes.problem_count,
            unknown=tuple(notes.unknown.most_common()),
            decisions=(*notes.decisions.items(), *warned),
            started=started,
            finished=finished,
        )
        steps = (
            sampling_steps(store, outcome.first, outcome.last, self._seen_files.devices) if totals is not None else ()
        )
        return IngestSummary(
            files=(outcome,),
            samples=samples,
            new=totals.new if totals else 0,
            duplicates=totals.duplicates if totals else 0,
            devices=len(self._seen_files.devices),
            nodes=len(self._seen_files.nodes),
            first=outcome.first,
            last=outcome.last,
            steps_s=steps,
            dry_run=totals is None,
        )

    def _no_metrics(self, metrics: ServerMetrics) -> AffinodeError:
        notes, question = self._notes, self._reader.question
        span = f"from {utc(_moment(question.since_ms))} to {utc(_moment(question.until_ms))}"
        if notes.problem_count:
            return InputError(
                f"none of its {notes.problem_count} series can be used: {notes.problems[0].reason}", where=notes.name
            )
        matching = _shown(question.matchers)
        if metrics.other_metrics:
            has = f" (it has {', '.join(metrics.other_metrics[:5])})"
            lacks = f"has no {self._of.item} that is known {span}{matching}{has}"
            return NoSamplesError(lacks, where=notes.name, hint=self._of.hint)
        lacks = f"has no {self._of.samples} {span}{matching}"
        return NoSamplesError(lacks, where=notes.name, hint=self._of.absent)


def _shown(matchers: Sequence[object]) -> str:
    return f" that match {{{','.join(map(str, matchers))}}}" if matchers else ""


def _moment(epoch_ms: int) -> datetime:
    return datetime.fromtimestamp(epoch_ms / 1000, UTC)
