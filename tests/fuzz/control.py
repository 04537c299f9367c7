"""The control socket: requests of every verb by every user, and the live sockets, local and with munge."""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from agent_stand_ins import Acts, Gpus, Slurm, config_of, job

from fuzz.mutation import HOSTILE, mutated, mutated_json, some
from fuzz.places import directory
from fuzz.runner import Check, Target, Wrong
from slurm_affinode.agent import control, munge
from slurm_affinode.agent.daemon import Daemon, DaemonParts
from slurm_affinode.agent.munge import BadCredentialError, Message
from slurm_affinode.agent.requests import Caller
from slurm_affinode.agent.service import Service
from slurm_affinode.agent.throttle import Pace
from slurm_affinode.base.errors import AffinodeError
from slurm_affinode.base.process import Completed
from slurm_affinode.base.threads import Workers
from slurm_affinode.model.suspension import JobKey, SuspendOption
from slurm_affinode.suspension.interface import AgentContext, Orchestration
from slurm_affinode.suspension.job.peers import Peer
from slurm_affinode.suspension.job.registry import WatchedJob
from slurm_affinode.suspension.records.shared_state import SuspendedJob

ALICE, BOB = 2001, 2002
_CALLERS = (0, ALICE, BOB, 64030, 4294967294)
_VERBS: tuple[dict[str, Any], ...] = (
    {"verb": "status"},
    {"verb": "status", "job": 7},
    {"verb": "status", "job": 8},
    {"verb": "suspend", "job": 7},
    {"verb": "wake", "job": 8},
    {"verb": "wake", "job": 7},
    {"verb": "prolog", "job": 9, "uid": ALICE, "gpus": [0, 1]},
    {"verb": "prolog-wakes", "job": 9, "gpus": [0]},
    {"verb": "epilog", "job": 9},
    {"verb": "processes"},
    {"verb": "processes", "since": 1700000000000000, "each": True, "use": True},
    {"verb": "leftover-reports"},
    {"verb": "leftovers-taken", "ids": ["a", "b"]},
    {"verb": "kill-orphan", "pid": 4194304, "start_ticks": 5},
    {"verb": "leftovers", "job": 9, "uid": ALICE, "gpus": [0]},
    {"verb": "", "service": None},
)
_FOR_ROOT = (
    "prolog",
    "prolog-wakes",
    "epilog",
    "leftovers",
    "leftover-reports",
    "leftovers-taken",
    "kill-orphan",
    "processes",
)
_EVERY = 500
_SEATED_S = 20.0


def _request(rng: Random) -> bytes:
    whole = {"service": "slurm-affinode", **some(rng, _VERBS)}
    if rng.random() < 0.1:
        whole[some(rng, ("to", "job", "verb", "uid", "gpus", "ids", "pid"))] = some(rng, HOSTILE)
    return mutated_json(rng, whole)


def _caller_and_request(rng: Random) -> bytes:
    return bytes([int(rng.random() * len(_CALLERS)), int(rng.random() * 2)]) + _request(rng)


@contextlib.contextmanager
def _service() -> Iterator[Service]:
    """The agent's service, with fakes of GPUs, Slurm and actions; no thread of it runs."""
    logging.disable(logging.CRITICAL)
    made: list[Acts] = []

    def build(context: AgentContext) -> Orchestration:
        made.append(Acts(context))
        made[0].go.set()
        return Orchestration(made[0], made[0], made[0], made[0])

    with directory() as place:
        slurm = Slurm({7: job(uid=ALICE), 8: job(8, uid=ALICE, state="PENDING", nodes=())})
        daemon = Daemon(config_of(place), DaemonParts(Gpus, slurm.client, build))  # type: ignore[arg-type,return-value]
        daemon.registry.put(_watched(daemon))
        made[0].asleep.append(_asleep())
        service = daemon.service
        (place / "proc").mkdir()
        service.orphans.orphans.proc = place / "proc"  # type: ignore[union-attr]
        service.slurm_calls = service.local_calls = lambda call: call()
        daemon.work.suspend = lambda *arguments: True  # type: ignore[method-assign]
        try:
            yield service
        finally:
            daemon.stop()


