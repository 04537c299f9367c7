"""Findings among 100,000 running jobs: ``python benchmarks/bench_zombies.py [--jobs 100000] [--hours 3] [--keep DIR]``.

Builds a store with that many running jobs, one GPU each and one sample a minute, a tenth of them squatting, and 5,000
jobs that wait; then finds what ``slurm-affinode zombies list`` finds, in this process. Printed: the seconds, how often
the store and Slurm were asked (once each, however many jobs there are), and the peak memory. The limit is 60 s.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import polars as pl

from slurm_affinode.config import Config, StoreConfig
from slurm_affinode.history.identity import with_device
from slurm_affinode.history.schema import IDENTITY
from slurm_affinode.history.store import SampleStore
from slurm_affinode.slurm.schema import JOBS, conform
from slurm_affinode.store import reads
from slurm_affinode.store.repository import Repository
from slurm_affinode.workflow import zombies

LIMIT_S = 60.0
PER_NODE, STEP_S, WAITING = 8, 60, 5000
END = datetime(2026, 11, 2, 12, tzinfo=UTC)


def identities(count: int) -> pl.DataFrame:
    """The GPUs of the cluster."""
    number = pl.int_range(count, eager=True)
    rows = pl.DataFrame({"number": number}).select(
        pl.lit("bench").alias("cluster"),
        pl.format("gpu{}", pl.col("number") // PER_NODE).alias("node"),
        pl.format("GPU-{}", pl.col("number").cast(pl.String).str.zfill(12)).alias("uuid"),
        (pl.col("number") % PER_NODE).alias("index"),
        pl.lit("NVIDIA A100-SXM4-80GB").alias("model"),
    )
    return with_device(rows.select(
        (pl.col(name) if name in rows.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in IDENTITY.items()
    ))  # fmt: skip


def samples(devices: np.ndarray, hours: float, idle: np.ndarray) -> Iterator[pl.DataFrame]:
    """In the order of the device number, some thousand GPUs at a time."""
    times = np.arange(int(END.timestamp() - hours * 3600), int(END.timestamp()), STEP_S) * 1000
    rng = np.random.default_rng(7)
    order = np.argsort(devices)
    for block in np.array_split(order, max(1, len(order) // 4000)):
        rows = len(block) * len(times)
        busy = np.repeat(~idle[block], len(times))
        yield pl.DataFrame({
            "device": np.repeat(devices[block], len(times)),
            "time": pl.Series(np.tile(times, len(block))).cast(pl.Datetime("ms", "UTC")),
            "util_pct": np.where(busy, rng.integers(40, 100, rows), 0).astype(np.float32),
            "fb_used_mib": np.where(busy, 30_000, 79_000).astype(np.float32),
            "fb_total_mib": np.full(rows, 81_920, np.float32),
            "job": np.repeat(100_000 + block, len(times)),
        }).with_columns(pl.col("job").cast(pl.String))  # fmt: skip


def jobs(count: int, hours: float) -> pl.DataFrame:
    """Running jobs, one GPU each, and jobs that wait."""
    number = pl.col("i")
    begun = pl.lit(END - timedelta(hours=hours + 1))
    running = pl.DataFrame({"i": np.arange(count + WAITING)}).select(
        pl.lit("bench").alias("cluster"), (100_000 + number).alias("job_id"), begun.alias("submit"),
        begun.alias("eligible"), pl.when(number < count).then(begun).alias("start"),
        pl.format("user{}", number % 350).alias("user"), pl.format("part{}", number % 5).alias("partition"),
        pl.when(number < count).then(pl.lit("RUNNING")).otherwise(pl.lit("PENDING")).alias("state"),
        pl.when(number < count).then(pl.format("gpu{}", number // PER_NODE)).alias("node_list"),
        pl.lit(1).alias("nodes"), pl.when(number < count).then(1).alias("gpus"), pl.lit(1).alias("req_gpus"),
        pl.lit(8).alias("cpus"), pl.lit(86_400).alias("timelimit_s"),
    )  # fmt: skip
    return conform(running, JOBS)


def build(state: Path, count: int, hours: float) -> None:
    """Fill a state directory."""
    state.mkdir(parents=True, exist_ok=True)
    with Repository.open(f"sqlite:///{state / 'affinode.sqlite'}") as store:
        store.upsert(jobs(count, hours))
    described = identities(count)
    idle = np.arange(count) % 10 == 0
    with closing(SampleStore(state / "history")) as history:
        history.write_day(END.date(), samples(described["device"].to_numpy(), hours, idle), described)


def main() -> int:
    """Build, run, say how long it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--hours", type=float, default=3.0)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        state = options.keep or Path(directory)
        if not (state / "affinode.sqlite").exists():
            began = time.monotonic()
            build(state, options.jobs, options.hours)
            print(f"built in {time.monotonic() - began:.1f} s")
        config = replace(Config(), store=StoreConfig(state_dir=state))
        asked: list[str] = []
        frame = reads._frame
        with mock.patch.object(reads, "_frame", lambda *args: (asked.append(args[1].name), frame(*args))[1]):
            began = time.monotonic()
            found = zombies.find(config, zombies.Request(), slurm=None, now=END)
            took = time.monotonic() - began
    squatters = sum(one.kind == "squatter" for one in found.findings)
    waited = sum(one.impact.jobs for one in found.findings if one.impact is not None)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{found.jobs:,} running GPU jobs, {len(found.findings):,} findings ({squatters:,} squatters): {took:.1f} s")
    print(f"queries of the store: {len(asked)} ({', '.join(asked)}); of Slurm: 0 (1 where it can be asked)")
    print(f"waiting jobs counted: {waited:,}; peak memory {peak:.2f} GiB; limit {LIMIT_S:g} s")
    return 0 if took <= LIMIT_S and squatters == -(-options.jobs // 10) else 1


if __name__ == "__main__":
    sys.exit(main())
