"""The page of ``job --html`` in a real browser: screen reader, keyboard, colors, any width, paper, hostile names."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import Page

Open = Callable[..., Page]
Violations = Callable[[Page], list[Any]]
JOBS = ["job", "hostile-job"]


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(
    "settings",
    [
        {"color_scheme": "light"},
        {"color_scheme": "dark"},
        {"color_scheme": "light", "viewport": {"width": 400, "height": 800}},
        {"color_scheme": "dark", "viewport": {"width": 400, "height": 800}},
    ],
    ids=["light", "dark", "light-400px", "dark-400px"],
)
def test_axe_finds_no_violation(open_page: Open, violations: Violations, name: str, settings: dict[str, Any]) -> None:
    """Also of the contents that are shown on demand."""
    page = open_page(name, bypass_csp=True, **settings)
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert violations(page) == []


def test_axe_finds_no_violation_on_paper(open_page: Open, violations: Violations) -> None:
    """In print, colors are those of the light scheme."""
    page = open_page("job", bypass_csp=True, color_scheme="dark", viewport={"width": 718, "height": 1123})
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert violations(page) == []


@pytest.mark.parametrize("name", JOBS)
def test_page_does_not_scroll_sideways(open_page: Open, name: str) -> None:
    """Wide tables scroll in their own frame."""
    page = open_page(name)
    for width in (320, 400, 800, 1280):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("name", JOBS)
def test_tables_fit_on_paper(open_page: Open, name: str) -> None:
    """No table or picture is wider than A4 with a browser's default margins."""
    page = open_page(name, viewport={"width": 718, "height": 1123})
    page.emulate_media(media="print")
    wide = """[...document.querySelectorAll('table, svg, p, dl')].filter(e => e.getBoundingClientRect().right > 719)
        .map(e => e.id || e.className.toString())"""
    assert page.evaluate(wide) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 718


def test_headings_and_pictures_have_names(open_page: Open) -> None:
    """One h1, no level is skipped, each picture has a name, and the page has every part of the summary."""
    page = open_page("job")
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    unnamed = """[...document.querySelectorAll('svg[role=img]')]
        .filter(s => !s.getAttribute('aria-label') && !s.getAttribute('aria-labelledby')).length"""
    assert page.evaluate(unnamed) == 0
    assert page.locator("#gpu-table tbody tr").count() == 4
    assert page.get_by_text("Two of four GPUs were hardly used.").is_visible()


def test_hostile_names_are_not_executed(open_page: Open) -> None:
    """They are shown as text; they create no element, handler or link."""
    page = open_page("hostile-job")
    assert page.locator("img").count() == 0
    assert page.evaluate(
        "[...document.querySelectorAll('*')].every(e => ![...e.attributes].some(a => /^on/.test(a.name)))"
    )
    assert page.locator("script").count() == open_page("job").locator("script").count()
