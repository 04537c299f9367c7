"""Reader of the job table of ClusterCockpit's ``cc-backend`` (SQLite): jobs, their GPUs, and averages per job.

``footprint`` has ``acc_utilization_avg`` (percent, mean over the job's GPUs) and ``acc_mem_used_avg``. Both are means
over the job's nodes of a value per node (``internal/archiver``: the sum over nodes divided by the number of nodes); the
memory of a node is the sum over its GPUs. ``energy_footprint`` has ``acc_power`` in kWh, rounded to 0.01
(``UpdateEnergy``). ``resources`` has the PCI addresses of the GPUs.

Memory: the collector divides bytes by 1024 x 1024 and calls the unit MByte, while ``cluster.json`` may have GB. The
magnitude decides: no GPU has 300 GB, so larger values are MiB.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.metrics.averages import AVERAGES
from slurm_affinode.metrics.identity import node_name, pci_address

DATABASE_ENDINGS = (".sqlite", ".sqlite3", ".db")
LARGEST_GPU_GB = 300.0
"""More memory than any GPU has; a value above it cannot be in GB."""
NEEDED = ("job_id", "cluster", "start_time", "duration", "resources")
_MAGIC = b"SQLite format 3\x00"
_HINT = "give the job database of cc-backend, usually job.db, or the directory that has it"


@dataclass(frozen=True, slots=True)
class Cockpit:
    """The job table as frames."""

    jobs: list[dict[str, Any]]
    """One row per job, with columns of accounting's ``JOBS`` as keys; times are UTC."""
    averages: pl.DataFrame
    """``averages.AVERAGES``: one row per job and GPU."""
    zero_utilization_jobs: int
    """GPU jobs with an average utilization of exactly 0."""
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    """Skipped jobs and fields, one line each."""


@dataclass(frozen=True, slots=True)
class _Job:
    row: Mapping[str, Any]
    cluster: str
    start: datetime
    end: datetime
    running: bool
    gpus: tuple[tuple[str, str], ...]
    """(node, PCI address or name; a generated name if the table has none)"""
    nodes: tuple[str, ...]
    util_pct: float | None
    memory: float | None
    """Sum over the GPUs of one node, in the unit of the table."""
    energy_kwh: float | None
    """Energy of the GPUs; None if unknown or rounded to 0."""
    unnamed: int
    """GPUs without an address."""


def read(path: Path) -> Cockpit:
    """Read a job database, or the one in the directory ``path``, with GPU models of a ``cluster.json`` beside it.

    No file is written beside the database, and no lock is acquired. Raises ``InputError``.
    """
    database, configs = _locate(path)
    problems: list[str] = []
    jobs = [job for row in _rows(database) if (job := _job(row, problems)) is not None]
    models = _models(configs)
    scale_mib, unit_note = _memory_unit(jobs)
    with_gpus = [job for job in jobs if job.gpus]
    rows = [average for job in with_gpus for average in _averages(job, models, scale_mib)]
    notes = [unit_note] if unit_note else []
    notes += _counts(with_gpus)
    return Cockpit(
        jobs=[_accounting(job, models) for job in jobs],
        averages=pl.DataFrame(rows, schema=AVERAGES, orient="row", infer_schema_length=None),
        zero_utilization_jobs=sum(job.util_pct == 0 for job in with_gpus),
        notes=tuple(notes),
        problems=tuple(problems),
    )


def _locate(path: Path) -> tuple[Path, list[Path]]:
    """Return the database, and the JSON files beside it that may describe clusters."""
    try:
        if not path.exists():
            raise InputError("no such file or directory", where=str(path), hint=_HINT)
        database = path
        if path.is_dir():
            databases = sorted(p for p in path.iterdir() if p.suffix.lower() in DATABASE_ENDINGS and p.is_file())
            if len(databases) != 1:
                database_names = ", ".join(p.name for p in databases)
                what = "no database" if not databases else f"{len(databases)} databases ({database_names})"
                raise InputError(f"{what} in this directory", where=str(path), hint=_HINT)
            database = databases[0]
        with database.open("rb") as file:
            head = file.read(len(_MAGIC))
    except OSError as error:
        raise InputError(f"cannot read it: {error.strerror}", where=str(path)) from error
    if head != _MAGIC:
        raise InputError("not an SQLite database", where=str(database), hint=_HINT)
    return database, sorted(database.parent.glob("*cluster*.json"))


