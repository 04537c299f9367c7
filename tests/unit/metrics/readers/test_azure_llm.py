"""The Azure LLM inference traces: formats of the years, offsets, bad rows."""

from __future__ import annotations

import gzip
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.metrics.readers import azure_llm


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
    found = azure_llm.read(write(tmp_path, f"{text},4808,10"))
    assert found.requests["time"][0] == datetime(2023, 11, 16, 18, 17, 3, 979960, tzinfo=UTC)
    assert found.problems == ()


def test_time_without_fraction_is_read(tmp_path: Path) -> None:
    found = azure_llm.read(write(tmp_path, "2024-05-10 00:00:01+00:00,1,2"))
    assert found.requests["time"][0] == datetime(2024, 5, 10, 0, 0, 1, tzinfo=UTC)


def test_images_are_read_where_the_trace_has_them(tmp_path: Path) -> None:
    header = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens"
    found = azure_llm.read(write(tmp_path, "2025-01-01 00:00:00,3,10,20", header=header))
    assert found.requests.row(0)[1:] == (10, 20, 3)
    assert azure_llm.read(write(tmp_path, "2025-01-01 00:00:00,10,20")).requests["images"][0] is None


def test_rows_are_sorted_by_time_and_bad_ones_reported_by_line(tmp_path: Path) -> None:
    rows = ["2025-01-01 00:00:05,1,2", "yesterday,1,2", "2025-01-01 00:00:01,,2", "2025-01-01 00:00:01,-1,2",
            "2025-01-01 00:00:02,3,4", *["x,y,z"] * 5]  # fmt: skip
    found = azure_llm.read(write(tmp_path, *rows))
    assert found.requests["context"].to_list() == [3, 1]
    assert (found.rows, found.requests["time"].diff()[1]) == (10, timedelta(seconds=3))
    assert [one.split(": ")[1] for one in found.problems[:3]] == ["line 3", "line 4", "line 5"]
    assert "3 more" in found.problems[-1]


def test_compressed_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "AzureLLMInferenceTrace_conv.csv.gz"
    path.write_bytes(gzip.compress(b"TIMESTAMP,ContextTokens,GeneratedTokens\n2025-01-01 00:00:05,1,2\n"))
    found = azure_llm.read(path)
    assert (found.name, found.requests.height) == ("AzureLLMInferenceTrace_conv", 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a,b\n1,2\n", "not a trace of requests"), (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "no row"),
     (b"TIMESTAMP,ContextTokens,GeneratedTokens\nx,y,z\n", "no row"), (b"", "cannot be read"),
     (b"\x1f\x8b\x08nonsense", "cannot be read|not a trace")],
)  # fmt: skip
def test_other_file_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        azure_llm.read(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        azure_llm.read(tmp_path / "gone.csv")


def test_published_trace_has_known_number_of_requests(shared_data: Path) -> None:
    found = azure_llm.read(shared_data / "azure" / "AzureLLMInferenceTrace_code.csv")
    assert (found.rows, found.requests.height, found.problems) == (8819, 8819, ())
    assert found.requests["time"].dt.date().unique().to_list() == [datetime(2023, 11, 16, tzinfo=UTC).date()]
