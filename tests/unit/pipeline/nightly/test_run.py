"""The nightly run from ingest to retention."""

from __future__ import annotations

import contextlib
import json
import shutil
from datetime import UTC, datetime, timedelta
from functools import partial

import polars as pl
import pytest
from server_samples import engine, overloaded, serving

from slurm_affinode.base.errors import ConfigError, UnreachableError
from slurm_affinode.db.audit import ZombieLog
from slurm_affinode.db.repository import Repository
from slurm_affinode.engines.store import engine_store
from slurm_affinode.model.cleanup import AuditEntry
from slurm_affinode.pipeline.anonymity import Pseudonyms
from slurm_affinode.pipeline.nightly import Failure, NightlyError, render

DUE = ("day/2026-11-19", "week/2026-W46", "month/2026-10")


def texts(out):
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_first_run_renders_day_week_and_month(site):
    outcome = site.night()
    assert outcome.failures == ()
    assert outcome.rendered == DUE
    for path in DUE:
        assert (site.out / path / "report.html").stat().st_size > 1000
        assert json.loads((site.out / path / "summary.json").read_text())["total"]["gpu_hours_allocated"] == 4
    index = (site.out / "index.html").read_text()
    assert all(f'href="{path}/report.html"' in index for path in DUE)
    listed = json.loads((site.out / "index.json").read_text())["reports"]
    assert {entry["href"] for entry in listed} == {f"{path}/report.html" for path in DUE}
    assert listed[0]["since"].endswith("Z")
    assert site.intervals == [(datetime(2026, 10, 1, tzinfo=UTC), site.now)]


def test_second_run_is_a_no_op(site):
    site.night()
    before = texts(site.out)
    site.now += timedelta(minutes=10)
    outcome = site.night()
    assert (outcome.rendered, set(outcome.current), outcome.failures) == ((), set(DUE), ())
    assert texts(site.out) == before


def test_late_data_renders_affected_reports_again(site):
    """A late record of yesterday affects the day, late samples of October the month, and a changed threshold all."""
    site.night()
    site.job(9, datetime(2026, 11, 19, 20, tzinfo=UTC), 1)
    assert site.night().rendered == ("day/2026-11-19",)
    site.samples(datetime(2026, 10, 7, 15, tzinfo=UTC), 1, job=1)
    assert site.night().rendered == ("month/2026-10",)
    site.toml += "[idle]\nidle_pct = 3.0\n"
    assert site.night().rendered == DUE
    assert site.night(force=True).rendered == DUE


def test_report_keeps_its_currency(site, tmp_path):
    """After a change of currency, older reports stay as they are, and the index shows the currency of each."""
    prices = tmp_path / "prices.toml"
    site.toml += f'[price]\ntable = "{prices}"\n'
    prices.write_text('currency = "USD"\ndefault_per_hour = 1.0\n')
    site.night()
    site.now += timedelta(days=1)
    prices.write_text('currency = "EUR"\ndefault_per_hour = 1.0\n')
    site.job(9, datetime(2026, 11, 20, 5, tzinfo=UTC), 1)
    site.samples(datetime(2026, 11, 20, 5, tzinfo=UTC), 1, job=9)
    assert site.night().rendered[0] == "day/2026-11-20"
    listed = json.loads((site.out / "index.json").read_text())["reports"]
    money = {entry["label"]: entry["currency"] for entry in listed}
    assert (money["2026-11-19"], money["2026-11-20"]) == ("USD", "EUR")
    index = (site.out / "index.html").read_text()
    assert "USD" in index
    assert "EUR" in index


def test_force_writes_the_index_again(site):
    """For example after an upgrade with new templates."""
    site.night()
    (site.out / "index.html").write_text("old")
    site.night()
    assert (site.out / "index.html").read_text() == "old"
    site.night(force=True)
    assert "2026-11-19" in (site.out / "index.html").read_text()


def test_missed_days_are_rendered(site):
    site.night()
    site.now += timedelta(days=3)
    site.job(7, datetime(2026, 11, 21, 5, tzinfo=UTC), 1)
    outcome = site.night()
    assert outcome.rendered == ("day/2026-11-21", "week/2026-W47")
    assert outcome.empty == ("day/2026-11-20", "day/2026-11-22")
    assert not (site.out / "day/2026-11-20" / "report.html").exists()


