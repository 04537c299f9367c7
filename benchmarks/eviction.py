"""Eviction from a fast tier: the product's rule compared with LRU, GDSF, a Hawkes process and clairvoyance.

    python benchmarks/eviction.py                                   # images of suspended jobs
    python benchmarks/eviction.py --models ../shared/data/gentd26   # requests of models, for comparison

**Images of suspended jobs** are read once, and remain until their job ends or has a newer one. The figure is the share
of the restored bytes that must be read from the next tier, over the second half of the images. No site has published
suspensions, so their times are **derived** from the accounting of a cluster, KTH-SP2 of the Parallel Workloads Archive:

- ``queue``: a job is suspended when it was submitted, and restored when it was started; the waits are those of its
  queue.
- ``pauses``: a user is a job that is suspended at the end of a job of theirs, and restored when they submit the next
  one, at most two weeks later: pauses of people, and several suspensions of each job.

Waits below a minute are left out. **Sizes are assumed**: 2 to 80 GB, log-uniform, one for each job. The sizes of the
tier are shares of the mean size of all waiting images. ``newest`` evicts the image that was written last, as would be
right if jobs were restored in the order of their suspension.

**Requests of models** are those of GenTD26. A request needs its base model and each of its LoRA adapters; those not in
the tier are loaded, and that time is counted, over the second half of the trace. ``requests``: data_trace_processed,
68,195 requests in order; their times are not published, so they are spread evenly over the 22.8 h of the trace's
metrics. ``sessions``: lora_request_trace, 26,823 requests of base models with their times, over 23 days. Load times are
quantiles of the measured ones, one for each model, by a hash of its ID. **Sizes are assumed**: base models 2.13, 6.94
and 23.8 GB (35, 55 and 10 % of them; slower ones are larger), adapters 20 to 400 MB.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import sys
import tarfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import polars as pl
from eviction_policies import IMAGES, MODELS, Replay, Suspension, suspended
from ratios import MISSED, report

from slurm_affinode.traces import gentd26, swf

DATA = Path(__file__).parents[2] / "shared" / "data"
LOG = DATA / "kth-sp2" / "KTH-SP2-1996-2.swf.gz"
TIERS = (0.25, 0.5, 1.0)
MODEL_TIERS = (0.1, 0.3)
SHORTEST_S, LONGEST_S = 60, 14 * 86400
SPAN_S = 1440 * 57.0
BASE_MB = ((0.35, 2130), (0.90, 6940), (1.01, 23800))


def share(text: str) -> float:
    """Return a number in [0, 1), determined by the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64


# --- images of suspended jobs


def queue(log: Path, most: int) -> list[Suspension]:
    """Return the waits of the first jobs in the queue."""
    jobs = swf.read(log).jobs.sort("submit_s").filter(pl.col("wait_s") >= SHORTEST_S).head(most)
    return [
        _suspension(str(number), at, at + wait_s, at + wait_s + run_s)
        for number, (at, wait_s, run_s) in enumerate(jobs.select("submit_s", "wait_s", "run_s").iter_rows())
    ]


def pauses(log: Path, most: int) -> list[Suspension]:
    """Return the first pauses of users."""
    ended, spans = dict[int, float](), list[tuple[int, float, float]]()
    jobs = swf.read(log).jobs.sort("submit_s").select("user", "submit_s", "wait_s", "run_s")
    for user, at, wait_s, run_s in jobs.iter_rows():
        if user in ended and SHORTEST_S <= at - ended[user] <= LONGEST_S:
            spans.append((user, ended[user], at))
        ended[user] = max(ended.get(user, 0.0), at + max(0, wait_s) + run_s)
    removed = dict[int, float]()
    images = []
    for user, began, restored in sorted(spans, key=lambda span: -span[1]):
        images.append(_suspension(str(user), began, restored, removed.get(user, restored + 3600)))
        removed[user] = began
    return images[::-1][:most]


def _suspension(job: str, began: float, restored: float, removed: float) -> Suspension:
    return Suspension(job, int(2000 * 40 ** share(job)), began, restored, max(restored, removed))


def waiting_mb(images: Sequence[Suspension]) -> float:
    """Return the mean size of the images that wait."""
    span_s = max(image.restored_s for image in images) - images[0].written_s
    return sum(image.size * (image.restored_s - image.written_s) for image in images) / span_s


