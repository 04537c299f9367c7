"""``setup report``: what it prints, its exit status, and one run on the files of this machine in a mount namespace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_affinode.cli.main import cli


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ("setup", "report", *arguments), standalone_mode=False)


def test_plan_changes_nothing(tmp_path: Path) -> None:
    """The table and the JSON have the same steps."""
    config = tmp_path / "etc/config.toml"
    words = ("--config", str(config), "--state", str(tmp_path / "state"), "--user", "no-such-user-0", "--cron")
    shown = run(*words)
    document = json.loads(run(*words, "--json").output)
    assert [step["name"] for step in document["steps"]][1:4] == ["user", "configuration", "state directory"]
    assert all(step["name"] in shown.output for step in document["steps"])
    assert {step["state"] for step in document["steps"][1:]} == {"would create"}
    assert document["applied"] is False
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", [("--prometheus", "ftp://x"), ("--timezone", "Mars/X"), ("--user", "a b"), ("--state", "relative")]
)
def test_bad_option_is_a_single_line(words: tuple[str, ...]) -> None:
    """Nothing is created."""
    result = run(*words)
    assert getattr(result.exception, "exit_code", None) == 2
    assert "\n" not in str(result.exception)


_SCRIPT = """
set -e
mkdir "$1/etc.copy"; cp -a /etc/. "$1/etc.copy"
mount --bind "$1/etc.copy" /etc
mount -t tmpfs -o mode=755 tmpfs /var/lib
mkdir -p /var/lib/slurm-affinode/history /etc/slurm-affinode
touch /var/lib/slurm-affinode/affinode.sqlite
shift
"$@" >/var/lib/first.json || true
"$@" >/var/lib/second.json || true
cat /var/lib/first.json
echo ---
cat /var/lib/second.json
echo ---
stat -c '%U %a %n' /var/lib/slurm-affinode /var/lib/slurm-affinode/*
grep -c '^affinode-test:' /etc/passwd
cat /etc/cron.d/slurm-affinode
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("useradd"), reason="needs root and useradd")
def test_real_users_and_owners(tmp_path: Path) -> None:
    """With useradd, on copies of /etc and /var/lib that end with the namespace; the second run finds all of it."""
    if subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=False).returncode:
        pytest.skip("mount namespaces are not permitted")
    # The Python of a test environment may be closed to other users: that step is tested elsewhere.
    code = (
        "import sys, pathlib; from slurm_affinode.cli import setup; "
        "host = setup.Host; "
        "setup.Host = lambda: host(program=pathlib.Path('/bin/true'), python=pathlib.Path('/bin/sh')); "
        "from slurm_affinode.cli.main import main; main()"
    )
    words = ("setup", "report", "--yes", "--json", "--cron", "--no-ingest", "--user", "affinode-test")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", _SCRIPT, "sh", tmp_path, sys.executable, "-c", code, *words],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second, rest = done.stdout.split("---\n")
    assert {step["name"]: step["state"] for step in json.loads(first)["steps"]} == {
        "program": "present", "user": "created", "configuration": "created", "state directory": "changed",
        "owner of reports and database": "changed", "crontab": "created",
    }  # fmt: skip
    assert {step["state"] for step in json.loads(second)["steps"]} == {"present"}
    assert "affinode-test 750 /var/lib/slurm-affinode\n" in rest
    assert "root" not in rest.partition("\n1\n")[0]
    assert "17 4 * * * affinode-test slurm-affinode nightly\n" in rest
