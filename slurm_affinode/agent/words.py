"""What people read of a suspension: comments of jobs, lines in their output."""

from __future__ import annotations

import signal

SUSPENDED = "suspended: "
RUNS_ON = "runs on: "
HELD = "not restored: "
ASLEEP = "asleep in place: "
WAITS_TO_WAKE = "waits to wake: "
WAITS_TO_START = "waits to start: "
NOT_WOKEN = "not woken: "
RESTORING = "restoring: "
LOST = "lost: "
AFRESH = "; started afresh"
"""Behind why a job was not restored."""
_OWN = (SUSPENDED, RUNS_ON, HELD, ASLEEP, WAITS_TO_WAKE, WAITS_TO_START, NOT_WOKEN, LOST, RESTORING)
_OF_THE_PAST = (RUNS_ON, HELD, LOST)
_BEHIND = " // "
_MAX_BYTES = 900
"""Of a comment; Slurm takes 1024 bytes."""


def span(seconds: float) -> str:
    """``45s``, ``15m``, ``2h05m``, ``3d4h``: as people type it."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole}s"
    minutes = round(whole / 60)
    if minutes < 120:
        return f"{minutes}m"
    hours, rest = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{rest:02d}m" if rest else f"{hours}h"
    days, left = divmod(hours, 24)
    return f"{days}d{left}h" if left else f"{days}d"


def size(count: int) -> str:
    """``52 GiB``, ``310 MiB``: two or three digits."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000 or unit == "GiB":
            return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def theirs(comment: str | None) -> str:
    """What a comment says that is not ours: what the job's owner had put there."""
    text = comment or ""
    if not text.startswith(_OWN):
        return text
    return text.partition(_BEHIND)[2]


def of_the_past(comment: str | None) -> str | None:
    """What a comment says of ours that holds for a job that runs: why it runs on, or from its beginning."""
    text = comment or ""
    return text.partition(_BEHIND)[0] if text.startswith(_OF_THE_PAST) else None


def sleeps(comment: str | None) -> bool:
    """Whether a comment of ours says that the job has an image: it was suspended, and is not back."""
    text = (comment or "").partition(_BEHIND)[0]
    return text.startswith((SUSPENDED, RESTORING, HELD)) and not text.endswith(AFRESH)


def sleeps_in_place(comment: str | None) -> bool:
    """Whether a comment of ours says that the job sleeps, or waits."""
    return (comment or "").startswith((ASLEEP, WAITS_TO_WAKE, WAITS_TO_START, NOT_WOKEN))


def comment(own: str, before: str | None) -> str:
    """Our comment, with what the owner had put there behind it."""
    kept = theirs(before)
    text = f"{own}{_BEHIND}{kept}" if kept else own
    return text.encode("utf-8")[:_MAX_BYTES].decode("utf-8", "ignore")


def suspended(why: str, held_bytes: int, job: str) -> str:
    """``suspended: idle 15m, 52 GiB, wake with: slurm-affinode wake 123``."""
    return f"{SUSPENDED}{one(why)}, {size(held_bytes)}, wake with: slurm-affinode wake {job}"


def restoring(node: str) -> str:
    """Its image is being put in place."""
    return f"{RESTORING}from its image, on {node}"


def runs_on(why: str) -> str:
    """Why a suspension was taken back."""
    return f"{RUNS_ON}{one(why)}"


def lost(node: str, why: str) -> str:
    """What a job had done is gone: its processes have ended on ``node``, and there is no image."""
    return f"{LOST}its processes on {node} ended while it was suspended ({one(why)}); there is no image"


def held(why: str) -> str:
    """Why a job was not restored."""
    return f"{HELD}{one(why)}"


def asleep(why: str, held_bytes: int, job: str, *, on_request: bool) -> str:
    """``asleep in place: idle 15m, 48 GiB in host memory, wakes on a request, or with: slurm-affinode wake 123``.

    ``on_request``: somebody could send it one.
    """
    wakes = "wakes on a request, or with" if on_request else "wake with"
    return f"{ASLEEP}{one(why)}, {size(held_bytes)} in host memory, {wakes}: slurm-affinode wake {job}"


def waits(verb: str, why: str) -> str:
    """Why a job waits to ``wake``, or to ``start``."""
    return f"{WAITS_TO_WAKE if verb == 'wake' else WAITS_TO_START}{one(why)}"


def not_woken(why: str) -> str:
    """Why a job could not be woken."""
    return f"{NOT_WOKEN}{one(why)}; it sleeps on, and is tried again"


def signal_name(number: int) -> str:
    """``SIGTERM``; ``signal 40`` where it has no name of its own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def one(text: str, limit: int = 300) -> str:
    """The text as one line of at most ``limit`` printable characters."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= limit else line[: limit - 3] + "..."
