"""``slurm-affinode ingest allocations``: which GPUs a job had, as recorded by a prolog or by scontrol."""

from __future__ import annotations

import hashlib
import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from slurm_affinode.cli.ingest_store import store_unless
from slurm_affinode.cli.options import (
    config_options,
    intake_options,
    json_option,
    print_json,
    print_table,
    warn,
    warn_of_problems,
)
from slurm_affinode.config import UNNAMED_CLUSTER, Config
from slurm_affinode.errors import InputError
from slurm_affinode.slurm import allocations, times
from slurm_affinode.slurm.allocations import Allocations
from slurm_affinode.store.records import Counts, IngestProblem, IngestRecord
from slurm_affinode.store.repository import Repository

_EPILOG = """\b
Forms, found by their content:
  CSV         job_id,node,gpu[,start,cluster]
              1639021,gpu-2,GPU-5a1f...;GPU-77c0...,2025-05-02T14:09:52+02:00
  JSON lines  {"job_id": 1639021, "node": "gpu-2", "gpu": ["00000000:E1:00.0"]}
  scontrol    the text of: scontrol show job --details

\b
A GPU is a UUID, a PCI address, or an index on its node. Examples:
  slurm-affinode ingest allocations prolog.csv
  scontrol show job -d | slurm-affinode ingest allocations -
"""


@click.command(epilog=_EPILOG)
@click.argument("files", nargs=-1, required=True, metavar="FILE|-...", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--cluster", metavar="NAME", help="Cluster of records that do not name one. [default: configuration]")
@click.option(
    "--timezone", metavar="ZONE", help="IANA zone of times without an offset. [default: configuration, local]"
)
@click.option("--strict", is_flag=True, help="Stop at the first bad record and store nothing of that input.")
@intake_options
@json_option
@config_options
def ingest_allocations(
    *,
    files: tuple[Path, ...],
    cluster: str | None,
    timezone: str | None,
    strict: bool,
    dry_run: bool,
    shown: int,
    as_json: bool,
    config: Config,
) -> int:
    """Take in which GPUs a job had, where the GPU history does not say it itself.

    The same input twice changes nothing. Job ids are raw ids (SLURM_JOB_ID), also of array tasks.
    """
    zone = times.zone_name(timezone or config.cluster.timezone)
    results: list[tuple[str, Allocations, Counts | None]] = []
    with store_unless(dry_run, config) as repository:
        known = () if repository is None else repository.counts().clusters
        name = cluster or config.cluster.name or (known[0] if len(known) == 1 else UNNAMED_CLUSTER)
        for path in files:
            started = datetime.now(UTC)
            data = _content(path)
            found = allocations.read(data, where=str(path), cluster=name, zone=zone, strict=strict)
            if name == UNNAMED_CLUSTER and len(known) > 1 and name in found.gpus["cluster"]:
                raise InputError(
                    f"its records name no cluster, and accounting has {len(known)}: {', '.join(known)}",
                    where=str(path),
                    hint="give --cluster NAME, or set cluster.name in the configuration",
                )
            counts = None if repository is None else _store(repository, str(path), data, found, started)
            results.append((str(path), found, counts))
    _report(results, shown, as_json=as_json, dry_run=dry_run)
    return 0


def _content(path: Path) -> bytes:
    if str(path) == "-":
        return sys.stdin.buffer.read()
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError("no such file", where=str(path)) from None
    except IsADirectoryError:
        raise InputError("this is a directory", where=str(path), hint="give a file") from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=str(path)) from error


def _store(repository: Repository, source: str, data: bytes, found: Allocations, started: datetime) -> Counts:
    counts = repository.upsert_allocation_gpus(found.gpus)
    repository.record_ingest(
        IngestRecord(
            kind="allocations",
            source=source,
            started=started,
            finished=datetime.now(UTC),
            records=found.records - len(found.problems),
            new=counts.new,
            updated=counts.updated,
            unchanged=counts.unchanged,
            bad=len(found.problems),
            problems=tuple(IngestProblem(str(problem), problem.line) for problem in found.problems),
            notes=found.notes,
            fingerprint=hashlib.sha256(data).hexdigest(),
        )
    )
    return counts


def _report(results: list[tuple[str, Allocations, Counts | None]], shown: int, *, as_json: bool, dry_run: bool) -> None:
    columns = ("source", "records", "jobs", "gpus", "new", "unchanged", "bad records")
    rows = [
        (
            source,
            found.records,
            found.gpus.select("cluster", "job_id").n_unique(),
            found.gpus.height,
            counts.new if counts is not None else None,
            counts.unchanged if counts is not None else None,
            len(found.problems),
        )
        for source, found, counts in results
    ]
    if as_json:
        keys = [name.replace(" ", "_") for name in columns]
        sources = [
            {
                **dict(zip(keys, row, strict=True)),
                "problems": [{"line": p.line, "job": p.job, "reason": p.reason} for p in found.problems],
                "notes": list(found.notes),
            }
            for row, (_, found, _) in zip(rows, results, strict=True)
        ]
        print_json({"dry_run": dry_run, "sources": sources})
        return
    for source, found, _ in results:
        lines = (f"{source}:{problem.line}: {problem}" for problem in found.problems)
        warn_of_problems(source, lines, len(found.problems), shown)
        for note in found.notes:
            warn(f"{source}: {note}")
    cells = [["-" if value is None else value if index == 0 else f"{value:,}" for index, value in enumerate(row)]
             for row in rows]  # fmt: skip
    print_table(columns, cells, right=columns[1:])
    if dry_run:
        click.echo("dry run: nothing was stored")
