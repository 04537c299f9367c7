"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

pytest_plugins = ["servers", "prometheus_server", "stalling"]

REPOSITORY = Path(__file__).resolve().parents[1]

# What whoever runs the tests has set for his own terminal, or for his own cluster, is none of theirs.
_OF_A_TERMINAL = {"FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"}
for name in [one for one in os.environ if one in _OF_A_TERMINAL or one.startswith("SLURM_AFFINODE_")]:
    del os.environ[name]

settings.register_profile("untimed", deadline=None)  # how long an example takes is the machine's matter
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a test that takes long come first: of several workers none is left with one of them at the end."""
    long = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The public data sets that lie beside the checkout; tests that need them are skipped where they are absent."""
    path = REPOSITORY.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"the public data sets are not at {path}")
    return path


@pytest.fixture(scope="session")
def recorded() -> Path:
    """Recorded real output of Slurm and GPU tools."""
    return REPOSITORY / "tests" / "data"
