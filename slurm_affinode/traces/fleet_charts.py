"""Charts of the serving trace page."""

from __future__ import annotations

from itertools import pairwise

from markupsafe import Markup

from slurm_affinode.base.text import visible
from slurm_affinode.report import format as fmt
from slurm_affinode.report.charts import Bar, Series, Words, empty, histogram, lines, stacked_bars
from slurm_affinode.traces.fleet import LOADS, ServingResult, ServingSummary

MOST_REQUESTED = 10
_EXEC_EDGES = (5, 10, 15, 20, 30, 45, 60, 90, 120)
_LOAD_WORDS = {
    "base_model": "Base model", "lora": "LoRA adapter", "controlnet": "ControlNet", "pipeline": "Whole pipeline",
}  # fmt: skip


def _percent(value: float | None) -> str:
    return fmt.quantity(value, "%", digits=1)


def bands(result: ServingResult) -> Markup:
    """Draw the samples by duty-cycle band."""
    frame = result.bands
    values = [None if v is None else 100 * v for v in frame["fraction"].to_list()]
    parts = ", ".join(f"at {label} %: {_percent(v)}" for label, v in zip(frame["label"].to_list(), values, strict=True))
    words = Words("bands", "Samples by duty cycle", f"Share of all samples: {parts}.")
    return histogram(
        words, frame["label"].to_list(), [Series("Samples", values, "idle")], unit="% of samples",
        x_label="GPU duty cycle, % (0: exactly)", value=_percent,
    )  # fmt: skip


def memory_bands(result: ServingResult) -> Markup:
    """Draw the mean memory by duty-cycle band."""
    frame = result.bands
    values = frame["memory_mean_gb"].to_list()
    amounts = ", ".join(
        f"at {label} %: {fmt.number(v, digits=1)}" for label, v in zip(frame["label"], values, strict=True)
    )
    words = Words("memory-bands", "Mean GPU memory held, by duty cycle", f"GB held by a sample: {amounts}.")
    return histogram(
        words,
        frame["label"].to_list(),
        [Series("Memory held", values, "1")],
        unit="GB",
        x_label="GPU duty cycle, % (0: exactly)",
    )


def devices(result: ServingResult) -> Markup:
    """Draw the pods by idle fraction in ten bins, the last one closed."""
    fractions = result.devices["idle_fraction"].to_list()
    counts = [0] * 10
    for fraction in fractions:
        counts[min(9, int(fraction * 10 + 1e-9))] += 1
    labels = [f"{10 * i}–{10 * i + 10}" for i in range(10)]
    words = Words(
        "devices", "Pods by the share of their samples at zero",
        "Number of pods: " + ", ".join(f"{label} %: {n}" for label, n in zip(labels, counts, strict=True)) + ".",
    )  # fmt: skip
    return histogram(
        words, labels, [Series("Pods", counts, "idle")], unit="pods", x_label="Share of a pod's samples at zero, %",
        value=fmt.count,
    )  # fmt: skip


def device_percentiles(result: ServingResult) -> Markup:
    """Draw the cumulative distribution of the pods' idle fraction."""
    fractions = sorted(result.devices["idle_fraction"].to_list())
    n = len(fractions)
    xs = [100 * (i + 1) / n for i in range(n)]
    percentiles = result.summary.device_idle_fraction_percentiles or {}
    texts = ", ".join(f"{key} {_percent(None if v is None else 100 * v)}" for key, v in percentiles.items())
    words = Words(
        "device-percentiles", "Idle share of the pods, ordered", f"Percentiles over pods: {texts or 'unknown'}.",
        "Pods from the least to the most idle. At 50 on the lower axis, the curve shows the idle share that half of "
        "the pods stay below.",
    )  # fmt: skip
    return lines(
        words, xs, [Series("Share of samples at zero", [100 * f for f in fractions], "idle")], unit="% idle",
        x_label="Share of the pods, %",
    )  # fmt: skip


def recipes(s: ServingSummary) -> Markup:
    """Draw the idle memory-time by both recipes."""
    words = Words(
        "recipes", "Memory-time held idle, by both recipes",
        f"Direct {_percent(_times100(s.idle_memory_fraction))}, per pod "
        f"{_percent(_times100(s.idle_memory_fraction_per_device))}.",
        "Direct: memory of the samples at zero. Per pod: each pod's whole memory-time times its share of samples at "
        "zero, summed over pods.",
    )  # fmt: skip
    whole, direct = s.memory_time_gb_h, s.idle_memory_time_gb_h
    if whole is None or direct is None or s.idle_memory_fraction_per_device is None:
        return empty(words, "This needs the duty-cycle and the memory table.")
    by_pod = s.idle_memory_fraction_per_device * whole
    bars = [
        Bar("Direct", _percent(_times100(s.idle_memory_fraction)), [direct, whole - direct]),
        Bar("Per pod", _percent(_times100(s.idle_memory_fraction_per_device)), [by_pod, whole - by_pod]),
    ]
    series = [Series("Held idle", [], "idle"), Series("Held while computing", [], "busy")]
    return stacked_bars(words, bars, series, unit="GB h", value=fmt.count)


