"""The anonymized data set: pseudonyms, coarse times, rare requests, and reading it back."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.traces import job_figures, site_page, site_readme, site_trace, swf
from slurm_affinode.traces.site_trace import EPOCH_S, IDLE, RAW, ExportOptions

KEY = b"0123456789abcdef"
OPTIONS = ExportOptions(KEY, 60, 2)
TUESDAY = 1_793_664_000 + 7
"""2026-11-03 00:00:07, a Tuesday."""
HOUR = 3600


def raw(*rows: dict[str, Any]) -> pl.DataFrame:
    base: dict[str, Any] = {
        "account": "vision",
        "job_name": "train",
        "partition": "gpu",
        "gpu_type": "a100",
        "gpus": 2,
        "timelimit_s": 24 * HOUR,
        "state": "completed",
        "priority": None,
        "submit_s": TUESDAY,
        "start_s": TUESDAY + 100,
        "end_s": TUESDAY + 100 + HOUR,
        "measured": True,
    }
    filled = [{"run": at, "user": f"user{at}", **base, **row} for at, row in enumerate(rows)]
    return pl.DataFrame(filled, schema=RAW)


NO_IDLE = pl.DataFrame(schema=IDLE)


def written(directory: Path, trace: site_trace.SiteTrace) -> Path:
    jobs, idle = job_figures.analyse(site_trace.job_log(trace)), site_trace.idle_figures(trace)
    text = site_readme.readme(trace, jobs, idle, {"without a user": 3}, 12.5)
    for name, data in site_trace.files(trace, text).items():
        (directory / name).write_bytes(data)
    return directory


def test_times_are_rounded_and_shifted_by_whole_weeks() -> None:
    """Weekday and hour remain, the date does not; a job is never shorter than the rounding."""
    trace = site_trace.anonymized(raw({}, {"end_s": TUESDAY + 101, "start_s": TUESDAY + 100}), NO_IDLE, 8, OPTIONS)
    assert set(trace.jobs["submit_s"]) == {24 * HOUR}
    assert sorted(trace.jobs.select("wait_s", "run_s").rows()) == [(120, 60), (120, HOUR)]
    s = job_figures.analyse(site_trace.job_log(trace))
    assert s.arrivals is not None
    assert (s.arrivals.weekday["Tue"], s.arrivals.hour["00"], str(s.since)) == (2, 2, "2001-01-02 00:00:00+00:00")


def test_no_name_of_the_site_is_in_any_file(tmp_path: Path) -> None:
    """Nor are its dates and run numbers."""
    names = {"user": "kowalski", "account": "secretlab", "job_name": "projectx", "partition": "dgxq"}
    trace = site_trace.anonymized(raw(names, {**names, "user": "nowak"}), NO_IDLE, 8, OPTIONS)
    text = b"".join(path.read_bytes() for path in written(tmp_path, trace).iterdir()).decode()
    assert not [name for name in (*names.values(), "nowak", "2026", str(TUESDAY), str(TUESDAY // 60)) if name in text]


def test_pseudonyms_depend_on_the_key() -> None:
    """The same key gives the same pseudonyms in a later export; a repeated job of a user has one name."""
    rows = raw({"user": "ann"}, {"user": "ann"}, {"user": "bob"})
    first, again, other = (
        site_trace.anonymized(rows, NO_IDLE, 8, replace(OPTIONS, key=key)).jobs for key in (KEY, KEY, KEY[::-1])
    )
    assert first.equals(again)
    assert not set(first["user"]) & set(other["user"])
    assert (first["user"].n_unique(), first["name"].n_unique(), first["account"].n_unique()) == (2, 2, 1)


def test_rare_requests_are_generalized_then_left_out() -> None:
    """In this order: time limit, GPU type, partition; a rare number of GPUs cannot be hidden."""
    trace = site_trace.anonymized(
        raw(
            {},
            {},
            {"timelimit_s": 7},
            {"gpu_type": "h100", "timelimit_s": None},
            {"partition": "x"},
            {"gpus": 64},
            {"timelimit_s": None},
        ),
        NO_IDLE,
        99,
        OPTIONS,
    )
    requests = trace.jobs.group_by(site_trace.REQUEST).agg(pl.col("user").n_unique())
    assert requests["user"].min() == 2
    lost = trace.suppression
    assert lost is not None
    assert (lost.jobs, lost.gpu_hours, trace.jobs.height) == (1, 64.0, 6)
    assert lost.gpu_hours_share == pytest.approx(64 / 76)
    assert lost.generalized == {"timelimit_s": 3, "gpu_type": 3, "partition": 3, "priority_class": 0}
    assert sorted(trace.jobs.select(pl.col("timelimit_s").is_null(), pl.col("gpu_type").is_null()).rows()) == [
        (False, False), (False, False), (True, False), (True, False), (True, True), (True, True),
    ]  # fmt: skip


def test_priorities_are_quarters_of_the_jobs() -> None:
    rows = raw(*({"priority": priority} for priority in (5, 5, 80, 80, 9000, 9000, 7, 7)))
    trace = site_trace.anonymized(rows, NO_IDLE, 99, OPTIONS)
    assert sorted(trace.jobs["priority_class"].to_list()) == [1, 1, 2, 2, 3, 3, 4, 4]
    log = site_trace.job_log(trace)
    assert log.priorities is not None
    assert sorted(log.priorities.to_list()) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_jobs_hours_and_waits_of_priority_classes() -> None:
    """By hand: the class 4 has two jobs of 2 GPUs that wait for 1 and 3 minutes; an unknown class comes last."""
    start, end = TUESDAY + 60, TUESDAY + 60 + HOUR
    rows = raw(
        *({"priority": 9, "start_s": start + more, "end_s": end + more} for more in (0, 120)),
        *({"priority": 1, "start_s": start + 600, "end_s": end + 600} for _ in range(2)),
        *({"priority": None, "gpus": 4, "start_s": start, "end_s": end} for _ in range(2)),
    )
    classes = site_trace.priority_classes(site_trace.anonymized(rows, NO_IDLE, 99, OPTIONS))
    assert classes is not None
    assert list(classes) == ["4", "2", "unknown"]
    figures = {name: (item.jobs, item.gpu_hours, item.hours_share, item.wait_s.mean) for name, item in classes.items()}
    assert figures == {"4": (2, 4.0, 0.25, 120.0), "2": (2, 4.0, 0.25, 660.0), "unknown": (2, 8.0, 0.5, 60.0)}
    assert sum(item.job_share for item in classes.values()) == pytest.approx(1)
    assert (classes["4"].wait_s.median, classes["4"].wait_s.max) == (120.0, 180.0)


def test_page_has_a_row_for_each_priority_class() -> None:
    page = {}
    for name, priority in (("with", 5), ("without", None)):
        trace = site_trace.anonymized(raw({"priority": priority}, {"priority": priority}), NO_IDLE, 8, OPTIONS)
        jobs, idle = job_figures.analyse(site_trace.job_log(trace)), site_trace.idle_figures(trace)
        page[name] = site_page.html(trace, jobs, idle, site_trace.priority_classes(trace))
    assert "Jobs by priority class" in page["with"]
    assert "Priorities of the jobs." not in page["with"]
    assert "Jobs by priority class" not in page["without"]
    assert "Priorities of the jobs." in page["without"]


def test_rare_class_of_a_request_removes_the_classes_of_the_request() -> None:
    """A single user has requested 4 GPUs with a high priority; 2 GPUs keep their classes, and all other columns."""
    rows = raw(
        *({"priority": priority} for priority in (1, 1, 90, 90)),
        *({"priority": priority, "gpus": 4} for priority in (1, 1, 90)),
    )
    trace = site_trace.anonymized(rows, NO_IDLE, 99, OPTIONS)
    result = trace.jobs.sort("gpus", "priority_class").select("gpus", "priority_class", "timelimit_s").rows()
    assert [row[:2] for row in result] == [(2, 3), (2, 3), (2, 4), (2, 4), (4, None), (4, None), (4, None)]
    assert {row[2] for row in result} == {24 * HOUR}
    assert trace.suppression is not None
    assert trace.suppression.generalized["priority_class"] == 3


def test_jobs_without_a_priority_have_no_class() -> None:
    trace = site_trace.anonymized(raw({}, {}), NO_IDLE, 99, OPTIONS)
    assert trace.jobs["priority_class"].to_list() == [None, None]
    assert site_trace.job_log(trace).priorities is None
    assert site_trace.priority_classes(trace) is None


def test_classes_are_read_back_and_may_be_missing(tmp_path: Path) -> None:
    """A data set of an older release has no column for them."""
    trace = site_trace.anonymized(raw({"priority": 1}, {"priority": 1}), NO_IDLE, 8, OPTIONS)
    assert site_trace.read(written(tmp_path, trace)).jobs["priority_class"].to_list() == [4, 4]
    older = pl.read_csv(tmp_path / "jobs.csv").drop("priority_class").write_csv().encode()
    (tmp_path / "jobs.csv").write_bytes(older)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["files"]["jobs.csv"] = hashlib.sha256(older).hexdigest()
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert site_trace.read(tmp_path).jobs["priority_class"].to_list() == [None, None]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("jobs.csv", "\n", r"jobs\.csv: has no job"),
        ("idle_windows.csv", "job,begin_s,end_s\n1,,60\n", r"idle_windows\.csv:2: begin_s is missing or too small"),
        ("queue.csv", f"{','.join(site_trace.QUEUE_COLUMNS)}\n0,0,0,0,0\n0,0,-1,0,0\n",
         r"queue\.csv:3: waiting_gpus is missing or too small"),
    ],
)  # fmt: skip
def test_table_without_a_job_or_a_number_is_an_error(tmp_path: Path, name: str, text: str, message: str) -> None:
    written(tmp_path, site_trace.anonymized(raw({}, {}), NO_IDLE, 8, OPTIONS))
    (tmp_path / name).write_text(text)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["files"][name] = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=message):
        site_trace.read(tmp_path)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (({}, {"user": "user0"}), "2 GPU jobs of 1 user: at least 2 users"),
        (({"gpus": 1}, {"gpus": 2}), "no request was made by 2 users"),
    ],
)
def test_too_few_users_are_an_error(rows: tuple[dict[str, Any], ...], why: str) -> None:
    with pytest.raises(InputError, match=why):
        site_trace.anonymized(raw(*rows), NO_IDLE, 8, OPTIONS)


def test_idle_windows_and_queue_by_hand() -> None:
    """Two jobs of two GPUs: one idle for half an hour while the other waits; the third has no samples."""
    rows = raw(
        {"start_s": TUESDAY, "end_s": TUESDAY + HOUR},
        {"start_s": TUESDAY + HOUR, "end_s": TUESDAY + 2 * HOUR},
        {"start_s": TUESDAY, "end_s": TUESDAY + HOUR, "measured": False},
    )
    windows = [(0, TUESDAY + 600, TUESDAY + 2400), (2, TUESDAY, TUESDAY + HOUR), (1, TUESDAY, TUESDAY + HOUR + 10)]
    trace = site_trace.anonymized(rows, pl.DataFrame(windows, schema=IDLE, orient="row"), 4, OPTIONS)
    assert trace.idle.select("begin_s", "end_s").rows() == [(600, 2400)]
    idle = site_trace.idle_figures(trace)
    assert (idle.measured_jobs, idle.measured_gpu_hours, idle.unknown_gpu_hours) == (2, 4.0, 2.0)
    assert (idle.idle_gpu_hours, idle.idle_share) == (1.0, 0.25)
    assert trace.queue["waiting_gpus"].to_list()[:7] == [2] * 6 + [0]
    assert trace.queue["running_gpus"].to_list()[::6] == [4, 2, 0]
    assert trace.queue["idle_gpus"].to_list()[:5] == [0, 2, 2, 2, 0]
    assert idle.idle_while_waiting_gpu_hours == 1.0
    assert idle.waiting_time_share == pytest.approx(6 / 13)


def test_data_set_is_read_back_with_the_same_figures(tmp_path: Path) -> None:
    """By the reader of the data set and by that of the Standard Workload Format."""
    rows = [
        {
            "user": f"user{at % 5}",
            "submit_s": TUESDAY + 977 * at,
            "start_s": TUESDAY + 977 * at + 40 * at,
            "end_s": TUESDAY + 977 * at + 40 * at + 300 + 61 * at,
            "gpus": 1 + at % 3,
            "timelimit_s": None if at % 7 else 5 * HOUR,
            "state": ("completed", "failed", "canceled")[at % 3],
        }
        for at in range(90)
    ]
    idle = pl.DataFrame(
        [(at, TUESDAY + 1017 * at + 60, TUESDAY + 1017 * at + 240) for at in range(0, 90, 2)], schema=IDLE, orient="row"
    )
    trace = site_trace.anonymized(raw(*rows), idle, 16, OPTIONS)
    written(tmp_path, trace)
    again = site_trace.read(tmp_path)
    assert again.jobs.equals(trace.jobs)
    assert again.idle.equals(trace.idle)
    assert site_trace.idle_figures(again) == site_trace.idle_figures(trace)
    assert site_trace.idle_figures(again).idle_gpu_hours > 0
    figures = job_figures.analyse(site_trace.job_log(again)).as_dict()
    standard = job_figures.analyse(swf.read(tmp_path / "jobs.swf")).as_dict()
    assert standard["unit"] == "processor"
    compared = ("jobs", "users", "capacity", "since", "span_s", "unit_hours", "run_s", "size", "wait_s", "requested")
    assert {name: standard[name] for name in compared} == {name: figures[name] for name in compared}
    assert standard["arrivals"]["hour"] == figures["arrivals"]["hour"]
    assert "Queue" in site_page.html(
        again, job_figures.analyse(site_trace.job_log(again)), site_trace.idle_figures(again), None
    )


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("jobs.csv", lambda text: text[:-9], "jobs.csv: is cut off or was changed"),
        ("manifest.json", lambda text: text.replace('"version": 1', '"version": 2'), "is in version 2 of the format"),
        ("manifest.json", lambda text: text[:20], "is not the manifest"),
        ("manifest.json", lambda text: text.replace("slurm-affinode-trace", "other"), "which is unknown"),
    ],
)
def test_damaged_data_set_is_an_error(tmp_path: Path, name: str, change: Any, why: str) -> None:
    written(tmp_path, site_trace.anonymized(raw({}, {}), NO_IDLE, 8, OPTIONS))
    path = tmp_path / name
    path.write_text(change(path.read_text()))
    with pytest.raises(InputError, match=why):
        site_trace.read(tmp_path)


def test_rare_request_is_found_when_a_data_set_is_read(tmp_path: Path) -> None:
    """A data set with a promise that it does not keep is rejected, even with matching digests."""
    trace = site_trace.anonymized(raw({}, {}), NO_IDLE, 8, OPTIONS)
    written(tmp_path, replace(trace, least_users=3))
    assert json.loads((tmp_path / "manifest.json").read_text())["epoch_s"] == EPOCH_S
    with pytest.raises(InputError, match="has a request that fewer than 3 users have made"):
        site_trace.read(tmp_path)
