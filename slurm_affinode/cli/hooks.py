"""``slurm-affinode prolog`` and ``slurm-affinode epilog``: their help; ``cli.entry`` runs them without this module."""

from __future__ import annotations

from pathlib import Path

import click

from slurm_affinode.agent import hooks
from slurm_affinode.config import DEFAULT_PATH, ENV_CONFIG

_CONFIG = click.option(
    "--config", "config_path", type=click.Path(path_type=Path), metavar="FILE",
    help=f"Configuration file. [default: {DEFAULT_PATH}; env {ENV_CONFIG}]",
)  # fmt: skip

_EPILOG = """\b
In slurm.conf (PrologFlags=Alloc,Contain is advised), and a line of a script in a directory that is there already:
  Prolog=/etc/slurm/prolog.d/*        /usr/local/bin/slurm-affinode prolog || true
  Epilog=/etc/slurm/epilog.d/*        /usr/local/bin/slurm-affinode epilog || true

\b
Exit status: 0, whatever happens, unless agent.strict_hooks is set: then 1 where the agent could not be told.
"""


@click.command(epilog=_EPILOG)
@_CONFIG
def prolog(*, config_path: Path | None) -> int:
    """Tell the agent of a job that begins on this node; for slurmd to call.

    Reads SLURM_JOB_ID, SLURM_JOB_UID and SLURM_JOB_GPUS. Writes dcgm-exporter's job mapping where agent.job_map is set.
    """
    return hooks.main("prolog", config_path)


@click.command(epilog=_EPILOG)
@_CONFIG
def epilog(*, config_path: Path | None) -> int:
    """Tell the agent of a job that has ended on this node; for slurmd to call.

    The images of a job that has ended for good are deleted; those of a job that is requeued are kept.
    """
    return hooks.main("epilog", config_path)
