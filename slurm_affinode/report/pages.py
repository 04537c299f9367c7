"""The report page of a ``WasteResult``: headline, cards, charts, tables, suspended jobs, definitions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import tzinfo

import polars as pl
from markupsafe import Markup, escape

from slurm_affinode.analysis import actions, definitions, suspensions
from slurm_affinode.analysis.result import MAPPINGS, Thresholds, WasteQuery, WasteResult
from slurm_affinode.base.text import visible
from slurm_affinode.report import charts, demand_section, heat_map, tables, trend_section, waste_charts
from slurm_affinode.report import format as fmt
from slurm_affinode.report import render as rendering
from slurm_affinode.report.charts import Bar, Series, Words, legend_list
from slurm_affinode.report.context import (
    ActionCard,
    Answer,
    Card,
    Cell,
    Column,
    Definition,
    Fact,
    GivenBack,
    Issue,
    ModelServers,
    ReportContext,
    Section,
    Table,
)
from slurm_affinode.report.measures import STATES, Row, help_for, known, shown
from slurm_affinode.report.summary import has_averages
from slurm_affinode.report.tables import name_cell

_WHY_UNKNOWN = frozenset({"unmapped-gpus", "partly-mapped", "no-samples", "gaps", "no-activity-signal"})
"""Data quality issues that make time unknown."""
_MUCH = 0.2
"""Share of unknown time in the allocated time from which the report explains it at the top."""


def answer(result: WasteResult) -> Answer:
    """Return the headline: how much was allocated, and how much of it was idle."""
    total = result.total
    allocated = known(total, "gpu_hours_allocated")
    if not allocated:
        return Answer("No GPU job ran in this interval.", "", "")
    capacity = known(total, "gpu_hours_capacity")
    of = "" if capacity is None else f"Of {fmt.number(capacity)} GPU-hours, "
    before = f"{of}{fmt.number(allocated)} {'' if of else 'GPU-hours '}were allocated to {_runs(total.get('jobs'))}. "
    idle, measured = known(total, "gpu_hours_idle"), known(total, "gpu_hours_measured")
    if idle is None or not measured:
        why = "the GPU metrics match none of these jobs"
        if not result.quality.samples:
            why = "there are no GPU metrics of these jobs"
        return Answer(before, "How much of it was idle is unknown", f": {why}.")
    averaged = has_averages(result)
    strong = f"{'At least ' if averaged else ''}{fmt.number(idle)} GPU-hours were idle"
    after = f", {fmt.percent(idle / allocated)} of the allocated"
    unknown = known(total, "gpu_hours_unknown")
    if measured < 0.995 * allocated and unknown:
        after += f"; {fmt.number(unknown)} ({fmt.percent(unknown / allocated)}) are unknown"
    after += "."
    if averaged:
        after += " The metrics are averages per job: idle time within a job counts as low or busy."
    cost = known(total, "idle_cost") if result.priced else None
    if cost:
        after += f" The idle hours cost {fmt.money(cost, result.currency)}."
    return Answer(before, strong, after)


def _runs(jobs: float | int | None) -> str:
    return "jobs" if jobs is None else "1 job run" if jobs == 1 else f"{fmt.count(jobs)} job runs"


def findings(result: WasteResult) -> tuple[str, ...]:
    """Return a few sentences with the main findings, the most important first."""
    total = result.total
    idle = known(total, "gpu_hours_idle")
    if not idle:
        return ()
    found = [_suspensions(result, idle), _waited(result)]
    found += [_users_concentration(result, idle), _jobs_concentration(result, idle)]
    held, idle_held = known(total, "mem_gib_h"), known(total, "idle_mem_gib_h")
    if held and idle_held:
        found.append(
            f"{fmt.percent(idle_held / held)} of the GPU memory-time held by jobs was held while the GPU was idle "
            f"({fmt.gib_hours(idle_held)} of {fmt.gib_hours(held)})."
        )
    longest = known(total, "longest_idle_s")
    if longest:
        found.append(f"The longest idle time of one GPU within one job: {fmt.duration(longest)}.")
    found.append(_unknown(result))
    return tuple(text for text in found if text)


def _suspensions(result: WasteResult, idle: float) -> str:
    bound = actions.suspension_bound(result)
    if bound is None or not bound.windows or has_averages(result):
        return ""
    windows = "1 idle window was" if bound.windows == 1 else f"{fmt.count(bound.windows)} idle windows were"
    hours = f"{fmt.hours(bound.gpu_hours, 'GPU-h')}, {fmt.percent(bound.gpu_hours / idle)} of the idle time"
    return (
        f"Suspending jobs after {fmt.duration(actions.AFTER_S)} without activity would have returned at most {hours}: "
        f"{windows} longer. A job with several GPUs is suspended only while all of them are idle."
    )


def _waited(result: WasteResult) -> str:
    waits = result.waits
    if waits is None:
        return ""
    if not waits.waited:
        return "No GPU job that started meanwhile had waited for longer than a minute."
    share = f"{fmt.count(waits.waited)} of {fmt.count(waits.jobs)}"
    longest = "" if waits.waited == 1 else f" in the median, {fmt.duration(waits.longest_s)} at most"
    return (
        f"Meanwhile {share} GPU jobs waited for more than a minute before they started, "
        f"{fmt.duration(waits.median_s)}{longest}: {fmt.hours(waits.gpu_hours, 'GPU-h')} of requested GPUs."
    )


def action_cards(result: WasteResult) -> tuple[ActionCard, ...]:
    """Return what to do: the owners and causes by which most GPU-hours can be returned."""
    several = len({cluster for cluster in result.jobs["cluster"].unique() if cluster is not None}) > 1
    return tuple(_advice(action, several=several) for action in actions.actions(result))


def _advice(action: actions.ReturnAction, *, several: bool) -> ActionCard:
    text = actions.texts()[action.kind]
    memory = fmt.quantity(action.memory_gib, "GiB")
    evidence = text.evidence.format(runs=_runs(action.runs), memory=memory, longest=fmt.duration(action.longest_s))
    job = str(action.job_id)
    if action.array_job_id is not None and action.array_task_id is not None:
        job = f"{action.array_job_id}_{action.array_task_id}"
    where = f" --cluster {fmt.name(action.cluster)}" if several and action.cluster is not None else ""
    return ActionCard(
        fmt.clip(fmt.name(action.user), 40), f"on {fmt.name(action.cluster)}" if several else "", text.title,
        fmt.hours(action.hours_returned, "GPU-h"), evidence, prose(text.advice),
        f"slurm-affinode job {job}{where}",
    )  # fmt: skip


def _unknown(result: WasteResult) -> str:
    """Return the main reason for unknown time if it is a large share, else an empty text."""
    allocated, unknown = known(result.total, "gpu_hours_allocated"), known(result.total, "gpu_hours_unknown")
    reasons = [issue for issue in result.quality.issues if issue.code in _WHY_UNKNOWN and issue.gpu_hours]
    if not allocated or not unknown or unknown < _MUCH * allocated or not reasons:
        return ""
    most = max(reasons, key=lambda issue: issue.gpu_hours or 0.0)
    hours = min(most.gpu_hours or 0.0, unknown)
    title = most.title[0].lower() + most.title[1:]
    return (
        f"{fmt.percent(hours / unknown)} of the unknown GPU-hours: {title}. See the remedies under data quality, below."
    )


def _users_concentration(result: WasteResult, idle: float) -> str:
    frame = result.groups.get("user")
    if frame is None or frame.height < 4:
        return ""
    top = frame["gpu_hours_idle"].fill_null(0).head(3)
    if top[0] / idle >= 0.5:
        return f"One user of {fmt.count(frame.height)} accounts for {fmt.percent(top[0] / idle)} of the idle time."
    share = fmt.percent(float(top.sum()) / idle)
    return f"Three of {fmt.count(frame.height)} users account for {share} of the idle time."


def _jobs_concentration(result: WasteResult, idle: float) -> str:
    if result.jobs.height < 20:
        return ""
    hours = result.jobs["gpu_hours_idle"].fill_null(0).cum_sum()
    half = int((hours < idle / 2).sum()) + 1
    return f"Half of the idle time is in {_runs(half)} of {fmt.count(result.jobs.height)}."


def split(result: WasteResult) -> Markup:
    """Return the bar of all allocated hours by state; the cards below it are the legend."""
    allocated = known(result.total, "gpu_hours_allocated") or 0.0
    parts, said = [], []
    for state, label in STATES:
        value = known(result.total, f"gpu_hours_{state}")
        share = f", {fmt.percent(value / allocated)}" if value is not None and allocated else ""
        parts.append(charts.Series(label, [value], state))
        said.append(f"{label} {fmt.hours(value, 'GPU-h')}{share}")
    words = charts.Words("split", "Allocated GPU-hours by activity", "; ".join(said) + ".")
    return charts.split(words, parts, value=lambda v: fmt.hours(v, "GPU-h"))


def cards(result: WasteResult) -> tuple[Card, ...]:
    """Return the figures below the bar."""
    total, currency = result.total, result.currency
    allocated = known(total, "gpu_hours_allocated")
    who = f"{fmt.count(total.get('users'))} user{'' if total.get('users') == 1 else 's'}"
    made = [
        _card(result, "gpu_hours_capacity", "Capacity", "allocated + not allocated"),
        _card(result, "unallocated_gpu_hours", "Not allocated", "held by no job"),
        _card(result, "gpu_hours_allocated", "Allocated", f"{_runs(total.get('jobs'))}, {who}"),
        *(_state_card(result, state, label, allocated) for state, label in STATES),
        _card(result, "idle_cost", "Cost of the idle hours", _of(shown(total, "cost", currency))),
        _card(result, "idle_mem_gib_h", "Memory held while idle", _of(shown(total, "mem_gib_h"))),
        _card(result, "idle_energy_kwh", "Energy while idle", _of(shown(total, "energy_kwh"))),
        *_emissions(result),
        _card(result, "util_mean_pct", "Mean utilization", "over time, where given"),
    ]
    if not result.priced:
        made = [c for c in made if c.label != "Cost of the idle hours"]
    if known(total, "gpu_hours_capacity") is None and known(total, "unallocated_gpu_hours") is None:
        made = [c for c in made if c.label not in ("Capacity", "Not allocated")]
    return tuple(made)


def _emissions(result: WasteResult) -> tuple[Card, ...]:
    factor = result.emissions
    if factor is None:
        return ()
    label, help_text = "Emissions while idle", f"Energy of the idle GPUs x emissions of a kWh. {factor.rule}."
    text = fmt.emissions(factor.kg(known(result.total, "idle_energy_kwh")))
    if text == fmt.UNKNOWN:
        return (Card(label, text, "", "", help_text, unknown=True),)
    value, _, unit = text.partition(fmt.NBSP)
    return (Card(label, value, unit, _of(fmt.emissions(factor.kg(known(result.total, "energy_kwh")))), help_text),)


def _of(whole: str) -> str:
    return "" if whole == fmt.UNKNOWN else f"of {whole} in all"


def _card(result: WasteResult, key: str, label: str, sub: str, kind: str = "") -> Card:
    text = shown(result.total, key, result.currency)
    if text == fmt.UNKNOWN:
        return Card(label, text, "", "", help_for(key), kind, unknown=True)
    value, _, unit = (text, "", "") if key.endswith("cost") else text.partition(fmt.NBSP)
    return Card(label, value, unit, sub, help_for(key), kind)


def _state_card(result: WasteResult, state: str, label: str, allocated: float | None) -> Card:
    value = known(result.total, f"gpu_hours_{state}")
    share = f"{fmt.percent(value / allocated)} of allocated" if value is not None and allocated else ""
    return _card(result, f"gpu_hours_{state}", label, share, state)


def money_note(result: WasteResult) -> str:
    """Return a note on GPUs without a price, or on missing prices."""
    if not known(result.total, "gpu_hours_allocated"):
        return ""
    if not result.priced:
        if not result.price_note:
            return "No price is known for these GPUs: a price table in the configuration adds amounts of money."
        return "No amounts of money: the site has set no prices (price.table in the configuration)."
    notes = []
    missing: Sequence[str] = sorted(fmt.name(m) for m, price in result.prices.items() if price is None)
    if missing:
        listed = ", ".join(missing[:6]) + (", ..." if len(missing) > 6 else "")
        notes.append(f"Amounts leave out GPUs without a known price: {listed}.")
    return " ".join(notes)


_MAPPING_WORDS = {
    "labels": "job labels in the GPU metrics",
    "recorded": "GPU ids recorded for the allocation",
    "whole-node": "the whole node was the job's",
    "unknown": "not found: all its time is unknown",
}
_MAPPING_FILLS = {"labels": "1", "recorded": "2", "whole-node": "3", "unknown": "unknown"}


def quality_facts(result: WasteResult) -> tuple[Fact, ...]:
    """Return the extent of the data behind the figures."""
    quality = result.quality
    steps = sorted(quality.steps_s.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{fmt.duration(step)} on {fmt.count(devices)} GPUs" for step, devices in steps[:4])
    return (
        Fact("GPU samples", fmt.count(quality.samples)),
        Fact("GPUs seen", f"{fmt.count(quality.devices)} on {fmt.count(quality.nodes)} nodes"),
        Fact("Sampling interval", (listed + (", ..." if len(steps) > 4 else "")) or fmt.UNKNOWN),
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
    found = sorted(result.quality.issues, key=lambda issue: (-(issue.gpu_hours or 0.0), -issue.count))
    return tuple(
        Issue(
            visible(issue.code),
            visible(issue.title),
            fmt.count(issue.count)
            + (f", {fmt.hours(issue.gpu_hours, 'GPU-h')}" if issue.gpu_hours is not None else ""),
            visible(issue.detail),
            tuple(fmt.clip(visible(example), 200) for example in issue.examples[:10]),
        )
        for issue in found
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


_FAILURE_LENGTH = 160
_WORDS = {
    "asleep": "asleep",
    "restoring": "being restored",
    "restored": "restored",
    "afresh": "started afresh",
    "ended": "ended asleep",
    "failed": "ran on",
}
_IN_PLACE = {"asleep": "asleep in place", "restored": "slept in place, awake", "restoring": "is waking"}


def section(result: WasteResult, top: int) -> GivenBack | None:
    """Return the section on suspensions; ``None`` if there was none. ``top``: rows of its table."""
    frame = result.suspensions
    if frame is None or frame.is_empty():
        return None
    total = suspensions.totals(frame)
    parts = [_requeued(total)] if total["suspensions"] else []
    parts += [_in_place(total)] if total["in_place_sleeps"] else []
    lead = " ".join(parts) or "No suspension got through in this interval."
    cards: tuple[Card, ...] = (
        _hours_card(total),
        _suspension_card("Suspensions", "suspensions", fmt.count(total["suspensions"]), sub=_taken_back(total)),
        _suspension_card("Asleep", "asleep_now", fmt.count(total["asleep_now"]), sub=_failures(total)),
        _suspension_card(
            "Time to suspend", "suspend_s", _short(total["suspend_s"]), sub="median, until the GPUs are free"
        ),
        _suspension_card(
            "Time to restore", "restore_s", _short(total["restore_s"]), sub="median, until the job runs again"
        ),
        _suspension_card("Images", "image_gib", fmt.number(total["image_gib"]), "GiB"),
    )
    if total["in_place_sleeps"]:
        cards += (
            _suspension_card(
                "Slept in place",
                "in_place_sleeps",
                fmt.count(total["in_place_sleeps"]),
                sub=_jobs(total["in_place_jobs"]),
            ),
            _suspension_card(
                "GPU memory given back", "gpu_mem_gib_hours", fmt.number(total["gpu_mem_gib_hours"]), "GiB-h"
            ),
            _suspension_card("Time to wake", "wake_s", _short(total["wake_s"]), sub="median, from the request"),
        )
    return GivenBack(lead, cards, _table(frame, top, result.query.zone))


def _requeued(total: Row) -> str:
    jobs, hours = total["suspended_jobs"], total["gpu_hours_given_back"]
    free = "how many GPU-hours they gave back is unknown" if hours is None else (
        f"their GPUs were free for others for {fmt.hours(hours, 'GPU-hours')}"
    )  # fmt: skip
    was = f"{_jobs(jobs, 'idle job')} {'was' if jobs == 1 else 'were'}"
    return f"{was} suspended {_times(total['suspensions'])}; {free}."


def _in_place(total: Row) -> str:
    memory = total["gpu_mem_gib_hours"]
    left = "; how much GPU memory they left to others is unknown" if memory is None else (
        f" and left {fmt.number(memory)} GiB-hours of GPU memory to others"
    )  # fmt: skip
    return f"{_jobs(total['in_place_jobs'])} slept in place {_times(total['in_place_sleeps'])}{left}."


def _jobs(number: float | None, one: str = "job") -> str:
    return f"{fmt.count(number)} {one}{'' if number == 1 else 's'}"


def _times(number: float | None) -> str:
    return "once" if number == 1 else f"{fmt.count(number)} times"


def _hours_card(total: Row) -> Card:
    text = fmt.number(total["gpu_hours_given_back"])
    return _suspension_card(
        "Given back", "gpu_hours_given_back", text, "GPU-h", sub=f"by {_jobs(total['suspended_jobs'])}"
    )


def _suspension_card(label: str, key: str, value: str, unit: str = "", *, sub: str = "") -> Card:
    unknown = value == fmt.UNKNOWN
    return Card(label, value, "" if unknown else unit, "" if unknown else sub, help_for(key), unknown=unknown)


def _taken_back(total: Row) -> str:
    failed = total["suspensions_failed"]
    return f"{fmt.count(failed)} rolled back, the job continued" if failed else ""


def _failures(total: Row) -> str:
    failed = total["restore_failures"]
    return f"{fmt.count(failed)} could not be restored" if failed else ""


def _short(seconds: float | None) -> str:
    if seconds is not None and seconds < 60:
        return fmt.quantity(seconds, "s")
    return fmt.duration(seconds)


def _table(frame: pl.DataFrame, top: int, zone: tzinfo) -> Table:
    rows = tuple(_row(row, zone) for row in frame.head(top).iter_rows(named=True))
    columns = (
        Column("Job", title="raw ID"), Column("User", unit="account"),
        Column("Given back", "number", "GPU-h", help_for("gpu_hours_given_back") or "", "descending"),
        Column("Began", "short"), Column("What became of it", unit="where"),
        Column("Asleep", "number", title=help_for("asleep_s") or ""),
        Column("To suspend", "number", title=help_for("suspend_s") or ""),
        Column("To restore", "number", title=help_for("restore_s") or ""),
        Column("Image", "number", "GiB", help_for("image_gib") or ""), Column("GPUs", unit="model"),
    )  # fmt: skip
    note = f"The first {fmt.count(top)} of {fmt.count(frame.height)}." if frame.height > top else ""
    return Table("given-back-table", "Suspensions by GPU-hours given back", columns, rows, note=note)


def _row(row: Row, zone: tzinfo) -> tuple[Cell, ...]:
    return (
        Cell(str(row["job_id"]), "text", sort=str(row["job_id"])),
        name_cell(row["user"], sub=fmt.clip(fmt.name(row["account"]), 40)),
        _number(row["gpu_hours_given_back"], fmt.number(row["gpu_hours_given_back"])),
        Cell(fmt.moment(row["began"], zone), "short", sort=str(round(row["began"].timestamp()))),
        Cell(_became(row), "text", sub=_where(row)),
        _number(row["asleep_s"], fmt.duration(row["asleep_s"])),
        _number(row["suspend_s"], _short(row["suspend_s"])),
        _number(row["restore_s"], _short(row["restore_s"])),
        _number(row["image_gib"], fmt.number(row["image_gib"])),
        Cell(fmt.count(row["gpus"]), "number", sub=fmt.clip(fmt.name(row["gpu_model"]), 40)),
    )


def _became(row: Row) -> str:
    word: str = _WORDS[row["outcome"]]
    return _IN_PLACE.get(row["outcome"], word) if row["mode"] == "inplace" else word


def _where(row: Row) -> str:
    if row["failure"]:
        return fmt.clip(visible(row["failure"]), _FAILURE_LENGTH)
    places = [fmt.name(row[key]) for key in ("node", "restored_node") if row[key] is not None]
    return " to ".join(places)


def _number(value: float | None, text: str) -> Cell:
    if value is None:
        return Cell(fmt.UNKNOWN, "number unknown")
    return Cell(text, "number", sort=f"{value:.6g}")


JOB_ROWS = 1000
"""Maximum rows of the table of all jobs, to keep the page small and fast."""


def _servers(result: WasteResult, top: int) -> ModelServers | None:
    if result.servers is None:
        return None
    from slurm_affinode.report.servers_section import section  # noqa: PLC0415 - many sites have no model servers

    return section(result.servers, result.query, top)


def build_context(result: WasteResult, *, title: str, top: int, csv_name: str | None = None) -> ReportContext:
    """Return the context of the report page.

    ``top``: rows of the tables of users, accounts, ... and worst jobs; ``csv_name``: the file with all jobs, if one is
    written.
    """
    query = result.query
    span = fmt.duration((query.until - query.since).total_seconds())
    worst = tables.worst(result, top)
    return ReportContext(
        title=title,
        interval=f"{fmt.moment(query.since, query.zone)} to {fmt.moment(query.until, query.zone)} ({span})",
        scope=scope(query),
        caution=_sentence(visible(result.accounting_note)),
        answer=answer(result),
        findings=findings(result),
        split=split(result),
        cards=cards(result),
        money_note=money_note(result),
        action_cards=action_cards(result),
        advice_help=tuple((text.title, text.returned) for text in actions.texts().values()),
        trend=trend_section.section(result),
        over_time=waste_charts.hours_over_time(result),
        week_map=heat_map.week_map(result),
        gpu_map=heat_map.gpu_map(result),
        partitions=waste_charts.group_bars(result, "partition", "By partition", "partition"),
        models=waste_charts.group_bars(result, "gpu_model", "By GPU model", "GPU model"),
        state_legend=legend_list([Series(label, [], state) for state, label in STATES]),
        groups=tables.groups(result, top),
        worst=worst,
        worst_note="" if worst else "No job had idle GPU time that could be measured.",
        scatter=waste_charts.scatter(result),
        idle_share=waste_charts.idle_shares(result),
        windows=waste_charts.windows(result),
        jobs=tables.all_jobs(result, JOB_ROWS, csv_name),
        unmet=demand_section.section(result),
        given_back=section(result, top),
        servers=_servers(result, top),
        quality_facts=quality_facts(result),
        mapping=mapping(result),
        issues=issues(result),
        rules=rules(),
        definitions=metric_definitions(),
        settings=settings(result),
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


def render_report(result: WasteResult, *, title: str, top: int, csv_name: str | None = None) -> str:
    """Return the report as one self-contained HTML page."""
    context = build_context(result, title=title, top=top, csv_name=csv_name)
    return rendering.page("report.html.j2", title=title, generated=result.generated, zone=result.query.zone, r=context)
