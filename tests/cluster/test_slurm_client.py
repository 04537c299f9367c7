"""The conformance suite of ``slurm/interface.py`` on a live cluster, for each client, and what only a cluster has.

Each client acts as a user of the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from cluster.driver import COMPUTE_NODES, Cluster, docker, wait_until
from cluster.slurm_clients import CPU, GPU, HALF_HOUR, NO_PYSLURM, runner, starter
from conformance.slurm_client import ActionSuite, SlurmSite

from slurm_affinode.model.cluster import GpuCount, NodeGpus
from slurm_affinode.slurm import interface
from slurm_affinode.slurm.commands_client import CommandsClient
from slurm_affinode.slurm.interface import SlurmClient
from slurm_affinode.slurm.pyslurm_client import PyslurmClient

pytestmark = [pytest.mark.cluster, pytest.mark.main]

Open = Callable[[str], SlurmClient]


@pytest.fixture(params=["commands", "pyslurm"])
def backend(request: pytest.FixtureRequest, cluster: Cluster) -> str:
    """The implementation under test."""
    if request.param == "pyslurm" and cluster.release != "26.05":
        pytest.skip(NO_PYSLURM)
    return str(request.param)


@pytest.fixture
def connect(backend: str, cluster: Cluster) -> Iterator[Open]:
    """Yield a function that opens clients of the implementation under test, as a user."""
    opened: list[SlurmClient] = []

    def open_as(user: str) -> SlurmClient:
        commands = CommandsClient(runner(cluster, user))
        client = commands if backend == "commands" else PyslurmClient(commands, starter(cluster, user))
        opened.append(client)
        return client

    yield open_as
    for client in opened:
        client.close()


@pytest.fixture
def root(connect: Open) -> SlurmClient:
    """A client of the administrator."""
    return connect("root")


def started(cluster: Cluster, *options: str, script: str = "") -> str:
    """Submit a job and wait until it runs."""
    job = cluster.submit(*options, script=script, wrap="" if script else HALF_HOUR)
    cluster.wait_for_state(job, "RUNNING")
    return job


class TestConformance(ActionSuite):
    """The administrator's client."""

    @pytest.fixture
    def site(self, cluster: Cluster, root: SlurmClient) -> SlurmSite:
        def job(state: str) -> int:
            if state == "RUNNING":
                return int(started(cluster, *CPU))
            return int(cluster.submit(*CPU, "--begin=now+1hour", wrap="true"))

        return SlurmSite(
            root, job, node="cpu1", until=lambda ask, holds: wait_until("the job is in the state", ask, holds)
        )


# --- queries


def test_running_gpu_job_is_shown_with_its_gpus_and_steps(cluster: Cluster, root: SlurmClient) -> None:
    """The client returns the data that the agent needs: owner, nodes, GPUs by index, steps."""
    text = "#!/bin/bash\nsrun --gres=gpu:1 --mem=50 --ntasks=1 sleep 1800 &\nwait\n"
    options = ("--job-name=tr|ain 'x' é", "--comment=a = b", "--gres=gpu:h100:2", "--time=10", "--output=out-%j.txt")
    number = started(cluster, "--partition=gpu", "--nodelist=c1", "--mem=200", *options, script=text)
    job = wait_until("the step runs", lambda: root.job(number), lambda job: len(job.steps or ()) == 3)
    assert (job.id, job.name, job.user, job.uid, job.account) == (number, "tr|ain 'x' é", "alice", 2001, "vision")
    assert (job.state, job.partitions, job.nodes, job.batch_host) == ("RUNNING", ("gpu",), ("c1",), "c1")
    assert (job.gpus_requested, job.gpus_allocated) == (GpuCount(2, "h100"), GpuCount(2, "h100"))
    assert job.node_gpus == (NodeGpus("c1", 2, "h100", (0, 1)),)
    assert (job.comment, job.admin_comment) == ("a = b", None)
    assert (job.batch, job.requeue, job.restarts, job.is_held) == (True, True, 0, False)
    assert job.stdout == f"/home/alice/out-{number}.txt"
    assert job.time_limit_s == 600
    assert job.start is not None
    assert job.end is None
    assert job.tres_allocated["mem"] == "200M"
    steps = {step.step: step for step in job.steps or ()}
    assert set(steps) == {"batch", "extern", "0"}
    assert steps["0"].gpus is not None
    assert steps["0"].gpus.count == 1
    assert (steps["0"].id, steps["0"].nodes, steps["batch"].gpus) == (f"{number}.0", ("c1",), None)
    assert {step.step for step in root.steps(number)} == set(steps)


