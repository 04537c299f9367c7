"""Mails about findings: one digest per recipient, as text and HTML, in the recipient's language.

Templates and texts are in ``reports/mail``; those in the site's directory have priority. Text chosen by users (names of
jobs, commands of processes) is shown without control characters, and escaped in HTML.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from email.errors import MessageError
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import format_datetime, make_msgid
from pathlib import Path
from typing import Any

import jinja2

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.resources import asset_dir
from slurm_affinode.base.text import span, visible
from slurm_affinode.base.times import named
from slurm_affinode.core.cleanup_plan import enough_idle, extra_s, idle_since, stages_of
from slurm_affinode.core.policy_values import zone_of
from slurm_affinode.model.cleanup import DESTRUCTIVE, Action, MailPolicy
from slurm_affinode.model.finding import IDLE_KINDS, Finding, GpuEvidence, JobAttempt, NodeRef, ProcessRef
from slurm_affinode.report import format as fmt

FALLBACK = "en"
MAX_GPUS = 16
"""Maximum number of GPUs listed in a mail; a job may have hundreds."""
MAX_NAME = 120
_PLACE = re.compile(r"\{(\w+)\}")
COLORS = {"warn": "#9a5b00", "done": "#a8321a", "told": "#1a5799", "good": "#1d6b3a"}


@dataclass(frozen=True, slots=True)
class Digest:
    """The content of a mail to one recipient."""

    recipient: str
    """A mail address."""
    user: str | None
    """``None``: administrators."""
    subject: str
    text: str
    html: str


class Texts:
    """Sentences in a language, with English for missing ones."""

    def __init__(self, language: str, site: Path | None) -> None:
        self.language = language
        self._texts: dict[str, Any] = {}
        self._phrases: list[tuple[re.Pattern[str], str]] = []
        for name in (FALLBACK, language.partition("_")[0].partition("-")[0], language):
            for directory in (asset_dir("reports") / "mail", site):
                self._add(directory, name)

    def _add(self, directory: Path | None, name: str) -> None:
        path = None if directory is None else directory / f"texts.{name}.toml"
        if path is None or not path.is_file():
            return
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"cannot be read: {error}", where=str(path)) from error
        kinds = {**self._texts.get("kinds", {}), **found.pop("kinds", {})}
        if isinstance(phrases := found.pop("phrases", {}), dict):
            try:
                self._phrases = [(_pattern(pattern), str(text)) for pattern, text in phrases.items()] + self._phrases
            except re.error as error:
                raise InputError(f"phrases: {error}", where=str(path)) from error
        self._texts = {**self._texts, **found, "kinds": kinds}

    def say(self, key: str, **values: object) -> str:
        """Return a sentence with its values. Unknown placeholders are left unchanged."""
        return _PLACE.sub(lambda m: shown(str(values[m[1]])) if m[1] in values else m[0], str(self._texts[key]))

    def several(self, key: str, number: int, **values: object) -> str:
        """Return a sentence with a number; for 1, its singular form if there is one."""
        one = f"{key}_one"
        return self.say(one if number == 1 and one in self._texts else key, **values)

    def kind(self, kind: str) -> str:
        """Return the meaning of a kind of finding."""
        return str(self._texts["kinds"].get(kind, kind))

    def phrase(self, text: str) -> str:
        """Return a text of a finding translated, with its values, or unchanged if there is no translation."""
        for pattern, translated in self._phrases:
            match = pattern.fullmatch(text)
            if match is not None:
                return _filled(translated, match.groupdict())
        return text

    @property
    def plain(self) -> Mapping[str, Any]:
        """The texts for templates."""
        return self._texts


def _filled(text: str, values: Mapping[str, object]) -> str:
    """Return a sentence with its values; placeholders without a value are left unchanged."""
    return _PLACE.sub(lambda m: str(values[m[1]]) if m[1] in values else m[0], text)


def _pattern(pattern: str) -> re.Pattern[str]:
    """Return the pattern of an English sentence that has ``{name}`` in place of values."""
    parts = re.split(r"\{(\w+)\}", pattern)
    made = [re.escape(part) if i % 2 == 0 else f"(?P<{part}>.+?)" for i, part in enumerate(parts)]
    return re.compile("".join(made), re.DOTALL)


def shown(text: str, length: int = 400) -> str:
    """Return text of a user as one line of limited length without control characters."""
    return fmt.clip(" ".join(visible(text).split()), length)


def digest(
    actions: Sequence[Action],
    mail: MailPolicy,
    *,
    recipient: str,
    user: str | None,
    now: datetime,
    timezone: str | None = None,
    keep_s: float | None = None,
) -> Digest:
    """Return the mail about ``actions``: warnings or completed actions. ``keep_s``: how long users may exempt a job."""
    site = None if mail.templates is None else Path(mail.templates)
    language = mail.languages.get(user or "", mail.language)
    texts = Texts(language, site)
    cluster = actions[0].finding.cluster
    context: dict[str, Any] = {
        "language": language.replace("_", "-"),
        "greeting": texts.say("hello", user=user) if user else texts.say("hello_admin", cluster=cluster),
        "intro": texts.say("intro" if user else "intro_admin", cluster=cluster),
        "items": [_item(action, texts, user, now, timezone, keep_s) for action in actions],
        "footer": texts.say("footer", cluster=cluster, time=clock(now, timezone)),
        "help_url": mail.help_url,
        "t": texts.plain,
        "subject": _subject(actions, texts, cluster, user),
    }
    return Digest(
        recipient, user, context["subject"],
        render("digest.txt.j2", site, context, html=False), render("digest.html.j2", site, context, html=True),
    )  # fmt: skip


def render(name: str, site: Path | None, context: Mapping[str, Any], *, html: bool) -> str:
    """Render a template of the site, or else the built-in one. Raises ``InputError`` if it is invalid."""
    places = [str(place) for place in (site, asset_dir("reports") / "mail") if place is not None]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(places), autoescape=html,  # noqa: S701 - text is not HTML
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    try:
        return environment.get_template(name).render(context)
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        where = name if line is None else f"{name}:{line}"
        raise InputError(f"the template of the mail is wrong: {error}", where=where) from error


def _subject(actions: Sequence[Action], texts: Texts, cluster: str, user: str | None) -> str:
    if user is None:
        return texts.several("subject_admin", len(actions), cluster=cluster, count=len(actions))
    alike = len({(action.verb, action.steps) for action in actions}) == 1
    done = {"cancel": "stage_cancelled", "suspend": "stage_suspended"}.get(actions[0].verb) if alike else None
    steps = actions[0].steps
    done = None if steps else done
    if len(actions) > 1 and done is not None:
        return texts.say("subject_many_done", cluster=cluster, count=len(actions), done=texts.say(done).lower())
    if len(actions) > 1:
        return texts.say("subject_many", cluster=cluster, count=len(actions))
    job = actions[0].finding.job
    if done is not None and job is not None:
        return texts.say("subject_done", cluster=cluster, job=job.id, done=texts.say(done).lower())
    if steps and job is not None:
        return texts.say("subject_steps", cluster=cluster, job=job.id)
    if job is None or actions[0].finding.kind not in IDLE_KINDS:
        return texts.say("subject_look", cluster=cluster, what=_title(actions[0].finding, texts))
    return texts.say("subject_one", cluster=cluster, job=job.id)


def _item(  # noqa: PLR0917
    action: Action, texts: Texts, user: str | None, now: datetime, timezone: str | None, keep_s: float | None
) -> dict[str, Any]:
    finding = action.finding
    stage, color = _stage(action, texts)
    title = _title(finding, texts)
    return {
        "title": title,
        "rule": min(72, len(title) + len(stage) + 2),
        "stage": stage,
        "color": COLORS[color],
        "says": texts.kind(finding.kind),
        "then": _then(action, texts, now, timezone),
        "facts": _facts(finding, texts, timezone, admin=user is None),
        "gpus": [_gpu(gpu, texts) for gpu in finding.gpus[:MAX_GPUS] if gpu.flagged or len(finding.gpus) == 1],
        "evidence": [shown(texts.phrase(one.text)) for one in finding.evidence if one.met],
        "unknown": [shown(texts.phrase(one.text)) for one in finding.unknown],
        "todo": _todo(action, texts, user, keep_s),
    }


def _title(finding: Finding, texts: Texts) -> str:
    match finding.subject:
        case JobAttempt(id=job, name=name) if finding.kind.endswith("-user") is False:
            return texts.say("job_named", job=job, name=shown(name, MAX_NAME)) if name else texts.say("job", job=job)
        case ProcessRef(node=node, pid=pid):
            return texts.say("process", pid=pid, node=node)
        case NodeRef(node=node) if not finding.kind.endswith("-user"):
            return texts.say("node", node=node)
    return texts.say("user_matter")


def _stage(action: Action, texts: Texts) -> tuple[str, str]:
    if action.verb == "cancel":
        return texts.say("stage_steps" if action.steps else "stage_cancelled"), "done"
    if action.verb == "suspend":
        return texts.say("stage_suspended"), "done"
    if action.verb == "kill-process":
        return texts.say("stage_ended"), "done"
    if not action.number:
        return texts.say("stage_told"), "told"
    of = len(stages_of(action.settings, action.finding).warnings)
    if action.number == of and of > 1:
        return texts.say("stage_last"), "warn"
    return texts.say("stage_warning", number=action.number, of=of), "warn"


def _then(action: Action, texts: Texts, now: datetime, timezone: str | None) -> str:
    settings, finding, stages = action.settings, action.finding, stages_of(action.settings, action.finding)
    idle, since = texts.say("not_known"), idle_since(settings, finding)
    if since is not None:
        idle = span((finding.observed_at - since).total_seconds())
    if action.verb == "cancel":
        warnings = len(stages.warnings)
        was = "were_ended" if action.steps else "was_cancelled"
        return texts.several(was, warnings, idle=idle, warnings=warnings)
    if action.verb == "suspend":
        return texts.say("was_suspended")
    if action.verb == "kill-process":
        return texts.say("was_ended")
    if not action.number:
        return ""
    cancels = settings.action == "cancel" and not settings.do_not_cancel and enough_idle(settings, finding)
    if action.stays or not cancels or stages.cancel_s is None or since is None:
        return texts.say("no_cancel")
    # Keep the interval that the stages have between this warning and the cancellation.
    left_s = stages.cancel_s - stages.warnings[action.number - 1]
    need_s = stages.cancel_s + extra_s(settings, finding)
    when = max(since + timedelta(seconds=need_s), now + timedelta(seconds=left_s))
    return texts.say("suspend_at" if action.suspends else "cancel_at", time=clock(when, timezone))


def _facts(finding: Finding, texts: Texts, timezone: str | None, *, admin: bool) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    if admin and finding.user:
        facts.append((texts.say("user"), shown(finding.user)))
    if finding.partition:
        facts.append((texts.say("partition"), shown(finding.partition)))
    if finding.nodes:
        facts.append((texts.say("nodes"), shown(", ".join(finding.nodes[:MAX_GPUS]))))
    if finding.gpus:
        held = finding.allocated_gpus if finding.allocated_gpus is not None else len(finding.gpus)
        idle = texts.say("gpus_idle", idle=len(finding.flagged_gpus), all=held)
        facts.append((texts.say("gpus"), idle))
    if finding.since is not None:
        facts.append((texts.say("since"), clock(finding.since, timezone)))
    if finding.held_gpu_hours:
        facts.append((texts.say("held"), texts.say("held_value", hours=f"{finding.held_gpu_hours:.1f}")))
    if finding.impact is not None and finding.impact.jobs:
        jobs = finding.impact.startable
        facts.append((texts.say("queue"), texts.several("queue_value", jobs, jobs=jobs)))
    return facts


def _gpu(gpu: GpuEvidence, texts: Texts) -> dict[str, str]:
    unknown = texts.say("not_known")
    memory = unknown
    if gpu.held_gib is not None:
        memory = f"{gpu.held_gib:.1f} GiB" if gpu.total_gib is None else f"{gpu.held_gib:.1f} / {gpu.total_gib:.0f} GiB"
    return {
        "name": shown(f"{gpu.node}: {gpu.gpu}" if gpu.node else gpu.gpu, 80),
        "memory": memory,
        "activity": unknown if gpu.peak_pct is None or not gpu.measured else f"{gpu.peak_pct:.0f} %",
        "idle": unknown if gpu.idle_s is None else span(gpu.idle_s),
    }


def _todo(action: Action, texts: Texts, user: str | None, keep_s: float | None) -> list[str]:
    finding, job = action.finding, action.finding.job
    lines = [shown(texts.phrase(finding.advice))] if finding.advice else []
    if action.verb in DESTRUCTIVE:
        lines = [texts.say("do_next_time")] if action.verb == "cancel" else []  # canceled, or resumes by itself
    if job is None or user is None or not job.running:
        return lines
    if action.verb.startswith("warn"):
        lines.append(texts.say("do_cancel", job=job.id))
        if action.number and keep_s:
            lines.append(texts.say("do_keep", job=job.id, span=span(keep_s).replace(" ", "")))
    lines.append(texts.say("do_explain", job=job.id))
    return lines


def clock(moment: datetime, timezone: str | None) -> str:
    """Format a time for mails."""
    return named(moment, zone_of(timezone))


def message(found: Digest, mail: MailPolicy, now: datetime) -> EmailMessage:
    """Return the mail message with text and HTML. Raises ``InputError`` for an invalid address."""
    made = EmailMessage()
    try:
        if not found.recipient:
            raise ValueError("it is empty")  # noqa: TRY301
        made["From"] = mail.sender
        made["To"] = Address(addr_spec=found.recipient) if "@" in found.recipient else found.recipient
        if mail.reply_to:
            made["Reply-To"] = mail.reply_to
        made["Subject"] = shown(found.subject, 200)
    except (ValueError, IndexError, MessageError) as error:
        raise InputError(f"{shown(found.recipient)!r} is not a mail address: {error}") from error
    made["Date"] = format_datetime(now)
    made["Message-ID"] = make_msgid("slurm-affinode", "localhost")
    made["Auto-Submitted"] = "auto-generated"
    made.set_content(found.text)
    made.add_alternative(found.html, subtype="html")
    return made


def address_of(user: str, mail: MailPolicy) -> str:
    """Return the mail address of a user."""
    return mail.addresses.get(user) or mail.address.replace("{user}", user)
