"""Options and output shared by the commands: configuration, time ranges, tables, JSON, progress."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

import click

from slurm_affinode import config as configuration
from slurm_affinode import process, zones
from slurm_affinode.configvalues import LONGEST_S
from slurm_affinode.files import give_to_owner
from slurm_affinode.slurm.times import site_zone
from slurm_affinode.timespec import parse_span_s, parse_when

F = TypeVar("F", bound=Callable[..., Any])
_OURS = ("history", "reports", "nightly.lock")
"""What commands make in the state directory; SQLite's file is the store's matter, images of jobs are root's."""


class Named(click.Path):
    """A path that has a name: an empty one (``--state "$UNSET"``) would be the current directory."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """As ``click.Path``; an empty text is a usage error."""
        if value == "":
            self.fail("it is empty", param, ctx)
        return super().convert(value, param, ctx)


def config_options(function: F) -> F:
    """Add ``--config``, ``--state`` and ``--db``; the command gets one argument ``config: Config``."""

    @click.option(
        "--config", "config_path", type=Named(path_type=Path), metavar="FILE", is_eager=True,
        help=f"Configuration file. [default: {configuration.DEFAULT_PATH}; env {configuration.ENV_CONFIG}]",
    )  # fmt: skip
    @click.option(
        "--state", "state_dir", type=Named(path_type=Path, file_okay=False), metavar="DIR",
        help=f"State directory: the SQLite store and the GPU history. [env {configuration.ENV_STATE}]",
    )  # fmt: skip
    @click.option(
        "--db", "db_url", metavar="URL",
        help=f"SQLAlchemy URL of the store (SQLite, PostgreSQL, MariaDB). [env {configuration.ENV_DB}]",
    )  # fmt: skip
    @functools.wraps(function)
    def wrapper(*args: Any, config_path: Path | None, state_dir: Path | None, db_url: str | None, **kwargs: Any) -> Any:
        config = configuration.load(config_path, state_dir=state_dir, db=db_url)
        process.search_first(config.slurm.bin_dir)
        warn_if_exposed(config.source)
        try:
            return function(*args, config=config, **kwargs)
        finally:
            if os.geteuid() == 0:
                give_to_owner(config.state_dir, _OURS)

    return wrapper  # type: ignore[return-value]


def slurm_options(function: F) -> F:
    """Add ``--slurm-backend``; goes below ``config_options``, and is found in ``config.slurm.backend``."""

    @click.option(
        "--slurm-backend", type=click.Choice(configuration.SLURM_BACKENDS),
        help="How Slurm is spoken to: pyslurm, its own commands, or auto: pyslurm where it is there for the site's "
        f"release. [default: the key slurm.backend, else auto; env {configuration.ENV_SLURM_BACKEND}]",
    )  # fmt: skip
    @functools.wraps(function)
    def wrapper(*args: Any, slurm_backend: str | None, config: configuration.Config, **kwargs: Any) -> Any:
        if slurm_backend is not None:
            config = dataclasses.replace(config, slurm=dataclasses.replace(config.slurm, backend=slurm_backend))
        return function(*args, config=config, **kwargs)

    return wrapper  # type: ignore[return-value]


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines in place of the table.")


def intake_options(function: F) -> F:
    """Add what every ``ingest`` has: ``--dry-run``, and ``--problems`` as ``shown``, for ``warn_of_problems``."""
    dry_run = click.option("--dry-run", is_flag=True, help="Read and report, store nothing.")
    problems = click.option(
        "--problems", "shown", type=click.IntRange(0), default=10, show_default=True, metavar="N",
        help="How many problems of an input to print.",
    )  # fmt: skip
    return dry_run(problems(function))


class When(click.ParamType[datetime]):
    """A time as people type it; the value is an aware UTC ``datetime``."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Parse ``value`` against the present; a mistake is a usage error."""
        if isinstance(value, datetime):
            return value
        return parse_when(str(value), now=datetime.now(UTC), zone=zone(ctx))


_ZONE = f"{__name__}.zone"


def zone(ctx: click.Context | None = None) -> ZoneInfo:
    """The zone of the site, by the configuration that the command line names, else that of this machine."""
    ctx = ctx or click.get_current_context(silent=True)
    if ctx is None:
        return site_zone(None)
    if _ZONE not in ctx.meta:
        path = ctx.params.get("config_path")  # no path but a mark of click's where it was not given
        config = configuration.load(path if isinstance(path, Path) else None)
        ctx.meta[_ZONE] = site_zone(config.cluster.timezone)
    found: ZoneInfo = ctx.meta[_ZONE]
    return found


