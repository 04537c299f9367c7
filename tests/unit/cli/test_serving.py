"""``slurm-affinode serving``: screens, JSON and exit codes."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from prometheus_server import prometheus

from slurm_affinode.base.config import Config, PrometheusConfig, StoreConfig
from slurm_affinode.base.errors import InputError, NoStoreError, UnreachableError
from slurm_affinode.cli.main import cli
from slurm_affinode.cli.options import print_table
from slurm_affinode.cli.serving import tuning_rows
from slurm_affinode.engines.tuning import TuningFacts
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.pipeline import servers
from slurm_affinode.pipeline.servers import ServerQuery


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["serving", *arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output


def run(*arguments: str) -> tuple[int, str]:
    return invoke("triage", *arguments)


@pytest.fixture(scope="module")
def state(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory with a recorded episode of overload, and a server whose API process was killed."""
    folder = tmp_path_factory.mktemp("state")
    for address, name in (("busy:8000", "episode-short-prompts"), ("killed:8000", "api-server-killed")):
        path = shared_data / "serving" / f"vllm-0.32-cpu-{name}.prom.gz"
        arguments = ["ingest", "serving", "--state", str(folder), "--node", "n1", "--address", address, str(path)]
        assert CliRunner().invoke(cli, arguments).exit_code in (0, 1)
    return folder


def test_engines_with_problems_are_listed_first(state: Path) -> None:
    code, text = invoke("list", "--state", str(state))
    assert code == 1
    assert text.index("killed:8000") < text.index("busy:8000")
    assert "ended" in text


LIVE = datetime(2026, 11, 1, 8, tzinfo=UTC)


def exported(waiting: Callable[[int], float]) -> str:
    """Return twenty scrapes of an exporter and of dcgm-exporter, 15 s apart, as OpenMetrics."""
    labels = (
        'instance="gpu01:9402",Hostname="gpu01",address="127.0.0.1:8000",engine="llamacpp",hpc_job="7",user="ann",'
        'gpus="GPU-1"'
    )
    series = {
        f"slurm_affinode_serving_running{{{labels}}}": lambda _: 2,
        f"slurm_affinode_serving_waiting{{{labels}}}": waiting,
        f"slurm_affinode_serving_up{{{labels}}}": lambda _: 1,
        **{
            f'{name}{{instance="gpu01:9400",Hostname="gpu01",gpu="{gpu}",UUID="GPU-{gpu}"}}': lambda _, mib=mib: mib
            for name, mib in (("DCGM_FI_DEV_FB_USED", 60000), ("DCGM_FI_DEV_FB_FREE", 20000))
            for gpu in (1, 2)
        },
    }
    began = LIVE.timestamp() - 300
    families: dict[str, list[str]] = {}
    for name, value in series.items():
        lines = [f"{name} {value(n)} {began + 15 * n}" for n in range(20)]
        families.setdefault(name.partition("{")[0], []).extend(lines)
    return "".join(f"# TYPE {name} gauge\n" + "\n".join(lines) + "\n" for name, lines in families.items()) + "# EOF\n"


@pytest.fixture
def overloaded(tmp_path: Path) -> Iterator[str]:
    """The URL of a server with an engine whose queue grows by one request per second."""
    with prometheus(tmp_path / "prometheus", exported(lambda n: 15 * n)) as url:
        yield url


def test_samples_of_prometheus_are_diagnosed_without_a_store(overloaded: str, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    arguments = ("--state", str(folder), "--prometheus", overloaded, "--until", LIVE.isoformat())
    code, text = invoke("list", *arguments, "--live", "--json")
    record = json.loads(text)
    (engine,) = record["engines"]
    assert code == 1
    assert (engine["job"], engine["user"], engine["gpus"]) == ("7", "ann", ["GPU-1"])
    assert "queue-unstable" in engine["current"]
    assert datetime.fromisoformat(record["since"]) == LIVE - timedelta(minutes=30)
    code, text = invoke("explain", "7", *arguments)
    assert code == 0
    assert "the queue grew by" in text
    assert not list(folder.rglob("*.parquet"))


def test_memory_of_gpus_in_prometheus_counts(overloaded: str, tmp_path: Path) -> None:
    """Only that of the engine's own GPUs is read."""
    config = Config(prometheus=PrometheusConfig(url=overloaded), store=StoreConfig(state_dir=tmp_path))
    with (
        servers.live(config, ServerQuery(), LIVE) as (live_config, _),
        contextlib.closing(SampleStore(live_config.history_dir)) as store,
    ):
        frame = store.scan(LIVE - timedelta(hours=1), LIVE).select("uuid", "fb_used_mib").unique().collect()
    assert frame.rows() == [("GPU-1", 60000)]


def test_live_without_a_server_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match=r"--live needs a Prometheus server: give --prometheus URL"):
        invoke("list", "--state", str(tmp_path), "--live")


