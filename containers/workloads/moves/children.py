#!/usr/bin/python3
"""Children: one that has ended and waits to be reaped, orphans, process groups, sessions, and stopped ones."""

import os
import signal
import subprocess
import time

from moving import require, run, same

ended = subprocess.Popen(["sh", "-c", "exit 42"])
stopped = subprocess.Popen(["sleep", "100000"])
stopped.send_signal(signal.SIGSTOP)
session = subprocess.Popen(["sleep", "100000"], start_new_session=True)
group = subprocess.Popen(["sleep", "100000"], process_group=0)
reader, writer = os.pipe()
subprocess.run(["sh", "-c", f"sleep 100000 & echo $! >&{writer}"], pass_fds=(writer,))
orphan = int(os.read(reader, 20))
time.sleep(0.3)


def state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def check():
    same((os.getsid(session.pid), os.getpgid(group.pid)), (session.pid, group.pid), "session and group of children")


def is_in(states, pid, what):
    """Require a state, which a process may have a moment later than this one runs: a restore releases one by one."""
    for _ in range(100):
        if state(pid) in states:
            return
        time.sleep(0.05)
    require(False, f"{what}: its state is {state(pid)}")


def finally_check():
    is_in("Z", ended.pid, "the child that has ended")
    is_in("T", stopped.pid, "the child that is stopped")
    is_in("SRD", orphan, "the orphan")


run(check, finally_check)
same(ended.wait(), 42, "the status of the child that has ended")
for child in (stopped, session, group):
    child.kill()
    same(child.wait(), -9, "the status of a child that was killed")
os.kill(orphan, 9)
