"""Programs of users that the option, a suspension or a restore must not harm."""

from __future__ import annotations

import pytest
from cluster.driver import Cluster, wait_until
from cluster.sleepers import BY_HAND, NOT_CONNECTED, NOT_YET, end, suspend, wait_asleep, wait_for_agents, wake
from cluster.spank import OPTION, outcome, submit_pair
from cluster.test_suspend_kinds import IDLE, ON_C1

pytestmark = pytest.mark.cluster

START_S = 120


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


def move(cluster: Cluster, job: str, node: str) -> None:
    """Suspend a job, and resume it on a node."""
    suspend(cluster, job)
    resume(cluster, job, node)


def resume(cluster: Cluster, job: str, node: str) -> None:
    """Resume a suspended job on a node."""
    wait_asleep(cluster, job)
    cluster.exec("login", "scontrol", "update", f"jobid={job}", f"reqnodelist={node}")
    wake(cluster, job)
    cluster.wait_for_state(job, "RUNNING")


# --- PIDs


def test_mpirun_starts_beside_another_job_and_after_a_lost_one(cluster: Cluster) -> None:
    """Open MPI names its session directory after host, PID and user, and a killed job leaves it behind."""
    cluster.shell("c1", "rm -rf /tmp/prterun.*")
    mpirun = "mpirun -n 2 --bind-to none sh -c 'echo rank of $1; sleep $2' -"
    options = ("--partition=gpu", "--ntasks=2", "--nodelist=c1", OPTION)
    first = cluster.submit(*options, wrap=f"{mpirun} first 300; echo ended with $?")
    cluster.wait_for_output(first, "rank of first", timeout_s=START_S)
    second = cluster.submit(*options, wrap=f"{mpirun} second 0; echo ended with $?")
    assert outcome(cluster, second).state == "COMPLETED"
    cluster.exec("login", "scancel", "--signal=KILL", "--full", first, user="alice")
    outcome(cluster, first)
    assert cluster.shell("c1", "ls -d /tmp/prterun.*") != ""
    third = cluster.submit(*options, wrap=f"{mpirun} third 0; echo ended with $?")
    assert outcome(cluster, third).state == "COMPLETED"
    cluster.shell("c1", "rm -rf /tmp/prterun.*")
    for job in (second, third):
        assert "ended with 0" in cluster.output(job), cluster.output(job)


def test_jobs_and_attempts_have_different_pids(cluster: Cluster) -> None:
    """Neither a further job nor a further attempt repeats the PIDs of an earlier one."""
    script = (
        "#!/bin/bash\necho pid $$\n"
        "if [ ${SLURM_RESTART_COUNT:-0} = 0 ]; then scontrol requeue $SLURM_JOB_ID; sleep 60; fi\n"
    )
    jobs = [cluster.submit("--partition=gpu", OPTION, "--open-mode=append", script=script) for _ in range(2)]
    result = []
    for job in jobs:
        cluster.wait_for_runs(job, "REQUEUED", "COMPLETED", duplicates=True)
        result += [int(line.split()[1]) for line in cluster.output(job).splitlines() if line.startswith("pid ")]
    assert len(set(result)) == len(result) == 4, result
    assert min(result) > 1000


def test_job_near_the_highest_pid_moves(cluster: Cluster) -> None:
    """The PIDs of CRIU and of further processes are those that the job does not use."""
    script = """#!/usr/bin/python3
import os, pathlib, subprocess, time
home, job = pathlib.Path.home(), os.environ["SLURM_JOB_ID"]
print("started", flush=True)
while not (home / f"slurm-{job}-go.out").exists():
    time.sleep(0.1)
held = [subprocess.Popen(["sleep", "1000"]) for _ in range(20)]
print("high", held[0].pid, "low", held[-1].pid, flush=True)
while not (home / f"slurm-{job}-end.out").exists():
    time.sleep(0.1)
subprocess.run(["true"], check=True)
assert all(child.poll() is None for child in held)
print("all are there", flush=True)
for child in held: child.kill()
"""
    job = cluster.submit(BY_HAND, *ON_C1, script=script)
    cluster.wait_for_output(job, "started", timeout_s=START_S)
    # Tens of thousands of processes would have the same effect.
    near = "top=$(cat /proc/sys/kernel/pid_max); for pid in $(pgrep -u alice); do "
    near += 'nsenter -t $pid -p -m sh -c "echo $((top - 10)) >/proc/sys/kernel/ns_last_pid"; done; echo $top'
    top = int(cluster.shell("c1", near).split()[-1])
    cluster.exec("login", "touch", f"/home/alice/slurm-{job}-go.out", user="alice")
    cluster.wait_for_output(job, "high")
    _, high, _, low = cluster.output(job).split("started")[1].split()[:4]
    assert int(high) > top - 10 > int(low)
    move(cluster, job, "c2")
    end(cluster, job)
    assert outcome(cluster, job).state == "COMPLETED"
    assert "all are there" in cluster.output(job)


# --- parents


