"""Synthetic results for the tests of the report."""

from __future__ import annotations

from types import ModuleType

import pytest
import waste_samples

from slurm_affinode.analysis.result import WasteResult


@pytest.fixture(scope="session")
def samples() -> ModuleType:
    """``make_result``, ``empty_result`` and hostile names."""
    return waste_samples


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
