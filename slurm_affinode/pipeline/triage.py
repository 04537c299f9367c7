"""Triage of crashes: reads the logs, the accounting and the last metrics of a job and finds what ran out."""

from __future__ import annotations

import contextlib
import io
import os
import pwd
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

import polars as pl

from slurm_affinode.base.config import UNNAMED_CLUSTER, Config
from slurm_affinode.base.errors import AffinodeError, InputError, UnreachableError
from slurm_affinode.base.input_files import DAMAGED, MAGIC_BYTES, compression, unpacked, utf8_stream
from slurm_affinode.checkpoint.user_files import User, as_user
from slurm_affinode.engines.crashes import crash_log
from slurm_affinode.engines.crashes.crash_log import LogFindings
from slurm_affinode.engines.crashes.triage import CrashTriage, JobOutcome, LastMetrics, triage
from slurm_affinode.engines.schema import IDENTITY
from slurm_affinode.engines.store import engine_store
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.slurm import identifiers
from slurm_affinode.slurm.accounting import sacct, sacct_command
from slurm_affinode.slurm.interface import Runner
from slurm_affinode.slurm.times import site_zone

T = TypeVar("T")
_BLOCK = 1 << 22
_FAILED = ("FAILED", "OUT_OF_MEMORY", "TIMEOUT", "CANCELLED", "NODE_FAIL")
_LAST = timedelta(hours=1)
"""How long before the failure a sample still tells of it."""
_ENGINE_COLUMNS = ("kv_usage", "running", "waiting", "asleep")
_GPU_COLUMNS = ("fb_used_mib", "fb_total_mib", "util_pct", "power_w")
Metrics = Callable[[JobOutcome, datetime | None], Sequence[LastMetrics]]
"""Return the last metrics of a job before the time of its failure, naive as the log tells it."""


@dataclass(frozen=True, slots=True)
class JobTriage:
    """A triage, and what could not be read for it."""

    result: CrashTriage
    problems: tuple[str, ...]


def is_job(target: str) -> bool:
    """Return whether ``target`` is a job ID and not the name of a log: ``123``, ``123_4``, ``123+1``."""
    try:
        return identifiers.parse(target).step is None
    except ValueError:
        return False


def examine(
    targets: Sequence[str],
    *,
    run: Runner,
    metrics: Metrics = lambda job, failed: (),
    advance: Callable[[int], object] = lambda _: None,
) -> JobTriage:
    """Return the triage of logs and of at most one job. ``advance`` gets the number of bytes examined.

    A job's output files are found through accounting and read with the rights of its owner. Without a job, ``metrics``
    gets the only one that the logs name. Raises ``InputError`` for
    a log that cannot be read, for an unknown job and for several jobs, and ``UnreachableError`` if accounting does not
    respond and there is nothing else to read.
    """
    jobs = [target for target in targets if is_job(target)]
    if len(jobs) > 1:
        raise InputError("several jobs", where=" ".join(jobs), hint="give one job; any number of its logs")
    logs = [target for target in targets if target not in jobs]
    problems: list[str] = []
    outcome: JobOutcome | None = None
    owner: User | None = None
    paths: list[str] = []
    if jobs:
        try:
            outcome, owner, paths = _accounting(jobs[0], run)
            if outcome is None:
                problems.append(f"{jobs[0]} is several jobs in accounting: name one of them to use its outcome")
            if paths and owner is None and os.geteuid() == 0:
                paths = []
                problems.append(
                    "accounting does not know the job's owner, with whose rights its output is read: "
                    "name the logs after the job"
                )
        except UnreachableError as error:
            if not logs:
                raise
            problems.append(str(error))
    findings = scan_logs(logs, advance=advance)
    for path in paths:
        try:
            findings.append(_scan(path, path, owner=owner, advance=advance))
        except InputError as error:
            problems.append(str(error))
    if outcome is not None and not findings and not problems:
        problems.append(
            "accounting does not know the job's output files (Slurm before 24.05, or no batch job): "
            "name the logs after the job"
        )
    result = triage(findings, outcome)
    known_outcome = outcome or _named(result)
    if known_outcome is not None:
        try:
            failed = None if result.cause is None else result.cause.time
            result = replace(result, metrics=tuple(metrics(known_outcome, failed)))
        except AffinodeError as error:
            problems.append(str(error))
    return JobTriage(result, tuple(problems))


