"""Attacks of a job's user on its files while it is suspended, and on its processes while they are restored.

Controlled as ``drive.py`` is. A process of the user changes the files and steals the descriptors.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import stat
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from drive import Driven, serve
from session import JOB, PYTHON, UID, members, wait_for

from slurm_affinode.base.pidfd import Process
from slurm_affinode.checkpoint.files import deleted_files
from slurm_affinode.checkpoint.interface import CheckpointError, InheritFd
from slurm_affinode.model.suspension import LiveRun

DIRECTORY_OF_ROOT = Path("/srv/checkpoint-attack")
"""A directory of root that all users can read."""
HIDDEN = Path("/home/bob/project")
"""A directory of another user, whose home directory others cannot enter."""
BOB = 2002
EVENTS = {0x2: "modify", 0x4: "attrib", 0x20: "open", 0x100: "create", 0x200: "delete", 0x400: "delete"}

# Each program opens files or sockets in its working directory, and waits.
VICTIMS = {
    "append": "f = open('file', 'a'); f.write('mine\\n'); f.flush()",
    "file": "open('file', 'w').close(); f = open('file')",
    "cwd": "os.mkdir('project'); os.chmod('project', 0o755); os.chdir('project')",
    "directory": "os.mkdir('project'); os.chmod('project', 0o755); f = os.open('project', os.O_RDONLY)",
    "socket": (
        "os.mkdir('place'); s = socket.socket(socket.AF_UNIX); s.bind(os.getcwd() + '/place/socket'); s.listen(1)"
    ),
    "datagrams": (
        "os.mkdir('place'); s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\ns.bind(os.getcwd() + '/place/socket')"
    ),
    "ghost": ("os.mkdir('place'); f = open('place/file', 'w+'); f.write('mine'); f.flush(); os.unlink('place/file')"),
    "watch": (
        "os.mkdir('place'); libc = ctypes.CDLL(None); i = libc.inotify_init()\n"
        "assert libc.inotify_add_watch(i, b'place', 0x300) > 0"
    ),
    "plain": "f = open('file', 'w+'); f.write('mine'); f.flush(); m = open('mapped', 'w+b'); m.write(bytes(4096))\n"
    "m.flush(); m = mmap.mmap(m.fileno(), 4096)",
    "libraries": (
        "maps = []\n"
        "for number in range(600):\n"
        "    with open(f'library-{number}', 'w+b') as f:\n"
        "        f.write(bytes(4096)); f.flush(); maps.append(mmap.mmap(f.fileno(), 4096, mmap.MAP_PRIVATE))"
    ),
    "gone": (
        "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); os.chdir('.')\n"
        "shutil.copy('/bin/sleep', '/home/alice/checkpoint-test/program')\n"
        "child = subprocess.Popen(['/home/alice/checkpoint-test/program', '1000'], cwd='/', close_fds=True)\n"
        "while not os.readlink(f'/proc/{child.pid}/exe').endswith('/program'): time.sleep(0.01)\n"
        "os.unlink('/home/alice/checkpoint-test/program')\n"
        "p = '/home/alice/checkpoint-test/'; os.mkfifo(p + 'pipe'); f = os.open(p + 'pipe', os.O_RDWR)\n"
        "os.write(f, b'x'); os.unlink(p + 'pipe')\n"
        "h = open(p + 'linked', 'w+'); h.write('linked'); h.flush(); os.link(p + 'linked', p + 'other')\n"
        "os.unlink(p + 'linked')"
    ),
    "named": (
        "os.mkdir('place'); f = open('place/file', 'w'); os.link('place/file', 'other'); os.unlink('place/file')"
    ),
    "fifo": "os.mkfifo('fifo'); f = os.open('fifo', os.O_RDWR); os.write(f, b'mine')",
    "listeners": (
        "s = socket.socket(socket.AF_UNIX); s.bind(os.getcwd() + '/socket'); os.chmod('socket', 0o640); s.listen(3)\n"
        "d = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); d.bind('datagrams')\n"
        "g = socket.socket(socket.AF_UNIX); g.bind(os.getcwd() + '/gone'); g.listen(3); os.unlink('gone')\n"
        "c = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); c.connect('/srv/checkpoint-attack/log')"
    ),
    "waiting": (
        "s = socket.socket(socket.AF_UNIX); s.bind(os.getcwd() + '/socket'); s.listen(3)\n"
        "c = socket.socket(socket.AF_UNIX); c.connect(os.getcwd() + '/socket')"
    ),
    "process": "f = open(f'/proc/{os.getpid()}/status')",
}
ASK = {
    "gone": (
        "h.seek(0); report = [os.readlink('/proc/self/cwd'), os.readlink(f'/proc/{child.pid}/exe'), child.poll(),\n"
        "        os.read(f, 1).decode(), h.read(), os.readlink(f'/proc/self/fd/{h.fileno()}'),\n"
        "        sorted(os.listdir(p))]; child.kill()"
    ),
    "ghost": "f.seek(0); report = f.read()",
    "plain": "f.seek(0); report = [f.read(), m[:4].hex()]",
    "libraries": "report = len(open('/proc/self/maps').read().split('library-')) - 1",
    "fifo": "report = os.read(f, 4).decode()",
    "cwd": "report = os.getcwd()",
    "listeners": (
        "c2 = socket.socket(socket.AF_UNIX); c2.connect(s.getsockname()); a, _ = s.accept(); c2.send(b'hello')\n"
        "e = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); e.sendto(b'data', 'datagrams')\n"
        "c.send(b'logged')\n"
        "report = [a.recv(9).decode(), d.recv(9).decode(), s.getsockname(), g.getsockname(), os.path.exists('gone'),\n"
        "        os.stat('socket').st_uid, oct(os.stat('socket').st_mode)]"
    ),
}
VICTIM = """
import ctypes, json, mmap, os, shutil, socket, subprocess, sys, time
os.chdir(sys.argv[1])
{setup}
open(sys.argv[1] + '/ready', 'w').close()
while not os.path.exists(sys.argv[1] + '/go'):
    time.sleep(0.01)
