"""Diagnose inference engines from their samples, with GPU samples and events where these are known.

Nothing here reads a clock. An engine is diagnosed from its own samples alone, so that memory is bounded by a few
engines at a time, and several processes can each diagnose a part of them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

import numpy as np
import polars as pl

from slurm_affinode.base.spread import Spread
from slurm_affinode.engines.diagnosis import capacity, liveness, memory, queue
from slurm_affinode.engines.diagnosis.episodes import runs
from slurm_affinode.engines.diagnosis.rules import diagnosis, evidence
from slurm_affinode.engines.diagnosis.series import EngineSeries, conform, moment, streams
from slurm_affinode.engines.schema import IDENTITY
from slurm_affinode.model.serving import Diagnosis, EngineEvent, EngineHealth, EngineKey

IDLE_S = 600.0
ROWS = 60_000
"""Samples held in memory at a time, by each process."""
MANY = 100
"""Engines from which further processes, each of which needs a second to start, save time."""
_NOT_HEALTHY = frozenset({
    "idle", "asleep", "kv-saturated", "batch-full", "queue-unstable", "recovering", "preemption-storm",
    "request-too-large", "swap-thrashing", "stalled",
})  # fmt: skip
_GPU_COLUMNS = ("uuid", "index", "time", "fb_used_mib", "fb_total_mib", "util_pct", "power_w")
_HISTOGRAMS = ("prompt_lengths", "generation_lengths")


@dataclass(frozen=True, slots=True)
class EngineContext:
    """Facts about one engine from other sources. Absent is unknown."""

    gpus: pl.DataFrame | None = None
    """GPU samples of the engine's GPUs, with columns of the GPU metrics (``uuid``, ``time``, ``fb_used_mib``, ...)."""
    events: tuple[EngineEvent, ...] = ()
    job_running: bool | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """Parameters of the diagnosis."""

    idle_s: float = IDLE_S
    """Time without requests from which an engine is idle."""


_EMPTY_CONTEXT = EngineContext()
_DEFAULTS = Options()


@dataclass(frozen=True, slots=True)
class ExaminedEngine:
    """An engine with its health, and the data of the diagnoses."""

    health: EngineHealth
    series: EngineSeries
    samples: pl.DataFrame
    """Its samples, failed scrapes included. Histograms may be missing."""
    gpus: pl.DataFrame | None
    """Samples of its GPUs; ``None``: unknown."""


def examine(
    key: EngineKey, samples: pl.DataFrame, around: EngineContext = _EMPTY_CONTEXT, options: Options = _DEFAULTS
) -> Iterator[ExaminedEngine]:
    """Yield one engine, or each of its processes if several respond in turn.

    ``samples``: its samples, in any order. Raises ``ValueError`` if there are none.
    """
    for series in streams(key, samples):
        yield ExaminedEngine(_health(series, around, options), series, series.samples, around.gpus)


def _health(series: EngineSeries, around: EngineContext, options: Options) -> EngineHealth:
    gpus = memory.gpu_state(series, around.gpus)
    diagnoses: list[Diagnosis] = []
    if len(series):
        with np.errstate(invalid="ignore", divide="ignore"):
            limits = capacity.estimate(series)
            diagnoses += memory.unused(series, gpus, options.idle_s)
            diagnoses += capacity.saturation(series, limits)
            diagnoses += capacity.preemption_storms(series)
            diagnoses += capacity.swapping(series, limits)
            diagnoses += queue.instabilities(series, limits)
            diagnoses += liveness.without_progress(series, limits)
            diagnoses += memory.signature(series, gpus, options.idle_s, around.job_running)
            diagnoses += memory.leaks(series)
        diagnoses += _healthy(series, diagnoses)
    share = None
    if gpus is not None and np.isfinite(gpus.share).any():
        share = float(np.nanmax(gpus.share[-5:])) if np.isfinite(gpus.share[-5:]).any() else None
    diagnoses += liveness.endings(series, around.events, share)
    orphans = liveness.orphans(series)
    # The end of a server that left processes is one condition.
    diagnoses = [
        condition
        for condition in diagnoses
        if condition.kind != "ended" or not any(_within(condition, orphan) for orphan in orphans)
    ]
    diagnoses += orphans
    diagnoses.sort(key=lambda condition: (condition.since, condition.kind))
    return EngineHealth(
        series.key, series.job, series.user, series.gpus, moment(series.all_times[0]), moment(series.all_times[-1]),
        len(series.all_times), int(series.failed.sum()), tuple(diagnoses),
        moment(series.time[-1]) if len(series) else None, series.step_s or None,
    )  # fmt: skip


