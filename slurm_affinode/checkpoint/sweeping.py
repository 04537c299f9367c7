"""Tidying a store: images whose job is over or has a newer one, broken writes, and what was set aside of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from slurm_affinode.checkpoint import rootdir
from slurm_affinode.checkpoint.entries import BAD, GONE, number
from slurm_affinode.checkpoint.interface import Image, ImageDamaged
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


def newest(images: Iterable[object], live: Collection[LiveRun]) -> dict[str, int]:
    """Name of a job -> number of the newest of these images that its present run may take: older ones it never takes.

    ``images``: of the store that every node sees. An image of a run that has not been requeued yet does not count: its
    suspension may still be taken back, and the job is left with the one before it.
    """
    runs, found = by_job(live), dict[str, int]()
    for image in images:
        if isinstance(image, Image):
            facts = image.manifest
            if any(owns(facts, run) for run in runs.get(facts.key.job_id, [])):
                found[facts.key.name] = max(facts.seq, found.get(facts.key.name, 0))
    return found


def stale(
    job_fd: int,
    load: Load,
    runs: Sequence[LiveRun],
    *,
    now: float,
    young_s: float,
    newest_seq: int,
    kept: bool = False,
) -> list[str]:
    """Entries of a job's directory that nobody needs any more. ``kept``: only those that nobody can ever use."""
    found = []
    for entry in rootdir.names(job_fd):
        try:
            age_s = now - os.stat(entry, dir_fd=job_fd, follow_symlinks=False).st_mtime
        except FileNotFoundError:  # another node sweeps, too
            continue
        if entry.endswith(GONE) or (age_s >= young_s and not _needed(job_fd, entry, load, runs, newest_seq, kept=kept)):
            found.append(entry)
    return found


def _needed(job_fd: int, entry: str, load: Load, runs: Sequence[LiveRun], newest_seq: int, *, kept: bool) -> bool:
    if kept and not entry.endswith(TMP):
        return True
    if entry.endswith(BAD):
        return bool(runs)
    if entry.endswith(TMP):
        if locked(job_fd, entry):
            return True
        if _older(entry, newest_seq) and not kept:
            return False
        # A copy that may be taken up has its manifest already; a broken dump has none.
        with suppress(ImageDamaged, ValueError):
            found = load(entry)
            return kept or _of_one(found, runs)
        return False
    if not entry.isdecimal() or _older(entry, newest_seq):
        return False
    try:
        found = load(entry)
    except ImageDamaged:  # it is evidence, and the job may be held because of it
        return bool(runs)
    return _of_one(found, runs)


def _older(entry: str, newest_seq: int) -> bool:
    seq = number(entry)
    return seq is not None and seq < newest_seq


def _of_one(found: Manifest, runs: Sequence[LiveRun]) -> bool:
    return any(owns(found, run) or of_this_run(found, run) for run in runs)
