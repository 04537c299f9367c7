"""Which jobs sleep, as a node sees them: ``status`` shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from slurm_affinode.agent.aftermath import Aftermath
from slurm_affinode.agent.interface import SuspendedJob
from slurm_affinode.agent.notes import NO_NOTE, Note
from slurm_affinode.agent.parts import Parts
from slurm_affinode.checkpoint.interface import Image
from slurm_affinode.model.suspension import Phase

UNKNOWN = "Slurm does not know this job: has slurmctld lost its state? Its image is kept for a time"


def asleep(parts: Parts, aftermath: Aftermath) -> list[SuspendedJob]:
    """Those with a note whose image this node sees."""
    shared = _present([] if parts.shared is None else parts.shared.images())
    local = _present([image for tier in parts.tiers.node for image in tier.store.images()])
    found, unknown = [], parts.absences.all()
    for note in (*parts.notes.all(), *_without_note(parts, aftermath)):
        where = "shared" if (note.key.name, note.seq) in shared else "node"
        here = where == "shared" or (note.key.name, note.seq) in local or note.node != parts.node
        if not here and not note.given_up:
            continue
        found.append(
            SuspendedJob(
                key=note.key, uid=note.uid, node=note.node, seq=note.seq, since_epoch=note.since_epoch,
                image_bytes=note.image_bytes, gpu_bytes=note.gpu_bytes, gpus=note.gpus, where=where,
                wake=note.wake if note.failure is None else "hold", why=note.why,
                failure=UNKNOWN if note.key.name in unknown else note.problem,
                passed=note.passed, shown=note.shown,
            )
        )  # fmt: skip
    return found


def _without_note(parts: Parts, aftermath: Aftermath) -> Iterator[Note]:
    """What this node alone knows of jobs that sleep, while nothing can be written beside the shared store."""
    for record in parts.journal.open_records():
        key = record.key
        if record.phase is Phase.QUEUED and parts.notes.read(key.cluster, key.job_id) is None:
            yield replace(aftermath.note_of(record), trouble=NO_NOTE)


def _present(images: Iterable[object]) -> set[tuple[str, int]]:
    return {(one.manifest.key.name, one.manifest.seq) for one in images if isinstance(one, Image)}


def forget_awake(parts: Parts) -> None:
    """Remove notes of jobs that run on this node: what could not be when they were restored."""
    for note in parts.notes.all():
        job = parts.registry.get(note.job_id)
        runs = job is not None and job.phase is Phase.RUNNING and job.root > 0
        if job is not None and runs and note.cluster == parts.cluster and note.restarts < job.restarts:
            parts.notes.remove(note.cluster, note.job_id)
