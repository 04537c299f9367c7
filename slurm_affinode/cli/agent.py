"""``slurm-affinode agent``."""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import replace
from pathlib import Path

import click

from slurm_affinode.base import process
from slurm_affinode.base.config import Config, load, policy_path
from slurm_affinode.base.errors import ConfigError
from slurm_affinode.base.times import parse_span_s
from slurm_affinode.base.toml_schema import LONGEST_S
from slurm_affinode.cli.command import command
from slurm_affinode.cli.node_options import config_file

_EPILOG = """\b
  slurm-affinode agent                     in the foreground, until SIGTERM
  slurm-affinode agent --dry-run           only log what would be suspended
  systemctl reload slurm-affinode-agent    read the configuration again (SIGHUP)
  systemctl enable --now slurm-affinode-agent

\b
Exit status: 0 stopped by a signal, 2 invalid configuration, 3 a socket or directory is unavailable.
"""


@command(epilog=_EPILOG)
@click.option("--dry-run", is_flag=True, help="Only log what would be suspended [config: suspend.dry_run]")
@click.option("--period", metavar="SPAN", help="Set the sampling interval [config: agent.period, default: 5s]")
@click.option("--verbose", is_flag=True, help="Log every change of state")
@config_file
def agent(*, config: Config, dry_run: bool, period: str | None, verbose: bool) -> None:
    """Watch the jobs of this node with --gpu-suspend-idle, and suspend those that are idle.

    Runs in the foreground as root, one per node, and logs to standard error. Stopping or restarting it does not
    affect jobs: their shepherds connect to the next agent. The sections [agent] and [suspend] of the configuration
    set the sampling interval, the definition of idle, and exclusions.
    """
    from slurm_affinode.agent import composition, daemon, systemd  # noqa: PLC0415 - only for the daemon
    from slurm_affinode.gpu.nvml import NvmlDriver  # noqa: PLC0415
    from slurm_affinode.slurm.client import open_client  # noqa: PLC0415

    if period is not None and not 0 < parse_span_s(period) <= LONGEST_S:
        raise click.BadParameter(f"{period} is not above 0 and at most 100 years", param_hint="--period")
    source = config.source

    def with_options(config: Config) -> Config:
        for path in (config.source, policy_path(config)):
            _refuse_others(path)
        if period is not None:
            config = replace(config, agent=replace(config.agent, period=period))
        return replace(config, suspend=replace(config.suspend, dry_run=True)) if dry_run else config

    config = with_options(config)
    # The daemon must not die: use Slurm's commands unless the site has configured another backend.
    backend = "commands" if config.slurm.backend == "auto" else config.slurm.backend
    systemd.log_to_stderr(verbose=verbose)
    daemon.serve(
        config,
        daemon.DaemonParts(
            driver=NvmlDriver,
            slurm=functools.partial(open_client, backend),  # type: ignore[arg-type]
            orchestration=composition.build,
            read_config=lambda: with_options(load(source)),
        ),
    )


def _refuse_others(path: Path | None) -> None:
    """Raise ``ConfigError`` if users other than root can change a file that names programs run by root."""
    target = None
    with contextlib.suppress(OSError):  # missing or unreadable: reported when it is read
        if path is not None and os.geteuid() == 0 and path.absolute().is_file():
            target = process.replaceable(path.absolute())
    if target is not None:
        raise ConfigError(
            f"{path}: users other than root may write to {target}, and it names programs that root runs",
            hint=f"chown root:root {target} && chmod go-w {target}",
        )
