"""Ingests and reports with the samples in an object store."""

from __future__ import annotations

import filecmp
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from distributed import LocalCluster
from object_server import ObjectServer, refusal

from slurm_affinode.analysis.join import kernel
from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.base.config import Config, StoreConfig
from slurm_affinode.cli.main import main
from slurm_affinode.db.repository import Repository
from slurm_affinode.engines.store import engine_store
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import SAMPLES
from slurm_affinode.pipeline import dask_workers, report
from slurm_affinode.slurm.accounting.schema import JOBS, conform

START = datetime(2026, 11, 2, tzinfo=UTC)
DAYS, GPUS = 3, 4
NOW = START + timedelta(days=DAYS)
QUERY = WasteQuery(START, NOW)


def rows(gpus: range, step: int = 1) -> pl.DataFrame:
    """Return samples of every minute, with idle times."""
    return conform(pl.DataFrame([
        {"cluster": "alpha", "node": f"n{gpu}", "uuid": f"GPU-{gpu}", "index": 0, "model": "NVIDIA A100-SXM4-80GB",
         "time": START + timedelta(minutes=i), "util_pct": 0.0 if i // 50 % 3 else 100 / (3 + gpu + i % 11),
         "fb_used_mib": 1024 / (1 + gpu) + i % 977, "power_w": 55.7 + i % 13 / 7, "fb_total_mib": 81920.0}
        for gpu in gpus for i in range(0, DAYS * 1440, step)
    ]), SAMPLES)  # fmt: skip


def config_of(state: Path, history: object = None) -> Config:
    return Config(store=StoreConfig(state_dir=state, history=None if history is None else str(history)))


@pytest.fixture
def local(tmp_path: Path) -> Config:
    """Jobs, and samples in a directory."""
    config = config_of(tmp_path / "state")
    jobs = [
        {"cluster": "alpha", "job_id": 100 * gpu + k, "submit": START, "job_name": "train", "user": f"u{k % 3}",
         "account": "physics", "partition": "gpu", "qos": "normal", "state": "COMPLETED",
         "start": START + timedelta(hours=6 * k, minutes=7), "end": START + timedelta(hours=6 * k + 5, seconds=17),
         "nodes": 1, "node_list": f"n{gpu}", "gpus": 1}
        for gpu in range(GPUS) for k in range(4 * DAYS)
    ]  # fmt: skip
    with Repository.open(config.db_url) as store:
        store.upsert(conform(pl.DataFrame(jobs), JOBS))
    fill(config)
    return config


def fill(config: Config) -> None:
    """Ingest the samples."""
    with closing(SampleStore(config.history_dir)) as history:
        history.ingest(rows(range(2)), source="a")
        history.ingest(rows(range(1, GPUS), 2), source="b")


def url(s3: ObjectServer) -> str:
    return f"s3://{s3.bucket()}/history"


def written(config: Config, out: Path, **more: object) -> Path:
    report.build_report(config, QUERY, out, options=report.ReportOptions(csv=True), now=NOW, **more)  # type: ignore[arg-type]
    return out


def assert_same(one: Path, other: Path) -> None:
    """All files of two reports are equal."""
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert filecmp.cmpfiles(one, other, names, shallow=False) == (names, [], [])


def test_report_is_that_of_a_directory(local: Config, s3: ObjectServer, tmp_path: Path) -> None:
    """Every byte of it. The second one makes no copy again."""
    expected = written(local, tmp_path / "local")
    remote = config_of(local.state_dir, url(s3))
    fill(remote)
    assert_same(expected, written(remote, tmp_path / "remote"))
    s3.requests.clear()
    assert_same(expected, written(remote, tmp_path / "again"))
    assert not [path for method, path in s3.requests if path.endswith(".parquet")]
    with closing(engine_store(remote.serving_dir)) as engines:
        assert engines.days() == []


@pytest.fixture
def cluster(s3: ObjectServer) -> Iterator[LocalCluster]:
    """Two workers, in the environment of the server's clients."""
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", memory_limit=0) as cluster:
        yield cluster


def test_workers_copy_what_they_read(
    local: Config, s3: ObjectServer, cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is the same, and this machine copies no samples."""
    monkeypatch.setattr(kernel, "MOST_ROWS", 1000)
    monkeypatch.setattr(kernel.ranges_of, "__kwdefaults__", {"most_rows": 1000})
    expected = written(local, tmp_path / "local")
    remote = config_of(local.state_dir, url(s3))
    fill(remote)
    cache = remote.history_dir.cache  # type: ignore[union-attr]
    for path in cache.glob("day=*/part-*"):
        path.unlink()
    with dask_workers.connected(cluster.scheduler_address, state=remote.state_dir) as workers:
        assert_same(expected, written(remote, tmp_path / "dask", fold=workers.fold))


def configured(tmp_path: Path, history: str, more: str = "") -> Path:
    path = tmp_path / "config.toml"
    path.write_text(f'[store]\nstate_dir = "{tmp_path}/state"\nhistory = "{history}"\n{more}')
    return path


def status(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Run a command in this process, and return its exit status."""
    monkeypatch.setattr("sys.argv", ["slurm-affinode", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_file_is_ingested_once(
    s3: ObjectServer,
    tmp_path: Path,
    recorded: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also from another machine."""
    path = str(recorded / "gpu" / "dcgm-exporter.prom")
    place = url(s3)
    for number, text in enumerate(("new         6", "nothing new: 1 file")):
        config = configured(tmp_path, place, f'history_cache = "{tmp_path}/{number}"\n')
        assert status(monkeypatch, "ingest", "gpu", path, "--config", str(config)) == 0
        assert text in capsys.readouterr().out
    assert not (tmp_path / "state" / "history").exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [("NoSuchBucket", "The bucket does not exist"), ("AccessDenied", "Access Denied"), ("ExpiredToken", "It expired")],
)
def test_refusal_ends_a_command_with_one_line(  # noqa: PLR0917
    s3: ObjectServer, tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], code: str, message: str,
) -> None:  # fmt: skip
    """And a hint; the exit status is that of services that cannot be reached."""
    place = url(s3)
    config = str(configured(tmp_path, place))
    s3.before = lambda method, path: refusal("404 Not Found" if code == "NoSuchBucket" else "403 No", code, message)
    path = str(recorded / "gpu" / "dcgm-exporter.prom")
    assert status(monkeypatch, "ingest", "gpu", path, "--config", config) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"slurm-affinode: {place}/sources.jsonl: cannot be read: {code}: {message}"
    assert len(lines) == 2


def test_credentials_in_the_configuration_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(tmp_path, "s3://key:geheim@bucket/x")
    assert status(monkeypatch, "report", "--config", str(config)) == 2
    text = capsys.readouterr().err
    assert "credentials in the URL of bucket" in text
    assert "geheim" not in text


def test_missing_extra_is_one_line(
    tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("bucket", "objects"):
        monkeypatch.delitem(sys.modules, f"slurm_affinode.metrics.parquet.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "boto3", None)
    config = configured(tmp_path, "s3://bucket/x")
    path = str(recorded / "gpu" / "dcgm-exporter.prom")
    assert status(monkeypatch, "ingest", "gpu", path, "--config", str(config)) == 2
    assert "pip install 'slurm-affinode[objects]'" in capsys.readouterr().err
