"""Signatures: what a GPU that is held and not used looks like. Pure: facts in, evidence and a score out.

Rules:

- Each dimension (memory, compute, time, use, state, power) is met, not met, or unknown. The score is the sum of the
  weights of those that are met. Unknown counts for nothing.
- A signature fits where its score reaches ``min_score``, every dimension that it requires is met, and compute is one of
  at least two that are met: one dimension alone never accuses, and neither does anything without measured activity.
- Compute is met where no available signal was above the limit during the whole window. Signals that are not there are
  left out; where none is there, compute is unknown. Memory that a framework allocated beforehand therefore accuses
  nobody who computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_affinode.core.spans import span
from slurm_affinode.model.finding import Evidence

DIMENSIONS = ("memory", "compute", "time", "use", "state", "power")
"""In the order in which they are shown."""
USES = ("never", "once")


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU over the window. ``None`` is unknown."""

    peaks_pct: Mapping[str, float | None] = field(default_factory=dict)
    """Signal of activity -> its largest value in the window, percent."""
    idle_s: float | None = None
    """So long no available signal was above ``compute.at_most_pct``, until the end."""
    memory_gib: float | None = None
    memory_total_gib: float | None = None
    power_w: float | None = None
    used_before: bool | None = None
    """It was above the limit at some earlier time of the same run, as far as the samples reach back."""

    @property
    def peak_pct(self) -> float | None:
        """The busiest signal; ``None`` where there is none."""
        return max((value for value in self.peaks_pct.values() if value is not None), default=None)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The run of a job that holds the GPU."""

    state: str | None
    running: bool
    elapsed_s: float | None = None
    limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """Framebuffer held: more than a share of the GPU or an amount; or, where nobody is on it, at most an amount."""

    weight: float
    required: bool
    above_pct: float | None = None
    or_above_gib: float | None = None
    at_most_gib: float | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """Every available signal at most so many percent."""

    weight: float
    required: bool
    at_most_pct: float


@dataclass(frozen=True, slots=True)
class Time:
    """Longer than so many seconds."""

    weight: float
    required: bool
    longer_than_s: float


@dataclass(frozen=True, slots=True)
class Use:
    """``never``: not once above the limit since the run began; ``once``: it was, and is not any more."""

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
    """At its limit: it used at least this share of the time limit."""


@dataclass(frozen=True, slots=True)
class Power:
    """Shown. May count where the site says so; never required."""

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
    memory: Memory | None = None
    use: Use | None = None
    state: State | None = None
    power: Power | None = None
    advice: str = ""
    line: int = 0
    """Where it is in its file."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a signature says of one GPU."""

    signature: Signature
    evidence: tuple[Evidence, ...]
    score: float
    fits: bool
    why_not: str
    """Empty where it fits."""


def judge(signature: Signature, gpu: GpuFacts, run: RunFacts) -> Verdict:
    """Hold one GPU against one signature."""
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
    # That it computes, or that nobody knows, says more than anything else.
    for name in ("compute", *DIMENSIONS):
        part, one = getattr(signature, name), found[name]
        if one is not None and part.required and not one.met:
            why_not = one.text
            break
    if not why_not and not compute.met:
        why_not = compute.text
    if not why_not and sum(one.met and one.weight > 0 for one in evidence) < 2:
        why_not = "one dimension alone accuses nobody"
    if not why_not and score < signature.min_score - 1e-9:
        why_not = f"score {score:.2f} is below {signature.min_score:.2f}"
    return Verdict(signature, evidence, score, not why_not, why_not)


def lacks_only_time(verdict: Verdict) -> bool:
    """It is as the signature says, and does not last, or is not known to have lasted, for long enough.

    Whether it was used before may be unknown for the same reason: nobody looked for longer.
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


def _memory(rule: Memory, gpu: GpuFacts) -> Evidence:
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
    names = f"{len(known)} signal{'s' if len(known) != 1 else ''}: {', '.join(known)}"
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


def _use(rule: Use, gpu: GpuFacts, limit: float) -> Evidence:
    never = rule.before == "never"
    threshold = "never above the limit" if never else "above the limit before"
    if gpu.used_before is None:
        return _unknown("use", "", threshold, rule.weight, "whether it was used before is not known")
    text = f"it was above {limit:g} % before" if gpu.used_before else f"never above {limit:g} % in the time looked at"
    value = "before" if gpu.used_before else "never"
    return Evidence("use", value, "", threshold, rule.weight, text, met=gpu.used_before is not never)


def _state(rule: State, run: RunFacts) -> Evidence:
    words = ["RUNNING"] if rule.running else []
    words += [f"{', '.join(rule.ended)} at its time limit"] if rule.ended else []
    threshold = " or ".join(words)
    if run.state is None:
        return _unknown("state", "", threshold, rule.weight, "the state of the job is not known")
    if run.running:
        met = rule.running and run.state == "RUNNING"  # who is suspended cannot compute
        return Evidence("state", run.state, "", threshold, rule.weight, f"the job is {run.state}", met=met)
    if run.state not in rule.ended:
        return Evidence("state", run.state, "", threshold, rule.weight, f"the job ended {run.state}")
    if run.state == "TIMEOUT":  # that is what the word means, whatever the limit was
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
