"""Refused and failed suspensions and restores: the job continues, or waits with its image, and the reason is given."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

import pytest
from agent_site import SUBMIT, Process, Slurm, make_job
from agent_world import Agent, FakeProcesses
from job_owner import OWNER

from slurm_affinode.base.pidfd import ExhaustedError
from slurm_affinode.checkpoint.criu.restore_gate import of_owner
from slurm_affinode.checkpoint.files import inet_sockets
from slurm_affinode.checkpoint.interface import Capabilities, CudaError, CudaUnavailable, HelperLost, ImageUnanswered
from slurm_affinode.model.suspension import JobKey, Mode, Phase, SuspendOption
from slurm_affinode.slurm.interface import NotPermittedError
from slurm_affinode.suspension.context import SuspendSettings
from slurm_affinode.suspension.interface import Refused
from slurm_affinode.suspension.job.shepherd import Hold, Restored, Start

from .agent_sequences import begun_at_c2, check, ledger, recovered, resume_at_c2


def test_lock_timeout_leaves_job_running(world):
    agent = Agent(world, "c1")
    agent.cuda.times_out = {3}
    done = agent.suspend()
    assert done.phase is Phase.RUNNING
    assert "busy" in (done.failure or "")
    check(world)
    assert world.comment.startswith("runs on: its GPU is busy")
    assert ledger(world).failure == "its GPU is busy"


def test_rollback_waits_for_free_descriptors(world, monkeypatch):
    """The processes cannot be listed for some seconds; they are not taken for ended, and none stays stopped."""
    agent, failures = Agent(world, "c1"), [3]
    all_processes = FakeProcesses.all_processes

    def listed(self, *arguments):
        if locked and failures[0]:
            failures[0] -= 1
            raise ExhaustedError("process 5 cannot be examined: Too many open files")
        return all_processes(self, *arguments)

    locked = []

    def fails(pid):
        locked.append(pid)
        raise CudaError("no")

    agent.cuda.checkpoint = fails
    monkeypatch.setattr(FakeProcesses, "all_processes", listed)
    assert agent.suspend().failure == "no"
    assert failures == [0]
    assert world.running()
    check(world)


def test_job_requeued_meanwhile_is_not_reported_as_running(world):
    agent = Agent(world, "c1")

    def requeued():
        agent.processes.machine.init = None
        agent.processes.machine.processes.clear()
        return "its processes have ended"

    assert agent.suspend(requeued).failure
    assert not (world.comment or "").startswith("runs on")
    assert ledger(world).failure


def test_job_preempted_during_dump_is_queued(world):
    """Slurm continues the processes it kills, even if others requested the requeue: only the dump is consistent."""
    agent = Agent(world, "c1")

    def preempted(*_):
        agent.slurm.requeue(7)
        world.state = "COMPLETING"  # until its processes have ended
        return ()

    agent.streams.save = preempted
    assert agent.suspend().phase is Phase.QUEUED
    assert world.held  # it must not start before its image is in the shared store
    world.state = "PENDING"
    agent.settle()
    check(world)
    resume_at_c2(world)


def test_busy_job_is_unlocked(world):
    done = Agent(world, "c1").suspend(lambda: "GPU 0 at 40 %")
    assert (done.failure, done.in_use) == ("it is no longer idle: GPU 0 at 40 %", True)
    assert world.effect_log == ["lock", "continue", "unlock"]
    check(world)


def test_job_canceled_during_suspension_is_not_requeued(world, monkeypatch):
    """Slurm would requeue a job that it is ending: the job is resumed instead, so that it receives its signals."""
    requeued = []
    monkeypatch.setattr(Slurm, "requeue", lambda self, job, **_: requeued.append(job))

    def cancelled():
        world.state = "COMPLETING"

    agent = Agent(world, "c1")
    done = agent.suspend(cancelled)
    assert done.failure == "Slurm is ending the job"
    assert requeued == []
    assert world.running()
    assert agent.images(shared=False) == []


def test_job_canceled_during_requeue_is_not_requeued(world, monkeypatch):
    """Slurm checks the state when it requeues, and the agent checks it afterwards."""
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


def test_image_is_deleted_before_job_is_resumed(world, monkeypatch):
    """If the agent died in between, while GPU memory is restored, the next one would requeue the job with it."""

    def refuse(self, job, **_):
        raise NotPermittedError("not permitted")

    def resume(self, pids):
        result.append(agent.images(shared=False))
        resumed(self, pids)

    agent, result, resumed = Agent(world, "c1"), [], FakeProcesses.resume
    monkeypatch.setattr(Slurm, "requeue", refuse)
    monkeypatch.setattr(FakeProcesses, "resume", resume)
    assert agent.suspend().phase is Phase.RUNNING
    assert result
    assert result[0] == []


def test_connections_leave_repair_mode_before_job_is_resumed(world, monkeypatch):
    """The dump may have been that of an agent that was killed."""

    def refuse(self, job, **_):
        raise NotPermittedError("not permitted")

    def end_repair(tree):
        ended.extend(pid for pid, _ in tree)
        assert all(process.stopped for process in world.nodes["c1"].processes)

    ended = []
    monkeypatch.setattr(Slurm, "requeue", refuse)
    monkeypatch.setattr(inet_sockets, "end_repair", end_repair)
    assert Agent(world, "c1").suspend().phase is Phase.RUNNING
    assert set(ended) == {process.pid for process in world.nodes["c1"].processes}


def test_refused_requeue_rolls_back_suspension(world, monkeypatch):
    def refuse(self, job, **_):
        raise NotPermittedError("requeue job 7: access denied")

    monkeypatch.setattr(Slurm, "requeue", refuse)
    agent = Agent(world, "c1")
    done = agent.suspend()
    assert "access denied" in (done.failure or "")
    check(world)
    assert agent.images(shared=False) == []


def test_suspension_waits_for_unresponsive_slurm(world, monkeypatch):
    """The image is complete, slurmctld is down: the tree stays stopped until it responds, then the job is queued."""
    agent = Agent(world, "c1")
    dump = agent.imager.dump

    def away(*args, **kwargs):
        world.answers = False
        return dump(*args, **kwargs)

    agent.imager.dump = away
    done = agent.suspend()
    assert done.phase is Phase.REQUEUEING
    assert world.copies() == 1
    agent.keeper._queue.close()
    world.answers = True
    recovered(world)
    check(world)
    resume_at_c2(world)


def test_journal_of_another_release_is_not_changed(world, caplog):
    """After a downgrade, the journal is reported in one line, and its job is neither changed nor suspended again."""
    path = world.root / "c1" / "journal" / f"alpha.7.{round(SUBMIT.timestamp())}.jsonl"
    path.parent.mkdir(mode=0o700, parents=True)
    path.write_text('{"version":2,"phase":"dumped","time":1.0,"facts":{}}\n')
    agent = recovered(world)
    assert [line.message for line in caplog.records if line.levelname == "ERROR"] == [
        f"{path}: line 1 was written by another release of slurm-affinode (version 2, not 1): its job is left alone"
    ]
    assert path.exists()
    assert world.effect_log == []
    with pytest.raises(Refused, match="its journal cannot be read: line 1 was written by another release"):
        agent.suspend(key=JobKey("alpha", 7, round(SUBMIT.timestamp())))


def test_comment_of_owner_is_kept(world):
    world.comment = "my experiment"
    agent = Agent(world, "c1")
    agent.suspend()
    agent.settle()
    assert world.comment.endswith(" // my experiment")
    resume_at_c2(world)
    assert world.comment == "my experiment"


@pytest.mark.parametrize(("fresh", "reply"), [(False, Hold), (True, Start)])
def test_failed_restore_follows_configuration(world, fresh, reply):
    """The job is held with the reason, or started afresh; the image is kept."""
    agent = begun_at_c2(world, SuspendSettings(fresh=fresh, slurm_s=5))
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


@pytest.mark.parametrize(("fresh", "reply"), [(False, Hold), (True, Start)])
def test_interrupted_restore_is_retried_with_growing_backoff(world, fresh, reply):
    """A cause that may pass does not end the job's attempts; after the last retry, the configuration applies."""
    settings = SuspendSettings(fresh=fresh, slurm_s=5, restore_retries=2, retry_backoff_s=60, retry_backoff_limit_s=90)
    agent = begun_at_c2(world, settings)
    for count, pause_s in ((1, 60), (2, 90)):
        agent.imager.fails, agent.imager.passes = "Unable to detach", True
        assert isinstance(agent.restore(), Hold)
        [sleeping] = agent.keeper.suspended()
        assert (sleeping.failures, sleeping.wake) == (count, "auto")
        assert sleeping.retry_epoch - sleeping.failed_epoch == pause_s
        assert "next try after" in world.comment
        world.start_run("c2")
        agent = Agent(world, "c2", settings)
    agent.imager.fails, agent.imager.passes = "Unable to detach", True
    assert isinstance(agent.restore(), reply)
    assert "next try after" not in world.comment
    if not fresh:
        [sleeping] = agent.keeper.suspended()
        assert (sleeping.failures, sleeping.retry_epoch, sleeping.wake) == (3, None, "hold")


