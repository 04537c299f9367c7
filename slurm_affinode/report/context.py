"""What the report template is given: frozen, typed, every text ready to be shown. The template computes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup


@dataclass(frozen=True, slots=True)
class Card:
    """One figure of the headline."""

    label: str
    value: str
    unit: str = ""
    sub: str = ""
    help: str | None = None
    kind: str = ""
    """``busy``, ``low``, ``idle``, ``unknown`` for the mark of that state; empty for none."""
    unknown: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. ``kind``: ``text``, ``short`` (not broken), ``number`` or ``picture``."""

    label: str
    kind: str = "text"
    unit: str = ""
    title: str = ""
    sorted: str = ""
    """``descending`` where the rows come in that order of this column."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell: a text, or a picture. ``sort`` is the value that the table sorts by; ``name`` isolates its direction."""

    text: str = ""
    kind: str = ""
    sort: str | None = None
    title: str = ""
    picture: Markup | None = None
    sub: str = ""
    name: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first cell of each row is its heading."""

    key: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    sortable: bool = True
    filterable: bool = False
    note: str = ""
    bare: bool = False
    """The caption is only for screen readers, since a heading above the table says the same."""


@dataclass(frozen=True, slots=True)
class Group:
    """A table of users, accounts, ... with its heading."""

    key: str
    title: str
    lead: str
    table: Table | None
    """``None`` where there is nothing to list; ``lead`` says why."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A term and what holds for it."""

    term: str
    text: str


@dataclass(frozen=True, slots=True)
class Issue:
    """Something that makes the figures less certain."""

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
    """The headline as a sentence: ``before``, the part that stands out, ``after``."""

    before: str
    strong: str
    after: str


@dataclass(frozen=True, slots=True)
class GivenBack:
    """What suspensions gave back."""

    lead: str
    cards: tuple[Card, ...]
    table: Table | None


@dataclass(frozen=True, slots=True)
class ReportContext:
    """The whole report."""

    title: str
    interval: str
    scope: str
    """What was filtered, in words; empty where everything is in."""
    caution: str
    """Where accounting ends before the interval; empty where it does not."""
    answer: Answer
    findings: tuple[str, ...]
    split: Markup
    cards: tuple[Card, ...]
    money_note: str
    over_time: Markup
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
    given_back: GivenBack | None
    """``None`` where no job was suspended, or none was looked for: then there is no such section."""
    quality_facts: tuple[Fact, ...]
    mapping: Markup
    issues: tuple[Issue, ...]
    rules: tuple[Section, ...]
    definitions: tuple[Definition, ...]
    settings: tuple[Fact, ...]
