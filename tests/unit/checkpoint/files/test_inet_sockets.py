"""Sockets bound to an address of the node: a restore binds them to an address of the new node."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_affinode.base.pidfd import Process
from slurm_affinode.checkpoint.files import inet_sockets
from slurm_affinode.checkpoint.files.inet_sockets import INDEX
from slurm_affinode.checkpoint.image.criu_images import BadImage, bodies, encoded, framed, message
from slurm_affinode.checkpoint.image.private_image import PrivateImage
from slurm_affinode.checkpoint.interface import RestoreFailed

HEADER = b"\x56\x54\x49\x48\x54\x54\x15\x56"
OLD = {ipaddress.ip_address("10.0.0.1"): "eth0", ipaddress.ip_address("10.1.0.1"): "ib0",
       ipaddress.ip_address("fd00::1"): "eth0", ipaddress.ip_address("fe80::1"): "eth0"}  # fmt: skip
NEW = {ipaddress.ip_address("10.1.0.2"): "ib0", ipaddress.ip_address("10.0.0.2"): "eth0",
       ipaddress.ip_address("fe80::2"): "eth0", ipaddress.ip_address("fd00::2"): "eth0"}  # fmt: skip


def words(text: str) -> list[int]:
    """Return an address as CRIU writes it: the bytes in memory of ``struct in_addr`` or ``in6_addr``."""
    packed = ipaddress.ip_address(text).packed
    return [int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4)]


def entry(number: int, source: str, peer: str = "0.0.0.0", port: int = 8000) -> bytes:  # noqa: S104 - the wildcard
    """Return a network socket in the file table."""
    fields = [(1, number), (2, number + 100), (3, 2), (4, 1), (5, 6), (6, 10), (7, port), (8, 0), (9, 2), (10, 128)]
    fields += [(11, word) for word in words(source)] + [(12, word) for word in words(peer)]
    inner = b"".join(encoded(key, value) for key, value in fields) + encoded(13, b"") + encoded(14, b"\x08\x01")
    return framed(encoded(1, 4) + encoded(2, number) + encoded(4, inner))


def addresses_in(data: bytes) -> list[tuple[list[int], list[int]]]:
    """Return source and peer of each socket."""
    result = []
    for body in bodies(data):
        (inner,) = message(body)[4]
        assert isinstance(inner, bytes)
        fields = message(inner)
        result.append((fields[11], fields[12]))
    return result  # type: ignore[return-value]


class Dump:
    """CRIU's directory of an image."""

    def __init__(self, path: Path, *entries: bytes) -> None:
        path.mkdir(mode=0o700)
        (path / "files.img").write_bytes(HEADER + b"".join(entries))
        self.path, self.fd = path, os.open(path, os.O_RDONLY)

    def image(self) -> PrivateImage:
        """Return the copy for a restore, which is the directory itself here."""
        return PrivateImage(self.path, self.fd, self.fd, {}, shared=False)

    def table(self) -> bytes:
        """Return the file table."""
        return (self.path / "files.img").read_bytes()


@pytest.fixture
def dump(tmp_path: Path) -> Iterator[Dump]:
    """Return a dump with sockets at addresses of the node, at an unused address, and at the wildcard address."""
    made = Dump(
        tmp_path / "criu", entry(1, "10.0.0.1"), entry(2, "10.1.0.1", "10.0.0.1"), entry(3, "0.0.0.0"),  # noqa: S104
        entry(4, "127.0.0.1"), entry(5, "192.168.7.7"), entry(6, "fd00::1", "::"), entry(7, "fe80::1", "fe80::99"),
        entry(8, "::ffff:10.0.0.1", "::"), entry(9, "::", "::"), framed(encoded(1, 5) + encoded(2, 77)),
    )  # fmt: skip
    yield made
    os.close(made.fd)


def test_addresses_are_those_of_the_new_node(dump: Dump) -> None:
    """Addresses of socket and peer are mapped by interface; mapped addresses stay mapped; ports do not change."""
    inet_sockets.record(dump.fd, OLD)
    assert json.loads((dump.path / INDEX).read_text()) == {str(address): name for address, name in OLD.items()}
    before = dump.table()
    moved = inet_sockets.move(dump.image(), NEW)
    assert moved == dict(
        zip(OLD, map(ipaddress.ip_address, ("10.0.0.2", "10.1.0.2", "fd00::2", "fe80::2")), strict=True)
    )
    addresses = addresses_in(dump.table()[: -len(framed(encoded(1, 5) + encoded(2, 77)))])
    assert addresses == [
        (words(source), words(peer))
        for source, peer in (
            ("10.0.0.2", "0.0.0.0"), ("10.1.0.2", "10.0.0.2"), ("0.0.0.0", "0.0.0.0"), ("127.0.0.1", "0.0.0.0"),  # noqa: S104
            ("192.168.7.7", "0.0.0.0"), ("fd00::2", "::"), ("fe80::2", "fe80::99"), ("::ffff:10.0.0.2", "::"),  # noqa: S104
            ("::", "::"),
        )
    ]  # fmt: skip
    assert len(dump.table()) == len(before)
    for old, new in zip(bodies(before), bodies(dump.table()), strict=True):
        assert sorted(message(old)) == sorted(message(new))
        assert message(old)[2] == message(new)[2]


