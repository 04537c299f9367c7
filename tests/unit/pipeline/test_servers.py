"""Engines of a report: selection by the owners of their jobs, and charts of the first ones."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import polars as pl
import pytest
from server_samples import START, engine, idle, overloaded, serving

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.base.config import Config, StoreConfig
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.db.repository import Repository
from slurm_affinode.engines.crashes import crash_log
from slurm_affinode.engines.store import engine_store
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import SAMPLES as GPU_SAMPLES
from slurm_affinode.pipeline import servers
from slurm_affinode.slurm.accounting.schema import JOBS as JOBS_SCHEMA
from slurm_affinode.slurm.accounting.schema import conform

DAY = WasteQuery(START - timedelta(hours=8), START + timedelta(hours=16))
JOBS = pl.DataFrame({
    "cluster": ["alpha", "alpha", "beta"], "job_id": [1, 2, 1], "user": ["ann", "bob", "eve"],
    "account": ["physics", "chemistry", "law"], "partition": ["gpu", "long", "gpu"],
})  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Three engines: ann's in job 1 is overloaded, bob's in job 2 idle, and one without a known job is healthy."""
    config = Config(store=StoreConfig(state_dir=tmp_path))
    samples = [
        engine("fine:1", serving()), engine("lazy:1", idle(30), job="2"), engine("busy:1", overloaded(), job="1"),
    ]  # fmt: skip
    with contextlib.closing(engine_store(config.serving_dir)) as store:
        store.ingest(pl.concat(samples), source="test")
    return config


def engine_users(config: Config, timelines: int = 15, **filters: tuple[str, ...]) -> list[tuple[str, str | None]]:
    report = servers.usage_of(
        config, WasteQuery(DAY.since, DAY.until, **filters), JOBS, timelines=timelines
    )  # fmt: skip
    return [] if report is None else [(item.health.key.address, item.health.user) for item in report.engines]


def test_most_severe_engine_is_first_and_users_come_from_accounting(config):
    assert engine_users(config) == [("busy:1", "ann"), ("lazy:1", "bob"), ("fine:1", None)]


def test_filters_select_by_job(config):
    """Jobs of another cluster with the same ID do not count; an unknown job matches no filter."""
    assert engine_users(config, users=("bob",)) == [("lazy:1", "bob")]
    assert engine_users(config, accounts=("physics",)) == [("busy:1", "ann")]
    assert engine_users(config, partitions=("gpu", "long")) == [("busy:1", "ann"), ("lazy:1", "bob")]
    assert engine_users(config, users=("eve",)) == []
    assert engine_users(config, clusters=("beta",)) == []


def test_engine_without_a_cluster_belongs_to_the_only_one(tmp_path):
    config = Config(store=StoreConfig(state_dir=tmp_path))
    with contextlib.closing(engine_store(config.serving_dir)) as store:
        store.ingest(engine("busy:1", overloaded(), job="1", cluster="default"), source="test")
    for jobs, user in ((JOBS, None), (JOBS.filter(pl.col("cluster") == "alpha"), "ann")):
        report = servers.usage_of(config, DAY, jobs, timelines=0)
        assert [item.health.user for item in report.engines] == [user]


@pytest.mark.parametrize("timelines", [0, 1, 2, 3, 9])
def test_first_engines_have_timelines(config, timelines):
    report = servers.usage_of(config, DAY, JOBS, timelines=timelines)
    assert len(report.timelines) == min(timelines, 3)
    for item, frame in zip(report.engines, report.timelines, strict=False):
        assert frame["time"][0] == item.health.since
        assert frame["waiting"].max() == item.waiting_max


def test_nothing_without_samples_of_the_interval(config, tmp_path):
    later = WasteQuery(DAY.until, DAY.until + timedelta(days=1))
    assert servers.usage_of(config, later, JOBS, timelines=5) is None
    empty = Config(store=StoreConfig(state_dir=tmp_path / "empty"))
    assert servers.usage_of(empty, DAY, JOBS, timelines=5) is None


@pytest.mark.parametrize(("state", "kinds"), [("OUT_OF_MEMORY", ["out-of-memory"]), ("COMPLETED", [])])
def test_job_that_ran_out_of_memory_is_shown_with_its_engines(config, state, kinds):
    """From accounting; another cluster's job with the same ID does not count."""
    end = START + timedelta(minutes=20)
    row = {"job_id": 2, "submit": START, "start": START, "end": end, "state": state, "cluster": "alpha"}
    other = {**row, "cluster": "beta", "job_id": 1, "state": "OUT_OF_MEMORY"}
    with Repository.open(config.db_url) as store:
        store.upsert(conform(pl.DataFrame([row, other]), JOBS_SCHEMA))
    query = servers.ServerQuery(DAY.since, DAY.until)
    shown = {
        item.key.address: [each.kind for each in item.diagnoses if each.kind == "out-of-memory"]
        for item in servers.find(config, query).engines
    }
    assert shown == {"lazy:1": kinds, "fine:1": [], "busy:1": []}


