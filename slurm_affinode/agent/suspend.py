"""Suspending a job: every step announced in the journal, everything taken back where a step before the requeue fails.

    refusals -> CUDA lock -> look again -> CUDA checkpoint -> dump -> image durable -> requeue -> kill

Until the requeue the job can go on as if nothing had been. From then on its verified image is the job.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slurm_affinode.agent import preflight, words
from slurm_affinode.agent.aftermath import Aftermath
from slurm_affinode.agent.interface import LookAgain, Refused
from slurm_affinode.agent.journal import Record
from slurm_affinode.agent.parts import Parts
from slurm_affinode.agent.registry import WatchedJob
from slurm_affinode.agent.requeue import NotRequeued, Requeuer
from slurm_affinode.agent.streams import StreamsError
from slurm_affinode.agent.tree import Member, TreeGoneError
from slurm_affinode.agent.undo import Undo
from slurm_affinode.checkpoint.interface import CheckpointError, Tree, Writer
from slurm_affinode.errors import AffinodeError
from slurm_affinode.gpu.interface import GpuError
from slurm_affinode.model.suspension import GpuFact, JobKey, Manifest, Phase, Refusal, SavedOutput, Suspension


class TakenBack(AffinodeError):  # noqa: N818 - names what is the case
    """The suspension does not go on; the text says why."""


@dataclass(slots=True)
class _Attempt:
    """One suspension under way."""

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


class JobSuspender:
    """``Suspender`` for the agent. One job at a time for each thread; different jobs at once."""

    def __init__(self, parts: Parts, aftermath: Aftermath) -> None:
        self._parts = parts
        self._aftermath = aftermath
        self._undo = Undo(parts)
        self._requeuer = Requeuer(parts)
        self._busy: set[int] = set()
        self._lock = threading.Lock()

    # --- refusals

    def refusals(self, job: WatchedJob) -> Sequence[Refusal]:
        """Why this job cannot be suspended; empty: it can. Nothing is touched."""
        parts = self._parts
        found = list(preflight.of_slurm(job.slurm, job.option))
        if parts.shared is None:
            found.append(Refusal("no-shared-store", "the site has no shared image store (suspend.shared_store)"))
        if job.key is not None and parts.journal.record(job.key).entries:
            found.append(Refusal("recovering", "an earlier suspension of it is still being put in order"))
        try:
            seen = preflight.look(parts.processes.members(job.init_pid, job.init_started), self._root_of(job))
        except TreeGoneError as error:
            return [*found, Refusal("not-started", str(error))]
        try:
            cuda = parts.cuda.users(member.pid for member in seen.tree)
            gpu_bytes = parts.gpus.used_bytes(frozenset(cuda)) if cuda else 0
        except (CheckpointError, GpuError) as error:
            return [*found, *preflight.of_processes(seen, job.uid, ()), Refusal("driver", str(error))]
        found += preflight.of_processes(seen, job.uid, cuda)
        found += preflight.of_driver(parts.cuda.capabilities(), cuda)
        found += preflight.of_memory(gpu_bytes, preflight.available_bytes(), preflight.cgroup_room_bytes(job.init_pid))
        found += self._room(job, seen.memory_bytes + gpu_bytes + preflight.OVERHEAD_BYTES)
        try:
            parts.imager.check()
        except CheckpointError as error:
            found.append(Refusal("criu", str(error)))
        return found

    def _root_of(self, job: WatchedJob) -> int:
        for member in self._parts.processes.members(job.init_pid, job.init_started):
            if member.pid_ns == job.root:
                return member.pid
        return 0

    def _room(self, job: WatchedJob, estimate: int) -> list[Refusal]:
        found = []
        for store in (self._parts.local, self._parts.shared):
            try:
                if store is not None:
                    store.check_room(job.uid, estimate)
            except CheckpointError as error:
                found.append(Refusal("no-room", f"there is no room for its image: {error}"))
        return found

    # --- the sequence

    def suspend(self, job: WatchedJob, why: str, *, look_again: LookAgain) -> Suspension:
        """See ``interface.Suspender``."""
        with self._lock:
            if job.job_id in self._busy:
                raise Refused(Refusal("busy", "it is being suspended already"))
            self._busy.add(job.job_id)
        try:
            return self._suspend(job, why, look_again)
        finally:
            with self._lock:
                self._busy.discard(job.job_id)

    def _suspend(self, job: WatchedJob, why: str, look_again: LookAgain) -> Suspension:
        parts = self._parts
        # Slurm's present word: what it said last may be from before an srun. That it answers is a condition, too.
        job = replace(job, slurm=parts.slurm.job(job.job_id))
        assert job.slurm is not None  # noqa: S101 - set above
        if job.slurm.state != "RUNNING" or job.slurm.restarts != job.restarts or job.slurm.submit is None:
            raise Refused(Refusal("state", f"Slurm says that it is {job.slurm.state.lower()}"))
        refusals = self.refusals(job)
        if refusals:
            raise Refused(refusals[0])
        key = JobKey(parts.cluster, job.job_id, round(job.slurm.submit.timestamp()))
        attempt = self._begin(job, key, why)
        try:
            self._lock_all(attempt)
            seen = look_again()
            if seen is not None:
                raise TakenBack(f"it is not idle any more: {seen}")
            self._mark(attempt, Phase.LOCKED)
            for pid in attempt.cuda:
                parts.cuda.checkpoint(pid)
            self._mark(attempt, Phase.PARKED)
            self._dump(attempt)
            # Slurm continues and ends what it requeues: what was dumped must not run on meanwhile.
            with parts.processes.hold(member.pid for member in self._members(attempt)):
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
        cuda = tuple(sorted(parts.cuda.users(member.pid for member in members)))
        gpu_bytes = parts.gpus.used_bytes(frozenset(cuda)) if cuda else 0
        attempt = _Attempt(
            job=job, key=key, record=parts.journal.record(key), why=why, began=parts.now(), root=root, tree=members,
            cuda=cuda, gpu_bytes=gpu_bytes, gpus=self._gpu_facts(job) if cuda else (),
        )  # fmt: skip
        slurm = job.slurm
        self._mark(
            attempt,
            Phase.LOCKING,
            job_id=job.job_id, restarts=job.restarts, uid=job.uid, gid=job.gid, why=why, began=attempt.began,
            init_pid=job.init_pid, init_started=job.init_started, root=root.pid, cuda=list(cuda),
            stopped=[member.pid for member in members if member.state == "T"], option=str(job.option),
            gpus=self._gpu_count(job), gpu_bytes=gpu_bytes, gpu_model=attempt.gpus[0].model if attempt.gpus else None,
            user=slurm.user if slurm else None, account=slurm.account if slurm else None,
            partition=slurm.partitions[0] if slurm and slurm.partitions else None,
        )  # fmt: skip
        return attempt

    def _gpu_facts(self, job: WatchedJob) -> tuple[GpuFact, ...]:
        """Every GPU that the driver shows, in its order."""
        by_uuid = {device.uuid: device for device in self._parts.gpus.devices() if device.mig is None}
        held = {device.uuid for device in job.devices or ()}
        return tuple(
            GpuFact(
                uuid,
                (by_uuid[uuid].model if uuid in by_uuid else None) or "unknown",
                round((by_uuid[uuid].memory_mib or 0) * 2**20) if uuid in by_uuid else 0,
                allocated=uuid in held,
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
        for pid in attempt.cuda:
            left_ms = max(100, round((deadline - parts.now()) * 1000))
            parts.cuda.lock(pid, timeout_ms=left_ms)

    def _dump(self, attempt: _Attempt) -> None:
        parts = self._parts
        job = attempt.job
        estimate = preflight.look(self._members(attempt), attempt.root.pid).memory_bytes + preflight.OVERHEAD_BYTES
        tree = Tree(job.init_pid, attempt.root.pid, attempt.root.pid_ns)
        with parts.local.begin(attempt.key, uid=job.uid, estimate=estimate, at_least=self._next_seq(attempt)) as writer:
            attempt.seq = writer.seq
            self._mark(attempt, Phase.DUMPING, seq=writer.seq)
            writer.follow()
            result = parts.imager.dump(tree, writer.criu_fd, timeout_s=parts.settings.dump_s)
            try:
                outputs = parts.streams.save(job.init_pid, writer.save)
            except StreamsError as error:
                raise TakenBack(str(error)) from None
            image = writer.commit(self._manifest(attempt, result.pids_ns, outputs, writer))
        attempt.image_bytes = image.manifest.size
        self._mark(attempt, Phase.DUMPED, image_bytes=image.manifest.size)

    def _next_seq(self, attempt: _Attempt) -> int:
        note = self._parts.notes.read(attempt.key.cluster, attempt.key.job_id)
        return max(attempt.job.suspensions, note.seq if note is not None else 0) + 1

    def _manifest(
        self, attempt: _Attempt, pids_ns: Sequence[int], outputs: tuple[SavedOutput, ...], writer: Writer
    ) -> Manifest:
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
            stopped_pids=tuple(numbers[m.pid] for m in attempt.tree if m.state == "T" and m.pid_ns in pids_ns),
        )

    def _members(self, attempt: _Attempt) -> Sequence[Member]:
        return self._parts.processes.members(attempt.job.init_pid, attempt.job.init_started)

    def _gone(self, attempt: _Attempt) -> Suspension:
        """Slurm has the job in its queue: the tree goes, and what is left is no more than telling."""
        parts, job = self._parts, attempt.job
        if parts.settings.notices:
            job.say(f"suspended on {parts.node}: {words.one(attempt.why)}")
        if not parts.processes.end(job.init_pid, job.init_started, timeout_s=parts.settings.kill_s):
            parts.log.error("job %s: processes are left after SIGKILL", job.job_id)
        self._mark(attempt, Phase.QUEUED)
        self._aftermath.queued(attempt.record)
        return self._suspension(attempt, Phase.QUEUED)

    def _take_back(self, attempt: _Attempt, error: Exception) -> Suspension:
        parts, job = self._parts, attempt.job
        why = str(error) if isinstance(error, AffinodeError) else f"{type(error).__name__}: {error}"
        if attempt.record.phase is Phase.REQUEUEING and not isinstance(error, NotRequeued):
            # Slurm may have requeued it: only recovery, which asks Slurm first, may say what the job is now.
            parts.log.warning("job %s: %s; taken up again when Slurm answers", job.job_id, why)
            self._aftermath.later(attempt.record)
            return self._suspension(attempt, Phase.REQUEUEING)
        parts.log.warning("job %s: the suspension is taken back: %s", job.job_id, why)
        self._undo.resume(attempt.record)
        self._undo.drop_image(attempt.record)
        parts.registry.set_phase(job.job_id, Phase.RUNNING)
        self._aftermath.ran_on(attempt.record, why)
        return self._suspension(attempt, Phase.RUNNING, failure=why)

    def _mark(self, attempt: _Attempt, phase: Phase, **facts: object) -> None:
        entry = attempt.record.write(phase, **facts)
        attempt.phases[phase.value] = entry.time_epoch
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
