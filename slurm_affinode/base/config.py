"""The configuration: ``/etc/slurm-affinode/config.toml``, overridden by environment and command line.

Every key is optional. An unknown key or a value of the wrong type is an error that names file, line and key.
"""

from __future__ import annotations

import os
import re
import select
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from slurm_affinode.base.errors import AffinodeError, ConfigError, InputError
from slurm_affinode.base.node_config import AgentConfig, InplaceConfig, SuspendConfig
from slurm_affinode.base.object_url import StorePlace, store_place
from slurm_affinode.base.text import size
from slurm_affinode.base.times import WEEKDAYS, parse_hours
from slurm_affinode.base.toml_schema import (
    AbsolutePath,
    Amount,
    Percent,
    PositiveAmount,
    PositiveSpan,
    Share,
    Span,
    TomlFile,
    Zone,
    span,
    within,
)
from slurm_affinode.base.urls import checked_url

MODEL_FILE = "prediction.json"
"""Name of the model of ``predict train`` in the state directory."""
DEFAULT_PATH = Path("/etc/slurm-affinode/config.toml")
ENV_CONFIG = "SLURM_AFFINODE_CONFIG"
ENV_STATE = "SLURM_AFFINODE_STATE"
ENV_DB = "SLURM_AFFINODE_DB"
ENV_SLURM_BACKEND = "SLURM_AFFINODE_SLURM_BACKEND"
DEFAULT_POLICY = Path("/etc/slurm-affinode/zombies.toml")
REPORT_ENTRIES = (
    "history",
    "history-cache",
    "reports",
    "nightly.lock",
    "job-summaries",
    "partial-totals",
    "pseudonyms.key",
)
"""Entries of the state directory that commands create. The database handles its own file, images belong to root."""
SLURM_BACKENDS = ("auto", "pyslurm", "commands")

_PIPE_S = 10.0
_LARGEST = 1 << 20
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""RFC 9110, section 5.6.2: a token."""
_Retention = Annotated[str, span(least_s=86400.0)]
"""A shorter one would delete data before the run that reports on it."""


def _backend(text: str) -> None:
    if text not in SLURM_BACKENDS:
        raise AffinodeError(f"{text!r} is not an interface to Slurm", hint=f"known: {', '.join(SLURM_BACKENDS)}")


def backend(text: str, *, where: str) -> str:
    """Return the backend if it is one of ``SLURM_BACKENDS``. Raises ``ConfigError`` with ``where``."""
    try:
        _backend(text)
    except AffinodeError as error:
        raise ConfigError(f"{where}: {error}", hint=error.hint) from None
    return text


def _bin_dir(path: Path) -> None:
    if not path.is_absolute() or ":" in str(path):
        raise AffinodeError(
            f"{str(path)!r} is not the absolute path of a directory", hint="write for example /opt/slurm/bin"
        )


def _header_names(headers: Mapping[str, str]) -> None:
    for header in headers:
        if not _HEADER.fullmatch(header):
            raise AffinodeError(f"{header!r} is not the name of a header", hint="X-Scope-OrgID is one")


def _history(text: str) -> None:
    store_place(text, Path(), 0)


def _prometheus_url(url: str) -> None:
    checked_url(url)


def _exporter_url(url: str) -> None:
    try:
        parts = urlsplit(url.replace("{node}", "n1"))
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise AffinodeError(
            f"{url!r} is neither http nor https",
            hint="write for example https://{node}.example.org:9400/metrics",
        )


@dataclass(frozen=True, slots=True)
class NodeClass:
    """Hardware of nodes, used if Slurm itself is not queried: ``[zombies.nodes."gpu-*"]``."""

    cores: Annotated[int, within(1)]
    gpus: Annotated[int, within(0)]
    memory_gib: PositiveAmount


@dataclass(frozen=True, slots=True)
class MisfitConfig:
    """Thresholds of the misfits. Shares are 0-1."""

    min_run: Span = "10m"
    """Shorter runs are ignored."""
    cores_per_gpu: PositiveAmount | None = None
    """``None``: the number of cores that the node has for each GPU; if that is unknown, the rule is skipped."""
    memory_gib_per_gpu: PositiveAmount | None = None
    """As ``cores_per_gpu``."""
    min_gpu_hours: Amount = 0.0
    """A user's jobs of one kind are reported if they sum to at least this many GPU-hours."""
    min_core_hours: Amount = 0.0
    """The same for jobs without GPUs, in core-hours."""
    memory_used_share: Share = 0.8
    """A job that used at least this share of its host memory needed it."""
    too_powerful: tuple[str, ...] = ("*h200*", "*h100*", "*b200*", "*a100*")
    """Patterns of GPU models that have smaller alternatives."""
    small_util_pct: Percent = 15.0
    small_gpu_gib: Amount = 10.0
    small_host_gib: Amount = 32.0
    small_cores: Annotated[int, within(0)] = 4
    """A job that stays below all four limits fits a smaller GPU or a MIG instance."""
    time_share: Share = 0.2
    """A job that used less than this share of its time limit is reported."""
    time_min_unused_gpu_hours: Amount = 8.0
    cpu_only_partitions: tuple[str, ...] = ()
    """Partitions for GPU jobs; empty: those in which most jobs have GPUs."""
    user_efficiency_pct: Percent = 25.0
    user_min_gpu_hours: Amount = 50.0
    user_min_share: Share = 0.0
    """Minimum share of all GPU-hours (or core-hours) of the interval."""
    user_top: Annotated[int, within(1)] = 15
    """Only this many users with the most GPU-hours are considered."""
    cpu_efficiency_pct: Percent = 60.0
    cpu_user_min_core_hours: Amount = 1000.0
    host_memory_min_gib_hours: Amount = 100.0