def _within(inner: Diagnosis, outer: Diagnosis) -> bool:
    return outer.since <= inner.since and inner.until <= outer.until


def _healthy(series: EngineSeries, diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Return the times in which no diagnosis of the load holds."""
    times = series.time
    if series.disordered:
        return []  # several processes respond, and cannot be distinguished
    free = np.isfinite(series.value("running")) | np.isfinite(series.progress)
    for condition in diagnoses:
        if condition.kind in _NOT_HEALTHY:
            begin, end = condition.since.timestamp() - 0.001, condition.until.timestamp() + 0.001
            free[np.searchsorted(times, begin) : np.searchsorted(times, end, side="right")] = False
    healthy = []
    for first, last in runs(series, free, close=0.0):
        length = float(times[last] - times[first])
        if last == first and len(series) > 1:
            continue
        running, waiting = series.peak_of("running", first, last), series.peak_of("waiting", first, last)
        usage = series.peak_of("kv_usage", first, last)
        ttft = series.ratio_of("ttft_s", "ttft_count", first, last)
        rate = series.rate_of("generation_tokens", first, last)
        finished = series.rate_of("finished", first, last)
        queue = series.value("waiting")[first : last + 1]
        queue = queue[np.isfinite(queue)]
        lasting = float(np.mean(queue > 0)) if len(queue) else 0.0
        proof = [
            evidence("healthy.scrapes", float(last - first + 1), 0.3),
            evidence("healthy.queue", waiting, 0.4, share=lasting, met=lasting < 0.5),
            evidence("healthy.kv", usage, 0.15),
            evidence("healthy.ttft", ttft, 0.15),
        ]
        late = int(series.failed[series.reached[first] : series.reached[last]].sum())
        healthy.append(diagnosis(
            "healthy.load", moment(times[first]), moment(times[last]), proof,
            figures={"seconds": length, "served_per_s": finished, "tokens_per_s": rate, "ttft_s": ttft,
                     "waiting_max": waiting, "kv_max": usage},
            doubts=["healthy.doubt-late"] if late else [], late=late,
            running=None if running is None else round(running), waiting=None if waiting is None else round(waiting),
            tokens_per_s=rate,
        ))  # fmt: skip
    return healthy


@dataclass(frozen=True, slots=True)
class Fleet:
    """Facts about engines from other sources, for many engines at a time."""

    gpus: pl.LazyFrame | None = None
    """GPU samples with columns of the GPU metrics. An engine's GPUs are those of its samples (``gpus``)."""
    events: Mapping[tuple[str | None, str], Sequence[EngineEvent]] = field(default_factory=dict)
    """By cluster and job ID."""
    log_events: tuple[EngineEvent, ...] = ()
    """Events in logs of all these engines."""
    ends: Mapping[tuple[str | None, str], datetime | None] = field(default_factory=dict)
    """Cluster and ID of each known job -> its end; ``None``: it runs."""


_NO_FLEET = Fleet()


def diagnose_all(
    samples: pl.LazyFrame, fleet: Fleet = _NO_FLEET, options: Options = _DEFAULTS
) -> Iterator[EngineHealth]:
    """Yield the health of every engine in ``samples``, as ``of_each``."""
    return of_each(samples, _health_of, fleet, options)


def _health_of(engine: ExaminedEngine) -> EngineHealth:
    return engine.health


def examine_all(
    samples: pl.LazyFrame, fleet: Fleet = _NO_FLEET, options: Options = _DEFAULTS
) -> Iterator[ExaminedEngine]:
    """Yield every engine in ``samples`` with its data, in this process. See ``of_each``."""
    work = _Work(conform(samples), fleet, options)
    for engines in _batches(work.counts()):
        yield from work.examine(engines)


Result = TypeVar("Result")


def of_each(
    samples: pl.LazyFrame, take: Callable[[ExaminedEngine], Result], fleet: Fleet = _NO_FLEET,
    options: Options = _DEFAULTS, *, many: int = MANY, spread: Spread | None = None,
) -> Iterator[Result]:  # fmt: skip
    """Yield ``take`` of every engine in ``samples``.

    With a column ``device``, as in the sample store, engines are in its order, otherwise in that of their identity. A
    few engines are in memory at a time. Histograms are read only for engines with an overload, whose estimate they make
    more exact. An address is an engine for each job that served there.

    From ``many`` engines on, each core has a process for a part of them, or ``spread`` is used: ``take`` is a function
    that can be pickled.
    """
    work = _Work(conform(samples), fleet, options)
    counts = work.counts()
    batches = list(_batches(counts))
    if spread is not None:
        for results in spread(_examined, batches, (work, take)):
            yield from results
        return
    workers = min(len(os.sched_getaffinity(0)), len(batches))
    if workers < 2 or len(counts) < many:
        for engines in batches:
            yield from map(take, work.examine(engines))
        return
    # Not forked: Polars has threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _begin, (work, take)) as pool:
        waiting: deque[Future[list[Result]]] = deque()
        try:
            for engines in batches:
                waiting.append(pool.submit(_examine_batch, engines))
                # Bounded: the results of a batch may be large.
                if len(waiting) > workers + 1:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


_of_process: list[tuple[_Work, Callable[[ExaminedEngine], Any]]] = []
"""In a process of the pool: its work. Facts about a fleet are sent once, not with each batch."""


def _begin(work: _Work, take: Callable[[ExaminedEngine], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the process that waits for this one
    _of_process.append((work, take))


def _examine_batch(engines: pl.DataFrame) -> list[Any]:
    (shared,) = _of_process
    return _examined(engines, shared)


def _examined(engines: pl.DataFrame, shared: tuple[_Work, Callable[[ExaminedEngine], Any]]) -> list[Any]:
    work, take = shared
    return [take(engine) for engine in work.examine(engines)]


@dataclass(frozen=True, slots=True)
class _Work:
    """Samples of engines, with the facts and options for their diagnosis."""

    whole: pl.LazyFrame
    """Conforming samples."""
    fleet: Fleet
    options: Options

    @property
    def by(self) -> list[str]:
        """Return the columns that tell engines apart."""
        return ["device"] if "device" in self.whole.collect_schema().names() else _KEY

    def counts(self) -> pl.DataFrame:
        """Return the engines, and the number of samples of each (``len``)."""
        counted = self.whole.select(self.by).group_by(self.by).len().sort(self.by, nulls_last=True)
        return counted.collect(engine="streaming")

    def examine(self, engines: pl.DataFrame) -> Iterator[ExaminedEngine]:
        """Yield some engines (rows of ``counts``)."""
        by = self.by
        names = [name for name in self.whole.collect_schema().names() if name not in _HISTOGRAMS]
        part = _samples_of_engines(self.whole.select(names), engines).collect(engine="streaming")
        gpus = _gpus_of(self.fleet.gpus, part)
        for chosen, engine_samples in part.partition_by(by, as_dict=True).items():
            key = EngineKey(*engine_samples.select(_KEY).row(0))
            engine = pl.DataFrame([chosen], schema=engines.select(by).schema, orient="row")
            yield from _examine_jobs(
                _samples_of_engines(self.whole, engine), key, engine_samples, gpus, self.fleet, self.options
            )


_KEY = list(IDENTITY)


def _batches(counts: pl.DataFrame) -> Iterator[pl.DataFrame]:
    total = counts["len"].cum_sum() // ROWS
    for _, part in counts.with_columns(total.alias("batch")).group_by("batch", maintain_order=True):
        yield part


def _samples_of_engines(samples: pl.LazyFrame, engines: pl.DataFrame) -> pl.LazyFrame:
    if "device" in engines.columns:
        # Stored samples are sorted by device: a range reads only the row groups of these engines.
        return samples.filter(pl.col("device").is_between(engines["device"].min(), engines["device"].max()))
    near = samples.filter(pl.col("address").is_in(engines["address"].unique().implode()))
    chosen = near.join(engines.select(_KEY).lazy(), on=_KEY, how="semi", nulls_equal=True, maintain_order="left")
    return chosen.sort(_KEY, nulls_last=True, maintain_order=True)


def _gpus_of(gpus: pl.LazyFrame | None, samples: pl.DataFrame) -> pl.DataFrame | None:
    if gpus is None:
        return None
    uuids = samples["gpus"].drop_nulls().unique().str.split(",").explode().unique()
    names = [name for name in _GPU_COLUMNS if name in gpus.collect_schema().names()]
    begin, end = samples["time"].min(), samples["time"].max()
    near = pl.col("uuid").is_in(uuids.implode()) & pl.col("time").is_between(
        pl.lit(begin).dt.offset_by("-2m"), pl.lit(end).dt.offset_by("2m")
    )
    return gpus.select(names).filter(near).collect(engine="streaming")


def _examine_jobs(  # noqa: PLR0917
    gpu_samples: pl.LazyFrame, key: EngineKey, samples: pl.DataFrame, gpus: pl.DataFrame | None, fleet: Fleet,
    options: Options,
) -> Iterator[ExaminedEngine]:  # fmt: skip
    whole: dict[str | None, pl.DataFrame] | None = None
    for job, job_samples in _by_job(samples).items():
        around = _around(key, job, job_samples, gpus, fleet)
        engines = list(examine(key, job_samples, around, options))
        overloaded = any(
            condition.kind == "queue-unstable" for engine in engines for condition in engine.health.diagnoses
        )
        if overloaded and (whole is not None or _have_lengths(gpu_samples)):
            whole = whole or _by_job(gpu_samples.collect(engine="streaming"))
            engines = list(examine(key, whole[job], around, options))
        yield from engines


def _have_lengths(samples: pl.LazyFrame) -> bool:
    """Return whether there are histograms, which make the estimate of an overload more exact."""
    names = samples.collect_schema().names()
    if "generation_lengths" not in names:
        return False
    presence = samples.select(pl.col(name).is_not_null().any() for name in _HISTOGRAMS if name in names)
    return any(presence.collect(engine="streaming").row(0))


def _by_job(samples: pl.DataFrame) -> dict[str | None, pl.DataFrame]:
    """Return the samples of each job that served at an address, by its ID, the earliest job first.

    A scrape without a job, for example a failed one, belongs to the job before it.
    """
    jobs = samples["job"].drop_nulls().unique()
    if len(jobs) < 2:
        return {str(jobs[0]) if len(jobs) else None: samples}
    ordered = samples.sort("time", maintain_order=True)
    job = pl.col("job").forward_fill().backward_fill().cast(pl.String).alias("of")
    parts = ordered.with_columns(job).partition_by("of", as_dict=True, include_key=False, maintain_order=True)
    return {job: part for (job,), part in parts.items()}


def _around(
    key: EngineKey, job: str | None, samples: pl.DataFrame, gpus: pl.DataFrame | None, fleet: Fleet
) -> EngineContext:  # fmt: skip
    own_gpus = None
    if gpus is not None:
        uuids = samples["gpus"].drop_nulls().unique().str.split(",").explode().unique()
        own_gpus = gpus.filter(pl.col("uuid").is_in(uuids.implode())) if len(uuids) else None
    events, running = fleet.log_events, None
    if job is not None:
        of = key.cluster, job
        events = (*events, *fleet.events.get(of, ()))
        if of in fleet.ends:
            end = fleet.ends[of]
            running = end is None or bool((samples["time"] <= end).all())
    return EngineContext(own_gpus, events, running)
