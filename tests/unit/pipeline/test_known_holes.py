"""Known security holes of Slurm and munge, by version."""

from __future__ import annotations

from datetime import date
from urllib.parse import urlsplit

import pytest

from slurm_affinode.pipeline import known_holes
from slurm_affinode.pipeline.checks import PROBLEM, SKIPPED
from slurm_affinode.pipeline.doctor import known_hole_checks
from slurm_affinode.pipeline.known_holes import Hole, HoleFinding

HOLE = Hole("Slurm", "2026-09-02", "x", "y", ("25.05.9", "25.11.8", "26.05.4"), "https://example.org")


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("26.05.3", HoleFinding.AFFECTED), ("26.05.4", HoleFinding.FIXED), ("26.05.10", HoleFinding.FIXED),
        ("25.05.8", HoleFinding.AFFECTED), ("25.11.8", HoleFinding.FIXED), ("26.11.0", HoleFinding.FIXED),
        ("24.11.5", HoleFinding.UNKNOWN),
    ],
)  # fmt: skip
def test_release_is_judged_by_its_line(version: str, verdict: HoleFinding) -> None:
    """A line without a known fixed release is unknown; a later line has the fix."""
    assert HOLE.verdict(version) is verdict


def test_release_before_the_fix_is_a_problem_with_its_source() -> None:
    (check,) = known_hole_checks("Slurm", "26.05.4")
    assert check.status == PROBLEM
    assert "task launch credential" in check.detail
    assert "26.05.5" in (check.hint or "")
    assert "https://" in (check.hint or "")
    assert known_hole_checks("Slurm", "26.05.5") == []
    assert known_hole_checks("Slurm", "") == []


def test_line_without_known_fix_is_unknown() -> None:
    """The releases of 25.11 that fix the newest hole are not known."""
    (check,) = known_hole_checks("Slurm", "25.11.8")
    assert check.status == SKIPPED
    assert "task launch credential" in check.detail


def test_older_number_of_a_backported_fix_is_unknown() -> None:
    (check,) = known_hole_checks("munge", "0.5.16")
    assert (check.status, "CVE-2026-25506" in check.detail) == (SKIPPED, True)
    assert known_hole_checks("munge", "0.5.18") == []


@pytest.mark.parametrize(
    ("text", "version"),
    [("munge-0.5.16 (2024-03-15)", "0.5.16"), ("24.11.5-4+deb13u1", "24.11.5"), ("26.05.0-0rc1", "26.05.0"), ("", "")],
)
def test_version_is_found_in_output(text: str, version: str) -> None:
    assert known_holes.version_in(text) == version


def test_each_row_has_a_date_and_a_source() -> None:
    table = known_holes.load()
    dates = [hole.date for hole in table.holes]
    assert max(map(date.fromisoformat, dates)) <= date.fromisoformat(table.as_of)
    assert all(urlsplit(hole.source).scheme == "https" for hole in table.holes)
    assert all(hole.fixed and hole.about for hole in table.holes)
