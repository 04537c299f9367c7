"""The index page of past reports."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from slurm_affinode.report.format import NBSP
from slurm_affinode.report.index import IndexEntry, render_index

START = datetime(2026, 11, 1, tzinfo=UTC)
TOTAL = {
    "gpu_hours_allocated": 100.0, "gpu_hours_measured": 90.0, "gpu_hours_idle": 45.0, "gpu_hours_low": 5.0,
    "gpu_hours_busy": 40.0, "gpu_hours_unknown": 10.0, "idle_cost": 90.0,
}  # fmt: skip


def entry(kind: str, label: str, day: int, length: int, **changes: float | None) -> IndexEntry:
    since = START + timedelta(days=day)
    total = {**TOTAL, **changes}
    return IndexEntry(kind, label, since, since + timedelta(days=length), f"{kind}/{label}/report.html", total)


def test_reports_are_listed_by_kind_the_newest_first() -> None:
    """Days, weeks, months."""
    html = render_index(
        [entry("week", "2026-W44", 0, 7), entry("day", "2026-11-01", 0, 1), entry("day", "2026-11-02", 1, 1)]
    )
    places = [html.index(f'href="{p}/report.html"') for p in ("day/2026-11-02", "day/2026-11-01", "week/2026-W44")]
    assert places == sorted(places)
    assert f"45{NBSP}%" in html, "of the allocated hours, as on the pages of the reports"


def test_without_a_report_the_page_says_so() -> None:
    """No empty table."""
    html = render_index([])
    assert "There is no report yet." in html
    assert "<table" not in html


def test_days_make_a_chart_once_there_are_two() -> None:
    """One bar alone is no trend."""
    one = render_index([entry("day", "a", 0, 1)])
    two = render_index([entry("day", "a", 0, 1), entry("day", "b", 1, 1)])
    assert "fig-trend" not in one
    assert "fig-trend" in two


def test_a_report_without_measurement_is_unknown_not_idle_free() -> None:
    """Nothing measured, nothing known."""
    html = render_index([entry("day", "a", 0, 1, gpu_hours_measured=0.0, gpu_hours_idle=0.0, idle_cost=None)])
    assert '<td class="number">unknown</td>' in html
    assert "Idle cost" not in html


def test_a_hostile_label_or_path_stays_inert() -> None:
    """Links are encoded, labels escaped; an unknown kind gets its own heading."""
    bad = IndexEntry("<x>", "<script>", START, START, 'a b"/<c>/report.html', {})
    html = render_index([bad], title="<t>")
    assert "<script>&" not in html
    assert 'href="a%20b%22/%3Cc%3E/report.html"' in html
    assert "&lt;script&gt;" in html
