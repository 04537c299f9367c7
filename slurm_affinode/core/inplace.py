"""Who of those that sleep in place may wake, who makes room for whom, and why the others wait. Pure.

Jobs that share a GPU take turns with its memory. Those that want theirs back stand in one line, first come first
served: nobody gets a GPU before somebody who came earlier and needs that GPU as well, even where he would fit and the
other does not, so that nobody waits for ever behind smaller ones. Whoever is first and finds no room has it made by a
job that is idle by policy: of all sets of such jobs that would be enough the cheapest, where a job costs its bytes over
its idle time.

The bound: what jobs with ``mode=inplace`` hold on a GPU, awake or on their way back, is never let above its ``limit``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from slurm_affinode.sizes import size

MARGIN = 64 << 20
"""Bytes of a GPU that are left free beside what a job held: a restore that runs out of memory fails for good."""
_TRIED_SETS_OF = 10
"""Among so many idle jobs every set is looked at (1024); of more, the cheapest are taken one after the other."""

Bytes = Mapping[str, int]
"""UUID of a GPU -> bytes on it."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU."""

    uuid: str
    name: str
    """Shown to people: ``GPU 0``."""
    free: int | None
    """Bytes, as the driver tells; ``None``: it does not, and nothing is put there."""
    limit: int
    """Bytes that jobs with ``mode=inplace`` may hold there at once."""
    total: int = 0
    """Its memory, bytes."""


@dataclass(frozen=True, slots=True)
class Awake:
    """A job with ``mode=inplace`` that has its GPU memory."""

    job_id: int
    held: Bytes
    idle_s: float | None = None
    """For how long it has been idle, where the policy lets it be moved; ``None``: it stays."""
    leaving: bool = False
    """It is being moved out: what it holds will be free soon."""


@dataclass(frozen=True, slots=True)
class Arriving:
    """A job that was let in and is taking its memory back."""

    job_id: int
    needs: Bytes
    held: Bytes = field(default_factory=dict)
    """What it has back by now."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """A job that wants its GPU memory back, or its first."""

    job_id: int
    needs: Bytes
    held: Bytes = field(default_factory=dict)
    """What it holds of that already: its suspension, or an earlier wake, was cut short."""

    @property
    def lacks(self) -> dict[str, int]:
        """What it has to get."""
        return {
            uuid: need - self.held.get(uuid, 0) for uuid, need in self.needs.items() if need > self.held.get(uuid, 0)
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done now."""

    go: tuple[int, ...] = ()
    """These may take their memory."""
    make_room: Mapping[int, int] = field(default_factory=dict)
    """Job that is to be moved out -> job that waits for that."""
    waits: Mapping[int, str] = field(default_factory=dict)
    """Job -> why it has to wait, one line."""


@dataclass(slots=True)
class _Room:
    """What is left on the GPUs while a plan is made."""

    cards: Mapping[str, Card]
    free: dict[str, int]
    bound: dict[str, int]

    def lack(self, needs: Bytes) -> dict[str, int]:
        """Bytes that are missing, by GPU."""
        missing = {uuid: max(need - self.free[uuid], need - self.bound[uuid]) for uuid, need in needs.items()}
        return {uuid: count for uuid, count in missing.items() if count > 0}

    def take(self, needs: Bytes) -> None:
        for uuid, need in needs.items():
            self.free[uuid] -= need
            self.bound[uuid] -= need


def plan(cards: Sequence[Card], awake: Sequence[Awake], arriving: Sequence[Arriving], queue: Sequence[Waiter]) -> Plan:
    """What is to be done, with the line in the order in which its jobs came.

    ``awake`` holds every job with ``mode=inplace`` that is neither asleep, in the line, nor ``arriving``.
    """
    room = _room(cards, awake, arriving, queue)
    go: list[int] = []
    make_room: dict[int, int] = {}
    waits: dict[int, str] = {}
    first: dict[str, int] = {}
    for waiter in queue:
        lacks = waiter.lacks
        uuids = list(lacks)
        unknown = next((uuid for uuid in uuids if uuid not in room.cards or room.cards[uuid].free is None), None)
        ahead = next((first[uuid] for uuid in uuids if uuid in first), None)
        above = next((uuid for uuid in uuids if _above(waiter.needs[uuid], room.cards.get(uuid))), None)
        if above is not None:
            # Nobody waits behind what cannot be until the site changes its bound.
            waits[waiter.job_id] = _too_much(waiter.needs[above], room.cards[above])
            continue
        if ahead is not None:
            waits[waiter.job_id] = f"job {ahead} asked before it"
        elif unknown is not None:
            waits[waiter.job_id] = f"how much memory is free on {_name(room.cards, unknown)} is not known"
        elif not (lack := room.lack(lacks)):
            go.append(waiter.job_id)
            room.take(lacks)
            continue
        else:
            chosen, waits[waiter.job_id] = _make_room(waiter, lack, (awake, arriving), make_room, room)
            make_room |= dict.fromkeys(chosen, waiter.job_id)
        for uuid in uuids:
            first.setdefault(uuid, waiter.job_id)
    return Plan(tuple(go), make_room, waits)


