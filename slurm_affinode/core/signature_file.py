"""``signatures.toml``: read, checked line by line, and tried on the examples that the file carries. No I/O."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slurm_affinode.core import signature as sig
from slurm_affinode.core.signature import GpuFacts, RunFacts, Signature
from slurm_affinode.errors import AffinodeError
from slurm_affinode.timespec import parse_span_s
from slurm_affinode.tomllines import syntax_fault

STATES = frozenset(
    {"TIMEOUT", "FAILED", "OUT_OF_MEMORY", "COMPLETED", "CANCELLED", "NODE_FAIL", "PREEMPTED", "DEADLINE"}
)
_TOP = {"name", "kind", "title", "advice", "min_score", *sig.DIMENSIONS, "example"}
_KEYS = {
    "memory": {"weight", "required", "above_pct", "or_above_gib", "at_most_gib"},
    "compute": {"weight", "required", "at_most_pct"},
    "time": {"weight", "required", "longer_than"},
    "use": {"weight", "required", "before"},
    "state": {"weight", "required", "running", "ended", "limit_share"},
    "power": {"weight", "below_w"},
    "example": {
        "says", "fits", "memory_gib", "memory_total_gib", "peaks_pct", "idle", "power_w", "used_before", "state",
        "running", "elapsed", "limit",
    },
}  # fmt: skip
UNKNOWN = "unknown"
"""In an example: the value could not be measured."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a file."""

    line: int
    text: str
    hint: str = ""
    """What to do, where the text does not say it."""


@dataclass(frozen=True, slots=True)
class Example:
    """A case that a signature has to judge as it says."""

    signature: str
    says: str
    fits: bool
    gpu: GpuFacts
    run: RunFacts
    line: int


@dataclass(frozen=True, slots=True)
class SignatureFile:
    """What is in a file. ``signatures`` lacks those that are wrong."""

    signatures: tuple[Signature, ...]
    examples: tuple[Example, ...]
    faults: tuple[Fault, ...]

    def with_window(self, window_s: float) -> SignatureFile:
        """The same with another window in every signature."""
        return replace(
            self,
            signatures=tuple(replace(one, time=replace(one.time, longer_than_s=window_s)) for one in self.signatures),
        )


@dataclass(frozen=True, slots=True)
class Tried:
    """An example, and what its signature says of it."""

    example: Example
    verdict: sig.Verdict

    @property
    def ok(self) -> bool:
        """Whether the signature says what the example says that it should."""
        return self.verdict.fits == self.example.fits


def try_examples(file: SignatureFile) -> tuple[Tried, ...]:
    """Judge every example of the file by its signature; those of unknown signatures are left out."""
    known = {one.name: one for one in file.signatures}
    return tuple(
        Tried(one, sig.judge(known[one.signature], one.gpu, one.run)) for one in file.examples if one.signature in known
    )