def test_pending_jobs_have_reason_and_expected_start(cluster: Cluster, root: SlurmClient) -> None:
    """Pending jobs are held, have a later begin time, or are in several partitions."""
    held = cluster.submit(*CPU, "--hold", wrap="true")
    later = cluster.submit(
        "--partition=gpu,gpu-preempt", "--gres=gpu:1", "--begin=now+1hour", "--no-requeue", wrap="true"
    )
    jobs = {str(job.job_id): job for job in root.jobs()}
    assert (jobs[held].is_held, jobs[held].priority, jobs[held].reason) == (True, 0, "JobHeldUser")
    assert (jobs[held].start, jobs[held].nodes, jobs[held].tres_allocated) == (None, (), {})
    assert set(jobs[later].partitions) == {"gpu", "gpu-preempt"}
    assert (jobs[later].reason, jobs[later].is_held, jobs[later].requeue) == ("BeginTime", False, False)
    begin = jobs[later].expected_start
    assert begin is not None
    assert abs(begin - datetime.now(UTC) - timedelta(hours=1)) < timedelta(minutes=1)
    assert jobs[later].gpus_requested == GpuCount(1)
    assert jobs[held].gpus_requested is None


def test_array_tasks_and_components_are_found_by_name(cluster: Cluster, root: SlurmClient) -> None:
    """Names such as ``7_2``, ``7_[3-4]`` and ``9+1`` select running tasks and tasks that share a record."""
    array = cluster.submit(*CPU, "--array=1-4%1", wrap=HALF_HOUR)
    cluster.wait_for_state(f"{array}_1", "RUNNING")
    team = cluster.submit(*CPU, "--hold", ":", *CPU, wrap=HALF_HOUR)
    first, waiting = root.job(f"{array}_1"), root.job(f"{array}_3")
    assert (first.id, first.state, first.array_limit) == (f"{array}_1", "RUNNING", 1)
    assert (waiting.id, waiting.array_tasks, waiting.stdout) == (f"{array}_[2-4]", "2-4", None)
    assert root.job(f"{team}+1").job_id == int(team) + 1
    ids = {job.id for job in root.jobs()}
    assert {f"{array}_1", f"{array}_[2-4]", f"{team}+0", f"{team}+1"} <= ids
    for missing in (f"{array}_9", f"{team}+5", "4000000"):
        with pytest.raises(interface.UnknownJobError):
            root.job(missing)
    root.cancel(team)  # the ID of the first component names the whole job
    assert {root.job(f"{team}+{offset}").state for offset in (0, 1)} == {"CANCELLED"}


def test_ended_job_has_end_time(cluster: Cluster, root: SlurmClient) -> None:
    """Slurm lists an ended job with its end time for MinJobAge."""
    number = cluster.submit(*CPU, wrap="true")
    cluster.wait_for_state(number, "COMPLETED")
    job = root.job(number)
    assert (job.state, job.has_ended, job.steps) == ("COMPLETED", True, ())
    assert job.end is not None


def test_nodes_partitions_and_configuration_are_read(cluster: Cluster, root: SlurmClient) -> None:
    """Configured and used GPUs per node, the default partition, and the settings that slurm-affinode uses."""
    started(cluster, *GPU, "--nodelist=c2")
    nodes = {node.name: node for node in root.nodes()}
    assert sorted(nodes) == sorted(COMPUTE_NODES)
    assert (nodes["c2"].gpus, nodes["c2"].gpus_used) == (GpuCount(2, "h100"), GpuCount(1, "h100"))
    assert (nodes["cpu1"].gpus, nodes["cpu1"].gpus_used) == (None, None)
    assert (nodes["c2"].state, nodes["c2"].cpus, nodes["c2"].memory_mib) == ("MIXED", 8, 16000)
    assert (nodes["c2"].cpus_used, nodes["c2"].memory_used_mib) == (1, 100)
    assert nodes["c2"].responding
    partitions = {partition.name: partition for partition in root.partitions()}
    assert [name for name, partition in partitions.items() if partition.default] == ["cpu"]
    assert partitions["gpu"].nodes == ("c1", "c2")
    assert partitions["gpu"].gpus == GpuCount(4, "h100")
    assert "gres/gpu" in root.config()["AccountingStorageTRES"].split(",")
    assert root.version().startswith(f"{cluster.release}.")
    root.ping()


# --- actions


