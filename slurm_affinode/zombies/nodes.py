"""Current GPU readings of the nodes, from the agents or else from the exporters.

A node on which neither responds is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from slurm_affinode.agent import client
from slurm_affinode.agent.settings import node_name
from slurm_affinode.base.config import Config, ZombiesConfig
from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.base.http import HttpError, fetch, tls_context
from slurm_affinode.base.node_config import DEFAULT_PORT, listen_address
from slurm_affinode.metrics.readers.exposition import parse_labels
from slurm_affinode.model.finding import GpuEvidence
from slurm_affinode.model.gpu import FREE_MIB, UNMEASURED, kind_of

AT_ONCE = 32
TIMEOUT_S = 10.0
LARGEST_ANSWER = 16 << 20
_SHARES = ("engine_active", "sm_active", "tensor_active", "dram_active")
_NAMES = {
    "DCGM_FI_DEV_GPU_UTIL": ("util_pct", 1.0),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("engine_active", 100.0),
    "DCGM_FI_PROF_SM_ACTIVE": ("sm_active", 100.0),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("tensor_active", 100.0),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("dram_active", 100.0),
    "DCGM_FI_DEV_FB_USED": ("fb_used_mib", 1.0),
    "DCGM_FI_DEV_FB_FREE": ("fb_free_mib", 1.0),
    "DCGM_FI_DEV_FB_TOTAL": ("fb_total_mib", 1.0),
    "DCGM_FI_DEV_POWER_USAGE": ("power_w", 1.0),
    "DCGM_FI_DEV_XID_ERRORS": ("xid", 1.0),
}


@dataclass(frozen=True, slots=True)
class EndedServer:
    """The server that a process has lost, as reported by the node's agent."""

    address: str
    """Host and port, as in the metrics."""
    engines: tuple[str, ...]
    """``vllm``, ..., with the model, which the user chose."""
    pids: tuple[int, ...]
    end: datetime
    """When the agent noticed it."""


@dataclass(frozen=True, slots=True)
class LiveProcess:
    """A process on a GPU, as reported by the node's agent."""

    pid: int
    start_ticks: int
    uid: int
    user: str | None
    command: str
    used_mib: float | None
    job: int | None
    source: str | None
    """How the job is known; ``environment``: from the environment of the process, which its user controls."""
    system: bool
    """It belongs to a system user: a driver's daemon, a display server."""
    sm_pct: float | None = None
    """SM utilization in the last seconds; ``None``: the driver does not report it per process."""
    memory_pct: float | None = None
    """Memory utilization, likewise."""
    server: EndedServer | None = None
    """``None``: it has lost no server, as far as is known."""

    def may_be_of(self, owner: int | None) -> bool:
        """Return whether it may belong to the user ``owner``, by its UID.

        A UID without a name may be a container's, and then belong to any user.
        """
        return owner in (None, self.uid) or self.user in (None, str(self.uid))


