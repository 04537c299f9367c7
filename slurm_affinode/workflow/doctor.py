"""Is this machine set up right? Each check looks and tells; none changes anything."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

from slurm_affinode import zones
from slurm_affinode.analysis import prices
from slurm_affinode.checkpoint import yama
from slurm_affinode.config import Config
from slurm_affinode.errors import AffinodeError, UnreachableError
from slurm_affinode.history import aliases
from slurm_affinode.history.store import SampleStore
from slurm_affinode.process import run as run_program
from slurm_affinode.slurm import commands
from slurm_affinode.slurm.commands import Runner
from slurm_affinode.slurm.pyslurm_client import Worker, start_worker
from slurm_affinode.slurm.times import site_zone, zone_name
from slurm_affinode.store.repository import Repository
from slurm_affinode.workflow import doctor_slurm, gpu_intake, prometheus_intake
from slurm_affinode.workflow.check import OK, PROBLEM, SKIPPED, UNREACHABLE, Check

STALE = timedelta(days=2)
"""Data older than this says that it does not arrive any more."""

_TIMEOUT_S = 30.0
_TRES = re.compile(r"^AccountingStorageTRES\s*=\s*(.*?)\s*$", re.MULTILINE)


def exit_code(checks: Iterable[Check]) -> int:
    """0 all right, 1 a problem was found, 3 something does not answer."""
    statuses = {check.status for check in checks}
    if UNREACHABLE in statuses:
        return 3
    return 1 if PROBLEM in statuses else 0


def examine(
    config: Config,
    *,
    now: datetime,
    run: Runner = run_program,
    start: Callable[[], Worker] = start_worker,
    etc: Path = Path("/etc"),
) -> list[Check]:
    """All checks, in the order in which things are needed.

    ``start`` starts the process in which pyslurm runs; ``etc`` has the files of the services.
    """
    checks: list[Check] = []
    checks += _guarded("configuration", lambda: [_configuration(config)])
    checks += _guarded("time zone", lambda: [_zone(config)])
    checks += _guarded("state directory", lambda: [_directory("state directory", config.state_dir)])
    checks += _guarded("store", lambda: _store(config, now))
    checks += _guarded("GPU history", lambda: [_history(config, now)])
    if config.prometheus.url is not None:
        checks += _guarded("Prometheus", lambda: [_prometheus(config, now)])
    checks += _guarded("Slurm", lambda: doctor_slurm.look(config.slurm.backend, run, start))
    checks += _guarded("services", lambda: [doctor_slurm.services(config.slurm.bin_dir, etc)])
    if config.nightly.accounting_paths:
        checks.append(Check("sacct", SKIPPED, "accounting comes from files (nightly.accounting_paths)"))
    else:
        checks += _guarded("sacct", lambda: [_sacct(run)])
        checks += _guarded("GPU accounting", lambda: [_tracking(run)])
    checks += _guarded("reports", lambda: [_directory("reports", config.reports_dir)])
    if config.suspend.shared_store is not None:
        checks.append(tracing())
    return checks


def tracing(sysctl: Path = yama.SYSCTL) -> Check:
    """Whether processes of a user may trace those that are being restored."""
    scope = yama.scope(sysctl)
    statuses = {yama.Verdict.SOUND: OK, yama.Verdict.ADVISED: SKIPPED, yama.Verdict.REFUSED: PROBLEM}
    return Check("process tracing", statuses[yama.judge(scope)], yama.describe(scope), yama.hint(scope))


def _guarded(name: str, look: Callable[[], list[Check]]) -> list[Check]:
    try:
        return look()
    except UnreachableError as error:
        return [Check(name, UNREACHABLE, str(error), error.hint)]
    except AffinodeError as error:
        return [Check(name, PROBLEM, str(error), error.hint)]


def _configuration(config: Config) -> Check:
    aliases.load(config.gpu_history.aliases, config.gpu_history.columns)
    prices.load(config.price.table, currency=config.price.currency)
    return Check("configuration", OK, str(config.source) if config.source else "no file: the defaults")


def _zone(config: Config) -> Check:
    name = zone_name(config.cluster.timezone)
    return Check("time zone", OK, name if config.cluster.timezone else f"{name} (of this machine)")


def _directory(name: str, path: Path) -> Check:
    existing = next((one for one in (path, *path.parents) if one.exists()), Path("/"))
    if not existing.is_dir():
        return Check(name, PROBLEM, f"{existing}: is not a directory")
    try:
        with _probe(existing):
            pass
    except OSError as error:
        return Check(name, PROBLEM, f"{existing}: cannot be written: {error.strerror}", "run as the user who owns it")
    return Check(name, OK, str(path) if existing == path else f"{path} (does not exist yet; it can be made)")


@contextlib.contextmanager
def _probe(directory: Path) -> Iterator[None]:
    # Really write: for root, and on a read-only file system, the permission bits do not tell.
    descriptor, name = tempfile.mkstemp(dir=directory, prefix=".slurm-affinode-probe-")
    try:
        yield
    finally:
        os.close(descriptor)
        Path(name).unlink()


def _store(config: Config, now: datetime) -> list[Check]:
    with Repository.open(config.db_url, upgrade=False, create=False) as store:
        schema = store.schema()
        if schema.pending:
            names = ", ".join(migration.name for migration in schema.pending)
            detail = f"{store.where}: migrations are pending: {names}"
            return [Check("store", PROBLEM, detail, "slurm-affinode db upgrade")]
        counts = store.counts()
        found = Check("store", OK, f"{store.where}: schema {schema.version}, {counts.jobs:,} job runs")
    if counts.last is None:
        return [
            found,
            Check("accounting", PROBLEM, "no job run was taken in", "slurm-affinode ingest sacct --since 7d"),
        ]
    said = (
        f"{counts.gpu_jobs:,} of {counts.jobs:,} runs have GPUs; the last start or end {_ago(counts.last, now, config)}"
    )
    if counts.gpu_jobs == 0:
        hint = "does Slurm count GPUs? AccountingStorageTRES=gres/gpu"
        return [found, Check("accounting", PROBLEM, said, hint)]
    if now - counts.last > STALE:
        return [found, Check("accounting", PROBLEM, said, "slurm-affinode ingest sacct, or does nightly run?")]
    return [found, Check("accounting", OK, said)]


def _history(config: Config, now: datetime) -> Check:
    with contextlib.closing(SampleStore(config.history_dir)) as history:
        span, days = history.span(), len(history.days())
    if span is None:
        return Check("GPU history", PROBLEM, f"{config.history_dir}: empty", "slurm-affinode ingest gpu PATH...")
    said = (
        f"{config.history_dir}: {days:,} day{'' if days == 1 else 's'}, the newest sample {_ago(span[1], now, config)}"
    )
    if now - span[1] > STALE:
        return Check("GPU history", PROBLEM, said, "slurm-affinode ingest gpu PATH..., or set nightly.gpu_paths")
    return Check("GPU history", OK, said)


def _prometheus(config: Config, now: datetime) -> Check:
    present = prometheus_intake.look(config.prometheus, gpu_intake.read_options(config), now)
    if not present.names:
        hint = "does it scrape dcgm-exporter (or slurm-affinode exporter) on the nodes, and does prometheus.match fit?"
        return Check("Prometheus", PROBLEM, f"{present.url}: answers, and has no GPU metric that is known", hint)
    shown = ", ".join(present.names[-3:])
    return Check("Prometheus", OK, f"{present.url}: answers, {len(present.names)} metrics of use ({shown}, ...)")


def _sacct(run: Runner) -> Check:
    fields = commands.sacct_fields(run)
    # Asks the database for nothing that costs it: one cluster's jobs of one second.
    done = run(["sacct", "-n", "-X", "-S", "now", "-E", "now", "-o", "JobID"], timeout_s=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = lines[-1].removeprefix("sacct: ").removeprefix("error: ") if lines else "it said nothing"
        return Check("sacct", UNREACHABLE, f"does not answer: {said}", "is slurmdbd running? sacctmgr show cluster")
    return Check("sacct", OK, f"answers, {len(fields)} fields of use")


def _tracking(run: Runner) -> Check:
    try:
        done = run(["scontrol", "show", "config"], timeout_s=_TIMEOUT_S)
    except UnreachableError as error:
        return Check("GPU accounting", SKIPPED, f"AccountingStorageTRES could not be read: {error}")
    match = _TRES.search(done.stdout.decode("utf-8", "replace"))
    tracked = [word for word in (match[1] if match else "").split(",") if word]
    if any(word.lower() == "gres/gpu" for word in tracked):
        return Check("GPU accounting", OK, f"AccountingStorageTRES={','.join(tracked)}")
    typed = [word for word in tracked if word.lower().startswith("gres/gpu:")]
    wanted = ",".join(["gres/gpu", *typed])
    return Check(
        "GPU accounting",
        PROBLEM,
        f"AccountingStorageTRES={','.join(tracked) or '(nothing)'}: "
        "there are no GPU counts in accounting without gres/gpu",
        f"set AccountingStorageTRES={wanted} in slurm.conf (needs slurmdbd) and restart slurmctld; "
        "jobs of before have no GPU count",
    )


def _ago(moment: datetime, now: datetime, config: Config) -> str:
    seconds = (now - moment).total_seconds()
    stamp = zones.shown(moment, site_zone(config.cluster.timezone))
    if seconds < 0:
        return f"at {stamp} (in the future)"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"at {stamp} ({seconds / size:.0f} {unit} ago)"
    return f"at {stamp} (just now)"
