"""Samples on Dask workers: ``python benchmarks/bench_scale.py [--samples 20000000] [--workers 1,2] [--model]``.

Writes the samples and allocations of ``bench_join.py``, folds them on workers with one thread each, and prints seconds,
samples/s, efficiency relative to one worker, and the peak memory of a worker. The totals must equal those of one
process to the last bit. Peers in the same run: Dask DataFrame on as many workers (``merge_asof`` of each file and sums
by run, without idle windows), and DuckDB on all cores.

``--model`` measures the constants of a range (seconds of a worker, seconds of the merge, bytes of its result, bytes of
a sample on disk), predicts the time for ten times as many samples on the last number of workers, measures that as well,
and prints the times that follow for 10^9, 10^10 and 10^11 samples.
"""

from __future__ import annotations

import os

os.environ["POLARS_MAX_THREADS"] = "1"  # a worker reads in one thread, and so does this process

import argparse
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import bench_join
import numpy as np
import pandas as pd
import polars as pl
from bench_join import COLUMNS, START, Plan
from distributed import Client, LocalCluster
from ratios import MISSED, peak_gib, report

from slurm_affinode.analysis import samples, segments
from slurm_affinode.analysis.join import kernel
from slurm_affinode.analysis.result import Thresholds, Totals
from slurm_affinode.analysis.samples import StoredSamples
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.pipeline.dask_workers import DaskWorkers

EFFICIENCY, MOST_GIB, MODEL_ERROR = 0.8, 1.0, 0.25
SIZES = (10**9, 10**10, 10**11)
MANY = (16, 128, 1024)


@dataclass(frozen=True, slots=True)
class Work:
    """The input of a fold."""

    index: samples.Index
    allocations: segments.Allocations
    cells: segments.Cells


def prepared(directory: Path, plan: Plan) -> Work:
    """Return the work of the samples and allocations in ``directory``."""
    table = pl.read_parquet(directory / "allocations.parquet")
    index = samples.read_index(SampleStore(directory / "history"), START, plan.until, max_gap_steps=3)
    rows = index.devices.select("device").with_row_index("at")
    row = table.select("device").join(rows, on="device", how="left", maintain_order="left")["at"]
    allocations = segments.Allocations.of(row, table["run"], table["start"], table["end"])
    since_ms, until_ms = (int(moment.timestamp() * 1000) for moment in (START, plan.until))
    cells = segments.build(allocations, taking_part=np.ones(plan.devices, bool), since=since_ms, until=until_ms)
    return Work(index, allocations, cells)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of ``work``, and what it returns."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def same(totals: Totals, other: Totals) -> bool:
    """Return whether two totals are equal to the last bit."""
    return all(np.array_equal(getattr(totals, f.name), getattr(other, f.name), equal_nan=True) for f in fields(totals))


def on_workers(work: Work, count: int) -> tuple[float, float, Totals]:
    """Return seconds, peak GiB of a worker, and totals, with ``count`` workers. Their imports are not timed."""
    with (
        LocalCluster(n_workers=count, threads_per_worker=1, dashboard_address=":0", memory_limit=0) as cluster,
        Client(cluster) as client,
    ):
        client.run(_imported)
        workers = DaskWorkers(client, cluster.scheduler_address, 60)
        seconds, totals = timed(lambda: workers.fold(work.index, work.allocations, work.cells, Thresholds()))
        return seconds, max(client.run(peak_gib).values()), totals


def _imported() -> None:
    from slurm_affinode.analysis.join import native  # noqa: PLC0415 - on the worker

    native.library()


def dask_frames(directory: Path, count: int) -> float:
    """Return the seconds of Dask DataFrame on ``count`` workers."""
    import dask.dataframe as dd  # noqa: PLC0415 - takes a second

    runs = pd.read_parquet(directory / "allocations.parquet").sort_values("start")
    runs["begin"] = pd.to_datetime(runs["start"], unit="ms", utc=True).astype("datetime64[ms, UTC]")
    runs["until"] = pd.to_datetime(runs["end"], unit="ms", utc=True).astype("datetime64[ms, UTC]")
    runs = runs[["device", "run", "begin", "until"]]

    def sums(part: pd.DataFrame) -> pd.DataFrame:
        day = part.sort_values("time", kind="stable")
        met = pd.merge_asof(day, runs, left_on="time", right_on="begin", by="device")
        met = met[met["time"] < met["until"]]
        fractions = met[["engine_active", "sm_active", "dram_active"]].max(axis=1) * 100
        idle = np.maximum(met["util_pct"].to_numpy(), fractions.to_numpy()) <= 0
        met = met.assign(idle=idle, fb=met["fb_used_mib"].astype("float64"), power=met["power_w"].astype("float64"))
        return met.groupby("run", as_index=False).agg(
            samples=("fb", "size"), idle=("idle", "sum"), fb=("fb", "sum"), power=("power", "sum")
        )

    with (
        LocalCluster(n_workers=count, threads_per_worker=1, dashboard_address=":0", memory_limit=0) as cluster,
        Client(cluster),
    ):
        files = [str(path) for path in bench_join.paths(directory)]
        frame = dd.read_parquet(files, columns=["device", *COLUMNS], split_row_groups=8)
        return timed(lambda: frame.map_partitions(sums).groupby("run").sum().compute())[0]


