"""Suspensions of jobs with GPU memory that does not fit below their memory limit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from agent_site import Crash, Slurm
from agent_world import Agent
from inplace_site import Node, asleep, awake, failing

from slurm_affinode.checkpoint.inspection import MemoryFacts
from slurm_affinode.checkpoint.interface import CudaError
from slurm_affinode.checkpoint.store.tiers import Tiers
from slurm_affinode.model.suspension import Phase
from slurm_affinode.slurm.interface import ControllerDownError
from slurm_affinode.suspension.interface import AbortedError, Refused
from slurm_affinode.suspension.job.shepherd import Hold, Restored, Say
from slurm_affinode.suspension.memory import Allowance
from slurm_affinode.suspension.records.record import SuspensionFacts

from ..agent_sequences import check, recovered
from .cgroup_site import GIB, MIB, USED, CgroupSite

SMALL = 500 * MIB


@pytest.fixture(params=[1, 2])
def site(request, tmp_path, monkeypatch, world):
    """Cgroups of the node c1, on which the job has 500 MiB and uses 400 MiB."""
    (tmp_path / "cgroups").mkdir()
    made = CgroupSite(tmp_path / "cgroups", request.param, monkeypatch)
    made.add(7, world.nodes["c1"].init, SMALL, 400 * MIB)
    nodes = [SimpleNamespace(name=name, memory_used_mib=500) for name in ("c1", "c2")]
    monkeypatch.setattr(Slurm, "nodes", lambda slurm: slurm._answer() or nodes)
    return made


def watching(agent, site, seen):
    """Record the limits of the job whenever GPU memory moves to host memory."""
    checkpoint = agent.cuda.checkpoint
    agent.cuda.checkpoint = lambda pid: seen.append(site.values(7)) or checkpoint(pid)


def test_limit_is_raised_while_gpu_memory_moves(world, site):
    """The limit is Slurm's again once the processes have ended."""
    agent, seen = Agent(world, "c1", limits=site.limits()), []
    watching(agent, site, seen)
    assert agent.suspender.refusals(agent.watched()) == []
    done = agent.suspend()
    agent.settle()
    assert (done.phase, done.failure) == (Phase.QUEUED, None)
    assert seen == [[SMALL + 257 * MIB] * 2]
    assert (site.values(7), site.records()) == ([SMALL] * 2, [])
    check(world)


def test_limit_is_lowered_after_a_rollback(world, site, monkeypatch):
    agent = Agent(world, "c1", limits=site.limits())

    def fails(pid):
        raise CudaError("no")

    agent.cuda.checkpoint = fails
    assert agent.suspend().failure == "no"
    assert (site.values(7), site.records()) == ([SMALL] * 2, [])
    assert world.running()


@pytest.mark.parametrize("at", range(1, 6))
def test_crash_leaves_no_raised_limit(world, site, at):
    """The agent is killed before each effect of a suspension."""
    world.crash_at = at
    with pytest.raises(Crash):
        Agent(world, "c1", limits=site.limits()).suspend()
    assert site.values(7) == [SMALL if at == 1 else SMALL + 257 * MIB] * 2
    agent = recovered(world, limits=site.limits())
    agent.keeper._lower_limits()
    assert (site.values(7), site.records()) == ([SMALL] * 2, [])
    check(world)


def test_missing_spare_memory_is_refused_with_figures(world, site):
    """Another job may still use most of the node's free memory; nothing is changed."""
    agent = Agent(world, "c1", limits=site.limits())
    site.add(8, world.nodes["c1"].init + 500, 900 * MIB, 0)
    agent.suspender._memory = agent.host_memory(read_memory=lambda pid: MemoryFacts(GIB))
    [refusal] = agent.suspender.refusals(agent.watched())
    assert (refusal.code, refusal.text) == (
        "host-memory",
        "its GPU memory (1 MiB) does not fit below its memory limit, which leaves 100 MiB, and the node can spare"
        " 124 MiB (1 GiB free, less 900 MiB allocated to other jobs, and 0 B in reserve): raise --mem",
    )
    with pytest.raises(Refused):
        agent.suspend()
    assert world.effect_log == []


def test_image_that_is_being_written_to_memory_counts(world, site):
    """Its memory is promised to it before it is used."""
    agent = Agent(world, "c1", limits=site.limits())
    local = agent.tiers.tiers[0]
    local.store.budget.promise(("other", 1), 1000, 400 * MIB)
    tiers = Tiers([replace(local, durable=False), *agent.tiers.tiers[1:]])
    agent.suspender._memory = agent.host_memory(tiers=tiers, read_memory=lambda pid: MemoryFacts(600 * MIB))
    [refusal] = agent.suspender.refusals(agent.watched())
    assert "free memory (200 MiB)" in refusal.text


