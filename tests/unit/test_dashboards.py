"""The dashboards and rules in ``deploy``: their form, and each expression on a real Prometheus with synthetic data.

The figures of the fleet are compared with those of a report on the same data.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_server import prometheus, record

from slurm_affinode import api
from slurm_affinode.cli.main import cli
from slurm_affinode.suspension.metrics import METRICS

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
BEGIN = 1_795_000_000 // 86_400 * 86_400
MINUTES = 420
LAST = BEGIN + (MINUTES - 1) * 60
TOTAL_MIB = 81_920
JOBS = {  # job -> user, node, GPUs, first and last minute
    "1": ("ada", "g1", (0, 1), 0, 240),
    "2": ("bo", "g1", (0,), 240, 420),
    "3": ("ada", "g2", (0,), 0, 420),
    "4": ("ada", "g2", (1,), 30, 420),
}


def dashboards() -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(GRAFANA.glob("*.json"))]


def expressions(dashboard: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the title and the expression of each query."""
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield f"{dashboard['title']}: {panel['title']}", target["expr"]


def rules() -> list[tuple[str, str]]:
    """Return the name and the expression of each rule."""
    result = []
    for path in sorted(RULES.glob("*.rules.yml")):
        text = path.read_text(encoding="utf-8")
        for name, expr in re.findall(r"- (?:alert|record): (\S+)\n\s+expr: ((?:\|.*\n(?:\s{10}.*\n|\n)+)|.*\n)", text):
            result.append((name, " ".join(expr.removeprefix("|").split())))
    return result


# --- form


def test_dashboards_are_those_of_their_source() -> None:
    """``python deploy/grafana/build.py`` writes them."""
    sys.path.insert(0, str(GRAFANA))
    try:
        import build
    finally:
        sys.path.remove(str(GRAFANA))
    assert build.main(["--check"]) == 0
    assert len(build.DASHBOARDS) == len(list(GRAFANA.glob("*.json")))


def test_dashboards_have_the_form_that_grafana_reads() -> None:
    """Identities are unique, panels do not overlap, and each query names the selected data source."""
    assert len({item["uid"] for item in dashboards()}) == len(dashboards()) >= 6
    for dashboard in dashboards():
        assert dashboard["schemaVersion"] >= 36
        variables = {item["name"]: item for item in dashboard["templating"]["list"]}
        assert variables["datasource"]["type"] == "datasource"
        taken: set[tuple[int, int]] = set()
        assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
        for panel in dashboard["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            cells = set(itertools.product(range(place["x"], place["x"] + place["w"]),
                                          range(place["y"], place["y"] + place["h"])))  # fmt: skip
            assert not cells & taken, panel["title"]
            taken |= cells
            assert panel["type"] in {"timeseries", "stat", "bargauge"}
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["targets"]
            for target in panel["targets"]:
                assert target["datasource"]["uid"] == "${datasource}"
                used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__range", "__rate_interval"}
                assert used <= variables.keys(), target["expr"]


def test_dashboards_have_the_schema_of_grafana() -> None:
    """Grafana's own types know each key: they read a dashboard and write it again, and drop what they do not know."""
    pytest.importorskip("grafana_foundation_sdk", reason="the library of Grafana's types is not installed")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()  # the options of the kinds of panels
    for dashboard in dashboards():
        written = json.loads(json.dumps(Dashboard.from_json(dashboard), cls=JSONEncoder))
        missing = [path for path in lost(dashboard, written) if not path.startswith("templating/")]
        assert missing == []
        # The text of Grafana's editor for a variable is not in the schema.
        assert {path.split("/")[-1] for path in lost(dashboard["templating"], written["templating"])} == {"definition"}


