"""A nightly run reads new samples from Prometheus; a failing server is reported and does not stop the run."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from fake_http import Answer, Question, serving

from slurm_affinode.base import config as configuration
from slurm_affinode.db.repository import Repository
from slurm_affinode.pipeline.nightly import Failure, configured

TONIGHT = datetime(2026, 11, 2, 4, 15, tzinfo=UTC)
TOMORROW = datetime(2026, 11, 3, 4, 15, tzinfo=UTC)


def an_hourly_gpu(question: Question) -> Answer:
    """A server with one sample per hour."""
    _, path, params, _ = question
    if path.endswith("/values"):
        return Answer(json.dumps({"status": "success", "data": ["DCGM_FI_DEV_GPU_UTIL"]}))
    until = float(params["time"][0])
    since = until - float(params["query"][0].partition("[")[2].partition("s]")[0])
    values = [[at, "5"] for at in range(int(since // 3600 + 1) * 3600, int(until) + 1, 3600)]
    metric = {"__name__": "DCGM_FI_DEV_GPU_UTIL", "UUID": "GPU-1", "Hostname": "n1"}
    result = [{"metric": metric, "values": values}] if values else []
    return Answer(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}))


def test_each_run_reads_new_samples(tmp_path: Path) -> None:
    """Seven days at first, then one day with overlap; when the server rejects requests, files are still read."""
    (tmp_path / "n2.csv").write_text("timestamp,node,uuid,util_pct\n2026-11-02T10:00:00Z,n2,GPU-2,5\n")
    with Repository.open(f"sqlite:///{tmp_path / 'affinode.sqlite'}") as store:
        with serving(judge=an_hourly_gpu) as fake:
            text = f'[prometheus]\nurl = "{fake.url}"\n[nightly]\ngpu_paths = ["{tmp_path}/*.csv"]\n'
            (tmp_path / "config.toml").write_text(text)
            config = configuration.load(tmp_path / "config.toml", env={}, state_dir=tmp_path / "state")
            gpu = configured(config).gpu
            files, server = gpu(store, TONIGHT)
            assert (files, server) == (
                "1 files with 1 samples (1 new), 0 files unchanged",
                f"{fake.url} from 2026-10-26T04:15:00Z: 168 samples (168 new)",
            )
            _, server = gpu(store, TOMORROW)
            assert server == f"{fake.url} from 2026-11-02T04:05:00Z: 24 samples (24 new)"
            fake.judge = lambda question: Answer("", 403)
            _, denied = gpu(store, TOMORROW)
        assert isinstance(denied, Failure)
        assert (denied.part, denied.exit_code) == ("GPU metrics", 2)


def an_hourly_engine(question: Question) -> Answer:
    """A server with one scrape of an engine per hour."""
    _, path, params, _ = question
    if path.endswith("/values"):
        return Answer(json.dumps({"status": "success", "data": ["vllm:num_requests_running"]}))
    until, query = float(params["time"][0]), params["query"][0]
    result = []
    if query.startswith("vllm:num_requests_running"):
        since = until - float(query.partition("[")[2].partition("s]")[0])
        values = [[at, "5"] for at in range(int(since // 3600 + 1) * 3600, int(until) + 1, 3600)]
        metric = {"__name__": "vllm:num_requests_running", "instance": "n1:8000", "model_name": "m"}
        result = [{"metric": metric, "values": values}] if values else []
    return Answer(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}))


def test_each_run_reads_new_samples_of_engines(tmp_path: Path) -> None:
    with Repository.open(f"sqlite:///{tmp_path / 'affinode.sqlite'}") as store:
        with serving(judge=an_hourly_engine) as fake:
            (tmp_path / "config.toml").write_text(f'[prometheus]\nurl = "{fake.url}"\n')
            config = configuration.load(tmp_path / "config.toml", env={}, state_dir=tmp_path / "state")
            engines = configured(config).serving
            assert list(engines(store, TONIGHT)) == [f"{fake.url} from 2026-10-26T04:15:00Z: 168 samples (168 new)"]
            assert list(engines(store, TOMORROW)) == [f"{fake.url} from 2026-11-02T04:05:00Z: 24 samples (24 new)"]
            fake.judge = lambda question: Answer("", 403)
            [denied] = engines(store, TOMORROW)
        assert isinstance(denied, Failure)
        assert (denied.part, denied.exit_code) == ("engine metrics", 2)


def test_server_without_engines_is_not_a_failure(tmp_path: Path) -> None:
    with Repository.open(f"sqlite:///{tmp_path / 'affinode.sqlite'}") as store, serving(judge=an_hourly_gpu) as fake:
        (tmp_path / "config.toml").write_text(f'[prometheus]\nurl = "{fake.url}"\n')
        config = configuration.load(tmp_path / "config.toml", env={}, state_dir=tmp_path / "state")
        assert list(configured(config).serving(store, TONIGHT)) == [f"{fake.url} from 2026-10-26T04:15:00Z: no engines"]
