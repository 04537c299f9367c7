"""The configuration: ``/etc/slurm-affinode/config.toml``, overridden by environment and command line.

Every key is optional. An unknown key or a value of the wrong kind is an error that names the file and the key,
so that a typing mistake is never silently a default.
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

from slurm_affinode.configvalues import build, span, within, zone
from slurm_affinode.errors import AffinodeError, ConfigError, InputError
from slurm_affinode.nodeconfig import AgentConfig as AgentConfig  # noqa: PLC0414 - exported
from slurm_affinode.nodeconfig import InplaceConfig as InplaceConfig  # noqa: PLC0414 - exported
from slurm_affinode.nodeconfig import SuspendConfig as SuspendConfig  # noqa: PLC0414 - exported
from slurm_affinode.nodeconfig import check as check_node
from slurm_affinode.nodeconfig import check_inplace
from slurm_affinode.tomllines import syntax_fault
from slurm_affinode.urls import checked_url
from slurm_affinode.zombieconfig import ZombiesConfig as ZombiesConfig  # noqa: PLC0414 - exported
from slurm_affinode.zombieconfig import check_zombies

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
    """Where facts are kept."""

    state_dir: Path | None = None
    """Directory of the SQLite file and the GPU history; ``None`` means the default of the user (see ``state_dir``)."""
    db: str | None = None
    """SQLAlchemy URL; ``None`` means SQLite in the state directory."""


UNNAMED_CLUSTER = "default"
"""Stands for the cluster of records that name none, where the configuration does not name it either."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What the inputs do not say about themselves."""

    name: str | None = None
    """Cluster of records that do not name one; ``None``: see ``name_or_default``."""
    timezone: str | None = None
    """IANA zone of times without a zone; ``None`` means the local zone of this process (as ``sacct`` itself does)."""

    @property
    def name_or_default(self) -> str:
        """What a record that names no cluster is taken to be of."""
        return self.name or UNNAMED_CLUSTER


@dataclass(frozen=True, slots=True)
class SlurmConfig:
    """How a live Slurm is spoken to."""

    backend: str = "auto"
    """``pyslurm``, ``commands`` (Slurm's own), or ``auto``: pyslurm where it is there for the site's release."""
    bin_dir: Path | None = None
    """Directory of Slurm's commands, searched before ``PATH``, e.g. ``/opt/slurm/bin``; ``None``: they are on it."""


@dataclass(frozen=True, slots=True)
class IdleConfig:
    """When a GPU counts as idle. Percent of each activity signal, inclusive."""

    idle_pct: float = 0.0
    low_pct: float = 5.0
    max_gap_steps: float = 3.0
    """A gap between two samples longer than this many sampling steps is unknown time."""


@dataclass(frozen=True, slots=True)
class GpuHistoryConfig:
    """How GPU history files are read."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """CSV header -> field of the sample schema, for headers that the alias table does not know."""
    aliases: Path | None = None
    """A TOML file with further metric names, read after the built-in table."""


@dataclass(frozen=True, slots=True)
class PrometheusConfig:
    """A Prometheus server that has GPU history. Secrets are in files or in the environment, never here."""

    url: str | None = None
    """Root of the server, e.g. ``https://metrics.example.org/prometheus``; ``None``: there is none."""
    token_file: Path | None = None
    """A bearer token. Environment: ``SLURM_AFFINODE_PROMETHEUS_TOKEN``."""
    username: str | None = None
    """For basic authentication, with ``password_file`` or ``SLURM_AFFINODE_PROMETHEUS_PASSWORD``."""
    password_file: Path | None = None
    ca_file: Path | None = None
    """Certificates (PEM) of authorities to believe; ``None``: those of the system."""
    cert_file: Path | None = None
    """A client certificate (PEM), with its key unless ``key_file`` has it."""
    key_file: Path | None = None
    insecure: bool = False
    """Believe any certificate."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further request headers, e.g. ``X-Scope-OrgID`` of Mimir."""
    match: tuple[str, ...] = ()
    """Label matchers that every series has to fulfil, e.g. ``cluster="alpha"``."""
    step: str | None = None
    """Distance of the samples to ask for; ``None``: the samples as they were scraped."""
    timeout: str = "60s"
    """For one answer."""
    overlap: str = "10m"
    """How far before the end of the last reading history is read again, for samples that came late."""


@dataclass(frozen=True, slots=True)
class PriceConfig:
    """What a GPU-hour costs."""

    currency: str | None = None
    """Printed before amounts, e.g. ``EUR``; ``None`` means the currency of the price table."""
    table: Path | None = None
    """A TOML price table in place of the built-in one."""


@dataclass(frozen=True, slots=True)
class NightlyConfig:
    """``slurm-affinode nightly``."""

    out: Path | None = None
    """Root of the reports and their index page; ``None`` means ``reports`` in the state directory."""
    accounting_paths: tuple[str, ...] = ()
    """Files or globs with sacct output to take in each night, where sacct itself is not to be run."""
    gpu_paths: tuple[str, ...] = ()
    """Files, directories or globs with GPU history to take in each night."""
    sacct_overlap: str = "2d"
    """How far before the last run accounting is read again, for records that reached the database late."""
    keep_samples: str = "400d"
    """GPU samples older than this go."""
    keep_jobs: str = "1100d"
    """Runs that ended longer ago go."""
    keep_reports: str = "400d"
    """Reports of periods that ended longer ago go."""
    keep_audit: str = "1100d"
    """Older records of what was done about squatters, zombies and orphans go; that they went is a record itself."""


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that a site sets."""

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
    """The file that was read, if any. Not a key of the file."""

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
        """The SQLAlchemy URL of the relational store."""
        return self.store.db or f"sqlite:///{self.state_dir / 'affinode.sqlite'}"

    @property
    def reports_dir(self) -> Path:
        """The root of the reports of ``nightly``."""
        return self.nightly.out or self.state_dir / "reports"

    @property
    def ledger_dir(self) -> Path | None:
        """Where agents write down what suspensions gave back; ``None``: nowhere."""
        if self.suspend.ledger is not None or self.suspend.shared_store is None:
            return self.suspend.ledger
        return self.suspend.shared_store.parent / "ledger"

    @property
    def history_dir(self) -> Path:
        """The root of the GPU sample history."""
        return self.state_dir / "history"


def load(
    path: Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
    state_dir: Path | None = None,
    db: str | None = None,
) -> Config:
    """Read the configuration; command line (``state_dir``, ``db``) beats environment beats file beats defaults.

    A ``path`` that was asked for (argument or environment) must exist; the default path may be absent.
    Raises ``ConfigError`` naming file and key.
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
    """What is in a file that people write, or comes through a pipe (``--config <(...)``): at most 1 MiB.

    Raises ``OSError``, and ``InputError`` for what is larger or does not end, and a pipe into which nobody writes.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123 - a descriptor
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode) and not select.select([file], [], [], _PIPE_S)[0]:
            raise InputError("a pipe into which nobody writes", where=str(path))
        os.set_blocking(file.fileno(), True)
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise InputError(f"is larger than {_LARGEST >> 20} MiB, and no text that people write", where=str(path))
    return data


def exposed(path: Path) -> str | None:
    """A line that says so where everybody may write to the file: it names programs and places that root uses."""
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
    """Where the policy for zombies is: ``zombies.policy``, else beside the configuration."""
    return config.zombies.policy or DEFAULT_POLICY


def backend(text: str, *, where: str) -> str:
    """One of ``SLURM_BACKENDS``. Raises ``ConfigError`` that names ``where``."""
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
    for key in _KEEP:  # what is kept for less would be gone before the run that is to report it
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
