"""Waste in a fleet of serving pods: idle GPU memory, and the requests that the pods receive.

The input is a trace of samples per pod (each pod has one GPU or one share of a GPU) and a list of requests. GB and TB
are decimal (1e9, 1e12 bytes). A figure is None if its table is missing from the trace. The trace does not contain the
capacity of the GPUs, so no figure is relative to capacity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import polars as pl

from slurm_affinode.traces.gentd26 import GenTrace


def gini(amounts: Sequence[float]) -> float | None:
    """Return the Gini coefficient: 0 if all amounts are equal, near 1 if one has everything.

    G = sum_i (2 i - n - 1) x_i / (n sum_i x_i), with x sorted in ascending order and i = 1..n. There is no correction
    for small n. None without a positive sum. Raises ``ValueError`` for a negative amount.
    """
    ordered = sorted(amounts)
    total = math.fsum(ordered)
    if ordered and ordered[0] < 0:
        raise ValueError("the Gini coefficient is for amounts that are not negative")
    if total <= 0:
        return None
    n = len(ordered)
    return math.fsum((2 * i - n - 1) * x for i, x in enumerate(ordered, start=1)) / (n * total)


def top_share(amounts: Sequence[float], fraction: float) -> float | None:
    """Return the share (0-1) of the sum in the largest ceil(fraction x n) amounts. None without a positive sum."""
    total = math.fsum(amounts)
    if total <= 0:
        return None
    return math.fsum(sorted(amounts, reverse=True)[: top_count(len(amounts), fraction)]) / total


def top_count(count: int, fraction: float) -> int:
    """Return ceil(fraction x count)."""
    # Round first: binary fractions can exceed an integer slightly, which must not increase the count.
    return math.ceil(round(fraction * count, 9))


def lorenz(amounts: Sequence[float]) -> list[tuple[float, float]]:
    """Return the points (share of owners, share of the sum) of the Lorenz curve, from (0, 0) to (1, 1).

    Owners with the smallest amounts come first. Empty without a positive sum.
    """
    ordered = sorted(amounts)
    total = math.fsum(ordered)
    if total <= 0:
        return []
    points, cumulative = [(0.0, 0.0)], 0.0
    for i, x in enumerate(ordered, start=1):
        cumulative += x
        points.append((i / len(ordered), min(1.0, cumulative / total)))
    points[-1] = (1.0, 1.0)
    return points


def percentile(values: pl.Series, q: float) -> float | None:
    """Return the quantile q (0-1), with linear interpolation. Nulls are ignored; None if there is no value."""
    measured = values.drop_nulls()
    if measured.is_empty():
        return None
    result = measured.quantile(q, interpolation="linear")
    return None if result is None else float(result)


def mean(values: pl.Series) -> float | None:
    """Return the arithmetic mean. Nulls are ignored; None if there is no value."""
    result = values.drop_nulls().mean()
    return float(result) if isinstance(result, int | float) else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return ``part / whole``; None if either is unknown or ``whole`` is 0."""
    if part is None or whole is None or whole == 0:
        return None
    return part / whole


IDLE_PCT = 0.0
"""A sample is idle if its duty cycle is exactly 0."""
BUSY_PCT = 50.0
"""Samples above this are busy in the comparison of memory in idle and in busy samples."""
LOW_PCT = 5.0
LIGHT_PCT = 20.0
BANDS = (("0", None, 0.0), ("0–5", 0.0, 5.0), ("5–20", 5.0, 20.0), ("20–50", 20.0, 50.0), (">50", 50.0, None))
"""Bands of duty cycle (percent): label, above (exclusive), up to (inclusive)."""
LOADS = ("base_model", "lora", "controlnet", "pipeline")
STAGES = ("predict", "pipeline_inference", "queue_time")
TOP_FRACTION = 0.05
POINTS_OVER_TIME = 144
_MOST_REVERSED = 0.5
"""Share of reversed pairs up to which times of two stages are compared."""


