"""The nightly run: its lock, sources, sequence, and outcome. If a part fails, that is recorded and the rest is done.

The kernel releases the lock when the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Protocol
from zoneinfo import ZoneInfo

from slurm_affinode import __version__
from slurm_affinode.analysis import waste
from slurm_affinode.analysis.join import kernel
from slurm_affinode.analysis.result import WasteQuery, WasteResult
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError, InputError, UnreachableError, unwritable
from slurm_affinode.base.times import parse_span_s, utc
from slurm_affinode.db.audit import Who, ZombieLog
from slurm_affinode.db.records import ReportRecord
from slurm_affinode.db.repository import Repository
from slurm_affinode.engines.store import engine_store
from slurm_affinode.metrics.ingest import IngestSummary
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.prometheus.importer import ImportOutcome, NoSamplesError
from slurm_affinode.metrics.readers.common import ReadOptions
from slurm_affinode.pipeline import ingest, ledgers, report, report_archive, stored_accounting
from slurm_affinode.pipeline.anonymity import Anonymize, Pseudonyms
from slurm_affinode.pipeline.report import Linker
from slurm_affinode.pipeline.report_archive import Period, candidates
from slurm_affinode.pipeline.usage_pages import Summarize, UsagePages
from slurm_affinode.report.links import NO_LINKS, Links
from slurm_affinode.report.output import WrittenReport
from slurm_affinode.slurm.accounting import sacct, sacct_command
from slurm_affinode.slurm.accounting.sacct import SacctReading
from slurm_affinode.slurm.times import site_zone, zone_name


@contextlib.contextmanager
def exclusive(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock on ``path``. The file is written to and stays; a symbolic link is not followed.

    Raises ``UnreachableError`` if another process holds the lock (unless ``wait``) or the file cannot be created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise unwritable(path, error, doing="made") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            who = f" (process {holder})" if holder.isdigit() else ""
            raise UnreachableError(
                f"another nightly run is in progress{who}: it holds {path}",
                hint="nothing was done; give --wait to wait for it",
            ) from None
        with contextlib.suppress(OSError):  # only informational; the disk may be full
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Failure:
    """A part that failed; the others were done nevertheless."""

    part: str
    """``accounting``, ``GPU metrics``, ``day 2026-11-20``, ``mails``, ``job summaries``, ``index``, ..."""
    message: str
    hint: str | None = None
    exit_code: int = 2


@dataclass(frozen=True, slots=True)
class NightlyOutcome:
    """The outcome of a run."""

    now: datetime
    out: str
    """The root of the reports."""
    taken_in: tuple[str, ...] = ()
    """Ingested inputs, one line each."""
    rendered: tuple[str, ...] = ()
    """Reports that were rendered, for example ``day/2026-11-20``."""
    current: tuple[str, ...] = ()
    """Reports that were checked and are up to date."""
    empty: tuple[str, ...] = ()
    """Periods without jobs: they have no report."""
    deleted_runs: int = 0
    deleted_days: int = 0
    """Days of GPU samples."""
    deleted_serving_days: int = 0
    """Days of engine samples."""
    deleted_reports: tuple[str, ...] = ()
    deleted_audit: int = 0
    """Audit records of clean-ups."""
    published: int = 0
    """Users whose job summaries are published."""
    page_users: int = 0
    """Users with pages."""
    failures: tuple[Failure, ...] = field(default_factory=tuple)


class NightlyError(AffinodeError):
    """Parts of a run failed. The exit status is the highest among them."""

    def __init__(self, outcome: NightlyOutcome) -> None:
        super().__init__("")
        self.args = (describe_failures(outcome),)  # of several lines, whose parts are escaped
        self.outcome = outcome
        self.exit_code = max(failure.exit_code for failure in outcome.failures)


def describe_failures(outcome: NightlyOutcome) -> str:
    """Describe the failed parts with reasons and hints, and the work that was done nevertheless."""
    count = len(outcome.failures)
    lines = [f"nightly: {count} {'part' if count == 1 else 'parts'} failed"]
    for failure in outcome.failures:
        lines.append(f"  {failure.part}: {failure.message}")
        if failure.hint:
            lines.append(f"    {failure.hint}")
    report_count = len(outcome.rendered)
    reports = (
        "no report was due"
        if report_count == 0
        else f"{report_count} {'report' if report_count == 1 else 'reports'} made"
    )
    lines.append(f"The other parts were done: {reports}, in {outcome.out}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Sources:
    """The data sources. Each ingests new data and yields a message or a failure per input.

    Raises ``AffinodeError`` if it cannot continue.
    """

    accounting: Callable[[Repository, datetime, datetime], Iterable[str | Failure]]
    """Arguments: the database, the begin of the earliest report of a new database, and the present (both UTC)."""
    gpu: Callable[[Repository, datetime], Iterable[str | Failure]]
    """Arguments: the database and the present (UTC)."""
    serving: Callable[[Repository, datetime], Iterable[str | Failure]]
    """Samples of inference engines. Arguments: as for ``gpu``."""


def configured(config: Config, *, since: datetime | None = None) -> Sources:
    """Return the configured sources: sacct or files for accounting; files and Prometheus for samples.

    ``since``: query sacct from this time on, even if accounting was read before.
    """
    paths = config.nightly.accounting_paths

    def accounting(store: Repository, earliest: datetime, now: datetime) -> Iterator[str | Failure]:
        return _files(config, store, paths) if paths else _sacct(config, store, earliest, now, since)

    return Sources(
        accounting, lambda store, now: _gpu(config, store, now), lambda store, now: _serving(config, store, now)
    )


def _sacct(
    config: Config, store: Repository, earliest: datetime, now: datetime, requested: datetime | None
) -> Iterator[str | Failure]:
    overlap = timedelta(seconds=parse_span_s(config.nightly.sacct_overlap))
    since = earliest if store.last_time() is None else stored_accounting.default_since(store, now=now, overlap=overlap)
    since = min(since, now - overlap, requested or now)  # with --now, the present may be in the past
    for begin, end, content in sacct_command.in_windows(since, now, sacct_command.run_sacct):
        name = f"sacct {utc(begin)}..{utc(end)}"
        text, clusters = _take_in(config, store, content, name, zone="UTC", delimiter=sacct_command.DELIMITER)
        stored_accounting.reached(store, end, clusters)
        yield text


def _files(config: Config, store: Repository, patterns: Iterable[str]) -> Iterator[str | Failure]:
    zone = zone_name(config.cluster.timezone)
    fingerprints = store.fingerprints("sacct")
    for pattern in patterns:
        try:
            for path in expand(pattern):
                content = _content(path)
                if hashlib.sha256(content).hexdigest() in fingerprints:
                    yield f"{path}: unchanged"
                else:
                    yield _take_in(config, store, content, str(path), zone=zone)[0]
        except AffinodeError as error:
            yield Failure("accounting", str(error), error.hint, error.exit_code)


def _take_in(
    config: Config, store: Repository, content: bytes, name: str, *, zone: str, delimiter: str | None = None
) -> tuple[str, frozenset[str]]:
    """Ingest one input; return a message and the clusters in the input."""
    started = datetime.now(UTC)
    reading = SacctReading(
        cluster=config.cluster.name_or_default,
        zone=zone,
        delimiter=delimiter,
        counting=stored_accounting.counting_clusters(store),
    )
    accounting = sacct.read(content, where=name, reading=reading)
    counts = stored_accounting.ingest_accounting(
        store,
        accounting,
        source=name,
        started=started,
        finished=datetime.now(UTC),
        fingerprint=hashlib.sha256(content).hexdigest(),
    ).jobs
    text = (
        f"{name}: {accounting.jobs.height} job runs ({counts.new} new, {counts.updated} updated), "
        f"{accounting.bad_records} bad records"
    )
    return text, frozenset(accounting.jobs["cluster"].unique())


def _gpu(config: Config, store: Repository, now: datetime) -> Iterator[str | Failure]:
    if config.nightly.gpu_paths:
        yield from _gpu_files(config, store)
    if config.prometheus.url is not None:
        yield from _prometheus(config, store, now)


def _prometheus(config: Config, store: Repository, now: datetime) -> Iterator[str | Failure]:
    """Ingest new samples. A failure stops neither the other sources nor the reports."""
    options = ingest.read_options(config)
    try:
        since = ingest.next_since(store, config.prometheus, options, now)
        outcome = ingest.ingest_prometheus(config, store, since, now, options)
    except AffinodeError as error:
        yield Failure("GPU metrics", str(error), error.hint, error.exit_code)
        return
    yield from _read("GPU metrics", config, since, outcome)


def _gpu_files(config: Config, store: Repository) -> Iterator[str | Failure]:
    paths = _expanded(config.nightly.gpu_paths)
    return _outcomes("GPU metrics", ingest.ingest_gpu_samples(config, store, paths, ingest.read_options(config)))


def _expanded(patterns: Iterable[str]) -> list[str]:
    return [str(Path(pattern).expanduser()) for pattern in patterns]


def _outcomes(part: str, summary: IngestSummary) -> Iterator[str | Failure]:
    unchanged = sum(file.status == "known" for file in summary.files)
    ingested = sum(file.status == "taken" for file in summary.files)
    yield f"{ingested} files with {summary.samples} samples ({summary.new} new), {unchanged} files unchanged"
    for file in summary.failed:
        yield Failure(part, file.error or f"{file.path}: failed", file.hint)


_ENGINES = "engine metrics"


def _serving(config: Config, store: Repository, now: datetime) -> Iterator[str | Failure]:
    options = ingest.read_options(config)
    if config.nightly.serving_paths:
        paths = _expanded(config.nightly.serving_paths)
        yield from _outcomes(_ENGINES, ingest.ingest_engine_samples(config, store, options, paths=paths)[0])
    if config.prometheus.url is not None:
        yield from _engines_of_prometheus(config, store, now, options)


def _engines_of_prometheus(
    config: Config, store: Repository, now: datetime, options: ReadOptions
) -> Iterator[str | Failure]:
    try:
        since = ingest.next_since(store, config.prometheus, options, now, kind="serving")
        outcome, _ = ingest.ingest_engines_of_prometheus(config, store, since, now, options)
    except NoSamplesError:  # a server with GPU metrics need not scrape engines
        yield f"{config.prometheus.url} from {utc(since)}: no engines"
        return
    except AffinodeError as error:
        yield Failure(_ENGINES, str(error), error.hint, error.exit_code)
        return
    yield from _read(_ENGINES, config, since, outcome)


def _read(part: str, config: Config, since: datetime, outcome: ImportOutcome) -> Iterator[str | Failure]:
    summary, failure = outcome.summary, outcome.failure
    yield f"{config.prometheus.url} from {utc(since)}: {summary.samples} samples ({summary.new} new)"
    if failure is not None:
        yield Failure(part, str(failure), failure.hint, failure.exit_code)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from error


def expand(pattern: str) -> list[Path]:
    """Return the paths that match ``pattern``, sorted. Raises ``InputError`` if there are none.

    An existing path is taken literally, even if it contains wildcard characters.
    """
    path = Path(pattern).expanduser()
    if path.exists():
        return [path]
    paths = sorted(Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207 - keeps the pattern's own root
    if not paths:
        raise InputError("no such file, and no file has a name like that", where=pattern)
    return paths


Say = Callable[[str], None]
Render = Callable[[Config, Period, Path, datetime, Linker | None], WrittenReport]
Publish = Callable[[Config, Repository, SampleStore, datetime, Say], int]
"""Publishes the summaries of jobs to their owners; returns the number of users."""


class Mails(Protocol):
    """Mails about periods that have a report."""

    def due(self, store: Repository, period: Period) -> bool:
        """Return whether mails about ``period`` may be due."""

    def send(self, store: Repository, period: Period, result: Callable[[], WasteResult]) -> Iterable[str | Failure]:
        """Send those that are due and yield a message or a failure for each. Raises ``AffinodeError``."""


@dataclass(slots=True)
class _Log:
    """The progress of a run."""

    say: Say
    taken_in: list[str] = field(default_factory=list)
    rendered: list[str] = field(default_factory=list)
    current: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    deleted_reports: list[str] = field(default_factory=list)
    deleted_days: int = 0
    deleted_serving_days: int = 0
    deleted_runs: int = 0
    deleted_audit: int = 0
    published: int = 0
    page_users: int = 0
    failures: list[Failure] = field(default_factory=list)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record an exception as a failure of the part instead of raising it."""
        self.say(name)
        try:
            yield
        except AffinodeError as error:
            self.failed(Failure(name, str(error), error.hint, error.exit_code))
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            self.failed(Failure(name, f"{where}{error.strerror or error}"))
        except Exception as error:
            self.failed(Failure(name, f"a fault in slurm-affinode: {type(error).__name__}: {error}", _place(error)))

    def failed(self, failure: Failure) -> None:
        """Record ``failure``."""
        self.failures.append(failure)
        self.say(f"  failed: {failure.message}")

    def took(self, news: Iterable[str | Failure]) -> None:
        """Record the messages and failures of inputs as they are read."""
        for item in news:
            if isinstance(item, Failure):
                self.failed(item)
            else:
                self.taken_in.append(item)
                self.say(f"  {item}")


