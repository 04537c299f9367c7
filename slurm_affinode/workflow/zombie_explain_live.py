"""The page of a job for whoever may not read the site's store, its owner first of all: the job as Slurm shows it now.

What the GPUs did comes from Prometheus, or from a stored history where that can be read. Accounting is a store of this
command alone, filled with what slurmctld knows.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import polars as pl

from slurm_affinode.config import Config
from slurm_affinode.slurm.schema import ALLOCATION_GPUS
from slurm_affinode.store.repository import Repository
from slurm_affinode.workflow import zombie_live_misfits as live
from slurm_affinode.workflow.zombies import Slurm, Snapshot


@contextlib.contextmanager
def borrowed(config: Config, slurm: Slurm) -> Iterator[Config]:
    """A configuration whose store holds what Slurm says now. Raises ``UnreachableError``."""
    with slurm() as client:
        cluster = config.cluster.name or client.config().get("ClusterName") or "default"
        snapshot = Snapshot(cluster, client.overview(), ())
    history = config.history_dir
    with tempfile.TemporaryDirectory(prefix="slurm-affinode-") as directory:
        url = f"sqlite:///{Path(directory) / 'now.sqlite'}"
        with Repository.open(url) as store:
            store.upsert(pl.concat([live.frame(snapshot, {}), live.pending(snapshot)]))
            store.upsert_allocation_gpus(allocations(snapshot))
        made = replace(config, store=replace(config.store, db=url))
        assert made.history_dir == history  # noqa: S101 - it is beside the state, not beside the store
        yield made


def allocations(snapshot: Snapshot) -> pl.DataFrame:
    """Which GPUs the running jobs have, by Slurm's numbers."""
    rows = [
        (snapshot.cluster, job.job_id, None, one.node, str(index))
        for job in snapshot.jobs for one in job.node_gpus or () for index in one.indices
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=ALLOCATION_GPUS, orient="row")
