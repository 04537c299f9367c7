"""A restored tree is held until it was looked at."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.gate import Gate, work_directory
from slurm_affinode.checkpoint.interface import RestoreFailed


def criu_runs_it(directory: Path, action: str) -> int:
    """As CRIU runs scripts: in its work directory, no descriptors, what it is about in the environment."""
    program = Gate.OPTION.partition("=")[2]
    return subprocess.run(
        [program], cwd=directory, env={"CRTOOLS_SCRIPT_ACTION": action}, timeout=30, check=False
    ).returncode


def test_the_look_comes_before_the_tree_runs(tmp_path: Path) -> None:
    """The script ends when the look is over; for other actions it does nothing."""
    looks: list[str] = []
    with Gate(tmp_path, lambda: looks.append("look")) as gate:
        assert criu_runs_it(tmp_path, "post-restore") == 0
        assert looks == []
        assert criu_runs_it(tmp_path, "pre-resume") == 0
        assert looks == ["look"]
    gate.check(passed=True)


@pytest.mark.parametrize("passed", [True, False])
def test_what_the_look_raises_is_what_is_said(tmp_path: Path, passed: bool) -> None:
    """Whatever CRIU says of it, which was killed meanwhile."""

    def refuse() -> None:
        raise RestoreFailed("strange")

    with Gate(tmp_path, refuse) as gate:
        criu_runs_it(tmp_path, "pre-resume")
    with pytest.raises(RestoreFailed, match="strange"):
        gate.check(passed=passed)


def test_a_tree_that_was_let_go_unseen_is_a_failure(tmp_path: Path) -> None:
    """CRIU goes on where its script cannot be run; that it failed by itself says something else."""
    with Gate(tmp_path, lambda: None) as gate:
        pass
    gate.check(passed=False)
    with pytest.raises(RestoreFailed, match="without asking"):
        gate.check(passed=True)


def test_a_work_directory_goes_again() -> None:
    """Root alone gets at it."""
    with work_directory() as (path, fd):
        assert os.path.samestat(path.stat(), os.fstat(fd))
        assert path.stat().st_mode & 0o777 == 0o700
    assert not path.exists()
