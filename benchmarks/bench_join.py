"""The join: ``python benchmarks/bench_join.py [--samples 100000000] [--allocations 265000] [--peers polars,duckdb]``.

Writes synthetic GPU metrics (a sample every 30 s, periods of busy, low and idle, gaps, six metrics with the digits of
DCGM; a tenth of the GPUs lacks one) and allocations on these GPUs. Then it joins and aggregates them in several ways,
each in a process of its own, and prints seconds, peak memory and ratios of one run:

``ours``     the join of the reports: per allocation GPU time by class of activity, framebuffer x time, energy, peaks,
             idle windows.
``scan``     Polars reads the same columns of the same files on all cores and sums each: the limit.
``polars``   join_asof and group_by, the same sums as DuckDB; all samples are in memory.
``duckdb``   ASOF JOIN and GROUP BY: per allocation the number of samples, idle samples, sum and maximum of the
             framebuffer, sum of power. No idle windows and no time until the next sample: less work than ``ours``.
``pandas``   merge_asof and groupby, the same sums as DuckDB, a day at a time so that it fits in memory.

The join and the scan take turns; the fastest run of each counts, as other work on the machine only adds time.
The ratio of the medians is printed as well.

Samples are exactly 30 s apart, and allocations begin and end on that grid, so that the number of samples is
proportional to time: the sums of all peers must agree, which is checked. ``--samples 1000000000 --peers ''`` shows that
memory does not grow. Several numbers, as in ``--samples 10000,100000,1000000``, are measured one after the other, with
allocations in proportion to the samples (``--allocations`` with the last number), and a table of seconds and CPU
seconds follows; no ratio is kept.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from ratios import MISSED, peak_gib, report

from slurm_affinode.analysis import measures, samples, segments
from slurm_affinode.analysis.join import kernel
from slurm_affinode.analysis.result import Thresholds
from slurm_affinode.metrics.identity import with_device
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import IDENTITY

START = datetime(2026, 1, 1, tzinfo=UTC)
STEP_S, DAY_S = 30, 86_400
PER_DAY = DAY_S // STEP_S
COLUMNS = ("time", "util_pct", "engine_active", "sm_active", "dram_active", "fb_used_mib", "power_w")
ACTIVITY = "greatest(s.util_pct, s.engine_active * 100, s.sm_active * 100, s.dram_active * 100)"
PER_NODE = 8
GAP_SHARE = 0.2
"""Share of device-days that have a gap of half an hour."""
FEW = 2_000_000
"""Samples up to which peers are measured as often as ours."""
TARGETS = {"pandas": 5.0, "duckdb": 2.5, "polars": 1 / 1.2, "scan": 1 / 1.5}
"""Minimum of the peer's seconds as a multiple of ours."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Amount of data."""

    devices: int
    days: int
    allocations: int

    @classmethod
    def of(cls, samples: int, allocations: int) -> Plan:
        """Return the plan: up to 100 million samples are 12 days; more are more days of the same GPUs."""
        days = max(2, round(samples / (PER_DAY * 2900))) if samples >= 2 * PER_DAY * 2900 else 2
        return cls(max(PER_NODE, round(samples / (PER_DAY * days))), days, allocations)

    @property
    def until(self) -> datetime:
        """End of the samples."""
        return START + timedelta(days=self.days)


def identities(devices: int) -> pl.DataFrame:
    """Return the devices in the order of the store."""
    number = pl.Series(range(devices))
    table = pl.DataFrame(
        {
            "cluster": ["bench"] * devices, "node": [f"gpu{d // PER_NODE:04}" for d in number],
            "uuid": [f"GPU-{d:08x}" for d in number], "pci": [None] * devices, "index": [d % PER_NODE for d in number],
            "mig": [None] * devices, "mig_profile": [None] * devices, "model": ["synthetic"] * devices,
        },
        schema=IDENTITY,
    )  # fmt: skip
    return with_device(table).sort("device")


