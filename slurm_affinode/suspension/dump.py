"""The ending of a suspension with ``mode=requeue``: CRIU dumps the job, and Slurm requeues it.

    dump -> image durable -> requeue -> kill

Until the requeue, the job can continue unharmed. From then on, its verified image is the job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.pidfd import Id
from slurm_affinode.checkpoint import deleted_files
from slurm_affinode.checkpoint.image_writer import ImageWriter
from slurm_affinode.checkpoint.inspection import TreeFacts, forked_workers
from slurm_affinode.checkpoint.interface import CheckpointError, Image, NoRoom, Tree
from slurm_affinode.checkpoint.user_files import user_of
from slurm_affinode.model.suspension import GpuFact, LiveRun, Manifest, Phase, Refusal, SavedOutput
from slurm_affinode.suspension import messages
from slurm_affinode.suspension.context import Parts
from slurm_affinode.suspension.interface import AbortedError, Refused, cause
from slurm_affinode.suspension.journal import JobJournal
from slurm_affinode.suspension.memory import cuda_users, gpu_memory, visible_gpus
from slurm_affinode.suspension.notify import SuspensionOutcomes
from slurm_affinode.suspension.process_tree import Member
from slurm_affinode.suspension.record import SuspensionFacts
from slurm_affinode.suspension.refusals import ImageFacts, estimate
from slurm_affinode.suspension.registry import WatchedJob
from slurm_affinode.suspension.requeue import NotRequeued, Requeuer
from slurm_affinode.suspension.rollback import Rollback
from slurm_affinode.suspension.streams import StreamsError
from slurm_affinode.suspension.suspend import Attempt, Ending, announce, first_facts

_OUTPUT_BYTES = 64 << 20
"""Space reserved for the job's output; if it is larger, the dump fails and the job runs on."""


@dataclass(slots=True, kw_only=True)
class DumpAttempt(Attempt):
    """A suspension that ends with a dump and a requeue."""

    root: Member
    gpu_facts: tuple[GpuFact, ...]
    forked: frozenset[Id]
    """Forked workers, found while their parents still have the device files that they share."""
    trouble: str | None = None
    """A problem that was resolved on the way."""
    passed: list[str] = field(default_factory=list)
    """Tiers that did not accept the image, and why."""
    traced: ExitStack = field(default_factory=ExitStack)
    """Keeps the dumped processes stopped."""


