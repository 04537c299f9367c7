"""Wakes of jobs suspended in place, and their failures."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

import pytest
from agent_site import Process
from inplace_site import GIB, OPTION, OUT, Later, Node, asleep, awake, entries, failing

from slurm_affinode.checkpoint.interface import CudaError, CudaState, HelperLost
from slurm_affinode.model.suspension import Phase
from slurm_affinode.suspension.inplace.freezer import FreezeError
from slurm_affinode.suspension.inplace.gpu_sharing import Rules
from slurm_affinode.suspension.inplace.sock_diag import Sock
from slurm_affinode.suspension.interface import Refused
from slurm_affinode.suspension.job.process_tree import TreeGoneError
from slurm_affinode.suspension.records.journal import JobJournal, JournalError


def test_job_wakes_at_its_time_or_if_unreachable(world, node):
    """wake=TIME; wake=auto of a job without sockets, when there is room; wake=hold only on request."""
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
            node.scheduler.wake(7, "alice")
            node.round()
        assert awake(world)


def test_prolog_waits_for_jobs_on_its_gpus(world, node):
    """Jobs that are not awake in time are reported to it."""
    node.sleep()
    assert node.scheduler.wake_on([1], "the prolog of job 9", 0.01) == []
    assert node.scheduler.wake_on([0], "the prolog of job 9", 0.01) == [7]
    node.round()
    assert node.scheduler.wake_on([0], "the prolog of job 9", 0.01) == []
    assert awake(world)


def test_failed_restore_is_retried(world, node):
    """The reason is shown; retries back off, and a wake command retries at once."""
    node.sleep()
    node.connection()

    with failing(node, "cannot move the GPU memory of process 9 back: the driver failed (CUDA_ERROR_UNKNOWN)"):
        node.round()
        assert asleep(world)
        assert "CUDA_ERROR_UNKNOWN" in node.view()["failure"]
        node.round()
        node.world.clock -= 2
        node.scheduler.round()
        assert node.scheduler._sleepers[7].failures.count == 2
        world.clock -= 3600
        node.scheduler.round()
        assert node.scheduler._sleepers[7].failures.count == 3
    assert node.phase() is Phase.FROZEN
    node.scheduler.wake(7, "alice")
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
def test_parents_continue_last(world, monkeypatch, works_for, takes_s, pauses):
    """Parents run after their children have their GPU memory and are at rest: otherwise they would find them stalled.

    The wait is short, however long the checks take and whatever the clock does.
    """
    restore_s, probe_s = takes_s
    seen: list[tuple[str, list[bool]]] = []

    def unlocked(pid: int) -> None:
        seen.append(("unlock", node.stopped()))
        world.clock += restore_s
        unlock(pid)

    def looked(pids: Iterable[int]) -> bool:
        world.clock += probe_s
        return busy(pids)

    def paused(seconds: float) -> None:
        seen.append(("pause", node.stopped()))
        if len(seen) > works_for:
            node.freezer.at_work = {script}  # not checked

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


def test_job_suspended_by_slurm_during_wake_stays_stopped(world, node, monkeypatch):
    """It may be suspended while its parents are still stopped, too; it continues on scontrol resume."""
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
    assert (node.scheduler.view(7), node.stopped()) == (None, [True, True])


def test_each_process_is_continued_once(node):
    """A program may handle SIGCONT, and a process that its parent has stopped meanwhile stays stopped."""
    node.sleep()
    node.connection()
    node.round()
    assert node.freezer.continued == [node.processes[1].pid, node.processes[0].pid]


def test_failed_freeze_after_failed_restore_stops_nothing(world, node, monkeypatch):
    """The stopped processes could not restore their memory in the next attempt."""
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


def test_process_changes_during_failed_restore_are_tracked(world, node, monkeypatch):
    """The job stays suspended: processes that ended before the freeze do not wake it, and new ones are tracked."""
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
    node.scheduler.round()
    assert node.stopped() == [True, True]
    assert node.scheduler._sleepers[7].pids == tuple(process.pid for process in node.processes)


def test_job_suspended_by_slurm_during_failed_restore_stays_stopped(node, monkeypatch):
    """It stays stopped even if it cannot be frozen again."""
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


def test_checks_use_bounded_cpu_time(node, monkeypatch):
    """A long computation is followed by a long pause; waiting is not."""
    computed = 0.0
    pauses: list[float | None] = []

    def compute() -> None:
        nonlocal computed
        computed += 0.001 if not pauses else 0.1

    def pause(seconds: float | None) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            node.scheduler.stop()

    node.sleep()
    monkeypatch.setattr(time, "thread_time", lambda: computed)
    monkeypatch.setattr(node.scheduler, "round", compute)
    monkeypatch.setattr(node.scheduler._poke, "wait", pause)
    node.scheduler._run()
    assert pauses == [0.1, pytest.approx(2.0)]


def test_restore_that_fails_until_deadline_is_overdue(world):
    """A wake was requested, and its memory is not restored: it is overdue, whatever the reason."""
    ended: list[int | str] = []
    node = Node(world, Rules(deadline_s=60, end_on_deadline=True))
    node.agent.slurm.cancel = ended.append
    node.sleep()
    node.connection()
    with failing(node):
        node.round()
        assert (node.view()["overdue"], ended) == (False, [])
        world.clock += 60
        node.round()
    assert (node.view()["overdue"], ended) == (True, [7])
    assert "to wake: the driver failed" in world.comment


def test_lost_helper_is_not_a_failure(world, node, monkeypatch):
    """The state of the interrupted step is checked, and the step is repeated if necessary."""
    node.sleep()
    node.connection()
    restore, lost = node.agent.cuda.restore, []

    def once(pid: int, **options: object) -> None:
        restore(pid, **options)
        if not lost:
            lost.append(pid)
            raise HelperLost("the helper for the CUDA driver ended")

    monkeypatch.setattr(node.agent.cuda, "restore", once)
    node.round()
    assert awake(world)
    assert lost


@pytest.mark.parametrize("lost", [False, True])
def test_processes_are_restored_at_once(world, node, monkeypatch, lost):
    """If the helper is lost meanwhile, those that remain are restored one after another."""
    node.cards.each = 20 * GIB
    first = next(process for process in node.processes if process.cuda)
    node.processes.append(Process(first.pid + 50, 4, CudaState.RUNNING, steps=first.steps))
    node.sleep()
    node.connection()
    restore, calls = node.agent.cuda.restore, []

    def noted(*pids: int, **options: object) -> None:
        calls.append(pids)
        if lost and len(calls) == 1:
            raise HelperLost("the helper for the CUDA driver ended")
        restore(*pids, **options)

    monkeypatch.setattr(node.agent.cuda, "restore", noted)
    node.round()
    assert world.effect_log[-6:] == ["thaw", "restore", "restore", "unlock", "unlock", "thaw"]
    assert node.stopped() == [False] * 3
    both = (first.pid, first.pid + 50)
    assert calls == ([both, both[:1], both[1:]] if lost else [both])


def test_process_that_ends_before_its_restore_does_not_fail_the_wake(world, node, monkeypatch):
    """The driver reports an error for it, and the other one is restored."""
    node.cards.each = 20 * GIB
    first = next(process for process in node.processes if process.cuda)
    second = Process(first.pid + 50, 4, CudaState.RUNNING)
    node.processes.append(second)
    node.sleep()
    node.connection()
    state = node.agent.cuda.state

    def ends(pid: int) -> CudaState:
        if pid == second.pid:
            node.processes.remove(second)
            raise CudaError("there is no such process")
        return state(pid)

    monkeypatch.setattr(node.agent.cuda, "state", ends)
    node.round()
    assert node.stopped() == [False, False]
    assert first.cuda is CudaState.RUNNING
    assert "failure" not in world.comment


def test_lost_cuda_state_is_reported(world, node):
    """The driver reports the state as failed: the job stays suspended, and status says so."""
    node.sleep()
    next(p for p in node.processes if p.cuda).cuda = CudaState.FAILED
    node.connection()
    node.round()
    assert "is lost: the driver calls it failed" in node.view()["failure"]


def test_ended_job_is_forgotten(world, node):
    """Its processes have ended: the ledger records it, and the journal is closed."""
    node.sleep()
    node.lose_job()
    node.round()
    assert node.scheduler.view(7) is None
    assert node.agent.journal.open_journals() == []
    assert [entry.ended_ms is not None for entry in entries(world)] == [True]
    with pytest.raises(Refused, match="does not sleep"):
        node.scheduler.wake(7, "alice")


def test_job_that_ends_during_wake_is_forgotten(world, node, monkeypatch):
    """Nothing is left to wake."""
    node.sleep()
    node.connection()

    def gone(*_: object, **__: object) -> None:
        raise TreeGoneError("gone")

    monkeypatch.setattr(node.freezer, "thaw", gone)
    node.round()
    assert node.scheduler.view(7) is None


def test_memory_taken_at_the_last_moment_is_waited_for(world, node, monkeypatch):
    """The driver is not called, which would lose the memory. While the job is frozen, this is not a failure."""
    workers = node.scheduler._wakes = Later()
    node.sleep()
    node.connection()
    node.round()
    node.cards.others = 79 * GIB
    workers.work()
    node.round()
    assert (asleep(world), world.effect_log, node.view()["failure"]) == (True, OUT, None)
    assert "is left there: other processes hold the rest" in node.view()["waits"]
    node.cards.others = 0
    thaw = node.freezer.thaw

    def taken(*arguments: object, **options: object) -> None:
        thaw(*arguments, **options)
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


def test_full_disk_does_not_prevent_wake(world, node, monkeypatch):
    """It wakes without its journal, which is closed as soon as possible."""
    node.sleep()
    node.connection()

    def full(*_: object, **__: object) -> None:
        raise JournalError("/var/lib/journal: cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(JobJournal, "write", full)
        patch.setattr(JobJournal, "close", full)
        node.round()
        assert (awake(world), node.scheduler.view(7)) == (True, None)
        node.round()
        assert node.scheduler._waking.unfinished
    assert len(node.agent.journal.open_journals()) == 1
    node.round()
    assert node.agent.journal.open_journals() == []
    assert not node.scheduler._waking.unfinished


def test_job_with_unreadable_sockets_is_woken(world, node):
    """A request to it could not be detected."""
    node.sleep()
    node.sockets.unresponsive = True
    for _ in range(4):
        node.round()
    assert asleep(world)
    for _ in range(3):
        node.round()
    assert awake(world)


def test_ended_process_wakes_job(world, node):
    """The OOM killer may have killed it: its stopped parent would never notice."""
    reasons: list[str] = []
    node.woken = lambda job_id, how, slept_s: reasons.append(how)
    node.sleep()
    world.clock += 58
    dead = node.processes.pop()
    node.round()
    assert node.stopped() == [False]
    assert node.scheduler.view(7) is None
    assert reasons == [f"awake after 1m in place: its process {dead.pid} has ended"]


def test_internal_sockets_get_no_requests(world, node):
    """An event loop has such sockets: no request can reach the job, so it wakes when there is room."""
    ends = Sock(21, "unix", 1, 0, local=b"21", remote=b"22"), Sock(22, "unix", 1, 0, local=b"22", remote=b"21")
    node.sockets.now = {end.inode: end for end in ends}
    node.sleep()
    assert node.view()["wakes_on_request"] is False
    world.clock += 600
    node.round()
    assert awake(world)
