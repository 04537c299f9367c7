"""Sleeping in place and waking, with the agent killed before every single effect: a job runs, or can be woken."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from agent_site import Crash, World
from agent_world import Agent, FakeLink

from slurm_affinode.agent.inplace.asking import Look
from slurm_affinode.agent.inplace.director import Director
from slurm_affinode.agent.inplace.freezer import SIGNALS, FreezeError
from slurm_affinode.agent.inplace.sharing import Rules
from slurm_affinode.agent.inplace.sockdiag import ESTABLISHED, LISTEN, Sock, SockDiagError
from slurm_affinode.agent.inplace.suspender import ByMode, InPlaceSuspender
from slurm_affinode.agent.inplace.watching import Own
from slurm_affinode.agent.interface import Refused
from slurm_affinode.agent.mailing import SILENT, Mailer
from slurm_affinode.agent.memory import HostMemory
from slurm_affinode.agent.recovery import JobKeeper
from slurm_affinode.agent.registry import WatchedJob
from slurm_affinode.agent.shepherds import Start, Wait
from slurm_affinode.agent.tree import Member, TreeGoneError
from slurm_affinode.checkpoint.facts import MemoryFacts
from slurm_affinode.checkpoint.interface import CudaError, CudaState, HelperLost
from slurm_affinode.gpu.interface import DriverMissing
from slurm_affinode.model.cluster import Job
from slurm_affinode.model.gpu import Device
from slurm_affinode.model.ledger import LedgerEntry, decode
from slurm_affinode.model.suspension import Mode, Phase, SuspendOption, Suspension
from slurm_affinode.model.suspension_mail import MAIL_KINDS, SuspensionMail

STEPS = 4711
OUT = ["lock", "checkpoint", "freeze"]
BACK = ["thaw", "restore", "unlock"]
OPTION = SuspendOption(mode=Mode.INPLACE)
GIB = 1 << 30
LISTENER = Sock(11, "tcp", LISTEN, 0, port=8000)
OPEN = Sock(12, "tcp", ESTABLISHED, 0, port=8000)
QUIET: dict[int, Sock] = {11: LISTENER, 12: OPEN}


class FakeFreezer:
    """The kernel's stop and continue."""

    def __init__(self, agent: Agent) -> None:
        self.world, self.processes = agent.world, agent.parts.processes
        self.machine = agent.world.nodes[agent.node]
        self.fails: str | None = None
        self.during: Callable[[], None] = lambda: None

    def members(self, init_pid: int, init_started: int) -> Sequence[Member]:
        return self.processes.members(init_pid, init_started)

    def how(self, members: Sequence[Member], init_pid: int) -> str:
        return SIGNALS

    def freeze(self, init_pid: int, init_started: int, how: str, *, timeout_s: float) -> None:
        self.members(init_pid, init_started)
        if self.fails:
            raise FreezeError(self.fails)
        self.world.effect("freeze")
        self.during()
        for process in self.machine.processes:
            process.stopped = True

    def thaw(self, init_pid: int, init_started: int, how: str, *, stay: Collection[int]) -> None:
        self.members(init_pid, init_started)
        self.world.effect("thaw")
        for process in self.machine.processes:
            process.stopped = process.pid in stay

    def moving(self, pids: Iterable[int], how: str, *, stay: Collection[int] = ()) -> int | None:
        wanted = set(pids)
        return next((p.pid for p in self.machine.processes if p.pid in wanted and not p.stopped), None)


class FakeSockets:
    """What waits on the job's sockets: all of it in ``now``."""

    def __init__(self) -> None:
        self.now: dict[int, Sock] = dict(QUIET)
        self.has = True
        self.silent = False

    def own(self, pids: Iterable[int]) -> Own:
        return Own({1: frozenset(self.now)}) if self.has else Own()

    def look(self, own: Own) -> Look:
        if self.silent:
            raise SockDiagError("sock_diag does not answer")
        return dict(self.now)

    def looks(self, owners: Mapping[int, Own]) -> Mapping[int, Look]:
        return {} if self.silent else {job_id: dict(self.now) for job_id in owners}


