"""Spans of time and counts for people."""

from __future__ import annotations


def span(seconds: float) -> str:
    """``45 s``, ``15m``, ``1m 30s``, ``2h 5m``, ``3d 4h``: the two largest units, whole seconds."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    for large, small, names in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large}{names[0]}" + (f" {rest}{names[1]}" if rest else "")
    raise AssertionError  # every number of at least 60 is one of the above


def counted(number: int, one: str) -> str:
    """``1 GPU``, ``2 GPUs``, ``0 GPUs``; ``one``: the noun of one of them, of which an ``s`` makes several."""
    return f"{number} {one}" if number == 1 else f"{number} {one}s"
