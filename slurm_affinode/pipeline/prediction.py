"""Predictions for a site or a log: read submissions, train, evaluate, and simulate the schedules that result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl

from slurm_affinode.analysis import idle_periods, squatters
from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import InputError
from slurm_affinode.base.times import utc
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.model.cluster import Job
from slurm_affinode.pipeline import report, stored_accounting
from slurm_affinode.pipeline.stored_accounting import NoAccountingError
from slurm_affinode.prediction import evaluation, features, intervals, quantile_model, submissions
from slurm_affinode.prediction.evaluation import MEDIAN, MODEL, PreparedTarget, TargetEvaluation
from slurm_affinode.prediction.features import FeatureTable
from slurm_affinode.prediction.history import Floats, Ints
from slurm_affinode.prediction.model_file import ModelFile, TargetModel, target_model
from slurm_affinode.slurm.accounting.schema import JOBS
from slurm_affinode.slurm.times import site_zone
from slurm_affinode.traces import queue_logs
from slurm_affinode.traces.job_log import JOBS as LOG_JOBS
from slurm_affinode.traces.job_log import UNKNOWN, JobLog, LeftOut
from slurm_affinode.whatif.figures import Figures, figures
from slurm_affinode.whatif.policy import Backfill, Order, SchedulingPolicy, Times
from slurm_affinode.whatif.simulation import Workload, simulate
from slurm_affinode.whatif.workload import Selection, prepare

Step = Callable[[str], None]
HISTORY = timedelta(days=365)
"""Before a prediction: jobs of accounting that it uses."""

_COLUMNS = (
    "cluster", "job_id", "submit", "job_name", "user", "account", "partition", "eligible", "start", "end", "elapsed_s",
    "timelimit_s", "nodes", "req_mem_bytes", "alloc_mem_bytes", "gpus", "max_rss_bytes", "work_dir", "submit_line",
)  # fmt: skip
_KEY = ("cluster", "job_id", "submit")
IDLE_HISTORY = timedelta(days=90)
"""Before the end of the jobs that are read: GPU metrics of which idle shares are computed."""
SHARES: dict[str, pl.DataType] = {
    "cluster": pl.String(),
    "job_id": pl.Int64(),
    "submit": JOBS["submit"],
    "idle_pct": pl.Float64(),
}
_RUN_COLUMNS = tuple(name for name in JOBS if name not in {"comment", "admin_comment", "work_dir", "submit_line"})
_IDS = 20_000
"""Jobs whose steps are read at a time."""


@dataclass(frozen=True, slots=True)
class SubmissionSource:
    """Submissions, and the log of them that can be simulated."""

    name: str
    submissions: pl.DataFrame
    log: JobLog | None
    """``None``: several clusters, or no GPU job."""
    positions: Ints
    """Row in ``submissions`` of each row of the log."""
    recorded_waits: bool
    """Whether it is known when jobs ended; otherwise they count as ended at their submission plus their run time."""

    @property
    def last_s(self) -> int:
        """Return the time of the last submission or end."""
        last = pl.max_horizontal(pl.col("submit_s").max(), pl.col("end_s").max())
        return int(self.submissions.select(last).item())


def read_trace(kind: str, path: Path) -> SubmissionSource:
    """Read a log or trace of a kind of ``queue_logs.READERS``. Raises ``InputError``."""
    log = queue_logs.read(kind, path)
    if log.jobs.is_empty():
        raise InputError("no usable job", where=log.name)
    rows = submissions.from_log(log)
    order = np.argsort(log.jobs["submit_s"].to_numpy(), kind="stable")
    positions = np.empty(len(order), np.int64)
    positions[order] = np.arange(len(order))
    return SubmissionSource(str(path), rows, log, positions, bool((log.jobs["wait_s"] != UNKNOWN).any()))


def read_site(
    config: Config, since: datetime, until: datetime, *, clusters: tuple[str, ...] = (), idle: bool = False,
    step: Step = lambda _: None,
) -> SubmissionSource:  # fmt: skip
    """Read the jobs of the database that ran in the interval. Raises ``AffinodeError``.

    ``idle``: whether the idle shares of the last ``IDLE_HISTORY`` are computed from GPU metrics, where there are any.
    """
    step("reading accounting")
    with Repository.open(config.db_url, create=False) as store:
        jobs = store.jobs(since, until, columns=_COLUMNS, clusters=clusters)
        if jobs.is_empty():
            raise NoAccountingError("no job ran in this interval", hint="choose an earlier --since, or ingest sacct")
        step("reading steps")
        ids = jobs["job_id"].unique().to_list()
        parts = [_peaks(store.steps_of(ids[first : first + _IDS])) for first in range(0, len(ids), _IDS)]
    shares = None
    if idle:
        step("searching idle periods")
        shares = idle_shares(config, max(since, until - IDLE_HISTORY), until, clusters)
    rows = submissions.from_accounting(jobs.select(_COLUMNS), pl.concat(parts), shares)
    log, positions = _pool(rows, jobs["cluster"].n_unique())
    return SubmissionSource(
        ", ".join(jobs["cluster"].drop_nulls().unique().sort()) or "accounting", rows, log, positions, True
    )


def idle_shares(
    config: Config, since: datetime, until: datetime, clusters: tuple[str, ...] = (), *, now: datetime | None = None
) -> pl.DataFrame:
    """Return ``SHARES`` of the GPU jobs that started and ended in the interval and whose GPUs all have samples.

    Time without samples counts as not idle. Raises ``AffinodeError``.
    """
    moment = now or datetime.now(UTC)
    query = WasteQuery(since, until, thresholds=report.thresholds(config), zone=site_zone(config.cluster.timezone))
    with contextlib.closing(SampleStore(config.history_dir)) as samples:
        if samples.span() is None:
            return pl.DataFrame(schema=SHARES)
        with Repository.open(config.db_url, create=False) as store:
            jobs = store.jobs(since, until, columns=_RUN_COLUMNS, clusters=clusters)
            gpus = store.allocation_gpus(since, until)
            query = stored_accounting.with_known(query, store, moment)
        limit_pct = query.thresholds.idle_pct
        gpus_of_runs = squatters.hold(query, jobs, gpus, samples, [limit_pct], moment)
        periods = idle_periods.find(samples, gpus_of_runs, limit_pct)
    measured = gpus_of_runs.pairs.group_by("run").agg(pl.col("at").n_unique().cast(pl.Int64).alias("devices"))
    idle = periods.group_by("run").agg((pl.col("end_ms") - pl.col("begin_ms")).sum().alias("idle_ms"))
    runs = gpus_of_runs.runs.filter(
        (pl.col("gpus") > 0) & pl.col("end").is_not_null() & (pl.col("start") >= since) & (pl.col("end") <= until)
    )
    share = 100.0 * pl.col("idle_ms").fill_null(0) / (pl.col("end") - pl.col("start")).dt.total_milliseconds()
    return (
        runs.filter(pl.col("end") > pl.col("start"))
        .join(measured, on="run")
        .filter(pl.col("devices") >= pl.col("gpus"))
        .join(idle, on="run", how="left")
        .select("cluster", "job_id", "submit", share.clip(0.0, 100.0).alias("idle_pct"))
        .cast(SHARES)  # type: ignore[arg-type]
    )


def _peaks(steps: pl.DataFrame) -> pl.DataFrame:
    """Return the peaks of runs: host memory of the largest step (tasks times their largest), GPU memory of a task."""
    tasks = pl.col("tasks").fill_null(1)
    return steps.group_by(_KEY).agg(
        (pl.col("max_rss_bytes") * tasks).max().cast(pl.Float64).alias("mem_bytes"),
        pl.col("gpu_mem_max_bytes").max().cast(pl.Float64).alias("gpu_mem_bytes"),
    )


def _pool(rows: pl.DataFrame, clusters: int) -> tuple[JobLog | None, Ints]:
    """Return the ended GPU jobs as a log, and their rows."""
    numbered = rows.with_row_index("row")
    usable = numbered.filter((pl.col("units") >= 1) & pl.col("run_s").is_not_null() & pl.col("end_s").is_not_null())
    if clusters != 1 or usable.is_empty():
        return None, np.empty(0, np.int64)
    without = rows["units"].null_count()
    left_out = (LeftOut("without a GPU count", without, 0.0, 0.0),) if without else ()
    run = pl.max_horizontal(pl.col("run_s").round().cast(pl.Int64), 1)
    jobs = usable.with_columns(
        run.alias("run_s"), pl.col("request_s").fill_null(UNKNOWN).cast(pl.Int64).alias("request_s"),
        pl.max_horizontal(pl.col("end_s") - run - pl.col("submit_s"), 0).alias("wait_s"),
        pl.lit(float("nan")).alias("user_mean_s"),
        pl.Series("user", features.key_codes(usable, ("user",))),
    )  # fmt: skip
    starts = jobs["submit_s"] + jobs["wait_s"]
    edges = pl.concat([
        pl.DataFrame({"time": starts, "change": jobs["units"]}),
        pl.DataFrame({"time": starts + jobs["run_s"], "change": -jobs["units"]}),
    ]).group_by("time").agg(pl.col("change").sum()).sort("time")  # fmt: skip
    capacity = int(edges["change"].cum_sum().max())  # type: ignore[arg-type]
    first = int(jobs["submit_s"].min())  # type: ignore[arg-type]
    log_jobs = jobs.with_columns(pl.col("submit_s") - first).select(*LOG_JOBS).cast(LOG_JOBS)  # type: ignore[arg-type]
    return JobLog("accounting", "GPU", log_jobs, left_out, capacity), usable["row"].cast(pl.Int64).to_numpy()


@dataclass(frozen=True, slots=True)
class ScheduleFigures:
    """A simulated schedule, of all jobs and of those of the test."""

    estimates: str
    """``requested``, ``last-two``, ``median``, ``lightgbm`` or ``actual``."""
    order: Order
    backfill: Backfill
    all_jobs: Figures
    tested: Figures | None
    """``None``: no job of the test is simulated."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures of all targets, and the schedules with the predicted run times."""

    source: str
    submissions: int
    recorded_waits: bool
    targets: tuple[TargetEvaluation, ...]
    capacity: int | None
    unit: str | None
    schedules: tuple[ScheduleFigures, ...]
    no_schedules: str | None
    """Why there are none."""
    left_out: tuple[LeftOut, ...]
    """Jobs that the log has and that cannot be used, and those larger than the machine."""


