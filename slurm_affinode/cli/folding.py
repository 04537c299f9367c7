"""``--dask``: where a command folds samples, examines GPUs and engines, and replays queues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slurm_affinode.analysis.join import kernel
from slurm_affinode.analysis.waste import Fold
from slurm_affinode.base.config import Config
from slurm_affinode.base.spread import Spreading
from slurm_affinode.cli.options import warn


@contextmanager
def spreading(address: str | None, config: Config) -> Iterator[Spreading | None]:
    """Return the ``Spreading`` to the workers of that Dask scheduler or of Slurm, if there is one."""
    if address is None:
        yield None
        return
    from slurm_affinode.pipeline import dask_workers  # noqa: PLC0415 - as below

    with dask_workers.connected(address, config.dask, config.state_dir, warn) as workers:
        yield workers.during


@contextmanager
def folding(address: str | None, config: Config) -> Iterator[Fold]:
    """Return the fold of this machine or, with ``address``, of the workers of that Dask scheduler or of Slurm."""
    if address is None:
        yield kernel.run_all
        return
    from slurm_affinode.pipeline import dask_workers  # noqa: PLC0415 - an extra, and it takes half a second

    with dask_workers.connected(address, config.dask, config.state_dir, warn) as workers:
        yield workers.fold
