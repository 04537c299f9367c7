"""GPUs that jobs in place share, as ``core.inplace`` sees them: what is free, who holds how much, who may be moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slurm_affinode.agent.inplace.freezer import Freezer
from slurm_affinode.agent.inplace.sleeper import Cards
from slurm_affinode.agent.registry import Registry, WatchedJob
from slurm_affinode.agent.tree import TreeGoneError
from slurm_affinode.agent.watch import name_of
from slurm_affinode.checkpoint import room
from slurm_affinode.core.inplace import Arriving, Awake, Card, Plan, Waiter, plan
from slurm_affinode.model.suspension import Mode, Phase

_MIB = 1 << 20
_LEAVING = frozenset({Phase.LOCKING, Phase.LOCKED})
Unheard = Callable[[Iterable[int]], Mapping[int, Sequence[int]]]
"""``unheard.unheard``, which documents it."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The site's choices for jobs that sleep in place."""

    poll_s: float = 0.1
    freeze_s: float = 10.0
    awake_limit_pct: float = 100.0
    """Share of a GPU's memory that they may hold at once, awake."""
    start_free_pct: float = 0.0
    """Share of a GPU's memory that has to be free for a job to start; 0: it starts at once."""
    deadline_s: float = 600.0
    """For one that is wanted to get its turn."""
    end_on_deadline: bool = False


class Holder(Protocol):
    """A job that wants memory on GPUs."""

    job_id: int

    @property
    def held(self) -> Mapping[str, int]:
        """UUID -> bytes that it has to get."""
        ...

    @property
    def cuda(self) -> tuple[int, ...]:
        """Processes that may hold some of that already."""
        ...


class Sharing:
    """Makes plans for the line of those that want to wake."""

    def __init__(
        self, registry: Registry, freezer: Freezer, cards: Cards, awake_limit_pct: float, unheard: Unheard
    ) -> None:
        """``awake_limit_pct``: share of a GPU that jobs in place may hold at once. ``unheard``: see there."""
        self._registry = registry
        self._freezer = freezer
        self._cards = cards
        self._limit = awake_limit_pct / 100
        self._unheard = unheard

    def cards(self) -> Sequence[Card]:
        """The GPUs of the node with their free memory and what jobs in place may hold, bytes. Raises ``GpuError``."""
        return [
            Card(
                device.uuid,
                name_of(device),
                self._cards.free_bytes(device),
                round((device.memory_mib or 0) * _MIB * self._limit),
                round((device.memory_mib or 0) * _MIB),
            )
            for device in self._cards.devices()
            if device.mig is None
        ]

    def uuids(self, indices: Sequence[int]) -> set[str]:
        """Of the GPUs that Slurm has these numbers for. Raises ``GpuError``."""
        numbers = {one.uuid: one.index if one.minor is None else one.minor for one in self._cards.devices()}
        return {uuid for uuid, number in numbers.items() if number in indices}

    def plan(
        self,
        line: Sequence[Holder],
        coming: Sequence[Holder],
        asleep: frozenset[int],
        idle_s: Callable[[int], float | None],
    ) -> Plan:
        """What is to be done for ``line`` while those that are ``coming`` take their memory back.

        ``asleep``: all jobs that are not awake, these two included. Raises ``GpuError``.
        """
        by_uuid = self._cards.processes()
        arriving = [Arriving(one.job_id, one.held, held_by(by_uuid, one.cuda)) for one in coming]
        awake = [
            self._awake(job, by_uuid, idle_s)
            for job in self._registry.jobs()
            if job.option.mode is Mode.INPLACE and job.job_id not in asleep
        ]
        awake += self._not_heard_of(by_uuid, asleep)
        queue = [Waiter(one.job_id, one.held, held_by(by_uuid, one.cuda)) for one in line]
        return plan(self.cards(), awake, arriving, queue)

    def shortage(self, one: Holder) -> str | None:
        """Why what it has to get yet does not fit now, one line; ``None``: it does. Raises ``GpuError``."""
        has = held_by(self._cards.processes(), one.cuda)
        lacks = {uuid: max(0, need - has.get(uuid, 0)) for uuid, need in one.held.items()}
        return room.shortage(lacks, {card.uuid: card.free for card in self.cards()})

    def _not_heard_of(self, by_uuid: Mapping[str, Mapping[int, int]], asleep: frozenset[int]) -> Iterator[Awake]:
        """What this agent, which has just begun, does not watch yet. Nobody knows how idle it is: it stays."""
        known = asleep | {job.job_id for job in self._registry.jobs()}
        for job_id, pids in self._unheard(sorted(holders(by_uuid))).items():
            if job_id not in known:
                yield Awake(job_id, held_by(by_uuid, pids))

    def _awake(
        self, job: WatchedJob, by_uuid: Mapping[str, Mapping[int, int]], idle_s: Callable[[int], float | None]
    ) -> Awake:
        try:
            pids = [member.pid for member in self._freezer.members(job.init_pid, job.init_started)]
        except TreeGoneError:
            pids = []
        leaving = job.phase in _LEAVING
        return Awake(job.job_id, held_by(by_uuid, pids), None if leaving else idle_s(job.job_id), leaving)


def held_by(by_uuid: Mapping[str, Mapping[int, int]], pids: Sequence[int]) -> dict[str, int]:
    """UUID -> bytes of these processes."""
    mine = set(pids)
    found = {uuid: sum(count for pid, count in one.items() if pid in mine) for uuid, one in by_uuid.items()}
    return {uuid: count for uuid, count in found.items() if count}


def holders(by_uuid: Mapping[str, Mapping[int, int]]) -> frozenset[int]:
    """Processes that are on a GPU."""
    return frozenset(pid for one in by_uuid.values() for pid in one)
