"""Suspension of a job: each step is announced in the journal, and the ending that its mode has completes it.

    refusals -> CUDA lock -> sample again -> (stop of other processes, raised memory limit) -> CUDA checkpoint -> ending

The refusals are a courtesy: the processes run on, and may be others when the ending acts. The endings are a dump and a
requeue (``dump``), and a freeze in place (``inplace.suspend``).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.checkpoint.inspection import TreeFacts
from slurm_affinode.checkpoint.interface import CheckpointError, CudaDriver
from slurm_affinode.gpu.interface import GpuError
from slurm_affinode.model.suspension import JobKey, Mode, Phase, Refusal, RefusalCode
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.suspension import refusals
from slurm_affinode.suspension.compatibility import Compatibility, kinds
from slurm_affinode.suspension.context import LOG, Gpus
from slurm_affinode.suspension.interface import InUseError, Refused, SampleAgain
from slurm_affinode.suspension.job.process_tree import Member, Processes, StoppedJob, TreeGoneError, stopped
from slurm_affinode.suspension.job.registry import Registry, WatchedJob
from slurm_affinode.suspension.memory import HostMemory, cuda_users, gpu_memory
from slurm_affinode.suspension.records.journal import JobJournal, Journal
from slurm_affinode.suspension.records.record import NO_NEW_FACTS, SuspensionFacts, SuspensionRecord
from slurm_affinode.suspension.refusals import GpuUseFacts, ImageFacts, JobFacts, SlurmFacts

STOP_S = 5.0
"""Timeout for stopping the processes of a job: a busy node may take long to schedule them."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A suspension in progress."""

    job: WatchedJob
    journal: JobJournal
    members: Sequence[Member]
    """The processes of the job."""
    facts: SuspensionFacts
    """The facts with which the journal begins."""
    stop: StoppedJob
    halted: frozenset[int] = frozenset()
    """Processes that the agent has stopped before the GPU memory moved."""
    phase: Phase = Phase.RUNNING
    failure: str | None = None
    """Why the suspension was rolled back."""

    @property
    def record(self) -> SuspensionRecord:
        """The record so far, once its first phase was announced."""
        return self.journal.record

    def stopped_by_others(self, members: Iterable[Member]) -> tuple[int, ...]:
        """Return the processes that the agent has not stopped."""
        return tuple(pid for pid in stopped(members) if pid not in self.halted)


A = TypeVar("A", bound=Attempt)


class Ending(ABC, Generic[A]):
    """The points at which the suspensions of two modes differ."""

    needs_slurm = True
    """No suspension begins unless Slurm responds; otherwise its last record of the job is used."""

    @abstractmethod
    def of_job(self, job: WatchedJob) -> Iterable[Refusal]:
        """Return reasons that are known without any process."""

    def of_processes(self, job: WatchedJob, members: Iterable[Member]) -> Iterable[Refusal]:
        """Return reasons found in the list of its processes."""
        return ()

    def image(self, job: WatchedJob, tree: TreeFacts, gpu_bytes: int) -> ImageFacts | None:
        """Return facts about the image to be made; ``None`` if there will be none."""
        return None

    def of_gpu(self, held_bytes: Mapping[str, int]) -> Iterable[Refusal]:
        """Return reasons found in its GPU memory, UUID -> bytes. Raises ``GpuError``."""
        return ()

    @abstractmethod
    def begin(self, job: WatchedJob, journal: JobJournal, why: str, *, busy: bool = False) -> A:
        """Collect the facts for the journal. Raises ``Refused`` and ``AffinodeError``; changes nothing.

        ``busy``: see ``interface.Suspender.suspend``.
        """

    def recheck(self, attempt: A) -> None:
        """Raise ``InUseError`` if the job is in use, apart from its GPUs. Called under the CUDA locks."""

    @abstractmethod
    def finish(self, attempt: A) -> None:
        """Complete a suspension that has moved the GPU memory. Raises ``AffinodeError`` and ``OSError``."""

    @abstractmethod
    def roll_back(self, attempt: A, error: AffinodeError | OSError) -> None:
        """Roll back, and record why in ``attempt.failure``; nothing is recorded if recovery has to decide."""


