"""The report in a real browser: quiet, usable by mouse, keyboard and screen reader, in any light, at any width."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import resources
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import Page

Open = Callable[..., Page]
EVERY = ["week", "hostile", "many", "unmeasured", "empty"]


def column(page: Page, table: str, index: int) -> list[str]:
    """The visible texts of a column."""
    script = """([table, index]) => [...document.querySelector(table).tBodies[0].rows]
        .filter(row => !row.hidden).map(row => row.cells[index].innerText.trim())"""
    found: list[str] = page.evaluate(script, [table, index])
    return found


def numbers(texts: list[str]) -> list[float]:
    """The numbers of a column; what is unknown is left out."""
    return [float(t.replace(",", "").split()[0]) for t in texts if t != "unknown"]


@pytest.mark.parametrize("name", EVERY)
def test_the_page_opens_without_a_word_or_a_request(open_page: Open, name: str) -> None:
    """No console message, no error, no dialog, nothing fetched: the fixture checks."""
    page = open_page(name)
    assert page.title().startswith("GPU waste report: 2026-11-01 00:00 to 2026-11-08 00:00")
    assert page.locator("h1").inner_text() == "GPU waste report"


@pytest.mark.parametrize("name", EVERY)
def test_no_width_makes_the_page_scroll_sideways(open_page: Open, name: str) -> None:
    """From a small phone to a wide screen; wide tables scroll in their own frame."""
    page = open_page(name)
    for width in (320, 390, 800, 1280, 2560):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_nothing_of_a_hostile_name_runs(open_page: Open) -> None:
    """Shown as text; no element, handler or link came of it."""
    page = open_page("hostile")
    assert page.get_by_text("<script>alert(1)</script>", exact=True).count() > 0
    assert page.locator("script").count() == 1
    assert page.locator("img").count() == 0
    assert page.evaluate(
        "[...document.querySelectorAll('*')].every(e => ![...e.attributes].some(a => /^on/.test(a.name)))"
    )
    hrefs = page.evaluate("[...document.links].map(a => a.getAttribute('href'))")
    assert all(href.startswith("#") for href in hrefs)


def test_a_table_is_sorted_by_a_click_on_its_heading(open_page: Open) -> None:
    """Numbers from the largest, a second click turns the order; names from A; one column is marked at a time."""
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


def test_what_is_unknown_is_sorted_last_either_way(open_page: Open) -> None:
    """It is neither small nor large."""
    page = open_page("week")
    button = page.locator("#jobs thead th", has_text="Idle share").get_by_role("button")
    for _ in range(2):
        button.click()
        texts = column(page, "#jobs", 3)
        assert "unknown" in texts
        assert set(texts[texts.index("unknown") :]) == {"unknown"}


def test_rows_are_filtered_by_words_and_counted_aloud(open_page: Open) -> None:
    """All words must be there; the count is announced; clearing brings everything back."""
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


def test_everything_can_be_reached_and_used_with_the_keyboard(open_page: Open) -> None:
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


def test_headings_come_in_order(open_page: Open) -> None:
    """One h1, and no level is left out: how a screen reader finds its way."""
    levels = open_page("week").evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_pictures_have_names_in_the_accessibility_tree(open_page: Open) -> None:
    """Every drawing that is not decoration."""
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


def test_without_script_everything_is_there_to_read(open_page: Open) -> None:
    """Tables, pictures, help; only sorting and filtering are missing."""
    page = open_page("week", java_script_enabled=False)
    assert page.locator("#jobs tbody tr").count() == 300
    assert page.get_by_label("Show rows with").count() == 0
    assert page.locator("#jobs thead button").count() == 0
    summary = page.locator("#fig-over-time details.help summary")
    summary.click()
    assert page.get_by_text("Each bar is the mean number of allocated GPUs").is_visible()
    assert page.locator("#fig-over-time svg[role=img]").bounding_box()["height"] > 100  # type: ignore[index]


def luminance(color: str) -> float:
    """Relative luminance of an ``rgb()`` colour (WCAG 2)."""
    parts = [float(v) / 255 for v in re.findall(r"[\d.]+", color)[:3]]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours (WCAG 2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_marks_stand_out_in_either_scheme(open_page: Open, scheme: Any) -> None:
    """Texts at least 4.5 to 1 on their ground, marks of the charts at least 3 to 1."""
    page = open_page("week", color_scheme=scheme)
    script = """name => {
        const probe = document.createElement('i');
        probe.style.color = `var(--${name})`;
        document.body.append(probe);
        const colour = getComputedStyle(probe).color;
        probe.remove();
        return colour;
    }"""
    names = ("bg", "panel", "ink", "soft", "link", "busy", "low", "idle", "c1", "c2", "c3")
    colour = {name: page.evaluate(script, name) for name in names}
    assert (luminance(colour["bg"]) < 0.1) == (scheme == "dark")
    for ground in ("bg", "panel"):
        for text in ("ink", "soft", "link", "idle"):
            assert contrast(colour[text], colour[ground]) >= 4.5, (text, ground)
    for mark in ("busy", "low", "idle", "c1", "c2", "c3"):
        assert contrast(colour[mark], colour["panel"]) >= 3, mark


def test_print_leaves_out_what_paper_cannot_do(open_page: Open) -> None:
    """No navigation or search box, black on white, a hundred rows of the long table, no cut-off table; a small file."""
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
    assert b"/PatternType" not in paper  # each figure with one would be a picture of a whole page


@pytest.mark.parametrize("name", EVERY)
def test_paper_is_wide_enough(open_page: Open, name: str) -> None:
    """No table goes beyond the edge of A4 with the margins of a browser, whatever the names."""
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


def test_headings_that_paper_repeats_are_painted(open_page: Open) -> None:
    """Chromium leaves buttons and positioned boxes out of the heads of later pages."""
    page = open_page("many")
    page.emulate_media(media="print")
    inside = """[...document.querySelectorAll('table.data thead *')].filter(e => {
        const style = getComputedStyle(e);
        return e.tagName === 'BUTTON' ? style.display !== 'contents' : style.position !== 'static';
    }).length"""
    assert page.evaluate(inside) == 0


@pytest.mark.parametrize("width", [390, 1280])
def test_labels_of_an_axis_do_not_run_into_each_other(open_page: Open, width: int) -> None:
    """Neither on a phone nor on a screen."""
    page = open_page("week", viewport={"width": width, "height": 844})
    boxes = page.evaluate(
        """[...document.querySelectorAll('svg.axes')].map(svg => [...svg.querySelectorAll('text')]
           .filter(t => getComputedStyle(t).display !== 'none' && !t.classList.contains('axis'))
           .map(t => [t.textContent, t.getBoundingClientRect()])
           .map(([text, b]) => [text, b.left, b.right, b.top, b.bottom]))"""
    )
    for labels in boxes:
        for i, (one, left, right, top, bottom) in enumerate(labels):
            for other, left2, right2, top2, bottom2 in labels[i + 1 :]:
                apart = right <= left2 + 0.5 or right2 <= left + 0.5 or bottom <= top2 + 2 or bottom2 <= top + 2
                assert apart, (one, other)


def test_charts_stay_inside_their_frames(open_page: Open) -> None:
    """Labels at the ends are not cut off."""
    page = open_page("week", viewport={"width": 390, "height": 844})
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_independent_checker_finds_no_barrier(open_page: Open, scheme: Any) -> None:
    """axe-core names no element that a screen reader or a keyboard could not use, in what is shown on demand either."""
    page = open_page("week", color_scheme=scheme, bypass_csp=True)
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    page.evaluate(resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document).then(r => r.violations.map(v => [v.id, v.nodes.map(n => n.html)]))")
    assert found == []
