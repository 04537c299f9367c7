"""Schema of the TOML files that administrators write: kinds of values, and every error of a file with its line.

A kind converts a value of TOML: a function that raises ``AffinodeError``, or a ``KindStructure`` of further kinds. The
keys of a table are given with their kinds (``TomlTable``), or are the fields of a dataclass (``TomlSection``), whose
types are declared with their checks: ``Annotated[float, within(0, 1)]``.
"""

from __future__ import annotations

import difflib
import functools
import math
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar
from zoneinfo import ZoneInfo

from slurm_affinode.base.errors import AffinodeError, ConfigError, InputError
from slurm_affinode.base.sizes import parse_size
from slurm_affinode.base.text import escaped
from slurm_affinode.base.times import parse_span_s
from slurm_affinode.base.toml_lines import Key, Lines, TomlFault, syntax_fault

LONGEST_S = 100 * 365 * 86400.0
"""Maximum span of time: no measurement is older, and longer spans exceed the range of ``datetime``."""
_LONGEST_DAYS = int(LONGEST_S / 86400)

T = TypeVar("T")
Check = Callable[[Any], None]
"""Raises ``AffinodeError`` for a value that is of the right type and invalid."""


class TomlError(ConfigError, InputError):
    """A TOML file is invalid. As text: the first error, and the number of further ones."""

    def __init__(self, where: str, faults: Iterable[TomlFault]) -> None:
        first, *other_faults = faults
        more = f" (and {len(other_faults)} more)" if other_faults else ""
        super().__init__(f"{first.message}{more}", where=f"{where}:{first.line}", hint=first.hint)
        self._lines = (
            tuple(escaped(fault.line_of(where)) for fault in (first, *other_faults)) if other_faults else (str(self),)
        )

    @property
    def lines(self) -> tuple[str, ...]:
        """Every error of the file."""
        return self._lines


class _Invalid:
    """Stands for a value that was reported as a fault."""


INVALID = _Invalid()


class TomlFile:
    """The contents of a file, and its faults so far. A text that is not TOML has no contents and one fault."""

    def __init__(self, text: str) -> None:
        self._lines = functools.cache(lambda: Lines(text))
        self._faults: list[TomlFault] = []
        self._invalid: set[Key] = set()
        self.data: dict[str, Any] = {}
        try:
            self.data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            self._faults.append(syntax_fault(error, text))

    @property
    def faults(self) -> tuple[TomlFault, ...]:
        """All faults, by line."""
        return tuple(sorted(self._faults, key=lambda fault: fault.line))

    def check(self, where: str) -> None:
        """Raise ``TomlError`` if there are faults. ``where``: the name of the file."""
        if self._faults:
            raise TomlError(where, self.faults)

    def fault(self, path: Key, message: str, hint: str | None = None) -> None:
        """Record an error of the value at ``path``."""
        name = shown(path)
        self._invalid.add(path)
        self._faults.append(TomlFault(self.line(path), f"{name}: {message}" if name else message, hint))

    def line(self, path: Key) -> int:
        """Return the line of a key."""
        return self._lines().of(*path)

    def valid(self, *path: str | int) -> bool:
        """Return whether nothing at or below ``path`` was reported, and the text is TOML."""
        return not any(key[: len(path)] == path for key in self._invalid) and (bool(self._invalid) or not self._faults)

    def value(self, kind: Kind, value: Any, path: Key) -> Any:
        """Return the converted value; or report a fault and return ``INVALID``."""
        if isinstance(kind, KindStructure):
            return kind.read(self, value, path)
        try:
            return kind(value)
        except AffinodeError as error:
            self.fault(path, str(error), error.hint)
            return INVALID

    def table(self, data: Any, path: Key, keys: Mapping[str, Kind]) -> dict[str, Any]:
        """Return the valid values of a table."""
        values = self.value(TomlTable(keys), data, path)
        return {} if values is INVALID else values

    def section(self, cls: type[T], data: Any, path: Key = ()) -> T:
        """Return a dataclass, with defaults for invalid values. Its fields have defaults."""
        built = self.value(TomlSection(cls), data, path)
        return cls() if built is INVALID else built

    def tables(self, key: str) -> list[Any]:
        """Return the list of tables at the top of the file, ``[[key]]``; empty if there is none."""
        data = self.data.get(key, [])
        if isinstance(data, list):
            return data
        self.fault((key,), f"is a list of tables: write [[{key}]]")
        return []

    def check_name(self, name: str, names: Collection[str], path: Key) -> bool:
        """Return whether a key is known; or report a fault that names similar ones."""
        if name in names:
            return True
        self.fault((*path, name), "unknown key", _suggestion(name, names))
        return False

    def required(self, data: Any, path: Key, keys: Iterable[str]) -> bool:
        """Return whether a table has all of these keys, valid or not; or report those that are missing."""
        missing = [key for key in keys if isinstance(data, dict) and key not in data]
        for key in missing:
            self.fault(path, f"{key} is missing")
        return not missing


