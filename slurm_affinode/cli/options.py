"""Options and output shared by the commands: configuration, time ranges, Prometheus, tables, JSON, progress."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

import click
from click.shell_completion import CompletionItem

from slurm_affinode.base import config as configuration
from slurm_affinode.base import json_values, process, times
from slurm_affinode.base.config import Config, PrometheusConfig
from slurm_affinode.base.files import give_to_owner
from slurm_affinode.base.text import printable
from slurm_affinode.base.times import parse_span_s, parse_when
from slurm_affinode.base.toml_schema import LONGEST_S
from slurm_affinode.base.urls import checked_url
from slurm_affinode.cli.command import connection_option
from slurm_affinode.metrics.prometheus.server import ENV_PASSWORD, ENV_TOKEN
from slurm_affinode.slurm.times import site_zone

F = TypeVar("F", bound=Callable[..., Any])

_FILE = click.Path(path_type=Path)


dask_option = click.option(
    "--dask", metavar="ADDRESS",
    help="Read stored metrics on workers of the Dask scheduler at ADDRESS, such as tcp://HOST:8786; slurm: on jobs",
)  # fmt: skip


def prometheus_options(function: F) -> F:
    """Add ``--prometheus`` and related options, below ``config_options``.

    The command receives ``config`` with the server in ``config.prometheus``, and ``with_prometheus``: whether
    ``--prometheus`` was given. Configured credentials are sent only to the configured server.
    """

    @connection_option(
        "--prometheus", "url", metavar="URL",
        help="Read GPU metrics from this Prometheus server, such as http://prometheus:9090",
    )  # fmt: skip
    @connection_option(
        "--match", multiple=True, metavar="MATCHER",
        help='Select series by label, such as \'cluster="alpha"\'; may be repeated',
    )  # fmt: skip
    @connection_option(
        "--step", metavar="SPAN",
        help="Query one point per SPAN, such as 30s [default: samples as scraped]",
    )  # fmt: skip
    @connection_option(
        "--token-file", type=_FILE, metavar="FILE", help=f"Authenticate with the bearer token in FILE [env {ENV_TOKEN}]"
    )
    @connection_option(
        "--prometheus-user", "username", metavar="NAME", help="Authenticate as this user (basic authentication)"
    )
    @connection_option(
        "--password-file", type=_FILE, metavar="FILE", help=f"Read the password from FILE [env {ENV_PASSWORD}]"
    )
    @connection_option("--ca-file", type=_FILE, metavar="FILE", help="Verify the server with this CA bundle (PEM)")
    @connection_option("--cert-file", type=_FILE, metavar="FILE", help="Present this client certificate (PEM)")
    @connection_option(
        "--key-file", type=_FILE, metavar="FILE", help="Read its private key from FILE [default: same file]"
    )
    @connection_option("--insecure", is_flag=True, help="Skip verification of TLS certificates")
    @functools.wraps(function)
    def wrapper(*args: Any, config: Config, url: str | None, insecure: bool, **kwargs: Any) -> Any:
        overrides = {name: value for name in _SETTINGS if (value := kwargs.pop(name))}
        if insecure:
            overrides["insecure"] = True
        settings = _settings(config.prometheus, url, overrides)
        return function(*args, config=replace(config, prometheus=settings), with_prometheus=url is not None, **kwargs)

    return wrapper  # type: ignore[return-value]


_SETTINGS = ("match", "step", "token_file", "username", "password_file", "ca_file", "cert_file", "key_file")


def _settings(configured: PrometheusConfig, url: str | None, overrides: dict[str, Any]) -> PrometheusConfig:
    if url is None:
        if overrides and configured.url is None:
            option = f"--{next(iter(overrides)).replace('_', '-').replace('username', 'prometheus-user')}"
            raise click.UsageError(f"{option} is for a Prometheus server: give --prometheus URL, or set prometheus.url")
        return replace(configured, **overrides)
    checked = checked_url(url)
    if configured.url is not None and checked_url(configured.url) == checked:
        return replace(configured, **overrides)
    return PrometheusConfig(url=checked, timeout=configured.timeout, overlap=configured.overlap, **overrides)


class Named(click.Path):
    """A path that is not empty: an empty one (``--state "$UNSET"``) would mean the current directory."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """Convert as ``click.Path``; an empty string is a usage error."""
        if value == "":
            self.fail("it is empty", param, ctx)
        return super().convert(value, param, ctx)


def config_options(function: F) -> F:
    """Add ``--config``, ``--state`` and ``--db``. The command receives ``config: Config``."""

    @connection_option(
        "--config", "config_path", type=Named(path_type=Path), metavar="FILE", is_eager=True,
        help=f"Read this configuration file [default: {configuration.DEFAULT_PATH}; env {configuration.ENV_CONFIG}]",
    )  # fmt: skip
    @connection_option(
        "--state", "state_dir", type=Named(path_type=Path, file_okay=False), metavar="DIR",
        help=f"Set the state directory: SQLite database and GPU metrics [env {configuration.ENV_STATE}]",
    )  # fmt: skip
    @connection_option(
        "--db", "db_url", metavar="URL",
        help=f"Use this database: SQLite, PostgreSQL or MariaDB [env {configuration.ENV_DB}]",
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
                give_to_owner(config.state_dir, configuration.REPORT_ENTRIES)

    return wrapper  # type: ignore[return-value]


def slurm_options(function: F) -> F:
    """Add ``--slurm-backend``, below ``config_options``. The value is in ``config.slurm.backend``."""

    @connection_option(
        "--slurm-backend", type=click.Choice(configuration.SLURM_BACKENDS),
        help="Access Slurm through pyslurm, its commands, or automatically [default: slurm.backend, else auto; "
        f"env {configuration.ENV_SLURM_BACKEND}]",
    )  # fmt: skip
    @functools.wraps(function)
    def wrapper(*args: Any, slurm_backend: str | None, config: configuration.Config, **kwargs: Any) -> Any:
        if slurm_backend is not None:
            config = dataclasses.replace(config, slurm=dataclasses.replace(config.slurm, backend=slurm_backend))
        return function(*args, config=config, **kwargs)

    return wrapper  # type: ignore[return-value]


json_option = click.option("--json", "as_json", is_flag=True, help="Output JSON")


class When(click.ParamType[datetime]):
    """A time as users type it; the value is an aware UTC ``datetime``."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Parse ``value`` relative to the present."""
        if isinstance(value, datetime):
            return value
        return parse_when(str(value), now=datetime.now(UTC), zone=zone(ctx))


