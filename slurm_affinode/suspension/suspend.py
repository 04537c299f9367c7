"""Suspension of a job: every step is announced in the journal, and a failure before the requeue rolls all of them back.

    refusals -> CUDA lock -> sample again -> CUDA checkpoint -> dump -> image durable -> requeue -> kill

Until the requeue, the job can continue unharmed. From then on, its verified image is the job.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.checkpoint import deleted_files
from slurm_affinode.checkpoint.image_writer import ImageWriter
from slurm_affinode.checkpoint.interface import CheckpointError, Image, NoRoom, Tree, Writer
from slurm_affinode.checkpoint.user_files import user_of
from slurm_affinode.gpu.interface import GpuError
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.suspension import (
    GpuFact,
    JobKey,
    LiveRun,
    Manifest,
    Mode,
    Phase,
    Refusal,
    SavedOutput,
    Suspension,
)
from slurm_affinode.suspension import messages, refusals
from slurm_affinode.suspension.context import Parts
from slurm_affinode.suspension.interface import LookAgain, Refused, TakenBack
from slurm_affinode.suspension.journal import Record
from slurm_affinode.suspension.memory import HostMemory, cuda_users
from slurm_affinode.suspension.notify import Aftermath
from slurm_affinode.suspension.process_tree import Member, TreeGoneError
from slurm_affinode.suspension.refusals import SlurmFacts, steps_of
from slurm_affinode.suspension.registry import WatchedJob
from slurm_affinode.suspension.requeue import NotRequeued, Requeuer
from slurm_affinode.suspension.rollback import Undo
from slurm_affinode.suspension.streams import StreamsError

_OUTPUT_BYTES = 64 << 20
"""Space reserved for the job's output; if it is larger, the dump fails and the job runs on."""


@dataclass(slots=True)
class _Attempt:
    """A suspension in progress."""

    job: WatchedJob
    key: JobKey
    record: Record
    why: str
    began: float
    root: Member
    tree: Sequence[Member]
    cuda: tuple[int, ...]
    gpu_bytes: int
    gpus: tuple[GpuFact, ...]
    seq: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    image_bytes: int | None = None
    trouble: str | None = None
    """A problem that was resolved on the way."""
    passed: list[str] = field(default_factory=list)
    """Tiers that did not accept the image, and why."""
    held: ExitStack = field(default_factory=ExitStack)


