"""Findings among 100,000 running jobs: ``python benchmarks/bench_zombies.py [--jobs 100000] [--hours 3] [--keep DIR]``.

Builds a database with this many running jobs, one GPU each and one sample per minute, a tenth of them squatting, and
5,000 pending jobs; then runs ``slurm-affinode zombies list``, and the same with ``--live``, each in a process of its
own. Prints the seconds from the start of the process until its table is printed, the number of queries of the database
and of Slurm (independent of the number of jobs), and the peak memory. The limits are 20 s and 1 GiB each.

Slurm is simulated: ``squeue`` and ``scontrol`` on ``PATH`` print prepared output of the same form and size, and the
readings of the nodes are generated in the process. The time of a real slurmctld is not included.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
from ratios import MISSED, peak_gib, report
from sqlalchemy import Engine, event

from slurm_affinode.cli.main import cli
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.identity import with_device
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import IDENTITY
from slurm_affinode.slurm import squeue
from slurm_affinode.slurm.accounting.schema import JOBS, conform
from slurm_affinode.zombies import find, live
from slurm_affinode.zombies.nodes import JobUse, LiveGpu, NodeAnswer

LIMIT_S, LIMIT_GIB = 20.0, 1.0
MARK = "@mark@"
SQUEUE = """#!/bin/sh
echo squeue >> {root}/queries
last=; for last; do :; done
mark=${{last#--Format=JobID:}}; mark=${{mark%%,*}}
exec sed "s/@mark@/$mark/g" {root}/squeue.txt
"""
SCONTROL = """#!/bin/sh
case "$*" in
*--json=list*) echo "data_parser/v0.0.42" ;;
*details*) echo "scontrol show jobs" >> {root}/queries; exec cat {root}/details.txt ;;
*nodes*) echo "scontrol show nodes" >> {root}/queries; exec cat {root}/nodes.json ;;
*config*) echo "scontrol show config" >> {root}/queries; echo "ClusterName             = bench" ;;
*) echo "slurm-wlm 24.11.5" ;;
esac
"""
PER_NODE, STEP_S, WAITING = 8, 60, 5000
END = datetime(2026, 11, 2, 12, tzinfo=UTC)


def identities(count: int) -> pl.DataFrame:
    """Return the GPUs of the cluster."""
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
    """Yield samples in the order of the device number, some thousand GPUs at a time."""
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
    """Return running jobs with one GPU each, and pending jobs."""
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
        # Accounting is known up to this time.
        pl.when(number < count).then(int((hours + 1) * 3600)).alias("elapsed_s"),
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


def stand_ins(root: Path, count: int) -> None:
    """Write the programs that simulate Slurm, and their output."""
    (root / "bin").mkdir(parents=True, exist_ok=True)
    for name, text in (("squeue", SQUEUE), ("scontrol", SCONTROL)):
        (root / "bin" / name).write_text(text.format(root=root))
        (root / "bin" / name).chmod(0o755)
    begun, tres = int((END - timedelta(hours=4)).timestamp()), "cpu=8,mem=64G,node=1,billing=8,gres/gpu=1"
    with (root / "squeue.txt").open("w") as table, (root / "details.txt").open("w") as details:
        for i in range(count + WAITING):
            runs = i < count
            node = f"gpu{i // PER_NODE}" if runs else ""
            values = dict.fromkeys(squeue.FIELDS, "N/A") | {
                "JobID": 100_000 + i, "ArrayJobID": 100_000 + i, "UserName": f"user{i % 350}", "UserID": 5000 + i % 350,
                "Account": f"account{i % 40}", "Partition": f"part{i % 5}", "QOS": "normal", "NodeList": node,
                "State": "RUNNING" if runs else "PENDING", "Reason": "None" if runs else "Resources",
                "PriorityLong": 1000, "SubmitTime": begun, "EligibleTime": begun, "StartTime": begun,
                "EndTime": begun + 86_400, "TimeLimit": "1-00:00:00", "BatchHost": node, "NumNodes": 1, "NumCPUs": 8,
                "tres-alloc": f"{tres},gres/gpu:a100=1" if runs else tres, "RestartCnt": 0, "BatchFlag": 1,
                "Requeue": 1, "Name": "train-a-model.sh", "Comment": "(null)",
            }  # fmt: skip
            table.write("".join(f"{values[name]}{MARK}" for name in squeue.FIELDS) + "\n")
            gres = f"  Nodes={node} CPU_IDs=0-7 Mem=65536 GRES=gpu:a100:1(IDX:{i % PER_NODE})" if runs else ""
            details.write(f"JobId={100_000 + i} JobName=train-a-model.sh {'Key=a-value-of-some-length ' * 50}{gres}\n")
    node = {"state": ["ALLOCATED"], "gres": "gpu:a100:8", "cpus": 64, "real_memory": 1_000_000,
            "partitions": ["part0", "part1", "part2", "part3", "part4"], "extra": "x" * 2000}  # fmt: skip
    nodes = [{"name": f"gpu{i}", **node} for i in range(-(-count // PER_NODE))]
    (root / "nodes.json").write_text(json.dumps({"nodes": nodes, "last_update": {"set": True, "number": 1}}))


def reading(node: str) -> NodeAnswer:
    """Return the reading of a node's agent."""
    first = int(node.removeprefix("gpu")) * PER_NODE
    gpus = tuple(
        LiveGpu(node, f"GPU-{first + i:012d}", i, i, None, "NVIDIA A100-SXM4-80GB",
                {"util_pct": 0.0 if (first + i) % 10 == 0 else 80.0}, 79_000.0, 81_920.0, 60.0, 0, ())
        for i in range(PER_NODE)
    )  # fmt: skip
    return NodeAnswer(node, gpus, "agent", uses={100_000 + first + i: JobUse(50_000.0, 40_000.0) for i in range(8)})


