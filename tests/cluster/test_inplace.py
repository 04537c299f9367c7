"""Jobs that sleep in place: servers that share a GPU, woken by requests, commands or Slurm, also after failures."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.servers import (
    BY_HAND,
    GPU_MIB,
    JOURNAL,
    NODE,
    SERVER_MIB,
    ask,
    fault,
    frozen,
    in_place,
    init_gpus,
    inplace_configured,
    ledger,
    put_to_sleep,
    serve,
    used_mib,
    wait_awake,
)
from cluster.sleepers import wait_for_agents, wake

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def small_gpus(cluster: Cluster) -> Iterator[None]:
    """Emulate GPUs whose memory fits into host memory several times."""
    cluster.clear()
    init_gpus(cluster, "--memory-mib", str(GPU_MIB))
    yield
    cluster.clear()
    init_gpus(cluster)


def test_sleeping_server_frees_gpu_and_wakes_on_request(cluster: Cluster) -> None:
    """The server is frozen and shown as asleep, and its GPU memory is free; the next request is answered as usual."""
    server = serve(cluster, 8001)
    held = sum(used_mib(cluster))
    put_to_sleep(cluster, server.job)
    assert sum(used_mib(cluster)) <= held - SERVER_MIB
    assert frozen(cluster, server.job)
    assert cluster.job(server.job)["JobState"] == "RUNNING"
    seen = in_place(cluster, server.job)
    assert seen is not None
    assert (seen["wakes_on_request"], seen["asked"], seen["failure"]) == (True, None, None)
    shown = cluster.exec("login", "slurm-affinode", "status", server.job, user="alice")
    assert "in host memory, wakes on a request" in shown
    wait_until(
        "its comment says so",
        lambda: cluster.comment(server.job),
        lambda printed: printed.startswith("asleep in place: requested by alice"),
    )
    answer, took = ask(cluster, server.url)
    assert answer == {"prediction": server.prediction, "number": 2}
    print(f"a request to a sleeper was answered after {took:.3f} s, 0.1 s of it service")
    wait_awake(cluster, server.job)
    assert sum(used_mib(cluster)) == held


def test_health_check_named_by_the_site_does_not_wake_server(cluster: Cluster) -> None:
    """It comes from another node; a request from the login node is answered."""
    address = cluster.exec("c2", "hostname", "--ip-address").split()[0]
    with inplace_configured(cluster, probes=[address]):
        server = serve(cluster, 8002)
        put_to_sleep(cluster, server.job)
        for _ in range(3):
            probe = cluster.run("c2", "curl", "--silent", "--max-time", "1", server.url)
            assert probe.returncode == 28  # a timeout: it is connected, and not answered
        time.sleep(2)
        assert frozen(cluster, server.job)
        answer, _ = ask(cluster, server.url)
        assert answer["prediction"] == server.prediction
        wait_awake(cluster, server.job)


# Opens a connection, prints a line, and sends a request on command. Arguments: host, port.
ASK_LATE = r"""
exec 3<>/dev/tcp/$1/$2
touch /home/alice/inplace-open
until [ -e /home/alice/inplace-ask ]; do sleep 0.05; done
printf 'POST /predict HTTP/1.0\r\n\r\n' >&3
timeout 30 cat <&3
"""


def test_idle_server_sleeps_and_open_connection_wakes_it(cluster: Cluster) -> None:
    """The server sleeps after its idle window; data on a connection opened before counts as a request."""
    server = serve(cluster, 8001, "--gpu-suspend-idle=2s,mode=inplace,when=always")
    cluster.shell("login", "rm -f /home/alice/inplace-*")
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(cluster.shell, "login", ASK_LATE, NODE, "8001", user="alice", timeout_s=90)
        wait_until(
            "a connection is open",
            lambda: cluster.run("login", "test", "-e", "/home/alice/inplace-open").returncode == 0,
        )
        seen = wait_until("it sleeps", lambda: in_place(cluster, server.job), lambda item: item is not None)
        assert seen is not None
        assert seen["why"].startswith("idle ")
        cluster.shell("login", "touch /home/alice/inplace-ask")
        assert json.loads(late.result().splitlines()[-1])["prediction"] == server.prediction
    wait_until("it sleeps again", lambda: in_place(cluster, server.job), lambda item: item is not None)


# A server whose master kills workers that have sent no heartbeat for three seconds.
WATCHED = """#!/opt/slurm-affinode/bin/python
#SBATCH --partition=gpu --nodelist={node} --gres=shard:6
import mmap, os, selectors, signal, socket, struct, sys, time
sys.path.insert(0, "{workloads}")
import gpu

