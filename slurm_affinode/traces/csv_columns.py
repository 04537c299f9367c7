"""Named columns of a CSV file with a header, in the types that they are declared with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.text import one_line
from slurm_affinode.metrics.readers.csv_table import columns
from slurm_affinode.metrics.readers.lines import LineBlock, blocks

_EMPTY = ("", "nan", "none", "null")
"""Cells without a value, in lower case."""
_MOST = 2.0**53
"""Largest number that is read: above, not every whole number has a floating-point number of its own."""


def read(path: Path, types: Mapping[str, pl.DataType], *, trace: str) -> pl.DataFrame:
    """Return the columns of ``types``, and ``line``, the number of the line.

    Columns of the file that ``types`` does not name are not read. A cell that is empty or NaN is null. Raises
    ``InputError`` if the file cannot be read, lacks a column, is empty or cut off, or has a line with another number
    of cells or a cell that is not of its type: these are published files, of which every line is known to be good.
    """
    where = str(path)
    frames = list(typed(blocks(path, where), None, types, where=where, trace=trace))
    if not any(frame.height for frame in frames):
        raise InputError("is empty: it has no row", where=where)
    return pl.concat(frames)


def typed(
    lines: Iterable[LineBlock], header: list[str] | None, types: Mapping[str, pl.DataType], *, where: str, trace: str
) -> Iterator[pl.DataFrame]:
    """Yield the columns of ``types`` and ``line`` of blocks of lines; without a ``header``, the first line is it.

    Raises ``InputError`` as ``read`` does.
    """
    for block in lines:
        rows = block.lines.filter(pl.col("line").str.strip_chars() != "")
        if header is None and rows.height:
            header = _header(rows["line"][0], types, where, trace)
            rows = rows[1:]
        if header is None:
            continue
        cells, irregular = columns(rows, ",", len(header))
        for number in irregular["number"].head(1):
            block.cut_off(number, where)
            raise InputError(f"has another number of columns than its header, {len(header)}", where=f"{where}:{number}")
        yield _typed(cells, header, types, where)


def _header(line: str, types: Mapping[str, pl.DataType], where: str, trace: str) -> list[str]:
    names = [name.strip().strip('"') for name in line.split(",")]
    missing = [name for name in types if name not in names]
    if missing:
        raise InputError(
            f"no column {', '.join(missing)}: not the file of {trace}", where=f"{where}:1",
            hint=f"it begins with {one_line(line, 80)}",
        )  # fmt: skip
    return names


def _typed(cells: pl.DataFrame, header: list[str], types: Mapping[str, pl.DataType], where: str) -> pl.DataFrame:
    text = {name: pl.col(f"c{header.index(name)}").str.strip_chars().str.strip_chars('"') for name in types}
    values = cells.select(
        pl.col("number").cast(pl.Int64).alias("line"),
        *(pl.when(~cell.str.to_lowercase().is_in(_EMPTY)).then(cell).alias(name) for name, cell in text.items()),
    )
    # Whole numbers may be written as 5.0.
    typed = values.select(
        "line",
        *(
            pl.col(name) if dtype == pl.String() else pl.col(name).cast(pl.Float64, strict=False).alias(name)
            for name, dtype in types.items()
        ),
    )
    for name in types:
        if typed[name].dtype == pl.String():
            continue
        bad = typed.filter(values[name].is_not_null() & ~(pl.col(name).abs() <= _MOST).fill_null(value=False))
        if bad.height:
            cell, number = values.filter(pl.col("line") == bad["line"][0])[name][0], bad[name][0]
            problem = "is not a number" if number is None or math.isinf(number) else "is too large"
            raise InputError(f"{name} {problem}: {one_line(cell, 40)}", where=f"{where}:{bad['line'][0]}")
    return typed


def located(path: Path, *names: str, trace: str) -> Path:
    """Return ``path``, or the first of ``names`` in it if it is a directory. Raises ``InputError`` if there is none."""
    if not path.is_dir():
        return path
    file = inside(path, *names)
    if file is None:
        raise InputError(f"has no {names[0]}, the file of {trace}", where=str(path))
    return file


def inside(directory: Path, *names: str) -> Path | None:
    """Return the first of ``names`` in a directory or its ``csv/``, plain or compressed; ``None`` without one."""
    candidates = (
        directory / folder / f"{name}{ending}" for name in names for folder in ("", "csv")
        for ending in ("", ".gz", ".zst", ".xz", ".bz2")
    )  # fmt: skip
    return next((file for file in candidates if file.is_file()), None)
