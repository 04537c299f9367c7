"""The configuration: ``/etc/slurm-affinode/config.toml``, overridden by environment and command line.

Every key is optional. An unknown key or a value of the wrong type is an error that names the file and the key.
"""

from __future__ import annotations

import os
import re
import select
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from slurm_affinode.base.config_values import build, span, within, zone
from slurm_affinode.base.errors import AffinodeError, ConfigError, InputError
from slurm_affinode.base.node_config import AgentConfig, InplaceConfig, SuspendConfig, check_inplace
from slurm_affinode.base.node_config import check as check_node
from slurm_affinode.base.toml_lines import syntax_fault
from slurm_affinode.base.urls import checked_url


@dataclass(frozen=True, slots=True)
class NodeClass:
    """Hardware of nodes, used if Slurm itself is not queried: ``[zombies.nodes."gpu-*"]``."""

    cores: int
    gpus: int
    memory_gib: float


@dataclass(frozen=True, slots=True)
class MisfitConfig:
    """Thresholds of the misfits. Shares are 0-1."""

    min_run: str = "10m"
    """Shorter runs are ignored."""
    cores_per_gpu: float | None = None
    """``None``: the number of cores that the node has for each GPU; if that is unknown, the rule is skipped."""
    memory_gib_per_gpu: float | None = None
    """As ``cores_per_gpu``."""
    min_gpu_hours: float = 0.0
    """A user's jobs of one kind are reported if they sum to at least this many GPU-hours."""
    min_core_hours: float = 0.0
    """The same for jobs without GPUs, in core-hours."""
    memory_used_share: float = 0.8
    """A job that used at least this share of its host memory needed it."""
    too_powerful: tuple[str, ...] = ("*h200*", "*h100*", "*b200*", "*a100*")
    """Patterns of GPU models that have smaller alternatives."""
    small_util_pct: float = 15.0
    small_gpu_gib: float = 10.0
    small_host_gib: float = 32.0
    small_cores: int = 4
    """A job that stays below all four limits fits a smaller GPU or a MIG instance."""
    time_share: float = 0.2
    """A job that used less than this share of its time limit is reported."""
    time_min_unused_gpu_hours: float = 8.0
    cpu_only_partitions: tuple[str, ...] = ()
    """Partitions for GPU jobs; empty: those in which most jobs have GPUs."""
    user_efficiency_pct: float = 25.0
    user_min_gpu_hours: float = 50.0
    user_min_share: float = 0.0
    """Minimum share of all GPU-hours (or core-hours) of the interval."""
    user_top: int = 15
    """Only this many users with the most GPU-hours are considered."""
    cpu_efficiency_pct: float = 60.0
    cpu_user_min_core_hours: float = 1000.0
    host_memory_min_gib_hours: float = 100.0


@dataclass(frozen=True, slots=True)
class ZombiesConfig:
    """``slurm-affinode zombies``."""

    signatures: Path | None = None
    """The site's signature file; ``None``: the built-in one."""
    policy: Path | None = None
    """The clean-up policy; ``None``: /etc/slurm-affinode/zombies.toml, else the built-in one."""
    look_back: str = "2d"
    """How far back from the end GPU metrics are read."""
    exporter_port: int = 9402
    """Port of a node's metrics: http://NODE:PORT/metrics."""
    exporter_url: str | None = None
    """URL of the metrics instead, with ``{node}``: ``https://{node}.example.org:9400/metrics``."""
    exporter_token_file: Path | None = None
    """A bearer token for the exporters."""
    exporter_ca_file: Path | None = None
    """CA bundle (PEM) for https."""
    completing: str = "15m"
    """A job that is COMPLETING for longer than this is stuck."""
    nodes: Mapping[str, NodeClass] = field(default_factory=dict)
    """Pattern of node names -> hardware; the first match counts."""
    misfits: MisfitConfig = MisfitConfig()


_SHARES = ("memory_used_share", "time_share", "user_min_share")
_PERCENTS = ("small_util_pct", "user_efficiency_pct", "cpu_efficiency_pct")
_AMOUNTS = (
    "min_gpu_hours", "min_core_hours", "small_gpu_gib", "small_host_gib", "small_cores", "time_min_unused_gpu_hours",
    "user_min_gpu_hours", "cpu_user_min_core_hours", "host_memory_min_gib_hours",
)  # fmt: skip


