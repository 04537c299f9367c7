"""Run commands on the nodes without a ``docker exec`` for each, which takes longer than most of the commands.

``docker exec`` starts tests/cluster/command_server.py once per node, with the rights that it gives to every command.
"""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("command_server.py").read_text()
MORE_S = 30.0
"""Additional time for the node's response after the command's own time limit, which the node enforces."""
END_S = 10.0
KILLED = 137


class NodeGoneError(Exception):
    """The command server has ended. ``taken_up``: whether it had accepted the command."""

    def __init__(self, taken_up: bool, status: int, printed: str) -> None:
        super().__init__(printed)
        self.taken_up = taken_up
        self.status = status
        self.printed = printed


def python_of(container: str) -> tuple[str, ...]:
    """Return the command line that runs Python in a container."""
    return ("docker", "exec", "--interactive", container, "/usr/bin/python3", "-I", "-S")


class Shell:
    """One command server, which runs one command at a time. ``waiting``: its last response has not been read."""

    def __init__(self, python: Sequence[str]) -> None:
        argv = (*python, "-c", SERVER)
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._read = b""
        self.waiting = False

    def run(
        self, argv: Sequence[str], user: str, home: str, stdin: str, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command and return its result. Raises ``TimeoutExpired`` and ``NodeGoneError``."""
        assert self._process.stdin is not None
        words = [str(word) for word in argv]
        request = {"argv": words, "user": user, "home": home, "stdin": stdin, "timeout_s": timeout_s}
        deadline = time.monotonic() + timeout_s + MORE_S
        self.waiting, taken_up = True, False
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            self._line(deadline)
            taken_up = True
            answer = self._line(deadline)
        except (BrokenPipeError, EOFError):
            raise NodeGoneError(taken_up, *self.close()) from None
        except TimeoutError:
            raise subprocess.TimeoutExpired(words, timeout_s) from None
        self.waiting = False
        out, err = (base64.b64decode(answer[name]) for name in ("out", "err"))
        if answer["status"] is None:
            raise subprocess.TimeoutExpired(words, timeout_s, out, err)
        return subprocess.CompletedProcess(words, answer["status"], _text(out), _text(err))

    def _line(self, deadline: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._read:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            chunk = os.read(descriptor, 1 << 20)
            if not chunk:
                raise EOFError
            self._read += chunk
        line, _, self._read = self._read.partition(b"\n")
        value: dict[str, Any] = json.loads(line)
        return value

    def close(self) -> tuple[int, str]:
        """End the server, at once if a response is outstanding; return its exit status and standard error."""
        try:
            _, printed = self._process.communicate(timeout=0 if self.waiting else END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            _, printed = self._process.communicate()
        return self._process.returncode, printed.decode(errors="replace")


@dataclass(slots=True)
class Shells:
    """The command servers of all nodes, one for each command that runs concurrently."""

    python: Callable[[str], Sequence[str]] = python_of
    _idle: dict[str, list[Shell]] = field(default_factory=dict)

    def run(
        self, container: str, argv: Sequence[str], *, user: str, home: str, stdin: str, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command and return its result; if the container is not running, it is that of ``docker exec``."""
        idle = self._idle.setdefault(container, [])
        while True:
            try:
                shell, fresh = idle.pop(), False  # atomic: no other thread gets the same shell
            except IndexError:
                shell, fresh = Shell(self.python(container)), True
            try:
                return shell.run(argv, user, home, stdin, timeout_s)
            except NodeGoneError as gone:
                if gone.taken_up or fresh:
                    return subprocess.CompletedProcess(argv, gone.status or KILLED, "", gone.printed)
                # The container was restarted after the last command: try again with a new shell.
            finally:
                if shell.waiting:
                    shell.close()
                else:
                    idle.append(shell)

    def drop(self, container: str) -> None:
        """End the servers of a container."""
        idle = self._idle.get(container, [])
        while idle:
            idle.pop().close()

    def close(self) -> None:
        """End all servers."""
        for container in self._idle:
            self.drop(container)


def _text(printed: bytes) -> str:
    return printed.decode().replace("\r\n", "\n").replace("\r", "\n")  # as subprocess decodes text
