"""Write a cluster in the formats of sites: GPU metrics in three, accounting in two, recorded GPU IDs in one."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from oracle.model import SIGNALS, Cluster, Gpu, Run

METRICS = dict(
    zip(
        SIGNALS,
        (
            "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_SM_ACTIVE",
            "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_DEV_FB_USED",
            "DCGM_FI_DEV_POWER_USAGE",
        ),
        strict=True,
    )
)  # fmt: skip


# --- GPU metrics ------------------------------------------------------------------------------------------------------


def exposition(cluster: Cluster) -> str:
    """Return exposition text with timestamps, scrape by scrape; OpenMetrics groups the samples by metric."""
    lines: list[str] = []
    scale = 1000 if cluster.openmetrics else 1
    entries = [
        (metric, labels, sample.time_ms, value)
        for gpu in cluster.gpus
        for sample in gpu.samples
        for metric, labels, value in _series(gpu, sample.values, sample.jobs)
    ]
    entries.sort(key=lambda e: (e[0], e[2]) if cluster.openmetrics else (e[2], e[0]))
    by_scrape = itertools.groupby(entries, key=lambda e: e[0] if cluster.openmetrics else (e[2], e[0]))
    for _, scrape in by_scrape:
        for number, (metric, labels, time_ms, value) in enumerate(scrape):
            if not number:
                lines.append(f"# TYPE {metric} gauge")
            written = ",".join(f'{name}="{text}"' for name, text in labels.items())
            moment = f"{time_ms / scale:.3f}" if cluster.openmetrics else str(time_ms)
            lines.append(f"{metric}{{{written}}} {'NaN' if value is None else repr(value)} {moment}")
    return "\n".join([*lines, *(["# EOF"] if cluster.openmetrics else [])]) + "\n"


def range_query(cluster: Cluster) -> str:
    """Return the response of Prometheus to a range query: a matrix."""
    series: dict[tuple[tuple[str, str], ...], list[tuple[float, str]]] = {}
    for gpu in cluster.gpus:
        for sample in gpu.samples:
            for metric, labels, value in _series(gpu, sample.values, sample.jobs):
                key = tuple({"__name__": metric, **labels}.items())
                series.setdefault(key, []).append((sample.time_ms / 1000, "NaN" if value is None else repr(value)))
    result = [{"metric": dict(key), "values": sorted(values)} for key, values in series.items()]
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}})


def table(cluster: Cluster) -> str:
    """Return CSV with one row per GPU and time, in local time."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["timestamp", "node", "uuid", "pci_bus_id", "index", "mig_instance", *METRICS.values(), "hpc_job"])
    rows = []
    for gpu in cluster.gpus:
        times = _local_times([s.time_ms for s in gpu.samples], cluster.zone)
        for sample, moment in zip(gpu.samples, times, strict=True):
            values = [_cell(sample.values.get(name)) for name in SIGNALS]
            named = [gpu.node, gpu.uuid or "", gpu.pci or "", "" if gpu.index is None else gpu.index]
            instance = "" if gpu.mig is None else gpu.mig
            jobs = " ".join(map(str, sample.jobs))
            rows.append((sample.time_ms, [moment, *named, instance, *values, jobs]))
    writer.writerows(row for _, row in sorted(rows, key=lambda row: row[0]))
    return out.getvalue()


def _series(
    gpu: Gpu, values: dict[str, float | None], jobs: list[int]
) -> Iterator[tuple[str, dict[str, str], float | None]]:
    labels = {"gpu": gpu.index, "UUID": gpu.uuid, "pci_bus_id": gpu.pci, "GPU_I_ID": gpu.mig, "Hostname": gpu.node}
    named = {name: str(text) for name, text in labels.items() if text is not None}
    for signal, value in values.items():
        for job in jobs or [None]:
            yield METRICS[signal], named | ({} if job is None else {"hpc_job": str(job)}), value


def _cell(value: float | None) -> str:
    return "" if value is None else repr(value)


def _local_times(times_ms: list[int], zone: str) -> list[str]:
    """Return local times, with a UTC offset if a reader could not resolve them when the clock goes back."""
    local_zone = ZoneInfo(zone)
    moments = [datetime.fromtimestamp(t / 1000, UTC).astimezone(local_zone) for t in times_ms]
    plain = [m.replace(tzinfo=None, fold=0) for m in moments]
    fold, certain = 0, True
    for i, moment in enumerate(moments):
        back = plain[i - 1] - plain[i] if i else timedelta(0)
        if back > timedelta(0):
            fold = 1
        if moment.utcoffset() != moment.replace(fold=1 - moment.fold).utcoffset():
            # A gap hides a clock change, and a small step back may be rows out of order.
            dense = i > 0 and times_ms[i] - times_ms[i - 1] <= 300_000
            certain &= moment.fold == fold and dense and not timedelta(0) < back < timedelta(minutes=10)
    return [(p if certain else m).isoformat(timespec="milliseconds") for p, m in zip(plain, moments, strict=True)]