report = 'nothing'
{ask}
with open(sys.argv[1] + '/report.new', 'w') as out:
    json.dump(report, out)
os.rename(sys.argv[1] + '/report.new', sys.argv[1] + '/report')
"""

SWAPPING = """
import ctypes, os, sys
os.symlink(sys.argv[3], sys.argv[2])
libc, one, other = ctypes.CDLL(None), os.fsencode(sys.argv[1]), os.fsencode(sys.argv[2])
while True:
    assert libc.renameat2(-100, one, -100, other, 2) == 0  # RENAME_EXCHANGE
"""

THIEF = """
import ctypes, fcntl, json, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
taken, beyond, traced, memory, over = {}, [], [], [], []
signal.signal(signal.SIGTERM, lambda *_: over.append(1))
print(flush=True)
me = os.getpid()
while not over:
    for name in os.listdir('/proc'):
        if not name.isdigit() or int(name) == me:
            continue
        try:
            if os.stat('/proc/' + name).st_uid != os.getuid():
                continue
            pid = int(name)
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        for number in range(3, 24):
            fd = libc.syscall(438, pidfd, number, 0)
            if fd < 0:
                continue
            try:
                path = os.readlink(f'/proc/self/fd/{fd}')
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                if path.startswith('/') and not flags & os.O_PATH:
                    taken.setdefault(path, time.time())
                    if os.fstat(fd).st_uid != os.getuid():
                        try:
                            os.close(os.open(f'/proc/self/fd/{fd}', flags & 3 | os.O_NONBLOCK))
                        except OSError:
                            beyond.append(path)
                        os.write(fd, b'stolen by its user!!\\n')
            except OSError:
                pass
            finally:
                os.close(fd)
        os.close(pidfd)
        if pid not in traced and libc.ptrace(0x4206, pid, 0, 0) == 0:
            traced.append(pid)
            libc.ptrace(17, pid, 0, 0)
        try:
            with open(f'/proc/{pid}/mem', 'rb'):
                memory.append(time.time())
        except OSError:
            pass