def test_job_does_not_start_afresh_while_its_store_does_not_respond(world, monkeypatch):
    """Neither its image nor its note can be read, so its failures are not counted; the waker releases it again."""
    settings = SuspendSettings(fresh=True, slurm_s=5, restore_s=5, restore_retries=2)
    agent = begun_at_c2(world, settings)

    def unresponsive(run):
        raise ImageUnanswered("/shared: does not respond")

    with monkeypatch.context() as patch:
        patch.setattr(agent.tiers, "copies", unresponsive)
        patch.setattr(agent.notes, "read", lambda cluster, job_id: None)
        assert isinstance(agent.restore(), Hold)
    assert (world.state, world.held) == ("PENDING", True)
    assert "does not respond" in world.comment
    world.start_run("c2")
    assert isinstance(Agent(world, "c2", settings).restore(), Restored)


def test_status_counts_the_retries_left(world):
    agent = begun_at_c2(world, SuspendSettings(slurm_s=5, restore_retries=2))
    seen = []
    for _ in range(3):
        agent.imager.fails, agent.imager.passes = "Unable to detach", True
        agent.restore()
        [sleeping] = agent.keeper.suspended()
        seen.append((sleeping.failures, sleeping.retries_left))
        world.start_run("c2")
        agent = Agent(world, "c2", agent.settings)
    assert seen == [(1, 2), (2, 1), (3, 0)]


