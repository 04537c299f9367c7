"""Insufficient GPU memory for a restore is detected before the driver is called, without side effects."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpu.machine import MIB, Machine, settled
from gpu.programs import Programs
from slurm_affinode.checkpoint.cuda.client import Cuda
from slurm_affinode.checkpoint.interface import CudaState
from slurm_affinode.gpu.nvml import NvmlDriver
from slurm_affinode.suspension import memory

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(540)]


def free(nvml: NvmlDriver) -> dict[str, int | None]:
    """Return the free bytes per UUID."""
    result = settled(lambda: {device.uuid: nvml.free_mib(device) for device in nvml.devices() if device.mig is None})
    return {uuid: None if mib is None else int(mib * MIB) for uuid, mib in result.items()}


def test_insufficient_gpu_memory_is_refused_without_side_effects(
    machine: Machine, run: Programs, cuda: Cuda, nvml: NvmlDriver, note: Any
) -> None:
    """The process stays checkpointed and intact; once there is enough memory, it is restored unchanged."""
    program = run.start()
    program.ask("setup", mib=machine.mib, seed=4)
    digest = program.ask("digest")
    with_it = free(nvml)
    run.suspend(program)
    without = free(nvml)
    needs = {uuid: max(0, (without[uuid] or 0) - (with_it[uuid] or 0)) for uuid in without}
    assert needs[machine.gpus[0].uuid] >= machine.mib * MIB

    other = run.start()
    left = free(nvml)[machine.gpus[0].uuid]
    assert left is not None
    other.ask("hold", mib=left // MIB - machine.mib // 2)
    why = memory.shortage(needs, free(nvml))
    assert why is not None
    assert re.fullmatch(r".* are needed on GPU-.*, .* are free there", why)
    note("refused", why)
    assert cuda.state(program.pid) is CudaState.CHECKPOINTED

    other.ask("release")
    program.restored = True
    assert memory.shortage(needs, free(nvml)) is None
    cuda.restore(program.pid)
    cuda.unlock(program.pid)
    assert program.ask("digest") == digest
