"""Falling asleep in place, with the agent killed before every single effect; and what is refused."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from agent_site import Crash, Process
from inplace_site import BACK, GIB, OPEN, OUT, QUIET, Node, asleep, awake, entries

from slurm_affinode.agent.inplace.sharing import Rules
from slurm_affinode.agent.interface import Refused
from slurm_affinode.agent.memory import HostMemory
from slurm_affinode.checkpoint.facts import MemoryFacts, ProcessFacts
from slurm_affinode.checkpoint.interface import Capabilities, CudaState, HelperLost
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.suspension import Mode, Phase


def test_it_sleeps_and_a_request_wakes_it(world, node):
    """All of it once, with what status, comment and ledger say of it."""
    done = node.sleep()
    assert (done.phase, done.failure, done.gpus, done.gpu_bytes) == (Phase.FROZEN, None, 1, 48 * GIB)
    assert (world.effect_log, node.phase()) == (OUT, Phase.FROZEN)
    assert asleep(world)
    assert node.director.holds(7) is Phase.FROZEN
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
    assert (awake(world), node.phase(), node.director.view(7)) == (True, Phase.RUNNING, None)
    assert node.agent.parts.journal.open_records() == []
    [entry] = entries(world)
    times = [entry.began_ms, entry.locked_ms, entry.parked_ms, entry.released_ms, entry.restoring_ms, entry.restored_ms]
    assert times == sorted(times)
    assert (entry.mode, entry.gpu_bytes, entry.queued_ms, entry.failure) == ("inplace", 48 * GIB, None, None)


@pytest.mark.parametrize("second", [None, *range(1, 5)])
@pytest.mark.parametrize("first", range(1, len(OUT) + len(BACK) + 1))
def test_an_agent_killed_before_each_effect_and_again_while_it_recovers(world, node, first, second):
    """The next one has it running, or asleep and ready to wake; a request then is answered with its memory whole."""
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
    assert node.agent.parts.journal.open_records() == []
    node.sockets.now = dict(QUIET)
    assert node.sleep().phase is Phase.FROZEN


def test_a_request_while_it_is_put_to_sleep_wakes_it_at_once(world, node):
    """It may have been read, and its answer wait for the GPU."""

    def read() -> None:
        node.sockets.now = {**QUIET, 12: replace(OPEN, received=80)}

    node.freezer.during = read
    assert node.sleep().failure is None
    node.round()
    assert awake(world)


def test_a_process_that_begins_to_use_the_gpu_while_it_is_put_to_sleep(world, node):
    """Its memory would stay there, and status say that all of it is in host memory: it is taken back."""

    def begin() -> None:
        node.processes.append(Process(node.processes[-1].pid + 1, 3))
        node.cards.others = -40 * GIB  # a GPU on which there is room for both

    node.freezer.during = begin
    assert "has begun to use a GPU" in str(node.sleep().failure)
    node.freezer.during = lambda: None
    node.round()
    assert node.stopped() == [False] * 3
    assert {process.cuda for process in node.processes} == {None, CudaState.RUNNING}


def test_somebody_who_asks_keeps_it_awake(world, node):
    """Nothing is touched."""
    node.connection()
    with pytest.raises(Refused, match="a connection waits on port 8000"):
        node.sleep()
    node.sockets.silent = True
    with pytest.raises(Refused, match="requests to it could not be noticed"):
        node.sleep()
    assert world.effect_log == []


def test_it_is_not_idle_any_more(world, node):
    """Seen under the lock: the lock is taken off, nothing has moved."""
    done = node.suspender.suspend(node.job(), "idle 15m", look_again=lambda: "GPU 0: utilization 40")
    assert done.failure == "it is not idle any more: GPU 0: utilization 40"
    assert (awake(world), node.phase()) == (True, Phase.RUNNING)
    assert [entry.failure for entry in entries(world)] == [done.failure]
    assert node.agent.parts.journal.open_records() == []


def test_processes_that_do_not_stop_and_gpu_memory_that_does_not_move(world, node):
    """It is woken again, by the way of a sleeper: somebody else may have its place by then."""
    node.freezer.fails = "process 7 (x) does not stop within 1 s"
    assert node.sleep().failure == node.freezer.fails
    node.cards.others = 60 * GIB
    node.round()
    assert "is left there: others hold the rest" in node.view()["waits"]
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
def test_what_is_not_below_its_script_is_refused(world, node, changes, code, monkeypatch):
    """By name, before anything is touched."""
    slurm: Job = replace(node.agent.parts.slurm.job(7), **changes)
    assert code in [refusal.code for refusal in node.suspender.refusals(node.job(slurm=slurm))]
    monkeypatch.setattr(node.agent.parts.slurm, "job", lambda job: slurm)
    with pytest.raises(Refused):
        node.sleep()
    assert world.effect_log == []


def test_what_could_not_wake_or_has_nothing_to_give_is_refused(world, node):
    """More memory than may be awake at once; none at all; a script that has not begun."""
    tight = Node(world, Rules(awake_limit_pct=50))
    assert [one.code for one in tight.suspender.refusals(tight.job())] == ["awake-limit"]
    next(p for p in node.processes if p.cuda).cuda = None
    assert [one.code for one in node.suspender.refusals(node.job())] == ["no-gpu-memory"]
    world.nodes["c1"].processes = []
    assert "not-started" in [one.code for one in node.suspender.refusals(node.job())]


def test_what_does_not_fit_into_host_memory_is_refused_with_the_numbers(world, node):
    """Below the job's own limit, and on the node; nothing is touched."""
    for memory, said in (
        (MemoryFacts(1 << 40, 40 << 30), "(48 GiB) does not fit below its memory limit, which leaves 40 GiB"),
        (MemoryFacts(20 << 30), "(48 GiB) does not fit into the node's free memory (20 GiB)"),
    ):
        sleeping = node.suspender._by_mode[Mode.INPLACE]
        sleeping._memory = HostMemory(replace(node.agent.parts, memory=lambda pid, memory=memory: memory))
        with pytest.raises(Refused) as refused:
            node.sleep()
        assert refused.value.refusal.code == "host-memory"
        assert said in str(refused.value)
    assert world.effect_log == []


