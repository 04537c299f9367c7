"""``doctor`` on simulated machines: sacct and scontrol are stand-ins."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

from slurm_affinode.base import config as configuration
from slurm_affinode.base.errors import ConfigError, UnreachableError
from slurm_affinode.base.process import Completed
from slurm_affinode.cli.doctor import doctor
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import SAMPLES
from slurm_affinode.pipeline.doctor import examine, exit_code, services, shares
from slurm_affinode.slurm.accounting.schema import JOBS, conform

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


class Slurm:
    """Replacement of ``process.run`` on a machine with Slurm."""

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
    """A configuration, and a function that stores a job and a sample of a given age."""
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
    """The worker process of pyslurm."""

    def __init__(self, api=45, version="26.5.1"):
        self.answer = {"ok": {"pyslurm": version, "library": "/usr/lib/libslurm.so", "api": api}}

    def ask(self, line, *, timeout_s):
        jobs = json.loads(line)["call"] == "jobs"
        return json.dumps({"ok": []} if jobs else self.answer).encode()

    def close(self):
        self.answer = None


def no_pyslurm():
    raise UnreachableError("python: cannot be started")


def run_checks(config, run=None, start=no_pyslurm):
    checks = examine(config, now=NOW, run=run or Slurm(), start=start)
    return {check.name: check for check in checks}, exit_code(checks)


def test_correct_setup_has_no_problems(site):
    config, fill = site
    fill(timedelta(hours=3))
    checks, code = run_checks(config)
    assert code == 0
    assert {check.status for check in checks.values()} == {"ok"}
    assert checks["time zone"].detail == "Europe/Oslo"
    assert "1 of 1 runs have GPUs" in checks["accounting"].detail
    assert "(3 h ago)" in checks["GPU history"].detail


def test_doctor_creates_nothing_on_a_new_machine(site):
    config, _ = site
    checks, code = run_checks(config, no_slurm)
    assert code == 3
    assert (checks["store"].status, checks["sacct"].status) == ("problem", "unreachable")
    assert checks["GPU accounting"].status == "skipped"
    assert checks["GPU history"].status == "problem"
    assert "it can be made" in checks["state directory"].detail
    assert not config.state_dir.exists()


def test_missing_gpu_accounting_has_hint(site):
    config, fill = site
    fill(timedelta(0), gpus=0)
    checks, code = run_checks(config, Slurm(tres="cpu,mem,gres/gpu:a100"))
    assert code == 1
    assert "there are no GPU counts in accounting without gres/gpu" in checks["GPU accounting"].detail
    assert "AccountingStorageTRES=cpu,mem,gres/gpu:a100:" in checks["GPU accounting"].detail
    assert "set AccountingStorageTRES=gres/gpu,gres/gpu:a100 in slurm.conf" in checks["GPU accounting"].hint
    assert checks["accounting"].status == "problem"
    assert run_checks(config, Slurm(tres=""))[0]["GPU accounting"].status == "problem"
    assert run_checks(config, Slurm(tres=None))[0]["GPU accounting"].status == "skipped"


@pytest.mark.parametrize(
    ("types", "status", "detail"),
    [
        ("gpu,shard", "ok", "GresTypes=gpu,shard"),
        ("gpu,mps", "ok", "GresTypes=gpu,mps"),
        ("gpu", "skipped", "GresTypes=gpu: jobs with mode=inplace count as jobs with whole GPUs"),
        ("(null)", "skipped", "GresTypes=(nothing)"),
        (None, "skipped", "GresTypes could not be read: scontrol: no such program; jobs with mode=inplace count as"),
    ],
)
def test_whole_gpus_are_assumed_unless_slurm_has_shares(types, status, detail):
    """Also if that is unknown: then no job is exempt from the clean-up for the memory that its sleep frees."""

    def run(argv, **_):
        if types is None:
            return no_slurm(argv)
        return Completed(tuple(argv), 0, f"GresTypes               = {types}\n".encode(), "")

    check = shares(run)
    assert (check.status, detail in check.detail, bool(check.hint)) == (status, True, types in {"gpu", "(null)"})


def test_old_data_is_a_problem(site):
    config, fill = site
    fill(timedelta(days=12))
    checks, code = run_checks(config)
    assert code == 1
    assert (checks["accounting"].status, checks["GPU history"].status) == ("problem", "problem")
    assert "(12 d ago)" in checks["GPU history"].detail


def test_sample_in_the_future_is_reported(site):
    config, fill = site
    fill(timedelta(days=-1))
    assert "(in the future)" in run_checks(config)[0]["GPU history"].detail


def test_slurm_backend_and_reasons_are_reported(site):
    """pyslurm is used if its libslurm matches the release of the site."""
    config, _ = site
    slurm, _ = run_checks(config, start=Pyslurm)
    assert slurm["Slurm"].detail == "version 26.05.5"
    assert slurm["Slurm backend"].detail.startswith("pyslurm (auto was requested); pyslurm 26.5.1 with libslurm")
    assert (slurm["slurmctld"].status, slurm["slurmdbd"].detail) == ("ok", "responds; clusters: oslo")
    older = run_checks(config, start=lambda: Pyslurm(api=42))[0]["Slurm backend"]
    assert older.status == "ok"
    assert older.detail.startswith("commands (auto")
    assert "its libslurm is that of Slurm 24.11, the site's Slurm is 26.05" in older.detail
    other = run_checks(config, start=lambda: Pyslurm(version="25.11.2"))[0]["Slurm backend"].detail
    assert other.startswith("commands (auto")
    assert "it is for Slurm 25.11, the site's Slurm is 26.05, and no job runs with which" in other
    with_pyslurm = configuration.replace(config, slurm=configuration.SlurmConfig("pyslurm"))
    assert run_checks(with_pyslurm)[0]["Slurm backend"].status == "problem"
    forced = configuration.replace(config, slurm=configuration.SlurmConfig("commands"))
    assert run_checks(forced, start=Pyslurm)[0]["Slurm backend"].detail.startswith("commands (commands was requested)")


def test_daemons_that_do_not_respond_are_reported(site):
    """A slurmctld that is down is distinguished from a machine without Slurm."""
    config, _ = site

    def down(argv, **_):
        if argv == ["scontrol", "--version"]:
            return Completed(tuple(argv), 0, b"slurm 26.05.5\n", "")
        return Completed(tuple(argv), 1, b"Slurmctld(primary) at head is DOWN\n", "")

    checks, code = run_checks(config, down)
    assert code == 3
    assert checks["slurmctld"].detail == "slurmctld does not respond: Slurmctld(primary) at head is DOWN"
    assert checks["slurmdbd"].status == "unreachable"
    assert run_checks(config, no_slurm)[0]["Slurm"].status == "skipped"


def test_sacct_without_slurmdbd_is_unreachable(site):
    config, fill = site
    fill(timedelta(0))
    checks, code = run_checks(
        config, Slurm(error="sacct: error: Problem talking to the database: Connection refused\n")
    )
    assert code == 3
    assert checks["sacct"].detail == "does not respond: Problem talking to the database: Connection refused"


def test_accounting_from_files_does_not_need_sacct(site):
    config, fill = site
    fill(timedelta(0))
    config = configuration.replace(config, nightly=configuration.NightlyConfig(accounting_paths=("/a/*.txt",)))
    checks, code = run_checks(config, no_slurm)
    assert (checks["sacct"].status, code) == ("skipped", 0)


def test_missing_files_and_zones_of_the_configuration_are_problems(site, tmp_path):
    config, _ = site
    price = configuration.PriceConfig(table=tmp_path / "prices.toml")
    checks, _ = run_checks(configuration.replace(config, price=price))
    assert checks["configuration"].status == "problem"
    assert "prices.toml" in checks["configuration"].detail
    zone = configuration.replace(config, cluster=configuration.ClusterConfig(timezone="Mars/Base"))
    assert run_checks(zone)[0]["time zone"].status == "problem"


def test_unwritable_state_directory_is_reported(site, tmp_path):
    config, _ = site
    (tmp_path / "file").touch()
    blocked = configuration.replace(config, store=configuration.StoreConfig(state_dir=tmp_path / "file"))
    checks, _ = run_checks(blocked)
    assert checks["state directory"].detail == f"{tmp_path / 'file'}: is not a directory"
    kernel = configuration.replace(config, store=configuration.StoreConfig(state_dir=Path("/proc/1")))
    assert "/proc/1: cannot be written" in run_checks(kernel)[0]["state directory"].detail


def test_pending_migrations_are_reported(site):
    config, _ = site
    config.state_dir.mkdir()
    (config.state_dir / "affinode.sqlite").touch()
    checks, code = run_checks(config)
    assert code == 1
    assert "migrations are pending: 0001_initial" in checks["store"].detail
    assert checks["store"].hint == "slurm-affinode db upgrade"


def test_command_prints_problems_with_hints(tmp_path):
    """A table or JSON; the exit status shows whether there are problems."""
    state = ["--state", str(tmp_path / "state"), "--config", str(tmp_path / "config.toml")]
    (tmp_path / "config.toml").write_text('[nightly]\naccounting_paths = ["x"]\n')
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "affinode.sqlite").touch()
    outcome = CliRunner().invoke(doctor, state, standalone_mode=False)
    assert outcome.return_value == 1
    assert "What to do:\n  store: slurm-affinode db upgrade" in outcome.output
    machine = CliRunner().invoke(doctor, [*state, "--json"], standalone_mode=False)
    record = json.loads(machine.output)
    assert record["ok"] is False
    assert {"name", "status", "detail", "hint"} == set(record["checks"][0])


def commands_in(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in ("sacct", "scontrol", "squeue", "scancel"):
        (directory / name).write_text("#!/bin/sh\n")
        (directory / name).chmod(0o755)
    return directory


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose programs count as root's; Slurm is not on PATH."""
    monkeypatch.setattr("slurm_affinode.base.process.replaceable", lambda _path: None)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    return tmp_path


