"""What a stored history holds."""

from __future__ import annotations

from slurm_affinode.history.store import SampleStore


def values(store: SampleStore, column: str = "util_pct") -> list[object]:
    """One column of everything, in order."""
    return store.scan().collect()[column].to_list()


def files(store: SampleStore) -> set[str]:
    """The Parquet files of all days."""
    return {path.name for path in store.root.glob("day=*/*.parquet")}
