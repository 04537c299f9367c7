"""Jobs with ``--gpu-suspend-idle`` are suspended, free their GPUs, and resume with the same ID and memory."""

from __future__ import annotations

import itertools
import re

import pytest
from cluster.driver import Cluster, wait_until
from cluster.sleepers import (
    BY_HAND,
    SHARED,
    asleep,
    each_once,
    end,
    finish,
    idle_job,
    status,
    steps,
    suspend,
    wait_asleep,
    wait_for_agents,
    wait_for_no_images,
    wake,
)

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


@pytest.mark.main
def test_idle_job_frees_gpu_and_resumes_on_another_node(cluster: Cluster) -> None:
    """The idle job is suspended for a pending job, which starts on its GPU, and resumes on the other node."""
    job = cluster.submit("--gpu-suspend-idle=2s", script=idle_job(more="--host-mib 64 --memory-mib 512"))
    cluster.wait_for_output(job, "step number=2")
    first = cluster.job(job)["BatchHost"]
    other = "c2" if first == "c1" else "c1"
    before = cluster.gpus(first)
    waiting = cluster.submit("--partition=gpu", f"--nodelist={first}", "--gres=gpu:2", wrap="sleep 60", user="bob")
    cluster.wait_for_state(waiting, "RUNNING")
    assert cluster.job(job)["JobState"] == "PENDING"
    assert cluster.job(job)["Comment"].startswith("suspended:")
    assert all(not gpu.pids for gpu in cluster.gpus(first))
    assert any(gpu.pids for gpu in before)
    output = finish(cluster, job)
    assert each_once(output)
    assert f"slurm-affinode: suspended on {first}: idle" in output
    assert f"slurm-affinode: restored on {other}" in output
    runs = cluster.wait_for_runs(job, "REQUEUED", "COMPLETED", duplicates=True)
    assert [(run.nodes, run.exit_code) for run in runs] == [(first, "0:0"), (other, "0:0")]
    assert cluster.job(job).get("Comment", "") == ""


@pytest.mark.nightly  # other tests suspend a job twice, and a tree three times
def test_job_is_suspended_three_times(cluster: Cluster) -> None:
    """Each suspension is requested by command; every step is computed once, and the ledger has all three."""
    job = cluster.submit(BY_HAND, script=idle_job())
    cluster.wait_for_output(job, "step number=2")
    for times in (1, 2, 3):
        suspend(cluster, job)
        wait_asleep(cluster, job)
        wake(cluster, job)
        wait_until(
            "it is restored again",
            lambda: cluster.output(job).count("slurm-affinode: restored"),
            lambda count, times=times: count == times,
        )
    assert each_once(finish(cluster, job))
    assert cluster.job(job)["Restarts"] == "3"
    lines = cluster.shell("login", f"cat {SHARED}/ledger/*.jsonl | grep '\"job_id\":{job},' | grep -c restored_ms")
    assert int(lines) == 3
    wait_for_no_images(cluster, job)


@pytest.mark.main
def test_job_with_shards_is_suspended_and_restored(cluster: Cluster) -> None:
    """Slurm does not report the index of a shared GPU, so the prolog sends it to the agent."""
    job = asleep(cluster, idle_job(), "--gres=shard:1", BY_HAND)
    wake(cluster, job)
    assert each_once(finish(cluster, job))


def test_array_tasks_are_suspended_independently(cluster: Cluster) -> None:
    """Each task has its own image, output and state. Two of them share a node, which suspends one at a time."""
    array = cluster.submit("--array=1-3", "--gpu-suspend-idle=2s,when=always", script=idle_job(idle=12))
    for task in (1, 2, 3):
        cluster.wait_for_state(f"{array}_{task}", "COMPLETED", timeout_s=120)
        output = cluster.exec("login", "cat", f"/home/alice/slurm-{array}_{task}.out")
        assert steps(output) == list(range(1, 13))
        assert "memory=intact" in output
        assert "slurm-affinode: restored" in output


