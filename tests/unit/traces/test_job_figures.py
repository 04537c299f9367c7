"""Figures of a log of jobs, by hand and of the published logs."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import polars as pl
import pytest

from slurm_affinode.traces import claims, job_figures, philly, swf
from slurm_affinode.traces.job_log import JOBS, UNKNOWN, JobLog

HOUR = 3600
ROWS = (
    # submit, run, units, request, user, wait
    (0, HOUR, 1, 2 * HOUR, 1, 0),
    (HOUR, 2 * HOUR, 4, UNKNOWN, 1, UNKNOWN),
    (2 * HOUR, HOUR, 9, HOUR // 2, UNKNOWN, 600),
)


def log(*rows: tuple[int, ...], epoch_s: int | None = None, zone: ZoneInfo | None = None) -> JobLog:
    names = ("submit_s", "run_s", "units", "request_s", "user", "wait_s")
    jobs = pl.DataFrame(list(rows), schema=list(names), orient="row").with_columns(number=0, user_mean_s=0.0)
    return JobLog("log", "GPU", jobs.select(*JOBS).cast(JOBS), (), None, epoch_s, zone)  # type: ignore[arg-type]


def test_figures_by_hand() -> None:
    """Unknown waits, requests and users are left out of their figures, not counted as 0."""
    s = job_figures.analyse(log(*ROWS))
    assert (s.jobs, s.users, s.unit_hours, s.span_s) == (3, 1, 18.0, 2 * HOUR)
    assert (s.run_s.mean, s.run_s.median, s.run_s.max) == (4800.0, 3600.0, 7200.0)
    assert s.run_s.p90 == pytest.approx(6480)
    assert {label: (c.jobs, c.unit_hours, c.run_median_s) for label, c in s.size_classes.items()} == {
        "1": (1, 1.0, 3600.0), "2-4": (1, 8.0, 7200.0), "above-8": (1, 9.0, 3600.0),
    }  # fmt: skip
    assert s.size_classes["above-8"].hours_share == 0.5
    assert s.wait_s is not None
    assert (s.waits_known, s.wait_s.mean, s.wait_s.median) == (2, 300.0, 300.0)
    assert s.requested is not None
    assert (s.requested.jobs, s.requested.requested_unit_hours, s.requested.used_unit_hours) == (2, 6.5, 10.0)
    assert (s.requested.over_request, s.requested.used_share_median, s.requested.jobs_beyond) == (0.65, 1.25, 1)
    assert [round(item.share, 3) for item in s.run_bins] == [0, 0, 0, 1, 0, 0, 0]
    assert (s.since, s.arrivals) == (None, None)


def test_log_without_waits_and_requests_has_none() -> None:
    s = job_figures.analyse(log((0, HOUR, 1, UNKNOWN, UNKNOWN, UNKNOWN)))
    assert (s.users, s.wait_s, s.requested, s.waits_known, s.wait_bins) == (None, None, None, 0, ())


@pytest.mark.parametrize(
    ("zone", "day", "hour"), [(None, "Thu", "23"), (ZoneInfo("Europe/Stockholm"), "Fri", "00")]
)  # fmt: skip
def test_arrivals_are_local_times(zone: ZoneInfo | None, day: str, hour: str) -> None:
    """1970-01-01 was a Thursday; 23:30 UTC is 00:30 of the next day in Stockholm."""
    s = job_figures.analyse(log((0, HOUR, 1, 1, 1, 1), epoch_s=23 * HOUR + 1800, zone=zone))
    assert s.since == datetime(1970, 1, 1, 23, 30, tzinfo=UTC)
    assert s.arrivals is not None
    assert s.arrivals.zone == (None if zone is None else "Europe/Stockholm")
    assert (s.arrivals.weekday[day], s.arrivals.hour[hour], s.arrivals.busiest_hour_share) == (1, 1, 1.0)
    assert (sum(s.arrivals.weekday.values()), sum(s.arrivals.hour.values())) == (1, 1)


def test_published_philly_jobs(shared_data: Path) -> None:
    s = job_figures.analyse(philly.read(shared_data / "philly" / "philly_pollux.csv.gz"))
    assert s.run_s.mean == pytest.approx(13_135.9, abs=0.05)
    assert s.run_s.median == 1144
    assert s.unit_hours == pytest.approx(978_078.5, abs=0.05)
    shares = {label: (c.job_share * 100, c.hours_share * 100) for label, c in s.size_classes.items()}
    assert {label: (round(jobs, 1), round(hours, 1)) for label, (jobs, hours) in shares.items()} == {
        "1": (93.2, 18.1), "2-4": (4.5, 19.9), "5-8": (2.0, 48.4), "above-8": (0.4, 13.6),
    }  # fmt: skip
    assert shares["above-8"][0] == pytest.approx(0.35, abs=0.005)


def test_published_swf_jobs(shared_data: Path) -> None:
    """The recorded mean wait of the machine, and the jobs that exceed their request."""
    s = job_figures.analyse(swf.read(shared_data / "kth-sp2" / "KTH-SP2-1996-2.swf.gz"))
    assert s.wait_s is not None
    assert s.requested is not None
    assert s.arrivals is not None
    assert (round(s.wait_s.mean), s.requested.jobs_beyond, s.arrivals.zone) == (15_385, 475, "Europe/Stockholm")


@pytest.mark.parametrize(
    ("name", "absent"), [("philly", {"completed_share"}), ("philly_log", {"final_states.completed.job_share"})]
)
def test_philly_claims_refer_to_known_figures_and_sources(name: str, absent: set[str]) -> None:
    """Every claim names a figure, or one that these rows cannot have; without it the verdict is unknown."""
    table = claims.load(name)
    s = job_figures.analyse(log(*ROWS))
    figures = claims.flat(s.as_dict())
    assert {entry["measure"] for entry in table["claim"]} - absent <= set(figures)
    assert {entry["source"] for entry in table["claim"]} == set(table["sources"])
    assert {claim.verdict for claim in claims.judge(table, {})} == {claims.UNKNOWN}
