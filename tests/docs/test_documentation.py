"""The documentation: its commands run, its links resolve, and its generated parts are current."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_affinode.model.suspension import RefusalCode

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "benchmarks").glob("*.md")]
)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_SRC = re.compile(r'(?:src|srcset|href)="([^"#][^"]*)"')


def blocks(page: Path) -> list[str]:
    """Return the shell blocks of a page."""
    return re.findall(r"^```(?:sh|bash|shell)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_links_resolve(page: Path) -> None:
    """Every relative link and image of a page exists."""
    text = page.read_text()
    targets = [t for t in (*_LINK.findall(text), *_SRC.findall(text)) if not re.match(r"[a-z]+:", t)]
    missing = [t for t in targets if t.split("#")[0] and not (page.parent / t.split("#")[0]).exists()]
    assert missing == []


def test_every_refusal_is_documented() -> None:
    """The names that ``status`` shows and commands report, each in a table or sentence."""
    only_text = {"gpu-count", "gpu-model"}  # refusals of a restore are shown with their text, not their name
    pages = " ".join(
        (REPOSITORY / "docs" / name).read_text() for name in ("agent.md", "checkpointing.md", "inplace.md")
    )
    assert {code for code in {*RefusalCode} - only_text if f"`{code}`" not in pages} == set()


def test_generated_pages_are_current() -> None:
    """docs/commands.md and docs/metrics.md are up to date with ``make docs``."""
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_manual_pages_are_sound(tmp_path: Path) -> None:
    """Every command has one, and groff has no warnings."""
    subprocess.run([sys.executable, "docs/generate.py", "--man", tmp_path], cwd=REPOSITORY, check=True)
    pages = sorted(tmp_path.iterdir())
    headings = re.findall(r"^## (.*)$", (REPOSITORY / "docs" / "commands.md").read_text(), re.M)
    assert {page.stem for page in pages} == {heading.replace(" ", "-") for heading in headings}
    page = (tmp_path / "slurm-affinode-ingest-sacct.1").read_text()
    assert "\n.SH SYNOPSIS\n.B slurm\\-affinode ingest sacct\n" in page
    assert "\n.SH CONNECTION OPTIONS\n.TP\n.B \\-\\-" in page
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed: pages are not formatted")
    done = subprocess.run(["groff", "-man", "-ww", "-Tutf8", *pages], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_walkthroughs_name_fewer_than_ten_modules() -> None:
    """Each module exists: in the package, or below the repository."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("## Four walkthroughs")[2].partition("\n## ")[0]
    walks = [
        re.findall(r"`([\w/]+\.(?:py|c))`", match)
        for match in re.findall(r"^1\. .*?\n\n", text, re.MULTILINE | re.DOTALL)
    ]
    assert [5 <= len(set(names)) < 10 for names in walks] == [True] * 4
    places = (REPOSITORY / "slurm_affinode", REPOSITORY)
    assert [name for names in walks for name in names if not any((place / name).is_file() for place in places)] == []


def test_make_targets_of_the_readme_exist() -> None:
    """Each ``make`` target in the README exists."""
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", (REPOSITORY / "README.md").read_text()))
    targets = set(re.findall(r"^([a-z][a-z-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named
    assert named <= targets


@pytest.mark.slow
def test_commands_of_the_readme_run(tmp_path: Path) -> None:
    """The commands of the README, unchanged, on files with the names used there."""
    script = "\n".join(b for b in blocks(REPOSITORY / "README.md") if "slurm-affinode" in b)
    assert script.count("slurm-affinode ") >= 3
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    env |= {"SLURM_AFFINODE_STATE": str(tmp_path / "state"), "TZ": "UTC"}
    env.pop("SLURM_AFFINODE_DB", None)
    run = ["bash", "-euo", "pipefail", "-c"]
    make = "slurm-affinode demo --days 1 --trend 0 --out made; cp made/input/sacct.txt .; cp -r made/input/gpu dcgm"
    made = subprocess.run(
        [*run, make],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    done = subprocess.run(
        [*run, script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert (tmp_path / "report" / "report.html").exists()
