"""Columns of published CSV files: types, and errors that name file and line."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.traces import csv_columns

TYPES = {"n": pl.Float64(), "name": pl.String()}


def read(path: Path, text: str) -> list[dict[str, object]]:
    file = path / "f.csv"
    file.write_text(text)
    return csv_columns.read(file, TYPES, trace="the trace").to_dicts()


def test_columns_are_read_by_name(tmp_path: Path) -> None:
    """Empty cells and NaN are null; other columns are not read; the last line needs no end."""
    assert read(tmp_path, 'x,name,n\n1,"a",2.5\n,nan,\n\n3,b,NaN') == [
        {"line": 2, "n": 2.5, "name": "a"}, {"line": 3, "n": None, "name": None}, {"line": 5, "n": None, "name": "b"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"f\.csv: is empty"),
        ("n,name\n", r"f\.csv: is empty"),
        ("a,b\n1,2\n", r"f\.csv:1: no column n, name: not the file of the trace"),
        ("n,name\n1,a\n2,b,c\n", r"f\.csv:3: has another number of columns"),
        ("n,name\n1,a\n2", r"f\.csv:3: is cut off in its last line"),
        ("n,name\n1,a\nx1,b\n", r"f\.csv:3: n is not a number: x1"),
        ("n,name\ninf,b\n", r"f\.csv:2: n is not a number: inf"),
        ("n,name\n1,a\n-1e20,b\n", r"f\.csv:3: n is too large: -1e20"),
    ],
)
def test_bad_files_are_errors(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path, text)


def test_file_is_found_in_a_directory(tmp_path: Path) -> None:
    (tmp_path / "csv").mkdir()
    file = tmp_path / "csv" / "a.csv.gz"
    file.touch()
    assert csv_columns.located(tmp_path, "a.csv", trace="the trace") == file
    assert csv_columns.located(file, "b.csv", trace="the trace") == file
    with pytest.raises(InputError, match=r"has no b\.csv, the file of the trace"):
        csv_columns.located(tmp_path, "b.csv", trace="the trace")
