"""The command ``slurm-affinode``: groups, error handling, lazy loading so that ``--help`` stays quick."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import click

from slurm_affinode import __version__
from slurm_affinode.cli.streams import open_standard_streams
from slurm_affinode.errors import AffinodeError


class LazyGroup(click.Group):
    """A group whose commands are imported when one is called.

    ``lazy`` maps a command name to ``module:attribute`` and the one line shown in the list of commands.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = dict(lazy or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table: the order in which a person meets them."""
        return [*self._lazy, *(name for name in super().list_commands(ctx) if name not in self._lazy)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command."""
        entry = self._lazy.get(cmd_name)
        if entry is None:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = entry[0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry[0]} is not a command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table, without importing any."""
        rows = [(name, self._lazy[name][1]) for name in self.list_commands(ctx) if name in self._lazy]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


_COMMANDS = {
    "demo": ("slurm_affinode.cli.demo:demo", "Analyse a recorded history that comes with it, render the report."),
    "ingest": ("slurm_affinode.cli.main:ingest", "Load accounting and GPU history (idempotent)."),
    "report": ("slurm_affinode.cli.report:report", "Say where the GPU-hours went: HTML, JSON, CSV."),
    "nightly": (
        "slurm_affinode.cli.nightly:nightly",
        "For cron: take in what is new, render day, week and month.",
    ),
    "exporter": ("slurm_affinode.cli.exporter:exporter", "On a node: sample its GPUs; metrics over HTTP, files."),
    "export": ("slurm_affinode.cli.export:export", "Write the GPU history for other programs (OpenMetrics)."),
    "zombies": ("slurm_affinode.cli.zombies:zombies", "Who holds GPUs without using them: find, explain, clean up."),
    "keep": ("slurm_affinode.cli.zombie_admin:keep", "Ask that an idle job of yours be left alone for a time."),
    "status": ("slurm_affinode.cli.status:status", "Jobs that may be suspended, and those that are."),
    "suspend": ("slurm_affinode.cli.suspend:suspend", "Suspend a job now."),
    "wake": ("slurm_affinode.cli.suspend:wake", "Let a suspended job go on."),
    "images": ("slurm_affinode.cli.images:images", "List, verify and prune the images of suspended jobs."),
    "agent": ("slurm_affinode.cli.agent:agent", "Watch the jobs of this node; suspend the idle ones."),
    "prolog": ("slurm_affinode.cli.hooks:prolog", "For slurmd: a job begins on this node."),
    "epilog": ("slurm_affinode.cli.hooks:epilog", "For slurmd: a job has ended on this node."),
    "trace": ("slurm_affinode.cli.trace:trace", "Analyse a public trace."),
    "db": ("slurm_affinode.cli.db:db", "Upgrade or inspect the relational store."),
    "doctor": ("slurm_affinode.cli.doctor:doctor", "Check configuration, store, history and accounting."),
    "completion": ("slurm_affinode.cli.completion:completion", "Print the shell completion script."),
}

_EPILOG = """\b
First steps:
  slurm-affinode demo --out out/demo          a report from a recorded history
  slurm-affinode ingest sacct jobs.txt        your accounting (sacct -P or --json output)
  slurm-affinode ingest gpu history/          your GPU history (DCGM, Prometheus, nvidia-smi, CSV, Parquet)
  slurm-affinode report --since 7d --out out  the report of the last week
"""


@click.group(cls=LazyGroup, lazy=_COMMANDS, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="slurm-affinode")
def cli() -> None:
    """Find the idle GPUs of a Slurm cluster, show what they cost, and take them back."""


_INGEST = {
    "sacct": (
        "slurm_affinode.cli.ingest_sacct:ingest_sacct",
        "Accounting: sacct text or JSON, or run sacct.",
    ),
    "gpu": ("slurm_affinode.cli.ingest_gpu:ingest_gpu", "GPU history: files, directories, globs, Prometheus."),
    "allocations": (
        "slurm_affinode.cli.ingest_allocations:ingest_allocations",
        "Which GPUs a job had, as recorded by a prolog or scontrol.",
    ),
    "suspensions": (
        "slurm_affinode.cli.ingest_suspensions:ingest_suspensions",
        "Suspended jobs: the ledgers of the agents.",
    ),
}


@click.group(cls=LazyGroup, lazy=_INGEST)
def ingest() -> None:
    """Load history into the store. The same input twice changes nothing."""


def _not_utf8(argument: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in argument)


def main() -> NoReturn:
    """Run the command line; a user's mistake ends in one line on standard error and an exit status."""
    open_standard_streams()
    try:
        status = cli.main(prog_name="slurm-affinode", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("slurm-affinode: interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except AffinodeError as error:
        click.echo(f"slurm-affinode: {error}", err=True)
        if error.hint:
            click.echo(f"  {error.hint}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:  # what no adapter has translated: a full disk, no more file descriptors
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"slurm-affinode: {where}{error.strerror or error}", err=True)
        sys.exit(2)
    except UnicodeEncodeError:
        # Only names of files may be bytes that are no text; any other argument ends where it is stored or printed.
        odd = next((one for one in sys.argv[1:] if _not_utf8(one)), None)
        if odd is None:
            raise
        click.echo(f"slurm-affinode: {odd!r}: this argument is not UTF-8", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        click.echo("slurm-affinode: interrupted", err=True)
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)