def test_server_without_engines_is_reported(tmp_path: Path) -> None:
    history = f"# TYPE up gauge\nup 1 {LIVE.timestamp() - 60}\n# EOF\n"
    with prometheus(tmp_path / "prometheus", history) as url, pytest.raises(InputError, match="engine"):
        invoke("list", "--prometheus", url, "--until", LIVE.isoformat())


def test_samples_of_the_future_do_not_hide_engines(tmp_path: Path) -> None:
    now, ahead = (round((datetime.now(UTC) + timedelta(days=days)).timestamp() * 1000) for days in (-3, 900))
    for name, at in (("good", now), ("ahead", ahead)):
        path = tmp_path / f"{name}.prom"
        path.write_text("".join(f"vllm:num_requests_running 1 {at + 15000 * n}\n" for n in range(9)))
        assert CliRunner().invoke(cli, ["ingest", "serving", "--state", str(tmp_path), str(path)]).exit_code == 0
    text = invoke("list", "--state", str(tmp_path))[1]
    assert "good" in text
    assert "ahead" not in text
    later = f"{datetime.now(UTC) + timedelta(days=901):%Y-%m-%d}"
    assert "ahead" in invoke("list", "--state", str(tmp_path), "--until", later)[1]


def test_state_without_recent_samples_is_unknown(tmp_path: Path) -> None:
    """Two engines at the same address of different nodes; the samples of one end eleven minutes earlier."""
    for node, end in (("c1", 1793520000), ("c2", 1793520660)):
        path = tmp_path / f"{node}.prom"
        path.write_text("".join(
            f"{name} {value} {(end - 30 * n) * 1000}\n" for n in range(40, -1, -1)
            for name, value in (("vllm:num_requests_running", 1), ("vllm:generation_tokens_total", 40000 - 10 * n))
        ))  # fmt: skip
        arguments = ["ingest", "serving", "--state", str(tmp_path), "--node", node, "--address", "127.0.0.1:18200"]
        assert CliRunner().invoke(cli, [*arguments, str(path)]).exit_code == 0
    lines = {
        line.split()[1]: line for line in invoke("list", "--state", str(tmp_path))[1].splitlines() if ":18200" in line
    }
    assert "unknown" in lines["c1:18200"]
    assert "healthy" in lines["c2:18200"]
    assert "c1:18200" in invoke("explain", "c1:18200", "--state", str(tmp_path))[1]


def test_engines_can_be_selected(state: Path) -> None:
    code, text = invoke("list", "--state", str(state), "--engine", "sglang")
    assert (code, text.splitlines()[0]) == (0, "no engine matches")


def test_diagnoses_are_explained_with_rule_and_advice(state: Path) -> None:
    code, text = invoke("explain", "busy:8000", "--state", str(state))
    assert code == 0
    for part in ("queue-unstable", "recovering", "Advice: ", "standard deviations", "1,881 preemptions"):
        assert part in text


def test_diagnoses_as_json(state: Path) -> None:
    row = json.loads(invoke("explain", "killed:8000", "--state", str(state), "--json")[1])
    (engine,) = row["engines"]
    assert engine["current"] == ["ended"]
    assert engine["key"]["address"] == "killed:8000"
    assert (engine["failed"], engine["gpus"]) == (34, None)
    assert {"kind", "since", "until", "evidence", "rule", "severity"} <= engine["diagnoses"][0].keys()


def test_page_has_charts_and_diagnoses(state: Path, tmp_path: Path) -> None:
    page = tmp_path / "server.html"
    code, _ = invoke("explain", "busy:8000", "--state", str(state), "--html", str(page))
    text = page.read_text()
    assert code == 0
    for part in ("KV cache in use", "Preemptions per second", "queue-unstable", "Not exported by this engine"):
        assert part in text
    assert text.count("<path class=") >= 6


@pytest.fixture
def log(shared_data: Path) -> str:
    """The log of the overloaded engine."""
    return str(shared_data / "serving" / "vllm-0.32-cpu-episode-short-prompts.log.gz")


def test_advice_names_figures_and_cost(state: Path, log: str) -> None:
    code, text = invoke("tune", "busy:8000", "--state", str(state), "--log", log)
    assert code == 0
    for part in ("raise --num-gpu-blocks-override to 32,768 (now 40)", "1,881 preemptions", "cost: "):
        assert part in text


def test_advice_names_what_is_unknown(state: Path) -> None:
    code, text = invoke("tune", "busy:8000", "--state", str(state))
    assert code == 0
    assert "unknown: free GPU memory" in text
    assert "unknown: no log of this engine alone" in text


