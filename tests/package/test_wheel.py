"""The wheel, installed alone in a clean environment."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
UV = shutil.which("uv") or str(REPOSITORY / ".uv" / "bin" / "uv")

pytestmark = pytest.mark.slow


def run(*argv: str | Path, cwd: Path) -> str:
    """Run a program and return its standard output; on failure, its standard error is the message."""
    done = subprocess.run([str(a) for a in argv], cwd=cwd, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout."""
    out = tmp_path_factory.mktemp("dist")
    run(UV, "build", "--quiet", "--wheel", "--out-dir", out, cwd=REPOSITORY)
    return next(out.glob("*.whl"))


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
    run(UV, "venv", "--quiet", "--python", sys.executable, "env", cwd=tmp_path)
    run(UV, "pip", "install", "--quiet", "--python", "env/bin/python", wheel, cwd=tmp_path)
    said = run(tmp_path / "env" / "bin" / "slurm-affinode", "demo", "--out", "demo", cwd=tmp_path)
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