def test_removed_report_is_rendered_again(site):
    site.night()
    (site.out / DUE[0] / "report.html").unlink()
    assert site.night().rendered == (DUE[0],)


def test_site_without_jobs_gets_an_empty_index(site, tmp_path):
    site.state = tmp_path / "other"
    outcome = site.night()
    assert (outcome.rendered, outcome.failures) == ((), ())
    assert json.loads((site.out / "index.json").read_text())["reports"] == []


def test_failed_steps_do_not_stop_the_others(site, unreachable):
    """sacct is unreachable and a GPU file is bad: the reports are rendered, and both errors are reported at the end."""
    site.accounting_error = unreachable
    site.gpu_failure = Failure("GPU metrics", "/data/x.csv: the file is empty")
    outcome = site.night()
    assert outcome.rendered == DUE
    error = NightlyError(outcome)
    assert error.exit_code == 3
    assert str(error).splitlines() == [
        "nightly: 2 parts failed",
        "  accounting: sacct: no such program",
        "    install it",
        "  GPU metrics: /data/x.csv: the file is empty",
        f"The other parts were done: 3 reports made, in {site.out}",
    ]


def test_internal_error_affects_only_its_step(site):
    site.accounting_error = KeyError("x")
    outcome = site.night()
    assert outcome.rendered == DUE
    [failure] = outcome.failures
    assert failure.message == "a fault in slurm-affinode: KeyError: 'x'"
    assert "conftest.py" in failure.hint


def test_unwritable_report_does_not_stop_the_next(site):
    site.out.mkdir(parents=True)
    (site.out / "day").write_text("in the way")
    outcome = site.night()
    assert outcome.rendered == DUE[1:]
    assert [failure.part for failure in outcome.failures] == ["day 2026-11-19"]


def test_full_disk_is_reported_in_one_line(site):
    site.accounting_error = OSError(28, "No space left on device", "/x")
    assert site.night().failures[0].message == "/x: No space left on device"


def test_damaged_database_aborts_the_run(site):
    (site.state / "affinode.sqlite").write_bytes(b"x" * 5000)
    with pytest.raises(Exception, match="is damaged"):
        site.night()


def test_retention_removes_only_expired_data(site):
    site.night()
    other = site.out / "day" / "notes"
    other.mkdir()
    site.toml += '[nightly]\nkeep_samples = "5d"\nkeep_jobs = "20d"\nkeep_reports = "8d"\n'
    site.toml += 'keep_audit = "3d"\n'
    old, new = (AuditEntry(site.now + timedelta(days=n), "r", "root", "look", "seen", "list") for n in (-4, 0))
    with Repository.open(site.config.db_url) as store:
        ZombieLog(store.engine).record([old, new])
    site.now += timedelta(days=2)
    outcome = site.night()
    assert outcome.failures == ()
    assert set(outcome.deleted_reports) == {"month/2026-10"}
    assert (outcome.deleted_days, outcome.deleted_runs, outcome.deleted_audit) == (2, 1, 1)
    assert not (site.out / "month/2026-10").exists()
    assert other.is_dir()
    assert "2026-10/" not in (site.out / "index.html").read_text()
    with Repository.open(site.config.db_url) as store:
        assert store.counts().jobs == 2
        assert [action.verb for action in ZombieLog(store.engine).history()] == ["look", "prune"]


def test_retention_removes_expired_engine_samples(site):
    site.toml += '[nightly]\nkeep_samples = "5d"\n'
    times = [site.now - timedelta(days=n) for n in (30, 6, 1)]
    samples = pl.DataFrame({"cluster": "alpha", "address": "gpu01:8000", "engine": "vllm", "time": times})
    with contextlib.closing(engine_store(site.config.serving_dir)) as store:
        store.ingest(samples, source="test")
        assert site.night().deleted_serving_days == 2
        assert store.days() == [times[-1].date()]
        assert site.night().deleted_serving_days == 0