@pytest.mark.main
def test_array_task_with_raw_id_of_array_is_suspended_alone(cluster: Cluster) -> None:
    """One task has the raw ID of the array: the other task keeps running and is not woken."""
    array = cluster.submit("--array=1-2", BY_HAND, script=idle_job())
    tasks = [f"{array}_{number}" for number in (1, 2)]
    for task in tasks:
        cluster.wait_for_output(task, "step number=2")
    (last,) = (task for task in tasks if cluster.job(task)["JobId"] == array)
    (other,) = (task for task in tasks if task != last)
    job = cluster.job(other)["JobId"]
    suspend(cluster, last)
    cluster.wait_for_state(last, "PENDING")
    assert cluster.job(other)["JobState"] == "RUNNING"
    end(cluster, job)
    cluster.wait_for_state(other, "COMPLETED")
    assert cluster.job(other)["Restarts"] == "0"
    wake(cluster, last)
    end(cluster, array)
    assert each_once(finish(cluster, last))


WRITER = """#!/bin/bash
#SBATCH --partition=gpu --gres=gpu:1
for number in 1 2 3 4 5 6 7 8 9 10 11 12; do
  echo "out $number"
  echo "err $number" >&2
  sleep 1
done
"""


@pytest.mark.parametrize("mode", ["truncate", "append"])
def test_output_is_unchanged_by_suspension(cluster: Cluster, mode: str) -> None:
    """One output file or two, truncated or appended: the contents differ only in the lines of slurm-affinode."""

    def writer(*options: str) -> str:
        job = cluster.submit(BY_HAND, f"--open-mode={mode}", *options, script=WRITER)
        cluster.wait_for_output(job, "out 2")
        suspend(cluster, job)
        return job

    item, two = writer(), writer("--output=/home/alice/slurm-%j.out", "--error=/home/alice/slurm-%j.err.out")
    for job in (item, two):
        wait_asleep(cluster, job)
        wake(cluster, job)
    for job in (item, two):
        cluster.wait_for_state(job, "COMPLETED")

    def lines(name: str) -> list[str]:
        text = cluster.exec("login", "cat", f"/home/alice/{name}")
        return [line for line in text.splitlines() if not line.startswith("slurm-affinode: ")]

    assert lines(f"slurm-{item}.out") == [f"{kind} {n}" for n in range(1, 13) for kind in ("out", "err")]
    assert lines(f"slurm-{two}.out") == [f"out {n}" for n in range(1, 13)]
    assert lines(f"slurm-{two}.err.out") == [f"err {n}" for n in range(1, 13)]


@pytest.mark.main
def test_requeue_does_not_run_traps_of_dumped_script(cluster: Cluster) -> None:
    """A script that has been dumped does not receive the SIGCONT and SIGTERM of the requeue."""
    script = "#!/bin/bash\n#SBATCH --partition=gpu --gres=gpu:1\ntrap 'date >>~/slurm-trapped.out' TERM CONT\n"
    counts = "until [ -e slurm-$SLURM_JOB_ID-end.out ]; do echo step number=$((++n)); sleep 1; done\n"
    job = asleep(cluster, script + counts, BY_HAND)
    wake(cluster, job)
    end(cluster, job)
    cluster.wait_for_state(job, "COMPLETED")
    assert cluster.run("login", "test", "-e", "/home/alice/slurm-trapped.out").returncode == 1


def test_other_users_have_no_access(cluster: Cluster) -> None:
    """Bob has no access to alice's job, but an administrator has."""
    job = cluster.submit(BY_HAND, script=idle_job())
    cluster.wait_for_output(job, "step number=1")
    refused = cluster.run("login", "slurm-affinode", "suspend", job, user="bob")
    assert refused.returncode == 1
    assert cluster.job(job)["JobState"] == "RUNNING"
    suspend(cluster, job, "admin")
    wait_asleep(cluster, job)
    assert cluster.run("login", "slurm-affinode", "wake", job, user="bob").returncode == 1
    assert cluster.job(job)["Priority"] == "0"
    assert cluster.run("login", "slurm-affinode", "status", job, user="bob").returncode == 1
    assert status(cluster, job)
    wake(cluster, job, "admin")
    finish(cluster, job)


@pytest.mark.main
def test_images_of_canceled_job_are_removed(cluster: Cluster) -> None:
    """The images of the job are removed from both stores."""
    job = asleep(cluster, idle_job(), BY_HAND)
    cluster.exec("login", "scancel", job, user="alice")
    wait_for_no_images(cluster, job)


