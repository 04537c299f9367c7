"""State, ExitCode and output of a job are the same with the option as without it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from cluster.driver import Cluster, wait_until
from cluster.spank import Pair, outcome, outcomes, outputs, submit_pair

pytestmark = pytest.mark.cluster


@dataclass(frozen=True, slots=True)
class Case:
    """A job, and the signals that it gets once it has written ``ready``."""

    name: str
    body: str
    options: tuple[str, ...] = ()
    act: tuple[str, ...] = ()
    state: str | None = "COMPLETED"
    exit_code: str | None = "0:0"
    """``None``: any exit code, the same for both jobs."""
    interpreter: str = "#!/bin/bash"

    @property
    def signaled(self) -> bool:
        """Whether the job gets a signal, which is lost if it comes before a busy node has started the job."""
        return bool(self.act) or any(option.startswith("--signal") for option in self.options)


TRAP = "trap 'echo got {0}' {0}\necho ready\n"
# A single process: if bash and its child receive the same signal, either of them may end first.
PYTHON = """import signal, sys, time
def got(number, frame):
    print("got", number, flush=True)
    if len(sys.argv) == 1 and {ends}:
        print("tidied up", flush=True)
        sys.exit(4)
signal.signal(signal.SIGTERM, {handler})
print("ready", flush=True)
while True:
    time.sleep(60)
