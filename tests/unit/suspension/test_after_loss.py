"""A job that is lost after its restore: it returns to its image, starts from its beginning, or is held."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from agent_site import STEPS, World
from agent_world import Agent

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.core.suspension import after_loss
from slurm_affinode.model.suspension import AfterLoss, SuspendOption, SuspensionMail
from slurm_affinode.suspension import recovery
from slurm_affinode.suspension import restore as restore_module
from slurm_affinode.suspension.context import SuspendSettings
from slurm_affinode.suspension.job.shepherd import Hold, Restored, Start
from slurm_affinode.suspension.mail import Mailer
from slurm_affinode.suspension.records.shared_state import LastRestore

from .agent_sequences import begun_at_c2

IMAGE, START, HOLD = AfterLoss.IMAGE, AfterLoss.START, AfterLoss.HOLD


class Mails(Mailer):
    """Records mails."""

    def __init__(self) -> None:
        self.sent: list[SuspensionMail] = []

    def deliver(self, event: SuspensionMail) -> None:
        self.sent.append(event)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines written into the job's output."""
    result: list[str] = []
    monkeypatch.setattr(restore_module, "say", lambda fds, text: result.extend(text.splitlines()))
    return result


def lost(world: World, ran_s: float, node: str = "c1", settings: SuspendSettings | None = None) -> Agent:
    """Requeue the running job after this time, and start it on a node."""
    world.clock += ran_s
    for machine in world.nodes.values():
        machine.init, machine.processes = None, []
    world.submit += timedelta(seconds=world.clock - world.submit.timestamp())
    world.restarts += 1
    world.start_run(node)
    return Agent(world, node, settings, Mails())


def settings(**changes: Any) -> SuspendSettings:
    return replace(SuspendSettings(slurm_s=5, wake_backoff_s=0), **changes)


def with_option(agent: Agent, option: AfterLoss | None) -> Agent:
    """Have the job's shepherd report this value of ``after_loss``."""
    arrival = agent.arrival

    def changed() -> Any:
        made = arrival()
        return replace(made, hello=replace(made.hello, option=SuspendOption(after_loss=option)))

    agent.arrival = changed  # type: ignore[method-assign]
    return agent


@pytest.mark.parametrize(
    ("option", "site", "ran_s", "discard_s", "action"),
    [
        (None, IMAGE, 3600.0, 86400.0, IMAGE),
        (None, IMAGE, 86401.0, 86400.0, START),
        (None, IMAGE, 86401.0, 0.0, IMAGE),
        (None, IMAGE, None, 1.0, IMAGE),
        (None, HOLD, 86401.0, 86400.0, HOLD),
        (None, START, 1.0, 0.0, START),
        (IMAGE, START, 86401.0, 86400.0, IMAGE),
        (START, IMAGE, 1.0, 0.0, START),
        (HOLD, IMAGE, None, 0.0, HOLD),
    ],
)
def test_owner_has_precedence_and_unknown_discards_nothing(
    option: AfterLoss | None, site: AfterLoss, ran_s: float | None, discard_s: float, action: AfterLoss
) -> None:
    assert after_loss(option, site, ran_s, discard_s).action is action


def test_first_restore_is_not_a_loss(world: World, lines: list[str]) -> None:
    """Also if the job had been requeued before, and its restore was not reached."""
    agent = begun_at_c2(world)
    assert isinstance(agent.restore(), Restored)
    assert lines[0].startswith("suspended on c1: idle 15m")
    restored = agent.keeper.last_restore(agent.watched())
    assert restored is not None
    assert (restored.node, restored.again, restored.discarded) == ("c2", False, False)


def test_lost_job_returns_to_its_image(world: World, lines: list[str]) -> None:
    """Its output, comment, mail and status name the checkpoint and the lost work."""
    begun_at_c2(world).restore()
    lines.clear()
    agent = lost(world, 7500)
    assert agent.restore() == Restored(2)
    assert world.steps() == [STEPS]
    [line] = lines
    assert line.startswith("restored on c1 from its checkpoint of 2026-11-20T10:0")
    assert line.endswith("again; 2h 5m of work since then is lost: its attempt on c2 was lost 2h 5m after its restore")
    assert world.comment.startswith("lost: its attempt on c2 was lost 2h 5m after its restore; it has returned to its")
    [mail] = agent.mailer.sent  # type: ignore[attr-defined]
    assert (mail.kind, mail.lost, mail.slept_s) == ("restored", True, None)
    assert mail.lost_s == pytest.approx(7500, abs=10)
    restored = agent.keeper.last_restore(agent.watched())
    assert restored is not None
    assert (restored.node, restored.again, restored.lost_s) == ("c1", True, mail.lost_s)


def test_each_loss_is_measured_from_its_own_restore(world: World, lines: list[str]) -> None:
    begun_at_c2(world).restore()
    lost(world, 7200).restore()
    lines.clear()
    assert lost(world, 600, "c2").restore() == Restored(2)
    assert re.search(r"; 10m( \ds)? of work since then is lost: its attempt on c1 ", lines[0])