def train(source: SubmissionSource, *, now: datetime | None = None, step: Step = lambda _: None) -> ModelFile:
    """Train a model for each target of ``source``. Raises ``InputError`` for too few jobs."""
    models = []
    for target in evaluation.targets(source.submissions, source.name):
        step(f"training {target.name}")
        models.append(target_model(evaluation.prepare(source.submissions, target, tested=False)))
    submit = source.submissions["submit_s"]
    return ModelFile(
        features.VERSION, features.NAMES, utc(now or datetime.now(UTC)), source.name, int(submit[0]), int(submit[-1]),
        tuple(models),
    )  # fmt: skip


def evaluate(
    source: SubmissionSource, *, capacity: int | None = None, schedules: bool = True, step: Step = lambda _: None
) -> Evaluation:
    """Evaluate all predictors on the last jobs. Raises ``InputError`` for too few jobs."""
    targets, run = [], None
    for target in evaluation.targets(source.submissions, source.name):
        step(f"evaluating {target.name}")
        prepared = evaluation.prepare(source.submissions, target)
        if (evaluated := evaluation.evaluate(prepared)) is not None:
            targets.append(evaluated)
        if target.name == "run_s":
            run = prepared
    if not targets:
        raise InputError("no job of the last 30 % of the submissions has ended", where=source.name)
    log = source.log
    capacity = capacity or (None if log is None else log.capacity)
    reason = None
    if not schedules:
        reason = "not requested"
    elif log is None:
        reason = "jobs of several clusters (choose one with --cluster), or no GPU job"
    elif capacity is None:
        reason = "the log does not have the size of the machine: give --capacity"
    elif run is None:
        reason = "too few run times"
    if reason is not None or run is None or log is None or capacity is None:
        return Evaluation(source.name, source.submissions.height, source.recorded_waits, tuple(targets), None, None, (),
                          reason, () if log is None else log.left_out)  # fmt: skip
    simulated = list(_schedules(source, log, capacity, run, step))
    return Evaluation(
        source.name, source.submissions.height, source.recorded_waits, tuple(targets), capacity, log.unit,
        tuple(simulated), None, _left_out(log, capacity),
    )  # fmt: skip


