"""Wakes of suspended jobs, and the small files by which nodes coordinate them."""

from __future__ import annotations

import os
import stat
from dataclasses import replace

import pytest
from agent_site import World, make_job
from agent_world import KEY, Agent

from slurm_affinode.agent import status_rows
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.checkpoint.image.signatures import Signer
from slurm_affinode.model.cluster import GpuCount, Node
from slurm_affinode.model.ledger import LedgerEntry, decode
from slurm_affinode.model.suspension import JobKey, LiveRun
from slurm_affinode.slurm.interface import InvalidStateError
from slurm_affinode.suspension import messages
from slurm_affinode.suspension.context import SuspendSettings
from slurm_affinode.suspension.interface import Refused
from slurm_affinode.suspension.records.ledger import SuspensionLedger
from slurm_affinode.suspension.records.shared_state import LastRestore, Note, Notes
from slurm_affinode.suspension.wake import Free, Lease, waited_for, why_unavailable

from .agent_sequences import recovered

NODE = Node(
    name="c2", state="MIXED", flags=frozenset(), reason=None, reason_user=None, reason_time=None,
    gpus=GpuCount(2, "h100"), gpus_used=GpuCount(1, "h100"), partitions=("gpu",), cpus=8, cpus_used=2, memory_mib=16000,
    memory_used_mib=1000, features=(), version="24.11",
)  # fmt: skip


@pytest.fixture
def asleep(tmp_path):
    """A suspended job, and the agent of another node."""
    world = World(tmp_path)
    world.start_run("c1")
    world.start_script("c1")
    agent = Agent(world, "c1")
    agent.suspend()
    agent.settle()
    waker = Agent(world, "c2", SuspendSettings(wake_backoff_s=100, wake_backoff_limit_s=1000, wake_every_s=1))
    return world, waker


def run_waker(world, agent, nodes, jobs=()):
    agent.slurm.nodes = lambda: nodes
    agent.slurm.jobs = lambda: (make_job(world), *jobs)
    world.clock += 2
    agent.waker.tick()


def test_job_wakes_after_backoff_when_gpus_are_free(asleep):
    world, agent = asleep
    run_waker(world, agent, (NODE,))
    assert world.held
    world.clock += 100
    run_waker(world, agent, ())
    assert world.held
    run_waker(world, agent, (replace(NODE, flags=frozenset({"DRAIN"})),))
    assert world.held
    run_waker(world, agent, (NODE,))
    assert not world.held


def test_job_suspended_thousands_of_times_wakes(asleep):
    """Its backoff doubles up to the limit, without overflow."""
    world, agent = asleep
    agent.notes.write(replace(agent.notes.all()[0], seq=3000))
    image = agent.shared.get("alpha.7", 1)
    agent.shared.find = lambda run: replace(image, manifest=replace(image.manifest, seq=3000))
    world.clock += 900
    run_waker(world, agent, (NODE,))
    assert world.held
    world.clock += 100
    run_waker(world, agent, (NODE,))
    assert not world.held


def test_clock_set_back_does_not_delay_wakes(asleep):
    """The clock was wrong in the previous check: the next check is not postponed until that time."""
    world, agent = asleep
    world.clock += 1e6
    run_waker(world, agent, ())
    world.clock -= 1e6
    world.clock += 100
    run_waker(world, agent, (NODE,))
    assert not world.held


def test_pending_jobs_are_not_overtaken(asleep):
    world, agent = asleep
    world.clock += 100
    other = make_job(world, job_id=9, is_held=False, reason="Resources")
    run_waker(world, agent, (NODE,), (other,))
    assert world.held
    run_waker(world, agent, (NODE,), (replace(other, reason="Dependency"),))
    assert not world.held


@pytest.mark.parametrize(("wake", "released"), [("hold", False), ("now+30", True), ("2030-01-01", True), ("now", True)])
def test_wake_option_is_followed(asleep, wake, released):
    world, agent = asleep
    agent.notes.write(replace(agent.notes.all()[0], wake=wake))
    run_waker(world, agent, ())
    assert world.held is not released
    assert any(effect.startswith("begin 20") for effect in world.effect_log) is (wake not in ("hold", "now"))


