"""The command line ``slurm-affinode``: command groups, error handling, and lazy loading to keep ``--help`` fast."""

from __future__ import annotations

import io
import itertools
import sys
from typing import NoReturn

import click

from slurm_affinode import __version__
from slurm_affinode.base import extras
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import escaped
from slurm_affinode.cli.command import LazyGroup
from slurm_affinode.cli.output import open_standard_streams

_COMMANDS = {
    "setup": ("slurm_affinode.cli.setup:setup", "Set up the machine of the reports (needs --yes)"),
    "demo": ("slurm_affinode.cli.demo:demo", "Analyze an included history and render the report"),
    "ingest": ("slurm_affinode.cli.main:ingest", "Ingest accounting and GPU metrics"),
    "report": ("slurm_affinode.cli.report:report", "Report where GPU-hours went (HTML, JSON, CSV)"),
    "job": ("slurm_affinode.cli.job:job", "Show one job: use of CPUs, memory and GPUs, idle time, advice"),
    "nightly": (
        "slurm_affinode.cli.nightly:nightly",
        "Ingest and render daily, weekly and monthly reports",
    ),
    "exporter": ("slurm_affinode.cli.exporter:exporter", "Export the GPU metrics of this node (HTTP, files)"),
    "export": ("slurm_affinode.cli.export:export", "Write stored GPU metrics as OpenMetrics"),
    "zombies": ("slurm_affinode.cli.main:zombies", "Find, explain and clean up jobs that hold idle GPUs"),
    "keep": ("slurm_affinode.cli.keep:keep", "Exempt one of your jobs from clean-up for a while"),
    "mail": ("slurm_affinode.cli.mail:mail", "Choose whether you get mails about your use of GPUs"),
    "serving": ("slurm_affinode.cli.serving:serving", "Diagnose model servers and triage their crashes"),
    "status": ("slurm_affinode.cli.status:status", "Show suspended jobs and jobs that may be suspended"),
    "suspend": ("slurm_affinode.cli.suspend:suspend", "Suspend a job now"),
    "wake": ("slurm_affinode.cli.suspend:wake", "Resume a suspended job"),
    "images": ("slurm_affinode.cli.images:images", "List, verify and prune checkpoint images"),
    "agent": ("slurm_affinode.cli.agent:agent", "Watch the jobs of this node and suspend idle ones"),
    "prolog": ("slurm_affinode.cli.hooks:prolog", "Announce a job on this node (run by slurmd)"),
    "epilog": ("slurm_affinode.cli.hooks:epilog", "Report the end of a job (run by slurmd)"),
    "trace": ("slurm_affinode.cli.trace:trace", "Analyze a public trace"),
    "whatif": ("slurm_affinode.cli.whatif:whatif", "Simulate the queue: other policies, suspension, GPUs"),
    "predict": ("slurm_affinode.cli.predict:predict", "Predict run time and memory, and advise on limits"),
    "db": ("slurm_affinode.cli.db:db", "Upgrade or inspect the database"),
    "doctor": ("slurm_affinode.cli.doctor:doctor", "Check configuration, database, metrics and accounting"),
    "completion": ("slurm_affinode.cli.completion:completion", "Print the shell completion script"),
}

_EPILOG = """\b
First steps:
  slurm-affinode demo --out out/demo          a report from a synthetic history
  slurm-affinode ingest sacct jobs.txt        your accounting (sacct -P or --json output)
  slurm-affinode ingest gpu history/          your GPU metrics (DCGM, Prometheus, nvidia-smi, CSV, Parquet)
  slurm-affinode report --since 7d --out out  the report of the last week
"""


@click.group(cls=LazyGroup, lazy=_COMMANDS, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="slurm-affinode")
def cli() -> None:
    """Find the idle GPUs of a Slurm cluster, show what they cost, and reclaim them."""


