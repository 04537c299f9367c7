"""The emulator's own unit tests in C, under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "containers" / "gpu-emulator"


@pytest.mark.slow
def test_unit_tests_pass_under_sanitizers(tmp_path: Path) -> None:
    """`make check` in the emulator's folder."""
    for tool in ("make", "gcc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    built = subprocess.run(
        ["gcc", "-fsanitize=address,undefined", "-x", "c", "-o", str(tmp_path / "probe"), "-"],
        input="int main(void) { return 0; }",
        check=False,
        text=True,
        capture_output=True,
        timeout=60,
    )
    if built.returncode != 0:
        pytest.skip("gcc has no sanitizer libraries")
    ran = subprocess.run(
        ["make", "-s", "-C", str(SOURCE), f"BUILD={tmp_path}", "check"],
        check=False,
        text=True,
        capture_output=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("ok test_") == len(list((SOURCE / "tests").glob("test_*.c")))