"""
TRAPS_TERM = PYTHON.format(ends=True, handler="got")
OUTLIVES_TERM = PYTHON.format(ends=False, handler="got")
IGNORES_TERM = PYTHON.format(ends=False, handler="signal.SIG_IGN")

CASES = [
    Case("exit 0", "echo out; echo err >&2"),
    Case("exit 1", "exit 1", state="FAILED", exit_code="1:0"),
    Case("exit 2", "exit 2", state="FAILED", exit_code="2:0"),
    Case("exit 127", "no-such-command", state="FAILED", exit_code="127:0"),
    Case("exit 255", "exit 255", state="FAILED", exit_code=None),
    *(
        Case(f"ends by {name}", f"ulimit -c 0; kill -{name} $$", state="FAILED", exit_code=f"0:{number}")
        for name, number in {"SEGV": 11, "KILL": 9, "TERM": 15, "ABRT": 6, "USR1": 10, "INT": 2, "PIPE": 13}.items()
    ),
    Case("ends by HUP", "kill -HUP $$", state="FAILED", exit_code=None),
    Case("ends by a real-time signal", "kill -RTMIN+3 $$", state="FAILED", exit_code="0:37"),
    Case("dumps core", "ulimit -c unlimited; cd /tmp; kill -SEGV $$", state="FAILED", exit_code="0:11"),
    Case("child ends by SEGV", "{ bash -c 'kill -SEGV $$'; } 2>/dev/null; echo status $?"),
    Case("exec of another program", "exec sh -c 'echo replaced; exit 7'", state="FAILED", exit_code="7:0"),
    Case("stdin is empty", "cat; read x || echo end of file"),
    Case("stdin from a file", "read line; echo got $line; cat | wc -c", options=("--input=/etc/passwd",)),
    Case("children are reaped", "for i in 1 2 3; do (sleep 0.1; exit $i) & done; wait -n; wait; echo all"),
    Case("daemon is left", "setsid sleep 300 </dev/null >/dev/null 2>&1 & echo left"),
    Case("interpreter is missing", "echo never", interpreter="#!/no/such/program", state="FAILED", exit_code="2:0"),
    Case("interpreter is no program", "echo never", interpreter="#!/etc/passwd", state="FAILED", exit_code="13:0"),
    Case(
        "interpreter with arguments",
        "import sys; print(sys.flags.no_site, sys.argv[1:])",
        interpreter="#!/usr/bin/python3 -S",
    ),
    Case(
        "srun step in the batch job",
        "srun --ntasks=1 sh -c 'echo step; exit 3' 2>&1 | sort; exit ${PIPESTATUS[0]}",
        state="FAILED",
        exit_code="3:0",
    ),
    # Slurm checks every half minute which jobs to signal.
    Case(
        "--signal=B:USR1 is trapped, the child in the foreground continues",
        "trap 'echo got USR1; got=1' USR1\nuntil [ -n \"$got\" ]; do sleep 1; done; echo after the child",
        options=("--signal=B:USR1@119", "--time=2"),
    ),
    Case(
        "--signal=B:USR1 ends a script without a trap",
        "echo ready; exec sleep 100",
        options=("--signal=B:USR1@119", "--time=2"),
        state="FAILED",
        exit_code="0:10",
    ),
    Case(
        "scancel --batch --signal reaches the script alone",
        TRAP.format("USR2")
        + "bash -c 'trap \"echo child got it\" USR2; for i in $(seq 60); do sleep 0.1; done'; echo end",
        act=("--batch", "--signal=USR2"),
    ),
    Case(
        "scancel --full --signal reaches the group",
        TRAP.format("USR2") + "sleep 20; echo slept $?",
        act=("--full", "--signal=USR2"),
    ),
    Case(
        "scancel --full --signal leaves a session of its own alone",
        TRAP.format("USR2") + "setsid -w sleep 6; echo slept $?",
        act=("--full", "--signal=USR2"),
    ),
    Case(
        "scancel --signal without --batch reaches steps only",
        TRAP.format("USR2") + "sleep 6; echo slept $?",
        act=("--signal=USR2",),
    ),
    Case("scancel", "echo ready; exec sleep 300", act=("",), state="CANCELLED"),
    Case(
        "scancel of a job that traps TERM",
        TRAPS_TERM,
        interpreter="#!/usr/bin/python3",
        act=("",),
        state="CANCELLED",
        exit_code=None,
    ),
    Case(
        "scancel of a job that ignores TERM",
        IGNORES_TERM,
        interpreter="#!/usr/bin/python3",
        act=("",),
        state="CANCELLED",
        exit_code=None,
    ),
    *(
        Case(f"scancel {' '.join(act)}", "echo ready; exec sleep 300", act=act, state=state, exit_code=code)
        for act, state, code in (
            (("--batch", "--signal=KILL"), None, None),
            (("--batch", "--signal=HUP"), "FAILED", None),
            (("--full", "--signal=KILL"), None, None),
            (("--full", "--signal=TERM"), None, None),
        )
    ),
    Case(
        "scancel --signal=INT --full, trapped",
        TRAP.format("INT") + "sleep 30; echo slept $?; exit 9",
        act=("--full", "--signal=INT"),
        state="FAILED",
        exit_code="9:0",
    ),
]


@pytest.mark.slow
@pytest.mark.timeout(600, func_only=True)
def test_outcomes_and_outputs_are_the_same(cluster: Cluster) -> None:
    """State and ExitCode of job and batch step are equal, as is every byte of the output."""
    pairs = {case: submit(cluster, case) for case in CASES if not case.signaled}
    for case, pair in pairs.items():
        check(cluster, case, pair)


@pytest.mark.parametrize("case", [case for case in CASES if case.signaled], ids=lambda case: case.name)
def test_outcome_and_output_after_a_signal_are_the_same(cluster: Cluster, case: Case) -> None:
    """State and ExitCode of job and batch step are equal, as is every byte of the output."""
    pair = submit(cluster, case)
    for job in pair.both if case.act else ():
        cluster.wait_for_output(job, "ready")
        cluster.exec("login", "scancel", *filter(None, case.act), job, user="alice")
    check(cluster, case, pair)


def submit(cluster: Cluster, case: Case) -> Pair:
    """Submit the job, without and with the option."""
    return submit_pair(cluster, f"{case.interpreter}\n{case.body}\n", "--requeue", *case.options)


def check(cluster: Cluster, case: Case, pair: Pair) -> None:
    """Compare the ends of both jobs with each other and with those of the case."""
    expected, result = outcomes(cluster, pair)
    assert result == expected, case.name
    known = (case.state or result.state, case.exit_code or result.exit_code)
    assert (result.state, result.exit_code) == known, case.name
    without, with_option = outputs(cluster, pair)
    assert with_option == without, case.name


SHM = "/dev/shm"  # noqa: S108 - of the node
CLEANS_UP = """#!/bin/bash
#SBATCH --nodelist=c1
python3 - <<'CHILD'
import os, signal, time
path = "/dev/shm/kept-" + os.environ["SLURM_JOB_ID"]
open(path, "w").close()
def clean_up(number, frame):
    time.sleep(1)
    os.unlink(path)
    os._exit(0)
