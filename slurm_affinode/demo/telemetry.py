"""What the GPUs of the synthetic cluster showed: one row per GPU and minute, under the names of DCGM."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta

import numpy as np
import numpy.typing as npt
import polars as pl

from slurm_affinode.demo.schedule import NODES, Node, Run

STEP_S = 60
Array = npt.NDArray[np.float64]

UNLABELLED_NODE = "a100-04"
"""The exporter of this node does not know Slurm's jobs, as on sites without a job mapping directory."""
OUTAGE = ("a100-03", 2.35, 2.5)
"""Node, first and last day (as fractions) in which its exporter was down."""


def activity(kind: str, minutes: int, gpu: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Utilization (percent) and framebuffer use (fraction of the GPU's memory), a value a minute, of one GPU."""
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
    """True in bursts of ``length`` minutes (mean) whose starts are ``every`` minutes (mean) apart."""
    busy = np.zeros(minutes, dtype=bool)
    at = rng.exponential(every / 2)
    while at < minutes:
        end = at + rng.exponential(length) + 1
        busy[int(at) : int(end)] = True
        at = end + rng.exponential(every)
    return busy


def node_history(node: Node, runs: Sequence[Run], *, start: datetime, days: float, seed: int) -> pl.DataFrame:
    """The node's samples of the whole history, with the column names of dcgm-exporter."""
    return pl.concat([_gpu_history(node, gpu, runs, start=start, days=days, seed=seed) for gpu in range(node.gpus)])


def _gpu_history(node: Node, gpu: int, runs: Sequence[Run], *, start: datetime, days: float, seed: int) -> pl.DataFrame:
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
        held = (at_s >= run.start_s) & (at_s < (run.end_s if run.end_s is not None else np.inf))
        length = int(((run.end_s or int(days * 86400)) - run.start_s) // STEP_S) + 2
        own_util, own_memory = activity(run.kind.name, length, run.gpus.index(gpu), rng)
        minute = (at_s[held] - run.start_s) // STEP_S
        util[held], memory[held] = own_util[minute], own_memory[minute]
        job[held] = str(run.job_id)
    util[:] = np.round(np.clip(util, 0.0, 100.0))
    engine = np.round(util / 100.0 * rng.uniform(0.93, 0.99, minutes), 4)
    power = node.idle_w + (node.tdp_w - node.idle_w) * util / 100.0 * 0.86 + rng.normal(0.0, 1.2, minutes)
    labelled = node.name != UNLABELLED_NODE
    frame = pl.DataFrame(
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
    name, down, up = OUTAGE
    if node.name == name:
        frame = frame.filter(pl.Series((at_s < down * 86400) | (at_s >= up * 86400)))
    return frame
