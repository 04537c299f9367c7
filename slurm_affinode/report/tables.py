"""Tables of the report: most wasteful users and groups, most wasteful jobs, all jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, tzinfo

import polars as pl
from markupsafe import Markup, escape

from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.base.text import visible
from slurm_affinode.report import charts
from slurm_affinode.report import format as fmt
from slurm_affinode.report.context import Cell, Column, Group, Table
from slurm_affinode.report.links import NO_LINKS, Links
from slurm_affinode.report.measures import SHARE_COLUMN, STATES, Row, cell, column, known_value, share_cell

_NAME_LENGTH = 40
_TITLE_LENGTH = 160
_IDLE = ("gpu_hours_idle", "Idle", "GPU-h")
_ALLOCATED = ("gpu_hours_allocated", "Allocated", "GPU-h")
_UNKNOWN = ("gpu_hours_unknown", "Unknown", "GPU-h")
_LIFE = Column("What its GPUs did", "picture", "from start to end")
_ALL_JOBS_BYTES = 1_300_000
_NO_FIELDS: Mapping[int, str] = {}
_CELL_BYTES = 45
"""Approximate size of the tags and attributes of a cell."""
_WHO = {
    "user": ("Users", "user"),
    "account": ("Accounts", "account"),
    "qos": ("QOS", "QOS"),
    "node": ("Nodes", "node"),
}


def name_cell(value: object | None, sub: str = "", href: str = "") -> Cell:
    """Return the cell of a name chosen by a user: made visible, truncated, with its text direction isolated."""
    full = fmt.name(value)
    text = fmt.clip(full, _NAME_LENGTH)
    kind = "text unknown" if value is None else "text"
    return Cell(
        text,
        kind,
        title=fmt.clip(full, _TITLE_LENGTH) if text != full else "",
        sub=sub,
        name=value is not None,
        href=href,
    )


def groups(result: WasteResult, top: int, links: Links = NO_LINKS) -> tuple[Group, ...]:
    """Return the tables of users, accounts, QOS and nodes, with the ``top`` most idle of each."""
    return tuple(group(result, key, top, links) for key in _WHO)


def group(result: WasteResult, key: str, top: int, links: Links = NO_LINKS) -> Group:
    """Return the table of ``user``, ``account``, ``qos`` or ``node`` with the ``top`` most idle ones."""
    title, noun = _WHO[key]
    addresses = {"user": links.users, "account": links.accounts}.get(key, {})
    frame = result.groups.get(key, pl.DataFrame())
    if frame.height == 0:
        return Group(key, title, f"No {noun} is known to have held a GPU.", None)
    wide = key in ("user", "account")
    with_cost = result.priced
    measures = [
        _IDLE, _ALLOCATED,
        *([_UNKNOWN, ("idle_mem_gib_h", "Held while idle", "GiB h")] if wide else []),
        *([("idle_cost", "Idle cost", result.currency)] if wide and with_cost else []),
        ("jobs", "Runs", ""),
    ]  # fmt: skip
    shown = frame.head(top)
    largest = max((known_value(row, "gpu_hours_allocated") or 0.0 for row in shown.iter_rows(named=True)), default=0.0)
    rows = tuple(
        (name_cell(row["name"], href=addresses.get(row["name"], "")),
         Cell(kind="picture", picture=_meter(row, largest)), cell(row, _IDLE[0]), share_cell(row),
         *(cell(row, m) for m, _, _ in measures[1:]))
        for row in shown.iter_rows(named=True)
    )  # fmt: skip
    columns = (Column(noun.capitalize() if noun != "QOS" else noun), Column("Activity", "picture"))
    caption = f"{title} by idle GPU-hours"
    note = f"The first {fmt.count(top)} of {fmt.count(frame.height)}." if frame.height > top else ""
    of_measures = (column(*_IDLE), SHARE_COLUMN, *(column(*measure) for measure in measures[1:]))
    table = Table(f"by-{key}-table", caption, (*columns, *of_measures), rows, note=note, bare=True)
    return Group(key, title, "", table)


def _meter(row: Row, largest: float) -> Markup:
    """Return a bar of the row's hours by state, to the scale of the largest in the table."""
    parts = [(known_value(row, f"gpu_hours_{state}") or 0.0, state) for state, _ in STATES]
    spoken = ", ".join(
        f"{label.lower()} {fmt.hours(known_value(row, f'gpu_hours_{state}'))}" for state, label in STATES
    )
    return charts.meter(spoken, parts, largest)


