"""Charts: well-formed, accessible, explicit about unknown values."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from slurm_affinode.base import times
from slurm_affinode.report import charts
from slurm_affinode.report.charts import POINT, Bar, Series, Words, time_ticks, value_axis

WORDS = Words("chart", "Title <b>", "What it & shows.", "How <i>to</i> read.")
HOSTILE = '"><script>alert(1)</script>'
START = datetime(2026, 11, 1, tzinfo=UTC)
ZONE = ZoneInfo("America/St_Johns")


def parse(markup: Markup) -> ET.Element:
    """Parse the chart as XML."""
    return ET.fromstring(str(markup))  # noqa: S314 - our own output


def rects(root: ET.Element, fill: str) -> list[dict[str, float]]:
    """Return position and size of the rectangles with this fill, in percent or pixels."""
    return [
        {k: float(r.get(k, "0").rstrip("%")) for k in ("x", "y", "width", "height")}
        for r in root.iter("rect")
        if r.get("class") == f"f-{fill}" and r.get("x") is not None
    ]


def points(*marks: tuple[object, ...]) -> pl.DataFrame:
    """Return marks of a scatter chart; fill, size and label may be left out."""
    usual = (None, None, "1", 0.2, "")
    return pl.DataFrame([(*mark, *usual[len(mark) :]) for mark in marks], schema=POINT, orient="row", strict=False)


def every_figure() -> dict[str, Markup]:
    """Return one figure of each kind, with hostile text for every label."""
    starts = [START + timedelta(hours=i) for i in range(3)]
    series = [Series(HOSTILE, [1.0, None, 0.0], "busy"), Series("idle", [1.0, 2.0, 0.5], "idle")]
    return {
        "stacked_time": charts.stacked_time(WORDS, starts, 3600, series, unit=HOSTILE, note=HOSTILE),
        "stacked_bars": charts.stacked_bars(WORDS, [Bar(HOSTILE, HOSTILE, [1.0, None])], series, unit="h"),
        "histogram": charts.histogram(WORDS, [HOSTILE, "b", "c"], series, unit="%", x_label=HOSTILE),
        "lines": charts.lines(WORDS, [0.0, 1.0, 2.0], series, unit="%", x_label=HOSTILE),
        "scatter": charts.scatter(WORDS, points((1, 2, "idle", 0.5, HOSTILE)), x_label=HOSTILE, y_label=HOSTILE),
        "density": charts.scatter(WORDS, points(*((i, i) for i in range(700))), x_label="x", y_label="y", note="n"),
        "empty": charts.empty(WORDS, HOSTILE),
    }


@pytest.mark.parametrize("kind", list(every_figure()))
def test_chart_is_well_formed_and_escapes_labels(kind: str) -> None:
    root = parse(every_figure()[kind])
    assert root.tag == "figure"
    assert not [e for e in root.iter() if e.tag in ("script", "b", "i")]


@pytest.mark.parametrize(("bars", "label", "x"), [(2, "01:00", 50.0), (8, "01:00", 18.75)])
def test_time_labels_are_centered_under_bars_if_each_names_one(bars: int, label: str, x: float) -> None:
    """With two bars of an hour there is a label every quarter of an hour, placed at its time."""
    starts = [START + timedelta(hours=i) for i in range(bars)]
    root = parse(charts.stacked_time(WORDS, starts, 3600, [Series("busy", [1.0] * bars, "busy")], unit="GPUs"))
    (at,) = [e.get("x") for e in root.iter("text") if e.text == label]
    assert float((at or "").rstrip("%")) == pytest.approx(x)


@pytest.mark.parametrize("kind", ["stacked_time", "histogram", "lines", "scatter", "density"])
def test_chart_has_accessible_name_description_and_table(kind: str) -> None:
    """Screen readers use these instead of the chart."""
    root = parse(every_figure()[kind])
    picture = next(e for e in root.iter("svg") if e.get("role") == "img")
    names = {e.get("id"): e.text for e in picture.iter() if e.get("id")}
    ids = str(picture.get("aria-labelledby")).split()
    assert [names[i] for i in ids] == [WORDS.title, WORDS.summary]
    table = root.find(".//table")
    assert table is not None
    assert all(th.get("scope") for th in table.iter("th"))
    assert table.find("caption") is not None


def test_bars_have_accessible_labels() -> None:
    """Each bar is a list item with a label, a note and a named image; unknown parts do not read as 0."""
    root = parse(every_figure()["stacked_bars"])
    meter = next(e for e in root.iter("svg") if e.get("class") == "meter")
    assert meter.get("role") == "img"
    assert meter.get("aria-label") == f"{HOSTILE}: {HOSTILE} 1"
    cells = [td.text for row in root.iter("tbody") for td in row.iter("td")]
    assert cells == ["1", "unknown"]


@pytest.mark.parametrize("kind", sorted(every_figure().keys() - {"empty"}))
def test_column_headers_of_data_tables_are_not_empty(kind: str) -> None:
    """The corner cell above the row headers is a plain cell, since screen readers announce empty headers."""
    headings = [th for th in parse(every_figure()[kind]).iter("th") if th.get("scope") == "col"]
    assert headings
    assert all(th.text for th in headings)


def test_stacked_bars_touch_and_share_one_scale() -> None:
    starts = [START + timedelta(hours=i) for i in range(4)]
    series = [Series("busy", [1, 2, 3, 4], "busy"), Series("idle", [3, 2, 1, 0], "idle")]
    root = parse(charts.stacked_time(WORDS, starts, 3600, series, unit="GPUs"))
    busy, idle = rects(root, "busy"), rects(root, "idle")
    assert [b["height"] for b in busy] == [50, 100, 150, 200]
    assert [i["height"] for i in idle] == [150, 100, 50], "nothing is drawn for 0"
    for low, high in zip(busy, idle, strict=False):
        assert high["y"] + high["height"] == pytest.approx(low["y"])
    assert all(r["x"] >= 0 and r["x"] + r["width"] <= 100 for r in busy)


def test_many_bars_are_drawn_without_gaps() -> None:
    """The bars of a hundred hours form an area."""
    starts = [START + timedelta(hours=i) for i in range(100)]
    root = parse(charts.stacked_time(WORDS, starts, 3600, [Series("busy", [1.0] * 100, "busy")], unit="GPUs"))
    assert [r["width"] for r in rects(root, "busy")] == [1.0] * 100
    assert any(g.get("class") == "dense" for g in root.iter("g"))


def test_chart_without_data_shows_a_note() -> None:
    """Bars of height 0 would look like a measurement."""
    markup = charts.histogram(WORDS, ["a"], [Series("jobs", [None], "1")], unit="%", x_label="x")
    assert "Nothing was measured" in markup
    assert charts.stacked_bars(WORDS, [], [], unit="h").count("Nothing to show") == 1
    assert "Too few points" in charts.lines(WORDS, [1.0], [], unit="", x_label="x")
    assert "Nothing was measured" in charts.scatter(WORDS, points(), x_label="x", y_label="y")
    assert "Nothing happened" in charts.stacked_time(WORDS, [], 60, [], unit="GPUs")


def test_line_is_interrupted_at_unknown_values() -> None:
    series = [Series("a", [0.0, None, 1.0, 1.0], "1")]
    root = parse(charts.lines(WORDS, [0, 1, 2, 3], series, unit="%", x_label="x"))
    path = next(root.iter("path"))
    assert str(path.get("d")).count("M") == 2


def test_many_points_are_drawn_as_density_grid() -> None:
    """Each cell gives its number of points; none is lost."""
    marks = points(*((i % 10, i % 7, "idle") for i in range(5000)))
    root = parse(charts.scatter(WORDS, marks, x_label="x", y_label="y", thing="jobs"))
    cells = [t.text or "" for g in root.iter("g") if str(g.get("class")).startswith("o") for t in g.iter("title")]
    assert sum(int(t.split()[0].replace(",", "")) for t in cells) == 5000
    assert "stronger the color" in "".join(root.itertext())


def test_scatter_table_counts_every_point() -> None:
    """Points beyond the axis are counted at its edge."""
    marks = points((150, 5), (0, 0), (50, 2))
    root = parse(charts.scatter(WORDS, marks, x_label="x", y_label="y", x_max=100))
    assert sum(int(td.text or "0") for td in root.iter("td")) == 3
    assert all(float(str(c.get("cx")).rstrip("%")) <= 100 for c in root.iter("circle"))


def test_timeline_strip_merges_equal_neighbors() -> None:
    """A job that is always idle is one rectangle over the full width."""
    root = parse(charts.strip(HOSTILE, [[(1.0, "idle")]] * 48))
    assert [r["width"] for r in rects(root, "idle")] == [100.1]
    assert root.get("aria-label") == HOSTILE
    assert charts.strip("nothing", []) == ""


def test_split_and_meter_show_shares() -> None:
    """Widths are shares of the total; without data nothing is drawn."""
    root = parse(
        charts.split(WORDS, [Series("a", [1.0], "busy"), Series("b", [3.0], "idle"), Series("c", [None], "low")])
    )
    assert [r["width"] for r in rects(root, "busy") + rects(root, "idle")] == [25, 75]
    assert not rects(root, "low")
    assert charts.split(WORDS, [Series("a", [0.0], "busy")]) == ""
    assert [r["width"] for r in rects(parse(charts.meter("m", [(2.0, "busy")], 8.0)), "busy")] == [25]
    assert charts.meter("m", [], 0.0) == ""


@given(st.floats(min_value=1e-6, max_value=1e12))
def test_axis_covers_largest_value_with_few_distinct_ticks(largest: float) -> None:
    axis = value_axis(largest)
    assert axis.top >= largest * (1 - 1e-9)
    assert axis.top <= 2.6 * largest
    assert 2 <= len(axis.ticks) <= 6
    labels = [axis.label(t) for t in axis.ticks]
    assert len(set(labels)) == len(labels)


def test_axis_without_values_has_ticks() -> None:
    assert value_axis(0).ticks == (0.0, 1.0)
    assert value_axis(float("nan")).ticks == (0.0, 1.0)


@given(
    st.datetimes(min_value=datetime(2000, 1, 1), max_value=datetime(2100, 1, 1)),  # noqa: DTZ001 - made aware below
    st.floats(min_value=0.02, max_value=20_000),
)
def test_time_ticks_are_few_ordered_and_within_the_interval(start: datetime, span_h: float) -> None:
    """Intervals range from a minute to years."""
    since = start.replace(tzinfo=UTC)
    until = since + timedelta(hours=span_h)
    ticks = time_ticks(since, until, ZONE)
    assert 1 <= len(ticks) <= 10
    assert [t.time for t in ticks] == sorted({t.time for t in ticks})
    assert all(since <= t.time < until for t in ticks)
    assert any(t.major for t in ticks)


@pytest.mark.parametrize(
    ("hours", "labels"),
    [
        (122 / 3600, ["1 Nov", "00:00:30", "00:01:00", "00:01:30", "00:02:00"]),
        (6, ["1 Nov", "01:00", "02:00", "03:00", "04:00", "05:00"]),
        (48, ["1 Nov", "06:00", "12:00", "18:00", "2 Nov", "06:00", "12:00", "18:00"]),
        (7 * 24, ["1 Nov", "2 Nov", "3 Nov", "4 Nov", "5 Nov", "6 Nov", "7 Nov"]),
        (30 * 24, ["2 Nov", "9 Nov", "16 Nov", "23 Nov", "30 Nov"]),
        (180 * 24, ["Nov", "Dec", "2027", "Feb", "Mar", "Apr"]),
    ],
)
def test_time_tick_labels_fit_the_interval(hours: int, labels: list[str]) -> None:
    """Clock times within a day, fewer of them with seconds, days within weeks, otherwise months."""
    assert [t.label for t in time_ticks(START, START + timedelta(hours=hours), UTC)] == labels


@pytest.mark.parametrize(
    ("name", "day"),
    [("Europe/Berlin", (2026, 3, 29)), ("America/St_Johns", (2026, 11, 1)), ("Asia/Kolkata", (2026, 11, 1))],
)
def test_time_axis_labels_first_bar_of_a_local_day(name: str, day: tuple[int, int, int]) -> None:
    """The label is at the first hour of the day for any UTC offset, and no bar is outside the axis."""
    zone = ZoneInfo(name)
    begin = datetime(*day, tzinfo=zone)
    starts = times.edges(begin.astimezone(UTC), (begin + timedelta(days=1)).astimezone(UTC), 3600, zone)[:-1]
    series = [Series("idle", [1.0] * len(starts), "idle")]
    chart = parse(charts.stacked_time(WORDS, starts, 3600, series, unit="GPUs", zone=zone))
    labels = {
        text.text: float(text.get("x", "").rstrip("%"))
        for text in chart.iter("text")
        if text.get("x", "").endswith("%")
    }
    bars = rects(chart, "idle")
    first = f"{begin.day} {begin:%b}"
    assert labels[first] == pytest.approx(bars[0]["x"] + bars[0]["width"] / 2, abs=0.1)
    assert min(labels, key=labels.__getitem__) == first
    assert [title.text for title in chart.iter("title")][1].startswith(f"{begin:%Y-%m-%d} 00:00: ")
