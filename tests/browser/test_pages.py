"""Every kind of page in a real browser, and the index of reports. Pages of jobs are in test_job.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page

Open = Callable[..., Page]
Violations = Callable[[Page], list[Any]]


@pytest.mark.parametrize(
    "name", ["small", "server", "user", "account", "index", "finding", "whatif", "log", "requests"]
)
def test_page_is_accessible_in_all_colors_and_widths(open_page: Open, violations: Violations, name: str) -> None:
    """Light, dark, 400 px and paper: no violation, and nothing scrolls sideways but tables in their own frame."""
    page = open_page(name, bypass_csp=True)
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    for scheme, width, media in (("light", 1280, "screen"), ("dark", 400, "screen"), ("light", 718, "print")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme, media=media)
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_index_is_searched_and_switched_with_the_keyboard(open_page: Open) -> None:
    """Search, period and cluster narrow the list together; the number of reports is announced."""
    page = open_page("index")
    rows = page.locator("section.reports tbody tr:visible")
    assert rows.count() == 33
    page.get_by_label("Search").focus()
    page.keyboard.type("2026-11-0")
    assert rows.count() == 12  # nine days, two weeks and the month
    page.keyboard.press("Tab")
    page.keyboard.type("Days")
    assert rows.count() == 9
    assert page.get_by_role("status").inner_text() == "9 of 33 reports"
    idle = rows.first.locator("td.number").first.inner_text()
    page.get_by_label("Cluster").select_option("beta")
    assert rows.count() == 9
    assert rows.first.locator("td.number").first.inner_text() != idle
    assert not page.locator("#index-trend").is_visible()


def test_index_without_scripts_lists_each_report_once(open_page: Open) -> None:
    page = open_page("index", java_script_enabled=False)
    assert page.locator("section.reports tbody tr:visible").count() == 33
    assert not page.get_by_label("Search").is_visible()