def check_zombies(zombies: ZombiesConfig, where: str) -> None:
    """Raise ``ConfigError``, naming file and key, for an invalid value of the right type."""
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


DEFAULT_PATH = Path("/etc/slurm-affinode/config.toml")
ENV_CONFIG = "SLURM_AFFINODE_CONFIG"
ENV_STATE = "SLURM_AFFINODE_STATE"
ENV_DB = "SLURM_AFFINODE_DB"
ENV_SLURM_BACKEND = "SLURM_AFFINODE_SLURM_BACKEND"
DEFAULT_POLICY = Path("/etc/slurm-affinode/zombies.toml")
SLURM_BACKENDS = ("auto", "pyslurm", "commands")

_KEEP = ("keep_samples", "keep_jobs", "keep_reports", "keep_audit")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""RFC 9110, section 5.6.2: a token."""
_DAY_S = 86400.0
_PIPE_S = 10.0
_LARGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Location of the data."""

    state_dir: Path | None = None
    """Directory of the SQLite file and the GPU metrics; ``None``: the user's default (see ``state_dir``)."""
    db: str | None = None
    """SQLAlchemy URL; ``None``: SQLite in the state directory."""


UNNAMED_CLUSTER = "default"
"""Cluster of records that name none, if the configuration does not name it either."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Facts that input records may lack."""

    name: str | None = None
    """Cluster of records that name none; ``None``: see ``name_or_default``."""
    timezone: str | None = None
    """IANA zone of times without a zone; ``None``: the local zone of this process (as for ``sacct`` itself)."""

    @property
    def name_or_default(self) -> str:
        """Cluster name for records that name none."""
        return self.name or UNNAMED_CLUSTER


@dataclass(frozen=True, slots=True)
class SlurmConfig:
    """Access to a live Slurm."""

    backend: str = "auto"
    """``pyslurm``, ``commands`` (Slurm's own), or ``auto``: pyslurm if it is installed for the site's release."""
    bin_dir: Path | None = None
    """Directory of Slurm's commands, searched before ``PATH``, e.g. ``/opt/slurm/bin``; ``None``: they are in
    ``PATH``."""


@dataclass(frozen=True, slots=True)
class IdleConfig:
    """Thresholds of idle GPUs. Percent of each activity signal, inclusive."""

    idle_pct: float = 0.0
    low_pct: float = 5.0
    max_gap_steps: float = 3.0
    """A gap between two samples of more than this many sampling intervals is unknown time."""


@dataclass(frozen=True, slots=True)
class GpuHistoryConfig:
    """Reading of files with GPU metrics."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """CSV header -> field of the sample schema, for headers that are not in the alias table."""
    aliases: Path | None = None
    """A TOML file with additional metric names, read after the built-in table."""


@dataclass(frozen=True, slots=True)
class PrometheusConfig:
    """A Prometheus server with GPU metrics. Secrets are in files or in the environment, never here."""

    url: str | None = None
    """Root of the server, e.g. ``https://metrics.example.org/prometheus``; ``None``: no server."""
    token_file: Path | None = None
    """A bearer token. Environment: ``SLURM_AFFINODE_PROMETHEUS_TOKEN``."""
    username: str | None = None
    """For basic authentication, with ``password_file`` or ``SLURM_AFFINODE_PROMETHEUS_PASSWORD``."""
    password_file: Path | None = None
    ca_file: Path | None = None
    """CA bundle (PEM); ``None``: that of the system."""
    cert_file: Path | None = None
    """A client certificate (PEM), including its key unless ``key_file`` is set."""
    key_file: Path | None = None
    insecure: bool = False
    """Skip verification of TLS certificates."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Additional request headers, e.g. ``X-Scope-OrgID`` for Mimir."""
    match: tuple[str, ...] = ()
    """Label matchers that every series must satisfy, e.g. ``cluster="alpha"``."""
    step: str | None = None
    """Resolution of queries; ``None``: the samples as scraped."""
    timeout: str = "60s"
    """Timeout of one request."""
    overlap: str = "10m"
    """How far before the end of the last read metrics are read again, for samples that arrived late."""


@dataclass(frozen=True, slots=True)
class PriceConfig:
    """Prices of GPU-hours."""

    currency: str | None = None
    """Printed before amounts, e.g. ``EUR``; ``None``: the currency of the price table."""
    table: Path | None = None
    """A TOML price table that replaces the built-in one."""