def _rows(database: Path) -> Iterator[dict[str, Any]]:
    try:
        with _unwritten(database) as path, closing(_opened(path)) as connection:
            connection.text_factory = lambda data: data.decode("utf-8", "replace")
            columns = [row[1] for row in connection.execute("PRAGMA table_info(job)")]
            missing = [name for name in NEEDED if name not in columns]
            if not columns or missing:
                what = f"its table job has no column {', '.join(missing)}" if columns else "it has no table job"
                raise InputError(f"not a job database of cc-backend: {what}", where=str(database), hint=_HINT)
            cursor = connection.execute(
                "SELECT * FROM job ORDER BY rowid"
            )  # all columns: older versions have other ones
            names = [column[0] for column in cursor.description]
            yield from (dict(zip(names, row, strict=True)) for row in cursor)
    except sqlite3.Error as error:
        raise InputError(f"damaged or not readable as SQLite ({error})", where=str(database)) from error
    except OSError as error:
        raise InputError(f"cannot be copied to be read: {error.strerror}", where=str(database)) from error


def _opened(database: Path) -> sqlite3.Connection:
    log = "" if _log(database) else "&immutable=1"
    return sqlite3.connect(f"file:{quote(str(database.resolve()))}?mode=ro{log}", uri=True)


def _log(database: Path) -> Path | None:
    """Return the write-ahead log beside ``database``; None if it is missing or empty."""
    path = database.with_name(f"{database.name}-wal")
    return path if path.is_file() and path.stat().st_size else None


@contextmanager
def _unwritten(database: Path) -> Iterator[Path]:
    """Yield ``database``, or a copy if it has a write-ahead log: to read the log, SQLite writes beside the database."""
    log = _log(database)
    if log is None:
        yield database
        return
    with tempfile.TemporaryDirectory(prefix="slurm-affinode-") as folder:
        copy = Path(folder) / database.name
        shutil.copyfile(database, copy)
        shutil.copyfile(log, copy.with_name(log.name))
        yield copy


def _job(row: Mapping[str, Any], problems: list[str]) -> _Job | None:
    who = f"job {row['job_id']}"
    try:
        start = datetime.fromtimestamp(int(row["start_time"]), UTC)
        length = timedelta(seconds=int(row["duration"] or 0))
        resources = _json(row["resources"], list)
        footprint = _json(row.get("footprint"), dict)
        energy = _json(row.get("energy_footprint"), dict)
        nodes = [node_name(str(part["hostname"])) or str(part["hostname"]) for part in resources]
        gpus = [
            (node, pci_address(str(gpu)) or str(gpu).strip())
            for node, part in zip(nodes, resources, strict=True)
            for gpu in part.get("accelerators") or ()
        ]
    except (TypeError, ValueError, KeyError, OverflowError, OSError) as error:
        problems.append(f"{who}: left out, {_reason(error)}")
        return None
    counted = row.get("num_acc")
    if not gpus and nodes and isinstance(counted, int):
        gpus = [(nodes[i % len(nodes)], "") for i in range(counted)]
    elif isinstance(counted, int) and counted != len(gpus):
        problems.append(f"{who}: has {counted} GPUs by count and {len(gpus)} by address; the addresses are used")
    named = [(node, gpu or f"unnamed-{row['job_id']}-{i}") for i, (node, gpu) in enumerate(gpus)]
    kwh = _amount(energy.get("acc_power"))
    return _Job(
        row=row, cluster=str(row["cluster"] or "default"),
        start=start, end=start + length, running=str(row.get("job_state")).lower() == "running",
        gpus=tuple(dict.fromkeys(named)), nodes=tuple(dict.fromkeys(nodes)),
        util_pct=_amount(footprint.get("acc_utilization_avg")), memory=_amount(footprint.get("acc_mem_used_avg")),
        energy_kwh=kwh or None,  # 0.00 is "below 0.005 kWh": no GPU draws 0 W
        unnamed=sum(not gpu for _, gpu in gpus),
    )  # fmt: skip


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def _json(value: object, kind: type) -> Any:
    """Decode a JSON column (text or bytes); an empty column gives an empty ``kind``."""
    if value is None or value in ("", b""):
        return kind()
    if not isinstance(value, str | bytes):
        raise TypeError(f"{value!r:.40} is not JSON text")
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"{value!r:.40} is not JSON text") from None
    if parsed is None:
        return kind()
    if not isinstance(parsed, kind):
        raise TypeError(f"{parsed!r:.40} is not JSON {'object' if kind is dict else 'list'}")
    return parsed


