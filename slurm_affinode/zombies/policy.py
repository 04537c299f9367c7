"""The clean-up policy of a site: load it, describe it in words, and replay it over stored findings."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from slurm_affinode.base.config import Config, policy_path, read_small
from slurm_affinode.base.errors import InputError
from slurm_affinode.base.resources import asset_dir
from slurm_affinode.base.text import counted, span
from slurm_affinode.base.times import parse_span_s
from slurm_affinode.base.toml_lines import TomlFault
from slurm_affinode.core.cleanup_plan import plan
from slurm_affinode.core.cleanup_policy import parse_policy, read_policy
from slurm_affinode.core.policy_values import zone_of
from slurm_affinode.model.cleanup import NEVER, SCOPES, Action, Ledger, Match, Policy, SentWarning, Settings, Stages
from slurm_affinode.model.finding import IDLE_KINDS, USER_KINDS, Finding
from slurm_affinode.slurm import hostlist

LATE_S = 86400.0
"""Maximum delay of a run after a stage is due for which the start of the idle time is still visible."""


def policy_file(config: Config, path_given: Path | None = None) -> tuple[Path, str]:
    """Return the effective policy file and its display name: the requested one, the site's, or the built-in one.

    A file that the site configured is used even if it cannot be read: the built-in policy may allow what it forbids.
    """
    if path_given is not None:
        return path_given, str(path_given)
    site = policy_path(config)
    if config.zombies.policy is not None or os.path.lexists(site):
        return site, str(site)
    return asset_dir("reports") / "zombies-policy.toml", "built-in policy"


def load(config: Config, path_given: Path | None = None) -> Policy:
    """Load the policy. Raises ``InputError`` with file and line."""
    path, name = policy_file(config, path_given)
    return parse_policy(_text(path), where=name, expand=_expand)


def examine(config: Config, path_given: Path | None = None) -> tuple[Policy, tuple[TomlFault, ...]]:
    """Return the policy and all of its faults. Raises ``InputError`` if the file cannot be read."""
    path, name = policy_file(config, path_given)
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
    """Return the configuration with a look-back long enough for every stage of the policy.

    Idle time beyond the look-back is not seen.
    """
    every = [stages for settings in _all_settings(policy) for stages in (settings.fixed, settings.sliding)]
    spans = [seconds for stages in every for seconds in (*stages.warnings, stages.cancel_s) if seconds is not None]
    extra_s = max(settings.interactive.extra_s for settings in _all_settings(policy))
    needed_s = max(spans, default=0.0) + extra_s + LATE_S if spans else 0.0
    if needed_s <= parse_span_s(config.zombies.look_back):
        return config
    return replace(config, zombies=replace(config.zombies, look_back=f"{math.ceil(needed_s)}s"))


# --- in words


def explain(policy: Policy, now: datetime) -> list[str]:
    """Describe a policy, one sentence per line."""
    lines = ["Default: " + _settings(policy.default)]
    lines += [f"{rule.name} (line {rule.line}): {_match(rule.match)}: {_settings(rule.settings, rule.sets)}"
              for rule in policy.rules]  # fmt: skip
    if not any(stages.cancel_s for settings in _all_settings(policy) for stages in (settings.fixed, settings.sliding)):
        lines += [f"{rule.name} (line {rule.line}) never cancels: set cancel in fixed or sliding."
                  for rule in policy.rules if rule.settings.action == "cancel"]  # fmt: skip
    today = now.astimezone(zone_of(policy.calendar.timezone)).date()
    for exemption in policy.exemptions:
        over = "" if exemption.until >= today else " (EXPIRED: it has no effect)"
        until = "for good" if exemption.until == NEVER else f"until {exemption.until.isoformat()}"
        what = "exempt from more than warnings" if exemption.warnings else "exempt"
        lines.append(f"line {exemption.line}: {_match(exemption.match)}: {what} {until}{over}: {exemption.reason}")
    most = policy.limits
    lines.append(
        f"Limits of a run: cancel {most.cancel}, suspend {most.suspend}, kill {most.kill}, drain {most.drain}, "
        f"resume {most.resume}, mails {most.mails}."
    )
    lines.append(
        f"Evidence older than {span(policy.max_evidence_age_s)} is not used; a job is canceled only if at "
        f"least {policy.min_dimensions} measurements agree."
    )
    keep = policy.keep
    lines.append(f"Owners may exempt an attempt of a job once, for at most {span(keep.max_s)}." if keep.allow
                 else "Owners may not exempt jobs.")  # fmt: skip
    lines.append("Mail is disabled: mail.via is none." if policy.mail.via == "none"
                 else f"Mails are sent by {policy.mail.via}.")  # fmt: skip
    return lines


def _all_settings(policy: Policy) -> Iterable[Settings]:
    return (policy.default, *(rule.settings for rule in policy.rules))


def _match(match: Match) -> str:
    words = [
        f"{name} {', '.join(getattr(match, name))}"
        for name in ("kinds", "diagnoses", *SCOPES, "jobs")
        if getattr(match, name)
    ]
    return "; ".join(words) or "everything"


def _settings(settings: Settings, sets: Iterable[str] | None = None) -> str:
    explicit = frozenset(sets) if sets is not None else None
    words: list[str] = [] if explicit is not None and "action" not in explicit else [settings.action]
    for name, text in (("fixed", "never used"), ("sliding", "idle")):
        stages = getattr(settings, name)
        if stages != Stages():
            words.append(f"{text}: {_stages(stages)}")
    plain = Settings()
    for name in Settings.__slots__:
        value = getattr(settings, name)
        key = name.removesuffix("_s")
        if name in ("action", "fixed", "sliding") or (
            key not in explicit if explicit is not None else value == getattr(plain, name)
        ):
            continue
        if name == "interactive":
            most = "none exempt" if value.max_run_s is None else (
                f"up to {span(value.max_run_s)} and {counted(value.max_gpus, 'GPU')} exempt"
            )  # fmt: skip
            words.append(f"interactive: {most}, others get {span(value.extra_s)} more")
            continue
        text = span(value) if name.endswith("_s") else str(value).lower() if isinstance(value, bool) else value
        words.append(f"{key} {text}")
    return "; ".join(words)


def _stages(stages: Stages) -> str:
    parts = [("warned after", stages.first_warning_s), ("again after", stages.second_warning_s),
             ("canceled after", stages.cancel_s)]  # fmt: skip
    return ", ".join(f"{word} {span(value)}" for word, value in parts if value is not None)


# --- replay


@dataclass(frozen=True, slots=True)
class Episode:
    """A finding over time, in the state in which it was last seen."""

    finding: Finding
    until: datetime


@dataclass(frozen=True, slots=True)
class Replayed:
    """An action that a policy would have taken, and its time."""

    time: datetime
    action: Action


def episodes(samples: Iterable[Sequence[Finding]]) -> list[Episode]:
    """Combine findings of consecutive points in time by subject and start of the idle time.

    A job found while it ran and again after its end gives two episodes, so that actions due while it ran are counted.
    """
    by_subject: dict[tuple[str, datetime | None, bool], Episode] = {}
    for sample in samples:
        for finding in sample:
            end = None if finding.job is None else finding.job.end
            # Ended jobs, and users' behavior over a period, are reported by a later run of the timer.
            over = finding.observed_at if finding.kind in USER_KINDS else end
            until = finding.observed_at if over is None else over + timedelta(days=1)
            which = (finding.key, finding.since, end is not None)
            if finding.kind in USER_KINDS and which in by_subject:
                finding = by_subject[which].finding  # noqa: PLW2901 - as it was seen first
            by_subject[which] = Episode(finding, until)
            if end is not None and finding.kind in IDLE_KINDS:
                ran = _while_it_ran(finding, end)
                by_subject[ran.key, ran.since, False] = Episode(ran, end)
    return list(by_subject.values())


def _while_it_ran(finding: Finding, end: datetime) -> Finding:
    """Return the finding as it was right before the job ended, whether or not findings were listed then."""
    job = finding.job
    return finding if job is None else replace(
        finding, subject=replace(job, state="RUNNING", end=None), observed_at=end
    )  # fmt: skip


def _begins(finding: Finding, since: datetime) -> datetime:
    """Return the earliest time at which the finding can be seen: for an ended job, its end."""
    if finding.kind in USER_KINDS:
        return finding.observed_at  # a user's behavior is known at the end of the period
    end = None if finding.job is None else finding.job.end
    return end if end is not None else finding.since or since


def _subject(finding: Finding) -> str:
    """Return a key with at most one finding at a time: the kind of a finding about a job's idle GPUs may change."""
    if finding.kind in IDLE_KINDS and finding.job is not None:
        return f"{finding.cluster}/{finding.key.split('/', 2)[2]}"
    return finding.key