def _named(result: CrashTriage) -> JobOutcome | None:
    """Return the only job that the failures name."""
    jobs = {failure.job for failure in result.failures if failure.job is not None}
    return JobOutcome(jobs.pop(), None) if len(jobs) == 1 else None


def last_metrics(config: Config, job: JobOutcome, failed: datetime | None) -> list[LastMetrics]:
    """Return the last stored samples of the job's engines and GPUs in the hour before it failed, engines first.

    ``failed`` is in the time zone of the site; if it is unknown, or not a time of the job, the job's end or the present
    counts. Raises ``AffinodeError`` if the samples cannot be read.
    """
    until = job.end or datetime.now(UTC)
    if failed is not None:
        aware = failed if failed.tzinfo is not None else failed.replace(tzinfo=site_zone(config.cluster.timezone))
        if (job.start is None or job.start <= aware) and aware <= until:
            until = aware.astimezone(UTC)
    # Slurm and most logs round times down to seconds.
    until += timedelta(seconds=1)
    since = until - _LAST if job.start is None else max(job.start, until - _LAST)
    of_cluster = pl.lit(value=True)
    if job.cluster is not None:
        of_cluster = pl.col("cluster").is_in([job.cluster, UNNAMED_CLUSTER])
    label = f",{job.job_id},"
    of_job = of_cluster & pl.concat_str(pl.lit(","), pl.col("job"), pl.lit(",")).str.contains(label, literal=True)
    with contextlib.closing(engine_store(config.serving_dir)) as engines:
        names = (*IDENTITY, "time", "error", "gpus", *_ENGINE_COLUMNS)
        scrapes = engines.scan(since, until).filter(of_job).select(names).collect()
    uuids = scrapes["gpus"].drop_nulls().unique().str.split(",").explode().unique()
    with contextlib.closing(SampleStore(config.history_dir)) as history:
        relevant = of_job | pl.col("uuid").is_in(uuids.implode())
        names = ("cluster", "node", "uuid", "pci", "index", "mig", "time", *_GPU_COLUMNS)
        gpus = history.scan(since, until).filter(relevant).select(names).collect()
    return [*_last_of_engines(scrapes), *_last_of_gpus(gpus)]


def _last_of_engines(scrapes: pl.DataFrame) -> Iterator[LastMetrics]:
    scrapes = scrapes.sort(*IDENTITY, "time", nulls_last=False)
    for engine_scrapes in scrapes.partition_by(list(IDENTITY), maintain_order=True):
        good = engine_scrapes.filter(pl.col("error").is_null())
        last = (good if len(good) else engine_scrapes).row(-1, named=True)
        failed = len(engine_scrapes.filter(pl.col("error").is_not_null() & (pl.col("time") >= last["time"])))
        figures = [(name, None if last[name] is None else float(last[name])) for name in _ENGINE_COLUMNS]
        rank = "" if last["rank"] is None else f" rank {last['rank']}"
        yield LastMetrics(
            last["time"], f"{last['engine']} at {last['address']}{rank}", (*figures, ("failed_scrapes", float(failed)))
        )


def _last_of_gpus(samples: pl.DataFrame) -> Iterator[LastMetrics]:
    identity = ["cluster", "node", "uuid", "pci", "index", "mig"]
    last = samples.sort("time").group_by(identity, maintain_order=True).last()
    for row in last.sort("node", "index", "uuid", "mig", nulls_last=True).iter_rows(named=True):
        device = row["uuid"] or row["pci"] or f"GPU {row['index']} of {row['node']}"
        mig = "" if row["mig"] is None else f" MIG {row['mig']}"
        figures = tuple((name, None if row[name] is None else float(row[name])) for name in _GPU_COLUMNS)
        yield LastMetrics(row["time"], device + mig, figures)


