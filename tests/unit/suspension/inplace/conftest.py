"""The agent on the node where the job runs."""

from __future__ import annotations

import pytest
from agent_site import World
from inplace_site import Node


@pytest.fixture
def node(world: World) -> Node:
    """The running agent."""
    return Node(world)
