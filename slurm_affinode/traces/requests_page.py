"""The page of request traces: arrivals, tokens, work, and what engines would experience."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import polars as pl
from markupsafe import Markup

from slurm_affinode.base.text import visible
from slurm_affinode.report import format as fmt
from slurm_affinode.report import render
from slurm_affinode.report.charts import Series, Words, histogram, stacked_time
from slurm_affinode.report.context import Card, Cell, Column, Table
from slurm_affinode.report.format import quantity
from slurm_affinode.traces.requests import (
    EDGES,
    Experience,
    RequestAnalysis,
    RequestSummary,
    TokenCounts,
)

_MOST_BARS = 120
"""A longer trace is drawn in steps of several minutes."""
_STEPS_S = (60, 300, 900, 3600, 2 * 3600, 6 * 3600, 86400)


@dataclass(frozen=True, slots=True)
class RequestSection:
    """One trace on the page."""

    key: str
    title: str
    lead: str
    cards: tuple[Card, ...]
    tokens: Table
    charts: tuple[Markup, ...]
    model_lead: tuple[str, ...]
    model: Table


def html(results: Sequence[RequestAnalysis], notes: Sequence[str]) -> str:
    """Return the self-contained page for one or several traces."""
    sections = tuple(_section(f"trace-{index}", result) for index, result in enumerate(results, start=1))
    return render.page(
        "trace_requests.html.j2", title="Requests of language models", zone=UTC, sections=sections, notes=tuple(notes)
    )


def _section(key: str, result: RequestAnalysis) -> RequestSection:
    s = result.summary
    images = "" if s.with_images is None else f" {fmt.count(s.with_images)} of them have images."
    return RequestSection(
        key=key,
        title=visible(s.name),
        lead=(
            f"{fmt.count(s.requests)} requests from {fmt.period(s.since, s.until, UTC)} "
            f"({fmt.duration(s.span_s)}).{images}"
        ),
        cards=_cards(s),
        tokens=_tokens(key, s),
        charts=(_over_time(key, result), _lengths(key, result)),
        model_lead=_model_lead(s),
        model=_model(key, s),
    )


def _cards(s: RequestSummary) -> tuple[Card, ...]:
    a = s.arrivals
    return (
        Card("Requests per second", fmt.number(a.per_s), sub=f"{fmt.count(a.busiest_minute)} in the busiest minute",
             unknown=a.per_s is None),
        Card("Burstiness", fmt.number(a.dispersion), unknown=a.dispersion is None,
             sub=f"coefficient of variation of the gaps: {fmt.number(a.gap_cv)}",
             help="Variance over mean of the requests per minute. 1: arrivals are independent (Poisson)."),
        Card("Prompt", fmt.number(s.context.mean), unit="tokens",
             sub=f"median {fmt.count(s.context.percentiles['p50'])}"),
        Card("Answer", fmt.number(s.generated.mean), unit="tokens",
             sub=f"median {fmt.count(s.generated.percentiles['p50'])}"),
        Card("Prefill", fmt.percent(s.work.prefill_share), sub="of all tokens are prompts",
             unknown=s.work.prefill_share is None,
             help="The rest is generated one token at a time. Prefill is limited by computation, decoding by memory."),
    )  # fmt: skip


def _tokens(key: str, s: RequestSummary) -> Table:
    names = ("p25", "p50", "p75", "p90", "p95", "p99")
    rows: list[tuple[str, TokenCounts]] = [("Prompt tokens", s.context), ("Generated tokens", s.generated)]
    if s.images is not None:
        rows.append(("Images", s.images))
    return Table(
        f"tokens-{key}",
        "Tokens per request",
        (
            Column("Tokens"),
            *(Column(label, "number") for label in ("Sum", "Mean", "Variance", "Minimum", *names, "Maximum")),
        ),
        tuple(
            (
                Cell(label),
                *(
                    Cell(text, "number")
                    for text in (
                        fmt.count(c.sum), fmt.number(c.mean), fmt.number(c.variance), fmt.count(c.min),
                        *(fmt.count(c.percentiles[name]) for name in names), fmt.count(c.max),
                    )
                ),
            )
            for label, c in rows
        ),
        sortable=False,
        note="" if s.correlation is None
        else f"Correlation of prompt and generated tokens: {fmt.number(s.correlation, digits=3)} (Pearson).",
    )  # fmt: skip


def _over_time(key: str, result: RequestAnalysis) -> Markup:
    minutes = result.minutes
    shortest = ((minutes["minute"][-1] - minutes["minute"][0]).total_seconds() + 60) / _MOST_BARS
    step = next((step_s for step_s in _STEPS_S if step_s >= shortest), math.ceil(shortest / 86400) * 86400)
    grouped = (
        minutes.group_by(pl.col("minute").dt.truncate(f"{step}s"))
        .agg(pl.col("context").sum() / step, pl.col("generated").sum() / step)
        .sort("minute")
        .upsample("minute", every=f"{step}s")
        .with_columns(pl.col("context", "generated").fill_null(0.0))
    )
    starts: list[datetime] = grouped["minute"].to_list()
    prompt, answer = grouped["context"].to_list(), grouped["generated"].to_list()
    words = Words(
        f"{key}-over-time", "Tokens per second",
        f"At most {fmt.number(max(p + a for p, a in zip(prompt, answer, strict=True)))} tokens per second in a step of "
        f"{fmt.duration(step)}.",
    )  # fmt: skip
    return stacked_time(
        words, starts, float(step), [Series("Prompt", prompt, "1"), Series("Generated", answer, "2")], unit="tokens/s"
    )


def _lengths(key: str, result: RequestAnalysis) -> Markup:
    last = max(
        (i for i, pair in enumerate(zip(result.context_bins, result.generated_bins, strict=True)) if any(pair)),
        default=0,
    )
    labels = [f"{low:,}" for low in EDGES[: last + 1]]
    words = Words(
        f"{key}-lengths", "Requests by number of tokens",
        f"The median prompt has {fmt.count(result.summary.context.percentiles['p50'])} tokens, the median answer "
        f"{fmt.count(result.summary.generated.percentiles['p50'])}.",
    )  # fmt: skip
    return histogram(
        words, labels,
        [
            Series("Prompt", list(result.context_bins[: last + 1]), "1"),
            Series("Generated", list(result.generated_bins[: last + 1]), "2"),
        ],
        unit="requests", x_label="Tokens, from this number up to the next one", value=fmt.count,
    )  # fmt: skip


def _model_lead(s: RequestSummary) -> tuple[str, ...]:
    m, e, load = s.modeled, s.modeled.engine, s.modeled.load
    part = "the whole trace" if m.requests == s.requests else "the hour with the most tokens, from "
    part += "" if m.requests == s.requests else fmt.moment(m.since, UTC)
    needed = "1 engine is" if load.engines_needed == 1 else f"{fmt.count(load.engines_needed)} engines are"
    return (
        f"Estimates by a queueing model over {part}: an engine with a KV cache of {fmt.count(e.kv_tokens)} tokens "
        f"and at most {fmt.count(e.max_running)} requests in a batch, whose iterations take "
        f"{quantity(1e3 * e.base_s, 'ms')} plus {quantity(1e6 * e.per_request_s, 'µs')} per running request and "
        f"{quantity(1e6 * e.per_prefill_token_s, 'µs')} per token of a prompt. These parameters are assumptions, not "
        "measurements; prompts in chunks, prefix caching and the transfer of KV caches are not modeled.",
        f"One such engine would be overloaded in {fmt.percent(load.overloaded_share)} of the minutes. In the busiest "
        f"one, prefill alone takes {fmt.percent(load.prefill_peak)} of one engine's time, and the requests hold "
        f"{fmt.count(round(load.kv_needed_peak))} tokens of KV cache at any moment: {needed} needed.",
    )  # fmt: skip


def _model(key: str, s: RequestSummary) -> Table:
    m = s.modeled
    deployments: list[tuple[str, Experience]] = [(f"Prefill and decode together: {m.monolithic.engines}", m.monolithic)]
    if m.phase_split is not None:
        deployments.append((f"Phase splitting: {m.phase_split.engines}", m.phase_split))
    return Table(
        f"model-{key}",
        "Expected latency and queueing of the requests (model)",
        (
            Column("Engines"),
            Column("Time to first token", "number", unit="s, mean"), Column("", "number", unit="s, p99"),
            Column("Time between tokens", "number", unit="ms, mean"), Column("", "number", unit="ms, p99"),
            Column("Whole request", "number", unit="s, p99"), Column("Waiting", "number", unit="maximum"),
            Column("Preemptions", "number"), Column("KV cache", "number", unit="mean"),
            Column("Never fit", "number", title="Requests that need more than the whole KV cache"),
        ),
        tuple(
            (
                Cell(label),
                *(
                    Cell(text, "number")
                    for text in (
                        fmt.number(result.ttft_s["mean"]), fmt.number(result.ttft_s["p99"]),
                        fmt.number(_ms(result.token_s["mean"])), fmt.number(_ms(result.token_s["p99"])),
                        fmt.number(result.e2e_s["p99"]), fmt.count(result.waiting_max), fmt.count(result.preemptions),
                        fmt.percent(result.kv_mean), fmt.count(result.never_fits),
                    )
                ),
            )
            for label, result in deployments
        ),
        sortable=False,
        note="" if m.phase_split is not None else "With one engine there is nothing to split; see --engines.",
    )  # fmt: skip


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
