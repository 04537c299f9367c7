"""Invocation of ``sacct`` with a given runner. The output is bytes for the parsers of this package.

Also of ``sacctmgr``, for changes of ended jobs, which slurmctld refuses.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from slurm_affinode.base import process
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.process import Completed
from slurm_affinode.slurm import identifiers
from slurm_affinode.slurm.accounting.sacct_header import READ_COLUMNS
from slurm_affinode.slurm.interface import Runner, complaint

DELIMITER = "\x1f"
"""The ASCII unit separator, which cannot be typed into a name on a keyboard."""

WINDOW = timedelta(days=1)
"""The longest interval of a query. slurmdbd holds the whole answer in memory, and sites limit the interval
(``MaxQueryTimeRange`` of slurmdbd.conf)."""
_LONGEST_PAUSE_S = 60.0

_TIMEOUT_S = 3600.0
_HELP_TIMEOUT_S = 60.0
_NODE_TIMEOUT_S = 10.0
"""For queries by the agent: jobs are stopped meanwhile, or another job waits for its line."""

_SETTINGS = ("SACCT_FORMAT", "SACCT_FEDERATION", "SACCT_LOCAL", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS")
"""Environment variables that would change the output."""


def sacct_fields(run: Runner = process.run, *, env: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the fields of ``sacct_header.WANTED`` that this sacct has, in that order. Raises ``UnreachableError``."""
    completion = _sacct(run, ["--helpformat"], _HELP_TIMEOUT_S, env)
    supported = {word.lower() for word in completion.stdout.decode("utf-8", "replace").split()}
    columns = tuple(name for name in READ_COLUMNS if name.lower() in supported)
    if not {"jobid", "jobidraw"} & {name.lower() for name in columns}:
        raise UnreachableError("sacct --helpformat lists no JobID: this is not Slurm's sacct")
    return columns


def run_sacct(
    since: datetime,
    until: datetime,
    *,
    clusters: Sequence[str] = (),
    all_clusters: bool = False,
    run: Runner = process.run,
    env: Mapping[str, str] | None = None,
) -> bytes:
    """Return the accounting of all jobs that were in the system in ``[since, until)``, as text for ``sacct.read``.

    All users, all states, and every attempt of requeued jobs; times are UTC. Raises ``UnreachableError`` if sacct is
    missing, or the accounting database does not respond or refuses the request.
    """
    names = sacct_fields(run, env=env)
    argv = [
        "--allusers", "--duplicates", "--parsable2", f"--delimiter={DELIMITER}",
        f"--starttime={_stamp(since)}", f"--endtime={_stamp(until)}", f"--format={','.join(names)}",
    ]  # fmt: skip
    if all_clusters:
        argv.append("--allclusters")
    elif clusters:
        argv.append(f"--clusters={','.join(clusters)}")
    return _sacct(run, argv, _TIMEOUT_S, env).stdout


def in_windows(
    since: datetime,
    until: datetime,
    query: Callable[[datetime, datetime], bytes],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[datetime, datetime, bytes]]:
    """Yield the windows of ``[since, until)``, earliest first, each with the output of ``query`` (``run_sacct``).

    The next query begins at the earliest when slurmdbd was left alone for as long as the last one took, or a minute.
    What ``query`` raises is raised between windows.
    """
    begin, rested = since, 0.0
    while begin < until:
        end = min(begin + WINDOW, until)
        if (rest := rested - clock()) > 0:
            sleep(rest)
        started = clock()
        content = query(begin, end)
        ended = clock()
        rested = ended + min(ended - started, _LONGEST_PAUSE_S)
        yield begin, end, content
        begin = end


def run_sacct_of(
    job: str, *, cluster: str | None = None, run: Runner = process.run, env: Mapping[str, str] | None = None
) -> bytes:
    """Return the accounting of every attempt of ``job`` (``123``, ``123_4``), with steps, as text for ``sacct.read``.

    ``cluster``: another cluster of the accounting database. Raises ``UnreachableError`` like ``run_sacct``. Accounting
    of an unknown job has a header only.
    """
    names = sacct_fields(run, env=env)
    argv = [f"--jobs={job}", "--duplicates", "--parsable2", f"--delimiter={DELIMITER}", f"--format={','.join(names)}"]
    argv += [] if cluster is None else [f"--clusters={cluster}"]
    return _sacct(run, argv, _HELP_TIMEOUT_S, env).stdout


