"""Data read from a UNIX socket during a suspension: no counter shows it, but the wait locations of threads do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from inplace_site import Node, asleep, awake
from stopping import stop
from waiting import wait_until

from slurm_affinode.suspension.inplace import sockets
from slurm_affinode.suspension.inplace.sock_diag import ESTABLISHED, LISTEN, Sock, SockDiag
from slurm_affinode.suspension.inplace.sockets import NodeSockets, waits, went_on

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the kernel tells only root where others wait")

# A server on a UNIX socket with a thread that processes its input slowly. Arguments: path.
SERVER = """
import queue, socket, sys, threading, time
work = queue.SimpleQueue()
threading.Thread(target=lambda: work.get() and time.sleep(1000), daemon=True).start()
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
connection, _ = listener.accept()
print("accepted", flush=True)
while said := connection.recv(100):
    if said != b"nothing":
        work.put(said)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    path = tmp_path / "sock"
    running = subprocess.Popen([sys.executable, "-c", SERVER, path], stdout=subprocess.PIPE)
    yield running, path
    running.kill()
    running.communicate()


def resting(pid: int) -> Mapping[int, str]:
    """Return where its threads wait, once all of them do."""
    wait_until("they rest", lambda: (now := waits([pid])) == waits([pid]) and len(now) == 2 and all(now.values()))
    return waits([pid])


@needs_root
def test_thread_that_has_read_data_has_moved(server: tuple[subprocess.Popen[bytes], Path]) -> None:
    """It may be stopped afterwards; a process that was only stopped and continued, or returned, is unchanged."""
    running, path = server
    wait_until("it listens", path.exists)
    with socket.socket(socket.AF_UNIX) as client:
        wait_until("it accepts", lambda: client.connect_ex(str(path)) == 0)
        assert running.stdout is not None
        running.stdout.readline()
        nodes = NodeSockets()
        table = nodes.read(nodes.of_processes([running.pid]))
        assert nodes.readers([running.pid, os.getpid()], table) == (running.pid,)
        before = resting(running.pid)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(running.pid, number)
            time.sleep(0.05)
            wait_until("the threads have not moved", lambda: not went_on(before, waits([running.pid])))
        client.sendall(b"nothing")
        time.sleep(0.2)
        assert not went_on(before, resting(running.pid))
        client.sendall(b"something")
        wait_until("one is elsewhere", lambda: went_on(before, waits([running.pid])))
        assert went_on(before, resting(running.pid))
        assert [sock.unread for sock in nodes.read(nodes.of_processes([running.pid])).values() if sock.remote] == [0]
        stop(running.pid)
        assert went_on(before, nodes.waits([running.pid]))


def test_wait_locations_are_read_from_proc(tmp_path: Path) -> None:
    """Threads of CUDA, and those the kernel does not report, are skipped; a running thread has no location."""
    lines = {8: ("python", "202 0x1 0x7f 0x44"), 9: ("python", "running"), 10: ("cuda-EvtHandlr", "7 0x2 0x7f 0x45")}
    for thread, (name, line) in lines.items():
        directory = tmp_path / "8/task" / str(thread)
        directory.mkdir(parents=True)
        (directory / "comm").write_text(f"{name}\n")
        (directory / "syscall").write_text(f"{line}\n")
    (tmp_path / "8/task/11").mkdir()
    assert waits([8, 99], tmp_path) == {8: "0x7f 0x44", 9: ""}


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ({8: "a", 9: "b"}, False),
        ({8: "a"}, False),
        ({8: "a", 9: "c"}, False),
        ({8: "c", 9: "b"}, True),
        ({8: "a", 9: "b", 10: "d"}, True),
    ],
)
def test_running_threads_have_no_location(after: Mapping[int, str], expected: bool) -> None:
    """A thread that waits elsewhere, or is new, has moved; one that has ended has not."""
    assert went_on({8: "a", 9: ""}, after) is expected


LISTENER = Sock(3, "unix", LISTEN, 0, name=b"/run/s\0")
ACCEPTED = Sock(4, "unix", ESTABLISHED, 0, local=b"4", remote=b"9", name=b"/run/s\0")
BUS = Sock(5, "unix", ESTABLISHED, 0, local=b"5", remote=b"8")


def test_only_connections_to_the_job_count() -> None:
    """Connections to other processes or within the job do not count; a new connection is a request."""
    table = {sock.inode: sock for sock in (LISTENER, ACCEPTED, BUS)}
    assert sockets.uncounted(table) == {4}
    assert sockets.uncounted({**table, 6: Sock(6, "unix", ESTABLISHED, 0, local=b"9", remote=b"4")}) == frozenset()
    assert sockets.at_rest(table, table, within_s=900) is None
    assert sockets.at_rest(table, {3: LISTENER, 5: BUS}, within_s=900) == "a connection was made on a UNIX socket"
    assert sockets.at_rest(table, {3: LISTENER, 4: ACCEPTED}, within_s=900) is None


def test_listener_of_connection_is_known(tmp_path: Path) -> None:
    """The name of the listener is only known for the accepting side."""
    diag = SockDiag()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "sock"))
        listener.listen()
        client.connect(str(tmp_path / "sock"))
        accepted, _ = listener.accept()
        with accepted:
            all_of = {os.fstat(sock.fileno()).st_ino: sock for sock in (listener, client, accepted)}
            dump = diag.dump(frozenset(all_of))
    diag.close()
    names = {all_of[inode]: sock.name for inode, sock in dump.items()}
    assert names[listener] == names[accepted] != b""
    assert names[client] == b""


def test_request_read_unnoticed_wakes_job(world, node):
    """The job wakes as soon as it is frozen."""
    node.sockets.reading, node.sockets.places = (8,), {8: "waits for a request"}

    def read() -> None:
        node.sockets.places = {8: "waits for the GPU"}

    node.freezer.during = read
    assert node.sleep().failure is None
    node.round()
    assert awake(world)


def test_thread_used_by_driver_is_not_a_request(world, node):
    """It has the program's name, but the driver reports that it works through it."""
    (thread,) = node.agent.cuda.restore_threads(process.pid for process in world.nodes["c1"].processes)
    node.sockets.reading, node.sockets.places = (8,), {8: "waits for a request", thread: "waits for the driver"}

    def move() -> None:
        node.sockets.places = {8: "waits for a request", thread: "moves memory"}

    node.freezer.during = move
    assert node.sleep().failure is None
    node.round()
    assert asleep(world)


def test_next_agent_detects_request(world, node):
    """A job without a request stays suspended."""
    node.sockets.reading, node.sockets.places = (8,), {8: "waits for a request"}
    node.sleep()
    for place, sleeps in (("waits for a request", True), ("waits for the GPU", False)):
        after = Node(world)
        after.sockets.places = {8: place}
        after.recover()
        after.round()
        assert asleep(world) is sleeps
    assert awake(world)
