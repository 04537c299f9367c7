"""Jobs of the kinds in docs/compatibility.md sleep in place and wake with their state."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.programs import (
    CELL,
    CELL_AGAIN,
    CELL_MIB,
    MODEL_MIB,
    PROGRAMS,
    START_S,
    TERMINAL,
    TOKENS,
    complete,
    connection,
    editor_server,
    editor_sessions,
    llama_server,
    notebook_server,
    require_programs,
    run_cell,
    type_lines,
)
from cluster.servers import BY_HAND, NODE, frozen, put_to_sleep, used_mib, wait_awake
from cluster.sleepers import status, steps, steps_by_process, wait_for_agents, wake

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

OPTION = f"{BY_HAND},wake=hold"
"""Options of a job that only a request or a command wakes."""
MEMORY_MIB = 256
"""GPU memory of a workload, by default."""
ON_GPU = ("--partition=gpu", f"--nodelist={NODE}", "--gres=gpu:1", "--mem=6G")
PROGRAM, END = "/home/alice/inplace-kind.py", "/home/alice/inplace-kind.end"

# Counts steps until END exists; with an argument, in shared memory.
COUNT = f"""#!/opt/slurm-affinode/bin/python
import os, sys, time
from multiprocessing.shared_memory import SharedMemory
sys.path.insert(0, "{WORKLOADS}")
import gpu
device = gpu.Gpu()
buffer = device.hold({MEMORY_MIB} << 20, seed=os.getpid())
shared = SharedMemory(create=True, size=8) if sys.argv[1:] else None
count = bytearray(8) if shared is None else shared.buf
while not os.path.exists("{END}"):
    number = int.from_bytes(count[:8], "little") + 1
    count[:8] = number.to_bytes(8, "little")
    gpu.log("step", number=number)
    time.sleep(0.3)
if shared is not None:
    shared.unlink()