@dataclass(frozen=True, slots=True)
class _Keep:
    """Retention: data before these times is deleted."""

    samples: datetime
    jobs: datetime
    reports: datetime
    audit: datetime

    @classmethod
    def of(cls, config: Config, now: datetime) -> _Keep:
        keys = config.nightly
        spans = (keys.keep_samples, keys.keep_jobs, keys.keep_reports, keys.keep_audit)
        return cls(*(now - timedelta(seconds=parse_span_s(span)) for span in spans))


def _query(config: Config, period: Period | ReportRecord) -> WasteQuery:
    zone = site_zone(config.cluster.timezone)
    thresholds, working = report.thresholds(config), report.working_time(config)
    return WasteQuery(period.since, period.until, thresholds=thresholds, zone=zone, working=working)


def render(
    config: Config,
    period: Period,
    out: Path,
    now: datetime,
    link: Linker | None = None,
    *,
    fold: waste.Fold = kernel.run_all,
    anonymize: Anonymize | None = None,
) -> WrittenReport:
    """Render the report of ``period`` into ``out``. Raises ``NoAccountingError`` if no job ran."""
    title = f"GPU waste, {period.kind} {period.label}"
    options = report.ReportOptions(title=title, csv=True, computed_periods=1)
    return report.build_report(
        config, _query(config, period), out, options=options, now=now, fold=fold, link=link, anonymize=anonymize
    )


