"""An agent whose job is suspended in place, in the world of ``agent_site``: a fake freezer, sockets and GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent_site import STEPS, Process, World
from agent_world import Agent

from slurm_affinode.checkpoint.inspection import TreeFacts
from slurm_affinode.checkpoint.interface import CudaError, CudaState
from slurm_affinode.gpu.interface import DriverMissing
from slurm_affinode.model.gpu import Device
from slurm_affinode.model.ledger import LedgerEntry, decode
from slurm_affinode.model.suspension import Mode, Phase, SuspendOption
from slurm_affinode.suspension.inplace.freezer import SIGNALS, Calls, FreezeError
from slurm_affinode.suspension.inplace.gpu_sharing import Rules, Sharing, Unheard
from slurm_affinode.suspension.inplace.queue import Comments
from slurm_affinode.suspension.inplace.scheduler import InPlaceScheduler
from slurm_affinode.suspension.inplace.sock_diag import ESTABLISHED, LISTEN, Sock, SockDiagError
from slurm_affinode.suspension.inplace.sockets import JobSockets, SocketTable
from slurm_affinode.suspension.inplace.suspend import InPlaceEnding
from slurm_affinode.suspension.inplace.wake import Waking
from slurm_affinode.suspension.interface import DaemonCalls
from slurm_affinode.suspension.job.memory_limits import MemoryLimits
from slurm_affinode.suspension.job.process_tree import Member
from slurm_affinode.suspension.job.registry import WatchedJob
from slurm_affinode.suspension.mail import NO_MAILS, Mailer
from slurm_affinode.suspension.records.record import SuspensionRecord
from slurm_affinode.suspension.suspend import JobSuspender

OUT = ["lock", "checkpoint", "freeze"]
BACK = ["thaw", "restore", "unlock", "thaw"]
OPTION = SuspendOption(mode=Mode.INPLACE)
GIB = 1 << 30
LISTENER = Sock(11, "tcp", LISTEN, 0, port=8000)
OPEN = Sock(12, "tcp", ESTABLISHED, 0, port=8000)
QUIET: dict[int, Sock] = {11: LISTENER, 12: OPEN}


class FakeFreezer:
    """Stop and continue of the kernel."""

    def __init__(self, agent: Agent) -> None:
        self.world, self.processes = agent.world, agent.processes
        self.machine = agent.world.nodes[agent.node]
        self.fails: str | None = None
        self.by_slurm = False
        self.waiting: dict[int, int] = {}
        """Process -> a pending signal."""
        self.at_work: set[int] = set()
        self.continued: list[int] = []
        """Continued processes, one item per SIGCONT."""
        self.during: Callable[[], None] = lambda: None

    def members(self, init_pid: int, init_started: int) -> Sequence[Member]:
        return self.processes.all_processes(init_pid, init_started)

    def mechanism(self, members: Sequence[Member], init_pid: int) -> str:
        return SIGNALS

    def freeze(self, init_pid: int, init_started: int, how: str, *, timeout_s: float) -> None:
        self.members(init_pid, init_started)
        if self.fails:
            raise FreezeError(self.fails)
        self.world.effect("freeze")
        self.during()
        for process in self.machine.processes:
            process.stopped = True

    def thaw(
        self, init_pid: int, init_started: int, how: str, *, stay: Collection[int], going: Collection[int] = ()
    ) -> None:
        self.members(init_pid, init_started)
        self.world.effect("thaw")
        for process in self.machine.processes:
            if process.pid not in going:
                process.stopped = process.stopped and process.pid in stay
                self.continued += [process.pid] * (not process.stopped)

    def clear(self, how: str) -> None:
        assert how == SIGNALS

    def busy(self, pids: Iterable[int]) -> bool:
        return any(pid in self.at_work for pid in pids)

    def find_ended(self, pids: Iterable[int]) -> int | None:
        running = {p.pid for p in self.machine.processes}
        return next((pid for pid in pids if pid not in running), None)

    def calls(self, pids: Iterable[int]) -> Calls:
        return frozenset((pid, self.waiting[pid]) for pid in pids if pid in self.waiting)

    def is_stopped_by_slurm(self, init_pid: int) -> bool:
        return self.by_slurm

    def moving(self, pids: Iterable[int], how: str) -> int | None:
        selected = set(pids)
        return next((p.pid for p in self.machine.processes if p.pid in selected and not p.stopped), None)


class FakeSockets:
    """Sockets of the job; their state is ``now``."""

    def __init__(self) -> None:
        self.now: dict[int, Sock] = dict(QUIET)
        self.has = True
        self.unresponsive = False
        self.reading: tuple[int, ...] = ()
        """Processes that may read data not shown by any counter."""
        self.places: dict[int, str] = {}
        """Thread of such a process -> where it waits."""

    def readers(self, pids: Iterable[int], table: SocketTable) -> tuple[int, ...]:
        return self.reading

    def waits(self, pids: Iterable[int]) -> Mapping[int, str]:
        return dict(self.places) if set(pids) else {}

    def of_processes(self, pids: Iterable[int]) -> JobSockets:
        return JobSockets({1: frozenset(self.now)}) if self.has else JobSockets()

    def read(self, job_sockets: JobSockets) -> SocketTable:
        if self.unresponsive:
            raise SockDiagError("sock_diag does not respond")
        return dict(self.now)

    def observations(self, owners: Mapping[int, JobSockets]) -> Mapping[int, SocketTable]:
        return {} if self.unresponsive else {job_id: dict(self.now) for job_id in owners}


class FakeLocks:
    """File locks of the job, and a process that waits for them."""

    def __init__(self) -> None:
        self.locks: frozenset[tuple[str, ...]] = frozenset()
        self.waiter: int | None = None

    def locks_of(self, pids: Iterable[int]) -> frozenset[tuple[str, ...]]:
        return self.locks if tuple(pids) else frozenset()

    def awaited(
        self, locks: Mapping[int, frozenset[tuple[str, ...]]], pids: Mapping[int, Collection[int]]
    ) -> Mapping[int, int]:
        return {} if self.waiter is None else {job_id: self.waiter for job_id, held in locks.items() if held}


class FakeCards:
    """One GPU; the memory of its processes follows from their CUDA state."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.uuid = agent.cuda.devices()[0]
        self.others = 0
        self.each = 48 * GIB
        """Memory of a process that uses the GPU."""
        self.lost = False

    def devices(self) -> tuple[Device, ...]:
        return self.agent.gpus.devices()

    def processes(self) -> Mapping[str, Mapping[int, int]]:
        if self.lost:
            raise DriverMissing("the driver is away")
        on = (CudaState.RUNNING, CudaState.LOCKED)
        machine = self.agent.world.nodes[self.agent.node]
        return {self.uuid: {p.pid: self.each for p in machine.processes if p.cuda in on}}

    def free_bytes(self, device: Device) -> int:
        return 80 * GIB - self.others - sum(self.processes()[self.uuid].values())


