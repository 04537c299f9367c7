"""Model servers that sleep in place on the shared GPUs of one node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cluster.driver import GPU_NODES, WORKLOADS, Cluster, wait_until
from cluster.sleepers import CONFIG, SHARED, kill_agent, status, suspend, wait_for_agents

NODE = "c1"
GPU_MIB = 2000
"""Memory of an emulated GPU."""
CONTEXT_MIB = 414
"""GPU memory of one CUDA context."""
SERVER_MIB = 800
"""GPU memory of a server; with its context, it takes 60 % of a GPU."""
BY_HAND = "--gpu-suspend-idle=1h,mode=inplace,when=always"
"""Options of a server that is suspended by command and woken by requests."""

EXPORTER_PID = "/run/slurm-affinode-exporter.pid"
EXPORTER_OPTIONS = "/etc/default/slurm-affinode-exporter"
JOURNAL = "/var/lib/slurm-affinode/journal"

# Sends a request to a server, and prints its answer and the time that it took. Arguments: URL.
ASK = r'curl --silent --show-error --max-time 60 --write-out "\n%{time_total}" --request POST "$1/predict"'

# Prints the states of the processes of a job of alice's. Arguments: its raw ID.
STATES = r"""
for pid in $(pgrep -u alice); do
  tr '\0' '\n' <"/proc/$pid/environ" | grep -qx "SLURM_JOB_ID=$1" && ps -o stat= -o args= -p "$pid"
