"""Notes beside the images: what the nodes tell each other of a job that sleeps, and who restores it.

Small files in two directories beside the shared store, root's alone: ``asleep/CLUSTER.JOBID.json`` (why, since when,
why its last restore failed) and ``claims/CLUSTER.JOBID.RESTARTS`` (which shepherd restores this run: the first has it,
so an image is never put in place twice). An image is complete without its note.

All of them are signed (``checkpoint.nodekeys``); what is not is ignored and logged. Earlier releases wrote them without
a signature. Of those a note counts only where its image, made by such a release too, is there and says the same, and
never as the word that the image was given up; a claim counts only where the image was made by such a release; a plan
never does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from slurm_affinode import jsonvalues
from slurm_affinode.checkpoint.interface import CheckpointError
from slurm_affinode.checkpoint.manifest import built
from slurm_affinode.checkpoint.nodekeys import LARGEST, SignatureError, Signer, read_bounded
from slurm_affinode.checkpoint.tiers import Tiers
from slurm_affinode.errors import AffinodeError
from slurm_affinode.files import fsync_dir, write_text
from slurm_affinode.model.suspension import JobKey, LiveRun, Manifest
from slurm_affinode.patience import NoAnswerError, Patience

_CLAIM = re.compile(r"(?P<job>[A-Za-z0-9_-]+\.\d+)\.\d+")

_NOTE, _CLAIMED, _PLAN = "note", "claim", "start plan"
"""Purposes of signatures."""
_WHO = re.compile(r"[A-Za-z0-9_.-]{1,255}/\d{1,10}/\d{1,20}")
"""NODE/PID/STARTED of a shepherd, all that a claim of an older release says."""
_MOST_OF_PLAN = 16 << 20
_CLAIMS_TRIED = 8
_STALE_S = 60.0
"""So long it counts who is alive."""

NO_NOTE = "its note is not beside the shared store: is that mounted, and can it be written?"
"""Of a job that sleeps."""


@dataclass(frozen=True, slots=True)
class Note:
    """What is told of a job that sleeps."""

    cluster: str
    job_id: int
    submit: int
    """Of the run that was suspended."""
    restarts: int
    seq: int
    uid: int
    node: str
    began_ms: int
    since_epoch: float
    why: str
    gpus: int
    gpu_bytes: int
    image_bytes: int
    wake: str
    user: str | None = None
    shown: str | None = None
    """What its owner calls it: ``123_4`` for a task of an array; none where that is its number."""
    failure: str | None = None
    """Why its last restore failed."""
    trouble: str | None = None
    """What its image had trouble with; it can be restored all the same."""
    passed: str | None = None
    """Tiers that did not take its image when it was written, and why."""
    released_epoch: float | None = None
    given_up: bool = False
    """None of its images is to be restored any more: it starts from its beginning."""
    revision: int = field(default=0, compare=False)
    """Higher with each time that the note of this suspension is written."""

    def precedes(self, manifest: Manifest) -> bool:
        """Whether it is of an earlier suspension than an image of the job: put back, or left behind."""
        return (self.submit, self.restarts) < (manifest.key.submit_epoch, manifest.restarts)

    def describes(self, manifest: Manifest) -> bool:
        """Whether it says of its suspension what the image says."""
        mine = (self.key, self.restarts, self.seq, self.uid, self.node, self.began_ms)
        its = (manifest.key, manifest.restarts, manifest.seq, manifest.uid, manifest.node)
        return mine == (*its, round(manifest.started_epoch * 1000))

    @property
    def key(self) -> JobKey:
        """Of the run that was suspended."""
        return JobKey(self.cluster, self.job_id, self.submit)

    @property
    def problem(self) -> str | None:
        """Why its last restore failed, and what has become of its image since, one line."""
        trouble = "its image was given up: it starts from its beginning" if self.given_up else self.trouble
        if self.failure is None or trouble is None:
            return self.failure or trouble
        return trouble if self.failure in trouble else f"{self.failure}; {trouble}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Where and when Slurm expects to start a job."""

    start_epoch: float
    nodes: tuple[str, ...]


def vouched(tiers: Tiers, note: Note) -> bool:
    """Whether a store has the image of a note, made by a release that did not sign notes, and it says the same."""
    for store in tiers.stores:
        with contextlib.suppress(CheckpointError, OSError):
            image = store.get(note.key.name, note.seq)
            if image.former and note.describes(image.manifest):
                return True
    return False


