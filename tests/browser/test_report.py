"""The report in a real browser: no errors or requests, usable by mouse, keyboard and screen reader, at any width."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import resources
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import Page

Open = Callable[..., Page]
EVERY = ["week", "hostile", "many", "unmeasured", "empty", "servers"]
SERVER = ["server", "hostile-server"]


def column(page: Page, table: str, index: int) -> list[str]:
    """Return the visible texts of a column."""
    script = """([table, index]) => [...document.querySelector(table).tBodies[0].rows]
        .filter(row => !row.hidden).map(row => row.cells[index].innerText.trim())"""
    evaluation: list[str] = page.evaluate(script, [table, index])
    return evaluation


def numbers(texts: list[str]) -> list[float]:
    """Return the numbers of a column, without unknown values."""
    return [float(t.replace(",", "").split()[0]) for t in texts if t != "unknown"]


@pytest.mark.parametrize("name", EVERY)
def test_page_opens_without_messages_or_requests(open_page: Open, name: str) -> None:
    """No console message, error, dialog or request, which the fixture checks."""
    page = open_page(name)
    assert page.title().startswith("GPU waste report: 2026-11-01 00:00 to 2026-11-08 00:00")
    assert page.locator("h1").inner_text() == "GPU waste report"


@pytest.mark.parametrize("name", EVERY + SERVER)
def test_page_does_not_scroll_sideways(open_page: Open, name: str) -> None:
    """From a small phone to a wide screen; wide tables scroll in their own frame."""
    page = open_page(name)
    for width in (320, 390, 800, 1280, 2560):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_table_of_all_jobs_fits_on_a_usual_screen(open_page: Open) -> None:
    """No column is cut off at 1280 px."""
    page = open_page("week")
    table = page.locator(".long .scroll")
    assert table.evaluate("frame => frame.scrollWidth - frame.clientWidth") == 0


def test_hostile_names_are_not_executed(open_page: Open) -> None:
    """It is shown as text; it creates no element, handler or link."""
    page = open_page("hostile")
    assert page.get_by_text("<script>alert(1)</script>", exact=True).count() > 0
    assert page.locator("script").count() == 1
    assert page.locator("img").count() == 0
    assert page.evaluate(
        "[...document.querySelectorAll('*')].every(e => ![...e.attributes].some(a => /^on/.test(a.name)))"
    )
    hrefs = page.evaluate("[...document.links].map(a => a.getAttribute('href'))")
    assert all(href.startswith("#") for href in hrefs)


def test_click_on_heading_sorts_table(open_page: Open) -> None:
    """Numbers in descending order, a second click reverses it; names from A; one column is marked at a time."""
    page = open_page("week")
    button = page.locator("#jobs thead th", has_text="AllocatedGPU-h").get_by_role("button")
    button.click()
    values = numbers(column(page, "#jobs", 4))
    assert values == sorted(values, reverse=True)
    assert page.locator("#jobs th[aria-sort]").count() == 1
    assert page.locator("#jobs th[aria-sort=descending]").inner_text().startswith("Allocated")
    button.click()
    values = numbers(column(page, "#jobs", 4))
    assert values == sorted(values)
    page.locator("#jobs thead th", has_text="User").get_by_role("button").click()
    users = [text.split("\n")[0] for text in column(page, "#jobs", 1)]
    assert users == sorted(users)


def test_unknown_values_are_sorted_last(open_page: Open) -> None:
    """They are neither small nor large."""
    page = open_page("week")
    button = page.locator("#jobs thead th", has_text="Idle share").get_by_role("button")
    for _ in range(2):
        button.click()
        texts = column(page, "#jobs", 3)
        assert "unknown" in texts
        assert set(texts[texts.index("unknown") :]) == {"unknown"}


def test_filter_announces_number_of_rows(open_page: Open) -> None:
    """All words must match; the count is announced; clearing the box shows all rows again."""
    page = open_page("week")
    box = page.get_by_label("Show rows with")
    box.fill("user00 TIMEOUT")
    users = column(page, "#jobs", 1)
    assert users
    assert all("user00" in text for text in users)
    assert page.get_by_role("status").inner_text() == f"{len(users)} of 300 rows"
    box.fill("")
    assert len(column(page, "#jobs", 1)) == 300
    assert page.get_by_role("status").inner_text() == ""


def test_field_of_the_gpu_map_shows_all_jobs_of_the_gpu(open_page: Open) -> None:
    """With the keyboard: the table has the jobs of the GPU alone, until the button shows all; back leads to the map."""
    page = open_page("demo")
    every = len(column(page, "#jobs", 0))
    link = page.locator("a[data-g]").first
    name = link.get_attribute("data-gpu")
    count = int(link.get_attribute("data-n") or 0)
    link.focus()
    page.keyboard.press("Enter")
    shown = column(page, "#jobs", 0)
    assert 1 <= len(shown) <= count
    status = page.locator("#all output").inner_text()
    assert status.startswith(f"{len(shown)} of {every} rows: jobs on GPU {name}")
    assert (len(shown) < count) == ("more of them are not in this table" in status)
    assert page.evaluate("document.activeElement.textContent") == "Show all jobs"
    page.get_by_label("Show rows with").fill(shown[0].split()[0])
    assert 1 <= len(column(page, "#jobs", 0)) <= len(shown)
    page.get_by_role("button", name="Show all jobs").press("Enter")
    page.get_by_label("Show rows with").fill("")
    assert len(column(page, "#jobs", 0)) == every
    assert page.get_by_role("button", name="Show all jobs").is_hidden()
    page.go_back()
    assert link.is_visible()


def test_page_is_usable_with_keyboard(open_page: Open) -> None:
    """The skip link comes first; focus is visible; a heading sorts on Enter; help opens on Enter."""
    page = open_page("week")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.locator(".skip").bounding_box()["x"] >= 0  # type: ignore[index]
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    assert page.locator("details[open] p").first.is_visible()
    button = page.locator("#jobs thead th", has_text="Job").get_by_role("button")
    button.focus()
    page.keyboard.press("Enter")
    assert page.locator("#jobs th[aria-sort=ascending]").inner_text().startswith("Job")
    assert page.evaluate("document.querySelector('.scroll').tabIndex") == 0


def test_heading_levels_are_in_order(open_page: Open) -> None:
    """One h1, and no level is skipped: screen readers navigate by headings."""
    levels = open_page("week").evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_figures_have_accessible_names(open_page: Open) -> None:
    """All figures except decorative ones."""
    page = open_page("week")
    missing = page.evaluate(
        """[...document.querySelectorAll('svg[role=img]')].filter(s => !s.closest('[aria-hidden=true]')
           && !s.getAttribute('aria-label') && !s.getAttribute('aria-labelledby')).length"""
    )
    assert missing == 0
    assert page.get_by_role("img", name="Allocated GPUs over time").count() == 1
    bare = page.evaluate(
        """[...document.querySelectorAll('body svg')].filter(s => !s.getAttribute('role')
           && s.getAttribute('aria-hidden') !== 'true' && !s.parentElement.closest('svg')).length"""
    )
    assert bare == 0


def test_page_is_readable_without_javascript(open_page: Open) -> None:
    """Tables, figures and help; only sorting and filtering are missing."""
    page = open_page("week", java_script_enabled=False)
    assert page.locator("#jobs tbody tr").count() == 300
    assert page.get_by_label("Show rows with").count() == 0
    assert page.locator("#jobs thead button").count() == 0
    summary = page.locator("#fig-over-time details.help summary")
    summary.click()
    assert page.get_by_text("Each bar is the mean number of allocated GPUs").is_visible()
    assert page.locator("#fig-over-time svg[role=img]").bounding_box()["height"] > 100  # type: ignore[index]


def luminance(color: str) -> float:
    """Return the relative luminance of an ``rgb()`` color (WCAG 2)."""
    parts = [float(v) / 255 for v in re.findall(r"[\d.]+", color)[:3]]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, other: str) -> float:
    """Return the contrast ratio of two colors (WCAG 2)."""
    low, high = sorted((luminance(first), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_sufficient_in_both_schemes(open_page: Open, scheme: Any) -> None:
    """At least 4.5 to 1 for texts on their background, and 3 to 1 for the marks of charts."""
    page = open_page("week", color_scheme=scheme)
    script = """name => {
        const probe = document.createElement('i');
        probe.style.color = `var(--${name})`;
        document.body.append(probe);
        const color = getComputedStyle(probe).color;
        probe.remove();
        return color;
    }"""
    names = ("bg", "panel", "ink", "soft", "link", "busy", "low", "idle", "c1", "c2", "c3")
    color = {name: page.evaluate(script, name) for name in names}
    assert (luminance(color["bg"]) < 0.1) == (scheme == "dark")
    for ground in ("bg", "panel"):
        for text in ("ink", "soft", "link", "idle"):
            assert contrast(color[text], color[ground]) >= 4.5, (text, ground)
    for mark in ("busy", "low", "idle", "c1", "c2", "c3"):
        assert contrast(color[mark], color["panel"]) >= 3, mark


def test_print_omits_interactive_elements(open_page: Open) -> None:
    """No navigation or search box, black on white, a hundred rows of the long table, no clipped table; a small file."""
    page = open_page("many", color_scheme="dark", viewport={"width": 794, "height": 1123})
    page.emulate_media(media="print")
    assert not page.locator("ul.contents").is_visible()
    assert not page.get_by_label("Show rows with").is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("[...document.querySelectorAll('#jobs tbody tr')].filter(r => r.offsetHeight).length") == 100
    assert page.get_by_text("On paper, the first 100 rows.").is_visible()
    assert page.evaluate("getComputedStyle(document.querySelector('#all .scroll')).overflowX") == "visible"
    paper = page.pdf(format="A4")
    assert 10_000 < len(paper) < 1_000_000
    assert b"/PatternType" not in paper  # any figure with a pattern would become an image of a whole page


@pytest.mark.parametrize("name", EVERY + SERVER)
def test_tables_fit_on_paper(open_page: Open, name: str) -> None:
    """No table exceeds A4 with a browser's default margins, whatever the names."""
    page = open_page(name, viewport={"width": 718, "height": 1123})
    page.emulate_media(media="print")
    wide = """[...document.querySelectorAll('table, svg, p, dl')].filter(e => e.getBoundingClientRect().right > 719)
        .map(e => e.id || e.className.toString())"""
    assert page.evaluate(wide) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 718
    broken = """[...document.querySelectorAll('td.life small')].filter(e => {
        const text = document.createRange();
        text.selectNodeContents(e);
        return text.getClientRects().length > 1;
    }).length"""
    assert page.evaluate(broken) == 0, "the dates of a job stand in one line"


