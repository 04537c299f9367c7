"""``slurm-affinode whatif``."""

from __future__ import annotations

import json
import re
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import polars as pl
import pytest
from click.testing import CliRunner

from slurm_affinode.base.config import load as load_config
from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.cli.main import cli
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import SAMPLES
from slurm_affinode.pipeline.prediction import idle_shares
from slurm_affinode.slurm.accounting.schema import JOBS, conform
from slurm_affinode.traces import site_trace


def swf(path: Path, *jobs: tuple[int, ...]) -> str:
    """Write a log of jobs: submission, run time, processors, requested time, user."""
    lines = [f"{number} {submit} 100 {run} {units} -1 -1 {units} {limit} -1 1 {user} 1 -1 -1 -1 -1 -1"
             for number, (submit, run, units, limit, user) in enumerate(jobs, 1)]  # fmt: skip
    path.write_text("; MaxProcs: 4\n" + "\n".join(lines) + "\n")
    return f"swf:{path}"


@pytest.fixture
def log(tmp_path: Path) -> str:
    """A wide job behind a running one, and a short narrow job behind both."""
    return swf(tmp_path / "log.swf", (0, 100, 3, 100, 1), (1, 100, 4, 100, 1), (2, 20, 1, 50, 2))


def run(*words: str) -> tuple[Any, str]:
    done = CliRunner().invoke(cli, ["whatif", *words, "--json"], catch_exceptions=False, standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return json.loads(done.stdout), done.stderr


def test_figures_are_those_of_the_policy(log: str) -> None:
    easy, _ = run("--trace", log)
    assert {name: easy[name] for name in ("jobs", "capacity", "order", "backfill", "times")} == {
        "jobs": 3, "capacity": 4, "order": "fcfs", "backfill": "easy", "times": "requested",
    }  # fmt: skip
    assert easy["mean_wait_s"] == pytest.approx((0 + 99 + 0) / 3)
    assert easy["mean_jct_s"] == pytest.approx((100 + 199 + 20) / 3)
    assert easy["mean_bounded_slowdown"] == pytest.approx((1 + 1.99 + 1) / 3)
    assert easy["recorded_mean_wait_s"] == 100
    assert easy["replayed_to_recorded"] == pytest.approx(0.33)
    assert easy["mean_head_of_line_wait_s"] == 0
    strict, _ = run("--trace", log, "--backfill", "none")
    assert strict["mean_wait_s"] == pytest.approx((0 + 99 + 198) / 3)
    assert strict["mean_head_of_line_wait_s"] == pytest.approx(98 / 3)


def test_table_names_policy_wait_and_utilization(log: str) -> None:
    done = CliRunner().invoke(cli, ["whatif", "--trace", log, "--order", "sjf"], catch_exceptions=False)
    assert done.exit_code == 0
    rows = dict(line.split("  ", 1) for line in done.stdout.splitlines()[1:])
    assert {"policy", "capacity", "95th percentile of the wait", "utilization", "replayed / recorded"} <= set(rows)
    assert "sjf, backfill easy, requested times" in rows["policy"]


def test_jobs_larger_than_the_capacity_are_left_out_and_named(log: str) -> None:
    done = CliRunner().invoke(cli, ["whatif", "--trace", log, "--capacity", "3"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "left out: 1 job larger than the capacity (56 % of the processor-hours): job 2" in done.stderr
    result, _ = run("--trace", log, "--capacity", "3")
    assert (result["jobs"], result["left_out"][0]["examples"]) == (2, ["job 2"])


def test_predicted_run_times_are_estimates(tmp_path: Path) -> None:
    """Jobs of one user run for 10 s, of the other for 900 s, and all request 1,000 s: the short ones start first."""
    jobs = [(400 * at, 10 if at % 2 else 900, 1, 1000, at % 2) for at in range(200)]
    log = swf(tmp_path / "log.swf", *jobs)
    words = ("--trace", log, "--capacity", "1", "--order", "sjf", "--backfill", "first-fit", "--times")
    texts = {times: run(*words, times)[0] for times in ("requested", "predicted", "actual")}
    assert texts["predicted"]["predictor"] in ("median", "last-two", "lightgbm")
    assert texts["predicted"]["mean_wait_s"] < 0.8 * texts["requested"]["mean_wait_s"]
    assert texts["predicted"]["mean_wait_s"] == pytest.approx(texts["actual"]["mean_wait_s"], rel=0.1)
    assert texts["requested"]["predictor"] is None
    assert texts["actual"]["total_completion_s"] == pytest.approx(200 * texts["actual"]["mean_jct_s"])
    assert texts["actual"]["max_stretch"] > 1


def test_more_than_a_tenth_left_out_needs_partial(tmp_path: Path) -> None:
    log = swf(tmp_path / "log.swf", *[(0, 10, 1, 10, 1)] * 8, (0, 10, 1, -1, 1))
    with pytest.raises(AffinodeError, match=r"1 of 9 jobs, with 11\.1% of the processor-hours, are left out: 1 job "
                                            "without a requested time"):  # fmt: skip
        run("--trace", log)
    assert run("--trace", log, "--partial")[0]["jobs"] == 8
    assert run("--trace", log, "--times", "actual")[0]["jobs"] == 9
    assert run("--trace", log, "--backfill", "none")[0]["jobs"] == 9


def test_sample_is_drawn_from_the_first_rows_and_repeats(tmp_path: Path) -> None:
    log = swf(tmp_path / "log.swf", *[(at, 10 + at, 1, 100, 1) for at in range(50)])
    group, _ = run("--trace", log, "--sample", "3", "--arrivals", "2")
    assert (group["jobs"], group["sampled_from"], group["seed"]) == (3, 31, 42)
    assert group == run("--trace", log, "--sample", "3", "--arrivals", "2")[0]
    assert (
        group["mean_jct_s"] != run("--trace", log, "--sample", "3", "--arrivals", "2", "--seed", "1")[0]["mean_jct_s"]
    )


def test_priority_is_the_order_of_a_trace_that_has_one(tmp_path: Path) -> None:
    """On one GPU, half of it each: two jobs fit, then the one with high priority is first. A synthetic trace."""
    (tmp_path / "node_info_df.csv").write_text("node_name,gpu_model,gpu_capacity_num,cpu_num\nn1,A10,1,8\n")
    rows = ["1,1,A10,8,0.5,2,0,100,Spot", "2,1,A10,8,1,1,1,50,Spot", "3,2,A10,8,1,1,2,50,HP"]
    head = "job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type"
    (tmp_path / "job_info_df.csv").write_text("\n".join([head, *rows]) + "\n")
    words = ("--trace", f"spot2026:{tmp_path}", "--backfill")
    for backfill in ("easy", "first-fit"):
        first, _ = run(*words, backfill)
        by_priority, _ = run(*words, backfill, "--order", "priority")
        assert (first["jobs"], first["capacity"], first["utilization"]) == (3, 1, 1.0)
        assert first["mean_wait_s"] == by_priority["mean_wait_s"] == pytest.approx((99 + 148) / 3)
    short, _ = run("--trace", f"spot2026:{tmp_path}", "--capacity", "2", "--order", "priority")
    assert short["mean_wait_s"] == pytest.approx((0 + 0 + 49) / 3)


def test_priority_needs_priorities(log: str) -> None:
    with pytest.raises(AffinodeError, match="no job has a priority, which --order priority needs"):
        run("--trace", log, "--order", "priority")


def test_longest_run_time_is_excluded(log: str) -> None:
    result, _ = run("--trace", log, "--max-run", "50s")
    assert (result["jobs"], result["excluded"][0]["jobs"]) == (1, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--capacity", "0"), "Invalid value for '--capacity'"),
        (("--trace", "csv:x"), "is not KIND:PATH with one of the kinds swf, philly"),
        (("--trace", "swf:none.swf"), "none.swf: no such file"),
        (("--trace", "LOG", "--sample", "4"), "a sample of 4 jobs is larger than the log, which has 3 usable ones"),
        (("--trace", "PHILLY", "--times", "requested"), "no job has a requested time"),
        (("--trace", "PHILLY", "--capacity", "1"), "no job fits on 1 GPU"),
        (("--trace", "PHILLY", "--max-run", "60s"), "no job is left without 1 job with a run time above 60 s"),
        (
            (
                "--trace",
                "PHILLY-OPEN",
            ),
            "give --capacity N",
        ),
        ((), "give --trace"),
        (("--trace", "LOG", "--seed", "1"), "--seed has no influence without --sample"),
        (("--trace", "LOG", "--times", "predicted"), "3 jobs have ended, fewer than the 100"),
        (("--validate", "EMPTY"), "has no KTH-SP2-1996-2.swf.gz"),
    ],
)
def test_errors_are_one_line_and_status_2(log: str, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "empty").mkdir()
    philly = tmp_path / "p.csv"
    philly.write_text("timestamp,duration,num_gpus,cluster\n2017-10-09 07:01:55,66.0,2,a\n")
    places = {"LOG": log, "PHILLY-OPEN": f"philly:{philly}", "EMPTY": str(tmp_path / "empty")}
    arguments = [places.get(word, word) for word in words]
    if "PHILLY" in arguments:
        arguments[arguments.index("PHILLY")] = f"philly:{philly}"
        arguments = [*arguments, *(() if "--capacity" in arguments else ("--capacity", "2"))]
    with pytest.raises((AffinodeError, click.ClickException)) as error:
        run(*arguments)
    text = error.value.format_message() if isinstance(error.value, click.ClickException) else str(error.value)
    assert message in text
    assert "\n" not in text
    assert error.value.exit_code == 2


SINCE = datetime(2026, 11, 2, tzinfo=UTC)
SITE = ("--since", "2026-11-02T00:00:00Z", "--until", "2026-11-03T00:00:00Z")


def _run(number: int, submit_min: int, start_min: int, end_min: int, **more: Any) -> dict[str, Any]:
    moments = {"submit": submit_min, "eligible": submit_min, "start": start_min, "end": end_min}
    return {"cluster": "c", "job_id": number, "user": "ann", "partition": "gpu", "state": "COMPLETED", "gpus": 2,
            "nodes": 1, "node_list": "n1", "timelimit_s": 86400, "submit_line": "sbatch job.sh",
            **{name: SINCE + timedelta(minutes=value) for name, value in moments.items()}, **more}  # fmt: skip


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A node with two GPUs: a job of 4 h is idle from the 60th to the 180th minute; another waits for its end."""
    rows = [_run(1, 0, 0, 240), _run(2, 30, 240, 270, submit_line="/usr/bin/salloc -G2")]
    types = {name: dtype for name, dtype in JOBS.items() if any(name in row for row in rows)}
    with Repository.open(f"sqlite:///{tmp_path / 'affinode.sqlite'}") as store:
        store.upsert(conform(pl.DataFrame(rows, schema_overrides=types, infer_schema_length=None), JOBS))
    samples = [
        {"cluster": "c", "node": "n1", "uuid": f"GPU-{gpu}", "time": SINCE + timedelta(minutes=minute),
         "util_pct": 0.0 if 60 <= minute < 180 else 80.0}
        for gpu in "ab" for minute in range(270)
    ]  # fmt: skip
    columns = {name: pl.Series([row.get(name) for row in samples], dtype=kind) for name, kind in SAMPLES.items()}
    with closing(SampleStore(tmp_path / "history")) as history:
        history.ingest(pl.DataFrame(columns), source="test")
    return tmp_path


def test_suspension_returns_gpus_that_another_job_uses(site: Path) -> None:
    """Job 1 is suspended 15 min and 17 s after it became idle; job 2 runs for 30 min on its GPUs."""
    result, _ = run(*SITE, "--suspend-idle", "15m", "--state", str(site))
    (cluster,) = result["clusters"]
    assert (cluster["gpus"], cluster["jobs"], cluster["left_out"]) == (2, 2, {})
    waits = cluster["waits"][0]
    assert (waits["recorded_mean_s"], waits["before_mean_s"]) == (210 * 60 / 2, 210 * 60 / 2)
    assert waits["after_mean_s"] == (45 * 60 + 17) / 2
    assert cluster["replayed_to_recorded"] == 1.0
    assert (cluster["earlier"], cluster["later"], cluster["suspended_jobs"]) == (1, 0, 1)
    assert cluster["gpu_hours_returned"] == pytest.approx(2 * (105 * 60 - 17) / 3600)
    assert cluster["gpu_hours_used"] == pytest.approx(1.0)
    assert (cluster["wakes_per_day"], cluster["wake_wait_mean_s"]) == (1.0, 0.0)
    assert (cluster["dump_s"], cluster["restore_s"], cluster["costs_from"]) == (17.0, 6.0, "docs/hardware.md")
    assert (cluster["throughput_before_per_day"], cluster["throughput_after_per_day"]) == (2.0, 2.0)
    assert (cluster["head_of_line_before_mean_s"], cluster["head_of_line_after_mean_s"]) == (0.0, 0.0)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A data set of the jobs of ``site``, and a third job without samples that runs later."""
    start_s = int(SINCE.timestamp())
    base = {"account": "a", "job_name": "n", "partition": "gpu", "gpu_type": "a100", "gpus": 2, "timelimit_s": 86_400,
            "state": "completed"}  # fmt: skip
    rows = [
        {**base, "run": run_, "user": f"u{run_}", "submit_s": start_s + 60 * submit, "start_s": start_s + 60 * begin,
         "end_s": start_s + 60 * end, "measured": run_ < 3}
        for run_, submit, begin, end in ((1, 0, 0, 240), (2, 30, 240, 270), (3, 600, 600, 660))
    ]  # fmt: skip
    idle = pl.DataFrame([(1, start_s + 3600, start_s + 10_800)], schema=site_trace.IDLE, orient="row")
    raw = pl.DataFrame(rows, schema=site_trace.RAW)
    trace = site_trace.anonymized(raw, idle, 2, site_trace.ExportOptions(b"0123456789abcdef", 60, 2))
    directory = tmp_path / "trace"
    directory.mkdir()
    for name, data in site_trace.files(trace, "synthetic").items():
        (directory / name).write_bytes(data)
    return directory


def test_priority_classes_of_an_exported_trace_are_the_order(tmp_path: Path) -> None:
    """A job of the highest class overtakes one of the lowest; a job of unknown class is left out."""
    start_s = int(SINCE.timestamp())
    jobs = [*((user, 0, 9) for user in range(2)), *((user, 60, 1) for user in range(2)),
            *((user, 120, 9) for user in range(2)), (0, 180, None), (1, 180, None)]  # fmt: skip
    rows = [
        {"run": run_, "user": f"u{user}", "account": "a", "job_name": "n", "partition": "gpu", "gpu_type": "a100",
         "gpus": 1, "timelimit_s": 86_400, "state": "completed", "submit_s": start_s + at, "start_s": start_s + at,
         "end_s": start_s + at + 3600, "measured": False, "priority": priority}
        for run_, (user, at, priority) in enumerate(jobs)
    ]  # fmt: skip
    trace = site_trace.anonymized(
        pl.DataFrame(rows, schema=site_trace.RAW), pl.DataFrame(schema=site_trace.IDLE), 2,
        site_trace.ExportOptions(b"0123456789abcdef", 60, 2),
    )  # fmt: skip
    for name, data in site_trace.files(trace, "synthetic").items():
        (tmp_path / name).write_bytes(data)
    words = ("--trace", f"site:{tmp_path}", "--order", "priority", "--backfill", "none", "--partial")
    result, _ = run(*words)
    assert [(group["reason"], group["jobs"]) for group in result["left_out"]] == [("without a priority", 2)]
    assert result["mean_wait_s"] == (2 * 3480 + 2 * 7140) / 6
    with pytest.raises(AffinodeError, match="2 jobs without a priority"):
        run(*words[:-1])


def test_idle_windows_of_an_exported_trace(exported: Path, tmp_path: Path) -> None:
    """The same schedule as from the site's own data; unmeasured jobs are unknown and are not suspended."""
    words = ("--trace", f"site:{exported}")
    result, messages = run(*words, "--suspend-idle", "15m", "--sweep", "1h,4h")
    (cluster,) = result["clusters"]
    waits = cluster["waits"][0]
    assert (waits["recorded_mean_s"], waits["before_mean_s"]) == (210 * 60 / 3, 210 * 60 / 3)
    assert waits["after_mean_s"] == (45 * 60 + 17) / 3
    assert cluster["gpu_hours_returned"] == pytest.approx(2 * (105 * 60 - 17) / 3600)
    assert (cluster["suspended_jobs"], cluster["costs_from"]) == (1, "docs/hardware.md")
    assert cluster["cluster"] == "trace"
    assert [gain["suspended_jobs"] for gain in cluster["sweep"]] == [1, 0]
    assert (result["measured_jobs"], result["unknown_gpu_hours"]) == (2, 2.0)
    assert "1 job with 2 GPU-hours without samples" in messages
    same, _ = run(*words, "--gpus", "0", "--sweep", "4h", "--backfill", "easy", "--times", "actual")
    assert same["clusters"][0]["saved_wait_mean_s"] == 0
    page = tmp_path / "page.html"
    CliRunner().invoke(cli, ["whatif", *words, "--suspend-idle", "15m", "--html", str(page)], catch_exceptions=False)
    assert "would have returned" in page.read_text()
    with pytest.raises(click.UsageError, match="no meaning for idle windows"):
        run(*words, "--suspend-idle", "15m", "--limit-interactive", "1h")


def test_idle_shares_of_ended_jobs(site: Path) -> None:
    """Job 1 is idle for two of four hours, job 2 never; jobs without samples are not in the table."""
    result = idle_shares(
        load_config(None, state_dir=site), SINCE, SINCE + timedelta(days=1), now=SINCE + timedelta(days=2)
    )
    assert sorted(result.select("job_id", "idle_pct").rows()) == [(1, pytest.approx(50, abs=1)), (2, 0)]


def test_returned_hours_by_predicted_idle_time(tmp_path: Path) -> None:
    """Jobs of one user are idle for most of their time. Predictions of the first jobs are unknown or of all users."""
    start_s = int(SINCE.timestamp())
    rows, idle = [], []
    for number in range(300):
        begin = start_s + 4000 * number
        rows.append({"run": number, "user": f"u{number % 2}", "account": "a", "job_name": "fit", "partition": "gpu",
                     "gpu_type": "a100", "gpus": 1, "timelimit_s": 86_400, "state": "completed", "submit_s": begin,
                     "start_s": begin, "end_s": begin + 3600, "measured": True})  # fmt: skip
        if number % 2:
            idle.append((number, begin + 600, begin + 3600))
    trace = site_trace.anonymized(
        pl.DataFrame(rows, schema=site_trace.RAW), pl.DataFrame(idle, schema=site_trace.IDLE, orient="row"), 2,
        site_trace.ExportOptions(b"0123456789abcdef", 60, 2),
    )  # fmt: skip
    for name, data in site_trace.files(trace, "synthetic").items():
        (tmp_path / name).write_bytes(data)
    words = ("--trace", f"site:{tmp_path}", "--suspend-idle", "10m", "--idle-risk")
    (cluster,) = run(*words)[0]["clusters"]
    classes = {row["least_pct"]: row for row in cluster["idle_risk"]}
    assert sum(row["jobs"] for row in classes.values()) == 300
    assert classes[50.0]["jobs"] > 140
    assert classes[50.0]["gpu_hours_returned"] > 0.95 * cluster["gpu_hours_returned"]
    assert classes[0.0]["gpu_hours_returned"] < 0.05 * cluster["gpu_hours_returned"]
    text = CliRunner().invoke(cli, ["whatif", *words], catch_exceptions=False).stdout
    assert "50 % or more" in text
    assert "below 10 %" in text


def test_job_in_place_returns_no_gpus_to_the_queue(site: Path) -> None:
    (cluster,) = run(*SITE, "--suspend-idle", "15m", "--mode", "inplace", "--state", str(site))[0]["clusters"]
    assert cluster["mode"] == "inplace"
    assert cluster["gpu_hours_returned"] == pytest.approx(2 * (105 * 60 - 17) / 3600)
    assert (cluster["gpu_hours_used"], cluster["wakes_per_day"], cluster["earlier"], cluster["later"]) == (0, 1, 0, 1)


def test_predicted_run_times_of_a_site(site: Path) -> None:
    """Jobs of before, which ran for 10 min of their day: a short job starts before a wide one that waits."""
    rows = [_run(100 + at, -2000 + 10 * at, -2000 + 10 * at, -1990 + 10 * at, gpus=1) for at in range(120)]
    rows += [_run(2, 30, 240, 270, gpus=4), _run(301, 210, 211, 221, gpus=1),
             _run(302, 0, 0, 240, gpus=1, user="eve")]  # fmt: skip
    types = {name: dtype for name, dtype in JOBS.items() if any(name in row for row in rows)}
    with Repository.open(f"sqlite:///{site / 'affinode.sqlite'}") as store:
        store.upsert(conform(pl.DataFrame(rows, schema_overrides=types, infer_schema_length=None), JOBS))
    words = (*SITE, "--backfill", "easy", "--state", str(site), "--times")
    waits = {}
    for times in ("requested", "predicted", "actual"):
        (cluster,) = run(*words, times)[0]["clusters"]
        waits[times] = cluster["waits"][0]["before_mean_s"]
        assert (cluster["predictor"] is None) == (times != "predicted")
    assert waits["predicted"] == waits["actual"] < waits["requested"]


def test_order_of_recorded_priorities(site: Path) -> None:
    """Of two jobs that wait for both GPUs, the one with the higher priority starts first."""
    words = (*SITE, "--order", "priority", "--state", str(site))
    with pytest.raises(AffinodeError, match="2 without a priority"):
        run(*words)
    rows = [_run(1, 0, 0, 240, priority=1), _run(2, 30, 240, 270, priority=5),
            _run(3, 40, 270, 300, priority=9)]  # fmt: skip
    types = {name: dtype for name, dtype in JOBS.items() if any(name in row for row in rows)}
    with Repository.open(f"sqlite:///{site / 'affinode.sqlite'}") as store:
        store.upsert(conform(pl.DataFrame(rows, schema_overrides=types, infer_schema_length=None), JOBS))
    (by_priority,) = run(*words)[0]["clusters"]
    (by_submission,) = run(*SITE, "--state", str(site))[0]["clusters"]
    assert by_priority["policy"] == "priority, backfill first-fit"
    assert by_submission["waits"][0]["before_mean_s"] == 60 * (0 + 210 + 230) / 3
    assert by_priority["waits"][0]["before_mean_s"] == 60 * (0 + 240 + 200) / 3
    assert by_priority["waits"][0]["before_p95_s"] > by_submission["waits"][0]["before_p95_s"]


def test_sweep_has_the_gains_of_single_replays(site: Path) -> None:
    """The idle period of 2 h is longer than the first two windows, and not than the last."""
    (cluster,) = run(*SITE, "--sweep", "2h,10m,15m", "--state", str(site))[0]["clusters"]
    assert [gain["suspend_idle_s"] for gain in cluster["sweep"]] == [600, 900, 7200]
    (single,) = run(*SITE, "--suspend-idle", "15m", "--state", str(site))[0]["clusters"]
    assert {name: single[name] for name in cluster["sweep"][1] if name in single} == {
        name: value for name, value in cluster["sweep"][1].items() if name != "suspend_idle_s"
    }
    assert cluster["sweep"][0]["gpu_hours_returned"] > cluster["sweep"][1]["gpu_hours_returned"]
    assert (cluster["sweep"][2]["gpu_hours_returned"], cluster["sweep"][2]["wakes_per_day"]) == (0, 0)
    assert cluster["gpu_hours_returned"] == 0  # the replay itself has no suspension


def test_page_states_the_result_and_draws_the_sweep(site: Path, tmp_path: Path) -> None:
    """Without --suspend-idle the sentence is about the window closest to 15 min."""
    page = tmp_path / "whatif.html"
    words = ["whatif", *SITE, "--sweep", "10m,20m,1h", "--html", str(page), "--state", str(site)]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert "Idle time before a suspension" in done.stdout
    text = page.read_text()
    assert "Suspending jobs on c that are idle for 10m would have returned 3.7 GPU-hours in 1 days." not in text
    assert "Suspending jobs on c that are idle for 10m would have returned 3.7 GPU-hours in 1 day." in text
    assert "Other jobs would have used 1 GPU-hour" in text
    for part in (
        'id="fig-window-1"',
        'id="fig-wakes-1"',
        "Replays by idle time before a suspension",
        "Waits by partition",
    ):
        assert part in text


def test_page_of_another_change_names_it(site: Path, tmp_path: Path) -> None:
    page = tmp_path / "whatif.html"
    words = ["whatif", *SITE, "--gpus", "+2", "--html", str(page), "--state", str(site), "--json"]
    assert CliRunner().invoke(cli, words, catch_exceptions=False).exit_code == 0
    sentence = re.search("On c, [^<]*", page.read_text())
    assert sentence is not None
    assert (
        sentence[0].replace("\N{NO-BREAK SPACE}", " ")
        == "On c, with 2 more GPUs, the mean wait would have been 1h 45m shorter in 1 day."
    )


def test_page_that_cannot_be_written_is_an_error(site: Path) -> None:
    with pytest.raises(UnreachableError, match=r"/dev/null/x\.html: cannot be written"):
        run(*SITE, "--html", "/dev/null/x.html", "--state", str(site))


def test_replay_without_a_change_changes_nothing(site: Path) -> None:
    (cluster,) = run(*SITE, "--state", str(site))[0]["clusters"]
    assert (cluster["saved_wait_mean_s"], cluster["gpu_hours_returned"], cluster["gpu_hours_used"]) == (0, 0, 0)


def test_more_gpus_start_the_waiting_job(site: Path) -> None:
    (cluster,) = run(*SITE, "--gpus", "+2", "--state", str(site))[0]["clusters"]
    assert cluster["waits"][0]["after_mean_s"] == 0


def test_job_waits_for_the_gpus_of_its_partition(site: Path) -> None:
    """Job 3 of another partition ran on n2, which is free while job 2 waits for n1."""
    rows = [_run(3, 0, 0, 20, partition="test", node_list="n2")]
    types = {name: dtype for name, dtype in JOBS.items() if any(name in row for row in rows)}
    with Repository.open(f"sqlite:///{site / 'affinode.sqlite'}") as store:
        store.upsert(conform(pl.DataFrame(rows, schema_overrides=types, infer_schema_length=None), JOBS))
    (cluster,) = run(*SITE, "--state", str(site))[0]["clusters"]
    assert [(pool["partitions"], pool["nodes"], pool["gpus"], pool["jobs"]) for pool in cluster["pools"]] == [
        (["gpu"], 1, 2, 2), (["test"], 1, 2, 1),
    ]  # fmt: skip
    assert cluster["gpus"] == 4
    assert cluster["waits"][0]["before_mean_s"] == 210 * 60 / 3
    (joined,) = run(*SITE, "--one-pool", "--state", str(site))[0]["clusters"]
    assert joined["waits"][0]["before_mean_s"] == 0
    assert len(joined["pools"]) == 1
    (more,) = run(*SITE, "--gpus", "+2", "--state", str(site))[0]["clusters"]
    assert more["waits"][0]["after_mean_s"] == 0  # they are added where jobs waited


def test_time_limits_of_most_gpu_hours_are_needed_for_easy(site: Path) -> None:
    """Of eleven jobs only one has no limit, but it has most of the GPU-hours."""
    rows = [_run(10, 0, 0, 240, gpus=200, timelimit_s=None)]
    rows += [_run(number, 0, 0, 10) for number in range(11, 20)]
    types = {name: dtype for name, dtype in JOBS.items() if any(name in row for row in rows)}
    with Repository.open(f"sqlite:///{site / 'affinode.sqlite'}") as store:
        store.upsert(conform(pl.DataFrame(rows, schema_overrides=types, infer_schema_length=None), JOBS))
    words = (*SITE, "--backfill", "easy", "--state", str(site))
    with pytest.raises(AffinodeError, match=r"1 of 12 GPU jobs, with 98\.\d% of the known GPU-hours, are left out: 1 "
                                            "without a time limit"):  # fmt: skip
        run(*words)
    (cluster,) = run(*words, "--partial")[0]["clusters"]
    assert cluster["jobs"] == 11
    assert cluster["left_out_share"] > 0.98


def test_limit_ends_interactive_jobs_only(site: Path) -> None:
    (cluster,) = run(*SITE, "--limit-interactive", "10m", "--state", str(site))[0]["clusters"]
    assert cluster["interactive"] == 1


def test_table_shows_the_ratio_beside_each_gain(site: Path) -> None:
    words = ["whatif", *SITE, "--suspend-idle", "15m", "--backfill", "easy", "--state", str(site)]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0
    for text in (
        "GPU-hours returned",
        "mean wait saved",
        "replayed / recorded mean wait",
        "wakes per day",
        "mean then",
    ):
        assert text in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--since", "1d", "--trace", "swf:x"), "give --trace"),
        (("--since", "1d", "--backfill", "none"), "only --backfill easy, conservative or first-fit"),
        (("--since", "1d", "--order", "sjf"), "--order is fcfs or priority"),
        (("--trace", "swf:x", "--gpus", "+1"), "need --since"),
        (("--trace", "swf:x", "--sweep"), "need --since"),
        (("--trace", "swf:x", "--mode", "inplace"), "need --since"),
        (("--since", "1d", "--times", "predicted"), "with --backfill easy or conservative"),
        ((*SITE, "--sweep", "5m,x"), "'x'"),
        (("--since", "2026-11-03", "--until", "2026-11-02"), "the interval ends before it begins"),
        (("--since", "2026-01-03", "--until", "2026-01-04"), "no GPU job ran"),
    ],
)
def test_errors_of_replays_are_one_line(site: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises((AffinodeError, click.ClickException)) as error:
        run(*words, "--state", str(site))
    text = error.value.format_message() if isinstance(error.value, click.ClickException) else str(error.value)
    assert message in text
    assert error.value.exit_code == 2


def test_damaged_part_is_named(site: Path) -> None:
    part = next((site / "history").rglob("part-*.parquet"))
    part.write_bytes(part.read_bytes()[:-1000])
    with pytest.raises(UnreachableError, match=part.name):
        run(*SITE, "--suspend-idle", "15m", "--state", str(site))


@pytest.fixture
def requests(tmp_path: Path) -> str:
    """Two servers with four requests of 10 s; a base model loads for 22 s. A synthetic trace."""
    rows = [("16:00:00", 10.0, "m0"), ("16:00:05", 10.0, "m1"), ("16:01:40", 10.0, "m0"), ("16:01:45", 10.0, "m0"),
            ("16:01:46", "", "m1")]  # fmt: skip
    lines = [f"2024-11-15 {at},TXT_2_IMG,SUCCEED,{exec_s},{model}" for at, exec_s, model in rows]
    head = "gmt_create,predict_type,predict_status,exec_time_seconds,checkpoint_model_version_id"
    (tmp_path / "lora_request_trace.csv").write_text("\n".join([head, *lines]) + "\n")
    (tmp_path / "basemodel_update_latency_anon.csv").write_text(
        "timestamp_anon,value,container_ip\n1.0,21000.0,a\n2.0,23000.0,b\n"
    )
    return f"gentd26:{tmp_path}"


def test_servers_share_gpus(requests: str) -> None:
    """With a GPU for each, both are loaded; with one, they take turns and the first is woken again."""
    result, _ = run("--trace", requests, "--pool-servers", "--capacity", "1")
    assert (result["requests"], result["servers"], result["load_s"], result["wake_s"]) == (4, 2, 22.0, 6.0)
    apart, shared = result["pools"]
    assert (apart["gpus"], apart["most_awake"], apart["hot_share"], apart["cold_share"]) == (2, 2, 0.5, 0.5)
    assert apart["wait_mean_s"] == (22 + 22 + 0 + 5) / 4
    assert (shared["gpus"], shared["most_awake"]) == (1, 1)
    assert shared["wait_mean_s"] == (22 + 49 + 6 + 11) / 4
    assert (shared["warm_share"], shared["cold_share"]) == (0.5, 0.5)
    assert result["notes"] == ["1 request without a time, an execution time or a model"]
    assert any("Aegaeon" in text for text in result["published"])
    cold, _ = run("--trace", requests, "--pool-servers", "--capacity", "1", "--warm", "0")
    assert cold["pools"][1]["cold_share"] == 1.0
    asleep, _ = run("--trace", requests, "--pool-servers", "--capacity", "1", "--suspend-idle", "10s")
    assert [row["window_s"] for row in asleep["pools"]] == [None, 10.0]
    assert asleep["pools"][1]["gpu_hours_awake"] < shared["gpu_hours_awake"]
    assert result["gpu_hours"] == pytest.approx(2 * 105 / 3600)
    text = CliRunner().invoke(cli, ["whatif", "--trace", requests, "--pool-servers"], catch_exceptions=False).stdout
    assert "wait for a wake" in text
    assert "not computed here" in text


def test_tiers_compare_rules_of_eviction(requests: str) -> None:
    result, _ = run("--trace", requests, "--pool-servers", "--tiers", "--capacity", "1")
    assert (result["servers"], result["gpus"], result["load_mean_s"]) == (2, 1, 22.0)
    assert [(row["warm"], row["eviction"]) for row in result["tiers"][:4]] == [
        (0, "lru"), (0, "cost"), (1, "lru"), (1, "cost"),
    ]  # fmt: skip
    assert [row["cold_share"] for row in result["tiers"][:4]] == [1.0, 1.0, 0.75, 0.5]
    for name in ("Aegaeon", "ServerlessLLM", "FaasCache", "vLLM sleep mode"):
        assert any(name in text for text in result["published"])
    single, _ = run("--trace", requests, "--pool-servers", "--tiers", "--warm", "1", "--suspend-idle", "10s")
    assert [row["warm"] for row in single["tiers"]] == [1, 1]
    with pytest.raises(click.UsageError, match="need --pool-servers"):
        run("--trace", "swf:x", "--tiers")


def test_tiers_of_the_page_are_those_of_the_command(shared_data: Path) -> None:
    words = ["whatif", "--trace", f"gentd26:{shared_data / 'gentd26'}", "--pool-servers", "--tiers"]
    done = CliRunner().invoke(cli, words, catch_exceptions=False, env={"COLUMNS": "200"})
    shown = [line.rstrip() for line in done.stdout.split("Published")[0].splitlines() if line.strip()]
    page = (Path(__file__).parents[3] / "docs" / "whatif.md").read_text()
    assert len(shown) == 13
    assert [line for line in shown if line not in page] == []


def test_pools_of_the_page_are_those_of_the_command(shared_data: Path) -> None:
    words = ["whatif", "--trace", f"gentd26:{shared_data / 'gentd26'}", "--pool-servers", "--suspend-idle", "5m"]
    done = CliRunner().invoke(cli, words, catch_exceptions=False, env={"COLUMNS": "200"})
    shown = [line.rstrip() for line in done.stdout.split("Published")[0].splitlines() if line.strip()]
    page = (Path(__file__).parents[3] / "docs" / "whatif.md").read_text()
    assert len(shown) == 9
    assert [line for line in shown if line not in page] == []


def test_server_options_need_requests(requests: str, log: str) -> None:
    for words, message in (
        (("--trace", requests), "gentd26 needs --pool-servers"),
        (("--trace", log, "--pool-servers"), "--pool-servers needs --trace gentd26"),
        (("--trace", log, "--split-phases"), "need --trace azure"),
        (("--trace", "azure:x", "--capacity", "1"), "have no influence on this trace"),
        (("--trace", log, "--warm", "1"), "--warm and --tiers need --pool-servers"),
        (("--trace", requests, "--pool-servers", "--order", "sjf"), "--order has no influence with --pool-servers"),
        (("--trace", "azure:x", "--html", "x.html"), "--html has no influence with --trace azure:PATH"),
        (("--trace", "azure:x", "--since", "1d"), "--since has no influence with --trace azure:PATH"),
        (("--trace", log, "--validate", "."), "--trace has no influence with --validate"),
        (("--trace", log, "--until", "2026-01-01"), "--until has no influence with a log"),
        (("--since", "1d", "--seed", "7"), "--seed has no influence with --since"),
    ):
        with pytest.raises(click.UsageError, match=message):
            run(*words)


_SLOW_ENGINE = ("--iteration-ms", "100", "--request-us", "0", "--prefill-us", "10000", "--transfer-us", "0",
                "--engine-gpus", "2")  # fmt: skip


@pytest.fixture
def services(tmp_path: Path) -> Path:
    """Two services whose requests alternate, so that prompts delay tokens of others. A synthetic trace."""
    for name, second, context, generated in (("chat", 0, 10, 5), ("code", 1, 100, 2)):
        lines = [f"2023-11-16 18:{minute:02}:00.{second}000000,{context},{generated}" for minute in range(10)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    return tmp_path


def test_engines_are_sized_for_a_latency_target(services: Path) -> None:
    """On one engine, a prompt of 1.1 s delays the other service's tokens; with separate phases it does not."""
    words = ("--trace", f"azure:{services}", *_SLOW_ENGINE)
    result, _ = run(*words, "--split-phases", "--pool-servers", "--between-tokens", "0.11,0.5", "--first-token", "2")
    assert [(service["name"], service["requests"]) for service in result["services"]] == [("chat", 10), ("code", 10)]
    relaxed, strict = result["targets"]
    assert relaxed["target"] == {"first_token_s": 2.0, "between_tokens_s": 0.5}
    assert (relaxed["mixed"]["engines"], [item["engines"] for item in relaxed["apart"]]) == (1, [1, 1])
    assert strict["mixed"]["engines"] == 2
    assert (strict["split"]["engines"], strict["split"]["prefill_engines"]) == (2, 1)
    assert (result["gpus_per_engine"], result["engine"]["base_s"]) == (2, 0.1)
    assert any("Splitwise" in text for text in result["published"])
    unreachable, _ = run(*words, "--between-tokens", "0.05")
    assert (unreachable["targets"][0]["mixed"], unreachable["targets"][0]["split"]) == (None, None)
    done = CliRunner().invoke(cli, ["whatif", *words, "--split-phases", "--pool-servers"], catch_exceptions=False)
    assert "own, chat" in done.stdout
    assert "not computed here" in done.stdout
    with pytest.raises(AffinodeError, match="a single service"):
        run("--trace", f"azure:{services / 'chat.csv'}", "--pool-servers")


def test_engines_that_divide_prompts_are_sized_beside_the_others(services: Path) -> None:
    """With ten tokens of a prompt in an iteration, the other service has its four tokens in 0.8 s; else in 1.4 s."""
    words = ("--trace", f"azure:{services}", *_SLOW_ENGINE, "--between-tokens", "0.25", "--first-token", "2.5")
    divided, _ = run(*words, "--chunk-tokens", "11", "--split-phases")
    undivided, _ = run(*words, "--split-phases")
    assert (divided["engine"]["chunk_tokens"], undivided["engine"]["chunk_tokens"]) == (11, None)
    (target,), (other,) = divided["targets"], undivided["targets"]
    assert (target["chunked"]["engines"], target["mixed"]["engines"]) == (1, 2)
    assert target["chunked"]["between_tokens_p99_s"] == pytest.approx(0.2, rel=0.01)
    assert other == {**target, "chunked": None}
    done = CliRunner().invoke(cli, ["whatif", *words, "--chunk-tokens", "11"], catch_exceptions=False)
    assert "at most 11 tokens" in done.stdout
    with pytest.raises(click.UsageError, match="--chunk-tokens"):
        run("--since", "1d", "--chunk-tokens", "11")


@pytest.mark.parametrize("option", [(), ("--split-phases",), ("--pool-servers",)])
def test_requests_that_fit_no_engine_are_an_error(services: Path, option: tuple[str, ...]) -> None:
    """No number of engines serves 99 % of the requests then."""
    with pytest.raises(AffinodeError, match=r"10 of [12]0 requests need more than the KV cache of an engine"):
        run("--trace", f"azure:{services}", *_SLOW_ENGINE, "--kv-tokens", "64", *option)


def test_time_between_tokens_of_single_tokens_is_unknown(services: Path) -> None:
    text = (services / "chat.csv").read_text().replace(",10,5", ",10,1")
    (services / "chat.csv").write_text(text)
    words = ("--trace", f"azure:{services / 'chat.csv'}", *_SLOW_ENGINE, "--split-phases",
             "--between-tokens", "0.5", "--first-token", "2")  # fmt: skip
    result, _ = run(*words)
    for target in result["targets"]:
        assert (target["mixed"]["between_tokens_p99_s"], target["split"]["between_tokens_mean_s"]) == (None, None)
    done = CliRunner().invoke(cli, ["whatif", *words], catch_exceptions=False, env={"COLUMNS": "200"})
    assert done.stdout.count("unknown") == 2 * len(result["targets"])


def test_defaults_of_the_engine_are_those_of_the_model() -> None:
    from slurm_affinode.cli.engine_options import default_texts
    from slurm_affinode.cli.whatif import _ENGINE_DEFAULTS
    from slurm_affinode.whatif.phases import LLAMA2_70B

    assert default_texts(LLAMA2_70B) == _ENGINE_DEFAULTS


def test_engines_of_the_page_are_those_of_the_command(shared_data: Path) -> None:
    trace = shared_data / "azure" / "AzureLLMInferenceTrace_code.csv"
    words = ["whatif", "--trace", f"azure:{trace}", "--split-phases", "--chunk-tokens", "1024"]
    done = CliRunner().invoke(cli, words, catch_exceptions=False, env={"COLUMNS": "200"})
    shown = [line.rstrip() for line in done.stdout.split("Published")[0].splitlines() if line.strip()]
    page = (Path(__file__).parents[3] / "docs" / "whatif.md").read_text()
    assert len(shown) == 14
    assert [line for line in shown if line not in page] == []