@dataclass(frozen=True, slots=True)
class ServingSummary:
    """The figures of ``summary.json``; None is unknown. Units are in the names; fractions are 0-1."""

    samples: int | None = None
    """Rows of the duty-cycle table without duplicates of pod and time."""
    devices: int | None = None
    """Pods in the duty-cycle table."""
    sample_step_s: float | None = None
    """Median time between two samples of a pod."""
    span_h: float | None = None
    """Time from the first to the last sample."""
    ticks: int | None = None
    """Number of distinct sample times."""
    devices_live_mean: float | None = None
    """Samples per tick: mean number of pods that were live at the same time."""
    idle_sample_fraction: float | None = None
    above_50pct_sample_fraction: float | None = None
    utilization_mean_pct: float | None = None
    utilization_median_pct: float | None = None
    device_idle_fraction_percentiles: dict[str, float | None] | None = None
    devices_mostly_idle: int | None = None
    """Pods with more than half of their samples at 0."""
    devices_mostly_idle_fraction: float | None = None
    devices_mostly_below_5pct: int | None = None
    """Pods with more than half of their samples below 5 %."""
    devices_mean_below_20pct_fraction: float | None = None
    """Share of pods with a mean duty cycle below 20 %."""
    memory_samples: int | None = None
    memory_devices: int | None = None
    joined_samples: int | None = None
    """Rows with both a duty cycle and a memory value of the same pod and time."""
    memory_time_gb_samples: float | None = None
    memory_time_gb_h: float | None = None
    idle_memory_time_gb_samples: float | None = None
    idle_memory_time_gb_h: float | None = None
    idle_memory_fraction: float | None = None
    idle_memory_time_gb_samples_per_device: float | None = None
    idle_memory_fraction_per_device: float | None = None
    memory_mean_idle_gb: float | None = None
    memory_mean_busy_gb: float | None = None
    memory_idle_over_busy: float | None = None
    mean_concurrently_idle_memory_tb: float | None = None
    all_devices_at_once_idle_memory_tb: float | None = None
    """Idle memory if every pod of the trace were live at the same time, which never happens in it."""
    gpu_memory_capacity_gb: float | None = None
    """Always None for GenTD26: the trace does not contain it."""
    host_memory_mean_fraction: float | None = None
    host_memory_max_fraction: float | None = None
    requests: int | None = None
    requests_without_lora: int | None = None
    requests_with_lora: int | None = None
    exec_time_median_s: float | None = None
    exec_time_p99_s: float | None = None
    exec_time_mean_hot_s: float | None = None
    """Of the requests of the most requested base models (``TOP_FRACTION`` of them)."""
    exec_time_mean_cold_s: float | None = None
    """Of those of all other base models."""
    base_models: int | None = None
    lora_adapters: int | None = None
    popularity_gini: float | None = None
    popularity_top5pct_share: float | None = None
    load_latency_mean_s: dict[str, float | None] | None = None
    stage_latency_mean_s: dict[str, float | None] | None = None
    stage_pairs: int | None = None
    """Samples of inference alone and end to end, of the same pod and time."""
    stage_pairs_reversed_fraction: float | None = None
    """Share of them in which inference alone takes longer than end to end, which includes it."""
    computation_share_median: float | None = None
    """Inference alone by end to end; None if most pairs are reversed: the tables are not what they are called."""
    computation_share_exchanged_median: float | None = None
    """The same if the tables of the two had been exchanged."""
    queue_length_mean: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return field name -> value, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ServingResult:
    """The figures and the data of the charts. A frame is empty if its table is missing from the trace."""

    summary: ServingSummary
    bands: pl.DataFrame
    """``label``, ``samples``, ``fraction``, ``memory_mean_gb`` (None: unknown) for each of ``BANDS``."""
    devices: pl.DataFrame
    """``pod``, ``samples``, ``idle_fraction``, ``below_5pct_fraction``, ``utilization_mean_pct``, ``memory_mean_gb``;
    most idle first."""
    over_time: pl.DataFrame
    """``hour`` since the first sample, ``memory_tb`` of all pods, ``idle_memory_tb``: means over the bucket."""
    popularity: pl.DataFrame
    """``base_model``, ``requests``; most requests first."""
    lorenz: list[tuple[float, float]]
    latency: pl.DataFrame
    """``name`` (one of ``LOADS`` and ``STAGES``), ``count``, ``mean_s``, ``median_s``, ``p99_s``."""
    exec_times: pl.DataFrame
    """``exec_time_s``, one row per request that has one."""
    notes: tuple[str, ...]


