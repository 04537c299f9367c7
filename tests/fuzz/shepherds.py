"""Fuzz the protocol of shepherds: messages, and the live socket with any descriptors that a user may pass."""

from __future__ import annotations

import array
import contextlib
import json
import logging
import os
import select
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

from fuzz.mutation import mutated, some
from fuzz.runner import Check, Target, Wrong
from slurm_affinode.agent.shepherd_server import Connection, ShepherdServer
from slurm_affinode.model.suspension import SuspendOption
from slurm_affinode.suspension.job import streams
from slurm_affinode.suspension.job.peers import Identity, NotAShepherd, Peer
from slurm_affinode.suspension.job.shepherd import BadMessage, Exited, Hello, Reaped, Signalled, Start, Started, decode

_HELLO = (
    b"hello\nversion=1\njob=7\nrestarts=1\nimage=1\nroot=0\n"
    b"option=window=900,util=2.5,mode=requeue,wake=auto,when=pressure"
)
_SEEDS = (
    _HELLO,
    _HELLO + b",signal=USR1@60",
    _HELLO.replace(b"wake=auto", b"wake=2030-12-31T18:30"),
    b"started\nroot=2",
    b"exit\nstatus=256",
    b"reaped\npid=2\nstatus=139",
    b"signalled\nnumber=18",
    b"",
    b"\n",
    b"hello",
)
_WORDS = (
    b"hello",
    b"version=1",
    b"job=",
    b"restarts=",
    b"image=",
    b"root=",
    b"option=",
    b"window=",
    b"util=",
    b"mode=inplace",
    b"wake=hold",
    b"when=always",
    b"signal=SIGUSR1@10",
    b"started",
    b"exit",
    b"reaped",
    b"pid=",
    b"status=",
    b"signalled",
    b"number=",
    b"\nroot=2",
)
_BEHAVED = _HELLO.replace(b"job=7", b"job=8").replace(b"image=1", b"image=0")
_EVERY = 100
"""Inputs between checks that a valid shepherd is served."""
_ANSWER_S = 20.0
_PASSED = 253
"""Maximum number of descriptors in one message: ``SCM_MAX_FD``."""


def _packet(rng: Random) -> bytes:
    return mutated(rng, some(rng, _SEEDS), _WORDS)


@contextlib.contextmanager
def _decoding() -> Iterator[Check]:
    def check(packet: bytes) -> bool:
        message = decode(packet)
        _sound(message)
        return True

    yield check


def _sound(message: object) -> None:
    """Accepted messages conform to the grammar, and options survive formatting and parsing."""
    match message:
        case Hello(job, restarts, image, root, option):
            good = 0 < job < 2**32 and 0 <= restarts < 2**32 and 0 <= root <= 2**22 and isinstance(image, bool)
            text = str(option)
            if not good or SuspendOption.parse(text) != option or not text.isascii() or len(text) > 160:
                raise Wrong(f"{message}: {text}")
            if not (0 < option.window_s <= 366 * 86400 and 0 <= option.util_pct <= 100):
                raise Wrong(f"{option}")
        case Started(root=root):
            if not 0 < root <= 2**22:
                raise Wrong(f"{message}")
        case Exited(status=status):
            if not 0 <= status <= 0xFFFF:
                raise Wrong(f"{message}")
        case Reaped(pid, status):
            if not 0 < pid <= 2**22 or not 0 <= status <= 0xFFFF:
                raise Wrong(f"{message}")
        case Signalled(number=number):
            if not 0 < number <= 64:
                raise Wrong(f"{message}")
        case _:
            raise Wrong(f"{message!r}")


def _conversation(rng: Random) -> bytes:
    """Return a client's conversation: packets with kinds of descriptors, and how it ends."""
    packets = []
    for _ in range(some(rng, (0, 1, 1, 1, 2, 3, 20))):
        kinds = [int(rng.random() * 12) for _ in range(some(rng, (0, 0, 1, 3, 3, 3, 4, _PASSED)))]
        packets.append([_packet(rng).decode("latin-1"), kinds])
    return json.dumps([packets, some(rng, ("close", "close", "reset", "half", "linger"))]).encode()


