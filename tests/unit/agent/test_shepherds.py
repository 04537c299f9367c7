"""Messages of shepherds, and the socket that receives them."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_stand_ins import Node1, Shepherd, agent, config_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stalling import Stalling
from waiting import DEADLINE_S, wait_until

from slurm_affinode.agent import shepherd_server
from slurm_affinode.agent.arrivals import Arrivals
from slurm_affinode.agent.listeners import prepare_directory, receive
from slurm_affinode.base.config import Config
from slurm_affinode.base.pidfd import ExhaustedError
from slurm_affinode.model.suspension import Notice, SuspendOption
from slurm_affinode.suspension.job import streams
from slurm_affinode.suspension.job.peers import Identity, Peer
from slurm_affinode.suspension.job.shepherd import (
    MAX_TEXT_BYTES,
    BadMessage,
    Exited,
    Hello,
    Hold,
    Reaped,
    Restored,
    Say,
    SignalMessage,
    Start,
    Started,
    Wait,
    decode,
    encode,
)

HELLO = b"hello\nversion=1\njob=123\nrestarts=1\nimage=1\nroot=0\noption=window=900,util=5,signal=USR1@10"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_of(tmp_path)


@pytest.fixture
def node(config: Config) -> Iterator[Node1]:
    with agent(config) as running:
        yield running


def test_messages_of_shepherds_are_read() -> None:
    """Each verb with its fields."""
    option = SuspendOption(900, 5.0, signal=Notice("USR1", 10))
    assert decode(HELLO) == Hello(123, 1, True, 0, option)
    assert decode(b"started\nroot=2") == Started(2)
    assert decode(b"exit\nstatus=256\n") == Exited(256)
    assert decode(b"reaped\npid=2\nstatus=139") == Reaped(2, 139)


def test_messages_to_shepherds_are_written() -> None:
    """The format is that read by the C side."""
    assert encode(Start()) == b"start"
    assert encode(Start(restore_failed=True)) == b"start\nrestore_failed=1"
    assert encode(Restored(17)) == b"restored\npid=17"
    assert encode(Wait()) == b"wait\nreports=1"
    assert encode(Hold("why")) == b"hold\nreason=why"
    assert encode(Say("a line")) == b"say\ntext=a line"
    assert encode(SignalMessage(10)) == b"signal\nnumber=10"


@pytest.mark.parametrize(
    "packet",
    [
        b"", b"\n", b"hello", HELLO.replace(b"job=123", b"job=0"), HELLO.replace(b"job=123", b"job=x"),
        HELLO.replace(b"job=123", b"job=99999999999"), HELLO.replace(b"image=1", b"image=2"),
        HELLO.replace(b"root=0", b"root=-1"), HELLO.replace(b"version=1", b"version=2"), HELLO + b"\njob=123",
        HELLO.replace(b"window=900", b"window=0"), HELLO.replace(b"util=5", b"util=\x1b[2J"), HELLO + b"\nnonsense",
        b"\xff\xfe", b"exit\nstatus=99999999", b"exit", b"run\ncommand=reboot", b"started\nroot=0", b"reaped\npid=2",
        b"x" * 5000,
        "hello\njob=\N{ARABIC-INDIC DIGIT ONE}".encode(),
    ],
)  # fmt: skip
def test_malformed_message_is_rejected(packet: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(packet)


@pytest.mark.parametrize(
    "option",
    ["window=\N{FULLWIDTH DIGIT ONE}", "window=9_00", "window=99999999", "util=1e1", "util=nan", "wake=--x", "wake=a b",
     "wake=" + "9" * 40, "signal=SIGSIGUSR1@1", "signal=\N{LATIN SMALL LETTER SHARP S}@1", "signal=USR1@999999"],
    ids=ascii,
)  # fmt: skip
def test_option_not_written_by_plugin_is_rejected(option: str) -> None:
    """Python accepts more number formats than C, and a user may send messages in the plugin's place."""
    with pytest.raises(BadMessage, match="suspend option"):
        decode(HELLO.partition(b"option=")[0] + b"option=" + option.encode())


