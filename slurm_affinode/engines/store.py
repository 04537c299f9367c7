"""The store of engine samples: the sample store of GPU metrics with another table.

Its devices are engines: ``device`` is derived from cluster, node, address, engine, model and rank.
"""

from __future__ import annotations

from hashlib import blake2b

import polars as pl

from slurm_affinode.base.object_url import StorePlace
from slurm_affinode.engines.metric_table import ORPHANED
from slurm_affinode.engines.schema import IDENTITY, METRICS, OWNER, SAMPLES
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.parquet.table import SampleTable

_STATE = (
    "running", "waiting", "waiting_capacity", "swapped", "kv_tokens", "block_size", "max_running", "memory_share",
    "open_files", "start_time", "uncollectable", *ORPHANED, "asleep", "error", "user", "gpus", "job",
    "prompt_lengths.list.element.le", "generation_lengths.list.element.le",
)  # fmt: skip
"""Columns with few distinct values."""


def engine_id(*identity: str | None) -> int:
    """Return the number of an engine: the 8-byte BLAKE2b digest of its identity (columns of ``IDENTITY``)."""
    # Unlike an empty text, None has no separator of its own: both may occur as a label.
    text = "\x1f".join("\x1e" if part is None else part for part in identity)
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def with_engine(identities: pl.DataFrame) -> pl.DataFrame:
    """Insert the column ``device`` (UInt64) before ``identities`` (columns of ``IDENTITY``)."""
    full = identities.select(*IDENTITY)
    numbers = [engine_id(*row) for row in full.iter_rows()]
    return full.insert_column(0, pl.Series("device", numbers, dtype=pl.UInt64))


ENGINES = SampleTable(
    title="engine metrics",
    identity=IDENTITY,
    metrics={**METRICS, **{name: dtype for name, dtype in OWNER.items() if name != "job"}},
    samples=SAMPLES,
    numbered=with_engine,
    required=("cluster", "address", "engine"),
    dictionary=_STATE,
    added=ORPHANED,
    breadth=8,
)


def engine_store(place: StorePlace) -> SampleStore:
    """Return the store of engine samples at ``place`` (``Config.serving_dir``).

    ``scan(since, until)`` returns the samples of an interval lazily: ``device`` and the columns of ``SAMPLES``.
    """
    return SampleStore(place, ENGINES)
