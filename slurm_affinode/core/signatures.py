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

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.toml_lines import Key, TomlFault
from slurm_affinode.base.toml_schema import (
    INVALID,
    CheckedKind,
    Kind,
    KindStructure,
    TomlEntries,
    TomlFile,
    TomlList,
    TomlTable,
    anything,
    checked,
    either,
    number,
    seconds,
    string,
    text,
    whole,
    within,
    yes_no,
)
from slurm_affinode.core.evidence_texts import EvidenceTexts
from slurm_affinode.model.finding import Evidence

TEXTS = EvidenceTexts.of(__package__, "signature_texts.toml")
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
    by_dimension = {
        "memory": None if signature.memory is None else _memory(signature.memory, gpu),
        "compute": _compute(signature.compute, gpu),
        "time": _time(signature.time, gpu),
        "use": None if signature.use is None else _use(signature.use, gpu, signature.compute.at_most_pct),
        "state": None if signature.state is None else _state(signature.state, run),
        "power": None if signature.power is None else _power(signature.power, gpu),
    }
    evidence = tuple(item for item in by_dimension.values() if item is not None)
    score = min(1.0, sum(item.points for item in evidence))
    why_not = _why_not(signature, evidence, score)
    return SignatureVerdict(signature, evidence, score, not why_not, why_not)


def _why_not(signature: Signature, evidence: Sequence[Evidence], score: float) -> str:
    """Return why a signature does not fit; empty if it does."""
    # Activity, or missing measurements of it, is the most informative reason.
    ordered = sorted(evidence, key=lambda item: item.dimension != "compute")
    required = [item for item in ordered if getattr(signature, item.dimension).required]
    for item in (*required, ordered[0]):
        if not item.met:
            return item.text
    if sum(item.met and item.weight > 0 for item in evidence) < 2:
        return TEXTS.text("reason.alone", {})
    if score < signature.min_score - 1e-9:
        return TEXTS.text("reason.score", {"score": score, "least": signature.min_score})
    return ""


def lacks_only_time(verdict: SignatureVerdict) -> bool:
    """Return whether only the time is missing: the GPU has not been idle, or measured, for long enough.

    Whether it was used before may be unknown for the same reason: no samples reach further back.
    """
    by = {item.dimension: item for item in verdict.evidence}
    if verdict.fits or by["time"].met or not by["compute"].met:
        return False
    late = [item for item in verdict.evidence if item.dimension == "time" or (item.dimension == "use" and item.unknown)]
    against = [
        item for item in verdict.evidence
        if getattr(verdict.signature, item.dimension).required and not item.met and item not in late
    ]  # fmt: skip
    score = verdict.score + sum(item.weight for item in late)
    return not against and score >= verdict.signature.min_score - 1e-9


def _memory(rule: MemoryCondition, gpu: GpuFacts) -> Evidence:
    used, total = gpu.memory_gib, gpu.memory_total_gib
    if rule.at_most_gib is not None:
        met = used is not None and used <= rule.at_most_gib
        return TEXTS.evidence("gpu.memory-most", used, rule.weight, met=met, limit=rule.at_most_gib)
    share = None if used is None or not total else 100 * used / total
    above_share = None if rule.above_pct is None or share is None else share > rule.above_pct
    above_gib = None if rule.or_above_gib is None or used is None else used > rule.or_above_gib
    if above_share is None and above_gib is None:
        code = "gpu.memory" if used is None else "gpu.memory-unsized"
    else:
        code = "gpu.memory" if share is not None else "gpu.memory-amount"
    value = None if code == "gpu.memory-unsized" else used if code == "gpu.memory-amount" else share
    more, amount = (None, rule.or_above_gib) if rule.above_pct is None else (rule.or_above_gib, None)
    return TEXTS.evidence(
        code, value, rule.weight, met=bool(above_share or above_gib), used=used, total=total, share=rule.above_pct,
        more=more, amount=amount,
    )  # fmt: skip


def _compute(rule: Compute, gpu: GpuFacts) -> Evidence:
    peaks = {name: value for name, value in gpu.peaks_pct.items() if value is not None}
    if not peaks:
        return TEXTS.evidence("gpu.compute", None, rule.weight, limit=rule.at_most_pct)
    busiest = max(peaks, key=lambda name: peaks[name])
    met = peaks[busiest] <= rule.at_most_pct
    return TEXTS.evidence(
        "gpu.compute" if met else "gpu.compute-busy", peaks[busiest], rule.weight, met=met, sources=len(peaks),
        limit=rule.at_most_pct, count=len(peaks), names=", ".join(peaks), busiest=busiest,
    )  # fmt: skip


def _time(rule: Time, gpu: GpuFacts) -> Evidence:
    met = gpu.idle_s is not None and gpu.idle_s >= rule.longer_than_s
    return TEXTS.evidence("gpu.time", gpu.idle_s, rule.weight, met=met, limit=rule.longer_than_s)


