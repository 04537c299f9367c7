"""Retention in a fast tier: by expected time until an image is read, cost of loading, and size."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.checkpoint.image.block_io import TokenBucket
from slurm_affinode.core.retention import Cut, EvictionPlan, Fate, TierImage, fate, make_room, too_many
from slurm_affinode.core.suspension import of_this_run, owns
from slurm_affinode.model.suspension import JobKey, LiveRun, Manifest, SuspendOption, Versions

GIB = 1 << 30


# --- value


@pytest.mark.parametrize(
    ("waited_s", "expected_s", "rate"),
    [(None, None, 0.0), (100.0, None, 0.01), (0.0, None, 1.0), (0.5, None, 1.0), (None, 50.0, 0.02), (100.0, 10.0, 0.1),
     (100.0, 1e6, 0.01), (100.0, 0.0, 1.0)],
)  # fmt: skip
def test_job_is_expected_to_wait_as_long_again_or_until_its_planned_start(
    waited_s: float | None, expected_s: float | None, rate: float
) -> None:
    """The earlier of both; of an image that no job waits for, no read is expected."""
    image = TierImage("a", 200, 0, 10.0, waited_s, expected_s)
    assert image.rate == pytest.approx(rate)
    assert image.density == pytest.approx(rate * 10.0 / 200)


def test_empty_image_has_a_value() -> None:
    assert TierImage("a", 0, 0, 10.0, 100.0).density == pytest.approx(0.1)


# --- room


def held(
    name: str, every_s: float | None = 1.0, size: int = 10, load_s: float = 10.0, part: int | None = None, **more: Any
) -> TierImage:
    """Return an image of a tier that is expected to be read in ``every_s`` seconds."""
    return TierImage(name, size, size if part is None else part, load_s, every_s, **more)


def test_available_room_costs_nothing() -> None:
    """No image is cut."""
    assert make_room([held("a", None)], held("b", part=0), 10) == EvictionPlan((), 10)


def test_image_with_the_lowest_value_is_cut_first() -> None:
    """The value depends on the expected time, seconds to load, and bytes."""
    stored = [
        held("rare", 100.0), held("cheap", 20.0, load_s=1.0), held("large", 1.0, size=1000, load_s=20.0),
        held("dear", load_s=100.0),
    ]  # fmt: skip
    plan = make_room(stored, held("new", part=0), 0)
    assert plan == EvictionPlan((Cut("cheap", 0),), 10)
    plan = make_room(stored, held("new", size=25, part=0, load_s=25.0), 0)
    assert [cut.name for cut in plan.cuts] == ["cheap", "rare", "large"]
    assert plan.cuts[-1] == Cut("large", 995)


def test_image_of_restored_job_is_cut_before_any_that_waits() -> None:
    stored = [held("waits", 1e6, load_s=0.1), held("restored", None, load_s=1e6)]
    assert make_room(stored, held("new", part=0), 0).cuts == (Cut("restored", 0),)


def test_job_that_has_waited_longest_is_cut_first() -> None:
    stored = [held("older", 7200.0), held("younger", 60.0)]
    assert make_room(stored, held("new", 0.0, part=0), 0).cuts == (Cut("older", 0),)


def test_more_valuable_images_stay() -> None:
    """The new image then gets less room than it needs, or none."""
    stored = [held("a", 10.0), held("b", 5.0)]
    assert make_room(stored, held("new", 20.0, part=0), 3) == EvictionPlan((), 3)
    assert make_room(stored, held("new", 10.0, part=0), 3) == EvictionPlan((), 3)
    assert make_room(stored, held("new", 20.0, part=0), 3, must=True) == EvictionPlan((Cut("a", 3),), 10)
    assert make_room(stored, held("new", 20.0, part=0, expected_s=6.0), 0).cuts == (Cut("a", 0),)


def test_cuts_are_multiples_of_the_grain() -> None:
    """The rest of an image is whole blocks from its beginning."""
    plan = make_room([held("a", 10.0, size=100)], held("b", part=0, load_s=100.0), 0, grain=32)
    assert plan == EvictionPlan((Cut("a", 64),), 10)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.none() | st.floats(0, 1e6), st.floats(0.1, 50)), max_size=8),
    st.integers(1, 100), st.integers(-40, 60), st.integers(1, 20), st.booleans(),
)  # fmt: skip
def test_room_is_consistent(
    images: list[tuple[int, float | None, float]], size: int, free: int, grain: int, must: bool
) -> None:
    """Planned room exists, no image grows, and without ``must`` no more valuable image is cut."""
    stored = [held(str(number), waited_s, mb, load) for number, (mb, waited_s, load) in enumerate(images)]
    new = held("new", size=size, part=0)
    plan = make_room(stored, new, free, grain=grain, must=must)
    by_name = {image.name: image for image in stored}
    freed = sum(by_name[cut.name].held_bytes - cut.keep for cut in plan.cuts)
    assert 0 <= plan.room <= min(size, max(0, free + freed))
    assert all(0 <= cut.keep < by_name[cut.name].held_bytes and cut.keep % grain == 0 for cut in plan.cuts)
    if not must:
        assert all(by_name[cut.name].density < new.density for cut in plan.cuts)
    elif sum(image.held_bytes for image in stored) + free >= size:
        assert plan.room == size


def test_partly_held_image_frees_what_it_holds() -> None:
    """Bytes that are not in the tier free nothing, and the incoming image is not cut for itself."""
    stored = [held("new", 100.0, part=4), held("a", 100.0, part=1), held("b", 50.0, part=0), held("c", 20.0)]
    plan = make_room(stored, held("new", part=4), 0)
    assert plan == EvictionPlan((Cut("a", 0), Cut("c", 5)), 6)


def test_excess_is_removed_besides_the_room() -> None:
    plan = make_room([held("a", 100.0), held("c", 20.0)], held("new", size=5, part=0), -7)
    assert plan == EvictionPlan((Cut("a", 0), Cut("c", 8)), 5)
    assert make_room([held("a", 100.0)], held("new", size=5, part=0), -7) == EvictionPlan((Cut("a", 0),), 3)
    assert make_room([], held("new", size=5, part=0), -7) == EvictionPlan((), 0)


# --- sweeps

MANIFEST = Manifest(
    key=JobKey("alpha", 7, 100), seq=0, uid=1000, gid=1000, node="n1", restarts=1, started_epoch=1.0, dumped_epoch=2.0,
    option=SuspendOption(), versions=Versions("0", "6", "4.2"), root_pid=2, cuda_pids=(), gpus=(), gpu_bytes=0,
    outputs=(), files=(),
)  # fmt: skip
ATTEMPT = LiveRun(JobKey("alpha", 7, 100), 1000, 1)
"""The attempt of which the image was made."""
NEXT = LiveRun(JobKey("alpha", 7, 100), 1000, 2)
"""The attempt that restores it, with the earliest submit time."""
OTHERS = [
    LiveRun(JobKey("alpha", 7, 99), 1000, 2), LiveRun(JobKey("alpha", 8, 100), 1000, 2),
    LiveRun(JobKey("beta", 7, 100), 1000, 2), LiveRun(JobKey("alpha", 7, 100), 1001, 2),
    LiveRun(JobKey("alpha", 7, 100), 1000, 0), LiveRun(JobKey("alpha", 7, 101), 1000, 1),
]  # fmt: skip


def test_image_belongs_to_its_attempt_and_to_later_ones() -> None:
    """Not to an earlier submit time or restart count, nor to another job, cluster or user."""
    assert (owns(MANIFEST, ATTEMPT), of_this_run(MANIFEST, ATTEMPT)) == (False, True)
    assert (owns(MANIFEST, NEXT), of_this_run(MANIFEST, NEXT)) == (True, False)
    assert not any(owns(MANIFEST, run) or of_this_run(MANIFEST, run) for run in OTHERS)


@pytest.mark.parametrize(
    ("live", "ended", "expected"),
    [
        ([*OTHERS, ATTEMPT], [NEXT], Fate.NEEDED),
        ([NEXT], [ATTEMPT], Fate.NEEDED),
        (OTHERS, [*OTHERS, NEXT], Fate.OVER),
        ([], [ATTEMPT], Fate.OVER),
        (OTHERS, OTHERS, Fate.UNKNOWN),
        ([], [], Fate.UNKNOWN),
    ],
)
def test_image_is_over_if_slurm_reports_the_end_of_its_job(
    live: list[LiveRun], ended: list[LiveRun], expected: Fate
) -> None:
    assert fate(MANIFEST, live, ended) is expected


@pytest.mark.parametrize(
    ("going", "present", "expected"),
    [(0, 0, False), (5, 5, False), (6, 12, False), (6, 11, True), (6, 6, True), (7, 14, False), (7, 13, True)],
)
def test_sweep_stops_above_half_of_the_images_and_five(going: int, present: int, *, expected: bool) -> None:
    assert too_many(going, present) is expected


# --- rates of copies


def test_token_bucket_keeps_its_rate() -> None:
    """After a burst the rate applies; time that was waited is not counted twice."""
    bucket = TokenBucket(100.0, 50.0)
    assert bucket.take(50, 0.0) == 0
    assert bucket.take(100, 0.0) == pytest.approx(1.0)
    assert bucket.take(100, 1.0) == pytest.approx(1.0)
    assert bucket.take(50, 10.0) == 0
    assert bucket.take(10 * GIB, 20.0) > 1e6
