"""Compile the C part of the package: shared libraries without dependencies, for any Python.

Without a working C compiler on the machine, that of the package ``ziglang`` is used. ``python hatch_build.py`` compiles
the libraries of a checkout without installing the package.
"""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a program
    BuildHookInterface = object  # type: ignore[assignment, misc]

PACKAGE = Path("slurm_affinode")
FLAGS = (
    "-std=c11", "-O3", "-g0", "-s", "-fPIC", "-shared", "-fwrapv", "-ffp-contract=off",
    # Sums may be reordered, so that they are vectorized, but NaN keeps its meaning.
    "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno",
)  # fmt: skip
_ZIG = (sys.executable, "-m", "ziglang", "cc", "-fno-sanitize=undefined")
_PROBE = "#include <stdint.h>\n#include <string.h>\nint probe(void) { return 0; }\n"


def compiler() -> list[str] | None:
    """Return the command of the C compiler on this machine; None if none works, as without the headers of libc."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if (path := shutil.which(name)) and _works(path):
            return [path]
    return None


def _works(command: str) -> bool:
    with tempfile.TemporaryDirectory() as directory:
        argv = [command, "-shared", "-fPIC", "-x", "c", "-o", f"{directory}/probe.so", "-"]
        return subprocess.run(argv, input=_PROBE, text=True, capture_output=True, check=False).returncode == 0


def build(root: Path) -> list[Path]:
    """Compile the libraries in the checkout ``root``; return their paths. Ends the process if that fails."""
    names = runpy.run_path(str(root / PACKAGE / "base" / "compiled.py"))
    command = compiler() or list(_ZIG)
    made: list[Path] = []
    for directory, name in names["LIBRARIES"].items():
        sources = root / PACKAGE / directory
        text = f'-D{names["SYMBOL"].upper()}="{names["digest"](sources)}"'
        made.append(sources / name)
        _compile([*command, *FLAGS, text], sources, made[-1])
    return made


def _compile(command: list[str], sources: Path, library: Path) -> None:
    # Renamed when complete: a process may be using the file that it replaces.
    partial = library.with_suffix(f".{os.getpid()}.so")
    files = [str(path) for path in sorted(sources.glob("*.c"))]
    try:
        subprocess.run([*command, "-o", str(partial), *files], check=True)
        partial.replace(library)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"{library.name}: the C compiler failed ({error}); "
            "install gcc and libc6-dev, or set CC to a compiler that works"
        ) from None
    finally:
        partial.unlink(missing_ok=True)


class Compile(BuildHookInterface):  # type: ignore[type-arg]
    """The build hook; ``uv sync`` and ``pip install`` run it, also for an editable installation."""

    def dependencies(self) -> list[str]:
        """Return further packages that the build needs."""
        return [] if compiler() else ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the libraries and add them to the wheel, which then fits this platform alone."""
        libraries = build(Path(self.root))
        build_data["pure_python"] = False
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{system}"
        build_data["artifacts"] += [str(library.relative_to(self.root)) for library in libraries]


if __name__ == "__main__":
    build(Path(__file__).parent)
