"""``slurm-affinode report``."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner, Result

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.cli.main import cli
from slurm_affinode.db.repository import Repository
from slurm_affinode.slurm.accounting.schema import JOBS, conform

START = datetime(2026, 11, 2, tzinfo=UTC)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """One job of two hours on four GPUs, without GPU metrics."""
    job = {
        "cluster": "alpha", "job_id": 1, "submit": START, "job_name": "train", "user": "ann", "partition": "gpu",
        "state": "COMPLETED", "start": START, "end": START + timedelta(hours=2), "node_list": "n1", "gpus": 4,
    }  # fmt: skip
    path = tmp_path / "state"
    path.mkdir()
    with Repository.open(f"sqlite:///{path / 'affinode.sqlite'}") as store:
        store.upsert(conform(pl.DataFrame([job]), JOBS))
    return path


def run(state: Path, *arguments: str) -> Result:
    interval = ("--since", "2026-11-02T00:00Z", "--until", "2026-11-03T00:00Z")
    return CliRunner().invoke(cli, ["report", "--state", str(state), *interval, *arguments])


def test_summary_and_file_paths_are_printed(state: Path, tmp_path: Path) -> None:
    """Missing GPU metrics are reported as a warning."""
    out = tmp_path / "out"
    done = run(state, "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "allocated" in done.stdout
    assert f"report   {out / 'report.html'}" in done.stdout
    assert "ingest gpu" in done.stderr
    assert (out / "report.html").exists()


def test_interval_without_gpu_jobs_lacks_no_metrics(state: Path, tmp_path: Path) -> None:
    job = {
        "cluster": "alpha", "job_id": 2, "submit": START, "user": "ann", "partition": "cpu", "state": "COMPLETED",
        "start": START, "end": START + timedelta(hours=1), "node_list": "n1", "gpus": 0,
    }  # fmt: skip
    with Repository.open(f"sqlite:///{state / 'affinode.sqlite'}") as store:
        store.upsert(conform(pl.DataFrame([job]), JOBS))
    done = run(state, "--out", str(tmp_path / "out"), "--partition", "cpu")
    assert done.stderr.splitlines()[-1] == "No GPU job ran in this interval"


def test_json_output_is_the_summary(state: Path, tmp_path: Path) -> None:
    """It equals ``summary.json``."""
    out = tmp_path / "out"
    done = run(state, "--out", str(out), "--json", "--top", "3", "--idle-pct", "2")
    assert json.loads(done.stdout) == json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert json.loads(done.stdout)["query"]["idle_pct"] == 2


def test_dates_are_in_the_time_zone_of_the_site(state: Path, tmp_path: Path) -> None:
    """A date is local midnight; JSON has UTC, the page the local time."""
    config = tmp_path / "config.toml"
    config.write_text('[cluster]\ntimezone = "Asia/Kolkata"\n')
    out = tmp_path / "out"
    command = ["report", "--since", "2026-11-02", "--until", "2026-11-03", "--config", str(config)]
    done = CliRunner().invoke(cli, [*command, "--state", str(state), "--out", str(out), "--json"])
    query = json.loads(done.stdout)["query"]
    assert (query["since"], query["until"]) == ("2026-11-01T18:30:00Z", "2026-11-02T18:30:00Z")
    assert query["timezone"] == "Asia/Kolkata"
    page = (out / "report.html").read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")
    assert "2026-11-02 00:00 to 2026-11-03 00:00 (1d)" in page


def test_csv_writes_the_tables(state: Path, tmp_path: Path) -> None:
    """The number of files is printed."""
    out = tmp_path / "out"
    done = run(state, "--out", str(out), "--csv", "--title", "Week")
    assert "*.csv (10 files)" in done.stdout
    assert (out / "jobs.csv").read_text(encoding="utf-8").splitlines()[1].startswith("alpha,1,")
    assert "<h1>Week</h1>" in (out / "report.html").read_text(encoding="utf-8")


def test_filter_without_matches_is_an_error(state: Path, tmp_path: Path) -> None:
    """The hint lists the existing values."""
    done = run(state, "--out", str(tmp_path / "out" / "nobody"), "--user", "nobody")
    assert not (tmp_path / "out").exists()
    assert isinstance(done.exception, AffinodeError)
    assert done.exception.exit_code == 2
    assert done.exception.hint == "there is: ann"


@pytest.mark.parametrize(
    "arguments",
    [("--since", "yesteryear", "--out", "o"), ("--top", "0", "--out", "o"), ("--idle-pct", "101", "--out", "o")],
)
def test_invalid_option_values_are_rejected(state: Path, arguments: tuple[str, ...]) -> None:
    """Invalid times and numbers out of range."""
    done = run(state, *arguments)
    assert done.exit_code != 0
    assert "Traceback" not in done.output


def test_help_has_options_and_examples() -> None:
    done = CliRunner().invoke(cli, ["report", "--help"])
    assert done.exit_code == 0
    for word in ("--since", "--partition", "--csv", "Examples:", "jq .total.gpu_hours_idle"):
        assert word in done.output


def test_anonymous_report_has_stable_pseudonyms(state: Path, tmp_path: Path) -> None:
    """With the key of the state directory unless another one is given, which is refused without --anonymous."""
    users = []
    for number in (1, 2):
        out = tmp_path / f"out{number}"
        done = run(state, "--out", str(out), "--csv", "--json", "--anonymous-nodes")
        assert done.exit_code == 0, done.output
        users.append(json.loads(done.stdout)["groups"]["user"][0]["name"])
        assert not [path.name for path in out.iterdir() if re.search(r"\b(ann|train|n1)\b", path.read_text())]
    assert users[0] == users[1] != "ann"
    assert (state / "pseudonyms.key").stat().st_mode & 0o777 == 0o600
    refused = run(state, "--out", str(tmp_path / "out3"), "--pseudonym-key", str(state / "pseudonyms.key"))
    assert refused.exit_code == 2
    assert "--pseudonym-key is for --anonymous" in refused.output
