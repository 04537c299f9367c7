"""The machine-readable report ``summary.json``, described by ``docs/summary.schema.json``.

Unknown is ``null``, never 0. Times are ISO 8601 with ``Z``. Keys and units are those of ``docs/metrics.md``.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from datetime import datetime
from typing import Any

import polars as pl

from slurm_affinode import __version__
from slurm_affinode.analysis import actions, suspensions
from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.base import json_values
from slurm_affinode.base.times import WEEKDAYS, utc
from slurm_affinode.report import format as fmt
from slurm_affinode.report.measures import STATES, known_value

SCHEMA_VERSION = 1
Summary = dict[str, Any]


def build_summary(result: WasteResult, *, title: str = "GPU waste report", top: int = 15) -> Summary:
    """Return the summary as plain values for JSON. ``top``: how many of the most wasteful runs are listed."""
    query = result.query
    return {
        "schema_version": SCHEMA_VERSION,
        "generator": {"name": "slurm-affinode", "version": __version__},
        "title": title,
        "generated": _plain(result.generated),
        "query": {
            "since": _plain(query.since),
            "until": _plain(query.until),
            "clusters": list(query.clusters),
            "partitions": list(query.partitions),
            "accounts": list(query.accounts),
            "users": list(query.users),
            "idle_pct": query.thresholds.idle_pct,
            "low_pct": query.thresholds.low_pct,
            "max_gap_steps": query.thresholds.max_gap_steps,
            "floors_pct": dict(query.thresholds.floors_pct),
            "timezone": str(query.zone),
        },
        "accounting": {
            "known_until": {fmt.name(name): _plain(moment) for name, moment in sorted(query.known_until.items())},
            "caution": result.accounting_note or None,
        },
        "currency": result.currency,
        "total": {key: _plain(value) for key, value in result.total.items()},
        "groups": {word: _rows(frame) for word, frame in result.groups.items()},
        "over_time": {"bucket_s": result.bucket_s, "buckets": _rows(result.over_time)},
        "working_hours": _working_hours(result),
        "idle_fraction_histogram": _rows(result.idle_fraction_histogram),
        "window_histogram": _rows(result.window_histogram),
        "trend": _trend(result),
        "suspension_bound": _plain_values(bound_figures(result)),
        "waits": None if result.waits is None else _plain_values(asdict(result.waits)),
        "unmet_demand": _demand(result),
        "actions": [
            {name: _plain(value) for name, value in asdict(action).items()} for action in actions.actions(result)
        ],
        "worst_jobs": _rows(result.jobs.head(top)),
        "suspensions": _suspensions(result, top),
        "servers": _servers(result, top),
        "price_source": "site" if result.priced else "none" if result.total.get("cost") is None else "examples",
        "emissions": _plain_values(emission_figures(result)),
        "prices": {fmt.name(model): _plain(price) for model, price in result.prices.items()},
        "quality": _quality(result),
    }


TREND_KEYS = (
    "gpu_hours_capacity", "gpu_hours_allocated", "gpu_hours_busy", "gpu_hours_low", "gpu_hours_idle",
    "gpu_hours_unknown",
)  # fmt: skip


def _working_hours(result: WasteResult) -> Summary | None:
    working, frame = result.query.working, result.working_hours
    if working is None or frame is None:
        return None
    begin, end = working.clock
    days = [WEEKDAYS[day] for day in working.days]
    return {"days": days, "begin": begin, "end": end, "hours": _rows(frame)}


def _trend(result: WasteResult) -> Summary | None:
    if result.trend is None:
        return None
    return {"kind": result.trend.kind, "periods": [_plain_values(row) for row in trend_rows(result)]}


def trend_rows(result: WasteResult) -> list[Summary]:
    """Return the earlier periods with ``TREND_KEYS``, oldest first."""
    return [
        {"label": period.label, "since": period.since, "until": period.until}
        | {key: period.total.get(key) for key in TREND_KEYS}
        for period in (() if result.trend is None else result.trend.periods)
    ]


def emission_figures(result: WasteResult) -> Summary | None:
    """Return the site's emission factor, and the emissions in kg; ``None`` if the site has set none."""
    factor = result.emissions
    if factor is None:
        return None
    return {
        "grams_per_kwh": factor.grams_per_kwh,
        "pue": factor.pue,
        "source": factor.source,
        "kg_co2e": factor.kg(known_value(result.total, "energy_kwh")),
        "idle_kg_co2e": factor.kg(known_value(result.total, "idle_energy_kwh")),
    }


def bound_figures(result: WasteResult) -> Summary | None:
    """Return the bound of what suspensions would have returned; ``None`` if it is unknown."""
    bound = None if result.averaged else actions.suspension_bound(result)
    if bound is None:
        return None
    return {"after_s": actions.AFTER_S, "windows": bound.windows, "gpu_hours_returned": bound.gpu_hours}


def _demand(result: WasteResult) -> Summary | None:
    demand = result.demand
    if demand is None:
        return None
    return {
        "slot_s": _plain(demand.slot_s),
        "partitions": _rows(demand.partitions),
        "models": _rows(demand.models),
        "holders": _rows(demand.holders),
    }


