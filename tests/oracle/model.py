"""A cluster as its records show it: GPUs with samples, job runs, recorded GPU IDs; kept as JSON to run it again."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

SIGNALS = ("util_pct", "engine_active", "sm_active", "tensor_active", "dram_active", "fb_used_mib", "power_w")


@dataclass(slots=True)
class Sample:
    """One sample of one GPU."""

    time_ms: int
    values: dict[str, float | None]
    """Signal -> value; None: the source gives a NaN, absent: it does not have the signal. At least one entry."""
    jobs: list[int] = field(default_factory=list)
    """Job IDs of the label ``hpc_job``."""


@dataclass(slots=True)
class Gpu:
    """A GPU (or MIG instance) as its metrics name it."""

    node: str
    uuid: str | None
    pci: str | None
    index: int | None
    samples: list[Sample]
    mig: int | None = None
    """ID of the GPU instance; the GPU itself has none."""

    @property
    def name(self) -> str:
        """What tells it from other GPUs of the cluster: the UUID, else the PCI address, else the index, on its node."""
        named = self.uuid or self.pci or f"index {self.index}"
        return f"{self.node} {named}" + ("" if self.mig is None else f" instance {self.mig}")


@dataclass(slots=True)
class Run:
    """A job run as accounting shows it. Times are epoch seconds."""

    job_id: int
    submit: int
    start: int
    end: int | None
    nodes: list[str]
    gpus: int
    user: str = "ann"
    array: list[int] | None = None
    """Array job ID and task ID."""
    het: list[int] | None = None
    """Job ID of the leader and offset."""
    requeued: bool = False
    """A later run of the same job follows."""


@dataclass(slots=True)
class Recorded:
    """A GPU ID that was recorded for a job."""

    job_id: int
    start: int | None
    node: str
    gpu: str
    """UUID, PCI address or index."""


@dataclass(slots=True)
class Cluster:
    """Everything that a report rests on."""

    since: int
    until: int
    accounted: int
    """When accounting was printed."""
    now: int
    """When the report is made."""
    zone: str
    """Of local times in text."""
    gpus: list[Gpu]
    runs: list[Run]
    recorded: list[Recorded] = field(default_factory=list)
    openmetrics: bool = False
    """Whether exposition text is OpenMetrics."""


def dumps(cluster: Cluster) -> str:
    """Write ``cluster`` as JSON, one sample per line."""
    document = asdict(cluster)
    samples: list[str] = []
    for gpu in document["gpus"]:
        for number, sample in enumerate(gpu["samples"]):
            gpu["samples"][number] = f"@{len(samples)}@"
            samples.append(json.dumps([sample["time_ms"], sample["values"], sample["jobs"]]))
    text = json.dumps(document, indent=1)
    return re.sub(r'"@(\d+)@"', lambda match: samples[int(match[1])], text) + "\n"


def loads(text: str) -> Cluster:
    """Read what ``dumps`` wrote."""
    document: dict[str, Any] = json.loads(text)
    gpus = [
        Gpu(**{**gpu, "samples": [Sample(time, values, jobs) for time, values, jobs in gpu["samples"]]})
        for gpu in document["gpus"]
    ]
    runs = [Run(**run) for run in document["runs"]]
    return Cluster(
        **{**document, "gpus": gpus, "runs": runs, "recorded": [Recorded(**r) for r in document["recorded"]]}
    )