class JobSuspender:
    """``Suspender`` for the agent. Each thread suspends one job at a time; different jobs run concurrently."""

    def __init__(
        self, *, endings: Mapping[Mode, Ending[Any]], cluster: str, slurm: SlurmClient, configuration: SlurmFacts,
        processes: Processes, cuda: CudaDriver, gpus: Gpus, memory: HostMemory, journal: Journal, registry: Registry,
        inspect: Callable[[int, int], TreeFacts], lock_s: float = 10.0, now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """``endings``: for each mode that is possible on this node.

        ``inspect``: inspects a process tree (PID of the shepherd, PID of the tree's root). ``lock_s``: time-out of all
        CUDA locks of a job.
        """
        self._cluster = cluster
        self._slurm = slurm
        self._configuration = configuration
        self._processes = processes
        self._cuda = cuda
        self._gpus = gpus
        self._journal = journal
        self._registry = registry
        self._inspect = inspect
        self._lock_s = lock_s
        self._now = now
        self._endings = endings
        self._memory = memory
        self._busy: set[int] = set()
        self._lock = threading.Lock()
        """Guards ``_busy``, the jobs being suspended."""

    # --- refusals

    def refusals(self, job: WatchedJob) -> Sequence[Refusal]:
        """Return why this job cannot be suspended; empty if it can. Changes nothing."""
        ending = self._endings.get(job.option.mode)
        if ending is None:
            return [refusals.of_mode(job.option.mode, self._endings)]
        if job.slurm is None and not ending.needs_slurm:
            with suppress(AffinodeError):
                job = self._current(job, ending)
        members = self._members(job)
        root = self._root_of(job)
        reasons = list(self._early_reasons(job, root, members, ending))
        if job.slurm is None or not root:
            return reasons
        tree = self._inspect(job.init_pid, root)
        try:
            users = cuda_users(self._cuda, (member.pid for member in members))
            held_bytes = gpu_memory(self._gpus, users)
            used = sum(held_bytes.values())
            mig = any(device.mig is not None for device in job.devices or ())
            reasons += refusals.refusals(
                JobFacts.of(job.slurm),
                tree,
                GpuUseFacts(self._cuda.capabilities(), users, used, mig, self._configuration.some_gpus(job)),
                self._memory.of(job, tree, used),
                owner=job.owner,
                image=ending.image(job, tree, used),
            )
            reasons += ending.of_gpu(held_bytes)
        except (CheckpointError, GpuError) as error:
            # The version of a driver that is too old explains more than a missing function.
            reasons.append(Refusal(RefusalCode.DRIVER, self._cuda.capabilities().why_not or str(error)))
        return reasons

    def compatibility(self, job: WatchedJob) -> Compatibility:
        """See ``interface.Suspender``."""
        options = {mode: replace(job.option, mode=mode) for mode in Mode}
        modes = {mode: self.refusals(replace(job, option=option)) for mode, option in options.items()}
        codes = {refusal.code for reasons in modes.values() for refusal in reasons}
        root = self._root_of(job)
        tree, users = None, frozenset[int]()
        with suppress(CheckpointError, GpuError):
            users = cuda_users(self._cuda, (member.pid for member in self._members(job)))
            tree = self._inspect(job.init_pid, root) if root else None
        return Compatibility(kinds(job, tree, users, codes), modes)

    def _early_reasons(
        self, job: WatchedJob, root: int, members: Sequence[Member], ending: Ending[Any]
    ) -> Iterator[Refusal]:
        """Yield the reasons that are known without an inspection of the process tree."""
        if job.slurm is None:
            yield Refusal(RefusalCode.SLURM, "slurmctld has not reported this job yet")
        yield from ending.of_job(job)
        if job.key is not None and (hindrance := self._journal.of_job(job.key).hindrance):
            yield Refusal(RefusalCode.RECOVERING, hindrance)
        if not root:
            yield Refusal(RefusalCode.NOT_STARTED, "its script has not started yet, or has ended")
        yield from ending.of_processes(job, members)

    def _root_of(self, job: WatchedJob) -> int:
        """Return the PID of its script, or 0 if that does not run."""
        with suppress(TreeGoneError):
            for member in self._processes.members(job.init_pid, job.init_started):
                if member.pid_ns == job.root:
                    return member.pid
        return 0

    def _members(self, job: WatchedJob) -> Sequence[Member]:
        """Return its processes, including those of containers."""
        with suppress(TreeGoneError):
            return self._processes.all_processes(job.init_pid, job.init_started)
        return ()

    # --- the sequence

    def suspend(self, job: WatchedJob, why: str, *, sample_again: SampleAgain, busy: bool = False) -> SuspensionRecord:
        """See ``interface.Suspender``."""
        with self._exclusively(job.job_id), self._memory.promised(job):
            ending = self._ending(job)
            job = self._current(job, ending)
            attempt: Attempt = ending.begin(job, self._admit(job), why, busy=busy)
            announce(self._registry, attempt, Phase.LOCKING, attempt.facts)
            in_use = False
            try:
                self._lock_all(attempt)
                if (activity := sample_again()) is not None:
                    raise InUseError(f"it is no longer idle: {activity}")
                ending.recheck(attempt)
                cuda = attempt.facts.cuda_pids or ()
                allowance = self._memory.make_room(job, attempt.facts, lambda: self._halt(attempt, but=cuda))
                announce(self._registry, attempt, Phase.LOCKED)
                self._checkpoint(attempt)
                if allowance is not None:
                    self._halt(attempt)
                    self._memory.check_use(job, allowance)
                announce(self._registry, attempt, Phase.PARKED)
                ending.finish(attempt)
            except (AffinodeError, OSError) as error:
                in_use = isinstance(error, InUseError)
                attempt.stop.release()
                ending.roll_back(attempt, error)
            finally:
                attempt.stop.release()
            return replace(attempt.record, phase=attempt.phase, failure=attempt.failure, in_use=in_use)

    @contextmanager
    def _exclusively(self, job_id: int) -> Iterator[None]:
        """Refuse other suspensions of the job while the context lasts."""
        with self._lock:
            if job_id in self._busy:
                raise Refused(Refusal(RefusalCode.BUSY, "it is being suspended already"))
            self._busy.add(job_id)
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(job_id)

    def _ending(self, job: WatchedJob) -> Ending[Any]:
        try:
            return self._endings[job.option.mode]
        except KeyError:
            raise Refused(refusals.of_mode(job.option.mode, self._endings)) from None

    def _current(self, job: WatchedJob, ending: Ending[Any]) -> WatchedJob:
        """Return the job with Slurm's current record: the last one may predate an srun."""
        try:
            return replace(job, slurm=self._slurm.job(job.job_id))
        except AffinodeError as error:
            if ending.needs_slurm or job.slurm is None:
                raise
            LOG.info("job %s: %s; Slurm's last record is used", job.job_id, error)
            return job

    def _admit(self, job: WatchedJob) -> JobJournal:
        """Return the journal for the suspension of a job. Raises ``Refused``."""
        slurm = job.slurm
        assert slurm is not None  # noqa: S101 - it is the current record
        key = JobKey.of(self._cluster, slurm)
        if slurm.state != "RUNNING" or slurm.restarts != job.restarts or key is None:
            raise Refused(Refusal(RefusalCode.STATE, f"Slurm reports that it is {slurm.state.lower()}"))
        if slurm.uid is not None and slurm.uid != job.uid:
            raise Refused(
                Refusal(RefusalCode.OTHER_USER, f"Slurm reports that it belongs to user {slurm.uid}, not to {job.uid}")
            )
        for refusal in self.refusals(job):
            raise Refused(refusal)
        return self._journal.of_job(key)

    def _lock_all(self, attempt: Attempt) -> None:
        deadline = self._now() + self._lock_s
        started = {member.pid: member.started for member in attempt.members}
        for pid in attempt.facts.cuda_pids or ():
            left_ms = max(100, round((deadline - self._now()) * 1000))
            self._cuda.lock(pid, timeout_ms=left_ms, started=started[pid])

    def _halt(self, attempt: Attempt, but: Collection[int] = ()) -> None:
        """Stop the processes of the job but these: while its memory limit is raised, they must not take the memory."""
        before = {*stopped(self._members(attempt.job))} - attempt.halted
        attempt.stop.stop(timeout_s=STOP_S, but=but)
        running = frozenset(member.pid for member in self._members(attempt.job))
        attempt.halted |= running - before - {*but}

    def _checkpoint(self, attempt: Attempt) -> None:
        self._cuda.checkpoint(*(attempt.facts.cuda_pids or ()))
        self._memory.moved(attempt.job)


def announce(registry: Registry, attempt: Attempt, phase: Phase, facts: SuspensionFacts = NO_NEW_FACTS) -> None:
    """Write a phase to the journal before its step begins. Raises ``JournalError``: the step must not be taken."""
    attempt.journal.write(phase, facts)
    attempt.phase = phase
    registry.set_phase(attempt.job.job_id, phase)


def first_facts(
    job: WatchedJob, why: str, members: Iterable[Member], cuda: tuple[int, ...], now_epoch: float
) -> SuspensionFacts:
    """Return the facts of a suspension that begins at this time, in any mode. ``cuda``: the processes that use CUDA."""
    slurm = job.slurm
    assert slurm is not None  # noqa: S101 - it is the current record
    left_s = None if slurm.expected_end is None else max(0.0, slurm.expected_end.timestamp() - now_epoch)
    return SuspensionFacts(
        job_id=job.job_id, restarts=job.restarts, uid=job.uid, gid=job.gid, groups=job.groups, user=slurm.user,
        account=slurm.account, partition=slurm.partitions[0] if slurm.partitions else None, job_name=slurm.name,
        shown=slurm.id,
        option=job.option, why=why, time_left_s=left_s, began_epoch=now_epoch, init_pid=job.init_pid,
        init_started=job.init_started,
        cuda_pids=cuda, stopped_pids=stopped(members),
    )  # fmt: skip
