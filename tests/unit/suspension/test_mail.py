"""Mails of the agent: at most one per event, rate-limited per user, and never blocking a suspension."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from email import message_from_bytes, policy
from pathlib import Path
from typing import Any

import pytest
from agent_site import World
from agent_world import Agent
from mail_server import Server, serving

from slurm_affinode.base.config import parse
from slurm_affinode.base.errors import ConfigError, UnreachableError
from slurm_affinode.base.threads import Workers
from slurm_affinode.model.cleanup import MailPolicy
from slurm_affinode.model.suspension import MAIL_KINDS, JobKey, SuspensionMail
from slurm_affinode.report.suspension_mail import suspension_digest
from slurm_affinode.suspension import mail
from slurm_affinode.suspension.context import SuspendSettings
from slurm_affinode.suspension.mail import Mailer, event

SLEEPS = SuspensionMail("suspended", "cluster", 7, "alice", "c1", 1e9, "cluster.7.1", why="idle 15m", wake="auto")


class Out:
    """Records sent mails."""

    def __init__(self, fails: int = 0) -> None:
        self.mails: list[SuspensionMail] = []
        self.fails = fails

    def __call__(self, mail: SuspensionMail) -> None:
        if self.fails:
            self.fails -= 1
            raise UnreachableError("mail server localhost:25: refused")
        self.mails.append(mail)


def test_event_is_mailed_once(tmp_path: Path) -> None:
    """The next agent, in which recovery repeats the event, does not mail it again."""
    out = Out()
    for _ in range(2):
        mailer = Mailer(out, Workers(), kinds=MAIL_KINDS, marks=tmp_path / "mailed")
        mailer.deliver(SLEEPS)
        mailer.deliver(SLEEPS)
        mailer.deliver(replace(SLEEPS, kind="restored"))
        mailer._queue.join()
    assert [mail.kind for mail in out.mails] == ["suspended", "restored"]


def test_only_configured_kinds_are_mailed() -> None:
    out = Out()
    mailer = Mailer(out, Workers(), kinds=["failed"])
    mailer.deliver(SLEEPS)
    mailer.deliver(replace(SLEEPS, kind="failed"))
    mailer._queue.join()
    assert [mail.kind for mail in out.mails] == ["failed"]


def test_mails_per_user_and_hour_are_limited() -> None:
    """Other users still get theirs; the next mail gives the number of dropped mails."""
    out, clock = Out(), [1e9]
    mailer = Mailer(out, Workers(), kinds=MAIL_KINDS, most_per_hour=3, now=lambda: clock[0])
    for job in range(8):
        mailer.deliver(replace(SLEEPS, job_id=job))
    mailer.deliver(replace(SLEEPS, user="bob"))
    mailer._queue.join()
    assert [(mail.user, mail.job_id) for mail in out.mails] == [("alice", 0), ("alice", 1), ("alice", 2), ("bob", 7)]
    clock[0] += 3601
    mailer.deliver(replace(SLEEPS, job_id=9))
    mailer.deliver(replace(SLEEPS, job_id=10))
    mailer._queue.join()
    assert [(mail.job_id, mail.left_out) for mail in out.mails[4:]] == [(9, 5), (10, 0)]
    assert "5 more mails to you were not sent" in suspension_digest(out.mails[4], MailPolicy()).text


def test_failed_mail_is_retried_and_then_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """Each failure is one line of the log."""
    out = Out(fails=2)
    mailer = Mailer(out, Workers(), kinds=MAIL_KINDS, pauses_s=(0.0, 0.0))
    mailer.deliver(SLEEPS)
    mailer._queue.join()
    assert len(out.mails) == 1
    out.fails = 3
    mailer.deliver(SLEEPS)
    mailer._queue.join()
    assert len(out.mails) == 1
    assert caplog.text.count("job 7: no mail to alice: mail server localhost:25: refused") == 5


def test_mails_do_not_block(caplog: pytest.LogCaptureFixture) -> None:
    """A server that hangs delays the mails behind it, and excess mails are dropped."""
    going = threading.Event()
    came = threading.Event()

    def hang(_: SuspensionMail) -> None:
        came.set()
        assert going.wait(60)

    mailer = Mailer(hang, Workers(), kinds=MAIL_KINDS, most_per_hour=10_000)
    mailer.deliver(SLEEPS)
    assert came.wait(60)
    for _ in range(mail._WAITING + 1):
        mailer.deliver(SLEEPS)
    assert caplog.text.count("others wait") == 1
    mailer.stop()
    going.set()
    mailer._queue.join()


def test_unexpected_error_does_not_end_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither does an unwritable directory; nothing is sent then, since it could be sent twice."""
    calls: list[int] = []

    def broken(mail: SuspensionMail) -> None:
        calls.append(mail.job_id)
        raise ZeroDivisionError

    mailer = Mailer(broken, Workers(), kinds=MAIL_KINDS)
    mailer.deliver(SLEEPS)
    mailer.deliver(SLEEPS)
    mailer._queue.join()
    assert calls == [7, 7]
    (tmp_path / "file").touch()
    out = Out()
    mailer = Mailer(out, Workers(), kinds=MAIL_KINDS, marks=tmp_path / "file" / "mailed")
    mailer.deliver(SLEEPS)
    mailer.deliver(replace(SLEEPS, once="../x"))
    mailer._queue.join()
    assert out.mails == []
    assert "Not a directory" in caplog.text


