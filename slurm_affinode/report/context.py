"""Context of the report template: frozen, typed, with all texts formatted. The template computes nothing.

The rows of tables come as HTML: a template takes several times as long for a thousand of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from markupsafe import Markup, escape


@dataclass(frozen=True, slots=True)
class Card:
    """One figure of the headline."""

    label: str
    value: str
    unit: str = ""
    sub: str = ""
    help: str | None = None
    kind: str = ""
    """``busy``, ``low``, ``idle`` or ``unknown`` for the marker of that state; empty: no marker."""
    unknown: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. ``kind``: ``text``, ``short`` (no line breaks), ``number`` or ``picture``."""

    label: str
    kind: str = "text"
    unit: str = ""
    title: str = ""
    sorted: str = ""
    """``descending`` if the rows are sorted by this column in that order."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell with text or a picture. ``sort`` is the sort key; ``name`` isolates the direction of the text."""

    text: str = ""
    kind: str = ""
    sort: str | None = None
    title: str = ""
    picture: Markup | None = None
    sub: str = ""
    name: bool = False
    href: str = ""
    """A page that the text links to."""
    anchor: str = ""
    """ID of the row, for links to it; only in its first cell."""
    fields: str = ""
    """Fields of the map of GPUs that the row belongs to, as in ``0-7 12``; only in its first cell."""
    items: tuple[str, ...] = ()
    """Lines shown as a list in place of the text."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first cell of each row is the row heading."""

    key: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    sortable: bool = True
    filterable: bool = False
    note: str = ""
    bare: bool = False
    """The caption is only for screen readers, since a heading above the table has the same text."""

    @property
    def body(self) -> Markup:
        """The HTML of the rows."""
        return Markup("".join(map(row_html, self.rows)))  # noqa: S704 - texts are escaped there


def row_html(row: Sequence[Cell]) -> str:
    """Return the HTML of a row of a table, with a line break at its end. The first cell is its heading."""
    anchor = _attribute("id", row[0].anchor or None) + _attribute("data-g", row[0].fields or None) if row else ""
    return f"<tr{anchor}>{''.join(_cell(cell, heading=index == 0) for index, cell in enumerate(row))}</tr>\n"


def _cell(cell: Cell, *, heading: bool) -> str:
    start = _start(cell.kind, heading=heading)
    attributes = _attribute("data-v", cell.sort) + _attribute("title", cell.title or None)
    if cell.picture is not None:
        content = f"{cell.picture}"  # plain text: Markup would escape the tags added to it
    else:
        content = f"<bdi>{escape(cell.text)}</bdi>" if cell.name else f"{escape(cell.text)}"
        if cell.href:
            content = f"<a{_attribute('href', cell.href)}>{content}</a>"
    if cell.items:
        content += f'<ul class="lines">{"".join(f"<li>{escape(item)}</li>" for item in cell.items)}</ul>'
    if cell.sub:
        content += f"<small>{escape(cell.sub)}</small>"
    return f"{start}{attributes}>{content}</{'th' if heading else 'td'}>"


@cache
def _start(kind: str, *, heading: bool) -> str:
    return ('<th scope="row"' if heading else "<td") + _attribute("class", kind or None)


def _attribute(name: str, value: str | None) -> str:
    return f' {name}="{escape(value)}"' if value is not None else ""


@dataclass(frozen=True, slots=True)
class Group:
    """A table of users, accounts, ... with its heading."""

    key: str
    title: str
    lead: str
    table: Table | None
    """``None`` if there is nothing to list; ``lead`` gives the reason."""


@dataclass(frozen=True, slots=True)
class PublishedShare:
    """A published idle share of another cluster."""

    cluster: str
    share: str
    source: str


@dataclass(frozen=True, slots=True)
class Fact:
    """A term and its value."""

    term: str
    text: str


@dataclass(frozen=True, slots=True)
class Issue:
    """A problem with data quality that makes the figures less certain."""

    code: str
    title: str
    amount: str
    detail: str
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Definition:
    """The definition of one figure."""

    key: str
    name: str
    unit: str
    help: str
    formula: str
    source: str


