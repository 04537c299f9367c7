"""Agents as the commands reach them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from slurm_affinode.agent.reach import Reach
from slurm_affinode.config import Config
from slurm_affinode.slurm.backends import open_client


@contextlib.contextmanager
def reach_of(config: Config) -> Iterator[Reach]:
    """A way to the agents, for one command."""
    reach = Reach(config, functools.partial(open_client, config.slurm.backend))  # type: ignore[arg-type]
    try:
        yield reach
    finally:
        reach.close()
