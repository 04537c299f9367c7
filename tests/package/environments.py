"""Virtual environments with the wheel, outside of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
UV = shutil.which("uv") or str(REPOSITORY / ".uv" / "bin" / "uv")


def run(*argv: str | Path, cwd: Path) -> str:
    """Run a program and return its standard output; on failure, its standard error is the message."""
    done = call(*argv, cwd=cwd)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def call(
    *argv: str | Path, cwd: Path, stdin: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program that sees no module of the checkout. ``stdin``: its standard input; ``None``: that of the tests."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(word) for word in argv],
        cwd=cwd,
        env={**env, **environment},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def install(wheel: Path, directory: Path, extras: str = "") -> Path:
    """Install the wheel with ``extras`` (``[analysis]``) in a new environment; return its directory of programs."""
    run(UV, "venv", "--quiet", "--python", sys.executable, directory, cwd=directory.parent)
    programs = directory / "bin"
    run(UV, "pip", "install", "--quiet", "--python", programs / "python", f"{wheel}{extras}", cwd=directory.parent)
    return programs
