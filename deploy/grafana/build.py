"""Write the Grafana dashboards: ``python deploy/grafana/build.py [--check]``.

Each dashboard is a list of panels with PromQL on the names of dcgm-exporter, of slurm-affinode's exporter, and of the
rules in ``deploy/prometheus``. ``tests/unit/test_dashboards.py`` runs every expression.
"""

# ruff: noqa: E501 - expressions are kept on one line
from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parent
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA = 39
"""Version of the dashboards' format: Grafana 10.4, which later releases convert."""
COLUMNS = 24


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel: ``queries`` are pairs of a legend and an expression; ``wide``: half of the columns, else a quarter."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    kind: str = "timeseries"
    wide: bool = True
    stacked: bool = False
    help: str = ""
    limits: tuple[float, float] | None = None
    """Bounds of the axis."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A selection: the values of a label of a metric."""

    name: str
    metric: str
    label: str
    all: bool = True


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard; ``name`` is its file and its identity."""

    name: str
    title: str
    help: str
    variables: Sequence[Variable]
    panels: Sequence[Panel]


def stat(title: str, unit: str, expr: str, help_: str = "") -> Panel:
    """Return a panel with one number."""
    return Panel(title, unit, [("", expr)], kind="stat", wide=False, help=help_)


CLUSTER = Variable("cluster", "DCGM_FI_DEV_FB_USED", "cluster")
NODE = Variable("node", 'DCGM_FI_DEV_FB_USED{cluster=~"$cluster"}', "Hostname")
C = 'cluster=~"$cluster"'
OWNER = "on (cluster, Hostname, hpc_job) group_left (user) slurm_affinode_agent_job_info"
HOURS = "One sample per minute; a report computes the same from every sample, and adds time that was not measured."
JOB_LABELS = f'{C},hpc_job=~"$job"'
NODE_LABELS = f'{C},Hostname=~"$node"'
SERVER_LABELS = 'cluster=~"$cluster",address=~"$server"'
A = "slurm_affinode_agent_"
S = "slurm_affinode_serving_"

ACTIVITY = [(what, f"sum(cluster:gpus_{what}:count{{{C}}})") for what in ("busy", "low", "idle", "unknown")]

DASHBOARDS = (
    Dashboard(
        "fleet", "GPU fleet", "GPUs of a cluster: how many there are, are held by jobs, and compute.", [CLUSTER],
        [
            stat("GPUs", "none", f"sum(cluster:gpus:count{{{C}}})"),
            stat("Held by jobs", "none", f"sum(cluster:gpus_held:count{{{C}}})"),
            stat("Held and idle", "none", f"sum(cluster:gpus_idle:count{{{C}}})", "No activity signal is above 0."),
            stat("Busy share of the held", "percentunit",
                 f"sum(cluster:gpus_busy:count{{{C}}}) / (sum(cluster:gpus_held:count{{{C}}}) > 0)"),
            Panel("Held GPUs by activity", "none",
                  [*ACTIVITY, ("not held", f"sum(cluster:gpus:count{{{C}}}) - sum(cluster:gpus_held:count{{{C}}})")],
                  stacked=True, help="Idle: 0 %; low: up to 5 %; unknown: no signal was measured. They are not added."),
            Panel("Jobs asleep", "none", [
                ("with a checkpoint image", f'max(slurm_affinode_agent_images{{{C},tier="shared"}})'),
                ("in place", f'sum(slurm_affinode_agent_jobs{{{C},state="asleep"}})'),
            ], help="Jobs that have left their GPUs to others. Reports have the GPU-hours that were given back."),
            *(
                stat(f"GPU-hours {what}", "h", f"sum(sum_over_time(cluster:gpus{name}:count{{{C}}}[$__range])) / 60", HOURS)
                for what, name in (("of all GPUs", ""), ("idle", "_idle"), ("low", "_low"), ("busy", "_busy"))
            ),
            Panel("Power", "watt", [
                ("held", f'sum(max by (Hostname, UUID) (DCGM_FI_DEV_POWER_USAGE{{{C},hpc_job!=""}}))'),
                ("all", f"sum(max by (Hostname, UUID) (DCGM_FI_DEV_POWER_USAGE{{{C}}}))"),
            ]),
            Panel("Nodes with the most idle held GPUs", "none", [
                ("{{Hostname}}",
                 f"topk(10, count by (Hostname) (gpu:activity_percent:max{{{C}}} == 0 and gpu:jobs:count{{{C}}}))"),
            ], kind="bargauge"),
        ],
    ),
    Dashboard(
        "job", "GPU job", "One job: its GPUs, their memory and power.",
        [CLUSTER, Variable("job", 'DCGM_FI_DEV_FB_USED{cluster=~"$cluster",hpc_job!=""}', "hpc_job", all=False)],
        [
            stat("GPUs", "none", f"count(max by (Hostname, UUID, GPU_I_ID) (DCGM_FI_DEV_FB_USED{{{JOB_LABELS}}}))"),
            stat("Mean utilization", "percent",
                 f"avg(max by (Hostname, UUID) (avg_over_time(DCGM_FI_DEV_GPU_UTIL{{{JOB_LABELS}}}[$__range])))"),
            stat("Most memory used on a GPU", "decmbytes",
                 f"max(max_over_time(DCGM_FI_DEV_FB_USED{{{JOB_LABELS}}}[$__range])) * 1.048576"),
            Panel("Owner", "none", [("{{user}}", f"max by (user) (slurm_affinode_agent_job_info{{{JOB_LABELS}}})")],
                  kind="stat", wide=False, help="Known on nodes with an agent."),
            Panel("Utilization of each GPU", "percent", [
                ("{{Hostname}} {{gpu}}", f"max by (Hostname, gpu, UUID) (DCGM_FI_DEV_GPU_UTIL{{{JOB_LABELS}}})"),
            ], limits=(0, 100)),
            Panel("Memory used on each GPU", "decmbytes", [
                ("{{Hostname}} {{gpu}}",
                 f"max by (Hostname, gpu, UUID, GPU_I_ID) (DCGM_FI_DEV_FB_USED{{{JOB_LABELS}}}) * 1.048576"),
            ]),
            Panel("Tensor cores and memory interface", "percentunit", [
                ("tensor", f"avg(DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{JOB_LABELS}}})"),
                ("memory interface", f"avg(DCGM_FI_PROF_DRAM_ACTIVE{{{JOB_LABELS}}})"),
            ], limits=(0, 1)),
            Panel("Power", "watt", [
                ("{{Hostname}} {{gpu}}", f"max by (Hostname, gpu, UUID) (DCGM_FI_DEV_POWER_USAGE{{{JOB_LABELS}}})"),
            ]),
        ],
    ),
    Dashboard(
        "user", "GPUs of a user", "GPUs that a user's jobs hold. Owners are known on nodes with an agent.",
        [CLUSTER, Variable("user", 'slurm_affinode_agent_job_info{cluster=~"$cluster"}', "user", all=False)],
        [
            stat("GPUs held", "none",
                 f'count(max by (Hostname, UUID, GPU_I_ID) (DCGM_FI_DEV_FB_USED{{{C},hpc_job!=""}} * {OWNER}{{user="$user"}}))'),
            stat("Jobs", "none", f'count(count by (hpc_job) (slurm_affinode_agent_job_info{{{C},user="$user"}}))'),
            stat("Mean utilization now", "percent",
                 f'avg(DCGM_FI_DEV_GPU_UTIL{{{C},hpc_job!=""}} * {OWNER}{{user="$user"}})'),
            stat("Power now", "watt", f'sum(DCGM_FI_DEV_POWER_USAGE{{{C},hpc_job!=""}} * {OWNER}{{user="$user"}})'),
            Panel("Utilization by job", "percent", [
                ("{{hpc_job}}",
                 f'avg by (hpc_job) (DCGM_FI_DEV_GPU_UTIL{{{C},hpc_job!=""}} * {OWNER}{{user="$user"}})'),
            ], limits=(0, 100)),
            Panel("Memory used by job", "decmbytes", [
                ("{{hpc_job}}",
                 f'sum by (hpc_job) (DCGM_FI_DEV_FB_USED{{{C},hpc_job!=""}} * {OWNER}{{user="$user"}}) * 1.048576'),
            ]),
            Panel("GPUs held, by user", "none", [
                ("{{user}}",
                 f'topk(10, count by (user) (DCGM_FI_DEV_FB_USED{{{C},hpc_job!=""}} * {OWNER}))'),
            ], kind="bargauge"),
        ],
    ),
    Dashboard(
        "node", "GPU node", "GPUs of a node, and the jobs that hold them.", [CLUSTER, NODE],
        [
            stat("GPUs", "none", f"count(max by (Hostname, UUID, GPU_I_ID) (DCGM_FI_DEV_FB_USED{{{NODE_LABELS}}}))"),
            stat("Held by jobs", "none", f"count(gpu:jobs:count{{{NODE_LABELS}}})"),
            stat("Highest temperature", "celsius", f"max(DCGM_FI_DEV_GPU_TEMP{{{NODE_LABELS}}})"),
            stat("XID errors", "none", f"count(max by (Hostname, UUID) (DCGM_FI_DEV_XID_ERRORS{{{NODE_LABELS}}}) > 0) or vector(0)",
                 "GPUs with an XID error since their exporter started."),
            Panel("Activity of each GPU", "percent", [
                ("{{Hostname}} {{UUID}} {{GPU_I_ID}}", f"gpu:activity_percent:max{{{NODE_LABELS}}}"),
            ], limits=(0, 100), help="The largest of the signals that a GPU has."),
            Panel("Memory used", "percentunit", [
                ("{{Hostname}} {{UUID}} {{GPU_I_ID}}", f"gpu:memory_used_ratio:max{{{NODE_LABELS}}}"),
            ], limits=(0, 1)),
            Panel("GPUs by job", "none", [
                ("{{hpc_job}}", f'count by (hpc_job) (DCGM_FI_DEV_FB_USED{{{NODE_LABELS},hpc_job!=""}})'),
            ], stacked=True),
            Panel("Power", "watt", [
                ("{{Hostname}} {{gpu}}", f"max by (Hostname, gpu, UUID) (DCGM_FI_DEV_POWER_USAGE{{{NODE_LABELS}}})"),
            ], stacked=True),
        ],
    ),
    Dashboard(
        "model-servers", "Model servers", "Inference engines in jobs: requests, tokens, KV cache.",
        [CLUSTER, Variable("server", f'{S}up{{cluster=~"$cluster"}}', "address")],
        [
            stat("Engines that respond", "none", f"sum({S}up{{{SERVER_LABELS}}})"),
            stat("Requests running", "none", f"sum({S}running{{{SERVER_LABELS}}})"),
            stat("Requests waiting", "none", f"sum({S}waiting{{{SERVER_LABELS}}})"),
            stat("Tokens generated per second", "none",
                 f"sum(rate({S}generation_tokens_total{{{SERVER_LABELS}}}[$__rate_interval]))"),
            Panel("Requests", "none", [
                ("running {{address}}", f"{S}running{{{SERVER_LABELS}}}"),
                ("waiting {{address}}", f"{S}waiting{{{SERVER_LABELS}}}"),
            ]),
            Panel("Tokens generated per second", "none", [
                ("{{address}}", f"rate({S}generation_tokens_total{{{SERVER_LABELS}}}[$__rate_interval])"),
            ]),
            Panel("KV cache in use", "percentunit", [("{{address}}", f"{S}kv_usage{{{SERVER_LABELS}}}")], limits=(0, 1)),
            Panel("Preemptions per second", "none", [
                ("{{address}}", f"rate({S}preemptions_total{{{SERVER_LABELS}}}[$__rate_interval])"),
            ]),
            Panel("Mean time to the first token", "s", [
                ("{{address}}", f"rate({S}ttft_s_total{{{SERVER_LABELS}}}[$__rate_interval])"
                 f" / (rate({S}ttft_count_total{{{SERVER_LABELS}}}[$__rate_interval]) > 0)"),
            ]),
            Panel("Mean time between tokens", "s", [
                ("{{address}}", f"rate({S}token_latency_s_total{{{SERVER_LABELS}}}[$__rate_interval])"
                 f" / (rate({S}token_latency_count_total{{{SERVER_LABELS}}}[$__rate_interval]) > 0)"),
            ]),
        ],
    ),
    Dashboard(
        "agents", "Agents", "Health of the agents that suspend and restore jobs.",
        [CLUSTER, Variable("node", f'{A}up{{cluster=~"$cluster"}}', "Hostname")],
        [
            stat("Agents that respond", "none", f"sum({A}up{{{NODE_LABELS}}})"),
            stat("Agents that do not respond", "none", f"count({A}up{{{NODE_LABELS}}} == 0) or vector(0)"),
            stat("Jobs watched", "none", f"sum({A}jobs{{{NODE_LABELS}}})"),
            stat("Versions in use", "none", f"count(count by (version) ({A}build_info{{{NODE_LABELS}}}))"),
            Panel("Suspensions in the range, by outcome", "none", [
                ("{{outcome}}", f"sum by (outcome) (increase({A}suspensions_total{{{NODE_LABELS}}}[$__range]))"),
            ], kind="bargauge"),
            Panel("Restores in the range, by outcome", "none", [
                ("{{outcome}}", f"sum by (outcome) (increase({A}restores_total{{{NODE_LABELS}}}[$__range]))"),
            ], kind="bargauge", help="held: the restore has failed."),
            Panel("Mean time of a phase", "s", [
                ("{{phase}}", f'sum by (phase) (rate({A}phase_seconds_total{{{NODE_LABELS},phase!="frozen"}}[1h]))'
                 f' / (sum by (phase) (rate({A}phases_total{{{NODE_LABELS},phase!="frozen"}}[1h])) > 0)'),
            ]),
            Panel("Suspensions and wakes per hour", "none", [
                ("suspended", f'3600 * sum(rate({A}suspensions_total{{{NODE_LABELS},outcome="suspended"}}[$__rate_interval]))'),
                ("woken", f"3600 * sum(rate({A}wakes_total{{{NODE_LABELS}}}[$__rate_interval]))"),
            ]),
            Panel("Images by tier", "bytes", [
                ("{{tier}} {{Hostname}}", f"{A}image_bytes{{{NODE_LABELS}}}"),
            ], help="The shared tier is exported by one node at a time."),
            Panel("Room left by tier", "bytes", [("{{tier}} {{Hostname}}", f"{A}store_left_bytes{{{NODE_LABELS}}}")]),
            Panel("Time of a request to Slurm", "s", [
                ("{{operation}}", f"sum by (operation) (rate({A}slurm_query_seconds_total{{{NODE_LABELS}}}[$__rate_interval]))"
                 f" / (sum by (operation) (rate({A}slurm_queries_total{{{NODE_LABELS}}}[$__rate_interval])) > 0)"),
            ]),
            Panel("Requests to Slurm per second", "none", [
                ("{{outcome}}", f"sum by (outcome) (rate({A}slurm_queries_total{{{NODE_LABELS}}}[$__rate_interval]))"),
            ]),
            Panel("Memory of the agents", "bytes", [("{{Hostname}}", f"{A}resident_memory_bytes{{{NODE_LABELS}}}")]),
            Panel("CPU time of the agents", "percentunit", [
                ("{{Hostname}}", f"rate({A}cpu_seconds_total{{{NODE_LABELS}}}[$__rate_interval])"),
            ]),
            Panel("Time since the last sample", "s", [
                ("{{Hostname}}", f"time() - {A}last_sample_timestamp_seconds{{{NODE_LABELS}}}"),
            ]),
            Panel("Open journals and threads", "none", [
                ("journals", f"sum({A}journals_open{{{NODE_LABELS}}})"),
                ("most threads of an agent", f"max({A}threads{{{NODE_LABELS}}})"),
            ]),
        ],
    ),
)  # fmt: skip


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "color": {"mode": "palette-classic"}}
    if panel.limits is not None:
        defaults |= {"min": panel.limits[0], "max": panel.limits[1]}
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "lineWidth": 1, "fillOpacity": 60 if panel.stacked else 10, "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }  # fmt: skip
    instant = panel.kind in ("stat", "bargauge")
    made = {
        "id": number, "type": panel.kind, "title": panel.title, "description": panel.help, "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": COLUMNS // 2 if panel.wide else COLUMNS // 4, "h": 8 if panel.wide else 4},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expr, "legendFormat": legend or "__auto", "datasource": SOURCE,
             "instant": instant, "range": not instant}
            for index, (legend, expr) in enumerate(panel.queries)
        ],
    }  # fmt: skip
    if panel.kind == "stat":
        shows = {"textMode": "value_and_name" if panel.queries[0][0] else "value", "colorMode": "none"}
        made["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "none", **shows}
    if panel.kind == "bargauge":
        made["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "orientation": "horizontal"}
    return made


def _variable(variable: Variable) -> dict[str, Any]:
    query = f"label_values({variable.metric}, {variable.label})"
    made: dict[str, Any] = {
        "name": variable.name, "type": "query", "label": variable.name.capitalize(), "datasource": SOURCE, "refresh": 2,
        "query": {"query": query, "refId": "variable"}, "definition": query, "sort": 1, "multi": variable.all,
        "includeAll": variable.all,
    }  # fmt: skip
    if variable.all:  # series without the label are shown, too
        made |= {"allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}}
    return made


def build(dashboard: Dashboard) -> dict[str, Any]:
    """Return the JSON model of a dashboard."""
    panels, x, y, row = [], 0, 0, 0
    for number, panel in enumerate(dashboard.panels, start=1):
        width, height = (COLUMNS // 2, 8) if panel.wide else (COLUMNS // 4, 4)
        if x + width > COLUMNS or (row and height != row):
            x, y, row = 0, y + row, 0
        panels.append(_panel(number, panel, x, y))
        x, row = x + width, height
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    return {
        "uid": f"slurm-affinode-{dashboard.name}", "title": dashboard.title, "description": dashboard.help,
        "tags": ["slurm-affinode", "gpu"], "schemaVersion": SCHEMA, "version": 1, "editable": True, "refresh": "1m",
        "timezone": "browser", "time": {"from": "now-24h", "to": "now"}, "graphTooltip": 1,
        "templating": {"list": [source, *map(_variable, dashboard.variables)]},
        "links": [{"type": "dashboards", "tags": ["slurm-affinode"], "title": "GPU dashboards", "asDropdown": True,
                   "includeVars": True, "keepTime": True}],
        "annotations": {"list": []}, "panels": panels,
    }  # fmt: skip


def files() -> dict[Path, str]:
    """Return the path and the text of each dashboard."""
    return {
        DIRECTORY / f"{dashboard.name}.json": json.dumps(build(dashboard), indent=1, ensure_ascii=False) + "\n"
        for dashboard in DASHBOARDS
    }


def main(arguments: Sequence[str]) -> int:
    """Write the files, or check that they are current."""
    stale = [path for path, text in files().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if "--check" not in arguments:
            path.write_text(files()[path], encoding="utf-8")
        print(f"{path.name} {'differs' if '--check' in arguments else 'written'}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