def parsed(text: str, *, where: str) -> dict[str, Any]:
    """Return the contents of a TOML text; ``where``: its origin, for errors. Raises ``TomlError`` with the line."""
    file = TomlFile(text)
    file.check(where)
    return file.data


def shown(path: Key) -> str:
    """Return a path as text; tables of a list are counted from 1: ``rule[2].users``."""
    text = ""
    for word in path:
        text += f"[{word + 1}]" if isinstance(word, int) else f".{word}" if text else word
    return text


def _suggestion(name: str, names: Collection[str]) -> str:
    similar = difflib.get_close_matches(name, names, 1)
    return f"is {similar[0]} meant?" if similar else f"known here: {', '.join(sorted(names))}"


class KindStructure:
    """A kind that consists of others."""

    def read(self, file: TomlFile, value: Any, path: Key) -> Any:
        """Return the converted value; or report faults to ``file`` and return ``INVALID``."""
        raise NotImplementedError


Kind = Callable[[Any], Any] | KindStructure


def _is_table(file: TomlFile, value: Any, path: Key) -> bool:
    if isinstance(value, dict):
        return True
    file.fault(path, "a table is needed")
    return False


@dataclass(frozen=True, slots=True)
class TomlTable(KindStructure):
    """A table with known keys; read as a ``dict`` of its valid values."""

    keys: Mapping[str, Kind]

    def read(self, file: TomlFile, value: Any, path: Key) -> Any:
        """See ``KindStructure``."""
        if not _is_table(file, value, path):
            return INVALID
        known_keys = [key for key in value if file.check_name(key, self.keys, path)]
        values = {key: file.value(self.keys[key], value[key], (*path, key)) for key in known_keys}
        return {key: item for key, item in values.items() if item is not INVALID}


@dataclass(frozen=True, slots=True)
class TomlSection(KindStructure):
    """A table whose keys are the fields of a dataclass, without ``source``; invalid values are read as defaults."""

    cls: Any

    def read(self, file: TomlFile, value: Any, path: Key) -> Any:
        """See ``KindStructure``."""
        values = TomlTable(_kinds(self.cls)).read(file, value, path)
        needed = [
            field.name for field in fields(self.cls) if field.default is MISSING and field.default_factory is MISSING
        ]
        if values is INVALID or not file.required(value, path, needed) or not all(name in values for name in needed):
            return INVALID
        return self.cls(**values)


@dataclass(frozen=True, slots=True)
class TomlEntries(KindStructure):
    """A table whose keys are names; read as a ``dict`` of its valid values."""

    kind: Kind
    names: Collection[str] | None = None
    """``None``: any."""

    def read(self, file: TomlFile, value: Any, path: Key) -> Any:
        """See ``KindStructure``."""
        if not _is_table(file, value, path):
            return INVALID
        known_names = [name for name in value if self.names is None or file.check_name(name, self.names, path)]
        entries = {name: file.value(self.kind, value[name], (*path, name)) for name in known_names}
        return {name: item for name, item in entries.items() if item is not INVALID}


