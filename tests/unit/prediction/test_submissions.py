"""Submissions from accounting and from logs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl

from slurm_affinode.prediction import submissions
from slurm_affinode.slurm.accounting.schema import JOBS, conform
from slurm_affinode.traces import swf

SINCE = datetime(2026, 11, 2, tzinfo=UTC)
PEAKS = {"cluster": pl.String(), "job_id": pl.Int64(), "submit": JOBS["submit"], "mem_bytes": pl.Float64(),
         "gpu_mem_bytes": pl.Float64()}  # fmt: skip


def test_repeated_jobs_share_an_identity_without_their_numbers() -> None:
    rows = [
        {"cluster": "c", "job_id": number, "submit": SINCE, "eligible": SINCE, "start": SINCE + timedelta(minutes=5),
         "end": SINCE + timedelta(minutes=65), "elapsed_s": 3600, "timelimit_s": 1800, "user": "ann", "gpus": 2,
         "job_name": name, "work_dir": f"/home/ann/run{number}", "submit_line": f"sbatch -t 1 train{number}.sh"}
        for number, name in ((1, "fit_1"), (2, "fit_22"), (3, "eval_1"))
    ]  # fmt: skip
    types = {name: dtype for name, dtype in JOBS.items() if name in rows[0]}
    jobs = conform(pl.DataFrame(rows, schema=types), JOBS)
    peaks = pl.DataFrame({"cluster": ["c"], "job_id": [2], "submit": [SINCE], "mem_bytes": [5.0],
                          "gpu_mem_bytes": [7.0]}, schema=PEAKS)  # fmt: skip
    result = submissions.from_accounting(jobs, peaks)
    assert result["job"].to_list()[0] == "fit_#\ntrain#.sh\n/home/ann/run#"
    assert (result["job"][0] == result["job"][1], result["job"][0] == result["job"][2]) == (True, False)
    assert result["run_s"].to_list() == [1800.0] * 3  # at most the limit
    assert result["mem_bytes"].to_list() == [None, 5.0, None]
    assert result["gpu_mem_bytes"].to_list() == [None, 7.0, None]
    assert (result["end_s"] - result["submit_s"]).to_list() == [65 * 60] * 3


def test_columns_of_a_log_that_a_simulation_does_not_need_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log.swf"
    path.write_text("; MaxProcs: 8\n1 0 5 60 2 -1 100 2 90 200 1 7 3 12 1 -1 -1 -1\n"
                    "2 1 -1 60 2 -1 -1 2 90 -1 1 7 -1 -1 -1 -1 -1 -1\n")  # fmt: skip
    first, second = submissions.from_log(swf.read(path)).to_dicts()
    assert (first["name"], first["account"], first["queue"], first["user"]) == ("12", "3", "1", "7")
    assert (first["mem_bytes"], first["request_mem_bytes"]) == (100 * 1024 * 2, 200 * 1024 * 2)
    assert (first["end_s"], second["end_s"]) == (65, 61)
    assert (second["name"], second["mem_bytes"], second["account"]) == (None, None, None)
