"""The sample data shipped with the program, ingested and reported like that of a site."""

from __future__ import annotations

import re

import polars as pl
import pytest
from click.testing import CliRunner

from slurm_affinode.analysis import actions
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.cli.demo import demo
from slurm_affinode.demo import histories
from slurm_affinode.demo.histories import build_demo
from slurm_affinode.metrics.schema import SAMPLES


def test_recording_is_small_and_complete():
    """It contains sacct's text and samples of every node within its interval."""
    files = {path.name: path.stat().st_size for path in histories.RECORDING.iterdir()}
    assert {"recording.toml", "sacct.txt"} <= set(files)
    assert sum(files.values()) < 500_000
    history = histories.recorded()
    samples = pl.concat([pl.read_parquet(path) for path in histories.RECORDING.glob("*.parquet")])
    assert dict(samples.schema) == SAMPLES
    assert set(samples["node"]) == {"c1", "c2"}
    assert samples["uuid"].n_unique() == 4
    inside = samples.filter(pl.col("time").is_between(history.since, history.until))
    assert len(inside) > 0.95 * len(samples)


def test_recorded_demo_names_its_source(tmp_path):
    """There are several users, job states, and busy, idle and unknown GPU-hours. The title names the emulated GPUs."""
    written = build_demo(tmp_path / "demo", histories.recorded())
    page = written.report.read_text()
    assert "minutes recorded from a Slurm cluster with emulated GPUs" in page
    jobs = written.result.jobs
    assert set(jobs["user"]) == {"alice", "bob", "carol"}
    assert {"COMPLETED", "FAILED", "TIMEOUT", "RUNNING"} <= set(jobs["state"])
    total = written.summary["total"]
    assert min(total[f"gpu_hours_{state}"] for state in ("busy", "idle", "unknown")) > 0
    build_demo(tmp_path / "demo", histories.recorded())


def test_recorded_demo_shows_a_real_overload(tmp_path):
    """The engine's samples fit the job in which it is shown. Each page states their origin."""
    written = build_demo(tmp_path / "demo", histories.recorded())
    servers = written.summary["servers"]
    (engine,) = servers["list"]
    assert (engine["engine"], engine["worst"]) == ("vllm", "preemption-storm")
    assert {"queue-unstable", "kv-saturated", "recovering"} <= {diagnosis["kind"] for diagnosis in engine["diagnoses"]}
    assert engine["preemptions"] > 100
    (job,) = written.result.jobs.filter(pl.col("job_id") == int(engine["job"])).iter_rows(named=True)
    assert (job["user"], job["node_list"], job["gpus"]) == (engine["user"], engine["node"], engine["gpus"])
    served = written.result.servers.engines[0].health
    assert job["start"] <= served.since < served.until <= job["end"]
    frame = written.result.servers.timelines[0]
    assert all(frame[name].drop_nulls().len() > 150 for name in ("kv_usage", "waiting", "tokens_per_s", "gpu_util_pct"))
    report, server = written.report.read_text(), (written.report.parent / engine["page"]).read_text()
    for page in (report, server):
        assert f"It did not run in job {engine['job']}" in page
        assert "a recording of vLLM 0.32.0, made on a CPU" in page
    assert f'href="{engine["page"]}"' in report


def test_synthetic_demo_has_no_engines(tmp_path):
    written = build_demo(tmp_path / "demo", histories.synthetic(days=0.5, seed=7))
    assert written.summary["servers"] is None


def test_demo_keeps_foreign_files(tmp_path):
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "mine.txt").write_text("precious")
    with pytest.raises(AffinodeError, match="that no demo made"):
        build_demo(tmp_path, histories.recorded())
    assert (tmp_path / "input" / "mine.txt").read_text() == "precious"


def test_synthetic_demo_has_a_trend_and_all_causes(tmp_path):
    """The report is on the last of four periods, and has actions against each cause.

    Only *larger GPU than needed* is missing: the cluster has one GPU model.
    """
    written = build_demo(tmp_path / "demo", histories.synthetic(days=7, seed=7, earlier=3))
    assert [period["since"] for period in written.summary["trend"]["periods"]] == [
        "2026-10-12T00:00:00Z", "2026-10-19T00:00:00Z", "2026-10-26T00:00:00Z",
    ]  # fmt: skip
    assert written.summary["query"]["since"] == "2026-11-02T00:00:00Z"
    causes = {action.kind for action in actions.actions(written.result, top=100)}
    assert causes == set(actions.texts()) - {"oversized"}
    assert written.summary["unmet_demand"]["partitions"][0]["gpu_hours_unmet"] > 0


def test_demo_has_hours_that_suspending_would_have_returned(tmp_path):
    """With an interval over its days, on a page of its own, which a demo without a replay removes."""
    done = CliRunner().invoke(demo, ["--out", str(tmp_path), "--days", "3", "--trend", "0"], catch_exceptions=False)
    sentence = re.search(
        r"Suspending jobs on demo that are idle for 15m would have returned [\d,.]+ GPU-hours \(95 % interval: [\d,.]+ "
        r"to [\d,.]+\) in 3 days\.", done.output,
    )  # fmt: skip
    assert sentence, done.output
    assert "\N{REPLACEMENT CHARACTER}" not in done.output
    shown = sentence[0].replace(" %", "\N{NO-BREAK SPACE}%")
    assert shown in (tmp_path / histories.REPLAY).read_text()
    summary = (tmp_path / "report.html").read_text().partition('id="headline"')[2].partition("</section>")[0]
    assert shown in summary
    assert "Assumed: users submit the same jobs" in summary
    assert "The replayed mean wait is " in summary
    assert f'<a href="{histories.REPLAY}">' in summary
    build_demo(tmp_path, histories.recorded())
    assert not (tmp_path / histories.REPLAY).exists()
    assert histories.REPLAY not in (tmp_path / "report.html").read_text()
    assert histories.replay_demo(tmp_path, histories.recorded()) is None


def test_demo_command_uses_the_synthetic_history_by_default(tmp_path):
    """Its options are rejected with ``--recorded``."""
    run = CliRunner()
    options = ["--days", "0.5", "--trend", "1"]
    for words in (options, ["--synthetic", *options]):
        done = run.invoke(demo, ["--out", str(tmp_path / "a"), *words], catch_exceptions=False)
        assert "The data is synthetic" in done.output
    done = run.invoke(demo, ["--out", str(tmp_path / "b"), "--recorded"], catch_exceptions=False)
    assert "GPUs are emulated" in done.output
    for option in ("--days", "--seed", "--trend"):
        assert run.invoke(demo, ["--recorded", option, "2"]).exit_code == 2
