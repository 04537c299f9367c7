"""A suspension or a restore that cannot be, or fails: the job runs on, or waits with its image, and it is said why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from agent_sequences import begun_at_c2, check, go_on_at_c2, ledger, recovered
from agent_site import SUBMIT, Slurm, make_job
from agent_world import Agent, FakeProcesses

from slurm_affinode.agent.interface import Refused
from slurm_affinode.agent.parts import Settings
from slurm_affinode.agent.shepherds import Hold, Restored, Start
from slurm_affinode.checkpoint.interface import Capabilities, CudaUnavailable
from slurm_affinode.model.suspension import JobKey, Mode, Phase, SuspendOption
from slurm_affinode.slurm.faults import NotPermittedError


def test_a_lock_that_times_out_leaves_the_job_running(world):
    agent = Agent(world, "c1")
    agent.cuda.times_out = {3}
    done = agent.suspend()
    assert done.phase is Phase.RUNNING
    assert "busy" in (done.failure or "")
    check(world)
    assert world.comment.startswith("runs on: its GPU is busy")
    assert ledger(world).failure == "its GPU is busy"


def test_a_run_that_somebody_else_requeues_meanwhile_is_not_said_to_run_on(world):
    agent = Agent(world, "c1")

    def requeued():
        agent.parts.processes.machine.init = None
        agent.parts.processes.machine.processes.clear()
        return "its processes are gone"

    assert agent.suspend(requeued).failure
    assert not (world.comment or "").startswith("runs on")
    assert ledger(world).failure


def test_a_run_that_is_preempted_before_its_image_is_complete_does_not_run_on(world):
    """Slurm continues what it ends, also where nobody here has asked for it: the dump is what the job is by then."""
    agent = Agent(world, "c1")

    def preempted(*_):
        agent.parts.slurm.requeue(7)
        world.state = "COMPLETING"  # until its processes are gone
        return ()

    agent.parts.streams.save = preempted
    assert agent.suspend().phase is Phase.QUEUED
    assert world.held  # it must not start before its image is everywhere
    world.state = "PENDING"
    agent.settle()
    check(world)
    go_on_at_c2(world)


def test_a_job_that_computes_again_is_let_go_under_the_lock(world):
    done = Agent(world, "c1").suspend(lambda: "GPU 0 at 40 %")
    assert done.failure == "it is not idle any more: GPU 0 at 40 %"
    assert world.effect_log == ["lock", "continue", "unlock"]
    check(world)


def test_a_job_that_is_cancelled_meanwhile_is_not_brought_back(world, monkeypatch):
    """Slurm would requeue a job that it is ending: it goes on instead, to hear that it is to end."""
    asked = []
    monkeypatch.setattr(Slurm, "requeue", lambda self, job, **_: asked.append(job))

    def cancelled():
        world.state = "COMPLETING"

    agent = Agent(world, "c1")
    done = agent.suspend(cancelled)
    assert done.failure == "Slurm is ending the job"
    assert asked == []
    assert world.running()
    assert agent.images(shared=False) == []


def test_a_job_that_is_cancelled_in_the_moment_of_the_requeue_is_not_brought_back(world, monkeypatch):
    """Slurm looks at its state when it requeues, and we do after it."""
    requeue = Slurm.requeue

    def cancelled_before(self, job, **how):
        world.state = "COMPLETING"
        requeue(self, job, **how)

    monkeypatch.setattr(Slurm, "requeue", cancelled_before)
    agent = Agent(world, "c1")
    done = agent.suspend()
    assert done.failure == "Slurm is ending the job"
    assert (world.state, world.restarts, world.running()) == ("COMPLETING", 0, True)
    assert agent.images(shared=False) == []


def test_an_image_goes_before_its_tree_goes_on(world, monkeypatch):
    """Where an agent dies in between, while GPU memory comes back, the next one would have the job requeued with it."""

    def refuse(self, job, **_):
        raise NotPermittedError("not permitted")

    def resume(self, pids):
        found.append(agent.images(shared=False))
        resumed(self, pids)

    agent, found, resumed = Agent(world, "c1"), [], FakeProcesses.resume
    monkeypatch.setattr(Slurm, "requeue", refuse)
    monkeypatch.setattr(FakeProcesses, "resume", resume)
    assert agent.suspend().phase is Phase.RUNNING
    assert found
    assert found[0] == []


def test_slurm_that_refuses_the_requeue_gives_the_job_its_gpus_back(world, monkeypatch):
    def refuse(self, job, **_):
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


def test_a_journal_of_another_release_is_left_alone(world, caplog):
    """After a downgrade: told in one line, and the job is neither touched nor suspended again."""
    path = world.root / "c1" / "journal" / f"alpha.7.{round(SUBMIT.timestamp())}.jsonl"
    path.parent.mkdir(mode=0o700, parents=True)
    path.write_text('{"version":2,"phase":"dumped","time":1.0,"facts":{}}\n')
    agent = recovered(world)
    assert [line.message for line in caplog.records if line.levelname == "ERROR"] == [
        f"{path}: line 1 is of another release of slurm-affinode (version 2, not 1): its job is left alone"
    ]
    assert path.exists()
    assert world.effect_log == []
    with pytest.raises(Refused, match="its journal cannot be read: line 1 is of another release"):
        agent.suspend(key=JobKey("alpha", 7, round(SUBMIT.timestamp())))


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
    agent = begun_at_c2(world, Settings(fresh=fresh, slurm_s=5))
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


@pytest.mark.parametrize(
    ("then", "comment"),
    [
        (("CANCELLED", 1), "restoring: from its image, on c2 // my experiment"),
        (("COMPLETING", 1), "restoring: from its image, on c2 // my experiment"),
        (("PENDING", 2), "suspended: idle 15m, 1.0 MiB, wake with: slurm-affinode wake 7 // my experiment"),
    ],
)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_run_that_slurm_takes_away_while_it_is_restored_has_not_failed(world, monkeypatch, fresh, then, comment):
    """It was cancelled, requeued or preempted: what its owner reads of it is true, whoever killed the restore."""
    world.comment = "my experiment"
    mails = []
    agent = begun_at_c2(world, Settings(fresh=fresh, slurm_s=5))
    monkeypatch.setattr(agent.parts.mailer, "tell", lambda mail: mails.append(mail.kind))
    begin = agent.imager.restore

    def killed(*arguments, **options):
        assert world.comment == "restoring: from its image, on c2 // my experiment"
        world.state, world.restarts = then
        agent.imager.fails = "its init is gone"
        return begin(*arguments, **options)

    monkeypatch.setattr(agent.imager, "restore", killed)
    assert isinstance(agent.restore(), Hold)
    assert (world.state, world.restarts, world.comment) == (*then, comment)
    assert mails == []
    assert not agent.parts.journal.open_records()
    assert ledger(world).restore_failure is None
    if then[0] == "PENDING":
        agent.imager.fails = None
        monkeypatch.setattr(agent.imager, "restore", begin)
        world.start_run("c2")
        assert agent.restore() == Restored(2)
        assert world.comment == "my experiment"


def test_job_in_a_network_of_its_own_is_not_restored(world, monkeypatch):
    """Its process tree would come back in the node's: its image waits for a node where Slurm makes none."""
    agent = begun_at_c2(world)
    arrival = agent.arrival
    monkeypatch.setattr(agent, "arrival", lambda: replace(arrival(), foreign=("net", "ipc")))
    assert isinstance(agent.restore(), Hold)
    assert "namespaces of its own (net, ipc)" in world.comment
    monkeypatch.setattr(agent, "arrival", arrival)
    agent.waker.wake(agent.parts.notes.all()[0].key, "alice")
    world.start_run("c2")
    assert agent.restore() == Restored(2)


