"""Suspend in place, with the agent killed before each effect; and the reasons for refusal."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from agent_site import Crash, Process
from inplace_site import BACK, GIB, LISTENER, OPEN, OPTION, OUT, QUIET, Node, asleep, awake, entries
from job_owner import OWNER

from slurm_affinode.checkpoint.inspection import MemoryFacts, ProcessFacts
from slurm_affinode.checkpoint.interface import Capabilities, CudaState, CudaUnavailable, HelperLost
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.suspension import Mode, Phase
from slurm_affinode.suspension.compatibility import CompatibilityRow
from slurm_affinode.suspension.inplace.gpu_sharing import Rules
from slurm_affinode.suspension.inplace.sock_diag import ESTABLISHED, LISTEN, Sock
from slurm_affinode.suspension.interface import Refused


def test_request_wakes_suspended_job(world, node):
    """The full cycle, with its status, comment and ledger entry."""
    done = node.sleep()
    assert (done.phase, done.failure, done.gpus, done.gpu_bytes) == (Phase.FROZEN, None, 1, 48 * GIB)
    assert (world.effect_log, node.phase()) == (OUT, Phase.FROZEN)
    assert asleep(world)
    assert node.scheduler.holds(7) is Phase.FROZEN
    node.round()
    assert asleep(world)
    seen = node.view()
    assert (seen["why"], seen["gpu_bytes"], seen["asked"], seen["wakes_on_request"]) == (
        "idle 15m",
        48 * GIB,
        None,
        True,
    )
    node.connection()
    node.round()
    assert world.effect_log == OUT + BACK
    assert (awake(world), node.phase(), node.scheduler.view(7)) == (True, Phase.RUNNING, None)
    assert node.agent.journal.open_journals() == []
    [entry] = entries(world)
    times = [entry.began_ms, entry.locked_ms, entry.parked_ms, entry.released_ms, entry.restoring_ms, entry.restored_ms]
    assert times == sorted(times)
    assert (entry.mode, entry.gpu_bytes, entry.queued_ms, entry.failure) == ("inplace", 48 * GIB, None, None)


def test_process_that_waits_for_a_file_lock_wakes_sleeper(world, node):
    """Before the sleep, it is a request like any other."""
    node.locks.locks = frozenset({("FLOCK", "ADVISORY", "WRITE", "41", "00:2f:77", "0", "EOF")})
    node.locks.waiter = 4711
    with pytest.raises(Refused, match="process 4711 waits for its lock on a file"):
        node.sleep()
    node.locks.waiter = None
    node.sleep()
    assert node.view()["file_locks"] == 1
    node.round()
    assert asleep(world)
    node.locks.waiter = 4711
    node.round()
    assert awake(world)


def test_busy_job_is_moved_out_when_its_turn_is_over(world, node):
    """Pending requests do not prevent it: it waits to wake at once, behind the job that it makes room for."""
    sleeps_s = []
    node.woken = lambda job_id, how, slept_s: sleeps_s.append(slept_s)
    node.connection()
    with pytest.raises(Refused, match="a connection waits"):
        node.sleep()
    node.cards.others = 0
    done = node.sleep("its turn of 30s is over, job 8 waits to wake", busy=True)
    assert (done.phase, done.failure) == (Phase.FROZEN, None)
    assert asleep(world)
    assert node.view()["asked_why"] == "it was busy when its turn was over"
    node.round()
    assert awake(world)
    assert sleeps_s == [None]  # no short sleep


def test_busy_job_that_was_moved_out_wakes_under_the_next_agent(world, node):
    """A computation without a request is no event that the next agent could detect: the journal has its place."""
    node.sleep(busy=True)
    requested_at = node.view()["asked"]
    world.clock += 100
    after = Node(world)
    after.recover()
    assert (after.view()["asked"], after.view()["asked_why"]) == (requested_at, "it was busy when its turn was over")
    after.round()
    assert awake(world)


@pytest.mark.parametrize("second", [None, *range(1, 5)])
@pytest.mark.parametrize("first", range(1, len(OUT) + len(BACK) + 1))
def test_agent_killed_before_each_effect_and_during_recovery(world, node, first, second):
    """The next agent has the job running or asleep; a request then wakes it with its memory intact."""
    world.crash_at = first

    def there_and_back() -> None:
        node.sleep()
        node.connection()
        node.round()

    with pytest.raises(Crash):
        there_and_back()
    world.effects, world.crash_at = 0, second
    for _ in range(2):
        node = Node(world)
        try:
            node.recover()
            node.round()
            break
        except Crash:
            continue
    world.crash_at = None
    assert awake(world) or asleep(world)
    node.connection()
    node.round()
    node.round()
    assert awake(world)
    assert node.phase() is Phase.RUNNING
    assert node.agent.journal.open_journals() == []
    node.sockets.now = dict(QUIET)
    assert node.sleep().phase is Phase.FROZEN


def test_request_during_suspension_wakes_job_at_once(world, node):
    """The request may have been read, and its response wait for the GPU."""

    def read() -> None:
        node.sockets.now = {**QUIET, 12: replace(OPEN, received=80)}

    node.freezer.during = read
    assert node.sleep().failure is None
    node.round()
    assert awake(world)


def test_process_that_starts_to_use_gpu_aborts_suspension(world, node):
    """Its memory would stay on the GPU while status reports all of it in host memory: the suspension is aborted."""

    def begin() -> None:
        node.processes.append(Process(node.processes[-1].pid + 1, 3))
        node.cards.others = -40 * GIB  # a GPU with room for both

    node.freezer.during = begin
    assert "has begun to use a GPU" in str(node.sleep().failure)
    node.freezer.during = lambda: None
    node.round()
    assert node.stopped() == [False] * 3
    assert {process.cuda for process in node.processes} == {None, CudaState.RUNNING}


def test_request_prevents_suspension(world, node):
    """Nothing is changed."""
    node.connection()
    with pytest.raises(Refused, match="a connection waits on port 8000"):
        node.sleep()
    node.sockets.unresponsive = True
    with pytest.raises(Refused, match="requests to it could not be detected"):
        node.sleep()
    assert world.effect_log == []


def test_busy_job_is_unlocked(world, node):
    """Detected under the lock: the lock is released, and no memory has moved."""
    done = node.suspender.suspend(node.job(), "idle 15m", sample_again=lambda: "GPU 0: utilization 40")
    assert done.failure == "it is no longer idle: GPU 0: utilization 40"
    assert (awake(world), node.phase()) == (True, Phase.RUNNING)
    assert [entry.failure for entry in entries(world)] == [done.failure]
    assert node.agent.journal.open_journals() == []


def test_failed_freeze_is_rolled_back(world, node):
    """It is woken like any suspended job: another job may have taken its place meanwhile."""
    node.freezer.fails = "process 7 (x) does not stop within 1 s"
    assert node.sleep().failure == node.freezer.fails
    node.cards.others = 60 * GIB
    node.round()
    assert "is left there: other processes hold the rest" in node.view()["waits"]
    node.cards.others = 0
    node.round()
    assert awake(world)


def step(name: str) -> Any:
    return type("Step", (), {"id": f"7.{name}", "step": name})()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"steps": (step("batch"), step("0"))}, "srun-steps"),
        ({"node_count": 2}, "multi-node"),
        ({"het_job_id": 5}, "heterogeneous"),
    ],
)
def test_job_with_processes_outside_its_script_is_refused(world, node, changes, code, monkeypatch):
    """The refusal has its code, and comes before any change."""
    slurm: Job = replace(node.agent.slurm.job(7), **changes)
    assert code in [refusal.code for refusal in node.suspender.refusals(node.job(slurm=slurm))]
    monkeypatch.setattr(node.agent.slurm, "job", lambda job: slurm)
    with pytest.raises(Refused):
        node.sleep()
    assert world.effect_log == []


def test_compatibility_has_the_refusals_of_each_mode(world, node):
    """Whatever the mode of the job, also one that is not possible on its node; nothing is changed."""
    record = node.agent.slurm.job(7)
    plain = node.suspender.compatibility(node.job(slurm=record))
    assert plain.kinds == (CompatibilityRow.BATCH,)
    assert {mode: [item.code for item in result] for mode, result in plain.modes.items()} == {
        Mode.REQUEUE: ["mode"],
        Mode.INPLACE: [],
    }
    busy = node.suspender.compatibility(node.job(slurm=replace(record, steps=(step("0"),))))
    assert busy.kinds == (CompatibilityRow.BATCH, CompatibilityRow.STEPS)
    assert [mode.code for mode in busy.modes[Mode.INPLACE]] == ["srun-steps"]
    assert world.effect_log == []


def test_job_that_cannot_wake_or_has_no_gpu_memory_is_refused(world, node):
    """A script that has not started is refused as well."""
    tight = Node(world, Rules(awake_limit_pct=50))
    assert [item.code for item in tight.suspender.refusals(tight.job())] == ["awake-limit"]
    next(p for p in node.processes if p.cuda).cuda = None
    assert [item.code for item in node.suspender.refusals(node.job())] == ["no-gpu-memory"]
    world.nodes["c1"].processes = []
    assert "not-started" in [item.code for item in node.suspender.refusals(node.job())]


def test_insufficient_host_memory_is_refused_with_numbers(world, node):
    """The memory must fit below the job's own limit and on the node; nothing is changed."""
    for memory, message in (
        (MemoryFacts(1 << 40, 40 << 30), "(48 GiB) does not fit below its memory limit, which leaves 40 GiB"),
        (MemoryFacts(20 << 30), "(48 GiB) does not fit into the node's free memory (20 GiB)"),
    ):
        node.suspender = node.suspender_with(read_memory=lambda pid, memory=memory: memory)
        with pytest.raises(Refused) as refused:
            node.sleep()
        assert refused.value.refusal.code == "host-memory"
        assert message in str(refused.value)
    assert world.effect_log == []


