"""Who wakes a job that sleeps in place, what may go wrong then, and who is told."""

from __future__ import annotations

import contextlib
import signal
from dataclasses import replace

import pytest
from inplace_site import GIB, OPTION, OUT, QUIET, Inline, Later, Node, asleep, awake, entries, failing

from slurm_affinode.agent.inplace.sharing import Rules
from slurm_affinode.agent.inplace.sockdiag import Sock
from slurm_affinode.agent.interface import Refused
from slurm_affinode.agent.journal import JournalError, Record
from slurm_affinode.agent.mailing import Mailer
from slurm_affinode.agent.tree import TreeGoneError
from slurm_affinode.checkpoint.interface import CudaState, HelperLost
from slurm_affinode.model.suspension import Phase
from slurm_affinode.model.suspension_mail import MAIL_KINDS, SuspensionMail


def test_a_signal_lets_it_go_whether_there_is_room_or_not(world, node):
    """Its handlers run at once; its memory comes when there is room. One that came just before the freeze counts."""
    node.sleep()
    node.cards.others = 79 * GIB
    node.director.signalled(7, 15)
    assert [p.stopped for p in world.nodes["c1"].processes] == [False, False]
    assert node.phase() is Phase.WAKING
    node.round()
    assert node.view()["waits"]
    node.cards.others = 0
    node.round()
    assert awake(world)
    node.freezer.during = lambda: node.director.signalled(7, 15)
    node.sleep()
    node.round()
    assert awake(world)


def test_a_continue_of_which_nobody_told_is_noticed(world, node):
    """What runs would wait for its GPU, and not be seen."""
    node.sleep()
    for process in world.nodes["c1"].processes:
        process.stopped = False
    node.round()
    assert awake(world)


def test_it_wakes_at_its_time_or_where_nobody_could_ask_it(world, node):
    """wake=TIME; wake=auto of a job without a socket when there is room; wake=hold never by itself."""
    for option, sockets, sleeps in (
        (replace(OPTION, wake="now+30minutes"), True, False),
        (OPTION, False, False),
        (OPTION, True, True),
        (replace(OPTION, wake="hold"), False, True),
    ):
        node.sockets.has = sockets
        node.sleep(option=option)
        world.clock += 1799 if option.wake.startswith("now") else 0
        if option.wake.startswith("now"):
            world.clock -= 60
            node.round()
            assert asleep(world)
            world.clock += 61
        node.round()
        assert asleep(world) is sleeps
        if sleeps:
            node.director.wake(7, "alice")
            node.round()
        assert awake(world)


def test_a_prolog_waits_until_those_on_its_gpus_are_awake(world, node):
    """And is told of those that are not in time."""
    node.sleep()
    assert node.director.wake_on([1], "the prolog of job 9", 0.01) == []
    assert node.director.wake_on([0], "the prolog of job 9", 0.01) == [7]
    node.round()
    assert node.director.wake_on([0], "the prolog of job 9", 0.01) == []
    assert awake(world)


def test_a_restore_that_fails_leaves_it_asleep_and_is_tried_again(world, node):
    """With the reason; less and less often; at once when somebody asks for it."""
    node.sleep()
    node.connection()

    with failing(node, "cannot move the GPU memory of process 9 back: the driver failed (CUDA_ERROR_UNKNOWN)"):
        node.round()
        assert asleep(world)
        assert "CUDA_ERROR_UNKNOWN" in node.view()["failure"]
        node.round()
        node.world.clock -= 2
        node.director.round()
        assert node.director._sleepers[7].failures == 2
    assert node.phase() is Phase.FROZEN
    node.director.wake(7, "alice")
    node.round()
    assert awake(world)
    [entry] = entries(world)
    assert (entry.restored_ms is not None, "CUDA_ERROR_UNKNOWN" in (entry.restore_failure or "")) == (True, True)


def test_a_restore_that_fails_until_the_deadline(world):
    """It is wanted, and has not got its memory back: overdue, whatever the reason."""
    ended: list[int | str] = []
    node = Node(world, Rules(deadline_s=60, end_on_deadline=True))
    node.agent.parts.slurm.cancel = ended.append
    node.sleep()
    node.connection()
    with failing(node):
        node.round()
        assert (node.view()["overdue"], ended) == (False, [])
        world.clock += 60
        node.round()
    assert (node.view()["overdue"], ended) == (True, [7])
    assert "to wake: the driver failed" in world.comment


