"""Ingest of accounting, GPU samples, Prometheus and suspension ledgers.

Each input is one transaction with one entry in the ingest journal. ``slurm-affinode ingest`` and ``nightly`` share this
module and only add their output.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from zoneinfo import ZoneInfo

import polars as pl

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.base.config import Config, PrometheusConfig
from slurm_affinode.base.errors import AffinodeError, InputError
from slurm_affinode.base.times import epoch_ms, named, parse_span_s, parse_when, shown, utc
from slurm_affinode.db.records import Counts, IngestProblem, IngestRecord, Upserted
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics import aliases
from slurm_affinode.metrics.ingest import FileOutcome, IngestSummary, ingest_files
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.prometheus.client import Client
from slurm_affinode.metrics.prometheus.importer import ImportOutcome, ingest
from slurm_affinode.metrics.prometheus.queries import Question, discover, parse_matchers
from slurm_affinode.metrics.prometheus.server import Server
from slurm_affinode.metrics.readers.common import ReadOptions
from slurm_affinode.metrics.readers.local_time import local_zone
from slurm_affinode.metrics.serving import ingest as serving
from slurm_affinode.metrics.serving import prometheus as serving_prometheus
from slurm_affinode.metrics.serving.ingest import EngineTotals
from slurm_affinode.metrics.serving.store import engine_store
from slurm_affinode.model.ledger import LedgerEntry, decode
from slurm_affinode.slurm.accounting.schema import Accounting


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
            for outcome in outcomes:
                repository.record_ingest(journal_entry(outcome, now()))

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
            for outcome in outcomes:
                repository.record_ingest(journal_entry(outcome, now(), kind="serving"))

    with closing(engine_store(config.serving_dir)) as store:
        if not paths:
            found = serving.ingest_scrapes(store, urls, options, dry_run=dry_run, now=now)
            if not dry_run:
                landed(found[0].files)
            return found
        found = serving.ingest_files(
            store, paths, options, format=format, address=address, again=again, dry_run=dry_run, advance=advance,
            on_landed=landed,
        )  # fmt: skip
    if not dry_run:
        landed(found[0].failed)
    return found


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


_COUNTING = "accounting.gpu_clusters"
_UNTIL = "accounting.until"
_ASKED = "accounting.asked"
"""Key of a mapping: cluster -> end of the time queried with sacct."""
_STAND_INS = "accounting.stand_ins"
"""Key that is set once a stand-in for a raw ID was stored: only then stand-ins are searched for."""
_SHOWN_DECISIONS = 20


class NoAccountingError(AffinodeError):
    """No job ran in the requested interval, or the filters exclude all of them."""


FIRST_SPAN = timedelta(days=7)
"""How far back the first ingest of accounting or Prometheus goes."""


def counting_clusters(repository: Repository) -> frozenset[str]:
    """Return the clusters known from earlier inputs to count GPUs in accounting."""
    return frozenset(json.loads(repository.get(_COUNTING) or "[]"))


def ingest_accounting(
    repository: Repository,
    accounting: Accounting,
    *,
    source: str,
    started: datetime,
    finished: datetime,
    fingerprint: str | None = None,
) -> Upserted:
    """Store ``accounting``, jobs and steps in one transaction, and record it in the journal.

    Content that was ingested before (``fingerprint``) and changes nothing is not recorded again.
    """
    accounting = _raw_ids(repository, accounting)
    stored = repository.upsert(accounting.jobs, accounting.steps)
    known = counting_clusters(repository)
    if accounting.gpu_clusters - known:
        repository.set(_COUNTING, json.dumps(sorted(known | accounting.gpu_clusters)))
    total = stored.jobs + stored.steps
    if total.new + total.updated == 0 and fingerprint is not None and fingerprint in repository.fingerprints("sacct"):
        # The bad records of this content are already in the journal.
        return stored
    first, last = span(accounting.jobs)
    repository.record_ingest(
        IngestRecord(
            kind="sacct",
            source=source,
            started=started,
            finished=finished,
            records=accounting.records - accounting.bad_records,
            new=total.new,
            updated=total.updated,
            unchanged=total.unchanged,
            bad=accounting.bad_records,
            problems=tuple(IngestProblem(str(problem), problem.line) for problem in accounting.problems),
            notes=(*accounting.notes, *(str(one) for one in accounting.decisions[:_SHOWN_DECISIONS])),
            fingerprint=fingerprint,
            first=first,
            last=last,
        )
    )
    return stored


def _raw_ids(repository: Repository, accounting: Accounting) -> Accounting:
    """Replace stand-ins by raw IDs, so that an array task that inputs name by either is stored once.

    The raw ID wins, whichever was ingested first.
    """
    made_up = bool((accounting.jobs["job_id"] < 0).any())
    if not made_up and repository.get(_STAND_INS) is None:
        return accounting
    task = ["cluster", "array_job_id", "array_task_id", "submit"]
    tasks = accounting.jobs.select("job_id", "start", *task).drop_nulls()
    if tasks.is_empty():
        return accounting
    first, last = tasks.select(pl.col("start").min(), pl.col("start").max().alias("last")).row(0)
    known = repository.jobs(first, last + timedelta(seconds=1), columns=["job_id", *task])
    pairs = tasks.join(known.rename({"job_id": "stored"}), on=task).filter(pl.col("job_id") != pl.col("stored"))
    outdated = pairs.filter(pl.col("stored") < 0)
    repository.delete_runs(list(outdated.select("cluster", "stored", "submit").iter_rows()))
    if not made_up:
        return accounting
    repository.set(_STAND_INS, "1")
    real = pairs.filter(pl.col("job_id") < 0).select("cluster", "job_id", "stored").unique(["cluster", "job_id"])
    jobs, steps = (_renumbered(frame, real) for frame in (accounting.jobs, accounting.steps))
    return replace(accounting, jobs=jobs, steps=steps)


def _renumbered(frame: pl.DataFrame, real: pl.DataFrame) -> pl.DataFrame:
    joined = frame.join(real, on=["cluster", "job_id"], how="left", maintain_order="left")
    return joined.with_columns(pl.coalesce("stored", "job_id").alias("job_id")).select(frame.columns)


def span(jobs: pl.DataFrame) -> tuple[datetime | None, datetime | None]:
    """Return the first start and the last start or end in ``jobs``."""
    row = jobs.select(
        first=pl.col("start").min(), last=pl.max_horizontal(pl.col("start").max(), pl.col("end").max())
    ).row(0)
    return row[0], row[1]


def default_since(repository: Repository, *, now: datetime, overlap: timedelta) -> datetime:
    """Return where to continue: ``overlap`` before the end of the last query or else of the last job, or 7 days ago.

    sacct returns every job that was in the system at any time of the interval, including those that started earlier.
    """
    until = repository.get(_UNTIL)
    if until is not None:
        return datetime.fromisoformat(until) - overlap
    last = repository.counts().last
    return (min(last, now) - overlap) if last is not None else now - FIRST_SPAN


def with_known(query: WasteQuery, repository: Repository, now: datetime) -> WasteQuery:
    """Return ``query`` with the time up to which accounting of each cluster is known.

    That is the latest time in its records or the end of the last query with sacct, whichever is later. Ingesting an old
    file today does not make its accounting current.
    """
    known = repository.newest_times()
    asked, until = repository.get(_ASKED), repository.get(_UNTIL)
    if asked is not None:
        moments = {name: datetime.fromisoformat(text) for name, text in json.loads(asked).items()}
    else:  # a database of an earlier release, which did not record the cluster
        moments = {} if until is None else dict.fromkeys(known, datetime.fromisoformat(until))
    for name, moment in moments.items():
        known[name] = max(moment, known.get(name, moment))
    return replace(query, known_until={name: min(moment, now) for name, moment in known.items()})


def check_known(query: WasteQuery, jobs: pl.DataFrame, now: datetime) -> None:
    """Raise ``NoAccountingError`` if accounting of every cluster with ``jobs`` ends before the interval."""
    clusters = query.clusters or jobs["cluster"].unique().to_list() or tuple(query.known_until)
    ends = [query.known_until[name] for name in clusters if name in query.known_until]
    if ends and max(ends) <= query.since and max(ends) < now:
        raise NoAccountingError(
            f"there is no accounting from {shown(query.since, query.zone)} to {named(query.until, query.zone)}: "
            f"it is known up to {named(max(ends), query.zone)}",
            hint="ingest it first: slurm-affinode ingest sacct; or choose an earlier --since",
        )


def reached(repository: Repository, until: datetime, clusters: Iterable[str] = ()) -> None:
    """Record that sacct was queried up to ``until`` and returned jobs of ``clusters``."""
    before = repository.get(_UNTIL)
    if before is None or datetime.fromisoformat(before) < until:
        repository.set(_UNTIL, until.astimezone(UTC).isoformat())
    asked = json.loads(repository.get(_ASKED) or "{}")
    # A response without jobs names no cluster: if only one is known, it is that one.
    clusters = {*clusters} or (only if len(only := {*repository.newest_times()}) == 1 else set())
    late = {name for name in clusters if name not in asked or datetime.fromisoformat(asked[name]) < until}
    if late:
        repository.set(_ASKED, json.dumps(asked | dict.fromkeys(sorted(late), until.astimezone(UTC).isoformat())))


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
    asked = question(config.prometheus, since, until)
    server = client or Client(Server.of(config.prometheus))
    with closing(SampleStore(config.history_dir)) as store:
        outcome = ingest(store, server, asked, options, dry_run=dry_run, advance=advance)
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
    asked = question(config.prometheus, since, until)
    server = client or Client(Server.of(config.prometheus))
    totals = EngineTotals()
    reader = serving_prometheus.server_reader(totals)
    with closing(engine_store(config.serving_dir)) as store:
        outcome = ingest(store, server, asked, options, dry_run=dry_run, advance=advance, reader=reader)
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
        return now - FIRST_SPAN
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
    asked = question(settings, since - MARGIN, until + MARGIN)
    server = client or Client(Server.of(settings))
    with (
        TemporaryDirectory(prefix="slurm-affinode-") as directory,
        closing(SampleStore(Path(directory) / "history")) as history,
    ):
        outcome = ingest(history, server, asked, options, advance=advance)
        if outcome.failure is not None:
            raise outcome.failure
        for file in outcome.summary.files:
            for what, count in file.decisions:
                warned(f"{file.path}: {count:,} {what}")
        yield history


def look(settings: PrometheusConfig, options: ReadOptions, now: datetime, client: Client | None = None) -> Present:
    """Query the server and return its GPU metrics. Raises ``AffinodeError``."""
    server = client or Client(Server.of(settings), attempts=2)
    server.instant("vector(1)", epoch_ms(now))
    return Present(server.server.url, discover(server, question(settings, now - _RECENT, now), options).names)


@dataclass(frozen=True, slots=True)
class LedgerIntake:
    """The outcome of ingesting one ledger."""

    source: str
    entries: int
    counts: Counts | None
    """``None``: nothing was stored (a dry run)."""
    problems: tuple[IngestProblem, ...] = ()


def ledgers(path: Path) -> list[Path]:
    """Return the ledgers in a directory, or the single file. Raises ``InputError``."""
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            return [path]
        # glob() returns nothing, without an error, for an unreadable directory.
        found = (path / name for name in os.listdir(path) if name.endswith(".jsonl"))  # noqa: PTH208
        return sorted(one for one in found if one.is_file())
    except FileNotFoundError as error:
        raise InputError(
            "no such file or directory", where=str(path), hint="give the directory of the ledgers"
        ) from error
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from error


def read(path: Path) -> tuple[list[LedgerEntry], list[IngestProblem], str]:
    """Return the entries of a ledger, its bad lines, and its fingerprint. Raises ``InputError``.

    An incomplete last line is skipped: it is being written.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from error
    whole = data[: data.rfind(b"\n") + 1]
    entries, problems = [], []
    for number, line in enumerate(whole.decode("utf-8", "replace").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entries.append(decode(line))
        except ValueError as error:
            problems.append(IngestProblem(str(error), number))
    return entries, problems, hashlib.sha256(whole).hexdigest()


def ingest_ledgers(store: Repository | None, path: Path) -> list[LedgerIntake]:
    """Ingest the ledgers at ``path``; known entries are no-ops. If ``store`` is ``None`` they are only read."""
    return [_take_in(store, one) for one in ledgers(path)]


def _take_in(store: Repository | None, path: Path) -> LedgerIntake:
    started = datetime.now(UTC)
    entries, problems, fingerprint = read(path)
    if store is None:
        return LedgerIntake(str(path), len(entries), None, tuple(problems))
    if fingerprint in store.fingerprints("suspensions"):
        return LedgerIntake(str(path), len(entries), Counts(unchanged=len(entries)), tuple(problems))
    counts = store.upsert_suspensions(entries)
    store.record_ingest(
        IngestRecord(
            kind="suspensions",
            source=str(path),
            started=started,
            finished=datetime.now(UTC),
            records=len(entries),
            new=counts.new,
            updated=counts.updated,
            unchanged=counts.unchanged,
            bad=len(problems),
            problems=tuple(problems),
            fingerprint=fingerprint,
        )
    )
    return LedgerIntake(str(path), len(entries), counts, tuple(problems))


def configured(
    config: Config, store: Repository, *, unread: Callable[[str], None] = lambda line: None
) -> list[LedgerIntake]:
    """Ingest the ledgers of the configured directory; none if it is not set or does not exist.

    Ledgers that this user may not read are reported to ``unread`` and skipped: agents write as root, by default into a
    directory of root's, and reports are possible without them. Raises ``InputError`` for other errors.
    """
    found: list[LedgerIntake] = []
    paths: list[Path] = []
    if config.ledger_dir is not None:
        with _allowed(unread):
            paths = ledgers(config.ledger_dir)
    for path in paths:
        with _allowed(unread):
            found.append(_take_in(store, path))
    return found


@contextlib.contextmanager
def _allowed(unread: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        if isinstance(error.__cause__, PermissionError):
            unread(f"{error}: its entries are missing; suspend.ledger may name a directory that others can read")
        elif not isinstance(error.__cause__, FileNotFoundError):
            raise
