"""Records per second of the sacct parser (text to typed frames), compared with only splitting the lines.

    python benchmarks/bench_sacct.py --records 1000000 --json

The input is generated with a fixed seed: jobs with .batch, .extern and some srun steps, arrays, requeued attempts,
GPUs, running and pending jobs, names as users choose them; the fields are those that ``ingest sacct`` requests.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
from ratios import MISSED, report

from slurm_affinode.slurm.accounting.sacct import SacctReading, read

DELIMITER = "\x1f"
TARGET = 250_000
FIELDS = (
    "JobIDRaw", "JobID", "Cluster", "User", "UID", "Account", "Partition", "QOS", "State", "ExitCode", "Reason",
    "Submit", "Eligible", "Start", "End", "ElapsedRaw", "Suspended", "TimelimitRaw", "NNodes", "NodeList",
    "AllocCPUS", "ReqCPUS", "NTasks", "ReqMem", "ReqTRES", "AllocTRES", "TotalCPU", "MaxRSS", "TRESUsageInMax",
    "ConsumedEnergyRaw", "Constraints", "AdminComment", "Comment", "WorkDir", "JobName", "SubmitLine",
)  # fmt: skip
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
STATES = ["COMPLETED"] * 14 + ["FAILED"] * 3 + ["TIMEOUT", "CANCELLED by 1000", "OUT_OF_MEMORY"]


def generate(records: int, seed: int = 1) -> Iterator[str]:
    """Yield the header and ``records`` lines."""
    yield DELIMITER.join(FIELDS)
    rng = random.Random(seed)  # noqa: S311 - made-up data, not secrets
    written, job_id = 0, 1_000_000
    while written < records:
        job_id += 1
        for line in _job(rng, job_id, job_id % 400_000_000):
            yield line
            written += 1
            if written == records:
                return


def _stamp(seconds: int) -> str:
    return (EPOCH + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")


def _cpu(seconds: float) -> str:
    if seconds < 3600:
        return f"{int(seconds) // 60:02d}:{seconds % 60:06.3f}"
    days, rest = divmod(int(seconds), 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def _job(rng: random.Random, job_id: int, second: int) -> Iterator[str]:
    user = rng.randrange(400)
    gpus = rng.choice([0, 0, 1, 1, 2, 4, 8])
    cpus, mem = max(1, gpus * 8), rng.choice([4, 16, 32, 64, 120])
    wait, length = rng.randrange(0, 7200), int(rng.lognormvariate(7, 2)) % 172_800
    state = rng.choice(STATES)
    submit = _stamp(second)
    start, end = _stamp(second + wait), _stamp(second + wait + length)
    if rng.random() < 0.01:
        state, end = "RUNNING", "Unknown"
    array = rng.random() < 0.3
    printed = f"{job_id - job_id % 100}_{job_id % 100}" if array else str(job_id)
    node = f"gpu-{rng.randrange(200):03d}" if rng.random() < 0.95 else f"gpu-[{rng.randrange(90):03d}-{99:03d},150]"
    tres = f"cpu={cpus},{f'gres/gpu:a100={gpus},gres/gpu={gpus},' if gpus else ''}mem={mem}G,node=1"
    job_tres = f"billing={cpus},{tres}"
    code = "0:0" if state == "COMPLETED" else rng.choice(["1:0", "0:15", "2:0", "0:9"])
    name = rng.choice(["train", "eval", "bash", "preprocess-§", "finetune llama"]) + f"_{rng.randrange(1000)}"
    work = f"/home/u{user:03d}/project{user % 7}"
    yield DELIMITER.join(
        [
            str(job_id), printed, "larch", f"u{user:03d}", str(1000 + user), f"acct{user % 40}", "gpu", "normal",
            state, code, "None", submit, submit, start, end, str(length), "00:00:00", "1440", "1", node,
            str(cpus), str(cpus), "", f"{mem}G", job_tres, job_tres, _cpu(length * cpus * 0.8), "", "", "0", "", "",
            "", work, name, f"sbatch --gres=gpu:{gpus} run_{user}.sh",
        ]
    )  # fmt: skip
    steps = ["batch", "extern"] + [str(n) for n in range(rng.choice([0, 0, 0, 1, 2]))]
    for step in steps:
        rss = f"{rng.randrange(1000, mem * 1_000_000)}K"
        usage = f"cpu={_cpu(length)},energy=0,fs/disk={rng.randrange(1 << 30)},mem={rss},pages=0,vmem={rss}"
        if gpus:
            usage += f",gres/gpumem={rng.randrange(80_000)}M,gres/gpuutil={rng.randrange(101)}"
        yield DELIMITER.join(
            [
                f"{job_id}.{step}", f"{printed}.{step}", "larch", "", "", f"acct{user % 40}", "", "",
                state.split()[0], code, "", start, start, start, end, str(length), "00:00:00", "", "1", node,
                str(cpus), str(cpus), "1", "", "", tres, _cpu(length * cpus * rng.random()), rss, usage, "0", "", "",
                "", "", step if not step.isdigit() else "python", "srun python train.py" if step.isdigit() else "",
            ]
        )  # fmt: skip


def _timed(work: Callable[[], object], repeat: int) -> float:
    best = float("inf")
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


def _csv_split(path: Path) -> int:
    with path.open(encoding="utf-8", newline="") as stream:
        return sum(1 for _ in csv.reader(stream, delimiter=DELIMITER, quoting=csv.QUOTE_NONE))


def _pandas(path: Path) -> int:
    frame = pd.read_csv(path, sep=DELIMITER, dtype=str, quoting=csv.QUOTE_NONE, engine="c", keep_default_na=False)
    return len(frame)


def main() -> int:
    """Measure and print; return ``MISSED`` if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3, help="number of runs, of which the fastest counts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "sacct.txt"
        with path.open("w", encoding="utf-8") as out:
            out.writelines(f"{line}\n" for line in generate(options.records))
        megabytes = path.stat().st_size / 1e6
        accounting = read(path, reading=SacctReading(zone="UTC"))
        assert not accounting.problems
        assert accounting.records == options.records
        seconds = _timed(lambda: read(path, reading=SacctReading(zone="UTC")), options.repeat)
        split = _timed(lambda: _csv_split(path), options.repeat)
        pandas = _timed(lambda: _pandas(path), options.repeat)
    result = {
        "records": options.records,
        "megabytes": round(megabytes, 1),
        "seconds": round(seconds, 3),
        "records_per_second": round(options.records / seconds),
        "target_records_per_second": TARGET,
        "csv_reader_records_per_second": round(options.records / split),
        "pandas_read_csv_records_per_second": round(options.records / pandas),
        "times_csv_reader": round(split / seconds, 2),
        "times_pandas_read_csv": round(pandas / seconds, 2),
        "met": options.records / seconds >= TARGET,
    }
    report(to_csv_reader=seconds / split, to_pandas=seconds / pandas)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"sacct text -> typed frames: {result['records_per_second']:,} records/s "
            f"({megabytes:.0f} MB, {seconds:.2f} s)"
        )
        print(f"  csv.reader, splitting alone:  {result['csv_reader_records_per_second']:,} records/s")
        print(f"  pandas.read_csv, as strings:  {result['pandas_read_csv_records_per_second']:,} records/s")
        print(f"  target {TARGET:,} records/s: {'met' if result['met'] else 'MISSED'}")
    return 0 if result["met"] else MISSED


if __name__ == "__main__":
    sys.exit(main())
