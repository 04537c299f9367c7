"""Which image a run that begins takes, and who else may restore it: what the nodes know of that together.

Where the shared tier does not answer, another node may have a newer image, and the run may be claimed. Not so where an
image of this node is of the run right before, and Slurm says that this one is here: then there is nothing to wait for.
"""

from __future__ import annotations

from slurm_affinode.agent.notes import Note
from slurm_affinode.agent.parts import Parts
from slurm_affinode.checkpoint.interface import Image, ImageUnanswered
from slurm_affinode.checkpoint.tier import Copy
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.suspension import LiveRun, Manifest
from slurm_affinode.patience import NoAnswerError

_PAUSE_S = 1.0


def find(parts: Parts, run: LiveRun, job: Job) -> list[Copy]:
    """The copies of the newest image, the fastest first. Raises ``ImageDamaged`` where it is not sound.

    A file server that is away for some time is waited for: it is no reason to hold the job.
    """
    deadline = parts.now() + parts.settings.restore_s
    while True:
        try:
            return _find(parts, run, job)
        except ImageUnanswered:
            if parts.now() >= deadline:
                raise
        parts.sleep(_PAUSE_S)


def _find(parts: Parts, run: LiveRun, job: Job) -> list[Copy]:
    copies, damage = parts.tiers.copies(run)
    newest = max((copy.image.manifest.seq for copy in copies), default=0)
    first = copies[0].image.manifest if copies else None
    note = parts.notes.read(run.key.cluster, run.key.job_id)
    if note is not None and first is not None and note.precedes(first):
        parts.log.warning("job %s: ignored: its note is of an earlier suspension than its image", first.key.job_id)
        note = None
    unneeded = isinstance(damage, ImageUnanswered) and first is not None and _last(parts, first, run, job)
    if damage is not None and not unneeded and (note is None or newest < note.seq):
        # A copy that is not sound is no reason where another store has that image; an older one is not it.
        raise damage
    if note is not None and sleeps(note, run) and (newest < note.seq or note.given_up):
        return []  # the job would be as it was before
    return [copy for copy in copies if copy.image.manifest == first]


def _last(parts: Parts, image: Manifest, run: LiveRun, job: Job) -> bool:
    """Whether no run can have been between the image and this one, which is on this node."""
    return image.restarts + 1 == run.restarts and job.batch_host in (None, parts.node)


def sleeps(note: Note, run: LiveRun) -> bool:
    """Whether a note is of an earlier run."""
    return note.uid == run.uid and note.restarts < run.restarts


def claim(parts: Parts, image: Image, run: LiveRun, job: Job, who: str) -> str | None:
    """Claim the restore of a run; ``None``: nobody else has. Raises ``AffinodeError`` where that is not known."""
    try:
        return parts.notes.claim(run, who, former=image.former)
    except NoAnswerError as error:
        if not _last(parts, image.manifest, run, job):
            raise ImageUnanswered(f"its restore cannot be claimed: {error.strerror}") from None
        parts.log.warning("job %s: restored without a claim: %s", run.key.job_id, error.strerror)
        return None
