"""Jobs suspended in place in the rest of the agent: messages, requests, prolog, idleness, policy."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from agent_stand_ins import Gpus, Node1, Shepherd, agent, config_of
from agent_stand_ins import job as slurm_job
from waiting import DEADLINE_S, wait_until

from slurm_affinode.agent import hooks
from slurm_affinode.agent.client import AnswerError, ask_local
from slurm_affinode.agent.loop import Loop
from slurm_affinode.base.config import parse
from slurm_affinode.base.errors import ConfigError
from slurm_affinode.cli import status as status_command
from slurm_affinode.core.idle import IdleRule, IdleState, Verdict
from slurm_affinode.core.policy import Candidate, NodeRoom, Surroundings, SuspendPolicy, Waiting, decide
from slurm_affinode.gpu.interface import GpuLost
from slurm_affinode.model.gpu import Device, ProcessUtilization
from slurm_affinode.model.suspension import Mode, Phase, Pressure, Refusal, RefusalCode, SuspendOption
from slurm_affinode.suspension.activity import Watch
from slurm_affinode.suspension.inplace.sock_diag import ESTABLISHED, NetSpace, Sock, SockDiagError
from slurm_affinode.suspension.inplace.sockets import JobSockets, NodeSockets, states_of, table_of
from slurm_affinode.suspension.interface import Refused
from slurm_affinode.suspension.job.peers import Inspector
from slurm_affinode.suspension.job.registry import WatchedJob
from slurm_affinode.suspension.job.shepherd import BadMessage, Signalled, Start, Wait, decode, encode

VIEW: dict[str, Any] = {
    "starting": False, "since": 1_760_000_000.0, "asleep_s": 720.0, "why": "idle 15m", "gpu_bytes": 48 << 30,
    "frozen_by": "signals", "wakes_on_request": True, "suspended_by_slurm": False, "asked": None, "asked_why": None,
    "waking": False, "waits": None, "overdue": False, "failure": None,
}  # fmt: skip


class Sleepers:
    """An ``interface.InPlace`` with prepared answers."""

    def __init__(self) -> None:
        self.asleep: dict[int, dict[str, Any]] = {}
        self.requests: list[tuple[object, ...]] = []
        self.admits = True

    def start(self) -> None: ...
    def stop(self) -> None: ...

    def admit(self, job: WatchedJob) -> bool:
        return self.admits or not job.link.send(Wait(fresh=True))

    def holds(self, job_id: int) -> Phase | None:
        return Phase.FROZEN if job_id in self.asleep else None

    def wake(self, job_id: int, who: str) -> None:
        if job_id not in self.asleep:
            raise Refused(Refusal(RefusalCode.NOT_SUSPENDED, "it does not sleep"))
        self.requests.append((job_id, who))

    def wake_on(self, indices: Sequence[int], why: str, timeout_s: float) -> list[int]:
        self.requests.append((*indices, why, timeout_s))
        return sorted(self.asleep)

    def signalled(self, job_id: int, number: int) -> None:
        self.requests.append((job_id, number))

    def needed_by(self, job_id: int) -> tuple[int, ...]:
        return ()

    def view(self, job_id: int) -> dict[str, Any] | None:
        return self.asleep.get(job_id)


def text_of(directory: Path, inplace: str = "") -> str:
    return f'[agent]\nrun_dir = "{directory}/run"\n[inplace]\n{inplace}\n'


@pytest.fixture
def sleepers() -> Sleepers:
    return Sleepers()


@pytest.fixture
def node(tmp_path: Path, sleepers: Sleepers) -> Iterator[Node1]:
    with agent(config_of(tmp_path)) as running:
        daemon = running.daemon
        changed = replace(daemon.orchestration, in_place=sleepers)
        daemon.service.orchestration = daemon.loop.orchestration = daemon.arrivals._orchestration = changed
        yield running


def ask(node: Node1, verb: str, **fields: object) -> dict[str, Any]:
    return ask_local(node.run_dir, {"verb": verb, **fields})


def test_messages_are_encoded_and_decoded() -> None:
    """A signal is sent by number; a wait for room differs from a wait for an image."""
    assert decode(b"signalled\nnumber=15") == Signalled(15)
    assert (encode(Wait()), encode(Wait(fresh=True))) == (b"wait\nreports=1", b"wait\nfresh=1")
    for number in (b"0", b"65", b"x", b""):
        with pytest.raises(BadMessage):
            decode(b"signalled\nnumber=" + number)


def test_shepherd_reports_signals_and_waits_for_room(node: Node1, sleepers: Sleepers) -> None:
    """Its job starts when there is room; jobs with another mode never wait for room."""
    assert Shepherd(node.run_dir).hello().hear() == "start"
    node.daemon.registry.remove(7)
    sleepers.admits = False
    shepherd = Shepherd(node.run_dir, option="window=1,mode=inplace").hello()
    assert shepherd.hear() == "wait\nfresh=1"
    shepherd.send("signalled\nnumber=15")
    wait_until("the signal is reported", lambda: sleepers.requests, lambda requests: requests == [(7, 15)])


def test_requeued_job_waits_for_room(node: Node1, sleepers: Sleepers) -> None:
    """Requeued by Slurm after its node was lost: it has no image, and other jobs hold its GPU."""
    sleepers.admits = False
    node.acts.reply = Start()
    node.acts.go.set()
    shepherd = Shepherd(node.run_dir, option="window=1,mode=inplace", restarts=1).hello()
    assert [shepherd.hear(), shepherd.hear()] == ["wait\nreports=1", "wait\nfresh=1"]
    assert node.watched().restarts == 1


def test_suspended_job_is_shown_and_woken_and_not_suspended_again(node: Node1, sleepers: Sleepers) -> None:
    """Its owner wakes it through the control socket."""
    Shepherd(node.run_dir, root=2).hello()
    node.watched()
    with pytest.raises(AnswerError, match="is not suspended"):
        ask(node, "wake", job=7)
    sleepers.asleep = {7: VIEW}
    row = ask(node, "status", job=7)["jobs"][0]
    assert (row["state"], row["in_place"]["gpu_bytes"], row["memory_held_bytes"]) == ("asleep", 48 << 30, 0)
    assert ask(node, "wake", job=7)["in_place"] is True
    assert sleepers.requests[-1][0] == 7
    with pytest.raises(AnswerError, match="sleeps in place"):
        ask(node, "suspend", job=7)
    sleepers.asleep = {7: {**VIEW, "asked": 1.0}}
    assert ask(node, "status")["jobs"][0]["state"] == "waking"
    sleepers.asleep = {7: {"starting": True, "asked": 1.0, "waits": "job 8 is ahead of it in the queue"}}
    assert ask(node, "status")["jobs"][0]["state"] == "starting"


def test_prologs_wake_jobs_only_if_configured(
    node: Node1, sleepers: Sleepers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Jobs that stay suspended are reported, and the job of the prolog starts."""
    env = {"SLURM_JOB_ID": "9", "SLURM_JOB_UID": "2001", "SLURM_JOB_GPUS": "0,1"}
    path = tmp_path / "config.toml"
    path.write_text(text_of(tmp_path))
    assert hooks.main("prolog", path, env) == 0
    assert ask(node, "prolog-wakes", job=9, uid=0, gpus=[0])["asleep"] == []
    assert sleepers.requests == []
    path.write_text(text_of(tmp_path, "wake_at_prolog = true\nprolog_timeout = '3s'"))
    node.daemon.service.prolog_s = 3.0
    sleepers.asleep = {7: VIEW}
    assert hooks.main("prolog", path, env) == 0
    assert sleepers.requests == [(0, 1, "the prolog of job 9", 3.0)]
    assert "job 7 still sleeps in place on its GPUs" in capsys.readouterr().err
    path.write_text(text_of(tmp_path, "wake_at_prolog = true\nprolog_timeout = 'soon'"))
    assert hooks.main("prolog", path, env) == 0
    assert "soon" in capsys.readouterr().err


