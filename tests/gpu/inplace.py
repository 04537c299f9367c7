"""The agent's in-place sleep on this machine, without Slurm: its answers are simulated.

Freezer, sockets, locks, GPU memory, queue of wake requests and idle detection are those of the agent.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from slurm_affinode.agent.composition import DriverGpus
from slurm_affinode.base.threads import Workers
from slurm_affinode.checkpoint.cuda.client import Cuda
from slurm_affinode.checkpoint.files.created_files import CreatedFilesOfJobs
from slurm_affinode.checkpoint.files.scratch_files import ScratchFiles, ScratchRules
from slurm_affinode.checkpoint.files.scratch_record import ScratchRecords
from slurm_affinode.checkpoint.image.signatures import Signer
from slurm_affinode.checkpoint.inspection import collect, memory_facts
from slurm_affinode.core.idle import IdleDetector, IdleRule, IdleState, still_idle
from slurm_affinode.gpu.nvml import NvmlDriver
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.suspension import Mode, Phase, SuspendOption
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.suspension.activity import Watch
from slurm_affinode.suspension.context import Clock, LocalFiles, Location, Records, Reservations, SuspendSettings
from slurm_affinode.suspension.inplace.freezer import LinuxFreezer
from slurm_affinode.suspension.inplace.gpu_sharing import Rules, Sharing
from slurm_affinode.suspension.inplace.queue import Comments
from slurm_affinode.suspension.inplace.scheduler import InPlaceScheduler
from slurm_affinode.suspension.inplace.sockets import NodeSockets
from slurm_affinode.suspension.inplace.suspend import InPlaceEnding
from slurm_affinode.suspension.inplace.wake import Waking
from slurm_affinode.suspension.interface import DaemonCalls, Refused
from slurm_affinode.suspension.job.environment import JobEnvironments
from slurm_affinode.suspension.job.peers import Inspector
from slurm_affinode.suspension.job.process_tree import LinuxProcesses
from slurm_affinode.suspension.job.registry import Registry, WatchedJob
from slurm_affinode.suspension.mail import NO_MAILS
from slurm_affinode.suspension.memory import HostMemory
from slurm_affinode.suspension.notify import OwnerMails, SuspensionOutcomes
from slurm_affinode.suspension.records.journal import Journal
from slurm_affinode.suspension.records.ledger import SuspensionLedger
from slurm_affinode.suspension.records.shared_state import Notes
from slurm_affinode.suspension.refusals import SlurmFacts
from slurm_affinode.suspension.rollback import Rollback
from slurm_affinode.suspension.suspend import JobSuspender

POLL_S = 0.1
WINDOW_S = 0.5
FLOORS = {"memory": 1.0, "engine": 1.0, "sm": 1.0, "tensor": 1.0, "dram": 1.0}


class Shepherd:
    """A shepherd that accepts all messages."""

    open = True

    def send(self, message: object) -> bool:
        return True


class Slurm:
    """Reports every job as running since the beginning."""

    def job(self, job: int | str) -> Job:
        values: dict[str, Any] = dict.fromkeys(Job.__dataclass_fields__)
        values |= {
            "job_id": int(job), "user": "somebody", "uid": os.getuid(), "partitions": ("gpu",), "state": "RUNNING",
            "is_held": False, "submit": datetime(2026, 1, 1, tzinfo=UTC), "node_count": 1, "requeue": True,
            "restarts": 0,
            "tres_requested": {}, "tres_allocated": {}, "batch": True, "nodes": ("here",), "steps": (),
        }  # fmt: skip
        return Job(**values)

    def config(self) -> dict[str, str]:
        return {}

    def set_comment(self, job: int | str, text: str) -> None: ...


@dataclass
class InPlace:
    """The jobs of this machine."""

    slurm: SlurmClient
    registry: Registry
    watch: Watch
    scheduler: InPlaceScheduler
    suspender: JobSuspender
    detectors: dict[int, IdleDetector] = field(default_factory=dict)
    states: dict[int, IdleState] = field(default_factory=dict)
    moves: list[float] = field(default_factory=list)
    """Seconds of each suspension that moved memory."""
    trouble: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def watched(self, job_id: int, init: int, root: int) -> None:
        """Register a job that has begun."""
        began = LinuxProcesses().read(init)
        job = WatchedJob(
            job_id=job_id, uid=os.getuid(), gid=os.getgid(), restarts=0,
            option=SuspendOption(window_s=1, mode=Mode.INPLACE), init_pid=init,
            init_started=0 if began is None else began.started, root=root, link=Shepherd(), since_epoch=time.time(),
            slurm=self.slurm.job(job_id), devices=self.watch.devices()[:1],
        )  # fmt: skip
        self.detectors[job_id] = IdleDetector(IdleRule(window_s=WINDOW_S, floors_pct=FLOORS))
        self.registry.put(job)

    def suspend(self, job: WatchedJob, why: str) -> str | None:
        """Suspend the job in place; return the reason if it keeps running."""
        detector, began = self.detectors[job.job_id], time.monotonic()
        try:
            result = self.suspender.suspend(
                job, why, sample_again=lambda: still_idle(detector.rule, self.watch.sample(job, detector.rule))
            )
        except Refused as refused:
            return str(refused)
        finally:
            detector.restart()
            self.states.pop(job.job_id, None)
        if result.failure is None:
            self.moves.append(time.monotonic() - began)
        return result.failure

    def idle_s(self, job_id: int) -> float | None:
        """Return how long a job has been idle in seconds, if its window is full."""
        state = self.states.get(job_id)
        return state.progress_s if state is not None and state.reached else None

    def asleep(self, job_id: int) -> bool:
        """Return whether the job is asleep or about to wake."""
        return self.scheduler.view(job_id) is not None

    def policy(self) -> None:
        """Like the agent's loop: sample the awake jobs, and suspend idle ones for the waiting ones."""
        while not self._stop.wait(POLL_S):
            for job in self.registry.jobs():
                if job.phase is not Phase.RUNNING:
                    continue
                try:
                    detector = self.detectors[job.job_id]
                    self.states[job.job_id] = state = detector.feed(self.watch.sample(job, detector.rule))
                    if state.reached and self.scheduler.needed_by(job.job_id):
                        self.suspend(job, "another one waits")
                except Exception as error:  # the test fails because of it, and the other jobs continue
                    self.trouble.append(f"job {job.job_id}: {type(error).__name__}: {error}")

    def stop(self) -> None:
        """Stop the loop."""
        self._stop.set()


