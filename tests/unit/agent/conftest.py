"""The daemon, with fakes for its environment."""

from __future__ import annotations

from agent_fixtures import in_order, node, world

__all__ = ["in_order", "node", "world"]