def test_hold_and_release(cluster: Cluster, root: SlurmClient, connect: Open) -> None:
    """Only an administrator releases a job held by an administrator; the owner may release one held for the user."""
    alice = connect("alice")
    number = cluster.submit(*CPU, "--begin=now+1hour", wrap="true")
    root.hold(number)
    assert (root.job(number).is_held, root.job(number).reason) == (True, "JobHeldAdmin")
    with pytest.raises(interface.NotPermittedError):
        alice.release(number)
    root.release(number)
    assert not root.job(number).is_held
    root.hold(number, by_user=True)
    assert root.job(number).reason == "JobHeldUser"
    alice.release(number)
    assert not root.job(number).is_held


def test_requeue_frees_gpus_and_held_job_waits_for_release(cluster: Cluster, root: SlurmClient) -> None:
    """Requeue and hold suspend the same job. A job submitted with --no-requeue cannot be requeued."""
    number = started(cluster, *GPU, "--nodelist=c1")
    root.requeue(number, hold=True)
    job = wait_until("it is back in the queue", lambda: root.job(number), lambda job: job.state == "PENDING")
    assert (job.is_held, job.restarts, job.node_gpus) == (True, 1, ())
    wait_until("its GPU is free", lambda: {node.name: node for node in root.nodes()}["c1"].gpus_used == GpuCount(0))
    root.release(number)
    cluster.wait_for_state(number, "RUNNING")
    root.requeue(number)
    wait_until("it was requeued", lambda: root.job(number), lambda job: job.restarts == 2)
    never = started(cluster, *CPU, "--no-requeue")
    with pytest.raises(interface.InvalidStateError):
        root.requeue(never)


def test_requeue_of_running_jobs_spares_canceled_job(cluster: Cluster, root: SlurmClient) -> None:
    """Without ``running``, Slurm would also requeue a job that it is still ending."""
    deaf = "#!/bin/bash\ntrap '' TERM\nwhile :; do sleep 0.1; done\n"
    number = started(cluster, *GPU, "--nodelist=c1", script=deaf)
    wait_until("its prolog is over", lambda: root.job(number), lambda job: job.reason != "Prolog")
    root.cancel(number)
    wait_until("it is being ended", lambda: root.job(number), lambda job: job.state == "COMPLETING")
    root.requeue(number, hold=True, running=True)
    job = wait_until("it has ended", lambda: root.job(number), lambda job: job.state != "COMPLETING")
    assert (job.state, job.restarts) == ("CANCELLED", 0)
    number = started(cluster, *GPU, "--nodelist=c1")
    root.requeue(number, hold=True, running=True)
    job = wait_until("it is back in the queue", lambda: root.job(number), lambda job: job.state == "PENDING")
    assert (job.is_held, job.restarts) == (True, 1)


def test_cancel_ends_only_the_named_job_task_or_step(cluster: Cluster, root: SlurmClient) -> None:
    """Other jobs, tasks and steps keep running; errors distinguish ended and unknown jobs."""
    text = "#!/bin/bash\nsrun --ntasks=1 --mem=50 sleep 1800\necho continued\nsleep 1800\n"
    number = started(cluster, *CPU, script=text)
    wait_until("its step runs", lambda: root.steps(number), lambda steps: any(step.step == "0" for step in steps))
    root.cancel(f"{number}.0")
    cluster.wait_for_output(number, "continued")
    array = cluster.submit(*CPU, "--hold", "--array=1-3", wrap=HALF_HOUR)
    root.cancel(f"{array}_2")
    assert root.job(f"{array}_3").array_tasks == "1,3"  # a task that never started leaves no record
    root.cancel(number)
    wait_until("it has ended", lambda: root.job(number).state == "CANCELLED")
    with pytest.raises(interface.AlreadyDoneError):
        root.cancel(number)
    with pytest.raises(interface.InvalidStateError):
        root.cancel(f"{array}_3.0")
    for missing in ("4000000", f"{array}_77"):
        with pytest.raises(interface.UnknownJobError):
            root.cancel(missing)


def test_signal_reaches_the_batch_script(cluster: Cluster, root: SlurmClient) -> None:
    """Only the script is signaled, by name or number; a pending or ended job has no process to signal."""
    text = "#!/bin/bash\ntrap 'echo got one' USR1\necho ready\nwhile :; do sleep 0.1; done\n"
    number = started(cluster, *CPU, script=text)
    cluster.wait_for_output(number, "ready")
    root.signal(number, "USR1", to="batch")
    cluster.wait_for_output(number, "got one")
    with pytest.raises(interface.UnknownJobError):
        root.signal(f"{number}.7", "USR1")
    root.cancel(f"{number}.batch")
    wait_until("its script was killed", lambda: root.job(number).has_ended)
    with pytest.raises(interface.AlreadyDoneError):
        root.signal(number, 10)
    waiting = cluster.submit(*CPU, "--hold", wrap="true")
    with pytest.raises(interface.InvalidStateError):
        root.signal(waiting, "USR1")


