"""Inline SVG charts. Every function returns ``Markup`` that templates print unchanged; all text is escaped here.

========================  ==============================================================================
``stacked_time``          stacked bars over time, e.g. GPUs idle, low, busy, unknown
``stacked_bars``          horizontal stacked bars, one per partition, model, user...
``histogram``             vertical bars over bins, one or more series side by side
``lines``                 one or more curves over a numeric axis (cumulative distributions, popularity)
``scatter``               points, or a density grid if there are too many
``split``                 one wide bar with labeled parts: the headline
``strip``                 a small timeline of one job, for a table cell; no figure around it
``meter``                 a small stacked bar for a table cell; no figure around it
``empty``                 a figure that gives the reason for missing data
========================  ==============================================================================

Each (except ``strip``, ``meter`` and ``split``) is a complete ``<figure>``: title, help, legend, picture with an
accessible name and description, and a table of the numbers. ``Words`` holds the texts, ``Series`` the numbers and the
fill (``busy low idle unknown 1..6``). The page needs the style sheet and the patterns of
``reports/templates/base.html.j2``. Example::

    words = Words("idle-time", "Idle over time", "Idle GPUs peak at 31 on 3 November.")
    stacked_time(words, starts, 3600, [Series("busy", busy, "busy"), Series("idle", idle, "idle")], unit="GPUs")

The SVG has no ``viewBox``: x positions are percentages, y positions pixels, so a chart fills any width while text keeps
its size. Colors come from the classes ``f-busy``, ``f-low``, ``f-idle``, ``f-unknown`` and ``f-1`` ... ``f-6`` of the
style sheet, for light, dark and print. ``f-low`` and ``f-unknown`` also have a pattern, so that hue is never the only
difference; in print they are light with an outline, because browsers print each shape with a pattern as an image of
the whole page.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta, tzinfo

import polars as pl
from markupsafe import Markup, escape

from slurm_affinode.base import times
from slurm_affinode.report import format as fmt


@dataclass(frozen=True, slots=True)
class Series:
    """A named series of numbers. ``None`` is unknown and is not drawn."""

    label: str
    values: Sequence[float | None]
    fill: str = "1"
    """A state of GPU time (``busy``, ``low``, ``idle``, ``unknown``), or a color for anything else (``1`` to ``6``)."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The text alternative of a chart: a table with head and rows, and the unit in the caption."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str


@dataclass(frozen=True, slots=True)
class Words:
    """The texts of a figure."""

    key: str
    """Unique in the page; letters, digits and dashes."""
    title: str
    summary: str
    """One sentence with the main numbers of the picture, for screen readers."""
    help: str | None = None
    """How to read the chart; shown on demand."""


def figure(
    words: Words, svg: Markup, *, legend: Sequence[Series] = (), numbers: Numbers | None = None, note: str | None = None
) -> Markup:
    """Return the ``<figure>`` of a chart: caption, help, legend, picture, note, numbers."""
    parts = [Markup('<figure class="chart" id="fig-{}"><figcaption><h3>{}</h3>').format(words.key, words.title)]
    if words.help:
        parts.append(help_text(words.help))
    parts.append(Markup("</figcaption>"))
    if legend:
        parts.append(legend_list(legend))
    parts.append(Markup('<div class="plot">{}</div>').format(svg))
    if note:
        parts.append(Markup('<p class="note">{}</p>').format(note))
    if numbers is not None:
        parts.append(numbers_table(numbers))
    parts.append(Markup("</figure>"))
    return Markup("").join(parts)


def empty(words: Words, reason: str) -> Markup:
    """Return the figure of a chart without data, with the reason."""
    return figure(words, Markup('<p class="empty">{}</p>').format(reason))


def help_text(text: str) -> Markup:
    """Return text that opens on demand, also without scripts."""
    return Markup('<details class="help"><summary>How to read this</summary><p>{}</p></details>').format(text)


def svg(words: Words, height: int, body: Iterable[Markup], *, axes: bool = True) -> Markup:
    """Return the ``<svg>`` element with its accessible name and description."""
    return Markup(
        '<svg role="img" class="{}" width="100%" height="{}" aria-labelledby="{}-t {}-d">'
        '<title id="{}-t">{}</title><desc id="{}-d">{}</desc>{}</svg>'
    ).format(
        "axes" if axes else "plain", height, words.key, words.key,
        words.key, words.title, words.key, words.summary, Markup("").join(body),
    )  # fmt: skip


