"""Who wakes sleeping jobs, when, and the small files with which the nodes agree on it."""

from __future__ import annotations

import os
import stat
from dataclasses import replace

import pytest
from agent_sequences import recovered
from agent_site import World, make_job
from agent_world import KEY, Agent

from slurm_affinode.agent import statusrows, words
from slurm_affinode.agent.interface import Refused
from slurm_affinode.agent.ledger import Ledger
from slurm_affinode.agent.notes import Note, Notes
from slurm_affinode.agent.parts import Settings
from slurm_affinode.agent.waker import Free, Lease, waited_for
from slurm_affinode.checkpoint.nodekeys import Signer
from slurm_affinode.model.cluster import GpuCount, Node
from slurm_affinode.model.ledger import LedgerEntry, decode
from slurm_affinode.model.suspension import JobKey, LiveRun
from slurm_affinode.slurm.faults import InvalidStateError

NODE = Node(
    name="c2", state="MIXED", flags=frozenset(), reason=None, reason_user=None, reason_time=None,
    gpus=GpuCount(2, "h100"), gpus_used=GpuCount(1, "h100"), partitions=("gpu",), cpus=8, cpus_used=2, memory_mib=16000,
    memory_used_mib=1000, features=(), version="24.11",
)  # fmt: skip


@pytest.fixture
def asleep(tmp_path):
    """A job that sleeps, and the agent of another node."""
    world = World(tmp_path)
    world.start_run("c1")
    world.start_script("c1")
    agent = Agent(world, "c1")
    agent.suspend()
    agent.settle()
    waker = Agent(world, "c2", Settings(wake_backoff_s=100, wake_backoff_limit_s=1000, wake_every_s=1))
    return world, waker


def look(world, agent, nodes, jobs=()):
    agent.parts.slurm.nodes = lambda: nodes
    agent.parts.slurm.jobs = lambda: (make_job(world), *jobs)
    world.clock += 2
    agent.waker.tick()


def test_a_job_wakes_when_it_has_slept_enough_and_gpus_are_free(asleep):
    world, agent = asleep
    look(world, agent, (NODE,))
    assert world.held
    world.clock += 100
    look(world, agent, ())
    assert world.held
    look(world, agent, (replace(NODE, flags=frozenset({"DRAIN"})),))
    assert world.held
    look(world, agent, (NODE,))
    assert not world.held


def test_a_job_that_has_slept_thousands_of_times_wakes_and_keeps_nobody_asleep(asleep):
    """Its sleep is doubled up to the limit, whatever that would come to."""
    world, agent = asleep
    agent.parts.notes.write(replace(agent.parts.notes.all()[0], seq=3000))
    image = agent.parts.shared.get("alpha.7", 1)
    agent.parts.shared.find = lambda run: replace(image, manifest=replace(image.manifest, seq=3000))
    world.clock += 900
    look(world, agent, (NODE,))
    assert world.held
    world.clock += 100
    look(world, agent, (NODE,))
    assert not world.held


def test_a_clock_that_is_set_back_does_not_keep_jobs_asleep(asleep):
    """It was wrong when the agent looked last: the next look is not put off until then."""
    world, agent = asleep
    world.clock += 1e6
    look(world, agent, ())
    world.clock -= 1e6
    world.clock += 100
    look(world, agent, (NODE,))
    assert not world.held


def test_nobody_who_waits_is_overtaken(asleep):
    world, agent = asleep
    world.clock += 100
    other = make_job(world, job_id=9, held=False, reason="Resources")
    look(world, agent, (NODE,), (other,))
    assert world.held
    look(world, agent, (NODE,), (replace(other, reason="Dependency"),))
    assert not world.held


@pytest.mark.parametrize(("wake", "released"), [("hold", False), ("now+30", True), ("2030-01-01", True), ("now", True)])
def test_the_option_says_when(asleep, wake, released):
    world, agent = asleep
    agent.parts.notes.write(replace(agent.parts.notes.all()[0], wake=wake))
    look(world, agent, ())
    assert world.held is not released
    assert any(effect.startswith("begin 20") for effect in world.effect_log) is (wake not in ("hold", "now"))


@pytest.mark.parametrize("wake", ["auto", "now", "now+30"])
def test_one_whose_restore_has_failed_is_not_released_again_by_itself(asleep, wake):
    """It would fail again and again; who asks for it anew gets another try."""
    world, agent = asleep
    (note,) = agent.parts.notes.all()
    agent.parts.notes.write(replace(note, wake=wake, failure="criu/pages-1.img: its contents have changed"))
    for _ in range(3):
        world.clock += 1000
        look(world, agent, (NODE,))
    assert world.held
    (one,) = agent.keeper.suspended()
    assert (one.wake, one.failure) == ("hold", "criu/pages-1.img: its contents have changed")
    agent.waker.wake(note.key, "alice")
    assert not world.held