def test_only_own_processes_count_on_shared_gpu() -> None:
    """Signals of the whole GPU count if it is not shared, or if the driver cannot distinguish processes."""
    own_process = next(iter(Inspector().tree(1)))

    class Shared(Gpus):
        used: Sequence[ProcessUtilization] = (ProcessUtilization(4242, 10, 80.0, 40.0),)

        def process_utilization(self, device: Device, since_us: int = 0) -> Sequence[ProcessUtilization]:
            return self.used

    gpus = Shared(count=1, util_pct={0: 80.0}, holders={0: [own_process, 4242]})
    watch = Watch(gpus, Inspector())  # type: ignore[arg-type]
    shared = watched(SuspendOption(mode=Mode.INPLACE), own_process)
    seen = watch.sample(shared, IdleRule(60)).gpus[0]
    assert (seen.signals["utilization"], seen.signals["processes"], seen.used_bytes) == (0.0, 0.0, 1 << 30)
    gpus.used = (*gpus.used, ProcessUtilization(own_process, 11, 5.0, 7.0))
    assert watch.sample(shared, IdleRule(60)).gpus[0].signals == {"utilization": 5.0, "memory": 7.0, "processes": 7.0}
    assert watch.sample(watched(SuspendOption(), own_process), IdleRule(60)).gpus[0].signals["utilization"] == 80.0
    gpus.used = (ProcessUtilization(own_process, 12, 0.0, 0.0),)  # with MPS, no process has the activity of the GPU
    assert watch.sample(shared, IdleRule(60)).gpus[0].signals["utilization"] == 80.0
    gpus.holders = {0: [own_process]}
    alone = watch.sample(shared, IdleRule(60)).gpus[0]
    assert (alone.signals["utilization"], alone.used_bytes) == (80.0, 1 << 30)
    gpus.holders = {}
    alone = watch.sample(shared, IdleRule(60)).gpus[0]
    assert alone.used_bytes == 0  # the memory in use there is not its own
    assert watch.sample(watched(SuspendOption(), own_process), IdleRule(60)).gpus[0].used_bytes == 1 << 30
    gpus.holders = {0: [own_process, 4242]}

    def lost(device: Device, since_us: int = 0) -> Sequence[ProcessUtilization]:
        raise GpuLost("GPU 0: lost")

    gpus.process_utilization = lost  # type: ignore[method-assign]
    assert watch.sample(shared, IdleRule(60)).gpus[0].signals["utilization"] == 80.0


