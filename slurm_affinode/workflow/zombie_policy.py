"""The policy of a site: read, explained, and replayed over the past."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from slurm_affinode.config import Config, policy_path, read_small
from slurm_affinode.core.cleanup_plan import plan
from slurm_affinode.core.cleanup_policy import PolicyFault, parse_policy, read_policy
from slurm_affinode.core.policy_values import zone_of
from slurm_affinode.core.spans import span
from slurm_affinode.errors import InputError
from slurm_affinode.model.cleanup import NEVER, SCOPES, Action, Ledger, Match, Policy, SentWarning, Settings, Stages
from slurm_affinode.model.finding import IDLE_KINDS, USER_KINDS, Finding
from slurm_affinode.resources import asset_dir
from slurm_affinode.slurm import hostlist
from slurm_affinode.timespec import parse_span_s

LATE_S = 86400.0
"""So much later than a stage is due a run may come, and still see since when a GPU is idle."""


def policy_file(config: Config, asked: Path | None = None) -> tuple[Path, str]:
    """The file that holds and how it is called: asked for, the site's where it is there, else ours.

    One that the site names counts though it cannot be read: what it forbids must not be done by ours.
    """
    if asked is not None:
        return asked, str(asked)
    site = policy_path(config)
    if config.zombies.policy is not None or os.path.lexists(site):
        return site, str(site)
    return asset_dir("reports") / "zombies-policy.toml", "built-in policy"


def load(config: Config, asked: Path | None = None) -> Policy:
    """The policy. Raises ``InputError`` with file and line."""
    path, name = policy_file(config, asked)
    return parse_policy(_text(path), where=name, expand=_expand)


def examine(config: Config, asked: Path | None = None) -> tuple[Policy, tuple[PolicyFault, ...]]:
    """The policy and everything that is wrong with it. Raises ``InputError`` where it cannot be read."""
    path, name = policy_file(config, asked)
    return read_policy(_text(path), where=name, expand=_expand)


def _expand(text: str) -> tuple[str, ...]:
    try:
        return tuple(hostlist.expand(text))
    except ValueError as error:
        raise InputError(str(error)) from None


def _text(path: Path) -> str:
    try:
        return read_small(path).decode("utf-8")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8 text", where=str(path)) from error


def reaching(config: Config, policy: Policy) -> Config:
    """The configuration, looking so far back that every stage of the policy can be reached.

    What is idle for longer than the history is looked at is seen to be idle for as long as that, and no longer.
    """
    every = [one for settings in _all(policy) for one in (settings.fixed, settings.sliding)]
    spans = [one for stages in every for one in (*stages.warnings, stages.cancel_s) if one is not None]
    extra_s = max(settings.interactive.extra_s for settings in _all(policy))
    needed_s = max(spans, default=0.0) + extra_s + LATE_S if spans else 0.0
    if needed_s <= parse_span_s(config.zombies.look_back):
        return config
    return replace(config, zombies=replace(config.zombies, look_back=f"{math.ceil(needed_s)}s"))


# --- in words


def explain(policy: Policy, now: datetime) -> list[str]:
    """What a policy says, a sentence a line."""
    lines = ["Where no rule says otherwise: " + _settings(policy.default)]
    lines += [f"{rule.name} (line {rule.line}): {_match(rule.match)}: {_settings(rule.settings, rule.sets)}"
              for rule in policy.rules]  # fmt: skip
    if not any(stages.cancel_s for settings in _all(policy) for stages in (settings.fixed, settings.sliding)):
        lines += [f"{rule.name} (line {rule.line}) never cancels: nothing says when (cancel, in fixed or sliding)."
                  for rule in policy.rules if rule.settings.action == "cancel"]  # fmt: skip
    today = now.astimezone(zone_of(policy.calendar.timezone)).date()
    for one in policy.exemptions:
        over = "" if one.until >= today else " (OVER: it counts for nothing)"
        until = "for good" if one.until == NEVER else f"until {one.until.isoformat()}"
        what = "exempt from more than warnings" if one.warnings else "exempt"
        lines.append(f"line {one.line}: {_match(one.match)}: {what} {until}{over}: {one.reason}")
    most = policy.limits
    lines.append(
        f"The most of one run: cancel {most.cancel}, suspend {most.suspend}, kill {most.kill}, drain {most.drain}, "
        f"resume {most.resume}, mails {most.mails}."
    )
    lines.append(
        f"Evidence older than {span(policy.max_evidence_age_s)} is no ground; a job is cancelled only where "
        f"{policy.min_dimensions} measurements agree."
    )
    keep = policy.keep
    lines.append(f"Owners may postpone once, for at most {span(keep.max_s)}." if keep.allow
                 else "Owners may not postpone.")  # fmt: skip
    lines.append("Nobody can be told: mail.via is none." if policy.mail.via == "none"
                 else f"People are told by {policy.mail.via}.")  # fmt: skip
    return lines


def _all(policy: Policy) -> Iterable[Settings]:
    return (policy.default, *(rule.settings for rule in policy.rules))


def _match(match: Match) -> str:
    words = [f"{name} {', '.join(getattr(match, name))}" for name in ("kinds", *SCOPES, "jobs") if getattr(match, name)]
    return "; ".join(words) or "everything"


def _settings(settings: Settings, sets: Iterable[str] | None = None) -> str:
    given = frozenset(sets) if sets is not None else None
    words: list[str] = [] if given is not None and "action" not in given else [settings.action]
    for name, text in (("fixed", "never used"), ("sliding", "idle")):
        stages = getattr(settings, name)
        if stages != Stages():
            words.append(f"{text}: {_stages(stages)}")
    plain = Settings()
    for name in Settings.__slots__:
        value = getattr(settings, name)
        key = name.removesuffix("_s")
        if name in ("action", "fixed", "sliding") or (
            key not in given if given is not None else value == getattr(plain, name)
        ):
            continue
        if name == "interactive":
            most = "none left alone" if value.max_run_s is None else (
                f"up to {span(value.max_run_s)} and {value.max_gpus} GPU{'s' if value.max_gpus != 1 else ''} left alone"
            )  # fmt: skip
            words.append(f"interactive: {most}, others {span(value.extra_s)} more")
            continue
        words.append(f"{key} {span(value) if name.endswith('_s') else value}")
    return "; ".join(words)


def _stages(stages: Stages) -> str:
    parts = [("warned after", stages.first_warning_s), ("again after", stages.second_warning_s),
             ("cancelled after", stages.cancel_s)]  # fmt: skip
    return ", ".join(f"{word} {span(value)}" for word, value in parts if value is not None)


# --- over the past


@dataclass(frozen=True, slots=True)
class Episode:
    """A finding that lasted: as it was when it was seen last."""

    finding: Finding
    until: datetime


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a policy would have done at a time."""

    at: datetime
    action: Action


