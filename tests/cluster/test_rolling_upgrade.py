"""A rolling upgrade from release 0.9.0: half of the nodes run it, the others the checkout, while jobs run and sleep.

What nodes of two releases can do together is in docs/operations.md, section Upgrades.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from cluster.builds import Builds
from cluster.driver import Cluster, wait_until
from cluster.releases import CHECKOUT, PREVIOUS, beside_checkout, build, install
from cluster.servers import ask, frozen, in_place, put_to_sleep, serve, wait_awake
from cluster.sleepers import (
    BY_HAND,
    asleep,
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

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NODES = ("c1", "c2", "login")
SUITES = {"24.11": "trixie", "26.05": "forky"}
"""Releases of Debian whose headers belong to the cluster's Slurm."""

# Prints what the release of this node reads in a copy of the shared state. Arguments: the cluster's name, job IDs.
READ_SHARED = r"""
import contextlib, json, shutil, sys, tempfile, time
from pathlib import Path
from slurm_affinode.checkpoint.image.manifest import load_key
from slurm_affinode.checkpoint.image.signatures import Signer
from slurm_affinode.model.suspension import JobKey, LiveRun
from slurm_affinode.suspension.records.promises import Promises
from slurm_affinode.suspension.records.shared_state import Notes
from slurm_affinode.suspension.wake import Lease

cluster, *jobs = sys.argv[1:]
with tempfile.TemporaryDirectory() as directory:
    root = Path(directory, "shared")
    with contextlib.suppress(shutil.Error):  # a file was removed meanwhile
        shutil.copytree("/shared/slurm-affinode", root, ignore=shutil.ignore_patterns("images", ".*"))
    signer = Signer(load_key(Path("/etc/slurm-affinode/image.key")), "reader")
    notes, promises = Notes(root, signer), Promises(root, cluster, signer, lasts_s=600)
    promises.refresh()
    restores = [restore for job in jobs if (restore := notes.last_restore(cluster, int(job))) is not None]
    claims = {}
    for restore in restores:
        name = restore.name
        submit = json.loads((root / "claims" / f"{name}.{restore.run}").read_text())["submit"]
        attempt = LiveRun(JobKey(cluster, restore.job_id, submit), restore.uid, restore.run)
        claims[str(restore.job_id)] = (notes.claim(attempt, "reader/1/1") or "reader").partition("/")[0]
    print(json.dumps({
        "notes": {str(note.job_id): note.node for note in notes.all() if str(note.job_id) in jobs},
        "promises": {str(promise.job_id): promise.node for promise in promises.known()},
        "restores": {str(restore.job_id): restore.node for restore in restores},
        "claims": claims,
        "leased": not Lease.of(root, cluster, signer).held(time.time(), 600),
    }))
"""


@pytest.fixture(scope="module")
def releases(cluster: Cluster, builds: Builds) -> Iterator[None]:
    """Provide both releases on the nodes."""
    suite = SUITES[cluster.release]
    files = builds.get(f"release-{PREVIOUS}-{suite}", partial(build, headers=builds.slurm_headers(suite)))
    wait_for_agents(cluster)
    with beside_checkout(cluster, NODES, files):
        yield


@pytest.fixture(autouse=True)
def half_upgraded(cluster: Cluster, releases: None) -> None:
    """Let c1 and the login node run 0.9.0, and c2 the checkout."""
    for node, release in {"c1": PREVIOUS, "login": PREVIOUS, "c2": CHECKOUT}.items():
        install(cluster, node, release)


def shared_states(cluster: Cluster, *jobs: str) -> list[dict[str, Any]]:
    """Return the state in the shared store as 0.9.0 and the checkout read it."""
    read = ("/opt/slurm-affinode/bin/python", "-c", READ_SHARED, "affinode", *jobs)
    return [json.loads(cluster.exec(node, *read)) for node in ("c1", "c2")]


def require(cluster: Cluster, job: str, node: str) -> None:
    """Let a suspended job start on this node only."""
    cluster.exec("login", "scontrol", "update", f"JobId={job}", f"ReqNodeList={node}", user="alice")


def wait_restored(cluster: Cluster, job: str, node: str) -> None:
    """Wait until the job is restored on the node."""
    cluster.wait_for_output(job, f"slurm-affinode: restored on {node}")


def test_suspended_job_is_restored_by_the_other_release(cluster: Cluster) -> None:
    """Two jobs make room for two others, one on each node, and change places; both releases read all shared state."""
    option = "--gpu-suspend-idle=2s,wake=hold"
    jobs = {
        node: cluster.submit(option, f"--nodelist={node}", "--gres=gpu:2", script=idle_job()) for node in ("c1", "c2")
    }
    for job in jobs.values():
        cluster.wait_for_output(job, "step number=2")
    waiting = [cluster.submit("--partition=gpu", "--gres=gpu:2", wrap="sleep 600", user="bob") for _ in jobs]
    for job in waiting:
        cluster.wait_for_state(job, "RUNNING")
    for job in jobs.values():
        wait_asleep(cluster, job)
    state, same = shared_states(cluster, *jobs.values())
    assert state == same
    assert state["notes"] == {job: node for node, job in jobs.items()}
    assert (set(state["promises"]), sorted(state["promises"].values())) == (set(waiting), ["c1", "c2"])
    assert (state["restores"], state["claims"], state["leased"]) == ({}, {}, True)

    cluster.exec("login", "scancel", *waiting)
    other = {jobs["c1"]: "c2", jobs["c2"]: "c1"}
    for job, node in other.items():
        require(cluster, job, node)
        wake(cluster, job)
    for job, node in other.items():
        wait_restored(cluster, job, node)
    wait_until(  # notes are removed after the line in the output
        "both releases read the restores",
        lambda: shared_states(cluster, *other),
        lambda states: all((s["notes"], s["restores"], s["claims"]) == ({}, other, other) for s in states),
    )
    for job in other:
        assert each_once(finish(cluster, job))


def test_node_is_upgraded_and_downgraded_while_jobs_run_and_sleep(cluster: Cluster) -> None:
    """A job that runs with the plugin of 0.9.0 continues, and is suspended by the next agent; sleepers wake."""
    on_c1 = (BY_HAND, "--nodelist=c1")
    suspended = asleep(cluster, idle_job(), *on_c1)
    server = serve(cluster, 8001)
    running = cluster.submit(*on_c1, script=idle_job())
    cluster.wait_for_output(running, "step number=2")
    put_to_sleep(cluster, server.job)

    install(cluster, "c1", CHECKOUT)
    number = steps(cluster.output(running))[-1]
    cluster.wait_for_output(running, f"step number={number + 2}\n")
    assert frozen(cluster, server.job)
    suspend(cluster, running)
    wait_asleep(cluster, running)
    assert ask(cluster, server.url)[0] == {"prediction": server.prediction, "number": 2}
    wait_awake(cluster, server.job)

    install(cluster, "login", CHECKOUT)
    require(cluster, running, "c2")
    for job in (suspended, running):
        wake(cluster, job)
    put_to_sleep(cluster, server.job)
    wait_restored(cluster, suspended, "c1")
    wait_restored(cluster, running, "c2")

    install(cluster, "c1", PREVIOUS)
    assert in_place(cluster, server.job) is not None
    assert ask(cluster, server.url)[0] == {"prediction": server.prediction, "number": 3}
    for job in (suspended, running):
        assert each_once(finish(cluster, job))
        assert cluster.job(job)["Restarts"] == "1"
    assert status(cluster, server.job)["jobs"][0]["in_place"] is None
    assert cluster.job(server.job)["Restarts"] == "0"
