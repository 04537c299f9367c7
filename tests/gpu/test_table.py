"""The table of `slurm-affinode doctor` on this machine."""

from __future__ import annotations

from typing import Any

import pytest

from gpu.machine import Machine
from gpu.programs import oldest
from slurm_affinode.checkpoint.cuda.features import major_of
from slurm_affinode.pipeline import driver_check
from slurm_affinode.pipeline.checks import OK

pytestmark = pytest.mark.gpu


def test_features_of_this_driver(machine: Machine, note: Any) -> None:
    """The table follows the driver's functions; features that its branch introduced are available."""
    report = driver_check.check_cuda()
    note("table", report.as_json())
    branch = major_of(report.capabilities.driver)
    assert branch is not None
    for capability in report.capabilities.table:
        if branch < capability.since:
            assert not capability.available, capability
    if branch >= oldest():
        assert driver_check.check(report).status == OK
