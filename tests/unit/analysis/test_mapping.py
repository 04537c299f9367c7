"""Which GPUs a run had: labels, recorded ids, whole nodes, else unknown and said so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

from slurm_affinode.analysis.result import QualityIssue, WasteResult

Analysed = Callable[..., WasteResult]
Rows = Callable[..., list[dict[str, Any]]]
Jobs = Callable[..., pl.DataFrame]

HOUR = 3600
TIMES = [60.0 * k for k in range(60)]


@pytest.fixture
def node(samples: Rows) -> Callable[..., list[dict[str, Any]]]:
    """An hour of a node's GPUs, the first of them idle, the second busy; each of ``gpus`` gives more columns."""

    def make(*gpus: dict[str, Any], name: str = "n1") -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for number, more in enumerate(gpus):
            identity = {"uuid": f"GPU-{name}-{number}", "pci": f"00000000:{number + 1:02X}:00.0", "index": number}
            rows += samples(TIMES, **{"node": name, "util_pct": 90 * number, **identity, **more})
        return rows

    return make


def issue(result: WasteResult, code: str) -> QualityIssue | None:
    """The issue of that code."""
    return next((found for found in result.quality.issues if found.code == code), None)


def how(result: WasteResult) -> dict[int, tuple[str, float | None, float | None]]:
    """Job -> mapping, idle hours, busy hours."""
    hours = [pl.col(f"gpu_hours_{name}").round(9) for name in ("idle", "busy")]
    return {job: (word, idle, busy) for job, word, idle, busy in result.jobs.select("job_id", "mapping", *hours).rows()}


@pytest.mark.parametrize(
    ("label", "ids"),
    [
        ("7", {"job_id": 7}),
        ("7.0", {"job_id": 7}),
        ("7.batch", {"job_id": 7}),
        ("10_3", {"job_id": 13, "array_job_id": 10, "array_task_id": 3}),
        ("10_3.0", {"job_id": 13, "array_job_id": 10, "array_task_id": 3}),
        ("13", {"job_id": 13, "array_job_id": 10, "array_task_id": 3}),
        ("10", {"job_id": 13, "array_job_id": 10, "array_task_id": 3}),
        ("20+1", {"job_id": 21, "het_job_id": 20, "het_offset": 1}),
    ],
)
def test_a_label_names_the_run(analysed: Analysed, node: Rows, jobs: Jobs, label: str, ids: dict[str, int]) -> None:
    """A raw id, an id as people write it, or a step's: of two GPUs the run has the labelled one."""
    result = analysed(node({}, {"job": label}), jobs({**ids, "start": 0, "end": HOUR}))
    assert how(result) == {ids["job_id"]: ("labels", 0, pytest.approx(1))}
    assert issue(result, "label-mismatch") is None
    assert result.quality.mapped_runs == {"labels": 1, "recorded": 0, "whole-node": 0, "unknown": 0}


