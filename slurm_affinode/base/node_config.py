"""Sections of the configuration for nodes: ``[agent]``, ``[suspend]``, ``[suspend.tiers]`` and ``[inplace]``."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.sizes import parse_limit
from slurm_affinode.base.toml_schema import (
    MAY_BE_EMPTY,
    AbsolutePath,
    Amount,
    KnownNames,
    Percent,
    PositiveSpan,
    Span,
    either,
    size,
    within,
)
from slurm_affinode.model.gpu import FLOORS_PCT, GPU_SIGNALS, HOST_SIGNALS
from slurm_affinode.model.suspension import MAIL_KINDS

MOST = 19
_Size = Annotated[str, size()]
_PositiveSize = Annotated[str, size(above=True)]


@dataclass(frozen=True, slots=True)
class TiersConfig:
    """Tiers in addition to ``suspend.local_store`` and ``suspend.shared_store``, and the copies between all of them."""

    memory: AbsolutePath | None = None
    """A directory on a tmpfs: checkpoint images are first written to it, and copied to it before a restore; ``None``:
    no tier in host memory."""
    memory_size: _PositiveSize = "32G"
    """Maximum host memory for checkpoint images."""
    memory_reserve: _Size = "16G"
    """Host memory reserved for jobs: images are evicted from the tier before less is available."""
    copy_rate: _PositiveSize | None = None
    """Maximum rate of one node to the shared store, per second, e.g. ``500M``; ``None``: unlimited."""
    pull_rate: _PositiveSize | None = None
    """Maximum rate at which one node reads ahead of job starts; restores in progress are not limited."""
    direct: bool = True
    """Write to disk and shared store with direct I/O if their file systems support it."""
    compress: Annotated[int, within(0, MOST)] = 0
    """zstd level (1 to 19) for images in the shared store; 0: not compressed. Requires the extra ``zstd``."""
    prefetch: Span = "10m"
    """Copy an image to a node this long before Slurm expects to start its job there; ``0s``: only when it starts."""


DEFAULT_PORT = 9403
RUN_DIR = Path("/run/slurm-affinode")
SHEPHERD = Path("/usr/local/libexec/slurm-affinode-shepherd")
CRIU_PLUGIN = Path("/usr/local/libexec/slurm-affinode-criu/device_files.so")
"""Both are installed by ``make install`` in ``spank/``."""


def listen_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, ``[::]:PORT`` or ``:PORT``. Raises ``ValueError``."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]*)):(\d{1,5})", text)
    if match is None or not 0 < int(match[3]) < 65536:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return match[1] or match[2] or "0.0.0.0", int(match[3])  # noqa: S104 - the login node sends requests to nodes


def _listen(text: str) -> None:
    try:
        _ = listen_address(text) if text else None
    except ValueError as error:
        raise AffinodeError(str(error), hint='write for example "0.0.0.0:9403", or ""') from None


def is_below_root(path: str) -> bool:
    """Return whether a path is absolute, names no parent directory, and is not the root directory itself."""
    names = set(path.split("/"))
    return path.startswith("/") and ".." not in names and bool(names - {"", "."})


def _below_root(path: str) -> None:
    if not is_below_root(path):
        raise AffinodeError(f"{path!r} is not the absolute path of a directory below /")


def _socket_pattern(text: str) -> None:
    if not text.startswith("/") or ".." in text.split("/"):
        raise AffinodeError(f"{text!r} is not a full path", hint="write it as in ss --listening --unix")


def _network(text: str) -> None:
    try:
        ipaddress.ip_network(text)
    except ValueError as error:
        raise AffinodeError(str(error), hint='write for example "10.0.0.5" or "10.1.0.0/16"') from None


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """``slurm-affinode agent``, and how other commands reach it."""

    period: PositiveSpan = "5s"
    """Sampling interval of the GPUs."""
    max_gap_periods: Annotated[float, within(1)] = 4.0
    """A longer gap between two idle samples, in periods, restarts an idle window."""
    min_signals: Annotated[int, within(1, len(GPU_SIGNALS))] = 2
    """Minimum number of readable activity signals of a GPU; with fewer, its state is unknown."""
    floors_pct: Annotated[Mapping[str, Percent], KnownNames(GPU_SIGNALS)] = field(
        default_factory=lambda: dict(FLOORS_PCT)
    )
    """Signal -> percent up to which it counts as 0, regardless of the job's option: noise of the counters. The report
    and ``zombies`` use the same table."""
    host: Annotated[Mapping[str, Amount], KnownNames(HOST_SIGNALS)] = field(default_factory=dict)
    """Host signal (``cpu``: percent of a core; ``disk``, ``io``: bytes per second) -> limit; absent: ignored."""
    run_dir: AbsolutePath = RUN_DIR
    """Directory of the sockets."""
    leftovers: AbsolutePath = Path("/var/lib/slurm-affinode/leftovers.jsonl")
    """Records of what jobs left on their GPUs, until ``zombies clean`` has imported them into the audit."""
    listen: Annotated[str, MAY_BE_EMPTY, _listen] = f"0.0.0.0:{DEFAULT_PORT}"
    """Address of the control socket on the network; empty: none."""
    admins: tuple[str, ...] = ()
    """Users with the rights of owners and root; root and SlurmUser always have them."""
    queue_period: PositiveSpan = "10s"
    """Maximum age of the queue data from slurmctld for a decision. It is queried only while a job is idle."""
    server_period: Span = "15s"
    """Interval of the search for model servers in jobs, by which processes that have lost their server are found; 0:
    never."""
    server_programs: tuple[str, ...] = ()
    """Patterns of the names of programs, scripts and Python modules whose ports are searched for model servers, in
    addition to the known engines. Also for ``slurm-affinode exporter --serving``."""
    job_map: AbsolutePath | None = None
    """dcgm-exporter's job mapping directory, written by prolog and epilog; ``None``: not written."""
    strict_hooks: bool = False
    """Whether prolog and epilog fail, which drains the node, if the agent cannot be notified."""
    admin_comment: bool = False
    """Whether a line about the use of its GPUs is written into the AdminComment of each job that has ended."""
    node: str | None = None
    """This node's name in Slurm; ``None``: the host name up to the first dot."""


