"""Interactive programs in batch jobs: a terminal and a notebook server keep their state when the job moves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.sleepers import BY_HAND, suspend, wait_asleep, wait_for_agents, wake

pytestmark = pytest.mark.cluster

PYTHON = "/opt/slurm-affinode/bin/python"
ON_C1 = ("--partition=gpu", "--gres=gpu:1", "--nodelist=c1")


@pytest.fixture(autouse=True)
def agents(cluster: Cluster) -> None:
    """Wait until the agents respond."""
    wait_for_agents(cluster)


def move(cluster: Cluster, job: str) -> None:
    """Suspend a job on c1 and restore it on c2."""
    suspend(cluster, job)
    wait_asleep(cluster, job)
    cluster.exec("login", "scontrol", "update", f"JobId={job}", "ReqNodeList=c2", user="alice")
    wake(cluster, job)
    wait_until(
        "it is restored on c2",
        lambda: cluster.output(job),
        lambda said: "slurm-affinode: restored on c2" in said,
    )


# --- a terminal

TERMINAL = """#!/bin/bash
tmux -L "job-$SLURM_JOB_ID" new-session -d -s main
echo ready
while tmux -L "job-$SLURM_JOB_ID" has-session 2>/dev/null; do sleep 1; done
"""
ATTACH = "srun --jobid=$1 --overlap --pty tmux -L job-$1 attach"
# Types lines into the terminal of a job, and detaches. Arguments: job, lines.
TYPE = rf"""
attach="{ATTACH}"
type_lines() {{
  sleep 2
  for line in "$@"; do printf '%s\r' "$line"; sleep 1; done
  printf '\002d'
  sleep 1
}}
shift
type_lines "$@" | TERM=xterm script --quiet --return --command "$attach" /dev/null
"""


def type_lines(cluster: Cluster, job: str, *lines: str) -> str:
    """Attach to the terminal of a job from the login node, type lines, and detach; return the screen's output."""
    return cluster.shell("login", TYPE, job, *lines, user="alice")


def test_terminal_in_batch_job_moves_with_its_programs(cluster: Cluster) -> None:
    """A shell with a variable and a program with GPU memory: after a move, the terminal is attached on the new node."""
    job = cluster.submit(BY_HAND, *ON_C1, script=TERMINAL)
    cluster.wait_for_output(job, "ready")
    result = "/home/alice/slurm-terminal.out"
    program = f"{WORKLOADS}/idle_after.py --busy 0 --idle 20 --again 1 >{result}"
    type_lines(cluster, job, "answer=41", f"{program}; echo answer $((answer + 1)) in $(tty) >>{result}")
    wait_until("the program runs", lambda: cluster.run("login", "cat", result).stdout, lambda said: "step" in said)
    move(cluster, job)
    said = wait_until(
        "the shell continues", lambda: cluster.run("login", "cat", result).stdout, lambda said: "answer" in said
    )
    assert "memory=intact" in said
    assert "answer 42 in /dev/pts/" in said
    type_lines(cluster, job, f"echo attached on $(cat /etc/hostname) with $answer >>{result}", "stty size")
    assert "with 41\n" in cluster.exec("login", "cat", result)
    cluster.exec("login", "scancel", job, user="alice")


def test_attached_terminal_prevents_suspension(cluster: Cluster) -> None:
    """While somebody is attached, the job is in use."""
    job = cluster.submit(BY_HAND, *ON_C1, script=TERMINAL)
    cluster.wait_for_output(job, "ready")
    attach = f'(sleep 60 | TERM=xterm script --quiet --command "{ATTACH}" /dev/null >/dev/null 2>&1 &)'
    cluster.shell("login", attach, job, user="alice")
    done = wait_until(
        "the step is known",
        lambda: cluster.run("login", "slurm-affinode", "suspend", job, user="alice"),
        lambda done: "it runs srun steps" in done.stderr,
    )
    assert done.returncode == 1
    assert cluster.job(job)["Restarts"] == "0"
    cluster.exec("login", "scancel", job, user="alice")


