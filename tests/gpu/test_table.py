"""The table of `slurm-affinode doctor` for this very machine."""

from __future__ import annotations

import os
from typing import Any

import pytest

from gpu.machine import Machine
from slurm_affinode.checkpoint.abilities import major_of, oldest
from slurm_affinode.workflow import doctor_cuda
from slurm_affinode.workflow.check import OK

pytestmark = pytest.mark.gpu


def test_what_this_driver_can_do(machine: Machine, note: Any) -> None:
    """Told by what it has; a feature that its branch brought is there."""
    report = doctor_cuda.look()
    note("table", report.as_json())
    branch = major_of(report.capabilities.driver)
    assert branch is not None
    for one in report.capabilities.table:
        if branch < one.since:
            assert not one.available, one
    if branch >= oldest(os.uname().machine):
        assert doctor_cuda.check(report).status == OK
