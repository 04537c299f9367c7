"""Socket information from sock_diag, checked against real sockets; and which of it counts as a request."""

from __future__ import annotations

import errno
import ipaddress
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import DEADLINE_S, wait_until

from slurm_affinode.base.pidfd import Process
from slurm_affinode.cli import doctor
from slurm_affinode.suspension.inplace import sock_diag, sockets
from slurm_affinode.suspension.inplace.sock_diag import (
    CLOSE_WAIT,
    ESTABLISHED,
    FIN_WAIT2,
    LISTEN,
    NetSpace,
    Sock,
    SockDiag,
    SockDiagError,
)
from slurm_affinode.suspension.inplace.sockets import JobSockets, NodeSockets, SocketTable, at_rest, meanwhile

Server = tuple[socket.socket, NodeSockets, Callable[[], SocketTable]]


@pytest.fixture
def diag() -> Iterator[SockDiag]:
    """A SockDiag of this process's network namespace."""
    try:
        made = SockDiag()
        made.dump()
    except SockDiagError as error:
        pytest.skip(f"no sock_diag here: {error}")
    yield made
    made.close()


def of(diag: SockDiag, *socks: socket.socket) -> dict[int, Sock]:
    """Return the entries of these sockets."""
    inodes = {os.fstat(sock.fileno()).st_ino for sock in socks}
    return {inode: sock for inode, sock in diag.dump().items() if inode in inodes}


