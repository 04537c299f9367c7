"""The simulation: equal to an independent computation from the rules, and its general properties."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_affinode.whatif.policy import Backfill, SchedulingPolicy
from slurm_affinode.whatif.simulation import Workload, simulate

from .reference_scheduler import Job, schedule

POLICIES = [
    SchedulingPolicy(*rules)  # type: ignore[arg-type]
    for rules in product(
        ("fcfs", "sjf", "sjf-user", "priority"),
        ("none", "easy", "conservative", "first-fit"),
        ("requested", "actual", "last-two", "predicted"),
    )
]
CAPACITY = 6


def workload(jobs: list[Job]) -> Workload:
    def column(name: str) -> np.ndarray:  # type: ignore[type-arg]
        return np.array([getattr(job, name) for job in jobs], np.int64)

    return Workload(
        column("submit"), column("run"), column("units"), column("request"), column("user"),
        np.array([job.mean for job in jobs], np.float64), column("number"), predicted=column("predicted"),
        priority=column("priority"),
    )  # fmt: skip


@st.composite
def logs(draw: st.DrawFn, most: int = 14) -> list[Job]:
    """Draw jobs in the order of submission, which is not always that of their numbers, that fit on ``CAPACITY``."""
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 4),
                st.integers(1, 9),
                st.integers(1, CAPACITY),
                st.integers(0, 6),
                st.integers(0, 2),
                st.integers(1, 12),
                st.integers(0, 2),
            ),
            max_size=most,
        )
    )
    numbers = draw(st.one_of(st.just(range(len(rows))), st.permutations(range(len(rows)))))
    time, jobs = 0, []
    for number, (gap, run, units, more, user, predicted, priority) in zip(numbers, rows, strict=True):
        time += gap
        jobs.append(Job(number, time, run, units, run + more, user, mean=float(user % 2), predicted=predicted,
                        priority=priority))  # fmt: skip
    return sorted(jobs, key=lambda job: (job.submit, job.number))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@given(jobs=logs())
@settings(max_examples=25)
def test_schedule_is_that_of_the_rules(policy: SchedulingPolicy, jobs: list[Job]) -> None:
    expected = schedule([replace(job) for job in jobs], CAPACITY, policy.order, policy.backfill, policy.times)
    assert simulate(workload(jobs), CAPACITY, policy).tolist() == expected


@given(jobs=logs(), policy=st.sampled_from(POLICIES))
def test_capacity_is_never_exceeded_and_all_jobs_start(jobs: list[Job], policy: SchedulingPolicy) -> None:
    starts = simulate(workload(jobs), CAPACITY, policy)
    assert len(starts) == len(jobs)
    for job, start in zip(jobs, starts, strict=True):
        assert start >= job.submit
        held = sum(one.units for one, begun in zip(jobs, starts, strict=True) if begun <= start < begun + one.run)
        assert held <= CAPACITY


@given(jobs=logs(), more=st.integers(1, 4))
def test_more_units_delay_no_job_in_strict_order(jobs: list[Job], more: int) -> None:
    policy = SchedulingPolicy("fcfs", "none", "actual")
    few, many = (simulate(workload(jobs), capacity, policy) for capacity in (CAPACITY, CAPACITY + more))
    assert (many <= few).all()


@given(jobs=logs())
def test_conservative_backfill_delays_no_job_beyond_strict_order(jobs: list[Job]) -> None:
    strict, conservative = (
        simulate(workload(jobs), CAPACITY, SchedulingPolicy("fcfs", backfill, "actual"))
        for backfill in ("none", "conservative")
    )
    assert (conservative <= strict).all()


def test_easy_delays_the_second_waiting_job_and_conservative_does_not() -> None:
    """On 4 units, a narrow job of 100 s fits beside the first waiting job; the second one needs all units."""
    rows = [(0, 10, 3), (1, 10, 3), (2, 5, 4), (3, 100, 1)]
    jobs = workload([Job(number, submit, run, units, run) for number, (submit, run, units) in enumerate(rows)])
    assert simulate(jobs, 4, SchedulingPolicy("fcfs", "easy", "actual")).tolist() == [0, 10, 103, 3]
    assert simulate(jobs, 4, SchedulingPolicy("fcfs", "conservative", "actual")).tolist() == [0, 10, 20, 25]


@pytest.mark.parametrize(
    ("backfill", "rows", "expected"),
    [
        ("first-fit", [(0, 2, 2), (1, 1, 3), (1, 9, 2)], {3: 3, 4: 9}),
        ("easy", [(1, 2, 1), (2, 9, 3), (2, 1, 2)], {3: 1, 4: 9}),
    ],
)
def test_more_units_can_raise_the_total_wait(
    backfill: Backfill, rows: list[tuple[int, int, int]], expected: dict[int, int]
) -> None:
    """The counterexamples of docs/whatif.md: rows are submission, run time and size."""
    jobs = workload([Job(number, submit, run, units, run) for number, (submit, run, units) in enumerate(rows)])
    policy = SchedulingPolicy("fcfs", backfill, "actual")
    assert {units: int((simulate(jobs, units, policy) - jobs.submit).sum()) for units in expected} == expected


@given(jobs=logs(), which=st.integers(0, 13), more=st.integers(1, 5))
@example(jobs=[Job(0, 0, 3, 6, 3), Job(1, 0, 1, 1, 1)], which=1, more=5)
def test_larger_job_never_starts_earlier_in_strict_order(jobs: list[Job], which: int, more: int) -> None:
    if which >= len(jobs):
        return
    policy = SchedulingPolicy("fcfs", "none", "actual")
    before = simulate(workload(jobs), CAPACITY, policy)
    larger = replace(jobs[which], units=min(CAPACITY, jobs[which].units + more))
    after = simulate(workload([*jobs[:which], larger, *jobs[which + 1 :]]), CAPACITY, policy)
    assert after[which] >= before[which]


@given(jobs=logs(), which=st.integers(0, 13), more=st.integers(1, 5))
def test_larger_job_never_starts_earlier_with_first_fit(jobs: list[Job], which: int, more: int) -> None:
    if which >= len(jobs):
        return
    policy = SchedulingPolicy("fcfs", "first-fit", "actual")
    before = simulate(workload(jobs), CAPACITY, policy)
    larger = replace(jobs[which], units=min(CAPACITY, jobs[which].units + more))
    after = simulate(workload([*jobs[:which], larger, *jobs[which + 1 :]]), CAPACITY, policy)
    assert after[which] >= before[which]


def test_queue_of_many_blocks_is_searched_in_order() -> None:
    """Waiting jobs beyond one block of the index start in the order of submission."""
    count = 2000
    units = np.where(np.arange(count) % 700 == 699, 1, 3)
    units[0] = 4
    run = np.where(units == 1, 5, 1000)
    jobs = [Job(at, 0, int(run[at]), int(units[at]), int(run[at])) for at in range(count)]
    starts = simulate(workload(jobs), 4, SchedulingPolicy("fcfs", "easy", "actual"))
    narrow = [at for at in range(count) if units[at] == 1]
    assert starts[narrow].tolist() == sorted(starts[narrow].tolist())
    assert starts[narrow[0]] < starts[narrow[0] - 1]


@pytest.mark.parametrize("backfill", ["none", "easy", "first-fit"])
def test_equally_long_jobs_start_in_the_order_of_the_log(backfill: Backfill) -> None:
    jobs = [Job(0, 0, 9, 4, 9), Job(1, 1, 8, 6, 8), Job(3, 2, 5, 2, 5), Job(2, 3, 5, 2, 5), Job(4, 0, 4, 2, 4)]
    jobs.sort(key=lambda job: (job.submit, job.number))
    starts = simulate(workload(jobs), CAPACITY, SchedulingPolicy("sjf", backfill, "actual"))
    begun = {job.number: start for job, start in zip(jobs, starts.tolist(), strict=True)}
    assert begun[2] == 4 < begun[3]


def test_no_jobs_give_no_starts() -> None:
    assert simulate(workload([]), 1, SchedulingPolicy()).tolist() == []