def legend_list(series: Sequence[Series]) -> Markup:
    """Return the legend of colors and patterns."""
    item = Markup(
        '<li><svg width="14" height="14" aria-hidden="true"><rect class="f-{}" width="14" height="14"/></svg>{}</li>'
    )
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(item.format(s.fill, s.label) for s in series))


def numbers_table(numbers: Numbers) -> Markup:
    """Return the numbers of a chart as a collapsed table."""
    # A heading must not be empty, so the corner above the row names is a plain cell.
    head = Markup("").join(
        Markup('<th scope="col">{}</th>').format(h) if h else Markup("<td></td>") for h in numbers.head
    )
    rows = Markup("").join(
        Markup('<tr><th scope="row">{}</th>{}</tr>').format(
            row[0], Markup("").join(Markup("<td>{}</td>").format(cell) for cell in row[1:])
        )
        for row in numbers.rows
    )
    return Markup(
        '<details class="numbers"><summary>Show the numbers</summary><div class="scroll" tabindex="0" role="group" '
        'aria-label="{}"><table><caption>{}</caption><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div></details>'
    ).format(numbers.caption, numbers.caption, head, rows)


def num(value: float) -> str:
    """Format a coordinate: at most two digits after the point, no trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def rect(x: float, y: float, width: float, height: float, fill: str) -> Markup:
    """Return a filled rectangle; ``x``, ``width`` in percent, ``y``, ``height`` in pixels; empty if it has no area."""
    if width <= 0 or height <= 0:
        return Markup("")
    # A page has thousands of them: Markup.format() takes ten times as long.
    size = f'x="{num(x)}%" y="{num(y)}" width="{num(width)}%" height="{num(height)}"'
    return Markup(f'<rect class="f-{escape(fill)}" {size}/>')  # noqa: S704


def text(x: float, y: float, content: str, kind: str = "") -> Markup:
    """Return a label at ``x`` percent, ``y`` pixels; ``kind`` is a CSS class (``start``, ``end``, ``wide``)."""
    return Markup('<text x="{}%" y="{}"{}>{}</text>').format(
        num(x), num(y), Markup(' class="{}"').format(kind) if kind else "", content
    )


@dataclass(frozen=True, slots=True)
class ValueAxis:
    """A linear axis from 0 with round ticks."""

    top: float
    ticks: tuple[float, ...]

    def label(self, tick: float) -> str:
        """Format a tick with as many digits as the step needs."""
        step = self.ticks[1] if len(self.ticks) > 1 else 1
        digits = next((n for n in range(10) if math.isclose(step, round(step, n), rel_tol=1e-9)), 0)
        return f"{tick:,.{digits}f}"


def value_axis(largest: float, *, ticks: int = 4) -> ValueAxis:
    """Return an axis up to at least ``largest``: about ``ticks`` steps of 1, 2, 2.5 or 5 times a power of ten."""
    if not math.isfinite(largest) or largest <= 0:
        return ValueAxis(1.0, (0.0, 1.0))
    power = 10.0 ** math.floor(math.log10(largest / ticks))
    step = next(s for f in (1, 2, 2.5, 5, 10, 20) if (s := f * power) * ticks >= largest * (1 - 1e-9))
    steps = max(1, math.ceil(largest / step - 1e-9))
    return ValueAxis(steps * step, tuple(i * step for i in range(steps + 1)))


def horizontal_grid(axis: ValueAxis, height: int, top: int, unit: str) -> Markup:
    """Return the grid lines and labels of a vertical value axis over the full width, with the unit above."""
    parts = [Markup('<text class="unit" x="0" y="{}">{}</text>').format(top - 10, unit)] if unit else []
    for tick in axis.ticks:
        y = num(top + height * (1 - tick / axis.top))
        parts.append(
            Markup(
                '<line class="{}" x1="0" x2="100%" y1="{}" y2="{}"/><text class="tick" x="-8" y="{}">{}</text>'
            ).format("base" if tick == 0 else "grid", y, y, y, axis.label(tick))
        )
    return Markup("").join(parts)


_HOUR_S, _DAY_S = 3600, 86400
_STEPS_S = (
    15, 30, 60, 120, 300, 600, 900, 1800,
    _HOUR_S, 2 * _HOUR_S, 3 * _HOUR_S, 6 * _HOUR_S, 12 * _HOUR_S, _DAY_S, 2 * _DAY_S, 7 * _DAY_S, 14 * _DAY_S,
)  # fmt: skip
_MAX_TICKS = 9


@dataclass(frozen=True, slots=True)
class TimeTick:
    """A tick at ``at`` (UTC) with a short ``label``; only ``major`` ticks are shown on narrow screens."""

    time: datetime
    label: str
    major: bool


def time_ticks(since: datetime, until: datetime, zone: tzinfo) -> tuple[TimeTick, ...]:
    """Return at most nine ticks in the half-open interval."""
    span_s = (until - since).total_seconds()
    # Labels with seconds are longer.
    step = next((s for s in _STEPS_S if span_s / s <= (_MAX_TICKS if s % 60 == 0 else _MAX_TICKS - 3)), None)
    ticks = _months(since, until, zone) if step is None else times.edges(since, until, step, zone)
    moments = [tick for tick in ticks if since <= tick < until] or [since]
    every = max(1, -(-len(moments) // 4))
    return tuple(TimeTick(tick, _label(tick.astimezone(zone), step), i % every == 0) for i, tick in enumerate(moments))


def _months(since: datetime, until: datetime, zone: tzinfo) -> Iterator[datetime]:
    first, last = since.astimezone(zone), until.astimezone(zone)
    total = (last.year - first.year) * 12 + last.month - first.month + 1
    every = next((n for n in (1, 2, 3, 6) if total / n <= _MAX_TICKS), 12)
    for i in range(total + 1):
        index = first.month - 1 + i
        if index % 12 % every == 0:
            yield datetime(first.year + index // 12, index % 12 + 1, 1, tzinfo=zone).astimezone(UTC)


def _label(moment: datetime, step_s: int | None) -> str:
    if step_s is None:
        return moment.strftime("%Y" if moment.month == 1 else "%b")
    if step_s < _DAY_S and moment.time() != time.min:
        return moment.strftime("%H:%M" if step_s % 60 == 0 else "%H:%M:%S")
    return f"{moment.day} {moment:%b}"


MAX_POINTS = 600
"""More points than this are drawn as a density grid."""
_SCATTER_TOP, _SCATTER_PLOT = 26, 260
_COLUMNS, _ROWS = 50, 26


POINT = {"x": pl.Float64(), "y": pl.Float64(), "fill": pl.String(), "size": pl.Float64(), "label": pl.String()}
"""Columns of the marks of a scatter chart; ``size`` 0-1 sets the area, ``label`` is the tooltip."""


def scatter(
    words: Words,
    points: pl.DataFrame,
    *,
    x_label: str,
    y_label: str,
    x_max: float | None = None,
    y_max: float | None = None,
    legend: Sequence[Series] = (),
    thing: str = "jobs",
    note: str | None = None,
) -> Markup:
    """Draw points (``POINT``) over two axes from 0.

    More than ``MAX_POINTS`` points are drawn as a density grid, each cell in the fill of most of its points.
    """
    if points.is_empty():
        return empty(words, "Nothing was measured that has both figures.")
    across = value_axis(x_max or points["x"].max(), ticks=5)  # type: ignore[arg-type]
    up = value_axis(y_max or points["y"].max())  # type: ignore[arg-type]
    body = [horizontal_grid(up, _SCATTER_PLOT, _SCATTER_TOP, y_label)]
    dense = len(points) > MAX_POINTS
    body.append(_density(points, across, up, thing) if dense else _points(points, across, up))
    for tick in across.ticks:
        place = 100 * tick / across.top
        kind = "start" if tick == 0 else "end" if place > 97 else ""
        body.append(text(place, _SCATTER_TOP + _SCATTER_PLOT + 18, across.label(tick), kind))
    body.append(text(50, _SCATTER_TOP + _SCATTER_PLOT + 40, x_label, "axis"))
    return figure(
        words,
        svg(words, _SCATTER_TOP + _SCATTER_PLOT + 48, body),
        legend=legend,
        numbers=_coarse(points, across, up, f"{y_label} \\ {x_label}", f"{words.title}: number of {thing}"),
        note=" ".join(filter(None, [note, f"The stronger the color, the more {thing} are there." if dense else None])),
    )


def _points(points: pl.DataFrame, across: ValueAxis, up: ValueAxis) -> Markup:
    mark = Markup('<circle class="p f-{}" cx="{}%" cy="{}" r="{}"><title>{}</title></circle>')
    marks = points.sort("size", descending=True, maintain_order=True).select(*POINT)
    return Markup("").join(
        mark.format(
            fill, num(100 * min(x / across.top, 1)), num(_SCATTER_TOP + _SCATTER_PLOT * (1 - min(y / up.top, 1))),
            num(2.5 + 8 * max(0.0, min(1.0, size)) ** 0.5), label,
        )
        for x, y, fill, size, label in marks.iter_rows()
    )  # fmt: skip


def _cell(name: str, top: float, cells: int) -> pl.Expr:
    return (cells * pl.col(name) / top).cast(pl.Int64).clip(0, cells - 1)


def _density(points: pl.DataFrame, across: ValueAxis, up: ValueAxis, thing: str) -> Markup:
    """Draw cells in five strengths, by equal steps of the square root of the count, so single points stay visible."""
    place = _cell("x", across.top, _COLUMNS).alias("column"), _cell("y", up.top, _ROWS).alias("row")
    fills = points.group_by(*place, "fill", maintain_order=True).len().sort("len", descending=True, maintain_order=True)
    cells = fills.group_by("column", "row").agg(pl.col("len").sum(), pl.col("fill").first()).sort("column", "row")
    most = max(cells["len"])
    mark = Markup('<g class="o{}"><title>{}</title>{}</g>')
    drawn = []
    for column, row, count, fill in cells.iter_rows():
        tip = f"{fmt.count(count)} {thing}"
        x, y = 100 * column / _COLUMNS, _SCATTER_TOP + _SCATTER_PLOT * (1 - (row + 1) / _ROWS)
        strength = max(1, math.ceil(5 * (count / most) ** 0.5))
        drawn.append(mark.format(strength, tip, rect(x, y, 96 / _COLUMNS, 0.93 * _SCATTER_PLOT / _ROWS, fill)))
    return Markup("").join(drawn)


def _edge(top: float, i: int, n: int) -> str:
    return f"{fmt.number(top * i / n)}–{fmt.number(top * (i + 1) / n)}"


def _coarse(points: pl.DataFrame, across: ValueAxis, up: ValueAxis, corner: str, caption: str) -> Numbers:
    """Return the text alternative: the number of points in each of 5 x 4 fields."""
    place = _cell("x", across.top, 5).alias("column"), _cell("y", up.top, 4).alias("row")
    counts = Counter({(column, row): n for column, row, n in points.group_by(*place).len().iter_rows()})
    head = [corner, *(_edge(across.top, i, 5) for i in range(5))]
    rows = [[_edge(up.top, j, 4), *(fmt.count(counts[i, j]) for i in range(5))] for j in reversed(range(4))]
    return Numbers(head, rows, caption)


__all__ = [
    "MAX_POINTS", "POINT", "Bar", "Series", "Words", "empty", "histogram", "lines", "meter", "scatter", "split",
    "stacked_bars", "stacked_time", "strip",
]  # fmt: skip

Formatter = Callable[[float | None], str]
_TOP = 26
_PLOT = 200
_BELOW = 26
_APART = 62
"""Maximum number of bars over time with gaps between them."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of ``stacked_bars``: label, short text at the right end, and one value per series (``None``: unknown)."""

    label: str
    note: str
    values: Sequence[float | None]


