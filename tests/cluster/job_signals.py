#!/usr/bin/python3
"""Record the signals that each process of a job gets, until it is killed.

A batch script for nodes of the test cluster. Its processes are the script, a child in its process group, and one in
a session of its own. Each writes ``slurm-signals-JOB-NAME.out`` in the working directory: a line per signal, with
its sender. With the argument ``end`` the script ends when the others are ready; after a requeue it ends at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def record(name: str) -> None:
    """Write a line for each signal until the process is killed."""
    path = Path(f"slurm-signals-{os.environ['SLURM_JOB_ID']}-{name}.out")
    with path.open("w", buffering=1) as file:
        file.write("ready\n")
        while True:
            info = signal.sigwaitinfo(signal.valid_signals())
            if info.si_signo != signal.SIGCHLD:
                sender = "root" if info.si_uid == 0 else "the user"
                where = {0: "outside", 1: "PID 1"}.get(info.si_pid, "a process")
                file.write(f"{signal.Signals(info.si_signo).name} from {where} of {sender}\n")


def main() -> None:
    """Start the processes."""
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    for name in ("group", "session"):
        if os.fork() == 0:
            if name == "session":
                os.setsid()
            record(name)
    if sys.argv[1:] == ["end"]:
        job = os.environ["SLURM_JOB_ID"]
        while not all(Path(f"slurm-signals-{job}-{name}.out").exists() for name in ("group", "session")):
            time.sleep(0.05)
        return
    record("script")


main()