def test_a_job_with_shards_is_restored_on_the_gpu_that_its_prolog_has_told(world, monkeypatch):
    """Slurm's table has no numbers of its GPUs; where no prolog has told them either, the image waits."""
    agent = begun_at_c2(world)
    monkeypatch.setattr(Slurm, "job", lambda self, job, asked=Slurm.job: replace(asked(self, job), node_gpus=()))
    assert isinstance(agent.restore(), Hold)
    assert "does not say which GPUs" in world.comment
    agent.waker.wake(agent.parts.notes.all()[0].key, "alice")
    world.start_run("c2")
    agent.parts.gpu_indices[7] = (0,)
    assert agent.restore() == Restored(2)


@pytest.mark.parametrize("gpus", [None, ()])
def test_a_job_whose_gpus_nobody_tells_is_not_suspended(world, monkeypatch, gpus):
    """It could not be restored: one with shards where no prolog is set up. It is refused before anything is touched."""
    monkeypatch.setattr(Slurm, "job", lambda self, job, asked=Slurm.job: replace(asked(self, job), node_gpus=gpus))
    agent = Agent(world, "c1")
    with pytest.raises(Refused) as refused:
        agent.suspend()
    assert refused.value.refusal.code == "gpu-numbers"
    assert world.effect_log == []
    check(world)
    agent.parts.gpu_indices[7] = (0,)
    assert agent.suspend().phase is Phase.QUEUED


