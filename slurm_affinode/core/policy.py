"""Whether an idle job is to be suspended now: the site's rules, without a clock and without I/O.

Every reason against it is given, not only the first, so that a user sees all of what keeps his job where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_affinode.core.features import may_match
from slurm_affinode.core.idle import IdleState, Verdict
from slurm_affinode.core.spans import span
from slurm_affinode.model.suspension import Mode, Pressure, Refusal, SuspendOption

WAITS_FOR_ROOM = frozenset({"Priority", "Resources"})
"""Slurm's reasons of a pending job that free GPUs would help. All others (Dependency, BeginTime, JobHeldUser, QOS and
association limits, ...) keep it pending whatever is free."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Rules for one partition, account or user. ``None``: no rule."""

    max_suspended: int | None = None
    """At most so many of its jobs are suspended at a time, as far as this node can see."""
    min_run_s: float | None = None
    """In place of the general one."""
    exclude: bool = False
    """Its jobs are never suspended by the agent."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The site's rules."""

    min_run_s: float = 300.0
    """A run is left alone for so long, whatever its GPUs do."""
    max_at_once: int = 1
    """Suspensions under way on this node."""
    backoff_s: float = 300.0
    """After its first suspension a job runs at least so long, after each further one twice as long."""
    backoff_max_s: float = 21600.0
    partitions: Mapping[str, Limit] = field(default_factory=dict)
    accounts: Mapping[str, Limit] = field(default_factory=dict)
    users: Mapping[str, Limit] = field(default_factory=dict)
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A watched job, as the policy sees it."""

    job_id: int
    option: SuspendOption
    idle: IdleState | None
    """``None``: it was not sampled yet."""
    run_s: float | None
    """How long this run has lasted; ``None``: not known."""
    user: str | None
    account: str | None
    partition: str | None
    gpus: int
    gpu_kind: str | None = None
    cpus: int = 0
    memory_mib: int = 0
    suspensions: int = 0
    """How often this submission was suspended before."""
    busy_with: str | None = None
    """``signalled``, ``suspending``, ``restoring``: it is being worked on."""
    refusals: tuple[Refusal, ...] = ()
    """Why it cannot be suspended at all."""
    wanted_by: tuple[str, ...] = ()
    """In place: the jobs that wait to wake on its GPUs, and for which it is to make room."""

    @property
    def in_place(self) -> bool:
        """It keeps its allocation, and needs no image."""
        return self.option.mode is Mode.INPLACE


@dataclass(frozen=True, slots=True)
class Waiting:
    """A pending job, as the policy sees it."""

    job_id: int
    shown_id: str
    partitions: tuple[str, ...]
    reason: str | None
    held: bool
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
    """Tasks of an array that are still one record, as far as they may run at once."""


@dataclass(frozen=True, slots=True)
class Promise:
    """GPUs that a node is giving, or has just given, to one pending job (to one task of an array)."""

    job_id: int
    node: str
    gpus: int


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """This node: what it has, and what is free."""

    name: str
    partitions: tuple[str, ...]
    gpu_kind: str | None
    free_gpus: int
    free_cpus: int
    free_memory_mib: int
    features: tuple[str, ...] = ()
    reservation: str | None = None
    available: bool = True
    """Takes new jobs: not drained, not down."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What else bears on a decision. ``None`` is unknown, and nothing is done on what is unknown."""

    waiting: tuple[Waiting, ...] | None
    node: NodeRoom | None
    under_way: int = 0
    """Suspensions under way on this node, those in place not counted."""
    in_place_under_way: int = 0
    """Those in place: the others' images are nothing that they would have to wait for."""
    no_room: str | None = None
    """Why the store takes nothing more."""
    suspended_partitions: Mapping[str, int] = field(default_factory=dict)
    suspended_accounts: Mapping[str, int] = field(default_factory=dict)
    suspended_users: Mapping[str, int] = field(default_factory=dict)
    promises: tuple[Promise, ...] = ()
    """Of all nodes: one pending job must not cost two jobs their place."""

    def with_one_more(self, candidate: Candidate) -> Surroundings:
        """The same when a job is being suspended, too."""
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
    """What is to be done with a job, and why."""

    act: bool
    code: str
    """``suspend``, or the code of the first reason against it."""
    text: str
    """One line for people."""
    against: tuple[Refusal, ...] = ()
    """Every reason against it, the idle window not counted."""
    for_jobs: tuple[str, ...] = ()
    """The pending jobs that could use the GPUs."""
    presses: tuple[Waiting, ...] = ()
    """The same, by priority."""


def _fits(waiting: Waiting, node: NodeRoom) -> bool:
    """It waits for room, and this node is one that it could have."""
    return (
        node.available
        and not waiting.held
        and waiting.reason in WAITS_FOR_ROOM
        and waiting.gpus > 0
        and bool(set(waiting.partitions) & set(node.partitions))
        and _same_kind(waiting.gpu_kind, node.gpu_kind)
        and waiting.reservation == node.reservation
        and (not waiting.required_nodes or node.name in waiting.required_nodes)
        and node.name not in waiting.excluded_nodes
        and may_match(waiting.features, node.features)
    )


