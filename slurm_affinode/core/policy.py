"""The decision to suspend an idle job: the site's rules. Pure.

All reasons against a suspension are returned, not only the first, so that users see everything that prevents it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_affinode.base.text import span
from slurm_affinode.core import wake_time
from slurm_affinode.core.features import may_match
from slurm_affinode.core.idle import IdleState, Verdict
from slurm_affinode.model.suspension import Mode, Pressure, Refusal, RefusalCode, SuspendOption

WAITS_FOR_ROOM = frozenset({"Priority", "Resources"})
"""Slurm's reasons of pending jobs that freed GPUs would help. All others (Dependency, BeginTime, JobHeldUser, QOS and
association limits, ...) keep a job pending regardless of free resources."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Rules for one partition, account or user. ``None``: no rule."""

    max_suspended: int | None = None
    """Maximum number of its jobs suspended at a time, as far as this node can see."""
    min_run_s: float | None = None
    """Overrides the general minimum."""
    exclude: bool = False
    """The agent never suspends its jobs."""


@dataclass(frozen=True, slots=True)
class SuspendPolicy:
    """The site's rules."""

    min_run_s: float = 300.0
    """Minimum run time of an attempt before it is suspended, whatever its GPU activity."""
    max_at_once: int = 1
    """Concurrent suspensions on this node."""
    backoff_s: float = 300.0
    """Minimum run time after a job's first suspension; doubled after each further one."""
    backoff_max_s: float = 21600.0
    short_sleep_s: float = 60.0
    """A sleep in place that ended sooner has gained nothing: the job stays awake for the backoff."""
    max_turn_s: float = 0.0
    """Time for which a busy job in place keeps its GPU memory while another one waits for it; 0: as long as it is
    busy."""
    partitions: Mapping[str, Limit] = field(default_factory=dict)
    accounts: Mapping[str, Limit] = field(default_factory=dict)
    users: Mapping[str, Limit] = field(default_factory=dict)
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A watched job, as input of the policy."""

    job_id: int
    option: SuspendOption
    idle: IdleState | None
    """``None``: not sampled yet."""
    run_s: float | None
    """Run time of this attempt; ``None``: not known."""
    user: str | None
    account: str | None
    partition: str | None
    gpus: int
    gpu_kind: str | None = None
    cpus: int = 0
    memory_mib: int = 0
    suspensions: int = 0
    """Number of earlier suspensions of this submission."""
    busy_with: str | None = None
    """``signalled``, ``suspending``, ``restoring``: an operation on it is in progress."""
    refusals: tuple[Refusal, ...] = ()
    """Why it cannot be suspended at all."""
    failures: int = 0
    """Number of its last suspensions, without a gap, that have failed."""
    failed_s: float = 0.0
    """Time since the last of them."""
    short_sleeps: int = 0
    """In place: number of its last sleeps, without a gap, that were too short."""
    awake_s: float = 0.0
    """Time since the last of them."""
    needed_by: tuple[str, ...] = ()
    """In place: jobs that wait to wake on its GPUs, and for which it has to make room."""
    turn_s: float = 0.0
    """In place: time since it woke, or began to run."""
    shares_gpus: bool | None = None
    """It has shares of GPUs, whose memory other jobs can use while it sleeps in place; ``None``: unknown."""

    @property
    def in_place(self) -> bool:
        """Whether it keeps its allocation and needs no checkpoint image."""
        return self.option.mode is Mode.INPLACE


@dataclass(frozen=True, slots=True)
class Waiting:
    """A pending job, as input of the policy."""

    job_id: int
    shown_id: str
    partitions: tuple[str, ...]
    reason: str | None
    is_held: bool
    priority: int
    gpus: int
    """On each node."""
    gpu_kind: str | None = None
    cpus: int = 0
    """On each node."""
    memory_mib: int = 0
    """On each node."""
    features: str | None = None
    reservation: str | None = None
    required_nodes: tuple[str, ...] = ()
    excluded_nodes: tuple[str, ...] = ()
    tasks: int = 1
    """Tasks of an array that still share one record, as far as they may run concurrently."""


@dataclass(frozen=True, slots=True)
class Promise:
    """GPUs that a node frees, or has just freed, for one pending job (one task of an array)."""

    job_id: int
    node: str
    gpus: int


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """This node and its free resources."""

    name: str
    partitions: tuple[str, ...]
    gpu_kind: str | None
    free_gpus: int
    free_cpus: int
    free_memory_mib: int
    features: tuple[str, ...] = ()
    reservation: str | None = None
    available: bool = True
    """It accepts new jobs: not drained, not down."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Other inputs of a decision.

    If ``waiting`` or ``node`` is ``None`` (unknown), no job is suspended for the sake of pending jobs.
    """

    waiting: tuple[Waiting, ...] | None
    node: NodeRoom | None
    under_way: int = 0
    """Suspensions in progress on this node, without those in place."""
    in_place_under_way: int = 0
    """In-place suspensions in progress, counted separately: they do not wait for the checkpoint images of others."""
    no_room: str | None = None
    """Why the image store has no room."""
    suspended_partitions: Mapping[str, int] = field(default_factory=dict)
    suspended_accounts: Mapping[str, int] = field(default_factory=dict)
    suspended_users: Mapping[str, int] = field(default_factory=dict)
    suspended_known: bool = True
    """The three counts are known. If not, they are empty, and no job with such a limit is suspended."""
    promises: tuple[Promise, ...] = ()
    """Of all nodes: one pending job must not displace two jobs."""

    def with_one_more(self, candidate: Candidate) -> Surroundings:
        """Return a copy that counts the suspension of ``candidate`` as in progress."""
        if candidate.in_place:
            return replace(self, in_place_under_way=self.in_place_under_way + 1)
        return replace(
            self,
            under_way=self.under_way + 1,
            suspended_partitions=_one_more(self.suspended_partitions, candidate.partition),
            suspended_accounts=_one_more(self.suspended_accounts, candidate.account),
            suspended_users=_one_more(self.suspended_users, candidate.user),
        )


def _one_more(counts: Mapping[str, int], name: str | None) -> Mapping[str, int]:
    return counts if name is None else {**counts, name: counts.get(name, 0) + 1}


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about a job, with its reasons."""

    act: bool
    code: str
    """``suspend``, or the code of the first reason against it."""
    text: str
    """One line for users."""
    against: tuple[Refusal, ...] = ()
    """All reasons against it, except the idle window."""
    for_jobs: tuple[str, ...] = ()
    """Pending jobs that could use the GPUs."""
    presses: tuple[Waiting, ...] = ()
    """The same jobs, by priority."""
    busy: bool = False
    """It is to be suspended although it is busy, since its turn is over."""