class JobSuspender:
    """``Suspender`` for the agent. Each thread suspends one job at a time; different jobs run concurrently."""

    def __init__(self, parts: Parts, aftermath: Aftermath) -> None:
        self._parts = parts
        self._aftermath = aftermath
        self._undo = Undo(parts)
        self._requeuer = Requeuer(parts)
        self._memory = HostMemory(parts)
        self._slurm = SlurmFacts(parts)
        self._busy: set[int] = set()
        self._lock = threading.Lock()
        """Guards ``_busy``, the jobs being suspended."""

    # --- refusals

    def refusals(self, job: WatchedJob) -> Sequence[Refusal]:
        """Return why this job cannot be suspended; empty if it can. Changes nothing."""
        parts = self._parts
        before = list(self._before(job))
        if job.slurm is None or any(refusal.code == "not-started" for refusal in before):
            return before
        root = self._root_of(job)
        tree = parts.look(job.init_pid, root)
        try:
            users = cuda_users(parts, (one.pid for one in tree.processes))
            used = sum(self._held(users).values())
            some = self._slurm.some_gpus(job)
        except (CheckpointError, GpuError) as error:
            # The version of a driver that is too old explains more than a missing function.
            return [*before, Refusal("driver", parts.cuda.capabilities().why_not or str(error))]
        mig = any(device.mig is not None for device in job.devices or ())
        return [
            *before,
            *refusals.refusals(
                job.option.mode,
                _job_facts(job.slurm),
                tree,
                refusals.GpuUseFacts(parts.cuda.capabilities(), users, used, mig, some),
                self._memory.of(job, tree),
                allowed=(Mode.REQUEUE,),
                uid=job.uid,
                criu=self._criu(),
                kernel="" if parts.settings.criu_sockets else os.uname().release,
                room=self._no_room(job, refusals.estimate(tree, used, _OUTPUT_BYTES)),
            ),
        ]

    def _before(self, job: WatchedJob) -> Iterator[Refusal]:
        """Yield the reasons that the agent itself knows."""
        parts = self._parts
        if job.slurm is None:
            yield Refusal("slurm", "slurmctld has not reported this job yet")
        if parts.shared is None:
            yield Refusal("no-shared-store", "the site has no shared image store (suspend.shared_store)")
        if job.key is not None and (hindrance := parts.journal.record(job.key).hindrance):
            yield Refusal("recovering", hindrance)
        if not self._root_of(job):
            yield Refusal("not-started", "its script has not started yet, or has ended")

    def _root_of(self, job: WatchedJob) -> int:
        try:
            members = self._parts.processes.members(job.init_pid, job.init_started)
        except TreeGoneError:
            return 0
        return next((member.pid for member in members if member.pid_ns == job.root), 0)

    def _criu(self) -> str | None:
        try:
            return self._parts.imager.check()
        except CheckpointError:
            return None

    def _no_room(self, job: WatchedJob, estimate: int) -> str | None:
        try:
            self._parts.tiers.check_room(job.uid, estimate)
        except CheckpointError as error:
            return str(error)
        return None

    # --- the sequence

    def suspend(self, job: WatchedJob, why: str, *, look_again: LookAgain) -> Suspension:
        """See ``interface.Suspender``."""
        with self._lock:
            if job.job_id in self._busy:
                raise Refused(Refusal("busy", "it is being suspended already"))
            self._busy.add(job.job_id)
        try:
            with self._memory.promised(job, self._held):
                return self._suspend(job, why, look_again)
        finally:
            with self._lock:
                self._busy.discard(job.job_id)

    def _suspend(self, job: WatchedJob, why: str, look_again: LookAgain) -> Suspension:
        parts = self._parts
        # Query Slurm now: the last answer may predate an srun. That Slurm responds is a precondition, too.
        slurm = parts.slurm.job(job.job_id)
        job = replace(job, slurm=slurm)
        if slurm.state != "RUNNING" or slurm.restarts != job.restarts or slurm.submit is None:
            raise Refused(Refusal("state", f"Slurm says that it is {slurm.state.lower()}"))
        refusals = self.refusals(job)
        if refusals:
            raise Refused(refusals[0])
        key = JobKey(parts.cluster, job.job_id, round(slurm.submit.timestamp()))
        attempt = self._begin(job, key, why)
        try:
            self._lock_all(attempt)
            seen = look_again()
            if seen is not None:
                raise TakenBack(f"it is not idle any more: {seen}")
            self._mark(attempt, Phase.LOCKED)
            for pid in attempt.cuda:
                parts.cuda.checkpoint(pid)
            self._memory.moved(job)
            self._mark(attempt, Phase.PARKED)
            with attempt.held:
                self._dump(attempt)
                self._mark(attempt, Phase.REQUEUEING)
                self._requeuer.requeue(attempt.job.job_id, attempt.job.restarts)
                return self._gone(attempt)
        except (AffinodeError, OSError) as error:
            return self._take_back(attempt, error)

    def _begin(self, job: WatchedJob, key: JobKey, why: str) -> _Attempt:
        parts = self._parts
        members = parts.processes.members(job.init_pid, job.init_started)
        root = next((member for member in members if member.pid_ns == job.root), None)
        if root is None:
            raise Refused(Refusal("not-started", "its script has ended"))
        cuda = tuple(sorted(cuda_users(parts, (member.pid for member in members))))
        if cuda and job.slurm is not None and not parts.gpus_of(job.slurm):
            text = "its GPUs are unknown, so it could not be restored: is the prolog set up?"
            raise Refused(Refusal("gpu-numbers", text))
        held = self._held(cuda)
        attempt = _Attempt(
            job=job, key=key, record=parts.journal.record(key), why=why, began=parts.now(), root=root, tree=members,
            cuda=cuda, gpu_bytes=sum(held.values()), gpus=self._gpu_facts(job, held) if cuda else (),
        )  # fmt: skip
        slurm = job.slurm
        self._mark(
            attempt,
            Phase.LOCKING,
            job_id=job.job_id, restarts=job.restarts, uid=job.uid, gid=job.gid, why=why, began=attempt.began,
            init_pid=job.init_pid, init_started=job.init_started, root=root.pid, cuda=list(cuda),
            stopped=[member.pid for member in members if member.state == "T"], option=str(job.option),
            gpus=self._gpu_count(job), gpu_bytes=attempt.gpu_bytes,
            gpu_model=attempt.gpus[0].model if attempt.gpus else None,
            shown=slurm.id if slurm else None, user=slurm.user if slurm else None,
            account=slurm.account if slurm else None, name=slurm.name if slurm else None,
            partition=slurm.partitions[0] if slurm and slurm.partitions else None,
        )  # fmt: skip
        return attempt

    def _held(self, pids: Iterable[int]) -> dict[str, int]:
        """Return UUID -> bytes in use by these processes."""
        mine = frozenset(pids)
        there = self._parts.gpus.processes() if mine else {}
        return {uuid: sum(count for pid, count in held.items() if pid in mine) for uuid, held in there.items()}

    def _gpu_facts(self, job: WatchedJob, held_bytes: Mapping[str, int]) -> tuple[GpuFact, ...]:
        """Return every GPU that the driver reports, in its order."""
        by_uuid = {device.uuid: device for device in self._parts.gpus.devices() if device.mig is None}
        held = {device.uuid for device in job.devices or ()}
        return tuple(
            GpuFact(
                uuid,
                (by_uuid[uuid].model if uuid in by_uuid else None) or "unknown",
                round((by_uuid[uuid].memory_mib or 0) * 2**20) if uuid in by_uuid else 0,
                allocated=uuid in held,
                held_bytes=held_bytes.get(uuid, 0),
            )
            for uuid in self._parts.cuda.devices()
        )

    @staticmethod
    def _gpu_count(job: WatchedJob) -> int:
        if job.slurm is not None and job.slurm.gpus_allocated is not None:
            return job.slurm.gpus_allocated.count
        return len(job.devices or ())

    def _lock_all(self, attempt: _Attempt) -> None:
        parts = self._parts
        deadline = parts.now() + parts.settings.lock_s
        started = {member.pid: member.started for member in attempt.tree}
        for pid in attempt.cuda:
            left_ms = max(100, round((deadline - parts.now()) * 1000))
            parts.cuda.lock(pid, timeout_ms=left_ms, started=started[pid])

    def _dump(self, attempt: _Attempt) -> None:
        parts = self._parts
        job = attempt.job
        # By now the memory of the processes includes the GPU memory.
        estimate = refusals.estimate(parts.look(job.init_pid, attempt.root.pid), 0, _OUTPUT_BYTES)
        image = parts.tiers.write(
            attempt.key, partial(self._fill, attempt), uid=job.uid, estimate=estimate, at_least=self._next_seq(attempt),
            passed=attempt.passed.append,
        )  # fmt: skip
        parts.tiers.settle(image, passed=attempt.passed.append)
        attempt.image_bytes = image.manifest.size
        passed = "; ".join(dict.fromkeys(attempt.passed)) or None
        self._mark(attempt, Phase.DUMPED, image_bytes=image.manifest.size, trouble=attempt.trouble, passed=passed)

    def _fill(self, attempt: _Attempt, writer: ImageWriter) -> Image:
        """Dump into one store. Raises ``NoRoom`` if it is full; the tree can then be dumped into another one."""
        parts, job = self._parts, attempt.job
        attempt.seq = writer.seq
        removed = deleted_files.ahead([member.id for member in self._members(attempt)])
        self._mark(attempt, Phase.DUMPING, seq=writer.seq, removed=removed)
        writer.follow()
        tree = Tree(job.init, attempt.root.pid, attempt.root.pid_ns)
        try:
            parts.imager.dump(tree, writer.criu_fd, timeout_s=parts.settings.dump_s)
            # Slurm continues and ends the processes of a job that it requeues, also for others: dumped processes must
            # not run on.
            attempt.held.enter_context(parts.processes.hold(self._members(attempt)))
            outputs = parts.streams.save(
                job.init, writer.save, user_of(job.init_pid, job.uid, job.gid, started=job.init_started)
            )
            return writer.commit(self._manifest(attempt, outputs, writer))
        except StreamsError as error:
            raise TakenBack(str(error)) from None
        except NoRoom as error:
            attempt.held.close()
            attempt.trouble = f"its image did not fit where it was dumped to first: {error}"
            self._go_on(attempt)
            raise

    def _go_on(self, attempt: _Attempt) -> None:
        """Continue the processes that the dump has stopped.

        The next dump would record them as stopped, and they would remain so after a restore.
        """
        before = {member.pid for member in attempt.tree if member.state == "T"}
        members = self._members(attempt)
        deleted_files.forget([m.id for m in members], (attempt.job.uid, attempt.job.gid))
        self._parts.processes.resume(m for m in members if m.state == "T" and m.pid not in before)

    def _next_seq(self, attempt: _Attempt) -> int:
        """Return a number above that of every image of the job, in any store."""
        job, newest = attempt.job, attempt.job.suspensions
        run = LiveRun(attempt.key, job.uid, job.restarts)
        for store in self._parts.tiers.stores:
            try:
                image = store.find(run)
            except (CheckpointError, OSError):
                continue  # damaged: its number is in use, and the store assigns the next
            newest = max(newest, 0 if image is None else image.manifest.seq)
        return newest + 1

    def _manifest(self, attempt: _Attempt, outputs: tuple[SavedOutput, ...], writer: Writer) -> Manifest:
        parts, job = self._parts, attempt.job
        numbers = {member.pid: member.pid_ns for member in attempt.tree}
        return Manifest(
            key=attempt.key,
            seq=writer.seq,
            uid=job.uid,
            gid=job.gid,
            node=parts.node,
            restarts=job.restarts,
            started_epoch=attempt.began,
            dumped_epoch=parts.now(),
            option=job.option,
            versions=parts.versions(),
            root_pid=attempt.root.pid_ns,
            cuda_pids=tuple(numbers[pid] for pid in attempt.cuda),
            gpus=attempt.gpus,
            gpu_bytes=attempt.gpu_bytes,
            outputs=outputs,
            files=(),
        )

    def _members(self, attempt: _Attempt) -> Sequence[Member]:
        return self._parts.processes.members(attempt.job.init_pid, attempt.job.init_started)

    def _gone(self, attempt: _Attempt) -> Suspension:
        """Complete the suspension of a queued job: end the tree and report."""
        parts, job = self._parts, attempt.job
        if parts.settings.notices:
            job.say(f"suspended on {parts.node}: {messages.one(attempt.why)}")
        if not parts.processes.end(job.init_pid, job.init_started, timeout_s=parts.settings.kill_s):
            parts.log.error("job %s: processes are left after SIGKILL", job.job_id)
        self._mark(attempt, Phase.QUEUED)
        self._aftermath.queued(attempt.record)
        return self._suspension(attempt, Phase.QUEUED)

    def _take_back(self, attempt: _Attempt, error: Exception) -> Suspension:
        parts, job = self._parts, attempt.job
        why = str(error) if isinstance(error, AffinodeError) else f"{type(error).__name__}: {error}"
        if attempt.record.phase is Phase.REQUEUEING and not isinstance(error, NotRequeued):
            # Slurm may have requeued it: recovery queries Slurm first, and only recovery may decide on the job.
            parts.log.warning("job %s: %s; continued when Slurm responds", job.job_id, why)
            self._aftermath.later(attempt.record)
            return self._suspension(attempt, Phase.REQUEUEING)
        parts.log.warning("job %s: the suspension is rolled back: %s", job.job_id, why)
        self._undo.drop_image(attempt.record)  # first: a new agent would requeue the job with it
        self._undo.resume(attempt.record)
        parts.registry.set_phase(job.job_id, Phase.RUNNING)
        self._aftermath.ran_on(attempt.record, why)
        return self._suspension(attempt, Phase.RUNNING, failure=why)

    def _mark(self, attempt: _Attempt, phase: Phase, **facts: object) -> None:
        entry = attempt.record.write(phase, **facts)
        attempt.phases.setdefault(phase.value, entry.time_epoch)  # the first of several dumps counts
        self._parts.registry.set_phase(attempt.job.job_id, phase)

    def _suspension(self, attempt: _Attempt, phase: Phase, failure: str | None = None) -> Suspension:
        return Suspension(
            key=attempt.key,
            seq=attempt.seq,
            phase=phase,
            node=self._parts.node,
            uid=attempt.job.uid,
            mode=attempt.job.option.mode,
            why=attempt.why,
            gpus=self._gpu_count(attempt.job),
            started_epoch=attempt.began,
            phases=dict(attempt.phases),
            image_bytes=attempt.image_bytes,
            gpu_bytes=attempt.gpu_bytes,
            failure=failure,
        )


def _job_facts(job: Job) -> refusals.JobFacts:
    return refusals.JobFacts(
        batch=job.batch,
        requeue=job.requeue,
        nodes=job.node_count or 1,
        heterogeneous=job.het_job_id is not None,
        steps=steps_of(job),
    )
