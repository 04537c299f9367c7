"""What no GPU can measure: values of another unit, or of a fault."""

from __future__ import annotations

import polars as pl

from slurm_affinode.history.reading import Notes

_MOST = {
    "util_pct": (100, "%"), "engine_active": (1, ""), "sm_active": (1, ""), "tensor_active": (1, ""),
    "dram_active": (1, ""), "fb_used_mib": (2**24, "MiB"), "fb_total_mib": (2**24, "MiB"), "power_w": (100_000, "W"),
}  # fmt: skip
"""Metric -> the most that it can be, and its unit for people."""
_NOISE = 1.1
"""Counters that are read one after the other may give a little more than everything."""


def possible(samples: pl.DataFrame, notes: Notes) -> pl.DataFrame:
    """``samples`` (``SAMPLES``) with values that cannot be as not measured; how many those are goes to ``notes``."""
    beyond = {name: pl.col(name) > most * _NOISE for name, (most, _) in _MOST.items() if name in samples.columns}
    counts = samples.select(above.sum().alias(name) for name, above in beyond.items()).row(0, named=True)
    bad = [name for name, count in counts.items() if count]
    for name in bad:
        most, unit = _MOST[name]
        above = f"{name} above {most:,} {unit}".rstrip()
        notes.decide(f"values of {above} cannot be and were taken as not measured", counts[name])
    return samples.with_columns(pl.when(~beyond[name]).then(pl.col(name)) for name in bad) if bad else samples