def lost(value: Any, other: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of what another value lacks, or has changed; it may have further keys."""
    if isinstance(value, dict) and isinstance(other, dict):
        for key, inner in value.items():
            yield from lost(inner, other.get(key), f"{path}/{key}".lstrip("/"))
    elif isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        for index, (inner, written) in enumerate(zip(value, other, strict=True)):
            yield from lost(inner, written, f"{path}/{index}")
    elif value != other:
        yield path


def test_metrics_of_rules_and_dashboards_are_exported() -> None:
    """Every name of ours is one of the agent's or the engines' metrics, of the exporter, or recorded by a rule."""
    from slurm_affinode.engines.metric_table import EXPORTED_UP, exported_fields

    known = {metric.name for metric in METRICS} | exported_fields().keys() | {EXPORTED_UP}
    known |= {"slurm_affinode_agent_up", "slurm_affinode_exporter_up", "slurm_affinode_exporter_gpus_failed"}
    recorded = {name for name, _ in rules() if ":" in name}
    texts = [expr for _, expr in rules()] + [expr for dashboard in dashboards() for _, expr in expressions(dashboard)]
    for expr in texts:
        bare = re.sub(r'"[^"]*"', "", expr)
        assert set(re.findall(r"\bslurm_affinode_\w+", bare)) <= known, expr
        assert set(re.findall(r"\b(?:gpu|cluster):[\w:]+", bare)) <= recorded, expr


# --- data


def _fleet() -> Iterator[str]:
    """Yield samples of four GPUs: busy, idle, low, unmeasured, and memory that is left without a job."""
    for minute in range(MINUTES):
        for node, index in itertools.product(("g1", "g2"), (0, 1)):
            jobs = [job for job, (_, on, gpus, since, until) in JOBS.items()
                    if on == node and index in gpus and since <= minute < until]  # fmt: skip
            job = jobs[0] if jobs else None
            labels = f'cluster="alpha",Hostname="{node}",instance="{node}:9402",gpu="{index}",UUID="GPU-{node}-{index}"'
            labels += f',hpc_job="{job}"' if job else ""
            util, used = 0.0, 0.0
            if job == "1":
                util, used = (80.0, 40_000.0) if index == 0 else (0.0, 600.0)
            elif job == "2":
                util, used = 3.0 if minute < 300 else 0.0, 20_000.0
            elif job == "3":
                util, used = 50.0, 70_000.0
            elif job == "4":
                used = TOTAL_MIB / 2
            elif node == "g1":
                used = TOTAL_MIB / 5
            values = {
                "DCGM_FI_DEV_FB_USED": used, "DCGM_FI_DEV_FB_FREE": TOTAL_MIB - used, "DCGM_FI_DEV_GPU_TEMP": 40.0,
                "DCGM_FI_DEV_POWER_USAGE": 60 + util * 3, "DCGM_FI_DEV_XID_ERRORS": 0.0,
            }  # fmt: skip
            if not (job == "3" and 60 <= minute < 120):
                values["DCGM_FI_DEV_GPU_UTIL"] = util
                if job == "3":
                    values |= {"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.3, "DCGM_FI_PROF_DRAM_ACTIVE": 0.2}
                if job == "4":  # as of a CUDA context that does nothing
                    values |= {"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.000062, "DCGM_FI_PROF_SM_ACTIVE": 0.0}
            for name, value in values.items():
                yield f"{name}{{{labels}}} {value} {BEGIN + minute * 60}"


def _agent_value(name: str, labels: Mapping[str, str], minute: int) -> float:
    """Return a value at which every alert on agents fires."""
    per_minute = {"failed": 2.0, "held": 0.1, "fault": 0.1}
    if name.endswith("_total"):
        return minute * per_minute.get(labels.get("outcome", ""), 1.0)
    fixed = {
        "last_sample_timestamp_seconds": float(BEGIN), "slurm_up": 0.0, "resident_memory_bytes": 3e8,
        "store_left_bytes": 1e12 - minute * 2.2e9, "image_bytes": 1e12,
    }  # fmt: skip
    return fixed.get(name.removeprefix("slurm_affinode_agent_"), 1.0)


def _agents() -> Iterator[str]:
    values = {"version": ["1"], "tier": ["disk", "shared"], "operation": ["jobs", "release"]}
    for node in ("g1", "g2"):
        base = {"cluster": "alpha", "Hostname": node, "instance": f"{node}:9402"}
        for metric in METRICS:
            if metric.name.endswith("_job_info"):
                combinations = [{"hpc_job": job, "user": user} for job, (user, on, *_) in JOBS.items() if on == node]
            else:
                choices = [list(known) or values[label] for label, known in metric.labels.items()]
                combinations = [dict(zip(metric.labels, item, strict=True)) for item in itertools.product(*choices)]
            for labels in combinations:
                text = ",".join(f'{key}="{value}"' for key, value in (base | labels).items())
                for minute in range(MINUTES):
                    value = _agent_value(metric.name, labels, minute)
                    yield f"{metric.name}{{{text}}} {value} {BEGIN + minute * 60}"
        plain = ",".join(f'{key}="{value}"' for key, value in base.items())
        for minute in range(MINUTES):
            at = BEGIN + minute * 60
            yield f"slurm_affinode_agent_up{{{plain}}} {int(node == 'g1')} {at}"
            yield f'slurm_affinode_exporter_up{{instance="{node}:9402"}} {int(node == "g1")} {at}'
            yield f'slurm_affinode_exporter_gpus_failed{{instance="{node}:9402"}} {int(node == "g1")} {at}'


def _engines() -> Iterator[str]:
    """Yield an overloaded engine, a stalled one, an idle one, and one that does not respond."""
    counters = ("generation_tokens", "preemptions", "finished", "ttft_s", "ttft_count", "token_latency_s",
                "token_latency_count")  # fmt: skip
    for address, running, per_minute in (("s1:8000", 16, 60), ("s2:8000", 3, 0), ("s3:8000", 0, 0)):
        labels = f'cluster="alpha",address="{address}",hpc_job="3",gpus="GPU-g2-0"'
        for minute in range(MINUTES):
            at = BEGIN + minute * 60
            values = {"up": 1, "running": running, "kv_usage": 0.9 if per_minute else 0.1}
            values["waiting"] = 1 + 9 * minute if per_minute else 0
            values |= {f"{name}_total": per_minute * minute for name in counters}
            for name, value in values.items():
                yield f"slurm_affinode_serving_{name}{{{labels}}} {value} {at}"
    for minute in range(MINUTES):
        labels = 'cluster="alpha",address="s4:8000",hpc_job="3"'
        yield f"slurm_affinode_serving_up{{{labels}}} 0 {BEGIN + minute * 60}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus with the samples and what the recording rules make of them.

    Backfilled series do not end, as scraped ones do: a short lookback takes the place of the marker at their end. The
    rules of one pass do not see the results of that pass. Prometheus evaluates a group at an offset within the minute.
    """
    directory = tmp_path_factory.mktemp("prometheus")
    flags = ("--query.lookback-delta=59s999ms",)
    lines = sorted(itertools.chain(_fleet(), _agents(), _engines()), key=lambda line: line.partition("{")[0])
    text = "\n".join(lines) + "\n# EOF\n"
    for _ in range(2):
        with prometheus(directory, text, flags=flags) as url:
            record(url, RULES / "gpu.rules.yml", directory / "data", BEGIN, LAST + 60)
        text = ""
    with prometheus(directory, flags=flags) as url:
        yield url


def value_at(url: str, expr: str) -> list[float]:
    """Return the values of an expression at the end of the last minute."""
    import httpx

    reply = httpx.get(f"{url}/api/v1/query", params={"query": expr, "time": LAST + 59.998}, timeout=60).json()
    assert reply["status"] == "success", (expr, reply)
    return [float(item["value"][1]) for item in reply["data"]["result"]]


def filled(expr: str) -> str:
    """Return an expression with the variables of a dashboard replaced."""
    for name, value in {
        "__rate_interval": "5m", "__range": f"{MINUTES * 60 - 1}s", "cluster": "alpha", "node": ".*", "job": "3",
        "user": "ada", "server": ".*",
    }.items():  # fmt: skip
        expr = expr.replace(f"${name}", value)
    return expr


@pytest.mark.database
def test_every_expression_returns_data(server: str) -> None:
    """Panels, variables and rules, at a time at which every alert has a reason."""
    empty = [title for item in dashboards() for title, expr in expressions(item) if not value_at(server, filled(expr))]
    assert empty == []
    for dashboard in dashboards():
        for variable in dashboard["templating"]["list"][1:]:
            metric = re.fullmatch(r"label_values\((.*), \w+\)", variable["definition"])
            assert metric is not None
            assert value_at(server, filled(metric[1])), variable["definition"]
    assert [name for name, expr in rules() if not value_at(server, expr)] == []


@pytest.mark.database
def test_figures_of_fleet_and_jobs_are_those_of_a_report(server: str, tmp_path: Path) -> None:
    def at(minute: int) -> str:
        return datetime.fromtimestamp(BEGIN + minute * 60, UTC).strftime("%Y-%m-%dT%H:%M:%S")

    lines = ["JobIDRaw|Cluster|User|State|Submit|Start|End|AllocTRES|NodeList"]
    lines += [
        f"{job}|alpha|{user}|COMPLETED|{at(since)}|{at(since)}|{at(until)}|gres/gpu={len(gpus)}|{node}"
        for job, (user, node, gpus, since, until) in JOBS.items()
    ]
    (tmp_path / "sacct.txt").write_text("\n".join(lines) + "\n")
    state = ["--state", str(tmp_path / "state")]
    env = {"TZ": "UTC", "SLURM_AFFINODE_DB": None}
    for arguments in (
        ["ingest", "sacct", str(tmp_path / "sacct.txt"), "--timezone", "UTC", *state],
        ["ingest", "gpu", "--prometheus", server, "--since", at(0) + "Z", "--until", at(MINUTES) + "Z", *state],
    ):
        done = CliRunner().invoke(cli, arguments, env=env, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    until = datetime.fromtimestamp(BEGIN + MINUTES * 60, UTC)
    waste = api.waste(datetime.fromtimestamp(BEGIN, UTC), until, state_dir=tmp_path / "state")
    total = waste.total
    fleet = dict(expressions(next(dashboard for dashboard in dashboards() if dashboard["title"] == "GPU fleet")))
    shown = {
        name: value_at(server, filled(fleet[f"GPU fleet: GPU-hours {what}"]))[0]
        for name, what in (("gpu_hours_capacity", "of all GPUs"), ("gpu_hours_idle", "idle"),
                           ("gpu_hours_low", "low"), ("gpu_hours_busy", "busy"))
    }  # fmt: skip
    assert shown == pytest.approx({name: total[name] for name in shown})
    hours = value_at(server, filled("sum_over_time(cluster:gpus_unknown:count[$__range]) / 60"))
    assert hours == pytest.approx([total["gpu_hours_unknown"]])
    assert shown["gpu_hours_idle"] > 0
    assert hours[0] == pytest.approx(1.0)

    queries = dict(expressions(next(dashboard for dashboard in dashboards() if dashboard["title"] == "GPU job")))
    for row in waste.jobs.itertuples():
        util, memory_mb = (
            value_at(server, filled(queries[f"GPU job: {title}"].replace("$job", str(row.job_id))))[0]
            for title in ("Mean utilization", "Most memory used on a GPU")
        )
        assert (util, memory_mb) == pytest.approx((row.util_mean_pct, row.fb_peak_gib * 2**30 / 1e6)), row.job_id
    assert len(waste.jobs) == len(JOBS)
