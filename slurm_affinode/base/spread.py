"""Work that can be done on other machines: a function that is called with each of many items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, TypeVar

Spread = Callable[[Callable[[Any, Any], Any], Sequence[Any], Any], Iterator[Any]]
"""Calls a function with each item and a value that they share, possibly on other machines; yields results in order.

Function, items, value and results can be pickled, and the results do not depend on the machine.
"""

Spreading = Callable[[datetime, datetime], Spread]
"""Returns a ``Spread`` for the tasks of a command about an interval: results are kept until the command is complete."""

Item = TypeVar("Item")
Shared = TypeVar("Shared")
Result = TypeVar("Result")


def in_turn(function: Callable[[Item, Shared], Result], items: Sequence[Item], shared: Shared) -> Iterator[Result]:
    """Call ``function`` with each item in this process: a ``Spread``."""
    return (function(item, shared) for item in items)
