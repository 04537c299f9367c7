"""An agent whose GPUs, Slurm and acts are stand-ins; and a cluster of stand-ins with a job that runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_site import STEPS, Crash, World
from agent_stand_ins import Node1, agent, config_of

from slurm_affinode.agent.journal import Entry, Record
from slurm_affinode.checkpoint.writer import ImageWriter
from slurm_affinode.model.suspension import Phase

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
"""What a journal may announce after a phase; the same again, too, with what became known. Its file is removed where the
job runs, and a job that comes back begins another."""


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever the story: nothing is skipped."""
    write, wrong = Record.write, []

    def checked(self: Record, phase: Phase, **facts: Any) -> Entry:
        if phase is not self.phase and phase not in FOLLOWS[self.phase]:
            wrong.append(f"{self.phase.value} -> {phase.value}")
        return write(self, phase, **facts)

    monkeypatch.setattr(Record, "write", checked)
    yield
    assert wrong == []


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node1]:
    """The agent runs."""
    with agent(config_of(tmp_path)) as running:
        yield running


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """The job runs on c1. A process that is killed removes nothing, but its locks are gone."""
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
