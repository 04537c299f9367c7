"""The ASI trace of 2026: synthetic files with the published columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.traces import asi2026, asi_page, claims

EXECUTION = {
    "pod_id": "p1", "workload_id": "w", "job_type_public": "training", "priority_class": "HP", "gpu_request": 8.0,
    "duration_hours": 2.0, "schedule_delay_sec": 30, "ready_status": True,
}  # fmt: skip
POD = {
    "pod_id": "p1", "job_type_public": "training", "state_public": "Running", "gpu_request": 8.0, "used_gpu_hours": 6.0,
    "avg_gpu_sm_util": 0.0, "gpu_spec_public": "H800",
}  # fmt: skip


def put(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pl.DataFrame(list(rows), infer_schema_length=None).write_parquet(path)
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two executions, pods of three days, servers of two hours."""
    put(tmp_path / asi2026.EXECUTIONS / "part-000.parquet", EXECUTION,
        {**EXECUTION, "pod_id": "p2", "job_type_public": "dev", "priority_class": "LP", "gpu_request": 0.5,
         "duration_hours": 4.0, "schedule_delay_sec": None})  # fmt: skip
    pods = tmp_path / asi2026.PODS
    dev = {**POD, "pod_id": "p2", "job_type_public": "dev", "gpu_request": 0.5, "used_gpu_hours": 0.25}
    put(pods / "day=9" / "hour=00" / "part-000.parquet", {**POD, "pod_id": "p8", "state_public": "Unknown"},
        {**dev, "state_public": "Unknown", "avg_gpu_sm_util": None})  # fmt: skip
    put(pods / "day=109" / "hour=00" / "part-000.parquet", {**POD, "avg_gpu_sm_util": 0.4}, {**dev, "gpu_request": 0.0})
    put(pods / "day=110" / "hour=23" / "part-000.parquet", {**dev, "state_public": "Standby"})
    for hour in ("00", "01"):
        put(tmp_path / asi2026.SERVERS / "day=0" / f"hour={hour}" / "part-000.parquet",
            {"server_id": "s", "gpu_spec_public": "H800", "gpu_count": 8.0},
            {"server_id": "t", "gpu_spec_public": "A10", "gpu_count": 2.0 if hour == "00" else 4.0})  # fmt: skip
    return tmp_path


def test_figures_by_hand(directory: Path) -> None:
    """An hour without a utilization is unknown; a pod without a GPU is not counted."""
    s = asi2026.analyse(asi2026.find(directory))
    assert s.pods is not None
    assert s.total is not None
    assert s.total.schedule_delay_s is not None
    assert (s.executions, s.total.gpu_hours, s.total.schedule_delay_s.mean) == (2, 18.0, 30.0)
    assert s.job_types is not None
    assert {name: (group.executions, round(group.hours_share, 3)) for name, group in s.job_types.items()} == {
        "training": (1, 0.889), "dev": (1, 0.111),
    }  # fmt: skip
    assert (s.part_of_a_gpu_share, s.days) == (0.5, 3)
    assert (s.pods.requested_gpu_hours, s.pods.unknown_gpu_hours, s.pods.idle_gpu_hours) == (17.0, 0.5, 8.5)
    assert s.pods.idle_share == pytest.approx(8.5 / 16.5)
    assert (s.capacity_gpus, s.capacity) == (11.0, {"H800": 8.0, "A10": 3.0})


def test_coverage_is_that_of_the_pods_of_each_day(directory: Path) -> None:
    """Half of the pods before day 109, all from then on; one day has states."""
    s = asi2026.analyse(asi2026.find(directory))
    assert (s.covered_before, s.covered_from, s.days_with_states) == (0.5, 1.0, 1)
    judged = claims.judge(claims.load("asi2026"), claims.flat(s.as_dict()))
    assert {claim.id: claim.verdict for claim in judged} == {
        "covered-before": claims.NOT_BORNE_OUT, "covered-from": claims.BORNE_OUT, "states": claims.NOT_BORNE_OUT,
    }  # fmt: skip


def test_missing_tables_are_unknown(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has none of the tables"):
        asi2026.find(tmp_path)
    put(tmp_path / "data" / asi2026.EXECUTIONS / "part-000.parquet", EXECUTION)
    trace = asi2026.find(tmp_path)
    s = asi2026.analyse(trace)
    assert (s.executions, s.pods, s.covered_from, s.capacity_gpus) == (1, None, None, None)
    page = asi_page.context(s, (), trace.missing)
    assert [note.split()[0] for note in page.notes] == [asi2026.PODS, asi2026.SERVERS]
    assert "1 execution" in page.answer


def test_damaged_or_other_file_is_an_error(directory: Path) -> None:
    """Truncated files, missing columns, unknown values, and files outside of a day."""
    path = directory / asi2026.EXECUTIONS / "part-000.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(InputError, match=r"part-000\.parquet: is cut off"):
        asi2026.analyse(asi2026.find(directory))
    put(path, {**EXECUTION, "priority_class": "XL"})
    with pytest.raises(InputError, match="priority_class XL is unknown"):
        asi2026.analyse(asi2026.find(directory))
    put(path, {"pod_id": "p1"})
    with pytest.raises(InputError, match="has no column job_type_public"):
        asi2026.analyse(asi2026.find(directory))
    path.write_bytes(whole)
    put(directory / asi2026.PODS / "x.parquet", POD)
    with pytest.raises(InputError, match=r"x\.parquet: is not in a directory day=D/hour=H"):
        asi2026.analyse(asi2026.find(directory))
