#!/usr/bin/env python3
"""A fake agent for tests of the plugin and the shepherd. Runs as root, needs only Python.

    fake_agent.py serve BEHAVIOR    answers shepherds; logs their messages to /run/fake-agent.log, one JSON line each
    fake_agent.py suspend JOBID      dumps the job's process tree, requeues the job on hold, kills the tree

Behaviors: ``start`` and ``restore`` answer as the agent does; ``hold`` refuses; ``say`` greets and signals; the
others are faulty: ``silent``, ``garbage``, ``truncated``, ``close``, ``flood``.
"""

from __future__ import annotations

import array
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

SOCKET = Path("/run/slurm-affinode/shepherd.sock")
LOG = Path("/run/fake-agent.log")
STORE = Path("/shared/slurm-affinode/images")
CLUSTER = "affinode"
CRIU = ("--manage-cgroups=ignore", "--shell-job", "--tcp-close", "--ext-unix-sk", "-v4")


def note(**what: object) -> None:
    """Write one line to the log."""
    with LOG.open("a") as out:
        out.write(json.dumps({"time": time.time(), **what}) + "\n")


def run(*argv: str, pass_fds: tuple[int, ...] = ()) -> None:
    """Run a command; a failure is logged."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, pass_fds=pass_fds, check=False)
    if done.returncode != 0:
        note(failed=" ".join(argv), status=done.returncode, said=(done.stdout + done.stderr)[-2000:])
        raise RuntimeError(argv[0])


def inside(init: int, *argv: str, pass_fds: tuple[int, ...] = ()) -> None:
    """Run a command in the PID and mount namespaces of a shepherd."""
    run("nsenter", f"--target={init}", "--pid", "--mount", "--", *argv, pass_fds=pass_fds)


def shepherd_of(job: str) -> int:
    """Return the shepherd of a job: its command line begins with program, descriptor, job."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if len(words) > 2 and words[0].endswith(b"-shepherd") and words[2].decode() == job:
            return int(path.parent.name)
    raise SystemExit(f"no shepherd of job {job}")


def child_of(pid: int) -> int:
    """Return the first child of a process."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def pid_inside(pid: int) -> int:
    """Return the PID of a process in its own PID namespace."""
    match = re.search(r"^NSpid:\s.*\s(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1])


def suspend(job: str) -> None:
    """Dump, requeue on hold, kill, in this order."""
    init = shepherd_of(job)
    root = child_of(init)
    directory = STORE / f"{CLUSTER}.{job}"
    images = directory / "0001.tmp"
    shutil.rmtree(directory, ignore_errors=True)
    images.mkdir(parents=True)
    streams = {number: str(Path(f"/proc/{init}/fd/{number}").readlink()) for number in (0, 1, 2)}
    (images / "streams.json").write_text(json.dumps(streams))
    command = ("criu", "dump", f"--tree={pid_inside(root)}", f"--images-dir={images}", "--leave-stopped", *CRIU)
    inside(init, *command, "--log-file=dump.log", "--timeout=60")
    shutil.copyfile(f"/proc/{init}/fd/1", images / "out.1")
    images.rename(directory / "0001")
    run("scontrol", "requeuehold", job)
    for path in Path("/proc").glob("[0-9]*"):
        try:
            same = (path / "ns/pid").readlink() == Path(f"/proc/{init}/ns/pid").readlink()
        except OSError:
            continue
        if same and int(path.name) != init:
            os.kill(int(path.name), signal.SIGKILL)


def restore(job: str, init: int, streams: list[int]) -> int:
    """Restore the job, including output that Slurm truncated; return the root's PID in the namespace."""
    images = STORE / f"{CLUSTER}.{job}" / "0001"
    paths = json.loads((images / "streams.json").read_text())
    os.ftruncate(streams[1], 0)
    os.lseek(streams[1], 0, os.SEEK_SET)
    os.write(streams[1], (images / "out.1").read_bytes())
    inside(init, "sh", "-c", "echo 10000 >/proc/sys/kernel/ns_last_pid")
    inherit = [
        f"--inherit-fd=fd[{fd}]:{paths[str(number)].lstrip('/')}" for number, fd in enumerate(streams) if number > 0
    ]
    pidfile = Path(f"/run/fake-agent-{job}.pid")
    pidfile.unlink(missing_ok=True)
    command = ("criu", "restore", f"--images-dir={images}", "--restore-detached", f"--pidfile={pidfile}", *CRIU)
    inside(init, *command, "--log-file=restore.log", *inherit, pass_fds=tuple(streams))
    return int(pidfile.read_text())


def answer(connection: socket.socket, behaviour: str, hello: dict[str, str], init: int, streams: list[int]) -> None:
    """Answer the first message of a shepherd."""
    if behaviour == "garbage":
        connection.send(os.urandom(300))
    elif behaviour == "truncated":
        connection.send(b"restored\npi")
    elif behaviour == "flood":
        connection.send(b"say\ntext=" + b"x" * 100_000)
    elif behaviour == "close":
        connection.close()
    elif behaviour == "say":
        connection.send(b"say\ntext=hello from the agent")
        time.sleep(0.5)
        connection.send(b"signal\nnumber=10")
    elif behaviour == "hold" and hello["root"] == "0":
        run("scontrol", "requeuehold", hello["job"])
        connection.send(b"hold\nreason=the image is damaged")
    elif behaviour == "restore" and hello["root"] == "0" and hello["image"] == "1":
        connection.send(b"wait")
        try:
            connection.send(f"restored\npid={restore(hello['job'], init, streams)}".encode())
        except (RuntimeError, OSError) as error:
            note(error=str(error))
            connection.send(b"start\nrestore_failed=1")
    elif behaviour in ("start", "restore") and hello["root"] == "0":
        connection.send(b"start")


def attend(connection: socket.socket, behaviour: str) -> None:
    """Serve one shepherd until it disconnects."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    init = int.from_bytes(peer[:4], sys.byteorder)
    while True:
        packet, control, _flags, _address = connection.recvmsg(4096, socket.CMSG_SPACE(12))
        if not packet:
            return
        streams = array.array("i")
        for _level, _kind, data in control:
            streams.frombytes(data[: len(data) - len(data) % streams.itemsize])
        verb, *lines = packet.decode().split("\n")
        fields = dict(line.split("=", 1) for line in lines)
        note(verb=verb, init=init, streams=len(streams), **fields)
        if verb == "hello":
            answer(connection, behaviour, fields, init, list(streams))
        for fd in streams:
            os.close(fd)


def attend_quietly(connection: socket.socket, behaviour: str) -> None:
    """Serve a shepherd; a broken connection is only logged."""
    try:
        attend(connection, behaviour)
    except OSError as error:
        note(error=str(error))


def serve(behaviour: str) -> None:
    """Accept shepherds until killed."""
    SOCKET.parent.mkdir(mode=0o755, exist_ok=True)
    SOCKET.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(SOCKET))
    SOCKET.chmod(0o666)
    listener.listen(64)
    note(serving=behaviour)
    while True:
        connection, _address = listener.accept()
        threading.Thread(target=attend_quietly, args=(connection, behaviour), daemon=True).start()


if __name__ == "__main__":
    {"serve": serve, "suspend": suspend}[sys.argv[1]](sys.argv[2])