# --- Accounting -------------------------------------------------------------------------------------------------------

_FIELDS = (
    "Cluster", "JobIDRaw", "JobID", "User", "Account", "Partition", "State", "Submit", "Eligible", "Start", "End",
    "ElapsedRaw", "Suspended", "TimelimitRaw", "NNodes", "NodeList", "AllocTRES", "JobName",
)  # fmt: skip


def sacct_text(cluster: Cluster) -> str:
    """Return the output of ``sacct -P`` in local time."""
    lines = ["|".join(_FIELDS)]
    for run in cluster.runs:
        printed = str(run.job_id)
        if run.array:
            printed = f"{run.array[0]}_{run.array[1]}"
        if run.het:
            printed = f"{run.het[0]}+{run.het[1]}"
        submit, start, end = _accounting_times(cluster, run)
        values = (
            "larch", run.job_id, printed, run.user, "physics", "gpu", _state(run), submit, submit, start, end,
            _elapsed(cluster, run), _duration(run.suspended), "UNLIMITED" if run.limit is None else run.limit // 60,
            len(run.nodes), ",".join(run.nodes), _tres(run), "train",
        )  # fmt: skip
        lines.append("|".join(map(str, values)))
    return "\n".join(lines) + "\n"


def sacct_json(cluster: Cluster) -> str:
    """Return the output of ``sacct --json``."""
    jobs = []
    for run in cluster.runs:
        array, het = run.array or [0, None], run.het or [0, None]
        jobs.append(
            {
                "job_id": run.job_id, "cluster": "larch", "name": "train", "user": run.user, "account": "physics",
                "partition": "gpu", "nodes": ",".join(run.nodes),
                "array": {"job_id": array[0], "task_id": _number(array[1])},
                "het": {"job_id": het[0], "job_offset": _number(het[1])},
                "state": {"current": [_state(run)], "reason": "None"},
                "time": {
                    "submission": run.submit, "eligible": run.submit, "start": run.start, "end": run.end or 0,
                    "elapsed": _elapsed(cluster, run), "suspended": run.suspended,
                    "limit": {"set": run.limit is not None, "infinite": run.limit is None,
                              "number": (run.limit or 0) // 60},
                },
                "tres": {"allocated": [{"type": t, "name": n, "count": c} for t, n, c in _resources(run)]},
                "steps": [],
            }
        )  # fmt: skip
    return json.dumps({"jobs": jobs})


def recorded(cluster: Cluster) -> str:
    """Return CSV as read by ``ingest allocations``."""
    lines = ["cluster,job_id,start,node,gpu"]
    for entry in cluster.recorded:
        start = "" if entry.start is None else datetime.fromtimestamp(entry.start, UTC).isoformat()
        lines.append(f"larch,{entry.job_id},{start},{entry.node},{entry.gpu}")
    return "\n".join(lines) + "\n"


def _elapsed(cluster: Cluster, run: Run) -> int:
    return (run.end or cluster.accounted) - run.start - run.suspended


def _duration(seconds: int) -> str:
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _state(run: Run) -> str:
    return "RUNNING" if run.end is None else "REQUEUED" if run.requeued else "COMPLETED"


def _resources(run: Run) -> list[tuple[str, str, int]]:
    gpus = [("gres", "gpu", run.gpus)] if run.gpus else []
    return [("cpu", "", 4), *gpus, ("node", "", len(run.nodes))]


def _tres(run: Run) -> str:
    return ",".join(f"{kind}/{name}={count}" if name else f"{kind}={count}" for kind, name, count in _resources(run))


def _number(value: int | None) -> dict[str, object]:
    return {"set": value is not None, "infinite": False, "number": value or 0}


def _accounting_times(cluster: Cluster, run: Run) -> tuple[str, str, str]:
    """Return submit, start and end in local time, with UTC offset if order and elapsed time leave them ambiguous."""
    local_zone = ZoneInfo(cluster.zone)
    times = [run.submit, run.start, *([] if run.end is None else [run.end])]
    moments = [datetime.fromtimestamp(t, UTC).astimezone(local_zone) for t in times]
    readings = 0
    for reading in itertools.product(*({m.replace(fold=f).timestamp() for f in (0, 1)} for m in moments)):
        elapsed_fits = run.end is None or abs(reading[2] - reading[1] - (run.end - run.start)) <= 900
        readings += list(reading) == sorted(reading) and elapsed_fits
    plain = run.plain or readings == 1
    written = [(m.replace(tzinfo=None) if plain else m).isoformat() for m in moments]
    return written[0], written[1], written[2] if run.end is not None else "Unknown"