@dataclass(frozen=True, slots=True)
class LimitConfig:
    """Rules for one partition, account or user."""

    max_suspended: Annotated[int, within(0)] | None = None
    """Maximum number of its jobs suspended at a time."""
    min_run: Span | None = None
    """Overrides ``suspend.min_run``."""
    exclude: bool = False
    """Its jobs are suspended only manually."""


@dataclass(frozen=True, slots=True)
class SuspendConfig:
    """When jobs are suspended, and where their checkpoint images are stored."""

    dry_run: bool = False
    """Only log what would be done."""
    min_run: Span = "5m"
    """Minimum run time of an attempt before it is suspended."""
    max_at_once: Annotated[int, within(1)] = 1
    """Concurrent suspensions on one node; those in place are counted separately."""
    backoff: Span = "5m"
    """Minimum run time after a job's first suspension, and pause after one that failed; doubled with each one."""
    backoff_max: Span = "6h"
    exclude_users: tuple[str, ...] = ()
    exclude_accounts: tuple[str, ...] = ()
    exclude_partitions: tuple[str, ...] = ()
    users: Mapping[str, LimitConfig] = field(default_factory=dict)
    accounts: Mapping[str, LimitConfig] = field(default_factory=dict)
    partitions: Mapping[str, LimitConfig] = field(default_factory=dict)
    budget: _Size | None = None
    """Maximum size of each store of checkpoint images, e.g. ``2T``; ``None``: the size of its file system."""
    user_quota: Annotated[str, size(parse_limit)] = "50%"
    """Maximum of one user. A size applies to each image store. A share (of ``budget``, else of the space that the file
    system has for images) applies only to the shared store, where no copy is evicted for another user. ``none``: no
    limit."""
    keep_unknown: PositiveSpan = "24h"
    """How long the checkpoint images of a job are kept after Slurm was first seen not to know the job."""
    journal: AbsolutePath = Path("/var/lib/slurm-affinode/journal")
    """On the node's own disk."""
    local_store: AbsolutePath = Path("/var/lib/slurm-affinode/images")
    """Checkpoint images are first written here, on the node's own disk."""
    shared_store: AbsolutePath | None = None
    """Checkpoint images are copied here, so that a job can resume on any node; ``None``: no job is suspended."""
    tiers: TiersConfig = field(default_factory=TiersConfig)
    ledger: AbsolutePath | None = None
    """Ledger of suspensions, one file per node; ``None``: ``ledger`` beside the shared store."""
    key_file: AbsolutePath = Path("/etc/slurm-affinode/image.key")
    """HMAC key of the checkpoint images: 32 bytes or more, the same on all nodes, readable by root only."""
    shepherd: AbsolutePath = SHEPHERD
    """The installed shepherd; a process that executes another program is not accepted as one."""
    criu: str = "criu"
    """The program, as a path or to be found in ``PATH``."""
    criu_plugin: AbsolutePath = CRIU_PLUGIN
    """The installed plugin of CRIU for forked workers, alone in a directory that only root may change."""
    local_files: Annotated[str, either("copy", "pin", "ignore")] = "copy"
    """Closed files of a job in ``local_directories``: ``copy`` them into its image up to the limits, and ``pin`` the
    job to its node beyond them; always ``pin`` it; or ``ignore`` them."""
    local_directories: tuple[Annotated[str, _below_root], ...] = ("/tmp", "/var/tmp")  # noqa: S108 - not opened here
    """Node-local directories in which jobs create files."""
    local_files_limit: _Size = "1G"
    """Maximum size of the closed files of one job that are copied."""
    local_files_count: Annotated[int, within(1, 100_000)] = 10_000
    """Maximum number of these files and directories."""
    raise_memory_limit: bool = True
    """Raise the memory limit (``--mem``) of a job in its cgroups for the time in which its GPU memory is in host
    memory, if the node has memory that no job needs."""
    memory_reserve: _Size = "2G"
    """Host memory that stays free when a memory limit is raised."""
    services: tuple[Annotated[str, _socket_pattern], ...] = (
        "/var/lib/sss/pipes/*", "/run/systemd/userdb/*",
        "/run/nslcd/socket", "/var/run/nslcd/socket", "/run/nscd/socket", "/var/run/nscd/socket",
    )  # fmt: skip
    """Sockets of services whose clients connect again: a restore closes connections to them. In each part of a path,
    ``*``, ``?`` and ``[...]`` are wildcards. The list replaces the default."""
    service_users: tuple[str, ...] = ("sssd",)
    """Users that such services run as, besides root; names that do not exist on the node are ignored."""
    criu_sockets: bool = False
    """Network sockets are dumped even if CRIU's version on this kernel indicates no support: for a patched CRIU."""
    on_restore_failure: Annotated[str, either("hold", "fresh")] = "hold"
    """``hold`` the job with the reason, or start it ``fresh`` with ``SLURM_AFFINODE_RESTORE_FAILED=1``."""
    restore_alive: Span = "5s"
    """How long the batch script of a restored job must run until its restore is a success. If a signal ends it
    sooner, the restore has failed. 0: not checked."""
    after_loss: Annotated[str, either("image", "start", "hold")] = "image"
    """A job that is preempted or requeued, or loses its node, after it was restored: restore the same ``image`` again,
    ``start`` its script from the beginning, or ``hold`` it. The owner's ``after_loss`` has precedence."""
    discard_image_after: Span = "1d"
    """With ``after_loss = "image"``: if the job had run for longer than this since its restore, the image is discarded
    and its script starts from the beginning. 0: never."""
    restore_retries: Annotated[int, within(0)] = 8
    """Retries of a restore that failed for a cause that may pass; 0: ``on_restore_failure`` applies at once."""
    retry_backoff: PositiveSpan = "1m"
    """Time until the first of these retries; doubled for each further one."""
    retry_backoff_limit: PositiveSpan = "1h"
    time_limit: Annotated[str, either("remaining", "whole")] = "remaining"
    """Time limit of a suspended job when it resumes: the time ``remaining`` at its suspension, or the ``whole`` limit
    again."""
    notices: bool = True
    """Write to the job's own output when it is suspended and restored."""
    mail: tuple[Annotated[str, either(*MAIL_KINDS)], ...] = ()
    """Events mailed to the job's owner: ``suspended``, ``restored``, ``failed`` (not restored). ``[mail]`` of the
    clean-up policy configures the delivery."""
    mail_limit: Annotated[int, within(1)] = 10
    """Maximum mails to one user from one node per hour."""
    lock_timeout: PositiveSpan = "10s"
    """Time for a CUDA process to be locked; after that, the job continues."""
    dump_timeout: PositiveSpan = "30m"
    restore_timeout: PositiveSpan = "30m"
    slurm_timeout: PositiveSpan = "5m"
    """How long a requeue is retried; after that, recovery continues to retry, with the process tree stopped."""
    wake_every: PositiveSpan = "10s"
    """Interval of checks whether suspended jobs can wake."""
    wake_backoff: Span = "2m"
    """Minimum sleep with ``wake=auto``; doubled with each suspension of a job."""
    wake_backoff_limit: Span = "2h"


