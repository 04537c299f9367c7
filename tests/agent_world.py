"""The agent of a node of ``agent_site``, with a fake kernel, driver and CRIU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent_site import Node, Process, Slurm, World, make_job
from job_owner import OWNER

from slurm_affinode.base.threads import Workers
from slurm_affinode.checkpoint import root_directory
from slurm_affinode.checkpoint.files.created_files import CreatedFilesOfJobs
from slurm_affinode.checkpoint.files.scratch_files import (
    NO_SCRATCH_FILES,
    NOT_SEARCHED,
    ScratchFiles,
    ScratchOutcome,
    ScratchRestored,
    ScratchRules,
)
from slurm_affinode.checkpoint.files.scratch_index import INDEX, ScratchIndex
from slurm_affinode.checkpoint.files.scratch_record import ScratchRecords
from slurm_affinode.checkpoint.files.scratch_search import ScratchSearchResult
from slurm_affinode.checkpoint.image.signatures import Signer
from slurm_affinode.checkpoint.inspection import MemoryFacts, ProcessFacts, TreeFacts
from slurm_affinode.checkpoint.interface import (
    Capabilities,
    CudaState,
    Image,
    ImageDamaged,
    InheritFd,
    LockTimeout,
    RestoreFailed,
    RestoreInterrupted,
)
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.checkpoint.store.tiers import Tiers
from slurm_affinode.model.gpu import Device
from slurm_affinode.model.suspension import Mode, SavedOutput, SuspendOption, Versions
from slurm_affinode.suspension.context import (
    Clock,
    GpuAllocations,
    Gpus,
    LocalFiles,
    Location,
    Records,
    Reservations,
    SuspendSettings,
)
from slurm_affinode.suspension.dump import RequeueEnding
from slurm_affinode.suspension.inplace.scheduler import InPlaceScheduler
from slurm_affinode.suspension.interface import Arrival
from slurm_affinode.suspension.job.environment import JobEnvironments
from slurm_affinode.suspension.job.memory_limits import MemoryLimits
from slurm_affinode.suspension.job.process_tree import Member, TreeGoneError
from slurm_affinode.suspension.job.registry import Registry, WatchedJob
from slurm_affinode.suspension.job.shepherd import Hello, Start
from slurm_affinode.suspension.mail import NO_MAILS, Mailer
from slurm_affinode.suspension.memory import HostMemory
from slurm_affinode.suspension.notify import OwnerMails, SuspensionOutcomes
from slurm_affinode.suspension.prefetch import Prefetcher
from slurm_affinode.suspension.records.journal import Journal
from slurm_affinode.suspension.records.ledger import SuspensionLedger
from slurm_affinode.suspension.records.shared_state import Notes, vouched
from slurm_affinode.suspension.records.sweep import Absences
from slurm_affinode.suspension.recovery import JobKeeper
from slurm_affinode.suspension.refusals import SlurmFacts
from slurm_affinode.suspension.requeue import Requeuer
from slurm_affinode.suspension.restore import JobRestorer
from slurm_affinode.suspension.rollback import Rollback
from slurm_affinode.suspension.suspend import Ending, JobSuspender
from slurm_affinode.suspension.wake import JobWaker, Lease

KEY = b"k" * 32
KEEP_UNKNOWN_S = 86400.0


class FakeProcesses:
    """The kernel of one node."""

    def __init__(self, world: World, node: str) -> None:
        self.world, self.node = world, node

    @property
    def machine(self) -> Node:
        return self.world.nodes[self.node]

    def alive(self, pid: int, started: int) -> bool:
        return self.machine.init == pid

    def began(self, started: int, now: float) -> float:
        return now

    def members(self, init_pid: int, init_started: int) -> list[Member]:
        inside = {p.pid for p in self.machine.processes if p.inside}
        return [member for member in self.all_processes(init_pid, init_started) if member.pid not in inside]

    def all_processes(self, init_pid: int, init_started: int) -> list[Member]:
        if self.machine.init != init_pid:
            raise TreeGoneError("gone")
        root = next((p.pid for p in self.machine.processes if p.pid_ns == 2), 0)
        return [
            Member(
                p.pid, p.pid_ns, init_pid if p.pid_ns == 2 else root, 5, "T" if p.stopped else "S", "python", OWNER.uid
            )
            for p in self.machine.processes
        ]

    def stop(self, members) -> None:  # type: ignore[no-untyped-def]
        pids = {member.pid for member in members}
        for p in self.machine.processes:
            p.stopped = p.stopped or p.pid in pids

    def resume(self, members) -> None:  # type: ignore[no-untyped-def]
        self.world.effect("continue")
        pids = {member.pid for member in members}
        for p in self.machine.processes:
            p.stopped = p.stopped and p.pid not in pids

    def stop_all(self, init_pid: int, init_started: int, *, timeout_s: float, but=(), strict=False):  # type: ignore[no-untyped-def]
        members = [item for item in self.all_processes(init_pid, init_started) if item.pid not in but]
        self.stop(members)
        return members

    @contextlib.contextmanager
    def hold(self, members, examine=None):  # type: ignore[no-untyped-def]
        list(members)
        self.world.kept_stopped = True
        try:
            yield
        finally:
            self.world.kept_stopped = False

    def end(self, init_pid: int, init_started: int, *, timeout_s: float, reaped: bool = False) -> bool:
        if self.machine.init == init_pid and self.machine.processes:
            self.world.effect("kill")
            self.machine.processes = []
        return True


class FakeCuda:
    """The driver of one node."""

    def __init__(self, world: World, node: str) -> None:
        self.world, self.node = world, node
        self.times_out: set[int] = set()

    def _find(self, pid: int) -> Process:
        return next(p for p in self.world.nodes[self.node].processes if p.pid == pid)

    def capabilities(self) -> Capabilities:
        return Capabilities("580.1", checkpoint=True)

    def devices(self) -> tuple[str, ...]:
        return (f"GPU-{self.node}-0",)

    def users(self, pids):  # type: ignore[no-untyped-def]
        selected = set(pids)
        result = (p for p in self.world.nodes[self.node].processes if p.pid in selected and p.cuda is not None)
        return frozenset(p.pid for p in result)

    def restore_threads(self, pids):  # type: ignore[no-untyped-def]
        return frozenset(10_000 + pid for pid in self.users(pids))

    def state(self, pid: int) -> CudaState:
        return self._find(pid).cuda or CudaState.RUNNING

    def _move(self, pid: int, name: str, before: CudaState, after: CudaState) -> None:
        process = self._find(pid)
        assert process.cuda is before, (name, process.cuda)
        self.world.effect(name)
        process.cuda = after

    def lock(self, pid: int, *, timeout_ms: int, started: int | None = None) -> None:
        assert started == 5  # the start time of all processes of this world
        if self._find(pid).pid_ns in self.times_out:
            raise LockTimeout("its GPU is busy", code="CUDA_ERROR_NOT_READY")
        self._move(pid, "lock", CudaState.RUNNING, CudaState.LOCKED)

    def checkpoint(self, *pids: int) -> None:
        for pid in pids:
            self._move(pid, "checkpoint", CudaState.LOCKED, CudaState.CHECKPOINTED)

    def restore(self, *pids: int, pairs=None) -> None:  # type: ignore[no-untyped-def]
        for pid in pids:
            self._move(pid, "restore", CudaState.CHECKPOINTED, CudaState.LOCKED)

    def unlock(self, pid: int) -> None:
        self._move(pid, "unlock", CudaState.LOCKED, CudaState.RUNNING)


class FakeImager:
    """CRIU of one node: an image is a file with the number of steps."""

    def __init__(self, world: World, node: str) -> None:
        self.world, self.node = world, node
        self.fails: str | None = None
        self.passes = False
        """Whether the cause of the failure may pass."""

    def check(self) -> str:
        return "4.1.1"

    def why_no_plugin(self) -> str | None:
        """Return ``None``: the plugin can be used."""
        return None

    def why_no_device_files(self) -> str | None:
        return None

    def dump(self, tree, directory_fd: int, *, timeout_s: float, stop) -> None:  # type: ignore[no-untyped-def]
        assert self.world.kept_stopped
        assert all(process.stopped for process in self.world.nodes[self.node].processes)
        stop.release()
        assert not self.world.kept_stopped  # CRIU traces the tree itself
        self.world.effect("dump")
        steps = next(p.steps for p in self.world.nodes[self.node].processes if p.cuda is not None)
        fd = os.open("pages-1.img", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=directory_fd)
        os.write(fd, str(steps).encode())
        os.close(fd)
        stop.hold()

    def restore(  # type: ignore[no-untyped-def]
        self, init, directory_fd, inherit, *, root_pid_ns, timeout_s, pages, user, created, shared, ready
    ) -> int:
        self.world.effect("criu restore")
        if self.fails:
            raise (RestoreInterrupted if self.passes else RestoreFailed)(self.fails)
        fd = os.open("pages-1.img", os.O_RDONLY, dir_fd=directory_fd)
        held = os.read(fd, 20)
        os.close(fd)
        pages.sound(timeout_s)
        ready()
        steps = int(held)
        base = self.world.nodes[self.node].next_pid
        self.world.nodes[self.node].processes = [
            Process(base + 52, 2, cuda=None), Process(base + 53, 3, CudaState.CHECKPOINTED, steps=steps),
        ]  # fmt: skip
        return root_pid_ns


class FakeGpus:
    """NVML of one node."""

    def __init__(self, world: World, node: str) -> None:
        self.world, self.node = world, node
        self.model = "H100"
        self.free = 80 << 30

    def devices(self) -> tuple[Device, ...]:
        return (Device(f"GPU-{self.node}-0", 0, model=self.model, memory_mib=81920.0, minor=0),)

    def processes(self) -> dict[str, dict[int, int]]:
        processes = self.world.nodes[self.node].processes
        return {
            f"GPU-{self.node}-0": {process.pid: 1 << 20 for process in processes if process.cuda is CudaState.RUNNING}
        }

    def free_bytes(self, device: Device) -> int:
        return self.free


class FakeStreams:
    """Streams without output files."""

    def save(self, init, write, user) -> tuple[SavedOutput, ...]:  # type: ignore[no-untyped-def]
        return ()

    def restore_files(self, outputs, fds, saved, user, *, again=False, check=None) -> list[InheritFd]:  # type: ignore[no-untyped-def]
        return []


class FakeScratch(ScratchFiles):
    """The closed node-local files of one node, without the files themselves."""

    def __init__(self) -> None:
        super().__init__(ScratchRules(policy="copy"))
        self.outcome = NO_SCRATCH_FILES
        self.periods: list[Sequence[tuple[float, float]]] = []
        """The periods of each search."""
        self.left = 0
        """How often files were removed after the job had left."""
        self.kept: list[str] = []
        self.ambiguous: str | None = None
        """Other jobs of the user."""

    def find(self, init, tree, owner, periods, others) -> ScratchSearchResult:  # type: ignore[no-untyped-def]
        self.periods.append(periods)
        self.ambiguous = others
        return NOT_SEARCHED

    def save(self, init, search, image_fd, owner, node, *, kept_paths=(), timeout_s) -> ScratchOutcome:  # type: ignore[no-untyped-def]
        tied = None if self.outcome.kind == "copied" else self.outcome.text
        if self.outcome is not NO_SCRATCH_FILES:
            root_directory.write(image_fd, INDEX, ScratchIndex(owner.uid, tied, ()).encoded() or b"")
        return self.outcome

    def restore_files(self, init, index, data, user, record, *, timeout_s) -> ScratchRestored:  # type: ignore[no-untyped-def]
        restored = super().restore_files(init, index, data, user, record, timeout_s=timeout_s)
        return replace(restored, kept_paths=self.kept)

    def remove(self, init, made, user) -> None:  # type: ignore[no-untyped-def]
        pass

    def leave(self, index, owner) -> int:  # type: ignore[no-untyped-def]
        self.left += 1
        return 0


class FakeLink:
    """A connected shepherd that records messages."""

    open = True

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.reaped: dict[int, int] = {}

    def send(self, message: object) -> bool:
        self.sent.append(message)
        return True

    def status_of(self, pid: int) -> int | None:
        return self.reaped.get(pid)

    def forget_status(self, pid: int) -> None:
        self.reaped.pop(pid, None)


class Agent:
    """The agent of one node, created anew after each crash."""

    def __init__(
        self, world: World, node: str, settings: SuspendSettings | None = None, mailer: Mailer = NO_MAILS,
        limits: MemoryLimits | None = None,
    ) -> None:  # fmt: skip
        self.world, self.node = world, node
        disk = world.root / node
        self.cuda, self.imager, self.gpus = FakeCuda(world, node), FakeImager(world, node), FakeGpus(world, node)
        self.scratch = FakeScratch()
        signer, shared = Signer(KEY, node), world.root / "shared"
        self.location = Location("alpha", node)
        self.slurm: Any = Slurm(world)
        self.tiers = Tiers.of(DirectoryStore(disk / "images", KEY), DirectoryStore(shared / "images", KEY))
        self.processes, self.registry, self.workers = FakeProcesses(world, node), Registry(), Workers()
        self.journal = Journal(disk / "journal", clock=world.now)
        self.ledger = SuspensionLedger(shared / "ledger", node)
        self.notes = Notes(shared, signer, vouched=lambda note: vouched(self.tiers, note))
        self.absences = Absences(
            shared, signer, self.location.cluster, keep_s=KEEP_UNKNOWN_S, clock=lambda directory, name: world.now()
        )
        self.environments = JobEnvironments(disk / "environment")
        self.created = CreatedFilesOfJobs(disk / "created-files")
        self.scratch_records = ScratchRecords(disk / "scratch")
        self.settings = settings or SuspendSettings(slurm_s=5, wake_backoff_s=0, raise_limit=limits is not None)
        self.mailer, self.limits = mailer, limits
        self.streams: Any = FakeStreams()
        self.clock = Clock(world.now, world.sleep)
        self.reservations = Reservations()
        self.gpu_indices: dict[int, Sequence[int]] = {}
        self.lease = Lease.of(shared, self.location.cluster, signer)
        self.build()

    def build(self, **changes: Any) -> None:
        """Build what acts on jobs, after a change of its surroundings."""
        for name, value in changes.items():
            assert hasattr(self, name)
            setattr(self, name, value)
        self.mails = OwnerMails(self.node, self.mailer, self.clock.now)
        self.rollback = Rollback(self.processes, self.cuda, self.tiers, self.limits, self.clock.sleep)
        self.outcomes = SuspensionOutcomes(
            location=self.location, slurm=self.slurm, processes=self.processes, records=self.records,
            tiers=self.tiers, files=self.files, mails=self.mails, workers=self.workers,
            whole_time_limit=self.settings.whole_time_limit, now=self.clock.now,
        )  # fmt: skip
        self.keeper = self.keeper_with(None)
        ending = RequeueEnding(
            node=self.node, processes=self.processes, cuda=self.cuda, gpus=self.gpus, allocations=self.allocations,
            imager=self.imager, streams=self.streams, tiers=self.tiers,
            files=self.files, registry=self.registry, settings=self.settings, outcomes=self.outcomes,
            rollback=self.rollback, requeuer=self.requeuer(), wait=self.keeper.wait, limits=self.limits,
            inspect=self.inspect, jobs_on_node=lambda uid, since: self.world.jobs_on_node(),
            versions=lambda: Versions("1", "6", "4.1.1"), now=self.clock.now,
        )  # fmt: skip
        self.suspender = self.suspender_with({Mode.REQUEUE: ending})
        self.restorer = JobRestorer(
            location=self.location, slurm=self.slurm, processes=self.processes, cuda=self.cuda, gpus=self.gpus,
            allocations=self.allocations, imager=self.imager, streams=self.streams,
            tiers=self.tiers, files=self.files, records=self.records, memory=self.host_memory(),
            settings=self.settings, limits=self.limits, mailer=self.mailer, clock=self.clock,
        )  # fmt: skip
        self.waker = self.waker_with()

    @property
    def records(self) -> Records:
        return Records(self.journal, self.ledger, self.notes)

    @property
    def files(self) -> LocalFiles:
        return LocalFiles(self.environments, self.created, self.scratch, self.scratch_records)

    @property
    def allocations(self) -> GpuAllocations:
        return GpuAllocations(self.node, self.gpu_indices)

    @property
    def shared(self) -> DirectoryStore | None:
        return self.tiers.shared_store

    @property
    def local(self) -> DirectoryStore:
        return next(tier.store for tier in self.tiers.tiers if tier.name == "disk")

    def requeuer(self) -> Requeuer:
        return Requeuer(self.slurm, self.absences, "alpha", self.settings.slurm_s, self.clock)

    def keeper_with(self, in_place: InPlaceScheduler | None) -> JobKeeper:
        return JobKeeper(
            location=self.location, slurm=self.slurm, processes=self.processes, registry=self.registry,
            records=self.records, absences=self.absences, tiers=self.tiers, files=self.files, settings=self.settings,
            workers=self.workers, outcomes=self.outcomes, rollback=self.rollback, requeuer=self.requeuer(),
            limits=self.limits, in_place=in_place, now=self.clock.now,
        )  # fmt: skip

    def waker_with(self, **calls: Any) -> JobWaker:
        return JobWaker(
            location=self.location, slurm=self.slurm, records=self.records, shared=self.shared,
            settings=self.settings, lease=self.lease, now=self.clock.now, **calls,
        )  # fmt: skip

    def prefetcher(self, ahead_s: float) -> Prefetcher:
        return Prefetcher(
            location=self.location, tiers=self.tiers, notes=self.notes, workers=self.workers, ahead_s=ahead_s,
            now=self.clock.now,
        )  # fmt: skip

    def host_memory(self, gpus: Gpus | None = None, **changes: Any) -> HostMemory:
        surroundings = {
            "node": self.node, "slurm": self.slurm, "processes": self.processes, "cuda": self.cuda,
            "gpus": gpus or self.gpus, "tiers": self.tiers, "settings": self.settings, "limits": self.limits,
            "reservations": self.reservations, "read_memory": lambda pid: MemoryFacts(1 << 40), "clock": self.clock,
            "configuration": SlurmFacts(self.slurm, self.cuda, gpus or self.gpus, self.clock.now),
        }  # fmt: skip
        return HostMemory(**{**surroundings, **changes})

    def suspender_with(
        self, endings: Mapping[Mode, Ending[Any]], gpus: Gpus | None = None, memory: HostMemory | None = None,
        inspect: Callable[[int, int], TreeFacts] | None = None,
    ) -> JobSuspender:  # fmt: skip
        gpus = gpus or self.gpus
        return JobSuspender(
            endings=endings, cluster="alpha", slurm=self.slurm,
            configuration=SlurmFacts(self.slurm, self.cuda, gpus, self.clock.now), processes=self.processes,
            cuda=self.cuda, gpus=gpus, memory=memory or self.host_memory(gpus), journal=self.journal,
            registry=self.registry, inspect=inspect or self.inspect, lock_s=self.settings.lock_s, now=self.clock.now,
        )  # fmt: skip

    def inspect(self, init_pid: int, root_pid: int) -> TreeFacts:
        """Return all processes, as from ``/proc``."""
        uids = (OWNER.uid,) * 4
        processes = tuple(ProcessFacts(p.pid, "python", uids) for p in self.world.nodes[self.node].processes)
        return TreeFacts(init_pid, root_pid, processes)

    def watched(self, **changes: object) -> WatchedJob:
        job = WatchedJob(
            job_id=7, uid=OWNER.uid, gid=OWNER.gid, restarts=self.world.restarts, option=SuspendOption(),
            init_pid=self.world.nodes[self.node].init or 0, init_started=1, root=2, link=FakeLink(), since_epoch=0,
            slurm=make_job(self.world), devices=self.gpus.devices(),
        )  # fmt: skip
        return replace(job, **changes)  # type: ignore[arg-type]

    def suspend(self, sample_again=lambda: None, **changes: object):  # type: ignore[no-untyped-def]
        return self.suspender.suspend(self.watched(**changes), "idle 15m", sample_again=sample_again)

    def arrival(self) -> Arrival:
        hello = Hello(7, self.world.restarts, True, 0, SuspendOption())
        init = self.world.nodes[self.node].init or 0
        return Arrival(hello, 7, OWNER.uid, OWNER.gid, init, 1, FakeLink(), ())

    def restore(self):  # type: ignore[no-untyped-def]
        """Restore as the daemon does when a shepherd registers before it has started anything."""
        reply = self.restorer.restore(self.arrival())
        if isinstance(reply, Start):
            self.world.start_script(self.node)
        return reply

    def settle(self) -> None:
        """Wait for the copies to the shared store, and end recovery."""
        self.outcomes._copies.join()
        self.keeper._queue.close()

    def images(self, *, shared: bool) -> list[int]:
        store = self.shared if shared else self.local
        assert store is not None
        assert not [image for image in store.images() if isinstance(image, ImageDamaged)]
        return [image.manifest.seq for image in store.images() if isinstance(image, Image)]