def test_refused_restore_is_not_retried(world):
    """The image would be refused again."""
    agent = begun_at_c2(world, SuspendSettings(slurm_s=5, restore_retries=2))
    agent.imager.fails = "bad size"
    assert isinstance(agent.restore(), Hold)
    [sleeping] = agent.keeper.suspended()
    assert (sleeping.retry_epoch, sleeping.wake) == (None, "hold")


@pytest.mark.parametrize(
    ("then", "comment"),
    [
        (("CANCELLED", 1), "restoring: from its image, on c2 // my experiment"),
        (("COMPLETING", 1), "restoring: from its image, on c2 // my experiment"),
        (("PENDING", 2), "suspended: idle 15m, 1 MiB, wake with: slurm-affinode wake 7 // my experiment"),
    ],
)
@pytest.mark.parametrize("fresh", [False, True])
def test_restore_ended_by_slurm_is_not_a_failure(world, monkeypatch, fresh, then, comment):
    """It was canceled, requeued or preempted: the comment is correct, no matter who killed the restore."""
    world.comment = "my experiment"
    mails = []
    agent = begun_at_c2(world, SuspendSettings(fresh=fresh, slurm_s=5))
    monkeypatch.setattr(agent.mailer, "deliver", lambda mail: mails.append(mail.kind))
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
    assert not agent.journal.open_journals()
    assert ledger(world).restore_failure is None
    if then[0] == "PENDING":
        agent.imager.fails = None
        monkeypatch.setattr(agent.imager, "restore", begin)
        world.start_run("c2")
        assert agent.restore() == Restored(2)
        assert world.comment == "my experiment"