@pytest.mark.parametrize(
    ("params", "limit", "found"),
    [("OverMemoryKill", "40G", ["host-memory"]), ("UsePss", "40G", []), ("OverMemoryKill", "60G", [])],
)
def test_slurm_that_ends_jobs_above_their_memory_limit(node, monkeypatch, params, limit, found):
    """What moves into host memory would be the job's end."""
    monkeypatch.setattr(node.agent.parts.slurm, "config", lambda: {"JobAcctGatherParams": params})
    slurm = replace(node.agent.parts.slurm.job(7), tres_allocated={"mem": limit})
    assert [one.code for one in node.suspender.refusals(node.job(slurm=slurm))] == found


def test_an_old_driver_cannot_do_with_some_of_the_nodes_gpus(node, monkeypatch):
    """Neither in place: it does not permit the checkpoint, or cannot put the memory back."""
    parts = node.agent.parts
    monkeypatch.setattr(parts.cuda, "capabilities", lambda: Capabilities("570.211.01", checkpoint=True))
    monkeypatch.setattr(parts.slurm, "config", lambda: {"ConstrainDevices": "yes", "TaskPlugin": "task/cgroup"})
    assert not node.suspender.refusals(node.job())
    mine = parts.gpus.devices()
    monkeypatch.setattr(parts.gpus, "devices", lambda: (*mine, replace(mine[0], uuid="GPU-another")))
    assert [one.code for one in node.suspender.refusals(node.job(devices=mine))] == ["driver"]


def test_a_daemon_of_the_script_counts(world, node, monkeypatch):
    """Slurm adds up the memory of what has left the script's tree as well; what talks to MPS there cannot be moved."""
    monkeypatch.setattr(node.agent.parts.slurm, "config", lambda: {"JobAcctGatherParams": "OverMemoryKill"})
    daemon = ProcessFacts(99, "daemon", (os.getuid(),) * 4, memory=20 * GIB, mps=True)
    look = node.agent.look
    node.suspender._by_mode[Mode.INPLACE]._parts = replace(
        node.agent.parts, look=lambda init, root: replace(look(init, root), outside=(daemon,))
    )
    slurm = replace(node.agent.parts.slurm.job(7), tres_allocated={"mem": "60G"})
    assert [one.code for one in node.suspender.refusals(node.job(slurm=slurm))] == ["mps", "host-memory"]


