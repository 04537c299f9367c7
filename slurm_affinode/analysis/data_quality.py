"""Data quality of a report: coverage, the problems found, and how to fix them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import polars as pl

from slurm_affinode.analysis import runs as job_runs
from slurm_affinode.analysis.mapping import Mapped
from slurm_affinode.analysis.measures import MS_PER_HOUR
from slurm_affinode.analysis.prices import PriceTable
from slurm_affinode.analysis.result import MAPPINGS, SUMS, TIME_SUMS, DataQuality, QualityIssue, Totals, WasteQuery
from slurm_affinode.analysis.samples import Index, naming_damage
from slurm_affinode.analysis.segments import Allocations, Cells, Floats
from slurm_affinode.base.text import counted
from slurm_affinode.metrics.parquet.parts import several_names
from slurm_affinode.metrics.schema import ACTIVITY
from slurm_affinode.model.gpu import FIELDS, FREE_MIB

EXAMPLES = 5
SKEW_S = 5.0
"""Labels that begin this long before their run or end this long after it (median) suggest a wrong clock."""
LEAST_PAIRS = 3
UNSEEN_MS = 86_400_000
"""A run without an end may have ended since if its last accounting record is older than this."""


LONG_ROWS = 100
"""Samples of a GPU needed to tell whether a signal ever reads 0."""
FREE_ROWS = 10
"""Number of these samples in which the GPU must hold almost no memory."""


class RejectedRecord(Protocol):
    """A record rejected by ingestion."""

    @property
    def reason(self) -> str:
        """Reason for the rejection."""
        ...

    @property
    def line(self) -> int | None:
        """Line of the input, from 1; ``None`` if the input has no lines."""
        ...


class Ingest(Protocol):
    """An entry of the ingest journal."""

    @property
    def kind(self) -> str:
        """``sacct``, ``gpu``, ``allocations``."""
        ...

    @property
    def source(self) -> str:
        """Path or command."""
        ...

    @property
    def bad(self) -> int:
        """Number of rejected records."""
        ...

    @property
    def problems(self) -> Sequence[RejectedRecord]:
        """The rejected records, or the first of them if there are many."""
        ...


@dataclass(frozen=True, slots=True)
class Coverage:
    """Input of the data-quality checks."""

    runs: pl.DataFrame
    """All runs covered by the report, with and without GPUs."""
    about: pl.DataFrame
    """The runs with GPUs."""
    rows: pl.DataFrame
    """The runs with GPUs and their measures."""
    nodes: pl.DataFrame
    devices: pl.DataFrame
    index: Index
    mapped: Mapped
    allocations: Allocations
    cells: Cells
    totals: Totals
    query: WasteQuery
    shares: pl.DataFrame
    prices: PriceTable
    ingests: tuple[Ingest, ...]


def describe(evidence: Coverage) -> DataQuality:
    """Return the counts and the issues found."""
    parents = evidence.mapped.left_out.to_list()
    devices = evidence.devices.with_row_index("at").filter(~pl.col("at").is_in(parents), _in_clusters(evidence))
    steps = devices.filter(pl.col("step_ms") > 0)["step_ms"].value_counts().sort("step_ms")
    mapped = dict(evidence.about["mapping"].value_counts().iter_rows())
    return DataQuality(
        samples=evidence.totals.samples,
        devices=len(devices),
        nodes=devices.select("cluster", "node").n_unique() if len(devices) else 0,
        job_runs=len(evidence.runs),
        gpu_job_runs=len(evidence.about),
        steps_s={step / 1000: count for step, count in steps.iter_rows()},
        mapped_runs={word: mapped.get(word, 0) for word in MAPPINGS},
        gap_gpu_hours=evidence.totals.gap_ms / MS_PER_HOUR,
        issues=tuple(issue for issue in _issues(evidence) if issue is not None),
    )


def _in_clusters(evidence: Coverage) -> pl.Expr:
    """Return whether a device may belong to the clusters of the report."""
    clusters = evidence.query.clusters
    return pl.col("cluster").is_in(clusters).fill_null(value=True) if clusters else pl.lit(value=True)


def _issues(evidence: Coverage) -> Iterable[QualityIssue | None]:
    yield _no_history(evidence)
    yield _long_unseen(evidence)
    yield _unmapped(evidence)
    yield _partly_mapped(evidence)
    yield _no_samples(evidence)
    yield _gaps(evidence)
    yield _no_activity(evidence)
    yield _never_zero(evidence)
    yield _runaway(evidence)
    yield _suspended(evidence)
    yield _repeated_hour(evidence)
    yield _ambiguous(evidence)
    yield _several_names(evidence)
    yield _undated_records(evidence)
    yield _label_mismatch(evidence)
    yield _clock_skew(evidence)
    yield _counted_twice(evidence)
    yield _idle_devices(evidence)
    yield _no_gpu_tres(evidence)
    yield _bad_records(evidence)
    yield _no_price(evidence)


def _names(runs: pl.DataFrame) -> tuple[str, ...]:
    return tuple(
        f"job {row['job_id']} of {row['user'] or 'unknown'} on {row['node_list'] or 'unknown nodes'}"
        for row in runs.head(EXAMPLES).iter_rows(named=True)
    )


def _allocated_hours(runs: pl.DataFrame) -> float:
    return float(runs["gpu_hours_allocated"].sum())


def _no_history(evidence: Coverage) -> QualityIssue | None:
    if evidence.index.rows or evidence.about.is_empty():
        return None
    return QualityIssue(
        code="no-history",
        title="No GPU metrics in this interval",
        detail="Without samples all allocated time is unknown. Take history in with: slurm-affinode ingest gpu PATH",
        count=len(evidence.about),
        gpu_hours=_allocated_hours(evidence.rows),
    )


def _long_unseen(evidence: Coverage) -> QualityIssue | None:
    """Report stale running jobs: their hours are a guess, and they overlap later runs on the same node."""
    runtime_end = pl.col("begin_ms") + 1000 * (pl.col("elapsed_s") + pl.col("suspended_s").fill_null(0))
    runs = evidence.about.filter(pl.col("end").is_null(), pl.col("end_ms") - runtime_end > UNSEEN_MS).with_columns(
        (pl.col("end_ms") - pl.max_horizontal("start_ms", runtime_end)).alias("unseen_ms")
    )
    if runs.is_empty():
        return None
    detail = (
        "They count as running to the end of the interval, or to now, but the last record of each is older. Take "
        "accounting in again: slurm-affinode ingest sacct. Jobs that Slurm itself has lost: sacctmgr show runawayjobs."
    )
    hours = runs.select(pl.col("unseen_ms") * pl.col("gpus").fill_null(0) / MS_PER_HOUR).sum().item()
    names = _names(runs.sort("unseen_ms", descending=True))
    return QualityIssue("running-unseen", "Runs last seen running long ago", detail, len(runs), hours, names)


def _unmapped(evidence: Coverage) -> QualityIssue | None:
    runs = evidence.rows.filter(pl.col("mapping") == "unknown")
    if runs.is_empty() or not evidence.index.rows:
        return None
    known_nodes = evidence.devices["node"].drop_nulls().unique()
    watched = evidence.nodes.filter(pl.col("node").is_in(known_nodes.implode()))["run"].unique()
    blind = runs.filter(~pl.col("run").is_in(watched.implode()))
    detail = (
        "Which GPUs these runs had is not known: the history has no job labels for them, no GPU ids were recorded and "
        "no node was theirs alone. Turn on dcgm-exporter's job mapping, or record GPU ids in a prolog and take them in "
        "with: slurm-affinode ingest allocations FILE."
    )
    if len(blind):
        detail += f" {len(blind):,} of them ran on nodes without any GPU metrics."
    detail += _other_names(evidence)
    hours = _allocated_hours(runs)
    return QualityIssue("unmapped-gpus", "Runs whose GPUs are not known", detail, len(runs), hours, _names(runs))


def _other_names(evidence: Coverage) -> str:
    """Return a note if GPU metrics and accounting have no cluster name in common, so that nothing can match."""
    history = sorted(evidence.devices["cluster"].drop_nulls().unique())
    accounting = sorted(evidence.runs["cluster"].drop_nulls().unique())
    if not history or not accounting or set(history) & set(accounting):
        return ""
    return (
        f" The GPU metrics name the cluster {', '.join(history)}, accounting {', '.join(accounting)}: ingest the "
        "metrics with --cluster NAME."
    )


def _partly_mapped(evidence: Coverage) -> QualityIssue | None:
    runs = evidence.rows.filter((pl.col("devices") > 0) & (pl.col("devices") < pl.col("gpus")))
    if runs.is_empty():
        return None
    span_h = (pl.col("end_ms") - pl.col("start_ms")) / MS_PER_HOUR
    hours = runs.select(((pl.col("gpus") - pl.col("devices")) * span_h).sum()).item()
    return QualityIssue(
        code="partly-mapped",
        title="Runs of which only some GPUs are known",
        detail="The history names fewer GPUs for these runs than accounting gave them; the rest of their time is "
        "unknown. Often an exporter is missing on one of several nodes.",
        count=len(runs),
        gpu_hours=float(hours),
        examples=_names(runs),
    )


def _no_samples(evidence: Coverage) -> QualityIssue | None:
    runs = evidence.rows.filter((pl.col("devices") > 0) & (pl.col("gpu_hours_measured") == 0))
    if runs.is_empty():
        return None
    return QualityIssue(
        code="no-samples",
        title="Runs on known GPUs without a sample",
        detail="Runs shorter than the sampling interval are common here; longer ones fell into a gap of the history.",
        count=len(runs),
        gpu_hours=_allocated_hours(runs),
        examples=_names(runs),
    )


def _gaps(evidence: Coverage) -> QualityIssue | None:
    if not evidence.totals.gaps:
        return None
    return QualityIssue(
        code="gaps",
        title="Gaps in the history",
        detail="Samples of a GPU were more than the allowed number of steps apart while a job held it. The time "
        "between is unknown, not idle. Check for an exporter or a scrape that stopped.",
        count=evidence.totals.gaps,
        gpu_hours=evidence.totals.gap_ms / MS_PER_HOUR,
    )


def _no_activity(evidence: Coverage) -> QualityIssue | None:
    held_column = evidence.cells.is_held
    ms = float(evidence.totals.sums[held_column, SUMS.index("unknown")].sum())
    if ms <= 0:
        return None
    devices = np.unique(evidence.cells.device[held_column & (evidence.totals.sums[:, SUMS.index("unknown")] > 0)])
    names = evidence.devices[devices[:EXAMPLES].tolist()]
    return QualityIssue(
        code="no-activity-signal",
        title="Samples without any activity signal",
        detail="These samples have neither utilization nor a profiling field, so its activity is unknown. MIG "
        "instances have no utilization: enable DCGM_FI_PROF_GR_ENGINE_ACTIVE.",
        count=len(devices),
        gpu_hours=ms / MS_PER_HOUR,
        examples=_device_names(names),
    )


def _never_zero(evidence: Coverage) -> QualityIssue | None:
    """Report GPUs that never count as idle, even when unused, because a signal never reads 0.

    Only samples of GPUs without any idle time are read again.
    """
    cells, devices, query = evidence.cells, evidence.devices, evidence.query
    idle = np.bincount(cells.device, weights=evidence.totals.sums[:, SUMS.index("idle")], minlength=len(devices))
    never = devices.filter(pl.Series(idle == 0), pl.col("rows") >= LONG_ROWS, _in_clusters(evidence))
    if never.is_empty():
        return None
    free = pl.col("fb_used_mib") <= FREE_MIB
    store = evidence.index.store
    rows = (
        store.scan(query.since, query.until)
        .filter(pl.col("device").is_in(never["device"].implode()))
        .group_by("device")
        .agg(
            pl.len().alias("rows"),
            free.sum().alias("free"),
            pl.col(ACTIVITY).min(),
            pl.col(ACTIVITY).filter(free).max().name.suffix("_free"),
        )
        .filter(pl.col("rows") >= LONG_ROWS, pl.col("free") >= FREE_ROWS)
    )
    with naming_damage(store, query.since, query.until):
        models = rows.collect().join(never.select("device", "model"), on="device")
    suspicious: list[tuple[int, str]] = []
    for name in ACTIVITY:
        scale, floor = FIELDS[name][1], query.thresholds.floor(name)
        # Higher values are not noise but computation that needs little memory.
        noisy = models.filter(
            pl.col(name) > max(floor, query.thresholds.idle_pct / scale),
            pl.col(f"{name}_free") * scale <= query.thresholds.low_pct,
        )
        least = noisy.group_by("model", maintain_order=True).agg(
            pl.len().alias("gpus"), pl.col(name).min() * scale, pl.col(f"{name}_free").max() * scale
        )
        suspicious += [
            (gpus, f"{model or 'unknown model'} ({counted(gpus, 'GPU')}): {FIELDS[name][0]} reads at least {low:.3g} "
                   f"%, and up to {high:.3g} % while no memory is held")
            for model, gpus, low, high in least.sort("gpus", "model", descending=[True, False]).iter_rows()
        ]  # fmt: skip
    if not suspicious:
        return None
    return QualityIssue(
        code="never-zero",
        title="GPU models of which a signal never reads 0",
        detail="These GPUs hold next to no memory at times, and never count as idle. If this is noise of the "
        "counter, set its floor in the configuration, for example [agent] floors_pct = {dram = 0.05}: values up to "
        "the floor count as 0.",
        count=len(suspicious),
        examples=tuple(text for _, text in suspicious[:EXAMPLES]),
    )


def _runaway(evidence: Coverage) -> QualityIssue | None:
    runs = job_runs.lost_time(evidence.about)
    if runs.is_empty():
        return None
    lost_ms = pl.col("end_ms") - pl.col("lost_ms")
    return QualityIssue(
        code="runaway-jobs",
        title="Jobs that accounting shows as running long after their time limit",
        detail="Slurm would have ended them: it has probably lost them, and others have their GPUs. What they held "
        "after the limit is unknown. List and correct them with: sacctmgr show runawayjobs.",
        count=len(runs),
        gpu_hours=float(runs.select((lost_ms * pl.col("gpus").fill_null(0) / MS_PER_HOUR).sum()).item()),
        examples=_names(runs.sort(lost_ms, descending=True)),
    )


def _suspended(evidence: Coverage) -> QualityIssue | None:
    """Report idle time in which Slurm may have suspended the job."""
    moved = evidence.shares.filter(pl.col("suspended") > 0).group_by("run").agg(pl.col("suspended").sum())
    runs = evidence.about.join(moved, on="run", how="inner", maintain_order="left").sort("suspended", descending=True)
    if runs.is_empty():
        return None
    return QualityIssue(
        code="suspended-by-slurm",
        title="Jobs that Slurm had suspended",
        detail="A suspended job keeps its GPUs and cannot use them. Accounting has for how long a job was suspended, "
        "not when: that much of the idle time of each of its GPUs counts as unknown.",
        count=len(runs),
        gpu_hours=float(runs["suspended"].sum()) / MS_PER_HOUR,
        examples=_names(runs),
    )


def _repeated_hour(evidence: Coverage) -> QualityIssue | None:
    """Report runs whose local times may mean two times."""
    runs = evidence.about.filter(pl.col("time_doubt_s") > 0)
    if runs.is_empty():
        return None
    open_ms = pl.min_horizontal(pl.col("time_doubt_s") * 1000, pl.col("end_ms") - pl.col("start_ms"))
    return QualityIssue(
        code="repeated-hour",
        title="Runs at local times that exist twice",
        detail="Clocks were set back, and neither the order of their times nor the elapsed time tells which of the two "
        "hours is meant. They count as in the first one; what they held in doubtful time is unknown. Without a file, "
        "slurm-affinode ingest sacct asks Slurm for times in UTC.",
        count=len(runs),
        gpu_hours=float(runs.select(open_ms * pl.col("gpus").fill_null(0)).sum().item()) / MS_PER_HOUR,
        examples=_names(runs),
    )


_DOUBTS = {
    "labels": "labels name more GPUs than it had, or GPUs that other labels claim at the same time",
    "records": "recorded IDs name more GPUs than it had, or one by a name of several GPUs",
    "contradiction": "labels and recorded IDs name different GPUs",
}


def _ambiguous(evidence: Coverage) -> QualityIssue | None:
    runs = evidence.rows.join(evidence.mapped.doubtful, on="run", how="inner", maintain_order="left")
    if runs.is_empty():
        return None
    return QualityIssue(
        code="ambiguous-gpus",
        title="Runs whose labels or records leave their GPUs open",
        detail="Only GPUs on which the evidence agrees are assigned; the rest of their time is unknown. Common causes "
        "are MIG, where dcgm-exporter labels each instance with all jobs of its GPU, mapping files that an aborted job "
        "has left behind, and labels with the ID of an array instead of the task. GPU IDs recorded with the start of "
        "the run decide these cases: slurm-affinode ingest allocations FILE.",
        count=len(runs),
        gpu_hours=float(runs["gpu_hours_unmapped"].sum()),
        examples=tuple(
            f"{name}: {_DOUBTS[why]}" for name, why in zip(_names(runs), runs["why"].head(EXAMPLES), strict=True)
        ),
    )


_WORDS = {"pci": "PCI address", "index": "index", "mig_profile": "MIG profile", "model": "model"}


def _several_names(evidence: Coverage) -> QualityIssue | None:
    """Report GPUs whose index, PCI address or model is not known, because the metrics have several."""
    devices = evidence.devices.filter(_in_clusters(evidence))
    several = (
        several_names(evidence.index.names)
        .join(devices, on="device", how="semi")
        .group_by("device", "column")
        .agg(pl.col("value").unique().sort())
        .sort("device", "column")
    )
    if several.is_empty():
        return None
    matches = devices.join(several, on="device", how="inner", maintain_order="left")
    examples = matches.head(EXAMPLES)
    return QualityIssue(
        code="several-names",
        title="GPUs that the metrics name differently in the interval",
        detail="Which name applied when is not known. A recorded PCI address or index assigns a GPU only if one GPU "
        "had it during the run; the model, and with it the price, is unknown if there are several. Common causes are a "
        "node that started without one of its GPUs, and exporters that number GPUs differently. UUIDs in records are "
        "not affected: slurm-affinode ingest allocations FILE.",
        count=several["device"].n_unique(),
        examples=tuple(
            f"{name}: {_WORDS[column]} {', '.join(values)}"
            for name, column, values in zip(
                _device_names(examples), examples["column"], examples["value"].to_list(), strict=True
            )
        ),
    )


def _undated_records(evidence: Coverage) -> QualityIssue | None:
    undated = evidence.mapped.undated
    jobs = undated["job_id"].unique(maintain_order=True)
    runs = evidence.rows.filter(pl.col("job_id").is_in(jobs.implode()))
    if runs.is_empty():
        return None
    return QualityIssue(
        code="undated-records",
        title="Recorded GPU IDs of jobs with several runs, without a start time",
        detail="The job was requeued, or Slurm has used its ID again. Which of its runs had these GPUs is not known, "
        "so the records are not used. Record the start of the run as well: column start.",
        count=len(jobs),
        gpu_hours=float(runs["gpu_hours_unmapped"].sum()),
        examples=_names(runs),
    )


def _label_mismatch(evidence: Coverage) -> QualityIssue | None:
    wrong = evidence.mapped.mismatches
    if wrong.is_empty():
        return None
    grouped = (
        wrong.group_by("job", "node")
        .agg(pl.col("rows").sum())
        .sort("rows", "job", "node", descending=[True, False, False])
    )
    return QualityIssue(
        code="label-mismatch",
        title="Job labels that accounting contradicts",
        detail="The GPU metrics label samples with jobs that accounting does not know, that were not on that node at "
        "that time, or that had fewer GPUs. Such labels are not used. Accounting of that time may not have been "
        "ingested, or a prolog has left an old mapping file behind.",
        count=len(grouped),
        examples=tuple(
            f"job {job} on {node or 'an unknown node'}: {rows:,} samples"
            for job, node, rows in grouped.head(EXAMPLES).iter_rows()
        ),
    )  # fmt: skip


def _clock_skew(evidence: Coverage) -> QualityIssue | None:
    spans = evidence.mapped.spans.join(
        evidence.runs.select("run", "begin_ms", "finish_ms", "start_ms", "end_ms"), on="run"
    ).join(evidence.devices.with_row_index("at").select(pl.col("at").cast(pl.Int64), "node", "step_ms"), on="at")
    # If the interval cuts a run, its start or end cannot be compared with the labels.
    begun = spans.filter(pl.col("begin_ms") == pl.col("start_ms"))
    ended = spans.filter(pl.col("finish_ms") == pl.col("end_ms"))
    early = (begun["begin_ms"] - begun["first_ms"]).median()
    late = (ended["last_ms"] - ended["finish_ms"]).median()
    shifts: list[str] = []
    if isinstance(early, float) and len(begun) >= LEAST_PAIRS and early > SKEW_S * 1000:
        shifts.append(f"labels begin {early / 1000:.0f} s before their runs start, in the median")
    if isinstance(late, float) and len(ended) >= LEAST_PAIRS and late > SKEW_S * 1000:
        shifts.append(f"labels end {late / 1000:.0f} s after their runs end, in the median")
    if not shifts:
        return None
    return QualityIssue(
        code="clock-skew",
        title="Clocks of history and accounting seem to differ",
        detail="; ".join(shifts) + ". Check the time synchronization of nodes and controller, and the time zone that "
        "accounting was ingested with.",
        count=len(spans),
    )


def _counted_twice(evidence: Coverage) -> QualityIssue | None:
    cells = evidence.cells
    shared = cells.is_held & (cells.sharers > 1)
    if not shared.any():
        return None
    ms = ((cells.sharers - 1) * (cells.end - cells.start))[shared].sum()
    owners = cells.owners[np.repeat(shared, cells.sharers)]
    runs = evidence.about.filter(pl.col("run").is_in(np.unique(evidence.allocations.run[owners]).tolist()))
    whole = int((runs["gpus"].fill_null(0) > 0).sum())
    if whole < 2:
        return None
    return QualityIssue(
        code="shared-gpus",
        title="GPUs that several runs held at the same time",
        detail="What such a GPU did is divided equally among its runs. Accounting counts its time once for each of "
        "them; what exceeds the GPU's own time is part of the unknown hours.",
        count=len(runs),
        gpu_hours=float(ms) / MS_PER_HOUR,
        examples=_names(runs),
    )


def _idle_devices(evidence: Coverage) -> QualityIssue | None:
    cells = evidence.cells
    inside = np.bincount(cells.device, weights=cells.inside, minlength=len(evidence.devices)) > 0
    allocated = np.bincount(cells.device, weights=cells.sharers, minlength=len(evidence.devices)) > 0
    never = np.flatnonzero(inside & ~allocated)
    if not len(never):
        return None
    sums: Floats = evidence.totals.sums[np.isin(cells.device, never), :TIME_SUMS]
    return QualityIssue(
        code="devices-without-runs",
        title="GPUs that no run is known to have held",
        detail="Either they were free, or the runs that held them could not be mapped to them.",
        count=len(never),
        gpu_hours=float(sums.sum()) / MS_PER_HOUR,
        examples=_device_names(evidence.devices[never[:EXAMPLES].tolist()]),
    )


def _device_names(devices: pl.DataFrame) -> tuple[str, ...]:
    return tuple(
        f"{row['node'] or 'unknown node'} {row['uuid'] or row['pci'] or row['index']}"
        + (f" MIG {row['mig']}" if row["mig"] else "")
        for row in devices.iter_rows(named=True)
    )


def _no_gpu_tres(evidence: Coverage) -> QualityIssue | None:
    untracked = evidence.runs.filter(pl.col("gpus").is_null())
    if untracked.is_empty():
        return None
    return QualityIssue(
        code="no-gpu-tres",
        title="Runs whose accounting does not track GPUs",
        detail="Set AccountingStorageTRES=gres/gpu in slurm.conf. Until then a run counts only if labels or records "
        "place it on a GPU, with its share of that GPU's time.",
        count=len(untracked),
        examples=_names(untracked),
    )


def _bad_records(evidence: Coverage) -> QualityIssue | None:
    bad = [ingest for ingest in evidence.ingests if ingest.bad]
    if not bad:
        return None
    examples = [
        f"{ingest.source}{f', record {problem.line}' if problem.line is not None else ''}: {problem.reason}"
        for ingest in bad
        for problem in ingest.problems
    ]
    return QualityIssue(
        code="bad-records",
        title="Records that could not be used",
        detail="They were reported and skipped when they were ingested. Their data is missing here.",
        count=sum(ingest.bad for ingest in bad),
        examples=tuple(examples[:EXAMPLES]),
    )


def _no_price(evidence: Coverage) -> QualityIssue | None:
    if not evidence.prices.prices and evidence.prices.default is None:
        return None
    runs = evidence.rows.filter(pl.col("cost").is_null() & (pl.col("gpu_hours_allocated") > 0))
    if runs.is_empty():
        return None
    models = runs["gpu_model"].fill_null("unknown model").unique().sort().to_list()
    return QualityIssue(
        code="no-price",
        title="GPU models without a price",
        detail="The price table has no row for them, so amounts leave them out.",
        count=len(models),
        gpu_hours=_allocated_hours(runs),
        examples=tuple(models[:EXAMPLES]),
    )
