"""Local steps (``steps=local``): they behave like steps of Slurm's srun, and are suspended with their job."""

from __future__ import annotations

import re

import pytest
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.sleepers import (
    BY_HAND,
    UNTIL_FINISH,
    each_once,
    finish,
    status,
    suspend,
    wait_asleep,
    wait_for_agents,
    wake,
)
from cluster.spank import outcome

pytestmark = pytest.mark.cluster

LOCAL = f"{BY_HAND},steps=local"
ON_GPUS = ("--partition=gpu", "--ntasks=2", "--cpus-per-task=2", "--gres=gpu:2")

# The output, messages and exit status of each command. The order of the lines of one command may vary.
COMMANDS = r"""
srun bash -c 'echo task $SLURM_PROCID of $SLURM_NTASKS'
srun -l -n2 bash -c 'printf "a\nb"; echo err >&2'
srun -O -l -n11 echo hello
srun -n2 bash -c 'exit $((SLURM_PROCID * 3))'
srun -n2 bash -c 'sleep 1; exit 3'
srun -n1 bash -c 'ulimit -c 0; kill -SEGV $$'
srun -n1 bash -c 'kill -TERM $$'
srun -n1 nosuch
srun -n1 /etc/passwd
srun -n1 -D /nosuch pwd
srun -n1 --chdir=/usr pwd
srun -n1 --export=NONE /usr/bin/env
srun -n1 --export=A=1,B=two,HOME /usr/bin/env
srun -n2 -o out.%s.%t.%n.%N.%u.%x.%A.%a.%%.%3t bash -c 'echo out; echo err >&2'
head out.*; rm out.*
srun -n2 --output=both --error=err.%t bash -c 'echo out; echo err >&2'
head both err.*; rm both err.*
srun -n2 -o 1 bash -c 'echo $SLURM_PROCID'
srun -n2 -i in cat
srun -n2 cat <in
srun -n2 --input=1 cat <in
srun -n2 --gres=gpu:1 bash -c 'echo $CUDA_VISIBLE_DEVICES $SLURM_STEP_GPUS $SLURM_GPUS_ON_NODE'
srun -n1 --gres=none bash -c 'echo ${CUDA_VISIBLE_DEVICES-none} ${SLURM_GPUS_ON_NODE-none}'
srun -n9 hostname
srun -n1 --bogus hostname
srun -n0 hostname
srun
"""
# With device cgroups every task of Slurm's steps sees its GPU as number 0. Tasks of a local step see those of the job.
GPU_COMMANDS = {
    "srun -n2 --gpus-per-task=1 bash -c 'echo $SLURM_PROCID: $CUDA_VISIBLE_DEVICES $SLURM_STEP_GPUS'":
        ["0: 0 0", "1: 1 1"],
    "srun -n2 --gpu-bind=single:1 bash -c 'echo $SLURM_PROCID: $CUDA_VISIBLE_DEVICES $SLURM_STEP_GPUS'":
        ["0: 0 0", "1: 1 1"],
    "srun -n2 --gpu-bind=map_gpu:1,0 bash -c 'echo $SLURM_PROCID: $CUDA_VISIBLE_DEVICES $SLURM_STEP_GPUS'":
        ["0: 1 1", "1: 0 0"],
    "take() { srun -n1 -c1 --exact --gpus=1 --mem=100 bash -c 'mkdir $CUDA_VISIBLE_DEVICES; sleep 1; ls -d 0 1'; }\n"
    "take & take & wait; rmdir 0 1": ["0", "0", "1", "1"],
}  # fmt: skip
ALL_VARIABLES = """
srun env
srun -n2 bash -c 'env >env.$SLURM_PROCID; sleep 0.2'; cat env.1
srun -n1 -c1 --gpus=1 -J step env
"""
# Variables that have no meaning in a local step, or differ between jobs.
OTHER_VARIABLES = re.compile(
    r"PATH|_|SHLVL|SLURMD_DEBUG|SLURM_AFFINODE_SRUN|SLURM_(SRUN_COMM|STEP_LAUNCHER)_PORT|SLURM_OOM_KILL_STEP"
)
OF_ONE_JOB = re.compile(
    r"^(SLURM_(JOB_?ID|TASK_PID|JOB_(START|END)_TIME|LAUNCH_NODE_IPADDR|SRUN_COMM_HOST))=.*", re.MULTILINE
)


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


