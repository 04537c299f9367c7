"""The section on model servers of a report: one row for each engine, and the diagnoses by kind."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, tzinfo

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.base.text import visible
from slurm_affinode.engines.diagnosis.rules import SIGNATURE_NOTE
from slurm_affinode.engines.diagnosis.usage import DiagnosisCost, EngineUsage, ServerReport, costs
from slurm_affinode.model.serving import DIAGNOSES, Diagnosis
from slurm_affinode.report import format as fmt
from slurm_affinode.report.context import Cell, Column, ModelServers, Table
from slurm_affinode.report.servers_page import page_name

_NAME_LENGTH = 60
_DIAGNOSES = 4
"""Most diagnoses listed for an engine."""


def section(report: ServerReport, query: WasteQuery, top: int) -> ModelServers | None:
    """Return the section; ``None`` without engines. ``top``: rows of its table."""
    if not report.engines:
        return None
    by_kind = costs(report.engines)
    problems = [cost for cost in by_kind if cost.severity != "none"]
    signature = any(problem.kind == "squatter-signature" for problem in problems)
    return ModelServers(
        lead=_lead(report.engines),
        note=report.note,
        engines=_engines(report, query, top),
        diagnoses=_diagnoses(problems) if problems else None,
        doubt=SIGNATURE_NOTE if signature else "",
    )


def _lead(engines: Sequence[EngineUsage]) -> str:
    users = {engine.health.user for engine in engines if engine.health.user}
    of = f" of {_several(len(users), 'user')}" if users else ""
    worst = [engine.problems[0].severity for engine in engines if engine.problems]
    critical, warning = worst.count("critical"), worst.count("warning")
    problems = [f"{_several(critical, 'engine')} had a critical diagnosis"] if critical else []
    problems += [f"{_several(warning, 'engine')} had a warning"] if warning else []
    idle = [engine.idle_gpu_hours for engine in engines if engine.idle_gpu_hours]
    gib_hours = [engine.idle_gib_hours for engine in engines if engine.idle_gib_hours]
    text = f"{_several(len(engines), 'inference engine')}{of}: {', '.join(problems) or 'no problem was diagnosed'}."
    if idle:
        text += f" {fmt.hours(sum(idle), 'GPU-hours')} passed without requests"
        text += f", holding {fmt.gib_hours(sum(gib_hours))} of GPU memory." if gib_hours else "."
    return text


def _several(number: int, noun: str) -> str:
    return f"{fmt.count(number)} {noun}{'' if number == 1 else 's'}"


def _engines(report: ServerReport, query: WasteQuery, top: int) -> Table:
    columns = (
        Column("Server", unit="model"), Column("Job", unit="user"), Column("GPUs", "number"),
        Column("Up", "number", title="Time between successful scrapes"),
        Column("Requests", "number", "completed"), Column("KV cache", "number", "most"),
        Column("Waiting", "number", "most"), Column("Preemptions", "number"),
        Column("Idle", "number", "GPU-h", "GPU-hours diagnosed as idle, and GPU memory held in that time"),
        Column("Diagnoses", unit="when, confidence"),
    )  # fmt: skip
    rows = tuple(
        _row(engine, query, linked=place < len(report.timelines)) for place, engine in enumerate(report.engines[:top])
    )
    more = len(report.engines) - len(rows)
    note = f"The first {fmt.count(len(rows))} of {fmt.count(len(report.engines))}." if more > 0 else ""
    return Table("servers-table", "Inference engines, most severe diagnoses first", columns, rows, note=note)


def _row(engine: EngineUsage, query: WasteQuery, *, linked: bool) -> tuple[Cell, ...]:
    health, key = engine.health, engine.health.key
    server = fmt.clip(f"{visible(key.engine)} at {visible(key.address)}", _NAME_LENGTH)
    name_parts = [key.model or "", "" if key.rank is None else f"rank {key.rank}"]
    model = fmt.clip(", ".join(visible(text) for text in name_parts if text), _NAME_LENGTH)
    user = fmt.clip(fmt.name(health.user), _NAME_LENGTH)
    failed = f"{fmt.count(engine.failed_requests)} failed" if engine.failed_requests else ""
    return (
        Cell(server, "text", sub=model, name=True, href=page_name(health) if linked else ""),
        Cell(fmt.clip(fmt.name(health.job), _NAME_LENGTH), "text" if health.job else "text unknown", sub=user),
        _number(engine.gpus, fmt.count(engine.gpus)),
        _number(engine.uptime_s, fmt.duration(engine.uptime_s)),
        _number(engine.requests, fmt.count(engine.requests), failed),
        _number(engine.kv_max, fmt.percent(engine.kv_max)),
        _number(engine.waiting_max, fmt.count(engine.waiting_max)),
        _number(engine.preemptions, fmt.count(engine.preemptions)),
        _number(engine.idle_gpu_hours, fmt.number(engine.idle_gpu_hours),
                fmt.gib_hours(engine.idle_gib_hours) if engine.idle_gib_hours else ""),
        _diagnoses_cell(engine, query),
    )  # fmt: skip


def _number(value: float | None, text: str, sub: str = "") -> Cell:
    if value is None:
        return Cell(fmt.UNKNOWN, "number unknown")
    return Cell(text, "number", sort=f"{value:.6g}", sub=sub)


def _diagnoses_cell(engine: EngineUsage, query: WasteQuery) -> Cell:
    if not engine.health.diagnoses:
        return Cell(fmt.UNKNOWN, "text unknown")
    if not engine.problems:
        return Cell("no problem", "text", sort="2")
    shown = engine.problems[:_DIAGNOSES]
    items = tuple(f"{case.kind}, {interval(case, query)}, {fmt.percent(case.confidence)}" for case in shown)
    remaining = len(engine.problems) - len(shown)
    rank = "0" if engine.problems[0].severity == "critical" else "1"
    return Cell("", "diagnoses", sort=rank, items=items, sub=f"and {fmt.count(remaining)} more" if remaining else "")


def interval(case: Diagnosis, query: WasteQuery) -> str:
    """Return the interval of a diagnosis, without dates if the report covers a single day."""
    seconds = (case.until - case.since).total_seconds() < 3600
    begin, end = (fmt.moment(moment, query.zone, seconds=seconds) for moment in (case.since, case.until))
    if _day(query.since, query.zone) == _day(query.until, query.zone, ends=True):
        begin, end = begin.partition(" ")[2], end.partition(" ")[2]
    elif begin.partition(" ")[0] == end.partition(" ")[0]:
        end = end.partition(" ")[2]
    return f"{begin}–{end}"


def _day(moment: datetime, zone: tzinfo, *, ends: bool = False) -> object:
    local = moment.astimezone(zone)
    return (local - local.resolution if ends else local).date()


def _diagnoses(kinds: Sequence[DiagnosisCost]) -> Table:
    columns = (
        Column("Diagnosis"), Column("Engines", "number"), Column("Time", "number", "episodes"),
        Column("GPU-hours", "number", "in that time"), Column("Observed"), Column("What to do"),
    )  # fmt: skip
    rows = tuple(
        (
            Cell(cost.kind, "diagnosis", sub=f"{cost.severity}: {DIAGNOSES[cost.kind]}"),
            _number(cost.engines, fmt.count(cost.engines)),
            _number(cost.seconds, fmt.duration(cost.seconds), fmt.count(cost.episodes)),
            _number(cost.gpu_hours, fmt.number(cost.gpu_hours), _gpus_unknown(cost)),
            Cell("", "observed", items=tuple(_observed(cost))),
            Cell(cost.advice, "advice"),
        )
        for cost in kinds
    )
    return Table("server-diagnoses", "Diagnoses by kind, with costs and remedies", columns, rows)


def _gpus_unknown(cost: DiagnosisCost) -> str:
    return f"GPUs of {_several(cost.gpus_unknown, 'engine')} unknown" if cost.gpus_unknown else ""


def _observed(cost: DiagnosisCost) -> list[str]:
    """Return the cost of the diagnoses besides GPU-hours, as far as it is known."""
    lines = [f"{fmt.gib_hours(cost.gib_hours)} of GPU memory held"] if cost.gib_hours is not None else []
    if cost.preemptions is not None:
        lines.append(f"{fmt.count(cost.preemptions)} preemptions")
    if cost.lost_tokens:
        lines.append(f"{fmt.count(cost.lost_tokens)} tokens fewer than without preemptions")
    if cost.waiting_max is not None:
        lines.append(f"at most {fmt.count(cost.waiting_max)} requests waited")
    if cost.ttft_max_s is not None:
        lines.append(f"{fmt.quantity(cost.ttft_max_s, 's')} to the first token")
    return lines
