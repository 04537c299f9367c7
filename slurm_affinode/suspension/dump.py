"""The ending of a suspension with ``mode=requeue``: CRIU dumps the job, and Slurm requeues it.

    stop -> refusals of the stopped job -> dump -> image durable -> requeue -> kill

Until the requeue, the job can continue unharmed. From then on, its verified image is the job.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.pidfd import Id, Process
from slurm_affinode.base.text import one_line
from slurm_affinode.checkpoint.criu import kernel_states
from slurm_affinode.checkpoint.files import deleted_files, local_files, open_files
from slurm_affinode.checkpoint.files.scratch_files import NO_SCRATCH_FILES, NOT_SEARCHED, ScratchOutcome
from slurm_affinode.checkpoint.files.scratch_search import ScratchSearchResult
from slurm_affinode.checkpoint.image.writer import ImageWriter
from slurm_affinode.checkpoint.inspection import TreeFacts, forked_workers
from slurm_affinode.checkpoint.interface import CheckpointError, CudaDriver, Image, Imager, NoRoom, Tree
from slurm_affinode.checkpoint.store.tiers import Tiers
from slurm_affinode.model.gpu import Device
from slurm_affinode.model.suspension import (
    GpuFact,
    LiveRun,
    Manifest,
    Phase,
    Refusal,
    RefusalCode,
    SavedOutput,
    Versions,
)
from slurm_affinode.suspension import messages
from slurm_affinode.suspension.activity import by_index
from slurm_affinode.suspension.context import LOG, GpuAllocations, Gpus, LocalFiles, Streams, SuspendSettings
from slurm_affinode.suspension.interface import AbortedError, Refused, cause
from slurm_affinode.suspension.job.memory_limits import MemoryLimits
from slurm_affinode.suspension.job.process_tree import Member, NotStoppedError, Processes, StoppedJob
from slurm_affinode.suspension.job.registry import Registry, WatchedJob
from slurm_affinode.suspension.job.streams import StreamsError
from slurm_affinode.suspension.memory import cuda_users, gpu_memory, visible_gpus
from slurm_affinode.suspension.notify import SuspensionOutcomes
from slurm_affinode.suspension.records.journal import JobJournal
from slurm_affinode.suspension.records.record import SuspensionFacts
from slurm_affinode.suspension.refusals import ImageFacts, estimate, of_criu, of_services, of_tree
from slurm_affinode.suspension.requeue import NotRequeued, Requeuer
from slurm_affinode.suspension.rollback import Rollback
from slurm_affinode.suspension.suspend import STOP_S, Attempt, Ending, announce, first_facts

_OUTPUT_BYTES = 64 << 20
"""Space reserved for the job's output; if it is larger, the dump fails and the job runs on."""


@dataclass(slots=True, kw_only=True)
class DumpAttempt(Attempt):
    """A suspension that ends with a dump and a requeue."""

    root: Member
    gpu_facts: tuple[GpuFact, ...]
    forked: frozenset[Id]
    """Forked workers, found while their parents still have the device files that they share."""
    tree_bytes: int = 0
    """Size of an image of the stopped tree."""
    trouble: str | None = None
    """A problem that was resolved on the way."""
    periods: tuple[tuple[float, float], ...] = ()
    """Begin and end of the attempts whose files are on this node, in epoch seconds, this one last."""
    scratch: ScratchSearchResult = NOT_SEARCHED
    """Its closed node-local files."""
    local_files: ScratchOutcome = NO_SCRATCH_FILES
    """Whether the image has them, or they tie the job to this node."""
    passed: list[str] = field(default_factory=list)
    """Tiers that did not accept the image, and why."""


