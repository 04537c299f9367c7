"""Jobs that hold idle GPUs, from stored samples and accounting in one pass.

A GPU that matches no signature, or that was not measured, never causes a finding. The kind of finding depends on all
GPUs of the job:

- ``squatter``: a GPU matches a squatter signature, and no GPU of the job computes;
- ``idle-allocation``, ``partly-used``: some GPUs are idle while others compute;
- ``idle-allocation``, ``never-used``, ``used-once`` or ``idle``: every measured GPU is idle.

Earlier use of a GPU is checked over the whole run, including the part before the interval; if its samples have a gap
there, earlier use is unknown. Jobs suspended by Slurm cannot compute and are skipped; later, as much of their idle
time does not count.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import polars as pl

from slurm_affinode.analysis import idle_windows, mapping, samples
from slurm_affinode.analysis import runs as job_runs
from slurm_affinode.analysis.idle_windows import NEVER, UNSEEN, USED, FollowInput, Pairs, SampledDays, Trailing
from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.analysis.samples import StoredSamples
from slurm_affinode.base.spread import Spread, in_turn
from slurm_affinode.core.finding_texts import advice, evidence
from slurm_affinode.core.signatures import GpuFacts, RunFacts, Signature, SignatureVerdict, judge
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import ACTIVITY
from slurm_affinode.model.finding import MAPPINGS, Evidence, Finding, GpuEvidence, JobAttempt, Source
from slurm_affinode.slurm.accounting.schema import JOB_KEY

MIB_PER_GIB = 1024.0


@dataclass(frozen=True, slots=True)
class HeldGpus:
    """Runs of the interval and their GPUs, with the trailing activity of each GPU."""

    query: WasteQuery
    runs: pl.DataFrame
    """From ``runs.prepare``; the row number is ``run``."""
    nodes: pl.DataFrame
    """``run``, ``node``."""
    devices: pl.DataFrame
    """``DEVICES``."""
    pairs: pl.DataFrame
    """``run``, ``at``, ``mapping`` and the run's ``start_ms``, ``end_ms``; sorted by run."""
    followed: dict[float, Trailing]
    """Limit in percent -> activity of each pair."""
    steps_ms: np.ndarray[Any, np.dtype[np.int64]]
    """Sampling interval of each pair's device."""
    used: dict[float, np.ndarray[Any, np.dtype[np.int64]]]
    """Limit in percent -> result of ``idle_windows.used_before`` for each pair."""
    shared: np.ndarray[Any, np.dtype[np.bool_]]
    """True for runs without a whole GPU (gres/shard, gres/mps) on a GPU that other runs had at the same time."""
    suspended_ms: np.ndarray[Any, np.dtype[np.int64]]
    """Time for which Slurm had suspended the run of each pair; when it was is not known."""
    all_pairs: pl.DataFrame
    """``run``, ``at``, including runs excluded by the filters."""
    divided: pl.Series
    """Rows of ``devices`` that are parents of MIG instances."""
    days: int
    """Days with samples."""

    @property
    def any(self) -> Trailing:
        """Activity for an arbitrary limit, for figures that do not depend on it."""
        return next(iter(self.followed.values()))


