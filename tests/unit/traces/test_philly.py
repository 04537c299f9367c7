"""Jobs of the Philly trace as CSV."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.traces import philly
from slurm_affinode.traces.job_log import UNKNOWN

HEADER = "timestamp,duration,num_gpus,gpu_time,cluster\n"


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_rows_are_read_by_the_names_of_columns(tmp_path: Path) -> None:
    rows = ("b,4,10.9,1970-01-02 00:00:00", "a,1,0.5,1970-01-01 00:00:01", "b,2,3,1970-01-01 00:00:02")
    text = "\n".join(("cluster,num_gpus,duration,timestamp", *rows))
    log = philly.read(written(tmp_path / "p.csv", text))
    assert log.unit == "GPU"
    result = log.jobs.select("number", "submit_s", "run_s", "units", "request_s", "user_mean_s").rows()
    assert result == [(0, 86400, 10, 4, UNKNOWN, 6.95), (1, 1, 1, 1, UNKNOWN, 0.5), (2, 2, 3, 2, UNKNOWN, 6.95)]


def test_bad_rows_are_counted_with_their_lines(tmp_path: Path) -> None:
    path = written(tmp_path / "p.csv", HEADER + "2017-10-09 07:01:55,66.0,1,66,a\nyesterday,1,1,1,a\n1,2\n\n"
                   "2017-10-09 07:01:55,5,0,0,a\n2017-10-09 07:01:55,nan,2,0,a\n")  # fmt: skip
    examples = {group.reason: group.examples for group in philly.read(path).left_out}
    assert examples == {
        "with a line that is not in the format of the header": (f"{path}:3", f"{path}:4", f"{path}:7"),
        "without GPUs": (f"{path}:6",),
    }


def test_file_that_is_cut_off_in_a_row_is_an_error(tmp_path: Path) -> None:
    row = "2017-10-09 07:01:55,66.0,1,66,a"
    path = written(tmp_path / "p.csv", f"{HEADER}{row}\n2017-10-0")
    with pytest.raises(InputError, match=r"p\.csv:3: is cut off in its last line"):
        philly.read(path)
    assert philly.read(written(path, f"{HEADER}{row}\n{row}")).jobs.height == 2


def test_missing_column_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"p\.csv:1: no column num_gpus, cluster"):
        philly.read(written(tmp_path / "p.csv", "timestamp,duration,gpus\n"))


@pytest.mark.parametrize("text", ["", "\n", HEADER])
def test_empty_log_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="the log is empty"):
        philly.read(written(tmp_path / "p.csv", text))


def test_published_trace_has_known_jobs(shared_data: Path) -> None:
    log = philly.read(shared_data / "philly" / "philly_pollux.csv.gz")
    assert (log.jobs.height, log.left_out) == (82_247, ())
    assert float((log.jobs["run_s"] * log.jobs["units"]).sum()) / 3600 == pytest.approx(978_078.5, rel=1e-4)