def _same_kind(wanted: str | None, there: str | None) -> bool:
    return wanted is None or there is None or bool(set(wanted.split("+")) & set(there.split("+")))


def _enough(waiting: Waiting, gpus: int, cpus: int, memory_mib: int) -> bool:
    return waiting.gpus <= gpus and waiting.cpus <= cpus and waiting.memory_mib <= memory_mib


def pressing(surroundings: Surroundings, candidate: Candidate, others: Sequence[Candidate] = ()) -> tuple[Waiting, ...]:
    """The pending jobs for which ``candidate`` would have to go, by priority.

    A job that fits into what is free already presses nobody, nor does one that has the promise of a node. One that
    needs the GPUs of several jobs of the node counts where ``others``, the further jobs of the node whose window is
    full, would free enough together with this one.
    """
    node = surroundings.node
    if node is None or surroundings.waiting is None:
        return ()
    found: list[Waiting] = []
    gpus, cpus, memory = node.free_gpus, node.free_cpus, node.free_memory_mib
    for waiting in sorted(surroundings.waiting, key=lambda one: (-one.priority, one.job_id)):
        if waiting.job_id == candidate.job_id or not _fits(waiting, node):
            continue
        if _enough(waiting, gpus, cpus, memory):
            gpus, cpus, memory = gpus - waiting.gpus, cpus - waiting.cpus, memory - waiting.memory_mib
            continue
        if not _unserved(waiting, node.name, surroundings.promises):
            continue
        freed = (candidate, *(one for one in others if one.job_id != candidate.job_id))
        for count in (1, len(freed)):
            part = freed[:count]
            if _enough(
                waiting,
                max(0, gpus) + sum(one.gpus for one in part),
                max(0, cpus) + sum(one.cpus for one in part),
                max(0, memory) + sum(one.memory_mib for one in part),
            ):
                found.append(waiting)
                break
    return tuple(found)


def _unserved(waiting: Waiting, node: str, promises: Sequence[Promise]) -> bool:
    """Whether a pending job, or a task of it, has no promise yet; one of ``node`` counts once it covers the job."""
    served = [
        one for one in promises if one.job_id == waiting.job_id and (one.node != node or one.gpus >= waiting.gpus)
    ]
    return len(served) < waiting.tasks


def backoff_s(policy: Policy, suspensions: int) -> float:
    """How long a job that was suspended so often has to run before the next time."""
    if suspensions <= 0:
        return 0.0
    return min(policy.backoff_max_s, policy.backoff_s * 2.0 ** min(suspensions - 1, 60))


def too_often(policy: Policy, attempts: int, since_s: float) -> Refusal | None:
    """Why a run is not suspended by hand once more, ``since_s`` after the last of so many attempts."""
    pause = backoff_s(policy, attempts)
    if since_s >= pause:
        return None
    times = "once" if attempts == 1 else f"{attempts} times"
    text = (
        f"its suspension was requested {times} in this run, last {span(since_s)} ago; the next one may be {span(pause)}"
    )
    return Refusal("backoff", f"{text} after that")


def decide(
    policy: Policy, candidate: Candidate, surroundings: Surroundings, others: Sequence[Candidate] = ()
) -> Decision:
    """Whether to suspend ``candidate`` now, with every reason against it. ``others``: see ``pressing``."""
    if candidate.busy_with is not None:
        return Decision(False, "under-way", f"it is being worked on: {candidate.busy_with}")
    presses = pressing(surroundings, candidate, others)
    against = (*candidate.refusals, *_rules(policy, candidate), *_limits(policy, candidate, surroundings))
    against += tuple(_pressure(candidate, surroundings, presses, others))
    names = tuple(waiting.shown_id for waiting in presses)
    why = _because(candidate, names)
    idle = candidate.idle
    if idle is None or not idle.reached:
        code, now = _not_yet(idle, candidate.option.window_s)
        then = f"then nothing: {against[0].text}" if against else f"then it is suspended: {why}"
        if policy.dry_run and not against:
            then = f"then it would be suspended ({why}), but this agent only says so (dry run)"
        return Decision(False, code, f"{now}; {then}", against, names)
    if against:
        return Decision(False, against[0].code, f"{why}, not suspended: {against[0].text}", against, names)
    if policy.dry_run:
        return Decision(
            False, "dry-run", f"{why}: would be suspended, but this agent only says so (dry run)", (), names
        )
    # One in place frees no GPU of Slurm's: nobody is promised one.
    promised = candidate.option.when is Pressure.PRESSURE and not candidate.in_place
    return Decision(True, "suspend", why, (), names, presses if promised else ())