EVERYTHING = """#!/bin/bash
#SBATCH --partition=gpu --gres=gpu:2
/usr/local/share/workloads/multi_process.py --seconds 1 >/dev/null 2>&1 &
python3 - <<'PYTHON'
import mmap, os, signal, socket, subprocess, threading, time
append = open(os.path.expanduser("~/appended"), "a")
gone = open("/tmp/gone-%d" % os.getpid(), "w+"); gone.write("deleted"); gone.flush(); os.unlink(gone.name)
shared = mmap.mmap(-1, 4096); shared[:6] = b"shared"
reader, writer = os.pipe(); os.write(writer, b"piped")
listening = socket.create_server(("127.0.0.1", 0))
near, far = socket.socketpair(); near.send(b"paired")
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
ticks = []
signal.signal(signal.SIGALRM, lambda *_: ticks.append(1)); signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
counted = []
def count():
    while True: counted.append(1); time.sleep(0.2)
threading.Thread(target=count, daemon=True).start()
for step in range(1, 8):
    print("step number=%d" % step, flush=True); append.write("%d\\n" % step); append.flush(); time.sleep(1)
before = len(ticks), len(counted)
time.sleep(2)
gone.seek(0)
print("kept", gone.read(), shared[:6].decode(), os.read(reader, 5).decode(), far.recv(6).decode(),
      listening.getsockname()[1] > 0, child.poll(), len(ticks) > before[0], len(counted) > before[1])
child.kill()
PYTHON
exit 7
"""
DAEMONS = r"""#!/bin/bash
#SBATCH --partition=gpu --gres=gpu:1
cat >daemon-$SLURM_JOB_ID.py <<'PYTHON'
import os, sys, time
kind, script = sys.argv[1], int(sys.argv[2])
if kind == "twice":
    if os.fork(): os._exit(0)
    os.setsid()
    if os.fork(): os._exit(0)
while os.getppid() != script: time.sleep(0.01)
number, file = 0, open(f"slurm-daemon-{os.environ['SLURM_JOB_ID']}-{kind}.out", "a", buffering=1)
while True:
    number += 1
    file.write(f"{number} {os.getpid()} {os.getppid()}\n")
    time.sleep(0.1)
PYTHON
daemon="python3 daemon-$SLURM_JOB_ID.py"
echo script $$
($daemon subshell $$ </dev/null >/dev/null 2>&1 &)
bash -c "nohup $daemon nohup $$ </dev/null >/dev/null 2>&1 & disown"
setsid -f $daemon setsid $$ </dev/null >/dev/null 2>&1
$daemon twice $$ </dev/null >/dev/null 2>&1
(setsid bash -c "($daemon nested $$ </dev/null >/dev/null 2>&1 &); exec sleep 1000" </dev/null >/dev/null 2>&1 &)
(sleep 1000 &); wait; echo no child left
until [ -e slurm-daemon-$SLURM_JOB_ID.end ]; do
  [ ! -e slurm-daemon-$SLURM_JOB_ID.late ] || ($daemon late $$ </dev/null >/dev/null 2>&1 &)
  rm -f slurm-daemon-$SLURM_JOB_ID.late
  sleep 0.2
done
exit 7
"""


def test_daemons_are_restored(cluster: Cluster) -> None:
    """Daemons continue on the other node, also after a second suspension, including one started in between.

    No process outlives the script, and Slurm gets the exit code of the script. A process in the session of another
    process becomes a child of the session leader.
    """
    job = cluster.submit(BY_HAND, script=DAEMONS)
    name = f"/home/alice/slurm-daemon-{job}"

    def count(kind: str) -> int:
        return int(cluster.run("login", "sh", "-c", f"wc -l <{name}-{kind}.out").stdout or 0)

    def touch(what: str) -> None:
        cluster.exec("login", "touch", f"{name}.{what}", user="alice")

    def wait_for_count(kinds: tuple[str, ...], least: int) -> int:
        def counts() -> list[int]:
            return [count(kind) for kind in kinds]

        return max(wait_until(f"{kinds} count", counts, lambda seen: min(seen) > least))

    cluster.wait_for_output(job, "no child left")
    most = wait_for_count(("subshell", "nohup", "setsid", "twice", "nested"), 3)
    first = cluster.job(job)["BatchHost"]
    suspend(cluster, job)
    wait_asleep(cluster, job)
    blocking = cluster.submit("--partition=gpu", f"--nodelist={first}", "--gres=gpu:2", wrap="sleep 300", user="bob")
    cluster.wait_for_state(blocking, "RUNNING")
    wake(cluster, job)
    cluster.wait_for_state(job, "RUNNING")
    assert cluster.job(job)["BatchHost"] != first
    touch("late")
    kinds = ("subshell", "nohup", "setsid", "twice", "late", "nested")
    most = wait_for_count(kinds, most)
    cluster.exec("login", "scancel", blocking, user="bob")
    suspend(cluster, job)
    wait_asleep(cluster, job)
    wake(cluster, job)
    # Ten a second: the script, which fails, has run for longer than the agent watches it after a restore.
    wait_for_count(kinds, most + 20)

    def rows(kind: str) -> list[list[str]]:
        return [line.split() for line in cluster.exec("login", "cat", f"{name}-{kind}.out").splitlines()]

    parents = {kind: list(dict.fromkeys(row[2] for row in rows(kind) if len(row) > 2)) for kind in kinds}
    touch("end")  # afterwards they have another parent until they are killed
    runs = cluster.wait_for_runs(job, "REQUEUED", "REQUEUED", "FAILED", duplicates=True)
    assert runs[-1].exit_code == "7:0"
    for kind in kinds:
        result = [row[:2] for row in rows(kind)]
        assert result == [[str(number), result[0][1]] for number in range(1, len(result) + 1)], kind
    (script,) = re.findall(r"^script (\d+)$", cluster.output(job), re.MULTILINE)
    nested = parents.pop("nested")
    assert (nested[0], len(nested), "1" in nested) == (script, 2, False)
    assert all(seen == [script] for seen in parents.values()), parents
    for node in ("c1", "c2"):
        assert cluster.run(node, "pgrep", "-f", f"daemon-{job}.py").returncode == 1
    cluster.exec("login", "rm", f"/home/alice/daemon-{job}.py", user="alice")