def episodes(looks: Iterable[Sequence[Finding]]) -> list[Episode]:
    """Findings of several looks, one after the other, put together by what they are about and since when.

    A job that ran, and was found again when it had ended, is two matters: what was due while it ran counts.
    """
    found: dict[tuple[str, datetime | None, bool], Episode] = {}
    for look in looks:
        for finding in look:
            end = None if finding.job is None else finding.job.end
            # What has ended, and what a user did over a period, is told by a run of the timer that comes later.
            over = finding.observed_at if finding.kind in USER_KINDS else end
            until = finding.observed_at if over is None else over + timedelta(days=1)
            which = (finding.key, finding.since, end is not None)
            if finding.kind in USER_KINDS and which in found:
                finding = found[which].finding  # noqa: PLW2901 - as it was seen first
            found[which] = Episode(finding, until)
            if end is not None and finding.kind in IDLE_KINDS:
                ran = _while_it_ran(finding, end)
                found[ran.key, ran.since, False] = Episode(ran, end)
    return list(found.values())


def _while_it_ran(finding: Finding, end: datetime) -> Finding:
    """A job that was idle to its end as it was found before that, whether a look fell into that time or not."""
    job = finding.job
    return finding if job is None else replace(
        finding, subject=replace(job, state="RUNNING", end=None), observed_at=end
    )  # fmt: skip


def _begins(finding: Finding, since: datetime) -> datetime:
    """When it can be found at the earliest: what has ended not before its end."""
    if finding.kind in USER_KINDS:
        return finding.observed_at  # what a user did over a period is known when the period is over
    end = None if finding.job is None else finding.job.end
    return end if end is not None else finding.since or since


def _about(finding: Finding) -> str:
    """What there is one finding of at a time: what a job's idle GPUs amount to changes, and so does their kind."""
    if finding.kind in IDLE_KINDS and finding.job is not None:
        return f"{finding.cluster}/{finding.key.split('/', 2)[2]}"
    return finding.key


def _there(past: Iterable[Episode], since: datetime, moment: datetime) -> Iterable[Finding]:
    """What is found at a time: of each matter what the next look at it saw. Where each look reaches back less far
    than the job, the same idle time begins later in each of them."""
    found: dict[str, Episode] = {}
    for one in past:
        about = _about(one.finding)
        if _begins(one.finding, since) <= moment <= one.until and (
            about not in found or one.until < found[about].until
        ):
            found[about] = one
    return [one.finding for one in found.values()]


def replay(
    past: Sequence[Episode], policy: Policy, since: datetime, until: datetime, every: timedelta
) -> list[Replayed]:  # fmt: skip
    """What runs at each ``every`` would have done, the limits of each run included. Nobody postpones, nothing fails."""
    done: list[Replayed] = []
    warnings: dict[str, tuple[SentWarning, ...]] = {}
    told: dict[str, datetime] = {}
    over: set[str] = set()
    # From the first sight on, so that what was idle before the interval has had its warnings.
    moment = since
    while moment <= until:
        there = [replace(one, observed_at=moment) for one in _there(past, since, moment) if _about(one) not in over]
        for action in plan(there, policy, Ledger(warnings, {}, told), moment):
            key = action.finding.key
            if action.verb == "none":
                if action.code == "limit":
                    done.append(Replayed(moment, action))
                continue
            done.append(Replayed(moment, action))
            if action.number:
                warnings[key] = (*warnings.get(key, ()), SentWarning(key, action.number, moment))
            elif action.verb.startswith("warn"):
                told[action.finding.matter] = moment
            else:
                over.add(_about(action.finding))
        moment += every
    return done
