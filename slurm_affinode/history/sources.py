"""Which files were taken in: a log of fingerprints, so that a nightly run does not read last year's files again.

It only saves work: a file that is not in it is read again and changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from slurm_affinode.files import write_text

FILE = "sources.jsonl"
KEPT = 200_000


def fingerprints(root: Path) -> frozenset[str]:
    """The fingerprints of everything that was taken in."""
    return frozenset(_read(root))


def _read(root: Path) -> dict[str, str]:
    """Fingerprint -> name; lines that a crash cut off are left out."""
    found: dict[str, str] = {}
    try:
        text = (root / FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return found
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            found[str(entry["fingerprint"])] = str(entry["name"])
        except (ValueError, KeyError, TypeError):
            continue
    return found


def remember(root: Path, entries: Iterable[tuple[str, str | None]]) -> None:
    """Append (name, fingerprint) pairs; the caller holds the write lock and has made the samples durable."""
    lines = [_line(name, digest) for name, digest in entries if digest is not None]
    if not lines:
        return
    with (root / FILE).open("a", encoding="utf-8") as file:
        file.write("".join(lines))
        size = file.tell()
    if size > 2 * KEPT * 100:
        _trim(root)


def _trim(root: Path) -> None:
    known = list(_read(root).items())[-KEPT:]
    write_text(root / FILE, "".join(_line(name, digest) for digest, name in known))


def _line(name: str, digest: str) -> str:
    return json.dumps({"fingerprint": digest, "name": name}) + "\n"
