"""After a crash: what the journal holds is finished or undone; and tidying up when jobs end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from slurm_affinode.agent.absences import STOPPED_HINT, Absence
from slurm_affinode.agent.aftermath import Aftermath, entry_of
from slurm_affinode.agent.asleep import asleep, forget_awake
from slurm_affinode.agent.interface import SuspendedJob
from slurm_affinode.agent.journal import Record
from slurm_affinode.agent.parts import Parts
from slurm_affinode.agent.registry import WatchedJob
from slurm_affinode.agent.requeue import NotRequeued, Requeuer, Silent
from slurm_affinode.agent.surviving import surviving
from slurm_affinode.agent.sweep import Sweep, Swept, is_of, run_of
from slurm_affinode.agent.tree import TreeGoneError
from slurm_affinode.agent.undo import Undo
from slurm_affinode.checkpoint import remaps
from slurm_affinode.checkpoint.interface import CheckpointError, Image, ImageUnreadable
from slurm_affinode.core.removal import Fate, fate
from slurm_affinode.core.suspension import IN_PLACE, Action, JobFact, World, recover
from slurm_affinode.errors import AffinodeError
from slurm_affinode.model.ledger import LedgerEntry
from slurm_affinode.model.suspension import JobKey, LiveRun, Manifest, Mode, Phase
from slurm_affinode.patience import SILENT

_RETRY_S = 2.0
_SWEEP_S = 60.0
_YOUNG_S = 30.0


class Sleepers(Protocol):
    """``inplace.director.Director``, as far as recovery needs it."""

    def take_up(self, record: Record, *, ask: str = "") -> None:
        """Look after a sleeper of the last agent; ``ask``: it is to wake, for this reason."""
        ...

    def back(self, job_id: int) -> None:
        """The shepherd of a job that runs, or sleeps in place, has come back."""
        ...


class JobKeeper:
    """``Keeper`` for the agent."""

    def __init__(self, parts: Parts, aftermath: Aftermath, in_place: Sleepers | None = None) -> None:
        """``in_place`` takes up what slept in place; ``None``: nothing can have."""
        self._parts = parts
        self._aftermath = aftermath
        self._in_place = in_place
        self._undo = Undo(parts)
        self._requeuer = Requeuer(parts)
        self._silent = False
        """slurmctld has not answered in this round."""
        self._waiting: dict[JobKey, Record] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._swept = 0.0
        self._unknown: dict[str, Absence] = {}
        """Jobs that Slurm did not know in the last sweep."""
        self._said: dict[JobKey, str] = {}
        aftermath.on_later(self._wait)

    # --- recovery

    def recover(self) -> None:
        """Every open journal once; what has to wait is looked at again until it is done."""
        records = self._parts.journal.open_records()
        for record in records:
            if record.damage:
                self._parts.log.error("%s: %s", record.path, record.damage)
        self._round(records)
        self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="recovery", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_RETRY_S):
            with self._lock:
                waiting = list(self._waiting.values())
            self._round(waiting)

    def _round(self, records: Sequence[Record]) -> None:
        """Each once. A silent slurmctld is asked for the first that needs it alone: its time-out is long."""
        self._silent = False
        for record in records:
            self._try(record)

    def stop(self) -> None:
        """No further attempts; the journal keeps what is left."""
        self._stop.set()
        self._aftermath.stop()

    def _wait(self, record: Record) -> None:
        with self._lock:
            self._waiting[record.key] = record
        self._start()

    def _try(self, record: Record) -> None:
        done = False
        with surviving(self._parts.log, "job %s: recovery failed, by a fault of the agent", record.key.job_id):
            try:
                done = self.take_up(record)
            except AffinodeError as error:
                self._parts.log.warning("job %s: %s", record.key.job_id, error)
        with self._lock:
            if done:
                self._waiting.pop(record.key, None)
                self._said.pop(record.key, None)
            else:
                self._waiting[record.key] = record

    def take_up(self, record: Record) -> bool:
        """Look at the world, do what ``core.suspension.recover`` says; whether nothing is left to wait for."""
        parts = self._parts
        if not record.entries:
            return True
        if "seq" in record.facts and any(store.busy(record.key) for store in parts.tiers.stores):
            return False  # a CRIU that has outlived the agent: it must end by itself, or it would harm the tree
        world = self._world(record)
        todo = recover(record.phase, world)
        names = ", ".join(action.value for action in todo.actions) or "nothing"
        said = f"job {record.key.job_id} was {record.phase.value}: {todo.why} ({names})"
        if self._said.get(record.key) != said:  # once, and not with each look
            self._said[record.key] = said
            parts.log.info("%s", said)
        for action in todo.actions:
            if action is Action.WAIT or not self._act(action, record, todo.why):
                return False
        if todo.phase is Phase.QUEUED and world.job is JobFact.LATER_RUN:
            parts.ledger.write(entry_of(record, parts.node))
            record.close()
        elif todo.phase is Phase.QUEUED:
            if record.phase is not Phase.QUEUED:
                record.write(Phase.QUEUED)
            self._aftermath.queued(record)
        return True

    def _world(self, record: Record) -> World:
        facts = record.facts
        tree, in_place = self._has_tree(record), bool(facts.get("in_place"))
        job = JobFact.UNKNOWN
        # What sleeps in place does not wait for Slurm to answer: requests come. Of a job that is over Slurm itself ends
        # the processes, and they are let go when it tells them.
        if not (tree and in_place) and not self._silent:
            job = self._requeuer.fact(record.key.job_id, int(facts["restarts"]), facts.get("uid"))
            self._silent = self._requeuer.silent
        return World(job, tree, self._has_image(record), in_place=in_place)

    def _has_tree(self, record: Record) -> bool:
        facts = record.facts
        try:
            return bool(self._parts.processes.members(int(facts["init_pid"]), int(facts["init_started"])))
        except TreeGoneError:
            return False

    def _has_image(self, record: Record) -> bool:
        """Raises ``ImageUnreadable``: what cannot be looked at now may be all that is left of the job."""
        if record.facts.get("seq") is None:
            return False
        seq, unknown = int(record.facts["seq"]), None
        for store in self._parts.tiers.stores:
            try:
                store.get(record.key.name, seq)
            except (ImageUnreadable, OSError) as error:
                unknown = ImageUnreadable(f"{store.path} cannot be read: {error}")
            except CheckpointError:
                continue
            else:
                return True
        if unknown is not None:
            raise unknown
        return False

    def _act(self, action: Action, record: Record, why: str) -> bool:
        """One action; ``False``: it has to wait."""
        parts, facts = self._parts, record.facts
        if action is Action.RESUME:
            return self._undo.resume(record)
        if action is Action.DROP_IMAGE:
            self._undo.drop_image(record)
        elif action is Action.KILL_TREE:
            return parts.processes.end(
                int(facts["init_pid"]), int(facts["init_started"]), timeout_s=parts.settings.kill_s
            )
        elif action is Action.REQUEUE:
            return self._requeue(record)
        elif action in (Action.SLEEP, Action.WAKE):
            if self._in_place is None:
                return False
            self._in_place.take_up(record, ask=why if action is Action.WAKE else "")
        elif action is Action.RESTORE:
            # Its shepherd says hello again, and the restorer begins from the beginning.
            return True
        elif action is Action.CLOSE:
            self._close(record, why)
        elif action is Action.LOST:
            self._aftermath.lost(record)
        return True

    def _requeue(self, record: Record) -> bool:
        """From ``dumped`` on, or again. The phase after it is ``queued``: see ``_finish``."""
        parts, facts = self._parts, record.facts
        init = int(facts["init_pid"]), int(facts["init_started"])
        try:
            members = parts.processes.members(*init)
        except TreeGoneError:
            members = ()  # the node was restarted: the image is all there is
        parts.processes.stop(members)
        if record.phase is not Phase.REQUEUEING:
            record.write(Phase.REQUEUEING)
        with parts.processes.hold(members):
            try:
                self._requeuer.requeue(record.key.job_id, int(facts["restarts"]))
            except Silent:
                self._silent = True
                return False
            except NotRequeued as error:
                fact = self._requeuer.fact(record.key.job_id, int(facts["restarts"]))
                if fact is not JobFact.THIS_RUN:
                    return False  # over, or unknown: the next look says
                parts.log.warning("job %s: %s", record.key.job_id, error)
                back = str(error)
            else:
                parts.processes.end(*init, timeout_s=parts.settings.kill_s)
                record.write(Phase.QUEUED)
                self._aftermath.queued(record)
                return True
        self._undo.drop_image(record)
        self._undo.resume(record)
        self._aftermath.ran_on(record, back)
        return True

    def _close(self, record: Record, why: str) -> None:
        parts = self._parts
        if record.phase in IN_PLACE:  # the job is over
            parts.ledger.write(replace(entry_of(record, parts.node), ended_ms=round(parts.now() * 1000)))
            record.close()
            return
        if record.phase in (Phase.QUEUED, Phase.RESTORING):
            began_ms = round(float(record.facts["began"]) * 1000)
            key = record.key
            if self._requeuer.fact(key.job_id, int(record.facts["restarts"])) is JobFact.ENDED:
                now_ms = round(parts.now() * 1000)
                parts.ledger.write(LedgerEntry(key.cluster, key.job_id, key.submit_epoch, began_ms, ended_ms=now_ms))
            parts.notes.remove(key.cluster, key.job_id)
            record.close()
        else:
            self._aftermath.ran_on(record, f"the agent was stopped: {why}")

    # --- the rest of ``Keeper``

    def identify(self, job: WatchedJob) -> tuple[JobKey, int]:
        """Cluster, id and submit time of this run; the suspensions that its image counts."""
        parts = self._parts
        if job.slurm is None or job.slurm.submit is None:
            raise AffinodeError(f"Slurm has not said when job {job.job_id} was submitted")
        key = JobKey(parts.cluster, job.job_id, round(job.slurm.submit.timestamp()))
        run = LiveRun(key, job.uid, job.restarts)
        counts = [0]
        for store in parts.tiers.stores:
            try:
                image = store.find(run)
            except (CheckpointError, OSError):
                continue
            counts.append(0 if image is None else image.manifest.seq)
        return key, max(counts)

    def registered(self, job: WatchedJob) -> None:
        """A job that runs: a restore that was cut short after its tree was back is over. Or it sleeps in place."""
        if self._in_place is not None and job.option.mode is Mode.INPLACE:
            self._in_place.back(job.job_id)
        for record in self._parts.journal.open_records():
            if record.key.job_id == job.job_id and record.phase is Phase.RESTORING:
                self._parts.notes.remove(record.key.cluster, job.job_id)
                record.close()

    def ended(self, job_id: int, *, requeued: bool) -> None:
        """The epilog ran: the images of a job that is over go."""
        if requeued:
            return
        parts = self._parts
        note = parts.notes.read(parts.cluster, job_id)
        try:
            job = parts.slurm.job(job_id)
        except AffinodeError as error:
            parts.log.info("job %s: its images stay until the next sweep: %s", job_id, error)
            return
        if not job.ended:
            return
        run = run_of(parts.cluster, job)
        if run is None:
            return
        self._remove_images(job_id, lambda facts: fate(facts, (), (run,)) is Fate.OVER)
        if note is not None and not is_of(note, job):
            note = None
        if note is not None:  # it was cancelled while it slept: its GPUs are not given back by it any more
            now_ms = round(parts.now() * 1000)
            parts.ledger.write(
                LedgerEntry(note.key.cluster, job_id, note.key.submit_epoch, note.began_ms, ended_ms=now_ms)
            )
            parts.notes.remove(parts.cluster, job_id)

    def _remove_images(self, job_id: int, wanted: Callable[[Manifest], bool]) -> None:
        """From each store that lets us; the sweep tries again."""
        for store in self._parts.tiers.stores:
            try:
                for image in store.images():
                    if isinstance(image, Image) and wanted(image.manifest):
                        remaps.gone(store, image)
                        store.remove(image)
            except (CheckpointError, OSError) as error:
                self._parts.log.warning("job %s: its image in %s stays: %s", job_id, store.path, error)

    def sweep(self, holds_lease: bool) -> None:
        """Images and claims of jobs that are over, and older images; at most once in a minute. Must not raise."""
        parts = self._parts
        if 0 <= parts.now() - self._swept < _SWEEP_S:
            return
        self._swept = parts.now()
        try:
            forget_awake(parts)
            if not holds_lease and not any(tier.store.images() for tier in parts.tiers.node):
                return  # nothing of this node's, and another one looks after what is shared
            shared = parts.shared
            swept = Sweep(parts.slurm, parts.cluster, parts.tiers.stores, shared, parts.notes, parts.absences).run(
                young_s=_YOUNG_S
            )
            self._tell(swept)
            self._forget_journals()
            if swept.stopped is not None:
                return
            needed = {*swept.live, *(name for name in swept.unknown if name not in swept.gone)}
            parts.tiers.demand.keep(needed)
            parts.notes.unclaim((parts.cluster, int(name.rpartition(".")[2])) for name in needed)
            for note in parts.notes.all() if holds_lease else ():
                if note.key.name in swept.gone:
                    self.over(note.key, note.began_ms)
        except (AffinodeError, OSError) as error:
            parts.log.warning("sweep: %s", error)

    def _tell(self, swept: Swept) -> None:
        """Log what a sweep did, and once of each job that Slurm does not know it."""
        log = self._parts.log
        for _, name in swept.removed:
            unknown = name.partition("/")[0] in swept.gone
            why = "Slurm has not known its job for long" if unknown else "its job is over, or has a newer one"
            log.info("removed %s: %s", name, why)
        for name in sorted(swept.unknown.keys() - self._unknown.keys()):
            log.warning("%s: Slurm does not know this job; its images are kept until it has not for long", name)
        self._unknown = dict(swept.unknown)

    def _forget_journals(self) -> None:
        """Restores that ended with their shepherd: nothing is left to be done about them."""
        parts = self._parts
        for record in parts.journal.open_records():
            facts = record.facts
            if record.phase is Phase.RESTORING and not parts.processes.alive(
                int(facts["init_pid"]), int(facts["init_started"])
            ):
                record.close()

    def over(self, key: JobKey, began_ms: int) -> None:
        """A job that slept is over: its images go, and the ledger is told."""
        parts = self._parts
        parts.tiers.demand.forget(key.name)
        self._remove_images(
            key.job_id, lambda facts: facts.key.name == key.name and facts.key.submit_epoch <= key.submit_epoch
        )
        now_ms = round(parts.now() * 1000)
        parts.ledger.write(LedgerEntry(key.cluster, key.job_id, key.submit_epoch, began_ms, ended_ms=now_ms))
        parts.notes.remove(key.cluster, key.job_id)

    def suspended(self) -> Sequence[SuspendedJob]:
        """Jobs that sleep: those with a note whose image this node sees."""
        return asleep(self._parts, self._aftermath)

    def silent(self) -> str | None:
        """What jobs that sleep have to do without, one line; ``None``: nothing."""
        places = self._parts.tiers.silent
        return f"{', '.join(places)}: {SILENT}: what sleeps is not known" if places else None

    def sweep_stopped(self) -> str | None:
        """See ``interface.Keeper``."""
        try:
            found = self._parts.absences.stopped()
        except AffinodeError:  # ``silent`` says so
            return None
        return None if found is None else f"{found} ({STOPPED_HINT})"

    def room(self) -> str | None:
        """Why the stores take nothing more."""
        try:
            self._parts.tiers.check_room(0, 1)
        except CheckpointError as error:
            return str(error)
        return None
