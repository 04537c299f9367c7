"""Checks of jobs that sleep in place: which ones have a request, have to be thawed, may join the queue or are due.

They read sockets and the states of processes, and change nothing but the state of a sleeper that Slurm holds back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from slurm_affinode.base.text import span
from slurm_affinode.core.wake_time import wake_time
from slurm_affinode.suspension import messages
from slurm_affinode.suspension.inplace import sockets
from slurm_affinode.suspension.inplace.freezer import Freezer
from slurm_affinode.suspension.inplace.sleeper import Sleeper, WakeState
from slurm_affinode.suspension.inplace.sockets import JobSockets, Sockets

_STOPS_S = 3.0
"""Slurm's SIGSTOP follows its SIGTSTP by two seconds: a job woken in between would be stopped with its memory on the
GPU."""
_UNSEEN_S = 10.0
"""A job is woken if its sockets cannot be read for this long: a request to it would not be noticed."""


class SleeperChecks:
    """Checks of sleeping jobs. For one thread."""

    def __init__(self, freezer: Freezer, sockets: Sockets, wake_backoff_s: float, max_sleep_s: float = 0.0) -> None:
        """``wake_backoff_s``: the shortest sleep of a job that no request can reach; ``max_sleep_s``: see ``Rules``."""
        self._freezer = freezer
        self._sockets = sockets
        self._wake_backoff_s = wake_backoff_s
        self._max_sleep_s = max_sleep_s
        self._unseen: dict[int, float] = {}

    def requests(self, asleep: Sequence[Sleeper], now: float) -> Iterator[tuple[Sleeper, str]]:
        """Yield the jobs with a request, and its description; also those with sockets that can no longer be read."""
        by_id = {sleeper.job_id: sleeper for sleeper in asleep}
        owners: dict[int, JobSockets] = {sleeper.job_id: sleeper.sockets for sleeper in asleep if sleeper.sockets}
        observations = self._sockets.observations(owners)
        self._unseen = {job_id: self._unseen.get(job_id, now) for job_id in owners.keys() - observations.keys()}
        for job_id, since in self._unseen.items():
            if not 0 <= now - since < _UNSEEN_S:
                yield by_id[job_id], "the kernel does not report the state of its sockets"
        for job_id, table in observations.items():
            why = sockets.meanwhile(by_id[job_id].facts.before, table)
            if why is not None:
                yield by_id[job_id], why

    def stirring(self, asleep: Sequence[Sleeper], *, every: bool) -> Iterator[tuple[Sleeper, str]]:
        """Yield the jobs that have to be thawed, and why; checks one process of each, or ``every`` one."""
        for sleeper in asleep:
            why = self._stirs(sleeper, sleeper.pids if every else sleeper.pids[:1])
            if why is not None:
                yield sleeper, why

    def _stirs(self, sleeper: Sleeper, pids: Sequence[int]) -> str | None:
        # First, since the PID of an ended process may be reused. Its parent is stopped and does not notice that it
        # ended.
        ended = self._freezer.find_ended(pids)
        if ended is not None:
            return f"its process {ended} has ended"
        # An unreported SIGCONT: a process that runs would wait for its GPU unnoticed.
        if self._freezer.moving(pids, sleeper.facts.mechanism) is not None:
            return "its processes were let go by a signal"
        # A signal that was not sent by Slurm, or was sent while no agent was running.
        new = sorted(call for call in self._freezer.calls(pids) - sleeper.facts.calls if call[0] not in sleeper.stay)
        return f"{messages.signal_name(new[0][1])} waits for its process {new[0][0]}" if new else None

    def queued(self, sleepers: Sequence[Sleeper], now: float) -> list[Sleeper]:
        """Return the jobs with a wake request that may run.

        A job that Slurm has suspended (``scontrol suspend``) must not run at anyone's request: it keeps no other job
        waiting, and joins the queue when Slurm resumes it.
        """
        ready = []
        for sleeper in sleepers:
            if not sleeper.requested or sleeper.waking or sleeper.failures.pauses(now):
                continue
            if slurm := self._slurm_stops(sleeper, now):
                sleeper.hold_back(
                    f"Slurm {slurm} it; an operator resumes it with: scontrol resume {sleeper.facts.shown}"
                )
                continue
            if sleeper.wake_state is WakeState.HELD_BACK:
                sleeper.requeue(now)
            ready.append(sleeper)
        return ready

    def _slurm_stops(self, sleeper: Sleeper, now: float) -> str:
        """Return how Slurm prevents a wake; empty if it does not."""
        if self._freezer.is_stopped_by_slurm(sleeper.facts.init_pid):
            return "has suspended"
        announced = sleeper.stop_epoch is not None and 0 <= now - sleeper.stop_epoch < _STOPS_S
        return "is about to suspend" if announced else ""

    def due(self, sleeper: Sleeper, now: float, fits: Callable[[Sleeper], bool]) -> str | None:
        """Return why a job wakes without a request.

        Its time has come, or no request can ever reach it and there is room (``fits``). Requests to a port that it had
        not opened yet are not seen, so the time of a sleep is limited.
        """
        wake = sleeper.facts.option.wake
        if wake == "hold":
            return None
        if 0 < self._max_sleep_s <= now - sleeper.facts.since_epoch:
            return f"it has slept for {span(self._max_sleep_s)} (inplace.max_sleep)"
        if wake != "auto":
            try:
                return f"wake={wake}" if wake_time(wake, sleeper.facts.since_epoch) <= now else None
            except ValueError:
                return None
        if sleeper.wakes_on_request or now - sleeper.facts.since_epoch < self._wake_backoff_s or not fits(sleeper):
            return None
        return "there is room for it, and it has no socket on which anybody could ask it"