@pytest.mark.parametrize(
    ("params", "limit", "expected"),
    [("OverMemoryKill", "40G", ["host-memory"]), ("UsePss", "40G", []), ("OverMemoryKill", "60G", [])],
)
def test_memory_limit_enforced_by_slurm_is_respected(node, monkeypatch, params, limit, expected):
    """The memory moved to the host would exceed the limit."""
    monkeypatch.setattr(node.agent.slurm, "config", lambda: {"JobAcctGatherParams": params})
    slurm = replace(node.agent.slurm.job(7), tres_allocated={"mem": limit})
    assert [item.code for item in node.suspender.refusals(node.job(slurm=slurm))] == expected


def test_old_driver_needs_all_gpus_of_node(node, monkeypatch):
    """The driver does not permit the checkpoint, or cannot restore the memory, in place either."""
    monkeypatch.setattr(node.agent.cuda, "capabilities", lambda: Capabilities("570.211.01", checkpoint=True))
    monkeypatch.setattr(node.agent.slurm, "config", lambda: {"ConstrainDevices": "yes", "TaskPlugin": "task/cgroup"})
    assert not node.suspender.refusals(node.job())
    devices = node.agent.gpus.devices()
    monkeypatch.setattr(node.agent.gpus, "devices", lambda: (*devices, replace(devices[0], uuid="GPU-another")))
    assert [item.code for item in node.suspender.refusals(node.job(devices=devices))] == ["driver"]