def test_job_with_private_network_is_not_restored(world, monkeypatch):
    """Its process tree would run in the node's network: its image waits for a node where Slurm creates none."""
    agent = begun_at_c2(world)
    arrival = agent.arrival
    monkeypatch.setattr(agent, "arrival", lambda: replace(arrival(), foreign=("net", "ipc")))
    assert isinstance(agent.restore(), Hold)
    assert "namespaces of its own (net, ipc)" in world.comment
    monkeypatch.setattr(agent, "arrival", arrival)
    agent.waker.wake(agent.notes.all()[0].key, "alice")
    world.start_run("c2")
    assert agent.restore() == Restored(2)


def test_job_with_shards_is_restored_on_gpu_from_prolog(world, monkeypatch):
    """Slurm reports no GPU indices for it; without indices from a prolog either, the image waits."""
    agent = begun_at_c2(world)
    monkeypatch.setattr(Slurm, "job", lambda self, job, read=Slurm.job: replace(read(self, job), node_gpus=()))
    assert isinstance(agent.restore(), Hold)
    assert "does not report which GPUs" in world.comment
    agent.waker.wake(agent.notes.all()[0].key, "alice")
    world.start_run("c2")
    agent.gpu_indices[7] = (0,)
    assert agent.restore() == Restored(2)


@pytest.mark.parametrize("devices", [None, ()])
def test_image_has_gpus_of_slurm_although_agent_knows_none_yet(world, devices):
    """An agent that has just started does not; the image could not be restored without them."""
    agent = Agent(world, "c1")
    assert agent.suspend(devices=devices).phase is Phase.QUEUED
    agent.settle()
    (image,) = agent.shared.images()
    assert [gpu.allocated for gpu in image.manifest.gpus] == [True]


@pytest.mark.parametrize("gpus", [None, ()])
def test_job_with_unknown_gpus_is_not_suspended(world, monkeypatch, gpus):
    """It could not be restored, for example with shards and no prolog. It is refused before anything is changed."""
    monkeypatch.setattr(Slurm, "job", lambda self, job, read=Slurm.job: replace(read(self, job), node_gpus=gpus))
    agent = Agent(world, "c1")
    with pytest.raises(Refused) as refused:
        agent.suspend()
    assert refused.value.refusal.code == "gpu-numbers"
    assert world.effect_log == []
    check(world)
    agent.gpu_indices[7] = (0,)
    assert agent.suspend().phase is Phase.QUEUED


def test_different_gpu_model_is_refused(world):
    agent = begun_at_c2(world)
    agent.gpus.model = "A100"
    assert isinstance(agent.restore(), Hold)
    assert "A100" in world.comment
    assert "criu restore" not in world.effect_log


def test_restore_waits_for_gpu_memory_until_timeout(world):
    agent = begun_at_c2(world)
    agent.gpus.free = 5
    assert isinstance(agent.restore(), Hold)
    assert "its GPU memory does not fit: 65 MiB are needed on GPU-c2-0, 5 B are free there" in world.comment


def test_modified_image_is_refused(world):
    """One bit of a file is flipped."""
    agent = begun_at_c2(world)
    [page] = (world.root / "shared" / "images").glob("*/0001/criu/pages-1.img")
    data = bytearray(page.read_bytes())
    data[0] ^= 1
    page.write_bytes(data)
    assert isinstance(agent.restore(), Hold)
    assert "contents have changed" in world.comment
    assert world.nodes["c2"].processes == []


def test_attempt_is_restored_by_one_shepherd(world):
    """Two shepherds on two nodes serve the same attempt: the second one restores nothing."""
    assert begun_at_c2(world).restore() == Restored(2)
    world.start_run("c3")
    other = Agent(world, "c3")
    assert isinstance(other.restore(), Hold)
    assert world.nodes["c3"].processes == []


def test_job_with_incomplete_copy_is_requeued(world):
    """It was started on another node before the copy was complete: it returns to the queue."""
    agent = Agent(world, "c1")
    agent.outcomes._copy = lambda record: None
    agent.suspend()
    agent.settle()
    assert agent.images(shared=True) == []
    world.start_run("c2")
    assert isinstance(Agent(world, "c2").restore(), Hold)
    assert world.state == "PENDING"


def test_wake_releases_job_only_with_shared_image(world):
    agent = Agent(world, "c1")
    agent.outcomes._copy = lambda record: None
    agent.suspend()
    agent.settle()
    key = agent.keeper.suspended()[0].key
    assert agent.waker.wake(key, "alice") is False
    assert world.held
    image = agent.local.images()[0]
    agent.local.copy(image, agent.shared)
    world.clock += 100
    agent.waker.tick()
    assert not world.held
    assert agent.waker.wake(key, "alice") is True


