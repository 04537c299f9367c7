"""Mails of the nightly run about the use of GPUs: recipients, once each, failures."""

from __future__ import annotations

import contextlib
import email
import email.policy
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import mail_server
import pytest
import waste_samples

from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.base.config import PublishedPagesConfig, UsageMailConfig
from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.db.repository import Repository
from slurm_affinode.model.cleanup import MailPolicy, Smtp
from slurm_affinode.pipeline.mail_delivery import postman
from slurm_affinode.pipeline.nightly import Failure
from slurm_affinode.pipeline.report_archive import Period
from slurm_affinode.pipeline.usage_mails import UsageMails, page_address, recipients, to_files
from slurm_affinode.report.mail import Digest
from slurm_affinode.report.usage_mail import UsageScope

UNTIL = datetime(2026, 11, 9, tzinfo=UTC)
WEEK = Period("week", "2026-W45", UNTIL - timedelta(days=7), UNTIL)
POLICY = MailPolicy(admins=("root@example.org",), address="{user}@example.org")
ALL = UsageMailConfig(periods=("week",), users=True, accounts={"project00": ("user03", "lead@example.com")})


@pytest.fixture(scope="module")
def figures() -> WasteResult:
    return waste_samples.make_result()


@pytest.fixture
def store(tmp_path: Path) -> Repository:
    return Repository.open(f"sqlite:///{tmp_path}/db.sqlite")


class Outbox:
    """Accepts mails, but for addresses that are refused."""

    def __init__(self, refused: str = "") -> None:
        self.mails: list[Digest] = []
        self.refused = refused

    def __call__(self, digest: Digest) -> None:
        if self.refused and self.refused in digest.recipient:
            raise UnreachableError("the mail server refuses the recipient")
        self.mails.append(digest)


def mails(outbox: Callable[[Digest], None], settings: UsageMailConfig = ALL, **changes: object) -> UsageMails:
    made = UsageMails(settings, POLICY, outbox, UNTIL + timedelta(hours=4), "UTC")
    return replace(made, **changes)  # type: ignore[arg-type]


def sent(made: UsageMails, store: Repository, figures: WasteResult) -> list[str | Failure]:
    return list(made.send(store, WEEK, lambda: figures))


def test_administrators_accounts_and_users_get_their_mails(figures: WasteResult) -> None:
    chosen = recipients(figures, ALL, POLICY)
    assert [(job.address, job.scope.kind, job.user) for job in chosen[:3]] == [
        ("root@example.org", "site", None), ("user03@example.org", "account", "user03"),
        ("lead@example.com", "account", None),
    ]  # fmt: skip
    users = {item.scope.name for item in chosen[3:]}
    idle = figures.groups["user"].filter(figures.groups["user"]["gpu_hours_idle"] >= 1.0)
    assert users == set(idle["name"].drop_nulls())
    assert recipients(figures, replace(ALL, admins=False, users=False, accounts={}), POLICY) == []
    assert [
        recipient.scope.kind for recipient in recipients(figures, replace(ALL, min_idle_gpu_hours=1e6), POLICY)
    ] == ["site"]


def test_unknown_idle_time_is_no_reason_for_a_mail() -> None:
    unmeasured = waste_samples.make_result(measured=False)
    chosen = recipients(unmeasured, replace(ALL, min_idle_gpu_hours=0.0), POLICY)
    assert [item.scope.kind for item in chosen] == ["site"]


def test_each_mail_is_sent_once(store: Repository, figures: WasteResult) -> None:
    outbox = Outbox()
    assert mails(outbox).due(store, WEEK)
    sent(mails(outbox), store, figures)
    number = len(outbox.mails)
    assert number == len(recipients(figures, ALL, POLICY))
    assert not mails(outbox).due(store, WEEK)
    assert sent(mails(outbox), store, figures) == ["0 mails about week 2026-W45"]
    assert len(outbox.mails) == number


def test_failed_mail_stops_no_other_and_is_sent_by_the_next_run(store: Repository, figures: WasteResult) -> None:
    outbox = Outbox(refused="lead@")
    *_, failure = sent(mails(outbox), store, figures)
    assert isinstance(failure, Failure)
    assert "1 mail not sent: lead@example.com: the mail server refuses the recipient" in failure.message
    assert len(outbox.mails) == len(recipients(figures, ALL, POLICY)) - 1
    again = Outbox()
    assert mails(again).due(store, WEEK)
    sent(mails(again), store, figures)
    assert [mail.recipient for mail in again.mails] == ["lead@example.com"]
    assert not mails(again).due(store, WEEK)