def _because(candidate: Candidate, names: tuple[str, ...]) -> str:
    idle = candidate.idle
    length = max(candidate.option.window_s, 0 if idle is None else idle.progress_s)
    said = f"idle {span(length)}"
    if candidate.wanted_by:
        return f"{said}, job {', '.join(candidate.wanted_by)} waits to wake"
    if candidate.option.when is Pressure.ALWAYS:
        return said
    if not names:
        return said
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    verb = "job waits" if len(names) == 1 else "jobs wait"
    return f"{said}, {len(names)} {verb} for its GPUs ({shown})"


def _not_yet(idle: IdleState | None, window_s: float) -> tuple[str, str]:
    if idle is None:
        return "unknown", f"it was not looked at yet; after {span(window_s)} of idleness"
    if idle.verdict is Verdict.BUSY:
        return "busy", f"busy ({idle.why}); after {span(idle.window_s)} without a break"
    if idle.verdict is Verdict.UNKNOWN:
        return "unknown", f"unknown is not idle ({idle.why}); after {span(idle.remaining_s)} more of idleness"
    return "window", f"idle for {span(idle.progress_s)}; after {span(idle.remaining_s)} more"


def _rules(policy: Policy, candidate: Candidate) -> Iterable[Refusal]:
    for what, name, limits in _named(policy, candidate):
        limit = limits.get(name)
        if limit is not None and limit.exclude:
            yield Refusal(f"excluded-{what}", f"the site excludes {what} {name}")
    yield from too_soon(policy, candidate)


def too_soon(policy: Policy, candidate: Candidate) -> Iterable[Refusal]:
    """Why a run has not lasted long enough. Also for a suspension by hand: dumps and requeues cost others, too."""
    least = min_run_s(policy, candidate)
    if candidate.run_s is None:
        yield Refusal("run-unknown", "how long it has run is not known: slurmctld has not answered yet")
        return
    if candidate.run_s < least:
        yield Refusal(
            "min-run", f"it has run for {span(candidate.run_s)}; the site leaves a run alone for {span(least)}"
        )
    pause = backoff_s(policy, candidate.suspensions)
    if candidate.run_s < pause:
        times = "once" if candidate.suspensions == 1 else f"{candidate.suspensions} times"
        yield Refusal(
            "backoff",
            f"it was suspended {times}; it runs at least {span(pause)} now, and has for {span(candidate.run_s)}",
        )


def min_run_s(policy: Policy, candidate: Candidate) -> float:
    """The longest minimum run time that its user, account or partition has, else the general one."""
    named = [limits[name].min_run_s for _, name, limits in _named(policy, candidate) if name in limits]
    given = [seconds for seconds in named if seconds is not None]
    return max(given) if given else policy.min_run_s


def _named(policy: Policy, candidate: Candidate) -> Iterable[tuple[str, str, Mapping[str, Limit]]]:
    names = (
        ("partition", candidate.partition, policy.partitions),
        ("account", candidate.account, policy.accounts),
        ("user", candidate.user, policy.users),
    )
    return [(what, name, limits) for what, name, limits in names if name is not None]


def _limits(policy: Policy, candidate: Candidate, surroundings: Surroundings) -> Iterable[Refusal]:
    counts = {
        "partition": surroundings.suspended_partitions,
        "account": surroundings.suspended_accounts,
        "user": surroundings.suspended_users,
    }
    for what, name, limits in _named(policy, candidate):
        most = limits[name].max_suspended if name in limits else None
        there = counts[what].get(name, 0)
        if most is not None and there >= most:
            yield Refusal(f"limit-{what}", f"{there} jobs of {what} {name} are suspended; the site allows {most}")
    busy = surroundings.in_place_under_way if candidate.in_place else surroundings.under_way
    if busy >= policy.max_at_once:
        kind = "suspensions in place" if candidate.in_place else "suspensions"
        yield Refusal("node-busy", f"as many {kind} are under way on this node as it does at once ({busy})")
    if surroundings.no_room is not None and not candidate.in_place:
        yield Refusal("no-room", surroundings.no_room)


def _pressure(
    candidate: Candidate, surroundings: Surroundings, presses: tuple[Waiting, ...], others: Sequence[Candidate]
) -> Iterable[Refusal]:
    if candidate.option.when is Pressure.ALWAYS or candidate.wanted_by:
        return
    if surroundings.waiting is None or surroundings.node is None:
        yield Refusal("queue-unknown", "who waits is not known: slurmctld has not answered lately")
    elif not presses:
        served = pressing(replace(surroundings, promises=()), candidate, others) if surroundings.promises else ()
        if served:
            ids = {one.job_id for one in served}
            nodes = sorted({one.node for one in surroundings.promises if one.job_id in ids})
            names = ", ".join(one.shown_id for one in served[:3]) + (", ..." if len(served) > 3 else "")
            yield Refusal("promised", f"the jobs that wait for its GPUs ({names}) get others, of {', '.join(nodes)}")
        else:
            yield Refusal("no-pressure", "no pending job could use its GPUs")
