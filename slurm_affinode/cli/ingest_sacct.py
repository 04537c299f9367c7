"""``slurm-affinode ingest sacct``."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import click

from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError, InputError
from slurm_affinode.base.times import parse_span_s, utc
from slurm_affinode.cli.command import command
from slurm_affinode.cli.ingest_run import (
    IngestRun,
    InputOutcome,
    cluster_option,
    ingest_options,
    strict_option,
    timezone_option,
)
from slurm_affinode.cli.options import (
    When,
    print_json,
    progress,
    warn,
)
from slurm_affinode.db.records import Upserted
from slurm_affinode.db.repository import Repository
from slurm_affinode.pipeline import stored_accounting
from slurm_affinode.slurm.accounting import sacct, sacct_command
from slurm_affinode.slurm.accounting.sacct import SacctReading
from slurm_affinode.slurm.accounting.schema import Accounting

_SACCT_EPILOG = """\b
Examples:
  slurm-affinode ingest sacct                              query sacct for new records
  slurm-affinode ingest sacct --since 30d                  query sacct for the last 30 days
  slurm-affinode ingest sacct jobs.txt more.txt.gz         files of sacct -P or sacct --json
  sacct -aDP -S now-1day -o ALL | slurm-affinode ingest sacct -
  slurm-affinode ingest sacct --timezone Europe/Oslo jobs.txt
