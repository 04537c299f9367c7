"""The rules of the diagnoses as text for users, and the construction of a diagnosis from its evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from slurm_affinode.model.finding import Evidence
from slurm_affinode.model.serving import DIAGNOSES, Diagnosis

RULES: Mapping[str, str] = {
    "healthy": "Scrapes succeed, requests make progress or none are held, and no other diagnosis of the load holds.",
    "idle": "No request runs or waits and no token is processed for at least the idle time, while the engine is up and "
    "not asleep. GPU-hours count the engine's GPUs over that time, GiB-hours the GPU memory measured on them.",
    "asleep": "The engine reports a sleep state. A sleeping engine has given its GPU memory back: it is not idle.",
    "kv-saturated": "The free part of the KV cache is smaller than a mean request holds, or requests wait while the "
    "cache is at the level at which it stays whenever requests wait, or requests are preempted. The level follows from "
    "the engine's own requests: if one needs a fifth of the cache, the cache is full at 0.8.",
    "batch-full": "Requests wait while the number of running requests stays at its limit, which is configured, or seen "
    "as a plateau. It takes the place of KV saturation for engines without KV metrics.",
    "queue-unstable": "The queue grows by more than 3.5 standard deviations of its random fluctuation, for at least "
    "20 s and three times a request's own processing time, in several steps: more requests arrive than are served. "
    "Rejected requests count as queued. The token-based estimate of the overload is the arrival rate relative to "
    "M / (b E[g]), M: tokens of the KV cache, b: time of an iteration, g: o s + o (o + 1) / 2 for s prompt and o "
    "output tokens.",
    "recovering": "After an overload the queue gets shorter, until a twentieth is left or it grows again.",
    "preemption-storm": "For at least 20 s requests are preempted nearly without pause, and repeating their prefill "
    "takes at least a tenth of the tokens processed, or output falls by at least a fifth.",
    "request-too-large": "Requests are held, but for a long time none ends and no token is generated, and either the "
    "queue does not move while the KV cache is nearly empty, or the cache fills up and is emptied again and again; or "
    "the log says that the KV cache is smaller than one request.",
    "swap-thrashing": "Requests are swapped to host memory and return again and again while the KV cache is full.",
    "stalled": "Requests are held, and for far longer than the engine paused before, no token is processed and no "
    "request ends, while the state of the KV cache does not change.",
    "out-of-memory": "The log or Slurm reports an out-of-memory error; or, with less confidence, the engine ended "
    "under load while GPU memory was at its maximum.",
    "ended": "Scrapes fail for several intervals and do not succeed again with the same process. A refused connection "
    "counts after three scrapes; a timeout, which a loaded server causes as well, only after far longer than the "
    "slowest scrape that succeeded.",
    "orphaned-engine": "A process started by the server still uses a GPU of the running job, but the processes of "
    "the server have ended, and nothing listens at its port.",
    "memory-leak": "The smallest memory of the server process in each eighth of the period rises steadily, in the last "
    "part as well, by at least a tenth and 64 MiB, and not with the number of requests held.",
    "squatter-signature": "At least 95 % of the GPU memory is held, utilization is below 5 %, and the job runs, for at "
    "least the idle time. Power, which the published signature includes, does not count.",
}  # fmt: skip
"""Kind of diagnosis -> its rule, for users."""

SIGNATURE_NOTE = (
    "The squatter signature published for agentic workloads includes near-maximum power while the GPU is idle. Public "
    "data contradict it: idle GPUs draw little. The diagnosis squatter-signature therefore does not depend on power."
)
"""Remark shown with the diagnosis ``squatter-signature``, for users."""

ADVICE: Mapping[str, str] = {
    "idle": "End the engine, use its sleep mode, or allow its suspension while no requests arrive.",
    "kv-saturated": "Give the KV cache more memory (memory share, quantization, more GPUs), or shorten the requests.",
    "batch-full": "Raise the limit of running requests if memory permits, or add a replica.",
    "queue-unstable": "Limit or shed requests, or add a replica: the queue does not get shorter at this arrival rate.",
    "recovering": "Keep the arrival rate below the measured service rate until the queue is empty.",
    "preemption-storm": "To enlarge the KV cache, raise the memory share; if output has fallen, lower the number of "
    "concurrent requests. (After a CUDA out-of-memory error, lower the memory share instead.)",
    "request-too-large": "Reject requests of this length (maximum model length), or enlarge the KV cache.",
    "swap-thrashing": "Lower the number of concurrent requests, or enlarge the KV cache.",
    "stalled": "Look into the engine's log, and restart the engine.",
    "out-of-memory": "Lower the engine's share of GPU memory or the batch, or use more GPUs. (Raising the share, which "
    "is the advice for preemptions, makes it worse.)",
    "ended": "Look into the engine's log; restart the engine or end the job.",
    "orphaned-engine": "Terminate the remaining processes, as a clean-up policy can, or end the job: no request "
    "can reach them.",
    "memory-leak": "Restart the server before host memory is exhausted, and check for requests that are not released.",
    "squatter-signature": "End the engine, or let it be suspended while no requests arrive.",
}
"""Kind of diagnosis -> what to do, for users."""


def evidence(  # noqa: PLR0917 - the fields of Evidence in their order
    dimension: str, value: float | str | None, unit: str, threshold: str | None, weight: float, text: str,
    met: bool = True,
) -> Evidence:  # fmt: skip
    """Return a piece of evidence; it is unknown if it has no value."""
    unknown = value is None
    return Evidence(dimension, value, unit, threshold, weight, text, unknown=unknown, met=met and not unknown)


def diagnosis(
    kind: str, since: datetime, until: datetime, proof: Sequence[Evidence], summary: str, *, doubt: str = "",
    figures: Mapping[str, float | None] | None = None, certainty: float = 1.0, advice: str | None = None,
) -> Diagnosis:  # fmt: skip
    """Return a diagnosis. Its confidence is the share of the weight of its evidence that is met, times ``certainty``.

    Unknown figures are left out.
    """
    whole = sum(one.weight for one in proof)
    share = sum(one.points for one in proof) / whole if whole else 1.0
    return Diagnosis(
        kind, since, until, round(max(0.0, min(1.0, share * certainty)), 3), tuple(proof), RULES[kind], summary,
        ADVICE.get(kind, "") if advice is None else advice,
        tuple((name, value) for name, value in (figures or {}).items() if value is not None), doubt,
    )  # fmt: skip


def table() -> str:
    """Return the rules as a Markdown table, for the documentation."""
    rows = [f"| `{kind}` | {DIAGNOSES[kind]} | {rule} |" for kind, rule in RULES.items()]
    return "\n".join(["| diagnosis | meaning | rule |", "| --- | --- | --- |", *rows])