@dataclass(frozen=True, slots=True)
class NightlyConfig:
    """``slurm-affinode nightly``."""

    out: Path | None = None
    """Root of the reports and their index page; ``None``: ``reports`` in the state directory."""
    accounting_paths: tuple[str, ...] = ()
    """Files or globs with sacct output to import each night, if sacct itself is not to be run."""
    gpu_paths: tuple[str, ...] = ()
    """Files, directories or globs with GPU metrics to import each night."""
    sacct_overlap: str = "2d"
    """How far before the last run accounting is read again, for records that reached the database late."""
    keep_samples: str = "400d"
    """Older GPU samples are deleted."""
    keep_jobs: str = "1100d"
    """Jobs that ended longer ago are deleted."""
    keep_reports: str = "400d"
    """Reports of periods that ended longer ago are deleted."""
    keep_audit: str = "1100d"
    """Older records of actions on squatters, zombies and orphans are deleted; the deletion is recorded as well."""


@dataclass(frozen=True, slots=True)
class Config:
    """The complete configuration of a site."""

    store: StoreConfig = StoreConfig()
    cluster: ClusterConfig = ClusterConfig()
    slurm: SlurmConfig = SlurmConfig()
    idle: IdleConfig = IdleConfig()
    gpu_history: GpuHistoryConfig = GpuHistoryConfig()
    prometheus: PrometheusConfig = PrometheusConfig()
    price: PriceConfig = PriceConfig()
    nightly: NightlyConfig = NightlyConfig()
    agent: AgentConfig = field(default_factory=AgentConfig)
    suspend: SuspendConfig = field(default_factory=SuspendConfig)
    inplace: InplaceConfig = field(default_factory=InplaceConfig)
    zombies: ZombiesConfig = field(default_factory=ZombiesConfig)
    source: Path | None = None
    """The file that was read, if any. Not a key in the file."""

    @property
    def state_dir(self) -> Path:
        """The state directory: configured, else ``/var/lib/slurm-affinode`` for root, else below ``$HOME``."""
        if self.store.state_dir is not None:
            return self.store.state_dir
        if os.geteuid() == 0:
            return Path("/var/lib/slurm-affinode")
        base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        return Path(base) / "slurm-affinode"

    @property
    def db_url(self) -> str:
        """The SQLAlchemy URL of the database."""
        return self.store.db or f"sqlite:///{self.state_dir / 'affinode.sqlite'}"

    @property
    def reports_dir(self) -> Path:
        """The root of the reports of ``nightly``."""
        return self.nightly.out or self.state_dir / "reports"

    @property
    def ledger_dir(self) -> Path | None:
        """Directory of the ledger that agents write about suspensions; ``None``: no ledger."""
        if self.suspend.ledger is not None or self.suspend.shared_store is None:
            return self.suspend.ledger
        return self.suspend.shared_store.parent / "ledger"

    @property
    def history_dir(self) -> Path:
        """The root of the GPU metrics."""
        return self.state_dir / "history"


def load(
    path: Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
    state_dir: Path | None = None,
    db: str | None = None,
) -> Config:
    """Read the configuration; command line (``state_dir``, ``db``) beats environment beats file beats defaults.

    A ``path`` given as argument or in the environment must exist; the default path may be absent. Raises
    ``ConfigError`` with file and key.
    """
    environ = os.environ if env is None else env
    asked = path or (Path(environ[ENV_CONFIG]) if environ.get(ENV_CONFIG) else None)
    chosen = asked or DEFAULT_PATH
    config = Config()
    try:
        text = read_small(chosen).decode("utf-8")
    except FileNotFoundError:
        if asked is not None:
            raise ConfigError(f"{chosen}: no such file", hint="give --config a file that exists") from None
    except OSError as error:
        raise ConfigError(f"{chosen}: cannot be read: {error.strerror}", hint="give --config a TOML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{chosen}: is not UTF-8 text", hint="save it as UTF-8") from error
    except InputError as error:
        raise ConfigError(str(error), hint="give --config a TOML file") from error
    else:
        config = replace(parse(text, where=str(chosen)), source=chosen)
    store = config.store
    if env_state := environ.get(ENV_STATE):
        store = replace(store, state_dir=Path(env_state))
    if env_db := environ.get(ENV_DB):
        store = replace(store, db=env_db)
    if state_dir is not None:
        store = replace(store, state_dir=state_dir)
    if db is not None:
        store = replace(store, db=db)
    if env_backend := environ.get(ENV_SLURM_BACKEND):
        slurm = replace(config.slurm, backend=backend(env_backend, where=ENV_SLURM_BACKEND))
        config = replace(config, slurm=slurm)
    return replace(config, store=store)


