"""Values over time as a line of block characters, and the console that shows them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

BLOCKS = "_▁▂▃▄▅▆▇█"
UNKNOWN = "·"


def console() -> Console:
    """Return a console on standard output, with 100 columns if it is not a terminal and COLUMNS is not set."""
    shown = Console(file=sys.stdout, highlight=False)
    if not sys.stdout.isatty() and "COLUMNS" not in shown._environ:
        shown = Console(file=sys.stdout, highlight=False, width=100)
    return shown


def blocks(values: Sequence[float | None], most: float, width: int) -> str:
    """Return a line of block characters. A column shows the largest of its values; values above 0 are visible."""
    shown = []
    count = min(width, len(values))
    for column in range(count):
        part = values[column * len(values) // count : max((column + 1) * len(values) // count, 1)]
        measurements = [value for value in part if value is not None]
        if not measurements:
            shown.append(UNKNOWN)
            continue
        share = 0.0 if most <= 0 else min(1.0, max(measurements) / most)
        shown.append(BLOCKS[0 if share <= 0 else max(1, round(share * (len(BLOCKS) - 1)))])
    return "".join(shown)
