"""The health of model servers, from the stored samples of their engines and of the GPUs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import polars as pl

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.analysis.samples import naming_damage
from slurm_affinode.base.config import UNNAMED_CLUSTER, Config
from slurm_affinode.base.errors import AffinodeError, NoStoreError
from slurm_affinode.base.spread import Spreading
from slurm_affinode.base.text import one_line
from slurm_affinode.db.repository import Repository
from slurm_affinode.engines.crashes.crash_log import LogFindings, StartupFacts
from slurm_affinode.engines.diagnosis.examination import (
    ExaminedEngine,
    Fleet,
    diagnose_all,
    examine_all,
    of_each,
)
from slurm_affinode.engines.diagnosis.series import EngineSeries, responds_in_turn, streams
from slurm_affinode.engines.diagnosis.timeline import timeline
from slurm_affinode.engines.diagnosis.usage import EngineUsage, ServerReport, usage
from slurm_affinode.engines.schema import IDENTITY
from slurm_affinode.engines.store import engine_store
from slurm_affinode.engines.tuning import Tuning, observe
from slurm_affinode.engines.tuning import tune as advise
from slurm_affinode.metrics.parquet.parts import POLARS_ERRORS, damaged
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.model.serving import LOOPBACK, EngineEvent, EngineHealth
from slurm_affinode.slurm.times import site_zone

if TYPE_CHECKING:
    from slurm_affinode.metrics.prometheus.importer import ImportOutcome

PERIOD = timedelta(days=1)
"""Length of the period if no start is given."""
_CLOCKS_DIFFER = timedelta(minutes=5)
LIVE_PERIOD = timedelta(minutes=30)
"""Likewise for samples of Prometheus."""
_MOST_GPUS = 512
"""GPUs named in a query; the memory of further ones is unknown."""
_UUID = re.compile(r"[A-Za-z0-9-]{1,100}")


@dataclass(frozen=True, slots=True)
class ServerQuery:
    """The engines and the period of a request. Empty filters select everything."""

    since: datetime | None = None
    until: datetime | None = None
    clusters: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    """``vllm``, ``sglang``, ...; the programs, not their addresses."""
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Servers:
    """The engines found, with the period that was examined."""

    since: datetime
    until: datetime
    engines: tuple[EngineHealth, ...]
    timelines: tuple[pl.DataFrame, ...] = ()
    """``engines.diagnosis.timeline`` of each engine over the time from its first to its last scrape, if requested."""


@contextlib.contextmanager
def live(
    config: Config, query: ServerQuery, now: datetime, *, warned: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[Config, ServerQuery]]:
    """Yield a configuration whose sample stores hold the samples of Prometheus, for one command, and the query for it.

    The period ends at ``now`` and is ``LIVE_PERIOD`` long unless the query says otherwise.

    GPU samples are those of the engines' GPUs, by dcgm-exporter's label ``UUID``. Raises ``AffinodeError`` if the
    server does not respond, also midway: engines that are missing would look healthy.
    """
    # A report from stored samples starts sooner without these.
    from slurm_affinode.metrics.prometheus.importer import NoSamplesError  # noqa: PLC0415
    from slurm_affinode.pipeline import ingest  # noqa: PLC0415

    until = query.until or now
    since = query.since or until - LIVE_PERIOD
    options = ingest.read_options(config)
    with TemporaryDirectory(prefix="slurm-affinode-") as directory:
        live_config = replace(config, store=replace(config.store, state_dir=Path(directory)))
        outcome, _ = ingest.ingest_engines_of_prometheus(live_config, None, since, until, options)
        _check(outcome, warned)
        with contextlib.closing(engine_store(live_config.serving_dir)) as store:
            named = store.scan(since, until).select(pl.col("gpus").str.split(",").explode()).unique().collect()
        uuids = sorted(uuid for uuid in named["gpus"] if uuid and _UUID.fullmatch(uuid))[:_MOST_GPUS]
        if uuids:
            matcher = f'UUID=~"{"|".join(uuids)}"'
            of_gpus = replace(live_config, prometheus=replace(live_config.prometheus, match=(matcher,)))
            with contextlib.suppress(NoSamplesError):
                _check(ingest.ingest_prometheus(of_gpus, None, since, until, options), warned)
        # Accounting is that of the site, which is only read.
        yield (
            replace(live_config, store=replace(live_config.store, db=config.db_url)),
            replace(query, since=since, until=until),
        )


def _check(outcome: ImportOutcome, warned: Callable[[str], None]) -> None:
    if outcome.failure is not None:
        raise outcome.failure
    for file in outcome.summary.files:
        for problem in file.problems:
            warned(f"{file.path}: {problem.reason}")
        for what, count in file.decisions:
            warned(f"{file.path}: {count:,} {what}")


def find(
    config: Config, query: ServerQuery, *, timelines: bool = False, logs: Sequence[LogFindings] = (),
    advance: Callable[[int], None] = lambda engines: None, spreading: Spreading | None = None,
) -> Servers:  # fmt: skip
    """Return the health of the selected engines, with ``timelines`` for charts on request.

    ``logs``: those of the engines. ``advance`` is called with 1 after each engine. ``spreading``: to other machines.
    The ends of their jobs come from accounting, if it can be read. The period ends with the last sample and is a day
    long unless the query says otherwise. Raises ``NoStoreError`` without stored samples of engines.
    """
    with _selected(config, query) as (since, until, samples, gpus):
        examined, charts = [], []
        take = _with_timeline if timelines else _without_timeline
        spread = None if spreading is None else spreading(since, until)
        for health, chart in of_each(samples, take, _fleet(config, since, until, gpus, logs), spread=spread):
            examined.append(replace(health, period_end=until))
            if chart is not None:
                charts.append(chart)
            advance(1)
        return Servers(since, until, tuple(examined), tuple(charts))


def _with_timeline(engine: ExaminedEngine) -> tuple[EngineHealth, pl.DataFrame | None]:
    return engine.health, _timeline(engine)


def _without_timeline(engine: ExaminedEngine) -> tuple[EngineHealth, pl.DataFrame | None]:
    return engine.health, None


_OUT_OF_MEMORY = "OUT_OF_MEMORY"
_EVENT_KINDS = {
    "gpu-out-of-memory": "gpu-out-of-memory", "job-memory-limit": "host-out-of-memory",
    "node-out-of-memory": "host-out-of-memory", "host-allocation": "host-out-of-memory",
    "kv-cache-too-small": "request-too-large",
}  # fmt: skip
"""Kind of failure in a log -> kind of event."""


def _fleet(
    config: Config, since: datetime, until: datetime, gpus: pl.LazyFrame | None, logs: Sequence[LogFindings] = ()
) -> Fleet:  # fmt: skip
    """Return the facts about the engines of a period from other sources. Without accounting, jobs are unknown."""
    zone = site_zone(config.cluster.timezone)
    engine_events = tuple(
        EngineEvent(
            _EVENT_KINDS[failure.kind], failure.text, None if failure.time is None else _aware(failure.time, zone)
        )
        for log in logs
        for failure in log.failures
        if failure.kind in _EVENT_KINDS
    )
    try:
        with Repository.open(config.db_url, create=False, upgrade=False) as store:
            jobs = store.jobs(since, until, columns=("cluster", "job_id", "submit", "state", "end"))
    except AffinodeError:
        return Fleet(gpus, log_events=engine_events)
    events: dict[tuple[str | None, str], list[EngineEvent]] = {}
    ends: dict[tuple[str | None, str], datetime | None] = {}
    alone = jobs["cluster"].n_unique() == 1
    rows = jobs.sort("submit").select("cluster", "job_id", "state", "end").iter_rows()
    for cluster, number, state, end in rows:
        for key in _keys(cluster, number, alone=alone):
            ends[key] = end
            if state == _OUT_OF_MEMORY and end is not None:
                text = f"Slurm ended job {number}: {state}"
                events.setdefault(key, []).append(EngineEvent("host-out-of-memory", text, end))
    return Fleet(gpus, events, engine_events, ends)


def _keys(cluster: str, job: int, *, alone: bool) -> list[tuple[str, str]]:
    """Return cluster and ID of a job as samples of engines may have them.

    ``alone``: accounting has one cluster. Samples that name no cluster are of that one; with several, their jobs are
    unknown.
    """
    return [(cluster_name, str(job)) for cluster_name in ((cluster, UNNAMED_CLUSTER) if alone else (cluster,))]


def _aware(time: datetime, zone: tzinfo) -> datetime:
    return time if time.tzinfo is not None else time.replace(tzinfo=zone)


def usage_of(config: Config, query: WasteQuery, jobs: pl.DataFrame, *, timelines: int) -> ServerReport | None:
    """Return the engines of a report, the first ``timelines`` of them with charts; ``None`` without engine samples.

    ``jobs``: accounting of the interval, with the columns of ``JOBS`` that the query filters. With a filter by
    partition or account, engines of unknown jobs are left out.
    """
    with contextlib.closing(engine_store(config.serving_dir)) as store:
        if not store.parts(query.since, query.until):
            return None
        owners = _owners(jobs)
        samples = store.scan(query.since, query.until)
        if query.clusters:
            samples = samples.filter(pl.col("cluster").is_in(query.clusters))
        engines: list[EngineUsage] = []
        with (
            _naming_damage(config, store, query.since, query.until),
            _gpu_samples(config, query.since, query.until) as gpus,
        ):
            for used in of_each(samples, _used, _fleet(config, query.since, query.until, gpus)):
                health = used.health
                owner = owners.get((health.key.cluster, health.job), {})
                server = used if health.user else replace(used, health=replace(health, user=owner.get("user")))
                if _matches(query, {**owner, "user": server.health.user}):
                    engines.append(server)
            engines.sort(key=lambda engine: engine.urgency)
            charts = tuple(_chart(engine.health, samples, gpus) for engine in engines[:timelines])
    return ServerReport(tuple(engines), charts) if engines else None


def _used(engine: ExaminedEngine) -> EngineUsage:
    return usage(engine.health, engine.series)


def _chart(health: EngineHealth, samples: pl.LazyFrame, gpus: pl.LazyFrame | None) -> pl.DataFrame:
    """Return the timeline of one engine: its samples are read again, as few of many engines have a chart."""
    engine_samples = samples.filter(*_address_condition(health))
    same = health.key, health.job
    return next(
        _timeline(engine)
        for engine in examine_all(engine_samples, Fleet(gpus))
        if (engine.health.key, engine.health.job) == same
    )


_Owner = dict[str, str | None]


def _owners(jobs: pl.DataFrame) -> dict[tuple[str | None, str | None], _Owner]:
    """Return user, account and partition of each job by cluster and job ID; unknown if its attempts differ in it."""
    names = ("cluster", "job_id", "user", "account", "partition")
    alone = jobs["cluster"].n_unique() == 1
    owners: dict[tuple[str | None, str | None], _Owner] = {}
    for cluster, job, user, account, partition in jobs.select(names).iter_rows():
        owner = {"user": user, "account": account, "partition": partition}
        for key in _keys(cluster, job, alone=alone):
            before = owners.setdefault(key, owner)
            owners[key] = {name: text if before[name] == text else None for name, text in owner.items()}
    return owners


def _matches(query: WasteQuery, owner: _Owner) -> bool:
    filters = {"user": query.users, "account": query.accounts, "partition": query.partitions}
    return all(not names or owner.get(column) in names for column, names in filters.items())


@contextlib.contextmanager
def _selected(
    config: Config, query: ServerQuery
) -> Iterator[tuple[datetime, datetime, pl.LazyFrame, pl.LazyFrame | None]]:
    """Yield the period, the samples of the selected engines, and the GPU samples if there are any."""
    with contextlib.closing(engine_store(config.serving_dir)) as store:
        span = store.span()
        if span is None:
            hint = "ingest some: slurm-affinode ingest serving --help"
            raise NoStoreError(f"no samples of engines in {config.serving_dir}", hint=hint)
        until = query.until or _end(store, span[1]) + timedelta(milliseconds=1)
        since = query.since or until - PERIOD
        samples = store.scan(since, until)
        for column, values in (
            ("cluster", query.clusters), ("node", query.nodes), ("user", query.users), ("job", query.jobs),
            ("engine", query.engines),
        ):  # fmt: skip
            if values:
                samples = samples.filter(pl.col(column).is_in(values))
        if query.addresses:
            samples = samples.filter(pl.any_horizontal(_has_address(address) for address in query.addresses))
        with _naming_damage(config, store, since, until), _gpu_samples(config, since, until) as gpus:
            yield since, until, samples, gpus


@contextlib.contextmanager
def _naming_damage(config: Config, engines: SampleStore, since: datetime, until: datetime) -> Iterator[None]:
    """Raise ``UnreachableError`` with the name of the damaged part, of engines or GPUs, for an error of a scan."""
    try:
        yield
    except POLARS_ERRORS as error:
        for part in engines.parts(since, until):
            try:
                for _ in pl.scan_parquet(part.path).collect_batches(maintain_order=False):
                    pass
            except POLARS_ERRORS as failure:
                raise damaged(part.path, one_line(failure), engines.table) from error
        with contextlib.closing(SampleStore(config.history_dir)) as gpus, naming_damage(gpus, since, until):
            raise


def _has_address(address: str) -> pl.Expr:
    """Match engines with an address; ``gpu01:8000`` also matches ``127.0.0.1:8000`` on that node."""
    host, _, port = address.rpartition(":")
    local = pl.col("address").is_in([f"{name}:{port}" for name in LOOPBACK])
    return (pl.col("address") == address) | (local & (pl.col("node") == host).fill_null(value=False))


def _end(store: SampleStore, last: datetime) -> datetime:
    """Return the time of the last sample that is not of the future: a wrong clock does not hide the other engines."""
    limit = datetime.now(UTC) + _CLOCKS_DIFFER
    ends = [min(part.last, limit) for part in store.parts(None, limit)]
    return max(ends, default=last)


@dataclass(frozen=True, slots=True)
class TunedEngine:
    """An engine with its advice."""

    health: EngineHealth
    tuning: Tuning


_SEVERAL_ENGINES = "failures (a log does not show which of the selected engines it is of: select one engine)"
_DIFFERENT_STARTS = "a part of what engines log at startup (the logs differ in it: give the log of one start)"


def _agreed(startups: Sequence[StartupFacts]) -> tuple[StartupFacts, bool]:
    """Return the facts in which ``startups`` agree, as far as they have them, and whether they differ in others."""
    by_field = {
        field.name: {getattr(startup, field.name) for startup in startups} - {None} for field in fields(StartupFacts)
    }
    agreed = {name: next(iter(values)) for name, values in by_field.items() if len(values) == 1}
    return StartupFacts(**agreed), any(len(values) > 1 for values in by_field.values())


def tune(config: Config, query: ServerQuery, logs: Sequence[LogFindings] = ()) -> list[TunedEngine]:
    """Return advice for the selected engines, in the order of their identity. ``logs``: those of the engines.

    Logs do not show which engine each one is of: with several engines, the failures in them are unknown, and so is what
    engines log at startup, as far as the logs differ.

    Raises ``NoStoreError`` without stored samples of engines.
    """
    startup, differ = _agreed([log.startup for log in logs])
    with _selected(config, query) as (_, _, samples, gpus):
        tuned = []
        engines = list(diagnose_all(samples, Fleet(gpus=gpus)))
        failures = [failure for log in logs for failure in log.failures] if logs and len(engines) == 1 else None
        for health in engines:
            series = _series(health, samples)
            if series is None:
                continue
            total, free = _room(_gpus_of(health, gpus))
            facts = observe(
                series, health.diagnoses, failures, startup, gpu_total_gib=total, gpu_free_gib=free
            )  # fmt: skip
            advice = advise(facts)
            if logs and failures is None:
                advice = replace(advice, unknown=(*advice.unknown, _SEVERAL_ENGINES))
            if differ:
                advice = replace(advice, unknown=(*advice.unknown, _DIFFERENT_STARTS))
            tuned.append(TunedEngine(health, advice))
        return tuned


def _room(gpus: pl.DataFrame | None) -> tuple[float | None, float | None]:
    """Return the memory of a GPU and the least free memory of one of them, in GiB."""
    if gpus is None:
        return None, None
    measured = gpus.filter(pl.col("fb_used_mib").is_not_null() & pl.col("fb_total_mib").is_not_null())
    if measured.is_empty():
        return None, None
    free = (measured["fb_total_mib"] - measured["fb_used_mib"]).min()
    return float(measured["fb_total_mib"].min()) / 1024, float(free) / 1024  # type: ignore[arg-type]


def _samples_of(health: EngineHealth, samples: pl.LazyFrame) -> pl.DataFrame:
    """Return the samples of an engine, with those of other processes that respond at its address."""
    same = _address_condition(health)
    if health.job is not None:
        # Jobs that served at this address one after the other are engines of their own.
        same.append((pl.col("job") == health.job).fill_null(value=True))
    return samples.filter(pl.all_horizontal(same), pl.col("time").is_between(health.since, health.until)).collect()


def _address_condition(health: EngineHealth) -> list[pl.Expr]:
    """Return the condition for samples from the engine's address."""
    names = [name for name in IDENTITY if name != "rank" or not responds_in_turn(health.key)]
    return [pl.col(name).eq_missing(pl.lit(getattr(health.key, name), pl.String)) for name in names]


def _series(health: EngineHealth, samples: pl.LazyFrame) -> EngineSeries | None:
    rank = None if responds_in_turn(health.key) else health.key.rank
    ranks = streams(replace(health.key, rank=rank), _samples_of(health, samples))
    return next((series for series in ranks if series.key == health.key and len(series)), None)


def _gpus_of(health: EngineHealth, gpus: pl.LazyFrame | None) -> pl.DataFrame | None:
    if gpus is None or not health.gpus:
        return None
    during = pl.col("time").is_between(health.since, health.until + timedelta(seconds=1))
    return gpus.filter(pl.col("uuid").is_in(health.gpus), during).collect()


def _timeline(engine: ExaminedEngine) -> pl.DataFrame:
    return timeline(engine.samples, engine.gpus, engine.health.since, engine.health.until + timedelta(seconds=1))


@contextlib.contextmanager
def _gpu_samples(config: Config, since: datetime, until: datetime) -> Iterator[pl.LazyFrame | None]:
    with contextlib.closing(SampleStore(config.history_dir)) as store:
        yield store.scan(since, until) if store.parts(since, until) else None
