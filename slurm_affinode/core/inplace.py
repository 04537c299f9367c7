"""Planning of GPU memory for jobs suspended in place: which wake, which make room, and why the others wait. Pure.

Jobs that share a GPU take turns in using its memory. Those that want their memory restored form one queue of wake
requests, first come, first served: no job gets a GPU before an earlier request that needs it as well, even if it would
fit and the earlier one does not. Smaller jobs thus never starve a larger one. If there is no room for the first
request, jobs that are idle by policy make room: the cheapest set that frees enough, where the cost of a job is its
bytes divided by its idle time. If that is not enough, busy jobs make room as well once their turn is over, so that
steady load on one job does not starve another.

Memory that jobs with ``mode=inplace`` hold on a GPU, awake or waking, never exceeds its ``limit``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from slurm_affinode.base.text import size

MARGIN = 64 << 20
"""Bytes of a GPU that are left free besides a job's memory: a restore that runs out of memory fails permanently."""
_TRIED_SETS_OF = 10
"""Up to this number of idle jobs, every set is tried (1024); with more, jobs are added in order of cost."""

Bytes = Mapping[str, int]
"""GPU UUID -> bytes on it."""


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """A GPU."""

    uuid: str
    name: str
    """Display name: ``GPU 0``."""
    free: int | None
    """Bytes, as reported by the driver; ``None``: not reported, and no memory is moved there."""
    limit: int
    """Bytes that jobs with ``mode=inplace`` may hold there at a time."""
    total: int = 0
    """Total memory in bytes."""


@dataclass(frozen=True, slots=True)
class Awake:
    """A job with ``mode=inplace`` that has its GPU memory."""

    job_id: int
    held_bytes: Bytes
    idle_s: float | None = None
    """Its idle time, if the policy allows it to be moved out; ``None``: it stays."""
    leaving: bool = False
    """It is being moved out: its memory will be free soon."""
    turn_left_s: float | None = None
    """Seconds until it may be moved out even if it is busy, at most 0: now; ``None``: it stays while it is busy."""

    @property
    def yields(self) -> bool:
        """Whether it may be moved out now, idle or not."""
        return self.idle_s is not None or (self.turn_left_s is not None and self.turn_left_s <= 0)

    @property
    def will_yield(self) -> bool:
        """Whether it is being moved out, or may be at some time."""
        return self.leaving or self.idle_s is not None or self.turn_left_s is not None


