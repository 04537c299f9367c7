"""Runs programs for a process that has files open on file systems that may not answer.

A program that is started gets a copy of all open files first, and closes those that it does not inherit. On a FUSE that
stalls, and on NFS whose server has gone, that close does not return: nothing could be started as long as such a file
is open, of a tier or of a user's job. So a process of its own, which has no such files, starts them (``main``).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Collection, Mapping, Sequence

from slurm_affinode import process
from slurm_affinode.errors import UnreachableError
from slurm_affinode.process import REAP_S, Completed

_MOST_FDS = 253
"""The kernel passes no more with one message (``SCM_MAX_FD``)."""
_MORE, _LAST = b"+", b"."
_LATE_S = 2 * REAP_S


class Starter:
    """The process that starts programs. May be used by several threads."""

    def __init__(self) -> None:
        """Start it, while nothing is open that may hang. Raises ``UnreachableError``."""
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = process.of_module("slurm_affinode.starter", str(theirs.fileno()))
            self._child = process.Child(argv, pass_fds=(theirs.fileno(),))

    def close(self) -> None:
        """Let it end; what it has started goes on."""
        self._control.close()
        self._child.close()

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        stdin: bytes | None = None,
        pass_fds: Collection[int] = (),
        group: bool = False,
    ) -> Completed:
        """As ``process.run``. Raises ``OSError`` where the starter has ended."""
        request = {
            "argv": list(argv), "timeout_s": timeout_s, "env": None if env is None else dict(env), "check": check,
            "stdin": None if stdin is None else stdin.decode("latin-1"), "group": group, "fds": list(pass_fds),
        }  # fmt: skip
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours:
            with theirs, self._lock:
                socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
            ours.settimeout(timeout_s + _LATE_S)
            try:
                left = list(pass_fds)
                while True:
                    batch, left = left[:_MOST_FDS], left[_MOST_FDS:]
                    socket.send_fds(ours, [_MORE if left else _LAST], batch)
                    if not left:
                        break
                ours.sendall(json.dumps(request).encode())
                ours.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda: ours.recv(1 << 20), b""))
            except TimeoutError:
                raise UnreachableError(f"{argv[0]}: no answer within {timeout_s:g} s") from None
            except OSError as error:  # it may run already, and is not to run twice
                raise UnreachableError(f"{argv[0]}: cannot be started: {error.strerror}") from None
        head, _, output = answer.partition(b"\n")
        if not head:
            raise UnreachableError(f"{argv[0]}: who waited for its end was ended")
        said = json.loads(head)
        if "error" in said:
            raise UnreachableError(said["error"], hint=said["hint"])
        return Completed(tuple(argv), said["status"], output, said["stderr"])


def main(control_fd: int) -> None:
    """Until who asks has gone: for each request a process that runs the program and waits for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    with socket.socket(fileno=control_fd) as control:
        while True:
            data, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return
            if os.fork() == 0:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                with contextlib.suppress(OSError), socket.socket(fileno=fds[0]) as asked:
                    _serve(asked)
                os._exit(0)
            for fd in fds:
                os.close(fd)


def _serve(asked: socket.socket) -> None:
    process.raise_file_limit()
    passed: list[int] = []
    mark = _MORE
    while mark == _MORE:
        mark, some, _, _ = socket.recv_fds(asked, 1, _MOST_FDS)
        passed += some
    request = json.loads(b"".join(iter(lambda: asked.recv(1 << 16), b"")))
    numbers = request["fds"]
    # Out of the way of the numbers that they are to have.
    above = max([2, *numbers]) + 1
    talk = socket.socket(fileno=fcntl.fcntl(asked.detach(), fcntl.F_DUPFD_CLOEXEC, above))
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in passed]
    os.closerange(3, above)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    stdin = request["stdin"]
    try:
        done = process.run(
            request["argv"], timeout_s=request["timeout_s"], env=request["env"], check=request["check"],
            stdin=None if stdin is None else stdin.encode("latin-1"), pass_fds=numbers, group=request["group"],
        )  # fmt: skip
    except UnreachableError as error:
        talk.sendall(json.dumps({"error": str(error), "hint": error.hint}).encode() + b"\n")
    else:
        head = {"status": done.returncode, "stderr": done.stderr}
        talk.sendall(json.dumps(head).encode() + b"\n" + done.stdout)
    talk.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