@contextmanager
def sleeping_in_place(cuda: Cuda, nvml: NvmlDriver, work: Path) -> Iterator[InPlace]:
    """Run the agent's parts while the context lasts."""
    watch, freezer, sockets = Watch(nvml, Inspector()), LinuxFreezer(), NodeSockets(warn=print)
    gpus = DriverGpus(watch.driver)
    signer = Signer(bytes(32), "here")
    slurm, tiers, limits = cast(Any, Slurm()), cast(Any, SimpleNamespace(tiers=(), stores=())), None
    processes, registry, workers, clock, settings = LinuxProcesses(), Registry(), Workers(), Clock(), SuspendSettings()
    location, rules = Location("gpu", "here"), Rules(poll_s=POLL_S)
    records = Records(Journal(work / "journal"), SuspensionLedger(work / "ledger", "here"), Notes(None, signer))
    files = LocalFiles(
        JobEnvironments(work / "environment"), CreatedFilesOfJobs(work / "created-files"),
        ScratchFiles(ScratchRules(policy="ignore")), ScratchRecords(work / "scratch"),
    )  # fmt: skip
    mails, configuration = OwnerMails("here", NO_MAILS), SlurmFacts(slurm, cuda, gpus, clock.now)
    calls = DaemonCalls(lambda job_id: made.idle_s(job_id))  # noqa: PLW0108 - it is made below
    sharing = Sharing(registry, freezer, gpus, rules.awake_limit_pct, lambda pids: {}, calls=calls)
    waking = Waking(
        node="here", slurm=slurm, cuda=cuda, registry=registry, ledger=records.ledger, freezer=freezer,
        sharing=sharing, sockets=sockets, mails=mails, limits=limits, clock=clock, freeze_s=rules.freeze_s,
    )  # fmt: skip
    scheduler = InPlaceScheduler(
        processes=processes, registry=registry, freezer=freezer, sockets=sockets, sharing=sharing, waking=waking,
        comments=Comments(slurm, workers), rules=rules, workers=workers, mails=mails, limits=limits,
        wake_backoff_s=settings.wake_backoff_s, calls=calls,
    )  # fmt: skip
    outcomes = SuspensionOutcomes(
        location=location, slurm=slurm, processes=processes, records=records, tiers=tiers, files=files, mails=mails,
        workers=workers,
    )  # fmt: skip
    ending = InPlaceEnding(
        node="here", processes=processes, cuda=cuda, gpus=gpus, registry=registry, ledger=records.ledger,
        freezer=freezer, sockets=sockets, scheduler=scheduler, outcomes=outcomes, mails=mails,
        rollback=Rollback(processes, cuda, tiers, limits), clock=clock, freeze_s=10.0,
    )  # fmt: skip
    memory = HostMemory(
        node="here", slurm=slurm, configuration=configuration, processes=processes, cuda=cuda, gpus=gpus, tiers=tiers,
        settings=settings, limits=limits, reservations=Reservations(), read_memory=memory_facts, clock=clock,
    )  # fmt: skip
    suspender = JobSuspender(
        endings={Mode.INPLACE: ending}, cluster="gpu", slurm=slurm, configuration=configuration, processes=processes,
        cuda=cuda, gpus=gpus, memory=memory, journal=records.journal, registry=registry, inspect=collect, lock_s=20.0,
    )  # fmt: skip
    made = InPlace(slurm, registry, watch, scheduler, suspender)
    scheduler.start()
    thread = threading.Thread(target=made.policy, name="policy", daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.stop()
        thread.join(60.0)
        scheduler.stop()
        for item in threading.enumerate():  # wait for its last iteration, which needs the sockets
            if item.name == "inplace":
                item.join(60.0)
        with suppress(OSError):
            sockets.close()
