"""The distinct rows of a frame, and where they occur."""

from __future__ import annotations

from unittest import mock

import polars as pl
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from slurm_affinode.metrics.distinct import distinct

ROWS = st.lists(st.tuples(st.sampled_from(("", "a", "b", None)), st.sampled_from((0, 1, None))), max_size=20)


def frame_of(rows: list[tuple[str | None, int | None]]) -> pl.DataFrame:
    """Return a frame of these rows."""
    return pl.DataFrame(rows, schema={"text": pl.String(), "number": pl.Int64()}, orient="row")


@given(ROWS)
def test_rows_are_those_of_their_places(rows: list[tuple[str | None, int | None]]) -> None:
    """Each row occurs once, in the order of the first occurrence; null equals null."""
    frame = frame_of(rows)
    known, at = distinct(frame)
    assert known.rows() == list(dict.fromkeys(rows))
    assert_frame_equal(known[at], frame)


@given(ROWS, st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_repeated_rows_are_those_of_their_places(
    rows: list[tuple[str | None, int | None]], each: int, times: int, odd: bool
) -> None:
    """So it is if rows repeat the one before, or all of them repeat in a cycle, which may be broken."""
    rows = [row for row in rows for _ in range(each)] * times + [("odd", 2)] * odd + rows[:1]
    frame = frame_of(rows)
    known, at = distinct(frame)
    assert known.rows() == list(dict.fromkeys(rows))
    assert_frame_equal(known[at], frame)


@given(ROWS)
def test_rows_with_the_same_hash_are_distinguished(rows: list[tuple[str | None, int | None]]) -> None:
    """The rows are compared, too."""
    frame = frame_of(rows)
    expected = distinct(frame)
    with mock.patch.object(pl.DataFrame, "hash_rows", lambda frame: pl.zeros(len(frame), pl.UInt64, eager=True)):
        known, at = distinct(frame)
    assert_frame_equal(known, expected[0])
    assert at.to_list() == expected[1].to_list()
