"""In-place suspension: order of wake requests, limits, jobs that make room, and absence of starvation."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.core.inplace import (
    MARGIN,
    Arriving,
    Awake,
    GpuLoad,
    Waiter,
    WakePlan,
    cheapest,
    plan,
    price,
    sleeps_forever,
)

GIB = 1 << 30
A, B = "GPU-A", "GPU-B"


def card(uuid: str = A, free_gib: float | None = 80, limit_gib: float = 80) -> GpuLoad:
    free = None if free_gib is None else round(free_gib * GIB)
    return GpuLoad(uuid, f"GPU {'AB'.index(uuid[-1])}", free, round(limit_gib * GIB))


def held(gib: float, uuid: str = A) -> dict[str, int]:
    return {uuid: round(gib * GIB)}


def test_job_that_fits_wakes_immediately() -> None:
    """So does a job that needs no memory."""
    assert plan([card()], [], [], [Waiter(1, held(48))]) == WakePlan(wakes=(1,))
    assert plan([card(free_gib=0)], [], [], [Waiter(1, {})]).wakes == (1,)


def test_jobs_that_do_not_fit_together_take_turns() -> None:
    """The first wakes; the second waits until it is idle."""
    result = plan([card()], [], [], [Waiter(2, held(48)), Waiter(1, held(48))])
    assert result.wakes == (2,)
    assert "it needs 48" in result.waits[1]


def test_order_of_the_queue_is_kept() -> None:
    """A small job does not overtake a large one that waits for the same GPU; on another GPU it does."""
    cards = [card(free_gib=10), card(B, free_gib=80)]
    queue = [
        Waiter(1, held(48)),
        Waiter(2, held(1)),
        Waiter(3, held(1, B)),
        Waiter(4, {A: 1, B: 1}),
        Waiter(5, held(1, B)),
    ]
    result = plan(cards, [Awake(9, held(70))], [], queue)
    assert result.wakes == (3,)
    assert result.waits[2] == "job 1 is ahead of it in the queue"
    assert result.waits[4] == "job 1 is ahead of it in the queue"
    assert result.waits[5] == "job 4 is ahead of it in the queue"


def test_idle_job_makes_room() -> None:
    """The cheapest is chosen: fewer bytes, longer idle. A busy job stays."""
    awake = [Awake(1, held(30), idle_s=100), Awake(2, held(30), idle_s=900), Awake(3, held(10), idle_s=None)]
    result = plan([card(free_gib=10)], awake, [], [Waiter(7, held(30))])
    assert (result.wakes, result.make_room, result.waits) == ((), {2: 7}, {7: "job 2 makes room"})


def test_no_second_job_is_moved_for_the_same_room() -> None:
    """While one is being moved, the others stay."""
    awake = [Awake(1, held(40), idle_s=10, leaving=True), Awake(2, held(40), idle_s=900)]
    result = plan([card(free_gib=0.1)], awake, [], [Waiter(7, held(30))])
    assert (result.make_room, result.waits) == ({}, {7: "job 1 makes room"})


def test_several_jobs_make_room_if_one_is_not_enough() -> None:
    """A job that is not needed stays."""
    awake = [Awake(1, held(20), idle_s=50), Awake(2, held(20), idle_s=60), Awake(3, held(38), idle_s=10)]
    result = plan([card(free_gib=2)], awake, [], [Waiter(7, held(40))])
    assert set(result.make_room) == {1, 2}
    assert result.waits[7] == "each of the jobs 2, 1 makes room"


def test_busy_job_makes_room_when_its_turn_is_over() -> None:
    """Until then the job waits; a busy job without a turn stays."""
    waiter = [Waiter(7, held(60))]
    during = plan([card(free_gib=10)], [Awake(3, held(70), turn_left_s=12)], [], waiter)
    assert (during.make_room, during.in_turn) == ({}, {7})
    assert during.waits[7].endswith("job 3 is busy, and its turn is not over")
    after = plan([card(free_gib=10)], [Awake(3, held(70), turn_left_s=0)], [], waiter)
    assert (after.make_room, after.in_turn) == ({3: 7}, {7})
    never = plan([card(free_gib=10)], [Awake(3, held(70))], [], waiter)
    assert (never.make_room, never.in_turn) == ({}, frozenset())


def test_idle_jobs_make_room_before_busy_ones() -> None:
    """Of busy jobs, the one whose turn was over first makes room."""
    idle = Awake(1, held(35), idle_s=1)
    busy = [Awake(2, held(35), turn_left_s=-5), Awake(3, held(35), turn_left_s=-500)]
    small, large = [Waiter(7, held(30))], [Waiter(7, held(60))]
    assert plan([card(free_gib=1, limit_gib=200)], [idle, *busy], [], small).make_room == {1: 7}
    assert plan([card(free_gib=1, limit_gib=200)], busy, [], small).make_room == {3: 7}
    assert plan([card(free_gib=1, limit_gib=200)], [idle, *busy], [], large).make_room == {1: 7, 3: 7}
    many = [Awake(10 + number, held(1), turn_left_s=-900) for number in range(10)]
    assert plan([card(free_gib=1, limit_gib=200)], [*many, idle], [], small).make_room == {1: 7}


def test_job_behind_others_waits_in_turn() -> None:
    """It does if the job ahead of it does; memory of other processes is no turn."""
    queue = [Waiter(7, held(60)), Waiter(8, held(60))]
    assert plan([card(free_gib=10)], [Awake(3, held(70), turn_left_s=9)], [], queue).in_turn == {7, 8}
    assert plan([card(free_gib=80)], [], [Arriving(3, held(60))], queue).in_turn == {7, 8}
    assert plan([card(free_gib=10)], [Awake(3, held(20), turn_left_s=9)], [], queue).in_turn == frozenset()


def test_job_starts_without_waiting_for_other_processes() -> None:
    """Only jobs in place can make room for it; a job that wakes needs all of its memory."""
    half = card(free_gib=20)
    awake = [Awake(3, held(20))]
    starting, waking = Waiter(7, held(48), at_most=True), Waiter(7, held(48))
    assert plan([half], awake, [], [starting]).waits[7].startswith("it needs 48 GiB on GPU 0, and 19.9 GiB is left")
    alone = card(free_gib=40)
    assert plan([alone], [], [], [starting]).wakes == (7,)
    assert plan([alone], [], [], [waking]).wakes == ()
    assert plan([card(free_gib=0)], [], [], [starting]).wakes == (7,)


def test_holders_of_the_memory_are_named() -> None:
    """A busy job, processes outside of jobs in place, or unknown free memory."""
    working = plan([card(free_gib=10)], [Awake(3, held(70))], [], [Waiter(7, held(30))])
    assert working.waits[7] == "it needs 30 GiB on GPU 0, and 9.94 GiB is left there: job 3 is busy"
    foreign = plan([card(free_gib=10)], [], [], [Waiter(7, held(30))])
    assert foreign.waits[7].endswith("other processes hold the rest")
    result = plan([card(free_gib=80)], [], [Arriving(4, held(60))], [Waiter(7, held(30))])
    assert result.waits[7].endswith("job 4 is taking its place")
    unknown = plan([card(free_gib=None)], [], [], [Waiter(7, held(30))])
    assert unknown.waits[7] == "how much memory is free on GPU 0 is not known"


def test_awake_limit_of_the_site_is_kept() -> None:
    """It applies even if the GPU has room; a job that could never wake is reported before it is suspended."""
    tight = card(free_gib=80, limit_gib=40)
    result = plan([tight], [Awake(1, held(20))], [], [Waiter(7, held(30))])
    assert result.wakes == ()
    assert plan([tight], [Awake(1, held(20), idle_s=5)], [], [Waiter(7, held(30))]).make_room == {1: 7}
    assert plan([tight], [], [Arriving(1, held(20), held(20))], [Waiter(7, held(30))]).wakes == ()
    assert "the site lets jobs in place hold" in plan([tight], [], [], [Waiter(7, held(50))]).waits[7]
    assert sleeps_forever(held(30), [tight], held(30)) is None
    assert "more than jobs in place may hold" in str(sleeps_forever(held(50), [tight], held(50)))


def test_job_that_can_never_wake_does_not_block_the_queue() -> None:
    """The site lowered its limit during the suspension: that job gets the reason, and the others take turns."""
    tight = card(free_gib=80, limit_gib=40)
    result = plan([tight], [], [], [Waiter(7, held(50)), Waiter(8, held(30))])
    assert (result.wakes, list(result.waits)) == ((8,), [7])


def test_job_that_fills_a_gpu_could_not_wake() -> None:
    """A restore needs a little more than was held; memory held by others could be released."""
    for free, others, forever in ((0.0625, 0, False), (0.03, 0, True), (0.03, 10, False), (None, 0, False)):
        full = card(free_gib=None if free is None else free)
        assert (sleeps_forever(held(70), [full], held(70 + others)) is not None) is forever


def test_job_that_still_holds_its_memory_needs_no_more() -> None:
    """Its suspension was aborted before the memory was moved; it counts towards the limit."""
    half = Waiter(7, held(48), held(48))
    assert plan([card(free_gib=1)], [], [], [half]).wakes == (7,)
    assert plan([card(free_gib=20)], [], [], [Waiter(7, held(48), held(40))]).wakes == (7,)
    assert plan([card(free_gib=80, limit_gib=60)], [], [], [half, Waiter(8, held(20))]).wakes == (7,)


def test_arriving_job_has_its_memory_reserved() -> None:
    """Memory that it does not hold yet is not free; memory that it holds is not counted twice."""
    arriving = Arriving(1, held(48), held(40))
    assert plan([card(free_gib=40)], [], [arriving], [Waiter(7, held(31))]).wakes == (7,)
    assert plan([card(free_gib=40)], [], [arriving], [Waiter(7, held(33))]).wakes == ()


sizes = st.integers(0, 60).map(lambda gib: gib * GIB)


@given(
    movable=st.lists(st.tuples(sizes, st.floats(0, 1000)), min_size=1, max_size=13),
    lack=st.integers(1, 200).map(lambda gib: gib * GIB),
)
def test_cheapest_set_is_sufficient_and_minimal(movable: list[tuple[int, float]], lack: int) -> None:
    """If any set suffices; no single sufficient job is cheaper."""
    jobs = [Awake(number, {A: size}, idle_s=idle) for number, (size, idle) in enumerate(movable)]
    chosen = cheapest({A: lack}, jobs)
    if sum(size for size, _ in movable) < lack:
        assert chosen == ()
        return
    total = sum(job.held_bytes[A] for job in chosen)
    assert total >= lack
    assert all(total - job.held_bytes[A] < lack for job in chosen)
    alone = [price(job) for job in jobs if job.held_bytes[A] >= lack]
    if alone and len(jobs) <= 10:
        assert sum(map(price, chosen)) <= min(alone) * (1 + 1e-9)


@dataclass
class Sharing:
    """Jobs on two GPUs: jobs that are awake, with times, and the queue."""

    needs: dict[int, dict[str, int]]
    works_s: int
    limit: int
    total: int
    now: int = 0
    awake: dict[int, int] = field(default_factory=dict)
    """Job -> time until it works."""
    line: list[int] = field(default_factory=list)
    begun_epoch: list[int] = field(default_factory=list)

    def used(self, uuid: str) -> int:
        return sum(self.needs[job].get(uuid, 0) for job in self.awake)

    turn_s: int | None = None
    """Busy jobs make room after this time, if another job waits."""
    since: dict[int, int] = field(default_factory=dict)
    """Job -> when it woke."""

    def step(self, ask: list[int]) -> None:
        self.now += 1
        for job in ask:
            if job in self.awake:
                self.awake[job] = self.now + self.works_s
            elif job not in self.line:
                self.line.append(job)
        cards = [GpuLoad(uuid, uuid, self.total - self.used(uuid), self.limit) for uuid in (A, B)]
        awake = [
            Awake(
                job,
                self.needs[job],
                idle_s=self.now - until if until < self.now else None,
                turn_left_s=None if self.turn_s is None else self.turn_s - (self.now - self.since[job]),
            )
            for job, until in self.awake.items()
        ]
        result = plan(cards, awake, [], [Waiter(job, self.needs[job]) for job in self.line])
        self.check(result)
        for job in result.make_room:
            del self.awake[job]
        for job in result.wakes:
            self.line.remove(job)
            self.awake[job] = self.now + self.works_s
            self.since[job] = self.now
            self.begun_epoch.append(job)

    def check(self, plan: WakePlan) -> None:
        """Check the order, the limit, and that every waiting job has a reason."""
        assert set(plan.wakes) | set(plan.waits) == set(self.line)
        for place, job in enumerate(self.line):
            if job in plan.wakes:
                needed = {uuid for uuid, need in self.needs[job].items() if need}
                for earlier in self.line[:place]:
                    needed_earlier = {uuid for uuid, need in self.needs[earlier].items() if need}
                    assert earlier in plan.wakes or not needed & needed_earlier
        for uuid in (A, B):
            awake = self.used(uuid) + sum(self.needs[job].get(uuid, 0) for job in plan.wakes)
            assert awake <= self.limit or not any(self.needs[job].get(uuid, 0) for job in plan.wakes)
            assert not any(self.needs[job].get(uuid, 0) for job in plan.wakes) or awake <= self.total - MARGIN
        for job in plan.make_room:
            assert self.awake[job] < self.now or (self.turn_s is not None and self.now - self.since[job] >= self.turn_s)


@given(
    needs=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=8),
    works_s=st.integers(0, 5),
    requests=st.lists(st.lists(st.integers(0, 7), max_size=4), max_size=30),
    limit=st.integers(60, 80),
)
def test_every_job_gets_its_turn(
    needs: list[tuple[int, int]], works_s: int, requests: list[list[int]], limit: int
) -> None:
    """For any order of requests the queue empties, if awake jobs become idle at some time."""
    jobs = {number: {A: a * GIB, B: b * GIB} for number, (a, b) in enumerate(needs)}
    world = Sharing(jobs, works_s, limit * GIB, 81 * GIB)
    for ask in requests:
        world.step([job for job in ask if job in jobs])
    queued = list(world.line)
    for _ in range((works_s + 3) * (len(jobs) + 2)):
        world.step([])
    assert world.line == []
    assert set(queued) <= set(world.begun_epoch)


@given(
    needs=st.lists(st.integers(1, 60), min_size=2, max_size=6),
    turn_s=st.integers(1, 5),
    requests=st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=20),
)
def test_steady_load_starves_no_job(needs: list[int], turn_s: int, requests: list[list[int]]) -> None:
    """Even if every job is busy all the time, each one that waits gets its turn after those ahead of it."""
    jobs = {number: {A: size * GIB} for number, size in enumerate(needs)}
    world = Sharing(jobs, 1000, 80 * GIB, 81 * GIB, turn_s=turn_s)
    for ask in requests:
        world.step([job for job in ask if job in jobs])
    queued = list(world.line)
    before = len(world.begun_epoch)
    for _ in range((turn_s + 2) * (len(jobs) + 1)):
        world.step(list(jobs))
    assert set(queued) <= set(world.begun_epoch[before:])


def test_repeated_request_keeps_its_place() -> None:
    """The order is that of the first request."""
    world = Sharing({1: held(60), 2: held(60), 3: held(60)}, 2, 80 * GIB, 81 * GIB)
    for ask in ([1], [2], [3, 1], [3, 1], [1, 3], *([[1]] * 4), *([[]] * 12)):
        world.step(ask)
    assert world.begun_epoch[:3] == [1, 2, 3]


def test_woken_job_uses_up_free_memory() -> None:
    """Also if the site's limit leaves room for two."""
    assert plan([card(free_gib=81, limit_gib=200)], [], [], [Waiter(1, held(48)), Waiter(2, held(48))]).wakes == (1,)


