"""All data about one attempt of a job and its GPUs: the contents of its page."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from slurm_affinode.core.finding_texts import TEXTS
from slurm_affinode.core.signatures import SignatureVerdict, lacks_only_time
from slurm_affinode.model.finding import KINDS, Finding, GpuEvidence, JobAttempt, plain

TOLERANCE_S = 3.0
"""Idle times up to the time just watched, plus this tolerance in seconds, come from watching alone."""

ASLEEP = TEXTS.text("explanation.asleep", {})


@dataclass(frozen=True, slots=True)
class Slot:
    """A time slot of one GPU. ``None``: not measured."""

    start: datetime
    activity_pct: float | None
    """Maximum over the means of all signals."""
    memory_gib: float | None
    power_w: float | None


@dataclass(frozen=True, slots=True)
class GpuPage:
    """One GPU of the job."""

    gpu: GpuEvidence
    verdicts: tuple[SignatureVerdict, ...]
    """One for each signature."""
    slots: tuple[Slot, ...]

    @property
    def fits(self) -> tuple[str, ...]:
        """Name of the first signature that fits. Results of the others matter only if none fits."""
        return tuple(verdict.signature.name for verdict in self.verdicts if verdict.fits)[:1]

    @property
    def why_not(self) -> tuple[tuple[str, str], ...]:
        """Reasons of the signatures that do not fit: their names and the reason; each reason once."""
        names: dict[str, list[str]] = {}
        for verdict in self.verdicts:
            if not verdict.fits:
                names.setdefault(verdict.why_not, []).append(verdict.signature.name)
        return tuple((", ".join(some), why) for why, some in names.items())


@dataclass(frozen=True, slots=True)
class Explanation:
    """All data about one attempt of a job."""

    job: JobAttempt
    cluster: str
    user: str | None
    account: str | None
    partition: str | None
    qos: str | None
    nodes: tuple[str, ...]
    allocated_gpus: int | None
    since: datetime
    until: datetime
    findings: tuple[Finding, ...]
    gpus: tuple[GpuPage, ...]
    notes: tuple[str, ...]
    runs: int
    """Number of attempts of the job; the last one is explained."""
    watched_s: float | None = None
    """Time for which the GPUs were watched just now; ``None``: all data is from recorded metrics."""
    asleep: bool = False
    """It sleeps in place (``mode=inplace``), or waits to wake."""

    @property
    def answer(self) -> str:
        """Sentence with the findings of the job or, if there are none, how conclusive that is."""
        return f"{self._answer()} {ASLEEP}" if self.asleep else self._answer()

    def _answer(self) -> str:
        if self.findings:
            texts = [
                KINDS[finding.kind] + (f" ({finding.variant})" if finding.variant not in (None, finding.kind) else "")
                for finding in self.findings
            ]
            text = "; ".join(texts)
            return f"{text[:1].upper()}{text[1:]}."
        if self.job.running and self.job.state == "SUSPENDED":
            return TEXTS.text("explanation.suspended", {})
        unmeasured = sum(not page.gpu.measured for page in self.gpus)
        if (self.gpus or self.allocated_gpus) and unmeasured == len(self.gpus):
            return TEXTS.text("explanation.unmeasured", {})
        values = {"unmeasured": unmeasured or None, "gpus": len(self.gpus)}
        return self._not_long_enough() or TEXTS.text("explanation.nothing", values)

    def _not_long_enough(self) -> str:
        """Return the text for a GPU that is idle but not for long enough; empty if there is none."""
        late = [
            (page.gpu, verdict.signature) for page in self.gpus for verdict in page.verdicts if lacks_only_time(verdict)
        ]
        if not late:
            return ""
        gpu, signature = min(late, key=lambda pair: pair[1].time.longer_than_s)
        values = {"gpu": gpu.gpu, "node": gpu.node or "?", "needed": signature.time.longer_than_s,
                  "signature": signature.name}  # fmt: skip
        if self.watched_s is not None and (gpu.idle_s is None or gpu.idle_s <= self.watched_s + TOLERANCE_S):
            once = True if gpu.idle_s is None else None
            return TEXTS.text("explanation.not-watched", {**values, "once": once, "idle": gpu.idle_s})
        return TEXTS.text("explanation.not-yet", {**values, "idle": gpu.idle_s or 0.0})

    def as_json(self) -> dict[str, Any]:
        """Return the explanation as JSON-compatible values."""
        return {
            "answer": self.answer, "asleep": self.asleep, "watched_s": self.watched_s, "job": plain(self.job),
            "cluster": self.cluster, "user": self.user, "account": self.account,
            "partition": self.partition, "qos": self.qos, "nodes": list(self.nodes),
            "allocated_gpus": self.allocated_gpus, "since": self.since, "until": self.until,
            "findings": [finding.as_json() for finding in self.findings],
            "gpus": [
                {**plain(page.gpu), "timeline": plain(page.slots),
                 "signatures": [{"name": verdict.signature.name, "fits": verdict.fits, "score": round(verdict.score, 3),
                                 "why_not": verdict.why_not, "evidence": plain(verdict.evidence)}
                                for verdict in page.verdicts]}
                for page in self.gpus
            ],
            "notes": list(self.notes),
        }  # fmt: skip
