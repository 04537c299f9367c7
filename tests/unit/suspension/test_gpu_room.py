"""GPU memory is checked for sufficient room before the driver is called."""

from __future__ import annotations

from slurm_affinode.suspension import memory

GIB = 1 << 30


def test_margin_for_driver_is_kept() -> None:
    """It is exact to the byte."""
    assert memory.shortage({"a": GIB}, {"a": GIB + memory.MARGIN}) is None
    assert memory.shortage({"a": GIB}, {"a": GIB + memory.MARGIN - 1}) is not None


def test_room_is_checked_per_paired_gpu() -> None:
    """Free memory of one GPU does not help on another."""
    needs, free = {"a": 4 * GIB, "b": 0}, {"a": 9 * GIB, "b": 1 * GIB}
    assert memory.shortage(needs, free) is None
    assert memory.shortage(needs, free, {"a": "b", "b": "a"}) == "4.06 GiB are needed on b, 1 GiB are free there"


def test_unknown_free_memory_is_not_a_shortage() -> None:
    """A GPU with unknown free memory is left to the driver."""
    assert memory.shortage({"a": GIB}, {"a": None}) is None
    assert memory.shortage({"a": GIB}, {}) is None
    assert memory.shortage({}, {"a": 0}) is None