def analyse(trace: GenTrace) -> ServingResult:
    """Compute all figures of the trace."""
    notes = list(trace.notes)
    duty = _samples(trace, "gpu_duty_cycle", notes)
    memory = _samples(trace, "gpu_memory", notes)
    devices = per_device(duty) if duty is not None else pl.DataFrame(schema=_DEVICE_SCHEMA)
    figures: dict[str, Any] = {}
    step_s = None
    if duty is not None:
        step_s = sampling_step_s(duty)
        figures |= utilization(duty, devices, step_s)
    if memory is not None:
        figures |= {"memory_samples": memory.height, "memory_devices": memory["pod"].n_unique()}
    joined = None
    if duty is not None and memory is not None:
        joined = duty.join(
            memory.rename({"value": "memory_bytes"}), on=["pod", "time_s"], how="inner", maintain_order="left"
        )
        figures |= memory_waste(joined, devices, step_s)
        devices = devices.join(
            joined.group_by("pod").agg((pl.col("memory_bytes").mean() / 1e9).alias("memory_mean_gb")),
            on="pod", how="left",
        )  # fmt: skip
    latency = latencies(trace.metrics)
    popularity = pl.DataFrame(schema={"base_model": pl.String(), "requests": pl.UInt32()})
    if trace.requests is not None:
        popularity = _popularity(trace.requests)
        figures |= requests(trace.requests, popularity)
    figures |= _other_figures(trace.metrics, latency)
    figures |= computation_share(_samples(trace, "predict", notes), _samples(trace, "pipeline_inference", notes))
    field_names = {field.name for field in fields(ServingSummary)}
    return ServingResult(
        ServingSummary(**{name: value for name, value in figures.items() if name in field_names}),
        bands=bands(duty, joined),
        devices=devices.sort("idle_fraction", "pod", descending=[True, False]),
        over_time=over_time(joined),
        popularity=popularity,
        lorenz=lorenz(popularity["requests"].to_list()),
        latency=latency,
        exec_times=_exec_times(trace.requests),
        notes=tuple(notes),
    )


_DEVICE_SCHEMA = {
    "pod": pl.String(), "samples": pl.UInt32(), "idle_fraction": pl.Float64(), "below_5pct_fraction": pl.Float64(),
    "utilization_mean_pct": pl.Float64(),
}  # fmt: skip


def _samples(trace: GenTrace, name: str, notes: list[str]) -> pl.DataFrame | None:
    """Return the rows of a GPU table without rows that lack a pod; of duplicates (pod and time) the last is kept."""
    frame = trace.metrics.get(name)
    if frame is None:
        return None
    named = frame.drop_nulls("pod")
    unique = named.unique(["pod", "time_s"], keep="last", maintain_order=True)
    if frame.height > named.height:
        notes.append(f"{name}: {frame.height - named.height} rows without a pod skipped")
    if named.height > unique.height:
        notes.append(f"{name}: {named.height - unique.height} rows repeat a pod and time; each is counted once")
    return unique


def sampling_step_s(samples: pl.DataFrame) -> float | None:
    """Return the median time (s) between consecutive samples of a pod; None if no pod has two samples."""
    gaps = samples.sort("pod", "time_s").select(pl.col("time_s").diff().over("pod"))["time_s"].drop_nulls()
    return percentile(gaps, 0.5)


def per_device(duty: pl.DataFrame) -> pl.DataFrame:
    """Return, per pod, the number of samples, the fractions at 0 and below 5 %, and the mean duty cycle (percent)."""
    return duty.group_by("pod", maintain_order=True).agg(
        pl.len().alias("samples"),
        (pl.col("value") <= IDLE_PCT).mean().alias("idle_fraction"),
        (pl.col("value") < LOW_PCT).mean().alias("below_5pct_fraction"),
        pl.col("value").mean().alias("utilization_mean_pct"),
    )


def utilization(duty: pl.DataFrame, devices: pl.DataFrame, step_s: float | None) -> dict[str, Any]:
    """Return the figures of the duty-cycle table. Percentiles are over the pods' fractions of samples at 0."""
    value, times = duty["value"], duty["time_s"]
    ticks = times.n_unique()
    idle = devices["idle_fraction"]
    mostly_idle = int((idle > 0.5).sum())
    return {
        "samples": duty.height,
        "devices": devices.height,
        "sample_step_s": step_s,
        "span_h": (_number(times.max()) - _number(times.min())) / 3600 if duty.height else None,
        "ticks": ticks,
        "devices_live_mean": ratio(duty.height, ticks),
        "idle_sample_fraction": mean(value <= IDLE_PCT),
        "above_50pct_sample_fraction": mean(value > BUSY_PCT),
        "utilization_mean_pct": mean(value),
        "utilization_median_pct": percentile(value, 0.5),
        "device_idle_fraction_percentiles": {f"p{q}": percentile(idle, q / 100) for q in (25, 50, 75, 90)},
        "devices_mostly_idle": mostly_idle,
        "devices_mostly_idle_fraction": ratio(mostly_idle, devices.height),
        "devices_mostly_below_5pct": int((devices["below_5pct_fraction"] > 0.5).sum()),
        "devices_mean_below_20pct_fraction": mean(devices["utilization_mean_pct"] < LIGHT_PCT),
    }