def test_memory_of_job_with_shards_is_that_of_its_processes() -> None:
    """With mode=requeue, too, Slurm gives such a job no GPU of its own, and memory of other jobs does not count."""
    own_process = next(iter(Inspector().tree(1)))
    watch = Watch(Gpus(count=1, holders={0: [4242]}), Inspector())  # type: ignore[arg-type]
    whole = watched(SuspendOption(), own_process)
    assert watch.sample(whole, IdleRule(60)).gpus[0].used_bytes == 1 << 30
    shards = replace(whole, slurm=slurm_job(node_gpus=()))
    assert watch.sample(shards, IdleRule(60)).gpus[0].used_bytes == 0


def watched(option: SuspendOption, pid: int) -> WatchedJob:
    return WatchedJob(
        job_id=7, uid=1, gid=1, restarts=0, option=option, init_pid=pid, init_started=1, root=2,
        link=None, since_epoch=0, devices=(Device("GPU-0", 0),),  # type: ignore[arg-type]
    )  # fmt: skip


JOB = Candidate(
    job_id=100, option=SuspendOption(mode=Mode.INPLACE),
    idle=IdleState(900, Verdict.IDLE, "", 900, 0.0, 900, (), None), run_s=7200.0, user="alice", account="vision",
    partition="gpu", gpus=1, gpu_kind="h100", cpus=1, memory_mib=500,
)  # fmt: skip
QUIET = Surroundings((), NodeRoom("c1", ("gpu",), "h100", 0, 6, 12000), no_room="the store is full")


