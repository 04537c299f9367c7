"""The job table of ClusterCockpit: jobs, GPUs and averages, converted from its units."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.metrics.readers import clustercockpit

COLUMNS = (
    "job_id", "cluster", "subcluster", "submit_time", "start_time", "hpc_user", "project", "cluster_partition",
    "array_job_id", "duration", "walltime", "job_state", "resources", "num_nodes", "num_hwthreads", "num_acc",
    "energy", "energy_footprint", "footprint",
)  # fmt: skip
Make = Callable[..., Path]


@pytest.fixture
def database(tmp_path: Path) -> Make:
    """Return a function that writes a synthetic database; each argument gives the changes of a job from a plain one."""

    def make(*jobs: dict[str, Any], columns: tuple[str, ...] = COLUMNS, table: str = "job") -> Path:
        path = tmp_path / "job.db"
        connection = sqlite3.connect(path)
        connection.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
        for job in jobs:
            row = plain(**job)
            places = ", ".join("?" for _ in columns)
            connection.execute(f"INSERT INTO {table} VALUES ({places})", [row[name] for name in columns])
        connection.commit()
        connection.close()
        return path

    return make


def plain(**changes: Any) -> dict[str, Any]:
    nodes = changes.pop("nodes", [("n1", ["00000000:e1:00.0"])])
    row: dict[str, Any] = {
        "job_id": 1, "cluster": "alex", "subcluster": "a40", "submit_time": 0, "start_time": 1_700_000_000,
        "hpc_user": "u", "project": "p", "cluster_partition": "gpu", "array_job_id": 0, "duration": 3600,
        "walltime": 7200, "job_state": "completed", "num_nodes": len(nodes), "num_hwthreads": 16,
        "resources": json.dumps([{"hostname": node, "accelerators": gpus} for node, gpus in nodes]),
        "num_acc": sum(len(gpus) for _, gpus in nodes), "energy": 1.5,
        "energy_footprint": b'{"acc_power":0.5}', "footprint": b'{"acc_utilization_avg":40.5,"acc_mem_used_avg":2048}',
    }  # fmt: skip
    return row | changes


def test_job_and_its_gpu_are_read(database: Make) -> None:
    """Times are UTC, the submit time defaults to the start, and GPU power is computed from its energy."""
    result = clustercockpit.read(database({}))
    job = result.jobs[0]
    assert job["submit"] == job["start"]
    assert (job["end"] - job["start"]).total_seconds() == 3600
    assert (job["state"], job["gpus"], job["node_list"], job["array_job_id"]) == ("COMPLETED", 1, "n1", None)
    row = result.averages.row(0, named=True)
    assert row["pci"] == "00000000:E1:00.0"
    assert row["util_pct"] == 40.5
    assert row["power_w"] == 500
    assert row["fb_used_mib"] == 2048
    assert result.zero_utilization_jobs == 0


def test_memory_footprint_is_divided_by_gpus_of_a_node(database: Make) -> None:
    """The footprint is the sum over a node, averaged over nodes, so each of two GPUs per node gets half of it."""
    nodes = [(f"n{i}", ["00:01.0", "00:02.0"]) for i in range(3)]
    result = clustercockpit.read(database({"nodes": nodes}))
    assert result.averages["fb_used_mib"].to_list() == [1024.0] * 6
    assert result.averages["power_w"].sum() == pytest.approx(500)
    assert any("Jobs with several GPUs: 1;" in note for note in result.notes)


def test_memory_in_gb_is_distinguished_from_mib(database: Make) -> None:
    """A value that is too large for a GPU in GB is in MiB; a small value is in GB."""
    result = clustercockpit.read(database({"footprint": '{"acc_mem_used_avg": 40}'}))
    assert result.averages["fb_used_mib"].item() == pytest.approx(40e9 / (1 << 20))
    assert any("taken as GB" in note for note in result.notes)


def test_missing_averages_are_unknown_and_zero_is_zero(database: Make) -> None:
    """A missing footprint is not a measurement; energy rounded to 0 kWh is not 0 W."""
    result = clustercockpit.read(
        database(
            {"job_id": 1, "footprint": None, "energy_footprint": None},
            {"job_id": 2, "footprint": '{"acc_utilization_avg": 0}', "energy_footprint": '{"acc_power": 0}'},
            {"job_id": 3, "footprint": '{"acc_utilization_avg": "x"}', "energy_footprint": "null"},
        )
    )
    assert result.averages["util_pct"].to_list() == [None, 0.0, None]
    assert result.averages["power_w"].to_list() == [None, None, None]
    assert result.zero_utilization_jobs == 1
    assert any("without an average utilization: 2;" in note for note in result.notes)


def test_running_jobs_have_no_end(database: Make) -> None:
    """Its averages end at its current duration."""
    result = clustercockpit.read(database({"job_state": "running"}))
    assert result.jobs[0]["end"] is None
    assert result.averages["end"].null_count() == 0


def test_gpus_without_address_are_separate_devices(database: Make) -> None:
    """A GPU with an empty address, or only counted, becomes a device of its own."""
    result = clustercockpit.read(
        database(
            {"job_id": 1, "nodes": [("n1", [""])]},
            {"job_id": 2, "nodes": [("n1", []), ("n2", [])], "num_acc": 2},
            {"job_id": 3, "nodes": [("n1", ["00:01.0"])], "num_acc": 4},
        )
    )
    assert result.averages["uuid"].to_list() == ["unnamed-1-0", "unnamed-2-0", "unnamed-2-1", None]
    assert result.averages["node"].to_list() == ["n1", "n1", "n2", "n1"]
    assert result.problems == ("job 3: has 4 GPUs by count and 1 by address; the addresses are used",)
    assert any("without an address in the table: 3;" in note for note in result.notes)


@pytest.mark.parametrize(
    "change", [{"resources": "{"}, {"resources": "{}"}, {"start_time": None}, {"resources": "[{}]"}, {"footprint": 7.5}]
)
def test_invalid_job_is_reported_and_skipped(database: Make, change: dict[str, Any]) -> None:
    """The report is one line with the job and the reason."""
    result = clustercockpit.read(database({"job_id": 5, **change}, {"job_id": 6}))
    assert [job["job_id"] for job in result.jobs] == [6]
    assert len(result.problems) == 1
    assert result.problems[0].startswith("job 5: left out, ")


def test_invalid_json_column_is_quoted_in_the_report(database: Make) -> None:
    """The position of the parse error is not given."""
    result = clustercockpit.read(database({"footprint": "{broken"}))
    assert result.problems == ("job 1: left out, '{broken' is not JSON text",)


def test_jobs_in_the_write_ahead_log_are_read(database: Make) -> None:
    """cc-backend writes jobs to the log first; the database and its log are not changed."""
    path = database({"job_id": 1})
    writer = sqlite3.connect(path)
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute("INSERT INTO job SELECT * FROM job")
    writer.commit()
    before = {file.name: file.read_bytes() for file in path.parent.iterdir() if not file.name.endswith("-shm")}
    assert len(clustercockpit.read(path).jobs) == 2
    assert {file.name: file.read_bytes() for file in path.parent.iterdir() if not file.name.endswith("-shm")} == before
    writer.close()


def test_missing_columns_are_unknown(database: Make) -> None:
    """Older releases named the columns ``user`` and ``partition``; absent columns are unknown."""
    path = database({}, columns=("job_id", "cluster", "start_time", "duration", "resources"))
    job = clustercockpit.read(path).jobs[0]
    assert (job["user"], job["partition"], job["state"], job["gpus"]) == (None, None, None, 1)


def test_gpu_models_come_from_cluster_json(database: Make) -> None:
    """The file of its cluster next to the database gives the models; an invalid one is ignored."""
    path = database({})
    accelerators = [{"id": "00000000:E1:00.0", "type": "Nvidia GPU", "model": "A40"}]
    config = {"name": "alex", "subClusters": [{"name": "a40", "topology": {"accelerators": accelerators}}]}
    (path.parent / "alex_cluster.json").write_text(json.dumps(config))
    (path.parent / "bad_cluster.json").write_text("{")
    accelerators = [{**accelerators[0], "model": "A100"}]
    config = {"name": "other", "subClusters": [{"name": "a40", "topology": {"accelerators": accelerators}}]}
    (path.parent / "other_cluster.json").write_text(json.dumps(config))
    result = clustercockpit.read(path.parent)
    assert result.averages["model"].item() == "NVIDIA A40"
    assert result.jobs[0]["gpu_type"] == "a40"


def test_path_without_database_is_rejected(tmp_path: Path, database: Make) -> None:
    """Each case has its own error."""
    with pytest.raises(InputError, match="no such file"):
        clustercockpit.read(tmp_path / "missing.db")
    with pytest.raises(InputError, match="no database"):
        clustercockpit.read(tmp_path)
    text = tmp_path / "x.db"
    text.write_text("hello")
    with pytest.raises(InputError, match="not an SQLite database"):
        clustercockpit.read(text)
    text.unlink()
    path = database({}, table="other")
    with pytest.raises(InputError, match="it has no table job"):
        clustercockpit.read(path)
    path.unlink()
    path = database({}, columns=("job_id", "cluster"))
    with pytest.raises(InputError, match="no column start_time, duration, resources"):
        clustercockpit.read(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:1024] + b"\xff" * 5000)
    with pytest.raises(InputError, match="damaged"):
        clustercockpit.read(path)
    (tmp_path / "second.sqlite").write_bytes(whole)
    with pytest.raises(InputError, match="2 databases"):
        clustercockpit.read(tmp_path)


def test_nothing_is_written_beside_the_database(database: Make) -> None:
    """The database is opened read-only and immutable: without journal or lock."""
    path = database({})
    path.chmod(0o400)
    clustercockpit.read(path)
    assert [file.name for file in path.parent.iterdir()] == ["job.db"]


def test_published_jobs_give_known_totals(shared_data: Path) -> None:
    """544 jobs, 303 of them with GPUs, 94 at 0 %; 3,980 GPU-hours."""
    result = clustercockpit.read(shared_data / "clustercockpit")
    with_gpus = [job for job in result.jobs if job["gpus"]]
    assert (len(result.jobs), len(with_gpus), result.zero_utilization_jobs) == (544, 303, 94)
    assert round(sum(job["gpus"] * job["elapsed_s"] for job in with_gpus) / 3600) == 3980
    assert result.problems == ()
    largest = result.averages["fb_used_mib"].max()
    assert largest is not None
    assert 80_000 < float(str(largest)) < 81_920  # a full A100 with 80 GB
