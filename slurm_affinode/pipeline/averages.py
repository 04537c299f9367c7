"""Analysis of averages per attempt: they are laid out as samples and analyzed like real ones."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import polars as pl

from slurm_affinode.analysis import waste
from slurm_affinode.analysis.prices import PriceTable
from slurm_affinode.analysis.result import QualityIssue, Thresholds, WasteQuery, WasteResult
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.metrics import averages
from slurm_affinode.metrics.parquet.store import SampleStore


def analyse_averages(
    jobs: pl.DataFrame,
    per_run: pl.DataFrame,
    *,
    prices: PriceTable,
    thresholds: Thresholds,
    notes: Sequence[str] = (),
    problems: Sequence[str] = (),
    now: datetime | None = None,
    zone: tzinfo = UTC,
) -> WasteResult:
    """Analyze ``jobs`` (``JOBS``) with ``per_run`` (``averages.AVERAGES``) over the whole time span of the jobs.

    The averages do not cover GPU time outside of jobs: ``unallocated_gpu_hours`` is unknown. The data quality counts
    averages, not the samples laid out from them, and has no sampling interval; ``notes`` and ``problems`` are added to
    it. Raises ``AffinodeError`` if no job has a start time.
    """
    moment = now or datetime.now(UTC)
    # An average at or below a floor may hide a peak above it: only 0 proves that every moment was 0.
    query = WasteQuery(*_span(jobs, moment), thresholds=replace(thresholds, floors_pct={}), zone=zone)
    with tempfile.TemporaryDirectory(prefix="slurm-affinode-") as directory:
        history = SampleStore(Path(directory))
        try:
            averages.fill(history, per_run)
            gpus = averages.allocation_gpus(per_run)
            result = waste.analyse(query, jobs, gpus, history, prices, (), now=moment)
        finally:
            history.close()
    issues = (*_issues(per_run, notes, problems), *result.quality.issues)
    return replace(
        result,
        total={**result.total, "unallocated_gpu_hours": None, "gpu_hours_capacity": None},
        quality=replace(result.quality, samples=per_run.height, steps_s={}, issues=issues),
    )


def _span(jobs: pl.DataFrame, now: datetime) -> tuple[datetime, datetime]:
    if jobs.is_empty():
        raise AffinodeError("has no jobs: nothing to analyze")
    started = jobs.drop_nulls("start")
    first, last = started["start"].min(), started["end"].fill_null(now).max()
    if not isinstance(first, datetime) or not isinstance(last, datetime):
        raise AffinodeError(
            "no job has a start time, so the time of its averages is unknown",
            hint="print the fields Start and End as well",
        )
    return first, max(last, first + timedelta(seconds=1))


def _issues(per_run: pl.DataFrame, notes: Sequence[str], problems: Sequence[str]) -> list[QualityIssue]:
    runs = per_run.select("cluster", "job_id", "start").n_unique()
    issues = [
        QualityIssue(
            "per-run-averages",
            "Averages per run, not samples",
            " ".join((averages.NOTE, *notes)),
            count=runs,
        )
    ]
    if problems:
        issues.append(
            QualityIssue(
                "bad-records",
                "Records that could not be used as they are",
                "Each one is listed with its reason.",
                count=len(problems),
                examples=tuple(problems[:5]),
            )
        )
    return issues
