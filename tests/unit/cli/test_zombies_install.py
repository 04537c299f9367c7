"""``zombies install``: the files that it writes, and the options that it rejects."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_affinode.base.config import DEFAULT_POLICY
from slurm_affinode.cli.main import cli


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ("zombies", "install", *arguments), standalone_mode=False)


def status(result: Result) -> int:
    """Return the exit status as ``main`` sets it."""
    if result.exception is not None:
        return int(getattr(result.exception, "exit_code", 70))
    return int(result.return_value or 0)


def output_of(result: Result) -> str:
    return result.output + str(result.exception or "") + str(getattr(result.exception, "hint", ""))


def written(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_install_writes_the_timer_and_a_policy(tmp_path: Path) -> None:
    """Installing twice is a no-op; an existing policy is kept; ``--remove`` removes the timer but not the policy."""
    result = run("--root", str(tmp_path), "--systemd", "--every", "10m", "--user", "slurm")
    assert status(result) == 0, output_of(result)
    units = tmp_path / "etc/systemd/system"
    service = (units / "slurm-affinode-zombies.service").read_text()
    assert "ExecStart=/usr/bin/env slurm-affinode zombies clean --warn --live --yes\n" in service
    assert "User=slurm\n" in service
    assert """install -d -m 0750 -o slurm "$$0"' /var/lib/slurm-affinode\n""" in service
    assert "\nEnvironment=XDG_STATE_HOME=/var/lib\n" in service  # overridden by a store.state_dir that is set later
    assert "OnUnitActiveSec=600s" in (units / "slurm-affinode-zombies.timer").read_text()
    site = tmp_path / str(DEFAULT_POLICY).lstrip("/")
    site.write_text("[limits]\ncancel = 1\n")
    assert status(run("--root", str(tmp_path), "--systemd")) == 0
    assert "cancel = 1" in site.read_text()
    assert not re.search(r"@\w+@", service)
    config = tmp_path / "config.toml"
    config.write_text('[prometheus]\nurl = "http://prom:9090"\n[store]\nstate_dir = "/srv/affinode"\n')
    run("--root", str(tmp_path), "--systemd", "--config", str(config))
    service = next(units.glob("*.service")).read_text()
    assert "clean --warn --live --prometheus http://prom:9090 --yes\n" in service
    assert "STATE=/srv/affinode\n" in service  # the database of the site
    assert "\nReadWritePaths=-/srv/affinode\n" in service
    assert """install -d -m 0750 -o root "$$0"' /srv/affinode\n""" in service
    assert f"\nEnvironment=SLURM_AFFINODE_CONFIG={config}\n" in service
    assert "/var/lib/slurm-affinode" not in service
    assert "\nStateDirectory=" not in service  # it would change the owner from the user of the nightly run
    config.unlink()
    run("--root", str(tmp_path), "--remove")
    assert written(tmp_path) == {"etc/slurm-affinode/zombies.toml"}


def test_install_rejects_database_that_the_timer_would_not_use(tmp_path: Path) -> None:
    """The URL may contain a password and units are world-readable, so it must be in the configuration."""
    config, url = tmp_path / "config.toml", "postgresql://affinode:secret@db/affinode"
    config.write_text("")
    words = ("--root", str(tmp_path / "root"), "--config", str(config))
    result = run(*words, "--db", url)
    assert status(result) == 2
    assert "store.db" in output_of(result)
    assert "secret" not in output_of(result)
    assert not (tmp_path / "root").exists()
    config.write_text(f'[store]\ndb = "{url}"\n')
    assert status(run(*words, "--db", url)) == 0
    assert status(run(*words)) == 0


def test_systemd_accepts_installed_units(tmp_path: Path) -> None:
    """Also with special characters in URLs and paths."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    options = "--live --prometheus http://prom:9090/a%20b"
    config, state = tmp_path / "my c%f$g.toml", '/srv/my state/it\'s "x" $5 50%'
    config.write_text('[zombies]\npolicy = "/srv/our policy.toml"\n')
    run("--root", str(tmp_path), "--systemd", "--every", "7m", "--options", options,
        "--state", state, "--config", str(config))  # fmt: skip
    units = sorted((tmp_path / "etc/systemd/system").iterdir())
    assert len(units) == 2
    argv = [program, "verify", "--recursive-errors=no", "--man=no", *map(str, units)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    service = units[0].read_text()
    for line in (
        "--live --prometheus http://prom:9090/a%%20b --yes",
        r"""Environment="SLURM_AFFINODE_STATE=/srv/my state/it's \"x\" $5 50%%" """.rstrip(),
        f'Environment="SLURM_AFFINODE_CONFIG={tmp_path}/my c%%f$g.toml"',
        r"""-o root "$$0"' "/srv/my state/it's \"x\" $$5 50%%" """.rstrip(),
        r"""ReadWritePaths="-/srv/my state/it's \"x\" $5 50%%" """.rstrip(),
        "ConditionPathExists=/srv/our policy.toml",
    ):
        assert f"{line}\n" in service
    assert (tmp_path / "srv/our policy.toml").exists()
    assert not (tmp_path / "etc/slurm-affinode").exists()


def test_install_writes_a_crontab(tmp_path: Path) -> None:
    """An interval that cron cannot express is rejected."""
    run("--root", str(tmp_path), "--cron", "--warn-only", "--options", "--live --kind squatter")
    line = (tmp_path / "etc/cron.d/slurm-affinode-zombies").read_text().splitlines()[-1]
    assert line.startswith("*/15 * * * * root slurm-affinode zombies warn --live --kind squatter --yes")
    run("--root", str(tmp_path), "--cron", "--state", "/srv/my state")
    assert "\nSLURM_AFFINODE_STATE=/srv/my state\n" in (tmp_path / "etc/cron.d/slurm-affinode-zombies").read_text()
    result = run("--root", str(tmp_path), "--cron", "--every", "7m")
    assert status(result) == 2
    assert "cron cannot run every 7m" in output_of(result)
    run("--root", str(tmp_path), "--systemd")
    assert not any("cron.d" in name for name in written(tmp_path))  # systemd replaces cron
    bad = run("--root", str(tmp_path), "--cron", "--user", "a b")
    assert status(bad) == 2


@pytest.mark.parametrize("kind", ["--systemd", "--cron"])
def test_install_puts_slurm_directory_on_the_path(tmp_path: Path, kind: str) -> None:
    """It comes first, also when installing into an image."""
    config = tmp_path / "config.toml"
    config.write_text('[slurm]\nbin_dir = "/opt/slurm/bin"\n')
    result = run("--root", str(tmp_path / "image"), kind, "--config", str(config))
    assert status(result) == 0, output_of(result)
    texts = [path.read_text() for path in (tmp_path / "image/etc").rglob("slurm-affinode-zombies*")]
    assert any("PATH=/opt/slurm/bin:/opt/slurm-affinode/bin:/usr/local/bin:/usr/bin:/bin\n" in text for text in texts)
