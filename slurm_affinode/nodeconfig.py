"""The sections ``[agent]``, ``[suspend]`` and ``[inplace]`` of the configuration: the node side."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from slurm_affinode.configvalues import span, within
from slurm_affinode.errors import AffinodeError, ConfigError
from slurm_affinode.model.signals import FLOORS_PCT, GPU_SIGNALS, HOST_SIGNALS
from slurm_affinode.model.suspension_mail import MAIL_KINDS
from slurm_affinode.sizes import parse_limit, parse_size
from slurm_affinode.tierconfig import TiersConfig, check_tiers

DEFAULT_PORT = 9403
RUN_DIR = Path("/run/slurm-affinode")
SHEPHERD = Path("/usr/local/libexec/slurm-affinode-shepherd")
"""Where ``make install`` in ``spank/`` puts it."""


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """``slurm-affinode agent``, and how the other commands find it."""

    period: str = "5s"
    """Time between two looks at the GPUs."""
    max_gap_periods: float = 4.0
    """A gap of more periods between two idle samples starts an idle window again."""
    min_signals: int = 2
    """So many activity signals of a GPU have to be readable, or it is unknown whether it is idle."""
    floors_pct: Mapping[str, float] = field(default_factory=lambda: dict(FLOORS_PCT))
    """Signal -> percent up to which it counts as 0 whatever the job's option says: noise of the counters. The report
    and ``zombies`` use the same table."""
    host: Mapping[str, float] = field(default_factory=dict)
    """Host signal (``cpu``: percent of a core; ``disk``, ``io``: bytes per second) -> limit; absent: not looked at."""
    run_dir: Path = RUN_DIR
    """Directory of the sockets."""
    leftovers: Path = Path("/var/lib/slurm-affinode/leftovers.jsonl")
    """What jobs left on their GPUs, until a run of ``zombies clean`` has taken it into the audit."""
    listen: str = f"0.0.0.0:{DEFAULT_PORT}"
    """Address of the network form of the control socket; empty: none."""
    admins: tuple[str, ...] = ()
    """Users who may do what owners and root may; root and SlurmUser always may."""
    queue_period: str = "10s"
    """How old an answer of slurmctld about the queue may be for a decision. It is asked only while a job is idle."""
    job_map: Path | None = None
    """dcgm-exporter's job mapping directory, written by prolog and epilog; ``None``: not written."""
    strict_hooks: bool = False
    """Whether prolog and epilog end with a failure, which drains the node, when the agent cannot be told."""
    node: str | None = None
    """This node's name in Slurm; ``None``: the host name up to the first dot."""


@dataclass(frozen=True, slots=True)
class LimitConfig:
    """Rules for one partition, account or user."""

    max_suspended: int | None = None
    """At most so many of its jobs are suspended at a time."""
    min_run: str | None = None
    """In place of ``suspend.min_run``."""
    exclude: bool = False
    """Its jobs are suspended only by hand."""


