"""The index page of past reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from urllib.parse import quote

from markupsafe import Markup

from slurm_affinode.base.text import visible
from slurm_affinode.report import charts, render
from slurm_affinode.report import format as fmt
from slurm_affinode.report.charts import Series, Words, legend_list
from slurm_affinode.report.measures import STATES, Row, idle_share, known_value

_KINDS = {"day": "Days", "week": "Weeks", "month": "Months"}


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One past report."""

    kind: str
    """``day``, ``week`` or ``month``; any other kind has a heading of its own."""
    label: str
    """``2026-11-20``, ``2026-W47``, ``2026-11``."""
    since: datetime
    until: datetime
    href: str
    """Path of its ``report.html`` relative to the index page, with slashes, not URL-encoded."""
    total: dict[str, float | int | None]
    """Headline figures with the keys of ``MEASURES``: ``gpu_hours_allocated``, ``_measured``, ``_idle``, ``_low``,
    ``_busy``, ``_unknown``, and ``idle_cost``; absent ones are unknown."""
    currency: str = ""
    """Currency of ``idle_cost``; a site may have changed it since."""
    clusters: Mapping[str, dict[str, float | int | None]] = field(default_factory=dict)
    """Cluster -> its figures, with the keys of ``total``."""


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One row of the page."""

    cluster: str
    """Empty: all clusters."""
    href: str
    label: str
    span: str
    bar: Markup
    idle: str
    share: str
    allocated: str
    cost: str


@dataclass(frozen=True, slots=True)
class IndexPart:
    """The reports of one kind."""

    key: str
    title: str
    rows: tuple[IndexRow, ...]
    """Those of single clusters are hidden until the cluster is chosen."""


@dataclass(frozen=True, slots=True)
class IndexContext:
    """The whole page."""

    title: str
    lead: str
    trend: Markup
    legend: Markup
    parts: tuple[IndexPart, ...]
    clusters: tuple[str, ...]
    """Choices of the switcher; empty if there is only one cluster."""
    with_cost: bool


def render_index(
    entries: Sequence[IndexEntry],
    *,
    title: str = "GPU waste reports",
    generated: datetime | None = None,
    zone: tzinfo = UTC,
) -> str:
    """Return the HTML of the page that lists ``entries``, the newest first."""
    context = _context(entries, title, zone)
    return render.page("index.html.j2", title=title, generated=generated, zone=zone, r=context)


def _context(entries: Sequence[IndexEntry], title: str, zone: tzinfo) -> IndexContext:
    ordered = sorted(entries, key=lambda e: e.since, reverse=True)
    kinds = [
        *(k for k in _KINDS if any(e.kind == k for e in ordered)),
        *sorted({e.kind for e in ordered} - set(_KINDS)),
    ]
    names = sorted({name for e in ordered for name in e.clusters})
    clusters = tuple(names) if len(names) > 1 else ()
    parts = tuple(_part(kind, [e for e in ordered if e.kind == kind], clusters, zone) for kind in kinds)
    newest = max((e.until for e in ordered), default=None)
    lead = "There is no report yet." if newest is None else f"The newest reaches to {fmt.moment(newest, zone)}."
    trend = _trend([e for e in ordered if e.kind == "day"], zone)
    return IndexContext(
        title=visible(title),
        lead=lead,
        trend=trend,
        legend=Markup("")
        if trend or not ordered
        else legend_list([Series(label, [], state) for state, label in STATES]),
        parts=parts,
        clusters=tuple(map(visible, clusters)),
        with_cost=any(known_value(e.total, "idle_cost") is not None for e in ordered),
    )


def _part(kind: str, entries: Sequence[IndexEntry], clusters: Sequence[str], zone: tzinfo) -> IndexPart:
    largest = max((known_value(e.total, "gpu_hours_allocated") or 0.0 for e in entries), default=0.0)
    return IndexPart(
        key="".join(c for c in kind if c.isalnum()) or "other",
        title=_KINDS.get(kind, visible(kind).capitalize()),
        rows=tuple(row for entry in entries for row in _rows(entry, clusters, largest, zone)),
    )


def _rows(entry: IndexEntry, clusters: Sequence[str], largest: float, zone: tzinfo) -> Iterator[IndexRow]:
    yield _row(entry, "", entry.total, largest, zone)
    for name in clusters:
        if name in entry.clusters:
            yield _row(entry, name, entry.clusters[name], largest, zone)


def _row(entry: IndexEntry, cluster: str, total: Row, largest: float, zone: tzinfo) -> IndexRow:
    hours = {state: known_value(total, f"gpu_hours_{state}") for state, _ in STATES}
    shares = ", ".join(f"{label.lower()} {fmt.hours(hours[state])}" for state, label in STATES)
    return IndexRow(
        cluster=visible(cluster),
        href=quote(entry.href, safe="/._-"),
        label=visible(entry.label),
        span=f"{fmt.moment(entry.since, zone)}{fmt.NBSP}– {fmt.moment(entry.until, zone)}",
        bar=charts.meter(shares, [(hours[state] or 0.0, state) for state, _ in STATES], largest),
        idle=fmt.number(hours["idle"]),
        share=fmt.percent(idle_share(total)),
        allocated=fmt.number(known_value(total, "gpu_hours_allocated")),
        cost=fmt.money(known_value(total, "idle_cost"), entry.currency),
    )


def _trend(days: Sequence[IndexEntry], zone: tzinfo) -> Markup:
    """Return a chart of the days in order; empty for fewer than two."""
    shown = sorted(days, key=lambda e: e.since)[-92:]
    if len(shown) < 2:
        return Markup("")
    series = [
        Series(label, [known_value(e.total, f"gpu_hours_{state}") for e in shown], state) for state, label in STATES
    ]
    words = Words("trend", "Allocated GPU-hours per day", f"{len(shown)} days from {fmt.moment(shown[0].since, zone)}.")
    lengths = [(e.until - e.since).total_seconds() for e in shown]
    return charts.stacked_time(words, [e.since for e in shown], lengths, series, unit="GPU-h", zone=zone)