def _fits(waiting: Waiting, node: NodeRoom) -> bool:
    """Return whether the job waits for resources and could run on this node."""
    return (
        node.available
        and not waiting.is_held
        and waiting.reason in WAITS_FOR_ROOM
        and waiting.gpus > 0
        and bool(set(waiting.partitions) & set(node.partitions))
        and _same_kind(waiting.gpu_kind, node.gpu_kind)
        and waiting.reservation == node.reservation
        and (not waiting.required_nodes or node.name in waiting.required_nodes)
        and node.name not in waiting.excluded_nodes
        and may_match(waiting.features, node.features)
    )


def _same_kind(requested: str | None, present: str | None) -> bool:
    return requested is None or present is None or bool(set(requested.split("+")) & set(present.split("+")))


def _enough(waiting: Waiting, gpus: int, cpus: int, memory_mib: int) -> bool:
    return waiting.gpus <= gpus and waiting.cpus <= cpus and waiting.memory_mib <= memory_mib


def pressing(
    surroundings: Surroundings, candidate: Candidate, other_candidates: Sequence[Candidate] = ()
) -> tuple[Waiting, ...]:
    """Return the pending jobs that need ``candidate`` to be suspended, by priority.

    None needs a job in place: it keeps its allocation, and Slurm allocates shares regardless of free memory.
    A job does not count if it fits into the free resources, or if GPUs have been promised to it. A job that needs the
    GPUs of several jobs of the node counts if ``candidate`` and ``other_candidates``, the further jobs of the node
    with a full idle window, would together free enough.
    """
    node = surroundings.node
    if node is None or surroundings.waiting is None or candidate.in_place:
        return ()
    waiting_jobs: list[Waiting] = []
    gpus, cpus, memory = node.free_gpus, node.free_cpus, node.free_memory_mib
    for waiting in sorted(surroundings.waiting, key=lambda job: (-job.priority, job.job_id)):
        if waiting.job_id == candidate.job_id or not _fits(waiting, node):
            continue
        if _enough(waiting, gpus, cpus, memory):
            gpus, cpus, memory = gpus - waiting.gpus, cpus - waiting.cpus, memory - waiting.memory_mib
            continue
        if not _unserved(waiting, node.name, surroundings.promises):
            continue
        freed = (candidate, *(peer for peer in other_candidates if peer.job_id != candidate.job_id))
        for count in (1, len(freed)):
            part = freed[:count]
            if _enough(
                waiting,
                max(0, gpus) + sum(job.gpus for job in part),
                max(0, cpus) + sum(job.cpus for job in part),
                max(0, memory) + sum(job.memory_mib for job in part),
            ):
                waiting_jobs.append(waiting)
                break
    return tuple(waiting_jobs)