def test_daemon_of_script_counts(world, node, monkeypatch):
    """Slurm also counts memory of processes outside the script's process tree; MPS clients there cannot be moved."""
    monkeypatch.setattr(node.agent.slurm, "config", lambda: {"JobAcctGatherParams": "OverMemoryKill"})
    daemon = ProcessFacts(99, "daemon", (OWNER.uid,) * 4, memory=20 * GIB, mps=True)
    inspect = node.agent.inspect
    node.suspender = node.suspender_with(inspect=lambda init, root: replace(inspect(init, root), outside=(daemon,)))
    slurm = replace(node.agent.slurm.job(7), tres_allocated={"mem": "60G"})
    assert [item.code for item in node.suspender.refusals(node.job(slurm=slurm))] == ["mps", "host-memory"]


def test_outdated_driver_is_reported_by_version(node, monkeypatch):
    """A missing function says less."""
    cuda, why = node.agent.cuda, "driver 550.54 is too old: 570 or newer is needed"

    def missing(pids):
        raise CudaUnavailable("function cuCheckpointProcessGetRestoreThreadId is not found")

    monkeypatch.setattr(cuda, "users", missing)
    monkeypatch.setattr(cuda, "capabilities", lambda: Capabilities("550.54", why_not=why))
    [refusal] = node.suspender.refusals(node.job())
    assert (refusal.code, refusal.text) == ("driver", why)


