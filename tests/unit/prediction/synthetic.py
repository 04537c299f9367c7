"""Synthetic submissions of a few users with repeated jobs."""

from __future__ import annotations

import numpy as np
import polars as pl

from slurm_affinode.prediction.submissions import conform

DAY_S = 86_400


def submissions(count: int = 2000, *, noise: float = 0.3, seed: int = 0) -> pl.DataFrame:
    """Return jobs of 8 users with 3 names each over 60 days; run times depend on user and name, and vary."""
    random = np.random.default_rng(seed)
    submit = np.sort(random.integers(0, 60 * DAY_S, count))
    user, name = random.integers(0, 8, count), random.integers(0, 3, count)
    run = np.round(300.0 * (1 + user) * 4.0**name * np.exp(random.normal(0, noise, count))) + 1
    wait = random.integers(0, 600, count)
    memory = 2.0**30 * (1 + user)
    return conform(pl.DataFrame({
        "number": np.arange(count), "submit_s": submit, "end_s": submit + wait + run.astype(np.int64),
        "user": [f"u{item}" for item in user], "account": ["a"] * count, "queue": ["gpu"] * count,
        "name": [f"n{item}" for item in name], "job": [f"n{item}" for item in name], "units": 1 + user % 2,
        "request_s": np.full(count, 400_000.0), "request_mem_bytes": np.full(count, 64 * 2.0**30), "run_s": run,
        "mem_bytes": memory,
    }))  # fmt: skip