device.compute(0.1)
sys.exit(gpu.finish(device, buffer))
"""


@dataclass(frozen=True)
class Kind:
    """A batch script with processes that count steps, each with ``MEMORY_MIB`` of GPU memory."""

    script: str
    processes: int = 1
    gpus: int = 1
    options: tuple[str, ...] = ()
    keys: str = ""
    """Further keys of the option."""
    texts: tuple[str, ...] = ()
    """Texts in its output."""
    in_status: bool = True
    """Whether ``status`` names the row."""


LOAD = f"{WORKLOADS}/data_loader.py --steps 1 --until {END} --every 0.3"
RANKS = f"{WORKLOADS}/torch_ranks.py --every 0.3 --until {END}"
TWO_RANKS = "--multi_gpu --num_machines=1 --num_processes=2 --mixed_precision=no --dynamo_backend=no"
MPIRUN = f"mpirun -n 2 --bind-to none {WORKLOADS}/mpi_ranks.py --every 0.3 --until {END}"
COUNT_AFTER = f"/opt/slurm-affinode/bin/python -c 'import sys; exec(sys.argv.pop()); exec(open(\"{PROGRAM}\").read())'"
"""Executes the Python code in its argument first, in the same process."""
MPTCP = "import socket; kept = socket.socket(proto=262)"
MDWE = "import ctypes; print(ctypes.CDLL(None).prctl(65, 1, 0, 0, 0))"
MONITOR = "python3 -c 'import os, time; os.open(\"/dev/nvidia0\", os.O_RDWR); time.sleep(600)'"
KINDS = {
    "several GPUs, several processes": Kind(
        f"CUDA_VISIBLE_DEVICES=0 {PROGRAM} & CUDA_VISIBLE_DEVICES=1 {PROGRAM} & wait", processes=2, gpus=2
    ),
    "data loader with workers (fork, forkserver, spawn)": Kind(
        f"for method in fork forkserver spawn; do {LOAD} --method $method & done; wait", processes=3,
        texts=("exited codes=0,0",) * 3,
    ),
    "srun in the script, steps=local": Kind(
        f"srun --label {PROGRAM}; echo step ended with $?; srun --label bash -c 'echo after $SLURM_STEP_NUM_TASKS'",
        processes=2, options=("--ntasks=2",), keys=",steps=local",
        texts=("step ended with 0", "0: after 2", "1: after 2"),
    ),
    "torchrun, accelerate launch": Kind(
        f"export OMP_NUM_THREADS=1\n"
        f"torchrun --no-python --master-port=29501 --nproc-per-node=2 {RANKS} &\n"
        f"{PROGRAMS}/accelerate launch {TWO_RANKS} --main_process_port=29503 {RANKS} --accelerate & wait",
        processes=4, gpus=2, texts=("parameters=identical",) * 4, in_status=False,  # its process name is pt_elastic
    ),
    "MPI on one node (mpirun in the script)": Kind(
        MPIRUN, processes=2, gpus=2, options=("--ntasks=2",), texts=("sums=identical",) * 2
    ),
    "Ray on one node": Kind(  # asleep for longer than one of its health checks may take
        "export RAY_health_check_timeout_ms=1000 RAY_health_check_period_ms=500\n"
        f"exec {PROGRAMS}/python {WORKLOADS}/ray_actor.py --every 0.3 --until {END}",
        texts=("state=identical", "object=identical"),
    ),
    "program with shared memory in /dev/shm": Kind(f"{PROGRAM} shared", in_status=False),
    "monitor, or another program that opens GPU devices without CUDA": Kind(
        f"{MONITOR} & monitor=$!; {PROGRAM}; kill $monitor && echo monitor was there", texts=("monitor was there",)
    ),
    "container of the user (Apptainer, Charliecloud, enroot)": Kind(
        f"unshare --user --map-root-user --mount --uts --ipc --pid --fork {PROGRAM}"
    ),
    "local scratch (mktemp -d, closed files in /tmp)": Kind(
        f"place=$(mktemp -d); echo kept > $place/file; {PROGRAM}; cat $place/file; rm -r $place", texts=("kept",),
        in_status=False,
    ),
    "two mpirun on one node, or one after a killed one": Kind(
        f"for n in 1 2; do {MPIRUN} & done; wait", processes=4, gpus=2, options=("--ntasks=4",),
        texts=("sums=identical",) * 4, in_status=False,
    ),
    "script with a death signal (setpriv --pdeathsig)": Kind(f"setpriv --pdeathsig TERM {PROGRAM}", in_status=False),
    "setgid program (ssh-agent)": Kind(
        f"eval $(ssh-agent); {PROGRAM}; ssh-add -l; ssh-agent -k", texts=("The agent has no identities",),
        in_status=False,
    ),
    "program with a socket of MPTCP": Kind(f"{COUNT_AFTER} '{MPTCP}'", in_status=False),
    "program that uses AMX (PyTorch and vLLM on CPUs), or with PR_SET_MDWE": Kind(
        f"{COUNT_AFTER} '{MDWE}'", in_status=False
    ),
    "program with no_new_privs (Landlock, sandboxes)": Kind(f"setpriv --no-new-privs {PROGRAM}", in_status=False),
}  # fmt: skip


@pytest.fixture(autouse=True)
def program(cluster: Cluster) -> None:
    """Install the program that counts; wait until the agents respond."""
    cluster.shell("login", f"rm -f {END}", user="alice")
    cluster.exec("login", "tee", PROGRAM, user="alice", stdin=COUNT)
    cluster.exec("login", "chmod", "+x", PROGRAM, user="alice")
    wait_for_agents(cluster)


def kinds(cluster: Cluster, job: str) -> list[str]:
    """Return the rows that status names for a job; empty until the agent knows it."""
    return [
        kind
        for item in status(cluster, job).get("jobs", ())
        for kind in (item["compatibility"] or {"kinds": ()})["kinds"]
    ]


def sleep_in_place(cluster: Cluster, job: str, memory_mib: int) -> None:
    """Suspend a job by command; assert that its processes are frozen and at least this much GPU memory is free."""
    held = sum(used_mib(cluster))
    put_to_sleep(cluster, job)
    assert sum(used_mib(cluster)) <= held - memory_mib
    assert frozen(cluster, job)
    row = cluster.job(job)
    assert (row["JobState"], row["Restarts"]) == ("RUNNING", "0")


def sleep_and_wake(cluster: Cluster, job: str, processes: int = 1, row: str | None = None) -> None:
    """Suspend a job once all its processes count steps, and wake it: they count only while it is awake.

    ``row``: a row of the table that ``status`` names for the job.
    """

    def counted() -> dict[str, list[int]]:
        return steps_by_process(cluster.output(job))

    cluster.wait_for_output(job, "step number=2", timeout_s=START_S)
    wait_until("all count", counted, lambda seen: len(seen) == processes, timeout_s=START_S)
    if row is not None:
        wait_until("status names the row", lambda: kinds(cluster, job), lambda result: row in result)
    held = used_mib(cluster)
    sleep_in_place(cluster, job, processes * MEMORY_MIB)
    asleep = counted()
    time.sleep(1)
    assert counted() == asleep
    wake(cluster, job)
    wait_awake(cluster, job)
    wait_until(
        "all count again",
        counted,
        lambda seen: all(len(numbers) > len(asleep[pid]) + 1 for pid, numbers in seen.items()),
    )
    assert used_mib(cluster) == held


def end(cluster: Cluster, job: str, processes: int = 1) -> str:
    """End a job and return its output; assert that each process counted every step once and kept its GPU memory."""
    cluster.exec("login", "touch", END, user="alice")
    cluster.wait_for_state(job, "COMPLETED", timeout_s=90)
    output = cluster.output(job)
    assert output.count("memory=intact") == processes, output
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in steps_by_process(output).values())
    return output


@pytest.mark.parametrize("row", KINDS)
@pytest.mark.timeout(600, func_only=True)
def test_job_wakes_with_its_state(cluster: Cluster, row: str) -> None:
    """After the wake all processes continue at their next step, with the same GPU memory, and the job completes."""
    kind = KINDS[row]
    if PROGRAMS in kind.script or "mpirun" in kind.script:
        require_programs(cluster)
    job = cluster.submit(
        OPTION + kind.keys, *ON_GPU, f"--gres=gpu:{kind.gpus}", *kind.options, script=f"#!/bin/bash\n{kind.script}\n"
    )
    sleep_and_wake(cluster, job, kind.processes, row if kind.in_status else None)
    output = end(cluster, job, kind.processes)
    assert all(output.count(text) == kind.texts.count(text) for text in kind.texts)


def test_array_task_sleeps_alone(cluster: Cluster) -> None:
    """The other task, on the same node, keeps running; then the tasks change roles."""
    array = cluster.submit(OPTION, *ON_GPU, "--array=1-2", wrap=PROGRAM)
    tasks = [f"{array}_{number}" for number in (1, 2)]
    for task, other in (tasks, tasks[::-1]):
        cluster.wait_for_output(other, "step number=2")
        before = len(steps(cluster.output(other)))
        sleep_and_wake(cluster, task, row="job array")
        assert len(steps(cluster.output(other))) > before + 3
    for task in tasks:
        end(cluster, task)


# Accepts connections with io_uring, as libuv may use it; ends at a request for /stop.
RING_SERVER = f"""#!/opt/slurm-affinode/bin/python
import ctypes, mmap, socket, struct, sys
sys.path.insert(0, "{WORKLOADS}")
import gpu
SETUP, ENTER, ACCEPT, GET_EVENTS = 425, 426, 13, 1
libc = ctypes.CDLL(None, use_errno=True)
parameters = (ctypes.c_uint32 * 30)()
ring = libc.syscall(SETUP, 4, parameters)
if ring < 0:
    raise SystemExit("not listening: io_uring_setup fails with errno %d" % ctypes.get_errno())