def test_large_figures_have_all_their_digits() -> None:
    facts = TuningFacts(engine="vllm", seconds=3600.0, requests=12_345.0, kv_tokens=463_536.0, kv_peak=0.987)
    shown = dict(tuning_rows(facts))
    assert shown["requests completed"] == "12,345"
    assert shown["KV cache"] == "463,536 tokens"
    assert shown["KV usage, peak and while requests wait"] == "0.99, unknown"


def test_command_line_alone_is_written(state: Path, log: str) -> None:
    code, text = invoke("tune", "busy:8000", "--state", str(state), "--log", log, "--write")
    assert (code, text) == (
        0,
        "vllm serve tiny --host 127.0.0.1 --port 18200 --dtype bfloat16 --max-model-len 512 --enforce-eager "
        "--served-model-name tiny --load-format dummy --block-size 32 --max-num-seqs 16 "
        "--num-gpu-blocks-override 32768\n",
    )


def test_no_command_line_is_written_without_an_advised_option(state: Path) -> None:
    """Without the log only replicas are advised, which is no option."""
    code, text = invoke("tune", "busy:8000", "--state", str(state), "--write")
    assert (code, text) == (0, "slurm-affinode: busy:8000 rank 0: no option is recommended\n")


def test_advice_as_json(state: Path) -> None:
    (row,) = json.loads(invoke("tune", "busy:8000", "--state", str(state), "--json")[1])
    assert {recommendation["setting"] for recommendation in row["recommendations"]} == {"replicas"}
    assert row["command"] is None


def watch(monkeypatch: pytest.MonkeyPatch, waits: int, *arguments: str, between: Callable[[int], None]) -> str:
    """Return the output of ``tune --watch``; ``between`` is called at each wait, and the last wait is interrupted."""
    spans: list[float] = []

    def wait(seconds: float) -> None:
        spans.append(seconds)
        if len(spans) == waits:
            raise KeyboardInterrupt
        between(len(spans))

    monkeypatch.setattr("slurm_affinode.cli.serving.time.sleep", wait)
    result = CliRunner().invoke(cli, ["serving", "tune", *arguments, "--watch", "10s"], standalone_mode=False)
    assert spans == [10.0] * waits, result.output
    return result.output