def worst(result: WasteResult, top: int, links: Links = NO_LINKS) -> Table | None:
    """Return the table of the ``top`` runs with the most idle hours, each with its timeline."""
    frame = result.jobs.filter(pl.col("gpu_hours_idle") > 0).head(top)
    if frame.height == 0:
        return None
    strips = _strips(result.timelines)
    with_cost = result.priced
    after = [
        ("longest_idle_s", "Longest idle", ""), ("fb_mean_gib", "Mean memory", "GiB per GPU"),
        *([("idle_cost", "Idle cost", result.currency)] if with_cost else []),
    ]  # fmt: skip
    rows = tuple(
        (_job_cell(row, links), _user_cell(row, links), cell(row, "gpu_hours_idle"), share_cell(row),
         _life_cell(row, strips, result.query.zone), *(cell(row, m) for m, _, _ in after), _gpus_cell(row))
        for row in frame.iter_rows(named=True)
    )  # fmt: skip
    columns = (
        Column("Job", unit="name"), Column("User", unit="account"), column(*_IDLE), SHARE_COLUMN, _LIFE,
        *(column(*measure) for measure in after), Column("GPUs", unit="model"),
    )  # fmt: skip
    return Table("worst-jobs", "Job runs with most idle GPU-hours", columns, rows)


def _user_cell(row: Row, links: Links) -> Cell:
    return name_cell(row["user"], sub=fmt.clip(fmt.name(row["account"]), _NAME_LENGTH), href=links.user(row["user"]))


def _strips(timelines: pl.DataFrame) -> dict[tuple[str, int, datetime], Markup]:
    states = [state for state, _ in STATES]
    cells: dict[tuple[str, int, datetime], Markup] = {}
    if timelines.height == 0:
        return cells
    for key, part in timelines.sort("slot").group_by("cluster", "job_id", "submit", maintain_order=True):
        slots = [
            [(share, state) for share, state in zip(row, states, strict=True) if share]
            for row in part.select(states).iter_rows()
        ]
        means = {state: part[state].mean() for state in states}
        spoken = ", ".join(f"{state} {fmt.percent(_number(means[state]))}" for state in states)
        cells[key] = charts.strip(f"Timeline, mean shares: {spoken}", slots)
    return cells


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _life_cell(row: Row, strips: dict[tuple[str, int, datetime], Markup], zone: tzinfo) -> Cell:
    picture = strips.get((row["cluster"], row["job_id"], row["submit"]))
    end = "running" if row["end"] is None else fmt.moment(row["end"], zone)
    span = f"{fmt.moment(row['start'], zone)} – {end}"
    return Cell(kind="picture life", picture=picture if picture is not None else Markup(""), sub=span)


def job_label(row: Row) -> str:
    """Return the job ID as Slurm shows it: ``123``, or ``120_3`` for an array task."""
    if row["array_job_id"] is not None and row["array_task_id"] is not None:
        return f"{row['array_job_id']}_{row['array_task_id']}"
    return str(row["job_id"])


def _job_cell(row: Row, links: Links, anchor: str = "") -> Cell:
    full = fmt.name(row["job_name"])
    text = fmt.clip(full, _NAME_LENGTH)
    title = fmt.clip(full, _TITLE_LENGTH) if text != full else ""
    return Cell(
        job_label(row), "text job", sort=str(row["job_id"]), sub=text, title=title, href=links.job(row), anchor=anchor
    )