def _unserved(waiting: Waiting, node: str, promises: Sequence[Promise]) -> bool:
    """Return whether a job, or one of its tasks, has no promise yet.

    A promise of ``node`` counts only if it covers the job.
    """
    served = [
        promise
        for promise in promises
        if promise.job_id == waiting.job_id and (promise.node != node or promise.gpus >= waiting.gpus)
    ]
    return len(served) < waiting.tasks


def backoff_s(policy: SuspendPolicy, suspensions: int) -> float:
    """Return the minimum run time after this many suspensions."""
    if suspensions <= 0:
        return 0.0
    return wake_time.backoff_s(policy.backoff_s, policy.backoff_max_s, suspensions)


def too_often(policy: SuspendPolicy, attempts: int, since_s: float) -> Refusal | None:
    """Return why a manual suspension is refused ``since_s`` seconds after the last of ``attempts`` requests."""
    pause = backoff_s(policy, attempts)
    if since_s >= pause:
        return None
    times = "once" if attempts == 1 else f"{attempts} times"
    text = (
        f"its suspension was requested {times} in this run, last {span(since_s)} ago; the next one may be {span(pause)}"
    )
    return Refusal(RefusalCode.BACKOFF, f"{text} after that")


def decide(
    policy: SuspendPolicy, candidate: Candidate, surroundings: Surroundings, other_candidates: Sequence[Candidate] = ()
) -> Decision:
    """Decide whether to suspend ``candidate`` now, with all reasons against it.

    ``other_candidates``: see ``pressing``.
    """
    if candidate.busy_with is not None:
        return Decision(False, "under-way", f"it is being worked on: {candidate.busy_with}")
    presses = pressing(surroundings, candidate, other_candidates)
    against = (*candidate.refusals, *_rules(policy, candidate), *_limits(policy, candidate, surroundings))
    against += tuple(_pressure(candidate, surroundings, presses, other_candidates))
    names = tuple(waiting.shown_id for waiting in presses)
    why = _because(candidate, names)
    idle = candidate.idle
    if idle is None or not idle.reached:
        if candidate.needed_by and _turn_over(policy, candidate) and not against and not policy.dry_run:
            text = f"its turn of {span(policy.max_turn_s)} is over, job {', '.join(candidate.needed_by)} waits to wake"
            return Decision(True, "suspend", text, (), names, busy=True)
        code, now = _not_yet(idle, candidate.option.window_s)
        then = f"then nothing: {against[0].text}" if against else f"then it is suspended: {why}"
        if policy.dry_run and not against:
            then = f"then it would be suspended ({why}), but suspend.dry_run is set"
        return Decision(False, code, f"{now}; {then}", against, names)
    if against:
        return Decision(False, against[0].code, f"{why}, not suspended: {against[0].text}", against, names)
    if policy.dry_run:
        return Decision(False, "dry-run", f"{why}: would be suspended, but suspend.dry_run is set", (), names)
    return Decision(True, "suspend", why, (), names, presses if candidate.option.when is Pressure.PRESSURE else ())