def test_process_state_is_restored(cluster: Cluster) -> None:
    """The script uses many kinds of process state; Slurm gets its exit code."""
    cluster.run("login", "rm", "-f", "/home/alice/appended", user="alice")
    job = asleep(cluster, EVERYTHING, BY_HAND)
    wake(cluster, job)
    cluster.wait_for_output(job, "kept")
    assert "kept deleted shared piped paired True None True True" in cluster.output(job)
    runs = cluster.wait_for_runs(job, "REQUEUED", "FAILED", duplicates=True)
    assert runs[-1].exit_code == "7:0"
    assert cluster.exec("login", "cat", "/home/alice/appended").split() == [str(n) for n in range(1, 8)]


REMOVED = r"""#!/usr/bin/env python3
#SBATCH --partition=gpu --gres=gpu:1
import os, time
name = "removed-" + os.environ["SLURM_JOB_ID"]
file = open(name, "w+")
os.link(name, name + ".other")
os.unlink(name)
print(name, file=file, flush=True)
print("ready", flush=True)
while os.path.exists(name + ".other"):
    time.sleep(0.2)
file.seek(0)
print(file.read() == name + "\n", os.fstat(file.fileno()).st_nlink, flush=True)
"""


def test_jobs_with_removed_files_share_directory(cluster: Cluster) -> None:
    """CRIU gives all removed files the same name: all jobs are restored, and a canceled one leaves no file."""
    names = "ls -A /home/alice | grep link_remap"
    jobs = [asleep(cluster, REMOVED, BY_HAND, after="ready") for _ in range(3)]
    assert len(cluster.run("login", "sh", "-c", names).stdout.split()) == 3
    cluster.exec("login", "scancel", jobs[0], user="alice")
    for job in jobs[1:]:
        wake(cluster, job)
    for job in jobs[1:]:
        cluster.wait_for_output(job, "restored on")
    # The names are removed a moment after the restore, and count as links until then.
    wait_until("they are removed", lambda: cluster.run("login", "sh", "-c", names).stdout, lambda left: left == "")
    for job in jobs[1:]:
        cluster.exec("login", "rm", f"/home/alice/removed-{job}.other", user="alice")
        cluster.wait_for_state(job, "COMPLETED")
        assert cluster.output(job).splitlines()[-1] == "True 0"
    wait_for_no_images(cluster, jobs[0])
    assert cluster.run("login", "sh", "-c", names).stdout == ""
    cluster.exec("login", "rm", f"/home/alice/removed-{jobs[0]}.other", user="alice")


READER = r"""#!/bin/bash
#SBATCH --partition=gpu --gres=gpu:1
log=$HOME/log-$SLURM_JOB_ID
echo first >$log
exec 5<$log
read -r line <&5
echo ready
until read -r line <&5; do sleep 0.2; done
echo "then $line"
rm $log
"""


