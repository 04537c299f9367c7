"""Suspend and restore with the agent killed before every single effect: a job is never lost and never doubled."""

from __future__ import annotations

import pytest
from agent_world import Agent, Crash, FakeProcesses, World

from slurm_affinode.agent.interface import Refused
from slurm_affinode.agent.parts import Settings
from slurm_affinode.agent.shepherds import Hold, Restored, Start
from slurm_affinode.checkpoint.interface import Capabilities, CudaUnavailable
from slurm_affinode.checkpoint.writer import ImageWriter
from slurm_affinode.model.ledger import decode
from slurm_affinode.model.suspension import Mode, Phase, SuspendOption

STEPS = 4711
SUSPEND_EFFECTS = ["lock", "checkpoint", "dump", "requeue", "kill"]
RESTORE_EFFECTS = ["criu restore", "restore", "unlock"]


@pytest.fixture(autouse=True)
def killed_writers_leave_what_they_wrote(monkeypatch):
    """A process that is killed removes nothing, but its locks are gone."""
    leave = ImageWriter.__exit__

    def quit_(self, *exc):
        if exc[0] is Crash:
            self.leave()
        else:
            leave(self, *exc)

    monkeypatch.setattr(ImageWriter, "__exit__", quit_)
    FakeProcesses.held = False


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    made.start_run("c1")
    made.start_script("c1", STEPS)
    return made


def recovered(world, node="c1"):
    """A new agent on the node, with everything done that its start brings with it."""
    agent = Agent(world, node)
    agent.keeper.recover()
    for _ in range(3):
        agent.keeper._stop.set()
        with agent.keeper._lock:
            waiting = list(agent.keeper._waiting.values())
        for record in waiting:
            agent.keeper._try(record)
    agent.aftermath.settle()
    return agent


def check(world):
    """What has to be true whenever an agent has had the time to put things in order."""
    assert world.ran_stopped == 0
    assert world.copies() <= 1
    if world.state == "RUNNING":
        assert world.running()
        assert world.steps() == [STEPS]
        return
    assert (world.state, world.copies()) == ("PENDING", 0)
    agent = Agent(world, "c2")
    assert agent.images(shared=True) == [1]
    assert world.comment.startswith("suspended: idle 15m, 1.0 MiB, wake with: slurm-affinode wake 7")


def go_on_at_c2(world):
    """The job is released and started at the other node, whose agent puts its image in place."""
    if world.state == "PENDING":
        world.start_run("c2")
        world.nodes["c1"].init = None
        agent = Agent(world, "c2")
        assert agent.restore() == Restored(2)
    assert world.running()
    assert world.steps() == [STEPS]
    assert world.copies() == 1