def test_slurm_need_not_answer(world, node):
    """Nothing is asked of it: its last word has to do."""
    job = node.job()
    world.answers = False
    assert node.suspender.suspend(job, "idle", look_again=lambda: None).failure is None
    node.connection()
    node.round()
    assert awake(world)


def test_one_at_a_time(world, node):
    """A job that is being put to sleep is not put to sleep beside that."""
    seen: list[str] = []

    def again() -> str | None:
        try:
            node.sleep()
        except Refused as error:
            seen.append(error.refusal.code)
        return None

    node.suspender.suspend(node.job(), "idle", look_again=again)
    assert seen == ["busy"]


def test_the_lock_of_a_process_in_a_container_is_taken_off_too(world, node):
    """It is in a PID namespace below the job's: when the suspension is taken back, and by the next agent."""
    node.processes[1].inside = True
    done = node.suspender.suspend(node.job(), "idle 15m", look_again=lambda: "GPU 0: utilization 40")
    assert (done.failure is not None, awake(world)) == (True, True)

    def killed() -> str | None:
        raise Crash

    with pytest.raises(Crash):
        node.suspender.suspend(node.job(), "idle 15m", look_again=killed)
    assert not awake(world)
    Node(world).recover()
    assert awake(world)


def test_a_request_before_its_memory_moves_is_answered_first(world, node):
    """Its lock is taken off: that is sooner than there and back."""

    def look_again() -> str | None:
        node.connection()
        return None

    done = node.suspender.suspend(node.job(), "idle 15m", look_again=look_again)
    assert done.failure == "somebody asks something of it: a connection waits on port 8000"
    assert (awake(world), "checkpoint" in world.effect_log) == (True, False)


def test_two_at_once_do_not_count_on_the_same_host_memory(world, node):
    """Who came first is served first; what has moved, or ran on, is not counted any more."""
    memory = replace(node.agent.parts, memory=lambda pid: MemoryFacts(70 * GIB))
    node.suspender._by_mode[Mode.INPLACE]._memory = HostMemory(memory)
    with node.agent.parts.reservations.of(8, 30 * GIB):
        with pytest.raises(Refused, match=r"does not fit into the node's free memory \(40 GiB\)"):
            node.sleep()
        assert [one.code for one in node.suspender.refusals(node.job())] == ["host-memory"]
        with node.agent.parts.reservations.of(9, 60 * GIB):
            assert node.agent.parts.reservations.before(9) == 30 * GIB
        node.agent.parts.reservations.moved(8)
        assert node.sleep().failure is None
    assert node.agent.parts.reservations.before(9) == 0


def test_who_asks_for_it_while_it_falls_asleep_is_not_forgotten(world, node):
    """It wakes when it has got there; a job that just runs is not suspended."""
    with pytest.raises(Refused, match="does not sleep"):
        node.director.wake(7, "alice")
    node.freezer.during = lambda: node.director.wake(7, "alice")
    assert node.sleep().failure is None
    assert node.view()["asked_why"] == "asked by alice"
    node.round()
    assert awake(world)
    node.freezer.during = lambda: None
    node.sleep()
    node.round()
    assert asleep(world)


def test_a_prolog_waits_for_one_that_falls_asleep(world, node):
    """What the prolog changes must not come between its going and its coming back."""
    with ThreadPoolExecutor(1) as pool:
        waiting = []

        def prolog() -> None:
            waiting.append(pool.submit(node.director.wake_on, [0], "the prolog of job 9", 60))
            while not node.director._wishes._prologs:
                time.sleep(0.001)

        node.freezer.during = prolog
        assert node.sleep().failure is None
        assert node.view()["asked_why"] == "the prolog of job 9"
        node.round()
        assert waiting[0].result(60) == []
    assert awake(world)


def test_a_helper_that_has_ended_is_no_reason_against_it(world, node, monkeypatch):
    """The next one is asked; a job that is to make room is not kept for the time that an answer is good for."""
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
def test_what_its_job_stops_and_lets_go_while_its_memory_moves_is_as_the_job_had_it_last(world, node, before, by_slurm):
    """Its script may wait for one that it has let go on; what Slurm has stopped meanwhile it lets go on itself."""
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
    assert node.director.view(7) is None
    assert node.stopped() == [before if by_slurm else not before, False]