class RequeueEnding(Ending[DumpAttempt]):
    """The ending of jobs with ``mode=requeue``."""

    def __init__(self, parts: Parts, outcomes: SuspensionOutcomes, wait: Callable[[JobJournal], None]) -> None:
        """``wait``: hands a suspension over to recovery, since Slurm does not respond."""
        self._parts = parts
        self._outcomes = outcomes
        self._wait = wait
        self._rollback = Rollback(parts)
        self._requeuer = Requeuer(parts)

    # --- refusals

    def of_job(self, job: WatchedJob) -> Iterable[Refusal]:
        """See ``Ending``."""
        if self._parts.shared is None:
            yield Refusal("no-shared-store", "the site has no shared image store (suspend.shared_store)")

    def image(self, job: WatchedJob, tree: TreeFacts, gpu_bytes: int) -> ImageFacts:
        """See ``Ending``."""
        return ImageFacts(
            self._criu(),
            "" if self._parts.settings.criu_sockets else os.uname().release,
            self._no_room(job, estimate(tree, gpu_bytes, _OUTPUT_BYTES)),
            self._parts.imager.why_no_device_files(),
        )

    def _criu(self) -> str | None:
        try:
            return self._parts.imager.check()
        except CheckpointError:
            return None

    def _no_room(self, job: WatchedJob, image_bytes: int) -> str | None:
        try:
            self._parts.tiers.check_room(job.uid, image_bytes)
        except CheckpointError as error:
            return str(error)
        return None

    # --- the sequence

    def begin(self, job: WatchedJob, journal: JobJournal, why: str) -> DumpAttempt:
        """See ``Ending``."""
        parts = self._parts
        members = parts.processes.members(job.init_pid, job.init_started)
        root = next((member for member in members if member.pid_ns == job.root), None)
        if root is None:
            raise Refused(Refusal("not-started", "its script has ended"))
        cuda = tuple(sorted(cuda_users(parts, (member.pid for member in members))))
        if cuda and job.slurm is not None and not parts.gpus_of(job.slurm):
            text = "its GPUs are unknown, so it could not be restored: is the prolog set up?"
            raise Refused(Refusal("gpu-numbers", text))
        held = gpu_memory(parts, cuda)
        gpus = visible_gpus(parts, job.devices or (), held) if cuda else ()
        facts = replace(
            first_facts(parts, job, why, members, cuda),
            root_pid=root.pid, gpus=_gpu_count(job), gpu_model=gpus[0].model if gpus else None,
            gpu_bytes=sum(held.values()),
        )  # fmt: skip
        return DumpAttempt(
            job=job, journal=journal, members=members, facts=facts, root=root, gpu_facts=gpus,
            forked=forked_workers(parts.look(job.init_pid, root.pid), cuda),
        )  # fmt: skip

    def finish(self, attempt: DumpAttempt) -> None:
        """See ``Ending``."""
        parts, job = self._parts, attempt.job
        with attempt.traced:
            self._dump(attempt)
            announce(parts, attempt, Phase.REQUEUEING)
            self._requeuer.requeue(job.job_id, job.restarts)
            if parts.settings.notices:
                job.say(f"suspended on {parts.node}: {messages.reason(attempt.facts.why or '')}")
            if not parts.processes.end(job.init_pid, job.init_started, timeout_s=parts.settings.kill_s):
                parts.log.error("job %s: processes are left after SIGKILL", job.job_id)
            if parts.limits is not None:
                parts.limits.lower(job.job_id)
            announce(parts, attempt, Phase.QUEUED)
            self._outcomes.queued(attempt.journal)

    def _dump(self, attempt: DumpAttempt) -> None:
        parts = self._parts
        job = attempt.job
        # By now the memory of the processes includes the GPU memory.
        image_bytes = estimate(parts.look(job.init_pid, attempt.root.pid), 0, _OUTPUT_BYTES)
        image = parts.tiers.write(
            attempt.journal.key, partial(self._fill, attempt), uid=job.uid, estimate=image_bytes,
            at_least=self._next_seq(attempt), passed=attempt.passed.append,
        )  # fmt: skip
        parts.tiers.settle(image, passed=attempt.passed.append)
        passed = "; ".join(dict.fromkeys(attempt.passed)) or None
        facts = SuspensionFacts(image_bytes=image.manifest.size, trouble=attempt.trouble, passed=passed)
        announce(parts, attempt, Phase.DUMPED, facts)

    def _fill(self, attempt: DumpAttempt, writer: ImageWriter) -> Image:
        """Dump into one store. Raises ``NoRoom`` if it is full; the tree can then be dumped into another one."""
        parts, job = self._parts, attempt.job
        removed = deleted_files.ahead([member.id for member in self._members(attempt)])
        announce(parts, attempt, Phase.DUMPING, SuspensionFacts(seq=writer.seq, removed=removed))
        writer.follow()
        tree = Tree(job.init, attempt.root.pid, attempt.root.pid_ns, attempt.forked)
        try:
            parts.imager.dump(tree, writer.criu_fd, timeout_s=parts.settings.dump_s)
            # Slurm continues and ends the processes of a job that it requeues, also for others: dumped processes must
            # not run on.
            attempt.traced.enter_context(parts.processes.hold(self._members(attempt)))
            outputs = parts.streams.save(
                job.init, writer.save, user_of(job.init_pid, job.uid, job.gid, started=job.init_started)
            )
            return writer.commit(self._manifest(attempt, outputs, writer))
        except StreamsError as error:
            raise AbortedError(str(error)) from None
        except NoRoom as error:
            attempt.traced.close()
            attempt.trouble = f"its image did not fit where it was dumped to first: {error}"
            self._go_on(attempt)
            raise

    def _go_on(self, attempt: DumpAttempt) -> None:
        """Continue the processes that the dump has stopped.

        The next dump would record them as stopped, and they would remain so after a restore.
        """
        before = {member.pid for member in attempt.members if member.state == "T"}
        members = self._members(attempt)
        deleted_files.forget([m.id for m in members], (attempt.job.uid, attempt.job.gid))
        self._parts.processes.resume(m for m in members if m.state == "T" and m.pid not in before)

    def _next_seq(self, attempt: DumpAttempt) -> int:
        """Return a number above that of every image of the job, in any store."""
        job, newest = attempt.job, attempt.job.suspensions
        run = LiveRun(attempt.journal.key, job.uid, job.restarts)
        for store in self._parts.tiers.stores:
            try:
                image = store.find(run)
            except (CheckpointError, OSError):
                continue  # damaged: its number is in use, and the store assigns the next
            newest = max(newest, 0 if image is None else image.manifest.seq)
        return newest + 1

    def _manifest(self, attempt: DumpAttempt, outputs: tuple[SavedOutput, ...], writer: ImageWriter) -> Manifest:
        parts, job, record = self._parts, attempt.job, attempt.record
        numbers = {member.pid: member.pid_ns for member in attempt.members}
        return Manifest(
            key=record.key,
            seq=writer.seq,
            uid=job.uid,
            gid=job.gid,
            node=parts.node,
            restarts=job.restarts,
            started_epoch=record.began_epoch,
            dumped_epoch=parts.now(),
            option=job.option,
            versions=parts.versions(),
            root_pid=attempt.root.pid_ns,
            cuda_pids=tuple(numbers[pid] for pid in record.cuda_pids or ()),
            gpus=attempt.gpu_facts,
            gpu_bytes=record.gpu_bytes or 0,
            outputs=outputs,
            files=(),
        )

    def _members(self, attempt: DumpAttempt) -> Sequence[Member]:
        return self._parts.processes.members(attempt.job.init_pid, attempt.job.init_started)

    def roll_back(self, attempt: DumpAttempt, error: AffinodeError | OSError) -> None:
        """See ``Ending``."""
        parts, job_id = self._parts, attempt.job.job_id
        why = cause(error)
        if attempt.phase is Phase.REQUEUEING and not isinstance(error, NotRequeued):
            # Slurm may have requeued it: recovery queries Slurm first, and only recovery may decide on the job.
            parts.log.warning("job %s: %s; continued when Slurm responds", job_id, why)
            self._wait(attempt.journal)
            return
        parts.log.warning("job %s: the suspension is rolled back: %s", job_id, why)
        self._rollback.drop_image(attempt.journal)  # first: a new agent would requeue the job with it
        self._rollback.resume(attempt.journal)
        parts.registry.set_phase(job_id, Phase.RUNNING)
        self._outcomes.ran_on(attempt.journal, why)
        attempt.phase, attempt.failure = Phase.RUNNING, why


def _gpu_count(job: WatchedJob) -> int:
    if job.slurm is not None and job.slurm.gpus_allocated is not None:
        return job.slurm.gpus_allocated.count
    return len(job.devices or ())
