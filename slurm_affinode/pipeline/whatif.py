"""What-if on a site's own data: stored accounting and GPU samples in, two replays of each cluster's queue out."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from slurm_affinode.analysis import idle_periods, squatters, suspensions
from slurm_affinode.analysis import runs as job_runs
from slurm_affinode.analysis.bootstrap import day_of, interval
from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.analysis.squatters import HeldGpus
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import InputError
from slurm_affinode.base.spread import Spread, Spreading, in_turn
from slurm_affinode.base.times import epoch_ms
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.pipeline import prediction, stored_accounting
from slurm_affinode.pipeline.prediction import IdleRisk, RunTimes
from slurm_affinode.pipeline.stored_accounting import NoAccountingError
from slurm_affinode.slurm.accounting.schema import JOBS
from slurm_affinode.traces.job_log import MOST_LEFT_OUT
from slurm_affinode.traces.site_trace import EPOCH_S, SiteTrace
from slurm_affinode.whatif.policy import Backfill, Order, SchedulingPolicy, Times
from slurm_affinode.whatif.pools import Placement, Pool, Queue, Scenario, divide, replay_all
from slurm_affinode.whatif.suspension import (
    DUMP_S,
    RESTORE_S,
    GpuJob,
    Replay,
    SuspensionRule,
    most_concurrent,
)

_UNREAD = frozenset({"comment", "admin_comment", "work_dir"})
_COLUMNS = tuple(name for name in JOBS if name not in _UNREAD)
_INTERACTIVE = r"^\s*(?:\S*/)?(salloc|srun)(?:\s|$)"
_HOUR_S = 3600.0
Mode = Literal["requeue", "inplace"]
"""Whether suspended jobs return their GPUs to the queue, or keep their allocation."""
Flags = npt.NDArray[np.bool_]
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Change:
    """Changes of the second replay."""

    suspend_idle_s: float | None = None
    more_gpus: int = 0
    limit_interactive_s: float | None = None
    backfill: Backfill = "first-fit"
    """Of both replays; ``easy`` and ``conservative`` use time limits."""
    partial: bool = False
    windows_s: tuple[float, ...] = ()
    """Further values of ``suspend_idle_s`` to replay, each on its own."""
    one_pool: bool = False
    """Whether a job can use every GPU of the cluster."""
    idle_risk: bool = False
    """Whether the idle share of each job is predicted."""
    mode: Mode = "requeue"
    order: Order = "fcfs"
    """Of both replays: ``fcfs``, or ``priority`` as accounting has recorded it."""
    times: Times = "requested"
    """Estimates of run times in both replays, for a ``backfill`` that has reservations."""


@dataclass(frozen=True, slots=True)
class SuspensionGain:
    """Gains of a change, relative to the first replay."""

    suspend_idle_s: float | None
    saved_wait_mean_s: float
    saved_wait_interval_s: tuple[float, float] | None
    gpu_hours_returned: float
    gpu_hours_returned_interval: tuple[float, float] | None
    gpu_hours_used: float
    suspended_jobs: int
    wakes_per_day: float
    wake_wait_mean_s: float | None


@dataclass(frozen=True, slots=True)
class PartitionWaits:
    """Waits of the jobs of a partition (``None``: all) that were submitted in the interval, s."""

    partition: str | None
    jobs: int
    recorded_mean_s: float
    before_mean_s: float
    before_median_s: float
    before_p95_s: float
    after_mean_s: float
    after_median_s: float
    after_p95_s: float


@dataclass(frozen=True, slots=True)
class PoolReplay:
    """GPUs for which the same jobs compete."""

    partitions: tuple[str, ...]
    models: tuple[str, ...]
    """Of its GPUs, as far as known."""
    nodes: int
    gpus: int
    jobs: int
    recorded_mean_s: float | None
    """Mean wait of the jobs that were submitted in the interval; ``None``: there is none."""
    before_mean_s: float | None
    after_mean_s: float | None


RISK_BOUNDS_PCT = (0.0, 10.0, 50.0)
"""Lower bounds of the classes of predicted idle shares."""


@dataclass(frozen=True, slots=True)
class IdleRiskClass:
    """Jobs with a predicted idle share of at least ``least_pct`` and below that of the next class."""

    least_pct: float | None
    """``None``: there is no prediction."""
    jobs: int
    gpu_hours: float
    idle_gpu_hours: float
    """As measured."""
    gpu_hours_returned: float
    """In the second replay."""


@dataclass(frozen=True, slots=True)
class ClusterReplay:
    """The queue of one cluster, replayed as it was and with the change."""

    cluster: str
    gpus: int
    jobs: int
    left_out: dict[str, int]
    left_out_share: float
    """Their share of the GPU-hours, as far as these are known."""
    policy: str
    mode: Mode
    predictor: str | None
    """Of run times; ``None``: they are not predicted."""
    pools: tuple[PoolReplay, ...]
    waits: tuple[PartitionWaits, ...]
    """All jobs first, then by partition."""
    replayed_to_recorded: float | None
    """Mean wait of the first replay, of the recorded one."""
    saved_wait_mean_s: float
    saved_wait_interval_s: tuple[float, float] | None
    earlier: int
    """Jobs that start earlier than in the first replay."""
    later: int
    throughput_before_per_day: float
    """Jobs that end in the interval."""
    throughput_after_per_day: float
    head_of_line_before_mean_s: float
    """Mean time for which a job waited although as many GPUs as it needs were free."""
    head_of_line_after_mean_s: float
    suspended_jobs: int
    wakes_per_day: float
    wake_wait_mean_s: float | None
    gpu_hours_returned: float
    gpu_hours_returned_interval: tuple[float, float] | None
    gpu_hours_used: float
    dump_s: float
    restore_s: float
    costs_from: str
    interactive: int
    """Jobs that the limit of interactive jobs ends."""
    sweep: tuple[SuspensionGain, ...]
    """By the further windows."""
    idle_predictor: str | None = None
    """Of idle shares; ``None``: they are not predicted."""
    idle_risk: tuple[IdleRiskClass, ...] = ()


def replay_site(
    config: Config, query: WasteQuery, change: Change, *, now: datetime | None = None,
    step: Callable[[str], None] = lambda _: None, spreading: Spreading | None = None,
) -> list[ClusterReplay]:  # fmt: skip
    """Replay the GPU jobs of each cluster of the interval. Raises ``AffinodeError``.

    ``spreading``: to other machines, which read the samples and replay.
    """
    moment = now or datetime.now(UTC)
    spread = None if spreading is None else spreading(query.since, query.until)
    step("reading accounting")
    with Repository.open(config.db_url, create=False) as store:
        jobs = store.jobs(query.since, query.until, columns=_COLUMNS)
        gpus = store.allocation_gpus(query.since, query.until)
        query = stored_accounting.with_known(query, store, moment)
        stored_accounting.check_known(query, jobs, moment)
        entries = store.suspensions(query.since, query.until)
    step("reading GPU metrics")
    limit_pct = query.thresholds.idle_pct
    with contextlib.closing(SampleStore(config.history_dir)) as samples:
        held_gpus = squatters.hold(query, jobs, gpus, samples, [limit_pct], moment, spread=spread)
        idle = pl.DataFrame(schema=idle_periods.PERIODS)
        if change.suspend_idle_s is not None or change.windows_s or change.idle_risk:
            step("searching idle periods")
            idle = idle_periods.find(samples, held_gpus, limit_pct, spread)
    lost = job_runs.prepare(jobs, query, moment).join(held_gpus.runs, on=["cluster", "job_id", "submit"], how="anti")
    costs = suspensions.totals(suspensions.given_back(entries, query, now=moment))
    costs_known = costs["suspend_s"] is not None and costs["restore_s"] is not None
    dump_s, restore_s = float(costs["suspend_s"] or DUMP_S), float(costs["restore_s"] or RESTORE_S)
    replays = []
    for cluster in sorted(held_gpus.runs.filter(pl.col("gpus").fill_null(1) > 0)["cluster"].drop_nulls().unique()):
        step(f"replaying {cluster}")
        uncertain = lost.filter((pl.col("cluster") == cluster) & (pl.col("gpus").fill_null(1) > 0)).height
        predicted = None
        if change.times == "predicted":
            step(f"predicting run times of {cluster}")
            predicted = _predictions(config, query, cluster, step)
        risk = None
        if change.idle_risk:
            step(f"predicting idle time of {cluster}")
            risk = _idle_risk(config, query, cluster, step)
        replays.append(_replay(
            cluster, held_gpus, idle, change, (dump_s, restore_s, "the ledger" if costs_known else "docs/hardware.md"),
            uncertain, predicted, risk, spread or in_turn,
        ))  # fmt: skip
    if not replays:
        raise NoAccountingError("no GPU job ran in this interval", hint="choose an earlier --since, or ingest sacct")
    return replays


@dataclass(frozen=True, slots=True)
class _Predictions:
    predictor: str
    run_s: dict[tuple[int, int], int]
    """Job ID and submission, in seconds since 1970 -> predicted run time; -1: unknown."""


def _predictions(config: Config, query: WasteQuery, cluster: str, step: Callable[[str], None]) -> _Predictions:
    """Predict each run time from the jobs that had ended before the submission. Raises ``InputError`` for few jobs."""
    source = prediction.read_site(config, query.since - prediction.HISTORY, query.until, clusters=(cluster,), step=step)
    times = prediction.submitted_run_times(source)
    keys = source.submissions.select("number", "submit_s").iter_rows()
    return _Predictions(times.predictor, dict(zip(keys, times.predicted.tolist(), strict=True)))


def _idle_risk(config: Config, query: WasteQuery, cluster: str, step: Callable[[str], None]) -> _Risk:
    """Predict each idle share from the jobs that had ended before. Raises ``InputError`` for few jobs."""
    source = prediction.read_site(
        config, query.since - prediction.HISTORY, query.until, clusters=(cluster,), idle=True, step=step
    )
    risk = prediction.idle_risk(source)
    keys = source.submissions.select("number", "submit_s").iter_rows()
    return _Risk(risk.predictor, dict(zip(keys, risk.predicted_pct.tolist(), strict=True)))


@dataclass(frozen=True, slots=True)
class _Risk:
    predictor: str
    idle_pct: dict[tuple[int, int], float]
    """Job ID and submission, in seconds since 1970 -> predicted idle share; NaN: unknown."""


def _replay(  # noqa: PLR0917
    cluster: str, held_gpus: HeldGpus, idle: pl.DataFrame, change: Change, costs: tuple[float, float, str],
    uncertain: int, predicted: _Predictions | None, risk: _Risk | None, spread: Spread,
) -> ClusterReplay:  # fmt: skip
    runs = held_gpus.runs.filter((pl.col("cluster") == cluster) & (pl.col("gpus").fill_null(1) > 0))
    left_out = {"without a certain start and end": uncertain, "without a GPU count": int(runs["gpus"].null_count())}
    runs = runs.filter(pl.col("gpus").is_not_null())
    whole_h = _gpu_hours(runs)
    policy = SchedulingPolicy(change.order, change.backfill, change.times)
    if policy.reserves:
        left_out["without a time limit"] = int(runs["timelimit_s"].null_count())
        runs = runs.filter(pl.col("timelimit_s").is_not_null())
    if policy.order == "priority":
        left_out["without a priority"] = int(runs["priority"].null_count())
        runs = runs.filter(pl.col("priority").is_not_null())
    share = 1 - _gpu_hours(runs) / whole_h if whole_h else 0.0
    _check_left_out(cluster, runs.height, left_out, share, partial=change.partial)
    jobs, starts, interactive, rows = _jobs(
        runs, idle, held_gpus.query, {} if predicted is None else predicted.run_s, {} if risk is None else risk.idle_pct
    )
    divided = pl.col("at").is_in(held_gpus.divided.cast(pl.UInt32).implode())
    in_cluster = (pl.col("cluster") == cluster).fill_null(value=True)
    devices = held_gpus.devices.with_row_index("at").filter(~divided, in_cluster)
    pools = _pools(jobs, starts, rows, held_gpus.nodes, devices, one_pool=change.one_pool)
    subject = _Subject(
        cluster, {reason: number for reason, number in left_out.items() if number}, share, policy,
        None if predicted is None else predicted.predictor, costs,
        (held_gpus.query.since.timestamp(), held_gpus.query.until.timestamp()), devices,
        None if risk is None else risk.predictor,
    )  # fmt: skip
    return _compare(subject, jobs, interactive, pools, change, spread)


def replay_trace(
    trace: SiteTrace,
    change: Change,
    predicted: RunTimes | None = None,
    risk: IdleRisk | None = None,
    *,
    spread: Spread = in_turn,
) -> ClusterReplay:
    """Replay the jobs of an exported data set with its idle windows, on one pool.

    ``predicted``, ``risk``: run times and idle shares by the row of its log. Jobs without samples of all their GPUs
    are never suspended. Raises ``InputError`` if too many jobs have no time limit for ``backfill``.
    """
    table = trace.jobs.with_row_index("row").sort("submit_s", "job")
    policy, left_out, share = SchedulingPolicy(change.order, change.backfill, change.times), dict[str, int](), 0.0
    if policy.reserves and (without := table.filter(pl.col("timelimit_s").is_null())).height:
        left_out["without a time limit"] = without.height
        share = _held_s(without) / _held_s(table)
        table = table.filter(pl.col("timelimit_s").is_not_null())
    _check_left_out(trace.name, table.height, left_out, share, partial=change.partial)
    windows: dict[int, list[tuple[int, int]]] = {}
    for job, begin, end in trace.idle.iter_rows():
        windows.setdefault(job, []).append((begin, end))
    jobs = [
        GpuJob(
            row["job"], row["partition"], EPOCH_S + row["submit_s"], row["run_s"], row["gpus"],
            -1 if row["timelimit_s"] is None else max(row["timelimit_s"], row["run_s"]), row["wait_s"], counted=True,
            idle=tuple(windows.get(row["job"], ())),
            predicted=-1 if predicted is None else int(predicted.predicted[row["row"]]),
            idle_risk_pct=None if risk is None else _without_nan(float(risk.predicted_pct[row["row"]])),
        )
        for row in table.iter_rows(named=True)
    ]  # fmt: skip
    starts = [job.submit + job.recorded_wait for job in jobs]
    last = max(start + job.run for start, job in zip(starts, jobs, strict=True))
    capacity = max(trace.capacity_gpus, most_concurrent(jobs, starts))
    subject = _Subject(
        Path(trace.name).name or trace.name, left_out, share, policy,
        None if predicted is None else predicted.predictor,
        (DUMP_S, RESTORE_S, "docs/hardware.md"), (jobs[0].submit, last),
        pl.DataFrame(schema={"node": pl.String(), "model": pl.String()}), None if risk is None else risk.predictor,
    )  # fmt: skip
    pools = [(Pool((), tuple(range(len(jobs)))), capacity)]
    return _compare(subject, jobs, [False] * len(jobs), pools, change, spread)


def _held_s(jobs: pl.DataFrame) -> float:
    return float((jobs["gpus"] * jobs["run_s"]).sum())


def _check_left_out(where: str, jobs: int, left_out: Mapping[str, int], share: float, *, partial: bool) -> None:
    """Raise ``InputError`` if no job is left, or more than ``MOST_LEFT_OUT`` is left out and not ``partial``."""
    missing = sum(left_out.values())
    total = jobs + missing
    if not jobs or (max(missing / total, share) > MOST_LEFT_OUT and not partial):
        text = "; ".join(f"{number:,} {reason}" for reason, number in left_out.items() if number)
        raise InputError(
            f"{missing:,} of {total:,} GPU jobs, with {share:.1%} of the known GPU-hours, are left out: {text}",
            where=where,
            hint="--partial replays the others" if jobs else None,
        )


@dataclass(frozen=True, slots=True)
class _Subject:
    """A cluster and its jobs, for both replays."""

    name: str
    left_out: dict[str, int]
    left_out_share: float
    policy: SchedulingPolicy
    predictor: str | None
    costs: tuple[float, float, str]
    """Of a suspension and a restore, s, and their source."""
    interval: tuple[float, float]
    """Seconds since 1970."""
    devices: pl.DataFrame
    """``node`` and ``model`` of its GPUs."""
    idle_predictor: str | None = None


def _compare(  # noqa: PLR0917
    subject: _Subject, jobs: list[GpuJob], interactive: Sequence[bool], pools: list[tuple[Pool, int]], change: Change,
    spread: Spread,
) -> ClusterReplay:  # fmt: skip
    """Replay the jobs as they were and with the change."""
    more = _with_more(pools, jobs, change.more_gpus)
    capacity = sum(gpus for _, gpus in pools)
    changed = _limited(jobs, interactive, change.limit_interactive_s)
    dump_s, restore_s, source = subject.costs
    since, until = subject.interval
    days = max(1.0, until - since) / _DAY_S
    counted = np.array([job.counted for job in jobs])
    windows = (change.suspend_idle_s, *change.windows_s)
    in_place = change.mode == "inplace"
    rules = [None if idle_s is None else SuspensionRule(idle_s, dump_s, restore_s, in_place) for idle_s in windows]
    scenarios = [Scenario(0, None), *(Scenario(1, rule) for rule in rules)]
    before, *replays = replay_all([Queue(jobs, pools), Queue(changed, more)], scenarios, subject.policy, spread)
    gain, *sweep = [
        _gain(window_s, jobs, before, replayed, counted, days)
        for window_s, replayed in zip(windows, replays, strict=True)
    ]
    after = replays[0]
    saved = before.wait - after.wait
    waits = _waits(jobs, before, after, counted)
    recorded = waits[0].recorded_mean_s if waits else 0.0
    return ClusterReplay(
        cluster=subject.name,
        gpus=capacity,
        jobs=len(jobs),
        left_out=subject.left_out,
        left_out_share=subject.left_out_share,
        policy=str(subject.policy),
        mode=change.mode,
        predictor=subject.predictor,
        pools=_pool_figures(pools, jobs, subject.devices, before, after, counted),
        waits=waits,
        replayed_to_recorded=waits[0].before_mean_s / recorded if recorded > 0 else None,
        saved_wait_mean_s=gain.saved_wait_mean_s,
        saved_wait_interval_s=gain.saved_wait_interval_s,
        earlier=int((saved[counted] > 0).sum()),
        later=int((saved[counted] < 0).sum()),
        throughput_before_per_day=_throughput(before, subject.interval, days),
        throughput_after_per_day=_throughput(after, subject.interval, days),
        head_of_line_before_mean_s=_mean(before.blocked[counted]),
        head_of_line_after_mean_s=_mean(after.blocked[counted]),
        suspended_jobs=gain.suspended_jobs,
        wakes_per_day=gain.wakes_per_day,
        wake_wait_mean_s=gain.wake_wait_mean_s,
        gpu_hours_returned=gain.gpu_hours_returned,
        gpu_hours_returned_interval=gain.gpu_hours_returned_interval,
        gpu_hours_used=gain.gpu_hours_used,
        dump_s=dump_s,
        restore_s=restore_s,
        costs_from=source,
        interactive=sum(job.run < original.run for job, original in zip(changed, jobs, strict=True)),
        sweep=tuple(sweep),
        idle_predictor=subject.idle_predictor,
        idle_risk=() if subject.idle_predictor is None else _risk_classes(jobs, after),
    )


def _gain(  # noqa: PLR0917
    window_s: float | None, jobs: list[GpuJob], before: Replay, after: Replay, counted: Flags, days: float
) -> SuspensionGain:
    submit = np.array([job.submit for job in jobs], np.int64)
    saved = (before.wait - after.wait).astype(np.float64)
    returned = after.returned_s / _HOUR_S
    return SuspensionGain(
        suspend_idle_s=window_s,
        saved_wait_mean_s=float(saved[counted].mean()) if counted.any() else 0.0,
        saved_wait_interval_s=interval(day_of(submit[counted]), saved[counted], mean=True),
        gpu_hours_returned=float(returned.sum()),
        gpu_hours_returned_interval=interval(day_of(submit + before.wait), returned, mean=False),
        gpu_hours_used=after.used_s / _HOUR_S,
        suspended_jobs=int((after.returned_s > 0).sum()),
        wakes_per_day=float(after.wakes.sum()) / days,
        wake_wait_mean_s=float(after.wake_wait.sum() / after.wakes.sum()) if (after.wakes > 0).any() else None,
    )


def _throughput(replayed: Replay, between: tuple[float, float], days: float) -> float:
    """Return the jobs that end in the interval per day."""
    since, until = between
    return float(((replayed.end > since) & (replayed.end <= until)).sum()) / days


def _mean(values: npt.NDArray[np.int64]) -> float:
    return float(values.mean()) if len(values) else 0.0


def _gpu_hours(runs: pl.DataFrame) -> float:
    return float(((pl.Series(runs["end_ms"]) - runs["start_ms"]) * runs["gpus"]).sum()) / 1000 / _HOUR_S


def _pools(
    jobs: list[GpuJob], starts: list[int], rows: list[int], nodes: pl.DataFrame, devices: pl.DataFrame, *,
    one_pool: bool,
) -> list[tuple[Pool, int]]:  # fmt: skip
    """Return the pools of a cluster and their GPUs: those with samples, or as many as jobs held at once."""
    if one_pool:
        pools = [Pool((), tuple(range(len(jobs))))]
    else:
        of_run: dict[int, list[str]] = {}
        for run, node in nodes.select("run", "node").iter_rows():
            of_run.setdefault(run, []).append(node)
        places = [Placement(job.partition, tuple(of_run.get(row, ()))) for job, row in zip(jobs, rows, strict=True)]
        pools = divide(places, dict(devices.select("node", "model").drop_nulls("node").iter_rows()))
    sized = []
    for pool in pools:
        measured = devices if one_pool else devices.filter(pl.col("node").is_in(list(pool.nodes)))
        concurrent = most_concurrent([jobs[number] for number in pool.jobs], [starts[number] for number in pool.jobs])
        sized.append((pool, max(measured.height, concurrent)))
    return sized


def _with_more(pools: list[tuple[Pool, int]], jobs: list[GpuJob], more: int) -> list[tuple[Pool, int]]:
    """Return the pools with more GPUs in the one whose jobs waited longest, in sum."""
    waited = [sum(jobs[number].recorded_wait for number in pool.jobs) for pool, _ in pools]
    longest = waited.index(max(waited))
    return [(pool, gpus + (more if index == longest else 0)) for index, (pool, gpus) in enumerate(pools)]


def _pool_figures(  # noqa: PLR0917
    pools: list[tuple[Pool, int]], jobs: list[GpuJob], devices: pl.DataFrame, before: Replay, after: Replay,
    counted: Flags,
) -> tuple[PoolReplay, ...]:  # fmt: skip
    recorded = np.array([job.recorded_wait for job in jobs], np.int64)
    replays = []
    for pool, gpus in pools:
        rows = np.array(pool.jobs, np.int64)
        rows = rows[counted[rows]]
        means = [float(wait[rows].mean()) if len(rows) else None for wait in (recorded, before.wait, after.wait)]
        models = devices.filter(pl.col("node").is_in(list(pool.nodes)))["model"].drop_nulls().unique().sort()
        partitions = sorted({jobs[number].partition or "" for number in pool.jobs})
        replays.append(PoolReplay(
            tuple(partitions), tuple(models), len(pool.nodes), gpus, len(pool.jobs), *means
        ))  # fmt: skip
    return tuple(replays)


def _jobs(
    runs: pl.DataFrame,
    idle: pl.DataFrame,
    query: WasteQuery,
    predicted: Mapping[tuple[int, int], int],
    risk: Mapping[tuple[int, int], float],
) -> tuple[list[GpuJob], list[int], list[bool], list[int]]:
    """Return the jobs in the order of submission, their recorded starts, whether each was interactive, and their runs.

    A job that started before the interval holds its GPUs from then on, and its wait does not count.
    """
    since_ms = epoch_ms(query.since)
    begin = pl.col("begin_ms")
    submitted = pl.min_horizontal(pl.coalesce("eligible", "submit").dt.epoch("ms"), begin)
    rows = runs.with_columns(
        pl.when(begin < since_ms).then(begin).otherwise(submitted).alias("submitted_ms"),
        (submitted // 1000).alias("exactly_s"), (submitted >= since_ms).alias("counted"),
        (begin - submitted).alias("waited_ms"),
        pl.col("submit_line").fill_null("").str.contains(_INTERACTIVE).alias("interactive"),
    ).sort("submitted_ms", "job_id", "run")  # fmt: skip
    periods: dict[int, list[tuple[int, int]]] = {}
    for run, first, last in idle.iter_rows():
        periods.setdefault(run, []).append((first, last))
    jobs, starts, interactive, numbers = [], [], [], []
    for row in rows.iter_rows(named=True):
        start = row["begin_ms"] // 1000
        run = max(1, row["end_ms"] // 1000 - start)
        idle_spans = tuple(
            (max(0, first // 1000 - start), last // 1000 - start) for first, last in periods.get(row["run"], ())
        )
        limit = row["timelimit_s"]
        jobs.append(GpuJob(
            row["job_id"], row["partition"], row["submitted_ms"] // 1000, run, row["gpus"],
            -1 if limit is None else max(limit, run), row["waited_ms"] // 1000, row["counted"], idle_spans,
            predicted.get((row["job_id"], row["exactly_s"]), -1),
            _without_nan(risk.get((row["job_id"], row["exactly_s"]))), row["priority"] or 0,
        ))  # fmt: skip
        starts.append(start)
        interactive.append(row["interactive"])
        numbers.append(row["run"])
    return jobs, starts, interactive, numbers


def _without_nan(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def _risk_classes(jobs: list[GpuJob], after: Replay) -> tuple[IdleRiskClass, ...]:
    """Return the classes of predicted idle shares that have a job, the unknown ones last."""
    bounds = RISK_BOUNDS_PCT
    classes: dict[float | None, list[int]] = {bound: [] for bound in (*bounds, None)}
    for number, job in enumerate(jobs):
        risk = job.idle_risk_pct
        classes[None if risk is None else max(bound for bound in bounds if bound <= risk)].append(number)
    return tuple(
        IdleRiskClass(
            bound, len(rows), sum(jobs[row].run * jobs[row].gpus for row in rows) / _HOUR_S,
            sum(jobs[row].gpus * (end - begin) for row in rows for begin, end in jobs[row].idle) / _HOUR_S,
            float(after.returned_s[rows].sum()) / _HOUR_S,
        )
        for bound, rows in classes.items() if rows
    )  # fmt: skip


def _limited(jobs: Iterable[GpuJob], interactive: Iterable[bool], limit_s: float | None) -> list[GpuJob]:
    if limit_s is None:
        return list(jobs)
    most = max(1, round(limit_s))
    return [
        replace(job, run=most, request=min(job.request, most)) if is_interactive and job.run > most else job
        for job, is_interactive in zip(jobs, interactive, strict=True)
    ]


def _waits(jobs: list[GpuJob], before: Replay, after: Replay, counted: Flags) -> tuple[PartitionWaits, ...]:
    if not counted.any():
        return ()
    names = np.array([job.partition or "" for job in jobs])
    recorded = np.array([job.recorded_wait for job in jobs], np.float64)
    waits = []
    for name in (None, *sorted(set(names[counted].tolist()))):
        some = counted if name is None else counted & (names == name)
        figures = [
            float(value)
            for wait in (before.wait[some], after.wait[some])
            for value in (wait.mean(), np.median(wait), np.percentile(wait, 95))
        ]
        waits.append(PartitionWaits(name, int(some.sum()), float(recorded[some].mean()), *figures))
    return tuple(waits)
