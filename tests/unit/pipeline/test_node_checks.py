"""``doctor`` on a node with an agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_affinode.base import config as configuration
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.process import Completed
from slurm_affinode.pipeline import node_checks
from slurm_affinode.pipeline.checks import OK, PROBLEM, UNREACHABLE

SOUND = {
    "--version": (0, "Version: 4.2\n"), "check": (0, "Looks good.\n"), "--no-input": (0, "MUNGE:AwQ:\n"),
    "--query-gpu=index,persistence_mode": (0, "0, Enabled\n1, Enabled\n"), "show": (0, "yes\n"),
}  # fmt: skip

CHECKS = ("CRIU", "munge", "clock", "persistence mode", "shared store")


class Programs:
    """Replacement of the programs of a node: argument -> exit status and output; missing ones cannot be started."""

    def __init__(self, outcomes: Mapping[str, tuple[int, str]]) -> None:
        self.outcomes = outcomes

    def __call__(self, argv: Sequence[str], **_: Any) -> Completed:
        if argv[1] not in self.outcomes:
            raise UnreachableError(f"{argv[0]}: no such program")
        status, text = self.outcomes[argv[1]]
        return Completed(tuple(argv), status, text.encode(), text if status else "")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> configuration.Config:
    """A node with a key and a shared store."""
    (tmp_path / "image.key").write_text("k" * 32)
    (tmp_path / "images").mkdir(mode=0o700)
    monkeypatch.setattr("slurm_affinode.base.process.find", lambda program: program)
    parsed = configuration.parse("", where="test")
    return replace(
        parsed,
        suspend=replace(parsed.suspend, key_file=tmp_path / "image.key", shared_store=tmp_path / "images"),
    )


def statuses(config: configuration.Config, changes: Mapping[str, tuple[int, str] | None]) -> dict[str, str]:
    """Return the statuses by check, after a check that each problem has a hint; ``None``: the program is missing."""
    outcomes = {name: outcome for name, outcome in {**SOUND, **changes}.items() if outcome is not None}
    checks = node_checks.examine(config, Programs(outcomes))
    assert [check.name for check in checks if check.status != OK and not check.hint] == []
    return {check.name: check.status for check in checks}


def test_sound_node_has_no_problem(config: configuration.Config) -> None:
    assert statuses(config, {}) == dict.fromkeys(CHECKS, OK)


@pytest.mark.parametrize(
    ("argument", "outcome", "check", "status"),
    [
        ("--version", None, "CRIU", PROBLEM),
        ("--version", (0, "Version: 3.17\n"), "CRIU", PROBLEM),
        ("check", (1, "Error: kernel does not support it\n"), "CRIU", PROBLEM),
        ("--no-input", (1, "munge: Error: Failed to access socket\n"), "munge", UNREACHABLE),
        ("--no-input", None, "munge", UNREACHABLE),
        ("show", (0, "no\n"), "clock", PROBLEM),
        ("--query-gpu=index,persistence_mode", (0, "0, Enabled\n1, Disabled\n"), "persistence mode", PROBLEM),
    ],
)
def test_problem_has_a_hint(
    config: configuration.Config, argument: str, outcome: tuple[int, str] | None, check: str, status: str
) -> None:
    found = statuses(config, {argument: outcome})
    assert found.pop(check) == status
    assert set(found.values()) == {OK}


def test_node_without_gpus_has_no_persistence_mode(config: configuration.Config) -> None:
    assert "persistence mode" not in statuses(config, {"--query-gpu=index,persistence_mode": None})
    assert "persistence mode" not in statuses(config, {"--query-gpu=index,persistence_mode": (9, "failed\n")})


def test_clock_is_unknown_without_systemd(config: configuration.Config) -> None:
    assert "clock" not in statuses(config, {"show": None})
    assert "clock" not in statuses(config, {"show": (1, "System has not been booted with systemd\n")})


def test_store_that_root_may_not_write_is_a_problem(
    config: configuration.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS with ``root_squash`` denies access to a directory with mode 0700."""
    squashed = config.suspend.shared_store
    monkeypatch.setattr(node_checks.os, "access", lambda path, mode: path != squashed)  # type: ignore[attr-defined]
    assert statuses(config, {})["shared store"] == PROBLEM


def test_missing_file_system_is_a_problem(config: configuration.Config, tmp_path: Path) -> None:
    missing = replace(config, suspend=replace(config.suspend, shared_store=tmp_path / "not-mounted" / "images"))
    assert statuses(missing, {})["shared store"] == PROBLEM


def test_machine_without_agent_is_not_checked(config: configuration.Config, tmp_path: Path) -> None:
    keyless = replace(config, suspend=replace(config.suspend, key_file=tmp_path / "none"))
    assert node_checks.examine(keyless, Programs(SOUND)) == []
    assert node_checks.examine(replace(config, suspend=replace(config.suspend, shared_store=None)), Programs({})) == []