def test_death_signal_of_first_process_does_not_end_it_after_a_move(cluster: Cluster) -> None:
    """Its parent is Slurm's task, then the shepherd, and never a process that ends before it.

    Its affinity is restored too.
    """
    script = f"""#!/usr/bin/python3
import ctypes, os, signal, subprocess, threading
prctl = ctypes.CDLL(None).prctl
prctl(1, signal.SIGKILL)
threading.Thread(target=lambda: (prctl(1, signal.SIGKILL), threading.Event().wait()), daemon=True).start()
child = subprocess.Popen(["sleep", "1000"], preexec_fn=lambda: prctl(1, signal.SIGUSR1))
os.sched_setaffinity(0, {{max(os.sched_getaffinity(0))}})
bound = os.sched_getaffinity(0)
code = os.system({IDLE!r})
assert child.poll() is None
assert os.sched_getaffinity(0) == bound
child.kill()
print("idle ended with", code, flush=True)
"""
    job = cluster.submit(BY_HAND, *ON_C1, script=script)
    cluster.wait_for_output(job, "step number=1")
    move(cluster, job, "c2")
    wait_until("it is restored", lambda: "restored on c2" in cluster.output(job))
    end(cluster, job)
    assert outcome(cluster, job).state == "COMPLETED"
    assert "idle ended with 0" in cluster.output(job)


# --- the time limit


def test_time_limit_is_not_prolonged_by_a_suspension(cluster: Cluster) -> None:
    """The job resumes with the remaining time, in whole minutes. A minimum (``--time-min``) does not prevent that."""
    job = cluster.submit(BY_HAND, *ON_C1, "--time=4", "--time-min=4", script=f"#!/bin/bash\n{IDLE}\n")
    cluster.wait_for_output(job, "step number=1")
    cluster.shell("c1", "sleep 60", timeout_s=90)
    suspend(cluster, job)
    wait_asleep(cluster, job)
    wait_until("it has the remaining time", lambda: cluster.job(job)["TimeLimit"], lambda limit: limit == "00:03:00")
    wake(cluster, job)
    cluster.wait_for_output(job, "restored on")
    assert cluster.job(job)["TimeLimit"] == "00:03:00"
    end(cluster, job)
    assert outcome(cluster, job).state == "COMPLETED"


# --- refusals

MDWE = """
import ctypes, time
assert ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) == 0
print("set up", flush=True)
time.sleep(1000)
"""
MPTCP = """
import socket, time
listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
listener.bind(("127.0.0.1", 0))
listener.listen()
print("set up", flush=True)
time.sleep(1000)
"""
NO_NEW_PRIVS = """
import ctypes, time
assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0
print("set up", flush=True)
time.sleep(1000)
"""


def refusal(cluster: Cluster, job: str) -> str:
    """Request a suspension once the attempt has lasted long enough; return why it is refused."""
    done = wait_until(
        "it may be suspended",
        lambda: cluster.run("login", "slurm-affinode", "suspend", job, user="alice"),
        lambda done: NOT_YET not in done.stderr and NOT_CONNECTED not in done.stderr,
    )
    assert done.returncode == 1, done.stdout
    return str(done.stderr)


def test_jobs_with_states_that_would_be_lost_are_refused(cluster: Cluster) -> None:
    """Before anything is changed; they run on to their end."""
    cases = {MDWE: "PR_SET_MDWE", MPTCP: "MPTCP"}
    # The version of Landlock, by landlock_create_ruleset(2), or -1.
    if int(cluster.shell("c1", "python3 -c 'import ctypes; print(ctypes.CDLL(None).syscall(444, None, 0, 1))'")) > 0:
        cases[NO_NEW_PRIVS] = "Landlock"
    for program, text in cases.items():
        job = cluster.submit(BY_HAND, *ON_C1, script=f"#!/bin/bash\npython3 -c '{program}' &\n{IDLE}\nkill %1\n")
        cluster.wait_for_output(job, "set up")
        cluster.wait_for_output(job, "step number=1")
        assert text in refusal(cluster, job)
        end(cluster, job)
        assert outcome(cluster, job).state == "COMPLETED"
        assert cluster.job(job)["Restarts"] == "0"


# --- the environment


def test_go_programs_do_not_use_mptcp(cluster: Cluster) -> None:
    """The variable is set only where MPTCP would prevent a checkpoint, and unless the user has set it."""
    script = "#!/bin/bash\necho debug=$GODEBUG\n"
    pair = submit_pair(cluster, script, "--partition=gpu")
    with_variable = cluster.submit("--partition=gpu", OPTION, "--export=ALL,GODEBUG=netdns=go", script=script)
    inplace = cluster.submit("--partition=gpu", f"{OPTION},mode=inplace", script=script)
    outputs = []
    for job in (*pair.both, with_variable, inplace):
        outcome(cluster, job)
        outputs.append(cluster.output(job).strip())
    assert outputs == ["debug=", "debug=multipathtcp=0", "debug=netdns=go", "debug="]