def test_job_reads_what_another_program_has_written_meanwhile(cluster: Cluster) -> None:
    """Its file is larger than at the dump, and another mode makes no difference to a program that has it open."""
    job = asleep(cluster, READER, BY_HAND, after="ready")
    cluster.exec("login", "sh", "-c", f"cd /home/alice && echo later >>log-{job} && chmod 0600 log-{job}", user="alice")
    wake(cluster, job)
    cluster.wait_for_output(job, "then later")
    cluster.wait_for_state(job, "COMPLETED")


TRAVELER = r"""#!/usr/bin/env python3
#SBATCH --partition=gpu --gres=gpu:1
import time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=1 << 20)
print("memory /dev/shm/" + memory.name, flush=True)
for number in range(1, 1000):
    memory.buf[0] = number % 256
    print("step number=%d" % number, flush=True)
    time.sleep(0.5)
    if memory.buf[0] != number % 256:
        raise SystemExit("it has other contents")
"""


def test_job_with_shared_memory_returns_to_node_that_it_left(cluster: Cluster) -> None:
    """Its shared memory is removed from each node: otherwise an older version would be there when it returns."""
    job = cluster.submit(BY_HAND, script=TRAVELER)
    cluster.wait_for_output(job, "step number=2")
    path = cluster.output(job).split()[1]
    nodes = ["c1", "c2"] * 2 if cluster.job(job)["BatchHost"] == "c1" else ["c2", "c1"] * 2
    for times, (node, other) in enumerate(itertools.pairwise(nodes), 1):
        assert cluster.run(node, "test", "-f", path).returncode == 0
        suspend(cluster, job)
        wait_asleep(cluster, job)
        assert cluster.run(node, "test", "-e", path).returncode == 1
        cluster.exec("login", "scontrol", "update", f"JobId={job}", f"ReqNodeList={other}", user="alice")
        wake(cluster, job)
        wait_until(
            f"it is restored on {other}",
            lambda: cluster.output(job).count("slurm-affinode: restored"),
            lambda count, times=times: count == times,
        )
        last = steps(cluster.output(job))[-1]
        cluster.wait_for_output(job, f"step number={last + 2}")
    assert cluster.job(job)["BatchHost"] == nodes[-1]
    cluster.exec("login", "scancel", job, user="alice")


LISTENER = r"""#!/usr/bin/env python3
#SBATCH --partition=gpu --gres=gpu:1
import socket, time
address = socket.gethostbyname(socket.gethostname())
server = socket.create_server((address, 0))
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind((address, 0))
client = socket.create_connection(server.getsockname())
accepted, _ = server.accept()
port = server.getsockname()[1]
for number in range(1, 1000):
    own, port_now = server.getsockname()
    datagrams.sendto(b"x", datagrams.getsockname())
    datagrams.recv(1)
    socket.create_connection((own, port_now)).close()
    server.accept()[0].close()
    print("step number=%d at %s same port: %s" % (number, own, port_now == port), flush=True)
    time.sleep(0.5)
"""


def test_listener_at_own_address_moves_to_another_node(cluster: Cluster) -> None:
    """Libraries such as gloo listen at the address of their host: a restore binds them to that of the new node."""
    job = cluster.submit(BY_HAND, script=LISTENER)
    cluster.wait_for_output(job, "step number=2")
    first = cluster.job(job)["BatchHost"]
    other = "c2" if first == "c1" else "c1"
    suspend(cluster, job)
    wait_asleep(cluster, job)
    cluster.exec("login", "scontrol", "update", f"JobId={job}", f"ReqNodeList={other}", user="alice")
    wake(cluster, job)
    cluster.wait_for_output(job, f"restored on {other}")
    last = steps(cluster.output(job))[-1]
    cluster.wait_for_output(job, f"step number={last + 2}")
    cluster.exec("login", "scancel", job, user="alice")
    where = cluster.run(other, "hostname", "-i").stdout.split()[0]
    assert f"step number={last + 2} at {where} same port: True" in cluster.output(job)


