"""Values of the configuration: conversion from TOML to the declared types of its sections, with their checks.

A type is declared with its checks, each a ``Check``: ``Annotated[float, within(0, 1)]``.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar
from zoneinfo import ZoneInfo

from slurm_affinode.base.errors import AffinodeError, ConfigError
from slurm_affinode.base.sizes import parse_size
from slurm_affinode.base.times import parse_span_s

LONGEST_S = 100 * 365 * 86400.0
"""Maximum span of time: no measurement is older, and longer spans exceed the range of ``datetime``."""
_MAY_BE_EMPTY = ("agent.listen",)

T = TypeVar("T")
Check = Callable[[str, str, Any], None]
"""Raises ``ConfigError`` for an invalid value; takes the name of the file, that of the key, and a value of its type."""


def build(cls: type[T], data: Mapping[str, Any], where: str, at: tuple[str, ...] = ()) -> T:
    """Build a section (a dataclass) from a table. Raises ``ConfigError`` with ``where`` and the key below ``at``.

    Rejects unknown keys, values of another type, empty strings, numbers that are not finite (nan, inf), and values that
    fail a check of their type.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    known = {f.name: hints[f.name] for f in fields(cls) if f.name != "source"}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = ".".join((*at, key))
        if key not in known:
            raise ConfigError(f"{where}: unknown key {name}", hint=f"known here: {', '.join(sorted(known))}")
        values[key] = _value(known[key], value, where, (*at, key))
    for one in fields(cls):  # type: ignore[arg-type]
        if one.default is MISSING and one.default_factory is MISSING and one.name not in values:
            raise ConfigError(f"{where}: {'.'.join(at)}: {one.name} is missing")
    return cls(**values)


def _value(kind: Any, value: Any, where: str, at: tuple[str, ...]) -> Any:
    name = ".".join(at)
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {name}: a table is needed")
        return build(kind, value, where, at)
    origin = typing.get_origin(kind)
    if origin is Annotated:
        kind, *checks = typing.get_args(kind)
        found = _value(kind, value, where, at)
        for check in checks:
            check(where, name, found)
        return found
    if origin in (typing.Union, types.UnionType):
        return _value(next(a for a in typing.get_args(kind) if a is not type(None)), value, where, at)
    if isinstance(value, str) and not value.strip() and kind in (str, Path) and name not in _MAY_BE_EMPTY:
        raise ConfigError(f"{where}: {name}: is empty", hint="leave the key out for its default")
    if kind is str and isinstance(value, str) and not value.isprintable():
        raise ConfigError(f"{where}: {name}: {value!r} has a character that cannot be printed", hint="leave that out")
    if kind is Path and isinstance(value, str):
        return _path(value, where, name)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if not math.isfinite(found):
            raise ConfigError(f"{where}: {name}: {value} is not a finite number")
        return found
    if origin is tuple and isinstance(value, list) and all(isinstance(v, str) for v in value):
        if not all(v.strip() for v in value):
            raise ConfigError(f"{where}: {name}: has an empty text in it")
        return tuple(_value(typing.get_args(kind)[0], one, where, at) for one in value)
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, dict):
        entry = typing.get_args(kind)[1]
        if entry is str and not all(isinstance(one, str) for one in value.values()):
            raise ConfigError(f"{where}: {name}: {value!r} is not a table of strings")
        return {key: _value(entry, one, where, (*at, key)) for key, one in value.items()}
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind in (str, bool) and isinstance(value, kind):
        return value
    raise ConfigError(f"{where}: {name}: {value!r} is not {_expected(kind)}")


def _path(value: str, where: str, name: str) -> Path:
    if "\0" in value:
        raise ConfigError(f"{where}: {name}: {value!r} is not a path")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{where}: {name}: {value}: {error}") from None


def _expected(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin is tuple:
        return "a list of strings"
    if origin is not None:
        return "a table"
    return {float: "a number", int: "a whole number", bool: "true or false", Path: "a path (string)"}.get(
        kind, "a string"
    )


def within(low: float, high: float | None = None, *, above: bool = False) -> Check:
    """Check that a number is from ``low`` (``above``: excluding ``low``) to ``high``; the message has the range."""

    def check(where: str, key: str, value: float) -> None:
        if (value > low if above else value >= low) and (high is None or value <= high):
            return
        limits = f"above {low:g}" if above else f"from {low:g}" if high is not None else f"below {low:g}"
        limits += "" if high is None else f" and up to {high:g}" if above else f" to {high:g}"
        number = value if isinstance(value, int) else f"{value:g}"
        raise ConfigError(f"{where}: {key}: {number} is {'' if limits.startswith('below') else 'not '}{limits}")

    return check


def span(*, least_s: float = 0.0, above: bool = False) -> Check:
    """Check that a text is a span of time from ``least_s`` seconds (``above``: excluding 0) to 100 years."""

    def check(where: str, key: str, text: str) -> None:
        try:
            seconds = parse_span_s(text)
        except AffinodeError as error:
            raise ConfigError(f"{where}: {key}: {error}", hint=error.hint) from None
        if above and seconds <= 0:
            raise ConfigError(f"{where}: {key}: {text} is not above 0")
        if seconds < least_s:
            raise ConfigError(f"{where}: {key}: {text} is less than {least_s / 86400:g}d")
        if seconds > LONGEST_S:
            raise ConfigError(f"{where}: {key}: {text} is more than 100 years", hint="write at most 36500d")

    return check


def size(parse: Callable[[str], object] = parse_size, *, above: bool = False) -> Check:
    """Check that ``parse`` accepts a text; ``above``: as a size above 0."""

    def check(where: str, key: str, text: str) -> None:
        try:
            found = parse(text)
        except AffinodeError as error:
            raise ConfigError(f"{where}: {key}: {error}", hint=error.hint) from None
        if above and found == 0:
            raise ConfigError(f"{where}: {key}: {text} is not above 0")

    return check


def either(*words: str) -> Check:
    """Check that a text is one of these words, two or more."""
    allowed = f"{', '.join(words[:-1])} or {words[-1]}"

    def check(where: str, key: str, text: str) -> None:
        if text not in words:
            raise ConfigError(f"{where}: {key}: {text!r} is not {allowed}")

    return check


def table(known: Iterable[str], check: Check) -> Check:
    """Check that a table has only ``known`` keys, and each of its values."""

    def check_all(where: str, key: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"{where}: unknown key {key}.{name}", hint=f"known here: {', '.join(known)}")
            check(where, f"{key}.{name}", value)

    return check_all


def _zone(where: str, key: str, name: str) -> None:
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ConfigError(
            f"{where}: {key}: {name!r} is not a time zone", hint="write an IANA name, for example Europe/Oslo or UTC"
        ) from None


def _absolute(where: str, key: str, path: Path) -> None:
    if not path.is_absolute():
        raise ConfigError(f"{where}: {key}: {path} is not an absolute path")


Span = Annotated[str, span()]
PositiveSpan = Annotated[str, span(above=True)]
Zone = Annotated[str, _zone]
AbsolutePath = Annotated[Path, _absolute]
Share = Annotated[float, within(0, 1)]
Percent = Annotated[float, within(0, 100)]
Amount = Annotated[float, within(0)]
PositiveAmount = Annotated[float, within(0, above=True)]
