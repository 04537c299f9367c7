"""The C unit tests of the plugin and the shepherd, and what can be said of both without Slurm."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "spank"


def run(*argv: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """A command, whatever its exit status."""
    return subprocess.run(argv, input=given, check=False, text=True, capture_output=True, timeout=280)


@pytest.fixture(scope="module")
def compiler() -> None:
    """Skips where there is none."""
    for tool in ("make", "gcc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_unit_tests_pass_under_sanitizers(tmp_path: Path) -> None:
    """`make check` in spank/."""
    probe = ("gcc", "-fsanitize=address,undefined", "-x", "c", "-o", str(tmp_path / "probe"), "-")
    if run(*probe, given="int main(void) { return 0; }").returncode != 0:
        pytest.skip("gcc has no sanitizer libraries")
    ran = run("make", "-s", "-C", str(SOURCE), f"BUILD={tmp_path}", "check")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("ok test_") == len(list((SOURCE / "tests").glob("test_*.c")))


@pytest.mark.usefixtures("compiler")
def test_shepherd_is_not_for_hands(tmp_path: Path) -> None:
    """It builds without Slurm's headers, says which version it speaks, and refuses other command lines."""
    shepherd = tmp_path / "slurm-affinode-shepherd"
    built = run("make", "-s", "-C", str(SOURCE), f"BUILD={tmp_path}", str(shepherd))
    assert built.returncode == 0, built.stderr
    assert run(str(shepherd), "--speaks", "1").returncode == 0
    assert run(str(shepherd), "--speaks", "0").returncode == 1
    refused = run(str(shepherd), "echo", "hello")
    assert refused.returncode == 2
    assert "is started by Slurm" in refused.stderr


@pytest.mark.usefixtures("compiler")
def test_missing_headers_are_named(tmp_path: Path) -> None:
    """Without slurm/spank.h the build says what to install."""
    built = run("make", "-s", "-C", str(SOURCE), f"BUILD={tmp_path}", "SLURM_CFLAGS=-nostdinc")
    assert built.returncode != 0
    assert "slurm/spank.h is not there: install libslurm-dev" in built.stderr
