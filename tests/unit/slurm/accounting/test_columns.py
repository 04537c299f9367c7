"""The vectorized parsers agree with the parsers of single cells."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from unittest import mock

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.slurm import times, units
from slurm_affinode.slurm.accounting import sacct_columns
from slurm_affinode.slurm.accounting.sacct import read

spans = st.one_of(
    st.from_regex(r"([0-9]{1,3}-)?[0-9]{1,3}(:[0-9]{1,2}){0,3}(\.[0-9]{1,6})?", fullmatch=True),
    st.sampled_from(["", "UNLIMITED", "Partition_Limit", "x", "1-2-3"]),
)
sizes = st.one_of(
    st.from_regex(r"[0-9]{1,20}(\.[0-9]{1,3})?[KMGTPE]?[nc]?", fullmatch=True),
    st.sampled_from(["", "Unknown", "x", "K", "1KK", "18446744073709551614"]),
)
stamps = st.one_of(
    st.from_regex(r"202[0-9]-0[1-9]-[0-2][0-9]T[0-2][0-9](:[0-5][0-9]){2}(Z|[+-]0[0-9]:?[0-5][0-9])?", fullmatch=True),
    st.integers(10**9, 2 * 10**9).map(str),
    st.sampled_from(["", "Unknown", "None", "x", "2025-01-01", "2025-01-01T10:00", "2025-01-01T10:00:00.7"]),
)  # fmt: skip


def scalar(function: Callable[[str], object], cells: list[str]) -> tuple[list[object], set[int]]:
    """Return the results of the parser of single cells, and the positions of invalid cells."""
    values: list[object] = []
    bad: set[int] = set()
    for at, cell in enumerate(cells):
        try:
            values.append(function(cell))
        except (ValueError, OverflowError):
            values.append(None)
            bad.add(at)
    return values, bad


@given(st.lists(spans, max_size=20))
def test_durations_agree(cells: list[str]) -> None:
    values, bad = scalar(units.parse_duration_s, cells)
    seconds = sacct_columns.seconds(pl.Series(cells, dtype=pl.String))
    assert seconds.values.to_list() == pytest.approx(values)
    assert set(seconds.bad) == bad


@given(st.lists(sizes, max_size=20))
def test_sizes_agree(cells: list[str]) -> None:
    """Suffixes, fractions, and numbers that stand for "not set"."""

    def whole(text: str) -> int | None:
        memory = units.parse_memory(text)
        return None if memory is None else memory.size_bytes

    values, bad = scalar(whole, cells)
    result = sacct_columns.bytes_(pl.Series(cells, dtype=pl.String))
    assert result.values.to_list() == values
    assert set(result.bad) == bad


@given(st.lists(stamps, max_size=20))
def test_times_agree(cells: list[str]) -> None:
    """Local times, times with an offset, and epoch seconds are mixed in one column."""
    values, bad = scalar(times.normalise, cells)
    moments = sacct_columns.moments(pl.Series(cells, dtype=pl.String), "UTC")
    shown = [None if value is None else value.strftime("%Y-%m-%dT%H:%M:%S") for value in moments.values.to_list()]
    assert shown == [None if value is None else str(value).removesuffix("Z") for value in values]
    assert set(moments.bad) == bad


def test_counts_are_parsed() -> None:
    """Whole numbers, suffixes with powers of 1024, words for unknown, and invalid cells."""
    result = sacct_columns.whole(pl.Series(["1", "2K", "", None, "Unknown", "x", "18446744073709551614"]))
    assert result.values.to_list() == [1, 2048, None, None, None, None, None]
    assert list(result.bad) == [5]


@pytest.mark.parametrize(
    "rows", list(itertools.permutations(["1|FAILED|a", "2|FAILED|b|c", "3|FAILED", "4|TIMEOUT|d"]))
)
def test_long_and_short_line_are_not_taken_for_two_regular_ones(rows: tuple[str, ...]) -> None:
    """Together they have as many delimiters as two regular lines, but each is checked."""
    text = "JobID|State|JobName\n" + "".join(f"{row}\n" for row in rows)
    result = read(text.encode(), where="in")
    assert dict(result.jobs.select("job_id", "job_name").rows()) == {1: "a", 2: "b|c", 4: "d"}
    assert [problem.job for problem in result.problems] == ["3"]


@pytest.mark.parametrize(
    ("convert", "cell"),
    [
        (sacct_columns.seconds, "00:00:00"), (sacct_columns.seconds, "1-02:03:04"), (sacct_columns.seconds, "x"),
        (sacct_columns.seconds, "UNLIMITED"), (sacct_columns.whole, "12"), (sacct_columns.whole, "1.5K"),
        (sacct_columns.whole, ""), (sacct_columns.whole, "-"), (sacct_columns.bytes_, "7K"),
        (sacct_columns.bytes_, "9223372036854775807K"), (sacct_columns.bytes_, "1.5M"), (sacct_columns.bytes_, "xK"),
    ],
)  # fmt: skip
def test_cells_of_uniform_columns_are_converted_as_those_of_mixed_ones(
    convert: Callable[[pl.Series], sacct_columns.Typed], cell: str
) -> None:
    """Values and errors of a cell do not depend on whether all of the column has its value or its suffix."""
    uniform = convert(pl.Series("c", [cell] * 3))
    mixed = convert(pl.Series("c", [cell, cell, cell, "3", None]))
    assert uniform.values.to_list() == mixed.values.to_list()[:3]
    assert uniform.values.dtype == mixed.values.dtype
    assert uniform.bad == {at: why for at, why in mixed.bad.items() if at < 3}


def test_columns_of_one_value_are_converted_once() -> None:
    """Columns such as Suspended have one value; the conversion of a clock takes as long as splitting all fields."""
    with mock.patch.object(sacct_columns, "_fallback", wraps=sacct_columns._fallback) as fallback:
        assert sacct_columns.seconds(pl.Series("c", ["00:01:00"] * 1000)).values.sum() == 60_000
    assert [len(call.args[0]) for call in fallback.call_args_list] == [1]
