"""Delivery of mail by SMTP, command or webhook, and its errors."""

from __future__ import annotations

import contextlib
import json
import smtplib
import threading
from collections.abc import Iterator
from dataclasses import replace
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from mail_server import Server, serving
from zombie_samples import NOW

from slurm_affinode.base.errors import AffinodeError, InputError, UnreachableError
from slurm_affinode.model.cleanup import MailPolicy, Smtp
from slurm_affinode.pipeline.mail_delivery import postman
from slurm_affinode.report.mail import Digest

DIGEST = Digest("alice@example.org", "alice", "Betreff \u00e4 \u00df", "Text\n", "<p>Text</p>")


def send(policy: MailPolicy) -> None:
    postman(policy, lambda: NOW)(DIGEST)


def test_mail_is_sent_by_smtp() -> None:
    """With text and HTML parts, marked as auto-generated."""
    with serving() as smtp:
        send(MailPolicy(via="smtp", smtp=smtp, sender="gpus@example.org", reply_to="ops@example.org"))
    [raw] = Server.got
    mail = message_from_bytes(raw)
    assert (mail["To"], mail["From"], mail["Reply-To"]) == ("alice@example.org", "gpus@example.org", "ops@example.org")
    assert mail["Auto-Submitted"] == "auto-generated"
    assert [part.get_content_type() for part in mail.walk()] == ["multipart/alternative", "text/plain", "text/html"]


def test_smtp_errors_are_reported() -> None:
    with serving(b"RCPT") as smtp, pytest.raises(UnreachableError, match="no such user here"):
        send(MailPolicy(via="smtp", smtp=smtp))
    with pytest.raises(UnreachableError, match="mail server 127"):
        send(MailPolicy(via="smtp", smtp=Smtp("127.0.0.1", 1, timeout_s=60.0)))
    with serving() as smtp, pytest.raises(InputError, match="cannot be read"):
        send(MailPolicy(via="smtp", smtp=Smtp("127.0.0.1", smtp.port, user="u", password_file="/nowhere")))


def test_error_at_quit_does_not_fail_delivery() -> None:
    """Otherwise the mail would be sent twice."""
    with serving(b"QUIT") as smtp:
        send(MailPolicy(via="smtp", smtp=smtp))
    assert len(Server.got) == 1


