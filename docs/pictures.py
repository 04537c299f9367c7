"""Run the walks of ``docs/report.md``, and make its pictures and those of the README: ``python docs/pictures.py``.

Needs Chromium and the packages of the tests. Takes about two minutes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "tests" / "browser"))
PICTURES = {
    "report": ("demo/report.html", "", 880),
    "walk-administrator": ("reports/week/2026-W45/report.html", "#advice", 1290),
    "walk-user": ("pages/user/femi/index.html", "", 1050),
    "walk-director": ("shared/report.html", "", 880),
}
"""Picture -> page in the directory of the walks, the element at its top (empty: the page's), height in pixels."""
WIDTH = 1180


def commands(page: Path = DOCS / "report.md") -> str:
    """Return the commands of the section on walks."""
    section = page.read_text(encoding="utf-8").partition("\n## Three walks\n")[2].partition("\n## ")[0]
    return "".join(re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL))


def run(directory: Path) -> None:
    """Run the commands of the walks in a directory. Raises ``CalledProcessError`` if one of them fails."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    argv = ["bash", "-euo", "pipefail", "-c", commands()]
    subprocess.run(argv, cwd=directory, env=env, check=True)  # noqa: S603 - commands of the repository


def take(directory: Path, out: Path = DOCS) -> None:
    """Write ``NAME-light.png`` and ``NAME-dark.png`` of each of ``PICTURES``."""
    from screenshot import chromium  # noqa: PLC0415 - needs playwright

    with chromium() as browser:
        for name, (page_name, top, height) in PICTURES.items():
            for scheme in ("light", "dark"):
                view = {"width": WIDTH, "height": height}
                context = browser.new_context(viewport=view, color_scheme=scheme)  # type: ignore[arg-type]
                page = context.new_page()
                page.goto((directory / page_name).as_uri())
                if top:
                    page.locator(top).evaluate("part => window.scrollTo(0, part.offsetTop - 24)")
                page.screenshot(path=out / f"{name}-{scheme}.png")
                context.close()


def main() -> None:
    """Make the pictures."""
    with tempfile.TemporaryDirectory() as made:
        run(Path(made))
        take(Path(made))


if __name__ == "__main__":
    main()
