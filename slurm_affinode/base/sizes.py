"""Parsing of sizes (powers of 1024) and shares."""

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
