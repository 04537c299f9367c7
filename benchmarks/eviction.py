"""What is kept in a fast tier: our eviction against LRU, LFU, GDSF and clairvoyance, on the requests of GenTD26.

    python benchmarks/eviction.py ../shared/data/gentd26 [--json FILE]

Models are images. A request wants its base model and each of its LoRA adapters; what is not in the tier is loaded, and
that time is counted. All policies run over the whole trace and are measured on its second half.

**Trace.** ``requests``: data_trace_processed, 68,195 requests in their order; their times are not published, so they
are spread evenly over the 22.8 h of the trace's metrics. ``sessions``: lora_request_trace, 26,823 requests of base
models with their times, over 23 days.

**Load times** are measured ones: quantiles of basemodel_update_latency and lora_update_latency, one for each model, by
a hash of its id. **Sizes are assumed**, the trace has none: base models 2.13, 6.94 and 23.8 GB (fp16 weights of SD 1.5,
SDXL and FLUX.1, in 35, 55 and 10 % of them), adapters 20 to 400 MB. How size and load time go together is not known
either; four assumptions: ``matched`` (what is slower to load is larger), ``independent``, ``proportional`` (size = time
x one bandwidth per kind), ``means`` (all base models alike, all adapters alike).

**Bound.** A true lower bound on the load time of any policy, also a clairvoyant one, also one that keeps parts of
images and one that does not admit what it loads: the linear relaxation of offline caching (Berger, Beckmann &
Harchol-Balter 2018, "Practical Bounds on Optimal Caching with Variable Object Sizes"), by Lagrangian duality: every
price per byte and slot gives a valid bound, the best of 1,200 steps is taken. What was requested before the second half
may be in the tier at its beginning for free. ``belady`` is a clairvoyant policy for comparison: it drops what saves
least seconds per byte and time until its next request.

``HORIZON_TURNS`` of ``core/eviction.py`` was chosen on the first halves of both traces (``--tune``). The second halves
had been looked at before, when the kind of policy was chosen.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import heapq
import io
import json
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from slurm_affinode.core import eviction
from slurm_affinode.core.eviction import Demand, Held, Turnover, make_room
from slurm_affinode.history.traces import gentd26

FRACTIONS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
VARIANTS = ("matched", "independent", "proportional", "means")
SPAN_S = 1440 * 57.0
LESS_THAN_LRU = 0.30
ABOVE_BOUND = 0.25
BASE_MB = ((0.35, 2130), (0.90, 6940), (1.01, 23800))
MEAN_MB = {"base": 6940, "lora": 200}


@dataclass(frozen=True)
class Replay:
    """Requests as numbers of images, and what images cost. Sizes in MB."""

    name: str
    events: np.ndarray
    times: np.ndarray
    cost: np.ndarray
    size: np.ndarray

    @property
    def start(self) -> int:
        """Where measuring begins."""
        return len(self.events) // 2

    def first_half(self) -> Replay:
        """For tuning."""
        return Replay(self.name, self.events[: self.start], self.times[: self.start], self.cost, self.size)


def share(text: str) -> float:
    """A number in [0, 1) that belongs to a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2**64


def facts(kind: str, name: str, latency: dict[str, np.ndarray], variant: str) -> tuple[float, int]:
    """Load time in seconds and size in MB of a model."""
    cost, q = float(np.quantile(latency[kind], share(name))), share(name)
    if variant == "independent":
        q = share(f"size of {name}")
    mean = float(latency[kind].mean())
    if variant == "means":
        return mean, MEAN_MB[kind]
    if variant == "proportional":
        return cost, max(1, round(cost / mean * MEAN_MB[kind]))
    if kind == "base":
        return cost, next(mb for limit, mb in BASE_MB if q < limit)
    return cost, int(20 + 380 * q)


