"""``ingest gpu``: output, exit statuses, the journal."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_affinode.base.config import Config, GpuHistoryConfig
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.cli.main import cli
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.pipeline import ingest

LINE = 'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",Hostname="n1"} 5 1793520000000\n'


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory."""
    return tmp_path / "state"


def run(state: Path, *args: str | Path, text: str | None = None) -> Result:
    """Run ``ingest gpu``."""
    argv = ["ingest", "gpu", "--state", str(state), *map(str, args)]
    return CliRunner().invoke(cli, argv, input=text, standalone_mode=False)


def test_ingested_file_is_summarized_and_journaled(state: Path, recorded: Path) -> None:
    result = run(state, recorded / "gpu" / "dcgm-exporter.prom")
    assert result.return_value == 0
    for text in (
        "1 read",
        "samples     6",
        "new         6",
        "3 on 1 node",
        "2026-11-01 08:00:30",
        "30 s (3 devices)",
    ):
        assert text in result.stdout
    assert "not used    DCGM_FI_DEV_SM_CLOCK" in result.stdout
    with Repository.open(f"sqlite:///{state / 'affinode.sqlite'}") as repository:
        (entry,) = repository.ingests(kind="gpu")
    assert (entry.records, entry.bad, entry.first) == (6, 0, datetime(2026, 11, 1, 8, tzinfo=UTC))
    assert entry.source.endswith("dcgm-exporter.prom")


def test_ingesting_the_same_file_twice_is_a_no_op(state: Path, recorded: Path) -> None:
    """The journal gets no second entry."""
    path = recorded / "gpu" / "dcgm-exporter.prom"
    run(state, path)
    result = run(state, path)
    assert result.return_value == 0
    assert "nothing new: 1 file" in result.stdout
    with Repository.open(f"sqlite:///{state / 'affinode.sqlite'}") as repository:
        assert len(repository.ingests(kind="gpu")) == 1


def test_summary_as_json(state: Path, recorded: Path) -> None:
    result = run(state, "--json", recorded / "gpu" / "dcgm-exporter.prom")
    data = json.loads(result.stdout)
    assert (data["samples"], data["new"], data["duplicates"], data["devices"], data["nodes"]) == (6, 6, 0, 3, 1)
    assert data["first"] == "2026-11-01T08:00:00Z"
    assert data["steps_s"] == [{"step_s": 30.0, "devices": 3}]
    assert data["files"][0]["format"] == "prometheus"


def test_invalid_file_is_reported_with_status_2(state: Path, tmp_path: Path, recorded: Path) -> None:
    """The valid file is ingested; the journal has the reason."""
    bad = tmp_path / "bad.bin"
    bad.write_bytes(b"\0\1\2")
    result = run(state, bad, recorded / "gpu" / "dcgm-exporter.prom")
    assert result.return_value == 2
    assert result.stderr.splitlines()[0] == f"slurm-affinode: {bad}: is a binary file of no known format"
    assert "1 read, 1 not usable" in result.stdout
    with Repository.open(f"sqlite:///{state / 'affinode.sqlite'}") as repository:
        failed = [entry for entry in repository.ingests(kind="gpu") if entry.bad]
    assert failed[0].problems[-1].reason == f"{bad}: is a binary file of no known format"


def test_bad_lines_are_reported_with_file_and_line(state: Path, tmp_path: Path) -> None:
    """Only the first ones are printed; the exit status is 0 because the other lines are stored."""
    path = tmp_path / "m.prom"
    path.write_text(LINE + LINE.replace("} 5", "} x") * 5)
    result = run(state, "--problems", "2", path)
    assert result.return_value == 0
    lines = result.stderr.splitlines()
    assert lines[0].startswith(f"{path}:2: has a value that is not a number")
    assert lines[2] == f"{path}: 3 more problems (--problems N prints more)"
    assert "bad lines   5" in result.stdout


def test_standard_input_with_a_start(state: Path) -> None:
    """A scrape as printed by ``curl``, without timestamps."""
    result = run(state, "--start", "2026-11-01T08:00Z", "-", text=LINE.replace(" 1793520000000", ""))
    assert result.return_value == 0
    assert SampleStore(state / "history").span() == (datetime(2026, 11, 1, 8, tzinfo=UTC),) * 2


def test_dmon_with_interval_and_node(state: Path, recorded: Path) -> None:
    """``--interval`` accepts durations such as ``1m``."""
    path = recorded / "gpu" / "dmon.txt"
    result = run(state, "--node", "gpu01", "--start", "2026-11-01T08:00Z", "--interval", "1m", path)
    assert result.return_value == 0
    assert "60 s (4 devices)" in result.stdout


def test_start_is_in_the_given_time_zone(state: Path, recorded: Path) -> None:
    path = recorded / "gpu" / "dmon.txt"
    how = ("--timezone", "Europe/Oslo", "--node", "gpu01", "--interval", "30s")
    run(state, *how, "--start", "2026-11-01T09:00", path)
    span = SampleStore(state / "history").span()
    assert span is not None
    assert span[0] == datetime(2026, 11, 1, 8, tzinfo=UTC)
    assert "'soon' is not a time" in str(run(state, *how, "--start", "soon", path).exception)


def test_assumed_node_and_ambiguous_times_are_reported(state: Path, tmp_path: Path) -> None:
    path = tmp_path / "gpu01.csv"
    path.write_text("time,uuid,util_pct\n2026-10-25 02:30:00,GPU-1,1\n")
    result = run(state, "--timezone", "Europe/Oslo", "--dry-run", path)
    assert "dry run: nothing was stored" in result.stdout
    assert "node name taken from the path: gpu01" in result.stderr
    assert "local times that occur twice" in result.stderr
    assert not (state / "history").exists()


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (("--timezone", "Mars/Base", "x"), "not a time zone"),
        (("--interval", "0", "x"), "not above 0"),
        (("--interval", "soon", "x"), "not a span"),
        (("--format", "runes", "x"), "runes"),
        ((), "nothing to read"),
    ],
)
def test_usage_error_is_reported(state: Path, args: tuple[str, ...], what: str) -> None:
    """Usage is checked before anything is read."""
    result = run(state, *args)
    assert what in str(result.exception)


def test_help_has_formats_and_examples() -> None:
    result = CliRunner().invoke(cli, ["ingest", "gpu", "--help"])
    assert "nvidia-smi --query-gpu" in result.output
    assert "--interval 30s dmon.txt" in result.output


def test_columns_and_cluster_come_from_the_configuration(tmp_path: Path) -> None:
    """An invalid time zone is reported."""
    config = Config(gpu_history=GpuHistoryConfig(columns={"Busy": "util_pct"}))
    options = ingest.read_options(config, zone="Europe/Oslo")
    column = options.aliases.column("busy")
    assert column is not None
    assert column.field == "util_pct"
    assert options.default_cluster == "default"
    with pytest.raises(AffinodeError, match="not a time zone"):
        ingest.read_options(config, zone="x")