done 2>/dev/null | grep -v shepherd | cut -c1
"""


def init_gpus(cluster: Cluster, *options: str) -> None:
    """Replace the emulated GPUs of every node, and restart the daemons."""
    for node in GPU_NODES:
        cluster.exec(
            node, "gpu-emulatorctl", "init", "--force", "--gpus", "2", "--model", "h100-80g", "--seed", node,
            "--sample-period-ms", "200", *options,
        )  # fmt: skip
        restart_exporter(cluster, node)
        kill_agent(cluster, node)
    wait_for_agents(cluster)


def restart_exporter(cluster: Cluster, node: str) -> None:
    """End the exporter of a node, and wait until the next one responds."""
    before = cluster.exec(node, "cat", EXPORTER_PID)
    cluster.shell(node, 'kill "$1"; kill -CONT "$1"', before.strip())  # it may be stopped (Cluster.scrape)
    responds = 'cat "$1"; curl --silent --fail --output /dev/null http://localhost:9402/metrics'
    wait_until(
        f"another exporter responds on {node}",
        lambda: cluster.run(node, "sh", "-c", responds, "test", EXPORTER_PID),
        lambda done: done.returncode == 0 and done.stdout != before,
    )


@contextmanager
def exporting_engines(cluster: Cluster, period: str) -> Iterator[None]:
    """Run the exporter of c1 with ``--serving``, so that it finds engines in jobs."""
    text = f'EXPORTER_OPTIONS="--serving --serving-period {period}"'
    cluster.shell(NODE, 'echo "$1" >"$2"', text, EXPORTER_OPTIONS)
    restart_exporter(cluster, NODE)
    try:
        yield
    finally:
        cluster.exec(NODE, "rm", EXPORTER_OPTIONS)
        restart_exporter(cluster, NODE)


@contextmanager
def fault(cluster: Cluster, kind: str) -> Iterator[None]:
    """Inject this fault into the emulated driver of c1."""
    cluster.exec(NODE, "gpu-emulatorctl", "fault", kind)
    try:
        yield
    finally:
        cluster.exec(NODE, "gpu-emulatorctl", "fault", "clear")


@contextmanager
def inplace_configured(cluster: Cluster, **keys: object) -> Iterator[None]:
    """Run the agent of c1 with these keys in ``[inplace]``."""
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
    insert = r'cp "$1" "$1.own"; printf "%s" "$2" | sed -i "/^\[inplace\]/r /dev/stdin" "$1"'
    cluster.shell(NODE, insert, CONFIG, lines)
    kill_agent(cluster, NODE)
    wait_for_agents(cluster)
    try:
        yield
    finally:
        cluster.shell(NODE, 'mv "$1.own" "$1"', CONFIG)
        kill_agent(cluster, NODE)
        wait_for_agents(cluster)


def ledger(cluster: Cluster, job: str) -> list[dict[str, Any]]:
    """Return the rows of a job in the ledger of c1."""
    text = cluster.run(NODE, "cat", f"{SHARED}/ledger/{NODE}.jsonl").stdout
    rows = [json.loads(line) for line in text.splitlines()]
    return [row for row in rows if row["job_id"] == int(job)]


@dataclass(frozen=True)
class Server:
    """A model server and its expected answer."""

    job: str
    port: int
    prediction: int

    @property
    def url(self) -> str:
        """The URL from the login node."""
        return f"http://{NODE}:{self.port}"


def ask(cluster: Cluster, url: str) -> tuple[dict[str, int], float]:
    """Send one request from the login node; return the answer and the time in seconds."""
    body, _, took = cluster.shell("login", ASK, url, user="alice", timeout_s=90).rpartition("\n")
    return json.loads(body), float(took)


def serve(cluster: Cluster, port: int, option: str = BY_HAND, *options: str, memory_mib: int = SERVER_MIB) -> Server:
    """Start a server on a shared GPU of c1, wait until it answers a request, and return it."""
    job = cluster.submit(
        "--partition=gpu", f"--nodelist={NODE}", "--gres=shard:6", option, *options,
        wrap=f"exec {WORKLOADS}/model_server.py --port {port} --memory-mib {memory_mib} --service-ms 100",
    )  # fmt: skip
    cluster.wait_for_output(job, "listening")
    answer, _ = ask(cluster, f"http://{NODE}:{port}")
    return Server(job, port, answer["prediction"])


def in_place(cluster: Cluster, job: str) -> dict[str, Any] | None:
    """Return the ``in_place`` part of a job's status; ``None``: it is awake.

    A new agent knows the job only after its shepherd has reconnected.
    """
    rows = wait_until(f"an agent knows job {job}", lambda: status(cluster, job).get("jobs"))
    result: dict[str, Any] | None = rows[0]["in_place"]
    return result


def put_to_sleep(cluster: Cluster, job: str) -> None:
    """Suspend the job with a command, and wait until it sleeps."""
    suspend(cluster, job)
    wait_until(f"job {job} sleeps", lambda: in_place(cluster, job), lambda seen: seen is not None)


def wait_awake(cluster: Cluster, job: str, timeout_s: float = 60) -> None:
    """Wait until the job runs with its GPU memory."""
    wait_until(f"job {job} is awake", lambda: in_place(cluster, job), lambda seen: seen is None, timeout_s=timeout_s)


def used_mib(cluster: Cluster) -> list[int]:
    """Return the GPU memory in use on c1, per GPU."""
    return [gpu.used_mib for gpu in cluster.gpus(NODE)]


def frozen(cluster: Cluster, job: str) -> bool:
    """Return whether all processes of a sleeping job on c1 are stopped by signals or in a frozen cgroup."""
    seen = in_place(cluster, job)
    assert seen is not None
    if seen["frozen_by"] == "signals":
        # D: also frozen by Slurm (scontrol suspend) in a cgroup of version 1.
        return process_states(cluster, job) in ({"T"}, {"D"} if seen["suspended_by_slurm"] else {"T"})
    return "frozen 1" in cluster.exec(NODE, "cat", f"{seen['frozen_by']}/cgroup.events")


def process_states(cluster: Cluster, job: str) -> set[str]:
    """Return the states of a job's processes on c1, without its shepherd; processes that have ended do not count."""
    return set(cluster.shell(NODE, STATES, cluster.job(job)["JobId"]).split()) - {"Z"}