def day_of(plan: Plan, day: int, table: pl.DataFrame) -> list[pl.DataFrame]:
    """Yield the samples of a day, some hundred devices per frame."""
    rng = np.random.default_rng([11, day])
    grid = (int(START.timestamp()) + day * DAY_S + STEP_S * np.arange(PER_DAY)) * 1000
    frames = []
    for first in range(0, plan.devices, 256):
        ids = table["device"][first : first + 256].to_numpy()
        shape = (len(ids), PER_DAY)
        # A period lasts half an hour on average: busy, idle, or low (a notebook, a slow data loader).
        kind = stretches(rng, len(ids) * PER_DAY, 60).reshape(shape)
        util = np.select([kind < 3, kind == 3], [rng.integers(20, 101, shape), rng.integers(1, 6, shape)], 0)
        util = util.astype(np.float32)
        engine = util / 100 * rng.uniform(0.9, 1, shape).astype(np.float32)
        lacking = np.where((np.arange(first, first + len(ids)) % 10 == 0)[:, None], np.float32("nan"), np.float32(1))
        gap = np.zeros(shape, bool)
        for row in np.flatnonzero(rng.random(len(ids)) < GAP_SHARE):
            at = int(rng.integers(100, PER_DAY - 200))
            gap[row, at : at + 60] = True
        keep = ~gap.ravel()
        metrics = {
            "util_pct": util,
            "engine_active": engine,
            "sm_active": np.round(engine * rng.uniform(0.5, 0.9, shape), 6) * lacking,
            "dram_active": np.round(engine * rng.uniform(0.2, 0.6, shape), 6),
            "fb_used_mib": np.repeat(rng.integers(400, 81_000, (len(ids), PER_DAY // 240)), 240, axis=1),
            "power_w": np.round(70 + util * 5 + rng.normal(0, 4, shape), 3),
        }
        columns = {"device": np.repeat(ids, PER_DAY)[keep], "time": np.tile(grid, len(ids))[keep]}
        frame = pl.DataFrame(columns | {name: v.astype(np.float32).ravel()[keep] for name, v in metrics.items()})
        missing = pl.col("sm_active").fill_nan(None)
        when = pl.from_epoch("time", time_unit="ms").dt.replace_time_zone("UTC")
        frames.append(frame.with_columns(missing, when))
    return frames


def stretches(rng: np.random.Generator, count: int, mean: float) -> np.ndarray:
    """Return ``count`` numbers below 7 that repeat ``mean`` times on average: 0-2 busy, 3 low, 4-6 idle."""
    lengths = rng.geometric(1 / mean, int(count / mean * 1.2) + 1000)
    return np.repeat(rng.integers(0, 7, len(lengths)), lengths)[:count]


def make(plan: Plan, directory: Path) -> int:
    """Write samples and ``allocations.parquet``; return the number of samples."""
    table = identities(plan.devices)
    store = SampleStore(directory / "history")
    samples = 0
    for day in range(plan.days):
        samples += store.write_day((START + timedelta(days=day)).date(), day_of(plan, day, table), table).rows
    rng = np.random.default_rng(12)
    per_device = -(-plan.allocations // plan.devices)
    steps = plan.days * PER_DAY
    cuts = np.sort(rng.integers(0, steps, (plan.devices, per_device)), axis=1)
    begin, end = cuts, np.concatenate([cuts[:, 1:], np.full((plan.devices, 1), steps)], axis=1)
    frame = pl.DataFrame(
        {
            "device": np.repeat(table["device"].to_numpy(), per_device),
            "start": (int(START.timestamp()) + STEP_S * begin.ravel()) * 1000,
            "end": (int(START.timestamp()) + STEP_S * end.ravel()) * 1000,
        }
    ).filter(pl.col("end") > pl.col("start"))
    frame.head(plan.allocations).with_row_index("run").write_parquet(directory / "allocations.parquet")
    return samples


def paths(directory: Path) -> list[Path]:
    """Return the files of samples."""
    return [part.path for part in SampleStore(directory / "history").parts()]


Sums = dict[str, float]


def kernel_join(directory: Path, plan: Plan) -> Sums:
    """Run the join of a report. Imports are not timed."""
    begin = time.perf_counter()
    sums = _join(directory, plan)
    return {"seconds": time.perf_counter() - begin, **sums}


def _join(directory: Path, plan: Plan) -> Sums:
    table = pl.read_parquet(directory / "allocations.parquet")
    index = samples.read_index(SampleStore(directory / "history"), START, plan.until, max_gap_steps=3)
    rows = index.devices.select("device").with_row_index("at")
    row = table.select("device").join(rows, on="device", how="left", maintain_order="left")["at"]
    allocations = segments.Allocations.of(row, table["run"], table["start"], table["end"])
    since_ms, until_ms = (int(moment.timestamp() * 1000) for moment in (START, plan.until))
    cells = segments.build(allocations, taking_part=np.ones(plan.devices, bool), since=since_ms, until=until_ms)
    totals = kernel.run_all(index, allocations, cells, Thresholds())
    each = measures.per_allocation(totals, cells, allocations)
    sums = {name: each[name].sum() / 1000 / STEP_S for name in ("busy", "low", "idle", "fb", "power")}
    return {
        "rows": len(each), "samples": sums["busy"] + sums["low"] + sums["idle"], "idle": sums["idle"],
        "fb": sums["fb"], "power": sums["power"], "fb_peak": each["fb_peak"].sum(),
    }  # fmt: skip


def scan(directory: Path, plan: Plan) -> Sums:
    """Read and sum the columns."""
    begin = time.perf_counter()
    whole = pl.scan_parquet(paths(directory)).select(
        pl.col("time").to_physical().sum(), *(pl.col(name).sum() for name in COLUMNS[1:])
    )
    whole.collect(engine="streaming")
    return {"seconds": time.perf_counter() - begin}


def duckdb(directory: Path, plan: Plan) -> Sums:
    """Run ASOF JOIN."""
    import duckdb as library  # noqa: PLC0415 - in its own process only

    begin = time.perf_counter()
    files = [str(path) for path in paths(directory)]
    connection = library.connect()
    connection.execute(f"SET temp_directory = '{directory / 'duckdb'}'")
    connection.execute("SET TimeZone = 'UTC'")
    row = connection.execute(
        f"""
        WITH per_run AS (
            SELECT a.run, count(*) AS samples,
                   count(*) FILTER (WHERE {ACTIVITY} <= 0) AS idle,
                   sum(s.fb_used_mib::DOUBLE) AS fb, sum(s.power_w::DOUBLE) AS power, max(s.fb_used_mib) AS fb_peak
            FROM (SELECT device, epoch_ms(time) AS at, {", ".join(COLUMNS[1:])}
                  FROM read_parquet({files!r})) s
            ASOF JOIN '{directory / "allocations.parquet"}' a ON s.device = a.device AND s.at >= a.start
            WHERE s.at < a.end
            GROUP BY a.run)
        SELECT count(*), sum(samples), sum(idle), sum(fb), sum(power), sum(fb_peak) FROM per_run
        """
    ).fetchone()
    seconds = time.perf_counter() - begin
    return dict(zip(("seconds", "rows", "samples", "idle", "fb", "power", "fb_peak"), (seconds, *row), strict=True))


def polars(directory: Path, plan: Plan) -> Sums:
    """Run join_asof."""
    begin = time.perf_counter()
    moments = (pl.col(name).cast(pl.Datetime("ms", "UTC")) for name in ("start", "end"))
    runs = pl.scan_parquet(directory / "allocations.parquet").select("device", "run", *moments).sort("device", "start")
    rows = pl.scan_parquet(paths(directory)).select("device", *COLUMNS)
    met = rows.join_asof(runs, left_on="time", right_on="start", by="device", check_sortedness=False)
    activity = pl.max_horizontal(
        "util_pct", *(pl.col(name) * 100 for name in ("engine_active", "sm_active", "dram_active"))
    )
    every = (
        met.filter(pl.col("time") < pl.col("end"))
        .group_by("run")
        .agg(
            pl.len().alias("samples"), (activity <= 0).sum().alias("idle"),
            pl.col("fb_used_mib").cast(pl.Float64).sum().alias("fb"),
            pl.col("power_w").cast(pl.Float64).sum().alias("power"), pl.col("fb_used_mib").max().alias("fb_peak"),
        )
        .collect()
    )  # fmt: skip
    names = ("samples", "idle", "fb", "power", "fb_peak")
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "rows": len(every), **{name: float(every[name].sum()) for name in names}}


def pandas(directory: Path, plan: Plan) -> Sums:
    """Run merge_asof, a day at a time."""
    import pandas as library  # noqa: PLC0415 - in its own process only

    begin = time.perf_counter()
    runs = library.read_parquet(directory / "allocations.parquet").sort_values("start")
    runs["begin"] = library.to_datetime(runs["start"], unit="ms", utc=True).astype("datetime64[ms, UTC]")
    runs["until"] = library.to_datetime(runs["end"], unit="ms", utc=True).astype("datetime64[ms, UTC]")
    runs = runs[["device", "run", "begin", "until"]]
    days = []
    for path in paths(directory):
        day = library.read_parquet(path, columns=["device", *COLUMNS]).sort_values("time", kind="stable")
        met = library.merge_asof(day, runs, left_on="time", right_on="begin", by="device")
        met = met[met["time"] < met["until"]]
        fractions = met[["engine_active", "sm_active", "dram_active"]].max(axis=1) * 100
        idle = np.maximum(met["util_pct"].to_numpy(), fractions.to_numpy()) <= 0
        met = met.assign(idle=idle, fb=met["fb_used_mib"].astype("float64"), power=met["power_w"].astype("float64"))
        grouped = met.groupby("run")
        days.append(
            grouped.agg(samples=("fb", "size"), idle=("idle", "sum"), fb=("fb", "sum"), power=("power", "sum"),
                        fb_peak=("fb", "max"))
        )  # fmt: skip
    every = (
        library.concat(days)
        .groupby("run")
        .agg({"samples": "sum", "idle": "sum", "fb": "sum", "power": "sum", "fb_peak": "max"})
    )
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "rows": len(every), **{name: float(every[name].sum()) for name in every.columns}}


WAYS: dict[str, Callable[[Path, Plan], Sums]] = {
    "ours": kernel_join,
    "scan": scan,
    "polars": polars,
    "duckdb": duckdb,
    "pandas": pandas,
}


def measure(way: str, directory: Path, plan: Plan) -> dict[str, Any]:
    """Run ``way`` in a process of its own; return its sums, with ``peak_gib``."""
    request = json.dumps([way, str(directory), plan.devices, plan.days, plan.allocations])
    done = subprocess.run([sys.executable, __file__, "--worker", request], stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def worker(request: str) -> None:
    """Run the join in this process."""
    way, directory, *plan = json.loads(request)
    # Imports are not timed. Polars imports numpy.ma with the first array.
    importlib.import_module(way if way in {"duckdb", "pandas"} else "numpy.ma")
    begin = time.process_time()
    result = WAYS[way](Path(directory), Plan(*plan))
    cpu = time.process_time() - begin
    print(json.dumps({**result, "cpu": cpu, "peak_gib": peak_gib()}))


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fastest run, with ``median`` (seconds), the least ``cpu`` and the largest ``peak_gib`` of all runs."""
    best = min(runs, key=lambda run: run["seconds"])
    median = statistics.median(run["seconds"] for run in runs)
    cpu = min(run["cpu"] for run in runs)
    return {**best, "median": median, "cpu": cpu, "peak_gib": max(run["peak_gib"] for run in runs)}


def check(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return the differences between the sums of the peers and ours."""
    reference = results["ours"]
    return [
        f"{peer} {name}: {results[peer][name]:.0f}, ours {reference[name]:.0f}"
        for peer in ("polars", "duckdb", "pandas")
        for name in ("samples", "idle", "fb", "power")
        if peer in results and not np.isclose(reference[name], results[peer][name], rtol=1e-5)
    ]


def main() -> int:
    """Build the data, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--samples", type=lambda text: [int(number) for number in text.split(",")], default=[100_000_000],
        help="number of samples, or several [default: 100000000]",
    )  # fmt: skip
    parser.add_argument("--allocations", type=int, default=265_000)
    parser.add_argument(
        "--peers",
        default="polars,duckdb,pandas",
        help="peers (polars, duckdb, pandas); the scan is always measured",
    )
    parser.add_argument("--repeat", type=int, default=7, help="runs of ours and of the scan; the fastest counts")
    parser.add_argument("--dir", type=Path, help="directory for the samples, a few GB [default: a temporary directory]")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return 0
    peers = [peer for peer in options.peers.split(",") if peer]
    several = len(options.samples) > 1
    rows: list[tuple[int, dict[str, dict[str, Any]]]] = []
    status = 0
    for number in options.samples:
        allocations = max(PER_NODE, options.allocations * number // options.samples[-1])
        plan = Plan.of(number, allocations if several else options.allocations)
        made, results = measured(plan, options.dir, peers, options.repeat)
        ended = show(plan, made, results, as_json=options.json, keep=not several)
        status = 1 if 1 in {status, ended} else max(status, ended)
        rows.append((made, results))
    if several and not options.json:
        print(table(rows))
    return status


def measured(
    plan: Plan, parent: Path | None, peers: Sequence[str], repeat: int
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the number of samples and the results of every way, by its name."""
    directory = Path(tempfile.mkdtemp(prefix="bench-join-", dir=parent))
    try:
        made = make(plan, directory)
        os.sync()  # otherwise it would be written to the disk during the first runs
        measure("ours", directory, plan)  # fills the page cache
        turns = ["scan", "ours"]
        runs = [[measure(name, directory, plan) for name in turns] for _ in range(repeat)]
        results = {name: summary([run[i] for run in runs]) for i, name in enumerate(turns)}
        # A single run of much work, but several of little, whose times vary more.
        again = repeat if plan.devices * plan.days * PER_DAY <= FEW else 1
        return made, results | {peer: summary([measure(peer, directory, plan) for _ in range(again)]) for peer in peers}
    finally:
        shutil.rmtree(directory)


def table(rows: Sequence[tuple[int, Mapping[str, Mapping[str, float]]]]) -> str:
    """Return seconds, and in parentheses CPU seconds, of every way at every number of samples."""
    names = list(rows[0][1])
    lines = [f"{'samples':>13}  " + "".join(f"{name:>18}" for name in names)]
    for made, results in rows:
        cells = [f"{results[name]['seconds']:.3f} ({results[name]['cpu']:.3f})" for name in names]
        lines.append(f"{made:>13,}  " + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def show(plan: Plan, made: int, results: dict[str, dict[str, Any]], *, as_json: bool, keep: bool) -> int:
    """Print the results; return 1 if sums differ, ``MISSED`` if a target is missed. ``keep``: report the ratios."""
    wrong = check(results)
    reference_s = results["ours"]["seconds"]
    ratios = {name: result["seconds"] / reference_s for name, result in results.items() if name != "ours"}
    if keep:
        report(**{f"to_{name}": reference_s / result["seconds"] for name, result in results.items() if name != "ours"})
    missed = [name for name, ratio in ratios.items() if ratio < TARGETS[name]]
    if as_json:
        shown = {"samples": made, "devices": plan.devices, "days": plan.days, "allocations": plan.allocations}
        print(json.dumps({**shown, "results": results, "ratios": ratios, "wrong": wrong, "missed": missed}, indent=2))
        return 1 if wrong else MISSED if missed else 0
    print(f"{made:,} samples of {plan.devices:,} GPUs over {plan.days} days, {plan.allocations:,} allocations")
    for name, result in results.items():
        against = "" if name == "ours" else f"  {ratios[name]:6.2f} x the time of ours (target {TARGETS[name]:.2f})"
        used = f"{result['seconds']:8.3f} s ({result['cpu']:.3f} s of CPU)  {result['peak_gib']:5.2f} GiB"
        print(f"  {name:<7} {used}{against}")
    medians = results["ours"]["median"] / results["scan"]["median"]
    of_cpu = results["ours"]["cpu"] / results["scan"]["cpu"]
    print(f"  ours / scan: {1 / ratios['scan']:.2f}, of medians {medians:.2f}, of CPU time {of_cpu:.2f}")
    print(f"  sums agree: {'no: ' + '; '.join(wrong) if wrong else 'yes'}")
    if missed:
        print(f"  missed: {', '.join(missed)}")
    return 1 if wrong else MISSED if missed else 0


if __name__ == "__main__":
    sys.exit(main())
