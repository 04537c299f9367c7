"""Lines of CSV in which quotes need no understanding, as columns: several times faster than ``csv.reader``."""

from __future__ import annotations

import csv
import re

import polars as pl


def plain_lines(lines: pl.DataFrame, delimiter: str) -> pl.DataFrame | None:
    """``line`` and ``number`` without lines that are blank, quotes, and spaces before a cell.

    None where the cells are not what stands between the delimiters: one in quotes holds a delimiter, a quote or a line
    end, or only a part of it is in quotes.
    """
    text, mark = lines["line"], re.escape(delimiter)
    if text.str.contains("\r", literal=True).any() or (text.str.len_bytes() > csv.field_size_limit()).any():
        return None
    if text.str.contains('"', literal=True).any():
        cell = f'(?: *"[^"{mark}]*"|[^"{mark}]*)'
        if not text.str.contains(f"^{cell}(?:{mark}{cell})*$").all():
            return None
        text = text.str.replace_all('"', "", literal=True)
    # Of one space after each delimiter, as nvidia-smi has them, the expression is the slow way.
    text = text.str.replace_all(f"{delimiter} ", delimiter, literal=True)
    if text.str.contains(f"(?:^|{mark}) ").any():
        text = text.str.replace_all(f"(^|{mark}) +", "${1}")
    return lines.with_columns(text.alias("line")).filter(pl.col("line").str.contains(rf"[^\s{mark}]"))


def doubtful(lines: pl.DataFrame, delimiter: str) -> pl.Series:
    """Which of ``plain_lines`` have no cell that begins with a digit, and so may be a header."""
    return ~lines["line"].str.contains(rf"(?:^|{re.escape(delimiter)})\d")


def columns(lines: pl.DataFrame, delimiter: str, count: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """``c0``, ``c1``, ... and ``number`` of the lines that have ``count`` cells; and the other lines."""
    fits = lines["line"].str.count_matches(delimiter, literal=True) == count - 1
    good = lines.filter(fits)
    # split_exact cannot split into one part.
    cells = good["line"].str.split_exact(delimiter, count - 1).struct.unnest() if count > 1 else good.select("line")
    cells.columns = [f"c{at}" for at in range(count)]
    return cells.with_columns(good["number"]), lines.filter(~fits)
