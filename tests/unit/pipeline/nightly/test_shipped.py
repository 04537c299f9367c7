"""Shipped files: the example configuration, the crontab, the units, and their documentation."""

from __future__ import annotations

import operator
import re
import shutil
import subprocess
import types
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from slurm_affinode.base import config
from slurm_affinode.base.resources import asset_dir

REPORTS = asset_dir("reports")
UNITS = [path for path in sorted((REPORTS / "systemd").iterdir()) if path.suffix in {".service", ".timer"}]
CONFIGURATION = Path(__file__).resolve().parents[4] / "docs" / "configuration.md"


def keys(cls=config.Config, prefix=""):
    hints = typing.get_type_hints(cls)
    for field in fields(cls):
        kind = hints[field.name]
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            kind = typing.get_args(kind)[0]
        if field.name == "source":
            continue
        if is_dataclass(kind):
            yield from keys(kind, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def test_example_configuration_equals_the_defaults():
    text = (REPORTS / "config.toml").read_text()
    assert config.parse(text, where="config.toml") == config.Config()


def test_example_configuration_has_every_key_with_a_valid_value():
    text = re.sub(r"^# (?=(?:[a-z_]+|\"[^\"]+\") = )", "", (REPORTS / "config.toml").read_text(), flags=re.MULTILINE)
    parsed = config.parse(text, where="config.toml")
    for key in keys():
        section, _, name = key.rpartition(".")
        assert re.search(rf"^(?:{name} = |\[{section}\.{name}\])", text, re.MULTILINE), key
        value = operator.attrgetter(key)(parsed)
        assert value not in (None, (), {}), key


def test_configuration_page_documents_every_key_and_default():
    text = CONFIGURATION.read_text()
    for key in keys():
        row = re.search(rf"^\| `{re.escape(key)}` \| (.+?) \|", text, re.MULTILINE)
        assert row, key
        default = operator.attrgetter(key)(config.Config())
        if isinstance(default, str | float):
            assert row[1] == f"`{default}`", key


def test_crontab_runs_nightly_as_its_user():
    lines = (REPORTS / "cron.d" / "slurm-affinode").read_text().splitlines()
    [line] = [line for line in lines if line and not line.startswith("#") and "=" not in line]
    assert re.fullmatch(r"\d+ \d+ \* \* \* slurm-affinode slurm-affinode nightly", line)


def test_units_are_valid():
    """As verified by ``systemd-analyze``."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    units = sorted(str(path) for path in UNITS)
    assert len(units) == 6
    done = subprocess.run(
        [program, "verify", "--man=no", *units], capture_output=True, text=True, check=False, timeout=240
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_enabled_units_start_at_boot():
    """``systemctl enable`` of a unit without [Install] has no effect. Services with a timer need none."""
    for path in UNITS:
        timed = path.with_suffix(".timer").is_file() and path.suffix == ".service"
        match = re.search(r"^\[Install\]\nWantedBy=(.+)$", path.read_text(), re.MULTILINE)
        if timed:
            assert match is None, path.name
        else:
            assert match is not None, path.name
            assert match[1] == ("timers.target" if path.suffix == ".timer" else "multi-user.target")


def test_agent_is_restarted_without_limit():
    """systemd gives up after five starts in ten seconds; a file system or slurmctld may become available later."""
    text = (REPORTS / "systemd" / "slurm-affinode-agent.service").read_text()
    pause = re.search(r"^RestartSec=(\d+)s$", text, re.MULTILINE)
    assert pause
    assert int(pause[1]) * 4 > 10
    assert "Restart=always\n" in text
    assert "RuntimeDirectoryPreserve=yes\n" in text, "the GPUs of its jobs would be forgotten while it is upgraded"
