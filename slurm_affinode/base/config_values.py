"""Values of the configuration: conversion from TOML to the typed sections, and range checks."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

from slurm_affinode.base.errors import AffinodeError, ConfigError
from slurm_affinode.base.times import parse_span_s

LONGEST_S = 100 * 365 * 86400.0
"""Maximum span of time: no measurement is older, and longer spans exceed the range of ``datetime``."""
_MAY_BE_EMPTY = ("agent.listen",)

T = TypeVar("T")


def build(cls: type[T], data: Mapping[str, Any], where: str, at: tuple[str, ...] = ()) -> T:
    """Build a section (a dataclass) from a table. Raises ``ConfigError`` with ``where`` and the key below ``at``.

    Rejects unknown keys, values of another type, empty strings, and numbers that are not finite (nan, inf).
    """
    hints = typing.get_type_hints(cls)
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
    if origin in (typing.Union, types.UnionType):
        return _value(next(a for a in typing.get_args(kind) if a is not type(None)), value, where, at)
    if isinstance(value, str) and not value.strip() and kind in (str, Path) and name not in _MAY_BE_EMPTY:
        raise ConfigError(f"{where}: {name}: is empty", hint="leave the key out for its default")
    if kind is str and isinstance(value, str) and not value.isprintable():
        raise ConfigError(f"{where}: {name}: {value!r} has a character that cannot be printed", hint="leave that out")
    if kind is Path and isinstance(value, str):
        return _path(value, where, name)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ConfigError(f"{where}: {name}: {value} is not a finite number")
        return float(value)
    if origin is tuple and isinstance(value, list) and all(isinstance(v, str) for v in value):
        if not all(v.strip() for v in value):
            raise ConfigError(f"{where}: {name}: has an empty text in it")
        return tuple(_value(str, one, where, at) for one in value)
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


def within(
    where: str, key: str, value: float | None, low: float, high: float | None = None, *, above: bool = False
) -> None:
    """Raise ``ConfigError`` unless a number is from ``low`` (``above``: excluding ``low``) to ``high``.

    The message contains the allowed range. ``None`` is not set, and valid.
    """
    if value is None or ((value > low if above else value >= low) and (high is None or value <= high)):
        return
    limits = f"above {low:g}" if above else f"from {low:g}" if high is not None else f"below {low:g}"
    limits += "" if high is None else f" and up to {high:g}" if above else f" to {high:g}"
    number = value if isinstance(value, int) else f"{value:g}"
    raise ConfigError(f"{where}: {key}: {number} is {'' if limits.startswith('below') else 'not '}{limits}")


def span(where: str, key: str, text: str | None, *, least_s: float = 0.0, above: bool = False) -> None:
    """Raise ``ConfigError`` unless ``text`` is a span of time of at least ``least_s`` seconds and at most 100 years.

    ``above``: 0 is not valid either. ``None`` is not set, and valid.
    """
    if text is None:
        return
    try:
        seconds = parse_span_s(text)
    except AffinodeError as error:
        raise ConfigError(f"{where}: {key}: {error}", hint=error.hint) from None
    if above and seconds <= 0:
        raise ConfigError(f"{where}: {key}: {text} is not above 0")
    if seconds < least_s:
        raise ConfigError(f"{where}: {key}: {text} is less than {least_s / 86400:g}d")
    if seconds > LONGEST_S:
        raise ConfigError(f"{where}: {key}: {text} is more than 100 years", hint="36500d is as good as for ever")


def zone(where: str, key: str, name: str | None) -> None:
    """Raise ``ConfigError`` if there is no such time zone."""
    try:
        _ = None if name is None else ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ConfigError(
            f"{where}: {key}: {name!r} is not a time zone", hint="write an IANA name, for example Europe/Oslo or UTC"
        ) from None
