"""The replay of a queue with suspended jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.whatif.policy import SchedulingPolicy
from slurm_affinode.whatif.suspension import GpuJob, SuspensionRule, most_concurrent, replay

FIRST_FIT = SchedulingPolicy("fcfs", "first-fit", "requested")
EASY = SchedulingPolicy("fcfs", "easy", "requested")
CONSERVATIVE = SchedulingPolicy("fcfs", "conservative", "requested")
RULE = SuspensionRule(window_s=10, dump_s=5, restore_s=3)


def job(number: int, submit: int, run: int, gpus: int = 1, *, idle: tuple[tuple[int, int], ...] = ()) -> GpuJob:
    return GpuJob(number, "gpu", submit, run, gpus, 2 * run, 0, counted=True, idle=idle)


@st.composite
def queues(draw: st.DrawFn) -> list[GpuJob]:
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 30), st.integers(1, 80), st.integers(1, 4), st.integers(0, 60), st.integers(1, 60)
            ),
            min_size=1, max_size=10,
        )
    )  # fmt: skip
    time, jobs = 0, []
    for number, (gap, run, gpus, begin, length) in enumerate(rows):
        time += gap
        idle = ((begin, min(run, begin + length)),) if begin < run else ()
        jobs.append(job(number, time, run, gpus, idle=idle))
    return jobs


@pytest.mark.parametrize("policy", [FIRST_FIT, EASY, CONSERVATIVE], ids=str)
def test_gpus_of_a_suspended_job_run_another_one(policy: SchedulingPolicy) -> None:
    """Idle from 20 to 80: suspended at 30, GPUs free at 35; resumed at 80, restored at 83, 20 s left."""
    jobs = [job(1, 0, 100, 2, idle=((20, 80),)), job(2, 5, 30, 2)]
    before, after = replay(jobs, 2, policy, None), replay(jobs, 2, policy, RULE)
    assert before.wait.tolist() == [0, 95]
    assert after.wait.tolist() == [0, 30]
    assert (after.wakes.tolist(), after.wake_wait.tolist()) == ([1, 0], [0, 0])
    assert after.returned_s.tolist() == [2 * 45, 0]
    assert after.used_s == 2 * 30


def test_job_waits_for_gpus_when_it_wakes() -> None:
    jobs = [job(1, 0, 100, 2, idle=((20, 80),)), job(2, 5, 60, 2)]
    after = replay(jobs, 2, FIRST_FIT, RULE)
    assert after.wake_wait.tolist() == [15, 0]
    assert after.returned_s.tolist() == [2 * 60, 0]


def test_woken_job_keeps_its_place_in_the_queue() -> None:
    """It was submitted first, so it starts before a job that waits for longer than it."""
    jobs = [job(1, 0, 100, 2, idle=((20, 80),)), job(2, 5, 60, 2), job(3, 6, 50, 2)]
    after = replay(jobs, 2, FIRST_FIT, RULE)
    assert after.wait.tolist() == [0, 30, 95 + 23 - 6]


def test_job_that_is_idle_to_its_end_is_not_resumed() -> None:
    after = replay([job(1, 0, 100, 2, idle=((50, 100),)), job(2, 0, 10, 2)], 2, FIRST_FIT, RULE)
    assert after.wakes.tolist() == [0, 0]
    assert after.returned_s.tolist() == [2 * 35, 0]
    assert (after.wait.tolist(), after.used_s) == ([0, 65], 2 * 10)


def test_job_in_place_keeps_its_gpus_while_it_sleeps() -> None:
    """Asleep from 35 to 80, restored at 83: the other job waits for its end at 103 s."""
    jobs = [job(1, 0, 100, 2, idle=((20, 80),)), job(2, 5, 30, 2)]
    after = replay(jobs, 2, FIRST_FIT, replace(RULE, in_place=True))
    assert after.wait.tolist() == [0, 98]
    assert (after.wakes.tolist(), after.wake_wait.tolist()) == ([1, 0], [0, 0])
    assert (after.returned_s.tolist(), after.used_s) == ([2 * 45, 0], 0.0)
    idle_to_the_end = [job(1, 0, 100, 2, idle=((50, 100),))]
    asleep = replay(idle_to_the_end, 2, FIRST_FIT, replace(RULE, in_place=True))
    assert (asleep.end.tolist(), asleep.returned_s.tolist(), asleep.wakes.tolist()) == ([100], [2 * 35], [0])


def test_head_of_line_wait_is_that_with_enough_free_gpus() -> None:
    """A narrow job waits behind a wide one from 2 to 200; one GPU is free until 100, when the wide one starts."""
    jobs = [job(1, 0, 100, 3), job(2, 1, 100, 4), job(3, 2, 20, 1)]
    strict = replay(jobs, 4, SchedulingPolicy("fcfs", "none", "requested"), None)
    assert (strict.wait.tolist(), strict.blocked.tolist(), strict.end.tolist()) == (
        [0, 99, 198], [0, 0, 98], [100, 200, 220],
    )  # fmt: skip
    assert replay(jobs, 4, FIRST_FIT, None).blocked.tolist() == [0, 0, 0]


@given(jobs=queues(), capacity=st.integers(4, 8))
def test_no_job_waits_behind_others_with_first_fit(jobs: list[GpuJob], capacity: int) -> None:
    assert not replay(jobs, capacity, FIRST_FIT, RULE).blocked.any()


@given(jobs=queues(), capacity=st.integers(4, 8))
def test_head_of_line_wait_is_a_part_of_the_wait(jobs: list[GpuJob], capacity: int) -> None:
    after = replay(jobs, capacity, SchedulingPolicy("fcfs", "none", "requested"), RULE)
    assert (after.blocked >= 0).all()
    assert (after.blocked <= after.wait).all()


def test_predicted_times_are_estimates_of_the_replay() -> None:
    """A job of 20 s that requests 150 s does not fit before the wide one, unless its run time is predicted."""
    jobs = [job(1, 0, 50, 3), job(2, 1, 50, 4), replace(job(3, 2, 20, 1), request=150, predicted=20)]
    assert replay(jobs, 4, EASY, None).wait.tolist() == [0, 49, 98]
    assert replay(jobs, 4, SchedulingPolicy("fcfs", "easy", "predicted"), None).wait.tolist() == [0, 49, 0]


def test_period_shorter_than_window_and_suspension_is_ignored() -> None:
    jobs = [job(1, 0, 100, 2, idle=((20, 35), (60, 76)))]
    after = replay(jobs, 2, FIRST_FIT, RULE)
    assert (after.wakes.tolist(), after.returned_s.tolist()) == ([1], [2 * 1])


@given(jobs=queues(), policy=st.sampled_from([FIRST_FIT, EASY, CONSERVATIVE]))
def test_suspending_nothing_changes_nothing(jobs: list[GpuJob], policy: SchedulingPolicy) -> None:
    before = replay(jobs, 4, policy, None)
    for after in (
        replay(jobs, 4, policy, replace(RULE, window_s=1000)),
        replay([replace(item, idle=()) for item in jobs], 4, policy, RULE),
    ):
        assert after.wait.tolist() == before.wait.tolist()
        assert (after.wakes.sum(), after.returned_s.sum(), after.used_s) == (0, 0, 0)


@given(jobs=queues(), policy=st.sampled_from([FIRST_FIT, EASY, CONSERVATIVE]))
def test_others_use_at_most_what_is_returned(jobs: list[GpuJob], policy: SchedulingPolicy) -> None:
    after = replay(jobs, 4, policy, RULE)
    assert 0 <= after.used_s <= after.returned_s.sum()
    assert (after.wait >= 0).all()
    assert (after.wake_wait >= 0).all()


def test_most_concurrent_gpus() -> None:
    assert most_concurrent([job(1, 0, 10, 2), job(2, 0, 10, 3), job(3, 0, 5, 4)], [0, 10, 12]) == 7
