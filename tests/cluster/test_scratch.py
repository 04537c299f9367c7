"""Closed files of jobs in ``/tmp``: they move with the job, or tie it to its node."""

from __future__ import annotations

import itertools

import pytest
from cluster.driver import Cluster, wait_until
from cluster.sleepers import BY_HAND, configured, end, status, suspend, wait_asleep, wait_for_agents, wake
from cluster.spank import outcome

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SCRATCH = r"""#!/usr/bin/env python3
#SBATCH --partition=gpu --gres=gpu:1
import os, tempfile, time
job = os.environ["SLURM_JOB_ID"]
data = tempfile.mkdtemp(prefix="scratch-")

def below(name):
    return os.path.join(data, name)

def facts():
    found = {}
    for directory, names, files in os.walk(data):
        for path in [directory, *(os.path.join(directory, name) for name in (*names, *files))]:
            status = os.lstat(path)
            found[path] = [status.st_mode, status.st_mtime_ns, status.st_nlink]
            if os.path.islink(path):
                found[path].append(os.readlink(path))
            elif os.path.isfile(path):
                with open(path, "rb") as file:
                    found[path].append(file.read())
    return found

os.makedirs(below("deep/empty"))
with open(below("deep/data"), "wb") as file:
    file.write(os.urandom(3 << 20))
with open(below("deep/holes"), "wb") as file:
    file.truncate(1 << 20)
os.chmod(below("deep/data"), 0o640)
os.utime(below("deep/data"), ns=(5, 1234567890123456789))
os.symlink("deep/data", below("link"))
os.link(below("deep/data"), below("hard"))
os.chmod(below("deep/empty"), 0o550)
end = os.path.expanduser("~/slurm-%s-end.out" % job)
number = 0
while not os.path.exists(end):
    number += 1
    with open(below("counter"), "w") as file:
        file.write(str(number))
    before = facts()
    print("step number=%d in %s" % (number, data), flush=True)
    time.sleep(1)
    now = facts()
    if now != before:
        raise SystemExit("other files: %s" % [path for path in {*now, *before} if now.get(path) != before.get(path)])
print("all files are there", flush=True)
"""
RESULT = "/tmp/result-"  # noqa: S108 - of a job in the container
MORE_THAN_LIMIT = {"local_files_limit": "1M"}


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


def started(cluster: Cluster) -> tuple[str, str, str]:
    """Submit the job on c2, though Slurm prefers c1; return its ID, its node and its directory."""
    taken = cluster.submit("--partition=gpu", "--nodelist=c1", "--gres=gpu:2", wrap="sleep 600", user="bob")
    cluster.wait_for_state(taken, "RUNNING")
    job = cluster.submit(BY_HAND, script=SCRATCH)
    path = cluster.wait_for_output(job, "step number=2").split()[3]
    cluster.exec("login", "scancel", taken)
    assert cluster.job(job)["BatchHost"] == "c2"
    return job, "c2", path


def wait_restored(cluster: Cluster, job: str, times: int) -> str:
    """Wait until the job has run on after its restore, and the restore is complete; return its node.

    If the agent ends before that, the next one restores the job again, from the same image.
    """
    wait_until(
        f"it is restored {times} times",
        lambda: cluster.output(job).count("slurm-affinode: restored"),
        lambda count: count == times,
    )
    last = cluster.output(job).count("step number=")
    wait_until("it runs on", lambda: cluster.output(job).count("step number="), lambda count: count > last)
    wait_until("its restore is complete", lambda: cluster.comment(job), lambda comment: "restoring" not in comment)
    return cluster.job(job)["BatchHost"]


def complete(cluster: Cluster, job: str) -> str:
    """End the job, and assert that it has found no difference; return its output."""
    end(cluster, job)
    assert outcome(cluster, job).state == "COMPLETED", cluster.output(job)
    output = cluster.output(job)
    assert "all files are there" in output
    return output


def row(cluster: Cluster, job: str) -> dict[str, object]:
    """Return what ``status`` has about the job, as soon as its agent knows it."""
    return wait_until("status has the job", lambda: status(cluster, job)["jobs"], lambda rows: rows)[0]


def is_there(cluster: Cluster, node: str, path: str) -> bool:
    return cluster.run(node, "test", "-e", path).returncode == 0


