"""``slurm-affinode ingest suspensions``."""

from __future__ import annotations

from pathlib import Path

import click

from slurm_affinode.base.errors import ConfigError
from slurm_affinode.cli.command import command
from slurm_affinode.cli.ingest_run import (
    IngestRun,
    ingest_options,
)
from slurm_affinode.cli.options import (
    echo,
    print_json,
    print_table,
)
from slurm_affinode.db.records import Counts
from slurm_affinode.pipeline import ledgers
from slurm_affinode.pipeline.ledgers import LedgerIntake

_SUSPENSIONS_EPILOG = """\b
The ledgers are NODE.jsonl in the directory suspend.ledger; report and nightly ingest them by themselves.
Examples:
  slurm-affinode ingest suspensions
  slurm-affinode ingest suspensions /shared/slurm-affinode/ledger
"""


@command(epilog=_SUSPENSIONS_EPILOG)
@click.argument("paths", nargs=-1, metavar="[DIR|FILE]...", type=click.Path(path_type=Path))
@ingest_options()
def ingest_suspensions(*, paths: tuple[Path, ...], run: IngestRun) -> int:
    """Ingest the ledgers of suspended jobs, for the report's section on GPUs given back.

    Ingesting the same input twice is a no-op.
    """
    chosen = paths or ((run.config.ledger_dir,) if run.config.ledger_dir is not None else ())
    if not chosen:
        raise ConfigError("no ledger is named", hint="give its directory, or set [suspend] ledger or shared_store")
    with run.store() as store:
        results = [one for path in chosen for one in ledgers.ingest_ledgers(store, path)]
    _report_suspensions(results, run)
    return 0


def _report_suspensions(results: list[LedgerIntake], run: IngestRun) -> None:
    if run.as_json:
        print_json(
            [
                {
                    "source": one.source,
                    "entries": one.entries,
                    "new": None if one.counts is None else one.counts.new,
                    "updated": None if one.counts is None else one.counts.updated,
                    "unchanged": None if one.counts is None else one.counts.unchanged,
                    "problems": [{"line": problem.line, "reason": problem.reason} for problem in one.problems],
                }
                for one in results
            ]
        )
    elif not results:
        echo("no ledger is there yet")
    else:
        rows = [
            (one.source, one.entries, *(("", "", "") if one.counts is None else _three(one.counts)), len(one.problems))
            for one in results
        ]
        columns = ("ledger", "lines", "new", "updated", "unchanged", "bad")
        print_table(columns, rows, right=columns[1:])
    for one in results:
        lines = (f"{one.source}:{problem.line}: {problem.reason}" for problem in one.problems)
        run.warn_of_problems(one.source, lines, len(one.problems))


def _three(counts: Counts) -> tuple[int, int, int]:
    return counts.new, counts.updated, counts.unchanged
