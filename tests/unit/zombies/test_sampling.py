"""Which GPUs of live readings stored samples apply to."""

from __future__ import annotations

from dataclasses import replace

from slurm_affinode.zombies.nodes import LiveGpu
from slurm_affinode.zombies.sampling import NodeSamples, Watched, idle, timed

IDLE, ACTIVE = LiveGpu("g1", "GPU-0", 0), LiveGpu("g1", "GPU-1", 1)
IDLE_SHARE, ACTIVE_SHARE = LiveGpu("g1", "GPU-0", 0, part_of=3), LiveGpu("g1", "GPU-1", 1, part_of=4)
IDLE_SHARE_OF_ACTIVE = LiveGpu("g1", "GPU-1", 1, part_of=5)


def _samples() -> NodeSamples:
    of_idle, of_active = (IDLE, IDLE_SHARE, IDLE_SHARE_OF_ACTIVE), (ACTIVE, ACTIVE_SHARE)
    watched = {gpu.key: Watched(gpu, 100.0) for gpu in of_idle} | {gpu.key: Watched(gpu, None) for gpu in of_active}
    by_job = {1: [IDLE, ACTIVE], 2: [ACTIVE], 3: [IDLE_SHARE], 4: [ACTIVE_SHARE], 5: [IDLE_SHARE_OF_ACTIVE]}
    return NodeSamples((), (), watched, by_job, 0.0)


def test_stored_samples_apply_to_a_share_only_while_the_whole_gpu_is_idle() -> None:
    assert timed(_samples()) == {1: [IDLE, ACTIVE], 2: [ACTIVE], 3: [IDLE_SHARE], 4: [], 5: []}


def test_shares_of_jobs_that_have_ended_are_left_out() -> None:
    samples = _samples()
    left = {job: gpus for job, gpus in samples.by_job.items() if job != 5}
    assert timed(replace(samples, by_job=left)).keys() == {1, 2, 3, 4}


def test_only_samples_of_gpus_that_are_idle_now_are_followed() -> None:
    assert idle(_samples()) == {1: [IDLE], 3: [IDLE_SHARE]}
