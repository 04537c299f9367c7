"""The little of PromQL that is needed: series selectors made of a metric name and label matchers.

Grammar: prometheus.io "Querying basics", "Instant vector selectors".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_affinode.errors import AffinodeError

_MATCHER = re.compile(
    r"""\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`[^`]*`)\s*(,|$)"""
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_HINT = """write for example --match 'cluster="alpha"' or --match 'job="dcgm",instance=~"gpu.*"'"""


@dataclass(frozen=True, slots=True)
class Matcher:
    """One condition on a label."""

    label: str
    operator: str
    """``=``, ``!=``, ``=~`` or ``!~``."""
    value: str

    def __str__(self) -> str:
        return f'{self.label}{self.operator}"{_escaped(self.value)}"'


def parse_matchers(texts: Sequence[str]) -> tuple[Matcher, ...]:
    """Label matchers, each text one or several with commas between, with or without braces.

    Raises ``AffinodeError`` showing what cannot be read. ``__name__`` is refused: which metrics are read is said by
    the alias table.
    """
    return tuple(matcher for text in texts for matcher in _parse(text))


def _parse(text: str) -> list[Matcher]:
    inner = text.strip()
    if inner.startswith("{") and inner.endswith("}"):
        inner = inner[1:-1]
    found: list[Matcher] = []
    at = 0
    while inner[at:].strip():
        match = _MATCHER.match(inner, at)
        if match is None:
            raise AffinodeError(f"{text!r} is no label matcher", hint=_HINT)
        label, operator, quoted, end = match.groups()
        if label == "__name__":
            raise AffinodeError(
                f"{text!r}: which metrics are read cannot be matched",
                hint="name further metrics in a file and give it as gpu_history.aliases",
            )
        found.append(Matcher(label, operator, _unquoted(quoted)))
        at = match.end()
        if end != "," and inner[at:].strip():
            raise AffinodeError(f"{text!r} is no label matcher", hint=_HINT)
    if not found:
        raise AffinodeError(f"{text!r} is no label matcher", hint=_HINT)
    return found


def _unquoted(quoted: str) -> str:
    body = quoted[1:-1]
    if quoted[0] == "`":
        return body
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match.group(1), _kept(match)), body)


def _kept(match: re.Match[str]) -> str:
    """``\\\\`` and escaped quotes stand for themselves; any other escape is the server's to judge."""
    return match.group(1) if match.group(1) in "\\\"'" else match.group(0)


def _escaped(value: str) -> str:
    return (
        value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    )


def selector(metric: str, matchers: Sequence[Matcher]) -> str:
    """The series of ``metric`` that match; names that are not plain (UTF-8, dots) are quoted as a label value."""
    conditions = [str(matcher) for matcher in matchers]
    if _METRIC.fullmatch(metric):
        return f"{metric}{{{','.join(conditions)}}}" if conditions else metric
    return "{" + ",".join([str(Matcher("__name__", "=", metric)), *conditions]) + "}"


def duration(milliseconds: int) -> str:
    """A duration as PromQL writes it, in whole seconds, rounded up: not every server knows milliseconds."""
    return f"{-(-milliseconds // 1000)}s"
