"""Request traces of model servers: arrivals, tokens, prefill and decode work, and what an engine would experience.

Counts and percentiles are exact. Everything about engines is an estimate by a model with assumed parameters
(``engine_model``), and labeled as such.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import polars as pl

from slurm_affinode.model.finding import plain
from slurm_affinode.traces.engine_model import EngineModel, ModeledRequests, dealt, split

QUANTILES = (0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
MODELED_SPAN_S = 3600.0
"""The engines are modeled over the hour with the most tokens, at most."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Distribution of a count over requests. Percentiles are those of the nearest rank."""

    sum: int
    mean: float
    variance: float
    """Of the population."""
    min: int
    max: int
    percentiles: Mapping[str, int]
    """``p25``, ``p50``, ... -> count."""


@dataclass(frozen=True, slots=True)
class RequestArrivals:
    """When requests arrive."""

    per_s: float | None
    """Mean rate over the span; ``None`` for a single time."""
    gap_mean_s: float | None
    gap_cv: float | None
    """Coefficient of variation of the gaps between requests: 1 for a Poisson process."""
    busiest_minute: int
    """Requests in the busiest minute."""
    busiest_minute_at: datetime
    dispersion: float | None
    """Variance over mean of the requests per minute: 1 for a Poisson process; of whole minutes."""


@dataclass(frozen=True, slots=True)
class RequestWork:
    """Tokens of prefill and decode, and the KV cache that they need."""

    prefill_tokens: int
    decode_tokens: int
    prefill_share: float | None
    """Share of prefill in the tokens, 0-1; ``None`` without tokens."""
    kv_token_steps: float
    """KV tokens that a request holds, summed over its iterations and over requests: o s + o (o + 1) / 2 for s prompt
    and o generated tokens (arXiv 2605.04595)."""
    decode_to_prefill_ratio_median: float


@dataclass(frozen=True, slots=True)
class Load:
    """Estimate of the load of each minute on engines like the one in the model.

    Prefill takes the share p = arrival rate x E[prompt] x time per prefilled token of one engine's time. By Little's
    law the requests hold d = arrival rate x E[KV token steps] x iteration time tokens at any moment while nothing else
    runs, and d / (1 - p) with prefill in between. One engine of M KV tokens is overloaded if p + d / M exceeds 1, and k
    engines if it exceeds k.
    """

    iteration_s: float
    """Time of an iteration without prefill, at half the largest batch."""
    kv_tokens: int
    kv_needed_mean: float
    """d, mean over the minutes."""
    kv_needed_peak: float
    prefill_peak: float
    """p of the busiest minute."""
    mean: float
    """p + d / M, mean over the minutes."""
    peak: float
    overloaded_share: float
    """Share of the minutes in which one engine would be overloaded, 0-1."""
    engines_needed: int
    """Engines that are overloaded in no minute."""


@dataclass(frozen=True, slots=True)
class Experience:
    """Figures of modeled requests."""

    engines: str
    """``2 engines``, ``1 for prefill, 1 for decode``."""
    completed: int
    never_fits: int
    preemptions: int
    ttft_s: Mapping[str, float | None]
    """``mean``, ``p50``, ``p99`` -> seconds."""
    token_s: Mapping[str, float | None]
    """Time between tokens: ``mean``, ``p50``, ``p99`` of the requests' means."""
    e2e_s: Mapping[str, float | None]
    waiting_max: int
    kv_mean: float
    kv_full_share: float
    """Share of the time in iterations in which a request waited for room in the KV cache."""


@dataclass(frozen=True, slots=True)
class Modeled:
    """Estimates for a part of the trace, by the model of ``engine_model``."""

    since: datetime
    until: datetime
    requests: int
    engine: EngineModel
    load: Load
    monolithic: Experience
    phase_split: Experience | None
    """As many engines, of which some only prefill; ``None`` with one engine."""


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """Figures of one trace."""

    name: str
    requests: int
    since: datetime
    until: datetime
    span_s: float
    arrivals: RequestArrivals
    context: TokenCounts
    generated: TokenCounts
    correlation: float | None
    """Pearson's, of prompt and generated tokens; ``None`` if one of them is constant."""
    images: TokenCounts | None
    with_images: int | None
    work: RequestWork
    modeled: Modeled

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        row: dict[str, Any] = plain(self)
        return {**row, "modeled": {**row["modeled"], "engine": asdict(self.modeled.engine)}}