@dataclass(frozen=True, slots=True)
class Constants:
    """Of one sample, measured in one process."""

    worker_s: float
    merge_s: float
    result_bytes: float
    disk_bytes: float
    start_s: float
    """Of a report with workers, once: the index is read, and the input sent."""

    def seconds(self, count: float, workers: int) -> float:
        """Return the seconds for ``count`` samples: workers fold while the results are merged."""
        return self.start_s + max(count * self.worker_s / workers, count * self.merge_s)


def constants(work: Work, directory: Path, seconds: float, workers: int) -> Constants:
    """Measure; ``seconds`` is the time with ``workers`` for the same samples."""
    fold_input = kernel.FoldInput(StoredSamples(work.index.store.root, ()), work.index.pieces, work.cells, Thresholds())
    todo = list(kernel.ranges_of(work.index))
    fold_s, folded = timed(lambda: [kernel.fold_range(rows, fold_input) for rows in todo])
    merge_s, _ = timed(lambda: kernel.total(folded, work.allocations, work.cells))
    rows = work.index.rows
    result = sum(len(pickle.dumps(part, protocol=5)) for part in folded) / rows
    disk = sum(path.stat().st_size for path in bench_join.paths(directory)) / rows
    return Constants(fold_s / rows, merge_s / rows, result, disk, max(0.0, seconds - fold_s / workers))


def main() -> int:
    """Measure; return ``MISSED`` if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000_000)
    parser.add_argument("--allocations", type=int, default=53_000)
    parser.add_argument("--workers", default="1,2", help="numbers of workers")
    parser.add_argument("--peers", default="dask,duckdb", help="peers")
    parser.add_argument("--model", action="store_true", help="predict, and check the prediction")
    options = parser.parse_args()
    counts = [int(text) for text in options.workers.split(",")]
    missed = []
    with tempfile.TemporaryDirectory() as name:
        directory, plan = Path(name), Plan.of(options.samples, options.allocations)
        rows = bench_join.make(plan, directory)
        work = prepared(directory, plan)
        print(f"{rows:,} samples, {len(work.allocations):,} allocations, {os.cpu_count()} cores")
        whole = kernel.run_all(work.index, work.allocations, work.cells, Thresholds())
        times = {}
        for count in counts:
            times[count], peak, totals = on_workers(work, count)
            efficiency = times[counts[0]] * counts[0] / (times[count] * count)
            print(f"  {count} workers: {times[count]:6.2f} s, {rows / times[count] / 1e6:5.1f} M samples/s, "
                  f"efficiency {efficiency:.2f}, {peak:.2f} GiB a worker")  # fmt: skip
            if not same(totals, whole):
                sys.exit("the totals of the workers differ")
            if peak > MOST_GIB:
                missed.append("memory")
            if count <= (os.cpu_count() or 1) and efficiency < EFFICIENCY:
                missed.append("efficiency")
        last = counts[-1]
        figures = {"of_last_to_first": times[last] * last / (times[counts[0]] * counts[0])}
        peers = options.peers.split(",") if options.peers else []
        if "dask" in peers:
            seconds = dask_frames(directory, last)
            figures["to_dask_dataframe"] = times[last] / seconds
            print(f"  Dask DataFrame, {last} workers: {seconds:6.2f} s, {seconds / times[last]:.1f} times ours")
        if "duckdb" in peers:
            seconds = bench_join.measure("duckdb", directory, plan)["seconds"]
            figures["to_duckdb"] = times[last] / seconds
            print(f"  DuckDB, all cores: {seconds:6.2f} s, {seconds / times[last]:.1f} times ours")
        report(**figures)
        if options.model:
            missed += model(constants(work, directory, times[last], last), plan, last)
    print("  goals met" if not missed else f"  missed: {', '.join(missed)}")
    return MISSED if missed else 0


def model(measured: Constants, plan: Plan, workers: int) -> list[str]:
    """Print the model, check it with ten times as many samples, and return what missed its goal."""
    print(f"  a sample: {measured.worker_s * 1e9:.1f} ns of a worker, {measured.merge_s * 1e9:.2f} ns of the merge, "
          f"{measured.result_bytes:.2f} bytes of results, {measured.disk_bytes:.1f} bytes on disk; "
          f"start {measured.start_s:.1f} s")  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        larger = Plan(plan.devices, plan.days * 10, plan.allocations * 10)
        rows = bench_join.make(larger, Path(name))
        seconds, _, _ = on_workers(prepared(Path(name), larger), workers)
    predicted = measured.seconds(rows, workers)
    print(f"  {rows:,} samples, {workers} workers: {seconds:.1f} s, predicted {predicted:.1f} s")
    for size in SIZES:
        tasks = size / kernel.MOST_ROWS
        hours = {many: measured.seconds(size, many) / 3600 for many in MANY}
        spans = ", ".join(f"{many}: {hour * 60:.1f} min ({many * hour:.1f} core-hours)" for many, hour in hours.items())
        print(f"  {size:.0e} samples: {size * measured.disk_bytes / 1e9:,.0f} GB, {tasks:,.0f} tasks, "
              f"{size * measured.result_bytes / 1e9:.1f} GB of results; workers {spans}")  # fmt: skip
    return ["model"] if abs(predicted / seconds - 1) > MODEL_ERROR else []


if __name__ == "__main__":
    sys.exit(main())