sq_entries, cq_entries = parameters[:2]
sq_tail, sq_mask, sq_array = (parameters[index] for index in (11, 12, 16))
cq_head, cq_tail, cq_mask, cqes = (parameters[index] for index in (20, 21, 22, 25))
rings = mmap.mmap(ring, max(sq_array + 4 * sq_entries, cqes + 16 * cq_entries))
sqes = mmap.mmap(ring, 64 * sq_entries, offset=0x10000000)

def word(at):
    return struct.unpack_from("I", rings, at)[0]

def accept(listener):
    struct.pack_into("<BBHiQQIIQ24x", sqes, 0, ACCEPT, 0, 0, listener.fileno(), 0, 0, 0, 0, 1)
    struct.pack_into("I", rings, sq_array + 4 * (word(sq_tail) & word(sq_mask)), 0)
    struct.pack_into("I", rings, sq_tail, word(sq_tail) + 1)
    submitted = 0
    while word(cq_head) == word(cq_tail):
        submitted += max(0, libc.syscall(ENTER, ring, 1 - submitted, 1, GET_EVENTS, None, 0))
    number, = struct.unpack_from("i", rings, cqes + 16 * (word(cq_head) & word(cq_mask)) + 8)
    struct.pack_into("I", rings, cq_head, word(cq_head) + 1)
    return socket.socket(fileno=number)

device = gpu.Gpu()
buffer = device.hold({MEMORY_MIB} << 20)
listener = socket.create_server(("", 8001))
gpu.log("listening")
number, request = 0, b""
while b"/stop" not in request:
    with accept(listener) as connection:
        request = connection.recv(65536)
        device.compute(0.05)
        number += 1
        connection.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\nanswer %d" % number)
