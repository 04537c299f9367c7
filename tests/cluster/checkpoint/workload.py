"""Workload that test_checkpoint.py dumps and restores: it uses many kernel features and verifies them afterwards.

``workload.py DIRECTORY FEATURE...``: creates ``ready`` when everything is set up. When ``go`` exists, it checks that
everything is unchanged, writes its results to ``done`` (JSON: feature -> "ok" or the difference), and exits with 0 if
all are "ok".
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import multiprocessing
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gpu_memory import cuda, fill

Check = Callable[[], str]
MIB = 1 << 20


def wrong(what: object) -> str:
    """Return a result other than "ok"."""
    return f"wrong: {what}"


def memory(_: Path) -> Iterator[Check | str]:
    """Host memory with random contents."""
    data = random.Random(1).randbytes(30 * MIB)  # noqa: S311
    digest = hashlib.sha256(data).hexdigest()
    yield lambda: "ok" if hashlib.sha256(data).hexdigest() == digest else wrong("contents")


def threads(_: Path) -> Iterator[Check | str]:
    """Threads that count and wait for each other."""
    counts = [0, 0, 0]
    stop = threading.Event()

    def count(index: int) -> None:
        while not stop.wait(0.005):
            counts[index] += 1

    made = [threading.Thread(target=count, args=(index,), daemon=True) for index in range(3)]
    for thread in made:
        thread.start()

    def check() -> str:
        before = list(counts)
        deadline = time.monotonic() + 10
        while any(now <= then for now, then in zip(counts, before, strict=True)):
            if time.monotonic() > deadline:
                return wrong(f"{before} {counts}")
            time.sleep(0.01)
        stop.set()
        for thread in made:
            thread.join(5)
        return "ok"

    yield check


def files(directory: Path) -> Iterator[Check | str]:
    """Open files: one that is appended to, one read halfway, one written and deleted; and an open directory."""
    (directory / "read").write_text("0123456789")
    reading = (directory / "read").open()
    reading.read(4)
    appending = (directory / "append").open("a")
    appending.write("before\n")
    appending.flush()
    deleted = (directory / "deleted").open("w+b")
    deleted.write(b"x" * (3 * MIB))
    deleted.flush()
    (directory / "deleted").unlink()
    opened = os.open(directory, os.O_RDONLY)

    def check() -> str:
        appending.write("after\n")
        appending.flush()
        deleted.seek(0)
        result = (
            reading.read(), (directory / "append").read_text(), hashlib.sha256(deleted.read()).hexdigest(),
            min(entry.name for entry in os.scandir(opened)),
        )  # fmt: skip
        expected = ("456789", "before\nafter\n", hashlib.sha256(b"x" * (3 * MIB)).hexdigest(), "append")
        return "ok" if result == expected else wrong(result)

    yield check


def shm(_: Path) -> Iterator[Check | str]:
    """Memory shared by processes: anonymous, and an unlinked file in /dev/shm, as PyTorch's loaders use."""
    anonymous = mmap.mmap(-1, MIB)
    path = Path(f"/dev/shm/workload-{os.getpid()}")  # noqa: S108
    with path.open("w+b") as file:
        file.truncate(MIB)
        unlinked = mmap.mmap(file.fileno(), MIB)
    path.unlink()
    anonymous[:6] = unlinked[:6] = b"shared"
    request, answer = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(request[0], 1)
        anonymous[10:15] = unlinked[10:15] = b"child"
        os.write(answer[1], b"1")
        os._exit(0)

    def check() -> str:
        os.write(request[1], b"1")
        os.read(answer[0], 1)
        os.waitpid(child, 0)
        result = [anonymous[:15], unlinked[:15]]
        return "ok" if result == [b"shared\0\0\0\0child"] * 2 else wrong(result)

    yield check


