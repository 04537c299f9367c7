"""The sequence from stored accounting and GPU samples to an analysis and a report, shared by the commands.

``analyse_stored`` reads and analyzes; ``build_report`` does that and writes ``report.html``, ``summary.json`` and CSV.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import polars as pl

from slurm_affinode.analysis import emissions, prices, suspensions, waste
from slurm_affinode.analysis.join import kernel
from slurm_affinode.analysis.result import PeriodHours, Thresholds, Trend, WasteQuery, WasteResult
from slurm_affinode.analysis.working_hours import WorkingTime
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError, DiskError, UnreachableError
from slurm_affinode.base.text import percent, visible
from slurm_affinode.base.times import parse_hours
from slurm_affinode.db.repository import Repository
from slurm_affinode.engines.store import engine_store
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.pipeline import ledgers, report_archive, stored_accounting
from slurm_affinode.pipeline.anonymity import Anonymize
from slurm_affinode.pipeline.stored_accounting import NoAccountingError
from slurm_affinode.report import format as fmt
from slurm_affinode.report import output
from slurm_affinode.report.context import ReplayNote
from slurm_affinode.report.links import NO_LINKS, Links
from slurm_affinode.report.output import WrittenReport

Step = Callable[[str], None]
"""Receives the name of each step, for example for a progress display."""
History = Callable[[], AbstractContextManager[SampleStore]]
"""Opens the GPU samples; called only if there are jobs to join with them."""
Linker = Callable[[WasteResult], Links]


_COLUMNS = (
    "cluster", "job_id", "submit", "array_job_id", "array_task_id", "het_job_id", "het_offset", "job_name", "user",
    "account", "partition", "qos", "state", "eligible", "start", "end",
    "elapsed_s", "suspended_s", "time_doubt_s", "timelimit_s",
    "nodes", "node_list", "gpus", "gpu_type",
    "submit_line",
)  # fmt: skip
"""Columns of accounting that figures need; half of a report's time for accounting would go to the others."""


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Presentation options of a report."""

    title: str = output.DEFAULT_TITLE
    top: int = output.DEFAULT_TOP
    """Rows in the tables of users, accounts, ... and of the most wasteful jobs."""
    csv: bool = False
    computed_periods: int = 0
    """Earlier periods of the trend that are computed if there are no stored reports."""
    engine_origin: str = ""
    """A note on the origin of the engine metrics, for data that are not a site's own."""
    replay: ReplayNote | None = None
    """A what-if for the same interval."""


def thresholds(config: Config, *, idle_pct: float | None = None, low_pct: float | None = None) -> Thresholds:
    """Return the configured thresholds with overrides. Raises ``AffinodeError`` unless 0 <= idle <= low <= 100.

    A low threshold that is not given is raised to the idle threshold if that is higher.
    """
    idle = config.idle.idle_pct if idle_pct is None else idle_pct
    low = max(config.idle.low_pct, idle) if low_pct is None else low_pct
    if not 0 <= idle <= low <= 100:
        raise AffinodeError(
            f"thresholds: idle {idle:g} %, low {low:g} %: needs 0 <= idle <= low <= 100",
            hint="choose --idle-pct at most as large as --low-pct",
        )
    return Thresholds(idle, low, config.idle.max_gap_steps, config.agent.floors_pct)


def working_time(config: Config) -> WorkingTime | None:
    """Return the configured working hours; ``None`` if there are none."""
    days = config.report.weekdays
    return WorkingTime(days, *parse_hours(config.report.working_hours)) if days else None


