"""Checks of ``doctor`` for the report machine: directories, database, GPU metrics, Prometheus. Read-only."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

from slurm_affinode.base import times
from slurm_affinode.base.config import MODEL_FILE, Config
from slurm_affinode.base.text import counted, percent
from slurm_affinode.db import migrations
from slurm_affinode.db.repository import Repository
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.pipeline import ingest
from slurm_affinode.pipeline.checks import OK, PROBLEM, SKIPPED, Check, guarded
from slurm_affinode.slurm.times import site_zone

DRIFT_HISTORY = timedelta(days=90)
"""Jobs of this time are used to examine a model of predictions."""
MOST_DRIFT = 0.1
"""Share of the jobs by which an interval may miss its intended coverage."""
STALE = timedelta(days=2)
"""If the newest data is older than this, it is assumed that none arrives anymore."""


def examine(config: Config, now: datetime) -> list[Check]:
    """Run all checks but that of the directory of the reports, in order of dependency."""
    checks = guarded("state directory", lambda: [directory("state directory", config.state_dir)])
    checks += guarded("store", lambda: _store(config, now))
    checks += guarded("GPU history", lambda: [_history(config, now)])
    if (config.state_dir / MODEL_FILE).exists():
        checks += guarded("prediction", lambda: [_prediction(config, now)])
    if config.prometheus.url is not None:
        checks += guarded("Prometheus", lambda: [_prometheus(config, now)])
    return checks


def directory(name: str, path: Path) -> Check:
    """Check that the directory can be written, or that it can be created."""
    existing = next((place for place in (path, *path.parents) if place.exists()), Path("/"))
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
    # Permission bits are not enough for root or on a read-only file system: write a file.
    descriptor, name = tempfile.mkstemp(dir=directory, prefix=".slurm-affinode-probe-")
    try:
        yield
    finally:
        os.close(descriptor)
        Path(name).unlink()


def _store(config: Config, now: datetime) -> list[Check]:
    with Repository.open(config.db_url, upgrade=False, create=False) as store:
        schema = migrations.status(store.engine)
        if schema.pending:
            names = ", ".join(migration.name for migration in schema.pending)
            detail = f"{store.where}: migrations are pending: {names}"
            return [Check("store", PROBLEM, detail, "slurm-affinode db upgrade")]
        counts = store.counts()
        schema_check = Check("store", OK, f"{store.where}: schema {schema.version}, {counts.jobs:,} job runs")
    if counts.last is None:
        return [
            schema_check,
            Check("accounting", PROBLEM, "no job run was ingested", "slurm-affinode ingest sacct --since 7d"),
        ]
    text = (
        f"{counts.gpu_jobs:,} of {counts.jobs:,} runs have GPUs; the last start or end {_ago(counts.last, now, config)}"
    )
    if counts.gpu_jobs == 0:
        hint = "does Slurm count GPUs? AccountingStorageTRES=gres/gpu"
        return [schema_check, Check("accounting", PROBLEM, text, hint)]
    if now - counts.last > STALE:
        return [schema_check, Check("accounting", PROBLEM, text, "slurm-affinode ingest sacct, or does nightly run?")]
    return [schema_check, Check("accounting", OK, text)]


def _history(config: Config, now: datetime) -> Check:
    with contextlib.closing(SampleStore(config.history_dir)) as history:
        span, days = history.span(), len(history.days())
    if span is None:
        return Check("GPU history", PROBLEM, f"{config.history_dir}: empty", "slurm-affinode ingest gpu PATH...")
    text = f"{config.history_dir}: {counted(days, 'day')}, the newest sample {_ago(span[1], now, config)}"
    if now - span[1] > STALE:
        return Check("GPU history", PROBLEM, text, "slurm-affinode ingest gpu PATH..., or set nightly.gpu_paths")
    return Check("GPU history", OK, text)


def _prediction(config: Config, now: datetime) -> Check:
    """Check that the intervals of the model still contain the jobs that ended since it was trained."""
    from slurm_affinode.pipeline import prediction  # noqa: PLC0415 - only for sites with a model
    from slurm_affinode.prediction import intervals, model_file  # noqa: PLC0415

    model = model_file.read(config.state_dir / MODEL_FILE)
    idle = any(target.target == "idle_pct" for target in model.targets)
    source = prediction.read_site(config, now - DRIFT_HISTORY, now, idle=idle)
    trained = f"trained {model.created} with {model.source}"
    if source.name != model.source:
        detail = f"{trained}, and not with the jobs of {source.name}: its drift is unknown"
        return Check("prediction", SKIPPED, detail, "slurm-affinode predict train")
    drifts = prediction.drift(source, model)
    if not drifts:
        return Check("prediction", OK, f"{trained}; fewer than {intervals.LEAST_JOBS} jobs have ended since")
    shown = ", ".join(f"{drift.target} {percent(drift.coverage)} of {drift.jobs:,}" for drift in drifts)
    detail = f"{trained}; jobs since then within the intervals for {percent(intervals.COVERAGE)} of them: {shown}"
    if min(drift.coverage for drift in drifts) < intervals.COVERAGE - MOST_DRIFT:
        return Check("prediction", PROBLEM, f"the model has drifted: {detail}", "slurm-affinode predict train")
    return Check("prediction", OK, detail)


def _prometheus(config: Config, now: datetime) -> Check:
    present = ingest.probe(config.prometheus, ingest.read_options(config), now)
    if not present.names:
        hint = "does it scrape dcgm-exporter (or slurm-affinode exporter) on the nodes, and does prometheus.match fit?"
        return Check("Prometheus", PROBLEM, f"{present.url}: responds, and has no known GPU metric", hint)
    shown = ", ".join(present.names[-3:])
    return Check("Prometheus", OK, f"{present.url}: answers, {len(present.names)} metrics of use ({shown}, ...)")


def _ago(moment: datetime, now: datetime, config: Config) -> str:
    seconds = (now - moment).total_seconds()
    stamp = times.shown(moment, site_zone(config.cluster.timezone))
    if seconds < 0:
        return f"at {stamp} (in the future)"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"at {stamp} ({seconds / size:.0f} {unit} ago)"
    return f"at {stamp} (just now)"
