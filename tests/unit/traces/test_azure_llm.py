"""The Azure LLM inference traces: formats of the years, offsets, bad rows."""

from __future__ import annotations

import bz2
import gzip
import lzma
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.traces import azure_llm


def write(tmp_path: Path, *rows: str, header: str = "TIMESTAMP,ContextTokens,GeneratedTokens") -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


@pytest.mark.parametrize(
    "text",
    [
        "2023-11-16 18:17:03.9799600",
        "2023-11-16 18:17:03.979960",
        "2023-11-16 18:17:03.979960+00:00",
        "2023-11-16T18:17:03.97996Z",
        "2023-11-16 20:17:03.979960+02:00",
        "2023-11-16 13:47:03.979960-0430",
    ],
)
def test_times_of_all_releases_are_read(tmp_path: Path, text: str) -> None:
    result = azure_llm.read(write(tmp_path, f"{text},4808,10"))
    assert result.requests["time"][0] == datetime(2023, 11, 16, 18, 17, 3, 979960, tzinfo=UTC)
    assert result.problems == ()


def test_time_without_fraction_is_read(tmp_path: Path) -> None:
    result = azure_llm.read(write(tmp_path, "2024-05-10 00:00:01+00:00,1,2"))
    assert result.requests["time"][0] == datetime(2024, 5, 10, 0, 0, 1, tzinfo=UTC)


def test_images_are_read_where_the_trace_has_them(tmp_path: Path) -> None:
    header = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens"
    result = azure_llm.read(write(tmp_path, "2025-01-01 00:00:00,3,10,20", header=header))
    assert result.requests.row(0)[1:] == (10, 20, 3)
    assert azure_llm.read(write(tmp_path, "2025-01-01 00:00:00,10,20")).requests["images"][0] is None


def test_rows_are_sorted_by_time_and_bad_ones_reported_by_line(tmp_path: Path) -> None:
    rows = ["2025-01-01 00:00:05,1,2", "yesterday,1,2", "2025-01-01 00:00:01,,2", "2025-01-01 00:00:01,-1,2",
            "2025-01-01 00:00:02,3,4", *["x,y,z"] * 5]  # fmt: skip
    result = azure_llm.read(write(tmp_path, *rows))
    assert result.requests["context"].to_list() == [3, 1]
    assert (result.rows, result.requests["time"].diff()[1]) == (10, timedelta(seconds=3))
    assert [problem.split(": ")[1] for problem in result.problems[:3]] == ["line 3", "line 4", "line 5"]
    assert "3 more" in result.problems[-1]


TEXT = "TIMESTAMP,ContextTokens,GeneratedTokens\n2025-01-01 00:00:05,1,2\n2025-01-01 00:00:06,3,4\n"


def test_requests_of_the_same_time_do_not_have_the_order_of_the_file(tmp_path: Path) -> None:
    rows = ["2025-01-01 00:00:05,7,2", "2025-01-01 00:00:05,3,9", "2025-01-01 00:00:05,3,4"]
    expected = [(3, 4), (3, 9), (7, 2)]
    for order in (rows, rows[::-1]):
        assert azure_llm.read(write(tmp_path, *order)).requests.select("context", "generated").rows() == expected


@pytest.mark.parametrize("ending", ["gz", "bz2", "xz"])
def test_compressed_file_is_read(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"AzureLLMInferenceTrace_conv.csv.{ending}"
    packed = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[ending](TEXT.encode())
    path.write_bytes(packed)
    result = azure_llm.read(path)
    assert (result.name, result.requests.height) == ("AzureLLMInferenceTrace_conv", 2)


@pytest.mark.parametrize(
    "content",
    [TEXT.encode("utf-8-sig"), TEXT.encode("utf-16"), TEXT.replace("\n", "\r\n").encode(),
     TEXT.replace("\n", "\r").encode(), TEXT.rstrip("\n").encode(), TEXT.replace("2025", '"2025', 1).encode()],
    ids=["BOM", "UTF-16", "CRLF", "CR", "open last line", "open quote"],
)  # fmt: skip
def test_encodings_line_ends_and_quotes_lose_no_row(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    result = azure_llm.read(path)
    assert (result.requests["context"].to_list(), result.problems) == ([1, 3], ())


def test_wildcards_in_a_file_name_are_literal(tmp_path: Path) -> None:
    path = tmp_path / "a[1]*.csv"
    path.write_text(TEXT)
    assert azure_llm.read(path).requests.height == 2


@pytest.mark.parametrize("time", ["0001-01-01 00:00:00+05:00", "9999-12-31 23:59:59-05:00", "1969-12-31 23:59:59"])
def test_time_outside_the_years_of_the_traces_is_skipped(tmp_path: Path, time: str) -> None:
    result = azure_llm.read(write(tmp_path, "2025-01-01 00:00:05,1,2", f"{time},1,2"))
    assert (result.requests.height, len(result.problems)) == (1, 1)


@pytest.mark.parametrize("row", ["2025-01-01 00:00:07,5", "2025-01-01 00:00:07,5,6,7", "2025-01-01 00:00:07,\0,6",
                                 "2025-01-01 00:00:07,5,2147483648"])  # fmt: skip
@pytest.mark.parametrize("end", ["\n", ""])
def test_row_of_another_shape_is_skipped_and_reported_by_line(tmp_path: Path, row: str, end: str) -> None:
    """Too few or too many cells, a NUL byte, and a count whose sum would not fit into 64 bits."""
    path = tmp_path / "trace.csv"
    path.write_text(TEXT + row + end)
    result = azure_llm.read(path)
    assert (result.requests.height, result.rows) == (2, 3)
    assert [problem.split(": ")[1] for problem in result.problems] == ["line 4"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a,b\n1,2\n", "no column TIMESTAMP, ContextTokens, GeneratedTokens"),
     (b"TIMESTAMP,ContextTokens\n", "no column GeneratedTokens"),
     (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "no row"),
     (b"TIMESTAMP,ContextTokens,GeneratedTokens\nx,y,z\n", "no row"), (b"", "is empty"), (b"\n\n", "is empty"),
     (gzip.compress(TEXT.encode(), mtime=0)[:-12], "is cut off or damaged"),
     (b"\x1f\x8b\x08nonsense", "is cut off or damaged")],
)  # fmt: skip
def test_other_file_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        azure_llm.read(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        azure_llm.read(tmp_path / "gone.csv")
    with pytest.raises(InputError, match="is a directory"):
        azure_llm.read(tmp_path)


def test_published_trace_has_known_number_of_requests(shared_data: Path) -> None:
    result = azure_llm.read(shared_data / "azure" / "AzureLLMInferenceTrace_code.csv")
    assert (result.rows, result.requests.height, result.problems) == (8819, 8819, ())
    assert result.requests["time"].dt.date().unique().to_list() == [datetime(2023, 11, 16, tzinfo=UTC).date()]
