"""Formatting of sizes, durations and counts; parsing of sizes (``500G``, ``1.5T``, ``52 GiB``: powers of 1024)."""

from __future__ import annotations

import re

from slurm_affinode.base.errors import AffinodeError

_UNITS = "KMGTPE"
_DIGITS = 40
"""Maximum digits of a number: more than any size needs, and far below the range of floating-point numbers."""
_SIZE = re.compile(rf"(\d+(?:\.\d+)?)\s*(?:([{_UNITS}])(?:i?B)?|B)?", re.IGNORECASE | re.ASCII)


_PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)\s*%", re.ASCII)


def parse_size(text: str) -> int:
    """Return the bytes of ``500G``, ``500GB``, ``500 GiB`` or ``1048576``. Raises ``AffinodeError``."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or len(match[1]) > _DIGITS:
        raise AffinodeError(f"{text!r} is not a size", hint="write for example 500G or 2T (powers of 1024)")
    power = 0 if match[2] is None else _UNITS.index(match[2].upper()) + 1
    return int(float(match[1]) * 1024**power)


def parse_limit(text: str) -> tuple[int | None, float | None]:
    """Return bytes, or a share, of ``500G``, ``50%`` or ``none``; the other value, for ``none`` both, is ``None``.

    Raises ``AffinodeError``.
    """
    if text.strip() == "none":
        return None, None
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        return parse_size(text), None
    share = float(match[1]) / 100
    if not 0 < share <= 1:
        raise AffinodeError(f"{text!r} is not a share", hint="write for example 50%, a size such as 500G, or none")
    return None, share


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


def counted(number: int, one: str) -> str:
    """Return ``1 GPU``, ``2 GPUs``, ``0 GPUs``; ``one``: the singular of a noun with a plural in ``s``."""
    return f"{number} {one}" if number == 1 else f"{number} {one}s"
