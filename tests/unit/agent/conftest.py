"""An agent whose GPUs, Slurm and acts are stand-ins; and a cluster of stand-ins with a job that runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_sequences import STEPS
from agent_site import Crash, World
from agent_stand_ins import Node1, agent, config_of

from slurm_affinode.checkpoint.writer import ImageWriter


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
