"""``ingest serving``: files, scrapes, output, exit statuses, the journal and the store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import polars as pl
import pytest
from click.testing import CliRunner, Result
from prometheus_server import prometheus

from slurm_affinode.cli.main import cli
from slurm_affinode.db.repository import Repository
from slurm_affinode.engines.metric_table import ORPHANED
from slurm_affinode.engines.samples import NO_RESPONSE, NO_SERVER
from slurm_affinode.engines.schema import SAMPLES
from slurm_affinode.engines.store import ENGINES, engine_store
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.slurm.accounting.schema import conform

MS = 1793520000000
TEXT = (
    f'vllm:num_requests_running{{model_name="m"}} 5 {MS}\nvllm:num_requests_running{{model_name="m"}} 6 {MS + 15000}\n'
)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def run(state: Path, *args: str | Path, text: str | None = None) -> Result:
    """Run ``ingest serving``."""
    argv = ["ingest", "serving", "--state", str(state), *map(str, args)]
    return CliRunner().invoke(cli, argv, input=text, standalone_mode=False)


def store(state: Path) -> SampleStore:
    return engine_store(state / "history" / "serving")


class Endpoint:
    """An HTTP server whose responses a test sets."""

    def __init__(self) -> None:
        endpoint = self
        self.status, self.body, self.headers = 200, b"vllm:num_requests_waiting 3\n", dict[str, str]()
        self.paths: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                endpoint.paths.append(self.path)
                self.send_response(endpoint.status)
                for name, value in endpoint.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(endpoint.body)

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    result = Endpoint()
    yield result
    result.server.shutdown()
    result.server.server_close()


def test_file_is_ingested_once(state: Path, tmp_path: Path) -> None:
    path = tmp_path / "gpu01.prom"
    path.write_text(TEXT)
    first = run(state, path, "--address", "gpu01:8000")
    assert first.return_value == 0
    for text in ("1 read", "samples     2", "new         2", "engines     1 vllm", "15 s (1 engine)"):
        assert text in first.stdout
    again = run(state, path, "--address", "gpu01:8000")
    assert "nothing new: 1 file" in again.stdout
    repeated = json.loads(run(state, path, "--address", "gpu01:8000", "--again", "--json").stdout)
    assert (repeated["samples"], repeated["new"], repeated["duplicates"]) == (2, 0, 2)
    with Repository.open(f"sqlite:///{state / 'affinode.sqlite'}") as repository:
        assert [entry.records for entry in repository.ingests(kind="serving")] == [2, 2]


def test_stored_samples_are_scanned_lazily_by_interval(state: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.prom"
    path.write_text(TEXT)
    run(state, path)
    since = datetime.fromtimestamp(MS / 1000 + 1, UTC)
    rows = store(state).scan(since, since + timedelta(minutes=1))
    assert isinstance(rows, pl.LazyFrame)
    result = rows.collect()
    assert dict(result.schema) == {"device": pl.UInt64(), **SAMPLES}
    assert result.select("cluster", "address", "engine", "model", "running", "kv_usage").rows() == [
        ("default", "a", "vllm", "m", 6.0, None)
    ]


def test_later_file_completes_a_sample(state: Path, tmp_path: Path) -> None:
    """Values that are missing in a later source are kept, buckets included."""
    name = "vllm:request_prompt_tokens_bucket"
    item, two = tmp_path / "one.prom", tmp_path / "two.prom"
    item.write_text(f'{name}{{le="5"}} 2 {MS}\n{name}{{le="+Inf"}} 3 {MS}\nvllm:num_requests_running 1 {MS}\n')
    two.write_text(f"vllm:num_requests_running 2 {MS}\n")
    for path in (item, two):
        assert run(state, path, "--address", "x:1").return_value == 0
    row = store(state).scan().collect().row(0, named=True)
    assert row["running"] == 2
    assert row["prompt_lengths"] == [{"le": 5.0, "count": 2.0}, {"le": float("inf"), "count": 3.0}]


def test_parquet_is_read_back(state: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.prom"
    path.write_text(TEXT)
    run(state, path)
    whole = store(state).scan().collect()
    whole.write_parquet(tmp_path / "b.parquet")
    other = tmp_path / "other"
    assert run(other, tmp_path / "b.parquet").return_value == 0
    assert store(other).scan().collect().equals(whole)


def test_cut_file_is_reported_with_its_line(state: Path) -> None:
    result = run(state, "-", "--address", "gpu01:8000", text=TEXT + "vllm:num_requests_wai")
    assert result.return_value == 0
    assert ":3: is cut off in its last line" in result.stderr
    assert "samples     2" in result.stdout


def test_unusable_file_does_not_stop_the_others(state: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.prom", tmp_path / "bad.prom"
    good.write_text(TEXT)
    bad.write_text(f"node_load1 3 {MS}\n")
    result = run(state, bad, good)
    assert result.return_value == 2
    assert "has no metric of an engine that is known (it has node_load1)" in result.stderr
    assert len(store(state).scan().collect()) == 2


def test_dry_run_stores_nothing(state: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.prom"
    path.write_text(TEXT)
    assert "dry run" in run(state, path, "--dry-run").stdout
    assert not state.exists()


def test_scrape_is_stored_with_its_duration(state: Path, endpoint: Endpoint) -> None:
    result = run(state, "--scrape", endpoint.address, "--node", "gpu01")
    assert result.return_value == 0
    row = store(state).scan().collect().row(0, named=True)
    assert (row["address"], row["node"], row["engine"], row["waiting"], row["error"]) == (
        endpoint.address, "gpu01", "vllm", 3.0, None,
    )  # fmt: skip
    assert 0 < row["scrape_s"] < 5
    assert endpoint.paths == ["/metrics"]


def test_failed_scrape_is_a_sample_of_the_engine_seen_there(state: Path, endpoint: Endpoint) -> None:
    run(state, "--scrape", endpoint.address)
    endpoint.status = 500
    result = run(state, "--scrape", endpoint.address, "--json")
    assert (result.return_value, json.loads(result.stdout)["failed_scrapes"]) == (0, 1)
    assert store(state).scan().collect()["error"].to_list() == [None, "HTTP 500"]


def test_endpoint_that_redirects_is_not_followed(state: Path, endpoint: Endpoint) -> None:
    endpoint.status, endpoint.headers = 302, {"Location": f"http://{endpoint.address}/other"}
    result = run(state, "--scrape", endpoint.address)
    assert result.return_value == 2
    assert "HTTP 302" in result.stderr
    assert endpoint.paths == ["/metrics"]


def test_oversized_scrape_is_refused(state: Path, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_affinode.engines.ingest.LARGEST_SCRAPE", 10)
    result = run(state, "--scrape", endpoint.address)
    assert result.return_value == 2
    assert "more than" in result.stderr
    assert store(state).days() == []


@pytest.mark.parametrize("args", [(), ("a.prom", "--scrape", "gpu01:1"), ("--scrape", "gpu01:1", "--again")])
def test_contradicting_options_are_usage_errors(state: Path, args: tuple[str, ...]) -> None:
    assert CliRunner().invoke(cli, ["ingest", "serving", "--state", str(state), *args]).exit_code == 2


def test_prometheus_gives_samples_of_engines_and_failed_scrapes(state: Path, tmp_path: Path) -> None:
    """Metrics of processes are read for the endpoints of engines only."""
    at = MS // 1000

    def family(name: str, *series: tuple[str, str]) -> str:
        lines = [
            f"{name}{{{labels}}} {value} {at + 15 * n}"
            for labels, values in series
            for n, value in enumerate(values.split())
            if value != "-"
        ]
        return "\n".join([f"# TYPE {name} gauge", *lines, ""])

    engine, other = 'instance="gpu01:8000",job="vllm"', 'instance="gpu01:9100",job="node"'
    history = "".join([
        family("vllm:kv_cache_usage_perc", (f'{engine},engine="0",model_name="m"', "0.5 0.6 -")),
        family("vllm:num_requests_running", (f'{engine},engine="0",model_name="m"', "1 2 -")),
        family("process_open_fds", (engine, "40 41 -"), (other, "7 7 7")),
        family("scrape_duration_seconds", (engine, "0.25 0.25 5"), (other, "1 1 1")),
        family("up", (engine, "1 1 0"), (other, "1 1 1")),
        "# EOF\n",
    ])  # fmt: skip
    since = datetime.fromtimestamp(at - 60, UTC).isoformat()
    until = datetime.fromtimestamp(at + 600, UTC).isoformat()
    with prometheus(tmp_path / "prometheus", history) as url:
        arguments = ("--prometheus", url, "--since", since, "--until", until, "--json")
        first, second = (run(state, *arguments) for _ in range(2))
    assert (first.return_value, second.return_value) == (0, 0), first.stderr
    record = json.loads(first.stdout)
    assert (record["new"], record["by_engine"], record["failed_scrapes"]) == (3, {"vllm": 1}, 1)
    assert json.loads(second.stdout)["new"] == 0
    rows = store(state).scan().sort("time").collect()
    names = ("node", "address", "model", "rank", "running", "kv_usage", "open_files", "scrape_s", "error")
    assert rows.select(names).rows() == [
        ("gpu01", "gpu01:8000", "m", "0", 1, 0.5, 40, 0.25, None),
        ("gpu01", "gpu01:8000", "m", "0", 2, 0.6, 41, 0.25, None),
        ("gpu01", "gpu01:8000", "m", "0", None, None, None, 5, "the scrape of Prometheus failed (up is 0)"),
    ]


def test_prometheus_gives_the_failed_scrapes_of_the_exporter(state: Path, tmp_path: Path) -> None:
    """The engine is late at one scrape and has ended before the last one, when the exporter has no series of it."""
    labels = 'instance="gpu01:9402",Hostname="gpu01",address="127.0.0.1:8000",engine="vllm",model="m",hpc_job="7"'
    at = MS // 1000
    names = {"running": "1 - -", "scrape_s": "0.5 3 -", "up": "1 0 -"}
    history = "".join(
        "\n".join([
            f"# TYPE slurm_affinode_serving_{name} gauge",
            *(f"slurm_affinode_serving_{name}{{{labels}}} {value} {at + 15 * n}"
              for n, value in enumerate(values.split()) if value != "-"), "",
        ])
        for name, values in names.items()
    )  # fmt: skip
    up = f'# TYPE up gauge\nup{{instance="gpu01:9402"}} 1 {at + 30}\n# EOF\n'
    interval = ("--since", "2026-11-01T07:00Z", "--until", "2026-11-01T09:00Z")
    with prometheus(tmp_path / "prometheus", history + up) as url:
        result = run(state, "--prometheus", url, *interval, "--json")
    record = json.loads(result.stdout)
    assert (record["new"], record["failed_scrapes"], record["by_engine"]) == (2, 1, {"vllm": 1})
    rows = store(state).scan().sort("time").collect().select("address", "job", "running", "scrape_s", "error").rows()
    assert rows == [("127.0.0.1:8000", "7", 1, 0.5, None), ("127.0.0.1:8000", "7", None, 3, NO_RESPONSE)]


def test_prometheus_gives_processes_that_outlived_their_server(state: Path, tmp_path: Path) -> None:
    """The list shows the diagnosis, and the engine as a problem."""
    labels = 'instance="gpu01:9402",Hostname="gpu01",address="127.0.0.1:8000",engine="vllm",model="m",hpc_job="7"'
    at = MS // 1000
    names = {
        "running": "1 1 - -",
        "up": "1 1 - -",
        "orphaned_processes": "- - 2 2",
        "orphaned_memory_mib": "- - 512 512",
    }
    history = "".join(
        "\n".join([
            f"# TYPE slurm_affinode_serving_{name} gauge",
            *(f"slurm_affinode_serving_{name}{{{labels}}} {value} {at + 15 * n}"
              for n, value in enumerate(values.split()) if value != "-"), "",
        ])
        for name, values in names.items()
    )  # fmt: skip
    interval = ("--since", "2026-11-01T07:00Z", "--until", "2026-11-01T09:00Z")
    with prometheus(tmp_path / "prometheus", f"{history}# EOF\n") as url:
        result = run(state, "--prometheus", url, *interval, "--json")
    assert json.loads(result.stdout)["failed_scrapes"] == 2, result.stderr
    rows = store(state).scan().sort("time").collect().select("running", *ORPHANED, "error").rows()
    assert rows == [(1, None, None, None)] * 2 + [(None, 2, 512, NO_SERVER)] * 2
    shown = CliRunner().invoke(cli, ["serving", "list", "--state", str(state), "--json"], standalone_mode=False)
    [engine] = json.loads(shown.stdout)["engines"]
    assert (engine["current"], shown.return_value) == (["orphaned-engine"], 1)


def test_stores_of_earlier_versions_stay_readable(state: Path) -> None:
    """They lack columns, which are unknown; a day of both versions is compacted."""
    known = {name: dtype for name, dtype in ENGINES.metrics.items() if name not in ORPHANED}
    samples = {name: dtype for name, dtype in ENGINES.samples.items() if name not in ORPHANED}
    earlier = replace(ENGINES, metrics=known, samples=samples, added=())
    at = datetime.fromtimestamp(MS / 1000, UTC)
    row = {"cluster": "a", "node": "n", "address": "n:1", "engine": "vllm", "time": at, "running": 1.0}
    with contextlib.closing(SampleStore(state / "history" / "serving", earlier)) as old:
        old.ingest(pl.DataFrame([row]).pipe(conform, samples), source="old")
    with contextlib.closing(store(state)) as new:
        assert new.scan().collect().select("running", *ORPHANED).rows() == [(1, None, None)]
        later = {**row, "time": at + timedelta(seconds=15), "running": None, ORPHANED[0]: 2.0}
        new.ingest(pl.DataFrame([later]).pipe(conform, ENGINES.samples), source="new")
        rows = new.scan().sort("time").collect().select("running", *ORPHANED).rows()
    assert rows == [(1, None, None), (None, 2, None)]


def test_prometheus_without_engines_is_reported(state: Path, tmp_path: Path) -> None:
    history = f"# TYPE up gauge\nup 1 {MS // 1000}\n# EOF\n"
    with prometheus(tmp_path / "prometheus", history) as url:
        result = run(state, "--prometheus", url, "--since", "2026-10-31T00:00Z", "--until", "2026-11-02T00:00Z")
    assert "has no samples of engines" in str(result.exception)
