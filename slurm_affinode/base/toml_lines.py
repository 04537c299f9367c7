"""Line numbers of the keys in a TOML text: ``tomllib`` returns values without lines, and errors must name them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass

Key = tuple[str | int, ...]
"""Path of a key; the index of a table that is one of several (``[[x]]``) follows its name."""

_HEADER = re.compile(r"\s*(\[\[?)([^\]\[]+)\]\]?\s*(?:#.*)?$")
_KEY = re.compile(
    r"""\s*((?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*'))*)\s*="""
)
_WORD = re.compile(r"""[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*'""")
_POSITION = re.compile(r"\(at (?:line (\d+), column \d+|end of document)\)")


@dataclass(frozen=True, slots=True)
class TomlFault:
    """An error in a TOML text."""

    line: int
    """From 1."""
    message: str
    hint: str | None = None
    """Remedy."""

    def line_of(self, where: str) -> str:
        """Return the error of a file as one line."""
        return f"{where}:{self.line}: {self.message}" + (f" ({self.hint})" if self.hint else "")


class Lines:
    """Line numbers of the keys in a text. Paths contain the index of a table that is one of several (``[[x]]``)."""

    def __init__(self, text: str) -> None:
        self._lines: dict[Key, int] = {}
        for path, line in _scan(text):
            self._lines.setdefault(path, line)

    def of(self, *path: str | int) -> int:
        """Return the line of a key, else of its parent (for a key of an inline table: that table); at least 1."""
        for length in range(len(path), 0, -1):
            line = self._lines.get(path[:length])
            if line is not None:
                return line
        return 1


def syntax_fault(error: tomllib.TOMLDecodeError, text: str) -> TomlFault:
    """Return line and message of an error from ``tomllib``."""
    if text.startswith("\ufeff"):  # invisible to the user
        return TomlFault(1, "not TOML: begins with a byte order mark", "save it as UTF-8 without a BOM")
    reason = str(error)
    match = _POSITION.search(reason)
    line = max(1, len(text.splitlines())) if match is None or match[1] is None else int(match[1])
    message = _POSITION.sub("", reason).strip().rstrip(":")
    shown = next(iter(text.splitlines()[line - 1 : line]), "").strip()
    message = f"{message}: {shown}" if shown else message
    return TomlFault(line, f"not TOML: {message}", next((hint for part, hint in _REPAIRS if part in message), _REPAIR))


_REPAIRS = (
    ("Cannot overwrite", "the key occurs twice: keep one of them"),
    ("Cannot declare", "the table occurs twice: merge its keys; several rules are written as [[rule]] each"),
    ("Cannot mutate", "the table is complete at its closing brace: add the key between the braces"),
    ("table declaration", "close the heading: [name]"),
    ("array declaration", "close the heading: [[name]]"),
    ("Expected '='", "a line is key = value, or the heading of a table: [name]"),
    ("Unclosed array", "close the list with ]"),
    ("nclosed inline table", "close it with }, on the same line"),
    ("newline or end of document", "write one key = value per line; texts need quotes"),
    ("Invalid value", 'texts and spans of time need quotes: "1h"; lists need brackets: ["a", "b"]; true, false'),
    ("Unterminated string", "close the text with its quote"),
    ("Illegal character", "close the text with its quote, on the same line"),
    ("escape", "write a backslash twice, or the text in single quotes"),
    ("backslash", "write a backslash twice, or the text in single quotes"),
)
"""Part of a message from ``tomllib`` -> hint."""
_REPAIR = "lines have the form key = value, texts need quotes, and tables begin with [name] or [[name]]"


def _scan(text: str) -> Iterator[tuple[Key, int]]:
    """Yield each header, and each key at the beginning of a line, with its line. Skips multi-line strings and lists."""
    table_key: Key = ()
    counts: dict[Key, int] = {}
    depth, fence = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if not fence and depth == 0:
            header = _HEADER.match(line)
            key = None if header else _KEY.match(line)
            if header:
                table_key = _enter(_words(header[2]), counts, several=header[1] == "[[")
                yield table_key, number
                continue
            if key:
                words = _words(key[1])
                for length in range(1, len(words) + 1):
                    yield (*table_key, *words[:length]), number
        depth, fence = _brackets_after(line, depth, fence)


def _words(text: str) -> list[str]:
    return [word.strip("\"'") if word[:1] in "\"'" else word for word in _WORD.findall(text)]


def _enter(words: list[str], counts: dict[Key, int], *, several: bool) -> Key:
    """Return the path of a table; a parent that is a list of tables means its last element."""
    key: Key = ()
    for position, word in enumerate(words):
        key = (*key, word)
        last = position == len(words) - 1
        if last and several:
            counts[key] = counts.get(key, -1) + 1
        if key in counts and (several or not last):
            key = (*key, counts[key])
    return key


def _brackets_after(line: str, depth: int, fence: str) -> tuple[int, str]:
    """Return the number of open brackets after a line, and the quotes of a string that continues on the next line."""
    position = 0
    while position < len(line):
        if fence:
            end = line.find(fence, position)
            if end < 0:
                return depth, fence if len(fence) == 3 else ""
            position, fence = end + len(fence), ""
            continue
        character = line[position]
        if character == "#":
            break
        if character in "\"'":
            fence = character * 3 if line.startswith(character * 3, position) else character
            position += len(fence)
            while fence == '"' and position < len(line) and line[position] != '"':
                position += 2 if line[position] == "\\" else 1
            continue
        depth += (character in "[{") - (character in "]}")
        position += 1
    return max(0, depth), fence if len(fence) == 3 else ""