def test_descriptors_of_users_are_not_inherited_by_programs() -> None:
    """Programs started by the agent would otherwise inherit a user's files and run as root with them."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right, Path(os.devnull).open() as null:
        socket.send_fds(left, [b"x" * 20], [null.fileno()] * 5)
        packet, fds, flags = receive(right, 10, 3)
    try:
        assert (packet, len(fds)) == (b"x" * 10, 3)
        assert flags & socket.MSG_TRUNC
        assert flags & socket.MSG_CTRUNC
        assert not any(os.get_inheritable(fd) for fd in fds)
    finally:
        for fd in fds:
            os.close(fd)


@given(st.binary(max_size=5000))
def test_arbitrary_bytes_are_decoded_or_rejected(packet: bytes) -> None:
    """No other exception is raised."""
    try:
        decode(packet)
    except BadMessage:
        return


@given(st.text())
def test_text_for_a_job_is_one_line(text: str) -> None:
    """The line is bounded and printable, whatever the characters of the text."""
    packet = encode(Say(text))
    assert packet.count(b"\n") == 1
    line = packet.removeprefix(b"say\ntext=")
    assert len(line) <= MAX_TEXT_BYTES
    assert line.decode().isprintable()


def test_shepherd_is_answered_and_its_job_is_watched(node: Node1) -> None:
    """A job without an image starts at once; data from slurmctld follows later."""
    shepherd = Shepherd(node.run_dir).hello()
    assert shepherd.hear() == "start"
    shepherd.send("started\nroot=2")
    job = wait_until("its root is known", node.watched, lambda item: item.root == 2)
    assert (job.job_id, job.uid, job.init_pid) == (7, os.getuid(), os.getpid())
    shepherd.send("exit\nstatus=0")
    shepherd.close()
    wait_until("it is forgotten", node.daemon.registry.jobs, lambda jobs: not jobs)


def test_connection_of_ended_process_is_rejected(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process with its PID now did not connect."""
    monkeypatch.setattr(shepherd_server, "has_ended", lambda pidfd: True)
    with agent(config) as node:
        shepherd = Shepherd(node.run_dir).hello()
        assert shepherd.hear() == ""
        assert node.daemon.registry.jobs() == ()


def test_reconnected_shepherd_gets_no_reply(node: Node1) -> None:
    """The agent was restarted, or the connection lost: the job runs, and the orchestration is notified."""
    Shepherd(node.run_dir, root=2).hello()
    wait_until("it is registered", lambda: node.acts.registered_jobs, lambda jobs: jobs == [7])
    assert node.watched().root == 2


def test_lost_connection_keeps_job(node: Node1) -> None:
    """Its process lives, so it reconnects, and the newest connection counts."""
    first = Shepherd(node.run_dir, root=2).hello()
    job = node.watched()
    first.close()
    wait_until("the link is closed", lambda: job.link.open, lambda open_: not open_)
    assert node.daemon.registry.get(7) is not None
    second = Shepherd(node.run_dir, root=2).hello()
    wait_until("it has a new link", lambda: node.watched().link.open)
    assert node.watched().say("hello")
    assert second.hear() == "say\ntext=hello"


def test_shepherd_with_an_image_waits_for_its_restore(node: Node1, monkeypatch: pytest.MonkeyPatch) -> None:
    """It receives wait messages meanwhile, then the PID of the root process; CRIU had the streams."""
    monkeypatch.setattr("slurm_affinode.agent.workers.KEEP_WAITING_S", 0.05)
    shepherd = Shepherd(node.run_dir, image=1, restarts=1).hello()
    assert shepherd.hear() == "wait\nreports=1"
    node.acts.go.set()
    message = wait_until("the reply is there", shepherd.hear, lambda text: text != "wait")
    assert message == "restored\npid=17"
    assert len(node.acts.restored[0].fds) == 3
    assert node.watched().root == 17


def test_reply_is_sent_to_new_connection(node: Node1) -> None:
    """The shepherd lost the connection during its restore: there is one restore, and the reply reaches it."""
    Shepherd(node.run_dir, image=1, restarts=1).hello().close()
    again = Shepherd(node.run_dir, image=1, restarts=1).hello()
    assert again.hear() == "wait\nreports=1"
    node.acts.go.set()
    assert again.hear() == "restored\npid=17"
    assert len(node.acts.restored) == 1