def _left_out(log: JobLog, capacity: int) -> tuple[LeftOut, ...]:
    """Return what a simulation without requested times leaves out."""
    return prepare(log, capacity, SchedulingPolicy("fcfs", "none", "actual"), Selection(), partial=True).left_out


def predicted_median(prepared: PreparedTarget, predictor: str) -> Floats:
    """Return the predicted medians; before a model was trained, those of the median."""
    values: Floats = prepared.predictions[predictor][MEDIAN]
    if predictor == MODEL:
        before = np.arange(len(values)) < prepared.fitted
        values = np.where(before, prepared.predictions["median"][MEDIAN], values)
    return values


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Predicted run times of a log."""

    predictor: str
    reason: str
    predicted: Ints
    """By the row of the log, s; -1: unknown."""


def run_times(source: SubmissionSource) -> RunTimes:
    """Return the run times that the best predictor gives for each job of a log. Raises ``InputError`` for few jobs.

    A model is trained with the first half of the submissions; before, and where no model wins, baselines predict.
    """
    every = submitted_run_times(source)
    return replace(every, predicted=every.predicted[source.positions])


def submitted_run_times(source: SubmissionSource) -> RunTimes:
    """Return the same as ``run_times`` for each row of ``source.submissions``."""
    if not any(target.name == "run_s" for target in evaluation.targets(source.submissions, source.name)):
        raise InputError(f"fewer than {evaluation.LEAST_JOBS} jobs have a run time", where=source.name)
    prepared = evaluation.prepare(source.submissions, features.TARGETS[0])
    values = predicted_median(prepared, prepared.choice.predictor)
    return RunTimes(prepared.choice.predictor, prepared.choice.reason, _whole(values))


@dataclass(frozen=True, slots=True)
class IdleRisk:
    """Predicted shares of the run time in which jobs are idle."""

    predictor: str
    predicted_pct: Floats
    """By the row of the submissions; NaN: unknown. 1 % is 1 % or less."""


def idle_risk(source: SubmissionSource) -> IdleRisk:
    """Return the idle share that the best predictor gives for each submission. Raises ``InputError`` for few jobs."""
    target = next(target for target in features.TARGETS if target.name == "idle_pct")
    count = source.submissions[target.name].count()
    if count < evaluation.LEAST_JOBS:
        raise InputError(
            f"{count:,} jobs have samples of all their GPUs, fewer than the {evaluation.LEAST_JOBS} that a prediction "
            "of idle time needs", where=source.name,
        )  # fmt: skip
    prepared = evaluation.prepare(source.submissions, target)
    return IdleRisk(prepared.choice.predictor, predicted_median(prepared, prepared.choice.predictor))


@dataclass(frozen=True, slots=True)
class TargetDrift:
    """How well a model fits the jobs that were submitted and ended since it was trained."""

    target: str
    jobs: int
    coverage: float
    """Share of them inside the calibrated interval; ``intervals.COVERAGE`` is intended."""


def drift(source: SubmissionSource, model: ModelFile) -> tuple[TargetDrift, ...]:
    """Return the drift of each target for which at least ``intervals.LEAST_JOBS`` jobs have ended since."""
    drifts = []
    for trained in model.targets:
        target = next(candidate for candidate in features.TARGETS if candidate.name == trained.target)
        if trained.factors is None:
            continue
        table = features.build(source.submissions, target)
        values = _predictions(trained, table)
        rows = np.flatnonzero(
            (table.submit > model.last_s) & (table.end >= 0) & ~np.isnan(table.actual) & ~np.isnan(values).any(axis=0)
        )
        if len(rows) >= intervals.LEAST_JOBS:
            low, high = intervals.apply(trained.factors, values[:, rows], table.limit[rows])
            actual = table.actual[rows]
            drifts.append(TargetDrift(target.name, len(rows), float(((actual >= low) & (actual <= high)).mean())))
    return tuple(drifts)


def _predictions(trained: TargetModel, table: FeatureTable) -> Floats:
    """Return what a trained model predicts, one row for each level."""
    if trained.predictor == MODEL:
        return quantile_model.predict(trained.models, table)
    return table.baselines.get(trained.predictor, table.baselines["median"])


def expected_ends(
    config: Config, jobs: Iterable[Job], cluster: str, model: ModelFile, now: datetime
) -> dict[int, datetime]:
    """Return the ends of running jobs by their predicted run times, by raw ID, as far as accounting has the jobs.

    Raises ``AffinodeError`` if accounting cannot be read, or ``model`` does not predict run times.
    """
    trained = next((target for target in model.targets if target.target == "run_s"), None)
    if trained is None:
        raise InputError("the model does not predict run times", hint="train it with more jobs")
    rows = read_site(config, now - HISTORY, now, clusters=(cluster,)).submissions
    table = features.build(rows, features.TARGETS[0])
    values = _predictions(trained, table)[MEDIAN]
    run_s = dict(zip(rows.select("number", "submit_s").iter_rows(), _whole(values).tolist(), strict=True))
    ends = {}
    for job in jobs:
        begun = job.eligible or job.submit
        if job.start is None or begun is None or not job.allocated:
            continue
        predicted = run_s.get((job.job_id, int(min(begun, job.start).timestamp())), UNKNOWN)
        if predicted != UNKNOWN:
            ends[job.job_id] = job.start + timedelta(seconds=predicted)
    return ends


def _whole(values: Floats) -> Ints:
    """Return seconds as ``Workload.predicted``."""
    rounded: Ints = np.where(np.isnan(values), UNKNOWN, np.maximum(1, np.round(values))).astype(np.int64)
    return rounded


def _schedules(
    source: SubmissionSource, log: JobLog, capacity: int, run: PreparedTarget, step: Step
) -> list[ScheduleFigures]:
    """Simulate EASY and EASY-SJBF, or without requested times shortest first, with each kind of estimates."""
    requests = log.jobs.filter(pl.col("request_s") != UNKNOWN).height
    limited = requests >= (1 - features.FEW_WITHOUT) * log.jobs.height
    names = ["median", *([MODEL] if MODEL in run.predictions else [])]
    cases: list[tuple[str, Order, Backfill, Times]] = []
    if limited:
        for order in ("fcfs", "sjf"):
            cases += [(name, order, "easy", name) for name in ("requested", "last-two")]
            cases += [(name, order, "easy", "predicted") for name in names]
            cases.append(("actual", order, "easy", "actual"))
    else:
        cases.append(("none", "fcfs", "first-fit", "actual"))
        cases += [(name, "sjf", "first-fit", "predicted") for name in ("last-two", *names)]
        cases.append(("actual", "sjf", "first-fit", "actual"))
    simulated = []
    for name, order, backfill, times in cases:
        step(f"simulating {order}, {backfill} with {name} times")
        policy = SchedulingPolicy(order, backfill, times)
        prepared = prepare(log, capacity, policy, Selection(), partial=True)
        workload = prepared.workload
        if times == "predicted":
            workload = replace(
                workload, predicted=_whole(predicted_median(run, name)[source.positions[workload.place]])
            )
        starts = simulate(workload, prepared.capacity, policy)
        tested = source.positions[workload.place] >= run.selected
        simulated.append(ScheduleFigures(
            name, order, backfill, figures(workload, starts, prepared.capacity),
            figures(_rows(workload, tested), starts[tested], prepared.capacity) if tested.any() else None,
        ))  # fmt: skip
    return simulated


def _rows(workload: Workload, rows: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Workload:
    return Workload(
        workload.submit[rows], workload.run[rows], workload.units[rows], workload.request[rows], workload.user[rows],
        workload.user_mean[rows], workload.place[rows],
    )  # fmt: skip