def stacked_time(
    words: Words,
    starts: Sequence[datetime],
    step_s: float | Sequence[float],
    series: Sequence[Series],
    *,
    unit: str,
    zone: tzinfo = UTC,
    note: str | None = None,
) -> Markup:
    """Draw stacked bars over time, the first series lowest.

    ``starts`` are in UTC and shown in ``zone``; ``step_s`` is the length of all bars, or of each, in seconds.
    """
    if not starts:
        return empty(words, "Nothing happened in this interval.")
    steps = [step_s] * len(starts) if isinstance(step_s, int | float) else step_s
    first, last = starts[0], starts[-1] + timedelta(seconds=steps[-1])
    span = (last - first).total_seconds()
    totals = [sum(s.values[i] or 0.0 for s in series) for i in range(len(starts))]
    axis = value_axis(max(totals))
    widths = [100 * step / span for step in steps]
    bars = []
    for i, (start, width) in enumerate(zip(starts, widths, strict=True)):
        gap = width * 0.16 if len(starts) <= _APART else 0.0
        x = 100 * (start - first).total_seconds() / span
        tip = f"{fmt.moment(start, zone)}: " + ", ".join(f"{s.label} {fmt.number(s.values[i])}" for s in series)
        stack = _stack(axis, [(s.values[i], s.fill) for s in series], x + gap / 2, width - gap)
        hit = f'<rect class="hit" x="{num(x)}%" y="{_TOP}" width="{num(width)}%" height="{_PLOT}"/>'
        bars.append(Markup('<g class="bucket"><title>{}</title>{}{}</g>').format(tip, Markup(hit), stack))  # noqa: S704
    dense = Markup('<g class="{}">{}</g>').format("sparse" if len(starts) <= _APART else "dense", Markup("").join(bars))
    body = [horizontal_grid(axis, _PLOT, _TOP, unit), dense]
    ticks = time_ticks(first, last, zone)
    # Labels are centered under their bars; if some name a time within a bar, all are placed at their time.
    under = dict(zip(starts, widths, strict=True)) if len(starts) <= _APART else {}
    named = {tick.time for tick in ticks} <= under.keys()
    for tick in ticks:
        x = 100 * (tick.time - first).total_seconds() / span + (under[tick.time] / 2 if named else 0.0)
        kind = "start" if x < 3 else "end" if x > 97 else ""
        body.append(text(x, _TOP + _PLOT + 18, tick.label, f"{kind} {'' if tick.major else 'wide'}".strip()))
    numbers = Numbers(
        ["Start", *(s.label for s in series)],
        [[fmt.moment(start, zone), *(fmt.number(s.values[i]) for s in series)] for i, start in enumerate(starts)],
        f"{words.title} ({unit})",
    )
    picture = svg(words, _TOP + _PLOT + _BELOW, body)
    return figure(words, picture, legend=series, numbers=numbers, note=note)


