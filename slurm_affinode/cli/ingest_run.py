"""Options and output that all commands of ``slurm-affinode ingest`` share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import click

from slurm_affinode.base.config import Config
from slurm_affinode.cli.options import (
    When,
    config_options,
    echo,
    json_option,
    print_table,
    warn,
)
from slurm_affinode.db.repository import Repository
from slurm_affinode.slurm import times

F = TypeVar("F", bound=Callable[..., Any])
Option = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class InputOutcome:
    """Records read from one input, and stored."""

    source: str
    figures: Sequence[int | None]
    """``None``: nothing was stored (a dry run)."""
    problems: Iterable[str]
    """Lines, each with its place."""
    problem_count: int
    remarks: Iterable[str] = ()
    """Lines that are printed after the problems."""


@dataclass(frozen=True, slots=True)
class IngestRun:
    """The options of all ``ingest`` commands."""

    config: Config
    dry_run: bool
    shown: int
    """Problems printed for each input."""
    as_json: bool

    def store(self) -> AbstractContextManager[Repository | None]:
        """Open the configured database, and create it if necessary; ``None`` in a dry run."""
        return nullcontext() if self.dry_run else Repository.open(self.config.db_url)

    def zone(self, timezone: str | None) -> str:
        """Return the zone of times without an offset: ``--timezone``, else the configured or local one."""
        return times.zone_name(timezone or self.config.cluster.timezone)

    def warn_of_problems(self, source: str, lines: Iterable[str], count: int) -> None:
        """Print the first problems of an input, and the number of the ``count`` that are omitted."""
        for line in islice(lines, self.shown):
            warn(line)
            count -= 1
        if count > 0:
            warn(f"{source}: {count:,} more problems (--problems N prints more)")

    def print_outcomes(self, columns: Sequence[str], outcomes: Sequence[InputOutcome]) -> None:
        """Print the problems of all inputs, and a table with the figures of each; the first column is its name."""
        for outcome in outcomes:
            self.warn_of_problems(outcome.source, outcome.problems, outcome.problem_count)
            for remark in outcome.remarks:
                warn(remark)
        rows = [
            [outcome.source, *("-" if value is None else f"{value:,}" for value in outcome.figures)]
            for outcome in outcomes
        ]
        if rows:
            print_table(columns, rows, right=columns[1:])
            self.say_dry()

    def say_dry(self) -> None:
        """Print that nothing was stored, in a dry run."""
        if self.dry_run:
            echo("dry run: nothing was stored")


def ingest_options(*own_options: Option, connection: Sequence[Option] = ()) -> Callable[[F], F]:
    """Add the options of all ``ingest`` commands; the command receives them in ``run: IngestRun``.

    ``own``: options that are listed before ``--json``; ``connection``: options that are added below ``config_options``.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(*, config: Config, dry_run: bool, shown: int, as_json: bool, **kwargs: Any) -> Any:
            return function(run=IngestRun(config, dry_run, shown, as_json), **kwargs)

        decorated: Callable[..., Any] = wrapper
        for option in reversed((*_SHARED, *own_options, json_option, config_options, *connection)):
            decorated = option(decorated)
        return decorated  # type: ignore[return-value]

    return decorate


_SHARED: tuple[Option, ...] = (
    click.option("--dry-run", is_flag=True, help="Read and report, store nothing"),
    click.option(
        "--problems", "shown", type=click.IntRange(0), default=10, show_default=True, metavar="N",
        help="Print at most N problems per input",
    ),
)  # fmt: skip


AGAIN = click.option("--again", is_flag=True, help="Also read files that were ingested before and are unchanged")


PROMETHEUS_PERIOD: tuple[Option, ...] = (
    click.option(
        "--since", type=When(), metavar="TIME",
        help="Query Prometheus from TIME, such as 7d (ago) [default: end of the last ingest, else 7d]",
    ),
    click.option("--until", type=When(), default="now", metavar="TIME", help="Query Prometheus until before TIME"),
)  # fmt: skip


def cluster_option(text: str) -> Option:
    return click.option("--cluster", metavar="NAME", help=text)


def timezone_option(which: str) -> Option:
    return click.option(
        "--timezone", metavar="ZONE", help=f"Set the IANA zone of times {which} [default: configuration, local]"
    )


def strict_option(unit: str) -> Option:
    return click.option("--strict", is_flag=True, help=f"Reject {unit}")
