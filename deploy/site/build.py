"""Build the documentation as a web site: ``make site``. It works offline, and a broken link is an error.

The pages are those of the repository. They are copied with the files that they link to, so that the links between them
remain as they are; README.md is the first page, and its tables are the navigation.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
PAGES = ("*.md", "docs/*.md", "benchmarks/README.md", "containers/README.md")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_SOURCE = re.compile(r'(?:src|srcset)="([^":]+)"')
_FOREIGN = re.compile(r'<script src="https://[^"]*/shim"></script>')
_QUIET = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
_GUIDE = re.compile(r"^- \[([^\]]+)\]\((docs/[^)#]+\.md)\)")
_ROW = re.compile(r"^\| \[([^\]]+)\]\(([^)#]+\.md)\)")
_HEAD = re.compile(r"^\| ([a-z ]+) \| \|$")


def pages() -> list[Path]:
    """Return the pages of the site."""
    return sorted(path for pattern in PAGES for path in REPOSITORY.glob(pattern))


def navigation(readme: str) -> list[dict[str, Any]]:
    """Return the pages that the tables of README.md list, by the heads of the tables."""
    groups: list[dict[str, Any]] = [{"Start": [{"slurm-affinode": "README.md"}, {"Changelog": "CHANGELOG.md"}]}]
    for line in readme.splitlines():
        if guide := _GUIDE.match(line):
            groups[0]["Start"].append({guide[1]: guide[2]})
        elif head := _HEAD.match(line):
            groups.append({head[1].capitalize(): []})
        elif (row := _ROW.match(line)) and len(groups) > 1:
            next(iter(groups[-1].values())).append({row[1]: row[2]})
    return [group for group in groups if next(iter(group.values()))]


def stage(into: Path) -> None:
    """Copy the pages and the files that they link to. A link to a directory becomes its name."""
    listed = set(pages())
    for page in sorted(listed):
        text = page.read_text(encoding="utf-8")
        for target in linked(page, text):
            if target.is_file() and target not in listed:
                copy(target, into)
        target = into / page.relative_to(REPOSITORY)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_LINK.sub(partial(as_text, page), text), encoding="utf-8")


def linked(page: Path, text: str) -> Iterator[Path]:
    """Yield the files and directories of the repository to which a page links."""
    for name in [*(match[3] for match in _LINK.finditer(text)), *_SOURCE.findall(text)]:
        target = (page.parent / name).resolve()
        if "://" not in name and target.is_relative_to(REPOSITORY):
            yield target


def as_text(page: Path, link: re.Match[str]) -> str:
    """Return a link; one to a directory, which a web site does not list, as its text."""
    return link[2] if (page.parent / link[3]).is_dir() else link[0]


def copy(path: Path, into: Path) -> None:
    target = into / path.relative_to(REPOSITORY)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)


def without_requests(site: Path) -> None:
    """Replace the script that the theme's plugin loads from another host when a page is opened from a file."""
    script = site / "assets" / "file-worker.js"
    shutil.copyfile(HERE / script.name, script)
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        source = os.path.relpath(script, page.parent)
        page.write_text(_FOREIGN.sub(f'<script src="{source}"></script>', text), encoding="utf-8")


def main() -> int:
    """Build the site; return the exit status of mkdocs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out" / "site", metavar="DIR")
    out = parser.parse_args().out.resolve()
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "pages"
        stage(source)
        nav = yaml.safe_dump({"nav": navigation((REPOSITORY / "README.md").read_text(encoding="utf-8"))})
        settings = Path(directory) / "mkdocs.yml"
        settings.write_text((HERE / "mkdocs.yml").read_text(encoding="utf-8") + f"docs_dir: pages\n{nav}")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(settings)]
        done = subprocess.run(  # noqa: S603 - no input
            [*command, "--site-dir", str(out)], check=False, env=_QUIET, capture_output=True, text=True
        )
    if done.returncode == 0:
        without_requests(out)
    else:
        print(done.stderr, file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
