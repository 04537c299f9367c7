"""``slurm-affinode ingest suspensions``: what the agents wrote down of suspended jobs."""

from __future__ import annotations

from pathlib import Path

import click

from slurm_affinode.cli.ingest_store import store_unless
from slurm_affinode.cli.options import (
    config_options,
    intake_options,
    json_option,
    print_json,
    print_table,
    warn_of_problems,
)
from slurm_affinode.config import Config
from slurm_affinode.errors import ConfigError
from slurm_affinode.store.records import Counts
from slurm_affinode.workflow import suspension_intake
from slurm_affinode.workflow.suspension_intake import LedgerIntake

_EPILOG = """\b
The ledgers are NODE.jsonl in the directory [suspend] ledger of the configuration; report and nightly take them in
by themselves. Examples:
  slurm-affinode ingest suspensions
  slurm-affinode ingest suspensions /shared/slurm-affinode/ledger
"""


@click.command(epilog=_EPILOG)
@click.argument("paths", nargs=-1, metavar="[DIR|FILE]...", type=click.Path(path_type=Path))
@intake_options
@json_option
@config_options
def ingest_suspensions(*, paths: tuple[Path, ...], dry_run: bool, shown: int, as_json: bool, config: Config) -> int:
    """Take in the ledgers of suspended jobs, for the report's section on GPUs given back.

    The same input twice changes nothing.
    """
    chosen = paths or ((config.ledger_dir,) if config.ledger_dir is not None else ())
    if not chosen:
        raise ConfigError("no ledger is named", hint="give its directory, or set [suspend] ledger or shared_store")
    with store_unless(dry_run, config) as store:
        results = [one for path in chosen for one in suspension_intake.take_in(store, path)]
    _report(results, shown, as_json=as_json)
    return 0


def _report(results: list[LedgerIntake], shown: int, *, as_json: bool) -> None:
    if as_json:
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
        click.echo("no ledger is there yet")
    else:
        rows = [
            (one.source, one.entries, *(("", "", "") if one.counts is None else _three(one.counts)), len(one.problems))
            for one in results
        ]
        columns = ("ledger", "lines", "new", "updated", "unchanged", "bad")
        print_table(columns, rows, right=columns[1:])
    for one in results:
        lines = (f"{one.source}:{problem.line}: {problem.reason}" for problem in one.problems)
        warn_of_problems(one.source, lines, len(one.problems), shown)


def _three(counts: Counts) -> tuple[int, int, int]:
    return counts.new, counts.updated, counts.unchanged
