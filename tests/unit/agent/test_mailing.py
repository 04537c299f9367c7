"""Mails of the agent: at most one for an event, not too many for a user, and never in the way of a suspension."""

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

from slurm_affinode.agent import mailing
from slurm_affinode.agent.mailing import Mailer, event
from slurm_affinode.agent.parts import Settings
from slurm_affinode.config import parse
from slurm_affinode.errors import ConfigError, UnreachableError
from slurm_affinode.model.cleanup import MailPolicy
from slurm_affinode.model.suspension import JobKey
from slurm_affinode.model.suspension_mail import MAIL_KINDS, SuspensionMail
from slurm_affinode.report.suspension_mail import suspension_digest

SLEEPS = SuspensionMail("suspended", "cluster", 7, "alice", "c1", 1e9, "cluster.7.1", why="idle 15m", wake="auto")


class Out:
    """What was sent."""

    def __init__(self, fails: int = 0) -> None:
        self.mails: list[SuspensionMail] = []
        self.fails = fails

    def __call__(self, mail: SuspensionMail) -> None:
        if self.fails:
            self.fails -= 1
            raise UnreachableError("mail server localhost:25: refused")
        self.mails.append(mail)


def test_an_event_is_mailed_once(tmp_path: Path) -> None:
    """Also by the next agent, to which recovery tells it again."""
    out = Out()
    for _ in range(2):
        mailer = Mailer(out, kinds=MAIL_KINDS, marks=tmp_path / "mailed")
        mailer.tell(SLEEPS)
        mailer.tell(SLEEPS)
        mailer.tell(replace(SLEEPS, kind="restored"))
        mailer.settle()
    assert [mail.kind for mail in out.mails] == ["suspended", "restored"]


def test_only_what_the_site_asked_for_is_mailed() -> None:
    out = Out()
    mailer = Mailer(out, kinds=["failed"])
    mailer.tell(SLEEPS)
    mailer.tell(replace(SLEEPS, kind="failed"))
    mailer.settle()
    assert [mail.kind for mail in out.mails] == ["failed"]


def test_a_user_gets_only_so_many_in_an_hour() -> None:
    """Others still get theirs; the next mail says how many were left out."""
    out, clock = Out(), [1e9]
    mailer = Mailer(out, kinds=MAIL_KINDS, most_per_hour=3, now=lambda: clock[0])
    for job in range(8):
        mailer.tell(replace(SLEEPS, job_id=job))
    mailer.tell(replace(SLEEPS, user="bob"))
    mailer.settle()
    assert [(mail.user, mail.job_id) for mail in out.mails] == [("alice", 0), ("alice", 1), ("alice", 2), ("bob", 7)]
    clock[0] += 3601
    mailer.tell(replace(SLEEPS, job_id=9))
    mailer.tell(replace(SLEEPS, job_id=10))
    mailer.settle()
    assert [(mail.job_id, mail.left_out) for mail in out.mails[4:]] == [(9, 5), (10, 0)]
    assert "5 further mails to you were not sent" in suspension_digest(out.mails[4], MailPolicy()).text


def test_a_mail_that_does_not_leave_is_tried_again_and_then_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """What went wrong is one line of the log."""
    out = Out(fails=2)
    mailer = Mailer(out, kinds=MAIL_KINDS, pauses_s=(0.0, 0.0))
    mailer.tell(SLEEPS)
    mailer.settle()
    assert len(out.mails) == 1
    out.fails = 3
    mailer.tell(SLEEPS)
    mailer.settle()
    assert len(out.mails) == 1
    assert caplog.text.count("job 7: no mail to alice: mail server localhost:25: refused") == 5


def test_nobody_waits_for_a_mail(caplog: pytest.LogCaptureFixture) -> None:
    """A server that hangs holds back the mails behind it, and what is too much is dropped."""
    going = threading.Event()
    came = threading.Event()

    def hang(_: SuspensionMail) -> None:
        came.set()
        assert going.wait(60)

    mailer = Mailer(hang, kinds=MAIL_KINDS, most_per_hour=10_000)
    mailer.tell(SLEEPS)
    assert came.wait(60)
    for _ in range(mailing._WAITING + 1):
        mailer.tell(SLEEPS)
    assert caplog.text.count("others wait") == 1
    mailer.stop()
    going.set()
    mailer.settle()


