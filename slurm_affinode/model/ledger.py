"""The ledger of suspensions: the records that agents write, one JSON object per line, and how lines are merged.

A line contains the facts known when it was written; several lines, of several nodes, may describe one suspension. Each
fact is established once, so lines can be merged in any order and repeatedly. Times are milliseconds since the epoch
(UTC) in names that end with ``_ms``. Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from slurm_affinode.model.suspension import JobKey

VERSION = 1
_MAX_TEXT = 1024
_MAX_NUMBER = 1 << 62


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One suspension, as far as known. ``None``: not known, or not reached yet."""

    cluster: str
    job_id: int
    """The raw ID."""
    submit: int
    """First submit time of the job, in seconds since the epoch."""
    began_ms: int
    """Start of the suspension; with the three fields above, its key."""
    seq: int | None = None
    """Number, from 1, of the suspension among those of this submission that reached a checkpoint image."""
    user: str | None = None
    uid: int | None = None
    account: str | None = None
    partition: str | None = None
    node: str | None = None
    """Node on which it was suspended."""
    mode: str | None = None
    why: str | None = None
    window_s: int | None = None
    gpus: int | None = None
    gpu_model: str | None = None
    gpu_bytes: int | None = None
    """GPU memory that was saved."""
    image_bytes: int | None = None
    locked_ms: int | None = None
    """All its CUDA processes were locked."""
    parked_ms: int | None = None
    """Its GPU memory had been moved to host memory."""
    dumped_ms: int | None = None
    """Its checkpoint image was complete, verified and durable."""
    queued_ms: int | None = None
    """It was in the queue and its processes had ended: its GPUs were free from here on."""
    copied_ms: int | None = None
    """Its checkpoint image was complete in the shared store."""
    released_ms: int | None = None
    """It was allowed to start again."""
    restoring_ms: int | None = None
    """Slurm had restarted it: its GPUs were free until here."""
    restored_ms: int | None = None
    """It was running again."""
    restored_node: str | None = None
    ended_ms: int | None = None
    """It had ended without running again, e.g. canceled."""
    failure: str | None = None
    """Why the suspension failed: the job continued to run."""
    restore_failure: str | None = None
    """Why a restore failed."""
    shares_gpus: int | None = None
    """In place: 1 if the job had shares of GPUs, so that its GPU memory was free for other jobs; 0 if whole GPUs."""

    @classmethod
    def of(cls, job: JobKey, began_ms: int) -> LedgerEntry:
        """Return an entry without further facts."""
        return cls(job.cluster, job.job_id, job.submit_epoch, began_ms)

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Cluster, job ID, first submission, start."""
        return (self.cluster, self.job_id, self.submit, self.began_ms)

    def merged(self, later: LedgerEntry) -> LedgerEntry:
        """Return this entry, updated by ``later``, an entry of the same suspension."""
        values = {name: value for name, value in asdict(later).items() if value is not None}
        return replace(self, **values)


KEY = ("cluster", "job_id", "submit", "began_ms")
TEXTS = frozenset(
    {"cluster", "user", "account", "partition", "node", "mode", "why", "gpu_model", "restored_node", "failure",
     "restore_failure"}
)  # fmt: skip
"""Fields with strings; all others are integers."""
COLUMNS = tuple(field.name for field in fields(LedgerEntry))


def encode(entry: LedgerEntry) -> str:
    """Return the line of an entry, without a newline."""
    values = {name: value for name, value in asdict(entry).items() if value is not None}
    return json.dumps({"version": VERSION, **values}, separators=(",", ":"), ensure_ascii=False)


def decode(line: str) -> LedgerEntry:
    """Return the entry of a line. Raises ``ValueError`` with the reason."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - one kind of error for a bad line
    if value.pop("version", None) != VERSION:
        raise ValueError(f"not of version {VERSION}")
    missing = [name for name in KEY if value.get(name) is None]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    # Unknown keys are ignored: a later release may add some.
    values: dict[str, Any] = {name: _checked(name, value[name]) for name in COLUMNS if value.get(name) is not None}
    return LedgerEntry(**values)


def _checked(name: str, value: Any) -> str | int:
    if name in TEXTS:
        if isinstance(value, str) and len(value) <= _MAX_TEXT:
            return value
        raise ValueError(f"{name} is not a text of at most {_MAX_TEXT} characters")
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_NUMBER:
        return value
    raise ValueError(f"{name} is not a whole number of at least 0")