def test_failed_restore_holds_job(node: Node1) -> None:
    """The shepherd ends without starting anything, and nothing is watched."""
    node.acts.reply = Hold("the image is damaged")
    node.acts.go.set()
    shepherd = Shepherd(node.run_dir, image=1, restarts=1).hello()
    assert shepherd.hear() == "hold\nreason=the image is damaged"
    assert node.daemon.registry.jobs() == ()


def test_shepherd_that_cannot_be_examined_is_rejected(
    node: Node1, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent has no free descriptors: the shepherd reconnects later, and the next one is served."""

    def exhausted(peer: Peer) -> Identity:
        raise ExhaustedError("process 5 cannot be examined: Too many open files")

    identify = node.daemon.shepherds._identify
    monkeypatch.setattr(node.daemon.shepherds, "_identify", exhausted)
    assert Shepherd(node.run_dir).hello().hear() == ""
    assert "connection closed: process 5 cannot be examined: Too many open files" in caplog.text
    assert "Traceback" not in caplog.text
    monkeypatch.setattr(node.daemon.shepherds, "_identify", identify)
    assert Shepherd(node.run_dir).hello().hear() == "start"


@pytest.mark.parametrize("claim", ["0", "8"])
def test_process_that_is_not_the_shepherd_is_rejected(node: Node1, monkeypatch: pytest.MonkeyPatch, claim: str) -> None:
    """It belongs to no job, or claims another job than the kernel shows."""
    monkeypatch.setenv("SHEPHERD_OF", claim)
    assert Shepherd(node.run_dir).hello().hear() == ""
    assert node.daemon.registry.jobs() == ()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(packets=st.lists(st.binary(min_size=1, max_size=6000), min_size=1, max_size=4))
def test_garbage_does_not_affect_others(node: Node1, packets: list[bytes]) -> None:
    """The connection is closed, and the next shepherd is served."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(DEADLINE_S)
        sock.connect(str(node.run_dir / "shepherd.sock"))
        try:
            for packet in packets:
                sock.send(packet)
            assert sock.recv(100) == b""
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert node.daemon.shepherds._loop.thread.is_alive()


def test_unexpected_descriptors_are_closed(node: Node1) -> None:
    """Repeated messages with a hundred descriptors leak none."""
    count = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(DEADLINE_S)
            sock.connect(str(node.run_dir / "shepherd.sock"))
            socket.send_fds(sock, [b"hello"], [0] * 100)
            assert sock.recv(100) == b""
    wait_until("they are closed", lambda: len(list(Path("/proc/self/fd").iterdir())), lambda now: now <= count + 2)


def test_file_that_cannot_be_closed_does_not_block(
    node: Node1, stalling: Callable[[Path], Stalling], tmp_path: Path
) -> None:
    """A user passes a file on a FUSE of his own that does not respond."""
    file_system = stalling(tmp_path / "theirs")
    fd = os.open(file_system.path / "output", os.O_RDWR | os.O_CREAT)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(node.run_dir / "shepherd.sock"))
        file_system.stall()
        try:
            socket.send_fds(sock, [b"nonsense"], [fd])
            wait_until("the connection is closed", lambda: sock.recv(1), lambda got: got == b"")
            assert Shepherd(node.run_dir).hello().hear() == "start"
        finally:
            file_system.resume()
            os.close(fd)


