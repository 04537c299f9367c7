"""The sequence of a nightly run. A part that fails is noted and the next one goes on."""

from __future__ import annotations

import contextlib
import hashlib
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

from slurm_affinode import __version__
from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.config import Config
from slurm_affinode.errors import AffinodeError
from slurm_affinode.history.store import SampleStore
from slurm_affinode.report.build import WrittenReport
from slurm_affinode.slurm.times import site_zone
from slurm_affinode.store.records import ReportRecord
from slurm_affinode.store.repository import Repository
from slurm_affinode.store.zombies import ZombieLog
from slurm_affinode.timespec import parse_span_s
from slurm_affinode.workflow import intake, pipeline, suspension_intake, zombie_audit
from slurm_affinode.workflow.nightly import shelf
from slurm_affinode.workflow.nightly.outcome import Failure, Outcome
from slurm_affinode.workflow.nightly.periods import Period, candidates
from slurm_affinode.workflow.nightly.sources import Sources
from slurm_affinode.workflow.zombie_tools import Who

Say = Callable[[str], None]
Render = Callable[[Config, Period, Path, datetime], WrittenReport]


@dataclass(slots=True)
class _Log:
    """What has happened so far."""

    say: Say
    taken_in: list[str] = field(default_factory=list)
    rendered: list[str] = field(default_factory=list)
    current: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    deleted_reports: list[str] = field(default_factory=list)
    deleted_days: int = 0
    deleted_runs: int = 0
    deleted_audit: int = 0
    failures: list[Failure] = field(default_factory=list)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Note a failure in place of passing it on."""
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
        """Note ``failure``."""
        self.failures.append(failure)
        self.say(f"  failed: {failure.message}")

    def took(self, news: Iterable[str | Failure]) -> None:
        """Note what inputs say of themselves, as they are read."""
        for item in news:
            if isinstance(item, Failure):
                self.failed(item)
            else:
                self.taken_in.append(item)
                self.say(f"  {item}")


@dataclass(frozen=True, slots=True)
class _Keep:
    """Times before which things go."""

    samples: datetime
    jobs: datetime
    reports: datetime
    audit: datetime

    @classmethod
    def of(cls, config: Config, now: datetime) -> _Keep:
        keys = config.nightly
        spans = (keys.keep_samples, keys.keep_jobs, keys.keep_reports, keys.keep_audit)
        return cls(*(now - timedelta(seconds=parse_span_s(span)) for span in spans))


def render(config: Config, period: Period, out: Path, now: datetime) -> WrittenReport:
    """Make the report of ``period`` in ``out``. Raises ``intake.NoAccountingError`` where no job ran."""
    zone = site_zone(config.cluster.timezone)
    query = WasteQuery(period.since, period.until, thresholds=pipeline.thresholds(config), zone=zone)
    options = pipeline.ReportOptions(title=f"GPU waste, {period.kind} {period.label}", csv=True)
    return pipeline.build_report(config, query, out, options=options, now=now)


def run(
    config: Config,
    sources: Sources,
    *,
    out: Path,
    now: datetime,
    force: bool = False,
    say: Say = lambda _: None,
    render: Render = render,
) -> Outcome:
    """Do everything that is due at ``now``; reports go below ``out``. The caller holds the lock.

    ``force`` makes reports anew that are current. Raises ``AffinodeError`` only where nothing at all can be done: the
    store does not open, the zone is unknown.
    """
    zone = site_zone(config.cluster.timezone)
    keep = _Keep.of(config, now)
    with Repository.open(config.db_url) as store, contextlib.closing(SampleStore(config.history_dir)) as history:
        night = _Night(config, store, history, out, now, keep, render, force, _Log(say))
        night.take_in(sources, zone)
        night.report(zone)
        night.clear()
        with night.log.part("index"):
            shelf.write_index(out, store.reports(), now, zone=zone, force=force)
    return night.outcome()


@dataclass(frozen=True, slots=True)
class _Night:
    """One run."""

    config: Config
    store: Repository
    history: SampleStore
    out: Path
    now: datetime
    keep: _Keep
    render: Render
    force: bool
    log: _Log

    def take_in(self, sources: Sources, zone: ZoneInfo) -> None:
        """Accounting since the last time that it could be read, and the GPU history."""
        with self.log.part("accounting"):
            earliest = min(period.since for period in candidates(self.now, zone, ()))
            self.log.took(sources.accounting(self.store, earliest, self.now))
        with self.log.part("suspensions"):
            for one in suspension_intake.configured(
                self.config, self.store, unread=lambda line: self.log.took((line,))
            ):
                changed = 0 if one.counts is None else one.counts.new + one.counts.updated
                self.log.took((f"{one.source}: {one.entries} lines, {changed} new or updated",))
        with self.log.part("GPU history"):
            self.log.took(sources.gpu(self.store, self.now))

    def report(self, zone: ZoneInfo) -> None:
        """Make the reports that are due."""
        there: dict[tuple[str, str], ReportRecord] = {}
        with self.log.part("reports"):
            records = [record for record in self.store.reports() if shelf.holds(self.out, record.path)]
            there = {(record.period, record.label): record for record in records}
        thinned = max(self.keep.samples, self.keep.jobs)
        for period in candidates(self.now, zone, there):
            record = there.get((period.kind, period.label))
            # Where retention has taken data away, making a report anew would only make it poorer.
            if record is None or self.force or period.since >= thinned:
                with self.log.part(f"{period.kind} {period.label}"):
                    self._make(period, record)

    def _make(self, period: Period, record: ReportRecord | None) -> None:
        fingerprint = self._fingerprint(period)
        if record is not None and record.fingerprint == fingerprint and not self.force:
            self.log.current.append(period.path)
            self.log.say("  current")
            return
        try:
            written = self.render(self.config, period, self.out / period.path, self.now)
        except intake.NoAccountingError:
            self.log.empty.append(period.path)
            self.log.say("  no job ran")
            return
        self.store.record_report(
            ReportRecord(
                period=period.kind,
                label=period.label,
                since=period.since,
                until=period.until,
                path=period.path,
                rendered=self.now,
                fingerprint=fingerprint,
                summary=shelf.headline(written.summary),
            )
        )
        self.log.rendered.append(period.path)
        self.log.say(f"  {written.report}")
        if written.result.accounting_note:
            self.log.say(f"  {written.result.accounting_note}")

    def _fingerprint(self, period: Period) -> str:
        """Of everything that a report shows: facts, samples, settings, the program."""
        parts = [part.entry.name for part in self.history.parts(period.since, period.until)]
        facts = self.store.fingerprint(period.since, period.until)
        known = intake.with_known(WasteQuery(period.since, period.until), self.store, self.now).known_until
        ends = sorted((name, min(moment, period.until)) for name, moment in known.items())
        floors = sorted(self.config.agent.floors_pct.items())
        settings = (self.config.idle, floors, self.config.price, self.config.cluster.timezone)
        content = repr((facts, parts, ends, settings, __version__))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def clear(self) -> None:
        """Delete what is older than the site keeps it: reports, GPU samples, accounting, audit."""
        log = self.log
        with log.part("retention of reports"):
            for record in self.store.reports():
                if record.until < self.keep.reports:
                    shelf.remove(self.out, record)
                    self.store.delete_reports([record])
                    log.deleted_reports.append(record.path)
        with log.part("retention of GPU samples"):
            self.history.close()  # what it has read would keep the files on disk
            log.deleted_days = len(self.history.delete_before(self.keep.samples.date()))
        with log.part("retention of accounting"):
            log.deleted_runs = self.store.delete_before(self.keep.jobs)
        with log.part("retention of the audit"):
            who = Who.am_i()
            zombies = ZombieLog(self.store.engine)
            log.deleted_audit = zombie_audit.prune(zombies, self.keep.audit, who, self.now, "nightly.keep_audit")
        log.say(
            f"  deleted: {len(log.deleted_reports)} reports, {log.deleted_days} days of GPU samples, "
            f"{log.deleted_runs} job runs, {log.deleted_audit} records of the audit"
        )

    def outcome(self) -> Outcome:
        """What was done."""
        log = self.log
        return Outcome(
            now=self.now,
            out=str(self.out),
            taken_in=tuple(log.taken_in),
            rendered=tuple(log.rendered),
            current=tuple(log.current),
            empty=tuple(log.empty),
            deleted_runs=log.deleted_runs,
            deleted_audit=log.deleted_audit,
            deleted_days=log.deleted_days,
            deleted_reports=tuple(log.deleted_reports),
            failures=tuple(log.failures),
        )


def _place(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"at {Path(last.filename).name}:{last.lineno}; please report it"
