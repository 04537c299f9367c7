"""Sections of the configuration for nodes: ``[agent]``, ``[suspend]``, ``[suspend.tiers]`` and ``[inplace]``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from slurm_affinode.base.config_values import span, within
from slurm_affinode.base.errors import AffinodeError, ConfigError
from slurm_affinode.base.text import parse_limit, parse_size
from slurm_affinode.model.gpu import FLOORS_PCT, GPU_SIGNALS, HOST_SIGNALS
from slurm_affinode.model.suspension import MAIL_KINDS

MOST = 19


@dataclass(frozen=True, slots=True)
class TiersConfig:
    """Tiers in addition to ``suspend.local_store`` and ``suspend.shared_store``, and the copies between all of them."""

    memory: Path | None = None
    """A directory on a tmpfs: checkpoint images are first written to it, and copied to it before a restore; ``None``:
    no tier in host memory."""
    memory_size: str = "32G"
    """Maximum host memory for checkpoint images."""
    memory_reserve: str = "16G"
    """Host memory reserved for jobs: images are evicted from the tier before less is available."""
    copy_rate: str | None = None
    """Maximum rate of one node to the shared store, per second, e.g. ``500M``; ``None``: unlimited."""
    pull_rate: str | None = None
    """Maximum rate at which one node reads ahead of job starts; restores in progress are not limited."""
    direct: bool = True
    """Write to disk and shared store with direct I/O if their file systems support it."""
    compress: int = 0
    """zstd level (1 to 19) for images in the shared store; 0: not compressed. Requires the extra ``zstd``."""
    prefetch: str = "10m"
    """Copy an image to a node this long before Slurm expects to start its job there; ``0s``: only when it starts."""


def check_tiers(tiers: TiersConfig, where: str) -> None:
    """Raise ``ConfigError``, naming file and key, for an invalid value of the right type."""
    for key in ("memory_size", "memory_reserve", "copy_rate", "pull_rate"):
        text = getattr(tiers, key)
        try:
            found = None if text is None else parse_size(text)
        except AffinodeError as error:
            raise ConfigError(f"{where}: suspend.tiers.{key}: {error}", hint=error.hint) from None
        if found == 0 and key != "memory_reserve":
            raise ConfigError(f"{where}: suspend.tiers.{key}: {text} is not above 0")
    span(where, "suspend.tiers.prefetch", tiers.prefetch)
    within(where, "suspend.tiers.compress", tiers.compress, 0, MOST)
    if tiers.memory is not None and not tiers.memory.is_absolute():
        raise ConfigError(f"{where}: suspend.tiers.memory: {tiers.memory} is not an absolute path")


DEFAULT_PORT = 9403
RUN_DIR = Path("/run/slurm-affinode")
SHEPHERD = Path("/usr/local/libexec/slurm-affinode-shepherd")
"""Installed by ``make install`` in ``spank/``."""


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """``slurm-affinode agent``, and how other commands reach it."""

    period: str = "5s"
    """Sampling interval of the GPUs."""
    max_gap_periods: float = 4.0
    """A longer gap between two idle samples, in periods, restarts an idle window."""
    min_signals: int = 2
    """Minimum number of readable activity signals of a GPU; with fewer, its state is unknown."""
    floors_pct: Mapping[str, float] = field(default_factory=lambda: dict(FLOORS_PCT))
    """Signal -> percent up to which it counts as 0, regardless of the job's option: noise of the counters. The report
    and ``zombies`` use the same table."""
    host: Mapping[str, float] = field(default_factory=dict)
    """Host signal (``cpu``: percent of a core; ``disk``, ``io``: bytes per second) -> limit; absent: ignored."""
    run_dir: Path = RUN_DIR
    """Directory of the sockets."""
    leftovers: Path = Path("/var/lib/slurm-affinode/leftovers.jsonl")
    """Records of what jobs left on their GPUs, until ``zombies clean`` has imported them into the audit."""
    listen: str = f"0.0.0.0:{DEFAULT_PORT}"
    """Address of the control socket on the network; empty: none."""
    admins: tuple[str, ...] = ()
    """Users with the rights of owners and root; root and SlurmUser always have them."""
    queue_period: str = "10s"
    """Maximum age of the queue data from slurmctld for a decision. It is queried only while a job is idle."""
    job_map: Path | None = None
    """dcgm-exporter's job mapping directory, written by prolog and epilog; ``None``: not written."""
    strict_hooks: bool = False
    """Whether prolog and epilog fail, which drains the node, if the agent cannot be notified."""
    node: str | None = None
    """This node's name in Slurm; ``None``: the host name up to the first dot."""


@dataclass(frozen=True, slots=True)
class LimitConfig:
    """Rules for one partition, account or user."""

    max_suspended: int | None = None
    """Maximum number of its jobs suspended at a time."""
    min_run: str | None = None
    """Overrides ``suspend.min_run``."""
    exclude: bool = False
    """Its jobs are suspended only manually."""


