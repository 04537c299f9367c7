"""Recovery after a crash: complete or roll back what the journal records, and clean up after ended jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.threads import Workers, surviving
from slurm_affinode.base.timeouts import UNRESPONSIVE
from slurm_affinode.checkpoint.files import deleted_files
from slurm_affinode.checkpoint.interface import CheckpointError, Image, ImageUnreadable
from slurm_affinode.checkpoint.store.tiers import Tiers
from slurm_affinode.core.retention import Fate, fate
from slurm_affinode.core.suspension import IN_PLACE, JobFact, RecoveryAction, World, recover
from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.model.suspension import JobKey, LiveRun, Manifest, Mode, Phase
from slurm_affinode.slurm.interface import SlurmClient, UnknownJobError
from slurm_affinode.suspension import messages
from slurm_affinode.suspension.context import LOG, LocalFiles, Location, Records, SuspendSettings
from slurm_affinode.suspension.inplace.scheduler import InPlaceScheduler
from slurm_affinode.suspension.job.memory_limits import ExceededLimit, MemoryLimits
from slurm_affinode.suspension.job.process_tree import Processes, TreeGoneError
from slurm_affinode.suspension.job.registry import Registry, WatchedJob
from slurm_affinode.suspension.notify import SuspensionOutcomes
from slurm_affinode.suspension.records.journal import JobJournal
from slurm_affinode.suspension.records.record import SuspensionRecord
from slurm_affinode.suspension.records.shared_state import NO_NOTE, LastRestore, Note, SuspendedJob
from slurm_affinode.suspension.records.sweep import STOPPED_HINT, Absence, Absences, ImageSweep, Swept, is_of
from slurm_affinode.suspension.requeue import NotRequeued, Requeuer, UnresponsiveError
from slurm_affinode.suspension.rollback import Rollback

UNKNOWN = "Slurm does not know this job: has slurmctld lost its state? Its image is kept for a time"


class SuspendedJobs:
    """The suspended jobs that this node knows."""

    def __init__(
        self, *, location: Location, tiers: Tiers, records: Records, absences: Absences, settings: SuspendSettings,
        now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._node, self._cluster = location.node, location.cluster
        self._tiers = tiers
        self._journal, self._notes = records.journal, records.notes
        self._absences = absences
        self._settings = settings
        self._now = now

    def all(self) -> list[SuspendedJob]:
        """Return the cluster's suspended jobs: those with a note, unless their image should be here and is missing."""
        shared = _present([] if self._tiers.shared_store is None else self._tiers.shared_store.images())
        local = _present([image for tier in self._tiers.node for image in tier.store.images()])
        suspended, unknown = [], self._absences.all()
        without = list(self._without_note())  # first: a note that is written meanwhile is read below
        notes = [note for note in self._notes.all() if note.cluster == self._cluster]
        note_keys = {note.key for note in notes}
        for note in (*notes, *(note for note in without if note.key not in note_keys)):
            where = "shared" if (note.key.name, note.seq) in shared else "node"
            available = where == "shared" or (note.key.name, note.seq) in local or note.node != self._node
            if not available and not note.given_up:
                continue
            failure = UNKNOWN if note.key.name in unknown else note.problem
            settings, released = self._settings, note.released_epoch
            release = None if released is None else released + settings.release_pause_s(note.releases)
            suspended.append(
                SuspendedJob.of(note, where, failure=failure, retries=settings.restore_retries, release_epoch=release)
            )
        return suspended

    def ids(self) -> frozenset[int] | None:
        """Return the IDs of the jobs that will be restored; ``None`` if the notes cannot be read.

        A job's comment does not count: its owner can write it, and the jobs of others would be limited by it.
        """
        without = list(self._without_note())  # first: see ``all``
        notes = self._notes.read_notes()
        if notes is None:
            return None
        node_notes = (note for note in (*notes, *without) if note.cluster == self._cluster and not note.given_up)
        return frozenset(note.job_id for note in node_notes)

    def _without_note(self) -> Iterator[Note]:
        """Yield notes of suspended jobs that only this node knows, while the shared directory cannot be written."""
        for journal in self._journal.open_journals():
            key = journal.key
            if journal.phase is Phase.QUEUED and self._notes.read(key.cluster, key.job_id) is None:
                yield replace(journal.record.note(self._node, self._now()), trouble=NO_NOTE)

    def forget_awake(self, registry: Registry) -> None:
        """Remove notes of jobs that run on this node and could not be removed at their restore."""
        for note in self._notes.all():
            job = registry.get(note.job_id)
            runs = job is not None and job.phase is Phase.RUNNING and job.root > 0
            if job is not None and runs and note.cluster == self._cluster and note.restarts < job.restarts:
                self._notes.remove(note.cluster, note.job_id)


