"""Start programs on behalf of a process that has files open on file systems that may not respond.

A new process first gets a copy of all open files and closes those that the program does not inherit. On a stalled FUSE,
and on NFS whose server is gone, that close blocks: no program could be started while such a file, of a tier or of a
user's job, is open. Programs are therefore started by a separate process without such files (``main``).
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

from slurm_affinode.base import process
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.base.process import REAP_S, Completed

_MOST_FDS = 253
"""The kernel passes at most this many with one message (``SCM_MAX_FD``)."""
_MORE, _LAST = b"+", b"."
_LATE_S = 2 * REAP_S


class Starter:
    """Client of the process that starts programs. May be used by several threads."""

    def __init__(self) -> None:
        """Start the process while no file is open that may block. Raises ``UnreachableError``."""
        self._lock = threading.Lock()
        """Guards the control socket: one request at a time."""
        self._control, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far_end:
            argv = process.of_module("slurm_affinode.base.fork_server", str(far_end.fileno()))
            self._child = process.Child(argv, pass_fds=(far_end.fileno(),))

    def close(self) -> None:
        """End the process; programs that it started continue to run."""
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
        """As ``process.run``. Raises ``OSError`` if the process has ended."""
        request = {
            "argv": list(argv), "timeout_s": timeout_s, "env": None if env is None else dict(env), "check": check,
            "stdin": None if stdin is None else stdin.decode("latin-1"), "group": group, "fds": list(pass_fds),
        }  # fmt: skip
        near_end, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with near_end:
            with far_end, self._lock:
                socket.send_fds(self._control, [b"\0"], [far_end.fileno()])
            near_end.settimeout(timeout_s + _LATE_S)
            try:
                remaining = list(pass_fds)
                while True:
                    batch, remaining = remaining[:_MOST_FDS], remaining[_MOST_FDS:]
                    socket.send_fds(near_end, [_MORE if remaining else _LAST], batch)
                    if not remaining:
                        break
                near_end.sendall(json.dumps(request).encode())
                near_end.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda: near_end.recv(1 << 20), b""))
            except TimeoutError:
                raise UnreachableError(f"{argv[0]}: timed out after {timeout_s:g} s") from None
            except OSError as error:  # it may be running already and must not run twice
                raise UnreachableError(f"{argv[0]}: cannot be started: {error.strerror}") from None
        head, _, output = answer.partition(b"\n")
        if not head:
            raise UnreachableError(f"{argv[0]}: the process that waited for its end was killed")
        reply = json.loads(head)
        if "error" in reply:
            raise UnreachableError(reply["error"], hint=reply["hint"])
        return Completed(tuple(argv), reply["status"], output, reply["stderr"])


def main(control_fd: int) -> None:
    """Serve requests until the client exits: each in a process that runs the program and waits for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit statuses are not needed
    with socket.socket(fileno=control_fd) as control:
        while True:
            data, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return
            if os.fork() == 0:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                with contextlib.suppress(OSError), socket.socket(fileno=fds[0]) as client:
                    _serve(client)
                os._exit(0)
            for fd in fds:
                os.close(fd)


def _serve(client: socket.socket) -> None:
    process.raise_file_limit()
    passed: list[int] = []
    mark = _MORE
    while mark == _MORE:
        mark, some, _, _ = socket.recv_fds(client, 1, _MOST_FDS)
        passed += some
    request = json.loads(b"".join(iter(lambda: client.recv(1 << 16), b"")))
    numbers = request["fds"]
    # Move the descriptors out of the way of their final numbers.
    above = max([2, *numbers]) + 1
    talk = socket.socket(fileno=fcntl.fcntl(client.detach(), fcntl.F_DUPFD_CLOEXEC, above))
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in passed]
    os.closerange(3, above)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    stdin = request["stdin"]
    try:
        completed = process.run(
            request["argv"], timeout_s=request["timeout_s"], env=request["env"], check=request["check"],
            stdin=None if stdin is None else stdin.encode("latin-1"), pass_fds=numbers, group=request["group"],
        )  # fmt: skip
    except UnreachableError as error:
        talk.sendall(json.dumps({"error": str(error), "hint": error.hint}).encode() + b"\n")
    else:
        head = {"status": completed.returncode, "stderr": completed.stderr}
        talk.sendall(json.dumps(head).encode() + b"\n" + completed.stdout)
    talk.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
