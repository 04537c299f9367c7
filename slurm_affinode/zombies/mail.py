"""Mail to owners and administrators: one message per recipient. Only mail that was sent counts as a warning."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import counted
from slurm_affinode.db.audit import warning_claim
from slurm_affinode.model.cleanup import DESTRUCTIVE, Action, AuditEntry, Ledger, Policy
from slurm_affinode.report.mail import address_of, digest
from slurm_affinode.zombies.audit import written
from slurm_affinode.zombies.outcomes import HOLD, Outcome, Tools

Reader = tuple[str, str | None, tuple[str, ...]]
"""Cluster, user (``None``: administrators) and addresses."""


def notify(actions: Iterable[Action], tools: Tools, ledger: Ledger) -> list[Outcome]:
    """Send the due warnings, one mail per recipient. A warning that was not sent is due again in the next run."""
    mailed = [action for action in actions if action.verb in ("warn-user", "warn-admin")]
    outcomes: list[Outcome] = []
    mails = 0
    for (_, user, recipients), group in by_reader(mailed, tools.policy).items():
        tools.step(f"mail: {user or 'administrators'}")
        if mails >= tools.policy.limits.mails:
            text = f"{counted(mails, 'mail')} in this run already: the limit"
            outcomes += [written(Outcome(action, "spared", f"{action.target}: {text}"), tools) for action in group]
            continue
        outcomes += _mail(user, recipients, group, tools, ledger)
        mails += 1
    return outcomes


def by_reader(actions: Iterable[Action], policy: Policy) -> dict[Reader, list[Action]]:
    """Group the actions by mail. Each mail is about one cluster: job IDs are not unique across clusters."""
    groups: dict[Reader, list[Action]] = {}
    for action in actions:
        owner = action.verb == "warn-user" or (action.verb in DESTRUCTIVE and action.settings.warn_user)
        user = action.finding.user if owner else None
        to = policy.mail.admins if user is None else (address_of(user, policy.mail),)
        groups.setdefault((action.finding.cluster, user, to), []).append(action)
    return groups


def readers(user: str | None, recipients: tuple[str, ...], group: Iterable[Action], policy: Policy) -> tuple[str, ...]:
    """Return the recipients of a mail. With ``warn_admins``, administrators get a copy of the user's mail."""
    copies = policy.mail.admins if user is not None and any(action.settings.warn_admins for action in group) else ()
    return tuple(dict.fromkeys((*recipients, *copies)))


def _mail(
    user: str | None, recipients: tuple[str, ...], group: list[Action], tools: Tools, ledger: Ledger
) -> list[Outcome]:
    now, run = tools.now(), tools.who.run
    own_actions: list[Action] = []
    outcomes = []
    claimed: set[tuple[str, int]] = set()
    for action in group:
        name = (_key(action), action.number)
        if name in claimed or tools.log.claim_warning(
            *name, run, now=now, hold=HOLD, last_seen=_last_sent(action, ledger)
        ):
            claimed.add(name)
            own_actions.append(action)
        else:
            outcomes.append(Outcome(action, "gone", f"{action.target}: another run mails it, or has mailed it"))
    try:
        outcomes += _send(user, recipients, own_actions, tools) if own_actions else ()
    except BaseException:  # the mail may have been sent
        for action in own_actions:
            written(
                Outcome(action, "failed", f"{action.target}: it was interrupted; who was notified is unknown"), tools
            )
        raise
    return [written(outcome, tools) for outcome in outcomes]


def _key(action: Action) -> str:
    """Return the key under which a warning is sent once: the finding, or without stages its matter."""
    return action.finding.key if action.number else action.finding.matter


def _last_sent(action: Action, ledger: Ledger) -> datetime | None:
    """Return when this warning was last sent, as known to the decision."""
    key = _key(action)
    if action.number == 0:
        return ledger.mailed.get(key)
    return max(
        (warning.time for warning in ledger.warnings.get(key, ()) if warning.number == action.number), default=None
    )


def _send(user: str | None, recipients: tuple[str, ...], own_actions: list[Action], tools: Tools) -> list[Outcome]:
    now, policy, outcomes = tools.now(), tools.policy, []
    mailed, problems = [], []
    for recipient in readers(user, recipients, own_actions, policy):
        try:
            tools.post(
                digest(
                    own_actions, policy.mail, recipient=recipient, user=user, now=now,
                    timezone=policy.calendar.timezone,
                    keep_s=policy.keep.max_s if policy.keep.allow else None,
                )
            )  # fmt: skip
            mailed.append(recipient)
        except AffinodeError as error:
            problems.append(f"{recipient}: {error}")
        except Exception as error:
            problems.append(f"{recipient}: a fault of slurm-affinode: {type(error).__name__}: {error}")
    # The owner must have been warned: a copy to the administrators alone does not count.
    reached = bool(mailed) if user is None else bool(recipients) and recipients[0] in mailed
    for action in own_actions:
        if reached:
            tools.log.warned(_key(action), action.number, now, ", ".join(mailed), tools.who.run)
            more = f" (not to {'; '.join(problems)})" if problems else ""
            what = f"warning {action.number}" if action.number else "it"
            outcomes.append(Outcome(action, "done", f"{action.target}: {what} was mailed to {', '.join(mailed)}{more}"))
        else:
            tools.log.release(warning_claim(_key(action), action.number), tools.who.run)
            why = "; ".join(problems) or "the policy has no administrators (mail.admins)"
            outcomes.append(Outcome(action, "failed", f"{action.target}: no mail was sent: {why}"))
    return outcomes


def mail_done(actions: list[Action], tools: Tools) -> None:
    """Notify owners that their jobs were canceled or suspended. A failure to do so is only recorded."""
    if tools.policy.mail.via == "none":
        return
    for (_, user, recipients), group in by_reader(actions, tools.policy).items():
        for recipient in readers(user, recipients, group, tools.policy):
            result, text = "done", f"notified {recipient} of the actions"
            try:
                tools.post(
                    digest(
                        group, tools.policy.mail, recipient=recipient, user=user, now=tools.now(),
                        timezone=tools.policy.calendar.timezone,
                    )
                )  # fmt: skip
            except Exception as error:  # also faults in the site's own templates
                result, text = "failed", f"{recipient} was not notified of the actions: {error}"
            first = group[0].finding
            tools.log.record([
                AuditEntry(tools.now(), tools.who.run, tools.who.actor, "tell", result, text, cluster=first.cluster,
                           job=None if first.job is None else first.job.id, user=user)
            ])  # fmt: skip


def warnable(action: Action) -> bool:
    """Return whether the action is a mail to the job's user or to the administrators."""
    return action.verb in ("warn-user", "warn-admin")
