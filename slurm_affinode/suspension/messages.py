"""User-visible texts about suspensions: job comments, and lines in the job's output."""

from __future__ import annotations

import signal

from slurm_affinode.base.text import one_line, size

SUSPENDED = "suspended: "
RUNS_ON = "runs on: "
HELD = "not restored: "
ASLEEP = "asleep in place: "
WAITS_TO_WAKE = "waits to wake: "
WAITS_TO_START = "waits to start: "
NOT_WOKEN = "not woken: "
RESTORING = "restoring: "
LOST = "lost: "
REQUEUED = "requeued after it was restored"
"""Reason why a job is suspended whose restored attempt was lost."""
AFRESH = "; started afresh"
"""Suffix of the reason why a job was not restored."""
_OWN = (SUSPENDED, RUNS_ON, HELD, ASLEEP, WAITS_TO_WAKE, WAITS_TO_START, NOT_WOKEN, LOST, RESTORING)
_OF_THE_PAST = (RUNS_ON, HELD, LOST)
_BEHIND = " // "
_MAX_BYTES = 900
"""Length limit of a comment; Slurm accepts 1024 bytes."""
_MAX_REASON_BYTES = 300


def theirs(comment: str | None) -> str:
    """Return the part of a comment that was set by the job's owner."""
    text = comment or ""
    if not text.startswith(_OWN):
        return text
    return text.partition(_BEHIND)[2]


def of_the_past(comment: str | None) -> str | None:
    """Return our part of a comment if it applies to a running job: why it runs on, or was started afresh."""
    text = comment or ""
    return text.partition(_BEHIND)[0] if text.startswith(_OF_THE_PAST) else None


def sleeps(comment: str | None) -> bool:
    """Return whether our part of a comment marks the job as suspended with an image, and not restored yet."""
    text = (comment or "").partition(_BEHIND)[0]
    return text.startswith((SUSPENDED, RESTORING, HELD)) and not text.endswith(AFRESH)


def sleeps_in_place(comment: str | None) -> bool:
    """Return whether our part of a comment says that the job sleeps in place, or waits to wake or start."""
    return (comment or "").startswith((ASLEEP, WAITS_TO_WAKE, WAITS_TO_START, NOT_WOKEN))


def comment(own: str, before: str | None) -> str:
    """Return our comment, followed by the owner's."""
    kept = theirs(before)
    text = f"{own}{_BEHIND}{kept}" if kept else own
    return text.encode("utf-8")[:_MAX_BYTES].decode("utf-8", "ignore")


def suspended(why: str, held_bytes: int, job: str) -> str:
    """Return ``suspended: idle 15m, 52 GiB, wake with: slurm-affinode wake 123``."""
    return f"{SUSPENDED}{reason(why)}, {size(held_bytes)}, wake with: slurm-affinode wake {job}"


def restoring(node: str) -> str:
    """Return the comment for a restore in progress."""
    return f"{RESTORING}from its image, on {node}"


def runs_on(why: str) -> str:
    """Return the comment for an aborted suspension."""
    return f"{RUNS_ON}{reason(why)}"


def exceeded(used_bytes: int, limit_bytes: int) -> str:
    """Return the line for a job that keeps the memory for which its limit was raised."""
    text = f"out of memory: the job uses {size(used_bytes)}, and its limit of {size(limit_bytes)}"
    return f"{text} is no longer raised for a suspension; the kernel kills processes until the rest fits"


def lost(node: str, why: str) -> str:
    """Return the comment for a job that has lost its state: its processes on ``node`` ended, and there is no image."""
    return f"{LOST}its processes on {node} ended while it was suspended ({reason(why)}); there is no image"


def held(why: str) -> str:
    """Return the comment for a job that was not restored."""
    return f"{HELD}{reason(why)}"


def asleep(why: str, held_bytes: int, job: str, *, on_request: bool) -> str:
    """Return the comment for a job that sleeps in place.

    Example: ``asleep in place: idle 15m, 48 GiB in host memory, wakes on a request, or with: slurm-affinode wake 123``.
    ``on_request``: a request from outside can reach it.
    """
    wakes = "wakes on a request, or with" if on_request else "wake with"
    return f"{ASLEEP}{reason(why)}, {size(held_bytes)} in host memory, {wakes}: slurm-affinode wake {job}"


def waits(verb: str, why: str) -> str:
    """Return the comment for a job that waits to ``wake`` or to ``start``."""
    return f"{WAITS_TO_WAKE if verb == 'wake' else WAITS_TO_START}{reason(why)}"


def not_woken(why: str) -> str:
    """Return the comment for a job that could not be woken."""
    return f"{NOT_WOKEN}{reason(why)}; it sleeps on, and is tried again"


def signal_name(number: int) -> str:
    """Return ``SIGTERM``, or ``signal 40`` for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def reason(text: str) -> str:
    """Return a reason as one line that leaves room for the owner's part of a comment."""
    return one_line(text, _MAX_REASON_BYTES)
