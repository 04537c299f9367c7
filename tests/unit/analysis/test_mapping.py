"""Mapping of runs to GPUs: by job label, by recorded GPU ID, by whole node, otherwise unknown and reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from slurm_affinode.analysis import mapping
from slurm_affinode.analysis.result import QualityIssue, WasteResult
from slurm_affinode.slurm import identifiers
from slurm_affinode.slurm.accounting.schema import RECORDED_GPUS

Analysed = Callable[..., WasteResult]
Rows = Callable[..., list[dict[str, Any]]]
Jobs = Callable[..., pl.DataFrame]

HOUR = 3600
T0 = datetime(2026, 11, 2, 8, tzinfo=UTC)
TIMES = [60.0 * k for k in range(60)]


@pytest.fixture
def node(samples: Rows) -> Callable[..., list[dict[str, Any]]]:
    """Return a function for an hour of samples of a node: GPU 0 is idle, GPU 1 busy; ``gpus`` gives extra columns."""

    def make(*gpus: dict[str, Any], name: str = "n1") -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for number, more in enumerate(gpus):
            identity = {"uuid": f"GPU-{name}-{number}", "pci": f"00000000:{number + 1:02X}:00.0", "index": number}
            rows += samples(TIMES, **{"node": name, "util_pct": 90 * number, **identity, **more})
        return rows

    return make


def issue(result: WasteResult, code: str) -> QualityIssue | None:
    """Return the issue with this code, if any."""
    return next((outcome for outcome in result.quality.issues if outcome.code == code), None)


def how(result: WasteResult) -> dict[int, tuple[str, float | None, float | None]]:
    """Return job ID -> (mapping, idle hours, busy hours)."""
    hours = [pl.col(f"gpu_hours_{name}").round(9) for name in ("idle", "busy")]
    return {job: (word, idle, busy) for job, word, idle, busy in result.jobs.select("job_id", "mapping", *hours).rows()}


def renumbered(samples: Rows, hours: dict[int, dict[str, int]], value: dict[str, float]) -> list[dict[str, Any]]:
    """Return samples of the hours, with the index of each GPU in that hour, without PCI addresses."""
    return [row for hour, gpus in hours.items() for uuid, index in gpus.items()
            for row in samples([hour * HOUR + t for t in TIMES], uuid=uuid, index=index, pci=None,
                               util_pct=value[uuid])]  # fmt: skip


@pytest.mark.parametrize("restart", [1, 16])
def test_recorded_index_of_several_gpus_is_ambiguous(
    analysed: Analysed, samples: Rows, jobs: Jobs, restart: int
) -> None:
    """After a restart of the node, within the day or at midnight, without GPU-a, GPU-b has its index."""
    rows = renumbered(samples, {0: {"GPU-a": 0, "GPU-b": 1}, restart: {"GPU-b": 0}}, {"GPU-a": 0, "GPU-b": 90})
    gpus = [{"cluster": "c", "job_id": job, "node": "n1", "gpu": gpu}
            for job, gpu in ((1, "0"), (2, "GPU-b"), (3, "0"))]  # fmt: skip
    outcome = jobs({"job_id": 1, "start": 0, "end": HOUR}, {"job_id": 2, "start": 0, "end": HOUR},
                 {"job_id": 3, "start": restart * HOUR, "end": (restart + 1) * HOUR})  # fmt: skip
    result = analysed(rows, outcome, until=17 * HOUR, recorded=gpus)
    first = ("unknown", None, None) if restart == 1 else ("recorded", 1, 0)
    assert how(result) == {1: first, 2: ("recorded", 0, 1), 3: ("recorded", 0, 1)}
    assert (issue(result, "ambiguous-gpus") is not None) == (restart == 1)
    names = issue(result, "several-names")
    assert names is not None
    assert (names.count, names.examples) == (1, ("n1 GPU-b: index 0, 1",))


def test_model_of_a_gpu_with_several_is_unknown(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A name with the vendor, of a newer driver, is the same model."""
    times = [[hour * HOUR + t for t in TIMES] for hour in range(2)]
    rows = [row for job, models in (("1", ("A100", "NVIDIA A100")), ("2", ("A100", "H100")))
            for hour, model in zip(times, models, strict=True)
            for row in samples(hour, uuid=f"GPU-{job}", index=None, model=model, util_pct=0, job=job)]  # fmt: skip
    outcome = ({"job_id": job, "start": 0, "end": 2 * HOUR, "gpu_type": None} for job in (1, 2))
    result = analysed(rows, jobs(*outcome))
    models = dict(result.jobs.select("job_id", "gpu_model").iter_rows())
    assert models == {1: "NVIDIA A100", 2: None}


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
def test_label_identifies_the_run(analysed: Analysed, node: Rows, jobs: Jobs, label: str, ids: dict[str, int]) -> None:
    """The label may be a raw ID, a displayed ID or a step ID; only one of the two GPUs is labeled."""
    result = analysed(node({}, {"job": label}), jobs({**ids, "start": 0, "end": HOUR}))
    assert how(result) == {ids["job_id"]: ("labels", 0, pytest.approx(1))}
    assert issue(result, "label-mismatch") is None
    assert result.quality.mapped_runs == {"labels": 1, "recorded": 0, "whole-node": 0, "unknown": 0}


