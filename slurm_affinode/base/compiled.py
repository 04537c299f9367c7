"""Compiled libraries of the package: their sources, and a digest of these by which a library of others is recognized.

The build (``hatch_build.py``) runs this file on its own: it imports nothing but the standard library.
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


def is_current(loaded: ctypes.CDLL, directory: Path) -> bool:
    """Return whether a library was compiled from the C files that are in ``directory`` now. Raises ``OSError``."""
    try:
        text = ctypes.c_char_p(ctypes.addressof(ctypes.c_char.in_dll(loaded, SYMBOL)))
    except ValueError:
        return False
    return text.value is not None and text.value.decode("ascii", "replace") == digest(directory)
