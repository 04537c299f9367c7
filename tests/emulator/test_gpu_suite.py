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


def test_a_gpu_that_counts_engine_and_memory_activity(bare_node: Node, tmp_path: Path) -> None:
    """Hopper: the idle detection sees both."""
    bare_node.init("--model", "h100-80g", "--gpus", "1", "--context-mib", "100")
    ran, found = run(bare_node.env, tmp_path / "results.json", "-k", "engine_and_memory or work_is_busy")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [one["outcome"] for one in found["tests"]] == ["passed"] * 2
    shown = {name: value for one in found["tests"] for name, value in one["found"].items()}
    assert shown["busy"]["engine"] > 1 >= shown["idle"]["engine"]


def bench(env: dict[str, str], out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The benchmark."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), *arguments]
    return subprocess.run(
        command, check=False, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=LIMIT_S
    )


@pytest.mark.slow
def test_the_benchmark_works_and_says_that_it_is_emulated(node: Node, tmp_path: Path) -> None:
    """Every phase of every size, both ways; goals are not judged by it."""
    node.ctl("driver", "615.71.05")
    ran = bench(node.env, tmp_path / "bench.json", "--rounds", "1", "--directory", str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert found["status"] == "emulated"
    assert "EMULATED" in ran.stdout
    assert len(found["staging"]) == 2
    for one in found["staging"]:
        for side in ("bare", "ours"):
            assert set(one["seconds"][side]) == {"lock", "checkpoint", "restore", "unlock"}
    assert len(found["goals"]) == 3
    assert all(one["met"] is None and one["value"] is not None for one in found["goals"])
    assert {one["processes"] for one in found["parallel"]} == {2, 4}
    assert [Path(one["directory"]).name for one in found["custom_storage"]] == ["shm", tmp_path.name]
    assert not any("why_not" in one for one in found["host_memory"])
    assert "11.4 s" in json.dumps(found["published"])
    assert not any(gpu["processes"] for gpu in node.show()["gpus"])


def test_the_benchmark_without_a_gpu(tmp_path: Path) -> None:
    """Says so, with the command; status 0, and "skipped" for machines."""
    env = {key: value for key, value in os.environ.items() if key not in ("LD_LIBRARY_PATH", "GPU_EMULATOR_STATE")}
    ran = bench(env, tmp_path / "bench.json")
    if "not yet measured on hardware" not in ran.stdout:
        pytest.skip("there is a GPU here")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "make bench-gpu" in ran.stdout
    assert json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["status"] == "skipped"


def test_what_the_repository_holds_is_not_called_measured() -> None:
    """Until it was measured on hardware the results file says that it was not, and how to."""
    found = json.loads((REPOSITORY / "benchmarks" / "results" / "gpu.json").read_text(encoding="utf-8"))
    if found["status"] == "measured":
        assert not found["machine"]["emulated"]
    else:
        assert found["result"] == "not yet measured on hardware"
        assert found["command"] == "make bench-gpu"
