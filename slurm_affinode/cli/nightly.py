"""``slurm-affinode nightly``: for cron."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click

from slurm_affinode.cli.options import When, config_options, json_option, print_json
from slurm_affinode.config import Config
from slurm_affinode.workflow.nightly.lock import exclusive
from slurm_affinode.workflow.nightly.outcome import NightlyError
from slurm_affinode.workflow.nightly.run import run
from slurm_affinode.workflow.nightly.sources import configured

_EPILOG = """\b
Examples:
  slurm-affinode nightly                      what cron runs: silent unless something fails
  slurm-affinode nightly --verbose            say what is done
  slurm-affinode nightly --now 2026-11-01     the reports of October, made up for

\b
Exit status: 0 all done; 2 something failed; 3 something could not be reached, or another run is at work.
The text on standard error says what failed and why; the parts that could be done were done.
A crontab line and systemd units are in the reports/ directory of the source.
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Root of the reports. [default: the key nightly.out, else reports/ in the state directory]",
)  # fmt: skip
@click.option("--now", type=When(), default="now", metavar="TIME", help="Do what is due at TIME.  [default: now]")
@click.option("--force", is_flag=True, help="Make reports anew even where nothing has changed.")
@click.option("--wait", is_flag=True, help="Wait for another run to end, in place of exit status 3.")
@click.option("-v", "--verbose", is_flag=True, help="Say on standard output what is done.")
@json_option
@config_options
def nightly(
    *, config: Config, out: Path | None, now: datetime, force: bool, wait: bool, verbose: bool, as_json: bool
) -> None:
    """Take in what is new, render day, week and month, keep an index of past reports, delete what is old.

    Accounting is asked of sacct since the last run (or read from the files of nightly.accounting_paths), GPU history
    is read from nightly.gpu_paths, where files that have not changed are skipped, and from the Prometheus server of
    prometheus.url since the last run. The reports are those of the last complete local day, ISO week and month that
    are not there yet or whose data has changed, and any missed since the last run.
    """

    def say(line: str) -> None:
        if verbose and not as_json:
            click.echo(line)

    with exclusive(config.state_dir / "nightly.lock", wait=wait):
        outcome = run(
            config,
            configured(config),
            out=out or config.reports_dir,
            now=now.astimezone(UTC),
            force=force,
            say=say,
        )
    if as_json:
        print_json(asdict(outcome))
    if outcome.failures:
        raise NightlyError(outcome)
