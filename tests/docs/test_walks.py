"""The walks of docs/report.md: their commands run as written, and lead to what the text names."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(900)  # these commands take minutes beside the tests on clusters
def test_walks_lead_where_they_say(pictures: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Pages, mails and jobs of the text exist, and the report to pass on has no names."""
    pictures.run(tmp_path)
    section = (DOCS / "report.md").read_text().partition("## Three walks")[2].partition("\n## ")[0]
    named = re.findall(r"`((?:mails|pages|reports)/[^`]+)`", section)
    assert len(named) >= 5
    assert [name for name in named if not list(tmp_path.glob(name))] == []
    for page, top, _ in pictures.PICTURES.values():
        assert not top or f'id="{top[1:]}"' in (tmp_path / page).read_text()
    first = (tmp_path / "reports/week/2026-W45/report.html").read_text().partition('class="advice-head"')[2]
    assert re.search(r"slurm-affinode job (\d+)", first).group(1) in re.findall(r"job (\d+)", section)  # type: ignore[union-attr]
    names = r"\b(ada|bo|chen|dara|eli|femi|gus|hana|ivo)\b"
    assert not re.search(names, (tmp_path / "shared/jobs.csv").read_text())
    assert "4997" in capfd.readouterr().out


def test_pictures_of_the_documentation_exist(pictures: ModuleType) -> None:
    """In both colors, and each is made by docs/pictures.py."""
    shown = set(re.findall(r"walk-\w+-(?:light|dark)\.png", (DOCS / "report.md").read_text()))
    made = {f"{name}-{scheme}.png" for name in pictures.PICTURES for scheme in ("light", "dark")}
    assert shown == {name for name in made if name.startswith("walk-")}
    assert [name for name in made if not (DOCS / name).is_file()] == []