class _Events:
    """Handles shepherds like the agent, and checks the descriptors passed."""

    def __init__(self) -> None:
        self.served = threading.Event()
        self.wrong: str | None = None

    def hello(self, who: Identity, hello: Hello, link: Connection, fds: tuple[int, ...]) -> bool:
        """See ``ShepherdEvents``."""
        if any(os.get_inheritable(fd) for fd in fds):
            self.wrong = "a descriptor that was passed would be open in every program that the agent starts"
        streams.close(fds, who.uid)
        if hello.job_id == 8:
            link.send(Start())
        return hello.restarts % 3 > 0

    def started(self, job_id: int, root: int, link: Connection) -> None:
        """See ``ShepherdEvents``."""

    def signalled(self, job_id: int, number: int) -> None:
        """See ``ShepherdEvents``."""

    def on_disconnect(self, job_id: int, link: Connection, status: int | None) -> None:
        """See ``ShepherdEvents``."""


def _identify(peer: Peer) -> Identity:
    """Return the identity set by the test; some processes belong to no job."""
    if _claim.job not in (7, 8):
        raise NotAShepherd("it is of no job")
    return Identity(_claim.job, peer.uid, peer.gid, peer.pid, 1)


class _Claim:
    job = 7


_claim = _Claim()


@contextlib.contextmanager
def _live() -> Iterator[Check]:
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place, contextlib.ExitStack() as stack:
        path = Path(place) / "shepherd.sock"
        events = _Events()
        server = ShepherdServer(path, events, _identify)
        server.start()
        stack.callback(server.stop)
        passed = _descriptors(stack)
        lingering: list[socket.socket] = []
        stack.callback(lambda: [connection.close() for connection in lingering])
        seen = 0

        def check(data: bytes) -> bool:
            nonlocal seen
            packets, end = json.loads(data)
            _claim.job = 7
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.settimeout(_ANSWER_S)
            try:
                sock.connect(str(path))
                for packet, kinds in packets:
                    fds = [passed[kind] if kind < len(passed) else sock.fileno() for kind in kinds]
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                    sock.sendmsg([packet.encode("latin-1")], rights)
                if end == "half":
                    sock.shutdown(socket.SHUT_WR)
            except (BrokenPipeError, ConnectionResetError):
                pass
            if end == "linger":
                lingering.append(sock)
                if len(lingering) > 20:
                    lingering.pop(0).close()
            else:
                sock.close()
            seen += 1
            if seen % _EVERY == 0:
                _behave(path, server)
            if events.wrong is not None:
                wrong, events.wrong = events.wrong, None
                raise Wrong(wrong)
            return False

        yield check
        _behave(path, server)


def _descriptors(stack: contextlib.ExitStack) -> list[int]:
    """Return one descriptor of each kind, including some with a closed peer."""
    read, write = os.pipe()
    broken_read, other = os.pipe()
    os.close(other)
    other, broken_write = os.pipe()
    os.close(other)
    left, right = socket.socketpair()
    right.close()
    poll = select.epoll()
    poll.register(read)
    made = [
        read,
        write,
        broken_read,
        broken_write,
        left.detach(),
        os.open(os.devnull, os.O_RDWR),
        os.open("/", os.O_PATH),
        os.pidfd_open(os.getpid()),
        os.eventfd(0),
        poll.fileno(),
        os.memfd_create("x"),
    ]
    stack.callback(poll.close)
    for fd in made:
        if fd != poll.fileno():
            stack.callback(os.close, fd)
    return made


def _behave(path: Path, server: ShepherdServer) -> None:
    """Check that a valid shepherd is served, whatever came before. Raises ``Wrong``."""
    _claim.job = 8
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, open(os.devnull, "rb") as null:
        sock.settimeout(_ANSWER_S)
        try:
            sock.connect(str(path))
            fds = array.array("i", [null.fileno()] * 3)
            sock.sendmsg([_BEHAVED], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            answer = sock.recv(4096)
        except OSError as error:
            raise Wrong(f"a shepherd that behaves is not served: {error!r}") from error
    if answer != b"start":
        raise Wrong(f"a shepherd that behaves is answered with {answer!r}")
    if not server._loop.thread.is_alive():
        raise Wrong("the thread of the server has ended")
    held = len(os.listdir("/proc/self/fd"))
    if held > 400:
        raise Wrong(f"{held} descriptors are open")


TARGETS = (
    Target("shepherd-message", "packets of shepherds", _packet, _decoding, (BadMessage,)),
    Target("shepherd-socket", "conversations on the live socket of shepherds", _conversation, _live, limit_s=60.0),
)
