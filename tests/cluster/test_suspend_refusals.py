"""Jobs that cannot be suspended and images that must not be restored are refused with a reason."""

from __future__ import annotations

import pytest
from cluster.driver import GPU_NODES, WORKLOADS, Cluster, wait_until
from cluster.sleepers import (
    BY_HAND,
    LOCAL,
    SHARED,
    asleep,
    configured,
    each_once,
    end,
    finish,
    idle_job,
    journals,
    kill_agent,
    status,
    steps,
    wait_for_agents,
    wake,
)

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


def refused(cluster: Cluster, job: str) -> str:
    """Return the error of ``suspend``; the job keeps running."""
    done = cluster.run("login", "slurm-affinode", "suspend", job, user="alice")
    assert done.returncode == 1, done.stdout + done.stderr
    assert cluster.job(job)["JobState"] == "RUNNING"
    assert cluster.job(job)["Restarts"] == "0"
    return done.stdout + done.stderr


CASES = {
    "no-requeue": (f"{WORKLOADS}/idle_after.py --busy 0 --idle 300 --again 0", ("--no-requeue",), "requeue"),
    "gpu-file": (
        f"exec 9</dev/nvidiactl0 || exec 9</dev/nvidia0\n{WORKLOADS}/idle_after.py --busy 0 --idle 300 --again 0",
        (),
        "GPU",
    ),
}  # fmt: skip


@pytest.mark.parametrize("code", sorted(CASES))
def test_job_that_cannot_be_suspended_keeps_running(cluster: Cluster, code: str) -> None:
    """Each kind has its own code in ``status``, and ``suspend`` prints one line."""
    command, options, printed = CASES[code]
    job = cluster.submit(BY_HAND, "--partition=gpu", "--gres=gpu:1", *options, script=f"#!/bin/bash\n{command}\n")
    cluster.wait_for_output(job, "step number=1")
    assert printed in refused(cluster, job)
    codes = wait_until("status names it", lambda: str(status(cluster, job)), lambda text: code in text)
    assert codes


def test_lock_timeout_is_rolled_back(cluster: Cluster) -> None:
    """The GPU remains busy: the job keeps running and completes."""
    job = cluster.submit(BY_HAND, script=idle_job())
    cluster.wait_for_output(job, "step number=1")
    node = cluster.job(job)["BatchHost"]
    cluster.exec(node, "gpu-emulatorctl", "fault", "lock-timeout")
    try:
        assert "locked" in refused(cluster, job)
    finally:
        cluster.exec(node, "gpu-emulatorctl", "fault", "clear")
    assert cluster.job(job)["Comment"].startswith("runs")
    finish(cluster, job)


@pytest.mark.parametrize("fault", ["checkpoint-fails"])
def test_failed_checkpoint_is_rolled_back(cluster: Cluster, fault: str) -> None:
    """The driver refuses to move the memory: the job keeps running and completes."""
    job = cluster.submit(BY_HAND, script=idle_job())
    cluster.wait_for_output(job, "step number=1")
    node = cluster.job(job)["BatchHost"]
    cluster.exec(node, "gpu-emulatorctl", "fault", fault, "--count", "1")
    assert "GPU memory" in refused(cluster, job)
    finish(cluster, job)


def test_full_store_is_refused(cluster: Cluster) -> None:
    """The image would exceed the budget of the store; the refusal contains the sizes."""
    with configured(cluster, budget="1M"):
        job = cluster.submit(BY_HAND, script=idle_job())
        cluster.wait_for_output(job, "step number=1")
        assert "room" in refused(cluster, job)
        finish(cluster, job)


FLIP = f"""
for image in {SHARED}/images/*.$1/0001 {LOCAL}/images/*.$1/0001; do
  [ -d "$image" ] || continue
  case $2 in
    bit) file=$(ls -S "$image"/criu/pages-*.img | head -n 1)
         printf '\\x5a' | dd of="$file" bs=1 seek=4242 conv=notrunc status=none ;;
    uid) sed -i 's/"uid": *2001/"uid":2002/' "$image/manifest.json" ;;
    link) mv "$image" "$image.real" && ln -s "$image.real" "$image" ;;
  esac
done
"""


@pytest.mark.parametrize("harm", ["bit", "uid", "link"])
def test_tampered_image_is_not_restored(cluster: Cluster, harm: str) -> None:
    """A flipped bit, another user in the manifest or a link in its place: the job is held with the reason."""
    job = asleep(cluster, idle_job(), BY_HAND)
    done = steps(cluster.output(job))
    for node in ("c1", "c2"):
        cluster.shell(node, FLIP, job, harm)
    cluster.run("login", "slurm-affinode", "wake", job, user="alice")
    # The agents do not release a job with a damaged image. If an administrator does, the job is held again.
    cluster.run("login", "scontrol", "release", job)
    held = wait_until(
        "it is held with a reason",
        lambda: cluster.job(job),
        lambda seen: seen["Comment"].startswith("not") and seen["Priority"] == "0" and seen["JobState"] != "RUNNING",
        timeout_s=90,
    )
    assert held["JobState"] in ("PENDING", "COMPLETING")
    assert set(steps(cluster.output(job))) <= set(done)  # the job did not run again; its output so far is in the image


