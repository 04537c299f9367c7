"""Jobs that cannot be suspended and images that must not be restored are refused with a reason."""

from __future__ import annotations

import pytest
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.sleepers import (
    BY_HAND,
    LOCAL,
    SHARED,
    asleep,
    configured,
    end,
    finish,
    idle_job,
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
    "srun-steps": (f"srun --overlap {WORKLOADS}/idle_after.py --busy 0 --idle 300 --again 0", (), "srun"),
    "no-requeue": (f"{WORKLOADS}/idle_after.py --busy 0 --idle 300 --again 0", ("--no-requeue",), "requeue"),
    "multi-node": (
        f"{WORKLOADS}/idle_after.py --busy 0 --idle 300 --again 0", ("--nodes=2", "--ntasks-per-node=1"), "2 nodes",
    ),
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


@pytest.mark.slow
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