def test_repeated_table_heads_are_printed(open_page: Open) -> None:
    """Chromium does not paint buttons and positioned boxes in the repeated table heads of later pages."""
    page = open_page("many")
    page.emulate_media(media="print")
    inside = """[...document.querySelectorAll('table.data thead *')].filter(e => {
        const style = getComputedStyle(e);
        return e.tagName === 'BUTTON' ? style.display !== 'contents' : style.position !== 'static';
    }).length"""
    assert page.evaluate(inside) == 0


@pytest.mark.parametrize("name", ["week", "server"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axis_labels_do_not_overlap(open_page: Open, width: int, name: str) -> None:
    """On a phone and on a screen."""
    page = open_page(name, viewport={"width": width, "height": 844})
    boxes = page.evaluate(
        """[...document.querySelectorAll('svg.axes')].map(svg => [...svg.querySelectorAll('text')]
           .filter(t => getComputedStyle(t).display !== 'none' && !t.classList.contains('axis'))
           .map(t => [t.textContent, t.getBoundingClientRect()])
           .map(([text, b]) => [text, b.left, b.right, b.top, b.bottom]))"""
    )
    for labels in boxes:
        for i, (item, left, right, top, bottom) in enumerate(labels):
            for other, left2, right2, top2, bottom2 in labels[i + 1 :]:
                apart = right <= left2 + 0.5 or right2 <= left + 0.5 or bottom <= top2 + 2 or bottom2 <= top + 2
                assert apart, (item, other)


@pytest.mark.parametrize("name", ["week", "server"])
def test_chart_labels_stay_in_their_frames(open_page: Open, name: str) -> None:
    """Labels at the ends are not clipped."""
    page = open_page(name, viewport={"width": 390, "height": 844})
    outside = page.evaluate(
        """[...document.querySelectorAll('figure.chart')].flatMap(figure => {
            const frame = figure.getBoundingClientRect();
            return [...figure.querySelectorAll('svg text')]
                .filter(t => getComputedStyle(t).display !== 'none')
                .filter(t => t.getBoundingClientRect().left < frame.left - 1
                             || t.getBoundingClientRect().right > frame.right + 1)
                .map(t => t.textContent);
        })"""
    )
    assert outside == []


@pytest.mark.parametrize(("scheme", "name"), [("dark", "week"), ("light", "servers"), ("dark", "server")])
def test_axe_finds_no_violation(open_page: Open, scheme: Any, name: str) -> None:
    """axe-core finds no element unusable with a screen reader or keyboard, including content shown on demand."""
    page = open_page(name, color_scheme=scheme, bypass_csp=True)
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    page.evaluate(resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    evaluation = page.evaluate("axe.run(document).then(r => r.violations.map(v => [v.id, v.nodes.map(n => n.html)]))")
    assert evaluation == []


def test_servers_are_sorted_with_the_keyboard(open_page: Open) -> None:
    """The section is in the list of contents; its links lead to pages next to the report."""
    page = open_page("servers")
    page.get_by_role("link", name="Model servers").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#servers"
    button = page.locator("#servers-table thead th", has_text="Requests").get_by_role("button")
    button.focus()
    page.keyboard.press("Enter")
    values = column(page, "#servers-table", 4)
    assert numbers(values) == sorted(numbers(values), reverse=True)
    assert values[-1] == "unknown"
    hrefs = page.evaluate("[...document.querySelectorAll('#servers-table a')].map(a => a.getAttribute('href'))")
    assert len(hrefs) == 4
    assert all(re.fullmatch(r"server-[0-9a-f]{16}\.html", href) for href in hrefs)


@pytest.mark.parametrize("name", SERVER)
def test_page_of_a_server_has_charts_on_one_axis(open_page: Open, name: str) -> None:
    """Each chart has a name; bands have tooltips and lie inside of the chart; the page leads back to the report."""
    page = open_page(name)
    assert page.get_by_role("link", name="Back to the report").get_attribute("href") == "report.html"
    for title in ("KV cache in use", "Requests", "Tokens per second", "Preemptions per second"):
        assert page.get_by_role("img", name=title).count() == 1
    tips = page.evaluate("[...document.querySelectorAll('#fig-engine-1-kv svg g > title')].map(t => t.textContent)")
    assert any(tip.startswith("queue-unstable: The queue grew") for tip in tips)
    ticks = page.evaluate(
        """['kv', 'requests', 'tokens'].map(name => `#fig-engine-1-${name} svg.axes text`)
           .map(selector => [...document.querySelectorAll(selector)]
           .map(t => t.textContent).filter(t => /^\\d\\d:\\d\\d/.test(t)).join())"""
    )
    assert len(set(ticks)) == 1
    assert ticks[0]
    assert page.locator("script").count() == 1