def test_a_job_whose_old_run_slurm_still_ends_wakes_as_soon_as_it_is_in_the_queue(asleep):
    """The agent has done its part, and has said so; the epilog runs on."""
    world, agent = asleep
    (note,) = agent.parts.notes.all()
    in_queue = agent.parts.slurm.job
    agent.parts.slurm.job = lambda job_id: replace(in_queue(job_id), state="COMPLETING", held=False)
    assert agent.waker.wake(note.key, "alice") is False
    agent.parts.slurm.job = in_queue
    look(world, agent, ())
    assert not world.held


@pytest.mark.parametrize("wake", ["auto", "now"])
def test_one_that_could_not_start_is_not_released_again_at_once(asleep, wake):
    """Its node had no shepherd, or no agent, and has put it back: held, with nobody to say why."""
    world, agent = asleep
    agent.parts.notes.write(replace(agent.parts.notes.all()[0], wake=wake))
    world.clock += 200
    look(world, agent, (NODE,))
    assert not world.held
    world.held = True
    look(world, agent, (NODE,))
    assert world.held
    world.clock += 100
    look(world, agent, (NODE,))
    assert not world.held


def test_a_job_that_slurm_does_not_release_keeps_no_other_asleep(asleep):
    """Its begin time is refused; the one behind it wakes."""
    world, agent = asleep
    note = agent.parts.notes.all()[0]
    agent.parts.notes.write(replace(note, wake="now"))
    agent.parts.notes.write(replace(note, job_id=9, wake="2999-01-01", since_epoch=note.since_epoch - 10))
    agent.waker._everywhere = lambda job: True

    def refuse(job, when):
        raise InvalidStateError("invalid time")

    agent.parts.slurm.set_begin = refuse
    look(world, agent, (), (make_job(world, job_id=9),))
    assert not world.held


def test_a_task_of_an_array_is_called_as_its_owner_calls_it(tmp_path):
    """Its number is one that nobody has seen, or the one that means the whole array."""
    world = World(tmp_path)
    world.start_run("c1")
    world.start_script("c1")
    agent = Agent(world, "c1")
    as_told = agent.parts.slurm.job
    agent.parts.slurm.job = lambda job_id: replace(as_told(job_id), array_job_id=5, array_task_id=2)
    agent.suspend()
    agent.settle()
    assert world.comment.endswith("wake with: slurm-affinode wake 5_2")
    (one,) = agent.keeper.suspended()
    row = statusrows.suspended(one, None, user="alice", now_epoch=world.clock)
    assert (row["job_id"], row["shown_id"]) == (7, "5_2")


def test_what_an_administrator_holds_is_not_released_by_its_owner_nor_by_itself(asleep):
    """The agent is root: Slurm would let it release what the owner may not."""
    world, agent = asleep
    (note,) = agent.parts.notes.all()
    as_told = agent.parts.slurm.job
    agent.parts.slurm.job = lambda job_id: replace(as_told(job_id), held_by_admin=True)
    world.clock += 10_000
    look(world, agent, (NODE,))
    with pytest.raises(Refused, match="job 7 is held by an administrator"):
        agent.waker.wake(note.key, "alice")
    assert world.held
    assert agent.parts.notes.all() == [note]  # nor is it when the hold is gone: it was not woken
    assert agent.waker.wake(note.key, "admin", admin=True)
    assert not world.held


def test_a_job_whose_restore_failed_is_woken_by_hand_only(asleep):
    world, agent = asleep
    note = agent.parts.notes.all()[0]
    agent.parts.notes.write(replace(note, failure="bad size"))
    world.clock += 10_000
    look(world, agent, (NODE,))
    assert world.held
    agent.waker.wake(note.key, "alice")
    assert not world.held


def test_a_job_that_was_woken_before_its_image_could_be_copied(world):
    """The agent ends and comes back in the middle of that: what was asked for is not forgotten."""
    first = Agent(world, "c1")
    first.aftermath.stop()  # it copies nothing any more
    first.suspend()
    waker = Agent(world, "c2", Settings(wake_every_s=1))
    (note,) = waker.parts.notes.all()
    assert not waker.waker.wake(note.key, "alice")
    look(world, waker, ())
    assert world.held
    assert waker.images(shared=True) == []
    recovered(world)
    assert waker.images(shared=True) == [1]
    look(world, waker, ())
    assert not world.held