@pytest.mark.parametrize("by", ["time", "option", "site"])
def test_job_starts_from_its_beginning(
    world: World, lines: list[str], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The output says why. The image is never restored again, and the next sweep removes it."""
    begun_at_c2(world).restore()
    lines.clear()
    changes = {"time": {"discard_image_after_s": 3600.0}, "site": {"after_loss": START}, "option": {}}[by]
    agent = with_option(lost(world, 7200, settings=settings(**changes)), START if by == "option" else None)
    assert agent.restore() == Start()
    assert world.steps() == [0]
    [line] = lines
    assert line.startswith("starts from its beginning, not from its checkpoint of 2026-11-20T10:0")
    why = {
        "time": "this site discards an image when its job has run for 1h",
        "option": "after_loss=start",
        "site": "this site has suspend.after_loss = start",
    }[by]
    assert line.endswith(f"its attempt on c2 was lost 2h after its restore, and {why}")
    assert world.comment.startswith("lost: its attempt on c2 was lost 2h after its restore; it has started from its be")
    [mail] = agent.mailer.sent  # type: ignore[attr-defined]
    assert (mail.kind, mail.lost, mail.fresh) == ("failed", True, True)
    restored = agent.keeper.last_restore(agent.watched())
    assert restored is not None
    assert restored.discarded
    again = lost(world, 5, "c2")
    assert again.restore() == Start()
    assert again.keeper.identify(again.watched())[1] == 1
    monkeypatch.setattr(recovery, "_YOUNG_S", 0.0)
    world.clock += 100
    again.keeper.sweep(holds_lease=True)
    assert again.images(shared=True) == []


def test_job_is_suspended_again_after_it_started_over(world: World) -> None:
    """Its new image has another number and is restored; the discarded one is not."""
    begun_at_c2(world).restore()
    agent = with_option(lost(world, 60, "c2"), START)
    agent.restore()
    world.nodes["c2"].processes[1].steps = 5
    done = agent.suspend()
    agent.settle()
    assert (done.failure, done.seq) == (None, 2)
    world.nodes["c2"].init = None
    world.start_run("c1")
    assert Agent(world, "c1").restore() == Restored(2)
    assert world.steps() == [5]


@pytest.mark.parametrize("choice", ["image", "start", "released"])
def test_held_job_is_not_held_again_when_its_owner_has_decided(world: World, lines: list[str], choice: str) -> None:
    """No failure is recorded, so that nothing but its owner wakes it."""
    begun_at_c2(world).restore()
    lines.clear()
    agent = with_option(lost(world, 7200), HOLD)
    assert isinstance(agent.restore(), Hold)
    assert (world.state, world.held) == ("PENDING", True)
    assert "slurm-affinode wake 7 --from-start" in lines[0]
    assert "slurm-affinode wake 7 --from-start" in world.comment
    assert agent.images(shared=True) == [1]
    [mail] = agent.mailer.sent  # type: ignore[attr-defined]
    assert (mail.kind, mail.lost, mail.fresh) == ("failed", True, False)
    [note] = agent.notes.all()
    assert (note.failure, note.wake) == (None, "hold")
    world.clock += 10000
    agent.waker.tick()
    assert world.held
    if choice != "released":
        agent.waker.wake(note.key, "alice", from_start=choice == "start")
        assert not world.held
    world.start_run("c2")
    agent = with_option(Agent(world, "c2"), HOLD)
    assert isinstance(agent.restore(), Start if choice == "start" else Restored)
    assert world.steps() == [0 if choice == "start" else STEPS]
    if choice == "start":
        assert with_option(lost(world, 5), HOLD).restore() == Start()
    else:
        assert isinstance(with_option(lost(world, 5), HOLD).restore(), Hold)


def test_work_lost_is_unknown_after_an_attempt_in_between(world: World, lines: list[str]) -> None:
    """Slurm reports the last requeue only: the image is not discarded by a time that is not known."""
    begun_at_c2(world).restore()
    lines.clear()
    world.restarts += 1
    agent = lost(world, 7200, settings=settings(discard_image_after_s=60.0))
    assert agent.restore() == Restored(2)
    assert "again; the work since then is lost: its attempt on c2 was lost at an unknown time" in lines[0]


def test_decision_that_cannot_be_recorded_holds_the_job(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a later attempt would be restored from the discarded image."""

    def full(restore: LastRestore) -> None:
        raise AffinodeError("no space left")

    begun_at_c2(world).restore()
    agent = with_option(lost(world, 60), START)
    monkeypatch.setattr(agent.notes, "write_restore", full)
    assert isinstance(agent.restore(), Hold)
    assert agent.images(shared=True) == [1]
    assert "no space left" in world.comment


def test_forged_record_of_a_restore_is_ignored(world: World) -> None:
    """It is not signed by a node, so that nothing is discarded."""
    agent = begun_at_c2(world)
    agent.restore()
    (path,) = (world.root / "shared" / "restored").iterdir()
    path.write_text(path.read_text().replace('"discarded": false', '"discarded": true', 1))
    assert lost(world, 60).notes.last_restore("alpha", 7) is None


def test_record_of_a_restore_is_kept_until_the_job_ends(world: World) -> None:
    agent = begun_at_c2(world)
    agent.restore()
    agent.keeper.sweep(holds_lease=True)
    assert agent.notes.last_restore("alpha", 7) is not None
    world.state = "COMPLETED"
    world.clock += 100
    agent.keeper.sweep(holds_lease=True)
    assert agent.notes.last_restore("alpha", 7) is None


def test_restore_completed_by_the_next_agent_is_recorded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent was killed after the reply to the shepherd: a later loss is noticed nevertheless."""
    agent = begun_at_c2(world)
    with monkeypatch.context() as patch:
        patch.setattr(agent.notes, "write_restore", lambda restore: None)
        patch.setattr("slurm_affinode.suspension.records.journal.JobJournal.close", lambda self: None)
        agent.restore()
    following = Agent(world, "c2")
    following.keeper.registered(following.watched())
    restored = following.notes.last_restore("alpha", 7)
    assert restored is not None
    assert (restored.node, restored.run, restored.seq) == ("c2", 1, 1)
