"""Timers that CRIU would disarm are changed in the dump."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.criu import sessions
from slurm_affinode.checkpoint.image.criu_images import BadImage, encoded, framed, records

HEADER = b"CRIUFILE"
REGULAR = framed(encoded(1, 1) + encoded(2, 7) + encoded(3, encoded(1, 7)))


def timer(ticks: int, left: tuple[int, int], interval: tuple[int, int], more: bytes = b"") -> bytes:
    """Return a timerfd of CRIU's file table."""
    values = enumerate((9, 0, b"", 1, ticks, 0, *left, *interval), start=1)
    return framed(encoded(1, 17) + encoded(2, 9) + encoded(12, b"".join(encoded(*value) for value in values)) + more)


def rearmed(directory: Path, *entries: bytes) -> bytes:
    """Return the file table after the change, without its header."""
    (directory / "files.img").write_bytes(HEADER + b"".join(entries))
    fd = os.open(directory, os.O_RDONLY)
    try:
        sessions.rearm(fd)
    finally:
        os.close(fd)
    data = (directory / "files.img").read_bytes()
    assert data.startswith(HEADER)
    assert len(list(records(data))) == len(entries)
    return data.removeprefix(HEADER)


@pytest.mark.parametrize("interval", [(0, 1_000_000), (30, 0), (1 << 40, 999_999_999)])
def test_expired_periodic_timer_is_armed_again(tmp_path: Path, interval: tuple[int, int]) -> None:
    """All else of it is kept, the expirations that were not read included, and so are other files."""
    after = rearmed(tmp_path, REGULAR, timer(300, (0, 0), interval), REGULAR)
    assert after == REGULAR + timer(300, (0, 1), interval) + REGULAR


@pytest.mark.parametrize(
    "entry",
    [
        timer(0, (0, 500), (1, 0)), timer(3, (2, 0), (1, 0)), timer(1, (0, 0), (0, 0)),
        timer(0, (0, 0), (1, 0)), REGULAR,
    ],
    ids=["running", "running, unread", "expired, once", "disarmed", "another file"],
)  # fmt: skip
def test_other_timers_are_unchanged(tmp_path: Path, entry: bytes) -> None:
    assert rearmed(tmp_path, entry) == entry


@pytest.mark.parametrize("more", [encoded(12, b""), encoded(12, 5)], ids=["two", "a number"])
def test_timer_that_is_described_twice_is_rejected(tmp_path: Path, more: bytes) -> None:
    with pytest.raises(BadImage, match="field 12 is there twice, or is no message"):
        rearmed(tmp_path, timer(1, (0, 0), (1, 0), more))


def test_timer_without_fields_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="field 7 is missing"):
        rearmed(tmp_path, framed(encoded(12, b"")))