@contextlib.contextmanager
def down() -> Iterator[Smtp]:
    """Return the address of a server that does not run."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    yield Smtp("127.0.0.1", port)


@pytest.mark.parametrize(
    ("server", "reason", "delivered"),
    [
        (down, "Connection refused", 0),
        (mail_server.hanging, "timed out", 0),
        (partial(mail_server.serving, b"RCPT", b"451 4.7.1 too many mails, try later", 2), "too many mails", 2),
        (partial(mail_server.serving, b"RCPT", b"452 4.2.2 mailbox full"), "mailbox full", 0),
        (partial(mail_server.serving, b"MAIL", b"421 4.7.0 rate limit", 3), "rate limit", 3),
        (partial(mail_server.serving, b"DATA", b"554 5.7.1 looks like spam"), "looks like spam", 0),
    ],
    ids=["down", "hangs", "rate-limit", "full", "rate-limit-of-sender", "refused"],
)
def test_fault_of_the_mail_server_is_one_line_and_loses_no_mail(
    server: Callable[[], AbstractContextManager[Smtp]], reason: str, delivered: int, store: Repository,
    figures: WasteResult,
) -> None:  # fmt: skip
    """The next run sends exactly the mails that are missing."""

    def run(smtp: Smtp) -> tuple[list[str | Failure], set[str]]:
        policy = replace(POLICY, via="smtp", smtp=smtp)
        outcome = sent(mails(postman(policy, lambda: UNTIL), policy=policy), store, figures)
        read = [email.message_from_bytes(raw, policy=email.policy.default) for raw in mail_server.Server.got]
        return outcome, {str(mail["To"]) for mail in read}

    everyone = {recipient.address for recipient in recipients(figures, ALL, POLICY)}
    mail_server.Server.got.clear()
    with server() as smtp:
        (summary, failure), first = run(smtp)
    assert summary == f"{delivered} mails about week 2026-W45"
    assert isinstance(failure, Failure)
    assert reason in failure.message
    assert "\n" not in failure.message
    assert failure.message.startswith(f"{len(recipients(figures, ALL, POLICY)) - delivered} mails not sent: ")
    with mail_server.serving() as smtp:
        outcome, second = run(smtp)
    assert outcome == [f"{len(recipients(figures, ALL, POLICY)) - delivered} mails about week 2026-W45"]
    assert first | second == everyone
    assert len(first) == delivered


def test_fault_in_one_mail_stops_no_other(store: Repository, figures: WasteResult) -> None:
    """Such as one in a template of the site; the run reports it on one line."""
    taken: list[str] = []

    def post(digest: Digest) -> None:
        if "lead@" in digest.recipient:
            raise ZeroDivisionError("in a\ntemplate")
        taken.append(digest.recipient)

    *_, failure = sent(mails(post), store, figures)
    assert isinstance(failure, Failure)
    assert "lead@example.com: in a template" in failure.message
    assert len(taken) == len(recipients(figures, ALL, POLICY)) - 1


def test_only_chosen_periods_that_ended_lately_are_mailed(store: Repository) -> None:
    assert not mails(Outbox(), UsageMailConfig(periods=("day",))).due(store, WEEK)
    assert not mails(Outbox(), now=UNTIL + timedelta(days=4)).due(store, WEEK)
    assert not mails(Outbox(), now=UNTIL - timedelta(hours=1)).due(store, WEEK)
    assert mails(Outbox(), now=UNTIL + timedelta(days=3)).due(store, WEEK)


def test_users_who_opted_out_get_no_mail(
    store: Repository, figures: WasteResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also none about an account; without a safe directory, no mail at all."""
    directory = tmp_path / "no-mail"
    directory.mkdir(mode=0o755)
    (directory / "file").touch()
    os.chown(directory / "file", 60_003, 60_003)
    known = {"user03": 60_003}
    monkeypatch.setattr("slurm_affinode.pipeline.usage_mails.uid_of_user", known.get)
    outbox = Outbox()
    sent(mails(outbox, replace(ALL, opt_out=directory)), store, figures)
    assert outbox.mails
    assert [mail.recipient for mail in outbox.mails if "user03" in mail.recipient] == []
    assert all("mail off" in mail.text for mail in outbox.mails if mail.user is not None)
    directory.chmod(0o777)
    with pytest.raises(AffinodeError, match="is not used"):
        sent(mails(outbox, replace(ALL, opt_out=directory)), store, figures)


def test_mails_link_to_pages_that_are_made(store: Repository, figures: WasteResult, tmp_path: Path) -> None:
    """Not to a relative address, not to the page of an account that is not listed, and not of the whole site."""
    pages = PublishedPagesConfig(directory=tmp_path, url="https://gpu.example.org/pages/")
    assert page_address(pages, UsageScope("user", "a@b")) == "https://gpu.example.org/pages/user/a%40b/"
    assert page_address(pages, UsageScope("user", "../x")) is None
    assert page_address(pages, UsageScope("account", "vision")) is None
    assert page_address(replace(pages, accounts={"vision": ("alice",)}), UsageScope("account", "vision")) is not None
    assert page_address(pages, UsageScope("site")) is None
    assert page_address(replace(pages, url="../pages"), UsageScope("user", "alice")) is None
    outbox = Outbox()
    sent(mails(outbox, pages=pages), store, figures)
    with_page = {mail.user for mail in outbox.mails if "https://gpu.example.org/pages/user/" in mail.text}
    assert with_page == {
        recipient.user for recipient in recipients(figures, ALL, POLICY) if recipient.scope.kind == "user"
    }


def test_mails_are_written_to_files_and_not_recorded(store: Repository, figures: WasteResult, tmp_path: Path) -> None:
    post = to_files(tmp_path / "mails", POLICY, UNTIL)
    made = mails(post, recorded=False)
    sent(made, store, figures)
    files = sorted((tmp_path / "mails").iterdir())
    assert len(files) == len(recipients(figures, ALL, POLICY))
    sent(made, store, figures)
    assert sorted((tmp_path / "mails").iterdir()) == files, "the same files again"
    read = [email.message_from_bytes(path.read_bytes(), policy=email.policy.default) for path in files]
    assert "root@example.org" in {str(mail["To"]) for mail in read}
    assert mails(Outbox()).due(store, WEEK)


def test_address_cannot_leave_the_directory(store: Repository, figures: WasteResult, tmp_path: Path) -> None:
    policy = MailPolicy(admins=("../../etc/x",))
    made = mails(to_files(tmp_path / "mails", policy, UNTIL), replace(ALL, users=False, accounts={}), policy=policy)
    sent(replace(made, recorded=False), store, figures)
    assert [path.parent for path in tmp_path.rglob("*.eml")] == [tmp_path / "mails"]
