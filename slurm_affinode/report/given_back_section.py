"""The section on suspended jobs: GPU-hours and memory that they gave back."""

from __future__ import annotations

from datetime import tzinfo

import polars as pl

from slurm_affinode.analysis import suspensions
from slurm_affinode.analysis.result import WasteResult
from slurm_affinode.base.text import visible
from slurm_affinode.report import format as fmt
from slurm_affinode.report.context import Card, Cell, Column, GivenBack, Table
from slurm_affinode.report.links import NO_LINKS, Links
from slurm_affinode.report.measures import Row, help_for
from slurm_affinode.report.tables import name_cell

_FAILURE_LENGTH = 160
_WORDS = {
    "asleep": "asleep",
    "restoring": "being restored",
    "restored": "restored",
    "afresh": "started afresh",
    "ended": "ended asleep",
    "failed": "ran on",
}
_IN_PLACE = {"asleep": "asleep in place", "restored": "slept in place, awake", "restoring": "is waking"}


def section(result: WasteResult, top: int, links: Links = NO_LINKS) -> GivenBack | None:
    """Return the section on suspensions; ``None`` if there was none. ``top``: rows of its table."""
    frame = result.suspensions
    if frame is None or frame.is_empty():
        return None
    total = suspensions.totals(frame)
    parts = [_requeued(total)] if total["suspensions"] else []
    parts += [_in_place(total)] if total["in_place_sleeps"] else []
    lead = " ".join(parts) or "No suspension got through in this interval."
    cards: tuple[Card, ...] = (
        _hours_card(total),
        _suspension_card("Suspensions", "suspensions", fmt.count(total["suspensions"]), sub=_taken_back(total)),
        _suspension_card("Asleep", "asleep_now", fmt.count(total["asleep_now"]), sub=_failures(total)),
        _suspension_card(
            "Time to suspend", "suspend_s", _short(total["suspend_s"]), sub="median, until the GPUs are free"
        ),
        _suspension_card(
            "Time to restore", "restore_s", _short(total["restore_s"]), sub="median, until the job runs again"
        ),
        _suspension_card("Images", "image_gib", fmt.number(total["image_gib"]), "GiB"),
    )
    if total["in_place_sleeps"]:
        cards += (
            _suspension_card(
                "Slept in place",
                "in_place_sleeps",
                fmt.count(total["in_place_sleeps"]),
                sub=_jobs(total["in_place_jobs"]),
            ),
            _suspension_card(
                "GPU memory given back", "gpu_mem_gib_hours", fmt.number(total["gpu_mem_gib_hours"]), "GiB-h"
            ),
            _suspension_card("Time to wake", "wake_s", _short(total["wake_s"]), sub="median, from the request"),
        )
    return GivenBack(lead, cards, _table(frame, top, result.query.zone, links))


def _requeued(total: Row) -> str:
    jobs, hours = total["suspended_jobs"], total["gpu_hours_given_back"]
    free = "how many GPU-hours they gave back is unknown" if hours is None else (
        f"their GPUs were free for others for {fmt.hours(hours, 'GPU-hours')}"
    )  # fmt: skip
    was = f"{_jobs(jobs, 'idle job')} {'was' if jobs == 1 else 'were'}"
    return f"{was} suspended {_times(total['suspensions'])}; {free}."


def _in_place(total: Row) -> str:
    memory = total["gpu_mem_gib_hours"]
    memory_text = "; how much GPU memory they left to others is unknown" if memory is None else (
        f" and left {fmt.number(memory)} GiB-hours of GPU memory to others"
    )  # fmt: skip
    return f"{_jobs(total['in_place_jobs'])} slept in place {_times(total['in_place_sleeps'])}{memory_text}."


def _jobs(number: float | None, noun: str = "job") -> str:
    return f"{fmt.count(number)} {noun}{'' if number == 1 else 's'}"


def _times(number: float | None) -> str:
    return "once" if number == 1 else f"{fmt.count(number)} times"


def _hours_card(total: Row) -> Card:
    text = fmt.number(total["gpu_hours_given_back"])
    return _suspension_card(
        "Given back", "gpu_hours_given_back", text, "GPU-h", sub=f"by {_jobs(total['suspended_jobs'])}"
    )


def _suspension_card(label: str, key: str, value: str, unit: str = "", *, sub: str = "") -> Card:
    unknown = value == fmt.UNKNOWN
    return Card(label, value, "" if unknown else unit, "" if unknown else sub, help_for(key), unknown=unknown)


def _taken_back(total: Row) -> str:
    failed = total["suspensions_failed"]
    return f"{fmt.count(failed)} rolled back, the job continued" if failed else ""


def _failures(total: Row) -> str:
    failed = total["restore_failures"]
    return f"{fmt.count(failed)} could not be restored" if failed else ""


def _short(seconds: float | None) -> str:
    if seconds is not None and seconds < 60:
        return fmt.quantity(seconds, "s")
    return fmt.duration(seconds)


def _table(frame: pl.DataFrame, top: int, zone: tzinfo, links: Links) -> Table:
    rows = tuple(_row(row, zone, links) for row in frame.head(top).iter_rows(named=True))
    columns = (
        Column("Job", title="raw ID"), Column("User", unit="account"),
        Column("Given back", "number", "GPU-h", help_for("gpu_hours_given_back") or "", "descending"),
        Column("Began", "short"), Column("What became of it", unit="where"),
        Column("Asleep", "number", title=help_for("asleep_s") or ""),
        Column("To suspend", "number", title=help_for("suspend_s") or ""),
        Column("To restore", "number", title=help_for("restore_s") or ""),
        Column("Image", "number", "GiB", help_for("image_gib") or ""), Column("GPUs", unit="model"),
    )  # fmt: skip
    note = f"The first {fmt.count(top)} of {fmt.count(frame.height)}." if frame.height > top else ""
    return Table("given-back-table", "Suspensions by GPU-hours given back", columns, rows, note=note)


def _row(row: Row, zone: tzinfo, links: Links) -> tuple[Cell, ...]:
    return (
        Cell(str(row["job_id"]), "text", sort=str(row["job_id"]), href=links.job(row)),
        name_cell(row["user"], sub=fmt.clip(fmt.name(row["account"]), 40), href=links.user(row["user"])),
        _number(row["gpu_hours_given_back"], fmt.number(row["gpu_hours_given_back"])),
        Cell(fmt.moment(row["began"], zone), "short", sort=str(round(row["began"].timestamp()))),
        Cell(_became(row), "text", sub=_failure_or_nodes(row)),
        _number(row["asleep_s"], fmt.duration(row["asleep_s"])),
        _number(row["suspend_s"], _short(row["suspend_s"])),
        _number(row["restore_s"], _short(row["restore_s"])),
        _number(row["image_gib"], fmt.number(row["image_gib"])),
        Cell(fmt.count(row["gpus"]), "number", sub=fmt.clip(fmt.name(row["gpu_model"]), 40)),
    )


def _became(row: Row) -> str:
    word: str = _WORDS[row["outcome"]]
    return _IN_PLACE.get(row["outcome"], word) if row["mode"] == "inplace" else word


def _failure_or_nodes(row: Row) -> str:
    if row["failure"]:
        return fmt.clip(visible(row["failure"]), _FAILURE_LENGTH)
    places = [fmt.name(row[key]) for key in ("node", "restored_node") if row[key] is not None]
    return " to ".join(places)


def _number(value: float | None, text: str) -> Cell:
    if value is None:
        return Cell(fmt.UNKNOWN, "number unknown")
    return Cell(text, "number", sort=f"{value:.6g}")