@dataclass(frozen=True, slots=True)
class LiveGpu:
    """The current state of one GPU, or of a job's share of it."""

    node: str
    uuid: str | None
    index: int | None
    minor: int | None = None
    mig: str | None = None
    model: str | None = None
    signals_pct: Mapping[str, float] = field(default_factory=dict)
    """The available activity signals."""
    used_mib: float | None = None
    total_mib: float | None = None
    power_w: float | None = None
    xid: int | None = None
    processes: tuple[LiveProcess, ...] | None = None
    """``None``: unknown."""
    jobs: tuple[str, ...] = ()
    """Job IDs in the labels of the exporter."""
    fault: str | None = None
    part_of: int | None = None
    """Raw ID of the job if this is its share of a shared GPU; ``None``: the whole GPU."""
    mapping: str | None = None
    """How the GPU is known to be the job's, a key of ``finding.MAPPINGS``."""

    @property
    def key(self) -> tuple[str, str]:
        """Return node and GPU, or a job's share of it."""
        node, name = self.whole
        return node, name if self.part_of is None else f"{name} of {self.part_of}"

    @property
    def whole(self) -> tuple[str, str]:
        """Return node and GPU."""
        return self.node, f"{self.uuid or self.index}{'' if self.mig is None else f'/{self.mig}'}"

    def mapped(self, mapping: str) -> LiveGpu:
        """Return it with another ``mapping``; ``replace`` would take three times as long."""
        return LiveGpu(
            self.node, self.uuid, self.index, self.minor, self.mig, self.model, self.signals_pct, self.used_mib,
            self.total_mib, self.power_w, self.xid, self.processes, self.jobs, self.fault, self.part_of, mapping,
        )  # fmt: skip

    def evidence(self) -> GpuEvidence:
        """Return the GPU, or the share of it, for a finding, without durations."""
        used_gib, total = (None if mib is None else mib / 1024 for mib in (self.used_mib, self.total_mib))
        return GpuEvidence(
            self.node, self.uuid or "?" if self.index is None else str(self.index), self.uuid, self.model, used_gib,
            total, max(self.signals_pct.values(), default=None), power_w=self.power_w, xid=self.xid,
            measured=bool(self.signals_pct), mapping=self.mapping, shared=self.part_of is not None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class JobUse:
    """A job's use of one node."""

    cpu_s: float
    """CPU time since the job started."""
    memory_mib: float
    """Peak host memory, or an upper bound of it."""


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """The response of one node."""

    node: str
    gpus: tuple[LiveGpu, ...] = ()
    by: str = ""
    """``agent``, ``exporter``, or empty: neither responded."""
    problem: str = ""
    uses: Mapping[int, JobUse] | None = None
    """Raw ID of each job with a process there -> its use; ``None``: unknown."""


Ask = Callable[[str], NodeAnswer]
_tls = cache(tls_context)
"""Shared by the requests to all nodes: a context takes milliseconds."""


def ask_all(nodes: Iterable[str], ask: Ask) -> list[NodeAnswer]:
    """Query several nodes in parallel."""
    names = list(nodes)
    if not names:
        return []
    with ThreadPoolExecutor(min(AT_ONCE, len(names))) as pool:
        return list(pool.map(ask, names))


ASLEEP = frozenset({"asleep", "waking", "starting"})
"""States in ``status`` of jobs in place that are frozen, or wait for GPU memory to wake or start."""


def asker(config: Config) -> Ask:
    """Return a function that queries a node's agent, or its exporter if the agent does not respond."""

    def ask(node: str) -> NodeAnswer:
        try:
            return _with_xids(from_agent(node, _agent(config, node, _PROCESSES)), config.zombies)
        except AffinodeError as error:
            problem = str(error)
        try:
            return NodeAnswer(node, exposed(node, _metrics(config.zombies, node)), "exporter", problem)
        except AffinodeError as error:
            return NodeAnswer(node, problem=f"{problem}; {error}")

    return ask


def _with_xids(answer: NodeAnswer, config: ZombiesConfig) -> NodeAnswer:
    """Add the last XIDs known to the exporter if memory is held and no process holds it.

    The driver reports XIDs only as events: the exporter always listens, an agent only since its first reading.
    """
    if not any((gpu.used_mib or 0) > FREE_MIB and gpu.processes == () and not gpu.xid for gpu in answer.gpus):
        return answer
    try:
        xids = {gpu.uuid: gpu.xid for gpu in exposed(answer.node, _metrics(config, answer.node)) if gpu.xid}
    except AffinodeError:
        return answer
    return replace(answer, gpus=tuple(replace(gpu, xid=gpu.xid or xids.get(gpu.uuid, gpu.xid)) for gpu in answer.gpus))


def sleeps(config: Config, node: str, job_id: int) -> bool:
    """Return whether the node's agent knows that the job (raw ID) sleeps in place; not if it does not respond."""
    try:
        rows = _agent(config, node, {"verb": "status"}).get("jobs") or ()
    except AffinodeError:
        return False
    return any(row.get("job_id") == job_id and row.get("state") in ASLEEP for row in rows)


_PROCESSES = {"verb": "processes", "use": True, "each": True}


def _agent(config: Config, node: str, request: Mapping[str, Any]) -> dict[str, Any]:
    if node == node_name(config):
        return client.ask_local(config.agent.run_dir, request, timeout_s=TIMEOUT_S)
    port = listen_address(config.agent.listen)[1] if config.agent.listen else DEFAULT_PORT
    return client.ask_node(node, port, node, request, timeout_s=TIMEOUT_S)


def _metrics(config: ZombiesConfig, node: str) -> str:
    url = config.exporter_url or f"http://{{node}}:{config.exporter_port}/metrics"
    url = url.replace("{node}", node)
    if not url.startswith(("http://", "https://")):
        raise AffinodeError(f"zombies.exporter_url: {url} is neither http nor https")
    token = config.exporter_token_file
    headers = {} if token is None else {"Authorization": f"Bearer {_token(token)}"}
    try:
        response = fetch(
            url, headers=headers, timeout_s=TIMEOUT_S, largest=LARGEST_ANSWER, tls=_tls(config.exporter_ca_file),
            follow=True,
        )  # fmt: skip
    except HttpError as error:
        raise UnreachableError(f"the exporter at {url} does not respond: {error}") from error
    if response.status != 200:
        raise UnreachableError(f"the exporter at {url} answers {response.status} {response.reason}")
    return response.body.decode("utf-8", "replace")


def _token(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise AffinodeError(f"{path}: cannot be read: {error.strerror or error}") from error


def from_agent(node: str, answer: Mapping[str, Any]) -> NodeAnswer:
    """Decode an agent's response to ``processes``. Missing values are unknown."""
    gpus = []
    for row in answer.get("gpus") or ():
        reading = row.get("reading") or {}
        cannot = UNMEASURED.get(kind_of(row.get("mig"), row.get("model")) or "", frozenset())
        signals = {} if reading.get("util_pct") is None else {"util_pct": float(reading["util_pct"])}
        signals |= {name: 100 * float(reading[name]) for name in _SHARES if reading.get(name) is not None}
        signals = {name: value for name, value in signals.items() if name not in cannot}
        reported = row.get("processes")
        gpus.append(LiveGpu(
            node, row.get("uuid"), row.get("index"), row.get("minor"), row.get("mig"), row.get("model"), signals,
            reading.get("fb_used_mib"), reading.get("fb_total_mib") or row.get("total_mib"), reading.get("power_w"),
            reading.get("xid"), None if reported is None else tuple(_process(process) for process in reported),
            fault=row.get("fault"),
        ))  # fmt: skip
    reported = answer.get("jobs")
    uses = None if not isinstance(reported, list) else {
        int(row["job"]): JobUse(float(row["cpu_s"]), float(row["memory_mib"])) for row in reported
    }  # fmt: skip
    return NodeAnswer(node, tuple(gpus), "agent", uses=uses)


def _process(row: Mapping[str, Any]) -> LiveProcess:
    return LiveProcess(
        int(row["pid"]), int(row["start_ticks"]), int(row["uid"]), row.get("user"), str(row.get("command") or ""),
        row.get("used_mib"), row.get("job"), row.get("source"), bool(row.get("system")), row.get("sm_pct"),
        row.get("memory_pct"), _ended_server(row.get("server")),
    )  # fmt: skip


def _ended_server(row: Mapping[str, Any] | None) -> EndedServer | None:
    if not row:
        return None
    names = tuple(" ".join(filter(None, (engine["engine"], engine.get("model")))) for engine in row["engines"])
    ended = datetime.fromtimestamp(float(row["ended"]), UTC)
    return EndedServer(str(row["address"]), names, tuple(int(pid) for pid in row["pids"]), ended)


def exposed(node: str, text: str) -> tuple[LiveGpu, ...]:
    """Return the GPUs in exposition text with DCGM's metric names; unreadable lines are skipped.

    Of several values of a metric for a GPU, for example of two exporters, the largest one counts (of free
    memory, the least). A label with several values is unknown.
    """
    by_gpu: dict[tuple[str | None, str | None], dict[str, Any]] = {}
    for line in text.splitlines():
        name, brace, rest = line.partition("{")
        if not brace or name not in _NAMES:
            continue
        inside, _, value = rest.rpartition("}")
        try:
            labels, number = parse_labels(inside), float(value.split()[0])
        except (ValueError, IndexError):
            continue
        if number != number:  # noqa: PLR0124 - NaN: the GPU cannot say
            continue
        which = labels.get("UUID") or labels.get("pci_bus_id") or labels.get("gpu")
        reading = by_gpu.setdefault((which, labels.get("GPU_I_ID")), {"labels": {}, "jobs": {}})
        for label, text_ in labels.items():
            if reading["labels"].setdefault(label, text_) != text_:
                reading["labels"][label] = ""
        what, factor = _NAMES[name]
        most = min if what == "fb_free_mib" else max
        reading[what] = most(number * factor, reading.get(what, number * factor))
        if labels.get("hpc_job"):
            reading["jobs"][labels["hpc_job"]] = None
    # dcgm-exporter's label ``device`` has the index of the GPU, not the number of its device file.
    return tuple(_gpu(node, reading, numbered=OWN_METRICS in text) for reading in by_gpu.values())


OWN_METRICS = "slurm_affinode_exporter_"


def _gpu(node: str, reading: Mapping[str, Any], *, numbered: bool) -> LiveGpu:
    labels = reading["labels"]
    index, device = labels.get("gpu", ""), labels.get("device", "") if numbered else ""
    cannot = UNMEASURED.get(kind_of(labels.get("GPU_I_ID") or None, labels.get("modelName")) or "", frozenset())
    signals = {name: reading[name] for name in ("util_pct", *_SHARES) if name in reading and name not in cannot}
    used, free, total = reading.get("fb_used_mib"), reading.get("fb_free_mib"), reading.get("fb_total_mib")
    if total is None and used is not None and free is not None:
        total = used + free
    minor = device.removeprefix("nvidia")
    return LiveGpu(
        node, labels.get("UUID") or None,
        int(index) if index.isdigit() else None, int(minor) if minor.isdigit() else None,
        labels.get("GPU_I_ID") or None, labels.get("modelName") or None,
        signals, used, total,
        None if "power_w" in cannot else reading.get("power_w"),
        None if "xid" not in reading else int(reading["xid"]), None, tuple(reading["jobs"]),
    )  # fmt: skip