class FakeCards:
    """One GPU; what its processes hold is what CUDA says."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.uuid = agent.cuda.devices()[0]
        self.others = 0
        self.lost = False

    def devices(self) -> tuple[Device, ...]:
        return self.agent.gpus.devices()

    def processes(self) -> Mapping[str, Mapping[int, int]]:
        if self.lost:
            raise DriverMissing("the driver is away")
        on = (CudaState.RUNNING, CudaState.LOCKED)
        machine = self.agent.world.nodes[self.agent.node]
        return {self.uuid: {p.pid: 48 * GIB for p in machine.processes if p.cuda in on}}

    def free_bytes(self, device: Device) -> int:
        return 80 * GIB - self.others - sum(self.processes()[self.uuid].values())


class Inline:
    """Workers that do it at once."""

    def submit(self, call: Callable[..., None], *arguments: Any) -> Future[None]:
        call(*arguments)
        return Future()

    def shutdown(self, **_: object) -> None: ...


class Node:
    """An agent with everything that sleeps in place, made anew after each crash."""

    def __init__(self, world: World, rules: Rules | None = None, mailer: Mailer = SILENT) -> None:
        self.world = world
        self.agent = Agent(world, "c1", mailer=mailer)
        self.freezer, self.sockets, self.cards = FakeFreezer(self.agent), FakeSockets(), FakeCards(self.agent)
        self.director = Director(
            self.agent.parts, self.freezer, self.sockets, self.cards, rules or Rules(), workers=Inline()
        )
        self.suspender = ByMode(
            self.agent.suspender,
            InPlaceSuspender(
                self.agent.parts, self.agent.aftermath, self.director, freezer=self.freezer, sockets=self.sockets,
                cards=self.cards, freeze_s=1,
            ),
        )  # fmt: skip
        self.keeper = JobKeeper(self.agent.parts, self.agent.aftermath, self.director)
        self.agent.parts.registry.put(self.job())

    def job(self, **changes: object) -> WatchedJob:
        return self.agent.watched(**{"option": OPTION, **changes})

    def sleep(self, why: str = "idle 15m", **changes: object) -> Suspension:
        return self.suspender.suspend(self.job(**changes), why, look_again=lambda: None)

    def recover(self) -> None:
        self.keeper.recover()
        self.keeper.stop()

    def round(self) -> None:
        self.world.clock += 2
        self.director.round()

    def connection(self) -> None:
        """Somebody connects."""
        self.sockets.now = {**QUIET, 11: replace(LISTENER, waiting=1)}

    def phase(self) -> Phase:
        job = self.agent.parts.registry.get(7)
        assert job is not None
        return job.phase

    def view(self) -> dict[str, Any]:
        return self.view_of(7)

    def view_of(self, job_id: int) -> dict[str, Any]:
        found = self.director.view(job_id)
        assert found is not None
        return found


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    made.start_run("c1")
    made.start_script("c1", STEPS)
    return made


@pytest.fixture
def node(world):
    return Node(world)


def entries(world: World) -> list[LedgerEntry]:
    """The ledger, put together."""
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


def test_it_sleeps_and_a_request_wakes_it(world, node):
    """All of it once, with what status, comment and ledger say of it."""
    done = node.sleep()
    assert (done.phase, done.failure, done.gpus, done.gpu_bytes) == (Phase.FROZEN, None, 1, 48 * GIB)
    assert (world.effect_log, node.phase()) == (OUT, Phase.FROZEN)
    assert asleep(world)
    assert node.director.holds(7) is Phase.FROZEN
    node.round()
    assert asleep(world)
    seen = node.view()
    assert (seen["why"], seen["gpu_bytes"], seen["asked"], seen["wakes_on_request"]) == (
        "idle 15m",
        48 * GIB,
        None,
        True,
    )
    node.connection()
    node.round()
    assert world.effect_log == OUT + BACK
    assert (awake(world), node.phase(), node.director.view(7)) == (True, Phase.RUNNING, None)
    assert node.agent.parts.journal.open_records() == []
    [entry] = entries(world)
    times = [entry.began_ms, entry.locked_ms, entry.parked_ms, entry.released_ms, entry.restoring_ms, entry.restored_ms]
    assert times == sorted(times)
    assert (entry.mode, entry.gpu_bytes, entry.queued_ms, entry.failure) == ("inplace", 48 * GIB, None, None)


def test_the_comment_follows_when_it_has_settled(world, node):
    """Told while it sleeps, taken away when it is awake; what the owner had there stays."""
    world.comment = "my experiment"
    node.director._comments._worker = Inline()
    node.sleep()
    node.round()
    assert world.comment.startswith("asleep in place: idle 15m, 48 GiB in host memory, wakes on a request")
    assert world.comment.endswith(" // my experiment")
    node.connection()
    node.round()
    node.round()
    assert world.comment == "my experiment"


@pytest.mark.parametrize("second", [None, *range(1, 5)])
@pytest.mark.parametrize("first", range(1, len(OUT) + len(BACK) + 1))
def test_an_agent_killed_before_each_effect_and_again_while_it_recovers(world, node, first, second):
    """The next one has it running, or asleep and ready to wake; a request then is answered with its memory whole."""
    world.crash_at = first

    def there_and_back() -> None:
        node.sleep()
        node.connection()
        node.round()

    with pytest.raises(Crash):
        there_and_back()
    world.effects, world.crash_at = 0, second
    for _ in range(2):
        node = Node(world)
        try:
            node.recover()
            node.round()
            break
        except Crash:
            continue
    world.crash_at = None
    assert awake(world) or asleep(world)
    node.connection()
    node.round()
    node.round()
    assert awake(world)
    assert node.phase() is Phase.RUNNING
    assert node.agent.parts.journal.open_records() == []
    node.sockets.now = dict(QUIET)
    assert node.sleep().phase is Phase.FROZEN


def test_the_next_agent_shows_it_as_asleep_when_its_shepherd_is_back(world, node):
    """The registry of a new agent begins with every job running."""
    node.sleep()
    after = Node(world)
    after.recover()
    after.agent.parts.registry.put(after.job())
    after.keeper.registered(after.job())
    assert (after.phase(), asleep(world)) == (Phase.FROZEN, True)
    assert after.view()["why"] == "idle 15m"


def test_a_request_that_came_while_there_was_no_agent(world, node):
    """Also one that was read just before the freeze, and of which nothing waits any more."""
    node.sleep()
    after = Node(world)
    after.sockets.now = {**QUIET, 12: replace(OPEN, received=80)}
    after.recover()
    after.round()
    assert awake(world)


def test_one_that_was_asked_for_by_hand_is_woken_by_the_next_agent(world, node):
    """It could not be seen otherwise that somebody wants it."""
    node.sleep()
    node.cards.others = 70 * GIB
    node.director.wake(7, "alice")
    node.round()
    assert asleep(world)
    after = Node(world)
    after.recover()
    after.round()
    assert awake(world)


def test_a_request_while_it_is_put_to_sleep_wakes_it_at_once(world, node):
    """It may have been read, and its answer wait for the GPU."""

    def read() -> None:
        node.sockets.now = {**QUIET, 12: replace(OPEN, received=80)}

    node.freezer.during = read
    assert node.sleep().failure is None
    node.round()
    assert awake(world)


def test_somebody_who_asks_keeps_it_awake(world, node):
    """Nothing is touched."""
    node.connection()
    with pytest.raises(Refused, match="a connection waits on port 8000"):
        node.sleep()
    node.sockets.silent = True
    with pytest.raises(Refused, match="requests to it could not be noticed"):
        node.sleep()
    assert world.effect_log == []


def test_it_is_not_idle_any_more(world, node):
    """Seen under the lock: the lock is taken off, nothing has moved."""
    done = node.suspender.suspend(node.job(), "idle 15m", look_again=lambda: "GPU 0: utilization 40")
    assert done.failure == "it is not idle any more: GPU 0: utilization 40"
    assert (awake(world), node.phase()) == (True, Phase.RUNNING)
    assert [entry.failure for entry in entries(world)] == [done.failure]
    assert node.agent.parts.journal.open_records() == []


def test_processes_that_do_not_stop_and_gpu_memory_that_does_not_move(world, node):
    """It is woken again, by the way of a sleeper: somebody else may have its place by then."""
    node.freezer.fails = "process 7 (x) does not stop within 1 s"
    assert node.sleep().failure == node.freezer.fails
    node.cards.others = 60 * GIB
    node.round()
    assert "is left there: others hold the rest" in node.view()["waits"]
    node.cards.others = 0
    node.round()
    assert awake(world)


def test_a_restore_that_fails_leaves_it_asleep_and_is_tried_again(world, node, monkeypatch):
    """With the reason; less and less often; at once when somebody asks for it."""
    node.sleep()
    node.connection()

    def fails(pid: int, **_: object) -> None:
        raise CudaError("cannot move the GPU memory of process 9 back: the driver failed (CUDA_ERROR_UNKNOWN)")

    with monkeypatch.context() as patch:
        patch.setattr(node.agent.cuda, "restore", fails)
        node.round()
        assert asleep(world)
        assert "CUDA_ERROR_UNKNOWN" in node.view()["failure"]
        node.round()
        node.world.clock -= 2
        node.director.round()
        assert node.director._sleepers[7].failures == 2
    assert node.phase() is Phase.FROZEN
    node.director.wake(7, "alice")
    node.round()
    assert awake(world)
    [entry] = entries(world)
    assert (entry.restored_ms is not None, "CUDA_ERROR_UNKNOWN" in (entry.restore_failure or "")) == (True, True)


def test_a_restore_that_fails_until_the_deadline(world, monkeypatch):
    """It is wanted, and has not got its memory back: overdue, whatever the reason."""
    ended: list[int | str] = []
    node = Node(world, Rules(deadline_s=60, end_on_deadline=True))
    node.agent.parts.slurm.cancel = ended.append

    def fails(pid: int, **_: object) -> None:
        raise CudaError("the driver failed")

    monkeypatch.setattr(node.agent.cuda, "restore", fails)
    node.sleep()
    node.connection()
    node.round()
    assert (node.view()["overdue"], ended) == (False, [])
    world.clock += 60
    node.round()
    assert (node.view()["overdue"], ended) == (True, [7])
    assert "to wake: the driver failed" in world.comment


def test_a_helper_that_is_lost_in_the_middle_is_no_failure(world, node, monkeypatch):
    """What it was doing is looked at, and done again where it was not done."""
    node.sleep()
    node.connection()
    restore, lost = node.agent.cuda.restore, []

    def once(pid: int, **given: object) -> None:
        restore(pid, **given)
        if not lost:
            lost.append(pid)
            raise HelperLost("the helper for the CUDA driver ended")

    monkeypatch.setattr(node.agent.cuda, "restore", once)
    node.round()
    assert awake(world)
    assert lost


def test_a_process_whose_cuda_state_is_lost_is_told(world, node):
    """The driver calls it failed: it sleeps on, and says so."""
    node.sleep()
    next(p for p in world.nodes["c1"].processes if p.cuda).cuda = CudaState.FAILED
    node.connection()
    node.round()
    assert "is lost: the driver calls it failed" in node.view()["failure"]


def test_it_waits_for_room_and_names_who_is_to_make_it(world, node):
    """The policy is told; nothing is restored before there is room."""
    pressed = []
    node.director.pressed = lambda: pressed.append(node.director.wanted(8))
    node.director.idle_s = lambda job_id: 100.0 if job_id == 8 else None
    node.sleep()
    other = node.job(job_id=8, link=FakeLink())
    node.agent.parts.registry.put(other)
    node.cards.processes = lambda: {node.cards.uuid: {other.init_pid + 3: 40 * GIB}}
    world.nodes["c1"].processes.append(replace(world.nodes["c1"].processes[0], pid=other.init_pid + 3, pid_ns=3))
    node.freezer.members = lambda init, started: [
        Member(other.init_pid + 3, 3, init, 5, "S", "python", 0),
        *node.freezer.processes.members(init, started)[:2],
    ]
    node.connection()
    node.round()
    assert pressed == [(7,)]
    assert node.director.wanted(8) == (7,)
    assert node.view()["waits"] == "job 8 makes room"
    assert BACK[1] not in world.effect_log


def test_the_deadline_marks_it_or_ends_it(world):
    """As the site has chosen; it keeps its place in the line."""
    for end in (False, True):
        ended: list[int | str] = []
        node = Node(world, Rules(deadline_s=60, end_on_deadline=end))
        node.agent.parts.slurm.cancel = ended.append
        node.sleep()
        node.cards.others = 79 * GIB
        node.connection()
        node.round()
        assert not node.view()["overdue"]
        world.clock += 60
        node.round()
        assert node.view()["overdue"]
        assert ended == ([7] if end else [])
        node.cards.others = 0
        node.round()
        assert awake(world)


def test_a_signal_lets_it_go_whether_there_is_room_or_not(world, node):
    """Its handlers run at once; its memory comes when there is room. One that came just before the freeze counts."""
    node.sleep()
    node.cards.others = 79 * GIB
    node.director.signalled(7, 15)
    assert [p.stopped for p in world.nodes["c1"].processes] == [False, False]
    assert node.phase() is Phase.WAKING
    node.round()
    assert node.view()["waits"]
    node.cards.others = 0
    node.round()
    assert awake(world)
    node.freezer.during = lambda: node.director.signalled(7, 15)
    node.sleep()
    node.round()
    assert awake(world)


def test_a_continue_of_which_nobody_told_is_noticed(world, node):
    """What runs would wait for its GPU, and not be seen."""
    node.sleep()
    for process in world.nodes["c1"].processes:
        process.stopped = False
    node.round()
    assert awake(world)


def test_it_wakes_at_its_time_or_where_nobody_could_ask_it(world, node):
    """wake=TIME; wake=auto of a job without a socket when there is room; wake=hold never by itself."""
    for option, sockets, sleeps in (
        (replace(OPTION, wake="now+30minutes"), True, False),
        (OPTION, False, False),
        (OPTION, True, True),
        (replace(OPTION, wake="hold"), False, True),
    ):
        node.sockets.has = sockets
        node.sleep(option=option)
        world.clock += 1799 if option.wake.startswith("now") else 0
        if option.wake.startswith("now"):
            world.clock -= 60
            node.round()
            assert asleep(world)
            world.clock += 61
        node.round()
        assert asleep(world) is sleeps
        if sleeps:
            node.director.wake(7, "alice")
            node.round()
        assert awake(world)


def test_one_that_has_ended_is_forgotten(world, node):
    """Its processes are gone: the ledger is told, the journal closed."""
    node.sleep()
    world.nodes["c1"].init, world.nodes["c1"].processes = None, []
    node.round()
    assert node.director.view(7) is None
    assert node.agent.parts.journal.open_records() == []
    assert [entry.ended_ms is not None for entry in entries(world)] == [True]
    with pytest.raises(Refused, match="does not sleep"):
        node.director.wake(7, "alice")


@pytest.mark.parametrize("at", range(1, 7))
def test_one_that_was_lost_with_its_node(world, at):
    """In whatever phase: its comment says so, also where Slurm is silent at first, and nothing of it is left."""
    node = Node(world)
    world.crash_at = at
    with contextlib.suppress(Crash):
        node.sleep()
        node.connection()
        node.round()
    assert world.crash_at is None
    world.nodes["c1"].init, world.nodes["c1"].processes = None, []
    world.answers = False
    after = Node(world)
    after.recover()
    assert len(after.agent.parts.journal.open_records()) == 1
    world.answers = True
    after.recover()
    assert after.agent.parts.journal.open_records() == []
    assert [entry.ended_ms is not None for entry in entries(world)] == [True]
    assert world.comment.startswith("lost: its processes on c1 ended while it was suspended (idle 15m)")


def test_one_that_was_cancelled_while_there_was_no_agent(world, node):
    """There is nothing to be told."""
    node.sleep()
    world.nodes["c1"].init, world.nodes["c1"].processes = None, []
    world.state = "CANCELLED"
    after = Node(world)
    after.recover()
    assert after.agent.parts.journal.open_records() == []
    assert [entry.ended_ms is not None for entry in entries(world)] == [True]
    assert world.comment == ""


def test_its_owner_is_told_by_mail(world, monkeypatch):
    """Of a sleep, of the first wake that fails, and when it is awake: once each. A sleep that is cut short is none."""
    mails: list[SuspensionMail] = []
    mailer = Mailer(mails.append, kinds=MAIL_KINDS, marks=world.root / "mailed", now=world.now)
    node = Node(world, mailer=mailer)

    def fails(pid: int, **_: object) -> None:
        raise CudaError("the driver failed")

    node.sleep()
    node.connection()
    with monkeypatch.context() as patch:
        patch.setattr(node.agent.cuda, "restore", fails)
        for _ in range(3):
            world.clock += 60
            node.round()
    world.clock += 60
    node.round()
    assert awake(world)
    mailer.settle()
    assert [mail.kind for mail in mails] == ["suspended", "failed", "restored"]
    facts = {(mail.in_place, mail.on_request, mail.job_name, mail.user) for mail in mails}
    assert facts == {(True, True, "train", "alice")}
    assert (mails[0].why, mails[1].why) == ("idle 15m", "the driver failed")
    assert mails[2].slept_s is not None
    node.sockets.now = dict(QUIET)
    node.freezer.during = node.connection
    node.sleep()
    node.round()
    mailer.settle()
    assert (awake(world), len(mails)) == (True, 3)


def test_its_owner_is_told_by_mail_that_it_is_ended(world, monkeypatch):
    """It has waited too long; also where a wake has failed before."""
    mails: list[SuspensionMail] = []
    mailer = Mailer(mails.append, kinds=MAIL_KINDS, marks=world.root / "mailed", now=world.now)
    node = Node(world, Rules(deadline_s=60, end_on_deadline=True), mailer=mailer)
    node.agent.parts.slurm.cancel = lambda job: None

    def fails(pid: int, **_: object) -> None:
        raise CudaError("the driver failed")

    node.sleep()
    node.connection()
    with monkeypatch.context() as patch:
        patch.setattr(node.agent.cuda, "restore", fails)
        node.round()
    node.cards.others = 79 * GIB
    world.clock += 60
    node.round()
    mailer.settle()
    assert [(mail.kind, mail.ended) for mail in mails] == [("suspended", False), ("failed", False), ("failed", True)]
    assert "it has waited for 6" in str(mails[2].why)


def test_who_was_woken_and_how_is_told(world, node):
    """For status."""
    told: list[tuple[int, str]] = []
    node.director.woken = lambda job_id, how: told.append((job_id, how))
    node.sleep()
    world.clock += 600
    node.connection()
    node.round()
    assert told == [(7, "awake after 10m in place: a connection waits on port 8000")]


def test_one_that_ends_while_it_is_woken(world, node, monkeypatch):
    """Nothing is left to be woken."""
    node.sleep()
    node.connection()

    def gone(*_: object, **__: object) -> None:
        raise TreeGoneError("gone")

    monkeypatch.setattr(node.freezer, "thaw", gone)
    node.round()
    assert node.director.view(7) is None


def test_a_prolog_waits_until_those_on_its_gpus_are_awake(world, node):
    """And is told of those that are not in time."""
    node.sleep()
    assert node.director.wake_on([1], "the prolog of job 9", 0.01) == []
    assert node.director.wake_on([0], "the prolog of job 9", 0.01) == [7]
    node.round()
    assert node.director.wake_on([0], "the prolog of job 9", 0.01) == []
    assert awake(world)


def test_the_driver_is_away(world, node):
    """It waits, with that reason; nothing is restored on what is not known."""
    node.sleep()
    node.connection()
    node.cards.lost = True
    node.round()
    assert node.view()["waits"] == "the driver is away"
    assert asleep(world)


def test_a_job_that_is_about_to_start_waits_for_room_in_its_turn(world):
    """It is let in when so much is free as the site says, and its room kept until it has taken it."""
    node = Node(world, Rules(start_free_pct=60, deadline_s=600))
    node.director.gpus_of = lambda job_id: [node.cards.uuid]
    node.cards.others = 10 * GIB
    links = {job_id: FakeLink() for job_id in (8, 9)}
    for job_id, link in links.items():
        job = node.job(job_id=job_id, root=0, init_pid=0, link=link)
        node.agent.parts.registry.put(job)
        assert not node.director.admit(job)
    node.round()
    assert [link.sent for link in links.values()] == [[Wait(fresh=True)]] * 2
    assert node.view_of(8)["waits"].startswith("it needs 48 GiB on GPU 0")
    assert node.view_of(9)["waits"] == "job 8 asked before it"
    assert node.sleep().failure is None  # job 7 gives back what it holds
    node.round()
    assert links[8].sent[-1] == Start()
    node.round()
    assert links[9].sent[-1] == Wait(fresh=True)
    world.clock += 31
    node.round()
    assert links[9].sent[-1] == Start()
    world.clock += 31
    node.round()
    assert len(node.director._starters) == 0


def test_one_that_waits_to_start_starts_after_the_deadline(world):
    """Or when there is nobody to wait for; a shepherd that comes again keeps its place."""
    node = Node(world, Rules(start_free_pct=60, deadline_s=60))
    node.director.gpus_of = lambda job_id: [node.cards.uuid]
    node.cards.others = 79 * GIB
    link = FakeLink()
    job = node.job(job_id=8, root=0, link=link)
    node.agent.parts.registry.put(job)
    assert not node.director.admit(job)
    assert not node.director.admit(job)
    world.clock += 11
    node.round()
    assert link.sent == [Wait(fresh=True)] * 3
    world.clock += 60
    node.round()
    assert link.sent[-1] == Start()
    node.agent.parts.registry.remove(8)
    node.round()
    assert len(node.director._starters) == 0
    assert Node(world).director.admit(job)


def step(name: str) -> Any:
    return type("Step", (), {"id": f"7.{name}", "step": name})()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"steps": (step("batch"), step("0"))}, "srun-steps"),
        ({"node_count": 2}, "multi-node"),
        ({"het_job_id": 5}, "heterogeneous"),
    ],
)
def test_what_is_not_below_its_script_is_refused(world, node, changes, code, monkeypatch):
    """By name, before anything is touched."""
    slurm: Job = replace(node.agent.parts.slurm.job(7), **changes)
    assert code in [refusal.code for refusal in node.suspender.refusals(node.job(slurm=slurm))]
    monkeypatch.setattr(node.agent.parts.slurm, "job", lambda job: slurm)
    with pytest.raises(Refused):
        node.sleep()
    assert world.effect_log == []


def test_what_could_not_wake_or_has_nothing_to_give_is_refused(world, node):
    """More memory than may be awake at once; none at all; a script that has not begun."""
    tight = Node(world, Rules(awake_limit_pct=50))
    assert [one.code for one in tight.suspender.refusals(tight.job())] == ["awake-limit"]
    next(p for p in world.nodes["c1"].processes if p.cuda).cuda = None
    assert [one.code for one in node.suspender.refusals(node.job())] == ["no-gpu-memory"]
    world.nodes["c1"].processes = []
    assert "not-started" in [one.code for one in node.suspender.refusals(node.job())]


def test_what_does_not_fit_into_host_memory_is_refused_with_the_numbers(world, node):
    """Below the job's own limit, and on the node; nothing is touched."""
    for memory, said in (
        (MemoryFacts(1 << 40, 40 << 30), "(48 GiB) does not fit below its memory limit, which leaves 40 GiB"),
        (MemoryFacts(20 << 30), "(48 GiB) does not fit into the node's free memory (20 GiB)"),
    ):
        sleeping = node.suspender._by_mode[Mode.INPLACE]
        sleeping._memory = HostMemory(replace(node.agent.parts, memory=lambda pid, memory=memory: memory))
        with pytest.raises(Refused) as refused:
            node.sleep()
        assert refused.value.refusal.code == "host-memory"
        assert said in str(refused.value)
    assert world.effect_log == []


@pytest.mark.parametrize(("params", "refused"), [("OverMemoryKill", True), ("UsePss", False)])
def test_slurm_that_ends_jobs_above_their_memory_limit(world, node, monkeypatch, params, refused):
    """What moves into host memory would be the job's end."""
    monkeypatch.setattr(node.agent.parts.slurm, "config", lambda: {"JobAcctGatherParams": params})
    slurm = replace(node.agent.parts.slurm.job(7), tres_allocated={"mem": "40G"})
    found = node.suspender.refusals(node.job(slurm=slurm))
    assert [one.code for one in found] == (["host-memory"] if refused else [])


def test_slurm_need_not_answer(world, node):
    """Nothing is asked of it: its last word has to do."""
    job = node.job()
    world.answers = False
    assert node.suspender.suspend(job, "idle", look_again=lambda: None).failure is None
    node.connection()
    node.round()
    assert awake(world)


def test_one_at_a_time(world, node):
    """A job that is being put to sleep is not put to sleep beside that."""
    seen: list[str] = []

    def again() -> str | None:
        try:
            node.sleep()
        except Refused as error:
            seen.append(error.refusal.code)
        return None

    node.suspender.suspend(node.job(), "idle", look_again=again)
    assert seen == ["busy"]
