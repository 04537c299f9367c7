"""Heat maps: tables whose cells have a number and a color in six strengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import polars as pl
from markupsafe import Markup

from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.base.times import WEEKDAYS
from slurm_affinode.report import charts, tables
from slurm_affinode.report import format as fmt
from slurm_affinode.report.charts import Words
from slurm_affinode.report.links import NO_LINKS, JobKey, Links
from slurm_affinode.report.measures import Row, idle_share, known

NODES = 60
"""Nodes on the map; more would be a page of their own."""
_LEVELS = 5
_HOUR_S, _DAY_S = 3600, 86400
_LEGEND = (
    "Idle time in percent of the allocated time; the stronger the color, the more. A question mark is unknown, "
    "an empty field was not allocated."
)


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a heat map."""

    share: float | None
    """0 to 1; ``None``: unknown, or nothing to show if ``empty``."""
    tip: str
    empty: bool = False
    href: str = ""
    """Target of the field's link."""


def heat_map(
    words: Words, corner: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[Field]]], note: str = ""
) -> Markup:
    """Draw fields of rows and columns as a table."""
    if not rows:
        return charts.empty(words, "Nothing was allocated that could be shown here.")
    head = Markup("").join(Markup('<th scope="col">{}</th>').format(column) for column in columns)
    body = Markup("").join(
        Markup('<tr><th scope="row"><bdi>{}</bdi></th>{}</tr>').format(label, Markup("").join(map(_field, fields)))
        for label, fields in rows
    )
    table = Markup(
        '<p class="sr">{}</p><div class="scroll" tabindex="0" role="region" aria-label="{}"><table class="heat">'
        '<thead><tr><th scope="col">{}</th>{}</tr></thead><tbody>{}</tbody></table></div>'
    ).format(words.summary, words.title, corner, head, body)
    return charts.figure(words, table, note=f"{_LEGEND} {note}".strip())


def _field(field: Field) -> Markup:
    if field.empty:
        return Markup("<td></td>")
    text = "?" if field.share is None else str(round(100 * field.share))
    level = "u" if field.share is None else "0" if field.share <= 0 else str(_level(field.share))
    content = text
    if field.href:
        label = f"{text}, {field.tip}"
        content = Markup('<a href="{}" aria-label="{}">{}</a>').format(field.href, label, text)
    return Markup('<td class="h{}" title="{}">{}</td>').format(level, field.tip, content)


def _level(share: float) -> int:
    return min(_LEVELS, 1 + int(share * _LEVELS * 0.999))


def gpu_map(result: WasteResult, links: Links = NO_LINKS, row_count: int = 0) -> Markup:
    """Draw the idle share of each GPU, a row for each node: those with most idle GPU-hours.

    A field links to the run with most idle time on the GPU: to its page, or else to its row in the table of all jobs,
    which has the first ``row_count`` runs.
    """
    help_text = (
        "Each row is a node, each field one of its GPUs. Point at a field for its hours. Its link leads to the job run "
        "with most idle time on this GPU."
    )
    frame = result.gpus
    words = Words("gpu-map", "Idle time of each GPU", "", help_text)
    if frame is None or frame.is_empty():
        return charts.empty(words, "There are no GPU metrics.")
    several = frame["cluster"].n_unique() > 1
    keys = result.jobs.head(row_count).select("cluster", "job_id", "submit").rows()
    places = {key: f"#{tables.anchor(number)}" for number, key in enumerate(keys)}
    idle = frame.group_by("cluster", "node").agg(pl.col("gpu_hours_idle").sum(), pl.len().alias("gpus"))
    order = idle.sort("gpu_hours_idle", "cluster", "node", descending=[True, False, False], nulls_last=True)
    chosen = order.head(NODES).select("cluster", "node").sort("cluster", "node", nulls_last=True)
    parts = frame.partition_by("cluster", "node", as_dict=True)
    nodes = [(key, parts[key]) for key in chosen.rows()]
    columns = max(part.height for _, part in nodes)
    rows = []
    for (cluster, node), part in nodes:
        fields = [_gpu(row, links, places) for row in part.iter_rows(named=True)]
        fields += [Field(None, "", empty=True)] * (columns - len(fields))
        label = f"{fmt.name(cluster)}: {fmt.name(node)}" if several else fmt.name(node)
        rows.append((fmt.clip(label, 40), fields))
    most = order.row(0, named=True)
    summary = f"Most idle GPU-hours: {fmt.name(most['node'])}, {fmt.hours(known(most, 'gpu_hours_idle'), 'GPU-h')}."
    note = f"The {NODES} nodes with most idle GPU-hours of {fmt.count(idle.height)}." if idle.height > NODES else ""
    words = Words("gpu-map", "Idle time of each GPU", summary, help_text)
    return heat_map(words, "Node", [str(number) for number in range(columns)], rows, note)