def _watched(daemon: Daemon) -> WatchedJob:
    return WatchedJob(7, ALICE, 100, 0, SuspendOption(), os.getpid(), 1, 2, _Link(), 1700000000.0)


class _Link:
    open = True

    def send(self, message: object) -> bool:
        """See ``registry.Link``."""
        return True


def _asleep() -> SuspendedJob:
    return SuspendedJob(
        JobKey("cluster", 8, 1), ALICE, "c1", 1, 1000.0, 1 << 30, 1 << 29, 1, "shared", "auto", "idle 15m", None
    )


@contextlib.contextmanager
def _answers() -> Iterator[Check]:
    with _service() as service:
        count = 0

        def check(data: bytes) -> bool:
            nonlocal count
            caller = Caller(_CALLERS[data[0]], f"uid{_CALLERS[data[0]]}", bool(data[1]))
            request = control.parse_request(data[2:])
            answer = service.answer(request, caller)
            control._dump(answer)
            if caller.uid not in (0, ALICE):
                if answer.get("jobs"):
                    raise Wrong(f"{caller} is shown {answer}")
                if request.get("verb") != "status":
                    raise Wrong(f"{caller} is granted {request}")
            if request.get("verb") in _FOR_ROOT and caller.uid != 0:
                raise Wrong(f"{caller} is granted {request}")
            if request.get("verb") in ("prolog", "prolog-wakes", "epilog", "leftovers") and not caller.local:
                raise Wrong(f"{caller} is granted {request} from elsewhere")
            count += 1
            if count % _EVERY == 0:
                _forget(service)
            return True

        yield check


def _forget(service: Service) -> None:
    """Clear the records of the fakes."""
    service._present.clear()
    service.orchestration.waker.woken.clear()  # type: ignore[attr-defined]


# --- live sockets


def _visit(rng: Random) -> bytes:
    """Return a connection: socket, user, parts of the request, and how it ends."""
    request = _request(rng)
    if rng.random() < 0.1:
        request = mutated(rng, request * some(rng, (1, 3, 400)))
    if rng.random() < 0.3:
        value = {"service": "slurm-affinode", "to": "c1", **some(rng, _VERBS)}
        request = json.dumps(value).encode()
    cut = int(rng.random() * (len(request) + 1))
    parts = (
        [request + b"\n"]
        if rng.random() < 0.8
        else [request[:cut], request[cut:] + some(rng, (b"\n", b"", b"\r\n", b"\n{}\n"))]
    )
    how = some(rng, ("unix", "unix", "root", "tcp"))
    return json.dumps(
        [
            how,
            some(rng, _CALLERS),
            [part.decode("latin-1") for part in parts],
            some(rng, ("read", "read", "close", "hold")),
        ]
    ).encode()


def _credential(payload: bytes, uid: int) -> bytes:
    return b"MUNGE:" + base64.b64encode(uid.to_bytes(4, "little") + b"x" * 16 + payload) + b":"


def _decoded(credential: bytes) -> Message:
    """Decode credentials of ``_credential`` like ``munge.decode``."""
    if not munge._CREDENTIAL.fullmatch(credential.strip()):
        raise BadCredentialError("the data is not a munge credential")
    try:
        data = base64.b64decode(credential.strip()[6:-1], validate=True)
    except ValueError:
        raise BadCredentialError("unmunge: Invalid credential") from None
    return Message(data[20:], int.from_bytes(data[:4], "little"))


