"""The report page: complete, self-contained, safe, explicit about unknown values."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
from datetime import UTC
from html.parser import HTMLParser
from types import ModuleType
from zoneinfo import ZoneInfo

import jinja2
import polars as pl
import pytest

from slurm_affinode.analysis.emissions import EmissionFactor
from slurm_affinode.analysis.result import QualityIssue, StartedWaits, WasteResult
from slurm_affinode.analysis.working_hours import HOURS, WorkingTime
from slurm_affinode.report import headline, method_section, render
from slurm_affinode.report.format import NBSP
from slurm_affinode.report.measures import known_value
from slurm_affinode.report.pages import JOB_ROWS, build_context, render_report

VOID = {"meta", "link", "br", "input", "img"}


class Page(HTMLParser):
    """Elements, texts and nesting of a page."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.raw: dict[str, str] = {}
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("style", "script"):
            self.raw[self.open[-1]] = data
        else:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).replace(NBSP, " ").split())


def render_plain(result: WasteResult, **options: object) -> str:
    settings = {"title": "GPU waste report", "top": 15, **options}
    return render_report(result, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def page(result: WasteResult) -> Page:
    return Page(render_plain(result))


def test_page_is_well_nested_with_unique_ids_and_valid_targets(page: Page) -> None:
    """Every internal link and label has a target."""
    ids = [a["id"] for _, a in page.elements if a.get("id")]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        for name in ("aria-labelledby", "aria-describedby", "for"):
            for target in (attributes.get(name) or "").split():
                assert target in ids, f"{name}={target}"
        href = attributes.get("href") or ""
        if href.startswith("#"):
            assert href[1:] in ids


def test_page_loads_no_external_resources(page: Page) -> None:
    """It also has no inline styles or handlers, which its content security policy would block."""
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert name not in ("style", "srcset", "action"), (tag, name)
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "data"):
                assert (value or "").startswith(("#", "data:,")), (tag, value)
    assert "@import" not in page.raw["style"]
    assert not re.search(r"url\((?!#)", page.raw["style"])


