"""Compile the C part of the package: a shared library without dependencies, for any Python.

Without a C compiler on the machine, that of the package ``ziglang`` is used.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path("slurm_affinode/analysis/join")
LIBRARY = SOURCES / "libjoin.so"
FLAGS = (
    "-std=c11", "-O3", "-g0", "-s", "-fPIC", "-shared", "-fwrapv", "-ffp-contract=off",
    # Sums may be reordered, so that they are vectorized, but NaN keeps its meaning.
    "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno",
)  # fmt: skip


def compiler() -> list[str] | None:
    """Return the command of the C compiler on this machine."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return [found] if found else None


class Compile(BuildHookInterface):  # type: ignore[type-arg]
    """The build hook; ``uv sync`` and ``pip install`` run it, also for an editable installation."""

    def dependencies(self) -> list[str]:
        """Return further packages that the build needs."""
        return [] if compiler() else ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library and add it to the wheel, which then fits this platform alone."""
        root = Path(self.root)
        command = compiler() or [sys.executable, "-m", "ziglang", "cc", "-fno-sanitize=undefined"]
        # Renamed when complete: a process may be using the file that it replaces.
        partial = root / LIBRARY.with_suffix(f".{os.getpid()}")
        sources = [str(path) for path in sorted((root / SOURCES).glob("*.c"))]
        try:
            subprocess.run([*command, *FLAGS, "-o", str(partial), *sources], check=True)
            partial.replace(root / LIBRARY)
        finally:
            partial.unlink(missing_ok=True)
        build_data["pure_python"] = False
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{system}"
        build_data["artifacts"].append(str(LIBRARY))