def _gpu(row: Row, links: Links, places: Mapping[JobKey, str]) -> Field:
    allocated = known(row, "gpu_hours_allocated")
    if not allocated:
        return Field(None, "", empty=True)
    idle = known(row, "gpu_hours_idle")
    tip = (
        f"GPU {fmt.name(row['gpu'])}, {fmt.name(row['gpu_model'])}: "
        f"{fmt.hours(allocated, 'GPU-h')} allocated, {fmt.hours(idle, 'GPU-h')} idle"
    )
    key = (row["cluster"], row["job_id"], row["submit"])
    if row["job_id"] is not None:
        tip += f", most by job {row['job_id']}"
    return Field(None if idle is None else idle / allocated, tip, href=links.jobs.get(key) or places.get(key, ""))


def week_map(result: WasteResult) -> Markup:
    """Draw the idle share by weekday and time of day, or by weekday and week if the report has whole days only."""
    words = Words(
        "week-map", "Idle time by weekday", "",
        "Idle time by the local weekday, and by the time of day or, in reports of more than three weeks, by the week. "
        "Equal weekdays and times are added up.",
    )  # fmt: skip
    zone, width = result.query.zone, result.bucket_s
    frame = result.over_time
    if width < _HOUR_S or frame.is_empty():
        return charts.empty(words, "The interval is too short.")

    def column(moment: datetime) -> str:
        if width == _DAY_S:
            year, week, _ = moment.isocalendar()
            return f"{year}-W{week:02d}"
        until = (moment + timedelta(seconds=width)).hour or 24
        return f"{moment.hour}" if width == _HOUR_S else f"{moment.hour}\N{EN DASH}{until} h"

    local = [time.astimezone(zone) for time in frame["bucket"].to_list()]
    placed = frame.with_columns(
        pl.Series("weekday", [time.weekday() for time in local], pl.Int64),
        pl.Series("column", [column(time) for time in local]),
        pl.Series("order", [time.toordinal() // 7 if width == _DAY_S else time.hour for time in local], pl.Int64),
    )
    names = placed.sort("order", maintain_order=True)["column"].unique(maintain_order=True).to_list()
    sums = placed.group_by("weekday", "column").agg(
        pl.col("gpu_hours_allocated", "gpu_hours_unknown").sum(),
        pl.col("gpu_hours_busy", "gpu_hours_low", "gpu_hours_idle").sum(),
    )
    cells = {(row["weekday"], row["column"]): row for row in sums.iter_rows(named=True)}
    rows = [
        (name, [_time(cells.get((day, column))) for column in names])
        for day, name in enumerate(WEEKDAYS)
        if any((day, column) in cells for column in names)
    ]
    return heat_map(words, "Day", names, rows)


def _time(row: Row | None) -> Field:
    if row is None or not row["gpu_hours_allocated"]:
        return Field(None, "", empty=True)
    measured = row["gpu_hours_allocated"] - row["gpu_hours_unknown"]
    share = idle_share({**row, "gpu_hours_measured": measured}) if measured > 1e-9 else None
    idle = fmt.hours(row["gpu_hours_idle"] if measured > 1e-9 else None, "GPU-h")
    return Field(share, f"{fmt.hours(row['gpu_hours_allocated'], 'GPU-h')} allocated, {idle} idle")
