"""Named UNIX sockets are created again with the rights of their user."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from slurm_affinode.checkpoint.files import unix_sockets
from slurm_affinode.checkpoint.files.file_table import FileTable
from slurm_affinode.checkpoint.interface import RestoreFailed
from slurm_affinode.checkpoint.user_files import User

from .. import criu_files as made

ALICE = User(2001, 2001)
CLOSED, LISTEN, ESTABLISHED = 7, 10, 1
STREAM, DATAGRAM = 1, 2
EXTERNAL, ACCEPTED_BY_PLUGIN = 1, 4
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes sockets of others")


class Place:
    """A directory of a user, in this mount namespace."""

    def __init__(self, path: Path, namespace: int, stack: ExitStack) -> None:
        self.path, self._namespace, self._stack = path, namespace, stack

    def make(self, *entries: bytes) -> dict[int, socket.socket]:
        """Make the sockets of an image."""
        result = unix_sockets.make(self._namespace, ALICE, FileTable.parse(made.image(*entries)))
        for item in result.values():
            self._stack.enter_context(item)
        return result


@pytest.fixture
def place() -> Iterator[Place]:
    """Return an empty directory."""
    with ExitStack() as stack:
        path = Path(tempfile.mkdtemp(prefix="sockets-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, path)
        path.chmod(0o755)
        os.chown(path, ALICE.uid, ALICE.gid)
        namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY)
        stack.callback(os.close, namespace)
        yield Place(path, namespace, stack)


def permissions(mode: int) -> tuple[int, bytes]:
    return 13, made.message((1, mode), (2, 1), (3, 1))


@as_root
def test_listening_socket_belongs_to_the_user(place: Place) -> None:
    """It has its name and mode; the umask of other threads is unchanged."""
    name = place.path / "socket"
    entry = made.unix(1, bytes(name) + b"\0", extra=[permissions(0o140640)])
    umask = os.umask(0)
    os.umask(umask)
    (result,) = place.make(entry).values()
    assert result.getsockname() == str(name)
    assert result.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    facts = name.stat()
    assert (facts.st_uid, stat.S_IMODE(facts.st_mode)) == (ALICE.uid, 0o640)
    assert os.umask(umask) == umask
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(name))


@as_root
@pytest.mark.parametrize("abstract", [False, True])
def test_listening_socket_has_the_credentials_of_the_user(place: Place, abstract: bool) -> None:
    """A client must not take a socket of the user for one of root."""
    name = b"\0" * abstract + bytes(place.path / "socket")
    assert len(place.make(made.unix(1, name))) == 1
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(name)
        _, uid, gid = struct.unpack("iII", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    assert (uid, gid) == (ALICE.uid, ALICE.gid)
    assert (os.geteuid(), os.getegid()) == (0, 0)


@as_root
def test_flags_and_options_are_restored(place: Place) -> None:
    body = made.message((1, 20000), (2, 30000), (3, 5), (4, 0), (5, 0), (6, 0), (11, 1))
    entry = made.message((1, 5), (2, 1), (16, made.message(
        (1, 1), (2, 1001), (3, DATAGRAM), (4, CLOSED), (5, os.O_RDWR | os.O_NONBLOCK), (6, 0), (7, 0), (8, 0),
        (9, made.OWNER), (10, body), (11, bytes(place.path / "s")),
    )))  # fmt: skip
    (result,) = place.make(entry).values()
    assert fcntl.fcntl(result, fcntl.F_GETFL) & os.O_NONBLOCK
    options = [socket.SO_SNDBUF, socket.SO_RCVBUF, socket.SO_PASSCRED]
    assert [result.getsockopt(socket.SOL_SOCKET, option) for option in options] == [20000, 30000, 1]


@as_root
@pytest.mark.parametrize("kind", [STREAM, 5])
def test_connection_to_service_is_restored_closed(place: Place, kind: int) -> None:
    """The client reads the end of the stream, without a connection to the service. CRIU inherits the socket."""
    entries = (
        made.unix(1, kind=kind, state=ESTABLISHED, peer=1009, uflags=ACCEPTED_BY_PLUGIN),
        made.unix(9, bytes(place.path / "nss"), kind=kind, state=ESTABLISHED, peer=1001, uflags=EXTERNAL),
    )
    assert unix_sockets.refusal(FileTable.parse(made.image(*entries))) is None
    (result,) = place.make(*entries).values()
    assert result.type == kind
    assert result.recv(1) == b""
    with pytest.raises(BrokenPipeError):
        result.send(b"again")
    table = FileTable.parse(made.image(*entries))
    client, service = FileTable.parse(table.rewritten({}, {1})).sockets
    assert (client.peer, client.external, service.external, service.path) == (0, False, True, None)


def test_unread_answer_of_service_is_refused() -> None:
    table = FileTable.parse(
        made.image(
            made.unix(1, state=ESTABLISHED, peer=1009, uflags=ACCEPTED_BY_PLUGIN),
            made.unix(9, b"/run/nss", state=ESTABLISHED, peer=1001, uflags=EXTERNAL),
        )
    )
    assert unix_sockets.refusal(table, {1}) == "its connection to /run/nss has data that is not read yet"


@as_root
def test_stale_socket_is_replaced_but_no_other_file(place: Place) -> None:
    """A server that restarts does the same."""
    name = place.path / "socket"
    with socket.socket(socket.AF_UNIX) as before:
        before.bind(str(name))
    os.chown(name, ALICE.uid, ALICE.gid)
    place.make(made.unix(1, bytes(name)))
    name.unlink()
    name.write_text("not a socket")
    with pytest.raises(RestoreFailed, match=f"{name}: its socket cannot be made: Address already in use"):
        place.make(made.unix(1, bytes(name)))
    assert name.read_text() == "not a socket"


@as_root
def test_socket_of_root_is_not_removed(place: Place) -> None:
    """A link has replaced its directory."""
    directory_of_root = place.path / "theirs"
    directory_of_root.mkdir(mode=0o755)
    with socket.socket(socket.AF_UNIX) as before:
        before.bind(str(directory_of_root / "socket"))
    (place.path / "link").symlink_to(directory_of_root)
    for name in ("socket", "other"):
        with pytest.raises(RestoreFailed, match="cannot be made: Permission denied"):
            place.make(made.unix(1, bytes(place.path / "link" / name)))
    assert [path.name for path in directory_of_root.iterdir()] == ["socket"]


@as_root
def test_relative_name_is_relative_to_its_directory(place: Place) -> None:
    """Its address is unchanged."""
    before = Path.cwd()
    (result,) = place.make(made.unix(1, b"name", extra=[(14, bytes(place.path))])).values()
    assert result.getsockname() == "name"
    assert (place.path / "name").is_socket()
    assert Path.cwd() == before


@as_root
@pytest.mark.parametrize("exists", [False, True])
def test_removed_socket_has_its_address_and_no_file(place: Place, exists: bool) -> None:
    """A file that has the name now stays; missing directories are missing afterwards, too."""
    name = place.path / "gone" / "socket"
    if exists:
        name.parent.mkdir()
        os.chown(name.parent, ALICE.uid, ALICE.gid)
        name.write_text("another")
    (result,) = place.make(made.unix(1, bytes(name), extra=[(15, 1)])).values()
    assert result.getsockname() == str(name)
    assert [str(path.relative_to(place.path)) for path in place.path.rglob("*")] == (
        ["gone", "gone/socket"] if exists else []
    )
    assert not exists or name.read_text() == "another"


@as_root
def test_datagram_socket_is_connected_as_the_user(place: Place) -> None:
    """The user may connect to the node's log socket, but not to a socket that only root may use."""
    log = place.path / "log"
    entries = [
        made.unix(1, bytes(log), kind=DATAGRAM, uflags=EXTERNAL),
        made.unix(2, kind=DATAGRAM, state=CLOSED, peer=1001),
    ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(log))
        log.chmod(0o666)
        (result,) = place.make(*entries).values()
        result.send(b"hello")
        assert receiver.recv(9) == b"hello"
        log.chmod(0o600)
        with pytest.raises(RestoreFailed, match="cannot be made: Permission denied"):
            place.make(*entries)


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([made.unix(1, b"/s"), made.unix(2, state=ESTABLISHED, peer=1001)], "a connection .* is not accepted yet"),
        ([made.unix(1, b"/s", kind=DATAGRAM, state=CLOSED), made.unix(2, kind=DATAGRAM, state=CLOSED, peer=1001)],
         "is connected to another one by name: /s"),
        ([made.unix(1, b"/s", kind=DATAGRAM, state=CLOSED, peer=1002), made.unix(2, b"\0a", kind=DATAGRAM, state=7)],
         "is connected to another one of the tree"),
        ([made.unix(3, b"/s", kind=DATAGRAM, state=CLOSED)], "has data that is not read yet"),
        ([made.unix(1, b"s", kind=DATAGRAM, uflags=EXTERNAL), made.unix(2, kind=DATAGRAM, state=CLOSED, peer=1001)],
         "which is not a full path"),
        ([made.unix(1, b"/s"), made.unix(2, b"/s", state=ESTABLISHED, peer=1009)], None),
        ([made.unix(1, b"\0s"), made.unix(2, state=ESTABLISHED, peer=1001)], "a connection .* is not accepted yet"),
        ([made.unix(1, b"/s", kind=DATAGRAM, uflags=EXTERNAL), made.unix(2, kind=DATAGRAM, state=7, peer=1001)], None),
    ],
)  # fmt: skip
def test_sockets_that_cannot_be_restored_fail_the_dump(entries: list[bytes], why: str | None) -> None:
    """CRIU would wait for a socket that it does not make itself."""
    refusal = unix_sockets.refusal(FileTable.parse(made.image(*entries)), {3})
    assert (refusal is None) == (why is None)
    assert why is None or re.search(why, str(refusal))
