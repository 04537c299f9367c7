"""The simulation: equal to an independent computation from the rules, and its general properties."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_affinode.whatif import waiting
from slurm_affinode.whatif.policy import Backfill, Order, SchedulingPolicy, Times
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


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy.backfill == "easy"], ids=str)
@given(jobs=logs(most=24), limits=st.sampled_from([(0, 0), (3, 2), (4, 4)]))
@settings(max_examples=25)
def test_schedule_of_an_indexed_queue_is_that_of_the_rules(
    policy: SchedulingPolicy, jobs: list[Job], limits: tuple[int, int]
) -> None:
    expected = schedule([replace(job) for job in jobs], CAPACITY, policy.order, policy.backfill, policy.times)
    with queue_limits(*limits):
        assert simulate(workload(jobs), CAPACITY, policy).tolist() == expected


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy.backfill == "easy"], ids=str)
def test_schedule_of_a_queue_that_grows_and_shrinks_does_not_depend_on_its_index(policy: SchedulingPolicy) -> None:
    """Bursts of 300 jobs let the queue pass both limits several times."""
    random = np.random.default_rng(5)
    count = 1500
    run = random.integers(1, 60, count)
    jobs = [
        Job(at, at // 300 * 4000, int(run[at]), int(random.integers(1, CAPACITY + 1)), int(run[at] * 2),
            int(random.integers(0, 9)), mean=float(random.integers(1, 9)), predicted=int(random.integers(1, 90)),
            priority=int(random.integers(0, 3)))
        for at in range(count)
    ]  # fmt: skip
    starts = simulate(workload(jobs), CAPACITY, policy).tolist()
    for limits in ((0, 0), (count, 0)):
        with queue_limits(*limits):
            assert simulate(workload(jobs), CAPACITY, policy).tolist() == starts


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy.backfill == "conservative"], ids=str)
@given(jobs=logs(most=40))
@settings(max_examples=20)
def test_schedule_of_many_reservations_is_that_of_the_rules(policy: SchedulingPolicy, jobs: list[Job]) -> None:
    """All jobs are submitted in the first ten seconds, so that most of them wait."""
    jobs = [replace(job, submit=number // 4) for number, job in enumerate(jobs)]
    jobs.sort(key=lambda job: (job.submit, job.number))
    expected = schedule([replace(job) for job in jobs], CAPACITY, policy.order, policy.backfill, policy.times)
    assert simulate(workload(jobs), CAPACITY, policy).tolist() == expected


@contextmanager
def queue_limits(many: int, few: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "_MANY", many)
        patch.setattr(waiting, "_FEW", few)
        yield


@given(jobs=logs(), policy=st.sampled_from(POLICIES))
def test_capacity_is_never_exceeded_and_all_jobs_start(jobs: list[Job], policy: SchedulingPolicy) -> None:
    starts = simulate(workload(jobs), CAPACITY, policy)
    assert len(starts) == len(jobs)
    for job, start in zip(jobs, starts, strict=True):
        assert start >= job.submit
        held = sum(item.units for item, begun in zip(jobs, starts, strict=True) if begun <= start < begun + item.run)
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


@pytest.mark.parametrize("backfill", ["first-fit", "easy", "conservative"])
def test_more_units_can_raise_the_total_wait(backfill: Backfill) -> None:
    """The counterexample of docs/whatif.md: on 3 units the narrow jobs start together, on 4 the wide one starts."""
    rows = [(0, 1, 1), (0, 2, 3), (0, 1, 2)]
    jobs = workload([Job(number, submit, run, units, run) for number, (submit, run, units) in enumerate(rows)])
    policy = SchedulingPolicy("fcfs", backfill, "actual")
    assert simulate(jobs, 3, policy).tolist() == [0, 1, 0]
    assert simulate(jobs, 4, policy).tolist() == [0, 0, 2]


def test_more_units_can_raise_the_total_wait_in_strict_order_of_run_times() -> None:
    """On 4 units the long job starts before the short one is submitted."""
    rows = [(0, 1, 1), (0, 4, 3), (1, 1, 3)]
    jobs = workload([Job(number, submit, run, units, run) for number, (submit, run, units) in enumerate(rows)])
    policy = SchedulingPolicy("sjf", "none", "actual")
    assert simulate(jobs, 3, policy).tolist() == [0, 2, 1]
    assert simulate(jobs, 4, policy).tolist() == [0, 0, 4]


@pytest.mark.parametrize("times", ["requested", "actual", "last-two"])
@pytest.mark.parametrize("backfill", ["none", "first-fit", "easy", "conservative"])
@given(jobs=logs(), size=st.integers(1, CAPACITY), more=st.integers(1, 4))
@settings(max_examples=50)
def test_more_units_delay_no_job_where_all_have_the_same_size(
    backfill: Backfill, times: Times, jobs: list[Job], size: int, more: int
) -> None:
    equal = workload([replace(job, units=size) for job in jobs])
    policy = SchedulingPolicy("fcfs", backfill, times)
    few, many = (simulate(equal, capacity, policy) for capacity in (CAPACITY, CAPACITY + more))
    assert (many <= few).all()


def starts_of(
    which: int, pair: tuple[list[Job], list[Job]], policy: SchedulingPolicy, capacity: int = CAPACITY
) -> tuple[int, int]:
    before, after = (int(simulate(workload(jobs), capacity, policy)[which]) for jobs in pair)
    return before, after


def changed(jobs: list[Job], which: int, **values: int) -> list[Job]:
    return [*jobs[:which], replace(jobs[which], **values), *jobs[which + 1 :]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "policy",
    [
        policy
        for policy in POLICIES
        if policy.backfill in {"none", "first-fit"}
        or (policy.times == "actual" and (policy.backfill == "conservative" or policy.order != "priority"))
    ],
    ids=str,
)
@given(jobs=logs().filter(bool), which=st.integers(0, 13), more=st.integers(1, 5))
@example(jobs=[Job(0, 0, 3, 6, 3), Job(1, 0, 1, 1, 1)], which=1, more=5)
@settings(max_examples=25)
def test_job_with_more_units_never_starts_earlier(
    policy: SchedulingPolicy, jobs: list[Job], which: int, more: int
) -> None:
    which %= len(jobs)
    larger = changed(jobs, which, units=min(CAPACITY, jobs[which].units + more))
    before, after = starts_of(which, (jobs, larger), policy)
    assert after >= before


@pytest.mark.parametrize(
    "policy",
    [
        policy
        for policy in POLICIES
        if policy.times == "requested"
        and (policy.backfill in {"first-fit", "easy"} or (policy.backfill == "none" and policy.order != "sjf"))
    ],
    ids=str,
)
@given(jobs=logs().filter(bool), which=st.integers(0, 13), more=st.integers(1, 9))
@settings(max_examples=25)
def test_job_with_a_longer_request_never_starts_earlier(
    policy: SchedulingPolicy, jobs: list[Job], which: int, more: int
) -> None:
    which %= len(jobs)
    longer = changed(jobs, which, request=jobs[which].request + more)
    before, after = starts_of(which, (jobs, longer), policy)
    assert after >= before


def test_job_with_more_units_can_start_earlier_with_easy_and_requested_times() -> None:
    """The counterexample of docs/whatif.md: the fourth job may start before the third if this one needs 4 units."""
    rows = [(0, 10, 1, 10), (0, 2, 3, 10), (1, 5, 4, 5), (1, 20, 2, 20)]
    jobs = [Job(number, submit, run, units, request) for number, (submit, run, units, request) in enumerate(rows)]
    policy = SchedulingPolicy("fcfs", "easy", "requested")
    assert starts_of(2, (jobs, changed(jobs, 2, units=5)), policy) == (10, 2)


@pytest.mark.parametrize(
    ("rows", "which", "values", "expected"),
    [
        (
            [(1, 4, 3, 12), (2, 3, 4, 3), (2, 6, 3, 6), (3, 4, 3, 4), (3, 4, 2, 4), (3, 2, 2, 2)],
            5,
            {"units": 3},
            (7, 5),
        ),
        ([(0, 4, 4, 6), (2, 5, 3, 5), (3, 2, 4, 4)], 2, {"request": 6}, (11, 9)),
    ],
    ids=["units", "request"],
)
def test_job_that_requests_more_can_start_earlier_with_conservative(
    rows: list[tuple[int, int, int, int]], which: int, values: dict[str, int], expected: tuple[int, int]
) -> None:
    """After a job has ended early, reservations move, and those of others leave a gap."""
    jobs = [Job(number, submit, run, units, request) for number, (submit, run, units, request) in enumerate(rows)]
    order: Order = "fcfs" if "units" in values else "sjf"
    policy = SchedulingPolicy(order, "conservative", "requested")
    assert starts_of(which, (jobs, changed(jobs, which, **values)), policy, 5) == expected


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
