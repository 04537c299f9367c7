"""``slurm-affinode agent``."""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import replace
from pathlib import Path

import click

from slurm_affinode import process
from slurm_affinode.cli.nodeoptions import config_file
from slurm_affinode.config import Config, policy_path
from slurm_affinode.configvalues import LONGEST_S
from slurm_affinode.errors import ConfigError
from slurm_affinode.timespec import parse_span_s

_EPILOG = """\b
  slurm-affinode agent                     in the foreground, until SIGTERM
  slurm-affinode agent --dry-run           only log what would be suspended
  systemctl enable --now slurm-affinode-agent

\b
Exit status: 0 it was told to end, 2 the configuration is wrong, 3 a socket or a directory cannot be had.
"""


@click.command(epilog=_EPILOG)
@click.option("--dry-run", is_flag=True, help="Suspend nothing; log what would be. [config: suspend.dry_run]")
@click.option("--period", metavar="SPAN", help="Time between two looks at the GPUs. [config: agent.period, default 5s]")
@click.option("--verbose", is_flag=True, help="Log every change that is seen.")
@config_file
def agent(*, config: Config, dry_run: bool, period: str | None, verbose: bool) -> None:
    """Watch the jobs of this node that were submitted with --gpu-suspend-idle, and suspend them when they are idle.

    Runs in the foreground as root, one on each node, and logs to standard error. Jobs are not affected when it is
    stopped or started again: their shepherds connect to the next one. Sections [agent] and [suspend] of the
    configuration say how often it looks, what counts as idle, and whom it leaves alone.
    """
    from slurm_affinode.agent import daemon, orchestration  # noqa: PLC0415 - the daemon's parts, only for the daemon
    from slurm_affinode.gpu.nvml import NvmlDriver  # noqa: PLC0415
    from slurm_affinode.slurm.backends import open_client  # noqa: PLC0415

    for path in (config.source, policy_path(config)):
        _refuse_others(path)
    if period is not None:
        if not 0 < parse_span_s(period) <= LONGEST_S:
            raise click.BadParameter(f"{period} is not above 0 and at most 100 years", param_hint="--period")
        config = replace(config, agent=replace(config.agent, period=period))
    if dry_run:
        config = replace(config, suspend=replace(config.suspend, dry_run=True))
    # In a process that must not die Slurm's own commands are the choice, unless the site has made another.
    backend = "commands" if config.slurm.backend == "auto" else config.slurm.backend
    daemon.log_to_stderr(verbose=verbose)
    daemon.serve(
        config,
        daemon.DaemonParts(
            driver=NvmlDriver,
            slurm=functools.partial(open_client, backend),  # type: ignore[arg-type]
            orchestration=orchestration.build,
        ),
    )


def _refuse_others(path: Path | None) -> None:
    """Raises ``ConfigError`` where others than root may change a file that names programs which root runs."""
    at = None
    with contextlib.suppress(OSError):  # there is none, or it says itself what is wrong when it is read
        if path is not None and os.geteuid() == 0 and path.absolute().is_file():
            at = process.replaceable(path.absolute())
    if at is not None:
        raise ConfigError(
            f"{path}: others than root may write to {at}, and it names programs that root runs",
            hint=f"chown root:root {at} && chmod go-w {at}",
        )
