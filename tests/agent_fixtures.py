"""Fixtures for tests of the agent and of suspensions: an agent with fake GPUs, Slurm and actions, and a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_site import STEPS, Crash, World
from agent_stand_ins import Node1, agent, config_of

from slurm_affinode.checkpoint.image.writer import ImageWriter
from slurm_affinode.model.suspension import Phase
from slurm_affinode.suspension.records.journal import JobJournal
from slurm_affinode.suspension.records.record import NO_NEW_FACTS, SuspensionFacts

FOLLOWS = {
    Phase.RUNNING: {Phase.LOCKING, Phase.RESTORING},
    Phase.LOCKING: {Phase.LOCKED},
    Phase.LOCKED: {Phase.PARKED, Phase.WAKING},
    Phase.PARKED: {Phase.DUMPING, Phase.FROZEN, Phase.WAKING},
    Phase.FROZEN: {Phase.WAKING},
    Phase.WAKING: {Phase.FROZEN},
    Phase.DUMPING: {Phase.DUMPED},
    Phase.DUMPED: {Phase.REQUEUEING, Phase.QUEUED},
    Phase.REQUEUEING: {Phase.QUEUED},
    Phase.QUEUED: set(),
    Phase.RESTORING: {Phase.QUEUED},
}
"""Allowed successors of each phase in a journal; a phase may also repeat, with new facts.

The file is removed once the job runs, and a requeued job starts a new one.
"""


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that no journal skips a phase."""
    write, wrong = JobJournal.write, []

    def checked(self: JobJournal, phase: Phase, facts: SuspensionFacts = NO_NEW_FACTS) -> None:
        if phase is not self.phase and phase not in FOLLOWS[self.phase]:
            wrong.append(f"{self.phase.value} -> {phase.value}")
        write(self, phase, facts)

    monkeypatch.setattr(JobJournal, "write", checked)
    yield
    assert wrong == []


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node1]:
    """The running agent."""
    with agent(config_of(tmp_path)) as running:
        yield running


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """The job runs on c1. A killed process removes nothing, but its locks are released."""
    leave = ImageWriter.__exit__

    def quit_(self: ImageWriter, *exc: Any) -> None:
        if exc[0] is Crash:
            self.leave()
        else:
            leave(self, *exc)

    monkeypatch.setattr(ImageWriter, "__exit__", quit_)
    made = World(tmp_path)
    made.start_run("c1")
    made.start_script("c1", STEPS)
    return made
