"""Which synthetic job ran where and when: a first-come, first-served schedule of invented jobs."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class Node:
    """A GPU node. Names are Slurm's, ``fb_mib`` and ``tdp_w`` are per GPU."""

    name: str
    partition: str
    model: str
    gres: str
    gpus: int
    fb_mib: float
    tdp_w: float
    idle_w: float


@dataclass(frozen=True, slots=True)
class Kind:
    """A way of using GPUs: how often it is submitted, how wide, for how long, and how it ends."""

    name: str
    weight: float
    gpus: tuple[int, ...]
    hours: tuple[float, float]
    ends: tuple[tuple[str, float], ...]
    users: tuple[str, ...]
    job_names: tuple[str, ...]
    qos: str = "normal"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a synthetic job. Times are seconds since the start of the history."""

    job_id: int
    kind: Kind
    job_name: str
    user: str
    account: str
    node: Node
    gpus: tuple[int, ...]
    submit_s: int
    start_s: int
    end_s: int | None
    state: str
    timelimit_s: int


A100 = [Node(f"a100-{n:02}", "a100", "NVIDIA A100-SXM4-80GB", "a100", 4, 81920.0, 400.0, 56.0) for n in range(1, 5)]
H100 = [Node(f"h100-{n:02}", "h100", "NVIDIA H100 80GB HBM3", "h100", 8, 81559.0, 700.0, 71.0) for n in range(1, 3)]
NODES: tuple[Node, ...] = (*A100, *H100)

ACCOUNTS = {
    "ada": "vision", "bo": "vision", "chen": "language", "dara": "language", "eli": "chemistry",
    "femi": "chemistry", "gus": "climate", "hana": "climate", "ivo": "teaching",
}  # fmt: skip

_DONE = (("COMPLETED", 0.85), ("FAILED", 0.07), ("CANCELLED by 1004", 0.05), ("OUT_OF_MEMORY", 0.03))
KINDS: tuple[Kind, ...] = (
    Kind("train", 5.0, (4, 4, 8, 2), (3, 20), _DONE, ("ada", "chen", "dara", "gus"), ("pretrain-350m", "resnet-sweep")),
    Kind("finetune", 6.0, (1, 1, 2), (0.7, 6), _DONE, ("bo", "chen", "eli"), ("finetune-lora", "md-potential")),
    Kind("notebook", 5.0, (1,), (3, 9), (("CANCELLED by 1007", 0.5), ("TIMEOUT", 0.5)), ("hana", "ivo", "bo"),
         ("jupyter", "interactive"), "interactive"),
    Kind("squatter", 1.6, (1, 2, 4), (18, 40), (("TIMEOUT", 0.8), ("CANCELLED by 1002", 0.2)), ("femi", "dara"),
         ("keep-warm", "eval_server <old>")),
    Kind("server", 1.2, (1, 2), (20, 44), (("TIMEOUT", 1.0),), ("hana", "chen"), ("llm-endpoint",), "long"),
    Kind("cpu-only", 1.6, (1,), (1, 8), _DONE, ("eli", "gus"), ("preprocess",)),
    Kind("one-of-many", 1.4, (4,), (4, 14), _DONE, ("femi", "ivo"), ("train.py --gpus 4",)),
)  # fmt: skip


def schedule(rng: np.random.Generator, *, days: float, jobs_per_day: float) -> list[Run]:
    """Draw jobs and place them first come, first served; ``end_s`` is None for those still running at the end."""
    horizon_s = int(days * 24 * HOUR_S)
    free: dict[str, set[int]] = {node.name: set(range(node.gpus)) for node in NODES}
    releases: list[tuple[int, int, str, tuple[int, ...]]] = []
    runs: list[Run] = []
    weights = np.array([kind.weight for kind in KINDS])
    submits = np.sort(rng.uniform(-18 * HOUR_S, horizon_s, size=int((days + 0.75) * jobs_per_day)))
    clock = -18 * HOUR_S
    for number, submit in enumerate(submits.astype(int)):
        kind = KINDS[int(rng.choice(len(KINDS), p=weights / weights.sum()))]
        wanted = int(rng.choice(kind.gpus))
        clock = max(clock, int(submit))
        _release(releases, free, until=clock)
        while (node := _place(free, wanted, rng)) is None:
            clock = releases[0][0]
            _release(releases, free, until=clock)
        start = max(clock, int(submit)) + int(rng.integers(1, 6))
        if start >= horizon_s:
            break
        run, end_s = _run(rng, kind, node, wanted, free=free, when=(4200 + number, int(submit), start))
        heapq.heappush(releases, (end_s, run.job_id, node.name, run.gpus))
        if end_s > 0:
            runs.append(run if end_s <= horizon_s else _still_running(run))
    return runs


def _run(
    rng: np.random.Generator,
    kind: Kind,
    node: Node,
    wanted: int,
    *,
    free: dict[str, set[int]],
    when: tuple[int, int, int],
) -> tuple[Run, int]:
    """A run and its end."""
    job_id, submit, start = when
    gpus = tuple(sorted(free[node.name])[:wanted])
    free[node.name] -= set(gpus)
    user = str(rng.choice(kind.users))
    state = str(rng.choice([s for s, _ in kind.ends], p=[p for _, p in kind.ends]))
    low, high = kind.hours
    length = int(np.exp(rng.uniform(np.log(low), np.log(high))) * HOUR_S)
    if state in ("FAILED", "OUT_OF_MEMORY"):
        length = int(length * rng.uniform(0.02, 0.5)) + 60
    limit_h = int(np.ceil(length / HOUR_S)) if state == "TIMEOUT" else int(rng.choice([12, 24, 48]))
    limit_s = max(limit_h * HOUR_S, (length // HOUR_S + 1) * HOUR_S)
    if state == "TIMEOUT":
        length = limit_s + int(rng.integers(5, 30))
    name = str(rng.choice(kind.job_names))
    end = start + length
    return Run(job_id, kind, name, user, ACCOUNTS[user], node, gpus, submit, start, end, state, limit_s), end


def _still_running(run: Run) -> Run:
    return replace(run, end_s=None, state="RUNNING")


def _release(releases: list[tuple[int, int, str, tuple[int, ...]]], free: dict[str, set[int]], *, until: int) -> None:
    while releases and releases[0][0] <= until:
        _, _, name, gpus = heapq.heappop(releases)
        free[name] |= set(gpus)


def _place(free: dict[str, set[int]], wanted: int, rng: np.random.Generator) -> Node | None:
    fitting = [node for node in NODES if len(free[node.name]) >= wanted]
    if not fitting:
        return None
    tightest = min(len(free[node.name]) for node in fitting)
    best = [node for node in fitting if len(free[node.name]) == tightest]
    return best[int(rng.integers(len(best)))]
