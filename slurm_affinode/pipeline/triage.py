"""Triage of crashes: reads the logs and the accounting of a job and finds what ran out."""

from __future__ import annotations

import io
import os
import pwd
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from slurm_affinode.analysis.serving import crash_log
from slurm_affinode.analysis.serving.crash_log import LogFindings
from slurm_affinode.analysis.serving.triage import CrashTriage, JobOutcome, LastMetrics, triage
from slurm_affinode.base.errors import InputError, UnreachableError
from slurm_affinode.base.input_files import DAMAGED, MAGIC_BYTES, compression, unpacked, utf8_stream
from slurm_affinode.checkpoint.user_files import User, as_user
from slurm_affinode.slurm import commands, identifiers
from slurm_affinode.slurm.accounting import sacct
from slurm_affinode.slurm.commands import Runner

_BLOCK = 1 << 22
_FAILED = ("FAILED", "OUT_OF_MEMORY", "TIMEOUT", "CANCELLED", "NODE_FAIL")


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
    metrics: Callable[[JobOutcome], Sequence[LastMetrics]] = lambda _: (),
    advance: Callable[[int], object] = lambda _: None,
) -> JobTriage:
    """Return the triage of logs and of at most one job. ``advance`` gets the number of bytes examined.

    A job's output files are found through accounting and read with the rights of its owner. Raises ``InputError`` for
    a log that cannot be read, for an unknown job and for several jobs, and ``UnreachableError`` if accounting does not
    respond and there is nothing else to read.
    """
    jobs = [one for one in targets if is_job(one)]
    if len(jobs) > 1:
        raise InputError("several jobs", where=" ".join(jobs), hint="give one job; any number of its logs")
    logs = [one for one in targets if one not in jobs]
    problems: list[str] = []
    outcome: JobOutcome | None = None
    owner: User | None = None
    found: list[str] = []
    if jobs:
        try:
            outcome, owner, found = _accounting(jobs[0], run)
        except UnreachableError as error:
            if not logs:
                raise
            problems.append(str(error))
    findings = scan_logs(logs, advance=advance)
    for path in found:
        try:
            findings.append(_scan(path, path, owner=owner, advance=advance))
        except InputError as error:
            problems.append(str(error))
    if outcome is not None and not findings and not problems:
        problems.append(
            "accounting does not know the job's output files (Slurm before 24.05, or no batch job): "
            "name the logs after the job"
        )
    return JobTriage(triage(findings, outcome, () if outcome is None else metrics(outcome)), tuple(problems))


def scan_logs(paths: Sequence[str], *, advance: Callable[[int], object] = lambda _: None) -> list[LogFindings]:
    """Return the findings of each log. Raises ``InputError`` if one cannot be read."""
    return [_scan(path, path, owner=None, advance=advance) for path in paths]


def _accounting(job: str, run: Runner) -> tuple[JobOutcome, User | None, list[str]]:
    read = sacct.read(commands.run_sacct_of(job, run=run), where=f"sacct --jobs={job}")
    rows = read.jobs.sort("submit").to_dicts()
    if not rows:
        raise InputError("accounting has no such job", where=job, hint=f"see: sacct --jobs={job} --duplicates")
    row = rows[-1]
    steps = read.steps.to_dicts()
    outcome = JobOutcome(
        job_id=row["job_id"], state=row["state"], exit_code=row["exit_code"], exit_signal=row["exit_signal"],
        start=row["start"], end=row["end"], max_rss_bytes=row["max_rss_bytes"],
        memory_bytes=row["alloc_mem_bytes"] or row["req_mem_bytes"], nodes=row["nodes"],
        steps=tuple(
            (step["step_id"], step["state"])
            for step in steps
            if step["submit"] == row["submit"] and step["state"] in _FAILED
        ),
    )  # fmt: skip
    paths = list(commands.output_files(job, run=run))
    if not paths and row["work_dir"] and row["array_task_id"] is None:
        # Slurm's default name, where accounting does not record the name of the file.
        path = f"{row['work_dir']}/slurm-{row['job_id']}.out"
        paths = [path] if Path(path).exists() else []
    return outcome, _user(row["uid"]), paths


def _user(uid: int | None) -> User | None:
    if uid is None:
        return None
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return User(uid, uid, ())
    return User(uid, entry.pw_gid, tuple(os.getgrouplist(entry.pw_name, entry.pw_gid)))


def _scan(path: str, name: str, *, owner: User | None, advance: Callable[[int], object]) -> LogFindings:
    """Scan a log. ``owner``: the user who chose the path, so that root follows it with that user's rights only."""
    try:
        if path == "-":
            return crash_log.scan(_blocks(cast("BinaryIO", io.FileIO(0, closefd=False)), advance), "-")
        with as_user(owner, lambda: _open(path)) if owner is not None else _open(path) as file:
            return crash_log.scan(_blocks(file, advance), name)
    except DAMAGED as error:
        raise InputError(f"the compressed file is damaged or cut: {error}", where=name) from error
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=name) from error


def _open(path: str) -> BinaryIO:
    # A FIFO in place of the log must not block.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return cast("BinaryIO", io.FileIO(fd))
    os.close(fd)
    raise InputError("is not a regular file", where=path)


def _blocks(file: BinaryIO, advance: Callable[[int], object]) -> Iterator[bytes]:
    with io.BufferedReader(cast("io.RawIOBase", file), _BLOCK) as stored:
        kind = compression(stored.peek(MAGIC_BYTES)[:MAGIC_BYTES])
        plain = stored
        if kind is not None:
            plain = io.BufferedReader(cast("io.RawIOBase", unpacked(cast("BinaryIO", stored), kind)), _BLOCK)
        with utf8_stream(plain) as text:
            while block := text.read(_BLOCK):
                advance(len(block))
                yield block