def test_labels_distinguish_array_tasks(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    outcome = jobs(
        {"job_id": 11, "array_job_id": 10, "array_task_id": 1, "start": 0, "end": HOUR},
        {"job_id": 10, "array_job_id": 10, "array_task_id": 2, "start": 0, "end": HOUR},
    )
    result = analysed(node({"job": "10_1"}, {"job": "10_2"}), outcome)
    assert how(result) == {11: ("labels", 1, 0), 10: ("labels", 0, 1)}


def test_labels_outside_the_interval_are_ignored(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The file of a day also contains labels of runs before and after the requested interval."""
    before, after = (samples([time], job=job, util_pct=0) for time, job in ((60.0, "98"), (7200.0, "99")))
    rows = [*before, *samples([HOUR + time for time in TIMES[:30]], job="1", util_pct=90), *after]
    result = analysed(rows, jobs({"start": HOUR, "end": HOUR + 1800}), since=HOUR, until=HOUR + 1800)
    assert how(result) == {1: ("labels", 0, pytest.approx(0.5))}
    assert issue(result, "label-mismatch") is None


@pytest.mark.parametrize("label", ["99", "1_7", "nonsense"])
def test_label_without_matching_run_is_reported(analysed: Analysed, node: Rows, jobs: Jobs, label: str) -> None:
    """Accounting has no such job, so the label does not assign the GPU."""
    result = analysed(node({"job": label}, {}), jobs({"start": 0, "end": HOUR}))
    assert how(result) == {1: ("unknown", None, None)}
    outcome = issue(result, "label-mismatch")
    assert outcome is not None
    assert (outcome.count, outcome.examples) == (1, (f"job {label} on n1: 60 samples",))


@pytest.mark.parametrize(
    "elsewhere",
    [{"node_list": "n2"}, {"cluster": "other"}, {"start": 2 * HOUR, "end": 3 * HOUR}],
    ids=["node", "cluster", "time"],
)
def test_label_must_match_node_cluster_and_time(
    analysed: Analysed, node: Rows, jobs: Jobs, elsewhere: dict[str, Any]
) -> None:
    """The label may come from an old mapping file, or from a job with the same ID in another cluster."""
    outcome = jobs(
        {"job_id": 1, "start": 0, "end": HOUR, **elsewhere},
        {"job_id": 2, "start": 0, "end": HOUR, "node_list": "n5"},
    )
    result = analysed(node({"job": "1"}, {}), outcome, until=4 * HOUR)
    assert how(result)[1] == ("unknown", None, None)
    assert issue(result, "label-mismatch") is not None


def ambiguous(result: WasteResult) -> tuple[int, float | None] | None:
    """Return the number of runs with ambiguous evidence, and their unmapped hours."""
    outcome = issue(result, "ambiguous-gpus")
    return None if outcome is None else (outcome.count, pytest.approx(outcome.gpu_hours))


def test_labels_beyond_allocated_gpu_count_are_ambiguous(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """An aborted run left its mapping file behind: either of the two labeled GPUs may be the job's."""
    rows = node({"job": lambda t: "1" if t < 600 else None}, {"job": "1"})
    result = analysed(rows, jobs({"start": 0, "end": HOUR}))
    assert how(result) == {1: ("unknown", None, None)}
    assert ambiguous(result) == (1, 1)
    assert issue(result, "label-mismatch") is not None


def test_labels_on_gpus_of_other_runs_are_excluded(analysed: Analysed, node: Rows, jobs: Jobs, at: Any) -> None:
    """Two of three labeled GPUs belong to other runs, by a label and by a record, so the third is the job's."""
    record = {"cluster": "c", "job_id": 3, "start": at(0), "node": "n1", "gpu": "2"}
    outcome = jobs(*({"job_id": number, "start": 0, "end": HOUR} for number in (1, 2, 3)))
    result = analysed(node({"job": "1,2"}, {"job": "1"}, {"job": "1"}), outcome, recorded=[record])
    assert how(result) == {1: ("labels", 0, 1), 2: ("labels", 1, 0), 3: ("recorded", 0, 1)}
    assert ambiguous(result) is None


def test_records_decide_ambiguous_labels(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    record = {"cluster": "c", "job_id": 1, "node": "n1", "gpu": "1"}
    result = analysed(node({"job": "1"}, {"job": "1"}), jobs({"start": 0, "end": HOUR}), recorded=[record])
    assert how(result) == {1: ("recorded", 0, 1)}


@pytest.mark.parametrize("gpus", [1, None], ids=["one instance each", "not tracked"])
def test_mig_instances_labeled_with_all_jobs_of_their_gpu_are_ambiguous(
    analysed: Analysed, samples: Rows, jobs: Jobs, gpus: int | None
) -> None:
    """As with dcgm-exporter: the busy job must not get the idle instance."""
    rows = [row for n in (1, 2) for row in samples(TIMES, mig=str(n), engine_active=n - 1, job="1,2")]
    outcome = jobs(*({"job_id": number, "start": 0, "end": HOUR, "gpus": gpus} for number in (1, 2)))
    result = analysed(rows, outcome)
    assert result.total["gpu_hours_idle"] in {0, None}
    if gpus:
        assert how(result) == {1: ("unknown", None, None), 2: ("unknown", None, None)}
        assert ambiguous(result) == (2, 2)


def test_record_of_one_job_decides_labels_of_mig_instances(
    analysed: Analysed, samples: Rows, jobs: Jobs, at: Any
) -> None:
    """The second instance is left for the other job, also if it had more instances than the metrics show."""
    rows = [row for n in (1, 2) for row in samples(TIMES, mig=f"MIG-{n}", engine_active=n - 1, job="1,2")]
    record = {"cluster": "c", "job_id": 1, "start": at(0), "node": "n1", "gpu": "MIG-2"}
    for other in (1, 2):
        result = jobs({"job_id": 1, "start": 0, "end": HOUR}, {"job_id": 2, "start": 0, "end": HOUR, "gpus": other})
        assert how(analysed(rows, result, recorded=[record])) == {1: ("recorded", 0, 1), 2: ("labels", 1, 0)}


def test_array_id_as_label_of_concurrent_tasks_is_ambiguous(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """Only one GPU has metrics; the label does not say which task has it."""
    tasks = [{"job_id": 10 + n, "array_job_id": 10, "array_task_id": n, "start": 0, "end": HOUR} for n in (1, 2)]
    result = analysed(node({"job": "10"}), jobs(*tasks))
    assert how(result) == {11: ("unknown", None, None), 12: ("unknown", None, None)}
    assert ambiguous(result) == (2, 2)
    one_by_one = [{**tasks[0], "end": 1800}, {**tasks[1], "start": 1800}]
    assert how(analysed([], jobs(*one_by_one))) == {11: ("labels", 0.5, 0), 12: ("labels", 0.5, 0)}


def test_label_that_continues_after_midnight_is_one_label(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The label of job 10, which ended before midnight, was left; it is not the array ID of job 11 the day after."""
    midnight = 16 * HOUR
    times = [midnight - HOUR + 60.0 * k for k in range(120)]
    tasks = [
        {"job_id": 9 + n, "array_job_id": 10, "array_task_id": n, "start": midnight - HOUR, "end": midnight + end}
        for n, end in ((1, -1800), (2, HOUR))
    ]
    record = {"cluster": "c", "job_id": 11, "node": "n1", "gpu": "0"}
    result = analysed(samples(times, job="10"), jobs(*tasks), until=midnight + HOUR, recorded=[record])
    assert how(result)[11][0] == "recorded"


def test_gpu_that_appears_after_the_interval_is_not_counted(
    analysed: Analysed, samples: Rows, node: Rows, jobs: Jobs
) -> None:
    """Its samples are on the last day of the interval; without a PCI address or an index it may be a replacement."""
    later = samples([2 * HOUR + t for t in TIMES], uuid="GPU-later", index=None)
    rows = [{**row, "pci": None, "index": None} for row in node({}, {})]
    result = analysed([*rows, *later], jobs({"start": -HOUR, "end": HOUR, "gpus": 2}), since=0, until=HOUR)
    assert how(result) == {1: ("whole-node", pytest.approx(1), pytest.approx(1))}


def test_labels_must_leave_a_gpu_for_each_other_node(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """One of the two labels is left over: the second of two GPUs is on the other node, which has no metrics."""
    outcome = jobs({"start": 0, "end": HOUR, "gpus": 2, "nodes": 2, "node_list": "n[1-2]"})
    result = analysed(node({"job": "1"}, {"job": "1"}), outcome)
    assert how(result) == {1: ("unknown", None, None)}
    assert ambiguous(result) == (1, 2)


@pytest.mark.parametrize("gpu", ["GPU-n1-1", "gpu-N1-1", "00000000:02:00.0", "0000:02:00.0", "02:00.0", "1"])
def test_recorded_id_identifies_the_gpu(analysed: Analysed, node: Rows, jobs: Jobs, gpu: str) -> None:
    """The ID is a UUID, a PCI address in any form, or the index on the node."""
    record = {"cluster": "c", "job_id": 1, "node": "n1", "gpu": gpu}
    result = analysed(node({}, {}), jobs({"start": 0, "end": HOUR}), recorded=[record])
    assert how(result) == {1: ("recorded", 0, pytest.approx(1))}


def test_recorded_id_applies_to_its_own_attempt(analysed: Analysed, node: Rows, jobs: Jobs, at: Any) -> None:
    """A requeued job has a different GPU in each attempt."""
    result = jobs(
        {"start": 0, "end": 1800},
        {"submit": 1800, "start": 1800, "end": HOUR},
    )
    records = [
        {"cluster": "c", "job_id": 1, "start": at(0), "node": "n1", "gpu": "0"},
        {"cluster": "c", "job_id": 1, "start": at(1800), "node": "n1.example.org", "gpu": "1"},
    ]
    rows = analysed(node({}, {}), result, recorded=records).jobs.sort("submit")
    assert rows.select("mapping", "gpu_hours_idle", "gpu_hours_busy").rows() == [
        ("recorded", pytest.approx(0.5), 0),
        ("recorded", 0, pytest.approx(0.5)),
    ]


@pytest.mark.parametrize("gpus", [1, 2])
def test_recorded_ids_without_start_are_ambiguous_after_requeue(
    analysed: Analysed, node: Rows, jobs: Jobs, gpus: int
) -> None:
    """Which attempt had which GPU is unknown, also if there is one record for one of two attempts."""
    outcome = jobs({"start": 0, "end": 1800}, {"start": 1800, "end": HOUR, "submit": 10})
    recorded = [{"cluster": "c", "job_id": 1, "node": "n1", "gpu": str(gpu)} for gpu in range(gpus)]
    result = analysed(node({}, {}), outcome, recorded=recorded)
    assert result.jobs["mapping"].to_list() == ["unknown", "unknown"]
    undated = issue(result, "undated-records")
    assert undated is not None
    assert (undated.count, undated.gpu_hours) == (1, 1)
    once = analysed(node({}, {}), jobs({"start": 0, "end": HOUR, "gpus": gpus}), recorded=recorded)
    assert how(once) == {1: ("recorded", 1, gpus - 1)}


@pytest.mark.parametrize(("gpus", "expected"), [(1, ("unknown", None, None)), (2, ("recorded", 1, 1))])
def test_recorded_id_of_gpu_with_mig_matches_all_instances(
    analysed: Analysed, samples: Rows, jobs: Jobs, gpus: int, expected: tuple[str, float, float]
) -> None:
    """The run is mapped only if it has as many GPUs as there are instances."""
    rows = samples(TIMES, util_pct=None, power_w=300)
    rows += samples(TIMES, mig="1", engine_active=0) + samples(TIMES, mig="2", engine_active=0.9)
    rows += samples(TIMES, uuid="GPU-1", index=1)
    recorded = [{"cluster": "c", "job_id": 1, "node": "n1", "gpu": "GPU-0"}]
    assert how(analysed(rows, jobs({"start": 0, "end": HOUR, "gpus": gpus}), recorded=recorded)) == {1: expected}


def test_recorded_mig_uuid_identifies_the_instance(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The metrics identify MIG instances by NVIDIA's MIG UUID or by number, which is not a GPU index."""
    rows = [row for n in (1, 2) for row in samples(TIMES, uuid=None, index=None, mig=f"MIG-a{n}", engine_active=n - 1)]
    recorded = [{"cluster": "c", "job_id": 1, "node": "n1", "gpu": "MIG-A2"}]
    result = jobs({"start": 0, "end": HOUR})
    assert how(analysed(rows, result, recorded=recorded)) == {1: ("recorded", 0, 1)}


def test_recorded_index_without_node_is_ignored(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """A UUID needs no node."""
    outcome = jobs({"start": 0, "end": HOUR})
    assert how(analysed(node({}, {}), outcome, recorded=[{"job_id": 1, "gpu": "1"}])) == {1: ("unknown", None, None)}
    result = analysed([], outcome, recorded=[{"job_id": 1, "gpu": "GPU-n1-1"}])
    assert how(result) == {1: ("recorded", 0, pytest.approx(1))}


def test_contradicting_label_and_record_are_ambiguous(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """GPUs that both name are still certain."""
    record = {"cluster": "c", "job_id": 1, "node": "n1", "gpu": "1"}
    result = analysed(node({"job": "1"}, {}), jobs({"start": 0, "end": HOUR}), recorded=[record])
    assert how(result) == {1: ("unknown", None, None)}
    assert ambiguous(result) == (1, 1)
    both = jobs({"start": 0, "end": HOUR, "gpus": 2})
    more = [{**record, "gpu": "GPU-n1-0"}, record]
    rows = node({"job": "1"}, {}, {"job": "1"}, name="n2")
    agreed = analysed(rows, both.with_columns(node_list=pl.lit("n2")), recorded=[{**r, "node": "n2"} for r in more])
    assert how(agreed) == {1: ("unknown", None, None)}


def test_run_with_all_gpus_of_a_node_is_mapped(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """The run has both GPUs of the node; the only other job there uses no GPU."""
    result = jobs(
        {"job_id": 1, "start": 0, "end": HOUR, "gpus": 2},
        {"job_id": 2, "start": 0, "end": HOUR, "gpus": 0},
    )
    assert how(analysed(node({}, {}), result)) == {1: ("whole-node", 1, 1)}


def test_run_with_all_gpus_of_several_nodes_is_mapped(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """The run has three GPUs: two on one node and one on the other."""
    rows = node({}, {}) + node({}, name="n2")
    result = analysed(rows, jobs({"start": 0, "end": HOUR, "gpus": 3, "nodes": 2, "node_list": "n[1-2]"}))
    assert how(result) == {1: ("whole-node", 2, 1)}
    by_node = result.groups["node"].select("name", "gpu_hours_allocated").rows()
    assert {name: round(hours, 9) for name, hours in by_node} == {"n1": 2, "n2": 1}


@pytest.mark.parametrize("when", ["interval", "days before"])
def test_node_with_missing_gpu_metrics_is_not_mapped(
    analysed: Analysed, node: Rows, jobs: Jobs, samples: Rows, when: str
) -> None:
    """Only two of four GPUs are sampled, so which two a job holds is unknown even if it runs alone."""
    begin = 1800 if when == "interval" else -26 * HOUR
    rows = node({}, {"util_pct": 0})
    for number in (2, 3):
        identity = {"uuid": f"GPU-n1-{number}", "pci": f"00000000:{number + 1:02X}:00.0", "index": number}
        rows += samples([begin + time for time in TIMES[:20]], **identity, util_pct=50)
    start = 1800 + 1200 if when == "interval" else 0
    result = analysed(rows, jobs({"start": start, "end": HOUR, "gpus": 2}))
    assert how(result) == {1: ("unknown", None, None)}


@pytest.mark.parametrize("other", ["", "n2"])
def test_gpus_not_seen_for_a_week_are_not_counted(
    analysed: Analysed, node: Rows, jobs: Jobs, samples: Rows, other: str
) -> None:
    """The node was rebuilt with two GPUs; another one may have samples on that day and within the week."""
    week = 7 * 24 * HOUR
    old = [samples([-week - HOUR + time for time in TIMES], uuid=f"GPU-old-{k}", index=k) for k in range(4)]
    rows = [*node({}, {}), *old[2], *old[3]]
    if other:
        rows += samples([-week + HOUR], node=other, uuid="GPU-other")
    result = analysed(rows, jobs({"start": 0, "end": HOUR, "gpus": 2}))
    assert how(result) == {1: ("whole-node", 1, 1)}


@pytest.mark.parametrize("mark", ["pci", "index"])
def test_replacement_gpu_takes_slot_of_old_gpu(
    analysed: Analysed, node: Rows, jobs: Jobs, samples: Rows, mark: str
) -> None:
    """One of two GPUs was replaced a day before."""
    place = {"pci": "00000000:02:00.0", "index": 1} if mark == "pci" else {"index": 1}
    rows = node({} if mark == "pci" else {"pci": None}, {} if mark == "pci" else {"pci": None})
    rows += samples([time - 24 * HOUR for time in TIMES], uuid="GPU-broken", **place)
    assert how(analysed(rows, jobs({"start": 0, "end": HOUR, "gpus": 2}))) == {1: ("whole-node", 1, 1)}


def test_gpu_replaced_during_run_counts_as_one(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The GPUs in one slot were the run's one after the other."""
    rows = samples(TIMES[:20], uuid="GPU-a", util_pct=0) + samples(TIMES[20:], uuid="GPU-b", util_pct=90)
    for label in ({}, {"job": "1"}):
        result = analysed([{**row, **label} for row in rows], jobs({"start": 0, "end": HOUR}))
        assert how(result) == {1: ("labels" if label else "whole-node", pytest.approx(1 / 3), pytest.approx(2 / 3))}
        assert result.total["gpu_hours_allocated"] == result.total["gpu_hours_capacity"] == pytest.approx(1)
        assert result.total["gpu_hours_unmapped"] == pytest.approx(0)


def test_lost_gpu_is_counted_when_indices_shift(analysed: Analysed, node: Rows, jobs: Jobs, samples: Rows) -> None:
    """The second of three GPUs is lost and the third takes its index; which two GPUs a job has is unknown."""
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
    """Accounting or recorded IDs show more GPUs at another time than were ever sampled."""
    first_run = {"job_id": 1, "start": 0, "end": HOUR, "gpus": 2}
    if other == "two runs at once":
        later = [{"job_id": number, "start": HOUR, "end": 2 * HOUR, "gpus": gpus} for number, gpus in ((2, 2), (3, 1))]
    else:
        later = [{"job_id": 2, "start": HOUR, "end": 2 * HOUR, **other}]
    ids = [] if record is None else [record] if isinstance(record, str) else record
    records = [{"cluster": "c", "job_id": 2, "node": "n1", "gpu": item, "start": at(HOUR)} for item in ids]
    result = analysed(node({}, {}), jobs(first_run, *later), recorded=records)
    assert how(result)[1] == ("unknown", None, None)


@pytest.mark.parametrize("names", [("GPU-n1-0", "00000000:01:00.0"), ("GPU-n1-0", "0", "1:00.0")])
def test_names_of_one_gpu_in_records_are_one_gpu(
    analysed: Analysed, node: Rows, jobs: Jobs, at: Any, names: tuple[str, ...]
) -> None:
    """Records of another run name the only GPU of the node twice."""
    records = [{"cluster": "c", "job_id": 2, "node": "n1", "gpu": name, "start": at(HOUR)} for name in names]
    both = jobs({"start": 0, "end": HOUR}, {"job_id": 2, "start": HOUR, "end": 2 * HOUR})
    assert how(analysed(node({}), both, recorded=records))[1] == ("whole-node", 1, 0)


@pytest.mark.parametrize("gpu", ["GPU-lost", "00000000:99:00.0"])
def test_recorded_gpu_without_samples_is_not_another_gpu(analysed: Analysed, node: Rows, jobs: Jobs, gpu: str) -> None:
    """The recorded GPU has no samples; the only sampled GPU is a different one."""
    records = [{"cluster": "c", "job_id": 1, "node": "n1", "gpu": gpu}]
    result = analysed(node({}), jobs({"start": 0, "end": HOUR}), recorded=records)
    assert how(result) == {1: ("unknown", None, None)}


def test_recorded_gpu_without_samples_counts_on_its_node(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """One of three GPUs is on the first node, which has no metrics; two remain for the second node, which has three."""
    records = [{"cluster": "c", "job_id": 1, "node": "n1", "gpu": "GPU-lost"}]
    result = jobs({"start": 0, "end": HOUR, "gpus": 3, "nodes": 2, "node_list": "n[1-2]"})
    assert how(analysed(node({}, {}, {}, name="n2"), result, recorded=records)) == {1: ("unknown", None, None)}


def test_node_with_unsampled_lower_gpu_indices_is_not_mapped(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """GPUs 2 and 3 cannot be the only GPUs of a node."""
    rows = node({"index": 2}, {"index": 3})
    assert how(analysed(rows, jobs({"start": 0, "end": HOUR, "gpus": 2}))) == {1: ("unknown", None, None)}


def test_consecutive_runs_do_not_add_up_to_more_gpus(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """The second run starts at the moment at which the first ends."""
    result = jobs(
        {"job_id": 1, "start": 0, "end": 1800, "gpus": 2},
        {"job_id": 2, "start": 1800, "end": HOUR, "gpus": 2},
    )
    assert {word for word, _, _ in how(analysed(node({}, {}), result)).values()} == {"whole-node"}


@pytest.mark.parametrize("second", ["record", "whole node"])
def test_label_on_one_node_keeps_evidence_of_other_nodes(
    analysed: Analysed, node: Rows, jobs: Jobs, second: str
) -> None:
    """The exporter of one of the two nodes gives no job labels."""
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


def test_labels_and_whole_nodes_do_not_exceed_allocated_gpus(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """Labels identify three of six GPUs on one node; which of the other two nodes had how many is unknown."""
    rows = node({"job": "1"}, {"job": "1"}, {"job": "1"}) + node({}, {}, name="n2") + node({}, {}, name="n3")
    result = analysed(rows, jobs({"start": 0, "end": HOUR, "gpus": 6, "nodes": 3, "node_list": "n[1-3]"}))
    assert how(result)[1][0] == "labels"
    assert result.total["gpu_hours_allocated"] == pytest.approx(6)
    assert result.total["gpu_hours_unmapped"] == pytest.approx(3)


def test_label_on_one_gpu_keeps_recorded_ids_of_others(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """Both GPUs are on one node; the label of the second is missing."""
    records = [{"cluster": "c", "job_id": 1, "node": "n1", "gpu": gpu} for gpu in ("0", "1")]
    result = analysed(node({"job": "1"}, {}, {}), jobs({"start": 0, "end": HOUR, "gpus": 2}), recorded=records)
    assert how(result) == {1: ("recorded", 1, 1)}


def test_recorded_id_contradicting_label_adds_no_gpu(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """The label and the recorded ID name different GPUs; the run had only one GPU on this node."""
    records = [{"cluster": "c", "job_id": 1, "node": "n1", "gpu": "1"}]
    outcome = jobs({"start": 0, "end": HOUR, "gpus": 2, "nodes": 2, "node_list": "n[1-2]"})
    result = analysed(node({"job": "1"}, {}), outcome, recorded=records)
    assert how(result) == {1: ("unknown", None, None)}
    assert result.total["gpu_hours_unknown"] == pytest.approx(2)


def test_gpu_with_samples_ending_early_still_counts(analysed: Analysed, node: Rows, jobs: Jobs, samples: Rows) -> None:
    """The run had both GPUs; only the time of the GPU without samples is unknown."""
    rows = node({}) + samples(TIMES[:20], node="n1", uuid="GPU-early", index=1, util_pct=50)
    result = analysed(rows, jobs({"start": HOUR // 2, "end": HOUR, "gpus": 2}))
    assert how(result) == {1: ("whole-node", 0.5, 0)}
    assert result.total["gpu_hours_unknown"] == pytest.approx(0.5)


def test_run_without_samples_is_not_mapped(analysed: Analysed, node: Rows, jobs: Jobs, samples: Rows) -> None:
    """The samples of the node end before the run starts."""
    rows = samples(TIMES[:20], node="n1", util_pct=50)
    assert how(analysed(rows, jobs({"start": HOUR // 2, "end": HOUR, "gpus": 1}))) == {1: ("unknown", None, None)}


def test_run_is_partly_mapped_if_one_node_has_no_metrics(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """With the same number of GPUs on both nodes, the GPUs of the sampled node are known."""
    result = analysed(node({}, {}), jobs({"start": 0, "end": HOUR, "gpus": 4, "nodes": 2, "node_list": "n[1-2]"}))
    assert how(result) == {1: ("whole-node", 1, 1)}
    assert result.total["gpu_hours_unknown"] == pytest.approx(2)
    outcome = issue(result, "partly-mapped")
    assert outcome is not None
    assert (outcome.count, outcome.gpu_hours) == (1, pytest.approx(2))


@pytest.mark.parametrize(
    "others",
    [[], [{"job_id": 2, "start": HOUR - 1, "end": HOUR, "gpus": 2}]],
    ids=["fewer GPUs than the node has", "another run on the node"],
)
def test_unmapped_run_is_reported_as_unknown(
    analysed: Analysed, node: Rows, jobs: Jobs, others: list[dict[str, Any]]
) -> None:
    """All hours of the run are unknown, none idle."""
    unmapped = {"job_id": 1, "start": 0, "end": HOUR, "gpus": 2 if others else 1}
    result = analysed(node({}, {}), jobs(unmapped, *others))
    row = result.jobs.row(by_predicate=pl.col("job_id") == 1, named=True)
    assert (row["mapping"], row["idle_fraction"]) == ("unknown", None)
    assert row["gpu_hours_unknown"] == pytest.approx(unmapped["gpus"])
    outcome = issue(result, "unmapped-gpus")
    assert outcome is not None
    assert outcome.count == 1 + len(others)
    assert "job 1 of ann on n1" in outcome.examples


def test_consecutive_runs_each_have_the_whole_node(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """Intervals are half-open: a run that starts when another ends is alone on the node."""
    result = jobs(*({"job_id": n, "start": s, "end": s + 1800, "gpus": 2} for n, s in ((1, 0), (2, 1800))))
    assert how(analysed(node({}, {}), result)) == {1: ("whole-node", 0.5, 0.5), 2: ("whole-node", 0.5, 0.5)}


def test_unmapped_run_has_gpu_model_of_its_node(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """On a node with several models the GPU type from accounting is used."""
    rows = node({}, {}) + node({}, {"model": "NVIDIA H100 80GB HBM3"}, name="n2")
    outcome = jobs(
        {"job_id": 1, "start": 0, "end": HOUR, "gpu_type": None},
        {"job_id": 2, "start": 0, "end": HOUR, "gpu_type": "h100", "node_list": "n2"},
        {"job_id": 3, "start": 0, "end": HOUR, "gpu_type": None, "node_list": "n3"},
    )
    result = analysed(rows, outcome)
    models = dict(result.jobs.select("job_id", "gpu_model").rows())
    assert models == {1: "NVIDIA A100-SXM4-80GB", 2: "h100", 3: None}
    assert set(result.groups["gpu_model"]["name"]) == set(models.values())


def test_mig_instances_count_as_gpus_without_their_parent(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Two runs have one instance each; the series of the parent GPU counts neither as allocated nor as free."""
    rows = samples(TIMES, util_pct=None, power_w=300)
    for mig, engine in (("1", 0.0), ("2", 0.9)):
        rows += samples(TIMES, mig=mig, mig_profile="1g.10gb", engine_active=engine, job=mig)
    outcome = jobs(*({"job_id": n, "start": 0, "end": HOUR} for n in (1, 2)))
    result = analysed(rows, outcome)
    assert how(result) == {1: ("labels", 1, 0), 2: ("labels", 0, 1)}
    assert (result.quality.devices, result.total["unallocated_gpu_hours"]) == (2, 0)
    assert result.total["util_mean_pct"] is None
    assert result.groups["gpu_model"]["name"].to_list() == ["NVIDIA A100-SXM4-80GB MIG 1g.10gb"]


def test_run_with_all_mig_instances_of_a_node_is_mapped(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The parent GPU is not counted for whole nodes either."""
    rows = samples(TIMES, util_pct=0)
    rows += samples(TIMES, mig="1", engine_active=0) + samples(TIMES, mig="2", engine_active=0.9)
    assert how(analysed(rows, jobs({"start": 0, "end": HOUR, "gpus": 2}))) == {1: ("whole-node", 1, 1)}


def test_single_cluster_matches_under_different_names(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """Exporters seldom know the cluster name of Slurm: a single cluster on each side is the same cluster."""
    result = analysed(node({}), jobs({"start": 0, "end": HOUR, "cluster": "slurm-name"}))
    assert how(result) == {1: ("whole-node", 1, 0)}
    again = analysed(node({}, {}), jobs({"start": 0, "end": HOUR, "cluster": "slurm-name", "gpu_type": None}))
    assert again.jobs["gpu_model"].to_list() == ["NVIDIA A100-SXM4-80GB"]
    unmapped = issue(again, "unmapped-gpus")
    assert unmapped is not None
    assert "--cluster" not in unmapped.detail


def test_run_with_invalid_node_list_is_not_mapped(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """Its hours are kept as unknown, on no known node."""
    result = analysed(node({}), jobs({"start": 0, "end": HOUR, "node_list": "n[1-"}))
    assert how(result) == {1: ("unknown", None, None)}
    assert result.groups["node"]["name"].to_list() == [None]
    assert result.total["gpu_hours_unknown"] == pytest.approx(1)


def test_hours_are_broken_down_by_mapping(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """The hours by mapping add up in the total, in each group and over all runs."""
    rows = node({"job": "1"}, {}) + node({}, name="n2") + node({}, {}, name="n3")
    outcome = jobs(
        {"job_id": 1, "start": 0, "end": HOUR, "gpus": 3, "nodes": 2, "node_list": "n[1-2]"},
        {"job_id": 2, "start": 0, "end": HOUR, "gpus": 1, "node_list": "n3"},
    )
    record = {"cluster": "c", "job_id": 1, "node": "n1", "gpu": "1"}
    second = {"cluster": "c", "job_id": 1, "node": "n1", "gpu": "0"}
    result = analysed(rows, outcome, recorded=[record, second])
    names = ("by_labels", "by_records", "by_whole_node", "unmapped")
    expected = [1, 1, 1, 1]
    assert [result.total[f"gpu_hours_{name}"] for name in names] == pytest.approx(expected)
    for frame in (result.jobs, *result.groups.values()):
        assert [frame[f"gpu_hours_{name}"].sum() for name in names] == pytest.approx(expected)


DAY = 24 * HOUR


def test_job_lost_by_slurm_holds_nothing_after_its_time_limit(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """Accounting shows it as running two years after its limit of an hour; another job has the node since."""
    outcome = jobs(
        {"job_id": 1, "start": -700 * DAY, "elapsed_s": 700 * DAY + HOUR, "timelimit_s": HOUR, "state": "RUNNING"},
        {"job_id": 2, "start": 0, "end": HOUR},
    )
    result = analysed(node({}), outcome, until=HOUR, known_until={"c": T0 + timedelta(hours=1)})
    assert how(result) == {1: ("unknown", None, None), 2: ("whole-node", 1, 0)}
    assert result.total["unallocated_gpu_hours"] == 0
    lost = issue(result, "runaway-jobs")
    assert lost is not None
    assert (lost.count, lost.gpu_hours, "runawayjobs" in lost.detail) == (1, 1, True)
    assert lost.examples == ("job 1 of ann on n1",)


def test_job_is_credible_until_its_time_limit(analysed: Analysed, node: Rows, jobs: Jobs) -> None:
    """The half hour within the limit is measured; a suspended job does not exceed its limit."""
    rows = [{**row, "time": row["time"] + timedelta(hours=hours)} for hours in (0, 60) for row in node({})]
    job = {"job_id": 1, "start": 0, "timelimit_s": 1800, "state": "RUNNING"}
    until = {"until": 61 * HOUR, "known_until": {"c": T0 + timedelta(hours=61)}}
    result = analysed(rows, jobs({**job, "elapsed_s": 61 * HOUR}), **until)
    assert how(result) == {1: ("whole-node", 0.5, 0)}
    assert result.total["gpu_hours_unknown"] == pytest.approx(60.5)
    assert result.total["gpu_hours_capacity"] == pytest.approx(61)
    assert how(analysed([], jobs({**job, "elapsed_s": 1700}), **until))[1][1] == pytest.approx(2)


def test_gpu_is_one_if_the_metrics_name_it_differently_on_another_day(
    analysed: Analysed, samples: Rows, jobs: Jobs
) -> None:
    """Only the index is known before midnight, the UUID from then on."""
    names = (lambda gpu: {"uuid": None, "index": gpu}, lambda gpu: {"uuid": f"GPU-{gpu}", "index": gpu})
    hours = {15: names[0], 16: names[1]}
    rows = [row for hour, name in hours.items() for gpu in range(4)
            for row in samples([hour * HOUR + t for t in TIMES], util_pct=0, **name(gpu))]  # fmt: skip
    interval = {"since": 15 * HOUR, "until": 17 * HOUR}
    free = analysed(rows, jobs({"start": 0, "end": 20 * HOUR, "gpus": 0}), **interval)
    assert free.total["gpu_hours_capacity"] == pytest.approx(8)
    result = analysed([], jobs({"start": 15 * HOUR, "end": 17 * HOUR, "gpus": 4}), **interval)
    assert how(result) == {1: ("whole-node", 8, 0)}
    assert result.total["gpu_hours_capacity"] == pytest.approx(8)
    assert result.quality.devices == 4


def replaced(samples: Rows, **unnamed: Any) -> list[dict[str, Any]]:
    """Return samples of a GPU that is replaced after 20 minutes; another source names it by its index only."""
    rows = samples(TIMES[:20], uuid="GPU-a", util_pct=0) + samples(TIMES[20:], uuid="GPU-b", util_pct=90)
    return rows + samples(TIMES, uuid=None, **{"util_pct": 90, **unnamed})


@pytest.mark.parametrize("index", [0, None])
def test_replaced_gpu_with_two_sources_counts_once(
    analysed: Analysed, samples: Rows, jobs: Jobs, index: int | None
) -> None:
    """The source without UUIDs names neither a further GPU nor a further hour of one."""
    rows = replaced(samples)
    recorded = [] if index is None else [{"cluster": "c", "job_id": 1, "node": "n1", "gpu": "0"}]
    result = analysed(rows, jobs({"start": 0, "end": HOUR}), recorded=recorded)
    kind = "whole-node" if index is None else "recorded"
    assert how(result) == {1: (kind, pytest.approx(1 / 3), pytest.approx(2 / 3))}
    assert result.total["gpu_hours_measured"] == pytest.approx(1)
    assert result.total["gpu_hours_capacity"] == result.total["gpu_hours_allocated"] == pytest.approx(1)


def test_label_of_a_source_without_uuids_names_the_gpu_of_the_slot(
    analysed: Analysed, samples: Rows, jobs: Jobs
) -> None:
    """Both GPUs of the slot were the run's, one after the other."""
    result = analysed(replaced(samples, job="1"), jobs({"start": 0, "end": HOUR}))
    assert how(result) == {1: ("labels", pytest.approx(1 / 3), pytest.approx(2 / 3))}
    assert result.total["gpu_hours_capacity"] == pytest.approx(1)


@pytest.mark.parametrize("gpus", [0, None])
def test_record_of_a_run_without_gpus_in_accounting_names_its_gpu(
    analysed: Analysed, node: Rows, jobs: Jobs, gpus: int | None
) -> None:
    """As for a job with shards of a GPU."""
    record = {"cluster": "c", "job_id": 1, "node": "n1", "gpu": "1"}
    result = analysed(node({}, {}), jobs({"start": 0, "end": HOUR, "gpus": gpus}), recorded=[record])
    assert how(result) == {1: ("recorded", 0, 1)}
    assert ambiguous(result) is None


def test_samples_without_uuid_count_while_the_slot_has_no_others(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The source with UUIDs starts late, and has a gap while the GPU is replaced."""
    rows = samples(TIMES[10:20], uuid="GPU-a", util_pct=0) + samples(TIMES[30:], uuid="GPU-b", util_pct=0)
    rows += samples(TIMES, uuid=None, util_pct=90)
    result = analysed(rows, jobs({"start": 0, "end": HOUR}))
    assert how(result) == {1: ("whole-node", pytest.approx(2 / 3), pytest.approx(1 / 3))}
    assert result.total["gpu_hours_capacity"] == pytest.approx(1)


def test_time_in_a_slot_is_shared_and_suspended_once(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A run without a whole GPU has its time on a replaced GPU once; it was suspended once."""
    rows = samples(TIMES[:30], uuid="GPU-a", util_pct=0, job="1") + samples(
        TIMES[30:], uuid="GPU-b", util_pct=0, job="1"
    )
    result = analysed(rows, jobs({"start": 0, "end": HOUR, "gpus": 0, "suspended_s": 600}))
    assert result.total["gpu_hours_allocated"] == result.total["gpu_hours_capacity"] == pytest.approx(1)
    assert result.total["gpu_hours_idle"] == pytest.approx(5 / 6)


def test_run_in_a_repeated_hour_leaves_the_mapping_of_its_node(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Job 2 may have run in the first hour, when job 1 ran, or in the second. Only its own hour is unknown.

    Whether job 3 had the node alone is not known either.
    """
    rows = [row for hour in range(4) for row in samples([hour * HOUR + t for t in TIMES], util_pct=0)]
    doubt = {"start": 600, "end": 2400, "time_doubt_s": HOUR}
    outcome = jobs({"job_id": 1, "start": 0, "end": HOUR}, {"job_id": 2, **doubt},
                 {"job_id": 3, "start": HOUR, "end": 2 * HOUR}, {"job_id": 4, "start": 2 * HOUR, "end": 3 * HOUR},
                 )  # fmt: skip
    result = analysed(rows, outcome, until=4 * HOUR)
    assert how(result)[4] == ("whole-node", 1, 0)
    assert [how(result)[job][0] for job in (1, 2, 3)] == ["unknown"] * 3
    item = issue(result, "repeated-hour")
    assert item is not None
    assert (item.count, item.gpu_hours) == (1, 0.5)


def test_long_run_that_starts_in_a_repeated_hour_has_its_certain_time(
    analysed: Analysed, samples: Rows, jobs: Jobs
) -> None:
    """Its first hour is unknown."""
    rows = [row for hour in range(4) for row in samples([hour * HOUR + t for t in TIMES], util_pct=0)]
    result = analysed(rows, jobs({"start": 0, "end": 4 * HOUR, "time_doubt_s": HOUR}), until=4 * HOUR)
    assert how(result) == {1: ("whole-node", 3, 0)}
    assert result.total["gpu_hours_unknown"] == 1


def test_plain_job_ids_are_read_as_by_the_pattern() -> None:
    """The fast path accepts nothing that a job ID cannot be."""
    texts = [
        "1", "0012", "12_3", "12+1", "+5", "-0", "-5", " 5", "5 ", "5\n", "1" * 11, "1" * 12, "9" * 20, "", "x", "1.0",
        "1.batch", "12_[1-3]", "1_2.0", "\N{FULLWIDTH DIGIT ONE}", "0x10", "1e3", None,
    ]  # fmt: skip
    labels = pl.DataFrame({"label": range(len(texts)), "job": texts}, schema={"label": pl.UInt32(), "job": pl.String()})
    parts = pl.col("job").str.extract_groups(identifiers.PATTERN)
    fields = {"id": "1", "task": "2", "het": "4"}
    expected = labels.with_columns(
        parts.struct.field(field).cast(pl.Int64, strict=False).alias(name) for name, field in fields.items()
    )
    assert_frame_equal(mapping._job_ids(labels), expected)


def test_label_after_the_end_of_accounting_maps_nothing(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The job may have been requeued by then; the GPU is its by whole node, and the label is no mismatch."""
    rows = samples([60.0 * k for k in range(120)], job=lambda t: "1" if t >= 4000 else None, util_pct=0)
    result = analysed(rows, jobs({"start": 0}), known_until={"c": T0 + timedelta(hours=1)})
    assert result.quality.mapped_runs["whole-node"] == 1
    assert result.quality.mapped_runs["labels"] == 0
    assert "label-mismatch" not in {issue.code for issue in result.quality.issues}


def test_run_with_disputed_labels_may_have_a_gpu_of_the_node(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Two runs without GPUs in accounting claim one instance; either may have it while job 3 has the node."""
    instances = [("1", "1,2"), ("2", None)]
    rows = [row for mig, label in instances for row in samples(TIMES, mig=mig, util_pct=None, sm_active=0, job=label)]
    shards = [{"job_id": number, "start": 0, "end": HOUR, "gpus": 0} for number in (1, 2)]
    result = analysed(rows, jobs(*shards, {"job_id": 3, "start": 0, "end": HOUR, "gpus": 2}))
    assert how(result)[3] == ("unknown", None, None)
    alone = analysed(rows, jobs({"job_id": 3, "start": 0, "end": HOUR, "gpus": 2}))
    assert how(alone)[3] == ("whole-node", 2, 0)


@pytest.mark.parametrize("evidence", ["label", "record"])
def test_run_in_a_repeated_hour_with_evidence_may_have_a_gpu_of_the_node(
    analysed: Analysed, samples: Rows, jobs: Jobs, at: Any, evidence: str
) -> None:
    """Job 2 has no GPU in accounting; it may have run while job 1 had the node, and a label or record names its GPU."""
    label = {"job": lambda t: "2" if 4200 <= t < 6000 else None} if evidence == "label" else {}
    rows = samples([60.0 * k for k in range(180)], util_pct=0, **label)
    doubt = {"job_id": 2, "gpus": 0, "start": 600, "end": 2400, "time_doubt_s": HOUR}
    records = [{"cluster": "c", "job_id": 2, "start": at(600), "node": "n1", "gpu": "0"}]
    both = jobs({"start": HOUR, "end": 2 * HOUR}, doubt)
    result = analysed(rows, both, until=3 * HOUR, recorded=records if evidence == "record" else [])
    assert how(result)[1] == ("unknown", None, None)
    assert how(analysed(rows, jobs({"start": HOUR, "end": 2 * HOUR}), until=3 * HOUR))[1] == ("whole-node", 1, 0)


def typed(rows: Sequence[dict[str, Any]], schema: dict[str, Any]) -> pl.DataFrame:
    """Return a data frame of rows; absent columns are null."""
    return pl.DataFrame([[row.get(name) for name in schema] for row in rows], schema=schema, orient="row")


def clock(ms: int) -> datetime:
    """Return a time in ms since the epoch."""
    return datetime.fromtimestamp(ms / 1000, UTC)


IDS = ("job_id", "array_job_id", "array_task_id", "het_job_id", "het_offset")


def label_pairs(
    labels: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]], nodes: Sequence[tuple[int, str]] = ((1, "n1"),)
) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Return run, device, weight, leader, first and last ms of the pairs, and the labels without a run.

    A run is the job 7 and lasts from 1000 to 2000 ms, and the labels of this ID are seen during it, unless others are
    given. Device 0 is on the node n1 of the cluster c.
    """
    times = {name: pl.Int64() for name in ("begin_ms", "finish_ms", "end_ms")}
    schema = {"run": pl.Int64(), "cluster": pl.String(), **dict.fromkeys(IDS, pl.Int64()), **times}
    base = {"cluster": "c", "job_id": 7, "begin_ms": 1000, "finish_ms": 2000, "end_ms": 2000}
    frame = typed([{"run": number, **base, **run} for number, run in enumerate(runs, 1)], schema)
    stamp = pl.Datetime("ms", "UTC")
    seen = [{"at": 0, "job": "7", "rows": 1, "first": 1200, "last": 1300, **label} for label in labels]
    columns = {"at": pl.Int64(), "job": pl.String(), "first": stamp, "last": stamp, "rows": pl.Int64()}
    of_jobs = typed([{**row, "first": clock(row["first"]), "last": clock(row["last"])} for row in seen], columns)
    table = typed([{"at": 0, "cluster": "c", "node": "n1"}, {"at": 1, "cluster": "c", "node": "n2"}, {"at": 2}],
                  {"at": pl.Int64(), "cluster": pl.String(), "node": pl.String()})  # fmt: skip
    of_runs = pl.DataFrame(nodes, schema={"run": pl.Int64(), "node": pl.String()}, orient="row")
    pairs, unfit = mapping.by_labels(frame, of_runs, table, of_jobs)
    return pairs.select("run", "at", "weight", "leader", "first_ms", "last_ms").rows(), unfit["job"].to_list()


@pytest.mark.parametrize(
    ("label", "run", "matches"),
    [
        ({}, {}, True),
        ({"first": 1999, "last": 5000}, {}, True),
        ({"first": 2000, "last": 5000}, {}, False),
        ({"first": 100, "last": 1000}, {}, True),
        ({"first": 100, "last": 999}, {}, False),
        ({"at": 1}, {}, False),
        ({"at": 2}, {}, True),
        ({}, {"cluster": "other"}, False),
        ({}, {"cluster": None}, True),
        ({"job": "8"}, {}, False),
        ({"job": "7_3"}, {}, False),
        ({"job": "7+1"}, {}, False),
        ({"job": "7_3"}, {"array_job_id": 7, "array_task_id": 3}, True),
        ({"job": "7_3"}, {"array_job_id": 7, "array_task_id": 4}, False),
        ({"job": "7+1"}, {"het_job_id": 7, "het_offset": 1}, True),
        ({"job": None}, {}, False),
    ],
)
def test_label_matches_a_run_of_its_time_and_place(label: dict[str, Any], run: dict[str, Any], matches: bool) -> None:
    """A run ends before its end; an unknown cluster or node matches any."""
    row = {"at": 0, "first": 1200, "last": 1300, **label}
    pairs, unfit = label_pairs([label], [run])
    assert pairs == ([(1, row["at"], 1, False, row["first"], row["last"])] if matches else [])
    assert unfit == ([] if matches else [label.get("job", "7")])


def test_label_of_a_run_on_unknown_nodes_matches_it() -> None:
    assert label_pairs([{"at": 1}], [{}], nodes=[(2, "n1")])[0] == [(1, 1, 1, False, 1200, 1300)]


def test_labels_of_one_run_and_gpu_are_one_pair() -> None:
    """Also by the ID of its array; the run is named exactly if one of them names it so."""
    run = {"job_id": 9, "array_job_id": 7, "array_task_id": 3}
    labels = [{"first": 1200, "last": 1300, "rows": 2}, {"job": "9", "first": 1100, "last": 1250, "rows": 3}]
    assert label_pairs(labels, [run]) == ([(1, 0, 5, False, 1100, 1300)], [])
    assert label_pairs(labels[:1], [run]) == ([(1, 0, 2, True, 1200, 1300)], [])


def test_label_is_the_id_of_an_array_or_heterogeneous_job_if_it_is_none_of_a_job() -> None:
    members = [{"job_id": 8, "array_job_id": 7, "array_task_id": 1}, {"job_id": 9, "het_job_id": 7, "het_offset": 1}]
    nodes = [(run, "n1") for run in (1, 2, 3)]
    pairs, unfit = label_pairs([{}], [*members, {}], nodes=nodes)
    assert [(run, leader) for run, _, _, leader, *_ in pairs] == [(3, False)]
    pairs, unfit = label_pairs([{}], members, nodes=nodes)
    assert [(run, leader) for run, _, _, leader, *_ in pairs] == [(1, True), (2, True)]
    assert unfit == []


def test_label_after_the_last_known_time_of_a_run_is_no_mismatch() -> None:
    """Accounting saw the job running until 1500 ms; it may have ended at 2000 ms at the latest."""
    assert label_pairs([{"first": 1500, "last": 1600}], [{"end_ms": 1500}]) == ([], [])
    assert len(label_pairs([{"first": 1499, "last": 1600}], [{"end_ms": 1500}])[0]) == 1


@pytest.mark.parametrize(
    ("devices", "runs", "expected"),
    [
        (["m"], ["s"], ["s"]),
        (["m", None], ["s", None], ["s", "s"]),
        ([None], ["s"], [None]),
        (["m"], [None], ["m"]),
        (["m", "o"], ["s"], ["m", "o"]),
        (["m"], ["s", "t"], ["m"]),
        (["m", "m"], ["s", "s"], ["s", "s"]),
        (["m", "m"], ["m"], ["m", "m"]),
    ],
)
def test_cluster_is_renamed_only_if_there_is_one_on_each_side(
    devices: list[str | None], runs: list[str | None], expected: list[str | None]
) -> None:
    frames = (pl.DataFrame({"cluster": names}, schema={"cluster": pl.String()}) for names in (devices, runs))
    assert mapping.with_slurm_cluster(*frames)["cluster"].to_list() == expected


def whole_nodes(
    runs: Sequence[dict[str, Any]], devices: Sequence[dict[str, Any]], *, known: Sequence[tuple[int, int]] = (),
    gpu_counts: Sequence[tuple[int, str, int]] = (), evidence: Sequence[int] = (), maybe: Sequence[int] | None = None,
    table: int | None = None, recorded: Sequence[tuple[int, str]] = (),
) -> list[tuple[int, int]]:  # fmt: skip
    """Return run and device of the pairs by whole node.

    A run has 2 GPUs from 1000 to 2000 ms and is on n1; a device is on n1 and has samples at 1000 and 1900 ms.
    ``maybe``: runs that others may have met, without those that are certain. ``table``: devices with samples in the
    interval, which are all of them unless it is given. ``recorded``: job and name of a GPU on n1.
    """
    rows = [{"run": number, "job_id": number, "cluster": "c", "gpus": 2, "start_ms": 1000, "end_ms": 2000, **run}
            for number, run in enumerate(runs, 1)]  # fmt: skip
    times = {"start_ms": pl.Int64(), "end_ms": pl.Int64()}
    frame = typed(rows, {"run": pl.Int64(), "job_id": pl.Int64(), "cluster": pl.String(), "gpus": pl.Int64(), **times})
    nodes = typed([{"run": row["run"], "node": node} for row in rows for node in row.get("nodes", ["n1"])],
                  {"run": pl.Int64(), "node": pl.String()})  # fmt: skip
    stamp = pl.Datetime("ms", "UTC")
    columns = {
        **dict.fromkeys(("cluster", "node", "uuid", "pci", "mig", "place"), pl.String()),
        **dict.fromkeys(("at", "index", "slot", "highest"), pl.Int64()), "first": stamp, "last": stamp,
    }  # fmt: skip
    seen = [{"at": at, "cluster": "c", "node": "n1", "uuid": f"GPU-{at}", "place": f"GPU-{at}", "slot": at,
             "first": 1000, "last": 1900, **device} for at, device in enumerate(devices)]  # fmt: skip
    every = typed([{**row, "first": clock(row["first"]), "last": clock(row["last"])} for row in seen], columns)
    sure = frame.filter(~pl.col("run").is_in(list(maybe or ())))
    uncertain = nodes.join(frame, on="run").filter(pl.col("run").is_in(list(maybe))) if maybe is not None else None
    result = mapping.by_whole_node(
        frame if maybe is None else sure, sure, nodes, every, every.head(len(seen) if table is None else table),
        typed([{"cluster": "c", "job_id": job, "node": "n1", "gpu": gpu} for job, gpu in recorded], RECORDED_GPUS),
        typed([{"run": run, "at": at} for run, at in known], {"run": pl.Int64(), "at": pl.Int64()}),
        pl.DataFrame(gpu_counts, schema={"run": pl.Int64(), "node": pl.String(), "gpus": pl.Int64()}, orient="row"),
        pl.Series("run", list(evidence), pl.Int64), uncertain,
    )  # fmt: skip
    return result.select("run", "at").rows()


BOTH = ["n1", "n2"]


@pytest.mark.parametrize(
    ("run", "devices", "expected"),
    [
        ({}, [{}, {}], [0, 1]),
        ({"gpus": 1}, [{}, {}], []),
        ({"gpus": 3}, [{}, {}], []),
        ({"gpus": 0}, [{}], []),
        ({"gpus": None}, [{}], []),
        ({"gpus": 4, "nodes": BOTH}, [{}, {}, {"node": "n2"}, {"node": "n2"}], [0, 1, 2, 3]),
        ({"gpus": 3, "nodes": BOTH}, [{}, {}, {"node": "n2"}], [0, 1, 2]),
        ({"gpus": 4, "nodes": BOTH}, [{}, {}], [0, 1]),
        ({"gpus": 4, "nodes": BOTH}, [{}, {}, {}], []),
        ({"gpus": 2, "nodes": BOTH}, [{}, {}], []),
        ({"gpus": 2, "nodes": BOTH}, [{}, {}, {"node": "n2"}], [2]),
        ({}, [{}, {"cluster": "other"}], []),
        ({}, [{}, {"cluster": None}], [0, 1]),
        ({}, [{}, {"node": "n2"}], []),
        ({}, [{}, {"slot": 0}], []),
        ({"gpus": 1}, [{}, {"slot": 0}], [0, 1]),
        ({}, [{"highest": 1}, {"highest": 0}], [0, 1]),
        ({}, [{"highest": 2}, {"highest": 0}], []),
    ],
)
def test_run_with_as_many_gpus_as_its_nodes_has_all_of_them(
    run: dict[str, Any], devices: list[dict[str, Any]], expected: list[int]
) -> None:
    """On several nodes: all GPUs of these, or the same number on each."""
    assert whole_nodes([run], devices) == [(1, at) for at in expected]


@pytest.mark.parametrize(
    ("times", "gpus", "expected"),
    [
        ({"first": 1999, "last": 3000}, 2, [0, 1]),
        ({"first": 2000, "last": 3000}, 2, [0]),
        ({"first": 100, "last": 1000}, 2, [0, 1]),
        ({"first": 100, "last": 999}, 2, [0]),
        ({"first": 100, "last": 999}, 1, []),
    ],
)
def test_gpu_with_samples_at_another_time_counts_for_its_node(
    times: dict[str, int], gpus: int, expected: list[int]
) -> None:
    """The pair is only with GPUs that have samples during the run."""
    assert whole_nodes([{"gpus": gpus}], [{}, times]) == [(1, at) for at in expected]


def test_node_without_samples_during_a_run_is_not_mapped() -> None:
    assert whole_nodes([{}], [{"last": 900, "first": 800}, {"last": 900, "first": 800}]) == []


def test_gpu_of_earlier_days_counts_for_its_node() -> None:
    """Devices after those of the interval have their samples before it."""
    assert whole_nodes([{}], [{}, {}], table=1) == [(1, 0)]
    assert whole_nodes([{"gpus": 1}], [{}, {}], table=1) == []


@pytest.mark.parametrize("whole", [{"first": 100, "last": 900}, {"first": 2100, "last": 2900}])
def test_gpu_that_was_divided_at_another_time_counts_once(whole: dict[str, int]) -> None:
    """Two instances have samples during the run, the GPU as a whole before or after."""
    instances = [{"mig": name, "place": "GPU-0"} for name in ("1", "2")]
    assert whole_nodes([{}], [*instances, {"place": "GPU-0", **whole}]) == [(1, 0), (1, 1)]
    assert whole_nodes([{}], [*instances, {"place": "GPU-1", **whole}]) == []
    divided = [{**instance, **whole} for instance in instances]
    assert whole_nodes([{"gpus": 1}], [{"place": "GPU-0"}, *divided]) == [(1, 0)]


@pytest.mark.parametrize(
    ("other", "alone"),
    [
        ({}, False),
        ({"start_ms": 1999, "end_ms": 3000}, False),
        ({"start_ms": 2000, "end_ms": 3000}, True),
        ({"start_ms": 0, "end_ms": 1001}, False),
        ({"start_ms": 0, "end_ms": 1000}, True),
        ({"nodes": ["n2"]}, True),
        ({"nodes": BOTH}, False),
        ({"cluster": "other", "nodes": ["n1"]}, True),
    ],
)
def test_node_that_another_run_may_have_shared_is_not_mapped(other: dict[str, Any], alone: bool) -> None:
    """The other run has a GPU; without GPUs in accounting it has none, unless a label or a record names one."""
    all_gpus = [(1, 0), (1, 1)]
    result = whole_nodes([{}, {"gpus": 1, **other}], [{}, {}])
    assert [pair for pair in result if pair[0] == 1] == (all_gpus if alone else [])
    for gpus in (0, None):
        runs = [{}, {**other, "gpus": gpus}]
        assert whole_nodes(runs, [{}, {}], evidence=[2]) == (all_gpus if alone else [])
        assert whole_nodes(runs, [{}, {}]) == all_gpus


def test_longer_stay_of_another_run_is_not_hidden_by_a_shorter_one() -> None:
    """The second begins after the first and ends before it; the third begins after its end."""
    hidden = [{"gpus": None, "start_ms": 0, "end_ms": 1500}, {"gpus": None, "start_ms": 100, "end_ms": 200}]
    assert whole_nodes([*hidden, {}], [{}, {}], evidence=[1, 2]) == []


def test_stay_after_a_run_on_several_nodes_leaves_its_gpus() -> None:
    """The run has two GPUs of one node and one of the other."""
    devices = [{}, {}, {"node": "n2"}]
    later = {"gpus": 1, "start_ms": 2000, "end_ms": 3000}
    assert whole_nodes([{"gpus": 3, "nodes": BOTH}, later], devices) == [(1, 0), (1, 1), (1, 2)]


def test_node_without_samples_during_a_run_counts_with_the_others() -> None:
    devices = [{}, {}, {"node": "n2", "first": 100, "last": 900}]
    assert whole_nodes([{"gpus": 3, "nodes": BOTH}], devices) == [(1, 0), (1, 1)]
    assert whole_nodes([{"gpus": 2, "nodes": BOTH}], devices) == []


def test_uncertain_stay_on_a_node_counts_as_shared() -> None:
    assert whole_nodes([{}, {}], [{}, {}], maybe=[2]) == []
    assert whole_nodes([{}, {"start_ms": 2000, "end_ms": 2500}], [{}, {}], maybe=[2]) == [(1, 0), (1, 1)]
    assert whole_nodes([{}, {}], [{}, {}], maybe=[]) == []


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([{"gpus": 3, "start_ms": 0, "end_ms": 900}], []),
        ([{"gpus": 2, "start_ms": 0, "end_ms": 900}], [0, 1]),
        ([{"gpus": 1, "start_ms": 0, "end_ms": 500}, {"gpus": 2, "start_ms": 500, "end_ms": 900}], [0, 1]),
        ([{"gpus": 1, "start_ms": 0, "end_ms": 501}, {"gpus": 2, "start_ms": 500, "end_ms": 900}], []),
        ([{"gpus": 3, "start_ms": 0, "end_ms": 900, "nodes": BOTH}], [0, 1]),
    ],
)
def test_node_has_at_least_the_gpus_that_runs_had_at_once(others: list[dict[str, Any]], expected: list[int]) -> None:
    """Also at another time; where the GPUs of a run on several nodes were is unknown."""
    result = whole_nodes([{}, *others], [{}, {}])
    assert [at for run, at in result if run == 1] == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["GPU-0", "gpu-1"], [0, 1]), (["GPU-0", "GPU-1", "GPU-9"], []), (["GPU-8", "GPU-9"], [0, 1]), (["2"], []),
     (["1"], [0, 1])],
)  # fmt: skip
def test_node_has_at_least_the_gpus_that_records_name(names: list[str], expected: list[int]) -> None:
    """Also records of another time; a name that the metrics lack may be another GPU."""
    runs = [{}, {"gpus": None, "start_ms": 0, "end_ms": 900}]
    assert whole_nodes(runs, [{}, {}], recorded=[(2, name) for name in names]) == [(1, at) for at in expected]


def test_gpus_known_by_evidence_are_on_other_nodes() -> None:
    """One GPU of three is known by a label or a record; the other two are those of the other node."""
    devices = [{}, {}, {"node": "n2"}, {"node": "n2"}]
    run = {"gpus": 3, "nodes": BOTH}
    assert whole_nodes([run], devices, known=[(1, 0)]) == [(1, 2), (1, 3)]
    assert whole_nodes([run], devices, gpu_counts=[(1, "n1", 1)]) == [(1, 2), (1, 3)]
    assert whole_nodes([run], devices, known=[(1, 0)], gpu_counts=[(1, "n1", 1)]) == [(1, 2), (1, 3)]
    assert whole_nodes([run], devices, known=[(1, 0)], gpu_counts=[(1, "n1", 2)]) == []
    assert whole_nodes([{**run, "gpus": 1}], devices, known=[(1, 0)]) == []
    one_slot = [{"slot": 0}, {"slot": 0}, *devices[2:]]
    assert whole_nodes([run], one_slot, known=[(1, 0), (1, 1)]) == [(1, 2), (1, 3)]
