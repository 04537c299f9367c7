"""The sections on data quality and on the method: extent of the data, problems, rules, definitions, settings."""

from __future__ import annotations

import functools
import re
import tomllib

from markupsafe import Markup, escape

from slurm_affinode.analysis import definitions
from slurm_affinode.analysis.result import MAPPINGS, Thresholds, WasteQuery, WasteResult
from slurm_affinode.base.resources import asset_dir
from slurm_affinode.base.text import visible
from slurm_affinode.report import charts
from slurm_affinode.report import format as fmt
from slurm_affinode.report.charts import Bar, Series, Words
from slurm_affinode.report.context import Definition, Fact, Issue, PublishedShare, Section
from slurm_affinode.report.measures import shown

_MAPPING_WORDS = {
    "labels": "job labels in the GPU metrics",
    "recorded": "GPU ids recorded for the allocation",
    "whole-node": "the whole node was the job's",
    "unknown": "not found: all its time is unknown",
}
_MAPPING_FILLS = {"labels": "1", "recorded": "2", "whole-node": "3", "unknown": "unknown"}


@functools.cache
def published_shares() -> tuple[PublishedShare, ...]:
    """Return the idle shares of other clusters in ``reports/elsewhere.toml``."""
    table = tomllib.loads((asset_dir("reports") / "elsewhere.toml").read_text(encoding="utf-8"))
    return tuple(PublishedShare(**row) for row in table["row"])


def quality_facts(result: WasteResult) -> tuple[Fact, ...]:
    """Return the extent of the data behind the figures."""
    quality = result.quality
    steps = sorted(quality.steps_s.items(), key=lambda item: -item[1])
    step_text = ", ".join(f"{fmt.duration(step)} on {fmt.count(devices)} GPUs" for step, devices in steps[:4])
    return (
        Fact("GPU samples", fmt.count(quality.samples)),
        Fact("GPUs seen", f"{fmt.count(quality.devices)} on {fmt.count(quality.nodes)} nodes"),
        Fact("Sampling interval", (step_text + (", ..." if len(steps) > 4 else "")) or fmt.UNKNOWN),
        Fact("Job runs", f"{fmt.count(quality.job_runs)}, of which {fmt.count(quality.gpu_job_runs)} with GPUs"),
        Fact(
            "Measured", f"{shown(result.total, 'gpu_hours_measured')} of {shown(result.total, 'gpu_hours_allocated')}"
        ),
        Fact("In gaps of the history", fmt.hours(quality.gap_gpu_hours, "GPU-h")),
    )


def mapping(result: WasteResult) -> Markup:
    """Draw how the GPUs of the runs were identified."""
    counts = [(word, result.quality.mapped_runs.get(word, 0)) for word in MAPPINGS]
    whole = sum(n for _, n in counts)
    title = "How the GPUs of each job were found"
    help_text = "A job's time can only be measured where its GPUs are known. The ways are tried from top to bottom."
    if not whole:
        return charts.empty(Words("mapping", title, "", help_text), "There was no job with GPUs.")
    bars = [
        Bar(
            _MAPPING_WORDS[word],
            f"{fmt.count(n)} runs, {fmt.percent(n / whole)}",
            [n if word == w else None for w, _ in counts],
        )
        for word, n in counts
    ]
    summary = "; ".join(f"{bar.label}: {bar.note}" for bar in bars) + "."
    series = [Series(_MAPPING_WORDS[word], [], _MAPPING_FILLS[word]) for word, _ in counts]
    return charts.stacked_bars(Words("mapping", title, summary, help_text), bars, series, unit="runs", plain=True)


def issues(result: WasteResult) -> tuple[Issue, ...]:
    """Return the data quality issues, those with the most GPU-hours first."""
    ordered = sorted(result.quality.issues, key=lambda issue: (-(issue.gpu_hours or 0.0), -issue.count))
    return tuple(
        Issue(
            visible(issue.code),
            visible(issue.title),
            fmt.count(issue.count)
            + (f", {fmt.hours(issue.gpu_hours, 'GPU-h')}" if issue.gpu_hours is not None else ""),
            visible(issue.detail),
            tuple(fmt.clip(visible(example), 200) for example in issue.examples[:10]),
        )
        for issue in ordered
    )


def rules() -> tuple[Section, ...]:
    """Return the rules for computing figures from samples and runs."""
    return tuple(Section(rule.title, prose(rule.text)) for rule in definitions.rules().values())


def metric_definitions() -> tuple[Definition, ...]:
    """Return every figure with its formula, unit and source."""
    return tuple(
        Definition(f"def-{m.id}", m.name, m.unit, m.help, m.formula, m.source) for m in definitions.load().values()
    )


def prose(text: str) -> Markup:
    """Return escaped text with `` `word` `` as code."""
    parts = re.split(r"`([^`]+)`", text)
    return Markup("").join(Markup("<code>{}</code>").format(p) if i % 2 else escape(p) for i, p in enumerate(parts))


def settings(result: WasteResult) -> tuple[Fact, ...]:
    """Return the settings of the query."""
    query = result.query
    thresholds = query.thresholds
    facts = [
        Fact(
            "Interval",
            f"{fmt.moment(query.since, query.zone, seconds=True)} to "
            f"{fmt.moment(query.until, query.zone, seconds=True)}, half-open",
        ),
        Fact("Idle", f"every activity signal at or below {fmt.number(thresholds.idle_pct)} %"),
        Fact("Low", f"not idle, every activity signal at or below {fmt.number(thresholds.low_pct)} %"),
        Fact("Noise floor", _floors(thresholds)),
        Fact("Gap", f"two samples more than {fmt.number(thresholds.max_gap_steps)} sampling intervals apart"),
    ]
    prices = [
        f"{fmt.name(model)} {fmt.money(price, result.currency)}" if price is not None else f"{fmt.name(model)} no price"
        for model, price in sorted(result.prices.items())
    ]
    if prices and result.priced:
        facts.append(Fact("Price of a GPU-hour", ", ".join(prices[:12]) + (", ..." if len(prices) > 12 else "")))
    if result.emissions is not None:
        facts.append(Fact("Emissions", result.emissions.rule))
    return tuple(facts)


def _floors(thresholds: Thresholds) -> str:
    floors = [f"{name} {value:g} %" for name, value in thresholds.floors_pct.items() if value > 0]
    return f"counts as 0 up to: {', '.join(floors)}" if floors else "none: every value above 0 is activity"


def scope(query: WasteQuery) -> str:
    """Return the filters in words; empty if there are none."""
    named = (
        ("cluster", query.clusters),
        ("partition", query.partitions),
        ("account", query.accounts),
        ("user", query.users),
    )
    return "; ".join(f"{word} {', '.join(fmt.name(v) for v in values)}" for word, values in named if values)
