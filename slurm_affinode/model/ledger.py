"""The ledger of suspensions: what agents write down of each, one JSON object per line, and how lines are put together.

A line says what was known when it was written; several lines, of several nodes, speak of one suspension. Each fact is
established once, so lines can be put together in any order and any number of times.
Times are milliseconds of the epoch (UTC) in names that end with ``_ms``. Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

VERSION = 1
_MAX_TEXT = 1024
_MAX_NUMBER = 1 << 62


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One suspension, as far as it is known. ``None``: not known, or not come to yet."""

    cluster: str
    job_id: int
    """The raw id."""
    submit: int
    """When the job was first submitted, seconds of the epoch."""
    began_ms: int
    """When the suspension began; with the three above, its key."""
    seq: int | None = None
    """Counts the suspensions of this submission that got as far as an image, from 1."""
    user: str | None = None
    uid: int | None = None
    account: str | None = None
    partition: str | None = None
    node: str | None = None
    """Where it was suspended."""
    mode: str | None = None
    why: str | None = None
    window_s: int | None = None
    gpus: int | None = None
    gpu_model: str | None = None
    gpu_bytes: int | None = None
    """GPU memory that was moved out."""
    image_bytes: int | None = None
    locked_ms: int | None = None
    """All its CUDA processes were locked."""
    parked_ms: int | None = None
    """Its GPU memory was in host memory."""
    dumped_ms: int | None = None
    """Its image was complete, verified and durable."""
    queued_ms: int | None = None
    """It was in the queue and its processes gone: the GPUs were free from here on."""
    copied_ms: int | None = None
    """Its image was complete in the shared store."""
    released_ms: int | None = None
    """It was allowed to start again."""
    restoring_ms: int | None = None
    """Slurm had started it again: the GPUs given back until here."""
    restored_ms: int | None = None
    """It ran again."""
    restored_node: str | None = None
    ended_ms: int | None = None
    """It was over without running again, e.g. cancelled."""
    failure: str | None = None
    """Why it was not suspended in the end: it ran on."""
    restore_failure: str | None = None
    """Why a restore did not succeed."""

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Cluster, job id, first submission, begin."""
        return (self.cluster, self.job_id, self.submit, self.began_ms)

    def merged(self, later: LedgerEntry) -> LedgerEntry:
        """This entry with what ``later``, an entry of the same suspension, knows."""
        known = {name: value for name, value in asdict(later).items() if value is not None}
        return replace(self, **known)


KEY = ("cluster", "job_id", "submit", "began_ms")
TEXTS = frozenset(
    {"cluster", "user", "account", "partition", "node", "mode", "why", "gpu_model", "restored_node", "failure",
     "restore_failure"}
)  # fmt: skip
"""Fields that are texts; all others are whole numbers."""
COLUMNS = tuple(field.name for field in fields(LedgerEntry))


def encode(entry: LedgerEntry) -> str:
    """The line, without its end."""
    known = {name: value for name, value in asdict(entry).items() if value is not None}
    return json.dumps({"version": VERSION, **known}, separators=(",", ":"), ensure_ascii=False)


def decode(line: str) -> LedgerEntry:
    """The entry of a line. Raises ``ValueError`` saying what is wrong with it."""
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
    # What a later release adds to a line does not make it unreadable.
    known: dict[str, Any] = {name: _checked(name, value[name]) for name in COLUMNS if value.get(name) is not None}
    return LedgerEntry(**known)


def _checked(name: str, value: Any) -> str | int:
    if name in TEXTS:
        if isinstance(value, str) and len(value) <= _MAX_TEXT:
            return value
        raise ValueError(f"{name} is not a text of at most {_MAX_TEXT} characters")
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_NUMBER:
        return value
    raise ValueError(f"{name} is not a whole number of at least 0")
