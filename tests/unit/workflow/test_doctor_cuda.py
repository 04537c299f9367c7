"""The table of the driver's features, from values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu_fakes import A100, FakeDriver

from slurm_affinode.checkpoint import abilities
from slurm_affinode.checkpoint.abilities import ENTRY_POINTS, DriverFacts
from slurm_affinode.checkpoint.cuda_driver import Driver, NotAvailableError
from slurm_affinode.checkpoint.interface import Capabilities, CudaError, Feature
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

    def devices(self) -> tuple[str, ...]:
        return ("GPU-a", "GPU-b")

    def close(self) -> None:
        return None


class Versioned(FakeDriver):
    """A driver that tells its version."""

    def version(self) -> str:
        self.devices()
        return "615.71.05"


def test_no_driver_is_told_and_is_no_problem() -> None:
    """A login node has none; the table is there all the same."""
    report = doctor_cuda.look(lambda: Versioned(missing="the driver: not loaded"), FakeCuda, loaded=())  # type: ignore[arg-type]
    assert doctor_cuda.check(report).status == SKIPPED
    assert [row[3] for row in report.rows()] == ["no"] * len(Feature)
    assert all(row[2] for row in report.rows())
    assert report.as_json()["gpus"] == []


def test_a_driver_that_is_loaded_and_does_not_answer_is_a_problem(tmp_path: Path) -> None:
    """As after an update of its libraries alone, which NVML refuses: it is not said that there is none."""
    why = "the driver: NVML says: Driver/library version mismatch"
    report = doctor_cuda.look(lambda: Versioned(missing=why), FakeCuda, loaded=(tmp_path,))  # type: ignore[arg-type]
    found = doctor_cuda.check(report)
    assert (found.status, found.detail) == (PROBLEM, why)
    assert "nvidia-smi" in (found.hint or "")


def test_what_is_there_and_what_is_not_is_in_one_line() -> None:
    """With the number of GPUs."""
    report = doctor_cuda.look(Versioned, FakeCuda)  # type: ignore[arg-type]
    found = doctor_cuda.check(report)
    assert found.status == OK
    assert found.detail.startswith("driver 615.71.05, CUDA 13.4, 2 GPUs: lock with time-out, checkpoint")
    assert "not:" not in found.detail


def test_a_driver_that_cuda_cannot_use_is_a_problem() -> None:
    """It has all functions, and no program of a job could begin: no GPU for CUDA (MIG without instances), say."""

    class Unusable(FakeCuda):
        def devices(self) -> tuple[str, ...]:
            raise CudaError("cannot list the GPUs: it shows no GPU", code="CUDA_ERROR_NO_DEVICE")

    report = doctor_cuda.look(Versioned, Unusable)  # type: ignore[arg-type]
    found = doctor_cuda.check(report)
    assert (found.status, found.detail) == (PROBLEM, "cannot list the GPUs: it shows no GPU")
    assert "MIG" in (found.hint or "")
    assert not report.capabilities.checkpoint


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


def test_a_driver_that_is_too_old_lacks_each_feature_by_the_branch_that_has_it() -> None:
    """A function that other branches brought is not said to be missing for a feature that is more than the function."""
    old = replace(NEWEST, cuda=12060, functions=dict.fromkeys(ENTRY_POINTS, False))
    can = abilities.capabilities_of("560.35.03", old, mig=False)
    assert abilities.refusal(Feature.RESTORE, can) == (
        "restore: driver 560.35.03 has no cuCheckpointProcessRestore (570 has it)"
    )
    assert abilities.refusal(Feature.MIGRATION, can) == "restore on other GPUs: driver 560.35.03 cannot (580 can)"
    assert abilities.refusal(Feature.IPC, can) == "CUDA IPC: driver 560.35.03 cannot (610 can)"


def test_on_arm_a_driver_before_595_is_too_old() -> None:
    """It has the functions, and refuses the checkpoint of what it has locked (NVIDIA/cuda-checkpoint#51)."""
    facts = replace(NEWEST, cuda=13000)
    grace = abilities.capabilities_of("580.142", facts, mig=False, machine="aarch64")
    assert grace.why_not == "driver 580.142 cannot on an ARM processor (595 can)"
    assert {one.feature: one.since for one in grace.table if not one.available} == {
        Feature.CHECKPOINT: 595, Feature.RESTORE: 595, Feature.MIGRATION: 595, Feature.IPC: 610,
    }  # fmt: skip
    assert abilities.capabilities_of("580.142", facts, mig=False, machine="x86_64").checkpoint
    assert abilities.capabilities_of("595.71.05", facts, mig=False, machine="aarch64").checkpoint
    assert (abilities.oldest("aarch64"), abilities.oldest("x86_64")) == (595, 570)


def test_a_library_that_is_older_than_the_driver_is_what_is_said_to_lack_it() -> None:
    """And not the driver, which would do."""
    old = replace(NEWEST, cuda=12040, functions=dict.fromkeys(ENTRY_POINTS, False))
    can = abilities.capabilities_of("580.95.05", old, mig=False)
    assert abilities.refusal(Feature.LOCK, can) == (
        "lock with time-out: the driver's library is of CUDA 12.4 (12.8 can, driver 570)"
    )
    assert can.why_not == "the driver's library is of CUDA 12.4 (12.8 can, driver 570)"


def test_a_driver_without_its_library_for_cuda_is_told_how_to_get_it() -> None:
    """As in a container that was given the GPUs for monitoring alone."""

    class Without(FakeCuda):
        def capabilities(self) -> Capabilities:
            text = str(_not_found())
            return abilities.nothing(self.version(), f"cannot reach the driver: {text}")  # type: ignore[operator]

    found = doctor_cuda.check(doctor_cuda.look(Versioned, Without))  # type: ignore[arg-type]
    assert (found.status, "libcuda.so.1" in found.detail) == (PROBLEM, True)
    assert "NVIDIA_DRIVER_CAPABILITIES" in (found.hint or "")


def _not_found() -> NotAvailableError:
    """What is said of bindings that do not find the library."""

    def missing() -> None:
        raise RuntimeError('Failure finding "libcuda.so.1": ensure the NVIDIA display driver is installed\n')

    with pytest.raises(NotAvailableError) as caught:
        Driver(SimpleNamespace(cuDriverGetVersion=missing)).call("cuDriverGetVersion")
    return caught.value


@pytest.mark.parametrize("name", ["cuCheckpointProcessLock", "cuCheckpointProcessRestore"])
def test_a_function_that_is_missing_rules_all_out(name: str) -> None:
    """Whatever the version says."""
    facts = replace(NEWEST, functions={**NEWEST.functions, name: False})
    can = abilities.capabilities_of("615.71.05", facts, mig=False)
    assert not can.checkpoint
    assert name in (can.why_not or "")