def test_an_unexpected_error_does_not_end_the_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor does a directory that cannot be written, where nothing is sent, since it could be sent twice."""
    calls: list[int] = []

    def broken(mail: SuspensionMail) -> None:
        calls.append(mail.job_id)
        raise ZeroDivisionError

    mailer = Mailer(broken, kinds=MAIL_KINDS)
    mailer.tell(SLEEPS)
    mailer.tell(SLEEPS)
    mailer.settle()
    assert calls == [7, 7]
    (tmp_path / "file").touch()
    out = Out()
    mailer = Mailer(out, kinds=MAIL_KINDS, marks=tmp_path / "file" / "mailed")
    mailer.tell(SLEEPS)
    mailer.tell(replace(SLEEPS, once="../x"))
    mailer.settle()
    assert out.mails == []
    assert "Not a directory" in caplog.text


def test_old_notes_of_mails_go(tmp_path: Path) -> None:
    clock = [2e9]
    mailer = Mailer(Out(), kinds=MAIL_KINDS, marks=tmp_path, now=lambda: clock[0])
    mailer.tell(SLEEPS)
    mailer.settle()
    assert list(tmp_path.iterdir()) == []
    assert event(JobKey("cluster", 7, 1), 1.5, 2) == "cluster.7.1500.2"


# --- the whole way


@pytest.fixture
def post(tmp_path: Path) -> Callable[[int, str], Mailer]:
    """A mailer as the configuration makes it; what it starts is the real program."""

    def made(port: int, kinds: str) -> Mailer:
        (tmp_path / "zombies.toml").write_text(
            f'[mail]\nvia = "smtp"\naddress = "{{user}}@example.org"\nlanguages = {{ bob = "de" }}\n'
            f'smtp = {{ host = "127.0.0.1", port = {port}, timeout = "10s" }}\n'
        )
        text = (
            f'[zombies]\npolicy = "{tmp_path}/zombies.toml"\n[cluster]\ntimezone = "UTC"\n'
            f'[suspend]\njournal = "{tmp_path}/journal"\nmail = [{kinds}]\n'
        )
        return mailing.mailer(parse(text, where="config.toml"))

    return made


def mails() -> list[tuple[str, str, str, str]]:
    """To, subject, text, HTML of what the server took."""
    found = [message_from_bytes(raw, policy=policy.default) for raw in Server.got]
    return [
        (one["To"], one["Subject"], *(one.get_body((kind,)).get_content() for kind in ("plain", "html")))
        for one in found
    ]


def test_a_suspension_and_a_restore_are_mailed(tmp_path: Path, post: Callable[[int, str], Mailer]) -> None:
    """By the program of its own, through a mail server; in the language of the reader."""
    world = World(tmp_path / "world")
    world.start_run("c1")
    world.start_script("c1", 4711)
    with serving() as smtp:
        mailer = post(smtp.port, '"suspended", "restored"')
        agent = Agent(world, "c1", mailer=mailer)
        agent.suspend()
        agent.settle()
        mailer.settle()
        world.start_run("c2")
        world.nodes["c1"].init = None
        Agent(world, "c2", mailer=mailer).restore()
        mailer.tell(replace(SLEEPS, user="bob", job_name="<b>\x1b[1m", once="x", wake="2027-01-01T06:00:00"))
        mailer.settle()
    sleeps, goes_on, german = mails()
    assert sleeps[:2] == ("alice@example.org", "[alpha] Job 7 sleeps")
    for text in sleeps[2:]:
        for part in ("Hello alice,", "idle 15m", "1 MiB", "H100", "c1", "UTC", "slurm-affinode wake 7", "scancel 7"):
            assert part in text
    assert goes_on[:2] == ("alice@example.org", "[alpha] Job 7 goes on")
    assert "It goes on at c2 where it had stopped." in goes_on[2]
    assert german[1] == "[cluster] Job 7 schläft"
    assert "2027-01-01T06:00:00 von selbst" in german[2]
    assert "\x1b" not in german[2] + german[3]
    assert "&lt;b&gt;" in german[3]


@pytest.mark.parametrize(("fresh", "subject"), [(False, "is held"), (True, "starts anew")])
def test_a_restore_that_fails_is_mailed(
    tmp_path: Path, post: Callable[[int, str], Mailer], fresh: bool, subject: str
) -> None:
    """With the reason, and what the site does then."""
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
        Agent(world, "c2", Settings(fresh=fresh), mailer=mailer).restore()
        mailer.settle()
    [(to, line, text, _)] = mails()
    assert to == "alice@example.org"
    assert line.endswith(subject)
    assert "its contents have changed" in text


@pytest.mark.parametrize(
    ("changes", "subject", "says", "todo"),
    [
        ({}, "Job 7 sleeps", "A request to it wakes it.", "slurm-affinode wake 7"),
        ({"on_request": False}, "Job 7 sleeps", "It goes on by itself when GPUs are free", "scancel 7"),
        ({"kind": "restored"}, "Job 7 goes on", "It runs again on c1, with its GPU memory.", "slurm-affinode status 7"),
        ({"kind": "failed"}, "could not be woken and sleeps on", "tried again by itself", "slurm-affinode wake 7"),
        ({"kind": "failed", "ended": True}, "is ended", "longer on c1 for its GPU memory", "slurm-affinode status 7"),
    ],
)
def test_what_is_said_of_a_job_that_sleeps_in_place(
    changes: dict[str, Any], subject: str, says: str, todo: str
) -> None:
    """It has no image and keeps its allocation: nothing is saved, held or restored. In every language there is."""
    mail = replace(SLEEPS, **{"in_place": True, "on_request": True, **changes})
    made = suspension_digest(mail, MailPolicy())
    assert subject in made.subject
    for part in (says, todo):
        assert part in made.text
        assert part in made.html
    assert "image" not in made.text
    assert "Job 7" in suspension_digest(mail, MailPolicy(language="de")).text


def test_a_mail_server_that_is_away_is_one_line_of_the_log(
    post: Callable[[int, str], Mailer], caplog: pytest.LogCaptureFixture
) -> None:
    mailer = post(1, '"suspended"')
    mailer._pauses_s = ()
    mailer.tell(SLEEPS)
    mailer.settle()
    assert "job 7: no mail to alice: mail server 127.0.0.1:1: " in caplog.text
    assert "Traceback" not in caplog.text


def test_the_configuration_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"suspend\.mail: 'sleeping' is none of suspended, restored, failed"):
        parse('[suspend]\nmail = ["sleeping"]\n', where="config.toml")
    assert mailing.mailer(parse("", where="config.toml")) is mailing.SILENT


def test_the_agent_does_not_load_what_makes_mails() -> None:
    """Templates and mail cost 10 MB: they are the other process's."""
    code = (
        "import sys, slurm_affinode.agent.orchestration\nprint([m for m in ('jinja2', 'smtplib') if m in sys.modules])"
    )
    from slurm_affinode import process

    assert process.run([sys.executable, "-P", "-c", code], timeout_s=60).stdout == b"[]\n"