def ran(cluster: Cluster, option: str, script: str) -> str:
    """Run a batch script on c1 with an option; return its output without the differences between any two jobs."""
    home = f"rm -rf steps-run; mkdir steps-run; cd steps-run; printf 'one\\ntwo\\n' >in\n{script}"
    job = cluster.submit(option, *ON_GPUS, "--nodelist=c1", "--job-name=steps", script=f"#!/bin/bash\n{home}")
    cluster.wait_for_state(job, "COMPLETED", "FAILED", timeout_s=180)
    text = OF_ONE_JOB.sub(r"\1=", cluster.output(job))
    return re.sub(rf"(StepId=|STEP |job |alice\.steps\.){job}\b", r"\1JOB", text)


def settled(lines: list[str]) -> list[str]:
    """Sort the lines of a command, without messages that Slurm repeats or that belong to the launcher."""
    kept = {line for line in lines if not line.startswith("srun: slurm-affinode: ")}
    exits = [line for line in kept if OTHER_VARIABLES.fullmatch(line.partition("=")[0]) is None]
    return sorted(exits)


def test_local_steps_are_like_those_of_slurm(cluster: Cluster) -> None:
    """Output, messages, exit status, files, input and GPUs of a script are the same with both."""
    commands = [line for line in COMMANDS.splitlines() if line]
    script = "".join(f"echo '=== {number}'\n{line}\necho status $?\n" for number, line in enumerate(commands))
    script = f"exec 2>&1\n{script}exit 0\n"
    slurm, local = (ran(cluster, option, script) for option in (BY_HAND, LOCAL))
    parts = [re.split(r"^=== \d+\n", text, flags=re.MULTILINE)[1:] for text in (slurm, local)]
    assert [len(part) for part in parts] == [len(commands)] * 2
    for command, expected, result in zip(commands, *parts, strict=True):
        assert (command, settled(result.splitlines())) == (command, settled(expected.splitlines()))


def test_tasks_of_local_steps_get_different_gpus(cluster: Cluster) -> None:
    """GPUs are assigned per task, by single or map binding, and to two concurrent steps."""
    script = "".join(f"echo '==='\n{command}\n" for command in GPU_COMMANDS)
    parts = ran(cluster, LOCAL, f"exec 2>&1\n{script}").split("===\n")[1:]
    assert [sorted(part.splitlines()) for part in parts] == list(GPU_COMMANDS.values())


def test_environment_of_local_steps_is_that_of_slurm(cluster: Cluster) -> None:
    slurm, local = (ran(cluster, option, ALL_VARIABLES) for option in (BY_HAND, LOCAL))
    assert settled(local.splitlines()) == settled(slurm.splitlines())


def test_step_is_suspended_and_restored_with_its_job(cluster: Cluster) -> None:
    """Two tasks of the launcher resume where they stopped, and the script starts its next step."""
    step = f"srun --ntasks=2 --label {WORKLOADS}/idle_after.py --busy 0.5 --idle 1 {UNTIL_FINISH} --again 0.5"
    script = f"#!/bin/bash\n{step}\necho step ended with $?\nsrun -l bash -c 'echo after $SLURM_STEP_NUM_TASKS'\n"
    job = cluster.submit(LOCAL, "--partition=gpu", "--ntasks=2", "--gres=gpu:1", script=script)
    cluster.wait_for_output(job, "1: ")
    cluster.wait_for_output(job, "step number=2")
    suspend(cluster, job)
    wait_asleep(cluster, job)
    wake(cluster, job)
    output = finish(cluster, job)
    assert "slurm-affinode: restored on" in output
    for task in range(2):
        task_output = "".join(line for line in output.splitlines(keepends=True) if line.startswith(f"{task}: "))
        assert each_once(task_output)
        assert task_output.count("memory=intact") == 1
        assert f"{task}: after 2\n" in task_output
    assert "step ended with 0" in output
    assert outcome(cluster, job).state == "COMPLETED"