@pytest.mark.parametrize("wake", ["auto", "now", "now+30"])
def test_job_with_failed_restore_is_not_released_automatically(asleep, wake):
    """It would fail repeatedly; an explicit wake retries it."""
    world, agent = asleep
    (note,) = agent.notes.all()
    agent.notes.write(replace(note, wake=wake, failure="criu/pages-1.img: its contents have changed"))
    for _ in range(3):
        world.clock += 1000
        run_waker(world, agent, (NODE,))
    assert world.held
    (item,) = agent.keeper.suspended()
    assert (item.wake, item.failure) == ("hold", "criu/pages-1.img: its contents have changed")
    agent.waker.wake(note.key, "alice")
    assert not world.held


def test_completing_job_wakes_when_it_is_pending(asleep):
    """The agent has reported the suspension as done; the epilog still runs."""
    world, agent = asleep
    (note,) = agent.notes.all()
    in_queue = agent.slurm.job
    agent.slurm.job = lambda job_id: replace(in_queue(job_id), state="COMPLETING", is_held=False)
    assert agent.waker.wake(note.key, "alice") is False
    agent.slurm.job = in_queue
    run_waker(world, agent, ())
    assert not world.held


@pytest.mark.parametrize("wake", ["auto", "now"])
def test_job_that_could_not_start_is_released_after_backoff(asleep, wake):
    """Its node had no shepherd or agent and requeued it: held, without a reason."""
    world, agent = asleep
    agent.notes.write(replace(agent.notes.all()[0], wake=wake))
    world.clock += 200
    run_waker(world, agent, (NODE,))
    assert not world.held
    world.held = True
    run_waker(world, agent, (NODE,))
    assert world.held
    world.clock += 100
    run_waker(world, agent, (NODE,))
    assert not world.held


def test_job_not_released_by_slurm_does_not_block_others(asleep):
    """Its begin time is rejected; the next job is woken."""
    world, agent = asleep
    note = agent.notes.all()[0]
    agent.notes.write(replace(note, wake="now"))
    agent.notes.write(replace(note, job_id=9, wake="2999-01-01", since_epoch=note.since_epoch - 10))
    agent.waker._everywhere = lambda job: True

    def refuse(job, when):
        raise InvalidStateError("invalid time")

    agent.slurm.set_begin = refuse
    run_waker(world, agent, (), (make_job(world, job_id=9),))
    assert not world.held


def test_array_task_is_shown_with_array_id(tmp_path):
    """Its raw ID is unknown to the owner, or denotes the whole array."""
    world = World(tmp_path)
    world.start_run("c1")
    world.start_script("c1")
    agent = Agent(world, "c1")
    read_job = agent.slurm.job
    agent.slurm.job = lambda job_id: replace(read_job(job_id), array_job_id=5, array_task_id=2)
    agent.suspend()
    agent.settle()
    assert world.comment.endswith("wake with: slurm-affinode wake 5_2")
    (item,) = agent.keeper.suspended()
    row = status_rows.suspended(item, None, user="alice", now_epoch=world.clock)
    assert (row["job_id"], row["shown_id"]) == (7, "5_2")


def test_job_held_by_administrator_is_released_by_administrator_only(asleep):
    """The agent is root: Slurm would let it release the job where its owner may not."""
    world, agent = asleep
    (note,) = agent.notes.all()
    read_job = agent.slurm.job
    agent.slurm.job = lambda job_id: replace(read_job(job_id), held_by_admin=True)
    world.clock += 10_000
    run_waker(world, agent, (NODE,))
    with pytest.raises(Refused, match="job 7 is held by an administrator"):
        agent.waker.wake(note.key, "alice")
    assert world.held
    assert agent.notes.all() == [note]  # nor is it released when the hold ends: it was not woken
    assert agent.waker.wake(note.key, "admin", admin=True)
    assert not world.held


def test_job_with_failed_restore_is_woken_by_command_only(asleep):
    world, agent = asleep
    note = agent.notes.all()[0]
    agent.notes.write(replace(note, failure="bad size"))
    world.clock += 10_000
    run_waker(world, agent, (NODE,))
    assert world.held
    agent.waker.wake(note.key, "alice")
    assert not world.held


@pytest.mark.parametrize("wake", ["auto", "now"])
def test_interrupted_restore_is_released_when_its_backoff_is_over(asleep, wake):
    world, agent = asleep
    note = agent.notes.all()[0]
    world.clock += 1000
    retry_epoch = world.clock + 60
    agent.notes.write(replace(note, wake=wake, failure="Unable to detach", failures=1, retry_epoch=retry_epoch))
    run_waker(world, agent, (NODE,))
    assert world.held
    world.clock = retry_epoch
    run_waker(world, agent, (NODE,))
    assert not world.held


