"""The report page of a ``WasteResult``: all sections, and the page made of them."""

from __future__ import annotations

from slurm_affinode.analysis import actions
from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.base.text import visible
from slurm_affinode.report import (
    demand_section,
    given_back_section,
    headline,
    heat_map,
    method_section,
    tables,
    trend_section,
    waste_charts,
)
from slurm_affinode.report import format as fmt
from slurm_affinode.report import render as rendering
from slurm_affinode.report.charts import Series, legend_list
from slurm_affinode.report.context import ModelServers, ReplayNote, ReportContext
from slurm_affinode.report.links import NO_LINKS, Links
from slurm_affinode.report.measures import STATES, known_value

JOB_ROWS = 1000
"""Maximum rows of the table of all jobs, to keep the page small and fast."""


def _servers(result: WasteResult, top: int) -> ModelServers | None:
    if result.servers is None:
        return None
    from slurm_affinode.report.servers_section import section  # noqa: PLC0415 - many sites have no model servers

    return section(result.servers, result.query, top)


def build_context(
    result: WasteResult, *, title: str, top: int, csv_name: str | None = None, links: Links = NO_LINKS,
    replay: ReplayNote | None = None,
) -> ReportContext:  # fmt: skip
    """Return the context of the report page.

    ``top``: rows of the tables of users, accounts, ... and worst jobs; ``csv_name``: the file with all jobs, if one is
    written; ``links``: pages that exist.
    """
    query = result.query
    span = fmt.duration((query.until - query.since).total_seconds())
    worst = tables.worst(result, top, links)
    drawn = heat_map.drawn_gpus(result)
    fields = heat_map.fields_of_runs(result, drawn, JOB_ROWS)
    jobs = tables.all_jobs(result, JOB_ROWS, csv_name, links, anchors=True, fields=fields)
    return ReportContext(
        title=title,
        interval=f"{fmt.moment(query.since, query.zone)} to {fmt.moment(query.until, query.zone)} ({span})",
        scope=method_section.scope(query),
        caution=headline.sentence(visible(result.accounting_note)),
        answer=headline.answer(result),
        consequences=headline.consequences(result),
        replay=replay,
        findings=headline.findings(result),
        split=headline.split(result),
        cards=headline.cards(result),
        money_note=headline.money_note(result),
        published_shares=method_section.published_shares()
        if known_value(result.total, "gpu_hours_idle") is not None
        else (),
        action_cards=headline.action_cards(result, links),
        advice_help=tuple((text.title, text.returned) for text in actions.texts().values()),
        trend=trend_section.section(result),
        working_hours=headline.working_hours(result),
        over_time=waste_charts.hours_over_time(result),
        week_map=heat_map.week_map(result),
        gpu_map=heat_map.gpu_map(result, drawn, 0 if jobs is None else len(jobs.rows)),
        partitions=waste_charts.group_bars(result, "partition", "By partition", "partition"),
        models=waste_charts.group_bars(result, "gpu_model", "By GPU model", "GPU model"),
        state_legend=legend_list([Series(label, [], state) for state, label in STATES]),
        groups=tables.groups(result, top, links),
        worst=worst,
        worst_note="" if worst else "No job had idle GPU time that could be measured.",
        scatter=waste_charts.scatter(result),
        idle_share=waste_charts.idle_shares(result),
        windows=waste_charts.windows(result),
        jobs=jobs,
        unmet=demand_section.section(result, links),
        given_back=given_back_section.section(result, top, links),
        servers=_servers(result, top),
        quality_facts=method_section.quality_facts(result),
        mapping=method_section.mapping(result),
        issues=method_section.issues(result),
        rules=method_section.rules(),
        definitions=method_section.metric_definitions(),
        settings=method_section.settings(result),
    )


def render_report(
    result: WasteResult, *, title: str, top: int, csv_name: str | None = None, links: Links = NO_LINKS,
    replay: ReplayNote | None = None,
) -> str:  # fmt: skip
    """Return the report as one self-contained HTML page."""
    context = build_context(result, title=title, top=top, csv_name=csv_name, links=links, replay=replay)
    return rendering.page("report.html.j2", title=title, generated=result.generated, zone=result.query.zone, r=context)
