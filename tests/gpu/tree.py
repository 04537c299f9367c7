"""A program in its own PID namespace, like a job: started there, dumped from outside, restored in another namespace."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpu.machine import MIB
from gpu.programs import HERE, Program, undisturbed
from slurm_affinode.base.pidfd import Namespace, Process
from slurm_affinode.checkpoint.criu.criu import Criu
from slurm_affinode.checkpoint.interface import CheckpointError, Tree
from slurm_affinode.checkpoint.store.image_store import DirectoryStore
from slurm_affinode.checkpoint.user_files import User
from slurm_affinode.model.suspension import JobKey, Manifest, SuspendOption, Versions
from slurm_affinode.suspension.job.process_tree import LinuxProcesses, StoppedJob

OWNER = User(65534, 65534)
"""The owner of trees that are dumped: root acts for no process of its own."""
_INIT = """
import os, subprocess, sys, time
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
os.chdir(os.path.dirname(sys.argv[1]))  # below directories that are closed to the owner
if uid := int(sys.argv[2]):
    os.setgroups(())
    os.setgid(uid)
    os.setuid(uid)
if len(sys.argv) > 4 and os.fork() == 0:
    os.chdir(sys.argv[3])
    os.execv(sys.argv[4], sys.argv[4:])
open(os.path.basename(sys.argv[1]), "w").close()
while True:
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        time.sleep(0.005)
"""
_PLAIN = "import sys; sys.path.insert(0, sys.argv[1]); import protocol; from pathlib import Path; protocol.detach(); "
_PLAIN += "protocol.serve(Path(sys.argv[2]), {})"
_DEADLINE_S = 60.0
_SIOCGIFFLAGS, _IFF_UP = 0x8913, 1


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace, with its PID 1 in the outer namespace."""

    init: int

    def root(self) -> tuple[int, int]:
        """Return the inner and outer PID of its only process."""
        ((inner, outer),) = self.members().items()
        return inner, outer

    def members(self) -> dict[int, int]:
        """Return inner PID -> outer PID, for all processes but PID 1."""
        return Namespace(Process(self.init)).members()


@contextlib.contextmanager
def space(
    work: Path, *command: str, env: Mapping[str, str] | None = None, owner: User | None = None
) -> Iterator[Space]:  # fmt: skip
    """Create a namespace, optionally with a command as the only process below its PID 1. It ends with the context.

    ``owner``: the user as whom its processes run, root by default.
    """
    signals = work / f"init-{time.monotonic_ns()}"
    signals.mkdir()
    signals.chmod(0o777)
    token = signals / "up"
    # It also ends if its parent is killed: otherwise a stopped server would remain forever.
    argv = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    argv += ["unshare", "--pid", "--mount", "--fork", "--kill-child", sys.executable, "-c", _INIT, str(token)]
    argv += ["0", str(Path.cwd())] if owner is None else [str(owner.uid), "/"]
    made: subprocess.Popen[bytes] | None = None
    try:
        with undisturbed():
            made = subprocess.Popen([*argv, *command], stdin=subprocess.DEVNULL, env=env)
        deadline = time.monotonic() + _DEADLINE_S
        while not token.exists():
            if made.poll() is not None or time.monotonic() > deadline:
                raise AssertionError("no PID namespace could be made")
            time.sleep(0.005)
        children = Path(f"/proc/{made.pid}/task/{made.pid}/children").read_text(encoding="ascii").split()
        with Process(int(children[0])) as init:
            try:
                yield Space(init.pid)
            finally:
                # With another user, it receives no signal when its parent ends.
                with contextlib.suppress(ProcessLookupError):
                    init.signal(signal.SIGKILL)
    finally:
        if made is not None:
            made.kill()
            made.wait()


def can() -> str | None:
    """Return why CRIU cannot work here; ``None``: it can."""
    if os.geteuid() != 0:
        return "CRIU and namespaces need root"
    if not Path("/proc/sys/kernel/ns_last_pid").exists():
        return "this kernel is built without CONFIG_CHECKPOINT_RESTORE, which CRIU needs"
    return loopback() or namespaces()


