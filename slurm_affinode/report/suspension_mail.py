"""Mails about suspensions: text and HTML, in the recipient's language, from templates that a site may replace."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slurm_affinode.base.text import size, span
from slurm_affinode.model.cleanup import MailPolicy
from slurm_affinode.model.suspension import SuspensionMail
from slurm_affinode.report.mail import COLORS, MAX_NAME, Digest, Reader, Texts, address_of, clock, composed, shown

_COLORS = {"suspended": "told", "restored": "good", "failed": "done"}


def suspension_digest(event: SuspensionMail, mail: MailPolicy, *, timezone: str | None = None) -> Digest:
    """Return the mail to the owner of a job. Raises ``InputError`` if the site's templates or texts are invalid."""
    site = None if mail.templates is None else Path(mail.templates)
    texts = Texts(mail.languages.get(event.user, mail.language), site)
    job = event.called
    kind = _kind(event)
    subject = event.kind if kind in ("asleep", "awake") else kind
    context: dict[str, Any] = {
        "greeting": texts.say("hello", user=event.user),
        "subject": texts.say(f"sleep_subject_{subject}", cluster=event.cluster, job=job, node=event.node),
        "title": _title(event, texts),
        "stage": texts.say(f"sleep_stage_{kind}"),
        "color": COLORS[_COLORS[event.kind]],
        "says": texts.say(f"sleep_says_{kind}", cluster=event.cluster, node=event.node, job=job),
        "then": _next_step(event, texts),
        "facts": _facts(event, texts, timezone),
        "todo": _todo(event, texts),
        "left_out": texts.say("sleep_left_out", count=event.left_out) if event.left_out else "",
        "footer": texts.say("sleep_footer", cluster=event.cluster, time=_clock(event.at_epoch, timezone)),
    }
    return composed("suspension", Reader(address_of(event.user, mail), event.user, mail, texts), context)


def _kind(event: SuspensionMail) -> str:
    """Return the key of the event in the texts."""
    if not event.in_place:
        kind = "fresh" if event.kind == "failed" and event.fresh else event.kind
        return f"lost_{kind}" if event.lost else kind
    return {"suspended": "asleep", "restored": "awake", "failed": "ended" if event.ended else "unwoken"}[event.kind]


def _clock(at_epoch: float, timezone: str | None) -> str:
    return clock(datetime.fromtimestamp(at_epoch, UTC), timezone)


def _title(event: SuspensionMail, texts: Texts) -> str:
    if event.job_name:
        return texts.say("job_named", job=event.called, name=shown(event.job_name, MAX_NAME))
    return texts.say("job", job=event.called)


def _next_step(event: SuspensionMail, texts: Texts) -> str:
    if event.kind != "suspended":
        return ""
    if event.on_request:
        return texts.say("sleep_wake_request")
    if event.wake == "auto":
        return texts.say("sleep_wake_auto")
    if event.wake in (None, "hold"):
        return texts.say("sleep_wake_hold")
    return texts.say("sleep_wake_at", time=shown(event.wake))


def _facts(event: SuspensionMail, texts: Texts, timezone: str | None) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    if event.why:
        facts.append((texts.say("sleep_why"), shown(event.why)))
    if event.partition:
        facts.append((texts.say("partition"), shown(event.partition)))
    facts.append((texts.say("sleep_node"), shown(event.node)))
    if event.gpus:
        model = f"{event.gpus} \N{MULTIPLICATION SIGN} {shown(event.gpu_model)}" if event.gpu_model else str(event.gpus)
        facts.append((texts.say("gpus"), model))
    if event.gpu_bytes:
        facts.append((texts.say("sleep_saved"), size(event.gpu_bytes)))
    if event.slept_s is not None:
        facts.append((texts.say("sleep_slept"), span(event.slept_s)))
    if event.checkpoint_epoch is not None:
        facts.append((texts.say("sleep_checkpoint"), _clock(event.checkpoint_epoch, timezone)))
    if event.lost:
        lost = texts.say("not_known") if event.lost_s is None else span(event.lost_s)
        facts.append((texts.say("sleep_lost"), lost))
    facts.append((texts.say("sleep_time"), _clock(event.at_epoch, timezone)))
    return facts


def _todo(event: SuspensionMail, texts: Texts) -> list[str]:
    job = event.called
    if event.kind == "suspended":
        return [texts.say("sleep_do_wake", job=job), texts.say("sleep_do_cancel", job=job)]
    if event.kind == "failed" and not event.fresh and not event.ended:
        again = texts.say("sleep_do_return" if event.lost else "sleep_do_again", job=job)
        start = [] if event.in_place else [texts.say("sleep_do_start", job=job)]
        return [again, *start, texts.say("sleep_do_give_up", job=job)]
    return [texts.say("sleep_do_status", job=job)]
