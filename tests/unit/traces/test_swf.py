"""Logs in the Standard Workload Format."""

from __future__ import annotations

import gzip
import tarfile
import zipfile
from datetime import UTC
from pathlib import Path

import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.traces import swf
from slurm_affinode.traces.job_log import UNKNOWN


def line(number: int, *, submit: int = 0, wait: int = 5, run: int = 60, allocated: int = 2, requested: int = 2,
         limit: int = 100, user: int = 7, status: int = 1) -> str:  # fmt: skip
    known = f"{number:5} {submit:8} {wait} {run} {allocated} -1 -1 {requested} {limit} -1 {status} {user} 1"
    return f"{known} -1 -1 -1 -1 -1\n"


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines))
    return path


def test_columns_and_header_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log.swf.gz"
    text = "; Version: 2.2\n; MaxProcs: 128\n;\n" + line(1, submit=10) + "\n" + line(2, run=30, limit=-1, wait=-1)
    path.write_bytes(gzip.compress(text.encode()))
    log = swf.read(path)
    assert (log.capacity, log.unit, log.rows) == (128, "processor", 2)
    assert log.jobs.to_dicts() == [
        {"number": 1, "submit_s": 10, "run_s": 60, "units": 2, "request_s": 100, "user": 7, "wait_s": 5,
         "user_mean_s": 45.0},
        {"number": 2, "submit_s": 0, "run_s": 30, "units": 2, "request_s": UNKNOWN, "user": 7, "wait_s": UNKNOWN,
         "user_mean_s": 45.0},
    ]  # fmt: skip


def test_requested_processors_count_before_allocated_ones(tmp_path: Path) -> None:
    log = swf.read(written(tmp_path / "log.swf", line(1, allocated=8, requested=7), line(2, allocated=3, requested=-1)))
    assert log.jobs["units"].to_list() == [7, 3]


def test_jobs_that_cannot_be_used_are_counted_with_their_hours_and_lines(tmp_path: Path) -> None:
    path = written(
        tmp_path / "log.swf", "; a comment\n", line(1, run=3600, requested=3), line(2, allocated=-1, requested=-1),
        line(3, run=-1), line(4, run=0), line(5, submit=-1, run=3600, requested=1), "1 2 3\n", line(7) + "x y\n",
    )  # fmt: skip
    log = swf.read(path)
    result = {group.reason: (group.jobs, round(group.unit_hours, 2), group.examples) for group in log.left_out}
    assert result == {
        "with a line that is not 18 numbers": (2, 0.0, (f"{path}:7", f"{path}:9")),
        "without processors": (1, 0.0, (f"{path}:3",)),
        "without a run time": (2, 0.0, (f"{path}:4", f"{path}:5")),
        "without a time of submission": (1, 1.0, (f"{path}:6",)),
    }
    assert sum(item.share for item in log.left_out) == pytest.approx(1 / (3 + 1 + 2 / 60), rel=1e-3)


@pytest.mark.parametrize("unfinished", ["    2        9 5 6", "\xff"])
def test_log_that_is_cut_off_in_a_line_is_an_error(tmp_path: Path, unfinished: str) -> None:
    path = tmp_path / "log.swf"
    path.write_bytes((line(1) + unfinished).encode("latin-1"))
    with pytest.raises(InputError, match=r"log\.swf:2: is cut off in its last line"):
        swf.read(path)
    path.write_text(line(1) + line(2).rstrip("\n"))
    assert swf.read(path).jobs.height == 2


@pytest.mark.parametrize("text", ["", "; MaxProcs: 3\n\n"])
def test_empty_log_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"log\.swf: the log is empty"):
        swf.read(written(tmp_path / "log.swf", text))