def ledger(world):
    lines = [
        decode(line)
        for path in sorted((world.root / "shared" / "ledger").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    merged = lines[0]
    for line in lines[1:]:
        assert line.key == merged.key
        merged = merged.merged(line)
    return merged


def test_a_job_sleeps_and_goes_on_at_another_node(world):
    """All of it once, with what the ledger says of it."""
    agent = Agent(world, "c1")
    done = agent.suspend()
    agent.settle()
    assert (done.phase, done.failure, done.gpus) == (Phase.QUEUED, None, 1)
    assert world.effect_log == SUSPEND_EFFECTS
    assert world.held
    check(world)
    assert agent.parts.journal.open_records() == []
    [sleeping] = Agent(world, "c2").keeper.suspended()
    assert (sleeping.where, sleeping.why, sleeping.node) == ("shared", "idle 15m", "c1")
    go_on_at_c2(world)
    assert world.comment == ""
    entry = ledger(world)
    times = [entry.began_ms, entry.locked_ms, entry.parked_ms, entry.dumped_ms, entry.queued_ms, entry.restoring_ms]
    assert times == sorted(times)
    assert (entry.user, entry.gpus, entry.gpu_model, entry.restored_node) == ("alice", 1, "H100", "c2")
    assert Agent(world, "c2").keeper.suspended() == []


def test_a_sleeper_that_is_cancelled_gives_nothing_back_any_more(world):
    """Its first run's epilog may be what tells of it: the images go, and the ledger knows that it is over."""
    agent = Agent(world, "c1")
    agent.suspend()
    agent.settle()
    world.state = "CANCELLED"
    agent.keeper.ended(7, requeued=True)
    assert agent.images(shared=True) == [1]
    agent.keeper.ended(7, requeued=False)
    assert agent.images(shared=True) == agent.keeper.suspended() == []
    entry = ledger(world)
    assert entry.ended_ms is not None
    assert entry.ended_ms >= entry.queued_ms


@pytest.mark.parametrize("at", range(1, len(SUSPEND_EFFECTS) + 1))
def test_an_agent_killed_while_it_suspends_loses_and_doubles_nothing(world, at):
    """Killed before each effect; a new agent makes it whole, and the job goes on with its memory."""
    world.crash_at = at
    with pytest.raises(Crash):
        Agent(world, "c1").suspend()
    recovered(world)
    check(world)
    go_on_at_c2(world)


@pytest.mark.parametrize("second", range(1, 5))
@pytest.mark.parametrize("first", range(2, len(SUSPEND_EFFECTS) + 1))
def test_an_agent_killed_again_while_it_recovers(world, first, second):
    world.crash_at = first
    with pytest.raises(Crash):
        Agent(world, "c1").suspend()
    world.effects, world.crash_at = 0, second
    try:
        recovered(world)
    except Crash:
        recovered(world)
    world.crash_at = None
    check(world)
    go_on_at_c2(world)


@pytest.mark.parametrize("at", range(1, len(SUSPEND_EFFECTS) + 1))
def test_recovery_waits_for_slurm(world, at):
    """slurmctld is away when the agent comes back: nothing is killed before it has said what the job is."""
    world.crash_at = at
    with pytest.raises(Crash):
        Agent(world, "c1").suspend()
    world.answers = False
    recovered(world)
    assert world.copies() == 1 or world.state == "PENDING"
    world.answers = True
    recovered(world)
    check(world)
    go_on_at_c2(world)


@pytest.mark.parametrize("at", range(1, len(SUSPEND_EFFECTS) + 1))
def test_a_node_that_dies_while_it_suspends(world, at):
    """Its processes are gone, Slurm requeues the job: from its image where that was complete, else from the start."""
    world.crash_at = at
    with pytest.raises(Crash):
        Agent(world, "c1").suspend()
    world.nodes["c1"].init, world.nodes["c1"].processes = None, []
    if world.state == "RUNNING":
        world.state, world.restarts = "PENDING", world.restarts + 1
    recovered(world)
    complete = "requeue" in world.effect_log or at == SUSPEND_EFFECTS.index("requeue") + 1
    assert Agent(world, "c2").images(shared=True) == ([1] if complete else [])
    world.start_run("c2")
    agent = Agent(world, "c2")
    assert isinstance(agent.restore(), Restored if complete else Start)
    assert world.steps() == [STEPS if complete else 0]


def test_a_node_that_is_back_before_slurm_has_missed_it(world):
    """Killed before the requeue, with a complete image; Slurm still takes the job for running: it is requeued."""
    world.crash_at = SUSPEND_EFFECTS.index("requeue") + 1
    with pytest.raises(Crash):
        Agent(world, "c1").suspend()
    world.nodes["c1"].init, world.nodes["c1"].processes = None, []
    recovered(world)
    check(world)
    go_on_at_c2(world)


@pytest.mark.parametrize("at", range(1, len(RESTORE_EFFECTS) + 1))
def test_an_agent_killed_while_it_restores(world, at):
    """What its restore had made is ended, and the image put in place from the beginning."""
    agent = Agent(world, "c1")
    agent.suspend()
    agent.settle()
    world.nodes["c1"].init = None
    world.start_run("c2")
    world.effects, world.crash_at = 0, at
    with pytest.raises(Crash):
        Agent(world, "c2").restore()
    again = recovered(world, "c2")
    assert again.restore() == Restored(2)
    check(world)
    assert again.parts.journal.open_records() == []


def test_three_suspensions_in_a_row(world):
    """Each image is newer than the one before, and the newest is put in place."""
    node = "c1"
    for number in (1, 2, 3):
        agent = Agent(world, node)
        world.nodes[node].processes[1].steps = STEPS + number
        done = agent.suspend()
        agent.settle()
        assert (done.seq, done.failure) == (number, None)
        world.nodes[node].init = None
        node = "c2" if node == "c1" else "c1"
        world.start_run(node)
        assert Agent(world, node).restore() == Restored(2)
        assert world.steps() == [STEPS + number]
        assert Agent(world, node).keeper.identify(Agent(world, node).watched())[1] == number


def test_a_lock_that_times_out_leaves_the_job_running(world):
    agent = Agent(world, "c1")
    agent.cuda.times_out = {3}
    done = agent.suspend()
    assert done.phase is Phase.RUNNING
    assert "busy" in (done.failure or "")
    check(world)
    assert world.comment.startswith("runs on: its GPU is busy")
    assert ledger(world).failure == "its GPU is busy"


def test_a_job_that_computes_again_is_let_go_under_the_lock(world):
    done = Agent(world, "c1").suspend(lambda: "GPU 0 at 40 %")
    assert done.failure == "it is not idle any more: GPU 0 at 40 %"
    assert world.effect_log == ["lock", "continue", "unlock"]
    check(world)


def test_slurm_that_refuses_the_requeue_gives_the_job_its_gpus_back(world, monkeypatch):
    from agent_world import Slurm

    from slurm_affinode.slurm.faults import NotPermittedError

    def refuse(self, job, *, hold=False):
        raise NotPermittedError("requeue job 7: access denied")

    monkeypatch.setattr(Slurm, "requeue", refuse)
    agent = Agent(world, "c1")
    done = agent.suspend()
    assert "access denied" in (done.failure or "")
    check(world)
    assert agent.images(shared=False) == []


def test_slurm_that_goes_away_in_the_middle_is_waited_for(world, monkeypatch):
    """The image is made, slurmctld is away: the tree stays stopped until it answers, then the job is queued."""
    agent = Agent(world, "c1")
    dump = agent.imager.dump

    def away(*args, **kwargs):
        world.answers = False
        return dump(*args, **kwargs)

    agent.imager.dump = away
    done = agent.suspend()
    assert done.phase is Phase.REQUEUEING
    assert world.copies() == 1
    agent.keeper.stop()
    world.answers = True
    recovered(world)
    check(world)
    go_on_at_c2(world)


def test_a_comment_of_the_owner_survives(world):
    world.comment = "my experiment"
    agent = Agent(world, "c1")
    agent.suspend()
    agent.settle()
    assert world.comment.endswith(" // my experiment")
    go_on_at_c2(world)
    assert world.comment == "my experiment"


@pytest.mark.parametrize(("fresh", "reply"), [(False, Hold), (True, Start)])
def test_a_restore_that_fails_does_what_the_site_chose(world, fresh, reply):
    """Held with the reason, or started afresh; the image stays."""
    agent = Agent(world, "c1")
    agent.suspend()
    agent.settle()
    world.nodes["c1"].init = None
    world.start_run("c2")
    agent = Agent(world, "c2", Settings(fresh=fresh, slurm_s=5))
    agent.imager.fails = "bad size"
    answer = agent.restore()
    assert isinstance(answer, reply)
    assert agent.images(shared=True) == [1]
    assert "bad size" in world.comment
    if fresh:
        assert answer == Start(restore_failed=True)
    else:
        assert (world.state, world.held) == ("PENDING", True)
        [sleeping] = agent.keeper.suspended()
        assert sleeping.failure == "bad size"


def test_another_gpu_model_is_refused(world):
    agent = Agent(world, "c1")
    agent.suspend()
    agent.settle()
    world.nodes["c1"].init = None
    world.start_run("c2")
    agent = Agent(world, "c2")
    agent.gpus.model = "A100"
    assert isinstance(agent.restore(), Hold)
    assert "A100" in world.comment
    assert "criu restore" not in world.effect_log


def test_a_restore_waits_for_gpu_memory_and_then_gives_up(world):
    agent = Agent(world, "c1")
    agent.suspend()
    agent.settle()
    world.nodes["c1"].init = None
    world.start_run("c2")
    agent = Agent(world, "c2")
    agent.gpus.free = 5
    assert isinstance(agent.restore(), Hold)
    assert "its GPU memory does not fit: 65 MiB are needed on GPU-c2-0, 5 B are free there" in world.comment


def test_an_image_that_was_changed_is_refused(world):
    """One flipped bit in a file of it."""
    agent = Agent(world, "c1")
    agent.suspend()
    agent.settle()
    world.nodes["c1"].init = None
    [page] = (world.root / "shared" / "images").glob("*/0001/criu/pages-1.img")
    data = bytearray(page.read_bytes())
    data[0] ^= 1
    page.write_bytes(data)
    world.start_run("c2")
    agent = Agent(world, "c2")
    assert isinstance(agent.restore(), Hold)
    assert "contents have changed" in world.comment
    assert "criu restore" not in world.effect_log


def test_a_run_is_restored_by_one_shepherd_only(world):
    """Two shepherds of one run, on two nodes: the second gets nothing."""
    agent = Agent(world, "c1")
    agent.suspend()
    agent.settle()
    world.nodes["c1"].init = None
    world.start_run("c2")
    assert Agent(world, "c2").restore() == Restored(2)
    world.start_run("c3")
    other = Agent(world, "c3")
    assert isinstance(other.restore(), Hold)
    assert world.nodes["c3"].processes == []


def test_a_job_whose_image_has_not_arrived_is_not_started_afresh(world):
    """Started at another node before the copy was complete: back to the queue."""
    agent = Agent(world, "c1")
    agent.aftermath._copy = lambda record: None
    agent.suspend()
    agent.settle()
    assert agent.images(shared=True) == []
    world.start_run("c2")
    assert isinstance(Agent(world, "c2").restore(), Hold)
    assert world.state == "PENDING"


def test_wake_releases_only_what_can_start_anywhere(world):
    agent = Agent(world, "c1")
    agent.aftermath._copy = lambda record: None
    agent.suspend()
    agent.settle()
    key = agent.keeper.suspended()[0].key
    agent.waker.wake(key, "alice")
    assert world.held
    image = agent.parts.local.images()[0]
    agent.parts.local.copy(image, agent.parts.shared)
    world.clock += 100
    agent.waker.tick()
    assert not world.held
    assert agent.waker.wake(key, "alice") is None


def test_what_does_not_sleep_cannot_be_woken(world):
    from slurm_affinode.model.suspension import JobKey

    with pytest.raises(Refused, match="not suspended"):
        Agent(world, "c1").waker.wake(JobKey("alpha", 7, 5), "alice")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"option": SuspendOption(mode=Mode.INPLACE)}, "mode"),
        ({"slurm": {"node_count": 2}}, "multi-node"),
        ({"slurm": {"het_job_id": 6}}, "heterogeneous"),
        ({"slurm": {"batch": False}}, "interactive"),
        ({"slurm": {"requeue": False}}, "no-requeue"),
        ({"root": 9}, "not-started"),
        ({"uid": 12345}, "other-user"),
    ],
)
def test_what_cannot_be_suspended_is_refused_before_anything_is_touched(world, changes, code):
    from agent_world import make_job

    agent = Agent(world, "c1")
    if isinstance(changes.get("slurm"), dict):
        changes = {"slurm": make_job(world, **changes["slurm"])}
    found = agent.suspender.refusals(agent.watched(**changes))
    assert code in [refusal.code for refusal in found]
    assert world.effect_log == []


