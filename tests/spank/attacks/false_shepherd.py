#!/usr/bin/env python3
"""Speaks the protocol of shepherds without being one. Needs only Python.

false_shepherd.py hello JOBID                   sends hello to the agent, prints its answer
false_shepherd.py exec SHEPHERD JOBID           executes a shepherd, as the plugin would; the script sleeps
false_shepherd.py through STARTER ARGUMENT...   executes itself with these arguments through a setuid starter
"""

from __future__ import annotations

import os
import socket
import sys
import time

SOCKET = "/run/slurm-affinode/shepherd.sock"
OPTION = "window=900,util=0,mode=requeue,wake=auto,when=always"


def hello(job: str) -> None:
    """Pose as the shepherd of a later attempt of the job, which waits for an answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(SOCKET)
        link.settimeout(10)
        text = f"hello\nversion=1\njob={job}\nrestarts=99\nimage=0\nroot=0\noption={OPTION}"
        socket.send_fds(link, [text.encode()], [0, 1, 2])
        try:
            answer = link.recv(4096)
        except TimeoutError:
            answer = b"silence"
        print(f"pid {os.getpid()}: the agent replied {answer!r}", flush=True)
        time.sleep(2)  # gives the agent time to act on this process


def become(shepherd: str, job: str) -> None:
    """Execute a shepherd with a keeper that does not respond."""
    keeper_end, shepherd_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.set_inheritable(shepherd_end.fileno(), True)
    os.set_inheritable(keeper_end.fileno(), True)  # keeps the keeper's end open as long as the shepherd runs
    os.execv(  # noqa: S606
        shepherd,
        (shepherd, str(shepherd_end.fileno()), job, "1", "0", "300", SOCKET, OPTION, "--", "/bin/sleep", "8"),
    )


if __name__ == "__main__":
    if sys.argv[1] == "hello":
        hello(sys.argv[2])
    elif sys.argv[1] == "exec":
        become(sys.argv[2], sys.argv[3])
    else:
        os.execv(sys.argv[2], (sys.argv[2], "/usr/bin/python3", sys.argv[0], *sys.argv[3:]))  # noqa: S606
