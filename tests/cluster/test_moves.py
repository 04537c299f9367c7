"""Programs that check themselves, in one job: it moves to another node and back, or sleeps in place."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.servers import BY_HAND as IN_PLACE
from cluster.servers import put_to_sleep, wait_awake
from cluster.sleepers import BY_HAND, UNTIL_FINISH, end, wait_for_agents, wake
from cluster.spank import outcome
from cluster.test_workload_harm import resume

pytestmark = pytest.mark.cluster

PROGRAMS = sorted(
    path.name
    for path in (Path(__file__).parents[2] / "containers/workloads/moves").iterdir()
    if path.name not in ("moving.py", "README.md") and path.is_file()
)
START_S = 120
SUSPEND_S = 150
GPU = f"{WORKLOADS}/idle_after.py --busy 0 --idle 1 {UNTIL_FINISH} --again 0"
SCRIPT = f"""#!/bin/bash
#SBATCH --partition=gpu --gres=gpu:1 --nodelist=c1 --mem=4G
export END=$HOME/slurm-$SLURM_JOB_ID-end.out
for program in {" ".join(PROGRAMS)}; do
  {WORKLOADS}/moves/$program >$HOME/slurm-$SLURM_JOB_ID-$program.out 2>&1 &
  pids[$!]=$program
done
{GPU} >$HOME/slurm-$SLURM_JOB_ID-gpu.out 2>&1 &
pids[$!]=gpu
until grep -q 'step number=1' $HOME/slurm-$SLURM_JOB_ID-gpu.out; do sleep 0.2; done
for program in {" ".join(PROGRAMS)}; do
  until grep -qE '^(started|changed)|Error' $HOME/slurm-$SLURM_JOB_ID-$program.out; do sleep 0.2; done
done
echo all have started
for pid in "${{!pids[@]}}"; do
  wait $pid && continue
  echo "${{pids[pid]}} ended with $?:"
  tail -n 3 $HOME/slurm-$SLURM_JOB_ID-${{pids[pid]}}.out
  failed=1
done
echo all have ended
exit ${{failed:-0}}
"""

CONNECTED = """
import socket, tempfile, time
name = f"{tempfile.mkdtemp()}/socket"
server, client = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
server.bind(name)
client.connect(name)
time.sleep(3600)
"""
"""A program that CRIU dumps and that could not be restored, which is known only from its image."""


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


def started(cluster: Cluster, option: str, script: str = SCRIPT) -> str:
    """Submit the job; return its ID when all programs have started."""
    job = cluster.submit(option, script=script)
    cluster.wait_for_output(job, "all have started", timeout_s=START_S)
    return job


def assert_unchanged(cluster: Cluster, job: str) -> None:
    """End the programs, and assert that none of them has found a difference."""
    end(cluster, job)
    assert outcome(cluster, job).state == "COMPLETED", cluster.output(job)
    assert "all have ended" in cluster.output(job)


def suspend_in_the_end(cluster: Cluster, job: str) -> None:
    """Suspend the job; a suspension that fails, as CRIU may on a busy machine, leaves it unharmed and is repeated."""

    def state() -> str:
        cluster.run("login", "slurm-affinode", "suspend", job, user="alice")
        return cluster.job(job)["JobState"]

    wait_until("it is suspended", state, lambda result: result == "PENDING", timeout_s=SUSPEND_S)


@pytest.mark.timeout(600, func_only=True)
def test_programs_move_to_another_node_and_back(cluster: Cluster) -> None:
    job = started(cluster, BY_HAND)
    for node in ("c2", "c1"):
        suspend_in_the_end(cluster, job)
        resume(cluster, job, node)
        wait_until(
            f"its restore on {node} is complete",
            lambda: cluster.job(job).get("Comment", ""),
            lambda comment: "restoring" not in comment,
        )
    assert_unchanged(cluster, job)


def test_programs_continue_after_a_rollback(cluster: Cluster) -> None:
    """The dump is complete, and then the suspension is rolled back."""
    begin, rest = SCRIPT.split("export END", 1)
    job = started(cluster, BY_HAND, f"{begin}python3 -c {shlex.quote(CONNECTED)} &\nexport END{rest}")
    rolled_back = cluster.run("login", "slurm-affinode", "suspend", job, user="alice", timeout_s=SUSPEND_S)
    assert "connected to another one by name" in rolled_back.stderr
    assert_unchanged(cluster, job)


@pytest.mark.nightly
def test_programs_sleep_in_place(cluster: Cluster) -> None:
    """Without waits, which SIGSTOP interrupts as it does elsewhere (signal(7))."""
    job = started(cluster, f"{IN_PLACE},wake=hold", SCRIPT.replace(" waits.py", ""))
    for _ in range(2):
        put_to_sleep(cluster, job)
        wake(cluster, job)
        wait_awake(cluster, job)
    assert_unchanged(cluster, job)