def test_files_that_cannot_be_closed_are_limited(
    node: Node1, stalling: Callable[[Path], Stalling], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a thread: a user with several stuck files may pass no more until they are closed."""
    monkeypatch.setattr(streams, "MOST", 3)
    file_system = stalling(tmp_path / "theirs")
    fd = os.open(file_system.path / "output", os.O_RDWR | os.O_CREAT)
    file_system.stall()
    try:
        for _ in range(8):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(DEADLINE_S)
                sock.connect(str(node.run_dir / "shepherd.sock"))
                socket.send_fds(sock, [b"nonsense"], [fd])
                with contextlib.suppress(ConnectionResetError):  # it was not even read
                    assert sock.recv(1) == b""
        assert streams.stuck(os.getuid())
        assert [thread.name for thread in threading.enumerate()].count("close") == 3
    finally:
        file_system.resume()
    wait_until("they are closed", lambda: streams.stuck(os.getuid()), lambda stuck: not stuck)
    assert Shepherd(node.run_dir).hello().hear() == "start"
    os.close(fd)


def test_idle_connections_are_closed_and_limited(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle connections time out; the seats per user are limited. Root has its own."""
    monkeypatch.setattr(shepherd_server, "MAX_PER_USER", 3)
    monkeypatch.setattr(shepherd_server, "peer_of", lambda sock: shepherd_server.Peer(os.getpid(), 4711, 4711))
    with agent(config) as node:
        with monkeypatch.context() as patch:
            patch.setattr(shepherd_server, "HELLO_S", 0.3)
            idle = [Shepherd(node.run_dir) for _ in range(5)]
            assert [item.hear() for item in idle] == [""] * 5
        assert Shepherd(node.run_dir).hello().hear() == "start"


def test_full_seats_are_shared_by_user(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight users hold as many idle connections as allowed: shepherds of others are served, and none is dropped."""
    users: Iterator[int] = iter(())
    monkeypatch.setattr(shepherd_server, "MAX_CONNECTIONS", 8 * 3)
    monkeypatch.setattr(shepherd_server, "MAX_PER_USER", 3)
    monkeypatch.setattr(shepherd_server, "peer_of", lambda sock: Peer(os.getpid(), next(users), 1))
    with agent(config) as node:
        monkeypatch.setattr(
            node.daemon.shepherds, "_identify", lambda peer: Identity(peer.uid, peer.uid, peer.gid, peer.pid, 1)
        )

        def connect(*uids: int) -> list[Shepherd]:
            nonlocal users
            users = iter(uids)
            return [Shepherd(node.run_dir, job=uid) for uid in uids]

        (job,) = connect(2001)
        assert job.hello().hear() == "start"
        held = connect(2001, 2001, *[uid for uid in range(2002, 2009) for _ in range(3)])
        wait_until("all are seated", lambda: len(node.daemon.shepherds._connections), lambda seated: seated == 24)
        (other,) = connect(3000)
        assert other.hello().hear() == "start"
        wait_until("one has given its seat", lambda: closed(held), lambda gone: len(gone) == 1)
        (another,) = connect(2008)  # this user has as many as allowed
        assert another.hear() == ""
        assert closed([job, other]) == []


def closed(shepherds: list[Shepherd]) -> list[Shepherd]:
    """Return those whose connection the agent has closed."""
    readable, _, _ = select.select([shepherd.sock for shepherd in shepherds], [], [], 0)
    return [shepherd for shepherd in shepherds if shepherd.sock in readable]


def test_connection_is_closed_once(node: Node1, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the handling of the end fails, others are still served."""

    def fails(*_: object) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Arrivals, "on_disconnect", fails)
        shepherd = Shepherd(node.run_dir).hello()
        assert shepherd.hear() == "start"
        shepherd.close()
        wait_until("it is gone", lambda: node.daemon.shepherds._connections, lambda left: not left)
    assert Shepherd(node.run_dir).hello().hear() == "start"


def test_second_agent_does_not_take_the_sockets_of_the_first(node: Node1, config: Config) -> None:
    """It reports that another agent is running; a stale socket is replaced."""
    with pytest.raises(Exception, match="another agent is running"), agent(config):
        pass
    assert Shepherd(node.run_dir).hello().hear() == "start"


def test_sockets_are_accessible_with_any_umask(tmp_path: Path) -> None:
    """The shepherds of jobs run as their users; without access they would run without an agent."""
    before = os.umask(0o077)
    try:
        prepare_directory(tmp_path / "run")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o755


def test_directory_writable_by_others_is_rejected(config: Config) -> None:
    """Another user could replace the agent's socket."""
    config.agent.run_dir.mkdir()
    config.agent.run_dir.chmod(0o777)
    with pytest.raises(Exception, match="users other than"), agent(config):
        pass


def test_restarted_agent_finds_its_jobs(config: Config) -> None:
    """The shepherd reconnects to the next agent."""
    with agent(config) as first:
        shepherd = Shepherd(first.run_dir).hello()
        assert shepherd.hear() == "start"
    with agent(config) as second:
        assert second.acts.recovered == 1
        Shepherd(second.run_dir, root=2).hello()
        assert second.watched().root == 2
