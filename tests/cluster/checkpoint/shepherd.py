"""PID 1 of a namespace, in place of the shepherd: start a command as a user, if one is given, and reap processes.

``shepherd.py STATUS UID GROUPS [COMMAND...]``: run under ``unshare --pid --mount --fork``. Writes the wait status of
the root process to STATUS.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    """Start the command, then reap processes forever."""
    status, uid, command = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4:]
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.chown(status.parent, uid, uid)
    # The IDs of the user, like the real shepherd: the restored process tree is compared with PID 1.
    os.setgroups([int(word) for word in sys.argv[3].split(",") if word])
    os.setgid(uid)
    os.setuid(uid)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the change of user has cleared the setting of unshare
    root = 0
    if command:
        root = os.fork()
        if root == 0:
            os.closerange(3, 1000)
            os.setsid()
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            os.execvp(command[0], command)  # noqa: S606
    status.with_suffix(".ready").touch()
    while True:
        try:
            pid, ended = os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.01)
            continue
        if not command or pid == root:
            with status.open("a") as file:
                file.write(f"{pid} {ended}\n")


if __name__ == "__main__":
    main()
