"""Compiled libraries of the package: their sources, and a digest of these by which a library of others is recognized.

The build (``hatch_build.py``) runs this file on its own: importing it needs nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path

LIBRARIES = {"analysis/join": "libjoin.so", "base/columns": "libcolumns.so", "whatif/profile": "libprofile.so"}
"""Directory with C files, in the package -> file name of the library beside them."""
SYMBOL = "library_sources"
"""Name of the text in a library that contains the digest of its sources."""


def digest(directory: Path) -> str:
    """Return a digest of the C files in ``directory``. Raises ``OSError``."""
    hashed = hashlib.sha256()
    for path in sorted(directory.glob("*.[ch]")):
        content = path.read_bytes()
        hashed.update(f"{path.name} {len(content)}\n".encode())
        hashed.update(content)
    return hashed.hexdigest()


def load(library: Path, part: str) -> ctypes.CDLL:
    """Load the library, which must have been compiled from the C files beside it. ``part``: what needs it.

    Its functions run without the interpreter lock. Raises ``UnreachableError``.
    """
    from slurm_affinode.base.errors import UnreachableError  # noqa: PLC0415 - the build has no package
    from slurm_affinode.base.text import one_line  # noqa: PLC0415

    try:
        loaded = ctypes.CDLL(str(library))
        problem = None if _is_current(loaded, library.parent) else "was compiled from another version of its sources"
    except OSError as error:
        problem = f"cannot be loaded: {one_line(error)}"
    if problem is not None:
        raise UnreachableError(
            f"{library}: the compiled part of {part} {problem}",
            hint="install slurm-affinode again, or run `python hatch_build.py` in a checkout",
        )
    return loaded


def _is_current(loaded: ctypes.CDLL, directory: Path) -> bool:
    try:
        text = ctypes.c_char_p(ctypes.addressof(ctypes.c_char.in_dll(loaded, SYMBOL)))
    except ValueError:
        return False
    return text.value is not None and text.value.decode("ascii", "replace") == digest(directory)