"""


@dataclass(frozen=True, slots=True)
class _Source:
    """An input: its display name, and its content or path for the parser."""

    name: str
    content: Path | bytes


@dataclass(frozen=True, slots=True)
class Intake:
    """The outcome of ingesting one input."""

    source: str
    accounting: Accounting
    stored: Upserted | None
    """``None``: nothing was stored (a dry run)."""


@command(epilog=_SACCT_EPILOG)
@click.argument("files", nargs=-1, metavar="[FILE|-]...", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--since", type=When(), metavar="TIME", help="Query sacct from TIME [default: end of the last run]")
@click.option("--until", type=When(), metavar="TIME", help="Query sacct until TIME [default: now]")
@cluster_option("Assign records without a cluster to NAME; without FILE, query this cluster [default: configuration]")
@click.option("--all-clusters", is_flag=True, help="Query every cluster of the accounting database (without FILE)")
@timezone_option("without an offset in FILE")
@click.option(
    "--delimiter", metavar="TEXT", help="Set the delimiter of FILE, such as '\\t' or '\\x1f' [default: detected]"
)
@strict_option("an input at its first bad record")
@ingest_options()
def ingest_sacct(
    *,
    files: tuple[Path, ...],
    since: datetime | None,
    until: datetime | None,
    cluster: str | None,
    all_clusters: bool,
    timezone: str | None,
    delimiter: str | None,
    strict: bool,
    run: IngestRun,
) -> int:
    """Ingest accounting: output of sacct -P or sacct --json, or run sacct.

    Ingesting the same input twice is a no-op; a job that was running is completed when it is seen again. A bad
    record is reported with its line, and the others are ingested; an unreadable input changes nothing.
    """
    if files and (since or until or all_clusters):
        raise click.UsageError("--since, --until and --all-clusters are for running sacct: leave them out, or FILE")
    if not files and (timezone or delimiter):
        raise click.UsageError("--timezone and --delimiter need FILE")
    reading = SacctReading(
        cluster=cluster or run.config.cluster.name_or_default,
        zone=run.zone(timezone) if files else "UTC",
        delimiter=_unescape(delimiter),
        strict=strict,
    )
    intakes: list[Intake] = []
    failed: list[AffinodeError] = []
    with run.store() as repository:
        if files:
            for source in _sources(files):
                try:
                    intakes.append(_ingest(source, reading, repository, quiet=run.as_json))
                except InputError as error:
                    failed.append(error)
        else:
            try:
                intakes.extend(
                    _run_sacct(
                        repository, reading, since=since, until=until, config=run.config, cluster=cluster,
                        all_clusters=all_clusters,
                    )
                )  # fmt: skip
            except AffinodeError as error:
                if not intakes:
                    raise
                failed.append(error)
    _report_sacct(intakes, run)
    if len(failed) == 1:
        raise failed[0]
    for failure in failed:
        warn(f"slurm-affinode: {failure}")
    return 2 if failed else 0


def _sources(files: Sequence[Path]) -> Iterator[_Source]:
    for path in files:
        if str(path) == "-":
            yield _Source("-", sys.stdin.buffer.read())
        else:
            yield _Source(str(path), path)


def _ingest(source: _Source, reading: SacctReading, repository: Repository | None, *, quiet: bool) -> Intake:
    started = datetime.now(UTC)
    if repository is not None:
        reading = replace(reading, counting=stored_accounting.counting_clusters(repository))
    with progress(f"reading {source.name}", total=None, quiet=quiet) as advance:
        accounting = sacct.read(source.content, where=source.name, reading=reading, advance=advance)
    accounting = replace(accounting, notes=(*accounting.notes, *_jobstats(accounting)))
    return _store_sacct(source, accounting, repository, started)


def _jobstats(accounting: Accounting) -> tuple[str, ...]:
    """Return a note on jobstats summaries in the input: they are averages, and are not mixed with samples."""
    comments = accounting.jobs["admin_comment"]
    summaries = int((comments.str.starts_with("JS1:") & ~comments.is_in(["JS1:Short", "JS1:None"])).sum())
    if not summaries:
        return ()
    what = "1 run has a jobstats summary" if summaries == 1 else f"{summaries:,} runs have a jobstats summary"
    return (f"{what} in AdminComment, averages that a report cannot use: see slurm-affinode trace jobstats",)


def _store_sacct(source: _Source, accounting: Accounting, repository: Repository | None, started: datetime) -> Intake:
    if repository is None:
        return Intake(source.name, accounting, None)
    stored = stored_accounting.ingest_accounting(
        repository,
        accounting,
        source=source.name,
        started=started,
        finished=datetime.now(UTC),
        fingerprint=_fingerprint(source.content),
    )
    return Intake(source.name, accounting, stored)


def _run_sacct(
    repository: Repository | None,
    reading: SacctReading,
    *,
    since: datetime | None,
    until: datetime | None,
    config: Config,
    cluster: str | None,
    all_clusters: bool,
) -> Iterator[Intake]:
    """Run sacct for each window of the interval; yield a window once it is stored. Raises ``AffinodeError``."""
    now = datetime.now(UTC)
    until = until or now
    if since is None:
        overlap = timedelta(seconds=parse_span_s(config.nightly.sacct_overlap))
        since = until - stored_accounting.FIRST_SPAN
        if repository is not None:
            since = stored_accounting.default_since(repository, now=until, overlap=overlap)
    if since >= until:
        raise click.UsageError(f"--since {utc(since)} is not before --until {utc(until)}")
    reading = replace(reading, delimiter=sacct_command.DELIMITER)
    query = partial(sacct_command.run_sacct, clusters=(cluster,) if cluster else (), all_clusters=all_clusters)
    for begin, end, content in sacct_command.in_windows(since, until, query):
        result = _ingest(_Source(f"sacct {utc(begin)}..{utc(end)}", content), reading, repository, quiet=True)
        if repository is not None:
            answered = set(result.accounting.jobs["cluster"].unique()) | ({cluster} if cluster else set())
            stored_accounting.reached(repository, min(end, now), answered)
        yield result


def _unescape(delimiter: str | None) -> str | None:
    if delimiter is None:
        return None
    try:
        text = delimiter.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError:
        text = delimiter
    if not text or "\n" in text:
        raise click.UsageError(f"--delimiter {delimiter!r} cannot separate fields")
    return text


def _fingerprint(content: Path | bytes) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _report_sacct(intakes: Sequence[Intake], run: IngestRun) -> None:
    if run.as_json:
        print_json({"dry_run": run.dry_run, "sources": [_as_json(intake) for intake in intakes]})
        return
    columns = ("source", "records", "job runs", "steps", "new", "updated", "unchanged", "bad records")
    run.print_outcomes(columns, [_outcome(intake, run.shown) for intake in intakes])


def _figures(intake: Intake) -> list[int | None]:
    accounting = intake.accounting
    total = intake.stored.jobs + intake.stored.steps if intake.stored is not None else None
    return [
        accounting.records,
        accounting.jobs.height,
        accounting.steps.height,
        *((total.new, total.updated, total.unchanged) if total is not None else (None, None, None)),
        accounting.bad_records,
    ]


def _outcome(intake: Intake, shown: int) -> InputOutcome:
    accounting = intake.accounting
    remarks = [f"{_location(intake, decision.line)}: {decision}" for decision in accounting.decisions[:shown]]
    if (rest := len(accounting.decisions) - shown) > 0:
        remarks.append(f"{intake.source}: {rest:,} more times were decided in the same way")
    remarks += [f"{intake.source}: {note}" for note in accounting.notes]
    problems = (f"{_location(intake, problem.line)}: {problem}" for problem in accounting.problems)
    return InputOutcome(intake.source, _figures(intake), problems, len(accounting.problems), remarks)


def _location(intake: Intake, line: int | None) -> str:
    if line is None:
        return intake.source
    return (
        f"{intake.source}:{line}"
        if intake.accounting.unit == "line"
        else f"{intake.source}, {intake.accounting.unit} {line}"
    )


def _as_json(intake: Intake) -> dict[str, Any]:
    accounting = intake.accounting
    names = ("records", "job_runs", "steps", "new", "updated", "unchanged", "bad_records")
    return {
        "source": intake.source,
        **dict(zip(names, _figures(intake), strict=True)),
        "problems": [
            {accounting.unit: p.line, "job": p.job, "field": p.field, "reason": p.reason, "left_out": p.dropped}
            for p in accounting.problems
        ],
        "times_decided": [
            {
                accounting.unit: d.line, "job": d.job, "field": d.field, "local": d.local.isoformat(),
                "taken_as": d.chosen, "exists": d.exists,
            }
            for d in accounting.decisions
        ],
        "notes": list(accounting.notes),
    }  # fmt: skip
