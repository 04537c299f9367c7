"""In-place sleep under limits: host memory, wake deadline, number of jobs awake at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.servers import (
    BY_HAND,
    CONTEXT_MIB,
    GPU_MIB,
    JOURNAL,
    NODE,
    SERVER_MIB,
    Server,
    ask,
    in_place,
    init_gpus,
    inplace_configured,
    put_to_sleep,
    serve,
    used_mib,
)
from cluster.sleepers import kill_agent, status, wait_for_agents, wake

pytestmark = pytest.mark.cluster


@contextmanager
def gpus_of(cluster: Cluster, mib: int) -> Iterator[None]:
    """Emulate GPUs with this much memory while the context lasts."""
    cluster.clear()
    init_gpus(cluster, "--memory-mib", str(mib))
    try:
        yield
    finally:
        cluster.clear()
        init_gpus(cluster)


@contextmanager
def taken(cluster: Cluster, mib: int) -> Iterator[None]:
    """Hold this much memory on each GPU of the node by processes outside of jobs while the context lasts."""
    for gpu in (0, 1):
        begin = f"CUDA_VISIBLE_DEVICES={gpu} {WORKLOADS}/squatter.py --memory-mib {mib} & echo $! >/tmp/taker.{gpu}.pid"
        cluster.shell(NODE, f"setsid sh -c '{begin}' </dev/null >/dev/null 2>&1")
    try:
        wait_until("the memory is taken", lambda: min(used_mib(cluster)), lambda used: used >= mib)
        yield
    finally:
        cluster.shell(NODE, "kill -KILL $(cat /tmp/taker.0.pid) $(cat /tmp/taker.1.pid) || true")


def test_insufficient_host_memory_is_refused_without_side_effects(cluster: Cluster) -> None:
    """The command and status give the reason with the sizes; the server is not affected."""
    free_mib = int(cluster.shell(NODE, "awk '/^MemAvailable:/ {print int($2 / 1024)}' /proc/meminfo"))
    with gpus_of(cluster, 3 * free_mib):
        option = "--gpu-suspend-idle=1s,mode=inplace,when=always"
        server = serve(cluster, 8001, option, memory_mib=2 * free_mib)
        refused = cluster.run("login", "slurm-affinode", "suspend", server.job, user="alice")
        assert refused.returncode == 1
        assert "does not fit into the node's free memory" in refused.stderr

        def against() -> list[str]:
            row = status(cluster, server.job)["jobs"][0]
            return [refusal["code"] for refusal in (row["next"] or {"against": []})["against"]]

        wait_until("status shows the refusal", against, lambda codes: "host-memory" in codes)
        shown = cluster.exec("login", "slurm-affinode", "status", server.job, user="alice")
        assert "host-memory: its GPU memory (" in shown
        assert cluster.run(NODE, "ls", JOURNAL).stdout == ""
        assert ask(cluster, server.url)[0] == {"prediction": server.prediction, "number": 2}


@pytest.mark.parametrize("ends", [False, True])
def test_wake_deadline_is_enforced(cluster: Cluster, ends: bool) -> None:
    """Depending on the configuration, the job is shown as overdue, or is ended with the reason in its comment."""
    rules = {"wake_deadline": "3s", "on_deadline": "end" if ends else "wait"}
    with gpus_of(cluster, GPU_MIB), inplace_configured(cluster, **rules):
        server = serve(cluster, 8001, BY_HAND)
        put_to_sleep(cluster, server.job)
        with taken(cluster, 1300):
            if ends:
                wake(cluster, server.job)
                cluster.wait_for_state(server.job, "CANCELLED", timeout_s=60)
                comment = cluster.exec("login", "scontrol", "--oneliner", "show", "job", server.job)
                assert "ended by slurm-affinode: it has waited for " in comment
                wait_until("its journal is closed", lambda: cluster.run(NODE, "ls", JOURNAL).stdout == "")
                return
            with ThreadPoolExecutor(1) as pool:
                request = pool.submit(ask, cluster, server.url)
                seen = wait_until(
                    "it is overdue", lambda: in_place(cluster, server.job), lambda item: bool(item and item["overdue"])
                )
                assert seen is not None
                assert "is left there" in seen["waits"]
                shown = cluster.exec("login", "slurm-affinode", "status", server.job, user="alice")
                assert "longer than the site's deadline" in shown
                cluster.shell(NODE, "kill -KILL $(cat /tmp/taker.0.pid) $(cat /tmp/taker.1.pid)")
                assert request.result()[0] == {"prediction": server.prediction, "number": 2}


def test_queue_of_wake_requests_survives_agent_restart(cluster: Cluster) -> None:
    """The order of requests, not that of job IDs, survives the restart; both requests are answered."""
    with gpus_of(cluster, GPU_MIB):
        later = serve(cluster, 8001, BY_HAND)
        put_to_sleep(cluster, later.job)
        first = serve(cluster, 8002, BY_HAND)
        put_to_sleep(cluster, first.job)

        def waits(server: Server) -> str:
            return str((in_place(cluster, server.job) or {}).get("waits") or "")

        with taken(cluster, 1300), ThreadPoolExecutor(2) as pool:
            requests = [pool.submit(ask, cluster, first.url)]
            wait_until("the first one waits", lambda: waits(first))
            requests.append(pool.submit(ask, cluster, later.url))
            behind = f"job {first.job} is ahead of it in the queue"
            wait_until("the other one waits behind it", lambda: waits(later), lambda why: why == behind)
            kill_agent(cluster, NODE)
            wait_for_agents(cluster)
            wait_until("it still does", lambda: waits(later), lambda why: why == behind)
            assert "is left there" in waits(first)
            cluster.shell(NODE, "kill -KILL $(cat /tmp/taker.0.pid) $(cat /tmp/taker.1.pid)")
            wait_until("the first one is awake", lambda: in_place(cluster, first.job), lambda seen: seen is None)
            put_to_sleep(cluster, first.job)  # this frees memory for the other one
            answers = [outcome.result()[0] for outcome in requests]
        assert answers == [{"prediction": answer.prediction, "number": 2} for answer in (first, later)]


def test_awake_limit_is_enforced(cluster: Cluster) -> None:
    """Two servers that fit on the GPU together take turns if the site limits the memory of awake jobs."""
    option = "--gpu-suspend-idle=1s,mode=inplace,when=pressure"
    with gpus_of(cluster, 2 * GPU_MIB), inplace_configured(cluster, awake_limit_pct=50):
        item = serve(cluster, 8001, option, memory_mib=SERVER_MIB)
        put_to_sleep(cluster, item.job)
        other = serve(cluster, 8002, option, memory_mib=SERVER_MIB)
        places = [cluster.shell("login", 'curl --silent "$1/health"', server.url) for server in (item, other)]
        assert len({json.loads(place)["gpu"] for place in places}) == 1
        for number in (2, 3, 4):
            for server in (item, other):
                assert ask(cluster, server.url)[0] == {"prediction": server.prediction, "number": number}
                assert max(used_mib(cluster)) < 2 * (SERVER_MIB + CONTEXT_MIB)


def test_scancel_ends_sleeper_at_once(cluster: Cluster) -> None:
    """The job ends within seconds, even if its GPU memory could not be restored, and leaves nothing behind."""
    with gpus_of(cluster, GPU_MIB):
        server = serve(cluster, 8001, BY_HAND)
        put_to_sleep(cluster, server.job)
        with taken(cluster, 1300):
            cluster.exec("login", "scancel", server.job, user="alice")
            cluster.wait_for_state(server.job, "CANCELLED")
            wait_until("its journal is closed", lambda: cluster.run(NODE, "ls", JOURNAL).stdout == "")
            left = cluster.run(NODE, "pgrep", "-u", "alice", "-f", "[m]odel_server")
            assert left.stdout == ""