def memory_waste(joined: pl.DataFrame, devices: pl.DataFrame, step_s: float | None) -> dict[str, Any]:
    """Return memory in use, and in use while idle, by both recipes.

    Direct: sum of memory over the joined rows with duty cycle 0. Per pod: sum over pods of (memory over all joined
    rows of the pod) x (fraction of the pod's duty-cycle samples at 0), which assumes that memory and idleness of a pod
    are independent. Time: rows x ``step_s``. Mean concurrently idle: direct sum / number of distinct times.
    """
    if joined.is_empty():
        return {"joined_samples": 0}
    held_gb = _number(joined["memory_bytes"].sum()) / 1e9
    idle_rows = joined.filter(pl.col("value") <= IDLE_PCT)["memory_bytes"]
    idle = _number(idle_rows.sum()) / 1e9
    held_by_pod = joined.group_by("pod", maintain_order=True).agg(pl.col("memory_bytes").sum())
    per_pod = held_by_pod.join(devices, on="pod", how="inner", maintain_order="left")
    by_pod = _number((per_pod["memory_bytes"] * per_pod["idle_fraction"]).sum()) / 1e9
    mean_idle, mean_busy = mean(idle_rows), mean(joined.filter(pl.col("value") > BUSY_PCT)["memory_bytes"])
    hours = None if step_s is None else step_s / 3600
    idle_at_once = ratio(idle, joined["time_s"].n_unique())
    held_mean, fraction_by_pod = ratio(held_gb, joined.height), ratio(by_pod, held_gb)
    return {
        "joined_samples": joined.height,
        "memory_time_gb_samples": held_gb,
        "memory_time_gb_h": None if hours is None else held_gb * hours,
        "idle_memory_time_gb_samples": idle,
        "idle_memory_time_gb_h": None if hours is None else idle * hours,
        "idle_memory_fraction": ratio(idle, held_gb),
        "idle_memory_time_gb_samples_per_device": by_pod,
        "idle_memory_fraction_per_device": fraction_by_pod,
        "memory_mean_idle_gb": ratio(mean_idle, 1e9),
        "memory_mean_busy_gb": ratio(mean_busy, 1e9),
        "memory_idle_over_busy": ratio(mean_idle, mean_busy),
        "mean_concurrently_idle_memory_tb": ratio(idle_at_once, 1e3),
        "all_devices_at_once_idle_memory_tb": (
            None if held_mean is None or fraction_by_pod is None else devices.height * held_mean * fraction_by_pod / 1e3
        ),
    }


def requests(table: pl.DataFrame, popularity: pl.DataFrame) -> dict[str, Any]:
    """Return the figures of the request table. Popularity is requests per base model, where one is given."""
    adapters = table["loras"].list.len()
    named = table.drop_nulls("base_model")
    hot = pl.col("base_model").is_in(
        popularity["base_model"].head(top_count(popularity.height, TOP_FRACTION)).implode()
    )
    counts = popularity["requests"].to_list()
    return {
        "requests": table.height,
        "requests_without_lora": int((adapters == 0).sum()),
        "requests_with_lora": int((adapters > 0).sum()),
        "exec_time_median_s": percentile(table["exec_time_s"], 0.5),
        "exec_time_p99_s": percentile(table["exec_time_s"], 0.99),
        "exec_time_mean_hot_s": mean(named.filter(hot)["exec_time_s"]),
        "exec_time_mean_cold_s": mean(named.filter(~hot)["exec_time_s"]),
        "base_models": popularity.height,
        "lora_adapters": table["loras"].explode().drop_nulls().n_unique(),
        "popularity_gini": gini(counts),
        "popularity_top5pct_share": top_share(counts, TOP_FRACTION),
    }


