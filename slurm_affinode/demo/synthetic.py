"""Synthetic history: generated jobs, scheduled first come, first served, as sacct text and DCGM samples."""

from __future__ import annotations

import heapq
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import numpy as np
import numpy.typing as npt
import polars as pl

HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class SyntheticNode:
    """A GPU node. Names are Slurm's; ``fb_mib``, ``tdp_w`` and ``idle_w`` are per GPU."""

    name: str
    partition: str
    model: str
    gres: str
    gpus: int
    fb_mib: float
    tdp_w: float
    idle_w: float


@dataclass(frozen=True, slots=True)
class JobKind:
    """A type of GPU job: how often it is submitted, its GPUs, its run time, and how it ends."""

    name: str
    weight: float
    gpus: tuple[int, ...]
    hours: tuple[float, float]
    ends: tuple[tuple[str, float], ...]
    users: tuple[str, ...]
    job_names: tuple[str, ...]
    qos: str = "normal"


@dataclass(frozen=True, slots=True)
class SyntheticRun:
    """One attempt of a synthetic job. Times are seconds since the start of the history."""

    job_id: int
    kind: JobKind
    job_name: str
    user: str
    account: str
    node: SyntheticNode
    gpus: tuple[int, ...]
    submit_s: int
    start_s: int
    end_s: int | None
    state: str
    timelimit_s: int


A100 = [
    SyntheticNode(f"a100-{n:02}", "a100", "NVIDIA A100-SXM4-80GB", "a100", 4, 81920.0, 400.0, 56.0) for n in range(1, 5)
]
H100 = [
    SyntheticNode(f"h100-{n:02}", "h100", "NVIDIA H100 80GB HBM3", "h100", 8, 81559.0, 700.0, 71.0) for n in range(1, 3)
]
NODES: tuple[SyntheticNode, ...] = (*A100, *H100)

ACCOUNTS = {
    "ada": "vision", "bo": "vision", "chen": "language", "dara": "language", "eli": "chemistry",
    "femi": "chemistry", "gus": "climate", "hana": "climate", "ivo": "teaching",
}  # fmt: skip

_END_STATES = (("COMPLETED", 0.85), ("FAILED", 0.07), ("CANCELLED by 1004", 0.05), ("OUT_OF_MEMORY", 0.03))
KINDS: tuple[JobKind, ...] = (
    JobKind(
        "train",
        5.0,
        (4, 4, 8, 2),
        (3, 20),
        _END_STATES,
        ("ada", "chen", "dara", "gus"),
        ("pretrain-350m", "resnet-sweep"),
    ),
    JobKind(
        "finetune", 6.0, (1, 1, 2), (0.7, 6), _END_STATES, ("bo", "chen", "eli"), ("finetune-lora", "md-potential")
    ),
    JobKind(
        "notebook",
        5.0,
        (1,),
        (3, 9),
        (("CANCELLED by 1007", 0.5), ("TIMEOUT", 0.5)),
        ("hana", "ivo", "bo"),
        ("jupyter", "interactive"),
        "interactive",
    ),
    JobKind(
        "squatter",
        1.6,
        (1, 2, 4),
        (18, 40),
        (("TIMEOUT", 0.8), ("CANCELLED by 1002", 0.2)),
        ("femi", "dara"),
        ("keep-warm", "eval_server <old>"),
    ),
    JobKind("server", 1.2, (1, 2), (20, 44), (("TIMEOUT", 1.0),), ("hana", "chen"), ("llm-endpoint",), "long"),
    JobKind("cpu-only", 1.6, (1,), (1, 8), _END_STATES, ("eli", "gus"), ("preprocess",)),
    JobKind("one-of-many", 1.4, (4,), (4, 14), _END_STATES, ("femi", "ivo"), ("train.py --gpus 4",)),
)


_LONGEST_WAIT_S = 3 * HOUR_S


