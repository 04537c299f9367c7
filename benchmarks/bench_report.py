"""A report over 100,000 jobs: ``python benchmarks/bench_report.py [--jobs 100000] [--days 7] [--keep DIR]``.

Builds a database with this many job runs (half of them with GPUs) and samples of 256 GPUs, one per minute, then runs
``slurm-affinode report`` in a process of its own. Prints its seconds, the seconds for only reading the same rows (job
runs from the database, the sample columns from Parquet), the ratio of both, the size of the page and the peak memory.
The limit is 3 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
from ratios import MISSED, report

from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.identity import with_device
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import IDENTITY
from slurm_affinode.slurm.accounting.schema import JOBS, conform

LIMIT_S = 3.0
NODES, PER_NODE, STEP_S = 32, 8, 60
START = datetime(2026, 11, 2, tzinfo=UTC)


def make_jobs(count: int, days: float, rng: np.random.Generator, users: int = 350) -> tuple[pl.DataFrame, np.ndarray]:
    """Return consecutive runs on every GPU, labeled in its samples; the other half has no GPU."""
    slots, per_slot = NODES * PER_NODE, count // 2 // (NODES * PER_NODE)
    cuts = np.sort(rng.integers(0, int(days * 86400), (slots, per_slot)), axis=1)
    start = cuts.ravel()
    end = np.concatenate([cuts[:, 1:], np.full((slots, 1), int(days * 86400))], axis=1).ravel()
    keep = end > start
    start, end = start[keep], end[keep]
    slot = np.repeat(np.arange(slots), per_slot)[keep]
    gpu = pl.DataFrame({"start_s": start, "end_s": end, "slot": slot, "gpus": np.ones(len(start), dtype=np.int64)})
    others = count - len(start)
    begin = rng.integers(0, int(days * 86400), others)
    cpu = pl.DataFrame({
        "start_s": begin, "end_s": begin + rng.integers(60, 40000, others),
        "slot": rng.integers(0, slots, others), "gpus": np.zeros(others, dtype=np.int64),
    })  # fmt: skip
    both = pl.concat([gpu, cpu]).with_row_index("i")
    begun = pl.lit(START) + pl.duration(seconds=pl.col("start_s"))
    number = pl.col("i").cast(pl.Int64)
    program = pl.when(number % 5 == 0).then(pl.lit("salloc")).otherwise(pl.lit("sbatch"))
    node = pl.format("gpu{}", (pl.col("slot") // PER_NODE).cast(pl.String).str.zfill(3))
    frame = both.select(
        pl.lit("bench").alias("cluster"), (100_000 + number).alias("job_id"),
        (begun - pl.duration(minutes=3)).alias("submit"), (begun - pl.duration(minutes=3)).alias("eligible"),
        pl.format("train-{}", number % 977).alias("job_name"),
        pl.format("user{}", number % users).alias("user"), pl.format("group{}", number % 41).alias("account"),
        pl.format("part{}", number % 5).alias("partition"), pl.format("qos{}", number % 3).alias("qos"),
        pl.lit("COMPLETED").alias("state"), begun.alias("start"),
        (pl.lit(START) + pl.duration(seconds=pl.col("end_s"))).alias("end"), pl.lit(1).alias("nodes"),
        node.alias("node_list"), pl.col("gpus"),
        pl.when(pl.col("gpus") > 0).then(pl.format("billing=8,cpu=8,gres/gpu={}", "gpus")).alias("alloc_tres"),
        pl.format("{} --gpus={} --time=12:00:00 --output=logs/%j.out train-{}.sh", program, "gpus", number % 977)
        .alias("submit_line"),
    )  # fmt: skip
    return conform(frame, JOBS), both.filter(pl.col("gpus") > 0).select("i", "slot", "start_s", "end_s").to_numpy()


def identities() -> pl.DataFrame:
    """Return the GPUs of the cluster."""
    rows = [
        {"cluster": "bench", "node": f"gpu{n:03d}", "uuid": f"GPU-{n:08x}-0000-0000-0000-{g:012x}", "index": g,
         "model": "NVIDIA A100-SXM4-80GB"}
        for n in range(NODES) for g in range(PER_NODE)
    ]  # fmt: skip
    return with_device(pl.DataFrame(rows).select(
        (pl.col(name) if name in rows[0] else pl.lit(None)).cast(dtype).alias(name) for name, dtype in IDENTITY.items()
    ))  # fmt: skip


def samples(day: int, devices: np.ndarray, owners: np.ndarray, rng: np.random.Generator) -> Iterator[pl.DataFrame]:
    """Yield one frame per GPU, in the order of the device number."""
    seconds = np.arange(day * 86400, (day + 1) * 86400, STEP_S)
    for slot in np.argsort(devices):
        runs = owners[owners[:, 1] == slot]
        at = np.searchsorted(runs[:, 2], seconds, side="right") - 1
        job = np.where((at >= 0) & (seconds < runs[np.maximum(at, 0), 3]), 100_000 + runs[np.maximum(at, 0), 0], -1)
        util = np.where(rng.random(len(seconds)) < 0.35, 0.0, rng.integers(1, 100, len(seconds)))
        yield pl.DataFrame({
            "device": np.full(len(seconds), devices[slot], dtype=np.uint64),
            "time": pl.Series(START.timestamp() * 1000 + seconds * 1000).cast(pl.Int64).cast(pl.Datetime("ms", "UTC")),
            "util_pct": util.astype(np.float32), "fb_used_mib": np.where(job >= 0, 40_000, 3).astype(np.float32),
            "fb_total_mib": np.full(len(seconds), 81_920, dtype=np.float32),
            "power_w": (70 + 3 * util).astype(np.float32), "job": job,
        }).with_columns(pl.when(pl.col("job") >= 0).then(pl.col("job").cast(pl.String)))  # fmt: skip


def build(state: Path, count: int, days: int, users: int = 350) -> None:
    """Fill a state directory."""
    rng = np.random.default_rng(7)
    jobs, owners = make_jobs(count, days, rng, users)
    state.mkdir(parents=True, exist_ok=True)
    with Repository.open(f"sqlite:///{state / 'affinode.sqlite'}") as store:
        store.upsert(jobs)
    table = identities()
    history = SampleStore(state / "history")
    try:
        for day in range(days):
            frames = samples(day, table["device"].to_numpy(), owners, rng)
            history.write_day(date(2026, 11, 2) + timedelta(days=day), frames, table)
    finally:
        history.close()


def read_only(state: Path, until: datetime) -> float:
    """Return the seconds for only reading the rows that the report needs."""
    begin = time.perf_counter()
    with Repository.open(f"sqlite:///{state / 'affinode.sqlite'}") as store:
        store.jobs(START, until)
    columns = ["device", "time", "util_pct", "fb_used_mib", "power_w"]
    for path in sorted((state / "history").glob("day=*/part-*.parquet")):
        pl.read_parquet(path, columns=columns)
    return time.perf_counter() - begin


_WITH_RATIOS = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
_COMMAND = """
import atexit
from ratios import peak_gib
from slurm_affinode.cli.entry import main
atexit.register(lambda: print(peak_gib()))
main()
"""


def main() -> int:
    """Build, run and print; return ``MISSED`` if the limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--days", type=int, default=7)
    parser.add_argument("--keep", type=Path, help="keep the database and samples here, or use existing ones")
    parser.add_argument("--only-build", action="store_true", help="only write the database and samples (with --keep)")
    arguments = parser.parse_args()
    if arguments.only_build:
        build(arguments.keep, arguments.jobs, arguments.days)
        return 0
    with tempfile.TemporaryDirectory(prefix="affinode-bench-") as temporary:
        state = arguments.keep or Path(temporary)
        if not (state / "affinode.sqlite").exists():
            build(state, arguments.jobs, arguments.days)
        until = START + timedelta(days=arguments.days)
        out = Path(temporary) / "out"
        command = [
            sys.executable, "-c", _COMMAND, "report", "--state", str(state), "--since", START.isoformat(), "--until",
            until.isoformat(), "--out", str(out),
        ]  # fmt: skip
        begin = time.perf_counter()
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=_WITH_RATIOS)
        took = time.perf_counter() - begin
        peak = float(done.stdout.splitlines()[-1])
        reading = read_only(state, until)
        total = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        size = (out / "report.html").stat().st_size
    quality = total["quality"]
    print(f"report over {quality['job_runs']:,} job runs ({quality['gpu_job_runs']:,} with GPUs), "
          f"{quality['samples']:,} samples of {quality['devices']} GPUs")  # fmt: skip
    print(f"report   {took:7.2f} s   (limit {LIMIT_S:g} s)")
    print(f"reading  {reading:7.2f} s   report / reading = {took / reading:.1f}")
    print(f"page     {size / 1e6:7.2f} MB  peak memory {peak:.2f} GiB")
    report(to_reading=took / reading)
    return 0 if took <= LIMIT_S else MISSED


if __name__ == "__main__":
    sys.exit(main())