class RequeueEnding(Ending[DumpAttempt]):
    """The ending of jobs with ``mode=requeue``."""

    def __init__(
        self, *, node: str, processes: Processes, cuda: CudaDriver, gpus: Gpus, allocations: GpuAllocations,
        imager: Imager, streams: Streams, tiers: Tiers, files: LocalFiles, registry: Registry,
        settings: SuspendSettings, outcomes: SuspensionOutcomes, rollback: Rollback, requeuer: Requeuer,
        wait: Callable[[JobJournal], None], limits: MemoryLimits | None, inspect: Callable[[int, int], TreeFacts],
        jobs_on_node: Callable[[int, float], Collection[int]], versions: Callable[[], Versions],
        now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """``wait``: hands a suspension over to recovery, since Slurm does not respond.

        ``limits``: the memory limits of jobs; ``None``: they are not known. ``inspect``: see ``JobSuspender``.
        ``jobs_on_node``: the IDs of the jobs of a user (UID) on this node at any time since then (epoch); it raises
        ``UnreachableError``.
        """
        self._node = node
        self._processes = processes
        self._cuda = cuda
        self._gpus = gpus
        self._allocations = allocations
        self._imager = imager
        self._streams = streams
        self._tiers = tiers
        self._scratch, self._scratch_records = files.scratch, files.scratch_records
        self._registry = registry
        self._settings = settings
        self._outcomes = outcomes
        self._rollback = rollback
        self._requeuer = requeuer
        self._wait = wait
        self._limits = limits
        self._inspect = inspect
        self._jobs_on_node = jobs_on_node
        self._versions = versions
        self._now = now

    # --- refusals

    def of_job(self, job: WatchedJob) -> Iterable[Refusal]:
        """See ``Ending``."""
        if self._tiers.shared_store is None:
            yield Refusal(RefusalCode.NO_SHARED_STORE, "the site has no shared image store (suspend.shared_store)")
        if job.owner.is_root:
            yield Refusal(RefusalCode.ROOT, "it runs with the rights of root: files are opened with those of its owner")

    def image(self, job: WatchedJob, tree: TreeFacts, gpu_bytes: int) -> ImageFacts:
        """See ``Ending``."""
        return replace(self._image_facts(), room=self._no_room(job, estimate(tree, gpu_bytes, _OUTPUT_BYTES)))

    def _image_facts(self) -> ImageFacts:
        kernel = "" if self._settings.criu_sockets else os.uname().release
        imager = self._imager
        return ImageFacts(
            self._criu(), kernel, no_device_files=imager.why_no_device_files(), no_plugin=imager.why_no_plugin()
        )  # fmt: skip

    def _criu(self) -> str | None:
        try:
            return self._imager.check()
        except CheckpointError:
            return None

    def _no_room(self, job: WatchedJob, image_bytes: int) -> str | None:
        try:
            self._tiers.check_room(job.uid, image_bytes)
        except CheckpointError as error:
            return str(error)
        return None

    # --- the sequence

    def begin(self, job: WatchedJob, journal: JobJournal, why: str, *, busy: bool = False) -> DumpAttempt:
        """See ``Ending``."""
        members = self._processes.members(job.init_pid, job.init_started)
        root = next((member for member in members if member.pid_ns == job.root), None)
        if root is None:
            raise Refused(Refusal(RefusalCode.NOT_STARTED, "its script has ended"))
        cuda = tuple(sorted(cuda_users(self._cuda, (member.pid for member in members))))
        allocated = self._allocated(job) if cuda else ()
        # A courtesy: it saves moving the GPU memory of a job that is refused by the same look at the stopped job.
        with suppress(NotStoppedError):
            try:
                with self._processes.hold(members, _examine):
                    pass
            except AbortedError as error:
                raise Refused(Refusal(RefusalCode.KERNEL_STATE, str(error))) from None
        closed = open_files.unreachable(job.init, [member.id for member in members], job.owner)
        if closed is not None:
            text = f"it has {one_line(closed)} open, which its user can no longer open (the rights to it have changed)"
            raise Refused(Refusal(RefusalCode.UNDUMPABLE, text))
        held_memory = gpu_memory(self._gpus, cuda)
        gpus = visible_gpus(self._cuda, self._gpus, allocated, held_memory) if cuda else ()
        facts = replace(
            first_facts(job, why, members, cuda, self._now()),
            root_pid=root.pid, gpus=_gpu_count(job), gpu_model=gpus[0].model if gpus else None,
            gpu_bytes=sum(held_memory.values()),
        )  # fmt: skip
        return DumpAttempt(
            job=job, journal=journal, members=members, facts=facts, root=root, gpu_facts=gpus,
            stop=StoppedJob(self._processes, job.init),
            forked=forked_workers(self._inspect(job.init_pid, root.pid), cuda),
        )  # fmt: skip

    def _allocated(self, job: WatchedJob) -> Sequence[Device]:
        """Return the GPUs of the job on this node by Slurm's record, as a restore does.

        An agent that has just started may not know them, or only those that processes use. Raises ``Refused`` and
        ``GpuError``.
        """
        if job.slurm is None:
            return job.devices or ()
        indices = self._allocations.of(job.slurm)
        devices = by_index(self._gpus.devices(), indices) if indices else None
        if devices is None:
            text = "its GPUs are unknown, so it could not be restored: is the prolog set up?"
            raise Refused(Refusal(RefusalCode.GPU_NUMBERS, text))
        return devices

    def finish(self, attempt: DumpAttempt) -> None:
        """See ``Ending``."""
        job = attempt.job
        self._stop(attempt)
        self._dump(attempt)
        announce(self._registry, attempt, Phase.REQUEUEING)
        self._requeuer.requeue(job.job_id, job.restarts)
        if self._settings.notices:
            job.say(f"suspended on {self._node}: {messages.reason(attempt.facts.why or '')}")
            if attempt.local_files.text:
                job.say(messages.reason(attempt.local_files.text))
        if not self._processes.end(job.init_pid, job.init_started, timeout_s=self._settings.kill_s):
            LOG.error("job %s: processes are left after SIGKILL", job.job_id)
        if self._limits is not None:
            self._limits.lower(job.job_id)
        announce(self._registry, attempt, Phase.QUEUED)
        self._outcomes.queued(attempt.journal)

    def _stop(self, attempt: DumpAttempt) -> None:
        """Stop the whole job and repeat the admission. Raises ``AbortedError``, and the errors of the stop.

        Earlier checks are a courtesy to the user: the processes ran on, and may be others by now. Until the dump is
        complete or rolled back, none of them runs, so this check counts.
        """
        job = attempt.job
        attempt.periods = self._periods(attempt)
        # Accounting may take seconds to respond: queried before the stop. Jobs that start later have processes.
        other_jobs = self._other_jobs(job, attempt.periods[0][0]) if self._scratch.copies else None
        members = self._processes.all_processes(job.init_pid, job.init_started)
        before = attempt.stopped_by_others(members)  # may have changed since it began
        announce(self._registry, attempt, Phase.PARKED, SuspensionFacts(stopped_pids=before))
        attempt.stop.stop(timeout_s=STOP_S, examine=_examine)
        tree = self._inspect(job.init_pid, attempt.root.pid)
        cuda = attempt.facts.cuda_pids or ()
        image = self._image_facts()  # the stores check their room when they are written to
        refusals = [
            *of_criu(image, tree),
            *of_services(image, tree),
            *of_tree(tree, cuda, job.owner, image.no_device_files, attempt.forked),
        ]
        if refusals:
            raise AbortedError(refusals[0].text)
        all_processes = [member.id for member in self._processes.all_processes(job.init_pid, job.init_started)]
        attempt.periods = self._periods(attempt)
        attempt.scratch = self._scratch.find(job.init, all_processes, job.owner, attempt.periods, other_jobs)
        files = 0 if attempt.scratch.why_not is not None else attempt.scratch.total_bytes
        attempt.tree_bytes = estimate(tree, 0, _OUTPUT_BYTES) + files  # includes the GPU memory by now

    def _periods(self, attempt: DumpAttempt) -> tuple[tuple[float, float], ...]:
        job = attempt.job
        now = self._now()
        earlier = self._scratch_records.of(attempt.record.key, job.uid).read().periods
        return (*earlier, (self._processes.began(job.init_started, now), now))

    def _other_jobs(self, job: WatchedJob, since_epoch: float) -> str | None:
        """Return why other jobs of the user may have created files on this node; ``None``: there were none."""
        try:
            other_jobs = sorted(set(self._jobs_on_node(job.uid, since_epoch)) - {job.job_id})
        except AffinodeError as error:
            return f"it is not known whether other jobs of its user ran on this node: {one_line(str(error))}"
        if not other_jobs:
            return None
        return f"other jobs of its user ran on this node, and may have created some of them: {other_jobs[-1]}"

    def _dump(self, attempt: DumpAttempt) -> None:
        job = attempt.job
        image = self._tiers.write(
            attempt.journal.key, partial(self._fill, attempt), uid=job.uid, estimate=attempt.tree_bytes,
            at_least=self._next_seq(attempt), passed=attempt.passed.append,
        )  # fmt: skip
        self._tiers.settle(image, passed=attempt.passed.append)
        passed = "; ".join(dict.fromkeys(attempt.passed)) or None
        local, record = attempt.local_files, self._scratch_records.of(attempt.record.key, job.uid)
        required = record.read_or_default().required
        if local.kind == "tied" and required is None and job.slurm is not None:
            required = ",".join(job.slurm.nodes_required)
        facts = SuspensionFacts(
            image_bytes=image.manifest.size, trouble=attempt.trouble, passed=passed, local_files=local.text or None,
            tied=True if local.kind == "tied" else None,
            required_nodes=required,
        )  # fmt: skip
        announce(self._registry, attempt, Phase.DUMPED, facts)

    def _fill(self, attempt: DumpAttempt, writer: ImageWriter) -> Image:
        """Dump into one store. Raises ``NoRoom`` if it is full; the tree can then be dumped into another one."""
        job = attempt.job
        removed = deleted_files.ahead([member.id for member in self._members(attempt)])
        announce(self._registry, attempt, Phase.DUMPING, SuspensionFacts(seq=writer.seq, removed=removed))
        writer.follow()
        before = set(attempt.record.stopped_pids or ())
        stopped = frozenset(member.pid_ns for member in self._members(attempt) if member.pid in before)
        tree = Tree(job.init, attempt.root.pid, attempt.root.pid_ns, job.owner, attempt.forked, stopped)
        try:
            # Slurm continues and ends the processes of a job that it requeues, also for others: dumped processes must
            # not run on, so they are held until they are killed.
            self._imager.dump(tree, writer.criu_fd, timeout_s=self._settings.dump_s, stop=attempt.stop)
            attempt.local_files = self._scratch.save(
                job.init, attempt.scratch, writer.fd, job.owner, self._node,
                kept_paths=local_files.stored(writer.criu_fd), timeout_s=self._settings.dump_s,
            )  # fmt: skip
            self._record_periods(attempt)
            outputs = self._streams.save(job.init, writer.save, job.owner)
            return writer.commit(self._manifest(attempt, outputs, writer))
        except StreamsError as error:
            raise AbortedError(str(error)) from None
        except NoRoom as error:
            attempt.trouble = f"its image did not fit where it was dumped to first: {error}"
            deleted_files.forget(job.init, [member.id for member in self._members(attempt)], job.owner)
            raise

    def _record_periods(self, attempt: DumpAttempt) -> None:
        """Record when the files of a tied job were made. Raises ``AbortedError``: later they would not be found."""
        record = self._scratch_records.of(attempt.record.key, attempt.job.uid)
        if attempt.local_files.kind == "tied" and not record.write(
            lambda facts: replace(facts, periods=attempt.periods)
        ):
            raise AbortedError("its files on this node cannot be recorded; see the log of the agent")

    def _next_seq(self, attempt: DumpAttempt) -> int:
        """Return a number above that of every image of the job, in any store."""
        job, newest = attempt.job, attempt.job.suspensions
        run = LiveRun(attempt.journal.key, job.uid, job.restarts)
        for store in self._tiers.stores:
            try:
                image = store.find(run)
            except (CheckpointError, OSError):
                continue  # damaged: its number is in use, and the store assigns the next
            newest = max(newest, 0 if image is None else image.manifest.seq)
        return newest + 1

    def _manifest(self, attempt: DumpAttempt, outputs: tuple[SavedOutput, ...], writer: ImageWriter) -> Manifest:
        job, record = attempt.job, attempt.record
        numbers = {member.pid: member.pid_ns for member in attempt.members}
        return Manifest(
            key=record.key,
            seq=writer.seq,
            uid=job.uid,
            gid=job.gid,
            node=self._node,
            restarts=job.restarts,
            started_epoch=record.began_epoch,
            dumped_epoch=self._now(),
            option=job.option,
            versions=self._versions(),
            root_pid=attempt.root.pid_ns,
            cuda_pids=tuple(numbers[pid] for pid in record.cuda_pids or ()),
            gpus=attempt.gpu_facts,
            gpu_bytes=record.gpu_bytes or 0,
            outputs=outputs,
            files=(),
        )

    def _members(self, attempt: DumpAttempt) -> Sequence[Member]:
        return self._processes.members(attempt.job.init_pid, attempt.job.init_started)

    def roll_back(self, attempt: DumpAttempt, error: AffinodeError | OSError) -> None:
        """See ``Ending``."""
        job_id = attempt.job.job_id
        why = cause(error)
        if attempt.phase is Phase.REQUEUEING and not isinstance(error, NotRequeued):
            # Slurm may have requeued it: recovery queries Slurm first, and only recovery may decide on the job.
            LOG.warning("job %s: %s; continued when Slurm responds", job_id, why)
            self._wait(attempt.journal)
            return
        LOG.warning("job %s: the suspension is rolled back: %s", job_id, why)
        self._rollback.drop_image(attempt.journal)  # first: a new agent would requeue the job with it
        self._rollback.resume(attempt.journal)
        self._registry.set_phase(job_id, Phase.RUNNING)
        self._outcomes.ran_on(attempt.journal, why)
        attempt.phase, attempt.failure = Phase.RUNNING, why


def _gpu_count(job: WatchedJob) -> int:
    if job.slurm is not None and job.slurm.gpus_allocated is not None:
        return job.slurm.gpus_allocated.count
    return len(job.devices or ())


def _examine(process: Process) -> None:
    """Prepare a traced process for CRIU; raise ``AbortedError`` if it has a state that a restore would lose."""
    try:
        kernel_states.repeat_waits(process)
        state = kernel_states.lost(process)
    except OSError as error:
        process.check()
        raise AbortedError(f"process {process.pid} cannot be examined: {error.strerror or error}") from None
    if state is not None:
        raise AbortedError(f"process {process.pid} has {state}, which a restore would lose")
