"""The unit tests of the C parts of the test cluster, under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CONTAINERS = Path(__file__).resolve().parents[2] / "containers"


@pytest.fixture(autouse=True)
def _sanitizers(tmp_path: Path) -> None:
    for tool in ("make", "gcc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    built = subprocess.run(
        ["gcc", "-fsanitize=address,undefined", "-x", "c", "-o", str(tmp_path / "probe"), "-"],
        input="int main(void) { return 0; }",
        check=False,
        text=True,
        capture_output=True,
        timeout=240,
    )
    if built.returncode != 0:
        pytest.skip("gcc has no sanitizer libraries")


def make(part: str, target: str, build: Path) -> str:
    """Build a target, which must succeed; return its output."""
    ran = subprocess.run(
        ["make", "-s", "-C", str(CONTAINERS / part), f"BUILD={build}", target],
        check=False,
        text=True,
        capture_output=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_unit_tests_of_emulator_pass(tmp_path: Path) -> None:
    """`make check` in the emulator's directory."""
    tests = list((CONTAINERS / "gpu-emulator" / "tests").glob("test_*.c"))
    assert make("gpu-emulator", "check", tmp_path).count("ok test_") == len(tests)


def test_unit_tests_of_criu_shim_pass(tmp_path: Path) -> None:
    """`make test` in its directory; the libraries that the image preloads are built without warnings."""
    make("criu-shim", "test", tmp_path)
    make("criu-shim", "all", tmp_path)
    assert {"criu-shim.so", "unified.so"} <= {file.name for file in tmp_path.iterdir()}
