"""What is kept in a fast tier: by how often it is expected to be wanted, what it costs to load, and its size."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.core.eviction import Cut, Demand, Held, Plan, Turnover, density, make_room
from slurm_affinode.core.tokens import TokenBucket

GIB = 1 << 30


def rate(demand: Demand, name: str, now_s: float) -> float:
    """Of one alone."""
    return demand.rates([name], now_s)[name]


def test_what_was_never_wanted_is_expected_never() -> None:
    """And what was forgotten is as never wanted."""
    demand = Demand()
    assert rate(demand, "a", 0.0) == 0
    demand.requested("a", 0.0)
    assert rate(demand, "a", 1.0) > 0
    demand.forget("a")
    assert rate(demand, "a", 1.0) == 0


def test_expectation_falls_with_time_and_rises_with_requests() -> None:
    """More of them, more recent ones."""
    demand = Demand()
    demand.requested("before", 0)
    for second in (0, 10, 20):
        demand.requested("often", second)
    demand.requested("once", 20)
    rates = demand.rates(["often", "once", "before"], 30.0)
    assert rates["often"] > rates["once"] > rates["before"]
    assert rate(demand, "often", 3000.0) < rates["often"]


def test_bursts_and_habits_are_told_apart_by_what_was_seen() -> None:
    """Where requests come in bursts, a burst says little of tomorrow; where they come daily, yesterday says much."""
    bursts, days = Demand(), Demand()
    for number in range(300):
        for second in range(10):
            bursts.requested(f"image-{number}", number * 1000.0 + 2 * second)
        days.requested(f"image-{number % 10}", number * 8640.0)
    assert sum(bursts.weights()[:3]) > 0.6
    assert sum(days.weights()[:3]) < 0.1
    assert rate(bursts, "image-299", 299_000.0 + 86_400) < rate(days, "image-9", 299 * 8640.0 + 86_400)


def test_it_goes_on_for_months_without_overflow() -> None:
    """Sums are kept against a base that moves."""
    demand = Demand()
    for day in range(400):
        demand.requested("a", day * 86_400.0)
        assert math.isfinite(rate(demand, "a", day * 86_400.0 + 5))
    assert 0 < rate(demand, "a", 400 * 86_400.0) < 1


def test_a_clock_that_goes_back_does_no_harm() -> None:
    """A little back, time stands still. A wrong clock that is set right counts from there, also across a restart."""
    demand = Demand()
    demand.requested("a", 1e9)
    demand.requested("a", 1e9 - 10)
    assert math.isfinite(rate(demand, "a", 1e9 - 20))
    for second in range(20):
        demand.requested("a", 2e9 + 30 * second)
    demand = Demand.restored(json.loads(json.dumps(demand.state())))
    before = rate(demand, "a", 1e9 + 100)
    assert before == pytest.approx(rate(demand, "a", 1e9 + 100))
    assert rate(demand, "a", 1e9 + 7200) < before / 2
    demand.requested("a", 0.0)
    assert Demand.restored(demand.state()).state() == demand.state()  # what it counts from is before 0
    turnover = Turnover(2e9)
    turnover.took(100, 100, 1e9)
    assert turnover.horizon_s(100, 1e9 + 10_000) > 1000


def test_what_was_learned_outlives_a_restart() -> None:
    """Through JSON, to the same figures."""
    demand = Demand()
    for second in range(100):
        demand.requested(f"image-{second % 7}", second * 3.0)
    again = Demand.restored(json.loads(json.dumps(demand.state())))
    names = [f"image-{number}" for number in range(8)]
    assert again.rates(names, 400.0) == pytest.approx(demand.rates(names, 400.0))
    again.requested("image-3", 500.0)


@pytest.mark.parametrize(
    "state",
    [{}, {"half_lives_s": [0]}, {"half_lives_s": "x"}, {**Demand().state(), "caused": [1.0]},
     {**Demand().state(), "marks": 3}, {**Demand().state(), "events": float("nan")}],
)  # fmt: skip
def test_another_state_is_refused(state: dict[str, object]) -> None:
    """A file that was damaged is not taken."""
    with pytest.raises(ValueError, match=r"state of a demand|float"):
        Demand.restored(state)


def test_long_memory_counts_half_at_last() -> None:
    """What was learned long ago gives way."""
    demand = Demand()
    demand._events = 100_000
    demand.requested("a", 1.0)
    assert demand._events < 60_000


# --- room


def held(name: str, size: int = 10, load_s: float = 10.0, part: int | None = None, **more: float) -> Held:
    """An image of a tier."""
    return Held(name, size, size if part is None else part, load_s, **more)


def test_room_that_is_there_costs_nothing() -> None:
    """Nothing goes."""
    assert make_room([held("a")], held("b", part=0), 10, {"a": 1.0, "b": 0.0}) == Plan((), 10)


def test_the_cheapest_to_miss_goes_first() -> None:
    """By requests per second, seconds to load, and bytes."""
    there = [held("rare"), held("cheap", load_s=1.0), held("large", size=1000), held("dear", load_s=100.0)]
    rates = {"rare": 0.01, "cheap": 0.05, "large": 2.0, "dear": 1.0, "new": 1.0}
    plan = make_room(there, held("new", part=0), 0, rates)
    assert plan == Plan((Cut("cheap", 0),), 10)
    plan = make_room(there, held("new", size=25, part=0, load_s=25.0), 0, rates)
    assert [cut.name for cut in plan.cuts] == ["cheap", "rare", "large"]
    assert plan.cuts[-1] == Cut("large", 995)


def test_what_is_worth_more_stays() -> None:
    """The new one then has less room than it needs, or none."""
    there = [held("a"), held("b")]
    assert make_room(there, held("new", part=0), 3, {"a": 1.0, "b": 2.0, "new": 0.5}) == Plan((), 3)
    assert make_room(there, held("new", part=0), 3, {"a": 1.0, "b": 2.0, "new": 0.5}, must=True) == Plan(
        (Cut("a", 3),), 10
    )
    soon = Held("new", 10, 0, 10.0, expected_s=0.1)
    assert make_room(there, soon, 0, {"a": 0.1, "b": 2.0, "new": 0.0}).cuts == (Cut("a", 0),)


def test_cuts_are_of_whole_grains() -> None:
    """What is left of an image is whole blocks from its beginning."""
    plan = make_room([held("a", size=100)], held("b", part=0, load_s=100.0), 0, {"a": 0.1, "b": 1.0}, grain=32)
    assert plan == Plan((Cut("a", 64),), 10)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 5), st.floats(0.1, 50)), max_size=8),
    st.integers(1, 100), st.integers(-40, 60), st.integers(1, 20), st.booleans(),
)  # fmt: skip
def test_room_adds_up(images: list[tuple[int, float, float]], size: int, free: int, grain: int, must: bool) -> None:
    """What is promised is there, nothing grows, and without ``must`` nothing goes that is worth more."""
    there = [held(str(number), size=mb, load_s=load) for number, (mb, _, load) in enumerate(images)]
    rates = {str(number): rate for number, (_, rate, _) in enumerate(images)} | {"new": 1.0}
    new = held("new", size=size, part=0)
    plan = make_room(there, new, free, rates, grain=grain, must=must)
    sizes = {one.name: one for one in there}
    freed = sum(sizes[cut.name].held - cut.keep for cut in plan.cuts)
    assert 0 <= plan.room <= min(size, max(0, free + freed))
    assert all(0 <= cut.keep < sizes[cut.name].held and cut.keep % grain == 0 for cut in plan.cuts)
    if not must:
        assert all(density(sizes[cut.name], rates[cut.name]) < density(new, 1.0) for cut in plan.cuts)
    elif sum(one.held for one in there) + free >= size:
        assert plan.room == size


# --- rates of copies


def test_a_bucket_keeps_its_rate() -> None:
    """A burst, and from there on what the rate allows; what was waited for is not counted twice."""
    bucket = TokenBucket(100.0, 50.0)
    assert bucket.take(50, 0.0) == 0
    assert bucket.take(100, 0.0) == pytest.approx(1.0)
    assert bucket.take(100, 1.0) == pytest.approx(1.0)
    assert bucket.take(50, 10.0) == 0
    assert bucket.take(10 * GIB, 20.0) > 1e6


def test_the_horizon_follows_the_turnover_of_the_tier() -> None:
    """Three tenths of the time in which it takes in as much as it holds, of late."""
    turnover = Turnover(0.0)
    assert turnover.horizon_s(100, 0.0) == 3.0
    assert turnover.horizon_s(100, 1000.0) == pytest.approx(300.0)  # it is not full yet
    turnover.took(400, 100, 1000.0)
    assert turnover.horizon_s(100, 1000.0) == pytest.approx(75.0)
    for second in range(1000, 2000):
        turnover.took(100, 100, float(second))
    assert turnover.horizon_s(100, 2000.0) == 3.0
    assert turnover.horizon_s(100, 1e12) == pytest.approx(30 * 86400.0)