def read(path: Path) -> tuple[list[tuple[float, str, str]], list[tuple[float, str, str]], dict[str, np.ndarray]]:
    """Requests of both tables as (seconds, kind, model), and load times in seconds."""
    trace = gentd26.read([path])
    assert trace.requests is not None
    step = SPAN_S / trace.requests.height
    requests = []
    for number, (base, loras) in enumerate(trace.requests.select("base_model", "loras").iter_rows()):
        requests += [(number * step, "base", base)] if base is not None else []
        requests += [(number * step, "lora", one) for one in loras]
    latency = {
        kind: np.sort(trace.metrics[table]["value"].drop_nulls().to_numpy()) / 1000
        for kind, table in (("base", "load_base_model"), ("lora", "load_lora"))
    }
    return requests, sessions(path / "lora_request_trace.tar.gz"), latency


def sessions(path: Path) -> list[tuple[float, str, str]]:
    """The requests that have times."""
    with tarfile.open(path) as archive:
        member = next(one for one in archive if one.name.endswith("lora_request_trace.csv") and "._" not in one.name)
        file = archive.extractfile(member)
        assert file is not None
        rows = list(csv.DictReader(io.TextIOWrapper(file)))
    return [
        (datetime.fromisoformat(row["gmt_create"] + "+00:00").timestamp(), "base", row["checkpoint_model_version_id"])
        for row in rows
        if row["checkpoint_model_version_id"]
    ]


def replay(name: str, rows: Sequence[tuple[float, str, str]], latency: dict[str, np.ndarray], variant: str) -> Replay:
    """Numbers in place of names."""
    ids: dict[tuple[str, str], int] = {}
    events = [ids.setdefault((kind, model), len(ids)) for _, kind, model in rows]
    found = [facts(kind, model, latency, variant) for kind, model in ids]
    return Replay(
        name, np.array(events), np.array([at for at, _, _ in rows]), np.array([cost for cost, _ in found]),
        np.array([mb for _, mb in found], dtype=np.int64),
    )  # fmt: skip


# --- policies: seconds of loading in the second half, for a tier of so many MB


def ours(data: Replay, capacity: int, *, whole: bool = False) -> float:
    """What the product does. ``whole``: parts of images are not kept."""
    demand, held, free, total = Demand(), dict[int, int](), capacity, 0.0
    turnover = Turnover(float(data.times[0]))
    names = [str(number) for number in range(len(data.cost))]
    sizes, costs = data.size.tolist(), data.cost.tolist()
    grain = 1 << 40 if whole else 1
    for number, (image, at) in enumerate(zip(data.events.tolist(), data.times.tolist(), strict=True)):
        demand.requested(names[image], at)
        size, have = sizes[image], held.get(image, 0)
        if have == size:
            continue
        if number >= data.start:
            total += costs[image] * (size - have) / size
        wanted = Held(names[image], size, have, costs[image])
        there, rates = [], {}
        if free < size - have:
            there = [Held(names[one], sizes[one], part, costs[one]) for one, part in held.items()]
            horizon_s = turnover.horizon_s(capacity, at)
            rates = demand.rates([names[image], *(one.name for one in there)], at, horizon_s)
        plan = make_room(there, wanted, free, rates, grain=grain)
        if whole and plan.room < size:
            continue
        for cut in plan.cuts:
            one = int(cut.name)
            free += held[one] - cut.keep
            held[one] = cut.keep
            if not cut.keep:
                del held[one]
        if plan.room:
            held[image] = have + plan.room
            free -= plan.room
            turnover.took(plan.room, capacity, at)
    return total


def ranked(data: Replay, capacity: int, priority: Callable[[int, int, bool, float], float]) -> float:
    """Whole images, the one of lowest priority goes first, and what was loaded always comes in.

    ``priority`` of (image, number of the request, whether it was there, priority of the last that went).
    """
    held: dict[int, float] = {}
    heap: list[tuple[float, int]] = []
    free, total, level = capacity, 0.0, 0.0
    for number, image in enumerate(data.events.tolist()):
        hit = image in held
        if not hit and number >= data.start:
            total += data.cost[image]
        rank = priority(image, number, hit, level)
        if data.size[image] > capacity:
            continue
        while not hit and free < data.size[image]:
            worth, one = heapq.heappop(heap)
            if held.get(one) == worth:
                del held[one]
                free += int(data.size[one])
                level = max(level, worth)
        if not hit:
            free -= int(data.size[image])
        held[image] = rank
        heapq.heappush(heap, (rank, image))
    return total


