"""Commands about one of three clusters in one store: the output is that of a store with this cluster alone.

The clusters have the same job IDs, submit times, users, accounts, partitions, nodes, GPU indices, and UUIDs or none.
Their jobs run at different times. One has job labels in its GPU metrics, one recorded GPUs, one neither.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from slurm_affinode.base.config import Config, StoreConfig
from slurm_affinode.db.repository import Repository
from slurm_affinode.engines.schema import SAMPLES as ENGINE_SAMPLES
from slurm_affinode.engines.store import engine_store
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import SAMPLES
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS, JOBS, conform

from .sampled_site import command

START = datetime(2026, 11, 2, tzinfo=UTC)
NOW = START + timedelta(hours=12)
PERIOD = ("--since", "2026-11-02T00:00Z", "--until", "2026-11-02T12:00Z")
NAMES = ("alpha", "beta", "gamma")
GPUS = [(f"n{node}", gpu) for node in range(2) for gpu in range(2)]
JOB = "102"


def jobs_on(rng: random.Random, first: int) -> Iterator[tuple[int, datetime, datetime]]:
    """Yield ID, start and end of the jobs on a GPU."""
    at, number = START + timedelta(minutes=rng.randrange(30)), first
    while at < NOW - timedelta(hours=1):
        end = min(NOW, at + timedelta(minutes=rng.randrange(60, 200)))
        yield number, at, end
        at, number = end + timedelta(minutes=rng.randrange(1, 30)), number + 1


def filled(state: Path, clusters: tuple[str, ...], *, uuids: bool) -> Path:
    """Write made-up jobs, GPU samples and engines of each cluster, which depend on its name alone."""
    config = Config(store=StoreConfig(state_dir=state))
    rows: dict[str, list[dict[str, Any]]] = {"jobs": [], "records": [], "samples": [], "engines": []}
    for cluster in clusters:
        rng = random.Random(cluster)  # noqa: S311 - made-up jobs
        for place, (node, gpu) in enumerate(GPUS):
            plan = list(jobs_on(rng, 100 * place + 1))
            for number, start, end in plan:
                rows["jobs"].append(
                    {"cluster": cluster, "job_id": number, "submit": START, "eligible": START, "job_name": "train",
                     "user": f"u{number % 3}", "account": "physics", "partition": "gpu", "qos": "normal",
                     "state": "COMPLETED" if end < NOW else "RUNNING", "start": start, "cpus": 4, "gpus": 1,
                     "end": end if end < NOW else None, "nodes": 1, "node_list": node, "timelimit_s": 14_400}
                )  # fmt: skip
                if cluster == "gamma":
                    rows["records"].append(
                        {"cluster": cluster, "job_id": number, "start": start, "node": node, "gpu": str(gpu)}
                    )
            busy = 10 + 50 * rng.random()
            for minute in range(int((NOW - START).total_seconds()) // 60):
                time = START + timedelta(minutes=minute)
                job = next((number for number, start, end in plan if start <= time < end), None)
                idle = job is None or minute // 30 % 3 == len(cluster) % 3
                rows["samples"].append(
                    {"cluster": cluster, "node": node, "uuid": f"GPU-{node}-{gpu}" if uuids else None, "index": gpu,
                     "model": "A100", "time": time, "util_pct": 0.0 if idle else busy + minute % 7, "power_w": busy,
                     "fb_used_mib": 30_000.0 + minute % 90, "fb_total_mib": 81_920.0,
                     "job": str(job) if job is not None and cluster == "alpha" else None}
                )  # fmt: skip
                if minute % 5 == 0 and gpu == 0:
                    rows["engines"].append(
                        {"time": time, "cluster": cluster, "address": f"{node}:8000", "node": node, "user": "u1",
                         "job": None if job is None else str(job), "engine": "vllm", "kv_usage": 0.3,
                         "running": minute % (3.0 + len(cluster)), "waiting": 0.0 if cluster == "beta" else minute / 90}
                    )  # fmt: skip
    frames = {name: pl.DataFrame(members, infer_schema_length=None) for name, members in rows.items()}
    with Repository.open(config.db_url) as store:
        store.upsert(conform(frames["jobs"], JOBS))
        if rows["records"]:
            store.upsert_allocation_gpus(conform(frames["records"], ALLOCATION_GPUS))
    with closing(SampleStore(config.history_dir)) as history:
        history.ingest(conform(frames["samples"], SAMPLES), source="all")
    with closing(engine_store(config.serving_dir)) as history:
        history.ingest(conform(frames["engines"], ENGINE_SAMPLES), source="engines")
    return state


@pytest.fixture(scope="module", params=[True, False], ids=["the same UUIDs", "no UUIDs"])
def states(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Path]:
    """All clusters, and each alone."""
    return {
        clusters: filled(tmp_path_factory.mktemp("-".join(clusters)), clusters, uuids=request.param)
        for clusters in (NAMES, *((name,) for name in NAMES))
    }


COMMANDS = {
    "job": ("job", JOB),
    "zombies explain": ("zombies", "explain", JOB, "--window", "10m"),
    "zombies list": ("zombies", "list", "--min-score", "0", "--window", "10m", *PERIOD),
    "report users": ("report", "users", "--group", "job", "--top", "500", *PERIOD),
    "report": ("report", "--csv", "--trend", "0", *PERIOD),
    "export trace": ("export", "trace", "--least-users", "2", *PERIOD),
    "serving list": ("serving", "list"),
}  # fmt: skip


@pytest.mark.parametrize("cluster", NAMES)
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_output_about_a_cluster_is_that_of_its_store_alone(  # noqa: PLR0917 - fixtures and parameters
    states: dict[tuple[str, ...], Path], words: tuple[str, ...], cluster: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_bytes(b"k" * 32)
    shown = []
    for number, clusters in enumerate((NAMES, (cluster,))):
        out = tmp_path / str(number)
        more = {"report": ("--out", str(out)), "export": ("--out", str(out), "--key-file", str(key))}
        options = more.get(words[0], ()) if words[:2] != ("report", "users") else ()
        command(monkeypatch, *words, *options, "--json", "--cluster", cluster, "--state", str(states[clusters]))
        tables = {path.name: sorted(path.read_text().splitlines()) for path in out.glob("*.csv")}
        shown.append((figures_of(capsys.readouterr().out, words[:2]), figures_of_tables(tables)))
    assert shown[0][0]
    assert shown[0] == shown[1]


def figures_of(text: str, words: tuple[str, ...]) -> Any:
    """Return JSON output without times, paths and sums in an arbitrary order, and of a report the figures."""
    values = json.loads(text)
    if words == ("report", "--csv"):
        return {key: values[key] for key in ("total", "users", "jobs", "findings") if key in values}
    return {key: value for key, value in values.items() if key not in ("gpu_hours", "out", "generated")}


def figures_of_tables(tables: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the rows of tables; the order of jobs in an exported trace is arbitrary, and so are their numbers."""
    if "idle_windows.csv" not in tables:
        return tables
    return {
        name: sorted(row.partition(",")[2] for row in rows) if name in ("jobs.csv", "idle_windows.csv") else rows
        for name, rows in tables.items()
    }  # fmt: skip


