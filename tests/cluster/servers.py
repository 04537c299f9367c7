"""Model servers that sleep in place, on shared GPUs of one node, as stories need them."""

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
"""Of an emulated GPU here."""
CONTEXT_MIB = 414
"""What a context takes of it."""
SERVER_MIB = 800
"""With its context 60 % of a GPU."""
BY_HAND = "--gpu-suspend-idle=1h,mode=inplace,when=always"
"""Nothing sleeps by itself; a request wakes."""

JOURNAL = "/var/lib/slurm-affinode/journal"

# Asks a server once, prints what it answered and how long that took. Arguments: URL.
ASK = r'curl --silent --show-error --max-time 60 --write-out "\n%{time_total}" --request POST "$1/predict"'


def init_gpus(cluster: Cluster, *options: str) -> None:
    """Other emulated GPUs on every node, and daemons that see them."""
    for node in GPU_NODES:
        cluster.exec(
            node, "gpu-emulatorctl", "init", "--force", "--gpus", "2", "--model", "h100-80g", "--seed", node,
            "--sample-period-ms", "200", *options,
        )  # fmt: skip
        cluster.shell(node, "kill $(cat /run/slurm-affinode-exporter.pid)")
        kill_agent(cluster, node)
    wait_for_agents(cluster)


@contextmanager
def fault(cluster: Cluster, kind: str) -> Iterator[None]:
    """The emulated driver of c1 fails in this way."""
    cluster.exec(NODE, "gpu-emulatorctl", "fault", kind)
    try:
        yield
    finally:
        cluster.exec(NODE, "gpu-emulatorctl", "fault", "clear")


@contextmanager
def inplace_configured(cluster: Cluster, **keys: object) -> Iterator[None]:
    """An agent on c1 with these keys in ``[inplace]``."""
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
    cluster.shell(NODE, 'cp "$1" "$1.own"; printf "\n[inplace]\n%s" "$2" >>"$1"', CONFIG, lines)
    kill_agent(cluster, NODE)
    wait_for_agents(cluster)
    try:
        yield
    finally:
        cluster.shell(NODE, 'mv "$1.own" "$1"', CONFIG)
        kill_agent(cluster, NODE)
        wait_for_agents(cluster)


def ledger(cluster: Cluster, job: str) -> list[dict[str, Any]]:
    """What the ledger of c1 says of a job."""
    text = cluster.run(NODE, "cat", f"{SHARED}/ledger/{NODE}.jsonl").stdout
    rows = [json.loads(line) for line in text.splitlines()]
    return [row for row in rows if row["job_id"] == int(job)]


@dataclass(frozen=True)
class Server:
    """A model server, and what it has to answer."""

    job: str
    port: int
    prediction: int

    @property
    def url(self) -> str:
        """As the login node reaches it."""
        return f"http://{NODE}:{self.port}"


def ask(cluster: Cluster, url: str) -> tuple[dict[str, int], float]:
    """One request from the login node: the answer, and the seconds that it took."""
    body, _, took = cluster.shell("login", ASK, url, user="alice", timeout_s=90).rpartition("\n")
    return json.loads(body), float(took)


def serve(cluster: Cluster, port: int, option: str = BY_HAND, *options: str, memory_mib: int = SERVER_MIB) -> Server:
    """A server on a shared GPU of c1, when it has answered once."""
    job = cluster.submit(
        "--partition=gpu", f"--nodelist={NODE}", "--gres=shard:6", option, *options,
        wrap=f"exec {WORKLOADS}/model_server.py --port {port} --memory-mib {memory_mib} --service-ms 100",
    )  # fmt: skip
    cluster.wait_for_output(job, "listening")
    answer, _ = ask(cluster, f"http://{NODE}:{port}")
    return Server(job, port, answer["prediction"])


def in_place(cluster: Cluster, job: str) -> dict[str, Any] | None:
    """What status says of a sleeper; ``None``: it is awake. A new agent knows it when its shepherd has come again."""
    rows = wait_until(f"an agent knows job {job}", lambda: status(cluster, job).get("jobs"))
    found: dict[str, Any] | None = rows[0]["in_place"]
    return found


def put_to_sleep(cluster: Cluster, job: str) -> None:
    """By hand; it sleeps when this returns."""
    suspend(cluster, job)
    wait_until(f"job {job} sleeps", lambda: in_place(cluster, job), lambda seen: seen is not None)


def wait_awake(cluster: Cluster, job: str, timeout_s: float = 60) -> None:
    """Waits until the job runs, with its GPU memory."""
    wait_until(f"job {job} is awake", lambda: in_place(cluster, job), lambda seen: seen is None, timeout_s=timeout_s)


def used_mib(cluster: Cluster) -> list[int]:
    """GPU memory in use on c1."""
    return [gpu.used_mib for gpu in cluster.gpus(NODE)]


def process_states(cluster: Cluster) -> set[str]:
    """Of the processes of alice's servers on c1."""
    said = cluster.shell(NODE, "ps -u alice -o stat=,args= | grep model_server | grep -v shepherd | cut -c1")
    return set(said.split())