def _room(
    cards: Sequence[Card], awake: Sequence[Awake], arriving: Sequence[Arriving], queue: Sequence[Waiter]
) -> _Room:
    free = {card.uuid: (card.free or 0) - MARGIN for card in cards}
    bound = {card.uuid: card.limit for card in cards}
    for held in (*(one.held for one in awake), *(one.held for one in queue)):
        for uuid, count in held.items():
            if uuid in bound:
                bound[uuid] -= count
    for coming in arriving:
        for uuid, need in coming.needs.items():
            if uuid in bound:
                bound[uuid] -= max(need, coming.held.get(uuid, 0))
                free[uuid] -= max(0, need - coming.held.get(uuid, 0))
    return _Room({card.uuid: card for card in cards}, free, bound)


def _make_room(
    waiter: Waiter,
    lack: Bytes,
    others: tuple[Sequence[Awake], Sequence[Arriving]],
    taken: Mapping[int, int],
    room: _Room,
) -> tuple[tuple[int, ...], str]:
    """Who has to go for ``waiter``, and what it is told."""
    awake, arriving = others
    there = [one for one in awake if one.job_id != waiter.job_id and any(one.held.get(uuid, 0) for uuid in lack)]
    leaving = [one for one in there if one.leaving]
    if _enough(lack, leaving):
        return (), f"{_jobs(leaving)} makes room"
    movable = [one for one in there if not one.leaving and one.idle_s is not None and one.job_id not in taken]
    chosen = cheapest(_less(lack, leaving), movable)
    if chosen:
        return tuple(one.job_id for one in chosen), f"{_jobs((*leaving, *chosen))} makes room"
    return (), _why(waiter, lack, (there, arriving), room)


def cheapest(lack: Bytes, movable: Sequence[Awake]) -> tuple[Awake, ...]:
    """The set of jobs that frees enough at the lowest price; empty: none does."""
    if not lack or not _enough(lack, movable):
        return ()
    ordered = sorted(movable, key=lambda one: (price(one), one.job_id))
    if len(ordered) <= _TRIED_SETS_OF:
        sets = (chosen for count in range(1, len(ordered) + 1) for chosen in combinations(ordered, count))
        return min(
            (chosen for chosen in sets if _enough(lack, chosen)),
            key=lambda chosen: (sum(map(price, chosen)), len(chosen), [one.job_id for one in chosen]),
        )
    found: list[Awake] = []
    while not _enough(lack, found):
        found.append(ordered.pop(0))
    for one in sorted(found, key=price, reverse=True):  # what a dearer one made needless
        rest = [other for other in found if other is not one]
        if _enough(lack, rest):
            found = rest
    return tuple(found)


def price(one: Awake) -> float:
    """Bytes that have to be moved, and back again, over the seconds for which nobody has missed them."""
    return sum(one.held.values()) / max(1.0, one.idle_s or 0.0)


def _enough(lack: Bytes, leaving: Iterable[Awake]) -> bool:
    return not _less(lack, leaving)


def _less(lack: Bytes, leaving: Iterable[Awake]) -> dict[str, int]:
    left = dict(lack)
    for one in leaving:
        for uuid in left:
            left[uuid] -= one.held.get(uuid, 0)
    return {uuid: count for uuid, count in left.items() if count > 0}


def _why(waiter: Waiter, lack: Bytes, others: tuple[Sequence[Awake], Sequence[Arriving]], room: _Room) -> str:
    there, arriving = others
    uuid = max(lack, key=lambda one: lack[one])
    need, name = waiter.needs[uuid], _name(room.cards, uuid)
    left = max(0, min(room.free[uuid], room.bound[uuid]))
    busy = [one for one in there if one.idle_s is None and not one.leaving]
    coming = [one for one in arriving if one.needs.get(uuid, 0)]
    if busy:
        by = f"{_jobs(busy)} is at work"
    else:
        by = f"{_jobs(coming)} is taking its place" if coming else "others hold the rest"
    return f"it needs {size(need)} on {name}, and {size(left)} is left there: {by}"


def _above(need: int, card: Card | None) -> bool:
    return card is not None and need > card.limit


def _too_much(need: int, card: Card) -> str:
    limit = f"the site lets jobs in place hold {size(card.limit)} there at once"
    return f"it needs {size(need)} on {card.name}, and {limit}"


def _jobs(jobs: Sequence[Awake] | Sequence[Arriving]) -> str:
    ids = [str(one.job_id) for one in jobs]
    return f"job {ids[0]}" if len(ids) == 1 else f"each of the jobs {', '.join(ids)}"


def _name(cards: Mapping[str, Card], uuid: str) -> str:
    return cards[uuid].name if uuid in cards else uuid


def sleeps_forever(needs: Bytes, cards: Sequence[Card], there: Bytes) -> str | None:
    """Why a job with so much memory could not wake again once it slept; ``None``: it could.

    ``there``: what all processes hold of each GPU, the job's own among them.
    """
    for card in cards:
        need = needs.get(card.uuid, 0)
        if _above(need, card):
            return (
                f"its {size(need)} on {card.name} are more than jobs in place may hold there at once "
                f"({size(card.limit)})"
            )
        # Also where everybody else has gone; what the driver keeps for itself is in neither number.
        if need and card.free is not None and need + MARGIN > card.free + there.get(card.uuid, 0):
            return f"its {size(need)} on {card.name} leave less than the {size(MARGIN)} that have to stay free there"
    return None