@dataclass(frozen=True, slots=True)
class SuspendConfig:
    """When jobs are suspended, and where their checkpoint images are stored."""

    dry_run: bool = False
    """Only log what would be done."""
    min_run: str = "5m"
    """Minimum run time of an attempt before it is suspended."""
    max_at_once: int = 1
    """Concurrent suspensions on one node; those in place are counted separately."""
    backoff: str = "5m"
    """Minimum run time after a job's first suspension; doubled after each further one."""
    backoff_max: str = "6h"
    exclude_users: tuple[str, ...] = ()
    exclude_accounts: tuple[str, ...] = ()
    exclude_partitions: tuple[str, ...] = ()
    users: Mapping[str, LimitConfig] = field(default_factory=dict)
    accounts: Mapping[str, LimitConfig] = field(default_factory=dict)
    partitions: Mapping[str, LimitConfig] = field(default_factory=dict)
    budget: str | None = None
    """Maximum size of each store of checkpoint images, e.g. ``2T``; ``None``: the size of its file system."""
    user_quota: str = "50%"
    """Maximum of one user. A size applies to each image store. A share (of ``budget``, else of the space that the file
    system has for images) applies only to the shared store, where no copy is evicted for another user. ``none``: no
    limit."""
    keep_unknown: str = "24h"
    """How long the checkpoint images of a job are kept after Slurm was first seen not to know the job."""
    journal: Path = Path("/var/lib/slurm-affinode/journal")
    """On the node's own disk."""
    local_store: Path = Path("/var/lib/slurm-affinode/images")
    """Checkpoint images are first written here, on the node's own disk."""
    shared_store: Path | None = None
    """Checkpoint images are copied here, so that a job can resume on any node; ``None``: no job is suspended."""
    tiers: TiersConfig = field(default_factory=TiersConfig)
    ledger: Path | None = None
    """Ledger of suspensions, one file per node; ``None``: ``ledger`` beside the shared store."""
    key_file: Path = Path("/etc/slurm-affinode/image.key")
    """HMAC key of the checkpoint images: 32 bytes or more, the same on all nodes, readable by root only."""
    shepherd: Path = SHEPHERD
    """The installed shepherd; a process that executes another program is not accepted as one."""
    criu: str = "criu"
    """The program, as a path or to be found in ``PATH``."""
    criu_sockets: bool = False
    """Network sockets are dumped even if CRIU's version on this kernel indicates no support: for a patched CRIU."""
    on_restore_failure: str = "hold"
    """``hold`` the job with the reason, or start it ``fresh`` with ``SLURM_AFFINODE_RESTORE_FAILED=1``."""
    notices: bool = True
    """Write to the job's own output when it is suspended and restored."""
    mail: tuple[str, ...] = ()
    """Events mailed to the job's owner: ``suspended``, ``restored``, ``failed`` (not restored). ``[mail]`` of the
    clean-up policy configures the delivery."""
    mail_limit: int = 10
    """Maximum mails to one user from one node per hour."""
    lock_timeout: str = "10s"
    """Time for a CUDA process to be locked; after that, the job continues."""
    dump_timeout: str = "30m"
    restore_timeout: str = "30m"
    slurm_timeout: str = "5m"
    """How long a requeue is retried; after that, recovery continues to retry, with the process tree stopped."""
    wake_every: str = "10s"
    """Interval of checks whether suspended jobs can wake."""
    wake_backoff: str = "2m"
    """Minimum sleep with ``wake=auto``; doubled with each suspension of a job."""
    wake_backoff_limit: str = "2h"


@dataclass(frozen=True, slots=True)
class InplaceConfig:
    """Jobs with ``mode=inplace``: they are suspended on their node, and share GPUs."""

    poll_ms: int = 100
    """Interval of checks for requests to a sleeping job, in milliseconds."""
    freeze_timeout: str = "10s"
    """Time for all processes of a job to freeze; after that, it is woken again."""
    awake_limit_pct: float = 100.0
    """Share of a GPU's memory that awake jobs of this kind may hold at a time."""
    start_free_pct: float = 0.0
    """Share of the memory of each of its GPUs that must be free for a job to start; 0: it starts at once."""
    wake_deadline: str = "10m"
    """Time for the GPU memory of a job to be restored after a wake request."""
    on_deadline: str = "wait"
    """``wait`` longer, marked as overdue, or ``end`` the job."""
    wake_at_prolog: bool = False
    """Prologs return when all sleepers with memory on the job's GPUs are awake: for prologs that change GPU
    settings."""
    prolog_timeout: str = "20s"
    """Timeout of such a prolog; must be less than Slurm's PrologEpilogTimeout."""


