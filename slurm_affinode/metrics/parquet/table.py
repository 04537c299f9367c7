"""The table that a sample store holds: its identity columns, metrics and encodings.

A store has one table. Each row is a sample of one *device*: a GPU, or whatever else the table measures. Its number is
derived from the identity columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import polars as pl
import pyarrow as pa

from slurm_affinode.metrics.identity import with_device
from slurm_affinode.metrics.schema import IDENTITY, METRICS, SAMPLES, TIME

ORIGIN = "origin"
"""Column with the source and ingest of a row: ``source_number(name) << 32``, plus the number of the ingest, which
increases. 0: several sources; null: unknown."""


def source_number(name: str) -> int:
    """Return the number of a source in ``ORIGIN``: 1 to 2**32 - 1."""
    return int.from_bytes(blake2b(name.encode(errors="surrogateescape"), digest_size=4).digest()) or 1


@dataclass(frozen=True)
class SampleTable:
    """Definition of a table of samples. ``device``, ``time`` and ``job`` (IDs joined by ``,``) exist in every table."""

    title: str
    """For messages, in the plural."""
    identity: Mapping[str, pl.DataType]
    metrics: Mapping[str, pl.DataType]
    samples: Mapping[str, pl.DataType]
    """The columns of readers, in their order: identity, time, metrics and ``job``."""
    numbered: Callable[[pl.DataFrame], pl.DataFrame]
    """Insert the column ``device`` (UInt64) before identity columns."""
    required: tuple[str, ...]
    """Identity columns that readers must set."""
    dictionary: tuple[str, ...]
    """Columns encoded with a dictionary, besides the identity."""
    described: tuple[str, ...] = ()
    """Identity columns that may have several values for one device: they are not part of its number."""
    adopted: bool = False
    """Whether a device may be known by several identities, which compaction unites."""
    largest: tuple[str, ...] = ()
    """Metrics of which the largest of the values of several sources counts for a device and time; of others, the last.
    A table with such metrics has the column ``ORIGIN``."""
    added: tuple[str, ...] = ()
    """Metrics that files of earlier versions may lack: they are unknown there."""
    breadth: int = 1
    """Factor by which a row is larger than a GPU sample: as many fewer are in memory and in a row group."""

    @cached_property
    def columns(self) -> dict[str, pl.DataType]:
        """The columns of rows in memory, with ``device`` in place of the identity columns."""
        origin = {ORIGIN: pl.UInt64()} if self.largest else {}
        return {"device": pl.UInt64(), "time": TIME, **self.metrics, "job": pl.String(), **origin}

    @cached_property
    def devices(self) -> dict[str, pl.DataType]:
        """The columns of the table of devices of a part."""
        return {
            "device": pl.UInt64(),
            **self.identity,
            "rows": pl.Int64(),  # of the device in the part; the running total gives the offsets
            "first": TIME,
            "last": TIME,
            "step_ms": pl.Int64(),  # ``sampling_step``; None with fewer than two samples
        }

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """The identity columns of text."""
        return tuple(name for name, dtype in self.identity.items() if dtype == pl.String())

    @cached_property
    def written(self) -> pa.Schema:
        """The schema of the file of samples."""
        metrics = [(name, _arrow(dtype)) for name, dtype in self.metrics.items()]
        identity = [(name, _arrow(dtype)) for name, dtype in self.identity.items()]
        more = [("job", _TEXT), *([(ORIGIN, pa.uint64())] if self.largest else [])]
        return pa.schema([("device", pa.uint64()), ("time", pa.timestamp("ms", tz="UTC")), *metrics, *more, *identity])


_TEXT = pa.dictionary(pa.int32(), pa.string())


def _arrow(dtype: pl.DataType) -> pa.DataType:
    if dtype == pl.String():
        return _TEXT
    arrow_type = pl.Series([], dtype=dtype).to_arrow().type
    # Polars writes large lists, whose offsets need twice the space.
    return pa.list_(arrow_type.value_type) if pa.types.is_large_list(arrow_type) else arrow_type


GPU = SampleTable(
    title="GPU metrics",
    identity=IDENTITY,
    metrics=METRICS,
    samples=SAMPLES,
    numbered=with_device,
    required=("cluster", "node"),
    dictionary=("device", "index", "job", ORIGIN, "util_pct", "fb_used_mib", "fb_total_mib", "xid"),
    described=("pci", "index", "mig_profile", "model"),
    # Sources that differ may not make a GPU idle, nor hide an error, whatever the order in which they are ingested.
    largest=tuple(METRICS),
    adopted=True,
)
