"""What is to be seen of jobs that sleep: that somebody asks, that they were let go, that their time has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from slurm_affinode.agent import words
from slurm_affinode.agent.inplace import asking
from slurm_affinode.agent.inplace.freezer import Freezer
from slurm_affinode.agent.inplace.sleeper import Sleeper
from slurm_affinode.agent.inplace.watching import Own, Sockets
from slurm_affinode.core.waketime import wake_time

_STOPS_S = 3.0
"""Slurm's SIGSTOP comes two seconds after its SIGTSTP: what was woken between them would be stopped with its memory
on the GPU."""
_UNSEEN_S = 10.0
"""A job whose sockets cannot be looked at for so long is woken: a request to it would not be noticed."""


class Looks:
    """For one thread."""

    def __init__(self, freezer: Freezer, sockets: Sockets, wake_backoff_s: float) -> None:
        """``wake_backoff_s``: the shortest sleep of a job that nobody could ask."""
        self._freezer = freezer
        self._sockets = sockets
        self._wake_backoff_s = wake_backoff_s
        self._unseen: dict[int, float] = {}

    def requests(self, asleep: Sequence[Sleeper], now: float) -> Iterator[tuple[Sleeper, str]]:
        """Those of whom somebody asks something, and what; or of whom that is not known any more."""
        by_id = {one.job_id: one for one in asleep}
        owners: dict[int, Own] = {one.job_id: one.own for one in asleep if one.own}
        looks = self._sockets.looks(owners)
        self._unseen = {job_id: self._unseen.get(job_id, now) for job_id in owners.keys() - looks.keys()}
        for job_id, since in self._unseen.items():
            if not 0 <= now - since < _UNSEEN_S:
                yield by_id[job_id], "the kernel does not tell what waits on its sockets"
        for job_id, look in looks.items():
            why = asking.meanwhile(by_id[job_id].before, look)
            if why is not None:
                yield by_id[job_id], why

    def stirring(self, asleep: Sequence[Sleeper], *, every: bool) -> Iterator[tuple[Sleeper, str]]:
        """Those whose processes have to be let go, and why; of each one process is looked at, or ``every`` one."""
        for one in asleep:
            why = self._stirs(one, one.pids if every else one.pids[:1])
            if why is not None:
                yield one, why

    def _stirs(self, one: Sleeper, pids: Sequence[int]) -> str | None:
        # First: what has ended leaves its number to others. Its parent is stopped, and would not hear of it.
        ended = self._freezer.ended(pids)
        if ended is not None:
            return f"its process {ended} has ended"
        # A SIGCONT that nobody told of: what runs on would wait for its GPU, and not be seen.
        if self._freezer.moving(pids, one.how) is not None:
            return "its processes were let go by a signal"
        # One that was not sent by Slurm, or while there was no agent that could be told.
        new = sorted(call for call in self._freezer.calls(pids) - one.calls if call[0] not in one.stay)
        return f"{words.signal_name(new[0][1])} waits for its process {new[0][0]}" if new else None

    def in_line(self, sleepers: Sequence[Sleeper], now: float) -> list[Sleeper]:
        """Those that are wanted and may run.

        One that Slurm has suspended (``scontrol suspend``) must not run, whoever asks: it keeps nobody waiting, and
        takes its place in the line when Slurm lets it go on.
        """
        found = []
        for one in sleepers:
            if one.asked_epoch is None or one.waking or one.pauses(now):
                continue
            if slurm := self._slurm_stops(one, now):
                one.waits = one.held_back = f"Slurm {slurm} it; it goes on with: scontrol resume {one.shown}"
                continue
            if one.held_back:
                one.held_back, one.asked_epoch, one.overdue = "", now, False
            found.append(one)
        return found

    def _slurm_stops(self, one: Sleeper, now: float) -> str:
        """What Slurm does with it that is against a wake; empty: nothing."""
        if self._freezer.held(one.init_pid):
            return "has suspended"
        told = one.stop_epoch is not None and 0 <= now - one.stop_epoch < _STOPS_S
        return "is about to suspend" if told else ""

    def due(self, one: Sleeper, now: float, fits: Callable[[Sleeper], bool]) -> str | None:
        """Why it wakes although nobody asks: its time has come, or nobody ever could and there is room (``fits``)."""
        wake = one.option.wake
        if wake == "hold":
            return None
        if wake != "auto":
            try:
                return f"wake={wake}" if wake_time(wake, one.since_epoch) <= now else None
            except ValueError:
                return None
        if one.can_be_asked or now - one.since_epoch < self._wake_backoff_s or not fits(one):
            return None
        return "there is room for it, and it has no socket on which anybody could ask it"
