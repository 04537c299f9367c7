"""Slurm's job ids as printed: ``123``, ``123_4``, ``123_[1-9%2]``, ``123+1``, with a step ``.batch``, ``.0``, ``.0+1``.

The raw id (JobIDRaw) is unique among array tasks and heterogeneous components; the printed one (JobID) is what
people use. Steps of number 0xfffffffa and above are Slurm's own and have names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import polars as pl

Number = TypeVar("Number", int, "pl.Series")

PATTERN = r"^([0-9]{1,11})(?:_(?:([0-9]{1,7})|\[([^\]|]*)\]?))?(?:\+([0-9]{1,9}))?(?:\.([A-Za-z0-9_+.-]+))?$"
"""Groups: id, array task, array specification, heterogeneous offset, step. Digits of other scripts, which a name may
hold, are none of an id."""

_PATTERN = re.compile(PATTERN)

_TASKS = re.compile(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?")

SPECIAL_STEPS = {
    "4294967290": "interactive",
    "4294967291": "batch",
    "4294967292": "extern",
    "4294967293": "pending",
    "4294967294": "batch",  # before 19.05
    "4294967295": "extern",
    "-5": "batch",
    "-4": "extern",
    "-6": "interactive",
}

MAX = 10**11 - 1
TASKS = 1 << 24
"""MaxArraySize is at most 4,000,001."""


@dataclass(frozen=True, slots=True)
class JobId:
    """A printed job id, taken apart."""

    job_id: int
    """The number before ``_`` or ``+``: the raw id of a plain job, the leader's of an array or a heterogeneous job."""
    array_task_id: int | None = None
    array_spec: str | None = None
    het_offset: int | None = None
    step: str | None = None


def parse(text: str) -> JobId:
    """Take a printed id apart. Raises ``ValueError``."""
    match = _PATTERN.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a job id")
    job, task, spec, het, step = match.groups()
    return JobId(
        int(job),
        None if task is None else int(task),
        spec,
        None if het is None else int(het),
        None if step is None else SPECIAL_STEPS.get(step, step),
    )


def tasks_in(spec: str | None) -> tuple[int, int | None]:
    """Tasks of ``0-9:2,14%3``, and how many of them may run at once (``None``: all): ``(6, 3)``.

    1 where there is no specification, or it cannot be read; of one that Slurm cut off (``1,3,...``) what it shows.
    """
    tasks, _, most = (spec or "").strip("[]").partition("%")
    count = 0
    for part in tasks.split(","):
        match = _TASKS.fullmatch(part)
        if match is not None:
            first, last, step = (None if one is None else int(one) for one in match.groups())
            count += 1 if first is None or last is None else max(0, (last - first) // (step or 1) + 1)
    return max(1, count), int(most) if most.isdecimal() and int(most) > 0 else None


def stand_in(array_job_id: Number, array_task_id: Number) -> Number:
    """A stable id for an array task whose raw id the input does not have: negative, so never a real one.

    ``-(array_job_id * 2**24 + array_task_id + 1)``: 64 bits hold every job id and task number of Slurm.
    """
    return -(array_job_id * TASKS + array_task_id + 1)