@dataclass(frozen=True, slots=True)
class Arriving:
    """An admitted job whose GPU memory is being restored."""

    job_id: int
    needs: Bytes
    restored_bytes: Bytes = field(default_factory=dict)
    """Bytes restored so far."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """A job that waits for its GPU memory to be restored, or for its first."""

    job_id: int
    needs: Bytes
    held_bytes: Bytes = field(default_factory=dict)
    """Bytes that it holds already: its suspension, or an earlier wake, was interrupted."""
    at_most: bool = False
    """It is to start: it needs no more than would be free if all jobs in place slept."""

    @property
    def lacks(self) -> dict[str, int]:
        """Bytes that it still needs, by GPU."""
        return {
            uuid: need - self.held_bytes.get(uuid, 0)
            for uuid, need in self.needs.items()
            if need > self.held_bytes.get(uuid, 0)
        }


@dataclass(frozen=True, slots=True)
class WakePlan:
    """Decisions for the jobs that are awake or wait."""

    wakes: tuple[int, ...] = ()
    """Jobs that may get their memory now."""
    make_room: Mapping[int, int] = field(default_factory=dict)
    """Job to move out -> job that waits for it."""
    waits: Mapping[int, str] = field(default_factory=dict)
    """Job -> why it has to wait, in one line."""
    in_turn: frozenset[int] = frozenset()
    """Jobs that only wait for others in place, each of which makes room when its turn is over."""


@dataclass(slots=True)
class _Room:
    """Room left on the GPUs while a plan is made."""

    cards: Mapping[str, GpuLoad]
    free: dict[str, int]
    bound: dict[str, int]

    def lack(self, needs: Bytes) -> dict[str, int]:
        """Return the missing bytes, by GPU."""
        missing = {uuid: max(need - self.free[uuid], need - self.bound[uuid]) for uuid, need in needs.items()}
        return {uuid: count for uuid, count in missing.items() if count > 0}

    def take(self, needs: Bytes) -> None:
        for uuid, need in needs.items():
            self.free[uuid] -= need
            self.bound[uuid] -= need


def plan(
    cards: Sequence[GpuLoad], awake: Sequence[Awake], arriving: Sequence[Arriving], queue: Sequence[Waiter]
) -> WakePlan:
    """Return which jobs may wake, make room, and wait. ``queue`` is in order of arrival.

    ``awake`` holds every job with ``mode=inplace`` that is neither asleep, nor in the queue, nor ``arriving``.
    """
    room = _room(cards, awake, arriving, queue)
    wakes: list[int] = []
    make_room: dict[int, int] = {}
    waits: dict[int, str] = {}
    in_turn: set[int] = set()
    first: dict[str, int] = {}
    most = _attainable(cards, awake, arriving, queue)
    for waiter in queue:
        lacks = waiter.lacks
        if waiter.at_most:
            lacks = {uuid: need for uuid, lack in lacks.items() if (need := min(lack, most.get(uuid, lack))) > 0}
        uuids = list(lacks)
        unknown = next((uuid for uuid in uuids if uuid not in room.cards or room.cards[uuid].free is None), None)
        ahead = next((first[uuid] for uuid in uuids if uuid in first), None)
        above = next((uuid for uuid in uuids if _above(waiter.needs[uuid], room.cards.get(uuid))), None)
        if above is not None:
            # It needs more than the site's limit: no other job waits behind it.
            waits[waiter.job_id] = _too_much(waiter.needs[above], room.cards[above])
            continue
        if ahead is not None:
            waits[waiter.job_id] = f"job {ahead} is ahead of it in the queue"
            in_turn |= {waiter.job_id} if ahead in in_turn else set()
        elif unknown is not None:
            waits[waiter.job_id] = f"how much memory is free on {_name(room.cards, unknown)} is not known"
        elif not (lack := room.lack(lacks)):
            wakes.append(waiter.job_id)
            room.take(lacks)
            continue
        else:
            chosen, waits[waiter.job_id] = _make_room(waiter, lack, (awake, arriving), make_room, room)
            make_room |= dict.fromkeys(chosen, waiter.job_id)
            in_turn |= {waiter.job_id} if _turns_suffice(lack, awake, arriving) else set()
        for uuid in uuids:
            first.setdefault(uuid, waiter.job_id)
    return WakePlan(tuple(wakes), make_room, waits, frozenset(in_turn))


def _attainable(
    cards: Sequence[GpuLoad], awake: Sequence[Awake], arriving: Sequence[Arriving], queue: Sequence[Waiter]
) -> dict[str, int]:
    """Return the bytes of each GPU that would be free if all jobs in place slept, where free memory is known."""
    holders = [
        *(job.held_bytes for job in awake),
        *(job.restored_bytes for job in arriving),
        *(waiter.held_bytes for waiter in queue),
    ]
    return {
        card.uuid: min(card.limit, card.free - MARGIN + sum(amounts.get(card.uuid, 0) for amounts in holders))
        for card in cards if card.free is not None
    }  # fmt: skip


def _turns_suffice(lack: Bytes, awake: Sequence[Awake], arriving: Sequence[Arriving]) -> bool:
    """Return whether other jobs in place, each after its turn, free enough."""
    arriving_jobs = [Awake(job.job_id, job.needs) for job in arriving]
    return _enough(lack, [*(job for job in awake if job.will_yield), *arriving_jobs])


def _room(
    cards: Sequence[GpuLoad], awake: Sequence[Awake], arriving: Sequence[Arriving], queue: Sequence[Waiter]
) -> _Room:
    free = {card.uuid: (card.free or 0) - MARGIN for card in cards}
    bound = {card.uuid: card.limit for card in cards}
    for amounts in (*(job.held_bytes for job in awake), *(waiter.held_bytes for waiter in queue)):
        for uuid, count in amounts.items():
            if uuid in bound:
                bound[uuid] -= count
    for arrival in arriving:
        for uuid, need in arrival.needs.items():
            if uuid in bound:
                bound[uuid] -= max(need, arrival.restored_bytes.get(uuid, 0))
                free[uuid] -= max(0, need - arrival.restored_bytes.get(uuid, 0))
    return _Room({card.uuid: card for card in cards}, free, bound)


def _make_room(
    waiter: Waiter,
    lack: Bytes,
    rivals: tuple[Sequence[Awake], Sequence[Arriving]],
    yielding: Mapping[int, int],
    room: _Room,
) -> tuple[tuple[int, ...], str]:
    """Return the jobs to move out for ``waiter``, and the reason shown for its wait."""
    awake, arriving = rivals
    holders = [
        job for job in awake if job.job_id != waiter.job_id and any(job.held_bytes.get(uuid, 0) for uuid in lack)
    ]
    leaving = [job for job in holders if job.leaving]
    if _enough(lack, leaving):
        return (), f"{_jobs(leaving)} makes room"
    movable = [job for job in holders if not job.leaving and job.yields and job.job_id not in yielding]
    chosen = cheapest(_remaining_lack(lack, leaving), movable)
    if chosen:
        return tuple(job.job_id for job in chosen), f"{_jobs((*leaving, *chosen))} makes room"
    return (), _waiting_reason(waiter, lack, (holders, arriving), room)


def cheapest(lack: Bytes, movable: Sequence[Awake]) -> tuple[Awake, ...]:
    """Return the cheapest set of jobs that frees enough, with as few busy ones as possible; empty if there is none."""
    if not lack or not _enough(lack, movable):
        return ()
    ordered = sorted(movable, key=lambda job: (job.idle_s is None, price(job), job.job_id))
    if len(ordered) <= _TRIED_SETS_OF:
        sets = (chosen for count in range(1, len(ordered) + 1) for chosen in combinations(ordered, count))
        return min(
            (chosen for chosen in sets if _enough(lack, chosen)),
            key=lambda chosen: (
                sum(job.idle_s is None for job in chosen),
                sum(map(price, chosen)),
                len(chosen),
                [job.job_id for job in chosen],
            ),
        )
    selection: list[Awake] = []
    while not _enough(lack, selection):
        selection.append(ordered.pop(0))
    for job in sorted(
        selection, key=lambda job: (job.idle_s is None, price(job)), reverse=True
    ):  # drop jobs that more expensive ones made redundant
        rest = [candidate for candidate in selection if candidate is not job]
        if _enough(lack, rest):
            selection = rest
    return tuple(selection)


def price(job: Awake) -> float:
    """Return the cost of moving a job: its bytes, moved out and back, divided by its idle seconds.

    Of a busy job, divided by the seconds since its turn was over, so that each gets its turn.
    """
    seconds = job.idle_s if job.idle_s is not None else -(job.turn_left_s or 0.0)
    return sum(job.held_bytes.values()) / max(1.0, seconds)


def _enough(lack: Bytes, leaving: Iterable[Awake]) -> bool:
    return not _remaining_lack(lack, leaving)


def _remaining_lack(lack: Bytes, leaving: Iterable[Awake]) -> dict[str, int]:
    lacking = dict(lack)
    for job in leaving:
        for uuid in lacking:
            lacking[uuid] -= job.held_bytes.get(uuid, 0)
    return {uuid: count for uuid, count in lacking.items() if count > 0}


def _waiting_reason(
    waiter: Waiter, lack: Bytes, rivals: tuple[Sequence[Awake], Sequence[Arriving]], room: _Room
) -> str:
    holders, arriving = rivals
    uuid = max(lack, key=lambda gpu: lack[gpu])
    need, name = waiter.needs[uuid], _name(room.cards, uuid)
    available = max(0, min(room.free[uuid], room.bound[uuid]))
    busy = [job for job in holders if job.idle_s is None and not job.leaving]
    arriving_jobs = [job for job in arriving if job.needs.get(uuid, 0)]
    if busy:
        turns = all(job.turn_left_s is not None for job in busy)
        by = f"{_jobs(busy)} is busy{', and its turn is not over' if turns else ''}"
    else:
        by = f"{_jobs(arriving_jobs)} is taking its place" if arriving_jobs else "other processes hold the rest"
    return f"it needs {size(need)} on {name}, and {size(available)} is left there: {by}"


def _above(need: int, card: GpuLoad | None) -> bool:
    return card is not None and need > card.limit


def _too_much(need: int, card: GpuLoad) -> str:
    limit = f"the site lets jobs in place hold {size(card.limit)} there at once"
    return f"it needs {size(need)} on {card.name}, and {limit}"


def _jobs(jobs: Sequence[Awake] | Sequence[Arriving]) -> str:
    ids = [str(job.job_id) for job in jobs]
    return f"job {ids[0]}" if len(ids) == 1 else f"each of the jobs {', '.join(ids)}"


def _name(cards: Mapping[str, GpuLoad], uuid: str) -> str:
    return cards[uuid].name if uuid in cards else uuid


def sleeps_forever(needs: Bytes, cards: Sequence[GpuLoad], used: Bytes) -> str | None:
    """Return why a job with this much GPU memory could not wake again; ``None``: it could.

    ``used``: bytes that all processes hold on each GPU, including the job's own.
    """
    for card in cards:
        need = needs.get(card.uuid, 0)
        if _above(need, card):
            return (
                f"its {size(need)} on {card.name} are more than jobs in place may hold there at once "
                f"({size(card.limit)})"
            )
        # Holds even with all other jobs moved out; memory reserved by the driver is in neither number.
        if need and card.free is not None and need + MARGIN > card.free + used.get(card.uuid, 0):
            return f"its {size(need)} on {card.name} leave less than the {size(MARGIN)} that have to stay free there"
    return None
