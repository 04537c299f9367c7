"""Mails about the use of GPUs in a day, week or month, sent by the nightly run: each once.

A mail that could not be sent is due again in the next run, until its period ended ``_LATEST`` ago. A run that is killed
between sending a mail and recording it leaves that one to the next run, which sends it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import quote

from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.base.config import PublishedPagesConfig, UsageMailConfig
from slurm_affinode.base.errors import unwritable
from slurm_affinode.base.files import replacing
from slurm_affinode.base.text import counted, one_line
from slurm_affinode.base.users import uid_of_user
from slurm_affinode.db.audit import Who, ZombieLog
from slurm_affinode.db.repository import Repository
from slurm_affinode.model.cleanup import MailPolicy
from slurm_affinode.pipeline import mail_opt_out
from slurm_affinode.pipeline.mail_delivery import Post
from slurm_affinode.pipeline.nightly import Failure
from slurm_affinode.pipeline.report_archive import Period
from slurm_affinode.pipeline.usage_pages import NAME
from slurm_affinode.report.mail import Digest, address_of, message, shown
from slurm_affinode.report.usage_mail import UsagePeriod, UsageScope, idle_hours, usage_digest

_LATEST = timedelta(days=3)
"""Older periods are not mailed: of a new installation, or of reports that are made up for."""
_HOLD = timedelta(minutes=10)
"""Lifetime of the claim on a mail whose run was ended."""


@dataclass(frozen=True, slots=True)
class Recipient:
    """Who gets a mail about whom."""

    address: str
    scope: UsageScope
    user: str | None = None
    """The user at this address; ``None``: administrators, or an address that is no user's."""


@dataclass(frozen=True, slots=True)
class UsageMails:
    """Sends the mails of a run."""

    settings: UsageMailConfig
    policy: MailPolicy
    post: Post
    now: datetime
    timezone: str | None
    pages: PublishedPagesConfig = field(default_factory=PublishedPagesConfig)
    who: Who = field(default_factory=Who.am_i)
    recorded: bool = True
    """False: mails are written to files, and sent another time."""

    def due(self, store: Repository, period: Period) -> bool:
        """Return whether mails about ``period`` may be due."""
        recent = period.until <= self.now <= period.until + _LATEST
        return period.kind in self.settings.periods and recent and not self._settled(store, _claim(period, "all"))

    def send(self, store: Repository, period: Period, result: Callable[[], WasteResult]) -> Iterator[str | Failure]:
        """Send the mails about ``period`` that were not sent yet, and yield the outcome.

        A failure stops no other mail. Raises ``AffinodeError`` if the users who opted out are unknown.
        """
        directory = self.settings.opt_out
        away = frozenset[int]() if directory is None else mail_opt_out.opted_out(directory)
        figures = result()
        log = ZombieLog(store.engine)
        sent, problems = 0, []
        for recipient in recipients(figures, self.settings, self.policy):
            if recipient.user is not None and uid_of_user(recipient.user) in away:
                continue
            claim = _claim(period, f"{recipient.scope.kind} {recipient.scope.name} {recipient.address}")
            if self.recorded and not log.claim(claim, self.who.run, self.now, _HOLD):
                continue
            try:
                digest = self._digest(figures, recipient, period)
                if digest is not None:
                    self.post(digest)
                    sent += 1
            except Exception as error:  # also faults in the site's own templates
                problems.append(f"{shown(recipient.address, 80)}: {one_line(error)}")
                if self.recorded:
                    log.release(claim, self.who.run)
            else:
                if self.recorded:
                    log.settle(claim, self.who.run, self.now, None)
        if self.recorded and not problems and log.claim(whole := _claim(period, "all"), self.who.run, self.now, _HOLD):
            log.settle(whole, self.who.run, self.now, None)
        yield f"{counted(sent, 'mail')} about {period.kind} {period.label}"
        if problems:
            more = f", and {counted(len(problems) - 1, 'other')}" if len(problems) > 1 else ""
            hint = "they are sent by the next run; see [mail] of the clean-up policy"
            yield Failure("mails", f"{counted(len(problems), 'mail')} not sent: {problems[0]}{more}", hint, 3)

    def _digest(self, result: WasteResult, recipient: Recipient, period: Period) -> Digest | None:
        can_opt_out = self.settings.opt_out is not None and recipient.user is not None
        return usage_digest(
            result, recipient.scope, UsagePeriod(period.kind, period.label), self.policy,
            recipient=recipient.address, user=recipient.user, can_opt_out=can_opt_out,
            page=page_address(self.pages, recipient.scope), now=self.now, timezone=self.timezone,
        )  # fmt: skip

    def _settled(self, store: Repository, claim: str) -> bool:
        return self.recorded and ZombieLog(store.engine).settled(claim)


def recipients(result: WasteResult, settings: UsageMailConfig, policy: MailPolicy) -> list[Recipient]:
    """Return who gets a mail about a period: administrators, then those responsible for accounts, then users.

    Users and accounts with fewer idle GPU-hours than ``min_idle_gpu_hours``, or with unknown ones, get none.
    """
    chosen = [Recipient(address, UsageScope("site")) for address in policy.admins] if settings.admins else []
    for account, names in settings.accounts.items():
        scope = UsageScope("account", account)
        if _wasted(result, scope, settings):
            chosen += [
                Recipient(name, scope) if "@" in name else Recipient(address_of(name, policy), scope, name)
                for name in dict.fromkeys(names)
            ]
    if settings.users:
        for name in result.groups["user"]["name"].drop_nulls().to_list():
            scope = UsageScope("user", name)
            if _wasted(result, scope, settings):
                chosen.append(Recipient(address_of(name, policy), scope, name))
    return chosen


def page_address(pages: PublishedPagesConfig, scope: UsageScope) -> str | None:
    """Return the address of the page about a user or an account; ``None`` if there is none, or it is not absolute."""
    url = pages.url or ""
    if pages.directory is None or not url.startswith(("http://", "https://")) or not NAME.fullmatch(scope.name):
        return None
    if scope.kind == "account" and scope.name not in pages.accounts:
        return None
    return f"{url.rstrip('/')}/{scope.kind}/{quote(scope.name)}/"


def _wasted(result: WasteResult, scope: UsageScope, settings: UsageMailConfig) -> bool:
    hours = idle_hours(result, scope)
    return hours is not None and hours >= settings.min_idle_gpu_hours


def _claim(period: Period, about: str) -> str:
    """Return the key under which a mail is sent once. It does not contain the name of a user."""
    return f"usage {period.path} {hashlib.sha256(about.encode()).hexdigest()[:16]}"


def to_files(directory: Path, policy: MailPolicy, now: datetime) -> Post:
    """Return a function that writes each mail to a file in ``directory``, named after recipient and content."""

    def post(digest: Digest) -> None:
        mail_message = message(digest, policy, now)
        path = directory / _file_name(digest)
        try:
            with replacing(path) as temporary:
                temporary.write_bytes(mail_message.as_bytes())
        except OSError as error:
            raise unwritable(path, error) from error

    return post


def _file_name(digest: Digest) -> str:
    """Return a name of letters, digits and ``-_@.`` alone."""
    recipient = "".join(c if c.isascii() and (c.isalnum() or c in "-_@.") else "_" for c in digest.recipient)
    content = hashlib.sha256(f"{digest.recipient}\0{digest.subject}\0{digest.text}".encode()).hexdigest()
    return f"mail-{recipient[:80]}-{content[:8]}.eml"