@dataclass(frozen=True, slots=True)
class ZombiesConfig:
    """``slurm-affinode zombies``."""

    signatures: Path | None = None
    """The site's signature file; ``None``: the built-in one."""
    policy: Path | None = None
    """The clean-up policy; ``None``: /etc/slurm-affinode/zombies.toml, else the built-in one."""
    look_back: PositiveSpan = "2d"
    """How far back from the end GPU metrics are read."""
    exporter_port: Annotated[int, within(1, 65535)] = 9402
    """Port of a node's metrics: http://NODE:PORT/metrics."""
    exporter_url: Annotated[str, _exporter_url] | None = None
    """URL of the metrics instead, with ``{node}``: ``https://{node}.example.org:9400/metrics``."""
    exporter_token_file: Path | None = None
    """A bearer token for the exporters."""
    exporter_ca_file: Path | None = None
    """CA bundle (PEM) for https."""
    completing: Span = "15m"
    """A job that is COMPLETING for longer than this is stuck."""
    nodes: Mapping[str, NodeClass] = field(default_factory=dict)
    """Pattern of node names -> hardware; the first match counts."""
    misfits: MisfitConfig = MisfitConfig()


@dataclass(frozen=True, slots=True)
class DaskConfig:
    """Workers of ``--dask slurm``: each is a job of Slurm."""

    jobs: Annotated[int, within(1)] = 4
    cores: Annotated[int, within(1)] = 2
    """Of each job; as many threads fold samples."""
    memory_gib: PositiveAmount = 4.0
    time_limit: PositiveSpan = "2h"
    wait: PositiveSpan = "15m"
    """Timeout for the first of them to start."""
    partition: str | None = None
    account: str | None = None
    options: tuple[str, ...] = ()
    """Further options of sbatch, such as ``--qos=low``."""
    python: str | None = None
    """Path of the interpreter on the nodes; ``None``: that of this command."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Location of the data."""

    state_dir: Path | None = None
    """Directory of the SQLite file and the GPU metrics; ``None``: the user's default (see ``state_dir``)."""
    db: str | None = None
    """SQLAlchemy URL; ``None``: SQLite in the state directory."""
    history: Annotated[str, _history] | None = None
    """Path or URL of the GPU metrics; ``None``: in the state directory."""
    history_cache: AbsolutePath | None = None
    """Directory for copies of objects, if ``history`` is a URL; ``None``: in the state directory."""
    history_cache_gib: PositiveAmount = 50.0
    """Size beyond which copies that no command uses are deleted."""


UNNAMED_CLUSTER = "default"
"""Cluster of records that name none, if the configuration does not name it either."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Facts that input records may lack."""

    name: str | None = None
    """Cluster of records that name none; ``None``: see ``name_or_default``."""
    timezone: Zone | None = None
    """IANA zone of times without a zone; ``None``: the local zone of this process (as for ``sacct`` itself)."""

    @property
    def name_or_default(self) -> str:
        """Cluster name for records that name none."""
        return self.name or UNNAMED_CLUSTER


@dataclass(frozen=True, slots=True)
class SlurmConfig:
    """Access to a live Slurm."""

    backend: Annotated[str, _backend] = "auto"
    """``pyslurm``, ``commands`` (Slurm's own), or ``auto``: pyslurm if it is installed for the site's release."""
    bin_dir: Annotated[Path, _bin_dir] | None = None
    """Directory of Slurm's commands, searched before ``PATH``, e.g. ``/opt/slurm/bin``; ``None``: they are in
    ``PATH``."""


