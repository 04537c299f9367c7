"""Programs of users that the option, a suspension or a restore must not harm."""

from __future__ import annotations

import pytest
from cluster.driver import Cluster, wait_until
from cluster.sleepers import BY_HAND, end, suspend, wait_asleep, wait_for_agents, wake
from cluster.spank import OPTION, outcome, submit_pair
from cluster.test_suspend_kinds import IDLE, ON_C1, assert_continues

pytestmark = pytest.mark.cluster

START_S = 120


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


def move(cluster: Cluster, job: str, node: str) -> None:
    """Suspend a job, and resume it on a node."""
    suspend(cluster, job)
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
        "#!/bin/bash\necho pid $$\n[ ${SLURM_RESTART_COUNT:-0} = 0 ] && scontrol requeue $SLURM_JOB_ID && sleep 60\n:\n"
    )
    jobs = [cluster.submit("--partition=gpu", OPTION, "--open-mode=append", script=script) for _ in range(2)]
    found = []
    for job in jobs:
        cluster.wait_for_runs(job, "REQUEUED", "COMPLETED", duplicates=True)
        found += [int(line.split()[1]) for line in cluster.output(job).splitlines() if line.startswith("pid ")]
    assert len(set(found)) == len(found) == 4, found
    assert min(found) > 1000


# --- parents


def test_death_signal_of_first_process_does_not_end_it_after_a_move(cluster: Cluster) -> None:
    """Its parent is Slurm's task, then the shepherd, and never a process that ends before it."""
    script = f"""#!/usr/bin/python3
import ctypes, os, signal, subprocess, threading
prctl = ctypes.CDLL(None).prctl
prctl(1, signal.SIGKILL)
threading.Thread(target=lambda: (prctl(1, signal.SIGKILL), threading.Event().wait()), daemon=True).start()
child = subprocess.Popen(["sleep", "1000"], preexec_fn=lambda: prctl(1, signal.SIGUSR1))
code = os.system({IDLE!r})
assert child.poll() is None
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


# --- states of the kernel

MDWE = """
import ctypes, time
assert ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) == 0
print("forbidden", flush=True)
time.sleep(1000)
"""


def test_process_without_executable_memory_is_never_restored_without_that(cluster: Cluster) -> None:
    """The suspension is rolled back, and the job completes."""
    job = cluster.submit(BY_HAND, *ON_C1, script=f"#!/bin/bash\npython3 -c '{MDWE}' &\n{IDLE}\nkill %1\n")
    cluster.wait_for_output(job, "forbidden")
    cluster.wait_for_output(job, "step number=1")
    done = wait_until(
        "it may be suspended",
        lambda: cluster.run("login", "slurm-affinode", "suspend", job, user="alice"),
        lambda done: "cannot be suspended yet" not in done.stderr and "knows no job" not in done.stderr,
    )
    assert done.returncode == 1, done.stdout
    assert "PR_SET_MDWE" in done.stdout + done.stderr
    end(cluster, job)
    assert outcome(cluster, job).state == "COMPLETED"
    assert cluster.job(job)["Restarts"] == "0"


# --- refusals before the dump


def test_setgid_process_is_refused(cluster: Cluster) -> None:
    """A restore would refuse the group, which the job was not given."""
    program = "/usr/local/bin/sleep-as-group"
    cluster.shell("c1", f"cp /usr/bin/sleep {program}; chgrp shadow {program}; chmod 2755 {program}")
    try:
        job = cluster.submit(BY_HAND, *ON_C1, script=f"#!/bin/bash\n{program} 1000 &\n{IDLE}\nkill %1\n")
        assert "setgid" in assert_continues(cluster, job, "setgid")
    finally:
        cluster.exec("c1", "rm", "-f", program)


MPTCP = """
import socket, time
listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
listener.bind(("127.0.0.1", 0))
listener.listen()
time.sleep(1000)
"""


def test_socket_that_criu_cannot_dump_is_refused_by_name(cluster: Cluster) -> None:
    """Programs in Go listen with MPTCP by default, since Go 1.24."""
    job = cluster.submit(BY_HAND, *ON_C1, script=f"#!/bin/bash\npython3 -c '{MPTCP}' &\n{IDLE}\nkill %1\n")
    assert "MPTCP" in assert_continues(cluster, job, "socket-kind")


# --- the environment


def test_go_programs_do_not_use_mptcp(cluster: Cluster) -> None:
    """The variable is set only where MPTCP would prevent a checkpoint, and unless the user has set it."""
    script = "#!/bin/bash\necho debug=$GODEBUG\n"
    pair = submit_pair(cluster, script, "--partition=gpu")
    own = cluster.submit("--partition=gpu", OPTION, "--export=ALL,GODEBUG=netdns=go", script=script)
    inplace = cluster.submit("--partition=gpu", f"{OPTION},mode=inplace", script=script)
    outputs = []
    for job in (*pair.both, own, inplace):
        outcome(cluster, job)
        outputs.append(cluster.output(job).strip())
    assert outputs == ["debug=", "debug=multipathtcp=0", "debug=netdns=go", "debug="]