class Notes:
    """The two directories; ``None``: there is no shared store, and nobody to tell.

    Where their file system does not answer it is as where it answers with errors.
    """

    def __init__(
        self, root: Path | None, signer: Signer, *, vouched: Callable[[Note], bool] = lambda note: False
    ) -> None:
        """``vouched``: whether an image of an older release is there, and says the same as a note without signature."""
        self._root = root
        self._signer = signer
        self._vouched = vouched
        self._ask = Patience(root)
        self._revisions: dict[str, tuple[int, int, int]] = {}
        """Name of a file -> submit time, number and revision of the newest note that was seen there."""
        self._lock = threading.Lock()

    def write(self, note: Note) -> None:
        """Put a note in place of an earlier one of the job. Raises ``AffinodeError``."""
        if self._root is None:
            return
        path = _file(self._root, note.cluster, note.job_id)
        with self._lock:
            seen = self._revisions.get(path.name, (0, 0, 0))
        # Also above that of a note which was there and is gone, and which this node has not seen.
        known = max(note.revision, seen[2] if seen[:2] == (note.submit, note.seq) else 0)
        revision = max(known + 1, round(time.time() * 1000))
        text = self._signer.encode(_NOTE, path.name, asdict(replace(note, revision=revision)))

        def put() -> None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_text(path, text, mode=0o600)

        try:
            self._ask(put)
        except OSError as error:
            raise AffinodeError(f"{path}: cannot be written: {error.strerror or error}") from error

    def read(self, cluster: str, job_id: int) -> Note | None:
        """The note of a job; ``None`` where there is none that can be read."""
        if self._root is None:
            return None
        path = _file(self._root, cluster, job_id)
        with contextlib.suppress(OSError):
            return self._judged(path, self._ask(lambda: read_signed(self._signer, _NOTE, path)))
        return None

    def _judged(self, path: Path, found: Found) -> Note | None:
        """A note, where its signature is right and none that is newer was seen; why not is logged."""
        if found.value is None:
            return None
        try:
            note = _note(path, found.value)
        except (ValueError, TypeError, KeyError) as error:
            self._signer.refuse(path, f"is not a note: {error}")
            return None
        if not found.signed:
            note = replace(note, given_up=False)
            if not self._vouched(note):
                self._signer.refuse(path, "is not signed, and no image of an older release says the same")
                return None
        stamp = (note.submit, note.seq, note.revision)
        with self._lock:
            seen = self._revisions.get(path.name)
            stale = seen is not None and seen[:2] == stamp[:2] and stamp < seen
            if not stale:
                self._revisions[path.name] = stamp
        if stale:
            self._signer.refuse(path, "is older than the one that was there before")
            return None
        self._signer.accept(path)
        return note

    def all(self) -> list[Note]:
        """Every note, by job."""
        if self._root is None:
            return []
        found: list[tuple[Path, Found]] | None = None
        asleep = self._root / "asleep"

        def look() -> list[tuple[Path, Found]]:
            paths = [path for path in sorted(asleep.glob("*.json")) if not path.name.startswith(".")]
            return [(path, read_signed(self._signer, _NOTE, path)) for path in paths]

        with contextlib.suppress(OSError):
            found = self._ask(look)
        if found is None:
            return []
        with self._lock:  # what is gone may come again with any number
            names = {path.name for path, _ in found}
            self._revisions = {name: one for name, one in self._revisions.items() if name in names}
        notes = [note for path, one in found if (note := self._judged(path, one)) is not None]
        return sorted(notes, key=lambda note: note.key)

    def remove(self, cluster: str, job_id: int) -> None:
        """The job is awake, or over."""
        if self._root is not None:
            path = _file(self._root, cluster, job_id)
            with contextlib.suppress(OSError):
                self._ask(lambda: path.unlink(missing_ok=True))

    # --- what Slurm plans

    def write_plan(self, plans: Mapping[int, Plan]) -> None:
        """Where and when jobs that were released are expected to start: one agent asks Slurm, all read it."""
        if self._root is not None:
            path = self._root / "plan.json"
            starts = {str(job): [one.start_epoch, list(one.nodes)] for job, one in sorted(plans.items())}
            text = self._signer.encode(_PLAN, path.name, {"starts": starts})
            try:
                self._ask(lambda: write_text(path, text, mode=0o600))
            except OSError as error:
                raise AffinodeError(f"{self._root}: cannot be written: {error.strerror or error}") from error

    def plan(self) -> dict[int, Plan]:
        """See ``write_plan``; empty where there is none that can be read."""
        if self._root is None:
            return {}
        path = self._root / "plan.json"
        try:
            found = self._ask(lambda: read_signed(self._signer, _PLAN, path, most=_MOST_OF_PLAN))
            if found.value is None or not found.signed:
                return {}
            return {
                int(job): Plan(jsonvalues.number(start), tuple(str(node) for node in nodes))
                for job, (start, nodes) in found.value["starts"].items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}

    # --- claims

    def claim(self, run: LiveRun, who: str, *, former: bool = False) -> str | None:
        """Claim the restore of a run for ``who``; ``None``: it is his, also again. Else who has it.

        ``former``: its image was made by a release that did not sign claims, so one without a signature counts.
        Raises ``AffinodeError`` where that cannot be found out, ``NoAnswerError`` where nobody answers.
        """
        if self._root is None:
            return None
        path = self._root / "claims" / f"{run.key.name}.{run.restarts}"
        try:
            return self._ask(lambda: self._claim(path, run, who, former=former))
        except NoAnswerError:
            raise
        except OSError as error:
            raise AffinodeError(f"{path}: cannot be claimed: {error.strerror or error}") from error

    def _claim(self, path: Path, run: LiveRun, who: str, *, former: bool) -> str | None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{who.replace('/', '_')}")
        value = {"who": who, "submit": run.key.submit_epoch, "uid": run.uid}
        write_text(draft, self._signer.encode(_CLAIMED, path.name, value), mode=0o600)
        try:
            for _ in range(_CLAIMS_TRIED):
                try:
                    # A link appears whole or not at all, also for other clients of a network file system.
                    os.link(draft, path)
                    fsync_dir(path.parent)
                except FileExistsError:
                    there, inode = self._claimant(path, run, former=former)
                    if there is not None:
                        return None if there == who else there
                    _take_away(path, inode, draft)
                else:
                    return None
        finally:
            draft.unlink(missing_ok=True)
        raise OSError(errno.EAGAIN, "others write there all the time")

    def _claimant(self, path: Path, run: LiveRun, *, former: bool) -> tuple[str | None, int | None]:
        """Who has claimed a run, ``None``: the file there is no claim of it; and the number of that file's inode."""
        inode = None
        try:
            inode = path.lstat().st_ino
            data = read_bounded(path)
            try:
                value = self._signer.decode(_CLAIMED, path.name, data)
            except SignatureError:
                text = data.decode("ascii", "replace").strip()
                if former and _WHO.fullmatch(text):
                    return text, inode
                raise
        except FileNotFoundError:
            return None, None
        except SignatureError as error:
            self._signer.refuse(path, error)
            return None, inode
        if (value.get("submit"), value.get("uid")) != (run.key.submit_epoch, run.uid):
            self._signer.refuse(path, "is a claim of another run with this number")
            return None, inode
        return str(value.get("who")), inode

    def unclaim(self, live: Iterable[tuple[str, int]]) -> None:
        """Remove the claims of all jobs but these (cluster, job id)."""
        if self._root is None:
            return
        names = {f"{cluster}.{job_id}" for cluster, job_id in live}
        claims, asked = self._root / "claims", time.monotonic()

        def remove() -> None:
            for path in claims.iterdir():
                match = _CLAIM.fullmatch(path.name)
                if time.monotonic() - asked > _STALE_S:
                    return  # others may have claimed meanwhile
                if match is not None and match["job"] not in names:
                    path.unlink(missing_ok=True)

        with contextlib.suppress(OSError):
            self._ask(remove)