def test_old_marks_of_mails_are_removed(tmp_path: Path) -> None:
    clock = [2e9]
    mailer = Mailer(Out(), Workers(), kinds=MAIL_KINDS, marks=tmp_path, now=lambda: clock[0])
    mailer.deliver(SLEEPS)
    mailer._queue.join()
    assert list(tmp_path.iterdir()) == []
    assert event(JobKey("cluster", 7, 1), 1.5, 2) == "cluster.7.1500.2"


# --- end to end


@pytest.fixture
def post(tmp_path: Path) -> Callable[[int, str], Mailer]:
    """A mailer created from the configuration; it starts the real program."""

    def made(port: int, kinds: str) -> Mailer:
        (tmp_path / "zombies.toml").write_text(
            f'[mail]\nvia = "smtp"\naddress = "{{user}}@example.org"\nlanguages = {{ bob = "de" }}\n'
            f'smtp = {{ host = "127.0.0.1", port = {port}, timeout = "10s" }}\n'
        )
        text = (
            f'[zombies]\npolicy = "{tmp_path}/zombies.toml"\n[cluster]\ntimezone = "UTC"\n'
            f'[suspend]\njournal = "{tmp_path}/journal"\nmail = [{kinds}]\n'
        )
        return mail.mailer(parse(text, where="config.toml"), Workers())

    return made


def mails() -> list[tuple[str, str, str, str]]:
    """Return recipient, subject, text and HTML of the mails accepted by the server."""
    result = [message_from_bytes(raw, policy=policy.default) for raw in Server.got]
    return [
        (item["To"], item["Subject"], *(item.get_body((kind,)).get_content() for kind in ("plain", "html")))
        for item in result
    ]


def test_suspension_and_restore_are_mailed(tmp_path: Path, post: Callable[[int, str], Mailer]) -> None:
    """A separate program sends them through a mail server, in the language of the recipient."""
    world = World(tmp_path / "world")
    world.start_run("c1")
    world.start_script("c1", 4711)
    with serving() as smtp:
        mailer = post(smtp.port, '"suspended", "restored"')
        agent = Agent(world, "c1", mailer=mailer)
        agent.suspend()
        agent.settle()
        mailer._queue.join()
        world.start_run("c2")
        world.nodes["c1"].init = None
        Agent(world, "c2", mailer=mailer).restore()
        mailer.deliver(replace(SLEEPS, user="bob", job_name="<b>\x1b[1m", once="x", wake="2027-01-01T06:00:00"))
        mailer._queue.join()
    sleeps, goes_on, german = mails()
    assert sleeps[:2] == ("alice@example.org", "[alpha] Job 7 is suspended")
    for text in sleeps[2:]:
        for part in ("Hello alice,", "idle 15m", "1 MiB", "H100", "c1", "UTC", "slurm-affinode wake 7", "scancel 7"):
            assert part in text
    assert goes_on[:2] == ("alice@example.org", "[alpha] Job 7 has resumed")
    assert "It resumed on c2 where it had stopped." in goes_on[2]
    assert german[1] == "[cluster] Job 7 wurde angehalten"
    assert "2027-01-01T06:00:00 von selbst" in german[2]
    assert "\x1b" not in german[2] + german[3]
    assert "&lt;b&gt;" in german[3]


