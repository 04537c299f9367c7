"""The network form of the control socket, with a fake munge; start and end of the daemon."""

from __future__ import annotations

import itertools
import json
import logging
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from agent_stand_ins import Acts, Gpus, Node1, Shepherd, Slurm, agent, config_of, identify
from waiting import DEADLINE_S, wait_until

from slurm_affinode.agent import client, control, daemon, munge, systemd
from slurm_affinode.agent.client import AnswerError, ask_local, ask_node
from slurm_affinode.agent.munge import BadCredentialError, Message
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.slurm.interface import ControllerDownError, SlurmClient
from slurm_affinode.suspension.interface import AgentContext, Orchestration
from slurm_affinode.suspension.job.peers import Peer

HOST = "127.0.0.1"


class Munge:
    """Credentials that can be used once. ``uid``: the client that encodes; the agent's responses are root's."""

    def __init__(self) -> None:
        self.uid = 2001
        self.agent_uid = 0
        self.known: dict[bytes, tuple[Message, int | None]] = {}
        self._numbers = itertools.count(10**16)

    def encode(self, payload: bytes, *, only_uid: int | None = None) -> bytes:
        credential = b"MUNGE:%d:" % next(self._numbers)
        uid = self.uid if only_uid is None else self.agent_uid
        self.known[credential] = (Message(payload, uid), only_uid)
        return credential

    def decode(self, credential: bytes) -> Message:
        if credential not in self.known:
            raise BadCredentialError("unmunge: Replayed credential")
        message, only_uid = self.known.pop(credential)
        assert only_uid in (None, self.uid)
        return message


@pytest.fixture
def vouch(monkeypatch: pytest.MonkeyPatch) -> Munge:
    fake = Munge()
    monkeypatch.setattr(munge, "encode", fake.encode)
    monkeypatch.setattr(munge, "decode", fake.decode)
    monkeypatch.setattr(daemon, "listen_address", lambda _: (HOST, 0))  # a free port
    return fake


@pytest.fixture
def node(tmp_path: Path, vouch: Munge) -> Iterator[Node1]:
    with agent(config_of(tmp_path, agent=f'listen = "{HOST}:9403"')) as running:
        yield running


def port_of(node: Node1) -> int:
    port = node.daemon.control.port
    assert port is not None
    return port


def test_request_from_another_node_is_answered(node: Node1, vouch: Munge) -> None:
    """Munge identifies the client; responses and refusals are returned to it."""
    assert ask_node(HOST, port_of(node), "c1", {"verb": "status"})["node"] == "c1"
    with pytest.raises(AnswerError, match="knows no job 5"):
        ask_node(HOST, port_of(node), "c1", {"verb": "wake", "job": 5})
    vouch.uid = 0
    with pytest.raises(AnswerError, match="for root on the node itself"):
        ask_node(HOST, port_of(node), "c1", {"verb": "epilog", "job": 5, "uid": 0})


def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make clients of root's own socket root and those of the other one alice; the commands run as root."""
    monkeypatch.setattr(client, "os", SimpleNamespace(geteuid=lambda: 0))
    monkeypatch.setattr(
        control, "peer_of", lambda sock: Peer(1, 0 if sock.getsockname().endswith("root.sock") else 2001, 0)
    )


def from_network(node: Node1, host: str, count: int, stack: ExitStack) -> list[socket.socket]:
    """Open connections from an address of this machine that send nothing."""
    return [
        stack.enter_context(socket.create_connection((HOST, port_of(node)), DEADLINE_S, source_address=(host, 0)))
        for _ in range(count)
    ]


