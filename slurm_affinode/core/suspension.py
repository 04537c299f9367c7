"""The suspension as a state machine: what to do after a crash in each state, and whose an image is. Pure.

``running -> locking -> locked -> parked -> dumping -> dumped -> requeueing -> queued -> restoring -> running``

A suspension in place (``mode=inplace``) leaves this path: ``parked -> frozen -> waking -> running``. It has no image:
the processes are the job, and stay where they are.

Each phase is written to the journal *before* its effects begin, so a journal that says ``dumping`` means: the dump may
not have begun, may be half done, or may be complete. Whatever is done on recovery is therefore idempotent.

Until the requeue is asked for, everything can be taken back: the tree goes on as if nothing had been. From then on the
image is the job; it can be taken back only where Slurm certainly knows nothing of the requeue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from slurm_affinode.core.spans import counted
from slurm_affinode.model.suspension import GpuFact, LiveRun, Manifest, Phase, Refusal

IN_PLACE = frozenset({Phase.FROZEN, Phase.WAKING})
"""Phases of a job that sleeps in place, or wakes from that."""


class JobFact(StrEnum):
    """What Slurm says of the run that a suspension began in."""

    THIS_RUN = "this-run"
    """It runs: same restart count, nothing asked of it."""
    QUEUED = "queued"
    """It is in the queue (also held, completing, or requeued and not yet eligible)."""
    LATER_RUN = "later-run"
    """It has been started again."""
    ENDED = "ended"
    """It is over: completed, failed, cancelled, or its id belongs to another job."""
    UNKNOWN = "unknown"
    """Slurm does not answer."""


@dataclass(frozen=True, slots=True)
class World:
    """What is found when a suspension is taken up again."""

    job: JobFact
    tree: bool
    """The tree's processes exist on this node."""
    image: bool
    """Its image is complete under its final name (only a verified image gets it)."""
    in_place: bool = False
    """The suspension is one in place: there is no image, and never will be."""


class Action(StrEnum):
    """What recovery does, in the order given. Each is idempotent."""

    WAIT = "wait"
    """Nothing now; look again when Slurm answers."""
    RESUME = "resume"
    """SIGCONT to what the dump stopped; CUDA restore and unlock of what is checkpointed or locked."""
    DROP_IMAGE = "drop-image"
    """Remove this suspension's image, complete or not."""
    REQUEUE = "requeue"
    KILL_TREE = "kill-tree"
    """SIGKILL. Only ever with a complete image or where the job is over."""
    SLEEP = "sleep"
    """In place: stop again what runs, watch it from now on."""
    WAKE = "wake"
    """In place: let it have its GPU memory back as soon as there is room, then go on."""
    RESTORE = "restore"
    """Put the image in place (again): kill what a broken attempt left, restore from the beginning."""
    CLOSE = "close"
    """Write the record to the ledger; nothing is left to do."""
    LOST = "lost"
    """The same, and tell that what the run had done is gone: its processes went, with their node, and no image is
    there."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What to do, and the phase that is then reached (``None``: the suspension is over)."""

    actions: tuple[Action, ...]
    phase: Phase | None
    why: str


def recover(phase: Phase, world: World) -> Recovery:
    """What to do with a suspension whose journal ends in ``phase``, with the world as it is.

    Promise: a job that runs ends up running unharmed, or with a complete image in the queue; its tree is killed only
    where the image is complete or the job is over; an image is removed only where the job is over or runs without it.
    """
    if world.job is JobFact.ENDED:
        kill = (Action.KILL_TREE,) if world.tree else ()
        return Recovery((*kill, Action.DROP_IMAGE, Action.CLOSE), None, "the job is over")
    if phase is Phase.RUNNING:
        return Recovery((Action.CLOSE,), None, "nothing was under way")
    if phase in IN_PLACE or (world.in_place and phase in (Phase.LOCKED, Phase.PARKED)):
        return _in_place(phase, world)
    if phase in (Phase.LOCKING, Phase.LOCKED, Phase.PARKED, Phase.DUMPING, Phase.DUMPED):
        return _before_requeue(phase, world)
    if phase is Phase.REQUEUEING:
        return _requeueing(world)
    return _after_requeue(phase, world)


