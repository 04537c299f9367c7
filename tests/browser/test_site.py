"""The documentation as a web site: ``make site``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; a broken link or anchor is an error."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(REPOSITORY / "deploy/site/build.py"), "--out", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return out


def test_site_has_every_page(site: Path) -> None:
    """Each page of the documentation is in the navigation of the first page."""
    first = (site / "index.html").read_text(encoding="utf-8")
    pages = [path.stem for path in (REPOSITORY / "docs").glob("*.md")]
    assert [name for name in pages if f'href="docs/{name}.html"' not in first] == []


def test_site_works_from_files_without_a_network(site: Path, browser: Browser) -> None:
    """No page asks another host, and the search finds a page."""
    page = browser.new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto((site / "index.html").as_uri())
    page.locator("input[data-md-component=search-query]").press_sequentially("checkpoint")
    page.locator(".md-search-result__link").first.wait_for()
    titles = page.locator(".md-search-result__link h1").all_inner_texts()
    page.close()
    assert "Checkpointing" in titles
    assert [url for url in requests if not url.startswith(("file:", "data:", "about:"))] == []