def test_image_is_unchanged_on_its_own_node(dump: Dump) -> None:
    """Also without sockets at an address of the node, and if the image has no record of addresses."""
    before = dump.table()
    assert inet_sockets.move(dump.image(), NEW) == {}
    inet_sockets.record(dump.fd, {ipaddress.ip_address("10.9.9.9"): "eth9"})
    assert not (dump.path / INDEX).exists()
    inet_sockets.record(dump.fd, OLD)
    assert inet_sockets.move(dump.image(), NEW | OLD) == {}
    assert dump.table() == before


def test_another_interface_is_used_if_none_has_the_name(dump: Dump) -> None:
    """It is the one from which this node sends to other networks; without one, the job is not restored."""
    inet_sockets.record(dump.fd, {ipaddress.ip_address("10.0.0.1"): "en7"})
    here = inet_sockets.addresses()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
            sends_from = ipaddress.ip_address(sock.getsockname()[0])
        except OSError:
            sends_from = None
    if sends_from in here:
        assert inet_sockets.move(dump.image(), here) == {ipaddress.ip_address("10.0.0.1"): sends_from}
    with pytest.raises(RestoreFailed, match=r"a socket at 10\.0\.0\.1, the address of en7 on its former node"):
        inet_sockets.move(dump.image(), {})


def test_damaged_record_is_rejected(dump: Dump) -> None:
    """A name that is not text, an invalid address, or a document that is not an object."""
    for text in ('{"10.0.0.1": 5}', '{"10.0.0": "eth0"}', "[]", "{"):
        (dump.path / INDEX).write_text(text)
        with pytest.raises(BadImage, match=r"addresses\.json"):
            inet_sockets.move(dump.image(), NEW)


def test_own_addresses_are_found() -> None:
    """Without those of the loopback interface; a socket can be bound to each of them."""
    for address in inet_sockets.addresses():
        assert not address.is_loopback
        if address.version == 4:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.bind((str(address), 0))


def connection(number: int, source: str, port: int, peer: str, peer_port: int) -> bytes:
    """Return an established TCP connection in the file table."""
    fields = [
        (1, number),
        (2, number + 100),
        (3, 2),
        (4, 1),
        (5, 6),
        (6, 1),
        (7, port),
        (8, peer_port),
        (9, 2),
        (10, 0),
    ]
    fields += [(11, word) for word in words(source)] + [(12, word) for word in words(peer)]
    inner = b"".join(encoded(key, value) for key, value in fields) + encoded(13, b"") + encoded(14, b"\x08\x01")
    return framed(encoded(1, 4) + encoded(2, number) + encoded(4, inner))


def states(table: bytes) -> list[tuple[object, ...]]:
    """Return state, ports and shutdown of each socket."""
    result = []
    for body in bodies(table):
        (inner,) = message(body)[4]
        assert isinstance(inner, bytes)
        fields = message(inner)
        result.append((*(fields[key][0] for key in (6, 7, 8)), fields.get(19, [0])[0]))
    return result


def test_connections_to_others_are_closed(tmp_path: Path) -> None:
    """Those with both ends in the image are kept, also between IPv4 and IPv6 sockets, and so is a listener."""
    internal = [
        connection(1, "10.0.0.1", 29500, "10.0.0.1", 40000), connection(2, "::ffff:10.0.0.1", 40000, "10.0.0.1", 29500)
    ]  # fmt: skip
    others = [connection(3, "10.0.0.1", 8000, "10.9.9.9", 5), connection(4, "10.0.0.1", 40000, "10.0.0.1", 29501)]
    dump = Dump(tmp_path / "criu", *internal, *others, entry(5, "10.0.0.1"))
    (tmp_path / "criu" / "tcp-stream-65.img").write_bytes(b"")
    image = dump.image()
    assert inet_sockets.restored(image) == inet_sockets.KEEP
    table = image.read("files.img")
    assert states(table) == [(1, 29500, 40000, 0), (1, 40000, 29500, 0), (7, 0, 0, 3), (7, 0, 0, 3), (10, 8000, 0, 0)]
    assert addresses_in(table)[2] == (words("10.0.0.1"), words("10.9.9.9"))