def test_restored_bytes_of_an_arriving_job_are_counted_once() -> None:
    cards = [card(free_gib=60, limit_gib=200)]
    assert plan(cards, [], [Arriving(1, held(40), held(30))], [Waiter(2, held(48))]).wakes == (2,)
    assert plan(cards, [], [Arriving(1, held(40))], [Waiter(2, held(48))]).wakes == ()


def test_job_waits_in_turn_for_jobs_that_leave_or_are_idle() -> None:
    for other in (Awake(1, held(60), leaving=True), Awake(1, held(60), idle_s=100)):
        assert plan([card(free_gib=20)], [other], [], [Waiter(2, held(60))]).in_turn == {2}


def test_leaving_job_is_not_chosen_again() -> None:
    """Its memory counts, and only the rest is freed by others."""
    awake = [Awake(1, held(30), idle_s=900, leaving=True), Awake(2, held(30), idle_s=100)]
    result = plan([card(free_gib=10)], awake, [], [Waiter(7, held(60))])
    assert (result.make_room, result.waits) == ({2: 7}, {7: "each of the jobs 1, 2 makes room"})


def test_job_makes_room_for_one_waiter() -> None:
    """The first one, though its memory on another GPU would help the next."""
    both = Awake(1, held(60) | held(60, B), idle_s=100)
    result = plan([card(A, 10), card(B, 10)], [both], [], [Waiter(7, held(60)), Waiter(8, held(60, B))])
    assert result.make_room == {1: 7}


