"""``slurm-affinode whatif``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.cli.main import cli


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
    strict, _ = run("--trace", log, "--backfill", "none")
    assert strict["mean_wait_s"] == pytest.approx((0 + 99 + 198) / 3)


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
    found, _ = run("--trace", log, "--capacity", "3")
    assert (found["jobs"], found["left_out"][0]["examples"]) == (2, ["job 2"])


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
    one, _ = run("--trace", log, "--sample", "3", "--arrivals", "2")
    assert (one["jobs"], one["sampled_from"], one["seed"]) == (3, 31, 42)
    assert one == run("--trace", log, "--sample", "3", "--arrivals", "2")[0]
    assert one["mean_jct_s"] != run("--trace", log, "--sample", "3", "--arrivals", "2", "--seed", "1")[0]["mean_jct_s"]


def test_longest_run_time_is_excluded(log: str) -> None:
    found, _ = run("--trace", log, "--max-run", "50s")
    assert (found["jobs"], found["excluded"][0]["jobs"]) == (1, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--capacity", "0"), "Invalid value for '--capacity'"),
        (("--trace", "csv:x"), "neither swf:FILE nor philly:FILE"),
        (("--trace", "swf:none.swf"), "none.swf: no such file"),
        (("--trace", "LOG", "--sample", "4"), "a sample of 4 jobs is larger than the log, which has 3 usable ones"),
        (("--trace", "PHILLY", "--times", "requested"), "no job has a requested time"),
        (("--trace", "PHILLY", "--capacity", "1"), "no job fits on 1 GPU"),
        (
            (
                "--trace",
                "PHILLY-OPEN",
            ),
            "give --capacity N",
        ),
        ((), "give --trace"),
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
