"""Releases of Slurm and munge with known security holes that matter here: a dated table with sources.

The table is ``reports/known-holes.toml``. A version tells only what its numbers tell: a release line for which no fixed
release is known is unknown, and so is a program whose fix distributions ship under an older number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from slurm_affinode.base.resources import asset_dir
from slurm_affinode.base.toml_schema import parsed

_FILE = "known-holes.toml"
_VERSION = re.compile(r"\d{1,4}\.\d{1,4}\.\d{1,4}", re.ASCII)


class HoleFinding(Enum):
    """Whether a release has a hole."""

    FIXED = "fixed"
    AFFECTED = "affected"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Hole:
    """One row of the table."""

    program: str
    date: str
    name: str
    about: str
    fixed: tuple[str, ...]
    """The first release of each line with the fix."""
    source: str
    backported: bool = False

    def verdict(self, version: str) -> HoleFinding:
        """Return whether a release has the hole. ``version`` has the form of those in ``fixed``."""
        lines = {release[:-1]: release for release in map(_numbers, self.fixed)}
        numbers = _numbers(version)
        line = numbers[:-1]
        if line in lines:
            if numbers >= lines[line]:
                return HoleFinding.FIXED
            return HoleFinding.UNKNOWN if self.backported else HoleFinding.AFFECTED
        return HoleFinding.FIXED if line > max(lines) else HoleFinding.UNKNOWN


@dataclass(frozen=True, slots=True)
class HoleTable:
    """The table and its date."""

    as_of: str
    holes: tuple[Hole, ...]

    def of(self, program: str, version: str) -> Sequence[tuple[Hole, HoleFinding]]:
        """Return the holes that a release of a program has, or may have."""
        judged = [(hole, hole.verdict(version)) for hole in self.holes if hole.program == program]
        return [(hole, verdict) for hole, verdict in judged if verdict is not HoleFinding.FIXED]


def version_in(text: str) -> str:
    """Return ``0.5.16`` from ``munge-0.5.16 (2024-03-15)``; empty if there is none."""
    match = _VERSION.search(text)
    return "" if match is None else match[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def load() -> HoleTable:
    """Read the table."""
    path = asset_dir("reports") / _FILE
    data = parsed(path.read_text(encoding="utf-8"), where=str(path))
    return HoleTable(data["as_of"], tuple(Hole(**{**row, "fixed": tuple(row["fixed"])}) for row in data["hole"]))
