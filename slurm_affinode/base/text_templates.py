"""Texts by code: templates in a TOML file, filled with the values that a detector returns.

A code is ``TABLE.KEY``. A template is a string with ``{name:format}``, or a list of such parts, of which those with an
unknown value (``None``) are left out. Besides Python's formats there are ``span``, ``percent``, ``figure``, ``size``,
``count SINGULAR PLURAL`` (1 process, 3 processes) and ``word SINGULAR PLURAL`` (the word alone).
"""

from __future__ import annotations

import string
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from slurm_affinode.base.text import figure, percent, size, span

Template = str | list[str]


class _Formatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        name, *words = format_spec.split(" ")
        match name:
            case "span":
                return span(value)
            case "percent":
                return percent(value)
            case "figure":
                return figure(value)
            case "size":
                return size(int(value))
            case "count":
                return f"{value:,.0f} {words[value != 1]}"
            case "word":
                return words[value != 1]
        return super().format_field(value, format_spec)


_FORMATTER = _Formatter()


def placeholders(template: Template) -> set[str]:
    """Return the names of the values in a template."""
    parts = [template] if isinstance(template, str) else template
    return {name for part in parts for _, name, _, _ in _FORMATTER.parse(part) if name is not None}


def filled(template: Template, values: Mapping[str, Any]) -> str | None:
    """Return a template with its values; ``None`` if it is a string and one of them is unknown."""
    if isinstance(template, list):
        return "".join(filled(part, values) or "" for part in template)
    if any(values[name] is None for name in placeholders(template)):
        return None
    return _FORMATTER.vformat(template, (), values)


@dataclass(frozen=True, slots=True)
class TextTable:
    """The templates of one file, by table and key."""

    tables: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, package: str, name: str) -> TextTable:
        """Read the file ``name`` of a package."""
        return cls(tomllib.loads(resources.files(package).joinpath(name).read_text(encoding="utf-8")))

    def entry(self, code: str) -> Any:
        """Return what the file has under a code. Raises ``KeyError``."""
        table, _, key = code.partition(".")
        return self.tables[table][key]

    def text(self, code: str, values: Mapping[str, Any]) -> str:
        """Return the text of a code. Raises ``KeyError`` for an unknown code or a value that is not given."""
        return filled(self.entry(code), values) or ""

    def codes(self) -> Iterator[str]:
        """Yield all codes."""
        for name, table in self.tables.items():
            yield from (f"{name}.{key}" for key in table)
