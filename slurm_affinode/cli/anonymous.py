"""Options of commands that make reports: pseudonyms in place of names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from slurm_affinode.base.config import Config
from slurm_affinode.pipeline import anonymity

F = TypeVar("F", bound=Callable[..., Any])

_ANONYMOUS = (
    click.option(
        "--pseudonym-key", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
        help="Key of the pseudonyms, at least 16 bytes [default: pseudonyms.key in the state directory]",
    ),
    click.option("--anonymous-nodes", is_flag=True, help="Replace nodes as well; implies --anonymous"),
    click.option("--anonymous", is_flag=True, help="Replace users, accounts and names of jobs by stable pseudonyms"),
)  # fmt: skip


def anonymous_options(function: F) -> F:
    """Add ``--anonymous``, ``--anonymous-nodes`` and ``--pseudonym-key``; see ``pseudonyms``."""
    for option in _ANONYMOUS:
        function = option(function)
    return function


def pseudonyms(
    config: Config, *, anonymous: bool, anonymous_nodes: bool, pseudonym_key: Path | None
) -> anonymity.Pseudonyms | None:
    """Return the ``Pseudonyms`` of the options, or ``None`` for a report with names. Raises ``AffinodeError``."""
    if not (anonymous or anonymous_nodes):
        if pseudonym_key is not None:
            raise click.UsageError("--pseudonym-key is for --anonymous")
        return None
    key = anonymity.site_key(config.state_dir) if pseudonym_key is None else anonymity.read_key(pseudonym_key)
    return anonymity.Pseudonyms(key, nodes=anonymous_nodes)