def test_policy_for_jobs_in_place() -> None:
    """A job is suspended for one that waits to wake on its GPU; image stores and promises do not apply."""
    assert decide(SuspendPolicy(), JOB, QUIET).code == "no-pressure"
    decision = decide(SuspendPolicy(), replace(JOB, needed_by=("7",)), QUIET)
    assert (decision.act, decision.text) == (True, "idle 15m, job 7 waits to wake")
    always = replace(JOB, option=replace(JOB.option, when=Pressure.ALWAYS))
    assert decide(SuspendPolicy(), always, QUIET).act
    requeued = replace(JOB, option=SuspendOption())
    assert "no-room" in [refusal.code for refusal in decide(SuspendPolicy(), requeued, QUIET).against]
    assert not decide(SuspendPolicy(dry_run=True), replace(JOB, needed_by=("7",)), QUIET).act


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (True, "no job waits to wake or to start on its GPUs"),
        (None, "no job waits to wake or to start on its GPUs"),
        (False, "its GPUs are allocated to it alone"),
    ],
)
def test_pending_job_is_no_pressure_on_job_in_place(shares: bool | None, message: str) -> None:
    """The suspension keeps the allocation: the pending job could not start, whether the queue is known or not."""
    waiting = Waiting(131, "131", ("gpu",), "Resources", is_held=False, priority=10, gpus=1, cpus=1, memory_mib=500)
    job = replace(JOB, shares_gpus=shares)
    for queue in ((waiting,), (), None):
        decision = decide(SuspendPolicy(), job, replace(QUIET, waiting=queue))
        assert (decision.act, decision.code, decision.for_jobs) == (False, "no-pressure", ())
        assert message in decision.text
    requeued = replace(JOB, option=SuspendOption())
    assert decide(SuspendPolicy(), requeued, replace(QUIET, waiting=(waiting,), no_room=None)).act


BUSY = IdleState(900, Verdict.BUSY, "GPU 0: utilization 80 is above 0", 900, None, 0, (), None)


@pytest.mark.parametrize(
    ("change", "turn_s", "acts"),
    [
        ({}, 30.0, True),
        ({}, 29.0, False),
        ({}, None, False),
        ({"needed_by": ()}, 30.0, False),
        ({"refusals": (Refusal(RefusalCode.SRUN_STEPS, "it runs srun"),)}, 30.0, False),
        ({"run_s": 10.0}, 30.0, False),
        ({"option": SuspendOption()}, 30.0, False),
        ({"short_sleeps": 3}, 30.0, True),
    ],
)
def test_turn_of_busy_job_ends_for_one_that_waits(change: dict[str, Any], turn_s: float | None, acts: bool) -> None:
    """Nothing but its activity may be against it; without a limit of the site it keeps its memory."""
    policy = SuspendPolicy(max_turn_s=0.0 if turn_s is None else 30.0)
    job = replace(replace(JOB, idle=BUSY, needed_by=("7",), turn_s=turn_s or 9e9), **change)
    decision = decide(policy, job, QUIET)
    assert (decision.act, decision.busy) == (acts, acts)
    if acts:
        assert decision.text == "its turn of 30s is over, job 7 waits to wake"
    assert not decide(replace(policy, dry_run=True), job, QUIET).act


def test_turn_begins_with_the_wake(node: Node1) -> None:
    """It ends after ``inplace.max_turn``, unless the rules of the site are against it for good."""
    loop: Loop = node.daemon.loop
    Shepherd(node.run_dir, root=2, option="window=3600,mode=inplace,when=pressure").hello()
    node.watched()
    wait_until("it is decided", lambda: loop.turn_left_s(7), lambda left: left is not None)
    node.daemon.end()
    node.thread.join(DEADLINE_S)
    state = loop.states[7]
    assert state.decision is not None
    now = [loop.clock()]
    loop.clock = lambda: now[0]
    loop.woken(7, None)
    assert (loop.turn_left_s(7), state.short_sleeps) == (30.0, 0)
    now[0] += 31
    assert loop.turn_left_s(7) == -1
    state.decision = replace(state.decision, against=(Refusal(RefusalCode.MIN_RUN, "it has run for 3s"),))
    assert (loop.turn_left_s(7) or 0) > 0
    state.decision = replace(
        state.decision, against=(Refusal(RefusalCode.EXCLUDED_USER, "the site excludes user alice"),)
    )
    assert loop.turn_left_s(7) is None
    loop.restart(7)
    state.decision = replace(state.decision, against=(Refusal(RefusalCode.NO_PRESSURE, "no job waits"),))
    assert loop.turn_left_s(7) == 30