def test_full_node_is_refused_for_its_own_reason(world, site):
    """A higher limit would not solve the lack of memory."""
    agent = Agent(world, "c1", limits=site.limits())
    agent.suspender._memory = agent.host_memory(read_memory=lambda pid: MemoryFacts(100 * MIB))
    [refusal] = agent.suspender.refusals(agent.watched())
    assert refusal.text == "its GPU memory (1 MiB) does not fit into the node's free memory (100 MiB)"


def test_allocation_of_a_starting_job_counts(world, site, monkeypatch):
    """It has no cgroup yet, but Slurm has allocated its memory."""
    agent = Agent(world, "c1", limits=site.limits())
    starting = [SimpleNamespace(name="c1", memory_used_mib=500 + 900)]
    monkeypatch.setattr(Slurm, "nodes", lambda slurm: starting)
    agent.suspender._memory = agent.host_memory(read_memory=lambda pid: MemoryFacts(GIB))
    [refusal] = agent.suspender.refusals(agent.watched())
    assert "less 900 MiB allocated to other jobs" in refusal.text


def test_unknown_allocation_is_refused(world, site, monkeypatch):
    """Slurm responds to other requests, but not to this one."""

    def down(slurm):
        raise ControllerDownError("no answer")

    monkeypatch.setattr(Slurm, "nodes", down)
    agent = Agent(world, "c1", limits=site.limits())
    [refusal] = agent.suspender.refusals(agent.watched())
    assert "Slurm does not report how much memory of the node is allocated" in refusal.text


def test_limit_lowered_by_slurm_is_noticed_under_the_locks(world, site, monkeypatch):
    """The last check is made right before GPU memory moves: the job continues."""
    agent = Agent(world, "c1", limits=site.limits())
    site.set(7, 2 * GIB)

    def lower_limit():
        site.set(7, SMALL)
        monkeypatch.setattr(Slurm, "nodes", lambda slurm: ())

    done = agent.suspend(lower_limit)
    assert done.failure is not None
    assert done.failure.startswith("its GPU memory (1 MiB) does not fit below its memory limit: Slurm does not report")
    assert "checkpoint" not in world.effect_log
    assert world.running()


def failing_checkpoint(agent, site, used):
    """The job uses this many bytes when its GPU memory fails to move."""

    def fails(pid):
        site.use(7, used)
        raise CudaError("no")

    agent.cuda.checkpoint = fails


def test_limit_that_is_still_raised_is_refused(world, site):
    """The job has kept memory of the first raise: there is no second one, and no suspension within the first one."""
    agent = Agent(world, "c1", limits=site.limits())
    failing_checkpoint(agent, site, 600 * MIB)
    assert agent.suspend().failure == "no"
    assert (site.values(7), site.records()) == ([SMALL + 257 * MIB] * 2, ["7.json"])
    effects = list(world.effect_log)
    [refusal] = agent.suspender.refusals(agent.watched())
    assert (refusal.code, refusal.text) == (
        "limit-raised",
        "its memory limit is still raised by 257 MiB for an earlier suspension: the job still uses more than Slurm"
        " permits",
    )
    with pytest.raises(Refused):
        agent.suspend()
    assert world.effect_log == effects
    with pytest.raises(AbortedError, match="still raised for an earlier suspension"):  # under the locks
        agent.suspender._memory.make_room(agent.watched(), SuspensionFacts(cuda_pids=(1,), gpu_bytes=MIB))


def test_job_that_keeps_memory_is_reported_and_killed(world, site):
    """Its output says so once; all of its processes are killed if the kernel cannot free the memory."""
    agent = Agent(world, "c1", limits=site.limits())
    failing_checkpoint(agent, site, 600 * MIB)
    agent.suspend()
    job = agent.watched()
    agent.registry.put(job)
    site.survivors = [600 * MIB, 100 * MIB] if site.version == 2 else [600 * MIB]
    site.clock += 61
    for _ in range(15):
        agent.keeper._lower_limits()
    text = (
        "out of memory: the job uses 600 MiB, and its limit of 500 MiB is no longer raised for a suspension; the kernel"
        " kills processes until the rest fits"
    )
    assert job.link.sent == [Say(text)]
    if site.version == 1:
        assert world.running()
        agent.keeper._lower_limits()
        assert not world.running()


def test_allocations_beyond_gpu_memory_are_noticed(world, site):
    """The margin is permitted; unknown use is not."""
    agent = Agent(world, "c1", limits=site.limits())
    memory, job = agent.suspender._memory, agent.watched()
    allowance = memory.make_room(job, SuspensionFacts(cuda_pids=(1,), gpu_bytes=300 * MIB))
    assert allowance == Allowance(400 * MIB, 300 * MIB)
    site.use(7, (400 + 300 + 256) * MIB)
    memory.check_use(job, allowance)
    site.use(7, (400 + 300 + 256 + 2) * MIB)
    with pytest.raises(AbortedError, match=r"allocated 2 MiB more than its GPU memory \(300 MiB\) while"):
        memory.check_use(job, allowance)
    (site.directories[7] / USED[site.version]).write_text("?")
    with pytest.raises(AbortedError, match="cannot be read"):
        memory.check_use(job, allowance)


