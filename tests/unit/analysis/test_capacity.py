"""GPU capacity: allocated plus unallocated GPU-hours."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slurm_affinode.analysis.result import WasteResult

from .waste_cases import HOUR, Analysed, Jobs, Rows, every


def of_node(samples: Rows, gpus: int, times: list[float], **values: Any) -> list[dict[str, Any]]:
    """Return samples of all GPUs of a node."""
    node = values.setdefault("node", "n1")
    return [
        row
        for index in range(gpus)
        for row in samples(times, uuid=f"GPU-{node}-{index}", index=index, util_pct=0.0, **values)
    ]


def figures(result: WasteResult) -> tuple[float | None, ...]:
    total = result.total
    return tuple(total[key] for key in ("gpu_hours_capacity", "gpu_hours_allocated", "unallocated_gpu_hours"))


def test_capacity_counts_an_unmapped_job_once(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """Two single-GPU jobs run on a node with four GPUs: it is unknown which GPUs they hold, but two are free."""
    rows = of_node(samples, 4, every(0, HOUR))
    runs = jobs({"start": 0, "end": HOUR}, {"job_id": 2, "start": 0, "end": HOUR})
    assert figures(analysed(rows, runs, until=HOUR)) == pytest.approx((4, 2, 2))


def test_capacity_counts_job_without_node_list(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """An accounting record without a node list is subtracted from the capacity of its cluster."""
    rows = of_node(samples, 2, every(0, HOUR)) + of_node(samples, 2, every(0, HOUR), node="n2")
    runs = jobs({"start": 0, "end": HOUR / 2, "node_list": None, "gpus": 3})
    assert figures(analysed(rows, runs, until=HOUR)) == pytest.approx((4, 1.5, 2.5))


def test_capacity_includes_allocated_gpus_without_samples(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The job runs on a node that was never sampled; the GPU of the other node stays free."""
    runs = jobs({"start": 0, "end": HOUR, "node_list": "n2", "gpus": 4})
    assert figures(analysed(samples(every(0, HOUR), util_pct=0.0), runs, until=HOUR)) == pytest.approx((5, 4, 1))