def _in_place(phase: Phase, world: World) -> Recovery:
    """The GPUs may be others' by now: nothing is restored here, only asked for.

    Where Slurm has requeued the job it is ending these processes: they are let go, so that they hear of it.
    """
    if not world.tree and world.job is JobFact.UNKNOWN:
        return Recovery((Action.WAIT,), phase, "the processes are gone and Slurm does not answer")
    if not world.tree:
        return Recovery((Action.LOST,), None, "the processes are gone")
    if world.job in (JobFact.QUEUED, JobFact.LATER_RUN):
        return Recovery((Action.WAKE,), Phase.WAKING, "requeued by somebody else while it slept")
    if phase is Phase.FROZEN:
        return Recovery((Action.SLEEP,), Phase.FROZEN, "it sleeps in place")
    return Recovery(
        (Action.WAKE,), Phase.WAKING, "it was waking" if phase is Phase.WAKING else "its suspension is taken back"
    )


def _before_requeue(phase: Phase, world: World) -> Recovery:
    """Slurm was not asked for anything yet."""
    if world.tree:
        if phase is Phase.DUMPED and world.image and world.job is JobFact.THIS_RUN:
            return Recovery((Action.REQUEUE,), Phase.REQUEUEING, "the image is complete")
        if phase is Phase.DUMPED and world.image and world.job is JobFact.UNKNOWN:
            # An agent that died while it recovered may have asked Slurm already: the image may be what comes back.
            return Recovery((Action.WAIT,), phase, "Slurm does not answer; the processes stay stopped")
        if world.job in (JobFact.THIS_RUN, JobFact.UNKNOWN):
            # A complete image that the tree runs on from is out of date at once: it must not be found later.
            return Recovery((Action.DROP_IMAGE, Action.RESUME, Action.CLOSE), None, f"taken back: it was {phase.value}")
        # Somebody else requeued it: Slurm is ending the tree. Only a complete image saves anything, and it is exact,
        # because the tree has not run since.
        if phase is Phase.DUMPED and world.image:
            return Recovery((Action.KILL_TREE,), Phase.QUEUED, "requeued by somebody else, with a complete image")
        return Recovery(
            (Action.DROP_IMAGE, Action.RESUME, Action.CLOSE), None, "requeued by somebody else while it was suspended"
        )
    if world.job is JobFact.UNKNOWN:
        return Recovery((Action.WAIT,), phase, "the processes are gone and Slurm does not answer")
    if phase is Phase.DUMPED and world.image:
        # The node went down with the tree stopped, right after its dump.
        return Recovery((), Phase.QUEUED, "the processes are gone, the image is complete")
    return Recovery((Action.DROP_IMAGE, Action.LOST), None, "the processes are gone, there is no image")


def _requeueing(world: World) -> Recovery:
    """Slurm may or may not have been asked."""
    if world.job is JobFact.UNKNOWN:
        return Recovery((Action.WAIT,), Phase.REQUEUEING, "Slurm does not answer; the processes stay stopped")
    if not world.image:
        # Somebody took the image away. The tree is all there is.
        resume = (Action.RESUME,) if world.tree else ()
        return Recovery((*resume, Action.CLOSE), None, "the image is gone")
    if world.job is JobFact.THIS_RUN:
        return Recovery((Action.REQUEUE,), Phase.REQUEUEING, "Slurm has not requeued it yet")
    kill = (Action.KILL_TREE,) if world.tree else ()
    return Recovery(kill, Phase.QUEUED, "Slurm has requeued it")