def run_command(state: Path, part: str) -> None:
    """Run ``zombies list`` with its table in ``table.txt``; print the queries and the peak memory as JSON."""
    root = state / "slurm"
    (root / "queries").write_text("")
    os.environ["PATH"] = f"{root / 'bin'}:{os.environ['PATH']}"
    queries: list[str] = []
    event.listen(Engine, "before_cursor_execute", lambda *event_fields: queries.append(event_fields[2]))
    find.find = functools.partial(find.find, now=END)
    live.find_live = functools.partial(live.find_live, ask=reading, now=END.timestamp, sleep=lambda _: None)
    arguments = ["zombies", "list", "--state", str(state), "--slurm-backend", "commands"]
    with (state / "table.txt").open("w") as table, contextlib.redirect_stdout(table):
        cli([*arguments, *(["--live"] if part == "live" else [])], standalone_mode=False)
    selects = sum(query.lstrip().startswith("SELECT") for query in queries)
    print(json.dumps({"selects": selects, "gib": peak_gib(), "cpu": time.process_time()}))


def measure(state: Path, part: str, count: int) -> int:
    """Run the command in a process and print its figures; return 1 if it fails, ``MISSED`` above a limit."""
    command = [sys.executable, __file__, f"--keep={state}", f"--only={part}"]
    began = time.monotonic()
    run = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    took = time.monotonic() - began
    if run.returncode:
        return run.returncode
    figures = json.loads(run.stdout)
    lines = (state / "table.txt").read_text().splitlines()
    squatters = sum(line.startswith("squatter ") for line in lines)
    queries = (state / "slurm" / "queries").read_text().splitlines()
    print(f"{'live' if part == 'live' else 'from stored metrics'}: {squatters:,} squatters listed: {took:.1f} s "
          f"({figures['cpu']:.1f} s of CPU); peak memory {figures['gib']:.2f} GiB; "
          f"limits {LIMIT_S:g} s and {LIMIT_GIB:g} GiB")  # fmt: skip
    print(f"  queries: {figures['selects']} of the database, {len(queries)} of Slurm ({', '.join(queries)})")
    print(f"  {next(line for line in lines if 'GPU-hours held idle' in line).partition(' Examined')[0]}")
    if squatters != -(-count // 10) or len(queries) != len(set(queries)):
        return 1
    if part == "live":
        report(live_to_splitting=took / split(state / "slurm"))
    else:
        report(history_to_scan=took / scan(state))
    return 0 if took <= LIMIT_S and figures["gib"] <= LIMIT_GIB else MISSED


def scan(state: Path) -> float:
    """Return the seconds that a scan and sum of the stored samples takes, at least."""
    seconds = []
    with closing(SampleStore(state / "history")) as history:
        for _ in range(5):
            began = time.monotonic()
            history.scan(END - timedelta(days=1), END).select("util_pct", "fb_used_mib", "fb_total_mib").sum().collect()
            seconds.append(time.monotonic() - began)
    return min(seconds)


def split(root: Path) -> float:
    """Return the seconds that decoding the JSON and splitting the text of Slurm's output take."""
    began = time.monotonic()
    fields = sum(len(line.split(MARK)) for line in (root / "squeue.txt").read_text().splitlines())
    nodes = json.loads((root / "nodes.json").read_text())["nodes"]
    words = sum(len(line.split()) for line in (root / "details.txt").read_text().splitlines())
    assert fields > len(nodes) > 0 < words
    return time.monotonic() - began


def main() -> int:
    """Build, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--hours", type=float, default=3.0)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", choices=("history", "live"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        run_command(options.keep, options.only)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        state = (options.keep or Path(directory)).resolve()
        if not (state / "affinode.sqlite").exists():
            began = time.monotonic()
            build(state, options.jobs, options.hours)
            stand_ins(state / "slurm", options.jobs)
            print(f"built in {time.monotonic() - began:.1f} s", flush=True)
        ends = [measure(state, part, options.jobs) for part in ("history", "live")]
        return next((end for end in ends if end not in (0, MISSED)), max(ends))


if __name__ == "__main__":
    sys.exit(main())
