"""The conformance suite of GPU drivers on the driver of this machine. The faults are tested on the emulated one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conformance.gpu_driver import GpuDriverSuite, GpuMachine

from gpu.machine import Machine
from slurm_affinode.gpu.nvml import NvmlDriver

pytestmark = pytest.mark.gpu


class TestConformance(GpuDriverSuite):
    """NVIDIA's binding and driver."""

    @pytest.fixture
    def machine(self, machine: Machine) -> Iterator[GpuMachine]:  # type: ignore[override]
        driver = NvmlDriver()
        yield GpuMachine(driver)
        driver.close()
