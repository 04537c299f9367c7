"""The ending of a suspension with ``mode=inplace``: the job is frozen, and keeps its allocation.

    requests -> CUDA lock -> requests -> CUDA checkpoint -> freeze -> requests received meanwhile

A busy job whose turn is over is frozen without regard to requests, and waits to wake at once.

Until GPU memory moves, a failed step releases the locks. From then on the GPU may belong to another job, and the only
way back is that of a sleeper that is woken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.text import span
from slurm_affinode.checkpoint.interface import CudaDriver
from slurm_affinode.core.inplace import sleeps_forever
from slurm_affinode.model.suspension import Phase, Refusal, RefusalCode
from slurm_affinode.suspension.context import LOG, Clock, Gpus
from slurm_affinode.suspension.inplace import file_locks, sockets
from slurm_affinode.suspension.inplace.freezer import SIGNALS, Calls, Freezer
from slurm_affinode.suspension.inplace.gpu_sharing import holders
from slurm_affinode.suspension.inplace.scheduler import InPlaceScheduler
from slurm_affinode.suspension.inplace.sleeper import TURN_OVER, Sleeper
from slurm_affinode.suspension.inplace.sock_diag import SockDiagError
from slurm_affinode.suspension.inplace.sockets import Sockets, Waits, states_of, unnoticed
from slurm_affinode.suspension.interface import InUseError, Refused, cause
from slurm_affinode.suspension.job.process_tree import Member, Processes, StoppedJob, TreeGoneError
from slurm_affinode.suspension.job.registry import Registry, WatchedJob
from slurm_affinode.suspension.memory import cuda_users, gpu_memory
from slurm_affinode.suspension.notify import OwnerMails, SuspensionOutcomes
from slurm_affinode.suspension.records.journal import JobJournal
from slurm_affinode.suspension.records.ledger import SuspensionLedger
from slurm_affinode.suspension.records.record import SuspensionFacts
from slurm_affinode.suspension.refusals import JobFacts, of_nodes, of_steps
from slurm_affinode.suspension.rollback import Rollback
from slurm_affinode.suspension.suspend import Attempt, Ending, announce, first_facts

_SAMPLES_APART_S = 0.25
"""Bytes that stay unread for this long in a running process are not about to be read."""


@dataclass(frozen=True, slots=True)
class _Rest:
    """A job without pending requests."""

    table: sockets.SocketTable
    readers: tuple[int, ...]
    """Processes that may read a request unnoticed, and if there are any, those that would compute for it."""
    waits: Waits
    """Wait positions of their threads."""
    calls: Calls
    """Signals that are pending for its processes and not about to be received."""


@dataclass(slots=True, kw_only=True)
class FreezeAttempt(Attempt):
    """A suspension that ends with a freeze."""

    before: sockets.SocketTable
    """State of its sockets before the locks."""
    gpu_pids: frozenset[int]
    """Processes that used a GPU when it began."""
    busy: bool = False
    """The turn of a busy job is over: requests do not matter."""


_Listeners = frozenset[tuple[str, int, bytes]]


@dataclass(frozen=True, slots=True)
class _Observation:
    listeners: _Listeners
    since_s: float
    served: bool


class Settling:
    """Servers that are still starting: the listeners of jobs, and since when they have not changed.

    A helper that listens, of NCCL or ``torch.distributed``, makes a job look like one that can receive requests, while
    the port of its API is opened after its model is loaded. A connection to that port would be refused by the kernel
    and wake nothing.
    """

    def __init__(self, settle_s: float, clock: Callable[[], float]) -> None:
        """``settle_s``: how long listeners must exist without a change; ``clock``: a monotonic clock, in seconds."""
        self._settle_s = settle_s
        self._clock = clock
        self._observations: dict[tuple[int, int], _Observation] = {}

    def forget_others(self, attempts: Collection[tuple[int, int]]) -> None:
        """Forget all jobs but these attempts (raw ID and restart count)."""
        self._observations = {key: entry for key, entry in self._observations.items() if key in attempts}

    def hindrance(self, attempt: tuple[int, int], table: sockets.SocketTable) -> str | None:
        """Return why a job may still be starting, given its sockets now; ``None``: it is not.

        A job that has received data on a connection to one of its ports has started for good.
        """
        listeners = frozenset((sock.family, sock.port, sock.name) for sock in table.values() if sock.listens)
        ports = {sock.port for sock in table.values() if sock.listens and sock.family == "tcp"}
        served = any(not sock.listens and sock.port in ports and sock.received for sock in table.values())
        now_s, before = self._clock(), self._observations.get(attempt)
        if before is not None and before.served:
            return None
        same = before is not None and before.listeners == listeners
        since_s = before.since_s if before is not None and same else now_s
        self._observations[attempt] = _Observation(listeners, since_s, served)
        if served or not self._settle_s or now_s - since_s >= self._settle_s:
            return None
        return (
            f"it may still be starting: no request has arrived yet, and its listeners have not changed for "
            f"{span(now_s - since_s)} so far, less than {span(self._settle_s)} (inplace.settle)"
        )


class InPlaceEnding(Ending[FreezeAttempt]):
    """The ending of jobs with ``mode=inplace``."""

    needs_slurm = False

    def __init__(
        self, *, node: str, processes: Processes, cuda: CudaDriver, gpus: Gpus, registry: Registry,
        ledger: SuspensionLedger, freezer: Freezer, sockets: Sockets, scheduler: InPlaceScheduler,
        outcomes: SuspensionOutcomes, mails: OwnerMails, rollback: Rollback, clock: Clock, freeze_s: float,
        settle_s: float = 0.0, monotonic: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """``settle_s``: how long listeners must not have changed before a job sleeps that has received no request."""
        self._node = node
        self._processes = processes
        self._cuda = cuda
        self._gpus = gpus
        self._registry = registry
        self._ledger = ledger
        self._mails = mails
        self._clock = clock
        self._outcomes = outcomes
        self._freezer = freezer
        self._sockets = sockets
        self._scheduler = scheduler
        self._freeze_s = freeze_s
        self._rollback = rollback
        self._settling = Settling(settle_s, monotonic)

    # --- refusals

    def of_job(self, job: WatchedJob) -> Iterable[Refusal]:
        """Return why a job of this kind has processes that are not below its script on this node."""
        if job.slurm is None:
            return ()
        facts = JobFacts.of(job.slurm)
        return (*of_nodes(facts), *of_steps(facts, " and would run on"))

    def of_processes(self, job: WatchedJob, members: Iterable[Member]) -> Iterable[Refusal]:
        """See ``Ending``."""
        if any(member.name == "srun" for member in members):
            yield Refusal(
                RefusalCode.SRUN_STEPS,
                "it runs srun: the step's processes belong to another slurmstepd and would keep running",
            )
        if self._freezer.is_stopped_by_slurm(job.init_pid):
            yield Refusal(RefusalCode.STATE, "Slurm has suspended it (scontrol suspend)")

    def of_gpu(self, held_bytes: Mapping[str, int]) -> Iterable[Refusal]:
        """See ``Ending``."""
        if not sum(held_bytes.values()):
            yield Refusal(RefusalCode.NO_GPU_MEMORY, "it holds no GPU memory: nothing would be released")
            return
        used = {uuid: sum(count.values()) for uuid, count in self._gpus.processes().items()}
        never = sleeps_forever(held_bytes, self._scheduler.cards(), used)
        if never is not None:
            yield Refusal(RefusalCode.AWAKE_LIMIT, f"it could not wake again: {never}")

    def _members(self, job: WatchedJob) -> Sequence[Member]:
        try:
            return self._freezer.members(job.init_pid, job.init_started)
        except TreeGoneError:
            return ()

    # --- the sequence

    def begin(self, job: WatchedJob, journal: JobJournal, why: str, *, busy: bool = False) -> FreezeAttempt:
        """See ``Ending``. Raises ``Refused`` if a request to the job is pending, unless it is ``busy``."""
        rest = self._at_rest(job, busy=busy)
        members = self._members(job)
        gpu_holders = holders(self._gpus.processes())  # first: a process that comes later is in ``cuda``, or new
        cuda = tuple(sorted(cuda_users(self._cuda, (member.pid for member in members))))
        held_bytes = gpu_memory(self._gpus, cuda)
        models = {device.uuid: device.model for device in self._gpus.devices()}
        facts = replace(
            first_facts(job, why, members, cuda, self._clock.now()),
            gpus=len(held_bytes), gpu_model=next((models[uuid] for uuid in held_bytes if uuid in models), None),
            gpu_bytes=sum(held_bytes.values()), in_place=True, held_bytes=held_bytes,
            shares_gpus=None if job.slurm is None else job.slurm.shares_gpus, sockets=states_of(rest.table),
            on_request=sockets.can_be(rest.table), reader_pids=rest.readers, waits=rest.waits,
            calls=tuple(sorted(rest.calls)),
        )  # fmt: skip
        return FreezeAttempt(
            job=job, journal=journal, members=members, facts=facts, before=rest.table, gpu_pids=gpu_holders.union(cuda),
            stop=StoppedJob(self._processes, job.init), busy=busy,
        )  # fmt: skip

    def _at_rest(self, job: WatchedJob, *, busy: bool) -> _Rest:
        """Return the state of its sockets. Raises ``Refused`` if there is a pending request, unless it is ``busy``."""
        try:
            earlier = self._sockets.read(self._sockets.of_processes(member.pid for member in self._members(job)))
            waited = self._freezer.calls(member.pid for member in self._members(job))
            self._clock.sleep(_SAMPLES_APART_S)
            pids = [member.pid for member in self._members(job)]
            readers = self._sockets.readers(pids, earlier)
            readers = tuple(sorted({*readers, *cuda_users(self._cuda, pids)})) if readers else ()
            moving = self._cuda.restore_threads(readers)
            # Before the look: anything read after it moves one of them. The driver's own threads move with the memory.
            waits = {**self._sockets.waits(readers), **dict.fromkeys(moving, "")}
            now = self._sockets.read(self._sockets.of_processes(pids))
        except SockDiagError as error:
            raise Refused(Refusal(RefusalCode.SOCKETS, f"requests to it could not be detected: {error}")) from None
        if busy:
            return _Rest(now, readers, waits, waited & self._freezer.calls(pids))
        locks = self._scheduler.locks
        waiter = locks.awaited({job.job_id: locks.locks_of(pids)}, {job.job_id: pids}).get(job.job_id)
        if waiter is not None:
            raise Refused(Refusal(RefusalCode.REQUEST, file_locks.reason(waiter)))
        reason = sockets.at_rest(now, earlier, within_s=job.option.window_s)
        if reason is not None:
            raise Refused(Refusal(RefusalCode.REQUEST, reason))
        self._settling.forget_others({(job.job_id, job.restarts) for job in self._registry.jobs()})
        # A job without sockets wakes by itself.
        starting = self._settling.hindrance((job.job_id, job.restarts), now) if sockets.can_be(now) else None
        if starting is not None:
            raise Refused(Refusal(RefusalCode.NOT_STARTED, starting))
        return _Rest(now, readers, waits, waited & self._freezer.calls(pids))

    def recheck(self, attempt: FreezeAttempt) -> None:
        """See ``Ending``."""
        came = None if attempt.busy else self._meanwhile(attempt)
        if came is not None:  # answering now is faster than moving its memory out and back
            raise InUseError(f"a request is waiting: {came}")

    def finish(self, attempt: FreezeAttempt) -> None:
        """See ``Ending``."""
        self._freeze(attempt)
        self._check_gpu_users(attempt)
        came = TURN_OVER if attempt.busy else self._meanwhile(attempt) or unnoticed(self._sockets, attempt.record)
        record = attempt.record
        sleeper = Sleeper.of(attempt.journal, announced=not came)
        self._ledger.write(record.ledger_entry(self._node))
        if sleeper.announced:
            self._mails.send(record, "suspended", record.phases.get(Phase.FROZEN), why=record.why)
        self._scheduler.adopt(sleeper, ask=came or "")

    def _freeze(self, attempt: FreezeAttempt) -> None:
        job = attempt.job
        members = self._freezer.members(job.init_pid, job.init_started)
        mode = self._freezer.mechanism(members, job.init_pid)
        facts = SuspensionFacts(freeze_mechanism=mode)
        if attempt.busy:  # no event would wake it under the next agent
            facts = replace(facts, requested_epoch=self._clock.now(), requested_why=TURN_OVER)
        if not self._freezer.is_stopped_by_slurm(
            job.init_pid
        ):  # otherwise Slurm has stopped them, and will continue them
            facts = replace(facts, stopped_pids=attempt.stopped_by_others(members))  # may have changed since
        announce(self._registry, attempt, Phase.FROZEN, facts)
        self._freezer.freeze(job.init_pid, job.init_started, mode, timeout_s=self._freeze_s)
        attempt.stop.release()
        if mode != SIGNALS:  # frozen now: a process that was stopped as well would remain so when it is thawed
            self._processes.resume(member for member in members if member.pid in attempt.halted)

    def _check_gpu_users(self, attempt: FreezeAttempt) -> None:
        """Raise ``InUseError`` if a process has begun to use a GPU meanwhile: its memory would stay there."""
        new = {member.pid for member in self._members(attempt.job)} & holders(self._gpus.processes()) - attempt.gpu_pids
        if new:
            raise InUseError(f"process {min(new)} has begun to use a GPU meanwhile")

    def _meanwhile(self, attempt: FreezeAttempt) -> str | None:
        """Return what has arrived since the look before the locks."""
        job_sockets = self._sockets.of_processes(member.pid for member in self._members(attempt.job))
        return sockets.meanwhile(attempt.before, self._sockets.read(job_sockets))

    def roll_back(self, attempt: FreezeAttempt, error: AffinodeError | OSError) -> None:
        """See ``Ending``. Once memory may have moved, the job is woken when there is room."""
        journal, job_id = attempt.journal, attempt.job.job_id
        attempt.failure = why = cause(error)
        LOG.warning("job %s: the suspension is rolled back: %s", job_id, why)
        if attempt.phase is not Phase.LOCKING:
            sleeper = Sleeper.of(journal, announced=False)
            self._ledger.write(replace(journal.record.ledger_entry(self._node), failure=why))
            self._scheduler.adopt(sleeper, ask=f"its suspension failed: {why}")
        elif self._rollback.resume(journal):
            self._registry.set_phase(job_id, Phase.RUNNING)
            self._outcomes.ran_on(journal, why)
            attempt.phase = Phase.RUNNING
        else:
            self._scheduler.adopt(Sleeper.of(journal), ask=why)
