"""All data about one attempt of a job and its GPUs: the contents of its page."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from slurm_affinode.base.text import span
from slurm_affinode.core.signatures import SignatureVerdict, lacks_only_time
from slurm_affinode.model.finding import KINDS, Finding, GpuEvidence, JobAttempt, plain

LOOK_S = 3.0
"""Idle times up to the time just watched, plus this tolerance in seconds, come from watching alone."""


ASLEEP = "The job sleeps in place: its processes are frozen, and its GPU memory is in host memory until it wakes."


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
        return tuple(one.signature.name for one in self.verdicts if one.fits)[:1]

    @property
    def why_not(self) -> tuple[tuple[str, str], ...]:
        """Reasons of the signatures that do not fit: their names and the reason; each reason once."""
        names: dict[str, list[str]] = {}
        for one in self.verdicts:
            if not one.fits:
                names.setdefault(one.why_not, []).append(one.signature.name)
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
            texts = [KINDS[one.kind] + (f" ({one.variant})" if one.variant not in (None, one.kind) else "")
                     for one in self.findings]  # fmt: skip
            text = "; ".join(texts)
            return f"{text[:1].upper()}{text[1:]}."
        if self.job.running and self.job.state == "SUSPENDED":
            return "There are no findings for this job: it is SUSPENDED, and cannot compute."
        dark = sum(not page.gpu.measured for page in self.gpus)
        if (self.gpus or self.allocated_gpus) and dark == len(self.gpus):
            return "There are no findings for this job: its GPUs were not measured."
        short = self._short()
        if short:
            return short
        were = "was" if dark == 1 else "were"
        more = f" {dark} of its {len(self.gpus)} GPUs {were} not measured." if dark else ""
        return f"There are no findings for this job.{more}"

    def _short(self) -> str:
        """Return the text for a GPU that is idle but not for long enough; empty if there is none."""
        late = [(page.gpu, one) for page in self.gpus for one in page.verdicts if lacks_only_time(one)]
        if not late:
            return ""
        gpu, verdict = min(late, key=lambda one: one[1].signature.time.longer_than_s)
        name = f"GPU {gpu.gpu} on {gpu.node or '?'}"
        needed = f"{span(verdict.signature.time.longer_than_s)} that {verdict.signature.name} requires"
        looked = self.watched_s
        if looked is not None and (gpu.idle_s is None or gpu.idle_s <= looked + LOOK_S):
            seen = "sampled once" if gpu.idle_s is None else f"observed for {span(gpu.idle_s)}"
            return f"Not observed long enough: {name} is idle now, {seen}, but not for the {needed}."
        idle = span(gpu.idle_s or 0.0)
        return f"There are no findings for this job yet: {name} has been idle for {idle} of the {needed}."

    def as_json(self) -> dict[str, Any]:
        """Return the explanation as JSON-compatible values."""
        return {
            "answer": self.answer, "asleep": self.asleep, "watched_s": self.watched_s, "job": plain(self.job),
            "cluster": self.cluster, "user": self.user, "account": self.account,
            "partition": self.partition, "qos": self.qos, "nodes": list(self.nodes),
            "allocated_gpus": self.allocated_gpus, "since": self.since, "until": self.until,
            "findings": [one.as_json() for one in self.findings],
            "gpus": [
                {**plain(page.gpu), "timeline": plain(page.slots),
                 "signatures": [{"name": one.signature.name, "fits": one.fits, "score": round(one.score, 3),
                                 "why_not": one.why_not, "evidence": plain(one.evidence)} for one in page.verdicts]}
                for page in self.gpus
            ],
            "notes": list(self.notes),
        }  # fmt: skip
