"""The command behind ``make oracle``."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from oracle.campaign import compare, shrink
from oracle.clusters import FEATURES
from oracle.comparison import WAYS, differences
from oracle.model import Cluster, dumps, loads

OUT = Path("out/oracle")
_BATCH = 25
"""Clusters drawn at once; a failing batch is drawn again to shrink a difference."""


def main() -> int:
    """Compare clusters; return 1 if a figure differs."""
    options = _options()
    if options.replay:
        return _replay(options.replay)
    features = FEATURES - frozenset(options.without)
    began = time.monotonic()
    seeds = {options.seed * 1_000_000 + first: min(_BATCH, options.clusters - first)
             for first in range(0, options.clusters, _BATCH)}  # fmt: skip
    compared = differing = 0
    worst: tuple[int, int] | None = None
    os.environ["POLARS_MAX_THREADS"] = "1"  # per worker; there are as many workers as cores
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as workers:
        batches = {workers.submit(compare, seed, size, features): (seed, size) for seed, size in seeds.items()}
        for done in as_completed(batches):
            batch = done.result()
            for cluster, result in batch.differing:
                differing += 1
                _keep(cluster, result, f"{options.seed}-{differing}")
                worst = worst or batches[done]
            compared += batch.compared
            print(
                f"{compared:,} clusters, {differing:,} with differences, {time.monotonic() - began:.0f} s", flush=True
            )
    print(
        f"{compared:,} clusters, each in {len(WAYS)} formats: {differing:,} with differences; "
        f"{time.monotonic() - began:.0f} s"
    )
    if worst is not None and not options.no_shrink:
        smallest = shrink(*worst, features)
        _keep(smallest, differences(smallest), f"{options.seed}-smallest")
    return int(bool(differing))


def _replay(path: Path) -> int:
    result = differences(loads(path.read_text(encoding="utf-8")))
    print("\n".join(result) or "no difference")
    return int(bool(result))


def _keep(cluster: Cluster, differences: list[str], name: str) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.json"
    path.write_text(dumps(cluster), encoding="utf-8")
    more = f"\n  and {len(differences) - 12} more" if len(differences) > 12 else ""
    lines = "\n  ".join(differences[:12])
    print(f"{path}:\n  {lines}{more}\n  again: make oracle ARGS='--replay {path}'", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make oracle ARGS=", description=__doc__)
    parser.add_argument("--clusters", type=int, default=1000, metavar="N", help="number of clusters to compare")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same clusters")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes (default: one per core)"
    )
    parser.add_argument("--replay", type=Path, metavar="FILE", help="compare the cluster in FILE again")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for the smallest failing cluster")
    parser.add_argument(
        "--without", nargs="*", default=[], choices=sorted(FEATURES), metavar="FEATURE", help="leave out a feature"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
