"""Limits of clean-up on a live cluster: shared GPUs, sleeping jobs, nodes drained by others, interrupted runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cluster.cleaners import (
    LIVE,
    ON_C1,
    SQUATTER,
    STATE,
    about,
    allow_resuming,
    clean,
    history,
    mails,
    scancel,
    squatting,
    until,
    zombies,
)
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.sleepers import status, suspend, wait_for_agents

pytestmark = [pytest.mark.cluster, pytest.mark.scraped, pytest.mark.usefixtures("administrator")]

SHARED = ("--partition=gpu", "--nodelist=c1", "--gres=shard:15")
WATCHED = ("--live", "--watch", "6s", "--window", "4s")
POLICY_C1 = "/etc/slurm-affinode/zombies.toml"
DIRTY = '[epilog]\nkill = false\ndirty = "drain"\nwait = "1s"\n'


def kinds(assessment: dict[str, Any], job: str) -> list[str]:
    return [finding["kind"] for finding in assessment["findings"] if finding["subject"].get("id") == job]


def test_squatter_on_gpu_share_is_canceled_alone(cluster: Cluster) -> None:
    """Samples show when the last job on the GPU computed; a job with little memory is not a squatter."""
    small = cluster.submit(*SHARED, wrap=f"exec {WORKLOADS}/squatter.py --memory-mib 500", user="bob")
    cluster.wait_for_output(small, "squatting", user="bob")
    job = squatting(cluster, where=SHARED)
    done = until(cluster, job, "cancel", "--kind", "squatter")
    assert about(done, job) == [("cancel", "done")]
    cluster.wait_for_state(job, "CANCELLED")
    assert cluster.job(small)["JobState"] == "RUNNING"
    assert history(cluster, job) == [("warn-user", "done"), ("warn-user", "done"), ("cancel", "done")]


def test_squatter_beside_busy_job_is_warned_but_not_canceled(
    cluster: Cluster,
) -> None:
    """The idle time of its processes is measured only during a run, not between two runs."""
    whole = cluster.submit(*ON_C1, wrap=f"exec {WORKLOADS}/busy.py --seconds 300", user="carol")
    cluster.wait_for_state(whole, "RUNNING")
    busy = cluster.submit(*SHARED, wrap=f"exec {WORKLOADS}/busy.py --seconds 300", user="bob")
    job = cluster.submit(*SHARED, wrap=SQUATTER)
    cluster.wait_for_output(job, "squatting")
    result = zombies(cluster, "list", *WATCHED)
    assert (kinds(result, job), kinds(result, busy)) == (["squatter"], [])
    for _ in range(3):
        zombies(cluster, "clean", *WATCHED, "--warn", "--yes")
    assert history(cluster, job) == [("warn-user", "done")]
    assert len(mails(cluster)) == 1
    assert {cluster.job(item)["JobState"] for item in (whole, busy, job)} == {"RUNNING"}


def test_job_asleep_in_place_on_a_whole_gpu_is_treated_as_idle(cluster: Cluster) -> None:
    """Its GPU stays allocated to it, so its sleep frees nothing for others."""
    wait_for_agents(cluster)
    job = cluster.submit(*ON_C1, "--gpu-suspend-idle=1h,mode=inplace,when=always,wake=hold",
                         wrap=f"exec {WORKLOADS}/squatter.py --memory-mib 300")  # fmt: skip
    cluster.wait_for_output(job, "squatting")
    suspend(cluster, job)
    wait_until(f"job {job} sleeps", lambda: status(cluster, job).get("jobs"), lambda rows: rows[0]["state"] == "asleep")
    result = wait_until(
        "it is found",
        lambda: clean(cluster),
        lambda seen: [action for action in seen["actions"] if action["job"] == job],
    )
    assert [action["code"] for action in result["actions"] if action["job"] == job] == ["due"]
    assert [name.startswith("mail-alice") for name in mails(cluster)] == [True]
    assert cluster.job(job)["JobState"] == "RUNNING"
    page = zombies(cluster, "explain", job, "--live", "--watch", "1s")
    assert (page["asleep"], "find its GPU" in json.dumps(page)) == (True, False)


def test_node_drained_by_administrator_is_not_resumed(cluster: Cluster) -> None:
    """The reason of the drain contains the same words as Slurm's own."""
    allow_resuming(cluster)
    reason = "Kill task failed twice; the vendor comes on Monday"
    cluster.exec("login", "scontrol", "update", "nodename=c2", "state=drain", f"reason={reason}")
    try:
        result = zombies(cluster, "clean", "--live", "--kind", "drained-kill-failed", "--yes")
        assert [(action["verb"], action["result"]) for action in result["actions"]] == [("resume", "spared")]
        assert cluster.nodes()["c2"].startswith("drain")
    finally:
        cluster.run("login", "scontrol", "update", "nodename=c2", "state=resume")


