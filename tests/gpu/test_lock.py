"""A lock that times out leaves the process unchanged."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gpu.programs import Programs
from slurm_affinode.checkpoint.cuda.client import Cuda
from slurm_affinode.checkpoint.interface import CudaError, CudaState, LockTimeout

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_long_kernel_makes_lock_time_out(run: Programs, cuda: Cuda, note: Any) -> None:
    """The lock times out, the kernel ends, and the process continues and can be suspended then."""
    program = run.start()
    program.ask("setup", mib=16, seed=1)
    digest = program.ask("digest")
    program.ask("busy", seconds=6.0)
    began = time.monotonic()
    with pytest.raises(LockTimeout, match=r"within 0\.5 s"):
        cuda.lock(program.pid, timeout_ms=500)
    took = time.monotonic() - began
    note("gave_up_after_s", round(took, 3))
    assert took < 5
    assert cuda.state(program.pid) is CudaState.RUNNING
    program.ask("wait")
    run.suspend(program)
    run.resume(program)
    assert program.ask("digest") == digest


def test_lock_that_waits_long_enough_succeeds(run: Programs, cuda: Cuda) -> None:
    """Kernels launched before end first; later calls wait and are answered."""
    program = run.start()
    program.ask("setup", mib=16, seed=1)
    program.ask("busy", seconds=1.5)
    cuda.lock(program.pid, timeout_ms=30_000)
    assert cuda.state(program.pid) is CudaState.LOCKED
    number = program.send("steps", count=1)
    assert not program.answered(number)
    cuda.unlock(program.pid)
    assert program.answer(number)


def test_step_out_of_order_is_rejected(run: Programs, cuda: Cuda) -> None:
    """The driver returns an error, and the state is unchanged."""
    program = run.start()
    program.ask("setup", mib=16, seed=1)
    for action in (cuda.checkpoint, cuda.restore, cuda.unlock):
        with pytest.raises(CudaError):
            action(program.pid)
        assert cuda.state(program.pid) is CudaState.RUNNING
    assert program.ask("steps", count=1)