def parse(text: str) -> SignatureFile:
    """Everything that is right, and every fault with its line. Raises nothing."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        fault = syntax_fault(error, text)
        return SignatureFile((), (), (Fault(fault.line, fault.message, fault.hint),))
    return _Reader(text).read(data)


class _Wrong(Exception):  # noqa: N818 - never leaves this module
    pass


class _Reader:
    """Collects faults."""

    def __init__(self, text: str) -> None:
        self._lines = _where(text)
        self._faults: list[Fault] = []

    def read(self, data: Mapping[str, Any]) -> SignatureFile:
        for key in data:
            if key not in ("version", "signature"):
                self._fault((key,), f"unknown key {key}: known are version and [[signature]]")
        if data.get("version", 1) != 1:
            self._fault(("version",), f"version {data['version']!r}: this release reads version 1")
        rows = data.get("signature", [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            self._fault(("signature",), "signature: a list of tables is needed, each headed [[signature]]")
            rows = []
        if not rows and not self._faults:
            self._fault((), "there is no [[signature]] in it")
        signatures: list[Signature] = []
        examples: list[Example] = []
        for number, row in enumerate(rows):
            at: tuple[Any, ...] = ("signature", number)
            before = len(self._faults)
            made = self._signature(row, at)
            if made is not None and any(made.name == one.name for one in signatures):
                self._fault((*at, "name"), f"{made.name} is there twice")
            if made is not None and len(self._faults) == before:
                signatures.append(made)
            for count, example in enumerate(row.get("example", []) if isinstance(row.get("example", []), list) else []):
                one = self._example(example, (*at, "example", count), str(row.get("name")))
                if one is not None:
                    examples.append(one)
        return SignatureFile(tuple(signatures), tuple(examples), tuple(sorted(self._faults, key=lambda f: f.line)))

    def _fault(self, at: tuple[Any, ...], text: str) -> None:
        self._faults.append(Fault(self._line(at), text))

    def _line(self, at: tuple[Any, ...]) -> int:
        while at:
            if at in self._lines:
                return self._lines[at]
            at = at[:-1]
        return 1

    def _signature(self, row: Mapping[str, Any], at: tuple[Any, ...]) -> Signature | None:
        for key in row:
            if key not in _TOP:
                self._fault((*at, key), f"unknown key {key}; known: {', '.join(sorted(_TOP))}")
        parts = {name: self._part(row, at, name) for name in sig.DIMENSIONS}
        name = self._take(row, at, "name", _word)
        kind = self._take(row, at, "kind", _one_of("squatter", "idle-allocation"))
        least = self._take(row, at, "min_score", _up_to(1), default=0.8)
        title = self._take(row, at, "title", _text, default="")
        advice = self._take(row, at, "advice", _text, default="")
        for needed in ("compute", "time"):
            if needed not in row:
                self._fault(at, f"[signature.{needed}] is missing: without it nothing says that the GPU is idle")
        if None in (name, kind, least, title, advice) or parts["compute"] is None or parts["time"] is None:
            return None
        weights = {key: part.weight for key, part in parts.items() if part is not None}
        if sum(weights.values()) > 1 + 1e-9:
            self._fault(at, f"the weights add up to {sum(weights.values()):g}: at most 1 is a score")
        for key, weight in weights.items():
            if weight >= least and weight > 0:
                self._fault((*at, key, "weight"), f"{key}: weight {weight:g} reaches min_score {least:g} by itself: "
                            "one dimension alone must not accuse")  # fmt: skip
        if sum(weights.values()) + 1e-9 < least:
            self._fault((*at, "min_score"), f"min_score {least:g} cannot be reached: "
                        f"the weights add up to {sum(weights.values()):g}")  # fmt: skip
        return Signature(
            name=name, kind=kind, title=title, advice=advice, min_score=least, line=self._line(at), **parts
        )

    def _part(self, row: Mapping[str, Any], at: tuple[Any, ...], name: str) -> Any:
        if name not in row:
            return None
        table, here = row[name], (*at, name)
        if not isinstance(table, dict):
            self._fault(here, f"{name}: a table is needed")
            return None
        for key in table:
            if key not in _KEYS[name]:
                self._fault((*here, key), f"{name}: unknown key {key}; known: {', '.join(sorted(_KEYS[name]))}")
        before = len(self._faults)
        weight = self._take(table, here, "weight", _up_to(1))
        required = self._take(table, here, "required", _flag, default=name in ("compute", "time"))
        made = getattr(self, f"_{name}")(table, here)
        if len(self._faults) > before or made is None:
            return None
        return made(weight) if name == "power" else made(weight, required)

    def _memory(self, table: Mapping[str, Any], at: tuple[Any, ...]) -> Callable[..., Any]:
        above = self._take(table, at, "above_pct", _up_to(100), default=None)
        gib = self._take(table, at, "or_above_gib", _positive, default=None)
        most = self._take(table, at, "at_most_gib", _positive, default=None)
        if (most is None) == (above is None and gib is None):
            self._fault(at, "memory: needs above_pct, or_above_gib or both; or at_most_gib alone")
        return lambda weight, required: sig.Memory(weight, required, above, gib, most)

    def _compute(self, table: Mapping[str, Any], at: tuple[Any, ...]) -> Callable[..., Any]:
        most = self._take(table, at, "at_most_pct", _up_to(50))
        return lambda weight, required: sig.Compute(weight, required, most)

    def _time(self, table: Mapping[str, Any], at: tuple[Any, ...]) -> Callable[..., Any]:
        longer = self._take(table, at, "longer_than", _span)
        return lambda weight, required: sig.Time(weight, required, longer)

    def _use(self, table: Mapping[str, Any], at: tuple[Any, ...]) -> Callable[..., Any]:
        before = self._take(table, at, "before", _one_of(*sig.USES))
        return lambda weight, required: sig.Use(weight, required, before)

    def _state(self, table: Mapping[str, Any], at: tuple[Any, ...]) -> Callable[..., Any]:
        running = self._take(table, at, "running", _flag, default=True)
        ended = self._take(table, at, "ended", _states, default=())
        share = self._take(table, at, "limit_share", _up_to(1), default=0.98)
        return lambda weight, required: sig.State(weight, required, running, ended, share)

    def _power(self, table: Mapping[str, Any], at: tuple[Any, ...]) -> Callable[..., Any]:
        below = self._take(table, at, "below_w", _positive, default=None)
        return lambda weight: sig.Power(weight, below)

    def _example(self, row: Any, at: tuple[Any, ...], name: str) -> Example | None:
        if not isinstance(row, dict):
            self._fault(at, "example: a table is needed, headed [[signature.example]]")
            return None
        before = len(self._faults)
        for key in row:
            if key not in _KEYS["example"]:
                known = ", ".join(sorted(_KEYS["example"]))
                self._fault((*at, key), f"example: unknown key {key}; known: {known}")

        def take(key: str, check: Callable[[Any], Any], default: Any = None) -> Any:
            return self._take(row, at, key, _maybe(check), default=default)

        says, fits = self._take(row, at, "says", _text), self._take(row, at, "fits", _flag)
        gpu = GpuFacts(
            peaks_pct=take("peaks_pct", _peaks, {}) or {},
            idle_s=take("idle", _span),
            memory_gib=take("memory_gib", _number),
            memory_total_gib=take("memory_total_gib", _positive),
            power_w=take("power_w", _number),
            used_before=take("used_before", _flag),
        )
        state = take("state", _text, "RUNNING")
        running = self._take(row, at, "running", _flag, default=state == "RUNNING")
        run = RunFacts(state, bool(running), take("elapsed", _span), take("limit", _span))
        if len(self._faults) > before:
            return None
        return Example(name, str(says), bool(fits), gpu, run, self._line(at))

    def _take(self, table: Mapping[str, Any], at: tuple[Any, ...], key: str, check: Callable[[Any], Any],
              default: Any = dataclasses.MISSING) -> Any:  # fmt: skip
        if key not in table:
            if default is dataclasses.MISSING:
                self._fault(at, f"{'.'.join(str(one) for one in at if not isinstance(one, int))}: {key} is missing")
                return None
            return default
        try:
            return check(table[key])
        except _Wrong as error:
            self._fault((*at, key), f"{key}: {error}")
            return None


def _up_to(most: float) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        number = _number(value)
        if number > most:
            raise _Wrong(f"{value!r} is not between 0 and {most:g}")
        return number

    return check


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value < 0:  # noqa: PLR0124
        raise _Wrong(f"{value!r} is not a number of 0 or more")
    return float(value)


def _positive(value: Any) -> float:
    if _number(value) == 0:
        raise _Wrong("must be above 0")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Wrong(f"{value!r} is neither true nor false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Wrong(f"{value!r} is not a text")
    return value


def _word(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", value):
        raise _Wrong(f"{value!r} is no name: small letters, digits and hyphens")
    return value


def _one_of(*words: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in words:
            raise _Wrong(f"{value!r} is none of {', '.join(words)}")
        return str(value)

    return check


def _states(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) and one in STATES for one in value):
        raise _Wrong(f"{value!r} is not a list of states; known: {', '.join(sorted(STATES))}")
    return tuple(value)


def _span(value: Any) -> float:
    if not isinstance(value, str):
        raise _Wrong(f'{value!r} is not a span of time such as "1h"')
    try:
        return parse_span_s(value)
    except AffinodeError as error:
        raise _Wrong(str(error)) from None


def _peaks(value: Any) -> dict[str, float | None]:
    if not isinstance(value, dict):
        raise _Wrong("a table of signals is needed, such as { util_pct = 0 }")
    return {name: None if one == UNKNOWN else _number(one) for name, one in value.items()}


def _maybe(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value == UNKNOWN and isinstance(value, str) else check(value)


_HEADER = re.compile(r"^\s*(\[\[?)\s*([A-Za-z0-9_.\- ]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_-]+)\s*=")


def _where(text: str) -> dict[tuple[Any, ...], int]:
    """Path of a table or key -> its line. Counted lists have their number in the path."""
    lines: dict[tuple[Any, ...], int] = {}
    counts: dict[tuple[Any, ...], int] = {}
    at: tuple[Any, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if match := _HEADER.match(line):
            at = ()
            words = match[2].split(".")
            for depth, word in enumerate(words):
                at = (*at, word.strip())
                if depth == len(words) - 1 and match[1] == "[[":
                    counts[at] = counts.get(at, -1) + 1
                if at in counts:
                    at = (*at, counts[at])
            lines.setdefault(at, number)
        elif match := _KEY.match(line):
            lines.setdefault((*at, match[1]), number)
    return lines