def test_policy_allows_only_the_style_and_script_of_the_page(page: Page) -> None:
    """They are allowed by hash."""
    policy = next(a["content"] for t, a in page.elements if t == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    for tag in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(page.raw[tag].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert [t for t, _ in page.elements if t == "script"] == ["script"]


def test_page_has_every_section(page: Page) -> None:
    for heading in (
        "Idle over time", "Partitions, GPU models and GPUs", "Waste by user, account, QOS and node",
        "Jobs with the most idle time", "Memory held and compute used", "Distribution of idle time", "All jobs",
        "Data quality",
        "Method and definitions",
    ):  # fmt: skip
        assert heading in page.texts
    for word in ("Allocated", "Busy", "Low", "Idle", "Unknown", "Cost of the idle hours", "Energy while idle"):
        assert word in page.texts
    for figure in (
        "over-time",
        "by-partition",
        "by-gpu_model",
        "memory-compute",
        "idle-share",
        "idle-windows",
        "mapping",
    ):
        assert any(a.get("id") == f"fig-{figure}" for _, a in page.elements)


def test_headline_shows_the_totals(page: Page, result: WasteResult) -> None:
    """The numbers are those of the result, rounded."""
    allocated, idle = result.total["gpu_hours_allocated"], result.total["gpu_hours_idle"]
    assert allocated is not None
    assert idle is not None
    capacity, free = result.total["gpu_hours_capacity"], result.total["unallocated_gpu_hours"]
    assert capacity == allocated + (free or 0.0)
    assert f"Of {capacity:,.0f} GPU-hours, {allocated:,.0f} were allocated to 300 job runs." in page.text
    assert f"{idle:,.0f} GPU-hours were idle , {100 * idle / allocated:.0f} % of the allocated" in page.text
    assert f"Capacity {capacity:,.0f} GPU-h" in page.text
    assert f"Not allocated {free:,.0f} GPU-h" in page.text


def test_idle_shares_are_relative_to_allocated_hours(result: WasteResult) -> None:
    """Half of the allocated hours are unknown: a share of the measured hours would be twice as large."""
    half = result.jobs.with_columns(pl.col("gpu_hours_allocated") * 2)
    groups = {name: frame.with_columns(pl.col("gpu_hours_allocated") * 2) for name, frame in result.groups.items()}
    total = {**result.total, "gpu_hours_allocated": 2 * (result.total["gpu_hours_allocated"] or 0.0)}
    context = build_context(dataclasses.replace(result, jobs=half, groups=groups, total=total), title="t", top=5)
    user = result.groups["user"].row(0, named=True)
    expected = f"{user['gpu_hours_idle'] / user['gpu_hours_allocated'] / 2:.6g}"
    table = context.groups[0].table
    assert table is not None
    assert table.columns[3].unit == "of allocated"
    assert table.rows[0][3].sort == expected
    assert "of the measured" not in render_plain(dataclasses.replace(result, total=total)).partition('id="method"')[0]


def test_definitions_are_accessible_without_script(page: Page) -> None:
    """Help is in ``details`` elements; the definitions list every figure."""
    assert page.text.count("Definition") >= 10
    ids = {a.get("id") for _, a in page.elements}
    assert {"def-gpu_hours_idle", "def-idle_fraction", "def-cost", "def-unallocated_gpu_hours"} <= ids


def test_hostile_names_are_shown_as_text(hostile: WasteResult) -> None:
    """A job named ``<script>`` is shown under this name."""
    page = Page(render_plain(hostile, title="<script>alert(9)</script>"))
    assert [t for t, _ in page.elements].count("script") == 1
    assert "img" not in {t for t, _ in page.elements}
    assert "<script>alert(1)</script>" in page.texts
    assert '"><img src=x onerror=alert(2)>' in page.texts
    assert "{{ 7*7 }}" in page.texts
    assert r"a\x1b[31mred" in page.texts
    assert "right[U+202E]to-left" in page.texts
    assert "<script>alert(9)</script>" in page.texts
    assert not any(c in "".join(page.texts) for c in "\u202e\u2066\u200b\x1b\x00\ufeff")


def test_long_name_is_truncated_with_full_name_as_title(hostile: WasteResult) -> None:
    """The title has the name up to a limit."""
    page = Page(render_plain(hostile))
    assert max(len(t) for t in page.texts if t.startswith("xxx")) <= 60
    assert any((a.get("title") or "").startswith("x" * 100) for _, a in page.elements)


def test_unmeasured_figures_are_shown_as_unknown(unmeasured: WasteResult) -> None:
    """Without GPU metrics there are no idle figures."""
    page = Page(render_plain(unmeasured))
    assert "How much of it was idle is unknown" in page.text
    assert "there are no GPU metrics of these jobs" in page.text
    for key in ("gpu_hours_idle", "gpu_hours_busy", "gpu_hours_low", "idle_fraction", "idle_cost", "idle_windows"):
        assert known_value(unmeasured.total, key) is None
    cards = {c.label: c for c in build_context(unmeasured, title="t", top=15).cards}
    assert (cards["Idle"].unknown, cards["Idle"].value) == (True, "unknown")
    assert cards["Busy"].unknown
    assert not cards["Unknown"].unknown
    assert "Cost of the idle hours" not in cards
    assert "No price is known" in page.text


def test_page_without_jobs_explains_empty_sections(samples: ModuleType) -> None:
    page = Page(render_plain(samples.empty_result()))
    assert "No GPU job ran in this interval." in page.text
    assert "There was no job with GPUs." in page.text
    assert "No job had idle GPU time that could be measured." in page.text


def test_page_with_ten_thousand_jobs_is_below_two_megabytes(samples: ModuleType) -> None:
    """The table of jobs is truncated, with a note that names the file with all jobs."""
    html = render_plain(samples.make_result(10_000), csv_name="jobs.csv")
    assert len(html.encode()) < 2_000_000
    page = Page(html)
    assert "The 1,000 job runs with most idle GPU-hours" in page.text
    assert "9,000 more are not shown; all of them are in jobs.csv." in page.text


def test_page_size_limit_holds_with_worst_case_names(samples: ModuleType) -> None:
    """Escaping makes these names grow most."""
    html = render_plain(samples.make_result(10_000, names=('"' * 300, "<&>" * 100)))
    assert len(html.encode()) < 2_000_000
    assert "the option --csv writes all of them to jobs.csv" in html


def test_short_job_table_is_complete(result: WasteResult) -> None:
    """It has no note on omitted rows."""
    context = build_context(result, title="t", top=15)
    assert context.jobs is not None
    assert len(context.jobs.rows) == result.jobs.height < JOB_ROWS
    assert context.jobs.note == ""


def test_worst_jobs_come_first_with_their_timeline(result: WasteResult) -> None:
    """The table has at most ``top`` jobs."""
    context = build_context(result, title="t", top=5)
    assert context.worst is not None
    assert context.worst.rows[0][0].sort == str(result.jobs["job_id"][0])
    assert len(context.worst.rows) == 5
    assert all(row[4].picture for row in context.worst.rows)


def test_table_headers_have_sort_order_and_scope(page: Page) -> None:
    heads = [a for t, a in page.elements if t == "th"]
    assert all(a.get("scope") in ("col", "row") for a in heads)
    assert sum(a.get("aria-sort") == "descending" for a in heads) >= 6


def test_filters_are_shown_on_the_page(result: WasteResult) -> None:
    """A partial report must not be mistaken for a complete one."""
    query = dataclasses.replace(result.query, partitions=("gpu", "<b>"), users=("ann",))
    page = Page(render_plain(dataclasses.replace(result, query=query)))
    assert "Only partition gpu, <b>; user ann" in page.text


def test_models_without_price_are_listed(result: WasteResult) -> None:
    """Costs exclude them."""
    prices = {**result.prices, "NVIDIA L4": None}
    page = Page(render_plain(dataclasses.replace(result, prices=prices)))
    assert "Amounts leave out GPUs without a known price: NVIDIA L4." in page.text


def test_emissions_are_shown_with_their_rule(result: WasteResult) -> None:
    """None without a factor; unknown without power."""
    assert "Emissions while idle" not in render_plain(result)
    factor = EmissionFactor(30.0, "NOR, 2023", 1.2)
    total = {**result.total, "energy_kwh": 2_000.0, "idle_energy_kwh": 500.0}
    page = Page(render_plain(dataclasses.replace(result, total=total, emissions=factor)))
    assert "Emissions while idle 18 kg CO2e of 72 kg CO2e in all" in page.text
    assert "30 g CO2e per kWh (NOR, 2023); PUE 1.2" in page.text
    unknown = {**total, "energy_kwh": None, "idle_energy_kwh": None}
    page = Page(render_plain(dataclasses.replace(result, total=unknown, emissions=factor)))
    assert "Emissions while idle unknown" in page.text


def working(inside: float | None, outside: float | None) -> pl.DataFrame:
    """Return idle hours of 50 GPU-hours in working hours, and of 100 outside of them."""
    rows = [("working", 50.0, 50.0, inside, 0.0, 50.0 - (inside or 0), 0.0),
            ("other", 118.0, 100.0, outside, 0.0, 100.0 - (outside or 0), 0.0)]  # fmt: skip
    return pl.DataFrame(rows, schema=HOURS, orient="row")


@pytest.mark.parametrize(
    ("days", "shown"),
    [
        ((0, 1, 2, 3, 4), "Monday to Friday"), ((0, 1), "Monday, Tuesday"), ((0, 1, 2, 3, 6), "Thursday, Sunday"),
    ],
)  # fmt: skip
def test_idle_time_is_divided_by_working_hours(result: WasteResult, days: tuple[int, ...], shown: str) -> None:
    """The assumption is named; nothing is shown without a division, and without a measurement."""
    query = dataclasses.replace(result.query, working=WorkingTime(days, 480, 1080))
    divided = dataclasses.replace(result, query=query, working_hours=working(10.0, 30.0))
    page = Page(render_plain(divided))
    assert "75 % of the idle GPU-hours (30 GPU-h) were outside of working hours (" in page.text
    assert f"{shown}, 08:00 to 18:00), which are 30 % of the time." in page.text
    assert "20 % were idle in working hours, and 30 % outside of them." in page.text
    for other in (None, working(None, None), working(None, 30.0), working(0.0, 0.0)):
        assert "were outside of working hours" not in render_plain(dataclasses.replace(divided, working_hours=other))


@pytest.mark.parametrize(
    ("idle", "sentence"),
    [
        ([60.0, 20.0, 10.0, 10.0], "One user of 4 accounts for 60 % of the idle time."),
        ([30.0, 30.0, 20.0, 20.0], "Three of 4 users account for 80 % of the idle time."),
    ],
)
def test_concentration_of_waste_is_summarized(result: WasteResult, idle: list[float], sentence: str) -> None:
    """One user if they have at least half of the idle time, otherwise the first three."""
    users = result.groups["user"].head(4).with_columns(gpu_hours_idle=pl.Series(idle))
    total = {**result.total, "gpu_hours_idle": 100.0}
    some = dataclasses.replace(result, total=total, groups={**result.groups, "user": users})
    assert sentence in [f.replace(NBSP, " ") for f in headline.findings(some)]


def test_metrics_that_match_no_job_are_mentioned(unmeasured: WasteResult) -> None:
    """Otherwise the ingested metrics would seem to be missing."""
    quality = dataclasses.replace(unmeasured.quality, samples=7)
    assert "the GPU metrics match none" in headline.answer(dataclasses.replace(unmeasured, quality=quality)).after


def test_main_reason_for_unknown_hours_is_a_finding(result: WasteResult) -> None:
    """It is shown only if many hours are unknown."""
    issue = QualityIssue("unmapped-gpus", "Runs whose GPUs are not known", "", 3, gpu_hours=30.0)
    quality = dataclasses.replace(result.quality, issues=(issue, QualityIssue("no-price", "No price", "", 1, 99.0)))
    for unknown, expected in ((40.0, True), (10.0, False)):
        total = {**result.total, "gpu_hours_allocated": 100.0, "gpu_hours_unknown": unknown}
        findings = headline.findings(dataclasses.replace(result, total=total, quality=quality))
        shown = [f for f in findings if "75 % of the unknown GPU-hours: runs whose GPUs" in f.replace(NBSP, " ")]
        assert bool(shown) == expected


def test_few_jobs_or_no_measurements_give_no_findings(samples: ModuleType, unmeasured: WasteResult) -> None:
    assert headline.findings(unmeasured) == ()
    few = samples.make_result(3)
    assert not [f for f in headline.findings(few) if "account" in f or "Half" in f]


def test_idle_shares_of_other_clusters_name_their_sources(page: Page, unmeasured: WasteResult) -> None:
    """Folded away, and absent where the page has no idle share to compare them with."""
    assert "Idle shares of other clusters" in page.text
    assert page.text.count("Source: ") >= 3
    assert all(re.search(r"\b20\d\d\b", row.source) for row in method_section.published_shares())
    assert "Idle shares of other clusters" not in Page(render_plain(unmeasured)).text


def test_waits_are_known_without_gpu_metrics(unmeasured: WasteResult) -> None:
    waits = StartedWaits(jobs=10, waited=4, gpu_hours=12.0, median_s=600.0, longest_s=7200.0)
    text = headline.consequences(dataclasses.replace(unmeasured, waits=waits))
    assert text.replace(NBSP, " ").startswith("Meanwhile 4 of 10 GPU jobs waited")


def test_returned_hours_and_waits_are_beside_the_answer(result: WasteResult, unmeasured: WasteResult) -> None:
    """Above the figures: what suspensions would have returned, and who waited meanwhile."""
    waits = StartedWaits(jobs=10, waited=4, gpu_hours=12.0, median_s=600.0, longest_s=7200.0)
    page = render_plain(dataclasses.replace(result, waits=waits))
    head = page.partition('<p class="answer">')[2].partition('<dl class="cards">')[0].replace(NBSP, " ")
    assert "Suspending jobs after 15m without activity would have returned at most" in head
    assert "Meanwhile 4 of 10 GPU jobs waited" in head
    assert headline.consequences(unmeasured) == ""


def test_fully_measured_week_mentions_no_unknown_hours(result: WasteResult) -> None:
    total = {**result.total, "gpu_hours_measured": result.total["gpu_hours_allocated"], "gpu_hours_unknown": 0.0}
    answer = headline.answer(dataclasses.replace(result, total=total))
    assert answer.after.partition(".")[0].endswith("% of the allocated")
    assert "unknown" not in answer.after


def test_example_prices_are_not_shown(result: WasteResult) -> None:
    """The page shows no amounts, and says how to set prices."""
    page = Page(render_plain(dataclasses.replace(result, price_note="Amounts use example prices.")))
    assert "EUR" not in page.text
    assert "the site has set no prices" in page.text
    assert "EUR" in Page(render_plain(result)).text


@pytest.mark.parametrize(
    ("lower_s", "upper_s", "label"),
    [
        (0, 300, "<5 min"), (300, 900, "5–15 min"), (900, 3600, "15–60 min"), (3600, 14400, "1–4 h"),
        (86400, None, "≥24 h"), (30, 90, "30–90 s"),
    ],
)  # fmt: skip
def test_idle_window_lengths_have_short_labels(lower_s: float, upper_s: float | None, label: str) -> None:
    """They are next to each other under the bars."""
    from slurm_affinode.report.waste_charts import _window

    assert _window(lower_s, upper_s).replace(NBSP, " ") == label


def test_running_job_is_shown_as_running(result: WasteResult) -> None:
    running = result.jobs.with_columns(end=pl.lit(None, dtype=result.jobs.schema["end"]))
    page = Page(render_plain(dataclasses.replace(result, jobs=running)))
    assert "– running" in page.text


def test_page_shows_local_times_and_names_time_zone_once(result: WasteResult) -> None:
    """This includes the headline, tables, charts and chart data."""
    zone = ZoneInfo("America/St_Johns")
    page = Page(render_plain(dataclasses.replace(result, query=dataclasses.replace(result.query, zone=zone))))
    assert page.text.count("America/St_Johns") == 1
    assert "UTC" not in page.text.partition("Computation")[0]
    assert "2026-10-31 21:30 to 2026-11-07 20:30 (7d)" in page.text
    start = result.jobs["start"][0].astimezone(zone)
    assert f"{start:%Y-%m-%d %H:%M} –" in page.text


def test_undefined_template_variable_is_an_error() -> None:
    """With ``StrictUndefined`` nothing is silently empty."""
    with pytest.raises(jinja2.UndefinedError):
        render.page("report.html.j2", title="t", zone=UTC)


def test_backticks_in_method_text_become_code_elements() -> None:
    """All text is escaped."""
    from slurm_affinode.report.method_section import prose

    assert prose("a `b<` <c>") == "a <code>b&lt;</code> &lt;c&gt;"


def test_hours_that_move_to_smaller_gpus_are_not_called_returned(samples: ModuleType) -> None:
    """The card says so, and names both GPU models with their memory."""
    (card,) = headline.action_cards(samples.oversized_result())
    assert card.hours == f"30{NBSP}GPU-h to smaller GPUs"
    assert card.evidence == (
        f"1 job run on NVIDIA H100 80GB HBM3 (79.6{NBSP}GiB) with at most 6{NBSP}GiB of GPU memory in use and a "
        f"utilization of at most 9{NBSP}% on average; NVIDIA A30 has 24{NBSP}GiB"
    )
    assert "<code>--gpus=TYPE:N</code>" in card.advice
    assert headline.action_cards(dataclasses.replace(samples.oversized_result(), gpu_memory=None)) == ()
