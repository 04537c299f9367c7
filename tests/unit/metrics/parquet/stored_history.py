"""Contents of a stored history."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_affinode.metrics.parquet.store import SampleStore

in_directory = pytest.mark.parametrize("store", ["directory"], indirect=True)
"""For tests of the files of a directory."""


def values(store: SampleStore, column: str = "util_pct") -> list[object]:
    """Return one column of all samples, in order."""
    return store.scan().collect()[column].to_list()


def files(store: SampleStore) -> set[str]:
    """Return the names of the Parquet files of all days; of objects, without those that wait for their deletion."""
    if isinstance(store.place, Path):
        return {path.name for path in store.root.glob("day=*/*.parquet")}
    from slurm_affinode.metrics.parquet.objects import client

    waiting = {part.name for part in store.files.load().removed}
    names = [Path(listed.name) for listed in client(store.place.url).names()]
    return {name.name for name in names if name.suffix == ".parquet" and name.stem.partition("-")[2] not in waiting}