def measure_images(log: Path, most: int) -> bool:
    """Print the shares; return whether the product's rule reads no more than GDSF and the Hawkes process anywhere."""
    print("| waits | tier | " + " | ".join(IMAGES) + " |")
    sums, best = dict.fromkeys(IMAGES, 0.0), True
    for name, images in (("queue", queue(log, most)), ("pauses", pauses(log, most))):
        mean_mb = waiting_mb(images)
        for fraction in TIERS:
            capacity = int(mean_mb * fraction)
            shares = {policy: suspended(images, capacity, policy) for policy in IMAGES}
            best = best and shares["ours"] <= min(shares["gdsf"], shares["hawkes"])
            sums = {policy: sums[policy] + shares[policy] for policy in IMAGES}
            row = " | ".join(f"{100 * shares[policy]:.1f}" for policy in IMAGES)
            print(f"| {name} | {100 * fraction:.0f} %, {capacity / 1000:.0f} GB | {row} |", flush=True)
    report(bytes_to_lru=sums["ours"] / sums["lru"], bytes_to_gdsf=sums["ours"] / sums["gdsf"])
    return best


# --- requests of models


def models(path: Path) -> list[Replay]:
    """Return the requests of both tables."""
    trace = gentd26.read([path])
    assert trace.requests is not None
    step = SPAN_S / trace.requests.height
    requests = []
    for number, (base, loras) in enumerate(trace.requests.select("base_model", "loras").iter_rows()):
        requests += [(number * step, "base", base)] if base is not None else []
        requests += [(number * step, "lora", lora) for lora in loras]
    latency = {
        kind: np.sort(trace.metrics[table]["value"].drop_nulls().to_numpy()) / 1000
        for kind, table in (("base", "load_base_model"), ("lora", "load_lora"))
    }
    timed = sessions(path / "lora_request_trace.tar.gz")
    return [replay("requests", requests, latency), replay("sessions", timed, latency)]


def sessions(path: Path) -> list[tuple[float, str, str]]:
    """Return the requests with times."""
    with tarfile.open(path) as archive:
        member = next(entry for entry in archive if entry.name.endswith("_trace.csv") and "._" not in entry.name)
        file = archive.extractfile(member)
        assert file is not None
        rows = list(csv.DictReader(io.TextIOWrapper(file)))
    return [
        (datetime.fromisoformat(row["gmt_create"] + "+00:00").timestamp(), "base", row["checkpoint_model_version_id"])
        for row in rows
        if row["checkpoint_model_version_id"]
    ]


def replay(name: str, rows: Sequence[tuple[float, str, str]], latency: dict[str, np.ndarray]) -> Replay:
    """Replace names by numbers."""
    ids: dict[tuple[str, str], int] = {}
    events = [ids.setdefault((kind, model), len(ids)) for _, kind, model in rows]
    costs = [float(np.quantile(latency[kind], share(model))) for kind, model in ids]
    sizes = [_size_mb(kind, share(model)) for kind, model in ids]
    return Replay(
        name, np.array(events), np.array([at for at, _, _ in rows]), np.array(costs), np.array(sizes, dtype=np.int64)
    )


def _size_mb(kind: str, quantile: float) -> int:
    return next(mb for limit, mb in BASE_MB if quantile < limit) if kind == "base" else int(20 + 380 * quantile)


def measure_models(path: Path) -> None:
    """Print load times as ratios to that of LRU."""
    print("| requests | tier | " + " | ".join(MODELS) + " |")
    for data in models(path):
        for fraction in MODEL_TIERS:
            capacity = int(data.size.sum() * fraction)
            seconds = {policy: replayed(data, capacity) for policy, replayed in MODELS.items()}
            row = " | ".join(f"{seconds[policy] / seconds['lru']:.2f}" for policy in MODELS)
            print(f"| {data.name} | {100 * fraction:.0f} %, {capacity / 1000:.0f} GB | {row} |", flush=True)


def main() -> int:
    """Replay; return ``MISSED`` if the product's rule reads more than GDSF or the Hawkes process somewhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, default=LOG, help="a log in the Standard Workload Format")
    parser.add_argument("--images", type=int, default=5000, help="number of images of each kind")
    parser.add_argument("--models", type=Path, metavar="DIRECTORY", help="replay the requests of GenTD26 instead")
    arguments = parser.parse_args()
    source = arguments.models or arguments.log
    if not source.exists():
        print(f"not measured: {source} does not exist")
        return 0
    if arguments.models is not None:
        measure_models(arguments.models)
        return 0
    return 0 if measure_images(arguments.log, arguments.images) else MISSED


if __name__ == "__main__":
    sys.exit(main())