def test_labels_tell_array_tasks_apart(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """Two tasks of an array on one node."""
    found = jobs(
        {"job_id": 11, "array_job_id": 10, "array_task_id": 1, "start": 0, "end": HOUR},
        {"job_id": 10, "array_job_id": 10, "array_task_id": 2, "start": 0, "end": HOUR},
    )
    result = analysed(node({"job": "10_1"}, {"job": "10_2"}), found)
    assert how(result) == {11: ("labels", 1, 0), 10: ("labels", 0, 1)}


def test_labels_of_other_hours_are_not_looked_at(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The file of a day has also those of runs before and after the period that was asked for."""
    before, after = (samples([time], job=job, util_pct=0) for time, job in ((60.0, "98"), (7200.0, "99")))
    rows = [*before, *samples([HOUR + time for time in TIMES[:30]], job="1", util_pct=90), *after]
    result = analysed(rows, jobs({"start": HOUR, "end": HOUR + 1800}), since=HOUR, until=HOUR + 1800)
    assert how(result) == {1: ("labels", 0, pytest.approx(0.5))}
    assert issue(result, "label-mismatch") is None


@pytest.mark.parametrize("label", ["99", "1_7", "nonsense"])
def test_a_label_that_fits_no_run_is_not_used_and_reported(
    analysed: Analysed, node: Rows, jobs: Jobs, label: str
) -> None:
    """Accounting knows no such job: the GPU is nobody's, unless the whole node was a run's."""
    result = analysed(node({"job": label}, {}), jobs({"start": 0, "end": HOUR}))
    assert how(result) == {1: ("unknown", None, None)}
    found = issue(result, "label-mismatch")
    assert found is not None
    assert (found.count, found.examples) == (1, (f"job {label} on n1: 60 samples",))


@pytest.mark.parametrize(
    "elsewhere",
    [{"node_list": "n2"}, {"cluster": "other"}, {"start": 2 * HOUR, "end": 3 * HOUR}],
    ids=["node", "cluster", "time"],
)
def test_a_label_must_agree_with_node_cluster_and_time(
    analysed: Analysed, node: Rows, jobs: Jobs, elsewhere: dict[str, Any]
) -> None:
    """An old mapping file, or the same number in another cluster."""
    found = jobs(
        {"job_id": 1, "start": 0, "end": HOUR, **elsewhere},
        {"job_id": 2, "start": 0, "end": HOUR, "node_list": "n5"},
    )
    result = analysed(node({"job": "1"}, {}), found, until=4 * HOUR)
    assert how(result)[1] == ("unknown", None, None)
    assert issue(result, "label-mismatch") is not None


def test_labels_beyond_what_accounting_gave_are_not_used(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """A run with one GPU whose label is on two keeps that with the most samples."""
    rows = node({"job": lambda t: "1" if t < 600 else None}, {"job": "1"})
    result = analysed(rows, jobs({"start": 0, "end": HOUR}))
    assert how(result) == {1: ("labels", 0, pytest.approx(1))}
    assert issue(result, "label-mismatch") is not None


@pytest.mark.parametrize("gpu", ["GPU-n1-1", "gpu-N1-1", "00000000:02:00.0", "0000:02:00.0", "02:00.0", "1"])
def test_recorded_ids_name_the_gpu(analysed: Analysed, node: Rows, jobs: Jobs, gpu: str) -> None:
    """UUID, PCI address however it is written, or index on the node."""
    record = {"cluster": "c", "job_id": 1, "node": "n1", "gpu": gpu}
    result = analysed(node({}, {}), jobs({"start": 0, "end": HOUR}), recorded=[record])
    assert how(result) == {1: ("recorded", 0, pytest.approx(1))}


def test_a_record_of_another_run_of_the_job_is_not_used(analysed: Analysed, node: Rows, jobs: Jobs, at: Any) -> None:
    """A requeued job had another GPU in its first run."""
    found = jobs(
        {"start": 0, "end": 1800},
        {"submit": 1800, "start": 1800, "end": HOUR},
    )
    records = [
        {"cluster": "c", "job_id": 1, "start": at(0), "node": "n1", "gpu": "0"},
        {"cluster": "c", "job_id": 1, "start": at(1800), "node": "n1.example.org", "gpu": "1"},
    ]
    rows = analysed(node({}, {}), found, recorded=records).jobs.sort("submit")
    assert rows.select("mapping", "gpu_hours_idle", "gpu_hours_busy").rows() == [
        ("recorded", pytest.approx(0.5), 0),
        ("recorded", 0, pytest.approx(0.5)),
    ]


def test_records_of_several_runs_without_their_starts_say_nothing(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """A requeued job had one GPU, then another: which was when is not guessed."""
    found = jobs({"start": 0, "end": 1800}, {"start": 1800, "end": HOUR, "submit": 10})
    recorded = [{"cluster": "c", "job_id": 1, "node": "n1", "gpu": gpu} for gpu in ("0", "1")]
    result = analysed(node({}, {}), found, recorded=recorded)
    assert result.jobs["mapping"].to_list() == ["unknown", "unknown"]
    both = analysed(node({}, {}), jobs({"start": 0, "end": HOUR, "gpus": 2}), recorded=recorded)
    assert how(both) == {1: ("recorded", 1, 1)}


@pytest.mark.parametrize(("gpus", "expected"), [(1, ("unknown", None, None)), (2, ("recorded", 1, 1))])
def test_a_record_of_a_divided_gpu(
    analysed: Analysed, samples: Rows, jobs: Jobs, gpus: int, expected: tuple[str, float, float]
) -> None:
    """It names all instances; which one of them is not guessed."""
    rows = samples(TIMES, util_pct=None, power_w=300)
    rows += samples(TIMES, mig="1", engine_active=0) + samples(TIMES, mig="2", engine_active=0.9)
    rows += samples(TIMES, uuid="GPU-1", index=1)
    recorded = [{"cluster": "c", "job_id": 1, "node": "n1", "gpu": "GPU-0"}]
    assert how(analysed(rows, jobs({"start": 0, "end": HOUR, "gpus": gpus}), recorded=recorded)) == {1: expected}


def test_a_record_of_an_instance_by_its_own_id(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The history knows instances by the ids that NVIDIA gives them, or by numbers, which are no indexes of GPUs."""
    rows = [row for n in (1, 2) for row in samples(TIMES, uuid=None, index=None, mig=f"MIG-a{n}", engine_active=n - 1)]
    recorded = [{"cluster": "c", "job_id": 1, "node": "n1", "gpu": "MIG-A2"}]
    found = jobs({"start": 0, "end": HOUR})
    assert how(analysed(rows, found, recorded=recorded)) == {1: ("recorded", 0, 1)}


def test_an_index_without_a_node_says_nothing(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """GPU 1 of which node? A UUID needs none."""
    found = jobs({"start": 0, "end": HOUR})
    assert how(analysed(node({}, {}), found, recorded=[{"job_id": 1, "gpu": "1"}])) == {1: ("unknown", None, None)}
    result = analysed([], found, recorded=[{"job_id": 1, "gpu": "GPU-n1-1"}])
    assert how(result) == {1: ("recorded", 0, pytest.approx(1))}


def test_labels_come_before_records(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """Where both speak, the history's own word counts."""
    record = {"cluster": "c", "job_id": 1, "node": "n1", "gpu": "1"}
    result = analysed(node({"job": "1"}, {}), jobs({"start": 0, "end": HOUR}), recorded=[record])
    assert how(result) == {1: ("labels", 1, 0)}


def test_a_run_with_every_gpu_of_its_node_had_these(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """Two GPUs, two on the node, nobody else there but a CPU job."""
    found = jobs(
        {"job_id": 1, "start": 0, "end": HOUR, "gpus": 2},
        {"job_id": 2, "start": 0, "end": HOUR, "gpus": 0},
    )
    assert how(analysed(node({}, {}), found)) == {1: ("whole-node", 1, 1)}


def test_a_run_with_every_gpu_of_several_nodes(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """Three GPUs on two nodes of which one has two and one has one."""
    rows = node({}, {}) + node({}, name="n2")
    result = analysed(rows, jobs({"start": 0, "end": HOUR, "gpus": 3, "nodes": 2, "node_list": "n[1-2]"}))
    assert how(result) == {1: ("whole-node", 2, 1)}
    by_node = result.groups["node"].select("name", "gpu_hours_allocated").rows()
    assert {name: round(hours, 9) for name, hours in by_node} == {"n1": 2, "n2": 1}


@pytest.mark.parametrize("when", ["interval", "days before"])
def test_node_that_lost_gpus_from_its_metrics_is_not_mapped(
    analysed: Analysed, node: Rows, jobs: Jobs, samples: Rows, when: str
) -> None:
    """It has four GPUs, and a job with two of them runs alone while two are sampled: nobody knows which it has."""
    begin = 1800 if when == "interval" else -26 * HOUR
    rows = node({}, {"util_pct": 0})
    for number in (2, 3):
        identity = {"uuid": f"GPU-n1-{number}", "pci": f"00000000:{number + 1:02X}:00.0", "index": number}
        rows += samples([begin + time for time in TIMES[:20]], **identity, util_pct=50)
    start = 1800 + 1200 if when == "interval" else 0
    result = analysed(rows, jobs({"start": start, "end": HOUR, "gpus": 2}))
    assert how(result) == {1: ("unknown", None, None)}


def test_gpus_that_are_gone_for_longer_than_a_week_are_not_the_nodes(
    analysed: Analysed, node: Rows, jobs: Jobs, samples: Rows
) -> None:
    """The node has two GPUs since it was rebuilt."""
    week = 7 * 24 * HOUR
    old = [samples([-week - HOUR + time for time in TIMES], uuid=f"GPU-old-{k}", index=k) for k in range(4)]
    result = analysed([*node({}, {}), *old[2], *old[3]], jobs({"start": 0, "end": HOUR, "gpus": 2}))
    assert how(result) == {1: ("whole-node", 1, 1)}


@pytest.mark.parametrize("mark", ["pci", "index"])
def test_replaced_gpu_takes_the_slot_of_its_predecessor(
    analysed: Analysed, node: Rows, jobs: Jobs, samples: Rows, mark: str
) -> None:
    """One GPU of two was replaced yesterday."""
    place = {"pci": "00000000:02:00.0", "index": 1} if mark == "pci" else {"index": 1}
    rows = node({} if mark == "pci" else {"pci": None}, {} if mark == "pci" else {"pci": None})
    rows += samples([time - 24 * HOUR for time in TIMES], uuid="GPU-broken", **place)
    assert how(analysed(rows, jobs({"start": 0, "end": HOUR, "gpus": 2}))) == {1: ("whole-node", 1, 1)}


def test_gpu_that_was_replaced_during_the_run_is_one_gpu(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The one that the run had for longer is measured."""
    rows = samples(TIMES[:20], uuid="GPU-a", util_pct=0) + samples(TIMES[20:], uuid="GPU-b", util_pct=90)
    result = analysed(rows, jobs({"start": 0, "end": HOUR}))
    assert how(result)[1][0] == "whole-node"
    assert result.total["gpu_hours_allocated"] == pytest.approx(1)
    assert result.total["gpu_hours_busy"] == pytest.approx(40 / 60)
    assert result.total["gpu_hours_idle"] == 0


def test_indices_that_shift_behind_a_lost_gpu_hide_no_gpu(
    analysed: Analysed, node: Rows, jobs: Jobs, samples: Rows
) -> None:
    """Of three GPUs the second is lost: the third has its index from then on, and a job with two leaves one open."""
    no_address = {"pci": None}
    rows = node(no_address, no_address, no_address)
    rows += samples([HOUR + time for time in TIMES], uuid="GPU-n1-0", index=0, util_pct=0)
    rows += samples([HOUR + time for time in TIMES], uuid="GPU-n1-2", index=1, util_pct=0)
    result = analysed(rows, jobs({"start": HOUR, "end": 2 * HOUR, "gpus": 2}))
    assert how(result) == {1: ("unknown", None, None)}


@pytest.mark.parametrize(
    ("other", "record"),
    [
        ({"gpus": 4}, None),
        ({"gpus": 1}, "3"),
        ({"gpus": 1}, "2"),
        ({"gpus": 3}, ["GPU-a", "GPU-b", "GPU-c"]),
        ("two runs at once", None),
    ],
)
def test_node_with_more_gpus_than_its_metrics_is_not_mapped(  # noqa: PLR0917
    analysed: Analysed, node: Rows, jobs: Jobs, at: Any, other: Any, record: str | list[str] | None
) -> None:
    """Accounting or a record shows more GPUs at another time than were ever sampled."""
    asked = {"job_id": 1, "start": 0, "end": HOUR, "gpus": 2}
    if other == "two runs at once":
        later = [{"job_id": number, "start": HOUR, "end": 2 * HOUR, "gpus": gpus} for number, gpus in ((2, 2), (3, 1))]
    else:
        later = [{"job_id": 2, "start": HOUR, "end": 2 * HOUR, **other}]
    ids = [] if record is None else [record] if isinstance(record, str) else record
    records = [{"cluster": "c", "job_id": 2, "node": "n1", "gpu": one, "start": at(HOUR)} for one in ids]
    result = analysed(node({}, {}), jobs(asked, *later), recorded=records)
    assert how(result)[1] == ("unknown", None, None)


@pytest.mark.parametrize("gpu", ["GPU-lost", "00000000:99:00.0"])
def test_recorded_gpu_without_samples_is_not_another_gpu(analysed: Analysed, node: Rows, jobs: Jobs, gpu: str) -> None:
    """The run had a GPU that the metrics do not have; the only one that they have is another."""
    records = [{"cluster": "c", "job_id": 1, "node": "n1", "gpu": gpu}]
    result = analysed(node({}), jobs({"start": 0, "end": HOUR}), recorded=records)
    assert how(result) == {1: ("unknown", None, None)}


def test_recorded_gpu_without_samples_counts_on_its_node(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """Three GPUs: one on the first node, which has lost its metrics, so that two are left for the second with three."""
    records = [{"cluster": "c", "job_id": 1, "node": "n1", "gpu": "GPU-lost"}]
    found = jobs({"start": 0, "end": HOUR, "gpus": 3, "nodes": 2, "node_list": "n[1-2]"})
    assert how(analysed(node({}, {}, {}, name="n2"), found, recorded=records)) == {1: ("unknown", None, None)}


def test_node_whose_first_gpus_were_never_sampled_is_not_mapped(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """GPUs 2 and 3 are not a node's only ones."""
    rows = node({"index": 2}, {"index": 3})
    assert how(analysed(rows, jobs({"start": 0, "end": HOUR, "gpus": 2}))) == {1: ("unknown", None, None)}


def test_runs_one_after_the_other_are_no_more_gpus(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """The second begins in the moment in which the first ends."""
    found = jobs(
        {"job_id": 1, "start": 0, "end": 1800, "gpus": 2},
        {"job_id": 2, "start": 1800, "end": HOUR, "gpus": 2},
    )
    assert {word for word, _, _ in how(analysed(node({}, {}), found)).values()} == {"whole-node"}


@pytest.mark.parametrize("second", ["record", "whole node"])
def test_label_on_one_node_leaves_the_evidence_of_the_others(
    analysed: Analysed, node: Rows, jobs: Jobs, second: str
) -> None:
    """A run on two nodes, one of which has an exporter without labels."""
    rows = node({"job": "1"}, {}) + node({}, *([{}] if second == "record" else []), name="n2")
    records = [{"cluster": "c", "job_id": 1, "node": name, "gpu": "0"} for name in ("n1", "n2")]
    result = analysed(
        rows,
        jobs({"start": 0, "end": HOUR, "gpus": 2, "nodes": 2, "node_list": "n[1-2]"}),
        recorded=records if second == "record" else (),
    )
    word = "recorded" if second == "record" else "whole-node"
    assert how(result) == {1: (word, 2, 0)}
    assert result.total["gpu_hours_unknown"] == 0


def test_whole_nodes_and_labels_are_no_more_gpus_than_the_run_has(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """Of six GPUs on three nodes labels name three on one: which of the other two had two is open."""
    rows = node({"job": "1"}, {"job": "1"}, {"job": "1"}) + node({}, {}, name="n2") + node({}, {}, name="n3")
    result = analysed(rows, jobs({"start": 0, "end": HOUR, "gpus": 6, "nodes": 3, "node_list": "n[1-3]"}))
    assert how(result)[1][0] == "labels"
    assert result.total["gpu_hours_allocated"] == pytest.approx(6)
    assert result.total["gpu_hours_unmapped"] == pytest.approx(3)


def test_label_on_one_gpu_leaves_the_records_of_the_others(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """On one node: the label of the second GPU was lost."""
    records = [{"cluster": "c", "job_id": 1, "node": "n1", "gpu": gpu} for gpu in ("0", "1")]
    result = analysed(node({"job": "1"}, {}, {}), jobs({"start": 0, "end": HOUR, "gpus": 2}), recorded=records)
    assert how(result) == {1: ("recorded", 1, 1)}


def test_record_that_contradicts_a_label_adds_no_gpu(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """The label names one GPU of the node, the record another: the run had one there."""
    records = [{"cluster": "c", "job_id": 1, "node": "n1", "gpu": "1"}]
    found = jobs({"start": 0, "end": HOUR, "gpus": 2, "nodes": 2, "node_list": "n[1-2]"})
    result = analysed(node({"job": "1"}, {}), found, recorded=records)
    assert how(result) == {1: ("labels", 1, 0)}
    assert result.total["gpu_hours_unknown"] == pytest.approx(1)


def test_a_gpu_of_which_the_history_ends_early_is_still_the_nodes(
    analysed: Analysed, node: Rows, jobs: Jobs, samples: Rows
) -> None:
    """The run had both: the time of the one that is not seen is unknown, that of the other is not."""
    rows = node({}) + samples(TIMES[:20], node="n1", uuid="GPU-early", index=1, util_pct=50)
    result = analysed(rows, jobs({"start": HOUR // 2, "end": HOUR, "gpus": 2}))
    assert how(result) == {1: ("whole-node", 0.5, 0)}
    assert result.total["gpu_hours_unknown"] == pytest.approx(0.5)


def test_a_run_of_which_nothing_is_seen_has_no_known_gpu(
    analysed: Analysed, node: Rows, jobs: Jobs, samples: Rows
) -> None:
    """The node's samples end before it."""
    rows = samples(TIMES[:20], node="n1", util_pct=50)
    assert how(analysed(rows, jobs({"start": HOUR // 2, "end": HOUR, "gpus": 1}))) == {1: ("unknown", None, None)}


def test_nodes_of_a_run_of_which_one_has_no_history(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """The same number on each of two nodes: the GPUs of the one that is seen are known, the others' time is not."""
    result = analysed(node({}, {}), jobs({"start": 0, "end": HOUR, "gpus": 4, "nodes": 2, "node_list": "n[1-2]"}))
    assert how(result) == {1: ("whole-node", 1, 1)}
    assert result.total["gpu_hours_unknown"] == pytest.approx(2)
    found = issue(result, "partly-mapped")
    assert found is not None
    assert (found.count, found.gpu_hours) == (1, pytest.approx(2))


@pytest.mark.parametrize(
    "others",
    [[], [{"job_id": 2, "start": HOUR - 1, "end": HOUR, "gpus": 2}]],
    ids=["fewer GPUs than the node has", "another run on the node"],
)
def test_else_the_gpus_are_unknown_and_it_is_said(
    analysed: Analysed, node: Rows, jobs: Jobs, others: list[dict[str, Any]]
) -> None:
    """All of the run's hours are unknown, none idle."""
    mine = {"job_id": 1, "start": 0, "end": HOUR, "gpus": 2 if others else 1}
    result = analysed(node({}, {}), jobs(mine, *others))
    row = result.jobs.row(by_predicate=pl.col("job_id") == 1, named=True)
    assert (row["mapping"], row["idle_fraction"]) == ("unknown", None)
    assert row["gpu_hours_unknown"] == pytest.approx(mine["gpus"])
    found = issue(result, "unmapped-gpus")
    assert found is not None
    assert found.count == 1 + len(others)
    assert "job 1 of ann on n1" in found.examples


def test_runs_one_after_the_other_have_the_node_each(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """Times are half-open: a run that starts where another ends is alone."""
    found = jobs(*({"job_id": n, "start": s, "end": s + 1800, "gpus": 2} for n, s in ((1, 0), (2, 1800))))
    assert how(analysed(node({}, {}), found)) == {1: ("whole-node", 0.5, 0.5), 2: ("whole-node", 0.5, 0.5)}


def test_an_unmapped_run_has_the_model_of_its_node(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """Whichever of a node's GPUs it had, they are all of one model; of several models accounting's type is named."""
    rows = node({}, {}) + node({}, {"model": "NVIDIA H100 80GB HBM3"}, name="n2")
    found = jobs(
        {"job_id": 1, "start": 0, "end": HOUR, "gpu_type": None},
        {"job_id": 2, "start": 0, "end": HOUR, "gpu_type": "h100", "node_list": "n2"},
        {"job_id": 3, "start": 0, "end": HOUR, "gpu_type": None, "node_list": "n3"},
    )
    result = analysed(rows, found)
    models = dict(result.jobs.select("job_id", "gpu_model").rows())
    assert models == {1: "NVIDIA A100-SXM4-80GB", 2: "h100", 3: None}
    assert set(result.groups["gpu_model"]["name"]) == set(models.values())


def test_mig_instances_are_gpus_and_their_parent_is_left_out(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Two instances for two runs; the whole GPU's series counts for nobody, not as free either."""
    rows = samples(TIMES, util_pct=None, power_w=300)
    for mig, engine in (("1", 0.0), ("2", 0.9)):
        rows += samples(TIMES, mig=mig, mig_profile="1g.10gb", engine_active=engine, job=mig)
    found = jobs(*({"job_id": n, "start": 0, "end": HOUR} for n in (1, 2)))
    result = analysed(rows, found)
    assert how(result) == {1: ("labels", 1, 0), 2: ("labels", 0, 1)}
    assert (result.quality.devices, result.total["unallocated_gpu_hours"]) == (2, 0)
    assert result.total["util_mean_pct"] is None
    assert result.groups["gpu_model"]["name"].to_list() == ["NVIDIA A100-SXM4-80GB MIG 1g.10gb"]


def test_a_run_with_every_instance_of_a_node(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """For whole nodes the parent does not count either."""
    rows = samples(TIMES, util_pct=0)
    rows += samples(TIMES, mig="1", engine_active=0) + samples(TIMES, mig="2", engine_active=0.9)
    assert how(analysed(rows, jobs({"start": 0, "end": HOUR, "gpus": 2}))) == {1: ("whole-node", 1, 1)}


def test_a_history_that_calls_the_only_cluster_otherwise(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """Exporters seldom know what Slurm calls the cluster: one on each side is the same."""
    result = analysed(node({}), jobs({"start": 0, "end": HOUR, "cluster": "slurm-name"}))
    assert how(result) == {1: ("whole-node", 1, 0)}
    again = analysed(node({}, {}), jobs({"start": 0, "end": HOUR, "cluster": "slurm-name", "gpu_type": None}))
    assert again.jobs["gpu_model"].to_list() == ["NVIDIA A100-SXM4-80GB"]
    unmapped = issue(again, "unmapped-gpus")
    assert unmapped is not None
    assert "--cluster" not in unmapped.detail


def test_a_node_list_that_cannot_be_read_maps_nothing(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """The hours stay, as unknown, on no known node."""
    result = analysed(node({}), jobs({"start": 0, "end": HOUR, "node_list": "n[1-"}))
    assert how(result) == {1: ("unknown", None, None)}
    assert result.groups["node"]["name"].to_list() == [None]
    assert result.total["gpu_hours_unknown"] == pytest.approx(1)


def test_every_hour_says_how_its_gpus_are_known(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """In the total, in each group and for each run."""
    rows = node({"job": "1"}, {}) + node({}, name="n2") + node({}, {}, name="n3")
    found = jobs(
        {"job_id": 1, "start": 0, "end": HOUR, "gpus": 3, "nodes": 2, "node_list": "n[1-2]"},
        {"job_id": 2, "start": 0, "end": HOUR, "gpus": 1, "node_list": "n3"},
    )
    record = {"cluster": "c", "job_id": 1, "node": "n1", "gpu": "1"}
    second = {"cluster": "c", "job_id": 1, "node": "n1", "gpu": "0"}
    result = analysed(rows, found, recorded=[record, second])
    names = ("by_labels", "by_records", "by_whole_node", "unmapped")
    expected = [1, 1, 1, 1]
    assert [result.total[f"gpu_hours_{name}"] for name in names] == pytest.approx(expected)
    for frame in (result.jobs, *result.groups.values()):
        assert [frame[f"gpu_hours_{name}"].sum() for name in names] == pytest.approx(expected)