@dataclass(frozen=True, slots=True)
class Section:
    """A rule of the method, as prose."""

    title: str
    text: Markup


@dataclass(frozen=True, slots=True)
class Answer:
    """The headline as a sentence: ``before``, the emphasized part ``strong``, ``after``."""

    before: str
    strong: str
    after: str


@dataclass(frozen=True, slots=True)
class ActionCard:
    """Actions of one owner, and the GPU-hours that they would have returned or moved."""

    user: str
    scope: str
    """The cluster, if the report has several; else empty."""
    title: str
    hours: str
    """GPU-hours that following it would have returned at least, or moved to smaller GPUs, in words."""
    evidence: str
    advice: Markup
    command: str
    """Shows the run with most hours."""
    href: str = ""
    """Page of the user, if there is one."""
    job_href: str = ""
    """Page of that run, if there is one."""


@dataclass(frozen=True, slots=True)
class TrendSection:
    """This period and earlier ones."""

    lead: str
    chart: Markup
    table: Table


@dataclass(frozen=True, slots=True)
class UnmetSection:
    """GPU-hours that jobs waited for while GPUs idled."""

    lead: str
    partitions: Table
    models: Table | None
    """``None`` if nothing was measured, or no hours are unmet; so is ``holders``."""
    holders: Table | None


@dataclass(frozen=True, slots=True)
class GivenBack:
    """GPU-hours and memory freed by suspensions."""

    lead: str
    cards: tuple[Card, ...]
    table: Table | None


@dataclass(frozen=True, slots=True)
class ModelServers:
    """Inference engines and their diagnoses."""

    lead: str
    note: str
    """Origin of the samples if they are not the site's own; else empty."""
    engines: Table
    diagnoses: Table | None
    """Diagnoses by kind; ``None`` if there is no problem."""
    doubt: str
    """A remark on a diagnosis of the table; empty if there is none."""


@dataclass(frozen=True, slots=True)
class ReplayNote:
    """The result of a what-if for the same interval, for the summary of the report."""

    answer: str
    assumption: str
    href: str
    """Its page, from the report."""


@dataclass(frozen=True, slots=True)
class ReportContext:
    """The whole report."""

    title: str
    interval: str
    scope: str
    """The filters in words; empty if there are none."""
    caution: str
    """Warning if accounting ends before the end of the interval; else empty."""
    answer: Answer
    consequences: str
    replay: ReplayNote | None
    """Sentences below the answer; empty if nothing is known."""
    findings: tuple[str, ...]
    split: Markup
    cards: tuple[Card, ...]
    money_note: str
    published_shares: tuple[PublishedShare, ...]
    """Empty if no idle time was measured."""
    action_cards: tuple[ActionCard, ...]
    """Actions, most hours first."""
    advice_help: tuple[tuple[str, str], ...]
    """Title of a cause, and what its hours are."""
    trend: TrendSection | None
    """``None`` omits the section: no earlier period is known."""
    working_hours: str
    """Idle time inside and outside of working hours; empty if it is unknown."""
    over_time: Markup
    week_map: Markup
    gpu_map: Markup
    partitions: Markup
    models: Markup
    state_legend: Markup
    groups: tuple[Group, ...]
    worst: Table | None
    worst_note: str
    scatter: Markup
    idle_share: Markup
    windows: Markup
    jobs: Table | None
    unmet: UnmetSection | None
    """``None`` omits the section: no job is known to have waited."""
    given_back: GivenBack | None
    """``None`` omits the section: no job was suspended, or suspensions were not evaluated."""
    servers: ModelServers | None
    """``None`` omits the section: there are no samples of engines."""
    quality_facts: tuple[Fact, ...]
    mapping: Markup
    issues: tuple[Issue, ...]
    rules: tuple[Section, ...]
    definitions: tuple[Definition, ...]
    settings: tuple[Fact, ...]
