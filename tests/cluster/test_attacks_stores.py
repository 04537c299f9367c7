"""Attacks on the data that the nodes share: images, notes and claims of suspended jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster.driver import GPU_NODES, Cluster, docker, wait_until
from cluster.sleepers import (
    BY_HAND,
    SHARED,
    asleep,
    configured,
    finish,
    idle_job,
    kill_agent,
    wait_for_agents,
    wait_for_nodes,
    wake,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600, func_only=True)]
STATE = "/var/lib/slurm/slurmctld"


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


def in_state_directory(cluster: Cluster, script: str) -> None:
    """Run a shell script in the state directory of the stopped slurmctld."""
    container = cluster.container("slurmctld")
    image = docker("inspect", "--format={{.Config.Image}}", container).strip()
    docker(
        "run", "--rm", "--network=none", f"--volumes-from={container}", "--entrypoint=sh", image, "-euc",
        f"cd {STATE}; {script}",
    )  # fmt: skip


@contextmanager
def lost_state(cluster: Cluster) -> Iterator[None]:
    """Run slurmctld with an empty StateSaveLocation while the context lasts, and with its own state afterwards."""
    # A clean stop: after a kill it would start from the last saved state, with the job still running.
    docker("stop", "--time=30", cluster.container("slurmctld"), timeout_s=60)
    try:
        in_state_directory(cluster, "mkdir .kept; find . -mindepth 1 -maxdepth 1 ! -name .kept -exec mv {} .kept ';'")
        cluster.start("slurmctld")
        yield
        cluster.kill("slurmctld")
    finally:
        in_state_directory(
            cluster,
            "find . -mindepth 1 -maxdepth 1 ! -name .kept -exec rm -r {} ';'; "
            "find .kept -mindepth 1 -maxdepth 1 -exec mv {} . ';'; rmdir .kept",
        )
        cluster.start("slurmctld")
        wait_for_nodes(cluster)


def images(cluster: Cluster, job: str) -> str:
    """Return the images of a job in the shared store."""
    return cluster.run("login", "sh", "-c", f"ls -d {SHARED}/images/*.{job}/[0-9][0-9][0-9][0-9]").stdout


def sweep(cluster: Cluster) -> None:
    """Restart the agents, which sweep the stores when they start, and wait until they have.

    Each sweep records the jobs that Slurm does not know, here that of an image which is added.
    """
    name = "affinode.4000000"
    cluster.shell("c1", f"mkdir -p -m 700 {SHARED}/images/{name}/0001")
    try:
        for node in GPU_NODES:
            kill_agent(cluster, node)
        wait_until(
            "an agent has swept",
            lambda: cluster.run("login", "test", "-e", f"{SHARED}/unknown/{name}.json").returncode == 0,
        )
    finally:
        cluster.shell("c1", f"rm -r {SHARED}/images/{name}; rm -f {SHARED}/unknown/{name}.json")
    wait_for_agents(cluster)


def test_image_survives_loss_of_slurmctld_state(cluster: Cluster) -> None:
    """slurmctld responds, but knows no job. Once its state is restored, the job resumes from its image."""
    job = asleep(cluster, idle_job(BY_HAND))
    before = images(cluster, job)
    assert before
    with lost_state(cluster):
        wait_until(
            "slurmctld responds without the job",
            lambda: cluster.run("login", "scontrol", "show", "job", job).stderr,
            lambda printed: "Invalid job id" in printed,
            timeout_s=120,
        )
        sweep(cluster)
        record = f"{SHARED}/unknown/affinode.{job}.json"
        wait_until(
            "the agents have seen that slurmctld does not know the job",
            lambda: cluster.run("login", "test", "-e", record).returncode == 0 or not images(cluster, job),
        )
        sweep(cluster)
        assert images(cluster, job) == before
        assert cluster.run("login", "test", "-e", f"{SHARED}/asleep/affinode.{job}.json").returncode == 0
    wait_until("slurmctld knows the job again", lambda: cluster.job(job)["JobState"], lambda state: state == "PENDING")
    wake(cluster, job)
    assert "restored on" in finish(cluster, job, timeout_s=180)


def test_forged_note_and_claim_are_ignored(cluster: Cluster) -> None:
    """A writer without the key forges them in the shared store: the image is kept and its restore is not claimed."""
    job = asleep(cluster, idle_job(BY_HAND))
    before = images(cluster, job)
    note, claim = f"{SHARED}/asleep/affinode.{job}.json", f"{SHARED}/claims/affinode.{job}.1"
    forged = (
        "import json, os, sys\n"
        "note, claim = sys.argv[1:]\n"
        "os.rename(note, note + '.kept')\n"
        "value = json.load(open(note + '.kept'))\n"
        "open(note, 'w').write(json.dumps({**value, 'given_up': True}))\n"
        "os.makedirs(os.path.dirname(claim), exist_ok=True)\n"
        "open(claim, 'w').write('c9/1/1')\n"
    )
    cluster.exec("c1", "/opt/slurm-affinode/bin/python", "-c", forged, note, claim)
    listed = cluster.run("c1", "slurm-affinode", "images", "list")
    assert listed.returncode == 1
    assert f"ignored: {note}: was changed" in listed.stderr + listed.stdout
    sweep(cluster)
    assert images(cluster, job) == before
    assert cluster.job(job)["JobState"] == "PENDING"
    cluster.exec("c1", "mv", f"{note}.kept", note)
    wait_until(  # the agents read the notes anew after some seconds
        "the agents know the job again",
        lambda: cluster.run("login", "slurm-affinode", "status", job, user="alice").returncode == 0,
    )
    wake(cluster, job)
    assert "restored on" in finish(cluster, job, timeout_s=180)


def test_suspend_command_honors_backoff(cluster: Cluster) -> None:
    """The job has to run for ``suspend.backoff`` first; an administrator may use --force."""
    with configured(cluster, backoff="1h", min_run="1s"):
        job = asleep(cluster, idle_job(BY_HAND))
        wake(cluster, job)
        cluster.wait_for_state(job, "RUNNING")
        wait_until("it is restored", lambda: cluster.output(job), lambda text: "restored on" in text)

        def again(*options: str, user: str = "alice") -> str:
            return cluster.run("login", "slurm-affinode", "suspend", job, "--no-wait", *options, user=user).stderr

        wait_until("it is refused", again, lambda printed: "so it runs for at least 1h" in printed)
        assert "only administrators" in again("--force")
        assert again("--force", user="admin") == ""
        cluster.wait_for_state(job, "PENDING")
        cluster.run("login", "scancel", job, user="alice")
