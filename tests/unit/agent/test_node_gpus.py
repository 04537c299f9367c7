"""GPU memory of processes as reported by the node's driver."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from gpu_fakes import A100, OTHER, FakeDriver

from slurm_affinode.agent.composition import DriverGpus
from slurm_affinode.gpu.interface import NotSupported
from slurm_affinode.model.gpu import GpuProcess


def test_memory_of_processes_is_in_bytes_by_gpu() -> None:
    """All GPUs of the node are listed, including those without processes."""
    driver = FakeDriver(running={A100: [GpuProcess(7, 1.5, "compute"), GpuProcess(8, 0.0, "compute")]})
    gpus = DriverGpus(lambda: nullcontext(driver))
    assert gpus.processes() == {A100.uuid: {7: 3 << 19, 8: 0}, OTHER.uuid: {}}


def test_unreported_memory_is_not_treated_as_zero() -> None:
    """Otherwise host memory for it would not be reserved, and the OOM killer would end the job."""
    driver = FakeDriver(running={A100: [GpuProcess(7, None, "compute")]})
    with pytest.raises(NotSupported, match="how much memory process 7 holds on GPU 0"):
        DriverGpus(lambda: nullcontext(driver)).processes()


def test_memory_of_unlisted_process_is_unknown() -> None:
    """It is summed over all GPUs; if the driver does not report one process, all are unknown."""
    other = GpuProcess(7, 0.5, "compute")
    driver = FakeDriver(running={A100: [GpuProcess(7, 1.5, "compute"), GpuProcess(8, 0.0, "compute")], OTHER: [other]})
    gpus = DriverGpus(lambda: nullcontext(driver))
    assert (gpus.held_bytes(7), gpus.held_bytes(8), gpus.held_bytes(9)) == (2 << 20, 0, None)
    driver.running[A100].append(GpuProcess(9, None, "compute"))
    assert gpus.held_bytes(7) is None