signal.signal(signal.SIGTERM, clean_up)
if IGNORED:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True:
    time.sleep(60)
CHILD
"""


def test_child_of_canceled_job_cleans_up(cluster: Cluster) -> None:
    """A shell ends at once on SIGTERM; its child gets the same signal and enough time to remove its shared memory.

    With cgroups, Slurm signals the shell alone, and kills its child when the shell has ended.
    """
    killed = "proctrack/cgroup" in cluster.exec("login", "scontrol", "show", "config")
    pair = submit_pair(cluster, CLEANS_UP.replace("IGNORED", "False"), "--partition=gpu")
    for job in pair.both:
        cluster.wait_for_output(job, "ready")
        cluster.exec("login", "scancel", job, user="alice")
    expected, result = outcomes(cluster, pair)
    assert result == expected
    assert result.state == "CANCELLED"
    for job in pair.both:
        wait_until(
            f"the shared memory of job {job} is removed, or its owner is killed",
            lambda job=job: cluster.run("c1", "ls", SHM).stdout.split(),  # type: ignore[misc]
            lambda names, job=job: (f"kept-{job}" in names) == killed,
        )
    wait_until(
        "its child is gone",
        lambda: cluster.run("c1", "pgrep", "-u", "alice", "python3").stdout,
        lambda pids: pids == "",
    )
    cluster.shell("c1", "rm -f /dev/shm/kept-*")


def test_child_that_ignores_signals_ends_with_canceled_job(cluster: Cluster) -> None:
    """The child is killed after a few seconds, even if Slurm's process tracking misses it."""
    script = CLEANS_UP.replace("IGNORED", "True")
    job = cluster.submit("--partition=gpu", "--gpu-suspend-idle", script=script)
    cluster.wait_for_output(job, "ready")
    cluster.exec("login", "scancel", job, user="alice")
    assert outcome(cluster, job).state == "CANCELLED"
    wait_until(
        "its child is gone",
        lambda: cluster.run("c1", "pgrep", "-u", "alice", "python3").stdout,
        lambda pids: pids == "",
    )
    cluster.shell("c1", "rm /dev/shm/kept-*")


@pytest.mark.slow
def test_time_limit_is_enforced(cluster: Cluster) -> None:
    """At the limit, the job gets SIGTERM and after KillWait SIGKILL: its trap has run, and it ends as TIMEOUT."""
    body = "#!/usr/bin/python3\n" + OUTLIVES_TERM
    pair = submit_pair(cluster, body, "--time=1")
    for job in pair.both:
        cluster.wait_for_output(job, "ready")
        cluster.exec("login", "scontrol", "update", f"jobid={job}", "timelimit=0:05")
    expected, result = outcomes(cluster, pair)
    assert result == expected
    assert result.state == "TIMEOUT"
    without, with_option = outputs(cluster, pair)
    assert with_option == without
    assert "got 15" in with_option