_ZONE = f"{__name__}.zone"


def zone(ctx: click.Context | None = None) -> ZoneInfo:
    """Return the time zone of the site from the configuration of this command, else that of this machine."""
    ctx = ctx or click.get_current_context(silent=True)
    if ctx is None:
        return site_zone(None)
    if _ZONE not in ctx.meta:
        path = ctx.params.get("config_path")  # click's sentinel, not a path, if not given
        config = configuration.load(path if isinstance(path, Path) else None)
        ctx.meta[_ZONE] = site_zone(config.cluster.timezone)
    configured: ZoneInfo = ctx.meta[_ZONE]
    return configured


def clock(moment: datetime, *, seconds: bool = False) -> str:
    """Format a time for terminal output, in the zone of ``zone``, which is named only once per output."""
    return times.shown(moment, zone(), seconds=seconds)


class Span(click.ParamType[float]):
    """A time span as users type it; the value is in seconds, above 0, and at least ``least_s``."""

    name = "span"

    def __init__(self, least_s: float = 0.0) -> None:
        self._least_s = least_s

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse ``value``; a plain number is in seconds. An invalid value is a usage error."""
        text = str(value)
        seconds = float(text) if re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", text) else parse_span_s(text)
        if seconds > LONGEST_S:
            self.fail(f"{text} is more than 100 years", param, ctx)
        if seconds <= 0:
            self.fail(f"{text} is not above 0", param, ctx)
        if seconds < self._least_s:
            self.fail(f"{text} is less than {self._least_s:g} s", param, ctx)
        return seconds


class Spans(click.ParamType[tuple[float, ...]]):
    """Time spans separated by commas; the value is in seconds, ascending, each once."""

    name = "spans"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """Parse ``value``; an invalid one is a usage error."""
        if isinstance(value, tuple):
            return value
        return tuple(sorted({Span().convert(text.strip(), param, ctx) for text in str(value).split(",")}))


class LogFile(click.ParamType[tuple[str, Path]]):
    """A log or trace, such as ``swf:FILE``; the value is its kind and path."""

    name = "trace"

    def __init__(self, *kinds: str) -> None:
        """``kinds``: those that are accepted."""
        self._kinds = kinds

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Path]:
        """Parse ``value``; another kind is a usage error."""
        kind, _, name = str(value).partition(":")
        if kind not in self._kinds or not name:
            self.fail(f"{value!r} is not KIND:PATH with one of the kinds {', '.join(self._kinds)}", param, ctx)
        return kind, Path(name)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Let the shell complete the name of the file."""
        return [CompletionItem(incomplete, type="file")]


