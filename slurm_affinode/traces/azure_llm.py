"""Reader of the Azure LLM inference traces (``Azure/AzurePublicDataset``): 2023, 2024, and LMM 2025 with images.

A file is CSV, plain or compressed, with ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``, in 2025 ``NumImages``.
Times have up to nine digits of a fraction, and an offset or none; without one they are UTC.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.text import one_line
from slurm_affinode.metrics.readers.csv_table import columns
from slurm_affinode.metrics.readers.lines import blocks

REQUESTS: dict[str, pl.DataType] = {
    "time": pl.Datetime("us", "UTC"),
    "context": pl.Int64(),  # tokens of the prompt
    "generated": pl.Int64(),  # tokens of the answer
    "images": pl.Int64(),  # images in the prompt; None: not in this trace
}
"""Columns of a request, in the order of arrival."""

MOST_TOKENS = 2**31 - 1
"""Largest count that is read, so that sums over a trace fit into 64 bits."""
_NEEDED = {"time": "TIMESTAMP", "context": "ContextTokens", "generated": "GeneratedTokens"}
_NAMES = {**_NEEDED, "images": "NumImages"}
_OFFSET = r"(?:Z|[+-]\d{2}:?\d{2})$"
_YEARS = (1970, 2999)
"""Years of usable times: Python has none of the year 0, to which an offset may lead."""
_SHOWN = 5
_FILE = re.compile(r"(?!\._).+\.csv(?:\.(?:gz|bz2|xz|zst))?", re.IGNORECASE)
"""Files of a directory that are read; macOS writes attributes beside a file as ``._name``."""


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The requests of one file."""

    name: str
    """File name without its endings."""
    requests: pl.DataFrame
    """Schema ``REQUESTS``, sorted by all columns: the order of the file has no influence."""
    rows: int
    """Rows of the file, good and bad."""
    problems: tuple[str, ...]
    """Rows that could not be used: the first ones by line, and how many more."""


def files(paths: Iterable[Path]) -> list[Path]:
    """Return the files of ``paths``: those below a directory are the CSV files, plain or compressed, sorted.

    Raises ``InputError`` for a directory without such a file, or that cannot be read.
    """
    tables: list[Path] = []
    for path in paths:
        try:
            if not path.is_dir():
                tables.append(path)
                continue
            parts = sorted(file for file in path.rglob("*") if _FILE.fullmatch(file.name) and file.is_file())
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from error
        if not parts:
            raise InputError("no CSV file in this directory", where=str(path))
        tables += parts
    return tables


def read(path: Path) -> RequestTrace:
    """Read one file. Raises ``InputError`` if it cannot be read, is another format, or has no usable row."""
    where = str(path)
    header: list[str] | None = None
    shown: list[int] = []
    skipped = 0
    frames = [pl.DataFrame(schema=REQUESTS)]

    def skip(*lines: int) -> None:
        nonlocal shown, skipped
        shown = sorted((*shown, *lines))[:_SHOWN]
        skipped += len(lines)

    for block in blocks(path, where, reject=lambda line, why, data: skip(line)):
        # No cell of a trace contains a comma, so quotes have no meaning.
        text = block.lines.with_columns(pl.col("line").str.replace_all('"', "", literal=True))
        lines = text.filter(pl.col("line").str.contains(r"\S"))
        if header is None and len(lines):
            header = _header(lines["line"][0], where)
            lines = lines[1:]
        if header is None:
            continue
        cells, irregular = columns(lines, ",", len(header))
        rows = cells.select("number", *(value.alias(name) for name, value in _values(header).items()))
        usable = pl.all_horizontal(pl.col(name).is_not_null() for name in _NEEDED)
        skip(*irregular["number"], *rows.filter(~usable)["number"])
        frames.append(rows.filter(usable).select(*REQUESTS))
    # The order of the file does not decide between requests of the same time.
    good = pl.concat(frames).sort(*REQUESTS)
    if header is None:
        raise InputError("is empty", where=where)
    if good.is_empty():
        raise InputError("no row with a time and two counts of tokens", where=where)
    problems = [f"{where}: line {line}: no time or no count of tokens; skipped" for line in shown]
    if skipped > len(shown):
        problems.append(f"{where}: {skipped - len(shown):,} more such lines")
    return RequestTrace(path.name.split(".")[0], good, good.height + skipped, tuple(problems))


def _header(line: str, where: str) -> list[str]:
    """Return the lower-case names of the columns. Raises ``InputError`` if one that is needed is missing."""
    names = [name.strip().lower() for name in line.split(",")]
    missing = [name for name in _NEEDED.values() if name.lower() not in names]
    if missing:
        raise InputError(
            f"no column {', '.join(missing)}: not a trace of requests", where=where,
            hint=f"it begins with {one_line(line, 80)}",
        )  # fmt: skip
    return names


def _values(header: list[str]) -> dict[str, pl.Expr]:
    """Return an expression for each column of ``REQUESTS`` over the columns ``c0``, ``c1``, ...; null if unusable."""
    cell = {
        name: pl.col(f"c{header.index(title.lower())}").str.strip_chars()
        for name, title in _NAMES.items() if title.lower() in header
    }  # fmt: skip
    raw = cell["time"]
    offset = raw.str.extract(rf"({_OFFSET})").str.replace("Z", "+0000").str.replace(":", "")
    hours, minutes = (offset.str.slice(start, 2).cast(pl.Int64, strict=False) for start in (1, 3))
    sign = pl.when(offset.str.starts_with("-")).then(-1).otherwise(1)
    seconds = pl.when(offset.is_null()).then(0).otherwise((hours * 3600 + minutes * 60) * sign)
    # Polars reads fractions of up to nine digits; offsets only where every row has one.
    local = raw.str.replace(_OFFSET, "").str.replace("T", " ").str.to_datetime(
        "%Y-%m-%d %H:%M:%S%.f", time_unit="us", strict=False
    )  # fmt: skip
    time = (local - pl.duration(seconds=seconds)).dt.replace_time_zone("UTC")
    time = pl.when(time.dt.year().is_between(*_YEARS)).then(time)
    return {"time": time, **{name: _count(cell.get(name)) for name in REQUESTS if name != "time"}}


def _count(text: pl.Expr | None) -> pl.Expr:
    if text is None:
        return pl.lit(None, pl.Int64)
    number = text.cast(pl.Int64, strict=False)
    return pl.when(number.is_between(0, MOST_TOKENS)).then(number)
