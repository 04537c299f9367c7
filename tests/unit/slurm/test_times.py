"""Times in any time zone, including ambiguous and nonexistent local times."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.slurm import times

OSLO = ZoneInfo("Europe/Oslo")


def utc(text: str) -> datetime:
    """Return an aware time."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        "2025-05-02T14:09:39+02:00", "2025-05-02T14:09:39+0200", "2025-05-02T12:09:39Z", "1746187779",
        "2025-05-02T07:09:39-05:00", "2025-05-02 12:09:39+00:00", "2025-05-02T12:09:39.5Z",
    ],
)  # fmt: skip
def test_every_form_with_a_time_zone(text: str) -> None:
    """Offsets, Z and epoch seconds give the same time."""
    assert times.parse(text) == utc("2025-05-02T12:09:39")


def test_local_and_unknown_times_are_parsed() -> None:
    """A time without an offset is naive; Unknown and None are no time."""
    assert times.parse("2025-05-02T14:09:39") == datetime(2025, 5, 2, 14, 9, 39)  # noqa: DTZ001 - naive is the point
    assert times.parse("Unknown") is None
    assert times.parse("None") is None
    assert times.normalise("Unknown") is None
    assert times.normalise("1746187779") == "2025-05-02T12:09:39Z"


@pytest.mark.parametrize("text", ["yesterday", "2025-13-01T00:00:00", "12:00", "2025-05-02T25:00:00", "Ystday 12:30"])
def test_invalid_time_is_refused(text: str) -> None:
    """So is the relative format of SLURM_TIME_FORMAT."""
    with pytest.raises(ValueError, match="not a time"):
        times.parse(text)


def test_ambiguous_time_has_two_readings_the_earlier_first() -> None:
    """In Oslo, on 26 October 2025, 02:30 occurred at 00:30 and at 01:30 UTC."""
    local = datetime(2025, 10, 26, 2, 30)  # noqa: DTZ001
    assert times.readings(local, OSLO) == (utc("2025-10-26T00:30:00"), utc("2025-10-26T01:30:00"))
    assert times.exists(local, OSLO)


def test_nonexistent_time_has_two_readings() -> None:
    """In Oslo, 02:30 did not occur on 30 March 2025."""
    local = datetime(2025, 3, 30, 2, 30)  # noqa: DTZ001
    assert times.readings(local, OSLO) == (utc("2025-03-30T01:30:00"), utc("2025-03-30T00:30:00"))
    assert not times.exists(local, OSLO)


def test_elapsed_decides_between_the_readings() -> None:
    """A job that ended at 04:00 after 1.5 hours began at the second 02:30; after 2.5 hours, at the first."""
    start = times.readings(datetime(2025, 10, 26, 2, 30), OSLO)  # noqa: DTZ001
    end = (utc("2025-10-26T03:00:00"),)
    assert times.choose({"start": start, "end": end}, 5400)["start"] == utc("2025-10-26T01:30:00")
    assert times.choose({"start": start, "end": end}, 9000)["start"] == utc("2025-10-26T00:30:00")


def test_without_elapsed_the_earlier_reading_is_taken() -> None:
    """A running job has no end to compare with."""
    start = times.readings(datetime(2025, 10, 26, 2, 30), OSLO)  # noqa: DTZ001
    assert times.choose({"start": start}, None)["start"] == utc("2025-10-26T00:30:00")


def test_order_of_times_decides_between_the_readings() -> None:
    """Submitted at 02:50 and started at 02:10: the clock was set back in between."""
    submit = times.readings(datetime(2025, 10, 26, 2, 50), OSLO)  # noqa: DTZ001
    start = times.readings(datetime(2025, 10, 26, 2, 10), OSLO)  # noqa: DTZ001
    chosen = times.choose({"submit": submit, "start": start}, None)
    assert chosen == {"submit": utc("2025-10-26T00:50:00"), "start": utc("2025-10-26T01:10:00")}


def test_step_does_not_begin_before_its_job() -> None:
    """The reading of the job's start restricts those of its steps."""
    start = times.readings(datetime(2025, 10, 26, 2, 30), OSLO)  # noqa: DTZ001
    assert times.choose({"start": start}, None, not_before=start[1])["start"] == start[1]


@given(
    st.datetimes(datetime(1990, 1, 1), datetime(2060, 1, 1)),  # noqa: DTZ001 - naive is the point
    st.sampled_from(["Europe/Oslo", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe", "UTC"]),
)
def test_readings_are_local_times_of_the_zone(local: datetime, name: str) -> None:
    """Each reading of an existing time is that time in the zone; two readings are at most two hours apart."""
    zone, local = ZoneInfo(name), local.replace(microsecond=0)
    readings = times.readings(local, zone)
    if times.exists(local, zone):
        assert all(item.astimezone(zone).replace(tzinfo=None) == local for item in readings)
    assert abs(readings[-1] - readings[0]) <= timedelta(hours=2)


def test_zone_is_the_given_one_or_that_of_the_machine(tmp_path: Path) -> None:
    """In order: the argument, TZ, /etc/localtime, UTC."""
    assert times.zone_name("Europe/Oslo") == "Europe/Oslo"
    assert times.zone_name(None, env={"TZ": ":America/New_York"}) == "America/New_York"
    localtime = tmp_path / "localtime"
    assert times.zone_name(None, env={}, localtime=localtime) == "UTC"
    target = tmp_path / "zoneinfo" / "Europe" / "Oslo"
    target.parent.mkdir(parents=True)
    target.touch()
    localtime.symlink_to(target)
    assert times.zone_name(None, env={}, localtime=localtime) == "Europe/Oslo"


def test_unknown_zone_is_one_clear_error(tmp_path: Path) -> None:
    """The error has a hint."""
    with pytest.raises(AffinodeError, match="not a time zone") as caught:
        times.zone_name("Mars/Olympus")
    assert "--timezone" in str(caught.value.hint)
    with pytest.raises(AffinodeError, match="does not contain the name"):
        times.zone_name(None, env={}, localtime=tmp_path)


def test_doubt_remains_if_start_and_end_are_in_the_repeated_hour() -> None:
    """Their order and Elapsed fit both hours; a submission in the second one does not."""
    start, end = (times.readings(datetime(2025, 10, 26, 2, minute), OSLO) for minute in (10, 40))  # noqa: DTZ001
    assert times.choose({"start": start, "end": end}, 1800) == {"start": start[0], "end": end[0]}
    assert times.doubt_s({"start": start, "end": end}, 1800) == 3600
    assert times.doubt_s({"start": start, "end": end}, 5400) == 0
    late = (start[1] - timedelta(seconds=5),)
    assert times.doubt_s({"submit": late, "start": start, "end": end}, 1800) == 0
    assert times.doubt_s({"start": start}, 60) == 3600
    assert times.doubt_s({"submit": start, "end": (end[1],)}, None) == 0