def test_image_without_internal_connections_is_restored_unchanged(tmp_path: Path) -> None:
    """As the images of releases that closed all connections."""
    dump = Dump(tmp_path / "criu", connection(1, "10.0.0.1", 29500, "10.0.0.1", 40000))
    image = dump.image()
    before = image.read("files.img")
    assert inet_sockets.restored(image) == inet_sockets.CLOSE
    assert image.read("files.img") == before


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_connection_within_the_job_is_found(family: socket.AddressFamily) -> None:
    """One with both ends in the processes, in one or in two of them; not one with an end in another process."""
    with socket.socket(family) as listener:
        listener.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
        listener.listen()
        with Process(os.getpid()) as process:
            assert inet_sockets.options([process]) == inet_sockets.CLOSE
            client = socket.create_connection(listener.getsockname()[:2])
            server, _ = listener.accept()
            with client, server:
                assert inet_sockets.options([process]) == inet_sockets.KEEP_AT_DUMP
                code = "import sys; sys.stdin.read()"
                with subprocess.Popen(
                    (sys.executable, "-c", code), stdin=subprocess.PIPE, pass_fds=[server.fileno()]
                ) as child:
                    server.close()
                    assert not inet_sockets.connected([process])
                    with Process(child.pid) as other:
                        assert inet_sockets.connected([process, other])
                    assert child.stdin is not None
                    child.stdin.close()


TCP_REPAIR = 19
"""``linux/tcp.h``."""


@pytest.fixture
def in_repair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a TCP connection; that of the server is in repair mode, as after a dump."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        client.sendall(b"before")
        try:
            server.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        except PermissionError:
            pytest.skip("the repair mode of TCP requires CAP_NET_ADMIN")
        yield client, server


def test_connection_continues_after_a_dump(in_repair: tuple[socket.socket, socket.socket]) -> None:
    client, server = in_repair
    with pytest.raises(PermissionError):
        server.recv(100)
    others = (*socket.socketpair(), socket.socket(type=socket.SOCK_DGRAM))
    with Process(os.getpid()) as process:
        inet_sockets.end_repair([process.id])
    for other in others:
        other.close()
    assert server.recv(100) == b"before"
    server.sendall(b"after")
    client.settimeout(10)
    assert client.recv(100) == b"after"


@pytest.mark.parametrize("failed", [False, True])
def test_port_can_be_bound_again_after_a_dump(in_repair: tuple[socket.socket, socket.socket], failed: bool) -> None:
    """A dump that fails ends the mode itself, and leaves the socket without the option too."""
    client, server = in_repair
    address = server.getsockname()
    with Process(os.getpid()) as process:
        reusable = inet_sockets.reusable([process.id])
        if failed:
            server.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 0)
        inet_sockets.end_repair([process.id], reusable)
    server.recv(100)
    server.close()  # first: its end waits for a minute
    client.close()
    socket.create_server(address).close()


def test_option_of_a_client_is_unchanged_after_a_dump() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client, Process(os.getpid()) as process:
        client.connect(listener.getsockname())
        inet_sockets.end_repair([process.id], inet_sockets.reusable([process.id]))
        assert not client.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)


def test_connection_of_another_process_is_left_alone(in_repair: tuple[socket.socket, socket.socket]) -> None:
    _, server = in_repair
    with Process(os.getpid()) as process:
        inet_sockets.end_repair([process.id._replace(started=process.started + 1)])  # its PID was used again
    assert server.getsockopt(socket.IPPROTO_TCP, TCP_REPAIR) == 1
    server.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 0)


def port_entry(source: str, port: int, *, protocol: int = 6, peer_port: int = 0) -> bytes:
    """Return a network socket with a local port in the file table."""
    fields = [(1, 1), (2, 101), (3, 2), (4, 1), (5, protocol), (6, 10), (7, port), (8, peer_port)]
    inner = b"".join(encoded(*field) for field in (*fields, *((11, word) for word in words(source)), (12, 0)))
    return framed(encoded(1, 4) + encoded(2, 1) + encoded(4, inner))