def test_suspension_does_not_need_slurm(world, node):
    """No request is sent to Slurm: its last known state is used."""
    job = node.job()
    world.answers = False
    assert node.suspender.suspend(job, "idle", sample_again=lambda: None).failure is None
    node.connection()
    node.round()
    assert awake(world)


def test_suspensions_of_one_job_do_not_overlap(world, node):
    """A job that is being suspended is not suspended again in parallel."""
    seen: list[str] = []

    def again() -> str | None:
        try:
            node.sleep()
        except Refused as error:
            seen.append(error.refusal.code)
        return None

    node.suspender.suspend(node.job(), "idle", sample_again=again)
    assert seen == ["busy"]


def test_process_in_container_is_unlocked(world, node):
    """It is in a PID namespace below the job's: both an aborted suspension and the next agent unlock it."""
    node.processes[1].inside = True
    done = node.suspender.suspend(node.job(), "idle 15m", sample_again=lambda: "GPU 0: utilization 40")
    assert (done.failure is not None, awake(world)) == (True, True)

    def killed() -> str | None:
        raise Crash

    with pytest.raises(Crash):
        node.suspender.suspend(node.job(), "idle 15m", sample_again=killed)
    assert not awake(world)
    Node(world).recover()
    assert awake(world)


def test_request_before_memory_moves_aborts_suspension(world, node):
    """It is unlocked, which is faster than a suspension and a wake."""

    def sample_again() -> str | None:
        node.connection()
        return None

    done = node.suspender.suspend(node.job(), "idle 15m", sample_again=sample_again)
    assert (done.failure, done.in_use) == ("a request is waiting: a connection waits on port 8000", True)
    assert (awake(world), "checkpoint" in world.effect_log) == (True, False)


def test_concurrent_suspensions_reserve_host_memory(world, node):
    """The first one has priority; memory that has moved, or stays on the GPU, is no longer counted."""
    node.suspender = node.suspender_with(read_memory=lambda pid: MemoryFacts(70 * GIB))
    with node.agent.reservations.of(8, 30 * GIB):
        with pytest.raises(Refused, match=r"does not fit into the node's free memory \(40 GiB\)"):
            node.sleep()
        assert [item.code for item in node.suspender.refusals(node.job())] == ["host-memory"]
        with node.agent.reservations.of(9, 60 * GIB):
            assert node.agent.reservations.before(9) == 30 * GIB
        node.agent.reservations.moved(8)
        assert node.sleep().failure is None
    assert node.agent.reservations.before(9) == 0


def test_wake_command_during_suspension_is_kept(world, node):
    """The job wakes when it is suspended; the command is refused for a running job."""
    with pytest.raises(Refused, match="does not sleep"):
        node.scheduler.wake(7, "alice")
    node.freezer.during = lambda: node.scheduler.wake(7, "alice")
    assert node.sleep().failure is None
    assert node.view()["asked_why"] == "requested by alice"
    node.round()
    assert awake(world)
    node.freezer.during = lambda: None
    node.sleep()
    node.round()
    assert asleep(world)


