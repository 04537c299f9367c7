"""Text from the kernel about processes, sockets and cgroups.

Users choose part of it: names, paths, arguments. Only a newline ends a line, because that is the one character that the
kernel escapes: ``str.splitlines`` and files opened as text also split at carriage returns and nine other characters, so
that a name with such characters would be read as lines of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_MOST_DIGITS = 20


def lines(path: Path | str) -> list[str]:
    """Return the lines of a file without newlines; non-UTF-8 bytes become surrogates. Raises ``OSError``."""
    with open(path, "rb") as file:  # noqa: PTH123 - a path for each of thousands would take longer than to read them
        return os.fsdecode(file.read()).split("\n")


def table(rows: Iterable[str]) -> dict[str, str]:
    """Return lines of the form ``key: value`` as a mapping; of a repeated key, the first."""
    values: dict[str, str] = {}
    for row in rows:
        key, colon, value = row.partition(":")
        if colon:
            values.setdefault(key, value.strip())
    return values


def number(word: str | bytes | None, base: int = 10) -> int | None:
    """Return a number written by the kernel; ``None``: it is not a number."""
    if word is None or not word.isascii() or not word.isalnum() or len(word) > _MOST_DIGITS:
        return None
    try:
        return int(word, base)
    except ValueError:
        return None


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers in a line, without other words."""
    return tuple(value for word in text.split() if (value := number(word)) is not None)


def kib(text: str | None) -> int | None:
    """Return the bytes of a size such as ``12 kB``; ``None``: it is not a size."""
    value = number(next(iter((text or "").split()), None))
    return None if value is None else value * 1024
