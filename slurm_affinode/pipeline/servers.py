"""The health of model servers, from the stored samples of their engines and of the GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

import polars as pl

from slurm_affinode.analysis.serving.diagnosis import Fleet, diagnose_all
from slurm_affinode.analysis.serving.timeline import timeline
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import NoStoreError
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.serving.schema import IDENTITY
from slurm_affinode.metrics.serving.store import engine_store
from slurm_affinode.model.serving import EngineHealth

PERIOD = timedelta(days=1)
"""Length of the period if no start is given."""


@dataclass(frozen=True, slots=True)
class ServerQuery:
    """The engines and the period of a request. Empty filters select everything."""

    since: datetime | None = None
    until: datetime | None = None
    clusters: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    """``vllm``, ``sglang``, ...; the programs, not their addresses."""
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Servers:
    """The engines found, with the period that was examined."""

    since: datetime
    until: datetime
    engines: tuple[EngineHealth, ...]
    timelines: tuple[pl.DataFrame, ...] = ()
    """``analysis.serving.timeline`` of each engine over the time from its first to its last scrape, if requested."""


def find(config: Config, query: ServerQuery, *, timelines: bool = False) -> Servers:
    """Return the health of the selected engines, with ``timelines`` for charts if these are wanted.

    The period ends with the last sample and is a day long unless the query says otherwise. Raises ``NoStoreError``
    without stored samples of engines.
    """
    with contextlib.closing(engine_store(config.serving_dir)) as store:
        span = store.span()
        if span is None:
            raise NoStoreError(
                f"no samples of engines in {config.serving_dir}",
                hint="ingest some: slurm-affinode ingest serving --help",
            )
        until = query.until or span[1] + timedelta(milliseconds=1)
        since = query.since or until - PERIOD
        samples = store.scan(since, until)
        for column, wanted in (
            ("cluster", query.clusters), ("node", query.nodes), ("user", query.users), ("job", query.jobs),
            ("engine", query.engines), ("address", query.addresses),
        ):  # fmt: skip
            if wanted:
                samples = samples.filter(pl.col(column).is_in(wanted))
        with _gpu_samples(config, since, until) as gpus:
            found = tuple(diagnose_all(samples, Fleet(gpus=gpus)))
            charts = tuple(_timeline(one, samples, gpus) for one in found) if timelines else ()
            return Servers(since, until, found, charts)


def _timeline(health: EngineHealth, samples: pl.LazyFrame, gpus: pl.LazyFrame | None) -> pl.DataFrame:
    same = [pl.col(name).eq_missing(pl.lit(getattr(health.key, name), pl.String)) for name in IDENTITY]
    until = health.until + timedelta(seconds=1)
    own = samples.filter(pl.all_horizontal(same), pl.col("time").is_between(health.since, health.until)).collect()
    held = None
    if gpus is not None and health.gpus:
        during = pl.col("time").is_between(health.since, until)
        held = gpus.filter(pl.col("uuid").is_in(health.gpus), during).collect()
    return timeline(own, held, health.since, until)


@contextlib.contextmanager
def _gpu_samples(config: Config, since: datetime, until: datetime) -> Iterator[pl.LazyFrame | None]:
    with contextlib.closing(SampleStore(config.history_dir)) as store:
        yield store.scan(since, until) if store.parts(since, until) else None
