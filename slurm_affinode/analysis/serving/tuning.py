"""Advice on the settings of an engine, from what it has done: lengths of requests, KV usage, preemptions, failures.

Nothing is advised without a figure behind it. The trap is the share of GPU memory: preemptions with free GPU memory ask
for more of it, and an out-of-memory error of the driver for less. An engine that ran out of memory is never advised to
take more.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_affinode.analysis.serving.capacity import LOST_SHARE, Capacity, estimate
from slurm_affinode.analysis.serving.crash_log import LogFailure, StartupFacts
from slurm_affinode.analysis.serving.queue import second_moment
from slurm_affinode.analysis.serving.series import EngineSeries
from slurm_affinode.base.text import size
from slurm_affinode.model.finding import plain
from slurm_affinode.model.serving import Diagnosis

OPTIONS: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "memory-share": "--gpu-memory-utilization", "max-length": "--max-model-len", "max-running": "--max-num-seqs",
        "batched-tokens": "--max-num-batched-tokens", "kv-dtype": "--kv-cache-dtype",
        "tensor-parallel": "--tensor-parallel-size", "kv-blocks": "--num-gpu-blocks-override",
    },
    "sglang": {
        "memory-share": "--mem-fraction-static", "max-length": "--context-length",
        "max-running": "--max-running-requests", "batched-tokens": "--chunked-prefill-size",
        "kv-dtype": "--kv-cache-dtype", "tensor-parallel": "--tp-size",
    },
    "llamacpp": {"max-length": "--ctx-size", "max-running": "--parallel", "kv-dtype": "--cache-type-k"},
}  # fmt: skip
"""Engine -> setting -> its option. A setting without an option, and ``replicas``, are named in words."""
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("vllm", "serve"),
    "sglang": ("python3", "-m", "sglang.launch_server", "--model-path"),
    "llamacpp": ("llama-server", "--model"),
}
"""Engine -> the beginning of its command line; the model follows."""

MOST_SHARE = 0.97
"""Largest share of GPU memory that is advised: the driver and other processes need some."""
RESERVE_SHARE = 0.03
"""Share of GPU memory that stays free when more is given: fragmentation and activations vary by about as much."""
COSTLY = 0.5
"""Preemptions for each completed request from which a smaller batch is considered: repeating some prefill is cheaper
than a batch that is too small."""
TARGET_LOAD = 0.8
"""Load for which replicas are planned: queues grow long before the arrivals exceed the service."""
LENGTH_MARGIN = 1.25
"""Factor above the longest request observed, for the largest length."""


@dataclass(frozen=True, slots=True)
class TuningFacts:
    """What is known about an engine over a period. ``None`` is unknown."""

    engine: str
    seconds: float
    requests: float | None = None
    """Requests completed."""
    kv_tokens: float | None = None
    kv_peak: float | None = None
    """0-1."""
    kv_when_waiting: float | None = None
    """0-1, mean KV usage while requests waited."""
    memory_share: float | None = None
    max_running: float | None = None
    max_length: int | None = None
    running_peak: float | None = None
    waiting_peak: float | None = None
    preemptions: float | None = None
    lost_share: float | None = None
    """Share of the output rate that the worst preemption storm cost; ``None``: there was nothing to compare with."""
    prompt_mean: float | None = None
    output_mean: float | None = None
    output_square: float | None = None
    """Mean of the squared length."""
    prompt_longest: float | None = None
    """Upper bound of the longest prompt, from its histogram."""
    output_longest: float | None = None
    overload: float | None = None
    """Arrivals by service in the worst episode of queue instability."""
    kv_limited: bool = False
    """The KV cache was full while requests waited, or requests were preempted."""
    batch_limited: bool = False
    """The batch was full, and the KV cache was not."""
    gpu_total_gib: float | None = None
    """Memory of one GPU."""
    gpu_free_gib: float | None = None
    """Least free memory of one of its GPUs in the period."""
    failures: tuple[LogFailure, ...] = ()
    kv_blocks: int | None = None
    """Blocks of the KV cache that an option sets."""
    kv_blocks_free: int | None = None
    """Blocks for which there was memory at startup."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One change of a setting."""

    setting: str
    """``kv-blocks``, ``memory-share``, ``max-length``, ``max-running``, ``batched-tokens``, ``kv-dtype``,
    ``tensor-parallel`` or ``replicas``."""
    option: str | None
    """The engine's option; ``None``: it has none for this."""
    direction: str
    """``raise``, ``lower`` or ``set``."""
    current: float | str | None
    proposed: float | str | None
    """``None``: the direction is known, the value is not."""
    reason: str
    """The figures behind it."""
    cost: str
    """What it costs, or risks."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """The advice for an engine."""

    facts: TuningFacts
    recommendations: tuple[Recommendation, ...]
    unknown: tuple[str, ...]
    """What would have to be known for more advice."""

    def as_json(self) -> dict[str, Any]:
        """Return the advice as JSON values."""
        row: dict[str, Any] = plain(self)
        return row

    def command(self, model: str | None) -> str | None:
        """Return a command line with the proposed options; ``None`` if the engine's command is not known."""
        start = COMMANDS.get(self.facts.engine)
        return None if start is None else shlex.join([*start, model or "MODEL", *self.options])

    @property
    def options(self) -> tuple[str, ...]:
        """Options with their proposed values, as on a command line."""
        return tuple(
            text
            for one in self.recommendations
            if one.option is not None and one.proposed is not None
            for text in (one.option, f"{one.proposed:.10g}" if isinstance(one.proposed, float | int) else one.proposed)
        )


