"""Jobs whose shape does not fit their work: rules over accounting and, where available, GPU samples.

Each rule is a filter over one row per run and requires at least two conditions; an unknown value disables the rule for
that run. Jobs with an idle GPU are left to ``squatters``. Users whose jobs together used little of their allocations
over a period are listed as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

import polars as pl

from slurm_affinode.analysis import slots
from slurm_affinode.analysis.prices import normalized
from slurm_affinode.analysis.squatters import HeldGpus, run_ref
from slurm_affinode.base.config import MisfitConfig, NodeClass
from slurm_affinode.core.finding_texts import advice, evidence
from slurm_affinode.metrics.parquet.parts import agreed
from slurm_affinode.model.finding import Evidence, Finding, JobAttempt
from slurm_affinode.slurm.accounting.schema import TIME

Row = dict[str, Any]


def gpu_users(rows: pl.DataFrame, config: MisfitConfig, until: datetime) -> Iterator[Finding]:
    """Yield users with low GPU activity, among those with the most GPU-hours."""
    gpu_h = (pl.col("gpus") * (pl.col("end_ms") - pl.col("start_ms")) / 3.6e6).sum()
    of_gpus = rows.filter(pl.col("gpus").fill_null(0) > 0)
    for row, whole in _largest(of_gpus, gpu_h, config, at_least=config.user_min_gpu_hours):
        if not row["measured_gpu_s"]:
            continue
        measured_h = row["measured_gpu_s"] / 3600
        mean = row["activity_pct_s"] / row["measured_gpu_s"]
        if mean > config.user_efficiency_pct:
            continue
        yield _user_finding("low-efficiency-user", row, until, (
            evidence("low-efficiency-user.compute", mean, 0.6, limit=config.user_efficiency_pct, measured=measured_h),
            evidence("low-efficiency-user.time", row["hours"], 0.4, limit=config.user_min_gpu_hours, jobs=row["jobs"],
                     share=row["hours"] / whole if whole else None),
        ))  # fmt: skip


def cpu_users(rows: pl.DataFrame, config: MisfitConfig, until: datetime) -> Iterator[Finding]:
    """Yield users with low CPU utilization, based on ended jobs without GPUs."""
    ended = rows.filter((pl.col("gpus").fill_null(0) == 0) & ~pl.col("running") & pl.col("total_cpu_s").is_not_null())
    hours = (pl.col("cpus") * pl.col("ran_s") / 3600).sum()
    for row, _ in _largest(ended, hours, config, at_least=config.cpu_user_min_core_hours):
        mean = 100 * row["cpu_s"] / 3600 / row["hours"] if row["hours"] else 100.0
        if mean > config.cpu_efficiency_pct:
            continue
        yield _user_finding("low-cpu-efficiency-user", row, until, (
            evidence("low-cpu-efficiency-user.cpu", mean, 0.6, limit=config.cpu_efficiency_pct),
            evidence("low-cpu-efficiency-user.time", row["hours"], 0.4, limit=config.cpu_user_min_core_hours,
                     jobs=row["jobs"]),
        ))  # fmt: skip


def _largest(
    rows: pl.DataFrame, hours: pl.Expr, config: MisfitConfig, *, at_least: float
) -> Iterator[tuple[Row, float]]:
    """Yield the users with the most ``hours``, each with the total of all users; skip users below the minimum."""
    per = (
        rows.group_by("cluster", "user")
        .agg(
            hours.alias("hours"), pl.len().alias("jobs"), pl.col("measured_gpu_s").sum(),
            pl.col("activity_pct_s").sum(), pl.col("total_cpu_s").sum().alias("cpu_s"),
            agreed("account"), pl.col("start").min().alias("first"),
            pl.col("job_id").first(), pl.col("submit").first(),
        )
        .sort("hours", "user", descending=[True, False])
    )  # fmt: skip
    whole = float(per["hours"].sum() or 0)
    for row in per.head(config.user_top).iter_rows(named=True):
        if row["hours"] >= max(at_least, config.user_min_share * whole):
            yield row, whole


def _user_finding(kind: str, row: Row, until: datetime, proof: tuple[Evidence, ...]) -> Finding:
    return Finding(
        kind=kind, cluster=row["cluster"], subject=JobAttempt(row["job_id"], str(row["job_id"]), row["submit"]),
        user=row["user"], account=row["account"], partition=None, qos=None, nodes=(), gpus=(), since=row["first"],
        window_s=(until - row["first"]).total_seconds(), score=1.0, evidence=proof, held_gpu_hours=None,
        held_gib_hours=None, impact=None, source="history", observed_at=until, advice=advice(f"{kind}.advice"),
    )  # fmt: skip


GIB = 2.0**30
IDLE_PCT = 5.0
FEW_JOBS = 20
"""With fewer jobs than this, a partition of GPU nodes counts as a GPU partition, whatever its jobs are."""
SERIAL = (0.85, 1.1)
"""Range of cores used by a serial program."""


@dataclass(frozen=True, slots=True)
class MisfitRule:
    """A kind of finding, and a function that returns evidence and advice for a run, or None."""

    kind: str
    of_gpu_jobs: bool
    judge: Callable[[Row, MisfitConfig], tuple[tuple[Evidence, ...], str] | None]


def table(gpus: HeldGpus, nodes: Mapping[str, NodeClass]) -> pl.DataFrame:
    """Return one row per run that passes the filters: accounting, GPU activity, and the resources of its nodes."""
    gpu_figures = gpus.any
    whole = gpus.pairs.with_columns(
        pl.Series("peak", gpu_figures.peak_all), pl.Series("util_ms", gpu_figures.util_ms),
        pl.Series("util_known_ms", gpu_figures.util_known_ms),
        pl.Series("fb", gpu_figures.fb_peak), pl.Series("n", gpu_figures.samples),
        pl.Series("activity_ms", gpu_figures.activity_ms), pl.Series("measured_ms", gpu_figures.measured_ms),
        pl.Series("model", gpus.devices["model"][gpus.pairs["at"].to_list()] if gpus.pairs.height else [], pl.String),
    )  # fmt: skip
    any_samples = pl.col("n") > 0
    by_run = whole.group_by("run").agg(
        any_samples.all().alias("measured"),
        pl.len().cast(pl.Int64).alias("mapped"),
        pl.col("peak").fill_nan(None).min().alias("least_peak"),
        (pl.col("util_ms").sum() / pl.col("util_known_ms").sum()).fill_nan(None).alias("util_pct"),
        (pl.col("fb").fill_nan(None).max() / 1024).alias("fb_gib"),
        (pl.col("measured_ms").sum() / 1000).alias("measured_gpu_s"),
        (pl.col("activity_ms").sum() / 1000).alias("activity_pct_s"),
        agreed("model"),
    )
    per_node = _per_node(gpus, nodes)
    elapsed = (pl.col("finish") - pl.col("start")).dt.total_milliseconds() / 1000
    return (
        gpus.runs.filter(pl.col("selected"))
        .with_columns(pl.col("end_ms").cast(TIME).alias("finish"))
        .with_columns(elapsed.alias("ran_s"), (pl.col("end").is_null() | (pl.col("end") > gpus.query.until))
                      .alias("running"))
        .join(by_run, on="run", how="left", maintain_order="left")
        .join(per_node, on="run", how="left", maintain_order="left")
    )  # fmt: skip


def _per_node(gpus: HeldGpus, nodes: Mapping[str, NodeClass]) -> pl.DataFrame:
    """Return, per run, the minimum cores, maximum GPUs and minimum memory over its nodes.

    Columns: ``run``, ``node_cores``, ``node_gpus``, ``node_gib``.
    """
    names = gpus.nodes["node"].unique().to_list()
    rows = []
    for name in names:
        node_class = nodes.get(name) or next((c for pattern, c in nodes.items() if fnmatchcase(name, pattern)), None)
        if node_class is not None:
            rows.append((name, node_class.cores, node_class.gpus, node_class.memory_gib))
    schema = {"node": pl.String(), "cores": pl.Int64(), "of_node": pl.Int64(), "gib": pl.Float64()}
    have = pl.DataFrame(rows, schema=schema, orient="row")
    return (
        gpus.nodes.join(gpus.runs.select("run", "cluster"), on="run")
        .join(have, on="node", how="left")
        .join(_gpus_seen(gpus.devices), on=["cluster", "node"], how="left")
        .with_columns(pl.coalesce("of_node", "seen").alias("of_node"))
        .group_by("run")
        .agg(pl.col("cores").min().alias("node_cores"), pl.col("of_node").max().alias("node_gpus"),
             pl.col("gib").min().alias("node_gib"))
    )  # fmt: skip


def _gpus_seen(devices: pl.DataFrame) -> pl.DataFrame:
    """Return ``cluster``, ``node``, ``seen``: the number of GPUs of a node by the metrics; unknown with MIG instances.

    A GPU and its replacement, or two names of it, are one.
    """
    table = devices.with_row_index("at").with_columns(pl.col("at").cast(pl.Int64))
    whole = pl.col("mig").is_null().all()
    return (
        table.join(slots.of_devices(table), on="at")
        .group_by("cluster", "node")
        .agg(pl.when(whole).then(pl.col("slot").n_unique()).cast(pl.Int64).alias("seen"))
    )


def find(
    gpus: HeldGpus,
    config: MisfitConfig,
    nodes: Mapping[str, NodeClass],
    *,
    min_run_s: float,
    kinds: frozenset[str],
    gpu_partitions: frozenset[str] = frozenset(),
    rules: Sequence[MisfitRule] | None = None,
) -> list[Finding]:
    """Return the misfits of ``kinds``: one finding per run and rule, and one per user.

    ``gpu_partitions``: partitions of GPU nodes only, in a cluster that also has other nodes. ``rules``: the rules for
    runs, by default ``RULES``.
    """
    rows = table(gpus, nodes)
    long = rows.filter(pl.col("ran_s") >= min_run_s)
    mostly_gpu = _gpu_partitions(gpus.runs, config, gpu_partitions)
    chosen = [rule for rule in (RULES if rules is None else rules) if rule.kind in kinds]
    misfits = _worth_it(_by_rule(gpus, long, config, mostly_gpu, chosen), config)
    if "low-efficiency-user" in kinds:
        misfits += gpu_users(long, config, gpus.query.until)
    if "low-cpu-efficiency-user" in kinds:
        misfits += cpu_users(long, config, gpus.query.until)
    return misfits


def _by_rule(
    gpus: HeldGpus,
    long: pl.DataFrame,
    config: MisfitConfig,
    gpu_partitions: pl.DataFrame,
    chosen: Sequence[MisfitRule],
) -> list[tuple[MisfitRule, Finding, float]]:
    """Return the findings of the rules, with the GPU-hours of their runs (without GPUs: core-hours)."""
    rows = _candidates(long, chosen).join(
        gpu_partitions, on=["cluster", "partition"], how="left", maintain_order="left"
    ).with_columns(pl.col("gpu_partition").fill_null(value=False))  # fmt: skip
    hits = [
        (place, rule, proof)
        for place, row in enumerate(rows.select(_LOOKED_AT).iter_rows(named=True))
        for rule in chosen
        if rule.of_gpu_jobs == bool(row["gpus"]) and (proof := rule.judge(row, config)) is not None
    ]
    places = sorted({place for place, _, _ in hits})
    whole = dict(zip(places, rows[places].rows(named=True), strict=True))
    of_runs = gpus.nodes.filter(pl.col("run").is_in([row["run"] for row in whole.values()]))
    nodes = dict(of_runs.group_by("run").agg("node").iter_rows())
    return [
        (
            rule,
            _finding(rule.kind, row, *proof, gpus.query.until, nodes.get(row["run"], ())),
            (row["gpus"] or row["cpus"] or 0) * row["ran_s"] / 3600,
        )
        for rule, proof, row in ((rule, proof, whole[place]) for place, rule, proof in hits)
    ]


def _worth_it(results: Sequence[tuple[MisfitRule, Finding, float]], config: MisfitConfig) -> list[Finding]:
    """Drop the findings of users whose jobs of that kind total too few hours."""
    hours: dict[tuple[str, str, str | None], float] = {}
    for _, finding, some in results:
        which = (finding.kind, finding.cluster, finding.user)
        hours[which] = hours.get(which, 0.0) + some
    return [
        finding
        for rule, finding, _ in results
        if hours[finding.kind, finding.cluster, finding.user]
        >= (config.min_gpu_hours if rule.of_gpu_jobs else config.min_core_hours)
    ]


_LOOKED_AT = (
    "gpus", "gpu_type", "model", "util_pct", "fb_gib", "measured", "least_peak", "cpus", "total_cpu_s", "nodes",
    "node_cores", "node_gpus", "node_gib", "alloc_mem_bytes", "req_mem_bytes", "max_rss_bytes", "partition",
    "gpu_partition", "running", "state", "ran_s", "timelimit_s",
)  # fmt: skip
"""Columns that the rules read: rows as Python dicts of all columns would take four times as long."""


def _candidates(rows: pl.DataFrame, rules: Sequence[MisfitRule]) -> pl.DataFrame:
    gpu, cpu = any(rule.of_gpu_jobs for rule in rules), any(not rule.of_gpu_jobs for rule in rules)
    has = pl.col("gpus").fill_null(0) > 0
    return rows.filter((has & pl.lit(gpu)) | (~has & pl.lit(cpu)))


def _gpu_partitions(runs: pl.DataFrame, config: MisfitConfig, by_nodes: frozenset[str]) -> pl.DataFrame:
    """Return ``cluster``, ``partition``, ``gpu_partition`` (true) of the GPU partitions.

    They are the configured ones, else those in which most jobs use GPUs, and those of ``by_nodes`` with few jobs.
    """
    per = runs.group_by("cluster", "partition").agg(
        (pl.col("gpus").fill_null(0) > 0).mean().alias("share"), pl.len().alias("n")
    )
    certain = pl.col("partition").is_in(sorted(by_nodes)) & (pl.col("n") < FEW_JOBS)
    configured = pl.col("partition").is_in(list(config.cpu_only_partitions))
    chosen = per.filter(configured if config.cpu_only_partitions else (pl.col("share") > 0.5) | certain)
    return chosen.select("cluster", "partition", pl.lit(value=True).alias("gpu_partition"))


def _finding(  # noqa: PLR0917
    kind: str, row: Row, proof: tuple[Evidence, ...], text: str, until: datetime, nodes: Sequence[str]
) -> Finding:
    ref: JobAttempt = run_ref(row, until)
    return Finding(
        kind=kind, cluster=row["cluster"], subject=ref, user=row["user"], account=row["account"],
        partition=row["partition"], qos=row["qos"], nodes=tuple(nodes), gpus=(), since=row["start"],
        window_s=row["ran_s"], score=min(1.0, sum(item.points for item in proof)), evidence=proof,
        held_gpu_hours=None, held_gib_hours=None, impact=None, source="history", observed_at=row["finish"],
        advice=text, allocated_gpus=row["gpus"],
    )  # fmt: skip


def _uses_all(row: Row) -> bool:
    """Return whether every GPU was measured and active at some time."""
    return bool(row["measured"]) and row["least_peak"] is not None and row["least_peak"] > IDLE_PCT


def _cores(row: Row, config: MisfitConfig) -> tuple[tuple[Evidence, ...], str] | None:
    limit = config.cores_per_gpu
    if limit is None and row["node_cores"] and row["node_gpus"]:
        limit = row["node_cores"] / row["node_gpus"]
    if limit is None or not row["cpus"] or (row["node_gpus"] and row["gpus"] >= row["node_gpus"] * (row["nodes"] or 1)):
        return None
    each = row["cpus"] / row["gpus"]
    used = None if row["total_cpu_s"] is None or not row["ran_s"] else row["total_cpu_s"] / row["ran_s"]
    # Cores in use are justified; without CPU time it is unknown whether they are in use.
    if each <= limit or used is None or used > limit * row["gpus"]:
        return None
    return (
        evidence("cpu-cores-per-gpu.allocation", each, 0.6, limit=limit, cpus=row["cpus"], gpus=row["gpus"]),
        evidence("cpu-cores-per-gpu.cpu", used, 0.4, limit=limit),
    ), advice("cpu-cores-per-gpu.advice", cores=int(limit))


def _memory(row: Row, config: MisfitConfig) -> tuple[tuple[Evidence, ...], str] | None:
    limit = config.memory_gib_per_gpu
    if limit is None and row["node_gib"] and row["node_gpus"]:
        limit = row["node_gib"] / row["node_gpus"]
    bytes_ = row["alloc_mem_bytes"] or row["req_mem_bytes"]
    if limit is None or not bytes_ or (row["node_gpus"] and row["gpus"] >= row["node_gpus"] * (row["nodes"] or 1)):
        return None
    each, peak = bytes_ / GIB / row["gpus"], row["max_rss_bytes"]
    if each <= limit or peak is None or peak / bytes_ * (row["nodes"] or 1) >= config.memory_used_share:
        return None
    return (
        evidence("memory-per-gpu.allocation", each, 0.6, limit=limit, whole=bytes_ / GIB, gpus=row["gpus"]),
        evidence("memory-per-gpu.memory", peak / GIB, 0.4, share=config.memory_used_share),
    ), advice("memory-per-gpu.advice", gib=max(1, round(peak * 1.2 / GIB / row["gpus"])))


def _powerful(row: Row, config: MisfitConfig) -> tuple[tuple[Evidence, ...], str] | None:
    model = row["model"] or row["gpu_type"]
    if row["gpus"] != 1 or model is None or row["util_pct"] is None or row["fb_gib"] is None or not _uses_all(row):
        return None
    host = None if row["max_rss_bytes"] is None else row["max_rss_bytes"] / GIB
    if row["util_pct"] > config.small_util_pct or row["fb_gib"] >= config.small_gpu_gib:
        return None
    if not any(fnmatchcase(normalized(model), pattern) for pattern in config.too_powerful):
        return None
    if (row["cpus"] or 0) > config.small_cores or (host is not None and host >= config.small_host_gib):
        return None
    return (
        evidence("gpu-too-powerful.compute", row["util_pct"], 0.5, limit=config.small_util_pct),
        evidence("gpu-too-powerful.memory", row["fb_gib"], 0.4, limit=config.small_gpu_gib),
        evidence("gpu-too-powerful.host memory", host, 0.1, limit=config.small_host_gib),
    ), advice("gpu-too-powerful.advice", model=model)


def _fragmented(row: Row, _: MisfitConfig) -> tuple[tuple[Evidence, ...], str] | None:
    nodes, gpus, each = row["nodes"] or 0, row["gpus"], row["node_gpus"]
    if nodes < 2 or not each or (row["measured"] and not _uses_all(row)):
        return None
    needed = -(-gpus // each)
    if needed >= nodes:
        return None
    return (
        evidence("fragmentation.nodes", float(nodes), 0.6, needed=needed, gpus=gpus),
        evidence("fragmentation.node", float(each), 0.4, needed=needed),
    ), advice("fragmentation.advice", needed=needed, each=min(each, -(-gpus // needed)))


def _time(row: Row, config: MisfitConfig) -> tuple[tuple[Evidence, ...], str] | None:
    limit, amount = row["timelimit_s"], row["gpus"] or row["cpus"] or 0
    if row["running"] or not limit or row["state"] != "COMPLETED" or row["ran_s"] >= config.time_share * limit:
        return None
    unused = (limit - row["ran_s"]) * amount / 3600
    if unused < config.time_min_unused_gpu_hours * (1 if row["gpus"] else 32):
        return None
    share = row["ran_s"] / limit
    return (
        evidence("time-limit.time", 100 * share, 0.6, share=config.time_share, ran=row["ran_s"], limit=limit,
                 used=share),
        evidence("time-limit.unused-gpu" if row["gpus"] else "time-limit.unused-cpu", unused, 0.4),
    ), advice("time-limit.advice", limit=max(600, row["ran_s"] * 1.5))  # fmt: skip


def _cpu_only(row: Row, _: MisfitConfig) -> tuple[tuple[Evidence, ...], str] | None:
    if not row["gpu_partition"] or row["gpus"] is None:
        return None
    return (
        evidence("cpu-only-in-gpu-partition.allocation", 0.0, 0.5, cores=row["cpus"] or "?"),
        evidence("cpu-only-in-gpu-partition.partition", row["partition"], 0.5),
    ), advice("cpu-only-in-gpu-partition.advice")


def _cpu_use(row: Row) -> float | None:
    if row["running"] or row["total_cpu_s"] is None or not row["cpus"] or not row["ran_s"]:
        return None
    return float(row["total_cpu_s"] / (row["cpus"] * row["ran_s"]))


def _cpu_idle(row: Row, _: MisfitConfig) -> tuple[tuple[Evidence, ...], str] | None:
    share = _cpu_use(row)
    if share is None or share >= 0.005 or row["ran_s"] < 3600:
        return None
    return (
        evidence("cpu-idle.cpu", 100 * share, 0.6, cpus=row["cpus"]),
        evidence("cpu-idle.time", row["ran_s"], 0.4),
    ), advice("cpu-idle.advice")


def _host_memory(row: Row, config: MisfitConfig) -> tuple[tuple[Evidence, ...], str] | None:
    bytes_, peak = row["alloc_mem_bytes"] or row["req_mem_bytes"], row["max_rss_bytes"]
    if row["running"] or not bytes_ or peak is None or _has_its_memory(row, bytes_):
        return None
    used = peak * (row["nodes"] or 1) / bytes_
    unused = (1 - used) * bytes_ / GIB * row["ran_s"] / 3600
    if used >= 0.35 or unused < config.host_memory_min_gib_hours:
        return None
    return (
        evidence("host-memory.memory", 100 * used, 0.6, peak=peak / GIB, given=bytes_ / GIB),
        evidence("host-memory.unused", unused, 0.4),
    ), advice("host-memory.advice", gib=max(1, round(peak * 1.2 / GIB)))


def _has_its_memory(row: Row, bytes_: int) -> bool:
    """Return whether other jobs could not use the memory anyway.

    True if the job has whole nodes, or no more memory than its share of the node's cores.
    """
    cores, gib, cpus = row["node_cores"], row["node_gib"], row["cpus"] or 0
    if not cores:
        return False
    return bool(cpus >= cores * (row["nodes"] or 1) or (gib and bytes_ / GIB <= cpus * gib / cores))


def _serial(row: Row, _: MisfitConfig) -> tuple[tuple[Evidence, ...], str] | None:
    share, cpus = _cpu_use(row), row["cpus"] or 0
    if share is None or cpus < 2 or row["nodes"] != 1 or not SERIAL[0] <= share * cpus <= SERIAL[1]:
        return None
    return (
        evidence("serial-job.allocation", float(cpus), 0.5),
        evidence("serial-job.cpu", share * cpus, 0.5),
    ), advice("serial-job.advice")


def _cpu_fragmented(row: Row, _: MisfitConfig) -> tuple[tuple[Evidence, ...], str] | None:
    nodes, cpus, each = row["nodes"] or 0, row["cpus"] or 0, row["node_cores"]
    if nodes < 2 or not each or not cpus:
        return None
    needed = max(-(-cpus // each), _nodes_for_memory(row))
    if needed >= nodes:
        return None
    return (
        evidence("cpu-fragmentation.nodes", float(nodes), 0.6, needed=needed, cpus=cpus),
        evidence("cpu-fragmentation.node", float(each), 0.4, needed=needed),
    ), advice("cpu-fragmentation.advice", needed=needed)


def _nodes_for_memory(row: Row) -> int:
    """Return the number of nodes needed for the job's memory.

    The memory is the job's allocation or, if less, the peak of its largest process (plus 20 %) on each of its cores.
    """
    memory_bytes, gib = row["alloc_mem_bytes"] or row["req_mem_bytes"], row["node_gib"]
    if not memory_bytes or not gib:
        return 1
    peak = row["max_rss_bytes"]
    most = memory_bytes if peak is None or row["running"] else min(memory_bytes, 1.2 * peak * (row["cpus"] or 1))
    return max(1, math.ceil(float(most) / GIB / float(gib)))


RULES: tuple[MisfitRule, ...] = (
    MisfitRule("cpu-cores-per-gpu", of_gpu_jobs=True, judge=_cores),
    MisfitRule("memory-per-gpu", of_gpu_jobs=True, judge=_memory),
    MisfitRule("gpu-too-powerful", of_gpu_jobs=True, judge=_powerful),
    MisfitRule("fragmentation", of_gpu_jobs=True, judge=_fragmented),
    MisfitRule("time-limit", of_gpu_jobs=True, judge=_time),
    MisfitRule("cpu-only-in-gpu-partition", of_gpu_jobs=False, judge=_cpu_only),
    MisfitRule("cpu-time-limit", of_gpu_jobs=False, judge=_time),
    MisfitRule("cpu-idle", of_gpu_jobs=False, judge=_cpu_idle),
    MisfitRule("host-memory", of_gpu_jobs=False, judge=_host_memory),
    MisfitRule("serial-job", of_gpu_jobs=False, judge=_serial),
    MisfitRule("cpu-fragmentation", of_gpu_jobs=False, judge=_cpu_fragmented),
)
OWNER_RULES = (*RULES, MisfitRule("host-memory", of_gpu_jobs=True, judge=_host_memory))
"""Rules for the owner of one job. In clean-up, unused host memory of a GPU job matters only where it blocks GPUs."""
