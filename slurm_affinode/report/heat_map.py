"""Heat maps: tables whose cells have a number and a color in six strengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import polars as pl
from markupsafe import Markup

from slurm_affinode.analysis.measures import GPU_RUNS, GPUS
from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.base.times import WEEKDAYS
from slurm_affinode.report import charts, tables
from slurm_affinode.report import format as fmt
from slurm_affinode.report.charts import Words
from slurm_affinode.report.links import JobKey
from slurm_affinode.report.measures import Row, idle_share, known_value

NODES = 60
"""Nodes on the map; more would be a page of their own."""
_LEVELS = 5
_HOUR_S, _DAY_S = 3600, 86400
_LEGEND = (
    "Idle time in percent of the allocated time; the stronger the color, the more. A question mark is unknown, "
    "an empty field was not allocated."
)


@dataclass(frozen=True, slots=True)
class FieldTarget:
    """The rows of the table of all jobs that belong to a field."""

    number: int
    """Of the field, in ``Cell.fields`` of these rows."""
    runs: int
    """Runs, also those that the table does not have."""
    name: str
    """``NODE:GPU``."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a heat map."""

    share: float | None
    """0 to 1; ``None``: unknown, or nothing to show if ``empty``."""
    tip: str
    empty: bool = False
    href: str = ""
    """Target of the field's link."""
    target: FieldTarget | None = None
    """What the link selects, with scripts."""


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
        data = Markup("") if field.target is None else Markup(' data-g="{}" data-n="{}" data-gpu="{}"').format(
            field.target.number, field.target.runs, field.target.name
        )  # fmt: skip
        content = Markup('<a href="{}"{} aria-label="{}">{}</a>').format(field.href, data, label, text)
    return Markup('<td class="h{}" title="{}">{}</td>').format(level, field.tip, content)


def _level(share: float) -> int:
    return min(_LEVELS, 1 + int(share * _LEVELS * 0.999))


def drawn_gpus(result: WasteResult) -> pl.DataFrame:
    """Return the GPUs on the map, by field: those of the nodes with most idle GPU-hours.

    Columns: ``field``, ``gpu`` (row of ``WasteResult.gpus``) and those of ``analysis.measures.GPUS`` but ``gpu``, which
    is ``number``; and ``runs``, the number of runs.
    """
    frame = pl.DataFrame(schema=GPUS) if result.gpus is None else result.gpus
    idle = frame.group_by("cluster", "node").agg(pl.col("gpu_hours_idle").sum())
    order = idle.sort("gpu_hours_idle", "cluster", "node", descending=[True, False, False], nulls_last=True)
    chosen = order.head(NODES).select("cluster", "node").sort("cluster", "node", nulls_last=True).with_row_index("line")
    pairs = pl.DataFrame(schema=GPU_RUNS) if result.gpu_runs is None else result.gpu_runs
    return (
        frame.rename({"gpu": "number"})
        .with_row_index("gpu")
        .join(chosen, on=("cluster", "node"), nulls_equal=True, maintain_order="left")
        .sort("line", maintain_order=True)
        .drop("line")
        .with_row_index("field")
        .join(pairs.group_by("gpu").agg(pl.len().alias("runs")), on="gpu", how="left", maintain_order="left")
        .with_columns(pl.col("runs").fill_null(0))
    )


def fields_of_runs(result: WasteResult, drawn: pl.DataFrame, rows: int) -> dict[int, str]:
    """Return the fields of each of the first ``rows`` runs on the map: row -> ``0-7 12``."""
    if result.gpu_runs is None:
        return {}
    pairs = result.gpu_runs.filter(pl.col("run") < rows).join(drawn.select("field", "gpu"), on="gpu")
    by_run = pairs.sort("field").group_by("run").agg("field")
    return {run: _ranges(fields) for run, fields in by_run.iter_rows()}


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges: ``0-7 12``."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def gpu_map(result: WasteResult, drawn: pl.DataFrame, row_count: int = 0) -> Markup:
    """Draw the idle share of each GPU, a row for each node. ``drawn``: from ``drawn_gpus``.

    A field links to the runs of the GPU in the table of all jobs, which has the first ``row_count`` runs: ``page.js``
    shows these alone. Without scripts the link leads to the run with most idle time on the GPU.
    """
    help_text = (
        "Each row is a node, each field one of its GPUs. Point at a field for its hours. Its link shows all job runs "
        "on this GPU in the table of jobs."
    )
    frame = result.gpus
    words = Words("gpu-map", "Idle time of each GPU", "", help_text)
    if frame is None or frame.is_empty():
        return charts.empty(words, "There are no GPU metrics.")
    several = frame["cluster"].n_unique() > 1
    keys = result.jobs.head(row_count).select("cluster", "job_id", "submit").rows()
    places = {key: f"#{tables.anchor(number)}" for number, key in enumerate(keys)}
    parts = drawn.partition_by("cluster", "node", as_dict=True, maintain_order=True)
    columns = max(part.height for part in parts.values())
    rows = []
    for (cluster, node), part in parts.items():
        fields = [_gpu(row, places) for row in part.iter_rows(named=True)]
        fields += [Field(None, "", empty=True)] * (columns - len(fields))
        label = f"{fmt.name(cluster)}: {fmt.name(node)}" if several else fmt.name(node)
        rows.append((fmt.clip(label, 40), fields))
    idle = frame.group_by("cluster", "node").agg(pl.col("gpu_hours_idle").sum())
    most = idle.sort("gpu_hours_idle", "cluster", "node", descending=[True, False, False], nulls_last=True)
    first = most.row(0, named=True)
    summary = (
        f"Most idle GPU-hours: {fmt.name(first['node'])}, {fmt.hours(known_value(first, 'gpu_hours_idle'), 'GPU-h')}."
    )
    note = f"The {NODES} nodes with most idle GPU-hours of {fmt.count(idle.height)}." if idle.height > NODES else ""
    words = Words("gpu-map", "Idle time of each GPU", summary, help_text)
    return heat_map(words, "Node", [str(number) for number in range(columns)], rows, note)


def _gpu(row: Row, places: Mapping[JobKey, str]) -> Field:
    allocated = known_value(row, "gpu_hours_allocated")
    if not allocated:
        return Field(None, "", empty=True)
    idle = known_value(row, "gpu_hours_idle")
    name = f"{fmt.name(row['node'])}:{fmt.name(row['number'])}"
    tip = (
        f"GPU {name}, {fmt.name(row['gpu_model'])}: "
        f"{fmt.hours(allocated, 'GPU-h')} allocated, {fmt.hours(idle, 'GPU-h')} idle"
    )
    if row["runs"]:
        tip += f"; {fmt.count(row['runs'])} job run{'' if row['runs'] == 1 else 's'}"
    if row["job_id"] is not None:
        tip += f", most idle time in job {row['job_id']}"
    href = places.get((row["cluster"], row["job_id"], row["submit"]), "")
    if not href and places and row["runs"]:
        href = "#jobs"
    return Field(
        None if idle is None else idle / allocated, tip, href=href,
        target=FieldTarget(row["field"], row["runs"], name) if row["runs"] else None,
    )  # fmt: skip


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