def observe(
    series: EngineSeries, diagnoses: Sequence[Diagnosis], failures: Sequence[LogFailure] = (),
    startup: StartupFacts | None = None, *, gpu_total_gib: float | None = None, gpu_free_gib: float | None = None,
) -> TuningFacts:  # fmt: skip
    """Return what the samples, diagnoses and logs of an engine say about its settings."""
    last = len(series) - 1
    limits: Capacity = estimate(series)
    waiting = series.value("waiting") > 0
    usage = series.value("kv_usage")[waiting]
    known = usage[~(usage != usage)]  # noqa: PLR0124 - NaN is unknown
    kinds = {one.kind for one in diagnoses}
    ratios = [value for one in diagnoses for name, value in one.figures if name == "overload"]
    lost = [value for one in diagnoses for name, value in one.figures if name == "lost_share"]
    preempted = series.sum_of("preemptions", 0, last)
    full = bool((limits.kv_full & waiting).any()) or bool(preempted)
    start = startup or StartupFacts()
    output = series.ratio_of("generation_length", "generation_length_count", 0, last)
    return TuningFacts(
        engine=series.key.engine,
        seconds=float(series.time[-1] - series.time[0]) if len(series) else 0.0,
        requests=series.sum_of("finished", 0, last),
        kv_tokens=series.peak_of("kv_tokens", 0, last) or (float(start.kv_tokens) if start.kv_tokens else None),
        kv_peak=series.peak_of("kv_usage", 0, last),
        kv_when_waiting=float(known.mean()) if len(known) else None,
        memory_share=series.peak_of("memory_share", 0, last),
        max_running=series.peak_of("max_running", 0, last) or (limits.batch_limit if limits.batch_seen else None),
        max_length=start.max_length,
        running_peak=series.peak_of("running", 0, last),
        waiting_peak=series.peak_of("waiting", 0, last),
        preemptions=preempted,
        lost_share=max(lost, default=None),
        prompt_mean=series.ratio_of("prompt_length", "prompt_length_count", 0, last),
        output_mean=output,
        output_square=None if output is None else second_moment(series, 0, last, output)[0],
        prompt_longest=_longest(series, "prompt_lengths"),
        output_longest=_longest(series, "generation_lengths"),
        overload=max(ratios, default=None),
        kv_limited=full and bool({"kv-saturated", "preemption-storm"} & kinds),
        batch_limited="batch-full" in kinds,
        gpu_total_gib=gpu_total_gib,
        gpu_free_gib=gpu_free_gib,
        failures=tuple(failures),
        kv_blocks=start.kv_blocks,
        kv_blocks_free=start.kv_blocks_free,
    )