def test_restored_job_runs_on_after_agent_killed(cluster: Cluster) -> None:
    """The agent is killed while it watches the restored script, whose work is neither undone nor done again."""
    with configured(cluster, restore_alive="15s"):
        job = asleep(cluster, idle_job(), BY_HAND)
        before = steps(cluster.output(job))[-1]
        wake(cluster, job)
        cluster.wait_for_output(job, f"step number={before + 2}")
        node = cluster.job(job)["BatchHost"]
        pids = cluster.exec(node, "pgrep", "-u", "alice", "-f", "idle_after")
        assert journals(cluster, node) == ["restoring"]
        kill_agent(cluster, node)
        wait_until("its journal is closed", lambda: not journals(cluster, node), timeout_s=60)
        assert cluster.exec(node, "pgrep", "-u", "alice", "-f", "idle_after") == pids
        output = finish(cluster, job)
    assert each_once(output)
    assert output.count("restored on") == 1


def test_job_starts_afresh_after_failed_restore_if_configured(cluster: Cluster) -> None:
    """The script finds the reason in its environment."""
    script = "#!/bin/bash\n#SBATCH --partition=gpu --gres=gpu:1\necho failed=$SLURM_AFFINODE_RESTORE_FAILED\n"
    with configured(cluster, on_restore_failure="fresh"):
        counts = "until [ -e slurm-$SLURM_JOB_ID-end.out ]; do echo step number=$((++n)); sleep 1; done\n"
        job = asleep(cluster, script + counts, BY_HAND)
        for node in ("c1", "c2"):
            cluster.shell(node, FLIP, job, "bit")
        end(cluster, job)
        wake(cluster, job)
        cluster.wait_for_state(job, "COMPLETED")
    assert "failed=1" in cluster.output(job)


def test_job_is_held_after_failed_gpu_restore(cluster: Cluster) -> None:
    """The driver fails in the first restore but not later: the job resumes from its image."""
    job = asleep(cluster, idle_job(), BY_HAND)
    for node in ("c1", "c2"):
        cluster.exec(node, "gpu-emulatorctl", "fault", "restore-fails")
    try:
        wake(cluster, job)
        wait_until(
            "it is held with a reason",
            lambda: cluster.job(job),
            lambda seen: seen["Comment"].startswith("not") and seen["Priority"] == "0",
            timeout_s=90,
        )
    finally:
        for node in ("c1", "c2"):
            cluster.exec(node, "gpu-emulatorctl", "fault", "clear")
    cluster.wait_for_state(job, "PENDING")
    wake(cluster, job)
    finish(cluster, job)


def test_failed_restore_is_retried_by_itself(cluster: Cluster) -> None:
    """Another file is in the way of one of the job's, on both nodes. Once it is gone, the next retry restores the job.

    Meanwhile the comment and ``status`` name the cause, the next try, and the number of further ones.
    """
    place = "/dev/shm/in-the-way"  # noqa: S108 - of the job
    script = idle_job().replace(WORKLOADS, f"echo its own >{place}\nexec 8<{place}\n{WORKLOADS}", 1)
    with configured(cluster, restore_retries=20, retry_backoff="3s", retry_backoff_limit="6s"):
        job = asleep(cluster, script, BY_HAND)
        for node in GPU_NODES:
            cluster.shell(node, 'echo other >"$1.new" && chmod 644 "$1.new" && mv "$1.new" "$1"', place)
        try:
            wake(cluster, job)
            row = wait_until(
                "status shows two failures",
                lambda: status(cluster, job)["jobs"][0],
                lambda row: row["state"] == "suspended" and row["failures"] >= 2 and row["retry"] is not None,
                timeout_s=120,
            )
            assert "exists already" in row["failure"]
            assert row["retries_left"] == 20 - row["failures"] + 1
            assert 0 < row["retry"] - row["failed"] <= 6
            # Each restore removes the line of the one before, as it does with all later output of the agent.
            wait_until(
                "its output names the next try",
                lambda: cluster.output(job),
                lambda output: "its image is kept; next try after" in output,
            )
            wait_until(
                "its comment names it", lambda: cluster.comment(job), lambda comment: "next try after" in comment
            )
        finally:
            for node in GPU_NODES:
                cluster.shell(node, 'rm -f "$1"', place)
        wait_until(
            "its output reports the restore",
            lambda: cluster.output(job),
            lambda output: "slurm-affinode: restored on" in output,
            timeout_s=90,
        )
        assert each_once(finish(cluster, job))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900, func_only=True)
def test_fifty_jobs_share_gpus(cluster: Cluster) -> None:
    """All jobs complete with intact memory after suspensions."""
    script = idle_job("--gpu-suspend-idle=1s", busy=0.5, idle=4)
    jobs = [cluster.submit(script=script) for _ in range(50)]
    for job in jobs:
        cluster.wait_for_state(job, "COMPLETED", timeout_s=600)
    for job in jobs:
        assert "memory=intact" in cluster.output(job)
    slept = sum("slurm-affinode: restored" in cluster.output(job) for job in jobs)
    assert slept > 0
