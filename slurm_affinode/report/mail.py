"""Mails about findings: one digest per recipient, as text and HTML, in the recipient's language.

Templates and texts are in ``reports/mail``; those in the site's directory have priority. Text chosen by users (names of
jobs, commands of processes) is shown without control characters, and escaped in HTML.
"""

from __future__ import annotations

import math
import re
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
from slurm_affinode.base.toml_schema import TomlEntries, TomlFile, string
from slurm_affinode.core.cleanup_plan import enough_idle, extra_s, idle_since, stages_of
from slurm_affinode.core.policy_values import zone_of
from slurm_affinode.model.cleanup import DESTRUCTIVE, Action, MailPolicy
from slurm_affinode.model.finding import (
    IDLE_KINDS,
    USER_KINDS,
    Finding,
    GpuEvidence,
    JobAttempt,
    NodeRef,
    ProcessRef,
)
from slurm_affinode.report import format as fmt

FALLBACK = "en"
MAX_LINES = 40
"""Maximum length of the text of a mail with the built-in template."""
MAX_DETAILED = 5
"""Maximum number of findings with all their evidence in a mail; the others are one line for each kind."""
MAX_GPUS = 4
"""Maximum number of GPUs and nodes listed for a finding; a job may have hundreds."""
MAX_EVIDENCE = 4
MAX_NAMES = 4
"""Maximum number of jobs, processes and nodes that a line about several names."""
_LEAST_GROUPS = 8
"""Lines about further findings that have priority over the evidence of one more."""
MAX_NAME = 120
_PLACE = re.compile(r"\{(\w+)\}")
_TABLES = ("kinds", "kinds_ended", "phrases")
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
            file = TomlFile(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"cannot be read: {error}", where=str(path)) from error
        # Templates of the site may use texts of its own, so that any key is known.
        values = file.table(
            file.data, (), {**dict.fromkeys(file.data, string), **dict.fromkeys(_TABLES, TomlEntries(string))}
        )
        phrases = []
        for phrase, text in values.pop("phrases", {}).items():
            try:
                phrases.append((_pattern(phrase), text))
            except re.error as error:
                file.fault(("phrases", phrase), str(error))
        file.check(str(path))
        tables = {name: {**self._texts.get(name, {}), **values.pop(name, {})} for name in ("kinds", "kinds_ended")}
        self._phrases = phrases + self._phrases
        self._texts = {**self._texts, **values, **tables}

    def say(self, key: str, **values: object) -> str:
        """Return a sentence with its values. Unknown placeholders are left unchanged."""
        return _PLACE.sub(lambda m: shown(str(values[m[1]])) if m[1] in values else m[0], str(self._texts[key]))

    def several(self, key: str, number: int, **values: object) -> str:
        """Return a sentence with a number; for 1, its singular form if there is one."""
        singular = f"{key}_one"
        return self.say(singular if number == 1 and singular in self._texts else key, **values)

    def kind(self, kind: str, *, ended: bool = False) -> str:
        """Return the meaning of a kind of finding; ``ended``: in the past tense, about a job that has ended."""
        meaning = self._texts["kinds"].get(kind, kind)
        return str(self._texts["kinds_ended"].get(kind, meaning) if ended else meaning)

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
    pattern_parts = [re.escape(part) if i % 2 == 0 else f"(?P<{part}>.+?)" for i, part in enumerate(parts)]
    return re.compile("".join(pattern_parts), re.DOTALL)


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
    """Return the mail about ``actions``: warnings or completed actions. ``keep_s``: how long users may exempt a job.

    The text has at most ``MAX_LINES`` lines: a summary, the evidence of the most urgent findings, a line for each kind
    of the others, and the command that lists all of them. A template of the site gets all findings with their evidence.
    """
    site = None if mail.templates is None else Path(mail.templates)
    language = mail.languages.get(user or "", mail.language)
    texts = Texts(language, site)
    cluster = actions[0].finding.cluster
    ranked = sorted(actions, key=lambda action: _rank(action, now))
    items = [_item(action, texts, user, now, timezone, keep_s) for action in ranked]
    context: dict[str, Any] = {
        "greeting": texts.say("hello", user=user) if user else texts.say("hello_admin", cluster=cluster),
        "intro": texts.say(_intro(actions, user), cluster=cluster),
        "summary": _summary(ranked, texts, now, timezone) if len(ranked) > 1 else [],
        "footer": texts.say("footer", cluster=cluster, time=clock(now, timezone)),
        "subject": _subject(actions, texts, cluster, user),
    }
    selection = _Selection(ranked, items, texts, user)
    reader = Reader(recipient, user, mail, texts)
    return composed(
        "digest", reader, {**context, **selection.fitting(context)}, own_template={**context, **selection.everything()}
    )


