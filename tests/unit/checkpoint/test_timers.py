"""Timers that CRIU would disarm are changed in the dump."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_affinode.checkpoint import timers
from slurm_affinode.checkpoint.criu_images import BadImage, encoded, framed, records

HEADER = b"CRIUFILE"
REGULAR = framed(encoded(1, 1) + encoded(2, 7) + encoded(3, encoded(1, 7)))


def timer(ticks: int, left: tuple[int, int], interval: tuple[int, int], more: bytes = b"") -> bytes:
    """Return a timerfd of CRIU's file table."""
    values = enumerate((9, 0, b"", 1, ticks, 0, *left, *interval), start=1)
    return framed(encoded(1, 17) + encoded(2, 9) + encoded(12, b"".join(encoded(*one) for one in values)) + more)


def rearmed(directory: Path, *entries: bytes) -> bytes:
    """Return the file table after the change, without its header."""
    (directory / "files.img").write_bytes(HEADER + b"".join(entries))
    fd = os.open(directory, os.O_RDONLY)
    try:
        timers.rearm(fd, ())
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


# --- alarms


def core(*timers: tuple[int, int, int, int]) -> bytes:
    """Return a process with these interval timers (interval and time left, in s and us), and a timer of POSIX."""
    parts = [
        encoded(kind, b"".join(encoded(*one) for one in enumerate(timer, 1))) for kind, timer in enumerate(timers, 1)
    ]
    task = encoded(1, 1) + encoded(7, b"".join(parts) + encoded(4, b"\x08\x01")) + encoded(6, b"name")
    return framed(encoded(1, 2) + encoded(3, task) + encoded(5, b""))


def changed_core(directory: Path, entry: bytes) -> bytes:
    """Return the entry of process 7 after the change."""
    (directory / "core-7.img").write_bytes(HEADER + entry)
    (directory / "files.img").write_bytes(HEADER)
    fd = os.open(directory, os.O_RDONLY)
    try:
        timers.rearm(fd, (7,))
    finally:
        os.close(fd)
    return (directory / "core-7.img").read_bytes().removeprefix(HEADER)


OFF, PERIODIC = (0, 0, 0, 0), (0, 50_000, 0, 20_000)


@pytest.mark.parametrize("alarm", [(0, 0, 60, 0), (0, 0, 0, 1), (0, 0, 1 << 33, 999_999)])
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_alarm_gets_an_interval_that_never_passes(tmp_path: Path, kind: int, alarm: tuple[int, int, int, int]) -> None:
    before, after = [OFF, PERIODIC, OFF], [OFF, PERIODIC, OFF]
    before[kind], after[kind] = alarm, (2**30, 0, *alarm[2:])
    assert changed_core(tmp_path, core(*before)) == core(*after)


@pytest.mark.parametrize(
    "entry",
    [core(OFF, OFF, OFF), core(PERIODIC, (3, 0, 0, 0), OFF), framed(encoded(1, 2)), framed(encoded(3, b"\x08\x06"))],
)
def test_processes_without_alarm_are_unchanged(tmp_path: Path, entry: bytes) -> None:
    """A timer that has expired and is periodic, too: CRIU starts its interval again."""
    assert changed_core(tmp_path, entry) == entry


def test_process_without_a_timer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadImage, match="interval timer 3 is missing"):
        changed_core(tmp_path, core(OFF, OFF))
