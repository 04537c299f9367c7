"""The spool: samples on disk, of which a crash loses at most the last line, and which can be ingested."""

from __future__ import annotations

import csv
from dataclasses import replace

import polars as pl
import pytest
from gpu_fakes import IDLE

from slurm_affinode.gpu import sampler as spool_module
from slurm_affinode.gpu.sampler import COLUMNS, Spool
from slurm_affinode.metrics import aliases
from slurm_affinode.metrics.ingest import ingest_files
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.readers.common import ReadOptions
from slurm_affinode.metrics.schema import SAMPLES
from slurm_affinode.metrics.spool import main, to_parquet
from slurm_affinode.model.gpu import GpuFault

T0 = 1_795_234_200.25


@pytest.fixture
def opened():
    """Return a function that makes spools; files still open at the end are closed without ``close``, as in a crash."""
    made = []

    def make(directory, closed=None, **options):
        settings = {"node": "c1", "cluster": "alpha", "file_s": 60.0, "keep_s": None, "now": lambda: T0}
        made.append(Spool(directory, closed=(closed if closed is not None else []).append, **(settings | options)))
        return made[-1]

    yield make
    for spool in made:
        if spool._file is not None:
            spool._file.close()


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def taken(directory, root):
    store = SampleStore(root)
    summary = ingest_files(store, [directory], ReadOptions(aliases=aliases.load(None, {})))
    assert not summary.failed
    return summary, store


def test_columns_are_those_of_the_metrics_store():
    assert tuple(SAMPLES) == COLUMNS


def test_file_is_closed_when_its_time_is_over(opened, tmp_path, sweep_at):
    """The next sweep begins another file, and the closed one is passed on."""
    closed = []
    spool = opened(tmp_path, closed)
    for second in (0, 1, 59, 60, 61):
        spool.put(sweep_at(T0 + second))
    assert names(tmp_path) == ["gpu-c1-20261121T041000.250Z.csv", "gpu-c1-20261121T041100.250Z.csv.part"]
    assert [path.name for path in closed] == ["gpu-c1-20261121T041000.250Z.csv"]
    spool.close()
    assert len(closed) == 2


def test_clock_that_is_set_back_begins_another_file(opened, tmp_path, sweep_at):
    spool = opened(tmp_path)
    spool.put(sweep_at(T0))
    spool.put(sweep_at(T0 - 10))
    assert len(names(tmp_path)) == 2


def test_samples_are_ingested_as_they_were_read(opened, tmp_path, sweep_at):
    """CSV and Parquet give the same samples, missing values are null, and both together are counted once."""
    spool = opened(tmp_path / "spool")
    busy = replace(IDLE, util_pct=97.0, sm_active=0.123456, power_w=None, fb_used_mib=40000.5)
    spool.put(sweep_at(T0, ("7", "12"), busy))
    spool.put(sweep_at(T0 + 1, None))
    spool.close()
    [path] = (tmp_path / "spool").iterdir()
    text = path.read_bytes()
    summary, store = taken(tmp_path / "spool", tmp_path / "history")
    assert (summary.samples, summary.new, summary.devices) == (4, 4, 2)
    rows = store.scan().sort("uuid", "time").collect()
    assert rows["util_pct"].to_list() == [97.0, 0.0, 97.0, 0.0]
    assert rows["sm_active"].to_list() == pytest.approx([0.123456, None, 0.123456, None])
    assert rows["power_w"].to_list() == [None, 60.5, None, 60.5]
    assert rows["job"].to_list() == ["12,7", None, None, None]
    assert rows["cluster"].unique().to_list() == ["alpha"]
    assert rows["time"].dt.epoch("ms").unique().sort().to_list() == [int(T0 * 1000), int(T0 * 1000) + 1000]
    parquet = to_parquet(path)
    assert names(tmp_path / "spool") == [parquet.name]
    path.write_bytes(text)
    summary, _ = taken(tmp_path / "spool", tmp_path / "history")
    assert (summary.samples, summary.new) == (4, 0)


