"""The state machine of a suspension: recovery after a crash in each phase, and ownership of checkpoint images. Pure.

``running -> locking -> locked -> parked -> dumping -> dumped -> requeueing -> queued -> restoring -> running``

A suspension in place (``mode=inplace``) leaves this path: ``parked -> frozen -> waking -> running``. It has no
checkpoint image: the processes stay where they are.

Each phase is written to the journal *before* its effects begin. If the journal says ``dumping``, the dump may not have
begun, may be incomplete, or may be complete. All recovery actions are therefore idempotent.

Until the requeue is requested, everything can be rolled back, and the process tree resumes as if nothing had happened.
From then on the checkpoint image is the job; it can be rolled back only if Slurm certainly has no record of the
requeue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from slurm_affinode.base.text import counted, span
from slurm_affinode.model.suspension import AfterLoss, GpuFact, LiveRun, Manifest, Phase, Refusal, RefusalCode

IN_PLACE = frozenset({Phase.FROZEN, Phase.WAKING})
"""Phases of a job that is suspended in place or waking from it."""


class JobFact(StrEnum):
    """State in Slurm of the attempt in which a suspension began."""

    THIS_RUN = "this-run"
    """It is running: same restart count, no requeue."""
    QUEUED = "queued"
    """It is in the queue (also held, completing, or requeued and not yet eligible)."""
    LATER_RUN = "later-run"
    """A later attempt has started."""
    ENDED = "ended"
    """It has ended: completed, failed, canceled, or its ID belongs to another job."""
    UNKNOWN = "unknown"
    """slurmctld does not respond."""


@dataclass(frozen=True, slots=True)
class World:
    """State of the system when recovery of a suspension begins."""

    job: JobFact
    tree: bool
    """Processes of its tree exist on this node."""
    image: bool
    """Its checkpoint image is complete under its final name, which only verified images get."""
    in_place: bool = False
    """It is a suspension in place, which never has a checkpoint image."""


class RecoveryAction(StrEnum):
    """Actions of recovery, in the order given. Each is idempotent."""

    WAIT = "wait"
    """Do nothing now; retry when Slurm responds."""
    RESUME = "resume"
    """Send SIGCONT to processes that the dump stopped; restore and unlock checkpointed or locked CUDA state."""
    DROP_IMAGE = "drop-image"
    """Delete the checkpoint image of this suspension, complete or not."""
    REQUEUE = "requeue"
    KILL_TREE = "kill-tree"
    """Send SIGKILL. Only with a complete checkpoint image, or after the job has ended."""
    SLEEP = "sleep"
    """In place: stop running processes again and watch the job from now on."""
    WAKE = "wake"
    """In place: restore its GPU memory as soon as there is room, then resume it."""
    RESTORE = "restore"
    """Restore the checkpoint (again): kill what a failed restore left, and restore from the beginning."""
    CLOSE = "close"
    """Write the record to the ledger; nothing else is left to do."""
    LOST = "lost"
    """As ``close``, and report that the work of the attempt is lost: its processes ended with their node, and there is
    no checkpoint image."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Actions, and the phase that they lead to (``None``: the suspension is over)."""

    actions: tuple[RecoveryAction, ...]
    phase: Phase | None
    why: str


def recover(phase: Phase, world: World) -> Recovery:
    """Return how to recover a suspension from the last phase in its journal and the state of the system.

    A job that runs ends up running unharmed, or in the queue with a complete checkpoint image. Its process tree is
    killed only if the image is complete or the job has ended. An image is deleted only if the job has ended or runs
    without it.
    """
    if world.job is JobFact.ENDED:
        kill = (RecoveryAction.KILL_TREE,) if world.tree else ()
        return Recovery((*kill, RecoveryAction.DROP_IMAGE, RecoveryAction.CLOSE), None, "the job has ended")
    if phase is Phase.RUNNING:
        return Recovery((RecoveryAction.CLOSE,), None, "nothing was under way")
    if phase in IN_PLACE or (world.in_place and phase in (Phase.LOCKED, Phase.PARKED)):
        return _in_place(phase, world)
    if phase in (Phase.LOCKING, Phase.LOCKED, Phase.PARKED, Phase.DUMPING, Phase.DUMPED):
        return _before_requeue(phase, world)
    if phase is Phase.REQUEUEING:
        return _requeueing(world)
    return _after_requeue(phase, world)


