"""Sizes, durations and figures as text, and safe display of text from elsewhere.

Names are chosen by users, and messages come from other programs: ``visible`` makes them safe for pages and mails,
``printable`` for a terminal, ``escaped`` for a log, ``one_line`` for a message of limited length.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable

_UNITS = "KMGTPE"


def size(count: int) -> str:
    """Return ``52 GiB``, ``1.5 TiB``, ``900 B``: at most three digits."""
    value, unit = float(count), "B"
    for name in _UNITS:
        if abs(value) < 1023.5:
            break
        value, unit = value / 1024, f"{name}iB"
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 99.95 else f"{value:.3g} {unit}"


def span(seconds: float) -> str:
    """Return ``45s``, ``15m``, ``1m 30s``, ``2h 5m``, ``3d 4h``: the two largest units, whole seconds."""
    whole = max(0, round(seconds))
    for large, small, names in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large}{names[0]}" + (f" {rest}{names[1]}" if rest else "")
    return f"{whole}s"


def percent(fraction: float) -> str:
    """Return ``46 %``, ``0.4 %``, ``99.7 %``; ``<0.1 %`` and ``>99.9 %`` instead of rounding to none or all."""
    value = fraction * 100
    if 0 < value < 0.1:
        return "<0.1 %"
    if 99.9 < value < 100:
        return ">99.9 %"
    digits = 1 if (0 < value < 10 and value != int(value)) or 99 < value < 100 else 0
    return f"{value:.{digits}f} %"


def figure(value: float, digits: int | None = None) -> str:
    """Return ``12,346``, ``46.3``, ``0.042``: about three significant digits, or ``digits`` after the point."""
    if digits is None:
        digits = _digits(abs(value))
    text = f"{value:,.{digits}f}"
    return text.lstrip("-") if float(text.replace(",", "")) == 0 else text


def _digits(amount: float) -> int:
    if amount == 0 or amount >= 100 or amount == int(amount):
        return 0
    return 1 if amount >= 1 else min(6, 1 - math.floor(math.log10(amount)))


def counted(number: int, noun: str) -> str:
    """Return ``1 GPU``, ``1,200 GPUs``, ``0 GPUs``; ``noun``: a singular with a plural in ``s``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


_JOINERS = "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"


def visible(text: object) -> str:
    """Return ``text`` with control, bidirectional, zero-width and separator characters made visible.

    Control characters become ``\\n``, ``\\x1b``, others ``[U+202E]``; joiners of scripts and emoji are kept.
    """
    return _replaced(str(text), _visible)


def printable(text: str) -> str:
    """Return ``text`` with unprintable characters replaced by U+FFFD, and no-break spaces by spaces.

    Each remains one character wide.
    """
    return _replaced(text.replace("\N{NO-BREAK SPACE}", " "), lambda _: "\N{REPLACEMENT CHARACTER}")


def escaped(text: str) -> str:
    """Return ``text`` with unprintable characters as in Python: ``\\n``, ``\\x1b``, ``\\u202e``."""
    return _replaced(text, _escape)


def one_line(text: object, most_bytes: int = 512) -> str:
    """Return ``text`` on one line of printable characters, cut to ``most_bytes`` of UTF-8 and then marked with ``...``.

    Runs of white space become one space; other unprintable characters are ``escaped``.
    """
    line = escaped(" ".join(str(text).split()))
    data = line.encode("utf-8")
    return line if len(data) <= most_bytes else data[: most_bytes - 3].decode("utf-8", "ignore") + "..."


def last_line(text: str) -> str:
    """Return the last line of a program's output that is not blank, as ``one_line``; empty if there is none."""
    lines = (line.strip("\0 \t") for line in reversed(text.splitlines()))
    return one_line(next(filter(None, lines), ""))


def _replaced(text: str, replacement: Callable[[str], str]) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else replacement(char) for char in text)


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _visible(char: str) -> str:
    if char in _JOINERS:
        return char
    if ord(char) < 0xA0:
        return _escape(char)
    kind = unicodedata.category(char)
    if kind == "Zs":
        return " "
    return char if kind in ("Co", "Cn") else f"[U+{ord(char):04X}]"