@dataclass(frozen=True, slots=True)
class Found:
    """What was read of a file that is to be signed."""

    value: Mapping[str, Any] | None
    """``None``: there is none, or none that is one."""
    signed: bool = True


def read_signed(signer: Signer, purpose: str, path: Path, *, most: int = LARGEST) -> Found:
    """Read a signed file; one that is wrongly signed is refused, and one without a signature says so.

    Raises ``OSError`` where it cannot be read.
    """
    try:
        data = read_bounded(path, most)
    except FileNotFoundError:
        return Found(None)
    except SignatureError as error:
        signer.refuse(path, error)
        return Found(None)
    try:
        return Found(signer.decode(purpose, path.name, data))
    except SignatureError as error:
        if error.unsigned:
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(data)
                return Found(value if isinstance(value, dict) else None, signed=False)
        signer.refuse(path, error)
        return Found(None)


def _take_away(path: Path, inode: int | None, draft: Path) -> None:
    """Remove what stands in the way of a claim, unless somebody has put a claim in its place meanwhile."""
    aside = draft.with_name(draft.name + ".bad")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        if aside.lstat().st_ino != inode:
            with contextlib.suppress(FileExistsError):
                os.link(aside, path, follow_symlinks=False)
        aside.unlink(missing_ok=True)


def _file(root: Path, cluster: str, job_id: int) -> Path:
    return root / "asleep" / f"{cluster}.{job_id}.json"


def _note(path: Path, value: Mapping[str, Any]) -> Note:
    """The note in a file. Raises ``ValueError``, ``TypeError`` and ``KeyError``."""
    known = {one.name for one in fields(Note)}
    note: Note = built(Note, {name: one for name, one in value.items() if name in known})
    if path.name != f"{note.key.name}.json":
        raise ValueError(f"it is of {note.key.name}")
    if min(note.restarts, note.seq, note.uid, note.began_ms, note.gpus, note.gpu_bytes, note.image_bytes) < 0:
        raise ValueError("it has numbers below 0")
    if not math.isfinite(note.since_epoch) or not math.isfinite(note.released_epoch or 0.0):
        raise ValueError("its times are none")
    return note
