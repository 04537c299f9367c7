"""Actions against squatters and orphans on a live cluster: warnings, cancellation and all exceptions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

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
    run,
    scancel,
    squatting,
    until,
    zombies,
)
from cluster.driver import WORKLOADS, Cluster, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.scraped, pytest.mark.usefixtures("administrator")]

HOSTILE = "<script>alert(1)</script>$(touch /home/alice/z)`id` {{ 7*7 }} \t'\";--yes"


@pytest.mark.main
def test_squatter_is_warned_twice_and_canceled(cluster: Cluster) -> None:
    """Each action is mailed and recorded in the audit; a dry run has no effect."""
    busy = cluster.submit(*ON_C1, wrap=f"exec {WORKLOADS}/busy.py --seconds 300", user="bob")
    cluster.wait_for_state(busy, "RUNNING")
    job = squatting(cluster)
    planned = zombies(cluster, "clean", *LIVE, "--warn")
    assert planned["dry_run"]
    assert about(planned, job) == [("warn-user", "planned")]
    assert mails(cluster) == []
    until(cluster, job, "cancel")
    cluster.wait_for_state(job, "CANCELLED")
    assert history(cluster, job) == [("warn-user", "done"), ("warn-user", "done"), ("cancel", "done")]
    assert cluster.job(busy)["JobState"] == "RUNNING"
    sent = mails(cluster)
    assert len(sent) == 3
    assert all("alice@example.org" in name for name in sent)


def test_array_task_is_canceled_alone(cluster: Cluster) -> None:
    """The task is the last one, which has the raw ID of the array."""
    busy = f"exec {WORKLOADS}/busy.py --seconds 300"
    script = f'[ "$SLURM_ARRAY_TASK_ID" = 2 ] || {busy}\n{SQUATTER}'
    array = cluster.submit(*ON_C1, "--array=1-2", wrap=script)
    until(cluster, f"{array}_2", "cancel")
    cluster.wait_for_state(f"{array}_2", "CANCELLED")
    assert cluster.job(f"{array}_1")["JobState"] == "RUNNING"


def test_idle_component_is_spared_while_another_computes(cluster: Cluster) -> None:
    """Slurm would end the whole job with its first component. Once all components are idle, the job is canceled."""
    wait_for_file = "until [ -e /home/alice/idle-$SLURM_JOB_ID ]; do sleep 1; done"
    busy = f"{WORKLOADS}/busy.py --seconds 300 & {wait_for_file}; kill $!; {SQUATTER}"
    parts = [f"#SBATCH --partition=gpu --nodelist={node} --gres=gpu:1\n" for node in ("c1", "c2")]
    step = f"srun --het-group=1 bash -c '{busy}' &\n{SQUATTER}\n"
    job = cluster.submit(script="#!/bin/bash\n" + "#SBATCH hetjob\n".join(parts) + step)
    spared = until(cluster, f"{job}+0", "none")
    assert [(action["code"], action["job"]) for action in spared["actions"]] == [("part", f"{job}+0")]
    assert history(cluster, f"{job}+0") == [("warn-user", "done"), ("warn-user", "done")]
    assert "canceled after" not in cluster.exec("login", "sh", "-c", f"cat {STATE}/mail-*")
    cluster.exec("login", "touch", f"/home/alice/idle-{job}", user="alice")
    until(cluster, f"{job}+1", "warn-user")
    until(cluster, f"{job}+0", "cancel")
    cluster.wait_for_state(f"{job}+0", "CANCELLED")
    cluster.exec("login", "rm", f"/home/alice/idle-{job}", user="alice")


def test_node_drained_for_failed_kill_is_resumed(cluster: Cluster) -> None:
    """A node that is drained for another reason stays drained."""
    allow_resuming(cluster)
    for node, reason in (("c1", "Kill task failed"), ("c2", "disk is full")):
        cluster.exec("login", "scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}")
    try:
        result = zombies(cluster, "clean", "--live", "--kind", "drained-kill-failed", "--yes")
        assert [(action["verb"], action["result"], action["target"]) for action in result["actions"]] == [
            ("resume", "done", "node c1")
        ]
        wait_until("c1 is in service", lambda: cluster.nodes()["c1"], lambda state: state == "idle")
        assert cluster.nodes()["c2"].startswith("drain")
    finally:
        cluster.run("login", "scontrol", "update", "nodename=c2", "state=resume")


def test_job_that_computes_again_is_spared(cluster: Cluster) -> None:
    """Stored samples show the job as idle, but it computes again at the time of the action."""
    script = f"exec {WORKLOADS}/idle_after.py --memory-mib 60000 --busy 1 --idle 20 --again 300"
    job = cluster.submit(*ON_C1, wrap=script)
    cluster.wait_for_output(job, "number=10")
    # The stored samples end while the job is idle, however long the ingestion takes.
    end = cluster.exec("login", "date", "--utc", "+%Y-%m-%dT%H:%M:%SZ").strip()
    prometheus = ("--prometheus", "http://prometheus:9090", "--since", "10m", "--until", end)
    for words in (("ingest", "sacct", "--since", "1h"), ("ingest", "gpu", *prometheus)):
        done = run(cluster, *words, "--state", STATE)
        assert done.returncode == 0, done.stderr
    cluster.wait_for_output(job, " again ")
    stored = ("--window", "4s", "--yes")
    for number in (1, 2):
        wait_until(
            f"warning {number}",
            lambda: zombies(cluster, "warn", *stored),
            lambda result: about(result, job) == [("warn-user", "done")],
        )
    spared = wait_until("it is decided", lambda: zombies(cluster, "clean", *stored), lambda result: about(result, job))
    assert about(spared, job) == [("cancel", "spared")]
    assert "computes" in spared["actions"][0]["text"]
    assert cluster.job(job)["JobState"] == "RUNNING"
    assert history(cluster, job)[-1] == ("cancel", "spared")
    cluster.exec("login", "scancel", job)
    cluster.wait_for_state(job, "CANCELLED")
    gone = wait_until("it is decided", lambda: zombies(cluster, "clean", *stored), lambda result: about(result, job))
    assert [action["code"] for action in gone["actions"] if action["job"] == job] == ["ended"]


def test_failed_scancel_is_reported_and_retried(cluster: Cluster) -> None:
    """The exit status reports the failure; the next run may succeed."""
    job = squatting(cluster)
    broken = scancel(cluster, "echo scancel: error: busy >&2; exit 1")
    failed = until(cluster, job, "cancel", **broken)
    assert about(failed, job) == [("cancel", "failed")]
    assert failed["status"] == 1
    assert cluster.job(job)["JobState"] == "RUNNING"
    assert about(clean(cluster), job) == [("cancel", "done")]
    cluster.wait_for_state(job, "CANCELLED")


def test_cancellation_by_another_administrator_is_not_a_failure(cluster: Cluster) -> None:
    """The other administrator cancels the job at the same moment."""
    job = squatting(cluster)
    other = scancel(cluster, f'/usr/bin/scancel {job}; exec /usr/bin/scancel "$@"')
    result = until(cluster, job, "cancel", **other)
    assert about(result, job)[0][1] in ("gone", "done")
    assert result["status"] == 0
    cluster.wait_for_state(job, "CANCELLED")


def test_concurrent_runs_do_not_act_twice(cluster: Cluster) -> None:
    """One of the runs cancels the job, and one mail reports it."""
    job = squatting(cluster)
    both: list[tuple[str, str]] = []
    with ThreadPoolExecutor(2) as pool:
        while not any(verb == "cancel" for verb, _ in both):
            for number in pool.map(lambda _: clean(cluster), range(2)):
                both += about(number, job)
    done = [verb for verb, result in both if result == "done"]
    assert sorted(done) == ["cancel", "warn-user", "warn-user"]
    assert len(mails(cluster)) == 3


def test_owner_postpones_once(cluster: Cluster) -> None:
    """The exemption is stored in the job's comment. Only the owner may request it, and only once."""
    job = squatting(cluster)
    why = ("--for", "1h", "--why", "the debugger is attached")
    other = run(cluster, "keep", job, *why, user="bob")
    assert other.returncode == 1
    assert "not yours" in other.stderr
    by_owner = run(cluster, "keep", job, *why, user="alice")
    assert by_owner.returncode == 0, by_owner.stderr
    again = run(cluster, "keep", job, *why, user="alice")
    assert (again.returncode, "only one is allowed" in again.stderr) == (1, True)
    kept = zombies(cluster, "clean", *LIVE, "--warn", "--yes")
    assert [action["code"] for action in kept["actions"] if action["job"] == job] == ["kept"]
    assert history(cluster, job)[0] == ("keep", "done")
    assert mails(cluster) == []