def schedule(rng: np.random.Generator, *, days: float, jobs_per_day: float) -> list[SyntheticRun]:
    """Draw jobs and place them first come, first served; ``end_s`` is None for jobs running at the end."""
    horizon_s = int(days * 24 * HOUR_S)
    free: dict[str, set[int]] = {node.name: set(range(node.gpus)) for node in NODES}
    releases: list[tuple[int, int, str, tuple[int, ...]]] = []
    runs: list[SyntheticRun] = []
    weights = np.array([kind.weight for kind in KINDS])
    submits = np.sort(rng.uniform(-18 * HOUR_S, horizon_s, size=int((days + 0.75) * jobs_per_day)))
    clock = -18 * HOUR_S
    for number, submit in enumerate(submits.astype(int)):
        kind = KINDS[int(rng.choice(len(KINDS), p=weights / weights.sum()))]
        requested = int(rng.choice(kind.gpus))
        clock = max(clock, int(submit))
        _release(releases, free, until=clock)
        while (node := _place(free, requested, rng)) is None:
            clock = releases[0][0]
            _release(releases, free, until=clock)
        start = max(clock, int(submit)) + int(rng.integers(1, 6))
        if start >= horizon_s:
            break
        # The queue is strict and overloaded; owners who see that submit later.
        submitted = max(int(submit), start - number * 2_654_435_761 % _LONGEST_WAIT_S)
        run, end_s = _run(rng, kind, node, requested, free=free, when=(4200 + number, submitted, start))
        heapq.heappush(releases, (end_s, run.job_id, node.name, run.gpus))
        if end_s > 0:
            runs.append(run if end_s <= horizon_s else _still_running(run))
    return runs


def _run(
    rng: np.random.Generator,
    kind: JobKind,
    node: SyntheticNode,
    requested: int,
    *,
    free: dict[str, set[int]],
    when: tuple[int, int, int],
) -> tuple[SyntheticRun, int]:
    """Draw one attempt; return it and its end."""
    job_id, submit, start = when
    gpus = tuple(sorted(free[node.name])[:requested])
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
    return SyntheticRun(job_id, kind, name, user, ACCOUNTS[user], node, gpus, submit, start, end, state, limit_s), end


def _still_running(run: SyntheticRun) -> SyntheticRun:
    return replace(run, end_s=None, state="RUNNING")


def _release(releases: list[tuple[int, int, str, tuple[int, ...]]], free: dict[str, set[int]], *, until: int) -> None:
    while releases and releases[0][0] <= until:
        _, _, name, gpus = heapq.heappop(releases)
        free[name] |= set(gpus)


def _place(free: dict[str, set[int]], requested: int, rng: np.random.Generator) -> SyntheticNode | None:
    fitting = [node for node in NODES if len(free[node.name]) >= requested]
    if not fitting:
        return None
    tightest = min(len(free[node.name]) for node in fitting)
    best = [node for node in fitting if len(free[node.name]) == tightest]
    return best[int(rng.integers(len(best)))]


FIELDS = (
    "Cluster", "JobIDRaw", "JobID", "User", "Account", "Partition", "QOS", "State", "ExitCode", "Submit", "Eligible",
    "Start", "End", "ElapsedRaw", "TimelimitRaw", "NNodes", "NodeList", "NCPUS", "ReqMem", "ReqTRES", "AllocTRES",
    "MaxRSS", "SubmitLine", "JobName",
)  # fmt: skip
CPUS_PER_GPU = 12
MEM_PER_GPU_G = 120
_PROGRAMS = {"interactive": "salloc"}
"""Name of a job -> the program that submitted it, if it is not ``sbatch``."""
_EXIT = {"FAILED": "1:0", "OUT_OF_MEMORY": "0:125", "TIMEOUT": "0:0"}


def sacct_lines(
    runs: Sequence[SyntheticRun], *, start: datetime, horizon_s: int, cluster: str = "demo"
) -> Iterable[str]:
    """Yield the header and the records, one line each, without newline."""
    yield "|".join(FIELDS)
    for run in runs:
        yield from _records(run, start, horizon_s, cluster)


