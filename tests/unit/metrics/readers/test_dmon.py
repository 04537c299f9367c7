"""The output of ``dcgmi dmon``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from slurm_affinode.metrics.readers import dmon
from slurm_affinode.metrics.readers.tables import TableReader

EIGHT = datetime(2026, 11, 1, 8, tzinfo=UTC)
Reader = Callable[..., Any]
UUID = "GPU-5c7e1b3a-0000-4000-8000-000000000000"


def test_dmon_text_fields_and_stop_message_are_read(read: Reader, tmp_path: Path) -> None:
    """GPU names contain spaces, ``ts`` also stamps empty lines, and the message on termination is not a bad line."""
    path = tmp_path / "dmon.txt"
    lines = (
        "#Entity   DVNAM                    UUID#                                     GPUTL",
        "ID",
        f"GPU 0     NVIDIA A100-SXM4-80GB    {UUID}  97",
        f"GPU 0     NVIDIA A100-SXM4-80GB    {UUID}  N/A",
        "",
        "dmon was stopped due to receiving a signal.",
    )
    path.write_text("".join(f"2026-11-01T08:00:0{second}+0000 {line}\n" for second, line in enumerate(lines)))
    result = read(path, node="gpu01", strict=True)
    assert [row["util_pct"] for row in result.rows] == [97.0, None]
    assert {(row["uuid"], row["model"], row["index"]) for row in result.rows} == {(UUID, "NVIDIA A100-SXM4-80GB", 0)}
    assert not result.notes.unknown


def test_dmon_output_is_read(read: Reader, recorded: Path) -> None:
    """Times come from start and interval, N/A is missing, headers repeat, MIG instances are devices."""
    result = read(recorded / "gpu" / "dmon.txt", node="gpu01", start=EIGHT, interval_s=30)
    assert result.format == "dmon"
    assert result.notes.problem_count == 0
    zero = [row for row in result.rows if row["index"] == 0]
    assert [(row["util_pct"], row["power_w"], row["xid"]) for row in zero] == [
        (96.0, 310.25, 0),
        (95.0, 309.0, 0),
        (0.0, 62.0, 13),
    ]
    assert [row["time"] for row in zero] == [EIGHT + timedelta(seconds=30 * n) for n in range(3)]
    mig = [row for row in result.rows if row["mig"] == "1"]
    assert [(row["util_pct"], row["engine_active"], row["fb_used_mib"]) for row in mig] == [
        (None, pytest.approx(0.7), 20000.0)
    ] * 3


def test_repeated_headers_do_not_split_the_table(read: Reader, tmp_path: Path) -> None:
    """Building a table takes as long as reading a thousand lines, and each sample may have a header."""
    path = tmp_path / "gpu01.txt"
    path.write_text("# Entity  GRACT\n      Id\n    GPU 0  0.5\n" * 50)
    with mock.patch.object(TableReader, "rows", autospec=True, side_effect=TableReader.rows) as rows:
        result = read(path, start=EIGHT, interval_s=30)
    assert len(result.rows) == 50
    assert rows.call_count == 1


def test_dmon_with_timestamps_needs_no_start(read: Reader, tmp_path: Path) -> None:
    """``ts`` prepends the timestamps."""
    path = tmp_path / "gpu01.txt"
    path.write_text(
        "2026-11-01T08:00:00+0000 # Entity  GRACT  TENSO\n2026-11-01T08:00:00+0000       Id\n"
        "2026-11-01T08:00:01+0000     GPU 0  0.5  0.25\n2026-11-01T08:00:02+0000     GPU 0  0.0  0.0\n"
    )
    rows = read(path).rows
    assert [(row["time"], row["engine_active"], row["tensor_active"]) for row in rows] == [
        (EIGHT + timedelta(seconds=1), 0.5, 0.25),
        (EIGHT + timedelta(seconds=2), 0.0, 0.0),
    ]


def test_dmon_keeps_counting_when_columns_change(read: Reader, tmp_path: Path) -> None:
    """Output with other fields was appended to the file; bad lines are reported, and other entities are skipped."""
    path = tmp_path / "gpu01.txt"
    path.write_text(
        "#Entity   GPUTL\nGPU 0     1\nGPU 0     2\nSwitch 0  7\nGPU 0\nnonsense\nFPGA 1   3\nGPU 0   1 2\n"
        "#Entity   POWER   GPUTL\nGPU 0     50.0    3\nGPU 0     51"
    )
    result = read(path, start=EIGHT, interval_s=10)
    assert [(row["util_pct"], (row["time"] - EIGHT).seconds) for row in result.rows] == [(1.0, 0), (2.0, 10), (3.0, 20)]
    assert [problem.line for problem in result.notes.problems] == [5, 6, 7, 8, 11]
    assert "unfinished" in result.notes.problems[-1].reason


@pytest.mark.parametrize("stamp", ["", "2026-11-01T08:00:{:02d}+0000 ", "[2026-11-01 08:00:{:02d}] "])
def test_rows_by_columns_are_those_of_single_lines(read: Reader, tmp_path: Path, stamp: str) -> None:
    """Plain rows are converted by columns. Order, values, and the problems with their lines are those of each line."""
    lines = (
        "#Entity   GPUTL   DVNAM   POWER", "ID                 W", "GPU 0     5       A100    60.5",
        "GPU 1     N/A     A100    N/A", "GPU-I 3   7       A100    N/A", "  GPU  0  6       A100    61  ",
        "GPU 1     8       NVIDIA A100  62.5", "GPU\t0\t9\tA100\t63", "VGPU 4    1       A100    2",
        "GPU 0     5       N/Ax    60.5", "GPU 0     5", "nonsense", "GPU 0     x       A100    60.5", "",
        "#Entity   GPUTL   DVNAM   POWER", "GPU 0     11      A100    60", "# Entity  POWER   GPUTL",
        "GPU 0     64.5    12", "GPU 1     65.5    N/A", "GPU 2     5       5       5", "GPU-I 3   1   2",
    )  # fmt: skip
    path = tmp_path / "dmon.txt"
    path.write_text("".join(f"{stamp.format(at)}{line}\n" for at, line in enumerate(lines)))
    how = {} if stamp else {"start": EIGHT, "interval_s": 30}
    quick = read(path, node="gpu01", **how)
    with mock.patch.object(dmon, "_plain_row", return_value="$^x"):
        slow = read(path, node="gpu01", **how)
    assert quick.rows == slow.rows
    assert quick.notes == slow.notes
    assert len(quick.rows) > 8
    assert quick.notes.problem_count > 3


def test_plain_rows_are_not_read_line_by_line(read: Reader, tmp_path: Path) -> None:
    """Also with a header for each sample."""
    path = tmp_path / "gpu01.txt"
    path.write_text("#Entity   GPUTL\nID\nGPU 0     1\nGPU 1     N/A\n" * 50)
    with mock.patch.object(dmon.DmonReader, "_row", side_effect=AssertionError):
        assert len(read(path, start=EIGHT, interval_s=30).rows) == 100


def test_even_blocks_are_those_of_single_rows(read: Reader, tmp_path: Path) -> None:
    """GPU instances, missing values, blank lines and spaces do not prevent reading a block by columns."""
    path = tmp_path / "gpu01.txt"
    scrape = (
        "#Entity   GPUTL   POWER\nID                W\nGPU 0     1  60.5\n  GPU 1     N/A  61\nGPU-I 3   N/A     5 \n\n"
    )
    path.write_text(scrape * 20)
    with mock.patch.object(dmon.DmonReader, "_rows", side_effect=AssertionError):
        even = read(path, start=EIGHT, interval_s=30)
    with mock.patch.object(dmon.DmonReader, "_even_rows", return_value=None):
        assert read(path, start=EIGHT, interval_s=30).rows == even.rows
    assert {(row["index"], row["mig"], row["util_pct"], row["power_w"]) for row in even.rows} == {
        (0, None, 1.0, 60.5), (1, None, None, 61.0), (None, "3", None, 5.0),
    }  # fmt: skip
    assert len(even.rows) == 60
    assert even.rows[-1]["time"] == EIGHT + timedelta(seconds=19 * 30)


@pytest.mark.parametrize("odd", ["GPU 0 5", "GPU 0 5N/AN/A 3", "GPUX 0 5 3", "GPU x 5 3", "nonsense", "GPU 0 \u00e9 3"])
def test_odd_line_is_reported_among_even_ones(read: Reader, tmp_path: Path, odd: str) -> None:
    path = tmp_path / "gpu01.txt"
    path.write_text("#Entity GPUTL POWER\n" + "GPU 0 1 60\n" * 5 + f"{odd}\n" + "GPU 0 1 60\n" * 5)
    result = read(path, start=EIGHT, interval_s=30)
    assert [problem.line for problem in result.notes.problems] == [7]
    assert len(result.rows) == 10
