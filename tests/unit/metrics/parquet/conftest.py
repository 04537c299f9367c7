"""The sample store in a directory and in an object store."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_affinode.metrics.parquet.store import SampleStore


@pytest.fixture(params=["directory", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> SampleStore:
    """Return an empty sample store."""
    if request.param == "directory":
        return SampleStore(tmp_path / "history")
    return SampleStore(request.getfixturevalue("object_server").prefix(tmp_path / "copies"))
