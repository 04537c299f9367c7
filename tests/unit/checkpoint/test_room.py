"""Whether GPU memory fits is told before the driver is asked."""

from __future__ import annotations

from slurm_affinode.checkpoint import room

GIB = 1 << 30


def test_a_margin_is_left_for_what_the_driver_takes_itself() -> None:
    """To the byte."""
    assert room.shortage({"a": GIB}, {"a": GIB + room.MARGIN}) is None
    assert room.shortage({"a": GIB}, {"a": GIB + room.MARGIN - 1}) is not None


def test_each_gpu_needs_room_of_its_own_and_pairs_say_which() -> None:
    """What is free on one does not help on the other."""
    needs, free = {"a": 4 * GIB, "b": 0}, {"a": 9 * GIB, "b": 1 * GIB}
    assert room.shortage(needs, free) is None
    assert room.shortage(needs, free, {"a": "b", "b": "a"}) == "4.06 GiB are needed on b, 1 GiB are free there"


def test_unknown_is_no_shortage() -> None:
    """A GPU that does not tell its memory is left to the driver."""
    assert room.shortage({"a": GIB}, {"a": None}) is None
    assert room.shortage({"a": GIB}, {}) is None
    assert room.shortage({}, {"a": 0}) is None
