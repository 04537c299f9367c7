"""The machine, its driver and its GPUs for these tests; and a file of what was found.

Without a GPU all of them are skipped, with the reason and the command. ``GPU_RESULTS`` names the file (default
``out/gpu/tests.json``).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu.machine import Machine, find
from gpu.programs import Programs, programs

from slurm_affinode.checkpoint.cuda import Cuda
from slurm_affinode.gpu.nvml import NvmlDriver

_RESULTS = Path(os.environ.get("GPU_RESULTS", "out/gpu/tests.json"))
_found: dict[str, Any] = {}
_tests: list[dict[str, Any]] = []


@pytest.fixture(scope="session")
def machine() -> Machine:
    """What there is; skips where there is no GPU."""
    found = find()
    if isinstance(found, str):
        _found["why"] = found
        pytest.skip(found)
    _found["machine"] = found.facts()
    return found


@pytest.fixture(scope="session")
def nvml(machine: Machine) -> Iterator[NvmlDriver]:
    """NVML."""
    driver = NvmlDriver()
    yield driver
    driver.close()


@pytest.fixture(scope="session")
def cuda(machine: Machine, nvml: NvmlDriver) -> Iterator[Cuda]:
    """The product's way to the CUDA driver: one helper for all tests, as it is one for a node."""
    made = Cuda(driver_version=nvml.version)
    can = made.capabilities()
    if not can.checkpoint:
        made.close()
        pytest.skip(f"the driver of this machine cannot checkpoint: {can.why_not}")
    yield made
    made.close()


@pytest.fixture
def run(cuda: Cuda, tmp_path: Path) -> Iterator[Programs]:
    """Programs on the GPU; they end with the test, unlocked."""
    with programs(cuda, tmp_path) as made:
        yield made


@pytest.fixture
def note(record_property: Any) -> Any:
    """Keep a fact in the results: ``note(name, value)``."""
    return record_property


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Collect how each test of this folder ended."""
    report: Any = yield
    if item.get_closest_marker("gpu") and (report.when == "call" or report.outcome != "passed"):
        reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else None
        _tests.append(
            {
                "test": f"{item.path.stem}::{item.name}",
                "outcome": report.outcome,
                "seconds": round(report.duration, 3),
                "why": None if reason is None else reason.removeprefix("Skipped: "),
                "found": dict(item.user_properties),
            }
        )
    return report


def pytest_sessionfinish() -> None:
    """Write what was found."""
    if not _tests:
        return
    machine = _found.get("machine")
    status = "not yet measured on hardware" if machine is None else "emulated" if machine["emulated"] else "measured"
    _RESULTS.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "status": status,
        "command": "make test-gpu",
        "why": _found.get("why"),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine,
        "tests": _tests,
    }
    _RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