def _records(run: SyntheticRun, start: datetime, horizon_s: int, cluster: str) -> Iterable[str]:
    def utc(seconds: int | None) -> str:
        return "Unknown" if seconds is None else (start + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")

    gpus = len(run.gpus)
    cpus, mem_g = gpus * CPUS_PER_GPU, gpus * MEM_PER_GPU_G
    tres = f"cpu={cpus},mem={mem_g}G,node=1"
    line = f"{_PROGRAMS.get(run.job_name, 'sbatch')} --gpus={gpus}"
    gres = f"gres/gpu:{run.node.gres}={gpus},gres/gpu={gpus}"
    elapsed = (horizon_s if run.end_s is None else run.end_s) - run.start_s
    exit_code = _EXIT.get(run.state, "0:0")
    shared = [
        run.state, exit_code, utc(run.submit_s), utc(run.submit_s), utc(run.start_s), utc(run.end_s), str(elapsed),
    ]  # fmt: skip
    yield "|".join(
        [
            cluster, str(run.job_id), str(run.job_id), run.user, run.account, run.node.partition, run.kind.qos, *shared,
            str(run.timelimit_s // 60), "1", run.node.name, str(cpus), f"{mem_g}G",
            f"billing={cpus},{tres},{gres}", f"billing={cpus},{tres},{gres}", "", line, run.job_name,
        ]
    )  # fmt: skip
    step_state = "CANCELLED" if run.state == "TIMEOUT" else run.state.split()[0]
    step = f"{run.job_id}.batch"
    began = utc(run.start_s)
    yield "|".join(
        [
            cluster, step, step, "", run.account, "", "", step_state, exit_code, began, began, began, utc(run.end_s),
            str(elapsed), "", "1", run.node.name, str(cpus), "", "", f"{tres},{gres}",
            f"{gpus * 14 * 1024 * 1024 + run.job_id % 977}K", "", "batch",
        ]
    )  # fmt: skip


STEP_S = 60
Array = npt.NDArray[np.float64]

UNLABELLED_NODE = "a100-04"
"""The node with an exporter that does not know Slurm's jobs, as on sites without a job mapping directory."""
OUTAGE = ("a100-03", 2.35, 2.5)
"""Node, and the days (as fractions) between which its exporter was down."""


def activity(kind: str, minutes: int, gpu: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return utilization (percent) and framebuffer use (fraction of the memory) of one GPU, one value per minute."""
    t = np.arange(minutes)
    noise = rng.normal(0.0, 1.0, minutes)
    ramp = np.clip(t / 6.0, 0.0, 1.0)
    if kind == "train":
        dip = (t % int(rng.integers(45, 80))) < 2
        return np.where(dip, 2.0, 93.0 + 3.0 * noise) * (t > 2), 0.9 * ramp
    if kind == "finetune":
        pause = (t % int(rng.integers(30, 60))) < 4
        return np.where(pause, 0.0, 74.0 + 8.0 * noise) * (t > 3), 0.62 * ramp
    if kind == "notebook":
        busy = _bursts(rng, minutes, every=float(rng.uniform(70, 200)), length=9.0)
        return np.where(busy, 45.0 + 15.0 * noise, 0.0), 0.34 * np.clip(t / 20.0, 0.02, 1.0)
    if kind == "keep-warm":  # a kernel a minute, so that the GPU is never idle
        return np.where(t < 14, 80.0 + 6.0 * noise, 1.0), 0.96 * ramp
    if kind == "squatter":
        return np.where(t < 14, 80.0 + 6.0 * noise, 0.0), 0.96 * ramp
    if kind == "server":
        busy = _bursts(rng, minutes, every=24.0, length=5.0)
        return np.where(busy, 22.0 + 9.0 * noise, np.where(t % 3 == 0, 3.0, 0.0)), 0.88 * ramp
    if kind == "one-of-many" and gpu == 0:
        return 88.0 + 4.0 * noise, 0.7 * ramp
    if kind == "one-of-many":
        return np.zeros(minutes), np.full(minutes, 0.006)
    return np.zeros(minutes), np.zeros(minutes)


def _bursts(rng: np.random.Generator, minutes: int, *, every: float, length: float) -> npt.NDArray[np.bool_]:
    """Return bursts of True with a mean length of ``length`` minutes and mean gaps of ``every`` minutes."""
    busy = np.zeros(minutes, dtype=bool)
    start_minute = rng.exponential(every / 2)
    while start_minute < minutes:
        end = start_minute + rng.exponential(length) + 1
        busy[int(start_minute) : int(end)] = True
        start_minute = end + rng.exponential(every)
    return busy


def node_history(
    node: SyntheticNode,
    runs: Sequence[SyntheticRun],
    *,
    start: datetime,
    days: float,
    seed: int,
    shown: float | None = None,
) -> pl.DataFrame:
    """Return the node's samples for the whole history, with the column names of dcgm-exporter.

    ``shown``: the last days of the history, in which there is an outage; by default all of them.
    """
    frame = pl.concat([_gpu_history(node, gpu, runs, start=start, days=days, seed=seed) for gpu in range(node.gpus)])
    name, down, up = OUTAGE
    if node.name != name:
        return frame
    first = start + timedelta(days=days - (shown or days))
    lost = pl.col("timestamp").is_between(first + timedelta(days=down), first + timedelta(days=up), closed="left")
    return frame.filter(~lost)


def _gpu_history(
    node: SyntheticNode, gpu: int, runs: Sequence[SyntheticRun], *, start: datetime, days: float, seed: int
) -> pl.DataFrame:
    minutes = int(days * 24 * 60)
    rng = np.random.default_rng([seed, NODES.index(node), gpu])
    offset_s = int(rng.integers(0, STEP_S))
    util: Array = np.zeros(minutes)
    memory: Array = np.zeros(minutes)
    job = np.full(minutes, None, dtype=object)
    at_s = np.arange(minutes) * STEP_S + offset_s
    for run in runs:
        if run.node != node or gpu not in run.gpus:
            continue
        in_run = (at_s >= run.start_s) & (at_s < (run.end_s if run.end_s is not None else np.inf))
        length = int(((run.end_s or int(days * 86400)) - run.start_s) // STEP_S) + 2
        kind = run.job_name if run.job_name == "keep-warm" else run.kind.name
        own_util, own_memory = activity(kind, length, run.gpus.index(gpu), rng)
        minute = (at_s[in_run] - run.start_s) // STEP_S
        util[in_run], memory[in_run] = own_util[minute], own_memory[minute]
        job[in_run] = str(run.job_id)
    util[:] = np.round(np.clip(util, 0.0, 100.0))
    engine = np.round(util / 100.0 * rng.uniform(0.93, 0.99, minutes), 4)
    power = node.idle_w + (node.tdp_w - node.idle_w) * util / 100.0 * 0.86 + rng.normal(0.0, 1.2, minutes)
    labelled = node.name != UNLABELLED_NODE
    return pl.DataFrame(
        {
            "timestamp": [start + timedelta(seconds=int(s)) for s in at_s],
            "Hostname": node.name,
            "gpu": pl.Series([gpu] * minutes, dtype=pl.Int16),
            "UUID": f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{node.name}.{gpu}.demo')}",
            "pci_bus_id": f"00000000:{0x10 + 0x20 * gpu:02X}:00.0",
            "modelName": node.model,
            "DCGM_FI_DEV_GPU_UTIL": util,
            "DCGM_FI_PROF_GR_ENGINE_ACTIVE": engine,
            "DCGM_FI_PROF_DRAM_ACTIVE": np.round(engine * 0.45, 4),
            "DCGM_FI_DEV_FB_USED": np.round(memory * node.fb_mib),
            "DCGM_FI_DEV_FB_FREE": node.fb_mib - np.round(memory * node.fb_mib),
            "DCGM_FI_DEV_POWER_USAGE": np.round(power, 1),
            "DCGM_FI_DEV_XID_ERRORS": pl.Series([0] * minutes, dtype=pl.Int32),
            "hpc_job": pl.Series(job.tolist() if labelled else [None] * minutes, dtype=pl.String),
        }
    )
