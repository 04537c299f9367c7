"""Fields common to the records of both backends: states, GPUs, times, hostlists.

Slurm writes these texts the same way to both; they are parsed here only. Nothing raises for a damaged text: one
invalid job must not hide the others, so an unreadable field is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from slurm_affinode.model.cluster import ENDED_STATES, PENDING_STATES, GpuCount, Job, NodeGpus
from slurm_affinode.slurm import hostlist, units

FLAG_ORDER = (
    "COMPLETING", "STAGE_OUT", "CONFIGURING", "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT",
    "STOPPED", "REVOKED", "RESV_DEL_HOLD", "SIGNALING",
)  # fmt: skip
"""Flags that Slurm shows instead of the base state, by precedence (job_state_string in slurm_protocol_defs.c)."""

_SHARE = re.compile(r"(?:^|,)(?:gres[/:])?(?:shard|mps)(?=[:=,]|$)")
_DETAIL = re.compile(r"gpu(?::([^,():]+))?:([0-9]{1,9})(?:\((?:S:[^)]*|IDX:([0-9,-]*))[^)]*\))?(?=,|$)")
BY_ADMIN = "JobHeldAdmin"
"""Slurm's reason for a job that its owner cannot release."""
_NONE = frozenset({"", "(null)", "n/a", "none", "unknown", "none assigned"})


def state(words: Sequence[str]) -> str:
    """Return the one word that squeue prints for a base state and its flags."""
    flagged = next((flag for flag in FLAG_ORDER if flag in words), None)
    return flagged or (words[0] if words else "UNKNOWN")


def job(
    *,
    state: str,
    priority: int | None,
    start: datetime | None,
    end: datetime | None,
    tres_allocated: Mapping[str, str],
    gpus_allocated: GpuCount | None,
    nodes_expected: tuple[str, ...] = (),
    by_admin: bool = False,
    **fields: Any,
) -> Job:
    """Return a job of either backend, with what follows from its state.

    ``start``, ``end``: as Slurm has them, also those that it expects. ``by_admin``: Slurm's reason says that an
    administrator holds it. ``fields``: the other fields of ``Job``.
    """
    pending, over = state in PENDING_STATES, state in ENDED_STATES or state == "COMPLETING"
    is_held = pending and priority == 0
    return Job(
        state=state,
        priority=priority,
        is_held=is_held,
        held_by_admin=is_held and by_admin,
        start=None if pending else start,
        end=end if over else None,
        expected_start=start if pending else None,
        expected_end=None if pending or over or fields.get("time_limit_s") is None else end,
        tres_allocated={} if pending else tres_allocated,
        gpus_allocated=None if pending else gpus_allocated,
        nodes_expected=nodes_expected if pending else (),
        **fields,
    )


def word(value: object) -> str | None:
    """Return the text, or ``None`` if it is empty or one of Slurm's words for "none"."""
    text = "" if value is None else str(value)
    return None if text.strip().lower() in _NONE else text


def moment(seconds: object) -> datetime | None:
    """Return epoch seconds as a time; ``None`` for 0, no number, and values out of range."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1 << 35:
        return None
    return datetime.fromtimestamp(int(seconds), UTC)


def nodes(text: object) -> tuple[str, ...]:
    """Return the names of a hostlist."""
    if not isinstance(text, str) or hostlist.is_none(text):
        return ()
    try:
        return tuple(hostlist.expand(text))
    except ValueError:
        return ()


def tres(text: object) -> dict[str, str]:
    """Return a TRES string as a mapping."""
    try:
        return units.parse_tres(text) if isinstance(text, str) and word(text) else {}
    except ValueError:
        return {}


def gpus(amounts: Mapping[str, str]) -> GpuCount | None:
    """Return the GPUs of a TRES mapping: the untyped count if there is one, else the sum of the typed ones."""
    try:
        counts = units.gpus_of_tres(amounts)
    except ValueError:
        return None
    return None if counts.count is None else GpuCount(counts.count, counts.kind)


def gpus_of_gres(text: object) -> GpuCount | None:
    """Return the GPUs of a GRES string such as ``gpu:h100:2(S:0-1)``; ``None`` if it names none."""
    try:
        counts = units.parse_gres(text) if isinstance(text, str) and word(text) else units.GpuCounts(None)
    except ValueError:
        return None
    return None if counts.count is None else GpuCount(counts.count, counts.kind)


def requests_share(*requests: object) -> bool:
    """Return whether one of a job's requests per node, task, socket or job (``gres/shard:6``) is a share of a GPU."""
    return any(_SHARE.search(str(request)) is not None for request in requests if request)


def node_gpus(names: Sequence[str], details: Sequence[str]) -> tuple[NodeGpus, ...]:
    """Return the GPUs per node from a job's ``gres_detail``: one text for each of its nodes, in their order.

    Such as ``gpu:h100:2(IDX:0,3)``; several types on one node give several entries.
    """
    return tuple(
        NodeGpus(name, count, kind, indices)
        for name, detail in zip(names, details, strict=False)
        for count, kind, indices in _detail(detail)
    )


@lru_cache(maxsize=4096)  # thousands of jobs have the same GPUs of their node
def _detail(text: str) -> tuple[tuple[int, str | None, tuple[int, ...]], ...]:
    """Return count, type and indices of each type of GPU."""
    groups = (match.groups() for match in _DETAIL.finditer(text))
    return tuple((int(count), kind, tuple(_numbers(indices or ""))) for kind, count, indices in groups if int(count))


def _numbers(text: str) -> Iterable[int]:
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if (
            0 < len(first) <= 9
            and len(last) <= 9
            and first.isdigit()
            and (last or first).isdigit()
            and int(last or first) - int(first) < 4096
        ):
            yield from range(int(first), int(last or first) + 1)
