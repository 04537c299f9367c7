"""Contents and requirements of the wheel; the packages install it alone (``tests/cluster/test_packages.py``)."""

from __future__ import annotations

import email
import zipfile
from pathlib import Path

import pytest

from slurm_affinode.base import compiled
from slurm_affinode.base.extras import LIBRARIES

from .environments import REPOSITORY

pytestmark = pytest.mark.slow


def test_wheel_contains_templates_sql_and_libraries(wheel: Path) -> None:
    """Every file of reports/ and sql/ is in the wheel, and no file of tests/ or benchmarks/."""
    names = set(zipfile.ZipFile(wheel).namelist())
    for top in ("reports", "sql"):
        files = [p for p in (REPOSITORY / top).rglob("*") if p.is_file()]
        assert files
        assert {f"slurm_affinode/_assets/{p.relative_to(REPOSITORY)}" for p in files} <= names
    assert {f"slurm_affinode/{directory}/{name}" for directory, name in compiled.LIBRARIES.items()} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_extra_requires_its_libraries(wheel: Path) -> None:
    """The report machine gets what a command without the extra names."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra == 'analysis'" in line]
    assert {line.partition(">")[0] for line in required} == set(LIBRARIES)
