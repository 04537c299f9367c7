"""Validation of JSON that may be damaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from slurm_affinode.base import json_values


@dataclass(frozen=True)
class Inner:
    name: str


class Place(NamedTuple):
    name: str
    port: int


@dataclass(frozen=True)
class Lists:
    pair: tuple[int, str]
    places: Mapping[int, Place]


@dataclass(frozen=True)
class Outer:
    count: int
    share: float
    inner: Inner
    all: tuple[Inner, ...] = ()
    text: str | None = None
    on: bool = False


GOOD = {"count": 1, "share": 1, "inner": {"name": "x"}, "all": [{"name": "y"}], "text": None, "on": True}


def test_record_is_built_from_its_types() -> None:
    """Nested records, tuples and optional fields are included."""
    assert json_values.record(Outer, GOOD) == Outer(1, 1.0, Inner("x"), (Inner("y"),), None, True)
    assert json_values.record(Inner, {"name": "x", "later": 1}, strict=False) == Inner("x")


def test_unknown_keys_of_nested_records_are_ignored_too() -> None:
    inner = {"name": "x", "later": 1}
    value = {**GOOD, "inner": inner, "all": [inner]}
    record = json_values.record(Outer, value, strict=False)
    assert (record.inner, record.all) == (Inner("x"), (Inner("x"),))
    with pytest.raises(ValueError, match="Inner: unknown later"):
        json_values.record(Outer, value)


@pytest.mark.parametrize(
    "change",
    [{"count": "1"}, {"count": True}, {"count": 1.0},
     {"share": "1"}, {"share": 10**400}, {"share": float("inf")}, {"on": 1},
     {"inner": None}, {"inner": {}}, {"inner": {"name": 1}}, {"all": {}}, {"all": [None]}, {"text": 5}, {"more": 1}],
    ids=repr,
)  # fmt: skip
def test_value_of_another_type_is_refused(change: dict[str, object]) -> None:
    """All errors are ``ValueError``."""
    with pytest.raises(ValueError):  # noqa: PT011 - that it is no other error is the point
        json_values.record(Outer, GOOD | change)
    with pytest.raises(ValueError, match="missing"):
        json_values.record(Outer, {"count": 1})


LISTS = {"pair": [1, "x"], "places": {"7": ["tcp", 80]}}


def test_lists_and_objects_are_built_from_the_types_of_their_items() -> None:
    assert json_values.record(Lists, LISTS) == Lists((1, "x"), {7: Place("tcp", 80)})


@pytest.mark.parametrize(
    "change",
    [{"pair": [1]}, {"pair": [1, "x", 2]}, {"pair": ["x", 1]}, {"pair": "1x"}, {"places": []},
     {"places": {"x": ["tcp", 80]}}, {"places": {"7": ["tcp"]}}, {"places": {"7": {"name": "tcp", "port": 80}}}],
    ids=repr,
)  # fmt: skip
def test_item_of_another_type_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - as above
        json_values.record(Lists, LISTS | change)


@pytest.mark.parametrize("text", ["", "{", "NaN", "[-Infinity]", "[" * 100000, "9" * 5000, b"\xff", b"\xed\xa0\x80"])
def test_invalid_json_is_refused(text: str | bytes) -> None:
    """``json`` accepts some of it, or raises other errors."""
    with pytest.raises(ValueError):  # noqa: PT011 - as above
        json_values.loads(text)


def test_whole_numbers_have_limits() -> None:
    """They are not negative."""
    assert [json_values.whole(value, 5) for value in (0, 5)] == [0, 5]
    for value in (6, -1, 1.0, True, "1", None):
        with pytest.raises(ValueError):  # noqa: PT011 - as above
            json_values.whole(value, 5)