@contextlib.contextmanager
def _live() -> Iterator[Check]:
    with _service() as service, tempfile.TemporaryDirectory(prefix="fuzz-") as place, contextlib.ExitStack() as stack:
        uid = [0]

        def peer_of(sock: socket.socket) -> Peer:  # a mock would keep each socket that it is called with
            return Peer(1, uid[0], 100)

        stack.enter_context(mock.patch.object(control, "peer_of", peer_of))
        stack.enter_context(mock.patch.object(munge, "decode", _decoded))
        stack.enter_context(mock.patch.object(munge, "encode", lambda payload, only_uid=None: _credential(payload, 0)))
        path = Path(place) / "control.sock"
        server = control.ControlServer(service.answer, Workers(), path=path, address=("127.0.0.1", 0), node="c1")
        server._pace = Pace(1e9, 10**9)
        server.start()
        stack.callback(server.stop)
        held: list[socket.socket] = []
        stack.callback(lambda: [connection.close() for connection in held])
        count = 0

        def visit(how: str, parts: list[bytes], end: str) -> bytes:
            family = socket.AF_INET if how == "tcp" else socket.AF_UNIX
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.settimeout(30)
            try:
                where = (
                    ("127.0.0.1", server.port)
                    if how == "tcp"
                    else str(path if how == "unix" else path.with_name("root.sock"))
                )
                sock.connect(where)
                for part in parts:
                    sock.sendall(part)
                if end == "hold":
                    held.append(sock)
                    if len(held) > 4:
                        held.pop(0).close()
                    return b""
                if end == "close":
                    return b""
                sock.shutdown(socket.SHUT_WR)
                answer = b""
                while part := sock.recv(1 << 16):
                    answer += part
            except (BrokenPipeError, ConnectionResetError):
                return b""
            except OSError as error:
                if error.errno == errno.ENOTCONN:
                    return b""  # it was refused before all was sent
                raise Wrong(f"the server does not respond: {error!r}") from error
            finally:
                if sock not in held:
                    sock.close()
            return answer

        def check(data: bytes) -> bool:
            nonlocal count
            how, uid[0], texts, end = json.loads(data)
            parts = [text.encode("latin-1") for text in texts]
            if how == "tcp" and uid[0] != BOB:  # BOB sends no credential
                parts = [_credential(b"".join(parts).partition(b"\n")[0], uid[0]) + b"\n"]
            answer = visit(how, parts, end)
            if how == "tcp" and answer:
                answer = _decoded(answer).payload
            count += 1
            if count % _EVERY == 0:
                _forget(service)
                uid[0] = ALICE
                # Seats of recently closed connections may still be taken: the server notices with a delay.
                until = time.monotonic() + _SEATED_S
                while not (good := visit("unix", [b'{"service":"slurm-affinode","verb":"status"}\n'], "read")):
                    if time.monotonic() > until:
                        raise Wrong("a request that is right gets no answer")
                if json.loads(good).get("ok") is not True:
                    raise Wrong(f"a request that is right is answered with {good!r}")
            if not answer:
                return False
            record = json.loads(answer)
            if record["ok"] is not True and record["error"]["code"] == "fault":
                raise Wrong(f"a fault of the agent: {parts!r:.300}")
            return record["ok"] is True

        yield check


# --- munge


def _credentials(rng: Random) -> bytes:
    return mutated(rng, b"MUNGE:AwQFAABvbmx5IGZvciB0ZXN0cw==:\n", (b"MUNGE:", b":", b"=", b"-----"))


@contextlib.contextmanager
def _munge() -> Iterator[Check]:
    inputs: list[bytes] = []

    def run(argv: tuple[str, ...], *, timeout_s: float, stdin: bytes, check: bool) -> Completed:
        inputs.append(stdin)
        # The output of unmunge for an unknown credential.
        return Completed(
            argv, 15, b"", "STATUS:           Invalid credential format (15)\nUID:              nobody (65534)\n"
        )

    def check(data: bytes) -> bool:
        inputs.clear()
        try:
            munge.decode(data, run=run)
        except BadCredentialError:
            if inputs and not munge._CREDENTIAL.fullmatch(inputs[0].strip()):
                raise Wrong(f"unmunge is given {inputs[0]!r}") from None
            raise
        raise Wrong("a credential that unmunge refuses is accepted")

    yield check


TARGETS = (
    Target(
        "control-request",
        "requests of every verb, as the service answers them",
        _caller_and_request,
        _answers,
        (AffinodeError,),
    ),
    Target("control-socket", "connections to the live sockets, local and by munge", _visit, _live, limit_s=60.0),
    Target("credential", "munge credentials from the network", _credentials, _munge, (BadCredentialError,)),
)