def _present_findings(past: Iterable[Episode], since: datetime, moment: datetime) -> Iterable[Finding]:
    """Return the findings at ``moment``: for each subject, the episode that ends next.

    If the look-back is shorter than the job, each listing sees a later start of the same idle time.
    """
    by_subject: dict[str, Episode] = {}
    for episode in past:
        subject = _subject(episode.finding)
        if _begins(episode.finding, since) <= moment <= episode.until and (
            subject not in by_subject or episode.until < by_subject[subject].until
        ):
            by_subject[subject] = episode
    return [episode.finding for episode in by_subject.values()]


def replay(
    past: Sequence[Episode], policy: Policy, since: datetime, until: datetime, every: timedelta
) -> list[Replayed]:  # fmt: skip
    """Return the actions of runs at intervals of ``every``, with the limits of each run.

    Assumes that no owner requests an exemption and that nothing fails.
    """
    replays: list[Replayed] = []
    warnings: dict[str, tuple[SentWarning, ...]] = {}
    mailed: dict[str, datetime] = {}
    over: set[str] = set()
    # From the start of the interval, so that jobs idle since before it get their warnings.
    moment = since
    while moment <= until:
        findings = [
            replace(finding, observed_at=moment)
            for finding in _present_findings(past, since, moment)
            if _subject(finding) not in over
        ]
        for action in plan(findings, policy, Ledger(warnings, {}, mailed), moment):
            key = action.finding.key
            if action.verb == "none":
                if action.code == "limit":
                    replays.append(Replayed(moment, action))
                continue
            replays.append(Replayed(moment, action))
            if action.number:
                warnings[key] = (*warnings.get(key, ()), SentWarning(key, action.number, moment))
            elif action.verb.startswith("warn"):
                mailed[action.finding.matter] = moment
            else:
                over.add(_subject(action.finding))
        moment += every
    return replays
