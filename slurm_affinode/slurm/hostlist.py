"""Expansion of Slurm's hostlists (``gpu[01-04,07],login``) to node names.

Grammar as in ``scontrol show hostnames``: entries separated by commas, each a name with any number of bracketed
lists of numbers and ranges; leading zeros set the width.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

MAX_HOSTS = 262_144
"""Limit of an expansion, larger than any cluster: a longer list is damaged."""

MAX_NAME = 255
"""Limit of the characters of a name outside brackets; bounds the memory of an expansion."""

_NONE_WORDS = frozenset({"", "none assigned", "none", "(null)", "unknown", "n/a", "no_val"})
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_PLAIN = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME}}}")
_BRACKETS = re.compile(r"\[[^\]]*\]")


def is_none(text: str) -> bool:
    """Return whether the text means that no node is assigned."""
    return text.strip().lower() in _NONE_WORDS


def expand(text: str, *, limit: int = MAX_HOSTS) -> list[str]:
    """Return the node names in the order of ``text``, without duplicates. ``None assigned`` is an empty list.

    Raises ``ValueError`` for unbalanced brackets, an invalid range, or more than ``limit`` names.
    """
    clean = text.strip()
    if is_none(clean):
        return []
    if _PLAIN.fullmatch(clean):  # most jobs have one node
        return [clean]
    count(clean, limit=limit)
    names: dict[str, None] = {}
    for entry in _entries(clean):
        parts = [_choices(part, limit) if inside else [part] for part, inside in _parts(entry)]
        names.update(dict.fromkeys(map("".join, itertools.product(*parts))))
    return list(names)


def count(text: str, *, limit: int = MAX_HOSTS) -> int:
    """Return the number of names, duplicates included, without expanding ``text``. Raises as ``expand`` does."""
    clean = text.strip()
    if is_none(clean):
        return 0
    total = 0
    for entry in _entries(clean):
        size = 1
        for part, inside in _parts(entry):
            size *= sum(last - first + 1 for first, last, _ in _bounds(part, limit)) if inside else 1
        total += size
    if total > limit:
        raise ValueError(f"{_shorten(text)!r} names more than {limit:,} nodes")
    return total


def _entries(text: str) -> Iterator[str]:
    if any(character.isspace() or not character.isprintable() for character in text):
        raise ValueError(f"{_shorten(text)!r} is not a list of nodes")
    depth, start = 0, 0
    for position, character in enumerate(f"{text},"):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1) or (depth and position == len(text)):
            raise ValueError(f"{_shorten(text)!r} has unbalanced brackets")
        if character == "," and depth == 0:
            if position == start:
                raise ValueError(f"{_shorten(text)!r} has an empty name")
            if len(_BRACKETS.sub("[]", text[start:position])) > MAX_NAME:
                raise ValueError(f"{_shorten(text)!r} has a name of more than {MAX_NAME} characters")
            yield text[start:position]
            start = position + 1


def _parts(entry: str) -> Iterator[tuple[str, bool]]:
    for index, piece in enumerate(re.split(r"\[([^\]]*)\]", entry)):
        if index % 2 or piece:
            yield piece, bool(index % 2)


def _bounds(inside: str, limit: int) -> Iterator[tuple[int, int, int]]:
    """Yield the first number, last number and width of each range of a bracketed list."""
    for item in inside.split(","):
        match = _RANGE.fullmatch(item)
        if match is None or len(item) > 40:
            raise ValueError(f"{_shorten(item)!r} is not a number or a range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{item!r} is a descending range")
        if last - first >= limit:
            raise ValueError(f"{item!r} names more than {limit:,} nodes")
        yield first, last, len(match[1])


def _choices(inside: str, limit: int) -> list[str]:
    return [str(n).zfill(width) for first, last, width in _bounds(inside, limit) for n in range(first, last + 1)]


def compress_numbers(numbers: Iterable[str]) -> str:
    """Return ``1,2,3,7`` as ``1-3,7``; leading zeros are kept."""
    return ",".join(_ranges(numbers))


def _ranges(numbers: Iterable[str]) -> Iterator[str]:
    # 1 and 01 are different names, so a range crosses widths only without leading zeros (9-10).
    run: list[str] = []
    for text in sorted(numbers, key=lambda n: (len(n), n)):
        if run and _follows(run[-1], text):
            run.append(text)
            continue
        if run:
            yield _range(run)
        run = [text]
    if run:
        yield _range(run)


def _follows(before: str, text: str) -> bool:
    padded = before.startswith("0") and len(before) > 1
    return text == str(int(before) + 1).zfill(len(before) if padded else 1)


def _range(run: list[str]) -> str:
    return run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}"


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
