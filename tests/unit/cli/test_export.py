"""``slurm-affinode export trace``: from stored accounting and samples to a data set and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.cli.main import cli
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import SAMPLES
from slurm_affinode.slurm.accounting.schema import JOBS, conform

SINCE = datetime(2026, 11, 2, tzinfo=UTC)
INTERVAL = ("--since", "2026-11-02T00:00:00Z", "--until", "2026-11-03T00:00:00Z")


def run(*words: str) -> tuple[str, str]:
    done = CliRunner().invoke(cli, list(words), catch_exceptions=False, standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.stdout, done.stderr


def job(number: int, user: str, submit: int, start: int, end: int | None, **more: Any) -> dict[str, Any]:
    """Return a run with times in minutes."""
    moments = {"submit": submit, "eligible": submit, "start": start, "end": end}
    return {"cluster": "c", "job_id": number, "user": user, "account": "lab", "partition": "gpu", "job_name": "train",
            "state": "COMPLETED", "gpus": 2, "nodes": 1, "node_list": f"n{number}", "timelimit_s": 86400, "priority": 7,
            **{name: SINCE + timedelta(minutes=at) for name, at in moments.items() if at is not None},
            **more}  # fmt: skip


@pytest.fixture
def site(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that stores runs, and samples of the two GPUs of ``n1``: idle from minute 60 to 180."""

    def _site(*rows: dict[str, Any]) -> Path:
        types = {name: dtype for name, dtype in JOBS.items() if any(name in row for row in rows)}
        with Repository.open(f"sqlite:///{tmp_path / 'affinode.sqlite'}") as store:
            store.upsert(conform(pl.DataFrame(rows, schema_overrides=types, infer_schema_length=None), JOBS))
        samples = [
            {"cluster": "c", "node": "n1", "uuid": f"GPU-{gpu}", "time": SINCE + timedelta(minutes=minute),
             "util_pct": 0.0 if 60 <= minute < 180 else 80.0}
            for gpu in "ab" for minute in range(270)
        ]  # fmt: skip
        columns = {name: pl.Series([row.get(name) for row in samples], dtype=kind) for name, kind in SAMPLES.items()}
        with closing(SampleStore(tmp_path / "history")) as history:
            history.ingest(pl.DataFrame(columns), source="test")
        return tmp_path

    return _site


JOBS_OF_THREE = (
    job(1, "ann", 0, 0, 240), job(2, "bob", 30, 240, 270), job(3, "cleo", 30, 40, 100, state="FAILED"),
    job(4, "ann", 30, 40, 100, gpus=0), job(5, "bob", 100, 110, None, state="RUNNING"), job(6, "dan", 1, 2, 9, gpus=7),
)  # fmt: skip


def test_data_set_has_jobs_idle_windows_and_queue(site: Callable[..., Path], tmp_path: Path) -> None:
    """A running job and a rare request are left out; a job without samples of its GPUs is unknown."""
    out = tmp_path / "set"
    state = str(site(*JOBS_OF_THREE))
    text, _ = run("export", "trace", *INTERVAL, "--least-users", "3", "--state", state, "--out", str(out), "--json")
    record = json.loads(text)
    assert (record["jobs"], record["gpu_hours"], record["cluster"]) == (3, 11.0, "c")
    assert record["left_out"] == {"not ended in the interval": 1}
    assert (record["suppressed_jobs"], record["idle_gpu_hours"]) == (1, 4.0)
    jobs = pl.read_csv(out / "jobs.csv").sort("submit_s", "run_s")
    assert jobs.select("gpus", "wait_s", "run_s", "state").rows() == [
        (2, 0, 14_400, "completed"), (2, 12_600, 1800, "completed"), (2, 600, 3600, "failed"),
    ]  # fmt: skip
    assert set(jobs.filter(pl.col("wait_s") != 0)["measured"]) == {0}
    assert set(jobs["priority_class"]) == {4}
    idle = pl.read_csv(out / "idle_windows.csv")
    assert idle.select("begin_s", "end_s").rows() == [(3600, 10_800)]
    readme = (out / "README.md").read_text()
    assert "3 jobs of 3 users" in readme
    assert "1 job not ended in the interval." in readme
    assert not [name for name in ("ann", "bob", "cleo", "lab,", "train") if name in (out / "jobs.csv").read_text()]


def test_both_readers_give_the_figures_of_the_export(site: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "set"
    state = str(site(*JOBS_OF_THREE))
    run("export", "trace", *INTERVAL, "--least-users", "3", "--state", state, "--out", str(out))
    figures = json.loads(run("trace", "site", str(out), "--json", "--out", str(tmp_path / "page"))[0])
    standard = json.loads(run("trace", "swf", str(out / "jobs.swf"), "--json")[0])
    for name in ("jobs", "users", "unit_hours", "run_s", "wait_s", "size", "span_s", "since"):
        assert figures[name] == standard[name], name
    assert figures["idle"]["idle_gpu_hours"] == 4.0
    assert {name: row["jobs"] for name, row in figures["priority_classes"].items()} == {"4": 3}
    assert (figures["unit_hours"], figures["users"]) == (11.0, 3)
    assert "Idle windows" in (tmp_path / "page" / "report.html").read_text()


def test_key_file_gives_the_same_pseudonyms(site: Callable[..., Path], tmp_path: Path) -> None:
    state, key = str(site(*JOBS_OF_THREE)), tmp_path / "key"
    key.write_text("0123456789abcdef0123\n")
    words = ("export", "trace", *INTERVAL, "--least-users", "3", "--state", state)
    for name, more in (("a", ("--key-file", str(key))), ("b", ("--key-file", str(key))), ("c", ())):
        run(*words, *more, "--out", str(tmp_path / name))
    users = {name: pl.read_csv(tmp_path / name / "jobs.csv")["user"].to_list() for name in "abc"}
    assert users["a"] == users["b"]
    assert not set(users["a"]) & set(users["c"])
    key.write_text("short")
    with pytest.raises(AffinodeError, match="has 5 bytes"):
        run(*words, "--key-file", str(key), "--out", str(tmp_path / "d"))
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [((), "at least 5 users are needed"), (("--cluster", "x"), "cluster x has no GPU job")],
)
def test_refusals_write_nothing(site: Callable[..., Path], tmp_path: Path, words: tuple[str, ...], why: str) -> None:
    """Few users, and a cluster without GPU jobs."""
    state = str(site(*JOBS_OF_THREE))
    with pytest.raises(AffinodeError, match=why):
        run("export", "trace", *INTERVAL, *words, "--state", state, "--out", str(tmp_path / "set"))
    assert not (tmp_path / "set").exists()


def test_several_clusters_need_a_choice(site: Callable[..., Path], tmp_path: Path) -> None:
    state = str(site(*JOBS_OF_THREE, job(9, "eve", 0, 5, 9, cluster="d")))
    with pytest.raises(AffinodeError, match="several clusters have GPU jobs: c, d"):
        run("export", "trace", *INTERVAL, "--state", state, "--out", str(tmp_path / "set"))