@dataclass(frozen=True, slots=True)
class IdleConfig:
    """Thresholds of idle GPUs. Percent of each activity signal, inclusive."""

    idle_pct: float = 0.0
    low_pct: float = 5.0
    max_gap_steps: Annotated[float, within(1)] = 3.0
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

    url: Annotated[str, _prometheus_url] | None = None
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
    headers: Annotated[Mapping[str, str], _header_names] = field(default_factory=dict)
    """Additional request headers, e.g. ``X-Scope-OrgID`` for Mimir."""
    match: tuple[str, ...] = ()
    """Label matchers that every series must satisfy, e.g. ``cluster="alpha"``."""
    step: PositiveSpan | None = None
    """Resolution of queries; ``None``: the samples as scraped."""
    timeout: PositiveSpan = "60s"
    """Timeout of one request."""
    overlap: Span = "10m"
    """How far before the end of the last read metrics are read again, for samples that arrived late."""


@dataclass(frozen=True, slots=True)
class PriceConfig:
    """Prices of GPU-hours."""

    currency: str | None = None
    """Printed before amounts, e.g. ``EUR``; ``None``: the currency of the price table."""
    table: Path | None = None
    """A TOML price table that replaces the built-in one."""


def _working_hours(text: str) -> None:
    parse_hours(text)


_DAYS = tuple(day[:3] for day in WEEKDAYS)


def _working_days(days: tuple[str, ...]) -> None:
    for day in days:
        if day not in _DAYS:
            raise AffinodeError(f"{day!r} is not a day", hint=f"known: {', '.join(_DAYS)}")


@dataclass(frozen=True, slots=True)
class ReportConfig:
    """Assumptions of reports."""

    working_hours: Annotated[str, _working_hours] = "08:00-18:00"
    """Begin and end of the working hours, by the clock of ``cluster.timezone``."""
    working_days: Annotated[tuple[str, ...], _working_days] = _DAYS[:5]
    """Days with working hours; empty: reports do not divide idle time by working hours."""

    @property
    def weekdays(self) -> tuple[int, ...]:
        """The days as numbers, 0: Monday."""
        return tuple(sorted({_DAYS.index(day) for day in self.working_days}))


@dataclass(frozen=True, slots=True)
class EmissionsConfig:
    """Greenhouse gases of the electricity: either ``grams_per_kwh``, or ``country`` and ``table``."""

    grams_per_kwh: Annotated[float, within(0, 2000)] | None = None
    """CO2 equivalent of the site's electricity; ``None``: that of ``country``."""
    origin: str | None = None
    """Where the figure comes from, and of which year; shown beside it."""
    country: str | None = None
    """Code of three letters (ISO 3166-1), or name as in ``table``."""
    table: AbsolutePath | None = None
    """A CSV table by country and year; the latest year counts."""
    pue: Annotated[float, within(1, 10)] | None = None
    """Power usage effectiveness of the site; ``None``: emissions of the GPUs alone."""


@dataclass(frozen=True, slots=True)
class PublishedJobsConfig:
    """Summaries of jobs for users who may not read the database."""

    directory: AbsolutePath | None = None
    """Directory of one file per user, readable by that user alone; ``None``: nothing is published."""
    keep: _Retention = "30d"
    """Jobs that ended longer ago are left out."""


def _periods(periods: tuple[str, ...]) -> None:
    for period in periods:
        if period not in ("day", "week", "month"):
            raise AffinodeError(f"{period!r} is not a period", hint="known: day, week, month")


@dataclass(frozen=True, slots=True)
class UsageMailConfig:
    """Mails about the use of GPUs in a period, delivered by ``[mail]`` of the clean-up policy."""

    periods: Annotated[tuple[str, ...], _periods] = ()
    """``day``, ``week``, ``month``; empty: no such mails."""
    admins: bool = True
    """To ``mail.admins`` of the policy, about the whole site."""
    users: bool = False
    """To users, about their own jobs."""
    accounts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Account -> users or mail addresses of those responsible for it."""
    min_idle_gpu_hours: Amount = 1.0
    """Users and accounts with fewer idle GPU-hours in the period get no mail."""
    opt_out: AbsolutePath | None = None
    """Directory in which users opt out; ``None``: they cannot."""


@dataclass(frozen=True, slots=True)
class PublishedPagesConfig:
    """Pages of users, accounts and jobs for a plain web server."""

    directory: AbsolutePath | None = None
    """Root of the pages, a directory for each user and account; ``None``: no pages."""
    url: str | None = None
    """Address of ``directory`` for links in reports: absolute, or relative to the root of the reports; ``None``: no
    links."""
    readers: tuple[str, ...] = ()
    """Users who may read all pages."""
    accounts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Account -> users who may read its page; an account that is not listed has no page."""
    account_jobs: bool = True
    """Whether the readers of an account get copies of the pages of its jobs, which name their users and programs."""
    keep: _Retention = "30d"
    """Pages of jobs that were made longer ago are deleted."""


