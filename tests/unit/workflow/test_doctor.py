"""What doctor finds, on machines that are made up: sacct and scontrol are stand-ins."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

from slurm_affinode import config as configuration
from slurm_affinode.cli.doctor import doctor
from slurm_affinode.errors import UnreachableError
from slurm_affinode.history.schema import SAMPLES
from slurm_affinode.history.store import SampleStore
from slurm_affinode.process import Completed
from slurm_affinode.slurm.schema import JOBS, conform
from slurm_affinode.store.repository import Repository
from slurm_affinode.workflow.doctor import examine, exit_code
from slurm_affinode.workflow.doctor_slurm import services

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


class Slurm:
    """``process.run`` on a machine with Slurm."""

    def __init__(self, tres="cpu,mem,gres/gpu", error=""):
        self.tres = tres
        self.error = error

    def __call__(self, argv, *, timeout_s, env=None, check=True):
        assert timeout_s > 0
        if argv == ["scontrol", "--version"]:
            return Completed(tuple(argv), 0, b"slurm 26.05.5\n", "")
        if argv == ["scontrol", "ping"]:
            return Completed(tuple(argv), 0, b"Slurmctld(primary) at head is UP\n", "")
        if argv[0] == "sacctmgr":
            return Completed(tuple(argv), 1 if self.error else 0, b"" if self.error else b"oslo\n", self.error)
        if argv[0] == "scontrol":
            if self.tres is None:
                raise UnreachableError("scontrol: no such program")
            text = f"Configuration\nAccountingStorageTRES   = {self.tres}\nAccountingStorageUser = N/A\n"
            text += "SLURM_VERSION           = 26.05.5\n"
            return Completed(tuple(argv), 0, text.encode(), "")
        if "--helpformat" in argv:
            return Completed(tuple(argv), 0, b"JobID JobIDRaw Cluster Start End", "")
        return Completed(tuple(argv), 1 if self.error else 0, b"", self.error)


def no_slurm(argv, **_):
    raise UnreachableError(f"{argv[0]}: no such program", hint="install it")


@pytest.fixture
def site(tmp_path):
    """A configuration, and a function that fills its store with a run and a sample of a given age."""
    text = f'[cluster]\ntimezone = "Europe/Oslo"\n[slurm]\nbin_dir = "{commands_in(tmp_path / "slurm")}"\n'
    config = configuration.replace(
        configuration.parse(text, where="test"), store=configuration.StoreConfig(state_dir=tmp_path / "state")
    )

    def fill(age, gpus=1):
        moment = NOW - age
        row = {"cluster": "c", "job_id": 1, "submit": moment, "start": moment, "gpus": gpus}
        with Repository.open(config.db_url) as store:
            store.upsert(conform(pl.DataFrame({name: [value] for name, value in row.items()}), JOBS))
        sample = {"cluster": "c", "node": "n1", "uuid": "GPU-1", "time": moment, "util_pct": 0.0}
        frame = pl.DataFrame({name: [value] for name, value in sample.items()})
        history = SampleStore(config.history_dir)
        history.ingest(conform(frame, SAMPLES), source="test")
        history.close()

    return config, fill


class Pyslurm:
    """The process in which pyslurm runs, at its first request."""

    def __init__(self, api=45):
        self.answer = {"ok": {"pyslurm": "25.11.2", "library": "/usr/lib/libslurm.so", "api": api}}

    def ask(self, line, *, timeout_s):
        return json.dumps(self.answer).encode()

    def close(self):
        self.answer = None


def no_pyslurm():
    raise UnreachableError("python: cannot be started")


def look(config, run=None, start=no_pyslurm):
    checks = examine(config, now=NOW, run=run or Slurm(), start=start)
    return {check.name: check for check in checks}, exit_code(checks)


def test_a_machine_that_is_set_up_right(site):
    config, fill = site
    fill(timedelta(hours=3))
    checks, code = look(config)
    assert code == 0
    assert {check.status for check in checks.values()} == {"ok"}
    assert checks["time zone"].detail == "Europe/Oslo"
    assert "1 of 1 runs have GPUs" in checks["accounting"].detail
    assert "(3 h ago)" in checks["GPU history"].detail


def test_nothing_is_made_on_a_fresh_machine(site):
    config, _ = site
    checks, code = look(config, no_slurm)
    assert code == 3
    assert (checks["store"].status, checks["sacct"].status) == ("problem", "unreachable")
    assert checks["GPU accounting"].status == "skipped"
    assert checks["GPU history"].status == "problem"
    assert "it can be made" in checks["state directory"].detail
    assert not config.state_dir.exists()


def test_accounting_without_gpus_says_what_to_set(site):
    config, fill = site
    fill(timedelta(0), gpus=0)
    checks, code = look(config, Slurm(tres="cpu,mem,gres/gpu:a100"))
    assert code == 1
    assert "there are no GPU counts in accounting without gres/gpu" in checks["GPU accounting"].detail
    assert "AccountingStorageTRES=cpu,mem,gres/gpu:a100:" in checks["GPU accounting"].detail
    assert "set AccountingStorageTRES=gres/gpu,gres/gpu:a100 in slurm.conf" in checks["GPU accounting"].hint
    assert checks["accounting"].status == "problem"
    assert look(config, Slurm(tres=""))[0]["GPU accounting"].status == "problem"
    assert look(config, Slurm(tres=None))[0]["GPU accounting"].status == "skipped"


def test_data_that_stopped_arriving_is_a_problem(site):
    config, fill = site
    fill(timedelta(days=12))
    checks, code = look(config)
    assert code == 1
    assert (checks["accounting"].status, checks["GPU history"].status) == ("problem", "problem")
    assert "(12 d ago)" in checks["GPU history"].detail


def test_a_clock_that_is_ahead_is_seen(site):
    config, fill = site
    fill(timedelta(days=-1))
    assert "(in the future)" in look(config)[0]["GPU history"].detail


def test_slurm_is_spoken_to_by_pyslurm_where_it_is_of_the_sites_release(site):
    """Which way is used, which there are, and why not the others."""
    config, _ = site
    slurm, _ = look(config, start=Pyslurm)
    assert slurm["Slurm"].detail == "version 26.05.5"
    assert slurm["Slurm backend"].detail.startswith("pyslurm (auto was asked for); pyslurm 25.11.2 with libslurm")
    assert (slurm["slurmctld"].status, slurm["slurmdbd"].detail) == ("ok", "answers; clusters: oslo")
    older = look(config, start=lambda: Pyslurm(api=42))[0]["Slurm backend"]
    assert older.status == "ok"
    assert older.detail.startswith("commands (auto")
    assert "its libslurm is of Slurm 24.11, the site's Slurm is 26.05" in older.detail
    asked = configuration.replace(config, slurm=configuration.SlurmConfig("pyslurm"))
    assert look(asked)[0]["Slurm backend"].status == "problem"
    forced = configuration.replace(config, slurm=configuration.SlurmConfig("commands"))
    assert look(forced, start=Pyslurm)[0]["Slurm backend"].detail.startswith("commands (commands was asked for)")


def test_daemons_that_do_not_answer_are_named(site):
    """A controller that is down and a machine without Slurm are told apart."""
    config, _ = site

    def down(argv, **_):
        if argv == ["scontrol", "--version"]:
            return Completed(tuple(argv), 0, b"slurm 26.05.5\n", "")
        return Completed(tuple(argv), 1, b"Slurmctld(primary) at head is DOWN\n", "")

    checks, code = look(config, down)
    assert code == 3
    assert checks["slurmctld"].detail == "slurmctld does not answer: Slurmctld(primary) at head is DOWN"
    assert checks["slurmdbd"].status == "unreachable"
    assert look(config, no_slurm)[0]["Slurm"].status == "skipped"


def test_sacct_without_its_database_is_unreachable(site):
    config, fill = site
    fill(timedelta(0))
    checks, code = look(config, Slurm(error="sacct: error: Problem talking to the database: Connection refused\n"))
    assert code == 3
    assert checks["sacct"].detail == "does not answer: Problem talking to the database: Connection refused"


def test_accounting_from_files_needs_no_sacct(site):
    config, fill = site
    fill(timedelta(0))
    config = configuration.replace(config, nightly=configuration.NightlyConfig(accounting_paths=("/a/*.txt",)))
    checks, code = look(config, no_slurm)
    assert (checks["sacct"].status, code) == ("skipped", 0)


def test_what_the_configuration_names_must_be_there(site, tmp_path):
    config, _ = site
    price = configuration.PriceConfig(table=tmp_path / "prices.toml")
    checks, _ = look(configuration.replace(config, price=price))
    assert checks["configuration"].status == "problem"
    assert "prices.toml" in checks["configuration"].detail
    zone = configuration.replace(config, cluster=configuration.ClusterConfig(timezone="Mars/Base"))
    assert look(zone)[0]["time zone"].status == "problem"


def test_places_that_cannot_be_written(site, tmp_path):
    config, _ = site
    (tmp_path / "file").touch()
    blocked = configuration.replace(config, store=configuration.StoreConfig(state_dir=tmp_path / "file"))
    checks, _ = look(blocked)
    assert checks["state directory"].detail == f"{tmp_path / 'file'}: is not a directory"
    kernel = configuration.replace(config, store=configuration.StoreConfig(state_dir=Path("/proc/1")))
    assert "/proc/1: cannot be written" in look(kernel)[0]["state directory"].detail


def test_a_store_that_waits_for_its_migration(site):
    config, _ = site
    config.state_dir.mkdir()
    (config.state_dir / "affinode.sqlite").touch()
    checks, code = look(config)
    assert code == 1
    assert "migrations are pending: 0001_initial" in checks["store"].detail
    assert checks["store"].hint == "slurm-affinode db upgrade"


def test_the_command_prints_findings_and_what_to_do(tmp_path):
    """A table for people, JSON for machines, the exit status for scripts."""
    state = ["--state", str(tmp_path / "state"), "--config", str(tmp_path / "config.toml")]
    (tmp_path / "config.toml").write_text('[nightly]\naccounting_paths = ["x"]\n')
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "affinode.sqlite").touch()
    said = CliRunner().invoke(doctor, state, standalone_mode=False)
    assert said.return_value == 1
    assert "What to do:\n  store: slurm-affinode db upgrade" in said.output
    machine = CliRunner().invoke(doctor, [*state, "--json"], standalone_mode=False)
    found = json.loads(machine.output)
    assert found["ok"] is False
    assert {"name", "status", "detail", "hint"} == set(found["checks"][0])


def commands_in(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in ("sacct", "scontrol", "squeue", "scancel"):
        (directory / name).write_text("#!/bin/sh\n")
        (directory / name).chmod(0o755)
    return directory


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which programs count as root's; without Slurm on the caller's path."""
    monkeypatch.setattr("slurm_affinode.process.replaceable", lambda _path: None)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    return tmp_path


def test_services_are_judged_by_their_own_path(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller finds Slurm's commands, cron and the units do not: which ones, and what to set."""
    slurm = commands_in(private / "slurm/bin")
    monkeypatch.setenv("PATH", str(slurm))
    check = services(None, private / "etc")
    assert (check.status, check.hint) == ("problem", f'set slurm.bin_dir = "{slurm}" in the configuration')
    assert check.detail.endswith(": sacct, scontrol, squeue, scancel")
    assert services(slurm, private / "etc").status == "ok"


def test_services_that_are_installed_count_with_their_drop_ins(private: Path) -> None:
    """A site that has set PATH itself is right, too; a key that leads nowhere is not."""
    slurm = commands_in(private / "slurm/bin")
    unit = private / "etc/systemd/system/slurm-affinode-nightly.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nEnvironment=PATH=/usr/nowhere\n")
    assert services(None, private / "etc").status == "skipped"
    assert services(private / "gone", private / "etc").status == "problem"
    drop_in = unit.with_name(f"{unit.name}.d") / "path.conf"
    drop_in.parent.mkdir()
    drop_in.write_text(f'[Service]\nEnvironment="PATH=/usr/nowhere:{slurm}"\n')
    assert services(None, private / "etc").status == "ok"
