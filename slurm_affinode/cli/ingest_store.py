"""The store of a command that takes something in, or only looks at it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from slurm_affinode.config import Config
from slurm_affinode.store.repository import Repository


def store_unless(dry_run: bool, config: Config) -> AbstractContextManager[Repository | None]:
    """The store of the configuration, made where there is none yet; ``None`` in a dry run."""
    return nullcontext() if dry_run else Repository.open(config.db_url)
