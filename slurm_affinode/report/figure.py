"""What every chart shares: the figure around it, legend, axes, and the same numbers as a table.

A chart is inline SVG without a ``viewBox``: positions along x are percentages, positions along y are pixels, so that
a chart fills any width while text keeps its size. It names no colour: classes ``f-busy``, ``f-low``, ``f-idle``,
``f-unknown`` and ``f-1`` ... ``f-6`` get theirs from the style sheet, for light, dark and print. ``f-low`` and
``f-unknown`` are patterns as well, so no state is told by its hue alone; on paper they are light with an outline, since
browsers print every shape that has a pattern as a picture of the whole page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

FILLS = ("busy", "low", "idle", "unknown", "1", "2", "3", "4", "5", "6")
"""Words for ``Series.fill``: the four states of GPU time, and six colours for anything else."""


@dataclass(frozen=True, slots=True)
class Series:
    """One named row of numbers. ``None`` is unknown and is not drawn."""

    label: str
    values: Sequence[float | None]
    fill: str = "1"
    """One of ``FILLS``."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The text alternative of a chart: a table with a head, its rows, and the unit in the caption."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a figure."""

    key: str
    """Unique in the page; letters, digits and dashes."""
    title: str
    summary: str
    """What the picture shows, in one sentence with its main numbers: read out in place of the picture."""
    help: str | None = None
    """How to read it; shown on demand."""


def figure(
    words: Words, svg: Markup, *, legend: Sequence[Series] = (), numbers: Numbers | None = None, note: str | None = None
) -> Markup:
    """The ``<figure>`` of a chart: caption, help, legend, picture, note, numbers."""
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
    """The figure of a chart that has nothing to show, saying why."""
    return figure(words, Markup('<p class="empty">{}</p>').format(reason))


def help_text(text: str) -> Markup:
    """Text that opens on demand, also without script."""
    return Markup('<details class="help"><summary>How to read this</summary><p>{}</p></details>').format(text)


def svg(words: Words, height: int, body: Iterable[Markup], *, axes: bool = True) -> Markup:
    """The ``<svg>`` element with its accessible name and description."""
    return Markup(
        '<svg role="img" class="{}" width="100%" height="{}" aria-labelledby="{}-t {}-d">'
        '<title id="{}-t">{}</title><desc id="{}-d">{}</desc>{}</svg>'
    ).format(
        "axes" if axes else "plain", height, words.key, words.key,
        words.key, words.title, words.key, words.summary, Markup("").join(body),
    )  # fmt: skip


def legend_list(series: Sequence[Series]) -> Markup:
    """The key of colours and patterns."""
    item = Markup(
        '<li><svg width="14" height="14" aria-hidden="true"><rect class="f-{}" width="14" height="14"/></svg>{}</li>'
    )
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(item.format(s.fill, s.label) for s in series))


def numbers_table(numbers: Numbers) -> Markup:
    """The numbers of a chart, closed until asked for."""
    # A heading without words is none: the corner above the names of the rows is a plain cell.
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
        '<details class="numbers"><summary>Show the numbers</summary><div class="scroll" tabindex="0" role="region" '
        'aria-label="{}"><table><caption>{}</caption><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div></details>'
    ).format(numbers.caption, numbers.caption, head, rows)


def num(value: float) -> str:
    """A coordinate: at most two digits after the point, no trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def rect(x: float, y: float, width: float, height: float, fill: str) -> Markup:
    """A filled rectangle; ``x``, ``width`` in percent, ``y``, ``height`` in pixels; nothing when it has no area."""
    if width <= 0 or height <= 0:
        return Markup("")
    shape = Markup('<rect class="f-{}" x="{}%" y="{}" width="{}%" height="{}"/>')
    return shape.format(fill, num(x), num(y), num(width), num(height))


def text(x: float, y: float, content: str, kind: str = "") -> Markup:
    """A label at ``x`` percent, ``y`` pixels; ``kind`` is a class of the style sheet (``start``, ``end``, ``wide``)."""
    return Markup('<text x="{}%" y="{}"{}>{}</text>').format(
        num(x), num(y), Markup(' class="{}"').format(kind) if kind else "", content
    )


@dataclass(frozen=True, slots=True)
class ValueAxis:
    """A linear axis from 0 with round ticks."""

    top: float
    ticks: tuple[float, ...]

    def label(self, tick: float) -> str:
        """The tick as text, with as many digits as its step needs."""
        step = self.ticks[1] if len(self.ticks) > 1 else 1
        digits = next((n for n in range(10) if math.isclose(step, round(step, n), rel_tol=1e-9)), 0)
        return f"{tick:,.{digits}f}"


def value_axis(largest: float, *, ticks: int = 4) -> ValueAxis:
    """The axis that holds ``largest``: a step of 1, 2, 2.5 or 5 times a power of ten, about ``ticks`` of them."""
    if not math.isfinite(largest) or largest <= 0:
        return ValueAxis(1.0, (0.0, 1.0))
    power = 10.0 ** math.floor(math.log10(largest / ticks))
    step = next(s for f in (1, 2, 2.5, 5, 10, 20) if (s := f * power) * ticks >= largest * (1 - 1e-9))
    steps = max(1, math.ceil(largest / step - 1e-9))
    return ValueAxis(steps * step, tuple(i * step for i in range(steps + 1)))


def horizontal_grid(axis: ValueAxis, height: int, top: int, unit: str) -> Markup:
    """Grid lines and labels of a vertical value axis over the full width, its unit above."""
    parts = [Markup('<text class="unit" x="0" y="{}">{}</text>').format(top - 10, unit)] if unit else []
    for tick in axis.ticks:
        y = num(top + height * (1 - tick / axis.top))
        parts.append(
            Markup(
                '<line class="{}" x1="0" x2="100%" y1="{}" y2="{}"/><text class="tick" x="-8" y="{}">{}</text>'
            ).format("base" if tick == 0 else "grid", y, y, y, axis.label(tick))
        )
    return Markup("").join(parts)
