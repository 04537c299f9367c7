"""The commands that read from a Prometheus server: output, exit statuses, the journal, the start of the next read."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_http import Answer, Question, serving
from prometheus_server import Certificates

from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.cli.main import cli
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore

DAY = ("--since", "2026-11-01", "--until", "2026-11-02")
EIGHT = 1_793_520_000
LABELS = {"gpu": "0", "UUID": "GPU-1", "Hostname": "n1", "cluster": "c"}
PASSWORD_HASH = "$2b$04$6CeMf5oIkvuvoJzNYFMuyu0RSb9Z4tjcMkaNQJje5A31/OOZHcrIG"  # noqa: S105 - of "secret"


class Api:
    """A server with one GPU and a sample per minute; queries for times after ``fails_after`` return 503."""

    def __init__(self, *, warning: str | None = None, fails_after: float = float("inf")) -> None:
        self.warning = warning
        self.fails_after = fails_after
        self.spans: list[tuple[float, float]] = []

    def __call__(self, question: Question) -> Answer:
        _, path, params, _ = question
        if path.endswith("/values"):
            return self._good(["DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_SM_CLOCK"])
        query, at = params["query"][0], float(params["time"][0])
        if query.startswith("vector("):
            return self._good({"resultType": "vector", "result": []})
        since = at - float(query.partition("[")[2].partition("s]")[0])
        if at > self.fails_after:
            return Answer("", 503)
        self.spans.append((since, at))
        times = range(int(since // 60 + 1) * 60, int(at) + 1, 60)
        values = [[time, "0"] for time in times]
        series = {"metric": {"__name__": "DCGM_FI_DEV_GPU_UTIL", **LABELS}, "values": values}
        return self._good({"resultType": "matrix", "result": [series] if values else []})

    def _good(self, data: object) -> Answer:
        more = {} if self.warning is None else {"warnings": [self.warning]}
        return Answer(json.dumps({"status": "success", "data": data, **more}))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory."""
    return tmp_path / "state"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the delay between attempts."""
    monkeypatch.setattr("slurm_affinode.metrics.prometheus.client.FIRST_WAIT_S", 0.0)


def run(state: Path, *args: str | Path) -> Result:
    """Run ``ingest gpu``."""
    argv = ["ingest", "gpu", "--state", str(state), *map(str, args)]
    return CliRunner().invoke(cli, argv, standalone_mode=False)


def test_read_is_summarized_and_journaled(state: Path) -> None:
    """The journal entry has the URL and the warnings of the server."""
    with serving(judge=Api(warning="store b is down")) as fake:
        result = run(state, "--prometheus", fake.url, *DAY)
    assert result.return_value == 0
    for text in ("server      1 read", "samples     1,440", "60 s (1 device)", "not used    DCGM_FI_DEV_SM_CLOCK"):
        assert text in result.stdout
    assert "warned: store b is down" in result.stderr
    with Repository.open(f"sqlite:///{state / 'affinode.sqlite'}") as repository:
        (entry,) = repository.ingests(kind="gpu")
    assert (entry.source, entry.records) == (fake.url, 1440)
    assert any("store b is down" in note for note in entry.notes)


def test_json_summary_of_server(state: Path) -> None:
    """The keys are the same as for files."""
    with serving(judge=Api()) as fake:
        data = json.loads(run(state, "--prometheus", fake.url, *DAY, "--json").stdout)
    assert (data["new"], data["devices"], data["error"]) == (1440, 1, None)
    assert data["files"][0]["format"] == "prometheus-api"


def test_read_without_since_continues_after_the_last_one(state: Path) -> None:
    """It overlaps by ten minutes; the first read covers seven days."""
    with serving(judge=(api := Api())) as fake:
        run(state, "--prometheus", fake.url)
        first = min(since for since, _ in api.spans)
        last = max(until for _, until in api.spans)
        api.spans.clear()
        assert run(state, "--prometheus", fake.url).return_value == 0
    assert last - first == pytest.approx(7 * 86400, abs=5)
    assert min(since for since, _ in api.spans) == pytest.approx(last - 600, abs=5)


def test_interrupted_read_is_reported_with_hint(state: Path) -> None:
    """The exit status is 3; earlier samples are stored."""
    with serving(judge=Api(fails_after=EIGHT)) as fake:
        result = run(state, "--prometheus", fake.url, *DAY)
    assert result.return_value == 3
    assert "HTTP 503" in result.stderr
    assert "to continue" in result.stderr
    assert SampleStore(state / "history").span() is not None


def test_unreachable_server_is_reported(state: Path) -> None:
    with serving(judge=Api()) as fake:
        pass
    result = run(state, "--prometheus", fake.url, *DAY)
    assert isinstance(result.exception, UnreachableError)
    assert fake.url in str(result.exception)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "nothing to read"),
        (("file.csv", "--prometheus", "http://p"), "one after the other"),
        (("file.csv", "--since", "1d"), "one after the other"),
        (("--prometheus", "http://p", "--format", "csv"), "--format is for files"),
        (("--match", 'a="b"'), "--match is for a Prometheus server"),
        (("--prometheus", "localhost:9090"), "not the URL of a Prometheus server"),
        (("--prometheus", "http://u:secret@p"), "credentials in the URL"),
        (("--prometheus", "http://p", "--match", "a=b"), "not a label matcher"),
        (("--prometheus", "http://p", "--step", "often"), "not a span of time"),
        (("--prometheus", "http://p", "--step", "0.01s"), "too short"),
        (("--prometheus", "http://p", "--since", "now", "--until", "1d"), "before it begins"),
        (("--prometheus", "http://p", "--token-file", "/none"), "/none: cannot be read"),
        (("--prometheus", "https://p", "--ca-file", "/none"), "/none: cannot be used"),
    ],
)
def test_usage_errors_are_reported_without_secrets(state: Path, args: tuple[str, ...], message: str) -> None:
    """The exit status is 2."""
    result = run(state, *args)
    error = result.exception
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    assert message in text
    assert getattr(error, "exit_code", None) == 2
    assert "secret" not in text


def test_credentials_are_sent_only_to_the_configured_server(state: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t0ken")
    with serving(judge=Api()) as configured, serving(judge=Api()) as other:
        config = tmp_path / "config.toml"
        config.write_text(
            f'[prometheus]\nurl = "{configured.url}/"\ntoken_file = "{tmp_path}/token"\nmatch = [\'a="b"\']\n'
        )
        assert run(state, "--config", config, *DAY).return_value == 0
        assert run(state, "--config", config, *DAY, "--prometheus", configured.url).return_value == 0
        assert run(state, "--config", config, *DAY, "--prometheus", other.url).return_value == 0
    assert {request[3].get("Authorization") for request in configured.requests} == {"Bearer t0ken"}
    assert {request[3].get("Authorization") for request in other.requests} == {None}
    assert any('{a="b"}[' in request[2].get("query", [""])[0] for request in configured.requests)


SACCT = (
    "JobIDRaw|Cluster|User|Account|Partition|State|Submit|Start|End|AllocTRES|NodeList|ElapsedRaw\n"
    "1|c|u|a|gpu|COMPLETED|2026-11-01T08:00:00|2026-11-01T08:00:00|2026-11-01T10:00:00|gres/gpu=1,node=1|n1|7200\n"
)


def test_report_reads_directly_from_a_server(state: Path, tmp_path: Path) -> None:
    """The stored history is neither used nor changed; missing accounting is reported before any query."""
    argv = ["report", "--state", str(state), *DAY, "--out", str(tmp_path / "out"), "--json"]
    with serving(judge=Api(warning="store b is down")) as fake:
        empty = CliRunner().invoke(cli, [*argv, "--prometheus", fake.url], standalone_mode=False)
        assert isinstance(empty.exception, AffinodeError)
        assert fake.requests == []
        (tmp_path / "jobs.txt").write_text(SACCT)
        sacct = ["ingest", "sacct", "--state", str(state), "--timezone", "UTC", str(tmp_path / "jobs.txt")]
        assert CliRunner().invoke(cli, sacct, standalone_mode=False).exception is None
        done = CliRunner().invoke(cli, [*argv, "--prometheus", fake.url], standalone_mode=False)
    total = json.loads(done.stdout)["total"]
    assert total["gpu_hours_idle"] == pytest.approx(2.0)
    assert "store b is down" in done.stderr
    assert not (state / "history").exists()
    gone = CliRunner().invoke(cli, [*argv, "--prometheus", fake.url], standalone_mode=False)
    assert isinstance(gone.exception, UnreachableError)


def test_doctor_checks_the_configured_server(state: Path, tmp_path: Path) -> None:
    """The server responds, has no GPU metrics, or is unreachable."""
    config = tmp_path / "config.toml"

    def check() -> dict[str, str]:
        argv = ["doctor", "--config", str(config), "--state", str(state), "--json"]
        checks = json.loads(CliRunner().invoke(cli, argv, standalone_mode=False).stdout)["checks"]
        (result,) = [item for item in checks if item["name"] == "Prometheus"]
        return result

    with serving(judge=Api()) as fake:
        config.write_text(f'[prometheus]\nurl = "{fake.url}"\n')
        assert (check()["status"], "1 metrics of use" in check()["detail"]) == ("ok", True)

        def no_gpus(question: Question) -> Answer:
            return Answer('{"status": "success", "data": []}') if question[1].endswith("/values") else Api()(question)

        fake.judge = no_gpus
        assert (check()["status"], "no known GPU metric" in check()["detail"]) == ("problem", True)
    assert check()["status"] == "unreachable"


@pytest.mark.database
def test_tls_and_basic_authentication_of_a_real_prometheus(
    state: Path, tmp_path: Path, certificates: Certificates, prometheus_of: Callable[..., str]
) -> None:
    """The server has its own web configuration file; tested without and with CA bundle and password."""
    web = tmp_path / "web.yml"
    web.write_text(
        f"tls_server_config: {{cert_file: {certificates.certificate}, key_file: {certificates.key}}}\n"
        f"basic_auth_users: {{affinode: {PASSWORD_HASH}}}\n"
    )
    labels = ",".join(f'{name}="{value}"' for name, value in LABELS.items())
    history = "".join(f"DCGM_FI_DEV_GPU_UTIL{{{labels}}} 0 {EIGHT + 60 * n}\n" for n in range(100)) + "# EOF\n"
    url = prometheus_of(history, web_config=web).replace("http:", "https:")
    (tmp_path / "right").write_text("secret\n")
    (tmp_path / "wrong").write_text("sesame\n")
    user = ("--prometheus-user", "affinode", "--password-file")
    ca = ("--ca-file", certificates.authority)
    unknown = run(state, "--prometheus", url, *DAY).exception
    assert isinstance(unknown, UnreachableError)
    assert "--ca-file" in str(unknown.hint)
    for denied in (
        run(state, "--prometheus", url, *DAY, *ca),
        run(state, "--prometheus", url, *DAY, *ca, *user, tmp_path / "wrong"),
    ):
        assert "HTTP 401" in str(denied.exception)
    assert run(state, "--prometheus", url, *DAY, *ca, *user, tmp_path / "right").return_value == 0
    assert run(state, "--prometheus", url, *DAY, "--insecure", *user, tmp_path / "right").return_value == 0


def test_read_after_a_gap_does_not_advance_the_end(state: Path) -> None:
    """Otherwise the samples in the gap would never be read. An overlapping read advances the end."""
    with serving(judge=Api()) as fake:
        run(state, "--prometheus", fake.url, "--since", "5d", "--until", "4d")
        run(state, "--prometheus", fake.url, "--since", "2d", "--until", "1d")
        run(state, "--prometheus", fake.url, "--since", "2026-01-01", "--until", "2026-01-02")
        fake.judge = (api := Api())
        run(state, "--prometheus", fake.url)
    since = datetime.fromtimestamp(min(since for since, _ in api.spans), UTC)
    expected = datetime.now(UTC) - timedelta(days=4) - timedelta(minutes=10)
    assert abs(since - expected) < timedelta(minutes=5)


def test_export_writes_a_file_or_to_standard_output(state: Path, tmp_path: Path) -> None:
    """The file is written atomically, labels can be added, and an interval without samples is an error."""
    with serving(judge=Api()) as fake:
        run(state, "--prometheus", fake.url, *DAY)
    argv = ["export", "openmetrics", "--state", str(state), *DAY, "--out"]
    out = tmp_path / "gpu.om"
    done = CliRunner().invoke(cli, [*argv, str(out), "--label", "job=dcgm"], standalone_mode=False)
    assert "1,440 samples of 1 series, 1 devices" in done.stdout
    assert 'DCGM_FI_DEV_GPU_UTIL{job="dcgm",gpu="0",UUID="GPU-1"' in out.read_text()
    assert CliRunner().invoke(cli, [*argv, "-"], standalone_mode=False).stdout.endswith("# EOF\n")
    data = json.loads(CliRunner().invoke(cli, [*argv, str(out), "--json"], standalone_mode=False).stdout)
    assert (data["samples"], data["first"]) == (1440, "2026-11-01T00:00:00Z")
    for more, message in (
        (["--out", str(tmp_path)], "is a directory"),
        (["--since", "2020-01-01", "--until", "2020-01-02"], "no samples in this interval"),
        (["--until", "2020-01-02"], "before it begins"),
        (["--label", "1=2"], "not a label"),
    ):
        failed = CliRunner().invoke(cli, [*argv, str(tmp_path / "none"), *more], standalone_mode=False).exception
        assert message in str(failed)
    assert not (tmp_path / "none").exists()
