"""The steps in a database, which only tests read back as they were stored."""

from __future__ import annotations

import polars as pl
from sqlalchemy import true

from slurm_affinode.db import tables
from slurm_affinode.db.repository import Repository
from slurm_affinode.slurm.accounting.schema import STEPS


def stored_steps(repository: Repository) -> pl.DataFrame:
    """Return all steps, as ``STEPS``."""
    return repository._frame(tables.steps, STEPS, true())