def test_comments_hold_any_text(cluster: Cluster, root: SlurmClient, connect: Open) -> None:
    """Text that resembles options is kept. Owners may set the comment, administrators both comments."""
    number = cluster.submit(*CPU, "--hold", wrap="true")
    for text in ("suspended: idle 15m, 52 GiB, wake with ...", "a \"b\" 'c' = d Priority=9", "--all -v é\N{SNOWMAN}"):
        root.set_comment(number, text)
        root.set_admin_comment(number, f"JS1:{text}")
        job = root.job(number)
        assert (job.comment, job.admin_comment, job.priority) == (text, f"JS1:{text}", 0)
    connect("alice").set_comment(number, "mine")
    assert root.job(number).comment == "mine"
    root.set_comment(number, "")
    assert root.job(number).comment is None
    with pytest.raises(interface.NotPermittedError):
        connect("bob").set_comment(number, "x")


def test_notice_appears_in_job_output(cluster: Cluster, root: SlurmClient) -> None:
    """The notice is written as text, even if it looks like an option."""
    number = cluster.submit(*CPU, wrap=f"echo begun; {HALF_HOUR}")
    # Slurm silently drops a notice for a job before its script is launched.
    cluster.wait_for_output(number, "begun")
    root.notify(number, "--verbose: your job is idle")
    cluster.wait_for_output(number, "--verbose: your job is idle")


def test_drain_and_resume(cluster: Cluster, root: SlurmClient, connect: Open) -> None:
    """Only administrators may drain a node, with a reason; a node in service cannot be resumed."""
    root.drain("cpu1", "GPU 0: memory held by no process")
    node = {node.name: node for node in root.nodes()}["cpu1"]
    assert (node.draining, node.reason) == (True, "GPU 0: memory held by no process")
    root.resume("cpu1")
    assert not {node.name: node for node in root.nodes()}["cpu1"].draining
    with pytest.raises(interface.InvalidStateError):
        root.resume("cpu1")
    with pytest.raises(interface.UnknownNodeError):
        root.drain("c99", "x")
    with pytest.raises(interface.NotPermittedError):
        connect("alice").drain("cpu1", "x")


def test_actions_on_jobs_of_others_are_not_permitted(cluster: Cluster, root: SlurmClient, connect: Open) -> None:
    """No action on another user's job has an effect."""
    bob = connect("bob")
    number = started(cluster, *CPU)
    when = datetime.now(UTC) + timedelta(hours=1)
    for act in (
        lambda: bob.hold(number),
        lambda: bob.release(number),
        lambda: bob.requeue(number),
        lambda: bob.cancel(number),
        lambda: bob.signal(number, "USR1"),
        lambda: bob.set_admin_comment(number, "x"),
        lambda: bob.set_begin(number, when),
        lambda: bob.notify(number, "x"),
    ):
        with pytest.raises(interface.NotPermittedError):
            act()
    assert (root.job(number).state, root.job(number).admin_comment) == ("RUNNING", None)


def test_unknown_jobs_are_reported(root: SlurmClient) -> None:
    """By each action that the agent does not need."""
    for act in (
        lambda: root.cancel(4000000),
        lambda: root.signal(4000000, "USR1"),
        lambda: root.set_admin_comment(4000000, "x"),
        lambda: root.notify(4000000, "x"),
    ):
        with pytest.raises(interface.UnknownJobError):
            act()
    assert root.steps(4000000) == ()


# --- outages


@pytest.mark.slow
def test_controller_outage_is_reported_and_survived(cluster: Cluster, root: SlurmClient) -> None:
    """The client survives and works again when slurmctld is back."""
    root.ping()
    docker("stop", "--time=5", cluster.container("slurmctld"))
    try:
        for call in (root.jobs, root.ping, lambda: root.hold(1)):
            with pytest.raises(interface.ControllerDownError):
                call()
    finally:
        cluster.start("slurmctld")
    wait_until("slurmctld answers", lambda: "is UP" in cluster.run("login", "scontrol", "ping").stdout)
    assert len(root.nodes()) == 3
