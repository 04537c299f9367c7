"""``slurm-affinode ingest sacct``: accounting from files, standard input, or sacct itself."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from slurm_affinode.cli.ingest_store import store_unless
from slurm_affinode.cli.options import (
    When,
    config_options,
    intake_options,
    json_option,
    print_json,
    print_table,
    progress,
    warn,
    warn_of_problems,
)
from slurm_affinode.config import Config
from slurm_affinode.errors import AffinodeError, InputError
from slurm_affinode.slurm import commands, sacct, times
from slurm_affinode.slurm.accounting import Accounting
from slurm_affinode.slurm.sacct import Reading
from slurm_affinode.store.records import Upserted
from slurm_affinode.store.repository import Repository
from slurm_affinode.timespec import parse_span_s
from slurm_affinode.workflow import intake

_EPILOG = """\b
Examples:
  slurm-affinode ingest sacct                              ask sacct for what is new
  slurm-affinode ingest sacct --since 30d                  ask sacct for the last 30 days
  slurm-affinode ingest sacct jobs.txt more.txt.gz         files of sacct -P or sacct --json
  sacct -aDP -S now-1day -o ALL | slurm-affinode ingest sacct -
  slurm-affinode ingest sacct --timezone Europe/Oslo jobs.txt
"""


@dataclass(frozen=True, slots=True)
class _Source:
    """One input that was read: its name for people, its content as the parser takes it."""

    name: str
    content: Path | bytes


@dataclass(frozen=True, slots=True)
class Intake:
    """What became of one input."""

    source: str
    accounting: Accounting
    stored: Upserted | None
    """``None``: nothing was stored (a dry run)."""


@click.command(epilog=_EPILOG)
@click.argument("files", nargs=-1, metavar="[FILE|-]...", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--since", type=When(), metavar="TIME", help="Ask sacct from here on. [default: where the last run ended]"
)
@click.option("--until", type=When(), metavar="TIME", help="Ask sacct up to here. [default: now]")
@click.option(
    "--cluster", metavar="NAME",
    help="Cluster of records that do not name one; without FILE, the cluster to ask for. [default: configuration]",
)  # fmt: skip
@click.option("--all-clusters", is_flag=True, help="Without FILE: ask for every cluster of the accounting database.")
@click.option(
    "--timezone", metavar="ZONE", help="IANA zone of times in FILE without an offset. [default: configuration, local]"
)
@click.option("--delimiter", metavar="TEXT", help=r"Between the fields of FILE, e.g. '\t' or '\x1f'. [default: found]")
@click.option("--strict", is_flag=True, help="Stop at the first bad record and store nothing of that input.")
@intake_options
@json_option
@config_options
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
    dry_run: bool,
    shown: int,
    as_json: bool,
    config: Config,
) -> int:
    """Take in accounting: output of sacct -P or sacct --json, or run sacct.

    The same input twice changes nothing, and a job that was running is completed when it is seen again. A bad record
    is reported with its line and the others are taken in; an input that cannot be read at all changes nothing.
    """
    if files and (since or until or all_clusters):
        raise click.UsageError("--since, --until and --all-clusters are for running sacct: leave them or FILE out")
    if not files and (timezone or delimiter):
        raise click.UsageError("--timezone and --delimiter are about FILE: which file?")
    how = Reading(
        cluster=cluster or config.cluster.name_or_default,
        zone=times.zone_name(timezone or config.cluster.timezone) if files else "UTC",
        delimiter=_unescape(delimiter),
        strict=strict,
    )
    done: list[Intake] = []
    failed: list[AffinodeError] = []
    with store_unless(dry_run, config) as repository:
        if files:
            for source in _sources(files):
                try:
                    done.append(_one(source, how, repository, quiet=as_json))
                except InputError as error:
                    failed.append(error)
        else:
            asked = _run_sacct(
                repository, how, since=since, until=until, config=config, cluster=cluster, all_clusters=all_clusters
            )
            done.append(asked)
    _report(done, shown, as_json=as_json, dry_run=dry_run)
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


def _one(source: _Source, how: Reading, repository: Repository | None, *, quiet: bool) -> Intake:
    started = datetime.now(UTC)
    if repository is not None:
        how = replace(how, counting=intake.counting_clusters(repository))
    with progress(f"reading {source.name}", total=None, quiet=quiet) as advance:
        accounting = sacct.read(source.content, where=source.name, how=how, advance=advance)
    accounting = replace(accounting, notes=(*accounting.notes, *_jobstats(accounting)))
    return _store(source, accounting, repository, started)


def _jobstats(accounting: Accounting) -> tuple[str, ...]:
    """What else could be had from this input: averages per run are no samples, so they are not mixed with those."""
    comments = accounting.jobs["admin_comment"]
    there = int((comments.str.starts_with("JS1:") & ~comments.is_in(["JS1:Short", "JS1:None"])).sum())
    if not there:
        return ()
    what = "1 run has a jobstats summary" if there == 1 else f"{there:,} runs have a jobstats summary"
    return (f"{what} in AdminComment, averages that a report cannot use: see slurm-affinode trace jobstats",)


def _store(source: _Source, accounting: Accounting, repository: Repository | None, started: datetime) -> Intake:
    if repository is None:
        return Intake(source.name, accounting, None)
    stored = intake.take_in(
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
    how: Reading,
    *,
    since: datetime | None,
    until: datetime | None,
    config: Config,
    cluster: str | None,
    all_clusters: bool,
) -> Intake:
    now = datetime.now(UTC)
    until = until or now
    if since is None:
        overlap = timedelta(seconds=parse_span_s(config.nightly.sacct_overlap))
        since = until - intake.FIRST_SPAN
        if repository is not None:
            since = intake.default_since(repository, now=until, overlap=overlap)
    if since >= until:
        raise click.UsageError(f"--since {since:%Y-%m-%dT%H:%M:%SZ} is not before --until {until:%Y-%m-%dT%H:%M:%SZ}")
    content = commands.run_sacct(since, until, clusters=(cluster,) if cluster else (), all_clusters=all_clusters)
    name = f"sacct {since:%Y-%m-%dT%H:%M:%SZ}..{until:%Y-%m-%dT%H:%M:%SZ}"
    result = _one(_Source(name, content), replace(how, delimiter=commands.DELIMITER), repository, quiet=True)
    if repository is not None:
        answered = set(result.accounting.jobs["cluster"].unique()) | ({cluster} if cluster else set())
        intake.reached(repository, min(until, now), answered)
    return result


def _unescape(delimiter: str | None) -> str | None:
    if delimiter is None:
        return None
    try:
        text = delimiter.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError:
        text = delimiter
    if not text or "\n" in text:
        raise click.UsageError(f"--delimiter {delimiter!r} cannot stand between fields")
    return text


def _fingerprint(content: Path | bytes) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _report(done: Sequence[Intake], shown: int, *, as_json: bool, dry_run: bool) -> None:
    if as_json:
        print_json({"dry_run": dry_run, "sources": [_as_json(one) for one in done]})
        return
    for one in done:
        _print_problems(one, shown)
    if not done:
        return
    count = ("records", "job runs", "steps", "new", "updated", "unchanged", "bad records")
    rows = [[one.source, *(f"{value:,}" if value is not None else "-" for value in _figures(one))] for one in done]
    print_table(("source", *count), rows, right=count)
    if dry_run:
        click.echo("dry run: nothing was stored")


def _figures(one: Intake) -> list[int | None]:
    accounting = one.accounting
    total = one.stored.jobs + one.stored.steps if one.stored is not None else None
    return [
        accounting.records,
        accounting.jobs.height,
        accounting.steps.height,
        *((total.new, total.updated, total.unchanged) if total is not None else (None, None, None)),
        accounting.bad_records,
    ]


def _print_problems(one: Intake, shown: int) -> None:
    accounting = one.accounting
    lines = (f"{_where(one, problem.line)}: {problem}" for problem in accounting.problems)
    warn_of_problems(one.source, lines, len(accounting.problems), shown)
    for decision in accounting.decisions[:shown]:
        warn(f"{_where(one, decision.line)}: {decision}")
    if (rest := len(accounting.decisions) - shown) > 0:
        warn(f"{one.source}: {rest:,} more times were decided in the same way")
    for note in accounting.notes:
        warn(f"{one.source}: {note}")


def _where(one: Intake, line: int | None) -> str:
    if line is None:
        return one.source
    return f"{one.source}:{line}" if one.accounting.unit == "line" else f"{one.source}, {one.accounting.unit} {line}"


def _as_json(one: Intake) -> dict[str, Any]:
    accounting = one.accounting
    names = ("records", "job_runs", "steps", "new", "updated", "unchanged", "bad_records")
    return {
        "source": one.source,
        **dict(zip(names, _figures(one), strict=True)),
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