def _longest(series: EngineSeries, name: str) -> float | None:
    """Return the upper bound of the longest request; ``None`` if there is no histogram, or the bound is open."""
    for position in range(len(series) - 1, -1, -1):
        buckets = series.buckets(name, position)
        if not buckets:
            if name not in series.histograms:
                return None
            continue
        total = buckets[-1]["count"]
        if total <= 0:
            return None
        bound = next(one["le"] for one in buckets if one["count"] >= total)
        return None if math.isinf(bound) else float(bound)
    return None


def tune(facts: TuningFacts) -> Tuning:
    """Return the advice for an engine, the most urgent first."""
    found: list[Recommendation] = []
    unknown: list[str] = []
    failed = {one.kind: one for one in facts.failures}
    found += _kv_blocks(facts)
    found += _memory_share(facts, failed, unknown)
    found += _max_length(facts, failed)
    found += _max_running(facts, unknown)
    found += _batched_tokens(facts, failed)
    found += _kv_dtype(facts, failed)
    found += _tensor_parallel(facts, failed)
    found += _replicas(facts)
    if facts.kv_limited and facts.kv_tokens is None:
        unknown.append("the size of the KV cache (give the engine's log, which names it at startup)")
    return Tuning(facts, tuple(found), tuple(dict.fromkeys(unknown)))


def _advice(  # noqa: PLR0917 - the fields of Recommendation
    facts: TuningFacts, setting: str, direction: str, current: float | str | None, proposed: float | str | None,
    reason: str, cost: str,
) -> Recommendation:  # fmt: skip
    option = OPTIONS.get(facts.engine, {}).get(setting)
    return Recommendation(setting, option, direction, current, proposed, reason, cost)


def _more_blocks(facts: TuningFacts) -> bool:
    return facts.kv_blocks is not None and (facts.kv_blocks_free or 0) > facts.kv_blocks


def _kv_blocks(facts: TuningFacts) -> list[Recommendation]:
    """Advise the blocks for which the engine found memory, where an option sets fewer and they limit it."""
    if not facts.kv_limited or not _more_blocks(facts):
        return []
    count = f"{facts.preemptions:,.0f} preemptions" if facts.preemptions else "requests waited for the KV cache"
    return [
        _advice(
            facts, "kv-blocks", "raise", facts.kv_blocks, facts.kv_blocks_free,
            f"{count}, and at startup there was memory for {facts.kv_blocks_free:,} blocks of the KV cache: an option "
            f"sets {facts.kv_blocks:,}",
            "the memory that the engine is configured to use, which is the default without the option",
        )
    ]  # fmt: skip


def _memory_share(facts: TuningFacts, failed: Mapping[str, LogFailure], unknown: list[str]) -> list[Recommendation]:
    share = facts.memory_share
    if "gpu-out-of-memory" in failed:
        return [_lower_share(facts, failed["gpu-out-of-memory"])]
    wants = (facts.kv_limited and not _more_blocks(facts)) or "no-kv-cache-memory" in failed
    if not wants:
        return []
    if facts.gpu_free_gib is None or facts.gpu_total_gib is None:
        unknown.append("free GPU memory (ingest GPU metrics): it decides whether the KV cache can become larger")
        return []
    spare = facts.gpu_free_gib - RESERVE_SHARE * facts.gpu_total_gib
    if spare < 0.01 * facts.gpu_total_gib:
        return []
    proposed = None
    if share is not None:
        proposed = math.floor(100 * min(MOST_SHARE, share + spare / facts.gpu_total_gib)) / 100
        if proposed <= share:
            return []
    what = "preemptions" if facts.preemptions else "requests waited while the KV cache was full"
    count = f"{facts.preemptions:,.0f} preemptions" if facts.preemptions else what
    if "no-kv-cache-memory" in failed:
        count = "nothing was left for the KV cache at startup"
    return [
        _advice(
            facts, "memory-share", "raise", share, proposed,
            f"{count}, and at least {facts.gpu_free_gib:.1f} of {facts.gpu_total_gib:.1f} GiB of each GPU were free",
            "less room for activations and other processes: after an out-of-memory error, lower it again",
        )
    ]  # fmt: skip