def test_crash_loses_only_the_incomplete_line(opened, tmp_path, sweep_at):
    """At the next start the open file is truncated and closed, and leftover CSV files are passed on again."""
    spool = opened(tmp_path)
    spool.put(sweep_at(T0))
    spool.put(sweep_at(T0 + 1))
    [part] = tmp_path.iterdir()
    part.write_bytes(part.read_bytes() + b"alpha,c1,GPU-a,0000")
    (tmp_path / "gpu-c1-20261121T040000.000Z.csv.part").write_text(",".join(COLUMNS) + "\n")
    (tmp_path / "gpu-c1-2-20261121T040000.000Z.csv.part").write_text("another node's\n")
    closed = []
    opened(tmp_path, closed)
    assert names(tmp_path) == ["gpu-c1-2-20261121T040000.000Z.csv.part", "gpu-c1-20261121T041000.250Z.csv"]
    assert closed[0].read_text().count("\n") == 5
    assert closed[0].read_text().endswith("\n")


def test_old_files_are_deleted(opened, tmp_path, sweep_at):
    """Only files of this node are deleted, by age."""
    clock = [T0]
    spool = opened(tmp_path, keep_s=3600.0, now=lambda: clock[0])
    for name in ("gpu-c1-20261101T000000.000Z.parquet", "gpu-c2-20261101T000000.000Z.parquet", "notes.txt"):
        (tmp_path / name).write_text("")
    clock[0] = (tmp_path / "notes.txt").stat().st_mtime + 7200
    spool.put(sweep_at(clock[0]))
    spool.rotate()
    left = names(tmp_path)
    assert "gpu-c1-20261101T000000.000Z.parquet" not in left
    assert {"gpu-c2-20261101T000000.000Z.parquet", "notes.txt"} <= set(left)


def test_full_disk_is_reported_once_and_survived(opened, tmp_path, sweep_at, monkeypatch):
    """Sampling continues; earlier samples stay readable."""
    messages = []
    spool = opened(tmp_path, say=messages.append)
    spool.put(sweep_at(T0))
    real = spool_module.rows_of

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spool_module, "rows_of", full)
    spool.put(sweep_at(T0 + 1))
    spool.put(sweep_at(T0 + 2))
    monkeypatch.setattr(spool_module, "rows_of", real)
    spool.put(sweep_at(T0 + 3))
    assert [line.rpartition(": ")[2] for line in messages] == ["No space left on device", "samples are written again"]
    spool.close()
    summary, _ = taken(tmp_path, tmp_path / "history")
    assert summary.new == 4


def test_sweep_without_samples_makes_no_file(opened, tmp_path, sweep_at):
    spool = opened(tmp_path)
    spool.put(replace(sweep_at(T0), samples=()))
    spool.close()
    assert names(tmp_path) == []


def test_failed_gpu_is_sample_without_value(opened, tmp_path, sweep_at):
    """Utilization at that time is unknown, even if no GPU of the node can be read."""
    spool = opened(tmp_path)
    sweep = sweep_at(T0)
    faults = tuple(GpuFault(sample.device, sample.device.index, "lost") for sample in sweep.samples)
    spool.put(sweep)
    spool.put(replace(sweep, time_s=T0 + 30, samples=(), faults=(*faults, GpuFault(None, 9, "never seen"))))
    spool.close()
    (path,) = tmp_path.glob("*.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert len(rows) == 2 * len(sweep.samples)
    for before, failed in zip(rows[: len(faults)], rows[len(faults) :], strict=True):
        assert failed["uuid"] == before["uuid"]
        assert {failed[name] for name in ("util_pct", "fb_used_mib", "power_w", "xid", "job")} == {""}


def test_file_that_is_not_a_spool_file_is_unchanged(tmp_path, capsys):
    """The error names it, with exit status 2; a missing file was converted before."""
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    assert main([str(path), str(tmp_path / "gone.csv")]) == 2
    assert str(path) in capsys.readouterr().err
    assert names(tmp_path) == ["x.csv"]


def test_parquet_file_has_the_schema_of_the_metrics_store(opened, tmp_path, sweep_at):
    spool = opened(tmp_path)
    spool.put(sweep_at(T0))
    spool.close()
    assert main([str(next(tmp_path.iterdir()))]) == 0
    assert dict(pl.read_parquet_schema(next(tmp_path.iterdir()))) == SAMPLES
