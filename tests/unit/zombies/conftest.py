"""Synthetic clusters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_affinode.db.repository import Repository

from .zombie_history import Site
from .zombie_world import World, running


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """An empty cluster with a stored history."""
    return Site(tmp_path)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A cluster with job 7, on which actions are executed."""
    with Repository.open(str(tmp_path / "z.sqlite")) as store:
        yield World(store, jobs={"7": running()})
