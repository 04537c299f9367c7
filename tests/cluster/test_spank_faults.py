"""Faults of the plugin: they are logged, and the job starts as if without the option."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.driver import Cluster, wait_until
from cluster.sleepers import (
    BY_HAND,
    each_once,
    finish,
    idle_job,
    status,
    steps,
    suspend,
    wait_asleep,
    wait_for_agents,
    wake,
)
from cluster.spank import OPTION, outcome

pytestmark = pytest.mark.cluster

PLUGSTACK = "/etc/slurm/plugstack.conf.d/slurm-affinode.conf"
PLUGIN = "optional /usr/local/lib/slurm/slurm_affinode.so"
ON_C1 = ("--partition=gpu", "--nodelist=c1", OPTION)
SCRIPT = "#!/bin/bash\n[ $PPID != 1 ] && echo plain; [ $$ = $SLURM_TASK_PID ] && exit 6\n"


@pytest.fixture
def plugstack(cluster: Cluster) -> Iterator[str]:
    """Return the path of plugstack.conf on c1, which is restored after the test."""
    saved = cluster.exec("c1", "cat", PLUGSTACK)
    yield PLUGSTACK
    cluster.exec("c1", "tee", PLUGSTACK, stdin=saved)


def starts_plainly(cluster: Cluster, why: str) -> None:
    """Assert that the job runs outside a namespace and that one line of its output gives the reason."""
    job = cluster.submit(*ON_C1, script=SCRIPT)
    result = outcome(cluster, job)
    assert (result.state, result.exit_code) == ("FAILED", "6:0")
    *printed, last = cluster.output(job).splitlines()
    assert last == "plain"
    assert len(printed) == 1
    assert "--gpu-suspend-idle has no effect" in printed[0]
    assert why in printed[0]


def test_missing_shepherd_is_reported(cluster: Cluster, plugstack: str) -> None:
    """The shepherd named in plugstack.conf does not exist."""
    cluster.exec("c1", "tee", plugstack, stdin=f"{PLUGIN} shepherd=/no/such/shepherd\n")
    starts_plainly(cluster, "/no/such/shepherd cannot be executed, or has another version")


def test_suspended_job_is_restored_after_policy_change(cluster: Cluster, plugstack: str) -> None:
    """The partition and window of the job are no longer allowed for new jobs, but it has an image."""
    wait_for_agents(cluster)
    job = cluster.submit(BY_HAND, script=idle_job("--nodelist=c1"))
    wait_until("its agent knows it", lambda: status(cluster, job))
    suspend(cluster, job)
    wait_asleep(cluster, job)
    stores = "store=/var/lib/slurm-affinode/images store=/shared/slurm-affinode/images"
    cluster.exec("c1", "tee", plugstack, stdin=f"{PLUGIN} partitions=cpu max_window=10m {stores}\n")
    wake(cluster, job)
    assert each_once(finish(cluster, job))


def test_suspended_job_is_held_without_shepherd(cluster: Cluster, plugstack: str) -> None:
    """The job is requeued and held with its image; the other task of its array, with another raw ID, keeps running."""
    wait_for_agents(cluster)
    array = cluster.submit("--array=1-2", BY_HAND, script=idle_job("--nodelist=c1", idle=60))
    job, other = f"{array}_2", f"{array}_1"
    for task in (job, other):
        cluster.wait_for_output(task, "step number=2")
    wait_until("its agent knows it", lambda: status(cluster, job))
    assert cluster.job(job)["JobId"] == array
    suspend(cluster, job)
    stores = "store=/var/lib/slurm-affinode/images store=/shared/slurm-affinode/images"
    cluster.exec("c1", "tee", plugstack, stdin=f"{PLUGIN} shepherd=/no/such/shepherd {stores}\n")
    wake(cluster, job)
    wait_until(
        "it is back in the queue", lambda: cluster.job(job),
        lambda seen: (seen["JobState"], seen["Restarts"], seen["Priority"]) == ("PENDING", "2", "0"), timeout_s=60,
    )  # fmt: skip
    printed = cluster.output(job)
    assert "it is held: /no/such/shepherd cannot be executed" in printed
    assert "step number" not in printed
    result = cluster.job(other)
    assert (result["JobState"], result["Restarts"]) == ("RUNNING", "0")
    cluster.exec("c1", "tee", plugstack, stdin=f"{PLUGIN} min_window=1s {stores}\n")
    wake(cluster, job)
    cluster.wait_for_output(job, "restored on c1")
    last = steps(cluster.output(job))[-1]
    assert each_once(cluster.wait_for_output(job, f"step number={last + 2}"))


UNUSABLE = "/opt/shepherd cannot be executed, or has another version"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        ("cp /etc/hostname $1; chmod 711 $1", UNUSABLE),
        ("cp /usr/local/libexec/slurm-affinode-shepherd $1; chmod 700 $1", UNUSABLE),
        ("cp /bin/false $1; chmod 711 $1", UNUSABLE),
        ("cp /usr/local/libexec/slurm-affinode-shepherd $1; chmod 755 $1", "users can read it, and so could trace it"),
        ("cp /usr/local/libexec/slurm-affinode-shepherd $1; chmod 731 $1", "not a file that belongs to root"),
        ("cp /usr/local/libexec/slurm-affinode-shepherd $1; chmod 711 $1; chown alice $1", "not a file that belongs"),
    ],
    ids=["no program", "not for users", "another version", "readable", "writable", "owner"],
)
def test_unusable_shepherd_is_reported(cluster: Cluster, plugstack: str, make: str, why: str) -> None:
    """The shepherd exists, but cannot be used."""
    cluster.shell("c1", f"rm -f $1; {make}", "/opt/shepherd")
    cluster.exec("c1", "tee", plugstack, stdin=f"{PLUGIN} shepherd=/opt/shepherd\n")
    starts_plainly(cluster, why)


def test_missing_namespace_is_reported(cluster: Cluster) -> None:
    """The kernel refuses a PID namespace."""
    limit = "/proc/sys/user/max_pid_namespaces"
    if cluster.run("c1", "sh", "-c", f"echo 0 >{limit}").returncode != 0:
        pytest.skip(f"{limit} is read-only in the containers")
    try:
        starts_plainly(cluster, "cannot create a PID namespace")
    finally:
        cluster.shell("c1", f"echo 10000 >{limit}")


def test_missing_plugin_does_not_stop_job(cluster: Cluster) -> None:
    """plugstack.conf declares the plugin as optional, so a job also runs on a node without it."""
    path = "/usr/local/lib/slurm/slurm_affinode.so"
    cluster.exec("c1", "mv", path, f"{path}.away")
    try:
        job = cluster.submit(*ON_C1, script=SCRIPT)
        assert outcome(cluster, job).exit_code == "6:0"
        assert cluster.output(job).endswith("plain\n")
    finally:
        cluster.exec("c1", "mv", f"{path}.away", path)


def test_invalid_plugin_argument_on_node_is_ignored(cluster: Cluster, plugstack: str) -> None:
    """The job has a shepherd, and the valid settings of the node's plugstack.conf apply."""
    cluster.exec("c1", "tee", plugstack, stdin=f"{PLUGIN} color=red min_window=1s\n")
    job = cluster.submit(*ON_C1, wrap="[ $PPID = 1 ] && echo in a namespace")
    assert outcome(cluster, job).state == "COMPLETED"
    assert cluster.output(job).endswith("in a namespace\n")


def test_script_starts_at_process_limit(cluster: Cluster) -> None:
    """If the user is at the process limit, the script is started in place of the shepherd."""
    script = "#!/bin/bash\necho started\nexit 4\n"
    argv = ("prlimit", "--nproc=1:1", "sbatch", "--parsable", "--propagate=NPROC", *ON_C1)
    job = cluster.exec("login", *argv, user="alice", stdin=script).strip()
    result = outcome(cluster, job)
    assert (result.state, result.exit_code) == ("FAILED", "4:0")
    assert cluster.output(job) == "started\n"
