"""``slurm-affinode prolog`` and ``epilog``: their help texts. ``cli.entry`` runs the hooks without this module."""

from __future__ import annotations

from pathlib import Path

import click

from slurm_affinode.agent import hooks
from slurm_affinode.base.config import DEFAULT_PATH, ENV_CONFIG
from slurm_affinode.cli.command import command

_CONFIG = click.option(
    "--config", "config_path", type=click.Path(path_type=Path), metavar="FILE",
    help=f"Read this configuration file [default: {DEFAULT_PATH}; env {ENV_CONFIG}]",
)  # fmt: skip

_EPILOG = """\b
In slurm.conf (PrologFlags=Alloc,Contain is advised), and a line of a script in a directory that is there already:
  Prolog=/etc/slurm/prolog.d/*        /usr/local/bin/slurm-affinode prolog || true
  Epilog=/etc/slurm/epilog.d/*        /usr/local/bin/slurm-affinode epilog || true

\b
Exit status: always 0, unless agent.strict_hooks is set: then 1 if the agent does not respond.
"""


@command(epilog=_EPILOG)
@_CONFIG
def prolog(*, config_path: Path | None) -> int:
    """Announce a job on this node to the agent; run by slurmd.

    Reads SLURM_JOB_ID, SLURM_JOB_UID and SLURM_JOB_GPUS. Writes dcgm-exporter's job mapping if agent.job_map is
    set.
    """
    return hooks.main("prolog", config_path)


@command(epilog=_EPILOG)
@_CONFIG
def epilog(*, config_path: Path | None) -> int:
    """Report the end of a job on this node to the agent; run by slurmd.

    The images of a job that has ended for good are deleted; those of a requeued job are kept.
    """
    return hooks.main("epilog", config_path)