def _times100(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


def over_time(result: ServingResult) -> Markup:
    """Draw the memory of the fleet over the hours of the trace."""
    frame = result.over_time
    idle = result.summary.mean_concurrently_idle_memory_tb
    words = Words(
        "over-time", "Memory held by the fleet",
        f"Held idle at the same time: {fmt.quantity(idle, 'TB', digits=2)} on average.",
    )  # fmt: skip
    return lines(
        words, frame["hour"].to_list(),
        [
            Series("Held by all pods", frame["memory_tb"].to_list(), "1"),
            Series("Held by idle pods", frame["idle_memory_tb"].to_list(), "idle"),
        ],
        unit="TB", x_label="Hours since the first sample",
    )  # fmt: skip


def lorenz(result: ServingResult) -> Markup:
    """Draw the Lorenz curve of requests over base models."""
    s = result.summary
    words = Words(
        "lorenz", "Requests over base models (Lorenz curve)",
        f"Gini coefficient {fmt.number(s.popularity_gini, digits=3)}.",
        "Models from the least to the most requested: at 90 on the lower axis, the curve shows the share of "
        "requests that the least requested 90 % of the models get together. The straight line is equal popularity.",
    )  # fmt: skip
    xs = [100 * x for x, _ in result.lorenz]
    return lines(
        words, xs,
        [
            Series("Requests", [100 * y for _, y in result.lorenz], "1"),
            Series("If all were requested equally often", xs, "2"),
        ],
        unit="% of requests", x_label="Base models, %, least requested first",
    )  # fmt: skip


def most_requested(result: ServingResult) -> Markup:
    """Draw the most requested base models."""
    frame = result.popularity
    total = sum(frame["requests"].to_list())
    top = frame.head(MOST_REQUESTED)
    words = Words("most-asked", "The most requested base models", "Requests of each of the most requested base models.")
    bars = [
        Bar(
            f"{i}. {fmt.clip(visible(name), 12)}",
            f"{fmt.count(n)} ({_percent(100 * n / total)})",
            [n],
        )
        for i, (name, n) in enumerate(top.iter_rows(), start=1)
    ]
    return stacked_bars(words, bars, [Series("Requests", [], "1")], unit="requests", value=fmt.count)


def load_latency(result: ServingResult) -> Markup:
    """Draw the mean load time of each component."""
    rows = {row["name"]: row for row in result.latency.iter_rows(named=True)}
    loads = [rows[name] for name in LOADS if name in rows]
    words = Words(
        "load", "Time to load, mean",
        ", ".join(f"{_LOAD_WORDS[r['name']]} {fmt.number(r['mean_s'], digits=2)} s" for r in loads) + ".",
    )  # fmt: skip
    bars = [
        Bar(
            _LOAD_WORDS[r["name"]],
            f"{fmt.number(r['mean_s'], digits=2)} s (median {fmt.number(r['median_s'], digits=1)}, "
            f"99 % within {fmt.number(r['p99_s'], digits=0)} s; {fmt.count(r['count'])} loads)",
            [r["mean_s"]],
        )
        for r in loads
    ]
    return stacked_bars(words, bars, [Series("Mean, s", [], "1")], unit="s")


def exec_times(result: ServingResult) -> Markup:
    """Draw the requests by execution time."""
    times = result.exec_times["exec_time_s"].to_list()
    edges = (0.0, *map(float, _EXEC_EDGES))
    counts = [0] * len(edges)
    for t in times:
        counts[max(i for i, edge in enumerate(edges) if t >= edge or i == 0)] += 1
    labels = [f"{int(a)}–{int(b)}" for a, b in pairwise(edges)] + [f"{int(edges[-1])}+"]
    s = result.summary
    words = Words(
        "exec-times", "Requests by execution time",
        f"Median {fmt.number(s.exec_time_median_s)} s, 99th percentile {fmt.number(s.exec_time_p99_s)} s.",
    )  # fmt: skip
    return histogram(
        words, labels, [Series("Requests", counts, "1")], unit="requests", x_label="Execution time, s", value=fmt.count
    )
