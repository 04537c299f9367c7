"""Diagnosis of engines: ``python benchmarks/bench_serving.py [--engines 1000] [--samples 5760]``.

Writes samples of synthetic engines, a scrape every 15 s for a day, with 20 metrics, to Parquet files, as the sample
store has them (sorted by engine). A fifth of the engines is overloaded for some hours, a fifth is idle for some hours,
and a tenth has gaps and restarts. Then it diagnoses them, and prints seconds, the peak memory of all processes, and the
ratio to Polars' scan and sum of the same columns, the limit for any analysis of these files. Limits: 20 s, 1 GiB.

``--errors`` instead prints how often the queue of a simulated engine (``tests/serving_simulation.py``) is diagnosed as
unstable, by load, for three kinds of engines, with Poisson arrivals and with batches of arrivals. Below a load of 1 it
is a false positive; above 1, a missing one is a false negative.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import polars as pl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from ratios import MISSED, report

from slurm_affinode.engines.diagnosis.examination import diagnose_all, examine
from slurm_affinode.engines.schema import SAMPLES
from slurm_affinode.model.serving import EngineKey

BEGIN = datetime(2026, 11, 1, tzinfo=UTC)
STEP_S = 15
LIMIT_S, LIMIT_GIB = 20.0, 1.0
METRICS = (
    "running", "waiting", "kv_usage", "kv_tokens", "preemptions", "prompt_tokens", "generation_tokens", "finished",
    "ttft_s", "ttft_count", "token_latency_s", "token_latency_count", "prompt_length", "prompt_length_count",
    "generation_length", "generation_length_count", "rss_bytes", "start_time", "uncollectable", "scrape_s",
)  # fmt: skip
LOADS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5)


def engine(number: int, count: int) -> pl.DataFrame:
    """Return the samples of one engine."""
    rng = np.random.default_rng(number)
    arrived = rng.poisson(2.0 * STEP_S, count).astype(np.float64)
    if number % 5 == 0:
        arrived[count // 3 : count // 3 + count // 8] *= 1.6  # overloaded
    if number % 5 == 1:
        arrived[count // 2 : count // 2 + count // 6] = 0  # idle
    capacity = 2.4 * STEP_S
    # The queue of a server with this capacity: what arrived less what was served, but never less than nothing.
    walk = np.cumsum(arrived - capacity)
    held = walk - np.minimum.accumulate(np.minimum(walk, 0.0))
    finished = np.cumsum(arrived) - held
    running = np.minimum(40.0, np.round(16 * arrived / capacity + held))
    usage = np.where(held > 0, rng.uniform(0.93, 1.0, count), running / 45)
    served = np.diff(finished, prepend=0.0)
    made = {
        "running": running, "waiting": np.floor(held), "kv_usage": usage, "kv_tokens": np.full(count, 200_000.0),
        "preemptions": np.cumsum(rng.poisson(np.where(held > 0, 4.0, 0.0))), "finished": np.floor(finished),
        "prompt_tokens": np.floor(finished * 900), "generation_tokens": np.floor(finished * 240),
        "ttft_s": np.cumsum(served * (0.1 + held / 2.4)), "ttft_count": np.floor(finished),
        "token_latency_s": finished * 240 * 0.05, "token_latency_count": finished * 240,
        "prompt_length": finished * 900, "prompt_length_count": np.floor(finished),
        "generation_length": finished * 240, "generation_length_count": np.floor(finished),
        "rss_bytes": 2e9 + rng.normal(0, 1e6, count) + held * 1e4, "start_time": np.full(count, BEGIN.timestamp() - 99),
        "uncollectable": np.zeros(count), "scrape_s": rng.exponential(0.02, count),
    }  # fmt: skip
    frame = pl.DataFrame(made).with_columns(
        time=pl.Series(np.arange(count) * STEP_S * 1000 + int(BEGIN.timestamp() * 1000)), cluster=pl.lit("bench"),
        node=pl.lit(f"gpu{number // 8:04d}"), address=pl.lit(f"gpu{number // 8:04d}:{8000 + number % 8}"),
        engine=pl.lit("vllm"), model=pl.lit("model"), job=pl.lit(str(number)), user=pl.lit(f"user{number % 90}"),
        gpus=pl.lit(f"GPU-{number}"), device=pl.lit(number, pl.UInt64),
    )  # fmt: skip
    if number % 10 == 3:
        frame = frame.filter(~pl.arange(pl.len()).is_between(count // 4, count // 4 + 60))
        late = pl.arange(pl.len()) > count // 2
        frame = frame.with_columns(
            pl.when(late).then(pl.col("start_time") + 9999).otherwise("start_time").alias("start_time")
        )
    return frame.select(
        "device",
        *(
            (pl.col(name) if name in frame.columns else pl.lit(None)).cast(dtype).alias(name)
            for name, dtype in SAMPLES.items()
        ),
    )


def build(directory: Path, engines: int, samples: int) -> None:
    """Write the samples, a hundred engines to a file."""
    for first in range(0, engines, 100):
        frames = [engine(number, samples) for number in range(first, min(first + 100, engines))]
        pl.concat(frames).write_parquet(directory / f"{first:06d}.parquet", row_group_size=50_000)


def measure(directory: Path, part: str) -> None:
    """Run one part in this process and print its figures as JSON."""
    samples = pl.scan_parquet(directory / "*.parquet")
    began = time.monotonic()
    kinds: Counter[str] = Counter()
    engines = 0
    if part == "scan":
        samples.select(pl.col(METRICS).sum()).collect(engine="streaming")
    else:
        for health in diagnose_all(samples):
            engines += 1
            kinds.update({diagnosis.kind for diagnosis in health.diagnoses})
    seconds = time.monotonic() - began
    process, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in (process, others))
    # At most as many processes as cores, none of which was larger than the largest one.
    peak = (process.ru_maxrss + others.ru_maxrss * len(os.sched_getaffinity(0))) / 2**20
    print(json.dumps({"seconds": seconds, "cpu": cpu, "gib": peak, "engines": engines, "kinds": kinds}))


def errors(seeds: int, hours: float) -> bool:
    """Print the rates of false positives and false negatives; return whether both are as documented."""
    from serving_simulation import Engine, service_rate, simulate  # noqa: PLC0415

    engines = {
        "KV cache, a request is a fifth": Engine(8192, 1400, 300),
        "KV cache, a request is a fiftieth": Engine(32768, 400, 250),
        "batch of 8, KV cache never full": Engine(10**6, 300, 200, 0.03, batch=8),
    }
    print(f"{seeds} runs of {hours:g} h each, a scrape every 15 s; share of runs with an unstable queue")
    print(f"| engine | arrivals | {' | '.join(f'{load:g}' for load in LOADS)} |")
    print(f"| --- | --- |{' --- |' * len(LOADS)}")
    good = True
    for name, server in engines.items():
        rate = service_rate(server)
        for bursts in (1.0, 4.0):
            shares = []
            for load in LOADS:
                flagged = 0
                for seed in range(seeds):
                    samples = simulate(server, load * rate, hours * 3600, seed, bursts=bursts)
                    (examined,) = examine(EngineKey("c", "n", "a", "vllm", "m"), samples)
                    flagged += any(diagnosis.kind == "queue-unstable" for diagnosis in examined.health.diagnoses)
                shares.append(flagged / seeds)
                good &= not (load <= 0.9 and flagged) and not (load >= 1.5 and flagged < seeds)
            how = "Poisson" if bursts == 1 else f"batches of {bursts:g}"
            print(f"| {name} | {how} | {' | '.join(f'{share:.0%}' for share in shares)} |", flush=True)
    return good


def main() -> int:
    """Build, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=5760)
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", choices=("diagnose", "scan"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.errors:
        return 0 if errors(options.seeds, options.hours) else 1
    if options.only:
        measure(options.keep, options.only)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        if not any(directory.glob("*.parquet")):
            build(directory, options.engines, options.samples)
        this = [sys.executable, __file__, f"--keep={directory}"]
        work = {
            part: json.loads(subprocess.run([*this, f"--only={part}"], check=True, capture_output=True).stdout)
            for part in ("scan", "diagnose")
        }
    diagnosis, scan = work["diagnose"], work["scan"]
    rows = options.engines * options.samples
    print(f"{diagnosis['engines']:,} engines, {rows:,} samples, {len(METRICS)} metrics: {diagnosis['seconds']:.1f} s "
          f"({diagnosis['cpu']:.1f} s of CPU with the start); peak memory {diagnosis['gib']:.2f} GiB; "
          f"limits {LIMIT_S:g} s and {LIMIT_GIB:g} GiB")  # fmt: skip
    print(f"  scan and sum of the same columns: {scan['seconds']:.2f} s ({scan['cpu']:.1f} s of CPU); "
          f"the diagnosis takes {diagnosis['seconds'] / scan['seconds']:.0f} times as long")  # fmt: skip
    print(
        f"  engines by diagnosis: {', '.join(f'{kind} {count}' for kind, count in sorted(diagnosis['kinds'].items()))}"
    )
    met = diagnosis["seconds"] <= LIMIT_S and diagnosis["gib"] <= LIMIT_GIB
    report(to_scan=diagnosis["seconds"] / scan["seconds"])
    if diagnosis["kinds"].get("queue-unstable", 0) != -(-options.engines // 5):
        return 1
    return 0 if met else MISSED


if __name__ == "__main__":
    sys.exit(main())