@pytest.mark.parametrize(("fresh", "subject"), [(False, "is held"), (True, "starts afresh")])
def test_failed_restore_is_mailed(
    tmp_path: Path, post: Callable[[int, str], Mailer], fresh: bool, subject: str
) -> None:
    """The mail gives the reason and the consequence."""
    world = World(tmp_path / "world")
    world.start_run("c1")
    world.start_script("c1", 4711)
    agent = Agent(world, "c1")
    agent.suspend()
    agent.settle()
    for pages in (tmp_path / "world").rglob("pages-1.img"):
        pages.write_bytes(b"x" * pages.stat().st_size)
    world.start_run("c2")
    world.nodes["c1"].init = None
    with serving() as smtp:
        mailer = post(smtp.port, '"failed"')
        Agent(world, "c2", SuspendSettings(fresh=fresh), mailer=mailer).restore()
        mailer._queue.join()
    [(to, line, text, _)] = mails()
    assert to == "alice@example.org"
    assert line.endswith(subject)
    assert "its contents have changed" in text


@pytest.mark.parametrize(
    ("changes", "subject", "text", "todo"),
    [
        ({}, "Job 7 is suspended", "The next request wakes it.", "slurm-affinode wake 7"),
        ({"on_request": False}, "Job 7 is suspended", "It resumes by itself when GPUs are free", "scancel 7"),
        (
            {"kind": "restored"},
            "Job 7 has resumed",
            "It runs again on c1, with its GPU memory.",
            "slurm-affinode status 7",
        ),
        ({"kind": "failed"}, "could not be woken and remains asleep", "the agent retries", "slurm-affinode wake 7"),
        (
            {"kind": "failed", "ended": True},
            "was canceled",
            "longer for its GPU memory on c1",
            "slurm-affinode status 7",
        ),
    ],
)
def test_mail_for_job_suspended_in_place(changes: dict[str, Any], subject: str, text: str, todo: str) -> None:
    """It has no image and keeps its allocation: nothing is saved, held or restored. This holds in every language."""
    mail = replace(SLEEPS, **{"in_place": True, "on_request": True, **changes})
    made = suspension_digest(mail, MailPolicy())
    assert subject in made.subject
    for part in (text, todo):
        assert part in made.text
        assert part in made.html
    assert "image" not in made.text
    assert "Job 7" in suspension_digest(mail, MailPolicy(language="de")).text


def test_unreachable_mail_server_is_logged_in_one_line(
    post: Callable[[int, str], Mailer], caplog: pytest.LogCaptureFixture
) -> None:
    mailer = post(1, '"suspended"')
    mailer._pauses_s = ()
    mailer.deliver(SLEEPS)
    mailer._queue.join()
    assert "job 7: no mail to alice: mail server 127.0.0.1:1: " in caplog.text
    assert "Traceback" not in caplog.text


def test_mail_configuration_is_validated() -> None:
    with pytest.raises(ConfigError, match=r"suspend\.mail: 'sleeping' is not one of suspended, restored, failed"):
        parse('[suspend]\nmail = ["sleeping"]\n', where="config.toml")
    assert mail.mailer(parse("", where="config.toml"), Workers()) is mail.NO_MAILS


def test_agent_does_not_import_mail_modules() -> None:
    """The templates and mail modules take 10 MB and are only loaded by the separate program."""
    code = "import sys, slurm_affinode.agent.composition\nprint([m for m in ('jinja2', 'smtplib') if m in sys.modules])"
    from slurm_affinode.base import process

    assert process.run([sys.executable, "-P", "-c", code], timeout_s=60).stdout == b"[]\n"
