"""``report users`` and ``report queue``, from stored accounting and from the live Slurm."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import zombie_samples
from agent_stand_ins import NODE
from agent_stand_ins import job as slurm_job
from click.testing import CliRunner, Result

from slurm_affinode.base.config import MODEL_FILE, Config
from slurm_affinode.cli import usage
from slurm_affinode.cli.main import cli
from slurm_affinode.db.repository import Repository
from slurm_affinode.model.cluster import GpuCount, Job, Node
from slurm_affinode.model.finding import JobAttempt
from slurm_affinode.slurm.accounting.schema import JOBS, conform
from slurm_affinode.zombies.find import Assessment, Request

NOW = datetime.now(UTC)


@pytest.fixture(autouse=True)
def begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set ``NOW`` for each test: the commands read the clock, and the module was imported minutes before."""
    monkeypatch.setattr(sys.modules[__name__], "NOW", datetime.now(UTC).replace(microsecond=0))


def row(number: int, user: str, hours: float, **more: Any) -> dict[str, Any]:
    """A job that ended an hour ago after ``hours``, or a pending one (0 hours)."""
    begun = NOW - timedelta(hours=1 + hours)
    done = {"start": begun, "end": NOW - timedelta(hours=1), "state": "COMPLETED"} if hours else {"state": "PENDING"}
    return {"cluster": "c", "job_id": number, "submit": begun, "eligible": begun, "user": user, "account": "lab",
            "partition": "gpu", "cpus": 8, "gpus": 0, **done, **more}  # fmt: skip


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Users with GPU and CPU jobs, and pending jobs."""
    rows = [
        row(1, "ann", 10, gpus=2), row(2, "ann", 2, gpus=1, state="FAILED"),
        row(3, "bob", 20, partition="cpu", cpus=64), row(4, "eve\x1b[31m", 1, state="CANCELLED"),
        row(5, "bob", 0, req_gpus=4, partition="gpu,long", reason="Priority"),
        row(6, "ann", 0, eligible=NOW - timedelta(hours=9), reason="Resources", partition="cpu", req_tres="cpu=8"),
        row(7, "ann", 0, eligible=None, array_job_id=7, array_spec="2-9", reason="Dependency"),
        row(8, "ann", 5, gpus=1, end=None, state="RUNNING", elapsed_s=6 * 3600),
    ]  # fmt: skip
    types = {name: dtype for name, dtype in JOBS.items() if any(name in item for item in rows)}
    with Repository.open(f"sqlite:///{tmp_path / 'affinode.sqlite'}") as store:
        store.upsert(conform(pl.DataFrame(rows, schema_overrides=types, infer_schema_length=None), JOBS))
    return tmp_path


def run(state: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["report", *words, "--state", str(state)], catch_exceptions=False)


def rows(state: Path, *words: str) -> dict[str, dict[str, Any]]:
    record = json.loads(run(state, "users", "--json", *words).stdout)
    return {item[record["group"]]: item for item in record["rows"]}


def test_usage_per_user(state: Path) -> None:
    """GPU-hours, core-hours, numbers of jobs, running and pending jobs, and failures."""
    result = rows(state)
    assert list(result) == ["ann", "bob", "eve\x1b[31m"]
    ann = result["ann"]
    assert (ann["jobs"], ann["gpu_jobs"], ann["running"], ann["waiting"], ann["failed"]) == (3, 3, 1, 2, 1)
    assert ann["gpu_hours"] == pytest.approx(10 * 2 + 2 + 6, abs=0.01)
    assert (ann["gpus_now"], ann["cores_now"]) == (1, 8)
    assert result["bob"]["cpu_job_core_hours"] == pytest.approx(20 * 64)
    assert list(rows(state, "--by", "core-hours")) == ["bob", "ann", "eve\x1b[31m"]
    assert list(rows(state, "--group", "partition", "--by", "jobs")) == ["gpu", "cpu", "gpu,long"]
    assert list(rows(state, "--partition", "cpu")) == ["bob", "ann"]
    jobs = rows(state, "--group", "job", "--by", "gpus")
    assert next(iter(jobs)) == "8"
    assert (jobs["8"]["users"], jobs["8"]["gpus_now"], len(jobs)) == ("ann", 1, 8)
    text = run(state, "users", "--top", "2").stdout
    assert "1 more: --top 3" in text
    assert "Running, waiting and now: at 2" in text
    assert "\x1b" not in run(state, "users").stdout


def test_unaccounted_gpus_are_unknown(tmp_path: Path) -> None:
    """Without GPUs in accounting, GPU-hours are unknown, not 0; a user with pending jobs only has used 0."""
    table = [row(1, "ann", 10, gpus=None), row(2, "bob", 4, gpus=None, cpus=None), row(3, "eve", 0)]
    with Repository.open(f"sqlite:///{tmp_path / 'affinode.sqlite'}") as store:
        types = {name: dtype for name, dtype in JOBS.items() if any(name in item for item in table)}
        store.upsert(conform(pl.DataFrame(table, schema_overrides=types, infer_schema_length=None), JOBS))
    result = rows(tmp_path)
    names = ("gpu_jobs", "gpu_hours", "gpus_now", "core_hours", "cpu_job_core_hours", "jobs")
    assert [result["ann"][name] for name in names] == [None, None, 0, pytest.approx(80), None, 1]
    assert [result["bob"][name] for name in names] == [None, None, 0, None, None, 1]
    assert [result["eve"][name] for name in names] == [0] * 6
    assert "unknown" in run(tmp_path, "users").stdout


def test_pending_jobs_by_wait_time(state: Path) -> None:
    """The longest wait comes first; a job that is not eligible yet has not waited."""
    jobs = json.loads(run(state, "queue", "--json").stdout)["jobs"]
    assert [(group["id"], group["user"], group["gpus"], group["reason"]) for group in jobs] == [
        ("6", "ann", 0, "Resources"), ("5", "bob", 4, "Priority"), ("7_[2-9]", "ann", None, "Dependency"),
    ]  # fmt: skip
    assert jobs[0]["waited_s"] == pytest.approx(9 * 3600, abs=60)
    assert jobs[2]["waited_s"] == 0
    only = json.loads(run(state, "queue", "--json", "--gpus", "--partition", "long").stdout)
    assert [job["id"] for job in only["jobs"]] == ["5"]
    assert "9h" in run(state, "queue").stdout
    assert "No pending jobs" in run(state, "queue", "--user", "nobody").stdout


class Slurm:
    """A slurmctld with the given jobs."""

    def __init__(self, jobs: Sequence[Job], nodes: Sequence[Node] = ()) -> None:
        self._jobs, self._nodes = tuple(jobs), tuple(nodes)

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *_: object) -> None: ...

    def overview(self) -> tuple[Job, ...]:
        """Return all jobs."""
        return self._jobs

    def nodes(self) -> tuple[Node, ...]:
        """Return all nodes."""
        return self._nodes

    def config(self) -> dict[str, str]:
        """Return the configuration."""
        return {"ClusterName": "c"}


def test_live_usage_and_queue(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--live`` needs no database; ended jobs are ignored."""
    hours = timedelta(hours=1)
    runs = {"submit": NOW - 3 * hours, "start": NOW - 2 * hours, "cpus": 16, "tres_allocated": {"cpu": "16"}}
    jobs = [
        slurm_job(1, user="ann", **runs), slurm_job(2, user="ann", **runs),
        slurm_job(3, user="bob", state="COMPLETED", **{**runs, "end": NOW - hours}),
        slurm_job(4, user="bob", state="PENDING", start=None, submit=NOW - 2 * hours, eligible=NOW - hours,
                  gpus_requested=GpuCount(8), partitions=("a", "b"), reason="Priority"),
    ]  # fmt: skip
    monkeypatch.setattr(usage, "open_client", lambda backend, **_: Slurm(jobs))
    empty = state / "none"
    result = rows(empty, "--live", "--by", "cores")
    assert (result["ann"]["cores_now"], result["ann"]["running"]) == (32, 2)
    assert (result["bob"]["waiting"], result["bob"]["cores_now"]) == (1, 0)
    (job,) = json.loads(run(empty, "queue", "--live", "--json").stdout)["jobs"]
    assert (job["id"], job["gpus"], job["partition"]) == ("4", 8, "a,b")
    assert job["waited_s"] == pytest.approx(3600, abs=60)
    monkeypatch.setattr(usage, "open_client", lambda backend, **_: Slurm([]))
    assert rows(empty, "--live") == {}
    assert "No pending jobs" in run(empty, "queue", "--live").stdout


