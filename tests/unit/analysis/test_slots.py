"""GPU slots: the devices of the metrics that are one GPU, and the time in which each of them counts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import polars as pl
import pytest

from slurm_affinode.analysis import slots
from slurm_affinode.analysis.segments import FAR

COLUMNS = {
    "at": pl.Int64(), "cluster": pl.String(), "node": pl.String(), "uuid": pl.String(), "pci": pl.String(),
    "index": pl.Int64(), "mig": pl.String(), "first": pl.Datetime("ms", "UTC"), "last": pl.Datetime("ms", "UTC"),
    "step_ms": pl.Int64(), "slot": pl.Int64(),
}  # fmt: skip
SPANS = {"at": pl.Int64(), "start_ms": pl.Int64(), "end_ms": pl.Int64(), "run": pl.Int64()}


def table(*devices: dict[str, Any]) -> pl.DataFrame:
    """Return a device table; ``first`` and ``last`` are ms since the epoch."""
    base: dict[str, Any] = {"cluster": "c", "node": "n1", "first": 0, "last": 100, "step_ms": 10, "slot": 0}
    rows = [{**base, "at": at, **device} for at, device in enumerate(devices)]
    for row in rows:
        row |= {name: datetime.fromtimestamp(row[name] / 1000, UTC) for name in ("first", "last")}
    return pl.DataFrame([{name: row.get(name) for name in COLUMNS} for row in rows], schema=COLUMNS, orient="row")


def numbers(*devices: dict[str, Any]) -> list[int]:
    """Return the slots of devices, numbered in the order of their first device."""
    of_node = (
        slots.of_devices(table(*devices)).sort("at").join(table(*devices).select("at", "cluster", "node"), on="at")
    )
    keys = [str(row) for row in of_node.select("cluster", "node", "slot").rows()]
    return [list(dict.fromkeys(keys)).index(key) for key in keys]


def test_place_is_the_pci_address_of_the_index() -> None:
    """A source that knows the index only names the GPU that another source has at this index of the node."""
    places = slots.of_devices(table(
        {"index": 0, "pci": "A"}, {"index": 0}, {"index": 1}, {"uuid": "GPU-2"}, {}, {"index": 0, "node": "n2"},
        {"index": 0, "cluster": "other"},
    )).sort("at")["place"]  # fmt: skip
    assert places.to_list() == ["A", "A", "#1", "GPU-2", "?4", "#0", "#0"]


def test_index_of_several_pci_addresses_is_no_place() -> None:
    devices = ({"index": 0, "pci": "A"}, {"index": 0, "pci": "B"}, {"index": 0})
    assert slots.of_devices(table(*devices)).sort("at")["place"].to_list() == ["A", "B", "#0"]


def test_index_of_a_pci_address_in_several_sources_is_its_place() -> None:
    devices = ({"index": 0, "pci": "A", "uuid": "GPU-0"}, {"index": 0, "pci": "A"}, {"index": 0})
    assert slots.of_devices(table(*devices)).sort("at")["place"].to_list() == ["A"] * 3


def test_place_is_known_without_the_name_of_the_cluster() -> None:
    devices = ({"index": 0, "pci": "A", "cluster": None}, {"index": 0, "cluster": None})
    assert slots.of_devices(table(*devices)).sort("at")["place"].to_list() == ["A", "A"]


@pytest.mark.parametrize(
    ("first", "expected"),
    [(101, [0, 0]), (100, [0, 1]), (50, [0, 1]), (0, [0, 1])],
    ids=["after", "same sample", "during", "same times"],
)
def test_replacement_has_the_slot_of_its_predecessor(first: int, expected: list[int]) -> None:
    """Two GPUs that have samples at the same time are two slots, even with the same index."""
    devices = ({"uuid": "GPU-a", "index": 0}, {"uuid": "GPU-b", "index": 0, "first": first, "last": 200})
    assert numbers(*devices) == expected
    assert numbers(*reversed(devices)) == expected


@pytest.mark.parametrize("times", [((0, 100), (10, 20), (30, 40)), ((0, 5), (10, 20), (15, 25))])
def test_gpus_of_a_place_with_samples_at_the_same_time_are_no_replacements(times: tuple[tuple[int, int], ...]) -> None:
    """Two of the three have samples at the same time: which of these the third one follows is unknown."""
    assert numbers(*({"uuid": f"GPU-{first}", "index": 0, "first": first, "last": last} for first, last in times)) == [
        0, 1, 2,
    ]  # fmt: skip


def test_mig_instances_of_a_gpu_have_slots_of_their_own() -> None:
    devices = ({"uuid": "GPU-a"}, {"uuid": "GPU-a", "mig": "1"}, {"uuid": "GPU-a", "mig": "2"})
    assert numbers(*devices) == [0, 1, 2]
    later = ({"uuid": "GPU-a", "index": 0, "mig": "1"}, {"uuid": "GPU-b", "index": 0, "mig": "2", "first": 50})
    assert numbers(*later) == [0, 1]


def test_gpus_of_other_nodes_and_clusters_do_not_share_a_slot() -> None:
    """They have samples at the same time, and still need no slots of their own on their nodes."""
    placed = slots.of_devices(table(
        {"uuid": "GPU-a", "index": 0}, {"uuid": "GPU-b", "index": 0, "node": "n2"},
        {"uuid": "GPU-c", "index": 0, "cluster": "other"},
    ))  # fmt: skip
    assert placed["slot"].struct.field("own").to_list() == [None] * 3


def test_name_without_a_uuid_is_of_the_slot() -> None:
    """Another source has samples of the same GPU at the same time."""
    assert numbers({"uuid": "GPU-a", "index": 0}, {"index": 0, "first": 50}) == [0, 0]


NAMES = ({"index": 0}, {"pci": "A"}, {"uuid": "GPU-a"})


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (NAMES, [(0, 1), (0, 2), (1, 2)]),
        ((NAMES[0], NAMES[0]), []),
        ((NAMES[1], NAMES[1]), []),
        ((NAMES[2], NAMES[2]), []),
        (({"pci": "A", "uuid": "GPU-a"}, {"pci": "A"}), [(1, 0)]),
        (({"index": 0, "slot": 1}, {"uuid": "GPU-a"}), []),
        (({"index": 0}, {"uuid": "GPU-a", "first": 109}), [(0, 1)]),
        (({"index": 0}, {"uuid": "GPU-a", "first": 110}), []),
        (({"index": 0, "first": 109}, {"uuid": "GPU-a"}), [(0, 1)]),
        (({"index": 0, "first": 110}, {"uuid": "GPU-a"}), []),
    ],
)
def test_better_name_stands_for_another_at_the_same_time(
    devices: tuple[dict[str, Any], ...], expected: list[tuple[int, int]]
) -> None:
    """A UUID is better than a PCI address, and that is better than an index. A sample lasts for an interval."""
    assert slots.twins(table(*devices)).select("at", "other").rows() == expected


def test_time_of_a_better_name_is_that_of_its_samples() -> None:
    twins = slots.twins(table({"index": 0, "last": 500, "step_ms": 7}, {"uuid": "GPU-a", "first": 20, "last": 300}))
    assert twins.rows() == [(0, 1, 20, 310)]
    assert twins.columns == ["at", "other", "from_ms", "to_ms"]


@pytest.mark.parametrize(
    ("excluded", "left"),
    [
        ([(10, 20)], [(-FAR, 10), (20, FAR)]),
        ([(40, 50), (10, 20)], [(-FAR, 10), (20, 40), (50, FAR)]),
        ([(10, 30), (20, 40)], [(-FAR, 10), (40, FAR)]),
        ([(10, 50), (20, 30), (60, 70)], [(-FAR, 10), (50, 60), (70, FAR)]),
        ([(10, 20), (20, 30)], [(-FAR, 10), (30, FAR)]),
        ([(-FAR, 10)], [(10, FAR)]),
        ([(10, FAR)], [(-FAR, 10)]),
    ],
)
def test_periods_that_are_not_excluded_are_left(excluded: list[tuple[int, int]], left: list[tuple[int, int]]) -> None:
    """Each device has its own periods; empty ones are left out."""
    both = [(at, *period) for at in (2, 1) for period in excluded]
    periods = slots.without(pl.DataFrame([*both, (3, 5, 6)], schema=slots.PERIODS, orient="row"))
    assert periods.rows() == [(at, *period) for at in (1, 2) for period in left] + [(3, -FAR, 5), (3, 6, FAR)]


def test_spans_are_cut_to_the_periods_in_which_a_device_counts() -> None:
    spans = pl.DataFrame([(1, 10, 20, 7), (1, 20, 30, 8), (2, 0, 9, 9)], schema=SPANS, orient="row")
    counted = pl.DataFrame([(1, -FAR, 12), (1, 15, 18), (1, 20, FAR), (3, 0, 5)], schema=slots.PERIODS, orient="row")
    assert sorted(slots.clipped(spans, counted).rows()) == [
        (1, 10, 12, 7), (1, 15, 18, 7), (1, 20, 30, 8), (2, 0, 9, 9),
    ]  # fmt: skip


def test_device_that_never_counts_has_no_spans() -> None:
    spans = pl.DataFrame([(1, 10, 20, 7)], schema=SPANS, orient="row")
    assert slots.clipped(spans, pl.DataFrame([(1, 0, 0)], schema=slots.PERIODS, orient="row")).is_empty()


def test_united_time_of_a_slot_has_no_hour_twice() -> None:
    """Spans that overlap, contain others or touch become one."""
    spans = [(1, 30, 40), (1, 0, 20), (1, 5, 10), (1, 15, 25), (1, 40, 50), (2, 45, 60), (2, 100, 101)]
    schema = {"slot": pl.Int64(), "start_ms": pl.Int64(), "end_ms": pl.Int64()}
    united = slots.united(pl.DataFrame(spans, schema=schema, orient="row"))
    assert united.rows() == [(1, 0, 25), (1, 30, 50), (2, 45, 60), (2, 100, 101)]
    assert united.columns == ["slot", "start_ms", "end_ms"]
