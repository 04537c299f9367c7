"""``slurm-affinode ingest allocations``."""

from __future__ import annotations

import hashlib
import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from slurm_affinode.base.config import UNNAMED_CLUSTER
from slurm_affinode.base.errors import InputError
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
    print_json,
)
from slurm_affinode.db.records import Counts, IngestProblem, IngestRecord
from slurm_affinode.db.repository import Repository
from slurm_affinode.slurm.accounting import allocations
from slurm_affinode.slurm.accounting.allocations import RecordedAllocations

_ALLOCATIONS_EPILOG = """\b
Formats, detected by content:
  CSV         job_id,node,gpu[,start,cluster]
              1639021,gpu-2,GPU-5a1f...;GPU-77c0...,2025-05-02T14:09:52+02:00
  JSON lines  {"job_id": 1639021, "node": "gpu-2", "gpu": ["00000000:E1:00.0"]}
  scontrol    the text of: scontrol show job --details

\b
A GPU is a UUID, a PCI address, or an index on its node. Examples:
  slurm-affinode ingest allocations prolog.csv
  scontrol show job -d | slurm-affinode ingest allocations -
"""


@command(epilog=_ALLOCATIONS_EPILOG)
@click.argument("files", nargs=-1, required=True, metavar="FILE|-...", type=click.Path(path_type=Path, allow_dash=True))
@cluster_option("Assign records without a cluster to NAME [default: configuration]")
@timezone_option("without an offset")
@strict_option("an input at its first bad record")
@ingest_options()
def ingest_allocations(
    *,
    files: tuple[Path, ...],
    cluster: str | None,
    timezone: str | None,
    strict: bool,
    run: IngestRun,
) -> int:
    """Ingest the GPUs of jobs, for GPU metrics without job labels.

    Ingesting the same input twice is a no-op. Job IDs are raw IDs (SLURM_JOB_ID), also for array tasks.
    """
    zone = run.zone(timezone)
    results: list[tuple[str, RecordedAllocations, Counts | None]] = []
    with run.store() as repository:
        clusters = () if repository is None else repository.clusters()
        name = cluster or run.config.cluster.name or (clusters[0] if len(clusters) == 1 else UNNAMED_CLUSTER)
        for path in files:
            started = datetime.now(UTC)
            data = _content(path)
            recorded = allocations.read(data, where=str(path), cluster=name, zone=zone, strict=strict)
            if name == UNNAMED_CLUSTER and len(clusters) > 1 and name in recorded.gpus["cluster"]:
                raise InputError(
                    f"its records name no cluster, and accounting has {len(clusters)}: {', '.join(clusters)}",
                    where=str(path),
                    hint="give --cluster NAME, or set cluster.name in the configuration",
                )
            counts = None if repository is None else _store_allocations(repository, str(path), data, recorded, started)
            results.append((str(path), recorded, counts))
    _report_allocations(results, run)
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


def _store_allocations(
    repository: Repository, source: str, data: bytes, recorded: RecordedAllocations, started: datetime
) -> Counts:
    counts = repository.upsert_allocation_gpus(recorded.gpus)
    repository.record_ingest(
        IngestRecord(
            kind="allocations",
            source=source,
            started=started,
            finished=datetime.now(UTC),
            records=recorded.records - len(recorded.problems),
            new=counts.new,
            updated=counts.updated,
            unchanged=counts.unchanged,
            bad=len(recorded.problems),
            problems=tuple(IngestProblem(str(problem), problem.line) for problem in recorded.problems),
            notes=recorded.notes,
            fingerprint=hashlib.sha256(data).hexdigest(),
        )
    )
    return counts


def _report_allocations(results: list[tuple[str, RecordedAllocations, Counts | None]], run: IngestRun) -> None:
    columns = ("source", "records", "jobs", "gpus", "new", "unchanged", "bad records")
    rows = [
        (
            source,
            recorded.records,
            recorded.gpus.select("cluster", "job_id").n_unique(),
            recorded.gpus.height,
            counts.new if counts is not None else None,
            counts.unchanged if counts is not None else None,
            len(recorded.problems),
        )
        for source, recorded, counts in results
    ]
    if run.as_json:
        keys = [name.replace(" ", "_") for name in columns]
        sources = [
            {
                **dict(zip(keys, row, strict=True)),
                "problems": [{"line": p.line, "job": p.job, "reason": p.reason} for p in recorded.problems],
                "notes": list(recorded.notes),
            }
            for row, (_, recorded, _) in zip(rows, results, strict=True)
        ]
        print_json({"dry_run": run.dry_run, "sources": sources})
        return
    run.print_outcomes(columns, [
        InputOutcome(
            source, row[1:], [f"{source}:{problem.line}: {problem}" for problem in recorded.problems],
            len(recorded.problems), [f"{source}: {note}" for note in recorded.notes],
        )
        for row, (source, recorded, _) in zip(rows, results, strict=True)
    ])  # fmt: skip
