"""Ingest of GPU samples and engine metrics, from files and Prometheus.

Each input is one transaction with one entry in the ingest journal. ``slurm-affinode ingest`` and ``nightly`` share this
module and only add their output.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from zoneinfo import ZoneInfo

from slurm_affinode.base.config import Config, PrometheusConfig
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.times import epoch_ms, parse_span_s, parse_when, utc
from slurm_affinode.db.records import IngestProblem, IngestRecord
from slurm_affinode.db.repository import Repository
from slurm_affinode.engines import ingest as serving
from slurm_affinode.engines import prometheus as serving_prometheus
from slurm_affinode.engines.ingest import EngineTotals
from slurm_affinode.engines.store import engine_store
from slurm_affinode.metrics import aliases
from slurm_affinode.metrics.ingest import FileOutcome, IngestSummary, ingest_files
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.prometheus.client import Client
from slurm_affinode.metrics.prometheus.importer import ImportOutcome, ingest
from slurm_affinode.metrics.prometheus.queries import Question, discover, parse_matchers
from slurm_affinode.metrics.prometheus.server import Server
from slurm_affinode.metrics.readers.common import ReadOptions
from slurm_affinode.metrics.readers.local_time import local_zone
from slurm_affinode.pipeline import stored_accounting


def read_options(
    config: Config,
    *,
    cluster: str | None = None,
    node: str | None = None,
    zone: str | None = None,
    start: str | None = None,
    interval_s: float | None = None,
    fields: Sequence[str] = (),
    strict: bool = False,
) -> ReadOptions:
    """Return the options for reading files: those given, else those of the configuration.

    ``start`` is a time as users type it; without a zone it is in ``zone``, like the times in the files. Raises
    ``ConfigError``, and ``AffinodeError`` for an invalid zone or time.
    """
    of_times = _zone(zone or config.cluster.timezone)
    of_start = of_times or local_zone()
    return ReadOptions(
        aliases=aliases.load(config.gpu_history.aliases, config.gpu_history.columns),
        cluster=cluster,
        default_cluster=config.cluster.name_or_default,
        node=node,
        zone=of_times,
        start=parse_when(start, now=datetime.now(UTC), zone=of_start) if start is not None else None,
        interval_s=interval_s,
        fields=tuple(fields),
        strict=strict,
    )


def _zone(name: str | None) -> ZoneInfo | None:
    if name is None:
        return None
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise AffinodeError(f"{name!r} is not a time zone", hint="write for example UTC or Europe/Oslo") from None


def ingest_gpu_samples(
    config: Config,
    repository: Repository | None,
    paths: Sequence[str | Path],
    options: ReadOptions,
    *,
    format: str | None = None,
    again: bool = False,
    dry_run: bool = False,
    advance: Callable[[int], None] = lambda count: None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> IngestSummary:
    """Ingest the samples in ``paths`` into the sample store; with a ``repository``, record the files in its journal.

    A file is recorded once its samples are durable, failed files at the end with the reason. Files that were ingested
    before and have not changed are not recorded again.
    """

    def landed(outcomes: Sequence[FileOutcome]) -> None:
        if repository is not None:
            repository.record_ingests([journal_entry(outcome, now()) for outcome in outcomes])

    store = SampleStore(config.history_dir)
    summary = ingest_files(
        store, paths, options, format=format, again=again, dry_run=dry_run, advance=advance, on_landed=landed, now=now
    )  # fmt: skip
    if not dry_run:
        landed(summary.failed)
    return summary


def ingest_engine_samples(
    config: Config,
    repository: Repository | None,
    options: ReadOptions,
    *,
    paths: Sequence[str | Path] = (),
    urls: Sequence[str] = (),
    format: str | None = None,
    address: str | None = None,
    again: bool = False,
    dry_run: bool = False,
    advance: Callable[[int], None] = lambda count: None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> tuple[IngestSummary, EngineTotals]:
    """Ingest engine metrics from ``paths``, or else by a scrape of ``urls``; see ``ingest_gpu_samples``."""

    def landed(outcomes: Sequence[FileOutcome]) -> None:
        if repository is not None:
            repository.record_ingests([journal_entry(outcome, now(), kind="serving") for outcome in outcomes])

    with closing(engine_store(config.serving_dir)) as store:
        if not paths:
            summary, totals = serving.ingest_scrapes(store, urls, options, dry_run=dry_run, now=now)
            if not dry_run:
                landed(summary.files)
            return summary, totals
        summary, totals = serving.ingest_files(
            store, paths, options, format=format, address=address, again=again, dry_run=dry_run, advance=advance,
            on_landed=landed,
        )  # fmt: skip
    if not dry_run:
        landed(summary.failed)
    return summary, totals


def journal_entry(outcome: FileOutcome, moment: datetime, *, kind: str = "gpu") -> IngestRecord:
    """Return the journal entry of a file or server; ``moment`` replaces unknown times."""
    problems = [IngestProblem(problem.reason, problem.line) for problem in outcome.problems]
    if outcome.error is not None:
        problems.append(IngestProblem(outcome.error))
    notes = [f"{what}: {count:,}" for what, count in outcome.decisions]
    if outcome.unknown:
        notes.append(f"not used: {', '.join(name for name, _ in outcome.unknown[:20])}")
    return IngestRecord(
        kind=kind,
        source=outcome.path,
        started=outcome.started or moment,
        finished=outcome.finished or moment,
        records=outcome.samples,
        bad=outcome.problem_count + (outcome.error is not None and not outcome.problem_count),
        problems=tuple(problems),
        notes=tuple(notes),
        fingerprint=outcome.fingerprint,
        first=outcome.first,
        last=outcome.last,
    )


MARGIN = timedelta(minutes=10)
"""Time read on each side of a report's interval: the neighbors of a sample decide how long it counts."""
_RECENT = timedelta(minutes=15)
_REACHED = "prometheus.until."


