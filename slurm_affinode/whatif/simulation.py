"""Event simulation of one pool of equal units, in whole seconds.

Within a second, estimates that a job has outrun are corrected first, then jobs are submitted, then jobs end. With EASY,
the queue is examined after each end and each submission; if the others are tried in the order of submission, only after
that of a job that fits. Units of a job whose estimated end has come count as free from the beginning of that second.
These are the rules of the study whose figures the validation reproduces (E. Gaussier et al., SC'15). Without
reservations, and with one for each job, the queue is examined once, at the end of the second.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from slurm_affinode.whatif.policy import SchedulingPolicy
from slurm_affinode.whatif.profile.native import Profile
from slurm_affinode.whatif.waiting import JOB_BITS, JOB_MASK, NONE, BackfillQueue, SizeClasses

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Advance = Callable[[int], None]

_REPORTED = 1000
"""Jobs after which progress is reported."""
_LONGEST_S = 1 << 31
"""Run time of a job that has neither a prediction nor a request."""
_LATE = 1 << 100
"""A time after all others."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in the order of submission, one element each; times in seconds."""

    submit: Ints
    run: Ints
    """At least 1."""
    units: Ints
    """At least 1, and at most the capacity."""
    request: Ints
    """Requested time, at least ``run``; -1: unknown."""
    user: Ints
    """-1: unknown."""
    user_mean: Floats
    """Mean run time of the user's jobs; NaN: unknown."""
    place: Ints
    """Place in the log, which decides between equals where jobs are not in the order of submission."""
    after: Ints | None = None
    """Row of the job that this one continues, and is submitted ``delay`` after its end; -1: none. ``None``: no row
    continues another. The place in the queue is that of the row."""
    delay: Ints | None = None
    predicted: Ints | None = None
    """Predicted run time, for ``times`` "predicted"; -1: unknown, the request counts."""
    priority: Floats | Ints | None = None
    """For ``order`` "priority": the highest first."""

    def __len__(self) -> int:
        return len(self.submit)


def simulate(jobs: Workload, capacity: int, policy: SchedulingPolicy, advance: Advance = lambda count: None) -> Ints:
    """Return the start of each job, in seconds. ``advance`` gets the number of jobs that have started.

    ``policy.requests`` needs requested times. Each job must fit on ``capacity`` units.
    """
    if not len(jobs):
        return np.empty(0, np.int64)
    pool = _POOLS[policy.backfill](jobs, capacity, policy, advance)
    pool.run()
    return np.array(pool.starts, np.int64)


