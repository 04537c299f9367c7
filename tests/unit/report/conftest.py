"""Synthetic results for the tests of reports."""

from __future__ import annotations

from types import ModuleType

import pytest
import waste_samples

from slurm_affinode.analysis.result import WasteResult


@pytest.fixture(scope="session")
def samples() -> ModuleType:
    """Return the module with ``make_result``, ``empty_result`` and hostile names."""
    return waste_samples


@pytest.fixture(scope="session")
def result(samples: ModuleType) -> WasteResult:
    """Return a week of 300 job runs."""
    made = samples.make_result()
    assert isinstance(made, WasteResult)
    return made


@pytest.fixture(scope="session")
def hostile(samples: ModuleType) -> WasteResult:
    """Return a week of jobs; names of jobs, users, partitions etc. try to inject markup into the page."""
    made = samples.make_result(names=samples.HOSTILE)
    assert isinstance(made, WasteResult)
    return made


@pytest.fixture(scope="session")
def unmeasured(samples: ModuleType) -> WasteResult:
    """Return a week of jobs without GPU metrics and prices."""
    made = samples.make_result(measured=False, priced=False)
    assert isinstance(made, WasteResult)
    return made
