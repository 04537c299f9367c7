"""``slurm-affinode mail``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_affinode.cli.main import cli


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    directory = tmp_path / "no-mail"
    directory.mkdir()
    directory.chmod(0o1733)
    path = tmp_path / "config.toml"
    path.write_text(f'[nightly.mail]\nopt_out = "{directory}"\n')
    return path


def test_user_turns_mails_off_and_on(configuration: Path) -> None:
    def outcome(*arguments: str) -> object:
        result = CliRunner().invoke(cli, ["mail", *arguments, "--json", "--config", str(configuration)])
        assert result.exit_code == 0, result.output
        return json.loads(result.output)

    assert outcome() == {"mails": True}
    assert outcome("off") == outcome("off") == outcome() == {"mails": False}
    assert outcome("on") == outcome("on") == outcome() == {"mails": True}


def test_site_without_the_choice_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    result = CliRunner().invoke(cli, ["mail", "off", "--config", str(tmp_path / "config.toml")])
    assert result.exit_code != 0
    assert "nightly.mail.opt_out is not set" in str(result.exception or result.output)
