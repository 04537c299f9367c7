"""From database to report: the sequence shared by ``report`` and ``nightly``."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import polars as pl
import pytest

from slurm_affinode.analysis.result import Thresholds, WasteQuery
from slurm_affinode.base import config as configuration
from slurm_affinode.base.config import Config, IdleConfig, PriceConfig, StoreConfig
from slurm_affinode.base.errors import AffinodeError, NoStoreError
from slurm_affinode.db import engine
from slurm_affinode.db.records import ReportRecord
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import SAMPLES
from slurm_affinode.model.ledger import LedgerEntry, encode
from slurm_affinode.pipeline import report, stored_accounting
from slurm_affinode.slurm.accounting.schema import JOBS, conform

START = datetime(2026, 11, 2, tzinfo=UTC)
NOW = START + timedelta(days=1)
QUERY = WasteQuery(START, NOW)


def config_of(state: Path) -> Config:
    return Config(store=StoreConfig(state_dir=state))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Two jobs of two hours on one GPU each: ann's is idle in its second hour, bob's never."""
    jobs = pl.DataFrame([
        {"cluster": "alpha", "job_id": 1, "submit": START, "job_name": "<script>", "user": "ann", "account": "physics",
         "partition": "gpu", "qos": "normal", "state": "COMPLETED", "start": START,
         "end": START + timedelta(hours=2), "nodes": 1, "node_list": "n1", "gpus": 1},
        {"cluster": "alpha", "job_id": 2, "submit": START, "job_name": "train", "user": "bob", "account": "chemistry",
         "partition": "gpu", "qos": "normal", "state": "COMPLETED", "start": START + timedelta(hours=3),
         "end": START + timedelta(hours=5), "nodes": 1, "node_list": "n1", "gpus": 1},
    ])  # fmt: skip
    with Repository.open(config_of(tmp_path).db_url) as store:
        store.upsert(conform(jobs, JOBS))
    rows = [
        {"cluster": "alpha", "node": "n1", "uuid": "GPU-1", "index": 0, "model": "NVIDIA A100-SXM4-80GB",
         "time": START + timedelta(minutes=i), "util_pct": 0.0 if 60 <= i < 120 else 90.0, "fb_used_mib": 1024.0,
         "power_w": 100.0, "job": "1" if i < 120 else "2" if 180 <= i < 300 else None}
        for i in range(301)
    ]  # fmt: skip
    history = SampleStore(tmp_path / "history")
    history.ingest(conform(pl.DataFrame(rows), SAMPLES), source="test")
    history.close()
    return tmp_path


