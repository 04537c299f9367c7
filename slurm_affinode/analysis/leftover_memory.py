"""GPU memory that remains in use while no job has the GPU, from stored samples and accounting.

A GPU is checked from the end of the last run that had it or may have had it: a run on its node with unknown GPUs or
with part of a GPU. Its memory must be in use in every sample since then, for at least the window, up to the end of the
interval or of known accounting. GPU metrics do not show which process owns the memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import polars as pl

from slurm_affinode.analysis import squatters
from slurm_affinode.analysis.samples import naming_damage, read_by_groups
from slurm_affinode.analysis.squatters import MIB_PER_GIB, HeldGpus
from slurm_affinode.base.spread import Spread
from slurm_affinode.base.times import epoch_ms
from slurm_affinode.core.finding_texts import advice, evidence, xid
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import busiest
from slurm_affinode.model.finding import Finding, GpuEvidence, NodeRef

SETTLE_MS = 120_000
"""Time allowed for the driver and the epilog to free a GPU after its job."""
PARTS = r"gres/(shard|mps)[:=]"


@dataclass(frozen=True, slots=True)
class LeftoverSearch:
    """Thresholds and context of the search for leftover memory."""

    free_mib: float
    """Memory that the driver uses on an unused GPU."""
    window_s: float
    known_until: Mapping[str, datetime]
    """Cluster -> time up to which its accounting is known; that of GPUs of other clusters is the earliest one."""
    nodes: Collection[str] = ()
    """Names of further nodes of the cluster, besides those on which jobs ran."""


def find(
    gpus: HeldGpus, history: SampleStore, rule: LeftoverSearch, spread: Spread | None = None
) -> list[Finding]:  # fmt: skip
    """Return the ``orphan-memory`` findings. ``spread``: to other machines, which read the samples."""
    query = gpus.query
    free = _free(gpus, rule).filter(pl.col("free_ms") + int(rule.window_s * 1000) <= pl.col("until_ms"))
    if free.is_empty():
        return []
    until = min(query.until, max(rule.known_until.values()))
    begin = datetime.fromtimestamp(max(epoch_ms(query.since), int(free["free_ms"].min() or 0)) / 1000, UTC)  # type: ignore[arg-type]
    sample_range = _SampleRange(begin, until, rule.free_mib, query.thresholds.floors_pct)
    figures = read_by_groups(
        _figures_since_free, history, free, sample_range, days=gpus.days, until=until, spread=spread
    )
    figures = free.join(figures, on="device").with_columns(
        pl.coalesce(pl.col("index").cast(pl.String), "pci", "uuid").alias("gpu")
    )
    gap_ms = pl.max_horizontal(pl.col("step_ms") * query.thresholds.max_gap_steps, pl.lit(1000.0))
    lasting = figures.with_columns(
        pl.max_horizontal(pl.col("first_ms"), pl.col("low_ms").fill_null(0) + pl.col("step_ms")).alias("since_ms"),
        pl.min_horizontal(pl.col("last_ms") + pl.col("step_ms"), "until_ms").alias("to_ms"),
    ).filter(
        (pl.col("job").is_null())
        & (pl.col("last_fb") > rule.free_mib)
        & (pl.col("until_ms") - pl.col("last_ms") <= gap_ms + pl.col("step_ms"))
        & (pl.col("widest_ms") <= gap_ms)
        & (pl.col("to_ms") - pl.col("since_ms") >= rule.window_s * 1000)
    )
    return [_finding(row, rule) for row in lasting.sort("node", "gpu").iter_rows(named=True)]


def _free(gpus: HeldGpus, rule: LeftoverSearch) -> pl.DataFrame:
    """Return the whole GPUs of known nodes, with ``at``, ``device``, ``free_ms`` (no run has had it since then) and
    ``until_ms`` (end of the interval, or of known accounting)."""
    ends = {name: epoch_ms(min(gpus.query.until, known_end)) for name, known_end in rule.known_until.items()}
    until = pl.col("cluster").replace_strict(list(ends), list(ends.values()), default=min(ends.values()),
                                             return_dtype=pl.Int64).alias("until_ms")  # fmt: skip
    table = gpus.devices.with_row_index("at").with_columns(pl.col("at").cast(pl.Int64), until)
    runs = gpus.runs.filter(pl.col("start_ms") < until)
    over = pl.min_horizontal("finish_ms", "end_ms").alias("over_ms")
    mapped = gpus.all_pairs.join(runs.select("run", over), on="run")
    had = mapped.group_by("at").agg(pl.col("over_ms").max().alias("own_ms"))
    count = gpus.all_pairs.group_by("run").len("known")
    unclear = runs.join(count, on="run", how="left").filter(
        pl.col("gpus").is_null()
        | (pl.col("gpus") > pl.col("known").fill_null(0))
        | pl.col("alloc_tres").fill_null("").str.contains(PARTS)
    )
    places = gpus.nodes.join(runs.select("run", "cluster", over), on="run")
    blind = places.join(unclear.select("run"), on="run", how="semi")
    known_nodes = places.select("cluster", "node", pl.lit(value=True).alias("known")).unique()
    per_node = blind.group_by("cluster", "node").agg(pl.col("over_ms").max().alias("node_ms"))
    return (
        table.filter(pl.col("mig").is_null() & ~pl.col("at").is_in(gpus.divided.implode()))
        .join(known_nodes, on=["cluster", "node"], how="left")
        .filter(pl.col("known") | pl.col("node").is_in(list(rule.nodes)))
        .join(had, on="at", how="left")
        .join(per_node, on=["cluster", "node"], how="left")
        .with_columns(
            pl.max_horizontal("own_ms", "node_ms").add(SETTLE_MS).fill_null(epoch_ms(gpus.query.since)).alias("free_ms")
        )
        .sort("device")
    )


@dataclass(frozen=True, slots=True)
class _SampleRange:
    """Samples that are read, and thresholds."""

    since: datetime
    until: datetime
    free_mib: float
    floors_pct: Mapping[str, float]


def _figures_since_free(history: SampleStore, free: pl.DataFrame, sample_range: _SampleRange) -> pl.DataFrame:
    """Return the samples' figures since each GPU of ``free`` became free."""
    ms, fb = pl.col("ms"), pl.col("fb_used_mib")
    rows = (
        history.scan(sample_range.since, sample_range.until)
        .filter(pl.col("device").is_in(free["device"].implode()))
        .select("device", pl.col("time").dt.epoch("ms").alias("ms"), busiest(sample_range.floors_pct).alias("activity"),
                "fb_used_mib", "fb_total_mib", "power_w", "xid", "job")
        .join(free.lazy().select("device", "free_ms", "until_ms"), on="device")
        .filter(ms >= pl.col("free_ms"), ms < pl.col("until_ms"), fb.is_not_null())
        .sort("device", "ms")
        .group_by("device", maintain_order=True)
        .agg(
            ms.first().alias("first_ms"), ms.last().alias("last_ms"), ms.diff().max().fill_null(0).alias("widest_ms"),
            ms.filter(fb <= sample_range.free_mib).last().alias("low_ms"), fb.last().alias("last_fb"),
            pl.col("fb_total_mib").max(), pl.col("activity").mean(), pl.col("activity").max().alias("peak"),
            pl.col("power_w").mean(), pl.col("xid").drop_nulls().last(), pl.col("job").drop_nulls().last(),
        )
    )  # fmt: skip
    with naming_damage(history, sample_range.since, sample_range.until):
        return rows.collect()