def test_backoff_grows_with_releases_that_came_back(asleep):
    """No restore was tried: the nodes had no agent."""
    world, agent = asleep
    note = agent.notes.all()[0]
    world.clock += 1000
    agent.notes.write(replace(note, released_epoch=world.clock, releases=3))
    world.clock += 390
    run_waker(world, agent, (NODE,))
    assert world.held
    world.clock += 10
    run_waker(world, agent, (NODE,))
    assert not world.held
    assert agent.notes.all()[0].releases == 4


def test_wake_before_image_is_copied_is_kept(world):
    """The agent is restarted in between: the wake request is kept."""
    first = Agent(world, "c1")
    first.outcomes.stop()  # no more copies are made
    first.suspend()
    waker = Agent(world, "c2", SuspendSettings(wake_every_s=1))
    (note,) = waker.notes.all()
    assert not waker.waker.wake(note.key, "alice")
    run_waker(world, waker, ())
    assert world.held
    assert waker.images(shared=True) == []
    recovered(world)
    assert waker.images(shared=True) == [1]
    run_waker(world, waker, ())
    assert not world.held


def test_note_of_canceled_suspended_job_is_removed(asleep):
    world, agent = asleep
    agent.waker._record_end = agent.keeper.record_end
    world.state = "CANCELLED"
    run_waker(world, agent, (NODE,))
    assert agent.notes.all() == []
    assert agent.images(shared=True) == []


def test_lease_is_held_by_one_agent_and_taken_over(tmp_path):
    path = tmp_path / "waker.json"
    assert Lease(path, Signer(KEY, "c1")).held(100, 8)
    assert not Lease(path, Signer(KEY, "c2")).held(101, 8)
    assert Lease(path, Signer(KEY, "c1")).held(105, 8)
    assert Lease(path, Signer(KEY, "c2")).held(114, 8)
    assert not Lease(path, Signer(KEY, "c1")).held(115, 8)
    path.write_text("noise")
    assert Lease(path, Signer(KEY, "c1")).held(116, 8)


def test_free_gpus_are_assigned_once(tmp_path):
    free = Free((NODE, replace(NODE, name="c1", gpus_used=None)))
    job = make_job(World(tmp_path))
    assert [free.take(job) for _ in range(4)] == [True, True, True, False]
    assert not Free((NODE,)).take(replace(job, partitions=("cpu",)))
    assert not Free((NODE,)).take(replace(job, gpus_requested=GpuCount(1, "a100")))
    assert not waited_for(job, (job,), {7})


def test_required_and_excluded_nodes_limit_the_free_gpus(tmp_path):
    """A job that is tied to a node, or excludes one, cannot use free GPUs elsewhere."""
    job = make_job(World(tmp_path))
    assert not Free((NODE,)).take(replace(job, nodes_required=("c1",)))
    assert not Free((NODE,)).take(replace(job, nodes_excluded=("c2",)))
    assert Free((NODE,)).take(replace(job, nodes_required=("c1", "c2"), nodes_excluded=("c3",)))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"state": "MIXED"}, None),
        ({"name": "c9"}, "Slurm does not know"),
        ({"state": "DOWN", "reason": "power\nfailure"}, "is down (power failure)"),
        ({"flags": frozenset({"NOT_RESPONDING"})}, "is down"),
        ({"flags": frozenset({"DRAIN"}), "reason": "fan"}, "is drained (fan)"),
    ],
    ids=str,
)
def test_state_of_the_node_of_a_tied_job_is_named(changes, why):
    assert why_unavailable("c2", (replace(NODE, **changes),)) == why


def test_attempt_is_claimed_by_one_shepherd(tmp_path):
    notes = Notes(tmp_path, Signer(KEY, "c1"))
    run = LiveRun(JobKey("alpha", 7, 5), 1000, 1)
    assert notes.claim(run, "c1/10/5") is None
    assert notes.claim(run, "c1/10/5") is None
    assert notes.claim(run, "c2/10/5") == "c1/10/5"
    assert notes.claim(replace(run, restarts=2), "c2/10/5") is None
    notes.unclaim("alpha", [8])
    assert notes.claim(run, "c2/10/5") is None