@dataclass(frozen=True, slots=True)
class SuspendConfig:
    """When jobs are suspended, and where their images go."""

    dry_run: bool = False
    """Only log what would be done."""
    min_run: str = "5m"
    """A run is left alone for so long."""
    max_at_once: int = 1
    """Suspensions at a time on one node; those of jobs in place are counted by themselves."""
    backoff: str = "5m"
    """After its first suspension a job runs at least so long; after each further one twice as long."""
    backoff_max: str = "6h"
    exclude_users: tuple[str, ...] = ()
    exclude_accounts: tuple[str, ...] = ()
    exclude_partitions: tuple[str, ...] = ()
    users: Mapping[str, LimitConfig] = field(default_factory=dict)
    accounts: Mapping[str, LimitConfig] = field(default_factory=dict)
    partitions: Mapping[str, LimitConfig] = field(default_factory=dict)
    budget: str | None = None
    """At most so much in each image store, e.g. ``2T``; ``None``: as much as its file system has."""
    user_quota: str = "50%"
    """At most so much of one user: a size for each image store; a share, of ``budget`` or else of what the file system
    has for images, for the shared one alone, where no copy gives way to another user's; ``none``: no limit."""
    keep_unknown: str = "24h"
    """Images of a job are kept for so long after Slurm was first seen not to know it."""
    journal: Path = Path("/var/lib/slurm-affinode/journal")
    """On the node's own disk."""
    local_store: Path = Path("/var/lib/slurm-affinode/images")
    """Images are written here first: the node's own disk."""
    shared_store: Path | None = None
    """Images are copied here, so that a job can go on at any node; ``None``: no job is suspended."""
    tiers: TiersConfig = field(default_factory=TiersConfig)
    ledger: Path | None = None
    """What each suspension gave back, one file per node; ``None`` means ``ledger`` beside the shared store."""
    key_file: Path = Path("/etc/slurm-affinode/image.key")
    """The key of the images' HMAC: 32 bytes or more, the same on all nodes, readable by root alone."""
    shepherd: Path = SHEPHERD
    """The installed shepherd; a process that executes another program is not believed to be one."""
    criu: str = "criu"
    """The program, found through ``PATH`` or by its path."""
    criu_sockets: bool = False
    """It dumps network sockets also where its version on this kernel says that it cannot: a patched one."""
    on_restore_failure: str = "hold"
    """``hold`` the job with the reason, or start it ``fresh`` with ``SLURM_AFFINODE_RESTORE_FAILED=1``."""
    notices: bool = True
    """Tell the job's own output when it is suspended and restored."""
    mail: tuple[str, ...] = ()
    """Tell the job's owner by mail: ``suspended``, ``restored``, ``failed`` (not restored). ``[mail]`` of the policy
    for zombies says how mails leave."""
    mail_limit: int = 10
    """Mails to one user from one node in an hour."""
    lock_timeout: str = "10s"
    """For a CUDA process to come to rest; then the job runs on."""
    dump_timeout: str = "30m"
    restore_timeout: str = "30m"
    slurm_timeout: str = "5m"
    """How long slurmctld is asked again to requeue; after that recovery goes on asking, with the tree stopped."""
    wake_every: str = "10s"
    """How often it is looked whether a suspended job can wake."""
    wake_backoff: str = "2m"
    """The shortest sleep before ``wake=auto``; it doubles with each suspension of a job."""
    wake_backoff_limit: str = "2h"


@dataclass(frozen=True, slots=True)
class InplaceConfig:
    """Jobs with ``mode=inplace``: they sleep where they are, and share GPUs."""

    poll_ms: int = 100
    """How often it is looked whether somebody asks something of a job that sleeps, in milliseconds."""
    freeze_timeout: str = "10s"
    """For all processes of a job to stop; then it is woken again."""
    awake_limit_pct: float = 100.0
    """Share of a GPU's memory that these jobs may hold there at once, awake."""
    start_free_pct: float = 0.0
    """So much of the memory of each of its GPUs has to be free for a job to start; 0: it starts at once."""
    wake_deadline: str = "10m"
    """For a job that is wanted to get its GPU memory back."""
    on_deadline: str = "wait"
    """``wait`` on, marked as overdue, or ``end`` the job."""
    wake_at_prolog: bool = False
    """A prolog returns when all sleepers with memory on its GPUs are awake: for those that change settings of GPUs."""
    prolog_timeout: str = "20s"
    """Such a prolog waits so long; less than Slurm's PrologEpilogTimeout."""


_SUSPEND_SPANS = (
    "min_run", "backoff", "backoff_max", "lock_timeout", "dump_timeout", "restore_timeout", "slurm_timeout",
    "wake_every", "wake_backoff", "wake_backoff_limit", "keep_unknown",
)  # fmt: skip
_MAY_BE_0 = ("min_run", "backoff", "wake_backoff", "wake_backoff_limit", "backoff_max")


def check_inplace(inplace: InplaceConfig, where: str) -> None:
    """Raise ``ConfigError``, naming file and key, for a value of the right kind that cannot be."""
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
    """Raise ``ConfigError``, naming file and key, for a value of the right kind that cannot be."""
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
    """Host and port of ``HOST:PORT``, ``[::]:PORT`` or ``:PORT``. Raises ``ValueError``."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]*)):(\d{1,5})", text)
    if match is None or not 0 < int(match[3]) < 65536:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return match[1] or match[2] or "0.0.0.0", int(match[3])  # noqa: S104 - nodes are asked from the login node
