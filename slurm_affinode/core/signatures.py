"""Signatures of GPUs that are held but not used: the rules, and ``signatures.toml``. Pure.

- Each dimension (memory, compute, time, use, state, power) is met, not met, or unknown. The score is the sum of the
  weights of the dimensions that are met; unknown ones add nothing.
- A signature matches if its score reaches ``min_score``, every required dimension is met, and compute is one of at
  least two dimensions that are met. One dimension alone never matches, nor does anything without measured activity.
- Compute is met if no available signal exceeded the limit during the whole window. Missing signals are skipped; if all
  are missing, compute is unknown. Memory that a framework allocated in advance does not count against a job that
  computes.

The file is checked line by line and against the examples that it contains.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import counted, span
from slurm_affinode.base.times import parse_span_s
from slurm_affinode.base.toml_lines import syntax_fault
from slurm_affinode.model.finding import Evidence

DIMENSIONS = ("memory", "compute", "time", "use", "state", "power")
"""In display order."""
USES = ("never", "once")


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU over the window. ``None`` is unknown."""

    peaks_pct: Mapping[str, float | None] = field(default_factory=dict)
    """Activity signal -> its maximum in the window, percent."""
    idle_s: float | None = None
    """Time until the end of the window in which no available signal exceeded ``compute.at_most_pct``."""
    memory_gib: float | None = None
    memory_total_gib: float | None = None
    power_w: float | None = None
    used_before: bool | None = None
    """It exceeded the limit earlier in the same attempt, as far as the samples reach back."""

    @property
    def peak_pct(self) -> float | None:
        """Maximum over all signals; ``None``: none was measured."""
        return max((value for value in self.peaks_pct.values() if value is not None), default=None)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The attempt of a job that holds the GPU."""

    state: str | None
    running: bool
    elapsed_s: float | None = None
    limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryCondition:
    """GPU memory held: above a share of the GPU or an amount; or, on an unoccupied GPU, at most an amount."""

    weight: float
    required: bool
    above_pct: float | None = None
    or_above_gib: float | None = None
    at_most_gib: float | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """Every available signal is at most this many percent."""

    weight: float
    required: bool
    at_most_pct: float


@dataclass(frozen=True, slots=True)
class Time:
    """Idle for at least this many seconds."""

    weight: float
    required: bool
    longer_than_s: float


@dataclass(frozen=True, slots=True)
class UseHistory:
    """``never``: not above the limit since the attempt began; ``once``: above it earlier, but not since."""

    weight: float
    required: bool
    before: str


@dataclass(frozen=True, slots=True)
class State:
    """Running, or ended in one of the states at its time limit."""

    weight: float
    required: bool
    running: bool = True
    ended: tuple[str, ...] = ()
    limit_share: float = 0.98
    """Share of the time limit from which a job counts as ended at its limit."""


@dataclass(frozen=True, slots=True)
class Power:
    """Shown as evidence. It counts only if the site gives it a weight, and is never required."""

    weight: float
    below_w: float | None = None
    required: bool = False


@dataclass(frozen=True, slots=True)
class Signature:
    """One signature of a file."""

    name: str
    kind: str
    """``squatter`` or ``idle-allocation``."""
    title: str
    compute: Compute
    time: Time
    min_score: float
    memory: MemoryCondition | None = None
    use: UseHistory | None = None
    state: State | None = None
    power: Power | None = None
    advice: str = ""
    line: int = 0
    """Its line in the file."""


@dataclass(frozen=True, slots=True)
class SignatureVerdict:
    """Result of one signature for one GPU."""

    signature: Signature
    evidence: tuple[Evidence, ...]
    score: float
    fits: bool
    why_not: str
    """Empty if it fits."""


def judge(signature: Signature, gpu: GpuFacts, run: RunFacts) -> SignatureVerdict:
    """Evaluate one signature for one GPU."""
    compute = _compute(signature.compute, gpu)
    found = {
        "memory": None if signature.memory is None else _memory(signature.memory, gpu),
        "compute": compute,
        "time": _time(signature.time, gpu),
        "use": None if signature.use is None else _use(signature.use, gpu, signature.compute.at_most_pct),
        "state": None if signature.state is None else _state(signature.state, run),
        "power": None if signature.power is None else _power(signature.power, gpu),
    }
    evidence = tuple(one for one in found.values() if one is not None)
    score = min(1.0, sum(one.points for one in evidence))
    why_not = ""
    # Activity, or missing measurements of it, is the most informative reason.
    for name in ("compute", *DIMENSIONS):
        part, one = getattr(signature, name), found[name]
        if one is not None and part.required and not one.met:
            why_not = one.text
            break
    if not why_not and not compute.met:
        why_not = compute.text
    if not why_not and sum(one.met and one.weight > 0 for one in evidence) < 2:
        why_not = "one dimension alone is not sufficient"
    if not why_not and score < signature.min_score - 1e-9:
        why_not = f"score {score:.2f} is below {signature.min_score:.2f}"
    return SignatureVerdict(signature, evidence, score, not why_not, why_not)


def lacks_only_time(verdict: SignatureVerdict) -> bool:
    """Return whether only the time is missing: the GPU has not been idle, or measured, for long enough.

    Whether it was used before may be unknown for the same reason: no samples reach further back.
    """
    by = {one.dimension: one for one in verdict.evidence}
    if verdict.fits or by["time"].met or not by["compute"].met:
        return False
    late = [one for one in verdict.evidence if one.dimension == "time" or (one.dimension == "use" and one.unknown)]
    against = [
        one for one in verdict.evidence
        if getattr(verdict.signature, one.dimension).required and not one.met and one not in late
    ]  # fmt: skip
    score = verdict.score + sum(one.weight for one in late)
    return not against and score >= verdict.signature.min_score - 1e-9


def _memory(rule: MemoryCondition, gpu: GpuFacts) -> Evidence:
    used, total = gpu.memory_gib, gpu.memory_total_gib
    share = None if used is None or not total else 100 * used / total
    if rule.at_most_gib is not None:
        threshold = f"at most {rule.at_most_gib:g} GiB"
        if used is None:
            return _unknown("memory", "GiB", threshold, rule.weight, "memory held on the GPU is not known")
        return Evidence("memory", used, "GiB", threshold, rule.weight, f"{used:.1f} GiB of GPU memory held",
                        met=used <= rule.at_most_gib)  # fmt: skip
    words = [f"above {rule.above_pct:g} %"] if rule.above_pct is not None else []
    words += [f"above {rule.or_above_gib:g} GiB"] if rule.or_above_gib is not None else []
    threshold = " or ".join(words)
    above_share = None if rule.above_pct is None or share is None else share > rule.above_pct
    above_gib = None if rule.or_above_gib is None or used is None else used > rule.or_above_gib
    if above_share is None and above_gib is None:
        text = "memory held on the GPU is not known" if used is None else f"{used:.1f} GiB held, of an unknown size"
        return _unknown("memory", "%", threshold, rule.weight, text)
    met = bool(above_share or above_gib)
    if share is None or used is None:
        return Evidence("memory", used, "GiB", threshold, rule.weight, f"{used:.1f} GiB of GPU memory held", met=met)
    text = f"{share:.3g} % of the GPU memory held ({used:.1f} of {total:.1f} GiB)"
    return Evidence("memory", share, "%", threshold, rule.weight, text, met=met)


def _compute(rule: Compute, gpu: GpuFacts) -> Evidence:
    threshold = f"at most {rule.at_most_pct:g} % on every signal"
    peak = gpu.peak_pct
    if peak is None:
        return _unknown("compute", "%", threshold, rule.weight, "activity was not measured")
    known = {name: value for name, value in gpu.peaks_pct.items() if value is not None}
    busiest = max(known, key=lambda name: known[name])
    names = f"{counted(len(known), 'signal')}: {', '.join(known)}"
    text = (
        f"no signal above {peak:.2g} % ({names})"
        if peak <= rule.at_most_pct
        else f"it computes: {busiest} reached {peak:.1f} %"
    )
    met = peak <= rule.at_most_pct
    return Evidence("compute", peak, "%", threshold, rule.weight, text, met=met, sources=len(known))


def _time(rule: Time, gpu: GpuFacts) -> Evidence:
    threshold = f"at least {span(rule.longer_than_s)}"
    if gpu.idle_s is None:
        return _unknown("time", "s", threshold, rule.weight, "for how long is not known")
    met = gpu.idle_s >= rule.longer_than_s
    return Evidence("time", gpu.idle_s, "s", threshold, rule.weight, f"idle for {span(gpu.idle_s)}", met=met)


def _use(rule: UseHistory, gpu: GpuFacts, limit: float) -> Evidence:
    never = rule.before == "never"
    threshold = "never above the limit" if never else "above the limit before"
    if gpu.used_before is None:
        return _unknown("use", "", threshold, rule.weight, "whether it was used before is not known")
    text = f"it was above {limit:g} % before" if gpu.used_before else f"never above {limit:g} % in the examined time"
    value = "before" if gpu.used_before else "never"
    return Evidence("use", value, "", threshold, rule.weight, text, met=gpu.used_before is not never)


def _state(rule: State, run: RunFacts) -> Evidence:
    words = ["RUNNING"] if rule.running else []
    words += [f"{', '.join(rule.ended)} at its time limit"] if rule.ended else []
    threshold = " or ".join(words)
    if run.state is None:
        return _unknown("state", "", threshold, rule.weight, "the state of the job is not known")
    if run.running:
        met = rule.running and run.state == "RUNNING"  # a suspended job cannot compute
        return Evidence("state", run.state, "", threshold, rule.weight, f"the job is {run.state}", met=met)
    if run.state not in rule.ended:
        return Evidence("state", run.state, "", threshold, rule.weight, f"the job ended {run.state}")
    if run.state == "TIMEOUT":  # TIMEOUT means this, whatever the limit was
        text = "the job ended at its time limit"
        return Evidence("state", run.state, "", threshold, rule.weight, text, met=True)
    if run.elapsed_s is None or not run.limit_s:
        text = f"the job ended {run.state}; its time limit is not known"
        return _unknown("state", "", threshold, rule.weight, text)
    share = run.elapsed_s / run.limit_s
    text = f"the job ended {run.state} after {100 * share:.0f} % of its time limit"
    return Evidence("state", run.state, "", threshold, rule.weight, text, met=share >= rule.limit_share)


def _power(rule: Power, gpu: GpuFacts) -> Evidence:
    threshold = None if rule.below_w is None else f"below {rule.below_w:g} W"
    if gpu.power_w is None:
        return _unknown("power", "W", threshold, rule.weight, "power was not measured")
    met = rule.weight > 0 and rule.below_w is not None and gpu.power_w < rule.below_w
    return Evidence("power", gpu.power_w, "W", threshold, rule.weight, f"draws {gpu.power_w:.0f} W", met=met)


def _unknown(dimension: str, unit: str, threshold: str | None, weight: float, text: str) -> Evidence:
    return Evidence(dimension, None, unit, threshold, weight, text, unknown=True)


STATES = frozenset(
    {"TIMEOUT", "FAILED", "OUT_OF_MEMORY", "COMPLETED", "CANCELLED", "NODE_FAIL", "PREEMPTED", "DEADLINE"}
)
_TOP = {"name", "kind", "title", "advice", "min_score", *DIMENSIONS, "example"}
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
"""In an example: the value is not measured."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One error in a file."""

    line: int
    text: str
    hint: str = ""
    """What to do, if the text does not say it."""


