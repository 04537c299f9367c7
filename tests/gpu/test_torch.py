"""PyTorch with tens of GiB of weights and optimizer state and a captured graph, suspended while it trains."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gpu.machine import Machine
from gpu.programs import Programs
from gpu.skips import without
from slurm_affinode.checkpoint.cuda.client import Cuda
from slurm_affinode.checkpoint.interface import CudaState

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(540)]

_MIDDLE_S = 5.0
"""Duration of the steps during which it is suspended."""


@pytest.fixture
def torch(machine: Machine) -> str:
    """The version of PyTorch."""
    if machine.emulated:
        pytest.skip("PyTorch computes, and the emulated driver does not; the driver's API is tested in its place")
    if machine.no_torch is not None:
        without(machine.no_torch)
    assert machine.torch is not None
    return machine.torch


def test_training_continues_bit_for_bit(machine: Machine, torch: str, run: Programs, cuda: Cuda, note: Any) -> None:
    """Losses and every byte of the weights, gradient moments and steps equal those of an uninterrupted run."""
    note("torch", torch)
    calm = run.start("torch_worker.py")
    note("setup", calm.ask("setup", mib=machine.mib, seed=3))
    expected = [calm.ask("steps", count=4), calm.ask("steps", count=4), calm.ask("digest")]
    run.close()

    program = run.start("torch_worker.py")
    program.ask("setup", mib=machine.mib, seed=3)
    first = program.ask("steps", count=4)
    began = time.monotonic()
    run.suspend(program)
    note("out_s", round(time.monotonic() - began, 3))
    assert cuda.state(program.pid) is CudaState.CHECKPOINTED
    other = run.start()
    other.ask("hold", mib=int(machine.mib * 0.9))
    other.ask("release")
    began = time.monotonic()
    run.resume(program)
    note("in_s", round(time.monotonic() - began, 3))
    assert [first, program.ask("steps", count=4), program.ask("digest")] == expected


def test_suspended_in_the_middle_of_its_steps(machine: Machine, torch: str, run: Programs, note: Any) -> None:
    """While it replays its graph: the lock waits for launched kernels, and nothing is lost."""
    mib = min(1024, machine.mib)
    calm = run.start("torch_worker.py")
    calm.ask("setup", mib=mib, seed=5)
    began = time.monotonic()
    expected = [calm.ask("steps", count=200)]
    count = max(200, int(200 * _MIDDLE_S / (time.monotonic() - began)))
    expected += [calm.ask("steps", count=count), calm.ask("digest")]
    run.close()
    program = run.start("torch_worker.py")
    program.ask("setup", mib=mib, seed=5)
    first = program.ask("steps", count=200)
    number = program.send("steps", count=count)
    for _ in range(3):
        time.sleep(0.2)
        run.suspend(program)
        assert not program.answered(number)
        run.resume(program)
    note("steps", count)
    assert [first, program.answer(number), program.ask("digest")] == expected