def _in_place(phase: Phase, world: World) -> Recovery:
    """Recover a suspension in place. Other jobs may now use the GPUs, so the wake is only requested.

    If Slurm has requeued the job, it is ending these processes: they are thawed so that they receive its signals.
    """
    if not world.tree and world.job is JobFact.UNKNOWN:
        return Recovery((RecoveryAction.WAIT,), phase, "the processes have ended and Slurm does not respond")
    if not world.tree:
        return Recovery((RecoveryAction.LOST,), None, "the processes have ended")
    if world.job in (JobFact.QUEUED, JobFact.LATER_RUN):
        return Recovery((RecoveryAction.WAKE,), Phase.WAKING, "requeued by another party while asleep")
    if phase is Phase.FROZEN:
        return Recovery((RecoveryAction.SLEEP,), Phase.FROZEN, "it sleeps in place")
    return Recovery(
        (RecoveryAction.WAKE,),
        Phase.WAKING,
        "it was waking" if phase is Phase.WAKING else "its suspension is rolled back",
    )


def _before_requeue(phase: Phase, world: World) -> Recovery:
    """Recover if no requeue was requested."""
    if world.tree:
        if phase is Phase.DUMPED and world.image and world.job is JobFact.THIS_RUN:
            return Recovery((RecoveryAction.REQUEUE,), Phase.REQUEUEING, "the image is complete")
        if phase is Phase.DUMPED and world.image and world.job is JobFact.UNKNOWN:
            # An agent that died during recovery may have requested the requeue: the next attempt may restore this
            # image.
            return Recovery((RecoveryAction.WAIT,), phase, "Slurm does not respond; the processes stay stopped")
        if world.job in (JobFact.THIS_RUN, JobFact.UNKNOWN):
            # A complete image is outdated as soon as its process tree resumes, and must not be found later.
            return Recovery(
                (RecoveryAction.DROP_IMAGE, RecoveryAction.RESUME, RecoveryAction.CLOSE),
                None,
                f"rolled back: it was {phase.value}",
            )
        # Requeued by another party: Slurm is ending the process tree. Only a complete image saves its state, and it is
        # exact, because the tree has not run since.
        if phase is Phase.DUMPED and world.image:
            return Recovery(
                (RecoveryAction.KILL_TREE,), Phase.QUEUED, "requeued by another party, with a complete image"
            )
        return Recovery(
            (RecoveryAction.DROP_IMAGE, RecoveryAction.RESUME, RecoveryAction.CLOSE),
            None,
            "requeued by another party during the suspension",
        )
    if world.job is JobFact.UNKNOWN:
        return Recovery((RecoveryAction.WAIT,), phase, "the processes have ended and Slurm does not respond")
    if phase is Phase.DUMPED and world.image:
        # The node went down right after the dump, with the process tree stopped.
        return Recovery((), Phase.QUEUED, "the processes have ended, and the image is complete")
    return Recovery((RecoveryAction.DROP_IMAGE, RecoveryAction.LOST), None, "the processes have ended without an image")


def _requeueing(world: World) -> Recovery:
    """Recover if the requeue may or may not have been requested."""
    if world.job is JobFact.UNKNOWN:
        return Recovery((RecoveryAction.WAIT,), Phase.REQUEUEING, "Slurm does not respond; the processes stay stopped")
    if not world.image:
        # The image was removed by another party: only the process tree is left.
        resume = (RecoveryAction.RESUME,) if world.tree else ()
        return Recovery((*resume, RecoveryAction.CLOSE), None, "the image is gone")
    if world.job is JobFact.THIS_RUN:
        return Recovery((RecoveryAction.REQUEUE,), Phase.REQUEUEING, "Slurm has not requeued it yet")
    kill = (RecoveryAction.KILL_TREE,) if world.tree else ()
    return Recovery(kill, Phase.QUEUED, "Slurm has requeued it")


def _after_requeue(phase: Phase, world: World) -> Recovery:
    """Recover if the checkpoint image is the job. In ``restoring``, ``world.tree`` is the partly restored tree."""
    if phase is Phase.RESTORING and world.tree and world.image and world.job is not JobFact.QUEUED:
        return Recovery((RecoveryAction.RESTORE,), Phase.RESTORING, "the restore was cut short")
    if not world.image:
        if world.job is JobFact.UNKNOWN:
            return Recovery((RecoveryAction.WAIT,), phase, "no image is seen and Slurm does not respond")
        return Recovery((RecoveryAction.CLOSE,), None, "the image is gone")
    if phase is Phase.RESTORING and world.job is JobFact.LATER_RUN:
        return Recovery((RecoveryAction.RESTORE,), Phase.RESTORING, "the restore was cut short")
    kill = (
        (RecoveryAction.KILL_TREE,) if phase is Phase.QUEUED and world.tree and world.job is not JobFact.UNKNOWN else ()
    )
    return Recovery(kill, Phase.QUEUED, "it waits in the queue")


