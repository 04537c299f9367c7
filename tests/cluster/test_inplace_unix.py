"""A server on a UNIX socket that sleeps in place: the kernel does not count data on its open connections."""

from __future__ import annotations

import pytest
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.phase_jobs import passed, send_request
from cluster.phases import stopping_at, wait_for_stop
from cluster.servers import BY_HAND, NODE, in_place, put_to_sleep, wait_awake
from cluster.sleepers import journals, wait_for_agents, wake

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PATH = r"\0inplace-unix"
GO, ANSWERS = "/run/inplace-unix.go", "/run/inplace-unix.answers"
ATTEMPTS = 5

# Answers each line on a connection that stays open.
SERVER = f"""#!/opt/slurm-affinode/bin/python
import socket, sys
sys.path.insert(0, "{WORKLOADS}")
import gpu

device = gpu.Gpu()
device.hold(200 << 20)
listener = socket.socket(socket.AF_UNIX)
listener.bind("{PATH}")
listener.listen()
gpu.log("listening")
while True:
    connection, _ = listener.accept()
    while received := connection.recv(100):
        device.compute(0.05)
        connection.sendall(received.upper())
"""

# Sends a request, and a second one on the same connection on command.
CLIENT = f"""
import os, socket, time
client = socket.socket(socket.AF_UNIX)
client.settimeout(60)
client.connect("{PATH}")
client.sendall(b"first")
print(client.recv(100).decode(), flush=True)
while not os.path.exists("{GO}"):
    time.sleep(0.02)
client.sendall(b"second")
print(client.recv(100).decode(), flush=True)
"""


def start_client(cluster: Cluster) -> None:
    """Start the client and wait for its first answer."""
    cluster.shell(NODE, 'rm -f "$1"; setsid -f python3 -c "$3" >"$2" 2>&1 </dev/null', GO, ANSWERS, CLIENT)
    wait_until(
        "it was answered", lambda: cluster.run(NODE, "cat", ANSWERS).stdout, lambda printed: printed == "FIRST\n"
    )


def wait_for_second(cluster: Cluster) -> str:
    """Return what the client has printed once its second request has succeeded or failed."""
    return wait_until(
        "it is answered",
        lambda: cluster.run(NODE, "cat", ANSWERS).stdout,
        lambda printed: "\n" in printed[len("FIRST\n") :],
    )


@pytest.mark.parametrize("phase", ["locked", "parked", "frozen"])
def test_data_received_while_falling_asleep_is_answered(cluster: Cluster, phase: str) -> None:
    """Data on a connection opened before wakes the server; an idle connection does not."""
    wait_for_agents(cluster)
    job = cluster.submit("--partition=gpu", f"--nodelist={NODE}", "--gres=shard:6", BY_HAND, script=SERVER)
    cluster.wait_for_output(job, "listening")
    for _ in range(ATTEMPTS):
        start_client(cluster)
        with stopping_at(cluster, phase, NODE):
            send_request(cluster, "suspend --no-wait", job)
            stopped = wait_for_stop(cluster, lambda: passed(cluster, phase)) is not None
            cluster.shell(NODE, f"touch {GO}; sleep 0.5")
        assert wait_for_second(cluster) == "FIRST\nSECOND\n"
        wait_awake(cluster, job)
        if stopped:
            break
    start_client(cluster)
    put_to_sleep(cluster, job)
    cluster.shell(NODE, "sleep 2")
    seen = in_place(cluster, job)
    assert seen is not None
    assert seen["asked"] is None
    assert journals(cluster, NODE) == ["frozen"]
    wake(cluster, job)
    wait_awake(cluster, job)
    cluster.shell(NODE, f"touch {GO}")
    assert wait_for_second(cluster) == "FIRST\nSECOND\n"