def test_unreachable_server_is_not_tried_for_every_mail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred timeouts would take hours; a refused recipient does not count."""
    connections: list[str] = []
    answers: list[Exception] = [TimeoutError("timed out")] * 9

    def connect(host: str, *_: object, **__: object) -> None:
        connections.append(host)
        raise answers[len(connections) - 1]

    monkeypatch.setattr("smtplib.SMTP", connect)
    policy = MailPolicy(via="smtp", smtp=Smtp("mail.example.org"))
    post = postman(policy, lambda: NOW)
    errors = []
    for _ in range(5):
        with pytest.raises(UnreachableError) as caught:
            post(DIGEST)
        errors.append(str(caught.value))
    assert len(connections) == 3
    assert "skipped after 3 without a response: mail server mail.example.org:25: timed out" in errors[-1]
    connections.clear()
    answers[1] = smtplib.SMTPSenderRefused(550, b"not you", "a@b")
    post = postman(policy, lambda: NOW)
    for _ in range(5):
        with pytest.raises(UnreachableError):
            post(DIGEST)
    assert len(connections) == 5


def test_mail_is_sent_by_command(tmp_path: Path) -> None:
    """The mail is on standard input, values are arguments, and no shell is involved."""
    program = tmp_path / "mail"
    program.write_text(f'#!/bin/sh\nprintf "%s|" "$@" > {tmp_path}/args\ncat > {tmp_path}/mail.txt\n')
    program.chmod(0o755)
    send(MailPolicy(via="command", command=(str(program), "-s", "{subject}", "to={to}", "$(id)")))
    assert (tmp_path / "args").read_text() == "-s|Betreff \u00e4 \u00df|to=alice@example.org|$(id)|"
    assert b"alice@example.org" in (tmp_path / "mail.txt").read_bytes()
    program.write_text("#!/bin/sh\necho mailbox is full >&2; exit 75\n")
    with pytest.raises(UnreachableError, match="mailbox is full"):
        send(MailPolicy(via="command", command=(str(program),)))


@pytest.mark.parametrize("recipient", ["-oQ/tmp@example.org", "-bs", "--", "-Xlog@example.org"])
def test_recipient_cannot_be_an_option_of_the_mail_program(tmp_path: Path, recipient: str) -> None:
    """sendmail has options that write a log or read another configuration."""
    program = tmp_path / "mail"
    program.write_text(f'#!/bin/sh\nprintf "%s|" "$@" > {tmp_path}/args\ncat >/dev/null\n')
    program.chmod(0o755)
    policy = MailPolicy(via="command", command=(str(program), "-i", "{to}", "{user}", "{subject}"))
    digest = replace(DIGEST, recipient=recipient, user="-f", subject="-C/tmp/evil.cf")
    postman(policy, lambda: NOW)(digest)
    assert (tmp_path / "args").read_text() == "-i||||"


def test_mail_is_sent_by_webhook(tmp_path: Path) -> None:
    """JSON by POST with a token; a status other than 2xx is a failure."""
    seen: list[Any] = []
    status = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.headers["Authorization"], json.loads(body)))
            self.send_response(status[0])
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    token = tmp_path / "token"
    token.write_text("secret\n")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        policy = MailPolicy(
            via="webhook", webhook=f"http://127.0.0.1:{server.server_address[1]}/x", webhook_token_file=str(token)
        )
        send(policy)
        for status[0] in (503, 302):  # a redirect is no delivery: it would become a GET
            with pytest.raises(UnreachableError, match=f"answers {status[0]}"):
                send(policy)
        server.shutdown()
        thread.join()
    assert seen[0][0] == "Bearer secret"
    assert seen[0][1]["user"] == "alice"
    with pytest.raises(UnreachableError):
        send(policy)


Answers = list[tuple[int, dict[str, str]]]


@contextlib.contextmanager
def webhook(answers: Answers, form: str = "json") -> Iterator[tuple[MailPolicy, list[Any]]]:
    """Run a server that gives these answers, the last one again and again; yield a policy and the bodies it gets."""
    bodies: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, headers = answers[min(len(bodies), len(answers)) - 1]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/services/T0/B0/secret"
        yield MailPolicy(via="webhook", webhook=url, webhook_format=form), bodies  # type: ignore[arg-type]
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("form", "key"), [("slack", "blocks"), ("mattermost", "text"), ("teams", "attachments")])
def test_webhook_gets_the_form_of_its_service(form: str, key: str) -> None:
    with webhook([(202, {})], form) as (policy, bodies):
        send(policy)
    assert key in bodies[0]


def test_rate_limit_of_a_webhook_is_respected() -> None:
    """It is tried again when the server says; a mail that would wait for long is left to the next run."""
    limited = (429, {"Retry-After": "7"})
    slept: list[float] = []
    with webhook([limited, (429, {}), (200, {})]) as (policy, bodies):
        postman(policy, lambda: NOW, slept.append)(DIGEST)
    assert (slept, len(bodies)) == ([7.0, 1.0], 3)
    slept.clear()
    with webhook([(429, {"Retry-After": "3600"})]) as (policy, bodies):
        with pytest.raises(UnreachableError, match="answers 429 Too Many Requests"):
            postman(policy, lambda: NOW, slept.append)(DIGEST)
        assert (slept, len(bodies)) == ([], 1)


def test_waits_for_a_webhook_are_limited() -> None:
    """Those of one mail, and those of all mails of a run."""
    slept: list[float] = []
    with webhook([(429, {"Retry-After": "20"})]) as (policy, _):
        post = postman(policy, lambda: NOW, slept.append)
        for number in range(9):
            with pytest.raises(UnreachableError, match="answers 429"):
                post(DIGEST)
            assert sum(slept) == min(60.0 * (number + 1), 300.0)


def test_address_of_a_webhook_is_not_shown() -> None:
    """Knowing it suffices to post to the channel."""
    with webhook([(404, {})]) as (policy, _), pytest.raises(UnreachableError) as refused:
        send(policy)
    with pytest.raises(UnreachableError) as unreachable:
        send(policy)
    for error in (refused, unreachable):
        assert "webhook http://127.0.0.1:" in str(error.value)
        assert "secret" not in str(error.value)


def test_mail_without_transport_is_an_error() -> None:
    with pytest.raises(AffinodeError, match=r"mail\.via = none"):
        send(MailPolicy())
