"""Jobs with an agent that is stopped at the beginning of a phase of a suspension, restore or in-place sleep."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from cluster.driver import Cluster, wait_until
from cluster.phases import open_journals, stopping_at, wait_for_stop, wait_settled
from cluster.servers import BY_HAND as SERVER_BY_HAND
from cluster.servers import JOURNAL, NODE, Server, put_to_sleep, serve, wait_awake
from cluster.sleepers import BY_HAND, NOT_YET, SHARED, asleep, idle_job, journals, status, wake

BEFORE_IMAGE = ("locking", "locked", "parked", "dumping")
WITH_IMAGE = ("dumped", "requeueing", "queued")
IN_PLACE = ("locking", "locked", "parked", "frozen", "waking")


def every_other(phases: Sequence[str]) -> list[Any]:
    """Return the phases as parameters of a test, of which ``make test`` runs the second, the fourth, ... only."""
    return [
        phase if number % 2 else pytest.param(phase, marks=pytest.mark.nightly) for number, phase in enumerate(phases)
    ]


ATTEMPTS = 5
REPLY = "/home/alice/request.out"
"""File with the last reply to ``send_request``."""


@dataclass(frozen=True, slots=True)
class JobAtPhase:
    """A job with an agent that is stopped at the beginning of a phase."""

    job: str
    node: str


def completed(cluster: Cluster, job: str, phase: str) -> bool:
    """Return whether the job has passed the phase: it is restored, or suspended with a shared image."""
    if phase == "restoring":
        return "restored on" in cluster.output(job)
    return cluster.job(job)["Restarts"] == "1" and not open_journals(cluster)


def job_at_phase(cluster: Cluster, phase: str) -> JobAtPhase:
    """Return a job whose suspension or restore has stopped at the phase. Call it within ``stopping_at``."""
    for _ in range(ATTEMPTS):
        if phase == "restoring":
            job = asleep(cluster, idle_job(), BY_HAND)
            wait_settled(cluster)
            wake(cluster, job)
        else:
            job = cluster.submit(BY_HAND, script=idle_job())
            cluster.wait_for_output(job, "step number=2")
            row_of(cluster, job)
            send_request(cluster, "suspend --no-wait", job)
        node = wait_for_stop(cluster, functools.partial(completed, cluster, job, phase))
        if node is not None:
            return JobAtPhase(job, node)
        cluster.exec("login", "scancel", job, user="alice")
    raise AssertionError(f"no agent was stopped at the beginning of {phase} in {ATTEMPTS} attempts")


def passed(cluster: Cluster, phase: str) -> bool:
    """Return whether the journal of the node is past a phase."""
    seen = journals(cluster, NODE)
    if phase == "waking":
        return not seen
    return any(IN_PLACE.index(item) > IN_PLACE.index(phase) for item in seen)


def send_request(cluster: Cluster, verb: str, job: str) -> None:
    """Run this command as alice for her job in the background, because a stopped agent does not reply to it.

    It is repeated while the job has not run for ``min_run`` and ``backoff``.
    """
    command = f"while slurm-affinode {verb} {job} 2>&1 | tee {REPLY} | grep -q '{NOT_YET}'; do sleep 0.5; done"
    cluster.shell("login", 'setsid -f sh -c "$1" </dev/null >/dev/null 2>&1', command, user="alice")


@contextmanager
def server_at_phase(cluster: Cluster, phase: str) -> Iterator[Server]:
    """Yield a server with an agent that is stopped at the beginning of ``phase``."""
    server = serve(cluster, 8001, SERVER_BY_HAND)
    for _ in range(ATTEMPTS):
        if phase == "waking":
            put_to_sleep(cluster, server.job)
        with stopping_at(cluster, phase, NODE):
            send_request(cluster, "wake" if phase == "waking" else "suspend --no-wait", server.job)
            if wait_for_stop(cluster, lambda: passed(cluster, phase)) is not None:
                yield server
                return
        if phase != "waking":
            wake(cluster, server.job)
        wait_awake(cluster, server.job)
    raise AssertionError(f"no agent was stopped at the beginning of {phase} in {ATTEMPTS} attempts")


def row_of(cluster: Cluster, job: str) -> dict[str, Any]:
    """Return the job's row of ``status``, waiting until an agent knows the job."""
    rows: list[dict[str, Any]] = wait_until("an agent knows it", lambda: status(cluster, job).get("jobs") or [])
    return rows[0]


def assert_nothing_left(cluster: Cluster, job: str) -> None:
    """Wait until the job's journal is closed, and assert that neither a claim nor a note is left."""
    wait_until("its journal is closed", lambda: cluster.run(NODE, "ls", JOURNAL).stdout == "")
    left = cluster.run("login", "sh", "-c", f"ls -d {SHARED}/claims/*.{job}.* {SHARED}/asleep/*.{job}.json").stdout
    assert left == ""
