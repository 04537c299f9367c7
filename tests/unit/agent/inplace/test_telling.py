"""Who is told of a job that sleeps in place: status, the comment in Slurm, its owner by mail."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from inplace_site import GIB, OPTION, QUIET, Inline, Node, awake, failing
from waiting import DEADLINE_S, wait_until

from slurm_affinode.agent.inplace.sharing import Rules
from slurm_affinode.agent.mailing import Mailer
from slurm_affinode.model.suspension_mail import MAIL_KINDS, SuspensionMail


def test_who_was_woken_and_how_is_told(world, node):
    """For status."""
    told: list[tuple[int, str]] = []
    node.director.woken = lambda job_id, how: told.append((job_id, how))
    node.sleep()
    world.clock += 600
    node.connection()
    node.round()
    assert told == [(7, "awake after 10m in place: a connection waits on port 8000")]


def test_the_comment_follows_when_it_has_settled(world, node):
    """Told while it sleeps, taken away when it is awake; what the owner had there stays."""
    world.comment = "my experiment"
    node.director._comments.worker = Inline()
    node.sleep()
    node.round()
    assert world.comment.startswith("asleep in place: idle 15m, 48 GiB in host memory, wakes on a request")
    assert world.comment.endswith(" // my experiment")
    node.connection()
    node.round()
    node.round()
    assert world.comment == "my experiment"


def test_a_request_is_not_spoken_of_where_nobody_could_send_one(world, node):
    """It has no socket."""
    node.sockets.has = False
    node.director._comments.worker = Inline()
    node.sleep(option=replace(OPTION, wake="hold"))
    node.round()
    said = "asleep in place: idle 15m, 48 GiB in host memory, wake with: slurm-affinode wake 7"
    assert world.comment == said


@pytest.fixture
def mails() -> list[SuspensionMail]:
    """Those that were sent."""
    return []


@pytest.fixture
def mailer(world, mails) -> Mailer:
    """Of all kinds."""
    return Mailer(mails.append, kinds=MAIL_KINDS, marks=world.root / "mailed", now=world.now)


def test_its_owner_is_told_by_mail(world, mails, mailer):
    """Of a sleep, of the first wake that fails, and when it is awake: once each. A sleep that is cut short is none."""
    node = Node(world, mailer=mailer)
    node.sleep()
    node.connection()
    with failing(node):
        for _ in range(3):
            world.clock += 60
            node.round()
    world.clock += 60
    node.round()
    assert awake(world)
    mailer.settle()
    assert [mail.kind for mail in mails] == ["suspended", "failed", "restored"]
    facts = {(mail.in_place, mail.on_request, mail.job_name, mail.user) for mail in mails}
    assert facts == {(True, True, "train", "alice")}
    assert (mails[0].why, mails[1].why) == ("idle 15m", "the driver failed")
    assert mails[2].slept_s is not None
    node.sockets.now = dict(QUIET)
    node.freezer.during = node.connection
    node.sleep()
    node.round()
    mailer.settle()
    assert (awake(world), len(mails)) == (True, 3)


def test_its_owner_is_told_by_mail_that_it_is_ended(world, mails, mailer):
    """It has waited too long; also where a wake has failed before."""
    node = Node(world, Rules(deadline_s=60, end_on_deadline=True), mailer=mailer)
    node.agent.parts.slurm.cancel = lambda job: None
    node.sleep()
    node.connection()
    with failing(node):
        node.round()
    node.cards.others = 79 * GIB
    world.clock += 60
    node.round()
    mailer.settle()
    assert [(mail.kind, mail.ended) for mail in mails] == [("suspended", False), ("failed", False), ("failed", True)]
    assert "it has waited for 6" in str(mails[2].why)


def test_a_comment_waits_for_slurm(world, node):
    """It is told again when Slurm answers, also that there is nothing to say any more."""
    comments = node.director._comments
    comments.worker = Inline()
    node.sleep()
    world.answers = False
    for _ in range(3):
        node.round()
    assert (world.comment, comments.due) == ("", True)
    world.answers = True
    for _ in range(10):
        node.round()
    assert world.comment.startswith("asleep in place")
    assert not comments.due
    node.connection()
    node.round()
    world.answers = False
    node.round()
    world.answers = True
    for _ in range(10):
        node.round()
    assert (world.comment, comments.due, comments._wishes) == ("", False, {})


def test_comments_keep_no_agent_from_its_end(world, node, monkeypatch):
    """While Slurm is silent: what was not said yet is the next agent's, and nothing more is taken."""
    asked, silent = [], threading.Event()
    comments = node.director._comments
    monkeypatch.setattr(node.agent.parts.slurm, "job", lambda job: (asked.append(job), silent.wait(DEADLINE_S)))
    for job_id in (8, 9, 10):
        comments.check(job_id)
    wait_until("Slurm is asked", lambda: asked)
    node.director.stop()
    comments.check(11)
    silent.set()
    assert isinstance(comments.worker, ThreadPoolExecutor)
    comments.worker.shutdown(wait=True)
    assert asked == [8]