EDGES = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Lower bounds of the bins of token counts; the last one is open."""


@dataclass(frozen=True, slots=True)
class RequestAnalysis:
    """The figures of one trace, and the tables for its charts."""

    summary: RequestSummary
    minutes: pl.DataFrame
    """``minute``, ``requests``, ``context``, ``generated``: sums of the minutes with a request."""
    context_bins: tuple[int, ...]
    """Requests by prompt tokens, one for each of ``EDGES``."""
    generated_bins: tuple[int, ...]


def binned(values: pl.Series) -> tuple[int, ...]:
    """Return the number of counts in each bin of ``EDGES``."""
    per_bin = np.histogram(values.to_numpy(), bins=[*EDGES, np.inf])[0]
    return tuple(int(count) for count in per_bin)


def counts(values: pl.Series) -> TokenCounts:
    """Return the distribution of a column of counts that has at least one row and no nulls."""
    numbers = values.cast(pl.Int64)
    ranks = {f"p{round(100 * q)}": int(numbers.quantile(q, "nearest") or 0) for q in QUANTILES}
    return TokenCounts(
        sum=int(numbers.sum()), mean=float(numbers.mean() or 0.0),  # type: ignore[arg-type]
        variance=float(numbers.cast(pl.Float64).var(ddof=0) or 0.0),  # type: ignore[arg-type]
        min=int(numbers.min()), max=int(numbers.max()), percentiles=ranks,  # type: ignore[arg-type]
    )  # fmt: skip


def kv_token_steps(context: pl.Expr, generated: pl.Expr) -> pl.Expr:
    """Return the KV tokens that a request holds, summed over its iterations: o s + o (o + 1) / 2."""
    s, o = context.cast(pl.Float64), generated.cast(pl.Float64)
    return o * s + o * (o + 1) / 2


def analyse(name: str, requests: pl.DataFrame, engine: EngineModel, engines: int | None = None) -> RequestAnalysis:
    """Return the analysis of a trace (schema ``azure_llm.REQUESTS``, sorted by time, not empty).

    ``engines``: number of engines in the model; by default as many as the busiest minute needs.
    """
    times = requests["time"]
    since, until = times[0], times[-1]
    context, generated = requests["context"], requests["generated"]
    prefill, decode = int(context.sum()), int(generated.sum())
    images = requests["images"].drop_nulls()
    ratio = (generated / pl.select(pl.max_horizontal(context, pl.lit(1))).to_series()).median()
    steps = requests.select(kv_token_steps(pl.col("context"), pl.col("generated")).sum()).item()
    varied = context.n_unique() > 1 and generated.n_unique() > 1
    summary = RequestSummary(
        name=name, requests=requests.height, since=since, until=until, span_s=(until - since).total_seconds(),
        arrivals=_arrivals(times), context=counts(context), generated=counts(generated),
        correlation=float(np.corrcoef(context.to_numpy(), generated.to_numpy())[0, 1]) if varied else None,
        images=counts(images) if len(images) else None,
        with_images=int((images > 0).sum()) if len(images) else None,
        work=RequestWork(
            prefill_tokens=prefill, decode_tokens=decode,
            prefill_share=prefill / (prefill + decode) if prefill + decode else None, kv_token_steps=float(steps),
            decode_to_prefill_ratio_median=float(ratio or 0.0),  # type: ignore[arg-type]
        ),
        modeled=_modeled(requests, engine, engines),
    )  # fmt: skip
    minutes = per_minute(requests.select("time", "context", "generated"))
    return RequestAnalysis(summary, minutes, binned(context), binned(generated))


def _arrivals(times: pl.Series) -> RequestArrivals:
    gaps = times.diff().drop_nulls().dt.total_microseconds() / 1e6
    span = (times[-1] - times[0]).total_seconds()
    minutes = per_minute(pl.DataFrame({"time": times}))
    top = minutes.sort("requests", "minute", descending=[True, False]).row(0, named=True)
    mean_gap = float(gaps.mean()) if len(gaps) else 0.0  # type: ignore[arg-type]
    return RequestArrivals(
        per_s=(len(times) - 1) / span if span > 0 else None,
        gap_mean_s=mean_gap if len(gaps) else None,
        gap_cv=float(gaps.std(ddof=0)) / mean_gap if mean_gap > 0 else None,  # type: ignore[arg-type]
        busiest_minute=top["requests"], busiest_minute_at=top["minute"],
        dispersion=_dispersion(minutes),
    )  # fmt: skip


def _dispersion(minutes: pl.DataFrame) -> float | None:
    """Return variance over mean of the requests per minute, without the first and last minute, which are not whole."""
    whole: int = round((minutes["minute"][-1] - minutes["minute"][0]).total_seconds() / 60) - 1
    counts = minutes["requests"][1:-1].to_numpy().astype(np.float64)
    if whole < 2 or not len(counts):
        return None
    mean = float(counts.sum()) / whole
    squares = float(((counts - mean) ** 2).sum()) + (whole - len(counts)) * mean * mean
    return squares / whole / mean


def per_minute(requests: pl.DataFrame) -> pl.DataFrame:
    """Return ``minute``, ``requests`` and, if present, the sums of ``context``, ``generated`` and ``steps``.

    Only minutes with a request: a single wrong time can make a trace of millions of minutes.
    """
    sums = [pl.col(name).sum() for name in ("context", "generated", "steps") if name in requests.columns]
    return (
        requests.group_by(pl.col("time").dt.truncate("1m").alias("minute"))
        .agg(pl.len().cast(pl.Int64).alias("requests"), *sums)
        .sort("minute")
    )


def _modeled(requests: pl.DataFrame, engine: EngineModel, engines: int | None) -> Modeled:
    part = busiest_span(requests)
    steps = part.with_columns(steps=kv_token_steps(pl.col("context"), pl.col("generated")))
    load = _load(per_minute(steps.select("time", "context", "generated", "steps")), engine)
    number = engines or load.engines_needed
    arrival = (part["time"] - part["time"][0]).dt.total_microseconds().to_numpy() / 1e6
    context, generated = part["context"].to_numpy(), part["generated"].to_numpy()
    together = dealt(arrival, context, generated, engine, number)
    apart = None
    if number > 1:
        # Prefill engines in proportion to the time that prefill takes, at least one of each kind.
        prefill_s = engine.per_prefill_token_s * float(context.sum())
        decode_s = float(generated.sum()) * (engine.per_request_s + engine.base_s / engine.max_running)
        first = min(number - 1, max(1, round(number * prefill_s / (prefill_s + decode_s))))
        modeled = split(arrival, context, generated, engine, prefill_engines=first, decode_engines=number - first)
        apart = _experience(f"{first} for prefill, {number - first} for decode", modeled)
    label = "1 engine" if number == 1 else f"{number} engines"
    return Modeled(
        since=part["time"][0], until=part["time"][-1], requests=part.height, engine=engine, load=load,
        monolithic=_experience(label, together), phase_split=apart,
    )  # fmt: skip


def busiest_span(requests: pl.DataFrame) -> pl.DataFrame:
    """Return the requests of the hour with the most tokens, of a trace that is sorted by time and not empty."""
    if (requests["time"][-1] - requests["time"][0]).total_seconds() <= MODELED_SPAN_S:
        return requests
    hours = (
        per_minute(requests.select("time", "context", "generated"))
        .rolling("minute", period=f"{MODELED_SPAN_S:.0f}s")
        .agg((pl.col("context") + pl.col("generated")).sum().alias("tokens"))
    )
    until = hours["minute"][hours["tokens"].arg_max() or 0] + timedelta(minutes=1)
    since = until - timedelta(seconds=MODELED_SPAN_S)
    return requests.filter((pl.col("time") >= since) & (pl.col("time") < until))


def _load(busy: pl.DataFrame, engine: EngineModel) -> Load:
    minutes = busy.upsample("minute", every="1m").with_columns(pl.all().exclude("minute").fill_null(0))
    iteration_s = engine.base_s + engine.per_request_s * engine.max_running / 2
    held_tokens = minutes["steps"].to_numpy() * iteration_s / 60
    prefill = minutes["context"].to_numpy() * engine.per_prefill_token_s / 60
    load = prefill + held_tokens / engine.kv_tokens
    return Load(
        iteration_s=iteration_s, kv_tokens=engine.kv_tokens, kv_needed_mean=float(held_tokens.mean()),
        kv_needed_peak=float(held_tokens.max()), prefill_peak=float(prefill.max()), mean=float(load.mean()),
        peak=float(load.max()), overloaded_share=float((load > 1).mean()),
        engines_needed=max(1, math.ceil(float(load.max()))),
    )  # fmt: skip


def _experience(engines: str, modeled: ModeledRequests) -> Experience:
    return Experience(
        engines=engines, completed=int(np.isfinite(modeled.e2e_s).sum()), never_fits=modeled.never_fits,
        preemptions=int(modeled.preemptions.sum()), ttft_s=_spread(modeled.ttft_s), token_s=_spread(modeled.token_s),
        e2e_s=_spread(modeled.e2e_s), waiting_max=modeled.waiting_max, kv_mean=modeled.kv_mean,
        kv_full_share=modeled.kv_full_s / modeled.busy_s if modeled.busy_s else 0.0,
    )  # fmt: skip


def _spread(values: np.ndarray) -> dict[str, float | None]:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return {"mean": None, "p50": None, "p99": None}
    return {
        "mean": float(finite.mean()),
        "p50": float(np.quantile(finite, 0.5)),
        "p99": float(np.quantile(finite, 0.99)),
    }
