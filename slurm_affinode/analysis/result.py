"""What an analysis hands to its readers: frozen, complete, nothing left to compute but layout.

Hours are GPU-hours. For every row that has them,
``measured = idle + low + busy`` and ``allocated = measured + unknown``. Where nothing of what was allocated was
measured, ``idle``, ``low`` and ``busy`` are None: unknown, not 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo

import polars as pl

from slurm_affinode.model.signals import FLOORS_PCT, floor_of

MEASURES: dict[str, pl.DataType] = {
    "gpu_hours_allocated": pl.Float64(),
    "gpu_hours_measured": pl.Float64(),
    "gpu_hours_unknown": pl.Float64(),
    "gpu_hours_idle": pl.Float64(),  # every available activity signal <= idle_pct
    "gpu_hours_low": pl.Float64(),  # not idle, but every available activity signal <= low_pct
    "gpu_hours_busy": pl.Float64(),
    "idle_fraction": pl.Float64(),  # idle / measured; None where nothing was measured
    "util_mean_pct": pl.Float64(),  # time-weighted mean of util_pct; None where never given
    "mem_gib_h": pl.Float64(),  # framebuffer held x time
    "idle_mem_gib_h": pl.Float64(),  # the part of it held while idle
    "fb_mean_gib": pl.Float64(),  # per GPU, time-weighted; None where unknown
    "fb_peak_gib": pl.Float64(),  # of one GPU
    "energy_kwh": pl.Float64(),  # None where power was never given
    "idle_energy_kwh": pl.Float64(),
    "idle_windows": pl.Int64(),  # maximal runs of idle samples of one GPU within one allocation
    "longest_idle_s": pl.Float64(),
    "cost": pl.Float64(),  # allocated hours x price; None where no price is known
    "idle_cost": pl.Float64(),
    "gpu_hours_by_labels": pl.Float64(),  # these four: the allocated hours by how their GPUs are known
    "gpu_hours_by_records": pl.Float64(),
    "gpu_hours_by_whole_node": pl.Float64(),
    "gpu_hours_unmapped": pl.Float64(),
}

GROUPINGS = ("user", "account", "partition", "qos", "node", "gpu_model", "cluster")

MAPPINGS = ("labels", "recorded", "whole-node", "unknown")
"""How a run's GPUs were found; ``unknown`` runs have allocated hours, all of them unknown."""

JOB_COLUMNS = (
    "cluster", "job_id", "submit", "array_job_id", "array_task_id", "job_name", "user", "account", "partition", "qos",
    "state", "start", "end", "nodes", "node_list", "gpus", "gpu_model", "mapping",
)  # fmt: skip
"""Columns of ``WasteResult.jobs`` before the measures. ``end`` is None while the job runs."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Percent, inclusive; and the gap after which time is unknown, in sampling steps."""

    idle_pct: float = 0.0
    low_pct: float = 5.0
    max_gap_steps: float = 3.0
    floors_pct: Mapping[str, float] = field(default_factory=lambda: dict(FLOORS_PCT))
    """Signal -> percent up to which it counts as 0."""

    def floor(self, name: str) -> float:
        """The floor of an activity column of the samples, in the unit of the column."""
        return floor_of(name, self.floors_pct)


@dataclass(frozen=True, slots=True)
class WasteQuery:
    """What was asked: a half-open UTC interval and filters (empty: no filter)."""

    since: datetime
    until: datetime
    clusters: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    thresholds: Thresholds = Thresholds()
    zone: tzinfo = UTC
    """Where hours and days begin, and in which people read times."""
    known_until: Mapping[str, datetime] = field(default_factory=dict)
    """Cluster -> the moment up to which accounting is known; a job of it that was last seen running counts up to there.
    A cluster that is not listed has no such limit."""

    def end_of(self, cluster: str | None) -> datetime:
        """Where the time of a running job of ``cluster`` ends at the latest."""
        return min(self.until, self.known_until.get(cluster or "", self.until))


@dataclass(frozen=True, slots=True)
class QualityIssue:
    """One thing that makes the figures less certain, with how much of it there is and what to do."""

    code: str
    """A stable word: ``gaps``, ``unmapped-gpus``, ``bad-records``, ``no-gpu-tres``, ``label-mismatch``, ..."""
    title: str
    detail: str
    count: int
    gpu_hours: float | None = None
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DataQuality:
    """How much of the answer rests on data."""

    samples: int
    devices: int
    nodes: int
    job_runs: int
    gpu_job_runs: int
    steps_s: Mapping[float, int]
    """Sampling step in seconds -> number of devices that have it."""
    mapped_runs: Mapping[str, int]
    """Word of ``MAPPINGS`` -> number of GPU job runs."""
    gap_gpu_hours: float
    """Allocated time on known GPUs inside gaps longer than the limit."""
    issues: tuple[QualityIssue, ...] = ()


@dataclass(frozen=True, slots=True)
class WasteResult:
    """Where the GPU-hours of an interval went."""

    query: WasteQuery
    generated: datetime
    currency: str
    total: Mapping[str, float | int | None]
    """The keys of ``MEASURES`` over everything, plus ``jobs``, ``users``, ``unallocated_gpu_hours`` (GPUs known to
    exist that no run held) and ``gpu_hours_capacity`` (allocated + unallocated); both None where there is no history,
    or only runs of some users, accounts or partitions are looked at."""
    jobs: pl.DataFrame
    """One row per GPU job run: ``JOB_COLUMNS`` + ``MEASURES``; most idle hours first."""
    groups: Mapping[str, pl.DataFrame]
    """Word of ``GROUPINGS`` -> frame of ``name`` (None: unknown), ``jobs`` and ``MEASURES``; most idle hours first."""
    over_time: pl.DataFrame
    """``bucket`` (UTC start of an hour or day of the query's zone), ``gpu_hours_allocated``, ``_idle``, ``_low``,
    ``_busy``, ``_unknown``."""
    bucket_s: int
    """Length of a bucket on a day on which the clock is not changed."""
    idle_fraction_histogram: pl.DataFrame
    """``lower``, ``upper`` (fractions; ten bins, the last closed), ``jobs``, ``gpu_hours_allocated``."""
    window_histogram: pl.DataFrame
    """``label``, ``lower_s``, ``upper_s`` (None: no limit), ``windows``, ``gpu_hours`` (None: nothing measured)."""
    timelines: pl.DataFrame
    """Of the most wasteful runs: ``cluster``, ``job_id``, ``submit``, ``slot`` (0..), ``from``, ``to`` (UTC),
    ``idle``, ``low``, ``busy``, ``unknown`` (fractions of the slot's allocated GPU time, sum 1),
    ``util_mean_pct``, ``fb_mean_gib``."""
    quality: DataQuality
    prices: Mapping[str, float | None] = field(default_factory=dict)
    """GPU model -> price of a GPU-hour used; None where the table has none."""
    suspensions: pl.DataFrame | None = None
    """``analysis.suspensions.SUSPENSIONS``; ``None`` where none was looked for."""
    accounting_note: str = ""
    """For people: where accounting ends before the interval does; else empty."""
    price_note: str = ""
    """Where the prices come from, for people; empty where the site's own table needs no note."""

    @property
    def priced(self) -> bool:
        """Whether the site has said its prices: what an example says is not what the site pays."""
        return not self.price_note and self.total.get("cost") is not None
