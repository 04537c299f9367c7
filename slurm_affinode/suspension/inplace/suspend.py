"""Suspension of a job in place: every step is announced in the journal.

    refusals -> requests -> CUDA lock -> sample again -> CUDA checkpoint -> freeze -> requests received meanwhile

Until GPU memory moves, a failed step releases the locks. From then on the GPU may belong to another job, and the only
way back is that of a sleeper that is woken.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.checkpoint.interface import CheckpointError
from slurm_affinode.core.inplace import GpuLoad, sleeps_forever
from slurm_affinode.gpu.interface import GpuError
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.suspension import JobKey, Mode, Phase, Refusal, Suspension
from slurm_affinode.suspension import refusals
from slurm_affinode.suspension.context import Parts
from slurm_affinode.suspension.inplace import sockets
from slurm_affinode.suspension.inplace.freezer import Calls, Freezer, stopped
from slurm_affinode.suspension.inplace.gpu_sharing import held_by, holders
from slurm_affinode.suspension.inplace.sleeper import Cards, Sleeper
from slurm_affinode.suspension.inplace.sock_diag import SockDiagError
from slurm_affinode.suspension.inplace.sockets import Sockets, Waits, noted, unnoticed
from slurm_affinode.suspension.interface import LookAgain, Refused, Suspender, TakenBack
from slurm_affinode.suspension.journal import Record
from slurm_affinode.suspension.memory import HostMemory, cuda_users
from slurm_affinode.suspension.notify import Aftermath, entry_of, mail_owner
from slurm_affinode.suspension.process_tree import Member, TreeGoneError
from slurm_affinode.suspension.refusals import SlurmFacts, steps_of
from slurm_affinode.suspension.registry import WatchedJob
from slurm_affinode.suspension.rollback import Undo

_LOOKS_APART_S = 0.25
"""Bytes that stay unread for this long in a running process are not about to be read."""


class Caretaker(Protocol):
    """Manages sleeping jobs: ``scheduler.Director``."""

    def cards(self) -> Sequence[GpuLoad]:
        """Return the GPUs, with the limit for awake jobs. Raises ``GpuError``."""
        ...

    def adopt(self, sleeper: Sleeper, *, ask: str = "") -> None:
        """Watch a job from now on; ``ask``: wake it as soon as there is room, for this reason."""
        ...


@dataclass(slots=True)
class _Attempt:
    """A suspension in progress."""

    job: WatchedJob
    record: Record
    why: str
    began: float
    cuda: tuple[int, ...]
    held: Mapping[str, int]
    known: frozenset[int]
    """Processes that used a GPU when it began."""
    started: Mapping[int, int]
    """Process of the job -> its start time, in ticks since boot."""
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class _Rest:
    """A job without pending requests."""

    look: sockets.Look
    readers: tuple[int, ...]
    """Processes that may read a request unnoticed, and if there are any, those that would compute for it."""
    waits: Waits
    """Wait positions of their threads."""
    calls: Calls
    """Signals that are pending for its processes and not about to be received."""


class InPlaceSuspender:
    """``Suspender`` for jobs with ``mode=inplace``."""

    def __init__(
        self, parts: Parts, aftermath: Aftermath, caretaker: Caretaker, *, freezer: Freezer, sockets: Sockets,
        cards: Cards, freeze_s: float,
    ) -> None:  # fmt: skip
        self._parts = parts
        self._aftermath = aftermath
        self._freezer = freezer
        self._sockets = sockets
        self._cards = cards
        self._caretaker = caretaker
        self._freeze_s = freeze_s
        self._undo = Undo(parts)
        self._memory = HostMemory(parts)
        self._slurm = SlurmFacts(parts)
        self._busy: set[int] = set()
        self._lock = threading.Lock()
        """Guards ``_busy``, the jobs being suspended."""

    # --- refusals

    def refusals(self, job: WatchedJob) -> Sequence[Refusal]:
        """Return why this job cannot sleep in place; empty if it can. Changes nothing."""
        parts = self._parts
        job = job if job.slurm is not None else self._asked_for(job)
        found = list(self._before(job))
        if job.slurm is None or any(refusal.code == "not-started" for refusal in found):
            return found
        members = self._members(job)
        root = next((one.pid for one in members if one.pid_ns == job.root), 0)
        tree = parts.look(job.init_pid, root)
        try:
            users = cuda_users(parts, (one.pid for one in members))
            held = self._held(users)
            used = sum(held.values())
            found += refusals.refusals(
                Mode.INPLACE,
                _job_facts(job.slurm),
                tree,
                refusals.GpuUseFacts(
                    parts.cuda.capabilities(),
                    users,
                    used,
                    any(device.mig is not None for device in job.devices or ()),
                    self._slurm.some_gpus(job),
                ),
                self._memory.of(job, tree),
                allowed=(Mode.INPLACE,),
                uid=job.uid,
            )
            found += self._of_gpu(held, used)
        except (CheckpointError, GpuError) as error:
            # The version of a driver that is too old explains more than a missing function.
            found.append(Refusal("driver", parts.cuda.capabilities().why_not or str(error)))
        return found

    def _asked_for(self, job: WatchedJob) -> WatchedJob:
        """Return the job with Slurm's current record, if Slurm responds."""
        try:
            return self._fresh(job)
        except AffinodeError:
            return job

    def _before(self, job: WatchedJob) -> Iterator[Refusal]:
        """Yield the reasons that the agent itself knows, and those of processes that are not below the script."""
        if job.slurm is None:
            yield Refusal("slurm", "slurmctld has not reported this job yet")
        else:
            yield from _of_job(job.slurm)
        if job.key is not None and (hindrance := self._parts.journal.record(job.key).hindrance):
            yield Refusal("recovering", hindrance)
        members = self._members(job)
        if not any(member.pid_ns == job.root for member in members):
            yield Refusal("not-started", "its script has not started yet, or has ended")
        if any(member.name == "srun" for member in members):
            yield Refusal("srun-steps", "it runs srun: the step's processes are another slurmstepd's, and would run on")
        if self._freezer.held(job.init_pid):
            yield Refusal("state", "Slurm has suspended it (scontrol suspend)")

    def _of_gpu(self, held: Mapping[str, int], used: int) -> Iterator[Refusal]:
        if not used:
            yield Refusal("no-gpu-memory", "it holds no GPU memory: nothing would be given back")
            return
        there = {uuid: sum(count.values()) for uuid, count in self._cards.processes().items()}
        never = sleeps_forever(held, self._caretaker.cards(), there)
        if never is not None:
            yield Refusal("awake-limit", f"it could not wake again: {never}")

    def _members(self, job: WatchedJob) -> Sequence[Member]:
        try:
            return self._freezer.members(job.init_pid, job.init_started)
        except TreeGoneError:
            return ()

    def _held(self, users: frozenset[int]) -> dict[str, int]:
        """Return UUID -> bytes of these processes."""
        return held_by(self._cards.processes(), tuple(users)) if users else {}

    # --- the sequence

    def suspend(self, job: WatchedJob, why: str, *, look_again: LookAgain) -> Suspension:
        """See ``interface.Suspender``. Returns when the job is frozen, or when it runs on or is about to."""
        with self._lock:
            if job.job_id in self._busy:
                raise Refused(Refusal("busy", "it is being suspended already"))
            self._busy.add(job.job_id)
        try:
            with self._memory.promised(job, self._held):
                return self._suspend(self._fresh(job), why, look_again)
        finally:
            with self._lock:
                self._busy.discard(job.job_id)

    def _fresh(self, job: WatchedJob) -> WatchedJob:
        """Return the job with Slurm's current record.

        Nothing is requested of Slurm here: if it does not respond, its last record is used.
        """
        try:
            return replace(job, slurm=self._parts.slurm.job(job.job_id))
        except AffinodeError as error:
            if job.slurm is None:
                raise
            self._parts.log.info("job %s: %s; Slurm's last record is used", job.job_id, error)
            return job

    def _suspend(self, job: WatchedJob, why: str, look_again: LookAgain) -> Suspension:
        slurm = job.slurm
        assert slurm is not None  # noqa: S101 - ``_fresh`` has seen to it
        if slurm.state != "RUNNING" or slurm.restarts != job.restarts or slurm.submit is None:
            raise Refused(Refusal("state", f"Slurm says that it is {slurm.state.lower()}"))
        refusals = self.refusals(job)
        if refusals:
            raise Refused(refusals[0])
        rest = self._at_rest(job)
        before = rest.look
        attempt = self._begin(job, slurm, why, rest)
        try:
            self._lock_all(attempt)
            seen = look_again()
            if seen is not None:
                raise TakenBack(f"it is not idle any more: {seen}")
            came = self._meanwhile(attempt, before)
            if came is not None:  # answering now is faster than moving its memory out and back
                raise TakenBack(f"a request is waiting: {came}")
            self._mark(attempt, Phase.LOCKED)
        except (AffinodeError, OSError) as error:
            return self._unlock(attempt, _text(error))
        try:
            for pid in attempt.cuda:
                self._parts.cuda.checkpoint(pid)
            self._memory.moved(job)
            self._mark(attempt, Phase.PARKED)
            self._freeze(attempt)
            self._look_for_new(attempt)
            came = self._meanwhile(attempt, before) or unnoticed(self._sockets, attempt.record.facts)
        except (AffinodeError, OSError) as error:
            attempt.failure = _text(error)
            return self._to_bed(attempt, ask=f"its suspension failed: {attempt.failure}")
        return self._to_bed(attempt, ask=came or "")

    def _at_rest(self, job: WatchedJob) -> _Rest:
        """Return the state of its sockets. Raises ``Refused`` if there is a pending request."""
        try:
            earlier = self._sockets.look(self._sockets.own(member.pid for member in self._members(job)))
            waited = self._freezer.calls(one.pid for one in self._members(job))
            self._parts.sleep(_LOOKS_APART_S)
            pids = [member.pid for member in self._members(job)]
            readers = self._sockets.readers(pids, earlier)
            readers = tuple(sorted({*readers, *cuda_users(self._parts, pids)})) if readers else ()
            moving = self._parts.cuda.restore_threads(readers)
            # Before the look: anything read after it moves one of them. The driver's own threads move with the memory.
            waits = {**self._sockets.waits(readers), **dict.fromkeys(moving, "")}
            now = self._sockets.look(self._sockets.own(pids))
        except SockDiagError as error:
            raise Refused(Refusal("sockets", f"requests to it could not be noticed: {error}")) from None
        asks = sockets.at_rest(now, earlier, within_s=job.option.window_s)
        if asks is not None:
            raise Refused(Refusal("request", asks))
        return _Rest(now, readers, waits, waited & self._freezer.calls(pids))

    def _begin(self, job: WatchedJob, slurm: Job, why: str, rest: _Rest) -> _Attempt:
        parts = self._parts
        members = self._members(job)
        there = holders(self._cards.processes())  # first: a process that comes later is in ``cuda``, or new
        cuda = tuple(sorted(cuda_users(parts, (member.pid for member in members))))
        held = self._held(frozenset(cuda))
        assert slurm.submit is not None  # noqa: S101 - the caller has looked
        key = JobKey(parts.cluster, job.job_id, round(slurm.submit.timestamp()))
        attempt = _Attempt(job, parts.journal.record(key), why, parts.now(), cuda, held, there.union(cuda),
                           {member.pid: member.started for member in members})  # fmt: skip
        models = {device.uuid: device.model for device in self._cards.devices()}
        self._mark(
            attempt,
            Phase.LOCKING,
            job_id=job.job_id, restarts=job.restarts, uid=job.uid, gid=job.gid, why=why, began=attempt.began,
            init_pid=job.init_pid, init_started=job.init_started, cuda=list(cuda), stopped=list(stopped(members)),
            option=str(job.option), gpus=len(held), gpu_bytes=sum(held.values()), held=dict(held),
            gpu_model=next((models[uuid] for uuid in held if uuid in models), None), in_place=True,
            sockets=noted(rest.look), on_request=sockets.can_be(rest.look),
            readers=list(rest.readers), waits={str(thread): place for thread, place in rest.waits.items()},
            calls=sorted(rest.calls), shown=slurm.id, user=slurm.user, account=slurm.account, name=slurm.name,
            partition=slurm.partitions[0] if slurm.partitions else None,
        )  # fmt: skip
        return attempt

    def _lock_all(self, attempt: _Attempt) -> None:
        parts = self._parts
        deadline = parts.now() + parts.settings.lock_s
        for pid in attempt.cuda:
            left_ms = max(100, round((deadline - parts.now()) * 1000))
            parts.cuda.lock(pid, timeout_ms=left_ms, started=attempt.started[pid])

    def _freeze(self, attempt: _Attempt) -> None:
        job = attempt.job
        members = self._freezer.members(job.init_pid, job.init_started)
        facts: dict[str, object] = {"how": self._freezer.how(members, job.init_pid)}
        if not self._freezer.held(job.init_pid):  # otherwise Slurm has stopped them, and will continue them
            facts["stopped"] = list(stopped(members))  # its script may have continued one since
        self._mark(attempt, Phase.FROZEN, **facts)
        self._freezer.freeze(job.init_pid, job.init_started, str(facts["how"]), timeout_s=self._freeze_s)

    def _look_for_new(self, attempt: _Attempt) -> None:
        """Raise ``TakenBack`` if a process has begun to use a GPU meanwhile: its memory would stay there."""
        new = {one.pid for one in self._members(attempt.job)} & holders(self._cards.processes()) - attempt.known
        if new:
            raise TakenBack(f"process {min(new)} has begun to use a GPU meanwhile")

    def _meanwhile(self, attempt: _Attempt, before: sockets.Look) -> str | None:
        """Return what has arrived since the look before the locks."""
        own = self._sockets.own(member.pid for member in self._members(attempt.job))
        return sockets.meanwhile(before, self._sockets.look(own))

    def _unlock(self, attempt: _Attempt, why: str) -> Suspension:
        """Roll back before any memory has moved: the job runs on at once."""
        parts, job_id = self._parts, attempt.job.job_id
        parts.log.warning("job %s: the suspension is rolled back: %s", job_id, why)
        if self._undo.resume(attempt.record):
            parts.registry.set_phase(job_id, Phase.RUNNING)
            self._aftermath.ran_on(attempt.record, why)
        else:
            self._caretaker.adopt(Sleeper.of(attempt.record), ask=why)
        attempt.failure = why
        return self._suspension(attempt)

    def _to_bed(self, attempt: _Attempt, *, ask: str) -> Suspension:
        parts, record = self._parts, attempt.record
        sleeper = Sleeper.of(record)
        sleeper.told = not ask
        if attempt.failure is None:
            parts.ledger.write(entry_of(record, parts.node))
            if sleeper.told:
                mail_owner(parts, record, "suspended", record.phases.get(Phase.FROZEN.value), why=attempt.why)
        else:
            parts.log.warning("job %s: the suspension is rolled back: %s", attempt.job.job_id, attempt.failure)
            parts.ledger.write(replace(entry_of(record, parts.node), failure=attempt.failure))
        self._caretaker.adopt(sleeper, ask=ask)
        return self._suspension(attempt)

    def _mark(self, attempt: _Attempt, phase: Phase, **facts: object) -> None:
        attempt.record.write(phase, **facts)
        self._parts.registry.set_phase(attempt.job.job_id, phase)

    def _suspension(self, attempt: _Attempt) -> Suspension:
        return Suspension(
            key=attempt.record.key,
            seq=0,
            phase=attempt.record.phase,
            node=self._parts.node,
            uid=attempt.job.uid,
            mode=Mode.INPLACE,
            why=attempt.why,
            gpus=len(attempt.held),
            started_epoch=attempt.began,
            phases=attempt.record.phases,
            gpu_bytes=sum(attempt.held.values()),
            failure=attempt.failure,
        )


