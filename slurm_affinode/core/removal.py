"""Which images a sweep may remove, and when it has to stop. Pure.

A job that Slurm reports as ended needs no image any more. A job that Slurm does not know may have ended long ago, or
slurmctld has lost its state: its images are kept for a time (``suspend.keep_unknown``). And where most images of a
store would go for that reason alone, the sweep stops: it is more likely that slurmctld has lost its state than that
most jobs have ended unnoticed. An administrator has to say which it is.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from slurm_affinode.core.suspension import of_this_run, owns
from slurm_affinode.model.suspension import LiveRun, Manifest

HANDFUL = 5
"""So many images of a store may always go."""
SHARE = 0.5
"""More than this share of a store's images never goes at once because Slurm does not know their jobs."""


class Fate(StrEnum):
    """The fate of an image."""

    NEEDED = "needed"
    """It is of a job that runs or waits."""
    OVER = "over"
    """Slurm reports that its job has ended."""
    UNKNOWN = "unknown"
    """Slurm says nothing about its job: it does not list it, or another job has its number."""


def fate(manifest: Manifest, live: Collection[LiveRun], ended: Collection[LiveRun]) -> Fate:
    """Decide the fate of an image. ``live``, ``ended``: the runs that Slurm lists under the number of its job."""
    if any(owns(manifest, run) or of_this_run(manifest, run) for run in live):
        return Fate.NEEDED
    if any(owns(manifest, run) or of_this_run(manifest, run) for run in ended):
        return Fate.OVER
    return Fate.UNKNOWN


def too_many(going: int, present: int) -> bool:
    """Whether a sweep stops that would remove ``going`` of ``present`` images since Slurm does not know their jobs."""
    return going > HANDFUL and going > SHARE * present