# --- a notebook

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "open-ondemand.md"
# Open OnDemand's batch script, as far as the guide relies on it.
TEMPLATE = """#!/bin/bash
mkdir -p "$HOME/session" && cd "$HOME/session"
export host port
create_yml() { printf 'host: %s\nport: %s\npassword: %s\n' "$host" "$port" "$password" >connection.yml; }
find_port() { echo 8899; }
create_passwd() { tr -cd '[:alnum:]' </dev/urandom | head -c"$1"; }
host=$(hostname)
source ./before.sh
./script.sh &
SCRIPT_PID=$!
source ./after.sh
create_yml
wait ${SCRIPT_PID}
"""
# Runs code in a kernel of the server and prints its output. Arguments: password, path, ID of the kernel or "new", code.
CLIENT = r"""
import asyncio, json, sys, uuid
from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.websocket import websocket_connect

password, base, kernel, code = sys.argv[1:]
host = base.split("/")[2]
headers = {"Authorization": f"token {password}"}

async def main():
    global kernel
    if kernel == "new":
        request = HTTPRequest(f"http://{host}:8899{base}api/kernels", method="POST", body="{}", headers=headers)
        kernel = json.loads((await AsyncHTTPClient().fetch(request)).body)["id"]
    url = f"ws://{host}:8899{base}api/kernels/{kernel}/channels"
    connection = await websocket_connect(HTTPRequest(url, headers=headers))
    sent = uuid.uuid4().hex
    content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
    header = {"msg_id": sent, "username": "", "session": sent, "msg_type": "execute_request", "version": "5.3"}
    await connection.write_message(json.dumps({
        "channel": "shell", "header": header, "parent_header": {}, "metadata": {}, "content": content,
    }))
    said = ""
    while True:
        message = json.loads(await connection.read_message())
        if message["parent_header"].get("msg_id") != sent:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            said += content["text"]
        elif kind == "error":
            said += "\n".join(content["traceback"])
        elif kind == "status" and content["execution_state"] == "idle":
            break
    connection.close()
    print(json.dumps({"kernel": kernel, "said": said}))

asyncio.run(asyncio.wait_for(main(), 40))
"""
FIRST = f"""
import os, sys
sys.path.insert(0, "{WORKLOADS}")
import gpu
device = gpu.Gpu()
buffer = device.hold(64 << 20)
answer, process = 41, os.getpid()
print("ready")
"""
AGAIN = """
device.activate()
print(answer + 1, process == os.getpid(), device.intact(buffer))
"""


def guide() -> dict[str, str]:
    """Return the scripts in the guide for Open OnDemand, by name; Jupyter Server takes the place of JupyterLab."""
    text = GUIDE.read_text(encoding="utf-8")
    found = re.findall(r"`template/(\w+\.sh)\.erb`[^`]*(?:`[^`]+`[^`]*)*?```sh\n(.*?)```", text, re.DOTALL)
    return {name: script.replace("jupyter lab", f"{PYTHON} -m jupyter_server") for name, script in found}


def connection(cluster: Cluster, host: str) -> dict[str, str]:
    """Return the contents of connection.yml, once it names the host."""
    text = wait_until(
        f"connection.yml names {host}",
        lambda: cluster.run("login", "cat", "/home/alice/session/connection.yml").stdout,
        lambda text: f"host: {host}\n" in text,
    )
    return dict(line.split(": ") for line in text.splitlines())


def run_cell(cluster: Cluster, found: dict[str, str], kernel: str, code: str) -> tuple[str, str]:
    """Run code in a kernel, by the paths of Open OnDemand; return the ID of the kernel and the output."""
    base = f"/node/{found['host']}/{found['port']}/"
    text = cluster.exec("login", PYTHON, "-c", CLIENT, found["password"], base, kernel, code, user="alice")
    answer = json.loads(text)
    return answer["kernel"], answer["said"]


def test_notebook_kernel_moves_with_its_variables(cluster: Cluster) -> None:
    """A Jupyter server with a kernel that holds GPU memory, started with the scripts of the guide for Open OnDemand.

    A client reconnects at the address of the new node, and all links of its pages lead there.
    """
    scripts = guide()
    assert set(scripts) == {"before.sh", "script.sh", "after.sh"}
    cluster.shell("login", "rm -rf ~/session; mkdir ~/session", user="alice")
    for name, script in scripts.items():
        cluster.exec("login", "tee", f"/home/alice/session/{name}", user="alice", stdin=script)
        cluster.exec("login", "chmod", "+x", f"/home/alice/session/{name}", user="alice")
    job = cluster.submit(BY_HAND, *ON_C1, script=TEMPLATE)
    cluster.wait_for_output(job, "is running at")
    before = connection(cluster, "c1")
    kernel, said = run_cell(cluster, before, "new", FIRST)
    assert said == "ready\n"
    move(cluster, job)
    after = connection(cluster, "c2")
    assert (after["port"], after["password"]) == (before["port"], before["password"])
    assert run_cell(cluster, after, kernel, AGAIN) == (kernel, "42 True True\n")
    assert run_cell(cluster, after, "new", "print(6 * 7)")[1] == "42\n"
    page = cluster.exec("login", "curl", "--silent", "http://c2:8899/node/c2/8899/login")
    assert "/node/c2/8899/static/" in page
    assert "/node/c1/" not in page
    cluster.exec("login", "scancel", job, user="alice")
