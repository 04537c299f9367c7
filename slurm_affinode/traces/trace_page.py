"""The page of a trace: headline, cards, findings with charts, published statements, method, what is not in the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, tzinfo

from markupsafe import Markup

from slurm_affinode.report import render
from slurm_affinode.report.context import Card, Cell, Column, Table
from slurm_affinode.report.format import number, quantity
from slurm_affinode.traces import claims as published
from slurm_affinode.traces.claims import Claim

VERDICTS = {
    published.BORNE_OUT: "✓ Borne out",
    published.OTHER_RECIPE: "✗ Not borne out",
    published.NOT_BORNE_OUT: "✗ Not borne out",
    published.UNKNOWN: "? Unknown",
}

BORNE_OUT_RECIPE = ("Borne out", "The figure, rounded to the digits that were published, is the published number.")


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """A published statement as shown on the page."""

    text: str
    verdict: str
    detail: str
    source: str


@dataclass(frozen=True, slots=True)
class TraceFinding:
    """One section of the page."""

    key: str
    title: str
    sentences: tuple[str, ...]
    charts: tuple[Markup, ...] = ()
    claims: tuple[ClaimRow, ...] = ()
    paired: bool = False
    """Whether two charts are placed side by side, if each is narrow enough."""
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True, slots=True)
class TracePage:
    """Context of the template."""

    answer: str
    lead: str
    cards: tuple[Card, ...]
    findings: tuple[TraceFinding, ...]
    verdict_counts: str
    notes: tuple[str, ...]
    recipes: tuple[tuple[str, str], ...]
    sources: tuple[str, ...]
    absent: tuple[str, ...] = ()
    """Facts that the data does not contain."""


def html(title: str, page: TracePage, zone: tzinfo = UTC) -> str:
    """Return the self-contained page."""
    return render.page("trace.html.j2", title=title, zone=zone, trace=page)


def card(label: str, text: str, sub: str = "", *, is_known: bool, kind: str = "", more: str | None = None) -> Card:
    """Return a card; its explanation is left out if the figure is unknown."""
    return Card(label=label, value=text, sub=sub if is_known else "", help=more, kind=kind, unknown=not is_known)


def claim_row(claim: Claim) -> ClaimRow:
    """Return a statement with its verdict and the reason in words."""
    figure = claim_figure(claim.computed, claim)
    missing = claim.reason or "The required table is missing."
    detail = f"The data says {figure}." if claim.computed is not None else missing
    if claim.note and claim.computed is not None:
        detail += f" {claim.note}"
    if claim.verdict == published.OTHER_RECIPE:
        detail += f" {claim_figure(claim.other_computed, claim)} comes out by {claim.other_recipe}."
    return ClaimRow(claim.text, VERDICTS[claim.verdict], detail, claim.source)


def claim_figure(value: float | None, claim: Claim) -> str:
    """Format a figure of the data with the digits of the published one."""
    # one digit more than published shows on which side of the rounding the figure lies
    exact = value is not None and round(value, claim.decimals) == value
    digits = claim.decimals if exact else claim.decimals + 1
    return quantity(value, claim.unit, digits)


def _published(claim: Claim) -> str:
    if claim.published_to is None:
        return quantity(claim.published, claim.unit, claim.decimals)
    return f"{number(claim.published, digits=claim.decimals)} to " + quantity(
        claim.published_to, claim.unit, claim.decimals
    )


def claims_finding(claims: Sequence[Claim]) -> tuple[TraceFinding, ...]:
    """Return the section with the table of all published statements; empty without any."""
    if not claims:
        return ()
    rows = tuple(
        (
            Cell(claim.text, sub=claim.source),
            Cell(_published(claim), "number"),
            Cell(claim_figure(claim.computed, claim), "number"),
            Cell(VERDICTS[claim.verdict], "short"),
            Cell(claim.reason or claim.note or ""),
        )
        for claim in claims
    )
    columns = (
        Column("Statement"), Column("Published", "number"), Column("The data", "number"), Column("Verdict", "short"),
        Column("Why"),
    )  # fmt: skip
    table = Table("claims", "Published statements compared with the data", columns, rows, sortable=False)
    return (TraceFinding("published", "Published figures", (verdict_counts(claims),), tables=(table,)),)


def verdict_counts(claims: Sequence[Claim]) -> str:
    """Return how many of the statements the data bears out, as a sentence; empty without any."""
    if not claims:
        return ""
    judged = [c for c in claims if c.verdict != published.UNKNOWN]
    borne = sum(c.verdict == published.BORNE_OUT for c in judged)
    text = f"{borne} of {len(judged)} published statements about the trace are borne out by it."
    unknown = len(claims) - len(judged)
    return text + (f" {unknown} cannot be verified, because their data is missing or contradictory." if unknown else "")


def recipes(claims: Sequence[Claim]) -> tuple[tuple[str, str], ...]:
    """Return the definition of the verdicts; empty without statements."""
    return (BORNE_OUT_RECIPE,) if claims else ()


def sources(claims: Sequence[Claim]) -> tuple[str, ...]:
    """Return the sources of the statements, each once."""
    return tuple(dict.fromkeys(claim.source for claim in claims))


def numbers(key: str, caption: str, head: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Table:
    """Return a table of figures by the name of the row."""
    return Table(
        key,
        caption,
        (Column(head[0]), *(Column(title, "number") for title in head[1:])),
        tuple((Cell(name, name=True), *(Cell(text, "number") for text in cells)) for name, cells in rows.items()),
        sortable=False,
    )
