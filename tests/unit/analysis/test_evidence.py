"""Which GPUs labels and records assign to runs; ambiguous evidence assigns none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
import pytest

from slurm_affinode.analysis import evidence

HOUR = (0, 3600)
LATER = (3600, 7200)
OVERLAPPING = (3599, 7200)


def frame(rows: Sequence[tuple[Any, ...]], **schema: Any) -> pl.DataFrame:
    """Return a data frame of rows; ``schema``: types of its columns."""
    return pl.DataFrame(rows, schema=schema, orient="row")


def settled(
    labels: Sequence[tuple[int, int]] = (), records: Sequence[tuple[int, int]] = (), *,
    gpus: Mapping[int, int | None], times: Mapping[int, tuple[int, int]] | None = None,
    nodes: Mapping[int, str] | None = None, on: Mapping[int, Sequence[str]] | None = None,
    slots: Mapping[int, int] | None = None, leaders: Sequence[int] = (), complete: Sequence[int] = (),
    instances: bool = False,
) -> evidence.Settled:  # fmt: skip
    """Settle labels and records: pairs of a run and a device.

    ``gpus``: of each run; ``times``: of runs, else ``HOUR``; ``nodes``, ``slots``: of devices, else ``n1`` and a slot
    for each; ``on``: nodes of each run; ``leaders``: runs labeled with the ID of their array.
    """
    devices = sorted({at for _, at in (*labels, *records)})
    return evidence.settle(
        frame([(run, at, 10 * run + at, run in leaders) for run, at in labels],
              run=pl.Int64, at=pl.Int64, weight=pl.Int64, leader=pl.Boolean),
        frame(records, run=pl.Int64, at=pl.Int64),
        pl.Series("run", complete, pl.Int64),
        frame([(run, count, *(times or {}).get(run, HOUR)) for run, count in gpus.items()],
              run=pl.Int64, gpus=pl.Int64, start_ms=pl.Int64, end_ms=pl.Int64),
        frame([(run, node) for run in gpus for node in (on or {}).get(run, ["n1"])], run=pl.Int64, node=pl.String),
        frame([(at, (nodes or {}).get(at, "n1"), (slots or {}).get(at, at), instances) for at in devices],
              at=pl.Int64, node=pl.String, slot=pl.Int64, instance=pl.Boolean),
    )  # fmt: skip


def pairs(result: evidence.Settled) -> set[tuple[int, int, str]]:
    """Return run, device and kind of evidence of each pair; there is no pair twice."""
    assert not result.pairs.select("run", "at").is_duplicated().any()
    return set(result.pairs.rows())


def doubts(result: evidence.Settled) -> set[tuple[int, str]]:
    """Return run and reason of the runs whose evidence leaves GPUs open."""
    return set(result.doubtful.select("run", "why").rows())


def labeled(*of_runs: tuple[int, int]) -> set[tuple[int, int, str]]:
    """Return pairs by labels."""
    return {(run, at, "labels") for run, at in of_runs}


def recorded(*of_runs: tuple[int, int]) -> set[tuple[int, int, str]]:
    """Return pairs by records."""
    return {(run, at, "recorded") for run, at in of_runs}


@pytest.mark.parametrize(
    ("gpus", "devices", "certain"),
    [(2, 2, True), (2, 3, False), (1, 1, True), (1, 2, False), (0, 3, True), (None, 3, True)],
)
def test_labels_of_at_most_the_allocated_gpus_are_used(gpus: int | None, devices: int, certain: bool) -> None:
    """A run without GPUs in accounting may have any number of them."""
    labels = [(1, at) for at in range(devices)]
    result = settled(labels, gpus={1: gpus})
    assert pairs(result) == (labeled(*labels) if certain else set())
    assert doubts(result) == (set() if certain else {(1, "labels")})
    assert result.unused.rows() == ([] if certain else [(1, at, 10 + at) for at in range(devices)])


def test_devices_of_one_slot_are_one_gpu() -> None:
    result = settled([(1, 0), (1, 1)], gpus={1: 1}, slots={0: 5, 1: 5})
    assert pairs(result) == labeled((1, 0), (1, 1))


@pytest.mark.parametrize(
    ("gpus", "here", "nodes", "certain"),
    [
        (3, 2, ["n1", "n2"], True),
        (3, 3, ["n1", "n2"], False),
        (3, 1, ["n1", "n2", "n3"], True),
        (3, 2, ["n1", "n2", "n3"], False),
        (2, 1, ["n1", "n2"], True),
        (1, 1, ["n1", "n2"], True),
        (2, 2, [], True),
        (0, 2, ["n1", "n2"], True),
    ],
)
def test_run_has_a_gpu_on_each_of_its_other_nodes(gpus: int, here: int, nodes: list[str], certain: bool) -> None:
    """A run with fewer GPUs than nodes may have all of them on one."""
    labels = [(1, at) for at in range(here)]
    result = settled(labels, gpus={1: gpus}, on={1: nodes})
    assert pairs(result) == (labeled(*labels) if certain else set())


def test_labels_of_several_nodes_are_counted_together() -> None:
    """Each node has no more than it may have, but all of them have."""
    labels = [(1, at) for at in range(4)]
    nodes = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
    assert pairs(settled(labels[:3], gpus={1: 3}, nodes=nodes, on={1: ["n1", "n2"]})) == labeled(*labels[:3])
    assert pairs(settled(labels, gpus={1: 3}, nodes=nodes, on={1: ["n1", "n2"]})) == set()


def test_slots_of_several_nodes_are_different_gpus_of_a_run() -> None:
    labels = [(1, 0), (1, 1)]
    result = settled(labels, gpus={1: 2}, nodes={1: "n2"}, on={1: ["n1", "n2"]})
    assert pairs(result) == labeled(*labels)


def test_records_of_all_gpus_decide_labels_beyond_the_allocated_ones() -> None:
    """Without records of all of its GPUs, neither the labels nor the number of GPUs is certain."""
    labels = [(1, 0), (1, 1)]
    complete = settled(labels, [(1, 1)], gpus={1: 1}, complete=[1])
    assert pairs(complete) == recorded((1, 1))
    assert doubts(complete) == set()
    assert complete.unused.rows() == [(1, 0, 10), (1, 1, 11)]
    partly = settled([(1, 0), (1, 1), (1, 2)], [(1, 2)], gpus={1: 2})
    assert pairs(partly) == recorded((1, 2))
    assert doubts(partly) == {(1, "labels")}


def test_labels_and_records_of_the_same_gpus_agree() -> None:
    result = settled([(1, 0)], [(1, 0), (1, 1)], gpus={1: 2}, complete=[1])
    assert pairs(result) == labeled((1, 0)) | recorded((1, 1))
    assert doubts(result) == set()


def test_labels_that_contradict_records_leave_the_gpus_of_both() -> None:
    result = settled([(1, 0), (1, 1)], [(1, 1), (1, 2)], gpus={1: 2}, complete=[1])
    assert pairs(result) == labeled((1, 1))
    assert doubts(result) == {(1, "contradiction")}
    assert result.unused.rows() == [(1, 0, 10)]


def test_contradiction_of_a_run_is_none_of_another() -> None:
    result = settled([(1, 0), (2, 2)], [(1, 1), (2, 3)], gpus={1: 1, 2: 2}, complete=[1])
    assert pairs(result) == labeled((2, 2)) | recorded((2, 3))
    assert doubts(result) == {(1, "contradiction")}


@pytest.mark.parametrize(("second", "disputed"), [(HOUR, True), (OVERLAPPING, True), (LATER, False)])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", ["instances", "array"])
def test_gpu_claimed_by_two_runs_at_once_is_neither_ones(
    second: tuple[int, int], disputed: bool, reverse: bool, kind: str
) -> None:
    """An instance of MIG labeled with all jobs of its GPU, or a GPU with the ID of the array of both."""
    times = {1: second, 2: HOUR} if reverse else {1: HOUR, 2: second}
    way: dict[str, Any] = {"instances": True} if kind == "instances" else {"leaders": [1, 2]}
    result = settled([(1, 0), (2, 0)], gpus={1: 1, 2: 1}, times=times, **way)
    assert pairs(result) == (set() if disputed else labeled((1, 0), (2, 0)))
    assert doubts(result) == ({(1, "labels"), (2, "labels")} if disputed else set())


@pytest.mark.parametrize("leaders", [[], [1]])
def test_gpu_that_is_no_instance_may_be_shared(leaders: list[int]) -> None:
    """Only one of both labels may name several jobs of an array."""
    result = settled([(1, 0), (2, 0)], gpus={1: 1, 2: 1}, leaders=leaders)
    assert pairs(result) == labeled((1, 0), (2, 0))


def test_record_decides_which_run_has_an_instance() -> None:
    """The other run keeps the instance that is left."""
    result = settled([(1, 0), (1, 1), (2, 0), (2, 1)], [(1, 1)], gpus={1: 1, 2: 1}, complete=[1], instances=True)
    assert pairs(result) == recorded((1, 1)) | labeled((2, 0))
    assert doubts(result) == set()


def test_run_with_fewer_undisputed_instances_than_allocated_is_open() -> None:
    """One of the two instances is recorded for another run."""
    result = settled([(1, 0), (1, 1), (2, 1)], [(2, 1)], gpus={1: 2, 2: 1}, complete=[2], instances=True)
    assert pairs(result) == labeled((1, 0), (2, 1))
    assert doubts(result) == {(1, "labels")}


def test_instances_that_several_runs_without_a_number_of_gpus_claim_are_open() -> None:
    result = settled([(1, 0), (2, 0), (1, 1)], gpus={1: None, 2: None}, instances=True)
    assert doubts(result) == {(1, "labels"), (2, "labels")}
    assert pairs(result) == labeled((1, 1))


@pytest.mark.parametrize(("second", "held"), [(HOUR, True), (OVERLAPPING, True), (LATER, False)])
def test_gpus_that_other_runs_hold_are_excluded_from_labels(second: tuple[int, int], held: bool) -> None:
    """Run 1 has labels on two GPUs; run 2 is known to have one of them at its time."""
    result = settled([(1, 0), (1, 1), (2, 1)], gpus={1: 1, 2: 1}, times={2: second})
    assert pairs(result) == (labeled((1, 0), (2, 1)) if held else labeled((2, 1)))
    assert doubts(result) == (set() if held else {(1, "labels")})


def test_label_that_a_record_confirms_is_kept_although_another_run_has_the_gpu() -> None:
    """Run 1 has one of three labeled GPUs by a record: the other run shares it."""
    result = settled([(1, 0), (1, 1), (1, 2), (2, 0), (3, 2)], [(1, 0)], gpus={1: 2, 2: 1, 3: 1})
    assert pairs(result) == labeled((1, 0), (1, 1), (2, 0), (3, 2))
    assert doubts(result) == set()


def test_labels_of_one_node_leave_a_gpu_for_others_although_they_are_few() -> None:
    """Three labels of three GPUs on three nodes, two of them on one node."""
    result = settled([(1, 0), (1, 1), (1, 2)], gpus={1: 3}, nodes={2: "n2"}, on={1: ["n1", "n2", "n3"]})
    assert pairs(result) == set()
    assert doubts(result) == {(1, "labels")}


def test_record_of_another_device_of_a_slot_adds_none() -> None:
    """A source without UUIDs has the label; the device that it names has a better name (``slots.twins``)."""
    result = settled([(1, 0)], [(1, 1)], gpus={1: 1}, slots={0: 5, 1: 5}, complete=[1])
    assert pairs(result) == labeled((1, 0))


def test_recorded_gpu_without_samples_leaves_no_doubt() -> None:
    """Records name all GPUs of the run; one of these has no samples."""
    result = settled([(1, 0), (1, 1), (1, 2)], [(1, 2)], gpus={1: 2}, complete=[1])
    assert pairs(result) == recorded((1, 2))
    assert doubts(result) == set()


def test_run_without_an_undisputed_instance_is_open() -> None:
    result = settled([(1, 0)], [(2, 0)], gpus={1: 1, 2: 1}, complete=[2], instances=True)
    assert pairs(result) == recorded((2, 0))
    assert doubts(result) == {(1, "labels")}


def test_label_and_record_of_one_instance_are_one_gpu_of_the_run() -> None:
    """The other instance of the run is recorded for another one."""
    result = settled([(1, 0), (1, 1)], [(1, 0), (2, 1)], gpus={1: 2, 2: 1}, complete=[2], instances=True)
    assert pairs(result) == labeled((1, 0)) | recorded((2, 1))
    assert doubts(result) == {(1, "labels")}


def test_run_without_a_number_of_gpus_is_settled_by_the_records_of_others() -> None:
    result = settled([(1, 0), (1, 1)], [(2, 1)], gpus={1: None, 2: 1}, complete=[2], instances=True)
    assert pairs(result) == labeled((1, 0)) | recorded((2, 1))
    assert doubts(result) == set()


def test_instance_recorded_for_two_runs_is_shared() -> None:
    result = settled([(1, 0), (2, 0)], [(1, 0), (2, 0)], gpus={1: 1, 2: 1}, complete=[1, 2], instances=True)
    assert pairs(result) == labeled((1, 0), (2, 0))
    assert doubts(result) == set()


def test_id_of_an_array_and_record_of_another_run_share_a_gpu() -> None:
    result = settled([(1, 0)], [(2, 0)], gpus={1: 1, 2: 1}, leaders=[1], complete=[2])
    assert pairs(result) == labeled((1, 0)) | recorded((2, 0))
    assert doubts(result) == set()
