"""Compile the C part of the package: a shared library without dependencies, for any Python.

Without a working C compiler on the machine, that of the package ``ziglang`` is used. ``python hatch_build.py`` compiles
the library of a checkout without installing the package.
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

SOURCES = Path("slurm_affinode/analysis/join")
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
        if (found := shutil.which(name)) and _works(found):
            return [found]
    return None


def _works(command: str) -> bool:
    with tempfile.TemporaryDirectory() as directory:
        argv = [command, "-shared", "-fPIC", "-x", "c", "-o", f"{directory}/probe.so", "-"]
        return subprocess.run(argv, input=_PROBE, text=True, capture_output=True, check=False).returncode == 0


def build(root: Path) -> Path:
    """Compile the library in the checkout ``root``; return its path. Ends the process if that fails."""
    sources = root / SOURCES
    names = runpy.run_path(str(sources / "sources.py"))
    library = sources / names["LIBRARY"]
    command = compiler() or list(_ZIG)
    text = f'-D{names["SYMBOL"].upper()}="{names["digest"](sources)}"'
    # Renamed when complete: a process may be using the file that it replaces.
    partial = library.with_suffix(f".{os.getpid()}.so")
    files = [str(path) for path in sorted(sources.glob("*.c"))]
    try:
        subprocess.run([*command, *FLAGS, text, "-o", str(partial), *files], check=True)
        partial.replace(library)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"{library.name}: the C compiler failed ({error}); "
            "install gcc and libc6-dev, or set CC to a compiler that works"
        ) from None
    finally:
        partial.unlink(missing_ok=True)
    return library


class Compile(BuildHookInterface):  # type: ignore[type-arg]
    """The build hook; ``uv sync`` and ``pip install`` run it, also for an editable installation."""

    def dependencies(self) -> list[str]:
        """Return further packages that the build needs."""
        return [] if compiler() else ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library and add it to the wheel, which then fits this platform alone."""
        library = build(Path(self.root))
        build_data["pure_python"] = False
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{system}"
        build_data["artifacts"].append(str(SOURCES / library.name))


if __name__ == "__main__":
    build(Path(__file__).parent)