def test_reason_names_the_gpu_that_lacks_most() -> None:
    """The memory left there does not include the margin, and is never negative."""
    needs = held(48) | held(48, B)
    rest = "left there: other processes hold the rest"
    waits = plan([card(A, 40), card(B, 10)], [], [], [Waiter(7, needs)]).waits
    assert waits == {7: f"it needs 48 GiB on GPU 1, and 9.94 GiB is {rest}"}
    waits = plan([card(A, 40), card(B, 0.01)], [], [], [Waiter(7, needs)]).waits
    assert waits == {7: f"it needs 48 GiB on GPU 1, and 0 B is {rest}"}


def test_reason_names_only_busy_jobs_on_the_gpu() -> None:
    """Jobs on other GPUs, and those that leave already, are none of them."""
    cards = [card(A, 10), card(B, 10)]
    for other in (Awake(3, held(20, B)), Awake(3, held(10), leaving=True)):
        assert plan(cards, [other], [], [Waiter(7, held(60))]).waits[7].endswith("other processes hold the rest")
    pair = [Awake(3, held(10), turn_left_s=9), Awake(4, held(10))]
    assert plan(cards, pair, [], [Waiter(7, held(60))]).waits[7].endswith("there: each of the jobs 3, 4 is busy")


def test_job_may_need_as_much_as_the_limit() -> None:
    cards = [card(free_gib=81, limit_gib=60)]
    assert plan(cards, [], [], [Waiter(1, held(60))]).wakes == (1,)
    too_much = "it needs 61 GiB on GPU 0, and the site lets jobs in place hold 60 GiB there at once"
    assert plan(cards, [], [], [Waiter(1, held(61))]).waits == {1: too_much}


