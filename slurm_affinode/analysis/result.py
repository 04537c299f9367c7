"""Results of an analysis: immutable, complete, and ready for rendering.

Hours are GPU-hours. Each row satisfies ``measured = idle + low + busy`` and ``allocated = measured + unknown``. If
nothing was measured, ``idle``, ``low`` and ``busy`` are None (unknown), not 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING

import polars as pl

from slurm_affinode.analysis.emissions import EmissionFactor
from slurm_affinode.analysis.segments import Floats, Ints
from slurm_affinode.analysis.working_hours import WorkingTime
from slurm_affinode.model.gpu import FLOORS_PCT, floor_of

if TYPE_CHECKING:
    from slurm_affinode.engines.diagnosis.usage import ServerReport

TIME_SUMS = 4
"""Number of leading columns of ``SUMS`` that are times, one per activity class."""
SUMS = ("busy", "low", "idle", "unknown", "util", "util_known", "fb", "fb_known", "fb_idle", "power", "power_known",
        "power_idle")  # fmt: skip
"""Columns of sums: time per class in ms; then value x ms, ms with a value, value x ms while idle."""
BOUNDS_S = (300, 900, 3600, 4 * 3600, 12 * 3600, 24 * 3600)
"""Bounds of the histogram of idle windows; a bound belongs to the bin above it."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of the samples of an interval, per cell and per allocation."""

    sums: Floats
    """One row per cell with the columns of ``SUMS``, for all its sharers together."""
    fb_peak: Floats
    """Per cell; NaN if there is none."""
    partly_cell: Ints
    """Cells with time that counts only for the sharers that held the device at ``partly_time``. This time is not in
    ``sums``; each of these sharers gets 1 / (all sharers) of it. A cell may occur several times."""
    partly_sums: Floats
    partly_time: Ints
    windows: Ints
    """Per allocation: number of idle windows."""
    longest_ms: Ints
    """Per allocation: longest idle window."""
    window_counts: Ints
    """Idle windows of counted runs per bin of ``BOUNDS_S`` (one more bin than bounds)."""
    window_share_ms: Floats
    """Per bin: time of the windows; shared time is divided among the sharers."""
    gap_ms: int
    gaps: int
    samples: int


MEASURES: dict[str, pl.DataType] = {
    "gpu_hours_allocated": pl.Float64(),
    "gpu_hours_measured": pl.Float64(),
    "gpu_hours_unknown": pl.Float64(),
    "gpu_hours_idle": pl.Float64(),  # every available activity signal <= idle_pct
    "gpu_hours_low": pl.Float64(),  # not idle, but every available activity signal <= low_pct
    "gpu_hours_busy": pl.Float64(),
    "idle_fraction": pl.Float64(),  # idle / measured; None if nothing was measured
    "util_mean_pct": pl.Float64(),  # time-weighted mean of util_pct; None if never available
    "mem_gib_h": pl.Float64(),  # framebuffer in use x time
    "idle_mem_gib_h": pl.Float64(),  # the part of it in use while the GPU was idle
    "fb_mean_gib": pl.Float64(),  # per GPU, time-weighted; None if unknown
    "fb_peak_gib": pl.Float64(),  # of one GPU
    "energy_kwh": pl.Float64(),  # None if power was never available
    "idle_energy_kwh": pl.Float64(),
    "idle_windows": pl.Int64(),  # maximal runs of idle samples of one GPU within one allocation
    "longest_idle_s": pl.Float64(),
    "cost": pl.Float64(),  # allocated hours x price; None if no price is known
    "idle_cost": pl.Float64(),
    "gpu_hours_by_labels": pl.Float64(),  # this and the next three: allocated hours by mapping of runs to GPUs
    "gpu_hours_by_records": pl.Float64(),
    "gpu_hours_by_whole_node": pl.Float64(),
    "gpu_hours_unmapped": pl.Float64(),
}

GROUPINGS = ("user", "account", "partition", "qos", "node", "gpu_model", "cluster")

RUN_MEASURES: dict[str, pl.DataType] = {
    "submission": pl.String(),  # batch or interactive; None if unknown
    "gpus_unused": pl.Int64(),  # GPUs that were never active; None unless all are measured nearly completely
    "gpu_hours_unused": pl.Float64(),  # their idle hours
    "all_idle_s": pl.Float64(),  # lower bound of the longest time in which all GPUs were idle; None: not all are known
    "gpus_memory_measured": pl.Int64(),  # GPUs of which the memory in use was measured nearly completely
}
"""Columns of ``WasteResult.jobs`` after the measures."""

MAPPINGS = ("labels", "recorded", "whole-node", "unknown")
"""Ways in which a run's GPUs were identified. All allocated hours of ``unknown`` runs are unknown."""

