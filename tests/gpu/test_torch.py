"""PyTorch: tens of GiB of weights and optimizer state, a captured graph, suspended and resumed in the middle."""

from __future__ import annotations

import time
from typing import Any

import pytest
from gpu.machine import Machine
from gpu.programs import Programs

from slurm_affinode.checkpoint.cuda import Cuda
from slurm_affinode.checkpoint.interface import CudaState

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]


@pytest.fixture
def torch(machine: Machine) -> str:
    """The version of PyTorch."""
    if machine.emulated:
        pytest.skip("PyTorch computes, and the emulated driver does not; the driver's API is tested in its place")
    if machine.torch is None:
        pytest.skip("no PyTorch that sees a GPU (GPU_TEST_PYTHON names a Python that has it)")
    return machine.torch


def test_training_goes_on_bit_for_bit(machine: Machine, torch: str, run: Programs, cuda: Cuda, note: Any) -> None:
    """Losses and every byte of weights, gradients' moments and steps are those of an uninterrupted run."""
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


def test_suspended_in_the_middle_of_its_steps(torch: str, run: Programs) -> None:
    """While it replays its graph again and again: the lock waits for what was launched, nothing is lost."""
    calm = run.start("torch_worker.py")
    calm.ask("setup", mib=1024, seed=5)
    expected = [calm.ask("steps", count=300), calm.ask("digest")]
    run.close()
    program = run.start("torch_worker.py")
    program.ask("setup", mib=1024, seed=5)
    asked = program.send("steps", count=300)
    for _ in range(3):
        time.sleep(0.2)
        run.suspend(program)
        run.resume(program)
    assert [program.answer(asked), program.ask("digest")] == expected
