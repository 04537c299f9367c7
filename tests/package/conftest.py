"""The wheel, and environments in which it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from .environments import REPOSITORY, UV, run


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout."""
    out = tmp_path_factory.mktemp("dist")
    run(UV, "build", "--quiet", "--wheel", "--out-dir", out, cwd=REPOSITORY)
    return next(out.glob("*.whl"))