def test_records_of_other_clusters_in_the_store_are_kept(tmp_path):
    """A sweep knows the live jobs of its own cluster only; without its claim, an image could be restored twice."""
    notes = Notes(tmp_path, Signer(KEY, "c1"))
    run, other = (LiveRun(JobKey(cluster, 7, 5), 1000, 1) for cluster in ("alpha", "beta"))
    restores = [
        LastRestore(
            cluster=figure.key.cluster, job_id=7, submit=5, image_restarts=0, seq=1, uid=1000, checkpoint_epoch=1.0,
            run=1, node="c1", restored_epoch=2.0,
        )
        for figure in (run, other)
    ]  # fmt: skip
    for item, restore in zip((run, other), restores, strict=True):
        assert notes.claim(item, "c1/10/5") is None
        notes.write_restore(restore)
    notes.unclaim("alpha", [])
    notes.forget_restores("alpha", [])
    assert notes.claim(run, "c2/10/5") is None
    assert notes.claim(other, "c2/10/5") == "c1/10/5"
    assert notes.last_restore("alpha", 7) is None
    assert notes.last_restore("beta", 7) == restores[1]


def test_unreadable_note_is_ignored(tmp_path):
    notes = Notes(tmp_path, Signer(KEY, "c1"))
    note = Note("alpha", 7, 5, 0, 1, 1000, "c1", 1, 1.0, "idle", 1, 2, 3, "auto")
    notes.write(note)
    assert notes.all() == [note]
    (tmp_path / "asleep" / "alpha.8.json").write_text("{")
    assert notes.all() == [note]
    assert notes.read("alpha", 8) is None


def test_ledger_continues_after_torn_line(tmp_path):
    ledger = SuspensionLedger(tmp_path / "ledger", "c1")
    ledger.write(LedgerEntry("alpha", 7, 5, 1))
    path = tmp_path / "ledger" / "c1.jsonl"
    path.write_bytes(path.read_bytes() + b'{"torn')
    ledger.write(LedgerEntry("alpha", 8, 5, 1))
    lines = path.read_text().splitlines()
    assert [decode(lines[0]).job_id, lines[1], decode(lines[2]).job_id] == [7, '{"torn', 8]
    SuspensionLedger(tmp_path / "ledger" / "c1.jsonl", "c1").write(LedgerEntry("alpha", 8, 5, 1))
    SuspensionLedger(None, "c1").write(LedgerEntry("alpha", 8, 5, 1))


def test_ledger_is_readable_by_report_user(tmp_path):
    """The umask of the agent's unit closes its other files to others."""
    before = os.umask(0o077)
    try:
        SuspensionLedger(tmp_path / "ledger", "c1").write(LedgerEntry("alpha", 7, 5, 1))
    finally:
        os.umask(before)
    paths = (tmp_path / "ledger", tmp_path / "ledger" / "c1.jsonl")
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o755, 0o644]


def test_comment_keeps_the_owners_part_and_fits_into_slurms_limit() -> None:
    text = messages.suspended("idle\n15m", 1 << 30, "12_3")
    assert text == "suspended: idle 15m, 1 GiB, wake with: slurm-affinode wake 12_3"
    assert messages.comment_of_owner(messages.comment(text, "mine")) == "mine"
    assert messages.comment_of_owner("mine") == "mine"
    assert len(messages.comment(text, "\u00e4" * 2000).encode()) <= 900


@pytest.mark.parametrize("by", ["tick", "command"])
def test_job_is_not_released_unless_that_is_recorded(asleep, monkeypatch, by):
    """A job that comes back would be released again with every tick, since its note would not say that it was."""
    world, agent = asleep
    (note,) = agent.notes.all()
    world.clock += 1000

    def refuse(note):
        raise AffinodeError("asleep/alpha.7.json: cannot be written: Read-only file system")

    monkeypatch.setattr(agent.notes, "write", refuse)
    if by == "tick":
        run_waker(world, agent, (NODE,))
    else:
        with pytest.raises(AffinodeError, match="Read-only"):
            agent.waker.wake(note.key, "alice")
    assert world.held


def test_refused_release_does_not_count(asleep, monkeypatch):
    """The job is not delayed: the next tick tries again."""
    world, agent = asleep
    world.clock += 1000
    release = agent.slurm.release

    def refuse(job_id):
        raise InvalidStateError("slurmctld is busy")

    monkeypatch.setattr(agent.slurm, "release", refuse)
    run_waker(world, agent, (NODE,))
    assert [(element.releases, element.released_epoch) for element in agent.notes.all()] == [(0, None)]
    monkeypatch.setattr(agent.slurm, "release", release)
    run_waker(world, agent, (NODE,))
    assert not world.held
