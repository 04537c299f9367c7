"""Times in lines of ``date`` and in names of files."""

from __future__ import annotations

import pytest

from slurm_affinode.metrics.readers.snapshot_times import later, time_from_line, time_from_name


@pytest.mark.parametrize(
    ("line", "text", "ignored"),
    [
        ("Wed Jun 26 02:44:30 2019", "2019-06-26 02:44:30", None),
        ("Wed Jun  5 02:44:30 UTC 2019", "2019-06-05 02:44:30UTC", None),
        ("Fri Nov 28 08:00:00 AM CET 2025", "2025-11-28 08:00:00", "CET"),
        ("Fri Nov 28 12:00:00 AM UTC 2025", "2025-11-28 00:00:00UTC", None),
        ("Fri 28 Nov 2025 01:00:00 PM UTC", "2025-11-28 13:00:00UTC", None),
        ("Fri, 28 Nov 2025 08:00:00 +0100", "2025-11-28 08:00:00+0100", None),
        ("Fri Nov 28 08:00:00 +03 2025", "2025-11-28 08:00:00+03", None),
        ("2025-11-28T08:00:00+01:00", "2025-11-28 08:00:00+01:00", None),
        ("2025-11-28 08:00:00", "2025-11-28 08:00:00", None),
        ("1764316800", "1764316800", None),
        ("Every 2.0s: nvidia-smi      gpu01: Fri Nov 28 08:00:00 2025", "2025-11-28 08:00:00", None),
    ],
)
def test_line_of_date_is_a_time(line: str, text: str, ignored: str | None) -> None:
    """The C and en_US locales, ``-Is``, ``-R``, ``+%s``, and the head of ``watch``."""
    time = time_from_line(line)
    assert time is not None
    assert (time.text, time.ignored_zone) == (text, ignored)


@pytest.mark.parametrize(
    "line", ["", "Fr 28. Nov 08:00:00 CET 2025", "12345", "job 1764316800", "2025-11-28", "08:00:00"]
)
def test_other_line_has_no_time(line: str) -> None:
    """A date alone is none, and neither is a number in a text."""
    assert time_from_line(line) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("smi_gpu01_2026-11-01T08:00:00.txt", "2026-11-01 08:00:00"),
        ("gpu01-20261101_0800.log", "2026-11-01 08:00:00"),
        ("gpu-01-20261101T080005Z.xml", "2026-11-01 08:00:05Z"),
        ("smi.1793520000.txt", "1793520000"),
        ("gpu01_2026-11-01_08-30.txt", "2026-11-01 08:30:00"),
        ("202611010830", "2026-11-01 08:30:00"),
        ("gpu01_2026-11-01.txt", None),
        ("gpu01.txt", None),
        ("2026-11-01T0800_2026-11-02T0800.txt", None),
        ("nvidia-smi-535.129.03.txt", None),
        ("2026-13-01T0800.txt", None),
    ],
)
def test_name_of_a_file_has_a_time_to_the_minute(name: str, text: str | None) -> None:
    """A day alone would put samples at midnight; two times are ambiguous."""
    assert time_from_name(name) == text


def test_time_with_zone_precedes_a_later_line_without() -> None:
    """Otherwise the last line above a snapshot has its time."""
    universal, local = time_from_line("Wed Jun 26 02:44:30 UTC 2019"), time_from_line("Wed Jun 26 04:44:31 2019")
    assert universal is not None
    assert local is not None
    assert later(universal, local) is universal
    assert later(local, universal) is universal
    assert later(local, local) is local
    assert later(None, local) is local
