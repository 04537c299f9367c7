"""Client of the agents: this node's over its socket, other nodes' over the network with munge.

Prolog and epilog import it, so it uses the standard library only and loads quickly.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from slurm_affinode.base.errors import AffinodeError, UnreachableError

CONTROL, ROOTS = "control.sock", "root.sock"
"""Sockets in the agent's directory: one for all users, and one that only root can connect to."""
_PEER = struct.Struct("iII")
"""``struct ucred`` of unix(7): PID, UID, GID of the process that listens."""
MAX_ANSWER_BYTES = 8 << 20
TIMEOUT_S = 30.0


class AnswerError(AffinodeError):
    """The agent refused a request."""

    def __init__(self, code: str, message: str, *, hint: str | None, exit_code: int) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.exit_code = exit_code


def ask_local(
    run_dir: str | os.PathLike[str], request: Mapping[str, Any], *, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """Return the reply of this node's agent. Raises ``UnreachableError`` and ``AnswerError``."""
    path = f"{run_dir}/{CONTROL}"
    if os.geteuid() == 0:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):  # an older agent has no such socket
            return _ask_at(f"{run_dir}/{ROOTS}", request, timeout_s)
    try:
        return _ask_at(path, request, timeout_s)
    except FileNotFoundError:
        raise UnreachableError(f"{path}: no agent runs on this node") from None
    except ConnectionRefusedError:
        raise UnreachableError(f"{path}: the agent of this node does not run") from None


def local_pid(run_dir: str | os.PathLike[str]) -> int | None:
    """Return the PID of this node's agent, which the kernel reports; ``None`` if none runs or it cannot be reached."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(TIMEOUT_S)
            sock.connect(f"{run_dir}/{CONTROL}")
            pid, *_ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    except OSError:
        return None
    return pid or None  # 0: it is in another PID namespace


def _ask_at(path: str, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Send a request to one socket. Raises ``FileNotFoundError`` and ``ConnectionRefusedError`` as well."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            sock.connect(path)
            line = _exchange(sock, _line(request), timeout_s)
    except (FileNotFoundError, ConnectionRefusedError):
        raise
    except OSError as error:
        raise UnreachableError(f"{path}: the agent does not respond: {error.strerror or error}") from error
    return _granted(line, path)


def ask_node(
    host: str, port: int, node: str, request: Mapping[str, Any], *, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """Return the reply of the agent on ``node``, reached at ``host``. Raises as ``ask_local`` does."""
    from slurm_affinode.agent import munge  # noqa: PLC0415 - prolog and epilog do without

    where = f"the agent on {node} ({host}:{port})"
    credential = munge.encode(_line({**request, "to": node}).rstrip(b"\n"))
    began = time.monotonic()
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as sock:
            line = _exchange(sock, credential + b"\n", timeout_s)
    except UnicodeError:
        raise UnreachableError(f"{where}: {host!r} is not a host name") from None
    except OSError as error:
        raise UnreachableError(f"{where} does not respond: {error.strerror or error}") from error
    if not line:
        ended = "slurm-affinode status shows what became of the request, and the journal of the node why it ended"
        refused = "retry in a moment; if that fails, compare the clocks and munge keys of both machines"
        # An agent refuses a request as soon as unmunge has returned.
        ending_known = time.monotonic() - began > munge.TIMEOUT_S
        raise UnreachableError(
            f"{where} closed the connection without a response",
            hint=ended
            if ending_known
            else f"it has ended or was restarted meanwhile, or refused the request: {refused}",
        )
    message = munge.decode(line)
    if message.uid != 0:
        raise UnreachableError(f"{where} does not belong to root: its responses are ignored")
    return _granted(message.payload, where)


def _line(request: Mapping[str, Any]) -> bytes:
    return json.dumps({"service": "slurm-affinode", **request}).encode() + b"\n"


def _exchange(sock: socket.socket, data: bytes, timeout_s: float) -> bytes:
    deadline = time.monotonic() + timeout_s
    # The agent may have closed the connection without a reply.
    with contextlib.suppress(BrokenPipeError):
        sock.sendall(data)
    received = bytearray()
    while not received.endswith(b"\n") and len(received) <= MAX_ANSWER_BYTES:
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            part = sock.recv(1 << 16)
        except ConnectionResetError:
            break
        if not part:
            break
        received += part
    return bytes(received).strip()


def _granted(line: bytes, where: str) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except ValueError:
        raise UnreachableError(f"{where}: the connection was closed without a response") from None
    if not isinstance(answer, dict):
        raise UnreachableError(f"{where}: the response is not valid")
    if answer.get("ok") is True:
        return answer
    error = answer.get("error")
    if not isinstance(error, dict):
        raise UnreachableError(f"{where}: the response is not valid")
    hint, exit_code = error.get("hint"), error.get("exit_code")
    raise AnswerError(
        str(error.get("code")),
        str(error.get("message")),
        hint=None if hint is None else str(hint),
        exit_code=exit_code if exit_code in (1, 2, 3) else 1,
    )