def scan_logs(paths: Sequence[str], *, advance: Callable[[int], object] = lambda _: None) -> list[LogFindings]:
    """Return the findings of each log. Raises ``InputError`` if one cannot be read."""
    return [_scan(path, path, owner=None, advance=advance) for path in paths]


def _accounting(job: str, run: Runner) -> tuple[JobOutcome | None, User | None, list[str]]:
    """Return the outcome of the last run of a job, its owner and its output files.

    The outcome of an array or a heterogeneous job is unknown: that of one of its jobs is not that of the others.
    """
    read = sacct.read(sacct_command.run_sacct_of(job, run=run), where=f"sacct --jobs={job}")
    rows = read.jobs.sort("submit").to_dicts()
    if not rows:
        raise InputError("accounting has no such job", where=job, hint=f"see: sacct --jobs={job} --duplicates")
    row = rows[-1]
    owner = _user(row["uid"]) if len({attempt["uid"] for attempt in rows}) == 1 else None
    if len({attempt["job_id"] for attempt in rows}) > 1:
        return None, owner, list(sacct_command.output_files(job, run=run))
    steps = read.steps.to_dicts()
    outcome = JobOutcome(
        job_id=row["job_id"], state=row["state"], exit_code=row["exit_code"], exit_signal=row["exit_signal"],
        start=row["start"], end=row["end"], max_rss_bytes=row["max_rss_bytes"],
        memory_bytes=row["alloc_mem_bytes"] or row["req_mem_bytes"], nodes=row["nodes"], cluster=row["cluster"],
        steps=tuple(
            (step["step_id"], step["state"])
            for step in steps
            if step["submit"] == row["submit"] and step["state"] in _FAILED
        ),
    )  # fmt: skip
    paths = list(sacct_command.output_files(job, run=run))
    if not paths and row["work_dir"] and row["array_task_id"] is None:
        # Slurm's default name, where accounting does not record the name of the file.
        path = f"{row['work_dir']}/slurm-{row['job_id']}.out"
        paths = [path] if _exists(path, owner) else []
    return outcome, owner, paths


def _exists(path: str, owner: User | None) -> bool:
    try:
        return _as_owner(owner, Path(path).exists)
    except OSError:
        return False


def _user(uid: int | None) -> User | None:
    if uid is None:
        return None
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return User(uid, uid, ())
    return User(uid, entry.pw_gid, tuple(os.getgrouplist(entry.pw_name, entry.pw_gid)))


def _scan(path: str, name: str, *, owner: User | None, advance: Callable[[int], object]) -> LogFindings:
    """Scan a log. ``owner``: the user who chose the path; ``None`` if the caller did."""
    try:
        if path == "-":
            return crash_log.scan(_blocks(cast("BinaryIO", io.FileIO(0, closefd=False)), "-", advance), "-")
        with _as_owner(owner, lambda: _open(path)) as file:
            return crash_log.scan(_blocks(file, name, advance), name)
    except DAMAGED as error:
        raise InputError(f"the compressed file is damaged or cut: {error}", where=name) from error
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=name) from error


def _as_owner(owner: User | None, call: Callable[[], T]) -> T:
    """Follow a path with the rights of the user who chose it. Root's own jobs have paths that root chose."""
    return call() if owner is None or owner.uid == 0 else as_user(owner, call)


def _open(path: str) -> BinaryIO:
    # A FIFO in place of the log must not block.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return cast("BinaryIO", io.FileIO(fd))
    os.close(fd)
    raise InputError("is not a regular file", where=path)


def _blocks(file: BinaryIO, name: str, advance: Callable[[int], object]) -> Iterator[bytes]:
    with io.BufferedReader(cast("io.RawIOBase", file), _BLOCK) as stored:
        kind = compression(stored.peek(MAGIC_BYTES)[:MAGIC_BYTES])
        plain = stored
        if kind is not None:
            inside = unpacked(cast("BinaryIO", stored), kind, where=name)
            plain = io.BufferedReader(cast("io.RawIOBase", inside), _BLOCK)
        with utf8_stream(plain) as text:
            while block := text.read(_BLOCK):
                advance(len(block))
                yield block
