"""Signals pending for a stopped process that accepts them synchronously."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from namespace_job import Job, needs_root
from waiting import DEADLINE_S, wait_until

from slurm_affinode.suspension.inplace.freezer import SIGNALS, LinuxFreezer

# Accepts its signals synchronously, by a thread or through a descriptor, and logs them.
TAKES = """
import ctypes, os, select, signal, sys, threading
wanted = {signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
def wait():
    while True:
        log(signal.sigwait(wanted))
def read():
    mask = (ctypes.c_uint64 * 16)(sum(1 << one - 1 for one in wanted))
    fd = ctypes.CDLL(None).signalfd(-1, ctypes.byref(mask), 0)
    while True:
        log(int.from_bytes(os.read(fd, 128)[:4], "little"))
def log(number):
    with open(sys.argv[1], "a") as file:
        file.write(f"{int(number)} ")
threading.Thread(target={"wait": wait, "read": read}[sys.argv[2]]).start()
log(0)
threading.Event().wait()
"""


@needs_root
@pytest.mark.parametrize("how", ["wait", "read"])
def test_signal_accepted_synchronously_is_seen(tmp_path: Path, how: str) -> None:
    """Signals accepted by sigwait(3) or signalfd(2) stay pending until the process has accepted them."""
    (tmp_path / "takes.py").write_text(TAKES)
    log = tmp_path / "log"
    job = Job(log, f"exec {sys.executable} {tmp_path}/takes.py $0 {how}")
    try:
        freezer = LinuxFreezer()
        freezer.freeze(job.init, job.started, SIGNALS, timeout_s=DEADLINE_S)
        pids = [member.pid for member in freezer.members(job.init, job.started)]
        assert freezer.calls(pids) == frozenset()
        os.kill(pids[-1], signal.SIGTERM)
        assert freezer.calls(pids) == {(pids[-1], signal.SIGTERM)}
        freezer.thaw(job.init, job.started, SIGNALS, stay=())
        wait_until("it has taken it", log.read_text, lambda text: text == "0 15 ")
        assert freezer.calls(pids) == frozenset()
    finally:
        job.end()