def test_another_format_is_an_error_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"log\.swf:2: is not in the Standard Workload Format"):
        swf.read(written(tmp_path / "log.swf", "; x\n", "JobID,Start,End\n"))
    with pytest.raises(InputError, match=r"log\.swf:1: is not in the Standard Workload Format"):
        swf.read(written(tmp_path / "log.swf", "JobID,Start,End"))


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "tar.xz"])
def test_archive_is_named_as_one(tmp_path: Path, kind: str) -> None:
    """The files of a tar archive were read as one log, with its headers as jobs that cannot be used."""
    log, path = tmp_path / "log.swf", tmp_path / f"log.{kind}"
    log.write_text("; MaxProcs: 8\n" + "".join(map(line, range(1, 50))))
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(log, "log.swf")
    else:
        with tarfile.open(path, f"w:{kind.partition('.')[2]}") as packed:
            packed.add(log, "a.swf")
            packed.add(log, "b.swf")
    with pytest.raises(InputError, match=rf"log\.{kind}: is a {kind.partition('.')[0]} archive") as error:
        swf.read(path)
    assert error.value.hint == "unpack it, and give the files in it"


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        swf.read(tmp_path / "none.swf")


def test_published_log_has_known_jobs(shared_data: Path) -> None:
    log = swf.read(shared_data / "kth-sp2" / "KTH-SP2-1996-2.swf.gz")
    assert (log.rows, log.jobs.height, log.capacity) == (28_489, 28_481, 100)
    assert [(group.reason, group.jobs, group.unit_hours) for group in log.left_out] == [("without a run time", 8, 0.0)]


def test_start_and_time_zone_are_read(tmp_path: Path) -> None:
    head = "; UnixStartTime: 843480031\n; TimeZoneString: Europe/Stockholm\n"
    log = swf.read(written(tmp_path / "log.swf", head, line(1)))
    assert (log.epoch_s, str(log.zone)) == (843480031, "Europe/Stockholm")


@pytest.mark.parametrize("zone", ["Nowhere/Else", "../../etc/passwd", "/etc/passwd"])
def test_unknown_time_zone_is_utc(tmp_path: Path, zone: str) -> None:
    assert swf.read(written(tmp_path / "log.swf", f"; TimeZoneString: {zone}\n", line(1))).zone is UTC


def test_unknown_version_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"log\.swf: is in version 3\.0 of the Standard Workload Format"):
        swf.read(written(tmp_path / "log.swf", "; Version: 3.0\n", line(1)))


@pytest.mark.parametrize(
    ("head", "capacity"),
    [
        ("; MaxProcs: 9216 (8 per node)\n", 9216),
        ("; MaxNodes: 1152\n; MaxProcs: 9,216 (8 per node)\n", 9216),
        ("; MaxNodes: 128 (120 in use)\n", 128),
        ("; MaxNodes: 128\n; MaxProcs: unknown\n", None),
        ("; Note: MaxProcs: 7\n; MaxProcs: 4.5\n", None),
        ("; MaxNodes: 128\n; MaxProcs: -1\n", 128),
    ],
)
def test_size_of_the_machine_is_read_with_a_remark(tmp_path: Path, head: str, capacity: int | None) -> None:
    assert swf.read(written(tmp_path / "log.swf", head, line(1))).capacity == capacity


def test_version_with_a_remark_is_read(tmp_path: Path) -> None:
    assert swf.read(written(tmp_path / "log.swf", "; Version: 2 (of 2006)\n", line(1))).rows == 1


def test_partial_executions_of_a_job_are_no_jobs(tmp_path: Path) -> None:
    """A swapped job has a line for all of it, and a line for each part; job 2 has parts alone."""
    log = swf.read(written(
        tmp_path / "log.swf", line(1, run=90), line(1, run=40, status=2), line(1, run=50, status=3),
        line(2, run=10, status=2), line(2, run=20, status=4),
    ))  # fmt: skip
    assert log.jobs.select("number", "run_s").rows() == [(1, 90), (2, 10), (2, 20)]
    assert log.left_out == ()