def only_socket(diag: SockDiag, sock: socket.socket) -> Sock:
    [result] = of(diag, sock).values()
    return result


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_connections_not_accepted_are_counted(diag: SockDiag, family: socket.AddressFamily) -> None:
    """The kernel completes the handshake itself; the listener shows the number of waiting connections."""
    with socket.socket(family) as listener:
        try:
            listener.bind(("127.0.0.1" if family is socket.AF_INET else "::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
        listener.listen(5)
        seen = only_socket(diag, listener)
        assert (seen.listens, seen.waiting, seen.port) == (True, 0, listener.getsockname()[1])
        with socket.create_connection(listener.getsockname()[:2]), socket.create_connection(listener.getsockname()[:2]):
            wait_until("both wait", lambda: only_socket(diag, listener).waiting == 2)
            listener.accept()[0].close()
            assert only_socket(diag, listener).waiting == 1


def test_unread_bytes_are_counted(diag: SockDiag) -> None:
    """For TCP, unread bytes, total bytes received, and times are reported. The end of a stream is not a byte."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        with server:
            before = only_socket(diag, server)
            assert (before.state, before.waiting, before.received) == (ESTABLISHED, 0, 0)
            client.sendall(b"GET /")
            wait_until("they have come", lambda: only_socket(diag, server).waiting == 5)
            assert only_socket(diag, server).received == 5
            assert server.recv(5) == b"GET /"
            after = only_socket(diag, server)
            assert (after.waiting, after.received, after.sent) == (0, 5, 0)
            server.sendall(b"HTTP/1.0 200 OK")
            wait_until("it has gone out", lambda: only_socket(diag, server).sent == 1)
            assert after.received_ms is not None
            client.shutdown(socket.SHUT_WR)
            wait_until("the end has come", lambda: only_socket(diag, server).state == CLOSE_WAIT)
            assert only_socket(diag, server).unread == 0


def test_bytes_received_after_shutdown_are_counted(diag: SockDiag) -> None:
    """The client waits for the response after it has shut down its side."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        with server:
            client.shutdown(socket.SHUT_WR)
            wait_until("its end has come there", lambda: only_socket(diag, client).state == FIN_WAIT2)
            server.sendall(b"200 OK")
            wait_until("it has come", lambda: only_socket(diag, client).unread == 6)


def test_both_ends_of_connection_are_matched(diag: SockDiag, tmp_path: Path) -> None:
    """This covers TCP, also between the two address families, and UNIX sockets."""
    pairs = [socket.socketpair()]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        pairs.append((client, listener.accept()[0]))
    try:
        with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
            client = socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
            pairs.append((client, listener.accept()[0]))
    except (OSError, ValueError):
        assert not socket.has_dualstack_ipv6()
    for left, right in pairs:
        with left, right:
            left_end, right_end = only_socket(diag, left), only_socket(diag, right)
            assert left_end.local
            assert (left_end.local, left_end.remote) == (right_end.remote, right_end.local)


def test_unix_sockets_are_listed(diag: SockDiag, tmp_path: Path) -> None:
    """A listener's queue, and unread bytes of an open connection."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "sock"))
        listener.listen(5)
        assert (only_socket(diag, listener).listens, only_socket(diag, listener).waiting) == (True, 0)
        client.connect(str(tmp_path / "sock"))
        assert only_socket(diag, listener).waiting == 1
        server, _ = listener.accept()
        with server:
            client.sendall(b"abc")
            assert (only_socket(diag, listener).waiting, only_socket(diag, server).unread) == (0, 3)


def test_dump_is_filtered(diag: SockDiag) -> None:
    """Sockets are selected by inode and by kind: listeners, connections, UNIX sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        inodes = frozenset(os.fstat(sock.fileno()).st_ino for sock in (listener, client))
        assert diag.dump(inodes).keys() == inodes
        assert [sock.listens for sock in diag.dump(inodes, ("listen",)).values()] == [True]
        assert diag.dump(inodes, ("unix",)) == {}
        assert diag.dump(inodes, ()) == {}
        assert diag.dump(frozenset()) == {}


def test_sockets_of_process_are_those_of_its_descriptors() -> None:
    """A process that has ended has none."""
    with socket.socket() as sock:
        assert os.fstat(sock.fileno()).st_ino in sock_diag.socket_inodes(Process(os.getpid()))
    with subprocess.Popen(["true"]) as ended:
        held = Process(ended.pid)
    assert sock_diag.socket_inodes(held) == frozenset()


SLEEPER = """
import socket, sys
listener = socket.create_server(("0.0.0.0", 8000))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root")
def test_sockets_of_another_network_namespace_are_listed() -> None:
    """The listener there is visible from here, but only through its own namespace."""
    inside = subprocess.Popen(
        ("unshare", "--net", sys.executable, "-c", SLEEPER), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert inside.stdout is not None
        if inside.stdout.readline() != b"ready\n":
            pytest.skip("no network namespace can be made here")
        held = Process(inside.pid)
        inodes = sock_diag.socket_inodes(held)
        inner_diag = SockDiag(NetSpace.of(held))
        try:
            [listener] = [sock for inode, sock in inner_diag.dump().items() if inode in inodes]
        finally:
            inner_diag.close()
        assert (listener.listens, listener.port, listener.waiting) == (True, 8000, 0)
    finally:
        inside.communicate(b"")


# Listens in the namespace of the node, then enters a new one.
HANDED_OVER = """
import ctypes, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
if ctypes.CDLL(None).unshare(0x40000000):
    sys.exit(1)
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_listener_of_another_namespace_is_found() -> None:
    """A server in a container that received a socket of the node."""
    inside = subprocess.Popen((sys.executable, "-c", HANDED_OVER), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert inside.stdout is not None
        port = inside.stdout.readline().strip()
        if not port:
            pytest.skip("no network namespace can be made here")
        sockets = NodeSockets()
        job_sockets = sockets.of_processes([inside.pid])
        assert len(job_sockets.spaces) == 2
        with socket.create_connection(("127.0.0.1", int(port))):
            for read_sockets in (lambda: sockets.read(job_sockets), lambda: sockets.observations({7: job_sockets})[7]):
                wait_until(
                    "one waits", read_sockets, lambda seen: [s.waiting for s in seen.values() if s.listens] == [1]
                )
        sockets.close()
    finally:
        inside.communicate(b"")


def test_descriptor_of_another_kind_of_namespace_is_an_error() -> None:
    """The error contains the inode of the namespace."""
    space = NetSpace(os.open("/proc/self/ns/uts", os.O_RDONLY))
    with pytest.raises(SockDiagError, match=rf"net:\[{space.inode}\]: cannot be opened"):
        SockDiag(space)


# In new network namespaces, two processes with the same PID each listen on a port of their own.
REUSED = """
import ctypes, os, signal, socket, sys
from slurm_affinode.suspension.inplace.sockets import NodeSockets

def fork_as(number, port):
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(str(number - 1))
    ready, say = os.pipe()
    child = os.fork()
    if child == 0:
        if ctypes.CDLL(None).unshare(0x40000000):
            os._exit(1)
        listener = socket.create_server(("0.0.0.0", port))
        os.write(say, b"x")
        signal.pause()
    assert child == number, child
    os.close(say)
    assert os.read(ready, 1) == b"x"
    return child

first = fork_as(200, 8001)
sockets = NodeSockets()
own = sockets.of_processes([first])
os.kill(first, signal.SIGKILL)
os.waitpid(first, 0)
fork_as(200, 8002)
for space in own.namespaces.values():
    diag = sockets._open(space)
    print(sorted(sock.port for sock in diag.dump().values() if sock.port in (8001, 8002)))
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root")
def test_namespace_of_reused_pid_is_not_entered() -> None:
    """The namespace is held from the inspection of the process on."""
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", REUSED],
        check=False, timeout=DEADLINE_S, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(sock_diag.__file__).parents[3])},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr


# As a user, in a user and a network namespace of its own: sends forged responses to each socket that queries there.
FORGER = """
import socket, struct, sys
own = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4)
own.bind((0, 0))
body = struct.pack("=BBBxIII", 1, 1, 1, 777, 0, 0)
def message(kind, number):
    return struct.pack("=IHHII", 16 + len(body), kind, 2, number, 0) + body
sys.stdout.write("ready\\n")
sys.stdout.flush()
while True:
    with open("/proc/net/netlink") as table:
        rows = [line.split() for line in table][1:]
    for row in rows:
        if row[1] == "4" and int(row[2]) not in (0, own.getsockname()[0]):
            for number in range(1, 4):
                for kind in (20, 3):
                    try:
                        own.sendto(message(kind, number), (int(row[2]), 0))
                        print("sent", file=sys.stderr, flush=True)
                    except OSError as error:
                        print(error.errno, file=sys.stderr, flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root")
def test_response_forged_by_owner_of_namespace_is_rejected(tmp_path: Path) -> None:
    """The creator of the namespace may send to any netlink socket in it."""
    error_file = tmp_path / "said"
    with error_file.open("wb") as errors:
        inside = subprocess.Popen(
            ("unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", FORGER),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
    try:
        assert inside.stdout is not None
        if inside.stdout.readline() != b"ready\n":
            pytest.skip("no user namespace can be made here")
        inner_diag = SockDiag(NetSpace.of(Process(inside.pid)))
        try:
            inner_diag.dump()  # binds its socket to an address
            wait_until("it was tried", error_file.read_text)
            for _ in range(3):
                assert 777 not in inner_diag.dump()
        finally:
            inner_diag.close()
        assert set(error_file.read_text().split()) == {str(errno.ECONNREFUSED)}
    finally:
        inside.kill()
        inside.communicate()


def test_doctor_reports_whether_requests_can_be_detected(diag: SockDiag) -> None:
    """Where the kernel does not report sockets, mode=inplace is refused, and nothing else is wrong."""
    assert doctor.check().status == "ok"

    def none() -> SockDiag:
        raise SockDiagError("sock_diag: not supported")

    check = doctor.check(none)
    assert (check.status, check.detail.endswith("not supported")) == ("skipped", True)


@given(data=st.binary(max_size=400))
def test_malformed_response_is_parsed_without_error(data: bytes) -> None:
    """Responses may be torn, empty, or contain wrong lengths."""
    for _, _, _, body in sock_diag.messages(data):
        list(sock_diag._inet(body))
        list(sock_diag._unix(body))


# --- requests

LISTENER = Sock(1, "tcp", LISTEN, 0, port=8000)
OPEN = Sock(2, "tcp", ESTABLISHED, 0, port=8000, received=100, received_ms=60_000, sent_ms=59_900)
LOCAL = Sock(3, "unix", ESTABLISHED, 0)


def table_of(*socks: Sock) -> dict[int, Sock]:
    return {sock.inode: sock for sock in socks}


QUIET = table_of(LISTENER, OPEN, LOCAL)


def test_job_without_requests_is_at_rest() -> None:
    """It listens, and the requests on its open connections were answered."""
    assert sockets.at_rest(QUIET, QUIET, within_s=900) is None
    assert sockets.meanwhile(QUIET, QUIET) is None


def test_request_keeps_job_awake() -> None:
    """A request is queued at a listener, unread, or read and not answered; bytes that are never read do not count."""
    for sock, why in (
        (replace(LISTENER, waiting=1), "a connection waits on port 8000"),
        (replace(OPEN, waiting=7), "bytes wait on a connection on port 8000"),
        (replace(LOCAL, waiting=7), "bytes wait on a connection on a UNIX socket"),
        (replace(OPEN, received_ms=3000, sent_ms=9000), "data that arrived 3s ago on port 8000 has not been answered"),
    ):
        assert sockets.at_rest(table_of(sock), QUIET, within_s=900) == why
    stuck = table_of(replace(LOCAL, waiting=7), replace(OPEN, waiting=7, received_ms=901_000, sent_ms=10))
    assert sockets.at_rest(stuck, stuck, within_s=900) is None
    slow = table_of(replace(OPEN, waiting=7, received_ms=60_000, sent_ms=10))
    assert sockets.at_rest(slow, slow, within_s=900) == "bytes wait on a connection on port 8000"
    old = table_of(replace(OPEN, received_ms=901_000, sent_ms=950_000))
    assert sockets.at_rest(old, old, within_s=900) is None


def test_request_sent_with_its_connection_keeps_job_awake() -> None:
    """Both arrive in the same tick of the kernel's clock, from which both times count if nothing has been sent yet."""
    first = replace(OPEN, received_ms=3000, sent_ms=3000, sent=0)
    assert (
        sockets.at_rest(table_of(first), {}, within_s=900)
        == "data that arrived 3s ago on port 8000 has not been answered"
    )
    for sent in (1, None):  # a response as quick as that; a kernel that does not report it
        assert sockets.at_rest(table_of(replace(first, sent=sent)), {}, within_s=900) is None


def test_request_longer_than_idle_window_keeps_job_awake() -> None:
    """Half a minute, on a connection to the job. A response to the job needs no response from it."""
    slow = replace(OPEN, received_ms=29_000, sent_ms=29_100)
    why = "data that arrived 29s ago on port 8000 has not been answered"
    assert sockets.at_rest(table_of(LISTENER, slow), {}, within_s=2) == why
    assert sockets.at_rest(table_of(LISTENER, replace(slow, received_ms=30_000)), {}, within_s=2) is None
    assert sockets.at_rest(table_of(LISTENER, replace(slow, port=40_000)), {}, within_s=2) is None


def test_request_during_suspension_wakes_job() -> None:
    """A request that was read counts as well: its response may wait for the GPU."""
    for sock, why in (
        (replace(LISTENER, waiting=1), "a connection waits on port 8000"),
        (replace(OPEN, received=101), "something came on port 8000"),
        (replace(OPEN, inode=9), "a connection was made on port 8000"),
        (replace(LOCAL, waiting=1), "bytes wait on a connection on a UNIX socket"),
    ):
        assert sockets.meanwhile(QUIET, QUIET | table_of(sock)) == why
    closed = table_of(replace(OPEN, state=CLOSE_WAIT, waiting=1, received=101))
    assert sockets.meanwhile(QUIET, QUIET | closed) is None
    stuck = QUIET | table_of(replace(LOCAL, waiting=7))
    assert sockets.meanwhile(stuck, stuck) is None
    assert sockets.meanwhile(stuck, QUIET | table_of(replace(LOCAL, waiting=8))) is not None
    assert sockets.meanwhile(QUIET, {}) is None


def test_traffic_inside_job_is_not_a_request() -> None:
    """A connection with both ends in the job is not a request, but one from outside is."""
    server = Sock(4, "tcp", ESTABLISHED, 5, 8000, received=5, received_ms=9, sent_ms=20, local=b"s", remote=b"c")
    client = Sock(5, "tcp", ESTABLISHED, 0, 5000, local=b"c", remote=b"s")
    left = Sock(6, "unix", ESTABLISHED, 3, local=b"6", remote=b"7")
    right = Sock(7, "unix", ESTABLISHED, 0, local=b"7", remote=b"6")
    inside = QUIET | table_of(server, client, left, right)
    assert sockets.at_rest(inside, QUIET, within_s=900) is None
    assert sockets.meanwhile(QUIET, inside) is None
    for outside in (table_of(server), table_of(server, replace(client, remote=b"x")), table_of(left)):
        assert sockets.at_rest(QUIET | outside, QUIET, within_s=900) is not None
        assert sockets.meanwhile(QUIET, QUIET | outside) is not None


def test_client_of_daemon_gets_no_requests(diag: SockDiag, tmp_path: Path) -> None:
    """Example: the C library as a client of sssd. Bytes from the daemon still count. Its server can get requests."""
    path = str(tmp_path / "nss")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(path)
        listener.listen()
        client.connect(path)
        with listener.accept()[0] as accepted, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
            client_socks, server_socks = (
                diag.dump(frozenset(os.fstat(sock.fileno()).st_ino for sock in some))
                for some in ((client, log), (accepted,))
            )
            assert (len(client_socks), len(server_socks)) == (2, 1)
            assert (sockets.can_be(client_socks), sockets.can_be(server_socks)) == (False, True)
            accepted.sendall(b"changed")
            after = diag.dump(frozenset(client_socks))
            assert sockets.meanwhile(client_socks, after) == "bytes wait on a connection on a UNIX socket"


def test_socket_of_cuda_gets_no_requests(diag: SockDiag) -> None:
    """Each process that uses CUDA listens on one; a similar name of the program itself does not match."""
    for name, expected in ((f"\0cuda-uvmfd-{os.getpid()}-1", False), (f"\0my-cuda-uvmfd-{os.getpid()}", True)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(name)
            listener.listen()
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                peer.connect(name)
                dump = diag.dump(frozenset({os.fstat(listener.fileno()).st_ino}))
        assert len(dump) == 1
        assert sockets.can_be(dump) is expected
        assert (sockets.at_rest(dump, dump, within_s=900) is not None) is expected
        assert (sockets.meanwhile({}, dump) is not None) is expected


def test_socket_connected_since_last_suspension_is_seen(diag: SockDiag) -> None:
    """It had none when it was suspended last; the kinds of its sockets are determined once per suspension."""
    sockets = NodeSockets()
    with (
        socket.create_server(("127.0.0.1", 0)) as broker,
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket() as client,
    ):
        inodes = frozenset(os.fstat(sock.fileno()).st_ino for sock in (listener, client))
        space = NetSpace.of_agent()
        job_sockets = JobSockets({space.inode: inodes}, {space.inode: space})
        for _ in range(2):
            assert len(sockets.observations({7: job_sockets})[7]) == 1
        assert sockets.observations({}) == {}  # it is awake
        client.connect(broker.getsockname())
        for _ in range(2):
            assert len(sockets.observations({7: job_sockets})[7]) == 2
    sockets.close()


PROBE = "127.0.0.2"
"""Address of a health check."""


@pytest.fixture
def server() -> Iterator[Server]:
    """Yield a listener with a short queue, and a function that returns its sockets, less those of ``PROBE``."""
    sockets = NodeSockets(probes=[ipaddress.ip_network(PROBE)])
    space = NetSpace.of_agent()
    with socket.create_server(("127.0.0.1", 0), backlog=8) as listener:
        job_sockets = JobSockets({space.inode: frozenset({os.fstat(listener.fileno()).st_ino})}, {space.inode: space})
        yield listener, sockets, lambda: sockets.observations({7: job_sockets})[7]
    sockets.close()


def waiting(table: SocketTable) -> int:
    return sum(sock.waiting for sock in table.values())


def test_connection_of_health_check_is_no_request(diag: SockDiag, server: Server) -> None:
    """It stays in the queue when its client gives up; a request beside it counts."""
    listener, _, read_table = server
    before = read_table()
    for _ in range(3):
        socket.create_connection(listener.getsockname(), source_address=(PROBE, 0)).close()
    wait_until("they wait", lambda: only_socket(diag, listener).waiting == 3)
    assert (waiting(read_table()), meanwhile(before, read_table()), at_rest(read_table(), before, within_s=900)) == (
        0,
        None,
        None,
    )
    with socket.create_connection(listener.getsockname()):
        wait_until("the request waits", lambda: only_socket(diag, listener).waiting == 4)
        assert "a connection waits" in str(meanwhile(before, read_table()))


def test_queue_full_of_health_checks_counts_as_request(diag: SockDiag, server: Server) -> None:
    """The kernel would drop requests to a full one."""
    listener, _, read_table = server
    for count in range(1, 9):
        socket.create_connection(listener.getsockname(), source_address=(PROBE, 0)).close()
        wait_until("it waits", lambda count=count: only_socket(diag, listener).waiting == count)  # type: ignore[misc]
        assert waiting(read_table()) == (0 if count < 8 else count)


def test_aborted_connection_counts_as_request(diag: SockDiag, server: Server) -> None:
    """The kernel no longer says who made it."""
    listener, _, read_table = server
    with socket.create_connection(listener.getsockname()) as client:
        wait_until("it waits", lambda: only_socket(diag, listener).waiting == 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until("it is aborted", lambda: not diag.pending().get(listener.getsockname()[1]))
    assert waiting(read_table()) == only_socket(diag, listener).waiting == 1


def test_data_on_open_connection_of_health_check_is_no_request(diag: SockDiag, server: Server) -> None:
    """So is a connection that stays open."""
    listener, sockets, _ = server
    with socket.create_connection(listener.getsockname(), source_address=(PROBE, 0)) as client:
        accepted, _ = listener.accept()
        with accepted, socket.create_connection(listener.getsockname()) as other, listener.accept()[0] as second:
            client.sendall(b"health")
            wait_until("it arrives", lambda: only_socket(diag, accepted).waiting == 6)
            space = NetSpace.of_agent()
            inodes = frozenset(os.fstat(sock.fileno()).st_ino for sock in (listener, accepted, second))
            result = sockets.read(JobSockets({space.inode: inodes}, {space.inode: space}))
            assert at_rest(result, result, within_s=900) is None
            other.sendall(b"request")
            wait_until("it arrives", lambda: only_socket(diag, second).waiting == 7)
            result = sockets.read(JobSockets({space.inode: inodes}, {space.inode: space}))
            assert "bytes wait" in str(at_rest(result, {}, within_s=900))
