"""Times in tables: all formats, and clock changes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

EIGHT = datetime(2026, 11, 1, 8, tzinfo=UTC)
Reader = Callable[..., Any]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1793520000", 0), ("1793520000.5", 0.5), ("1793520000500", 0.5), ("1793520000500000", 0.5),
        ("1793520000500000000", 0.5), ("2026-11-01T08:00:00Z", 0), ("2026-11-01 09:00:01+01:00", 1),
        ("2026-11-01 03:00:00.250-0500", 0.25), ("2026-11-01T08:00", 0), ("2026/11/01 08:00:00.123", 0.123),
        ("2026-11-01T08:00:00,5", 0.5), ("2026-11-01 08:00:00 UTC", 0), ("2026-11-01", -28800), ("1.79352e9", 0),
    ],
)  # fmt: skip
def test_times_in_every_format_are_read(read: Reader, tmp_path: Path, text: str, seconds: float) -> None:
    """Epoch numbers in any unit, ISO 8601 with and without zone, and the format of nvidia-smi."""
    path = tmp_path / "gpu01.csv"
    path.write_text(f'time;uuid;util_pct\n"{text}";GPU-1;1\n')
    assert read(path).rows[0]["time"] == EIGHT + timedelta(seconds=seconds)


def test_clock_going_back_is_detected_by_order(read: Reader, tmp_path: Path) -> None:
    """02:30 occurs twice on 25 October in Oslo: the second one comes after the clock has gone back."""
    path = tmp_path / "gpu01.csv"
    local = ["01:30:00", "02:00:00", "02:30:00", "02:00:00", "02:30:00", "03:00:00"]
    rows = "".join(f"2026-10-25 {clock},GPU-{gpu},{gpu}\n" for clock in local for gpu in (1, 2))
    path.write_text("time,uuid,util_pct\n" + rows)
    result = read(path, zone="Europe/Oslo", node="gpu01")
    begin = datetime(2026, 10, 24, 23, 30, tzinfo=UTC)
    times = [row["time"] for row in result.rows if row["uuid"] == "GPU-1"]
    assert times == [begin + timedelta(minutes=30 * n) for n in range(6)]
    assert sum(result.notes.decisions.values()) == 8


@pytest.mark.parametrize(
    ("before", "begin"), [((), 1), (("01:58:00",), 0), (("01:30:00",), 1)], ids=["new", "continues", "after a break"]
)
def test_log_started_after_the_clock_went_back(
    read: Reader, tmp_path: Path, before: tuple[str, ...], begin: int
) -> None:
    """It continues past 03:00 without a gap, so its first hour is the second of the two."""
    path = tmp_path / "gpu01.csv"
    clocks = [*before, *(f"02:{minute:02}:00" for minute in range(0, 60, 2)), "03:00:00"]
    path.write_text("time,uuid,util_pct\n" + "".join(f"2026-10-25 {clock},GPU-1,1\n" for clock in clocks))
    times = [row["time"] for row in read(path, zone="Europe/Oslo").rows]
    assert times[len(before)] == datetime(2026, 10, 25, begin, tzinfo=UTC)
    assert times[-1] == datetime(2026, 10, 25, 2, tzinfo=UTC)


def test_clock_going_back_between_two_blocks(read: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on where the file is split into blocks."""
    monkeypatch.setattr(
        "slurm_affinode.metrics.readers.lines.blocks.__kwdefaults__", {"chunk": 64, "advance": lambda n: None}
    )
    path = tmp_path / "gpu01.csv"
    clocks = [f"02:{minute:02}:00" for minute in range(0, 60, 5)]
    path.write_text("time,uuid,util_pct\n" + "".join(f"2026-10-25 {clock},GPU-1,1\n" for clock in clocks * 2))
    begin = datetime(2026, 10, 25, tzinfo=UTC)
    times = [row["time"] for row in read(path, zone="Europe/Oslo").rows]
    assert times == [begin + timedelta(minutes=5 * n) for n in range(24)]


def test_nonexistent_local_time_is_resolved_and_reported(read: Reader, tmp_path: Path) -> None:
    """02:30 on 29 March in Oslo is read with the UTC offset before the change, as 01:30 UTC."""
    path = tmp_path / "gpu01.csv"
    path.write_text("time,uuid,util_pct\n2026-03-29 02:30:00,GPU-1,1\n")
    result = read(path, zone="Europe/Oslo", node="gpu01")
    assert result.rows[0]["time"] == datetime(2026, 3, 29, 1, 30, tzinfo=UTC)
    assert list(result.notes.decisions.values()) == [1]
