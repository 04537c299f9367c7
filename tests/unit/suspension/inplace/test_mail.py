"""Reports on jobs suspended in place: status, the comment in Slurm, mail to the owner."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from inplace_site import GIB, OPTION, QUIET, Inline, Node, awake, failing
from waiting import DEADLINE_S, wait_until

from slurm_affinode.base.threads import Workers
from slurm_affinode.model.suspension import MAIL_KINDS, SuspensionMail
from slurm_affinode.suspension.inplace.gpu_sharing import Rules
from slurm_affinode.suspension.mail import Mailer


def test_wake_and_its_reason_are_reported(world, node):
    reports: list[tuple[int, str]] = []
    node.woken = lambda job_id, how, slept_s: reports.append((job_id, how))
    node.sleep()
    world.clock += 600
    node.connection()
    node.round()
    assert reports == [(7, "awake after 10m 2s in place: a connection waits on port 8000")]


def test_comment_follows_state(world, node):
    """It is set while the job is suspended, and removed when it is awake; the owner's text is kept."""
    world.comment = "my experiment"
    node.scheduler._comments._queue = Inline()
    node.sleep()
    node.round()
    assert world.comment.startswith("asleep in place: idle 15m, 48 GiB in host memory, wakes on a request")
    assert world.comment.endswith(" // my experiment")
    node.connection()
    node.round()
    node.round()
    assert world.comment == "my experiment"


def test_comment_on_lost_processes_stays_when_the_job_starts_again(world, node):
    """It waited for room meanwhile, or not: only comments on sleep and waits are removed."""
    comments = node.scheduler._comments
    comments._queue = Inline()
    for before, after in (
        ("lost: its node // mine", "lost: its node // mine"),
        ("asleep in place: idle 15m // mine", "mine"),
    ):
        world.comment = before
        comments.clear(7)
        comments._desired[7].sent = "other"
        world.clock += 60
        comments.tick(world.clock)
        assert world.comment == after


def test_comment_omits_requests_if_unreachable(world, node):
    """The job has no socket."""
    node.sockets.has = False
    node.scheduler._comments._queue = Inline()
    node.sleep(option=replace(OPTION, wake="hold"))
    node.round()
    expected = "asleep in place: idle 15m, 48 GiB in host memory, wake with: slurm-affinode wake 7"
    assert world.comment == expected


@pytest.fixture
def mails() -> list[SuspensionMail]:
    """Mails that were sent."""
    return []


@pytest.fixture
def mailer(world, mails) -> Mailer:
    """A mailer for all kinds of mail."""
    return Mailer(mails.append, Workers(), kinds=MAIL_KINDS, marks=world.root / "mailed", now=world.now)


def test_owner_is_mailed(world, mails, mailer):
    """A suspension, the first failed wake, and the wake are mailed once each; an interrupted suspension is not."""
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
    mailer._queue.join()
    assert [mail.kind for mail in mails] == ["suspended", "failed", "restored"]
    facts = {(mail.in_place, mail.on_request, mail.job_name, mail.user) for mail in mails}
    assert facts == {(True, True, "train", "alice")}
    assert (mails[0].why, mails[1].why) == ("idle 15m", "the driver failed")
    assert mails[2].slept_s is not None
    node.sockets.now = dict(QUIET)
    node.freezer.during = node.connection
    node.sleep()
    node.round()
    mailer._queue.join()
    assert (awake(world), len(mails)) == (True, 3)


def test_owner_is_mailed_when_job_is_ended(world, mails, mailer):
    """It has waited too long; also after an earlier failed wake."""
    node = Node(world, Rules(deadline_s=60, end_on_deadline=True), mailer=mailer)
    node.agent.slurm.cancel = lambda job: None
    node.sleep()
    node.connection()
    with failing(node):
        node.round()
    node.cards.others = 79 * GIB
    world.clock += 60
    node.round()
    mailer._queue.join()
    assert [(mail.kind, mail.ended) for mail in mails] == [("suspended", False), ("failed", False), ("failed", True)]
    assert "it has waited for 1m" in str(mails[2].why)


def test_comment_waits_for_slurm(world, node):
    """It is retried until Slurm responds, and so is its removal."""
    comments = node.scheduler._comments
    comments._queue = Inline()
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
    assert (world.comment, comments.due, comments._desired) == ("", False, {})


def test_comments_do_not_delay_shutdown(world, node, monkeypatch):
    """Slurm does not respond: unset comments are left to the next agent, and no new ones are accepted."""
    queries, responds = [], threading.Event()
    comments = node.scheduler._comments
    monkeypatch.setattr(node.agent.slurm, "job", lambda job: (queries.append(job), responds.wait(DEADLINE_S)))
    for job_id in (8, 9, 10):
        comments.check(job_id)
    wait_until("Slurm is queried", lambda: queries)
    node.scheduler.stop()
    comments.check(11)
    responds.set()
    comments._queue.join()
    assert queries == [8]
