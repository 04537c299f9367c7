"""The section on unmet demand: who waited for GPUs while others held idle ones."""

from __future__ import annotations

from slurm_affinode.analysis.result import UnmetDemand, WasteResult
from slurm_affinode.report import format as fmt
from slurm_affinode.report.context import Cell, Column, Table, UnmetSection
from slurm_affinode.report.links import NO_LINKS, Links
from slurm_affinode.report.measures import Row, cell, column
from slurm_affinode.report.tables import job_label, name_cell, short_model

_ROWS = 10
_UNMET = ("gpu_hours_unmet", "Unmet", "GPU-h")


def section(result: WasteResult, links: Links = NO_LINKS) -> UnmetSection | None:
    """Return the section; ``None`` if no job is known to have waited."""
    demand = result.demand
    if demand is None or demand.partitions.is_empty():
        return None
    several = demand.partitions["cluster"].n_unique() > 1
    return UnmetSection(
        _lead(demand),
        _partitions(demand, several=several),
        _models(demand, several=several) if demand.models.height else None,
        _holders(demand, links) if demand.holders.height else None,
    )


def _lead(demand: UnmetDemand) -> str:
    rows = demand.partitions
    waited, jobs = float(rows["gpu_hours_waited"].sum()), int(rows["jobs"].sum())
    head = f"{fmt.count(jobs)} {'job' if jobs == 1 else 'jobs'} waited for {fmt.hours(waited, 'GPU-hours')}"
    if demand.unmet is None:
        return f"{head}. Without GPU metrics it is unknown how many GPUs were idle meanwhile."
    share = f" ({fmt.percent(demand.unmet / waited)})" if waited else ""
    unmet = f"{fmt.hours(demand.unmet, 'of them')}{share}"
    text = f"{head}; for {unmet}, as many GPUs of the same partition were held and idle."
    behind = float(rows["gpu_hours_behind_larger"].sum())
    if behind >= 0.01:
        text += f" {fmt.hours(behind, 'GPU-hours')} were waits behind a job that needed more GPUs."
    return text


def _place(row: Row, *, several: bool) -> Cell:
    return name_cell(row["partition"], sub=fmt.clip(fmt.name(row["cluster"]), 40) if several else "")


def _partitions(demand: UnmetDemand, *, several: bool) -> Table:
    measures = (
        _UNMET, ("gpu_hours_waited", "Waited for", "GPU-h"), ("gpu_hours_idle_meanwhile", "Idle meanwhile", "GPU-h"),
        ("gpu_hours_behind_larger", "Behind a larger job", "GPU-h"), ("jobs", "Jobs", "that waited"),
    )  # fmt: skip
    frame = demand.partitions
    rows = tuple(
        (_place(row, several=several), *(cell(row, key) for key, _, _ in measures))
        for row in frame.head(_ROWS).iter_rows(named=True)
    )
    note = f"The first {_ROWS} of {fmt.count(frame.height)}." if frame.height > _ROWS else ""
    columns = (Column("Partition"), *(column(*measure) for measure in measures))
    return Table("unmet-partitions", "Unmet demand by partition", columns, rows, note=note)


def _models(demand: UnmetDemand, *, several: bool) -> Table:
    frame = demand.models
    rows = tuple(
        (
            name_cell(None if row["gpu_model"] is None else short_model(row["gpu_model"])),
            _place(row, several=several), cell(row, "gpu_hours_unmet"),
        )
        for row in frame.head(_ROWS).iter_rows(named=True)
    )  # fmt: skip
    note = f"The first {_ROWS} of {fmt.count(frame.height)}." if frame.height > _ROWS else ""
    columns = (Column("GPU model"), Column("Partition"), column(*_UNMET))
    return Table("unmet-models", "Unmet demand by model of the idle GPUs", columns, rows, note=note)


def _holders(demand: UnmetDemand, links: Links) -> Table:
    rows = tuple(
        (
            Cell(job_label(row), "text job", sort=str(row["job_id"]), href=links.job(row)),
            name_cell(row["user"], href=links.user(row["user"])),
            name_cell(row["partition"]), cell(row, "gpu_hours_unmet"), _waiting(row, links),
        )
        for row in demand.holders.iter_rows(named=True)
    )  # fmt: skip
    columns = (Column("Job"), Column("User"), Column("Partition"), column(*_UNMET), Column("In the way of"))
    return Table("unmet-holders", "Jobs that held most of the idle GPUs that others waited for", columns, rows)


def _waiting(row: Row, links: Links) -> Cell:
    """Return the job that waited beside most idle GPU-hours of a holder, its user, and the number of others."""
    if row["waiting_job_id"] is None:
        return Cell("")
    job = {name.removeprefix("waiting_"): value for name, value in row.items() if name.startswith("waiting_")}
    job["cluster"] = row["cluster"]
    other_count = int(row["waiting_jobs"] or 0) - 1
    more = "" if other_count < 1 else f" and {fmt.count(other_count)} more {'job' if other_count == 1 else 'jobs'}"
    sub = f"{fmt.clip(fmt.name(job['user']), 40)}{more}"
    return Cell(job_label(job), "text job", sort=str(job["job_id"]), href=links.job(job), sub=sub)