def test_job_that_opted_in_is_suspended(cluster: Cluster) -> None:
    """The GPU of the job is freed without a cancellation."""
    small = f"exec {WORKLOADS}/squatter.py --memory-mib 300"
    job = squatting(cluster, "--gpu-suspend-idle=1h", script=small)
    done = until(cluster, job, "suspend")
    assert about(done, job) == [("suspend", "done")]
    cluster.wait_for_state(job, "PENDING")
    assert "suspended" in cluster.job(job)["Comment"]


def test_job_that_cannot_be_suspended_is_canceled(cluster: Cluster) -> None:
    """The option does not protect a job whose GPU memory does not fit into the node's memory."""
    job = squatting(cluster, "--gpu-suspend-idle=1h")
    done = until(cluster, job, "cancel")
    assert about(done, job) == [("cancel", "done")]
    cluster.wait_for_state(job, "CANCELLED")


@pytest.mark.usefixtures("leftovers_stay")
def test_orphan_is_killed_and_its_memory_freed(cluster: Cluster) -> None:
    """The epilog has left the process running; processes of running jobs are not affected."""
    runs = cluster.submit(*ON_C1, wrap=SQUATTER, user="bob")
    cluster.wait_for_output(runs, "squatting", user="bob")
    job = cluster.submit(*ON_C1, wrap=f"exec {WORKLOADS}/leaking.py --memory-mib 5000")
    cluster.wait_for_state(job, "COMPLETED")
    held = [gpu for gpu in cluster.gpus("c1") if gpu.pids]
    assert len(held) == 2
    result = wait_until(
        "the orphan is found",
        lambda: zombies(cluster, "clean", "--live", "--kind", "orphan-process", "--yes"),
        lambda item: bool(item["actions"]),
    )
    assert [(action["verb"], action["result"]) for action in result["actions"]] == [("kill-process", "done")]
    left = wait_until(
        "its memory is free", lambda: [gpu for gpu in cluster.gpus("c1") if gpu.pids], lambda g: len(g) == 1
    )
    assert cluster.job(runs)["JobState"] == "RUNNING"
    assert left[0].used_mib >= 60000


