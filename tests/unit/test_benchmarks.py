"""Every benchmark can be started, and the one with a simulated Slurm runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = sorted((Path(__file__).parents[2] / "benchmarks").glob("bench_*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_benchmark_loads(program: Path) -> None:
    """All that it imports exists."""
    code = "import runpy, sys; sys.path.insert(0, sys.argv[2]); runpy.run_path(sys.argv[1], run_name='loaded')"
    command = [sys.executable, "-c", code, str(program), str(program.parent)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_simulated_slurm_answers_what_is_asked(tmp_path: Path) -> None:
    """It has every column and option that the product requests."""
    program = next(one for one in PROGRAMS if one.stem == "bench_zombies")
    command = [sys.executable, str(program), "--jobs", "200", "--keep", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "live: 200 running GPU jobs" in done.stdout