def test_services_are_checked_with_their_own_path(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands are on the PATH of the user but not of cron and the units: they are listed with a hint."""
    slurm = commands_in(private / "slurm/bin")
    monkeypatch.setenv("PATH", str(slurm))
    check = services(None, private / "etc")
    assert (check.status, check.hint) == ("problem", f'set slurm.bin_dir = "{slurm}" in the configuration')
    assert check.detail.endswith(": sacct, scontrol, squeue, scancel")
    assert services(slurm, private / "etc").status == "ok"


def test_drop_ins_of_installed_services_are_considered(private: Path) -> None:
    """A site may set PATH in a drop-in; a ``bin_dir`` that does not exist is a problem."""
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


def test_only_the_configuration_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is examined; a mistake in the file, or in one that it names, ends the command with status 2."""
    monkeypatch.setattr("slurm_affinode.cli.doctor.examine", lambda *_, **__: pytest.fail("examined"))
    file, prices = tmp_path / "config.toml", tmp_path / "prices.toml"
    file.write_text(f'[price]\ntable = "{prices}"\n')
    prices.write_text("")
    argv = ["--only-config", "--config", str(file)]
    done = CliRunner().invoke(doctor, argv)
    assert (done.exit_code, done.output) == (0, f"{file}: no mistakes\n")
    outcome = json.loads(CliRunner().invoke(doctor, [*argv, "--json"]).output)
    assert (outcome["ok"], [check["name"] for check in outcome["checks"]]) == (True, ["configuration"])
    prices.unlink()
    done = CliRunner().invoke(doctor, argv)
    assert isinstance(done.exception, ConfigError)
    assert str(prices) in str(done.exception)
    assert CliRunner().invoke(doctor, [*argv, "--all-nodes"]).exit_code == 2
