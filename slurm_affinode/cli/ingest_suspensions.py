"""``slurm-affinode ingest suspensions``."""

from __future__ import annotations

from pathlib import Path

import click

from slurm_affinode.base.errors import ConfigError
from slurm_affinode.cli.command import command
from slurm_affinode.cli.ingest_run import (
    IngestRun,
    InputOutcome,
    ingest_options,
)
from slurm_affinode.cli.options import (
    echo,
    print_json,
)
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
        results = [intake for path in chosen for intake in ledgers.ingest_ledgers(store, path)]
    _report_suspensions(results, run)
    return 0


def _report_suspensions(results: list[LedgerIntake], run: IngestRun) -> None:
    outcomes = [_outcome(intake) for intake in results]
    if run.as_json:
        print_json(
            [
                {
                    "source": intake.source,
                    **dict(zip(("entries", "new", "updated", "unchanged"), outcome.figures, strict=False)),
                    "problems": [{"line": problem.line, "reason": problem.reason} for problem in intake.problems],
                }
                for intake, outcome in zip(results, outcomes, strict=True)
            ]
        )
        for outcome in outcomes:
            run.warn_of_problems(outcome.source, outcome.problems, outcome.problem_count)
    elif results:
        run.print_outcomes(("ledger", "lines", "new", "updated", "unchanged", "bad"), outcomes)
    else:
        echo("no ledger is there yet")


def _outcome(intake: LedgerIntake) -> InputOutcome:
    counts: tuple[int | None, ...] = (None, None, None)
    if intake.counts is not None:
        counts = (intake.counts.new, intake.counts.updated, intake.counts.unchanged)
    problems = [f"{intake.source}:{problem.line}: {problem.reason}" for problem in intake.problems]
    return InputOutcome(intake.source, (intake.entries, *counts, len(problems)), problems, len(problems))