def test_reports_have_pages_of_model_servers(site):
    """Next to the report of each period with samples of engines; new samples make the report due again."""
    busy = engine("n1:8000", overloaded(), cluster="c", start=datetime(2026, 11, 19, 10, tzinfo=UTC))
    with contextlib.closing(engine_store(site.config.serving_dir)) as store:
        store.ingest(busy, source="test")
    assert site.night().failures == ()
    pages = {path.relative_to(site.out).as_posix() for path in site.out.rglob("server-*.html")}
    [page] = pages
    assert page.startswith("day/2026-11-19/")
    assert f'href="{page.rpartition("/")[2]}"' in (site.out / "day/2026-11-19/report.html").read_text()
    assert site.night().rendered == ()
    late = engine("n2:8000", serving(), cluster="c", start=datetime(2026, 11, 19, 12, tzinfo=UTC))
    with contextlib.closing(engine_store(site.config.serving_dir)) as store:
        store.ingest(late, source="late")
    assert site.night().rendered == ("day/2026-11-19",)
    assert len(list((site.out / "day/2026-11-19").glob("server-*.html"))) == 2
    site.toml += '[nightly]\nkeep_reports = "1d"\n'
    site.now += timedelta(days=2)
    site.night()
    assert not (site.out / "day/2026-11-19").exists()


def test_report_is_not_rendered_from_expired_samples(site):
    site.night()
    site.toml += '[nightly]\nkeep_samples = "3d"\n'
    assert site.night().deleted_days == 2
    outcome = site.night()
    assert (outcome.rendered, outcome.current) == ((), ("day/2026-11-19",))


def test_foreign_directory_is_never_removed(site):
    """The directory follows from kind and label, which are validated, not from a path in the database."""
    site.night()
    victim = site.out.parent / "precious"
    victim.mkdir()
    with Repository.open(site.config.db_url) as store:
        [record] = [record for record in store.reports() if record.period == "day"]
        old = datetime(2020, 1, 1, tzinfo=UTC)
        values = {name: getattr(record, name) for name in record.__dataclass_fields__}
        store.record_report(type(record)(**values | {"label": "../../precious", "since": old, "until": old}))
    outcome = site.night()
    assert "not a report of this program" in outcome.failures[0].message
    assert victim.is_dir()


def test_invalid_retention_is_rejected_with_its_key(site):
    site.toml += '[nightly]\nkeep_jobs = "long"\n'
    with pytest.raises(ConfigError, match=r"nightly\.keep_jobs: 'long' is not a span of time"):
        site.night()


def test_verbose_lists_each_step(site, unreachable):
    site.accounting_error = unreachable
    site.night()
    assert site.messages[:4] == ["accounting", "  failed: sacct: no such program", "suspensions", "GPU metrics"]
    assert any(line.endswith("day/2026-11-19/report.html") for line in site.messages)
    assert isinstance(unreachable, UnreachableError)


def test_unwritable_index_is_reported(site):
    (site.out / "index.html").mkdir(parents=True)
    outcome = site.night()
    assert outcome.rendered == DUE
    assert [failure.part for failure in outcome.failures] == ["index"]
    assert "cannot be written" in outcome.failures[0].message


def test_retention_forgets_report_without_files(site):
    site.night()
    shutil.rmtree(site.out / "month")
    site.toml += '[nightly]\nkeep_reports = "8d"\n'
    site.now += timedelta(days=1)
    assert site.night().deleted_reports == ("month/2026-10",)


def test_mails_are_about_reports_with_the_figures_of_the_report(site):
    """A report that is up to date is analyzed again for mails that were not sent."""

    class Mails:
        """Takes every period once."""

        def __init__(self):
            self.hours = {}

        def due(self, _store, period):
            return period.path not in self.hours

        def send(self, _store, period, result):
            self.hours[period.path] = result().total["gpu_hours_allocated"]
            return [f"1 mail about {period.path}", Failure("mails", "1 mail not sent")]

    first, again = Mails(), Mails()
    outcome = site.night(mails=first)
    assert set(first.hours) == set(outcome.rendered)
    assert {failure.part for failure in outcome.failures} == {"mails"}
    assert site.night(mails=again).rendered == ()
    assert again.hours == first.hours


def test_mails_have_names_where_reports_have_pseudonyms(site):
    class Mails:
        """Takes every period once."""

        users = ()

        def due(self, _store, period):
            return period.kind == "week" and not self.users

        def send(self, _store, _period, result):
            self.users = tuple(result().groups["user"]["name"])
            return ["1 mail"]

    names = Pseudonyms(b"0123456789abcdef")
    mails = Mails()
    site.night(mails=mails, pseudonyms=names, render=partial(render, anonymize=names.apply))
    assert mails.users == ("ann",)
    assert "ann" not in (site.out / "week/2026-W46/users.csv").read_text()
