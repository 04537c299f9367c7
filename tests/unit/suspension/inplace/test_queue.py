"""The queue of wake requests for a GPU: order, jobs that make room, deadlines, and jobs that wait to start."""

from __future__ import annotations

from dataclasses import replace

from agent_world import FakeLink
from inplace_site import BACK, GIB, Node, asleep, awake

from slurm_affinode.suspension.inplace.gpu_sharing import Rules
from slurm_affinode.suspension.job.process_tree import Member
from slurm_affinode.suspension.job.shepherd import Start, Wait


def test_job_waits_for_room_and_names_job_to_suspend(world, node):
    """The policy is notified; nothing is restored before there is room."""
    pressed = []
    node.pressed = lambda: pressed.append(node.scheduler.needed_by(8))
    node.idle_s = lambda job_id: 100.0 if job_id == 8 else None
    node.sleep()
    other = node.job(job_id=8, link=FakeLink())
    node.agent.registry.put(other)
    node.cards.processes = lambda: {node.cards.uuid: {other.init_pid + 3: 40 * GIB}}
    world.nodes["c1"].processes.append(replace(world.nodes["c1"].processes[0], pid=other.init_pid + 3, pid_ns=3))
    node.freezer.members = lambda init, started: [
        Member(other.init_pid + 3, 3, init, 5, "S", "python", 0),
        *node.freezer.processes.members(init, started)[:2],
    ]
    node.connection()
    node.round()
    assert pressed == [(7,)]
    assert node.scheduler.needed_by(8) == (7,)
    assert node.view()["waits"] == "job 8 makes room"
    assert BACK[1] not in world.effect_log


def test_overdue_job_is_marked_or_ended(world):
    """The job keeps its place in the queue."""
    for end in (False, True):
        ended: list[int | str] = []
        node = Node(world, Rules(deadline_s=60, end_on_deadline=end))
        node.agent.slurm.cancel = ended.append
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


def busy_beside(node, *, turn_left_s):
    """Add a busy job 8 with 40 GiB and this much left of its turn."""
    other = node.job(job_id=8, link=FakeLink())
    node.agent.registry.put(other)
    node.turn_left_s = lambda job_id: turn_left_s if job_id == 8 else None
    pid = other.init_pid + 3
    processes = node.cards.processes
    node.cards.processes = lambda: {node.cards.uuid: {**processes()[node.cards.uuid], pid: 40 * GIB}}
    node.freezer.members = lambda init, started: [
        Member(pid, 3, init, 5, "S", "python", 0),
        *node.freezer.processes.members(init, started)[:2],
    ]


def test_job_that_waits_for_turns_is_not_ended(world):
    """Others make room for it one after the other, however long that takes; it is marked as overdue."""
    ended: list[int | str] = []
    node = Node(world, Rules(deadline_s=60, end_on_deadline=True))
    node.agent.slurm.cancel = ended.append
    node.sleep()
    busy_beside(node, turn_left_s=20.0)
    node.connection()
    node.round()
    assert node.view()["waits"].endswith("job 8 is busy, and its turn is not over")
    world.clock += 60
    node.round()
    assert (node.view()["overdue"], ended) == (True, [])
    node.turn_left_s = lambda job_id: None  # the site's rules are against it now
    node.round()
    assert ended == [7]


def test_busy_job_makes_room_after_its_turn(world):
    """The policy is notified; a starting job waits for it beyond the deadline, as it could not run beside it."""
    node = Node(world, Rules(deadline_s=60, start_free_pct=60))
    pressed = []
    node.pressed = lambda: pressed.append(node.scheduler.needed_by(8))
    node.sleep()
    busy_beside(node, turn_left_s=20.0)
    node.gpus_of = lambda job_id: [node.cards.uuid]
    link = FakeLink()
    starting = node.job(job_id=9, root=0, init_pid=0, link=link)
    node.agent.registry.put(starting)
    assert not node.scheduler.admit(starting)
    node.round()
    world.clock += 61
    node.round()
    assert Start() not in link.sent
    assert pressed == []
    node.turn_left_s = lambda job_id: -1.0 if job_id == 8 else None
    node.round()
    assert pressed == [(9,)]


def test_clock_change_does_not_make_job_overdue(world):
    """Only elapsed time counts; otherwise jobs would be ended by a clock change."""
    ended: list[int | str] = []
    passed = [1000.0]
    node = Node(world, Rules(deadline_s=60, end_on_deadline=True), clock=lambda: passed[0])
    node.agent.slurm.cancel = ended.append
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


