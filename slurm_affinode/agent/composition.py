"""Assembly of the components that act on jobs: storage, drivers, Slurm, and those that suspend, restore and wake."""

from __future__ import annotations

import ipaddress
import os
import platform
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

from slurm_affinode import __version__
from slurm_affinode.base.config import Config
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.node_config import SuspendConfig
from slurm_affinode.base.sizes import parse_size
from slurm_affinode.base.times import parse_span_s
from slurm_affinode.base.users import uids
from slurm_affinode.checkpoint import yama
from slurm_affinode.checkpoint.criu.criu import Criu
from slurm_affinode.checkpoint.cuda.client import Cuda
from slurm_affinode.checkpoint.files.created_files import CreatedFilesOfJobs
from slurm_affinode.checkpoint.files.scratch_files import Policy, ScratchFiles, ScratchRules
from slurm_affinode.checkpoint.files.scratch_record import ScratchRecords
from slurm_affinode.checkpoint.files.service_connections import Services
from slurm_affinode.checkpoint.image.manifest import load_key
from slurm_affinode.checkpoint.image.signatures import Signer
from slurm_affinode.checkpoint.inspection import TreeInspector, collect, memory_facts
from slurm_affinode.checkpoint.interface import CheckpointError, CudaDriver
from slurm_affinode.checkpoint.root_directory import check_above
from slurm_affinode.checkpoint.store.tiers import Tiers, log_problem, open_tiers
from slurm_affinode.gpu.interface import GpuDriver, GpuError, NotSupported
from slurm_affinode.model.gpu import Device
from slurm_affinode.model.suspension import JobKey, Mode, Versions
from slurm_affinode.slurm.accounting.sacct_command import jobs_on_node
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.suspension import messages, metrics
from slurm_affinode.suspension.context import (
    LOG,
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
from slurm_affinode.suspension.inplace.freezer import LinuxFreezer
from slurm_affinode.suspension.inplace.gpu_sharing import Rules, Sharing, unheard
from slurm_affinode.suspension.inplace.queue import Comments
from slurm_affinode.suspension.inplace.scheduler import InPlaceScheduler
from slurm_affinode.suspension.inplace.sockets import NodeSockets
from slurm_affinode.suspension.inplace.suspend import InPlaceEnding
from slurm_affinode.suspension.inplace.wake import Waking
from slurm_affinode.suspension.interface import AgentContext, Orchestration
from slurm_affinode.suspension.job.announcements import DIRECTORY, Announcements
from slurm_affinode.suspension.job.environment import DIRECTORY as ENVIRONMENTS
from slurm_affinode.suspension.job.environment import JobEnvironments
from slurm_affinode.suspension.job.memory_limits import MemoryLimits
from slurm_affinode.suspension.job.peers import Inspector
from slurm_affinode.suspension.job.process_tree import LinuxProcesses, Processes
from slurm_affinode.suspension.job.streams import ProcessStreams
from slurm_affinode.suspension.mail import mailer
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
from slurm_affinode.suspension.suspend import JobSuspender
from slurm_affinode.suspension.wake import JobWaker, Lease

_MIB = 2**20


class _PerThread:
    """One client per thread, created on first use."""

    def __init__(self, make: Callable[[], SlurmClient]) -> None:
        self._make = make
        self._local = threading.local()

    def __getattr__(self, name: str) -> Any:
        client = getattr(self._local, "client", None)
        if client is None:
            client = self._local.client = self._make()
        return getattr(client, name)


def per_thread(make: Callable[[], SlurmClient]) -> SlurmClient:
    """Return a client that any thread may use."""
    return cast(SlurmClient, _PerThread(make))


class DriverGpus:
    """``context.Gpus`` on the driver that the agent samples with."""

    def __init__(self, driver: Callable[[], AbstractContextManager[GpuDriver]]) -> None:
        self._driver = driver

    def devices(self) -> tuple[Device, ...]:
        """Return all GPUs of the node."""
        with self._driver() as driver:
            return tuple(driver.devices())

    def processes(self) -> Mapping[str, Mapping[int, int]]:
        """Return the bytes of GPU memory held, by GPU UUID and PID.

        Raises ``NotSupported`` if the driver does not report them.
        """
        usage: dict[str, dict[int, int]] = {}
        with self._driver() as driver:
            for device in driver.devices():
                process_bytes = usage.setdefault(device.uuid, {})
                for process in driver.processes(device):
                    if process.used_mib is None:  # read as zero, it would let a job move to a GPU without room for it
                        what = f"how much memory process {process.pid} holds on GPU {device.index}"
                        raise NotSupported(f"the driver does not report {what}")
                    process_bytes[process.pid] = round(process.used_mib * _MIB)
        return usage

    def held_bytes(self, pid: int) -> int | None:
        """Return the bytes a process holds on all GPUs, or ``None`` if not known (the driver lists no memory of it)."""
        try:
            amounts = [process_bytes[pid] for process_bytes in self.processes().values() if pid in process_bytes]
        except GpuError:
            return None
        return sum(amounts) if amounts else None

    def free_bytes(self, device: Device) -> int | None:
        """Return the free memory of a device in bytes, or ``None`` if not known."""
        with self._driver() as driver:
            free = driver.free_mib(device)
        return None if free is None else round(free * _MIB)

    def version(self) -> str | None:
        """Return the driver's version, or ``None`` if there is no driver."""
        with self._driver() as driver:
            try:
                return driver.version()
            except GpuError:
                return None


def build(context: AgentContext) -> Orchestration:
    """Build all components that act on jobs. Raises ``AffinodeError`` if this node cannot keep checkpoint images."""
    config = context.config
    suspend = config.suspend
    warning = yama.check()
    if warning is not None:
        LOG.warning("%s", warning)
    gpus = DriverGpus(context.gpus)
    cuda = Cuda(driver_version=gpus.version, held_bytes=gpus.held_bytes)
    services = Services(suspend.services, uids(suspend.service_users))
    criu = Criu(program=suspend.criu, plugin=suspend.criu_plugin, services=services)
    slurm = per_thread(context.slurm)
    root = None if suspend.shared_store is None else suspend.shared_store.parent
    key = load_key(suspend.key_file)
    signer = Signer(key, context.node)

    def report(job: JobKey, text: str) -> None:
        report_problem(notes, job, text)

    limits, reservations = MemoryLimits(suspend.journal.parent / "memory-limits"), Reservations()
    tiers = open_tiers(
        suspend,
        key,
        report=report,
        promised=lambda: limits.promised() + reservations.total(),
    )
    notes = Notes(root, signer, vouched=partial(vouched, tiers))
    _check_stores(suspend, tiers)
    location = Location(cluster_name(config, slurm), context.node)
    settings, clock = SuspendSettings.of(suspend), Clock()
    processes, registry, workers = LinuxProcesses(), context.registry, context.workers
    allocations = GpuAllocations(context.node, context.gpu_indices)
    inspect, streams = TreeInspector(partial(collect, services=services)), ProcessStreams()
    records = Records(
        Journal(suspend.journal, observe=metrics.phase_observer(context.counters)),
        SuspensionLedger(config.ledger_dir, context.node),
        notes,
    )
    absences = Absences(
        suspend.journal.parent if root is None else root, signer, location.cluster,
        keep_s=parse_span_s(suspend.keep_unknown),
    )  # fmt: skip
    files = LocalFiles(
        JobEnvironments(config.agent.run_dir / ENVIRONMENTS),
        CreatedFilesOfJobs(suspend.journal.parent / "created-files"),
        ScratchFiles(_scratch_rules(suspend)),
        ScratchRecords(suspend.journal.parent / "scratch"),
    )
    configuration = SlurmFacts(slurm, cuda, gpus, clock.now)
    memory = HostMemory(
        node=context.node,
        slurm=slurm,
        configuration=configuration,
        processes=processes,
        cuda=cuda,
        gpus=gpus,
        tiers=tiers,
        settings=settings,
        limits=limits,
        reservations=reservations,
        read_memory=memory_facts,
        clock=clock,
    )
    rollback = Rollback(processes, cuda, tiers, limits)
    mails_of_site = mailer(config, workers)
    mails = OwnerMails(context.node, mails_of_site)

    requeuer = partial(Requeuer, slurm, absences, location.cluster, settings.slurm_s, clock)
    in_place = _scheduler(
        context,
        slurm=slurm,
        cuda=cuda,
        gpus=gpus,
        processes=processes,
        ledger=records.ledger,
        mails=mails,
        limits=limits,
        wake_backoff_s=settings.wake_backoff_s,
        clock=clock,
    )
    outcomes = SuspensionOutcomes(
        location=location,
        slurm=slurm,
        processes=processes,
        records=records,
        tiers=tiers,
        files=files,
        mails=mails,
        workers=workers,
        whole_time_limit=settings.whole_time_limit,
    )
    keeper = JobKeeper(
        location=location,
        slurm=slurm,
        processes=processes,
        registry=registry,
        records=records,
        absences=absences,
        tiers=tiers,
        files=files,
        settings=settings,
        workers=workers,
        outcomes=outcomes,
        rollback=rollback,
        requeuer=requeuer(),
        limits=limits,
        in_place=in_place,
    )
    requeued = RequeueEnding(
        node=context.node,
        processes=processes,
        cuda=cuda,
        gpus=gpus,
        allocations=allocations,
        imager=criu,
        streams=streams,
        tiers=tiers,
        files=files,
        registry=registry,
        settings=settings,
        outcomes=outcomes,
        rollback=rollback,
        requeuer=requeuer(),
        wait=keeper.wait,
        limits=limits,
        inspect=inspect,
        jobs_on_node=lambda uid, since: jobs_on_node(uid, context.node, since),
        versions=lambda: _versions(slurm, criu, gpus),
    )
    sleeping = InPlaceEnding(
        node=context.node,
        processes=processes,
        cuda=cuda,
        gpus=gpus,
        registry=registry,
        ledger=records.ledger,
        freezer=LinuxFreezer(),
        sockets=_sockets(config),
        scheduler=in_place,
        outcomes=outcomes,
        mails=mails,
        rollback=rollback,
        clock=clock,
        freeze_s=parse_span_s(config.inplace.freeze_timeout),
        settle_s=parse_span_s(config.inplace.settle),
    )
    suspender = JobSuspender(
        endings={Mode.REQUEUE: requeued, Mode.INPLACE: sleeping},
        cluster=location.cluster,
        slurm=slurm,
        configuration=configuration,
        processes=processes,
        cuda=cuda,
        gpus=gpus,
        memory=memory,
        journal=records.journal,
        registry=registry,
        inspect=inspect,
        lock_s=settings.lock_s,
    )
    restorer = JobRestorer(
        location=location,
        slurm=slurm,
        processes=processes,
        cuda=cuda,
        gpus=gpus,
        allocations=allocations,
        imager=criu,
        streams=streams,
        tiers=tiers,
        files=files,
        records=records,
        memory=memory,
        settings=settings,
        limits=limits,
        mailer=mails_of_site,
        clock=clock,
    )
    prefetcher = Prefetcher(
        location=location,
        tiers=tiers,
        notes=notes,
        workers=workers,
        ahead_s=parse_span_s(suspend.tiers.prefetch),
    )

    store_reader = metrics.StoreReader(context.counters, tiers)

    def tidy(holds_lease: bool) -> None:
        keeper.sweep(holds_lease)
        prefetcher.tick()
        store_reader.read(holds_lease)

    lease = Lease.of(root, location.cluster, signer)
    waker = JobWaker(
        location=location,
        slurm=slurm,
        records=records,
        shared=tiers.shared_store,
        settings=settings,
        lease=lease,
        tidy=tidy,
        over=keeper.record_end,
        counters=context.counters,
    )
    return Orchestration(suspender, restorer, waker, keeper, in_place, outcomes.stop)


def _check_stores(config: SuspendConfig, tiers: Tiers) -> None:
    if config.shared_store is not None:
        check_above(config.shared_store, owner=os.geteuid())
    for why in tiers.missing:
        LOG.warning("image tier not used: %s", why)


def _scratch_rules(config: SuspendConfig) -> ScratchRules:
    return ScratchRules(
        cast(Policy, config.local_files), config.local_directories, parse_size(config.local_files_limit),
        config.local_files_count,
    )  # fmt: skip


def _sockets(config: Config) -> NodeSockets:
    probes = [ipaddress.ip_network(text) for text in config.inplace.probes]
    return NodeSockets(probes=probes, warn=LOG.warning)


def _scheduler(
    context: AgentContext, *, slurm: SlurmClient, cuda: CudaDriver, gpus: Gpus, processes: Processes,
    ledger: SuspensionLedger, mails: OwnerMails, limits: MemoryLimits | None, wake_backoff_s: float, clock: Clock,
) -> InPlaceScheduler:  # fmt: skip
    """Build the scheduler of jobs suspended in place."""
    config, registry, workers = context.config, context.registry, context.workers
    rules, freezer, sockets = _rules(config), LinuxFreezer(), _sockets(config)
    inspector = Inspector(
        announcements=Announcements(config.agent.run_dir / DIRECTORY), shepherd=config.suspend.shepherd
    )
    sharing = Sharing(
        registry, freezer, gpus, rules.awake_limit_pct, partial(unheard, identify=inspector.identify),
        calls=context.calls,
    )  # fmt: skip
    waking = Waking(
        node=context.node, slurm=slurm, cuda=cuda, registry=registry, ledger=ledger, freezer=freezer, sharing=sharing,
        sockets=sockets, mails=mails, limits=limits, clock=clock, freeze_s=rules.freeze_s,
    )  # fmt: skip
    return InPlaceScheduler(
        processes=processes, registry=registry, freezer=freezer, sockets=sockets, sharing=sharing, waking=waking,
        comments=Comments(slurm, workers), rules=rules, workers=workers, mails=mails, limits=limits,
        wake_backoff_s=wake_backoff_s, calls=context.calls,
    )  # fmt: skip


def _rules(config: Config) -> Rules:
    """Return the site's rules for jobs that sleep in place."""
    inplace = config.inplace
    return Rules(
        poll_s=inplace.poll_ms / 1000,
        freeze_s=parse_span_s(inplace.freeze_timeout),
        awake_limit_pct=inplace.awake_limit_pct,
        start_free_pct=inplace.start_pct,
        deadline_s=parse_span_s(inplace.wake_deadline),
        end_on_deadline=inplace.on_deadline == "end",
        max_sleep_s=parse_span_s(inplace.max_sleep),
    )


def report_problem(notes: Notes, key: JobKey, text: str) -> None:
    """Report a problem with a job's checkpoint image in the log and in its note, which ``status`` shows."""
    log_problem(key, text)
    note = notes.read(key.cluster, key.job_id)
    if note is not None:
        with suppress(AffinodeError):
            notes.write(replace(note, trouble=messages.reason(text)))


def cluster_name(config: Config, slurm: SlurmClient) -> str:
    """Return the name of the cluster in Slurm, or the configured one if Slurm does not respond.

    Raises ``AffinodeError`` if neither is known.
    """
    try:
        name = slurm.config().get("ClusterName")
    except AffinodeError:
        name = None
    name = name or config.cluster.name
    if not name:
        raise AffinodeError(
            "the name of the cluster is not known: slurmctld does not respond",
            hint="set cluster.name in the configuration",
        )
    return name


def _versions(slurm: SlurmClient, criu: Criu, gpus: DriverGpus) -> Versions:
    try:
        slurm_version: str | None = slurm.version()
    except AffinodeError:
        slurm_version = None
    try:
        criu_version = criu.check()
    except CheckpointError:
        criu_version = "unknown"
    kernel = platform.release() or os.uname().release
    return Versions(__version__, kernel, criu_version, slurm_version, gpus.version())
