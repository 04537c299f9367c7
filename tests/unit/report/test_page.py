"""The report page: complete, self-contained, safe, honest."""

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

from slurm_affinode.analysis.result import QualityIssue, WasteResult
from slurm_affinode.report import headline, render
from slurm_affinode.report.assemble import JOB_ROWS, build_context, render_report
from slurm_affinode.report.format import NBSP
from slurm_affinode.report.measures import known

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


def test_the_page_is_well_nested_with_unique_ids_and_targets_that_exist(page: Page) -> None:
    """Every link within the page and every label leads somewhere."""
    ids = [a["id"] for _, a in page.elements if a.get("id")]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        for name in ("aria-labelledby", "aria-describedby", "for"):
            for target in (attributes.get(name) or "").split():
                assert target in ids, f"{name}={target}"
        href = attributes.get("href") or ""
        if href.startswith("#"):
            assert href[1:] in ids


def test_the_page_needs_nothing_from_outside(page: Page) -> None:
    """No link, image, font, script or style from elsewhere; no inline style or handler that the policy would refuse."""
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert name not in ("style", "srcset", "action"), (tag, name)
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "data"):
                assert (value or "").startswith(("#", "data:,")), (tag, value)
    assert "@import" not in page.raw["style"]
    assert not re.search(r"url\((?!#)", page.raw["style"])