def read_small(path: Path) -> bytes:
    """Return the contents of a file that people write, or of a pipe (``--config <(...)``): at most 1 MiB.

    Raises ``OSError``, and ``InputError`` if the file is larger or endless, or if no data arrives through a pipe.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123 - a descriptor
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode) and not select.select([file], [], [], _PIPE_S)[0]:
            raise InputError("a pipe without a writer", where=str(path))
        os.set_blocking(file.fileno(), True)
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise InputError(f"is larger than {_LARGEST >> 20} MiB, and no text that people write", where=str(path))
    return data


def exposed(path: Path) -> str | None:
    """Return a warning if all users can change the file, which names programs that root runs; else ``None``."""
    try:
        mode, above = path.stat().st_mode, path.resolve().parent.stat().st_mode
    except OSError:
        return None
    if stat.S_ISREG(mode) and mode & stat.S_IWOTH:
        return f"{path}: everybody may write to it: chmod o-w {path}"
    if above & stat.S_IWOTH and not above & stat.S_ISVTX:
        return f"{path}: everybody may replace it: chmod o-w {path.resolve().parent}"
    return None


def policy_path(config: Config) -> Path:
    """Return the path of the clean-up policy: ``zombies.policy``, else ``DEFAULT_POLICY``."""
    return config.zombies.policy or DEFAULT_POLICY


def backend(text: str, *, where: str) -> str:
    """Return the backend if it is one of ``SLURM_BACKENDS``. Raises ``ConfigError`` with ``where``."""
    if text not in SLURM_BACKENDS:
        raise ConfigError(f"{where}: {text!r} is no way to speak to Slurm", hint=f"known: {', '.join(SLURM_BACKENDS)}")
    return text


def parse(text: str, *, where: str) -> Config:
    """Build a ``Config`` from TOML text; ``where`` names its origin in errors. Raises ``ConfigError``."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        fault = syntax_fault(error, text)
        raise ConfigError(f"{where}:{fault.line}: {fault.message}", hint=fault.hint) from error
    config = build(Config, data, where)
    idle, nightly, prometheus = config.idle, config.nightly, config.prometheus
    if not 0 <= idle.idle_pct <= idle.low_pct <= 100:
        raise ConfigError(f"{where}: idle: needs 0 <= idle_pct <= low_pct <= 100")
    within(where, "idle.max_gap_steps", idle.max_gap_steps, 1)
    backend(config.slurm.backend, where=f"{where}: slurm.backend")
    bin_dir = config.slurm.bin_dir
    if bin_dir is not None and (not bin_dir.is_absolute() or ":" in str(bin_dir)):
        message = f"{where}: slurm.bin_dir: {str(bin_dir)!r} is not the absolute path of a directory"
        raise ConfigError(message, hint="write for example /opt/slurm/bin")
    zone(where, "cluster.timezone", config.cluster.timezone)
    span(where, "nightly.sacct_overlap", nightly.sacct_overlap)
    for key in _KEEP:  # a shorter retention would delete data before the run that reports on it
        span(where, f"nightly.{key}", getattr(nightly, key), least_s=_DAY_S)
    for key in ("step", "timeout"):
        span(where, f"prometheus.{key}", getattr(prometheus, key), above=True)
    span(where, "prometheus.overlap", prometheus.overlap)
    for header in prometheus.headers:
        if not _HEADER.fullmatch(header):
            raise ConfigError(
                f"{where}: prometheus.headers: {header!r} is no name of a header", hint="X-Scope-OrgID is one"
            )
    if prometheus.url is not None:
        try:
            checked_url(prometheus.url)
        except AffinodeError as error:
            raise ConfigError(f"{where}: prometheus.url: {error}", hint=error.hint) from None
    check_zombies(config.zombies, where)
    check_node(config.agent, config.suspend, where)
    check_inplace(config.inplace, where)
    return config
