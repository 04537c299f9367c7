"""Programs that the jobs of tests run: a language model, a terminal, a notebook server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cluster.driver import WORKLOADS, Cluster, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = "/opt/slurm-affinode/bin/python"
PROGRAMS = "/opt/programs/bin"
START_S = 240.0
"""Timeout of programs that import PyTorch, which takes seconds of CPU time in each process."""


def require_programs(cluster: Cluster) -> None:
    """Skip the test where PyTorch, llama.cpp and Ray are not installed."""
    if cluster.release != "24.11":
        pytest.skip("only the image with Slurm 24.11 has PyTorch, llama.cpp and Ray")


# --- a language model

MAKE_MODEL = REPOSITORY.parent / "shared" / "tools" / "tiny-engines" / "make_gguf.py"
MODEL_MIB = 512
PORT = 8321
TOKENS = 24
REQUEST = {
    "prompt": "one two three", "n_predict": TOKENS, "temperature": 0, "cache_prompt": False, "return_tokens": True,
}  # fmt: skip


def llama_server(cluster: Cluster, *options: str) -> str:
    """Submit a server of llama.cpp to c1; return the job ID once it listens. Skips the test if there is no model."""
    if not MAKE_MODEL.is_file():
        pytest.skip(f"{MAKE_MODEL} does not exist")
    model = "/home/alice/tiny.gguf"
    cluster.exec("login", f"{PROGRAMS}/python", "-", model, user="alice", stdin=MAKE_MODEL.read_text())
    command = f"exec {WORKLOADS}/llama_server.py {model} --port {PORT} --memory-mib {MODEL_MIB}"
    job = cluster.submit("--partition=gpu", "--nodelist=c1", *options, wrap=command)
    cluster.wait_for_output(job, " listening ")
    return job


def complete(cluster: Cluster, node: str) -> list[int]:
    """Send a request from the login node to the language model; return the tokens of its answer."""
    url = f"http://{node}:{PORT}/completion"
    text = cluster.exec(
        "login", "curl", "--silent", "--show-error", "--max-time", "30", "--data", json.dumps(REQUEST), url
    )
    tokens: list[int] = json.loads(text)["tokens"]
    return tokens


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


# --- a notebook

GUIDE = REPOSITORY / "docs" / "open-ondemand.md"
# The parts of Open OnDemand's batch script on which the guide relies.
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
    printed = ""
    while True:
        message = json.loads(await connection.read_message())
        if message["parent_header"].get("msg_id") != sent:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            printed += content["text"]
        elif kind == "error":
            printed += "\n".join(content["traceback"])
        elif kind == "status" and content["execution_state"] == "idle":
            break
    connection.close()
    print(json.dumps({"kernel": kernel, "printed": printed}))

asyncio.run(asyncio.wait_for(main(), 40))
"""
CELL_MIB = 64
CELL = f"""
import os, sys
sys.path.insert(0, "{WORKLOADS}")
import gpu
device = gpu.Gpu()
buffer = device.hold({CELL_MIB} << 20)
answer, process = 41, os.getpid()
print("ready")
"""
CELL_AGAIN = """
device.activate()
print(answer + 1, process == os.getpid(), device.intact(buffer))
"""


def guide() -> dict[str, str]:
    """Return the scripts in the guide for Open OnDemand by name, with Jupyter Server instead of JupyterLab."""
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
    """Run code in a kernel through the paths of Open OnDemand; return the ID of the kernel and the output."""
    base = f"/node/{found['host']}/{found['port']}/"
    text = cluster.exec("login", PYTHON, "-c", CLIENT, found["password"], base, kernel, code, user="alice")
    answer = json.loads(text)
    return answer["kernel"], answer["printed"]


def notebook_server(cluster: Cluster, *options: str) -> str:
    """Submit a Jupyter server, started with the scripts of the guide for Open OnDemand; return the ID of the job."""
    scripts = guide()
    assert set(scripts) == {"before.sh", "script.sh", "after.sh"}
    cluster.shell("login", "rm -rf ~/session; mkdir ~/session", user="alice")
    for name, script in scripts.items():
        cluster.exec("login", "tee", f"/home/alice/session/{name}", user="alice", stdin=script)
        cluster.exec("login", "chmod", "+x", f"/home/alice/session/{name}", user="alice")
    job = cluster.submit(*options, script=TEMPLATE)
    cluster.wait_for_output(job, "is running at")
    return job