def constrains_devices(cluster: Cluster) -> bool:
    """Return whether a job numbers only its own GPUs, because a cgroup hides the others."""
    return "ConstrainDevices=yes" in cluster.shell("c1", "grep -i '^ConstrainDevices' /etc/slurm/cgroup.conf || true")


def test_step_after_a_move_has_the_current_environment(cluster: Cluster) -> None:
    """The environment has the node, restart count and GPUs of the new attempt."""
    script = """#!/bin/bash
while sleep 0.5; do
  srun bash -c 'echo step on $SLURMD_NODENAME of $SLURM_JOB_NODELIST restarts ${SLURM_RESTART_COUNT:-none}\
 gpus $CUDA_VISIBLE_DEVICES $SLURM_STEP_GPUS'
done
"""
    neighbour = cluster.submit("--partition=gpu", "--gres=gpu:1", "--nodelist=c2", wrap="sleep 120", user="bob")
    cluster.wait_for_state(neighbour, "RUNNING")
    job = cluster.submit(LOCAL, "--partition=gpu", "--gres=gpu:1", "--nodelist=c1", script=script)
    cluster.wait_for_output(job, "step on c1 of c1 restarts none gpus 0 0")
    suspend(cluster, job)
    wait_asleep(cluster, job)
    cluster.exec("login", "scontrol", "update", f"JobId={job}", "ReqNodeList=c2", user="alice")
    wake(cluster, job)
    cluster.wait_for_output(job, "step on c2 of c2 restarts 1")
    lines = cluster.exec("c2", "cat", f"/run/slurm-affinode/environment/{job}").splitlines()
    (visible,) = (line.partition("=")[2] for line in lines if line.startswith("export CUDA_VISIBLE_DEVICES="))
    assert visible == ("0" if constrains_devices(cluster) else "1")
    cluster.wait_for_output(job, f"step on c2 of c2 restarts 1 gpus {visible} 1")
    cluster.exec("login", "scancel", job, user="alice")


def remedies_of_steps(cluster: Cluster, job: str) -> list[str]:
    """Return the remedies against running steps in the status of a job; empty if there are no such steps."""
    jobs = status(cluster, job)["jobs"]  # empty until the agent knows the job
    compatibility = jobs[0]["compatibility"] if jobs else None
    against = () if compatibility is None else compatibility["modes"]["requeue"]["against"]
    return [refusal["remedy"] for refusal in against if refusal["code"] == "srun-steps"]


def test_other_steps_are_run_by_slurm(cluster: Cluster) -> None:
    """The job cannot be suspended meanwhile, as a line in its output states; sacct lists the step."""
    job = cluster.submit(
        LOCAL, "--partition=gpu", "--gres=gpu:1", script="#!/bin/bash\nsrun --time=5 sleep 15\nsleep 60\n"
    )
    cluster.wait_for_output(
        job, "the option --time needs Slurm's srun: the job cannot be suspended while this step runs"
    )
    remedies = wait_until("status names it", lambda: remedies_of_steps(cluster, job))
    assert "steps=local" not in remedies[0]
    rows = wait_until(
        "sacct has the step",
        lambda: cluster.exec("login", "sacct", "--noheader", "--format=JobID", f"--jobs={job}").split(),
        lambda rows: f"{job}.0" in rows,
    )
    assert f"{job}.batch" in rows


def test_remedy_is_named(cluster: Cluster) -> None:
    """Status gives the remedy for a job without ``steps=local`` that runs a step."""
    job = cluster.submit(BY_HAND, "--partition=gpu", "--gres=gpu:1", wrap="srun sleep 60")
    assert "steps=local" in wait_until("status names it", lambda: remedies_of_steps(cluster, job))[0]