def test_prolog_waits_for_suspension_in_progress(world, node):
    """The changes of the prolog must not happen between suspension and wake."""
    with ThreadPoolExecutor(1) as pool:
        waiting = []

        def prolog() -> None:
            waiting.append(pool.submit(node.scheduler.wake_on, [0], "the prolog of job 9", 60))
            while not node.scheduler._requests._prologs:
                time.sleep(0.001)

        node.freezer.during = prolog
        assert node.sleep().failure is None
        assert node.view()["asked_why"] == "the prolog of job 9"
        node.round()
        assert waiting[0].result(60) == []
    assert awake(world)


def test_lost_helper_is_not_a_refusal(world, node, monkeypatch):
    """The next helper is queried; the refusal is not cached, as the job may have to make room."""
    users, lost = node.agent.cuda.users, []

    def once(pids):
        if not lost:
            lost.append(True)
            raise HelperLost("the helper for the CUDA driver was ended by signal 9")
        return users(pids)

    monkeypatch.setattr(node.agent.cuda, "users", once)
    assert node.suspender.refusals(node.job()) == []
    assert lost
    node.sleep()
    assert asleep(world)


@pytest.mark.parametrize("by_slurm", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_stops_and_continues_during_suspension_are_kept(world, node, before, by_slurm):
    """The script may wait for a process that it continued; Slurm itself continues what it has stopped."""
    script, _ = node.processes
    script.stopped = before
    checkpoint = node.agent.cuda.checkpoint

    def moves(pid: int) -> None:
        checkpoint(pid)
        script.stopped = not before
        node.freezer.by_slurm = by_slurm

    node.agent.cuda.checkpoint = moves
    node.sleep()
    node.freezer.by_slurm = False
    node.connection()
    node.round()
    assert node.scheduler.view(7) is None
    assert node.stopped() == [before if by_slurm else not before, False]


def settling(node, seconds=300.0):
    """Return a suspender that waits for listeners to settle."""
    return node.suspender_with(settle_s=seconds)


def refusal(node, suspender):
    """Return the code of the refusal of a suspension; empty: the job sleeps."""
    try:
        suspender.suspend(node.job(), "idle 15m", sample_again=lambda: None)
    except Refused as error:
        return error.refusal.code
    return ""


def test_server_that_is_still_starting_is_not_frozen(world, node):
    """It listens with a helper, and opens the port of its API later. The time begins with each change of listeners."""
    suspender = settling(node)
    helper = Sock(21, "tcp", LISTEN, 0, port=29500)
    node.sockets.now = {21: helper}
    assert refusal(node, suspender) == "not-started"
    world.clock += 299
    assert refusal(node, suspender) == "not-started"
    node.sockets.now = {21: helper, 11: LISTENER}
    assert refusal(node, suspender) == "not-started"
    world.clock += 299
    assert refusal(node, suspender) == "not-started"
    assert world.running()
    world.clock += 2
    assert (refusal(node, suspender), asleep(world)) == ("", True)


def test_server_that_has_received_a_request_has_started(world, node):
    """The connection may be closed by the next attempt."""
    suspender = settling(node)
    answered = Sock(12, "tcp", ESTABLISHED, 0, port=8000, received=100, received_ms=10**6, sent_ms=10**6, sent=1)
    node.sockets.now = {11: replace(LISTENER, waiting=0), 12: answered}
    assert (refusal(node, suspender), asleep(world)) == ("", True)


def test_job_that_no_request_can_reach_is_not_waited_for(world, node):
    """It wakes when there is room."""
    node.sockets.has, node.sockets.now = False, {}
    assert (refusal(node, settling(node)), asleep(world)) == ("", True)


@pytest.mark.parametrize(("wake", "wakes"), [("auto", True), ("hold", False)])
def test_job_wakes_after_the_longest_sleep(world, wake, wakes):
    """A request to a port that it had not opened is not seen. ``wake=hold`` has no limit."""
    node = Node(world, Rules(max_sleep_s=3600))
    node.sleep(option=replace(OPTION, wake=wake))
    world.clock += 3590
    node.round()
    assert asleep(world)
    world.clock += 10
    node.round()
    assert awake(world) is wakes
