"""A job is requeued after its restore: what its next attempt does, and what its output says."""

from __future__ import annotations

import json
import re

import pytest
from cluster.driver import Cluster, wait_until
from cluster.sleepers import (
    BY_HAND,
    configured,
    finish,
    idle_job,
    steps,
    suspend,
    wait_asleep,
    wait_for_agents,
    wake,
)

pytestmark = pytest.mark.cluster

RETURNED = re.compile(
    r"restored on c\d from its checkpoint of \S+Z again; [^;]+ of work since then is lost: its attempt"
)
OVER = re.compile(
    r"starts from its beginning, not from its checkpoint of \S+Z: its attempt on c\d was lost .+ after its"
)


def restored(cluster: Cluster, *options: str) -> list[tuple[str, int]]:
    """Suspend and restore a job with each option; return their IDs, and their last steps before the checkpoint."""
    jobs = [cluster.submit(f"{BY_HAND}{option}", script=idle_job()) for option in options]
    for job in jobs:
        cluster.wait_for_output(job, "step number=2")
        suspend(cluster, job)
    last = []
    for job in jobs:
        wait_asleep(cluster, job)
        last.append(steps(cluster.output(job))[-1])
        wake(cluster, job)
    for job, step in zip(jobs, last, strict=True):
        cluster.wait_for_output(job, f"step number={step + 3}")
        settled(cluster, job)
    return list(zip(jobs, last, strict=True))


def settled(cluster: Cluster, job: str) -> None:
    """Wait until the restore has succeeded."""
    wait_until(
        f"job {job} is restored",
        lambda: cluster.job(job).get("Comment", ""),
        lambda comment: "restoring" not in comment,
    )


def requeue(cluster: Cluster, job: str) -> None:
    """Have an administrator requeue the job."""
    cluster.exec("login", "scontrol", "requeue", job)


def test_requeued_job_returns_to_its_image_or_starts_over_or_is_held(cluster: Cluster) -> None:
    """Each of three jobs does what its option says, and the held one what its owner says then."""
    wait_for_agents(cluster)
    (job, last), (over, _), (held, _) = restored(cluster, "", ",after_loss=start", ",after_loss=hold")
    for each in (job, over, held):
        requeue(cluster, each)

    output = wait_until("it has returned", lambda: cluster.output(job), RETURNED.search, timeout_s=150)
    cluster.wait_for_output(job, f"step number={last + 2}")
    assert "step number=1\n" in output
    settled(cluster, job)
    wait_until(
        "its status is known",
        lambda: json.loads(cluster.exec("login", "slurm-affinode", "status", job, "--json", user="alice"))["jobs"][0],
        lambda row: row.get("restored") is not None and row["restored"]["after_loss"] and row["restored"]["lost_s"] > 0,
    )
    assert "it has returned to its checkpoint of" in cluster.comment(job)
    finish(cluster, job)

    output = wait_until("it has started over", lambda: cluster.output(over), OVER.search, timeout_s=150)
    assert "after_loss=start" in output
    cluster.wait_for_output(over, "step number=2")
    finish(cluster, over)

    wait_until(
        "it is held with a clear comment",
        lambda: (cluster.job(held)["Priority"], cluster.comment(held)),
        lambda seen: seen[0] == "0" and f"slurm-affinode wake {held} --from-start" in seen[1],
        timeout_s=150,
    )
    wait_asleep(cluster, held)
    done = cluster.run("login", "slurm-affinode", "wake", held, "--from-start", user="alice")
    assert done.returncode == 0, done.stderr
    cluster.wait_for_output(held, "its image was given up, as requested")
    cluster.wait_for_output(held, "step number=2")
    finish(cluster, held)


def test_image_is_discarded_after_a_long_run(cluster: Cluster) -> None:
    """The job has run for longer than the site permits since its restore."""
    wait_for_agents(cluster)
    with configured(cluster, discard_image_after="1s"):
        [(job, _)] = restored(cluster, "")
        requeue(cluster, job)
        output = wait_until("it has started over", lambda: cluster.output(job), OVER.search, timeout_s=150)
        assert "this site discards an image when its job has run for 1s" in output
        cluster.wait_for_output(job, "step number=2")
        finish(cluster, job)