def test_a_helper_that_is_lost_in_the_middle_is_no_failure(world, node, monkeypatch):
    """What it was doing is looked at, and done again where it was not done."""
    node.sleep()
    node.connection()
    restore, lost = node.agent.cuda.restore, []

    def once(pid: int, **given: object) -> None:
        restore(pid, **given)
        if not lost:
            lost.append(pid)
            raise HelperLost("the helper for the CUDA driver ended")

    monkeypatch.setattr(node.agent.cuda, "restore", once)
    node.round()
    assert awake(world)
    assert lost


def test_a_process_whose_cuda_state_is_lost_is_told(world, node):
    """The driver calls it failed: it sleeps on, and says so."""
    node.sleep()
    next(p for p in world.nodes["c1"].processes if p.cuda).cuda = CudaState.FAILED
    node.connection()
    node.round()
    assert "is lost: the driver calls it failed" in node.view()["failure"]


def test_one_that_has_ended_is_forgotten(world, node):
    """Its processes are gone: the ledger is told, the journal closed."""
    node.sleep()
    world.nodes["c1"].init, world.nodes["c1"].processes = None, []
    node.round()
    assert node.director.view(7) is None
    assert node.agent.parts.journal.open_records() == []
    assert [entry.ended_ms is not None for entry in entries(world)] == [True]
    with pytest.raises(Refused, match="does not sleep"):
        node.director.wake(7, "alice")


def test_one_that_ends_while_it_is_woken(world, node, monkeypatch):
    """Nothing is left to be woken."""
    node.sleep()
    node.connection()

    def gone(*_: object, **__: object) -> None:
        raise TreeGoneError("gone")

    monkeypatch.setattr(node.freezer, "thaw", gone)
    node.round()
    assert node.director.view(7) is None


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
    node.director._comments._worker = Inline()
    node.sleep()
    node.round()
    assert world.comment.startswith("asleep in place: idle 15m, 48 GiB in host memory, wakes on a request")
    assert world.comment.endswith(" // my experiment")
    node.connection()
    node.round()
    node.round()
    assert world.comment == "my experiment"


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


def test_a_signal_does_not_wait_for_those_that_are_being_woken(world, node):
    """Its processes are let go at once, also where its own wake is still to begin."""
    workers = node.director._workers = Later()
    node.sleep()
    node.connection()
    node.round()
    assert (len(workers.calls), asleep(world)) == (1, True)
    node.director.signalled(7, 15)
    assert [p.stopped for p in world.nodes["c1"].processes] == [False, False]
    workers.work()
    assert awake(world)


def test_one_that_takes_a_signal_is_not_frozen_again(world, node):
    """Where its memory cannot come back its handlers run all the same."""
    node.sleep()
    with failing(node):
        node.director.signalled(7, 15)
        node.round()
        assert "the driver failed" in node.view()["failure"]
        assert [p.stopped for p in world.nodes["c1"].processes] == [False, False]
    node.round()
    assert awake(world)


def test_memory_that_is_taken_at_the_last_moment_is_waited_for(world, node, monkeypatch):
    """Nothing is asked of the driver, which would lose it for good. As long as it is frozen that is no failure."""
    workers = node.director._workers = Later()
    node.sleep()
    node.connection()
    node.round()
    node.cards.others = 79 * GIB
    workers.work()
    node.round()
    assert (asleep(world), world.effect_log, node.view()["failure"]) == (True, OUT, None)
    assert "is left there: others hold the rest" in node.view()["waits"]
    node.cards.others = 0
    thaw = node.freezer.thaw

    def taken(*arguments: object, **given: object) -> None:
        thaw(*arguments, **given)
        node.cards.others = 79 * GIB

    monkeypatch.setattr(node.freezer, "thaw", taken)
    node.round()
    workers.work()
    assert (asleep(world), "restore" in world.effect_log) == (True, False)
    assert "are needed on GPU-c1-0" in node.view()["failure"]
    monkeypatch.setattr(node.freezer, "thaw", thaw)
    node.cards.others = 0
    node.round()
    workers.work()
    assert awake(world)