def run(
    config: Config,
    sources: Sources,
    *,
    out: Path,
    now: datetime,
    force: bool = False,
    say: Say = lambda _: None,
    render: Render = render,
    publish: Publish | None = None,
    mails: Mails | None = None,
    since: datetime | None = None,
    summarize: Summarize | None = None,
    pseudonyms: Pseudonyms | None = None,
) -> NightlyOutcome:
    """Do everything that is due at ``now``; reports are written below ``out``. The caller holds the lock.

    ``force`` renders reports even if they are up to date. ``publish`` is called where ``nightly.jobs.directory`` is
    set; ``summarize`` makes the contents of pages of jobs where ``nightly.pages.directory`` is set. ``mails`` is called
    for each report. ``since``: also render missing reports of periods from this time on. ``pseudonyms`` are those of
    ``render``, if it replaces names; the pages of users, for themselves, and mails have their names. Raises
    ``AffinodeError`` only if nothing can be done: the database cannot be opened, or the time zone is unknown.
    """
    zone = site_zone(config.cluster.timezone)
    keep = _Keep.of(config, now)
    with Repository.open(config.db_url) as store, contextlib.closing(SampleStore(config.history_dir)) as history:
        pages = None
        if summarize is not None and config.nightly.pages.directory is not None:
            pages = UsagePages(config, store, history, out, now, summarize, say)
            if pseudonyms is not None:
                pages.shown = pseudonyms.of
        night = _Night(
            config, store, history, out, now, since, keep, render, force, mails, _Log(say), pages, pseudonyms
        )  # fmt: skip
        night.take_in(sources, zone)
        night.report(zone)
        if pages is not None:
            with night.log.part("pages"):
                night.publish_pages(pages)
        if publish is not None and config.nightly.jobs.directory is not None:
            with night.log.part("job summaries"):
                night.log.published = publish(config, store, history, now, say)
        night.clear()
        with night.log.part("index"):
            report_archive.write_index(out, store.reports(), now, zone=zone, force=force)
    return night.outcome()