def _use(rule: UseHistory, gpu: GpuFacts, limit: float) -> Evidence:
    code, used = "gpu.use-never" if rule.before == "never" else "gpu.use-once", gpu.used_before
    value = None if used is None else "before" if used else "never"
    met = used is (rule.before != "never")
    return TEXTS.evidence(
        code, value, rule.weight, met=met, before=limit if used else None, never=None if used else limit
    )


def _state(rule: State, run: RunFacts) -> Evidence:
    ended = ", ".join(rule.ended) or None
    also, alone = (ended, None) if rule.running else (None, ended)
    code, value, met, share = _state_match(rule, run)
    return TEXTS.evidence(
        code, value, rule.weight, met=met, share=share, state=run.state, running="RUNNING" if rule.running else None,
        also=also, ended=alone,
    )  # fmt: skip


def _state_match(rule: State, run: RunFacts) -> tuple[str, str | None, bool, float | None]:
    """Return code and value of the evidence, whether the rule is met, and the used share of the time limit, percent."""
    if run.state is None or run.running:
        # A suspended job cannot compute.
        return "gpu.state", run.state, rule.running and run.state == "RUNNING", None
    if run.state not in rule.ended:
        return "gpu.state-ended", run.state, False, None
    if run.state == "TIMEOUT":  # TIMEOUT means this, whatever the limit was
        return "gpu.state-timeout", run.state, True, None
    if run.elapsed_s is None or not run.limit_s:
        return "gpu.state-share", None, False, None
    share = run.elapsed_s / run.limit_s
    return "gpu.state-share", run.state, share >= rule.limit_share, 100 * share


def _power(rule: Power, gpu: GpuFacts) -> Evidence:
    met = rule.weight > 0 and rule.below_w is not None and gpu.power_w is not None and gpu.power_w < rule.below_w
    return TEXTS.evidence("gpu.power", gpu.power_w, rule.weight, met=met, limit=rule.below_w)


