"""The distinct rows of a frame, such as the labels of series, each of which is converted once and occurs often."""

from __future__ import annotations

import polars as pl


def distinct(rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.Series]:
    """Return the distinct rows in the order of their first occurrence, and for each row its place (UInt32) among them.

    Null equals null. Rows are compared by hash, several times faster than by value; the result is checked.
    """
    filled = [column for column in rows if column.null_count() < len(column)] or rows.get_columns()[:1]
    hashes = pl.DataFrame(filled).hash_rows().alias("hash").to_frame()
    first = hashes.with_row_index("first").unique("hash", keep="first", maintain_order=True)
    numbered = first.select("hash").with_row_index("at")
    at = hashes.join(numbered, on="hash", how="left", maintain_order="left")["at"]
    known = rows[first["first"]]
    if all(column.eq_missing(known[column.name].gather(at)).all() for column in filled):
        return known, at
    known = rows.unique(maintain_order=True)
    numbered = known.with_row_index("at")
    return known, rows.join(numbered, on=rows.columns, how="left", nulls_equal=True, maintain_order="left")["at"]