class _Estimates:
    """Run times of jobs, as far as known at their submission."""

    def __init__(self, jobs: Workload, policy: SchedulingPolicy) -> None:
        self._last: dict[int, tuple[int, int]] = {}
        self._users: list[int] = jobs.user.tolist() if policy.times == "last-two" and policy.estimates else []
        predicted = policy.times == "predicted" and policy.estimates
        self.learns = bool(self._users)
        """Whether estimates depend on the jobs that have ended."""
        self._corrected = predicted or self.learns
        self._request: list[int] = jobs.request.tolist() if self._corrected else []
        estimates = _predicted(jobs) if predicted else jobs.request if policy.requests else jobs.run
        self.values: list[int] = estimates.tolist()

    def estimate(self, job: int) -> None:
        """Estimate a job by the mean of the last two of its user that have ended; at most the requested time."""
        last = self._last.get(self._users[job])
        if last is not None and last[1] >= 0:
            self.values[job] = min(self._request[job], max(1, (last[0] + last[1]) // 2))

    def record_run(self, job: int, run: int) -> None:
        """Remember the run time of a job that has ended."""
        if (user := self._users[job]) >= 0:
            self._last[user] = (run, self._last.get(user, (-1, -1))[0])

    def correction(self, job: int, run: int) -> int:
        """Return the time after which a running job turns out to be longer; 0: it is not."""
        return self.values[job] if self._corrected and self.values[job] < run else 0

    def correct(self, job: int) -> None:
        """Estimate a job that has outrun its estimate by its request."""
        self.values[job] = self._request[job]


def _predicted(jobs: Workload) -> Ints:
    """Return the predicted run time of each job: at least 1, and at most the request."""
    if jobs.predicted is None:
        raise ValueError("the jobs have no predicted run times")
    limit = np.where(jobs.request > 0, jobs.request, _LONGEST_S)
    estimates: Ints = np.where(jobs.predicted < 0, limit, np.clip(jobs.predicted, 1, limit))
    return estimates


class _Pool:
    """Strict order: a job that does not fit holds up all that follow."""

    def __init__(self, jobs: Workload, capacity: int, policy: SchedulingPolicy, advance: Advance) -> None:
        self.starts = [-1] * len(jobs)
        self._submit: list[int] = jobs.submit.tolist()
        self._run: list[int] = jobs.run.tolist()
        self._units: list[int] = jobs.units.tolist()
        self._free = capacity
        self._advance = advance
        self._estimates = _Estimates(jobs, policy)
        self._order = policy.order
        self._place: list[int] = jobs.place.tolist() if policy.order == "sjf" else []
        self._rank = _rank(jobs, policy)
        self._next: dict[int, tuple[int, int]] = {}
        """Job -> the row that continues it, and the delay."""
        if jobs.after is not None and jobs.delay is not None:
            rows = zip(jobs.after.tolist(), range(len(jobs)), jobs.delay.tolist(), strict=True)
            self._next = {before: (row, delay) for before, row, delay in rows if before >= 0}
        self._wakes: list[int] = []
        self._begun: list[int] = []
        """Jobs by the order of their starts."""
        self._ends: list[int] = []
        self._corrections: list[int] = []
        self._reservation = _LATE
        """Time at which the next reservation begins."""
        self._prepare()

    def run(self) -> None:
        """Run until all jobs have started."""
        submit, ends, corrections, wakes = self._submit, self._ends, self._corrections, self._wakes
        learns = self._estimates.learns
        continued = {row for row, _ in self._next.values()}
        arrivals = [job for job in range(len(submit)) if job not in continued] if continued else range(len(submit))
        position, count = 0, len(arrivals)
        while len(self._begun) < len(submit):
            now = submit[arrivals[position]] if position < count else _LATE
            if wakes and wakes[0] >> JOB_BITS < now:
                now = wakes[0] >> JOB_BITS
            if ends and ends[0] >> JOB_BITS < now:
                now = ends[0] >> JOB_BITS
            if corrections and corrections[0] >> JOB_BITS < now:
                now = corrections[0] >> JOB_BITS
            now = min(now, self._reservation)
            later = (now + 1) << JOB_BITS
            while corrections and corrections[0] < later:
                self._correct(heappop(corrections) & JOB_MASK, now)
            self._begin(now)
            while position < count and submit[arrivals[position]] == now:
                if learns:
                    self._estimates.estimate(arrivals[position])
                self._enqueue(arrivals[position], now)
                position += 1
            while wakes and wakes[0] < later:
                job = heappop(wakes) & JOB_MASK
                if learns:
                    self._estimates.estimate(job)
                self._enqueue(job, now)
            while ends and ends[0] < later:
                number = heappop(ends) & JOB_MASK
                job = self._begun[number]
                if learns:
                    self._estimates.record_run(job, self._run[job])
                if self._next and job in self._next:
                    row, delay = self._next[job]
                    heappush(wakes, (now + max(1, delay)) << JOB_BITS | row)
                self._release(number, job, now)
            self._finish(now)
        self._advance(len(self._begun) % _REPORTED)

    def _key(self, job: int) -> int:
        if self._order == "sjf":
            return self._estimates.values[job] << JOB_BITS | self._place[job]
        return self._rank[job] if self._rank else 0

    def _start(self, job: int, now: int) -> int:
        """Start a job; return its number in the order of starts."""
        self.starts[job] = now
        self._free -= self._units[job]
        number, run = len(self._begun), self._run[job]
        self._begun.append(job)
        heappush(self._ends, (now + run) << JOB_BITS | number)
        if not len(self._begun) % _REPORTED:
            self._advance(_REPORTED)
        return number

    def _prepare(self) -> None:
        self._queue: list[int] = []

    def _enqueue(self, job: int, now: int) -> None:
        heappush(self._queue, self._key(job) << JOB_BITS | job)

    def _correct(self, number: int, now: int) -> None:
        raise NotImplementedError

    def _begin(self, now: int) -> None:
        pass

    def _release(self, number: int, job: int, now: int) -> None:
        self._free += self._units[job]

    def _finish(self, now: int) -> None:
        queue, units = self._queue, self._units
        while queue and units[queue[0] & JOB_MASK] <= self._free:
            self._start(heappop(queue) & JOB_MASK, now)


def _rank(jobs: Workload, policy: SchedulingPolicy) -> list[int]:
    """Return the rank of each job in an order that is known in advance; empty: there is none.

    By the mean of the user (NaN is last), then the place in the log; or by priority, then the submission.
    """
    if policy.order == "sjf-user":
        order = np.lexsort((jobs.place, jobs.user_mean))
    elif policy.order == "priority":
        if jobs.priority is None:
            raise ValueError("the jobs have no priorities")
        order = np.argsort(-jobs.priority, kind="stable")
    else:
        return []
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    return list(ranks.tolist())


class _FirstFit(_Pool):
    """Each job that fits is started, in order; nothing is reserved for a larger one."""

    def _prepare(self) -> None:
        self._classes = SizeClasses(self._units)

    def _enqueue(self, job: int, now: int) -> None:
        self._classes.add(job, self._key(job))

    def _finish(self, now: int) -> None:
        # Units become fewer with each start, so a job that did not fit does not fit later in the same second.
        while self._free and (entry := self._classes.first(self._free)) != NONE:
            job = entry & JOB_MASK
            self._classes.remove(job)
            self._start(job, now)


class _Easy(_Pool):
    """First come, first served, with a reservation for the first job; others start before it if they do not delay it.

    The order is that in which the others are tried. With priorities, the first job is that with the highest one.
    """

    def _prepare(self) -> None:
        self._running: list[int] = []
        """Estimated end and number of the running jobs, ascending."""
        self._released: set[int] = set()
        """Numbers of jobs whose units count as free: they end in this second."""
        self._first = -1
        """The first job, once it does not fit."""
        self._count = 0
        """Number of waiting jobs."""
        self._in_order: list[int] = []
        """Keys and jobs in the order in which they come first, and perhaps some that have started."""
        self._waits = bytearray(len(self._submit))
        """Which of the jobs wait behind the first one."""
        estimates = self._estimates.values
        positions = None if self._order == "sjf" else self._rank or range(len(estimates))
        self._backfill_queue = BackfillQueue(self._units, estimates, positions)

    def _correct(self, number: int, now: int) -> None:
        job = self._begun[number]
        before = (self.starts[job] + self._estimates.values[job]) << JOB_BITS | number
        del self._running[bisect_left(self._running, before)]
        self._estimates.correct(job)
        insort(self._running, (self.starts[job] + self._estimates.values[job]) << JOB_BITS | number)

    def _begin(self, now: int) -> None:
        running, later = self._running, (now + 1) << JOB_BITS
        if not running or running[0] >= later:
            return
        due = 0
        while due < len(running) and running[due] < later:
            number = running[due] & JOB_MASK
            self._released.add(number)
            self._free += self._units[self._begun[number]]
            due += 1
        del running[:due]

    def _enqueue(self, job: int, now: int) -> None:
        if not self._count and self._units[job] <= self._free:
            self._begin_job(job, now)
            return
        self._count += 1
        self._wait(job)
        if self._order == "priority" and self._first >= 0 and self._rank[job] < self._rank[self._first]:
            self._wait(self._first)
            self._first = -1
        if self._order != "fcfs" or self._units[job] <= self._free:
            self._examine(now)

    def _release(self, number: int, job: int, now: int) -> None:
        if number in self._released:
            self._released.remove(number)
        else:
            estimated = (self.starts[job] + self._estimates.values[job]) << JOB_BITS | number
            del self._running[bisect_left(self._running, estimated)]
            self._free += self._units[job]
        self._examine(now)

    def _finish(self, now: int) -> None:
        pass

    def _begin_job(self, job: int, now: int) -> None:
        estimate = self._estimates.values[job]
        number = self._start(job, now)
        insort(self._running, (now + estimate) << JOB_BITS | number)
        if after := self._estimates.correction(job, self._run[job]):
            heappush(self._corrections, (now + after) << JOB_BITS | number)

    def _wait(self, job: int) -> None:
        self._waits[job] = 1
        heappush(self._in_order, (self._rank[job] << JOB_BITS if self._order == "priority" else 0) | job)
        self._backfill_queue.add(job, self._key(job))

    def _examine(self, now: int) -> None:
        """Start the first jobs, then others that do not delay the first that does not fit."""
        units, waits, in_order = self._units, self._waits, self._in_order
        if not self._count:
            return
        while True:
            if self._first < 0:
                while in_order and not waits[in_order[0] & JOB_MASK]:
                    heappop(in_order)
                if not in_order:
                    return
                self._first = heappop(in_order) & JOB_MASK
                waits[self._first] = 0
                self._backfill_queue.remove(self._first, self._key(self._first))
            if units[self._first] > self._free:
                break
            self._count -= 1
            self._begin_job(self._first, now)
            self._first = -1
        if self._free and self._backfill_queue.fits(self._free):
            self._backfill(now)

    def _backfill(self, now: int) -> None:
        """Start others that do not delay the first one."""
        units, begun, estimates = self._units, self._begun, self._estimates.values
        lacking = units[self._first] - self._free
        start = _LATE
        for ending in self._running:
            if lacking <= 0 and ending >> JOB_BITS != start:
                break
            start = ending >> JOB_BITS
            lacking -= units[begun[ending & JOB_MASK]]
        window, spare = start - now, -lacking
        while (job := self._backfill_queue.take(self._free, spare, window)) >= 0:
            self._waits[job] = 0
            self._count -= 1
            if estimates[job] > window:
                spare -= units[job]
            self._begin_job(job, now)


class _Conservative(_Pool):
    """Each waiting job has a reservation; others start before it if they delay none of these.

    A job gets the earliest time at which it fits beside the others when it is submitted. When a job ends before its
    estimate, each waiting job, in order, gets an earlier time if there is one. When a job outruns its estimate,
    reservations are made anew, in order.
    """

    def _prepare(self) -> None:
        self._profile = Profile(np.array(self._units, np.int64), self._free)
        self._in_order: list[int] = []
        """Keys and waiting jobs, ascending: the queue of the profile."""
        self._new: list[int] = []
        self._running: dict[int, int] = {}
        """Number of each running job -> estimated end."""
        self._ended_early = self._outrun = False

    def _correct(self, number: int, now: int) -> None:
        job = self._begun[number]
        self._estimates.correct(job)
        self._running[number] = self.starts[job] + self._estimates.values[job]
        self._outrun = True

    def _enqueue(self, job: int, now: int) -> None:
        self._new.append(job)

    def _release(self, number: int, job: int, now: int) -> None:
        self._free += self._units[job]
        expected = self._running.pop(number)
        if expected > now:
            self._profile.advance(now)
            self._profile.add(now, expected, self._units[job])
            self._ended_early = True

    def _finish(self, now: int) -> None:
        profile, in_order, estimates = self._profile, self._in_order, self._estimates.values
        profile.advance(now)
        if self._outrun:
            self._reserve_anew(now)
        elif self._ended_early:
            profile.move_forward()
        self._outrun = self._ended_early = False
        for job in self._new:
            entry = self._key(job) << JOB_BITS | job
            position = bisect_left(in_order, entry)
            in_order.insert(position, entry)
            profile.reserve(position, job, estimates[job])
        self._new.clear()
        due, self._reservation = profile.take_due(now)
        jobs = [in_order[position] & JOB_MASK for position in due]
        for position in reversed(due):
            del in_order[position]
        for job in jobs:
            number = self._start(job, now)
            self._running[number] = now + estimates[job]
            if after := self._estimates.correction(job, self._run[job]):
                heappush(self._corrections, (now + after) << JOB_BITS | number)

    def _reserve_anew(self, now: int) -> None:
        self._profile.clear(now)
        for number, expected in self._running.items():
            self._profile.add(now, expected, -self._units[self._begun[number]])
        self._profile.reserve_all()


_POOLS: dict[str, type[_Pool]] = {
    "none": _Pool, "easy": _Easy, "conservative": _Conservative, "first-fit": _FirstFit,
}  # fmt: skip
