"""Every benchmark can be started, the one with a simulated Slurm runs, and ratios are compared."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

PROGRAMS = sorted((Path(__file__).parents[2] / "benchmarks").glob("bench_*.py"))


@pytest.fixture
def loaded_ratios() -> ModuleType:
    """The module that keeps ratios, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("ratios", PROGRAMS[0].with_name("ratios.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_benchmark_loads(program: Path) -> None:
    """All that it imports exists."""
    code = "import runpy, sys; sys.path.insert(0, sys.argv[2]); runpy.run_path(sys.argv[1], run_name='loaded')"
    command = [sys.executable, "-c", code, str(program), str(program.parent)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_simulated_slurm_answers_requests(tmp_path: Path) -> None:
    """It has every column and option that the product requests."""
    program = next(item for item in PROGRAMS if item.stem == "bench_zombies")
    command = [sys.executable, str(program), "--jobs", "200", "--keep", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "live: 20 squatters listed" in done.stdout


def test_ratio_that_is_worse_or_missing_is_a_failure(loaded_ratios: ModuleType) -> None:
    """One that is better, new, or worse by less than the limit is none."""
    before = {"worse": 1.0, "similar": 1.0, "better": 1.0, "gone": 1.0}
    now = {"worse": 1.31, "similar": 1.29, "better": 0.2, "new": 9.0}
    assert loaded_ratios.worse(before, now) == ["worse: 1.31 instead of 1", "gone: not measured"]


def test_reported_ratios_are_added_to_those_of_other_parts(
    loaded_ratios: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(loaded_ratios.VARIABLE, str(tmp_path / "ratios"))
    loaded_ratios.report(first=1.23456)
    loaded_ratios.report(second=2.0)
    assert loaded_ratios.reported(tmp_path / "ratios") == {"first": 1.235, "second": 2.0}


def test_kept_ratios_have_their_peers_in_the_table(loaded_ratios: ModuleType) -> None:
    """A ratio without a described peer would not be understood."""
    peers = tomllib.loads(loaded_ratios.PEERS.read_text())
    for path in loaded_ratios.KEPT.glob("*.json"):
        if "ratios" in (run := json.loads(path.read_text())):
            assert set(run["ratios"]) <= set(peers[path.stem])