def _stack(axis: ValueAxis, parts: Sequence[tuple[float | None, str]], x: float, width: float) -> Markup:
    end_of_bars, drawn = 0.0, []
    for amount, fill in parts:
        high = end_of_bars + max(0.0, amount or 0.0)
        y = _TOP + _PLOT * (1 - high / axis.top)
        drawn.append(rect(x, y, width, _PLOT * (high - end_of_bars) / axis.top, fill))
        end_of_bars = high
    return Markup("").join(drawn)


def stacked_bars(
    words: Words,
    bars: Sequence[Bar],
    series: Sequence[Series],
    *,
    unit: str,
    value: Formatter = fmt.number,
    note: str | None = None,
    plain: bool = False,
) -> Markup:
    """Draw horizontal stacked bars to a common scale. ``series`` has labels and fills; the values are in the bars.

    ``plain``: no legend and no table of numbers, for self-explanatory bars.
    """
    if not bars:
        return empty(words, "Nothing to show here.")
    largest = max(sum(v or 0.0 for v in bar.values) for bar in bars)
    rows = []
    for bar in bars:
        amounts = ", ".join(f"{s.label} {value(v)}" for s, v in zip(series, bar.values, strict=True) if v is not None)
        parts = [(max(0.0, v or 0.0), s.fill) for s, v in zip(series, bar.values, strict=True)]
        row = Markup("<li><bdi>{}</bdi> <span>{}</span>{}</li>")
        rows.append(row.format(fmt.clip(bar.label, 60), bar.note, meter(f"{bar.label}: {amounts}", parts, largest)))
    numbers = Numbers(
        ["", *(s.label for s in series)],
        [[bar.label, *(value(v) for v in bar.values)] for bar in bars],
        f"{words.title} ({unit})",
    )
    picture = Markup('<p class="sr">{}</p><ul class="bars">{}</ul>').format(words.summary, Markup("").join(rows))
    return figure(words, picture, legend=() if plain else series, numbers=None if plain else numbers, note=note)