def test_running_job_cannot_be_woken(world):
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
def test_unsuspendable_job_is_refused_before_any_change(world, changes, code):
    agent = Agent(world, "c1")
    if isinstance(changes.get("slurm"), dict):
        changes = {"slurm": make_job(world, **changes["slurm"])}
    refusals = agent.suspender.refusals(agent.watched(**changes))
    assert code in [refusal.code for refusal in refusals]
    assert world.effect_log == []


@pytest.mark.parametrize("why", ["driver 550.54 is too old: 570 or newer is needed", None])
def test_outdated_driver_is_reported_by_version(world, monkeypatch, why):
    """A missing function says less; if the driver is unknown, only that can be reported."""
    agent = Agent(world, "c1")

    def missing(pids):
        raise CudaUnavailable("function cuCheckpointProcessGetRestoreThreadId is not found")

    monkeypatch.setattr(agent.cuda, "users", missing)
    monkeypatch.setattr(agent.cuda, "capabilities", lambda: Capabilities("550.54", why_not=why))
    [refusal] = agent.suspender.refusals(agent.watched())
    assert refusal.code == "driver"
    assert (why or "is not found") in refusal.text


def test_lost_helper_is_not_a_refusal(world, monkeypatch):
    """The next helper is queried."""
    agent = Agent(world, "c1")
    users, lost = agent.cuda.users, []

    def once(pids):
        if not lost:
            lost.append(True)
            raise HelperLost("the helper for the CUDA driver was ended by signal 9")
        return users(pids)

    monkeypatch.setattr(agent.cuda, "users", once)
    assert agent.suspender.refusals(agent.watched()) == []
    assert lost


@pytest.mark.parametrize(
    ("params", "memory", "refused"),
    [("OverMemoryKill", "64M", True), ("overmemorykill,UsePss", "100G", False), ("UsePss", "64M", False)],
)
def test_memory_limit_enforced_by_slurm_is_respected(world, monkeypatch, params, memory, refused):
    """GPU memory moved to host memory would exceed the limit; a limit that is not enforced does not count."""
    agent = Agent(world, "c1")
    monkeypatch.setattr(agent.slurm, "config", lambda: {"JobAcctGatherParams": params})
    job = agent.watched(slurm=make_job(world, tres_allocated={"mem": memory}))
    refusals = agent.suspender.refusals(job)
    assert [refusal.code for refusal in refusals] == (["host-memory"] if refused else [])
    assert all("--mem" in problem.text for problem in refusals)


@pytest.mark.parametrize(
    ("driver", "setting", "refused"),
    [("575.51.03", "yes", True), ("570.211.01", "yes", True), ("575.57.08", "yes", False), ("575.51.03", "no", False)],
)
def test_old_driver_needs_all_gpus_of_node(world, monkeypatch, driver, setting, refused):
    """Before 575.57.08, a process without access to some GPUs cannot be checkpointed, or not restored."""
    agent = Agent(world, "c1")
    monkeypatch.setattr(agent.cuda, "capabilities", lambda: Capabilities(driver, checkpoint=True))
    config = {"ConstrainDevices": setting, "TaskPlugin": "task/affinity,task/cgroup"}
    monkeypatch.setattr(agent.slurm, "config", lambda: config)
    devices = agent.gpus.devices()
    assert not agent.suspender.refusals(agent.watched())
    others = replace(devices[0], uuid="GPU-another")
    monkeypatch.setattr(agent.gpus, "devices", lambda: (*devices, others))
    job = replace(agent.watched(), devices=devices)
    assert [refusal.code for refusal in agent.suspender.refusals(job)] == (["driver"] if refused else [])


def test_full_store_is_a_refusal(world, monkeypatch):
    agent = Agent(world, "c1")
    agent.shared.budget.reserve = 1 << 60
    [refusal] = agent.suspender.refusals(agent.watched())
    assert refusal.code == "no-room"


