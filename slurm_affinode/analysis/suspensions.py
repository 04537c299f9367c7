"""Benefit of suspensions: GPU-hours for which the GPUs of suspended jobs were free for other jobs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from datetime import datetime

import polars as pl

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.model.ledger import LedgerEntry

_TIME = pl.Datetime("ms", "UTC")
_GIB = 2**30
_MS_PER_HOUR = 3_600_000.0

SUSPENSIONS: dict[str, pl.DataType] = {
    "cluster": pl.String(),
    "job_id": pl.Int64(),
    "user": pl.String(),
    "account": pl.String(),
    "partition": pl.String(),
    "mode": pl.String(),  # requeue, inplace; null: unknown (early ledger)
    "outcome": pl.String(),  # asleep, restoring, restored, afresh, ended, failed
    "why": pl.String(),
    "gpus": pl.Int64(),
    "gpu_model": pl.String(),
    "began": _TIME,
    "node": pl.String(),
    "restored_node": pl.String(),
    "gpu_hours_given_back": pl.Float64(),
    "asleep_s": pl.Float64(),  # from free GPUs to the next start, or to now; not clipped to the interval
    "suspend_s": pl.Float64(),  # from the first lock to free GPUs
    "dump_s": pl.Float64(),  # from parked to a verified checkpoint image
    "restore_s": pl.Float64(),  # from the next start to running again
    "gpu_mem_gib": pl.Float64(),
    "image_gib": pl.Float64(),
    "gpu_mem_gib_hours": pl.Float64(),  # in place: GPU memory that was free for other jobs
    "wake_s": pl.Float64(),  # in place: from the wake request to running again
    "failure": pl.String(),
}
"""One row per suspension; most GPU-hours first."""


def given_back(entries: Iterable[LedgerEntry], query: WasteQuery, *, now: datetime) -> pl.DataFrame:
    """Return ``SUSPENSIONS`` for the ledger entries that match ``query``; hours are clipped to its interval."""
    rows = [_row(entry, query, now) for entry in entries if _is_selected(entry, query)]
    frame = pl.DataFrame(rows, schema=SUSPENSIONS, orient="row")
    return frame.sort(
        "gpu_hours_given_back", "began", "job_id", descending=[True, False, False], nulls_last=True
    )  # fmt: skip


def _is_selected(entry: LedgerEntry, query: WasteQuery) -> bool:
    filters = (
        (entry.cluster, query.clusters),
        (entry.partition, query.partitions),
        (entry.account, query.accounts),
        (entry.user, query.users),
    )
    return all(not names or value in names for value, names in filters)


def _row(entry: LedgerEntry, query: WasteQuery, now: datetime) -> tuple[object, ...]:
    since_ms, until_ms, now_ms = (round(moment.timestamp() * 1000) for moment in (query.since, query.until, now))
    in_place = entry.mode == "inplace"
    free_ms = entry.parked_ms if in_place else entry.queued_ms
    over_ms = entry.restoring_ms if entry.restoring_ms is not None else entry.ended_ms
    hours = asleep_s = memory_hours = None
    if free_ms is not None:
        end_ms = now_ms if over_ms is None else over_ms
        asleep_s = max(0, end_ms - free_ms) / 1000
        within = max(0, min(end_ms, until_ms) - max(free_ms, since_ms)) / _MS_PER_HOUR
        if in_place:
            memory_hours = _memory_hours(entry, within)
        elif entry.restore_failure is not None and entry.restored_ms is None:
            hours = 0.0  # unless a later restore succeeds, the work of the job is lost
        elif entry.gpus is not None:
            hours = entry.gpus * within
    return (
        entry.cluster,
        entry.job_id,
        entry.user,
        entry.account,
        entry.partition,
        entry.mode,
        outcome(entry),
        entry.why,
        entry.gpus,
        entry.gpu_model,
        entry.began_ms,
        entry.node,
        entry.restored_node,
        hours,
        asleep_s,
        _span_s(entry.began_ms, free_ms),
        _span_s(entry.parked_ms, entry.dumped_ms),
        _span_s(entry.restoring_ms, entry.restored_ms),
        None if entry.gpu_bytes is None else entry.gpu_bytes / _GIB,
        None if entry.image_bytes is None else entry.image_bytes / _GIB,
        memory_hours,
        _span_s(entry.released_ms, entry.restored_ms) if in_place else None,
        entry.failure or (entry.restore_failure if entry.restored_ms is None else None),
    )


def _memory_hours(entry: LedgerEntry, hours: float) -> float | None:
    """Return the GiB-hours for which the memory was free for other jobs: 0 on whole GPUs, which stay allocated."""
    if entry.shares_gpus is None or entry.gpu_bytes is None:
        return None
    return entry.gpu_bytes / _GIB * hours if entry.shares_gpus else 0.0


def _span_s(begin_ms: int | None, end_ms: int | None) -> float | None:
    return None if begin_ms is None or end_ms is None else max(0, end_ms - begin_ms) / 1000


def outcome(entry: LedgerEntry) -> str:
    """Return the outcome of a suspension.

    ``failed`` (the job continued to run), ``restored``, ``ended`` (it never ran again), ``restoring``, ``asleep``
    (still suspended), ``afresh`` (the restore failed).
    """
    in_place = entry.mode == "inplace"
    if (in_place and (entry.failure is not None or entry.parked_ms is None)) or (
        not in_place and entry.queued_ms is None
    ):
        return "failed"
    if entry.restored_ms is not None:
        return "restored"
    if entry.ended_ms is not None:
        return "ended"
    if entry.restoring_ms is None:
        return "asleep"
    return "restoring" if entry.restore_failure is None else "afresh"


def totals(frame: pl.DataFrame) -> Mapping[str, float | int | None]:
    """Return totals of ``SUSPENSIONS``: numbers of suspensions and jobs, GPU-hours freed, memory and median times.

    ``None`` is unknown. Suspensions in place are counted separately (``in_place_``): the jobs keep their GPUs and free
    only memory.
    """
    in_place = frame.filter((pl.col("mode") == "inplace") & (pl.col("outcome") != "failed"))
    frame = frame.filter((pl.col("mode") != "inplace") | pl.col("mode").is_null() | (pl.col("outcome") == "failed"))
    through = frame.filter(pl.col("outcome") != "failed")
    return {
        "suspensions": through.height,
        "suspended_jobs": through.select("cluster", "job_id").n_unique() if through.height else 0,
        "suspensions_failed": frame.height - through.height,
        "restore_failures": through.filter(
            pl.col("failure").is_not_null() & (pl.col("outcome") != "restored")
        ).height,
        "asleep_now": through.filter(pl.col("outcome") == "asleep").height,
        "gpu_hours_given_back": _sum(through, "gpu_hours_given_back"),
        "image_gib": _sum(through, "image_gib") if through.height else None,
        "suspend_s": _median(through, "suspend_s"),
        "restore_s": _median(through, "restore_s"),
        "asleep_s": _median(through, "asleep_s"),
        "in_place_sleeps": in_place.height,
        "in_place_jobs": in_place.select("cluster", "job_id").n_unique() if in_place.height else 0,
        "gpu_mem_gib_hours": _sum(in_place, "gpu_mem_gib_hours"),
        "wake_s": _median(in_place, "wake_s"),
    }  # fmt: skip


def _sum(frame: pl.DataFrame, column: str) -> float | None:
    """Return the sum of the known values; ``None`` if there are rows, but no known value."""
    return float(frame[column].sum()) if frame.is_empty() or frame[column].count() else None


def _median(frame: pl.DataFrame, column: str) -> float | None:
    values = frame[column].drop_nulls().to_list()
    return statistics.median(values) if values else None
