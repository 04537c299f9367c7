"""Usage of engines over a period, for reports: what each one did, and what its diagnoses cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import polars as pl

from slurm_affinode.engines.diagnosis.rules import ADVICE
from slurm_affinode.engines.diagnosis.series import EngineSeries
from slurm_affinode.metrics.schema import TIME
from slurm_affinode.model.serving import BY_SEVERITY, SEVERITIES, Diagnosis, EngineHealth

FOREMOST = 100
"""Most diagnoses of an engine that reports show: over a month there may be thousands."""


def foremost(diagnoses: Sequence[Diagnosis]) -> tuple[Diagnosis, ...]:
    """Return the ``FOREMOST`` most severe diagnoses, of these the longest, in their given order."""
    if len(diagnoses) <= FOREMOST:
        return tuple(diagnoses)
    chosen = sorted(range(len(diagnoses)), key=lambda place: _weight(diagnoses[place]))[:FOREMOST]
    return tuple(diagnoses[place] for place in sorted(chosen))


def _weight(diagnosis: Diagnosis) -> tuple[int, timedelta]:
    """Return the sort key: the most severe first, then the longest."""
    return BY_SEVERITY.index(diagnosis.severity), diagnosis.since - diagnosis.until


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """An engine with its figures for the period. ``None`` is unknown."""

    health: EngineHealth
    uptime_s: float
    """Time between successful scrapes, without restarts and long gaps."""
    requests: float | None
    """Requests completed."""
    failed_requests: float | None
    """Requests ended by an error, aborted, or not admitted."""
    generated_tokens: float | None
    kv_max: float | None
    """0-1."""
    waiting_max: float | None
    running_max: float | None
    preemptions: float | None
    idle_gpu_hours: float | None
    """GPU-hours in the times diagnosed as idle."""
    idle_gib_hours: float | None
    """GPU memory held in these times."""

    @property
    def gpus(self) -> int | None:
        """Number of GPUs."""
        return len(self.health.gpus) or None

    @property
    def problems(self) -> tuple[Diagnosis, ...]:
        """Diagnoses that are a warning or critical, most severe first, then longest."""
        return tuple(
            sorted((diagnosis for diagnosis in self.health.diagnoses if diagnosis.severity != "none"), key=_weight)
        )

    @property
    def urgency(self) -> tuple[int, float, float, str, str]:
        """Sort key: engines with the most severe diagnoses first, then those with the most idle GPU-hours."""
        worst = self.problems[0].severity if self.problems else "none"
        bad = sum((problem.until - problem.since).total_seconds() for problem in self.problems)
        key = self.health.key
        return BY_SEVERITY.index(worst), -(self.idle_gpu_hours or 0.0), -bad, key.node or "", key.address


def usage(health: EngineHealth, series: EngineSeries) -> EngineUsage:
    """Return the figures of an engine. ``series``: the samples from which its health was diagnosed."""
    last = len(series) - 1
    failed = [series.sum_of(name, 0, last) for name in ("failed", "rejected")]
    failure_counts = [value for value in failed if value is not None]
    spans = [float(series.time[end - 1] - series.time[first]) for first, end in series.segments]
    return EngineUsage(
        health,
        uptime_s=sum(spans),
        requests=series.sum_of("finished", 0, last),
        failed_requests=sum(failure_counts) if failure_counts else None,
        generated_tokens=series.sum_of("generation_tokens", 0, last),
        kv_max=series.peak_of("kv_usage", 0, last),
        waiting_max=series.peak_of("waiting", 0, last),
        running_max=series.peak_of("running", 0, last),
        preemptions=series.sum_of("preemptions", 0, last),
        idle_gpu_hours=_idle(health, series, "gpu_hours"),
        idle_gib_hours=_idle(health, series, "gib_hours"),
    )


def _idle(health: EngineHealth, series: EngineSeries, figure: str) -> float | None:
    """Return a figure added up over the idle times; 0 only if it is known that there were none."""
    idle = [dict(diagnosis.figures).get(figure) for diagnosis in health.diagnoses if diagnosis.kind == "idle"]
    if not idle:
        observed = series.is_exported("running") or bool(np.isfinite(series.progress).any())
        return 0.0 if observed else None
    values = [value for value in idle if value is not None]
    return sum(values) if len(values) == len(idle) else None


@dataclass(frozen=True, slots=True)
class DiagnosisCost:
    """All diagnoses of a kind in a period. ``None`` is unknown."""

    kind: str
    engines: int
    episodes: int
    seconds: float
    """Time of the episodes, added up over the engines."""
    gpu_hours: float | None
    """GPU-hours of these engines in that time, of those engines with known GPUs."""
    gpus_unknown: int
    """Engines whose GPUs are unknown."""
    gib_hours: float | None
    """GPU memory held in that time, for ``idle`` and ``squatter-signature``."""
    preemptions: float | None
    lost_tokens: float | None
    """Output that preemptions prevented, compared with the time without them."""
    waiting_max: float | None
    ttft_max_s: float | None
    """Largest mean time to first token at the end of an episode, for ``queue-unstable``."""

    @property
    def severity(self) -> str:
        """``none``, ``warning`` or ``critical``."""
        return SEVERITIES[self.kind]

    @property
    def advice(self) -> str:
        """Advice for the owner."""
        return ADVICE.get(self.kind, "")


def costs(engines: Iterable[EngineUsage]) -> tuple[DiagnosisCost, ...]:
    """Return the diagnoses by kind, most severe first, then those with the most GPU-hours and the longest."""
    by_kind: dict[str, list[tuple[EngineUsage, Diagnosis]]] = {}
    for engine in engines:
        for diagnosis in engine.health.diagnoses:
            by_kind.setdefault(diagnosis.kind, []).append((engine, diagnosis))
    costs = [_cost(kind, cases) for kind, cases in by_kind.items()]
    return tuple(
        sorted(costs, key=lambda cost: (BY_SEVERITY.index(cost.severity), -(cost.gpu_hours or 0.0), -cost.seconds))
    )


def _cost(kind: str, cases: Sequence[tuple[EngineUsage, Diagnosis]]) -> DiagnosisCost:
    seconds = [(diagnosis.until - diagnosis.since).total_seconds() for _, diagnosis in cases]
    engines = {id(engine): engine for engine, _ in cases}
    hours = [engine.gpus * time / 3600 for (engine, _), time in zip(cases, seconds, strict=True) if engine.gpus]
    figures = [dict(diagnosis.figures) for _, diagnosis in cases]

    def values(name: str) -> list[float]:
        return [row[name] for row in figures if name in row]

    lost = [row["lost_tokens_per_s"] * time for row, time in zip(figures, seconds, strict=True)
            if "lost_tokens_per_s" in row]  # fmt: skip
    storm = kind == "preemption-storm"
    return DiagnosisCost(
        kind, len(engines), len(cases), sum(seconds),
        gpu_hours=sum(hours) if hours else None,
        gpus_unknown=sum(engine.gpus is None for engine in engines.values()),
        gib_hours=sum(values("gib_hours")) if values("gib_hours") else None,
        preemptions=sum(values("preemptions")) if storm and values("preemptions") else None,
        lost_tokens=sum(lost) if lost else None,
        waiting_max=max(values("waiting_max"), default=None),
        ttft_max_s=max(values("ttft_s"), default=None) if kind == "queue-unstable" else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerReport:
    """The engines of a period."""

    engines: tuple[EngineUsage, ...]
    """Those with the most severe diagnoses first."""
    timelines: tuple[pl.DataFrame, ...]
    """``engines.diagnosis.timeline`` of the first engines."""
    note: str = ""
    """Origin of the samples if they are not the site's own; else empty."""


