"""The records of a cluster: GPUs with samples, job runs, recorded GPU IDs; stored as JSON to repeat a comparison."""

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
    """Signal -> value; None: the source gives NaN; absent: it does not have the signal. At least one entry."""
    jobs: list[int] = field(default_factory=list)
    """Job IDs of the label ``hpc_job``."""


@dataclass(slots=True)
class Gpu:
    """A GPU or MIG instance as identified in its metrics."""

    node: str
    uuid: str | None
    pci: str | None
    index: int | None
    samples: list[Sample]
    mig: int | None = None
    """ID of the GPU instance; None for the GPU itself."""

    @property
    def name(self) -> str:
        """Unique name in the cluster: node and UUID, otherwise PCI address, otherwise index."""
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
    suspended: int = 0
    """Seconds for which Slurm had suspended the job."""
    limit: int | None = None
    """Time limit in seconds; None: unlimited."""
    plain: bool = False
    """Text has its times without UTC offset, even if that leaves them ambiguous."""
    doubt: int = 0
    """Seconds by which start and end may be later."""


@dataclass(slots=True)
class Recorded:
    """A GPU ID recorded for a job."""

    job_id: int
    start: int | None
    node: str
    gpu: str
    """UUID, PCI address or index."""


@dataclass(slots=True)
class Cluster:
    """All input of a report."""

    since: int
    until: int
    accounted: int
    """Time of the accounting output, epoch seconds."""
    now: int
    """Time of the report, epoch seconds."""
    zone: str
    """Time zone of local times in text."""
    gpus: list[Gpu]
    runs: list[Run]
    recorded: list[Recorded] = field(default_factory=list)
    openmetrics: bool = False
    """Write exposition text as OpenMetrics."""
    neighbor: bool = False
    """The same database has another cluster with the same names of nodes, GPUs and jobs."""


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
    """Read the output of ``dumps``."""
    document: dict[str, Any] = json.loads(text)
    gpus = [
        Gpu(**{**gpu, "samples": [Sample(time, values, jobs) for time, values, jobs in gpu["samples"]]})
        for gpu in document["gpus"]
    ]
    runs = [Run(**run) for run in document["runs"]]
    return Cluster(
        **{**document, "gpus": gpus, "runs": runs, "recorded": [Recorded(**r) for r in document["recorded"]]}
    )
