"""The index page of archived reports."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from slurm_affinode.report.archive_index import IndexEntry, render_index
from slurm_affinode.report.format import NBSP

START = datetime(2026, 11, 1, tzinfo=UTC)
TOTAL = {
    "gpu_hours_allocated": 100.0, "gpu_hours_measured": 90.0, "gpu_hours_idle": 45.0, "gpu_hours_low": 5.0,
    "gpu_hours_busy": 40.0, "gpu_hours_unknown": 10.0, "idle_cost": 90.0,
}  # fmt: skip


def entry(kind: str, label: str, day: int, length: int, **changes: float | None) -> IndexEntry:
    since = START + timedelta(days=day)
    total = {**TOTAL, **changes}
    return IndexEntry(kind, label, since, since + timedelta(days=length), f"{kind}/{label}/report.html", total)


def test_reports_are_listed_by_kind_newest_first() -> None:
    """The kinds are day, week and month."""
    html = render_index(
        [entry("week", "2026-W44", 0, 7), entry("day", "2026-11-01", 0, 1), entry("day", "2026-11-02", 1, 1)]
    )
    places = [html.index(f'href="{p}/report.html"') for p in ("day/2026-11-02", "day/2026-11-01", "week/2026-W44")]
    assert places == sorted(places)
    assert f"45{NBSP}%" in html, "of the allocated hours, as on the pages of the reports"


def test_empty_index_has_a_note_and_no_table() -> None:
    html = render_index([])
    assert "There is no report yet." in html
    assert "<table" not in html


def test_trend_chart_needs_two_days() -> None:
    item = render_index([entry("day", "a", 0, 1)])
    two = render_index([entry("day", "a", 0, 1), entry("day", "b", 1, 1)])
    assert "fig-trend" not in item
    assert "fig-trend" in two


def test_report_without_measurements_shows_unknown_idle_time() -> None:
    html = render_index([entry("day", "a", 0, 1, gpu_hours_measured=0.0, gpu_hours_idle=0.0, idle_cost=None)])
    assert '<td class="number">unknown</td>' in html
    assert "Idle cost" not in html


def test_hostile_labels_and_paths_are_escaped() -> None:
    """Links are URL-encoded and labels escaped; an unknown kind gets its own heading."""
    bad = IndexEntry("<x>", "<script>", START, START, 'a b"/<c>/report.html', {})
    html = render_index([bad], title="<t>")
    assert "<script>&" not in html
    assert 'href="a%20b%22/%3Cc%3E/report.html"' in html
    assert "&lt;script&gt;" in html


def test_rows_of_single_clusters_are_hidden_until_chosen() -> None:
    """Without a script, the page lists each report once; a single cluster needs no choice."""
    parts = {name: {**TOTAL, "gpu_hours_idle": idle} for name, idle in (("alpha", 30.0), ("<b>", 15.0))}
    html = render_index([replace(entry("day", "2026-11-01", 0, 1), clusters=parts)])
    assert '<tr data-cluster="alpha" hidden>' in html
    assert '<tr data-cluster="&lt;b&gt;" hidden>' in html
    assert html.count("<tr>") == 2  # the head and the report
    assert "<option>alpha</option>" in html
    single = render_index([replace(entry("day", "2026-11-01", 0, 1), clusters={"alpha": TOTAL})])
    assert "index-cluster" not in single.partition("<script>")[0]
    assert "data-cluster" not in single.partition("<script>")[0]
