"""A restore succeeds once its batch script has run for some seconds; no image is removed because a restore failed."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from agent_site import STEPS, Crash, World
from agent_world import Agent

from slurm_affinode.checkpoint.interface import CudaState
from slurm_affinode.model.suspension import SuspensionMail
from slurm_affinode.suspension import recovery
from slurm_affinode.suspension.context import SuspendSettings
from slurm_affinode.suspension.job.shepherd import Hold, Reply, Restored, Start, Wait

from .agent_sequences import begun_at_c2, ledger

FAILURES: dict[str, Callable[[Agent], None]] = {
    "CRIU": lambda agent: setattr(agent.imager, "fails", "bad size"),
    "GPU memory": lambda agent: setattr(agent.gpus, "free", 5),
    "GPU model": lambda agent: setattr(agent.gpus, "model", "A100"),
    "driver": lambda agent: setattr(agent.cuda, "restore", _fails),
    "death": lambda agent: _ends(agent, after_s=2.0, status=int(signal.SIGSEGV)),
}


def _fails(pid: int, **_: Any) -> None:
    raise OSError(5, "Input/output error")


def _ends(agent: Agent, *, after_s: float, status: int | None) -> None:
    """Have the batch script end after this time, and the shepherd report its status."""
    world, sleep, arrival, began = agent.world, agent.world.sleep, agent.arrival(), [0.0]
    agent.arrival = lambda: arrival  # type: ignore[method-assign]

    def passing(seconds: float) -> None:
        sleep(seconds)
        machine = world.nodes[agent.node]
        if not machine.processes or agent.cuda.state(machine.processes[-1].pid).value != "running":
            return
        began[0] = began[0] or world.clock
        if world.clock - began[0] >= after_s:
            machine.processes = machine.processes[1:]
            if status is not None:
                arrival.link.reaped[2] = status  # type: ignore[attr-defined]

    agent.build(clock=replace(agent.clock, sleep=passing))


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("failure", sorted(FAILURES))
def test_no_failed_restore_removes_the_image(
    world: World, monkeypatch: pytest.MonkeyPatch, failure: str, fresh: bool
) -> None:
    """Neither the restore itself, nor the epilog of its attempt, a sweep, or an agent that recovers afterwards."""
    monkeypatch.setattr(recovery, "_YOUNG_S", 0.0)
    agent = begun_at_c2(world, SuspendSettings(fresh=fresh, slurm_s=5, wake_backoff_s=0, free_s=2))
    FAILURES[failure](agent)
    reply: Reply = agent.restore()
    assert isinstance(reply, Start if fresh else Hold)
    agent.keeper.handle_epilog(7, requeued=True)
    agent.keeper.handle_epilog(7, requeued=False)
    agent.keeper.sweep(holds_lease=True)
    following = Agent(world, "c2", SuspendSettings(slurm_s=5, wake_backoff_s=0))
    following.keeper.recover()
    world.clock += 100
    following.keeper.sweep(holds_lease=True)
    following.waker.tick()
    following.keeper._queue.close()
    assert following.images(shared=True) == [1]
    if not fresh:
        following.waker.wake(following.notes.all()[0].key, "alice")
        world.start_run("c2")
        assert isinstance(Agent(world, "c2").restore(), Restored)
        assert world.steps() == [STEPS]


@pytest.mark.parametrize(("status", "how"), [(int(signal.SIGSEGV), "SIGSEGV"), (0x80 | signal.SIGKILL, "SIGKILL")])
def test_script_that_dies_soon_after_its_restore_is_held(
    world: World, monkeypatch: pytest.MonkeyPatch, status: int, how: str
) -> None:
    """By a signal: with its image, and a line and a mail that say how it ended and what its owner can do."""
    agent, mails, lines = begun_at_c2(world), [], []
    monkeypatch.setattr(agent.mailer, "deliver", mails.append)
    monkeypatch.setattr("slurm_affinode.suspension.restore.say", lambda fds, text: lines.append(text))
    _ends(agent, after_s=2.0, status=status)
    assert isinstance(agent.restore(), Hold)
    assert (world.state, world.held, world.nodes["c2"].processes) == ("PENDING", True, [])
    assert re.search(f"its script was ended by {how} [23]s after it was restored;", lines[-1])
    assert "its image is kept; to try again: slurm-affinode wake 7" in lines[-1]
    assert [mail.kind for mail in mails] == ["failed"]
    assert how in (mails[0].why or "")
    assert ledger(world).restored_ms is None
    assert agent.notes.last_restore("alpha", 7) is None


@pytest.mark.parametrize("status", [0, 3 << 8, (128 + signal.SIGSEGV) << 8, None])
def test_script_that_ends_by_itself_was_restored(
    world: World, monkeypatch: pytest.MonkeyPatch, status: int | None
) -> None:
    """With any exit status, which is the job's; also if its shepherd, of an earlier version, reports nothing."""
    agent, mails = begun_at_c2(world), list[SuspensionMail]()
    monkeypatch.setattr(agent.mailer, "deliver", mails.append)
    _ends(agent, after_s=2.0, status=status)
    assert agent.restore() == Restored(2)
    assert [mail.kind for mail in mails] == ["restored"]
    assert not agent.journal.open_journals()
    assert agent.notes.all() == []
    assert (world.state, world.held) == ("RUNNING", False)


