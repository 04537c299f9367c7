"""Turns on a GPU: who waits for room, who makes it, who has waited too long, who starts."""

from __future__ import annotations

from dataclasses import replace

from agent_world import FakeLink
from inplace_site import BACK, GIB, Node, asleep, awake

from slurm_affinode.agent.inplace.sharing import Rules
from slurm_affinode.agent.shepherds import Start, Wait
from slurm_affinode.agent.tree import Member


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


def test_a_clock_that_is_set_makes_nobody_overdue(world):
    """Else jobs would be ended for it; the time that has passed counts."""
    ended: list[int | str] = []
    passed = [1000.0]
    node = Node(world, Rules(deadline_s=60, end_on_deadline=True), clock=lambda: passed[0])
    node.agent.parts.slurm.cancel = ended.append
    node.sleep()
    node.cards.others = 79 * GIB
    node.connection()
    node.round()
    for jump in (86400, -2 * 86400):
        world.clock += jump
        passed[0] += 20
        node.round()
        assert not node.view()["overdue"]
    passed[0] += 20
    node.round()
    assert ended == [7]


def test_the_comment_of_its_owner_outlives_its_end(world):
    """It stands behind why the site has ended the job."""
    node = Node(world, Rules(deadline_s=60, end_on_deadline=True))
    node.agent.parts.slurm.cancel = lambda job: None
    world.comment = "nightly of the vision group"
    node.sleep()
    node.cards.others = 79 * GIB
    node.connection()
    node.round()
    world.clock += 60
    node.round()
    assert world.comment.startswith("ended by slurm-affinode: it has waited for ")
    assert world.comment.endswith(" // nightly of the vision group")


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


def test_one_that_sleeps_soon_after_its_start_does_not_wait_for_its_own_room(world):
    """The room that was kept for its start is no more."""
    node = Node(world, Rules(start_free_pct=95))
    node.director.gpus_of = lambda job_id: [node.cards.uuid]
    processes, node.cards.processes = node.cards.processes, lambda: {node.cards.uuid: {}}  # nothing yet
    link = FakeLink()
    assert not node.director.admit(node.job(link=link))
    node.agent.parts.registry.put(node.job(link=link))
    node.round()
    assert link.sent[-1] == Start()
    node.cards.processes = processes
    node.sleep()
    node.connection()
    node.round()
    assert awake(world)


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


def test_one_that_waits_to_start_is_kept_waiting_whatever_the_clock_does(world):
    """Its shepherd would take silence for an agent that is gone, and start the script."""
    node = Node(world, Rules(start_free_pct=60))
    node.director.gpus_of = lambda job_id: [node.cards.uuid]
    node.cards.others = 79 * GIB
    link = FakeLink()
    job = node.job(job_id=8, root=0, link=link)
    node.agent.parts.registry.put(job)
    assert not node.director.admit(job)
    world.clock -= 3600
    node.round()
    assert link.sent == [Wait(fresh=True)] * 2


def test_one_that_has_all_it_had_lacks_nothing(world, node):
    """Also where it has a little more by now, and the GPU is full."""
    node.sleep()
    sleeper = node.director._sleepers[7]
    shortage = node.director._sharing.shortage
    assert shortage(sleeper) is None
    node.cards.others = 79 * GIB
    assert "48.1 GiB are needed" in str(shortage(sleeper))
    [pid] = sleeper.cuda
    node.cards.processes = lambda: {node.cards.uuid: {pid: 48 * GIB + 4096}}
    node.cards.others = 32 * GIB - 8192
    assert shortage(sleeper) is None
