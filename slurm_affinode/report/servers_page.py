"""The page of a model server: its metrics and those of its GPUs on one time axis, and its diagnoses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo

import polars as pl
from markupsafe import Markup

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.base.text import visible
from slurm_affinode.engines.diagnosis.usage import ServerReport, foremost
from slurm_affinode.engines.store import engine_id
from slurm_affinode.model.finding import Evidence
from slurm_affinode.model.serving import DIAGNOSES, Diagnosis, EngineHealth
from slurm_affinode.report import format as fmt
from slurm_affinode.report import render
from slurm_affinode.report.charts import Band, Series, Words, empty, legend_list, time_lines
from slurm_affinode.report.context import Card, Cell, Column, Table

_FILLS = {"none": "busy", "warning": "low", "critical": "idle"}
_LEGEND = legend_list([Series("critical", [], "idle"), Series("warning", [], "low"), Series("no problem", [], "busy")])
_CHARTS: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    ("kv", "KV cache in use", "0–1", (("kv_usage", "Largest in the step"),)),
    ("requests", "Requests", "requests", (("waiting", "Waiting (most)"), ("running", "Running (mean)"))),
    ("tokens", "Tokens per second", "tokens/s", (("tokens_per_s", "Generated"), ("prompt_tokens_per_s", "Prompt"))),
    ("preemptions", "Preemptions per second", "1/s", (("preemptions_per_s", "Preemptions"),)),
    ("gpu-util", "GPU utilization", "%", (("gpu_util_pct", "Mean over the GPUs"),)),
    ("gpu-memory", "GPU memory", "GiB", (("gpu_memory_gib", "Sum over the GPUs"),)),
)


@dataclass(frozen=True, slots=True)
class DiagnosisSection:
    """A diagnosis with its evidence, formatted."""

    title: str
    when: str
    summary: str
    rule: str
    advice: str
    doubt: str
    severity: str
    evidence: Table


@dataclass(frozen=True, slots=True)
class ServerSection:
    """One engine on the page."""

    key: str
    title: str
    lead: str
    cards: tuple[Card, ...]
    charts: tuple[Markup, ...]
    diagnoses: tuple[DiagnosisSection, ...]
    left_out: str
    """A note on diagnoses that are not shown; empty if all are."""


def html(
    engines: Sequence[tuple[EngineHealth, pl.DataFrame]],
    zone: tzinfo,
    *,
    generated: datetime | None = None,
    back: str = "",
    origin: str = "",
) -> str:
    """Return the self-contained page of engines with their timelines (``engines.diagnosis.timeline``).

    ``back``: file name of the report to which the page belongs; ``origin``: that of the samples, if it must be named.
    """
    sections = tuple(
        _section(f"engine-{number}", health, frame, zone) for number, (health, frame) in enumerate(engines, start=1)
    )
    title = sections[0].title if len(sections) == 1 else "Model servers"
    return render.page(
        "servers.html.j2",
        title=title,
        zone=zone,
        generated=generated,
        sections=sections,
        back=back,
        origin=origin,
        legend=_LEGEND,
    )


def page_name(health: EngineHealth) -> str:
    """Return the file name of the page of an engine next to a report; it depends on the identity of the engine only."""
    key = health.key
    return f"server-{engine_id(key.cluster, key.node, key.address, key.engine, key.model, key.rank):016x}.html"


def pages(report: ServerReport, query: WasteQuery, generated: datetime, back: str) -> dict[str, str]:
    """Return file name -> page of the engines that have a timeline."""
    return {
        page_name(engine.health): html(
            [(engine.health, frame)], query.zone, generated=generated, back=back, origin=report.note
        )
        for engine, frame in zip(report.engines, report.timelines, strict=False)
    }


def _section(key: str, health: EngineHealth, frame: pl.DataFrame, zone: tzinfo) -> ServerSection:
    k = health.key
    model = f" {visible(k.model)}" if k.model else ""
    rank = f", rank {visible(k.rank)}" if k.rank is not None else ""
    job = f"job {visible(health.job)}" if health.job else "job unknown"
    owner = visible(health.user) if health.user else "user unknown"
    shown = foremost(health.diagnoses)
    remaining = len(health.diagnoses) - len(shown)
    gpus = f"{len(health.gpus)} GPUs" if len(health.gpus) != 1 else "1 GPU"
    return ServerSection(
        key=key,
        title=f"{k.engine}{model} at {visible(k.address)}{rank}",
        lead=(
            f"{owner}, {job}, {gpus if health.gpus else 'GPUs unknown'}; {fmt.count(health.samples)} scrapes from "
            f"{fmt.period(health.since, health.until, zone)}, {fmt.count(health.failed)} failed."
        ),
        cards=_cards(health, frame),
        charts=_charts(key, shown, frame, zone),
        diagnoses=tuple(_diagnosis(f"{key}-{n}", diagnosis, zone) for n, diagnosis in enumerate(shown)),
        left_out=""
        if remaining <= 0
        else f"The {fmt.count(len(shown))} most severe and longest of "
        f"{fmt.count(len(health.diagnoses))} diagnoses are shown.",
    )


def _cards(health: EngineHealth, frame: pl.DataFrame) -> tuple[Card, ...]:
    now = health.current[0] if health.current else None
    most: dict[str, float | None] = {name: frame[name].max() for name in ("kv_usage", "waiting")}  # type: ignore[misc]
    rate = frame["tokens_per_s"].mean()
    worst = [diagnosis for diagnosis in health.diagnoses if diagnosis.severity == "critical"]
    return (
        Card("At the end", now.kind if now else "unknown", kind=_card_kind(now), unknown=now is None,
             sub="" if now is None else DIAGNOSES[now.kind]),
        Card("Critical", str(len(worst)), sub=", ".join(dict.fromkeys(diagnosis.kind for diagnosis in worst)),
             kind="idle" if worst else ""),
        Card("KV cache, most", fmt.percent(most["kv_usage"]), unknown=most["kv_usage"] is None),
        Card("Waiting, most", fmt.count(most["waiting"]), unit="requests", unknown=most["waiting"] is None),
        Card("Generated", fmt.number(rate), unit="tokens/s", sub="mean of the period",  # type: ignore[arg-type]
             unknown=rate is None),
    )  # fmt: skip


def _card_kind(now: Diagnosis | None) -> str:
    if now is None:
        return "unknown"
    return {"none": "busy", "warning": "low", "critical": "idle"}[now.severity]


def _charts(key: str, shown: Sequence[Diagnosis], frame: pl.DataFrame, zone: tzinfo) -> tuple[Markup, ...]:
    bands = [
        Band(
            diagnosis.since,
            diagnosis.until,
            _FILLS[diagnosis.severity],
            f"{diagnosis.kind}: {diagnosis.summary}",
            int(diagnosis.severity != "critical"),
        )
        for diagnosis in sorted(shown, key=lambda diagnosis: ("none", "warning", "critical").index(diagnosis.severity))
    ]
    moments = frame["time"].to_list()
    charts = []
    for name, title, unit, columns in _CHARTS:
        series = [
            Series(label, frame[column].to_list(), str(place))
            for place, (column, label) in enumerate(columns, start=1)
            if frame[column].null_count() < frame.height
        ]
        most = max((v for s in series for v in s.values if v is not None), default=None)
        words = Words(f"{key}-{name}", title, f"At most {fmt.number(most)} {unit}." if series else "Not measured.")
        if not series:
            charts.append(empty(words, "Not exported by this engine, or not measured."))
            continue
        charts.append(time_lines(words, moments, series, unit=unit, zone=zone, bands=bands))
    return tuple(charts)


def _diagnosis(key: str, diagnosis: Diagnosis, zone: tzinfo) -> DiagnosisSection:
    columns = (Column("Evidence"), Column("Met"), Column("Observed"), Column("Expected"))
    rows = tuple(
        (Cell(item.dimension), Cell(_met(item)), Cell(visible(item.text), "observed"), Cell(item.threshold or ""))
        for item in diagnosis.evidence
    )
    seconds = (diagnosis.until - diagnosis.since).total_seconds() < 3600
    begin = fmt.moment(diagnosis.since, zone, seconds=seconds)
    period = fmt.period(diagnosis.since, diagnosis.until, zone, seconds=seconds)
    return DiagnosisSection(
        title=diagnosis.kind,
        when=f"{period}, confidence {fmt.percent(diagnosis.confidence)}",
        summary=visible(diagnosis.summary),
        rule=diagnosis.rule,
        advice=visible(diagnosis.advice),
        doubt=visible(diagnosis.doubt),
        severity=diagnosis.severity,
        evidence=Table(
            f"evidence-{key}", f"Evidence for {diagnosis.kind}, {begin}", columns, rows, sortable=False, bare=True
        ),
    )


def _met(item: Evidence) -> str:
    if item.unknown:
        return "unknown"
    return "yes" if item.met else "no" if item.threshold else "shown"
