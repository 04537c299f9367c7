"""Verification of the evidence right before an action, with Slurm and the agents of the nodes.

Evidence that cannot be verified prevents the action.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import counted
from slurm_affinode.model.cluster import Job, Node
from slurm_affinode.model.finding import Finding, GpuEvidence, JobAttempt, ProcessRef
from slurm_affinode.model.gpu import FIELDS, FLOORS_PCT, without_noise
from slurm_affinode.slurm.interface import SlurmClient, UnknownJobError
from slurm_affinode.zombies.nodes import from_agent
from slurm_affinode.zombies.orphans import KILL_FAILED, orphan

Verdict = Literal["still", "woke", "gone", "unknown"]

SAMPLES = 3
BETWEEN_S = 1.0
"""Seconds between readings: the driver's counters cover at most the last second, so one may fall into a pause."""
MIN_SIGNALS = 2

AskNode = Callable[[str, Mapping[str, Any]], dict[str, Any]]
"""Sends a request to a node's agent and returns the response. Raises ``AffinodeError``."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of a verification."""

    verdict: Verdict
    text: str
    job: Job | None = None
    evidence: Any = None
    """For the audit."""


@dataclass(slots=True)
class Recheck:
    """Verifies evidence. ``ask`` queries the agents."""

    slurm: SlurmClient
    ask: AskNode
    idle_pct: float = 5.0
    """A GPU is active if a signal is above this percentage."""
    sleep: Callable[[float], None] = time.sleep
    samples: int = SAMPLES
    floors_pct: Mapping[str, float] = field(default_factory=lambda: dict(FLOORS_PCT))
    """Signal -> floor, percent: values up to it count as 0."""

    def job(self, finding: Finding, ref: JobAttempt) -> Observation:
        """Verify that the same attempt of the same user still runs and its GPUs are still idle."""
        try:
            job = self.slurm.job(ref.id)
        except UnknownJobError:
            return Observation("gone", f"job {ref.id} has ended, and Slurm has forgotten it")
        if job.job_id != ref.job_id or (
            job.submit is not None and ref.submit is not None and _s(job.submit) != _s(ref.submit)
        ):
            return Observation("gone", f"job {ref.id} has started another attempt", job)
        if job.submit is None or ref.submit is None:
            return Observation("unknown", f"whether job {ref.id} is still the same attempt is not known", job)
        if not job.allocated or job.state == "COMPLETING":
            return Observation("gone", f"job {ref.id} is now {job.state}", job)
        if job.state != "RUNNING":
            return Observation(
                "unknown", f"job {ref.id} is {job.state}, so the activity of its GPUs is not its own", job
            )
        if finding.user is not None and job.user != finding.user:
            owner = job.user or "an unknown user"
            return Observation("unknown", f"job {ref.id} belongs to {owner}, not to {finding.user}", job)
        return self._idle(finding, job)

    def _idle(self, finding: Finding, job: Job) -> Observation:
        flagged = finding.flagged_gpus
        if not flagged:
            return Observation("unknown", "no GPU is named that could be checked again", job)
        observations: list[dict[str, Any]] = []
        for number in range(self.samples):
            if number:
                self.sleep(BETWEEN_S)
            for node in sorted({gpu.node or "" for gpu in flagged}):
                if not node:
                    return Observation("unknown", "a GPU is on an unknown node", job)
                try:
                    answer = self.ask(node, {"verb": "processes", "since": _us(finding.observed_at), "each": True})
                except AffinodeError as error:
                    return Observation("unknown", f"the evidence cannot be read again: {error}", job, observations)
                for gpu in (candidate for candidate in flagged if candidate.node == node):
                    observation = self._gpu(gpu, answer, job)
                    observations.append(
                        {"node": node, "gpu": gpu.gpu, "reading": observation.evidence, "verdict": observation.verdict}
                    )
                    if observation.verdict != "still":
                        return Observation(observation.verdict, observation.text, job, observations)
        return Observation(
            "still", f"{counted(len(flagged), 'GPU')} still idle in {self.samples} samples", job, observations
        )

    def _gpu(self, gpu: GpuEvidence, answer: Mapping[str, Any], job: Job) -> Observation:
        name = f"GPU {gpu.gpu} on {gpu.node}"
        row = _row(gpu, answer)
        reading = None if row is None else row.get("reading")
        if row is None or not isinstance(reading, dict):
            why = "is missing" if row is None else str(row.get("fault") or "cannot be read")
            return Observation("unknown", f"{name} {why}")
        if gpu.shared:
            return self._part(name, row, job)
        signals = {
            key: float(reading[key]) * factor for key, (_, factor) in FIELDS.items() if reading.get(key) is not None
        }
        measured = len(signals)
        if row.get("busy_pct") is not None:
            # It proves activity only: an empty process list is not a measurement.
            signals["processes"] = float(row["busy_pct"])
        signals = without_noise(signals, self.floors_pct)
        busy = {key: value for key, value in signals.items() if value > self.idle_pct}
        if busy:
            key = max(busy, key=lambda signal: busy[signal])
            return Observation("woke", f"{name} computes: {key} is at {busy[key]:.0f} %", evidence=signals)
        if measured < MIN_SIGNALS:
            return Observation(
                "unknown", f"{name} shows {counted(measured, 'signal')}: too few to judge", evidence=signals
            )
        return Observation("still", f"{name} is idle", evidence=signals)

    def _part(self, name: str, row: Mapping[str, Any], job: Job) -> Observation:
        """Verify a job's share of a shared GPU, by the job's own processes only."""
        processes = [
            process
            for process in row.get("processes") or ()
            if process["job"] == job.job_id and process["source"] != "environment"
        ]
        measured = [
            process
            for process in processes
            if process.get("sm_pct") is not None and process.get("memory_pct") is not None
        ]
        if not processes or len(measured) < len(processes):
            return Observation("unknown", f"the activity of the job on {name}, which is shared, is unknown")
        signals = {key: max(float(process[key]) for process in processes) for key in ("sm_pct", "memory_pct")}
        busy = max(signals.values())
        if busy > self.idle_pct:
            return Observation("woke", f"the job computes on {name}: a process is at {busy:.0f} %", evidence=signals)
        return Observation("still", f"the job's part of {name} is idle", evidence=signals)

    # --- nodes and processes

    def node(self, finding: Finding, name: str) -> Observation:
        """Verify that the reason for draining a node still holds and that it is not yet drained."""
        return self._around(lambda: self._in_service(name), lambda: self._holds(finding, name))

    def drained(self, name: str) -> Observation:
        """Verify that Slurm still drains a node for a failed kill and that no user processes are left there."""
        return self._around(lambda: self._by_slurm(name), lambda: self._clean(name))

    @staticmethod
    def _around(state: Callable[[], Observation], matter: Callable[[], Observation]) -> Observation:
        """Check the node's state in Slurm before and after the agent's slower check; the last result counts."""
        for observe in (state, matter):
            observation = observe()
            if observation.verdict != "still":
                return observation
        return state()

    def _in_service(self, name: str) -> Observation:
        node = self._node(name)
        if node is None:
            return Observation("unknown", f"Slurm knows no node {name}")
        if node.draining:
            return Observation("gone", f"{name} is drained already: {node.reason or 'without a reason'}")
        return Observation("still", f"{name} is in service")

    def _holds(self, finding: Finding, name: str) -> Observation:
        if finding.kind == "completing":
            ref = finding.job
            try:
                job = None if ref is None else self.slurm.job(ref.id)
            except UnknownJobError:
                job = None
            if job is None or job.state != "COMPLETING":
                return Observation("gone", "the job has ended", job)
            return Observation("still", f"job {job.id} is still COMPLETING", job)
        return self._matter(finding, name)

    def _matter(self, finding: Finding, name: str) -> Observation:
        try:
            answer = self.ask(name, {"verb": "processes"})
        except AffinodeError as error:
            return Observation("unknown", f"the evidence cannot be read again: {error}")
        subject = finding.subject
        if isinstance(subject, ProcessRef):
            return self._orphan(subject, answer)
        for gpu in finding.gpus:
            row = _row(gpu, answer)
            if row is None or row["processes"] is None or not isinstance(row.get("reading"), dict):
                return Observation("unknown", f"GPU {gpu.gpu} of {name} cannot be read")
            used = row["reading"].get("fb_used_mib")
            if row["processes"] or used is None or used < 0.5 * 1024 * (gpu.held_gib or 1.0):
                return Observation(
                    "gone", f"GPU {gpu.gpu} of {name} is free, or a process is on it", evidence=row["reading"]
                )
        return Observation("still", f"memory of GPUs of {name} is still held by no process")

    def _orphan(self, subject: ProcessRef, answer: Mapping[str, Any]) -> Observation:
        """Verify that the same process exists and still belongs to no job: its job may run again."""
        processes = [process for gpu in from_agent(subject.node, answer).gpus for process in gpu.processes or ()]
        process = next(
            (
                candidate
                for candidate in processes
                if (candidate.pid, candidate.start_ticks) == (subject.pid, subject.start_ticks)
            ),
            None,
        )
        if process is None:
            return Observation("gone", f"process {subject.pid} is gone")
        try:
            jobs = self.slurm.overview()
        except AffinodeError as error:
            return Observation("unknown", f"the running jobs are unknown: {error}")
        if orphan(process, jobs, subject.node) is None:
            return Observation("gone", f"process {subject.pid} belongs, or may belong, to a job now")
        return Observation("still", f"process {subject.pid} is still there")

    def _by_slurm(self, name: str) -> Observation:
        node = self._node(name)
        if node is None:
            return Observation("unknown", f"Slurm knows no node {name}")
        if not node.draining:
            return Observation("gone", f"{name} is in service again")
        if KILL_FAILED not in (node.reason or "").lower():
            return Observation("gone", f"{name} is drained for another reason: {node.reason}")
        if (node.reason or "").strip().lower() != KILL_FAILED or not self._may_be_slurms(node.reason_user):
            return Observation(
                "unknown", f"{name} is drained by {node.reason_user or 'an unknown user'} for: {node.reason}"
            )
        return Observation("still", f"{name} is clean", evidence={"reason": node.reason})

    def _clean(self, name: str) -> Observation:
        try:
            answer = self.ask(name, {"verb": "processes", "use": True})
            alive = {job.job_id for job in self.slurm.overview() if not job.has_ended and job.state != "COMPLETING"}
        except AffinodeError as error:
            return Observation("unknown", f"the node cannot be examined: {error}")
        if answer.get("jobs") is None:
            return Observation("unknown", f"the agent on {name} does not report the processes of jobs outside of GPUs")
        ended = [row["job"] for row in answer["jobs"] if row["job"] not in alive]
        if ended:
            return Observation("woke", f"processes of job {ended[0]}, which has ended, are still on {name}")
        node, shown = self._node(name), len(answer["gpus"])
        if node is not None and node.gpus is not None and shown < node.gpus.count:
            text = f"{name} shows {shown} of its {counted(node.gpus.count, 'GPU')}"
            return Observation("unknown", f"{text}: what is on the others is not known")
        for row in answer["gpus"]:
            if row["processes"] is None:
                return Observation("unknown", f"GPU {row['index']} of {name}: {row.get('fault') or 'cannot be read'}")
            remaining = [process for process in row["processes"] if not process["system"]]
            if remaining:
                return Observation("woke", f"process {remaining[0]['pid']} is still on GPU {row['index']} of {name}")
        return Observation("still", f"{name} is clean")

    def _may_be_slurms(self, user: str | None) -> bool:
        """Return whether Slurm itself may have set a reason, and not an operator under their own name."""
        return user in (None, "root") or user == self.slurm.config().get("SlurmUser", "").partition("(")[0]

    def _node(self, name: str) -> Node | None:
        return next((node for node in self.slurm.nodes() if node.name == name), None)


def _row(gpu: GpuEvidence, answer: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the GPU in an agent's response, by UUID or else by index; ``None``: no GPU has it, or several."""
    rows = [row for row in answer.get("gpus", ()) if row.get("mig") is None]
    named = [row for row in rows if (row["uuid"] == gpu.uuid if gpu.uuid else str(row["index"]) == gpu.gpu)]
    return named[0] if len(named) == 1 else None


def _s(moment: datetime) -> int:
    return int(moment.timestamp())


def _us(moment: datetime) -> int:
    return int(moment.timestamp() * 1e6)