def trial(criu: Criu, work: Path) -> str | None:
    """Return why CRIU cannot dump and restore a plain process here; ``None``: it can.

    Root may lack a capability (in a container), or the kernel a feature: that is unrelated to GPUs.
    """
    if (why := _barred()) is not None:
        return f"CRIU cannot dump a plain process here: {why}"
    key = JobKey("plain", 1, 1)
    store = DirectoryStore(work / "plain-images", os.urandom(32))
    try:
        with (
            directory() as place,
            space(work, sys.executable, "-c", _PLAIN, str(HERE), str(place), owner=OWNER) as first,
        ):
            Program(place).ready()
            inner, _ = first.root()
            with store.begin(key, uid=OWNER.uid, estimate=64 * MIB) as writer:
                writer.follow()
                dump(criu, first, writer.criu_fd, timeout_s=_DEADLINE_S)
                image = writer.commit(manifest(key, inner, 0))
        with space(work, owner=OWNER) as second:
            fd = store.open_criu(image)
            try:
                with store.verifying(image) as pages:
                    criu.restore(
                        Process(second.init).id, fd, [], root_pid_ns=inner, timeout_s=_DEADLINE_S, pages=pages,
                        user=OWNER,
                    )  # fmt: skip
            finally:
                os.close(fd)
    except CheckpointError as error:
        return f"CRIU cannot dump a plain process here and restore it: {error}"
    finally:
        for item in store.images():
            if not isinstance(item, Exception):
                store.remove(item)
        store.close()
    return None


def _barred() -> str | None:
    """Return why the owner cannot run the programs of these tests; ``None``: it can."""
    argv = [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[1]); import protocol", str(HERE)]
    try:
        ran = subprocess.run(
            argv, user=OWNER.uid, group=OWNER.gid, extra_groups=(), cwd="/", check=False, capture_output=True
        )
    except OSError as error:
        return f"only root can run {sys.executable}: {error.strerror}"
    message = ran.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return None if ran.returncode == 0 else f"only root can run the programs of these tests: {message}"


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """Create a directory of the owner for a program."""
    with tempfile.TemporaryDirectory() as made:
        os.chown(made, OWNER.uid, OWNER.gid)
        Path(made).chmod(0o755)
        yield Path(made)


def dump(criu: Criu, of: Space, directory_fd: int, *, timeout_s: float) -> None:
    """Stop the only process of a namespace and dump it. It stays stopped, or runs on if it cannot be dumped."""
    init, processes = Process(of.init).id, LinuxProcesses()
    inner, outer = of.root()
    stop = StoppedJob(processes, init)
    try:
        stop.stop(timeout_s=_DEADLINE_S)
        criu.dump(Tree(init, outer, inner, OWNER), directory_fd, timeout_s=timeout_s, stop=stop)
    except BaseException:
        stop.release()
        processes.resume(processes.all_processes(*init))
        raise
    finally:
        stop.release()


def manifest(key: JobKey, root: int, mib: int) -> Manifest:
    """Return the agent's manifest for a job with one process, ``root``, and this much GPU memory."""
    return Manifest(
        key=key, seq=0, uid=OWNER.uid, gid=OWNER.gid, node="here", restarts=0, started_epoch=0.0, dumped_epoch=0.0,
        option=SuspendOption(), versions=Versions("", "", ""), root_pid=root, cuda_pids=(root,), gpus=(),
        gpu_bytes=mib * MIB, outputs=(), files=(),
    )  # fmt: skip


def namespaces() -> str | None:
    """Return why no PID namespace can be created here; ``None``: it can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return "this kernel is built without CONFIG_PROC_CHILDREN"
    steps = "mount --make-rprivate / && mount -t proc proc /proc"
    try:
        probe = subprocess.run(
            ["unshare", "--pid", "--mount", "--fork", "sh", "-c", steps], check=False, capture_output=True, timeout=240
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no namespaces here: {error}"
    message = probe.stderr.decode(errors="replace").strip()
    return None if probe.returncode == 0 else f"no namespaces of its own can be had here: {message}"


def loopback() -> str | None:
    """Return why the loopback interface is down, which CRIU uses at startup; ``None``: it is up.

    Source: netdevice(7).
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):
        answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("16sH22x", b"lo", 0))
        if struct.unpack_from("16xH", answer)[0] & _IFF_UP:
            return None
    return "the loopback interface is down: ip link set lo up"
