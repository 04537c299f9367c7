"""containers/cluster rejects invalid usage in one line, before it uses Docker."""

from __future__ import annotations

import pytest
from cluster.driver import script


@pytest.mark.parametrize(
    ("arguments", "name", "release", "complaint"),
    [
        (("up",), "affinode", "23.02", "SLURM_RELEASE is 24.11 or 26.05, not '23.02'"),
        (("up",), "Affinode!", "24.11", "CLUSTER_NAME is lower-case letters"),
        (("down", "--all"), "affinode", "24.11", "down takes --keep-data or nothing"),
        (("exec",), "affinode", "24.11", "exec NODE COMMAND"),
        (("dance",), "affinode", "24.11", "no command 'dance'"),
    ],
)
def test_misuse_is_reported_in_one_line(arguments: tuple[str, ...], name: str, release: str, complaint: str) -> None:
    """The script exits with status 2 and prints the error and a pointer to the help."""
    printed = script(arguments, name, release, 30)
    assert printed.returncode == 2
    assert complaint in printed.stderr
    assert len(printed.stderr.splitlines()) == 2


def test_help_names_every_command() -> None:
    """The help is complete and goes to standard output."""
    printed = script(("--help",), "affinode", "24.11", 30)
    assert printed.returncode == 0
    for command in ("up", "down", "status", "shell", "exec", "logs", "build"):
        assert f"\n  {command} " in printed.stdout