def hold(  # noqa: PLR0917 - what goes in, in the order of the rules
    query: WasteQuery,
    jobs: pl.DataFrame,
    allocation_gpus: pl.DataFrame,
    history: SampleStore,
    limits_pct: Sequence[float],
    now: datetime,
    only: pl.DataFrame | None = None,
    spread: Spread | None = None,
) -> HeldGpus:
    """Join accounting with GPU samples. ``jobs``: every run of the interval, including those excluded by filters.

    ``only`` (``JOB_KEY``): the runs to follow among those that pass the filters; ``None``: all of them. ``spread``: to
    other machines, which read the samples.
    """
    index = samples.read_index(history, query.since, query.until, max_gap_steps=query.thresholds.max_gap_steps)
    runs = job_runs.prepare(jobs, query, now)
    if only is not None:
        chosen = runs.join(only.select(JOB_KEY), on=JOB_KEY, how="semi")["run"]
        runs = runs.with_columns(pl.col("selected") & pl.col("run").is_in(chosen.implode()))
    runs = runs.join(job_runs.lost_time(runs), on="run", how="anti", maintain_order="left")
    open_, runs = job_runs.uncertain(runs), job_runs.certain(runs)
    nodes = job_runs.nodes_of(pl.concat([runs, open_.join(runs, on="run", how="anti")]))
    devices, mapped = mapping.of_index(index, runs, nodes, allocation_gpus, open_)
    pairs = (
        _newest(mapped.pairs, devices)
        .join(runs.filter(pl.col("selected")).select("run", "start_ms", "end_ms"), on="run", maintain_order="left")
        .sort("run", "at")
    )
    about = devices[pairs["at"].to_list()] if pairs.height else devices.head(0)
    steps = about["step_ms"].to_numpy().astype(np.int64)
    keys = Pairs(
        about["device"].to_numpy(), pairs["start_ms"].to_numpy(), pairs["end_ms"].to_numpy(), steps,
    )  # fmt: skip
    whole = pairs.select("run").join(
        runs.select("run", "begin_ms", pl.col("suspended_s").fill_null(0).clip(0)), on="run", maintain_order="left"
    )
    begins, suspended_ms = whole["begin_ms"].to_numpy(), whole["suspended_s"].to_numpy() * 1000
    sampled = SampledDays.of(index)
    follow_input = FollowInput(
        StoredSamples.of(history, None, query.until), query.since, query.until,
        tuple(sorted(set(limits_pct)) or [5.0]), query.thresholds, sampled,
    )  # fmt: skip
    groups = [] if spread is None else samples.device_groups(about, len(sampled.days))
    followed, used = idle_windows.follow_all(history, keys, begins, follow_input, groups, spread or in_turn)
    shared, everything = _shared(pairs, mapped.pairs, runs), mapped.pairs.select("run", "at")
    return HeldGpus(
        query, runs, nodes, devices, pairs, followed, steps, used, shared, suspended_ms, everything, mapped.left_out,
        len(sampled.days),
    )  # fmt: skip


def _newest(pairs: pl.DataFrame, devices: pl.DataFrame) -> pl.DataFrame:
    """Return one of the ``pairs`` per run and GPU slot: the device sampled last."""
    last = pl.Series("last", devices["last"][pairs["at"].to_list()], devices["last"].dtype)
    newest = pairs.with_columns(last).sort("run", "slot", "last", "at", descending=[False, False, True, False])
    return newest.unique(["run", "slot"], keep="first", maintain_order=True).drop("last")


def _shared(pairs: pl.DataFrame, all_pairs: pl.DataFrame, runs: pl.DataFrame) -> np.ndarray[Any, np.dtype[np.bool_]]:
    without = runs.filter(pl.col("gpus").fill_null(0) == 0)["run"]
    shared_pairs = pairs.with_row_index("pair").filter(pl.col("run").is_in(without.implode()))
    other_runs = all_pairs.select("run", "at").join(runs.select("run", "start_ms", "end_ms"), on="run")
    overlapping = shared_pairs.join(other_runs, on="at", suffix="_other").filter(
        (pl.col("run") != pl.col("run_other"))
        & (pl.col("start_ms") < pl.col("end_ms_other"))
        & (pl.col("start_ms_other") < pl.col("end_ms"))
    )
    shared = np.zeros(pairs.height, np.bool_)
    shared[overlapping["pair"].to_numpy()] = True
    return shared


def of_part(facts: GpuFacts) -> GpuFacts:
    """Reduce the facts of a shared GPU to those that hold for each of its jobs.

    If the GPU is idle, every job on it is. Memory, power and earlier activity cannot be attributed to one job.
    """
    before = None if facts.used_before else facts.used_before
    peaks = facts.peaks_pct if facts.idle_s else {}
    return replace(facts, memory_gib=None, power_w=None, used_before=before, peaks_pct=peaks)