def test_a_job_that_was_cancelled_in_its_sleep_leaves_no_note(asleep):
    world, agent = asleep
    agent.waker._over = agent.keeper.over
    world.state = "CANCELLED"
    look(world, agent, (NODE,))
    assert agent.parts.notes.all() == []
    assert agent.images(shared=True) == []


def test_one_agent_of_the_cluster_wakes_and_another_takes_over(tmp_path):
    path = tmp_path / "waker.json"
    assert Lease(path, Signer(KEY, "c1")).held(100, 8)
    assert not Lease(path, Signer(KEY, "c2")).held(101, 8)
    assert Lease(path, Signer(KEY, "c1")).held(105, 8)
    assert Lease(path, Signer(KEY, "c2")).held(114, 8)
    assert not Lease(path, Signer(KEY, "c1")).held(115, 8)
    path.write_text("noise")
    assert Lease(path, Signer(KEY, "c1")).held(116, 8)


def test_free_gpus_are_given_away_once(tmp_path):
    free = Free((NODE, replace(NODE, name="c1", gpus_used=None)))
    job = make_job(World(tmp_path))
    assert [free.take(job) for _ in range(4)] == [True, True, True, False]
    assert not Free((NODE,)).take(replace(job, partitions=("cpu",)))
    assert not Free((NODE,)).take(replace(job, gpus_requested=GpuCount(1, "a100")))
    assert not waited_for(job, (job,), {7})


def test_a_run_is_claimed_by_one_shepherd(tmp_path):
    notes = Notes(tmp_path, Signer(KEY, "c1"))
    run = LiveRun(JobKey("alpha", 7, 5), 1000, 1)
    assert notes.claim(run, "c1/10/5") is None
    assert notes.claim(run, "c1/10/5") is None
    assert notes.claim(run, "c2/10/5") == "c1/10/5"
    assert notes.claim(replace(run, restarts=2), "c2/10/5") is None
    notes.unclaim([("alpha", 8)])
    assert notes.claim(run, "c2/10/5") is None


def test_a_note_that_cannot_be_read_is_none(tmp_path):
    notes = Notes(tmp_path, Signer(KEY, "c1"))
    note = Note("alpha", 7, 5, 0, 1, 1000, "c1", 1, 1.0, "idle", 1, 2, 3, "auto")
    notes.write(note)
    assert notes.all() == [note]
    (tmp_path / "asleep" / "alpha.8.json").write_text("{")
    assert notes.all() == [note]
    assert notes.read("alpha", 8) is None


def test_the_ledger_goes_on_after_a_torn_line(tmp_path):
    ledger = Ledger(tmp_path / "ledger", "c1")
    ledger.write(LedgerEntry("alpha", 7, 5, 1))
    path = tmp_path / "ledger" / "c1.jsonl"
    path.write_bytes(path.read_bytes() + b'{"torn')
    ledger.write(LedgerEntry("alpha", 8, 5, 1))
    lines = path.read_text().splitlines()
    assert [decode(lines[0]).job_id, lines[1], decode(lines[2]).job_id] == [7, '{"torn', 8]
    Ledger(tmp_path / "ledger" / "c1.jsonl", "c1").write(LedgerEntry("alpha", 8, 5, 1))
    Ledger(None, "c1").write(LedgerEntry("alpha", 8, 5, 1))


def test_a_ledger_can_be_read_by_the_user_of_the_reports(tmp_path):
    """The agent's unit closes all else that it makes to others."""
    before = os.umask(0o077)
    try:
        Ledger(tmp_path / "ledger", "c1").write(LedgerEntry("alpha", 7, 5, 1))
    finally:
        os.umask(before)
    paths = (tmp_path / "ledger", tmp_path / "ledger" / "c1.jsonl")
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o755, 0o644]


def test_words():
    assert [words.span(s) for s in (5, 119, 900, 7500, 200_000)] == ["5s", "119s", "15m", "2h05m", "2d7h"]
    assert [words.size(s) for s in (5, 2048, 52 << 30)] == ["5 B", "2.0 KiB", "52 GiB"]
    own = words.suspended("idle\n15m", 1 << 30, "12_3")
    assert own == "suspended: idle 15m, 1.0 GiB, wake with: slurm-affinode wake 12_3"
    assert words.theirs(words.comment(own, "mine")) == "mine"
    assert words.theirs("mine") == "mine"
    assert len(words.comment(own, "\u00e4" * 2000).encode()) <= 900