def _suspensions(result: WasteResult, top: int) -> Summary | None:
    frame = result.suspensions
    if frame is None:
        return None
    totals = {key: _plain(value) for key, value in suspensions.totals(frame).items()}
    return {**totals, "list": _rows(frame.head(top))}


def _servers(result: WasteResult, top: int) -> Summary | None:
    report = result.servers
    if report is None:
        return None
    from slurm_affinode.engines.diagnosis.usage import costs, foremost, table  # noqa: PLC0415 - many sites have no model servers
    from slurm_affinode.report.servers_page import page_name  # noqa: PLC0415

    frame = table(report.engines)
    pairs = zip(_rows(frame.head(top)), report.engines, strict=False)
    return {
        "engines": frame.height,
        "idle_gpu_hours": _sum(frame["idle_gpu_hours"]),
        "idle_gib_hours": _sum(frame["idle_gib_hours"]),
        "note": report.note or None,
        "diagnoses": [{name: _plain(getattr(cost, name)) for name in _COST} for cost in costs(report.engines)],
        "list": [
            {
                **row,
                "page": page_name(engine.health) if place < len(report.timelines) else None,
                "diagnoses": [
                    {name: _plain(getattr(case, name)) for name in _DIAGNOSIS}
                    | {"figures": {name: _plain(value) for name, value in case.figures}}
                    for case in foremost(engine.health.diagnoses)
                ],
            }
            for place, (row, engine) in enumerate(pairs)
        ],
    }


_COST = (
    "kind", "severity", "engines", "episodes", "seconds", "gpu_hours", "gpus_unknown", "gib_hours", "preemptions",
    "lost_tokens", "waiting_max", "ttft_max_s", "advice",
)  # fmt: skip
_DIAGNOSIS = ("kind", "severity", "since", "until", "confidence", "summary", "advice", "doubt")


def _sum(values: pl.Series) -> float | None:
    """Return the sum of the known values; ``None`` if there is none, or all are 0 while others are unknown."""
    values_known = values.drop_nulls()
    total = float(values_known.sum())
    return _plain(total) if total or (len(values_known) and len(values_known) == len(values)) else None


def _quality(result: WasteResult) -> Summary:
    quality = result.quality
    return {
        "samples": quality.samples,
        "devices": quality.devices,
        "nodes": quality.nodes,
        "job_runs": quality.job_runs,
        "gpu_job_runs": quality.gpu_job_runs,
        "sample_steps": [{"step_s": step, "devices": n} for step, n in sorted(quality.steps_s.items())],
        "mapped_runs": dict(quality.mapped_runs),
        "gap_gpu_hours": _plain(quality.gap_gpu_hours),
        "issues": [
            {
                "code": issue.code,
                "title": issue.title,
                "detail": issue.detail,
                "count": issue.count,
                "gpu_hours": _plain(issue.gpu_hours),
                "examples": list(issue.examples),
            }
            for issue in quality.issues
        ],
    }


def _rows(frame: pl.DataFrame) -> list[Summary]:
    return [{key: _plain(value) for key, value in row.items()} for row in frame.iter_rows(named=True)]


def _plain_values(row: Summary | None) -> Summary | None:
    return None if row is None else {key: _plain(value) for key, value in row.items()}


def _plain(value: Any) -> Any:
    """Return a value that JSON can represent; NaN and infinity are unknown."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, datetime):
        return utc(value)
    return value


def to_json(summary: Summary) -> str:
    """Return the text of ``summary.json``: a line per key, and per row of a table.

    The C encoder of ``json`` knows no indentation; the one in Python takes ten times as long.
    """
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    lines = []
    for key, value in summary.items():
        rows = isinstance(value, list) and value
        text = "[\n  " + ",\n  ".join(map(encode, value)) + "\n ]" if rows else encode(value)
        lines.append(f" {encode(key)}: {text}")
    return json_values.shown("{\n" + ",\n".join(lines) + "\n}\n")


_BOUNDS = {"idle": ", at least", "low": " on average", "busy": ", at most"}
"""State -> addition to its label if only averages per run are known: they hide idle time within a run."""


def headline_rows(result: WasteResult) -> list[tuple[str, str, str]]:
    """Return the headline as rows for a terminal: label, GPU-hours, share of the allocated hours."""
    total = result.total
    allocated = known_value(total, "gpu_hours_allocated")
    rows = [("allocated", fmt.number(allocated), "")]
    if (capacity := known_value(total, "gpu_hours_capacity")) is not None:
        free = known_value(total, "unallocated_gpu_hours")
        rows = [("capacity", fmt.number(capacity), ""), ("not allocated", fmt.number(free), ""), *rows]
    averaged = result.averaged
    for state, label in STATES:
        hours = known_value(total, f"gpu_hours_{state}")
        share = fmt.percent(hours / allocated) if hours is not None and allocated else ""
        bound = _BOUNDS.get(state, "") if averaged else ""
        rows.append((label.lower() + bound, fmt.number(hours), share))
    return [(a, b, c.replace(fmt.NBSP, " ")) for a, b, c in rows]