JOB_COLUMNS = (
    "cluster", "job_id", "submit", "array_job_id", "array_task_id", "job_name", "user", "account", "partition", "qos",
    "state", "start", "end", "nodes", "node_list", "gpus", "gpu_model", "mapping",
)  # fmt: skip
"""Columns of ``WasteResult.jobs`` before the measures. ``end`` is None while the job runs."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds in percent, inclusive, and the gap after which time is unknown, in sampling intervals."""

    idle_pct: float = 0.0
    low_pct: float = 5.0
    max_gap_steps: float = 3.0
    floors_pct: Mapping[str, float] = field(default_factory=lambda: dict(FLOORS_PCT))
    """Signal -> noise floor: values up to this percentage count as 0."""

    def floor(self, name: str) -> float:
        """Return the floor of an activity column of the samples, in the unit of the column."""
        return floor_of(name, self.floors_pct)


@dataclass(frozen=True, slots=True)
class WasteQuery:
    """Interval (half-open, UTC) and filters of an analysis. An empty filter matches everything."""

    since: datetime
    until: datetime
    clusters: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    thresholds: Thresholds = Thresholds()
    zone: tzinfo = UTC
    """Time zone of displayed times, and of the start of hours and days."""
    known_until: Mapping[str, datetime] = field(default_factory=dict)
    """Cluster -> time up to which accounting is known; jobs last seen running are counted up to it. A cluster that is
    not listed has no such limit."""
    working: WorkingTime | None = None
    """Working hours of the site; ``None``: hours are not divided by them."""

    @property
    def filters(self) -> Mapping[str, tuple[str, ...]]:
        """Column of ``JOBS`` -> names that select runs."""
        return {
            "cluster": self.clusters, "partition": self.partitions, "account": self.accounts, "user": self.users,
        }  # fmt: skip

    def end_of(self, cluster: str | None) -> datetime:
        """Return the latest time up to which a running job of ``cluster`` is counted."""
        return min(self.until, self.known_until.get(cluster or "", self.until))


@dataclass(frozen=True, slots=True)
class QualityIssue:
    """A problem that makes the figures less certain, with its extent and its remedy."""

    code: str
    """Stable identifier: ``gaps``, ``unmapped-gpus``, ``bad-records``, ``no-gpu-tres``, ``label-mismatch``, ..."""
    title: str
    detail: str
    count: int
    gpu_hours: float | None = None
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DataQuality:
    """Data coverage of a result, and its problems."""

    samples: int
    devices: int
    nodes: int
    job_runs: int
    gpu_job_runs: int
    steps_s: Mapping[float, int]
    """Sampling interval in seconds -> number of devices."""
    mapped_runs: Mapping[str, int]
    """One of ``MAPPINGS`` -> number of GPU job runs."""
    gap_gpu_hours: float
    """Allocated time on known GPUs in gaps longer than the limit."""
    issues: tuple[QualityIssue, ...] = ()


@dataclass(frozen=True, slots=True)
class StartedWaits:
    """Waits of the GPU jobs that started in an interval, from the time at which they were eligible."""

    jobs: int
    """Jobs whose wait is known."""
    waited: int
    """Those that waited for longer than ``WAITED_S``."""
    gpu_hours: float
    """Requested GPUs times the wait, of all of them."""
    median_s: float
    """Of those that waited."""
    longest_s: float


@dataclass(frozen=True, slots=True)
class UnmetDemand:
    """GPU-hours that jobs waited for while GPUs idled (``analysis.demand``)."""

    slot_s: float
    """Length of the slots in which waits and idle time are compared, in seconds."""
    partitions: pl.DataFrame
    """``cluster``, ``partition``, ``jobs`` (that waited longer than ``WAITED_S``), ``gpu_hours_waited`` (requested GPUs
    times their waits within the interval), ``gpu_hours_behind_larger`` (the part behind a job that was eligible earlier
    and requested more GPUs), ``gpu_hours_idle_meanwhile`` (of runs in the partition while a
    job waited), ``gpu_hours_unmet``; the
    last two are None if nothing was measured. Most unmet hours first."""
    models: pl.DataFrame
    """``cluster``, ``partition``, ``gpu_model`` (None: unknown), ``gpu_hours_unmet``; most hours first."""
    holders: pl.DataFrame
    """Runs that held the idle GPUs: ``cluster``, ``job_id``, ``array_job_id``, ``array_task_id``, ``user``,
    ``partition``, ``gpu_hours_unmet``, ``waiting_jobs`` (jobs of the partition that waited beside its idle GPUs), and
    the one of these that waited beside most idle GPU-hours: ``waiting_job_id``, ``waiting_array_job_id``,
    ``waiting_array_task_id``, ``waiting_user`` (None: none). The first ten, most hours first."""

    @property
    def unmet(self) -> float | None:
        """GPU-hours of all partitions; ``None`` if nothing was measured."""
        hours = self.partitions["gpu_hours_unmet"]
        return None if hours.null_count() else float(hours.sum())


