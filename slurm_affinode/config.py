"""The configuration: ``/etc/slurm-affinode/config.toml``, overridden by environment and command line.

Every key is optional. An unknown key or a value of the wrong kind is an error that names the file and the key,
so that a typing mistake is never silently a default.
"""

from __future__ import annotations

import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from slurm_affinode.errors import AffinodeError, ConfigError
from slurm_affinode.nodeconfig import AgentConfig as AgentConfig  # noqa: PLC0414 - exported
from slurm_affinode.nodeconfig import InplaceConfig as InplaceConfig  # noqa: PLC0414 - exported
from slurm_affinode.nodeconfig import SuspendConfig as SuspendConfig  # noqa: PLC0414 - exported
from slurm_affinode.nodeconfig import check as check_node
from slurm_affinode.nodeconfig import check_inplace
from slurm_affinode.timespec import parse_span_s
from slurm_affinode.tomllines import syntax_fault
from slurm_affinode.zombieconfig import ZombiesConfig as ZombiesConfig  # noqa: PLC0414 - exported

DEFAULT_PATH = Path("/etc/slurm-affinode/config.toml")
ENV_CONFIG = "SLURM_AFFINODE_CONFIG"
ENV_STATE = "SLURM_AFFINODE_STATE"
ENV_DB = "SLURM_AFFINODE_DB"
ENV_SLURM_BACKEND = "SLURM_AFFINODE_SLURM_BACKEND"
ENV_POLICY = "SLURM_AFFINODE_ZOMBIE_POLICY"
DEFAULT_POLICY = Path("/etc/slurm-affinode/zombies.toml")
SLURM_BACKENDS = ("auto", "pyslurm", "commands")

_NIGHTLY_SPANS = ("sacct_overlap", "keep_samples", "keep_jobs", "keep_reports", "keep_audit")
_LONGEST_S = 100 * 365 * 86400.0
"""A longer span before now is no date of anything that is measured, at last none of the calendar."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where facts are kept."""

    state_dir: Path | None = None
    """Directory of the SQLite file and the GPU history; ``None`` means the default of the user (see ``state_dir``)."""
    db: str | None = None
    """SQLAlchemy URL; ``None`` means SQLite in the state directory."""


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
        return self.name or "default"


@dataclass(frozen=True, slots=True)
class SlurmConfig:
    """How a live Slurm is spoken to."""

    backend: str = "auto"
    """``pyslurm``, ``commands`` (Slurm's own), or ``auto``: pyslurm where it is there for the site's release."""


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
        text = chosen.read_text(encoding="utf-8")
    except FileNotFoundError:
        if asked is not None:
            raise ConfigError(f"{chosen}: no such file", hint="give --config a file that exists") from None
    except OSError as error:
        raise ConfigError(f"{chosen}: cannot be read: {error.strerror}", hint="give --config a TOML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{chosen}: is not UTF-8 text", hint="save it as UTF-8") from error
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
        config = replace(config, slurm=SlurmConfig(backend(env_backend, where=ENV_SLURM_BACKEND)))
    return replace(config, store=store)


def policy_path(config: Config) -> Path:
    """Where the policy for zombies is: ``zombies.policy``, the environment, else beside the configuration."""
    return config.zombies.policy or Path(os.environ.get(ENV_POLICY) or DEFAULT_POLICY)


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
    config = _build(Config, data, where, ())
    idle = config.idle
    if not 0 <= idle.idle_pct <= idle.low_pct <= 100:
        raise ConfigError(f"{where}: idle: needs 0 <= idle_pct <= low_pct <= 100")
    if idle.max_gap_steps < 1:
        raise ConfigError(f"{where}: idle.max_gap_steps: {idle.max_gap_steps:g} is below 1")
    backend(config.slurm.backend, where=f"{where}: slurm.backend")
    nightly, prometheus = config.nightly, config.prometheus
    spans = {f"nightly.{key}": getattr(nightly, key) for key in _NIGHTLY_SPANS}
    spans |= {f"prometheus.{key}": getattr(prometheus, key) for key in ("step", "timeout", "overlap")}
    spans |= {f"zombies.{key}": getattr(config.zombies, key) for key in ("look_back", "completing")}
    spans["zombies.misfits.min_run"] = config.zombies.misfits.min_run
    for name, span in spans.items():
        try:
            seconds = None if span is None else parse_span_s(span)
        except AffinodeError as error:
            raise ConfigError(f"{where}: {name}: {error}", hint=error.hint) from None
        if name in ("prometheus.step", "prometheus.timeout") and seconds == 0:
            raise ConfigError(f"{where}: {name}: {span} is not above 0")
        if seconds is not None and seconds > _LONGEST_S:
            raise ConfigError(f"{where}: {name}: {span} is more than 100 years", hint="36500d is as good as for ever")
    check_node(config.agent, config.suspend, where)
    check_inplace(config.inplace, where)
    return config


def _build(cls: type[T], data: Mapping[str, Any], where: str, at: tuple[str, ...]) -> T:
    hints = typing.get_type_hints(cls)
    known = {f.name: hints[f.name] for f in fields(cls) if f.name != "source"}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = ".".join((*at, key))
        if key not in known:
            raise ConfigError(f"{where}: unknown key {name}", hint=f"known here: {', '.join(sorted(known))}")
        values[key] = _value(known[key], value, where, (*at, key))
    for one in fields(cls):  # type: ignore[arg-type]
        if one.default is MISSING and one.default_factory is MISSING and one.name not in values:
            raise ConfigError(f"{where}: {'.'.join(at)}: {one.name} is missing")
    return cls(**values)


def _value(kind: Any, value: Any, where: str, at: tuple[str, ...]) -> Any:
    name = ".".join(at)
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {name}: a table is needed")
        return _build(kind, value, where, at)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _value(next(a for a in typing.get_args(kind) if a is not type(None)), value, where, at)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if origin is tuple and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, dict):
        entry = typing.get_args(kind)[1]
        if entry is str and not all(isinstance(one, str) for one in value.values()):
            raise ConfigError(f"{where}: {name}: {value!r} is not a table of strings")
        return {key: _value(entry, one, where, (*at, key)) for key, one in value.items()}
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind in (str, bool) and isinstance(value, kind):
        return value
    raise ConfigError(f"{where}: {name}: {value!r} is not {_expected(kind)}")


def _expected(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin is tuple:
        return "a list of strings"
    if origin is not None:
        return "a table"
    return {float: "a number", int: "a whole number", bool: "true or false", Path: "a path (string)"}.get(
        kind, "a string"
    )