def _lower_share(facts: TuningFacts, failure: LogFailure) -> Recommendation:
    share, total = facts.memory_share, failure.total
    if total is None and facts.gpu_total_gib is not None:
        total = facts.gpu_total_gib * 2**30
    proposed = None
    told = "an allocation of GPU memory failed"
    if failure.requested is not None:
        told += f": {size(round(failure.requested))} requested"
        told += "" if failure.free is None else f", {size(round(failure.free))} free"
    if share is not None and total and failure.requested is not None:
        short = max(0.0, failure.requested - (failure.free or 0.0)) / total + RESERVE_SHARE
        proposed = max(0.01, math.floor(100 * (share - short)) / 100)
    others = sum(held for _, held in failure.holders)
    if others:
        told += f"; other processes held {size(round(others))}"
    return _advice(
        facts, "memory-share", "lower", share, proposed, told,
        "the KV cache becomes smaller by as much: fewer requests at a time",
    )  # fmt: skip


def _max_length(facts: TuningFacts, failed: Mapping[str, LogFailure]) -> list[Recommendation]:
    small = failed.get("kv-cache-too-small")
    if small is not None and small.max_length is not None:
        return [
            _advice(
                facts, "max-length", "lower", facts.max_length, small.max_length,
                f"the KV cache holds one request of at most {small.max_length:,} tokens",
                "longer requests are refused",
            )
        ]  # fmt: skip
    if facts.max_length is None or facts.prompt_longest is None or facts.output_longest is None:
        return []
    longest = facts.prompt_longest + facts.output_longest
    proposed = math.ceil(longest * LENGTH_MARGIN / 256) * 256
    if proposed * 2 > facts.max_length:
        return []
    gain = "" if facts.kv_tokens is None else (
        f"; at full length the KV cache holds {facts.kv_tokens / proposed:.1f} requests in place of "
        f"{facts.kv_tokens / facts.max_length:.1f}"
    )  # fmt: skip
    return [
        _advice(
            facts, "max-length", "lower", facts.max_length, proposed,
            f"no prompt had more than {facts.prompt_longest:,.0f} tokens and no answer more than "
            f"{facts.output_longest:,.0f}{gain}",
            "longer requests are refused; there were none in the period",
        )
    ]  # fmt: skip