def test_epilog_kills_leftover_processes(cluster: Cluster) -> None:
    """The processes are killed, and this is logged, before the node is available to other jobs."""
    job = cluster.submit(*ON_C1, wrap=f"exec {WORKLOADS}/leaking.py --memory-mib 5000")
    cluster.wait_for_state(job, "COMPLETED")
    cluster.wait_idle()
    assert all(gpu.pids == [] for gpu in cluster.gpus("c1"))
    assert f"job {job} left process" in cluster.logs(0.0)["c1"]
    zombies(cluster, "clean", "--live")
    zombies(cluster, "clean", "--live")
    assert history(cluster, job) == [("epilog", "done")]


def test_node_with_dirty_gpu_is_drained_if_configured(cluster: Cluster) -> None:
    """The reason of the drain names the GPU and the job."""
    path = "/etc/slurm-affinode/zombies.toml"
    cluster.shell("c1", f'printf \'[epilog]\\nkill = false\\ndirty = "drain"\\nwait = "1s"\\n\' > {path}')
    try:
        job = cluster.submit(*ON_C1, wrap=f"exec {WORKLOADS}/leaking.py --memory-mib 5000")
        cluster.wait_for_state(job, "COMPLETED")
        drained = wait_until("c1 is drained", lambda: cluster.nodes()["c1"], lambda state: state.startswith("drain"))
        reason = cluster.exec("login", "sinfo", "--noheader", "--nodes=c1", "--format=%E")
        assert drained
        assert f"after job {job}: GPU" in reason
        listed = zombies(cluster, "list", "--live", "--kind", "drained-by-epilog")
        assert [finding["nodes"] for finding in listed["findings"]] == [["c1"]]
    finally:
        cluster.shell("c1", f"rm -f {path}")
        cluster.run("login", "scontrol", "update", "nodename=c1", "state=resume")


def test_hostile_job_names_are_escaped(cluster: Cluster) -> None:
    """Names are escaped in the mail, the page, the table and the audit."""
    job = squatting(cluster, "--job-name", HOSTILE)
    until(cluster, job, "warn-user")
    [name] = mails(cluster)
    mail = cluster.exec("login", "cat", f"{STATE}/{name}")
    page = mail.partition("<!doctype html>")[2]
    assert "<script" not in page
    assert "&lt;script" in page
    assert cluster.run("login", "ls", "/home/alice/z").returncode != 0
    shown = cluster.exec("login", "slurm-affinode", "zombies", "history", "--state", STATE, "--job", job)
    assert "\x1b" not in shown


def test_policy_mistakes_are_reported_by_line(cluster: Cluster) -> None:
    """No action is taken with an invalid policy."""
    cluster.shell("login", f"printf '[limits]\\n\\ncancle = 3\\n' > {STATE}/policy.toml")
    done = run(cluster, "zombies", "clean", "--live", "--yes", "--policy", f"{STATE}/policy.toml", "--state", STATE)
    assert done.returncode == 2
    assert f"{STATE}/policy.toml:3: limits.cancle: unknown key" in done.stderr
    checked = run(cluster, "zombies", "policy", "check", f"{STATE}/policy.toml", "--state", STATE)
    assert checked.returncode == 1
    assert "policy.toml:3: limits.cancle: unknown key" in checked.stdout
