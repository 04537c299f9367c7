"""``slurm-affinode predict``."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import polars as pl
import pytest
from agent_stand_ins import job as slurm_job
from click.testing import CliRunner

from slurm_affinode.base.config import MODEL_FILE
from slurm_affinode.base.config import load as load_config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.cli.main import cli
from slurm_affinode.db.repository import Repository
from slurm_affinode.pipeline import data_checks
from slurm_affinode.pipeline.prediction import drift, expected_ends, read_site, train
from slurm_affinode.prediction import model_file
from slurm_affinode.slurm.accounting.schema import JOBS, STEPS, conform
from slurm_affinode.traces import site_trace

SINCE = datetime(2026, 10, 1, tzinfo=UTC)
SITE = ("--since", "2026-10-01T00:00:00Z", "--until", "2026-11-01T00:00:00Z")


def run(*words: str) -> Any:
    done = CliRunner().invoke(cli, ["predict", *words, "--json"], catch_exceptions=False, standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return json.loads(done.stdout)


def swf(path: Path, count: int = 400) -> str:
    """Write a synthetic log of three users: run times of 100 s, 200 s and 300 s, of 1,000 s requested."""
    lines = [
        f"{at + 1} {at * 150} 10 {100 * kind} {kind} -1 -1 {kind} 1000 -1 1 {kind} 1 -1 -1 -1 -1 -1"
        for at, kind in ((at, 1 + at % 3) for at in range(count))
    ]
    path.write_text("; MaxProcs: 4\n" + "\n".join(lines) + "\n")
    return f"swf:{path}"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """200 jobs of ann over 25 days: an hour each, 2 GPUs of which a day is requested, 6 GiB of 64 GiB."""
    rows, steps = [], []
    for number in range(1, 201):
        submit = SINCE + timedelta(hours=3 * number)
        moments = {"submit": submit, "eligible": submit, "start": submit + timedelta(minutes=5),
                   "end": submit + timedelta(minutes=65)}  # fmt: skip
        rows.append({"cluster": "c", "job_id": number, "user": "ann", "partition": "gpu", "job_name": f"fit{number}",
                     "state": "COMPLETED", "gpus": 2, "nodes": 1, "timelimit_s": 86_400, "elapsed_s": 3600,
                     "req_mem_bytes": 64 * 2**30, **moments})  # fmt: skip
        steps.append({"cluster": "c", "job_id": number, "submit": submit, "step_id": "0", "tasks": 2,
                      "max_rss_bytes": 3 * 2**30})  # fmt: skip
    with Repository.open(f"sqlite:///{tmp_path / 'affinode.sqlite'}") as store:
        store.upsert(*(
            conform(pl.DataFrame(part, schema_overrides={n: d for n, d in schema.items() if n in part[0]}), schema)
            for part, schema in ((rows, JOBS), (steps, STEPS))
        ))  # fmt: skip
    return tmp_path


def test_site_is_trained_shown_and_advised(site: Path) -> None:
    """Upper bounds are an hour and 6 GiB: nothing varies."""
    trained = run("train", *SITE, "--state", str(site))
    assert [(row["target"], row["jobs"]) for row in trained["targets"]] == [("run_s", 200), ("mem_bytes", 200)]
    assert (site / "prediction.json").is_file()
    assert "ann" not in (site / "prediction.json").read_text()
    assert run("show", "--state", str(site)) == trained
    completed = run("advise", *SITE, "--user", "ann", "--name", "fit200", "--state", str(site))
    time, memory = completed["targets"]
    assert (time["predicted"], time["requested"], time["suggested"]) == (3600, 86_400, 3600)
    assert (memory["predicted"], memory["suggested"]) == (6 * 2**30, 6 * 2**30)
    assert time["similar_jobs"] == 200


def test_request_below_the_upper_bound_is_reported(site: Path) -> None:
    run("train", *SITE, "--state", str(site))
    words = ["predict", "advise", *SITE, "--user", "ann", "--limit", "30m", "--state", str(site)]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert "run_s: the request is below the upper bound" in done.stderr


def test_running_jobs_are_expected_to_end_as_predicted(site: Path) -> None:
    """A job that accounting has is predicted by the model of the site; another one is not."""
    run("train", *SITE, "--state", str(site))
    config = load_config(None, state_dir=site)
    with Repository.open(config.db_url, create=False) as store:
        last = store.jobs(SINCE, SINCE + timedelta(days=31)).sort("submit").row(-1, named=True)
    moments = {name: last[name] for name in ("submit", "eligible", "start")}
    jobs = [slurm_job(last["job_id"], state="RUNNING", **moments), slurm_job(10**6, state="RUNNING", **moments)]
    trained = model_file.read(site / MODEL_FILE)
    ends = expected_ends(config, jobs, last["cluster"], trained, last["start"] + timedelta(days=1))
    assert ends == {last["job_id"]: last["start"] + timedelta(hours=1)}


def test_evaluation_of_the_site_simulates_its_gpus(site: Path) -> None:
    completed = run("evaluate", *SITE, "--state", str(site))
    assert (completed["capacity"], completed["unit"]) == (2, "GPU")
    assert {schedule["estimates"] for schedule in completed["schedules"]} >= {
        "requested",
        "last-two",
        "median",
        "actual",
    }
    assert all(schedule["all_jobs"]["mean_wait_s"] == 0 for schedule in completed["schedules"])


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A data set of three users: jobs of the first are idle for 80 % of an hour, of the second for 30 %, else never."""
    rows, idle = [], []
    for number in range(360):
        start = int(SINCE.timestamp()) + 7200 * number
        user = number % 3
        rows.append({"run": number, "user": f"u{user}", "account": "a", "job_name": "fit", "partition": "gpu",
                     "gpu_type": "a100", "gpus": 1, "timelimit_s": 86_400, "state": "completed", "submit_s": start,
                     "start_s": start, "end_s": start + 3600, "measured": number % 10 > 0})  # fmt: skip
        if user < 2:
            idle.append((number, start, start + (2880, 1080)[user]))
    trace = site_trace.anonymized(
        pl.DataFrame(rows, schema=site_trace.RAW), pl.DataFrame(idle, schema=site_trace.IDLE, orient="row"), 2,
        site_trace.ExportOptions(b"0123456789abcdef", 60, 3),
    )  # fmt: skip
    directory = tmp_path / "trace"
    directory.mkdir()
    for name, data in site_trace.files(trace, "synthetic").items():
        (directory / name).write_bytes(data)
    return directory