def test_watch_prints_advice_once_it_is_stable(state: Path, log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third evaluation with the same advice prints it, and no later one does."""
    arguments = ("busy:8000", "--state", str(state), "--log", log, "--write")
    assert watch(monkeypatch, 2, *arguments, between=lambda _: None).count("vllm serve") == 0
    assert watch(monkeypatch, 5, *arguments, between=lambda _: None).count("vllm serve") == 1


def test_watch_follows_figures_that_grow(
    shared_data: Path, log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each evaluation finds more preemptions, which changes the reason but not the advice."""
    recording = gzip.decompress((shared_data / "serving/vllm-0.32-cpu-episode-short-prompts.prom.gz").read_bytes())
    head, *scrapes = recording.decode().split("# scrape ")
    where = ("--state", str(tmp_path / "state"))

    def ingest(count: int) -> None:
        path = tmp_path / f"{count}.prom"
        path.write_text(head + "".join(f"# scrape {scrape}" for scrape in scrapes[:count]))
        arguments = ["ingest", "serving", *where, "--node", "n1", "--address", "busy:8000", str(path)]
        assert CliRunner().invoke(cli, arguments).exit_code in (0, 1)

    ingest(140)
    tuned = ("busy:8000", *where, "--log", log)
    text = watch(monkeypatch, 4, *tuned, between=lambda number: ingest(140 + 10 * number))
    assert text.count("raise --num-gpu-blocks-override") == 1


def test_watch_survives_a_server_that_does_not_respond(state: Path, log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tune, failing = servers.tune, [False]

    def flaky(*arguments: Any) -> list[servers.TunedEngine]:
        if failing[0]:
            raise UnreachableError("http://prometheus:9090: connection refused")
        return tune(*arguments)

    monkeypatch.setattr("slurm_affinode.cli.serving.servers.tune", flaky)
    arguments = ("busy:8000", "--state", str(state), "--log", log, "--write")
    text = watch(monkeypatch, 5, *arguments, between=lambda number: failing.__setitem__(0, number == 2))
    assert (text.count("connection refused"), text.count("vllm serve")) == (1, 1)


def test_watch_names_an_engine_without_samples(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = watch(monkeypatch, 5, "other:1", "--state", str(state), between=lambda _: None)
    assert text.count("no samples of other:1") == 1


def test_watch_of_standard_input_is_a_usage_error(state: Path) -> None:
    """The second evaluation would find it at its end."""
    with pytest.raises(click.UsageError, match="in place of -"):
        invoke("tune", "busy:8000", "--state", str(state), "--log", "-", "--watch", "10s")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("width", "whole"), [(80, True), (24, False)])
def test_columns_stay_whole_on_a_terminal_that_is_wide_enough(
    width: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a narrower one they are broken, and nothing is cut off."""
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    print_table(("address", "worst"), [("gpu01.example.org:8000" * 4, "preemption-storm")], whole=("worst",))
    text = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert ("preemption-storm" in text) == whole
    assert all(text.count(letter) >= "preemption-storm".count(letter) for letter in set("preemption-storm"))


def test_end_of_a_diagnosis_has_the_date_only_if_it_differs(state: Path) -> None:
    _, text = invoke("explain", "busy:8000", "--state", str(state))
    (line,) = [line for line in text.splitlines() if "recovering  " in line and line[0].isdigit()]
    assert line.split()[2].count(":") == 2


def test_unknown_engine_is_named(state: Path) -> None:
    code, text = invoke("explain", "other:1", "--state", str(state))
    assert code == 1
    assert "no samples of other:1" in text


def test_state_without_samples_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(NoStoreError, match="no samples of engines"):
        invoke("list", "--state", str(tmp_path))


def test_screen_names_cause_sizes_and_advice(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "start\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "80.00 GiB of which 1.00 GiB is free. Process 9 has 31.00 GiB memory in use.\n"
    )
    code, text = run(str(log))
    assert code == 0
    assert text.startswith("gpu-out-of-memory: ")
    for part in ("2 GiB", "1 GiB", "80 GiB", "held by PID 9", "server.log:2", "Advice:"):
        assert part in text


def test_json_has_cause_and_problems(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("RuntimeError: CUDA error: out of memory\n")
    code, text = run(str(log), "--json")
    row = json.loads(text)
    assert (code, row["kind"], row["memory"], row["requested"], row["problems"]) == (
        0, "gpu-out-of-memory", "gpu", None, [],
    )  # fmt: skip


def test_last_metrics_of_the_job_are_shown(tmp_path: Path) -> None:
    at = 1793520000000
    labels = 'engine="vllm",address="n1:8000",hpc_job="77",gpus="GPU-1",Hostname="n1"'
    serving = "".join(
        f"slurm_affinode_serving_{name}{{{labels}}} {value} {at}\n"
        for name, value in {"kv_usage": 0.97, "waiting": 41, "asleep": 0}.items()
    )
    gpu = f'DCGM_FI_DEV_FB_USED{{UUID="GPU-1",Hostname="n1",hpc_job="77"}} 80000 {at}\n'
    for kind, text in (("serving", serving), ("gpu", gpu)):
        (tmp_path / f"{kind}.prom").write_text(text)
        arguments = ["ingest", kind, "--state", str(tmp_path / "state"), str(tmp_path / f"{kind}.prom")]
        assert CliRunner().invoke(cli, arguments).exit_code == 0
    config = tmp_path / "config.toml"
    config.write_text(f'[store]\nstate_dir = "{tmp_path / "state"}"\n[cluster]\ntimezone = "UTC"\n')
    log = tmp_path / "slurmd.log"
    log.write_text("[2026-11-01T08:00:30.000] [77.batch] error: Detected 1 oom_kill event in StepId=77.batch.\n")
    code, text = run(str(log), "--config", str(config))
    assert code == 0
    assert "KV usage 0.97, unknown running, 41 waiting, awake" in text
    assert "memory 80,000 of unknown, utilization unknown, power unknown" in text
    engine, device = json.loads(run(str(log), "--config", str(config), "--json")[1])["metrics"]
    assert engine["figures"] == {"kv_usage": 0.97, "running": None, "waiting": 41, "asleep": 0, "failed_scrapes": 0}
    assert (device["source"], device["figures"]["fb_used_mib"]) == ("GPU-1", 80000)


def test_log_without_failure_gives_status_1(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("all is well\n")
    code, text = run(str(log))
    assert code == 1
    assert text.startswith("no cause: ")


def test_message_of_a_program_does_not_control_the_terminal(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("RuntimeError: CUDA error: out of memory \x1b]0;owned\x07\n")
    assert "\x1b" not in run(str(log))[1]


def test_missing_log_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        run(str(tmp_path / "gone.log"))


def test_recorded_server_that_could_not_start_names_the_length_that_fits(shared_data: Path) -> None:
    code, text = run(str(shared_data / "serving" / "vllm-0.32-cpu-kv-too-small.log"))
    assert code == 0
    assert "176 tokens" in text
