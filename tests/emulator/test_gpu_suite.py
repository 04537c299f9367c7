"""The tests for machines with a GPU (tests/gpu) work: they run here on the emulated driver, at small sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from emulator.node import Node

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 280


def run(env: dict[str, str], results: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The tests of tests/gpu, and what they wrote."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu", *arguments]
    ran = subprocess.run(
        command, check=False, cwd=REPOSITORY, env={**env, "GPU_RESULTS": str(results)}, capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip
    return ran, json.loads(results.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_all_of_them_on_the_emulated_driver(node: Node, tmp_path: Path) -> None:
    """None fails; skipped are those of PyTorch, of counters that are not there, and of CRIU where there is none."""
    ran, found = run(node.env, tmp_path / "results.json")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert found["status"] == "emulated"
    outcomes = {one["test"].split("::")[1]: one for one in found["tests"]}
    skipped = {name for name, one in outcomes.items() if one["outcome"] == "skipped"}
    assert all(outcomes[name]["why"] for name in skipped)
    assert {name for name in skipped if "criu" not in outcomes[name]["test"]} == {
        "test_training_goes_on_bit_for_bit",
        "test_suspended_in_the_middle_of_its_steps",
        "test_engine_and_memory_activity_where_the_gpu_counts_them",
        "test_custom_storage_writes_files_of_our_own",
    }
    assert not any(gpu["processes"] for gpu in node.show()["gpus"])


@pytest.mark.parametrize(("version", "skipped"), [("570.124.06", 1), ("615.71.05", 0)])
def test_drivers_that_can_less_or_more(node: Node, tmp_path: Path, version: str, skipped: int) -> None:
    """A move to another GPU, and storage of our own: they work, or are refused by name."""
    node.ctl("driver", version)
    ran, found = run(node.env, tmp_path / "results.json", "-k", "moves or custom or refused_by_name or this_driver")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert sorted(one["outcome"] for one in found["tests"]) == ["passed"] * (4 - skipped) + ["skipped"] * skipped
    assert all("615 has it" in one["why"] for one in found["tests"] if one["outcome"] == "skipped")
    assert found["machine"]["driver"] == version


def test_without_a_gpu_they_are_skipped_with_the_reason_and_the_command(tmp_path: Path) -> None:
    """And the results say that nothing was measured."""
    env = {key: value for key, value in os.environ.items() if key not in ("LD_LIBRARY_PATH", "GPU_EMULATOR_STATE")}
    ran, found = run(env, tmp_path / "results.json")
    if found["machine"] is not None:
        pytest.skip("there is a GPU here")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "on a machine with a GPU: make test-gpu" in ran.stdout
    assert found["status"] == "not yet measured on hardware"
    assert {one["outcome"] for one in found["tests"]} == {"skipped"}
