"""Attacks by a user who exchanges the processes of a job while it is being suspended, with Debian's own programs.

A process becomes a setuid or setgid program after the job was admitted and before CRIU dumps it. Nothing that root does
for the job may be done with the rights of such a process, and no image may contain one: no restore would accept it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.phase_jobs import send_request
from cluster.phases import continue_agent, stopping_at, wait_for_stop, wait_settled
from cluster.sleepers import (
    BY_HAND,
    UNTIL_FINISH,
    continue_criu,
    hold_criu,
    pausing_criu,
    status,
    wait_for_agents,
    wait_for_held_criu,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOTS = "/srv/owner-attack"
"""A directory of root. Its contents would be executed by root if it were, for example, that of prologs."""
HOME = "/home/alice"
SUDO = "/usr/local/bin/sudo-sleep"
"""As harmless as a rule of sudo that lets users sleep as root."""

# The first process of the job has a deleted file open, which has another link, so that a dump has to give it a name. On
# request, it puts a link to the directory of root in the place of its directory, and becomes another program.
EXCHANGE = r"""
import os, sys, time
go, done, target = sys.argv[1:4]
os.makedirs("place", exist_ok=True)
with open("place/file", "w") as file:
    file.write("#!/bin/sh\nid\n")
os.link("place/file", "place/other")
fd = os.open("place/file", os.O_RDONLY)
os.set_inheritable(fd, True)
os.unlink("place/file")
os.mkfifo("input")
os.dup2(os.open("input", os.O_RDWR), 0)
print("ready", flush=True)
while not os.path.exists(go):
    time.sleep(0.01)
os.rename("place", "moved")
os.symlink(target, "place")
open(done, "w").close()
os.execvp(sys.argv[4], sys.argv[4:])
"""
PROGRAMS = {
    "setuid program that waits": ["passwd"],
    "setgid program": ["ssh-agent", "-D", "-a", "agent.socket"],
    "program that a sudo rule runs as root": [SUDO, "--reuid=0", "--clear-groups", "sleep", "1000"],
}
IDLE = f"{WORKLOADS}/idle_after.py --busy 0 --idle 1 {UNTIL_FINISH} --again 0"


@pytest.fixture(autouse=True)
def victim(cluster: Cluster) -> Iterator[None]:
    """Wait until the agents respond; create the directory of root."""
    wait_for_agents(cluster)
    for node in ("c1", "c2"):
        cluster.shell(node, f"mkdir -p -m 755 {ROOTS}; cp /usr/bin/setpriv {SUDO}; chmod 4755 {SUDO}")
    yield
    for node in ("c1", "c2"):
        cluster.shell(node, f"rm -rf {ROOTS} {SUDO}")


@pytest.fixture(scope="module")
def paused(cluster: Cluster) -> Iterator[None]:
    wait_for_agents(cluster)
    with pausing_criu(cluster):
        yield


def submit(cluster: Cluster, program: list[str]) -> tuple[str, str, str]:
    """Start a job whose first process will become ``program``; return its ID, its node and its directory."""
    words = " ".join(program)
    script = (
        "#!/bin/bash\n#SBATCH --partition=gpu --gres=gpu:1\n"
        f"mkdir -p {HOME}/exchange-$SLURM_JOB_ID && cd {HOME}/exchange-$SLURM_JOB_ID || exit 1\n"
        f"{IDLE} &\nexec /usr/bin/python3 -c '{EXCHANGE}' go done {ROOTS} {words}\n"
    )
    job = cluster.submit(BY_HAND, script=script)
    cluster.wait_for_output(job, "ready")
    cluster.wait_for_output(job, "step number=2")
    return job, cluster.job(job)["BatchHost"], f"{HOME}/exchange-{job}"


def suspension_failed(cluster: Cluster, job: str, node: str) -> str:
    """Wait until the suspension has been rolled back; return the reason. Root must have changed nothing."""
    wait_settled(cluster)
    row = wait_until("status has the reason", lambda: status(cluster, job)["jobs"], lambda rows: rows)[0]
    assert cluster.job(job)["JobState"] == "RUNNING", row
    assert cluster.job(job)["Restarts"] == "0"
    assert cluster.exec(node, "ls", "-A", ROOTS) == ""
    return cluster.exec("login", "squeue", "--noheader", "--format=%k", f"--jobs={job}").strip()


def exchanged(cluster: Cluster, directory: str) -> bool:
    return cluster.run("login", "test", "-e", f"{directory}/done").returncode == 0


@pytest.mark.parametrize("what", sorted(PROGRAMS))
def test_process_exchanged_after_admission_is_refused(cluster: Cluster, what: str) -> None:
    """The job is examined again when all of its processes are stopped, before root links, opens or dumps anything."""
    with stopping_at(cluster, "locking"):  # admitted, and not stopped yet
        job, node, directory = submit(cluster, PROGRAMS[what])
        send_request(cluster, "suspend --no-wait", job)
        assert wait_for_stop(cluster, lambda: False) == node
        cluster.exec("login", "touch", f"{directory}/go", user="alice")
        wait_until("the process is exchanged", lambda: exchanged(cluster, directory))
        name = "sleep" if SUDO in PROGRAMS[what] else PROGRAMS[what][0]
        wait_until("it is another program", lambda: cluster.run(node, "pgrep", "-x", name).stdout)
        continue_agent(cluster, node)
        comment = suspension_failed(cluster, job, node)
    assert comment.startswith("runs on:"), comment
    assert any(text in comment for text in ("changed user ids", "does not belong to", "has group ID")), comment
    cluster.exec("login", "scancel", job, user="alice")


def test_process_that_runs_on_sigcont_right_before_the_dump_is_not_suspended(cluster: Cluster, paused: None) -> None:
    """Until CRIU traces the processes, another process of the user can wake them: then the image is refused."""
    job, node, directory = submit(cluster, PROGRAMS["setgid program"])
    hold_criu(cluster, node, "before", "dump")
    cluster.exec("login", "slurm-affinode", "suspend", "--no-wait", job, user="alice")
    wait_for_held_criu(cluster, node, "before", "dump")
    cluster.exec("login", "touch", f"{directory}/go", user="alice")
    assert not exchanged(cluster, directory)  # it is stopped
    cluster.run(node, "pkill", "-CONT", "-u", "alice", user="alice")
    wait_until("the process is exchanged", lambda: exchanged(cluster, directory))
    continue_criu(cluster, node)
    comment = suspension_failed(cluster, job, node)
    assert comment.startswith("runs on:"), comment
    assert "would have group ID" in comment or "cannot be restored" in comment, comment
    cluster.exec("login", "scancel", job, user="alice")


def test_setgid_program_is_refused_before_the_suspension(cluster: Cluster) -> None:
    """``status`` says so: a restore would refuse its group."""
    script = f"#!/bin/bash\n#SBATCH --partition=gpu --gres=gpu:1\nssh-agent -D -a $HOME/agent-$$ &\n{IDLE}\n"
    job = cluster.submit(BY_HAND, script=script)
    cluster.wait_for_output(job, "step number=2")
    wait_until("status has the reason", lambda: "has group ID" in str(status(cluster, job)))
    cluster.exec("login", "scancel", job, user="alice")
