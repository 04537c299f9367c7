"""Contents of a stored history."""

from __future__ import annotations

from slurm_affinode.metrics.parquet.store import SampleStore


def values(store: SampleStore, column: str = "util_pct") -> list[object]:
    """Return one column of all samples, in order."""
    return store.scan().collect()[column].to_list()


def files(store: SampleStore) -> set[str]:
    """Return the names of the Parquet files of all days."""
    return {path.name for path in store.root.glob("day=*/*.parquet")}
