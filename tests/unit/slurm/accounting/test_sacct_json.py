"""``sacct --json`` beyond the recordings: old data parsers, damaged documents, invalid records."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.slurm.accounting.sacct import SacctReading, read
from slurm_affinode.slurm.accounting.schema import Accounting


def job(job_id: Any = 5, **changes: Any) -> dict[str, Any]:
    """Return a job as printed by v0.0.38: plain numbers and words."""
    return {
        "job_id": job_id,
        "cluster": "larch",
        "name": "train",
        "user": "ana",
        "account": "physics",
        "partition": "gpu",
        "state": {"current": "COMPLETED", "reason": "None"},
        "exit_code": {"status": "SUCCESS", "return_code": 0, "signal": {"signal_id": 0}},
        "time": {
            "submission": 1767261600, "eligible": 1767261600, "start": 1767261605, "end": 1767265205,
            "elapsed": 3600, "suspended": 120, "limit": 60, "total": {"seconds": 1, "microseconds": 500000},
        },
        "tres": {
            "allocated": [{"type": "gres", "name": "gpu", "count": 2}, {"type": "mem", "name": None, "count": 1024}],
            "requested": [],
        },
        "required": {"CPUs": 4, "memory_per_cpu": 512, "memory_per_node": None},
        "nodes": "gpu-1",
        "steps": [
            {
                "step": {"id": {"job_id": job_id, "step_id": "BATCH"}, "name": "batch"},
                "state": "COMPLETED",
                "time": {"start": 1767261605, "end": 1767265205, "elapsed": 3600},
                "tres": {"requested": {"max": [{"type": "mem", "name": None, "count": 4096}]}, "allocated": []},
            }
        ],
        **changes,
    }  # fmt: skip


def parse(*jobs: Any, **how: Any) -> Accounting:
    """Read a document of these jobs."""
    return read(json.dumps({"jobs": jobs}).encode(), where="in", reading=SacctReading(**how))


def test_old_data_parser_is_read() -> None:
    """Plain numbers, one state word, a step ID that is an object, memory per CPU."""
    parsed = parse(job())
    row = parsed.jobs.row(0, named=True)
    assert row["start"] == datetime(2026, 1, 1, 10, 0, 5, tzinfo=UTC)
    assert (row["gpus"], row["timelimit_s"], row["total_cpu_s"]) == (2, 3600, 1.5)
    assert row["req_mem_bytes"] == 2048 << 20
    assert row["max_rss_bytes"] == 4096
    assert parsed.steps["step_id"].to_list() == ["batch"]
    assert parsed.unit == "record"


def test_priority_is_unknown_if_it_is_not_set() -> None:
    numbers = ({"set": True, "infinite": False, "number": 0}, {"set": False, "infinite": False, "number": 7}, 11322)
    parsed = parse(*(job(job_id=number, priority=value) for number, value in enumerate(numbers, 1)), job(job_id=9))
    assert parsed.jobs["priority"].to_list() == [0, None, 11322, None]


def test_limits_and_numbers_that_are_not_set() -> None:
    """``infinite`` is unlimited; not set is unknown."""
    unlimited = job(1)
    unlimited["time"]["limit"] = {"set": True, "infinite": True, "number": 0}
    unset = job(2)
    unset["time"]["limit"] = {"set": False, "infinite": False, "number": 0}
    unset["time"]["end"], unset["state"]["current"] = 0, "RUNNING"
    parsed = parse(unlimited, unset)
    assert parsed.jobs["timelimit_unlimited"].to_list() == [True, None]
    assert parsed.jobs["timelimit_s"].to_list() == [None, None]
    assert parsed.jobs["end"].to_list()[1] is None


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (job("x"), "not a job ID"),
        ({"name": "no id"}, "has no 'job_id'"),
        (job(7, time="yesterday"), "not an object"),
        (job(7, state={"current": ["??"]}), "not a job state"),
        (job(7, time={"submission": 1767261600, "start": 1e30}), "too large"),
        (job(7, tres={"allocated": [{"type": "gres", "name": "gpu", "count": 1e30}]}), "too large"),
        ("text", "is not"),
    ],
)
def test_invalid_record_is_reported_and_the_rest_is_read(bad: Any, reason: str) -> None:
    """Its number in the document is reported."""
    parsed = parse(job(1), bad, job(2))
    assert parsed.jobs["job_id"].to_list() == [1, 2]
    assert parsed.problems[0].line == 2
    assert reason in parsed.problems[0].reason
    with pytest.raises(InputError, match="record 2"):
        parse(job(1), bad, strict=True)


def test_invalid_step_does_not_drop_its_job() -> None:
    """The step is reported."""
    parsed = parse(job(1), job(7, steps=[{"step": {"id": None}}, 5]))
    assert parsed.jobs["job_id"].to_list() == [1, 7]
    assert [problem.line for problem in parsed.problems] == [2, 2]
    assert "no id" in parsed.problems[0].reason


@pytest.mark.parametrize("count", [1.5, 0.5, 10**8, {"set": True, "infinite": False, "number": 2.5}])
def test_unreadable_gpu_count_is_unknown(count: Any) -> None:
    """The value is neither rounded nor 0: record and field are reported, and the record counts."""
    gpus = [{"type": "gres", "name": "gpu", "count": count}, {"type": "cpu", "name": None, "count": 8}]
    parsed = parse(job(tres={"allocated": gpus, "requested": gpus}, steps=[]), job(6))
    assert parsed.jobs.select("job_id", "gpus", "req_gpus", "cpus").rows() == [(5, None, None, 8), (6, 2, None, None)]
    assert [(problem.line, problem.job, problem.field, problem.dropped) for problem in parsed.problems] == [
        (1, "5", "tres.allocated", False), (1, "5", "tres.requested", False)
    ]  # fmt: skip


def test_end_before_start_is_an_invalid_record() -> None:
    """Its interval would be negative."""
    wrong = job(7)
    wrong["time"]["end"] = 1767261600
    assert "End is before Start" in parse(job(1), wrong).problems[0].reason


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"jobs": [', "cut"),
        ('{"jobs": [{"job_id": 5, "name": "abc', "cut"),
        ('{"jobs": nonsense, "meta": {}}', "not JSON"),
        ('{"meta": {}}', "no list 'jobs'"),
        ("[1, 2]", "no list 'jobs'"),
        ('{"jobs": [{"job_id": 1, "job_state": "RUNNING"}]}', "squeue or scontrol"),
        ('{"jobs": [1, 2]}', "no objects"),
        ("[" * 100_000, "not sacct output|cut"),
        ('{"x": ' + "9" * 5000 + ', "jobs": []}', "not sacct output"),
        ('{"jobs": [], "errors": [{"description": "Failed to query", "error": "no database"}]}', "query: no database"),
        ('{"meta": {}, "errors": [{"error": "no\\ndatabase"}]}', "sacct failed: no database"),
        ('{"jobs": [], "errors": [{}]}', "without a word"),
    ],
)
def test_unusable_document_is_one_clear_line(text: str, message: str) -> None:
    """It is truncated, damaged, or the output of another command."""
    with pytest.raises(InputError, match=message):
        read(text.encode(), where="in")


def test_error_of_sacct_beside_jobs_is_reported() -> None:
    """The jobs count; some may be missing."""
    result = read(json.dumps({"jobs": [job()], "errors": ["gone", "gone"]}).encode(), where="in")
    assert result.jobs.height == 1
    assert result.notes == ("sacct reported an error, so jobs may be missing: gone",)


def test_bytes_that_are_not_utf8_are_escaped() -> None:
    data = json.dumps({"jobs": [job(name="CAFE")]}).encode().replace(b"CAFE", b"caf\xe9")
    result = read(data, where="in")
    assert result.jobs["job_name"].to_list() == ["caf\\xe9"]
    assert result.notes


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (r"a\ud83d\ude00b", "a\U0001f600b"), (r"a\ud83db", r"a\ud83db"), (r"\uDE00\ud83d", r"\uDE00\ud83d"),
        (r"\\ud83d", r"\ud83d"), (r"\\\ud83d\\", r"\\ud83d" + "\\"), (r"\n\ud83d\u0041", "\n\\ud83dA"),
    ],
)  # fmt: skip
def test_lone_surrogate_is_escaped(written: str, shown: str) -> None:
    """JSON can contain half of a surrogate pair, which is not valid text."""
    data = json.dumps({"jobs": [job(name="NAME")]}).replace("NAME", written)
    assert read(data.encode(), where="in").jobs["job_name"].to_list() == [shown]


def test_document_without_jobs_is_empty() -> None:
    assert parse().jobs.is_empty()


def test_field_that_is_too_long_is_reported_and_unknown() -> None:
    """Record and field are reported; the other fields count."""
    parsed = parse(job(name="x" * 100_000), job(6, cluster="c" * 2000), job(7))
    assert parsed.jobs.select("job_id", "job_name", "gpus").rows() == [(5, None, 2), (7, "train", 2)]
    assert [str(problem) for problem in parsed.problems] == [
        "job 5: job_name: has 100,000 bytes, at most 1,024 fit, so it is unknown",
        "job 6: cluster has 2,000 bytes, at most 1,024 fit",
    ]


def test_compressed_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A JSON document has to be in memory as a whole, so its unpacked size is limited."""
    monkeypatch.setattr("slurm_affinode.base.input_files.DOCUMENT_BYTES", 1 << 20)
    data = json.dumps({"jobs": [job(name="x" * (3 << 20))]}).encode()
    with pytest.raises(InputError, match="in: unpacks to more than"):
        read(gzip.compress(data), where="in")
    assert read(data, where="in").jobs.height == 1
