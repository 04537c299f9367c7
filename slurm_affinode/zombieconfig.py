"""The section ``[zombies]`` of the configuration: what counts as a misfit, and where the nodes are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from slurm_affinode.configvalues import span, within
from slurm_affinode.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NodeClass:
    """What nodes have, where Slurm itself is not asked: ``[zombies.nodes."gpu-*"]``."""

    cores: int
    gpus: int
    memory_gib: float


@dataclass(frozen=True, slots=True)
class MisfitConfig:
    """Thresholds of the misfits. Shares are 0-1."""

    min_run: str = "10m"
    """Runs shorter than this are not looked at."""
    cores_per_gpu: float | None = None
    """``None``: what the node has for each of its GPUs; where that is not known, the rule is left out."""
    memory_gib_per_gpu: float | None = None
    """As ``cores_per_gpu``."""
    min_gpu_hours: float = 0.0
    """A user is told of a kind where the jobs found have so many GPU-hours together."""
    min_core_hours: float = 0.0
    """The same for jobs without GPUs, in core-hours."""
    memory_used_share: float = 0.8
    """A job that used at least this share of its host memory needed it."""
    too_powerful: tuple[str, ...] = ("*h200*", "*h100*", "*b200*", "*a100*")
    """Patterns of GPU models for which there are smaller ones."""
    small_util_pct: float = 15.0
    small_gpu_gib: float = 10.0
    small_host_gib: float = 32.0
    small_cores: int = 4
    """A job that stays below all four fits a smaller GPU or a MIG instance."""
    time_share: float = 0.2
    """Used less of its time limit than this."""
    time_min_unused_gpu_hours: float = 8.0
    cpu_only_partitions: tuple[str, ...] = ()
    """Partitions that are for GPU jobs; empty: those in which most jobs have GPUs."""
    user_efficiency_pct: float = 25.0
    user_min_gpu_hours: float = 50.0
    user_min_share: float = 0.0
    """Of all GPU-hours (or core-hours) of the interval."""
    user_top: int = 15
    """Only so many users with the most GPU-hours are looked at."""
    cpu_efficiency_pct: float = 60.0
    cpu_user_min_core_hours: float = 1000.0
    host_memory_min_gib_hours: float = 100.0


@dataclass(frozen=True, slots=True)
class ZombiesConfig:
    """``slurm-affinode zombies``."""

    signatures: Path | None = None
    """The site's file; ``None``: the one that comes with the package."""
    policy: Path | None = None
    """What is done about findings; ``None``: /etc/slurm-affinode/zombies.toml, else what comes with the package."""
    look_back: str = "2d"
    """How far before the end the history is looked at."""
    exporter_port: int = 9402
    """Where the metrics of a node are: http://NODE:PORT/metrics."""
    exporter_url: str | None = None
    """In place of it, with ``{node}``: ``https://{node}.example.org:9400/metrics``."""
    exporter_token_file: Path | None = None
    """A bearer token for the exporters."""
    exporter_ca_file: Path | None = None
    """Certificates (PEM) of authorities to believe for https."""
    completing: str = "15m"
    """A job that is COMPLETING for longer than this is stuck."""
    nodes: Mapping[str, NodeClass] = field(default_factory=dict)
    """Pattern of node names -> what they have; the first that matches counts."""
    misfits: MisfitConfig = MisfitConfig()


_SHARES = ("memory_used_share", "time_share", "user_min_share")
_PERCENTS = ("small_util_pct", "user_efficiency_pct", "cpu_efficiency_pct")
_AMOUNTS = (
    "min_gpu_hours", "min_core_hours", "small_gpu_gib", "small_host_gib", "small_cores", "time_min_unused_gpu_hours",
    "user_min_gpu_hours", "cpu_user_min_core_hours", "host_memory_min_gib_hours",
)  # fmt: skip


def check_zombies(zombies: ZombiesConfig, where: str) -> None:
    """Raise ``ConfigError``, naming file and key, for a value of the right kind that cannot be."""
    span(where, "zombies.look_back", zombies.look_back, above=True)
    span(where, "zombies.completing", zombies.completing)
    within(where, "zombies.exporter_port", zombies.exporter_port, 1, 65535)
    if zombies.exporter_url is not None:
        _exporter_url(where, zombies.exporter_url)
    for pattern, node in zombies.nodes.items():
        name = f"zombies.nodes.{pattern}"
        within(where, f"{name}.cores", node.cores, 1)
        within(where, f"{name}.gpus", node.gpus, 0)
        within(where, f"{name}.memory_gib", node.memory_gib, 0, above=True)
    misfits, name = zombies.misfits, "zombies.misfits"
    span(where, f"{name}.min_run", misfits.min_run)
    for key in ("cores_per_gpu", "memory_gib_per_gpu"):
        within(where, f"{name}.{key}", getattr(misfits, key), 0, above=True)
    for keys, high in ((_SHARES, 1), (_PERCENTS, 100), (_AMOUNTS, None)):
        for key in keys:
            within(where, f"{name}.{key}", getattr(misfits, key), 0, high)
    within(where, f"{name}.user_top", misfits.user_top, 1)


def _exporter_url(where: str, url: str) -> None:
    try:
        parts = urlsplit(url.replace("{node}", "n1"))
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ConfigError(
            f"{where}: zombies.exporter_url: {url!r} is neither http nor https",
            hint="write for example https://{node}.example.org:9400/metrics",
        )
