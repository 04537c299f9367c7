"""The wheel, installed alone in a clean environment."""

from __future__ import annotations

import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from .environments import REPOSITORY, UV, install, run

pytestmark = pytest.mark.slow


def test_wheel_contains_templates_and_sql(wheel: Path) -> None:
    """Every file of reports/ and sql/ is in the wheel, and no file of tests/ or benchmarks/."""
    names = set(zipfile.ZipFile(wheel).namelist())
    for top in ("reports", "sql"):
        files = [p for p in (REPOSITORY / top).rglob("*") if p.is_file()]
        assert files
        assert {f"slurm_affinode/_assets/{p.relative_to(REPOSITORY)}" for p in files} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_demo_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """Installed in an empty environment outside the checkout, the demo writes its page and summary."""
    programs = install(wheel, tmp_path / "env", "[analysis]")
    said = run(programs / "slurm-affinode", "demo", "--out", "demo", cwd=tmp_path)
    assert "demo/report.html" in said
    assert (tmp_path / "demo" / "report.html").stat().st_size > 20_000
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["total"]["gpu_hours_allocated"] > 0


def test_source_distribution_has_the_plugin(tmp_path: Path) -> None:
    """The plugin is built from source for the Slurm of each site."""
    run(UV, "build", "--quiet", "--sdist", "--out-dir", tmp_path, cwd=REPOSITORY)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for path in (*(REPOSITORY / "spank").glob("*.[ch]"), *(REPOSITORY / "spank").glob("tests/*.[ch]")):
        assert str(path.relative_to(REPOSITORY)) in names
    assert {"spank/Makefile", "spank/plugin.map"} <= names
