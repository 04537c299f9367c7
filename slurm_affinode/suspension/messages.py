"""User-visible texts about suspensions: job comments, and lines in the job's output."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from datetime import UTC, datetime

from slurm_affinode.base.text import one_line, size, span
from slurm_affinode.base.times import named, utc

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
GIVEN_UP = "starts from its beginning: its image was given up, as requested"
AFRESH = "; started afresh"
"""Suffix of the reason why a job was not restored."""
_PREFIXES = (SUSPENDED, RUNS_ON, HELD, ASLEEP, WAITS_TO_WAKE, WAITS_TO_START, NOT_WOKEN, LOST, RESTORING)
_OUTDATED = (RUNS_ON, HELD, LOST)
_BEHIND = " // "
_MAX_BYTES = 900
"""Length limit of a comment; Slurm accepts 1024 bytes."""
_MAX_REASON_BYTES = 300


def comment_of_owner(comment: str | None) -> str:
    """Return the part of a comment that was set by the job's owner."""
    text = comment or ""
    if not text.startswith(_PREFIXES):
        return text
    return text.partition(_BEHIND)[2]


def of_the_past(comment: str | None) -> str | None:
    """Return our part of a comment if it applies to a running job: why it runs on, or was started afresh."""
    text = comment or ""
    return text.partition(_BEHIND)[0] if text.startswith(_OUTDATED) else None


def sleeps(comment: str | None) -> bool:
    """Return whether our part of a comment marks the job as suspended with an image, and not restored yet."""
    text = (comment or "").partition(_BEHIND)[0]
    return text.startswith((SUSPENDED, RESTORING, HELD)) and not text.endswith(AFRESH)


def sleeps_in_place(comment: str | None) -> bool:
    """Return whether our part of a comment says that the job sleeps in place, or waits to wake or start."""
    return (comment or "").startswith((ASLEEP, WAITS_TO_WAKE, WAITS_TO_START, NOT_WOKEN))


def comment(agent_text: str, before: str | None) -> str:
    """Return our comment, followed by the owner's."""
    owner_comment = comment_of_owner(before)
    text = f"{agent_text}{_BEHIND}{owner_comment}" if owner_comment else agent_text
    return text.encode("utf-8")[:_MAX_BYTES].decode("utf-8", "ignore")


def suspended(why: str, held_bytes: int, job: str, *, tied_to: str | None = None) -> str:
    """Return ``suspended: idle 15m, 52 GiB, wake with: slurm-affinode wake 123``.

    ``tied_to``: the only node on which the job starts, because of its node-local files.
    """
    tied = "" if tied_to is None else f", tied to {tied_to}"
    return f"{SUSPENDED}{reason(why)}, {size(held_bytes)}{tied}, wake with: slurm-affinode wake {job}"


def without_node(node: str, state: str, job: str) -> str:
    """Return why a job that is tied to a node does not start, and who can do what."""
    return (
        f"tied to {node}, which {state}: it waits until an administrator returns the node to service; to start it "
        f"elsewhere without its node-local files, its owner runs: scontrol update JobId={job} ReqNodeList="
    )


def without_files(node: str) -> str:
    """Return the line for a job that is restored on another node than the one that has its files."""
    return f"its node-local files stayed on {node} and are missing here"


def files_missing(node: str, paths: Sequence[str]) -> str:
    """Return the line about files of a tied job that changed or went away while it was suspended."""
    what = "a file" if len(paths) == 1 else f"{len(paths)} files"
    return reason(f"{what} of the job on {node} changed or disappeared while it was suspended: {', '.join(paths)}")


def files_kept(node: str, paths: Sequence[str]) -> str:
    """Return the line about existing files that a restore has not replaced."""
    what = "a file exists" if len(paths) == 1 else f"{len(paths)} files exist"
    return reason(f"{what} already on {node} with other contents and were not replaced: {', '.join(paths)}")


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


def not_restored(why: str, job: str, *, fresh: bool, retry_epoch: float | None = None) -> str:
    """Return the line for a failed restore. ``fresh``: the job is started from its beginning, otherwise held.

    ``retry_epoch``: when the agent tries again; ``None``: it does not.
    """
    if fresh:
        return f"{HELD}{reason(why)}; its script starts from the beginning"
    if retry_epoch is not None:
        return f"{HELD}{reason(why)}; its image is kept; {next_try(job, retry_epoch)}"
    again = (
        f"to try again: slurm-affinode wake {job}; to start from the beginning: slurm-affinode wake {job} --from-start"
    )
    return f"{HELD}{reason(why)}; it is held, and its image is kept; {again}"


def lost_after_restore(node: str, ran_s: float | None, *, fresh: bool = False) -> str:
    """Return ``its attempt on c1 was lost 2h after its restore``. ``fresh``: it had started from the beginning."""
    after = "at an unknown time" if ran_s is None else span(ran_s)
    return f"its attempt on {node} was lost {after} after {'a start from the beginning' if fresh else 'its restore'}"


def returned(loss: str, checkpoint_epoch: float) -> str:
    """Return the comment for a job that was restored from the same image again."""
    return f"{LOST}{reason(loss)}; it has returned to its checkpoint of {format_time(checkpoint_epoch)}"


def started_over(loss: str, why: str) -> str:
    """Return the comment for a job that starts from its beginning after a loss."""
    return f"{LOST}{reason(loss)}; it has started from its beginning: {reason(why)}"


def format_time(epoch: float) -> str:
    """Return a time for users, in UTC."""
    return utc(datetime.fromtimestamp(epoch, UTC))


def restore_failure(why: str) -> str:
    """Return the comment for a job that was not restored."""
    return f"{HELD}{reason(why)}"


def next_try(job: str, retry_epoch: float | None) -> str:
    """Return how a restore that failed is retried. ``retry_epoch``: when the agent does it; ``None``: on request."""
    if retry_epoch is None:
        return f"try again with: slurm-affinode wake {job}"
    retry_time = named(datetime.fromtimestamp(retry_epoch, UTC), UTC)
    return f"next try after {retry_time}, or with: slurm-affinode wake {job}"


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