def test_no_job_starts_on_node_with_dirty_gpu(cluster: Cluster) -> None:
    """The node is drained before the epilog returns; the reason of another administrator is kept."""
    cluster.shell("c1", f"cat > {POLICY_C1} <<'X'\n{DIRTY}X")
    try:
        leaks = cluster.submit(*ON_C1, "--exclusive", wrap=f"sleep 5; exec {WORKLOADS}/leaking.py --memory-mib 5000")
        cluster.wait_for_state(leaks, "RUNNING")
        waits = cluster.submit(*ON_C1, wrap="exec sleep 300", user="bob")
        cluster.wait_for_state(leaks, "COMPLETED")
        wait_until("c1 is drained", lambda: cluster.nodes()["c1"], lambda state: state.startswith("drain"))
        assert cluster.job(waits)["JobState"] == "PENDING"
        cluster.exec("login", "scancel", waits)
        cluster.exec("login", "scontrol", "update", "nodename=c1", "state=drain", "reason=disk is full")
    finally:
        cluster.shell("c1", f"rm -f {POLICY_C1}")
        cluster.run("login", "scontrol", "update", "nodename=c1", "state=resume")


def test_interrupted_action_is_in_audit(cluster: Cluster) -> None:
    """systemd stops a run after its timeout; the next run completes the rest."""
    job = squatting(cluster)
    for number in (1, 2):
        wait_until(f"warning {number}", lambda: clean(cluster), lambda result: about(result, job))
    hangs = scancel(cluster, f"touch {STATE}/begun; exec sleep 60")
    line = f"slurm-affinode zombies clean {' '.join(LIVE)} --yes --policy {STATE}/policy.toml --state {STATE}"
    settings = " ".join(f"{name}={value}" for name, value in hangs.items())

    def begin() -> str:
        cluster.shell("login", f"{settings} setsid {line} >{STATE}/printed 2>&1 </dev/null & echo $! >{STATE}/pid")
        return wait_until(
            "scancel runs, or the run has ended",
            lambda: cluster.run("login", "sh", "-c", f"ls {STATE}/begun || ! kill -0 $(cat {STATE}/pid)").stdout,
        )

    wait_until("a run cancels", begin, lambda printed: "begun" in printed)
    cluster.shell("login", f"kill -TERM $(cat {STATE}/pid)")
    wait_until("it is written down", lambda: history(cluster, job), lambda rows: rows[-1] == ("cancel", "failed"))
    until(cluster, job, "cancel")
    cluster.wait_for_state(job, "CANCELLED")


def test_failed_mail_does_not_affect_other_owners(cluster: Cluster) -> None:
    """The exit status reports the failure, and a job without a delivered warning is not canceled."""
    refusing = f"#!/bin/sh\n[ $1 != alice@example.org ] || exit 1\nexec cat > {STATE}/mail-$1-x"
    cluster.shell("login", f"cat > {STATE}/mail <<'X'\n{refusing}\nX")
    unnotified, other = squatting(cluster), squatting(cluster, user="bob")
    records = until(cluster, other, "warn-user")
    assert about(records, other) == [("warn-user", "done")]
    assert about(records, unnotified) in ([], [("warn-user", "failed")])
    until(cluster, other, "cancel")
    assert cluster.job(unnotified)["JobState"] == "RUNNING"
    assert {result for _, result in history(cluster, unnotified)} == {"failed"}