_INGEST = {
    "sacct": (
        "slurm_affinode.cli.ingest_sacct:ingest_sacct",
        "Ingest accounting: sacct text or JSON, or run sacct",
    ),
    "gpu": ("slurm_affinode.cli.ingest_gpu:ingest_gpu", "Ingest GPU metrics: files, directories, Prometheus"),
    "serving": (
        "slurm_affinode.cli.ingest_serving:ingest_serving",
        "Ingest engine metrics: files, Prometheus, scrapes",
    ),
    "allocations": (
        "slurm_affinode.cli.ingest_allocations:ingest_allocations",
        "Ingest the GPUs of jobs, recorded by a prolog or scontrol",
    ),
    "suspensions": (
        "slurm_affinode.cli.ingest_suspensions:ingest_suspensions",
        "Ingest suspensions from the ledgers of the agents",
    ),
}


@click.group(cls=LazyGroup, lazy=_INGEST)
def ingest() -> None:
    """Ingest accounting and GPU metrics. Ingesting the same input twice is a no-op."""


_ZOMBIES = {
    "list": ("slurm_affinode.cli.zombies:list_", "List jobs with idle GPUs, orphans, stuck nodes, misfits"),
    "explain": ("slurm_affinode.cli.zombies:explain", "Show all evidence about one job"),
    "warn": ("slurm_affinode.cli.zombies_clean:warn_", "Mail findings to owners and administrators (needs --yes)"),
    "clean": ("slurm_affinode.cli.zombies_clean:clean", "Cancel, suspend, end, drain, resume (needs --yes)"),
    "policy": ("slurm_affinode.cli.zombies_policy:policy", "Check the policy and replay it over the last week"),
    "history": ("slurm_affinode.cli.zombies_history:history", "Show recorded checks, warnings and actions"),
    "install": ("slurm_affinode.cli.zombies_install:install", "Install the timer or crontab"),
    "signatures": ("slurm_affinode.cli.zombies:signatures", "Check and test the signature file"),
}
_MOVED = {
    "users": "slurm_affinode.cli.usage:zombies_users",
    "queue": "slurm_affinode.cli.usage:zombies_queue",
}
"""Old names of ``report users`` and ``report queue``, kept for one release."""


@click.group(cls=LazyGroup, lazy=_ZOMBIES, hidden=_MOVED)
def zombies() -> None:
    """Find, explain and clean up jobs that hold idle GPUs."""


def _not_utf8(argument: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in argument)


def main() -> NoReturn:
    """Run the command line. Report an error with one line on standard error and an exit status."""
    open_standard_streams()
    try:
        status = cli.main(prog_name="slurm-affinode", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("slurm-affinode: interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        shown = io.StringIO()  # arguments may be names of files of other users
        error.show(shown)
        for line in shown.getvalue().splitlines():
            click.echo(escaped(line), err=True)
        sys.exit(error.exit_code)
    except AffinodeError as error:
        for line in error.lines:
            click.echo(f"slurm-affinode: {line}", err=True)
        if error.hint and len(error.lines) == 1:
            click.echo(f"  {error.hint}", err=True)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:  # an import that is deferred until an option needs it
        words = itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:3])
        missing = extras.explained(error, " ".join(words))
        if missing is None:
            raise
        click.echo(f"slurm-affinode: {missing}", err=True)
        sys.exit(missing.exit_code)
    except OSError as error:  # not handled elsewhere: a full disk, no more file descriptors
        where = f"{error.filename}: " if error.filename else ""
        click.echo(escaped(f"slurm-affinode: {where}{error.strerror or error}"), err=True)
        sys.exit(2)
    except UnicodeEncodeError:
        # Only file names may be invalid UTF-8; any other such argument fails when it is stored or printed.
        invalid = next((argument for argument in sys.argv[1:] if _not_utf8(argument)), None)
        if invalid is None:
            raise
        click.echo(f"slurm-affinode: {invalid!r}: this argument is not UTF-8", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        click.echo("slurm-affinode: interrupted", err=True)
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)
