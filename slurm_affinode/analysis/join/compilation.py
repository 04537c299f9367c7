"""Compilation of loops with Numba, which is imported when they are compiled.

A module marks its functions with ``compiled`` or ``inlined``. Its own names refer to the Python functions, so that it
can be imported, and used for few rows, without Numba; ``machine_code`` returns the compiled ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

Function = Callable[..., Any]
_MARKED: dict[Function, tuple[Function, bool]] = {}
"""Function under its name in the module -> function to compile, and whether to inline it."""


def compiled(function: Function) -> Function:
    """Mark a function for compilation. Compiled code does not check bounds."""
    _MARKED[function] = function, False
    return function


def inlined(function: Function) -> Function:
    """Mark a function to be compiled into its callers: passing arrays would cost more than the function itself."""
    _MARKED[function] = function, True
    return function


def uncompiled(arrays: Function) -> Callable[[Function], Function]:
    """Use ``arrays``, which gives the same results with array operations, unless the marked function is compiled."""

    def replace(function: Function) -> Function:
        _MARKED[arrays] = _MARKED.pop(function)
        return arrays

    return replace


def rebuilt(module: ModuleType, build: Callable[[Function, bool], Function]) -> Any:
    """Return the names of ``module`` with its marked functions built by ``build``; they call each other.

    ``build`` gets a function and whether to inline it.
    """
    scope = dict(vars(module))
    for name, known in vars(module).items():
        if isinstance(known, FunctionType) and known in _MARKED:
            function, inline = _MARKED[known]
            copy = FunctionType(function.__code__, scope, name, function.__defaults__)
            scope[name] = build(copy, inline)
    return SimpleNamespace(**scope)


@cache
def machine_code(module: ModuleType) -> Any:
    """Return the names of ``module`` with its marked functions compiled, on their first call or in an earlier process.

    Numba's cache knows a function by its file, so the functions that it calls must be in the same file.
    """
    return rebuilt(module, _compiled)


def _compiled(function: Function, inline: bool) -> Function:
    # Imported here, because that takes half a second. Untyped, because its types have no option in a variable.
    numba: Any = importlib.import_module("numba")
    # Sums may be reordered, but NaN must keep its meaning.
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}
    result: Function
    if inline:
        result = numba.njit(inline="always", **options)(function)
        return result
    try:
        result = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # pragma: no cover - no directory for the cache
        result = numba.njit(**options)(function)
    return result
