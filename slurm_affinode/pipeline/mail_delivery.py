"""Mail delivery through a mail server, a command, or a webhook. One attempt per mail; an error is one line."""

from __future__ import annotations

import json
import smtplib
from collections.abc import Callable
from datetime import datetime
from email.message import EmailMessage
from pathlib import Path

from slurm_affinode.base import process
from slurm_affinode.base.errors import AffinodeError, InputError, UnreachableError
from slurm_affinode.base.http import HttpError, fetch, tls_context
from slurm_affinode.model.cleanup import MailPolicy, Smtp
from slurm_affinode.report.mail import Digest, message, shown

COMMAND_S = 60.0
WEBHOOK_S = 30.0

MOST_UNANSWERED = 3
"""Maximum consecutive attempts without a response from the server: otherwise 200 mails would wait for hours."""

Post = Callable[[Digest], None]


class MailServerDownError(UnreachableError):
    """The server cannot be reached, independently of the recipient."""


def postman(mail: MailPolicy, now: Callable[[], datetime]) -> Post:
    """Return a function that sends digests during one run. It raises ``AffinodeError`` if a mail cannot be sent."""
    unanswered: list[MailServerDownError] = []

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
        made = message(digest, mail, now())
        if mail.via == "smtp":
            _smtp(made, mail.smtp)
        elif mail.via == "command":
            _command(made, digest, mail)
        elif mail.via == "webhook" and mail.webhook is not None:
            _webhook(digest, mail.webhook, mail.webhook_token_file)
        else:
            raise AffinodeError(
                "mail is disabled: the policy has mail.via = none", hint="set mail.via to smtp, command or webhook"
            )

    return post


def _smtp(made: EmailMessage, server: Smtp) -> None:
    where = f"mail server {server.host}:{server.port}"
    context, taken = tls_context(server.ca_file), False
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
            connection.send_message(made)
            taken = True
    except smtplib.SMTPRecipientsRefused as error:
        reasons = "; ".join(
            f"{name}: {reason[1].decode('utf-8', 'replace')}" for name, reason in error.recipients.items()
        )
        raise UnreachableError(f"{where} refuses the recipient: {shown(reasons)}") from error
    except (OSError, smtplib.SMTPException) as error:
        # An error after the server accepted the mail is ignored: a retry would deliver it twice.
        if not taken:
            kind = UnreachableError if isinstance(error, smtplib.SMTPResponseException) else MailServerDownError
            raise kind(f"{where}: {shown(str(error))}", hint="see mail.smtp of the policy") from error


def _secret(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", where=path) from error


def _command(made: EmailMessage, digest: Digest, mail: MailPolicy) -> None:
    values = {"{to}": digest.recipient, "{subject}": shown(digest.subject, 200), "{user}": digest.user or ""}
    argv = list(mail.command)
    for place, value in values.items():
        # The program name is not substituted, and a value must not become an option.
        argv[1:] = [
            word.replace(place, value) if not (word == place and value.startswith("-")) else "" for word in argv[1:]
        ]
    process.run(argv, timeout_s=COMMAND_S, stdin=made.as_bytes(), group=True)


def _webhook(digest: Digest, url: str, token_file: str | None) -> None:
    body = {"to": digest.recipient, "user": digest.user, "subject": digest.subject, "text": digest.text,
            "html": digest.html}  # fmt: skip
    headers = {"Content-Type": "application/json"}
    if token_file is not None:
        headers["Authorization"] = f"Bearer {_secret(token_file)}"
    try:  # a redirected POST would become a GET without the mail
        response = fetch(
            url,
            headers=headers,
            body=json.dumps(body).encode(),
            timeout_s=WEBHOOK_S,
            largest=None,
            tls=tls_context(None),
        )
    except HttpError as error:
        raise MailServerDownError(f"{url}: {shown(str(error))}") from error
    if not 200 <= response.status < 300:
        raise UnreachableError(f"{url} answers {response.status} {shown(response.reason)}")
