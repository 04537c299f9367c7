"""Commands and groups with options in sections: the command's own ones first, connection options last."""

from __future__ import annotations

import difflib
import gc
import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from slurm_affinode.base import extras
from slurm_affinode.base.garbage import without_collection

_MAIN_SECTION = "Options"
F = TypeVar("F", bound=Callable[..., Any])


class ConnectionOption(click.Option):
    """An option about configuration, database, Slurm or Prometheus; ``--help`` lists them in a section of their own."""

    section = "Connection options"


class Command(click.Command):
    """A command that lists its options by section."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section for each kind of option, the command's own options first."""
        _format_options(self, ctx, formatter)


class SectionGroup(click.Group):
    """A group that lists its options by section and whose commands are ``Command``."""

    command_class = Command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by section, then the commands."""
        _format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name; the error of an unknown one names similar ones."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            similar = difflib.get_close_matches(args[0], self.list_commands(ctx)) if args else []
            if not similar:
                raise
            names = " or ".join(map(repr, similar))
            raise click.UsageError(f"{error.message} Did you mean {names}?", ctx) from None


def _format_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    sections: dict[str, list[tuple[str, str]]] = {_MAIN_SECTION: []}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
        if record is not None:
            sections.setdefault(getattr(parameter, "section", _MAIN_SECTION), []).append(record)
    for title, records in sections.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


def command(name: str | None = None, **attributes: Any) -> Callable[[Callable[..., Any]], Command]:
    """As ``click.command``, for a ``Command``."""
    return click.command(name, cls=Command, **attributes)


def group(name: str | None = None, **attributes: Any) -> Callable[[Callable[..., Any]], SectionGroup]:
    """As ``click.group``, for a ``SectionGroup``."""
    return click.group(name, cls=SectionGroup, **attributes)


def connection_option(*names: str, **attributes: Any) -> Callable[[F], F]:
    """As ``click.option``, for a ``ConnectionOption``."""
    return click.option(*names, cls=ConnectionOption, **attributes)


class LazyGroup(SectionGroup):
    """A group that imports a command when it is called.

    ``lazy`` maps a command name to ``module:attribute`` and its line in the list of commands. ``hidden`` maps further
    names, which are not listed, to ``module:attribute``.
    """

    def __init__(
        self,
        *args: Any,
        lazy: Mapping[str, tuple[str, str]] | None = None,
        hidden: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = dict(lazy or {})
        self._hidden = dict(hidden or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the listed commands, in the order of the table."""
        return [*self._lazy, *(name for name in super().list_commands(ctx) if name not in self._lazy)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command. Raises ``ExtraMissingError`` if it needs an extra that is not installed."""
        place = self._lazy[cmd_name][0] if cmd_name in self._lazy else self._hidden.get(cmd_name)
        if place is None:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = place.partition(":")
        try:
            with without_collection():
                loaded = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            shown = extras.explained(error, f"{ctx.command_path} {cmd_name}".partition(" ")[2])
            if shown is None:
                raise
            if ctx.resilient_parsing:  # a shell asks for completions, and shows what is written to standard error
                return None
            raise shown from None
        gc.freeze()  # modules last as long as the process: no collection has to look at them
        if not isinstance(loaded, click.Command):
            raise TypeError(f"{place} is not a command")
        return loaded

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table, without importing any."""
        rows = [(name, self._lazy[name][1]) for name in self.list_commands(ctx) if name in self._lazy]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)