def build_report(
    config: Config,
    query: WasteQuery,
    out: Path,
    *,
    options: ReportOptions = ReportOptions(),
    now: datetime | None = None,
    step: Step | None = None,
    history: History | None = None,
    warned: Step | None = None,
    fold: waste.Fold = kernel.run_all,
    link: Linker | None = None,
    anonymize: Anonymize | None = None,
) -> WrittenReport:
    """Analyze the stored data for ``query`` and write a report into ``out``. Raises ``AffinodeError``.

    ``history`` replaces the stored GPU samples; ``warned`` receives a line about data that is left out; ``fold``: a
    ``waste.Fold``; ``link`` returns the pages that the report links to; ``anonymize`` replaces names, and
    links, which contain names.
    """
    with output.writable(out):
        result = analyse_stored(
            config,
            query,
            now=now,
            top_runs=options.top,
            engines=True,
            step=step,
            history=history,
            warned=warned,
            fold=fold,
        )
        if result.servers is not None and options.engine_origin:
            result = replace(result, servers=replace(result.servers, note=options.engine_origin))
        if options.computed_periods and history is None:
            trend = earlier_periods(config, query, result, options.computed_periods, now=now, step=step, fold=fold)
            result = replace(result, trend=trend)
        links = NO_LINKS if link is None else link(result)
        if anonymize is not None:
            result, links = anonymize(result), NO_LINKS
        if step:
            step("rendering the report")
        return output.write_report(
            result, out, title=options.title, top=options.top, csv=options.csv, links=links, replay=options.replay
        )


def analyse_stored(
    config: Config,
    query: WasteQuery,
    *,
    now: datetime | None = None,
    top_runs: int = output.DEFAULT_TOP,
    engines: bool = False,
    step: Step | None = None,
    history: History | None = None,
    warned: Step | None = None,
    fold: waste.Fold = kernel.run_all,
) -> WasteResult:
    """Analyze the stored data for ``query``; the ``top_runs`` most wasteful attempts get a timeline.

    With ``engines``, inference engines are diagnosed from stored samples, and ``top_runs`` of them get a timeline.
    For ``history``, ``warned`` and ``fold`` see ``build_report``. Raises ``NoAccountingError`` if no job overlaps the
    interval or none has a requested name, ``NoStoreError`` if there is no database.
    """
    say = step or (lambda _: None)
    moment = now or datetime.now(UTC)
    if query.until <= query.since:
        raise AffinodeError(
            f"the interval ends ({fmt.moment(query.until, query.zone)}) before it begins "
            f"({fmt.moment(query.since, query.zone)}, {query.zone})",
            hint="choose --since before --until",
        )
    table = prices.load(config.price.table, currency=config.price.currency)
    factor = emissions.load(config.emissions)
    with Repository.open(config.db_url, create=False) as store:
        say("reading accounting")
        # All jobs, including those that the filters exclude: they are needed to map GPUs to jobs.
        jobs = store.jobs(query.since, query.until, columns=_COLUMNS)
        query = stored_accounting.with_known(query, store, moment)
        if jobs.height == 0 and store.last_time() is None:
            raise _no_accounting(store, query)
        stored_accounting.check_known(query, jobs, moment)
        if jobs.height == 0:
            raise _no_accounting(store, query)
        _check_filters(jobs, query)
        gpus = store.allocation_gpus(query.since, query.until)
        _take_in_suspensions(config, store, warned or (lambda _: None))
        asleep = store.suspensions(query.since, query.until)
        ingests = store.ingests(only_bad=True)
        trend = report_archive.trend(store.reports(), query)
    with (history or _stored(config))() as samples:
        say("joining with the GPU metrics")
        result = waste.analyse(
            query, jobs, gpus, samples, table, ingests, now=moment, top_runs=top_runs, advance=_advance(say), fold=fold
        )
    back = suspensions.given_back(asleep, query, now=moment)
    result = replace(result, suspensions=back, trend=trend, emissions=factor)
    if not engines:
        return result
    with contextlib.closing(engine_store(config.serving_dir)) as samples:
        if not samples.parts(query.since, query.until):
            return result
    say("diagnosing model servers")
    from slurm_affinode.pipeline import servers  # noqa: PLC0415 - takes a tenth of a second, and many sites have none

    return replace(result, servers=servers.usage_of(config, query, jobs, timelines=top_runs))