@dataclass(frozen=True, slots=True)
class TomlList(KindStructure):
    """A list of strings of one kind; read as a ``tuple``."""

    kind: Kind
    single: bool = False
    """A string is a list of one."""
    whole_set: str | None = None
    """Meaning of an absent key, if the list must not be empty."""

    def read(self, file: TomlFile, value: Any, path: Key) -> Any:
        """See ``KindStructure``."""
        items = [value] if self.single and isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            file.fault(path, f"{value!r} is not a list of strings", 'write for example ["a", "b"]')
            return INVALID
        if not items and self.whole_set is not None:
            file.fault(path, "the list is empty", f"leave the key out where {self.whole_set} is meant")
            return INVALID
        if not all(item.strip() for item in items):
            file.fault(path, "has an empty text in it")
            return INVALID
        elements = tuple(file.value(self.kind, item, path) for item in items)
        return INVALID if INVALID in elements else elements


@dataclass(frozen=True, slots=True)
class CheckedKind(KindStructure):
    """A kind whose values are checked as well, until the first check that fails."""

    kind: Kind
    checks: tuple[Check, ...]

    def read(self, file: TomlFile, value: Any, path: Key) -> Any:
        """See ``KindStructure``."""
        item = file.value(self.kind, value, path)
        if item is INVALID:
            return INVALID
        try:
            for check in self.checks:
                check(item)
        except AffinodeError as error:
            file.fault(path, str(error), error.hint)
            return INVALID
        return item


@dataclass(frozen=True, slots=True)
class KnownNames:
    """In the declaration of a mapping: its keys."""

    names: tuple[str, ...]


class _MayBeEmpty:
    """In the declaration of a string: it may be empty."""


MAY_BE_EMPTY = _MayBeEmpty()


@functools.cache
def _kinds(cls: Any) -> Mapping[str, Kind]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: _declared(hints[field.name]) for field in fields(cls) if field.name != "source"}


def _declared(declared: Any) -> Kind:
    """Return the kind of a declared type."""
    origin = typing.get_origin(declared)
    if origin is Annotated:
        declared, *notes = typing.get_args(declared)
        if any(note is MAY_BE_EMPTY for note in notes):
            kind: Kind = string
        elif names := [note.names for note in notes if isinstance(note, KnownNames)]:
            kind = TomlEntries(_declared(typing.get_args(declared)[1]), names[0])
        else:
            kind = _declared(declared)
        checks = tuple(note for note in notes if not isinstance(note, KnownNames | _MayBeEmpty))
        return CheckedKind(kind, checks) if checks else kind
    if origin in (typing.Union, types.UnionType):
        return _declared(next(argument for argument in typing.get_args(declared) if argument is not type(None)))
    if origin is tuple:
        return TomlList(_declared(typing.get_args(declared)[0]))
    if origin is not None and issubclass(origin, Mapping):
        return TomlEntries(_declared(typing.get_args(declared)[1]))
    if is_dataclass(declared) and isinstance(declared, type):
        return TomlSection(declared)
    return {str: printable, Path: path_of, float: number, int: whole, bool: yes_no}[declared]


def anything(value: Any) -> Any:
    """Return the value unchanged: it is read separately."""
    return value


def string(value: Any) -> str:
    """Return a string, which may be empty."""
    if not isinstance(value, str):
        raise AffinodeError(f"{value!r} is not a string")
    return value


def text(value: Any) -> str:
    """Return a string that is not empty."""
    if not string(value).strip():
        raise AffinodeError("is empty", hint="leave the key out for its default")
    return str(value)


def printable(value: Any) -> str:
    """Return a string that is not empty and has no control characters."""
    if not text(value).isprintable():
        raise AffinodeError(f"{value!r} has a character that cannot be printed", hint="leave that out")
    return str(value)