def test_a_disk_that_is_full_keeps_nobody_asleep(world, node, monkeypatch):
    """It wakes without its journal, which is closed when that can be done."""
    node.sleep()
    node.connection()

    def full(*_: object, **__: object) -> None:
        raise JournalError("/var/lib/journal: cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Record, "write", full)
        patch.setattr(Record, "close", full)
        node.round()
        assert (awake(world), node.director.view(7)) == (True, None)
        node.round()
        assert node.director._waking.unfinished
    assert len(node.agent.parts.journal.open_records()) == 1
    node.round()
    assert node.agent.parts.journal.open_records() == []
    assert not node.director._waking.unfinished


def test_one_whose_sockets_cannot_be_looked_at_is_woken(world, node):
    """A request to it would not be noticed."""
    node.sleep()
    node.sockets.silent = True
    for _ in range(4):
        node.round()
    assert asleep(world)
    for _ in range(3):
        node.round()
    assert awake(world)


def test_a_process_that_has_ended_while_it_sleeps_wakes_it(world, node):
    """Killed by the kernel for want of memory, say: its parent is stopped, and would never hear of it."""
    told: list[str] = []
    node.director.woken = lambda job_id, how: told.append(how)
    node.sleep()
    world.clock += 58
    dead = world.nodes["c1"].processes.pop()
    node.round()
    assert [p.stopped for p in world.nodes["c1"].processes] == [False]
    assert node.director.view(7) is None
    assert told == [f"awake after 60s in place: its process {dead.pid} has ended"]


def test_a_signal_that_nobody_told_of_wakes_it(world, node):
    """Sent by somebody else than Slurm, or while there was no agent; what was stopped before is let be."""
    script = world.nodes["c1"].processes[0]
    script.stopped = True
    node.sleep()
    node.freezer.waiting = {script.pid: 15}
    node.round()
    assert asleep(world)
    node.freezer.waiting = {world.nodes["c1"].processes[1].pid: 15}
    node.cards.others = 79 * GIB
    node.round()
    assert [p.stopped for p in world.nodes["c1"].processes] == [True, False]
    assert node.view()["asked_why"] == f"SIGTERM waits for its process {world.nodes['c1'].processes[1].pid}"
    node.cards.others, node.freezer.waiting = 0, {}
    node.round()
    assert node.director.view(7) is None


def test_a_signal_wakes_one_that_is_in_line_already(world, node):
    """There is no room for it, and somebody has asked for it before."""
    node.sleep()
    node.cards.others = 79 * GIB
    node.connection()
    node.round()
    assert asleep(world)
    node.freezer.waiting = {world.nodes["c1"].processes[1].pid: 10}
    node.round()
    assert [p.stopped for p in world.nodes["c1"].processes] == [False, False]


def test_one_that_slurm_suspends_sleeps_on_whoever_asks(world, node):
    """Its signals do not wake it, a request waits, and keeps its place from when Slurm lets it go on."""
    node.sleep()
    node.director.signalled(7, signal.SIGTSTP)
    node.freezer.by_slurm = True
    assert node.view()["suspended_by_slurm"]
    node.connection()
    node.round()
    world.clock += 700
    node.round()
    assert (asleep(world), node.view()["overdue"]) == (True, False)
    assert node.view()["waits"] == "Slurm has suspended it; it goes on with: scontrol resume 7"
    node.freezer.by_slurm = False
    node.cards.others = 79 * GIB
    node.round()
    assert (node.view()["waits"], node.view()["overdue"]) == (
        "it needs 48 GiB on GPU 0, and 960 MiB is left there: others hold the rest",
        False,
    )
    node.cards.others = 0
    node.round()
    assert awake(world)


def test_one_that_slurm_has_suspended_is_not_put_to_sleep(world, node):
    """It could not be locked; nobody is told that it makes room."""
    node.freezer.by_slurm = True
    with pytest.raises(Refused, match="Slurm has suspended it"):
        node.sleep()


def test_a_signal_just_before_it_falls_asleep_counts(world, node):
    """Its handlers may run still; somebody who asked as early was answered by then."""
    node.director.signalled(7, 15)
    world.clock += 3
    node.sleep()
    node.round()
    assert awake(world)


def test_a_signal_while_a_restore_fails_is_not_lost(world, node):
    """It comes when it is about to be frozen again."""
    node.sleep()
    node.connection()
    sleeper = node.director._sleepers[7]
    turns: list[str] = []

    class Turn(contextlib.nullcontext[None]):
        def __enter__(self) -> None:
            turns.append("")
            sleeper.signalled = len(turns) > 1

    sleeper.turning = Turn()
    with failing(node):
        node.round()
    assert [p.stopped for p in world.nodes["c1"].processes] == [False, False]


def test_sockets_between_its_own_processes_are_none_to_be_asked_by(world, node):
    """As those of an event loop: nobody could ever wake it by a request, so it wakes when there is room."""
    ends = Sock(21, "unix", 1, 0, here=b"21", there=b"22"), Sock(22, "unix", 1, 0, here=b"22", there=b"21")
    node.sockets.now = {one.inode: one for one in ends}
    node.sleep()
    assert node.view()["wakes_on_request"] is False
    world.clock += 600
    node.round()
    assert awake(world)


def test_a_comment_waits_for_slurm(world, node):
    """It is told again when Slurm answers, also that there is nothing to say any more."""
    comments = node.director._comments
    comments._worker = Inline()
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
