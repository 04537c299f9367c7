"""Sources of the nightly run: sacct, files, GPU metrics; and when they are read again."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner

from slurm_affinode.base import config as configuration
from slurm_affinode.base.errors import AffinodeError, InputError
from slurm_affinode.cli.nightly import nightly
from slurm_affinode.db.repository import Repository
from slurm_affinode.pipeline import nightly as module
from slurm_affinode.pipeline.nightly import Failure, NightlyError, configured, expand

NOW = datetime(2026, 11, 20, 4, 15, tzinfo=UTC)
EARLIEST = datetime(2026, 10, 1, tzinfo=UTC)
FIELDS = ("JobIDRaw", "Cluster", "State", "Submit", "Start", "End", "AllocTRES")
ROW = ("7", "c", "COMPLETED", "2026-11-19T09:00:00", "2026-11-19T10:00:00", "2026-11-19T12:00:00", "gres/gpu=1")
TEXT = "|".join(FIELDS) + "\n" + "|".join(ROW) + "\n"


@pytest.fixture
def config(tmp_path):
    """Return a function that writes a configuration with the given keys of ``nightly``."""

    def make(**keys):
        text = '[cluster]\ntimezone = "UTC"\n[nightly]\n' + "".join(
            f"{key} = {json.dumps(value)}\n" for key, value in keys.items()
        )
        (tmp_path / "config.toml").write_text(text)
        return configuration.load(tmp_path / "config.toml", env={}, state_dir=tmp_path / "state")

    return make


@pytest.fixture
def store(tmp_path):
    with Repository.open(str(tmp_path / "state" / "affinode.sqlite")) as opened:
        yield opened


@pytest.fixture
def sacct(monkeypatch):
    """A sacct that returns one job; the list of requested intervals."""
    intervals = []

    def answer(since, until):
        intervals.append((since, until))
        return TEXT.replace("|", module.sacct_command.DELIMITER).encode()

    monkeypatch.setattr(module.sacct_command, "run_sacct", answer)
    return intervals


def begins(intervals):
    """Return the begin of each interval, of which the windows follow each other."""
    ends = [None, *(until for _, until in intervals)]
    return [since for (since, _), end in zip(intervals, ends, strict=False) if since != end]


def test_sacct_is_queried_from_first_report_then_from_last_success(config, store, sacct):
    """Also if ``--now`` is set to an earlier time to catch up on a report."""
    accounting = configured(config()).accounting
    first, *others = accounting(store, EARLIEST, NOW)
    assert first.endswith("1 job runs (1 new, 0 updated), 0 bad records")
    assert all(line.endswith("1 job runs (0 new, 0 updated), 0 bad records") for line in others)
    list(accounting(store, EARLIEST, NOW + timedelta(days=1)))
    list(accounting(store, EARLIEST, NOW - timedelta(days=20)))
    overlap = timedelta(days=2)
    assert begins(sacct) == [EARLIEST, NOW - overlap, NOW - timedelta(days=20) - overlap]


def test_sacct_is_queried_from_a_given_time(config, store, sacct):
    """Also where accounting was read before; never later than it would be anyway."""
    list(configured(config()).accounting(store, EARLIEST, NOW))
    for since in (NOW - timedelta(days=30), NOW - timedelta(hours=1)):
        list(configured(config(), since=since).accounting(store, EARLIEST, NOW))
    assert begins(sacct)[1:] == [NOW - timedelta(days=30), NOW - timedelta(days=2)]


def test_invalid_sacct_output_is_queried_again(config, store, sacct, monkeypatch):
    accounting = configured(config()).accounting
    list(accounting(store, EARLIEST, NOW))
    monkeypatch.setattr(module.sacct_command, "run_sacct", lambda since, until: sacct.append((since, until)) or b"")
    with pytest.raises(AffinodeError):
        list(accounting(store, EARLIEST, NOW + timedelta(days=1)))
    with pytest.raises(AffinodeError):
        list(accounting(store, EARLIEST, NOW + timedelta(days=2)))
    assert begins(sacct)[1:] == [NOW - timedelta(days=2)] * 2


def test_bad_accounting_file_does_not_stop_the_next(config, store, tmp_path, sacct):
    (tmp_path / "b.txt").write_bytes(b"\0binary")
    (tmp_path / "c.txt").write_text(TEXT)
    paths = [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt", f"{tmp_path}/[c].txt"]
    accounting = configured(config(accounting_paths=paths)).accounting
    missing, binary, read = accounting(store, EARLIEST, NOW)
    assert isinstance(missing, Failure)
    assert isinstance(binary, Failure)
    assert "b.txt" in binary.message
    assert read.startswith(f"{tmp_path}/c.txt: 1 job runs")
    assert list(accounting(store, EARLIEST, NOW))[2] == f"{tmp_path}/c.txt: unchanged"
    assert sacct == []


def test_directory_as_accounting_file_is_rejected(config, store, tmp_path):
    [failure] = configured(config(accounting_paths=[str(tmp_path)])).accounting(store, EARLIEST, NOW)
    assert failure.message == f"{tmp_path}: cannot be read: Is a directory"


def test_gpu_files_are_read_once_and_bad_ones_reported(config, store, tmp_path):
    (tmp_path / "n1.csv").write_text("timestamp,node,uuid,util_pct\n2026-11-19T10:00:00Z,n1,GPU-1,5\n")
    (tmp_path / "n2.csv").write_text("")
    gpu = configured(config(gpu_paths=[f"{tmp_path}/*.csv"])).gpu
    line, failure = gpu(store, NOW)
    assert line == "1 files with 1 samples (1 new), 0 files unchanged"
    assert "n2.csv" in failure.message
    assert next(iter(gpu(store, NOW))) == "0 files with 0 samples (0 new), 1 files unchanged"
    assert list(configured(config()).gpu(store, NOW)) == []


def test_engine_files_are_read_once_and_bad_ones_reported(config, store, tmp_path):
    (tmp_path / "a.prom").write_text("vllm:num_requests_running 1 1793520000000\n")
    (tmp_path / "b.prom").write_text("node_load1 3 1793520000000\n")
    serving = configured(config(serving_paths=[f"{tmp_path}/*.prom"])).serving
    line, failure = serving(store, NOW)
    assert line == "1 files with 1 samples (1 new), 0 files unchanged"
    assert (failure.part, "b.prom: has no metric of an engine" in failure.message) == ("engine metrics", True)
    assert next(iter(serving(store, NOW))) == "0 files with 0 samples (0 new), 1 files unchanged"
    assert sorted(entry.records for entry in store.ingests(kind="serving")) == [0, 0, 1]
    assert list(configured(config()).serving(store, NOW)) == []


def test_existing_name_with_brackets_is_not_a_pattern(tmp_path):
    (tmp_path / "a[1].txt").touch()
    (tmp_path / "a1.txt").touch()
    assert expand(f"{tmp_path}/a[1].txt") == [tmp_path / "a[1].txt"]
    assert expand(f"{tmp_path}/a?.txt") == [tmp_path / "a1.txt"]
    with pytest.raises(InputError, match="no such file"):
        expand(f"{tmp_path}/b*")


def test_command_output_is_empty_verbose_or_json(config, tmp_path, sacct):
    config(out=str(tmp_path / "reports"))
    where = [
        "--config",
        str(tmp_path / "config.toml"),
        "--state",
        str(tmp_path / "state"),
        "--now",
        "2026-11-20T04:15Z",
    ]

    def call(*options):
        return CliRunner().invoke(nightly, [*where, *options], catch_exceptions=False)

    assert call().output == ""
    assert (tmp_path / "reports" / "day" / "2026-11-19" / "report.html").exists()
    assert "day 2026-11-19\n  current\n" in call("--verbose").output
    assert json.loads(call("--json").output)["current"] == ["day/2026-11-19"]
    config(out=str(tmp_path / "reports"), gpu_paths=["/no/such"])
    with pytest.raises(NightlyError, match="nightly: 1 part failed\n  GPU metrics: /no/such"):
        call()