def test_live_queue_shows_when_gpus_become_free(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job holds both GPUs of the node for another hour by its limit, 20 min by its prediction; another is idle."""
    begun = NOW - timedelta(hours=1)
    holder = slurm_job(1, submit=begun, eligible=begun, start=begun, time_limit_s=7200, gpus_allocated=GpuCount(2),
                       node_gpus=None)  # fmt: skip
    pending = slurm_job(4, user="bob", state="PENDING", start=None, eligible=begun, gpus_requested=GpuCount(2),
                        nodes=(), reason="Resources")  # fmt: skip
    monkeypatch.setattr(usage, "open_client", lambda backend, **_: Slurm([holder, pending], [NODE]))
    (job,) = json.loads(run(state, "queue", "--live", "--json").stdout)["jobs"]
    assert (job["gpus_free"], job["enough_by_predictions"], "idle_jobs" in job) == (0, None, False)
    assert datetime.fromisoformat(job["enough_by_limits"]) == begun + timedelta(hours=2)
    text = run(state, "queue", "--live").stdout
    assert "GPUs free in" in text
    assert "predicted" not in text
    (state / MODEL_FILE).write_text("{}")
    broken = run(state, "queue", "--live")
    assert "run times are not predicted" in broken.stderr
    assert broken.exit_code == 0
    ends = {1: NOW + timedelta(minutes=20)}
    monkeypatch.setattr(usage, "_expected", lambda *_: (ends, "median", ""))
    record = json.loads(run(state, "queue", "--live", "--json").stdout)
    assert (record["predictor"], datetime.fromisoformat(record["jobs"][0]["enough_by_predictions"])) == (
        "median", ends[1]
    )  # fmt: skip
    assert "predicted" in run(state, "queue", "--live").stdout


def test_live_queue_names_the_idle_jobs_in_front(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = NOW - timedelta(hours=1)
    holder = slurm_job(1, user="ann", start=begun)
    pending = [
        slurm_job(number, user="bob", state="PENDING", start=None, eligible=begun, gpus_requested=GpuCount(gpus),
                  nodes=(), reason="Resources") for number, gpus in ((4, 1), (5, 2))
    ]  # fmt: skip
    monkeypatch.setattr(usage, "open_client", lambda backend, **_: Slurm([holder, *pending], [NODE]))
    idle = zombie_samples.squatter(
        subject=JobAttempt.of(holder), cluster="c", user="ann", nodes=("c1",), since=begun, observed_at=NOW
    )
    requests: list[Request] = []

    def find_live(config: Config, request: Request, **_: Any) -> Assessment:
        requests.append(request)
        return Assessment((idle,), begun, NOW, "live", 1, 1, 0, ("n9 is unknown",))

    monkeypatch.setattr(usage.live, "find_live", find_live)
    done = run(state, "queue", "--live", "--idle", "--json")
    record = json.loads(done.stdout)
    assert {job["id"]: [(each["job"], each["user"], each["idle_gpus"]) for each in job["idle_jobs"]]
            for job in record["jobs"]} == {"4": [("1", "ann", 1)], "5": []}  # fmt: skip
    assert record["notes"] == ["n9 is unknown"]
    assert "1 (ann, 1 GPU)" in run(state, "queue", "--live", "--idle").stdout
    assert set(requests[0].kinds) == {"squatter", "idle-allocation"}
    assert "--idle needs --live" in CliRunner().invoke(cli, ["report", "queue", "--idle"]).output


def test_outdated_accounting_is_reported_and_not_extrapolated(tmp_path: Path) -> None:
    """A job last seen running two weeks ago has no usage this week; its hours until then count."""
    begun = NOW - timedelta(days=15)
    rows = [
        {"cluster": "c", "job_id": 1, "submit": begun, "start": begun, "elapsed_s": 86_400, "state": "RUNNING",
         "user": "ann", "gpus": 8, "cpus": 8},
        {"cluster": "c", "job_id": 2, "submit": begun, "eligible": begun, "state": "PENDING", "user": "bob",
         "req_gpus": 1},
    ]  # fmt: skip
    with Repository.open(f"sqlite:///{tmp_path / 'affinode.sqlite'}") as store:
        store.upsert(conform(pl.DataFrame(rows, infer_schema_length=None), JOBS))
    week = CliRunner().invoke(cli, ["report", "users", "--since", "7d", "--state", str(tmp_path)])
    assert week.exit_code != 0
    completed = run(tmp_path, "users", "--since", "30d", "--json")
    record = json.loads(completed.stdout)
    assert {item["user"]: item["gpu_hours"] for item in record["rows"]} == {"ann": 192.0, "bob": 0.0}
    assert "accounting is known up to" in record["notes"][0]
    assert "accounting is known up to" in run(tmp_path, "users", "--since", "30d").stderr
    queued = json.loads(run(tmp_path, "queue", "--json").stdout)
    assert queued["jobs"][0]["waited_s"] == pytest.approx(86_400)
    assert "accounting is known up to" in queued["notes"][0]


@pytest.mark.parametrize("name", ["users", "queue"])
def test_old_name_still_works_and_names_the_new_one(state: Path, name: str) -> None:
    new = CliRunner().invoke(cli, ["report", name, "--json", "--state", str(state)], catch_exceptions=False)
    old = CliRunner().invoke(cli, ["zombies", name, "--json", "--state", str(state)], catch_exceptions=False)
    assert json.loads(old.stdout).keys() == json.loads(new.stdout).keys()
    assert old.exit_code == new.exit_code == 0
    assert f"'zombies {name}' is now 'report {name}'" in old.stderr
    assert new.stderr == ""


def test_old_names_are_not_listed() -> None:
    text = CliRunner().invoke(cli, ["zombies", "--help"]).stdout
    assert "users" not in text
    assert "queue" not in text


def test_option_of_the_page_before_a_report_command_is_an_error(state: Path) -> None:
    done = CliRunner().invoke(cli, ["report", "--since", "1d", "users", "--state", str(state)])
    assert done.exit_code == 2
    assert "--since belongs after 'users'" in done.output


def test_connection_options_have_their_own_section() -> None:
    text = CliRunner().invoke(cli, ["report", "users", "--help"]).stdout
    main_options, _, connection = text.partition("Connection options:")
    assert "--live" in main_options
    assert "--db" not in main_options
    assert all(option in connection for option in ("--config", "--state", "--db", "--slurm-backend"))
