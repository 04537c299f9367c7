"""Mail delivery through a mail server, a command, or a webhook. An error is one line.

There is one attempt per mail, but that a webhook which limits the rate is tried again after the time that it requests.
"""

from __future__ import annotations

import json
import smtplib
import time
from collections.abc import Callable
from datetime import datetime
from email.message import EmailMessage
from pathlib import Path
from urllib.parse import urlsplit

from slurm_affinode.base import process
from slurm_affinode.base.errors import AffinodeError, InputError, UnreachableError
from slurm_affinode.base.http import HttpError, HttpResponse, fetch, retry_after_s, tls_context
from slurm_affinode.model.cleanup import MailPolicy, Smtp
from slurm_affinode.report.mail import Digest, message, shown
from slurm_affinode.report.webhook import webhook_body

COMMAND_S = 60.0
WEBHOOK_S = 30.0

MOST_UNANSWERED = 3
"""Maximum consecutive attempts without a response from the server: otherwise 200 mails would wait for hours."""

_LIMITED = 429
"""The HTTP status *Too Many Requests*."""
_LONGEST_WAIT_S = 60.0
"""Maximum time that a mail waits for a webhook that limits the rate."""
_LONGEST_WAITS_S = 300.0
"""The same for all mails of a run."""
_DEFAULT_WAIT_S = 1.0
"""Without ``Retry-After``: Slack accepts a message per second, Teams four."""

Post = Callable[[Digest], None]


class MailServerDownError(UnreachableError):
    """The server cannot be reached, independently of the recipient."""


def postman(mail: MailPolicy, now: Callable[[], datetime], sleep: Callable[[float], None] = time.sleep) -> Post:
    """Return a function that sends digests during one run. It raises ``AffinodeError`` if a mail cannot be sent."""
    unanswered: list[MailServerDownError] = []
    webhook = _Webhook(mail, sleep)

    def post(digest: Digest) -> None:
        if len(unanswered) >= MOST_UNANSWERED:
            raise MailServerDownError(f"skipped after {MOST_UNANSWERED} without a response: {unanswered[-1]}")
        try:
            send(digest)
        except MailServerDownError as error:
            unanswered.append(error)
            raise
        except AffinodeError:
            unanswered.clear()
            raise
        unanswered.clear()

    def send(digest: Digest) -> None:
        mail_message = message(digest, mail, now())
        if mail.via == "smtp":
            _smtp(mail_message, mail.smtp)
        elif mail.via == "command":
            _command(mail_message, digest, mail)
        elif mail.via == "webhook" and mail.webhook is not None:
            webhook.send(digest, mail.webhook)
        else:
            raise AffinodeError(
                "mail is disabled: the policy has mail.via = none", hint="set mail.via to smtp, command or webhook"
            )

    return post


def _smtp(mail_message: EmailMessage, server: Smtp) -> None:
    where = f"mail server {server.host}:{server.port}"
    context, accepted = tls_context(server.ca_file), False
    try:
        opened: smtplib.SMTP
        if server.tls == "tls":
            opened = smtplib.SMTP_SSL(server.host, server.port, timeout=server.timeout_s, context=context)
        else:
            opened = smtplib.SMTP(server.host, server.port, timeout=server.timeout_s)
        with opened as connection:
            if server.tls == "starttls":
                connection.starttls(context=context)
            if server.user is not None:
                connection.login(server.user, "" if server.password_file is None else _secret(server.password_file))
            connection.send_message(mail_message)
            accepted = True
    except smtplib.SMTPRecipientsRefused as error:
        reasons = "; ".join(
            f"{name}: {reason[1].decode('utf-8', 'replace')}" for name, reason in error.recipients.items()
        )
        raise UnreachableError(f"{where} refuses the recipient: {shown(reasons)}") from error
    except (OSError, smtplib.SMTPException) as error:
        # An error after the server accepted the mail is ignored: a retry would deliver it twice.
        if not accepted:
            kind = UnreachableError if isinstance(error, smtplib.SMTPResponseException) else MailServerDownError
            raise kind(f"{where}: {shown(str(error))}", hint="see mail.smtp of the policy") from error


def _secret(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", where=path) from error


def _command(mail_message: EmailMessage, digest: Digest, mail: MailPolicy) -> None:
    values = {"{to}": digest.recipient, "{subject}": shown(digest.subject, 200), "{user}": digest.user or ""}
    argv = list(mail.command)
    for place, value in values.items():
        # The program name is not substituted, and a value must not become an option.
        argv[1:] = [
            word.replace(place, value) if not (word == place and value.startswith("-")) else "" for word in argv[1:]
        ]
    process.run(argv, timeout_s=COMMAND_S, stdin=mail_message.as_bytes(), group=True)


class _Webhook:
    """Sends the mails of a run to a webhook."""

    def __init__(self, mail: MailPolicy, sleep: Callable[[float], None]) -> None:
        self._mail, self._sleep = mail, sleep
        self._left_s = _LONGEST_WAITS_S

    def send(self, digest: Digest, url: str) -> None:
        headers = {"Content-Type": "application/json"}
        if self._mail.webhook_token_file is not None:
            headers["Authorization"] = f"Bearer {_secret(self._mail.webhook_token_file)}"
        body = json.dumps(webhook_body(digest, self._mail.webhook_format)).encode()
        response = self._post(url, headers, body)
        waited_s = 0.0
        while response.status == _LIMITED:
            requested_s = retry_after_s(response.headers)
            wait_s = _DEFAULT_WAIT_S if requested_s is None else max(requested_s, 0.1)
            if waited_s + wait_s > min(_LONGEST_WAIT_S, self._left_s + waited_s):
                break
            self._sleep(wait_s)
            waited_s, self._left_s = waited_s + wait_s, self._left_s - wait_s
            response = self._post(url, headers, body)
        if not 200 <= response.status < 300:
            raise UnreachableError(f"{_server(url)} answers {response.status} {shown(response.reason)}")

    @staticmethod
    def _post(url: str, headers: dict[str, str], body: bytes) -> HttpResponse:
        try:  # a redirected POST would become a GET without the mail
            return fetch(url, headers=headers, body=body, timeout_s=WEBHOOK_S, largest=None, tls=tls_context(None))
        except HttpError as error:
            raise MailServerDownError(f"{_server(url)}: {shown(str(error))}") from error


def _server(url: str) -> str:
    """Return the part of a URL that may be shown: the path of a webhook is its password."""
    parts = urlsplit(url)
    return f"webhook {parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}"