@dataclass(frozen=True, slots=True)
class Example:
    """A test case in the file, with the result that its signature must return."""

    signature: str
    claim: str
    fits: bool
    gpu: GpuFacts
    run: RunFacts
    line: int


@dataclass(frozen=True, slots=True)
class SignatureFile:
    """Contents of a file. ``signatures`` omits invalid ones."""

    signatures: tuple[Signature, ...]
    examples: tuple[Example, ...]
    faults: tuple[Fault, ...]

    def with_window(self, window_s: float) -> SignatureFile:
        """Return a copy with this window in every signature."""
        return replace(
            self,
            signatures=tuple(replace(one, time=replace(one.time, longer_than_s=window_s)) for one in self.signatures),
        )


@dataclass(frozen=True, slots=True)
class Tried:
    """An example and the verdict of its signature."""

    example: Example
    verdict: SignatureVerdict

    @property
    def ok(self) -> bool:
        """Whether the verdict is the one that the example requires."""
        return self.verdict.fits == self.example.fits


def try_examples(file: SignatureFile) -> tuple[Tried, ...]:
    """Evaluate every example of the file; examples of unknown signatures are skipped."""
    known = {one.name: one for one in file.signatures}
    return tuple(
        Tried(one, judge(known[one.signature], one.gpu, one.run)) for one in file.examples if one.signature in known
    )


