#!/usr/bin/python3
"""A terminal whose foreground process group has ended, as between the end of a command and the prompt of its shell."""

import os
import pty
import signal
import time

from moving import require, run, same

leader, terminal = pty.fork()
if leader == 0:
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    command = os.fork()
    if command == 0:
        os.setpgid(0, 0)
        os.tcsetpgrp(0, os.getpid())
        os._exit(0)
    os.waitpid(command, 0)
    while True:
        time.sleep(0.2)
        os.write(1, b"still here\n")

while os.tcgetpgrp(terminal) in (0, leader):
    time.sleep(0.1)
while os.path.exists(f"/proc/{os.tcgetpgrp(terminal)}"):
    time.sleep(0.1)
lost = os.tcgetpgrp(terminal)


def check():
    require(b"still here" in os.read(terminal, 4096), "the output of the leader")
    require(os.tcgetpgrp(terminal) in (lost, leader), "the foreground group")
    same(os.getsid(leader), leader, "the session of the leader")


run(check)
os.kill(leader, signal.SIGKILL)