def test_default_share_for_a_start_fits_below_the_limit() -> None:
    """Servers on shares do not start beside awake ones by default; a lower limit of the site applies to it as well."""
    assert parse("", where="test").inplace.start_pct == 60
    assert parse("[inplace]\nawake_limit_pct = 50", where="test").inplace.start_pct == 50
    assert parse("[inplace]\nstart_free_pct = 0", where="test").inplace.start_pct == 0


def test_job_is_movable_without_pressure(node: Node1) -> None:
    """It is not movable if there is another reason against it, or if it is not idle."""
    loop: Loop = node.daemon.loop
    assert loop.movable_s(7) is None
    Shepherd(node.run_dir, root=2, option="window=1,mode=inplace,when=pressure").hello()
    node.watched()
    wait_until("it is movable", lambda: loop.movable_s(7), lambda idle: idle is not None)
    node.daemon.end()
    node.thread.join(DEADLINE_S)
    state = loop.states[7]
    assert state.decision is not None
    state.decision = replace(state.decision, against=(Refusal(RefusalCode.SRUN_STEPS, "it runs srun"),))
    assert loop.movable_s(7) is None


def test_waiting_for_room_to_start_is_not_idle(node: Node1, sleepers: Sleepers) -> None:
    """Its idle window begins with its script: else it would be suspended as soon as it had allocated its memory."""
    loop: Loop = node.daemon.loop
    sleepers.asleep[7] = {"starting": True, "asked": 1.0, "waits": "job 8 makes room"}
    sleepers.admits = False
    Shepherd(node.run_dir, root=2, option="window=1,mode=inplace,when=pressure").hello()
    node.watched()
    for _ in range(3):
        loop.tick()
    assert loop.states[7].detector.state is None
    del sleepers.asleep[7]
    wait_until("it is sampled", lambda: loop.states[7].detector.state)


def shown(row: dict[str, Any]) -> str:
    with redirect_stdout(io.StringIO()) as out:
        status_command._show(row, dry_run=False)
    return out.getvalue()