@dataclass(frozen=True, slots=True)
class _Night:
    """One nightly run."""

    config: Config
    store: Repository
    history: SampleStore
    out: Path
    now: datetime
    since: datetime | None
    keep: _Keep
    render: Render
    force: bool
    mails: Mails | None
    log: _Log
    pages: UsagePages | None
    pseudonyms: Pseudonyms | None

    def take_in(self, sources: Sources, zone: ZoneInfo) -> None:
        """Ingest accounting since it was last read, the ledgers of suspensions, and samples of GPUs and engines."""
        with self.log.part("accounting"):
            earliest = min(period.since for period in candidates(self.now, zone, (), since=self.since))
            self.log.took(sources.accounting(self.store, earliest, self.now))
        with self.log.part("suspensions"):
            for intake in ledgers.configured(self.config, self.store, unread=lambda line: self.log.took((line,))):
                changed = 0 if intake.counts is None else intake.counts.new + intake.counts.updated
                self.log.took((f"{intake.source}: {intake.entries} lines, {changed} new or updated",))
        with self.log.part("GPU metrics"):
            self.log.took(sources.gpu(self.store, self.now))
        with self.log.part(_ENGINES):
            self.log.took(sources.serving(self.store, self.now))

    def report(self, zone: ZoneInfo) -> None:
        """Render the reports that are due."""
        rendered: dict[tuple[str, str], ReportRecord] = {}
        with self.log.part("reports"):
            records = [record for record in self.store.reports() if report_archive.holds(self.out, record.path)]
            rendered = {(record.period, record.label): record for record in records}
        thinned = max(self.keep.samples, self.keep.jobs)
        since = None if self.since is None else max(self.since, thinned)
        due = candidates(self.now, zone, rendered, since=since)
        newest = {period.kind: period for period in due}
        for period in due:
            record = rendered.get((period.kind, period.label))
            # Once retention has deleted data of a period, its report would lose data if it were rendered again.
            result = None
            if record is None or self.force or period.since >= thinned:
                with self.log.part(f"{period.kind} {period.label}"):
                    result = self._make(period, record, newest=newest[period.kind] is period)
            if result is not None or record is not None:
                self._mail(period, result)

    def _mail(self, period: Period, result: WasteResult | None) -> None:
        if self.mails is None or not self.mails.due(self.store, period):
            return
        with self.log.part("mails"):

            def figures() -> WasteResult:
                if result is not None and self.pseudonyms is None:
                    return result
                return report.analyse_stored(self.config, _query(self.config, period), now=self.now)

            self.log.took(self.mails.send(self.store, period, figures))

    def publish_pages(self, pages: UsagePages) -> None:
        """Make the pages of users and accounts from the newest report of each kind, and delete expired ones."""
        newest = {record.period: record for record in self.store.reports()}
        available = [record for record in newest.values() if report_archive.holds(self.out, record.path)]
        self.log.page_users = pages.finish(
            available, lambda record: report.analyse_stored(self.config, _query(self.config, record), now=self.now)
        )

    def _link(self, pages: UsagePages, period: Period, newest: bool, result: WasteResult) -> Links:
        """Make the pages of a report; without them, the report has no links."""
        links: list[Links] = []
        with self.log.part(f"pages of {period.kind} {period.label}"):
            links.append(pages.publish(period, result, newest=newest))
        return links[0] if links else NO_LINKS

    def _make(self, period: Period, record: ReportRecord | None, *, newest: bool) -> WasteResult | None:
        """Render a report unless it is up to date; return its figures, ``None`` if nothing was rendered."""
        fingerprint = self._fingerprint(period)
        if record is not None and record.fingerprint == fingerprint and not self.force:
            self.log.current.append(period.path)
            self.log.say("  current")
            return None
        link = None if self.pages is None else partial(self._link, self.pages, period, newest)
        try:
            written = self.render(self.config, period, self.out / period.path, self.now, link)
        except stored_accounting.NoAccountingError:
            self.log.empty.append(period.path)
            self.log.say("  no job ran")
            return None
        self.store.record_report(
            ReportRecord(
                period=period.kind,
                label=period.label,
                since=period.since,
                until=period.until,
                path=period.path,
                rendered=self.now,
                fingerprint=fingerprint,
                summary=report_archive.headline(written.summary),
            )
        )
        self.log.rendered.append(period.path)
        self.log.say(f"  {written.report}")
        if written.result.accounting_note:
            self.log.say(f"  {written.result.accounting_note}")
        return written.result

    def _fingerprint(self, period: Period) -> str:
        """Return a fingerprint of all inputs of a report: accounting, samples, settings, program version."""
        parts = [part.entry.name for part in self.history.parts(period.since, period.until)]
        with contextlib.closing(engine_store(self.config.serving_dir)) as serving:
            parts += [part.entry.name for part in serving.parts(period.since, period.until)]
        facts = self.store.fingerprint(period.since, period.until)
        known_until = stored_accounting.with_known(
            WasteQuery(period.since, period.until), self.store, self.now
        ).known_until
        ends = sorted((name, min(moment, period.until)) for name, moment in known_until.items())
        floors = sorted(self.config.agent.floors_pct.items())
        pages = None if self.pages is None else self.config.nightly.pages
        anonymous = None if self.pseudonyms is None else self.pseudonyms.fingerprint
        settings = (
            self.config.idle, floors, self.config.price, self.config.emissions, self.config.cluster.timezone, pages,
            anonymous, self.config.report,
        )  # fmt: skip
        content = repr((facts, parts, ends, settings, __version__))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def clear(self) -> None:
        """Delete reports, GPU and engine samples, accounting and audit records that are older than their retention."""
        log = self.log
        with log.part("retention of reports"):
            for record in self.store.reports():
                if record.until < self.keep.reports:
                    report_archive.remove(self.out, record)
                    self.store.delete_reports([record])
                    log.deleted_reports.append(record.path)
        with log.part("retention of GPU samples"):
            self.history.close()  # open files would keep their disk space
            log.deleted_days = len(self.history.delete_before(self.keep.samples.date()))
        with log.part("retention of engine samples"), contextlib.closing(
            engine_store(self.config.serving_dir)
        ) as serving:  # fmt: skip
            log.deleted_serving_days = len(serving.delete_before(self.keep.samples.date()))
        with log.part("retention of accounting"):
            log.deleted_runs = self.store.delete_before(self.keep.jobs)
        with log.part("retention of the audit"):
            zombies = ZombieLog(self.store.engine)
            log.deleted_audit = zombies.prune(self.keep.audit, Who.am_i(), self.now, "nightly.keep_audit")
        days = f"{log.deleted_days} days of GPU samples, {log.deleted_serving_days} days of engine samples"
        log.say(
            f"  deleted: {len(log.deleted_reports)} reports, {days}, {log.deleted_runs} job runs, "
            f"{log.deleted_audit} records of the audit"
        )

    def outcome(self) -> NightlyOutcome:
        """Return the outcome of the run."""
        log = self.log
        return NightlyOutcome(
            now=self.now,
            out=str(self.out),
            taken_in=tuple(log.taken_in),
            rendered=tuple(log.rendered),
            current=tuple(log.current),
            empty=tuple(log.empty),
            deleted_runs=log.deleted_runs,
            deleted_audit=log.deleted_audit,
            deleted_days=log.deleted_days,
            deleted_serving_days=log.deleted_serving_days,
            deleted_reports=tuple(log.deleted_reports),
            published=log.published,
            page_users=log.page_users,
            failures=tuple(log.failures),
        )


def _place(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"at {Path(last.filename).name}:{last.lineno}; please report it"
