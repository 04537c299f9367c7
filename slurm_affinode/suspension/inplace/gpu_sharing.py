"""GPUs shared by jobs in place: free memory, the memory of each holder, and the jobs that may be moved.

A shepherd reconnects within ten seconds after the agent has restarted. Until then the memory of its job counts as held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

from slurm_affinode.base.pidfd import PROC, Process, ancestors, processes
from slurm_affinode.core.inplace import Arriving, Awake, GpuLoad, Waiter, WakePlan, plan
from slurm_affinode.model.gpu import of_slurm
from slurm_affinode.model.suspension import Mode, Phase, SuspendOption
from slurm_affinode.suspension import memory
from slurm_affinode.suspension.activity import name_of
from slurm_affinode.suspension.context import Gpus
from slurm_affinode.suspension.inplace.freezer import Freezer
from slurm_affinode.suspension.interface import DaemonCalls
from slurm_affinode.suspension.job.peers import Identity, Inspector, NotAShepherd, Peer
from slurm_affinode.suspension.job.process_tree import TreeGoneError
from slurm_affinode.suspension.job.registry import Registry, WatchedJob
from slurm_affinode.suspension.memory import held_by

_MIB = 1 << 20
_LEAVING = frozenset({Phase.LOCKING, Phase.LOCKED})
Unheard = Callable[[Iterable[int]], Mapping[int, Sequence[int]]]
"""See ``unheard``."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The site's settings for jobs that sleep in place."""

    poll_s: float = 0.1
    freeze_s: float = 10.0
    awake_limit_pct: float = 100.0
    """Share of a GPU's memory that awake jobs in place may hold at once."""
    start_free_pct: float = 0.0
    """Share of a GPU's memory that has to be free for a job to start; 0: jobs start at once."""
    deadline_s: float = 600.0
    """How long a job may wait in the queue."""
    end_on_deadline: bool = False
    max_sleep_s: float = 0.0
    """Time after which a job wakes without an event; 0: never."""


class Holder(Protocol):
    """A job that needs GPU memory."""

    @property
    def job_id(self) -> int:
        """The raw ID of the job."""
        ...

    @property
    def needed_bytes(self) -> Mapping[str, int]:
        """UUID -> bytes that it needs."""
        ...

    @property
    def cuda(self) -> tuple[int, ...]:
        """Processes that may already hold part of it."""
        ...

    @property
    def verb(self) -> str:
        """The action that it waits for: ``wake`` or ``start``."""
        ...


class Sharing:
    """Plans the queue of jobs that are to wake or start."""

    def __init__(
        self, registry: Registry, freezer: Freezer, gpus: Gpus, awake_limit_pct: float, unheard: Unheard,
        *, calls: DaemonCalls,
    ) -> None:  # fmt: skip
        """``awake_limit_pct``: share of a GPU that jobs in place may hold at once. ``unheard``: see that function."""
        self._registry = registry
        self._freezer = freezer
        self._gpus = gpus
        self._limit = awake_limit_pct / 100
        self._unheard = unheard
        self._calls = calls

    def cards(self) -> Sequence[GpuLoad]:
        """Return the GPUs with their free memory and the limit for jobs in place, in bytes. Raises ``GpuError``."""
        return [
            GpuLoad(
                device.uuid,
                name_of(device),
                self._gpus.free_bytes(device),
                round((device.memory_mib or 0) * _MIB * self._limit),
                round((device.memory_mib or 0) * _MIB),
            )
            for device in self._gpus.devices()
            if device.mig is None
        ]

    def uuids(self, indices: Sequence[int]) -> set[str]:
        """Return the UUIDs of the GPUs with these Slurm indices; empty if they are unknown. Raises ``GpuError``."""
        whole = [device for device in self._gpus.devices() if device.mig is None]
        return {device.uuid for device in of_slurm(whole, indices) or ()}

    def plan(self, line: Sequence[Holder], starting: Sequence[Holder], asleep: frozenset[int]) -> WakePlan:
        """Return the plan for ``line`` while the jobs in ``starting`` restore their memory.

        ``asleep``: all jobs that are not awake, including these two. Raises ``GpuError``.
        """
        by_uuid = self._gpus.processes()
        arriving = [Arriving(job_.job_id, job_.needed_bytes, held_by(by_uuid, job_.cuda)) for job_ in starting]
        awake = [
            self._awake(job, by_uuid)
            for job in self._registry.jobs()
            if job.option.mode is Mode.INPLACE and job.job_id not in asleep
        ]
        awake += self._not_heard_of(by_uuid, asleep)
        queue = [
            Waiter(waiter.job_id, waiter.needed_bytes, held_by(by_uuid, waiter.cuda), at_most=waiter.verb == "start")
            for waiter in line
        ]
        return plan(self.cards(), awake, arriving, queue)

    def shortage(self, job: Holder) -> str | None:
        """Return why the memory that it still needs does not fit now, in one line; ``None`` if it does.

        Raises ``GpuError``.
        """
        has = held_by(self._gpus.processes(), job.cuda)
        lacks = {uuid: max(0, need - has.get(uuid, 0)) for uuid, need in job.needed_bytes.items()}
        return memory.shortage(lacks, {card.uuid: card.free for card in self.cards()})

    def _not_heard_of(self, by_uuid: Mapping[str, Mapping[int, int]], asleep: frozenset[int]) -> Iterator[Awake]:
        """Yield the jobs that an agent which has just started does not watch yet.

        Their idle time is unknown, so they are not suspended for others.
        """
        known_jobs = asleep | {job.job_id for job in self._registry.jobs()}
        for job_id, pids in self._unheard(sorted(holders(by_uuid))).items():
            if job_id not in known_jobs:
                yield Awake(job_id, held_by(by_uuid, pids))

    def _awake(self, job: WatchedJob, by_uuid: Mapping[str, Mapping[int, int]]) -> Awake:
        try:
            pids = [member.pid for member in self._freezer.members(job.init_pid, job.init_started)]
        except TreeGoneError:
            pids = []
        held_bytes = held_by(by_uuid, pids)
        if job.phase in _LEAVING:
            return Awake(job.job_id, held_bytes, leaving=True)
        return Awake(
            job.job_id, held_bytes, self._calls.idle_s(job.job_id), turn_left_s=self._calls.turn_left_s(job.job_id)
        )


