"""Options of the commands of the node side, which do without what tables and progress need."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from slurm_affinode import config as configuration
from slurm_affinode import process

F = TypeVar("F", bound=Callable[..., Any])


def config_file(function: F) -> F:
    """Add ``--config``; the command gets one argument ``config: Config``."""

    @click.option(
        "--config", "config_path", type=click.Path(path_type=Path), metavar="FILE",
        help=f"Configuration file. [default: {configuration.DEFAULT_PATH}; env {configuration.ENV_CONFIG}]",
    )  # fmt: skip
    @functools.wraps(function)
    def wrapper(*args: Any, config_path: Path | None, **kwargs: Any) -> Any:
        config = configuration.load(config_path)
        process.search_first(config.slurm.bin_dir)
        line = None if config.source is None else configuration.exposed(config.source)
        if line is not None:
            click.echo(f"slurm-affinode: {line}", err=True)
        return function(*args, config=config, **kwargs)

    return wrapper  # type: ignore[return-value]