def test_idle_time_is_predicted_by_user_and_name(exported: Path) -> None:
    """Only measured jobs count; what repeats without a difference is predicted without an error."""
    completed = run("evaluate", "--trace", f"site:{exported}", "--no-schedule")
    target = next(item for item in completed["targets"] if item["target"] == "idle_pct")
    assert (target["unit"], target["fitted_jobs"]) == ("%", 162)
    losses = {item["predictor"]: item["pinball"] for item in target["qualities"]}
    assert losses["median"] == 0
    assert target["choice"]["predictor"] != "lightgbm"


def test_advice_has_the_idle_time(exported: Path, tmp_path: Path) -> None:
    words = ("--trace", f"site:{exported}", "--model", str(tmp_path / "model.json"))
    run("train", *words)
    rows = json.loads((tmp_path / "model.json").read_text())
    assert "idle_pct" in {target["target"] for target in rows["targets"]}
    done = {user: run("advise", *words, "--user", user)["targets"][-1] for user in ("1", "2", "3")}
    assert {item["target"] for item in done.values()} == {"idle_pct"}
    assert sorted(item["predicted"] for item in done.values()) == [1, 30, 80]  # below 1 % counts as 1 %
    assert all(item["suggested"] is None and item["requested"] is None for item in done.values())
    text = CliRunner().invoke(cli, ["predict", "advise", *words, "--user", "1"], catch_exceptions=False).stdout
    assert " %" in text


def test_drift_of_a_model(site: Path) -> None:
    """Jobs that ended since the training ran as before, or each for 4 % longer than the one before."""
    config = load_config(None, state_dir=site)
    trained = train(read_site(config, SINCE, SINCE + timedelta(days=15)))
    source = read_site(config, SINCE, SINCE + timedelta(days=31))
    (time, memory) = drift(source, trained)
    assert (time.target, time.coverage, memory.target, memory.coverage) == ("run_s", 1.0, "mem_bytes", 1.0)
    assert 70 < time.jobs < 90
    later = (pl.col("submit_s") > trained.last_s).cum_sum()
    drifted = replace(source, submissions=source.submissions.with_columns(pl.col("run_s") * 1.04**later))
    first = drift(drifted, trained)[0]
    assert first.coverage < 0.3
    assert drift(read_site(config, SINCE, SINCE + timedelta(days=15)), trained) == ()