def computation_share(predict: pl.DataFrame | None, whole: pl.DataFrame | None) -> dict[str, Any]:
    """Return the figures of samples (ms) of inference alone and end to end, of the same pod and time."""
    if predict is None or whole is None:
        return {}
    pairs = predict.join(whole, on=["pod", "time_s"], suffix="_whole").filter(
        pl.col("value") > 0, pl.col("value_whole") > 0
    )
    turned = mean((pairs["value"] > pairs["value_whole"]).cast(pl.Float64))
    share = pairs["value"] / pairs["value_whole"]
    return {
        "stage_pairs": pairs.height,
        "stage_pairs_reversed_fraction": turned,
        "computation_share_median": percentile(share, 0.5) if turned is not None and turned <= _MOST_REVERSED else None,
        "computation_share_exchanged_median": percentile(1 / share, 0.5),
    }


def _popularity(table: pl.DataFrame) -> pl.DataFrame:
    counted = table.drop_nulls("base_model").group_by("base_model").agg(pl.len().alias("requests"))
    return counted.sort("requests", "base_model", descending=[True, False])


def latencies(metrics: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    """Return count, mean, median and 99th percentile (s) of each latency table in the trace (the tables are in ms)."""
    rows = []
    for name in (*LOADS, *STAGES):
        frame = metrics.get(f"load_{name}" if name in LOADS else name)
        if frame is not None:
            seconds = frame["value"] / 1000
            rows.append((name, seconds.len(), mean(seconds), percentile(seconds, 0.5), percentile(seconds, 0.99)))
    schema = {
        "name": pl.String(), "count": pl.Int64(), "mean_s": pl.Float64(), "median_s": pl.Float64(),
        "p99_s": pl.Float64(),
    }  # fmt: skip
    return pl.DataFrame(rows, schema=schema, orient="row")


def _other_figures(metrics: Mapping[str, pl.DataFrame], latency: pl.DataFrame) -> dict[str, Any]:
    means = dict(zip(latency["name"].to_list(), latency["mean_s"].to_list(), strict=True))
    host, queue = metrics.get("host_memory"), metrics.get("queue_size")
    return {
        "load_latency_mean_s": {name: means.get(name) for name in LOADS},
        "stage_latency_mean_s": {name: means.get(name) for name in STAGES},
        "host_memory_mean_fraction": None if host is None else mean(host["value"]),
        "host_memory_max_fraction": None if host is None else percentile(host["value"], 1.0),
        "queue_length_mean": None if queue is None else mean(queue["value"]),
    }


def bands(duty: pl.DataFrame | None, joined: pl.DataFrame | None) -> pl.DataFrame:
    """Return the samples and the mean memory (GB) in each of ``BANDS``."""
    rows = []
    for label, above, up_to in BANDS:
        inside = pl.lit(value=True)
        if above is not None:
            inside &= pl.col("value") > above
        if up_to is not None:
            inside &= pl.col("value") <= up_to
        if duty is not None:
            count = duty.filter(inside).height
            memory = None if joined is None else mean(joined.filter(inside)["memory_bytes"])
            rows.append((label, count, ratio(count, duty.height), ratio(memory, 1e9)))
    schema = {"label": pl.String(), "samples": pl.Int64(), "fraction": pl.Float64(), "memory_mean_gb": pl.Float64()}
    return pl.DataFrame(rows, schema=schema, orient="row")


def over_time(joined: pl.DataFrame | None) -> pl.DataFrame:
    """Return memory (TB) of all pods, in total and while idle, as means over buckets of the trace's span."""
    schema = {"hour": pl.Float64(), "memory_tb": pl.Float64(), "idle_memory_tb": pl.Float64()}
    if joined is None or joined.is_empty():
        return pl.DataFrame(schema=schema)
    start, end = _number(joined["time_s"].min()), _number(joined["time_s"].max())
    width_s = max((end - start) / POINTS_OVER_TIME, 1.0)
    ticks = joined.group_by("time_s", maintain_order=True).agg(
        (pl.col("memory_bytes").sum() / 1e12).alias("memory_tb"),
        (pl.col("memory_bytes").filter(pl.col("value") <= IDLE_PCT).sum() / 1e12).alias("idle_memory_tb"),
    )
    bucket = ((pl.col("time_s") - start) / width_s).floor()
    return (
        ticks.group_by((bucket * width_s / 3600).alias("hour"), maintain_order=True)
        .agg(pl.col("memory_tb").mean(), pl.col("idle_memory_tb").mean())
        .sort("hour")
    )


def _exec_times(table: pl.DataFrame | None) -> pl.DataFrame:
    if table is None:
        return pl.DataFrame(schema={"exec_time_s": pl.Float64()})
    return table.select("exec_time_s").drop_nulls()


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
