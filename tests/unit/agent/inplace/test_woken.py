"""Who wakes a job that sleeps in place, and what may go wrong then."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

import pytest
from agent_site import Process
from inplace_site import GIB, OPTION, OUT, Later, Node, asleep, awake, entries, failing

from slurm_affinode.agent.inplace.freezer import FreezeError
from slurm_affinode.agent.inplace.sharing import Rules
from slurm_affinode.agent.inplace.sockdiag import Sock
from slurm_affinode.agent.interface import Refused
from slurm_affinode.agent.journal import JournalError, Record
from slurm_affinode.agent.tree import TreeGoneError
from slurm_affinode.checkpoint.interface import CudaError, CudaState, HelperLost
from slurm_affinode.model.suspension import Phase


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
        world.clock -= 3600
        node.director.round()
        assert node.director._sleepers[7].failures == 3
    assert node.phase() is Phase.FROZEN
    node.director.wake(7, "alice")
    node.round()
    assert awake(world)
    [entry] = entries(world)
    assert (entry.restored_ms is not None, "CUDA_ERROR_UNKNOWN" in (entry.restore_failure or "")) == (True, True)


@pytest.mark.parametrize(
    ("works_for", "takes_s", "pauses"),
    [
        (0, (0, 0), 1),
        (3, (0, 0), 4),
        (1000, (0, 0), 50),
        (1000, (0.395, 0), 10),
        (1000, (7, 0), 0),
        (1000, (0, 0.2), 2),
        (1, (-9, 0), 0),
    ],
)
def test_what_watches_over_others_goes_on_last(world, monkeypatch, works_for, takes_s, pauses):
    """When they have their GPU memory and are at rest, and not much later, however long it takes to look at them all
    and whatever the clock does: it would find that they have not moved."""
    restore_s, look_s = takes_s
    seen: list[tuple[str, list[bool]]] = []

    def unlocked(pid: int) -> None:
        seen.append(("unlock", node.stopped()))
        world.clock += restore_s
        unlock(pid)

    def looked(pids: Iterable[int]) -> bool:
        world.clock += look_s
        return busy(pids)

    def paused(seconds: float) -> None:
        seen.append(("pause", node.stopped()))
        if len(seen) > works_for:
            node.freezer.at_work = {script}  # which is not asked for

    monkeypatch.setattr(world, "sleep", paused)
    node = Node(world)
    script, worker = (process.pid for process in node.processes)
    unlock, busy = node.agent.cuda.unlock, node.freezer.busy
    monkeypatch.setattr(node.agent.cuda, "unlock", unlocked)
    monkeypatch.setattr(node.freezer, "busy", looked)
    node.sleep()
    node.connection()
    node.freezer.at_work = {worker} if works_for else set()
    seen.clear()
    node.round()
    assert awake(world)
    assert seen == [("unlock", [True, False])] + [("pause", [True, False])] * pauses


def test_what_slurm_suspends_while_its_memory_comes_back_stays_stopped(world, node, monkeypatch):
    """While what watches over others still stands, too: it goes on when Slurm says so (scontrol resume)."""
    unlock = node.agent.cuda.unlock

    def suspended(pid: int) -> None:
        unlock(pid)
        node.freezer.by_slurm = True
        for process in node.processes:
            process.stopped = True

    monkeypatch.setattr(node.agent.cuda, "unlock", suspended)
    node.sleep()
    node.connection()
    node.round()
    assert (node.director.view(7), node.stopped()) == (None, [True, True])


def test_each_process_is_sent_on_once(node):
    """A program may do something on SIGCONT, and one that its parent has stopped meanwhile stays so."""
    node.sleep()
    node.connection()
    node.round()
    assert node.freezer.continued == [node.processes[1].pid, node.processes[0].pid]


def test_a_freeze_that_fails_after_a_restore_that_failed_leaves_nobody_stopped(world, node, monkeypatch):
    """What did stop could not take its memory back with the next attempt."""
    node.sleep()
    node.connection()

    def some(*_: object, **__: object) -> None:
        node.processes[1].stopped = True
        raise FreezeError("process 8 (python) does not stop within 10 s")

    with monkeypatch.context() as patch, failing(node):
        patch.setattr(node.freezer, "freeze", some)
        node.round()
        assert node.stopped() == [False, False]
    node.round()
    assert awake(world)


def test_what_has_begun_and_ended_while_a_restore_failed_is_known(world, node, monkeypatch):
    """It sleeps on: what ended before it was frozen again wakes nobody, what is new is looked after."""
    script, _ = node.processes
    node.sleep()
    node.connection()

    def fails(pid: int, **_: object) -> None:
        node.processes.append(Process(script.pid + 50, 3, cuda=None))
        node.processes.remove(script)
        raise CudaError("the driver failed")

    monkeypatch.setattr(node.agent.cuda, "restore", fails)
    node.round()
    world.clock -= 2
    node.director.round()
    assert node.stopped() == [True, True]
    assert node.director._sleepers[7].pids == tuple(process.pid for process in node.processes)


def test_one_that_slurm_suspends_while_its_restore_fails_stays_stopped(node, monkeypatch):
    """Also where it cannot be frozen again."""
    node.sleep()
    node.connection()

    def some(*_: object, **__: object) -> None:
        node.freezer.by_slurm = True
        for process in node.processes:
            process.stopped = True
        raise FreezeError("process 8 (python) does not stop within 10 s")

    with failing(node):
        monkeypatch.setattr(node.freezer, "freeze", some)
        node.round()
    assert node.stopped() == [True, True]


def test_looks_take_a_bounded_share_of_a_core(node, monkeypatch):
    """One that computed for long is followed by a long pause, one that had to wait for something is not."""
    computed = 0.0
    pauses: list[float | None] = []

    def look() -> None:
        nonlocal computed
        computed += 0.001 if not pauses else 0.1

    def pause(seconds: float | None) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            node.director.stop()

    node.sleep()
    monkeypatch.setattr(time, "thread_time", lambda: computed)
    monkeypatch.setattr(node.director, "round", look)
    monkeypatch.setattr(node.director._poke, "wait", pause)
    node.director._run()
    assert pauses == [0.1, pytest.approx(2.0)]


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
    next(p for p in node.processes if p.cuda).cuda = CudaState.FAILED
    node.connection()
    node.round()
    assert "is lost: the driver calls it failed" in node.view()["failure"]


def test_one_that_has_ended_is_forgotten(world, node):
    """Its processes are gone: the ledger is told, the journal closed."""
    node.sleep()
    node.lose_job()
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
    dead = node.processes.pop()
    node.round()
    assert node.stopped() == [False]
    assert node.director.view(7) is None
    assert told == [f"awake after 60s in place: its process {dead.pid} has ended"]


def test_sockets_between_its_own_processes_are_none_to_be_asked_by(world, node):
    """As those of an event loop: nobody could ever wake it by a request, so it wakes when there is room."""
    ends = Sock(21, "unix", 1, 0, here=b"21", there=b"22"), Sock(22, "unix", 1, 0, here=b"22", there=b"21")
    node.sockets.now = {one.inode: one for one in ends}
    node.sleep()
    assert node.view()["wakes_on_request"] is False
    world.clock += 600
    node.round()
    assert awake(world)