def _of_job(job: Job) -> Iterator[Refusal]:
    """Yield why a job of this kind has processes that are not below its script on this node."""
    if job.het_job_id is not None:
        yield Refusal("heterogeneous", "it is a heterogeneous job: its parts cannot be suspended as one")
    if (job.node_count or 1) > 1:
        yield Refusal("multi-node", f"it runs on {job.node_count} nodes: only jobs on one node can be suspended")
    steps = steps_of(job)
    if steps:
        names = ", ".join(steps[:3]) + (", ..." if len(steps) > 3 else "")
        yield Refusal("srun-steps", f"it runs srun steps ({names}), which are not below its script and would run on")


def _job_facts(job: Job) -> refusals.JobFacts:
    return refusals.JobFacts(batch=job.batch, requeue=job.requeue, nodes=job.node_count or 1)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, AffinodeError) else f"{type(error).__name__}: {error}"


class ByMode:
    """``Suspender`` for the agent: selects the one for the mode of each job."""

    def __init__(self, requeue: Suspender, in_place: Suspender) -> None:
        self._by_mode = {Mode.REQUEUE: requeue, Mode.INPLACE: in_place}

    def refusals(self, job: WatchedJob) -> Sequence[Refusal]:
        """See ``interface.Suspender``."""
        return self._by_mode[job.option.mode].refusals(job)

    def suspend(self, job: WatchedJob, why: str, *, look_again: LookAgain) -> Suspension:
        """See ``interface.Suspender``."""
        return self._by_mode[job.option.mode].suspend(job, why, look_again=look_again)