def _amount(value: object) -> float | None:
    """Return ``value`` if it is a finite number that is not negative; else None, which means unknown."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        return None
    return float(value)


def _memory_unit(jobs: Sequence[_Job]) -> tuple[float, str | None]:
    """Return the MiB per unit of the memory column, and a note about it."""
    per_gpu = [m for job in jobs if job.gpus and (m := _per_gpu(job)) is not None]
    if not per_gpu:
        return 1.0, None
    if max(per_gpu) > LARGEST_GPU_GB:
        return 1.0, (
            "acc_mem_used_avg is taken as MiB, summed over the GPUs of a node: in GB it would be more than a GPU has."
        )
    return 1e9 / (1 << 20), "acc_mem_used_avg is taken as GB, summed over the GPUs of a node."


def _per_gpu(job: _Job) -> float | None:
    return None if job.memory is None else job.memory * len(job.nodes) / len(job.gpus)


_ModelKey = tuple[str, str, str]
"""Cluster, subcluster and address of a GPU."""


def _averages(job: _Job, models: Mapping[_ModelKey, str], scale_mib: float) -> Iterator[dict[str, object]]:
    memory, seconds = _per_gpu(job), (job.end - job.start).total_seconds()
    power_w = job.energy_kwh * 3.6e6 / seconds / len(job.gpus) if job.energy_kwh and seconds > 0 else None
    for node, gpu in job.gpus:
        address = pci_address(gpu)
        yield {
            "job_id": job.row["job_id"], "start": job.start, "end": job.end,
            "cluster": job.cluster, "node": node,
            "pci": address, "uuid": None if address else gpu,
            "model": models.get((job.cluster, str(job.row.get("subcluster")), gpu)),
            "util_pct": job.util_pct,
            "fb_used_mib": None if memory is None else memory * scale_mib,
            "power_w": power_w,
        }  # fmt: skip


def _counts(jobs: Sequence[_Job]) -> list[str]:
    several = sum(len(job.gpus) > 1 for job in jobs)
    unmeasured = sum(job.util_pct is None for job in jobs)
    unnamed = sum(job.unnamed for job in jobs)
    rounded = sum(job.energy_kwh is None for job in jobs)
    notes = []
    if several:
        notes.append(f"Jobs with several GPUs: {several}; each GPU is given the mean over the job's GPUs.")
    if unnamed:
        notes.append(f"GPUs without an address in the table: {unnamed}; each counts as a separate device.")
    if unmeasured:
        notes.append(f"GPU jobs without an average utilization: {unmeasured}; all their time is unknown.")
    if rounded:
        notes.append(f"GPU jobs without GPU energy, or with one that is rounded to 0 kWh: {rounded}; it is unknown.")
    return notes


def _accounting(job: _Job, models: Mapping[_ModelKey, str]) -> dict[str, Any]:
    row = job.row
    types = {models[key] for _, gpu in job.gpus if (key := (job.cluster, str(row.get("subcluster")), gpu)) in models}
    submitted = row.get("submit_time")
    energy = _amount(row.get("energy"))
    return {
        "cluster": job.cluster, "job_id": row["job_id"],
        "submit": datetime.fromtimestamp(submitted, UTC) if isinstance(submitted, int) and submitted else job.start,
        "array_job_id": row.get("array_job_id") or None,
        "user": row.get("hpc_user") or row.get("user"), "account": row.get("project"),
        "partition": row.get("cluster_partition") or row.get("partition"),
        "state": str(row["job_state"]).upper() if row.get("job_state") else None,
        "start": job.start, "end": None if job.running else job.end,
        "elapsed_s": int((job.end - job.start).total_seconds()), "timelimit_s": row.get("walltime") or None,
        "nodes": len(job.nodes) or row.get("num_nodes"), "node_list": ",".join(job.nodes) or None,
        "cpus": row.get("num_hwthreads"), "gpus": len(job.gpus),
        "gpu_type": "+".join(sorted(name.split()[-1].lower() for name in types)) or None,
        "energy_j": energy * 3.6e6 if energy else None,
    }  # fmt: skip


def _models(configs: Sequence[Path]) -> dict[_ModelKey, str]:
    """Return the models of GPUs from every ``cluster.json`` that can be read; a GPU with several is left out."""
    names_by_key: dict[_ModelKey, set[str]] = {}
    for config in configs:
        try:
            clusters = json.loads(config.read_bytes())
            for part in clusters["subClusters"]:
                for gpu in part["topology"].get("accelerators") or ():
                    maker = gpu.get("type", "").replace(" GPU", "").replace("Nvidia", "NVIDIA")
                    name = f"{maker} {gpu['model']}".strip()
                    key = clusters["name"], part["name"], pci_address(gpu["id"]) or gpu["id"]
                    names_by_key.setdefault(key, set()).add(name)
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            continue  # a description of the hardware is optional
    return {key: next(iter(names)) for key, names in names_by_key.items() if len(names) == 1}