@dataclass(frozen=True, slots=True)
class Present:
    """The usable metrics of a server in the last minutes."""

    url: str
    names: tuple[str, ...]
    """Names of the metrics."""


def question(settings: PrometheusConfig, since: datetime, until: datetime) -> Question:
    """Return the query for an interval. Raises ``AffinodeError`` for invalid matchers, steps and intervals."""
    if until <= since:
        raise AffinodeError(
            f"the interval ends ({utc(until)}) before it begins ({utc(since)})",
            hint="choose --since before --until",
        )
    step_ms = None if settings.step is None else round(parse_span_s(settings.step) * 1000)
    if step_ms is not None and step_ms < 100:
        raise AffinodeError(f"a step of {settings.step} is too short", hint="write for example --step 30s")
    return Question(epoch_ms(since), epoch_ms(until), parse_matchers(settings.match), step_ms)


def ingest_prometheus(
    config: Config,
    repository: Repository | None,
    since: datetime,
    until: datetime,
    options: ReadOptions,
    *,
    dry_run: bool = False,
    advance: Callable[[int], None] = lambda milliseconds: None,
    client: Client | None = None,
) -> ImportOutcome:
    """Ingest samples from Prometheus into the sample store; with a ``repository``, record that in its journal.

    Raises ``AffinodeError`` if nothing could be read; a later failure is part of the outcome.
    """
    request = question(config.prometheus, since, until)
    server = client or Client(Server.of(config.prometheus))
    with closing(SampleStore(config.history_dir)) as store:
        outcome = ingest(store, server, request, options, dry_run=dry_run, advance=advance)
    if not dry_run:
        _record(repository, config.prometheus, options, since, outcome, kind="gpu")
    return outcome


