"""Retention in a fast tier: by expected demand, cost of loading, and size."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.checkpoint.image.block_io import TokenBucket
from slurm_affinode.core.retention import Cut, Demand, EvictionPlan, TierImage, Turnover, density, make_room

GIB = 1 << 30


def rate(demand: Demand, name: str, now_s: float) -> float:
    """Return the rate of one image."""
    return demand.rates([name], now_s)[name]


def test_image_never_requested_has_no_expected_demand() -> None:
    """After ``forget``, an image counts as never requested."""
    demand = Demand()
    assert rate(demand, "a", 0.0) == 0
    demand.requested("a", 0.0)
    assert rate(demand, "a", 1.0) > 0
    demand.forget("a")
    assert rate(demand, "a", 1.0) == 0


def test_demand_falls_with_time_and_rises_with_requests() -> None:
    """More requests and more recent requests count more."""
    demand = Demand()
    demand.requested("before", 0)
    for second in (0, 10, 20):
        demand.requested("often", second)
    demand.requested("once", 20)
    rates = demand.rates(["often", "once", "before"], 30.0)
    assert rates["often"] > rates["once"] > rates["before"]
    assert rate(demand, "often", 3000.0) < rates["often"]


def test_bursts_and_habits_are_learned() -> None:
    """If requests come in bursts, a burst says little about tomorrow; if they come daily, yesterday says much."""
    bursts, days = Demand(), Demand()
    for number in range(300):
        for second in range(10):
            bursts.requested(f"image-{number}", number * 1000.0 + 2 * second)
        days.requested(f"image-{number % 10}", number * 8640.0)
    assert sum(bursts.weights()[:3]) > 0.6
    assert sum(days.weights()[:3]) < 0.1
    assert rate(bursts, "image-299", 299_000.0 + 86_400) < rate(days, "image-9", 299 * 8640.0 + 86_400)


def test_demand_does_not_overflow_after_months() -> None:
    """Sums are relative to a base that is moved."""
    demand = Demand()
    for day in range(400):
        demand.requested("a", day * 86_400.0)
        assert math.isfinite(rate(demand, "a", day * 86_400.0 + 5))
    assert 0 < rate(demand, "a", 400 * 86_400.0) < 1


def test_clock_set_back_is_tolerated() -> None:
    """A small step stops the clock until it catches up; after a large correction it counts from there."""
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
    assert Demand.restored(demand.state()).state() == demand.state()  # the base is before 0
    turnover = Turnover(2e9)
    turnover.took(100, 100, 1e9)
    assert turnover.horizon_s(100, 1e9 + 10_000) > 1000


def test_learned_demand_survives_a_restart() -> None:
    """It is saved as JSON and gives the same rates."""
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
def test_invalid_state_is_refused(state: dict[str, object]) -> None:
    """The file may be damaged."""
    with pytest.raises(ValueError, match=r"state of a demand|float"):
        Demand.restored(state)


def test_old_events_lose_weight() -> None:
    demand = Demand()
    demand._events = 100_000
    demand.requested("a", 1.0)
    assert demand._events < 60_000


# --- room


def held(name: str, size: int = 10, load_s: float = 10.0, part: int | None = None, **more: float) -> TierImage:
    """Return an image of a tier."""
    return TierImage(name, size, size if part is None else part, load_s, **more)


def test_available_room_costs_nothing() -> None:
    """No image is cut."""
    assert make_room([held("a")], held("b", part=0), 10, {"a": 1.0, "b": 0.0}) == EvictionPlan((), 10)


def test_image_with_the_lowest_value_is_cut_first() -> None:
    """The value depends on requests per second, seconds to load, and bytes."""
    there = [held("rare"), held("cheap", load_s=1.0), held("large", size=1000), held("dear", load_s=100.0)]
    rates = {"rare": 0.01, "cheap": 0.05, "large": 2.0, "dear": 1.0, "new": 1.0}
    plan = make_room(there, held("new", part=0), 0, rates)
    assert plan == EvictionPlan((Cut("cheap", 0),), 10)
    plan = make_room(there, held("new", size=25, part=0, load_s=25.0), 0, rates)
    assert [cut.name for cut in plan.cuts] == ["cheap", "rare", "large"]
    assert plan.cuts[-1] == Cut("large", 995)


def test_more_valuable_images_stay() -> None:
    """The new image then gets less room than it needs, or none."""
    there = [held("a"), held("b")]
    assert make_room(there, held("new", part=0), 3, {"a": 1.0, "b": 2.0, "new": 0.5}) == EvictionPlan((), 3)
    assert make_room(there, held("new", part=0), 3, {"a": 1.0, "b": 2.0, "new": 0.5}, must=True) == EvictionPlan(
        (Cut("a", 3),), 10
    )
    soon = TierImage("new", 10, 0, 10.0, expected_s=0.1)
    assert make_room(there, soon, 0, {"a": 0.1, "b": 2.0, "new": 0.0}).cuts == (Cut("a", 0),)


def test_cuts_are_multiples_of_the_grain() -> None:
    """The rest of an image is whole blocks from its beginning."""
    plan = make_room([held("a", size=100)], held("b", part=0, load_s=100.0), 0, {"a": 0.1, "b": 1.0}, grain=32)
    assert plan == EvictionPlan((Cut("a", 64),), 10)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 5), st.floats(0.1, 50)), max_size=8),
    st.integers(1, 100), st.integers(-40, 60), st.integers(1, 20), st.booleans(),
)  # fmt: skip
def test_room_is_consistent(
    images: list[tuple[int, float, float]], size: int, free: int, grain: int, must: bool
) -> None:
    """Planned room exists, no image grows, and without ``must`` no more valuable image is cut."""
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


def test_token_bucket_keeps_its_rate() -> None:
    """After a burst the rate applies; time that was waited is not counted twice."""
    bucket = TokenBucket(100.0, 50.0)
    assert bucket.take(50, 0.0) == 0
    assert bucket.take(100, 0.0) == pytest.approx(1.0)
    assert bucket.take(100, 1.0) == pytest.approx(1.0)
    assert bucket.take(50, 10.0) == 0
    assert bucket.take(10 * GIB, 20.0) > 1e6


def test_horizon_follows_the_turnover_of_the_tier() -> None:
    """It is three tenths of the recent time in which as much is written to the tier as it holds."""
    turnover = Turnover(0.0)
    assert turnover.horizon_s(100, 0.0) == 3.0
    assert turnover.horizon_s(100, 1000.0) == pytest.approx(300.0)  # the tier is not full yet
    turnover.took(400, 100, 1000.0)
    assert turnover.horizon_s(100, 1000.0) == pytest.approx(75.0)
    for second in range(1000, 2000):
        turnover.took(100, 100, float(second))
    assert turnover.horizon_s(100, 2000.0) == 3.0
    assert turnover.horizon_s(100, 1e12) == pytest.approx(30 * 86400.0)