def _after_requeue(phase: Phase, world: World) -> Recovery:
    """The image is the job. In ``restoring``, ``world.tree`` is what a restore has made so far."""
    if phase is Phase.RESTORING and world.tree and world.image and world.job is not JobFact.QUEUED:
        return Recovery((Action.RESTORE,), Phase.RESTORING, "the restore was cut short")
    if not world.image:
        if world.job is JobFact.UNKNOWN:
            return Recovery((Action.WAIT,), phase, "no image is seen and Slurm does not answer")
        return Recovery((Action.CLOSE,), None, "the image is gone")
    if phase is Phase.RESTORING and world.job is JobFact.LATER_RUN:
        return Recovery((Action.RESTORE,), Phase.RESTORING, "the restore was cut short")
    kill = (Action.KILL_TREE,) if phase is Phase.QUEUED and world.tree and world.job is not JobFact.UNKNOWN else ()
    return Recovery(kill, Phase.QUEUED, "it waits in the queue")


def owns(manifest: Manifest, run: LiveRun) -> bool:
    """Whether an image may be put in place of this run of the job.

    The same cluster, job id and user, a higher restart count and a later submit time than those of the run that was
    dumped: Slurm counts restarts up and moves ``SubmitTime`` whenever it requeues a job (24.11 and 26.05),
    and a new job that was given an old id begins with no restarts.
    """
    key = manifest.key
    return (
        (key.cluster, key.job_id, manifest.uid) == (run.key.cluster, run.key.job_id, run.uid)
        and run.restarts > manifest.restarts
        and run.key.submit_epoch >= key.submit_epoch
    )


def of_this_run(manifest: Manifest, run: LiveRun) -> bool:
    """Whether an image was made of this very run, which has not been requeued yet."""
    return (manifest.key, manifest.uid, manifest.restarts) == (run.key, run.uid, run.restarts)


def pair_gpus(old: Sequence[GpuFact], new: Sequence[GpuFact]) -> dict[str, str] | Refusal | None:
    """Which GPU takes the place of which, old UUID -> new UUID of every GPU that the driver shows; or why it cannot be.

    ``None`` where each GPU comes back at its own place, for which the driver wants no pairs. Allocated GPUs take the
    places of allocated ones in order, the others fill up; a GPU is replaced by one of the same model only.
    """
    if len(old) != len(new):
        return Refusal("gpu-count", f"the processes saw {counted(len(old), 'GPU')}, here the driver shows {len(new)}")
    pairs: dict[str, str] = {}
    for allocated in (True, False):
        before = [gpu for gpu in old if gpu.allocated is allocated]
        after = [gpu for gpu in new if gpu.allocated is allocated]
        if len(before) != len(after):
            return Refusal("gpu-count", f"the job held {counted(_count(old), 'GPU')} and has {_count(new)} now")
        for one, other in _matched(before, after):
            if one.model != other.model:
                return Refusal("gpu-model", f"it was on {one.model}, and is given {other.model}")
            pairs[one.uuid] = other.uuid
    return None if all(a == b for a, b in pairs.items()) else pairs


def _matched(before: list[GpuFact], after: list[GpuFact]) -> list[tuple[GpuFact, GpuFact]]:
    """A GPU that is still there keeps its place; the rest pair up model by model, in order."""
    same = {gpu.uuid for gpu in before} & {gpu.uuid for gpu in after}
    by_uuid = {gpu.uuid: gpu for gpu in after}
    pairs = [(gpu, by_uuid[gpu.uuid]) for gpu in before if gpu.uuid in same]
    left = [gpu for gpu in after if gpu.uuid not in same]
    for gpu in before:
        if gpu.uuid in same:
            continue
        other = next((o for o in left if o.model == gpu.model), left[0])
        left.remove(other)
        pairs.append((gpu, other))
    return pairs


def _count(gpus: Sequence[GpuFact]) -> int:
    return sum(gpu.allocated for gpu in gpus)
