"""Programs that the jobs of tests run: a language model, a terminal, a notebook server, an editor."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cluster.driver import WORKLOADS, Cluster, wait_until
from cluster.sleepers import UNTIL_FINISH

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = "/opt/slurm-affinode/bin/python"
PROGRAMS = "/opt/programs/bin"
START_S = 240.0
"""Timeout of programs that import PyTorch, which takes seconds of CPU time in each process."""


def require_programs(cluster: Cluster) -> None:
    """Skip the test where PyTorch, llama.cpp, Ray and code-server are not installed."""
    if cluster.release != "24.11":
        pytest.skip("only the image with Slurm 24.11 has PyTorch, Open MPI, llama.cpp, Ray and code-server")


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
    result = re.findall(r"`template/(\w+\.sh)\.erb`[^`]*(?:`[^`]+`[^`]*)*?```sh\n(.*?)```", text, re.DOTALL)
    return {name: script.replace("jupyter lab", f"{PYTHON} -m jupyter_server") for name, script in result}


def connection(cluster: Cluster, host: str) -> dict[str, str]:
    """Return the contents of connection.yml, once it names the host."""
    text = wait_until(
        f"connection.yml names {host}",
        lambda: cluster.run("login", "cat", "/home/alice/session/connection.yml").stdout,
        lambda text: f"host: {host}\n" in text,
    )
    return dict(line.split(": ") for line in text.splitlines())


def run_cell(cluster: Cluster, server: dict[str, str], kernel: str, code: str) -> tuple[str, str]:
    """Run code in a kernel through the paths of Open OnDemand; return the ID of the kernel and the output."""
    base = f"/node/{server['host']}/{server['port']}/"
    text = cluster.exec("login", PYTHON, "-c", CLIENT, server["password"], base, kernel, code, user="alice")
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


# --- an editor

EDITOR_PORT = 8443
EDITOR = f"""#!/bin/bash
{PROGRAMS}/code-server --auth none --bind-addr 0.0.0.0:{EDITOR_PORT} --disable-telemetry --disable-update-check &
{WORKLOADS}/idle_after.py --busy 0 --idle 1 {UNTIL_FINISH} --again 0.1
kill %1
"""
"""code-server, and a program with GPU memory, as in a terminal of the editor."""
# Opens sessions of VS Code's protocol, or resumes them: control messages of JSON, each below 13 bytes with its type and
# size. Arguments: host, port, ID of each session; "new" or "known". Prints the last answer for each session.
EDITOR_CLIENT = rf"""
import asyncio, json, pathlib, struct, sys
from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect

host, port, first, second, state = sys.argv[1:]
product = pathlib.Path("{PROGRAMS}/../code-server/node_modules/code-server/lib/vscode/product.json")
commit = json.loads(product.read_text())["commit"]
header = struct.Struct(">BIII")
CONTROL, MANAGEMENT, EXTENSION_HOST = 2, 1, 2

async def answer(connection):
    received = b""
    while True:
        message = await connection.read_message()
        if message is None:
            return {{"type": "closed"}}
        received += message
        while len(received) >= header.size:
            kind, _, _, size = header.unpack_from(received)
            if len(received) < header.size + size:
                break
            data, received = received[header.size : header.size + size], received[header.size + size :]
            if kind == CONTROL:
                return json.loads(data)

async def send(connection, message):
    data = json.dumps(message).encode()
    await connection.write_message(header.pack(CONTROL, 0, 0, len(data)) + data, binary=True)

async def session(token, kind):
    again = str(state == "known").lower()
    url = f"ws://{{host}}:{{port}}/?reconnectionToken={{token}}&reconnection={{again}}&skipWebSocketFrames=false"
    connection = await websocket_connect(HTTPRequest(url))
    await send(connection, {{"type": "auth", "auth": "0" * 20, "data": "client"}})
    signed = (await answer(connection))["data"]
    await send(connection, {{
        "type": "connectionType", "commit": commit, "signedData": signed, "desiredConnectionType": kind,
        "args": {{"language": "en", "env": {{}}}},
    }})
    found = await answer(connection)
    connection.close()
    return found

async def main():
    print(json.dumps([await session(first, MANAGEMENT), await session(second, EXTENSION_HOST)]))

asyncio.run(asyncio.wait_for(main(), 60))
"""
SESSIONS = ("00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002")
"""IDs of the session of a window, and of that of its extension host."""


def editor_server(cluster: Cluster, *options: str) -> str:
    """Submit code-server, open the sessions of a client with it and close their connections; return the job ID."""
    job = cluster.submit("--cpus-per-task=2", *options, script=EDITOR)
    cluster.wait_for_output(job, "HTTP server listening on", timeout_s=START_S)
    cluster.wait_for_output(job, "step number=1")
    assert editor_sessions(cluster, "c1", "new") == ["ok", "started"]
    return job


def editor_sessions(cluster: Cluster, node: str, state: str) -> list[str]:
    """Open the sessions of a client (``new``), or resume them (``known``); return the answers of the server."""
    text = cluster.exec(
        "login", PYTHON, "-c", EDITOR_CLIENT, node, str(EDITOR_PORT), *SESSIONS, state, user="alice", timeout_s=90
    )
    return [record.get("reason") or record.get("type", "started") for record in json.loads(text)]