def test_failures_in_a_log_of_the_engine_are_diagnosed(config):
    lines = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.\n"
    log = crash_log.scan([lines.encode()], "server.log")
    query = servers.ServerQuery(DAY.since, DAY.until, addresses=("lazy:1",))
    (item,) = servers.find(config, query, logs=[log]).engines
    assert [each.confidence for each in item.diagnoses if each.kind == "out-of-memory"] == [1.0]
    (quiet,) = servers.find(config, query).engines
    assert "out-of-memory" not in {each.kind for each in quiet.diagnoses}


@pytest.mark.parametrize(("clusters", "kinds"), [(("alpha",), {"out-of-memory"}), (("alpha", "beta"), set())])
def test_engine_of_an_unknown_cluster_has_events_of_the_only_one(
    tmp_path: Path, clusters: tuple[str, ...], kinds: set[str]
) -> None:
    """Job 1 of each cluster is another job: its end by Slurm says nothing about an engine that names no cluster."""
    config = Config(store=StoreConfig(state_dir=tmp_path))
    ended = START + timedelta(minutes=10)
    jobs = [{"cluster": name, "job_id": 1, "submit": START, "start": START, "end": ended, "state": "OUT_OF_MEMORY"}
            for name in clusters]  # fmt: skip
    with Repository.open(config.db_url) as store:
        store.upsert(conform(pl.DataFrame(jobs), JOBS_SCHEMA))
    with contextlib.closing(engine_store(config.serving_dir)) as store:
        store.ingest(engine("busy:1", serving(), job="1", cluster="default"), source="test")
    (result,) = servers.find(config, servers.ServerQuery(DAY.since, DAY.until)).engines
    assert {diagnosis.kind for diagnosis in result.diagnoses} & {"out-of-memory"} == kinds


def test_partition_of_an_engine_is_unknown_if_attempts_of_its_job_differ(config):
    moved = pl.concat([JOBS, JOBS.head(1).with_columns(pl.lit("long").alias("partition"))])
    for partition in ("gpu", "long"):
        report = servers.usage_of(config, replace(DAY, partitions=(partition,)), moved, timelines=0)
        assert "busy:1" not in {item.health.key.address for item in (report.engines if report else ())}


def test_failures_of_one_of_several_engines_are_unknown(config):
    """A log that names no engine may be of any of them."""
    lines = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.\n"
    log = crash_log.scan([lines.encode()], "server.log")
    every = servers.ServerQuery(DAY.since, DAY.until)
    (server,) = servers.tune(config, replace(every, addresses=("lazy:1",)), [log])
    assert [failure.kind for failure in server.tuning.facts.failures or ()] == ["gpu-out-of-memory"]
    assert not any("which of the selected engines" in line for line in server.tuning.unknown)
    several = servers.tune(config, every, [log])
    assert len(several) > 1
    assert {engine.tuning.facts.failures for engine in several} == {None}
    assert all(any("which of the selected engines" in line for line in engine.tuning.unknown) for engine in several)


def test_logs_of_different_starts_leave_the_options_unknown(config):
    """Of the logs of two servers, none decides; a log that has other facts completes the first one."""
    first, second, rank = (
        replace(crash_log.scan([b""], "a"), startup=crash_log.StartupFacts(**facts))
        for facts in ({"model": "a", "max_length": 512}, {"model": "b", "max_length": 512}, {"kv_tokens": 900})
    )
    query = servers.ServerQuery(DAY.since, DAY.until, addresses=("busy:1",))
    for logs, model in (([first, second], None), ([second, first], None), ([first, rank], "a")):
        (server,) = servers.tune(config, query, logs)
        assert (server.tuning.facts.model, server.tuning.facts.max_length) == (model, 512)
        assert any("the logs differ" in line for line in server.tuning.unknown) == (model is None)


@pytest.mark.parametrize("which", ["engines", "gpus"])
def test_damaged_part_is_named(config, which):
    """Its columns are readable, and its values are not; of the engines, or of the GPUs beside them."""
    gpus = pl.DataFrame({
        "cluster": "alpha", "node": "n1", "uuid": "GPU-1", "index": 0, "util_pct": 5.0,
        "time": [START + timedelta(seconds=15 * i) for i in range(2000)],
        "fb_used_mib": [float(i) for i in range(2000)],
    })  # fmt: skip
    with contextlib.closing(SampleStore(config.history_dir)) as store:
        store.ingest(conform(gpus, GPU_SAMPLES), source="test")
    with contextlib.closing(engine_store(config.serving_dir)) as store:
        samples = engine("with-gpu:1", serving()).with_columns(pl.lit("GPU-1").alias("gpus"))
        store.ingest(samples, source="gpu")
    root = config.serving_dir if which == "engines" else config.history_dir
    part = next(root.glob("day=*/part-*.parquet"))
    content = bytearray(part.read_bytes())
    content[4 : len(content) // 2] = b"\xff" * (len(content) // 2 - 4)
    part.write_bytes(content)
    for examine in (
        lambda: servers.find(config, servers.ServerQuery()), lambda: servers.tune(config, servers.ServerQuery()),
        lambda: servers.usage_of(config, DAY, JOBS, timelines=1),
    ):  # fmt: skip
        with pytest.raises(UnreachableError, match=rf"^[^\n]*{part.name}: the [^\n]* metrics cannot be read[^\n]*$"):
            examine()