def _max_running(facts: TuningFacts, unknown: list[str]) -> list[Recommendation]:
    if facts.prompt_mean is None or facts.output_mean is None:
        if facts.preemptions or facts.batch_limited:
            unknown.append("lengths of requests, from which the largest batch follows")
        return []
    if facts.kv_tokens is None:
        return []
    square = facts.output_square or facts.output_mean**2
    held = facts.prompt_mean + (square / facts.output_mean + 1) / 2
    fits = max(1, math.floor(facts.kv_tokens / held))
    preempted = (facts.preemptions or 0.0) > COSTLY * (facts.requests or 0.0) and not _more_blocks(facts)
    if preempted and facts.lost_share is None:
        unknown.append("the output rate without preemptions: it decides whether a smaller batch is faster")
    slower = (facts.lost_share or 0.0) >= LOST_SHARE
    if preempted and slower and facts.running_peak and fits < min(facts.running_peak, facts.max_running or math.inf):
        return [
            _advice(
                facts, "max-running", "lower", facts.max_running, fits,
                f"{facts.preemptions:,.0f} preemptions with up to {facts.running_peak:g} requests at a time cost "
                f"{facts.lost_share:.0%} of the output rate; {fits} requests fill the KV cache: they hold {held:,.0f} "
                "tokens each on average",
                "requests wait in the queue in place of being preempted, and throughput may fall a little: prefer a "
                "larger KV cache where that is possible",
            )
        ]  # fmt: skip
    proposed = math.floor(min(fits, 4 * (facts.max_running or 0.0)))
    unused = facts.batch_limited and not facts.kv_limited and (facts.kv_when_waiting or 1.0) < 0.7
    if unused and facts.max_running and proposed > facts.max_running:
        return [
            _advice(
                facts, "max-running", "raise", facts.max_running, proposed,
                f"up to {facts.waiting_peak or 0:g} requests waited for a place in the batch, while "
                f"{facts.kv_when_waiting:.0%} of the KV cache was used; {fits} mean requests would fill it",
                "more time between tokens for every request",
            )
        ]  # fmt: skip
    return []


def _batched_tokens(facts: TuningFacts, failed: Mapping[str, LogFailure]) -> list[Recommendation]:
    failure = failed.get("gpu-out-of-memory")
    if failure is None or facts.prompt_longest is None or facts.prompt_longest < 2048:
        return []
    return [
        _advice(
            facts, "batched-tokens", "lower", None, None,
            f"GPU memory ran out, and prompts have up to {facts.prompt_longest:,.0f} tokens: activations grow with the "
            "tokens prefilled in one iteration",
            "longer time to first token for long prompts",
        )
    ]  # fmt: skip


def _kv_dtype(facts: TuningFacts, failed: Mapping[str, LogFailure]) -> list[Recommendation]:
    spare = facts.gpu_free_gib is not None and facts.gpu_total_gib is not None
    spare = spare and (facts.gpu_free_gib or 0) > (RESERVE_SHARE + 0.01) * (facts.gpu_total_gib or 0)
    tight = "gpu-out-of-memory" in failed or "kv-cache-too-small" in failed or facts.gpu_free_gib is not None
    if not facts.kv_limited or _more_blocks(facts) or spare or not tight:
        return []
    value = "q8_0" if facts.engine == "llamacpp" else "fp8"
    return [
        _advice(
            facts, "kv-dtype", "set", None, value,
            "the KV cache limits the engine, and no GPU memory is free to enlarge it; with 8 in place of 16 bits it "
            "holds twice the tokens",
            "compare the answers: accuracy may suffer; needs a GPU and attention kernels that support it",
        )
    ]  # fmt: skip


def _tensor_parallel(facts: TuningFacts, failed: Mapping[str, LogFailure]) -> list[Recommendation]:
    free = facts.gpu_free_gib is not None and facts.gpu_total_gib is not None
    free = free and (facts.gpu_free_gib or 0) > (RESERVE_SHARE + 0.01) * (facts.gpu_total_gib or 0)
    if "no-kv-cache-memory" not in failed or free:
        return []
    return [
        _advice(
            facts, "tensor-parallel", "raise", None, None,
            "the weights leave no memory for the KV cache: twice the GPUs halve them",
            "twice the GPUs; communication between them",
        )
    ]  # fmt: skip


def _replicas(facts: TuningFacts) -> list[Recommendation]:
    if facts.overload is None or facts.overload <= 1:
        return []
    count = max(2, math.ceil(facts.overload / TARGET_LOAD))
    return [
        Recommendation(
            "replicas", None, "raise", 1, count,
            f"in the worst episode {facts.overload:.2f} times as many requests arrived as were served; {count} engines "
            f"would be loaded to {facts.overload / count:.0%}",
            f"{count} times the GPUs, or fewer if other changes make one engine faster",
        )
    ]  # fmt: skip