@dataclass(frozen=True, slots=True)
class InplaceConfig:
    """Jobs with ``mode=inplace``: they are suspended on their node, and share GPUs."""

    poll_ms: Annotated[int, within(10, 60_000)] = 100
    """Interval of checks for requests to a sleeping job, in milliseconds."""
    freeze_timeout: PositiveSpan = "10s"
    """Time for all processes of a job to freeze; after that, it is woken again."""
    awake_limit_pct: Annotated[float, within(0, 100, above=True)] = 100.0
    """Share of a GPU's memory that awake jobs of this kind may hold at a time."""
    start_free_pct: Percent | None = None
    """Share of the memory of each of its GPUs that must be free for a job to start; 0: it starts at once; ``None``: 60,
    or ``awake_limit_pct`` if that is less. A job does not wait for memory of processes outside of jobs in place."""
    max_turn: Span = "30s"
    """Time for which a busy job keeps its GPU memory while another one waits for it; 0: as long as it is busy."""
    wake_deadline: PositiveSpan = "10m"
    """Time for the GPU memory of a job to be restored after a wake request."""
    on_deadline: Annotated[str, either("wait", "end")] = "wait"
    """``wait`` longer, marked as overdue, or ``end`` the job."""
    settle: Span = "5m"
    """How long the listeners of a job that has received no request must not have changed before it is frozen: a server
    that is starting has yet to open its port. 0: not checked."""
    short_sleep: Span = "1m"
    """After a sleep that was shorter, the job stays awake for ``suspend.backoff``, doubled with each further one; 0:
    never."""
    probes: tuple[Annotated[str, _network], ...] = ()
    """Addresses and networks whose connections are health checks: they neither wake a job nor keep it awake."""
    max_sleep: Span = "12h"
    """A sleeping job wakes after this time without an event, unless ``wake=hold``; 0: never."""
    wake_at_prolog: bool = False
    """Prologs return when all sleepers with memory on the job's GPUs are awake: for prologs that change GPU
    settings."""
    prolog_timeout: PositiveSpan = "20s"
    """Timeout of such a prolog; must be less than Slurm's PrologEpilogTimeout."""

    @property
    def start_pct(self) -> float:
        """``start_free_pct``, or its default."""
        return min(60.0, self.awake_limit_pct) if self.start_free_pct is None else self.start_free_pct