def test_closed_files_move_with_the_job_and_back(cluster: Cluster) -> None:
    """The job compares contents, modes, times and links on each node. Nothing stays where it was."""
    job, _, path = started(cluster)
    for times, (node, other) in enumerate(itertools.pairwise(["c2", "c1", "c2"]), 1):
        assert is_there(cluster, node, path)
        suspend(cluster, job)
        wait_asleep(cluster, job)
        assert "copied to its image" in str(row(cluster, job)["local_files"])
        assert not is_there(cluster, node, path)
        cluster.exec("login", "scontrol", "update", f"JobId={job}", f"ReqNodeList={other}", user="alice")
        wake(cluster, job)
        assert wait_restored(cluster, job, times) == other
    assert complete(cluster, job).count("copied to its image") == 2


def test_job_with_too_many_bytes_returns_to_its_node(cluster: Cluster) -> None:
    """It is tied to the node for as long as it has them; the next suspension that copies them ends that."""
    job, node, path = started(cluster)
    with configured(cluster, **MORE_THAN_LIMIT):
        suspend(cluster, job)
        assert wait_asleep(cluster, job)["ReqNodeList"] == node
        result = row(cluster, job)
        assert result["tied_to"] == node
        assert str(result["local_files"]).startswith(f"tied to {node}: "), result
        assert f"tied to {node}" in cluster.comment(job)
        assert is_there(cluster, node, path)
        wake(cluster, job)
        assert wait_restored(cluster, job, 1) == node  # c1 is free as well
    suspend(cluster, job)
    assert wait_asleep(cluster, job)["ReqNodeList"] == "(null)"
    assert row(cluster, job)["tied_to"] is None
    wake(cluster, job)
    wait_restored(cluster, job, 2)
    assert f"tied to {node}: " in complete(cluster, job)


def test_tied_job_without_its_node_is_reported(cluster: Cluster) -> None:
    """Its owner can give up the files; the job then finds out that they are missing."""
    job, node, _ = started(cluster)
    with configured(cluster, **MORE_THAN_LIMIT):
        suspend(cluster, job)
        wait_asleep(cluster, job)
        cluster.kill(node)
        try:
            cluster.exec("login", "scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=broken")
            wake(cluster, job)
            failure = wait_until(
                "status reports the node", lambda: str(row(cluster, job)["failure"]), lambda text: node in text
            )
            assert f"tied to {node}, which is down" in failure
            assert "ReqNodeList=" in failure
            assert "is down" in cluster.comment(job)
            cluster.exec("login", "scontrol", "update", f"JobId={job}", "ReqNodeList=", user="alice")
            output = cluster.wait_for_output(job, "other files")
            assert f"its node-local files stayed on {node} and are missing here" in output
        finally:
            cluster.start(node)
        wait_for_agents(cluster)


def test_ignored_files_stay_behind(cluster: Cluster) -> None:
    """``local_files = "ignore"``: they are neither copied nor reported nor removed."""
    job, node, path = started(cluster)
    with configured(cluster, local_files="ignore"):
        suspend(cluster, job)
        assert wait_asleep(cluster, job)["ReqNodeList"] == "(null)"
        assert row(cluster, job)["local_files"] is None
        assert is_there(cluster, node, path)
        wake(cluster, job)
        cluster.wait_for_output(job, "other files")
    cluster.exec(node, "rm", "-rf", path)


def test_files_of_another_job_of_the_user_are_not_moved(cluster: Cluster) -> None:
    """It ran on the node meanwhile and has left a result in /tmp; only accounting knows of it."""
    job, node, path = started(cluster)
    other = cluster.submit("--partition=gpu", f"--nodelist={node}", wrap=f"echo result > {RESULT}$SLURM_JOB_ID")
    cluster.wait_for_state(other, "COMPLETED")
    cluster.wait_for_runs(other, "COMPLETED")
    suspend(cluster, job)
    wait_asleep(cluster, job)
    result = row(cluster, job)
    assert result["tied_to"] == node
    assert (
        f"other jobs of its user ran on this node, and may have created some of them: {other}" in result["local_files"]
    )
    assert is_there(cluster, node, f"{RESULT}{other}")
    wake(cluster, job)
    wait_restored(cluster, job, 1)
    complete(cluster, job)
    assert is_there(cluster, node, f"{RESULT}{other}")
    cluster.exec(node, "rm", "-rf", path, f"{RESULT}{other}")
