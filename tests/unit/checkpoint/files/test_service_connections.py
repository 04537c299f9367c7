"""Connections to services of the node are identified by the kernel, whatever names a user binds."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from slurm_affinode.base.pidfd import Process
from slurm_affinode.checkpoint.files.service_connections import Services, environment

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root listens as another user")
USER = 2001


class Place:
    """A directory with sockets that users listen at, and connections of this process to them."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path, self._stack = path, stack

    def listen(self, name: str, uid: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """Listen as a user."""
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX, kind))
        os.seteuid(uid)
        try:
            listener.bind(str(self.path / name))
            listener.listen()
        finally:
            os.seteuid(0)
        return listener

    def connect(self, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
        """Return the client and the server of a connection."""
        client = self._stack.enter_context(socket.socket(socket.AF_UNIX, listener.type))
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        return client, self._stack.enter_context(server)


@pytest.fixture
def place() -> Iterator[Place]:
    """Return an empty directory that all users may write to."""
    with ExitStack() as stack:
        path = Path(tempfile.mkdtemp(prefix="services-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, path)
        path.chmod(0o777)
        yield Place(path, stack)


def connections(services: Services) -> dict[int, tuple[str, bool]]:
    """Return the connections of this process: inode -> address, busy."""
    return {service.inode: (service.address, service.busy) for service in services.of(Process(os.getpid()))}


def inode(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino


@as_root
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_connection_to_service_of_root_is_found(place: Place, kind: int) -> None:
    """Only the client's end, and once, also with two descriptors."""
    client, _ = place.connect(place.listen("nss", 0, kind))
    with client.dup():
        services = Services((f"{place.path}/*",))
        assert connections(services) == {inode(client): (f"{place.path}/nss", False)}


@as_root
def test_socket_that_a_user_has_bound_is_no_service(place: Place) -> None:
    """Its address is in the list, but another user than that of the service listens there."""
    client, _ = place.connect(place.listen("nss", USER))
    assert connections(Services((f"{place.path}/nss",))) == {}
    assert connections(Services((f"{place.path}/nss",), frozenset({USER + 1}))) == {}
    assert inode(client) in connections(Services((f"{place.path}/nss",), frozenset({USER})))


@as_root
def test_user_of_service_cannot_pass_off_its_own_job(place: Place) -> None:
    """A job of the service's user may listen itself: its connections are not closed."""
    listener = place.listen("nss", USER)
    child = os.fork()
    if child == 0:
        os.setuid(USER)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(listener.getsockname())
            os.read(0, 0)
            os.kill(os.getpid(), 19)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    try:
        services = Services((f"{place.path}/nss",), frozenset({USER}))
        with Process(child) as process:
            assert services.of(process) == ()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@as_root
def test_other_sockets_are_not_closed(place: Place) -> None:
    """A listener, a socket without a peer, a datagram socket, a pair, TCP, and an address that is not listed."""
    listener = place.listen("nss", 0)
    place.connect(place.listen("other", 0))
    with ExitStack() as stack:
        for item in socket.socketpair():
            stack.enter_context(item)
        stack.enter_context(socket.socket(socket.AF_UNIX))
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        stack.enter_context(socket.create_connection(server.getsockname()))
        datagrams = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        datagrams.bind(str(place.path / "log"))
        stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).connect(datagrams.getsockname())
        assert connections(Services((f"{place.path}/nss", f"{place.path}/log"))) == {}
    assert listener.fileno() >= 0


@as_root
def test_request_in_progress_is_reported(place: Place) -> None:
    """Sent and not read by the service, and answered and not read by the client."""
    services = Services((f"{place.path}/nss",))
    client, server = place.connect(place.listen("nss", 0))
    address = f"{place.path}/nss"
    assert connections(services) == {inode(client): (address, False)}
    client.sendall(b"who is alice?")
    assert connections(services) == {inode(client): (address, True)}
    server.recv(100)
    assert connections(services) == {inode(client): (address, False)}
    server.sendall(b"2001")
    assert connections(services) == {inode(client): (address, True)}
    client.recv(100)
    assert connections(services) == {inode(client): (address, False)}


def test_wildcards_do_not_cross_directories() -> None:
    services = Services(("/var/lib/sss/pipes/*", "/run/service-?/socket"))
    assert services.names("/var/lib/sss/pipes/nss")
    assert services.names("/run/service-1/socket")
    for address in ("/var/lib/sss/pipes/private/pam", "/var/lib/sss/pipes", "/run/var/lib/sss/pipes/nss", "nss", ""):
        assert not services.names(address), address


def test_plugin_gets_inodes() -> None:
    assert environment({12, 7}) == {"SLURM_AFFINODE_CLOSED_SOCKETS": "7,12"}


def test_file_in_place_of_a_socket_is_closed_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process exchanges its descriptor between the two looks at it. The agent would run out of descriptors."""
    (tmp_path / "file").touch()
    opened: list[int] = []

    def descriptor(_: Process, number: int) -> int:
        opened.append(os.open(tmp_path / "file", os.O_RDONLY))
        return opened[-1]

    monkeypatch.setattr(Process, "descriptor", descriptor)
    first, other = socket.socketpair()
    with first, other:
        assert connections(Services(("/run/*",))) == {}
    assert opened
    for fd in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