def _present(images: Iterable[object]) -> set[tuple[str, int]]:
    return {(image.manifest.key.name, image.manifest.seq) for image in images if isinstance(image, Image)}


_RETRY_S = 2.0
_KILL_ROUNDS = 15
"""After so many rounds in which the kernel has ended processes of a job, all of them are killed."""
_SWEEP_S = 60.0
_YOUNG_S = 30.0


class JobKeeper:
    """``Keeper`` for the agent."""

    def __init__(
        self, *, location: Location, slurm: SlurmClient, processes: Processes, registry: Registry, records: Records,
        absences: Absences, tiers: Tiers, files: LocalFiles, settings: SuspendSettings, workers: Workers,
        outcomes: SuspensionOutcomes, rollback: Rollback, requeuer: Requeuer, limits: MemoryLimits | None,
        in_place: InPlaceScheduler | None = None, now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """``in_place`` takes over the jobs that sleep in place; ``None``: there cannot be any.

        ``requeuer`` is used by this keeper alone. ``limits``: the memory limits of jobs; ``None``: they are not known.
        """
        self._node, self._cluster = location.node, location.cluster
        self._slurm = slurm
        self._processes = processes
        self._registry = registry
        self._journal, self._ledger, self._notes = records.journal, records.ledger, records.notes
        self._absences = absences
        self._tiers = tiers
        self._environments, self._created = files.environments, files.created
        self._scratch_records = files.scratch_records
        self._settings = settings
        self._outcomes = outcomes
        self._rollback = rollback
        self._requeuer = requeuer
        self._limits = limits
        self._in_place = in_place
        self._now = now
        self._suspended = SuspendedJobs(
            location=location, tiers=tiers, records=records, absences=absences, settings=settings, now=now
        )
        self._unresponsive = False
        """slurmctld did not respond in this round."""
        self._queue = workers.queue("recovery")
        self._waiting: dict[JobKey, JobJournal] = {}
        """No lock: suspensions add journals, and only the thread of the queue copies and removes them, each of which is
        one operation of the dictionary."""
        self._swept = 0.0
        self._unknown: dict[str, Absence] = {}
        """Jobs that Slurm did not know in the last sweep."""
        self._logged: dict[JobKey, str] = {}

    # --- recovery

    def recover(self) -> None:
        """Process every open journal once; those that have to wait are retried until they are done."""
        journals = self._journal.open_journals()
        for journal in journals:
            if journal.damage:
                LOG.error("%s: %s", journal.path, journal.damage)
        self._round(journals)
        self._lower_limits()
        self._queue.every(_RETRY_S, self._retry)

    def _retry(self) -> None:
        self._round(list(self._waiting.values()))
        with surviving(LOG, "memory limits are not lowered, by a fault of the agent"):
            self._lower_limits()

    def _lower_limits(self) -> None:
        """Lower memory limits that a suspension, a wake or a restore has left raised."""
        journal, limits = self._journal, self._limits
        if limits is not None:
            limits.tend(lambda: [opened.key.job_id for opened in journal.open_journals()], self._exceeded)

    def _exceeded(self, excess: ExceededLimit) -> None:
        """Report that the kernel ends processes of a job; end all of them if that did not free its memory."""
        job = self._registry.get(excess.job_id)
        if not excess.rounds:
            text = messages.exceeded(excess.used, excess.limit)
            LOG.warning("job %s: %s", excess.job_id, text)
            if job is not None:
                job.say(text)
        elif excess.rounds >= _KILL_ROUNDS and job is not None:
            LOG.warning("job %s: all its processes are killed: it still exceeds its memory limit", job.job_id)
            self._processes.end(job.init_pid, job.init_started, timeout_s=_RETRY_S)

    def _round(self, journals: Sequence[JobJournal]) -> None:
        """Process each journal once. If slurmctld does not respond, it is queried only once: its time-out is long."""
        self._unresponsive = False
        for journal in journals:
            self._try(journal)

    def wait(self, journal: JobJournal) -> None:
        """Take over a suspension that has to wait until Slurm responds."""
        self._waiting[journal.key] = journal

    def _try(self, journal: JobJournal) -> None:
        completed = False
        with surviving(LOG, "job %s: recovery failed, by a fault of the agent", journal.key.job_id):
            try:
                completed = self.take_up(journal)
            except AffinodeError as error:
                LOG.warning("job %s: %s", journal.key.job_id, error)
        if completed:
            self._waiting.pop(journal.key, None)
            self._logged.pop(journal.key, None)
        else:
            self._waiting[journal.key] = journal

    def take_up(self, journal: JobJournal) -> bool:
        """Do what ``core.suspension.recover`` decides for a journal; return whether nothing is left to wait for."""
        if not journal.entries:
            return True
        record = journal.record
        if record.seq is not None and any(store.busy(record.key) for store in self._tiers.stores):
            return False  # a CRIU that has outlived the agent has to end by itself: killing it would harm the tree
        world = self._world(record)
        todo = recover(record.phase, world)
        names = ", ".join(action.value for action in todo.actions) or "nothing"
        message = f"job {record.key.job_id} was {record.phase.value}: {todo.why} ({names})"
        if self._logged.get(record.key) != message:  # once, not in each round
            self._logged[record.key] = message
            LOG.info("%s", message)
        for action in todo.actions:
            if action is RecoveryAction.WAIT or not self._act(action, journal, todo.why):
                return False
        if todo.phase is Phase.QUEUED and world.job is JobFact.LATER_RUN:
            self._ledger.write(journal.record.ledger_entry(self._node))
            if not self._may_be_here(record.key.job_id):
                self._outcomes.leave(record)
            journal.close()
        elif todo.phase is Phase.QUEUED:
            if journal.phase is not Phase.QUEUED:
                journal.write(Phase.QUEUED)
            self._outcomes.queued(journal)
        return True

    def _may_be_here(self, job_id: int) -> bool:
        """Return whether the current attempt of a job may be on this node."""
        try:
            return self._slurm.job(job_id).batch_host in (None, self._node)
        except AffinodeError:
            return True

    def _world(self, record: SuspensionRecord) -> World:
        tree, in_place = self._has_tree(record), bool(record.in_place)
        job = JobFact.UNKNOWN
        # A job that sleeps in place does not wait for Slurm to respond, since requests may arrive. Slurm itself ends
        # the processes of an ended job, and its signal thaws them.
        if not (tree and in_place) and not self._unresponsive:
            job = self._requeuer.fact(record.key.job_id, record.restarts, record.uid)
            self._unresponsive = self._requeuer.unresponsive
        return World(job, tree, self._has_image(record), in_place=in_place)

    def _has_tree(self, record: SuspensionRecord) -> bool:
        try:
            return bool(self._processes.members(record.init_pid, record.init_started))
        except TreeGoneError:
            return False

    def _has_image(self, record: SuspensionRecord) -> bool:
        """Return whether a store has the image.

        Raises ``ImageUnreadable``: an image that cannot be read now may be all that is left of the job.
        """
        if record.seq is None:
            return False
        unknown = None
        for store in self._tiers.stores:
            try:
                store.get(record.key.name, record.seq)
            except (ImageUnreadable, OSError) as error:
                unknown = ImageUnreadable(f"{store.path} cannot be read: {error}")
            except CheckpointError:
                continue
            else:
                return True
        if unknown is not None:
            raise unknown
        return False

    def _act(self, action: RecoveryAction, journal: JobJournal, why: str) -> bool:
        """Execute one action; ``False``: it has to wait."""
        record = journal.record
        if action is RecoveryAction.RESUME:
            return self._rollback.resume(journal)
        if action is RecoveryAction.DROP_IMAGE:
            self._rollback.drop_image(journal)
        elif action is RecoveryAction.KILL_TREE:
            return self._processes.end(record.init_pid, record.init_started, timeout_s=self._settings.kill_s)
        elif action is RecoveryAction.REQUEUE:
            return self._requeue(journal)
        elif action in (RecoveryAction.SLEEP, RecoveryAction.WAKE):
            if self._in_place is None:
                return False
            self._in_place.take_up(journal, ask=why if action is RecoveryAction.WAKE else "")
        elif action is RecoveryAction.RESTORE:
            # Its shepherd connects again, and the restorer starts over.
            return True
        elif action is RecoveryAction.CLOSE:
            self._close(journal, why)
        elif action is RecoveryAction.LOST:
            self._outcomes.lost(journal)
        return True

    def _requeue(self, journal: JobJournal) -> bool:
        """Requeue the job, from phase ``dumped`` on or again. The phase after it is ``queued``."""
        record = journal.record
        job_id, init = record.key.job_id, (record.init_pid, record.init_started)
        try:
            members = self._processes.members(*init)
        except TreeGoneError:
            members = ()  # the node was rebooted: only the image is left
        self._processes.stop(members)
        if record.phase is not Phase.REQUEUEING:
            journal.write(Phase.REQUEUEING)
        with self._processes.hold(members):
            try:
                self._requeuer.requeue(job_id, record.restarts)
            except UnresponsiveError:
                self._unresponsive = True
                return False
            except NotRequeued as error:
                fact = self._requeuer.fact(job_id, record.restarts)
                if fact is not JobFact.THIS_RUN:
                    return False  # ended or unknown: the next round decides
                LOG.warning("job %s: %s", job_id, error)
                back = str(error)
            else:
                self._processes.end(*init, timeout_s=self._settings.kill_s)
                journal.write(Phase.QUEUED)
                self._outcomes.queued(journal)
                return True
        self._rollback.drop_image(journal)
        self._rollback.resume(journal)
        self._outcomes.ran_on(journal, back)
        return True

    def _close(self, journal: JobJournal, why: str) -> None:
        record = journal.record
        key = record.key
        if record.phase in IN_PLACE:  # the job has ended
            self._ledger.write(replace(record.ledger_entry(self._node), ended_ms=round(self._now() * 1000)))
            journal.close()
        elif record.phase in (Phase.QUEUED, Phase.RESTORING):
            if self._requeuer.fact(key.job_id, record.restarts) is JobFact.ENDED:
                entry = LedgerEntry.of(key, record.began_ms)
                self._ledger.write(replace(entry, ended_ms=round(self._now() * 1000)))
            self._notes.remove(key.cluster, key.job_id)
            journal.close()
        else:
            self._outcomes.ran_on(journal, f"the agent was stopped: {why}")

    # --- the rest of ``Keeper``

    def identify(self, job: WatchedJob) -> tuple[JobKey, int]:
        """Return the cluster, ID and submit time of the job, and the number of suspensions that its image counts."""
        key = None if job.slurm is None else JobKey.of(self._cluster, job.slurm)
        if key is None:
            raise AffinodeError(f"Slurm has not reported when job {job.job_id} was submitted")
        run = LiveRun(key, job.uid, job.restarts)
        counts = [0]
        for store in self._tiers.stores:
            try:
                image = store.find(run)
            except (CheckpointError, OSError):
                continue
            counts.append(0 if image is None else image.manifest.seq)
        restored = self._notes.last_restore(key.cluster, key.job_id)
        if restored is not None and restored.uid == job.uid and restored.submit <= key.submit_epoch:
            counts.append(restored.seq)  # its image may have been discarded; its number is not used again
        return key, max(counts)

    def last_restore(self, job: WatchedJob) -> LastRestore | None:
        """See ``interface.Keeper``."""
        restored = self._notes.last_restore(self._cluster, job.job_id)
        return restored if restored is not None and (restored.uid, restored.run) == (job.uid, job.restarts) else None

    def registered(self, job: WatchedJob) -> None:
        """See ``interface.Keeper``.

        A restore that was interrupted after its tree ran is complete.
        """
        if self._in_place is not None and job.option.mode is Mode.INPLACE:
            self._in_place.back(job.job_id)
        for journal in self._journal.open_journals():
            if journal.key.job_id == job.job_id and journal.phase is Phase.RESTORING:
                self._record_restore(journal.record, job)
                self._notes.remove(journal.key.cluster, job.job_id)
                journal.close()

    def _record_restore(self, record: SuspensionRecord, job: WatchedJob) -> None:
        """Record a restore whose end an earlier agent did not record, for the case that the attempt is lost."""
        key = record.key
        for store in self._tiers.stores:
            with suppress(CheckpointError, OSError):
                manifest = store.get(key.name, record.seq or 0).manifest
                before = self._notes.last_restore(key.cluster, key.job_id)
                at_epoch = record.phases.get(Phase.RESTORING, self._now())
                restore = LastRestore.of(manifest, run=job.restarts, node=self._node, at_epoch=at_epoch, before=before)
                try:
                    self._notes.write_restore(restore)
                except AffinodeError as error:
                    LOG.warning("job %s: a loss of this attempt will not be noticed: %s", key.job_id, error)
                return

    def handle_epilog(self, job_id: int, *, requeued: bool) -> None:
        """See ``interface.Keeper``. Removes the images of a job that has ended."""
        self._environments.remove(job_id)
        if requeued:
            return
        note = self._notes.read(self._cluster, job_id)
        try:
            job = self._slurm.job(job_id)
        except AffinodeError as error:
            LOG.info("job %s: its images are kept until the next sweep: %s", job_id, error)
            return
        if not job.has_ended:
            return
        self._created.remove(job_id)
        self._scratch_records.remove(job_id)
        run = LiveRun.of(self._cluster, job)
        if run is None:
            return
        self._remove_images(job_id, lambda facts: fate(facts, (), (run,)) is Fate.OVER)
        if note is not None and not is_of(note, job):
            note = None
        if note is not None:  # canceled while it was suspended: it frees no more GPU time
            entry = LedgerEntry.of(note.key, note.began_ms)
            self._ledger.write(replace(entry, ended_ms=round(self._now() * 1000)))
            self._notes.remove(self._cluster, job_id)

    def _remove_images(self, job_id: int, selects: Callable[[Manifest], bool]) -> None:
        """Remove images from each store that permits it; the sweep retries the others."""
        for store in self._tiers.stores:
            try:
                for image in store.images():
                    if isinstance(image, Image) and selects(image.manifest):
                        deleted_files.gone(store, image)
                        store.remove(image)
            except (CheckpointError, OSError) as error:
                LOG.warning("job %s: its image in %s is not removed: %s", job_id, store.path, error)

    def sweep(self, holds_lease: bool) -> None:
        """Remove outdated images, and images and claims of ended jobs; at most once a minute. Must not raise."""
        if 0 <= self._now() - self._swept < _SWEEP_S:
            return
        self._swept = self._now()
        try:
            self._suspended.forget_awake(self._registry)
            restoring = {journal.key.job_id for journal in self._journal.open_journals()}
            job_ids = restoring | {job.job_id for job in self._registry.jobs()}
            self._environments.keep(job_ids)
            self._forget_created(job_ids)
            if not holds_lease and not any(tier.store.images() for tier in self._tiers.node):
                return  # no images on this node, and another node sweeps the shared store
            shared = self._tiers.shared_store
            swept = ImageSweep(self._slurm, self._cluster, self._tiers.stores, shared, self._notes, self._absences).run(
                young_s=_YOUNG_S
            )
            self._report(swept)
            self._forget_journals()
            if swept.stopped is not None:
                return
            needed = {*swept.live, *(name for name in swept.unknown if name not in swept.removable_jobs)}
            self._tiers.retention.keep(needed)
            live = [int(name.rpartition(".")[2]) for name in needed]
            self._notes.unclaim(self._cluster, live)
            self._notes.forget_restores(self._cluster, live)
            for note in self._notes.all() if holds_lease else ():
                if note.key.name in swept.removable_jobs:
                    self.record_end(note.key, note.began_ms)
        except (AffinodeError, OSError) as error:
            LOG.warning("sweep: %s", error)

    def _forget_created(self, job_ids: Collection[int]) -> None:
        """Remove the records of jobs that have ended on another node. Raises ``AffinodeError``, ``OSError``."""
        for job_id in sorted({*self._created.jobs(), *self._scratch_records.jobs()}):
            if job_id not in job_ids:
                try:
                    ended = self._slurm.job(job_id).has_ended
                except UnknownJobError:  # slurmctld may have lost its state: as long as its image
                    name = f"{self._cluster}.{job_id}"
                    ended = not any(name in store.jobs() for store in self._tiers.stores)
                if ended:
                    self._created.remove(job_id)
                    self._scratch_records.remove(job_id)

    def _report(self, swept: Swept) -> None:
        """Log the result of a sweep, and once for each job that Slurm does not know it."""
        log = LOG
        for _, name in swept.removed:
            unknown = name.partition("/")[0] in swept.removable_jobs
            why = "Slurm has not known its job for long" if unknown else "its job has ended, or has a newer one"
            log.info("removed %s: %s", name, why)
        for name in sorted(swept.unknown.keys() - self._unknown.keys()):
            log.warning("%s: Slurm does not know this job; its images are kept for a time", name)
        self._unknown = dict(swept.unknown)

    def _forget_journals(self) -> None:
        """Close the journals of restores that ended with their shepherd: nothing is left to do for them."""
        for journal in self._journal.open_journals():
            if journal.phase is Phase.RESTORING:
                record = journal.record
                if not self._processes.alive(record.init_pid, record.init_started):
                    journal.close()

    def record_end(self, key: JobKey, began_ms: int) -> None:
        """Remove the images of a suspended job that has ended, and record its end in the ledger."""
        self._remove_images(
            key.job_id, lambda facts: facts.key.name == key.name and facts.key.submit_epoch <= key.submit_epoch
        )
        self._ledger.write(replace(LedgerEntry.of(key, began_ms), ended_ms=round(self._now() * 1000)))
        self._notes.remove(key.cluster, key.job_id)

    def suspended(self) -> Sequence[SuspendedJob]:
        """See ``interface.Keeper``."""
        return self._suspended.all()

    def suspended_ids(self) -> frozenset[int] | None:
        """See ``interface.Keeper``."""
        return self._suspended.ids()

    def unresponsive(self) -> str | None:
        """See ``interface.Keeper``."""
        places = self._tiers.unresponsive
        return f"{', '.join(places)}: {UNRESPONSIVE}: what sleeps is not known" if places else None

    def sweep_stopped(self) -> str | None:
        """See ``interface.Keeper``."""
        try:
            stopped = self._absences.stopped()
        except AffinodeError:  # reported by ``unresponsive``
            return None
        return None if stopped is None else f"{stopped} ({STOPPED_HINT})"

    def room(self) -> str | None:
        """Return why the stores accept no more images; ``None`` if they do."""
        try:
            self._tiers.check_room(0, 1)
        except CheckpointError as error:
            return str(error)
        return None