ENGINES: dict[str, pl.DataType] = {
    "cluster": pl.String(), "node": pl.String(), "address": pl.String(), "engine": pl.String(), "model": pl.String(),
    "rank": pl.String(), "job": pl.String(), "user": pl.String(), "gpus": pl.Int64(), "since": TIME, "until": TIME,
    "scrapes": pl.Int64(), "scrapes_failed": pl.Int64(), "uptime_s": pl.Float64(), "requests": pl.Float64(),
    "failed_requests": pl.Float64(), "generated_tokens": pl.Float64(), "kv_max": pl.Float64(),
    "waiting_max": pl.Float64(), "running_max": pl.Float64(), "preemptions": pl.Float64(),
    "idle_gpu_hours": pl.Float64(), "idle_gib_hours": pl.Float64(), "worst": pl.String(),
}  # fmt: skip
"""Columns of ``table``. ``worst``: kind of the most severe diagnosis; null if there is no problem."""


def table(engines: Iterable[EngineUsage]) -> pl.DataFrame:
    """Return the engines as a frame with the columns of ``ENGINES``."""
    rows = []
    for engine in engines:
        health = engine.health
        key = health.key
        rows.append((
            key.cluster, key.node, key.address, key.engine, key.model, key.rank, health.job, health.user, engine.gpus,
            health.since, health.until, health.samples, health.failed, engine.uptime_s, engine.requests,
            engine.failed_requests, engine.generated_tokens, engine.kv_max, engine.waiting_max, engine.running_max,
            engine.preemptions, engine.idle_gpu_hours, engine.idle_gib_hours,
            engine.problems[0].kind if engine.problems else None,
        ))  # fmt: skip
    return pl.DataFrame(rows, schema=ENGINES, orient="row")
