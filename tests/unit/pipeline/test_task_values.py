"""Values of tasks as bytes: round trips, digests that do not depend on the process, and bytes that others made."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_affinode.pipeline import task_values


@dataclass(frozen=True, slots=True)
class Sums:
    """A result."""

    total: int
    parts: Any = None


@dataclass(frozen=True)
class Stranger:
    """Not a result."""

    total: int


MOMENT = datetime(2026, 11, 2, 3, 4, 5, 678901, tzinfo=UTC)
FRAME = pl.DataFrame(
    {"device": [2**64 - 1, 0], "job": ["å", None], "empty": [None, ""], "activity": [float("nan"), -0.0],
     "known": [None, True], "time": [MOMENT, None], "day": [None, date(2026, 1, 1)]},
    schema={"device": pl.UInt64(), "job": pl.String(), "empty": pl.String(), "activity": pl.Float32(),
            "known": pl.Boolean(), "time": pl.Datetime("us", "UTC"), "day": pl.Date()},
)  # fmt: skip
VALUES = [
    None, True, 0, -(2**63), 2**63, 10**30, -0.0, float("inf"), "", "å\udcff", b"\0", (), (1, (2.5, "x")), [None, []],
    {"b": 1, "a": (2,)}, {5.0: Sums(1), 0.0: Sums(2, parts=[Sums(3)])}, frozenset({1, 2}), MOMENT,
    MOMENT.replace(tzinfo=None), MOMENT.date(), timedelta(days=-1, microseconds=7), Path("/a/b"), Sums(7, {"x": None}),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_are_read_back_with_their_types(value: object) -> None:
    again = task_values.decoded(task_values.encoded(value), [Sums])
    assert repr(again) == repr(value)
    assert type(again) is type(value)


def test_order_of_a_mapping_is_kept() -> None:
    again = task_values.decoded(task_values.encoded({"b": 1, "a": 2}), [])
    assert list(again) == ["b", "a"]


@pytest.mark.parametrize(
    "array",
    [np.arange(6).reshape(2, 3), np.array([], np.int32), np.zeros((0, 4)), np.array([np.nan, 1], np.float32),
     np.array([True, False]), np.arange(10)[::3], np.array(5, np.uint64)],
    ids=str,
)  # fmt: skip
def test_arrays_are_read_back(array: Any) -> None:
    again = task_values.decoded(task_values.encoded(array), [])
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(again, array)


def test_numbers_of_numpy_stay_such() -> None:
    again = task_values.decoded(task_values.encoded((np.float64(0.1), np.int32(7), np.bool_(True))), [])
    assert [type(value) for value in again] == [np.float64, np.int32, np.bool_]
    assert again == (0.1, 7, True)


@pytest.mark.parametrize("frame", [FRAME, FRAME.head(0), FRAME.tail(1), pl.DataFrame()], ids=["all", "no", "one", "-"])
def test_tables_are_read_back(frame: pl.DataFrame) -> None:
    again = task_values.decoded(task_values.encoded(frame), [])
    assert again.schema == frame.schema
    assert repr(again.rows()) == repr(frame.rows())


def test_table_in_pieces_has_the_bytes_of_a_whole_one() -> None:
    """Neither chunks nor what is in memory below a null are part of its value."""
    pieces = pl.concat([FRAME.head(1), FRAME.tail(1)], rechunk=False)
    hidden = FRAME.with_columns(pl.when(pl.col("known")).then("activity").alias("activity"))
    other = FRAME.with_columns(pl.lit(5.0, pl.Float32()).alias("x")).select(
        *(pl.col(name) for name in FRAME.columns if name != "activity"),
        pl.when(pl.col("known")).then(pl.lit(-0.0, pl.Float32())).alias("activity"),
    )  # fmt: skip
    assert task_values.encoded(pieces) == task_values.encoded(FRAME)
    assert task_values.encoded(hidden) == task_values.encoded(other.select(FRAME.columns))


def one_function(item: int, shared: int) -> int:
    """Do the work of a task."""
    return item + shared


def other_function(item: int, shared: int) -> int:
    """Do the work of another task."""
    return item - shared


def test_different_inputs_have_different_digests() -> None:
    """Also those whose bytes are the same without their lengths or types."""
    query = pl.LazyFrame({"a": [1, 2]})
    inputs = [
        (), ("",), ("", ""), ("ab", "c"), ("a", "bc"), (b"abc",), (1,), (1.0,), (True,), ((1,),), ([1],), (None,),
        ({1: 2},), (frozenset({1, 2}),), (np.arange(2),), (np.arange(2, dtype=np.int32),),
        (np.arange(2).reshape(1, 2),),
        (FRAME,), (FRAME["job"],), (FRAME.rename({"job": "user"}),), (FRAME.reverse(),), (MOMENT,), (MOMENT.date(),),
        (one_function,), (other_function,), (partial(one_function, 1),), (partial(one_function, 2),), (Sums(1),),
        (Stranger(1),), (Path("/a"),), ("/a",), (ZoneInfo("Europe/Berlin"),), (UTC,),
        (query,), (query.filter(pl.col("a") > 1),),
    ]  # fmt: skip
    assert len({task_values.digest(*values) for values in inputs}) == len(inputs)


_DIGEST = """
from datetime import date, timedelta
import polars as pl
from slurm_affinode.pipeline import task_values
days = frozenset(date(2026, 1, 1) + timedelta(days=number) for number in range(200))
names = {f"n{number}" for number in range(200)}
frame = pl.LazyFrame({"a": [1, 2], "node": ["x", None]}).filter(pl.col("node").is_in(sorted(names)))
print(task_values.digest(days, names, frame, task_values.digest))
"""


def test_digest_is_the_same_in_every_process() -> None:
    """Hashes of texts and dates, and so the order of sets, differ between processes."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", _DIGEST], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    "value", [object(), lambda: None, PurePosixPath, np.array(["x"]), np.array([None]), UTC, FRAME.lazy()], ids=range(7)
)
def test_what_is_not_data_is_no_result(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        task_values.decoded(task_values.encoded(value), [])


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(os.getcwd), task_values.encoded(Stranger(1)), task_values.encoded(Sums(1))[:-1],
        task_values.encoded(Sums(1)) + b"N", b"", b"?", b"(" * 100_000, b"(" + b"\x01" + b"\0" * 7,
        b"[" + b"\xff" * 7 + b"\x7f", b"s" + b"\xff" * 8, task_values.encoded(one_function),
        task_values.encoded(Sums(1)).replace(b"Sums", b"Nope"),
    ],
    ids=range(12),
)  # fmt: skip
def test_bytes_that_are_no_result_are_refused(content: bytes) -> None:
    """Other classes, functions, lengths beyond the end, nesting without end."""
    with pytest.raises(ValueError, match=r"."):
        task_values.decoded(content, [Sums])


def nested(depth: int) -> bytes:
    return (b"(" + (1).to_bytes(8, "little")) * depth + b"N"


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ValueError, match="damaged"):
        task_values.decoded(nested(100_000), [])


@given(st.data())
def test_damaged_bytes_are_a_value_or_refused(data: st.DataObject) -> None:
    """There is no other exception, and no memory that the bytes do not account for."""
    whole = task_values.encoded((VALUES, FRAME, np.arange(3), {1.0: Sums(1, FRAME["job"])}))
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    for damaged in (bytes(content), bytes(content[:cut])):
        with contextlib.suppress(ValueError):
            task_values.decoded(damaged, [Sums])


def test_lengths_beyond_the_text_are_rejected() -> None:
    """Their sum is 0 in 64 bits, and the text is empty."""
    pieces = ("x", str(pl.String()), None, np.full(4, 1 << 62), b"")
    content = b"S" + b"".join(map(task_values.encoded, pieces))
    with pytest.raises(ValueError, match="wrong length"):
        task_values.decoded(content, [])
