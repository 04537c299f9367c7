"""A fake driver and sweeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gpu_fakes import A100, IDLE, OTHER, FakeDriver

from slurm_affinode.model.gpu import GpuSample, Reading, Sweep


@pytest.fixture
def driver() -> FakeDriver:
    """Return a driver with two idle GPUs."""
    return FakeDriver()


@pytest.fixture
def sweep_at() -> Callable[..., Sweep]:
    """Return a function that makes a sweep of two GPUs."""

    def make(time_s: float, jobs: tuple[str, ...] | None = ("7",), reading: Reading = IDLE) -> Sweep:
        return Sweep(time_s, (GpuSample(A100, reading, jobs), GpuSample(OTHER, reading, ())))

    return make
