"""The table of the driver's features, from values."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpu_fakes import A100, FakeDriver

from slurm_affinode.checkpoint import abilities
from slurm_affinode.checkpoint.abilities import ENTRY_POINTS, DriverFacts
from slurm_affinode.checkpoint.interface import Capabilities, Feature
from slurm_affinode.workflow import doctor_cuda
from slurm_affinode.workflow.check import OK, PROBLEM, SKIPPED

BOUND = (*ENTRY_POINTS, "CUcheckpointLockArgs", "CUcheckpointGpuPair")
NEWEST = DriverFacts(13040, dict.fromkeys(ENTRY_POINTS, True), BOUND, "13.5.0")


class FakeCuda:
    """In place of the helper."""

    def __init__(self, *, driver_version: object, mig: object) -> None:
        self.version, self.mig = driver_version, mig

    def capabilities(self) -> Capabilities:
        return abilities.capabilities_of(self.version(), NEWEST, mig=self.mig())  # type: ignore[operator]

    def close(self) -> None:
        return None


class Versioned(FakeDriver):
    """A driver that tells its version."""

    def version(self) -> str:
        self.devices()
        return "615.71.05"


def test_no_driver_is_told_and_is_no_problem() -> None:
    """A login node has none; the table is there all the same."""
    report = doctor_cuda.look(lambda: Versioned(missing="the driver: not loaded"), FakeCuda)  # type: ignore[arg-type]
    assert doctor_cuda.check(report).status == SKIPPED
    assert [row[3] for row in report.rows()] == ["no"] * len(Feature)
    assert all(row[2] for row in report.rows())
    assert report.as_json()["gpus"] == []


def test_what_is_there_and_what_is_not_is_in_one_line() -> None:
    """With the number of GPUs."""
    report = doctor_cuda.look(Versioned, FakeCuda)  # type: ignore[arg-type]
    found = doctor_cuda.check(report)
    assert found.status == OK
    assert found.detail.startswith("driver 615.71.05, CUDA 13.4, 2 GPUs: lock with time-out, checkpoint")
    assert "not:" not in found.detail


def test_mig_on_every_gpu_is_a_problem() -> None:
    """On one of two it is not: jobs on the other can be suspended."""
    part = replace(A100, mig="7", mig_profile="1g.10gb")
    only = doctor_cuda.look(lambda: Versioned(readings={A100: None, part: None}), FakeCuda)  # type: ignore[arg-type, dict-item]
    assert doctor_cuda.check(only).status == PROBLEM
    assert "MIG" in doctor_cuda.check(only).detail


def test_bindings_that_are_older_than_the_driver_are_named() -> None:
    """With the version that has what is missing."""
    old = replace(NEWEST, bound=tuple(name for name in BOUND if name != "CUcheckpointGpuPair"), bindings="12.9.4")
    can = abilities.capabilities_of("615.71.05", old, mig=False)
    assert can.checkpoint
    assert not can.migration
    assert abilities.refusal(Feature.MIGRATION, can) == (
        "restore on other GPUs: the installed cuda-bindings have no CUcheckpointGpuPair (13.0 has it)"
    )
    assert abilities.refusal(Feature.LOCK, can) is None


@pytest.mark.parametrize("name", ["cuCheckpointProcessLock", "cuCheckpointProcessRestore"])
def test_a_function_that_is_missing_rules_all_out(name: str) -> None:
    """Whatever the version says."""
    facts = replace(NEWEST, functions={**NEWEST.functions, name: False})
    can = abilities.capabilities_of("615.71.05", facts, mig=False)
    assert not can.checkpoint
    assert name in (can.why_not or "")