def test_network_clients_do_not_starve_the_node(node: Node1, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight addresses hold as many connections as allowed: users, root and other addresses are still served."""
    as_root(monkeypatch)
    monkeypatch.setattr(control, "machine_of", str)
    with ExitStack() as stack:
        held = [
            (number, item)
            for number in range(2, 10)
            for item in from_network(node, f"127.0.0.{number}", control.MAX_PER_HOLDER, stack)
        ]
        open_ = node.daemon.control._open
        wait_until("all are seated or shown out", lambda: len(open_) + len(closed(held)), lambda sum_: sum_ >= 256)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(DEADLINE_S)
            sock.connect(str(node.run_dir / "control.sock"))
            sock.sendall(b'{"service": "slurm-affinode", "verb": "status"}\n')
            assert json.loads(sock.makefile("rb").read())["ok"] is True
        assert ask_local(node.run_dir, {"verb": "status"})["ok"] is True
        assert ask_node(HOST, port_of(node), "c1", {"verb": "status"})["ok"] is True


def test_full_network_seats_are_shared_by_address(node: Node1, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new address takes a seat from the address with the most seats; one with as many as others gets none."""
    monkeypatch.setattr(control, "machine_of", str)
    with ExitStack() as stack:
        held = [
            (number, item)
            for number in range(2, 10)
            for item in from_network(node, f"127.0.0.{number}", control.MAX_NETWORK_CONNECTIONS // 8, stack)
        ]
        from_network(node, "127.0.0.99", 4, stack)
        wait_until("four have given their seats", lambda: closed(held), lambda gone: len(gone) == 4)
        assert len({number for number, _ in closed(held)}) == 4
        from_network(node, "127.0.0.2", 20, stack)
        assert ask_node(HOST, port_of(node), "c1", {"verb": "status"})["ok"] is True


def closed(held: list[tuple[int, socket.socket]]) -> list[tuple[int, socket.socket]]:
    """Return the connections that the agent has closed."""
    readable, _, _ = select.select([item for _, item in held], [], [], 0)
    return [(number, item) for number, item in held if item in readable]


@pytest.mark.parametrize(
    ("address", "machine"),
    [("10.0.0.7", "10.0.0.7"), ("2001:db8::1", "2001:db8::/64"), ("fe80::1%eth0", "fe80::/64"),
     ("::ffff:10.0.0.7", "10.0.0.7"), ("127.0.0.1", "loopback"), ("127.1.2.3", "loopback"), ("::1", "loopback"),
     ("::ffff:127.0.0.2", "loopback")],
)  # fmt: skip
def test_machine_of_an_address(address: str, machine: str) -> None:
    """A machine can have any number of IPv6 addresses, and a local user connect from any loopback address."""
    assert control.machine_of(address) == machine


def test_request_for_another_node_is_refused(node: Node1) -> None:
    """It may have been intercepted and forwarded."""
    with pytest.raises(AnswerError, match="meant for another node"):
        ask_node(HOST, port_of(node), "c2", {"verb": "status"})


def test_response_not_from_root_is_rejected(node: Node1, vouch: Munge) -> None:
    """Any process can listen on a port."""
    vouch.agent_uid = 2002
    with pytest.raises(UnreachableError, match="does not belong to root"):
        ask_node(HOST, port_of(node), "c1", {"verb": "status"})


@pytest.mark.parametrize(
    "data", [b"MUNGE:nonsense:\n", b'{"verb": "status"}\n', b"\n", b"x" * 40000, b"GET / HTTP/1.1\r\n\r\n"]
)
def test_malformed_credential_is_not_answered(node: Node1, data: bytes) -> None:
    """The connection is closed."""
    with socket.create_connection((HOST, port_of(node)), timeout=DEADLINE_S) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            assert sock.makefile("rb").read() == b""
        except (ConnectionResetError, BrokenPipeError, OSError):
            pass
    assert ask_node(HOST, port_of(node), "c1", {"verb": "status"})["ok"] is True


@pytest.mark.parametrize("host", ["a" * 80, "a..b", ".a"])
def test_invalid_host_name_is_unreachable(vouch: Munge, host: str) -> None:
    """The error is one line."""
    with pytest.raises(UnreachableError, match="is not a host name"):
        ask_node(host, 9403, host, {"verb": "status"})


def test_refused_and_absent_agents_are_unreachable(node: Node1, vouch: Munge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status is 3, and a hint is given."""
    with socket.socket() as deaf:  # reserves its port without listening
        deaf.bind((HOST, 0))
        with pytest.raises(UnreachableError, match=r"the agent on c9 \(127\.0\.0\.1:\d+\) does not respond"):
            ask_node(HOST, deaf.getsockname()[1], "c9", {"verb": "status"})
    monkeypatch.setattr(munge, "encode", lambda payload, only_uid=None: b"MUNGE:forged:")
    with pytest.raises(UnreachableError, match="closed the connection without a response") as caught:
        ask_node(HOST, port_of(node), "c1", {"verb": "status"})
    assert "munge keys" in str(caught.value.hint)


def test_agent_that_ends_during_a_request_is_reported_as_that(vouch: Munge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials are refused within the time limit of unmunge, so that they are no longer the reason."""
    monkeypatch.setattr(munge, "TIMEOUT_S", 0.2)
    with socket.create_server((HOST, 0)) as server:

        def end() -> None:
            accepted, _ = server.accept()
            time.sleep(0.3)
            accepted.close()

        thread = threading.Thread(target=end)
        thread.start()
        with pytest.raises(UnreachableError, match="closed the connection without a response") as caught:
            ask_node(HOST, server.getsockname()[1], "c1", {"verb": "suspend"})
        thread.join()
    assert "munge" not in str(caught.value.hint)
    assert "status shows what became of the request" in str(caught.value.hint)


# --- the daemon as a process


def parts_of(acts: list[Acts], slurm: Callable[[], SlurmClient]) -> daemon.DaemonParts:
    def build(context: AgentContext) -> Orchestration:
        acts.append(Acts(context))
        return Orchestration(acts[0], acts[0], acts[0], acts[0])

    return daemon.DaemonParts(Gpus, slurm, build, identify)  # type: ignore[arg-type]


def test_daemon_stops_on_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The daemon notifies systemd, writes a log message, and leaves nothing running."""
    handlers: dict[int, Callable[..., None]] = {}
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.update({number: handler}))
    acts: list[Acts] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(DEADLINE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        config = config_of(tmp_path)
        with caplog.at_level(logging.INFO):
            thread = threading.Thread(target=daemon.serve, args=(config, parts_of(acts, Slurm().client)))
            thread.start()
            assert systemd.recv(100) == b"READY=1"
            handlers[signal.SIGHUP]()  # without a reader of the configuration: no effect
            handlers[signal.SIGTERM]()
            assert systemd.recv(100) == b"STOPPING=1"
            thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert acts[0].recovered == 1
    assert "the agent of c1 has ended" in caplog.text


def test_daemon_runs_without_slurm(tmp_path: Path) -> None:
    """The job is watched even without a Slurm client."""

    def broken() -> SlurmClient:
        raise ControllerDownError("scontrol: no such program")

    slurm = Slurm()
    slurm.client = broken  # type: ignore[method-assign]
    with agent(config_of(tmp_path), slurm=slurm) as node:
        assert Shepherd(node.run_dir).hello().hear() == "start"
        job = wait_until("it is watched", lambda: node.daemon.registry.get(7))
        assert job is not None
        assert job.slurm is None


@pytest.mark.parametrize(("journal", "begin"), [(True, "<4>"), (False, "20")])
def test_log_lines_have_time_or_priority(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], journal: bool, begin: str
) -> None:
    """For the journal, every line has its priority. User-supplied text never starts a line."""
    if journal:
        monkeypatch.setenv("JOURNAL_STREAM", "1:2")
    else:
        monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        systemd.log_to_stderr(verbose=False)
        try:
            Path("a").read_bytes()
        except OSError:
            logging.getLogger("slurm_affinode.test").warning("%s", "a\n<0>b\x1b[2J\udcff", exc_info=True)
    finally:
        root.handlers[:], root.level = before
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(begin)
    assert lines[0].endswith(r"a\n<0>b\x1b[2J\udcff")
    assert lines[1] == ("<4>" if journal else "") + "Traceback (most recent call last):"
    assert not any("\x1b" in line for line in lines)
    assert all(line.startswith("<4>") for line in lines) is journal