def _finding(row: dict[str, Any], rule: LeftoverSearch) -> Finding:
    window_s, gib = (row["to_ms"] - row["since_ms"]) / 1000, row["last_fb"] / MIB_PER_GIB
    proof = (
        evidence("orphan-memory.memory", gib, 0.4, least=rule.free_mib / MIB_PER_GIB),
        evidence("orphan-memory.job", "none", 0.2),
        evidence("orphan-memory.time", window_s, 0.2, least=rule.window_s),
        evidence("orphan-memory.processes", None, 0.2),
        xid(row["xid"]),
    )
    total = None if row["fb_total_mib"] is None else row["fb_total_mib"] / MIB_PER_GIB
    name = squatters.name_of(row)
    gpu = GpuEvidence(row["node"], name, row["uuid"], row["model"], gib, total, row["activity"], row["peak"],
                      row["power_w"], row["xid"], measured=row["activity"] is not None, flagged=True)  # fmt: skip
    since, to = (datetime.fromtimestamp(row[key] / 1000, UTC) for key in ("since_ms", "to_ms"))
    return Finding(
        "orphan-memory", row["cluster"], NodeRef(row["node"], row["uuid"] or name), None, None, None, None,
        (row["node"],), (gpu,), since, window_s, sum(item.points for item in proof), proof, None,
        gib * window_s / 3600, None, "history", to, advice=advice("orphan-memory.advice-history"), allocated_gpus=1,
    )  # fmt: skip
