"""The page of one user or account: own jobs, own trend, what to do, own place. All names are escaped.

It is made of a part of a result (``analysis.portions``), so that nothing of others can be on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from slurm_affinode.analysis import actions
from slurm_affinode.analysis.portions import Rank
from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.base.text import visible
from slurm_affinode.report import format as fmt
from slurm_affinode.report import headline, tables, trend_section
from slurm_affinode.report.charts import Series, legend_list
from slurm_affinode.report.context import ActionCard, Answer, Card, Group, Table, TrendSection
from slurm_affinode.report.links import NO_LINKS, Links
from slurm_affinode.report.measures import STATES, idle_share, known_value
from slurm_affinode.report.render import page as render_page

JOB_ROWS = 200
"""Rows of the table of jobs; all of them are in a CSV file."""
_WORST = 10
_USERS = 50
KINDS = {"day": "Day", "week": "Week", "month": "Month"}


@dataclass(frozen=True, slots=True)
class PeriodLink:
    """An entry of the switcher of periods."""

    label: str
    href: str
    current: bool


@dataclass(frozen=True, slots=True)
class UsageContext:
    """Context of ``usage.html.j2``."""

    caution: str
    """Warning if accounting ends before the end of the interval; else empty."""
    interval: str
    periods: tuple[PeriodLink, ...]
    answer: Answer
    split: Markup
    cards: tuple[Card, ...]
    findings: tuple[str, ...]
    action_cards: tuple[ActionCard, ...]
    advice_help: tuple[tuple[str, str], ...]
    trend: TrendSection | None
    legend: Markup
    users: Group | None
    """The users of an account; ``None`` on the page of a user."""
    worst: Table | None
    jobs: Table | None


@dataclass(frozen=True, slots=True)
class UsagePage:
    """The user or account and the period of a page."""

    by: str
    """``user`` or ``account``."""
    name: str
    kind: str
    """``day``, ``week`` or ``month``."""
    label: str
    """``2026-11-20``, ``2026-W47``, ``2026-11``."""
    kinds: tuple[str, ...]
    """Periods with a page in the same directory, named ``KIND.html``."""


def render(
    part: WasteResult, about: UsagePage, *, rank: Rank | None = None, csv_name: str | None = None,
    links: Links = NO_LINKS,
) -> str:  # fmt: skip
    """Return the HTML of the page. ``csv_name``: the file with all jobs, if one is written next to it."""
    query = part.query
    span = fmt.duration((query.until - query.since).total_seconds())
    context = UsageContext(
        caution=headline.sentence(visible(part.accounting_note)),
        interval=f"{fmt.moment(query.since, query.zone)} to {fmt.moment(query.until, query.zone)} ({span})",
        periods=tuple(
            PeriodLink(label, f"{kind}.html", kind == about.kind)
            for kind, label in KINDS.items()
            if kind in about.kinds
        ),
        answer=headline.answer(part),
        split=headline.split(part) if known_value(part.total, "gpu_hours_allocated") else Markup(),
        cards=headline.cards(part) if known_value(part.total, "gpu_hours_allocated") else (),
        findings=_findings(part, about.by, rank),
        action_cards=headline.action_cards(part, links),
        advice_help=tuple((text.title, text.returned) for text in actions.texts().values()),
        trend=trend_section.section(part),
        legend=legend_list([Series(label, [], state) for state, label in STATES]),
        users=tables.group(part, "user", _USERS) if about.by == "account" else None,
        worst=tables.worst(part, _WORST, links) if not part.timelines.is_empty() else None,
        jobs=tables.all_jobs(part, JOB_ROWS, csv_name, links),
    )
    whose = f"account {visible(about.name)}" if about.by == "account" else visible(about.name)
    title = f"GPU use of {whose}, {about.kind} {about.label}"
    return render_page("usage.html.j2", title=title, generated=part.generated, zone=query.zone, u=context)


def _findings(part: WasteResult, by: str, rank: Rank | None) -> tuple[str, ...]:
    cards = []
    share = idle_share(part.total)
    if rank is not None:
        cards.append(
            f"Place {fmt.count(rank.place)} of {fmt.count(rank.count)} {by}s by idle GPU-hours; place 1 has most."
        )
        if rank.median_share is not None and share is not None:
            cards.append(
                f"The idle share is {fmt.percent(share)} of the allocated GPU-hours; "
                f"the median of all {by}s is {fmt.percent(rank.median_share)}."
            )
    held_gib_hours, idle_held = known_value(part.total, "mem_gib_h"), known_value(part.total, "idle_mem_gib_h")
    if held_gib_hours and idle_held:
        cards.append(
            f"{fmt.percent(idle_held / held_gib_hours)} of the GPU memory-time was held while the GPU was idle."
        )
    longest = known_value(part.total, "longest_idle_s")
    if longest:
        cards.append(f"The longest idle time of one GPU within one job: {fmt.duration(longest)}.")
    return tuple(cards)
