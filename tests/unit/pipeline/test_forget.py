"""``db forget``: the published files that name a user, and what is left to do elsewhere."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner, Result

from slurm_affinode.cli.main import cli
from slurm_affinode.db.records import ReportRecord
from slurm_affinode.db.repository import Repository
from slurm_affinode.pipeline import forget as module
from slurm_affinode.slurm.accounting.schema import JOBS

T0 = datetime(2026, 11, 1, tzinfo=UTC)
CONFIG = """[store]
state_dir = "{0}/state"
[nightly]
out = "{0}/reports"
[nightly.jobs]
directory = "{0}/jobs"
[nightly.pages]
directory = "{0}/pages"
[suspend]
shared_store = "{0}/shared/images"
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory with a job of alice, two reports, summaries of two users, and a ledger."""
    monkeypatch.setattr(module, "name_of_user", {5001: "alice", 5002: "bob"}.get)
    (tmp_path / "config.toml").write_text(CONFIG.format(tmp_path))
    row = dict.fromkeys(JOBS) | {"cluster": "c", "job_id": 1, "submit": T0, "start": T0, "user": "alice", "uid": 5001}
    (tmp_path / "state").mkdir()
    with Repository.open(f"sqlite:///{tmp_path / 'state' / 'affinode.sqlite'}") as store:
        store.upsert(pl.DataFrame([row, row | {"job_id": 2, "user": "bob", "uid": 5002}], schema=JOBS))
        for label, names in (("2026-11-01", "alice, bob"), ("2026-11-02", "bob, alice2")):
            directory = tmp_path / "reports" / "day" / label
            directory.mkdir(parents=True)
            (directory / "report.html").write_text(f"<p>{names}</p>")
            store.record_report(
                ReportRecord("day", label, T0, T0 + timedelta(days=1), f"day/{label}", T0, "f", {"currency": "EUR"})
            )
    for place in ("jobs", "state/job-summaries"):
        (tmp_path / place).mkdir(exist_ok=True)
    for uid in (5001, 5002):
        (tmp_path / "jobs" / f"{uid}.jsonl").write_text("{}\n")
    for page in ("user/alice", "user/bob", "account/physics", "account/biology"):
        (tmp_path / "pages" / page).mkdir(parents=True)
        names = "alice, bob" if page.endswith("physics") else page.partition("/")[2]
        (tmp_path / "pages" / page / "index.html").write_text(f"<p>{names}</p>")
    return tmp_path


def invoke(site: Path, *arguments: str) -> Result:
    arguments = ("db", "forget", *arguments, "--config", str(site / "config.toml"))
    return CliRunner().invoke(cli, arguments, env={"SLURM_AFFINODE_DB": None}, catch_exceptions=False)


def files(site: Path) -> set[str]:
    return {
        str(path.relative_to(site))
        for path in (*site.glob("jobs/*"), *site.glob("reports/day/*"), *site.glob("pages/*/*"))
    }


def test_dry_run_shows_what_would_be_changed(site: Path) -> None:
    before = files(site)
    done = invoke(site, "alice", "--json")
    assert done.exit_code == 0
    shown = json.loads(done.output)
    assert (shown["applied"], shown["pseudonym"], shown["rows"]) == (False, None, {"jobs": 1})
    assert shown["reports"] == ["day/2026-11-01"]
    assert [os.path.basename(path) for path in shown["files"]] == ["5001.jsonl", "alice", "physics"]  # noqa: PTH119
    assert files(site) == before
    assert "to change it: --apply" in invoke(site, "alice").output


def test_reports_and_summaries_of_the_user_are_removed(site: Path) -> None:
    """Those of other users, also with similar names, are kept, and the index lists no removed report."""
    done = invoke(site, "alice", "--apply")
    assert done.exit_code == 0, done.output
    assert files(site) == {"jobs/5002.jsonl", "reports/day/2026-11-02", "pages/user/bob", "pages/account/biology"}
    index = json.loads((site / "reports" / "index.json").read_text())
    assert [report["label"] for report in index["reports"]] == ["2026-11-02"]
    assert "no data of alice is stored" in invoke(site, "alice", "--apply").output


def test_summaries_of_the_next_owner_of_a_uid_are_kept(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "name_of_user", {5001: "carol"}.get)
    assert json.loads(invoke(site, "alice", "--json").output)["files"] == [
        str(site / "pages/user/alice"), str(site / "pages/account/physics"),
    ]  # fmt: skip


def test_places_that_are_not_changed_are_listed(site: Path) -> None:
    ledgers = site / "shared" / "ledger"
    ledgers.mkdir(parents=True)
    (ledgers / "n1.jsonl").write_text('{"user":"alice"}\n')
    remaining = json.loads(invoke(site, "alice", "--json").output)["remaining"]
    assert remaining[0].startswith("slurmdbd")
    assert any("1 ledger of agents" in item for item in remaining), (remaining, ledgers)