class Inline:
    """A queue that runs calls at once."""

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        call(*arguments)

    def close(self) -> None: ...


class Later:
    """A queue that runs calls on ``work()``."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        self.calls.append(lambda: call(*arguments))

    def work(self) -> None:
        while self.calls:
            self.calls.pop(0)()


class Node:
    """An agent with support for suspension in place, created anew after each crash."""

    def __init__(
        self, world: World, rules: Rules | None = None, mailer: Mailer = NO_MAILS,
        clock: Callable[[], float] | None = None, unheard: Unheard = lambda pids: {},
        *, limits: MemoryLimits | None = None,
    ) -> None:  # fmt: skip
        self.world = world
        self.agent = Agent(world, "c1", mailer=mailer, limits=limits)
        self.freezer, self.sockets, self.cards = FakeFreezer(self.agent), FakeSockets(), FakeCards(self.agent)
        self.locks = FakeLocks()
        self.idle_s: Callable[[int], float | None] = lambda job_id: None
        self.woken: Callable[[int, str, float | None], None] = lambda job_id, how, slept_s: None
        self.pressed: Callable[[], None] = lambda: None
        self.turn_left_s: Callable[[int], float | None] = lambda job_id: None
        self.gpus_of: Callable[[int], Sequence[str] | None] = lambda job_id: None
        calls = DaemonCalls(
            *(self._set_later(name) for name in ("idle_s", "woken", "pressed", "gpus_of", "turn_left_s"))
        )
        agent, rules = self.agent, rules or Rules()
        sharing = Sharing(agent.registry, self.freezer, self.cards, rules.awake_limit_pct, unheard, calls=calls)
        waking = Waking(
            node="c1", slurm=agent.slurm, cuda=agent.cuda, registry=agent.registry, ledger=agent.ledger,
            freezer=self.freezer, sharing=sharing, sockets=self.sockets, mails=agent.mails, limits=limits,
            clock=agent.clock, freeze_s=rules.freeze_s,
        )  # fmt: skip
        self.scheduler = InPlaceScheduler(
            processes=agent.processes, registry=agent.registry, freezer=self.freezer, sockets=self.sockets,
            sharing=sharing, waking=waking, comments=Comments(agent.slurm, agent.workers, world.now), rules=rules,
            workers=agent.workers, mails=agent.mails, limits=limits, wake_backoff_s=agent.settings.wake_backoff_s,
            calls=calls, now=world.now, clock=clock or (lambda: world.clock), locks=self.locks,
        )  # fmt: skip
        self.scheduler._wakes = self.scheduler._aside = Inline()  # type: ignore[assignment]
        self.suspender = self.suspender_with()
        self.keeper = agent.keeper_with(self.scheduler)
        self.agent.registry.put(self.job())

    def _set_later(self, name: str) -> Callable[..., Any]:
        """Return a function that calls the attribute, which a test may set after the scheduler is built."""
        return lambda *arguments: getattr(self, name)(*arguments)  # noqa: PLW0108 - looked up when called

    def suspender_with(
        self, *, settle_s: float = 0.0, inspect: Callable[[int, int], TreeFacts] | None = None, **memory: Any
    ) -> JobSuspender:
        """Return a suspender; ``memory``: changes of its host memory."""
        agent = self.agent
        ending = InPlaceEnding(
            node="c1", processes=agent.processes, cuda=agent.cuda, gpus=self.cards, registry=agent.registry,
            ledger=agent.ledger, freezer=self.freezer, sockets=self.sockets, scheduler=self.scheduler,
            outcomes=agent.outcomes, mails=agent.mails, rollback=agent.rollback, clock=agent.clock, freeze_s=1,
            settle_s=settle_s, monotonic=lambda: self.world.clock,
        )  # fmt: skip
        host_memory = agent.host_memory(self.cards, **memory)
        return agent.suspender_with({Mode.INPLACE: ending}, self.cards, host_memory, inspect)

    def job(self, **changes: object) -> WatchedJob:
        return self.agent.watched(**{"option": OPTION, **changes})

    def sleep(self, why: str = "idle 15m", *, busy: bool = False, **changes: object) -> SuspensionRecord:
        return self.suspender.suspend(self.job(**changes), why, sample_again=lambda: None, busy=busy)

    def recover(self) -> None:
        self.keeper.recover()
        self.keeper._queue.close()

    def round(self) -> None:
        self.world.clock += 2
        self.scheduler.round()

    @property
    def processes(self) -> list[Process]:
        """The processes of the job: its script, and a child that uses the GPU."""
        return self.world.nodes["c1"].processes

    def stopped(self) -> list[bool]:
        """Return for each process whether it is stopped."""
        return [process.stopped for process in self.processes]

    def thawed(self) -> None:
        """Continue every process without a report."""
        for process in self.processes:
            process.stopped = False

    def lose_job(self) -> None:
        """End the job's processes, including PID 1 of their namespace."""
        machine = self.world.nodes["c1"]
        machine.init, machine.processes = None, []

    def connection(self) -> None:
        """Add a waiting connection."""
        self.sockets.now = {**QUIET, 11: replace(LISTENER, waiting=1)}

    def phase(self) -> Phase:
        job = self.agent.registry.get(7)
        assert job is not None
        return job.phase

    def view(self) -> dict[str, Any]:
        return self.view_of(7)

    def view_of(self, job_id: int) -> dict[str, Any]:
        view = self.scheduler.view(job_id)
        assert view is not None
        return view


def entries(world: World) -> list[LedgerEntry]:
    """Return the merged entries of the ledger."""
    merged: dict[tuple[str, int, int, int], LedgerEntry] = {}
    for path in sorted((world.root / "shared" / "ledger").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            entry = decode(line)
            merged[entry.key] = merged[entry.key].merged(entry) if entry.key in merged else entry
    return list(merged.values())


def awake(world: World) -> bool:
    return world.running() and world.steps() == [STEPS]


def asleep(world: World) -> bool:
    processes = world.nodes["c1"].processes
    return [p.cuda for p in processes] == [None, CudaState.CHECKPOINTED] and all(p.stopped for p in processes)


@contextlib.contextmanager
def failing(node: Node, why: str = "the driver failed") -> Iterator[None]:
    """Make restores of GPU memory fail."""
    restore = node.agent.cuda.restore

    def fails(pid: int, **_: object) -> None:
        raise CudaError(why)

    node.agent.cuda.restore = fails  # type: ignore[method-assign]
    try:
        yield
    finally:
        node.agent.cuda.restore = restore  # type: ignore[method-assign]