def test_doctor_reports_drift(site: Path) -> None:
    config = load_config(None, state_dir=site)
    now = SINCE + timedelta(days=31)
    assert "prediction" not in {check.name for check in data_checks.examine(config, now)}
    model_file.write(site / MODEL_FILE, train(read_site(config, SINCE, SINCE + timedelta(days=15))))
    checks = {check.name: check for check in data_checks.examine(config, now)}
    assert checks["prediction"].status == "ok"
    assert "run_s 100 % of" in checks["prediction"].detail
    with Repository.open(config.db_url) as store:
        rows = store.jobs(SINCE + timedelta(days=16), now).sort("submit").with_row_index("at")
        run_s = (3600 * 1.04 ** pl.col("at")).round().cast(pl.Int64)
        store.upsert(rows.with_columns((pl.col("start") + pl.duration(seconds=run_s)).alias("end"),
                                       run_s.alias("elapsed_s")).drop("at"))  # fmt: skip
    check = {check.name: check for check in data_checks.examine(config, now)}["prediction"]
    assert (check.status, check.hint) == ("problem", "slurm-affinode predict train")
    assert "the model has drifted" in check.detail


def test_evaluation_of_a_log_has_losses_and_schedules(tmp_path: Path) -> None:
    completed = run("evaluate", "--trace", swf(tmp_path / "log.swf"))
    (target,) = completed["targets"]
    losses = {item["predictor"]: item["pinball"] for item in target["qualities"]}
    assert losses["limit"] == pytest.approx(400, rel=0.01)  # half of 900, 800 and 700 s, in the mean
    assert (losses["last-two"], losses["median"]) == (0, 0)
    assert completed["submissions"] == 400
    assert len(completed["schedules"]) >= 8
    assert {"total_completion_s", "max_stretch", "makespan_s"} <= set(completed["schedules"][0]["all_jobs"])
    assert run("evaluate", "--trace", swf(tmp_path / "log.swf"), "--no-schedule")["schedules"] == []
    smaller = run("evaluate", "--trace", swf(tmp_path / "log.swf"), "--capacity", "2")
    assert [(group["reason"], group["jobs"]) for group in smaller["left_out"]] == [("larger than the capacity", 133)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("evaluate", "--trace", "swf:none.swf"), "none.swf: no such file"),
        (("train", "--trace", "SMALL"), "5 jobs have ended, fewer than the 100"),
        (("show", "--model", "none.json"), "none.json: no such file"),
        (("show", "--model", "LOG"), "is not a model"),
        (("train", "--since", "2026-11-03", "--until", "2026-11-02"), "the interval ends before it begins"),
        (("train", "--since", "2026-01-03", "--until", "2026-01-04"), "no job ran in this interval"),
        (("advise",), "Missing option '--user'"),
    ],
)
def test_errors_are_one_line(site: Path, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "log.txt").write_text("1 2 3\n")
    places = {"SMALL": swf(tmp_path / "small.swf", 5), "LOG": str(tmp_path / "log.txt")}
    with pytest.raises((AffinodeError, click.ClickException)) as error:
        run(*(places.get(word, word) for word in words), "--state", str(site))
    text = error.value.format_message() if isinstance(error.value, click.ClickException) else str(error.value)
    assert message in text
    assert "\n" not in text


PAGE = Path(__file__).resolve().parents[3] / "docs" / "prediction.md"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trace", "more"),
    [
        ("swf:kth-sp2/KTH-SP2-1996-2.swf.gz", ()),
        ("philly:philly/philly_pollux.csv.gz", ("--capacity", "600")),
    ],
)
def test_figures_of_the_page_are_those_of_the_command(shared_data: Path, trace: str, more: tuple[str, ...]) -> None:
    pytest.importorskip("lightgbm", reason="the extra predict is not installed")
    kind, _, name = trace.partition(":")
    words = ["predict", "evaluate", "--trace", f"{kind}:{shared_data / name}", *more]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0
    page = PAGE.read_text()
    for line in done.stdout.splitlines():
        assert line.rstrip() in page