def lru(data: Replay, capacity: int) -> float:
    """Least recently used goes."""
    return ranked(data, capacity, lambda image, number, hit, level: float(number))


def lfu(data: Replay, capacity: int) -> float:
    """Least often used goes; counts are of all time."""
    count = np.zeros(len(data.cost))

    def priority(image: int, number: int, hit: bool, level: float) -> float:
        count[image] += 1
        return float(count[image] + number * 1e-9)

    return ranked(data, capacity, priority)


def gdsf(data: Replay, capacity: int) -> float:
    """GreedyDual-Size-Frequency (Cherkasova 1998): frequency x cost / size above the level of what went last."""
    count = np.zeros(len(data.cost))

    def priority(image: int, number: int, hit: bool, level: float) -> float:
        count[image] = count[image] + 1 if hit else 1
        return float(level + count[image] * data.cost[image] / data.size[image])

    return ranked(data, capacity, priority)


def belady(data: Replay, capacity: int) -> float:
    """Clairvoyant: what saves least per byte and time until its next request goes, also what has just been loaded."""
    following, seen = np.full(len(data.events), 1e18), np.full(len(data.cost), 1e18)
    for number in range(len(data.events) - 1, -1, -1):
        following[number] = seen[data.events[number]]
        seen[data.events[number]] = number
    held: dict[int, float] = {}
    free, total = capacity, 0.0
    for number, image in enumerate(data.events.tolist()):
        hit = image in held
        if hit:
            held[image] = float(following[number])
            continue
        if number >= data.start:
            total += data.cost[image]
        worth = {
            one: data.cost[one] / data.size[one] / (at - number)
            for one, at in ((*held.items(), (image, following[number])))
        }
        need, goes, lost = int(data.size[image]) - free, [], 0.0
        for one in sorted(held, key=worth.__getitem__):
            if need <= 0:
                break
            goes.append(one)
            need -= int(data.size[one])
            lost += worth[one] * data.size[one]
        if need > 0 or (goes and lost > worth[image] * data.size[image]):
            continue
        for one in goes:
            del held[one]
            free += int(data.size[one])
        held[image] = float(following[number])
        free -= int(data.size[image])
    return total


def bound(data: Replay, capacity: int, steps: int = 1200) -> float:
    """No policy takes less; see the module's description."""
    events = data.events[data.start :]
    last = dict.fromkeys(data.events[: data.start].tolist(), -1)
    begin, end, image = [], [], []
    for number, one in enumerate(events.tolist()):
        if one in last:
            begin.append(last[one] + 1)
            end.append(number)
            image.append(one)
        last[one] = number
    total = float(data.cost[events].sum())
    a, b, which = np.array(begin), np.array(end), np.array(image)
    cost, size = data.cost[which], data.size[which].astype(float)
    free = a == b  # nothing between two requests of it
    total -= float(cost[free].sum())
    a, b, cost, size = a[~free], b[~free], cost[~free], size[~free]
    slots = len(events)
    unit = cost.sum() / slots / capacity
    price, mean, square, best = np.full(slots, unit / 2), np.zeros(slots), np.zeros(slots), np.inf
    for step in range(steps):
        smooth = max(0.002, 0.2 * 0.5 ** (8 * step / steps))
        sums = np.concatenate(([0.0], np.cumsum(price)))
        gain = cost - size * (sums[b] - sums[a])
        best = min(best, capacity * sums[-1] + float(np.maximum(gain, 0).sum()))
        kept = size / (1 + np.exp(-np.clip(gain / (smooth * cost), -40, 40)))
        use = np.cumsum(np.bincount(a, kept, slots + 1) - np.bincount(b, kept, slots + 1))[:slots]
        slope = 1 - use / capacity
        mean, square = 0.9 * mean + 0.1 * slope, 0.99 * square + 0.01 * slope**2
        price = np.maximum(0, price - 0.3 * unit * 0.5 ** (7 * step / steps) * mean / (np.sqrt(square) + 1e-3))
    return total - best