def test_job_without_gpu_memory_can_always_wake() -> None:
    assert sleeps_forever({}, [card(free_gib=0)], {}) is None


def test_price_is_bytes_by_idle_seconds() -> None:
    """At least one second; of a busy job, those since its turn was over."""
    assert [price(Awake(1, {A: 8}, idle_s=seconds)) for seconds in (0.0, 1.0, 2.0)] == [8, 8, 4]
    assert price(Awake(1, {A: 8}, turn_left_s=-4.0)) == 2


def priced(number: int, gib: int, gib_per_s: float) -> Awake:
    return Awake(number, held(gib), idle_s=gib / gib_per_s)


def test_up_to_ten_jobs_give_the_cheapest_set() -> None:
    """Adding jobs in order of price would choose the first two."""
    jobs = [priced(1, 6, 2e-3), priced(2, 5, 2.1e-3), priced(3, 10, 3e-3), *(priced(9 + i, 1, 1.0) for i in range(7))]
    assert [job.job_id for job in cheapest(held(10), jobs)] == [3]


def test_more_than_ten_jobs_give_a_set_without_redundant_expensive_ones() -> None:
    jobs = [priced(1, 6, 2e-3), priced(2, 5, 2.1e-3), priced(3, 10, 3e-3), *(priced(9 + i, 1, 1.0) for i in range(8))]
    assert {job.job_id for job in cheapest(held(12), jobs)} == {1, 3}
