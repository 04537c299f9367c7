"""``slurm-affinode mail``: whether a user gets mails about the use of GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import click

from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.cli.command import command
from slurm_affinode.cli.options import config_options, echo, json_option, print_json
from slurm_affinode.pipeline import mail_opt_out

_EPILOG = """\b
Examples:
  slurm-affinode mail            show whether you get these mails
  slurm-affinode mail off        get no more of them
  slurm-affinode mail on         get them again

Warnings before one of your jobs is canceled or suspended are always sent.

\b
Exit status: 0 done, or nothing to do; 2 the site has no such choice, or its directory cannot be used.
"""


@command(epilog=_EPILOG)
@click.argument("state", type=click.Choice(["on", "off"]), required=False)
@json_option
@config_options
def mail(*, config: Config, state: str | None, as_json: bool) -> None:
    """Choose whether you get mails about your use of GPUs.

    The nightly run mails your use of GPUs in a day, week or month, if the site has configured that.
    """
    directory, uid = _directory(config), os.getuid()
    if state == "off":
        mail_opt_out.opt_out(directory, uid)
    elif state == "on":
        mail_opt_out.opt_in(directory, uid)
    off = mail_opt_out.is_opted_out(directory, uid)
    if as_json:
        print_json({"mails": not off})
    else:
        echo("You get no mails about your use of GPUs." if off else "You get mails about your use of GPUs.")


def _directory(config: Config) -> Path:
    directory = config.nightly.mail.opt_out
    if directory is None:
        raise AffinodeError(
            "this site has no choice of mails: nightly.mail.opt_out is not set", hint="ask the administrator"
        )
    return directory
