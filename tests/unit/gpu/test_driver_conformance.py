"""The conformance suite of GPU drivers: NVML on a binding in memory, and the fakes of other tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from agent_stand_ins import Gpus
from conformance.gpu_driver import FaultSuite, FaultyMachine
from gpu_fakes import A100, FakeDriver

from slurm_affinode.gpu.interface import GpuLost
from slurm_affinode.gpu.nvml import NvmlDriver

from .nvml_binding import MIB, Binding, refusal


def _nvml() -> FaultyMachine:
    """Return a machine with two GPUs, whose driver implements the required functions."""
    memory = SimpleNamespace(total=10 * MIB, used=2 * MIB, free=7 * MIB, reserved=MIB)
    state: dict[str, Any] = {"lost": False, "loaded": True}

    def of_gpu(value: Any) -> Any:
        def ask(handle: str, *_: object) -> Any:
            if not state["loaded"]:
                return refusal(pynvml.NVML_ERROR_UNINITIALIZED)
            return refusal(pynvml.NVML_ERROR_GPU_IS_LOST) if state["lost"] and handle == "gpu0" else value

        return ask

    def of_driver(value: Any) -> Any:
        return lambda: value if state["loaded"] else refusal(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    binding = Binding(
        gpus=2,
        nvmlDeviceGetMemoryInfo=of_gpu(memory),
        nvmlDeviceGetComputeRunningProcesses=of_gpu([SimpleNamespace(pid=7, usedGpuMemory=MIB)]),
        nvmlDeviceGetGraphicsRunningProcesses=of_gpu([]),
        nvmlDeviceGetProcessUtilization=of_gpu([]),
        nvmlSystemGetDriverVersion=of_driver("580.95.05"),
    )
    binding.nvmlInit = binding.nvmlSystemGetDriverVersion
    return FaultyMachine(
        NvmlDriver(binding),
        lose=lambda: state.update(lost=True),
        unload=lambda: state.update(loaded=False),
        load=lambda: state.update(loaded=True),
    )


def _fake() -> FaultyMachine:
    driver = FakeDriver()

    def lose() -> None:
        driver.readings[A100] = GpuLost("GPU 0: GPU is lost")

    return FaultyMachine(
        driver,
        lose=lose,
        unload=lambda: setattr(driver, "missing", "no driver"),
        load=lambda: setattr(driver, "missing", None),
    )


def _stand_in() -> FaultyMachine:
    driver = Gpus()
    return FaultyMachine(
        driver,
        lose=lambda: driver.lost.add(0),
        unload=lambda: setattr(driver, "missing", True),
        load=lambda: setattr(driver, "missing", False),
    )


class TestDriver(FaultSuite):
    """All of them."""

    @pytest.fixture(params=[_nvml, _fake, _stand_in])
    def machine(self, request: pytest.FixtureRequest) -> FaultyMachine:
        machine: FaultyMachine = request.param()
        return machine
