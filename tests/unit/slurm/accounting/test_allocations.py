"""GPUs allocated to jobs, in the three input formats."""

from __future__ import annotations

import gzip
from datetime import UTC, datetime

import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.slurm.accounting import allocations
from slurm_affinode.slurm.accounting.schema import ALLOCATION_GPUS


def read(text: str, **how: object) -> allocations.RecordedAllocations:
    """Read ``text``."""
    return allocations.read(text.encode(), where="in", **how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("GPU-5a1f-0000", "GPU-5a1f-0000"), ("e1:00.0", "00000000:E1:00.0"), ("0000:e1:00.0", "00000000:E1:00.0"),
        ("00000000:E1:00.0", "00000000:E1:00.0"), ("3", "3"), (3, "3"), ("MIG-abc", "MIG-abc"), ("03", "3"),
        ("5A1F77C0-1111-2222-3333-444455556666", "GPU-5a1f77c0-1111-2222-3333-444455556666"),
    ],
)  # fmt: skip
def test_gpu_names_are_normalized(name: object, stored: str) -> None:
    assert allocations.gpu_id(name) == stored


def test_csv_is_read() -> None:
    """Several GPUs in a cell, a hostlist, start times with and without offset, and a cluster column."""
    result = read(
        "job_id,node,gpu,start,cluster\n1,n1.example.org,0;1,2026-07-01T10:00:00,\n2,n[1-2],GPU-ab,,other\n",
        cluster="here",
        zone="Europe/Oslo",
    )
    start = datetime(2026, 7, 1, 8, tzinfo=UTC)
    assert dict(result.gpus.schema) == ALLOCATION_GPUS
    assert result.gpus.rows() == [
        ("here", 1, start, "n1", "0"),
        ("here", 1, start, "n1", "1"),
        ("other", 2, None, "n1", "GPU-ab"),
        ("other", 2, None, "n2", "GPU-ab"),
    ]


@pytest.mark.parametrize("text", ['job_id,node,gpu\n1,n1,"0,1"\n', "job_id\tnode\tgpu\r1\tn1\t0,1\r"])
def test_gpu_lists_of_slurm_and_cuda_are_read(text: str) -> None:
    """``SLURM_JOB_GPUS`` and ``CUDA_VISIBLE_DEVICES`` have commas; lines may end in CR, files may be gzip or UTF-16."""
    assert read(text).gpus["gpu"].to_list() == ["0", "1"]
    assert allocations.read(text.encode("utf-16"), where="in").gpus["gpu"].to_list() == ["0", "1"]
    packed = gzip.compress(text.encode())
    assert allocations.read(packed, where="in").gpus["gpu"].to_list() == ["0", "1"]
    with pytest.raises(InputError, match="in: the compressed file is damaged or cut"):
        allocations.read(packed[:-9], where="in")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("2,n\0,0", "holds a NUL byte in column 4"),
        (f"2,n1,{'0;' * 100_000}", "is longer than 128 KiB"),
        (f"2,{'n' * 2_000_00},0", "is longer than 128 KiB"),
        (f"2,n1,GPU-{'a' * 9000}", "gpu has 9,004 bytes, at most 256 fit"),
        (f"2,n1,0,,{'c' * 9000}", "cluster has 9,000 bytes, at most 1,024 fit"),
        (f"{'2' * 9000},n1,0", "job_id has 9,000 bytes, at most 1,024 fit"),
    ],
)
def test_damaged_line_is_reported_and_rest_is_read(bad: str, why: str) -> None:
    """The line number is reported; the record is not stored."""
    result = read(f"job_id,node,gpu,start,cluster\n1,n1,0,,\n{bad}\n3,n1,0,,\n")
    assert result.gpus["job_id"].to_list() == [1, 3]
    assert [(problem.line, problem.reason.partition(":")[0]) for problem in result.problems] == [(3, why)]


def test_compressed_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of unpacked data is limited."""
    monkeypatch.setattr("slurm_affinode.base.input_files.DOCUMENT_BYTES", 1 << 20)
    with pytest.raises(InputError, match="in: unpacks to more than"):
        allocations.read(gzip.compress(b"1" * (3 << 20)), where="in")


def test_json_lines_and_a_json_list_are_read() -> None:
    """GPUs may be lists, times are epoch seconds."""
    line = '{"job_id": 1, "node": "n1", "gpu": [0, "e1:00.0"], "start": 1767261600}\n'
    expected = read(line).gpus
    assert expected["gpu"].to_list() == ["0", "00000000:E1:00.0"]
    assert expected["start"].to_list() == [datetime(2026, 1, 1, 10, tzinfo=UTC)] * 2
    assert read(f"[{line}]").gpus.equals(expected)
    assert read(f"\n{line}\n").gpus.equals(expected)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("1_2,n1,0", "raw ID"),
        ("1,,0", "no node"),
        ("1,n1,", "no gpu"),
        ("1,n1,abc", "not a UUID"),
        ("1,n[1-,0", "bracket"),
        ("1,n1,0,1", "more fields than the header"),
        ("9" * 30 + ",n1,0", "raw ID"),
    ],
)
def test_invalid_record_is_reported_and_the_rest_is_read(bad: str, reason: str) -> None:
    """The line number is reported; ``strict`` stops there."""
    text = f"job_id,node,gpu\n7,n1,0\n{bad}\n8,n1,1\n"
    result = read(text)
    assert result.gpus["job_id"].to_list() == [7, 8]
    assert result.problems[0].line == 3
    assert reason in result.problems[0].reason
    with pytest.raises(InputError, match="in:3"):
        read(text, strict=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"), ("a,b\n1,2\n", "has no job_id, node, gpu"), ("\0", "binary"), ("{nope}\n", "not JSON"),
        ("[1]", "not an object"), ("job_id,node,gpu\nx,n1,0\n", "raw ID"), ("[", "not JSON"),
        ("[" * 100_000, "not JSON"), ('{"job_id": ' + "9" * 5000 + "}", "not JSON"),
        (f"job_id,node,gpu\n1,n1,{'0;' * 100_000}\n", "in:2: is longer than 128 KiB"),
        ('{"job_id": 1, "node": "n1", "gpu": 0, "start": Infinity}', "is not a time"),
    ],
)  # fmt: skip
def test_unusable_input_is_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(text)


def test_invalid_gpu_indexes_are_reported() -> None:
    """The IDX of scontrol is damaged."""
    job = (
        "JobId=1 JobName=a\n   JobState=RUNNING Reason=None\n   JOB_GRES=gpu:1\n"
        "     Nodes=n1 CPU_IDs=0 Mem=1 GRES=gpu:1(IDX:{})\n"
    )
    result = read(job.format("0-1,3") + "\n" + job.format("-"))
    assert result.gpus["gpu"].to_list() == ["0", "1", "3"]
    assert "IDX" in result.problems[0].reason