def named(_: Path) -> Iterator[Check | str]:
    """Node-local files: shared memory, a semaphore, a file and a socket in new directories, a named pipe."""
    name = f"workload-{os.getuid()}"
    libc = ctypes.CDLL(None)
    libc.sem_open.restype = ctypes.c_void_p
    libc.sem_unlink(f"/{name}".encode())
    semaphore = ctypes.c_void_p(libc.sem_open(f"/{name}".encode(), os.O_CREAT, 0o600, 3))
    path, directory = Path(f"/dev/shm/{name}"), Path(f"/tmp/{name}")  # noqa: S108
    for stale in (path, directory / "deep" / "scratch", directory / "fifo", directory / "own" / "socket"):
        stale.unlink(missing_ok=True)
    with path.open("w+b") as file:
        file.truncate(3 * MIB)
        shared = mmap.mmap(file.fileno(), 3 * MIB)
    shared[MIB : MIB + 5] = b"named"
    (directory / "deep").mkdir(parents=True, exist_ok=True)
    scratch = (directory / "deep" / "scratch").open("w+")
    scratch.write("written")
    scratch.flush()
    os.mkfifo(directory / "fifo")
    fifo = os.open(directory / "fifo", os.O_RDWR)
    os.write(fifo, b"waiting")
    (directory / "own").mkdir(exist_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(directory / "own" / "socket"))
    listening.listen()

    def check() -> str:
        scratch.seek(0)
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(directory / "own" / "socket"))
            listening.accept()
        value = ctypes.c_int()
        libc.sem_post(ctypes.c_void_p(libc.sem_open(f"/{name}".encode(), 0)))
        libc.sem_getvalue(semaphore, ctypes.byref(value))
        libc.sem_unlink(f"/{name}".encode())  # the next workload on this node expects the initial value
        if value.value != 4:
            return wrong(f"semaphore {value.value}")
        result = (shared[MIB : MIB + 5], path.read_bytes()[MIB : MIB + 5], scratch.read(), os.read(fifo, 100))
        return "ok" if result == (b"named", b"named", "written", b"waiting") else wrong(result)

    yield check


def pipes(_: Path) -> Iterator[Check | str]:
    """A pipe with data, an epoll and an eventfd."""
    reading, writing = os.pipe()
    os.write(writing, b"in the pipe")
    event = os.eventfd(3)
    poll = select.epoll()
    poll.register(reading, select.EPOLLIN)

    def check() -> str:
        result = (os.read(reading, 100), os.eventfd_read(event), [])
        os.write(writing, b"more")
        result = (*result[:2], [fd == reading for fd, _ in poll.poll(5)])
        return "ok" if result == (b"in the pipe", 3, [True]) else wrong(result)

    yield check


def sockets(_: Path) -> Iterator[Check | str]:
    """A listening socket, a connection within the process tree, and socket pairs, with data in flight."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    server, _address = listening.accept()
    client.send(b"in flight")
    first, other = socket.socketpair()
    first.send(b"in the pair")
    datagram = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagram.bind(("127.0.0.1", 0))

    def check() -> str:
        for connection in (client, server):
            connection.settimeout(5)
        try:
            ends = [server.recv(20)]
            server.send(b"back")
            ends.append(client.recv(20))
        except OSError as error:
            return wrong(error)
        with socket.create_connection(("127.0.0.1", port), timeout=5) as again:
            accepted, _ = listening.accept()
            accepted.send(b"hello")
            hello = again.recv(10)
        result = (ends, hello, other.recv(20))
        return "ok" if result == ([b"in flight", b"back"], b"hello", b"in the pair") else wrong(result)

    yield check


def timers(_: Path) -> Iterator[Check | str]:
    """An interval timer and a sleeping thread."""
    ticks = [0]
    signal.signal(signal.SIGALRM, lambda *_: ticks.__setitem__(0, ticks[0] + 1))
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    slept = threading.Event()
    threading.Thread(target=lambda: (time.sleep(2), slept.set()), daemon=True).start()

    def check() -> str:
        before, deadline = ticks[0], time.monotonic() + 10
        while ticks[0] < before + 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return "ok" if ticks[0] >= before + 5 and slept.wait(10) else wrong(ticks)

    yield check


def children(directory: Path) -> Iterator[Check | str]:
    """A child in its own session, a grandchild, a stopped child, and a zombie."""
    script = (
        "import os,sys,time\nwhile not os.path.exists(sys.argv[1]): time.sleep(.02)\nprint('continued', flush=True)"
    )
    leader = subprocess.Popen(
        [sys.executable, "-c", script, str(directory / "go")], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    shell = subprocess.Popen(
        ["sh", "-c", f'while [ ! -e "{directory}/go" ]; do sleep 0.05; done & wait; echo shell'],
        stdout=subprocess.PIPE,
        text=True,
    )
    stopped = subprocess.Popen(["sleep", "1000"])
    stopped.send_signal(signal.SIGSTOP)
    zombie = os.fork()
    if zombie == 0:
        os._exit(7)

    def check() -> str:
        state = Path(f"/proc/{stopped.pid}/stat").read_text().rpartition(")")[2].split()[0]
        stopped.kill()
        result = (
            leader.communicate(timeout=10)[0], shell.communicate(timeout=10)[0], state, stopped.wait(),
            os.waitstatus_to_exitcode(os.waitpid(zombie, 0)[1]), os.getsid(0) == os.getpid(),
        )  # fmt: skip
        return "ok" if result == ("continued\n", "shell\n", "T", -9, 7, True) else wrong(result)

    yield check


DETACHED = """
import os, sys, time
if os.fork(): os._exit(0)
if sys.argv[1] != "once": os.setsid()
if sys.argv[1] == "twice" and os.fork(): os._exit(0)
while os.getppid() != int(sys.argv[3]): time.sleep(0.01)
number, file = 0, open(sys.argv[2], "a", buffering=1)
while True:
    number += 1
    file.write(f"{number} {os.getpid()} {os.getppid()}\\n")
    time.sleep(0.05)