def clock(moment: datetime, *, seconds: bool = False) -> str:
    """A time as tables and messages of a terminal show it; the zone is named once: see ``zone``."""
    return zones.shown(moment, zone(), seconds=seconds)


class Span(click.ParamType[float]):
    """A span of time as people type it; the value is in seconds and at least ``least_s``, where that is above 0."""

    name = "span"

    def __init__(self, least_s: float = 0.0) -> None:
        self._least_s = least_s

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse ``value``; a plain number is seconds."""
        text = str(value)
        seconds = float(text) if re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", text) else parse_span_s(text)
        if seconds > LONGEST_S:
            self.fail(f"{text} is more than 100 years", param, ctx)
        if seconds <= 0:
            self.fail(f"{text} is not above 0", param, ctx)
        if seconds < self._least_s:
            self.fail(f"{text} is less than {self._least_s:g} s", param, ctx)
        return seconds


class Number(click.FloatRange):
    """A number in a range; nan is in none, though it is beyond no limit of it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse ``value``; a mistake is a usage error."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def print_json(value: Any) -> None:
    """Write ``value`` as JSON on standard output; datetimes in ISO 8601 with ``Z``.

    What could drive a terminal or cannot be written as UTF-8 is escaped, as JSON itself does below U+0020.
    """
    text = json.dumps(value, indent=2, default=_json_default, ensure_ascii=False)
    click.echo(_UNSHOWN.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


_UNSHOWN = re.compile("[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
"""Controls from U+007F on, what changes the direction of text or is not seen, halves of surrogate pairs."""


def _json_default(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    right: Sequence[str] = (),
) -> None:
    """Print a table for people; cells are text, never markup, so that a hostile name is shown as it is.

    Control characters of cells are replaced: a job name must not drive the terminal.
    """
    from rich.console import Console  # noqa: PLC0415 - what answers in JSON starts in half the time without rich
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable("" if cell is None else str(cell))) for cell in row))
    console = Console(file=sys.stdout, soft_wrap=False, width=None if sys.stdout.isatty() else 160)
    console.print(table)


def printable(text: str) -> str:
    """``text`` with control characters replaced by the replacement character."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def warn(message: str) -> None:
    """Write one line on standard error."""
    click.echo(printable(message), err=True)


def warn_if_exposed(path: Path | None) -> None:
    """Say so where everybody may write to a file that decides what is done."""
    line = None if path is None else configuration.exposed(path)
    if line is not None:
        warn(f"slurm-affinode: {line}")


def warn_of_problems(source: str, lines: Iterable[str], count: int, shown: int) -> None:
    """Say the first ``shown`` problems of an input, and how many of its ``count`` are left out."""
    for line in itertools.islice(lines, shown):
        warn(line)
        count -= 1
    if count > 0:
        warn(f"{source}: {count:,} more problems (--problems N prints more)")


@contextlib.contextmanager
def progress(
    description: str, total: int | None, *, quiet: bool = False, of_bytes: bool = False, of_time: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error while a terminal is there; yield a function that advances it.

    ``of_bytes``: what is counted are bytes, shown as kB, MB or GB; ``of_time``: milliseconds of history, shown as a
    share.
    """
    from rich import progress as parts  # noqa: PLC0415 - see print_table
    from rich.console import Console  # noqa: PLC0415

    counted = (
        parts.DownloadColumn() if of_bytes else parts.TaskProgressColumn() if of_time else parts.MofNCompleteColumn()
    )
    console = Console(stderr=True)
    columns = (
        parts.SpinnerColumn(),
        parts.TextColumn("{task.description}"),
        parts.BarColumn(),
        counted,
        parts.TimeRemainingColumn(),
    )
    with parts.Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(description, total=total)
        yield lambda step=1: bar.advance(task, step)  # type: ignore[misc]


@contextlib.contextmanager
def stages(*, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show on standard error, while a terminal is there, what is being done; yield a function that is told it."""
    from rich.console import Console  # noqa: PLC0415 - see print_table

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as status:
        yield lambda message: status.update(printable(message))
