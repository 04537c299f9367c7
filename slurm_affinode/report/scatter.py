"""The scatter chart: points, or a grid of densities where points would cover each other."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from slurm_affinode.report import format as fmt
from slurm_affinode.report.figure import (
    Numbers,
    Series,
    ValueAxis,
    Words,
    empty,
    figure,
    horizontal_grid,
    num,
    rect,
    svg,
    text,
    value_axis,
)

MAX_POINTS = 600
"""More points than this are drawn as a density grid."""
_TOP, _PLOT = 26, 260
_COLUMNS, _ROWS = 50, 26


@dataclass(frozen=True, slots=True)
class Point:
    """One thing at ``x``, ``y``; ``size`` 0-1 sets the area, ``label`` is shown on pointing."""

    x: float
    y: float
    fill: str = "1"
    size: float = 0.2
    label: str = ""


def scatter(
    words: Words,
    points: Sequence[Point],
    *,
    x_label: str,
    y_label: str,
    x_max: float | None = None,
    y_max: float | None = None,
    legend: Sequence[Series] = (),
    thing: str = "jobs",
    note: str | None = None,
) -> Markup:
    """Points over two axes from 0. Above ``MAX_POINTS`` each cell of a grid is drawn the stronger the more it
    holds, in the fill that most of its points have."""
    if not points:
        return empty(words, "Nothing was measured that has both figures.")
    across = value_axis(x_max or max(p.x for p in points), ticks=5)
    up = value_axis(y_max or max(p.y for p in points))
    body = [horizontal_grid(up, _PLOT, _TOP, y_label)]
    dense = len(points) > MAX_POINTS
    body.append(_density(points, across, up, thing) if dense else _points(points, across, up))
    for tick in across.ticks:
        place = 100 * tick / across.top
        kind = "start" if tick == 0 else "end" if place > 97 else ""
        body.append(text(place, _TOP + _PLOT + 18, across.label(tick), kind))
    body.append(text(50, _TOP + _PLOT + 40, x_label, "axis"))
    return figure(
        words,
        svg(words, _TOP + _PLOT + 48, body),
        legend=legend,
        numbers=_coarse(points, across, up, f"{y_label} \\ {x_label}", f"{words.title}: number of {thing}"),
        note=" ".join(filter(None, [note, f"The stronger the colour, the more {thing} are there." if dense else None])),
    )


def _points(points: Sequence[Point], across: ValueAxis, up: ValueAxis) -> Markup:
    mark = Markup('<circle class="p f-{}" cx="{}%" cy="{}" r="{}"><title>{}</title></circle>')
    return Markup("").join(
        mark.format(
            p.fill, num(100 * min(p.x / across.top, 1)), num(_TOP + _PLOT * (1 - min(p.y / up.top, 1))),
            num(2.5 + 8 * max(0.0, min(1.0, p.size)) ** 0.5), p.label,
        )
        for p in sorted(points, key=lambda p: -p.size)
    )  # fmt: skip


def _cell(value: float, top: float, cells: int) -> int:
    return min(cells - 1, max(0, int(cells * value / top)))


def _density(points: Sequence[Point], across: ValueAxis, up: ValueAxis, thing: str) -> Markup:
    """Cells in five strengths; equal steps of the square root of the count, so that single points are still seen."""
    cells: defaultdict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    for p in points:
        key = (_cell(p.x, across.top, _COLUMNS), _cell(p.y, up.top, _ROWS))
        cells[key][p.fill] += 1
    most = max(c.total() for c in cells.values())
    mark = Markup('<g class="o{}"><title>{}</title>{}</g>')
    drawn = []
    for (column, row), fills in sorted(cells.items()):
        tip = f"{fmt.count(fills.total())} {thing}"
        x, y = 100 * column / _COLUMNS, _TOP + _PLOT * (1 - (row + 1) / _ROWS)
        strength = max(1, math.ceil(5 * (fills.total() / most) ** 0.5))
        drawn.append(
            mark.format(strength, tip, rect(x, y, 96 / _COLUMNS, 0.93 * _PLOT / _ROWS, fills.most_common(1)[0][0]))
        )
    return Markup("").join(drawn)


def _edge(top: float, i: int, n: int) -> str:
    return f"{fmt.number(top * i / n)}–{fmt.number(top * (i + 1) / n)}"


def _coarse(points: Sequence[Point], across: ValueAxis, up: ValueAxis, corner: str, caption: str) -> Numbers:
    """The text alternative: how many points lie in each of 5 x 4 fields."""
    counts = Counter((_cell(p.x, across.top, 5), _cell(p.y, up.top, 4)) for p in points)
    head = [corner, *(_edge(across.top, i, 5) for i in range(5))]
    rows = [[_edge(up.top, j, 4), *(fmt.count(counts[i, j]) for i in range(5))] for j in reversed(range(4))]
    return Numbers(head, rows, caption)
