"""Synthetic results for the tests of the report."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from slurm_affinode.analysis.result import WasteResult


def load_samples() -> ModuleType:
    """``tests/waste_samples.py`` as a module."""
    path = Path(__file__).resolve().parents[2] / "waste_samples.py"
    spec = importlib.util.spec_from_file_location("waste_samples", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def samples() -> ModuleType:
    """``make_result``, ``empty_result`` and hostile names."""
    return load_samples()


@pytest.fixture(scope="session")
def result(samples: ModuleType) -> WasteResult:
    """A week of 300 job runs."""
    made = samples.make_result()
    assert isinstance(made, WasteResult)
    return made


@pytest.fixture(scope="session")
def hostile(samples: ModuleType) -> WasteResult:
    """A week of jobs, users, partitions, ... with names that try to break out of the page."""
    made = samples.make_result(names=samples.HOSTILE)
    assert isinstance(made, WasteResult)
    return made


@pytest.fixture(scope="session")
def unmeasured(samples: ModuleType) -> WasteResult:
    """A week of jobs without any GPU history or price."""
    made = samples.make_result(measured=False, priced=False)
    assert isinstance(made, WasteResult)
    return made
