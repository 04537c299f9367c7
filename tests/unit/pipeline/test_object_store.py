"""Ingests and reports with the samples in an object store."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from distributed import LocalCluster
from object_server import ObjectServer, refusal

from slurm_affinode.analysis.join import kernel
from slurm_affinode.base.config import Config, StoreConfig
from slurm_affinode.engines.store import engine_store
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.pipeline import dask_workers

from .sampled_site import add_jobs, assert_same, command, samples_of, written

GPUS = 4


def config_of(state: Path, history: object = None) -> Config:
    return Config(store=StoreConfig(state_dir=state, history=None if history is None else str(history)))


@pytest.fixture
def local(tmp_path: Path) -> Config:
    """Jobs, and samples in a directory."""
    config = config_of(tmp_path / "state")
    add_jobs(config, GPUS)
    fill(config)
    return config


def fill(config: Config) -> None:
    """Ingest the samples."""
    with closing(SampleStore(config.history_dir)) as history:
        history.ingest(samples_of(range(2)), source="a")
        history.ingest(samples_of(range(1, GPUS), 2), source="b")


def url(object_server: ObjectServer) -> str:
    return f"{object_server.bucket()}/history"


def test_report_is_that_of_a_directory(local: Config, object_server: ObjectServer, tmp_path: Path) -> None:
    """Every byte of it. The second one makes no copy again."""
    expected = written(local, tmp_path / "local")
    remote = config_of(local.state_dir, url(object_server))
    fill(remote)
    assert_same(expected, written(remote, tmp_path / "remote"))
    object_server.requests.clear()
    assert_same(expected, written(remote, tmp_path / "again"))
    assert not [path for method, path in object_server.requests if path.endswith(".parquet")]
    with closing(engine_store(remote.serving_dir)) as engines:
        assert engines.days() == []


@pytest.fixture
def cluster(object_server: ObjectServer) -> Iterator[LocalCluster]:
    """Two workers, in the environment of the server's clients."""
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", memory_limit=0) as cluster:
        yield cluster


def test_workers_copy_what_they_read(
    local: Config, object_server: ObjectServer, cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is the same, and this machine copies no samples."""
    monkeypatch.setattr(kernel, "MOST_ROWS", 1000)
    monkeypatch.setattr(kernel.ranges_of, "__kwdefaults__", {"most_rows": 1000})
    expected = written(local, tmp_path / "local")
    remote = config_of(local.state_dir, url(object_server))
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


def test_file_is_ingested_once(
    object_server: ObjectServer,
    tmp_path: Path,
    recorded: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also from another machine."""
    path = str(recorded / "gpu" / "dcgm-exporter.prom")
    place = url(object_server)
    for number, text in enumerate(("new         6", "nothing new: 1 file")):
        config = configured(tmp_path, place, f'history_cache = "{tmp_path}/{number}"\n')
        assert command(monkeypatch, "ingest", "gpu", path, "--config", str(config)) == 0
        assert text in capsys.readouterr().out
    assert not (tmp_path / "state" / "history").exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [("NoSuchBucket", "The bucket does not exist"), ("AccessDenied", "Access Denied"), ("ExpiredToken", "It expired")],
)
def test_refusal_ends_a_command_with_one_line(  # noqa: PLR0917
    object_server: ObjectServer, tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], code: str, message: str,
) -> None:  # fmt: skip
    """And a hint; the exit status is that of services that cannot be reached."""
    place = url(object_server)
    config = str(configured(tmp_path, place))
    object_server.before = lambda method, path: refusal(
        "404 Not Found" if code == "NoSuchBucket" else "403 No", code, message
    )
    path = str(recorded / "gpu" / "dcgm-exporter.prom")
    assert command(monkeypatch, "ingest", "gpu", path, "--config", config) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"slurm-affinode: {place}/sources.jsonl: cannot be read: {code}: {message}"
    assert len(lines) == 2


def test_credentials_in_the_configuration_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(tmp_path, "s3://key:geheim@bucket/x")
    assert command(monkeypatch, "report", "--config", str(config)) == 2
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
    assert command(monkeypatch, "ingest", "gpu", path, "--config", str(config)) == 2
    assert "pip install 'slurm-affinode[objects]'" in capsys.readouterr().err