def test_job_lost_after_restore_can_be_woken_if_next_restore_fails(world):
    """The note was removed by the first restore; the failure that the comment names leaves a new one."""
    agent = begun_at_c2(world)
    assert agent.restore() == Restored(2)
    world.nodes["c2"].init, world.nodes["c2"].processes = None, []
    world.restarts += 1
    world.start_run("c2")
    agent = Agent(world, "c2")
    agent.imager.fails = "a temporary file is there already"
    assert isinstance(agent.restore(), Hold)
    assert world.comment.endswith("try again with: slurm-affinode wake 7")
    (shown,) = agent.keeper.suspended()
    assert shown.failure == "a temporary file is there already"
    agent.waker.wake(shown.key, "alice")
    world.start_run("c2")
    agent = Agent(world, "c2")
    assert agent.restore() == Restored(2)


CHANGED = {
    "setuid": ({"uids": (0, 0, 0, 0)}, "does not belong to the job's user"),
    "effective": ({"uids": (OWNER.uid, 0, 0, 0)}, r"runs with changed user ids \(setuid\)"),
    "setgid": ({"credentials": (replace(of_owner(OWNER), gids=frozenset((101,))),)}, "has group ID 101"),
    "capability": ({"credentials": (replace(of_owner(OWNER), capabilities={"CapEff": 1},),)}, "CapEff 0x1"),
    "namespace": ({"namespaces": {"net": "net:[9]"}}, "is in namespaces of its own"),
    "file": ({"files": ("anon_inode:[io_uring]",)}, "uses io_uring"),
    "tracer": ({"tracer": 77}, "is being traced"),
    "device": ({"files": ("/dev/nvidia0",)}, "holds the GPU's device files"),
}  # fmt: skip


@pytest.mark.parametrize("what", sorted(CHANGED))
def test_job_that_changes_after_its_admission_is_not_dumped(world, monkeypatch, what):
    """A process is exchanged while GPU memory moves: the stopped processes are examined before root acts for them."""
    change, message = CHANGED[what]
    inspect = Agent.inspect

    def changed(self, init_pid, root_pid):
        facts = inspect(self, init_pid, root_pid)
        if not world.kept_stopped:
            return facts
        assert all(process.stopped for process in world.nodes["c1"].processes)
        first, *others = facts.processes
        return replace(facts, processes=(replace(first, **change), *others), init_namespaces={"net": "net:[1]"})

    monkeypatch.setattr(Agent, "inspect", changed)
    done = Agent(world, "c1").suspend()
    assert re.search(message, done.failure or ""), done.failure
    assert "dump" not in world.effect_log
    assert (done.phase, world.running(), world.kept_stopped) == (Phase.RUNNING, True, False)
    check(world)


def test_process_that_starts_while_the_job_is_stopped_aborts_the_suspension(world, monkeypatch):
    """It was not examined, so nothing is done for the job."""
    hold, stops = FakeProcesses.hold, []

    @contextlib.contextmanager
    def held(self, members, examine):
        with hold(self, members, examine):
            stops.append(self)
            if len(stops) == 2:  # the first is the look before GPU memory is moved
                self.machine.processes.append(Process(999, 3, cuda=None))
            yield

    monkeypatch.setattr(FakeProcesses, "hold", held)
    done = Agent(world, "c1").suspend()
    assert done.failure == "process 999 was started while the job was being stopped"
    assert "dump" not in world.effect_log
    assert not any(process.stopped for process in world.nodes["c1"].processes)


@pytest.mark.parametrize("owner", [{"uid": 0}, {"gid": 0}])
def test_job_of_root_is_refused(world, owner):
    """Everything that the agent opens for a job is opened with the rights of its owner, which are never root's."""
    agent = Agent(world, "c1")
    [refusal] = [item for item in agent.suspender.refusals(agent.watched(**owner)) if item.code == "root"]
    assert "rights of root" in refusal.text
    with pytest.raises(Refused):
        agent.suspend(**owner)


def test_owner_that_slurm_does_not_report_is_refused(world):
    """The announcement and Slurm's record have to agree."""
    with pytest.raises(Refused, match=f"belongs to user {OWNER.uid}, not to {OWNER.uid + 1}"):
        Agent(world, "c1").suspend(uid=OWNER.uid + 1)