def test_another_gpu_model_is_refused(world):
    agent = begun_at_c2(world)
    agent.gpus.model = "A100"
    assert isinstance(agent.restore(), Hold)
    assert "A100" in world.comment
    assert "criu restore" not in world.effect_log


def test_a_restore_waits_for_gpu_memory_and_then_gives_up(world):
    agent = begun_at_c2(world)
    agent.gpus.free = 5
    assert isinstance(agent.restore(), Hold)
    assert "its GPU memory does not fit: 65 MiB are needed on GPU-c2-0, 5 B are free there" in world.comment


def test_an_image_that_was_changed_is_refused(world):
    """One flipped bit in a file of it."""
    agent = begun_at_c2(world)
    [page] = (world.root / "shared" / "images").glob("*/0001/criu/pages-1.img")
    data = bytearray(page.read_bytes())
    data[0] ^= 1
    page.write_bytes(data)
    assert isinstance(agent.restore(), Hold)
    assert "contents have changed" in world.comment
    assert world.nodes["c2"].processes == []


def test_a_run_is_restored_by_one_shepherd_only(world):
    """Two shepherds of one run, on two nodes: the second gets nothing."""
    assert begun_at_c2(world).restore() == Restored(2)
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
    assert agent.waker.wake(key, "alice") is False
    assert world.held
    image = agent.parts.local.images()[0]
    agent.parts.local.copy(image, agent.parts.shared)
    world.clock += 100
    agent.waker.tick()
    assert not world.held
    assert agent.waker.wake(key, "alice") is True


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
    agent = Agent(world, "c1")
    monkeypatch.setattr(agent.parts.slurm, "config", lambda: {"JobAcctGatherParams": params})
    job = agent.watched(slurm=make_job(world, tres_allocated={"mem": memory}))
    found = agent.suspender.refusals(job)
    assert [one.code for one in found] == (["host-memory"] if refused else [])
    assert all("--mem" in one.text for one in found)


@pytest.mark.parametrize(
    ("driver", "setting", "refused"),
    [("575.51.03", "yes", True), ("570.211.01", "yes", True), ("575.57.08", "yes", False), ("575.51.03", "no", False)],
)
def test_an_old_driver_cannot_do_with_some_of_the_nodes_gpus(world, monkeypatch, driver, setting, refused):
    """Before 575.57.08 a process to which others are closed is not checkpointed, or not restored."""
    agent = Agent(world, "c1")
    monkeypatch.setattr(agent.parts.cuda, "capabilities", lambda: Capabilities(driver, checkpoint=True))
    config = {"ConstrainDevices": setting, "TaskPlugin": "task/affinity,task/cgroup"}
    monkeypatch.setattr(agent.parts.slurm, "config", lambda: config)
    mine = agent.parts.gpus.devices()
    assert not agent.suspender.refusals(agent.watched())
    others = replace(mine[0], uuid="GPU-another")
    monkeypatch.setattr(agent.parts.gpus, "devices", lambda: (*mine, others))
    job = replace(agent.watched(), devices=mine)
    assert [one.code for one in agent.suspender.refusals(job)] == (["driver"] if refused else [])


def test_a_full_store_is_refused(world, monkeypatch):
    agent = Agent(world, "c1")
    agent.parts.shared.budget.reserve = 1 << 60
    [refusal] = agent.suspender.refusals(agent.watched())
    assert refusal.code == "no-room"
