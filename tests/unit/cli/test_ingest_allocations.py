"""``ingest allocations``: output, stored records, exit statuses."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_affinode.base.errors import InputError
from slurm_affinode.cli.main import cli
from slurm_affinode.db.repository import Repository

CSV = "job_id,node,gpu\n1,n1,0;1\nx,n1,0\n"


def run(state: Path, *args: str | Path, text: str | None = None) -> Result:
    """Run ``ingest allocations``."""
    argv = ["ingest", "allocations", "--state", str(state), "--timezone", "UTC", *map(str, args)]
    return CliRunner().invoke(cli, argv, input=text, standalone_mode=False)


def test_ingesting_a_file_twice_is_a_no_op(tmp_path: Path) -> None:
    """The bad record is reported; both attempts are in the journal."""
    source = tmp_path / "gpus.csv"
    source.write_text(CSV, encoding="utf-8")
    result = run(tmp_path, source)
    assert result.return_value == 0
    assert f"{source}:3: job x: job_id 'x' is not the raw ID" in result.stderr
    assert result.stdout.split("\n")[1].split()[1:] == ["2", "1", "2", "2", "0", "1"]
    assert run(tmp_path, source).stdout.split("\n")[1].split()[1:] == ["2", "1", "2", "0", "2", "1"]
    with Repository.open(f"sqlite:///{tmp_path / 'affinode.sqlite'}") as repository:
        assert repository.counts().allocation_gpus == 2
        assert [entry.bad for entry in repository.ingests(kind="allocations")] == [1, 1]


def test_dry_run_of_standard_input_prints_json(tmp_path: Path) -> None:
    """A dry run stores nothing."""
    result = run(tmp_path / "state", "-", "--json", "--dry-run", text='{"job_id": 1, "node": "n1", "gpu": [0]}\n')
    (source,) = json.loads(result.stdout)["sources"]
    assert (source["records"], source["gpus"], source["new"]) == (1, 1, None)
    assert not (tmp_path / "state").exists()


def test_dry_run_and_omitted_problems_are_reported(tmp_path: Path) -> None:
    result = run(tmp_path / "state", "-", "--dry-run", "--problems", "0", text=CSV)
    assert "nothing was stored" in result.stdout
    assert "1 more problems" in result.stderr


def test_missing_gpus_of_ended_jobs_are_reported(tmp_path: Path, recorded: Path) -> None:
    """``scontrol`` shows only the GPUs of running jobs."""
    result = run(tmp_path, recorded / "slurm-24.11" / "scontrol-show-job-d.txt")
    assert "for running jobs only" in result.stderr


@pytest.mark.parametrize(("name", "message"), [("none", "no such file"), ("", "directory")])
def test_unreadable_file_is_rejected(tmp_path: Path, name: str, message: str) -> None:
    result = run(tmp_path / "state", tmp_path / name)
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)


def accounting(state: Path, *clusters: str) -> None:
    """Ingest an attempt of job 1 on n1 for each of the clusters."""
    columns = "Cluster|JobIDRaw|Submit|Start|End|NodeList|AllocTRES|State|User"
    rows = [f"{name}|1|2026-11-02T08:00:00|2026-11-02T08:00:00|2026-11-02T09:00:00|n1|gres/gpu=1|COMPLETED|ann"
            for name in clusters]  # fmt: skip
    text = "\n".join([columns, *rows]) + "\n"
    argv = ["ingest", "sacct", "--state", str(state), "--timezone", "UTC", "-"]
    result = CliRunner().invoke(cli, argv, input=text, standalone_mode=False)
    assert result.return_value == 0, result.output


def recorded_gpus(state: Path) -> list[tuple[str, str]]:
    """Return cluster and GPU of each stored allocation, as a report reads them."""
    since, until = datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 11, 3, tzinfo=UTC)
    with Repository.open(f"sqlite:///{state / 'affinode.sqlite'}") as repository:
        return sorted(repository.allocation_gpus(since, until).select("cluster", "gpu").rows())


@pytest.mark.parametrize("first", ["accounting", "allocations"])
def test_records_without_cluster_belong_to_the_only_cluster(tmp_path: Path, first: str) -> None:
    if first == "accounting":
        accounting(tmp_path, "alpha")
    assert run(tmp_path, "-", text="job_id,node,gpu\n1,n1,0;1\n").return_value == 0
    if first == "allocations":
        accounting(tmp_path, "alpha")
    assert recorded_gpus(tmp_path) == [("alpha", "0"), ("alpha", "1")]


def test_records_of_another_cluster_stay_separate(tmp_path: Path) -> None:
    """Records without a cluster belong to the only cluster in accounting."""
    for text in ("job_id,node,gpu\n1,n1,0\n", "job_id,node,gpu,cluster\n1,n1,1,beta\n"):
        assert run(tmp_path, "-", text=text).return_value == 0
    accounting(tmp_path, "alpha")
    assert recorded_gpus(tmp_path) == [("alpha", "0")]


def test_records_without_cluster_are_rejected_if_ambiguous(tmp_path: Path) -> None:
    accounting(tmp_path, "alpha", "beta")
    result = run(tmp_path, "-", text="job_id,node,gpu\n1,n1,0\n")
    assert isinstance(result.exception, InputError)
    assert "name no cluster, and accounting has 2: alpha, beta" in str(result.exception)
    assert recorded_gpus(tmp_path) == []
    for more in (["--cluster", "beta"], []):
        named = "job_id,node,gpu,cluster\n1,n1,0,beta\n"
        assert run(tmp_path, "-", *more, text=named).return_value == 0
    assert recorded_gpus(tmp_path) == [("beta", "0")]
