"""Findings from averages per run, as ClusterCockpit and jobstats keep them.

An average of exactly 0 says that every moment was 0; any other says nothing of idle time. So the limit of activity is 0
here, whatever the signatures say, and nobody is accused for a low average.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import polars as pl

from slurm_affinode.analysis.result import Thresholds, WasteQuery
from slurm_affinode.config import Config
from slurm_affinode.history import averages
from slurm_affinode.history.averages import NOTE
from slurm_affinode.history.store import SampleStore
from slurm_affinode.history.traces import clustercockpit as cockpit
from slurm_affinode.slurm.schema import JOBS, conform
from slurm_affinode.workflow import zombies
from slurm_affinode.workflow.zombies import Found, Request


def find(config: Config, request: Request, jobs: pl.DataFrame, per_run: pl.DataFrame) -> Found:
    """Findings among ``jobs`` (``JOBS``) with ``per_run`` (``averages.AVERAGES``), over the whole span of the jobs."""
    file = zombies.signatures(config)
    if request.window_s is not None:
        file = file.with_window(request.window_s)
    strict = [replace(one, compute=replace(one.compute, at_most_pct=0.0)) for one in file.signatures]
    started = jobs.drop_nulls("start")
    first, last = started["start"].min(), started["end"].max()
    now = datetime.now(UTC)
    since = first if isinstance(first, datetime) else now
    until = last if isinstance(last, datetime) else now
    query = WasteQuery(since, max(until, since), request.clusters, request.partitions, request.accounts, request.users,
                       Thresholds(floors_pct={}))  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="slurm-affinode-") as directory:
        history = SampleStore(Path(directory))
        try:
            averages.fill(history, per_run)
            held = zombies.hold(query, jobs, averages.allocation_gpus(per_run), history, strict, now)
            waiting = zombies.waiting(jobs, jobs.head(0), query)
            return zombies.judge(config, request, held, strict, waiting, (), notes=(NOTE,))
        finally:
            history.close()


def clustercockpit(config: Config, request: Request, path: Path) -> Found:
    """Findings in the job database of ClusterCockpit. Raises ``InputError``."""
    read = cockpit.read(path)
    types = {name: dtype for name, dtype in JOBS.items() if any(name in row for row in read.jobs)}
    jobs = conform(pl.DataFrame(read.jobs, schema_overrides=types, infer_schema_length=None), JOBS)
    found = find(config, request, jobs, read.averages)
    return replace(found, notes=(*found.notes, *read.notes, *read.problems))
