"""The sources of the compiled library, and their digest, by which a library of other sources is recognized.

The build (``hatch_build.py``) runs this file on its own: it imports nothing but the standard library.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

LIBRARY = "libjoin.so"
"""File name of the library, beside its sources."""
SYMBOL = "join_sources"
"""Name of the text in the library that contains the digest of its sources."""


def digest(directory: Path) -> str:
    """Return a digest of the C files in ``directory``. Raises ``OSError``."""
    found = hashlib.sha256()
    for path in sorted(directory.glob("*.[ch]")):
        content = path.read_bytes()
        found.update(f"{path.name} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()
