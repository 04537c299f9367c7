"""Inline SVG charts. Every function returns ``Markup`` that a template prints as it is; all texts are escaped here.

========================  ==============================================================================
``stacked_time``          stacked bars over time, e.g. GPUs idle, low, busy, unknown
``stacked_bars``          horizontal stacked bars, one per partition, model, user...
``histogram``             vertical bars over bins, one or more series side by side
``lines``                 one or more curves over a numeric axis (cumulative distributions, popularity)
``scatter``               points, or a density grid where there are too many
``split``                 one wide bar with its parts labelled: the headline
``strip``                 a small picture of one job's life, for a table cell; no figure around it
``meter``                 a small stacked bar for a table cell; no figure around it
``empty``                 a figure that says why there is nothing to show
========================  ==============================================================================

Each (but ``strip``, ``meter`` and ``split``) is a whole ``<figure>``: title, help, legend, picture with an accessible
name and a description, and its numbers as a table. ``Words`` carries the texts, ``Series`` the numbers and the fill
(``busy low idle unknown 1..6``, see ``figure.FILLS``). The page needs the style sheet and the patterns of
``reports/templates/base.html.j2``. Example::

    words = Words("idle-time", "Idle over time", "Idle GPUs peak at 31 on 3 November.")
    stacked_time(words, starts, 3600, [Series("busy", busy, "busy"), Series("idle", idle, "idle")], unit="GPUs")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo

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
from slurm_affinode.report.scatter import MAX_POINTS, Point, scatter
from slurm_affinode.report.timeaxis import time_ticks

__all__ = [
    "MAX_POINTS", "Bar", "Point", "Series", "Words", "empty", "histogram", "lines", "meter", "scatter", "split",
    "stacked_bars", "stacked_time", "strip",
]  # fmt: skip

Formatter = Callable[[float | None], str]
_TOP = 26
_PLOT = 200
_BELOW = 26
_APART = 62
"""Up to so many bars over time stand apart; more touch each other."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of ``stacked_bars``: a label, a short text at the right end, and one value per series (None: unknown)."""

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
    """Stacked bars over time, the first series lowest; ``starts`` are in UTC and shown in ``zone``, ``step_s`` is the
    length of all bars, or of each, in seconds."""
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
    # A label stands under the bar that it names; where some name a time within a bar, all stand at their time.
    under = dict(zip(starts, widths, strict=True)) if len(starts) <= _APART else {}
    named = {tick.at for tick in ticks} <= under.keys()
    for tick in ticks:
        x = 100 * (tick.at - first).total_seconds() / span + (under[tick.at] / 2 if named else 0.0)
        kind = "start" if x < 3 else "end" if x > 97 else ""
        body.append(text(x, _TOP + _PLOT + 18, tick.label, f"{kind} {'' if tick.major else 'wide'}".strip()))
    numbers = Numbers(
        ["Start", *(s.label for s in series)],
        [[fmt.moment(at, zone), *(fmt.number(s.values[i]) for s in series)] for i, at in enumerate(starts)],
        f"{words.title} ({unit})",
    )
    picture = svg(words, _TOP + _PLOT + _BELOW, body)
    return figure(words, picture, legend=series, numbers=numbers, note=note)


def _stack(axis: ValueAxis, parts: Sequence[tuple[float | None, str]], x: float, width: float) -> Markup:
    done, drawn = 0.0, []
    for amount, fill in parts:
        high = done + max(0.0, amount or 0.0)
        y = _TOP + _PLOT * (1 - high / axis.top)
        drawn.append(rect(x, y, width, _PLOT * (high - done) / axis.top, fill))
        done = high
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
    """Horizontal stacked bars to one common scale. ``series`` gives labels and fills; values are in the bars.

    ``plain``: no legend and no table of numbers, for bars that say everything themselves.
    """
    if not bars:
        return empty(words, "Nothing to show here.")
    largest = max(sum(v or 0.0 for v in bar.values) for bar in bars)
    rows = []
    for bar in bars:
        said = ", ".join(f"{s.label} {value(v)}" for s, v in zip(series, bar.values, strict=True) if v is not None)
        parts = [(max(0.0, v or 0.0), s.fill) for s, v in zip(series, bar.values, strict=True)]
        row = Markup("<li><bdi>{}</bdi> <span>{}</span>{}</li>")
        rows.append(row.format(fmt.clip(bar.label, 60), bar.note, meter(f"{bar.label}: {said}", parts, largest)))
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
    """Vertical bars over named bins, the series side by side; the value stands above a bar where there is room."""
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
    """Curves over the increasing numbers ``xs`` (from 0 or the first); ``None`` breaks a curve."""
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


def _curve(xs: Sequence[float], s: Series, low: float, span: float, axis: ValueAxis) -> Markup:
    """A path in a nested picture that stretches with the width; its stroke does not."""
    path, pen_up = [], True
    for x, y in zip(xs, s.values, strict=True):
        if y is None:
            pen_up = True
            continue
        path.append(f"{'M' if pen_up else 'L'}{num(1000 * (x - low) / span)} {num(_PLOT * (1 - y / axis.top))}")
        pen_up = False
    return Markup(
        '<svg x="0" y="{}" width="100%" height="{}" viewBox="0 0 1000 {}" preserveAspectRatio="none" class="curve">'
        '<title>{}</title><path class="s-{}" d="{}"/></svg>'
    ).format(_TOP, _PLOT, _PLOT, s.label, s.fill, "".join(path))


def split(words: Words, parts: Sequence[Series], *, value: Formatter = fmt.number) -> Markup:
    """One bar over the full width, the first value of each part its length; nothing where the sum is 0."""
    amounts = [max(0.0, part.values[0] or 0.0) for part in parts]
    whole = sum(amounts)
    if whole <= 0:
        return Markup("")
    done, body = 0.0, []
    for part, amount in zip(parts, amounts, strict=True):
        size = 100 * amount / whole
        tip = f"{part.label}: {value(part.values[0])}"
        body.append(Markup("<g><title>{}</title>{}</g>").format(tip, rect(done, 0, size, 36, part.fill)))
        done += size
    return svg(words, 36, body, axes=False)


def strip(label: str, slots: Sequence[Sequence[tuple[float, str]]]) -> Markup:
    """A small picture of what one run's GPUs did, time from left to right. Each slot is its parts, lowest first:
    (fraction of the slot's GPU time, fill). Equal neighbours are drawn as one."""
    if not slots:
        return Markup("")
    width = 100 / len(slots)
    body, i = [], 0
    while i < len(slots):
        j = i + 1
        while j < len(slots) and list(slots[j]) == list(slots[i]):
            j += 1
        done = 0.0
        for share, fill in slots[i]:
            body.append(rect(i * width, 28 * (1 - done - share), (j - i) * width + 0.1, 28 * share, fill))
            done += share
        i = j
    return Markup(
        '<svg role="img" class="strip" width="100%" height="28" aria-label="{}"><title>{}</title>{}</svg>'
    ).format(label, label, Markup("").join(body))


def meter(label: str, parts: Sequence[tuple[float, str]], whole: float) -> Markup:
    """A small stacked bar for a table cell: (value, fill) parts to the scale of ``whole``."""
    if whole <= 0:
        return Markup("")
    done, body = 0.0, []
    for value, fill in parts:
        body.append(rect(100 * done / whole, 0, 100 * value / whole, 14, fill))
        done += value
    return Markup(
        '<svg role="img" class="meter" width="100%" height="14" aria-label="{}"><title>{}</title>{}</svg>'
    ).format(label, label, Markup("").join(body))
