"""A site for the nightly run: a state directory, a clock, scripted sources."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

from slurm_affinode.base import config as configuration
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import SAMPLES
from slurm_affinode.pipeline import stored_accounting
from slurm_affinode.pipeline.nightly import Failure, NightlyOutcome, Sources, run
from slurm_affinode.slurm.accounting.schema import JOBS, conform

NOW = datetime(2026, 11, 20, 4, 15, tzinfo=UTC)
"""A Friday."""


@dataclass
class Site:
    """A cluster with one node of one GPU, and a nightly run with scripted sources."""

    state: Path
    toml: str = '[cluster]\ntimezone = "UTC"\n'
    now: datetime = NOW
    accounting_error: Exception | None = None
    gpu_failure: Failure | None = None
    intervals: list[tuple[datetime, datetime]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    @property
    def config(self) -> configuration.Config:
        parsed = configuration.parse(self.toml, where="test")
        return configuration.replace(parsed, store=configuration.StoreConfig(state_dir=self.state))

    @property
    def out(self) -> Path:
        return self.config.reports_dir

    def job(self, number: int, start: datetime, hours: float, **values: object) -> None:
        """Record an ended job on the only GPU."""
        end = start + timedelta(hours=hours)
        row = {"cluster": "c", "job_id": number, "submit": start, "start": start, "end": end, "user": "ann", "gpus": 1}
        row |= {"state": "COMPLETED", "nodes": 1, "node_list": "n1", "elapsed_s": int(hours * 3600)} | values
        frame = pl.DataFrame(
            {name: [value] for name, value in row.items()}, schema_overrides={"submit": JOBS["submit"]}
        )
        with Repository.open(self.config.db_url) as store:
            store.upsert(conform(frame, JOBS))

    def samples(self, start: datetime, hours: float, *, job: int, util: float = 0.0) -> None:
        """Record a sample of the GPU per minute."""
        times = [start + timedelta(minutes=n) for n in range(int(hours * 60))]
        frame = pl.DataFrame({"time": times}).with_columns(
            cluster=pl.lit("c"), node=pl.lit("n1"), uuid=pl.lit("GPU-1"), util_pct=pl.lit(util), job=pl.lit(str(job))
        )
        columns = [
            (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
            for name, dtype in SAMPLES.items()
        ]
        store = SampleStore(self.config.history_dir)
        store.ingest(frame.select(columns), source="test")
        store.close()

    def _accounting(self, store: Repository, earliest: datetime, now: datetime) -> list[str]:
        self.intervals.append((earliest, now))
        if self.accounting_error is not None:
            raise self.accounting_error
        stored_accounting.reached(store, now, ["c"])
        return ["accounting read"]

    def _gpu(self, _store: Repository, _now: datetime) -> list[str | Failure]:
        return ["samples read", *([self.gpu_failure] if self.gpu_failure else [])]

    def night(self, **options: object) -> NightlyOutcome:
        """Run ``nightly`` once."""
        sources = Sources(self._accounting, self._gpu, lambda _store, _now: [])
        return run(self.config, sources, out=self.out, now=self.now, say=self.messages.append, **options)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A site with one job in each of the last complete day, week and month."""
    made = Site(tmp_path / "state")
    for number, (month, day) in enumerate([(10, 7), (11, 11), (11, 19)], start=1):
        start = datetime(2026, month, day, 10, tzinfo=UTC)
        made.job(number, start, 4)
        made.samples(start, 4, job=number, util=0.0 if number == 1 else 50.0)
    return made


@pytest.fixture
def unreachable() -> AffinodeError:
    """The error of a missing sacct."""
    from slurm_affinode.base.errors import UnreachableError

    return UnreachableError("sacct: no such program", hint="install it")