def test_job_is_suspended_and_resumed_by_slurm(cluster: Cluster) -> None:
    """`scontrol suspend` stops the job's processes, `resume` continues them; the job completes."""
    cluster.exec("login", "rm", "-f", "/home/alice/go", user="alice")
    counts = "until [ -e go ]; do echo >>ticks.$SLURM_JOB_ID; sleep 0.1; done"
    pair = submit_pair(cluster, f"#!/bin/bash\necho ready\n{counts}\necho end\n")

    def is_stopped(job: str) -> bool:
        """Return whether the processes are stopped: Slurm reports the state before the node has stopped them."""
        size = f"stat -c %s /home/alice/ticks.{job}; sleep 1; stat -c %s /home/alice/ticks.{job}"
        before, after = cluster.run("login", "sh", "-c", size).stdout.split()
        return before == after

    for job in pair.both:
        cluster.wait_for_output(job, "ready")
        cluster.exec("login", "scontrol", "suspend", job)
        wait_until(f"job {job} is stopped", lambda job=job: is_stopped(job))  # type: ignore[misc]
    cluster.exec("login", "touch", "/home/alice/go", user="alice")
    for job in pair.both:
        assert cluster.job(job)["JobState"] == "SUSPENDED"
        assert "end" not in cluster.output(job)
        cluster.exec("login", "scontrol", "resume", job)
    expected, result = outcomes(cluster, pair)
    assert result == expected
    assert outputs(cluster, pair) == ("ready\nend\n", "ready\nend\n")


def test_requeued_job_starts_afresh(cluster: Cluster) -> None:
    """`scontrol requeue` restarts the job from the beginning, as there is no image."""
    script = '#!/bin/bash\necho ready $SLURM_RESTART_COUNT\n[ -n "$SLURM_RESTART_COUNT" ] || sleep 300\n'
    pair = submit_pair(cluster, script, "--requeue")
    for job in pair.both:
        cluster.wait_for_output(job, "ready")
        cluster.exec("login", "scontrol", "requeue", job)
    expected, result = outcomes(cluster, pair)
    assert result == expected
    assert outputs(cluster, pair) == ("ready 1\n", "ready 1\n")


def test_array_tasks_end_independently(cluster: Cluster) -> None:
    """Each task has the option; one fails, the others do not."""
    job = cluster.submit(
        "--array=1-3", "--gpu-suspend-idle", wrap="echo task $SLURM_ARRAY_TASK_ID; exit $((SLURM_ARRAY_TASK_ID == 2))"
    )
    result = [outcome(cluster, f"{job}_{task}") for task in (1, 2, 3)]
    assert [item.exit_code for item in result] == ["0:0", "1:0", "0:0"]
    assert [cluster.output(f"{job}_{task}") for task in (1, 2, 3)] == [f"task {task}\n" for task in (1, 2, 3)]


def test_killed_shepherd_ends_job(cluster: Cluster) -> None:
    """SIGKILL to PID 1 of the namespace ends the job as FAILED with signal 9; no process is left."""
    job = cluster.submit("--partition=gpu", "--nodelist=c1", "--gpu-suspend-idle", wrap="echo ready; sleep 301")
    cluster.wait_for_output(job, "ready")
    pid = cluster.shell("c1", "pgrep -f slurm-affinode-shepherd").strip()
    cluster.exec("c1", "kill", "-KILL", pid)
    assert outcome(cluster, job).exit_code == "0:9"
    assert cluster.run("c1", "pgrep", "-f", "sleep 301").stdout == ""


def test_killed_task_ends_job(cluster: Cluster) -> None:
    """If Slurm's task is killed, the namespace ends too, so that no process escapes Slurm."""
    job = cluster.submit("--partition=gpu", "--nodelist=c1", "--gpu-suspend-idle", wrap="echo ready; sleep 302")
    cluster.wait_for_output(job, "ready")
    shepherd = cluster.shell("c1", "pgrep -f slurm-affinode-shepherd").strip()
    task = cluster.exec("c1", "ps", "-o", "ppid=", "-p", shepherd).strip()
    cluster.exec("c1", "kill", "-KILL", task)
    assert outcome(cluster, job).exit_code == "0:9"
    assert cluster.run("c1", "pgrep", "-f", "sleep 302").stdout == ""


def test_daemons_end_with_script(cluster: Cluster) -> None:
    """A daemon left behind by a script ends with the job."""
    job = cluster.submit(
        "--partition=gpu",
        "--nodelist=c1",
        "--gpu-suspend-idle",
        wrap="setsid sleep 303 </dev/null >/dev/null 2>&1 & sleep 0.5",
    )
    assert outcome(cluster, job).state == "COMPLETED"
    assert cluster.run("c1", "pgrep", "-f", "sleep 303").stdout == ""
