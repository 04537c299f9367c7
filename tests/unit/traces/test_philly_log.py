"""The job log of the Philly trace: synthetic jobs in its published format."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.traces import philly
from slurm_affinode.traces.job_log import UNKNOWN


def attempt(start: str | None, end: str | None, *gpus: int) -> dict[str, Any]:
    """Return an attempt with these GPUs on each of its servers; ``None``: the time is missing."""
    times = {name: at and f"2017-10-07 {at}" for name, at in (("start_time", start), ("end_time", end))}
    return {**times, "detail": [{"ip": f"m{at}", "gpus": [f"gpu{gpu}" for gpu in range(count)]}
                                for at, count in enumerate(gpus)]}  # fmt: skip


def job(number: int, *attempts: dict[str, Any], submit: str | None = "2017-10-07 00:00:00", status: str = "Pass",
        user: str = "a") -> dict[str, Any]:  # fmt: skip
    return {"status": status, "vc": "v", "jobid": f"application_{number}", "attempts": list(attempts),
            "submitted_time": submit, "user": user}  # fmt: skip


def written(path: Path, *jobs: dict[str, Any]) -> Path:
    path.write_text(json.dumps(list(jobs), indent=1))
    return path


def test_job_has_the_time_of_its_attempts_and_the_gpus_of_the_largest(tmp_path: Path) -> None:
    jobs = (
        job(1, attempt("00:00:30", "00:01:00", 8), attempt("00:02:00", "00:03:00", 8, 8), status="Killed"),
        job(2, attempt("00:00:00", "00:00:00", 1), user="b"),
    )
    log = philly.read(written(tmp_path / "cluster_job_log", *jobs))
    columns = ("number", "submit_s", "run_s", "units", "request_s", "user", "wait_s", "user_mean_s")
    submit = 1507334400
    assert log.jobs.select(columns).rows() == [
        (0, submit, 90, 16, UNKNOWN, 1, 30, 90.0), (1, submit, 1, 1, UNKNOWN, 2, 0, 1.0),
    ]  # fmt: skip
    assert log.final_states is not None
    assert (log.final_states.to_list(), log.capacity, log.zone) == (["canceled", "completed"], None, None)


def test_jobs_without_attempts_and_times_are_left_out_by_name(tmp_path: Path) -> None:
    good = attempt("00:01:00", "00:02:00", 1)
    jobs = (
        job(1), job(2, attempt("00:01:00", None, 1)), job(3, attempt(None, "00:02:00", 1), good),
        job(4, attempt("00:01:00", "00:02:00")), job(5, good, submit="None"),
        job(6, good, submit="2017-10-07 00:01:30"), job(7, attempt("00:02:00", "00:01:00", 1)), job(8, good),
        {"status": "Pass"},
    )  # fmt: skip
    path = written(tmp_path / "cluster_job_log", *jobs)
    log = philly.read(path)
    assert log.jobs["number"].to_list() == [7]
    assert {group.reason: group.examples for group in log.left_out} == {
        "without a time of submission": (f"{path}:application_5", f"{path}:job 8"),
        "without an attempt: they never ran": (f"{path}:application_1",),
        "that were still running, or lack their end": (f"{path}:application_2",),
        "with an attempt that lacks its start or end": (f"{path}:application_3",),
        "without GPUs": (f"{path}:application_4",),
        "that end before they start, or start before they are submitted": (
            f"{path}:application_6",
            f"{path}:application_7",
        ),
    }


def test_directory_has_the_log_and_the_machines(tmp_path: Path) -> None:
    content = json.dumps([job(1, attempt("00:01:00", "00:02:00", 1))])
    (tmp_path / "cluster_job_log.gz").write_bytes(gzip.compress(content.encode()))
    (tmp_path / "cluster_machine_list").write_text("machineId,number of GPUs, single GPU mem\nm0,8, 24GB\nm1,2, 12GB\n")
    log = philly.read(tmp_path)
    assert (log.jobs.height, log.capacity) == (1, 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "is not the JSON array of the Philly trace, or is cut off"),
        ('[{"status": "Pass", "attempts": [{"start_time"', "or is cut off"),
        ("[1, 2]", "is not the JSON array of the Philly trace"),
        ('[{"status": 5, "attempts": "x"}]', "is not the JSON array of the Philly trace"),
        ("[]", "the log is empty"),
        ('[{"job": 1}]', "not the job log of the Philly trace"),
    ],
)
def test_other_json_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster_job_log"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as error:
        philly.read(path)
    assert str(path) in str(error.value)


def test_directory_without_the_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no cluster_job_log"):
        philly.read(tmp_path)
