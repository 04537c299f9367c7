"""``slurm-affinode setup report``: set up the machine of the reports."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import click

from slurm_affinode.base.config import DEFAULT_PATH
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.urls import checked_url
from slurm_affinode.cli.command import connection_option, group
from slurm_affinode.cli.options import Named, echo, json_option, print_json, print_table
from slurm_affinode.pipeline.report_machine import (
    FAILED,
    NOT_DONE,
    PLANNED,
    USER,
    Host,
    SetupRequest,
    configuration,
    prepare,
)
from slurm_affinode.pipeline.timer_files import SYSTEMD_RUNNING
from slurm_affinode.slurm.times import zone_name

_EPILOG = """\b
Without --yes, it changes nothing and shows what is missing. Running it again is a no-op. After a failed step, nothing
more is done. Exit status: 0, 1 a step failed, 2 wrong usage or unusable input.
  slurm-affinode setup report
  slurm-affinode setup report --prometheus http://prometheus.example.org:9090 --timezone Europe/Oslo --yes
  slurm-affinode setup report --cron --user reports --state /srv/slurm-affinode --yes
"""


@group()
def setup() -> None:
    """Set up a machine: user, directories, configuration, timer."""


@setup.command("report", epilog=_EPILOG)
@click.option("--prometheus", "url", metavar="URL", help="Set the Prometheus server with GPU metrics")
@click.option("--timezone", metavar="ZONE", help="Set the time zone of the reports  [default: that of this machine]")
@click.option("--user", default=USER, show_default=True, metavar="NAME", help="Run as this user, created if missing")
@click.option(
    "--systemd/--cron", "systemd", default=None, help="Select the scheduler  [default: systemd if it is running]"
)
@click.option("--no-ingest", is_flag=True, help="Leave the first ingest and reports to the timer")
@click.option("--yes", "act", is_flag=True, help="Create what is missing")
@json_option
@connection_option(
    "--config", "config_path", type=Named(path_type=Path), default=DEFAULT_PATH, show_default=True, metavar="FILE",
    help="Create or extend this configuration file",
)  # fmt: skip
@connection_option(
    "--state", "state_dir", type=Named(path_type=Path, file_okay=False), metavar="DIR",
    help="Set the state directory: SQLite database, GPU metrics, reports  [default: /var/lib/slurm-affinode]",
)  # fmt: skip
def report(
    *, url: str | None, timezone: str | None, user: str, systemd: bool | None, no_ingest: bool, act: bool,
    as_json: bool, config_path: Path, state_dir: Path | None,
) -> int:  # fmt: skip
    """Set up the machine of the reports: user, directories, configuration, timer, first ingest.

    Creates the user, the state directory, the configuration and the nightly timer or crontab, gives files that root
    has left in the state directory to the user, and runs slurm-affinode nightly once as that user. On a terminal,
    --yes asks for the Prometheus server and the time zone if neither the options nor the configuration have them.
    """
    if act and os.geteuid() != 0:
        raise AffinodeError("only root can set up a machine", hint="without --yes, it shows what is missing")
    request = SetupRequest(
        user=user, config=config_path, state_dir=state_dir, first_run=not no_ingest,
        prometheus=None if url is None else checked_url(url),
        timezone=None if timezone is None else zone_name(timezone),
        systemd=SYSTEMD_RUNNING.is_dir() if systemd is None else systemd,
    )  # fmt: skip
    host = Host()
    if act and not as_json and sys.stdin.isatty() and sys.stdout.isatty():
        request = _completed(request, host)
    steps = prepare(request, host, act=act)
    failed = any(step.state == FAILED for step in steps)
    if as_json:
        print_json({"ok": not failed, "applied": act, "steps": [asdict(step) for step in steps]})
        return int(failed)
    print_table(
        ("step", "state", "of", "detail"), ((step.name, step.state, step.target, step.detail) for step in steps),
        whole=("state",),
    )  # fmt: skip
    commands = [f"  {step.command}" for step in steps if step.state in (FAILED, NOT_DONE) and step.command]
    if commands:
        echo("", "Correct the failed step and run it again, or do the rest by hand:", *commands)
    elif any(step.state in PLANNED for step in steps):
        echo("", "Nothing was changed: --yes creates what is missing.")
    return int(failed)


def _completed(request: SetupRequest, host: Host) -> SetupRequest:
    """Ask for the settings that neither the options nor the configuration have."""
    config = configuration(request, host)
    if config.prometheus.url is None and not config.nightly.gpu_paths:
        url = click.prompt("Prometheus server with GPU metrics (empty: none)", default="", show_default=False)
        request = replace(request, prometheus=checked_url(url) if url.strip() else None)
    if config.cluster.timezone is None:
        zone = click.prompt("Time zone of the reports", default=zone_name(None))
        request = replace(request, timezone=zone_name(zone))
    return request