STATES = frozenset(
    {"TIMEOUT", "FAILED", "OUT_OF_MEMORY", "COMPLETED", "CANCELLED", "NODE_FAIL", "PREEMPTED", "DEADLINE"}
)
UNKNOWN = "unknown"
"""In an example: the value is not measured."""


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
    faults: tuple[TomlFault, ...]

    def with_window(self, window_s: float) -> SignatureFile:
        """Return a copy with this window in every signature."""
        return replace(
            self,
            signatures=tuple(
                replace(signature, time=replace(signature.time, longer_than_s=window_s))
                for signature in self.signatures
            ),
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
    signature_by_name = {signature.name: signature for signature in file.signatures}
    return tuple(
        Tried(example, judge(signature_by_name[example.signature], example.gpu, example.run))
        for example in file.examples
        if example.signature in signature_by_name
    )


def parse(source: str) -> SignatureFile:
    """Return everything valid, and every fault with its line. Raises no errors."""
    file = TomlFile(source)
    file.table(file.data, (), {"version": checked(whole, _version), "signature": anything})
    rows = file.tables("signature")
    if not rows and not file.faults:
        file.fault((), "there is no [[signature]] in it")
    signatures: list[Signature] = []
    examples: list[Example] = []
    for index, row in enumerate(rows):
        path: Key = ("signature", index)
        signature = _signature(file, row, path)
        if signature is not None and any(signature.name == previous.name for previous in signatures):
            file.fault((*path, "name"), f"{signature.name} is there twice")
        if signature is not None and file.valid(*path):
            signatures.append(signature)
        if isinstance(row, dict):
            examples += _examples(file, row, path)
    return SignatureFile(tuple(signatures), tuple(examples), file.faults)


def _version(value: int) -> None:
    if value != 1:
        raise AffinodeError(f"{value!r}: this release reads version 1")


@dataclass(frozen=True, slots=True)
class _Measured(KindStructure):
    """A value of an example, which may be unknown."""

    kind: Kind

    def read(self, file: TomlFile, value: Any, path: Key) -> Any:
        """See ``KindStructure``."""
        return None if value == UNKNOWN and isinstance(value, str) else file.value(self.kind, value, path)


def _name(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", value):
        raise AffinodeError(f"{value!r} is not a name: small letters, digits and hyphens")
    return value


def _up_to(most: float) -> CheckedKind:
    return checked(number, within(0, most))


_POSITIVE = checked(number, within(0, above=True))
_AMOUNT = checked(number, within(0))
_PARTS: Mapping[str, tuple[type[Any], Mapping[str, Kind]]] = {
    "memory": (
        MemoryCondition,
        {"required": yes_no, "above_pct": _up_to(100), "or_above_gib": _POSITIVE, "at_most_gib": _POSITIVE},
    ),
    "compute": (Compute, {"required": yes_no, "at_most_pct": _up_to(50)}),
    "time": (Time, {"required": yes_no, "longer_than": seconds}),
    "use": (UseHistory, {"required": yes_no, "before": checked(text, either(*USES))}),
    "state": (
        State,
        {
            "required": yes_no, "running": yes_no, "ended": TomlList(checked(text, either(*sorted(STATES)))),
            "limit_share": _up_to(1),
        },
    ),
    "power": (Power, {"below_w": _POSITIVE}),
}  # fmt: skip
"""Dimension -> its class, and its keys besides ``weight``."""
_NEEDED = {"compute": ("weight", "at_most_pct"), "time": ("weight", "longer_than"), "use": ("weight", "before")}
_KEYS: Mapping[str, Kind] = {
    "name": _name, "kind": checked(text, either("squatter", "idle-allocation")), "title": string, "advice": string,
    "min_score": _up_to(1), "example": anything,
    **{name: TomlTable({"weight": _up_to(1), **keys}) for name, (_, keys) in _PARTS.items()},
}  # fmt: skip
_MEASURED: Mapping[str, Kind] = {
    "peaks_pct": TomlEntries(_Measured(_AMOUNT)), "idle": seconds, "memory_gib": _AMOUNT, "memory_total_gib": _POSITIVE,
    "power_w": _AMOUNT, "used_before": yes_no, "state": string, "elapsed": seconds, "limit": seconds,
}  # fmt: skip
_EXAMPLE: Mapping[str, Kind] = {
    "says": string, "fits": yes_no, "running": yes_no, **{key: _Measured(kind) for key, kind in _MEASURED.items()},
}  # fmt: skip


def _signature(file: TomlFile, row: Any, path: Key) -> Signature | None:
    """Return a signature, if it is valid so far."""
    values = file.value(TomlTable(_KEYS), row, path)
    if values is INVALID or not _complete(file, row, path):
        return None
    parts = {name: _part(file, name, values[name], (*path, name)) for name in DIMENSIONS if name in values}
    if not file.valid(*path):
        return None
    least = values.get("min_score", 0.8)
    _check_weights(file, {name: part.weight for name, part in parts.items()}, least, path)
    return Signature(
        name=values["name"], kind=values["kind"], title=values.get("title", ""), advice=values.get("advice", ""),
        min_score=least, line=file.line(path), **parts,
    )  # fmt: skip


def _complete(file: TomlFile, row: Mapping[str, Any], path: Key) -> bool:
    complete = file.required(row, path, ("name", "kind"))
    for name in DIMENSIONS:
        if name in row:
            complete &= file.required(row[name], (*path, name), _NEEDED.get(name, ("weight",)))
        elif name in ("compute", "time"):
            file.fault(path, f"[signature.{name}] is missing: without it a GPU cannot be found idle")
            complete = False
    return complete


def _part(file: TomlFile, name: str, values: dict[str, Any], path: Key) -> Any:
    """Return a dimension; ``None`` if it is invalid."""
    if name == "memory":
        above = "above_pct" in values or "or_above_gib" in values
        if ("at_most_gib" in values) == above and file.valid(*path):
            file.fault(path, "needs above_pct, or_above_gib or both; or at_most_gib alone")
    if not file.valid(*path):
        return None
    if name != "power":
        values.setdefault("required", name in ("compute", "time"))
    if name == "time":
        values["longer_than_s"] = values.pop("longer_than")
    return _PARTS[name][0](**values)


def _check_weights(file: TomlFile, weights: Mapping[str, float], least: float, path: Key) -> None:
    total = sum(weights.values())
    if total > 1 + 1e-9:
        file.fault(path, f"the weights add up to {total:g}: at most 1 is a score")
    for name, weight in weights.items():
        if weight >= least and weight > 0:
            file.fault((*path, name, "weight"), f"{weight:g} reaches min_score {least:g} by itself: "
                       "one dimension alone must not suffice")  # fmt: skip
    if total + 1e-9 < least:
        file.fault((*path, "min_score"), f"{least:g} cannot be reached: the weights add up to {total:g}")


def _examples(file: TomlFile, row: Mapping[str, Any], path: Key) -> list[Example]:
    """Return the valid examples of a signature."""
    rows = row.get("example", [])
    if not isinstance(rows, list):
        file.fault((*path, "example"), "is a list of tables: write [[signature.example]]")
        return []
    examples = []
    for index, example in enumerate(rows):
        location: Key = (*path, "example", index)
        values = file.table(example, location, _EXAMPLE)
        if file.required(example, location, ("says", "fits")) and file.valid(*location):
            examples.append(_example(values, str(row.get("name")), file.line(location)))
    return examples


def _example(values: Mapping[str, Any], name: str, line: int) -> Example:
    gpu = GpuFacts(
        peaks_pct=values.get("peaks_pct") or {}, idle_s=values.get("idle"), memory_gib=values.get("memory_gib"),
        memory_total_gib=values.get("memory_total_gib"), power_w=values.get("power_w"),
        used_before=values.get("used_before"),
    )  # fmt: skip
    state = values.get("state", "RUNNING")
    running = values.get("running", state == "RUNNING")
    return Example(
        name, values["says"], values["fits"], gpu,
        RunFacts(state, running, values.get("elapsed"), values.get("limit")), line,
    )  # fmt: skip
