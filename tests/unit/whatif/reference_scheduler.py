"""The rules of docs/whatif.md, second by second, without any index: slow, and independent of the package."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Job:
    number: int
    submit: int
    run: int
    units: int
    request: int
    user: int = 0
    mean: float = 0.0
    predicted: int = 1
    priority: int = 0
    estimate: int = 0
    start: int = -1

    @property
    def end(self) -> int:
        return self.start + self.run

    @property
    def expected(self) -> int:
        return self.start + self.estimate


def schedule(jobs: list[Job], capacity: int, order: str, backfill: str, times: str) -> list[int]:
    """Return the start of each job."""
    waiting: list[Job] = []
    running: list[Job] = []
    history: dict[int, list[int]] = {}
    arrivals = sorted(jobs, key=lambda job: (job.submit, job.number))
    key = {
        "fcfs": lambda job: (job.submit, job.number),
        "sjf": lambda job: (job.estimate, job.number),
        "sjf-user": lambda job: (job.mean, job.number),
        "priority": lambda job: (-job.priority, job.submit, job.number),
    }[order]
    first = key if order == "priority" else lambda job: (job.submit, job.number)
    begun: list[Job] = []
    reserved: dict[int, int] = {}
    now = arrivals[0].submit if arrivals else 0
    while arrivals or waiting:
        new: list[Job] = []
        outrun = [job for job in running if backfill == "conservative" and job.expected == now and job.end > now]
        if backfill in ("easy", "conservative"):
            for job in running:
                if job.expected == now and job.end > now:
                    job.estimate = job.request
        while arrivals and arrivals[0].submit == now:
            job = arrivals.pop(0)
            last = history.get(job.user, [])[-2:]
            job.estimate = {"requested": job.request, "actual": job.run, "last-two": job.request,
                            "predicted": min(job.request, job.predicted)}[times]  # fmt: skip
            if times == "last-two" and len(last) == 2:
                job.estimate = min(job.request, max(1, sum(last) // 2))
            waiting.append(job)
            new.append(job)
            free = capacity - sum(item.units for item in running if item.expected > now)
            if backfill == "easy" and (order != "fcfs" or job.units <= free):
                begun += examine(waiting, running, capacity, now, key, first)
        early = False
        for job in [interval for interval in begun if interval in running and interval.end == now]:
            running.remove(job)
            early |= job.expected > now
            history.setdefault(job.user, []).append(job.run)
            if backfill == "easy":
                begun += examine(waiting, running, capacity, now, key, first)
        if backfill == "conservative":
            begun += conserve(waiting, new, running, reserved, capacity, now, key, bool(outrun), early)
        elif backfill != "easy":
            for job in sorted(waiting, key=key):
                if job.units <= capacity - sum(item.units for item in running):
                    begin(job, waiting, running, now)
                    begun.append(job)
                elif backfill == "none":
                    break
        now += 1
    return [job.start for job in jobs]


def begin(job: Job, waiting: list[Job], running: list[Job], now: int) -> None:
    waiting.remove(job)
    job.start = now
    running.append(job)


def profile(running: list[Job], capacity: int, time: int) -> int:
    """Return the units that are free at a time, by the estimates."""
    return capacity - sum(job.units for job in running if job.expected > time)


def conserve(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    waiting, new, running, reserved, capacity, now, key, outrun, early
) -> list[Job]:
    """Move or make reservations, and start the jobs whose reservation begins; return them."""
    old = sorted((job for job in waiting if job not in new), key=key)
    if outrun:
        reserved.clear()
    for job in [*(old if outrun or early else []), *new]:
        reserved.pop(job.number, None)
        start = now
        while any(
            capacity - sum(item.units for item in running if item.expected > time)
            - sum(item.units for item in waiting if item.number in reserved
                  and reserved[item.number] <= time < reserved[item.number] + item.estimate) < job.units
            for time in range(start, start + job.estimate)
        ):  # fmt: skip
            start += 1
        reserved[job.number] = start
    begun = [job for job in sorted(waiting, key=key) if reserved[job.number] <= now]
    for job in begun:
        del reserved[job.number]
        begin(job, waiting, running, now)
    return begun


def examine(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    waiting: list[Job], running: list[Job], capacity: int, now: int, key, first_by
) -> list[Job]:
    """Start jobs; return them."""
    begun = []
    waiting.sort(key=first_by)
    while waiting and waiting[0].units <= profile(running, capacity, now):
        begun.append(waiting[0])
        begin(waiting[0], waiting, running, now)
    if len(waiting) < 2:
        return begun
    first = waiting[0]
    shadow = min(item.expected for item in running if profile(running, capacity, item.expected) >= first.units)
    for job in sorted(waiting[1:], key=key):
        if job.units > profile(running, capacity, now):
            continue
        if now + job.estimate <= shadow or profile(running, capacity, shadow) - first.units >= job.units:
            begin(job, waiting, running, now)
            begun.append(job)
    return begun
