"""From a ``WasteResult`` to the ``ReportContext``, and to the page."""

from __future__ import annotations

from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.report import evidence, given_back, headline, pictures, tables
from slurm_affinode.report import format as fmt
from slurm_affinode.report import render as rendering
from slurm_affinode.report.context import ReportContext
from slurm_affinode.report.figure import Series, legend_list
from slurm_affinode.report.measures import STATES

JOB_ROWS = 1000
"""Rows of the table of all jobs: what keeps the page small and a browser quick."""


def build_context(result: WasteResult, *, title: str, top: int, csv_name: str | None = None) -> ReportContext:
    """Everything that the page shows. ``top``: rows of the tables of users, ... and worst jobs; ``csv_name``: the file
    that holds all jobs, if one is written."""
    query = result.query
    span = fmt.duration((query.until - query.since).total_seconds())
    worst = tables.worst(result, top)
    return ReportContext(
        title=title,
        interval=f"{fmt.moment(query.since, query.zone)} to {fmt.moment(query.until, query.zone)} ({span})",
        scope=evidence.scope(query),
        caution=_sentence(fmt.visible(result.accounting_note)),
        answer=headline.answer(result),
        findings=headline.findings(result),
        split=headline.split(result),
        cards=headline.cards(result),
        money_note=headline.money_note(result),
        over_time=pictures.over_time(result),
        partitions=pictures.group_bars(result, "partition", "By partition", "partition"),
        models=pictures.group_bars(result, "gpu_model", "By GPU model", "GPU model"),
        state_legend=legend_list([Series(label, [], state) for state, label in STATES]),
        groups=tables.groups(result, top),
        worst=worst,
        worst_note="" if worst else "No job had idle GPU time that could be measured.",
        scatter=pictures.scatter(result),
        idle_share=pictures.idle_shares(result),
        windows=pictures.windows(result),
        jobs=tables.all_jobs(result, JOB_ROWS, csv_name),
        given_back=given_back.section(result, top),
        quality_facts=evidence.quality_facts(result),
        mapping=evidence.mapping(result),
        issues=evidence.issues(result),
        rules=evidence.rules(),
        definitions=evidence.definitions(),
        settings=evidence.settings(result),
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


def render_report(result: WasteResult, *, title: str, top: int, csv_name: str | None = None) -> str:
    """The report as one self-contained HTML page."""
    context = build_context(result, title=title, top=top, csv_name=csv_name)
    return rendering.page("report.html.j2", title=title, generated=result.generated, zone=result.query.zone, r=context)
