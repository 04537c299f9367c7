"""Screenshots of a page in Chromium: ``python tests/browser/screenshot.py PAGE.html OUT_DIR [--only NAME...]``.

Writes ``NAME-light.png``, ``NAME-dark.png``, ``NAME-narrow.png`` (390 px), ``NAME-print.png`` (first A4 pages) and
``NAME-top.png`` (the first screen, 1280 x 1600). ``NAME`` is the stem of the page.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

CHROMIUM = "/usr/bin/chromium"
VIEWS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "device_scale_factor": 2},
    "top": {"viewport": {"width": 1280, "height": 1600}, "color_scheme": "light"},
    "print": {"viewport": {"width": 794, "height": 1123}, "color_scheme": "light"},
}


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Debian's Chromium without a sandbox, so that it also runs as root in a container."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def take(page_file: Path, out: Path, names: list[str]) -> list[Path]:
    """Write the screenshots ``names`` of ``page_file`` to ``out``; return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with chromium() as browser:
        for name in names:
            context = browser.new_context(**VIEWS[name])
            page = context.new_page()
            page.goto(page_file.resolve().as_uri())
            if name == "print":
                page.emulate_media(media="print")
            target = out / f"{page_file.stem}-{name}.png"
            page.screenshot(path=target, full_page=name != "top")
            written.append(target)
            context.close()
    return written


def main() -> None:
    """Take the screenshots and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=sorted(VIEWS), default=list(VIEWS))
    arguments = parser.parse_args()
    for path in take(arguments.page, arguments.out, arguments.only):
        print(path)


if __name__ == "__main__":
    main()