sys.exit(gpu.finish(device, buffer))
"""


def test_server_with_io_uring_wakes_on_request(cluster: Cluster) -> None:
    """It sleeps while a request for a connection is in its ring. Skipped on kernels without io_uring."""
    job = cluster.submit(f"{OPTION},io_uring=allow", *ON_GPU, script=RING_SERVER)
    output = cluster.wait_for_output(job, "listening")
    if "not listening" in output:
        pytest.skip(f"this kernel or container forbids io_uring: {output.strip()}")

    def answer(path: str) -> str:
        url = f"http://{NODE}:8001/{path}"
        return cluster.exec("login", "curl", "--silent", "--show-error", "--max-time", "60", url, user="alice")

    assert answer("") == "answer 1"
    for number in (2, 3):
        sleep_in_place(cluster, job, MEMORY_MIB)
        assert answer("") == f"answer {number}"
        wait_awake(cluster, job)
    assert answer("stop") == "answer 4"
    end(cluster, job)


def test_llama_server_wakes_on_request(cluster: Cluster) -> None:
    """The sleeping server gives the same answer as before its sleep."""
    require_programs(cluster)
    job = llama_server(cluster, OPTION, "--gres=gpu:1")
    answer = complete(cluster, NODE)
    assert len(answer) == TOKENS
    sleep_in_place(cluster, job, MODEL_MIB)
    assert complete(cluster, NODE) == answer
    wait_awake(cluster, job)
    cluster.exec("login", "scancel", "--full", job, user="alice")
    cluster.wait_for_output(job, "memory=intact")


def test_notebook_server_wakes_on_request(cluster: Cluster) -> None:
    """A client runs code in a kernel of the sleeping server, which still has its variables and its GPU memory."""
    job = notebook_server(cluster, OPTION, *ON_GPU)
    result = connection(cluster, NODE)
    kernel, printed = run_cell(cluster, result, "new", CELL)
    assert printed == "ready\n"
    sleep_in_place(cluster, job, CELL_MIB)
    assert run_cell(cluster, result, kernel, CELL_AGAIN) == (kernel, "42 True True\n")
    wait_awake(cluster, job)
    cluster.exec("login", "scancel", job, user="alice")


def test_editor_wakes_on_request(cluster: Cluster) -> None:
    """A client resumes its session with the sleeping code-server, and that of its extension host."""
    require_programs(cluster)
    job = editor_server(cluster, OPTION, *ON_GPU)
    wait_until("status names it", lambda: kinds(cluster, job), lambda rows: "VS Code server (code-server)" in rows)
    sleep_in_place(cluster, job, MEMORY_MIB)
    assert editor_sessions(cluster, NODE, "known") == ["ok", "started"]
    wait_awake(cluster, job)
    assert cluster.output(job).count("Launched Extension Host Process") == 1
    cluster.exec("login", "scancel", job, user="alice")


def test_terminal_wakes_on_attach(cluster: Cluster) -> None:
    """The program in the terminal continues at its next step, and the shell still has its variables."""
    job = cluster.submit(OPTION, *ON_GPU, script=TERMINAL)
    cluster.wait_for_output(job, "ready")
    result = "/home/alice/slurm-terminal.out"
    type_lines(cluster, job, "answer=41", f"{PROGRAM} >{result}; echo answer $((answer + 1)) in $(tty) >>{result}")
    wait_until("it counts", lambda: steps(cluster.run("login", "cat", result).stdout))
    wait_until(
        "status names the row", lambda: kinds(cluster, job), lambda rows: "terminal (tmux) in a batch job" in rows
    )
    sleep_in_place(cluster, job, MEMORY_MIB)
    asleep = steps(cluster.exec("login", "cat", result))
    type_lines(cluster, job)
    wait_awake(cluster, job)
    wait_until(
        "the program continues",
        lambda: steps(cluster.exec("login", "cat", result)),
        lambda seen: len(seen) > len(asleep),
    )
    cluster.exec("login", "touch", END, user="alice")
    wait_until("the shell continues", lambda: "answer 42 in /dev/pts/" in cluster.exec("login", "cat", result))
    type_lines(cluster, job, "exit")
    cluster.wait_for_state(job, "COMPLETED")
    printed = cluster.exec("login", "cat", result)
    assert "memory=intact" in printed
    assert steps(printed) == list(range(1, len(steps(printed)) + 1))