def test_read_only_database_gives_a_report_without_new_ledgers(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The omitted ledgers are reported once."""
    for number in (1, 2):
        ledger = state / "ledger" / f"c{number}.jsonl"
        ledger.parent.mkdir(exist_ok=True)
        ledger.write_text(encode(LedgerEntry("alpha", number, 5, round(START.timestamp() * 1000))) + "\n")
    settings = configuration.parse(f'[suspend]\nledger = "{state}/ledger"\n', where="test")
    settings = replace(settings, store=StoreConfig(state_dir=state))
    monkeypatch.setattr(engine, "may_not_write", lambda path: True)
    warnings: list[str] = []
    result = report.analyse_stored(settings, QUERY, now=NOW, warned=warnings.append)
    assert (result.total["gpu_hours_idle"], result.suspensions.height) == (1, 0)
    assert [line.partition(": ")[2] for line in warnings] == [
        "cannot be written: it, or its directory, is read-only; suspensions that are not in it yet are missing"
    ]


def test_report_joins_accounting_and_samples(state: Path, tmp_path: Path) -> None:
    """One of four hours was idle."""
    steps: list[str] = []
    written = report.build_report(config_of(state), QUERY, tmp_path / "out", now=NOW, step=steps.append)
    total = written.result.total
    assert total["gpu_hours_allocated"] == pytest.approx(4)
    assert total["gpu_hours_idle"] == pytest.approx(1)
    assert total["gpu_hours_unknown"] == pytest.approx(0)
    assert json.loads(written.summary_path.read_text())["total"]["jobs"] == 2
    assert "&lt;script&gt;" in written.report.read_text()
    assert steps[0] == "reading accounting"
    assert steps[-1] == "rendering the report"
    assert [step for step in steps if not step.isprintable()] == []  # a terminal would show a sign in its place


def test_filter_by_user(state: Path) -> None:
    query = WasteQuery(START, NOW, users=("bob",))
    result = report.analyse_stored(config_of(state), query, now=NOW)
    assert result.jobs["user"].to_list() == ["bob"]
    assert result.total["gpu_hours_idle"] == pytest.approx(0)


@pytest.mark.parametrize(
    ("query", "message", "hint"),
    [
        (WasteQuery(START, NOW, users=("bbo",)), "no job of user bbo ran", "bob"),
        (WasteQuery(START, NOW, partitions=("cpu",)), "no job of partition cpu ran", "gpu"),
        (WasteQuery(START, NOW, accounts=("x\x1b",)), r"no job of account x\\x1b ran", "chemistry, physics"),
        (WasteQuery(START, NOW, clusters=("beta",)), "no job of cluster beta ran", "alpha"),
        (
            WasteQuery(NOW, NOW + timedelta(days=1)),
            "there is no accounting from 2026-11-03 00:00",
            "an earlier --since",
        ),
        (WasteQuery(NOW, START), "ends .* before it begins", "--since before --until"),
        (WasteQuery(NOW, NOW), "ends", "--since"),
    ],
)
def test_filter_without_matches_lists_existing_values(state: Path, query: WasteQuery, message: str, hint: str) -> None:
    """A typing error must not look like a report without waste."""
    with pytest.raises(AffinodeError, match=message) as caught:
        report.analyse_stored(config_of(state), query, now=NOW)
    assert hint in (caught.value.hint or "")


def test_suggestions_are_sorted_and_counted() -> None:
    """Similar names come first; the number of omitted ones is shown."""
    few = report._there_is("nobody", {"ann", "bob", "nobdy"})
    assert few == "there is: nobdy, ann, bob"
    many = report._there_is("user07", {f"user{n:02d}" for n in range(7)} | {f"z{n:02d}" for n in range(17)})
    assert many.startswith("there is: user0")
    assert many.endswith(", and 12 more")
    assert many.count(",") == 12


def test_empty_database_is_an_error_with_hint(tmp_path: Path) -> None:
    """No report is written."""
    out, config = tmp_path / "out", config_of(tmp_path / "state")
    for refusal, words in (
        (NoStoreError, "there is no database"),
        (report.NoAccountingError, "there is no accounting"),
    ):
        with pytest.raises(refusal, match=words) as caught:
            report.build_report(config, QUERY, out)
        assert "ingest sacct" in (caught.value.hint or "")
        assert not out.exists()
        Repository.open(config.db_url).close()


def test_accounting_without_start_times_is_an_error_with_hint(tmp_path: Path) -> None:
    """The default columns of sacct have no times."""
    jobs = pl.DataFrame([{"cluster": "alpha", "job_id": 1, "submit": START, "state": "COMPLETED"}])
    with Repository.open(config_of(tmp_path).db_url) as store:
        store.upsert(conform(jobs, JOBS))
    with pytest.raises(report.NoAccountingError) as caught:
        report.analyse_stored(config_of(tmp_path), QUERY, now=NOW)
    assert "1 job run, without a start" in (caught.value.hint or "")


def test_accounting_without_history_is_reported_as_unknown(tmp_path: Path, state: Path) -> None:
    """Without samples, every hour is unknown."""
    for path in (state / "history").iterdir():
        if path.is_dir() and path.name.startswith("day="):
            for part in path.iterdir():
                part.unlink()
            path.rmdir()
    (state / "history" / "manifest.json").unlink()
    written = report.build_report(config_of(state), QUERY, tmp_path / "out", now=NOW)
    assert written.result.total["gpu_hours_unknown"] == pytest.approx(4)
    assert "there are no GPU metrics of these jobs" in written.report.read_text()


def test_example_prices_are_noted(state: Path, tmp_path: Path) -> None:
    """Costs have a note until the site sets its own prices."""
    config = config_of(state)
    assert "example prices" in report.analyse_stored(config, QUERY, now=NOW).price_note
    table = tmp_path / "prices.toml"
    table.write_text('currency = "CHF"\ndefault_per_hour = 2.0\n', encoding="utf-8")
    priced = report.analyse_stored(replace(config, price=PriceConfig(table=table)), QUERY, now=NOW)
    assert (priced.price_note, priced.currency) == ("", "CHF")
    assert priced.total["idle_cost"] == pytest.approx(2)


def test_thresholds_come_from_the_configuration_unless_given() -> None:
    """The low threshold is raised to the idle threshold if it is below it."""
    config = Config(idle=IdleConfig(idle_pct=1, low_pct=4))
    assert report.thresholds(config) == Thresholds(1, 4, 3)
    assert report.thresholds(config, idle_pct=10) == Thresholds(10, 10, 3)
    assert report.thresholds(config, idle_pct=2, low_pct=20) == Thresholds(2, 20, 3)
    with pytest.raises(AffinodeError, match="idle 5 %, low 2 %"):
        report.thresholds(config, idle_pct=5, low_pct=2)


def last_seen(root: Path, **more: Any) -> None:
    """Store job 3, last seen running eight hours after START."""
    row = {"cluster": "alpha", "job_id": 3, "submit": START, "user": "eve", "account": "biology", "partition": "gpu",
           "state": "RUNNING", "start": START + timedelta(hours=6), "elapsed_s": 7200, "nodes": 1, "node_list": "n2",
           "gpus": 4, **more}  # fmt: skip
    with Repository.open(config_of(root).db_url) as store:
        store.upsert(conform(pl.DataFrame([row]), JOBS))


def test_end_of_accounting_is_in_the_time_zone_of_the_site(state: Path) -> None:
    """Also if it is before the interval."""
    last_seen(state)
    query = replace(QUERY, zone=ZoneInfo("Europe/Berlin"))
    result = report.analyse_stored(config_of(state), query, now=NOW + timedelta(days=14))
    assert "known up to 2026-11-02 09:00 CET" in result.accounting_note
    later = replace(query, since=NOW + timedelta(days=7), until=NOW + timedelta(days=8))
    with pytest.raises(AffinodeError, match="known up to 2026-11-02 09:00 CET"):
        report.analyse_stored(config_of(state), later, now=NOW + timedelta(days=14))


def test_running_job_counts_up_to_the_end_of_accounting(state: Path, tmp_path: Path) -> None:
    """Its record covers two hours: four GPUs are eight GPU-hours, however late the report is."""
    last_seen(state)
    for now in (NOW, NOW + timedelta(days=14)):
        written = report.build_report(config_of(state), QUERY, tmp_path / "out", now=now)
        hours = dict(written.result.jobs.select("job_id", "gpu_hours_allocated").iter_rows())
        assert hours == {1: 2.0, 2: 2.0, 3: 8.0}
        accounting = written.summary["accounting"]
        assert accounting["known_until"] == {"alpha": "2026-11-02T08:00:00Z"}
        assert "known up to 2026-11-02 08:00 UTC" in accounting["caution"]
        assert "Accounting is known up to 2026-11-02 08:00 UTC" in written.report.read_text()


def test_running_job_counts_up_to_the_last_sacct_call(state: Path) -> None:
    """A call of sacct makes the accounting of its clusters current; an ingested file does not."""
    last_seen(state)
    with Repository.open(config_of(state).db_url) as store:
        stored_accounting.reached(store, NOW, ["beta"])
        assert stored_accounting.with_known(QUERY, store, NOW).known_until["alpha"] == START + timedelta(hours=8)
        stored_accounting.reached(store, START + timedelta(hours=10), ["alpha"])
    result = report.analyse_stored(config_of(state), QUERY, now=NOW)
    assert result.jobs.filter(pl.col("job_id") == 3)["gpu_hours_allocated"].item() == 16.0
    with Repository.open(config_of(state).db_url) as store:
        stored_accounting.reached(store, NOW, ["alpha"])
    result = report.analyse_stored(config_of(state), QUERY, now=NOW)
    assert result.jobs.filter(pl.col("job_id") == 3)["gpu_hours_allocated"].item() == 72.0
    assert not result.accounting_note


def test_eligible_time_in_the_future_does_not_make_accounting_current(state: Path) -> None:
    """A job pending for its begin time does not extend accounting to that time."""
    last_seen(state, state="PENDING", start=None, eligible=NOW)
    with Repository.open(config_of(state).db_url) as store:
        assert stored_accounting.with_known(QUERY, store, NOW).known_until == {"alpha": START + timedelta(hours=5)}


def test_interval_after_the_end_of_accounting_is_rejected(state: Path) -> None:
    """The error names the end of accounting."""
    last_seen(state)
    later = WasteQuery(NOW, NOW + timedelta(days=7))
    with pytest.raises(AffinodeError, match=r"no accounting from .* known up to 2026-11-02 08:00 UTC"):
        report.analyse_stored(config_of(state), later, now=later.until)


def test_trend_is_computed_without_stored_reports(state: Path, tmp_path: Path) -> None:
    """Only up to the given number of periods, as far back as there are jobs; for the selected jobs."""
    with Repository.open(config_of(state).db_url) as store:
        jobs = store.jobs(START, NOW)
        for days in (1, 2, 4):
            moved = [(pl.col(name) - pl.duration(days=days)).alias(name) for name in ("submit", "start", "end")]
            store.upsert(jobs.with_columns(pl.col("job_id") + 10 * days, *moved))
    calls: list[str] = []
    options = report.ReportOptions(computed_periods=11)
    written = report.build_report(
        config_of(state), QUERY, tmp_path / "out", now=NOW, options=options, step=calls.append
    )  # fmt: skip
    trend = written.result.trend
    assert trend is not None
    assert (trend.kind, [period.label for period in trend.periods]) == ("day", ["2026-10-31", "2026-11-01"])
    assert [period.total["gpu_hours_allocated"] for period in trend.periods] == pytest.approx([4, 4])
    assert "computing the trend: 2026-11-01" in calls
    item = replace(options, computed_periods=1)
    filtered = report.build_report(
        config_of(state), replace(QUERY, users=("bob",)), tmp_path / "bob", now=NOW, options=item
    )
    assert filtered.result.trend is not None
    assert [period.total["gpu_hours_allocated"] for period in filtered.result.trend.periods] == pytest.approx([2])


def test_stored_reports_have_priority_over_a_computed_trend(state: Path, tmp_path: Path) -> None:
    with Repository.open(config_of(state).db_url) as store:
        since = START - timedelta(days=1)
        store.record_report(
            ReportRecord("day", "2026-11-01", since, START, "day/2026-11-01", NOW, "f", {"gpu_hours_allocated": 7.0})
        )
    steps: list[str] = []
    options = report.ReportOptions(computed_periods=11)
    written = report.build_report(
        config_of(state), QUERY, tmp_path / "out", now=NOW, options=options, step=steps.append
    )  # fmt: skip
    assert written.result.trend is not None
    assert [period.total for period in written.result.trend.periods] == [{"gpu_hours_allocated": 7.0}]
    assert not [step for step in steps if "trend" in step]