WORKERS = 3
listener = socket.create_server(("", 8001), backlog=64)
listener.setblocking(False)
moved = mmap.mmap(-1, 8 * WORKERS)

def move(number):
    struct.pack_into("d", moved, 8 * number, time.monotonic())

def work(number):
    device = gpu.Gpu()
    device.hold(50 << 20)
    gpu.log("listening")
    poll = selectors.DefaultSelector()
    poll.register(listener, selectors.EVENT_READ)
    while True:
        move(number)
        for _ in poll.select(0.5):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                continue
            with connection:
                connection.setblocking(True)
                connection.recv(65536)
                device.compute(0.05)
                connection.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\nanswered")

workers = []
for number in range(WORKERS):
    move(number)
    pid = os.fork()
    if pid == 0:
        work(number)
    workers.append(pid)
time.sleep(5)  # they begin
while True:
    time.sleep(0.1)
    for number, pid in enumerate(workers):
        if time.monotonic() - struct.unpack_from("d", moved, 8 * number)[0] > 3:
            gpu.log("has not moved", worker=pid)
            os.kill(pid, signal.SIGKILL)
"""


def test_watchdog_does_not_kill_workers_after_sleep(cluster: Cluster) -> None:
    """The master checks its workers, frozen for longer than its timeout, only after their next heartbeat."""
    job = cluster.submit(BY_HAND, script=WATCHED.format(node=NODE, workloads=WORKLOADS))
    cluster.wait_for_output(job, "listening")
    wait_until("all listen", lambda: cluster.output(job).count("listening"), lambda result: result == 3)
    for _ in range(3):
        put_to_sleep(cluster, job)
        time.sleep(4)  # longer than its timeout
        printed = cluster.shell("login", f"curl --silent --show-error --max-time 60 http://{NODE}:8001/", user="alice")
        assert printed == "answered"
        wait_awake(cluster, job)
    assert "has not moved" not in cluster.output(job)


def test_four_servers_take_turns_with_one_gpu(cluster: Cluster) -> None:
    """Each uses 60 % of the memory and gets bursts of requests; time and number of moves are bounded."""
    option = "--gpu-suspend-idle=1s,mode=inplace,when=pressure"
    servers = []
    for number in range(4):
        servers.append(serve(cluster, 8001 + number, option))
        put_to_sleep(cluster, servers[-1].job)
    places = {cluster.shell("login", 'curl --silent "$1/health"', server.url) for server in servers}
    assert len({json.loads(place)["gpu"] for place in places}) == 1
    began = time.time()
    bursts = 12
    chance = random.Random(7)  # noqa: S311 - a load, not a secret
    with ThreadPoolExecutor(8) as pool:
        futures = []
        for _ in range(bursts):
            server = chance.choice(servers)
            futures += [(server, pool.submit(ask, cluster, server.url)) for _ in range(chance.randint(1, 3))]
            time.sleep(chance.expovariate(1))
        results = [(server, *future.result()) for server, future in futures]
    for server, answer, _ in results:
        assert answer["prediction"] == server.prediction
    for server in servers:  # each request is counted once: none was served twice or lost
        numbers = sorted(answer["number"] for item, answer, _ in results if item is server)
        assert numbers == list(range(2, 2 + len(numbers)))
    took = sorted(seconds for _, _, seconds in results)
    moves = cluster.logs(began)[NODE].count(": asleep in place")
    print(
        f"{len(results)} requests in {bursts} bursts: median {statistics.median(took):.2f} s, "
        f"p90 {took[int(len(took) * 0.9)]:.2f} s, worst {took[-1]:.2f} s; {moves} moves out"
    )
    assert moves <= bursts
    assert took[-1] < 30
    assert max(used_mib(cluster)) <= GPU_MIB


# A server with a script that reports the signals it receives.
REPORTING_SCRIPT = """#!/bin/bash
#SBATCH --partition=gpu --nodelist={node} --gres=shard:6
trap 'echo got USR1' USR1
trap 'echo got TERM; kill $child; exit 9' TERM
{workloads}/model_server.py --port 8001 --memory-mib {memory} --service-ms 100 &
child=$!
while kill -0 $child 2>/dev/null; do wait $child; done
"""


def reporting_job(cluster: Cluster, *options: str) -> str:
    """Return a sleeping job that reports signals."""
    script = REPORTING_SCRIPT.format(node=NODE, workloads=WORKLOADS, memory=SERVER_MIB)
    job = cluster.submit(BY_HAND, *options, script=script)
    cluster.wait_for_output(job, "listening")
    put_to_sleep(cluster, job)
    return job


def test_canceled_sleeper_ends_in_order(cluster: Cluster) -> None:
    """The script receives the signal as an awake job would; the job leaves nothing behind."""
    job = reporting_job(cluster)
    cluster.exec("login", "scancel", "--full", job, user="alice")
    cluster.wait_for_output(job, "got TERM")
    cluster.wait_for_state(job, "CANCELLED")
    wait_until("its GPU is free", lambda: sum(len(gpu.pids) for gpu in cluster.gpus(NODE)), lambda left: left == 0)
    wait_until("its journal is closed", lambda: cluster.run(NODE, "ls", JOURNAL).stdout == "")


def test_sleeper_receives_signal_and_time_limit(cluster: Cluster) -> None:
    """The signal of ``--signal`` wakes the job and is delivered; the job falls asleep again until its time limit."""
    began = time.monotonic()
    job = reporting_job(cluster, "--time=60", "--signal=B:USR1@35")
    # Slurm may send the signal a minute early, so the limit is lowered only now that the job sleeps.
    minutes = int(time.monotonic() - began + 40) // 60 + 1
    cluster.exec("login", "scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    cluster.wait_for_output(job, "got USR1", timeout_s=100)
    wait_awake(cluster, job)
    put_to_sleep(cluster, job)
    wait_until("it is over time", lambda: cluster.job(job)["JobState"], lambda state: state == "TIMEOUT", timeout_s=150)
    cluster.wait_for_output(job, "got TERM")


def test_wake_command_is_restricted_to_owner(cluster: Cluster) -> None:
    """Only the owner of the job may use the command, which restores the GPU memory."""
    server = serve(cluster, 8001)
    put_to_sleep(cluster, server.job)
    refused = cluster.run("login", "slurm-affinode", "wake", server.job, user="bob")
    assert refused.returncode == 1
    assert "not yours" in refused.stderr
    again = cluster.run("login", "slurm-affinode", "suspend", server.job, user="alice")
    assert "sleeps in place" in again.stderr
    wake(cluster, server.job)
    wait_awake(cluster, server.job)
    assert sum(used_mib(cluster)) >= SERVER_MIB
    assert ask(cluster, server.url)[0] == {"prediction": server.prediction, "number": 2}


def test_sigcont_from_outside_wakes_sleeper(cluster: Cluster) -> None:
    """The agent detects SIGCONT from outside and restores the GPU memory of the job."""
    server = serve(cluster, 8001)
    put_to_sleep(cluster, server.job)
    if (in_place(cluster, server.job) or {})["frozen_by"] != "signals":
        pytest.skip("SIGCONT does not thaw processes that the cgroup freezer holds")
    cluster.shell(NODE, "pkill -CONT -u alice -f [m]odel_server.py")
    wait_awake(cluster, server.job)
    assert ask(cluster, server.url)[0]["number"] == 2


def test_request_without_agent_is_answered_later(cluster: Cluster) -> None:
    """The request waits in the kernel until the next agent is running."""
    server = serve(cluster, 8001)
    put_to_sleep(cluster, server.job)
    with ThreadPoolExecutor(1) as pool:
        cluster.shell(NODE, "kill -KILL $(cat /run/slurm-affinode-agent.pid)")
        request = pool.submit(ask, cluster, server.url)
        wait_for_agents(cluster)
        assert request.result()[0] == {"prediction": server.prediction, "number": 2}


def test_failed_restore_is_reported_and_retried(cluster: Cluster) -> None:
    """The job stays asleep and intact, with the reason in status and comment; a retry answers the request."""
    server = serve(cluster, 8001)
    put_to_sleep(cluster, server.job)
    with ThreadPoolExecutor(1) as pool:
        with fault(cluster, "restore-fails"):
            request = pool.submit(ask, cluster, server.url)
            seen = wait_until(
                "it is reported",
                lambda: in_place(cluster, server.job),
                lambda item: item is not None and item["failure"],
            )
            assert seen is not None
            assert "move the GPU memory" in seen["failure"]
            wait_until(
                "its comment says so",
                lambda: cluster.comment(server.job),
                lambda printed: printed.startswith("not woken: "),
            )
            assert not request.done()
        assert request.result()[0] == {"prediction": server.prediction, "number": 2}
    assert ledger(cluster, server.job)[-1].get("restored_ms") is not None


def test_wake_waits_for_occupied_gpu_memory(cluster: Cluster) -> None:
    """Status shows the reason and the sizes; the request is answered once the memory is free."""
    server = serve(cluster, 8001)
    put_to_sleep(cluster, server.job)
    gpu = json.loads(cluster.shell("login", 'curl --silent --max-time 30 "$1/health"', server.url))["gpu"]
    wait_awake(cluster, server.job)
    put_to_sleep(cluster, server.job)
    taker = f"CUDA_VISIBLE_DEVICES={gpu} {WORKLOADS}/squatter.py --memory-mib 1300"
    cluster.shell(NODE, f"setsid sh -c '{taker} >/tmp/taker 2>&1 & echo $! >/tmp/taker.pid' </dev/null >/dev/null 2>&1")
    try:
        wait_until("the memory is taken", lambda: max(used_mib(cluster)), lambda used: used >= 1300)
        with ThreadPoolExecutor(1) as pool:
            request = pool.submit(ask, cluster, server.url)
            seen = wait_until(
                "it waits", lambda: in_place(cluster, server.job), lambda item: item is not None and item["waits"]
            )
            assert seen is not None
            assert "is left there: other processes hold the rest" in seen["waits"]
            assert not request.done()
            cluster.shell(NODE, "kill -KILL $(cat /tmp/taker.pid)")
            assert request.result()[0] == {"prediction": server.prediction, "number": 2}
    finally:
        cluster.shell(NODE, "kill -KILL $(cat /tmp/taker.pid) 2>/dev/null || true")


def test_job_with_srun_steps_is_refused(cluster: Cluster) -> None:
    """The processes of a step belong to another slurmstepd."""
    job = cluster.submit(
        "--partition=gpu", f"--nodelist={NODE}", "--gres=shard:6", BY_HAND,
        wrap=f"srun {WORKLOADS}/model_server.py --port 8001 --memory-mib {SERVER_MIB}",
    )  # fmt: skip
    cluster.wait_for_output(job, "listening")
    refused = cluster.run("login", "slurm-affinode", "suspend", job, user="alice")
    assert refused.returncode == 1
    assert "srun" in refused.stderr


def test_prolog_wakes_sleepers_on_its_gpus(cluster: Cluster) -> None:
    """With ``inplace.wake_at_prolog``, the sleeper is awake before the new job begins."""
    with inplace_configured(cluster, wake_at_prolog=True):
        server = serve(cluster, 8001)
        put_to_sleep(cluster, server.job)
        job = cluster.submit(
            "--partition=gpu", f"--nodelist={NODE}", "--gres=shard:1", wrap=f"slurm-affinode status {server.job} --json"
        )
        cluster.wait_for_state(job, "COMPLETED")
        assert json.loads(cluster.output(job))["jobs"][0]["in_place"] is None


def test_simultaneous_servers_start_one_after_the_other(cluster: Cluster) -> None:
    """By default, each server starts once another one sleeps, so none runs out of GPU memory."""
    option = "--gpu-suspend-idle=1s,mode=inplace,when=pressure"
    jobs = [
        cluster.submit(
            "--partition=gpu", f"--nodelist={NODE}", "--gres=shard:6", option,
            wrap=f"exec {WORKLOADS}/model_server.py --port {8001 + number} --memory-mib {SERVER_MIB}",
        )
        for number in range(3)
    ]  # fmt: skip
    for job in jobs:
        cluster.wait_for_output(job, "listening", timeout_s=120)
    for number in range(3):
        assert ask(cluster, f"http://{NODE}:{8001 + number}")[0]["number"] == 1


def test_process_that_waits_for_file_lock_wakes_sleeper(cluster: Cluster) -> None:
    """A process on the node waits for a lock that the job holds; the job does not sleep while it waits."""
    lock = "/home/alice/inplace.lock"
    job = cluster.submit(
        "--partition=gpu", f"--nodelist={NODE}", "--gres=shard:6", BY_HAND,
        wrap=f"exec flock {lock} {WORKLOADS}/model_server.py --port 8001 --memory-mib {SERVER_MIB}",
    )  # fmt: skip
    cluster.wait_for_output(job, "listening")
    put_to_sleep(cluster, job)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(cluster.run, NODE, "flock", "--timeout=60", lock, "true", user="alice")
        wait_awake(cluster, job)
        refused = cluster.run("login", "slurm-affinode", "suspend", job, user="alice")
        assert "waits for its lock on a file" in refused.stderr
        cluster.exec("login", "scancel", job, user="alice")
        assert waits.result().returncode == 0


def test_steady_load_on_one_server_does_not_starve_another(cluster: Cluster) -> None:
    """With ``inplace.max_turn``, a busy server makes room for one that waits, and its own requests are answered too."""
    option = "--gpu-suspend-idle=1h,mode=inplace,when=pressure"
    with inplace_configured(cluster, max_turn="4s", wake_deadline="1s", on_deadline="end"):
        waiting = serve(cluster, 8001, option)
        put_to_sleep(cluster, waiting.job)
        busy = serve(cluster, 8002, option)
        cluster.shell("login", "rm -f /home/alice/inplace-*")
        stop = "/home/alice/inplace-stop"
        load = f"until [ -e {stop} ]; do curl --silent --max-time 60 -XPOST {busy.url}/predict || exit 1; done"
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(cluster.shell, "login", load, user="alice", timeout_s=200)
            taken = [ask(cluster, waiting.url) for _ in range(2)]
            assert not answers.done()
            cluster.shell("login", f"touch {stop}")
            lines = answers.result().replace("}{", "}\n{").splitlines()
        assert [answer["number"] for answer, _ in taken] == [2, 3]
        numbers = [json.loads(line)["number"] for line in lines]
        assert numbers == list(range(2, 2 + len(numbers)))  # none was lost
        print(f"beside steady load, requests were answered after {', '.join(f'{took:.1f} s' for _, took in taken)}")
        for server in (waiting, busy):
            assert cluster.job(server.job)["JobState"] == "RUNNING"
