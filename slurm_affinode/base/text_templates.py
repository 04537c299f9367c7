"""Texts by code: templates in a TOML file, filled with the values that a detector returns.

A code is ``TABLE.KEY``. A template is a string with ``{name:format}``, or a list of such parts, of which those with an
unknown value (``None``) are left out. Besides Python's formats there are ``span``, ``percent``, ``figure``, ``size``,
``count SINGULAR PLURAL`` (1 process, 3 processes), ``word SINGULAR PLURAL`` (the word alone) and ``if`` (nothing: the
part depends on whether there is a value).
"""

from __future__ import annotations

import functools
import string
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Self

from slurm_affinode.base.text import figure, percent, size, span

Template = str | list[str]


Formatter = Callable[[Any], str]


@functools.cache
def _fields(template: str) -> tuple[tuple[str, str | None, Formatter], ...]:
    """Return the literal texts of a template, each with the name and the format of the value that follows, if any."""
    parts = string.Formatter().parse(template)
    return tuple((literal, name, _formatter(spec or "")) for literal, name, spec, _ in parts)


def _formatter(spec: str) -> Formatter:
    name, *words = spec.split(" ")
    match name:
        case "span":
            return span
        case "percent":
            return percent
        case "figure":
            return figure
        case "size":
            return lambda value: size(int(value))
        case "count":
            return lambda value: f"{value:,.0f} {words[int(value != 1)]}"
        case "word":
            return lambda value: words[int(value != 1)]
        case "if":
            return lambda value: ""
    return lambda value: format(value, spec)


def placeholders(template: Template) -> set[str]:
    """Return the names of the values in a template."""
    parts = [template] if isinstance(template, str) else template
    return {name for part in parts for _, name, _ in _fields(part) if name is not None}


def filled(template: Template, values: Mapping[str, Any]) -> str | None:
    """Return a template with its values; ``None`` if it is a string and one of them is unknown."""
    if isinstance(template, list):
        return "".join(filled(part, values) or "" for part in template)
    texts = []
    for literal, name, formatted in _fields(template):
        texts.append(literal)
        if name is not None:
            value = values[name]
            if value is None:
                return None
            texts.append(formatted(value))
    return "".join(texts)


@dataclass(frozen=True, slots=True)
class TextTable:
    """The templates of one file, by table and key."""

    tables: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, package: str, name: str) -> Self:
        """Read the file ``name`` of a package."""
        return cls(tomllib.loads(resources.files(package).joinpath(name).read_text(encoding="utf-8")))

    def entry(self, code: str) -> Any:
        """Return what the file has under a code. Raises ``KeyError``."""
        table, _, key = code.partition(".")
        return self.tables[table][key]

    def text(self, code: str, values: Mapping[str, Any]) -> str:
        """Return the text of a code. Raises ``KeyError`` for an unknown code or a value that is not given."""
        return filled(self.entry(code), values) or ""

    def texts(self, code: str, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the texts of a list of templates, without those that have an unknown value. Raises ``KeyError``."""
        return tuple(text for template in self.entry(code) if (text := filled(template, values)) is not None)

    def codes(self) -> Iterator[str]:
        """Yield all codes."""
        for name, table in self.tables.items():
            yield from (f"{name}.{key}" for key in table)
