"""Mails about the use of GPUs in a period: to a user, to those responsible for an account, to administrators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import polars as pl

from slurm_affinode.analysis import actions
from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.model.cleanup import MailPolicy
from slurm_affinode.report import format as fmt
from slurm_affinode.report import headline
from slurm_affinode.report.mail import COLORS, Digest, Reader, Texts, clock, composed, shown
from slurm_affinode.report.measures import STATES, Row, known_value

MAX_ACTIONS = 5
MAX_JOBS = 5
MAX_USERS = 5
"""With the facts, a mail has at most ``report.mail.MAX_LINES`` lines."""


@dataclass(frozen=True, slots=True)
class UsageScope:
    """The users whose GPU usage a mail reports."""

    kind: Literal["site", "account", "user"]
    name: str = ""
    """The account or user."""


@dataclass(frozen=True, slots=True)
class UsagePeriod:
    """The period of a mail."""

    kind: str
    """``day``, ``week`` or ``month``."""
    label: str


def idle_hours(result: WasteResult, scope: UsageScope) -> float | None:
    """Return the idle GPU-hours of ``scope``; ``None`` if it had no GPUs, or if they are unknown."""
    row = _figures(result, scope)
    return None if row is None else known_value(row, "gpu_hours_idle")


def usage_digest(
    result: WasteResult,
    scope: UsageScope,
    period: UsagePeriod,
    mail: MailPolicy,
    *,
    recipient: str,
    user: str | None,
    can_opt_out: bool = False,
    page: str | None = None,
    now: datetime,
    timezone: str | None = None,
) -> Digest | None:
    """Return the mail about the use of GPUs by ``scope``; ``None`` if it had none.

    ``user``: the recipient, for the language; ``None``: administrators, or an address that is no user's.
    ``can_opt_out``: the mail says how to end these mails. ``page``: address of the page about the scope. Raises
    ``InputError`` if the site's templates or texts are invalid.
    """
    row = _figures(result, scope)
    if row is None:
        return None
    site = None if mail.templates is None else Path(mail.templates)
    texts = Texts(mail.languages.get(user or "", mail.language), site)
    of_scope = _of(result, scope)
    name = texts.say(f"usage_{period.kind}", label=period.label)
    idle, allocated = known_value(row, "gpu_hours_idle"), known_value(row, "gpu_hours_allocated")
    values: dict[str, object] = {
        "period": name,
        "when": texts.say(f"usage_when_{period.kind}", label=period.label),
        "name": shown(scope.name),
        "allocated": fmt.hours(allocated, "GPU-h"),
        "idle": fmt.hours(idle, "GPU-h"),
        "number": fmt.number(idle),
        "jobs": fmt.count(row.get("jobs")),
        "share": fmt.percent(idle / allocated) if idle is not None and allocated else fmt.UNKNOWN,
    }
    measured = "" if idle is not None else "_unknown"
    context: dict[str, Any] = {
        "greeting": texts.say("hello", user=user) if user else texts.say("usage_hello"),
        "subject": texts.say(f"usage_subject_{scope.kind}{measured}", **values),
        "title": name[:1].upper() + name[1:],
        "color": COLORS["told"],
        "says": texts.say(f"usage_says_{scope.kind}{measured}", **values),
        "facts": [(label, _spaced(value)) for label, value in _facts(result, row, scope, texts)],
        "bar": _bar(row, texts),
        "todo": [_spaced(line) for line in _todo(of_scope, scope, texts)],
        "jobs": [_spaced(line) for line in _jobs(of_scope, scope, texts)],
        "users": [(user_name, _spaced(value)) for user_name, value in _users(of_scope, scope)],
        "page": page or "",
        "opt_out": texts.say("usage_opt_out") if can_opt_out else "",
        "footer": texts.say("usage_footer", time=clock(now, timezone)),
    }
    return composed("usage", Reader(recipient, user, mail, texts), context)


def _spaced(text: str) -> str:
    """Return ``text`` with spaces that break lines: mail programs of terminals show others as signs."""
    return text.replace(fmt.NBSP, " ")


def _figures(result: WasteResult, scope: UsageScope) -> Row | None:
    if scope.kind == "site":
        return result.total if known_value(result.total, "gpu_hours_allocated") else None
    rows = result.groups[scope.kind].filter(pl.col("name") == scope.name)
    return None if rows.is_empty() else rows.row(0, named=True)


def _of(result: WasteResult, scope: UsageScope) -> WasteResult:
    """Return the result with the jobs of the scope alone."""
    jobs = result.jobs if scope.kind == "site" else result.jobs.filter(pl.col(scope.kind) == scope.name)
    return replace(result, jobs=jobs)


def _facts(result: WasteResult, row: Row, scope: UsageScope, texts: Texts) -> list[tuple[str, str]]:
    allocated = known_value(row, "gpu_hours_allocated")
    facts = [(texts.say("usage_allocated"), fmt.hours(allocated, "GPU-h"))]
    for state, _ in STATES:
        hours = known_value(row, f"gpu_hours_{state}")
        share = f" ({fmt.percent(hours / allocated)})" if hours is not None and allocated else ""
        facts.append((texts.say(f"usage_{state}"), fmt.hours(hours, "GPU-h") + share))
    if (kwh := known_value(row, "idle_energy_kwh")) is not None:
        kg = None if result.emissions is None else result.emissions.kg(kwh)
        facts.append((texts.say("usage_energy"), fmt.energy(kwh) + ("" if kg is None else f", {fmt.emissions(kg)}")))
    if result.priced and (cost := known_value(row, "idle_cost")) is not None:
        facts.append((texts.say("usage_cost"), fmt.money(cost, result.currency)))
    if scope.kind == "user" and (rank := _rank(result, scope.name)):
        facts.append((texts.say("usage_rank"), texts.say("usage_rank_value", rank=rank[0], users=rank[1])))
    if scope.kind == "site" and (outside := headline.idle_outside(result)) is not None:
        value = f"{fmt.hours(outside[0], 'GPU-h')} ({fmt.percent(outside[1])})"
        facts.append((texts.say("usage_outside"), value))
    if scope.kind == "site" and result.waits is not None:
        waits = result.waits
        value = texts.say("usage_waits_value", waited=fmt.count(waits.waited), jobs=fmt.count(waits.jobs))
        facts.append((texts.say("usage_waits"), value))
    return facts


_BAR = {"busy": "#2f6eb5", "low": "#c4830a", "idle": "#b5320f", "unknown": "#a2abb7"}
"""State -> color, as on pages. Mail programs show cells of a table, and block pictures that are files or drawings."""


def _bar(row: Row, texts: Texts) -> list[tuple[str, float, str]]:
    """Return label, share of the allocated time in percent and color of each state; empty if nothing was measured."""
    allocated, idle = known_value(row, "gpu_hours_allocated"), known_value(row, "gpu_hours_idle")
    if not allocated or idle is None:
        return []
    hours = {state: known_value(row, f"gpu_hours_{state}") or 0.0 for state in _BAR}
    return [
        (texts.say(f"usage_{state}"), round(100 * value / allocated, 1), _BAR[state])
        for state, value in hours.items()
        if value > 0.001 * allocated
    ]


def _rank(result: WasteResult, user: str) -> tuple[int, int] | None:
    """Return the place of the user by idle GPU-hours, 1 for the most, and the number of users with any."""
    users = result.groups["user"].filter((pl.col("gpu_hours_idle") > 0) & pl.col("name").is_not_null())
    own_row = users.filter(pl.col("name") == user)
    if own_row.is_empty():
        return None
    return int((users["gpu_hours_idle"] > own_row["gpu_hours_idle"][0]).sum()) + 1, users.height


def _todo(result: WasteResult, scope: UsageScope, texts: Texts) -> list[str]:
    lines = []
    for action in actions.actions(result, MAX_ACTIONS):
        text = actions.texts()[action.kind]
        jobs = texts.several("usage_runs", action.runs, count=fmt.count(action.runs))
        evidence = headline.evidence(texts.phrase(text.evidence), action, jobs)
        owner = "" if scope.kind == "user" else f"{shown(action.user or fmt.UNKNOWN, 40)}: "
        hours = texts.say("usage_at_least", hours=fmt.hours(action.hours_returned, "GPU-h"))
        if action.hours_moved:
            hours = texts.say("usage_moved", hours=fmt.hours(action.hours_moved, "GPU-h"))
        advice = texts.phrase(text.advice).replace("`", "")
        lines.append(f"{owner}{texts.phrase(text.title)}, {hours}. {evidence}: {advice}.")
    return lines


def _jobs(result: WasteResult, scope: UsageScope, texts: Texts) -> list[str]:
    if scope.kind == "site":
        return []
    lines = []
    for row in result.jobs.filter(pl.col("gpu_hours_idle") > 0).head(MAX_JOBS).iter_rows(named=True):
        job = str(row["job_id"])
        if row["array_job_id"] is not None and row["array_task_id"] is not None:
            job = f"{row['array_job_id']}_{row['array_task_id']}"
        hours = texts.say(
            "usage_idle_of", number=fmt.number(row["gpu_hours_idle"]),
            allocated=fmt.hours(row["gpu_hours_allocated"], "GPU-h"),
        )  # fmt: skip
        lines.append(f"slurm-affinode job {job}: {hours}")
    return lines


def _users(result: WasteResult, scope: UsageScope) -> list[tuple[str, str]]:
    """Return the users with the most idle hours, for those who are responsible for them."""
    if scope.kind == "user":
        return []
    idle = (
        result.jobs.group_by("user", maintain_order=True)
        .agg(pl.col("gpu_hours_idle").sum(), pl.col("gpu_hours_allocated").sum())
        .filter(pl.col("gpu_hours_idle") > 0)
        .sort("gpu_hours_idle", descending=True, maintain_order=True)
    )
    return [(shown(row["user"] or fmt.UNKNOWN, 40), _share(row)) for row in idle.head(MAX_USERS).iter_rows(named=True)]


def _share(row: Mapping[str, Any]) -> str:
    idle, allocated = row["gpu_hours_idle"], row["gpu_hours_allocated"]
    return f"{fmt.hours(idle, 'GPU-h')} ({fmt.percent(idle / allocated)})"