def histogram(
    words: Words,
    bins: Sequence[str],
    series: Sequence[Series],
    *,
    unit: str,
    x_label: str,
    value: Formatter = fmt.number,
    note: str | None = None,
) -> Markup:
    """Draw vertical bars over named bins, the series side by side."""
    if not bins or not any(v for s in series for v in s.values):
        return empty(words, "Nothing was measured that could be counted here.")
    axis = value_axis(max(v or 0.0 for s in series for v in s.values))
    slot = 100 / len(bins)
    width = slot * 0.84 / len(series)
    body = [horizontal_grid(axis, _PLOT, _TOP, unit)]
    for i, label in enumerate(bins):
        for j, s in enumerate(series):
            amount = s.values[i]
            height = _PLOT * (amount or 0.0) / axis.top
            drawn = rect(i * slot + slot * 0.08 + j * width, _TOP + _PLOT - height, width * 0.94, height, s.fill)
            tip = f"{label}: {s.label} {value(amount)}"
            body.append(Markup("<g><title>{}</title>{}</g>").format(tip, drawn))
        kind = "" if len(bins) <= 6 or i % 2 == 0 else "wide"
        body.append(text((i + 0.5) * slot, _TOP + _PLOT + 18, label, kind))
    body.append(text(50, _TOP + _PLOT + 40, x_label, "axis"))
    numbers = Numbers(
        [x_label, *(s.label for s in series)],
        [[label, *(value(s.values[i]) for s in series)] for i, label in enumerate(bins)],
        f"{words.title} ({unit})",
    )
    legend = series if len(series) > 1 else ()
    picture = svg(words, _TOP + _PLOT + 48, body)
    return figure(words, picture, legend=legend, numbers=numbers, note=note)


