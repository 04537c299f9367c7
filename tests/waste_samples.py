"""Synthetic but consistent ``WasteResult`` objects for tests of their consumers: sums add up."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl

from slurm_affinode.analysis.measures import GPU_MEMORY
from slurm_affinode.analysis.result import (
    GROUPINGS,
    JOB_COLUMNS,
    MEASURES,
    RUN_MEASURES,
    DataQuality,
    QualityIssue,
    UnmetDemand,
    WasteQuery,
    WasteResult,
)

SINCE = datetime(2026, 11, 1, tzinfo=UTC)
UNTIL = datetime(2026, 11, 8, tzinfo=UTC)
TIME = pl.Datetime("ms", "UTC")
JOB_TYPES: dict[str, Any] = {
    "cluster": pl.String, "job_id": pl.Int64, "submit": TIME, "array_job_id": pl.Int64, "array_task_id": pl.Int64,
    "job_name": pl.String, "user": pl.String, "account": pl.String, "partition": pl.String, "qos": pl.String,
    "state": pl.String, "start": TIME, "end": TIME, "nodes": pl.Int64, "node_list": pl.String, "gpus": pl.Int64,
    "gpu_model": pl.String, "mapping": pl.String,
}  # fmt: skip
assert tuple(JOB_TYPES) == JOB_COLUMNS

HOSTILE = (
    "<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "</style><script>alert(3)</script>",
    "{{ 7*7 }}", "=HYPERLINK(\"http://x\")", "+1+1", "@SUM(A1)", "-2+3", "a\x1b[31mred", "line\nbreak", "tab\there",
    "right\u202eto-left", "zero\u200bwidth", "javascript:alert(4)", "x" * 500, "' onmouseover='alert(5)", "&lt;b&gt;",
    "née Ångström 計算 👩‍🔬", "", "a,b;c|d", "\u2066isolate", "</svg><script>alert(6)</script>", "\x00nul", "\ufeffbom",
)  # fmt: skip
MODELS = {"NVIDIA A100-SXM4-80GB": 1.9, "NVIDIA H100 80GB HBM3": 3.4, "NVIDIA A40": 0.8}
STATES = ("COMPLETED", "COMPLETED", "COMPLETED", "TIMEOUT", "CANCELLED", "FAILED", "OUT_OF_MEMORY")


def make_result(
    jobs: int = 300, *, seed: int = 7, names: Sequence[str] = (), measured: bool = True, priced: bool = True
) -> WasteResult:
    """A week of ``jobs`` jobs; ``names`` are used in turn for job, user, account and other names."""
    rng = random.Random(seed)  # noqa: S311 - invented data
    rows = sorted(
        (_job(rng, i, names, measured, priced) for i in range(jobs)), key=lambda r: -(r["gpu_hours_idle"] or 0.0)
    )
    schema = {**JOB_TYPES, **MEASURES, **RUN_MEASURES}
    frame = pl.DataFrame(rows, schema=schema, orient="row")
    groups = {word: _group(rows, _grouper(word)) for word in GROUPINGS}
    total = {**_measures_of(rows), "jobs": len(rows), "users": len({r["user"] for r in rows})}
    total["unallocated_gpu_hours"] = 412.5 if measured else None
    total["gpu_hours_capacity"] = 412.5 + (total["gpu_hours_allocated"] or 0.0) if measured else None
    return WasteResult(
        query=WasteQuery(SINCE, UNTIL),
        generated=datetime(2026, 11, 8, 1, 30, tzinfo=UTC),
        currency="EUR",
        total=total,
        jobs=frame,
        groups=groups,
        over_time=_over_time(rng, total, measured),
        bucket_s=3600,
        idle_fraction_histogram=_idle_histogram(rows),
        window_histogram=_window_histogram(rng, measured),
        timelines=_timelines(rng, frame.head(30) if measured else frame.head(0)),
        quality=_quality(rng, rows, measured),
        prices=MODELS if priced else dict.fromkeys(MODELS),
        demand=_demand(frame, measured=measured),
        gpu_memory=_gpu_memory(frame, measured=measured),
    )


def _gpu_memory(jobs: pl.DataFrame, *, measured: bool) -> pl.DataFrame:
    """Memory of the GPU models in each cluster; no job ran on the smallest model."""
    memory = {"NVIDIA A100-SXM4-80GB": 80.0, "NVIDIA H100 80GB HBM3": 79.6, "NVIDIA A40": 45.0, "NVIDIA A30": 24.0}
    clusters = jobs["cluster"].unique(maintain_order=True) if measured else []
    rows = [(cluster, model, gib) for cluster in clusters for model, gib in memory.items()]
    return pl.DataFrame(rows, schema=GPU_MEMORY, orient="row")


def _demand(jobs: pl.DataFrame, *, measured: bool) -> UnmetDemand | None:
    """Demand in each partition of the jobs; a third of it is unmet."""
    if jobs.is_empty():
        return None
    names = jobs.group_by("cluster", "partition", maintain_order=True).agg(pl.len().cast(pl.Int64).alias("jobs"))
    waited = pl.col("jobs") * 3.0
    unknown = pl.lit(None, pl.Float64)
    partitions = names.with_columns(
        waited.alias("gpu_hours_waited"), (waited / 4).alias("gpu_hours_behind_larger"),
        (waited / 2 if measured else unknown).alias("gpu_hours_idle_meanwhile"),
        (waited / 3 if measured else unknown).alias("gpu_hours_unmet"),
    )  # fmt: skip
    unmet = pl.lit(1.5).alias("gpu_hours_unmet")
    first = jobs.head(10 if measured else 0)
    models = first.select("cluster", "partition", "gpu_model", unmet)
    waiter = [pl.col(name).reverse().alias(f"waiting_{name}")
              for name in ("job_id", "array_job_id", "array_task_id", "user")]  # fmt: skip
    holders = first.select(
        "cluster", "job_id", "array_job_id", "array_task_id", "user", "partition", unmet,
        (pl.int_range(pl.len()) + 1).alias("waiting_jobs"), *waiter,
    )  # fmt: skip
    return UnmetDemand(1200.0, partitions, models, holders)


def oversized_result() -> WasteResult:
    """A single job, of ann, that uses little of its GPU."""
    result = make_result()
    job = {"fb_peak_gib": 6.0, "util_mean_pct": 9.0, "gpu_model": "NVIDIA H100 80GB HBM3", "longest_idle_s": 60.0,
           "gpus": 1, "gpus_memory_measured": 1, "user": "ann", "cluster": "alpha", "gpu_hours_allocated": 30.0,
           "gpu_hours_measured": 30.0, "gpu_hours_busy": 29.0, "gpu_hours_low": 1.0, "gpu_hours_idle": 0.0,
           "submission": "batch"}  # fmt: skip
    jobs = result.jobs.head(1).with_columns(pl.lit(value).alias(name) for name, value in job.items())
    return replace(result, jobs=jobs.cast(result.jobs.schema))  # type: ignore[arg-type]


def empty_result() -> WasteResult:
    """An interval in which no GPU job ran."""
    return make_result(0, measured=False, priced=False)


def _job(rng: random.Random, i: int, names: Sequence[str], measured: bool, priced: bool) -> dict[str, Any]:
    start = SINCE + timedelta(seconds=rng.randrange(6 * 86400))
    hours = min(rng.lognormvariate(1.3, 1.1), (UNTIL - start).total_seconds() / 3600)
    gpus = rng.choice((1, 1, 1, 2, 4, 8))
    model = rng.choice(tuple(MODELS))
    allocated = gpus * hours
    mapping = (
        rng.choices(("labels", "recorded", "whole-node", "unknown"), (60, 20, 15, 5))[0] if measured else "unknown"
    )
    unknown = allocated if mapping == "unknown" else allocated * rng.choice((0.0, 0.0, 0.02, 0.1))
    known = allocated - unknown
    idle = known * min(1.0, rng.betavariate(0.35, 0.7))
    low = (known - idle) * rng.betavariate(1, 6)
    holds = rng.choice((2.0, 12.0, 31.0, 38.0, 70.0))
    has_known = known > 0
    price = MODELS[model] if priced else None

    def named(word: str, choices: int) -> str:
        return names[(i + len(word)) % len(names)] if names else f"{word}{int(choices * rng.betavariate(0.8, 2.2)):02d}"

    array = i % 9 == 0
    return {
        "cluster": "alpha", "job_id": 40000 + i, "submit": start - timedelta(minutes=7),
        "array_job_id": 39000 if array else None, "array_task_id": i if array else None,
        "job_name": named("train", 12), "user": named("user", 24), "account": named("project", 8),
        "partition": named("gpu", 4), "qos": named("normal", 3), "state": rng.choice(STATES), "start": start,
        "end": start + timedelta(hours=hours) if rng.random() > 0.03 else None, "nodes": 1,
        "node_list": f"node{rng.randrange(12):02d}", "gpus": gpus, "gpu_model": model, "mapping": mapping,
        "gpu_hours_allocated": allocated, "gpu_hours_measured": known, "gpu_hours_unknown": unknown,
        "gpu_hours_idle": idle if has_known else None, "gpu_hours_low": low if has_known else None,
        "gpu_hours_busy": known - idle - low if has_known else None,
        "idle_fraction": idle / known if has_known else None,
        "util_mean_pct": 100 * (1 - idle / known) * rng.uniform(0.3, 1.0) if has_known else None,
        "mem_gib_h": known * holds if has_known else None, "idle_mem_gib_h": idle * holds * 0.9 if has_known else None,
        "fb_mean_gib": holds * rng.uniform(0.6, 1) if has_known else None, "fb_peak_gib": holds if has_known else None,
        "energy_kwh": (known * 0.31 - idle * 0.2) if has_known else None,
        "idle_energy_kwh": idle * 0.06 if has_known else None,
        "idle_windows": (rng.randrange(1, 40) if idle else 0) if has_known else None,
        "longest_idle_s": 3600 * idle / gpus * rng.uniform(0.2, 1) if has_known else None,
        "cost": None if price is None else allocated * price,
        "idle_cost": None if price is None or not has_known else idle * price,
        "gpu_hours_by_labels": allocated if mapping == "labels" else 0.0,
        "gpu_hours_by_records": allocated if mapping == "recorded" else 0.0,
        "gpu_hours_by_whole_node": allocated if mapping == "whole-node" else 0.0,
        "gpu_hours_unmapped": allocated if mapping == "unknown" else 0.0,
        "submission": (None, "batch", "interactive")[i % 3], "gpus_unused": 0 if has_known else None,
        "gpu_hours_unused": 0.0 if has_known else None, "all_idle_s": 3000 * idle / gpus if has_known else None,
        "gpus_memory_measured": gpus if has_known else 0,
    }  # fmt: skip


def _grouper(word: str) -> str:
    return {"node": "node_list"}.get(word, word)


def _measures_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sums: dict[str, Any] = {}
    for key in MEASURES:
        values = [r[key] for r in rows if r[key] is not None]
        largest = key in ("fb_peak_gib", "longest_idle_s")
        sums[key] = None if not values else max(values) if largest else sum(values)
    if not rows:
        sums.update({key: 0.0 for key in MEASURES if key.startswith("gpu_hours")})
    measured = sums["gpu_hours_measured"]
    sums["idle_fraction"] = sums["gpu_hours_idle"] / measured if measured else None
    for key in ("util_mean_pct", "fb_mean_gib"):
        pairs = [(r[key], r["gpu_hours_measured"]) for r in rows if r[key] is not None]
        sums[key] = sum(v * w for v, w in pairs) / measured if pairs and measured else None
    return sums


def _group(rows: Sequence[Mapping[str, Any]], column: str) -> pl.DataFrame:
    by: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        by.setdefault(row[column], []).append(row)
    made = [{"name": name, "jobs": len(part), **_measures_of(part)} for name, part in by.items()]
    made.sort(key=lambda r: -(r["gpu_hours_idle"] or 0.0))
    return pl.DataFrame(made, schema={"name": pl.String, "jobs": pl.Int64, **MEASURES}, orient="row")


def _over_time(rng: random.Random, total: Mapping[str, Any], measured: bool) -> pl.DataFrame:
    buckets = [SINCE + timedelta(hours=i) for i in range(168)]
    rows = []
    for i, at in enumerate(buckets):
        level = (total["gpu_hours_allocated"] or 0.0) / 168 * (0.75 + 0.35 * ((i % 24) / 24) + 0.1 * rng.random())
        unknown = level if not measured else level * (0.9 if 70 <= i < 76 else 0.04)
        idle = (level - unknown) * (0.25 + 0.3 * ((i % 24) < 8) + 0.1 * rng.random())
        low = (level - unknown - idle) * 0.12
        parts = (idle, low, level - unknown - idle - low) if measured or not level else (None, None, None)
        rows.append((at, level, *parts, unknown))
    names = ("allocated", "idle", "low", "busy", "unknown")
    return pl.DataFrame(rows, schema={"bucket": TIME, **{f"gpu_hours_{n}": pl.Float64 for n in names}}, orient="row")


def _idle_histogram(rows: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    bins = [[i / 10, (i + 1) / 10, 0, 0.0] for i in range(10)]
    for row in rows:
        if row["idle_fraction"] is not None:
            place = bins[min(9, int(row["idle_fraction"] * 10))]
            place[2] += 1
            place[3] += row["gpu_hours_allocated"]
    schema = {"lower": pl.Float64, "upper": pl.Float64, "jobs": pl.Int64, "gpu_hours_allocated": pl.Float64}
    return pl.DataFrame(bins, schema=schema, orient="row")


def _window_histogram(rng: random.Random, measured: bool) -> pl.DataFrame:
    edges = [("under 1 min", 0, 60), ("1–5 min", 60, 300), ("5–15 min", 300, 900), ("15–60 min", 900, 3600),
             ("1–4 h", 3600, 14400), ("4–24 h", 14400, 86400), ("over 24 h", 86400, None)]  # fmt: skip
    rows: list[tuple[Any, ...]] = []
    for i, edge in enumerate(edges):
        count = rng.randrange(900) // (i + 1)
        hours = count * (edge[1] + (edge[2] or 2 * edge[1])) / 7200
        rows.append((*edge, count, hours) if measured else (*edge, None, None))
    schema = {
        "label": pl.String,
        "lower_s": pl.Float64,
        "upper_s": pl.Float64,
        "windows": pl.Int64,
        "gpu_hours": pl.Float64,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def _timelines(rng: random.Random, jobs: pl.DataFrame) -> pl.DataFrame:
    rows = []
    for job in jobs.iter_rows(named=True):
        slots = 60
        length = ((job["end"] or UNTIL) - job["start"]) / slots
        share = job["idle_fraction"] or 0.0
        state = 0.0
        for slot in range(slots):
            if rng.random() < 0.25:
                state = float(rng.random() < share)
            unknown = 1.0 if rng.random() < 0.02 else 0.0
            idle = (1 - unknown) * (state if rng.random() < 0.8 else rng.random())
            low = (1 - unknown - idle) * rng.choice((0.0, 0.0, 0.3))
            rows.append(
                (job["cluster"], job["job_id"], job["submit"], slot, job["start"] + slot * length,
                 job["start"] + (slot + 1) * length, idle, low, 1 - unknown - idle - low, unknown, 40.0, 30.0)
            )  # fmt: skip
    figures = ("idle", "low", "busy", "unknown", "util_mean_pct", "fb_mean_gib")
    schema: dict[str, Any] = {
        "cluster": pl.String, "job_id": pl.Int64, "submit": TIME, "slot": pl.Int64, "from": TIME, "to": TIME,
        **dict.fromkeys(figures, pl.Float64),
    }  # fmt: skip
    return pl.DataFrame(rows, schema=schema, orient="row")


def _quality(rng: random.Random, rows: Sequence[Mapping[str, Any]], measured: bool) -> DataQuality:
    mapped: dict[str, int] = {}
    for row in rows:
        mapped[row["mapping"]] = mapped.get(row["mapping"], 0) + 1
    gaps = "Two samples were more than three steps apart. Was the exporter down on these nodes?"
    unmapped = "Record GPU ids in the prolog, or give the history job labels."
    issues = (
        QualityIssue("gaps", "Gaps in the GPU metrics", gaps, 14, 61.2, ("node03, 2026-11-03 22:10 to 03:50",)),
        QualityIssue("unmapped-gpus", "Jobs whose GPUs are not known", unmapped, 16, 88.0, ("job 40012", "job 40077")),
        QualityIssue("bad-records", "Records that could not be read", "They were left out.", 2, None, ("line 17",)),
    )
    return DataQuality(
        samples=rng.randrange(600_000, 700_000) if measured else 0, devices=32 if measured else 0,
        nodes=12 if measured else 0, job_runs=len(rows) + 211, gpu_job_runs=len(rows),
        steps_s={30.0: 28, 60.0: 4} if measured else {}, mapped_runs=mapped, gap_gpu_hours=61.2 if measured else 0.0,
        issues=issues if measured else (),
    )  # fmt: skip
