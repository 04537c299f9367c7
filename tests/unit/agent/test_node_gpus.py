"""What the agent takes from the driver of its node about memory."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from gpu_fakes import A100, OTHER, FakeDriver

from slurm_affinode.agent.orchestration import NodeGpus
from slurm_affinode.gpu.interface import NotSupported
from slurm_affinode.model.gpu import GpuProcess


def test_memory_of_processes_is_in_bytes_by_gpu() -> None:
    """All GPUs of the node, those with nobody on them, too."""
    driver = FakeDriver(running={A100: [GpuProcess(7, 1.5, "compute"), GpuProcess(8, 0.0, "compute")]})
    gpus = NodeGpus(lambda: nullcontext(driver))
    assert gpus.processes() == {A100.uuid: {7: 3 << 19, 8: 0}, OTHER.uuid: {}}


def test_memory_that_the_driver_does_not_tell_is_not_taken_for_none() -> None:
    """What a job moves into host memory would be taken for nothing, and the kernel would end it for what it is."""
    driver = FakeDriver(running={A100: [GpuProcess(7, None, "compute")]})
    with pytest.raises(NotSupported, match="how much memory process 7 holds on GPU 0"):
        NodeGpus(lambda: nullcontext(driver)).processes()


def test_what_a_process_holds_is_not_known_where_the_driver_does_not_show_it() -> None:
    """On all GPUs together; a driver that fails does not tell either."""
    other = GpuProcess(7, 0.5, "compute")
    driver = FakeDriver(running={A100: [GpuProcess(7, 1.5, "compute"), GpuProcess(8, 0.0, "compute")], OTHER: [other]})
    gpus = NodeGpus(lambda: nullcontext(driver))
    assert (gpus.held(7), gpus.held(8), gpus.held(9)) == (2 << 20, 0, None)
    driver.running[A100].append(GpuProcess(9, None, "compute"))
    assert gpus.held(7) is None
