"""Tidying a store: images whose job is over, broken writes, and what was set aside of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from slurm_affinode.checkpoint import rootdir
from slurm_affinode.checkpoint.entries import BAD, GONE
from slurm_affinode.checkpoint.interface import ImageDamaged
from slurm_affinode.checkpoint.writer import TMP, locked
from slurm_affinode.core.suspension import of_this_run, owns
from slurm_affinode.model.suspension import LiveRun, Manifest

Load = Callable[[str], Manifest]
"""The manifest of an entry. Raises ``ImageDamaged``."""


def by_job(live: Collection[LiveRun]) -> dict[int, list[LiveRun]]:
    """Runs by the id of their job."""
    runs: dict[int, list[LiveRun]] = {}
    for run in live:
        runs.setdefault(run.key.job_id, []).append(run)
    return runs


def stale(job_fd: int, load: Load, runs: Sequence[LiveRun], *, now: float, young_s: float) -> list[str]:
    """Entries of a job's directory that nobody needs any more."""
    found = []
    for entry in rootdir.names(job_fd):
        try:
            age_s = now - os.stat(entry, dir_fd=job_fd, follow_symlinks=False).st_mtime
        except FileNotFoundError:  # another node sweeps, too
            continue
        if entry.endswith(GONE) or (age_s >= young_s and not _needed(job_fd, entry, load, runs)):
            found.append(entry)
    return found


def _needed(job_fd: int, entry: str, load: Load, runs: Sequence[LiveRun]) -> bool:
    if entry.endswith(BAD):
        return bool(runs)
    if entry.endswith(TMP):
        if locked(job_fd, entry):
            return True
        # A copy that may be taken up has its manifest already; a broken dump has none.
        with suppress(ImageDamaged, ValueError):
            return _of_one(load(entry), runs)
        return False
    if not entry.isdecimal():
        return False
    try:
        found = load(entry)
    except ImageDamaged:  # it is evidence, and the job may be held because of it
        return bool(runs)
    return _of_one(found, runs)


def _of_one(found: Manifest, runs: Sequence[LiveRun]) -> bool:
    return any(owns(found, run) or of_this_run(found, run) for run in runs)