def parse(text: str) -> SignatureFile:
    """Return everything valid, and every fault with its line. Raises no errors."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        fault = syntax_fault(error, text)
        return SignatureFile((), (), (Fault(fault.line, fault.message, fault.hint),))
    return _Reader(text).read(data)


class _Wrong(Exception):  # noqa: N818 - never leaves this module
    pass


class _Reader:
    """Reads a file and collects its faults."""

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
        parts = {name: self._part(row, at, name) for name in DIMENSIONS}
        name = self._take(row, at, "name", _word)
        kind = self._take(row, at, "kind", _one_of("squatter", "idle-allocation"))
        least = self._take(row, at, "min_score", _up_to(1), default=0.8)
        title = self._take(row, at, "title", _text, default="")
        advice = self._take(row, at, "advice", _text, default="")
        for needed in ("compute", "time"):
            if needed not in row:
                self._fault(at, f"[signature.{needed}] is missing: without it a GPU cannot be found idle")
        if None in (name, kind, least, title, advice) or parts["compute"] is None or parts["time"] is None:
            return None
        weights = {key: part.weight for key, part in parts.items() if part is not None}
        if sum(weights.values()) > 1 + 1e-9:
            self._fault(at, f"the weights add up to {sum(weights.values()):g}: at most 1 is a score")
        for key, weight in weights.items():
            if weight >= least and weight > 0:
                self._fault((*at, key, "weight"), f"{key}: weight {weight:g} reaches min_score {least:g} by itself: "
                            "one dimension alone must not suffice")  # fmt: skip
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
        return lambda weight, required: MemoryCondition(weight, required, above, gib, most)

    def _compute(self, table: Mapping[str, Any], at: tuple[Any, ...]) -> Callable[..., Any]:
        most = self._take(table, at, "at_most_pct", _up_to(50))
        return lambda weight, required: Compute(weight, required, most)

    def _time(self, table: Mapping[str, Any], at: tuple[Any, ...]) -> Callable[..., Any]:
        longer = self._take(table, at, "longer_than", _span)
        return lambda weight, required: Time(weight, required, longer)

    def _use(self, table: Mapping[str, Any], at: tuple[Any, ...]) -> Callable[..., Any]:
        before = self._take(table, at, "before", _one_of(*USES))
        return lambda weight, required: UseHistory(weight, required, before)

    def _state(self, table: Mapping[str, Any], at: tuple[Any, ...]) -> Callable[..., Any]:
        running = self._take(table, at, "running", _flag, default=True)
        ended = self._take(table, at, "ended", _states, default=())
        share = self._take(table, at, "limit_share", _up_to(1), default=0.98)
        return lambda weight, required: State(weight, required, running, ended, share)

    def _power(self, table: Mapping[str, Any], at: tuple[Any, ...]) -> Callable[..., Any]:
        below = self._take(table, at, "below_w", _positive, default=None)
        return lambda weight: Power(weight, below)

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

        claim, fits = self._take(row, at, "says", _text), self._take(row, at, "fits", _flag)
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
        return Example(name, str(claim), bool(fits), gpu, run, self._line(at))

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
        raise _Wrong(f"{value!r} is not a name: small letters, digits and hyphens")
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
    """Return the line of each table and key, by path. Paths of array tables contain the index."""
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