@dataclass(frozen=True, slots=True)
class Reader:
    """The recipient of a mail, with the settings and texts for it."""

    recipient: str
    """A mail address."""
    user: str | None
    """``None``: administrators."""
    mail: MailPolicy
    texts: Texts


def composed(
    name: str, reader: Reader, context: Mapping[str, Any], *, own_template: Mapping[str, Any] | None = None
) -> Digest:
    """Render both templates of a kind of mail. ``own_template``: the values for a template of the site.

    Raises ``InputError`` if a template is invalid.
    """
    mail, texts = reader.mail, reader.texts
    site = None if mail.templates is None else Path(mail.templates)
    common = {"language": texts.language.replace("_", "-"), "help_url": mail.help_url, "t": texts.plain}

    def rendered(file: str, *, html: bool) -> str:
        customized = own_template is not None and site is not None and (site / file).is_file()
        values = own_template if customized and own_template is not None else context
        return render(file, site, {**common, **values}, html=html)

    return Digest(
        reader.recipient, reader.user, context["subject"], rendered(f"{name}.txt.j2", html=False),
        rendered(f"{name}.html.j2", html=True),
    )  # fmt: skip


def _rank(action: Action, now: datetime) -> tuple[int, float, float]:
    """Actions and warnings with stages first, then running jobs, then ended ones; most GPU-hours first."""
    deadline = _deadline(action, now)
    left_s = 0.0 if action.verb in DESTRUCTIVE else math.inf if deadline is None else (deadline - now).total_seconds()
    return 0 if _urgent(action) else 2 if _is_past(action) else 1, left_s, -(action.finding.held_gpu_hours or 0.0)


def _urgent(action: Action) -> bool:
    """Return whether something was done, or will be."""
    return action.verb in DESTRUCTIVE or action.number > 0


def _is_past(action: Action) -> bool:
    """Return whether the finding is about a job that has ended, or about jobs of a past period."""
    job = action.finding.job
    return action.finding.kind in USER_KINDS or (job is not None and not job.running)


def _intro(actions: Sequence[Action], user: str | None) -> str:
    """Return the key of the first sentence."""
    if user is None:
        return "intro_admin"
    if all(action.verb in DESTRUCTIVE for action in actions):
        return "intro_done"
    return "intro_ended" if all(map(_is_past, actions)) else "intro"


def _summary(
    actions: Sequence[Action], texts: Texts, now: datetime, timezone: str | None
) -> list[tuple[str, str]]:  # fmt: skip
    """Return what the mail is about in up to five counts."""
    final_actions = [action for action in actions if action.verb in DESTRUCTIVE]
    ended = [action for action in actions if _is_past(action) and action not in final_actions]
    present = [action for action in actions if action not in final_actions and action not in ended]
    idle = [action for action in present if action.finding.kind in IDLE_KINDS]
    times = sorted(moment for action in idle if (moment := _deadline(action, now)) is not None)
    lines = []
    if idle:
        gpus = sum(len(action.finding.flagged_gpus) for action in idle)
        value = texts.say("summary_idle_value", jobs=len(idle), gpus=gpus, hours=_hours(idle, texts))
        lines.append((texts.say("summary_idle"), value))
    if times:
        value = texts.say("summary_due_value", jobs=len(times), time=clock(times[0], timezone))
        lines.append((texts.say("summary_due"), value))
    for key, group in (("summary_done", final_actions), ("summary_ended", ended)):
        if group:
            value = texts.say("summary_value", count=len(group), hours=_hours(group, texts))
            lines.append((texts.say(key), value))
    if other_count := len(present) - len(idle):
        lines.append((texts.say("summary_others"), str(other_count)))
    return lines


def _hours(actions: Sequence[Action], texts: Texts) -> str:
    """Return the GPU-hours held without use, at least the known ones."""
    known_hours = [hours for action in actions if (hours := action.finding.held_gpu_hours) is not None]
    hours = sum(known_hours)
    return f"{hours:.{1 if hours < 100 else 0}f}" if known_hours else texts.say("not_known")