def test_use_below_slurms_limit_is_not_checked(world, site):
    """Slurm's own limit suffices."""
    agent = Agent(world, "c1", limits=site.limits())
    memory, job = agent.suspender._memory, agent.watched()
    site.set(7, 2 * GIB)
    allowance = memory.make_room(job, SuspensionFacts(cuda_pids=(1,), gpu_bytes=300 * MIB))
    assert allowance is None
    site.use(7, 2 * GIB)
    memory.check_use(job, allowance)


def test_disabled_raising_refuses(world, site):
    """``suspend.raise_memory_limit = false``."""
    agent = Agent(world, "c1", limits=site.limits())
    settings = replace(agent.settings, raise_limit=False)
    facts = MemoryFacts(1 << 40, 100 * MIB)
    agent.suspender._memory = agent.host_memory(settings=settings, read_memory=lambda pid: facts)
    assert [refusal.code for refusal in agent.suspender.refusals(agent.watched())] == ["host-memory"]


# --- restore


def suspended_at_c2(world, site, patch):
    """Suspend the job, and start it on c2, where its limit is smaller than its image."""
    agent = Agent(world, "c1", limits=site.limits())
    agent.suspend()
    agent.settle()
    world.nodes["c1"].init = None
    world.start_run("c2")
    (site.root / "c2").mkdir()
    other = CgroupSite(site.root / "c2", site.version, patch)
    other.add(7, world.nodes["c2"].init, SMALL, 300 * MIB)
    return other, Agent(world, "c2", limits=other.limits())


@pytest.mark.parametrize("fails", [False, True])
def test_limit_is_raised_for_a_restore(world, site, monkeypatch, fails):
    """The restored processes have the contents of their GPU memory; a failed restore lowers the limit, too."""
    other, agent = suspended_at_c2(world, site, monkeypatch)
    seen = []
    restore = agent.imager.restore

    def watched(*arguments, **options):
        seen.append(other.values(7))
        if fails:
            raise CudaError("no")
        return restore(*arguments, **options)

    agent.imager.restore = watched
    assert isinstance(agent.restore(), Hold if fails else Restored)
    assert min(seen[0]) - 300 * MIB >= 256 * MIB
    assert (other.values(7), other.records()) == ([SMALL] * 2, [])


@pytest.mark.parametrize("at", [1, 2, 3])
def test_crash_during_a_restore_leaves_no_raised_limit(world, site, monkeypatch, at):
    other, agent = suspended_at_c2(world, site, monkeypatch)
    world.effects, world.crash_at = 0, at
    with pytest.raises(Crash):
        agent.restore()
    assert min(other.values(7)) > SMALL
    again = recovered(world, "c2", other.limits())
    assert again.restore() == Restored(2)
    assert (other.values(7), other.records()) == ([SMALL] * 2, [])


# --- in place


def test_limit_stays_raised_during_sleep(world, site):
    """The next agent keeps it raised as well; after the wake it is Slurm's again."""
    site.use(7, 400 * MIB)
    node = Node(world, limits=site.limits())
    node.sleep()
    raised = [SMALL + 48 * GIB + 256 * MIB] * 2
    assert (site.values(7), asleep(world)) == (raised, True)
    again = Node(world, limits=site.limits())
    again.recover()
    again.keeper._lower_limits()
    assert site.values(7) == raised
    assert again.view()["limit_raised_bytes"] == 48 * GIB + 256 * MIB
    again.scheduler.wake(7, "alice")
    again.round()
    assert awake(world)
    assert (site.values(7), site.records()) == ([SMALL] * 2, [])


@pytest.mark.parametrize("at", range(1, 4))
def test_crash_in_place_leaves_no_raised_limit(world, site, at):
    """The job wakes after its suspension was interrupted, or sleeps with a raised limit."""
    world.crash_at = at
    with pytest.raises(Crash):
        Node(world, limits=site.limits()).sleep()
    node = Node(world, limits=site.limits())
    node.recover()
    if asleep(world):
        assert min(site.values(7)) > SMALL
        node.scheduler.wake(7, "alice")
    node.round()
    node.keeper._lower_limits()
    assert awake(world)
    assert (site.values(7), site.records()) == ([SMALL] * 2, [])


def test_failed_wake_keeps_the_limit_raised(world, site):
    """Its GPU memory is still in host memory."""
    node = Node(world, limits=site.limits())
    node.sleep()
    raised = site.values(7)
    with failing(node):
        node.scheduler.wake(7, "alice")
        node.round()
    node.keeper._lower_limits()
    assert site.values(7) == raised
    node.world.clock += 60
    node.round()
    assert awake(world)
    assert site.values(7) == [SMALL] * 2
