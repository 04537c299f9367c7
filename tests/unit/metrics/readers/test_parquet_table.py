"""Parquet files: column names, types, time zones, and damage."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slurm_affinode.base.errors import InputError

EIGHT = datetime(2026, 11, 1, 8, tzinfo=UTC)
Reader = Callable[..., Any]


def test_parquet_with_schema_columns_is_read_unchanged(
    read: Reader, samples: Callable[..., pl.DataFrame], tmp_path: Path
) -> None:
    frame = samples([0.0, None, 12.5], power_w=60.25, job="7", index=2, pci="00000000:07:00.0", xid=0)
    path = tmp_path / "s.parquet"
    frame.write_parquet(path)
    result = read(path)
    assert result.format == "parquet"
    assert [row["util_pct"] for row in result.rows] == [0.0, None, 12.5]
    assert pl.DataFrame(result.rows, schema=frame.schema).equals(frame)


def test_parquet_with_alias_names_and_other_types_is_read(read: Reader, tmp_path: Path) -> None:
    """Covers integers, lists of jobs, and naive times in the given zone."""
    path = tmp_path / "s.parquet"
    frame = pl.DataFrame(
        {"timestamp": [datetime(2026, 11, 1, 9)]  # noqa: DTZ001 - a file without a zone
, "Hostname": ["n1.x"], "gpu": [3], "DCGM_FI_DEV_GPU_UTIL": [7],
         "DCGM_FI_DEV_FB_USED_BYTES": [2**30], "hpc_job": [["8", "7"]], "other": [1]}
    )  # fmt: skip
    frame.write_parquet(path)
    (row,) = read(path, zone="Europe/Oslo").rows
    assert (row["time"], row["node"], row["index"], row["util_pct"]) == (EIGHT, "n1", 3, 7.0)
    assert (row["fb_used_mib"], row["job"]) == (1024.0, "7,8")


def test_numbers_and_times_are_those_of_text(read: Reader, tmp_path: Path) -> None:
    """Values of these types are not converted to text and back."""
    times = pl.Series([EIGHT, EIGHT + timedelta(milliseconds=1500)], dtype=pl.Datetime("us", "UTC"))
    typed = pl.DataFrame({"time": times, "node": "n1", "index": 0, "util": [7, None], "power": [math.nan, 0.1]})
    text = typed.with_columns(pl.col("time").dt.to_string("iso:strict"), pl.col("util", "power").cast(pl.String))
    finer = typed.with_columns(pl.col("time").dt.cast_time_unit("ns"))
    for name, frame in (("typed", typed), ("text", text), ("ns", finer)):
        frame.write_parquet(tmp_path / f"{name}.parquet")
    rows = read(tmp_path / "typed.parquet").rows
    assert [(row["util_pct"], row["power_w"]) for row in rows] == [(7.0, None), (None, pytest.approx(0.1))]
    assert [row["time"] for row in rows] == times.to_list()
    assert read(tmp_path / "text.parquet").rows == rows
    assert read(tmp_path / "ns.parquet").rows == rows


@pytest.mark.parametrize("zone", ["+05:30", "-07:00", "Europe/Oslo", "UTC"])
def test_parquet_times_in_any_zone_are_read(read: Reader, tmp_path: Path, zone: str) -> None:
    """pandas writes the zone of ``2026-11-01T09:00:00+01:00`` as ``+01:00``."""
    path = tmp_path / "s.parquet"
    time = pa.array([int(EIGHT.timestamp() * 1e6)], pa.timestamp("us", zone))
    pq.write_table(pa.table({"time": time, "node": ["n"], "uuid": ["GPU-1"], "util": [5]}), path)
    assert [(row["time"], row["util_pct"]) for row in read(path).rows] == [(EIGHT, 5.0)]


@pytest.mark.parametrize(
    ("dtype", "good", "far"),
    [
        (pl.Datetime("ms"), 1793520000000, 2**62), (pl.Datetime("us", "UTC"), 1793520000000000, -(2**62)),
        (pl.Datetime("ms"), 1793520000000, -(2**63)), (pl.Datetime("ns"), 1793520000000000000, 2**63 - 1),
        (pl.Date(), 20758, 2**30),
    ],
)  # fmt: skip
def test_parquet_with_out_of_range_times_is_reported(
    read: Reader, tmp_path: Path, dtype: pl.DataType, good: int, far: int
) -> None:
    """Values that some databases use for "no time" are bad lines, as in text."""
    path = tmp_path / "s.parquet"
    times = pl.Series([far, good]).cast(pl.Int32 if dtype == pl.Date else pl.Int64).cast(dtype)
    pl.DataFrame({"time": times, "node": "n1", "index": 0, "util_pct": [1.0, 2.0]}).write_parquet(path)
    result = read(path)
    assert [row["util_pct"] for row in result.rows] == [2.0]
    assert result.notes.problem_count == 1


def test_parquet_without_rows_is_rejected(read: Reader, samples: Callable[..., pl.DataFrame], tmp_path: Path) -> None:
    """The error does not blame the columns, which are known."""
    path = tmp_path / "s.parquet"
    samples([0.0]).clear().write_parquet(path)
    with pytest.raises(InputError, match="has columns and no rows"):
        read(path)


def test_parquet_with_duplicate_columns_is_rejected(read: Reader, tmp_path: Path) -> None:
    """It is unknown which of them to use."""
    path = tmp_path / "s.parquet"
    columns = [pa.array([1793520000]), pa.array(["n"]), pa.array(["GPU-1"]), pa.array([5]), pa.array([6])]
    pq.write_table(pa.Table.from_arrays(columns, names=["time", "node", "uuid", "util", "util"]), path)
    with pytest.raises(InputError, match=r"s\.parquet: has 2 columns called util"):
        read(path)


def test_parquet_with_invalid_utf8_is_rejected(read: Reader, tmp_path: Path) -> None:
    """The invalid bytes are detected before any code relies on valid text."""
    path = tmp_path / "s.parquet"
    node = pa.StringArray.from_buffers(1, pa.array([b"\xff\xfe\xfd"]).buffers()[1], pa.py_buffer(b"\xff\xfe\xfd"))
    pq.write_table(pa.table({"time": [1793520000], "node": node, "uuid": ["GPU-1"], "util": [5]}), path)
    with pytest.raises(InputError, match="damaged or not a Parquet"):
        read(path)


def test_damaged_parquet_file_is_rejected(read: Reader, tmp_path: Path) -> None:
    """A file without a metric is rejected, too."""
    path = tmp_path / "s.parquet"
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(InputError, match="damaged or not a Parquet"):
        read(path)
    pl.DataFrame({"a": [1]}).write_parquet(path)
    with pytest.raises(InputError, match="no column is a GPU metric"):
        read(path)