def owns(manifest: Manifest, run: LiveRun) -> bool:
    """Return whether this attempt of the job may be restored from an image.

    The cluster, job ID and user must be those of the dumped attempt, the restart count higher, and the submit time not
    earlier: Slurm increases the restart count and moves ``SubmitTime`` whenever it requeues a job (24.11 and 26.05),
    and a new job with a reused ID begins with no restarts.
    """
    key = manifest.key
    return (
        (key.cluster, key.job_id, manifest.uid) == (run.key.cluster, run.key.job_id, run.uid)
        and run.restarts > manifest.restarts
        and run.key.submit_epoch >= key.submit_epoch
    )


def of_this_run(manifest: Manifest, run: LiveRun) -> bool:
    """Return whether an image was made of this very attempt, which has not been requeued yet."""
    return (manifest.key, manifest.uid, manifest.restarts) == (run.key, run.uid, run.restarts)


@dataclass(frozen=True, slots=True)
class AfterLossVerdict:
    """Action of the attempt after a lost one, and its reason."""

    action: AfterLoss
    why: str


def after_loss(
    option: AfterLoss | None, site: AfterLoss, ran_s: float | None, discard_after_s: float
) -> AfterLossVerdict:
    """Return what to do with a job whose attempt was lost after it was restored.

    ``option``: the owner's; it has precedence over ``site``. Without it, an image is discarded if the lost attempt had
    run for longer than ``discard_after_s`` (0: never) since its restore. ``ran_s``: for how long it had; ``None`` is
    unknown, and discards nothing.
    """
    if option is not None:
        return AfterLossVerdict(option, f"after_loss={option}")
    if site is AfterLoss.IMAGE and ran_s is not None and 0 < discard_after_s < ran_s:
        return AfterLossVerdict(
            AfterLoss.START, f"this site discards an image when its job has run for {span(discard_after_s)}"
        )
    return AfterLossVerdict(site, f"this site has suspend.after_loss = {site}")


def pair_gpus(old: Sequence[GpuFact], new: Sequence[GpuFact]) -> dict[str, str] | Refusal | None:
    """Return the old UUID -> new UUID of every GPU that the driver shows, or why they cannot be paired.

    ``None`` if every GPU has its old place, for which the driver requires no pairs. Allocated GPUs replace allocated
    ones in order, the other GPUs the others; a GPU is replaced only by one of the same model.
    """
    if len(old) != len(new):
        return Refusal(
            RefusalCode.GPU_COUNT, f"the processes saw {counted(len(old), 'GPU')}, here the driver shows {len(new)}"
        )
    pairs: dict[str, str] = {}
    for allocated in (True, False):
        before = [gpu for gpu in old if gpu.allocated is allocated]
        after = [gpu for gpu in new if gpu.allocated is allocated]
        if len(before) != len(after):
            return Refusal(
                RefusalCode.GPU_COUNT, f"the job held {counted(_count(old), 'GPU')} and has {_count(new)} now"
            )
        for previous, candidate in _matched(before, after):
            if previous.model != candidate.model:
                return Refusal(RefusalCode.GPU_MODEL, f"it was on {previous.model}, and is given {candidate.model}")
            pairs[previous.uuid] = candidate.uuid
    return None if all(a == b for a, b in pairs.items()) else pairs


def _matched(before: list[GpuFact], after: list[GpuFact]) -> list[tuple[GpuFact, GpuFact]]:
    """Pair GPUs that are still there with themselves, and the others by model, in order."""
    same = {gpu.uuid for gpu in before} & {gpu.uuid for gpu in after}
    by_uuid = {gpu.uuid: gpu for gpu in after}
    pairs = [(gpu, by_uuid[gpu.uuid]) for gpu in before if gpu.uuid in same]
    unmatched = [gpu for gpu in after if gpu.uuid not in same]
    for gpu in before:
        if gpu.uuid in same:
            continue
        replacement = next((o for o in unmatched if o.model == gpu.model), unmatched[0])
        unmatched.remove(replacement)
        pairs.append((gpu, replacement))
    return pairs


def _count(gpus: Sequence[GpuFact]) -> int:
    return sum(gpu.allocated for gpu in gpus)