def _gpus_cell(row: Row) -> Cell:
    gpus = "?" if row["gpus"] is None else fmt.count(row["gpus"])
    model = "" if row["gpu_model"] is None else fmt.clip(short_model(row["gpu_model"]), _NAME_LENGTH)
    return Cell(gpus, "short", sort=str(row["gpus"] or 0), sub=model)


def short_model(model: str) -> str:
    """Return the model without the vendor, which all of them share."""
    return visible(model.removeprefix("NVIDIA "))


def _start_cell(row: Row, zone: tzinfo) -> Cell:
    start: datetime | None = row["start"]
    sort = None if start is None else str(int(start.timestamp()))
    return Cell(fmt.moment(start, zone), "short", sort=sort, sub=fmt.name(row["state"]))


_ALL_MEASURES = (
    _ALLOCATED, ("gpu_hours_busy", "Busy", "GPU-h"), _UNKNOWN,
    ("util_mean_pct", "Mean utilization", ""), ("fb_peak_gib", "Peak memory", "GiB"),
)  # fmt: skip


def anchor(number: int) -> str:
    """Return the ID of a row of the table of all jobs, numbered from 0 in the order of ``WasteResult.jobs``."""
    return f"run-{number}"


def all_jobs(
    result: WasteResult, limit: int, csv_name: str | None, links: Links = NO_LINKS, *, anchors: bool = False,
    fields: Mapping[int, str] = _NO_FIELDS,
) -> Table | None:  # fmt: skip
    """Return a table of up to ``limit`` runs to sort and filter. ``csv_name``: the file with all runs, if written.

    ``anchors``: give each row the ID ``anchor``. ``fields``: row -> ``Cell.fields``.
    """
    if result.jobs.height == 0:
        return None
    columns = (
        Column("Job", unit="name"), Column("User", unit="account"), column(*_IDLE), SHARE_COLUMN,
        *(column(*m) for m in _ALL_MEASURES),
        Column("GPUs", unit="model"), Column("Partition", unit="QOS"), Column("Start", unit="state"),
    )  # fmt: skip
    shown_rows = _all_rows(result.jobs.head(limit), result.query.zone, links, fields, anchors=anchors)
    rows = tuple(_within(shown_rows, _ALL_JOBS_BYTES))
    more = result.jobs.height - len(rows)
    note = _left_out(len(rows), more, csv_name) if more > 0 else ""
    caption = "All job runs with GPUs" if more <= 0 else f"The {fmt.count(len(rows))} job runs with most idle GPU-hours"
    return Table("jobs", caption, columns, rows, filterable=True, note=note)


def _within(rows: Iterable[tuple[Cell, ...]], limit: int) -> Iterable[tuple[Cell, ...]]:
    """Yield rows until their HTML has about ``limit`` bytes, also with long names or ones that grow when escaped."""
    size = 0
    for row in rows:
        texts = "".join(c.text + c.sub + c.title + c.href + c.fields for c in row)
        size += len(row) * _CELL_BYTES + len(escape(texts).encode())
        if size > limit:
            return
        yield row


def _left_out(rows: int, more: int, csv_name: str | None) -> str:
    where = f"all of them are in {csv_name}" if csv_name else "the option --csv writes all of them to jobs.csv"
    first = f"These are the {fmt.count(rows)} job runs with most idle GPU-hours"
    return f"{first}; {fmt.count(more)} more are not shown; {where}."


def _all_rows(
    frame: pl.DataFrame, zone: tzinfo, links: Links, fields: Mapping[int, str], *, anchors: bool
) -> Iterable[tuple[Cell, ...]]:
    for number, row in enumerate(frame.iter_rows(named=True)):
        yield (
            replace(_job_cell(row, links, anchor(number) if anchors else ""), fields=fields.get(number, "")),
            _user_cell(row, links),
            cell(row, _IDLE[0]),
            share_cell(row),
            *(cell(row, measure) for measure, _, _ in _ALL_MEASURES),
            _gpus_cell(row),
            name_cell(row["partition"], sub="" if row["qos"] is None else fmt.clip(visible(row["qos"]), _NAME_LENGTH)),
            _start_cell(row, zone),
        )