def jobs_on_node(
    uid: int, node: str, since_epoch: float, *, run: Runner = process.run, env: Mapping[str, str] | None = None
) -> frozenset[int]:
    """Return the raw IDs of the jobs of a user that were on a node at any time since then, running ones included.

    Raises ``UnreachableError``.
    """
    since = _stamp(datetime.fromtimestamp(since_epoch, UTC))
    argv = [
        f"--uid={uid}", f"--nodelist={identifiers.node(node)}", f"--starttime={since}", "--endtime=now", "--duplicates",
        "--allocations", "--parsable2", "--format=JobIDRaw",
    ]  # fmt: skip
    lines = _sacct(run, argv, _NODE_TIMEOUT_S, env).stdout.decode("utf-8", "replace").split()
    return frozenset(int(line) for line in lines[1:] if line.isdecimal())


def output_files(job: str, *, run: Runner = process.run, env: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the files of standard output and standard error of the last attempt of ``job``, as accounting knows them.

    Patterns such as ``%j`` are expanded. Of an array, those of all tasks are returned. Empty if accounting does not
    record them (before Slurm 24.05), or the job is not a batch job. Raises ``UnreachableError``.
    """
    fields = _sacct(run, ["--helpformat"], _HELP_TIMEOUT_S, env).stdout.decode("utf-8", "replace").lower().split()
    if not {"stdout", "stderr"} <= set(fields):
        return ()
    argv = [
        f"--jobs={job}", "--allocations", "--parsable2", f"--delimiter={DELIMITER}", "--expand-patterns",
        "--format=StdOut,StdErr",
    ]  # fmt: skip
    lines = _sacct(run, argv, _HELP_TIMEOUT_S, env).stdout.decode("utf-8", "surrogateescape").splitlines()[1:]
    paths = [path for line in lines for path in line.split(DELIMITER)]
    return tuple(dict.fromkeys(path for path in paths if path.startswith("/") and path != "/dev/null"))


def admin_comment(job: str, *, run: Runner = process.run, env: Mapping[str, str] | None = None) -> str | None:
    """Return the AdminComment of the last attempt of ``job`` in accounting, empty if it has none.

    ``None``: accounting does not have the job, or has not recorded its end yet. Raises ``UnreachableError``.
    """
    argv = [f"--jobs={job}", "--allocations", "--parsable2", f"--delimiter={DELIMITER}", "--format=End,AdminComment"]
    text = _sacct(run, argv, _NODE_TIMEOUT_S, env).stdout.decode("utf-8", "backslashreplace")
    end, _, comment = text.partition("\n")[2].removesuffix("\n").partition(DELIMITER)
    return comment if end not in ("", "Unknown") else None


def set_admin_comment(job: str, text: str, *, run: Runner = process.run) -> None:
    """Set the AdminComment of the last attempt of an ended job of this cluster in accounting.

    ``job``: ``123``, ``123_4`` or ``123+1``; the number of an array alone would name all of its tasks. Needs the rights
    of an operator of slurmdbd. Raises ``BadIdentifierError`` and ``UnreachableError``.
    """
    target = identifiers.job(job)
    value = identifiers.text(text, "admin comment", identifiers.MAX_ADMIN_COMMENT_BYTES)
    argv = ["sacctmgr", "--immediate", "modify", "job", "where", f"jobid={target}", "set", f"AdminComment={value}"]
    completed = run(argv, timeout_s=_NODE_TIMEOUT_S, check=False)
    if completed.returncode != 0:
        raise UnreachableError(
            f"the AdminComment of job {job} cannot be set: {complaint(completed)}",
            hint="is slurmdbd running, and is root an operator there? try: sacctmgr show cluster",
        )


def _stamp(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _environment(env: Mapping[str, str] | None) -> dict[str, str]:
    kept_environment = {
        name: value for name, value in (os.environ if env is None else env).items() if name not in _SETTINGS
    }
    # SLURM_BITSTR_LEN=0: do not truncate the task list of a pending array after 64 characters.
    return {**kept_environment, "TZ": "UTC", "SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0"}


def _sacct(run: Runner, arguments: Sequence[str], timeout_s: float, env: Mapping[str, str] | None) -> Completed:
    completed = run(["sacct", *arguments], timeout_s=timeout_s, env=_environment(env), check=False)
    if completed.returncode == 0 and completed.stdout.strip():
        return completed
    lowered = completed.stderr.lower()
    last = complaint(completed)
    if "accounting storage is disabled" in lowered:
        raise UnreachableError(
            "this cluster keeps no accounting (Slurm accounting storage is disabled)",
            hint="set AccountingStorageType=accounting_storage/slurmdbd in slurm.conf and run slurmdbd",
        )
    if any(word in lowered for word in ("talking to the database", "connection refused", "slurmdbd", "persist")):
        raise UnreachableError(
            f"sacct cannot reach the accounting database: {last}",
            hint="is slurmdbd running, and may this user ask it? try: sacctmgr show cluster",
        )
    raise UnreachableError(f"sacct ended with status {completed.returncode}: {last}", hint="try the same sacct by hand")