def find(gpus: HeldGpus, signatures: Sequence[Signature], *, source: Source = "history") -> list[Finding]:
    """Return the findings, without their queue impact."""
    if gpus.pairs.is_empty() or not signatures:
        return []
    chosen = np.zeros(gpus.pairs.height, np.bool_)
    for signature in signatures:
        chosen |= _may_fit(gpus, signature)
    run_of = gpus.pairs["run"].to_numpy()
    selected = np.unique(run_of[chosen])
    if not len(selected):
        return []
    rows = gpus.runs.filter(pl.col("run").is_in(selected)).rows(named=True)
    low, high = np.searchsorted(run_of, selected), np.searchsorted(run_of, selected, side="right")
    device_rows = gpus.pairs["at"].to_numpy()
    places = np.unique(device_rows[np.isin(run_of, selected)])
    devices = dict(zip(places.tolist(), gpus.devices[places.tolist()].rows(named=True), strict=True))
    nodes = dict(gpus.nodes.filter(pl.col("run").is_in(selected)).group_by("run").agg("node").iter_rows())
    squatters: list[Finding] = []
    for row, first, last in zip(rows, low, high, strict=True):
        if row["state"] == "SUSPENDED" and run_facts(row, gpus.query.end_of(row["cluster"])).running:
            continue
        observed_gpus = [_see(gpus, devices[device_rows[i]], i, signatures, row) for i in range(first, last)]
        new_finding = finding(
            run_ref(row, gpus.query.end_of(row["cluster"])),
            row,
            tuple(nodes.get(row["run"], ())),
            observed_gpus,
            source,
        )
        if new_finding is not None:
            squatters.append(new_finding)
    return squatters


