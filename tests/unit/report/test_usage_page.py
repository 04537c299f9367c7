"""The page of a user or account: own place, switcher of periods, links, escaped names, empty period."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta

from waste_samples import HOSTILE, make_result

from slurm_affinode.analysis.portions import Rank, portions, without_runs
from slurm_affinode.analysis.result import PeriodHours, Trend, WasteResult
from slurm_affinode.report.links import Links
from slurm_affinode.report.pages import render_report
from slurm_affinode.report.usage_page import JOB_ROWS, UsagePage, render

ABOUT = UsagePage("user", "user00", "week", "2026-W45", ("day", "week"))


def part(name: str = "user00", by: str = "user", jobs: int = 300) -> WasteResult:
    return dict(portions(make_result(jobs), by))[name]


def test_place_and_median_are_shown_without_names() -> None:
    html = render(part(), ABOUT, rank=Rank(3, 24, 0.25))
    assert "Place 3 of 24 users by idle GPU-hours" in html
    assert "the median of all users is 25" in html
    assert not re.search(r"user(?!00)\d\d", html)
    assert "Place" not in render(part(), ABOUT)


def test_switcher_names_the_current_period() -> None:
    html = render(part(), ABOUT)
    assert re.findall(r'<a href="(\w+)\.html"( aria-current="page")?>(\w+)', html) == [
        ("day", "", "Day"), ("week", ' aria-current="page"', "Week"),
    ]  # fmt: skip


def test_own_trend_has_the_allocated_hours() -> None:
    """The capacity of the cluster is not a user's."""
    portion = part()
    total = dict.fromkeys(("gpu_hours_allocated", "gpu_hours_busy", "gpu_hours_idle", "gpu_hours_unknown"), 10.0)
    week = timedelta(days=7)
    earlier = PeriodHours("2026-W44", portion.query.since - week, portion.query.since, total)
    html = render(replace(portion, trend=Trend("week", (earlier,))), ABOUT)
    assert "Allocated GPUs and their use" in html
    assert "Capacity" not in html
    assert "2026-W44" in html


def test_jobs_beyond_the_table_are_in_the_file() -> None:
    portion = part(jobs=10_000)
    assert portion.jobs.height > JOB_ROWS
    html = render(portion, ABOUT, csv_name="week-jobs.csv")
    assert "all of them are in week-jobs.csv" in html


def test_period_without_jobs_is_reported() -> None:
    html = render(without_runs(make_result(), "user", "user00"), ABOUT)
    assert "No GPU job ran in this interval." in html
    assert "<table" not in html


def test_account_lists_its_users() -> None:
    portion = part("project00", "account")
    html = render(portion, UsagePage("account", "project00", "week", "2026-W45", ("week",)))
    assert "Users of the account" in html
    assert all(f"<bdi>{name}</bdi>" in html for name in portion.jobs["user"].unique())


def test_hostile_names_and_links_are_escaped() -> None:
    result = make_result(names=HOSTILE)
    for name, portion in portions(result, "user"):
        key = portion.jobs.select("cluster", "job_id", "submit").row(0)
        html = render(portion, replace(ABOUT, name=name), links=Links({key: 'a"><script>x</script>'}))
        assert "<script>alert" not in html
        assert "<script>x" not in html
        assert "<img" not in html


def test_report_links_users_accounts_and_jobs() -> None:
    """In all tables, and in the fields of the GPU map if it has no other target."""
    result = make_result()
    jobs = {key: f"j/{key[1]}.html" for key in result.jobs.select("cluster", "job_id", "submit").head(5).iter_rows()}
    links = Links(jobs, {"user00": "u/user00/index.html"}, {"project00": "a/project00/index.html"})
    html = render_report(result, title="t", top=15, links=links)
    for href in (*jobs.values(), *links.users.values(), *links.accounts.values()):
        assert f'href="{href}"' in html
    plain = render_report(result, title="t", top=15)
    assert not re.search(r'href="(?!#|data:)', plain)
