"""Advice on the settings of an engine, from the lengths of its requests, KV usage, preemptions and failures.

Each recommendation has a figure behind it. Preemptions with free GPU memory call for a larger share of it, an
out-of-memory error of the driver for a smaller one. An engine that ran out of memory is never advised to take more.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slurm_affinode.base.text_templates import TextTable, filled
from slurm_affinode.engines.crashes.crash_log import LogFailure, StartupFacts
from slurm_affinode.engines.diagnosis.capacity import LOST_SHARE, Capacity, estimate
from slurm_affinode.engines.diagnosis.queue import second_moment
from slurm_affinode.engines.diagnosis.series import EngineSeries
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

TEXTS = TextTable.of(__package__, "tuning_texts.toml")

MOST_SHARE = 0.97
"""Largest share of GPU memory that is advised: the driver and other processes need some."""
RESERVE_SHARE = 0.03
"""Share of GPU memory that stays free when more is given: fragmentation and activations vary by about as much."""
COSTLY_PREEMPTIONS = 0.5
"""Preemptions per completed request above which a smaller batch is considered: repeating some prefill is cheaper than a
batch that is too small."""
TARGET_LOAD = 0.8
"""Load for which replicas are planned: queues grow long before the arrivals exceed the service."""
LENGTH_MARGIN = 1.25
"""Factor above the longest request observed, for the largest length."""


@dataclass(frozen=True, slots=True)
class TuningFacts:
    """Figures of an engine over a period that its settings depend on. ``None`` is unknown."""

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
    unstable: bool = False
    """The queue was unstable."""
    kv_limited: bool = False
    """The KV cache was full while requests waited, or requests were preempted."""
    batch_limited: bool = False
    """The batch was full, and the KV cache was not."""
    gpu_total_gib: float | None = None
    """Memory of one GPU."""
    gpu_free_gib: float | None = None
    """Least free memory of one of its GPUs in the period."""
    failures: tuple[LogFailure, ...] | None = None
    """Those in the logs; ``None``: no log was given."""
    kv_blocks: int | None = None
    """Blocks of the KV cache that an option sets."""
    kv_blocks_free: int | None = None
    """Blocks for which there was memory at startup."""
    model: str | None = None
    """Model on the command line of the start."""
    options: tuple[tuple[str, ...], ...] | None = None
    """Options of the start that differ from the defaults, each with its values; ``None``: not logged."""


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
    """Its cost or risk."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """The advice for an engine."""

    facts: TuningFacts
    recommendations: tuple[Recommendation, ...]
    unknown: tuple[str, ...]
    """Facts that are missing for more advice."""

    def as_json(self) -> dict[str, Any]:
        """Return the advice as JSON values."""
        row: dict[str, Any] = plain(self)
        return row

    def agrees(self, tuning: Tuning) -> bool:
        """Return whether both advise the same changes. Values that follow the load may differ by a tenth."""
        return len(self.recommendations) == len(tuning.recommendations) and all(
            (advice.setting, advice.direction) == (counterpart.setting, counterpart.direction)
            and _close(advice.proposed, counterpart.proposed)
            for advice, counterpart in zip(self.recommendations, tuning.recommendations, strict=True)
        )

    def command(self, served: str | None) -> str | None:
        """Return the command line of the engine with the proposed options in addition to those of its start.

        ``served``: name of the model in the metrics, if the log has none. ``None`` if no option is
        proposed, or the engine's command is not known.
        """
        start, advised = COMMANDS.get(self.facts.engine), self.options
        if start is None or not advised:
            return None
        kept_options = (part for option in self.facts.options or () if option[0] not in advised for part in option)
        return shlex.join([*start, self.facts.model or served or "MODEL", *kept_options, *advised])

    @property
    def options(self) -> tuple[str, ...]:
        """Options with their proposed values, as on a command line."""
        return tuple(
            text
            for advice in self.recommendations
            if advice.option is not None and advice.proposed is not None
            for text in (
                advice.option,
                f"{advice.proposed:.10g}" if isinstance(advice.proposed, float | int) else advice.proposed,
            )
        )


def _close(value: float | str | None, reference: float | str | None) -> bool:
    if isinstance(value, int | float) and isinstance(reference, int | float):
        return math.isclose(value, reference, rel_tol=0.1)
    return value == reference


def observe(
    series: EngineSeries, diagnoses: Sequence[Diagnosis], failures: Sequence[LogFailure] | None = None,
    startup: StartupFacts | None = None, *, gpu_total_gib: float | None = None, gpu_free_gib: float | None = None,
) -> TuningFacts:  # fmt: skip
    """Return the figures behind the settings of an engine, from its samples, diagnoses and logs.

    ``series``: with its histograms, if it has some.
    """
    last = len(series) - 1
    limits: Capacity = estimate(series)
    waiting = series.value("waiting") > 0
    usage = series.value("kv_usage")[waiting]
    finite = usage[np.isfinite(usage)]
    kinds = {diagnosis.kind for diagnosis in diagnoses}
    ratios = [value for diagnosis in diagnoses for name, value in diagnosis.figures if name == "overload"]
    lost = [value for diagnosis in diagnoses for name, value in diagnosis.figures if name == "lost_share"]
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
        kv_when_waiting=float(finite.mean()) if len(finite) else None,
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
        unstable="queue-unstable" in kinds,
        kv_limited=full and bool({"kv-saturated", "preemption-storm"} & kinds),
        batch_limited="batch-full" in kinds,
        gpu_total_gib=gpu_total_gib,
        gpu_free_gib=gpu_free_gib,
        failures=None if failures is None else tuple(failures),
        kv_blocks=start.kv_blocks,
        kv_blocks_free=start.kv_blocks_free,
        model=start.model,
        options=start.options,
    )


def _longest(series: EngineSeries, name: str) -> float | None:
    """Return the upper bound of the longest request; ``None`` if there is no histogram, or the bound is open.

    A histogram counts from the start of the process: the last one before each restart counts.
    """
    longest = None
    for first, end in series.segments:
        buckets = next((counts for row in range(end - 1, first - 1, -1) if (counts := series.buckets(name, row))), None)
        if buckets and buckets[-1]["count"] > 0:
            bound = next(bucket["le"] for bucket in buckets if bucket["count"] >= buckets[-1]["count"])
            longest = max(longest or 0.0, bound)
    return longest if longest is not None and math.isfinite(longest) else None


def tune(facts: TuningFacts) -> Tuning:
    """Return the advice for an engine, the most urgent first."""
    unknown: list[str] = []
    failures = {failure.kind: failure for failure in facts.failures or ()}
    recommendations = [
        *_kv_blocks(facts),
        *_memory_share(facts, failures, unknown),
        *_max_length(facts, failures),
        *_max_running(facts, failures, unknown),
        *_batched_tokens(facts, failures),
        *_kv_dtype(facts, failures),
        *_tensor_parallel(facts, failures),
        *_replicas(facts, unknown),
    ]
    if facts.kv_limited and facts.kv_tokens is None:
        unknown.append("unknown.kv-tokens")
    return Tuning(facts, tuple(recommendations), tuple(TEXTS.text(code, {}) for code in dict.fromkeys(unknown)))


def _advice(
    facts: TuningFacts, code: str, current: float | str | None, proposed: float | str | None,
    **values: float | str | None,
) -> Recommendation:  # fmt: skip
    """Return a recommendation. ``code``: SETTING.DIRECTION, or with a variant; ``values``: those of its texts."""
    setting, _, key = code.partition(".")
    option = OPTIONS.get(facts.engine, {}).get(setting)
    reason, cost = (filled(TEXTS.entry(code)[name], values) or "" for name in ("reason", "cost"))
    return Recommendation(setting, option, key.partition("-")[0], current, proposed, reason, cost)


def _shortage(facts: TuningFacts) -> str:
    """Return the evidence that the KV cache is too small."""
    code = "shortage.preemptions" if facts.preemptions else "shortage.waiting"
    return TEXTS.text(code, {"count": facts.preemptions})


def _spare_gib(facts: TuningFacts) -> float | None:
    """Return the memory of each GPU that the engine could take in addition; 0 if too little, ``None`` if unknown."""
    if facts.gpu_free_gib is None or facts.gpu_total_gib is None:
        return None
    spare = facts.gpu_free_gib - RESERVE_SHARE * facts.gpu_total_gib
    return spare if spare >= 0.01 * facts.gpu_total_gib else 0.0


def _more_blocks(facts: TuningFacts) -> bool:
    return facts.kv_blocks is not None and (facts.kv_blocks_free or 0) > facts.kv_blocks


def _kv_blocks(facts: TuningFacts) -> list[Recommendation]:
    """Advise the blocks for which the engine found memory, where an option sets fewer and they limit it."""
    if not facts.kv_limited or not _more_blocks(facts):
        return []
    blocks, free = facts.kv_blocks, facts.kv_blocks_free
    return [_advice(facts, "kv-blocks.raise", blocks, free, shortage=_shortage(facts), free=free, blocks=blocks)]


def _memory_share(facts: TuningFacts, failures: Mapping[str, LogFailure], unknown: list[str]) -> list[Recommendation]:
    if "gpu-out-of-memory" in failures:
        return [_lower_share(facts, failures["gpu-out-of-memory"])]
    if "gpu-memory-at-startup" in failures:
        return [_free_share(facts, failures["gpu-memory-at-startup"])]
    no_memory = "no-kv-cache-memory" in failures
    if not no_memory and (not facts.kv_limited or _more_blocks(facts)):
        return []
    spare, total, share = _spare_gib(facts), facts.gpu_total_gib, facts.memory_share
    if spare is None or total is None:
        unknown.append("unknown.free-memory")
        return []
    if not spare:
        return []
    proposed = None if share is None else math.floor(100 * min(MOST_SHARE, share + spare / total)) / 100
    if share is not None and proposed is not None and proposed <= share:
        return []
    shortage = TEXTS.text("shortage.startup", {}) if no_memory else _shortage(facts)
    return [
        _advice(
            facts, "memory-share.raise", share, proposed, shortage=shortage, free=facts.gpu_free_gib, total=total
        )
    ]  # fmt: skip


def _lower_share(facts: TuningFacts, failure: LogFailure) -> Recommendation:
    share, requested, total = facts.memory_share, failure.requested, failure.total
    if total is None and facts.gpu_total_gib is not None:
        total = facts.gpu_total_gib * 2**30
    proposed = None
    if share is not None and total and requested is not None:
        short = max(0.0, requested - (failure.free or 0.0)) / total + RESERVE_SHARE
        proposed = max(0.01, math.floor(100 * (share - short)) / 100)
    other_bytes = sum(held_bytes for _, held_bytes in failure.holders)
    return _advice(
        facts, "memory-share.lower", share, proposed, requested=_rounded(requested),
        free=None if requested is None else _rounded(failure.free),
        others=_rounded(other_bytes) if other_bytes else None,
    )  # fmt: skip


def _rounded(count: float | None) -> int | None:
    return None if count is None else round(count)


def _free_share(facts: TuningFacts, failure: LogFailure) -> Recommendation:
    """Advise the share that was free at a start that was refused."""
    free, total = failure.free, failure.total
    share = math.floor(100 * free / total) / 100 if free is not None and total else None
    return _advice(
        facts, "memory-share.lower-startup", facts.memory_share, share or None, free=_rounded(free),
        total=_rounded(total),
    )  # fmt: skip


def _max_length(facts: TuningFacts, failures: Mapping[str, LogFailure]) -> list[Recommendation]:
    refused = failures.get("kv-cache-too-small")
    current, fits = facts.max_length, None if refused is None else refused.max_length
    if fits is not None:
        return [_advice(facts, "max-length.lower-refused", current, fits, length=fits)]
    prompt, output, tokens = facts.prompt_longest, facts.output_longest, facts.kv_tokens
    if current is None or prompt is None or output is None:
        return []
    proposed = math.ceil((prompt + output) * LENGTH_MARGIN / 256) * 256
    if proposed * 2 > current:
        return []
    return [
        _advice(
            facts, "max-length.lower", current, proposed, prompt=prompt, output=output,
            more=None if tokens is None else tokens / proposed,
            fewer=None if tokens is None else tokens / current,
        )
    ]  # fmt: skip


def _max_running(facts: TuningFacts, failures: Mapping[str, LogFailure], unknown: list[str]) -> list[Recommendation]:
    if "kv-cache-exhausted" in failures:
        return [_advice(facts, "max-running.lower-exhausted", facts.max_running, None)]
    mean_tokens = _mean_tokens(facts)
    if mean_tokens is None and (facts.preemptions or facts.batch_limited):
        unknown.append("unknown.lengths")
    if mean_tokens is None or facts.kv_tokens is None:
        return []
    fits = max(1, math.floor(facts.kv_tokens / max(1.0, mean_tokens)))
    return _smaller_batch(facts, fits, mean_tokens, unknown) or _larger_batch(facts, fits)


def _mean_tokens(facts: TuningFacts) -> float | None:
    """Return the tokens that a request holds on average; ``None``: lengths are unknown."""
    if facts.prompt_mean is None or facts.output_mean is None:
        return None
    square = facts.output_mean**2 if facts.output_square is None else facts.output_square
    # Answers without a token are those of embeddings.
    return facts.prompt_mean + ((square / facts.output_mean + 1) / 2 if facts.output_mean > 0 else 0.0)


def _smaller_batch(facts: TuningFacts, fits: int, mean_tokens: float, unknown: list[str]) -> list[Recommendation]:
    """Advise a smaller batch where preemptions are frequent and cost throughput."""
    preemptions, running = facts.preemptions, facts.running_peak
    if preemptions is None or facts.requests is None or preemptions <= COSTLY_PREEMPTIONS * facts.requests:
        return []
    if _more_blocks(facts):
        return []
    if facts.lost_share is None:
        unknown.append("unknown.output-rate")
        return []
    if facts.lost_share < LOST_SHARE or not running or fits >= min(running, facts.max_running or math.inf):
        return []
    return [
        _advice(
            facts, "max-running.lower", facts.max_running, fits, preemptions=preemptions, running=running,
            lost=facts.lost_share, fits=fits, held=mean_tokens,
        )
    ]  # fmt: skip


def _larger_batch(facts: TuningFacts, fits: int) -> list[Recommendation]:
    """Advise a larger batch where requests wait for a place and the KV cache is not used."""
    used, current = facts.kv_when_waiting, facts.max_running
    if not facts.batch_limited or facts.kv_limited or used is None or used >= 0.7 or not current:
        return []
    proposed = math.floor(min(fits, 4 * current))
    if proposed <= current:
        return []
    waiting = facts.waiting_peak or 0.0
    return [_advice(facts, "max-running.raise", current, proposed, waiting=waiting, used=used, fits=fits)]


def _batched_tokens(facts: TuningFacts, failures: Mapping[str, LogFailure]) -> list[Recommendation]:
    prompt = facts.prompt_longest
    if "gpu-out-of-memory" not in failures or prompt is None or prompt < 2048:
        return []
    return [_advice(facts, "batched-tokens.lower", None, None, prompt=prompt)]


def _kv_dtype(facts: TuningFacts, failures: Mapping[str, LogFailure]) -> list[Recommendation]:
    spare = _spare_gib(facts)
    full = spare == 0 or (spare is None and "gpu-out-of-memory" in failures)
    if not facts.kv_limited or _more_blocks(facts) or not full:
        return []
    return [_advice(facts, "kv-dtype.set", None, "q8_0" if facts.engine == "llamacpp" else "fp8")]


def _tensor_parallel(facts: TuningFacts, failures: Mapping[str, LogFailure]) -> list[Recommendation]:
    if "no-kv-cache-memory" not in failures or _spare_gib(facts):
        return []
    return [_advice(facts, "tensor-parallel.raise", None, None)]


def _replicas(facts: TuningFacts, unknown: list[str]) -> list[Recommendation]:
    overload = facts.overload
    if overload is None and facts.unstable:
        unknown.append("unknown.overload")
        return [_advice(facts, "replicas.raise-unstable", 1, None, waiting=facts.waiting_peak)]
    if overload is None or overload <= 1:
        return []
    count = max(2, math.ceil(overload / TARGET_LOAD))
    return [_advice(facts, "replicas.raise", 1, count, overload=overload, count=count, load=overload / count)]