@pytest.mark.parametrize("why", ["driver 550.54 is too old: 570 or newer is needed", None])
def test_a_driver_that_cannot_even_be_asked_is_told_by_its_version(world, monkeypatch, why):
    """A function that it lacks says less; where nothing is known of the driver, that is what is left to say."""
    agent = Agent(world, "c1")

    def missing(pids):
        raise CudaUnavailable("function cuCheckpointProcessGetRestoreThreadId is not found")

    monkeypatch.setattr(agent.parts.cuda, "users", missing)
    monkeypatch.setattr(agent.parts.cuda, "capabilities", lambda: Capabilities("550.54", why_not=why))
    [refusal] = agent.suspender.refusals(agent.watched())
    assert refusal.code == "driver"
    assert (why or "is not found") in refusal.text


@pytest.mark.parametrize(
    ("params", "memory", "refused"),
    [("OverMemoryKill", "64M", True), ("overmemorykill,UsePss", "100G", False), ("UsePss", "64M", False)],
)
def test_slurm_that_ends_jobs_above_their_memory_limit(world, monkeypatch, params, memory, refused):
    """GPU memory that moves into host memory would be the job's end; a limit that nobody watches over is none."""
    from agent_world import make_job

    agent = Agent(world, "c1")
    monkeypatch.setattr(agent.parts.slurm, "config", lambda: {"JobAcctGatherParams": params})
    job = agent.watched(slurm=make_job(world, tres_allocated={"mem": memory}))
    found = agent.suspender.refusals(job)
    assert [one.code for one in found] == (["host-memory"] if refused else [])
    assert all("--mem" in one.text for one in found)


def test_a_full_store_is_refused(world, monkeypatch):
    agent = Agent(world, "c1")
    agent.parts.shared.budget.reserve = 1 << 60
    [refusal] = agent.suspender.refusals(agent.watched())
    assert refusal.code == "no-room"
