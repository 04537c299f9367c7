#!/usr/bin/env python3
"""A program that asks a service as glibc's module for SSSD does: ``name_client.py PATH``.

It keeps its connection, asks when the user's file ``slurm-ask-N.out`` appears (N counts from 1), and prints the answer
to its last line. Its socket is that of a child too, as after a fork. At the end of the stream it connects again.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path


def connected() -> socket.socket:
    """Return a connection to the service."""
    made = socket.socket(socket.AF_UNIX)
    made.connect(sys.argv[1])
    return made


def main() -> None:
    """Ask for ever."""
    sock = connected()
    if os.fork() == 0:
        time.sleep(1e6)
    number = 1
    while True:
        question = Path.home() / f"slurm-ask-{number}.out"
        if not question.exists():
            time.sleep(0.05)
            continue
        sock.setblocking(False)
        try:
            closed = sock.recv(1) == b""
        except BlockingIOError:
            closed = False
        sock.setblocking(True)
        if closed:
            print("the connection was closed", flush=True)
            sock.close()
            sock = connected()
        lines = question.read_bytes().splitlines(keepends=True)
        sock.sendall(b"".join(lines))
        with sock.makefile("rb") as reader:
            answers = [reader.readline().decode().strip() for _ in lines]
        print("answer", number, answers[-1], flush=True)
        number += 1


main()
