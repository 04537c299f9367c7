"""``slurm-affinode nightly``: ingest, reports and retention, for cron."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import click

from slurm_affinode.base.config import Config
from slurm_affinode.cli.anonymous import anonymous_options, pseudonyms
from slurm_affinode.cli.command import command
from slurm_affinode.cli.folding import folding
from slurm_affinode.cli.options import (
    When,
    config_options,
    dask_option,
    echo,
    json_option,
    print_json,
)
from slurm_affinode.pipeline.mail_delivery import postman
from slurm_affinode.pipeline.nightly import NightlyError, configured, exclusive, render, run
from slurm_affinode.pipeline.usage_mails import UsageMails, to_files
from slurm_affinode.zombies import policy as site_policy
from slurm_affinode.zombies.job import publish, summaries

_EPILOG = """\b
Examples:
  slurm-affinode nightly                      run by cron; prints only failures
  slurm-affinode nightly --verbose            log each step
  slurm-affinode nightly --since 30d          all that is missing of the last 30 days
  slurm-affinode nightly --now 2026-11-01     the reports of October, if they were missed

\b
Exit status: 0 done; 2 a part failed; 3 a service did not respond, or another run is active.
Standard error names the failed parts and the reasons; all other parts are done.
A crontab line and systemd units are in the reports/ directory of the source.
"""


@command(epilog=_EPILOG)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Set the root of the reports [default: nightly.out, else reports/ in the state directory]",
)  # fmt: skip
@click.option(
    "--now", type=When(), default="now", metavar="TIME", help="Render the reports due at TIME  [default: now]"
)
@click.option(
    "--since", type=When(), metavar="TIME", help="Query sacct from TIME on, and render all missing reports since then"
)
@click.option("--force", is_flag=True, help="Render reports again even if nothing has changed")
@click.option("--wait", is_flag=True, help="Wait for another run to end instead of exiting with status 3")
@click.option("-v", "--verbose", is_flag=True, help="Log each step on standard output")
@click.option(
    "--mail-to", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Write the mails of nightly.mail that are due at --now to files in DIR instead of sending them",
)  # fmt: skip
@anonymous_options
@dask_option
@json_option
@config_options
def nightly(
    *,
    config: Config,
    out: Path | None,
    now: datetime,
    since: datetime | None,
    force: bool,
    wait: bool,
    verbose: bool,
    mail_to: Path | None,
    dask: str | None,
    as_json: bool,
    anonymous: bool,
    anonymous_nodes: bool,
    pseudonym_key: Path | None,
) -> None:
    """Ingest new data, render daily, weekly and monthly reports, update their index, delete expired data.

    Accounting comes from sacct since the last run (or from the files of nightly.accounting_paths), metrics of GPUs
    and inference engines from new or changed files in nightly.gpu_paths and nightly.serving_paths and from the
    Prometheus server of prometheus.url. Reports are rendered for the last complete local day, ISO week and month if
    missing or outdated, and for any missed since the last run. With nightly.jobs.directory, summaries of jobs are
    published there, each readable by its owner alone. With nightly.pages.directory, pages of users, accounts and jobs
    are made there for a web server. With --anonymous, reports have pseudonyms, and no links to these pages. With
    nightly.mail.periods, the use of GPUs in a period that ended within the last three days is mailed once.
    """

    def say(line: str) -> None:
        if verbose and not as_json:
            echo(line)

    keys = config.nightly
    anonymous, anonymous_nodes = anonymous or keys.anonymous, anonymous_nodes or keys.anonymous_nodes
    if anonymous or anonymous_nodes:
        pseudonym_key = pseudonym_key or keys.pseudonym_key
    names = pseudonyms(
        config, anonymous=anonymous, anonymous_nodes=anonymous_nodes, pseudonym_key=pseudonym_key
    )  # fmt: skip
    with exclusive(config.state_dir / "nightly.lock", wait=wait), folding(dask, config) as fold:
        outcome = run(
            config,
            configured(config, since=since),
            out=out or config.reports_dir,
            now=now.astimezone(UTC),
            force=force,
            say=say,
            render=partial(render, fold=fold, anonymize=None if names is None else names.apply),
            publish=publish,
            since=since,
            mails=_mails(config, mail_to, now.astimezone(UTC)),
            summarize=partial(summaries, source="published"),
            pseudonyms=names,
        )
    if as_json:
        print_json(asdict(outcome))
    if outcome.failures:
        raise NightlyError(outcome)


def _mails(config: Config, directory: Path | None, now: datetime) -> UsageMails | None:
    """Return the sender of the mails of the run, or ``None`` if none are configured. ``directory``: for the mails."""
    settings, zone, pages = config.nightly.mail, config.cluster.timezone, config.nightly.pages
    if not settings.periods:
        return None
    mail = site_policy.load(config).mail
    if directory is not None:
        return UsageMails(settings, mail, to_files(directory, mail, now), now, zone, pages, recorded=False)
    present = datetime.now(UTC)  # with --now, the periods may be old
    return UsageMails(settings, mail, postman(mail, lambda: present), present, zone, pages)
