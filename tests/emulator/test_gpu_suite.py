"""The tests for machines with a GPU (tests/gpu) and their benchmark, run on the emulated driver at small sizes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from emulator.node import Node
from gpu import tree
from gpu.programs import Programs

from benchmarks.gpu import measure

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 600
pytestmark = pytest.mark.timeout(LIMIT_S + 60)


def run(
    env: dict[str, str], results: Path, *arguments: str, within: tuple[str, ...] = ()
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run tests/gpu; return the process and its results. ``within``: a command that runs a command."""
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu", *arguments]
    command = [*within, *pytest_]
    ran = subprocess.run(
        command, check=False, cwd=REPOSITORY, env={**env, "GPU_RESULTS": str(results)}, capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip
    return ran, json.loads(results.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_suite_passes_on_emulated_driver(node: Node, tmp_path: Path) -> None:
    """None fails; tests of PyTorch, of missing counters, and of unavailable CRIU and namespaces are skipped."""
    ran, result = run(node.env, tmp_path / "results.json")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert result["status"] == "emulated"
    outcomes = {item["test"].split("::")[1]: item for item in result["tests"]}
    skipped = {name for name, outcome in outcomes.items() if outcome["outcome"] == "skipped"}
    assert all(outcomes[name]["why"] for name in skipped)
    assert {name for name in skipped if "criu" not in (test := outcomes[name]["test"]) and "servers" not in test} == {
        "test_training_continues_bit_for_bit",
        "test_suspended_in_the_middle_of_its_steps",
        "test_engine_and_memory_activity_where_the_gpu_counts_them",
        "test_custom_storage_writes_files_of_our_own",
    }
    assert not any(gpu["processes"] for gpu in node.show()["gpus"])


@pytest.mark.parametrize(("version", "skipped"), [("570.124.06", 1), ("615.71.05", 0)])
def test_suite_passes_with_other_drivers(node: Node, tmp_path: Path, version: str, skipped: int) -> None:
    """Migration and custom storage either work or are refused by name."""
    node.ctl("driver", version)
    ran, result = run(node.env, tmp_path / "results.json", "-k", "moves or custom or refused_by_name or this_driver")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert sorted(test["outcome"] for test in result["tests"]) == ["passed"] * (4 - skipped) + ["skipped"] * skipped
    assert all("615 has it" in test["why"] for test in result["tests"] if test["outcome"] == "skipped")
    assert result["machine"]["driver"] == version


def test_suite_is_skipped_without_gpu(tmp_path: Path) -> None:
    """And the results show that nothing was measured."""
    env = {key: value for key, value in os.environ.items() if key not in ("LD_LIBRARY_PATH", "GPU_EMULATOR_STATE")}
    ran, result = run(env, tmp_path / "results.json")
    if result["machine"] is not None:
        pytest.skip("there is a GPU here")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("on a machine with a GPU: make test-gpu") == 1
    assert result["status"] == "not yet measured on hardware"
    assert {test["outcome"] for test in result["tests"]} == {"skipped"}


def test_idle_detection_uses_performance_counters(bare_node: Node, tmp_path: Path) -> None:
    """On Hopper, idle detection has both signals."""
    bare_node.init("--model", "h100-80g", "--gpus", "1", "--context-mib", "100")
    ran, result = run(bare_node.env, tmp_path / "results.json", "-k", "engine_and_memory or work_is_busy")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [test["outcome"] for test in result["tests"]] == ["passed"] * 2
    shown = {name: value for test in result["tests"] for name, value in test["found"].items()}
    assert shown["busy"]["engine"] > 1 >= shown["idle"]["engine"]


@pytest.mark.nightly
def test_idle_tests_are_skipped_with_too_few_signals(node: Node, tmp_path: Path) -> None:
    """Idle detection needs two signals; an agent would suspend nothing there."""
    node.ctl("fault", "util-unsupported")
    ran, result = run(node.env, tmp_path / "results.json", "-k", "work_is_busy")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (test,) = result["tests"]
    assert (test["outcome"], "needs 2 signals" in test["why"]) == ("skipped", True)


def cut_off(command: list[str], env: dict[str, str], enough: Callable[[], bool]) -> int:
    """Start a command and terminate it once the condition holds, as a time limit does; return its exit status."""
    ran = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=REPOSITORY, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + LIMIT_S
    while not enough():
        assert ran.poll() is None, ran.returncode
        assert time.monotonic() < deadline
        time.sleep(0.02)
    ran.send_signal(signal.SIGTERM)
    return ran.wait(LIMIT_S)


def test_interrupted_run_is_completed_by_another(node: Node, tmp_path: Path) -> None:
    """Nothing is left on the GPU; earlier results stay in the file."""
    results = tmp_path / "results.json"
    pytest_ = ["pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu/test_lock.py"]
    status = cut_off(pytest_, {**node.env, "GPU_RESULTS": str(results)}, results.exists)
    assert status == pytest.ExitCode.INTERRUPTED
    assert not any(gpu["processes"] for gpu in node.show()["gpus"])
    before = json.loads(results.read_text(encoding="utf-8"))
    assert before["status"] == "emulated"
    assert 0 < len(before["tests"]) < 3
    ran, result = run(node.env, results, "-k", "refused_by_name")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [test["test"] for test in result["tests"]] == [
        *(test["test"] for test in before["tests"]),
        "test_inplace::test_unsupported_features_are_refused_by_name",
    ]


def test_program_is_tracked_from_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the run is interrupted before Popen has returned; otherwise nothing would end the program."""
    popen = subprocess.Popen

    def slow(*arguments: Any, **options: Any) -> Any:
        made = popen([sys.executable, "-c", "import time; time.sleep(60)"])
        signal.raise_signal(signal.SIGINT)
        return made

    monkeypatch.setattr(subprocess, "Popen", slow)
    run = Programs(Mock(), tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run.start()
    finally:
        signal.signal(signal.SIGINT, before)
    (program,) = run.started
    assert program.process is not None
    program.process.kill()
    program.process.wait()


PROCESSES_OF_TWO = 6
"""Per server: the server, PID 1 of its namespace, and the parent of that."""


def servers_of(node: Node) -> list[int]:
    """Return the processes of model servers on a node."""
    state, result = node.env["GPU_EMULATOR_STATE"].encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"server.py" in (path / "cmdline").read_bytes() and state in (path / "environ").read_bytes():
                result.append(int(path.name))
    return result


def test_killed_run_leaves_no_server(node: Node, tmp_path: Path) -> None:
    """Including sleeping servers, which are stopped and cannot check whether their parent is gone."""
    if (why := tree.namespaces()) is not None:
        pytest.skip(why)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-k", "turns and kernels"]
    env = {**node.env, "GPU_RESULTS": str(tmp_path / "results.json")}
    ran = subprocess.Popen(
        [*command, "tests/gpu"], cwd=REPOSITORY, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + LIMIT_S
    while len(servers_of(node)) < PROCESSES_OF_TWO:  # the first one is asleep by then
        assert ran.poll() is None, ran.returncode
        assert time.monotonic() < deadline
        time.sleep(0.02)
    ran.kill()
    ran.wait()
    while servers_of(node) or any(gpu["processes"] for gpu in node.show()["gpus"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.nightly
def test_broken_bindings_fail_tests(node: Node, tmp_path: Path) -> None:
    """Bindings that cannot be loaded, with a capable driver, are no reason to skip everything."""
    broken = tmp_path / "broken" / "cuda" / "bindings"
    broken.mkdir(parents=True)
    (broken.parent / "__init__.py").touch()
    (broken / "__init__.py").write_text("raise ImportError('torn')\n")
    env = {**node.env, "PYTHONPATH": str(tmp_path / "broken")}
    ran, result = run(env, tmp_path / "results.json", "-k", "waits_long_enough")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert [test["outcome"] for test in result["tests"]] == ["failed"]
    assert (
        "cannot checkpoint: cannot reach the driver: cuda-bindings is not installed (torn)" in result["tests"][0]["why"]
    )


@pytest.mark.nightly
def test_unusable_criu_skips_tests(node: Node, tmp_path: Path) -> None:
    """A missing capability in a container or a missing kernel feature is unrelated to GPUs."""
    if (why := tree.can()) is not None:
        pytest.skip(why)
    criu = tmp_path / "criu"
    criu.write_text("#!/bin/sh\n[ $1 = --version ] && echo Version: 4.2 && exit\necho no capability >&2\nexit 1\n")
    criu.chmod(0o755)
    ran, result = run({**node.env, "CRIU": str(criu)}, tmp_path / "results.json", "-k", "criu")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert {test["outcome"] for test in result["tests"]} == {"skipped"}
    assert all("CRIU cannot dump a plain process here" in test["why"] for test in result["tests"])


@pytest.mark.nightly
def test_missing_loopback_interface_skips_tests(node: Node, tmp_path: Path) -> None:
    """As on a small virtual machine."""
    if (why := tree.namespaces()) is not None:
        pytest.skip(why)
    ran, result = run(node.env, tmp_path / "results.json", "-k", "turns and kernels", within=("unshare", "--net"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [test["why"] for test in result["tests"]] == ["the loopback interface is down: ip link set lo up"]


def bench(env: dict[str, str], out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), *arguments]
    return subprocess.run(
        command, check=False, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=LIMIT_S
    )


@pytest.mark.slow
def test_benchmark_reports_emulated_driver(node: Node, tmp_path: Path) -> None:
    """Every phase of every size, in both ways; goals are not evaluated."""
    node.ctl("driver", "615.71.05")
    ran = bench(node.env, tmp_path / "bench.json", "--rounds", "1", "--directory", str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    record = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert (record["status"], record["complete"], record["failed"]) == ("emulated", True, [])
    assert "EMULATED" in ran.stdout
    assert len(record["staging"]) == 2
    for item in record["staging"]:
        for side in ("bare", "ours"):
            assert set(item["seconds"][side]) == {"lock", "checkpoint", "restore", "unlock"}
    assert len(record["goals"]) == 3
    assert all(goal["met"] is None and goal["value"] is not None for goal in record["goals"])
    assert {entry["processes"] for entry in record["parallel"]} == {2, 4}
    assert [Path(entry["directory"]).name for entry in record["custom_storage"]] == ["shm", tmp_path.name]
    assert not any("why_not" in entry for entry in record["host_memory"])
    assert "11.4 s" in json.dumps(record["published"])
    assert not any(gpu["processes"] for gpu in node.show()["gpus"])


def test_interrupted_benchmark_is_resumed(node: Node, tmp_path: Path) -> None:
    """Results in the file are not measured again; nothing is left on the GPU."""
    out = tmp_path / "bench.json"
    command = ["benchmarks.gpu", "--out", str(out), "--rounds", "1", "--directory", str(tmp_path)]
    assert cut_off(command, node.env, out.exists) == 128 + signal.SIGTERM
    assert not any(gpu["processes"] for gpu in node.show()["gpus"])
    before = json.loads(out.read_text(encoding="utf-8"))
    assert (before["status"], before["complete"]) == ("emulated", False)
    ran = bench(node.env, out, "--quick", "--resume", "--only", "staging")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["staging"][: len(before["staging"])] == before["staging"]
    assert len(record["staging"]) == 2
    assert ran.stderr.count("measuring: staging") == 2 - len(before["staging"])
    assert not record["complete"]  # the other parts were not selected


def test_disturbed_rounds_do_not_count_as_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single page fault of the host is several percent of a checkpoint, and may affect either side."""
    took = {"bare": iter([1.0] * 100), "ours": itertools.cycle([1.02] * 4 + [5.0] * 4)}

    def side(name: str) -> Mock:
        return Mock(phases=lambda pid: {phase: lambda: next(took[name]) for phase in measure.PHASES})

    monkeypatch.setattr(measure, "timed", lambda action: action())
    product = side("ours")
    product.nvml.devices.return_value = [Mock(uuid="GPU-1")]
    result = measure.staging(Mock(), product, side("bare"), 1024, rounds=2)
    assert result["added"] == pytest.approx(0.02)
    assert result["wake_ratio"] == pytest.approx(2.04)
    assert result["seconds"]["ours"]["checkpoint"] == pytest.approx(3.01)


def test_benchmark_rejects_invalid_options(node: Node, tmp_path: Path) -> None:
    """Invalid sizes and an output file that cannot be written."""
    (tmp_path / "file").touch()
    for wrong, why in (
        (["--gib", "nan"], "invalid gibibytes value: 'nan'"),
        (["--rounds", "0"], "invalid at_least_once value: '0'"),
        (["--out", str(tmp_path / "file" / "bench.json")], "cannot be written"),
    ):
        ran = bench(node.env, tmp_path / "bench.json", *wrong)
        assert (ran.returncode, why in ran.stderr, "Traceback" in ran.stderr) == (2, True, False), ran.stderr


@pytest.mark.nightly
def test_failed_measurement_does_not_affect_others(node: Node, tmp_path: Path) -> None:
    """The failure is reported, and the exit status is not 0."""
    (tmp_path / "sitecustomize.py").write_text(
        "from slurm_affinode.suspension import memory as room\n"
        "plain = room.shortage\n"
        "def fails_once(*arguments):\n"
        "    room.shortage = plain\n"
        "    raise OSError('no')\n"
        "room.shortage = fails_once\n"
    )
    out = tmp_path / "bench.json"
    env = {**node.env, "PYTHONPATH": str(tmp_path)}
    ran = bench(env, out, "--rounds", "1", "--only", "staging", "parallel")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    assert [item.partition(":")[0] for item in record["failed"]] == ["staging of 0.015625 GiB"]
    assert "FAILED: staging of 0.015625 GiB" in ran.stdout
    assert (record["complete"], len(record["staging"]), len(record["parallel"])) == (False, 1, 2)


@pytest.mark.nightly
def test_failing_cuda_is_reported_in_one_line(node: Node, tmp_path: Path) -> None:
    """It has all functions, but CUDA fails, as in a container without /dev/nvidia-uvm."""
    (tmp_path / "sitecustomize.py").write_text(
        "from slurm_affinode.checkpoint import cuda, interface\n"
        "def devices(self): raise interface.CudaError('cannot list the GPUs: the driver failed')\n"
        "cuda.Cuda.devices = devices\n"
    )
    env = {**node.env, "PYTHONPATH": str(tmp_path)}
    ran, result = run(env, tmp_path / "results.json", "-k", "waits_long_enough")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert result["tests"][0]["why"] == "CUDA cannot be used here: cannot list the GPUs: the driver failed"
    ran = bench(env, tmp_path / "bench.json")
    assert (ran.returncode, "CUDA cannot be used here" in ran.stdout, "Traceback" in ran.stderr) == (1, True, False)


@pytest.mark.parametrize(("code", "outcome", "status"), [(801, "skipped", 0), (999, "failed", 1)])
def test_refused_checkpoint_is_reported_once(node: Node, tmp_path: Path, code: int, outcome: str, status: int) -> None:
    """A refusal (container, sandbox, virtual GPU) skips the tests with its reason; other errors fail."""
    node.ctl("fault", "checkpoint-fails", "--error", str(code))
    ran, result = run(node.env, tmp_path / "results.json", "-k", "test_lock or moves_to_another")
    assert ran.returncode == status, ran.stdout + ran.stderr
    assert {test["outcome"] for test in result["tests"]} == {outcome}
    (why,) = {test["why"] for test in result["tests"]}
    assert why.startswith("not even a small program can be suspended here: cannot move the GPU memory of process")
    ran = bench(node.env, tmp_path / "bench.json")
    assert (ran.returncode, why.partition("process")[0] in ran.stdout, "Traceback" in ran.stderr) == (
        status, True, False,
    )  # fmt: skip


@pytest.mark.nightly
def test_startup_error_of_program_is_reported(node: Node, tmp_path: Path) -> None:
    """The program's standard error is discarded, as required for a dump."""
    (tmp_path / "sitecustomize.py").write_text("import kernels\nkernels.PTX = b'no program'\n")
    env = {**node.env, "PYTHONPATH": f"{tmp_path}:{REPOSITORY / 'tests' / 'gpu'}"}
    ran, result = run(env, tmp_path / "results.json", "-k", "waits_long_enough")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "the program says: OSError: CUDA_ERROR_INVALID" in result["tests"][0]["why"]


def test_benchmark_is_skipped_without_gpu(tmp_path: Path) -> None:
    """It prints the command, exits with 0, and writes "skipped" to the results."""
    env = {key: value for key, value in os.environ.items() if key not in ("LD_LIBRARY_PATH", "GPU_EMULATOR_STATE")}
    ran = bench(env, tmp_path / "bench.json")
    if "not yet measured on hardware" not in ran.stdout:
        pytest.skip("there is a GPU here")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "make bench-gpu" in ran.stdout
    assert json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["status"] == "skipped"


def test_emulated_results_are_not_called_measured() -> None:
    """Until measured on hardware, the results file states that, with the command to run."""
    record = json.loads((REPOSITORY / "benchmarks" / "results" / "gpu.json").read_text(encoding="utf-8"))
    if record["status"] == "measured":
        assert not record["machine"]["emulated"]
    else:
        assert record["result"] == "not yet measured on hardware"
        assert record["command"] == "make bench-gpu"