def _turn_over(policy: SuspendPolicy, candidate: Candidate) -> bool:
    return candidate.in_place and 0 < policy.max_turn_s <= candidate.turn_s


def _because(candidate: Candidate, names: tuple[str, ...]) -> str:
    idle = candidate.idle
    length = max(candidate.option.window_s, 0 if idle is None else idle.progress_s)
    idle_text = f"idle {span(length)}"
    if candidate.needed_by:
        return f"{idle_text}, job {', '.join(candidate.needed_by)} waits to wake"
    if candidate.option.when is Pressure.ALWAYS:
        return idle_text
    if not names:
        return idle_text
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    verb = "job waits" if len(names) == 1 else "jobs wait"
    return f"{idle_text}, {len(names)} {verb} for its GPUs ({shown})"


def _not_yet(idle: IdleState | None, window_s: float) -> tuple[str, str]:
    if idle is None:
        return "unknown", f"it has not been sampled yet; after {span(window_s)} of idleness"
    if idle.verdict is Verdict.BUSY:
        return "busy", f"busy ({idle.why}); after {span(idle.window_s)} without a break"
    if idle.verdict is Verdict.UNKNOWN:
        return "unknown", f"unknown is not idle ({idle.why}); after {span(idle.remaining_s)} more of idleness"
    return "window", f"idle for {span(idle.progress_s)}; after {span(idle.remaining_s)} more"


def _rules(policy: SuspendPolicy, candidate: Candidate) -> Iterable[Refusal]:
    for what, name, limits in _named(policy, candidate):
        limit = limits.get(name)
        if limit is not None and limit.exclude:
            yield Refusal(RefusalCode(f"excluded-{what}"), f"the site excludes {what} {name}")
    yield from too_soon(policy, candidate)
    pause = backoff_s(policy, candidate.failures)
    if candidate.failed_s < pause:
        times = "suspension" if candidate.failures == 1 else f"{candidate.failures} suspensions"
        yield Refusal(
            RefusalCode.FAILED, f"its last {times} failed; the next one may be in {span(pause - candidate.failed_s)}"
        )
    pause = backoff_s(policy, candidate.short_sleeps)
    if candidate.awake_s < pause and not candidate.needed_by:
        many = candidate.short_sleeps
        times = "its last sleep was" if many == 1 else f"its last {many} sleeps were"
        yield Refusal(
            RefusalCode.SHORT_SLEEPS,
            f"{times} shorter than {span(policy.short_sleep_s)}, so it stays awake for {span(pause)}; it has been "
            f"awake for {span(int(candidate.awake_s))}",
        )


def too_soon(policy: SuspendPolicy, candidate: Candidate) -> Iterable[Refusal]:
    """Yield why a job has not run long enough.

    Applies to manual suspensions as well: dumps and requeues affect other jobs.
    """
    least = min_run_s(policy, candidate)
    if candidate.run_s is None:
        yield Refusal(RefusalCode.RUN_UNKNOWN, "how long it has run is unknown: slurmctld has not responded yet")
        return
    if candidate.run_s < least:
        yield Refusal(
            RefusalCode.MIN_RUN,
            f"it has run for {span(int(candidate.run_s))}; the site lets each attempt run for {span(least)}",
        )
    pause = backoff_s(policy, candidate.suspensions)
    if candidate.run_s < pause:
        times = "once" if candidate.suspensions == 1 else f"{candidate.suspensions} times"
        yield Refusal(
            RefusalCode.BACKOFF,
            f"it was suspended {times}, so it runs for at least {span(pause)}; it has run for {span(candidate.run_s)}",
        )


