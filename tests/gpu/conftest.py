"""The machine, its driver and its GPUs for these tests, and the file with the results.

If a machine lacks something (a GPU, PyTorch, root), the tests that need it are skipped, with the reason and the
command. If something is present but does not work, they fail. ``GPU_RESULTS`` names the file
(``out/gpu/tests.json``). It is written after each test and keeps the results of other runs on this machine, so that a
later run can complete an interrupted one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gpu.machine import COMMAND, Machine, Missing, find
from gpu.programs import Programs, programs, unusable
from gpu.skips import without
from slurm_affinode.checkpoint.cuda.client import Cuda, Deadlines
from slurm_affinode.gpu.nvml import NvmlDriver

_RESULTS = Path(os.environ.get("GPU_RESULTS", "out/gpu/tests.json"))
_DEADLINES = Deadlines(move=240.0)
"""Sufficient for 1 GB/s in the largest test, and short enough to report a hanging call within ten minutes."""
_HERE = Path(__file__).parent
_ORDER = (
    "test_driver",
    "test_table",
    "test_lock",
    "test_idle",
    "test_inplace",
    "test_room",
    "test_criu",
    "test_servers",
    "test_torch",
)
_facts: dict[str, Any] = {}
_tests: dict[str, dict[str, Any]] = {}


@pytest.fixture(scope="session")
def machine() -> Machine:
    """The machine; skips without a GPU."""
    findings = find()
    if isinstance(findings, Missing):
        _facts["why"] = findings.why
        without(findings)
    _facts["machine"] = findings.facts()
    # As for Ctrl-C, so that the programs on the GPU are ended properly.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return findings


@pytest.fixture(scope="session")
def nvml(machine: Machine) -> Iterator[NvmlDriver]:
    driver = NvmlDriver()
    yield driver
    driver.close()


@pytest.fixture(scope="session")
def cuda(machine: Machine, nvml: NvmlDriver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cuda]:
    """The interface of slurm-affinode to the CUDA driver, with one helper for all tests, as on a node."""
    with closing(Cuda(driver_version=nvml.version, deadlines=_DEADLINES)) as made:
        if (missing := unusable(made, tmp_path_factory.mktemp("trial"))) is not None:
            without(missing)
        yield made


@pytest.fixture
def run(cuda: Cuda, tmp_path: Path) -> Iterator[Programs]:
    """Programs on the GPU; they are unlocked and end with the test."""
    with programs(cuda, tmp_path) as made:
        yield made


@pytest.fixture
def note(record_property: Any) -> Any:
    """Record a fact in the results: ``note(name, value)``."""
    return record_property


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the fast and most informative tests first, in case of a time limit."""
    positions = [number for number, item in enumerate(items) if item.path.parent == _HERE]
    sorted_ = sorted((items[number] for number in positions), key=lambda item: _ORDER.index(item.path.stem))
    for number, item in zip(positions, sorted_, strict=True):
        items[number] = item


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Collect the outcome of each test in this directory, and write the results."""
    report: Any = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        report.longrepr = (str(_HERE), None, report.longrepr[2])  # one line per reason instead of one per test
    if item.get_closest_marker("gpu") and (report.when == "call" or report.outcome != "passed"):
        name = f"{item.path.stem}::{item.name}"
        before = _tests.get(name, {})
        worst = "failed" if "failed" in (before.get("outcome"), report.outcome) else report.outcome
        _tests[name] = {
            "test": name,
            "outcome": worst,
            "seconds": round(report.duration, 3),
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "why": _why(report) or before.get("why"),
            "found": dict(item.user_properties),
        }
        _write()
    return report


def _why(report: Any) -> str | None:
    """Return why a test was skipped or failed, in one line."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    if report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        text = str(report.longrepr) if crash is None else str(crash.message)
        return text.strip().partition("\n")[0].removeprefix("Failed: ")
    return None


def _write() -> None:
    """Write the results so far, together with those of other runs on this machine."""
    machine = json.loads(json.dumps(_facts.get("machine")))
    status = "not yet measured on hardware" if machine is None else "emulated" if machine["emulated"] else "measured"
    result = {
        "status": status,
        "command": COMMAND,
        "why": _facts.get("why"),
        "machine": machine,
        "tests": [*_earlier(machine), *_tests.values()],
    }
    try:
        _RESULTS.parent.mkdir(parents=True, exist_ok=True)
        new = _RESULTS.with_name(_RESULTS.name + ".new")
        new.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        new.rename(_RESULTS)
    except OSError as error:  # the tests matter more than the file
        print(f"the results cannot be written: {error}", file=sys.__stderr__)


def _earlier(machine: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the tests in the file that this run has not executed, if the file is from this machine and driver."""
    try:
        before = json.loads(_RESULTS.read_text(encoding="utf-8"))
        previous = before["machine"]
        same = machine is not None and (previous["driver"], previous["gpus"]) == (machine["driver"], machine["gpus"])
        return [test for test in before["tests"] if test["test"] not in _tests] if same else []
    except (OSError, ValueError, KeyError, TypeError):
        return []
