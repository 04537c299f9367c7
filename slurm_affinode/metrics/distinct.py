"""The distinct rows of a frame, such as the labels of series, each of which is converted once and occurs often."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

_FEW = 4
"""Runs of equal rows, or the rows of a cycle, are numbered instead of all rows if these are as many times more."""
_PROBED = 1000
"""All rows are compared only if as many show runs or a cycle."""


def distinct(rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.Series]:
    """Return the distinct rows in the order of their first occurrence, and for each row its place (UInt32) among them.

    Null equals null. Rows are compared by hash, several times faster than by value; the result is checked. Rows that
    repeat the one before, and those of a cycle, such as the GPUs of each scrape, need no hash.
    """
    filled = [column for column in rows if column.null_count() < len(column)] or rows.get_columns()[:1]
    if (starts := _runs(filled)) is not None:
        identities, row_numbers = _hashed(rows[starts], [column[starts] for column in filled])
        return identities, pl.Series("at", np.repeat(row_numbers.to_numpy(), np.diff(starts, append=len(rows))))
    if (length := _cycle(filled)) is not None:
        identities, row_numbers = _hashed(rows[:length], [column[:length] for column in filled])
        return identities, pl.Series("at", np.resize(row_numbers.to_numpy(), len(rows)))
    return _hashed(rows, filled)


def _runs(columns: list[pl.Series]) -> NDArray[np.int64] | None:
    """Return where runs of equal rows begin; None if there are many."""
    for count in (min(_PROBED, len(columns[0])), len(columns[0])):
        changed = np.zeros(count, np.bool_)
        changed[:1] = True
        for column in columns:
            changed[1:] |= column[1:count].ne_missing(column[: max(0, count - 1)]).to_numpy()
        if _FEW * np.count_nonzero(changed) > count:
            return None
    return np.flatnonzero(changed)


def _cycle(columns: list[pl.Series]) -> int | None:
    """Return the number of rows after which all rows repeat; None if there is no such number, or it is large."""
    count = len(columns[0])
    limit = count // _FEW
    again = np.ones(max(0, limit - 1), np.bool_)
    for column in columns:
        again &= column[1:limit].eq_missing(column[:1].new_from_index(0, len(again))).to_numpy()
    if not again.any():
        return None
    length = int(np.argmax(again)) + 1
    for following in (min(_PROBED, count - length), count - length):
        if not all(column[length : length + following].eq_missing(column[:following]).all() for column in columns):
            return None
    return length


def _hashed(rows: pl.DataFrame, filled: list[pl.Series]) -> tuple[pl.DataFrame, pl.Series]:
    """Return what ``distinct`` returns; ``filled``: columns with all values of ``rows`` that are not null."""
    hashes = pl.DataFrame(filled).hash_rows().alias("hash").to_frame()
    first = hashes.with_row_index("first").unique("hash", keep="first", maintain_order=True)
    numbered = first.select("hash").with_row_index("at")
    row_numbers = hashes.join(numbered, on="hash", how="left", maintain_order="left")["at"]
    first_rows = rows[first["first"]]
    if all(column.eq_missing(first_rows[column.name].gather(row_numbers)).all() for column in filled):
        return first_rows, row_numbers
    first_rows = rows.unique(maintain_order=True)
    numbered = first_rows.with_row_index("at")
    return first_rows, rows.join(numbered, on=rows.columns, how="left", nulls_equal=True, maintain_order="left")["at"]