def path_of(value: Any) -> Path:
    """Return a path; ``~`` is expanded."""
    if not isinstance(value, str) or "\0" in value:
        raise AffinodeError(f"{value!r} is not a path (string)")
    try:
        return Path(text(value)).expanduser()
    except RuntimeError as error:
        raise AffinodeError(f"{value}: {error}") from None


def number(value: Any) -> float:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AffinodeError(f"{value!r} is not a number")
    try:
        converted = float(value)
    except OverflowError:
        converted = math.inf
    if not math.isfinite(converted):
        raise AffinodeError(f"{value} is not a finite number")
    return converted


def whole(value: Any) -> int:
    """Return an integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise AffinodeError(f"{value!r} is not a whole number")
    return value


def yes_no(value: Any) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise AffinodeError(f"{value!r} is not true or false")
    return value


def seconds(value: Any) -> float:
    """Return the seconds of a span of time (``"15m"``, ``"2h30m"``) or of a number of seconds."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise AffinodeError(f"{value!r} is not a span of time", hint="write for example 15m, 2h30m, 7d or 4w")
    span_s = parse_span_s(value) if isinstance(value, str) else number(value)
    if span_s < 0:
        raise AffinodeError(f"{value!r} is below 0")
    if span_s > LONGEST_S:
        raise AffinodeError(f"{value} is more than 100 years", hint=f"write at most {_LONGEST_DAYS}d")
    return span_s


def checked(kind: Kind, *checks: Check) -> CheckedKind:
    """Return a kind with checks."""
    return CheckedKind(kind, checks)


def within(low: float, high: float | None = None, *, above: bool = False) -> Check:
    """Check that a number is from ``low`` (``above``: excluding ``low``) to ``high``; the message has the range."""

    def check(value: float) -> None:
        if (value > low if above else value >= low) and (high is None or value <= high):
            return
        limits = f"above {low:g}" if above else f"from {low:g}" if high is not None else f"below {low:g}"
        limits += "" if high is None else f" and up to {high:g}" if above else f" to {high:g}"
        shown_value = value if isinstance(value, int) else f"{value:g}"
        raise AffinodeError(f"{shown_value} is {'' if limits.startswith('below') else 'not '}{limits}")

    return check


def span(*, least_s: float = 0.0, above: bool = False) -> Check:
    """Check that a text is a span of time from ``least_s`` seconds (``above``: excluding 0) to 100 years."""

    def check(value: str) -> None:
        span_s = seconds(value)
        if above and span_s <= 0:
            raise AffinodeError(f"{value} is not above 0")
        if span_s < least_s:
            raise AffinodeError(f"{value} is less than {least_s / 86400:g}d")

    return check


def size(parse: Callable[[str], object] = parse_size, *, above: bool = False) -> Check:
    """Check that ``parse`` accepts a text; ``above``: as a size above 0."""

    def check(value: str) -> None:
        if parse(value) == 0 and above:
            raise AffinodeError(f"{value} is not above 0")

    return check


def either(*words: str) -> Check:
    """Check that a value is one of these words."""

    def check(value: Any) -> None:
        if value not in words:
            similar = difflib.get_close_matches(value, words, 1) if isinstance(value, str) else []
            hint = f"is {similar[0]} meant?" if similar else None
            raise AffinodeError(f"{value!r} is not one of {', '.join(words)}", hint=hint)

    return check


def zone(name: str) -> None:
    """Check that a text is the name of a time zone."""
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise AffinodeError(
            f"{name!r} is not a time zone", hint="write an IANA name, for example Europe/Oslo or UTC"
        ) from None


def _absolute(path: Path) -> None:
    if not path.is_absolute():
        raise AffinodeError(f"{path} is not an absolute path")


Span = Annotated[str, span()]
PositiveSpan = Annotated[str, span(above=True)]
Zone = Annotated[str, zone]
AbsolutePath = Annotated[Path, _absolute]
Share = Annotated[float, within(0, 1)]
Percent = Annotated[float, within(0, 100)]
Amount = Annotated[float, within(0)]
PositiveAmount = Annotated[float, within(0, above=True)]
