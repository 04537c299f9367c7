"""The containers behave like nodes: no privileges, shared files, restarts, processes that can be checkpointed."""

from __future__ import annotations

import json

import pytest
from cluster.driver import COMPUTE_NODES, SERVICES, Cluster, docker, script, wait_until

pytestmark = pytest.mark.cluster

NEEDED_BY_CRIU = {"SYS_ADMIN", "SYS_PTRACE", "SYS_TIME", "NET_ADMIN", "DAC_READ_SEARCH"}

# Dumps and restores a process of another user, which counts and must continue where it stopped.
CHECKPOINT = r"""
set -eu
directory=$(mktemp -d)
cd "$directory"
cat >count.py <<'END'
import itertools, time
for number in itertools.count(1):
    print(number, flush=True)
    time.sleep(0.05)
END
chmod 0755 .
setsid setpriv --reuid alice --regid alice --init-groups python3 count.py >log </dev/null 2>&1 &
pid=$!
until [ "$(tail -n 1 log)" -ge 5 ] 2>/dev/null; do sleep 0.05; done
criu dump --tree "$pid" --images-dir . --manage-cgroups=ignore --shell-job >dump.out 2>&1 || { cat dump.out; exit 1; }
wait "$pid" || true
before=$(tail -n 1 log)
criu restore --images-dir . --manage-cgroups=ignore --shell-job --restore-detached >restore.out 2>&1 \
  || { cat restore.out; exit 1; }
for look in $(seq 100); do
  [ "$(tail -n 1 log)" -le $((before + 3)) ] || break
  sleep 0.1
done
after=$(tail -n 1 log)
kill "$pid"
echo "$before $after $(sort -n log | uniq -d | wc -l)"
"""


def test_no_container_is_privileged(cluster: Cluster) -> None:
    """The containers list single capabilities, without CAP_SYS_RESOURCE, which some hosts lack."""
    for node in SERVICES:
        host = json.loads(docker("inspect", cluster.container(node)))[0]["HostConfig"]
        added = {name.removeprefix("CAP_") for name in host["CapAdd"] or []}
        assert not host["Privileged"], node
        assert not added & {"ALL", "SYS_RESOURCE"}, node
        assert (added >= NEEDED_BY_CRIU) == (node in COMPUTE_NODES), node


def test_homes_and_the_store_are_shared(cluster: Cluster) -> None:
    """A file that a job writes on one node is visible on the others; the node-local store is not shared."""
    cluster.exec("c1", "sh", "-c", "date >/home/alice/shared-home", user="alice")
    cluster.shell("c1", "date >/shared/probe && date >/var/lib/slurm-affinode/probe")
    for node in ("c2", "cpu1", "login"):
        cluster.exec(node, "test", "-s", "/home/alice/shared-home")
        cluster.exec(node, "test", "-s", "/shared/probe")
        assert cluster.run(node, "test", "-e", "/var/lib/slurm-affinode/probe").returncode == 1


def test_slurm_affinode_runs_on_every_node(cluster: Cluster) -> None:
    """All nodes have the version of this checkout."""
    for node in ("login", *COMPUTE_NODES):
        assert cluster.exec(node, "slurm-affinode", "--version", user="alice").startswith("slurm-affinode")


@pytest.mark.main
def test_pyslurm_is_installed_where_supported(cluster: Cluster) -> None:
    """On 26.05 it reads the cluster's nodes; on 24.11 it is not installed."""
    program = "import pyslurm; print(*sorted(pyslurm.Nodes.load()))"
    printed = cluster.run("login", "/opt/slurm-affinode/bin/python", "-c", program)
    if cluster.release == "26.05":
        assert printed.stdout.split() == sorted(COMPUTE_NODES), printed.stderr
    else:
        assert "No module named 'pyslurm'" in printed.stderr


@pytest.mark.main
def test_process_of_another_user_is_checkpointed_and_restored(cluster: Cluster) -> None:
    """CRIU works with the capabilities of the nodes."""
    before, after, repeated = map(int, cluster.shell("c1", CHECKPOINT).split())
    assert after > before + 3
    assert repeated == 0


@pytest.mark.main
def test_controller_restart_leaves_a_job_running(cluster: Cluster) -> None:
    """slurmctld loads its saved state, and the job is not affected."""
    job = cluster.submit("--partition=gpu", "--gres=gpu:1", wrap="sleep 1800")
    cluster.wait_for_state(job, "RUNNING")
    cluster.restart("slurmctld")
    wait_until("slurmctld answers", lambda: "is UP" in cluster.run("login", "scontrol", "ping").stdout)
    assert cluster.job(job)["JobState"] == "RUNNING"
    assert cluster.job(job)["Restarts"] == "0"


@pytest.mark.main
@pytest.mark.slow
def test_job_of_lost_node_is_requeued(cluster: Cluster) -> None:
    """After a power failure, the node is down and its job is requeued; powered on, the node returns to service."""
    job = cluster.submit("--partition=gpu", "--gres=gpu:1", "--nodelist=c2", wrap="sleep 1800")
    cluster.wait_for_state(job, "RUNNING")
    cluster.kill("c2")
    try:
        wait_until("the job was requeued", lambda: cluster.job(job)["Restarts"], lambda restarts: restarts == "1")
    finally:
        cluster.start("c2")
    wait_until("c2 serves again", lambda: cluster.nodes()["c2"], lambda state: state == "idle")
    # The job must not start earlier: the node learns of the end of the lost attempt when it is back, by job ID alone,
    # and would end a new attempt too. The delay after a requeue separates the two.
    cluster.wait_for_state(job, "RUNNING")
    assert cluster.job(job)["NodeList"] == "c2"


def test_status_names_containers_nodes_and_jobs(cluster: Cluster) -> None:
    """`containers/cluster status` shows the whole state of the cluster."""
    job = cluster.submit("--partition=cpu", wrap="sleep 1800")
    cluster.wait_for_state(job, "RUNNING")
    printed = script(("status",), cluster.name, cluster.release, 60)
    assert printed.returncode == 0, printed.stderr
    for word in (*SERVICES, "gpu:h100:2", f" {job} "):
        assert word in printed.stdout


def test_status_reports_cluster_that_is_not_up(cluster: Cluster) -> None:
    """A cluster with another name is another cluster."""
    printed = script(("status",), f"{cluster.name}-other", cluster.release, 60)
    assert printed.returncode == 3
    assert "is not up" in printed.stderr