class NumberInRange(click.FloatRange):
    """A number in a range; NaN is rejected, which ``click.FloatRange`` accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse ``value``; an invalid value is a usage error."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def print_json(value: Any) -> None:
    """Write ``value`` as JSON to standard output; times are in ISO 8601 with ``Z``.

    Characters that a terminal would interpret or not show are escaped, and so are those that are not UTF-8.
    """
    text = json_values.shown(json.dumps(value, indent=2, default=_json_default, ensure_ascii=False))
    click.echo(text.encode("utf-8", "backslashreplace").decode("utf-8"))  # \udc80 is an escape of JSON too


def _json_default(value: Any) -> Any:
    if isinstance(value, datetime):
        return times.utc(value, "auto")
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
    minor: Sequence[str] = (),
    wide: bool | None = None,
) -> None:
    """Print a table. Cells are plain text, never markup, so that a hostile name is shown literally.

    Control characters in cells are replaced: a job name must not control the terminal. Where a table does not fit,
    headings and cells are broken between words, except for the cells of columns ``right`` (numbers) and ``whole``.
    If it does not fit then, the first of the columns ``minor`` are left out until it does; a line below names them.
    Only without them, cells of all columns are broken between words, and at last words, those of sentences first. No
    number is broken: if that is not enough, lines are longer than the terminal. ``wide``: print every column, and
    break no line; ``None``: the command has no option --wide.
    """
    from rich.console import Console  # noqa: PLC0415 - what answers in JSON starts in half the time without rich
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    usual = None if sys.stdout.isatty() else 160
    console = Console(file=sys.stdout, soft_wrap=False, width=_UNLIMITED if wide else usual)
    shown = None if title is None else escape(printable(title))
    table = Table(title=shown, title_justify="left", box=None, pad_edge=False, header_style="bold")
    cells = [[printable("" if cell is None else str(cell)) for cell in row] for row in rows]
    terminal = console.width
    layout = _Layout.of(columns, cells, terminal, right=right, whole=whole, minor=minor)
    console.width = max(terminal, _line(layout.widths))
    for place, size in layout.widths.items():
        column = columns[place]
        heading = column if size >= len(column) else column.replace(" ", "\n")
        table.add_column(
            heading, width=size, overflow="fold", justify="right" if column in right else "left",
            no_wrap=place in layout.unbreakable,
        )  # fmt: skip
    for row in cells:
        table.add_row(*(Text(row[place]) for place in layout.widths))
    console.print(table)
    if layout.left_out:
        console.width = terminal
        note = left_out_note(terminal, layout.left_out, "--json" if wide is None else "--wide")
        console.print(Text(printable(note)), highlight=False)


def left_out_note(width: int, columns: Sequence[str], option: str) -> str:
    """Return the line about the columns that a terminal is too narrow for; ``option``: how to see them."""
    return f"Not shown on {width} columns: {', '.join(columns)} ({option} has them)"


_UNLIMITED = 10_000
"""Characters of a line that is not broken."""
_LONGEST_WORD = 40
"""Characters of a word that is not broken, such as the name of a node with a port."""
_SPACES = 3
"""Spaces of a cell that is a sentence, also in a column of numbers: ``1d 3h 15m 20s`` is broken, ``3h 15m 20s`` not."""
_LEAST_TEXT = 12
"""Characters of a column of text where words are broken, too."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """Columns of a table for a terminal."""

    widths: Mapping[int, int]
    """Place of each column that is shown -> its width."""
    left_out: Sequence[str]
    unbreakable: Collection[int]
    """Places of columns whose cells are not broken between words."""

    @classmethod
    def of(
        cls, columns: Sequence[str], cells: Sequence[Sequence[str]], width: int, *, right: Collection[str],
        whole: Collection[str], minor: Sequence[str],
    ) -> _Layout:  # fmt: skip
        """Return the layout for a terminal of ``width`` characters; see ``print_table``."""
        from rich.cells import cell_len  # noqa: PLC0415 - see print_table

        texts = [{row[place] for row in cells} for place in range(len(columns))]
        longest = [max(map(cell_len, values), default=0) for values in texts]
        widths = {place: max(cell_len(column), longest[place]) for place, column in enumerate(columns)}
        if _line(widths) <= width:
            return cls(widths, [], frozenset())
        heads = [_longest_word([column]) for column in columns]
        words = [_longest_word(values) for values in texts]
        sentences = {place for place, values in enumerate(texts) if any(text.count(" ") >= _SPACES for text in values)}
        unbreakable = {
            place for place, column in enumerate(columns) if column in {*right, *whole} and place not in sentences
        }
        least = {
            place: max(head, longest[place] if place in unbreakable else min(words[place], _LONGEST_WORD))
            for place, head in enumerate(heads)
        }
        left_out = _leave_out(least, columns, minor, width)
        if _line(least) > width:
            unbreakable = set()
            least = {place: max(heads[place], min(words[place], size)) for place, size in least.items()}
        for place in sorted(least, key=lambda place: (place in sentences, place), reverse=True):
            if (excess := _line(least) - width) > 0 and columns[place] not in right:
                least[place] = max(heads[place], min(least[place], _LEAST_TEXT), least[place] - excess)
        most = {place: max(heads[place], longest[place]) for place in least}
        return cls(_fitted(least, most, width), left_out, frozenset(unbreakable))


def _leave_out(least: dict[int, int], columns: Sequence[str], minor: Sequence[str], width: int) -> list[str]:
    """Remove the first of the columns ``minor`` from ``least`` (place -> width) until the others fit; return them."""
    left_out: list[str] = []
    for column in minor:
        if _line(least) <= width:
            break
        if column in columns:
            del least[columns.index(column)]
            left_out.append(column)
    return left_out


def _fitted(least: Mapping[int, int], most: Mapping[int, int], width: int) -> dict[int, int]:
    """Return widths between these that fit into ``width`` if possible: the widest columns give way first."""
    widths = dict(most)
    while _line(widths) > width and (longer := [place for place in widths if widths[place] > least[place]]):
        widths[max(longer, key=widths.__getitem__)] -= 1
    return widths


def _longest_word(texts: Iterable[str]) -> int:
    from rich.cells import cell_len  # noqa: PLC0415 - see print_table

    return max(map(cell_len, {word for text in texts for word in text.split()}), default=0)


def _line(widths: Mapping[int, int]) -> int:
    """Return the length of a line with two spaces between columns."""
    return sum(width + 2 for width in widths.values()) - 2


def echo(*lines: object) -> None:
    """Write lines, without any an empty one, to standard output. Control characters in them are replaced."""
    for line in lines or ("",):
        click.echo(printable(str(line)))


def warn(message: str) -> None:
    """Write one line to standard error. Control characters in it are replaced."""
    click.echo(printable(message), err=True)


def warn_if_exposed(path: Path | None) -> None:
    """Warn if a configuration or policy file is writable by everyone."""
    line = None if path is None else configuration.exposed(path)
    if line is not None:
        warn(f"slurm-affinode: {line}")


@contextlib.contextmanager
def progress(
    description: str, total: int | None, *, quiet: bool = False, of_bytes: bool = False, of_time: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error if it is a terminal; yield a function that advances it.

    ``of_bytes``: the unit is bytes, shown as kB, MB or GB; ``of_time``: the unit is milliseconds of samples, shown as
    a percentage.
    """
    from rich import progress as parts  # noqa: PLC0415 - see print_table
    from rich.console import Console  # noqa: PLC0415
    from rich.markup import escape  # noqa: PLC0415

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
        task = bar.add_task(escape(printable(description)), total=total)
        yield lambda step=1: bar.advance(task, step)  # type: ignore[misc]


@contextlib.contextmanager
def stages(*, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show the current step on standard error if it is a terminal; yield a function that sets the step."""
    from rich.console import Console  # noqa: PLC0415 - see print_table
    from rich.markup import escape  # noqa: PLC0415

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as status:
        yield lambda message: status.update(escape(printable(message)))