CONNECTED = r"""#!/usr/bin/env python3
#SBATCH --partition=gpu --gres=gpu:1 --nodelist=c1
import os, socket, time
def pair(address):
    with socket.create_server((address, 0)) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]
pairs = [pair("127.0.0.1"), pair(socket.gethostbyname(socket.gethostname()))]
outside = socket.create_connection(("slurmctld", 6817))
unread = bytes(range(256)) * 200
if os.fork() == 0:
    while word := pairs[0][1].recv(1):
        pairs[1][1].sendall(word)
    os._exit(0)
for one in pairs:
    one[1].close()
more = pair("127.0.0.1")
more[0].sendall(unread)
closed = number = 0
while closed < 4:
    number += 1
    pairs[0][0].sendall(b"%c" % (number % 256))
    if pairs[1][0].recv(1) != b"%c" % (number % 256):
        raise SystemExit("another byte came back")
    try:
        state = "open" if outside.send(b"") == 0 and outside.getpeername() else ""
    except OSError:
        state, closed = "closed", closed + 1
    print("step number=%d outside %s" % (number, state), flush=True)
    time.sleep(0.5)
found = b""
while len(found) < len(unread):
    found += more[1].recv(len(unread))
print("in flight:", found == unread, "at", pairs[1][0].getsockname()[0], flush=True)
"""


def test_connections_between_processes_of_a_job_are_restored(cluster: Cluster) -> None:
    """They have the address of the new node and keep data in flight; a connection to another machine is closed."""
    job = asleep(cluster, CONNECTED, BY_HAND)
    last = steps(cluster.output(job))[-1]
    cluster.exec("login", "scontrol", "update", f"JobId={job}", "ReqNodeList=c2", user="alice")
    wake(cluster, job)
    cluster.wait_for_state(job, "COMPLETED", timeout_s=90)
    output = cluster.output(job)
    assert steps(output) == list(range(1, last + 5))
    assert f"step number={last} outside open" in output
    assert f"step number={last + 1} outside closed" in output
    assert f"in flight: True at {cluster.run('c2', 'hostname', '-i').stdout.split()[0]}" in output


NO_RING = r"""#!/usr/bin/env python3
#SBATCH --partition=gpu --gres=gpu:1
import ctypes, time
libc = ctypes.CDLL(None, use_errno=True)
for number in range(1, 1000):
    ring = libc.syscall(425, 4, ctypes.create_string_buffer(256))
    print("step number=%d ring %d errno %d" % (number, ring, ctypes.get_errno()), flush=True)
    time.sleep(0.3)
"""


def test_io_uring_is_denied_before_and_after_a_suspension(cluster: Cluster) -> None:
    """Libraries then use system calls that can be dumped; setuid programs still work."""
    job = asleep(cluster, NO_RING, BY_HAND, "--nodelist=c1")
    wake(cluster, job)
    cluster.wait_for_output(job, "restored on")
    last = steps(cluster.output(job))[-1]
    cluster.wait_for_output(job, f"step number={last + 2}")
    init = cluster.run("c1", "sh", "-c", "pgrep -u alice -f slurm_script")
    status = cluster.shell("c1", f"cat /proc/{init.stdout.split()[0]}/status")
    cluster.exec("login", "scancel", job, user="alice")
    lines = [line for line in cluster.output(job).splitlines() if line.startswith("step")]
    assert {line.partition(" ring ")[2] for line in lines} == {"-1 errno 38"}
    assert "NoNewPrivs:\t0\n" in status


def test_current_environment_is_in_a_file(cluster: Cluster) -> None:
    """A restored process has the variables of its first attempt; the file contains those of the new one."""
    script = """#!/bin/bash
#SBATCH --partition=gpu --gres=gpu:1
file=/run/slurm-affinode/environment/$SLURM_JOB_ID
for number in $(seq 1 1000); do
  [ -r "$file" ] && . "$file"
  echo "step number=$number on $SLURMD_NODENAME of $SLURM_JOB_NODELIST restarts ${SLURM_RESTART_COUNT:-none}"
  sleep 0.5
done
"""
    job = asleep(cluster, script, BY_HAND, "--nodelist=c1")
    cluster.exec("login", "scontrol", "update", f"JobId={job}", "ReqNodeList=c2", user="alice")
    wake(cluster, job)
    cluster.wait_for_output(job, "on c2 of c2 restarts 1")
    assert "on c1 of c1 restarts none" in cluster.output(job)
    file = f"/run/slurm-affinode/environment/{job}"
    assert cluster.run("c2", "cat", file, user="bob").returncode == 1
    assert "SLURM_JOB_END_TIME" in cluster.exec("c2", "cat", file, user="alice")
    cluster.exec("login", "scancel", job, user="alice")
    wait_until(f"{file} is removed", lambda: cluster.run("c2", "test", "-e", file).returncode, lambda code: code == 1)