def _may_fit(gpus: HeldGpus, signature: Signature) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return the pairs that have been idle long enough for the signature."""
    followed = gpus.followed[signature.compute.at_most_pct]
    fits: np.ndarray[Any, np.dtype[np.bool_]] = followed.since != NEVER
    fits &= followed.until - followed.since - gpus.suspended_ms >= signature.time.longer_than_s * 1000
    return fits


@dataclass(frozen=True, slots=True)
class ObservedGpu:
    """Observed activity of one GPU of a job, and the verdict of the signatures."""

    gpu: GpuEvidence
    verdict: SignatureVerdict | None
    """Verdict of the signature that matches; ``None`` if none does."""
    computes: bool
    """True if the GPU was measured and is above the limit."""
    since: datetime | None
    window_s: float
    last: datetime | None = None
    held_gib_s: float | None = None
    """Memory x time in the window, over the samples with a memory value."""
    measured_s: float | None = None
    """Measured part of ``whole_s``; ``None`` if not based on samples over time."""
    whole_s: float | None = None
    """Time of the run within the interval; ``None`` if not based on samples over time."""


def _see(
    gpus: HeldGpus, device: dict[str, Any], i: int, signatures: Sequence[Signature], row: dict[str, Any]
) -> ObservedGpu:
    run = run_facts(row, gpus.query.end_of(row["cluster"]))
    best: ObservedGpu | None = None
    for signature in signatures:
        limit_pct = signature.compute.at_most_pct
        facts, since = facts_of(gpus, limit_pct, i)
        verdict = judge(signature, facts, run)
        observed_gpu = _observed_gpu(gpus, limit_pct, i, device, facts, since)
        if verdict.fits:
            return replace(observed_gpu, verdict=verdict, gpu=replace(observed_gpu.gpu, flagged=True))
        best = best or observed_gpu
    assert best is not None  # noqa: S101 - there is a signature
    return best


def facts_of(gpus: HeldGpus, limit_pct: float, i: int) -> tuple[GpuFacts, int]:
    """Return the facts about pair ``i``, and the start of its trailing idle window (``NEVER`` if it is not idle).

    The GPU is unknown if its samples end long before the run (or the interval), or if the last one has no activity
    signal.
    """
    trailing, end_ms, step_ms = gpus.followed[limit_pct], int(gpus.pairs["end_ms"][i]), int(gpus.steps_ms[i])
    limit = max(step_ms * gpus.query.thresholds.max_gap_steps, 1000)
    stale = (
        trailing.last[i] == NEVER
        or trailing.last[i] != trailing.newest[i]
        or end_ms - int(trailing.last[i]) > limit + step_ms
    )
    total = None if np.isnan(trailing.fb_total[i]) else float(trailing.fb_total[i]) / MIB_PER_GIB
    fb = float(trailing.fb_ms[i] / trailing.fb_known_ms[i]) / MIB_PER_GIB if trailing.fb_known_ms[i] else None
    power = float(trailing.power_ms[i] / trailing.power_known_ms[i]) if trailing.power_known_ms[i] else None
    peak = None if np.isnan(trailing.fb_peak[i]) else float(trailing.fb_peak[i]) / MIB_PER_GIB
    if stale:
        # Memory of a GPU without activity signals is shown, but never sufficient for a finding.
        return GpuFacts(memory_total_gib=total, memory_gib=peak if trailing.last[i] == NEVER else None), NEVER
    since = int(trailing.since[i])
    if since != NEVER and gpus.suspended_ms[i]:
        # The program may have been suspended for that part of the window.
        since = min(since + int(gpus.suspended_ms[i]), int(trailing.until[i]))
    if since == NEVER:
        peaks: dict[str, float | None] = {"busiest signal": float(trailing.peak_all[i])}
        facts = GpuFacts(peaks, 0.0, peak, total, power, used_before=True)
    else:
        peaks_pct = {
            name: float(trailing.peaks[i, k]) for k, name in enumerate(ACTIVITY) if not np.isnan(trailing.peaks[i, k])
        }
        used = int(gpus.used[limit_pct][i])
        before = None if used == UNSEEN else used == USED
        facts = GpuFacts(peaks_pct, (int(trailing.until[i]) - since) / 1000, fb, total, power, before)
    return (of_part(facts) if gpus.shared[i] else facts), since


def _observed_gpu(  # noqa: PLR0917
    gpus: HeldGpus, limit_pct: float, i: int, device: dict[str, Any], facts: GpuFacts, since: int
) -> ObservedGpu:
    followed, shared = gpus.followed[limit_pct], bool(gpus.shared[i])
    gib_s = float(followed.fb_ms[i]) / MIB_PER_GIB / 1000 if followed.fb_known_ms[i] and not shared else None
    return ObservedGpu(
        replace(gpu_evidence(followed, i, device, facts), mapping=gpus.pairs["mapping"][i], shared=shared),
        None,
        facts.peak_pct is not None and since == NEVER,
        idle_windows.moment(since),
        facts.idle_s or 0.0,
        idle_windows.moment(int(followed.last[i])),
        gib_s,
        int(followed.measured_ms[i]) / 1000,
        (gpus.pairs["end_ms"][i] - gpus.pairs["start_ms"][i]) / 1000,
    )


def gpu_evidence(
    followed: Trailing,
    i: int,
    device: dict[str, Any],
    facts: GpuFacts,
    flagged: Collection[tuple[str | None, str]] = (),
) -> GpuEvidence:
    """Return the evidence for the GPU of pair ``i``. ``flagged``: node and name of the GPUs that count as idle."""
    measured_ms = int(followed.measured_ms[i])
    xid = int(followed.xid[i])
    return GpuEvidence(
        node=device["node"],
        gpu=name_of(device),
        uuid=device["uuid"],
        model=device["model"],
        held_gib=facts.memory_gib,
        total_gib=facts.memory_total_gib,
        activity_pct=float(followed.activity_ms[i]) / measured_ms if measured_ms else None,
        peak_pct=facts.peak_pct,
        power_w=facts.power_w,
        xid=None if xid == NEVER else xid,
        idle_s=facts.idle_s,
        last_active=idle_windows.moment(int(followed.last_active[i])),
        measured=facts.peak_pct is not None,
        flagged=(device["node"], name_of(device)) in flagged,
    )


def name_of(device: dict[str, Any]) -> str:
    """Return the index on the node, else the PCI address or the UUID."""
    if device["index"] is not None:
        return str(device["index"]) + ("" if device["mig"] is None else f".{device['mig']}")
    return str(device["pci"] or device["uuid"] or "?")


def run_facts(row: dict[str, Any], until: datetime) -> RunFacts:
    """Return state, elapsed time and time limit of a run as of ``until``."""
    running = row["end"] is None or row["end"] > until
    elapsed = ((until if running else row["end"]) - row["start"]).total_seconds()
    state = "RUNNING" if running and row["state"] not in ("SUSPENDED", "COMPLETING") else row["state"]
    return RunFacts(state, running, elapsed, row["timelimit_s"])


def run_ref(row: dict[str, Any], until: datetime) -> JobAttempt:
    """Return a reference to the job of a row of ``JOBS``."""
    facts = run_facts(row, until)
    shown = str(row["job_id"])
    if row["array_job_id"] is not None and row["array_task_id"] is not None:
        shown = f"{row['array_job_id']}_{row['array_task_id']}"
    elif row["het_job_id"] is not None:
        shown = f"{row['het_job_id']}+{row['het_offset'] or 0}"
    return JobAttempt(
        job_id=row["job_id"],
        id=shown,
        submit=row["submit"],
        start=row["start"],
        end=None if facts.running else row["end"],
        name=row["job_name"],
        state=facts.state,
        time_limit_s=row["timelimit_s"],
        batch=_batch(row.get("submit_line")),
    )


def _batch(line: str | None) -> bool | None:
    """Return whether a submit line is that of a batch job; ``None`` if unknown."""
    words = (line or "").split(maxsplit=1)
    program = words[0].rpartition("/")[2] if words else ""
    return {"sbatch": True, "salloc": False, "srun": False}.get(program)


def finding(
    ref: JobAttempt, row: dict[str, Any], nodes: tuple[str, ...], observed_gpus: Sequence[ObservedGpu], source: Source
) -> Finding | None:
    """Return the finding for the GPUs of a job, or ``None``. ``row``: cluster, user, account, partition, qos, gpus."""
    flagged = [(observed, observed.verdict) for observed in observed_gpus if observed.verdict is not None]
    if not flagged:
        return None
    idle = [observed for observed, _ in flagged]
    squatting = [(observed, verdict) for observed, verdict in flagged if verdict.signature.kind == "squatter"]
    computing = [observed for observed in observed_gpus if observed.computes]
    worst, verdict = max(squatting or flagged, key=lambda pair: pair[0].window_s)
    kind, variant = _kind([verdict.signature.name for _, verdict in flagged], verdict, computes=bool(computing))
    allocated = max(int(row["gpus"] or 0), len(observed_gpus))
    gpus = tuple(sorted((observed.gpu for observed in observed_gpus), key=lambda gpu: (gpu.node or "", order(gpu.gpu))))
    gib_seconds = [gib_s for observed in idle if (gib_s := _held_gib_s(observed)) is not None]
    # The end of one job does not free a shared GPU.
    shared = any(observed.gpu.shared for observed in observed_gpus)
    share = _measured_share(observed_gpus, allocated)
    about = (*_about_gpus(idle, computing, allocated, len(observed_gpus), observed_gpus), *_about_share(share))
    if shared:
        about = (*about, evidence("idle.shared-live" if source == "live" else "idle.shared-history", "yes", met=False))
    return Finding(
        kind=kind,
        cluster=row["cluster"],
        subject=ref,
        user=row["user"],
        account=row["account"],
        partition=row["partition"],
        qos=row["qos"],
        nodes=nodes,
        gpus=gpus,
        since=min((observed.since for observed in idle if observed.since is not None), default=None),
        window_s=worst.window_s,
        score=verdict.score if share is None else min(verdict.score, 2 * share),
        evidence=(*verdict.evidence, *about),
        held_gpu_hours=None if shared else sum(observed.window_s for observed in idle) / 3600,
        held_gib_hours=sum(gib_seconds) / 3600 if gib_seconds else None,
        impact=None,
        source=source,
        observed_at=max((observed.last for observed in idle if observed.last is not None), default=datetime.now(UTC)),
        variant=variant,
        advice=_advice(verdict.signature, ref, partly=bool(computing)),
        allocated_gpus=allocated,
    )


def _advice(signature: Signature, ref: JobAttempt, *, partly: bool) -> str:
    if partly:
        return advice("idle.advice-partly")
    return signature.advice if ref.end is None else advice("idle.advice-ended")


def _kind(names: Sequence[str], worst: SignatureVerdict, *, computes: bool) -> tuple[str, str]:
    """Return kind and variant of a finding. ``names``: matching signatures; ``worst``: the verdict that determines it.

    A job that computes on some of its GPUs is never a squatter.
    """
    if computes:
        return "idle-allocation", "partly-used"
    if worst.signature.kind == "squatter":
        return "squatter", worst.signature.name
    # Of several signatures, use the least specific one.
    return "idle-allocation", next((name for name in ("used-once", "idle") if name in names), names[0])


def order(name: str) -> tuple[int, str]:
    """Return the sort key of a GPU name (``name_of``): indices by number, before all others."""
    return (int(name), "") if name.isascii() and name.isdigit() else (1 << 30, name)


def _held_gib_s(observed: ObservedGpu) -> float | None:
    if observed.held_gib_s is not None or observed.gpu.held_gib is None:
        return observed.held_gib_s
    return observed.gpu.held_gib * observed.window_s  # a live check has no samples: use the current memory


def _measured_share(observed_gpus: Sequence[ObservedGpu], allocated: int) -> float | None:
    """Return the measured share of a job's GPU time; ``None`` if not based on samples over time."""
    whole_s = max((observed.whole_s for observed in observed_gpus if observed.whole_s is not None), default=0.0)
    if whole_s <= 0:
        return None
    return min(
        1.0,
        sum(observed.measured_s or 0.0 for observed in observed_gpus)
        / (whole_s * max(allocated, len(observed_gpus), 1)),
    )


def _about_share(share: float | None) -> tuple[Evidence, ...]:
    """Return evidence about the measured share of the time. Below 50 %, the score is at most twice that share."""
    if share is None:
        return ()
    return (evidence("idle.measured", 100 * share, met=False, low=True if share < 0.5 else None),)


def _about_gpus(
    flagged: Sequence[ObservedGpu],
    computing: Sequence[ObservedGpu],
    allocated: int,
    mapped: int,
    observed_gpus: Sequence[ObservedGpu],
) -> tuple[Evidence, ...]:
    rows = [
        evidence("idle.gpus", float(len(flagged)), met=False, allocated=allocated, computing=len(computing) or None)
    ]
    kinds = [kind for kind in MAPPINGS if any(observed.gpu.mapping == kind for observed in flagged)]
    if kinds:
        origins = " and ".join(MAPPINGS[kind] for kind in kinds)
        rows.append(evidence("idle.mapping", ", ".join(kinds), met=False, origins=origins))
    unmeasured = allocated - mapped + sum(not observed.gpu.measured for observed in observed_gpus)
    if unmeasured > 0:
        rows.append(evidence("idle.coverage", None, count=unmeasured))
    return tuple(rows)