def test_status_as_text() -> None:
    """The text covers jobs that are asleep, wait to wake, failed, or wait to start."""
    row: dict[str, Any] = {
        "job_id": 7, "shown_id": "7", "user": "alice", "node": "c1", "state": "asleep", "in_place": VIEW, "idle": None,
        "gpus": [{"name": "GPU 0", "uuid": "GPU-a"}], "option": {"wake": "auto"},
    }  # fmt: skip
    text = shown(row)
    assert "in place: idle 15m, 48 GiB in host memory, wakes on a request" in text
    assert "memory limit" not in text
    raised = {**row, "in_place": {**VIEW, "limit_raised_bytes": 30 << 30}}
    assert "memory limit raised by 30 GiB until it is awake" in shown(raised)
    assert "or: slurm-affinode wake 7" in text
    assert status_command._line(row)[4:] == ("asleep 12m", "48 GiB in host memory", "wakes on a request")
    waits = {**VIEW, "asked": 1_760_000_600.0, "asked_why": "a connection waits on port 8000", "overdue": True,
             "waits": "job 8 is busy", "failure": "the driver failed"}  # fmt: skip
    text = shown({**row, "state": "waking", "in_place": waits})
    for part in ("a connection waits on port 8000", "job 8 is busy", "longer than the site's", "the driver failed"):
        assert part in text
    starting = {**row, "state": "starting", "in_place": {"starting": True, "asked": 1.0, "waits": "job 8 makes room"}}
    assert "job 8 makes room" in shown(starting)
    assert status_command._line(starting)[-1] == "job 8 makes room"
    unasked = {**row, "in_place": {**VIEW, "wakes_on_request": False}, "gpus": None, "option": {"wake": "hold"}}
    assert "on request; or: slurm-affinode wake 7" in shown(unasked)
    assert status_command._line(unasked)[-1] == "on request"
    stopped = {**row, "in_place": {**VIEW, "suspended_by_slurm": True}}
    assert "Slurm has suspended it; an operator resumes it with: scontrol resume 7" in shown(stopped)
    back = {**row, "state": "waking", "in_place": {**waits, "waits": None}}
    assert "its memory is being restored" in shown(back)
    caught = {**back, "in_place": {**back["in_place"], "suspended_by_slurm": True}}
    assert "for Slurm, which has suspended it during the wake; an operator resumes it with: scontrol resume 7" in shown(
        caught
    )
    task = {**row, "job_id": 9, "shown_id": "7_2"}
    assert "or: slurm-affinode wake 7_2" in shown(task)
    assert "scontrol resume 7_2" in shown({**task, "in_place": stopped["in_place"]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poll_ms = 1", "poll_ms: 1 is not from 10"),
        ("freeze_timeout = 'soon'", "inplace.freeze_timeout"),
        ("wake_deadline = '0s'", "wake_deadline: 0s is not above 0"),
        ("awake_limit_pct = 0.0", "awake_limit_pct"),
        ("awake_limit_pct = 50.0\nstart_free_pct = 60.0", "start_free_pct: 60"),
        ("on_deadline = 'kill'", "on_deadline: 'kill' is not one of wait, end"),
        ("polls = 1", "inplace.polls"),
    ],
)
def test_invalid_configuration_is_rejected(text: str, message: str) -> None:
    """The error names the key."""
    with pytest.raises(ConfigError, match=message):
        parse(f"[inplace]\n{text}\n", where="test")


class FakeDiag:
    """Sockets of a namespace; ``None``: sock_diag does not respond."""

    def __init__(self, socks: dict[int, Sock] | None) -> None:
        self.socks, self.closed = socks, False
        self.queries: list[tuple[str, ...]] = []

    def dump(self, only: frozenset[int] | None = None, families: Collection[str] = ("tcp", "unix")) -> dict[int, Sock]:
        if self.socks is None:
            raise SockDiagError("sock_diag does not respond")
        self.queries.append(tuple(families))
        return {inode: sock for inode, sock in self.socks.items() if only is None or inode in only}

    def pending(self) -> dict[int, list[bytes]]:
        return {}

    def close(self) -> None:
        self.closed = True


def test_each_namespace_is_queried_once() -> None:
    """Jobs get their own sockets; a namespace that does not respond excludes its jobs, and is reported once."""
    sock = Sock(5, "tcp", ESTABLISHED, 0, port=80, received=3)
    opened: list[FakeDiag] = []
    answers: dict[int, dict[int, Sock] | None] = {1: {5: sock, 6: replace(sock, inode=6)}, 2: None}
    warnings: list[str] = []

    def open_diag(space: Any) -> FakeDiag:
        opened.append(FakeDiag(answers[space.inode]))
        return opened[-1]

    sockets = NodeSockets(open_diag=open_diag, warn=warnings.append)
    first, second = (cast(NetSpace, SimpleNamespace(inode=inode)) for inode in (1, 2))
    job_sockets = JobSockets({1: frozenset({5})}, {1: first})
    other = JobSockets({1: frozenset({6}), 2: frozenset({9})}, {1: first, 2: second})
    for _ in range(3):
        assert sockets.observations({7: job_sockets, 8: other}) == {7: {5: sock}}
    assert len(warnings) == 1
    assert opened[0].queries == [("tcp", "unix"), ("tcp",), ("tcp",)]
    assert [diag.socks is None for diag in opened].count(False) == 1
    assert sockets.read(job_sockets) == {5: sock}
    assert sockets.observations({}) == {}
    assert all(diag.closed for diag in opened if diag.socks is not None)
    sockets.close()
    assert table_of(states_of({5: sock})) == {5: sock}
    assert (bool(job_sockets), bool(JobSockets())) == (True, False)