@dataclass(frozen=True, slots=True)
class _Selection:
    """The findings of a mail, the most urgent first, of which some are shown with evidence."""

    actions: Sequence[Action]
    items: Sequence[Mapping[str, Any]]
    """The values of the templates for each action."""
    texts: Texts
    user: str | None

    def everything(self) -> dict[str, Any]:
        """Return all findings with evidence."""
        return self._values(len(self.items), 0, 0)

    def fitting(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """Return as many findings with evidence, then without, as ``MAX_LINES`` permit; the others by kind."""
        urgent = min(MAX_DETAILED, sum(map(_urgent, self.actions)))
        full, compact = 0, 0
        for full in range(min(len(self.items), MAX_DETAILED), -1, -1):
            if self._fits(context, full, max(0, urgent - full)):
                break
        for compact in range(min(len(self.items) - full, MAX_DETAILED), -1, -1):
            if self._fits(context, full, compact):
                break
        return self._values(full, compact, self._room(context, full, compact))

    def _fits(self, context: Mapping[str, Any], full: int, compact: int) -> bool:
        """Return whether the other findings have enough lines, beside these numbers of findings."""
        groups = len(_groups(self.actions[full + compact :]))
        urgent = sum(map(_urgent, self.actions))
        least = 1 if not full and compact <= urgent else _LEAST_GROUPS
        return self._room(context, full, compact) >= min(groups, least)

    def _room(self, context: Mapping[str, Any], full: int, compact: int) -> int:
        """Return how many lines are left for the other findings."""
        values = {**context, **self._values(full, compact, 1), "language": "", "help_url": "-", "t": self.texts.plain}
        lines = len(render("digest.txt.j2", None, values, html=False).splitlines())
        return MAX_LINES - lines + len(values["further"])

    def _values(self, full: int, compact: int, lines: int) -> dict[str, Any]:
        """Return the values for these numbers of findings, and at most ``lines`` lines about the others."""
        texts, rest = self.texts, list(_groups(self.actions[full + compact :]).values())
        groups = rest if len(rest) <= lines else rest[: max(0, lines - 1)]
        further = [_group(group, texts, self.user) for group in groups]
        if left_out := sum(map(len, rest[len(groups) :])):
            further.append(texts.several("further_rest", left_out, count=left_out))
        cluster = self.actions[0].finding.cluster
        key = "list_admin" if self.user is None else "list_user"
        return {
            "items": [{**item, "compact": place >= full} for place, item in enumerate(self.items[: full + compact])],
            "further": further,
            "list_all": texts.say(key, user=self.user, cluster=cluster) if rest else "",
        }


def _groups(actions: Sequence[Action]) -> dict[tuple[object, ...], list[Action]]:
    """Return the findings by kind and state, in their order."""
    groups: dict[tuple[object, ...], list[Action]] = {}
    for action in actions:
        groups.setdefault((action.verb, action.number, action.finding.kind, _is_past(action)), []).append(action)
    return groups


def _group(actions: Sequence[Action], texts: Texts, user: str | None) -> str:
    """Return a line about findings of a kind."""
    first = actions[0]
    names = ", ".join(_name(action.finding, texts, admin=user is None) for action in actions[:MAX_NAMES])
    if len(actions) > MAX_NAMES:
        names = texts.say("names_more", names=names, count=len(actions) - MAX_NAMES)
    says = texts.kind(first.finding.kind, ended=_is_past(first))
    key = "further_line" if any(action.finding.held_gpu_hours for action in actions) else "further_line_unmeasured"
    return texts.say(key, stage=_stage(first, texts)[0], says=says, names=names, hours=_hours(actions, texts))


def _name(finding: Finding, texts: Texts, *, admin: bool) -> str:
    """Return a short name: the ID of the job, the process or the node, for administrators with its user."""
    if finding.kind in USER_KINDS:
        return shown(finding.user or "", MAX_NAME)
    match finding.subject:
        case JobAttempt(id=job):
            name = texts.say("job", job=job)
        case ProcessRef(node=node, pid=pid):
            name = f"{node}:{pid}"
        case NodeRef(node=node):
            return shown(node, MAX_NAME)
    return shown(f"{name} ({finding.user})" if admin and finding.user else name, MAX_NAME)


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
    stage = {"cancel": "stage_cancelled", "suspend": "stage_suspended"}.get(actions[0].verb) if alike else None
    steps = actions[0].steps
    stage = None if steps else stage
    if len(actions) > 1 and stage is not None:
        return texts.say("subject_many_done", cluster=cluster, count=len(actions), done=texts.say(stage).lower())
    if len(actions) > 1:
        return texts.say("subject_many", cluster=cluster, count=len(actions))
    job = actions[0].finding.job
    if stage is not None and job is not None:
        return texts.say("subject_done", cluster=cluster, job=job.id, done=texts.say(stage).lower())
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
    gpus = [gpu for gpu in finding.gpus if gpu.flagged or len(finding.gpus) == 1]
    return {
        "title": title,
        "rule": min(72, len(title) + len(stage) + 2),
        "stage": stage,
        "color": COLORS[color],
        "says": texts.kind(finding.kind, ended=_is_past(action)),
        "then": _next_step(action, texts, now, timezone),
        "facts": _facts(finding, texts, timezone, admin=user is None),
        "gpus": [_gpu(gpu, texts) for gpu in gpus[:MAX_GPUS]],
        "gpus_more": texts.several("gpus_more", len(gpus) - MAX_GPUS, count=len(gpus) - MAX_GPUS)
        if len(gpus) > MAX_GPUS
        else "",
        "evidence": [shown(texts.phrase(item.text)) for item in finding.evidence if item.met][:MAX_EVIDENCE],
        "unknown": [shown(texts.phrase(item.text)) for item in finding.unknown][:MAX_EVIDENCE],
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
        return texts.say("stage_over" if _is_past(action) else "stage_told"), "told"
    of = len(stages_of(action.settings, action.finding).warnings)
    if action.number == of and of > 1:
        return texts.say("stage_last"), "warn"
    return texts.say("stage_warning", number=action.number, of=of), "warn"


def _next_step(action: Action, texts: Texts, now: datetime, timezone: str | None) -> str:
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
    when = _deadline(action, now)
    if when is None:
        return texts.say("no_cancel")
    return texts.say("suspend_at" if action.suspends else "cancel_at", time=clock(when, timezone))


def _deadline(action: Action, now: datetime) -> datetime | None:
    """Return when the job is canceled or suspended if its GPUs stay idle; ``None``: it is not."""
    settings, finding, stages = action.settings, action.finding, stages_of(action.settings, action.finding)
    since = idle_since(settings, finding)
    cancels = settings.action == "cancel" and not settings.do_not_cancel and enough_idle(settings, finding)
    if not action.number or action.stays or not cancels or stages.cancel_s is None or since is None:
        return None
    # Keep the interval that the stages have between this warning and the cancellation.
    left_s = stages.cancel_s - stages.warnings[action.number - 1]
    need_s = stages.cancel_s + extra_s(settings, finding)
    return max(since + timedelta(seconds=need_s), now + timedelta(seconds=left_s))


def _facts(finding: Finding, texts: Texts, timezone: str | None, *, admin: bool) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    if admin and finding.user:
        facts.append((texts.say("user"), shown(finding.user)))
    if finding.partition:
        facts.append((texts.say("partition"), shown(finding.partition)))
    if finding.nodes:
        facts.append((texts.say("nodes"), shown(", ".join(finding.nodes[:MAX_GPUS]))))
    if finding.gpus:
        gpu_count = finding.allocated_gpus if finding.allocated_gpus is not None else len(finding.gpus)
        idle = texts.say("gpus_idle", idle=len(finding.flagged_gpus), all=gpu_count)
        facts.append((texts.say("gpus"), idle))
    if finding.job is not None and finding.job.end is not None:
        facts.append((texts.say("ended"), clock(finding.job.end, timezone)))
    elif finding.since is not None:
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
    if job is not None and user is not None and not job.running:
        return [*lines, texts.say("do_job", job=job.id)]
    if job is None or user is None:
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


def message(summary: Digest, mail: MailPolicy, now: datetime) -> EmailMessage:
    """Return the mail message with text and HTML. Raises ``InputError`` for an invalid address."""
    mail_message = EmailMessage()
    try:
        if not summary.recipient:
            raise ValueError("it is empty")  # noqa: TRY301
        mail_message["From"] = mail.sender
        mail_message["To"] = Address(addr_spec=summary.recipient) if "@" in summary.recipient else summary.recipient
        if mail.reply_to:
            mail_message["Reply-To"] = mail.reply_to
        mail_message["Subject"] = shown(summary.subject, 200)
    except (ValueError, IndexError, MessageError) as error:
        raise InputError(f"{shown(summary.recipient)!r} is not a mail address: {error}") from error
    mail_message["Date"] = format_datetime(now)
    mail_message["Message-ID"] = make_msgid("slurm-affinode", "localhost")
    mail_message["Auto-Submitted"] = "auto-generated"
    mail_message.set_content(summary.text)
    mail_message.add_alternative(summary.html, subtype="html")
    return mail_message


def address_of(user: str, mail: MailPolicy) -> str:
    """Return the mail address of a user."""
    return mail.addresses.get(user) or mail.address.replace("{user}", user)
