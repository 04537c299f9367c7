"""Slurm's job IDs as printed: ``123``, ``123_4``, ``123_[1-9%2]``, ``123+1``, with a step ``.batch`` or ``.0+1``.

The raw ID (JobIDRaw) is unique among array tasks and heterogeneous components; people use the printed one (JobID).
Steps from 0xfffffffa on are Slurm's own and have names. Names in requests to Slurm are validated first, so that no text
of a user becomes an option or another request.
"""

from __future__ import annotations

import re
import signal as signals
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from slurm_affinode.base.errors import InputError
from slurm_affinode.slurm.interface import BadIdentifierError

if TYPE_CHECKING:
    import polars as pl


Number = TypeVar("Number", int, "pl.Series")

MOST_DIGITS = 11
"""Of a job ID."""
PATTERN = r"^([0-9]{1,11})(?:_(?:([0-9]{1,7})|\[([^\]|]*)\]?))?(?:\+([0-9]{1,9}))?(?:\.([A-Za-z0-9_+.-]+))?$"
"""Groups: job ID, array task, array specification, heterogeneous offset, step. Digits are ASCII: those of other
scripts occur only in names."""

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
    """A parsed job ID."""

    job_id: int
    """The number before ``_`` or ``+``: the raw ID of a plain job, or that of the array or the heterogeneous leader."""
    array_task_id: int | None = None
    array_spec: str | None = None
    het_offset: int | None = None
    step: str | None = None


def parse(text: str) -> JobId:
    """Parse a printed job ID. Raises ``ValueError``."""
    match = _PATTERN.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a job ID")
    job, task, spec, het, step = match.groups()
    return JobId(
        int(job),
        None if task is None else int(task),
        spec,
        None if het is None else int(het),
        None if step is None else SPECIAL_STEPS.get(step, step),
    )


def tasks_in(spec: str | None) -> tuple[int, int | None]:
    """Return the number of tasks and the limit of concurrent tasks (``None``: no limit).

    ``0-9:2,14%3`` gives ``(6, 3)``. One task if there is no specification or it is unreadable; of a truncated one
    (``1,3,...``), the tasks shown.
    """
    tasks, _, most = (spec or "").strip("[]").partition("%")
    count = 0
    for part in tasks.split(","):
        match = _TASKS.fullmatch(part)
        if match is not None:
            first, last, step = (None if group is None else int(group) for group in match.groups())
            count += 1 if first is None or last is None else max(0, (last - first) // (step or 1) + 1)
    return max(1, count), int(most) if most.isdecimal() and int(most) > 0 else None


def stand_in(array_job_id: Number, array_task_id: Number) -> Number:
    """Return a stable ID for an array task without a raw ID in the input: negative, so it never equals a real one.

    ``-(array_job_id * 2**24 + array_task_id + 1)``: 64 bits hold every job ID and task number of Slurm.
    """
    return -(array_job_id * TASKS + array_task_id + 1)


MAX_COMMENT_BYTES = 1024
"""Slurm's limit at submission (MAX_COMMENT_LEN of slurmctld.h)."""
MAX_ADMIN_COMMENT_BYTES = 64 * 1024
"""Sites store machine-readable records there. Linux limits an argument of a program to 128 KiB."""
MAX_MESSAGE_BYTES = 4096

_JOB = re.compile(r"([1-9][0-9]{0,9})(?:_([0-9]{1,7})|\+([0-9]{1,5}))?(?:\.([0-9]{1,10}|batch|extern|interactive))?")
_NODE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,253}[A-Za-z0-9])?")
_LAST_JOB_ID = 0xFFFFFFF0


@dataclass(frozen=True, slots=True)
class Target:
    """The job or step that a request names: ``123``, ``123_4``, ``123+1``, each with ``.0``, ``.batch``, ..."""

    job_id: int
    """The number before ``_`` or ``+``."""
    task: int | None = None
    het_offset: int | None = None
    step: str | None = None

    @property
    def job(self) -> str:
        """The job without the step."""
        if self.task is not None:
            return f"{self.job_id}_{self.task}"
        return str(self.job_id) if self.het_offset is None else f"{self.job_id}+{self.het_offset}"

    def __str__(self) -> str:
        """Return the form that Slurm's commands accept."""
        return self.job if self.step is None else f"{self.job}.{self.step}"


def target(text: int | str) -> Target:
    """Parse a job or step. Raises ``BadIdentifierError``."""
    match = _JOB.fullmatch(str(text)) if str(text).isascii() else None
    if match is None or int(match[1]) > _LAST_JOB_ID:
        raise BadIdentifierError(
            f"{_shown(str(text))} is not a job or step", hint="write 123, 123_4, 123+1, 123.0 or 123.batch"
        )
    job, task, offset, step = match.groups()
    return Target(int(job), None if task is None else int(task), None if offset is None else int(offset), step)


def job(text: int | str) -> Target:
    """Parse a job; steps are refused. Raises ``BadIdentifierError``."""
    parsed = target(text)
    if parsed.step is not None:
        raise BadIdentifierError(f"{parsed} is a step, and a job is needed", hint=f"write {parsed.job}")
    return parsed


def node(text: str) -> str:
    """Validate the name of one node. Raises ``BadIdentifierError``, also for a hostlist: a request names one node."""
    if not _NODE.fullmatch(text) or text.upper() == "ALL":
        raise BadIdentifierError(f"{_shown(text)} is not the name of one node")
    return text


def text(value: str, what: str, max_bytes: int) -> str:
    """Validate free text for Slurm: any characters but NUL. Raises ``InputError``."""
    if "\0" in value:
        raise InputError(f"the {what} holds a NUL character")
    try:
        size = len(value.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        raise InputError(f"the {what} holds half a character (a lone surrogate)") from None
    if size > max_bytes:
        raise InputError(f"the {what} has {size:,} bytes; at most {max_bytes:,} fit")
    return value


def signal(value: int | str) -> int:
    """Return the number of a signal given as ``10``, ``USR1`` or ``SIGUSR1``. Raises ``InputError``."""
    word = str(value).upper()
    if re.fullmatch(r"[0-9]{1,2}", word) and 1 <= int(word) <= signals.SIGRTMAX:
        return int(word)
    name = word if word.startswith("SIG") else f"SIG{word}"
    member = getattr(signals, name, None)
    if not isinstance(member, signals.Signals):
        raise InputError(f"{_shown(str(value))} is not a signal", hint="write USR1, SIGUSR1 or 10")
    return int(member)


def _shown(value: str) -> str:
    return repr(value if len(value) <= 60 else f"{value[:57]}...")