POLICIES: dict[str, Callable[[Replay, int], float]] = {
    "lru": lru, "lfu": lfu, "gdsf": gdsf, "ours": ours,
    "whole": lambda data, capacity: ours(data, capacity, whole=True), "belady": belady,
}  # fmt: skip


def measure(data: Replay, fraction: float) -> dict[str, float]:
    """Seconds of loading by each policy, and the bound."""
    capacity = int(data.size.sum() * fraction)
    return {
        "gb": capacity / 1000, **{name: float(policy(data, capacity)) for name, policy in POLICIES.items()},
        "bound": float(bound(data, capacity)),
    }  # fmt: skip


def tune(data: Replay) -> None:
    """Horizons on the first half alone: its first half warms up, its second is measured."""
    early = data.first_half()
    for fraction in FRACTIONS:
        capacity = int(early.size.sum() * fraction)
        base = lru(early, capacity)
        found = {}
        for turns in (0.01, 0.03, 0.1, 0.3, 1.0):
            eviction.HORIZON_TURNS = turns
            found[turns] = ours(early, capacity) / base
        print(f"{fraction:5.0%}  " + "  ".join(f"{turns:g}: {ratio:.3f}" for turns, ratio in found.items()), flush=True)


def main() -> int:
    """Replay; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "trace", type=Path, nargs="?", default=Path(__file__).parents[2] / "shared" / "data" / "gentd26"
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, metavar="NAME")
    parser.add_argument(
        "--fractions", nargs="+", type=float, default=FRACTIONS, metavar="SHARE", help="of all images' size"
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--tune", action="store_true", help="horizons on the first halves, nothing else")
    arguments = parser.parse_args()
    if not arguments.trace.is_dir():
        print(f"not measured: {arguments.trace} is not there (GenTD26, alibaba/clusterdata)")
        return 0
    requests, timed, latency = read(arguments.trace)
    if arguments.tune:
        for name, events in (("requests", requests), ("sessions", timed)):
            for variant in arguments.variants:
                print(name, variant)
                tune(replay(name, events, latency, variant))
        return 0
    rows, began = [], time.monotonic()
    for name, events in (("requests", requests), ("sessions", timed)):
        for variant in arguments.variants:
            data = replay(name, events, latency, variant)
            print(
                f"\n{name}, {variant}: {len(data.cost)} images, {data.size.sum() / 1000:.0f} GB, "
                f"{len(data.events)} requests; load time as ratio to the bound\n   store        "
                + "".join(f"{one:>8}" for one in POLICIES)
                + "   ours/lru"
            )
            for fraction in arguments.fractions:
                found = measure(data, fraction)
                rows.append({"trace": name, "sizes": variant, "share": fraction, **found})
                print(
                    f"  {fraction:4.0%} {found['gb']:6.0f} GB"
                    + "".join(f"{found[one] / found['bound']:8.2f}" for one in POLICIES)
                    + f"{found['ours'] / found['lru']:10.2f}",
                    flush=True,
                )
    less = sum(row["ours"] <= (1 - LESS_THAN_LRU) * row["lru"] for row in rows)
    near = sum(row["ours"] <= (1 + ABOVE_BOUND) * row["bound"] for row in rows)
    clairvoyant = sum(row["ours"] <= (1 + ABOVE_BOUND) * row["belady"] for row in rows)
    best = sum(row["ours"] <= min(row["lru"], row["lfu"], row["gdsf"]) for row in rows)
    print(f"\nat least {LESS_THAN_LRU:.0%} less load time than LRU: {less} of {len(rows)} settings (goal: all)")
    print(f"within {ABOVE_BOUND:.0%} of the bound:               {near} of {len(rows)} settings (goal: all)")
    print(f"within {ABOVE_BOUND:.0%} of clairvoyant Belady with costs: {clairvoyant} of {len(rows)} settings")
    print(f"no worse than LRU, LFU and GDSF:       {best} of {len(rows)} settings")
    print(f"{time.monotonic() - began:.0f} s")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"rows": rows, "less_than_lru": less, "near_bound": near, "near_belady": clairvoyant}, indent=1)
            + "\n"
        )
    return 0 if less == near == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