def test_comment_of_owner_is_kept_at_the_end(world):
    """It follows the reason why the site ended the job."""
    node = Node(world, Rules(deadline_s=60, end_on_deadline=True))
    node.agent.slurm.cancel = lambda job: None
    world.comment = "nightly of the vision group"
    node.sleep()
    node.cards.others = 79 * GIB
    node.connection()
    node.round()
    world.clock += 60
    node.round()
    assert world.comment.startswith("ended by slurm-affinode: it has waited for ")
    assert world.comment.endswith(" // nightly of the vision group")


def test_job_waits_for_unavailable_driver(world, node):
    """The reason is shown; nothing is restored while the free memory is unknown."""
    node.sleep()
    node.connection()
    node.cards.lost = True
    node.round()
    assert node.view()["waits"] == "the driver is away"
    assert asleep(world)


def test_starting_job_waits_for_room_in_its_turn(world):
    """It starts when the configured share is free, and its room is reserved until it has allocated it."""
    node = Node(world, Rules(start_free_pct=60, deadline_s=600))
    node.gpus_of = lambda job_id: [node.cards.uuid]
    node.cards.others = 10 * GIB
    links = {job_id: FakeLink() for job_id in (8, 9)}
    for job_id, link in links.items():
        job = node.job(job_id=job_id, root=0, init_pid=0, link=link)
        node.agent.registry.put(job)
        assert not node.scheduler.admit(job)
    node.round()
    assert [link.sent for link in links.values()] == [[Wait(fresh=True)]] * 2
    assert node.view_of(8)["waits"].startswith("it needs 48 GiB on GPU 0")
    assert node.view_of(9)["waits"] == "job 8 is ahead of it in the queue"
    assert node.sleep().failure is None  # job 7 releases its memory
    node.round()
    assert links[8].sent[-1] == Start()
    node.round()
    assert links[9].sent[-1] == Wait(fresh=True)
    world.clock += 31
    node.round()
    assert links[9].sent[-1] == Start()
    world.clock += 31
    node.round()
    assert len(node.scheduler._starters) == 0


def test_job_suspended_soon_after_start_does_not_wait_for_its_room(world):
    """The room reserved for its start is released."""
    node = Node(world, Rules(start_free_pct=95))
    node.gpus_of = lambda job_id: [node.cards.uuid]
    processes, node.cards.processes = node.cards.processes, lambda: {node.cards.uuid: {}}  # no processes yet
    link = FakeLink()
    assert not node.scheduler.admit(node.job(link=link))
    node.agent.registry.put(node.job(link=link))
    node.round()
    assert link.sent[-1] == Start()
    node.cards.processes = processes
    node.sleep()
    node.connection()
    node.round()
    assert awake(world)


def test_waiting_job_starts_after_deadline(world):
    """It also starts if there is no job to wait for; a shepherd that reconnects keeps its place."""
    node = Node(world, Rules(start_free_pct=60, deadline_s=60))
    node.gpus_of = lambda job_id: [node.cards.uuid]
    node.cards.others = 79 * GIB
    link = FakeLink()
    job = node.job(job_id=8, root=0, link=link)
    node.agent.registry.put(job)
    assert not node.scheduler.admit(job)
    assert not node.scheduler.admit(job)
    world.clock += 11
    node.round()
    assert link.sent == [Wait(fresh=True)] * 3
    world.clock += 60
    node.round()
    assert link.sent[-1] == Start()
    node.agent.registry.remove(8)
    node.round()
    assert len(node.scheduler._starters) == 0
    assert Node(world).scheduler.admit(job)


def test_waiting_shepherd_gets_messages_after_clock_change(world):
    """Without messages its shepherd would assume that the agent has ended, and start the script."""
    node = Node(world, Rules(start_free_pct=60))
    node.gpus_of = lambda job_id: [node.cards.uuid]
    node.cards.others = 79 * GIB
    link = FakeLink()
    job = node.job(job_id=8, root=0, link=link)
    node.agent.registry.put(job)
    assert not node.scheduler.admit(job)
    world.clock -= 3600
    node.round()
    assert link.sent == [Wait(fresh=True)] * 2


def test_job_with_all_its_memory_has_no_shortage(world, node):
    """The GPU may be full, and the job may have slightly more memory than before."""
    node.sleep()
    sleeper = node.scheduler._sleepers[7]
    shortage = node.scheduler._sharing.shortage
    assert shortage(sleeper) is None
    node.cards.others = 79 * GIB
    assert "48.1 GiB are needed" in str(shortage(sleeper))
    [pid] = sleeper.cuda
    node.cards.processes = lambda: {node.cards.uuid: {pid: 48 * GIB + 4096}}
    node.cards.others = 32 * GIB - 8192
    assert shortage(sleeper) is None