print(json.dumps({'taken': taken, 'beyond': beyond, 'memory': memory[:1]}), flush=True)
"""


def as_user(code: str, *arguments: str, uid: int = UID) -> subprocess.Popen[str]:
    """Start a program of a user."""
    rights = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    words = [*rights, PYTHON, "-c", code, *arguments]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


class Seen:
    """The events that inotify reports for root's files and directories."""

    def __init__(self, *paths: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK)
        for path in paths:
            assert libc.inotify_add_watch(self._fd, os.fsencode(path), sum(EVENTS)) > 0, path

    def events(self) -> list[str]:
        """Return the events received so far."""
        result, data = set(), b""
        with suppress(BlockingIOError):
            data = os.read(self._fd, 1 << 16)
        while data:
            mask, length = int.from_bytes(data[4:8], "little"), int.from_bytes(data[12:16], "little")
            # Every user may open a directory to search or list it.
            result |= {name for bit, name in EVENTS.items() if mask & bit and not (bit == 0x20 and mask & 0x40000000)}
            data = data[16 + length :]
        return sorted(result)


class Attacks(Driven):
    """A session with attacks by the user of the job."""

    seen: Seen | None = None
    thief: subprocess.Popen[str] | None = None
    held: tuple[float, float] = (0.0, 0.0)

    def victim(self, name: str) -> None:
        """Start a process tree with the open files of ``VICTIMS[name]``, and wait until it is ready."""
        shutil.rmtree(DIRECTORY_OF_ROOT, ignore_errors=True)
        DIRECTORY_OF_ROOT.mkdir(mode=0o755)
        shutil.rmtree(HIDDEN, ignore_errors=True)
        HIDDEN.mkdir(mode=0o755)
        os.chown(HIDDEN, BOB, BOB)
        HIDDEN.parent.chmod(0o700)
        if name == "listeners":
            self.log = subprocess.Popen(
                [PYTHON, "-c", "import socket, sys, os\ns = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
                 f"s.bind('{DIRECTORY_OF_ROOT}/log'); os.chmod('{DIRECTORY_OF_ROOT}/log', 0o666)\n"
                 f"open('{DIRECTORY_OF_ROOT}/received', 'wb').write(s.recv(99))"],
            )  # fmt: skip
            wait_for("the log", (DIRECTORY_OF_ROOT / "log").exists)
        code = VICTIM.format(setup=VICTIMS[name], ask=ASK.get(name, ""))
        self.shepherd(PYTHON, "-Wignore", "-c", code, str(self.work))
        wait_for("the victim", (self.work / "ready").exists)
        self.see_stopped()
        self.root = min(members(self.init))

    def swap(self, name: str, what: str) -> None:
        """Replace a file or directory of the user while the job is suspended."""
        self.end()
        (path := self.work / name).lstat()
        mode = stat.S_IMODE(path.stat().st_mode)
        target = DIRECTORY_OF_ROOT / path.name
        if what == "file":
            target.write_text("root's\n")
            target.chmod(mode)
        elif what == "fifo":
            os.mkfifo(target)
            target.chmod(0o600)
        elif what == "device":
            os.mknod(target, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        elif what == "directory":
            target.mkdir()
            target.chmod(mode)
            if name == "place":
                made = subprocess.run(
                    [PYTHON, "-c", f"import socket; socket.socket(socket.AF_UNIX).bind('{target}/socket')"], check=True
                )
                assert made.returncode == 0
        elif what == "hidden":
            target = HIDDEN
        elif what == "own fifo":
            code = "import os, sys; os.unlink(sys.argv[1]); os.mkfifo(sys.argv[1], 0o644)"
            assert as_user(code, str(path)).wait() == 0
            return
        code = "import os, sys; os.rename(sys.argv[1], sys.argv[1] + '.before'); os.symlink(sys.argv[2], sys.argv[1])"
        assert as_user(code, str(path), str(target)).wait() == 0
        self.seen = Seen(target)

    def steal(self) -> None:
        """Start to steal the descriptors of all processes of the user."""
        self.thief = as_user(THIEF)
        assert self.thief.stdout is not None
        self.thief.stdout.readline()

    def stolen(self) -> dict[str, Any]:
        """Return the stolen descriptors, and when a restored process tree was held."""
        assert self.thief is not None
        self.thief.send_signal(signal.SIGTERM)
        report, _ = self.thief.communicate(timeout=30)
        return {**json.loads(report), "held": self.held}

    def dump_swapped(self, times: int) -> list[str]:
        """Dump while the user swaps a directory with a link to one of root's; return the names in root's directory."""
        directory_of_root = Path("/home/checkpoint-attack")  # on the file system of the user's files, as links need
        shutil.rmtree(directory_of_root, ignore_errors=True)
        directory_of_root.mkdir(mode=0o755)
        swapping = as_user(SWAPPING, str(self.work / "place"), str(self.work / "link"), str(directory_of_root))
        try:
            for _ in range(times):
                with suppress(CheckpointError):
                    self.dump()
                self.store.discard(JOB, 1)
                self.resume()
        finally:
            swapping.kill()
            swapping.wait()
        return sorted(path.name for path in directory_of_root.iterdir())

    def restore_victim(self, shared: bool = False, swap: str | None = None) -> float:
        """Restore the victim; return the duration in seconds. ``swap``: image file to change after its verification."""
        self.end()
        init = self.shepherd()
        image = self.store.find(LiveRun(replace(JOB, submit_epoch=200), UID, 1))
        assert image is not None
        self.root = image.manifest.root_pid
        began = time.monotonic()

        def ready() -> None:
            self.held = self.held[0], time.time()

        with self.store.verifying(image) as pages, self.out.open("ab") as out:
            fd = self.store.open_criu(image)
            try:
                if swap is not None:
                    self._change(fd, swap)
                self.criu.restore(
                    Process(init).id, fd, [InheritFd(out.fileno(), str(self.out).lstrip("/"))], root_pid_ns=self.root,
                    timeout_s=40, pages=pages, user=self.owner, shared=shared, ready=ready,
                )  # fmt: skip
            finally:
                os.close(fd)
        deleted_files.gone(self.store, image, Process(init).id)
        return time.monotonic() - began

    def _change(self, fd: int, name: str) -> None:
        """Change the file as someone with write access to the file server would."""
        path = Path(f"/proc/self/fd/{fd}").readlink() / name
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data.replace(b"file", b"life"))
        path.chmod(0o600)

    def root_events(self) -> list[str]:
        """Return the events for root's files."""
        return [] if self.seen is None else self.seen.events()

    def report(self) -> Any:
        """Return the victim's report after it has continued."""
        (self.work / "go").touch()
        wait_for("the victim", (self.work / "report").exists)
        return json.loads((self.work / "report").read_text())

    def received(self) -> str:
        """Return the data received by root's socket."""
        wait_for(
            "the datagram",
            lambda: (DIRECTORY_OF_ROOT / "received").exists() and (DIRECTORY_OF_ROOT / "received").read_text(),
        )
        return (DIRECTORY_OF_ROOT / "received").read_text()

    def root_names(self) -> list[str]:
        """Return the names in root's directory."""
        return sorted(path.name for path in DIRECTORY_OF_ROOT.rglob("*"))


if __name__ == "__main__":
    serve(Attacks)