def test_capacity_includes_sampling_gaps_of_free_gpus(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A GPU counts during a gap in its samples, but not before its first sample."""
    rows = samples([*every(0, 600), *every(3000, HOUR)], util_pct=0.0)
    rows += samples(every(HOUR / 2, HOUR), uuid="GPU-1", index=1, util_pct=0.0)
    assert figures(analysed(rows, jobs(), until=HOUR)) == pytest.approx((1.5, 0, 1.5))


def test_capacity_counts_slot_of_replaced_gpu_once(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The old GPU counts until its last sample, the new one from its first sample."""
    rows = samples(every(0, HOUR / 2), util_pct=0.0) + samples(every(HOUR / 2, HOUR), uuid="GPU-new", util_pct=0.0)
    assert figures(analysed(rows, jobs(), until=HOUR)) == pytest.approx((1, 0, 1))


def test_capacity_counts_slot_held_by_its_old_gpu_once(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The label is only on the old GPU; the run is allocated one GPU, and the new GPU is not free besides."""
    rows = samples(every(0, HOUR / 2), util_pct=0.0, job="1")
    rows += samples(every(HOUR / 2, HOUR), uuid="GPU-new", util_pct=0.0)
    assert figures(analysed(rows, jobs({"start": 0, "end": HOUR}), until=HOUR)) == pytest.approx((1, 1, 0))


def test_capacity_has_no_parent_of_mig_instances(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A run held the GPU before it was divided; its series continues beside those of the instances."""
    rows = samples(every(0, HOUR), util_pct=0.0)
    rows += [row for mig in "12" for row in samples(every(HOUR / 2, HOUR), mig=mig, engine_active=0.0)]
    run = jobs({"start": 0, "end": HOUR / 4})
    record = {"recorded": [{"cluster": "c", "job_id": 1, "node": "n1", "gpu": "GPU-0"}]}
    assert figures(analysed(rows, run, until=HOUR, **record)) == pytest.approx((1.5, 0.25, 1.25))


def test_capacity_starts_with_interval_when_first_sample_is_late(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """A first sample shortly after the start of the interval counts from the start of the interval."""
    assert figures(analysed(samples(every(17, HOUR), util_pct=0.0), jobs(), until=HOUR)) == pytest.approx((1, 0, 1))


@pytest.mark.parametrize("filters", [{"users": ("ann",)}, {"accounts": ("phys",)}, {"partitions": ("gpu",)}])
def test_capacity_is_absent_in_filtered_report(
    analysed: Analysed, samples: Rows, jobs: Jobs, filters: dict[str, tuple[str, ...]]
) -> None:
    """Unallocated GPUs belong to no user, account or partition."""
    result = analysed(samples(every(0, HOUR), util_pct=0.0), jobs({"start": 0, "end": 60}), until=HOUR, **filters)
    assert (result.total["gpu_hours_capacity"], result.total["unallocated_gpu_hours"]) == (None, None)


@pytest.mark.parametrize("later", [False, True])
def test_capacity_is_absent_if_no_gpu_is_known_to_exist(
    analysed: Analysed, samples: Rows, jobs: Jobs, later: bool
) -> None:
    """The metrics ended on the day of the interval, but long before it, and may begin again after it."""
    rows = of_node(samples, 2, every(-2 * HOUR, -HOUR)) + (of_node(samples, 1, [2 * HOUR], node="n2") if later else [])
    result = analysed(rows, jobs({"start": 0, "end": HOUR}), until=HOUR)
    assert figures(result) == (None, 1, None)


def test_capacity_without_history_is_absent(analysed: Analysed, jobs: Jobs) -> None:
    """Without GPU metrics the number of GPUs is unknown."""
    assert figures(analysed([], jobs({"start": 0, "end": HOUR}), until=HOUR)) == (None, 1, None)


_RUNS = st.lists(
    st.fixed_dictionaries(
        {
            "start": st.integers(-30, 100).map(lambda minute: minute * 60),
            "length": st.integers(1, 90).map(lambda minute: minute * 60),
            "node_list": st.sampled_from(["n1", "n2", "n[1-2]", "n3", None]),
            "gpus": st.integers(0, 5),
            "labelled": st.booleans(),
        }
    ),
    max_size=6,
)
_SEEN = st.lists(
    st.tuples(st.sampled_from(["n1", "n2"]), st.integers(0, 3), st.integers(0, 60), st.integers(1, 60)), max_size=6
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs=_RUNS, seen=_SEEN)
@example(runs=[], seen=[("n1", 0, 0, 1)])
def test_capacity_equals_allocated_plus_unallocated(  # noqa: PLR0917
    analysed: Analysed, samples: Rows, jobs: Jobs, tmp_path: Path, runs: list[dict[str, Any]],
    seen: list[tuple[str, int, int, int]],
) -> None:  # fmt: skip
    """Unallocated hours are never negative and never exceed the number of sampled GPUs."""
    shutil.rmtree(tmp_path / "analysed", ignore_errors=True)
    rows: list[dict[str, Any]] = []
    for node, index, first, count in seen:
        times = [60.0 * (first + k) for k in range(count)]
        labels = [str(n) for n, run in enumerate(runs, 1) if run["labelled"] and index == n % 4]
        rows += samples(times, node=node, uuid=f"{node}-{index}", index=index, util_pct=0.0,
                        hpc_job=labels[0] if labels else None)  # fmt: skip
    frame = jobs(*(
        {"job_id": n, "submit": run["start"] - 60, "start": run["start"], "end": run["start"] + run["length"],
         "node_list": run["node_list"], "gpus": run["gpus"]}
        for n, run in enumerate(runs, 1)
    ))  # fmt: skip
    result = analysed(rows, frame, until=HOUR)
    capacity, allocated, free = figures(result)
    devices = {(node, index) for node, index, first, _ in seen if first < 60}
    if capacity is None or free is None:
        # Without a sampling interval it is unknown for how long a GPU with a single sample existed.
        assert (capacity, free) == (None, None)
        assert not any(first < 59 and count > 1 for _, _, first, count in seen)
        return
    assert result.quality.samples
    assert capacity == (allocated or 0.0) + free
    assert 0 <= free <= len(devices) + 1e-9
    assert capacity >= max(allocated or 0.0, 0.0)


def test_capacity_of_a_cluster_has_no_gpus_of_another(analysed: Analysed, samples: Rows, jobs: Jobs) -> None:
    """The other cluster in the database has nodes of the same names; its GPU was held for half of the time."""
    rows = samples(every(0, HOUR), util_pct=0.0) + samples(every(0, HOUR), util_pct=0.0, cluster="other")
    runs = jobs({"start": 0, "end": HOUR}, {"cluster": "other", "start": HOUR // 2, "end": HOUR})
    assert figures(analysed(rows, runs, until=HOUR, clusters=("c",))) == pytest.approx((1, 1, 0))
