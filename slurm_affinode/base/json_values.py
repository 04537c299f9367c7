"""JSON values from untrusted or damaged documents: each has its declared type, or is rejected.

``ValueError`` is the only error for any text: ``json`` and the constructors raise half a dozen others for numbers that
are too large, documents that are nested too deeply, and values of another type.
"""

from __future__ import annotations

import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
_NO_PARSERS: Mapping[type, Callable[[str], Any]] = {}
_PLAIN = (str, int, bool)
_UNSHOWN = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
"""Control characters from U+007F, invisible and bidirectional formatting characters."""


def loads(text: str | bytes) -> Any:
    """Parse a JSON document. Raises ``ValueError``, also for too deep nesting and for NaN and infinity."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def shown(text: str) -> str:
    """Return a JSON document with the characters escaped that a terminal would interpret or not show.

    JSON itself escapes those below U+0020.
    """
    return _UNSHOWN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def table(value: Any) -> dict[str, Any]:
    """Return a JSON object. Raises ``ValueError``."""
    entries: dict[str, Any] = typed(dict, value)
    return entries


def number(value: Any) -> float:
    """Return a finite number. Raises ``ValueError``."""
    try:
        converted = float(typed((int, float), value))
    except OverflowError:
        converted = math.inf
    if not math.isfinite(converted):
        raise ValueError("a number is far too large")
    return converted


def whole(value: Any, most: int = (1 << 63) - 1) -> int:
    """Return an integer from 0 to ``most``. Raises ``ValueError``."""
    integer: int = typed(int, value)
    if not 0 <= integer <= most:
        raise ValueError(f"a number is not from 0 to {most}")
    return integer


def typed(kind: Any, value: Any) -> Any:
    """Return ``value`` if it is of type ``kind``; a bool is not an int. Raises ``ValueError``."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{value!r:.60} is not of type {getattr(kind, '__name__', kind)}")
    return value


def record(
    kind: type[T], value: Any, *, parsers: Mapping[type, Callable[[str], Any]] = _NO_PARSERS, strict: bool = True
) -> T:
    """Build a dataclass from a JSON object, with each field of its declared type.

    Tuples, also named ones, are lists; mappings are objects, with keys of type ``str`` or ``int``. ``parsers``: types
    that are written as strings. Raises ``ValueError``, with ``strict`` also for unknown keys, of nested records too.
    """
    entries, hints = table(value), _hints(typing.cast(Any, kind))
    if strict and (unknown := entries.keys() - hints.keys()):
        raise ValueError(f"{kind.__name__}: unknown {', '.join(sorted(unknown))}")
    members = {name: _built(hints[name], member, parsers, strict) for name, member in entries.items() if name in hints}
    try:
        return kind(**members)
    except TypeError as error:  # a field is missing
        raise ValueError(str(error)) from None


def _built(kind: Any, value: Any, parsers: Mapping[type, Callable[[str], Any]], strict: bool) -> Any:
    if kind in parsers:
        return parsers[kind](typed(str, value))
    if kind in _PLAIN:
        return typed(kind, value)
    if isinstance(kind, type) and is_dataclass(kind):
        return record(kind, value, parsers=parsers, strict=strict)
    origin, inner = _parts(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _built(next(argument for argument in inner if argument is not type(None)), value, parsers, strict)
    if origin is tuple:
        kinds = inner[:1] * len(typed(list, value)) if inner[-1] is ... else inner
        return tuple(_items(kinds, value, parsers, strict))
    if isinstance(kind, type) and issubclass(kind, tuple):  # a named tuple
        return kind(*_items(tuple(_hints(kind).values()), value, parsers, strict))
    if origin is not None and issubclass(origin, Mapping):
        key, of = inner
        return {key(name): _built(of, entry, parsers, strict) for name, entry in table(value).items()}
    return number(value) if kind is float else typed(kind, value)


def _items(kinds: tuple[Any, ...], value: Any, parsers: Mapping[type, Callable[[str], Any]], strict: bool) -> list[Any]:
    if len(typed(list, value)) != len(kinds):
        raise ValueError(f"{value!r:.60} does not have {len(kinds)} items")
    return [_built(kind, item, parsers, strict) for kind, item in zip(kinds, value, strict=True)]


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the generic type and its arguments, cached: they are needed for each value."""
    return typing.get_origin(kind), typing.get_args(kind)


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    """Return the types of the fields, cached: a store has many images with many files each."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)} if is_dataclass(kind) else hints


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON value")