def test_the_policy_allows_exactly_this_style_and_script(page: Page) -> None:
    """By hash, and nothing else."""
    policy = next(a["content"] for t, a in page.elements if t == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    for tag in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(page.raw[tag].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert [t for t, _ in page.elements if t == "script"] == ["script"]


def test_every_section_of_the_report_is_there(page: Page) -> None:
    """What the report promises to answer."""
    for heading in (
        "Idle over time", "Partitions and GPU models", "Who wastes most", "Which jobs waste most",
        "Memory held and compute used", "Distribution of idle time", "All jobs", "Data quality",
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


def test_the_headline_is_the_total_of_the_result(page: Page, result: WasteResult) -> None:
    """The same numbers, rounded."""
    allocated, idle = result.total["gpu_hours_allocated"], result.total["gpu_hours_idle"]
    assert allocated is not None
    assert idle is not None
    capacity, free = result.total["gpu_hours_capacity"], result.total["unallocated_gpu_hours"]
    assert capacity == allocated + (free or 0.0)
    assert f"Of {capacity:,.0f} GPU-hours, {allocated:,.0f} were allocated to 300 job runs." in page.text
    assert f"{idle:,.0f} GPU-hours were idle , {100 * idle / allocated:.0f} % of the allocated" in page.text
    assert f"Capacity {capacity:,.0f} GPU-h" in page.text
    assert f"Not allocated {free:,.0f} GPU-h" in page.text


def test_page_has_one_base_for_idle_shares(result: WasteResult) -> None:
    """Half of what was allocated is unknown: shares of the measured part would read twice as large elsewhere."""
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


def test_every_figure_has_its_definition_without_script(page: Page) -> None:
    """Help opens with details elements; the definitions list every figure."""
    assert page.text.count("Definition") >= 10
    ids = {a.get("id") for _, a in page.elements}
    assert {"def-gpu_hours_idle", "def-idle_fraction", "def-cost", "def-unallocated_gpu_hours"} <= ids


def test_hostile_names_are_shown_and_nothing_of_them_is_markup(hostile: WasteResult) -> None:
    """A job called ``<script>`` is shown as that."""
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


def test_a_name_that_is_too_long_is_cut_and_kept_in_a_title(hostile: WasteResult) -> None:
    """The layout holds; the whole name is there on pointing, up to a limit."""
    page = Page(render_plain(hostile))
    assert max(len(t) for t in page.texts if t.startswith("xxx")) <= 60
    assert any((a.get("title") or "").startswith("x" * 100) for _, a in page.elements)


def test_what_is_not_known_is_called_unknown_and_is_never_zero(unmeasured: WasteResult) -> None:
    """Without GPU history there is no idle figure at all."""
    page = Page(render_plain(unmeasured))
    assert "How much of it was idle is unknown" in page.text
    assert "no GPU history covers these jobs" in page.text
    for key in ("gpu_hours_idle", "gpu_hours_busy", "gpu_hours_low", "idle_fraction", "idle_cost", "idle_windows"):
        assert known(unmeasured.total, key) is None
    cards = {c.label: c for c in build_context(unmeasured, title="t", top=15).cards}
    assert (cards["Idle"].unknown, cards["Idle"].value) == (True, "unknown")
    assert cards["Busy"].unknown
    assert not cards["Unknown"].unknown
    assert "Cost of the idle hours" not in cards
    assert "No price is known" in page.text


def test_an_interval_without_jobs_says_so(samples: ModuleType) -> None:
    """Every section says why it is empty."""
    page = Page(render_plain(samples.empty_result()))
    assert "No GPU job ran in this interval." in page.text
    assert "There was no job with GPUs." in page.text
    assert "No job had idle GPU time that could be measured." in page.text


def test_ten_thousand_jobs_stay_under_two_megabytes(samples: ModuleType) -> None:
    """The table of jobs is cut and says so, and where the rest is."""
    html = render_plain(samples.make_result(10_000), csv_name="jobs.csv")
    assert len(html.encode()) < 2_000_000
    page = Page(html)
    assert "The 1,000 job runs with most idle GPU-hours" in page.text
    assert "9,000 more are not shown; all of them are in jobs.csv." in page.text


def test_even_with_the_worst_names_ten_thousand_jobs_stay_under_two_megabytes(samples: ModuleType) -> None:
    """Names that grow most when escaped."""
    html = render_plain(samples.make_result(10_000, names=('"' * 300, "<&>" * 100)))
    assert len(html.encode()) < 2_000_000
    assert "the option --csv writes all of them to jobs.csv" in html


def test_a_small_table_of_jobs_is_whole(result: WasteResult) -> None:
    """No note on missing rows where none is missing."""
    context = build_context(result, title="t", top=15)
    assert context.jobs is not None
    assert len(context.jobs.rows) == result.jobs.height < JOB_ROWS
    assert context.jobs.note == ""


def test_the_worst_jobs_come_first_and_have_their_picture(result: WasteResult) -> None:
    """As many as asked for."""
    context = build_context(result, title="t", top=5)
    assert context.worst is not None
    assert context.worst.rows[0][0].sort == str(result.jobs["job_id"][0])
    assert len(context.worst.rows) == 5
    assert all(row[4].picture for row in context.worst.rows)


def test_tables_say_their_order_and_scope(page: Page) -> None:
    """The sorted column is marked, every heading has a scope."""
    heads = [a for t, a in page.elements if t == "th"]
    assert all(a.get("scope") in ("col", "row") for a in heads)
    assert sum(a.get("aria-sort") == "descending" for a in heads) >= 6


def test_filters_are_named_on_the_page(result: WasteResult) -> None:
    """A report on a part must not pass for the whole."""
    query = dataclasses.replace(result.query, partitions=("gpu", "<b>"), users=("ann",))
    page = Page(render_plain(dataclasses.replace(result, query=query)))
    assert "Only partition gpu, <b>; user ann" in page.text


def test_models_without_a_price_are_named(result: WasteResult) -> None:
    """The amounts leave them out."""
    prices = {**result.prices, "NVIDIA L4": None}
    page = Page(render_plain(dataclasses.replace(result, prices=prices)))
    assert "Amounts leave out GPUs without a known price: NVIDIA L4." in page.text


@pytest.mark.parametrize(
    ("idle", "sentence"),
    [
        ([60.0, 20.0, 10.0, 10.0], "One user of 4 accounts for 60 % of the idle time."),
        ([30.0, 30.0, 20.0, 20.0], "Three of 4 users account for 80 % of the idle time."),
    ],
)
def test_where_the_waste_is_concentrated_is_said_in_a_sentence(
    result: WasteResult, idle: list[float], sentence: str
) -> None:
    """One user where one has at least half, else the first three."""
    users = result.groups["user"].head(4).with_columns(gpu_hours_idle=pl.Series(idle))
    total = {**result.total, "gpu_hours_idle": 100.0}
    some = dataclasses.replace(result, total=total, groups={**result.groups, "user": users})
    assert sentence in [f.replace(NBSP, " ") for f in headline.findings(some)]


def test_a_history_that_fits_no_job_is_said_to_be_there(unmeasured: WasteResult) -> None:
    """Whoever took history in and sees nothing of it would look for it in vain."""
    quality = dataclasses.replace(unmeasured.quality, samples=7)
    assert "the GPU history fits none" in headline.answer(dataclasses.replace(unmeasured, quality=quality)).after


def test_why_much_is_unknown_is_said_at_the_top(result: WasteResult) -> None:
    """The largest reason, and where to read on; nothing where little is unknown."""
    issue = QualityIssue("unmapped-gpus", "Runs whose GPUs are not known", "", 3, gpu_hours=30.0)
    quality = dataclasses.replace(result.quality, issues=(issue, QualityIssue("no-price", "No price", "", 1, 99.0)))
    for unknown, said in ((40.0, True), (10.0, False)):
        total = {**result.total, "gpu_hours_allocated": 100.0, "gpu_hours_unknown": unknown}
        found = headline.findings(dataclasses.replace(result, total=total, quality=quality))
        there = [f for f in found if "75 % of the unknown GPU-hours: runs whose GPUs" in f.replace(NBSP, " ")]
        assert bool(there) == said


def test_nothing_is_said_to_stand_out_where_little_is_known(samples: ModuleType, unmeasured: WasteResult) -> None:
    """Few users and jobs have no concentration; without measurement there is no finding."""
    assert headline.findings(unmeasured) == ()
    few = samples.make_result(3)
    assert not [f for f in headline.findings(few) if "account" in f or "Half" in f]


def test_a_week_that_is_measured_whole_names_no_unknown_hours(result: WasteResult) -> None:
    """The sentence stays short."""
    total = {**result.total, "gpu_hours_measured": result.total["gpu_hours_allocated"], "gpu_hours_unknown": 0.0}
    said = headline.answer(dataclasses.replace(result, total=total))
    assert said.after.partition(".")[0].endswith("% of the allocated")
    assert "unknown" not in said.after


def test_prices_that_are_not_the_sites_own_are_on_no_page(result: WasteResult) -> None:
    """Nobody takes an example for a bill: no amount of money, and how to have some."""
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
def test_lengths_of_idle_windows_have_short_labels(lower_s: float, upper_s: float | None, label: str) -> None:
    """They stand side by side under the bars."""
    from slurm_affinode.report.pictures import _window

    assert _window(lower_s, upper_s).replace(NBSP, " ") == label


def test_a_running_job_is_said_to_run(result: WasteResult) -> None:
    """It has no end yet."""
    running = result.jobs.with_columns(end=pl.lit(None, dtype=result.jobs.schema["end"]))
    page = Page(render_plain(dataclasses.replace(result, jobs=running)))
    assert "– running" in page.text


def test_page_shows_local_times_and_names_the_zone_once(result: WasteResult) -> None:
    """In headline, tables, pictures and their numbers."""
    zone = ZoneInfo("America/St_Johns")
    page = Page(render_plain(dataclasses.replace(result, query=dataclasses.replace(result.query, zone=zone))))
    assert page.text.count("America/St_Johns") == 1
    assert "UTC" not in page.text.partition("How it is computed")[0]
    assert "2026-10-31 21:30 to 2026-11-07 20:30 (7 d)" in page.text
    start = result.jobs["start"][0].astimezone(zone)
    assert f"{start:%Y-%m-%d %H:%M} –" in page.text


def test_a_name_that_a_template_does_not_get_is_an_error() -> None:
    """StrictUndefined: nothing is silently empty."""
    with pytest.raises(jinja2.UndefinedError):
        render.page("report.html.j2", title="t", zone=UTC)


def test_texts_of_the_method_show_code_as_code() -> None:
    """Backticks become code elements, everything is escaped."""
    from slurm_affinode.report.evidence import prose

    assert prose("a `b<` <c>") == "a <code>b&lt;</code> &lt;c&gt;"