def min_run_s(policy: SuspendPolicy, candidate: Candidate) -> float:
    """Return the longest minimum run time of its partition, account and user, else the general one."""
    named = [limits[name].min_run_s for _, name, limits in _named(policy, candidate) if name in limits]
    run_limits = [seconds for seconds in named if seconds is not None]
    return max(run_limits) if run_limits else policy.min_run_s


def _named(policy: SuspendPolicy, candidate: Candidate) -> Iterable[tuple[str, str, Mapping[str, Limit]]]:
    names = (
        ("partition", candidate.partition, policy.partitions),
        ("account", candidate.account, policy.accounts),
        ("user", candidate.user, policy.users),
    )
    return [(what, name, limits) for what, name, limits in names if name is not None]


def _limits(policy: SuspendPolicy, candidate: Candidate, surroundings: Surroundings) -> Iterable[Refusal]:
    counts = {
        "partition": surroundings.suspended_partitions,
        "account": surroundings.suspended_accounts,
        "user": surroundings.suspended_users,
    }
    for what, name, limits in _named(policy, candidate):
        most = limits[name].max_suspended if name in limits else None
        count = counts[what].get(name, 0)
        if most is not None and not surroundings.suspended_known:
            yield Refusal(
                RefusalCode.LIMIT_UNKNOWN,
                f"how many jobs of {what} {name} are suspended is unknown, and the site allows {most}: slurmctld or "
                "the shared file system has not responded lately",
            )
        elif most is not None and count >= most:
            yield Refusal(
                RefusalCode(f"limit-{what}"), f"{count} jobs of {what} {name} are suspended; the site allows {most}"
            )
    busy = surroundings.in_place_under_way if candidate.in_place else surroundings.under_way
    if busy >= policy.max_at_once:
        kind = "suspensions in place" if candidate.in_place else "suspensions"
        yield Refusal(RefusalCode.NODE_BUSY, f"as many {kind} are under way on this node as it does at once ({busy})")
    if surroundings.no_room is not None and not candidate.in_place:
        yield Refusal(RefusalCode.NO_ROOM, surroundings.no_room)


_ALONE = "no other job could use their memory while it sleeps in place; with when=always it sleeps nevertheless"


def _pressure(
    candidate: Candidate,
    surroundings: Surroundings,
    presses: tuple[Waiting, ...],
    other_candidates: Sequence[Candidate],
) -> Iterable[Refusal]:
    if candidate.option.when is Pressure.ALWAYS or candidate.needed_by:
        return
    if candidate.in_place:
        text = "no job waits to wake or to start on its GPUs"
        if candidate.shares_gpus is False:
            text = f"its GPUs are allocated to it alone, so that {_ALONE}"
        yield Refusal(RefusalCode.NO_PRESSURE, text)
    elif surroundings.waiting is None or surroundings.node is None:
        yield Refusal(RefusalCode.QUEUE_UNKNOWN, "the pending jobs are unknown: slurmctld has not responded lately")
    elif not presses:
        served = (
            pressing(replace(surroundings, promises=()), candidate, other_candidates) if surroundings.promises else ()
        )
        if served:
            ids = {job.job_id for job in served}
            nodes = sorted({promise.node for promise in surroundings.promises if promise.job_id in ids})
            names = ", ".join(job.shown_id for job in served[:3]) + (", ..." if len(served) > 3 else "")
            yield Refusal(
                RefusalCode.PROMISED, f"the jobs that wait for its GPUs ({names}) get GPUs of {', '.join(nodes)}"
            )
        else:
            yield Refusal(RefusalCode.NO_PRESSURE, "no pending job could use its GPUs")
