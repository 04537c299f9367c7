"""Options of the commands that run on nodes. Imports neither tables nor progress bars."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from slurm_affinode.agent.routing import Reach
from slurm_affinode.base import config as configuration
from slurm_affinode.base import process
from slurm_affinode.base.config import Config
from slurm_affinode.cli.command import connection_option
from slurm_affinode.cli.options import warn
from slurm_affinode.slurm.client import open_client

F = TypeVar("F", bound=Callable[..., Any])


def config_file(function: F) -> F:
    """Add ``--config``. The command receives ``config: Config``."""

    @connection_option(
        "--config", "config_path", type=click.Path(path_type=Path), metavar="FILE",
        help=f"Read this configuration file [default: {configuration.DEFAULT_PATH}; env {configuration.ENV_CONFIG}]",
    )  # fmt: skip
    @functools.wraps(function)
    def wrapper(*args: Any, config_path: Path | None, **kwargs: Any) -> Any:
        config = configuration.load(config_path)
        process.search_first(config.slurm.bin_dir)
        line = None if config.source is None else configuration.exposed(config.source)
        if line is not None:
            warn(f"slurm-affinode: {line}")
        return function(*args, config=config, **kwargs)

    return wrapper  # type: ignore[return-value]


@contextlib.contextmanager
def reach_of(config: Config) -> Iterator[Reach]:
    """Yield the connections to the agents for one command."""
    reach = Reach(config, functools.partial(open_client, config.slurm.backend))  # type: ignore[arg-type]
    try:
        yield reach
    finally:
        reach.close()