def test_script_that_runs_on_is_restored_after_its_time(world: World) -> None:
    """A later end is its own. Reports are requested from the shepherd before anything is restored."""
    agent = begun_at_c2(world, SuspendSettings(slurm_s=5, alive_s=5.0))
    _ends(agent, after_s=8.0, status=int(signal.SIGSEGV))
    began = world.clock
    assert agent.restore() == Restored(2)
    assert 5.0 <= world.clock - began < 8.0
    assert agent.arrival().link.sent == [Wait()]  # type: ignore[attr-defined]


def test_check_can_be_turned_off(world: World) -> None:
    agent = begun_at_c2(world, SuspendSettings(slurm_s=5, alive_s=0.0))
    _ends(agent, after_s=0.1, status=int(signal.SIGSEGV))
    assert agent.restore() == Restored(2)


@pytest.mark.parametrize("after_s", [2.0, 30.0])
def test_report_of_an_aborted_restore_is_not_that_of_the_script(world: World, after_s: float) -> None:
    """A partial tree of a damaged copy was killed before, and its root had the same PID."""
    agent = begun_at_c2(world)
    _ends(agent, after_s=after_s, status=None)
    agent.arrival().link.reaped[2] = int(signal.SIGKILL)  # type: ignore[attr-defined]
    assert agent.restore() == Restored(2)


@pytest.mark.parametrize("then", [("CANCELLED", 1), ("PENDING", 2)])
def test_script_ended_by_slurm_was_not_lost_by_its_restore(
    world: World, monkeypatch: pytest.MonkeyPatch, then: tuple[str, int]
) -> None:
    """Slurm kills its processes within the first seconds: it was canceled or preempted, which is no failure."""
    agent, mails = begun_at_c2(world), list[SuspensionMail]()
    monkeypatch.setattr(agent.mailer, "deliver", mails.append)
    _ends(agent, after_s=2.0, status=int(signal.SIGKILL))
    sleep = agent.clock.sleep

    def ended(seconds: float) -> None:
        sleep(seconds)
        if len(world.nodes["c2"].processes) == 1:
            world.state, world.restarts = then

    agent.build(clock=replace(agent.clock, sleep=ended))
    assert isinstance(agent.restore(), Hold)
    assert mails == []
    assert ledger(world).restore_failure is None


def _killed_while_it_watches(agent: Agent) -> None:
    """Have the agent end during the first pause in which the GPU memory of the job is restored; return then."""
    world, sleep = agent.world, agent.world.sleep

    def passing(seconds: float) -> None:
        sleep(seconds)
        if any(process.cuda is CudaState.RUNNING for process in world.nodes[agent.node].processes):
            raise Crash("killed")

    agent.build(clock=replace(agent.clock, sleep=passing))
    with pytest.raises(Crash):
        agent.restore()


def test_processes_run_on_if_the_agent_ends_while_it_watches_them(world: World) -> None:
    """Their work since the restore is neither undone nor repeated by the next agent."""
    _killed_while_it_watches(begun_at_c2(world))
    machine = world.nodes["c2"]
    before = list(machine.processes)
    before[1].steps += 5
    restored_ms, effects = round(world.clock * 1000), list(world.effect_log)
    world.clock += 100
    following = Agent(world, "c2")
    following.keeper.recover()
    assert following.restore() == Restored(2)
    assert machine.processes == before
    assert [process.steps for process in machine.processes] == [0, STEPS + 5]
    assert world.effect_log == effects
    assert ledger(world).restored_ms <= restored_ms
    assert not following.journal.open_journals()


def test_script_that_ended_without_agent_was_restored(world: World) -> None:
    """How it has ended is known to its shepherd, which gives its status to Slurm."""
    _killed_while_it_watches(begun_at_c2(world))
    del world.nodes["c2"].processes[:]
    assert Agent(world, "c2").restore() == Restored(2)
    assert "criu restore" in world.effect_log
    assert world.effect_log.count("criu restore") == 1


def test_next_attempt_restores_its_image_although_the_last_one_was_running(world: World) -> None:
    """Only in the namespace of the shepherd that the journal names do the processes run on."""
    _killed_while_it_watches(begun_at_c2(world))
    world.nodes["c2"].processes = []
    world.state, world.restarts = "PENDING", world.restarts + 1
    world.start_run("c2")
    assert Agent(world, "c2").restore() == Restored(2)
    assert world.effect_log.count("criu restore") == 2


def test_time_in_which_the_script_is_watched_counts_as_run_time(world: World) -> None:
    """The restore has taken until the process tree ran."""
    agent = begun_at_c2(world)
    began = world.clock
    assert isinstance(agent.restore(), Restored)
    assert world.clock - began >= agent.settings.alive_s
    assert ledger(world).restored_ms < 1000 * (began + agent.settings.alive_s)