def proc_net(tmp_path: Path, kind: str, source: str, port: int, *, state: str = "0A", uid: int = 0) -> Path:
    """Return a ``/proc`` with one socket, whose inode is 4711."""
    net = tmp_path / "proc" / "self" / "net"
    net.mkdir(parents=True)
    local = "".join(f"{word:08X}" for word in words(source))
    row = f"   0: {local}:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 {uid} 0 4711 1\n"
    for name in ("tcp", "tcp6", "udp", "udp6"):
        (net / name).write_text("  sl  local_address rem_address   st\n" + row * (name == kind))
    return tmp_path / "proc"


@pytest.mark.parametrize(
    ("address", "kind", "used_address"),
    [
        ("10.0.0.1", "tcp", "10.0.0.1"),
        ("0.0.0.0", "tcp", "10.0.0.1"),  # noqa: S104
        ("10.0.0.1", "tcp6", "::"),
        ("10.0.0.1", "tcp6", "::ffff:10.0.0.1"),
        ("::", "tcp", "127.0.0.1"),
        ("fd00::1", "tcp6", "fd00::1"),
    ],
)
def test_port_of_root_or_of_another_restored_job_is_not_shared(
    tmp_path: Path, address: str, kind: str, used_address: str
) -> None:
    """CRIU binds as root with ``SO_REUSEPORT``, so the kernel would distribute the connections among both sockets."""
    ports = inet_sockets.ports(HEADER + port_entry(address, 8000))
    proc = proc_net(tmp_path, kind, used_address, 8000)
    with pytest.raises(RestoreFailed, match="its port 8000 is in use on this node"):
        inet_sockets.refuse_shared(ports, proc=proc)
    inet_sockets.refuse_shared(ports, {"4711"}, proc=proc)  # its own


def test_datagram_port_is_not_shared(tmp_path: Path) -> None:
    ports = inet_sockets.ports(HEADER + port_entry("10.0.0.1", 8000, protocol=17, peer_port=9))
    with pytest.raises(RestoreFailed, match="its port 8000 is in use"):
        inet_sockets.refuse_shared(ports, proc=proc_net(tmp_path, "udp", "10.0.0.1", 8000, state="07"))


@pytest.mark.parametrize("what", ["address", "port", "user", "state", "protocol", "connection", "unbound"])
def test_other_sockets_do_not_prevent_a_restore(tmp_path: Path, what: str) -> None:
    """The kernel refuses to share a port with another user, unless both agree."""
    source, peer_port = ("10.0.0.2" if what == "address" else "10.0.0.1"), (9 if what == "connection" else 0)
    port = {"port": 8001, "unbound": 0}.get(what, 8000)
    ports = inet_sockets.ports(HEADER + port_entry(source, port, peer_port=peer_port))
    kind, state = ("udp" if what == "protocol" else "tcp"), ("01" if what == "state" else "0A")
    uid = 1000 if what == "user" else 0
    used_port = port if what == "unbound" else 8000
    inet_sockets.refuse_shared(ports, proc=proc_net(tmp_path, kind, "10.0.0.1", used_port, state=state, uid=uid))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has sockets of root")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_listening_socket_of_root_is_found(family: socket.AddressFamily) -> None:
    address = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.socket(family) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind((address, 0))
        server.listen()
        ports = inet_sockets.ports(HEADER + port_entry(address, server.getsockname()[1]))
        with pytest.raises(RestoreFailed, match="in use on this node"):
            inet_sockets.refuse_shared(ports)
        inet_sockets.refuse_shared(ports, {str(os.fstat(server.fileno()).st_ino)})


def test_descriptor_that_is_no_longer_a_socket_is_closed(
    in_repair: tuple[socket.socket, socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    with (tmp_path / "file").open("wb") as file:
        monkeypatch.setattr(Process, "descriptor", lambda self, number: os.dup(file.fileno()))
        with Process(os.getpid()) as process:
            inet_sockets.end_repair([process.id])
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    in_repair[1].setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 0)


CONNECTED = """
import signal, socket
server = socket.socket()
server.bind(("127.0.0.1", 0))
server.listen()
client = socket.create_connection(server.getsockname())
accepted = server.accept()
print(server.getsockname()[1], flush=True)
signal.pause()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_port_of_a_killed_process_can_be_bound_at_once() -> None:
    """A restore on the same node binds it, while the kernel still keeps the connection in TIME_WAIT."""
    with subprocess.Popen((sys.executable, "-c", CONNECTED), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        port = int(running.stdout.readline())
        with Process(running.pid) as process:
            inet_sockets.free_ports([process.id])
        running.kill()
    with socket.socket() as restored:
        restored.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        restored.bind(("127.0.0.1", port))