_SUSPEND_SPANS = (
    "min_run", "backoff", "backoff_max", "lock_timeout", "dump_timeout", "restore_timeout", "slurm_timeout",
    "wake_every", "wake_backoff", "wake_backoff_limit", "keep_unknown",
)  # fmt: skip
_MAY_BE_0 = ("min_run", "backoff", "wake_backoff", "wake_backoff_limit", "backoff_max")


def check_inplace(inplace: InplaceConfig, where: str) -> None:
    """Raise ``ConfigError``, naming file and key, for an invalid value of the right type."""
    for key in ("freeze_timeout", "wake_deadline", "prolog_timeout"):
        span(where, f"inplace.{key}", getattr(inplace, key), above=True)
    within(where, "inplace.poll_ms", inplace.poll_ms, 10, 60_000)
    within(where, "inplace.awake_limit_pct", inplace.awake_limit_pct, 0, 100, above=True)
    if not 0 <= inplace.start_free_pct <= inplace.awake_limit_pct:
        raise ConfigError(
            f"{where}: inplace.start_free_pct: {inplace.start_free_pct:g} is not from 0 to inplace.awake_limit_pct"
        )
    if inplace.on_deadline not in ("wait", "end"):
        raise ConfigError(f"{where}: inplace.on_deadline: {inplace.on_deadline!r} is not wait or end")


def check(agent: AgentConfig, suspend: SuspendConfig, where: str) -> None:
    """Raise ``ConfigError``, naming file and key, for an invalid value of the right type."""
    for key, text in _spans(agent, suspend):
        span(where, key, text, above=key.rpartition(".")[2] not in _MAY_BE_0)
    for key, size, parse in (("budget", suspend.budget, parse_size), ("user_quota", suspend.user_quota, parse_limit)):
        try:
            _ = None if size is None else parse(size)
        except AffinodeError as error:
            raise ConfigError(f"{where}: suspend.{key}: {error}", hint=error.hint) from None
    check_tiers(suspend.tiers, where)
    _choices(agent, suspend, where)
    _numbers(agent, suspend, where)


def _spans(agent: AgentConfig, suspend: SuspendConfig) -> Iterator[tuple[str, str | None]]:
    yield "agent.period", agent.period
    yield "agent.queue_period", agent.queue_period
    for key in _SUSPEND_SPANS:
        yield f"suspend.{key}", getattr(suspend, key)
    for key, name, limit in _limits(suspend):
        yield f"suspend.{key}.{name}.min_run", limit.min_run


def _limits(suspend: SuspendConfig) -> Iterator[tuple[str, str, LimitConfig]]:
    for key in ("users", "accounts", "partitions"):
        for name, limit in getattr(suspend, key).items():
            yield key, name, limit


def _choices(agent: AgentConfig, suspend: SuspendConfig, where: str) -> None:
    if suspend.on_restore_failure not in ("hold", "fresh"):
        raise ConfigError(f"{where}: suspend.on_restore_failure: {suspend.on_restore_failure!r} is not hold or fresh")
    for key, given, known, high in (
        ("floors_pct", agent.floors_pct, GPU_SIGNALS, 100), ("host", agent.host, HOST_SIGNALS, None),
    ):  # fmt: skip
        for name, value in given.items():
            if name not in known:
                raise ConfigError(f"{where}: unknown key agent.{key}.{name}", hint=f"known here: {', '.join(known)}")
            within(where, f"agent.{key}.{name}", value, 0, high)
    for kind in suspend.mail:
        if kind not in MAIL_KINDS:
            raise ConfigError(f"{where}: suspend.mail: {kind!r} is none of {', '.join(MAIL_KINDS)}")
    if agent.listen:
        try:
            listen_address(agent.listen)
        except ValueError as error:
            raise ConfigError(
                f"{where}: agent.listen: {error}", hint='write for example "0.0.0.0:9403", or ""'
            ) from None
    for section, one in (("agent", agent), ("suspend", suspend)):
        for entry in fields(one):
            value = getattr(one, entry.name)
            if isinstance(value, Path) and not value.is_absolute():
                raise ConfigError(f"{where}: {section}.{entry.name}: {value} is not an absolute path")


def _numbers(agent: AgentConfig, suspend: SuspendConfig, where: str) -> None:
    within(where, "agent.max_gap_periods", agent.max_gap_periods, 1)
    within(where, "agent.min_signals", agent.min_signals, 1, len(GPU_SIGNALS))
    within(where, "suspend.max_at_once", suspend.max_at_once, 1)
    within(where, "suspend.mail_limit", suspend.mail_limit, 1)
    for key, name, limit in _limits(suspend):
        within(where, f"suspend.{key}.{name}.max_suspended", limit.max_suspended, 0)


def listen_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, ``[::]:PORT`` or ``:PORT``. Raises ``ValueError``."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]*)):(\d{1,5})", text)
    if match is None or not 0 < int(match[3]) < 65536:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return match[1] or match[2] or "0.0.0.0", int(match[3])  # noqa: S104 - nodes are asked from the login node
