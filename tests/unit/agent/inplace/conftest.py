"""A job that runs on c1, and the agent there."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_site import World
from inplace_site import STEPS, Node


@pytest.fixture
def world(tmp_path: Path) -> World:
    """The job runs."""
    made = World(tmp_path)
    made.start_run("c1")
    made.start_script("c1", STEPS)
    return made


@pytest.fixture
def node(world: World) -> Node:
    """The agent runs."""
    return Node(world)
