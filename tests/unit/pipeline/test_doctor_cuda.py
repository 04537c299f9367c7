"""The table of driver features."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu_fakes import A100, FakeDriver

from slurm_affinode.checkpoint.cuda import features as cuda_features
from slurm_affinode.checkpoint.cuda.driver import Driver, NotAvailableError
from slurm_affinode.checkpoint.cuda.features import ENTRY_POINTS, DriverFacts
from slurm_affinode.checkpoint.interface import Capabilities, CudaError, Feature
from slurm_affinode.pipeline import driver_check
from slurm_affinode.pipeline.checks import OK, PROBLEM, SKIPPED

BOUND = (*ENTRY_POINTS, "CUcheckpointLockArgs", "CUcheckpointGpuPair")
NEWEST = DriverFacts(13040, dict.fromkeys(ENTRY_POINTS, True), BOUND, "13.5.0")


class FakeCuda:
    """Replacement of the CUDA helper."""

    def __init__(self, *, driver_version: object, mig: object) -> None:
        self.version, self.mig = driver_version, mig

    def capabilities(self) -> Capabilities:
        return cuda_features.capabilities_of(self.version(), NEWEST, mig=self.mig())  # type: ignore[operator]

    def devices(self) -> tuple[str, ...]:
        return ("GPU-a", "GPU-b")

    def close(self) -> None:
        return None


class Versioned(FakeDriver):
    """A driver with a version."""

    def version(self) -> str:
        self.devices()
        return "615.71.05"


def test_missing_driver_is_reported_but_not_a_problem() -> None:
    """A login node has none; the table is still printed."""
    report = driver_check.check_cuda(lambda: Versioned(missing="the driver: not loaded"), FakeCuda, loaded=())  # type: ignore[arg-type]
    assert driver_check.check(report).status == SKIPPED
    assert [row[3] for row in report.rows()] == ["no"] * len(Feature)
    assert all(row[2] for row in report.rows())
    assert report.as_json()["gpus"] == []


def test_loaded_driver_that_does_not_respond_is_a_problem(tmp_path: Path) -> None:
    """For example after an upgrade of the libraries only, which NVML refuses."""
    why = "the driver: NVML says: Driver/library version mismatch"
    report = driver_check.check_cuda(lambda: Versioned(missing=why), FakeCuda, loaded=(tmp_path,))  # type: ignore[arg-type]
    check = driver_check.check(report)
    assert (check.status, check.detail) == (PROBLEM, why)
    assert "nvidia-smi" in (check.hint or "")


def test_features_are_summarized_in_one_line() -> None:
    """The line has the number of GPUs."""
    report = driver_check.check_cuda(Versioned, FakeCuda)  # type: ignore[arg-type]
    check = driver_check.check(report)
    assert check.status == OK
    assert check.detail.startswith("driver 615.71.05, CUDA 13.4, 2 GPUs: lock with time-out, checkpoint")
    assert "not:" not in check.detail


def test_driver_without_gpus_for_cuda_is_a_problem() -> None:
    """The driver has all functions, but no CUDA program could start, for example with MIG without instances."""

    class Unusable(FakeCuda):
        def devices(self) -> tuple[str, ...]:
            raise CudaError("cannot list the GPUs: it shows no GPU", code="CUDA_ERROR_NO_DEVICE")

    report = driver_check.check_cuda(Versioned, Unusable)  # type: ignore[arg-type]
    check = driver_check.check(report)
    assert (check.status, check.detail) == (PROBLEM, "cannot list the GPUs: it shows no GPU")
    assert "MIG" in (check.hint or "")
    assert not report.capabilities.checkpoint


def test_mig_on_every_gpu_is_a_problem() -> None:
    """With MIG on one of two GPUs, jobs on the other can be suspended."""
    part = replace(A100, mig="7", mig_profile="1g.10gb")
    only = driver_check.check_cuda(lambda: Versioned(readings={A100: None, part: None}), FakeCuda)  # type: ignore[arg-type, dict-item]
    assert driver_check.check(only).status == PROBLEM
    assert "MIG" in driver_check.check(only).detail


def test_outdated_bindings_are_reported() -> None:
    """With the version that has the missing function."""
    old = replace(NEWEST, bound=tuple(name for name in BOUND if name != "CUcheckpointGpuPair"), bindings="12.9.4")
    can = cuda_features.capabilities_of("615.71.05", old, mig=False)
    assert can.checkpoint
    assert cuda_features.refusal(Feature.MIGRATION, can) == (
        "restore on other GPUs: the installed cuda-bindings have no CUcheckpointGpuPair (13.0 has it)"
    )
    assert cuda_features.refusal(Feature.LOCK, can) is None


def test_old_driver_is_reported_with_required_branch() -> None:
    """A function is named as missing only if the feature consists of that function alone."""
    old = replace(NEWEST, cuda=12060, functions=dict.fromkeys(ENTRY_POINTS, False))
    can = cuda_features.capabilities_of("560.35.03", old, mig=False)
    assert cuda_features.refusal(Feature.RESTORE, can) == (
        "restore: driver 560.35.03 has no cuCheckpointProcessRestore (570 has it)"
    )
    assert cuda_features.refusal(Feature.MIGRATION, can) == "restore on other GPUs: driver 560.35.03 cannot (580 can)"
    assert cuda_features.refusal(Feature.IPC, can) == "CUDA IPC: driver 560.35.03 cannot (610 can)"


def test_driver_before_595_on_arm_is_too_old() -> None:
    """It has the functions but refuses to checkpoint a locked process (NVIDIA/cuda-checkpoint#51)."""
    facts = replace(NEWEST, cuda=13000)
    grace = cuda_features.capabilities_of("580.142", facts, mig=False, machine="aarch64")
    assert grace.why_not == "driver 580.142 cannot on an ARM processor (595 can)"
    assert {item.feature: item.since for item in grace.table if not item.available} == {
        Feature.CHECKPOINT: 595, Feature.RESTORE: 595, Feature.MIGRATION: 595, Feature.IPC: 610,
    }  # fmt: skip
    assert cuda_features.capabilities_of("580.142", facts, mig=False, machine="x86_64").checkpoint
    assert cuda_features.capabilities_of("595.71.05", facts, mig=False, machine="aarch64").checkpoint


def test_outdated_driver_library_is_reported_instead_of_driver() -> None:
    """The driver itself is new enough."""
    old = replace(NEWEST, cuda=12040, functions=dict.fromkeys(ENTRY_POINTS, False))
    can = cuda_features.capabilities_of("580.95.05", old, mig=False)
    assert cuda_features.refusal(Feature.LOCK, can) == (
        "lock with time-out: the driver's library is of CUDA 12.4 (12.8 can, driver 570)"
    )
    assert can.why_not == "the driver's library is of CUDA 12.4 (12.8 can, driver 570)"


def test_missing_libcuda_has_hint() -> None:
    """As in a container with GPUs for monitoring only."""

    class Without(FakeCuda):
        def capabilities(self) -> Capabilities:
            text = str(_not_found())
            return cuda_features.unavailable(self.version(), f"cannot reach the driver: {text}")  # type: ignore[operator]

    check = driver_check.check(driver_check.check_cuda(Versioned, Without))  # type: ignore[arg-type]
    assert (check.status, "libcuda.so.1" in check.detail) == (PROBLEM, True)
    assert "NVIDIA_DRIVER_CAPABILITIES" in (check.hint or "")


def _not_found() -> NotAvailableError:
    """Return the error of bindings that do not find the library."""

    def missing() -> None:
        raise RuntimeError('Failure finding "libcuda.so.1": ensure the NVIDIA display driver is installed\n')

    with pytest.raises(NotAvailableError) as caught:
        Driver(SimpleNamespace(cuDriverGetVersion=missing)).call("cuDriverGetVersion")
    return caught.value


@pytest.mark.parametrize("name", ["cuCheckpointProcessLock", "cuCheckpointProcessRestore"])
def test_missing_function_disables_checkpoint(name: str) -> None:
    """Independent of the version."""
    facts = replace(NEWEST, functions={**NEWEST.functions, name: False})
    can = cuda_features.capabilities_of("615.71.05", facts, mig=False)
    assert not can.checkpoint
    assert name in (can.why_not or "")
