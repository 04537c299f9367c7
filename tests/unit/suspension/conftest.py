"""Suspensions, with fakes for the rest of the agent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from agent_fixtures import in_order, node, world
from waiting import DEADLINE_S

from slurm_affinode.base.threads import Workers
from slurm_affinode.checkpoint.store.image_store import DirectoryStore

__all__ = ["in_order", "node", "world"]


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the stores and end the worker threads of all agents of a test, also of those that crashed."""
    made: list[Any] = []

    def recorded(kind: type) -> None:
        init = kind.__init__  # type: ignore[misc]

        def record(self: Any, *arguments: Any, **options: Any) -> None:
            made.append(self)
            init(self, *arguments, **options)

        monkeypatch.setattr(kind, "__init__", record)

    for kind in (DirectoryStore, Workers):
        recorded(kind)
    yield
    for connection in made:
        if isinstance(connection, Workers):
            connection.close()
            with connection.lock:  # a call in progress still uses the stores
                connection.lock.wait_for(
                    lambda item=connection: not any(queue._running for queue in item._queues), DEADLINE_S
                )  # type: ignore[misc]
    for connection in made:
        if isinstance(connection, DirectoryStore) and hasattr(connection, "_entries"):  # else it could not be opened
            connection.close()
