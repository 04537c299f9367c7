"""A node with two GPUs and its jobs, for tests of live searches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from slurm_affinode.base.config import Config, StoreConfig
from slurm_affinode.model.cluster import GpuCount, Job, Node, NodeGpus
from slurm_affinode.zombies import live
from slurm_affinode.zombies.find import Request
from slurm_affinode.zombies.nodes import LiveGpu, LiveProcess, NodeAnswer
from slurm_affinode.zombies.sampling import NodeSampler

NOW = datetime(2026, 11, 2, 12, tzinfo=UTC)
EMPTY: dict[str, Any] = dict.fromkeys((field.name for field in dataclasses.fields(Job)), None)


def job(number: int, state: str = "RUNNING", **more: Any) -> Job:
    """A running job on GPU 0 of g1."""
    values = {
        **EMPTY, "job_id": number, "user": "ann", "uid": 1001, "account": "lab", "partitions": ("gpu",),
        "qos": "normal", "state": state, "is_held": False, "submit": NOW - timedelta(hours=3),
        "start": NOW - timedelta(hours=2),
        "nodes": ("g1",), "requeue": True, "restarts": 0, "tres_requested": {}, "tres_allocated": {},
        "gpus_requested": GpuCount(1), "gpus_allocated": GpuCount(1, "a100"), "batch": True, "time_limit_s": 86400,
        "node_gpus": (NodeGpus("g1", 1, "a100", (0,)),), "nodes_required": (), "nodes_excluded": (), **more,
    }  # fmt: skip
    return Job(**values)


def waiting(number: int, **more: Any) -> Job:
    """A pending job."""
    return job(number, "PENDING", start=None, nodes=(), node_gpus=None, gpus_allocated=None, reason="Resources",
               eligible=NOW - timedelta(hours=1), **more)  # fmt: skip


def node(name: str = "g1", **more: Any) -> Node:
    """A node with two GPUs."""
    values: dict[str, Any] = {
        "name": name, "state": "MIXED", "flags": frozenset(), "reason": None, "reason_user": None, "reason_time": None,
        "gpus": GpuCount(2), "gpus_used": GpuCount(1), "partitions": ("gpu",), "cpus": 16, "cpus_used": 8,
        "memory_mib": 64000, "memory_used_mib": 0, "features": (), "version": "24.11", **more,
    }  # fmt: skip
    return Node(**values)


def gpu(index: int = 0, util: float | None = 0.0, used: float = 79_000, **more: Any) -> LiveGpu:
    """A GPU of g1."""
    signals = {} if util is None else {"util_pct": util}
    values = {"node": "g1", "uuid": f"GPU-{index}", "index": index, "minor": index, "signals_pct": signals,
              "used_mib": used, "total_mib": 81_920.0, "processes": (), **more}  # fmt: skip
    return LiveGpu(**values)


def process(**more: Any) -> LiveProcess:
    """A process of ann."""
    values: dict[str, Any] = {"pid": 42, "start_ticks": 777, "uid": 1001, "user": "ann", "command": "python x.py",
                              "used_mib": 3000.0, "job": None, "source": None, "system": False, **more}  # fmt: skip
    return LiveProcess(**values)


class Slurm:
    """A slurmctld that records the queries."""

    def __init__(self, jobs: tuple[Job, ...], nodes: tuple[Node, ...], later: tuple[Job, ...] | None = None) -> None:
        """``later``: the jobs from the second query on."""
        self._jobs, self._nodes, self._later = jobs, nodes, jobs if later is None else later
        self.queries: list[str] = []

    def overview(self) -> tuple[Job, ...]:
        """Return the jobs."""
        self.queries.append("overview")
        return self._jobs if self.queries.count("overview") == 1 else self._later

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes."""
        self.queries.append("nodes")
        return self._nodes

    def config(self) -> dict[str, str]:
        """Return the configuration."""
        return {"ClusterName": "c"}


def find(
    tmp_path: Path, slurm: Slurm, samples: list[list[LiveGpu]], *, watch_s: float | None = 10.0, by: str = "agent"
) -> Any:
    """Run a live search; each sample of g1 takes the next of ``samples``, 2 s apart."""
    seeing = sampler(samples, by)
    return live.find_live(
        dataclasses.replace(Config(), store=StoreConfig(state_dir=tmp_path)), Request(window_s=5.0),
        slurm=client(slurm), ask=seeing.ask, watch_s=watch_s, now=seeing.now, sleep=seeing.sleep,
    )  # fmt: skip


def sampler(samples: list[list[LiveGpu]], by: str = "agent") -> NodeSampler:
    """Each sample takes the next of ``samples``; sleeping advances the clock."""
    clock = [NOW.timestamp()]

    def ask(name: str) -> NodeAnswer:
        gpus = samples.pop(0) if len(samples) > 1 else samples[0]
        return NodeAnswer(name, tuple(gpus), by, "" if by else "no route to host")

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    return NodeSampler(ask, lambda: clock[0], sleep)


def client(slurm: Slurm) -> Any:
    """Return a function that opens ``slurm``."""

    @contextmanager
    def opened() -> Iterator[Any]:
        yield slurm

    return opened