def lines(
    words: Words,
    xs: Sequence[float],
    series: Sequence[Series],
    *,
    unit: str,
    x_label: str,
) -> Markup:
    """Draw curves over the increasing numbers ``xs``; ``None`` interrupts a curve. The axis begins at 0 or below."""
    if len(xs) < 2:
        return empty(words, "Too few points for a curve.")
    axis = value_axis(max((v or 0.0 for s in series for v in s.values), default=1.0))
    low, high = min(0.0, xs[0]), xs[-1]
    across = value_axis(high - low, ticks=5)
    body = [horizontal_grid(axis, _PLOT, _TOP, unit), *(_curve(xs, s, low, across.top, axis) for s in series)]
    for tick in across.ticks:
        place = 100 * tick / across.top
        kind = "start" if tick == 0 else "end" if place > 97 else ""
        body.append(text(place, _TOP + _PLOT + 18, fmt.number(tick + low), kind))
    body.append(text(50, _TOP + _PLOT + 40, x_label, "axis"))
    every = max(1, len(xs) // 40)
    numbers = Numbers(
        [x_label, *(s.label for s in series)],
        [[fmt.number(x), *(fmt.number(s.values[i]) for s in series)] for i, x in enumerate(xs) if i % every == 0],
        f"{words.title} ({unit})",
    )
    picture = svg(words, _TOP + _PLOT + 48, body)
    return figure(words, picture, legend=series, numbers=numbers)


@dataclass(frozen=True, slots=True)
class Band:
    """A colored interval below curves; ``label`` is its tooltip, ``lane`` its row (0 or 1)."""

    start: datetime
    end: datetime
    fill: str
    label: str
    lane: int = 0


def time_lines(
    words: Words, moments: Sequence[datetime], series: Sequence[Series], *, unit: str, zone: tzinfo,
    bands: Sequence[Band] = (), height: int = 120, value: Formatter = fmt.number,
) -> Markup:  # fmt: skip
    """Draw curves over ``moments`` (UTC, equal steps, shown in ``zone``), above rows of ``bands``.

    ``None`` interrupts a curve. Charts with the same moments have the same time axis.
    """
    values = [v for s in series for v in s.values if v is not None]
    if len(moments) < 2 or not values:
        return empty(words, "Not measured.")
    step = moments[1] - moments[0]
    first, last = moments[0], moments[-1] + step
    span = (last - first).total_seconds()
    axis = value_axis(max(values))
    xs = [(time - first + step / 2).total_seconds() for time in moments]
    body = [horizontal_grid(axis, height, _TOP, unit)]
    for band in bands:
        low = max(0.0, (band.start - first).total_seconds()) / span
        high = min(span, (band.end - first).total_seconds()) / span
        drawn = rect(100 * low, _TOP + height + 3 + 6 * band.lane, max(100 * (high - low), 0.3), 5, band.fill)
        if high > 0 and low < 1:
            body.append(Markup("<g><title>{}</title>{}</g>").format(band.label, drawn))
    body += [_curve(xs, s, 0.0, span, axis, height) for s in series]
    for tick in time_ticks(first, last, zone):
        x = 100 * (tick.time - first).total_seconds() / span
        kind = "start" if x < 3 else "end" if x > 97 else ""
        body.append(text(x, _TOP + height + 26, tick.label, f"{kind} {'' if tick.major else 'wide'}".strip()))
    every = max(1, len(moments) // 60)
    numbers = Numbers(
        ["Start", *(s.label for s in series)],
        [[fmt.moment(time, zone, seconds=step < timedelta(minutes=1)), *(value(s.values[i]) for s in series)]
         for i, time in enumerate(moments) if i % every == 0],
        f"{words.title} ({unit})",
    )  # fmt: skip
    return figure(
        words, svg(words, _TOP + height + 32, body), legend=series if len(series) > 1 else (), numbers=numbers
    )


def _curve(  # noqa: PLR0917
    xs: Sequence[float], s: Series, low: float, span: float, axis: ValueAxis, height: int = _PLOT
) -> Markup:
    """Return a path in a nested SVG that stretches with the width, while its stroke does not."""
    path, pen_up = [], True
    for x, y in zip(xs, s.values, strict=True):
        if y is None:
            pen_up = True
            continue
        path.append(f"{'M' if pen_up else 'L'}{num(1000 * (x - low) / span)} {num(height * (1 - y / axis.top))}")
        pen_up = False
    return Markup(
        '<svg x="0" y="{}" width="100%" height="{}" viewBox="0 0 1000 {}" preserveAspectRatio="none" class="curve">'
        '<title>{}</title><path class="s-{}" d="{}"/></svg>'
    ).format(_TOP, height, height, s.label, s.fill, "".join(path))


def split(words: Words, parts: Sequence[Series], *, value: Formatter = fmt.number) -> Markup:
    """Draw one bar over the full width; the first value of each part is its length. Empty if the sum is 0."""
    amounts = [max(0.0, part.values[0] or 0.0) for part in parts]
    whole = sum(amounts)
    if whole <= 0:
        return Markup("")
    end_of_bars, body = 0.0, []
    for part, amount in zip(parts, amounts, strict=True):
        size = 100 * amount / whole
        tip = f"{part.label}: {value(part.values[0])}"
        body.append(Markup("<g><title>{}</title>{}</g>").format(tip, rect(end_of_bars, 0, size, 36, part.fill)))
        end_of_bars += size
    return svg(words, 36, body, axes=False)


def strip(label: str, slots: Sequence[Sequence[tuple[float, str]]]) -> Markup:
    """Draw a small timeline of one run's GPUs, from left to right.

    The parts of a slot, lowest first, are (fraction of the slot's GPU time, fill). Equal neighbors are drawn as one.
    """
    if not slots:
        return Markup("")
    width = 100 / len(slots)
    body, i = [], 0
    while i < len(slots):
        j = i + 1
        while j < len(slots) and list(slots[j]) == list(slots[i]):
            j += 1
        share_end = 0.0
        for share, fill in slots[i]:
            body.append(rect(i * width, 28 * (1 - share_end - share), (j - i) * width + 0.1, 28 * share, fill))
            share_end += share
        i = j
    return Markup(
        '<svg role="img" class="strip" width="100%" height="28" aria-label="{}"><title>{}</title>{}</svg>'
    ).format(label, label, Markup("").join(body))


def meter(label: str, parts: Sequence[tuple[float, str]], whole: float) -> Markup:
    """Draw a small stacked bar for a table cell: (value, fill) parts to the scale of ``whole``."""
    if whole <= 0:
        return Markup("")
    end_of_bars, body = 0.0, []
    for value, fill in parts:
        body.append(rect(100 * end_of_bars / whole, 0, 100 * value / whole, 14, fill))
        end_of_bars += value
    return Markup(
        '<svg role="img" class="meter" width="100%" height="14" aria-label="{}"><title>{}</title>{}</svg>'
    ).format(label, label, Markup("").join(body))