def test_replay_of_a_cluster_is_that_of_its_store_alone(
    states: dict[tuple[str, ...], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def replays(clusters: tuple[str, ...]) -> list[Any]:
        command(
            monkeypatch, "whatif", "--suspend-idle", "10m", *PERIOD, "--partial", "--json",
            "--state", str(states[clusters]),
        )  # fmt: skip
        made: list[Any] = json.loads(capsys.readouterr().out)["clusters"]
        return made

    assert replays(NAMES) == [replay for name in NAMES for replay in replays((name,))]


@pytest.mark.parametrize(
    "words", [("job", JOB), ("zombies", "explain", JOB), ("export", "trace", "--out", "x", *PERIOD)]
)
def test_command_that_needs_a_cluster_names_the_choices(
    states: dict[tuple[str, ...], Path], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert command(monkeypatch, *words, "--state", str(states[NAMES])) == 2
    assert "alpha, beta, gamma" in capsys.readouterr().err


def test_index_of_reports_has_each_cluster(
    states: dict[tuple[str, ...], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its figures in each row: the index of all has those of the index of each."""

    def days(clusters: tuple[str, ...]) -> dict[str, Any]:
        out = tmp_path / "-".join(clusters)
        state = str(states[clusters])
        command(monkeypatch, "nightly", "--now", "2026-11-03T00:00Z", "--state", state, "--out", str(out))
        (day,) = [entry for entry in json.loads((out / "index.json").read_text())["reports"] if entry["kind"] == "day"]
        figures: dict[str, Any] = day["clusters"]
        return figures

    together = days(NAMES)
    assert sorted(together) == list(NAMES)
    for name in NAMES:
        assert together[name] == days((name,))[name]
