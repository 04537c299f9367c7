"""Notes and claims beside the shared image store: the state of suspended jobs that all nodes share.

Small files in three directories of root's: ``asleep/CLUSTER.JOBID.json`` (the reason, the time, why the last restore
failed), ``restored/CLUSTER.JOBID.json`` (the last restore of a job that runs again, for the case that this attempt is
lost), and ``claims/CLUSTER.JOBID.RESTARTS`` (which shepherd restores this attempt; the first one wins, so an image is
never restored twice). An image is complete without its note.

All files are signed (``checkpoint.image.signatures``); others are ignored and logged. Earlier releases did not sign. An
unsigned note counts only if its image, made by such a release too, exists and agrees, and never as a statement that the
image was abandoned; an unsigned claim counts only if the image was made by such a release; an unsigned plan never does.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from slurm_affinode.base import json_values
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.files import fsync_dir, write_text
from slurm_affinode.base.timeouts import FileSystemCalls, NoAnswerError
from slurm_affinode.checkpoint.image.manifest import built
from slurm_affinode.checkpoint.image.signatures import LARGEST, SignatureError, Signer, read_bounded
from slurm_affinode.checkpoint.interface import CheckpointError
from slurm_affinode.checkpoint.store.tiers import Tiers
from slurm_affinode.model.suspension import JobKey, LiveRun, Manifest

_CLAIM = re.compile(r"(?P<job>[A-Za-z0-9_-]+\.\d+)\.\d+")

_NOTE, _CLAIMED, _PLAN, _RESTORED = "note", "claim", "start plan", "last restore"
"""Purposes of signatures."""
_WHO = re.compile(r"[A-Za-z0-9_.-]{1,255}/\d{1,10}/\d{1,20}")
"""NODE/PID/STARTED of a shepherd, the whole content of a claim of an older release."""
_VERSION = 1
"""Of the format of notes; those of releases without one are of version 1."""
_MOST_OF_PLAN = 16 << 20
_CLAIMS_TRIED = 8
_YEAR_10000 = 253_402_300_800
_STALE_S = 60.0
"""How long a list of live jobs is valid."""

NOW = "now"
"""``Note.wake`` of a job that a user has woken."""
NO_NOTE = "its note is not beside the shared store: is that mounted, and can it be written?"
"""Shown for a suspended job."""


@dataclass(frozen=True, slots=True)
class Note:
    """The shared data about a suspended job."""

    cluster: str
    job_id: int
    submit: int
    """Submit time of the suspended attempt (epoch)."""
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
    """The job ID shown to its owner: ``123_4`` for an array task; ``None`` if it is the raw ID."""
    failure: str | None = None
    """The reason why its last restore failed."""
    trouble: str | None = None
    """A problem with its image, which can be restored nevertheless."""
    passed: str | None = None
    """Tiers that did not accept its image when it was written, and why."""
    failures: int = 0
    """Number of failed restores of its image since it was last woken on request."""
    failed_epoch: float | None = None
    """When its last restore failed; ``None``: none has, or an earlier release wrote the note."""
    retry_epoch: float | None = None
    """When the restore that failed may be retried; ``None``: only on request."""
    local_files: str | None = None
    """Whether its closed node-local files are in the image, or tie it to its node, and why."""
    tied: bool | None = None
    """Its node-local files are on ``node`` alone, so it should start there."""
    required: str | None = None
    """The nodes, separated by commas, that Slurm required for it before it was tied; ``None``: not changed yet."""
    unavailable: str | None = None
    """Why a tied job cannot start on its node now, and what to do."""
    released_epoch: float | None = None
    releases: int = 0
    """Number of its releases since it was last woken on request."""
    given_up: bool = False
    """None of its images will be restored: it starts afresh."""
    revision: int = field(default=0, compare=False)
    """Increases with each write of the note of this suspension."""

    def precedes(self, manifest: Manifest) -> bool:
        """Return whether the note belongs to an earlier suspension than an image of the job: replayed or left over."""
        return (self.submit, self.restarts) < (manifest.key.submit_epoch, manifest.restarts)

    def describes(self, manifest: Manifest) -> bool:
        """Return whether the note agrees with the manifest of its image."""
        own_facts = (self.key, self.restarts, self.seq, self.uid, self.node, self.began_ms)
        image_facts = (manifest.key, manifest.restarts, manifest.seq, manifest.uid, manifest.node)
        return own_facts == (*image_facts, round(manifest.started_epoch * 1000))

    @property
    def waits_for_request(self) -> bool:
        """Whether its last restore failed and is not retried."""
        return self.failure is not None and self.retry_epoch is None

    @property
    def key(self) -> JobKey:
        """The suspended submission."""
        return JobKey(self.cluster, self.job_id, self.submit)

    @property
    def problem(self) -> str | None:
        """Why its last restore failed, and the state of its image since then, in one line."""
        trouble = "its image was abandoned: it starts from its beginning" if self.given_up else self.trouble
        trouble = "; ".join(filter(None, (self.unavailable, trouble))) or None
        if self.failure is None or trouble is None:
            return self.failure or trouble
        return trouble if self.failure in trouble else f"{self.failure}; {trouble}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRestore:
    """The last restore of a job, kept until the job ends. It decides what follows if that attempt is lost."""

    cluster: str
    job_id: int
    submit: int
    """Submit time of the suspended attempt (epoch); with ``image_restarts``, the identity of the image."""
    image_restarts: int
    """Restart count of the suspended attempt."""
    seq: int
    uid: int
    checkpoint_epoch: float
    """Time of the checkpoint."""
    run: int
    """Restart count of the attempt that was restored, or that has started from the beginning instead."""
    node: str
    """Its node."""
    restored_epoch: float
    lost_epoch: float | None = None
    """When it was lost, as seen by the attempt after it; ``None``: not lost, or unknown when."""
    held: bool = False
    """The job was held because of this loss, so that its owner decides; a later attempt is the decision."""
    discarded: bool = False
    """The image and earlier ones are no longer restored."""
    fresh: bool = False
    """Its restore had failed, and the attempt has started from the beginning."""
    again: bool = False
    """It has returned to an image from which an earlier attempt was restored, which was lost."""
    lost_s: float | None = None
    """With ``again`` or ``discarded``: how long the lost attempt had run since its restore; ``None``: unknown."""

    @classmethod
    def of(
        cls, manifest: Manifest, *, run: int, node: str, at_epoch: float, before: LastRestore | None,
        fresh: bool = False,
    ) -> LastRestore:  # fmt: skip
        """Return a restore from this image. ``before``: the last restore until now."""
        key = manifest.key
        again = before is not None and before.is_of(manifest) and before.run < run
        return cls(
            cluster=key.cluster, job_id=key.job_id, submit=key.submit_epoch, image_restarts=manifest.restarts,
            seq=manifest.seq, uid=manifest.uid, checkpoint_epoch=manifest.dumped_epoch, run=run, node=node,
            restored_epoch=at_epoch, fresh=fresh, again=again,
            lost_s=before.ran_s if before is not None and again else None,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """``CLUSTER.JOBID``."""
        return f"{self.cluster}.{self.job_id}"

    @property
    def ran_s(self) -> float | None:
        """Time from the restore to the loss; ``None`` if it is unknown."""
        return None if self.lost_epoch is None else max(0.0, self.lost_epoch - self.restored_epoch)

    def is_of(self, manifest: Manifest) -> bool:
        """Return whether it is a restore of this image."""
        key = manifest.key
        image = (key.cluster, key.job_id, key.submit_epoch, manifest.restarts, manifest.seq, manifest.uid)
        return image == (self.cluster, self.job_id, self.submit, self.image_restarts, self.seq, self.uid)

    def discards(self, manifest: Manifest) -> bool:
        """Return whether an image must not be restored."""
        owner = (self.cluster, self.job_id, self.uid)
        earlier = (manifest.key.submit_epoch, manifest.restarts) <= (self.submit, self.image_restarts)
        return self.discarded and earlier and owner == (manifest.key.cluster, manifest.key.job_id, manifest.uid)


@dataclass(frozen=True, slots=True)
class SuspendedJob:
    """A suspended job with a checkpoint image, as shown by ``status``."""

    key: JobKey
    uid: int
    node: str
    """The node on which it was suspended."""
    seq: int
    since_epoch: float
    image_bytes: int
    gpu_bytes: int
    gpus: int
    where: str
    """``shared``: any node can restore it; ``node``: only ``node`` can, so far."""
    wake: str
    """``auto``, ``hold``, or the time at which it wakes."""
    why: str
    failure: str | None = None
    """The reason why its last restore failed."""
    passed: str | None = None
    """Tiers that did not accept its image, and why."""
    shown: str | None = None
    """The job ID shown to its owner if it differs from the raw ID: ``123_4``."""
    failures: int = 0
    failed_epoch: float | None = None
    retry_epoch: float | None = None
    """These as in its note."""
    retries_left: int = 0
    """Further restores that may fail before it is restored on request only."""
    releases: int = 0
    """As in its note."""
    release_epoch: float | None = None
    """When it may be released again if it is held since its last release; ``None``: it was not released."""
    local_files: str | None = None
    """Whether its closed node-local files are in the image, or tie it to its node, and why."""
    tied: bool = False
    """It starts on ``node`` alone, because of these files."""

    @property
    def called(self) -> str:
        """The job ID shown to its owner."""
        return self.shown or str(self.key.job_id)

    @classmethod
    def of(
        cls, note: Note, where: str, *, failure: str | None, retries: int = 0, release_epoch: float | None = None
    ) -> SuspendedJob:
        """Return the job of a note. ``retries``: of a failed restore, at most. The others: see above."""
        remaining = 0 if note.retry_epoch is None else max(1, retries - note.failures + 1)
        return cls(
            key=note.key, uid=note.uid, node=note.node, seq=note.seq, since_epoch=note.since_epoch,
            image_bytes=note.image_bytes, gpu_bytes=note.gpu_bytes, gpus=note.gpus, where=where,
            wake="hold" if note.waits_for_request else note.wake, why=note.why, failure=failure, passed=note.passed,
            shown=note.shown, failures=note.failures, failed_epoch=note.failed_epoch, retry_epoch=note.retry_epoch,
            retries_left=remaining, releases=note.releases, release_epoch=release_epoch, local_files=note.local_files,
            tied=bool(note.tied),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StartPlan:
    """Where and when Slurm expects to start a job."""

    start_epoch: float
    nodes: tuple[str, ...]


def vouched(tiers: Tiers, note: Note) -> bool:
    """Return whether a store has an image that agrees with the note, made by a release that did not sign notes."""
    for store in tiers.stores:
        with contextlib.suppress(CheckpointError, OSError):
            image = store.get(note.key.name, note.seq)
            if image.former and note.describes(image.manifest):
                return True
    return False


class Notes:
    """Notes and claims; without a shared store, nothing is read or written.

    A file system that does not respond is treated like one that returns errors.
    """

    def __init__(
        self, root: Path | None, signer: Signer, *, vouched: Callable[[Note], bool] = lambda note: False
    ) -> None:
        """``vouched``: returns whether an image of an older release exists and agrees with an unsigned note."""
        self._root = root
        self._signer = signer
        self._vouched = vouched
        self._ask = FileSystemCalls(root)
        self._revisions: dict[str, tuple[int, int, int]] = {}
        """File name -> submit time, number and revision of the newest note seen there."""
        self._lock = threading.Lock()
        """Guards the revisions of notes that this node has seen."""

    def write(self, note: Note) -> None:
        """Write a note, replacing an earlier one of the job. Raises ``AffinodeError``."""
        if self._root is None:
            return
        path = _file(self._root, note.cluster, note.job_id)
        with self._lock:
            revision_before = self._revisions.get(path.name, (0, 0, 0))
        # Also above the revision of a removed note that this node has not seen.
        last_revision = max(note.revision, revision_before[2] if revision_before[:2] == (note.submit, note.seq) else 0)
        revision = max(last_revision + 1, round(time.time() * 1000))
        value = {"version": _VERSION, **asdict(replace(note, revision=revision))}
        self._put(path, self._signer.encode(_NOTE, path.name, value))

    def _put(self, path: Path, text: str) -> None:
        def put() -> None:
            with opened(path.parent, create=True) as directory:
                write_text(directory / path.name, text, mode=0o600)

        try:
            self._ask(put)
        except OSError as error:
            raise AffinodeError(f"{path}: cannot be written: {error.strerror or error}") from error

    def read(self, cluster: str, job_id: int) -> Note | None:
        """Return the note of a job, or ``None`` if there is no readable one."""
        if self._root is None:
            return None
        path = _file(self._root, cluster, job_id)
        with contextlib.suppress(OSError):
            return self._judged(path, self._ask(lambda: read_signed(self._signer, _NOTE, path)))
        return None

    def _judged(self, path: Path, content: SignedContent) -> Note | None:
        """Return the note if its signature is valid and no newer one was seen; otherwise log the reason."""
        if content.value is None:
            return None
        try:
            note = _note(path, content.value)
        except (ValueError, TypeError, KeyError) as error:
            self._signer.refuse(path, f"is not a note: {error}")
            return None
        if not content.signed:
            note = replace(note, given_up=False)
            if not self._vouched(note):
                self._signer.refuse(path, "is not signed, and no image of an older release agrees with it")
                return None
        stamp = (note.submit, note.seq, note.revision)
        with self._lock:
            revision_before = self._revisions.get(path.name)
            stale = revision_before is not None and revision_before[:2] == stamp[:2] and stamp < revision_before
            if not stale:
                self._revisions[path.name] = stamp
        if stale:
            self._signer.refuse(path, "is older than the one that was there before")
            return None
        self._signer.accept(path)
        return note

    def all(self) -> list[Note]:
        """Return every note, by job; none if they cannot be read."""
        return self.read_notes() or []

    def read_notes(self) -> list[Note] | None:
        """Return every note, by job; ``None`` if they cannot be read, so that their number is unknown."""
        if self._root is None:
            return []
        contents = self._read_all(self._root / "asleep", _NOTE)
        if contents is None:
            return None
        with self._lock:  # a removed note may reappear with any revision
            names = {path.name for path, _ in contents}
            self._revisions = {name: revision for name, revision in self._revisions.items() if name in names}
        notes = [note for path, revision in contents if (note := self._judged(path, revision)) is not None]
        return sorted(notes, key=lambda note: note.key)

    def _read_all(self, files: Path, purpose: str) -> list[tuple[Path, SignedContent]] | None:
        """Return the signed files of a directory; ``None`` if they cannot be read."""

        def read() -> list[tuple[Path, SignedContent]]:
            paths = [path for path in sorted(files.glob("*.json")) if not path.name.startswith(".")]
            return [(path, read_signed(self._signer, purpose, path)) for path in paths]

        with contextlib.suppress(OSError):
            return self._ask(read)
        return None

    def remove(self, cluster: str, job_id: int) -> None:
        """Remove the note of a job that runs again or has ended."""
        if self._root is not None:
            path = _file(self._root, cluster, job_id)

            def unlink() -> None:
                with opened(path.parent) as directory:
                    (directory / path.name).unlink(missing_ok=True)

            with contextlib.suppress(OSError):
                self._ask(unlink)

    # --- restores

    def write_restore(self, restore: LastRestore) -> None:
        """Write the last restore of a job, replacing an earlier one. Raises ``AffinodeError``."""
        if self._root is None:
            return
        path = _restored(self._root, restore.name)
        self._put(path, self._signer.encode(_RESTORED, path.name, {"version": _VERSION, **asdict(restore)}))

    def last_restore(self, cluster: str, job_id: int) -> LastRestore | None:
        """Return the last restore of a job; ``None`` if there was none, or it cannot be read."""
        if self._root is None:
            return None
        path = _restored(self._root, f"{cluster}.{job_id}")
        with contextlib.suppress(OSError):
            return self._judged_restore(path, self._ask(lambda: read_signed(self._signer, _RESTORED, path)))
        return None

    def discarded(self) -> list[LastRestore]:
        """Return the last restores that discard an image; none if they cannot be read."""
        if self._root is None:
            return []
        contents = self._read_all(self._root / "restored", _RESTORED) or []
        restores = (self._judged_restore(path, content) for path, content in contents)
        return [restore for restore in restores if restore is not None and restore.discarded]

    def _judged_restore(self, path: Path, content: SignedContent) -> LastRestore | None:
        if content.value is None or not content.signed:
            return None
        try:
            restore = _restore(path, content.value)
        except (ValueError, TypeError, KeyError) as error:
            self._signer.refuse(path, f"is not the record of a restore: {error}")
            return None
        self._signer.accept(path)
        return restore

    def forget_restores(self, cluster: str, live: Iterable[int]) -> None:
        """Remove the last restores of all jobs of a cluster but these (job IDs). Other clusters may use the store."""
        if self._root is None:
            return
        live_names = {f"{cluster}.{job_id}.json" for job_id in live}
        self._remove(self._root / "restored", lambda name: name.startswith(f"{cluster}.") and name not in live_names)

    # --- Slurm's start plan

    def write_plan(self, cluster: str, plans: Mapping[int, StartPlan]) -> None:
        """Write the expected starts of a cluster's released jobs: one agent queries Slurm, and all read the file."""
        if self._root is not None:
            path = _plan(self._root, cluster)
            starts = {str(job): [plan.start_epoch, list(plan.nodes)] for job, plan in sorted(plans.items())}
            text = self._signer.encode(_PLAN, path.name, {"starts": starts})
            try:
                self._ask(lambda: write_text(path, text, mode=0o600))
            except OSError as error:
                raise AffinodeError(f"{self._root}: cannot be written: {error.strerror or error}") from error

    def plan(self, cluster: str) -> dict[int, StartPlan]:
        """Return the plan of ``write_plan``; empty if there is no readable one."""
        if self._root is None:
            return {}
        path = _plan(self._root, cluster)
        try:
            content = self._ask(lambda: read_signed(self._signer, _PLAN, path, most=_MOST_OF_PLAN))
            if content.value is None or not content.signed:
                return {}
            return {
                int(job): StartPlan(json_values.number(start), tuple(str(node) for node in nodes))
                for job, (start, nodes) in content.value["starts"].items()
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}

    # --- claims

    def claim(self, run: LiveRun, who: str, *, former: bool = False) -> str | None:
        """Claim the restore of an attempt for ``who``; return ``None`` on success, otherwise the claimant.

        Repeating a claim succeeds. ``former``: the image was made by a release that did not sign claims, so an unsigned
        claim counts. Raises ``AffinodeError`` if the claimant cannot be determined, ``NoAnswerError`` if the file
        system does not respond.
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
        value = {"who": who, "submit": run.key.submit_epoch, "uid": run.uid}
        with opened(path.parent, create=True) as directory:
            draft, final = directory / f".{path.name}.{who.replace('/', '_')}", directory / path.name
            write_text(draft, self._signer.encode(_CLAIMED, path.name, value), mode=0o600)
            try:
                for _ in range(_CLAIMS_TRIED):
                    try:
                        # A link appears whole or not at all, also for other clients of a network file system.
                        os.link(draft, final)
                        fsync_dir(directory)
                    except FileExistsError:
                        claimant, inode = self._claimant(path, run, former=former)
                        if claimant is not None:
                            return None if claimant == who else claimant
                        _take_away(final, inode, draft)
                    else:
                        return None
            finally:
                draft.unlink(missing_ok=True)
        raise OSError(errno.EAGAIN, "other nodes write it all the time")

    def _claimant(self, path: Path, run: LiveRun, *, former: bool) -> tuple[str | None, int | None]:
        """Return the claimant of an attempt (``None``: the file is not a claim of it) and the inode of the file."""
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

    def unclaim(self, cluster: str, live: Iterable[int]) -> None:
        """Remove the claims of all jobs of a cluster but these (job IDs). Other clusters may use the store."""
        if self._root is None:
            return
        live_keys = {f"{cluster}.{job_id}" for job_id in live}

        def ended(name: str) -> bool:
            match = _CLAIM.fullmatch(name)
            return match is not None and name.startswith(f"{cluster}.") and match["job"] not in live_keys

        self._remove(self._root / "claims", ended)

    def _remove(self, files: Path, ended: Callable[[str], bool]) -> None:
        """Remove the files of ended jobs. ``ended``: whether a name is that of one, by a list of live jobs."""
        began = time.monotonic()

        def remove() -> None:
            with opened(files) as directory:
                for path in directory.iterdir():
                    if time.monotonic() - began > _STALE_S:
                        return  # others may have written meanwhile
                    if ended(path.name):
                        path.unlink(missing_ok=True)

        with contextlib.suppress(OSError):
            self._ask(remove)


@dataclass(frozen=True, slots=True)
class SignedContent:
    """The content of a file that should be signed."""

    value: Mapping[str, Any] | None
    """``None``: the file is missing or invalid."""
    signed: bool = True


def read_signed(signer: Signer, purpose: str, path: Path, *, most: int = LARGEST) -> SignedContent:
    """Read a signed file; refuse one with an invalid signature, and mark one without a signature.

    Raises ``OSError`` if it cannot be read.
    """
    try:
        data = read_bounded(path, most)
    except FileNotFoundError:
        return SignedContent(None)
    except SignatureError as error:
        signer.refuse(path, error)
        return SignedContent(None)
    try:
        return SignedContent(signer.decode(purpose, path.name, data))
    except SignatureError as error:
        if error.unsigned:
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(data)
                return SignedContent(value if isinstance(value, dict) else None, signed=False)
        signer.refuse(path, error)
        return SignedContent(None)


@contextlib.contextmanager
def opened(directory: Path, *, create: bool = False) -> Iterator[Path]:
    """Open a directory beside the shared store, and yield a path that leads to it by its descriptor.

    Other machines may write beside the store. Through a link in place of a directory, root would create and remove
    files anywhere on its node, so links are not followed. Raises ``OSError``.
    """
    if create:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _take_away(path: Path, inode: int | None, draft: Path) -> None:
    """Remove an invalid file in the place of a claim, unless it has been replaced by a claim meanwhile."""
    aside = draft.with_name(draft.name + ".bad")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        if aside.lstat().st_ino != inode:
            with contextlib.suppress(FileExistsError):
                os.link(aside, path, follow_symlinks=False)
        aside.unlink(missing_ok=True)


def _plan(root: Path, cluster: str) -> Path:
    return root / f"plan.{cluster}.json"


def _file(root: Path, cluster: str, job_id: int) -> Path:
    return root / "asleep" / f"{cluster}.{job_id}.json"


def _restored(root: Path, name: str) -> Path:
    return root / "restored" / f"{name}.json"


def _restore(path: Path, value: Mapping[str, Any]) -> LastRestore:
    """Parse the record of a restore. Raises ``ValueError``, ``TypeError`` and ``KeyError``."""
    if (version := value.get("version", _VERSION)) != _VERSION:
        raise ValueError(f"its version is {version!r:.60}, not {_VERSION}")
    names = {field.name for field in fields(LastRestore)}
    restore: LastRestore = built(
        LastRestore, {name: field_value for name, field_value in value.items() if name in names}
    )
    if path.name != f"{restore.name}.json":
        raise ValueError(f"it belongs to {restore.name}")
    if min(restore.submit, restore.image_restarts, restore.seq, restore.uid, restore.run) < 0:
        raise ValueError("it has numbers below 0")
    times = (restore.checkpoint_epoch, restore.restored_epoch, restore.lost_epoch or 0.0, restore.lost_s or 0.0)
    if not all(0 <= epoch < _YEAR_10000 for epoch in times):
        raise ValueError("its times are not finite")
    return restore


def _note(path: Path, value: Mapping[str, Any]) -> Note:
    """Parse a note. Raises ``ValueError``, ``TypeError`` and ``KeyError``."""
    if (version := value.get("version", _VERSION)) != _VERSION:
        raise ValueError(f"its version is {version!r:.60}, not {_VERSION}")
    names = {field.name for field in fields(Note)}
    note: Note = built(Note, {name: field_value for name, field_value in value.items() if name in names})
    if path.name != f"{note.key.name}.json":
        raise ValueError(f"it belongs to {note.key.name}")
    numbers = (
        note.restarts, note.seq, note.uid, note.began_ms, note.gpus, note.gpu_bytes, note.image_bytes, note.failures,
        note.releases,
    )  # fmt: skip
    if min(numbers) < 0:
        raise ValueError("it has numbers below 0")
    times = (note.since_epoch, note.released_epoch, note.failed_epoch, note.retry_epoch)
    if not all(math.isfinite(epoch or 0.0) for epoch in times):
        raise ValueError("its times are not finite")
    return note