@dataclass(frozen=True, slots=True)
class PeriodHours:
    """Figures of an earlier period."""

    label: str
    """``2026-11-20``, ``2026-W47``, ``2026-11``, or the begin of the period."""
    since: datetime
    until: datetime
    total: Mapping[str, float | int | None]
    """As ``WasteResult.total``."""


@dataclass(frozen=True, slots=True)
class Trend:
    """Earlier periods of the kind of the interval."""

    kind: str
    """``day``, ``week``, ``month`` or ``interval``."""
    periods: tuple[PeriodHours, ...]
    """At most eleven, oldest first, each before the interval; unknown ones are absent."""


WAITED_S = 60.0
"""Slurm's scheduler needs up to a minute to start a job on free GPUs (``sched_interval``, ``bf_interval``)."""


@dataclass(frozen=True, slots=True)
class WasteResult:
    """Where the GPU-hours of an interval went."""

    query: WasteQuery
    generated: datetime
    currency: str
    total: Mapping[str, float | int | None]
    """``MEASURES`` over everything, plus ``jobs``, ``users``, ``unallocated_gpu_hours`` (GPUs known to exist that no
    run held) and ``gpu_hours_capacity`` (allocated + unallocated). The last two are None if no GPU is known to have
    existed, and if the query filters by user, account or partition."""
    jobs: pl.DataFrame
    """One row per GPU job run: ``JOB_COLUMNS`` + ``MEASURES`` + ``RUN_MEASURES``; most idle hours first."""
    groups: Mapping[str, pl.DataFrame]
    """One of ``GROUPINGS`` -> frame of ``name`` (None: unknown), ``jobs`` and ``MEASURES``; most idle hours first."""
    over_time: pl.DataFrame
    """``bucket`` (start of the bucket, UTC), ``gpu_hours_allocated``, ``_idle``, ``_low``, ``_busy``, ``_unknown``."""
    bucket_s: int
    """Length of a bucket, except on days with a clock change (daylight saving time)."""
    idle_fraction_histogram: pl.DataFrame
    """``lower``, ``upper`` (fractions; ten bins, the last closed), ``jobs``, ``gpu_hours_allocated``."""
    window_histogram: pl.DataFrame
    """``label``, ``lower_s``, ``upper_s`` (None: no limit), ``windows``, ``gpu_hours`` (None: nothing measured)."""
    timelines: pl.DataFrame
    """Timelines of the most wasteful runs: ``cluster``, ``job_id``, ``submit``, ``slot`` (0..), ``from``, ``to`` (UTC),
    ``idle``, ``low``, ``busy``, ``unknown`` (fractions of the slot's allocated GPU time, sum 1), ``util_mean_pct``,
    ``fb_mean_gib``."""
    quality: DataQuality
    prices: Mapping[str, float | None] = field(default_factory=dict)
    """GPU model -> price per GPU-hour; None if the table has none."""
    waits: StartedWaits | None = None
    """``None`` if no wait is known."""
    working_hours: pl.DataFrame | None = None
    """``analysis.working_hours.HOURS``: hours inside and outside of working hours; ``None`` if not divided."""
    demand: UnmetDemand | None = None
    """``None`` if no wait is known, and if the query filters by user or account."""
    gpus: pl.DataFrame | None = None
    """``analysis.measures.GPUS``: hours of each GPU; ``None`` if not evaluated."""
    gpu_runs: pl.DataFrame | None = None
    """``analysis.measures.GPU_RUNS``: the runs of each GPU; ``None`` if not evaluated."""
    gpu_memory: pl.DataFrame | None = None
    """``analysis.measures.GPU_MEMORY``: memory of each GPU model; ``None`` if not evaluated."""
    trend: Trend | None = None
    """``None`` if no earlier period is known."""
    suspensions: pl.DataFrame | None = None
    """``analysis.suspensions.SUSPENSIONS``; ``None`` if not evaluated."""
    servers: ServerReport | None = None
    """The inference engines of the interval; ``None`` without engine samples, or if not evaluated."""
    accounting_note: str = ""
    """Note for display if accounting ends before the interval; else empty."""
    price_note: str = ""
    """Note for display about the origin of the prices; empty for the site's own table."""
    emissions: EmissionFactor | None = None
    """``None`` if the site has set none."""

    @property
    def averaged(self) -> bool:
        """Whether metrics are averages per run, so that idle hours are a lower bound."""
        return any(issue.code == "per-run-averages" for issue in self.quality.issues)

    @property
    def priced(self) -> bool:
        """True if the amounts are based on the site's own prices, not on the examples."""
        return not self.price_note and self.total.get("cost") is not None
