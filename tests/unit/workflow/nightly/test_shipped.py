"""What ships beside the program: the example configuration, the crontab line, the units, their documentation."""

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

from slurm_affinode import config
from slurm_affinode.resources import asset_dir

REPORTS = asset_dir("reports")
OPERATIONS = Path(__file__).resolve().parents[4] / "docs" / "operations.md"


def keys(cls=config.Config, prefix=""):
    hints = typing.get_type_hints(cls)
    for one in fields(cls):
        kind = hints[one.name]
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            kind = typing.get_args(kind)[0]
        if one.name == "source":
            continue
        if is_dataclass(kind):
            yield from keys(kind, f"{prefix}{one.name}.")
        else:
            yield f"{prefix}{one.name}"


def test_the_example_configuration_says_the_defaults():
    """As it ships it changes nothing."""
    text = (REPORTS / "config.toml").read_text()
    assert config.parse(text, where="config.toml") == config.Config()


def test_the_example_configuration_shows_every_key_with_a_value_that_works():
    text = re.sub(r"^# (?=(?:[a-z_]+|\"[^\"]+\") = )", "", (REPORTS / "config.toml").read_text(), flags=re.MULTILINE)
    parsed = config.parse(text, where="config.toml")
    for key in keys():
        section, _, name = key.rpartition(".")
        assert re.search(rf"^(?:{name} = |\[{section}\.{name}\])", text, re.MULTILINE), key
        value = operator.attrgetter(key)(parsed)
        assert value not in (None, (), {}), key


def test_operations_explains_every_key_and_its_default():
    text = OPERATIONS.read_text()
    for key in keys():
        row = re.search(rf"^\| `{re.escape(key)}` \| (.+?) \|", text, re.MULTILINE)
        assert row, key
        default = operator.attrgetter(key)(config.Config())
        if isinstance(default, str | float):
            assert row[1] == f"`{default}`", key


def test_the_crontab_line_runs_the_command_as_its_user():
    lines = (REPORTS / "cron.d" / "slurm-affinode").read_text().splitlines()
    [line] = [line for line in lines if line and not line.startswith("#") and "=" not in line]
    assert re.fullmatch(r"\d+ \d+ \* \* \* slurm-affinode slurm-affinode nightly", line)


def test_the_units_are_valid():
    """systemd itself reads them without a complaint."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    units = sorted(str(path) for path in (REPORTS / "systemd").iterdir())
    assert len(units) == 6
    done = subprocess.run(
        [program, "verify", "--man=no", *units], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_is_enabled_starts_with_the_machine():
    """``systemctl enable`` of a unit without [Install] does nothing: it would be gone after the next boot."""
    for path in (REPORTS / "systemd").iterdir():
        timed = path.with_suffix(".timer").is_file() and path.suffix == ".service"
        wanted = re.search(r"^\[Install\]\nWantedBy=(.+)$", path.read_text(), re.MULTILINE)
        if timed:
            assert wanted is None, path.name
        else:
            assert wanted is not None, path.name
            assert wanted[1] == ("timers.target" if path.suffix == ".timer" else "multi-user.target")


def test_the_agent_is_started_again_for_as_long_as_it_takes():
    """systemd gives up after five starts in ten seconds; a store may be mounted, and slurmctld be there, later."""
    text = (REPORTS / "systemd" / "slurm-affinode-agent.service").read_text()
    pause = re.search(r"^RestartSec=(\d+)s$", text, re.MULTILINE)
    assert pause
    assert int(pause[1]) * 4 > 10
    assert "Restart=always\n" in text
    assert "RuntimeDirectoryPreserve=yes\n" in text, "the GPUs of its jobs would be forgotten while it is upgraded"