def earlier_periods(
    config: Config,
    query: WasteQuery,
    result: WasteResult,
    most: int,
    *,
    now: datetime | None = None,
    step: Step | None = None,
    fold: waste.Fold = kernel.run_all,
) -> Trend | None:
    """Return the trend of a result: that of stored reports if there are any, otherwise of computed figures.

    Computed are up to ``most`` intervals before that of the query, the latest ones, as far back as there are jobs. Each
    takes as long as a report.
    """
    if result.trend is not None:
        return result.trend
    kind, intervals = report_archive.preceding(query, most)
    period_hours: list[PeriodHours] = []
    for period in intervals:
        if step:
            step(f"computing the trend: {period.label}")
        earlier = replace(query, since=period.since, until=period.until, known_until={}, working=None)
        try:
            total = analyse_stored(config, earlier, now=now, top_runs=0, fold=fold).total
        except NoAccountingError:
            break
        period_hours.append(PeriodHours(period.label, period.since, period.until, total))
    return Trend(kind, tuple(reversed(period_hours))) if period_hours else None


def _take_in_suspensions(config: Config, store: Repository, warned: Step) -> None:
    try:
        ledgers.configured(config, store, unread=warned)
    except (UnreachableError, DiskError) as error:  # reports are possible from a database that cannot be written
        warned(f"{error}; suspensions that are not in it yet are missing")


def _stored(config: Config) -> History:
    return lambda: contextlib.closing(SampleStore(config.history_dir))


def _advance(say: Step) -> Callable[[int, int], None]:
    def report_progress(finished: int, whole: int) -> None:
        share = percent(finished / whole if whole else 1.0)
        say(f"joining with the GPU metrics: {share} of {fmt.count(whole)} samples")

    return report_progress


def _check_filters(jobs: pl.DataFrame, query: WasteQuery) -> None:
    """Reject a name that no job of the interval has: a typo must not look like "no waste"."""
    for column, names in query.filters.items():
        present = set(jobs[column].drop_nulls().unique())
        for name in names:
            if name not in present:
                hint = _there_is(name, present) if present else None
                raise NoAccountingError(f"no job of {column} {visible(name)} ran {_interval(query)}", hint=hint)


_MOST_NAMES = 12


def _there_is(name: str, present: Collection[str]) -> str:
    """List the existing names, those similar to ``name`` first, at most ``_MOST_NAMES``."""
    close = difflib.get_close_matches(name, present, n=3)
    names = [*close, *sorted(set(present) - set(close))]
    remaining = len(names) - _MOST_NAMES
    listing = ", ".join(visible(existing) for existing in names[:_MOST_NAMES])
    return f"there is: {listing}" + (f", and {remaining} more" if remaining > 0 else "")


def _interval(query: WasteQuery) -> str:
    return f"from {fmt.moment(query.since, query.zone)} to {fmt.moment(query.until, query.zone)} ({query.zone})"


def _no_accounting(store: Repository, query: WasteQuery) -> NoAccountingError:
    counts = store.counts()
    if counts.jobs == 0:
        return NoAccountingError(
            f"there is no accounting in {store.where}",
            hint="ingest some first: slurm-affinode ingest sacct --since 7d, or ingest sacct FILE",
        )
    runs = "1 job run" if counts.jobs == 1 else f"{fmt.count(counts.jobs)} job runs"
    if counts.first is None:
        return NoAccountingError(
            f"no job ran {_interval(query)}",
            hint=f"the database has {runs}, without a start: ingest output of sacct that has Start and End",
        )
    return NoAccountingError(
        f"no job ran {_interval(query)}",
        hint=f"the database has {runs} from {fmt.moment(counts.first, query.zone)} to "
        f"{fmt.moment(counts.last, query.zone)}: choose --since and --until within it, or ingest more",
    )
