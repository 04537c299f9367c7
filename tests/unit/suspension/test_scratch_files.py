"""Closed node-local files of a job in its suspension: copied, or the reason why it is tied to its node."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest
from agent_site import Crash, World
from agent_world import Agent

from slurm_affinode.agent import status_rows
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.checkpoint.files import scratch_record
from slurm_affinode.checkpoint.files.scratch_files import NO_SCRATCH_FILES, ScratchOutcome
from slurm_affinode.model.suspension import Phase
from slurm_affinode.suspension.job.shepherd import Restored
from slurm_affinode.suspension.records.shared_state import Notes

from .agent_sequences import recovered

TIED = ScratchOutcome("tied", "tied to c1: 3 files and directories in /scratch, 2 GiB (more than 1 GiB)")
COPIED = ScratchOutcome("copied", "3 files and directories in /scratch, 2 MiB, copied to its image")


@pytest.fixture
def agent(tmp_path):
    """Return the agent of a node on which the job runs."""
    world = World(tmp_path)
    world.start_run("c1")
    world.start_script("c1")
    return Agent(world, "c1")


def suspended(agent: Agent, outcome: ScratchOutcome) -> list[str]:
    """Suspend the job; return the lines in its output."""
    agent.scratch.outcome = outcome
    job = agent.watched()
    assert agent.suspender.suspend(job, "idle 15m", sample_again=lambda: None).failure is None
    agent.settle()
    return [getattr(item, "text", "") for item in job.link.sent]


def row(agent: Agent) -> dict[str, object]:
    (job,) = agent.keeper.suspended()
    return status_rows.suspended(job, None, user="alice", now_epoch=agent.world.clock)


def test_copied_files_are_reported_and_removed_from_the_node(agent):
    """They are in the image, and any node can restore the job."""
    assert COPIED.text in suspended(agent, COPIED)
    assert (row(agent)["local_files"], row(agent)["tied_to"]) == (COPIED.text, None)
    assert agent.scratch.left == 1
    assert agent.world.required == ()


def test_tied_job_requires_its_node(agent):
    """Output, status and comment report it, and its files stay."""
    assert TIED.text in suspended(agent, TIED)
    assert (row(agent)["local_files"], row(agent)["tied_to"]) == (TIED.text, "c1")
    assert "tied to c1" in agent.world.comment
    assert agent.world.required == ("c1",)
    assert agent.scratch.left == 0


def test_requirement_of_the_owner_is_restored_by_next_suspension(agent):
    """Slurm changes it for pending jobs only."""
    world = agent.world
    world.required = ("c1", "c2")
    suspended(agent, TIED)
    assert agent.notes.all()[0].required == "c1,c2"
    world.start_run("c1")
    assert agent.restore() == Restored(2)
    assert world.required == ("c1",)
    again = Agent(world, "c1")
    suspended(again, COPIED)
    assert world.required == ("c1", "c2")


def test_files_of_earlier_attempts_on_the_node_are_those_of_a_tied_job(agent):
    """Files that were created while it was suspended are not."""
    suspended(agent, TIED)
    ((first,),) = agent.scratch.periods
    agent.world.start_run("c1")
    agent.restore()
    agent.world.clock += 1000
    again = Agent(agent.world, "c1")
    suspended(again, COPIED)
    (((began, ended), (restored, now)),) = again.scratch.periods
    assert (began, ended) == first
    assert ended <= restored <= now
    agent.world.start_run("c1")
    agent.restore()
    later = Agent(agent.world, "c1")
    suspended(later, COPIED)
    assert len(later.scratch.periods[0]) == 1  # the copies were removed


def failed(agent):
    agent.scratch.outcome = TIED
    done = agent.suspender.suspend(agent.watched(), "idle 15m", sample_again=lambda: None)
    assert done.phase is Phase.RUNNING
    return done.failure


def test_job_whose_record_cannot_be_read_is_not_suspended(agent):
    """Files of earlier attempts would not be found, and be missing on another node."""
    path = agent.scratch_records.path(agent.watched().job_id)
    path.parent.mkdir()
    path.write_text("{")
    assert failed(agent).startswith(f"{path}: cannot be read: ")


def test_job_whose_files_cannot_be_recorded_is_not_suspended(agent, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(scratch_record.files, "write_text", full)
    assert failed(agent) == "its files on this node cannot be recorded; see the log of the agent"
    assert not agent.keeper.suspended()


def unknown_jobs():
    raise UnreachableError("slurmdbd does not respond")


@pytest.mark.parametrize(
    ("jobs", "why"),
    [(lambda: {7}, None), (lambda: {5, 7}, ": 5"), (unknown_jobs, "it is not known whether other jobs")],
    ids=["alone", "other", "unknown"],
)
def test_other_jobs_of_the_user_make_files_ambiguous(agent, jobs, why):
    """Accounting lists those that were on the node since the job runs there; unknown is not none."""
    agent.world.jobs_on_node = jobs
    suspended(agent, NO_SCRATCH_FILES)
    assert agent.scratch.ambiguous == why or (why and why in agent.scratch.ambiguous)


def test_start_from_the_beginning_needs_no_node(agent):
    """A job whose image is given up needs none of its files, so Slurm requires the former nodes again."""
    agent.world.required = ("c1", "c2")
    suspended(agent, TIED)
    (note,) = agent.notes.all()
    agent.waker.wake(note.key, "alice", from_start=True)
    assert agent.world.required == ("c1", "c2")
    assert row(agent)["tied_to"] is None


def test_owner_of_a_job_tied_to_a_lost_node_is_notified(agent):
    """Who can do what is part of the message; it goes when the node returns or the owner gives up the files."""
    suspended(agent, TIED)
    agent.slurm.nodes = lambda: ()
    agent.world.clock += 10_000
    agent.waker.tick()
    assert agent.world.held
    failure = str(row(agent)["failure"])
    assert "tied to c1, which Slurm does not know" in failure
    assert "administrator" in failure
    assert "scontrol update JobId=7 ReqNodeList=" in failure
    assert "does not know" in agent.world.comment
    agent.world.required = ()  # by the owner
    agent.world.clock += 10_000
    agent.waker.tick()
    assert row(agent)["failure"] is None


def test_restore_elsewhere_reports_the_missing_files(agent, monkeypatch):
    """Its owner has given them up."""
    suspended(agent, TIED)
    agent.world.start_run("c2")
    lines: list[str] = []
    monkeypatch.setattr("slurm_affinode.suspension.restore.say", lambda fds, text: lines.append(text))
    other = Agent(agent.world, "c2")
    other.scratch.kept = ["/tmp/a"]  # noqa: S108 - a name
    assert other.restore() == Restored(2)
    assert lines[0].splitlines()[1] == TIED.text
    assert "stayed on c1 and are missing here" in lines[0]
    assert "a file exists already on c2 with other contents" in lines[0]


def test_failed_request_for_the_node_is_repeated_at_the_wake(agent):
    """Slurm may not respond while the job is being suspended."""
    suspended(agent, TIED)
    (note,) = agent.notes.all()
    agent.notes.write(replace(note, required=None))
    agent.world.required = ()
    agent.waker.wake(note.key, "alice")
    assert agent.world.required == ("c1",)
    assert agent.notes.all()[0].required == ""


def test_requirement_of_the_owner_survives_a_crash(agent, monkeypatch):
    """The agent ends between its request to Slurm and the note; by then, Slurm no longer knows the former value."""
    world = agent.world
    world.required = ("c1", "c2")
    write, crashes = Notes.write, [Crash("note")]

    def crash_once(self: Notes, note: object) -> None:
        if crashes:
            raise crashes.pop()
        write(self, note)

    monkeypatch.setattr(Notes, "write", crash_once)
    with pytest.raises(Crash):
        suspended(agent, TIED)
    assert world.required == ("c1",)
    recovered(world)
    assert agent.notes.all()[0].required == "c1,c2"