@dataclass(frozen=True, slots=True)
class NightlyConfig:
    """``slurm-affinode nightly``."""

    out: Path | None = None
    """Root of the reports and their index page; ``None``: ``reports`` in the state directory."""
    accounting_paths: tuple[str, ...] = ()
    """Files or globs with sacct output to import each night, if sacct itself is not to be run."""
    gpu_paths: tuple[str, ...] = ()
    """Files, directories or globs with GPU metrics to import each night."""
    serving_paths: tuple[str, ...] = ()
    """Files, directories or globs with metrics of inference engines to import each night."""
    sacct_overlap: Span = "2d"
    """How far before the last run accounting is read again, for records that reached the database late."""
    keep_samples: _Retention = "400d"
    """Older samples of GPUs and inference engines are deleted."""
    keep_jobs: _Retention = "1100d"
    """Jobs that ended longer ago are deleted."""
    keep_reports: _Retention = "400d"
    """Reports of periods that ended longer ago are deleted."""
    keep_audit: _Retention = "1100d"
    """Older records of actions on squatters, zombies and orphans are deleted; the deletion is recorded as well."""
    anonymous: bool = False
    """Whether reports have pseudonyms instead of users, accounts and names of jobs."""
    anonymous_nodes: bool = False
    """Whether they also have pseudonyms instead of nodes."""
    pseudonym_key: AbsolutePath | None = None
    """File with the key of the pseudonyms, at least 16 bytes; ``None``: a key in the state directory, which is created
    when it is needed."""
    jobs: PublishedJobsConfig = PublishedJobsConfig()
    mail: UsageMailConfig = field(default_factory=UsageMailConfig)
    pages: PublishedPagesConfig = field(default_factory=PublishedPagesConfig)


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
    emissions: EmissionsConfig = EmissionsConfig()
    report: ReportConfig = ReportConfig()
    nightly: NightlyConfig = NightlyConfig()
    agent: AgentConfig = field(default_factory=AgentConfig)
    suspend: SuspendConfig = field(default_factory=SuspendConfig)
    inplace: InplaceConfig = field(default_factory=InplaceConfig)
    zombies: ZombiesConfig = field(default_factory=ZombiesConfig)
    dask: DaskConfig = DaskConfig()
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
    def job_summaries_dir(self) -> Path:
        """The service's own copy of the published job summaries."""
        return self.state_dir / "job-summaries"

    @property
    def ledger_dir(self) -> Path | None:
        """Directory of the ledger that agents write about suspensions; ``None``: no ledger."""
        if self.suspend.ledger is not None or self.suspend.shared_store is None:
            return self.suspend.ledger
        return self.suspend.shared_store.parent / "ledger"

    @property
    def history_dir(self) -> StorePlace:
        """The place of the GPU metrics."""
        store = self.store
        if store.history is None:
            return self.state_dir / "history"
        cache = store.history_cache or self.state_dir / "history-cache"
        return store_place(store.history, cache, int(store.history_cache_gib * 2**30))

    @property
    def serving_dir(self) -> StorePlace:
        """The place of the metrics of inference engines."""
        return self.history_dir / "serving"


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
    requested = path or (Path(environ[ENV_CONFIG]) if environ.get(ENV_CONFIG) else None)
    chosen = requested or DEFAULT_PATH
    config = Config()
    try:
        text = read_small(chosen).decode("utf-8")
    except FileNotFoundError:
        if requested is not None:
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
        raise InputError(f"is larger than {size(_LARGEST)}", where=str(path))
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


def parse(text: str, *, where: str) -> Config:
    """Build a ``Config`` from TOML text; ``where`` names its origin in errors. Raises ``TomlError`` with all errors."""
    file = TomlFile(text)
    config = file.section(Config, file.data)
    idle, inplace = config.idle, config.inplace
    if file.valid("idle") and not 0 <= idle.idle_pct <= idle.low_pct <= 100:
        file.fault(("idle",), "needs 0 <= idle_pct <= low_pct <= 100")
    if file.valid("inplace") and inplace.start_pct > inplace.awake_limit_pct:
        file.fault(("inplace", "start_free_pct"), f"{inplace.start_pct:g} is not from 0 to inplace.awake_limit_pct")
    file.check(where)
    return config
