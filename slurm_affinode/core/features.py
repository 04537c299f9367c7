"""Job constraints (``--constraint``) and the features of a node."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"[A-Za-z0-9_.:=/-]+|[&|,()\[\]*]")


def may_match(constraint: str | None, features: tuple[str, ...]) -> bool:
    """Return whether a node with ``features`` can be one of a job's nodes.

    ``a&b`` and ``a,b``: all; ``a|b``: one; ``(...)`` groups; ``[a|b]`` and counts (``a*2``) refer to several nodes, and
    a node with one of the features may be among them. A constraint that cannot be parsed does not match, so that
    nothing is done because of it. Source: sbatch(1), ``--constraint``.
    """
    if constraint is None or not constraint.strip():
        return True
    counted = "[" in constraint or "*" in constraint
    tokens = _TOKEN.findall(re.sub(r"\*\d+", "", constraint).replace(" ", ""))
    if counted:
        return any(token in features for token in tokens)
    try:
        value, rest = _either(tokens, frozenset(features))
    except (IndexError, ValueError, RecursionError):
        return False
    return value and not rest


def _either(tokens: list[str], features: frozenset[str]) -> tuple[bool, list[str]]:
    value, rest = _conjunction(tokens, features)
    while rest and rest[0] == "|":
        more, rest = _conjunction(rest[1:], features)
        value = value or more
    return value, rest


def _conjunction(tokens: list[str], features: frozenset[str]) -> tuple[bool, list[str]]:
    value, rest = _operand(tokens, features)
    while rest and rest[0] in "&,":
        more, rest = _operand(rest[1:], features)
        value = value and more
    return value, rest


def _operand(tokens: list[str], features: frozenset[str]) -> tuple[bool, list[str]]:
    first = tokens[0]
    if first == "(":
        value, rest = _either(tokens[1:], features)
        if rest[0] != ")":
            raise ValueError("a bracket is not closed")
        return value, rest[1:]
    if not (first[0].isalnum() or first[0] == "_"):
        raise ValueError(f"{first} is not a feature")
    return first in features, tokens[1:]