"""


def daemons(directory: Path) -> Iterator[Check | str]:
    """Daemons: in this session, in a session of their own, and in one whose leader has ended."""

    def rows(kind: str) -> list[list[str]]:
        return [line.split() for line in (directory / f"daemon-{kind}").read_text().splitlines(keepends=True)[:-1]]

    def wait(kind: str, count: int) -> list[list[str]]:
        deadline = time.monotonic() + 10
        while len(result := rows(kind)) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        return result

    kinds = ("once", "leads", "twice")
    for kind in kinds:
        (directory / f"daemon-{kind}").touch()
        argv = [sys.executable, "-c", DETACHED, kind, str(directory / f"daemon-{kind}"), str(os.getpid())]
        subprocess.run(argv, check=True)
    before = {kind: len(wait(kind, 3)) for kind in kinds}

    def check() -> str:
        waits = {kind: wait(kind, len(rows(kind)) + 3) for kind in kinds}
        for kind, lines in waits.items():
            pid = int(lines[0][1])
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            counted = [str(number) for number in range(1, len(lines) + 1)]
            if len(lines) < before[kind] + 3 or lines != [[item, str(pid), str(os.getpid())] for item in counted]:
                return wrong(f"{kind} {lines[-1]}")
        return "ok"

    yield check


def output(_: Path) -> Iterator[Check | str]:
    """Standard output and error."""
    os.write(1, b"out before\n")
    os.write(2, b"err before\n")

    def check() -> str:
        os.write(1, b"out after\n")
        os.write(2, b"err after\n")
        return "ok"

    yield check


def gpu(_: Path) -> Iterator[Check | str]:
    """Memory of the first GPU, and a thread that blocks in driver calls."""
    d, ok = cuda()
    equal = fill(0, 20)
    called = [0]
    stop = threading.Event()

    def call() -> None:
        ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(0))))
        while not stop.is_set():
            ok(d.cuCtxSynchronize())
            called[0] += 1
            time.sleep(0.005)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()

    def check() -> str:
        before, deadline = called[0], time.monotonic() + 10
        while called[0] < before + 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        stop.set()
        thread.join(5)
        return "ok" if equal() and called[0] >= before + 3 else wrong(called)

    yield check


def gpus(_: Path) -> Iterator[Check | str]:
    """Two more processes, one per GPU, started by fork and exec as launchers do."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from gpu_memory import fill\n" + (
        "e = fill(int(sys.argv[1]), 10); print('filled', flush=True); sys.stdin.readline(); print(e(), flush=True)"
    )
    made = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(ordinal)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for ordinal in (0, 1)
    ]
    for item in made:
        if item.stdout is None or item.stdout.readline() != "filled\n":
            yield wrong("not filled")

    def check() -> str:
        result = [entry.communicate("\n", timeout=30)[0] for entry in made]
        return "ok" if result == ["True\n"] * 2 else wrong(result)

    yield check