def holders(by_uuid: Mapping[str, Mapping[int, int]]) -> frozenset[int]:
    """Return the processes that use a GPU."""
    return frozenset(pid for pids in by_uuid.values() for pid in pids)


_OPTION, _END = 7, 8
"""Positions in a shepherd's arguments (``spank/shepherd_options.c``): option, ``--``."""
_MOST_ARGUMENTS = 8192
"""Bytes of the arguments up to ``--``, with the longest paths."""


def unheard(
    pids: Iterable[int], proc: Path = PROC, identify: Callable[[Peer], Identity] | None = None
) -> Mapping[int, tuple[int, ...]]:
    """Return job ID -> PIDs for those of ``pids`` that belong to jobs with ``mode=inplace``.

    The jobs are identified by their shepherd's arguments. ``identify``: see ``Inspector``.
    """
    identify = identify or Inspector(proc).identify
    by_job: dict[int, tuple[int, ...]] = {}
    own_namespace = str((proc / "self" / "ns" / "pid").readlink())
    for process in processes(pids, proc=proc):
        with suppress(OSError):
            if process.link("ns/pid") == own_namespace:
                continue  # it has no shepherd
            job = _job_above(process, proc, identify)
            if job is not None:
                by_job[job] = (*by_job.get(job, ()), process.pid)
    return by_job


def _job_above(process: Process, proc: Path, identify: Callable[[Peer], Identity]) -> int | None:
    """Return the job of a process, or ``None``.

    Its shepherd is PID 1 of its namespace, and an ancestor of all processes of its job, including those of containers.
    Any user can pass such arguments to a program, but cannot create a namespace in which it would pass for a shepherd.
    """
    for ancestor in chain((process,), ancestors(process, proc=proc)):
        with suppress(OSError, LookupError):
            status = ancestor.status()
            if status["NSpid"].split()[-1] == "1" and _in_place(ancestor):
                with suppress(NotAShepherd):
                    job = identify(Peer(ancestor.pid, int(status["Uid"].split()[1]), 0)).job_id
                    ancestor.stat()  # it still exists, so its PID was not reused
                    return job
    return None


def _in_place(process: Process) -> bool:
    """Return whether its arguments are those of a shepherd of a job in place."""
    try:
        words = process.read("cmdline", _MOST_ARGUMENTS).decode("utf-8", "replace").split("\0")
        return words[_END : _END + 1] == ["--"] and SuspendOption.parse(words[_OPTION]).mode is Mode.INPLACE
    except (OSError, ValueError):
        return False