def ingest_engines_of_prometheus(
    config: Config,
    repository: Repository | None,
    since: datetime,
    until: datetime,
    options: ReadOptions,
    *,
    dry_run: bool = False,
    advance: Callable[[int], None] = lambda milliseconds: None,
    client: Client | None = None,
) -> tuple[ImportOutcome, EngineTotals]:
    """Ingest engine metrics from Prometheus; see ``ingest_prometheus``."""
    request = question(config.prometheus, since, until)
    server = client or Client(Server.of(config.prometheus))
    totals = EngineTotals()
    reader = serving_prometheus.server_reader(totals)
    with closing(engine_store(config.serving_dir)) as store:
        outcome = ingest(store, server, request, options, dry_run=dry_run, advance=advance, reader=reader)
    if not dry_run:
        _record(repository, config.prometheus, options, since, outcome, kind="serving")
    return outcome, totals


def _record(
    repository: Repository | None, settings: PrometheusConfig, options: ReadOptions, since: datetime,
    outcome: ImportOutcome, *, kind: str,
) -> None:  # fmt: skip
    """Record an ingest from Prometheus in the journal, and where the next one continues."""
    if repository is None:
        return
    for file in outcome.summary.files:
        repository.record_ingest(journal_entry(file, datetime.now(UTC), kind=kind))
    key, until = _key(settings, options, kind), min(outcome.until, datetime.now(UTC))
    before = repository.get(key)
    # An ingest that leaves a gap after the last one does not move the end.
    if before is None or since <= datetime.fromisoformat(before) < until:
        repository.set(key, until.astimezone(UTC).isoformat())


def next_since(
    repository: Repository | None, settings: PrometheusConfig, options: ReadOptions, now: datetime, *, kind: str = "gpu"
) -> datetime:
    """Return where to continue: ``overlap`` before the end of the last ingest of the same series, else 7 days ago."""
    reached = None if repository is None else repository.get(_key(settings, options, kind))
    if reached is None:
        return now - stored_accounting.FIRST_SPAN
    overlap = timedelta(seconds=parse_span_s(settings.overlap))
    return min(datetime.fromisoformat(reached), now) - overlap


def _key(settings: PrometheusConfig, options: ReadOptions, kind: str) -> str:
    facts = [settings.url, settings.match, settings.step, options.cluster, sorted(settings.headers.items())]
    # GPU metrics came first, and their keys exist in databases.
    content = json.dumps(facts if kind == "gpu" else [*facts, kind])
    return _REACHED + hashlib.sha256(content.encode()).hexdigest()[:16]


@contextmanager
def borrowed(
    settings: PrometheusConfig,
    since: datetime,
    until: datetime,
    options: ReadOptions,
    *,
    advance: Callable[[int], None] = lambda milliseconds: None,
    warned: Callable[[str], None] = lambda text: None,
    client: Client | None = None,
) -> Iterator[SampleStore]:
    """Yield a temporary sample store with the server's samples for one report; ``warned`` receives warnings.

    Raises ``AffinodeError`` also if only a part could be read: a report would show the rest as unknown time.
    """
    request = question(settings, since - MARGIN, until + MARGIN)
    server = client or Client(Server.of(settings))
    with (
        TemporaryDirectory(prefix="slurm-affinode-") as directory,
        closing(SampleStore(Path(directory) / "history")) as history,
    ):
        outcome = ingest(history, server, request, options, advance=advance)
        if outcome.failure is not None:
            raise outcome.failure
        for file in outcome.summary.files:
            for what, count in file.decisions:
                warned(f"{file.path}: {count:,} {what}")
        yield history


def probe(settings: PrometheusConfig, options: ReadOptions, now: datetime, client: Client | None = None) -> Present:
    """Query the server and return its GPU metrics. Raises ``AffinodeError``."""
    server = client or Client(Server.of(settings), attempts=2)
    server.instant("vector(1)", epoch_ms(now))
    return Present(server.server.url, discover(server, question(settings, now - _RECENT, now), options).names)