def device_files() -> tuple[dict[int, str], list[int]]:
    """Return this process's descriptors of NVIDIA device files, and the addresses at which such files are mapped."""
    opened = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            opened[int(link.name)] = str(link.readlink())
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/nvidia" in line]
    opened = {fd: path for fd, path in opened.items() if path.startswith("/dev/nvidia")}
    return opened, [int(line.partition("-")[0], 16) for line in lines]


def replaced(fds: dict[int, str], mapped: list[int]) -> str:
    """Check, in a worker, that its device files have become /dev/null and memory that cannot be accessed."""
    targets = {str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in fds}
    if device_files() != ({}, []) or targets - {"/dev/null"}:
        return wrong((device_files(), targets))
    for address in mapped:
        child = os.fork()
        if child == 0:
            ctypes.string_at(address, 1)
            os._exit(0)
        if os.waitpid(child, 0)[1] != signal.SIGBUS:
            return wrong(f"{address:#x} can be read")
    return "ok"


def _with_worker(*, restored: bool) -> Iterator[Check | str]:
    equal = fill(0, 5)
    context = multiprocessing.get_context("fork")
    requests, answers = context.Queue(), context.Queue()

    def work() -> None:
        before = device_files()
        answers.put("ok" if all(before) else wrong(f"inherited {before}"))
        while requests.get():
            changed = restored and os.major(Path("/dev/nvidia0").stat().st_rdev) != 1  # CRIU dumps /dev/null itself
            answers.put(replaced(*before) if changed else "ok" if device_files() == before else wrong(device_files()))

    worker = context.Process(target=work)
    worker.start()
    began = answers.get(timeout=20)
    descriptors = sorted(Path(f"/proc/{worker.pid}/fd").iterdir())

    def check() -> str:
        requests.put(True)
        result, now = answers.get(timeout=20), sorted(Path(f"/proc/{worker.pid}/fd").iterdir())
        requests.put(False)
        worker.join(20)
        if (now, worker.exitcode, equal()) != (descriptors, 0, True):
            return wrong((now, descriptors, worker.exitcode))
        return str(result)

    yield check if began == "ok" else str(began)


def forked(_: Path) -> Iterator[Check | str]:
    """A worker forked by a process that uses CUDA, as by a data loader: it has no device files after a restore."""
    yield from _with_worker(restored=True)


def forked_kept(_: Path) -> Iterator[Check | str]:
    """The same worker after a suspension that was rolled back: it still has its device files."""
    yield from _with_worker(restored=False)


def keys(_: Path) -> Iterator[Check | str]:
    """Check that no key of another user is accessible after the restore."""

    def check() -> str:
        libc = ctypes.CDLL(None, use_errno=True)
        result = int(libc.syscall(250, 10, -3, b"user", b"checkpoint-test-of-root", 0))  # KEYCTL_SEARCH
        return "ok" if result < 0 else wrong(f"key {result} of root's")

    yield check


FEATURES = {
    f.__name__: f
    for f in (
        memory, threads, files, shm, named, pipes, sockets, timers, children, daemons, output, gpu, gpus, forked,
        forked_kept, keys,
    )
}  # fmt: skip


def main() -> None:
    """Set up the features, wait, and verify them."""
    directory, names = Path(sys.argv[1]), sys.argv[2:] or list(FEATURES)
    checks = {name: next(FEATURES[name](directory)) for name in names}
    (directory / "ready").touch()
    while not (directory / "go").exists():
        time.sleep(0.02)
    result = {}
    for name, check in checks.items():
        try:
            result[name] = check if isinstance(check, str) else check()
        except Exception as error:
            result[name] = wrong(f"{type(error).__name__}: {error}")
    (directory / "done.new").write_text(json.dumps(result))
    (directory / "done.new").rename(directory / "done")
    with contextlib.suppress(OSError):
        os.closerange(3, 100)
    os._exit(0 if set(result.values()) == {"ok"} else 1)


if __name__ == "__main__":
    main()
