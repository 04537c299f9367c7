"""Parts of a result by user and account: sums, nothing of others, places."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest
from waste_samples import make_result

from slurm_affinode.analysis.portions import LEAST_USERS, portions, ranks, without_runs
from slurm_affinode.analysis.working_hours import HOURS


@pytest.mark.parametrize("by", ["user", "account"])
def test_parts_add_up_to_the_whole(by: str) -> None:
    """Each has the runs, hours and timelines of one name."""
    result = make_result()
    parts = dict(portions(result, by))
    assert list(parts) == result.groups[by]["name"].to_list()
    for name, part in parts.items():
        assert set(part.jobs[by]) == {name}
        assert part.total["gpu_hours_allocated"] == pytest.approx(part.jobs["gpu_hours_allocated"].sum())
        keys = set(part.jobs.select("cluster", "job_id", "submit").iter_rows())
        assert set(part.timelines.select("cluster", "job_id", "submit").iter_rows()) <= keys
    assert sum(part.jobs.height for part in parts.values()) == result.jobs.height
    assert sum(part.timelines.height for part in parts.values()) == result.timelines.height


def test_part_has_nothing_of_the_whole_cluster() -> None:
    whole = replace(make_result(), working_hours=pl.DataFrame(schema=HOURS))
    part = dict(portions(whole, "user"))["user00"]
    assert part.working_hours is None
    assert (part.waits, part.demand, part.gpus, part.trend, part.servers) == (None,) * 5
    assert (part.total["gpu_hours_capacity"], part.total["users"], part.query.users) == (None, 1, ("user00",))
    assert (part.groups, part.quality.issues, part.over_time.height) == ({}, (), 0)


def test_account_has_the_sums_of_its_users() -> None:
    """Unknown hours stay unknown."""
    part = dict(portions(make_result(), "account"))["project00"]
    users = part.groups["user"]
    assert set(users["name"]) == set(part.jobs["user"])
    assert users["gpu_hours_idle"].sum() == pytest.approx(part.total["gpu_hours_idle"])
    unmeasured = dict(portions(make_result(measured=False), "account"))["project00"].groups["user"]
    assert unmeasured["gpu_hours_idle"].null_count() == unmeasured.height


def test_part_without_runs_is_empty() -> None:
    part = without_runs(make_result(), "account", "gone")
    assert (part.jobs.height, part.query.accounts, dict(part.total)) == (0, ("gone",), {})


def groups(*rows: tuple[str | None, float | None]) -> pl.DataFrame:
    """Names with idle hours, of 10 allocated each."""
    schema = {"name": pl.String, "gpu_hours_idle": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row").with_columns(gpu_hours_allocated=pl.lit(10.0))


def test_places_are_by_idle_hours_with_ties_and_without_unknown() -> None:
    places = ranks(groups(("a", 9.0), ("b", 5.0), ("c", 5.0), ("d", 1.0), ("e", 0.0), ("f", None), (None, 10.0)))
    assert {name: rank.place for name, rank in places.items()} == {"a": 1, "b": 2, "c": 2, "d": 4, "e": 5}
    assert {(rank.count, rank.median_share) for rank in places.values()} == {(5, 0.5)}


def test_small_groups_have_no_places() -> None:
    """With two users, each could conclude the hours of the other."""
    assert ranks(groups(*((f"u{n}", float(n)) for n in range(LEAST_USERS - 1)))) == {}
