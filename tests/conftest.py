"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("conformance")
pytest_plugins = ["servers", "object_server", "prometheus_server", "stalling", "job_owner"]

REPOSITORY = Path(__file__).resolve().parents[1]

# Isolate tests from the user's terminal and cluster settings.
_OF_A_TERMINAL = {"FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"}
for name in [text for text in os.environ if text in _OF_A_TERMINAL or text.startswith("SLURM_AFFINODE_")]:
    del os.environ[name]

# The time of an example depends on the machine. The continuous integration draws the same examples each time: its
# result depends on the code alone. Every other run draws others.
settings.register_profile("untimed", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("untimed")


@pytest.hookimpl(trylast=True)  # of those that are selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first, so that no worker is left with one at the end."""
    long = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The public data sets beside the checkout; tests that need them are skipped if they are absent."""
    path = REPOSITORY.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"the public data sets are not at {path}")
    return path


@pytest.fixture(scope="session")
def recorded() -> Path:
    """Recorded output of Slurm and GPU tools."""
    return REPOSITORY / "tests" / "data"
