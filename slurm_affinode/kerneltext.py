"""Text that the kernel writes about processes, sockets and cgroups.

Users choose what stands in it: names, paths, arguments. A line ends with a newline and nothing else, since that is the
one character that the kernel escapes: ``str.splitlines`` and files opened as text also take carriage returns and nine
other characters for the end of a line, and a name that has them would be read as lines of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_MOST_DIGITS = 20


def lines(path: Path | str) -> list[str]:
    """Lines of a file, without the newlines; bytes that are not UTF-8 are surrogates. Raises ``OSError``."""
    with open(path, "rb") as file:  # noqa: PTH123 - a path for each of thousands would take longer than to read them
        return os.fsdecode(file.read()).split("\n")


def table(rows: Iterable[str]) -> dict[str, str]:
    """Lines of the form ``key: value``; of a key that stands there twice, the first."""
    found: dict[str, str] = {}
    for row in rows:
        key, colon, value = row.partition(":")
        if colon:
            found.setdefault(key, value.strip())
    return found


def number(word: str | bytes | None, base: int = 10) -> int | None:
    """A number that the kernel has written; ``None``: it is none."""
    if word is None or not word.isascii() or not word.isalnum() or len(word) > _MOST_DIGITS:
        return None
    try:
        return int(word, base)
    except ValueError:
        return None


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of a line; words that are none are left out."""
    return tuple(found for word in text.split() if (found := number(word)) is not None)


def kib(text: str | None) -> int | None:
    """Bytes of a size such as ``12 kB``; ``None``: it is none."""
    found = number(next(iter((text or "").split()), None))
    return None if found is None else found * 1024
